//! Who a host is, for TLS: a small authority, and an identity for each host, in files of one directory.
//!
//! ```text
//!   authority.pem   certificate and key of the authority: on one host only     create, issue, renew
//!   ledger.json     what the authority has made: tokens, certificates, revocations     make_token, use_token, sign, revoke
//!   host.pem        certificate and key of this host, certificate of the authority     import, install, load, show, export
//!   revoked.pem     the authority's list of revoked certificates     revoke, take_revocations, ListWatch
//!   authority.at    where the authority answers     keep_places, places
//! ```
//!
//! What belongs together is in one file, which is replaced whole, so no crash leaves a certificate beside the key of another one.
//!
//! Must not know: what is said over TLS, who may do what, daemons.
#![forbid(unsafe_code)]

mod authority;
mod certificate;
mod directory;
mod error;
mod fault;
mod files;
mod hear;
mod issuing;
mod ledger;
mod name;
mod peers;
mod pinned;
mod refusal;
mod revocation;
mod tls;
mod watch;
mod watched;

pub use authority::{LONGEST_REQUEST, NewKey, SigningRequest, Validity};
pub use certificate::{CertificateFacts, moment};
pub use directory::{IdentityDirectory, Installed, ListNews, Shown};
pub use error::IdentityError;
pub use fault::TlsFault;
pub use files::FileVersion;
pub use hear::let_hear;
pub use issuing::{Revoked, SECRET, SignedAnswer, SignedCertificate, Which};
pub use ledger::{TokenAdmission, TokenOrder};
pub use name::{ANSWERING, HostName};
pub use peers::{EndedPeer, PeerConnection};
pub use pinned::pinned_client;
pub use refusal::JoinRefusal;
pub use revocation::{LONGEST_LIST, RevocationList};
pub use tls::HostIdentity;
pub use watch::ListWatch;
pub use watched::WatchedStream;

/// Where a host's identity is if nothing else is said.
pub const DEFAULT_DIRECTORY: &str = "/etc/ioplane/identity";
