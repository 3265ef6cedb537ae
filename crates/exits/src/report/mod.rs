//! A profile in the words of people and programs. It is data: what follows from it the rules of `advice` say, and
//! [`Report::new`] puts both together.

mod escape;
mod finding;
mod flame;
mod html;
mod named;
mod text;

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use ioplane_kvmstat::{Totals, Vm};
use ioplane_symbols::{Fit, GuestFunction};
use serde::{Deserialize, Serialize};

use crate::devices::{DevicePlace, Devices};
use crate::event::Detail;
use crate::host::HostFacts;
use crate::profile::{Profile, Site, SiteCounts};
use crate::reason::{Kind, Reason};
use crate::runs::{LONGEST, RunCounts};
use crate::seen::WatchCounts;
use crate::times::SiteTimes;
use crate::vmm::VmmTime;
pub use finding::{Action, Certainty, Finding};
use named::{Named, at_instruction};

/// So many sites are listed.
pub(crate) const SITES: usize = 1000;
/// So many runs.
const RUNS: usize = 200;

/// Where the host's time for exits went, in ns. Their sum is `host_ns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostParts {
    /// KVM worked.
    pub kvm_ns: u64,
    /// The VMM worked, from KVM's handing over until the guest's entry.
    pub vmm_ns: u64,
    /// The vCPU's thread had no processor, though it would have run.
    pub preempted_ns: u64,
    /// The vCPU's thread waited: in HLT, for a page, for a lock.
    pub blocked_ns: u64,
}

/// Exits that have something in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExitRow {
    /// What.
    pub name: String,
    /// How many; this and times are estimated where a sample was taken.
    pub count: u64,
    /// A second.
    pub rate: f64,
    /// Of all exits.
    pub percent: f64,
    /// From leaving the guest to entering it again, in ns. Waiting in HLT is in it.
    pub host_ns: u64,
    /// Of the whole host time but that of waiting (HLT, MWAIT); zero for those.
    pub host_percent: f64,
    /// Host time of one exit, of those whose end was seen.
    pub ns_each: Option<u64>,
    /// How many went on to the VMM.
    pub user: u64,
    /// Where their host time went; nothing where that is not told (tracefs), or no end of them was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<HostParts>,
    /// It stands for exits that have no such name; what is in the place of one says so.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unnamed: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Exits of one instruction, about one thing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SiteRow {
    /// Count and cost; the name is the function, or the address.
    #[serde(flatten)]
    pub row: ExitRow,
    /// Why.
    pub reason: Reason,
    /// That in words.
    pub reason_name: String,
    /// What sort of exit it is.
    pub kind: Kind,
    /// The guest's instruction.
    pub rip: Option<u64>,
    /// It was a guest of this guest that exited, at an instruction of its own.
    #[serde(default)]
    pub nested: bool,
    /// The guest's function and the offset in it, where symbols were given.
    pub function: Option<GuestFunction>,
    /// The port, address or register.
    pub detail: Detail,
    /// How long one takes: nothing where no end was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<SiteTimes>,
    /// Which device and register that is.
    pub place: Option<DevicePlace>,
}

impl SiteRow {
    /// The device's register and how it is accessed, or the bare address; empty where the exit is about none.
    pub fn register(&self) -> String {
        let access = access(self.detail);
        match (&self.place, address(self.detail)) {
            (Some(place), _) => format!("{}: {}{access}", place.device, place.register),
            (None, Some(address)) => format!("{address}{access}"),
            (None, None) => String::new(),
        }
    }
}

/// Device accesses that came one after another, with nothing else of the guest's between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRow {
    /// The first instruction.
    pub rip: u64,
    /// Its function, where symbols were given.
    pub function: Option<GuestFunction>,
    /// The accesses in their order.
    pub accesses: Vec<Detail>,
    /// Whether more followed that were not recorded.
    pub longer: bool,
    /// How often the whole run was seen.
    pub times: u64,
    /// How many of all these accesses the VMM has answered; KVM answers the others by itself.
    #[serde(default)]
    pub user: u64,
    /// A second.
    pub rate: f64,
}

/// Where runs begin: a function has them at several instructions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStart {
    /// The guest's function of that name.
    Function(String),
    /// The instruction, where no function is known.
    Address(u64),
}

impl fmt::Display for RunStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunStart::Function(name) => f.write_str(name),
            RunStart::Address(address) => write!(f, "{address:#x}"),
        }
    }
}

impl RunRow {
    /// Where it begins.
    pub fn start(&self) -> RunStart {
        let function = self.function.as_ref().map(|function| RunStart::Function(function.name.clone()));
        function.unwrap_or(RunStart::Address(self.rip))
    }
}

/// The whole answer to "which exits does this VM take?".
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What the VMM calls the VM.
    pub vm: String,
    /// Its process.
    pub pid: u32,
    /// The VMM's program.
    pub program: String,
    /// vCPUs.
    pub vcpus: usize,
    /// How long it was watched.
    pub seconds: f64,
    /// Exits that happened, as perf counted them in the kernel (where `kvm_exit` never fires: as seen).
    pub exits: u64,
    /// Of these, recorded one by one.
    pub recorded: u64,
    /// Of these, those that found no room (estimated where a sample was taken). Not what a sample leaves out.
    pub lost: u64,
    /// One part in so many of the time was recorded.
    pub sample: u64,
    /// Hits of all tracepoints that were asked for: a handful for each exit.
    pub events: u64,
    /// KVM's own count over the same time, and where it is from.
    pub kernel: Option<Totals>,
    /// Share of exits whose function is named, of those that an instruction of the guest's kernel caused.
    pub functions_percent: f64,
    /// Share of exits about a port, an address or a register whose register has a name; its bare number or offset is none.
    pub devices_percent: f64,
    /// Share of all exits but interrupts, lost ones too, whose function is named, and the register if they are about one.
    #[serde(default)]
    pub attributed_percent: f64,
    /// How well the symbols fit, where there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symbols: Option<Fit>,
    /// By reason.
    pub reasons: Vec<ExitRow>,
    /// By function of the guest's kernel; what came from below it is one row.
    pub functions: Vec<ExitRow>,
    /// By device and register.
    pub registers: Vec<ExitRow>,
    /// By device.
    pub devices: Vec<ExitRow>,
    /// By vCPU.
    pub by_vcpu: Vec<ExitRow>,
    /// By instruction, reason and what it was about; the first thousand.
    pub sites: Vec<SiteRow>,
    /// Interrupts injected into the guest: vector and how many.
    pub interrupts: Vec<(u8, u64)>,
    /// Device accesses in a row, those first that cost most exits.
    #[serde(default)]
    pub runs: Vec<RunRow>,
    /// Where the vCPU threads were in the VMM's user space, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm: Option<VmmTime>,
    /// How often KVM changed how long a guest may spin.
    #[serde(default)]
    pub spin_windows: u64,
    /// What the host's KVM is set to.
    #[serde(default)]
    pub host: HostFacts,
    /// What could be better.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// What the reader must know to trust the numbers.
    pub notes: Vec<String>,
}

/// What names are made of.
#[derive(Default)]
pub struct Names<'a> {
    /// The guest's function at an address.
    pub function: Option<&'a dyn Fn(u64) -> Option<GuestFunction>>,
    /// How well the symbols fit, also where that is not well enough for names.
    pub symbols: Option<Fit>,
    /// The devices.
    pub devices: Devices,
    /// What the host's KVM is set to.
    pub host: HostFacts,
    /// What is to be said about them.
    pub notes: Vec<String>,
}

/// What a report is about.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// How long it was watched.
    pub time: Duration,
    /// How much was seen.
    pub seen: WatchCounts,
    /// One part in so many of the time was recorded.
    pub sample: u64,
}

impl Report {
    /// Puts a profile into words, with every site and no findings: of which sites the rules make something, they say of all.
    pub(crate) fn of(
        subject: Subject<'_>,
        profile: &Profile,
        kernel: Option<Totals>,
        names: &Names<'_>,
    ) -> Report {
        let Subject { vm, time, seen, sample } = subject;
        let total = profile.total();
        let recorded = total.count;
        let by_consequence = profile.is_by_consequence();
        let counted = if by_consequence {
            recorded
        } else {
            (seen.counted - seen.counted.min(profile.cut)).max(recorded)
        };
        // Of a sample KVM's own count tells the whole, or else the time does.
        let by_time = time.as_secs_f64() / seen.recorded.0.as_secs_f64().max(1e-9);
        let exits = match kernel.as_ref().and_then(Totals::exits) {
            _ if sample == 1 => counted,
            Some(exits) if !by_consequence => exits.max(counted),
            _ => (counted as f64 * by_time).round() as u64,
        };
        let whole = if counted > 0 { exits as f64 / counted as f64 } else { 1.0 };
        let lost = ((counted - recorded) as f64 * whole).round() as u64;
        let scale = if sample > 1 && recorded > 0 { (exits - lost) as f64 / recorded as f64 } else { 1.0 };
        let whole_time = |tally: SiteCounts| if sample > 1 { uncut(tally) } else { tally };
        let tallies: Vec<_> = profile.sites().map(|(site, tally)| (*site, whole_time(*tally))).collect();
        let raw = working(profile.sites().map(|(site, tally)| (*site, *tally)));
        let busy = working(tallies.iter().copied());
        let maker =
            Maker { seconds: time.as_secs_f64().max(1e-9), scale, exits, busy, switches: profile.switches };
        let mut all: Vec<(SiteRow, SiteCounts)> = tallies
            .into_iter()
            .map(|(site, tally)| (maker.site(site, tally, profile.times(&site), names), tally))
            .collect();
        all.sort_by(|(a, x), (b, y)| {
            let order = |tally: &SiteCounts| (tally.count, tally.host_ns);
            order(y).cmp(&order(x)).then_with(|| (a.rip, a.detail).cmp(&(b.rip, b.detail)))
        });
        // Sums are scaled once, not made of what was rounded.
        let group = |key: &dyn Fn(&SiteRow) -> Option<Group>| maker.group(&all, key);
        let kernel_start = kernel_start(&all);
        let reasons = group(&|site| Some(Group::Named(site.reason_name.clone())));
        let functions = if names.function.is_some() {
            group(&|site| match &site.function {
                _ if !at_instruction(site.kind) => Some(Group::Unnamed(INTERRUPTS)),
                Some(function) => Some(Group::Named(function.name.clone())),
                None if site.nested => Some(Group::Unnamed(NESTED)),
                None => {
                    let elsewhere = site.rip.is_some_and(|rip| !in_kernel(rip, kernel_start));
                    elsewhere.then_some(Group::Unnamed(ELSEWHERE))
                }
            })
        } else {
            Vec::new()
        };
        let register = |site: &SiteRow| {
            let name = site.register();
            (!name.is_empty()).then_some(Group::Named(name))
        };
        let registers = group(&register);
        let devices = group(&|site| site.place.as_ref().map(|place| Group::Named(place.device.clone())));
        let by_vcpu = profile.vcpus().into_iter().map(|(id, tally)| {
            // Of its working time as much was cut as of all.
            let halted = profile.halted_ns(id);
            let working = tally.host_ns.saturating_sub(halted) as f64 * busy as f64 / raw.max(1) as f64;
            let host_ns = halted.saturating_add(working.round() as u64);
            maker.row(format!("vCPU {id}"), SiteCounts { host_ns, ..tally }, halted)
        });
        let named = Named::of(&all, kernel_start, counted);
        let mut report = Report {
            vm: vm.name.clone(),
            pid: vm.pid,
            program: vm.program.clone(),
            vcpus: vm.vcpus,
            seconds: time.as_secs_f64(),
            exits,
            recorded,
            lost,
            sample,
            events: seen.events,
            kernel,
            functions_percent: named.functions,
            devices_percent: named.devices,
            attributed_percent: named.attributed,
            symbols: names.symbols,
            reasons,
            functions,
            registers,
            devices,
            by_vcpu: by_vcpu.collect(),
            interrupts: profile
                .interrupts()
                .into_iter()
                .map(|(vector, count)| (vector, maker.scaled(count)))
                .collect(),
            runs: maker.runs(profile, names),
            vmm: None,
            spin_windows: maker.scaled(profile.spin_windows),
            host: names.host.clone(),
            findings: Vec::new(),
            notes: Vec::new(),
            sites: all.into_iter().map(|(site, _)| site).collect(),
        };
        report.notes = notes(&report, profile, by_consequence, seen);
        report.notes.extend(names.notes.iter().cloned());
        report
    }
}

/// Host time that is not waiting.
fn working(sites: impl Iterator<Item = (Site, SiteCounts)>) -> u64 {
    let busy = sites.filter(|(site, _)| site.reason.kind() != Kind::Halt);
    busy.map(|(_, tally)| tally.host_ns).fold(0, u64::saturating_add)
}

/// A sample sees no end of an exit that lasts beyond its slice: those without an end count as long as the others of their place. That is
/// too short still, for the longer ones are cut more often.
fn uncut(tally: SiteCounts) -> SiteCounts {
    let whole = |ns: u64| {
        let whole = u128::from(ns) * u128::from(tally.count) / u128::from(tally.timed.max(1));
        u64::try_from(whole).unwrap_or(u64::MAX)
    };
    SiteCounts {
        host_ns: whole(tally.host_ns),
        user_ns: whole(tally.user_ns),
        preempted_ns: whole(tally.preempted_ns),
        blocked_ns: whole(tally.blocked_ns),
        timed: if tally.timed > 0 { tally.count } else { 0 },
        ..tally
    }
}

/// What is said in place of a function's name for addresses that are not the kernel's.
const INTERRUPTS: &str = "(interrupts, which come anywhere)";
const NESTED: &str = "(a guest of this guest)";
const ELSEWHERE: &str = "(user space or firmware)";

/// Where a 64-bit kernel begins: the upper half of all addresses is the kernel's, of any system for x86-64.
const UPPER_HALF: u64 = 1 << 63;
/// Where a 32-bit Linux usually begins.
const KERNEL_32: u64 = 0xc000_0000;

/// Where the guest's kernel begins. If all of its functions that were seen lie below 4 GiB, it is a 32-bit one.
fn kernel_start(sites: &[(SiteRow, SiteCounts)]) -> u64 {
    let named = || sites.iter().filter(|(site, _)| site.function.is_some()).filter_map(|(site, _)| site.rip);
    match (named().min(), named().max()) {
        (Some(lowest), Some(highest)) if highest <= u32::MAX.into() => lowest.min(KERNEL_32),
        _ => UPPER_HALF,
    }
}

fn in_kernel(rip: u64, start: u64) -> bool {
    rip >= start
}

/// The bare address.
fn address(detail: Detail) -> Option<String> {
    match detail {
        Detail::Port { port, .. } => Some(format!("port {port:#x}")),
        Detail::Memory { address, .. } => Some(format!("address {address:#x}")),
        Detail::Msr { index, .. } => Some(format!("MSR {index:#x}")),
        Detail::Cpuid { .. } | Detail::Hypercall { .. } | Detail::Fault(_) | Detail::Nothing => None,
    }
}

/// Direction and width.
fn access(detail: Detail) -> String {
    match detail {
        Detail::Port { width, write, .. } => {
            format!(", {} {}", if write { "out" } else { "in" }, u32::from(width) * 8)
        }
        Detail::Memory { width, write, .. } => {
            let bits = if width == 0 { String::new() } else { format!(" {}", u32::from(width) * 8) };
            format!(", {}{bits}", if write { "write" } else { "read" })
        }
        Detail::Msr { write, .. } => format!(", {}", if write { "write" } else { "read" }),
        Detail::Cpuid { .. } | Detail::Hypercall { .. } | Detail::Fault(_) | Detail::Nothing => String::new(),
    }
}

/// What the exits of a row have in common.
#[derive(PartialEq, Eq, Hash)]
enum Group {
    /// That name.
    Named(String),
    /// They have none; this is said in its place.
    Unnamed(&'static str),
}

struct Maker {
    seconds: f64,
    scale: f64,
    exits: u64,
    busy: u64,
    /// Whether it was told when threads had no processor.
    switches: bool,
}

impl Maker {
    fn scaled(&self, count: u64) -> u64 {
        (count as f64 * self.scale).round() as u64
    }

    fn row(&self, name: String, tally: SiteCounts, halted_ns: u64) -> ExitRow {
        let count = tally.count as f64 * self.scale;
        let percent = |part: f64, all: u64| if all == 0 { 0.0 } else { part * 100.0 / all as f64 };
        ExitRow {
            name,
            count: self.scaled(tally.count),
            rate: count / self.seconds,
            percent: percent(count, self.exits),
            host_ns: self.scaled(tally.host_ns),
            host_percent: percent(tally.host_ns.saturating_sub(halted_ns) as f64, self.busy),
            ns_each: tally.host_ns.checked_div(tally.timed),
            user: self.scaled(tally.user),
            parts: (self.switches && tally.timed > 0).then(|| self.parts(tally)),
            unnamed: false,
        }
    }

    fn parts(&self, tally: SiteCounts) -> HostParts {
        let [vmm_ns, preempted_ns, blocked_ns] =
            [tally.user_ns, tally.preempted_ns, tally.blocked_ns].map(|ns| self.scaled(ns));
        let others = vmm_ns.saturating_add(preempted_ns).saturating_add(blocked_ns);
        let kvm_ns = self.scaled(tally.host_ns).saturating_sub(others);
        HostParts { kvm_ns, vmm_ns, preempted_ns, blocked_ns }
    }

    fn site(&self, site: Site, tally: SiteCounts, times: Option<SiteTimes>, names: &Names<'_>) -> SiteRow {
        let kind = site.reason.kind();
        let function = site.rip.and_then(|rip| names.function?(rip));
        let name = match (&function, site.rip) {
            (Some(function), _) => function.to_string(),
            (None, Some(rip)) => format!("{rip:#x}"),
            (None, None) if site.nested => NESTED.into(),
            (None, None) => "?".into(),
        };
        SiteRow {
            nested: site.nested,
            row: self.row(name, tally, if kind == Kind::Halt { tally.host_ns } else { 0 }),
            reason: site.reason,
            reason_name: site.reason.name(),
            kind,
            rip: site.rip,
            function,
            detail: site.detail,
            times,
            place: names.devices.name(site.detail),
        }
    }

    /// Those first that could spare most exits.
    fn runs(&self, profile: &Profile, names: &Names<'_>) -> Vec<RunRow> {
        let spared = |length: usize, times: u64| times.saturating_mul(length as u64 - 1);
        let mut runs: Vec<_> = profile.runs.iter().collect();
        runs.sort_by_key(|(run, seen)| (std::cmp::Reverse(spared(run.steps().len(), seen.times)), **run));
        let row = |(run, seen): (&crate::runs::Run, RunCounts)| RunRow {
            rip: run.rip,
            function: names.function.and_then(|function| function(run.rip)),
            accesses: run.steps().to_vec(),
            longer: run.steps().len() >= LONGEST,
            times: self.scaled(seen.times),
            user: self.scaled(seen.user),
            rate: seen.times as f64 * self.scale / self.seconds,
        };
        runs.into_iter().take(RUNS).map(row).collect()
    }

    /// Adds up what has the same name, most first.
    fn group(
        &self,
        sites: &[(SiteRow, SiteCounts)],
        key: &dyn Fn(&SiteRow) -> Option<Group>,
    ) -> Vec<ExitRow> {
        let mut sums: HashMap<Group, (SiteCounts, u64)> = HashMap::new();
        for (site, tally) in sites {
            let Some(group) = key(site) else { continue };
            let (sum, halted) = sums.entry(group).or_default();
            sum.add(*tally);
            if site.kind == Kind::Halt {
                *halted = halted.saturating_add(tally.host_ns);
            }
        }
        let row = |(group, (tally, halted))| match group {
            Group::Named(name) => self.row(name, tally, halted),
            Group::Unnamed(words) => ExitRow { unnamed: true, ..self.row(words.to_owned(), tally, halted) },
        };
        let mut rows: Vec<ExitRow> = sums.into_iter().map(row).collect();
        rows.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.name.cmp(&b.name)));
        rows
    }
}

fn notes(report: &Report, profile: &Profile, by_consequence: bool, seen: WatchCounts) -> Vec<String> {
    let mut notes = Vec::new();
    if by_consequence {
        notes.push(
            "kvm_exit never fired: this KVM has no hardware virtualization, or another kernel's VMs are meant. \
             Counted instead is what KVM did: port I/O, MMIO, MSRs. Guest addresses and times are not known."
                .into(),
        );
    } else if report.exits == 0 {
        notes.push("no exit was seen: the VM is paused, or did nothing at all".into());
    }
    if report.lost > 0 {
        let percent = report.lost as f64 * 100.0 / report.exits.max(1) as f64;
        notes.push(format!("{} exits ({percent:.2} %) found no room and are in the total only", report.lost));
    }
    if let Some(words) = seen.losses.words() {
        notes.push(format!("tracefs has lost events: {words}; which exits they were of is not known"));
    } else if report.lost == 0 && profile.lost_records > 0 {
        let records = profile.lost_records;
        notes.push(format!(
            "{records} records of events found no room; which exits they were of is not known"
        ));
    }
    if report.sample > 1 {
        let (on, slices) = seen.recorded;
        notes.push(format!(
            "a sample: recorded was one part of the time in {}, {:.0} ms in {slices} slices at random; counts and times are \
             estimates, and long exits seem shorter than they are: one that lasts beyond its slice (2 ms) has no end",
            report.sample,
            on.as_secs_f64() * 1e3
        ));
    }
    if profile.crowded > 0 {
        let sites = crate::profile::SITES;
        notes.push(format!("{} exits came from beyond the first {sites} sites", profile.crowded));
    }
    if let Some(counted) = report.kernel.as_ref().and_then(Totals::exits) {
        let (ours, source) = (report.exits, &report.kernel.as_ref().map_or("", |kernel| &kernel.source));
        let difference = counted.abs_diff(ours);
        if !by_consequence && difference > 16 + seen.slack + counted / 50 {
            notes.push(format!("KVM's own count ({source}) is {counted}, ours {ours}: they should agree"));
        }
    }
    notes
}

#[cfg(test)]
pub(crate) mod tests;
