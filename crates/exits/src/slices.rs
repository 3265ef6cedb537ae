//! A sample is one of time: everything is recorded for a moment, then nothing for a while that is never twice the same.
//!
//! ```text
//!   on  2 ms   off about 198 ms   on  2 ms   off about 198 ms          --sample 100
//! ```
//!
//! Recording each N-th exit instead would cost about as much as recording all (each event is counted before it is left out), would leave
//! out what KVM says after the exit, and would always meet a guest that goes round in a loop in the same places.

use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

/// Each moment: many exits long, so that few are cut by its ends, and short enough for many of them in a watch.
const SLICE: Duration = Duration::from_millis(2);

/// When to record.
#[derive(Debug)]
pub(crate) struct Slices {
    every: u64,
    /// Since when it has been on.
    since: Option<Instant>,
    /// When that changes.
    until: Instant,
    on: Duration,
    /// How many there were.
    count: u64,
    random: u64,
}

impl Slices {
    /// Of the whole time, one part of `every`; the first begins at once.
    pub(crate) fn new(every: u64, now: Instant) -> Slices {
        // Numbers that nobody has to guess.
        let random = std::collections::hash_map::RandomState::new().build_hasher().finish() | 1;
        Slices { every, since: None, until: now, on: Duration::ZERO, count: 0, random }
    }

    /// How long nothing changes.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    /// Whether it is on.
    pub(crate) fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// How long it has been on so far, and how often.
    pub(crate) fn on(&self, now: Instant) -> (Duration, u64) {
        let current = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        (self.on + current, self.count)
    }

    /// It is switched on now.
    pub(crate) fn begin(&mut self, now: Instant) {
        (self.since, self.until) = (Some(now), now + SLICE);
        self.count += 1;
    }

    /// It is switched off now. What comes late has been on for longer: it is off for as much longer.
    pub(crate) fn end(&mut self, now: Instant) {
        let Some(since) = self.since.take() else { return };
        let was = now.saturating_duration_since(since);
        self.on += was;
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        // From half of the mean to half as much again.
        let part = 0.5 + (self.random >> 11) as f64 / (1u64 << 53) as f64;
        self.until = now + was.mul_f64((self.every.saturating_sub(1)) as f64 * part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_part_of_the_time_at_random() {
        let begun = Instant::now();
        let mut slices = Slices::new(100, begun);
        let mut now = begun;
        let mut offs = Vec::new();
        for _ in 0..1000 {
            assert_eq!(slices.left(now), Duration::ZERO);
            slices.begin(now);
            assert!(slices.is_on() && slices.left(now) == SLICE);
            now += SLICE;
            slices.end(now);
            offs.push(slices.left(now));
            now += slices.left(now);
        }
        let (on, count) = slices.on(now);
        assert_eq!((on, count), (SLICE * 1000, 1000));
        let share = on.as_secs_f64() / (now - begun).as_secs_f64();
        assert!((0.0095..0.0105).contains(&share), "{share}");
        assert!(offs.iter().all(|off| (SLICE * 49..SLICE * 149).contains(off)));
        offs.sort_unstable();
        offs.dedup();
        assert!(offs.len() > 900, "never twice the same");
    }

    #[test]
    fn one_that_ends_late_is_followed_by_a_longer_pause() {
        let begun = Instant::now();
        let mut slices = Slices::new(10, begun);
        slices.begin(begun);
        let late = begun + 10 * SLICE;
        assert_eq!(slices.on(late).0, 10 * SLICE);
        slices.end(late);
        assert!(slices.left(late) >= SLICE * 40, "{:?}", slices.left(late));
    }
}
