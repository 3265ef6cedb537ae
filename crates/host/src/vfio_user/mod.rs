//! The vfio-user host: any VMM drives any PCI function over a unix socket.
//!
//! ```text
//!   Handle (daemon) --commands--> Service (one thread a device) ---- owns ----> Lifecycle<F>
//!                                    |  poll: listener, connection, mailbox, attention, resume of INTA#, stop
//!   Connection: bytes -> Message ----+----> Session: Message -> accesses, wires, memory, resets
//!      ^                                                |
//!      +---------------- replies <----------------------+
//! ```
//!
//! Specification: QEMU's `docs/interop/vfio-user.rst`, version 0.0. A command that cannot be done is answered with an error number,
//! and counted; what leaves no sense in the stream ends the connection. A device whose client is gone is reset, and waits for the
//! next one.
//!
//! Nothing of a client is lost while its device is held (invariant 1): the command waits, and with it those after it; the service still
//! hears that the client has left, or that it is to end itself.
//!
//! Memory goes away at a quiescent point only. Migration is not offered: the device's state belongs to the daemon, not to the client.

mod connection;
mod dma;
mod dma_write;
mod fault;
mod handle;
mod held;
mod irqs;
mod memory;
mod options;
mod owner;
mod regions;
mod server;
mod session;
pub mod spec;
mod status;
mod version;
mod wires;
mod write_log;

pub use connection::{Connection, Message, Reply};
pub use dma_write::{DmaLayout, DmaWrite, DmaWriteError, DmaWritten};
pub use fault::ClientFault;
pub use handle::{Handle, HandleError, PendingReply};
pub use options::Options;
pub use server::serve;
pub use session::Session;
pub use status::Status;
pub use write_log::WriteLogError;
