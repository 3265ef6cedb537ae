//! What a core and its owner both see: the switches and the meters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use ioplane_device::CoreId;
use ioplane_device::clock::Clock;
use ioplane_scheduler::{CoreObjective, ObjectiveReport};

use crate::counts::{CoreReading, Counts, PublishedCounts};
use crate::settings::{CoreSettings, Notify};
use crate::thread;

/// The life of a core.
pub(crate) const ACTIVE: u8 = 0;
pub(crate) const ENDING: u8 = 1;
pub(crate) const ENDED: u8 = 2;

/// How long what came of an objective stands for the present. A core says it once a second while it has something to do.
const REPORT_FRESH: Duration = Duration::from_millis(2500);

/// No objective, no ceiling.
const NONE: u64 = u64::MAX;

/// How long a published busy share stands for the present.
const FRESH: Duration = Duration::from_millis(100);

/// Tries to read what was published while the core does not write it. Writing takes some 20 ns.
const READS: u32 = 1000;

/// Where the kind of a report begins in its number; below it is what it says in addition.
const KIND: u32 = 60;

/// A report as one number, which its readers see whole.
fn packed(report: ObjectiveReport) -> u64 {
    let (kind, value) = match report {
        ObjectiveReport::Unknown => (0, 0),
        ObjectiveReport::Kept => (1, 0),
        ObjectiveReport::LateByCeiling(permille) => (2, permille.into()),
        ObjectiveReport::LateByLoad(permille) => (3, permille.into()),
        ObjectiveReport::OverCeiling(ns) => (4, ns.min((1 << KIND) - 1)),
    };
    kind << KIND | value
}

fn unpacked(number: u64) -> ObjectiveReport {
    let value = number & ((1 << KIND) - 1);
    match number >> KIND {
        1 => ObjectiveReport::Kept,
        2 => ObjectiveReport::LateByCeiling(value as u32),
        3 => ObjectiveReport::LateByLoad(value as u32),
        4 => ObjectiveReport::OverCeiling(value),
        _ => ObjectiveReport::Unknown,
    }
}

/// One for each core. Switches are written by the owner, meters by the core.
#[derive(Debug)]
pub(crate) struct CoreShared {
    pub(crate) id: CoreId,
    /// The core's.
    clock: Arc<dyn Clock>,
    born: Instant,
    notify: AtomicU8,
    spin_ns: AtomicU64,
    /// [`CoreObjective`]; [`NONE`] where nothing is asked.
    p99_ns: AtomicU64,
    cpu_permille: AtomicU64,
    pub(crate) life: AtomicU8,
    /// Queues are placed here without anybody naming this core.
    pub(crate) open: AtomicBool,
    /// Processor pinned to, or -1.
    pub(crate) cpu: AtomicI64,
    pub(crate) tid: AtomicI32,
    /// Processor time at the end of the thread.
    pub(crate) cpu_ns: AtomicU64,
    /// Odd while what follows is written.
    version: AtomicU64,
    counts: PublishedCounts,
    awake: AtomicU32,
    permille: AtomicU32,
    published_ns: AtomicU64,
    /// What came of the objective, and when it was said.
    report: AtomicU64,
    reported_ns: AtomicU64,
    /// The most that was read of the time asleep, and of the time without work.
    read_slept_ns: AtomicU64,
    read_empty_ns: AtomicU64,
}

impl CoreShared {
    /// Of a core that is born now, by its clock.
    pub(crate) fn new(id: CoreId, settings: &CoreSettings, clock: Arc<dyn Clock>) -> Self {
        let shared = CoreShared {
            id,
            born: clock.now(),
            clock,
            notify: AtomicU8::new(settings.notify as u8),
            spin_ns: AtomicU64::new(settings.spin.as_nanos() as u64),
            p99_ns: AtomicU64::new(NONE),
            cpu_permille: AtomicU64::new(NONE),
            life: AtomicU8::new(ACTIVE),
            open: AtomicBool::new(true),
            cpu: AtomicI64::new(-1),
            tid: AtomicI32::new(0),
            cpu_ns: AtomicU64::new(0),
            version: AtomicU64::new(0),
            counts: PublishedCounts::default(),
            awake: AtomicU32::new(0),
            permille: AtomicU32::new(0),
            published_ns: AtomicU64::new(0),
            report: AtomicU64::new(0),
            reported_ns: AtomicU64::new(0),
            read_slept_ns: AtomicU64::new(0),
            read_empty_ns: AtomicU64::new(0),
        };
        shared.set_objective(&settings.objective);
        shared
    }

    pub(crate) fn notify(&self) -> Notify {
        let number = self.notify.load(Ordering::Relaxed);
        [Notify::Polled, Notify::Adaptive]
            .into_iter()
            .find(|notify| *notify as u8 == number)
            .unwrap_or(Notify::Notified)
    }

    pub(crate) fn set_notify(&self, notify: Notify) {
        self.notify.store(notify as u8, Ordering::Relaxed);
    }

    pub(crate) fn spin(&self) -> Duration {
        Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn set_spin(&self, spin: Duration) {
        self.spin_ns.store(spin.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn objective(&self) -> CoreObjective {
        let read = |asked: &AtomicU64| Some(asked.load(Ordering::Relaxed)).filter(|asked| *asked != NONE);
        let cpu_permille = read(&self.cpu_permille).and_then(|permille| u32::try_from(permille).ok());
        CoreObjective { p99_ns: read(&self.p99_ns), cpu_permille }
    }

    pub(crate) fn set_objective(&self, objective: &CoreObjective) {
        self.p99_ns.store(objective.p99_ns.unwrap_or(NONE), Ordering::Relaxed);
        self.cpu_permille.store(objective.cpu_permille.map_or(NONE, u64::from), Ordering::Relaxed);
    }

    /// The core's side: what came of its objective. Once a second.
    pub(crate) fn report(&self, report: ObjectiveReport, now: Instant) {
        self.report.store(packed(report), Ordering::Relaxed);
        self.reported_ns.store(self.age_ns(now), Ordering::Relaxed);
    }

    /// What came of its objective lately. A core that has said nothing for long had too little to do to say.
    fn reported(&self) -> ObjectiveReport {
        let said = Duration::from_nanos(self.reported_ns.load(Ordering::Relaxed));
        let fresh = self.age().saturating_sub(said) <= REPORT_FRESH;
        if fresh { unpacked(self.report.load(Ordering::Relaxed)) } else { ObjectiveReport::default() }
    }

    /// The core's side: shows what it counts, how many slots are awake and how busy it is, as that is at `now`.
    pub(crate) fn publish(&self, counts: &Counts, awake: usize, permille: u32, now: Instant) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.counts.publish(counts);
        self.awake.store(awake as u32, Ordering::Relaxed);
        self.permille.store(permille, Ordering::Relaxed);
        self.published_ns.store(self.age_ns(now), Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// What `read` reads of that, all of one publication. A core that loses its processor while it publishes is not waited for.
    fn published<T>(&self, read: impl Fn() -> T) -> T {
        for _ in 0..READS {
            let version = self.version.load(Ordering::Acquire);
            let seen = read();
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                return seen;
            }
            std::hint::spin_loop();
        }
        read()
    }

    /// How old the core is. Whoever reads looks at the core's clock: what the core says is of that.
    pub(crate) fn age(&self) -> Duration {
        self.clock.now().saturating_duration_since(self.born)
    }

    /// How old the core is at `now`, ns.
    #[inline]
    pub(crate) fn age_ns(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.born).as_nanos() as u64
    }

    pub(crate) fn ended(&self) -> bool {
        self.life.load(Ordering::Acquire) == ENDED
    }

    /// How busy the core is now, in thousandths. A core that has published nothing for long is asleep.
    pub(crate) fn permille(&self) -> u32 {
        let published = Duration::from_nanos(self.published_ns.load(Ordering::Relaxed));
        if self.age().saturating_sub(published) > FRESH { 0 } else { self.permille.load(Ordering::Relaxed) }
    }

    pub(crate) fn read(&self, queues: u32) -> CoreReading {
        let tid = self.tid.load(Ordering::Acquire);
        let cpu_ns = match thread::cpu_time(tid) {
            Some(ns) if tid != 0 && !self.ended() => ns,
            _ => self.cpu_ns.load(Ordering::Relaxed),
        };
        let (reading, published_ns) = self.published(|| {
            let awake = self.awake.load(Ordering::Relaxed);
            let reading = self.counts.read(CoreReading { awake, ..CoreReading::default() });
            (reading, self.published_ns.load(Ordering::Relaxed))
        });
        let age_ns = self.age().as_nanos() as u64;
        let (slept_ns, empty_ns) = self.idle(&reading, published_ns, age_ns);
        CoreReading {
            core: self.id.0,
            cpu: usize::try_from(self.cpu.load(Ordering::Relaxed)).ok(),
            notify: self.notify(),
            objective: self.reported(),
            queues,
            busy_permille: self.permille(),
            cpu_ns,
            age_ns,
            slept_ns,
            empty_ns,
            ..reading
        }
    }

    /// The time asleep, and the time awake without work, as of `age_ns`. `reading` is what was published at `published_ns`. Neither ever falls: one that was
    /// asleep may have woken and not published that yet.
    fn idle(&self, reading: &CoreReading, published_ns: u64, age_ns: u64) -> (u64, u64) {
        // It says so before it sleeps for long, and nothing more until it wakes.
        let sleeps = reading.awake == 0 && published_ns > 0;
        let sleeps_ns = if sleeps { age_ns.saturating_sub(published_ns) } else { 0 };
        let empty_ns = published_ns.saturating_sub(reading.busy_ns.saturating_add(reading.slept_ns));
        let rises = |most: &AtomicU64, now: u64| most.fetch_max(now, Ordering::Relaxed).max(now);
        (rises(&self.read_slept_ns, reading.slept_ns + sleeps_ns), rises(&self.read_empty_ns, empty_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_it_was_said() {
        use ObjectiveReport::*;
        for report in [Unknown, Kept, LateByCeiling(999), LateByLoad(11), OverCeiling(1 << 40)] {
            assert_eq!(unpacked(packed(report)), report);
        }
        assert_eq!(unpacked(packed(OverCeiling(u64::MAX))), OverCeiling((1 << KIND) - 1));
    }
}
