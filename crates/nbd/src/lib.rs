//! Disks over NBD, the network block device protocol.
//!
//! ```text
//!   spec            constants, by their names in the protocol's document
//!   transmission    requests and replies, encoded and decoded: bytes in, bytes out
//! ```
//!
//! The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd; section names in this crate are those of that document.
//! `spec`, `transmission` and `handshake` do no I/O: whoever has the socket calls them.

mod error;
pub mod spec;
pub mod transmission;

pub use error::Violation;
