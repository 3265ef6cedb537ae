//! What the control side could not do.

use crate::{MOST_PAIRS, MOST_PORTS};

/// For a person.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// Every slot is taken.
    #[error("switch {switch} has {MOST_PORTS} ports already: unplug one, or add another switch")]
    NoSlot {
        /// The switch.
        switch: String,
    },
    /// Two ports of one name.
    #[error("switch {switch} has a port called {port} already: choose another name")]
    NameTaken {
        /// The switch.
        switch: String,
        /// The name.
        port: String,
    },
    /// No port of that name.
    #[error("switch {switch} has no port called {port}")]
    NoSuchPort {
        /// The switch.
        switch: String,
        /// The name.
        port: String,
    },
    /// A number out of range.
    #[error("port {port}: {pairs} queue pairs: it must be 1 to {MOST_PAIRS}")]
    Pairs {
        /// The port.
        port: String,
        /// What was asked for.
        pairs: u16,
    },
    /// A VLAN out of range.
    #[error("port {port}: VLAN {vlan}: it must be 1 to 4094")]
    Vlan {
        /// The port.
        port: String,
        /// What was asked for.
        vlan: u16,
    },
    /// Not a unicast MAC address.
    #[error(
        "port {port}: {mac:02x?} is not a unicast MAC address: its first byte must be even, and not all be zero"
    )]
    Mac {
        /// The port.
        port: String,
        /// What was asked for.
        mac: crate::Mac,
    },
    /// Somebody captures there already.
    #[error("a capture of port {port} is running: a port has one at a time")]
    Captured {
        /// The port.
        port: String,
    },
    /// A capture that would take too much memory, or nothing.
    #[error(
        "a capture of {frames} frames of {snaplen} bytes: choose fewer, 64 MiB together at most, and at least one"
    )]
    CaptureSize {
        /// Frames.
        frames: usize,
        /// Bytes of each.
        snaplen: usize,
    },
    /// The system said no.
    #[error("{what}: {doing}: {source}")]
    Os {
        /// What it was about.
        what: String,
        /// What was being done, and what may help.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}
