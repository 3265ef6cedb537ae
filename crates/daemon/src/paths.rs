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

/// Where the state file and the sockets are to be.
pub fn run_dir(config: &Config, control: &Path) -> PathBuf {
    let folder = control.parent().unwrap_or(Path::new("/"));
    config.daemon.run_dir.clone().unwrap_or_else(|| folder.to_owned())
}
