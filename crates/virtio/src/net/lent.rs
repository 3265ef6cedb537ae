//! Frames of a transmit queue that are lent to their receivers: in flight in the ring until their memory is the queue's again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ioplane_device::PollCost;
use ioplane_network::{MOST_LENT, PortTx, Reclaim, Reclaimed};

use crate::queue::Queue;
use crate::ring::RingRequest;

/// How long a frame stays lent before it is copied into its receiver's buffer: a receiver that keeps up takes it within a turn of its core.
const PATIENCE: Duration = Duration::from_micros(200);

/// The requests whose frames are lent, in the order of [`PortTx::lend`].
pub(super) struct LentRequests {
    requests: VecDeque<(RingRequest, Instant)>,
    /// The core wants to sleep: nobody looks whether receivers are done.
    hurry: bool,
}

impl LentRequests {
    pub(super) fn new() -> Self {
        LentRequests { requests: VecDeque::with_capacity(MOST_LENT), hurry: false }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Keeps a request whose frame has been lent at `now`: nobody has it in hand until its frame is the queue's again.
    #[inline]
    pub(super) fn push(&mut self, taken: RingRequest, now: Instant, queue: &mut Queue) {
        queue.ring.release(&taken);
        self.requests.push_back((taken, now));
    }

    /// The core is about to sleep. False if that must wait.
    #[inline]
    pub(super) fn may_sleep(&mut self) -> bool {
        self.hurry = !self.requests.is_empty();
        !self.hurry
    }

    /// Completes those whose receivers are done. Copies those that have been lent for too long, or all of them if the queue `ends` or its core wants to
    /// sleep, as long as `cost` is not used up.
    #[inline]
    pub(super) fn settle(
        &mut self,
        port_tx: &mut PortTx,
        queue: &mut Queue,
        now: Instant,
        ends: bool,
        cost: &mut PollCost,
    ) {
        while let Some((_, since)) = self.requests.front() {
            let at_once = ends || self.hurry || now.saturating_duration_since(*since) > PATIENCE;
            let sent = match port_tx.reclaim(Reclaim::IfDone) {
                None if at_once && !cost.is_used_up() => {
                    port_tx.reclaim(Reclaim::Copy).inspect(|reclaimed| {
                        let Reclaimed::Sent(bytes) = reclaimed else { return };
                        cost.spend(*bytes as u64);
                    })
                }
                other => other,
            };
            let Some(Reclaimed::Sent(bytes)) = sent else { break };
            self.complete(queue, bytes);
        }
    }

    /// Takes all frames back: those that a receiver has are completed, the others stay in flight for whoever goes on with the ring. False if
    /// a receiver copies one at this moment.
    pub(super) fn withdraw(&mut self, port_tx: &mut PortTx, queue: &mut Queue) -> bool {
        while !self.requests.is_empty() {
            match port_tx.reclaim(Reclaim::Revoke) {
                Some(Reclaimed::Sent(bytes)) => self.complete(queue, bytes),
                Some(Reclaimed::Revoked) => {
                    if let Some((taken, _)) = self.requests.pop_front() {
                        taken.abandon();
                    }
                }
                None => return false,
            }
        }
        true
    }

    #[inline]
    fn complete(&mut self, queue: &mut Queue, bytes: usize) {
        let Some((taken, _)) = self.requests.pop_front() else { return };
        queue.ring.touch(&taken);
        queue.tally.bytes_written += bytes as u64;
        queue.ring.complete(taken, 0);
    }
}

impl Drop for LentRequests {
    /// What is lent stays in flight in the ring and its journal.
    fn drop(&mut self) {
        self.requests.drain(..).for_each(|(taken, _)| taken.abandon());
    }
}
