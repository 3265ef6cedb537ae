//! How hosts come by certificates over the network: a host joins by a token, renews by its certificate, and asks for the list of revoked ones.
//!
//! ```text
//!   host-b: join, renew, revocations --one request over TLS--> JoinServer on the authority's host -- IdentityDirectory (signs, revokes)
//!           NewKey: its private half stays here  <--one answer--'
//! ```
//!
//! - **A token** ([`JoinToken`]) says where the authority answers, its fingerprint, and a secret that works once. The host takes no other server's word: the server shows a
//!   certificate of that authority under a name that no host can have.
//! - **One request, one answer** for each connection, within ten seconds and 16 KiB (an answer: 4 MiB).
//!
//! Must not know: devices, daemons, what certificates are used for.
#![forbid(unsafe_code)]

mod client;
mod error;
mod kill;
mod limits;
mod server;
mod token;
mod wire;

pub use client::{Joined, fetch_revocations, join, renew};
pub use error::JoinError;
pub use server::JoinServer;
pub use token::{AuthorityPlace, JoinToken, MOST_PLACES, TokenFlaw};

/// The port on which an authority answers if nothing else is said.
pub const DEFAULT_PORT: u16 = 10807;
