//! A QEMU that others have started: its sockets, its monitor (QMP) and the agent in its guest. Both answer with one JSON object a line, and both
//! serve one client at a time.
//!
//! ```text
//!   command line --Chardev--> path --Endpoint--> Lines --+--> Qmp          commands, events
//!                                                        `--> GuestAgent   commands, after both have found the beginning of a line
//! ```
//!
//! [`IncomingRequest`] is what another host may say to a monitor, for whoever passes that on.
//!
//! What comes from there is hostile: each wait ends at a stated time, lines and events that are kept are bounded.
//!
//! Must not know: exits, our devices, the daemon. The crates `qapi` and `qapi-qmp` were looked at: docs/decisions/0033.
#![forbid(unsafe_code)]

mod agent;
mod answer;
mod chardev;
mod error;
mod incoming;
mod qmp;
mod socket;
#[cfg(test)]
mod test_monitor;

pub use agent::GuestAgent;
pub use chardev::Chardev;
pub use error::QemuError;
pub use incoming::{IncomingCommand, IncomingPorts, IncomingRequest, LONGEST_LINE, NotIncoming, PortSize};
pub use qmp::Qmp;
pub use socket::Endpoint;
