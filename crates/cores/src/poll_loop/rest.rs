//! Arming, the last look, sleeping (also for completions only) and waking.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ioplane_device::{Armed, PollOutcome, PollState};

use super::PollLoop;
use super::slot::{SlotEntry, SlotState};
use super::timers::Timer;
use crate::settings::Notify;
use crate::watch::Readable;

/// How often a slot is looked at that rests although its poller could not promise to wake the core (a ring without a kick, or a
/// process out of descriptors). Nothing spins for ever.
const NAP: Duration = Duration::from_millis(1);

/// How long a core that waits only for completions polls after its last work: a driver that polls answers a completion by its
/// next request within this time, or adds the rest of a batch.
const SETTLE: Duration = Duration::from_micros(4);

/// The shortest sleep for completions. A shorter one would cost more processor time than it saves.
const SHORTEST_WAIT: Duration = Duration::from_micros(10);

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
            Notify::Notified => self.account.counts.turns.is_multiple_of(GLANCE_TURNS),
        };
        let occupied = self.chairs.len() - self.free.len();
        if due && !self.awake.is_empty() && self.awake.len() < occupied {
            self.last_glance = now;
            self.account.counts.glances += 1;
            self.watch.wait(Some(Duration::ZERO));
            self.hear();
        }
    }

    /// Wakes whoever was rung for. The mailbox's bell is emptied where the mail is read, whether or not its flag is up.
    fn hear(&mut self) {
        for at in 0..self.watch.fired().len() {
            match self.watch.fired()[at] {
                Readable::Mailbox => self.mailbox.expect(),
                Readable::Kick(index) => {
                    self.count_kick(index);
                    self.wake(index);
                }
                Readable::Completion(index) => self.wake(index),
            }
        }
    }

    /// A slot that waits for completions was kicked without having asked for it. That is counted now: until it is, the kick ends
    /// every sleep at once.
    fn count_kick(&mut self, index: usize) {
        if self.notify == Notify::Polled
            && let Some(Some(chair)) = self.chairs.get_mut(index)
            && chair.state == SlotState::Waiting
        {
            chair.seat.tidy();
        }
    }

    /// Whether every awake slot waits for completions, so that there is nothing to do before one comes or a guest asks for more.
    pub(super) fn only_waits(&self) -> bool {
        let waits = |index: &usize| self.chairs[*index].as_ref().is_some_and(SlotEntry::waits);
        !self.completion_wait.is_zero()
            && !self.awake.is_empty()
            && !self.mailbox.raised()
            && self.awake.iter().all(waits)
    }

    /// Everybody rests or waits for completions: sleeps until a descriptor is readable or a timer is due, and no longer than the core has
    /// had no work, so that what a guest adds soon after a completion is found soon. Those that wait are stepped in the next
    /// turn, whatever has ended the sleep. False if it is too early to sleep.
    pub(super) fn wait_for_completions(&mut self) -> bool {
        self.look();
        let now = self.context.now();
        let idle = now.saturating_duration_since(self.idle_from);
        // A timer may have had one of those at rest stepped, and that has work now.
        if idle < SETTLE || !self.only_waits() {
            return false;
        }
        let most = idle.max(SHORTEST_WAIT).min(self.completion_wait);
        let asked = self.awake.iter().filter_map(|&index| self.chairs[index].as_ref()?.wake_at);
        let due = asked.chain(self.timers.next()).min();
        self.account.counts.waits += 1;
        self.watch.wait(Some(due.map_or(most, |at| at.saturating_duration_since(now).min(most))));
        let now = self.context.look();
        self.account.slept(now);
        // Those at rest were asked for.
        self.last_glance = now;
        if !self.watch.fired().is_empty() {
            self.account.counts.wakes += 1;
            self.hear();
        }
        self.rest_idle();
        true
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
            self.account.counts.naps += 1;
        } else {
            self.account.counts.sleeps += 1;
        }
        if !self.timers.is_set(Timer::Tidy) {
            self.account.share(now);
            self.panel.publish(&self.account.counts, 0, self.account.permille(), now);
        }
        let timeout = self.timers.next().map(|at| at.saturating_duration_since(now));
        self.watch.wait(timeout);
        self.account.slept(self.context.look());
        if !self.watch.fired().is_empty() {
            self.account.counts.wakes += 1;
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
