//! Moments at which a test kills the process that answers. With the feature `kill-points` the environment variable `IOPLANE_JOIN_KILL` says at which one
//! (`consumed`, `signed`); without it nothing of this is in the binary.

/// A moment in the life of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KillPoint {
    /// The token is used up, and nothing is signed.
    Consumed,
    /// The certificate is signed, and nobody has it.
    Signed,
}

/// Dies here if the test wants that.
pub(crate) fn here(point: KillPoint) {
    #[cfg(feature = "kill-points")]
    if std::env::var("IOPLANE_JOIN_KILL")
        .is_ok_and(|wanted| format!("{point:?}").eq_ignore_ascii_case(&wanted))
    {
        use rustix::process::{Signal, getpid, kill_process};

        let _ = kill_process(getpid(), Signal::KILL);
        // The signal is on its way.
        loop {
            std::thread::park();
        }
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = point;
}
