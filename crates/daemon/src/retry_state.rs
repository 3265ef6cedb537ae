//! Why something could not be served, and when it is tried again.

use std::time::{Duration, Instant};

use ioplane_api::report::RetryReport;

use crate::refusal::Refusal;

/// From the first failure to the next try.
const FIRST: Duration = Duration::from_secs(1);
/// Between two tries at most: whoever puts back what was missing does not wait longer.
const LONGEST: Duration = Duration::from_secs(60);

/// One that is not served although it should be.
#[derive(Debug, Clone)]
pub struct RetryState {
    pub why: Refusal,
    tries: u32,
    /// Never, where trying again by itself would disturb others.
    next: Option<Instant>,
}

impl RetryState {
    /// It has failed for the first time.
    pub fn new(why: Refusal) -> Self {
        RetryState::after(0, why)
    }

    pub fn again(&self, why: Refusal) -> Self {
        RetryState::after(self.tries, why)
    }

    fn after(tries: u32, why: Refusal) -> Self {
        let wait = FIRST.saturating_mul(1 << tries.min(16)).min(LONGEST);
        let next = why.retry.then(|| Instant::now() + wait);
        RetryState { why, tries: tries.saturating_add(1), next }
    }

    /// It could not be tried now, for a reason that is not its own.
    pub fn postponed(&self) -> Self {
        RetryState { next: self.next.map(|_| Instant::now() + FIRST), ..self.clone() }
    }

    /// When it is tried again.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Whether it is to be tried by now.
    pub fn is_due(&self) -> bool {
        self.next.is_some_and(|next| next <= Instant::now())
    }

    /// For people and programs.
    pub fn report(&self) -> RetryReport {
        let now = Instant::now();
        let next = self.next.map(|next| next.saturating_duration_since(now));
        RetryReport { tries: self.tries, next_ms: next.map(|left| left.as_millis() as u64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hole_17_tries_come_later_and_later_and_never_stop() {
        let mut failed = RetryState::new(Refusal::failed("it is missing", "put it back"));
        let mut waits = Vec::new();
        for _ in 0..100 {
            waits.push(failed.report().next_ms.unwrap().div_ceil(1000));
            failed = failed.again(failed.why.clone());
        }
        assert_eq!(waits[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!((waits[99], failed.report().tries), (60, 101));
        let never = Refusal { retry: false, ..failed.why.clone() };
        assert_eq!(failed.again(never).report(), RetryReport { tries: 102, next_ms: None });
    }
}
