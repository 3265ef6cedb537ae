//! What can go wrong, in words that say what to do.

use std::path::PathBuf;

use ioplane_plain::{FileError, plain, shown};

/// Why there is no VM, or nothing that KVM has counted of it.
#[derive(Debug, thiserror::Error)]
pub enum KvmStatError {
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
    /// Debugfs is not to be found.
    #[error("debugfs is not mounted; as root: mount -t debugfs debugfs /sys/kernel/debug")]
    NoDebugfs,
    /// Debugfs has nothing of KVM's.
    #[error("{} is not there; is the module kvm loaded, and this not a container?", shown(.0))]
    NoKvmCounters(PathBuf),
    /// KVM's counters cannot be read.
    #[error("KVM's counters cannot be read: {}; nor has a VMM statistics descriptors open", plain(.0))]
    NoCounters(String),
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Short for results of this crate.
pub(crate) type Result<T> = std::result::Result<T, KvmStatError>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a name has in it.
    #[test]
    fn no_error_writes_to_the_terminal() {
        let bad = "/tmp/\x1b]0;x\x07\x1b[2J\n\u{9b}H";
        let errors = [
            KvmStatError::SeveralVms(bad.into()),
            KvmStatError::UnknownVm { wanted: bad.into(), running: bad.into() },
            KvmStatError::NoKvmCounters(bad.into()),
            KvmStatError::NoCounters(bad.into()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.contains("/tmp/"), "{text:?}");
        }
    }
}
