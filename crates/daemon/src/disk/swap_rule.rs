//! Taking a rule of a swap out that the daemon keeps, to prove that the tests notice; those that its two backings are kept equal by are in
//! `ioplane_storage::mirror::mutation`. With the feature `kill-points` the environment variable `IOPLANE_WITHOUT_RULE` names one for a whole process;
//! without it the question is a constant. What each rule is for stands in docs/decisions/0047-swap.md.

/// What makes the right backing the one that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonSwapRule {
    /// The target is marked unfinished, durably, before anything is copied: so it is before a write is acknowledged that it lacks.
    TargetMarked,
    /// The switch is in the state file before the new backing is written alone.
    SwitchRecorded,
    /// What a disk has left is refused as superseded.
    OldRefused,
    /// What the old backing may have lost is copied again.
    CopyRestarts,
    /// A new backing that may have lost something is not switched to.
    KeptAll,
}

/// Whether `rule` has been taken out.
pub fn removed(rule: DaemonSwapRule) -> bool {
    #[cfg(feature = "kill-points")]
    return std::env::var("IOPLANE_WITHOUT_RULE").is_ok_and(|name| name == format!("{rule:?}"));
    #[cfg(not(feature = "kill-points"))]
    {
        let _ = rule;
        false
    }
}
