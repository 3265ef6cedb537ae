//! What is said to a VM's monitor. Whoever listens there is not trusted: each step ends at a stated time, and no answer is more than a few words.
//!
//! A monitor serves one client at a time, so a connection is made for one purpose and closed. All of this blocks, and runs on a thread of its own.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use ioplane_qemu::{Endpoint, QemuError, Qmp};
use serde_json::json;

/// To connect, and for a question.
const PATIENCE: Duration = Duration::from_secs(5);
/// For `stop` and `cont`, during which QEMU stops or starts the rings of all its disks: one whose server is silent may take 20 s for each ring.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// Why a monitor was of no use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QmpFailure {
    /// Nobody listens there.
    Absent(String),
    /// It does not answer: it serves somebody else, or it hangs.
    Busy,
    /// What answers is no QMP.
    NotQmp(String),
    /// It refuses a command.
    Refused(String),
    /// The pause could not be written down, so the VM was not paused.
    NotNoted(String),
}

impl std::fmt::Display for QmpFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            QmpFailure::Absent(why) => {
                write!(f, "nobody listens there ({why}): start QEMU with -qmp unix:SOCKET,server=on,wait=off")
            }
            QmpFailure::Busy => f.write_str(
                "it does not answer: it serves one client at a time, give ioplane a monitor of its own",
            ),
            QmpFailure::NotQmp(why) => {
                write!(f, "it is no QMP monitor ({why}): see which program listens there")
            }
            QmpFailure::Refused(why) => f.write_str(why),
            QmpFailure::NotNoted(why) => f.write_str(why),
        }
    }
}

/// Of somebody else's words, so many characters are enough.
const WORDS: usize = 200;

fn short(text: &str) -> String {
    text.chars().take(WORDS).collect()
}

impl From<QemuError> for QmpFailure {
    fn from(error: QemuError) -> Self {
        let words = short(&error.to_string());
        match error {
            QemuError::Refused { .. } => QmpFailure::Refused(words),
            QemuError::Peer(error) => match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => QmpFailure::Absent(words),
                ErrorKind::TimedOut | ErrorKind::UnexpectedEof => QmpFailure::Busy,
                ErrorKind::PermissionDenied => QmpFailure::Refused(words),
                _ => QmpFailure::NotQmp(words),
            },
        }
    }
}

/// How a VM was found, and what was done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmFound {
    /// It did not run, so nothing was done: its run state.
    Not(String),
    /// It was stopped, or continued, as asked for.
    Done,
    /// The socket is another one than that by which the VM was paused: VMs make theirs when they start.
    Another,
}

/// A connection, and the VM's run state (`RunState` of QEMU's schema).
fn ask(socket: &Path) -> Result<(Qmp, String), QmpFailure> {
    let mut qmp = Qmp::connect(&Endpoint::here(socket), PATIENCE)?;
    let status = state(&mut qmp)?;
    qmp.set_patience(STOP_PATIENCE);
    Ok((qmp, status))
}

/// Which socket this is, as long as it is there.
fn identity(socket: &Path) -> Option<String> {
    let file = std::fs::metadata(socket).ok()?;
    Some(format!("{}:{}:{}.{:09}", file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}

fn state(qmp: &mut Qmp) -> Result<String, QmpFailure> {
    let answer = qmp.execute("query-status", &json!({}))?;
    let word = answer["status"].as_str().map(short);
    word.ok_or_else(|| QmpFailure::NotQmp("query-status names no status".to_owned()))
}

/// Stops the VM if it runs. `note` is told before that which socket it is, and nothing is done if it refuses.
pub fn pause(
    socket: &Path,
    note: impl FnOnce(Option<String>) -> Result<(), QmpFailure>,
) -> Result<VmFound, QmpFailure> {
    let identity = identity(socket);
    let (mut qmp, status) = ask(socket)?;
    if status != RUNNING {
        return Ok(VmFound::Not(status));
    }
    note(identity)?;
    qmp.execute("stop", &json!({}))?;
    Ok(VmFound::Done)
}

/// Continues the VM if it is paused, and the socket is the one by which it was.
pub fn go_on(socket: &Path, known: Option<&str>) -> Result<VmFound, QmpFailure> {
    let another = identity(socket).as_deref() != known;
    let (mut qmp, status) = ask(socket)?;
    if another {
        return Ok(VmFound::Another);
    }
    if status != PAUSED {
        return Ok(VmFound::Not(status));
    }
    qmp.execute("cont", &json!({}))?;
    Ok(VmFound::Done)
}

/// Its run state.
pub fn look(socket: &Path, known: Option<&str>) -> Result<VmFound, QmpFailure> {
    let another = identity(socket).as_deref() != known;
    let (_, status) = ask(socket)?;
    Ok(if another { VmFound::Another } else { VmFound::Not(status) })
}

/// The run state of a VM that runs, and of one that `stop` has stopped.
pub const RUNNING: &str = "running";
pub const PAUSED: &str = "paused";
