//! VMs that are paused since a disk of another machine has lost its server.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How it stands with the pause of a disk's VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum VmPauseWord {
    /// Nothing is to be done: the server is reachable, or is not for less than `timeout_s`.
    Armed,
    /// ioplane has paused the VM, and continues it when the disks that hold it are back.
    Paused,
    /// The VM was to be paused, and could not be: `why` says why. Requests wait, and it is tried again.
    CannotPause,
    /// The disks are back, and the VM could not be continued: `why` says why. It is tried again.
    CannotContinue,
    /// Somebody else has paused or continued the VM: nothing is done until the server has been reachable again.
    LeftAlone,
}

/// How it stands with the pause of a disk's VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VmPauseReport {
    /// In a word.
    pub state: VmPauseWord,
    /// Which disks hold the VM; why something could not be done, or is not.
    pub why: Option<String>,
    /// Since when the VM is paused, in milliseconds until now.
    pub for_ms: Option<u64>,
    /// Without a connection for so many seconds, the VM is paused.
    pub timeout_s: u64,
    /// The VM's monitor.
    pub qmp: PathBuf,
}

impl VmPauseReport {
    /// In words, for people.
    pub fn words(&self) -> String {
        let VmPauseReport { state, why, for_ms, timeout_s, qmp } = self;
        let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
        let qmp = qmp.display();
        match state {
            VmPauseWord::Armed => format!("after {timeout_s} s without its server, by {qmp}{why}"),
            VmPauseWord::Paused => {
                let time = for_ms.map_or(String::new(), |ms| format!(" for {:.1} s", ms as f64 / 1000.0));
                format!("PAUSED by ioplane{time}, goes on when its disks are back{why}")
            }
            VmPauseWord::CannotPause => format!("the VM could not be paused by {qmp}, requests wait{why}"),
            VmPauseWord::CannotContinue => {
                format!("PAUSED by ioplane, its disks are back, and it could not be continued by {qmp}{why}")
            }
            VmPauseWord::LeftAlone => format!("left alone until its server has been reachable again{why}"),
        }
    }
}
