//! Why an authority signs no certificate for whoever asks.

use serde::{Deserialize, Serialize};

/// The reason, in the same words on both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum JoinRefusal {
    /// No such token was made here, or it ended more than a week ago.
    #[error("the token is unknown to this authority: make one on its host (`ioplane identity token`)")]
    UnknownToken,
    /// A token works once.
    #[error("the token has been used already: make another one (`ioplane identity token`)")]
    UsedToken,
    /// Its time is over.
    #[error("the token has expired: make another one (`ioplane identity token`)")]
    ExpiredToken,
    /// It was made for another host.
    #[error("the token is for a host of another name")]
    OtherName,
    /// Neither the token nor the host says a name.
    #[error("the token is for any name, so give one: `--name HOST`")]
    NoName,
    /// Not a name of a host.
    #[error("the name that was asked for is no host name")]
    BadName,
    /// A host of that name has a valid certificate.
    #[error(
        "a host of that name has a valid certificate already: make the token with `--replace` if it is to get another one, or revoke that one"
    )]
    NameIssued,
    /// Not a signing request.
    #[error(
        "the certificate signing request cannot be used: it is malformed, wrongly signed, or not for an ECDSA P-256 key"
    )]
    BadRequest,
    /// The token was used up, and nothing came of it.
    #[error(
        "the authority could not sign after it had used the token up, its host's log says why: then make another token (`ioplane identity token`)"
    )]
    Spent,
    /// Whoever renews shows the certificate that is to be renewed.
    #[error("no valid certificate was shown: a host without one joins by a token (`ioplane identity token`)")]
    NoCertificate,
    /// As many as one name may have.
    #[error(
        "a host of that name has too many valid certificates: revoke old ones (`ioplane identity revoke`)"
    )]
    TooManyCertificates,
    /// Another version of what is said, or something else.
    #[error("the request is not understood: both hosts need programs that know the same version of joining")]
    NotUnderstood,
    /// The authority's files cannot be used.
    #[error("the authority cannot sign now: its host's log says why")]
    Unable,
}
