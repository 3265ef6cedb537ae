//! Arming, the last look, sleeping and waking.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ioplane_device::{Armed, Step};

use super::{Rounds, TIDY};
use crate::settings::Notify;
use crate::watch::BELL;

/// How long the core sleeps at most while a poller rests that could not promise to wake it (a ring without a kick, or a
/// process out of descriptors). Nothing spins for ever.
const NAP: Duration = Duration::from_millis(1);

/// Turns with work between two looks at whoever rests on a notified core.
const GLANCE_TURNS: u64 = 4;

impl Rounds {
    /// A polled core has looked in vain for long enough: all of its seats ask to be kicked, are looked at once more, and the
    /// core sleeps; or goes on if anything was found. Returns awake.
    pub(super) fn rest_all(&mut self) {
        self.tidy(Instant::now());
        for at in 0..self.awake.len() {
            self.arm(self.awake[at]);
        }
        fence(Ordering::SeqCst);
        let worked = self.step_awake();
        if !worked && !self.mailbox.raised() {
            while let Some(index) = self.awake.pop() {
                self.lie_down(index);
            }
            while !self.sleep() {
                // A nap has ended; only those that nobody wakes have to be looked at.
                let found = self.step_restless();
                self.account.turn(found);
                if found {
                    break;
                }
            }
        }
        self.wake_all();
        for at in 0..self.awake.len() {
            let index = self.awake[at];
            if self.chairs[index].as_ref().is_some_and(|c| c.armed) {
                self.tell_awake(index);
            }
        }
        self.last_work = Instant::now();
    }

    /// A notified core has made a turn: whoever had no work rests.
    pub(super) fn after_notified(&mut self, worked: bool) {
        self.clock(worked);
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            if self.stepped_idle(index) {
                self.awake.swap_remove(at);
                self.lie_down(index);
            } else {
                at += 1;
            }
        }
        if !self.awake.is_empty() && self.account.turns.is_multiple_of(GLANCE_TURNS) {
            self.watch.wait(Some(Duration::ZERO));
            self.hear();
            // Those that no descriptor tells of get their look also while the core has no time to sleep.
            if self.restless > 0 {
                let now = Instant::now();
                if now - self.last_nap >= NAP {
                    self.last_nap = now;
                    self.wake_restless();
                }
            }
        }
    }

    fn wake_restless(&mut self) {
        for index in 0..self.chairs.len() {
            if self.chairs[index].as_ref().is_some_and(|c| c.restless) {
                self.wake_told(index);
            }
        }
    }

    /// Whether the awake seat may rest: it asks to be kicked, and the look after that finds nothing.
    fn stepped_idle(&mut self, index: usize) -> bool {
        let Some(chair) = &mut self.chairs[index] else { return false };
        if chair.busy {
            return false;
        }
        self.arm(index);
        fence(Ordering::SeqCst);
        match self.step(index) {
            Step::Idle => true,
            Step::Busy(n) => {
                self.account.units += u64::from(n.max(1));
                self.tell_awake(index);
                false
            }
            // Taken away at the next turn.
            Step::Vacated => false,
        }
    }

    fn arm(&mut self, index: usize) {
        let Some(chair) = &mut self.chairs[index] else { return };
        let armed = chair.seat.arm();
        chair.armed = true;
        chair.promised = armed == Armed::Armed && !chair.watched.blind;
    }

    /// Notes that a seat (no longer in `awake`) rests.
    fn lie_down(&mut self, index: usize) {
        let Some(chair) = &mut self.chairs[index] else { return };
        chair.awake = false;
        chair.restless = !chair.promised;
        self.restless += usize::from(chair.restless);
        chair.untidy = true;
        self.untidy += 1;
    }

    /// Sleeps until somebody rings; or a nap, with restless seats; or until it is time to tidy those that have just lain
    /// down, which a notified core does not do at every request. Whoever was rung for is awake and told afterwards, on a
    /// notified core the restless too. True if there may be something to do.
    pub(super) fn sleep(&mut self) -> bool {
        let lies_down = Instant::now();
        self.account.look(lies_down);
        if lies_down - self.last_tidy >= TIDY {
            self.tidy(lies_down);
        }
        let timeout = match (self.restless, self.untidy) {
            (0, 0) => None,
            (0, _) => Some(TIDY),
            _ => Some(NAP),
        };
        match timeout {
            None => {
                self.account.sleeps += 1;
                self.panel.publish(&self.account.counts(0), lies_down);
            }
            Some(NAP) => self.account.naps += 1,
            Some(_) => self.account.sleeps += 1,
        }
        self.watch.wait(timeout);
        self.account.slept(Instant::now());
        if !self.watch.fired().is_empty() {
            self.account.wakes += 1;
            self.hear();
            return true;
        }
        if self.notify == Notify::Notified && self.restless > 0 {
            self.wake_restless();
            return true;
        }
        self.mailbox.raised()
    }

    /// Wakes whoever was rung for. The mailbox's bell is emptied where the mail is read, whether or not its flag is up.
    fn hear(&mut self) {
        for at in 0..self.watch.fired().len() {
            match self.watch.fired()[at] {
                BELL => self.mailbox.expect(),
                token => self.wake_told(token),
            }
        }
    }

    pub(super) fn wake_told(&mut self, index: usize) {
        if self.chairs.get(index).is_some_and(|c| c.as_ref().is_some_and(|c| !c.awake)) {
            self.wake(index);
            self.tell_awake(index);
        }
    }

    /// Steps those that rest without a promise. True if any had work.
    fn step_restless(&mut self) -> bool {
        let mut worked = false;
        for index in 0..self.chairs.len() {
            if self.chairs[index].as_ref().is_some_and(|c| c.restless) {
                let step = self.step(index);
                worked |= step != Step::Idle;
                if let Step::Busy(n) = step {
                    self.account.units += u64::from(n.max(1));
                }
            }
        }
        worked
    }
}
