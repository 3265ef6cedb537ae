//! What a core counts: its turns, and where its time goes.

use std::time::{Duration, Instant};

use crate::counts::Counts;

/// Span over which the busy share is smoothed.
const SMOOTH: Duration = Duration::from_millis(40);

/// Counts of one core. Time is charged from one look at the clock to the next: to work if any turn between them had some.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) counts: Counts,
    worked: bool,
    looked: Instant,
    shared: Instant,
    shared_busy_ns: u64,
    permille: f32,
    /// When looking was priced last; time with work and turns with work by then.
    priced: (Instant, u64, u64),
}

impl Account {
    pub(super) fn new(now: Instant) -> Self {
        Account {
            counts: Counts::default(),
            worked: false,
            looked: now,
            shared: now,
            shared_busy_ns: 0,
            permille: 0.0,
            priced: (now, 0, 0),
        }
    }

    /// A turn of all awake slots, with so much work.
    #[inline]
    pub(super) fn turn(&mut self, units: u64) {
        self.counts.turns += 1;
        self.counts.units += units;
        self.counts.busy_turns += u64::from(units > 0);
        self.worked |= units > 0;
    }

    /// A poll between two turns that had work.
    pub(super) fn work(&mut self, units: u32) {
        self.counts.units += u64::from(units.max(1));
        self.worked = true;
    }

    /// The last look at the clock, or the end of the last sleep.
    pub(super) fn looked(&self) -> Instant {
        self.looked
    }

    /// Charges the time since the last look, and says how much of it was work, ns.
    #[inline]
    pub(super) fn look(&mut self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.looked);
        self.looked = now;
        let ns = if std::mem::take(&mut self.worked) { since.as_nanos() as u64 } else { 0 };
        self.counts.busy_ns += ns;
        ns
    }

    /// Charges the time since the last look as slept.
    pub(super) fn slept(&mut self, now: Instant) {
        self.counts.slept_ns += (now - self.looked).as_nanos() as u64;
        self.looked = now;
    }

    /// Brings the busy share up to date.
    pub(super) fn share(&mut self, now: Instant) {
        let span = now - self.shared;
        if span.is_zero() {
            return;
        }
        let share = (self.counts.busy_ns - self.shared_busy_ns) as f32 / span.as_nanos() as f32;
        let weight = (span.as_secs_f32() / SMOOTH.as_secs_f32()).min(1.0);
        self.permille += (share.min(1.0) * 1000.0 - self.permille) * weight;
        self.shared = now;
        self.shared_busy_ns = self.counts.busy_ns;
    }

    /// Time that has gone by, ns, time with work, ns, and turns with work since the last call.
    pub(super) fn since_priced(&mut self, now: Instant) -> (u64, u64, u64) {
        let counted = (now, self.counts.busy_ns, self.counts.busy_turns);
        let before = std::mem::replace(&mut self.priced, counted);
        let period = now.saturating_duration_since(before.0).as_nanos() as u64;
        (period, counted.1 - before.1, counted.2 - before.2)
    }

    /// The busy share, in thousandths.
    pub(super) fn permille(&self) -> u32 {
        self.permille as u32
    }
}
