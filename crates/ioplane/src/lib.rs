//! The one command: daemon and client.
//!
//! ```text
//!   main --> command --Client--HTTP over a unix socket--> ioplane_daemon
//!               +--serve--> ioplane_daemon
//!               \--doctor--> this host
//! ```
//!
//! What both print, answer and read is [`ioplane_api`]'s.
//!
//! Must not know: rings, guest memory, protocols of hosts.
#![forbid(unsafe_code)]

pub mod cli;
pub mod client;
pub mod command;
mod log;
mod pcapng;
