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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{BackingSpec, DiskForm, ExportForm, ServedSpec};

    fn fields(form: DiskForm) -> Vec<&'static str> {
        let form = DiskForm { remote: Some("nbd://host-a/data".parse().unwrap()), ..form };
        form.spec("a").map_or_else(|flaws| flaws.iter().map(|flaw| flaw.field).collect(), |_| Vec::new())
    }

    #[test]
    fn what_does_not_go_together_is_found() {
        let pause = || DiskForm { on_timeout: Some(TimeoutWord::Pause), ..DiskForm::default() };
        let qmp = |path: &str| Some(PathBuf::from(path));
        assert_eq!(fields(pause()), ["on_timeout", "qmp"]);
        assert_eq!(fields(DiskForm { timeout_s: Some(1), ..pause() }), ["qmp"]);
        assert_eq!(fields(DiskForm { timeout_s: Some(1), qmp: qmp("here"), ..pause() }), ["qmp"]);
        assert_eq!(fields(DiskForm { timeout_s: Some(0), qmp: qmp("/run/q"), ..pause() }), ["timeout_s"]);
        assert!(fields(DiskForm { timeout_s: Some(1), qmp: qmp("/run/q"), ..pause() }).is_empty());
        let memory = Some(crate::size::Size(1 << 20));
        let flaws = DiskForm { memory, qmp: qmp("/run/q"), ..pause() }.spec("a").unwrap_err();
        assert_eq!(flaws.iter().map(|flaw| flaw.field).collect::<Vec<_>>(), ["on_timeout", "qmp"]);
        let export = ExportForm {
            remote: Some("nbd://host-a/data".parse().unwrap()),
            timeout_s: Some(1),
            on_timeout: Some(TimeoutWord::Pause),
            qmp: qmp("/run/q"),
            ..ExportForm::default()
        };
        let flaws = export.spec("a").unwrap_err();
        assert_eq!((flaws.len(), flaws[0].field), (1, "on_timeout"), "an export has no VM");
    }

    #[test]
    fn what_is_kept_of_writes_has_bounds() {
        use crate::size::Size;
        let retain = |bytes| DiskForm { retain: Some(Size(bytes)), ..DiskForm::default() };
        for bad in [0, 4096, (1 << 20) - 1, (256 << 20) + 1, u64::MAX] {
            assert_eq!(fields(retain(bad)), ["retain"], "{bad}");
        }
        assert!(fields(retain(1 << 20)).is_empty() && fields(retain(256 << 20)).is_empty());
        // And so has what all queues keep together.
        let queues = |bytes, queues| DiskForm { queues: Some(queues), ..retain(bytes) };
        assert!(fields(queues(16 << 20, 64)).is_empty() && fields(queues(256 << 20, 4)).is_empty());
        assert_eq!(fields(queues(256 << 20, 5)), ["retain"]);
        let remote = Some("nbd://host-a/data".parse().unwrap());
        let flaws = DiskForm { remote, ..queues(256 << 20, 64) }.spec("a").unwrap_err();
        assert_eq!(flaws[0].reason, "retain = \"256M\" for each of 64 queues is 16G of memory, more than 1G");
        assert_eq!(flaws[0].remedy, "give 16M at most, or fewer queues");
        let local = DiskForm { path: Some("/a".into()), ..retain(64 << 20) };
        assert_eq!(local.spec("a").unwrap_err()[0].field, "retain", "a disk of this host keeps nothing");
        let remote = Some("nbd://host-a/data".parse().unwrap());
        let export = ExportForm { remote, retain: Some(Size(1)), ..ExportForm::default() };
        assert_eq!(export.clone().spec("a").unwrap_err()[0].field, "retain");
        let export = ExportForm { retain: Some(Size(64 << 20)), connections: Some(17), ..export };
        assert_eq!(export.clone().spec("a").unwrap_err()[0].field, "retain", "one for each connection");
        assert!(ExportForm { connections: Some(16), ..export }.spec("a").is_ok());
    }

    #[test]
    fn a_change_says_what_it_says_and_no_more() {
        let spec = DiskForm {
            remote: Some("nbd://host-a/data".parse().unwrap()),
            timeout_s: Some(5),
            ..DiskForm::default()
        };
        let mut spec = spec.spec("a").unwrap();
        let after = |backing: &BackingSpec| backing.on_timeout().error_after();
        assert_eq!(after(&spec.backing), Some(Duration::from_secs(5)));
        let pause = TimeoutSpec {
            on_timeout: Some(TimeoutWord::Pause),
            qmp: Some("/run/q".into()),
            ..TimeoutSpec::default()
        };
        spec.backing.set_on_timeout(&pause);
        assert!(spec.own_flaws().is_empty());
        assert_eq!(spec.backing.on_timeout(), OnTimeout::Pause(Duration::from_secs(5), Path::new("/run/q")));
        assert_eq!(after(&spec.backing), None, "requests wait");
        let before = spec.backing.timeout_fields();
        let never = TimeoutSpec { timeout_s: Some(0), ..TimeoutSpec::default() };
        spec.backing.set_on_timeout(&never);
        assert_eq!(spec.backing.on_timeout(), OnTimeout::Wait);
        assert!(spec.own_flaws().is_empty(), "what nothing follows is forgotten");
        spec.backing.set_on_timeout(&before);
        assert_eq!(spec.backing.timeout_fields(), before);
        spec.backing.set_on_timeout(&TimeoutSpec::none());
        assert_eq!(spec.backing.timeout_fields(), TimeoutSpec::none());
    }
}
