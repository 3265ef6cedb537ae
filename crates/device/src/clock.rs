//! The clock of an I/O core.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The moment from which the times of limits are counted: one for the whole process, since cores share a limit. It is a day before it is first
/// asked for, since a clock that a test has stopped may be behind the host's.
pub fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(|| {
        let now = Instant::now();
        now.checked_sub(Duration::from_secs(24 * 3600)).unwrap_or(now)
    })
}

/// That time in ns since [`epoch`].
#[inline]
pub fn since_epoch(at: Instant) -> u64 {
    at.saturating_duration_since(epoch()).as_nanos() as u64
}

/// Where a core looks for the time. Read on the core's thread.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time now. Never goes back.
    fn now(&self) -> Instant;

    /// Processor time of the calling thread so far, user and system. `None` where its time is not the host's.
    fn thread_cpu(&self) -> Option<Duration> {
        None
    }
}

/// The clock of the host: CLOCK_MONOTONIC.
#[derive(Debug, Default, Clone, Copy)]
pub struct Monotonic;

impl Clock for Monotonic {
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn thread_cpu(&self) -> Option<Duration> {
        let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        spent.try_into().ok()
    }
}

/// A clock that stands still until a test moves it. A core that sleeps for a time sleeps for that time of the host all the
/// same.
#[derive(Debug)]
pub struct ManualClock {
    start: Instant,
    passed_ns: AtomicU64,
}

impl Default for ManualClock {
    fn default() -> Self {
        ManualClock { start: Instant::now(), passed_ns: AtomicU64::new(0) }
    }
}

impl ManualClock {
    /// Moves the clock on. Any thread.
    pub fn advance(&self, by: Duration) {
        self.passed_ns.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.passed_ns.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_stands_until_it_is_moved() {
        let clock = ManualClock::default();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        clock.advance(Duration::from_millis(3));
        assert_eq!(clock.now() - before, Duration::from_millis(3));
    }
}
