//! What happens when the server of a disk of another machine cannot be reached.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checks::path_flaw;
use super::{Flaw, TimeoutWord};

/// The fields that say it, as somebody changes them: what is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TimeoutSpec {
    /// Seconds; 0 for no end.
    pub timeout_s: Option<u64>,
    /// What happens then.
    pub on_timeout: Option<TimeoutWord>,
    /// The monitor of the VM; an empty path for none.
    pub qmp: Option<PathBuf>,
}

impl TimeoutSpec {
    /// The change after which requests wait for ever.
    pub fn none() -> Self {
        TimeoutSpec {
            timeout_s: Some(0),
            on_timeout: Some(TimeoutWord::default()),
            qmp: Some(PathBuf::new()),
        }
    }
}

/// The same, for whoever does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTimeout<'a> {
    /// Requests wait, for ever.
    Wait,
    /// After this time requests fail.
    Error(Duration),
    /// After this time the VM is paused by the monitor at this path, and requests wait.
    Pause(Duration, &'a Path),
}

impl<'a> OnTimeout<'a> {
    /// What these fields say.
    pub fn of(timeout_s: Option<u64>, word: TimeoutWord, qmp: Option<&'a Path>) -> Self {
        match (timeout_s.map(Duration::from_secs), word, qmp) {
            (Some(time), TimeoutWord::Error, _) => OnTimeout::Error(time),
            (Some(time), TimeoutWord::Pause, Some(qmp)) => OnTimeout::Pause(time, qmp),
            _ => OnTimeout::Wait,
        }
    }

    /// When requests fail, if they do.
    pub fn error_after(&self) -> Option<Duration> {
        match self {
            OnTimeout::Error(time) => Some(*time),
            OnTimeout::Wait | OnTimeout::Pause(..) => None,
        }
    }
}

/// What is wrong with these fields.
pub(super) fn timeout_flaws(timeout_s: Option<u64>, word: TimeoutWord, qmp: Option<&Path>) -> Vec<Flaw> {
    let mut flaws = Vec::new();
    if timeout_s == Some(0) {
        flaws.push(Flaw::new("timeout_s", "timeout_s = 0", "give at least 1, or leave it out"));
    }
    if timeout_s.is_none() && !word.is_usual() {
        let reason = format!("on_timeout = \"{}\" without timeout_s", word.word());
        flaws.push(Flaw::new("on_timeout", reason, "give timeout_s, or leave on_timeout out: requests wait"));
    }
    if word == TimeoutWord::Pause && qmp.is_none() {
        let remedy = "give the socket of a monitor of the VM's QEMU: -qmp unix:SOCKET,server=on,wait=off";
        flaws.push(Flaw::new("qmp", "on_timeout = \"pause\" without qmp", remedy));
    }
    flaws.extend(qmp.and_then(|qmp| path_flaw("qmp", qmp)));
    flaws
}
