//! What a daemon and its successor say to each other. A change of any of these is another [`super::wire::FORMAT`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The daemon to its successor.
#[derive(Debug, Serialize, Deserialize)]
pub enum OrderV1 {
    /// What there is. Beside it: the run directory's lock, the control socket, and the metrics' if there is one.
    Daemon(DaemonV1),
    /// Something that is served. Beside it: what is needed to open what is below it once more.
    Prepare(NameV1),
    /// Something that is to be served, and could not be.
    Failed(NameV1, String, String),
    /// That was all of them.
    PreparedAll,
    /// A device, still; its guest waits from now on. Beside it: its descriptors.
    Device(DeviceV1),
    /// That was all of them, and they are yours if you say so.
    Commit,
}

/// The successor's answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum AnswerV1 {
    /// To `Daemon`: the configuration is read and the I/O cores run.
    Ready(String),
    /// To `PreparedAll`: everything below is open.
    Prepared,
    /// To the last `Device`: all have been checked, and can be started.
    Loaded,
    /// To `Commit`: they are mine. Whatever becomes of me, whoever reads this must not touch them again.
    Mine,
    /// Afterwards: how long each device's guest had to wait, in the order in which they came; nothing of one that still does.
    Report(Vec<Option<u64>>),
    /// To any: no. Why, and what to do.
    Refused(String, String),
}

/// The daemon's own.
#[derive(Debug, Serialize, Deserialize)]
pub struct DaemonV1 {
    pub version: String,
    pub pid: u32,
    pub control: PathBuf,
    /// Where state.json is.
    pub run_dir: PathBuf,
    pub metrics: Option<String>,
}

/// A thing that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NameV1 {
    pub kind: String,
    pub name: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct DeviceV1 {
    pub name: NameV1,
    /// Requests are recorded in flight, to be done again.
    pub suspended: bool,
    /// What its kind has to say beside it, at the quiescent point.
    pub beside: Vec<u8>,
    /// The host's own encoding.
    pub bytes: Vec<u8>,
}
