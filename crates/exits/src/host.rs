//! What this host's KVM is set to: parameters of its modules.

use std::path::Path;

use serde::{Deserialize, Serialize};

use ioplane_plain::file_text;

/// A parameter is a word or a number.
const LIMIT: u64 = 256;
/// `/proc/cpuinfo` has one to two KiB per processor.
const CPUINFO: u64 = 16 << 20;

/// What KVM's modules say of themselves. Nothing where a module is not loaded, or older than its parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostFacts {
    /// Intel's APIC virtualisation, posted interrupts with it (`kvm_intel`, `enable_apicv`).
    pub apicv: Option<bool>,
    /// AMD's (`kvm_amd`, `avic`).
    pub avic: Option<bool>,
    /// Whether the processor can do either, by its flags.
    pub apic_capable: Option<bool>,
    /// How long KVM itself polls before a halted vCPU's thread sleeps (`kvm`, `halt_poll_ns`).
    pub halt_poll_ns: Option<u64>,
    /// PAUSEs closer to each other than this are one loop (`kvm_intel`, `ple_gap`; `kvm_amd`, `pause_filter_thresh`).
    pub ple_gap: Option<u64>,
    /// How long a loop may be: cycles on Intel, PAUSEs on AMD (`ple_window`; `pause_filter_count`).
    pub ple_window: Option<u64>,
}

impl HostFacts {
    /// Of the running kernel.
    pub fn read() -> HostFacts {
        let cpuinfo = file_text(Path::new("/proc/cpuinfo"), CPUINFO).unwrap_or_default();
        HostFacts { apic_capable: apic_capable(&cpuinfo), ..HostFacts::of(Path::new("/sys/module")) }
    }

    fn of(modules: &Path) -> HostFacts {
        let word = |module: &str, name: &str| {
            let path = modules.join(module).join("parameters").join(name);
            file_text(&path, LIMIT).ok().map(|text| text.trim().to_owned())
        };
        let switch = |module: &str, name: &str| match word(module, name)?.as_str() {
            "Y" | "y" | "1" => Some(true),
            "N" | "n" | "0" => Some(false),
            _ => None,
        };
        let number = |module: &str, name: &str| word(module, name)?.parse().ok();
        HostFacts {
            apicv: switch("kvm_intel", "enable_apicv"),
            avic: switch("kvm_amd", "avic"),
            apic_capable: None,
            halt_poll_ns: number("kvm", "halt_poll_ns"),
            ple_gap: number("kvm_intel", "ple_gap").or_else(|| number("kvm_amd", "pause_filter_thresh")),
            ple_window: number("kvm_intel", "ple_window").or_else(|| number("kvm_amd", "pause_filter_count")),
        }
    }

    /// Whether APIC virtualisation is on, and the parameter that says so.
    pub(crate) fn virtual_apic(&self) -> Option<(bool, &'static str)> {
        let intel = self.apicv.map(|on| (on, "kvm_intel.enable_apicv"));
        intel.or_else(|| self.avic.map(|on| (on, "kvm_amd.avic")))
    }
}

/// Of `/proc/cpuinfo`: AMD's flag `avic`; Intel's flags of VMX have a line of their own, where `vid` (virtual interrupt delivery) is what APICv needs.
/// Nothing where the processor is neither, or the kernel older than that line (5.9).
fn apic_capable(cpuinfo: &str) -> Option<bool> {
    let has = |line: &str, flag: &str| {
        let line =
            cpuinfo.lines().find(|found| found.split(':').next().is_some_and(|name| name.trim() == line));
        line.map(|line| line.split_whitespace().any(|word| word == flag))
    };
    match (has("flags", "svm"), has("vmx flags", "vid")) {
        (_, Some(capable)) => Some(capable),
        (Some(true), None) => has("flags", "avic"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_the_processor_s_flags_say() {
        assert_eq!(apic_capable("flags\t\t: fpu svm avic\n"), Some(true));
        assert_eq!(apic_capable("processor\t: 0\nflags\t\t: fpu svm npt\n"), Some(false));
        assert_eq!(apic_capable("flags\t\t: fpu vmx\nvmx flags\t: vnmi apicv vid ple\n"), Some(true));
        assert_eq!(apic_capable("flags\t\t: fpu vmx\nvmx flags\t: vnmi ept\n"), Some(false));
        assert_eq!(apic_capable("flags\t\t: fpu vmx\n"), None, "a kernel that does not say");
        assert_eq!(apic_capable(""), None);
    }

    #[test]
    fn what_the_modules_say() {
        let root = tempfile::tempdir().unwrap();
        let write = |module: &str, name: &str, text: &str| {
            let folder = root.path().join(module).join("parameters");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(name), text).unwrap();
        };
        assert_eq!(HostFacts::of(root.path()), HostFacts::default());
        write("kvm", "halt_poll_ns", "200000\n");
        write("kvm_amd", "avic", "0\n");
        write("kvm_amd", "pause_filter_thresh", "128\n");
        write("kvm_amd", "pause_filter_count", &"9".repeat(1000));
        let facts = HostFacts::of(root.path());
        assert_eq!((facts.halt_poll_ns, facts.ple_gap, facts.ple_window), (Some(200_000), Some(128), None));
        assert_eq!(facts.virtual_apic(), Some((false, "kvm_amd.avic")));
        write("kvm_intel", "enable_apicv", "Y\n");
        assert_eq!(HostFacts::of(root.path()).virtual_apic(), Some((true, "kvm_intel.enable_apicv")));
        write("kvm_intel", "enable_apicv", "auto\n");
        assert_eq!(HostFacts::of(root.path()).apicv, None);
    }
}
