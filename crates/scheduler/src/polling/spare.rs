//! Spare time: for how long a queue may be polled past its spin.
//!
//! The spin follows from the gaps that a queue has had. In a closed loop a longer one comes now and then: the processor of a driver was elsewhere for a while.
//! All queues of the loop are silent then. To arm them costs each of them a kick and a wake-up, and their drivers fall asleep over it.
//! So a queue earns a part of the time for which it is polled, and is polled past its spin for as long as it has earned, once in a few gaps: of a load that has become
//! slow only the first gap is.

/// One part in so many of the time polled is earned: what polling through known gaps may cost as well.
const EARNS: u64 = super::gaps::SAVES;

/// Most that is kept, ns. A load that ends is polled after for so long at most.
const MOST_NS: u64 = 2_000_000;

/// So many gaps within the spin have to follow one that was longer.
const WITHIN: u32 = 4;

/// The spare time of one queue.
#[derive(Debug, Clone, Default)]
pub(super) struct SpareTime {
    left_ns: u64,
    /// Gaps in a row that were no longer than the spin.
    within: u32,
    /// Polled from then on, and not counted yet. None if the queue was armed, or waited for a disk, after the last gap.
    polled_since: Option<u64>,
}

impl SpareTime {
    /// Whether a queue may be polled that is past its spin by so much.
    #[inline]
    pub(super) fn covers(&self, past_ns: u64) -> bool {
        past_ns < self.left_ns && self.within >= WITHIN
    }

    /// A gap from `since` to `now` was polled through, `past_ns` of it past the spin.
    #[inline]
    pub(super) fn polled(&mut self, since: u64, now: u64, past_ns: u64) {
        let polled = now.saturating_sub(self.polled_since.unwrap_or(since)).saturating_sub(past_ns);
        self.left_ns = (self.left_ns.saturating_sub(past_ns) + polled / EARNS).min(MOST_NS);
        self.within = if past_ns > 0 { 0 } else { self.within.saturating_add(1) };
        self.polled_since = Some(now);
    }

    /// A gap has ended that the queue was armed in: all has been used up.
    pub(super) fn armed(&mut self) {
        *self = SpareTime::default();
    }

    /// The queue waits for a disk. Its core may sleep meanwhile.
    pub(super) fn waits(&mut self) {
        self.polled_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After enough gaps that last and earn nothing.
    fn begun() -> SpareTime {
        let mut spare = SpareTime::default();
        (0..WITHIN).for_each(|_| spare.polled(0, 0, 0));
        spare
    }

    #[test]
    fn a_twenty_fourth_of_the_time_polled_is_earned_and_used_up() {
        let mut spare = begun();
        assert!(!spare.covers(0));
        spare.polled(0, 240_000, 0);
        assert!(spare.covers(9_999) && !spare.covers(10_000));
        // The queue was at work until 400,000: that counts too. What was polled past the spin earns nothing.
        spare.polled(400_000, 490_000, 10_000);
        assert!(!spare.covers(0), "one long gap after the other is no rare one");
        (0..WITHIN).for_each(|_| spare.polled(490_000, 490_000, 0));
        assert!(spare.covers(9_999) && !spare.covers(10_000));
        spare.armed();
        assert!(!spare.covers(0));
    }

    #[test]
    fn it_is_bounded_and_waiting_for_a_disk_earns_nothing() {
        let mut spare = begun();
        spare.polled(0, 1 << 40, 0);
        assert!(spare.covers(MOST_NS - 1) && !spare.covers(MOST_NS));
        let mut spare = begun();
        spare.polled(0, 24_000, 0);
        spare.waits();
        spare.polled(10_000_000, 10_024_000, 0);
        assert!(spare.covers(1_999) && !spare.covers(2_000));
    }
}
