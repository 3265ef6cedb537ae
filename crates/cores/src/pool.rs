//! Several cores, and which of them a queue goes to.

#![expect(clippy::disallowed_types, reason = "the list is the control plane's: no core sees it")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use ioplane_device::{CoreId, CoreSender, GroupId, Placement};

use crate::core::Core;
use crate::counts::CoreReading;
use crate::error::PoolError;
use crate::mailbox::EndedCore;
use crate::meters::GroupTime;
use crate::settings::{CoreSettings, Notify};

/// Load that a queue without a history is reckoned at, in thousandths of a core. Idle queues are thus spread by number, and
/// a core at work is avoided until the others have caught up.
const QUEUE_PERMILLE: u32 = 50;

/// What the queues of groups have used of cores: by group, then by the number of the core, which several cores may have had, one after another.
pub type GroupTimes = BTreeMap<GroupId, BTreeMap<u32, GroupTime>>;

/// Adds what groups have used of one core.
fn add_times(times: &mut GroupTimes, core: &Core) {
    for (group, used) in core.group_times() {
        *times.entry(group).or_default().entry(core.id().0).or_default() += used;
    }
}

/// The I/O cores of a daemon. All methods take `&self`, from any thread of the control plane; none holds the list while it waits.
#[derive(Debug, Default)]
pub struct Pool {
    // CONTROL: who starts, ends and looks for cores; no core does.
    /// Those that have ended leave it when the next one is started.
    cores: RwLock<Vec<Arc<Core>>>,
    // CONTROL: who starts a core, and who asks what groups have used; no core does.
    /// What groups have used of cores that have left the list.
    ended: Mutex<GroupTimes>,
    next_id: AtomicU32,
}

impl Pool {
    /// A pool without cores.
    pub fn new() -> Self {
        Pool::default()
    }

    /// A pool with one core for each of `settings`, numbered from 0.
    pub fn with(settings: impl IntoIterator<Item = CoreSettings>) -> Result<Self, PoolError> {
        let pool = Pool::new();
        for each in settings {
            pool.add(each)?;
        }
        Ok(pool)
    }

    /// Starts one core more, with a number that no core has had.
    pub fn add(&self, settings: CoreSettings) -> Result<CoreId, PoolError> {
        let id = CoreId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.add_as(id, settings).map(|()| id)
    }

    /// Starts a core with this number, which a core that has ended may have had.
    pub fn add_as(&self, id: CoreId, settings: CoreSettings) -> Result<(), PoolError> {
        let mut cores = self.cores.write().unwrap_or_else(PoisonError::into_inner);
        cores.retain(|core| {
            let ended = core.ended();
            if ended {
                add_times(&mut self.lock_ended(), core);
            }
            !ended
        });
        if cores.iter().any(|core| core.id() == id) {
            return Err(PoolError::Taken(id.0));
        }
        cores.push(Arc::new(Core::start(id, settings)?));
        cores.sort_by_key(|core| core.id());
        self.next_id.fetch_max(id.0.saturating_add(1), Ordering::Relaxed);
        Ok(())
    }

    /// The number that [`Pool::add`] gives to the next core.
    pub fn next_id(&self) -> CoreId {
        CoreId(self.next_id.load(Ordering::Relaxed))
    }

    /// Ends a core when its last queue has left; see [`Core::retire`]. Meanwhile no queue is placed there.
    pub fn retire(&self, id: CoreId, deadline: Instant) -> Result<(), PoolError> {
        self.core(id)?.retire(deadline)
    }

    /// The cores that have not ended, by number.
    pub fn cores(&self) -> impl Iterator<Item = Arc<Core>> + use<> {
        let cores = self.cores.read().unwrap_or_else(PoisonError::into_inner).clone();
        cores.into_iter().filter(|core| !core.ended())
    }

    /// One of them.
    pub fn core(&self, id: CoreId) -> Result<Arc<Core>, PoolError> {
        self.cores().find(|core| core.id() == id).ok_or(PoolError::NoSuchCore(id.0))
    }

    /// The meters of all of them.
    pub fn read(&self) -> Vec<CoreReading> {
        self.cores().map(|core| core.read()).collect()
    }

    fn lock_ended(&self) -> MutexGuard<'_, GroupTimes> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the queues of each group have used, by the number of the core. That of cores that have ended is in it.
    pub fn group_times(&self) -> GroupTimes {
        // Meanwhile no core goes from the list to those that have ended.
        let cores = self.cores.read().unwrap_or_else(PoisonError::into_inner);
        let mut times = self.lock_ended().clone();
        cores.iter().for_each(|core| add_times(&mut times, core));
        times
    }

    /// Forgets what a group has used: nobody is in it any more.
    pub fn forget_group(&self, group: GroupId) {
        let cores = self.cores.read().unwrap_or_else(PoisonError::into_inner);
        cores.iter().for_each(|core| core.forget_group(group));
        self.lock_ended().remove(&group);
    }

    /// [`Core::notify`] for all of them.
    pub fn notify(&self, notify: Notify) {
        self.cores().for_each(|core| core.notify(notify));
    }

    /// A placement that puts every queue on that core.
    pub fn on(&self, id: CoreId) -> Result<OnCore, PoolError> {
        self.core(id).map(|core| OnCore(core.sender()))
    }

    fn least_loaded(&self) -> Option<Arc<Core>> {
        self.cores()
            .filter(|core| core.accepts_queues())
            .min_by_key(|core| (!core.is_open(), core.permille() + core.queues() * QUEUE_PERMILLE))
    }
}

impl Placement for Pool {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        match self.least_loaded() {
            Some(core) => core.sender(),
            // No core at all: sending reports it.
            None => Arc::new(EndedCore(CoreId(0))),
        }
    }
}

/// Puts every queue on one core.
#[derive(Debug, Clone)]
pub struct OnCore(Arc<dyn CoreSender>);

impl Placement for OnCore {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.0.clone()
    }
}
