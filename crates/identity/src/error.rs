//! What can be wrong with an identity.

use std::path::PathBuf;

/// Why there is no identity, or no use for it. Each says what to do where that is known here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// Not a name for a host.
    #[error(
        "{0:?} is not a host name: letters, digits, '-' and '.', at most 253 characters, and not a number"
    )]
    Name(String),
    /// A file is not there.
    #[error("{path} is missing: this host has no {what}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// `identity`, `authority`.
        what: &'static str,
    },
    /// A file is there already.
    #[error("{path} is there already: remove it first if the {what} is to be another one")]
    Exists {
        /// The file.
        path: PathBuf,
        /// `identity`, `authority`.
        what: &'static str,
    },
    /// A file cannot be read.
    #[error("{path} is unreadable: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("{path} cannot be written: {source}")]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Others can read a private key, or put another one in its place.
    #[error(
        "{path} has the wrong permissions ({why}): private keys are there, so only its owner may have access"
    )]
    Permissions {
        /// The file or directory.
        path: PathBuf,
        /// Mode or owner.
        why: String,
    },
    /// A file holds something else.
    #[error("{path} is malformed: {why}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A certificate is too old.
    #[error("the certificate in {path} has expired: it was valid until {until}")]
    Expired {
        /// The file.
        path: PathBuf,
        /// Last day.
        until: String,
    },
    /// A certificate is too young, or the clock is wrong.
    #[error(
        "the certificate in {path} is not yet valid: it will be from {from} on; is this host's clock right?"
    )]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// First moment.
        from: String,
    },
    /// A certificate that the authority in the same file has not signed, or an identity of another authority than the one in use.
    #[error("the certificate in {path} is of the wrong authority: {why}")]
    WrongAuthority {
        /// The file.
        path: PathBuf,
        /// Which one.
        why: String,
    },
    /// An identity of another host.
    #[error("{path} is the identity of the wrong host: it is for {got}, and this host is {wanted}")]
    WrongHost {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        got: String,
        /// Whose it should be.
        wanted: String,
    },
    /// Making a key or a certificate failed.
    #[error("making a certificate: {0}")]
    Making(String),
}
