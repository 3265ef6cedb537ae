//! One slot, with what the core knows of it.

use std::time::{Duration, Instant};

use ioplane_device::{Budget, CoreContext, PollOutcome, PollState, PollerSlot};
use ioplane_scheduler::{ArmReason, PollTrials};

use super::adaptive::Adaptive;
use super::charge::Charge;
use crate::settings::Notify;
use crate::shared::CoreShared;
use crate::watch::Watched;

/// What a core does with a slot. Each changes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Newly attached: stepped in the next turn, whatever state the others are in (invariants 2 and 3), and Polled from then on.
    Fresh,
    /// Stepped in every turn, until it has had no work for long enough.
    Polled,
    /// Stepped in every turn, as Polled. Its poller says that it waits for something in flight: while all that are awake do, a polled
    /// core sleeps between two turns.
    Waiting,
    /// Has asked to be kicked and was looked at after that: stepped when one of its descriptors says so.
    Armed,
    /// A limit holds its requests back: stepped by its timer, and when something of it has ended. It has not asked to be kicked, since a
    /// kick would say nothing new.
    Held,
    /// As Armed, but nothing is sure to wake it: stepped by a timer.
    Unwakeable,
    /// Its poller has parked: never stepped again, and freed before the next turn.
    Parked,
}

impl SlotState {
    /// Whether it is stepped every turn.
    #[inline]
    pub(super) fn is_awake(self) -> bool {
        matches!(self, SlotState::Fresh | SlotState::Polled | SlotState::Waiting)
    }

    /// Whether something has to happen before it is stepped.
    pub(super) fn is_resting(self) -> bool {
        matches!(self, SlotState::Armed | SlotState::Held | SlotState::Unwakeable)
    }
}

/// One slot, with what the core knows of it.
pub(super) struct SlotEntry {
    pub(super) slot: PollerSlot,
    pub(super) watched: Watched,
    pub(super) state: SlotState,
    /// The core's look at the clock before the first of its idle steps in a row; `None` after a step with work, and until it
    /// has been stepped after it was woken.
    pub(super) idle_since: Option<Instant>,
    /// Is to be entered among the spins at the next look.
    pub(super) enters: bool,
    /// Has a timer of its own: rests, and its poller has said when it wants to be polled.
    pub(super) timed: bool,
    /// Only of a Waiting slot: when its poller wants to be polled whatever happens, if it has said so.
    pub(super) wake_at: Option<Instant>,
    pub(super) charge: Charge,
    /// Of an adaptive core: for how long it is looked at.
    pub(super) adaptive: Adaptive,
    /// Of a core with an objective for its p99: the core's look at the clock before the last step. What is found next has come after it.
    pub(super) looked: Instant,
}

impl SlotEntry {
    pub(super) fn new(
        slot: PollerSlot,
        watched: Watched,
        state: SlotState,
        adaptive: Adaptive,
        now: Instant,
    ) -> Self {
        SlotEntry {
            slot,
            watched,
            state,
            idle_since: None,
            enters: false,
            timed: false,
            wake_at: None,
            charge: Charge::default(),
            adaptive,
            looked: now,
        }
    }

    /// One turn of its poller. `polling`: whether the core looks at rings by itself.
    #[inline]
    pub(super) fn step(&mut self, context: &mut CoreContext, budget: Budget, polling: bool) -> PollOutcome {
        let outcome = self.slot.step(context, budget);
        if self.state == SlotState::Fresh && outcome.state() != PollState::Parked {
            // After its first step, which begins with `resume`.
            self.state = SlotState::Polled;
            self.slot.disarm(context, polling);
        }
        match outcome.state() {
            PollState::Busy => self.idle_since = None,
            PollState::Idle | PollState::Waiting | PollState::Limited => {
                self.idle_since.get_or_insert(context.now());
            }
            PollState::Parked => self.state = SlotState::Parked,
        }
        if self.state.is_awake() {
            let waits = outcome.state() == PollState::Waiting;
            self.state = if waits { SlotState::Waiting } else { SlotState::Polled };
            if waits {
                self.wake_at = outcome.wake_in().map(|wait| context.now() + wait);
            }
        }
        outcome
    }

    /// Why an adaptive core arms it, if it does, after it was without work for `idle`. `spin`: for how long it is looked at
    /// while it waits for a disk, and at most for an objective. `may_poll`: the core's ceiling leaves polling.
    pub(super) fn spin_is_over(
        &mut self,
        now_ns: u64,
        idle: Duration,
        spin: Duration,
        may_poll: bool,
        trials: &PollTrials,
    ) -> Option<ArmReason> {
        if self.state != SlotState::Waiting {
            let over = self.adaptive.idle(now_ns, may_poll, trials);
            // A polled core asks for a kick then, so nobody can expect more of an objective.
            let longest = idle >= spin && self.adaptive.spins_for_objective();
            return over.or(longest.then_some(ArmReason::Objective));
        }
        // What the disk takes is no gap. The core sleeps meanwhile, so looking on costs little.
        self.adaptive.waits();
        if !may_poll {
            Some(ArmReason::Ceiling)
        } else if !self.adaptive.spins_beside_a_disk() {
            Some(ArmReason::LongGaps)
        } else {
            (idle >= spin).then_some(ArmReason::SlowDisk)
        }
    }

    /// When its spin ends, ns of the core's age, if nothing comes. None if it is not looked at in vain. `now_ns`: where nobody has said since when, it
    /// has been without work since then.
    pub(super) fn spin_ends(
        &mut self,
        now_ns: u64,
        notify: Notify,
        spin: Duration,
        shared: &CoreShared,
        trials: &PollTrials,
    ) -> Option<u64> {
        let since = self.idle_since.filter(|_| self.state.is_awake())?;
        let spin_ns = u64::try_from(spin.as_nanos()).unwrap_or(u64::MAX);
        let longest = shared.age_ns(since).saturating_add(spin_ns);
        if notify != Notify::Adaptive {
            return Some(longest);
        }
        if self.state == SlotState::Waiting {
            self.adaptive.waits();
            return Some(if self.adaptive.spins_beside_a_disk() { longest } else { now_ns });
        }
        let ends = self.adaptive.spin_ends(now_ns, trials);
        Some(if self.adaptive.spins_for_objective() { ends.min(longest) } else { ends })
    }

    /// Whether it waits for something below that wakes the core when it ends. `ring`: the core's ring has something of it in flight.
    pub(super) fn waits(&self, ring: bool) -> bool {
        self.state == SlotState::Waiting && (ring || self.watched.has_completion())
    }
}
