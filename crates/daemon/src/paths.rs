//! Where a daemon's files and sockets are, as its configuration and its command line have it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ioplane_api::SOCKET;

use crate::config::Config;

/// How a daemon is started. The binary that takes everything over from it is started so too.
#[derive(Debug, Clone)]
pub struct Invocation {
    pub config: PathBuf,
    /// The control socket; goes before what the configuration says.
    pub socket: Option<PathBuf>,
    /// The filter of its log.
    pub log: String,
}

pub fn control_path(config: &Config, socket: Option<PathBuf>) -> Result<PathBuf> {
    let control = socket.or(config.daemon.socket.clone()).unwrap_or_else(|| SOCKET.into());
    std::path::absolute(&control).context("the control socket's path")
}

/// What outlives the host. A run directory elsewhere than in `/run`, which is in memory, is one of the user's own and does for this, too.
pub fn state_dir(config: &Config, run_dir: &Path) -> PathBuf {
    let in_memory = ["/run", "/var/run"].iter().any(|run| run_dir.starts_with(run));
    // A user's own daemon may not write elsewhere.
    let usual = || match in_memory && !run_dir.starts_with("/run/user") {
        true => PathBuf::from("/var/lib/ioplane"),
        false => run_dir.to_owned(),
    };
    config.daemon.state_dir.clone().unwrap_or_else(usual)
}

/// Where the state file and the sockets are to be.
pub fn run_dir(config: &Config, control: &Path) -> PathBuf {
    let folder = control.parent().unwrap_or(Path::new("/"));
    config.daemon.run_dir.clone().unwrap_or_else(|| folder.to_owned())
}
