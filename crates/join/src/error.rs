//! What goes wrong between a host and the host of its authority.

use std::io::ErrorKind;
use std::time::Duration;

use ioplane_identity::{IdentityError, JoinRefusal, TlsFault};

/// How a connection looks whose peer is gone.
const ENDS: [ErrorKind; 4] = [
    ErrorKind::UnexpectedEof,
    ErrorKind::BrokenPipe,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
];

/// An error of joining, renewing, or answering.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The system refused.
    #[error("{doing}: {source}")]
    Os {
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// No place of the authority answers; the reason of each.
    #[error("the authority does not answer: {0}")]
    Unreachable(String),
    /// TLS did not start, or ended.
    #[error(transparent)]
    Tls(#[from] TlsFault),
    /// Files of this host cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The authority does not sign.
    #[error("the authority refuses: {0}")]
    Refused(#[from] JoinRefusal),
    /// A message beyond the limit.
    #[error("the peer sends a message of {bytes} bytes; there are at most {most}")]
    Long {
        /// How long it is.
        bytes: usize,
        /// How long it may be.
        most: usize,
    },
    /// Not a message of this protocol.
    #[error("the peer does not speak the protocol of joining: {0}")]
    Malformed(String),
    /// The peer takes too long.
    #[error("the peer takes longer than {0:?}")]
    Slow(Duration),
    /// The other side has closed the connection.
    #[error("the peer closed the connection before it had said all")]
    Closed,
    /// The request was sent, and what became of it is not known, or not of use.
    #[error(
        "the answer of the authority is lost or of no use ({0}). The token may be used up: make another one (`ioplane identity token`), with `--replace` if that says that the name has a certificate"
    )]
    AnswerLost(Box<JoinError>),
    /// An address has asked too often.
    #[error("{0} has asked too often: it is answered again in a while")]
    TooOften(std::net::IpAddr),
}

impl JoinError {
    /// An error of a stream that TLS may have a part in.
    pub(crate) fn stream(doing: &'static str) -> impl Fn(std::io::Error) -> JoinError {
        move |source| match TlsFault::of(&source) {
            Some(fault) => JoinError::Tls(fault),
            None if ENDS.contains(&source.kind()) => JoinError::Closed,
            None => JoinError::Os { doing, source },
        }
    }

    /// What is wrong with a message: it may be in words of the peer, so only what can be shown is.
    pub(crate) fn malformed(why: impl std::fmt::Display) -> JoinError {
        let why = why.to_string();
        JoinError::Malformed(why.chars().map(|c| if c.is_control() { '?' } else { c }).take(200).collect())
    }

    /// An error of a task that reads or writes files.
    pub(crate) fn gone(error: tokio::task::JoinError) -> JoinError {
        JoinError::Os { doing: "working with the identity's files", source: error.into() }
    }
}
