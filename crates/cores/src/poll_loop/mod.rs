//! The loop of one core.
//!
//! A slot is *awake* (stepped every turn) or *resting* (armed: its descriptors are what makes it awake again), each by itself: on
//! a polled core it rests when it has had no work for [`CoreSettings::spin`], on a notified core as soon as it has none. With all
//! at rest the core sleeps; with some, it asks the kernel now and then, for all at once, whether one of the others was woken.
//! A polled core whose awake slots all wait for a disk sleeps between two turns, until a completion comes and for
//! [`CoreSettings::completion_wait`] at most.
//!
//! **Why no wake-up is lost.** The driver publishes a request and then looks whether a kick is wanted; the core says that a
//! kick is wanted and then looks for requests. With a full fence between the two steps on both sides at least one of them
//! sees the other: either the core finds the request and the slot stays awake, or the driver kicks, and the kick is a descriptor
//! that stays readable until the core has read it. Who waits for a disk is not armed: what its guest adds is found in the next
//! turn, which comes when the wait is over at the latest. The mailbox works the same way, with its flag for the request. The
//! protocol is searched exhaustively in `tests/no_lost_wake.rs`, with the store buffers of a real processor, and with each
//! fence and look taken out.

mod account;
mod charge;
mod rest;
mod slot;
mod timers;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_device::clock::Clock;
use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{
    Budget, Change, CoreContext, CoreMessage, PollOutcome, PollState, PollerCommand, PollerId, PollerSlot,
};

use crate::mailbox::Mailbox;
use crate::settings::{CoreSettings, Notify, YieldPolicy};
use crate::shared::{CoreShared, LEAVE, LEFT};
use crate::watch::Watch;
use account::Account;
use slot::{SlotEntry, SlotState};
use timers::{Timer, Timers};

/// How often every awake poller is tidied.
const TIDY: Duration = Duration::from_millis(10);

/// Turns with work between two looks at the clock, at most.
const CLOCK_TURNS: u32 = 64;

/// Units of work after which the clock is looked at even sooner: some 40 us on a memory disk.
const CLOCK_UNITS: u64 = 64;

/// Turns without work between two looks at the clock, of a core that does not yield. (What a look costs is lost between two
/// yields, and after a yield much time may have gone by.)
const IDLE_CLOCK_TURNS: u32 = 16;

/// Turns without work between two yields.
const YIELD_TURNS: u32 = 4;

/// Orders carried out between two turns. An order costs some system calls and comes when a guest's front end wants it, so what
/// one says leaves the others their turns.
const ORDERS_PER_TURN: u64 = 8;

/// One core at work. Lives on its own thread.
pub(crate) struct PollLoop {
    mailbox: Arc<Mailbox>,
    panel: Arc<CoreShared>,
    watch: Watch,
    /// With the last look at the clock.
    context: CoreContext,
    budget: Budget,
    yield_policy: YieldPolicy,
    notify: Notify,
    spin: Duration,
    /// [`CoreSettings::completion_wait`]; zero if it never sleeps for completions.
    completion_wait: Duration,
    chairs: Vec<Option<SlotEntry>>,
    free: Vec<usize>,
    /// Who is stepped each turn: indexes of `chairs`.
    awake: Vec<usize>,
    timers: Timers,
    account: Account,
    /// Slots that had work since the last look at the clock.
    worked: Vec<usize>,
    last_tidy: Instant,
    last_glance: Instant,
    /// Turns and work since the last look at the clock.
    unlooked_turns: u32,
    unlooked_units: u64,
    /// Turns without work in a row, and the look at the clock after the first of them.
    idle_run: u32,
    idle_from: Instant,
    /// Queue being stepped, for the message if its poller panics.
    pub(crate) stepping: Option<u16>,
}

impl PollLoop {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        panel: Arc<CoreShared>,
        watch: Watch,
        clock: Arc<dyn Clock>,
        settings: &CoreSettings,
    ) -> Self {
        let context = CoreContext::new(clock);
        let now = context.now();
        let sleeps = settings.yield_policy != YieldPolicy::Dedicated;
        PollLoop {
            mailbox,
            panel,
            watch,
            context,
            budget: settings.budget,
            yield_policy: settings.yield_policy,
            notify: settings.notify,
            spin: settings.spin,
            completion_wait: if sleeps { settings.completion_wait } else { Duration::ZERO },
            chairs: Vec::new(),
            free: Vec::new(),
            awake: Vec::new(),
            timers: Timers::default(),
            account: Account::new(now),
            worked: Vec::new(),
            last_tidy: now,
            last_glance: now,
            unlooked_turns: 0,
            unlooked_units: 0,
            idle_run: 0,
            idle_from: now,
            stepping: None,
        }
    }

    /// Turns until the core is told to leave and nobody sits here any more.
    pub(crate) fn run(&mut self) {
        loop {
            if self.mailbox.raised() && self.read_mail() {
                break;
            }
            if self.awake.is_empty() {
                if !self.mailbox.raised() {
                    self.sleep();
                }
                continue;
            }
            let units = self.step_awake();
            self.account.turn(units);
            self.after_turn(units);
        }
        self.look();
        self.panel.publish(&self.account.counts, 0, self.account.permille(), self.context.now());
    }

    /// Carries out what has been posted, some of it if it is much, and looks at the panel. True if the core is to end.
    fn read_mail(&mut self) -> bool {
        self.mailbox.lower();
        if !self.read_orders(bound(Invariant::BoundsPolls, ORDERS_PER_TURN)) {
            // The rest after the next turn.
            self.mailbox.expect();
        }
        self.spin = self.panel.spin();
        let notify = self.panel.notify();
        if notify != self.notify {
            self.notify = notify;
            for &index in &self.awake {
                if let Some(chair) = &mut self.chairs[index]
                    && chair.state != SlotState::Fresh
                {
                    chair.seat.disarm(&self.context, notify == Notify::Polled);
                }
            }
            // To be notified, those at rest have asked to be kicked already. To be polled, each is looked at for `spin`.
            if notify == Notify::Polled {
                (0..self.chairs.len()).for_each(|index| self.wake(index));
            }
        }
        self.panel.leave.load(Ordering::Acquire) == LEAVE && self.may_end()
    }

    /// Carries out at most so many orders; says whether those were all.
    fn read_orders(&mut self, most: u64) -> bool {
        for _ in 0..most {
            let Some(order) = self.mailbox.next() else { return true };
            self.account.counts.orders += 1;
            match order {
                CoreMessage::Attach(seat) => self.sit(seat),
                CoreMessage::Poller(id, tell) => self.tell(id, tell),
            }
        }
        false
    }

    /// Ends only if nobody sits here or is on the way, and the owner has not changed its mind.
    fn may_end(&mut self) -> bool {
        if self.occupied() {
            return false;
        }
        self.mailbox.close();
        // Nobody sits here: whoever is told something has left.
        while !self.read_orders(ORDERS_PER_TURN) {}
        let left = !self.occupied()
            && self.panel.leave.compare_exchange(LEAVE, LEFT, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !left {
            self.mailbox.reopen();
        }
        left
    }

    fn occupied(&self) -> bool {
        self.chairs.len() > self.free.len()
    }

    fn sit(&mut self, seat: PollerSlot) {
        let state = if seat.must_look() { SlotState::Fresh } else { SlotState::Armed };
        let at = self.free.pop().unwrap_or_else(|| {
            self.chairs.push(None);
            self.chairs.len() - 1
        });
        // What a turn may note of each of them does not allocate.
        self.timers.reserve(self.chairs.len());
        self.worked.reserve(self.chairs.len().saturating_sub(self.worked.len()));
        self.awake.reserve(self.chairs.len().saturating_sub(self.awake.len()));
        let watched = self.watch.add(seat.wakers(), at);
        self.chairs[at] = Some(SlotEntry::new(seat, watched, state));
        if state.is_awake() {
            self.awake(at);
        }
    }

    fn tell(&mut self, id: PollerId, tell: PollerCommand) {
        let Some(at) = self.chairs.iter().position(|c| c.as_ref().is_some_and(|c| c.seat.id() == id)) else {
            return;
        };
        let Some(chair) = &mut self.chairs[at] else { return };
        if matches!(tell, PollerCommand::Apply(Change::Kick(_) | Change::Own(_), _)) {
            // The old descriptors go before the poller can close them.
            self.watch.remove(std::mem::take(&mut chair.watched));
            chair.seat.tell(&mut self.context, tell);
            chair.watched = self.watch.add(chair.seat.wakers(), at);
        } else {
            chair.seat.tell(&mut self.context, tell);
        }
        // Whatever it was, the poller has to poll to act on it.
        self.wake(at);
    }

    /// One turn of every awake slot; says how much work there was.
    fn step_awake(&mut self) -> u64 {
        let mut units = 0;
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            let outcome = self.step(index);
            units += u64::from(outcome.units());
            if outcome.state() == PollState::Parked {
                // Counts as work: its owner is likely to ask for more. The last one has moved here.
                units += 1;
                self.awake.swap_remove(at);
                self.take_away(index);
                continue;
            }
            at += 1;
        }
        units
    }

    #[inline]
    fn step(&mut self, index: usize) -> PollOutcome {
        let Some(chair) = &mut self.chairs[index] else { return PollOutcome::IDLE };
        self.account.counts.steps += 1;
        self.stepping = Some(chair.seat.queue());
        let outcome = chair.step(&mut self.context, self.budget, self.notify == Notify::Polled);
        self.stepping = None;
        if outcome.state() == PollState::Busy {
            self.account.counts.bytes += u64::from(outcome.cost().bytes);
            if chair.charge.add(outcome.cost()) {
                self.worked.push(index);
            }
        }
        outcome
    }

    /// Frees the slot of a poller that has parked. It is no longer in `awake`.
    fn take_away(&mut self, index: usize) {
        if let Some(chair) = self.chairs[index].take() {
            if chair.timed {
                self.timers.clear(Timer::Slot(index));
            }
            self.worked.retain(|worked| *worked != index);
            self.watch.remove(chair.watched);
            self.free.push(index);
            self.mailbox.vacated();
        }
    }

    /// The slot is stepped every turn from now on.
    fn awake(&mut self, index: usize) {
        self.awake.push(index);
        self.timers.ensure(Timer::Tidy, self.last_tidy + TIDY);
    }

    /// Makes a resting slot awake.
    fn wake(&mut self, index: usize) {
        let Some(Some(chair)) = self.chairs.get_mut(index) else { return };
        if chair.state.is_resting() {
            chair.state = SlotState::Polled;
            chair.idle_since = None;
            if std::mem::take(&mut chair.timed) {
                self.timers.clear(Timer::Slot(index));
            }
            chair.seat.disarm(&self.context, self.notify == Notify::Polled);
            self.awake(index);
        }
    }

    /// Tidies whoever has been stepped since the last time, and publishes the meters.
    fn tidy(&mut self) {
        for chair in self.chairs.iter_mut().flatten() {
            let stepped = chair.idle_since.is_some_and(|since| since >= self.last_tidy);
            if chair.state.is_awake() || stepped {
                chair.seat.tidy();
            }
        }
        let now = self.context.now();
        self.last_tidy = now;
        self.account.share(now);
        self.panel.publish(&self.account.counts, self.awake.len(), self.account.permille(), now);
    }

    /// Looks at the clock, and does what is due.
    fn look(&mut self) {
        let now = self.context.look();
        (self.unlooked_turns, self.unlooked_units) = (0, 0);
        let ns = self.account.look(now);
        self.settle(ns);
        while let Some(timer) = self.timers.due(now) {
            match timer {
                Timer::Tidy => {
                    self.tidy();
                    if !self.awake.is_empty() {
                        self.timers.ensure(Timer::Tidy, now + TIDY);
                    }
                }
                Timer::Unwakeable => self.step_unwakeable(),
                Timer::Slot(index) => {
                    if let Some(chair) = &mut self.chairs[index] {
                        chair.timed = false;
                        self.step_resting(index);
                    }
                }
            }
        }
    }

    /// Divides what went by since the last look among the slots that had work meanwhile.
    fn settle(&mut self, ns: u64) {
        let (mut costs, mut weights) = (0, 0);
        for &index in &self.worked {
            if let Some(chair) = &self.chairs[index] {
                costs += chair.charge.unsettled();
                weights += u64::from(chair.seat.share().weight.get());
            }
        }
        for index in self.worked.drain(..) {
            if let Some(chair) = &mut self.chairs[index] {
                chair.charge.settle(chair.seat.share(), ns, costs, weights);
            }
        }
    }

    /// What is due after a turn: a look at the clock, rest for whoever has nothing to do, news of those who rest.
    fn after_turn(&mut self, units: u64) {
        let polled = self.notify == Notify::Polled;
        let looks = if units > 0 {
            self.idle_run = 0;
            self.unlooked_turns += 1;
            self.unlooked_units += units;
            self.unlooked_turns >= CLOCK_TURNS || self.unlooked_units >= CLOCK_UNITS
        } else {
            self.idle_run = self.idle_run.wrapping_add(1);
            if polled && self.idle_run > 1 && self.only_waits() && self.wait_for_completions() {
                return;
            }
            let yields = polled && self.yield_policy != YieldPolicy::Dedicated;
            if yields && self.idle_run.is_multiple_of(YIELD_TURNS) {
                std::thread::yield_now();
            } else if polled {
                std::hint::spin_loop();
            }
            // The first idle turn ends the time that is charged as work.
            self.idle_run == 1
                || self.idle_run.is_multiple_of(if yields { YIELD_TURNS } else { IDLE_CLOCK_TURNS })
        };
        if looks {
            self.look();
        }
        if self.idle_run == 1 {
            self.idle_from = self.context.now();
        }
        if looks || !polled {
            self.rest_idle();
        }
        self.hear_resting(looks);
    }
}
