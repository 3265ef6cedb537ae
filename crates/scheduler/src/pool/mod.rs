//! How many cores there are, and which queue is on which.
//!
//! ```text
//!   PoolReadings --> PoolPlanner::plan --> [Decision]   each carried out by the daemon, at parked points, before the next readings
//! ```
//!
//! A plan depends on nothing but the settings and the readings so far, so that a recorded trace gives the same decisions again. Its order: what users have
//! asked for (pins, reservations, drains), the number of cores, balance. Loads rise fast and fall slowly in its eyes
//! (`memory.rs`), and a queue that has been moved for balance rests for twice as long each time: a load that comes and goes moves queues a few times and
//! then no more.

mod memory;
mod outlook;
mod readings;

use std::collections::{BTreeMap, BTreeSet};

pub use readings::{CoreLoad, CoreUse, PoolReadings, PoolSettings, QueueLoad};

use crate::fair::GroupId;
use crate::log::{Decision, GrowReason, MoveReason, QueueKey, ShrinkReason, StuckReason};
use crate::topology::CpuTopology;
use memory::Memory;
use outlook::{CoreOutlook, HOT_PERMILLE, Outlook, QueueOutlook};

/// A core as busy as this has no time left: what its queues would like is not known.
const FULL_PERMILLE: u32 = 950;

/// What lies between a hot queue's load and that of its core if it is alone there.
const ALONE_PERMILLE: u32 = 100;

/// The difference between two cores that is worth a move.
const UNEVEN_PERMILLE: u32 = 200;

/// The load below which a core's queues are left where they are: less waiting is not worth the pause of a move.
const CALM_PERMILLE: u32 = 700;

/// The load from which on it matters on which node a queue is served.
const NODE_PERMILLE: u32 = 50;

/// Time between two reports of a queue that stays where it is, ns.
const REPORT_NS: u64 = 10_000_000_000;

/// The policy of a pool, with what it remembers.
#[derive(Debug, Clone)]
pub struct PoolPlanner {
    settings: PoolSettings,
    memory: Memory,
    /// Since when there have been too few cores, or too many.
    busy_since: Option<u64>,
    idle_since: Option<u64>,
    reported: BTreeMap<QueueKey, u64>,
}

impl PoolPlanner {
    /// A planner that has seen nothing.
    pub fn new(settings: PoolSettings) -> Self {
        PoolPlanner {
            settings,
            memory: Memory::default(),
            busy_since: None,
            idle_since: None,
            reported: BTreeMap::new(),
        }
    }

    /// Other settings, from the next plan on.
    pub fn set(&mut self, settings: PoolSettings) {
        self.settings = settings;
    }

    /// The core for a queue that is new. `None` if no core takes it.
    pub fn place(
        &self,
        readings: &PoolReadings,
        topology: &CpuTopology,
        group: GroupId,
        node: Option<u32>,
    ) -> Option<u32> {
        Outlook::new(readings, &self.memory, topology).best(group, node, None).map(|core| core.load.core)
    }

    /// What to do now. Called every 10 to 100 ms; what it decided before has been carried out, or has failed and is in
    /// `not_quiet`, or its queue is `moving`.
    pub fn plan(&mut self, readings: &PoolReadings, topology: &CpuTopology) -> Vec<Decision> {
        let mut plan = Vec::new();
        for (queue, retry_ns) in self.memory.look(readings) {
            plan.push(Decision::Stuck { queue, reason: StuckReason::NotQuiet { retry_ns } });
        }
        self.reported.retain(|_, at| readings.now_ns < *at + REPORT_NS);
        let mut outlook = Outlook::new(readings, &self.memory, topology);
        let mut moves = self.settings.moves_per_plan;
        self.obey(readings.now_ns, &mut outlook, &mut moves, &mut plan);
        self.count_cores(readings, topology, &outlook, &mut plan);
        if self.settings.balance {
            self.balance(readings.now_ns, &mut outlook, &mut moves, &mut plan);
        }
        plan
    }

    /// Moves what is where a user, or the end of its core, does not want it.
    fn obey(&self, now_ns: u64, outlook: &mut Outlook, moves: &mut usize, plan: &mut Vec<Decision>) {
        for at in 0..outlook.queues.len() {
            let QueueLoad { queue, group, core, pinned, node, moving, .. } = outlook.queues[at].load;
            if *moves == 0 {
                return;
            }
            if moving || !self.memory.of(queue).may_move(now_ns) {
                continue;
            }
            let Some(here) = outlook.core(core) else { continue };
            let wanted = match pinned.filter(|pin| outlook.core(*pin).is_some()) {
                Some(pin) if pin == core => None,
                Some(pin) => Some((pin, MoveReason::Pinned)),
                None if outlook.takes(here, group) => None,
                None => {
                    let reason = if here.is_open() { MoveReason::Reserved } else { MoveReason::Draining };
                    outlook.best(group, node, Some(core)).map(|to| (to.load.core, reason))
                }
            };
            if let Some((to, reason)) = wanted {
                plan.push(Decision::Move { queue, from: core, to, reason });
                outlook.bring(queue, to);
                *moves -= 1;
            }
        }
    }

    /// Adds or ends cores.
    fn count_cores(
        &mut self,
        readings: &PoolReadings,
        topology: &CpuTopology,
        outlook: &Outlook,
        plan: &mut Vec<Decision>,
    ) {
        let PoolSettings { min_cores, max_cores, .. } = self.settings;
        let open: Vec<&CoreOutlook> = outlook.cores.iter().filter(|core| core.is_open()).collect();
        let cores = open.len() as u32;
        let load_permille = open.iter().map(|core| core.permille).sum();
        let now = readings.now_ns;
        let mut grow = 0;
        let mut reason = GrowReason::Busy { load_permille, cores };
        if cores < min_cores {
            (grow, reason) = (min_cores - cores, GrowReason::BelowMinimum);
        } else {
            let (needed, hot) = self.needed(outlook, &open);
            if needed <= cores {
                self.busy_since = None;
            } else if now - *self.busy_since.get_or_insert(now) >= self.settings.grow_after_ns {
                grow = needed.min(max_cores.max(cores)) - cores;
                // What the new ones are good for shows after their queues have moved.
                self.busy_since = (grow == 0).then_some(now);
                if let Some(hot) = hot {
                    reason = GrowReason::HotQueue(hot);
                }
            }
        }
        if grow > 0 {
            self.idle_since = None;
            self.grow(grow, reason, topology, outlook, plan);
            return;
        }
        if cores > max_cores.max(1) {
            if let Some(core) = self.least(outlook) {
                plan.push(Decision::Shrink { core, reason: ShrinkReason::AboveMaximum });
            }
        } else if cores > min_cores.max(1) && self.fits(outlook, &open, cores - 1) {
            if now - *self.idle_since.get_or_insert(now) >= self.settings.shrink_after_ns {
                self.idle_since = Some(now);
                if let Some(core) = self.least(outlook) {
                    plan.push(Decision::Shrink { core, reason: ShrinkReason::Idle { load_permille, cores } });
                }
            }
        } else {
            self.idle_since = None;
        }
    }

    /// How many cores the load takes, and the hot queue for which the others have to make room, if that is why.
    fn needed(&self, outlook: &Outlook, open: &[&CoreOutlook]) -> (u32, Option<QueueKey>) {
        let cores = open.len() as u32;
        let high = self.settings.high_permille.min(HOT_PERMILLE);
        let (hot, calm, most) = packed(outlook, open, self.memory.total(), high);
        let full = open
            .iter()
            .all(|core| core.load.busy_permille >= FULL_PERMILLE && outlook.hot(core.load.core).is_none());
        // Where all are full the load is at least what they can carry, and how much more is not known.
        let calm = if full { calm.max((cores * 2).saturating_sub(hot.len() as u32)).min(most) } else { calm };
        let beside = hot.first().filter(|_| calm == 1 && hot.len() as u32 == cores);
        (hot.len() as u32 + calm, beside.copied())
    }

    /// Whether so many cores could carry the load with room to spare.
    fn fits(&self, outlook: &Outlook, open: &[&CoreOutlook], cores: u32) -> bool {
        let (hot, calm, _) = packed(outlook, open, self.memory.total(), self.settings.low_permille);
        hot.len() as u32 + calm <= cores
    }

    fn grow(
        &self,
        count: u32,
        reason: GrowReason,
        topology: &CpuTopology,
        outlook: &Outlook,
        plan: &mut Vec<Decision>,
    ) {
        let mut taken: BTreeSet<u32> = outlook.cores.iter().filter_map(|core| core.load.cpu).collect();
        let mut loads: BTreeMap<u32, u32> = BTreeMap::new();
        for queue in &outlook.queues {
            if let Some(node) = queue.load.node {
                *loads.entry(node).or_default() += queue.permille + 1;
            }
        }
        let near = loads.iter().max_by_key(|(node, load)| (**load, std::cmp::Reverse(**node)));
        let near = near.map(|(node, _)| *node);
        for _ in 0..count {
            let cpu = topology.next_cpu(&self.settings.cpus, &taken, near);
            if cpu.is_none() && !self.settings.cpus.is_empty() {
                // Two cores on one processor would take its time from each other.
                return;
            }
            taken.extend(cpu);
            plan.push(Decision::Grow { cpu, reason });
        }
    }

    /// The core that is ended with the least trouble: the pool has started it, nothing is pinned to it or stuck there, and it has the least load.
    fn least(&self, outlook: &Outlook) -> Option<u32> {
        let free = |core: &&CoreOutlook| {
            core.load.used_for == CoreUse::Open
                && !core.load.kept
                && !outlook.queues.iter().any(|queue| {
                    queue.load.pinned == Some(core.load.core)
                        || (queue.load.core == core.load.core && self.memory.of(queue.load.queue).is_stuck())
                })
        };
        let least = outlook
            .cores
            .iter()
            .filter(free)
            .min_by_key(|core| (core.permille, core.queues, std::cmp::Reverse(core.load.core)));
        least.map(|core| core.load.core)
    }

    /// Moves queues from cores that have too much to do to those that have time.
    fn balance(&mut self, now_ns: u64, outlook: &mut Outlook, moves: &mut usize, plan: &mut Vec<Decision>) {
        let ending: Vec<u32> = plan
            .iter()
            .filter_map(|one| if let Decision::Shrink { core, .. } = one { Some(*core) } else { None })
            .collect();
        let mut busiest: Vec<(u32, u32)> = outlook
            .cores
            .iter()
            .filter(|core| core.is_open())
            .map(|core| (core.permille.max(core.load.busy_permille), core.load.core))
            .collect();
        busiest.sort_by_key(|(permille, core)| (std::cmp::Reverse(*permille), *core));
        for (permille, core) in busiest {
            if permille < CALM_PERMILLE || ending.contains(&core) {
                continue;
            }
            while *moves > 0 {
                let Some((queue, to, reason)) = self.best_move(now_ns, outlook, core, &ending) else { break };
                plan.push(Decision::Move { queue, from: core, to, reason });
                outlook.bring(queue, to);
                self.memory.balance(queue, now_ns, self.settings.settle_ns);
                *moves -= 1;
            }
            self.report(now_ns, outlook, core, plan);
        }
        self.bring_home(now_ns, outlook, moves, &ending, plan);
    }

    /// The move that leaves the busier of the two cores with the least load.
    fn best_move(
        &self,
        now_ns: u64,
        outlook: &Outlook,
        core: u32,
        ending: &[u32],
    ) -> Option<(QueueKey, u32, MoveReason)> {
        let from = outlook.core(core)?;
        let hot = outlook.hot(core).map(|queue| queue.load.queue);
        let movable = |queue: &&QueueOutlook| {
            queue.load.core == core
                && queue.load.pinned.is_none()
                && !queue.load.moving
                && Some(queue.load.queue) != hot
                && queue.permille > 0
                && self.memory.of(queue.load.queue).may_balance(now_ns)
        };
        let mut best: Option<(u32, QueueKey, u32, u32)> = None;
        for queue in outlook.queues.iter().filter(movable) {
            let QueueLoad { queue: key, group, node, .. } = queue.load;
            let Some(to) = outlook.best(group, node, Some(core)) else { continue };
            if ending.contains(&to.load.core) || outlook.hot(to.load.core).is_some() {
                continue;
            }
            let after = (from.permille - queue.permille).max(to.loaded(node) + queue.permille);
            let gain = from.permille.saturating_sub(after);
            // Beside a hot queue, and on a full core, even a small queue is worth its move.
            let uneven = from.permille.saturating_sub(to.loaded(node)) >= UNEVEN_PERMILLE;
            let worth = hot.is_some() || from.permille >= FULL_PERMILLE || uneven;
            if worth && gain > 0 && best.is_none_or(|(most, ..)| gain > most) {
                best = Some((gain, key, to.load.core, to.permille));
            }
        }
        let (_, queue, to, to_permille) = best?;
        let reason = match hot {
            Some(hot) => MoveReason::BesideHotQueue(hot),
            None => MoveReason::Balance { from_permille: from.permille, to_permille },
        };
        Some((queue, to, reason))
    }

    /// Says of a queue that takes its whole core, alone, that nothing can be done about it here.
    fn report(&mut self, now_ns: u64, outlook: &Outlook, core: u32, plan: &mut Vec<Decision>) {
        let Some(hot) = outlook.hot(core) else { return };
        let alone = outlook.core(core).is_some_and(|core| core.permille <= hot.permille + ALONE_PERMILLE);
        let reason = if alone { StuckReason::HotterThanACore } else { StuckReason::AtMaximum };
        let open = outlook.cores.iter().filter(|core| core.is_open()).count() as u32;
        if (alone || open >= self.settings.max_cores) && !self.reported.contains_key(&hot.load.queue) {
            self.reported.insert(hot.load.queue, now_ns);
            plan.push(Decision::Stuck { queue: hot.load.queue, reason });
        }
    }

    /// Moves queues to cores on the node of their memory, where these have room.
    fn bring_home(
        &mut self,
        now_ns: u64,
        outlook: &mut Outlook,
        moves: &mut usize,
        ending: &[u32],
        plan: &mut Vec<Decision>,
    ) {
        for at in 0..outlook.queues.len() {
            let QueueOutlook { load, permille } = outlook.queues[at];
            let Some(node) = load.node else { continue };
            let settled = load.pinned.is_none() && !load.moving && permille >= NODE_PERMILLE;
            if *moves == 0 || !settled || !self.memory.of(load.queue).may_balance(now_ns) {
                continue;
            }
            let away = outlook.core(load.core).is_some_and(|core| core.node.is_some_and(|here| here != node));
            // Not so full that queues would be sent away again.
            let room = self.settings.high_permille.min(CALM_PERMILLE - 1).saturating_sub(permille);
            let home = outlook
                .cores
                .iter()
                .filter(|core| core.node == Some(node) && core.permille <= room)
                .filter(|core| outlook.takes(core, load.group) && !ending.contains(&core.load.core))
                .min_by_key(|core| (core.permille, core.load.core));
            if let (true, Some(home)) = (away, home.map(|core| core.load.core)) {
                let reason = MoveReason::Node(node);
                plan.push(Decision::Move { queue: load.queue, from: load.core, to: home, reason });
                outlook.bring(load.queue, home);
                self.memory.balance(load.queue, now_ns, self.settings.settle_ns);
                *moves -= 1;
            }
        }
    }
}

/// The queues of these cores that take at least `high` by themselves, how many cores of that load the others take (`total`
/// is the most that all take together), and how many they could use.
fn packed(outlook: &Outlook, open: &[&CoreOutlook], total: u32, high: u32) -> (Vec<QueueKey>, u32, u32) {
    let high = high.max(1);
    let mut hot = Vec::new();
    let (mut others, mut load) = (0, 0);
    for queue in &outlook.queues {
        if !open.iter().any(|core| core.load.core == queue.load.core) {
            continue;
        }
        if queue.permille >= high {
            hot.push(queue.load.queue);
        } else if queue.permille > 0 {
            others += 1;
            load += queue.permille;
        }
    }
    (hot, load.min(total).div_ceil(high).min(others), others)
}
