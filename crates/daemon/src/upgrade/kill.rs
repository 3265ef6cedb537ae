//! Moments at which a test kills the successor, or its predecessor. With the feature `kill-points` the file that the environment
//! variable `IOPLANE_UPGRADE_KILL` names says at which one (`loaded`, `predecessor loaded`); without it nothing of this is in the
//! binary.

/// A moment in the life of a successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverKillPoint {
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

/// Dies here if the test wants that, or lets its predecessor die, which has started it.
pub fn here(point: HandoverKillPoint) {
    #[cfg(feature = "kill-points")]
    if let Some(wanted) = crate::kill::wanted() {
        use rustix::process::{Signal, getppid, kill_process};

        let name = format!("{point:?}");
        if wanted.eq_ignore_ascii_case(&name) {
            crate::kill::die();
        }
        // Some points are passed more than once, and whoever has become our parent meanwhile is not the predecessor.
        static KILLED: std::sync::Once = std::sync::Once::new();
        let predecessor = wanted.strip_prefix("predecessor ");
        if predecessor.is_some_and(|wanted| wanted.eq_ignore_ascii_case(&name)) {
            KILLED.call_once(|| {
                let Some(predecessor) = getppid().filter(|parent| !parent.is_init()) else { return };
                let _ = kill_process(predecessor, Signal::KILL);
                // Once it is dead we are somebody else's.
                while getppid() == Some(predecessor) {
                    std::thread::yield_now();
                }
            });
        }
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = point;
}
