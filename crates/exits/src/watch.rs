//! Watching a VM: its vCPU threads' tracepoints go into a profile, as they come.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{ExitsError, Result};
use crate::event::Decoder;
use crate::perf::{Record, ThreadEvents};
use crate::profile::{Profile, Thread};
use crate::totals::Totals;
use crate::tracefs::Tracefs;
use crate::vm::Vm;

/// A ring of two megabytes for each thread, down to 32 KiB where memory may not be locked.
const LARGEST: u32 = 9;
const SMALLEST: u32 = 3;
/// How often new threads are looked for.
const RESCAN: Duration = Duration::from_millis(500);
/// So many threads are watched.
const THREADS: usize = 2048;

/// How to watch.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Record every so-many-th exit only, without its time; 1 for all.
    pub sample: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { sample: 1 }
    }
}

/// How much was seen, and how much not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// `kvm_exit` as counted by perf in the kernel, recorded or not.
    pub counted: u64,
    /// Hits of all tracepoints that we asked for, counted likewise.
    pub events: u64,
    /// Records of events that we have read.
    pub records: u64,
    /// Threads that were watched.
    pub threads: usize,
}

struct Watched {
    events: ThreadEvents,
    thread: Thread,
}

/// A VM under observation. The VM never notices, except that its exits take a little longer.
pub struct Watch {
    vm: Vm,
    decoder: Decoder,
    options: Options,
    threads: BTreeMap<u32, Watched>,
    profile: Profile,
    seen: Seen,
    before: Option<Totals>,
    after: Option<Totals>,
    begun: Instant,
    scanned: Instant,
    /// Whether threads that come are counted at once.
    on: bool,
}

impl Watch {
    /// Begins to watch.
    pub fn start(vm: Vm, options: Options) -> Result<Watch> {
        let tracefs = Tracefs::find()?;
        let decoder = Decoder::new(&tracefs)?;
        more_descriptors();
        let now = Instant::now();
        let mut watch = Watch {
            decoder,
            options: Options { sample: options.sample.max(1) },
            threads: BTreeMap::new(),
            profile: Profile::default(),
            seen: Seen::default(),
            before: None,
            after: None,
            begun: now,
            scanned: now,
            on: false,
            vm,
        };
        watch.scan()?;
        if watch.threads.is_empty() {
            return Err(ExitsError::Ended(watch.vm.pid));
        }
        // All is open and off: KVM's count and ours begin as close to each other as can be.
        watch.before = Totals::read(&watch.vm);
        watch.on = true;
        for watched in watch.threads.values() {
            watched.events.enable().map_err(ExitsError::os("starting perf events"))?;
        }
        watch.begun = Instant::now();
        Ok(watch)
    }

    /// The VM.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Reads what comes, for about `time`; says whether the VM is still there.
    pub fn turn(&mut self, time: Duration) -> Result<bool> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            self.read_for(left.min(RESCAN))?;
            if self.scanned.elapsed() >= RESCAN {
                self.scan()?;
            }
            if self.threads.is_empty() {
                return Ok(false);
            }
            if Instant::now() >= end {
                return Ok(true);
            }
        }
    }

    /// The profile so far.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// How much was seen so far.
    pub fn seen(&self) -> Seen {
        let mut seen = self.seen;
        for watched in self.threads.values() {
            add_counts(&mut seen, &watched.events);
        }
        seen
    }

    /// How long it has been watched.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Of how many exits one is recorded.
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
        for watched in self.threads.values() {
            watched.events.disable().map_err(ExitsError::os("stopping perf events"))?;
        }
        self.after = Totals::read_at_once(&self.vm);
        for id in self.threads.keys().copied().collect::<Vec<_>>() {
            self.part(id);
        }
        Ok(elapsed)
    }

    /// What KVM itself has counted from the beginning to the end of the watch, or until now.
    pub fn kernel(&self) -> Option<Totals> {
        let now = || Totals::read_at_once(&self.vm);
        self.after.clone().or_else(now)?.since(self.before.as_ref()?)
    }

    fn read_for(&mut self, time: Duration) -> Result<()> {
        let ids: Vec<u32> = self.threads.keys().copied().collect();
        let mut ended = Vec::new();
        {
            let mut fds: Vec<PollFd<'_>> = self
                .threads
                .values()
                .map(|w| PollFd::from_borrowed_fd(w.events.fd(), PollFlags::IN))
                .collect();
            let time = rustix::time::Timespec {
                tv_sec: time.as_secs().try_into().unwrap_or(1),
                tv_nsec: time.subsec_nanos().into(),
            };
            match poll(&mut fds, Some(&time)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(ExitsError::os("waiting for perf events")(error.into())),
            }
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
        let Some(watched) = self.threads.get_mut(&id) else { return };
        let (profile, seen, decoder) = (&mut self.profile, &mut self.seen, &self.decoder);
        let thread = &mut watched.thread;
        watched.events.drain(|record| match record {
            Record::Event(at, bytes) => {
                seen.records += 1;
                if let Some(event) = decoder.decode(bytes) {
                    profile.take(thread, at, event);
                }
            }
            Record::Lost(count) => profile.lost(thread, count),
        });
    }

    /// A thread has ended, or is left.
    fn part(&mut self, id: u32) {
        self.drain(id);
        if let Some(mut watched) = self.threads.remove(&id) {
            self.profile.end(&mut watched.thread);
            add_counts(&mut self.seen, &watched.events);
        }
    }

    /// Looks for threads that are not watched yet.
    fn scan(&mut self) -> Result<()> {
        self.scanned = Instant::now();
        let mut threads = self.vm.threads();
        if threads.iter().any(|thread| thread.is_vcpu_by_name()) {
            threads.retain(|thread| thread.is_vcpu_by_name());
        }
        let mut tracepoints = self.decoder.tracepoints();
        if self.options.sample > 1 {
            tracepoints.truncate(1);
        }
        let new: Vec<u32> =
            threads.iter().map(|thread| thread.id).filter(|id| !self.threads.contains_key(id)).collect();
        for id in new {
            if self.threads.len() >= THREADS {
                break;
            }
            let Some(events) = open(&tracepoints, id, self.options.sample)? else { continue };
            if self.on {
                events.enable().map_err(ExitsError::os("starting perf events"))?;
            }
            self.threads.insert(id, Watched { events, thread: Thread::default() });
            self.seen.threads += 1;
        }
        Ok(())
    }
}

fn add_counts(seen: &mut Seen, events: &ThreadEvents) {
    if let Ok(counts) = events.counts() {
        seen.counted += counts.first().copied().unwrap_or(0);
        seen.events += counts.iter().sum::<u64>();
    }
}

/// Opens a thread's events with the largest ring that is allowed; nothing if the thread has ended.
fn open(tracepoints: &[u64], thread: u32, period: u64) -> Result<Option<ThreadEvents>> {
    let mut order = LARGEST;
    loop {
        match ThreadEvents::open(tracepoints, thread, period, order) {
            Ok(events) => return Ok(Some(events)),
            Err(error) => match error.raw_os_error() {
                Some(libc::ESRCH) => return Ok(None),
                // Also what a mapping beyond the limit of locked memory gets.
                Some(libc::EPERM | libc::ENOMEM) if order > SMALLEST => order -= 1,
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
    let paranoid = crate::bounded::text(path, 64).unwrap_or_else(|_| "unknown".into());
    format!("perf_event_open on the VM's threads (perf_event_paranoid is {})", paranoid.trim())
}

/// A dozen descriptors for each vCPU.
fn more_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Where that fails the usual limit will do for most.
    let _ = setrlimit(Resource::Nofile, wanted);
}
