//! Moments at which a test kills the successor. With the feature `kill-points` the file that the environment variable
//! `IOPLANE_UPGRADE_KILL` names says at which one; without it nothing of this is in the binary.

/// A moment in the life of a successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    /// The formats agree.
    Greeted,
    /// It has answered that it is ready.
    Ready,
    /// Everything below is open a second time.
    Prepared,
    /// The first device has come, and its guest waits.
    Device,
    /// It has answered that all are loaded.
    Loaded,
    /// It has been given them, and has not said that it takes them.
    Committed,
    /// It has said so, and has started none.
    Mine,
}

/// Dies here if the test wants that.
pub fn here(point: KillPoint) {
    #[cfg(feature = "kill-points")]
    if let Some(file) = std::env::var_os("IOPLANE_UPGRADE_KILL")
        && let Ok(wanted) = std::fs::read_to_string(file)
        && wanted.trim().eq_ignore_ascii_case(&format!("{point:?}"))
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = point;
}
