//! Which accelerator the guests of this machine can use.

use std::fmt;
use std::fs::{self, OpenOptions};

/// What runs a guest's instructions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor's own virtualization.
    Kvm,
    /// QEMU's translator.
    Tcg {
        /// Why not KVM.
        because: String,
    },
}

impl Accelerator {
    /// KVM where `/dev/kvm` opens and the processor has VT-x or AMD-V, else TCG: a `/dev/kvm` without either is a
    /// software KVM in which stock Linux does not run.
    pub fn detect() -> Accelerator {
        let tcg = |because: String| Accelerator::Tcg { because };
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            return tcg(format!("/dev/kvm cannot be opened: {error}"));
        }
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
        if flags.flat_map(str::split_whitespace).any(|flag| flag == "vmx" || flag == "svm") {
            return Accelerator::Kvm;
        }
        tcg("/dev/kvm is there, but /proc/cpuinfo shows neither vmx nor svm".into())
    }

    /// `kvm` or `tcg`.
    pub fn name(&self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg { .. } => "tcg",
        }
    }

    /// QEMU's arguments. Under TCG the processor has no `cmpxchg16b`: QEMU 7.2 translates it wrongly, and Linux 6.12, which
    /// allocates memory with it, dies of that within seconds (11.1 does it right).
    pub fn args(&self) -> [&'static str; 4] {
        match self {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accelerator::Tcg { .. } => ["-accel", "tcg,thread=multi", "-cpu", "Nehalem,-cx16"],
        }
    }

    /// How much longer to wait than on real hardware.
    pub fn patience(&self) -> u32 {
        match self {
            Accelerator::Kvm => 1,
            Accelerator::Tcg { .. } => 4,
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Accelerator::Kvm => write!(f, "KVM"),
            Accelerator::Tcg { because } => write!(f, "TCG ({because})"),
        }
    }
}
