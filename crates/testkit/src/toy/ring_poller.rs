//! The data half of a toy ring.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{Armed, Budget, Change, CoreContext, Interrupt, PollOutcome, Poller, Wakers};
use ioplane_memory::{GuestView, Window};

use super::gate::drain;
use super::mix;
use super::wires::{DEPTH, QueueV1, Wires, layout, passes};

/// Polls between taking a request and answering it, so that there is always something in flight.
const DELAY: u32 = 3;

/// What a request moves: a number and its answer.
const BYTES: u64 = 16;

/// Serves one ring. Takes requests at once and answers them a few polls later, unless the gate is shut.
pub(super) struct RingPoller {
    memory: GuestView,
    driver: Window,
    device: Window,
    queue: u16,
    wires: Arc<Wires>,
    state: QueueV1,
    /// Polls until what is in flight ends.
    delay: u32,
    draining: bool,
    suspended: bool,
}

impl RingPoller {
    pub(super) fn new(
        memory: GuestView,
        driver: Window,
        device: Window,
        queue: u16,
        state: QueueV1,
        wires: Arc<Wires>,
    ) -> Self {
        // What was in flight when it was suspended is in the ring still, and is done again from there.
        let state = QueueV1 { in_flight: 0, ..state };
        if removed(Invariant::KeepsWhatArrives) {
            // Invariant 1: kicks that came while nobody sat here count like any others; this forgets them.
            drain(wires.kicks[usize::from(queue)].as_fd());
        }
        RingPoller {
            memory,
            driver,
            device,
            queue,
            wires,
            state,
            delay: DELAY,
            draining: false,
            suspended: false,
        }
    }

    pub(super) fn state(&self) -> QueueV1 {
        self.state
    }

    /// Requests that the driver has published and we have not taken. A driver that jumps gets no more than a ring.
    fn waiting(&self) -> u16 {
        let taken = self.state.answered.wrapping_add(self.state.in_flight);
        self.driver.load_u16(layout::INDEX).wrapping_sub(taken).min(DEPTH - self.state.in_flight)
    }

    /// Answers everything in flight.
    fn answer(&mut self) -> u32 {
        let old = self.state.answered;
        for _ in 0..self.state.in_flight {
            let slot = layout::slot(self.state.answered);
            self.state.sum = mix(self.state.sum, self.driver.load_u64(slot));
            let gpa = self.device.gpa() + slot as u64;
            // Cannot fail: the window was checked, and memory only grows while a poller runs.
            let _ = self.memory.write(gpa, &self.state.sum.to_le_bytes());
            self.state.answered = self.state.answered.wrapping_add(1);
        }
        let done = u32::from(std::mem::take(&mut self.state.in_flight));
        self.memory.store_u16(&self.device, layout::INDEX, self.state.answered);
        fence(Ordering::SeqCst);
        if passes(self.driver.load_u16(layout::EVENT), self.state.answered, old) {
            self.call();
        }
        done
    }

    fn outcome(&self, units: u32) -> PollOutcome {
        match (units, self.state.in_flight) {
            (0, 0) => PollOutcome::IDLE,
            (0, _) => PollOutcome::WAITING,
            (units, _) => PollOutcome::busy(units, u64::from(units) * BYTES),
        }
    }

    fn call(&self) {
        self.wires.calls[usize::from(self.queue)].signal();
    }
}

impl Poller for RingPoller {
    fn poll(&mut self, _context: &mut CoreContext, budget: Budget) -> PollOutcome {
        if self.suspended {
            return PollOutcome::PARKED;
        }
        let mut units = 0;
        if self.state.in_flight > 0 && !self.wires.gate.is_shut() {
            self.delay -= 1;
            units = 1;
            if self.delay == 0 {
                units = self.answer();
            }
        }
        if self.draining {
            return if self.state.in_flight == 0 { PollOutcome::PARKED } else { self.outcome(units) };
        }
        if self.state.in_flight == 0 {
            self.state.in_flight = self.waiting().min(u16::try_from(budget.requests).unwrap_or(DEPTH));
            self.delay = DELAY;
            units += u32::from(self.state.in_flight);
        }
        self.outcome(units)
    }

    fn drain(&mut self) {
        self.draining = true;
    }

    fn undrain(&mut self) {
        self.draining = false;
    }

    fn suspend(&mut self) {
        self.suspended = true;
    }

    fn goes_on(&self) -> bool {
        self.state.in_flight == 0
    }

    fn resume(&mut self) {
        self.call();
    }

    fn arm(&mut self) -> Armed {
        let taken = self.state.answered.wrapping_add(self.state.in_flight);
        self.memory.store_u16(&self.device, layout::EVENT, taken);
        fence(Ordering::SeqCst);
        let answerable = self.state.in_flight > 0 && !self.wires.gate.is_shut();
        let takeable = self.state.in_flight == 0 && !self.draining && self.waiting() > 0;
        if answerable || takeable { Armed::WorkLeft } else { Armed::Armed }
    }

    fn disarm(&mut self, _context: &CoreContext, _polling: bool) {
        // The event that was asked for stays where it is: behind, so that nobody kicks for what comes.
        let queue = usize::from(self.queue);
        let kicks = drain(self.wires.kicks[queue].as_fd());
        self.wires.taken[queue].fetch_add(kicks, Ordering::AcqRel);
        drain(self.wires.gate.event(self.queue));
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Log(log) => self.memory.set_log(log),
            Change::Memory(map) => self.memory.set_map(map),
            _ => {}
        }
    }

    fn wakers(&self) -> Wakers<'_> {
        Wakers {
            kick: Some(self.wires.kicks[usize::from(self.queue)].as_fd()),
            completion: Some(self.wires.gate.event(self.queue)),
        }
    }

    fn tidy(&mut self) {}
}
