//! The chip's timer: [`super::spec::TCTR`] counts ticks of 33 MHz, and at [`super::spec::TIMER_INT`] comes an interrupt.

use std::time::{Duration, Instant};

/// Ticks in three microseconds.
const TICKS: u64 = 99;
const NANOS: u64 = 3000;
/// Values of the count.
const WRAP: u64 = 1 << 32;

/// Counts from a moment on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    /// When the count was what `count` says.
    since: Instant,
    count: u32,
    /// When the interrupt is due.
    due: Option<Instant>,
}

impl Clock {
    /// At zero, now, with no interrupt to come.
    pub fn new() -> Self {
        Clock { since: Instant::now(), count: 0, due: None }
    }

    /// The count.
    pub fn count(&self, now: Instant) -> u32 {
        let nanos = now.saturating_duration_since(self.since).as_nanos();
        let ticks = nanos.wrapping_mul(TICKS.into()) / u128::from(NANOS);
        self.count.wrapping_add(ticks as u32)
    }

    /// The count is `count` now, and an interrupt is to come when it is `at` (zero: none). Says in how long.
    pub fn set(&mut self, now: Instant, count: u32, at: u32) -> Option<Duration> {
        (self.since, self.count) = (now, count);
        self.arm(now, at)
    }

    /// An interrupt is to come when the count is `at` again.
    pub fn arm(&mut self, now: Instant, at: u32) -> Option<Duration> {
        if at == 0 {
            self.due = None;
            return None;
        }
        let ticks = match at.wrapping_sub(self.count(now)) {
            0 => WRAP,
            ticks => ticks.into(),
        };
        let wait = Duration::from_nanos((ticks * NANOS).div_ceil(TICKS));
        self.due = Some(now + wait);
        Some(wait)
    }

    /// Whether an interrupt is to come.
    pub fn armed(&self) -> bool {
        self.due.is_some()
    }

    /// Whether the interrupt is due.
    pub fn due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| now >= due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_three_ticks_are_a_microsecond() {
        let mut clock = Clock::new();
        let now = Instant::now();
        assert_eq!(clock.set(now, 10, 0), None);
        assert!(!clock.due(now + Duration::from_secs(1000)));
        assert_eq!(clock.count(now + Duration::from_micros(2)), 76);
        let wait = clock.arm(now, 43).expect("to come");
        assert_eq!(wait, Duration::from_micros(1));
        assert!(!clock.due(now) && clock.due(now + wait));
        assert_eq!(clock.count(now + wait), 43);
        let round = clock.arm(now, 10).expect("to come");
        assert_eq!(round.as_secs(), 130, "all the way round");
        assert_eq!(clock.arm(now, 9).expect("to come").as_secs(), 130);
        assert_eq!(clock.count(now + round), 10);
    }
}
