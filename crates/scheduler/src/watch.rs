//! From what cores note of their queues to entries of a log: only what has lasted, and the less the more often it changes.
//!
//! Looked at once a second. Within a second a queue may have gone over between armed and polled thousands of times: what counts is in which mode it
//! was for most of the time, and for which reason. A change is entered when it has stood for [`LASTS`] looks; after each entry the next one has to
//! stand for twice as long, up to [`LONGEST`], until nothing has changed for that long.

use std::collections::BTreeMap;

use crate::choice::{QueueChoices, QueueMode};
use crate::limit::LimitUnit;
use crate::log::{Decision, QueueKey};
use crate::polling::{ArmReason, ObjectiveReport};

/// Looks that a change has to stand for.
const LASTS: u32 = 3;

/// The most that it has to stand for.
const LONGEST: u32 = 64;

/// Thousandths of the time from which a queue is mostly polled, or mostly armed. Between them it stays what it was said to be.
const MOSTLY: u64 = 800;

/// Thousandths of the time from which a limit, or a ceiling, bites.
const BITES: u64 = 50;

/// One queue at a look.
#[derive(Debug, Clone, Copy)]
pub struct QueueLook {
    /// Which.
    pub queue: QueueKey,
    /// Its poller: another one begins to count anew.
    pub poller: u64,
    /// The core that it is on.
    pub core: u32,
    /// The time of that core's clock.
    pub now_ns: u64,
    /// What the core has noted.
    pub choices: QueueChoices,
}

/// One core at a look.
#[derive(Debug, Clone, Copy)]
pub struct CoreLook {
    /// Which.
    pub core: u32,
    /// What came of its objective in the last second.
    pub objective: ObjectiveReport,
}

/// What was said of something, and what may come to be said instead.
#[derive(Debug, Clone)]
struct Latch<T> {
    said: Option<T>,
    next: Option<T>,
    stood: u32,
    lasts: u32,
    quiet: u32,
}

impl<T: Copy + PartialEq> Latch<T> {
    fn new(said: Option<T>) -> Self {
        Latch { said, next: None, stood: 0, lasts: LASTS, quiet: 0 }
    }

    /// How it is at this look; `None` if that cannot be said. True if it is to be said from now on.
    fn look(&mut self, is: Option<T>) -> bool {
        let changes = is.is_some() && is != self.said;
        self.quiet = if changes { 0 } else { (self.quiet + 1).min(LONGEST) };
        if self.quiet == LONGEST {
            self.lasts = LASTS;
        }
        if !changes {
            (self.next, self.stood) = (None, 0);
            return false;
        }
        self.stood = if self.next == is { self.stood + 1 } else { 1 };
        self.next = is;
        if self.stood < self.lasts {
            return false;
        }
        (self.said, self.next, self.stood) = (is, None, 0);
        self.lasts = (self.lasts * 2).min(LONGEST);
        true
    }
}

#[derive(Debug)]
struct WatchedQueue {
    poller: u64,
    now_ns: u64,
    before: QueueChoices,
    mode: Latch<QueueMode>,
    held: Latch<Option<LimitUnit>>,
}

#[derive(Debug)]
struct WatchedCore {
    may_poll: Latch<bool>,
    objective: Latch<ObjectiveReport>,
}

/// All queues and cores. One in a process; allocates only where one is new.
#[derive(Debug, Default)]
pub struct ChoiceWatch {
    queues: BTreeMap<QueueKey, WatchedQueue>,
    cores: BTreeMap<u32, WatchedCore>,
}

/// What a queue did between two looks.
struct Between<'a> {
    before: Option<(&'a QueueChoices, u64)>,
    look: &'a QueueLook,
}

impl Between<'_> {
    /// Thousandths of the time in a mode.
    fn permille(&self, mode: QueueMode) -> u64 {
        let was = self.before.map_or(0, |(choices, at)| choices.of(mode, at).ns);
        let since = self.before.map_or(0, |(_, at)| at);
        let period = self.look.now_ns.saturating_sub(since).max(1);
        let ns = self.look.choices.of(mode, self.look.now_ns).ns.saturating_sub(was);
        ns.saturating_mul(1000) / period
    }

    /// In which of these it was for longest, and for how many thousandths in all of them.
    fn most(&self, of: fn(QueueMode) -> bool) -> (Option<QueueMode>, u64) {
        let each = QueueMode::ALL.into_iter().filter(|mode| of(*mode));
        let each: Vec<_> = each.map(|mode| (mode, self.permille(mode))).collect();
        let most = each.iter().max_by_key(|(_, permille)| *permille).filter(|(_, permille)| *permille > 0);
        (most.map(|(mode, _)| *mode), each.iter().map(|(_, permille)| permille).sum())
    }
}

impl ChoiceWatch {
    /// What is to be entered. Those that are not named have gone.
    pub fn look(&mut self, queues: &[QueueLook], cores: &[CoreLook]) -> Vec<Decision> {
        let mut said = Vec::new();
        let mut forbidden: BTreeMap<u32, bool> = BTreeMap::new();
        for look in queues {
            *forbidden.entry(look.core).or_default() |= self.queue(look, &mut said);
        }
        let there: std::collections::BTreeSet<_> = queues.iter().map(|look| look.queue).collect();
        self.queues.retain(|queue, _| there.contains(queue));
        for look in cores {
            let core = self.cores.entry(look.core).or_insert_with(|| WatchedCore {
                may_poll: Latch::new(Some(true)),
                objective: Latch::new(Some(ObjectiveReport::Kept)),
            });
            let may_poll = !forbidden.get(&look.core).copied().unwrap_or_default();
            if core.may_poll.look(Some(may_poll)) {
                said.push(Decision::Ceiling { core: look.core, may_poll });
            }
            if core.objective.look(kind(look.objective)) {
                said.push(Decision::Objective { core: look.core, outcome: look.objective });
            }
        }
        self.cores.retain(|core, _| cores.iter().any(|look| look.core == *core));
        said
    }

    /// One queue; says whether the ceiling of its core has kept it from being polled.
    fn queue(&mut self, look: &QueueLook, said: &mut Vec<Decision>) -> bool {
        let known = self.queues.get(&look.queue).filter(|known| known.poller == look.poller);
        // A queue that moves goes on being what it was said to be.
        let before = known.map(|known| (&known.before, known.now_ns));
        let between = Between { before, look };
        let (armed, armed_permille) = between.most(QueueMode::is_armed);
        let (held, held_permille) = between.most(QueueMode::is_held);
        let polled_permille = between.permille(QueueMode::Polled);
        let forbidden = between.permille(QueueMode::Armed(ArmReason::Ceiling)) >= BITES;
        // What a limit holds back is neither polled nor armed.
        let free = (1000 - held_permille.min(1000)).max(1);
        let mode = match armed {
            Some(armed) if armed_permille * 1000 >= MOSTLY * free => Some(armed),
            _ if polled_permille * 1000 >= MOSTLY * free => Some(QueueMode::Polled),
            _ => None,
        };
        let mode = mode.filter(|_| held_permille < MOSTLY);
        let held = match held {
            Some(QueueMode::Held(unit)) if held_permille >= BITES => Some(unit),
            _ => None,
        };
        let queue = look.queue;
        let fresh = || WatchedQueue {
            poller: look.poller,
            now_ns: 0,
            before: QueueChoices::default(),
            mode: Latch::new(None),
            held: Latch::new(Some(None)),
        };
        let watched = self.queues.entry(queue).or_insert_with(fresh);
        (watched.poller, watched.now_ns, watched.before) = (look.poller, look.now_ns, look.choices);
        if watched.mode.look(mode) {
            let (mode, spin_ns) = (mode.unwrap_or_default(), look.choices.spin_ns);
            let permille = if mode.is_armed() { armed_permille } else { polled_permille };
            let permille = permille.min(1000) as u32;
            said.push(Decision::Mode { queue, core: look.core, mode, permille, spin_ns });
        }
        if watched.held.look(Some(held)) {
            let permille = held_permille.min(1000) as u32;
            said.push(Decision::Throttled { queue, core: look.core, unit: held, permille });
        }
        forbidden
    }
}

/// An outcome without its numbers, which are others in each second. Nothing where too little is known.
fn kind(report: ObjectiveReport) -> Option<ObjectiveReport> {
    match report {
        ObjectiveReport::Unknown => None,
        ObjectiveReport::Kept => Some(report),
        ObjectiveReport::LateByCeiling(_) => Some(ObjectiveReport::LateByCeiling(0)),
        ObjectiveReport::LateByLoad(_) => Some(ObjectiveReport::LateByLoad(0)),
        ObjectiveReport::OverCeiling(_) => Some(ObjectiveReport::OverCeiling(0)),
    }
}
