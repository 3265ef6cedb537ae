//! A budget in bytes a second, kept in one atomic word.

use std::sync::atomic::{AtomicU64, Ordering};

/// How much may be spent. The word is the moment (ns) at which everything spent so far will be paid for; spending is
/// allowed while that is no further ahead of now than the burst takes to pay.
#[derive(Debug)]
pub(crate) struct Budget {
    paid: AtomicU64,
    /// What a byte costs, in 1/1024 ns.
    price: u64,
    burst: u64,
}

impl Budget {
    /// `rate` bytes a second, and `burst` bytes at once after a pause.
    pub fn new(rate: u64, burst: u64) -> Self {
        let price = (1_000_000_000 << 10) / rate.max(1);
        Budget { paid: AtomicU64::new(0), price, burst: burst.saturating_mul(price) >> 10 }
    }

    /// Spends `bytes` at `now` (ns, since any fixed moment) if there is that much left.
    pub fn spend(&self, bytes: u64, now: u64) -> bool {
        let cost = bytes.saturating_mul(self.price) >> 10;
        let spent = |paid: u64| {
            let until = paid.max(now).saturating_add(cost);
            (until - now <= self.burst).then_some(until)
        };
        self.paid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spent).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_the_rate() {
        let budget = Budget::new(1000, 5000);
        let now = 7_000_000_000;
        assert_eq!((0..100).filter(|_| budget.spend(100, now)).count(), 50);
        assert!(!budget.spend(100, now + 99_000_000));
        assert!(budget.spend(100, now + 101_000_000));
        assert_eq!(
            (0..100).filter(|_| budget.spend(100, now + 60_000_000_000)).count(),
            50,
            "it is not saved up"
        );
    }

    #[test]
    fn more_than_the_burst_never_goes() {
        assert!(!Budget::new(1 << 30, 1000).spend(1001, u64::MAX / 2));
        assert!(!Budget::new(1, 1).spend(u64::MAX, 0));
    }
}
