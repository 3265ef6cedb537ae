//! Counting what clients take: mappings, and bytes pinned for hardware.
//!
//! A client with more than [`OWN`] mappings has as many from the pool as it has more, whichever those are: unmapping any of them gives
//! one back.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::MappingError;
use crate::files::Files;
use crate::mutation::{Invariant, bound};
use crate::quota::{CLIENTS, MOST, OWN, POOL, PROCESS};

static CLIENTS_NOW: AtomicUsize = AtomicUsize::new(0);
static POOL_NOW: AtomicUsize = AtomicUsize::new(0);
static PROCESS_NOW: AtomicUsize = AtomicUsize::new(0);

/// What the operator allows a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Files that it may share as memory.
    pub files: Files,
    /// Bytes of its memory that may be pinned for hardware at once. Pinned memory is memory of the host, also where the client
    /// never touched it.
    pub pinned: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { files: Files::default(), pinned: u64::MAX }
    }
}

/// What one client has taken. It counts as a client until nothing is charged to it any more.
#[derive(Debug)]
pub(crate) struct Usage {
    pub limits: Limits,
    mappings: AtomicUsize,
    pinned: AtomicU64,
}

/// The size of the pool: no more than half the descriptors that the process may have, since each mapping holds one.
fn pool() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.and_then(|files| usize::try_from(files / 2).ok()).map_or(POOL, |half| half.min(POOL))
    })
}

/// Most mappings of one client: its own and a quarter of the pool, so that two cannot take most of a small limit.
fn most() -> usize {
    MOST.min(OWN + pool() / 4)
}

/// Adds one to `count` if it is below `most`.
fn take_one(count: &AtomicUsize, most: usize) -> bool {
    let most = bound(Invariant::KeepsQuotas, most as u64) as usize;
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| (now < most).then_some(now + 1)).is_ok()
}

impl Usage {
    /// Of one client more; refused where there are [`CLIENTS`] already.
    pub fn new(limits: Limits) -> Result<Self, MappingError> {
        if !take_one(&CLIENTS_NOW, CLIENTS) {
            return Err(MappingError::TooManyClients);
        }
        Ok(Usage { limits, mappings: AtomicUsize::new(0), pinned: AtomicU64::new(0) })
    }

    /// Mappings now.
    pub fn mappings(&self) -> usize {
        self.mappings.load(Ordering::Relaxed)
    }

    /// Bytes pinned now.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Counts one mapping more.
    fn take(&self) -> Result<(), MappingError> {
        let mut now = self.mappings.load(Ordering::SeqCst);
        let mut from_pool = FromPool(false);
        loop {
            let most = most();
            if now as u64 >= bound(Invariant::KeepsQuotas, most as u64) {
                return Err(MappingError::OverQuota { most });
            }
            // Taken before it is counted here, so that whoever gives one back finds it taken.
            if !from_pool.be(now >= OWN) {
                return Err(MappingError::PoolEmpty { own: OWN });
            }
            match self.mappings.compare_exchange(now, now + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    // It is the count's from here on.
                    from_pool.0 = false;
                    return Ok(());
                }
                Err(other) => now = other,
            }
        }
    }

    /// Counts one less.
    fn give_back(&self) {
        if self.mappings.fetch_sub(1, Ordering::SeqCst) > OWN {
            POOL_NOW.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        CLIENTS_NOW.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether one mapping of the pool is taken; given back when this is dropped.
struct FromPool(bool);

impl FromPool {
    /// Takes one, or gives it back, so that it is as `wanted`. False if the pool is empty.
    fn be(&mut self, wanted: bool) -> bool {
        match (self.0, wanted) {
            (false, true) => self.0 = take_one(&POOL_NOW, pool()),
            (true, false) => *self = FromPool(false),
            _ => {}
        }
        self.0 == wanted
    }
}

impl Drop for FromPool {
    fn drop(&mut self) {
        if self.0 {
            POOL_NOW.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// One mapping, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    /// `None`: the process's own.
    usage: Option<Arc<Usage>>,
}

impl Charge {
    /// A mapping of a client.
    pub fn of(usage: &Arc<Usage>) -> Result<Self, MappingError> {
        usage.take()?;
        Ok(Charge { usage: Some(usage.clone()) })
    }

    /// A mapping of the process itself.
    pub fn of_process() -> Result<Self, MappingError> {
        if take_one(&PROCESS_NOW, PROCESS) { Ok(Charge { usage: None }) } else { Err(MappingError::TooMany) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        match &self.usage {
            Some(usage) => usage.give_back(),
            None => {
                PROCESS_NOW.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// Memory that is pinned for hardware, counted on its client's account until this is dropped.
#[derive(Debug)]
pub struct Pin {
    usage: Option<Arc<Usage>>,
    bytes: u64,
}

impl Pin {
    /// Counts `bytes` of a mapping that is charged like that; refused where its client may have no more. The process's own memory
    /// is not counted.
    pub(crate) fn of(charge: &Charge, bytes: u64) -> Result<Self, MappingError> {
        let usage = charge.usage.clone();
        if let Some(usage) = &usage {
            let most = bound(Invariant::KeepsQuotas, usage.limits.pinned);
            let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= most);
            usage
                .pinned
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
                .map_err(|now| MappingError::TooMuchPinned { now, more: bytes, most })?;
        }
        Ok(Pin { usage, bytes })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(usage) = &self.usage {
            usage.pinned.fetch_sub(self.bytes, Ordering::SeqCst);
        }
    }
}
