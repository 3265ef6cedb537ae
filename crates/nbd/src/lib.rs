//! Disks over NBD, the network block device protocol.
//!
//! ```text
//!   spec            constants, by their names in the protocol's document
//!   handshake       from the greeting to the transmission phase, for servers and for clients: bytes in, bytes out
//!   export          disks of this host that others use: a device with a queue for each connection
//!   transmission    requests and replies, encoded and decoded: bytes in, bytes out
//!   import          disks of other hosts, as backings
//!   claim           who may write an export: what is said about it, and the exporter's book
//!   reserve         a part of an export's capacity that is kept for one import: what is said about it
//!   session         how a session of two hosts comes over an export's port
//!   sums            CRC32C over what two hosts of ours say in plain text: bytes in, bytes out
//!   records         between a socket and both: TLS, or sums
//!   tls             the identity by which TLS starts
//! ```
//!
//! The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd; section names in this crate are those of that document.
//! `spec`, `transmission`, `handshake` and `sums` do no I/O: whoever has the socket calls them.
//!
//! Must not know: virtio, guests, the daemon, where a disk's bytes are.

pub mod claim;
mod error;
pub mod export;
pub mod handshake;
pub mod import;
pub mod mutation;
mod protection;
mod records;
pub mod reserve;
pub mod session;
pub mod spec;
pub mod sums;
mod tls;
pub mod transmission;

pub use error::{NbdError, Violation};
pub use protection::Protection;
