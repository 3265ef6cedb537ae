//! The clock of an I/O core, and the core's last look at it, for pollers that want to know about when they were called without
//! looking themselves.
//!
//! A core looks once in a number of turns, and when it wakes. What it saw lies in a cell of its thread: reading it costs a load.

use std::cell::Cell;
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

thread_local! {
    static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The core of this thread has looked at the clock. Only cores call it.
#[inline]
pub fn looked(now: Instant) {
    LOOKED.set(Some(now));
}

/// The last look of this thread's core, never later than now. On a thread that is no core's (tests that turn a poller by
/// hand) the clock itself.
#[inline]
pub fn last_look() -> Instant {
    LOOKED.get().unwrap_or_else(Instant::now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_look_stays_until_the_next() {
        let before = Instant::now();
        assert!(last_look() >= before, "nobody has looked: the clock itself");
        looked(before);
        assert_eq!(last_look(), before);
        std::thread::spawn(move || assert!(last_look() > before)).join().unwrap();
    }

    #[test]
    fn a_manual_clock_stands_until_it_is_moved() {
        let clock = ManualClock::default();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        clock.advance(Duration::from_millis(3));
        assert_eq!(clock.now() - before, Duration::from_millis(3));
    }
}
