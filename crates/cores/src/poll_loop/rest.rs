//! Arming, the last look, sleeping (also for completions only) and waking.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ioplane_device::clock::since_epoch;
use ioplane_device::{Armed, PollOutcome, PollState};
use ioplane_scheduler::{PollingCosts, QueueMode};

use super::slot::{SlotEntry, SlotState};
use super::timers::Timer;
use super::wait::Sleep;
use super::{PollLoop, TIDY, publish_use, ring};
use crate::readable::Readable;
use crate::settings::Notify;
use crate::shared::ENDING;

/// How often a resting slot is stepped whose poller could not promise to wake the core (a ring without a kick, or a process out of
/// descriptors). Otherwise the core would spin for ever.
const RECHECK_INTERVAL: Duration = Duration::from_millis(1);

/// How long a core that waits only for completions polls after its last work: a driver that polls answers a completion by its
/// next request within this time, or adds the rest of a batch.
const SETTLE: Duration = Duration::from_micros(4);

/// The shortest time for which a slot is Held. What a fast limit lets through meanwhile passes together, and a bucket has room for ten times
/// as much.
const SHORTEST_HOLD: Duration = Duration::from_micros(100);

/// Turns of a busy core between two checks whether a resting slot was woken, as far as its ring knows; of a notified core, any resting slot.
const EVENT_CHECK_TURNS: u64 = 4;

/// Time between two such checks of a polled core. A check costs a system call; the first request to a resting slot waits up to this
/// time in addition to the guest's kick.
const EVENT_CHECK_INTERVAL: Duration = Duration::from_micros(50);

impl PollLoop {
    /// Rests every slot that has had no work for long enough; on a notified core, every slot that has none.
    #[inline]
    pub(super) fn rest_idle(&mut self) {
        if self.a_spin_ends() {
            self.rest_each();
        }
    }

    /// Goes through the awake slots, and finds when the next of their spins ends.
    fn rest_each(&mut self) {
        let now = self.context.now();
        let now_ns = self.age.at(now, &self.shared);
        self.spins.find_anew();
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            let (notify, spin, trials) = (self.notify, self.spin, &self.trials);
            let may_poll = self.objective.may_poll();
            let is_over = |entry: &mut SlotEntry| {
                let idle = now.saturating_duration_since(entry.idle_since?);
                match notify {
                    Notify::Notified => Some(QueueMode::Fixed),
                    Notify::Polled => (idle >= spin).then_some(QueueMode::Fixed),
                    Notify::Adaptive => {
                        entry.spin_is_over(now_ns, idle, spin, may_poll, trials).map(QueueMode::Armed)
                    }
                }
            };
            let over = self.slots[index].as_mut().and_then(is_over);
            if over.is_some_and(|mode| self.rest(index, mode)) {
                // No tidying comes for it until it is woken.
                if let Some(entry) = &self.slots[index] {
                    publish_use(entry, &self.turns, index);
                }
                self.leave_awake(at);
                if self.slots[index].as_ref().is_some_and(|entry| entry.state == SlotState::Parked) {
                    self.free_slot(index);
                }
            } else {
                self.enter_spin(index, now_ns);
                at += 1;
            }
        }
    }

    /// Has the slot ask to be kicked and looks at it once more. True if it is not to be stepped in the next turn. `mode`: which it is then in.
    fn rest(&mut self, index: usize, mode: QueueMode) -> bool {
        let Some(entry) = &mut self.slots[index] else { return true };
        let polls = self.notify.polls();
        let tidies = match self.notify {
            Notify::Polled => true,
            // One that rests as soon as it has no work was woken by the kick that was lowered then.
            Notify::Adaptive => entry.adaptive.spins() && self.objective.may_poll(),
            Notify::Notified => false,
        };
        if tidies {
            // Kicks that came unasked are counted, or they would wake it at once. To tidy at every request would cost a system call each.
            entry.slot.tidy();
        } else {
            self.untidy = true;
        }
        let armed = entry.slot.arm();
        let promised = armed == Armed::Armed && !entry.watched.incomplete;
        fence(Ordering::SeqCst);
        let outcome = self.step(index);
        let Some(entry) = &mut self.slots[index] else { return true };
        match outcome.state() {
            // What has come since it was armed is not done with, and no descriptor tells of the rest.
            PollState::Idle | PollState::Waiting if promised && outcome.has_more() => {
                entry.slot.disarm(&self.context, polls);
                return false;
            }
            PollState::Idle | PollState::Waiting => {
                entry.adaptive.rests();
                if promised {
                    entry.state = SlotState::Armed;
                } else {
                    entry.state = SlotState::Unwakeable;
                    self.timers.ensure(Timer::Unwakeable, self.context.now() + RECHECK_INTERVAL);
                }
                self.set_timer(index, outcome);
                if mode != QueueMode::Fixed {
                    self.note(index, mode);
                }
            }
            PollState::Limited => {
                entry.slot.disarm(&self.context, true);
                self.hold(index, outcome);
            }
            PollState::Busy => {
                entry.slot.disarm(&self.context, polls);
                self.account.work(outcome.units());
                return false;
            }
            PollState::Parked => self.account.work(1),
        }
        true
    }

    /// A limit holds the requests of the slot back, which is not in `awake`: its timer steps it next, unless something of it ends before. What
    /// its guest adds meanwhile has to wait as well, so it is not to kick.
    pub(super) fn hold(&mut self, index: usize, outcome: PollOutcome) {
        let Some(entry) = &mut self.slots[index] else { return };
        let asked = self.asks || matches!(entry.state, SlotState::Armed | SlotState::Unwakeable);
        let newly = entry.state != SlotState::Held;
        if newly && (asked || self.notify == Notify::Notified) {
            entry.slot.disarm(&self.context, true);
        }
        if entry.watched.incomplete {
            // Nothing is sure to tell of what ends.
            entry.state = SlotState::Unwakeable;
            self.timers.ensure(Timer::Unwakeable, self.context.now() + RECHECK_INTERVAL);
        } else {
            entry.state = SlotState::Held;
        }
        self.untidy |= newly;
        publish_use(entry, &self.turns, index);
        if newly {
            let held = QueueMode::Held(entry.slot.held_by());
            self.note(index, held);
            self.timers.ensure(Timer::Tidy, self.last_tidy + TIDY);
        }
        self.set_timer(index, outcome);
    }

    /// Sets the timer that the poller of a resting slot has asked for in its last poll, or none.
    fn set_timer(&mut self, index: usize, outcome: PollOutcome) {
        let Some(entry) = &mut self.slots[index] else { return };
        let wait = match entry.state {
            // It has no other way back.
            SlotState::Held => Some(outcome.wake_in().unwrap_or(RECHECK_INTERVAL).max(SHORTEST_HOLD)),
            _ => outcome.wake_in(),
        };
        if std::mem::replace(&mut entry.timed, wait.is_some()) {
            self.timers.clear(Timer::Slot(index));
        }
        if let Some(wait) = wait {
            self.timers.insert(Timer::Slot(index), self.context.now() + wait);
        }
    }

    /// Wakes the slots of which the ring knows that a descriptor was woken. What the epoll set has is asked for when that is due: each
    /// frame for a resting NIC is news of the set, and to ask after each turn would cost as many system calls as the frames save turns.
    #[cold]
    pub(super) fn take_fired(&mut self, looked: bool) {
        let set_due = self.event_check_due(looked);
        // The ring tells of a kick in the next turn, and the set is asked at most this much later.
        let now = self.context.now();
        self.context.set_kicked(now.checked_sub(EVENT_CHECK_INTERVAL).unwrap_or(now));
        if let Some(ring) = ring(&mut self.context) {
            self.account.counts.event_checks += u64::from(self.watch.check_ring(ring, set_due));
            self.handle_unlooked_events();
        }
    }

    /// Where the core does not sleep in its ring: asks the kernel, when that is due, whether a descriptor of any resting slot is readable.
    pub(super) fn check_events(&mut self, looked: bool) {
        let occupied = self.slots.len() - self.free.len();
        if !self.awake.is_empty() && self.awake.len() < occupied && self.event_check_due(looked) {
            self.account.counts.event_checks += 1;
            self.watch.wait(ring(&mut self.context), 1, Some(Duration::ZERO));
            self.handle_unlooked_events();
        }
    }

    /// Whether a busy core may ask the epoll set for news now. The time to the next question runs from here, asked or not: a core with a
    /// deferred ring asks only if the ring has told of news.
    fn event_check_due(&mut self, looked: bool) -> bool {
        let now = self.context.now();
        let due = match self.notify {
            Notify::Polled | Notify::Adaptive => {
                looked && now.saturating_duration_since(self.last_event_check) >= EVENT_CHECK_INTERVAL
            }
            Notify::Notified => self.events_due(),
        };
        if due {
            self.last_event_check = now;
            self.context.set_kicked(std::mem::replace(&mut self.kicks_known, now));
        }
        due
    }

    /// Whether this is a turn in which a core without I/O of its own enters its ring for the kicks of resting slots. Each frame for a
    /// resting NIC is an event: to enter for each would cost more than the turns do.
    #[inline]
    pub(super) fn events_due(&self) -> bool {
        self.account.counts.turns.is_multiple_of(EVENT_CHECK_TURNS)
    }

    /// As [`PollLoop::handle_events`], where the last look at the clock was before this turn: when a request has come is what an adaptive core
    /// decides by.
    fn handle_unlooked_events(&mut self) {
        if self.notify == Notify::Adaptive && !self.watch.fired().is_empty() {
            self.context.look();
        }
        self.handle_events();
    }

    /// Wakes the slots whose descriptors are readable. The mailbox's eventfd is emptied where messages are read, whether or not its
    /// flag is set.
    fn handle_events(&mut self) {
        for at in 0..self.watch.fired().len() {
            match self.watch.fired()[at] {
                Readable::Mailbox => self.mailbox.mark_pending(),
                Readable::Kick(index) => {
                    if self.count_kick(index) {
                        self.wake(index);
                    }
                }
                Readable::Completion(index) => self.wake(index),
                Readable::Ring => {}
            }
        }
    }

    /// A slot that waits for completions, or that a limit holds back, was kicked without having asked for it. That is counted now: until it is,
    /// the kick ends every sleep at once. Says whether the slot is to be woken.
    fn count_kick(&mut self, index: usize) -> bool {
        let Some(Some(entry)) = self.slots.get_mut(index) else { return false };
        let held = entry.state == SlotState::Held;
        if held || (self.notify.polls() && entry.state == SlotState::Waiting) {
            entry.slot.tidy();
        }
        !held
    }

    /// Whether every awake slot waits for completions, so that there is nothing to do before one comes or a guest asks for more.
    pub(super) fn only_waits(&mut self) -> bool {
        if !self.wait_policy.sleeps() || self.awake.is_empty() || self.mailbox.pending() {
            return false;
        }
        let ring = ring(&mut self.context);
        let in_flight = |index: usize| ring.as_ref().is_some_and(|ring| ring.serves(index));
        let waits =
            |index: &usize| self.slots[*index].as_ref().is_some_and(|entry| entry.waits(in_flight(*index)));
        self.awake.iter().all(waits)
    }

    /// Every slot rests or waits for completions: sleeps until a descriptor is readable or a timer is due, and no longer than
    /// [`super::wait::WaitPolicy`] says. Before a sleep of more than [`super::CoreSettings::completion_wait`] guests are asked to kick. Those that
    /// wait are stepped in the next turn, whatever has ended the sleep. False if it is too early to sleep, or if a sleep would cost more
    /// than it saves.
    pub(super) fn wait_for_completions(&mut self) -> bool {
        self.look();
        let now = self.context.now();
        let idle = now.saturating_duration_since(self.idle_from);
        // A timer may have stepped a resting slot, and that has work now.
        if idle < SETTLE || !self.only_waits() {
            return false;
        }
        let in_flight = ring(&mut self.context).map_or(0, |ring| ring.with_kernel());
        let Some(sleep) = self.wait_policy.sleep(idle, in_flight) else { return false };
        let unasked = self.wait_policy.unasked();
        if sleep.time.is_some_and(|time| time <= unasked) {
            self.sleep_for(sleep);
        } else if now < self.unkicked_until {
            self.sleep_for(Sleep { time: Some(unasked), ..sleep });
        } else {
            let (promised, units) = self.ask_for_kicks();
            if units > 0 {
                // The wait is over, and what comes next is another one.
                self.wait_policy.work_came(idle);
                (self.idle_run, self.waited) = (0, false);
                self.disarm_awake();
            } else if !promised {
                // Before it sleeps: what comes meanwhile has waited since now.
                self.disarm_awake();
                self.unkicked_until = now + TIDY;
                self.sleep_for(Sleep { time: Some(unasked), ..sleep });
            } else {
                if self.only_waits() {
                    self.sleep_for(sleep);
                }
                self.disarm_awake();
            }
        }
        self.rest_idle();
        true
    }

    /// Has every awake slot ask to be kicked and looks at it once more: whether each of them will be kicked, and what the look has found.
    fn ask_for_kicks(&mut self) -> (bool, u64) {
        let mut promised = true;
        for &index in &self.awake {
            if let Some(entry) = &mut self.slots[index] {
                promised &= entry.slot.arm() == Armed::Armed && !entry.watched.incomplete;
            }
        }
        fence(Ordering::SeqCst);
        // Each of them, which a turn of several groups does not promise.
        self.asks = true;
        let units = self.step_each::<true>();
        self.asks = false;
        if units > 0 {
            self.account.work(u32::try_from(units).unwrap_or(u32::MAX));
        }
        (promised, units)
    }

    /// No kick is wanted from those that are stepped each turn.
    fn disarm_awake(&mut self) {
        let polls = self.notify.polls();
        for &index in &self.awake {
            if let Some(entry) = &mut self.slots[index] {
                entry.slot.disarm(&self.context, polls);
            }
        }
    }

    fn sleep_for(&mut self, sleep: Sleep) {
        let now = self.context.look();
        let asked = self.awake.iter().filter_map(|&index| self.slots[index].as_ref()?.wake_at);
        let due = asked.chain(self.timers.next()).min().map(|at| at.saturating_duration_since(now));
        let time = sleep.time.into_iter().chain(due).min();
        self.account.counts.waits += 1;
        self.watch.wait(ring(&mut self.context), sleep.completions, time);
        let by_work = !self.watch.fired().is_empty();
        let then = self.context.look();
        self.wait_policy.slept(time, then.saturating_duration_since(now), by_work);
        self.learn_wake_up(now, then);
        self.account.slept(then);
        // The wait has checked the resting slots too.
        self.last_event_check = then;
        if by_work {
            self.account.counts.wakes += 1;
            self.handle_events();
        }
    }

    /// The core has slept from `from` to `to`. If a message ended that, it tells what a wake-up takes. A kick that ended it was about that long ago.
    fn learn_wake_up(&mut self, from: Instant, to: Instant) {
        if self.watch.fired().contains(&Readable::Mailbox) {
            let asked_ns = self.mailbox.asked_ns();
            if asked_ns > since_epoch(from) {
                self.wake_ups.took(since_epoch(to).saturating_sub(asked_ns));
            }
        }
        let wake_up = Duration::from_nanos(self.wake_ns().unwrap_or(PollingCosts::default().wake_ns));
        self.context.set_kicked(to.checked_sub(wake_up).unwrap_or(to));
        self.kicks_known = to;
    }

    /// Every slot rests: sleeps until a descriptor is readable or a timer is due, then wakes the slots concerned.
    pub(super) fn sleep(&mut self) {
        if self.notify.polls() && !self.untidy {
            // Each was tidied before it rested.
            self.timers.clear(Timer::Tidy);
        }
        self.look();
        if !self.awake.is_empty() {
            return;
        }
        let now = self.context.now();
        if self.timers.is_set(Timer::Unwakeable) {
            self.account.counts.short_sleeps += 1;
        } else {
            self.account.counts.sleeps += 1;
        }
        if !self.timers.is_set(Timer::Tidy) {
            self.account.share(now);
            self.shared.publish(&self.account.counts, 0, self.account.permille(), now);
        }
        let timeout = self.timers.next().map(|at| at.saturating_duration_since(now));
        self.watch.wait(ring(&mut self.context), 1, timeout);
        let then = self.context.look();
        let by_work = !self.watch.fired().is_empty();
        self.wait_policy.slept(timeout, then.saturating_duration_since(now), by_work);
        self.learn_wake_up(now, then);
        self.account.slept(then);
        if self.shared.life.load(Ordering::Relaxed) == ENDING {
            // The last of what queues have left on the ring may have ended.
            self.mailbox.mark_pending();
        }
        if by_work {
            self.account.counts.wakes += 1;
            self.handle_events();
        }
    }

    /// Steps the slots that no descriptor is sure to wake, without waking them. A slot that had work is awake from then on.
    pub(super) fn step_unwakeable(&mut self) {
        let mut left = false;
        for index in 0..self.slots.len() {
            if self.slots[index].as_ref().is_some_and(|entry| entry.state == SlotState::Unwakeable) {
                self.step_resting(index);
                left |= self.slots[index].as_ref().is_some_and(|entry| entry.state == SlotState::Unwakeable);
            }
        }
        if left {
            self.timers.ensure(Timer::Unwakeable, self.context.now() + RECHECK_INTERVAL);
        }
    }

    /// Steps a resting slot. Without work it goes on resting; one that is Held only if a limit still holds its requests back.
    pub(super) fn step_resting(&mut self, index: usize) {
        if let Some(entry) = &mut self.slots[index]
            && entry.state == SlotState::Held
        {
            // What has waited until now has waited for its limit.
            entry.looked = self.context.now();
        }
        let outcome = self.step(index);
        let is = |state| self.slots[index].as_ref().is_some_and(|entry| entry.state == state);
        let (held, armed) = (is(SlotState::Held), is(SlotState::Armed));
        match outcome.state() {
            // Nothing is held back any more, and it has not asked to be kicked.
            PollState::Idle | PollState::Waiting if held => self.wake(index),
            // Its descriptors do not tell of what it has begun.
            PollState::Idle | PollState::Waiting if armed && outcome.has_more() => self.wake(index),
            PollState::Idle | PollState::Waiting => {
                self.set_timer(index, outcome);
                self.note_unheld(index);
            }
            PollState::Limited => self.hold(index, outcome),
            PollState::Busy => {
                self.account.work(outcome.units());
                self.wake(index);
            }
            PollState::Parked => {
                self.account.work(1);
                self.free_slot(index);
            }
        }
    }
}
