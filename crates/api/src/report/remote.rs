//! Disks of other machines.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::size::Size;
use crate::spec::{DoubtWord, LimitsSpec, TimeoutWord};

/// Whether a disk's server can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RemoteWord {
    /// Every connection is there, or there is none since no guest uses the disk.
    Connected,
    /// A connection is being made for the first time.
    Connecting,
    /// The network has failed: requests wait, and connecting is tried again.
    Reconnecting,
    /// The network has failed for longer than `timeout_s`: requests fail, and connecting is tried again.
    Failing,
    /// The server has failed, and another connection would not help: requests fail.
    Stopped,
    /// The server refuses this disk's claim to write: another host has the disk, has had it since its VM last used it, or has taken it over. Requests fail.
    Refused,
}

impl RemoteWord {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            RemoteWord::Connected => "connected",
            RemoteWord::Connecting => "connecting",
            RemoteWord::Reconnecting => "not reachable, requests wait",
            RemoteWord::Failing => "not reachable, requests fail",
            RemoteWord::Stopped => "failed, requests fail",
            RemoteWord::Refused => "refuses this disk, requests fail",
        }
    }
}

/// What an exporter tells of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExporterWord {
    /// Nothing: there is no session with it.
    #[default]
    Unknown,
    /// It is served.
    Served,
    /// Requests below it fail, or its image is not as it was published: `exporter_why`.
    Failing,
    /// A person has taken it away there.
    Withdrawn,
    /// The exporter has been stopped.
    Stopped,
}

impl ExporterWord {
    /// In words, if there is something to say.
    pub fn words(self) -> Option<&'static str> {
        match self {
            ExporterWord::Unknown | ExporterWord::Served => None,
            ExporterWord::Failing => Some("something is wrong with the disk there"),
            ExporterWord::Withdrawn => Some("it has been withdrawn there: ioplane publish remove"),
            ExporterWord::Stopped => Some("the daemon there has been stopped"),
        }
    }
}

/// How a disk stands with its claim to write the export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ClaimWord {
    /// The server keeps no claims, or the export cannot be written.
    #[default]
    None,
    /// No VM uses the disk: others may claim the export.
    Free,
    /// A VM wants to use the disk, and another disk holds the export: its release may be on its way.
    Waiting,
    /// This disk holds the export.
    Held,
    /// No VM uses the disk any more: what was written is flushed, then others may claim the export.
    Releasing,
    /// The server has refused the claim.
    Refused,
}

/// By what the bytes of a connection are protected on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProtectionWord {
    /// Nothing of ioplane's: a socket of this host, or a server that does not know sums.
    None,
    /// Plain text with CRC32C: what a network changes is noticed, and nobody is kept out.
    Crc32c,
    /// TLS.
    Tls,
}

impl ProtectionWord {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            ProtectionWord::None => "plain text, without sums",
            ProtectionWord::Crc32c => "plain text with CRC32C",
            ProtectionWord::Tls => "TLS",
        }
    }
}

/// How an imported disk's connections to its server stand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RemoteReport {
    /// Where it is, as an NBD URI.
    pub uri: String,
    /// The worst of its connections.
    pub state: RemoteWord,
    /// Why it is not `connected`.
    pub why: Option<String>,
    /// Since when the worst connection is so, in milliseconds until now; nothing while it is being made.
    pub for_ms: Option<u64>,
    /// For how many seconds requests wait for a server that is not reachable before `on_timeout` happens.
    #[serde(default)]
    pub timeout_s: Option<u64>,
    /// What happens then; `wait` if there is no `timeout_s`.
    #[serde(default)]
    pub on_timeout: TimeoutWord,
    /// The QMP socket of the VM that uses the disk, if somebody has named it.
    #[serde(default)]
    pub qmp: Option<PathBuf>,
    /// For how many seconds the server may give no answer before the connection counts as lost.
    #[serde(default)]
    pub silence_s: u64,
    /// Bytes of each queue's writes that may be kept until the server has made them durable, if it is ioplane's; 0 from older daemons.
    #[serde(default)]
    pub retain: u64,
    /// What becomes of writes without an answer when the connection is lost. Those to another ioplane are sent again, whatever was asked for.
    #[serde(default)]
    pub in_doubt: DoubtWord,
    /// What the exporter itself tells of the export, by a session beside the connections.
    #[serde(default)]
    pub exporter: ExporterWord,
    /// What is wrong there, as the exporter tells; why there is no session.
    #[serde(default)]
    pub exporter_why: Option<String>,
    /// Who holds the export, as the exporter tells.
    #[serde(default)]
    pub exporter_holder: Option<String>,
    /// Which image the server serves and in which boot, if it says so: `IMAGE@BOOT` from ioplane.
    pub instance: Option<String>,
    /// Whether this disk may write the export, and others may not.
    #[serde(default)]
    pub claim: ClaimWord,
    /// Who holds it while this disk waits; why the claim could not be given back, or was refused.
    #[serde(default)]
    pub claim_why: Option<String>,
    /// The generation of its claim to write; nothing while it has none.
    #[serde(default)]
    pub generation: Option<u64>,
    /// Requests per second that the server keeps for this disk; 0 if none are reserved.
    #[serde(default)]
    pub reserved_iops: u64,
    /// Bytes per second that the server keeps for this disk; 0 if none are reserved.
    #[serde(default)]
    pub reserved_bandwidth: u64,
    /// Why that is less than was asked for, or not certain: then the server keeps at least so much.
    #[serde(default)]
    pub reserved_why: Option<String>,
    /// Connections, one for each queue in use.
    pub connections: u64,
    /// By what their bytes are protected on their way: the least of those that are connected. Nothing if none is.
    #[serde(default)]
    pub protection: Option<ProtectionWord>,
    /// Requests that have no reply yet.
    pub in_flight: u64,
    /// Requests sent, those that were sent again included.
    pub requests: u64,
    /// Requests sent again after a connection was lost.
    pub replays: u64,
    /// Connections lost.
    pub losses: u64,
    /// Of these, those that were lost since data were changed on the way.
    #[serde(default)]
    pub changed: u64,
    /// Requests that the server has answered with an error.
    pub device_errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Writes have been acknowledged that no flush has made durable yet.
    pub dirty: bool,
    /// There are copies of all of these writes, to be written again if the server's host loses power.
    #[serde(default)]
    pub retained: bool,
    /// Writes that were written again after the server's host had lost power.
    #[serde(default)]
    pub rewritten: u64,
}

impl RemoteReport {
    /// What happens when the server is not reachable, in words.
    pub fn timeout_words(&self) -> String {
        match (self.timeout_s, self.on_timeout) {
            (Some(time), TimeoutWord::Error) => format!("requests fail after {time} s"),
            (Some(time), TimeoutWord::Pause) => format!("the VM is paused after {time} s, requests wait"),
            (None, _) | (_, TimeoutWord::Wait) => "requests wait".to_owned(),
        }
    }

    /// What the server keeps for this disk: rates without bursts.
    pub fn reserved(&self) -> LimitsSpec {
        LimitsSpec::reserved(self.reserved_iops, Size(self.reserved_bandwidth))
    }
}
