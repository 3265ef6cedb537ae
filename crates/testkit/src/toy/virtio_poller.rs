//! The smallest virtio device: the data half.

use std::collections::VecDeque;
use std::sync::Arc;

use ioplane_device::{Armed, Budget, Change, CoreContext, PollOutcome, Poller, Wakers};
use ioplane_virtio::{Chain, Phase, Queue, QueueStart, RingFault, RingRequest, RingState};

use super::bench::Bench;
use super::gate::drain;

/// Polls between taking a request and answering it, so that there is always something in flight.
const DELAY: u32 = 3;

/// What a request moves: a number and its answer.
const BYTES: u64 = 16;

/// A request in flight.
struct Held {
    taken: RingRequest,
    number: u64,
    /// Where the answer goes, if there is room for one.
    into: Option<u64>,
}

/// Requests in flight. Whoever drops them, wherever the poller ends, leaves them in flight in the ring.
struct HeldRequests(VecDeque<Held>);

impl Drop for HeldRequests {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|held| held.taken.abandon());
    }
}

/// Serves one queue.
pub(super) struct AdderPoller {
    queue: Queue,
    bench: Arc<Bench>,
    chain: Chain,
    /// Never longer than the ring: it does not grow.
    held: HeldRequests,
    delay: u32,
}

impl AdderPoller {
    pub(super) fn new(start: QueueStart, bench: Arc<Bench>) -> Self {
        let held = HeldRequests(VecDeque::with_capacity(start.ring.size().into()));
        AdderPoller { queue: Queue::new(start), bench, chain: Chain::new(), held, delay: DELAY }
    }

    /// What is in flight stays so in the ring, for whoever comes next.
    pub(super) fn into_state(self) -> RingState {
        self.queue.into_state()
    }

    /// Takes the next request; false if there is none.
    fn take(&mut self) -> Result<bool, RingFault> {
        let Some((taken, _replayed)) = self.queue.ring.take(&mut self.chain)? else { return Ok(false) };
        let number = self.chain.readable().first().filter(|range| range.len >= 8);
        let into = self.chain.writable().first().filter(|range| range.len >= 8).map(|range| range.gpa);
        let mut bytes = [0; 8];
        if let Some(Err(fault)) = number.map(|range| self.queue.ring.view().read(range.gpa, &mut bytes)) {
            taken.abandon();
            return Err(fault.into());
        }
        // From here on the device below has it, for all that a crash would blame on us.
        self.queue.ring.release(&taken);
        self.held.0.push_back(Held { taken, number: u64::from_le_bytes(bytes), into });
        Ok(true)
    }

    /// Answers everything in flight; says how many.
    fn answer(&mut self, context: &mut CoreContext) -> Result<u32, RingFault> {
        let count = self.held.0.len() as u32;
        while let Some(Held { taken, number, into }) = self.held.0.pop_front() {
            self.queue.ring.touch(&taken);
            let sum = self.bench.add(self.queue.index, number).to_le_bytes();
            if let Some(Err(fault)) = into.map(|gpa| self.queue.ring.view().write(gpa, &sum)) {
                taken.abandon();
                return Err(fault.into());
            }
            self.queue.ring.complete(taken, if into.is_some() { 8 } else { 0 });
        }
        self.queue.publish(context, None);
        Ok(count)
    }

    fn answerable(&self) -> bool {
        !self.held.0.is_empty() && !self.bench.gate.is_shut()
    }
}

impl Poller for AdderPoller {
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        if self.queue.phase == Phase::Suspending {
            return PollOutcome::PARKED;
        }
        let mut done = 0;
        if self.answerable() {
            (self.delay, done) = (self.delay - 1, 1);
            if self.delay == 0 {
                self.delay = DELAY;
                done += self.answer(context).unwrap_or_else(|fault| {
                    self.queue.stop_with(fault);
                    1
                });
            }
        }
        while self.queue.takes() && done < budget.requests {
            match self.take() {
                Ok(true) => done += 1,
                Ok(false) => break,
                Err(fault) => self.queue.stop_with(fault),
            }
        }
        match done {
            0 if !self.held.0.is_empty() => PollOutcome::WAITING,
            0 if self.queue.phase == Phase::Draining => PollOutcome::PARKED,
            0 => PollOutcome::IDLE,
            done => PollOutcome::busy(done, u64::from(done) * BYTES),
        }
    }

    fn drain(&mut self) {
        self.queue.phase = Phase::Draining;
    }

    fn undrain(&mut self) {
        self.queue.phase = Phase::Serving;
    }

    fn suspend(&mut self) {
        self.queue.phase = Phase::Suspending;
    }

    fn goes_on(&self) -> bool {
        self.queue.goes_on()
    }

    fn resume(&mut self) {
        self.queue.resume();
    }

    fn arm(&mut self) -> Armed {
        let armed = self.queue.arm();
        if self.answerable() { Armed::WorkLeft } else { armed }
    }

    fn disarm(&mut self, context: &CoreContext, polling: bool) {
        self.queue.disarm(context, polling);
        drain(self.bench.gate.event(self.queue.index));
    }

    fn apply(&mut self, change: Change) {
        let _ = self.queue.apply(change);
    }

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: self.queue.kick(), completion: Some(self.bench.gate.event(self.queue.index)) }
    }

    fn tidy(&mut self) {
        self.queue.tidy();
    }
}
