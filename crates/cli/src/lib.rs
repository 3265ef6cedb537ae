//! The command line: what can be typed, and every command that only talks to a daemon.
//!
//! ```text
//!   usage --> args --> command::perform --Client--HTTP over a unix socket--> the daemon
//!                            |                \--> show, top, qemu, libvirt --> output
//!                            \--Host--> serve, doctor, exits, identity, model, move, pci list: the binary's
//! ```
//!
//! Must not know: any crate of ioplane but `ioplane-api`; what a daemon is made of.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only the binary uses it: a comment says what a name does not")]

pub mod args;
pub mod client;
pub mod command;
pub mod output;
mod pcapng;
pub mod progress;
mod usage;
pub mod words;

pub use command::{Host, perform};
pub use usage::parse;
