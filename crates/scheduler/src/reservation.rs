//! Reservations: parts of a declared capacity that are kept for one client each. What is promised is never more than what is there.

use std::iter::Sum;

use crate::limit::LimitUnit;

/// Requests and bytes per second; 0 is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReservedRates {
    /// Requests per second.
    pub requests: u64,
    /// Bytes per second.
    pub bytes: u64,
}

impl ReservedRates {
    /// Whether it is nothing.
    pub fn is_none(&self) -> bool {
        *self == ReservedRates::default()
    }
}

impl Sum for ReservedRates {
    /// Sums that are larger than any capacity are as good as the largest number.
    fn sum<I: Iterator<Item = ReservedRates>>(rates: I) -> ReservedRates {
        rates.fold(ReservedRates::default(), |sum, next| ReservedRates {
            requests: sum.requests.saturating_add(next.requests),
            bytes: sum.bytes.saturating_add(next.bytes),
        })
    }
}

/// What there is to reserve from. A unit without a limit has no capacity that could be divided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Requests per second.
    pub requests: Option<u64>,
    /// Bytes per second.
    pub bytes: Option<u64>,
}

/// Why a reservation does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// In which unit.
    pub unit: LimitUnit,
    /// What was asked for, per second.
    pub asked: u64,
    /// What is not reserved, per second.
    pub free: u64,
    /// What there is, reserved or not; nothing if no capacity is declared in this unit.
    pub capacity: Option<u64>,
}

impl Capacity {
    /// Whether so much can be reserved while `others` is.
    pub fn admit(&self, others: ReservedRates, asked: ReservedRates) -> Result<(), Shortage> {
        let units = [
            (LimitUnit::Requests, self.requests, others.requests, asked.requests),
            (LimitUnit::Bytes, self.bytes, others.bytes, asked.bytes),
        ];
        for (unit, capacity, taken, asked) in units {
            let free = capacity.unwrap_or(0).saturating_sub(taken);
            if asked > free {
                return Err(Shortage { unit, asked, free, capacity });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(requests: u64, bytes: u64) -> ReservedRates {
        ReservedRates { requests, bytes }
    }

    #[test]
    fn what_is_reserved_is_never_more_than_the_capacity() {
        let capacity = Capacity { requests: Some(10_000), bytes: Some(1 << 20) };
        assert_eq!(capacity.admit(rates(6000, 0), rates(4000, 1 << 20)), Ok(()));
        let shortage = |unit, asked, free, capacity| Err(Shortage { unit, asked, free, capacity });
        let refused = capacity.admit(rates(6000, 0), rates(4001, 0));
        assert_eq!(refused, shortage(LimitUnit::Requests, 4001, 4000, Some(10_000)));
        let refused = capacity.admit(rates(0, 1 << 20), rates(1, 1));
        assert_eq!(refused, shortage(LimitUnit::Bytes, 1, 0, Some(1 << 20)));
        // More than there is, after the capacity was lowered.
        let refused = capacity.admit(rates(20_000, 0), rates(1, 0));
        assert_eq!(refused, shortage(LimitUnit::Requests, 1, 0, Some(10_000)));
        assert_eq!(capacity.admit(rates(20_000, 0), ReservedRates::default()), Ok(()));
        assert!(capacity.admit(rates(u64::MAX, 0), rates(u64::MAX, 0)).is_err());
    }

    #[test]
    fn without_a_declared_capacity_nothing_can_be_reserved() {
        let capacity = Capacity { requests: None, bytes: Some(100) };
        let refused = capacity.admit(ReservedRates::default(), rates(1, 100));
        let unit = LimitUnit::Requests;
        assert_eq!(refused, Err(Shortage { unit, asked: 1, free: 0, capacity: None }));
        assert_eq!(capacity.admit(ReservedRates::default(), rates(0, 100)), Ok(()));
        assert!(ReservedRates::default().is_none() && !rates(0, 1).is_none());
        let sum: ReservedRates = [rates(1, 2), rates(3, 4), rates(u64::MAX, 0)].into_iter().sum();
        assert_eq!(sum, rates(u64::MAX, 6));
    }
}
