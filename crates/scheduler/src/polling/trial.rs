//! Trials: gaps that may be long only because wake-ups make them so.
//!
//! In a closed loop the next request comes when the last one is answered. Where the answer goes over several queues of one core, each armed queue
//! adds a wake-up to the gaps of all the others: gaps that would be short if all were polled are long while all are armed, and each queue by itself
//! is right to stay armed. So a core polls its queues together for a while, and those that then have short gaps only are polled from then on. The trial ends early if
//! gaps that are polled through are long as well.

use super::PollingCosts;
use super::worth::Comparison;

/// Gaps that are longer than a long one by this factor would stay long whatever is polled: an answer goes over some four queues.
const DOUBT: u64 = 4;
/// How long a trial is, in long gaps: all gaps of it that matter are shorter.
const TRIAL_GAPS: u64 = 24;
/// So many more long gaps than short ones, polled through in a trial, end it.
const LONG_GAPS: u32 = 4;
/// From a trial to the next one: twice as long after each that changed nothing, ns.
const PAUSE_NS: (u64, u64) = (8_000_000, 1_000_000_000);

/// When one core tries to poll queues that it would arm. Times in ns, of the same clock as those of [`super::QueuePolling`].
#[derive(Debug, Clone, Default)]
pub struct PollTrials {
    until_ns: u64,
    next_ns: u64,
    pause_ns: u64,
    /// Long gaps less the short ones, of those polled through in this trial.
    long: u32,
    /// Longer than this no gap is looked at in vain.
    most_ns: u64,
    /// What tells whether polling brings requests.
    pub(super) comparison: Comparison,
}

impl PollTrials {
    /// Whether the thread's processor time is to be told to [`PollTrials::sample`]: queues are being compared, and a part of that has ended.
    #[inline]
    pub fn wants_sample(&self, now_ns: u64) -> bool {
        self.comparison.wants_sample(now_ns)
    }

    /// The core's thread has had so much processor time by now, ns.
    pub fn sample(&mut self, now_ns: u64, cpu_ns: u64) {
        self.comparison.sample(now_ns, cpu_ns);
    }

    /// Whether a gap that a wake-up makes long may be short otherwise.
    pub(super) fn may_be_short(gap_ns: u64, costs: &PollingCosts) -> bool {
        gap_ns < DOUBT * costs.long_ns()
    }

    /// Whether a queue that has been without work for so long is polled on, whatever it would choose.
    #[inline]
    pub(super) fn polls(&self, now_ns: u64, idle_ns: u64) -> bool {
        now_ns < self.until_ns && idle_ns < self.most_ns
    }

    /// A queue that was armed had long gaps which may be short otherwise. Begins a trial, unless the last one was not long ago.
    pub(super) fn doubt(&mut self, now_ns: u64, costs: &PollingCosts) {
        if now_ns < self.next_ns {
            return;
        }
        let forgotten = now_ns - self.next_ns > PAUSE_NS.1;
        let pause = if forgotten { 0 } else { 2 * self.pause_ns };
        self.pause_ns = pause.clamp(PAUSE_NS.0, PAUSE_NS.1);
        self.until_ns = now_ns + TRIAL_GAPS * costs.long_ns();
        self.most_ns = DOUBT * costs.long_ns();
        self.long = 0;
        self.next_ns = self.until_ns + self.pause_ns;
    }

    /// A gap has ended that was polled through.
    #[inline]
    pub(super) fn polled(&mut self, now_ns: u64, long: bool) {
        if now_ns >= self.until_ns {
            return;
        }
        self.long = if long { self.long + 1 } else { self.long.saturating_sub(1) };
        if self.long >= LONG_GAPS {
            self.until_ns = now_ns;
        }
    }

    /// A queue has short gaps now. If that came of a trial, the next may follow soon.
    pub(super) fn helped(&mut self) {
        self.pause_ns = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_ends_when_gaps_are_long_in_it_too() {
        let costs = PollingCosts::default();
        let mut trials = PollTrials::default();
        trials.doubt(1_000, &costs);
        for _ in 0..LONG_GAPS {
            assert!(trials.polls(2_000, 0));
            trials.polled(2_000, false);
        }
        for _ in 0..LONG_GAPS {
            assert!(trials.polls(2_000, 0));
            trials.polled(2_000, true);
        }
        assert!(!trials.polls(2_000, 0));
    }

    #[test]
    fn trials_that_change_nothing_become_rare() {
        let costs = PollingCosts::default();
        let mut trials = PollTrials::default();
        let (mut on, mut begun) = (0, 0);
        for step in 0..100_000u64 {
            let now = step * 100_000;
            let before = trials.polls(now, 0);
            trials.doubt(now, &costs);
            begun += u64::from(!before && trials.polls(now, 0));
            on += u64::from(trials.polls(now, 0));
        }
        assert!((10..25).contains(&begun), "{begun} in 10 s");
        assert!(on < 1000, "{on} of 100000");
    }
}
