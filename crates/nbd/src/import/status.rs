//! What can be told of an import while it runs.

use std::fmt;
use std::time::{Duration, Instant};

use super::told::Told;
use crate::claim::ClaimRefusal;
use crate::error::Violation;
use crate::protection::Protection;
use crate::records::StreamError;
use crate::reserve::ReservedRates;

/// Why a connection is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The server has closed it.
    Closed,
    /// The system says so, by errno.
    System(i32),
    /// Requests were in flight, and the server made no headway for so long.
    Silent(Duration),
    /// The server broke the protocol.
    Violation(Violation),
    /// The server is shutting down (`NBD_ESHUTDOWN`).
    ShuttingDown,
    /// The guest took memory away while it was being sent from, in the middle of a write.
    GuestMemory,
    /// The queue left its core with requests in flight.
    Suspended,
    /// The exporter has become another instance, as another connection has found.
    Instance,
    /// There was none yet.
    Unreached,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Closed => f.write_str("the server closed the connection"),
            Loss::System(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
            Loss::Silent(time) => write!(f, "no reply for {} ms", time.as_millis()),
            Loss::Violation(violation) if violation.is_of_sums() => violation.fmt(f),
            Loss::Violation(violation) => write!(f, "the server broke the protocol: {violation}"),
            Loss::ShuttingDown => f.write_str("the server is shutting down"),
            Loss::GuestMemory => f.write_str("the guest took its memory away in the middle of a write"),
            Loss::Suspended => f.write_str("the queue was suspended"),
            Loss::Unreached => f.write_str("the server has not been reached yet"),
            Loss::Instance => f.write_str("the exporter is another instance now"),
        }
    }
}

impl From<StreamError> for Loss {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::System(errno) => Loss::System(errno),
            StreamError::Violation(violation) => Loss::Violation(violation),
        }
    }
}

/// How a connection stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionState {
    /// Its first connection is being made, and no attempt has failed yet.
    Connecting,
    /// Requests go to the server.
    Connected {
        /// Since when.
        since: Instant,
        /// By what its bytes are protected.
        protection: Protection,
    },
    /// A network failure: requests wait for another connection.
    Reconnecting {
        /// Since when the connection is lost.
        since: Instant,
        /// Why it was lost.
        loss: Loss,
        /// Attempts that have failed since.
        attempts: u32,
        /// Why the last attempt failed; empty before the first.
        failure: String,
        /// Requests fail instead of waiting: `give_up_after` has passed.
        gave_up: bool,
    },
    /// A device failure: requests fail until a person decides ([`super::Import::retry`]).
    Stopped {
        /// Since when.
        since: Instant,
        /// What is wrong.
        why: String,
    },
    /// Its channel is gone.
    Closed,
}

/// One connection of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionStatus {
    /// How it stands.
    pub state: ConnectionState,
    /// Operations in flight.
    pub in_flight: usize,
    /// Requests sent, replays among them.
    pub requests: u64,
    /// Requests sent again, since their connection was lost.
    pub replays: u64,
    /// Bytes that reads have brought.
    pub bytes_read: u64,
    /// Bytes that acknowledged writes have carried.
    pub bytes_written: u64,
    /// Requests that the server has answered with an error: device failures.
    pub device_errors: u64,
    /// Connections lost: network failures.
    pub losses: u64,
    /// Of these, those that were lost since data were changed on the way, in one direction or the other.
    pub changed: u64,
}

/// How an import stands with its claim to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimStanding {
    /// The exporter keeps no claims for this export, or nothing is to be written.
    Untracked,
    /// It has none: no guest uses the disk.
    Free,
    /// A guest wants to use it, and another one holds it, whose release may be on its way.
    Waiting {
        /// Since when.
        since: Instant,
        /// What the exporter says.
        refusal: ClaimRefusal,
    },
    /// It has it.
    Held,
    /// No guest uses the disk any more: what was written is flushed, and the claim given back.
    Releasing {
        /// Since when.
        since: Instant,
        /// Why it has not been possible yet; empty before the first failure.
        failure: String,
    },
    /// It did not get it.
    Refused {
        /// Why.
        why: String,
    },
}

/// An import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportStatus {
    /// Where the export is.
    pub address: String,
    /// The instance that an exporter of ours has told.
    pub instance: Option<String>,
    /// How it stands with its claim to write.
    pub claim: ClaimStanding,
    /// The generation of that claim, while it has one.
    pub generation: Option<u64>,
    /// What the exporter keeps for it of its capacity; while that is not certain, the least that it may keep.
    pub reserved: ReservedRates,
    /// Why that is not what was asked for, or not certain.
    pub reserved_why: Option<String>,
    /// Why the exporter refuses that claim: nothing is written any more.
    pub claim_lost: Option<ClaimRefusal>,
    /// Writes have been acknowledged that no flush has made durable yet.
    pub dirty: bool,
    /// There are copies of all of them, to be written again if the exporter loses them.
    pub retained: bool,
    /// Of them, how many have been written again, since the exporter was another instance.
    pub rewritten: u64,
    /// One for each channel.
    pub connections: Vec<ConnectionStatus>,
    /// Connections of channels that are gone have not been closed by the server yet.
    pub closing: bool,
    /// How many channels have been opened: queues of guests that have started.
    pub starts: u64,
    /// What the exporter has told beside the connections.
    pub told: Told,
}
