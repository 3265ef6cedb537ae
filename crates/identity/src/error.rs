//! What can be wrong with an identity.

use std::path::PathBuf;

use crate::refusal::JoinRefusal;

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
    /// A name that no host may have.
    #[error("{0:?} is no host's name: the authority answers under it")]
    Reserved(String),
    /// The authority has revoked a certificate.
    #[error(
        "the certificate in {path} has been revoked by its authority: this host needs a new identity, by a token"
    )]
    Revoked {
        /// The file.
        path: PathBuf,
    },
    /// A revocation list that is none of the authority's.
    #[error("{path} is no revocation list of this host's authority: {why}; fetch it again")]
    RevocationList {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A revocation list that is older than the present one.
    #[error("{path}: revocation list {number} is older than the present one, {present}: it is not taken")]
    OlderRevocationList {
        /// Where it came from.
        path: PathBuf,
        /// Its number.
        number: u64,
        /// That of the present one.
        present: u64,
    },
    /// Another process works with the authority.
    #[error("{path} is locked by another process for too long: is one stopped that issues or revokes?")]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// Whoever asks for a certificate does not get one.
    #[error(transparent)]
    Refused(#[from] JoinRefusal),
    /// There is no certificate to revoke.
    #[error("the authority knows no valid certificate {which}")]
    UnknownCertificate {
        /// Whose, and which one.
        which: String,
    },
    /// This host's own certificate is not revoked by mistake.
    #[error(
        "that is the certificate that this host uses: renew it first, then revoke the old one by its fingerprint"
    )]
    OwnCertificate,
    /// As many as there may be.
    #[error("the authority has {most} {what} already")]
    Full {
        /// Tokens or certificates.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
    /// Making a key or a certificate failed.
    #[error("making a certificate: {0}")]
    Making(String),
}
