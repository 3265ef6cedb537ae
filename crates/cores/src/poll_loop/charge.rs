//! What each slot costs: requests and bytes as its poller says, time as the core measures it.
//!
//! The core does not look at the clock between two polls. What went by between two looks is divided among the slots that had work
//! meanwhile, in proportion to what their pollers say it cost.

use ioplane_device::Cost;
use ioplane_scheduler::poll_cost;

/// What one slot has cost since it came to this core.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// Time of the core, ns.
    pub(super) time_ns: u64,
    /// Polls that found nothing to do.
    pub(super) empty_polls: u64,
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
        self.unsettled += poll_cost(cost.requests, cost.bytes);
        first
    }

    /// What it has cost since the last look.
    pub(super) fn unsettled(&self) -> u64 {
        self.unsettled
    }

    /// Takes its part of what went by.
    #[inline]
    pub(super) fn settle(&mut self, rate: SettleRate) {
        self.time_ns += (std::mem::take(&mut self.unsettled) as f64 * rate.ns_per_cost) as u64;
    }
}

/// How the time between two looks at the clock is divided. In floating point: a core that answers single frames looks at the clock after
/// each, and one division per look costs less than a 128-bit division per slot. A part may be off by 1 ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct SettleRate {
    ns_per_cost: f64,
}

impl SettleRate {
    /// `ns` went by, for `costs` in all.
    #[inline]
    pub(super) fn new(ns: u64, costs: u64) -> Self {
        SettleRate { ns_per_cost: ns as f64 / costs.max(1) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_divided_by_cost() {
        let mut charges = [Charge::default(); 2];
        for (charge, bytes) in charges.iter_mut().zip([0, 2048]) {
            assert!(charge.add(Cost { requests: 1, bytes }));
        }
        let rate = SettleRate::new(8000, charges.iter().map(Charge::unsettled).sum());
        charges.iter_mut().for_each(|charge| charge.settle(rate));
        let [small, large] = charges;
        // 1024 against 3072.
        assert_eq!((small.time_ns, large.time_ns), (2000, 6000));
        assert_eq!((large.requests, large.bytes, large.unsettled()), (1, 2048, 0));
    }
}
