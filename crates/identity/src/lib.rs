//! Who a host is, for TLS: a small authority, and an identity for each host, in files of one directory.
//!
//! ```text
//!   authority.pem   certificate and key of the authority: on one host only     create, issue, renew
//!   host.pem        certificate and key of this host, certificate of the authority     import, load, show, export
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
mod name;
mod tls;

pub use authority::Validity;
pub use certificate::{CertificateFacts, moment};
pub use directory::{IdentityDirectory, Shown};
pub use error::IdentityError;
pub use fault::TlsFault;
pub use name::HostName;
pub use tls::HostIdentity;

/// Where a host's identity is if nothing else is said.
pub const DEFAULT_DIRECTORY: &str = "/etc/ioplane/identity";
