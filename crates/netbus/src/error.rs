//! What goes wrong between a host and a directory.

use std::io::ErrorKind;
use std::time::Duration;

use ioplane_identity::{IdentityError, TlsFault};

use crate::device::DeviceFlaw;
use crate::limits::{MOST_HOSTS, MOST_NAMES};

/// How a connection looks whose peer is gone.
const ENDS: [ErrorKind; 4] = [
    ErrorKind::UnexpectedEof,
    ErrorKind::BrokenPipe,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
];

/// An error of a directory or of a session with one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetbusError {
    /// The system refused.
    #[error("{doing}: {source}")]
    Os {
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// TLS did not start, or ended.
    #[error(transparent)]
    Tls(#[from] TlsFault),
    /// This host's identity cannot be used.
    #[error("TLS needs an identity of this host: {0}")]
    Identity(#[from] IdentityError),
    /// What a peer says of devices cannot be used.
    #[error("what the peer says of a device cannot be used: {0}")]
    Device(#[from] DeviceFlaw),
    /// A message beyond the limit.
    #[error("a message of {0} bytes is longer than any may be")]
    Long(usize),
    /// Not a message of this protocol.
    #[error("the peer does not speak the protocol: {0}")]
    Malformed(String),
    /// The peer has another version.
    #[error("the peer speaks version {0} of the protocol, which this host does not")]
    Version(u32),
    /// The other host's daemon speaks another version.
    #[error(
        "the daemon there speaks version {there} of the protocol between hosts, and this one speaks {here}"
    )]
    OtherVersion {
        /// This side's.
        here: u32,
        /// The other side's.
        there: u32,
    },
    /// The other host's daemon does not want to.
    #[error("the other host refuses: {0}")]
    TurnedAway(String),
    /// The directory does not want to.
    #[error("the directory refuses: {0}")]
    Refused(String),
    /// The name that a host gives itself.
    #[error("{0:?} is no name of a host")]
    Host(String),
    /// All places are taken.
    #[error("{MOST_HOSTS} hosts have devices in this directory already")]
    Hosts,
    /// All names are taken.
    #[error("there are {MOST_NAMES} devices in this directory already")]
    Names,
    /// Another daemon speaks for the same host.
    #[error("another daemon of {0} has a session with the directory")]
    Busy(String),
    /// The peer takes too long.
    #[error("no answer for {0:?}")]
    Slow(Duration),
    /// The other side has closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The place of this host's session in etcd is another's, or its lease has ended.
    #[error("the session with etcd has ended: its lease has, or another session of this host has its place")]
    Lost,
    /// What a member of etcd answers.
    #[error("etcd, {doing}: {why}")]
    Etcd {
        /// What was being done. Whether it was done is not known.
        doing: &'static str,
        /// Why.
        why: String,
    },
    /// What etcd holds under one of the keys of a directory.
    #[error("etcd: what {key:?} says cannot be read: {why}")]
    EtcdValue {
        /// Which key.
        key: String,
        /// Why.
        why: String,
    },
    /// No member of etcd answers; the reason of each.
    #[error("no member of etcd answers: {0}")]
    NoMember(String),
    /// Text that is none of a member of etcd.
    #[error("{0:?} is no URL of a member of etcd")]
    Endpoint(String),
    /// The scheme of a member of etcd, and how this host is to speak with it.
    #[error("{0}: https goes with TLS, and http with plain text")]
    Scheme(String),
    /// The file of a directory.
    #[error("{path}: {source}")]
    Store {
        /// Which file.
        path: String,
        /// Why.
        source: Box<redb::Error>,
    },
    /// What the file holds.
    #[error("{path}: what it says of {name:?} cannot be read: {why}")]
    Kept {
        /// Which file.
        path: String,
        /// Of which device.
        name: String,
        /// Why.
        why: String,
    },
}

impl NetbusError {
    /// An error of a stream that TLS may have a part in.
    pub(crate) fn stream(doing: &'static str) -> impl Fn(std::io::Error) -> NetbusError {
        move |source| match TlsFault::of(&source) {
            Some(fault) => NetbusError::Tls(fault),
            None if ENDS.contains(&source.kind()) => NetbusError::Closed,
            None => NetbusError::Os { doing, source },
        }
    }
}
