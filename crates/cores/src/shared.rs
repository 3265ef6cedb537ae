//! What a core and its owner both see: the switches and the meters.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::CoreId;

use crate::counts::{CoreReading, Counts, PublishedCounts};
use crate::settings::Notify;
use crate::thread;

/// The life of a core.
pub(crate) const ACTIVE: u8 = 0;
pub(crate) const ENDING: u8 = 1;
pub(crate) const ENDED: u8 = 2;

/// How long a published busy share stands for the present.
const FRESH: Duration = Duration::from_millis(100);

/// One for each core. Switches are written by the owner, meters by the core.
#[derive(Debug)]
pub(crate) struct CoreShared {
    pub(crate) id: CoreId,
    pub(crate) born: Instant,
    notify: AtomicU8,
    spin_ns: AtomicU64,
    pub(crate) life: AtomicU8,
    /// Queues are placed here without anybody naming this core.
    pub(crate) open: AtomicBool,
    /// Processor pinned to, or -1.
    pub(crate) cpu: AtomicI64,
    pub(crate) tid: AtomicI32,
    /// Processor time at the end of the thread.
    pub(crate) cpu_ns: AtomicU64,
    counts: PublishedCounts,
    awake: AtomicU32,
    permille: AtomicU32,
    published_ns: AtomicU64,
}

impl CoreShared {
    /// `born`: now, by the core's clock.
    pub(crate) fn new(id: CoreId, notify: Notify, spin: Duration, born: Instant) -> Self {
        CoreShared {
            id,
            born,
            notify: AtomicU8::new(notify as u8),
            spin_ns: AtomicU64::new(spin.as_nanos() as u64),
            life: AtomicU8::new(ACTIVE),
            open: AtomicBool::new(true),
            cpu: AtomicI64::new(-1),
            tid: AtomicI32::new(0),
            cpu_ns: AtomicU64::new(0),
            counts: PublishedCounts::default(),
            awake: AtomicU32::new(0),
            permille: AtomicU32::new(0),
            published_ns: AtomicU64::new(0),
        }
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

    /// The core's side: shows what it counts, how many slots are awake and how busy it is, as that is at `now`.
    pub(crate) fn publish(&self, counts: &Counts, awake: usize, permille: u32, now: Instant) {
        self.counts.publish(counts);
        self.awake.store(awake as u32, Ordering::Relaxed);
        self.permille.store(permille, Ordering::Relaxed);
        self.published_ns.store(self.age_ns(now), Ordering::Relaxed);
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
        if self.born.elapsed().saturating_sub(published) > FRESH {
            0
        } else {
            self.permille.load(Ordering::Relaxed)
        }
    }

    pub(crate) fn read(&self, queues: u32) -> CoreReading {
        let tid = self.tid.load(Ordering::Acquire);
        let cpu_ns = match thread::cpu_time(tid) {
            Some(ns) if tid != 0 && !self.ended() => ns,
            _ => self.cpu_ns.load(Ordering::Relaxed),
        };
        self.counts.read(CoreReading {
            core: self.id.0,
            cpu: usize::try_from(self.cpu.load(Ordering::Relaxed)).ok(),
            notify: self.notify(),
            queues,
            awake: self.awake.load(Ordering::Relaxed),
            busy_permille: self.permille(),
            cpu_ns,
            age_ns: self.born.elapsed().as_nanos() as u64,
            ..CoreReading::default()
        })
    }
}
