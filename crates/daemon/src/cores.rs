//! The daemon's I/O cores: which there are, how they are set, and where a disk's queues go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::report::{CoreReport, ObjectiveWord};
use ioplane_api::spec::{CORES, CoreSpec};
use ioplane_cores::{Core, CoreReading, Notify, Pool};
use ioplane_device::{CoreId, CoreSender, Placement};
use ioplane_scheduler::ObjectiveReport;

use super::lower::{Lower, notify_word, objective};
use super::state_file::{CoreRecord, StateFile};
use crate::refusal::Refusal;

/// How long retiring waits for the last queue to leave.
const RETIRE_TIMEOUT: Duration = Duration::from_secs(2);

/// All I/O cores. Methods may block for a moment (control plane, off the async threads).
#[derive(Debug)]
pub struct Cores {
    pool: Arc<Pool>,
    specs: Mutex<BTreeMap<u32, CoreSpec>>,
    state_file: Arc<StateFile>,
}

impl Cores {
    /// No cores yet.
    pub fn new(state_file: Arc<StateFile>) -> Self {
        Cores { pool: Arc::new(Pool::new()), specs: Mutex::default(), state_file }
    }

    fn specs(&self) -> MutexGuard<'_, BTreeMap<u32, CoreSpec>> {
        self.specs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub fn all(&self) -> Vec<CoreSpec> {
        self.specs().values().cloned().collect()
    }

    /// Refuses if there is no such core.
    pub fn check(&self, id: u32) -> Result<(), Refusal> {
        let specs = self.specs();
        if specs.contains_key(&id) {
            return Ok(());
        }
        let error = format!("there is no I/O core {id}: {}", there_are(specs.keys().copied()));
        Err(Refusal::missing(error, "see `ioplane core list`"))
    }

    /// Starts a core, with the number of `spec`, or if `numbered` is false with one that no core has had; a core of the pool gets the lowest that
    /// nobody has. `configured` is what the configuration says of it, if it does.
    pub fn start(
        &self,
        mut spec: CoreSpec,
        numbered: bool,
        configured: Option<CoreSpec>,
    ) -> Result<u32, Refusal> {
        let flaws = CoreSpec { id: 0, ..spec.clone() }.flaws();
        if !flaws.is_empty() {
            return Err(Refusal::flaws(&flaws));
        }
        let mut specs = self.specs();
        let id = match (numbered, spec.elastic) {
            (true, _) => spec.id,
            (false, false) => self.pool.next_id().0,
            (false, true) => {
                let known = self.state_file.entries().cores;
                let free = |id: &u32| !known.contains_key(id) && !specs.contains_key(id);
                (0..CORES).find(free).unwrap_or(CORES)
            }
        };
        if id >= CORES {
            return Err(Refusal::conflict(
                format!("{CORES} cores have been started"),
                "restart the daemon: `core add` uses no number twice while it runs",
            ));
        }
        self.pool.add_as(CoreId(id), spec.lower())?;
        spec.id = id;
        let record = CoreRecord { configured, now: Some(spec.clone()) };
        let kept = self.state_file.change(|entries| {
            entries.cores.insert(id, record);
        });
        if let Err(error) = kept {
            let _ = self.pool.retire(CoreId(id), Instant::now() + RETIRE_TIMEOUT);
            return Err(error.into());
        }
        self.pool.core(CoreId(id))?.open(takes_any(&spec));
        specs.insert(id, spec);
        Ok(id)
    }

    /// No queue is placed there any more, but those that name it.
    pub fn close(&self, id: u32) {
        if let Ok(core) = self.pool.core(CoreId(id)) {
            core.open(false);
        }
    }

    /// Undoes [`Cores::close`].
    pub fn reopen(&self, id: u32) {
        if let (Ok(core), Some(spec)) = (self.pool.core(CoreId(id)), self.specs().get(&id)) {
            core.open(takes_any(spec));
        }
    }

    /// Ends a core that serves no queue any more; never the last one.
    pub fn retire(&self, id: u32) -> Result<(), Refusal> {
        self.check(id)?;
        let mut specs = self.specs();
        if specs.len() == 1 {
            return Err(Refusal::conflict(
                format!("I/O core {id} is the only one"),
                "add another first: `ioplane core add`",
            ));
        }
        self.pool.retire(CoreId(id), Instant::now() + RETIRE_TIMEOUT)?;
        specs.remove(&id);
        self.state_file.change(|entries| match entries.cores.get_mut(&id) {
            Some(record) if record.configured.is_some() => record.now = None,
            _ => {
                entries.cores.remove(&id);
            }
        })?;
        Ok(())
    }

    /// Changes what a `CoreChangeForm` has, of one or of all, while they run. One core at least takes queues of any device.
    pub fn set(&self, id: Option<u32>, change: impl Fn(&mut CoreSpec)) -> Result<(), Refusal> {
        if let Some(id) = id {
            self.check(id)?;
        }
        let mut specs = self.specs();
        let mut next = specs.clone();
        next.values_mut().filter(|spec| id.is_none_or(|id| id == spec.id)).for_each(&change);
        if specs.values().any(takes_any) && !next.values().any(takes_any) {
            return Err(Refusal::conflict(
                "no other I/O core takes queues of any device",
                "add another first: `ioplane core add`",
            ));
        }
        for spec in next.values() {
            let core = self.pool.core(CoreId(spec.id))?;
            core.notify(spec.notify.lower());
            core.spin(Duration::from_micros(spec.spin_us));
            core.objective(&objective(spec));
            if specs.get(&spec.id).is_some_and(|before| takes_any(before) != takes_any(spec)) {
                core.open(takes_any(spec));
            }
        }
        self.state_file.change(|entries| {
            for spec in next.values() {
                if let Some(record) = entries.cores.get_mut(&spec.id) {
                    record.now = Some(spec.clone());
                }
            }
        })?;
        *specs = next;
        Ok(())
    }

    /// How each is. `ending`: those that the pool is ending.
    pub fn report(&self, ending: &BTreeSet<u32>) -> Vec<CoreReport> {
        let specs = self.specs();
        let report = |core: Arc<Core>| {
            let reading = core.read();
            let spec = specs.get(&reading.core)?;
            let (objective, missed_percent) = outcome(spec, &reading);
            let cpu = reading.cpu.and_then(|cpu| u32::try_from(cpu).ok());
            Some(CoreReport {
                id: spec.id,
                cpu,
                cpu_refused: spec.cpu.filter(|_| cpu.is_none()),
                notify: notify_word(reading.notify).word().to_owned(),
                spin_us: spec.spin_us,
                p99_us: spec.p99_us,
                cpu_percent: spec.cpu_percent,
                objective,
                missed_percent,
                yield_policy: spec.yield_policy.word().to_owned(),
                elastic: spec.elastic,
                reserve: spec.reserve.clone(),
                draining: spec.drain || ending.contains(&spec.id),
                queues: reading.queues,
                awake: reading.awake,
                busy_percent: f64::from(reading.busy_permille) / 10.0,
                // Those between two looks at a disk are sleeps too, as what ends them is a wake-up.
                sleeps: reading.sleeps + reading.waits,
                wakes: reading.wakes,
                units: reading.units,
                cpu_us: reading.cpu_ns / 1000,
                run_delay_us: core.run_delay_ns() / 1000,
                busy_us: reading.busy_ns / 1000,
                empty_us: reading.empty_ns / 1000,
                slept_us: reading.slept_ns / 1000,
                age_us: reading.age_ns / 1000,
            })
        };
        self.pool.cores().filter_map(report).collect()
    }
}

/// Whether queues are placed there of which nobody says where they go.
fn takes_any(spec: &CoreSpec) -> bool {
    !spec.drain && spec.reserve.is_none()
}

/// What came of what is asked of a core.
fn outcome(spec: &CoreSpec, reading: &CoreReading) -> (ObjectiveWord, f64) {
    if (spec.p99_us, spec.cpu_percent) == (None, None) {
        return (ObjectiveWord::Unknown, 0.0);
    }
    if reading.notify != Notify::Adaptive {
        return (ObjectiveWord::Unheeded, 0.0);
    }
    match reading.objective {
        ObjectiveReport::Unknown => (ObjectiveWord::Unknown, 0.0),
        ObjectiveReport::Kept => (ObjectiveWord::Kept, 0.0),
        ObjectiveReport::LateByCeiling(permille) => {
            (ObjectiveWord::LateByCeiling, f64::from(permille) / 10.0)
        }
        ObjectiveReport::LateByLoad(permille) => (ObjectiveWord::LateByLoad, f64::from(permille) / 10.0),
        // Of a second.
        ObjectiveReport::OverCeiling(ns) => (ObjectiveWord::OverCeiling, ns as f64 / 1e7),
    }
}

/// How many cores there are, and their numbers.
fn there_are(cores: impl Iterator<Item = u32>) -> String {
    let numbers: Vec<String> = cores.map(|id| id.to_string()).collect();
    match numbers.as_slice() {
        [] => "there are none".to_owned(),
        [one] => format!("there is one, with number {one}"),
        [others @ .., last] => {
            format!("there are {}, with numbers {} and {last}", numbers.len(), others.join(", "))
        }
    }
}

/// Where the queues of one disk go: each to the core that it was moved to, or to the disk's own, or to whichever has time. A
/// core that has been retired since is passed over.
#[derive(Clone)]
pub struct CorePlacement {
    pub pool: Arc<Pool>,
    /// The disk's own.
    pub core: Option<u32>,
    pub moved: BTreeMap<u16, u32>,
}

impl Placement for CorePlacement {
    fn place(&self, device: &str, queue: u16) -> Arc<dyn CoreSender> {
        let wanted = self.moved.get(&queue).copied().or(self.core);
        match wanted.and_then(|id| self.pool.core(CoreId(id)).ok()) {
            Some(core) => core.sender(),
            None => self.pool.place(device, queue),
        }
    }
}

impl From<super::state_file::StateFileError> for Refusal {
    fn from(error: super::state_file::StateFileError) -> Self {
        Refusal::failed(error.to_string(), "free space in the run directory, then try again")
    }
}

#[cfg(test)]
mod tests {
    use super::there_are;

    #[test]
    fn cores_are_counted_and_named() {
        let said = |cores: &[u32]| there_are(cores.iter().copied());
        assert_eq!(said(&[]), "there are none");
        assert_eq!(said(&[0]), "there is one, with number 0");
        assert_eq!(said(&[0, 3]), "there are 2, with numbers 0 and 3");
        assert_eq!(said(&[0, 3, 4]), "there are 3, with numbers 0, 3 and 4");
    }
}
