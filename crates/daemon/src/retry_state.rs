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
    /// All tries, also those that somebody asked for.
    tries: u32,
    /// Tries at their time: each doubles the wait.
    in_time: u32,
    /// Never, where trying again by itself would disturb others.
    next: Option<Instant>,
}

impl RetryState {
    /// It has failed for the first time.
    pub fn new(why: Refusal) -> Self {
        RetryState::after(0, 0, why)
    }

    /// A try at its time has failed.
    pub fn again(&self, why: Refusal) -> Self {
        RetryState::after(self.tries, self.in_time, why)
    }

    /// A try that somebody asked for has failed: the wait is no longer than before, and begins no later.
    pub fn asked(&self, why: Refusal) -> Self {
        let after = RetryState::after(self.tries, self.in_time.saturating_sub(1), why);
        let now = Instant::now();
        let before = self.next.filter(|next| *next > now);
        RetryState { next: after.next.map(|next| before.map_or(next, |before| before.min(next))), ..after }
    }

    fn after(tries: u32, in_time: u32, why: Refusal) -> Self {
        let wait = FIRST.saturating_mul(1 << in_time.min(16)).min(LONGEST);
        let next = why.retry.then(|| Instant::now() + wait);
        RetryState { why, tries: tries.saturating_add(1), in_time: in_time.saturating_add(1), next }
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

    #[test]
    fn a_try_that_is_asked_for_does_not_lengthen_the_wait() {
        let wait = |failed: &RetryState| failed.report().next_ms.unwrap().div_ceil(1000);
        let why = Refusal::failed("it is missing", "put it back");
        let mut failed = RetryState::new(why.clone()).again(why.clone()).again(why.clone());
        let next = failed.next();
        for _ in 0..10 {
            failed = failed.asked(why.clone());
            assert_eq!(failed.next(), next, "neither longer nor begun anew");
        }
        assert_eq!((wait(&failed), failed.report().tries), (4, 13));
        assert_eq!(wait(&failed.again(why.clone())), 8, "as if nobody had asked");
        // One that is not tried by itself waits for nothing; it may begin to.
        let never = Refusal { retry: false, ..why.clone() };
        let never = failed.asked(never.clone()).asked(never);
        assert_eq!(never.next(), None);
        assert_eq!(wait(&never.asked(why)), 4);
    }
}
