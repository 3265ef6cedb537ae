//! What is asked of a queue, and when: pure functions of a time in ns.

use std::iter::Peekable;

use crate::exitless::load::Scatter;

/// How requests come.
pub enum Offered {
    /// As many are always in flight.
    Backlog(u16),
    /// At times of their own, whatever becomes of those before.
    Open(Peekable<Arrivals>),
    /// One in flight while the wave is high.
    Square(SquareWave),
}

impl Offered {
    pub fn open(arrivals: Arrivals) -> Self {
        Offered::Open(arrivals.peekable())
    }

    /// When the request that may be submitted at `now` was due, if one may. An arrival is taken by that.
    #[inline]
    pub fn due(&mut self, now: u64, in_flight: u16) -> Option<u64> {
        match self {
            Offered::Backlog(depth) => (in_flight < *depth).then_some(now),
            Offered::Open(arrivals) => arrivals.next_if(|at| *at <= now),
            Offered::Square(wave) => (in_flight == 0 && wave.is_high(now)).then_some(now),
        }
    }
}

/// Times of a Poisson process, ns, ascending. The same `seed` gives the same times.
#[derive(Clone)]
pub struct Arrivals {
    at: f64,
    mean: f64,
    scatter: Scatter,
}

impl Arrivals {
    pub fn new(per_second: f64, seed: u64) -> Self {
        let mut scatter = Scatter::new(seed);
        // The first few numbers of small seeds are alike.
        for _ in 0..16 {
            scatter.below(1);
        }
        Arrivals { at: 0.0, mean: 1e9 / per_second, scatter }
    }

    /// How many there are in each of the first `seconds` seconds.
    pub fn per_second(self, seconds: usize) -> Vec<u64> {
        let mut counts = vec![0; seconds];
        for at in self {
            match counts.get_mut((at / super::SECOND) as usize) {
                Some(count) => *count += 1,
                None => break,
            }
        }
        counts
    }
}

impl Iterator for Arrivals {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        const WHOLE: u64 = 1 << 53;
        // In (0, 1], so that the logarithm is finite.
        let part = (self.scatter.below(WHOLE) + 1) as f64 / WHOLE as f64;
        self.at -= self.mean * part.ln();
        Some(self.at as u64)
    }
}

/// Work for the first half of each period, silence for the second.
#[derive(Debug, Clone, Copy)]
pub struct SquareWave {
    /// ns.
    pub period: u64,
}

impl SquareWave {
    #[inline]
    pub fn is_high(self, now: u64) -> bool {
        now % self.period < self.period / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_keep_their_rate_and_are_irregular() {
        let times: Vec<u64> = Arrivals::new(1000.0, 7).take(100_000).collect();
        assert!(times.is_sorted());
        let mean = *times.last().unwrap() as f64 / 100_000.0;
        assert!((mean / 1e6 - 1.0).abs() < 0.02, "{mean} ns apart");
        // Of exponential gaps 1 - 1/e are shorter than the mean.
        let short = times.windows(2).filter(|pair| pair[1] - pair[0] < 1_000_000).count() as f64 / 99_999.0;
        assert!((short - 0.632).abs() < 0.01, "{short}");
        assert_ne!(Arrivals::new(1000.0, 8).next(), Some(times[0]));
    }

    #[test]
    fn arrivals_are_counted_by_second() {
        let arrivals = Arrivals::new(50.0, 3);
        let counts = arrivals.clone().per_second(4);
        let until =
            |second: u64| arrivals.clone().take_while(|at| *at < second * 1_000_000_000).count() as u64;
        assert_eq!(counts.len(), 4);
        assert_eq!(counts.iter().sum::<u64>(), until(4));
        assert_eq!(counts[0], until(1));
        assert_eq!(counts[3], until(4) - until(3));
    }

    #[test]
    fn a_wave_is_high_for_the_first_half_of_each_period() {
        let wave = SquareWave { period: 10_000 };
        for (now, high) in
            [(0, true), (4999, true), (5000, false), (9999, false), (10_000, true), (75_001, false)]
        {
            assert_eq!(wave.is_high(now), high, "{now}");
        }
        let mut offered = Offered::Square(wave);
        assert_eq!(offered.due(20, 0), Some(20));
        assert_eq!(offered.due(20, 1), None, "one in flight");
        assert_eq!(offered.due(5020, 0), None, "low");
    }

    #[test]
    fn an_open_loop_keeps_what_is_overdue() {
        let mut offered = Offered::open(Arrivals::new(1e6, 5));
        let times: Vec<u64> = Arrivals::new(1e6, 5).take(3).collect();
        assert_eq!(offered.due(times[0] - 1, 0), None);
        // Long after, each is due at its own time, whatever is in flight.
        let taken: Vec<u64> = (0..3).map_while(|_| offered.due(times[2] + 1, 100)).collect();
        assert_eq!(taken, times);
    }

    #[test]
    fn a_backlog_is_filled_up() {
        let mut offered = Offered::Backlog(2);
        assert_eq!(offered.due(9, 1), Some(9));
        assert_eq!(offered.due(9, 2), None);
    }
}
