//! Taking a rule of a swap out, to prove that the schedules of `tests/mirror.rs` notice; as [`crate::mutation`] does with promises.
//!
//! With the feature `mutations` a rule is gone after [`remove`], in the thread that said so. Without it the question is a constant. What
//! each rule is for stands in docs/decisions/0047-swap.md.

/// What makes both copies equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SwapRule {
    /// A write waits for those under way that it overlaps.
    OneWriter = 1,
    /// The copier and writes of the same bytes wait for each other.
    Claim = 2,
    /// The bytes of a mirrored write are read from guest memory once.
    OneRead = 3,
    /// What is written to the old backing alone is copied afterwards.
    Mark = 4,
    /// What may have been written in part is copied again.
    MarkFailed = 5,
    /// A copy that has missed a write is never switched to.
    Stale = 6,
    /// A flush reaches both copies.
    FlushBoth = 7,
    /// While it is being written down that the disk is on the new backing, nothing is answered that this one lacks.
    Hold = 8,
    /// What the old backing may have lost is copied again.
    Restart = 9,
    /// What is under way when the disk goes on with the new backing ends as that has ended it.
    Decided = 10,
    /// Once the disk has gone on with the new backing, what begins waits for writes of the same bytes that went to both.
    Settled = 11,
    /// Of a queue that is stopped after that nobody waits for its ranges.
    Left = 12,
    /// What the old backing has read when the disk has gone on is read again, from the new one.
    ReadAgain = 13,
}

#[cfg(feature = "mutations")]
std::thread_local! {
    static REMOVED: std::cell::Cell<Option<SwapRule>> = const { std::cell::Cell::new(None) };
}

/// Takes `rule` out for this thread, or puts all back with `None`.
#[cfg(feature = "mutations")]
pub fn remove(rule: Option<SwapRule>) {
    REMOVED.set(rule);
}

/// Whether `rule` has been taken out. Always false without the feature `mutations`.
#[inline(always)]
pub(super) fn removed(rule: SwapRule) -> bool {
    #[cfg(feature = "mutations")]
    return REMOVED.get() == Some(rule);
    #[cfg(not(feature = "mutations"))]
    {
        let _ = rule;
        false
    }
}
