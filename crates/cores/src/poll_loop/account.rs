//! What a core counts: its turns, and where its time goes.

use std::time::{Duration, Instant};

use crate::shared::Counts;

/// Span over which the busy share is smoothed.
const SMOOTH: Duration = Duration::from_millis(40);

/// Counts of one core. Time is charged from one look at the clock to the next: to work if any turn between them had some.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) turns: u64,
    /// Polls, whether or not they found work.
    pub(super) steps: u64,
    busy_turns: u64,
    units: u64,
    /// What pollers say that their work cost, in bytes.
    pub(super) bytes: u64,
    /// Questions whether a resting slot was woken, while others are awake.
    pub(super) glances: u64,
    pub(super) sleeps: u64,
    pub(super) naps: u64,
    pub(super) wakes: u64,
    pub(super) orders: u64,
    busy_ns: u64,
    slept_ns: u64,
    worked: bool,
    looked: Instant,
    shared: Instant,
    shared_busy_ns: u64,
    permille: f32,
}

impl Account {
    pub(super) fn new(now: Instant) -> Self {
        Account {
            turns: 0,
            steps: 0,
            busy_turns: 0,
            units: 0,
            bytes: 0,
            glances: 0,
            sleeps: 0,
            naps: 0,
            wakes: 0,
            orders: 0,
            busy_ns: 0,
            slept_ns: 0,
            worked: false,
            looked: now,
            shared: now,
            shared_busy_ns: 0,
            permille: 0.0,
        }
    }

    /// A turn of all awake slots, with so much work.
    #[inline]
    pub(super) fn turn(&mut self, units: u64) {
        self.turns += 1;
        self.units += units;
        self.busy_turns += u64::from(units > 0);
        self.worked |= units > 0;
    }

    /// A poll between two turns that had work.
    pub(super) fn work(&mut self, units: u32) {
        self.units += u64::from(units.max(1));
        self.worked = true;
    }

    /// Charges the time since the last look, and says how much of it was work, ns.
    #[inline]
    pub(super) fn look(&mut self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.looked);
        self.looked = now;
        let ns = if std::mem::take(&mut self.worked) { since.as_nanos() as u64 } else { 0 };
        self.busy_ns += ns;
        ns
    }

    /// Charges the time since the last look as slept.
    pub(super) fn slept(&mut self, now: Instant) {
        self.slept_ns += (now - self.looked).as_nanos() as u64;
        self.looked = now;
    }

    /// Brings the busy share up to date.
    pub(super) fn share(&mut self, now: Instant) {
        let span = now - self.shared;
        if span.is_zero() {
            return;
        }
        let share = (self.busy_ns - self.shared_busy_ns) as f32 / span.as_nanos() as f32;
        let weight = (span.as_secs_f32() / SMOOTH.as_secs_f32()).min(1.0);
        self.permille += (share.min(1.0) * 1000.0 - self.permille) * weight;
        self.shared = now;
        self.shared_busy_ns = self.busy_ns;
    }

    pub(super) fn counts(&self, awake: usize) -> Counts {
        Counts {
            turns: self.turns,
            steps: self.steps,
            busy_turns: self.busy_turns,
            units: self.units,
            bytes: self.bytes,
            glances: self.glances,
            sleeps: self.sleeps,
            naps: self.naps,
            wakes: self.wakes,
            orders: self.orders,
            busy_ns: self.busy_ns,
            slept_ns: self.slept_ns,
            awake: awake as u32,
            permille: self.permille as u32,
        }
    }
}
