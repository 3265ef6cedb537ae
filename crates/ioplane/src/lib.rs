//! The one command: daemon and client.
//!
//! ```text
//!   main --> command --Client--HTTP over a unix socket--> daemon::api
//!               |                                            |
//!               +--serve--> config --> daemon (disks, NICs, switches, cores, ledger) --> host, virtio, storage, network, cores
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
pub mod config;
pub mod daemon;
mod log;
mod pcapng;
pub mod refusal;
