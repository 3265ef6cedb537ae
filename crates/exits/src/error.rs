//! What can go wrong, in words that say what to do.

use std::io;
use std::path::PathBuf;

use ioplane_plain::{excerpt, plain, shown};
use ioplane_qemu::QemuError;

/// Why there is no profile, or no name. Paths and names are others' words: none reaches a terminal as it is.
#[derive(Debug, thiserror::Error)]
pub enum ExitsError {
    /// No process of this host has a KVM VM open, as far as we may see.
    #[error("no KVM VM is running on this host that is visible to this user; root sees all VMs")]
    NoVm,
    /// Several VMs, and none was chosen.
    #[error("several VMs are running, choose one with --vm: {}", plain(.0))]
    SeveralVms(String),
    /// No VM of that name or process number.
    #[error("no VM is called {wanted:?}, nor has it that process number; running: {}", plain(.running))]
    UnknownVm {
        /// What was asked for.
        wanted: String,
        /// What there is.
        running: String,
    },
    /// A number that no VM's process has, but a VM's name.
    #[error(
        "no VM has the process number {wanted:?}, but one has that name: say --vm name:{wanted}; running: {}",
        plain(.running)
    )]
    NumberIsName {
        /// What was asked for.
        wanted: String,
        /// What there is.
        running: String,
    },
    /// A tracepoint of this kernel lacks a field without which its records say something else than they seem to.
    #[error(
        "the kernel's tracepoint {event} has no field {field:?} that could be read; this program does not know this kernel yet: report it with its `format` file"
    )]
    NoField {
        /// Which tracepoint.
        event: String,
        /// Which field.
        field: String,
    },
    /// The VM's process is gone, or has closed its VM.
    #[error("the VM's process {0} has ended")]
    Ended(u32),
    /// The tracing file system is not to be found.
    #[error("tracefs is not mounted; as root: mount -t tracefs tracefs /sys/kernel/tracing")]
    NoTracefs,
    /// Debugfs is not to be found.
    #[error("debugfs is not mounted; as root: mount -t debugfs debugfs /sys/kernel/debug")]
    NoDebugfs,
    /// Debugfs has nothing of KVM's.
    #[error("{} is not there; is the module kvm loaded, and this not a container?", shown(.0))]
    NoKvmCounters(PathBuf),
    /// KVM's counters cannot be read.
    #[error("KVM's counters cannot be read: {}; nor has a VMM statistics descriptors open", plain(.0))]
    NoCounters(String),
    /// The kernel has no such tracepoint.
    #[error("the kernel has no tracepoint kvm:{0}; is the module kvm loaded?")]
    NoTracepoint(String),
    /// We may not do it.
    #[error(
        "{} is not permitted; run as root, or with CAP_PERFMON, CAP_SYS_PTRACE and a readable tracefs",
        plain(.what)
    )]
    Forbidden {
        /// What was tried.
        what: String,
    },
    /// Neither source of events may be used.
    #[error("perf events: {perf}; tracefs in their place: {tracefs}")]
    Both {
        /// Why not perf events.
        perf: Box<ExitsError>,
        /// Why not tracefs.
        tracefs: Box<ExitsError>,
    },
    /// Programs that count in the kernel are refused.
    #[error("counting in the kernel (BPF): {}", excerpt(.0))]
    Programs(String),
    /// A file of the kernel does not look as it should.
    #[error("{}: {}", shown(.path), plain(.what))]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file cannot be read.
    #[error("{}: {}", shown(.path), plain(&.source.to_string()))]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A QEMU's monitor does not say what is asked.
    #[error("asking QEMU's monitor {} for {wanted}: {source}", plain(.monitor))]
    Monitor {
        /// Its socket.
        monitor: String,
        /// What was asked for.
        wanted: &'static str,
        /// Why it is not known.
        source: QemuError,
    },
    /// A system call failed.
    #[error("{}: {}", plain(.what), plain(&.source.to_string()))]
    Os {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl ExitsError {
    /// For `map_err` on files.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> ExitsError {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => {
                ExitsError::Forbidden { what: format!("reading {}", path.display()) }
            }
            _ => ExitsError::File { path, source },
        }
    }

    /// For `map_err` on system calls.
    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(io::Error) -> ExitsError {
        let what = what.into();
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => ExitsError::Forbidden { what },
            _ => ExitsError::Os { what, source },
        }
    }
}

/// Short for results of this crate.
pub type Result<T> = std::result::Result<T, ExitsError>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a path or an answer has in it.
    #[test]
    fn no_error_writes_to_the_terminal() {
        let bad = "/tmp/\x1b]0;x\x07\x1b[2J\n\u{9b}H";
        let source = || io::Error::other(bad);
        let errors = [
            ExitsError::SeveralVms(bad.into()),
            ExitsError::UnknownVm { wanted: bad.into(), running: bad.into() },
            ExitsError::Forbidden { what: bad.into() },
            ExitsError::Malformed { path: bad.into(), what: bad.into() },
            ExitsError::File { path: bad.into(), source: source() },
            ExitsError::Os { what: bad.into(), source: source() },
            ExitsError::Both {
                perf: Box::new(ExitsError::Forbidden { what: bad.into() }),
                tracefs: Box::new(ExitsError::file(bad)(source())),
            },
            ExitsError::Programs(bad.into()),
            ExitsError::Monitor {
                monitor: bad.into(),
                wanted: "its devices",
                source: QemuError::Peer(source()),
            },
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.contains("/tmp/"), "{text:?}");
        }
    }
}
