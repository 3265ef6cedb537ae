//! The vhost-user host: stock VMMs drive our virtio devices over a unix socket.
//!
//! ```text
//!   Server task (one a device, tokio) ---- owns ----> Running<Vdev<V>>
//!      |  accept, receive                                 |
//!   Connection: bytes -> Message             Session: Message -> rings started, stopped, memory changed
//!      ^                                                  |
//!      +------------ replies <----------------------------+        commands of the daemon come by a channel
//! ```
//!
//! Specification: QEMU's "Vhost-user Protocol". A message that violates it ends its connection with a counted
//! [`PeerFault`]; the device is stopped, reset, and waits for the next front end.

mod config;
mod connection;
mod fault;
mod features;
mod handle_error;
mod handover;
mod inflight;
mod lease;
mod log;
mod memory;
mod message;
mod network;
mod peer;
mod quiescence;
mod rings;
mod server;
mod session;

pub use connection::Connection;
pub use fault::PeerFault;
pub use handle_error::HandleError;
pub use handover::{Adopted, HandOverError, Held, Parcel, adopt};
pub use lease::RingLease;
pub use message::{HEADER, Header, Message};
pub use server::{
    Handle, QueueStatus, STOP_PATIENCE, ServerOptions, Status, serve, serve_leased, serve_within,
};
pub use session::Session;
