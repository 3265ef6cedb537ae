//! What a client may take of what all clients of the process share, and which files it may share as memory.
//!
//! ```text
//!   32,768 mappings = 512 clients x 32 that are theirs   + 12,288 for whoever wants more, up to 525 each   + 4,096 of our own
//! ```
//!
//! A client is the peer of one socket. What it takes beyond its own part it takes from a pool: clients that empty the pool leave
//! everybody else the 32 that a VM needs. Each mapping holds one descriptor, so the same numbers bound descriptors: the pool is no
//! larger than half the descriptors that the process may have (RLIMIT_NOFILE when the first client comes).

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::files::{self, Files};
use crate::map::MAX_REGIONS;
use crate::mutation::{Law, bound};
use crate::table::SLOTS;
use crate::{MapError, Mapping, MappingError, Region, RegionSpec};

/// Most clients of one process.
pub const CLIENTS: usize = 512;
/// Mappings that no other client can take away from a client.
pub const OWN: usize = 32;
/// Most mappings of one client: its regions, the in-flight region, the dirty log, and what is mapped before its predecessor goes.
pub const MOST: usize = MAX_REGIONS + 16;
/// Mappings of the process itself: disks in memory, pages and rings of watched hardware.
const HOUSE: usize = 4096;
/// Most mappings for clients that want more than [`OWN`]; see [`pool`].
const POOL: usize = SLOTS - CLIENTS * OWN - HOUSE;

static CLIENTS_NOW: AtomicUsize = AtomicUsize::new(0);
static POOL_NOW: AtomicUsize = AtomicUsize::new(0);
static HOUSE_NOW: AtomicUsize = AtomicUsize::new(0);

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

#[derive(Debug)]
struct Inner {
    limits: Limits,
    mappings: AtomicUsize,
    pinned: AtomicU64,
}

impl Drop for Inner {
    fn drop(&mut self) {
        CLIENTS_NOW.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The account of one client. What was mapped and pinned on it stays counted until it is gone, whoever holds it.
#[derive(Debug, Clone)]
pub struct Account(Arc<Inner>);

/// Mappings for clients that want more than [`OWN`]: fewer where the process may have fewer descriptors.
fn pool() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.and_then(|files| usize::try_from(files / 2).ok()).map_or(POOL, |half| half.min(POOL))
    })
}

/// Adds one to `count` if it is below `most`.
fn take_one(count: &AtomicUsize, most: usize) -> bool {
    let most = bound(Law::KeepsQuotas, most as u64) as usize;
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| (now < most).then_some(now + 1)).is_ok()
}

impl Account {
    /// An account for one socket's clients, one after the other. Refused where there are [`CLIENTS`] already.
    pub fn new(limits: Limits) -> Result<Self, MappingError> {
        if !take_one(&CLIENTS_NOW, CLIENTS) {
            return Err(MappingError::TooManyClients);
        }
        Ok(Account(Arc::new(Inner { limits, mappings: AtomicUsize::new(0), pinned: AtomicU64::new(0) })))
    }

    /// Mappings that it has now.
    pub fn mappings(&self) -> usize {
        self.0.mappings.load(Ordering::Relaxed)
    }

    /// Bytes pinned for it now.
    pub fn pinned(&self) -> u64 {
        self.0.pinned.load(Ordering::Relaxed)
    }

    /// Maps `len` bytes of a file that the client sent, from `offset`, for loads and stores.
    pub fn mapping(&self, file: OwnedFd, offset: u64, len: u64) -> Result<Mapping, MappingError> {
        self.map(file, offset, len, true)
    }

    /// Maps a region of its guest's memory; for loads alone if it is not `writable`.
    pub fn region(&self, spec: RegionSpec, writable: bool) -> Result<Region, MapError> {
        Region::map_by(spec, |file, offset, len| self.map(file, offset, len, writable))
    }

    fn map(&self, file: OwnedFd, offset: u64, len: u64, writable: bool) -> Result<Mapping, MappingError> {
        files::check(&file, self.0.limits.files)?;
        Mapping::of(file, offset, len, writable, self.charge()?)
    }

    /// Counts one mapping.
    fn charge(&self) -> Result<Charge, MappingError> {
        let count = &self.0.mappings;
        let before = count.fetch_add(1, Ordering::SeqCst);
        // From here on dropping it gives back what has been taken.
        let mut charge = Charge { account: Some(self.clone()), pool: false };
        if before as u64 >= bound(Law::KeepsQuotas, MOST as u64) {
            return Err(MappingError::OverQuota { most: MOST });
        }
        if before >= OWN {
            charge.pool = take_one(&POOL_NOW, pool());
            if !charge.pool {
                return Err(MappingError::PoolEmpty { own: OWN });
            }
        }
        Ok(charge)
    }
}

/// One mapping, counted.
#[derive(Debug)]
pub(crate) struct Charge {
    /// `None`: the process's own.
    account: Option<Account>,
    pool: bool,
}

impl Charge {
    /// A mapping of the process itself.
    pub fn house() -> Result<Self, MappingError> {
        if take_one(&HOUSE_NOW, HOUSE) {
            Ok(Charge { account: None, pool: false })
        } else {
            Err(MappingError::TooMany)
        }
    }

    /// Whose mapping it is.
    pub fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        match &self.account {
            Some(account) => account.0.mappings.fetch_sub(1, Ordering::SeqCst),
            None => HOUSE_NOW.fetch_sub(1, Ordering::SeqCst),
        };
        if self.pool {
            POOL_NOW.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Memory that is pinned for hardware, counted on its client's account until this is dropped.
#[derive(Debug)]
pub struct Pin {
    account: Option<Account>,
    bytes: u64,
}

impl Pin {
    /// Counts `bytes` of `mapping`; refused where its client may have no more. The process's own memory is not counted.
    pub(crate) fn of(mapping: &Mapping, bytes: u64) -> Result<Self, MappingError> {
        let account = mapping.charge().account().cloned();
        if let Some(Account(inner)) = &account {
            let most = bound(Law::KeepsQuotas, inner.limits.pinned);
            let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= most);
            inner
                .pinned
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
                .map_err(|now| MappingError::TooMuchPinned { now, more: bytes, most })?;
        }
        Ok(Pin { account, bytes })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(Account(inner)) = &self.account {
            inner.pinned.fetch_sub(self.bytes, Ordering::SeqCst);
        }
    }
}
