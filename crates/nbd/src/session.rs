//! How a session of two hosts comes over the port of an export: the handshake of a client that selects [`SESSION`]. What follows is no NBD, and none of this
//! crate's business (docs/decisions/0072-the-session-of-two-hosts.md).

use std::pin::Pin;

use tokio::io::{AsyncRead, AsyncWrite};

use crate::handshake::server::Negotiated;

/// The metadata context by which a client says that it wants a session in place of the export that it enters. Servers of others, and older ones of ours, do
/// not select it.
pub const SESSION: &str = "ioplane:session";

/// The metadata context by which an import asks whether the server has sessions. A client that selects it stays a client.
pub const SESSIONS: &str = "ioplane:sessions";

/// Whatever a session is on.
pub trait Bytes: AsyncRead + AsyncWrite + Send {}
impl<S: AsyncRead + AsyncWrite + Send> Bytes for S {}

/// The stream of a session, behind its handshake.
pub type SessionStream = Pin<Box<dyn Bytes>>;

impl Negotiated {
    /// Whether what follows is a session.
    pub fn is_session(&self) -> bool {
        self.contexts.iter().any(|context| context.name == SESSION)
    }
}
