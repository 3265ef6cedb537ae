//! What can go wrong, in words that say what to do.

use std::io;
use std::path::PathBuf;

/// Why there is no profile, or no name.
#[derive(Debug, thiserror::Error)]
pub enum ExitsError {
    /// No process of this host has a KVM VM open, as far as we may see.
    #[error("no KVM VM is running on this host, as far as may be seen; as root more is seen")]
    NoVm,
    /// Several VMs, and none was chosen.
    #[error("several VMs are running, choose one with --vm: {0}")]
    SeveralVms(String),
    /// No VM of that name or process number.
    #[error("no VM is called {wanted:?}, nor has it that process number; running: {running}")]
    UnknownVm {
        /// What was asked for.
        wanted: String,
        /// What there is.
        running: String,
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
        "{what} is not permitted; run as root, or with CAP_PERFMON, CAP_SYS_PTRACE and a readable tracefs"
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
    /// A file of the kernel does not look as it should.
    #[error("{path}: {what}")]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
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
