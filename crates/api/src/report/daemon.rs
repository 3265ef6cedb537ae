//! The daemon itself: its version, its health, what happens in it.

use serde::{Deserialize, Serialize};

use super::{DiskReport, FailureReport, NicReport, SwitchTableReport};

/// `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VersionReport {
    /// Version of the daemon.
    pub version: String,
    /// Versions of the interface that it speaks: the first part of every path.
    pub api: Vec<String>,
    /// Its process number.
    pub pid: u32,
}

words! {
    /// How the daemon is, in a word.
    HealthWord, Ok,
    /// Everything that is to be served is served.
    Ok "ok",
    /// Something is being opened, or is busy with a change.
    Busy "busy",
    /// Something is to be served and cannot be: `failures`.
    Degraded "degraded",
}

/// `GET /v1/health`. It is answered with 200 whatever it says: a daemon that answers is alive, and restarting it mends no image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HealthReport {
    /// In a word.
    pub health: HealthWord,
    /// What is to be served and cannot be.
    pub failures: Vec<FailureReport>,
    /// Names of what is being opened, or is busy with a change.
    pub busy: Vec<String>,
}

words! {
    /// What happened.
    EventWord, Subscribed,
    /// The stream begins: `number` is that of the last event before it.
    Subscribed "subscribed",
    /// Nothing, for a while.
    Alive "alive",
    /// The reader was too slow: `lost` events were dropped before this one.
    Lost "lost",
    /// It is served.
    Served "served",
    /// It is to be served and cannot be; it is tried again.
    Failed "failed",
    /// It was changed at run time.
    Changed "changed",
    /// It is no longer served.
    Removed "removed",
    /// The configuration was read again.
    Reloaded "reloaded",
    /// Everything is another process's now: the stream ends.
    Upgraded "upgraded",
}

/// One line of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DaemonEvent {
    /// They rise by one while the daemon lives. `alive` and `lost` have that of the last one that was sent.
    pub number: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    pub event: EventWord,
    /// To what: `disk`, `nic`, `pci`, `switch` or `core`.
    pub kind: Option<String>,
    /// Its name, or the number of a core.
    pub name: Option<String>,
    /// In words.
    pub text: String,
    /// How many events the reader was too slow for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

/// `POST /v1/queues/move`: whose queue it was.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum MovedReport {
    /// A disk's.
    Disk(Box<DiskReport>),
    /// A NIC's.
    Nic(Box<NicReport>),
    /// That of a switch's uplink.
    Switch(Box<SwitchTableReport>),
}
