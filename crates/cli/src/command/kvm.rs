//! Whether this host's KVM runs stock guests.

use std::fs::{self, OpenOptions};
use std::io;

/// What `/dev/kvm` and the processor say.
pub struct Kvm {
    /// Whether this user may open `/dev/kvm`.
    pub opened: io::Result<()>,
    /// The processor's own virtualization. Without it an open `/dev/kvm` is a software KVM.
    pub flag: Option<&'static str>,
}

impl Kvm {
    /// Opens `/dev/kvm` and reads `/proc/cpuinfo`.
    pub fn look() -> Kvm {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let mut words = info.lines().filter(|line| line.starts_with("flags")).flat_map(str::split_whitespace);
        Kvm {
            opened: OpenOptions::new().read(true).write(true).open("/dev/kvm").map(drop),
            flag: words.find_map(|word| ["vmx", "svm"].into_iter().find(|flag| *flag == word)),
        }
    }

    /// Stock guests run on it.
    pub fn usable(&self) -> bool {
        self.opened.is_ok() && self.flag.is_some()
    }
}
