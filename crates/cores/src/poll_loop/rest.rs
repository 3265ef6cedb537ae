//! Arming, the last look, sleeping and waking.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ioplane_device::{Armed, PollOutcome, PollState};

use super::PollLoop;
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

impl PollLoop {
    /// Lets rest whoever has had no work for long enough: on a notified core at all.
    pub(super) fn rest_idle(&mut self) {
        let spin = if self.notify == Notify::Polled { self.spin } else { Duration::ZERO };
        let now = self.context.now();
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            let idle_since = self.chairs[index].as_ref().and_then(|chair| chair.idle_since);
            let idle = idle_since.is_some_and(|since| now.saturating_duration_since(since) >= spin);
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
        let outcome = self.step(index);
        let Some(chair) = &mut self.chairs[index] else { return true };
        match outcome.state() {
            PollState::Idle | PollState::Waiting => {
                if promised {
                    chair.state = SlotState::Armed;
                } else {
                    chair.state = SlotState::Unwakeable;
                    self.timers.ensure(Timer::Unwakeable, self.context.now() + NAP);
                }
                self.set_timer(index, outcome);
            }
            PollState::Busy => {
                chair.seat.disarm(&self.context, polled);
                self.account.work(outcome.units());
                return false;
            }
            PollState::Parked => self.account.work(1),
        }
        true
    }

    /// Sets the timer that the poller of a resting slot has asked for in its last poll, or none.
    fn set_timer(&mut self, index: usize, outcome: PollOutcome) {
        let Some(chair) = &mut self.chairs[index] else { return };
        let wait = outcome.wake_in();
        if std::mem::replace(&mut chair.timed, wait.is_some()) {
            self.timers.clear(Timer::Slot(index));
        }
        if let Some(wait) = wait {
            self.timers.insert(Timer::Slot(index), self.context.now() + wait);
        }
    }

    /// Asks for all resting slots at once whether one was woken, when that is due.
    pub(super) fn hear_resting(&mut self, looked: bool) {
        let now = self.context.now();
        let due = match self.notify {
            Notify::Polled => looked && now.saturating_duration_since(self.last_glance) >= GLANCE,
            Notify::Notified => self.account.turns.is_multiple_of(GLANCE_TURNS),
        };
        let occupied = self.chairs.len() - self.free.len();
        if due && !self.awake.is_empty() && self.awake.len() < occupied {
            self.last_glance = now;
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
        let now = self.context.now();
        if self.timers.is_set(Timer::Unwakeable) {
            self.account.naps += 1;
        } else {
            self.account.sleeps += 1;
        }
        if !self.timers.is_set(Timer::Tidy) {
            self.account.share(now);
            self.panel.publish(&self.account.counts(0), now);
        }
        let timeout = self.timers.next().map(|at| at.saturating_duration_since(now));
        self.watch.wait(timeout);
        self.account.slept(self.context.look());
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
            self.timers.ensure(Timer::Unwakeable, self.context.now() + NAP);
        }
    }

    /// Steps a slot that rests, and rests on if it had no work.
    pub(super) fn step_resting(&mut self, index: usize) {
        let outcome = self.step(index);
        match outcome.state() {
            PollState::Idle | PollState::Waiting => self.set_timer(index, outcome),
            PollState::Busy => {
                self.account.work(outcome.units());
                self.wake(index);
            }
            PollState::Parked => {
                self.account.work(1);
                self.take_away(index);
            }
        }
    }
}
