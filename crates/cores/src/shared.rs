//! What a core and its owner both see: the switches and the meters.

use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::CoreId;

use crate::settings::Notify;
use crate::thread;

/// Whether a core is to end.
pub(crate) const STAY: u8 = 0;
pub(crate) const LEAVE: u8 = 1;
pub(crate) const LEFT: u8 = 2;

/// How long a published busy share stands for the present.
const FRESH: Duration = Duration::from_millis(100);

/// One for each core. Switches are written by the owner, meters by the core.
#[derive(Debug)]
pub(crate) struct CoreShared {
    pub(crate) id: CoreId,
    pub(crate) born: Instant,
    polled: AtomicU8,
    spin_ns: AtomicU64,
    pub(crate) leave: AtomicU8,
    /// Processor pinned to, or -1.
    pub(crate) cpu: AtomicI64,
    pub(crate) tid: AtomicI32,
    /// Processor time at the end of the thread.
    pub(crate) cpu_ns: AtomicU64,
    turns: AtomicU64,
    steps: AtomicU64,
    busy_turns: AtomicU64,
    units: AtomicU64,
    bytes: AtomicU64,
    glances: AtomicU64,
    sleeps: AtomicU64,
    naps: AtomicU64,
    wakes: AtomicU64,
    orders: AtomicU64,
    busy_ns: AtomicU64,
    slept_ns: AtomicU64,
    awake: AtomicU32,
    permille: AtomicU32,
    published_ns: AtomicU64,
}

/// What a core counts, as plain numbers of its own.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) turns: u64,
    pub(crate) steps: u64,
    pub(crate) busy_turns: u64,
    pub(crate) units: u64,
    pub(crate) bytes: u64,
    pub(crate) glances: u64,
    pub(crate) sleeps: u64,
    pub(crate) naps: u64,
    pub(crate) wakes: u64,
    pub(crate) orders: u64,
    pub(crate) busy_ns: u64,
    pub(crate) slept_ns: u64,
    pub(crate) awake: u32,
    pub(crate) permille: u32,
}

impl CoreShared {
    pub(crate) fn new(id: CoreId, notify: Notify, spin: Duration) -> Self {
        CoreShared {
            id,
            born: Instant::now(),
            polled: AtomicU8::new((notify == Notify::Polled) as u8),
            spin_ns: AtomicU64::new(spin.as_nanos() as u64),
            leave: AtomicU8::new(STAY),
            cpu: AtomicI64::new(-1),
            tid: AtomicI32::new(0),
            cpu_ns: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            busy_turns: AtomicU64::new(0),
            units: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            glances: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            naps: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            orders: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            slept_ns: AtomicU64::new(0),
            awake: AtomicU32::new(0),
            permille: AtomicU32::new(0),
            published_ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn notify(&self) -> Notify {
        if self.polled.load(Ordering::Relaxed) != 0 { Notify::Polled } else { Notify::Notified }
    }

    pub(crate) fn set_notify(&self, notify: Notify) {
        self.polled.store((notify == Notify::Polled) as u8, Ordering::Relaxed);
    }

    pub(crate) fn spin(&self) -> Duration {
        Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn set_spin(&self, spin: Duration) {
        self.spin_ns.store(spin.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The core's side: shows the counts as they are at `now`.
    pub(crate) fn publish(&self, counts: &Counts, now: Instant) {
        let Counts {
            turns,
            steps,
            busy_turns,
            units,
            bytes,
            glances,
            sleeps,
            naps,
            wakes,
            orders,
            busy_ns,
            slept_ns,
            awake,
            permille,
        } = *counts;
        self.turns.store(turns, Ordering::Relaxed);
        self.steps.store(steps, Ordering::Relaxed);
        self.busy_turns.store(busy_turns, Ordering::Relaxed);
        self.units.store(units, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.glances.store(glances, Ordering::Relaxed);
        self.sleeps.store(sleeps, Ordering::Relaxed);
        self.naps.store(naps, Ordering::Relaxed);
        self.wakes.store(wakes, Ordering::Relaxed);
        self.orders.store(orders, Ordering::Relaxed);
        self.busy_ns.store(busy_ns, Ordering::Relaxed);
        self.slept_ns.store(slept_ns, Ordering::Relaxed);
        self.awake.store(awake, Ordering::Relaxed);
        self.permille.store(permille, Ordering::Relaxed);
        self.published_ns
            .store(now.saturating_duration_since(self.born).as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self) -> bool {
        self.leave.load(Ordering::Acquire) == LEFT
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

    pub(crate) fn read(&self, seats: u32) -> CoreReading {
        let tid = self.tid.load(Ordering::Acquire);
        let cpu_ns = match thread::cpu_time(tid) {
            Some(ns) if tid != 0 && !self.ended() => ns,
            _ => self.cpu_ns.load(Ordering::Relaxed),
        };
        CoreReading {
            core: self.id.0,
            cpu: usize::try_from(self.cpu.load(Ordering::Relaxed)).ok(),
            polled: self.notify() == Notify::Polled,
            seats,
            awake: self.awake.load(Ordering::Relaxed),
            busy_permille: self.permille(),
            turns: self.turns.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
            busy_turns: self.busy_turns.load(Ordering::Relaxed),
            units: self.units.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            glances: self.glances.load(Ordering::Relaxed),
            sleeps: self.sleeps.load(Ordering::Relaxed),
            naps: self.naps.load(Ordering::Relaxed),
            wakes: self.wakes.load(Ordering::Relaxed),
            orders: self.orders.load(Ordering::Relaxed),
            busy_ns: self.busy_ns.load(Ordering::Relaxed),
            slept_ns: self.slept_ns.load(Ordering::Relaxed),
            cpu_ns,
            age_ns: self.born.elapsed().as_nanos() as u64,
        }
    }
}

/// The meters of one core at one moment; counts are since it was started and at most some 10 ms old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreReading {
    /// Its number.
    pub core: u32,
    /// The processor it is pinned to; `None` if it is not, or could not be.
    pub cpu: Option<usize>,
    /// [`Notify::Polled`], or else notified.
    pub polled: bool,
    /// Queues that sit here, or are on their way.
    pub seats: u32,
    /// Queues that the core looks at each turn.
    pub awake: u32,
    /// Thousandths of the last tens of milliseconds spent in turns that found work.
    pub busy_permille: u32,
    /// Rounds through the awake queues.
    pub turns: u64,
    /// Polls of single queues, in turns and between them, whether or not they found work.
    pub steps: u64,
    /// Those that found work.
    pub busy_turns: u64,
    /// Requests and completions handled.
    pub units: u64,
    /// What pollers say that these cost, in bytes that could have been copied meanwhile.
    pub bytes: u64,
    /// Times that it asked the kernel, for all resting queues at once, whether one was woken while others are awake.
    pub glances: u64,
    /// Times that it went to sleep until woken.
    pub sleeps: u64,
    /// Times that it slept for a millisecond at most, because a poller could not promise to wake it.
    pub naps: u64,
    /// Times that it was woken by a descriptor.
    pub wakes: u64,
    /// Orders carried out.
    pub orders: u64,
    /// Time in turns that found work, ns.
    pub busy_ns: u64,
    /// Time asleep, ns.
    pub slept_ns: u64,
    /// Processor time of the thread, user and system, ns.
    pub cpu_ns: u64,
    /// Time since it was started, ns.
    pub age_ns: u64,
}
