//! Exits counted in the kernel: programs at KVM's tracepoints (`bpf/count.bpf.c`) keep a profile's numbers, and no event comes to user space.
//!
//! ```text
//!   kvm_exit .. kvm_entry, sched_switch  --programs-->  maps: threads, sites, runs  --[`KernelCounts::collect`]--> Profile
//! ```
//!
//! A tracepoint is one for all VMs: exits of VMs that are not watched run the program as far as the look for their thread.

mod formats;
mod layout;

use std::fs::File;

use aya::maps::{Array, HashMap, MapData, MapError};
use aya::programs::raw_trace_point::RawTracePointLink;
use aya::programs::{ProgramError, RawTracePoint, TracePoint};
use aya::{Ebpf, EbpfError, EbpfLoader};

use crate::error::{ExitsError, Result};
use crate::format::Format;
use crate::perf::run_program;
use crate::profile::Profile;
use crate::queues::QueuePorts;
use crate::runs::{GAP_NS, NEAR};
use crate::seen::WatchCounts;
use crate::tracefs::Tracefs;
use layout::{ANY_STEP, RawCounts, RawRun, RawRunCounts, RawSite, RawThread, UNTIMED, VCPU_KNOWN};

/// Made by `script/build-bpf`.
const PROGRAMS: &[u8] = aya::include_bytes_aligned!("../../bpf/count.bpf.o");
const EXIT: &str = "kvm_exit";
const ENTRY: &str = "kvm_entry";
const SWITCH: &str = "sched_switch";
/// The first namespace of process numbers (Linux, PROC_PID_INIT_INO): programs are told numbers of that one.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// Programs that count. They end with this value.
pub(crate) struct KernelCounts {
    programs: Ebpf,
    /// By name.
    attached: Vec<(String, Attached)>,
    /// Threads that have ended.
    ended: Vec<RawThread>,
}

/// Holds a program at its tracepoint until it is dropped.
enum Attached {
    /// KVM hands its arguments over as they are.
    Raw { _link: RawTracePointLink },
    /// KVM builds a record first.
    Record { _event: File },
}

impl KernelCounts {
    /// Loads the programs for these tracepoints of KVM. They count when threads are added and it is switched on.
    pub fn new(tracefs: &Tracefs, tracepoints: &[&'static str], queues: &QueuePorts) -> Result<KernelCounts> {
        let namespace =
            std::fs::read_link("/proc/self/ns/pid").map_err(ExitsError::file("/proc/self/ns/pid"))?;
        if namespace.as_os_str() != FIRST_NAMESPACE {
            return Err(refused("threads have other numbers in this container's namespace"));
        }
        let mut formats: Vec<(&str, Format)> = Vec::new();
        for name in tracepoints {
            formats.push((name, tracefs.kvm(name)?));
        }
        let exits_tell_vcpu =
            formats.iter().any(|(name, format)| *name == EXIT && format.field("vcpu_id").is_some());
        formats.push((SWITCH, tracefs.scheduler(SWITCH)?));
        let types = formats::types(formats.iter().map(|(name, format)| (*name, format)))
            .map_err(|error| refused(&error))?;
        let kinds = layout::kinds();
        let mut loader = EbpfLoader::new();
        loader.btf(Some(&types));
        loader.override_global("kinds", &kinds[..], true);
        loader.override_global("near_bytes", &NEAR, true);
        loader.override_global("gap_ns", &GAP_NS, true);
        loader.override_global("queue_ports", &queues.numbers()[..], true);
        let mut programs = loader.load(PROGRAMS).map_err(|error: EbpfError| refused(&error))?;
        let mut attached = Vec::new();
        for (name, format) in &formats {
            let raw = match *name {
                // Its arguments do not tell the vCPU's number.
                ENTRY if !exits_tell_vcpu => None,
                _ => attach_raw(&mut programs, name),
            };
            let program = match raw {
                Some(link) => Attached::Raw { _link: link },
                None => Attached::Record { _event: attach(&mut programs, name, format.id)? },
            };
            attached.push(((*name).to_owned(), program));
        }
        Ok(KernelCounts { programs, attached, ended: Vec::new() })
    }

    /// Counts this thread's exits too.
    pub fn add(&mut self, thread: u32) -> Result<()> {
        self.threads()?.insert(thread, *RawThread::new(), 0).map_err(|error| refused(&error))
    }

    /// A thread has ended: its number may be another's soon.
    pub fn leave(&mut self, thread: u32) -> Result<()> {
        let mut threads = self.threads()?;
        let last = threads.get(&thread, 0).map_err(|error| refused(&error))?;
        threads.remove(&thread).map_err(|error| refused(&error))?;
        if last.events > 0 {
            self.ended.push(last);
        }
        Ok(())
    }

    fn threads(&mut self) -> Result<HashMap<&mut MapData, u32, RawThread>> {
        let map = self.programs.map_mut("threads").ok_or_else(|| refused("the programs have no threads"))?;
        map.try_into().map_err(|error: MapError| refused(&error))
    }

    /// Begins or ends to count, for all threads at once.
    pub fn switch(&mut self, on: bool) -> Result<()> {
        // The programs have one variable.
        let map = self.programs.map_mut(".bss").ok_or_else(|| refused("the programs have no switch"))?;
        let mut variable: Array<&mut MapData, u32> =
            map.try_into().map_err(|error: MapError| refused(&error))?;
        variable.set(0, u32::from(on), 0).map_err(|error| refused(&error))
    }

    /// Ends one of the programs, which says nothing here.
    pub fn spare(&mut self, name: &str) {
        self.attached.retain(|(own, _)| own != name);
    }

    /// What was counted so far, of sites too if `sites` is set: they are many.
    pub fn collect(&self, sites: bool) -> Result<(Profile, WatchCounts)> {
        let mut profile = Profile::default();
        profile.switches = true;
        let mut seen = WatchCounts::default();
        let mut take = |thread: &RawThread| {
            take_thread(&mut profile, thread);
            seen.counted += thread.exits;
            seen.events += thread.events;
            seen.threads += 1;
        };
        self.ended.iter().for_each(&mut take);
        for thread in self.map::<u32, RawThread>("threads")?.iter() {
            take(&thread.map_err(|error| refused(&error))?.1);
        }
        if sites {
            for (name, crowded) in [("sites", false), ("crowded", true)] {
                for site in self.map::<RawSite, RawCounts>(name)?.iter() {
                    let (site, counts) = site.map_err(|error| refused(&error))?;
                    take_site(&mut profile, &site, &counts, crowded);
                }
            }
            for run in self.map::<RawRun, RawRunCounts>("runs")?.iter() {
                let (run, counts) = run.map_err(|error| refused(&error))?;
                profile.runs.add(run.run(), counts.counts());
            }
        }
        Ok((profile, seen))
    }

    fn map<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> Result<HashMap<&MapData, K, V>> {
        let map = self.programs.map(name).ok_or_else(|| refused(&format!("the programs have no {name}")))?;
        map.try_into().map_err(|error: MapError| refused(&error))
    }
}

/// The cheaper program of a tracepoint; nothing where there is none, or where the kernel refuses it.
fn attach_raw(programs: &mut Ebpf, name: &str) -> Option<RawTracePointLink> {
    let program: &mut RawTracePoint = programs.program_mut(&format!("raw_{name}"))?.try_into().ok()?;
    program.load().ok()?;
    let link = program.attach(name).ok()?;
    program.take_link(link).ok()
}

/// The program that reads the records of a tracepoint.
fn attach(programs: &mut Ebpf, name: &str, tracepoint: u64) -> Result<File> {
    let program = programs.program_mut(name).ok_or_else(|| refused(&format!("no program {name}")))?;
    let program: &mut TracePoint = program.try_into().map_err(|error: ProgramError| refused(&error))?;
    program.load().map_err(|error| refused(&error))?;
    let program = program.fd().map_err(|error| refused(&error))?;
    run_program(tracepoint, program).map_err(ExitsError::os("attaching a program"))
}

/// What is kept of a thread, and the exit and run that it is in.
fn take_thread(profile: &mut Profile, thread: &RawThread) {
    let mut counts = thread.counts();
    if let Some((site, unfinished)) = thread.unfinished() {
        take_site(profile, &site, &unfinished, false);
        counts.add(unfinished.counts(0));
    }
    if let Some((run, counts)) = thread.run() {
        profile.runs.add(run.run(), counts.counts());
    }
    if thread.vcpu_known == VCPU_KNOWN {
        profile.add_vcpu(thread.vcpu, counts, thread.halted_ns);
    }
    for (vector, count) in (0u8..=255).zip(thread.vectors).filter(|(_, count)| *count > 0) {
        profile.add_interrupts(vector, count);
    }
    if thread.lost > 0 {
        profile.add_unplaced(thread.lost);
    }
    // Entries tell the vCPU too.
    profile.whole |= thread.exits > 0 || thread.vcpu_known != 0;
    profile.told_by_kvm |= thread.consequences > 0;
    profile.spin_windows += thread.spin_windows;
    profile.runs.crowded += thread.runs_crowded;
    profile.ports[0] += thread.ports_by_exit;
    profile.ports[1] += thread.ports_by_kvm;
}

fn take_site(profile: &mut Profile, site: &RawSite, counts: &RawCounts, crowded: bool) {
    if counts.count == 0 {
        return;
    }
    if crowded {
        profile.crowded += counts.count;
    }
    if site.is_consequence() {
        return profile.add_consequence(site.detail(), counts.count);
    }
    let timed = if site.step == UNTIMED { 0 } else { counts.count };
    let steps = match site.step {
        UNTIMED => None,
        ANY_STEP => Some((None, counts.max_ns)),
        step => Some((Some(step), counts.max_ns)),
    };
    profile.add_site(site.site(crowded), counts.counts(timed), steps);
}

fn refused(why: &(impl ToString + ?Sized)) -> ExitsError {
    ExitsError::Programs(why.to_string())
}
