//! How long a core sleeps while all that it polls waits for completions.
//!
//! Pure: from what the core has seen to a number. A sleep saves processor time, and costs latency when the completion comes during it: the
//! core has to be woken, which takes some 5 us on bare metal and several times that in a VM. So there are two reasons to sleep:
//!
//! - **The next completion is not near.** The core has seen how long it mostly is without work, and sleeps until shortly before
//!   that time, then polls. "Shortly" is a margin that finds itself: it grows when a completion comes in a sleep, and shrinks
//!   slowly while none does.
//! - **Many are in flight.** Then each of them is under way for long, and a sleep that is short beside that costs nothing: the core
//!   sleeps until a thirty-second part of them has ended. Completions end these sleeps and not the clock, for a sleep that the clock
//!   ends is a system call and a wake-up for nothing. But where the core has work for most of that time, there is little to save, and what
//!   a wake-up takes is missing to a fast disk: then it polls.
//!
//! What is overdue may take for ever: the core sleeps for as long as it has had no work.

use std::time::Duration;

/// The shortest sleep. A shorter one costs more processor time than it saves.
const SHORTEST: Duration = Duration::from_micros(10);

/// The part of those in flight that ends a sleep.
const PART: u32 = 32;

/// The least time without work, until that part has ended, for which the core sleeps.
const LEAST_IDLE: Duration = Duration::from_micros(7);

/// A sleep may last so many times as long as that part takes on average.
const PATIENCE: u32 = 4;

/// The margin at first: about what a wake-up takes in a VM.
const MARGIN: Duration = Duration::from_micros(20);

/// The margin at most.
const MOST_MARGIN: Duration = Duration::from_millis(1);

/// A sleep, and what ends it before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sleep {
    pub(super) time: Duration,
    /// So many completions.
    pub(super) completions: usize,
}

/// What the core has seen of its disks.
#[derive(Debug)]
pub(super) struct WaitPolicy {
    /// [`crate::CoreSettings::completion_wait`].
    most: Duration,
    /// Mean time without work before a completion, ns. Zero until one was seen.
    idle_ns: f64,
    margin: Duration,
    /// Mean time from one completion to the next, of all queues, ns.
    each_ns: f64,
    /// The part of it without work, ns.
    idle_each_ns: f64,
    /// Completions at the last [`WaitPolicy::count`], and time with work, ns.
    counted: (u64, u64),
}

impl WaitPolicy {
    pub(super) fn new(most: Duration) -> Self {
        WaitPolicy { most, idle_ns: 0.0, margin: MARGIN, each_ns: 0.0, idle_each_ns: 0.0, counted: (0, 0) }
    }

    /// Whether the core sleeps for completions at all.
    pub(super) fn sleeps(&self) -> bool {
        !self.most.is_zero()
    }

    /// How long to sleep after `idle` without work, with so many operations in flight that the ring knows of. `None`: poll.
    pub(super) fn sleep(&self, idle: Duration, in_flight: usize) -> Option<Sleep> {
        let mean = Duration::from_nanos(self.idle_ns as u64);
        let part = |each_ns: f64| Duration::from_nanos((each_ns * in_flight as f64) as u64) / PART;
        let some = part(self.each_ns);
        let overdue = idle > mean * 2 + self.margin;
        let (time, completions) = if some >= SHORTEST && part(self.idle_each_ns) >= LEAST_IDLE {
            (some * PATIENCE, (in_flight / PART as usize).max(1))
        } else if overdue {
            (idle.max(SHORTEST), 1)
        } else {
            (mean.saturating_sub(idle + self.margin), 1)
        };
        let time = time.min(self.most);
        (time >= SHORTEST.min(self.most)).then_some(Sleep { time, completions })
    }

    /// A sleep has ended, by a completion or because its time was up.
    pub(super) fn slept(&mut self, by_completion: bool) {
        self.margin = match by_completion {
            true => (self.margin + self.margin / 4).min(MOST_MARGIN),
            false => self.margin,
        };
    }

    /// Work has come after `idle` without any, of which all queues waited for completions.
    pub(super) fn work_came(&mut self, idle: Duration) {
        let ns = idle.as_nanos() as f64;
        self.idle_ns = if self.idle_ns == 0.0 { ns } else { self.idle_ns + (ns - self.idle_ns) / 16.0 };
        self.margin = self.margin.saturating_sub(self.margin / 256).max(Duration::from_micros(2));
    }

    /// So many completions there were since the core was started, and so much time with work; `ns` have gone by since the last call.
    pub(super) fn count(&mut self, ended: u64, busy_ns: u64, ns: u64) {
        let (new, busy) = (ended - self.counted.0, busy_ns - self.counted.1);
        self.counted = (ended, busy_ns);
        let each = |ns: u64| if new == 0 { 0.0 } else { ns as f64 / new as f64 };
        (self.each_ns, self.idle_each_ns) = (each(ns), each(ns.saturating_sub(busy)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// After many completions that came after so much idle time.
    fn used_to(idle: Duration) -> WaitPolicy {
        let mut policy = WaitPolicy::new(us(50));
        (0..2000).for_each(|_| policy.work_came(idle));
        policy
    }

    #[test]
    fn a_core_whose_next_completion_is_near_polls() {
        let policy = used_to(us(11));
        assert_eq!(policy.sleep(us(0), 1), None);
        assert_eq!(policy.sleep(us(10), 1), None);
    }

    #[test]
    fn a_core_sleeps_until_shortly_before_the_completion_is_expected() {
        let policy = used_to(us(45));
        let sleep = policy.sleep(us(5), 1).unwrap();
        assert!(sleep.time > us(30) && sleep.time < us(40), "{sleep:?}");
        // Later it polls.
        assert_eq!(policy.sleep(us(40), 1), None);
        assert_eq!(policy.sleep(us(60), 1), None);
        // A long wait is slept in parts, for what guests add meanwhile is found between them.
        assert_eq!(used_to(us(500)).sleep(us(5), 1), Some(Sleep { time: us(50), completions: 1 }));
    }

    #[test]
    fn what_is_overdue_is_not_polled_for() {
        let policy = used_to(us(11));
        assert_eq!(policy.sleep(us(30), 1).unwrap().time, us(30));
        assert_eq!(policy.sleep(us(5000), 1).unwrap().time, us(50));
        // Nor what has never completed.
        assert_eq!(WaitPolicy::new(us(50)).sleep(us(1000), 1).unwrap().time, us(50));
    }

    #[test]
    fn with_many_in_flight_a_part_of_them_ends_the_sleep() {
        let mut policy = used_to(us(3));
        policy.count(1000, 2_000_000, 10_000_000);
        assert_eq!(policy.sleep(us(0), 32), Some(Sleep { time: us(40), completions: 1 }));
        assert_eq!(
            policy.sleep(us(0), 64),
            Some(Sleep { time: us(50), completions: 2 }),
            "80 us are too long"
        );
        assert_eq!(policy.sleep(us(0), 256), Some(Sleep { time: us(50), completions: 8 }));
        assert_eq!(policy.sleep(us(0), 16), None, "5 us are too short");
    }

    #[test]
    fn a_core_with_work_for_most_of_the_time_polls_though_many_are_in_flight() {
        let mut policy = used_to(us(3));
        policy.count(1000, 1_000_000, 5_000_000);
        assert_eq!(policy.sleep(us(0), 128), Some(Sleep { time: us(50), completions: 4 }));
        policy.count(2000, 5_000_000, 5_000_000);
        assert_eq!(policy.sleep(us(0), 128), None, "4 us of 20 are idle");
        policy.count(2000, 5_000_000, 5_000_000);
        assert_eq!(policy.sleep(us(0), 128), None, "nothing completes");
    }

    #[test]
    fn completions_in_sleeps_make_the_margin_wider_until_the_core_polls() {
        let mut policy = used_to(us(45));
        let before = policy.sleep(us(5), 1).unwrap().time;
        for _ in 0..4 {
            policy.slept(true);
        }
        assert!(policy.sleep(us(5), 1).unwrap().time < before);
        for _ in 0..40 {
            policy.slept(true);
        }
        assert_eq!(policy.sleep(us(5), 1), None);
        // It tries again after a while.
        (0..2000).for_each(|_| policy.work_came(us(45)));
        assert!(policy.sleep(us(5), 1).is_some());
    }

    #[test]
    fn a_core_that_is_not_to_sleep_does_not() {
        assert!(!WaitPolicy::new(Duration::ZERO).sleeps());
    }
}
