//! What one poll came to, and what it cost.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::context::CoreContext;

/// What a poller has to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollState {
    /// Nothing to do, and nothing in flight that would change that.
    Idle,
    /// Something was done; there may be more.
    Busy,
    /// Nothing to do until something in flight below ends, or the guest asks for more. The core may leave a poller with a
    /// [`crate::Wakers::completion`] alone until that is readable, but not for longer than some tens of microseconds: new
    /// requests wait meanwhile.
    Waiting,
    /// There are requests, and a limit holds them back until the time to wake. Whatever is in flight wakes it earlier. New requests change nothing,
    /// so the guest need not kick.
    Limited,
    /// Asked to drain or to suspend, and has done so: this poller will do nothing more until it is resumed.
    Parked,
}

/// What one poll cost, by the poller's own account (docs/decisions/0017-work-per-poll.md has the charges).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Requests or frames taken on, moved on or completed. One that is taken and completed in different polls counts in both.
    pub requests: u32,
    /// Bytes copied or handed on, and what else was done, in bytes that could have been copied meanwhile.
    pub bytes: u32,
}

/// What one call of [`crate::Poller::poll`] came to. 16 bytes, so that it is returned in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollOutcome {
    state: PollState,
    cost: Cost,
    wake_in_us: Option<NonZeroU32>,
    more: bool,
}

const _: () = assert!(size_of::<PollOutcome>() == 16);

impl PollOutcome {
    /// [`PollState::Idle`].
    pub const IDLE: PollOutcome = PollOutcome::of(PollState::Idle);
    /// [`PollState::Waiting`].
    pub const WAITING: PollOutcome = PollOutcome::of(PollState::Waiting);
    /// [`PollState::Parked`].
    pub const PARKED: PollOutcome = PollOutcome::of(PollState::Parked);

    const fn of(state: PollState) -> Self {
        PollOutcome { state, cost: Cost { requests: 0, bytes: 0 }, wake_in_us: None, more: false }
    }

    /// [`PollState::Busy`], at that cost, with more to do at once unless [`PollOutcome::with_more`] says otherwise.
    #[inline]
    pub fn busy(requests: u32, bytes: u64) -> Self {
        let cost = Cost { requests, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) };
        PollOutcome { cost, more: true, ..PollOutcome::of(PollState::Busy) }
    }

    /// The same; `more`: whether the poll ended because its budget did. Otherwise it ran dry, or waits. A poller that has done nothing says so of what
    /// nobody would wake it for: the core does not let it rest then.
    #[inline]
    pub fn with_more(self, more: bool) -> Self {
        PollOutcome { more, ..self }
    }

    /// [`PollState::Limited`], until `at`.
    #[inline]
    pub fn limited(at: Instant, context: &CoreContext) -> Self {
        PollOutcome::of(PollState::Limited).wake_at(at, context)
    }

    /// The same, to be polled again at `at` even if nothing else happens, to the microsecond and at most 71 minutes from now. Holds
    /// until the next poll.
    pub fn wake_at(self, at: Instant, context: &CoreContext) -> Self {
        let us = at.saturating_duration_since(context.now()).as_nanos().div_ceil(1000);
        let us = u32::try_from(us).unwrap_or(u32::MAX).max(1);
        PollOutcome { wake_in_us: NonZeroU32::new(us), ..self }
    }

    /// What the poller has to do next.
    #[inline]
    pub fn state(&self) -> PollState {
        self.state
    }

    /// What the poll cost. Nothing if the poller was not [`PollState::Busy`].
    #[inline]
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Whether another poll at once would find something to do, as far as this one knows.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.more
    }

    /// Units of work for the core's meters: the requests, or one if something else was done.
    #[inline]
    pub fn units(&self) -> u32 {
        if self.state == PollState::Busy { self.cost.requests.max(1) } else { 0 }
    }

    /// How long after the core's look at the clock the poller wants to be polled again, if it said so.
    #[inline]
    pub fn wake_in(&self) -> Option<Duration> {
        self.wake_in_us.map(|us| Duration::from_micros(us.get().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_wake_is_rounded_up_and_never_nothing() {
        let context = CoreContext::default();
        let asked =
            |ns| PollOutcome::IDLE.wake_at(context.now() + Duration::from_nanos(ns), &context).wake_in();
        assert_eq!(PollOutcome::IDLE.wake_in(), None);
        assert_eq!(asked(0), Some(Duration::from_micros(1)));
        assert_eq!(asked(1001), Some(Duration::from_micros(2)));
        assert_eq!(asked(u64::MAX / 4), Some(Duration::from_micros(u32::MAX.into())));
    }

    #[test]
    fn what_costs_more_than_can_be_said_costs_the_most() {
        assert_eq!(PollOutcome::busy(3, 1 << 40).cost(), Cost { requests: 3, bytes: u32::MAX });
        assert!(PollOutcome::busy(1, 1).has_more() && !PollOutcome::busy(1, 1).with_more(false).has_more());
        assert_eq!((PollOutcome::busy(0, 1).units(), PollOutcome::WAITING.units()), (1, 0));
    }
}
