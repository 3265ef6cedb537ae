//! Evidence that a check has asserted something: a check that never reaches its assertion fails.
//!
//! A check returns a [`Proof`]. Nothing but [`Tally::proof`] makes one, and that refuses while nothing has been asserted.

/// How the message of a check begins that has asserted nothing.
pub const VACUOUS: &str = "vacuous:";

/// What a check has asserted so far.
#[derive(Debug, Default)]
pub(super) struct Tally(u64);

/// A check has asserted what it is named after, and all of it held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof(u64);

impl Proof {
    /// How often it was asserted.
    pub fn assertions(self) -> u64 {
        self.0
    }
}

/// There is nothing to assert.
pub(super) fn vacuous(why: &str) -> String {
    format!("{VACUOUS} {why}")
}

impl Tally {
    pub(super) fn assert(&mut self, holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
        self.met(if holds { Ok(()) } else { Err(otherwise()) })
    }

    /// Asserts that `outcome` is a success.
    pub(super) fn met<T, E>(&mut self, outcome: Result<T, E>) -> Result<T, E> {
        if outcome.is_ok() {
            self.0 += 1;
        }
        outcome
    }

    /// The assertion held for all of these occasions.
    pub(super) fn held_for(&mut self, occasions: u64) {
        self.0 += occasions;
    }

    /// All was asserted. `what` says of what there must have been an occasion.
    pub(super) fn proof(self, what: &str) -> Result<Proof, String> {
        if self.0 == 0 {
            return Err(vacuous(&format!("{what} did not come about, and nothing was asserted")));
        }
        Ok(Proof(self.0))
    }
}
