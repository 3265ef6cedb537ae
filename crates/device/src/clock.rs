//! The clock of an I/O core.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where a core looks for the time. Read on the core's thread.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time now. Never goes back.
    fn now(&self) -> Instant;
}

/// The clock of the host: CLOCK_MONOTONIC.
#[derive(Debug, Default, Clone, Copy)]
pub struct Monotonic;

impl Clock for Monotonic {
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
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
