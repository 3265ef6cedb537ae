//! Taking a rule out, to prove that a test notices; as `ioplane_memory::mutation` does with the invariants.
//!
//! With the feature `mutations` a rule is gone after [`remove`], or for a whole process if it was started with its name in the environment variable
//! `IOPLANE_WITHOUT_RULE`. Without the feature the question is a constant. What each rule is for stands in docs/decisions/0044-remote-requests-once.md,
//! docs/decisions/0050-retained-writes.md, docs/decisions/0052-claims.md and docs/decisions/0073-sums-in-plain-text.md.

/// What makes a replay safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Rule {
    /// A request in flight on a lost connection is sent again.
    Replay = 1,
    /// A request that has been answered is never sent again.
    AnsweredOnce = 2,
    /// A write waits for those in flight that it overlaps.
    OneWriter = 3,
    /// Nothing is replayed before the fence has confirmed that the old connection is read no more.
    Fence = 4,
    /// What an exporter acknowledged and did not flush is written again to another instance of it.
    Retain = 5,
    /// So is what the other queues of the disk have retained, and they are served by nobody meanwhile.
    AllQueues = 6,
    /// In the order in which it was first sent, whichever queue sent it.
    InOrder = 7,
    /// A flush covers what was acknowledged when it began, and nothing later.
    CoveredByFlush = 8,
    /// What is durable already is not written again.
    NotTheDurable = 9,
    /// Without a copy of every write that may be lost, nothing is answered until a person decides.
    Complete = 10,
    /// An exporter makes a claim durable before it grants it.
    ClaimDurable = 11,
    /// A client with a lower generation than that of the claim is refused.
    RefuseLower = 12,
    /// So is one with the same generation that is not the holder.
    RefuseEqual = 13,
    /// So is one without a generation, while somebody holds the export.
    RefuseWithout = 14,
    /// A flush that has failed counts as another instance: what it should have covered is written again, although the exporter says that it is the same.
    FailedFlush = 15,
    /// An exporter confirms an epoch once, and none that is older than another one that it knows of the same channel.
    NewestOnly = 16,
    /// Before it confirms one, or lets another holder in, it reads older connections no more.
    OldEnds = 17,
    /// And what had begun by them has ended.
    Landed = 18,
    /// Nothing is taken from a record whose sum is wrong.
    Sum = 19,
}

#[cfg(feature = "mutations")]
static REMOVED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Takes `rule` out for this process, or puts all back with `None`.
#[cfg(feature = "mutations")]
pub fn remove(rule: Option<Rule>) {
    REMOVED.store(rule.map_or(0, |rule| rule as u8), std::sync::atomic::Ordering::SeqCst);
}

/// Whether `rule` has been taken out. Always false without the feature `mutations`.
#[inline(always)]
pub fn removed(rule: Rule) -> bool {
    #[cfg(feature = "mutations")]
    return REMOVED.load(std::sync::atomic::Ordering::Relaxed) == rule as u8 || removed_at_start(rule);
    #[cfg(not(feature = "mutations"))]
    {
        let _ = rule;
        false
    }
}

#[cfg(feature = "mutations")]
fn removed_at_start(rule: Rule) -> bool {
    static AT_START: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let name = AT_START.get_or_init(|| std::env::var("IOPLANE_WITHOUT_RULE").unwrap_or_default());
    !name.is_empty() && *name == format!("{rule:?}")
}
