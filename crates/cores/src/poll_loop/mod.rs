//! The loop of one core.
//!
//! Where all awake slots are of one group each is stepped in every turn. Those of several groups are stepped in the order, and with the budgets,
//! of [`FairTurns`]: each group has a part of the core's work in proportion to its weight, and one that has had more than its part is left out of
//! turns until the others have had theirs.
//!
//! A slot is *awake* (has its turns) or *resting* (armed: its descriptors are what makes it awake again), each by itself: on
//! a polled core it rests when it has had no work for [`CoreSettings::spin`], on a notified core as soon as it has none, on an adaptive
//! core when looking on is worth less than being kicked (`adaptive`). One whose requests a limit
//! holds back rests without being armed, and its timer steps it when the next may pass. With all
//! at rest the core sleeps. With some, its ring tells it which of the others was woken; without such a ring it asks the kernel now and
//! then, for all at once. A polled core whose awake slots all wait for a disk sleeps between two turns where that costs less than to poll
//! (`wait`); before a sleep of more than [`CoreSettings::completion_wait`] they are armed, and looked at once more.
//!
//! **Why no wake-up is lost.** The driver publishes a request and then looks whether a kick is wanted; the core says that a
//! kick is wanted and then looks for requests. With a full fence between the two steps on both sides at least one of them
//! sees the other: either the core finds the request and the slot stays awake, or the driver kicks, and the kick stands in
//! the ring, or is a descriptor that stays readable, until the core has seen it. Before a short sleep a slot that waits for a disk is not armed: what its guest adds is found in the next
//! turn, which comes when the sleep is over at the latest. Before a long one it is armed and looked at as one that is to rest. The mailbox works the same way, with its flag for the request. The
//! protocol is searched exhaustively in `tests/no_lost_wake.rs`, with the store buffers of a real processor, and with each
//! fence and look taken out.

mod account;
mod adaptive;
mod charge;
mod choices;
mod objective;
mod rest;
mod slot;
mod spins;
mod timers;
mod wait;
mod wake_up;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_device::clock::Clock;
use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{
    BlockDevice, Budget, Change, CoreContext, CoreIo, CoreMessage, PollOutcome, PollState, PollerCommand,
    PollerId, PollerSlot, Share,
};
use ioplane_scheduler::{CoreObjective, FairTurns, PollTrials, Polled, QueueMode, poll_cost};

use crate::mailbox::Mailbox;
use crate::ring::CoreRing;
use crate::settings::{CoreSettings, Notify, YieldPolicy};
use crate::shared::{CoreShared, ENDED, ENDING};
use crate::watch::Watch;
use account::Account;
use adaptive::{Adaptive, Age};
use charge::SettleRate;
use objective::Objective;
use slot::{SlotEntry, SlotState};
use spins::Spins;
use timers::{Timer, Timers};
use wait::WaitPolicy;
use wake_up::WakeUps;

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

/// Messages handled between two turns, at most. A message costs some system calls and a guest's front end causes it, so a
/// front end that sends many must not delay the queues of others.
const MESSAGES_PER_TURN: u64 = 8;

/// The core's ring, if it has one.
#[inline]
fn ring(context: &mut CoreContext) -> Option<&mut CoreRing> {
    let io: &mut dyn Any = context.io()?;
    io.downcast_mut()
}

/// The state of one running core. Lives on the core's own thread.
pub(crate) struct PollLoop {
    mailbox: Arc<Mailbox>,
    shared: Arc<CoreShared>,
    watch: Watch,
    /// With the last look at the clock.
    context: CoreContext,
    budget: Budget,
    yield_policy: YieldPolicy,
    notify: Notify,
    spin: Duration,
    wait_policy: WaitPolicy,
    wake_ups: WakeUps,
    objective: Objective,
    /// When an adaptive core polls what it would arm.
    trials: PollTrials,
    age: Age,
    spins: Spins,
    /// In the last turn every awake slot waited for completions.
    waited: bool,
    /// Until then it asks no guest to kick, since one of the slots that waited could not promise that it would be.
    unkicked_until: Instant,
    /// The awake slots have asked to be kicked, and are looked at once more.
    asks: bool,
    slots: Vec<Option<SlotEntry>>,
    free: Vec<usize>,
    /// The slots that are stepped each turn: indexes of `slots`.
    awake: Vec<usize>,
    /// The same slots by groups, and their order where those are several.
    turns: FairTurns,
    timers: Timers,
    account: Account,
    /// Slots that had work since the last look at the clock.
    worked: Vec<usize>,
    /// A slot rests or is Held, and was not tidied before.
    untidy: bool,
    last_tidy: Instant,
    last_event_check: Instant,
    /// When the kicks of all resting slots were asked for last, by a check or at the end of a sleep.
    kicks_known: Instant,
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
        shared: Arc<CoreShared>,
        watch: Watch,
        ring: Option<CoreRing>,
        clock: Arc<dyn Clock>,
        settings: &CoreSettings,
    ) -> Self {
        let context = CoreContext::new(clock).with_io(ring.map(|ring| Box::new(ring) as _));
        let now = context.now();
        let sleeps = settings.yield_policy != YieldPolicy::Dedicated;
        let mut poll_loop = PollLoop {
            mailbox,
            shared,
            watch,
            context,
            budget: settings.budget,
            yield_policy: settings.yield_policy,
            notify: settings.notify,
            spin: settings.spin,
            wait_policy: WaitPolicy::new(if sleeps { settings.completion_wait } else { Duration::ZERO }),
            wake_ups: WakeUps::default(),
            objective: Objective::new(CoreObjective::default(), now),
            trials: PollTrials::default(),
            age: Age::new(now),
            spins: Spins::default(),
            waited: false,
            unkicked_until: now,
            asks: false,
            slots: Vec::new(),
            free: Vec::new(),
            awake: Vec::new(),
            turns: FairTurns::default(),
            timers: Timers::default(),
            account: Account::new(now),
            worked: Vec::new(),
            untidy: false,
            last_tidy: now,
            last_event_check: now,
            kicks_known: now,
            unlooked_turns: 0,
            unlooked_units: 0,
            idle_run: 0,
            idle_from: now,
            stepping: None,
        };
        poll_loop.read_objective();
        poll_loop
    }

    /// Turns until the owner asks the core to end and no poller is attached any more.
    pub(crate) fn run(&mut self) {
        loop {
            if self.mailbox.pending() && self.read_mailbox() {
                break;
            }
            if self.awake.is_empty() {
                if !self.mailbox.pending() {
                    self.sleep();
                }
                continue;
            }
            let units = self.step_awake();
            self.account.turn(units);
            let events_due = self.events_due();
            let fired = ring(&mut self.context).and_then(|ring| {
                if events_due || ring.has_operations() {
                    ring.enter();
                }
                ring.sleeps().then(|| ring.has_fired())
            });
            self.after_turn(units, fired);
        }
        self.look();
        self.shared.publish(&self.account.counts, 0, self.account.permille(), self.context.now());
    }

    /// Handles messages, a bounded number, and reads the settings that the owner may have changed. True if the core is to end.
    fn read_mailbox(&mut self) -> bool {
        self.mailbox.clear();
        if !self.handle_messages(bound(Invariant::BoundsPolls, MESSAGES_PER_TURN)) {
            // The rest after the next turn.
            self.mailbox.mark_pending();
        }
        self.spin = self.shared.spin();
        let notify = self.shared.notify();
        if notify != self.notify {
            self.notify = notify;
            self.note_each();
            for &index in &self.awake {
                if let Some(entry) = &mut self.slots[index]
                    && entry.state != SlotState::Fresh
                {
                    entry.slot.disarm(&self.context, notify.polls());
                }
            }
            // Those at rest have asked to be kicked already. To be polled, each is looked at for `spin`.
            if notify == Notify::Polled {
                (0..self.slots.len()).for_each(|index| self.wake(index));
            }
        }
        self.read_objective();
        self.spins.changed();
        self.shared.life.load(Ordering::Acquire) == ENDING && self.try_end()
    }

    /// Handles at most `most` messages; says whether those were all.
    fn handle_messages(&mut self, most: u64) -> bool {
        for _ in 0..most {
            let Some(message) = self.mailbox.next() else { return true };
            self.account.counts.messages += 1;
            match message {
                CoreMessage::Attach(slot) => self.attach(slot),
                CoreMessage::Poller(id, command) => self.handle_command(id, command),
                CoreMessage::Group(share) => {
                    self.turns.part(share.group, share.part);
                    self.turns.bound(share.group, share.in_flight);
                }
                CoreMessage::Device(part) => self.turns.bound_on(part.group, part.device, part.in_flight),
            }
        }
        false
    }

    /// Ends the core if no poller is attached or about to be, and the owner has not withdrawn the request.
    fn try_end(&mut self) -> bool {
        if self.occupied() {
            return false;
        }
        self.mailbox.close();
        // No poller is attached: any command is for one that has parked.
        while !self.handle_messages(MESSAGES_PER_TURN) {}
        let ended = !self.occupied()
            && self.shared.life.compare_exchange(ENDING, ENDED, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !ended {
            self.mailbox.reopen();
        }
        ended
    }

    /// Whether it has pollers, or what those have left on the ring.
    fn occupied(&mut self) -> bool {
        self.slots.len() > self.free.len() || ring(&mut self.context).is_some_and(|ring| ring.orphans() > 0)
    }

    fn attach(&mut self, mut slot: PollerSlot) {
        let state = if slot.must_look() { SlotState::Fresh } else { SlotState::Armed };
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        // What a turn may note of each of them does not allocate.
        self.timers.reserve(self.slots.len());
        self.worked.reserve(self.slots.len().saturating_sub(self.worked.len()));
        self.awake.reserve(self.slots.len().saturating_sub(self.awake.len()));
        self.spins.reserve(self.slots.len());
        let slots = self.slots.len();
        self.watch.reserve(slots);
        let mut ring = ring(&mut self.context);
        if let Some(ring) = &mut ring {
            ring.reserve(slots);
        }
        let watched = self.watch.add(ring, slot.wakers(), at);
        self.join_group(at, slot.share(), slot.block_device());
        let mut adaptive = Adaptive::new(self.objective.asked(), self.wake_ns());
        if let Some(polling) = slot.take_polling() {
            adaptive.arrives(&polling, self.objective.asked());
        }
        let now = self.context.now();
        let mode = if self.notify == Notify::Adaptive { QueueMode::Polled } else { QueueMode::Fixed };
        slot.meter().choices().begin(mode, self.shared.age_ns(now));
        adaptive.publish(slot.meter());
        self.slots[at] = Some(SlotEntry::new(slot, watched, state, adaptive, now));
        if state.is_awake() {
            self.awake(at);
        }
    }

    /// The slot, which is no member of a group and not awake there, belongs to this one.
    fn join_group(&mut self, index: usize, share: Share, device: Option<BlockDevice>) {
        self.turns.attach_on(index, share.group, 1, device);
        self.turns.weigh(share.group, share.weight.get());
    }

    /// The slot belongs to this group, on this device, from now on, and so does what it has in flight.
    fn change_lane(&mut self, at: usize, share: Share, device: Option<BlockDevice>, awake: bool) {
        let in_flight = self.turns.in_flight(at);
        self.turns.detach(at);
        self.join_group(at, share, device);
        self.turns.moved(at, in_flight, 0);
        if awake {
            self.turns.wake(at);
        }
    }

    fn handle_command(&mut self, id: PollerId, mut command: PollerCommand) {
        let Some(at) = self.slots.iter().position(|c| c.as_ref().is_some_and(|c| c.slot.id() == id)) else {
            return;
        };
        let Some(entry) = &mut self.slots[at] else { return };
        if let PollerCommand::Apply(Change::Share(share), _) = command {
            let stays = entry.slot.share().group == share.group;
            let (awake, device) = (entry.state.is_awake(), entry.slot.block_device());
            entry.slot.handle(&mut self.context, command);
            if stays {
                self.turns.weigh(share.group, share.weight.get());
            } else {
                self.change_lane(at, share, device, awake);
            }
        } else if let PollerCommand::Apply(Change::BlockDevice(device), _) = command {
            let (awake, share) = (entry.state.is_awake(), entry.slot.share());
            entry.slot.handle(&mut self.context, command);
            self.change_lane(at, share, device, awake);
        } else if matches!(command, PollerCommand::Apply(Change::Kick(_) | Change::Own(_), _)) {
            // The old descriptors go before the poller can close them.
            self.watch.remove(ring(&mut self.context), std::mem::take(&mut entry.watched));
            entry.slot.handle(&mut self.context, command);
            entry.watched = self.watch.add(ring(&mut self.context), entry.slot.wakers(), at);
        } else {
            if let PollerCommand::Leave(polling) = &mut command {
                entry.adaptive.leaves(polling);
            }
            entry.slot.handle(&mut self.context, command);
        }
        // Whatever it was, the poller has to poll to act on it.
        self.wake(at);
    }

    /// One turn of the awake slots; says how much work there was.
    #[inline]
    fn step_awake(&mut self) -> u64 {
        if self.turns.competes() { self.step_groups() } else { self.step_each::<false>() }
    }

    /// Every awake slot once, whatever its group has had. `PAID`: its group pays for it, as it has to where several compete.
    #[inline]
    fn step_each<const PAID: bool>(&mut self) -> u64 {
        let mut units = 0;
        let mut at = 0;
        let bounded = self.turns.bounds_lanes();
        while let Some(&index) = self.awake.get(at) {
            let outcome = if PAID || bounded { self.step(index) } else { self.step_with(index, self.budget) };
            units += u64::from(outcome.units());
            if outcome.state() == PollState::Parked {
                // Counts as work: its owner is likely to ask for more. The next one has moved here.
                units += 1;
                self.leave_awake(at);
                self.free_slot(index);
                continue;
            }
            if outcome.state() == PollState::Limited {
                self.leave_awake(at);
                self.hold(index, outcome);
                continue;
            }
            at += 1;
        }
        units
    }

    /// Every group with awake slots, for as much as its weight is worth.
    fn step_groups(&mut self) -> u64 {
        let mut units = 0;
        self.turns.begin_turn();
        while let Some(grant) = self.turns.next_poll() {
            let index = grant.slot;
            let budget = Budget { bytes: grant.bytes as u32, room: room_of(grant.room), ..self.budget };
            let outcome = self.step_with(index, budget);
            self.turns.polled(index, cost_of(&outcome));
            units += u64::from(outcome.units());
            let parked = outcome.state() == PollState::Parked;
            if parked || outcome.state() == PollState::Limited {
                if let Some(at) = self.awake.iter().position(|other| *other == index) {
                    self.leave_awake(at);
                }
                if parked {
                    units += 1;
                    self.free_slot(index);
                } else {
                    self.hold(index, outcome);
                }
            }
        }
        units
    }

    /// One poll of a slot outside of the turns, which its group pays for.
    fn step(&mut self, index: usize) -> PollOutcome {
        let room = room_of(self.turns.room(index));
        let outcome = self.step_with(index, Budget { room, ..self.budget });
        if outcome.state() == PollState::Busy && self.turns.competes() {
            self.turns.polled(index, cost_of(&outcome));
        }
        outcome
    }

    #[inline]
    fn step_with(&mut self, index: usize, budget: Budget) -> PollOutcome {
        let Some(entry) = &mut self.slots[index] else { return PollOutcome::IDLE };
        self.account.counts.steps += 1;
        self.stepping = Some(entry.slot.queue());
        self.context.enter_slot(index);
        let looked = self.context.now();
        let (was, was_idle) = (entry.state, entry.idle_since.is_some());
        let outcome = entry.step(&mut self.context, budget, self.notify.polls());
        self.stepping = None;
        if let Some((submitted, completed)) = self.context.take_moved() {
            self.turns.moved(index, submitted, completed);
        }
        if budget.room != Budget::UNBOUNDED && self.context.take_lacked_room() {
            self.turns.lacked_room(index);
        }
        if outcome.state() == PollState::Busy {
            if self.notify == Notify::Adaptive {
                let requests = outcome.cost().requests;
                if self.objective.has_p99() {
                    let now = self.context.look();
                    self.objective.took(requests, now.saturating_duration_since(entry.looked));
                }
                let now_ns = self.age.at(self.context.now(), &self.shared);
                let (asked, meter) = (self.objective.asked(), entry.slot.meter());
                // It may be judged now, by what the core took until now.
                if self.trials.wants_sample(now_ns)
                    && let Some(cpu) = self.context.thread_cpu()
                {
                    self.trials.sample(now_ns, cpu.as_nanos() as u64);
                }
                entry.adaptive.worked(now_ns, requests, asked, &mut self.trials, meter);
            }
            self.account.counts.bytes += u64::from(outcome.cost().bytes);
            if entry.charge.add(outcome.cost()) {
                self.worked.push(index);
            }
        } else {
            entry.charge.empty_polls += 1;
            if (!was_idle || was != entry.state) && !std::mem::replace(&mut entry.enters, true) {
                self.spins.ran_dry(index);
            }
        }
        entry.looked = looked;
        outcome
    }

    /// Frees the slot of a poller that has parked. It is no longer in `awake`.
    fn free_slot(&mut self, index: usize) {
        if let Some(entry) = self.slots[index].take() {
            entry.slot.meter().publish_empty_polls(entry.charge.empty_polls);
            if entry.timed {
                self.timers.clear(Timer::Slot(index));
            }
            self.worked.retain(|worked| *worked != index);
            self.spins.forget(index);
            self.turns.detach(index);
            self.watch.remove(ring(&mut self.context), entry.watched);
            self.free.push(index);
            self.mailbox.detached();
        }
    }

    /// The slot is stepped every turn from now on: in the order of the slots, not of their waking. What one of them hands to the next, as a sender
    /// does a frame to its receiver, is found in the same turn then.
    fn awake(&mut self, index: usize) {
        let at = self.awake.partition_point(|other| *other < index);
        self.awake.insert(at, index);
        self.turns.wake(index);
        self.timers.ensure(Timer::Tidy, self.last_tidy + TIDY);
    }

    /// The slot at that place of `awake`, which the next one takes, is not stepped every turn any more.
    fn leave_awake(&mut self, at: usize) {
        self.turns.rest(self.awake.remove(at));
    }

    /// Makes a resting slot awake.
    fn wake(&mut self, index: usize) {
        let Some(Some(entry)) = self.slots.get_mut(index) else { return };
        if entry.state.is_resting() {
            let held = entry.slot.meter().choices().mode().is_held();
            entry.state = SlotState::Polled;
            entry.idle_since = None;
            // The request was there before the core was.
            let now = self.context.now();
            entry.looked = now.checked_sub(entry.adaptive.wake_up()).unwrap_or(now);
            if std::mem::take(&mut entry.timed) {
                self.timers.clear(Timer::Slot(index));
            }
            entry.slot.disarm(&self.context, self.notify.polls());
            if self.notify == Notify::Adaptive || held {
                self.note(index, QueueMode::Polled);
            }
            self.awake(index);
        }
    }

    /// Tidies every poller that was stepped since the last time, and publishes the meters.
    fn tidy(&mut self) {
        self.untidy = false;
        for (index, entry) in self.slots.iter_mut().enumerate() {
            let Some(entry) = entry else { continue };
            let stepped = entry.idle_since.is_some_and(|since| since >= self.last_tidy);
            if entry.state.is_awake() || stepped {
                entry.slot.meter().publish_wants_more(self.turns.wants_more(index));
                publish_use(entry, &self.turns, index);
                entry.slot.tidy();
            }
        }
        self.turns.end_period();
        let now = self.context.now();
        if self.notify == Notify::Adaptive {
            self.price_polling();
        }
        if let Some(ring) = ring(&mut self.context) {
            let since = now.saturating_duration_since(self.last_tidy);
            self.wait_policy.count(ring.ended(), since.as_nanos() as u64);
        }
        self.check_objective(now);
        self.last_tidy = now;
        self.account.share(now);
        self.shared.publish(&self.account.counts, self.awake.len(), self.account.permille(), now);
    }

    /// Looks at the clock, and does what is due.
    fn look(&mut self) {
        let now = self.context.look();
        (self.unlooked_turns, self.unlooked_units) = (0, 0);
        self.spend(now, now.saturating_duration_since(self.account.looked()));
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
                    if let Some(entry) = &mut self.slots[index] {
                        entry.timed = false;
                        self.step_resting(index);
                    }
                }
            }
        }
    }

    /// Divides what went by since the last look among the slots that had work meanwhile.
    fn settle(&mut self, ns: u64) {
        if self.worked.is_empty() {
            return;
        }
        let unsettled =
            |index: &usize| self.slots[*index].as_ref().map_or(0, |entry| entry.charge.unsettled());
        let rate = SettleRate::new(ns, self.worked.iter().map(unsettled).sum());
        for index in self.worked.drain(..) {
            if let Some(entry) = &mut self.slots[index] {
                entry.charge.settle(rate);
                entry.slot.meter().publish(entry.charge.time_ns);
            }
        }
    }

    /// What is due after a turn: reading the clock, resting the slots that have no work, checking the descriptors of resting slots.
    /// `fired`: whether the ring knows of a descriptor that was woken, if the core sleeps in its ring.
    fn after_turn(&mut self, units: u64, fired: Option<bool>) {
        let polls = self.notify.polls();
        let waited = units > 0 && std::mem::take(&mut self.waited);
        let looks = if units > 0 {
            self.idle_run = 0;
            self.unlooked_turns += 1;
            self.unlooked_units += units;
            waited || self.unlooked_turns >= CLOCK_TURNS || self.unlooked_units >= CLOCK_UNITS
        } else {
            self.idle_run = self.idle_run.wrapping_add(1);
            self.waited = polls && self.only_waits();
            if self.waited && self.idle_run > 1 && self.wait_for_completions() {
                return;
            }
            let yields = polls && self.yield_policy != YieldPolicy::Dedicated;
            if yields && self.idle_run.is_multiple_of(YIELD_TURNS) {
                std::thread::yield_now();
            } else if polls {
                std::hint::spin_loop();
            }
            // The first idle turn ends the time that is charged as work.
            self.idle_run == 1
                || self.idle_run.is_multiple_of(if yields { YIELD_TURNS } else { IDLE_CLOCK_TURNS })
        };
        if looks {
            self.look();
            if waited {
                let idle = self.context.now().saturating_duration_since(self.idle_from);
                self.wait_policy.work_came(idle);
            }
        }
        if self.idle_run == 1 {
            self.idle_from = self.context.now();
            self.wait_policy.idle_begins();
        }
        if looks || !polls {
            self.rest_idle();
        }
        match fired {
            Some(false) => {}
            Some(true) => self.take_fired(looks),
            None => self.check_events(looks),
        }
    }
}

/// Publishes how often the slot was polled in vain, and what it and its group from this core have in flight.
fn publish_use(entry: &SlotEntry, turns: &FairTurns, index: usize) {
    let meter = entry.slot.meter();
    meter.publish_empty_polls(entry.charge.empty_polls);
    meter.publish_backing(turns.in_flight(index), turns.backing_use(index));
}

/// What a poll may hand to its backing, of what its group may.
#[inline]
fn room_of(room: u64) -> u32 {
    u32::try_from(room).unwrap_or(Budget::UNBOUNDED)
}

/// What a poll came to, for the turns.
#[inline]
fn cost_of(outcome: &PollOutcome) -> Polled {
    let cost = outcome.cost();
    match outcome.state() {
        PollState::Busy => Polled { bytes: poll_cost(cost.requests, cost.bytes), more: outcome.has_more() },
        _ => Polled { bytes: 0, more: false },
    }
}
