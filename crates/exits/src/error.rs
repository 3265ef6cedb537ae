//! What can go wrong, in words that say what to do.

use std::io;
use std::path::PathBuf;

use ioplane_plain::{FileError, excerpt, plain};
use ioplane_qemu::QemuError;

/// Why there is no profile, or no name. Paths and names are others' words: none reaches a terminal as it is.
#[derive(Debug, thiserror::Error)]
pub enum ExitsError {
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
    /// A file of the kernel cannot be read, or does not look as it should.
    #[error(transparent)]
    File(#[from] FileError),
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
        let error = FileError::of(path);
        move |source| error(source).into()
    }

    /// A file does not look as it should.
    pub(crate) fn malformed(path: impl Into<PathBuf>, what: impl Into<String>) -> ExitsError {
        FileError::malformed(path, what).into()
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
            ExitsError::Forbidden { what: bad.into() },
            ExitsError::malformed(bad, bad),
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
