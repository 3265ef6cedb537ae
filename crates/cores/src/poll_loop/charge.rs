//! What each slot costs: requests and bytes as its poller says, time as the core measures it.
//!
//! The core does not look at the clock between two polls. What went by between two looks is divided among the slots that had work
//! meanwhile, in proportion to what their pollers say it cost.

use ioplane_device::{Cost, Share};

/// What a request costs beside its bytes, in bytes that could be copied meanwhile.
const REQUEST: u64 = 512;

/// The most that a slot can be owed, or owe, ns: one that was idle for long is not entitled to what it did not want.
const MOST_OWED: i64 = 10_000_000;

/// What one slot has cost since it came to this core.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// Time of the core, ns.
    pub(super) time_ns: u64,
    /// The time that it was entitled to by its weight, less the time that it had, ns. Carried, and not scheduled by.
    pub(super) deficit_ns: i64,
    /// What it has cost since the core's last look at the clock.
    unsettled: u64,
}

impl Charge {
    /// Adds a poll that had work. True if it is the first since the last look at the clock.
    #[inline]
    pub(super) fn add(&mut self, cost: Cost) -> bool {
        let first = self.unsettled == 0;
        self.requests += u64::from(cost.requests);
        self.bytes += u64::from(cost.bytes);
        self.unsettled += u64::from(cost.bytes) + (1 + u64::from(cost.requests)) * REQUEST;
        first
    }

    /// What it has cost since the last look.
    pub(super) fn unsettled(&self) -> u64 {
        self.unsettled
    }

    /// Takes its part of what went by.
    #[inline]
    pub(super) fn settle(&mut self, share: Share, rates: SettleRates) {
        let used = (std::mem::take(&mut self.unsettled) as f64 * rates.ns_per_cost) as u64;
        let entitled = (f64::from(share.weight.get()) * rates.ns_per_weight) as u64;
        self.time_ns += used;
        let deficit = self.deficit_ns.saturating_add_unsigned(entitled).saturating_sub_unsigned(used);
        self.deficit_ns = deficit.clamp(-MOST_OWED, MOST_OWED);
    }
}

/// How the time between two looks at the clock is divided. In floating point: a core that answers single frames looks at the clock after
/// each, and two divisions per look cost less than two 128-bit divisions per slot. A part may be off by 1 ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct SettleRates {
    ns_per_cost: f64,
    ns_per_weight: f64,
}

impl SettleRates {
    /// `ns` went by, for `costs` and `weights` in all.
    #[inline]
    pub(super) fn new(ns: u64, costs: u64, weights: u64) -> Self {
        let per = |all: u64| ns as f64 / all.max(1) as f64;
        SettleRates { ns_per_cost: per(costs), ns_per_weight: per(weights) }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn settled(costs: [(u32, u32); 2], weights: [u32; 2], ns: u64) -> [Charge; 2] {
        let mut charges = [Charge::default(); 2];
        for (charge, (requests, bytes)) in charges.iter_mut().zip(costs) {
            assert!(charge.add(Cost { requests, bytes }));
        }
        let all = charges.iter().map(Charge::unsettled).sum();
        let rates = SettleRates::new(ns, all, weights.iter().map(|weight| u64::from(*weight)).sum());
        for (charge, weight) in charges.iter_mut().zip(weights) {
            let share = Share { group: 0, weight: NonZeroU32::new(weight).unwrap() };
            charge.settle(share, rates);
        }
        charges
    }

    #[test]
    fn time_is_divided_by_cost_and_entitlement_by_weight() {
        let [small, large] = settled([(1, 0), (1, 2048)], [1, 1], 8000);
        // 1024 against 3072.
        assert_eq!((small.time_ns, large.time_ns), (2000, 6000));
        assert_eq!((small.deficit_ns, large.deficit_ns), (2000, -2000));
        assert_eq!((large.requests, large.bytes, large.unsettled()), (1, 2048, 0));
        let [light, heavy] = settled([(1, 0), (1, 0)], [1, 3], 8000);
        assert_eq!((light.time_ns, heavy.time_ns), (4000, 4000));
        assert_eq!((light.deficit_ns, heavy.deficit_ns), (-2000, 2000));
    }

    #[test]
    fn what_is_owed_has_a_limit() {
        let [_, greedy] = settled([(1, 0), (1, u32::MAX)], [1, 1], 1 << 40);
        assert_eq!(greedy.deficit_ns, -MOST_OWED);
    }
}
