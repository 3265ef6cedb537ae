//! Arming, the last look, sleeping and waking.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ioplane_device::{Armed, Step};

use super::Rounds;
use super::slot::SlotState;
use super::timers::Timer;
use crate::settings::Notify;
use crate::watch::BELL;

/// How often a slot is looked at that rests although its poller could not promise to wake the core (a ring without a kick, or a
/// process out of descriptors). Nothing spins for ever.
const NAP: Duration = Duration::from_millis(1);

/// Turns of a notified core between two questions whether a resting slot was woken.
const GLANCE_TURNS: u64 = 4;

/// Time between two such questions of a polled core: a system call, and what the first request of a slot that rests waits for
/// beside the guest's kick.
const GLANCE: Duration = Duration::from_micros(50);

impl Rounds {
    /// Lets rest whoever has had no work for long enough: on a notified core at all.
    pub(super) fn rest_idle(&mut self) {
        let spin = if self.notify == Notify::Polled { self.spin } else { Duration::ZERO };
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            let idle_since = self.chairs[index].as_ref().and_then(|chair| chair.idle_since);
            let idle = idle_since.is_some_and(|since| self.now.saturating_duration_since(since) >= spin);
            if idle && self.rest(index) {
                self.awake.swap_remove(at);
                if self.chairs[index].as_ref().is_some_and(|chair| chair.state == SlotState::Parked) {
                    self.take_away(index);
                }
            } else {
                at += 1;
            }
        }
    }

    /// Has the slot ask to be kicked and looks at it once more. True if it is not to be stepped in the next turn.
    fn rest(&mut self, index: usize) -> bool {
        let Some(chair) = &mut self.chairs[index] else { return true };
        let polled = self.notify == Notify::Polled;
        if polled {
            // Kicks that came unasked are counted, or they would wake it at once. A notified core does not tidy at every request.
            chair.seat.tidy();
        }
        let armed = chair.seat.arm();
        let promised = armed == Armed::Armed && !chair.watched.blind;
        fence(Ordering::SeqCst);
        let step = self.step(index);
        let Some(chair) = &mut self.chairs[index] else { return true };
        match step {
            Step::Idle if promised => chair.state = SlotState::Armed,
            Step::Idle => {
                chair.state = SlotState::Unwakeable;
                self.timers.ensure(Timer::Unwakeable, self.now + NAP);
            }
            Step::Busy(n) => {
                chair.seat.disarm(polled);
                self.account.work(n);
                return false;
            }
            Step::Vacated => self.account.work(1),
        }
        true
    }

    /// Asks for all resting slots at once whether one was woken, when that is due.
    pub(super) fn hear_resting(&mut self, looked: bool) {
        let due = match self.notify {
            Notify::Polled => looked && self.now.saturating_duration_since(self.last_glance) >= GLANCE,
            Notify::Notified => self.account.turns.is_multiple_of(GLANCE_TURNS),
        };
        let occupied = self.chairs.len() - self.free.len();
        if due && !self.awake.is_empty() && self.awake.len() < occupied {
            self.last_glance = self.now;
            self.account.glances += 1;
            self.watch.wait(Some(Duration::ZERO));
            self.hear();
        }
    }

    /// Wakes whoever was rung for. The mailbox's bell is emptied where the mail is read, whether or not its flag is up.
    fn hear(&mut self) {
        for at in 0..self.watch.fired().len() {
            match self.watch.fired()[at] {
                BELL => self.mailbox.expect(),
                token => self.wake(token),
            }
        }
    }

    /// Everybody rests: sleeps until somebody is rung for or a timer is due. Whoever was rung for is awake afterwards.
    pub(super) fn sleep(&mut self) {
        if self.notify == Notify::Polled {
            // Each was tidied before it lay down.
            self.timers.clear(Timer::Tidy);
        }
        self.look();
        if !self.awake.is_empty() {
            return;
        }
        if self.timers.is_set(Timer::Unwakeable) {
            self.account.naps += 1;
        } else {
            self.account.sleeps += 1;
        }
        if !self.timers.is_set(Timer::Tidy) {
            self.account.share(self.now);
            self.panel.publish(&self.account.counts(0), self.now);
        }
        let timeout = self.timers.next().map(|at| at.saturating_duration_since(self.now));
        self.watch.wait(timeout);
        self.now = self.clock.now();
        self.account.slept(self.now);
        if !self.watch.fired().is_empty() {
            self.account.wakes += 1;
            self.hear();
        }
    }

    /// Steps the slots that nothing is sure to wake, where they are. Who had work is awake from then on.
    pub(super) fn step_unwakeable(&mut self) {
        let mut left = false;
        for index in 0..self.chairs.len() {
            if self.chairs[index].as_ref().is_some_and(|chair| chair.state == SlotState::Unwakeable) {
                self.step_resting(index);
                left |= self.chairs[index].as_ref().is_some_and(|chair| chair.state == SlotState::Unwakeable);
            }
        }
        if left {
            self.timers.ensure(Timer::Unwakeable, self.now + NAP);
        }
    }

    /// Steps a slot that rests, and rests on if it had no work.
    fn step_resting(&mut self, index: usize) {
        match self.step(index) {
            Step::Idle => {}
            Step::Busy(n) => {
                self.account.work(n);
                self.wake(index);
            }
            Step::Vacated => {
                self.account.work(1);
                self.take_away(index);
            }
        }
    }
}
