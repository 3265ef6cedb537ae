//! The vfio-user host: any VMM drives any PCI function over a unix socket.
//!
//! ```text
//!   Service (one thread a device) ---- poll: listener, connection, attention, resume of INTA#, stage of the front, stop
//!      |                                                   |
//!   Connection: bytes -> Message                  Session: Message -> Front<F>: accesses, wires, memory, resets
//!      ^                                                   |
//!      +---------------- replies <-------------------------+
//! ```
//!
//! Specification: QEMU's `docs/interop/vfio-user.rst`, version 0.0. A command that cannot be done is answered with an error number,
//! and counted; what leaves no sense in the stream ends the connection. A device whose client is gone is reset, and waits for the
//! next one.
//!
//! Nothing of a client is lost while its device is held (law 1): the command waits, and with it those after it; the service still
//! hears that the client has left, or that it is to end itself.
//!
//! Memory goes away at a quiescent point only. Migration is not offered: the device's state belongs to the daemon, not to the client.

mod connection;
mod fault;
mod irqs;
mod memory;
mod quiescence;
mod regions;
mod server;
mod session;
pub mod spec;
mod status;
mod version;

pub use connection::{Connection, Message, Reply};
pub use fault::ClientFault;
pub use server::{Handle, Options, Refusal, serve};
pub use session::Session;
pub use status::Status;
