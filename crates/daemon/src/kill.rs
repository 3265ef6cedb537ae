//! Where a test kills the daemon: what is common to the moments of an upgrade and of a swap. Only with the feature `kill-points`.

use rustix::process::{Signal, getpid, kill_process};

/// What the file says that the environment variable `IOPLANE_UPGRADE_KILL` names.
pub fn wanted() -> Option<String> {
    let file = std::env::var_os("IOPLANE_UPGRADE_KILL")?;
    Some(std::fs::read_to_string(file).ok()?.trim().to_owned())
}

/// Dies.
pub fn die() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    loop {
        std::thread::park();
    }
}
