//! Whether a queue is polled, armed or held back by a limit, since when, why, how often and for how long: a memory of fixed size for each slot.
//!
//! A queue may go over between armed and polled thousands of times a second, so its core notes no list of that, only sums per reason. One thread writes,
//! with plain stores; any number of others read, and try again when they have met a change.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::limit::LimitUnit;
use crate::polling::{ArmReason, SpinReason};

/// How a core learns of a queue's requests, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum QueueMode {
    /// As the mode of the core says, for all its queues: nothing is decided for this one.
    #[default]
    Fixed,
    /// It is looked at in every turn.
    Polled,
    /// Its driver is asked to kick.
    Armed(ArmReason),
    /// A limit holds its requests back: it is looked at when the next may pass.
    Held(LimitUnit),
}

impl QueueMode {
    /// All of them.
    pub const ALL: [QueueMode; 9] = [
        QueueMode::Fixed,
        QueueMode::Polled,
        QueueMode::Armed(ArmReason::LongGaps),
        QueueMode::Armed(ArmReason::SpunInVain),
        QueueMode::Armed(ArmReason::Ceiling),
        QueueMode::Armed(ArmReason::Objective),
        QueueMode::Armed(ArmReason::SlowDisk),
        QueueMode::Held(LimitUnit::Requests),
        QueueMode::Held(LimitUnit::Bytes),
    ];

    /// Its place in [`QueueMode::ALL`].
    fn place(self) -> usize {
        match self {
            QueueMode::Fixed => 0,
            QueueMode::Polled => 1,
            QueueMode::Armed(ArmReason::LongGaps) => 2,
            QueueMode::Armed(ArmReason::SpunInVain) => 3,
            QueueMode::Armed(ArmReason::Ceiling) => 4,
            QueueMode::Armed(ArmReason::Objective) => 5,
            QueueMode::Armed(ArmReason::SlowDisk) => 6,
            QueueMode::Held(LimitUnit::Requests) => 7,
            QueueMode::Held(LimitUnit::Bytes) => 8,
        }
    }

    /// Whether its driver is asked to kick.
    pub fn is_armed(self) -> bool {
        matches!(self, QueueMode::Armed(_))
    }

    /// Whether a limit holds its requests back.
    pub fn is_held(self) -> bool {
        matches!(self, QueueMode::Held(_))
    }
}

impl fmt::Display for ArmReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ArmReason::LongGaps => "its requests come further apart than polling on is worth",
            ArmReason::SpunInVain => "no request came for as long as it was worth polling",
            ArmReason::Ceiling => "the CPU ceiling of its core forbids polling",
            ArmReason::Objective => {
                "no request came for the core's spin, the most that an objective may take"
            }
            ArmReason::SlowDisk => "its requests have waited for the disk for longer than the core polls",
        })
    }
}

impl fmt::Display for QueueMode {
    /// The reason.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QueueMode::Fixed => f.write_str("the mode of its core says how"),
            QueueMode::Polled => f.write_str("its requests come close together, or one has just come"),
            QueueMode::Armed(reason) => reason.fmt(f),
            QueueMode::Held(LimitUnit::Requests) => {
                f.write_str("a limit of requests per second holds them back")
            }
            QueueMode::Held(LimitUnit::Bytes) => f.write_str("a limit of bytes per second holds them back"),
        }
    }
}

/// How often a queue went over to a mode, and for how long it was in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModeCount {
    /// How often.
    pub times: u64,
    /// For how long, ns.
    pub ns: u64,
}

/// What is known of one queue. Written by the thread of its core only.
#[derive(Debug, Default)]
pub struct ChoiceMeter {
    /// Odd while it is being changed.
    version: AtomicU64,
    mode: AtomicU64,
    since_ns: AtomicU64,
    spin_ns: AtomicU64,
    spin_reason: AtomicU64,
    counts: [(AtomicU64, AtomicU64); QueueMode::ALL.len()],
}

/// What was known of one queue at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueChoices {
    /// How its core learns of its requests now.
    pub mode: QueueMode,
    /// Since when, ns of the core's clock.
    pub since_ns: u64,
    /// For how long it is looked at in vain, ns; `u64::MAX`: for ever.
    pub spin_ns: u64,
    /// Why.
    pub spin_reason: SpinReason,
    counts: [ModeCount; QueueMode::ALL.len()],
}

/// Tries of a reader. The writer changes a meter for a few ns at a time, unless it loses its processor in between.
const TRIES: usize = 1000;

const SPIN_REASONS: [SpinReason; 3] = [SpinReason::FewGaps, SpinReason::Cheapest, SpinReason::Objective];

impl ChoiceMeter {
    fn change(&self, change: impl FnOnce()) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        self.version.store(version + 2, Ordering::Release);
    }

    /// The queue has come to its core, and is in `mode`.
    pub fn begin(&self, mode: QueueMode, now_ns: u64) {
        self.since_ns.store(now_ns, Ordering::Relaxed);
        self.enter(mode, now_ns);
    }

    /// The queue goes over to `mode`. Once more to the same one counts as well: it was looked at in between.
    #[inline]
    pub fn enter(&self, mode: QueueMode, now_ns: u64) {
        self.change(|| {
            let was = self.mode.load(Ordering::Relaxed) as usize;
            let stayed = now_ns.saturating_sub(self.since_ns.load(Ordering::Relaxed));
            add(&self.counts[was].1, stayed);
            add(&self.counts[mode.place()].0, 1);
            self.mode.store(mode.place() as u64, Ordering::Relaxed);
            self.since_ns.store(now_ns, Ordering::Relaxed);
        });
    }

    /// The mode that it is in, for the writer.
    #[inline]
    pub fn mode(&self) -> QueueMode {
        QueueMode::ALL.get(self.mode.load(Ordering::Relaxed) as usize).copied().unwrap_or_default()
    }

    /// From now on it is looked at for so long before it is armed.
    pub fn spin(&self, spin_ns: u64, reason: SpinReason) {
        self.change(|| {
            self.spin_ns.store(spin_ns, Ordering::Relaxed);
            let place = SPIN_REASONS.iter().position(|one| *one == reason).unwrap_or_default();
            self.spin_reason.store(place as u64, Ordering::Relaxed);
        });
    }

    /// All of it as it was at one moment. `None` if it was being changed all the time, as when the writer has lost its processor in a change.
    pub fn read(&self) -> Option<QueueChoices> {
        for _ in 0..TRIES {
            let version = self.version.load(Ordering::Acquire);
            let choices = self.read_once();
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                return Some(choices);
            }
            std::thread::yield_now();
        }
        None
    }

    fn read_once(&self) -> QueueChoices {
        let read = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let reason = read(&self.spin_reason) as usize;
        QueueChoices {
            mode: self.mode(),
            since_ns: read(&self.since_ns),
            spin_ns: read(&self.spin_ns),
            spin_reason: SPIN_REASONS.get(reason).copied().unwrap_or_default(),
            counts: std::array::from_fn(|at| ModeCount {
                times: read(&self.counts[at].0),
                ns: read(&self.counts[at].1),
            }),
        }
    }
}

/// With one writer no read-modify-write is needed.
#[inline]
fn add(word: &AtomicU64, more: u64) {
    word.store(word.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

impl QueueChoices {
    /// How often it went over to a mode, and for how long it was in it until `now_ns` of the core's clock.
    pub fn of(&self, mode: QueueMode, now_ns: u64) -> ModeCount {
        let ModeCount { times, ns } = self.counts[mode.place()];
        let stays = if self.mode == mode { now_ns.saturating_sub(self.since_ns) } else { 0 };
        ModeCount { times, ns: ns + stays }
    }

    /// Those in which it was at all.
    pub fn each(&self, now_ns: u64) -> impl Iterator<Item = (QueueMode, ModeCount)> {
        let each = QueueMode::ALL.map(|mode| (mode, self.of(mode, now_ns)));
        each.into_iter().filter(|(_, count)| *count != ModeCount::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_list() {
        for (place, mode) in QueueMode::ALL.into_iter().enumerate() {
            assert_eq!(mode.place(), place);
        }
    }

    #[test]
    fn times_are_summed_by_reason() {
        let meter = ChoiceMeter::default();
        let (gaps, spun) = (QueueMode::Armed(ArmReason::LongGaps), QueueMode::Armed(ArmReason::SpunInVain));
        meter.enter(QueueMode::Polled, 100);
        for at in 0..3 {
            meter.enter(gaps, 1000 + at * 100);
            meter.enter(QueueMode::Polled, 1010 + at * 100);
        }
        meter.enter(spun, 2000);
        let read = meter.read().unwrap();
        assert_eq!((read.mode, read.since_ns), (spun, 2000));
        assert_eq!(read.of(gaps, 2500), ModeCount { times: 3, ns: 30 });
        assert_eq!(read.of(spun, 2500), ModeCount { times: 1, ns: 500 });
        assert_eq!(read.of(QueueMode::Polled, 2500), ModeCount { times: 4, ns: 900 + 90 + 90 + 790 });
        assert_eq!(read.each(2500).map(|(_, count)| count.ns).sum::<u64>(), 2500, "no time is lost");
    }

    /// A reader never counts the same time in two modes.
    #[test]
    fn a_reader_sees_a_change_whole() {
        let meter = ChoiceMeter::default();
        meter.enter(QueueMode::Polled, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for at in 1..200_000 {
                    let armed = QueueMode::Armed(ArmReason::SpunInVain);
                    meter.enter(if at % 2 == 0 { QueueMode::Polled } else { armed }, at);
                }
            });
            let mut met = 0;
            while met < 199_999 {
                let Some(read) = meter.read() else { continue };
                let sum: u64 = read.each(read.since_ns).map(|(_, count)| count.ns).sum();
                assert_eq!(sum, read.since_ns, "{read:?}");
                met = read.since_ns;
            }
        });
    }
}
