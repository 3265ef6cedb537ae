//! Watching a VM: its vCPU threads' tracepoints go into a profile, as they come.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use ioplane_kvmstat::{Totals, Vm};
use ioplane_plain::{FileError, file_text};

use crate::count::KernelCounts;
use crate::error::{ExitsError, Result};
use crate::event::{Decoder, Event};
use crate::perf::{PerfRecord, ThreadEvents, ThreadSamples};
use crate::profile::{Profile, Thread};
use crate::queues::QueuePorts;
use crate::seen::WatchCounts;
use crate::slices::Slices;
use crate::trace::{TraceInstance, Traced};
use crate::tracefs::Tracefs;
use crate::vmm::{INTERVAL_NS, VmmSamples, VmmTime};

/// Why threads are not looked at in user space.
const UNNAMED: &str =
    "none of its threads has the name of a vCPU (QEMU gives them with -name debug-threads=on)";
/// A ring of two megabytes for each thread, down to 32 KiB where memory may not be locked.
const LARGEST: u32 = 9;
const SMALLEST: u32 = 3;
/// What was tried where there is no room for the smallest.
const CROWDED: &str = "locking memory for the ring of a vCPU's thread (sysctl kernel.perf_event_mlock_kb and the process's own limit, ulimit -l, bound it)";
/// How often new threads are looked for.
const RESCAN: Duration = Duration::from_millis(500);
/// What is not needed where exits tell their ports by themselves, but of ports whose values tell a queue.
const PORTS: &str = "kvm_pio";
/// What says nothing where `kvm_exit` never fires.
const USER_SPACE: &str = "kvm_userspace_exit";
/// What a whole watch does not need: a read that the VMM must answer is told when it is asked, and again, with the same address, when it has
/// answered and before the guest goes on. A slice of a sample may end between the two.
const MMIO: &str = "kvm_mmio";
const ANSWERED: &CStr = c"type != 0";
/// So many threads are watched.
const THREADS: usize = 2048;

/// Where events come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Programs in the kernel for all of the time, perf events for a sample and where programs are refused, tracefs where both are.
    #[default]
    Any,
    /// Programs in the kernel (BPF) only, which count there.
    Programs,
    /// Perf events only.
    Perf,
    /// An instance of tracefs.
    Tracefs,
}

/// How to watch.
#[derive(Clone, Copy, Debug)]
pub struct WatchOptions {
    /// Record one part of the time of so many, in slices at random; 1 for all of it.
    pub sample: u64,
    /// Where events come from.
    pub source: Source,
    /// Legacy virtio devices whose queues are told.
    pub queues: QueuePorts,
}

impl Default for WatchOptions {
    fn default() -> WatchOptions {
        WatchOptions { sample: 1, source: Source::Any, queues: QueuePorts::default() }
    }
}

/// Who records the events of all threads.
enum Collector {
    /// Each thread's own ring.
    Perf,
    Tracefs(TraceInstance),
    Programs(KernelCounts),
}

struct Watched {
    /// Nothing where the events of all threads are recorded together.
    events: Option<ThreadEvents>,
    /// Nothing where they may not be had.
    samples: Option<ThreadSamples>,
    thread: Thread,
}

/// A VM under observation. The VM never notices, except that its exits take a little longer.
pub struct Watch {
    vm: Vm,
    decoder: Decoder,
    options: WatchOptions,
    threads: BTreeMap<u32, Watched>,
    collector: Collector,
    /// Why the collectors before this one were not taken.
    forbidden: Option<String>,
    profile: Profile,
    seen: WatchCounts,
    before: Option<Totals>,
    after: Option<Totals>,
    begun: Instant,
    scanned: Instant,
    /// Whether threads that come are counted at once.
    on: bool,
    /// Tracepoints that are asked for no more: each event costs the guest time.
    dropped: Vec<&'static str>,
    /// For a sample.
    slices: Option<Slices>,
    /// What could not be watched, and why.
    problem: Option<String>,
    vmm: VmmSamples,
    /// Why not all threads are sampled.
    unsampled: Option<String>,
}

impl Watch {
    /// Begins to watch.
    pub fn start(vm: Vm, options: WatchOptions) -> Result<Watch> {
        let tracefs = Tracefs::find()?;
        let mut decoder = Decoder::new(&tracefs)?;
        decoder.queues = options.queues;
        // What killed ones have left costs every VM of this host.
        crate::claim::sweep(tracefs.root());
        more_descriptors();
        let now = Instant::now();
        let mut watch = Watch {
            decoder,
            options: WatchOptions { sample: options.sample.max(1), ..options },
            threads: BTreeMap::new(),
            collector: Collector::Perf,
            forbidden: None,
            profile: Profile::default(),
            seen: WatchCounts::default(),
            before: None,
            after: None,
            begun: now,
            scanned: now,
            on: false,
            dropped: Vec::new(),
            slices: None,
            problem: None,
            vmm: VmmSamples::new(vm.pid),
            unsampled: None,
            vm,
        };
        watch.choose(&tracefs, options.source)?;
        if watch.threads.is_empty() {
            return Err(ExitsError::Ended(watch.vm.pid));
        }
        // Perf tells when a thread loses its processor, an instance of tracefs does not.
        watch.profile.switches = !matches!(watch.collector, Collector::Tracefs(_));
        // All is open and off: KVM's count and ours begin as close to each other as can be.
        watch.before = Totals::read(&watch.vm);
        watch.on = true;
        match watch.slices {
            Some(_) => watch.slice()?,
            None => watch.enable()?,
        }
        match &mut watch.collector {
            Collector::Tracefs(trace) => trace.enable()?,
            Collector::Programs(counts) => counts.switch(true)?,
            Collector::Perf => {}
        }
        watch.begun = Instant::now();
        watch.seen.slack = watch.since(watch.before.as_ref());
        Ok(watch)
    }

    /// Takes the first collector that may be used, and watches the threads that there are by it.
    fn choose(&mut self, tracefs: &Tracefs, source: Source) -> Result<()> {
        let names = self.decoder.names();
        // A sample is of moments in which everything is recorded.
        if source == Source::Programs && self.options.sample > 1 {
            return Err(ExitsError::Programs(
                "programs take no sample: leave out --sample, or --source bpf".into(),
            ));
        }
        if source == Source::Programs || source == Source::Any && self.options.sample == 1 {
            let counting = KernelCounts::new(tracefs, &names, &self.options.queues).and_then(|counts| {
                self.collector = Collector::Programs(counts);
                self.scan()
            });
            match counting {
                Ok(()) => return Ok(()),
                Err(error) if source == Source::Programs => return Err(error),
                Err(error) => self.unchoose(error.to_string()),
            }
        }
        if source != Source::Tracefs {
            let recording = self.scan();
            if recording.is_ok() && self.options.sample > 1 {
                self.slices = Some(Slices::new(self.options.sample, Instant::now()));
            }
            let Err(error) = recording else { return Ok(()) };
            let refused = matches!(
                &error,
                ExitsError::Forbidden { .. }
                    | ExitsError::Os { .. }
                    | ExitsError::File(FileError::Forbidden(_))
            );
            if source == Source::Perf || !refused {
                return Err(error);
            }
            // Some threads may have been opened before the one that was refused.
            self.unchoose(forbidden());
            // If that fails too, both reasons are given.
            let trace = TraceInstance::new(tracefs.root(), names)
                .map_err(|second| ExitsError::Both { perf: Box::new(error), tracefs: Box::new(second) })?;
            self.collector = Collector::Tracefs(trace);
        } else {
            self.collector = Collector::Tracefs(TraceInstance::new(tracefs.root(), names)?);
        }
        // All is recorded there, and nothing left out.
        self.options.sample = 1;
        self.scan()?;
        if let Collector::Tracefs(trace) = &self.collector {
            // Where that fails, as below, it costs a little more.
            let _ = trace.filter_event(MMIO, &ANSWERED.to_string_lossy());
        }
        Ok(())
    }

    /// Goes back to nothing, since a collector was refused.
    fn unchoose(&mut self, why: String) {
        self.threads.clear();
        (self.seen, self.collector) = (WatchCounts::default(), Collector::Perf);
        self.forbidden = Some(match self.forbidden.take() {
            Some(before) => format!("{before}; {why}"),
            None => why,
        });
    }

    /// The VM.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Reads what comes, for about `time`; says whether the VM is still there.
    pub fn turn(&mut self, time: Duration) -> Result<bool> {
        let end = Instant::now() + time;
        loop {
            let now = Instant::now();
            let left = end.saturating_duration_since(now).min(RESCAN);
            self.read_for(self.slices.as_ref().map_or(left, |slices| slices.left(now).min(left)))?;
            self.lean();
            self.slice()?;
            if self.scanned.elapsed() >= RESCAN {
                if let Err(error) = self.scan() {
                    // What is seen of the others is worth something.
                    self.problem = Some(format!("not all of the VM's threads are watched: {error}"));
                }
                self.gather(false)?;
            }
            if self.threads.is_empty() {
                return Ok(false);
            }
            if Instant::now() >= end {
                return Ok(true);
            }
        }
    }

    /// Brings the profile up to date, where it is counted elsewhere.
    pub fn refresh(&mut self) -> Result<()> {
        self.vmm.read_names();
        self.gather(true)
    }

    fn gather(&mut self, sites: bool) -> Result<()> {
        if let Collector::Programs(counts) = &self.collector {
            let (profile, seen) = counts.collect(sites)?;
            (self.profile, self.seen) = (profile, WatchCounts { slack: self.seen.slack, ..seen });
        }
        Ok(())
    }

    /// Ends what the profile does not need.
    fn lean(&mut self) {
        if self.profile.tells_ports() {
            self.spare(PORTS);
        }
        if self.profile.is_by_consequence() {
            self.spare(USER_SPACE);
        }
    }

    fn spare(&mut self, name: &'static str) {
        if self.dropped.contains(&name) {
            return;
        }
        self.dropped.push(name);
        // Where that fails it costs a little more.
        if let Some(index) = self.decoder.names().iter().position(|own| *own == name) {
            for events in self.threads.values().filter_map(|watched| watched.events.as_ref()) {
                self.spare_member(events, index, name);
            }
        }
        let needed = self.needed_still(name);
        match (&mut self.collector, needed) {
            (Collector::Tracefs(trace), Some(filter)) => drop(trace.filter_event(name, &filter)),
            (Collector::Tracefs(trace), None) => drop(trace.drop_event(name)),
            (Collector::Programs(counts), None) => counts.spare(name),
            // They look whether an exit's port is one of these.
            (Collector::Programs(_), Some(_)) | (Collector::Perf, _) => {}
        }
    }

    /// Which events of a tracepoint that is spared are asked for still.
    fn needed_still(&self, name: &str) -> Option<String> {
        (name == PORTS && !self.options.queues.is_empty()).then(|| self.options.queues.filter())
    }

    fn spare_member(&self, events: &ThreadEvents, index: usize, name: &str) {
        let filter = self.needed_still(name).and_then(|filter| CString::new(filter).ok());
        let _ = match filter {
            Some(filter) => events.filter_member(index, &filter),
            None => events.drop_member(index),
        };
    }

    fn enable(&self) -> Result<()> {
        self.switch_samples(true);
        let mut events = self.threads.values().filter_map(|watched| watched.events.as_ref());
        events.try_for_each(ThreadEvents::enable).map_err(ExitsError::os("starting perf events"))
    }

    /// Where that fails there are none.
    fn switch_samples(&self, on: bool) {
        for samples in self.threads.values().filter_map(|watched| watched.samples.as_ref()) {
            let _ = samples.switch(on);
        }
    }

    fn disable(&self) -> Result<()> {
        self.switch_samples(false);
        let mut events = self.threads.values().filter_map(|watched| watched.events.as_ref());
        events.try_for_each(ThreadEvents::disable).map_err(ExitsError::os("stopping perf events"))
    }

    /// Begins or ends a slice of a sample, if it is time to. Every thread is switched on and off in the same order, and so is on for
    /// as long as the others.
    fn slice(&mut self) -> Result<()> {
        let now = Instant::now();
        let Some(slices) = self.slices.as_mut().filter(|slices| slices.left(now).is_zero()) else {
            return Ok(());
        };
        if slices.is_on() {
            slices.end(now);
            let since = crate::trace::monotonic();
            self.disable()?;
            for id in self.threads.keys().copied().collect::<Vec<_>>() {
                self.drain(id);
            }
            for watched in self.threads.values_mut() {
                self.profile.cut(&mut watched.thread, since);
            }
        } else {
            slices.begin(now);
            for watched in self.threads.values_mut() {
                self.profile.fresh(&mut watched.thread);
            }
            self.enable()?;
        }
        Ok(())
    }

    /// The profile so far; where the kernel counts, as of the last [`Watch::refresh`] or [`Watch::stop`].
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// How much was seen so far.
    pub fn seen(&self) -> WatchCounts {
        let mut seen = self.seen;
        for events in self.threads.values().filter_map(|watched| watched.events.as_ref()) {
            add_counts(&mut seen, events);
        }
        if let Some(slices) = &self.slices {
            seen.recorded = slices.on(Instant::now());
        }
        seen
    }

    /// Why events come by tracefs and not by perf, if they do.
    pub fn fallback(&self) -> Option<String> {
        let why = self.forbidden.as_deref().unwrap_or("it was asked for");
        matches!(self.collector, Collector::Tracefs(_)).then(|| why.to_owned())
    }

    /// Why perf events record what programs in the kernel would have counted for less, if they do.
    pub fn refused(&self) -> Option<&str> {
        self.forbidden.as_deref().filter(|_| matches!(self.collector, Collector::Perf))
    }

    /// Where the vCPU threads were in the VMM's user space, as of the last [`Watch::refresh`] or [`Watch::stop`]; nothing where no thread was
    /// found there.
    pub fn vmm(&self) -> Option<VmmTime> {
        Some(self.vmm.time()).filter(|time| time.samples > 0)
    }

    /// Why that is not known, or not of all threads.
    pub fn unsampled(&self) -> Option<&str> {
        self.unsampled.as_deref()
    }

    /// What could not be watched, and why.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// How long it has been watched.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Of how much time one part is recorded.
    pub fn sample(&self) -> u64 {
        self.options.sample
    }

    /// Tracepoints that this kernel does not have.
    pub fn missing(&self) -> &[&'static str] {
        &self.decoder.missing
    }

    /// Ends the watch and reads what is left. The time ends here.
    pub fn stop(&mut self) -> Result<Duration> {
        let elapsed = self.begun.elapsed();
        let before = ioplane_kvmstat::exits_of(&self.vm);
        if let Some(slices) = &mut self.slices {
            slices.end(Instant::now());
        }
        self.disable()?;
        match &mut self.collector {
            Collector::Tracefs(trace) => trace.disable()?,
            Collector::Programs(counts) => counts.switch(false)?,
            Collector::Perf => {}
        }
        self.after = Totals::read_at_once(&self.vm);
        let after = self.after.as_ref().and_then(Totals::exits);
        self.seen.slack += after.zip(before).map_or(0, |(after, before)| after.saturating_sub(before));
        while self.drain_trace(true)? {}
        for id in self.threads.keys().copied().collect::<Vec<_>>() {
            self.part(id);
        }
        self.refresh()?;
        Ok(elapsed)
    }

    /// What KVM itself has counted from the beginning to the end of the watch, or until now.
    pub fn kernel(&self) -> Option<Totals> {
        let now = || Totals::read_at_once(&self.vm);
        self.after.clone().or_else(now)?.since(self.before.as_ref()?)
    }

    /// Exits that KVM has counted since then.
    fn since(&self, before: Option<&Totals>) -> u64 {
        let now = ioplane_kvmstat::exits_of(&self.vm);
        now.zip(before.and_then(Totals::exits)).map_or(0, |(now, before)| now.saturating_sub(before))
    }

    fn read_for(&mut self, time: Duration) -> Result<()> {
        self.read_events(time)?;
        for samples in self.threads.values_mut().filter_map(|watched| watched.samples.as_mut()) {
            self.vmm.drain(samples);
        }
        Ok(())
    }

    fn read_events(&mut self, time: Duration) -> Result<()> {
        if let Collector::Tracefs(trace) = &self.collector {
            let mut fds: Vec<PollFd<'_>> =
                trace.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            wait(&mut fds, time)?;
            // More of it at once costs less.
            self.drain_trace(false)?;
            return Ok(());
        }
        let ids: Vec<u32> = self.threads.keys().copied().collect();
        let mut ended = Vec::new();
        {
            let mut fds: Vec<PollFd<'_>> = self
                .threads
                .values()
                .filter_map(|watched| watched.events.as_ref())
                .map(|events| PollFd::from_borrowed_fd(events.fd(), PollFlags::IN))
                .collect();
            wait(&mut fds, time)?;
            for (id, fd) in ids.iter().zip(&fds) {
                if fd.revents().intersects(PollFlags::HUP | PollFlags::ERR) {
                    ended.push(*id);
                }
            }
        }
        for id in &ids {
            self.drain(*id);
        }
        for id in ended {
            self.part(id);
        }
        Ok(())
    }

    fn drain(&mut self, id: u32) {
        let Some(Watched { events: Some(events), thread, .. }) = self.threads.get_mut(&id) else { return };
        let (profile, seen, decoder) = (&mut self.profile, &mut self.seen, &self.decoder);
        events.drain(|record| match record {
            PerfRecord::Event(at, bytes) => {
                seen.records += 1;
                if let Some(event) = decoder.decode(bytes) {
                    profile.take(thread, at, event);
                }
            }
            PerfRecord::Lost(count) => profile.lost(thread, count),
            PerfRecord::Out(at, preempted) => profile.take(thread, at, Event::SwitchedOut { preempted }),
            PerfRecord::In(at) => profile.take(thread, at, Event::SwitchedIn),
        });
    }

    /// A thread has ended, or is left.
    fn part(&mut self, id: u32) {
        self.drain(id);
        if let Some(mut watched) = self.threads.remove(&id) {
            if let Some(samples) = &mut watched.samples {
                self.vmm.drain(samples);
            }
            if let Collector::Programs(counts) = &mut self.collector
                && let Err(error) = counts.leave(id)
            {
                self.problem = Some(format!("what thread {id} did is not known: {error}"));
            }
            self.profile.end(&mut watched.thread);
            if let Some(events) = &watched.events {
                add_counts(&mut self.seen, events);
            }
        }
    }

    /// What has come by tracefs, all of it if nothing more is recorded; whether there is more.
    fn drain_trace(&mut self, ended: bool) -> Result<bool> {
        let Collector::Tracefs(trace) = &mut self.collector else { return Ok(false) };
        let (found, more) = trace.drain(&self.decoder, ended)?;
        let losses = trace.lost();
        for Traced { at, thread, event } in found {
            let Some(watched) = self.threads.get_mut(&thread) else { continue };
            self.seen.records += 1;
            self.seen.events += 1;
            if let Some(event) = event {
                self.seen.counted += u64::from(matches!(event, Event::Exit { .. }));
                self.profile.take(&mut watched.thread, at, event);
            }
        }
        let before = self.seen.losses;
        match losses {
            Ok(losses) => self.seen.losses = losses,
            Err(error) => self.problem = Some(format!("how much tracefs has lost is not known: {error}")),
        }
        self.profile.lost_records += self.seen.losses.events().saturating_sub(before.events());
        if self.seen.losses != before {
            // Whose records they were is not known.
            for watched in self.threads.values_mut() {
                self.profile.lost(&mut watched.thread, 0);
            }
        }
        Ok(more)
    }

    /// Looks for threads that are not watched yet.
    fn scan(&mut self) -> Result<()> {
        self.scanned = Instant::now();
        let mut threads = self.vm.threads();
        let named = threads.iter().any(|thread| thread.is_vcpu_by_name());
        if named {
            threads.retain(|thread| thread.is_vcpu_by_name());
        }
        // Others take no exits, but they are in user space too.
        let told_apart = named || threads.iter().filter(|thread| !thread.is_kernels_by_name()).count() == 1;
        let (names, tracepoints) = (self.decoder.names(), self.decoder.tracepoints());
        if !matches!(self.collector, Collector::Perf) {
            // Perf tells of a thread's end by itself.
            let gone = |id: &&u32| !threads.iter().any(|thread| thread.id == **id);
            let gone: Vec<u32> = self.threads.keys().filter(gone).copied().collect();
            // All that they did is in the rings.
            while !gone.is_empty() && self.drain_trace(true)? {}
            for id in gone {
                self.part(id);
            }
        }
        let new: Vec<u32> =
            threads.iter().map(|thread| thread.id).filter(|id| !self.threads.contains_key(id)).collect();
        for id in new {
            if self.threads.len() >= THREADS {
                break;
            }
            let events = match &mut self.collector {
                Collector::Tracefs(trace) => {
                    trace.add(id)?;
                    None
                }
                Collector::Programs(counts) => {
                    counts.add(id)?;
                    None
                }
                Collector::Perf => {
                    let Some(events) = open(&tracepoints, id)? else { continue };
                    if let Some(index) = names.iter().position(|name| *name == MMIO)
                        && self.options.sample == 1
                    {
                        let _ = events.filter_member(index, ANSWERED);
                    }
                    let spared = names.iter().enumerate().filter(|(_, name)| self.dropped.contains(name));
                    for (index, name) in spared {
                        self.spare_member(&events, index, name);
                    }
                    if self.on && self.slices.as_ref().is_none_or(Slices::is_on) {
                        events.enable().map_err(ExitsError::os("starting perf events"))?;
                    }
                    Some(events)
                }
            };
            let samples = told_apart.then(|| self.open_samples(id)).flatten();
            if !told_apart {
                self.unsampled = Some(UNNAMED.into());
            }
            self.threads.insert(id, Watched { events, samples, thread: Thread::default() });
            self.seen.threads += 1;
        }
        Ok(())
    }

    /// A thread's place in user space from now on, if it may be had: a profile is worth something without.
    fn open_samples(&mut self, id: u32) -> Option<ThreadSamples> {
        if matches!(self.collector, Collector::Tracefs(_)) {
            return None;
        }
        let on = self.on && self.slices.as_ref().is_none_or(Slices::is_on);
        let begun = ThreadSamples::open(id, INTERVAL_NS).and_then(|samples| {
            on.then(|| samples.switch(true)).transpose()?;
            Ok(samples)
        });
        match begun {
            Ok(samples) => Some(samples),
            Err(error) => {
                self.unsampled = Some(match error.raw_os_error() {
                    // It has ended.
                    Some(libc::ESRCH) => return None,
                    Some(libc::EPERM | libc::EACCES) => forbidden(),
                    Some(libc::ENOMEM) => format!("{CROWDED}: {error}"),
                    _ => error.to_string(),
                });
                None
            }
        }
    }
}

fn wait(fds: &mut [PollFd<'_>], time: Duration) -> Result<()> {
    let time = rustix::time::Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(1),
        tv_nsec: time.subsec_nanos().into(),
    };
    match poll(fds, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(ExitsError::os("waiting for events")(error.into())),
    }
}

fn add_counts(seen: &mut WatchCounts, events: &ThreadEvents) {
    if let Ok(counts) = events.counts() {
        seen.counted += counts.first().copied().unwrap_or(0);
        seen.events += counts.iter().sum::<u64>();
    }
}

/// Opens a thread's events with the largest ring that is allowed; nothing if the thread has ended.
fn open(tracepoints: &[u64], thread: u32) -> Result<Option<ThreadEvents>> {
    let mut order = LARGEST;
    loop {
        match ThreadEvents::open(tracepoints, thread, order) {
            Ok(events) => return Ok(Some(events)),
            Err(error) => match error.raw_os_error() {
                Some(libc::ESRCH) => return Ok(None),
                Some(libc::ENOMEM) if order > SMALLEST => order -= 1,
                Some(libc::ENOMEM) => return Err(ExitsError::Os { what: CROWDED.into(), source: error }),
                Some(libc::ENOSYS) => {
                    let what = "perf_event_open: this kernel has no perf events".into();
                    return Err(ExitsError::Os { what, source: error });
                }
                Some(libc::EPERM | libc::EACCES) => return Err(ExitsError::Forbidden { what: forbidden() }),
                _ => return Err(ExitsError::os("perf_event_open on a vCPU's thread")(error)),
            },
        }
    }
}

fn forbidden() -> String {
    let path = Path::new("/proc/sys/kernel/perf_event_paranoid");
    let paranoid = file_text(path, 64).unwrap_or_else(|_| "unknown".into());
    format!("perf_event_open on the VM's threads (perf_event_paranoid is {})", paranoid.trim())
}

/// A dozen descriptors for each vCPU.
fn more_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Where that fails the usual limit will do for most.
    let _ = setrlimit(Resource::Nofile, wanted);
}
