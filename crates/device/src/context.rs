//! What an I/O core lends its pollers for the length of one poll.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::{self, Clock, Monotonic};
use crate::io::{CoreIo, IoCompletion, IoHandle};
use crate::limits::SlotLimits;

/// Bytes of [`CoreContext::scratch`]: room for the longest frame of a network, with headers.
pub const SCRATCH: usize = 128 << 10;

/// What the pollers of one core share: its clock, its scratch memory and its ring. One for each core, on the core's thread; whoever steps
/// slots by hand has one of its own.
pub struct CoreContext {
    clock: Arc<dyn Clock>,
    now: Instant,
    scratch: Box<[u8; SCRATCH]>,
    io: Option<Box<dyn CoreIo>>,
    slot: usize,
    /// Of the slot that is being stepped.
    limits: Option<Box<SlotLimits>>,
    /// When the request may pass that a limit has held back in this poll.
    limited: Option<Instant>,
    epoch: Instant,
    /// Bytes that were handed to backings and have yet to end, and bytes that have ended, since the core has asked last.
    submitted: u64,
    completed: u64,
    lacked_room: bool,
    kicked: Instant,
    /// Not 0 while `now` is when work ended: 2 in the poll that has done the work, 1 in the poll after it.
    work_ended: u8,
}

impl CoreContext {
    /// A context that tells the time by `clock`. Allocates.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let scratch = vec![0; SCRATCH].into_boxed_slice().try_into();
        let now = clock.now();
        let scratch = scratch.unwrap_or_else(|_| unreachable!("made that long"));
        let epoch = clock::epoch();
        CoreContext {
            clock,
            now,
            scratch,
            io: None,
            slot: 0,
            limits: None,
            limited: None,
            epoch,
            submitted: 0,
            completed: 0,
            lacked_room: false,
            kicked: now,
            work_ended: 0,
        }
    }

    /// The same, with a ring.
    pub fn with_io(self, io: Option<Box<dyn CoreIo>>) -> Self {
        CoreContext { io, ..self }
    }

    /// The core's last look at the clock: never later than now, and some tens of microseconds ago at most while it has work.
    /// Costs a load.
    #[inline]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Looks at the clock, which the core does now and then; some 25 ns.
    #[inline]
    pub fn look(&mut self) -> Instant {
        self.now = self.clock.now();
        self.now
    }

    /// What has woken an armed queue just now, its driver's kick as a rule, came at about this time or later. While the core was awake that is
    /// when it had asked for kicks last; after a sleep it is as long before its end as a wake-up takes on this core.
    #[inline]
    pub fn kicked(&self) -> Instant {
        self.kicked
    }

    /// The core's side: see [`CoreContext::kicked`].
    #[inline]
    pub fn set_kicked(&mut self, kicked: Instant) {
        self.kicked = kicked;
    }

    /// Processor time of this thread, if the clock knows it. Costs a system call.
    pub fn thread_cpu(&self) -> Option<Duration> {
        self.clock.thread_cpu()
    }

    /// When the work of this poll begins. If the poll just before had work, that is when its work ended, which spares a look at the clock;
    /// otherwise it is now.
    #[inline]
    pub fn work_begins(&mut self) -> Instant {
        if self.work_ended == 0 { self.look() } else { self.now }
    }

    /// Says that the work of this poll ends now, and looks at the clock for it.
    #[inline]
    pub fn work_ends(&mut self) -> Instant {
        self.work_ended();
        self.look()
    }

    /// Says that the work of this poll has ended with its last look at the clock.
    #[inline]
    pub fn work_ended(&mut self) {
        self.work_ended = 2;
    }

    /// Memory for what a poller needs within one poll. Holds whatever the last one left there.
    #[inline]
    pub fn scratch(&mut self) -> &mut [u8; SCRATCH] {
        &mut self.scratch
    }

    /// The core's ring. `None` where this process may have none: a poller then does its I/O in another way.
    #[inline]
    pub fn io(&mut self) -> Option<&mut dyn CoreIo> {
        self.io.as_deref_mut()
    }

    /// [`CoreIo::attach`] of the poller that is being stepped.
    pub fn attach(&mut self, completed: VecDeque<IoCompletion>) -> Option<IoHandle> {
        let slot = self.slot;
        Some(self.io()?.attach(slot, completed))
    }

    /// Whether the queue that is being polled has limits.
    #[inline]
    pub fn has_limits(&self) -> bool {
        self.limits.is_some()
    }

    /// Lets a request of so many bytes pass the limits of the queue that is being polled, or says when to ask again; nothing has been taken from
    /// them then. Without limits it costs a load. With some it looks at the clock, so that no request passes early.
    #[inline]
    pub fn admit(&mut self, bytes: u64) -> Result<(), Instant> {
        if self.limits.is_none() { Ok(()) } else { self.ask_limits(|limits, now| limits.admit(now, bytes)) }
    }

    /// As [`CoreContext::admit`], for a request without bytes that nobody may overtake again and again: a flush. The first call
    /// takes its place in the order of the limits, and later ones say when that has come. For the request at the head of the queue: a queue
    /// has one place at a time.
    #[inline]
    pub fn reserve(&mut self) -> Result<(), Instant> {
        if self.limits.is_none() { Ok(()) } else { self.ask_limits(SlotLimits::reserve) }
    }

    #[inline(never)]
    fn ask_limits(
        &mut self,
        ask: impl FnOnce(&mut SlotLimits, u64) -> Result<(), u64>,
    ) -> Result<(), Instant> {
        let now = self.look().saturating_duration_since(self.epoch).as_nanos() as u64;
        let Some(limits) = &mut self.limits else { return Ok(()) };
        ask(limits, now).map_err(|at| {
            let at = self.epoch + Duration::from_nanos(at);
            self.limited = Some(at);
            at
        })
    }

    /// The queue that is being polled has handed so many bytes to its backing, which has yet to end them.
    #[inline]
    pub fn submitted(&mut self, bytes: u64) {
        self.submitted += bytes;
    }

    /// So many bytes have ended of what the queue that is being polled has handed to its backing.
    #[inline]
    pub fn completed(&mut self, bytes: u64) {
        self.completed += bytes;
    }

    /// The queue that is being polled has left something undone that did not fit into [`crate::Budget::room`].
    #[inline]
    pub fn lacked_room(&mut self) {
        self.lacked_room = true;
    }

    /// The core's side: whether a poll has said so since the last call.
    #[inline]
    pub fn take_lacked_room(&mut self) -> bool {
        std::mem::take(&mut self.lacked_room)
    }

    /// The core's side: bytes submitted and bytes completed since the last call, if any.
    #[inline]
    pub fn take_moved(&mut self) -> Option<(u64, u64)> {
        // Most polls hand on nothing.
        if self.submitted == 0 && self.completed == 0 {
            return None;
        }
        Some((std::mem::take(&mut self.submitted), std::mem::take(&mut self.completed)))
    }

    /// When the request may pass that a limit has held back in this poll, if one has: for [`crate::PollOutcome::limited`].
    #[inline]
    pub fn limited(&self) -> Option<Instant> {
        self.limited
    }

    /// The slot's side, before and after a poll of a queue with limits: they hold for that poll, and none has held anything back yet.
    pub(crate) fn swap_limits(&mut self, limits: &mut Option<Box<SlotLimits>>) {
        std::mem::swap(&mut self.limits, limits);
        self.limited = None;
    }

    /// The core's side: the slot of that index is stepped next.
    #[inline]
    pub fn enter_slot(&mut self, slot: usize) {
        self.slot = slot;
        self.work_ended >>= 1;
    }
}

/// By the clock of the host.
impl Default for CoreContext {
    fn default() -> Self {
        CoreContext::new(Arc::new(Monotonic))
    }
}

impl fmt::Debug for CoreContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoreContext")
            .field("clock", &self.clock)
            .field("now", &self.now)
            .field("io", &self.io)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn work_begins_when_that_of_the_poll_before_has_ended_and_not_that_of_an_earlier_one() {
        let clock = Arc::new(ManualClock::default());
        let mut context = CoreContext::new(clock.clone());
        let later = |ns| clock.advance(Duration::from_nanos(ns));
        context.enter_slot(0);
        later(100);
        let began = context.work_begins();
        later(100);
        let ended = context.work_ends();
        assert_eq!(ended - began, Duration::from_nanos(100));
        context.enter_slot(1);
        later(7);
        assert_eq!(context.work_begins(), ended);
        // A poll without work in between.
        context.enter_slot(2);
        assert_eq!(context.work_begins(), ended + Duration::from_nanos(7));
    }
}
