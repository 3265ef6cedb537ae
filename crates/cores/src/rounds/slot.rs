//! One seat and what the core knows of it.

use std::time::Instant;

use ioplane_device::{Budget, Seat, Step};

use crate::watch::Watched;

/// What a core does with a slot. Each changes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Has come: stepped in the next turn, whatever is so of the others (laws 2 and 3), and Polled from then on.
    Fresh,
    /// Stepped in every turn, until it has had no work for long enough.
    Polled,
    /// Has asked to be kicked and was looked at after that: stepped when one of its descriptors says so.
    Armed,
    /// As Armed, but nothing is sure to wake it: stepped by a timer.
    Unwakeable,
    /// Its poller has left: never stepped again, and taken away before the next turn.
    Parked,
}

impl SlotState {
    /// Whether it is stepped every turn.
    #[inline]
    pub(super) fn is_awake(self) -> bool {
        matches!(self, SlotState::Fresh | SlotState::Polled)
    }

    /// Whether something has to happen before it is stepped.
    pub(super) fn is_resting(self) -> bool {
        matches!(self, SlotState::Armed | SlotState::Unwakeable)
    }
}

/// One seat and what the core knows of it.
pub(super) struct Chair {
    pub(super) seat: Seat,
    pub(super) watched: Watched,
    pub(super) state: SlotState,
    /// The core's look at the clock before the first of its idle steps in a row; `None` after a step with work, and until it
    /// has been stepped after it was woken.
    pub(super) idle_since: Option<Instant>,
}

impl Chair {
    /// One turn of its poller. `now` is the core's last look at the clock, `polling` whether the core looks at rings by itself.
    #[inline]
    pub(super) fn step(&mut self, budget: Budget, now: Instant, polling: bool) -> Step {
        let step = self.seat.step(budget);
        match step {
            Step::Idle => {
                self.idle_since.get_or_insert(now);
            }
            Step::Busy(_) => self.idle_since = None,
            Step::Vacated => self.state = SlotState::Parked,
        }
        if self.state == SlotState::Fresh {
            // Told after its first step, which begins with `resume`.
            self.state = SlotState::Polled;
            self.seat.disarm(polling);
        }
        step
    }
}
