//! Exports.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{BackingReport, Counts, RetryReport, ServedState};
use crate::size::Size;
use crate::spec::{LimitsSpec, limits_of};

/// Who may write an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ClaimReport {
    /// The number of the claim that was granted last.
    pub generation: u64,
    /// Whose it is, as that host says; with TLS also by whose certificate.
    pub holder: String,
    /// It has not been released: nobody else may use the export.
    pub held: bool,
    /// When it was granted, or released, in seconds since 1970.
    pub since_s: u64,
}

/// What an export keeps of its capacity for one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReservationReport {
    /// Whose disk it is, as that host says; with TLS also by whose certificate.
    pub by: String,
    /// Requests per second; 0 if none are reserved.
    pub iops: u64,
    /// Bytes per second; 0 if none are reserved.
    pub bandwidth: Size,
    /// When it was granted, in seconds since 1970.
    pub since_s: u64,
}

/// One export: `ioplane publish show --json`, `GET /v1/exports/NAME`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExportReport {
    /// Its name, which clients ask for.
    pub name: String,
    /// Whether it is there.
    pub state: ServedState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// When it is tried again.
    pub retry: Option<RetryReport>,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// Where clients of this host connect.
    pub socket: PathBuf,
    /// Where clients of other machines connect.
    pub listen: Option<String>,
    /// Clients of other machines need TLS and a certificate.
    #[serde(default)]
    pub tls: bool,
    /// Which hosts may connect with TLS; none if all that the authority knows may.
    #[serde(default)]
    pub allow: Option<String>,
    /// What is behind it.
    pub backing: BackingReport,
    /// Size, bytes.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// What is wrong with the disk below while it is served, if anything.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Which image this is and which boot of the host serves it, as `IMAGE@BOOT`. A restart of the daemon keeps it, unless the export is memory.
    pub instance: Option<String>,
    /// Who may write; nothing if nobody has claimed it yet, or nobody may.
    #[serde(default)]
    pub claim: Option<ClaimReport>,
    /// Connections of clients.
    pub connections: u64,
    /// Of these, those in plain text with CRC32C.
    #[serde(default)]
    pub summed_connections: u64,
    /// Most of them at a time.
    pub most_connections: u64,
    /// Connections that have ended, by why.
    pub ends: BTreeMap<String, u64>,
    /// Handshakes that failed.
    pub refused: u64,
    /// The core that its connections prefer.
    pub core: Option<u32>,
    /// The group it is in.
    pub group: Option<String>,
    /// Requests per second that all its clients may make together, if they are limited.
    #[serde(default)]
    pub iops_limit: Option<u64>,
    /// Requests that may pass at once after a pause.
    #[serde(default)]
    pub iops_burst: Option<u64>,
    /// Bytes per second that all its clients may read and write together, if they are limited.
    #[serde(default)]
    pub bandwidth_limit: Option<Size>,
    /// Bytes that may pass at once after a pause.
    #[serde(default)]
    pub bandwidth_burst: Option<Size>,
    /// How many of these requests are reserved. Where one host at a time uses the export that is the largest reservation, otherwise their sum.
    #[serde(default)]
    pub reserved_iops: u64,
    /// How many of these bytes are reserved, likewise.
    #[serde(default)]
    pub reserved_bandwidth: Size,
    /// What of that is kept for single disks.
    #[serde(default)]
    pub reservations: Vec<ReservationReport>,
    /// What all connections did.
    pub totals: Counts,
}

impl ExportReport {
    /// Its capacity: what all clients may do together.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(export_limits of self)
    }
}
