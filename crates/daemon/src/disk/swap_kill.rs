//! Moments of a swap at which a test kills the daemon. With the feature `kill-points` the file that the environment variable
//! `IOPLANE_UPGRADE_KILL` names says at which one (`swap marked`); without it nothing of this is in the binary.

/// A moment in a swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapKillPoint {
    /// The mirror is in, and nothing has been copied.
    Begun,
    /// Writes go to both, and something is left to copy.
    Mirroring,
    /// Both are equal, and durable.
    Synced,
    /// The old backing is marked superseded.
    Marked,
    /// The new backing is not marked unfinished any more; the guest goes on.
    Unmarked,
    /// The state file names the new backing; the guest goes on.
    Recorded,
    /// The new backing has failed after that; nothing that it lacks has been answered.
    Failed,
    /// And the state file names the old one again.
    Undone,
    /// The disk is on the new backing, and that it was swapped is still noted.
    Switched,
}

/// Lets the new backing fail here if the test wants that: to die when it is undone, or to see how it is undone (`swap fails`).
pub fn fail_if_wanted(mirror: &ioplane_storage::mirror::Mirror) {
    #[cfg(feature = "kill-points")]
    if crate::kill::wanted().is_some_and(|wanted| {
        wanted.starts_with("swap fails") || ["swap failed", "swap undone"].contains(&wanted.as_str())
    }) {
        mirror.fail(rustix::io::Errno::IO.raw_os_error());
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = mirror;
}

/// Whether the test wants the new backing to fail so that it cannot even be marked.
pub fn unmarkable() -> bool {
    #[cfg(feature = "kill-points")]
    return crate::kill::wanted().is_some_and(|wanted| wanted == "swap fails unmarkable");
    #[cfg(not(feature = "kill-points"))]
    false
}

/// Dies here if the test wants that.
pub fn here(point: SwapKillPoint) {
    #[cfg(feature = "kill-points")]
    if crate::kill::wanted().is_some_and(|wanted| wanted.eq_ignore_ascii_case(&format!("swap {point:?}"))) {
        crate::kill::die();
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = point;
}
