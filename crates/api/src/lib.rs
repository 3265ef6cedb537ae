//! The types of the control interface: what the daemon, the command line and other programs say to each other.
//!
//! ```text
//!   form (spec), request --PUT, POST, PATCH--> daemon --> report, or refusal     JSON; the state file and the hand-over hold specs
//! ```
//!
//! Each kind of thing has one list of its fields (`spec`), and the interface one list of its operations ([`operation`]); forms, options of the command
//! line, the reader of the configuration, comparison, JSON schemas and routes come from these.
//!
//! Field names, defaults and the order of fields are a promise: programs read the JSON, `ioplane upgrade` and the state file keep it.
//!
//! Must not know: any other crate of ioplane, how HTTP is served, threads. What the crates below call these things is the daemon's business.
#![forbid(unsafe_code)]

#[macro_use]
pub mod spec;

#[cfg(feature = "schema")]
pub mod openapi;
pub mod operation;
pub mod pcapng;
pub mod refusal;
pub mod report;
pub mod request;
pub mod size;

/// Where the control socket is if nobody says.
pub const SOCKET: &str = "/run/ioplane/control.sock";

/// The variable of the environment that has the filter of a daemon's log. Every version reads it.
pub const LOG_VARIABLE: &str = "IOPLANE_LOG";
