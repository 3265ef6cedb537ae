//! The types of the control interface: what the daemon, the command line and other programs say to each other.
//!
//! ```text
//!   form (spec), request --PUT, POST, PATCH--> daemon --> report, or refusal     JSON; the state file and the hand-over hold specs
//! ```
//!
//! Field names, defaults and the order of fields are a promise: programs read the JSON, `ioplane upgrade` and the state file keep it.
//!
//! Must not know: any other crate of ioplane, HTTP, threads. What the crates below call these things is the daemon's business.
#![forbid(unsafe_code)]

pub mod refusal;
pub mod report;
pub mod request;
pub mod size;
pub mod spec;

/// Where the control socket is if nobody says.
pub const SOCKET: &str = "/run/ioplane/control.sock";
