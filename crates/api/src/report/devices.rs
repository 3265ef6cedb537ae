//! What hosts publish for each other.

use serde::{Deserialize, Serialize};

use crate::size::Size;

words! {
    /// Whether the host of a device is there.
    HostWord, Present,
    /// It reports.
    Present "present",
    /// It has not reported for longer than its lease.
    Lost "lost",
    /// It has not reported since the directory was started.
    Unseen "unseen",
}

/// What is published everywhere: `ioplane devices --json`, `GET /v1/devices`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DevicesReport {
    /// Where the directory is.
    pub directory: String,
    /// How this host is called there.
    pub host: String,
    /// Devices of this host that are not in the directory, since another host publishes one of that name.
    pub taken: Vec<TakenReport>,
    /// All devices of all hosts, by name.
    pub devices: Vec<DeviceReport>,
}

/// A name that is another host's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TakenReport {
    /// The name.
    pub name: String,
    /// The host that publishes a device of that name.
    pub by: String,
}

/// A device in the directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// What it is, as `disk`.
    pub kind: String,
    /// Bytes, if it has a size and that is known.
    pub size: Option<u64>,
    /// Nobody can write.
    pub read_only: bool,
    /// The host that publishes it.
    pub host: String,
    /// Whether that host is there.
    pub state: HostWord,
    /// For how long it has not been, if it was and that is known.
    pub lost_ms: Option<u64>,
    /// Where it is used.
    pub location: String,
    /// Connections that use it.
    pub users: u32,
    /// Who holds it, if somebody does: of disks that can be written, the one disk of one host that may use it.
    pub holder: Option<String>,
    /// What is wrong with it, as its host says.
    pub trouble: Option<String>,
    /// Requests per second that all who use it may make together, if that is declared.
    #[serde(default)]
    pub iops_limit: Option<u64>,
    /// How many of these are reserved.
    #[serde(default)]
    pub reserved_iops: u64,
    /// Bytes per second that all who use it may read and write together, if that is declared.
    #[serde(default)]
    pub bandwidth_limit: Option<Size>,
    /// How many of these are reserved.
    #[serde(default)]
    pub reserved_bandwidth: Size,
}
