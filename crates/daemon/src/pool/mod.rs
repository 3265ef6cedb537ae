//! The pool of I/O cores: what cores and queues use is read, the policy plans, and what it decides is carried out.
//!
//! ```text
//!   cores: time of each queue --> Meters --PoolReadings--> PoolPlanner --[Decision]--> log
//!   state file: pins, drains ---> Facts ------^                            | Grow, Shrink: Cores
//!                                                                          \ Move: one at a time, at a parked point
//!                      |--> Division --GroupPart--> cores: what of a group's weight stands on each
//!                      \--> DiskDivision --DevicePart--> cores: what a group may have in flight on a disk of the host
//! ```
//!
//! Once a second, with or without a pool, what cores have chosen for each queue is read (`ChoiceMeter`), and what has lasted enters the same log (`ChoiceWatch`).
//!
//! Looks come every 20 ms while some queue has work or something is being carried out, and every second otherwise. Without `[pool]`, and while no core is
//! drained or reserved, nothing is planned; without a group there are no looks then.

mod carry;
mod disks;
mod divide;
mod facts;
mod host_disks;
mod nodes;
mod readings;
#[cfg(feature = "kill-points")]
mod trace;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ioplane_api::report::{DecisionReport, DecisionWord, DecisionsReport, InFlightReport, PoolReport};
use ioplane_api::spec::PoolSpec;
use ioplane_device::{CoreId, CoreMessage, GroupId};
use ioplane_scheduler::{
    ChoiceWatch, CoreLook, CpuTopology, Decision, DecisionLog, DiskLane, MoveReason, PoolPlanner,
    PoolReadings, PoolSettings, QueueKey,
};
use tokio::sync::Notify;

use crate::cores::Cores;
use crate::groups::Groups;
use crate::state_file::StateFile;
use disks::DiskDivision;
use divide::{Division, GroupUse};
use facts::{DeviceRef, Facts};
use host_disks::HostDisks;
use nodes::GuestNodes;
use readings::{Meters, Underway};

/// Between two looks while some queue has work.
const BUSY_PERIOD: Duration = Duration::from_millis(20);
/// Between two looks while some queue has work, and nothing is to be done but to see whether a group has queues on several cores.
const WATCH_PERIOD: Duration = Duration::from_millis(200);
/// Between two looks while none has.
const IDLE_PERIOD: Duration = Duration::from_secs(1);
/// Between two looks at what was chosen for each queue.
const CHOICES_PERIOD: Duration = Duration::from_secs(1);
/// Decisions that are kept, of each of the log's kinds.
const LOG: usize = 512;

/// Those of them that the status report has.
const LAST: usize = 8;

/// One queue that is to be moved.
#[derive(Debug, Clone)]
struct PlannedMove {
    key: QueueKey,
    device: DeviceRef,
    to: u32,
    /// A user wants it, or its core ends: it may take longer.
    patient: bool,
}

/// What is to be done after a look.
#[derive(Debug, Default)]
struct Todo {
    /// Processors of cores that are to be started.
    grow: Vec<Option<u32>>,
    /// Cores that are to end and whose last queue has left.
    retire: Vec<u32>,
    /// When to look again; never, until somebody says that something has changed.
    next: Option<Duration>,
}

/// The state of the pool. All methods return at once. Nobody who holds a lock of [`Cores`] may call one: a look asks [`Cores`].
#[derive(Debug)]
pub struct ElasticPool {
    inner: Mutex<Inner>,
    /// Something that users say has changed.
    changed: Notify,
}

#[derive(Debug)]
struct Inner {
    spec: Option<PoolSpec>,
    planner: PoolPlanner,
    topology: Arc<CpuTopology>,
    facts: Facts,
    meters: Meters,
    division: Division,
    disks: DiskDivision,
    underway: Underway,
    moves: VecDeque<PlannedMove>,
    watch: ChoiceWatch,
    log: DecisionLog,
    /// The epoch of the policy's times, and what the wall clock said then, ms since 1970.
    epoch: Instant,
    epoch_ms: u64,
    grown: u64,
    shrunk: u64,
    moved: u64,
    failed: u64,
    /// A core could not be started: not again before.
    grow_at: Instant,
    #[cfg(feature = "kill-points")]
    trace: Option<trace::PoolTrace>,
}

/// What the policy goes by. Without a pool it only does what users ask for.
fn settings(spec: Option<&PoolSpec>) -> PoolSettings {
    match spec {
        None => PoolSettings { min_cores: 0, max_cores: 0, balance: false, ..PoolSettings::default() },
        Some(spec) => PoolSettings {
            min_cores: spec.min,
            max_cores: spec.max,
            cpus: spec.cpus.as_ref().map_or(BTreeSet::new(), |cpus| cpus.cpus().clone()),
            ..PoolSettings::default()
        },
    }
}

impl ElasticPool {
    /// A pool that has not looked yet. Reads sysfs: may block for a moment.
    pub fn new() -> Self {
        let sysfs = host_disks::sysfs();
        let topology = CpuTopology::read(&sysfs).unwrap_or_else(|error| {
            tracing::warn!(%error, "the host's processors: siblings and NUMA nodes are not known");
            CpuTopology::default()
        });
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let nodes = GuestNodes { only: topology.only_node(), ..GuestNodes::default() };
        let inner = Inner {
            spec: None,
            planner: PoolPlanner::new(settings(None)),
            topology: Arc::new(topology),
            facts: Facts::default(),
            meters: Meters::new(),
            division: Division::default(),
            disks: DiskDivision::new(HostDisks::new(sysfs)),
            underway: Underway { nodes, ..Underway::default() },
            moves: VecDeque::new(),
            watch: ChoiceWatch::default(),
            log: DecisionLog::new(LOG),
            // The policy takes a time of zero for never.
            epoch: Instant::now() - Duration::from_millis(1),
            epoch_ms: now_ms,
            grown: 0,
            shrunk: 0,
            moved: 0,
            failed: 0,
            grow_at: Instant::now(),
            #[cfg(feature = "kill-points")]
            trace: trace::PoolTrace::open(),
        };
        ElasticPool { inner: Mutex::new(inner), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something that users say about cores or queues has changed: it is looked at soon.
    pub fn look_soon(&self) {
        self.changed.notify_one();
    }

    /// One look: reads, plans, and says what is to be done beside moving queues.
    fn look(&self, spec: Option<&PoolSpec>, cores: &Cores, groups: &Groups, state_file: &StateFile) -> Todo {
        self.lock().look(spec, cores, groups, state_file)
    }

    /// Enters what cores have chosen for their queues, as far as it has lasted.
    fn watch_choices(&self, cores: &Cores, groups: &Groups, state_file: &StateFile) {
        self.lock().watch_choices(cores, groups, state_file);
    }

    /// The next queue to move.
    fn next_move(&self) -> Option<PlannedMove> {
        self.lock().moves.pop_front()
    }

    /// A move has come to its end.
    fn moved(&self, key: QueueKey, well: bool) {
        let mut inner = self.lock();
        inner.underway.moving.remove(&key);
        if well {
            inner.moved += 1;
        } else {
            inner.failed += 1;
            inner.underway.not_quiet.push(key);
        }
    }

    /// A move has not even begun.
    fn dropped(&self, key: QueueKey) {
        self.lock().underway.moving.remove(&key);
    }

    /// No queue is moved for now: everything is being handed over.
    fn postpone(&self) {
        let mut inner = self.lock();
        for planned in std::mem::take(&mut inner.moves) {
            inner.underway.moving.remove(&planned.key);
        }
    }

    fn grew(&self, well: bool) {
        let mut inner = self.lock();
        if well {
            inner.grown += 1;
        } else {
            inner.grow_at = Instant::now() + Duration::from_secs(10);
        }
    }

    fn shrank(&self, core: u32) {
        let mut inner = self.lock();
        inner.underway.ending.remove(&core);
        inner.shrunk += 1;
    }

    /// The host's processors.
    fn topology(&self) -> Arc<CpuTopology> {
        self.lock().topology.clone()
    }

    /// On which NUMA nodes the memory of guests is, by their devices.
    fn guests_are_on(&self, nodes: BTreeMap<DeviceRef, u32>) {
        self.lock().underway.nodes.devices = nodes;
    }

    /// Cores that end when their queues have left.
    pub fn ending(&self) -> BTreeSet<u32> {
        self.lock().underway.ending.clone()
    }

    /// How it is.
    pub fn report(&self, cores: &Cores) -> PoolReport {
        let specs = cores.all();
        let inner = self.lock();
        let draining = |id: u32, drain: bool| drain || inner.underway.ending.contains(&id);
        let draining = specs.iter().filter(|core| draining(core.id, core.drain)).count() as u32;
        let count = specs.len() as u32;
        PoolReport {
            configured: inner.spec.is_some(),
            min: inner.spec.as_ref().map_or(count, |spec| spec.min),
            max: inner.spec.as_ref().map_or(count, |spec| spec.max),
            cpus: inner.spec.as_ref().and_then(|spec| spec.cpus.clone()),
            open: count - draining,
            draining,
            grown: inner.grown,
            shrunk: inner.shrunk,
            moved: inner.moved,
            failed: inner.failed,
            decisions: inner.log.made(),
        }
    }

    /// What a group has in flight on disks of the host, as of the last look.
    pub fn in_flight(&self, group: GroupId) -> Vec<InFlightReport> {
        let inner = self.lock();
        let lanes = inner.meters.lanes.values().filter(|lane| lane.group == group);
        lanes.map(|lane| inner.disks.report(lane)).collect()
    }

    /// The last of them, of each of the log's kinds.
    pub fn last_decisions(&self) -> Vec<DecisionReport> {
        let inner = self.lock();
        let last = inner.log.last(LAST);
        last.iter().map(|one| inner.reported(one.number, one.at_ns, &one.decision)).collect()
    }

    /// The decisions from number `from` on.
    pub fn decisions(&self, from: u64) -> DecisionsReport {
        let inner = self.lock();
        let (kept, lost) = inner.log.since(from);
        let next = inner.log.made();
        let decisions = kept.iter().map(|one| inner.reported(one.number, one.at_ns, &one.decision));
        DecisionsReport { decisions: decisions.collect(), lost, next }
    }
}

impl Inner {
    fn look(
        &mut self,
        spec: Option<&PoolSpec>,
        cores: &Cores,
        groups: &Groups,
        state_file: &StateFile,
    ) -> Todo {
        if self.spec.as_ref() != spec {
            self.spec = spec.cloned();
            self.planner.set(settings(spec));
        }
        self.facts.follow(state_file, groups);
        let plans = spec.is_some() || self.facts.need_looks() || !self.underway.ending.is_empty();
        // Disks of the host are shared by groups of one core too.
        let divides = self.divides() || !groups.is_empty();
        if !plans && !divides {
            return Todo::default();
        }
        let now = Instant::now();
        let now_ns = self.since_epoch(now);
        let at = (now, now_ns);
        let (readings, worked) = self.meters.read(cores.pool(), &self.facts, &mut self.underway, at);
        if divides {
            self.divide(cores, now_ns);
        }
        if !plans {
            let period = match (worked, self.divides()) {
                (false, _) => IDLE_PERIOD,
                (true, false) => WATCH_PERIOD,
                (true, true) => BUSY_PERIOD,
            };
            return Todo { next: Some(period), ..Todo::default() };
        }
        let mut todo = Todo::default();
        let plan = self.planner.plan(&readings, &self.topology);
        #[cfg(feature = "kill-points")]
        if let Some(trace) = &mut self.trace {
            trace.enter(&settings(spec), &readings, &plan);
        }
        for decision in plan {
            self.take(decision, &readings, cores, &mut todo);
        }
        // Somebody has pinned a queue there meanwhile, or has retired it.
        let pinned = |core: u32| readings.queues.iter().any(|queue| queue.pinned == Some(core));
        let (facts, ending) = (&self.facts, &mut self.underway.ending);
        ending.retain(|core| {
            let wanted = pinned(*core);
            if wanted {
                cores.reopen(*core);
            }
            !wanted && facts.core(*core).is_some()
        });
        let left = |core: &&u32| !readings.queues.iter().any(|queue| queue.core == **core);
        todo.retire = self.underway.ending.iter().filter(left).copied().collect();
        let busy = worked || !self.underway.moving.is_empty() || !self.underway.ending.is_empty();
        todo.next = Some(if busy { BUSY_PERIOD } else { IDLE_PERIOD });
        todo
    }

    /// Whether some core goes by a part of something.
    fn divides(&self) -> bool {
        self.division.divides() || self.disks.divides()
    }

    /// Has the parts of weights that stand on each core follow what was read.
    fn divide(&mut self, cores: &Cores, now_ns: u64) {
        let uses: Vec<GroupUse> = self.meters.groups.values().copied().collect();
        for (core, part) in self.division.look(&uses, now_ns, self.meters.period_ns) {
            // One that has ended has no groups.
            if let Ok(core) = cores.pool().core(CoreId(core)) {
                let _ = core.sender().send(CoreMessage::Group(part));
            }
        }
        let lanes: Vec<DiskLane> = self.meters.lanes.values().copied().collect();
        for (core, part) in self.disks.look(&lanes, now_ns) {
            if let Ok(core) = cores.pool().core(CoreId(core)) {
                let _ = core.sender().send(CoreMessage::Device(part));
            }
        }
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_nanos() as u64
    }

    fn watch_choices(&mut self, cores: &Cores, groups: &Groups, state_file: &StateFile) {
        self.facts.follow(state_file, groups);
        let queues = self.meters.choices(cores.pool(), &self.facts);
        // So that what was polled in vain in one second is divided by the polls of that second.
        let _ = cores.pool().group_times();
        let readings = cores.pool().read();
        let looks: Vec<_> = readings
            .iter()
            .map(|reading| CoreLook { core: reading.core, objective: reading.objective })
            .collect();
        let at_ns = self.since_epoch(Instant::now());
        for decision in self.watch.look(&queues, &looks) {
            tracing::debug!("choice: {}", self.words(&decision));
            self.log.enter(at_ns, decision);
        }
    }

    /// Notes a decision, and what is to be done for it.
    fn take(&mut self, decision: Decision, readings: &PoolReadings, cores: &Cores, todo: &mut Todo) {
        match decision {
            Decision::Grow { .. } if Instant::now() < self.grow_at => return,
            Decision::Grow { cpu, .. } => todo.grow.push(cpu),
            Decision::Shrink { core, .. } => {
                self.underway.ending.insert(core);
                cores.close(core);
            }
            Decision::Move { queue, to, reason, .. } => {
                let Some(device) = self.meters.numbers.device(queue.device).cloned() else { return };
                let patient =
                    matches!(reason, MoveReason::Pinned | MoveReason::Draining | MoveReason::Reserved);
                self.underway.moving.insert(queue);
                self.moves.push_back(PlannedMove { key: queue, device, to, patient });
            }
            _ => {}
        }
        let text = self.words(&decision);
        tracing::info!(cores = readings.cores.len(), "pool: {text}");
        self.log.enter(readings.now_ns, decision);
    }

    fn words(&self, decision: &Decision) -> String {
        decision.words(|queue| match self.meters.numbers.device(queue.device) {
            Some(device) => format!("{} queue {}", device.name(), queue.queue),
            None => queue.to_string(),
        })
    }

    fn reported(&self, number: u64, at_ns: u64, decision: &Decision) -> DecisionReport {
        let (word, queue, from, to) = match *decision {
            Decision::Grow { .. } => (DecisionWord::Grow, None, None, None),
            Decision::Shrink { core, .. } => (DecisionWord::Shrink, None, Some(core), None),
            Decision::Move { queue, from, to, .. } => (DecisionWord::Move, Some(queue), Some(from), Some(to)),
            Decision::Stuck { queue, .. } => (DecisionWord::Stuck, Some(queue), None, None),
            Decision::Mode { queue, core, mode, .. } => {
                let word = if mode.is_armed() { DecisionWord::Arm } else { DecisionWord::Poll };
                (word, Some(queue), Some(core), None)
            }
            Decision::Throttled { queue, core, .. } => {
                (DecisionWord::Throttle, Some(queue), Some(core), None)
            }
            Decision::Ceiling { core, .. } => (DecisionWord::Throttle, None, Some(core), None),
            Decision::Objective { core, .. } => (DecisionWord::Objective, None, Some(core), None),
        };
        let device = queue.and_then(|queue| self.meters.numbers.device(queue.device));
        DecisionReport {
            number,
            at_ms: self.epoch_ms + at_ns / 1_000_000,
            decision: word,
            device: device.map(|device| device.name().to_owned()),
            queue: queue.map(|queue| queue.queue),
            from,
            to,
            text: self.words(decision),
        }
    }
}
