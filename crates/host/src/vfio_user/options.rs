//! Where and how a device is served.

use std::path::PathBuf;
use std::time::Duration;

use ioplane_memory::Limits;

/// Where and how a device is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the function is called in the log.
    pub name: String,
    /// Path of the socket. Made with mode 0600; what was there before is replaced if nobody listens.
    pub socket: PathBuf,
    /// How long the device may take to become quiescent by itself when memory goes away; then it is suspended. QEMU waits 5 s for a
    /// reply (`x-msg-timeout`).
    pub patience: Duration,
    /// What clients may take of memory.
    pub limits: Limits,
}

impl Options {
    /// Long enough for requests of a device of ours, short enough for QEMU's several unmaps in a row.
    pub const PATIENCE: Duration = Duration::from_millis(500);

    /// The usual ones. The function is called as its socket is, without the extension.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let socket = socket.into();
        let name = socket.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Options { name, socket, patience: Self::PATIENCE, limits: Limits::default() }
    }
}
