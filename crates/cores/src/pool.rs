//! Several cores, and which of them a queue goes to.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ioplane_device::{CoreId, CoreSender, Placement};

use crate::core::Core;
use crate::counts::CoreReading;
use crate::error::PoolError;
use crate::mailbox::EndedCore;
use crate::settings::{CoreSettings, Notify};

/// Load that a queue without a history is reckoned at, in thousandths of a core. Idle queues are thus spread by number, and
/// a core at work is avoided until the others have caught up.
const QUEUE_PERMILLE: u32 = 50;

/// One link of a list that only grows: cores are few, and what an ended one leaves here is small.
#[derive(Debug)]
struct Link {
    core: Core,
    next: OnceLock<Box<Link>>,
}

/// The I/O cores of a daemon. All methods take `&self`, from any thread of the control plane.
#[derive(Debug, Default)]
pub struct Pool {
    first: OnceLock<Box<Link>>,
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

    /// Starts one core more. Numbers are never used twice.
    pub fn add(&self, settings: CoreSettings) -> Result<CoreId, PoolError> {
        let id = CoreId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let mut link = Box::new(Link { core: Core::start(id, settings)?, next: OnceLock::new() });
        let mut end = &self.first;
        loop {
            match end.set(link) {
                Ok(()) => return Ok(id),
                Err(mine) => link = mine,
            }
            if let Some(taken) = end.get() {
                end = &taken.next;
            }
        }
    }

    /// Ends a core when its last queue has left; see [`Core::retire`]. Meanwhile no queue is placed there.
    pub fn retire(&self, id: CoreId, deadline: Instant) -> Result<(), PoolError> {
        self.core(id)?.retire(deadline)
    }

    /// The cores that have not ended.
    pub fn cores(&self) -> impl Iterator<Item = &Core> {
        let mut link = self.first.get();
        std::iter::from_fn(move || {
            let here = link?;
            link = here.next.get();
            Some(&here.core)
        })
        .filter(|core| !core.ended())
    }

    /// One of them.
    pub fn core(&self, id: CoreId) -> Result<&Core, PoolError> {
        self.cores().find(|core| core.id() == id).ok_or(PoolError::NoSuchCore(id.0))
    }

    /// The meters of all of them.
    pub fn read(&self) -> Vec<CoreReading> {
        self.cores().map(Core::read).collect()
    }

    /// [`Core::notify`] for all of them.
    pub fn notify(&self, notify: Notify) {
        self.cores().for_each(|core| core.notify(notify));
    }

    /// A placement that puts every queue on that core.
    pub fn on(&self, id: CoreId) -> Result<OnCore, PoolError> {
        self.core(id).map(|core| OnCore(core.sender()))
    }

    fn least_loaded(&self) -> Option<&Core> {
        self.cores()
            .filter(|core| core.accepts_queues())
            .min_by_key(|core| core.permille() + core.queues() * QUEUE_PERMILLE)
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
