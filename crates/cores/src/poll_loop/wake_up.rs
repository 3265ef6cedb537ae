//! What a wake-up takes: from when another thread wakes the core until it looks.
//!
//! Measured by the messages of the control plane that find the core asleep. A front end sends several while it connects, so it is known by the
//! time its queues are used. The lateness of a timer would say less: that interrupt is of the core's own processor, and a kick is another's,
//! which in a virtual machine is an exit more.

/// Measurements that are remembered; the median of them counts, since a core that was not let run for a while says nothing of wake-ups.
const REMEMBERED: usize = 7;

/// What is believed, ns.
const LEAST: u64 = 2_000;
const MOST: u64 = 200_000;

/// The last wake-ups of a core.
#[derive(Debug, Default)]
pub(super) struct WakeUps {
    ns: [u64; REMEMBERED],
    count: usize,
}

impl WakeUps {
    /// One took so long, ns. 0 says that the core's clock is not the sender's.
    pub(super) fn took(&mut self, ns: u64) {
        if ns > 0 {
            self.ns[self.count % REMEMBERED] = ns.clamp(LEAST, MOST);
            self.count += 1;
        }
    }

    /// The median, ns, if there were any.
    pub(super) fn median_ns(&self) -> Option<u64> {
        let mut known = self.ns;
        let known = &mut known[..self.count.min(REMEMBERED)];
        known.sort_unstable();
        known.get(known.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_the_last_few_counts() {
        let mut wake_ups = WakeUps::default();
        wake_ups.took(0);
        assert_eq!(wake_ups.median_ns(), None);
        [40_000, 50_000, 9_000_000].into_iter().for_each(|ns| wake_ups.took(ns));
        assert_eq!(wake_ups.median_ns(), Some(50_000), "one that was late does not count for more");
        (0..REMEMBERED).for_each(|_| wake_ups.took(10));
        assert_eq!(wake_ups.median_ns(), Some(LEAST));
    }
}
