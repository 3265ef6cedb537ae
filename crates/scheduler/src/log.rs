//! What was decided, when and why: the last of it, in a ring of fixed size.

use std::collections::VecDeque;
use std::fmt;

use crate::choice::QueueMode;
use crate::limit::LimitUnit;
use crate::polling::ObjectiveReport;

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
    /// The queue is mostly in another mode than before, and has been for some seconds.
    Mode {
        /// Which.
        queue: QueueKey,
        /// The core that decides it.
        core: u32,
        /// In which mode, and why.
        mode: QueueMode,
        /// Thousandths of the last second in which it was polled, or armed.
        permille: u32,
        /// For how long it is looked at before it is armed.
        spin_ns: u64,
    },
    /// The core's CPU ceiling has begun to forbid polling, or no longer does.
    Ceiling {
        /// Which.
        core: u32,
        /// Whether queues may be polled.
        may_poll: bool,
    },
    /// Something else has come of what is asked of the core.
    Objective {
        /// Which.
        core: u32,
        /// What.
        outcome: ObjectiveReport,
    },
    /// A limit has begun to hold the queue's requests back, or no longer does.
    Throttled {
        /// Which.
        queue: QueueKey,
        /// The core that it is on.
        core: u32,
        /// What is limited; nothing: no longer.
        unit: Option<LimitUnit>,
        /// Thousandths of the last second in which something was held back.
        permille: u32,
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
            Decision::Mode { queue, mode: mode @ QueueMode::Armed(_), permille, .. } => {
                format!("{}: armed {} % of the time, since {mode}", name(queue), percent(permille))
            }
            Decision::Mode { queue, permille, spin_ns, .. } => {
                let for_long = match spin_ns {
                    u64::MAX => "for as long as nothing comes".to_owned(),
                    ns => format!("for {} us after each request", ns.div_ceil(1000)),
                };
                format!("{}: polled {} % of the time, {for_long}", name(queue), percent(permille))
            }
            Decision::Ceiling { core, may_poll: false } => {
                format!("core {core}: no polling, its CPU ceiling is reached")
            }
            Decision::Ceiling { core, may_poll: true } => {
                format!("core {core}: polling again, below its CPU ceiling")
            }
            Decision::Objective { core, outcome } => format!("core {core}: {outcome}"),
            Decision::Throttled { queue, unit: Some(unit), permille, .. } => {
                let (queue, held) = (name(queue), QueueMode::Held(unit));
                format!("{queue}: throttled {} % of the time, since {held}", percent(permille))
            }
            Decision::Throttled { queue, unit: None, .. } => {
                format!("{}: throttled no longer, its limits let everything pass", name(queue))
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

impl fmt::Display for ObjectiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |permille: u32| f64::from(permille) / 10.0;
        match *self {
            ObjectiveReport::Unknown => f.write_str("nothing is known of its objective"),
            ObjectiveReport::Kept => f.write_str("its objective is kept"),
            ObjectiveReport::LateByCeiling(permille) => {
                write!(f, "{:.1} % of requests late, since its CPU ceiling forbids polling", part(permille))
            }
            ObjectiveReport::LateByLoad(permille) => {
                write!(f, "{:.1} % of requests late although polled: it has too much to do", part(permille))
            }
            ObjectiveReport::OverCeiling(ns) => {
                write!(f, "work alone is {:.1} % of a processor above its CPU ceiling", ns as f64 / 1e7)
            }
        }
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
    /// They rise by one, from 0 on.
    pub number: u64,
    /// When, ns since the caller's epoch.
    pub at_ns: u64,
    /// What.
    pub decision: Decision,
}

/// The last decisions: so many about how many cores there are and where queues go, and as many about how queues are served, since a thousand queues
/// that all change at once are no reason to forget why a core was started. After it is made nothing allocates but [`DecisionLog::since`].
#[derive(Debug)]
pub struct DecisionLog {
    places: VecDeque<LoggedDecision>,
    choices: VecDeque<LoggedDecision>,
    /// The most of each.
    room: usize,
    /// Decisions ever made: also the number of the next one.
    made: u64,
}

impl DecisionLog {
    /// A log of the last `room` decisions of each of the two kinds, at least one.
    pub fn new(room: usize) -> Self {
        let room = room.max(1);
        DecisionLog {
            places: VecDeque::with_capacity(room),
            choices: VecDeque::with_capacity(room),
            room,
            made: 0,
        }
    }

    /// Enters a decision, over the oldest one of its kind if there is no room.
    pub fn enter(&mut self, at_ns: u64, decision: Decision) {
        let ring = match decision {
            Decision::Mode { .. }
            | Decision::Ceiling { .. }
            | Decision::Objective { .. }
            | Decision::Throttled { .. } => &mut self.choices,
            _ => &mut self.places,
        };
        if ring.len() == self.room {
            ring.pop_front();
        }
        ring.push_back(LoggedDecision { number: self.made, at_ns, decision });
        self.made += 1;
    }

    /// How many there have been.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// The last `each` about cores and places, and the last `each` about how queues are served; oldest first.
    pub fn last(&self, each: usize) -> Vec<LoggedDecision> {
        let of = |ring: &VecDeque<LoggedDecision>| ring.len().saturating_sub(each)..;
        let all = self.places.range(of(&self.places)).chain(self.choices.range(of(&self.choices)));
        let mut last: Vec<_> = all.copied().collect();
        last.sort_unstable_by_key(|one| one.number);
        last
    }

    /// Those from number `from` on that are still there, oldest first, and how many of them are not.
    pub fn since(&self, from: u64) -> (Vec<LoggedDecision>, u64) {
        let all = self.places.iter().chain(&self.choices);
        let mut kept: Vec<_> = all.filter(|one| one.number >= from).copied().collect();
        kept.sort_unstable_by_key(|one| one.number);
        let lost = self.made.saturating_sub(from) - kept.len() as u64;
        (kept, lost)
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
        let core = 1;
        let polled = Decision::Mode { queue, core, mode: QueueMode::Polled, permille: 996, spin_ns: 24_576 };
        let said = "queue 1 of device 3: polled 100 % of the time, for 25 us after each request";
        assert_eq!(polled.to_string(), said);
        let unit = Some(LimitUnit::Requests);
        let throttled = Decision::Throttled { queue, core, unit, permille: 931 };
        let said = "queue 1 of device 3: throttled 93 % of the time, since a limit of requests per second holds them back";
        assert_eq!(throttled.to_string(), said);
        let late = Decision::Objective { core, outcome: ObjectiveReport::LateByCeiling(23) };
        let said = "core 1: 2.3 % of requests late, since its CPU ceiling forbids polling";
        assert_eq!(late.to_string(), said);
    }

    #[test]
    fn a_flood_of_one_kind_leaves_the_other() {
        let mut log = DecisionLog::new(3);
        log.enter(1, Decision::Shrink { core: 7, reason: ShrinkReason::Drained });
        (0..10).for_each(|core| log.enter(2, Decision::Ceiling { core, may_poll: false }));
        let (kept, lost) = log.since(0);
        let numbers = |all: Vec<LoggedDecision>| all.iter().map(|one| one.number).collect::<Vec<_>>();
        assert_eq!((numbers(kept), lost), (vec![0, 8, 9, 10], 7));
        assert_eq!(numbers(log.last(2)), [0, 9, 10]);
        log.enter(3, Decision::Shrink { core: 8, reason: ShrinkReason::Drained });
        assert_eq!((numbers(log.last(1)), numbers(log.last(9))), (vec![10, 11], vec![0, 8, 9, 10, 11]));
        assert_eq!(DecisionLog::new(3).last(9), []);
    }
}
