//! How long exits of one site take: as many as come, in little room.
//!
//! Sixteen steps to each doubling, so a quantile is exact to 6 %. Only steps that were met take room.

use serde::{Deserialize, Serialize};

/// Bits of a time that tell steps of one doubling apart.
const FINE: u32 = 4;
/// So many steps of all sites together have room; a site that finds none has no quantiles.
pub(crate) const STEPS: usize = 1 << 19;

/// Median, 99th percentile and maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteTimes {
    /// Half of the exits took no longer.
    pub median_ns: u64,
    /// All but one in a hundred took no longer.
    pub p99_ns: u64,
    /// None took longer. It is exact.
    pub max_ns: u64,
}

/// How often each step was met, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    steps: Vec<(u16, u32)>,
    max: u64,
    /// One was left out.
    torn: bool,
}

impl Times {
    /// Takes so many more times of one step, none longer than `max`; `room` is how many steps of all sites are left. Nothing: their steps found no room
    /// where they were counted.
    pub fn add_step(&mut self, step: Option<u16>, count: u32, max: u64, room: &mut usize) {
        self.max = self.max.max(max);
        let Some(step) = step else {
            self.torn = true;
            return;
        };
        match self.steps.binary_search_by_key(&step, |entry| entry.0) {
            Ok(at) => self.steps[at].1 = self.steps[at].1.saturating_add(count),
            Err(_) if *room == 0 => self.torn = true,
            Err(at) => {
                *room -= 1;
                self.steps.insert(at, (step, count));
            }
        }
    }

    /// Nothing where no time is known, or not all are.
    pub fn summary(&self) -> Option<SiteTimes> {
        if self.steps.is_empty() || self.torn {
            return None;
        }
        let all: u64 = self.steps.iter().map(|(_, count)| u64::from(*count)).sum();
        let quantile = |percent: u64| {
            let wanted = (all * percent).div_ceil(100).max(1);
            let mut seen = 0;
            let found = self.steps.iter().find(|(_, count)| {
                seen += u64::from(*count);
                seen >= wanted
            });
            found.map_or(self.max, |(step, _)| middle(*step).min(self.max))
        };
        Some(SiteTimes { median_ns: quantile(50), p99_ns: quantile(99), max_ns: self.max })
    }
}

/// Small times are steps of their own.
pub(crate) fn step(ns: u64) -> u16 {
    let small = 1 << FINE;
    if ns < small {
        return ns as u16;
    }
    let doubling = ns.ilog2() - FINE;
    (((u64::from(doubling) + 1) << FINE) + ((ns >> doubling) & (small - 1))) as u16
}

/// The time in the middle of a step.
fn middle(step: u16) -> u64 {
    let (doubling, fine) = (u64::from(step) >> FINE, u64::from(step) & ((1 << FINE) - 1));
    if doubling == 0 {
        return fine;
    }
    let width = 1u64 << (doubling - 1);
    ((1 << FINE) + fine).saturating_mul(width).saturating_add(width / 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Times {
        fn add(&mut self, ns: u64, room: &mut usize) {
            self.add_step(Some(step(ns)), 1, ns, room);
        }
    }

    fn summary(times: impl IntoIterator<Item = u64>) -> SiteTimes {
        let (mut all, mut room) = (Times::default(), STEPS);
        times.into_iter().for_each(|ns| all.add(ns, &mut room));
        all.summary().unwrap()
    }

    #[test]
    fn a_tail_shows() {
        let times = summary((0..1000).map(|n| if n < 980 { 2000 } else { 1_000_000 + n }));
        assert!(times.median_ns.abs_diff(2000) <= 130, "{times:?}");
        assert!(times.p99_ns.abs_diff(1_000_990) <= 65_000, "{times:?}");
        assert_eq!(times.max_ns, 1_000_999);
        assert_eq!(summary([7]), SiteTimes { median_ns: 7, p99_ns: 7, max_ns: 7 });
    }

    #[test]
    fn without_room_there_is_nothing_rather_than_something_wrong() {
        let (mut all, mut room) = (Times::default(), 1);
        assert_eq!(all.summary(), None);
        all.add(100, &mut room);
        all.add(100, &mut room);
        assert!(all.summary().is_some());
        all.add(1_000_000, &mut room);
        assert_eq!((all.summary(), room), (None, 0));
        let (mut all, mut room) = (Times::default(), STEPS);
        all.add(100, &mut room);
        all.add_step(None, 1, 1_000_000, &mut room);
        assert_eq!(all.summary(), None);
    }

    proptest! {
        #[test]
        fn steps_are_in_order_and_narrow(a in any::<u64>(), b in any::<u64>()) {
            let (low, high) = (a.min(b), a.max(b));
            prop_assert!(step(low) <= step(high));
            let error = middle(step(a)).abs_diff(a);
            prop_assert!(error <= a / 16 + 1, "{a} is taken for {}", middle(step(a)));
        }

        #[test]
        fn any_times_are_survived(times in proptest::collection::vec(any::<u64>(), 1..50)) {
            let found = summary(times);
            prop_assert!(found.median_ns <= found.p99_ns && found.p99_ns <= found.max_ns);
        }
    }
}
