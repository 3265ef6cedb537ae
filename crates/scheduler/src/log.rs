//! What was decided, when and why: the last of it, in a ring of fixed size.

use std::fmt;

use crate::fair::GroupId;
use crate::limit::LimitUnit;
use crate::polling::SpinReason;

/// A queue, as whoever carries decisions out calls it: the daemon numbers devices and their queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueKey {
    /// Number of the device in its daemon.
    pub device: u32,
    /// The device's queue.
    pub queue: u16,
}

/// What was decided, with what it was decided by. Loads and shares are thousandths of a core, times ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// From now on the queue is looked at for so long before it is armed.
    Spin {
        /// Which.
        queue: QueueKey,
        /// For how long; 0 is armed at once, `u64::MAX` is polled.
        spin_ns: u64,
        /// Why.
        reason: SpinReason,
    },
    /// The core's CPU ceiling has begun to forbid polling, or no longer does.
    Ceiling {
        /// Which.
        core: u32,
        /// Whether queues may be polled.
        may_poll: bool,
    },
    /// A limit has begun to hold the group back.
    Throttled {
        /// Which.
        group: GroupId,
        /// What is limited.
        unit: LimitUnit,
    },
    /// One core more.
    Grow {
        /// The processor that it is to run on, if one was chosen.
        cpu: Option<u32>,
        /// Why.
        reason: GrowReason,
    },
    /// The core ends when its queues have left.
    Shrink {
        /// Which.
        core: u32,
        /// Why.
        reason: ShrinkReason,
    },
    /// The queue goes to another core.
    Move {
        /// Which.
        queue: QueueKey,
        /// Where it is.
        from: u32,
        /// Where it goes.
        to: u32,
        /// Why.
        reason: MoveReason,
    },
    /// Nothing can be done about this by moving queues.
    Stuck {
        /// Which.
        queue: QueueKey,
        /// Why.
        reason: StuckReason,
    },
}

/// Why a core is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrowReason {
    /// There are fewer than the minimum.
    BelowMinimum,
    /// The cores have been this busy together, above what they are to be.
    Busy {
        /// Load of all cores that take queues.
        load_permille: u32,
        /// How many these are.
        cores: u32,
    },
    /// One queue takes a core of its own, and the others have to go elsewhere.
    HotQueue(QueueKey),
}

/// Why a core is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShrinkReason {
    /// There are more than the maximum.
    AboveMaximum,
    /// The others can carry its load as well.
    Idle {
        /// Load of all cores that take queues.
        load_permille: u32,
        /// How many these are.
        cores: u32,
    },
    /// It was to be drained.
    Drained,
}

/// Why a queue is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveReason {
    /// It is pinned to the other core.
    Pinned,
    /// Its core is being drained or ended.
    Draining,
    /// Its core is reserved for others, or the other is reserved for it.
    Reserved,
    /// Its core has too much to do and the other has room.
    Balance {
        /// Load of its core.
        from_permille: u32,
        /// Load of the other.
        to_permille: u32,
    },
    /// Another queue takes its whole core.
    BesideHotQueue(QueueKey),
    /// The other core is on the NUMA node of the queue's memory.
    Node(u32),
}

/// Why nothing is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StuckReason {
    /// It takes a whole core by itself. More queues would help; another core would not.
    HotterThanACore,
    /// It could not be moved, since its requests in flight do not end: tried again after so many ns.
    NotQuiet {
        /// After how long.
        retry_ns: u64,
    },
    /// All cores are busy, and there may be no more.
    AtMaximum,
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {} of device {}", self.queue, self.device)
    }
}

/// Thousandths of a core, as percent.
fn percent(permille: u32) -> u32 {
    (permille + 5) / 10
}

impl Decision {
    /// The decision in words, with each queue called what `name` calls it.
    pub fn words(&self, name: impl Fn(QueueKey) -> String) -> String {
        match *self {
            Decision::Spin { queue, spin_ns: 0, reason } => {
                format!("{}: armed at once, {reason}", name(queue))
            }
            Decision::Spin { queue, spin_ns: u64::MAX, reason } => {
                format!("{}: polled, {reason}", name(queue))
            }
            Decision::Spin { queue, spin_ns, reason } => {
                let (queue, us) = (name(queue), spin_ns.div_ceil(1000));
                format!("{queue}: polled for {us} us before it is armed, {reason}")
            }
            Decision::Ceiling { core, may_poll: false } => {
                format!("core {core}: no polling, its CPU ceiling is reached")
            }
            Decision::Ceiling { core, may_poll: true } => {
                format!("core {core}: polling again, below its CPU ceiling")
            }
            Decision::Throttled { group, unit } => {
                let unit = if unit == LimitUnit::Requests { "requests" } else { "bytes" };
                format!("group {}: held back by its limit of {unit} per second", group.0)
            }
            Decision::Grow { cpu, reason } => {
                let on = cpu.map_or(String::new(), |cpu| format!(", on CPU {cpu}"));
                format!("one core more{on}: {}", reason.words(name))
            }
            Decision::Shrink { core, reason } => format!("core {core} ends: {reason}"),
            Decision::Move { queue, from, to, reason } => {
                let moved = name(queue);
                format!("{moved} moves from core {from} to core {to}: {}", reason.words(name))
            }
            Decision::Stuck { queue, reason } => format!("{} stays: {reason}", name(queue)),
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words(|queue| queue.to_string()))
    }
}

impl fmt::Display for SpinReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SpinReason::FewGaps => "since too little is known of it",
            SpinReason::Cheapest => "the cheapest for its recent gaps",
            SpinReason::Objective => "since a wake-up would miss the p99 objective",
        })
    }
}

impl GrowReason {
    fn words(&self, name: impl Fn(QueueKey) -> String) -> String {
        match *self {
            GrowReason::BelowMinimum => "there are fewer than the minimum".to_owned(),
            GrowReason::Busy { load_permille, cores } => carried(cores, load_permille),
            GrowReason::HotQueue(queue) => format!("{} takes a core of its own", name(queue)),
        }
    }
}

/// The load of so many cores together.
fn carried(cores: u32, load_permille: u32) -> String {
    let cores = if cores == 1 { "1 core carries".to_owned() } else { format!("{cores} cores carry") };
    format!("{cores} {} % of one", percent(load_permille))
}

impl fmt::Display for ShrinkReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ShrinkReason::AboveMaximum => f.write_str("there are more than the maximum"),
            ShrinkReason::Idle { load_permille, cores } => f.write_str(&carried(cores, load_permille)),
            ShrinkReason::Drained => f.write_str("it was to be drained"),
        }
    }
}

impl MoveReason {
    fn words(&self, name: impl Fn(QueueKey) -> String) -> String {
        match *self {
            MoveReason::Pinned => "it is pinned there".to_owned(),
            MoveReason::Draining => "its core is being drained".to_owned(),
            MoveReason::Reserved => "a core is reserved".to_owned(),
            MoveReason::Balance { from_permille, to_permille } => {
                format!("{} % busy against {} %", percent(from_permille), percent(to_permille))
            }
            MoveReason::BesideHotQueue(queue) => format!("{} takes the whole core", name(queue)),
            MoveReason::Node(node) => format!("its memory is on NUMA node {node}"),
        }
    }
}

impl fmt::Display for StuckReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            StuckReason::HotterThanACore => {
                f.write_str("it takes a whole core by itself; more queues would help, more cores would not")
            }
            StuckReason::NotQuiet { retry_ns } => write!(
                f,
                "its requests in flight do not end; tried again in {} ms",
                retry_ns.div_ceil(1_000_000)
            ),
            StuckReason::AtMaximum => f.write_str("all cores are busy and there may be no more"),
        }
    }
}

/// One decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedDecision {
    /// When, ns since the caller's epoch.
    pub at_ns: u64,
    /// What.
    pub decision: Decision,
}

/// The last decisions. One per core and one for the pool; after it is made nothing allocates but [`DecisionLog::since`].
#[derive(Debug)]
pub struct DecisionLog {
    ring: Box<[Option<LoggedDecision>]>,
    /// Decisions ever made: also the number of the next one.
    made: u64,
}

impl DecisionLog {
    /// A log of the last `room` decisions, at least one.
    pub fn new(room: usize) -> Self {
        DecisionLog { ring: vec![None; room.max(1)].into_boxed_slice(), made: 0 }
    }

    /// Enters a decision, over the oldest one if there is no room.
    pub fn enter(&mut self, at_ns: u64, decision: Decision) {
        let at = (self.made % self.ring.len() as u64) as usize;
        self.ring[at] = Some(LoggedDecision { at_ns, decision });
        self.made += 1;
    }

    /// How many there have been.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// Those from number `from` on that are still there, oldest first, and how many of them are not.
    pub fn since(&self, from: u64) -> (Vec<LoggedDecision>, u64) {
        let kept = self.made.saturating_sub(self.ring.len() as u64);
        let start = from.max(kept);
        let entry = |number: u64| self.ring[(number % self.ring.len() as u64) as usize];
        ((start..self.made).filter_map(entry).collect(), kept.saturating_sub(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_and_the_others_counted() {
        let mut log = DecisionLog::new(3);
        for core in 0..5u32 {
            let reason = ShrinkReason::Drained;
            log.enter(u64::from(core), Decision::Shrink { core, reason });
        }
        let (kept, lost) = log.since(1);
        assert_eq!((kept.iter().map(|one| one.at_ns).collect::<Vec<_>>(), lost), (vec![2, 3, 4], 1));
        assert_eq!((log.since(4).0.len(), log.since(5), log.made()), (1, (vec![], 0), 5));
    }

    #[test]
    fn decisions_say_why() {
        let queue = QueueKey { device: 3, queue: 1 };
        let moved = Decision::Move {
            queue,
            from: 0,
            to: 2,
            reason: MoveReason::Balance { from_permille: 943, to_permille: 120 },
        };
        let said = "queue 1 of device 3 moves from core 0 to core 2: 94 % busy against 12 %";
        assert_eq!(moved.to_string(), said);
        let said = "web queue 1 moves from core 0 to core 2: 94 % busy against 12 %";
        assert_eq!(moved.words(|queue| format!("web queue {}", queue.queue)), said);
        let spin = Decision::Spin { queue, spin_ns: 24_576, reason: SpinReason::Cheapest };
        let said =
            "queue 1 of device 3: polled for 25 us before it is armed, the cheapest for its recent gaps";
        assert_eq!(spin.to_string(), said);
    }
}
