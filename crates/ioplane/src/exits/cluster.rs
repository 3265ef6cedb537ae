//! `ioplane exits cluster`: what the interposer does in a VM's process, by the file that it leaves open there.

use std::fs::File;

use anyhow::{Context, Result, bail};
use ioplane_api::refusal::Code;
use ioplane_cli::args::{ClusterArgs, ClusterWord};
use ioplane_cli::output::{CommandError, print, print_done};
use ioplane_kvmstat::Vm;
use ioplane_vcpu::kvm::{BatchCounts, ClusterPage, ClusterReport, ClusterSwitch, REASONS, VcpuReport};
use serde::Serialize;

/// What is printed.
#[derive(Debug, Serialize)]
struct Status {
    name: String,
    pid: u32,
    /// `on`, `off`, or `failed`: a fault of the interposer has ended it.
    clustering: &'static str,
    /// Batches of guests that use them are answered.
    answers_batches: bool,
    vcpus: Vec<Vcpu>,
}

#[derive(Debug, Serialize)]
struct Vcpu {
    /// Returns of KVM_RUN from the kernel.
    returns: u64,
    /// Those with a device access that may begin a cluster.
    accesses: u64,
    /// Device accesses that took no exit.
    saved: u64,
    /// Calls that only completed an access.
    completions: u64,
    /// What became of the guest's batches.
    batches: Batches,
    /// Why no cluster was begun after an access.
    not_begun: Vec<Count>,
    /// Instructions that are not interpreted and have ended clusters.
    instructions: Vec<Count>,
    /// Most exits saved first.
    sites: Vec<Site>,
}

#[derive(Debug, Serialize)]
struct Batches {
    /// Doorbells that got an answer without an error.
    answered: u64,
    /// Of those, with entries left.
    cut_short: u64,
    /// Doorbells whose answer was an error of the array.
    refused: u64,
    /// Doorbells whose answer had a value that could not be stored in the array.
    not_stored: u64,
    /// Doorbells that the VMM was given.
    left: u64,
    /// Accesses of batches.
    accesses: u64,
}

#[derive(Debug, Serialize)]
struct Site {
    /// 0 for all that found no room of their own.
    rip: u64,
    clusters: u64,
    saved: u64,
    instructions: u64,
    microseconds: u64,
    ends: Vec<Count>,
}

#[derive(Debug, Serialize)]
struct Count {
    why: String,
    count: u64,
}

/// Says, or switches.
pub fn run(args: &ClusterArgs, json: bool) -> Result<()> {
    let vm = Vm::choose(args.vm.as_deref())?;
    let switch = match args.action {
        ClusterWord::Status => None,
        ClusterWord::On => Some(ClusterSwitch::On),
        ClusterWord::Off => Some(ClusterSwitch::Off),
        ClusterWord::BatchOnly => Some(ClusterSwitch::BatchOnly),
    };
    let write = switch.is_some();
    let file = open(&vm, write)?;
    if let Some(switch) = switch {
        if switch == ClusterSwitch::BatchOnly && !ClusterPage::read(&file)?.batches {
            let error = format!("{} (process {}) was not offered batches", vm.name, vm.pid);
            let remedy = "start it by `ioplane run --batch -- COMMAND`";
            bail!(CommandError::new(Code::Unsupported, error, remedy));
        }
        ClusterPage::switch(&file, switch)?;
    }
    let status = status(&vm, &ClusterPage::read(&file)?, args.sites);
    if write {
        return print_done(json, &status, |status| format!("{}\n", state(status)));
    }
    print(json, &status, text)
}

/// The file of the interposer in a VM's process.
pub(super) fn open(vm: &Vm, write: bool) -> Result<File> {
    let opened = ClusterPage::open(vm.pid, write);
    let opened = opened.with_context(|| {
        format!("open the interposer's file of process {}: look as the VM's user or root", vm.pid)
    })?;
    let error = format!("{} (process {}) has no interposer", vm.name, vm.pid);
    let remedy = "start it by `ioplane run -- COMMAND`";
    Ok(opened.ok_or_else(|| CommandError::new(Code::Unsupported, error, remedy))?)
}

fn status(vm: &Vm, report: &ClusterReport, most: usize) -> Status {
    let clustering = match report.switch {
        _ if report.failed => "failed",
        ClusterSwitch::On => "on",
        ClusterSwitch::Off | ClusterSwitch::BatchOnly => "off",
    };
    let answers_batches = report.batches && !report.failed && report.switch != ClusterSwitch::Off;
    let vcpu = |vcpu: &VcpuReport| {
        let mut sites: Vec<Site> = vcpu
            .sites
            .iter()
            .map(|site| Site {
                rip: site.rip,
                clusters: site.clusters,
                saved: site.accesses,
                instructions: site.instructions,
                microseconds: site.cycles / report.cycles_per_microsecond.max(1),
                ends: reasons(&site.ends),
            })
            .collect();
        sites.sort_by_key(|site| std::cmp::Reverse((site.saved, site.clusters)));
        sites.truncate(most);
        let instructions =
            vcpu.instructions.iter().map(|(why, count)| Count { why: why.clone(), count: *count });
        Vcpu {
            returns: vcpu.counts.returns,
            accesses: vcpu.counts.real_accesses,
            saved: vcpu.counts.made_up_accesses,
            completions: vcpu.counts.completions,
            batches: batches(vcpu.batches),
            not_begun: reasons(&vcpu.not_begun),
            instructions: most_first(instructions.collect()),
            sites,
        }
    };
    let vcpus = report.vcpus.iter().map(vcpu).collect();
    Status { name: vm.name.clone(), pid: vm.pid, clustering, answers_batches, vcpus }
}

/// What the interposer had done in a VM at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clustered {
    on: bool,
    clusters: u64,
    saved: u64,
}

impl Clustered {
    /// Nothing where the VM has no interposer that can be read.
    pub(super) fn of(vm: &Vm) -> Option<Clustered> {
        let status = status(vm, &ClusterPage::read(&open(vm, false).ok()?).ok()?, usize::MAX);
        let clusters = status.vcpus.iter().flat_map(|vcpu| &vcpu.sites).map(|site| site.clusters).sum();
        let saved = status.vcpus.iter().map(|vcpu| vcpu.saved).sum();
        Some(Clustered { on: status.clustering == "on", clusters, saved })
    }

    /// What a profile that began at `before` says of it; nothing where there were no clusters and are none.
    pub(super) fn note(self, before: Clustered) -> Option<String> {
        let (clusters, saved) =
            (self.clusters.saturating_sub(before.clusters), self.saved.saturating_sub(before.saved));
        let state = if self.on { "on" } else { "off" };
        (self.on || saved > 0).then(|| {
            format!(
                "clustering is {state}: {saved} device accesses took no exit, and {clusters} of the exits here began a cluster; \
                 `ioplane exits cluster` shows where"
            )
        })
    }
}

fn batches(counts: BatchCounts) -> Batches {
    let BatchCounts { answered, cut_short, refused, not_stored, left, accesses } = counts;
    Batches { answered, cut_short, refused, not_stored, left, accesses }
}

fn most_first(mut counts: Vec<Count>) -> Vec<Count> {
    counts.retain(|count| count.count != 0);
    counts.sort_by_key(|count| std::cmp::Reverse(count.count));
    counts
}

fn reasons(counts: &[u64]) -> Vec<Count> {
    let named = REASONS.iter().zip(counts);
    most_first(named.map(|(why, count)| Count { why: (*why).into(), count: *count }).collect())
}

fn list(counts: &[Count]) -> String {
    let words: Vec<String> = counts.iter().map(|count| format!("{} {}", count.why, count.count)).collect();
    words.join(", ")
}

fn state(status: &Status) -> String {
    let batches = if status.answers_batches { ", batches are answered" } else { "" };
    format!("clustering is {}{batches}", status.clustering)
}

fn text(status: &Status) -> String {
    let mut text = format!("{} (process {}): {}\n", status.name, status.pid, state(status));
    for (number, vcpu) in status.vcpus.iter().enumerate() {
        let all = vcpu.accesses.saturating_add(vcpu.saved);
        let percent = if all == 0 { 0.0 } else { 100.0 * vcpu.saved as f64 / all as f64 };
        text += &format!(
            "vCPU {number}: {all} device accesses, {} without an exit ({percent:.0} %); KVM_RUN has returned {} times, \
             {} times only to complete an access\n",
            vcpu.saved,
            vcpu.returns.saturating_add(vcpu.completions),
            vcpu.completions
        );
        let Batches { answered, cut_short, refused, not_stored, left, accesses } = vcpu.batches;
        if answered.max(refused).max(not_stored).max(left) > 0 {
            text += &format!(
                "  batches: {answered} answered ({cut_short} with entries left), {refused} refused, {not_stored} with the \
                 last value in a register, {left} left to the VMM; {accesses} accesses\n"
            );
        }
        for (title, counts) in [
            ("  no cluster begun", &vcpu.not_begun),
            ("  instructions that ended clusters", &vcpu.instructions),
        ] {
            if !counts.is_empty() {
                text += &format!("{title}: {}\n", list(counts));
            }
        }
        if !vcpu.sites.is_empty() {
            text += "  guest's RIP           clusters  exits saved  instructions        us  ended by\n";
        }
        for site in &vcpu.sites {
            let rip = if site.rip == 0 { "others".to_owned() } else { format!("{:#x}", site.rip) };
            text += &format!(
                "  {rip:<18} {:>11} {:>12} {:>13} {:>9}  {}\n",
                site.clusters,
                site.saved,
                site.instructions,
                site.microseconds,
                list(&site.ends)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::Clustered;

    #[test]
    fn a_profile_says_what_clusters_have_spared() {
        let at = |on, clusters, saved| Clustered { on, clusters, saved };
        let note = at(true, 12, 150).note(at(true, 10, 100)).unwrap();
        assert!(
            note.starts_with("clustering is on: 50 device accesses took no exit, and 2 of the exits"),
            "{note}"
        );
        // It was switched off meanwhile; a VMM that has begun anew counts from 0.
        assert!(at(false, 11, 101).note(at(true, 10, 100)).is_some_and(|note| note.contains("is off: 1 ")));
        assert!(at(true, 0, 0).note(at(true, 10, 100)).is_some_and(|note| note.contains("is on: 0 ")));
        assert_eq!(at(false, 10, 100).note(at(false, 10, 100)), None);
    }
}
