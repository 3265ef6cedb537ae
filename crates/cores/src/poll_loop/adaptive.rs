//! Adaptive cores: for how long each slot is looked at in vain.
//!
//! [`QueuePolling`] decides, from the gaps between the requests of one queue. Here is what it is told: when a queue has run dry, when its next
//! request came, whether it had asked to be kicked meanwhile, and what looking on costs the core.

use std::time::{Duration, Instant};

use ioplane_device::SlotMeter;
use ioplane_scheduler::{
    ArmReason, CoreObjective, IdleChoice, PollTrials, PollingCosts, QueuePolling, SpinReason,
};

use super::PollLoop;
use crate::shared::CoreShared;

/// A look at a ring without requests, ns: a load that misses the cache, and the way to it.
const LOOK_NS: u64 = 60;

/// How old the core is, in ns. All polls between two looks at the clock have the same time: it is converted once.
#[derive(Debug)]
pub(super) struct Age {
    now: Instant,
    ns: Option<u64>,
}

impl Age {
    pub(super) fn new(now: Instant) -> Self {
        Age { now, ns: None }
    }

    /// At `now`, the last look.
    #[inline]
    pub(super) fn at(&mut self, now: Instant, shared: &CoreShared) -> u64 {
        match self.ns {
            Some(ns) if self.now == now => ns,
            _ => {
                let ns = shared.age_ns(now);
                *self = Age { now, ns: Some(ns) };
                ns
            }
        }
    }
}

/// What an adaptive core knows of one slot.
#[derive(Debug)]
pub(super) struct Adaptive {
    queue: QueuePolling,
    costs: PollingCosts,
    /// [`super::charge::Charge::time_ns`] when looking was priced last.
    priced_ns: u64,
}

impl Adaptive {
    /// A slot of which nothing is known. `wake_ns`: what a wake-up takes, if that is known.
    pub(super) fn new(objective: &CoreObjective, wake_ns: Option<u64>) -> Self {
        let usual = PollingCosts::default();
        let costs = PollingCosts { wake_ns: wake_ns.unwrap_or(usual.wake_ns), ..usual };
        Adaptive { queue: QueuePolling::new(&costs, objective), costs, priced_ns: 0 }
    }

    /// The slot leaves for another core: what is known of it.
    pub(super) fn leaves(&self, polling: &mut QueuePolling) {
        polling.clone_from(&self.queue);
    }

    /// The slot comes from another core, which knew this of it.
    pub(super) fn arrives(&mut self, polling: &QueuePolling, objective: &CoreObjective) {
        self.queue = polling.elsewhere(&self.costs, objective);
    }

    /// Something else is asked of the core.
    pub(super) fn rechoose(&mut self, objective: &CoreObjective, meter: &SlotMeter) {
        self.queue.rechoose(&self.costs, objective);
        self.publish(meter);
    }

    /// Shows for how long the slot is looked at in vain.
    pub(super) fn publish(&self, meter: &SlotMeter) {
        let (spin_ns, reason) = self.queue.spin();
        meter.choices().spin(spin_ns, reason);
    }

    /// From a kick until the slot is stepped.
    pub(super) fn wake_up(&self) -> Duration {
        Duration::from_nanos(self.costs.wake_ns)
    }

    /// Whether it is looked at for longer than that is worth, since the objective takes so much.
    pub(super) fn spins_for_objective(&self) -> bool {
        self.queue.spin().1 == SpinReason::Objective
    }

    /// Whether the slot is looked at for a while before it rests.
    pub(super) fn spins(&self) -> bool {
        self.queue.spin().0 > 0
    }

    /// Whether it is looked at for kicks while its requests wait for a disk.
    pub(super) fn spins_beside_a_disk(&self) -> bool {
        self.queue.spin_for_latency() > 0
    }

    /// A poll had work, of so many requests, `now_ns` after the core was started.
    #[inline]
    pub(super) fn worked(
        &mut self,
        now_ns: u64,
        requests: u32,
        objective: &CoreObjective,
        trials: &mut PollTrials,
        meter: &SlotMeter,
    ) {
        if self.queue.worked(now_ns, requests, &self.costs, objective, trials) {
            self.publish(meter);
        }
    }

    /// A poll found nothing but requests that wait for a disk.
    pub(super) fn waits(&mut self) {
        self.queue.waits();
    }

    /// A poll found nothing. Why the slot is to be armed, if it is.
    pub(super) fn idle(&mut self, now_ns: u64, may_poll: bool, trials: &PollTrials) -> Option<ArmReason> {
        match self.queue.idle(now_ns, may_poll, trials) {
            IdleChoice::Poll => None,
            IdleChoice::Arm(reason) => Some(reason),
        }
    }

    /// When looking on ends, if nothing comes.
    pub(super) fn spin_ends(&mut self, now_ns: u64, trials: &PollTrials) -> u64 {
        self.queue.spin_ends(now_ns, trials)
    }

    /// The slot rests, and the look after it was armed has found nothing.
    pub(super) fn rests(&mut self) {
        self.queue.armed();
    }

    /// The core was awake for other slots for so many thousandths of the time, which took `turn_ns` per turn. `wake_ns`: what a wake-up takes, if that is
    /// known.
    fn price(&mut self, others_permille: u64, turn_ns: u64, wake_ns: Option<u64>) {
        // While it could sleep instead, polling costs all of the time.
        let alone = 1000 - others_permille.min(1000);
        let among = PollingCosts::default().among(LOOK_NS, turn_ns.max(1)).polling_permille;
        let permille = alone + u64::from(among) * (1000 - alone) / 1000;
        self.costs.polling_permille = permille.clamp(1, 1000) as u32;
        self.costs.wake_ns = wake_ns.unwrap_or(self.costs.wake_ns);
    }
}

impl PollLoop {
    /// What a wake-up takes, ns, if one was measured: by a message, else by a timer.
    pub(super) fn wake_ns(&self) -> Option<u64> {
        self.wake_ups.median_ns().or(self.wait_policy.wake_ns())
    }

    /// What looking costs each slot, from what the core did since the last call.
    pub(super) fn price_polling(&mut self) {
        let (period_ns, busy_ns, turns) = self.account.since_priced(self.context.now());
        let turn_ns = busy_ns / turns.max(1);
        let wake_ns = self.wake_ns();
        for entry in self.slots.iter_mut().flatten() {
            let own = entry.charge.time_ns - entry.adaptive.priced_ns;
            entry.adaptive.priced_ns = entry.charge.time_ns;
            let others = busy_ns.saturating_sub(own) * 1000 / period_ns.max(1);
            entry.adaptive.price(others, turn_ns, wake_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_is_cheap_while_the_core_is_awake_for_others() {
        let mut adaptive = Adaptive::new(&CoreObjective::default(), None);
        let mut priced = |others, turn| {
            adaptive.price(others, turn, None);
            adaptive.costs.polling_permille
        };
        assert_eq!(priced(0, 0), 1000);
        assert_eq!(priced(1000, 2_940), 20);
        assert_eq!(priced(500, 2_940), 510);
        // More than there is, as clocks have it.
        assert_eq!(priced(5000, 2_940), 20);
    }
}
