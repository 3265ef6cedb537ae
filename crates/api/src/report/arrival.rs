//! VMs that are expected from other hosts.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

words! {
    /// How far a VM is that is expected.
    ArrivalWord, Expected,
    /// It has not begun to come.
    Expected "expected",
    /// It is being moved here.
    UnderWay "under_way",
    /// It runs here. The other host only looks at it any more.
    Arrived "arrived",
}

impl ArrivalWord {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            ArrivalWord::Expected => "expected",
            ArrivalWord::UnderWay => "under way",
            ArrivalWord::Arrived => "arrived",
        }
    }
}

/// A VM that another host may move here: `ioplane move expected --json`, `GET /v1/expected`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExpectedReport {
    /// Name of the VM.
    pub vm: String,
    /// The host that may bring it, by the name in its certificate.
    pub from: String,
    /// The monitor of the QEMU here that waits for it.
    pub qmp: PathBuf,
    /// libvirt starts that QEMU only within the migration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub libvirt: bool,
    /// Process of that QEMU, as it was seen last; `None`: it has not been started yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Where this daemon listens for the other host.
    pub listen: String,
    /// How far it is.
    pub state: ArrivalWord,
    /// Seconds until it is expected no longer. A move that is under way by then goes on.
    pub left_s: u64,
    /// Connections of the other host.
    pub connections: u64,
}

/// The daemon of another host, as sockets of this one: `PUT /v1/moves/NAME/peer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MovePeerReport {
    /// What of its control socket is needed to move the VM.
    pub there: PathBuf,
    /// What of the monitor is, of the QEMU that waits there.
    pub qmp_there: PathBuf,
}
