//! All VMs of the host by KVM's own counters: KVM counts whether anybody reads or not, so looking costs the VMs nothing.
//!
//! ```text
//!   /sys/kernel/debug/kvm/PID-FD/exits, io_exits, ... --Look::take--> Look --since--> HostRates --> table, JSON
//!   (without debugfs: the statistics descriptors that VMMs have open)   `--open_metrics--> text of OpenMetrics
//! ```

mod metrics;

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ioplane_plain::{FileError, file_text};
use serde::{Deserialize, Serialize};

use crate::error::{KvmStatError, Result};
use crate::totals;
use crate::vm::Vm;

/// So many VMs are looked at.
const VMS: usize = 4096;
/// A counter is one number.
const NUMBER: u64 = 4096;

/// What is read of each VM; reading all sixty that Linux has would be three times the work.
const COUNTERS: [&str; 15] = [
    "exits",
    "io_exits",
    "mmio_exits",
    "halt_exits",
    "irq_exits",
    "irq_window_exits",
    "hypercalls",
    "irq_injections",
    "insn_emulation",
    "pf_taken",
    "signal_exits",
    "halt_wait_ns",
    "halt_poll_success_ns",
    "halt_poll_fail_ns",
    "directed_yield_attempted",
];

/// Which of these are time in which a vCPU was halted.
const HALTED: [&str; 3] = ["halt_wait_ns", "halt_poll_success_ns", "halt_poll_fail_ns"];

/// Where KVM's counters are.
#[derive(Clone, Debug)]
pub struct KvmCounters {
    /// KVM's folder in debugfs, or why there is none.
    folder: std::result::Result<PathBuf, String>,
    proc: PathBuf,
}

/// What one VM's counters were.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counted {
    name: String,
    program: String,
    vcpus: usize,
    counters: BTreeMap<String, u64>,
}

/// All VMs at one moment.
#[derive(Clone, Debug)]
pub struct HostLook {
    at: Instant,
    vms: BTreeMap<u32, Counted>,
    notes: Vec<String>,
}

/// What one VM does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmRates {
    /// What its VMM calls it.
    pub name: String,
    /// The VMM's process.
    pub pid: u32,
    /// The VMM's program.
    pub program: String,
    /// vCPUs.
    pub vcpus: usize,
    /// All exits a second.
    pub exits: f64,
    /// Port instructions.
    pub io: f64,
    /// MMIO that the VMM has answered.
    pub mmio: f64,
    /// HLT.
    pub halt: f64,
    /// The host's own interrupts.
    pub host_interrupt: f64,
    /// The guest can take an interrupt now.
    pub interrupt_window: f64,
    /// All others: MSRs, page faults, CPUID and so on.
    pub other: f64,
    /// Of all: hypercalls.
    pub hypercalls: f64,
    /// Interrupts injected a second. None where the processor delivers them by itself.
    pub injected: f64,
    /// Instructions emulated a second.
    pub emulated: f64,
    /// Page faults a second.
    pub page_faults: f64,
    /// Share of its vCPUs' time that it was halted, by KVM's own clock.
    pub halted_percent: f64,
}

/// What all of them do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostRates {
    /// Between the two looks.
    pub seconds: f64,
    /// Most exits first.
    pub vms: Vec<VmRates>,
    /// What the reader must know to trust the numbers.
    pub notes: Vec<String>,
}

impl KvmCounters {
    /// Of this host.
    pub fn find() -> KvmCounters {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        KvmCounters::of(Path::new("/proc"), debugfs(&mounts).as_deref())
    }

    /// Of trees that look like `/proc` and a mounted debugfs.
    pub fn of(proc: &Path, debugfs: Option<&Path>) -> KvmCounters {
        let folder = match debugfs {
            None => Err(KvmStatError::NoDebugfs),
            Some(root) => match fs::read_dir(root.join("kvm")) {
                Ok(_) => Ok(root.join("kvm")),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    Err(KvmStatError::NoKvmCounters(root.join("kvm")))
                }
                Err(error) => Err(FileError::of(root.join("kvm"))(error).into()),
            },
        };
        KvmCounters { folder: folder.map_err(|error| error.to_string()), proc: proc.into() }
    }

    /// Reads all of them. An error where there is nowhere to read, and says what to do.
    pub fn look(&self) -> Result<HostLook> {
        let mut notes = Vec::new();
        let vms = match &self.folder {
            Ok(folder) => by_debugfs(folder, &self.proc).map_err(FileError::of(folder))?,
            Err(why) => {
                let (vms, all) = by_descriptors();
                if vms.is_empty() {
                    return Err(KvmStatError::NoCounters(why.clone()));
                }
                notes.push(format!(
                    "{} of {all} VMs, by statistics descriptors of their VMMs: {why}",
                    vms.len()
                ));
                vms
            }
        };
        Ok(HostLook { at: Instant::now(), vms, notes })
    }
}

/// Where debugfs is mounted.
fn debugfs(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (_, place, kind) = (words.next()?, words.next()?, words.next()?);
        (kind == "debugfs").then(|| PathBuf::from(place))
    })
}

/// Of the folders `PID-FD`: PID is the thread that made the VM, FD what it got.
fn by_debugfs(folder: &Path, proc: &Path) -> std::io::Result<BTreeMap<u32, Counted>> {
    let mut vms: BTreeMap<u32, Counted> = BTreeMap::new();
    let entries = fs::read_dir(folder)?.flatten();
    let threads = entries.filter_map(|entry| {
        let (thread, fd) =
            entry.file_name().to_str()?.split_once('-').map(|(a, b)| (a.to_owned(), b.to_owned()))?;
        let _: u32 = fd.parse().ok()?;
        Some((thread.parse::<u32>().ok()?, entry.path()))
    });
    for (thread, path) in threads.take(VMS) {
        let read = |name: &&str| Some(((*name).to_owned(), number(&path.join(name))?));
        let counters: BTreeMap<String, u64> = COUNTERS.iter().filter_map(read).collect();
        if !counters.contains_key("exits") {
            // It is ending just now.
            continue;
        }
        let pid = process(proc, thread).unwrap_or(thread);
        let counted = vms.entry(pid).or_insert_with(|| {
            let vm = Vm::of_tree(proc, pid);
            let (name, program, vcpus) = vm.map_or_else(
                || (format!("(process {pid})"), String::new(), 0),
                |vm| (vm.name, vm.program, vm.vcpus),
            );
            Counted { name, program, vcpus, counters: BTreeMap::new() }
        });
        for (name, value) in counters {
            let sum = counted.counters.entry(name).or_default();
            *sum = sum.saturating_add(value);
        }
    }
    Ok(vms)
}

fn number(path: &Path) -> Option<u64> {
    file_text(path, NUMBER).ok()?.trim().parse().ok()
}

/// The process of a thread.
fn process(proc: &Path, thread: u32) -> Option<u32> {
    let status = file_text(&proc.join(thread.to_string()).join("status"), 1 << 16).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Of VMMs that have their statistics open; and how many VMs there are.
fn by_descriptors() -> (BTreeMap<u32, Counted>, usize) {
    let all = Vm::all();
    let counted = |vm: &Vm| {
        let counters = totals::descriptors(vm)?.counters;
        let (name, program, vcpus) = (vm.name.clone(), vm.program.clone(), vm.vcpus);
        Some((vm.pid, Counted { name, program, vcpus, counters }))
    };
    (all.iter().take(VMS).filter_map(counted).collect(), all.len())
}

impl HostLook {
    /// What has happened since an earlier look. A VM that is new, or whose process has become another VM, is in the next.
    pub fn since(&self, earlier: &HostLook) -> HostRates {
        self.over(earlier, (self.at - earlier.at).as_secs_f64())
    }

    fn over(&self, earlier: &HostLook, seconds: f64) -> HostRates {
        let mut notes = self.notes.clone();
        let mut vms = Vec::new();
        for (pid, now) in &self.vms {
            match earlier.vms.get(pid).and_then(|before| rates(*pid, before, now, seconds.max(1e-9))) {
                Some(rates) => vms.push(rates),
                None => notes.push(format!("{} (process {pid}) is new: it has no rates yet", now.name)),
            }
        }
        vms.sort_by(|a, b| b.exits.total_cmp(&a.exits).then_with(|| a.pid.cmp(&b.pid)));
        HostRates { seconds, vms, notes }
    }
}

/// Nothing if these are not two looks at the same VM.
fn rates(pid: u32, before: &Counted, now: &Counted, seconds: f64) -> Option<VmRates> {
    let difference = |name: &str| match (before.counters.get(name), now.counters.get(name)) {
        (Some(before), Some(now)) => now.checked_sub(*before),
        // A kernel that does not have it.
        _ => Some(0),
    };
    let exits = difference("exits")?;
    if before.name != now.name {
        return None;
    }
    // Another counter that goes back is a statistic that somebody has set to zero: that is possible, by writing to it.
    let count = |name: &str| difference(name).unwrap_or(0);
    let rate = |count: u64| count as f64 / seconds;
    let parts = ["io_exits", "mmio_exits", "halt_exits", "irq_exits", "irq_window_exits"].map(count);
    let known = parts.iter().fold(0u64, |sum, part| sum.saturating_add(*part));
    let halted = HALTED.map(count);
    let halted = halted.iter().fold(0u64, |sum, part| sum.saturating_add(*part));
    let [io, mmio, halt, host_interrupt, interrupt_window] = parts.map(rate);
    Some(VmRates {
        name: now.name.clone(),
        pid,
        program: now.program.clone(),
        vcpus: now.vcpus,
        exits: rate(exits),
        io,
        mmio,
        halt,
        host_interrupt,
        interrupt_window,
        other: rate(exits.saturating_sub(known)),
        hypercalls: rate(count("hypercalls")),
        injected: rate(count("irq_injections")),
        emulated: rate(count("insn_emulation")),
        page_faults: rate(count("pf_taken")),
        halted_percent: (rate(halted) / 1e9 / now.vcpus.max(1) as f64 * 100.0).min(100.0),
    })
}

impl std::fmt::Display for HostRates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all: f64 = self.vms.iter().map(|vm| vm.exits).sum::<f64>() + 0.0;
        writeln!(f, "{} VMs, {all:.0} exits a second, over {:.1} s", self.vms.len(), self.seconds)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        // Above the table: a terminal may be too short for all VMs.
        if let Some(vm) = self.vms.first().filter(|vm| vm.exits > 0.0) {
            writeln!(f, "who causes the exits of {}: ioplane exits --vm pid:{}", vm.name, vm.pid)?;
        }
        writeln!(
            f,
            "\n{:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}  VM",
            "exits/s",
            "port I/O",
            "MMIO",
            "HLT",
            "host irq",
            "irq win",
            "other",
            "emulated",
            "faults",
            "halted %"
        )?;
        for vm in &self.vms {
            let numbers = [
                vm.exits,
                vm.io,
                vm.mmio,
                vm.halt,
                vm.host_interrupt,
                vm.interrupt_window,
                vm.other,
                vm.emulated,
                vm.page_faults,
            ];
            for number in numbers {
                write!(f, "{number:>9.0} ")?;
            }
            writeln!(
                f,
                "{:>8.1}  {} ({}, process {}, {} vCPUs)",
                vm.halted_percent, vm.name, vm.program, vm.pid, vm.vcpus
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
