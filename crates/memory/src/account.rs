//! What a client may take of what all clients of the process share, and which files it may share as memory.
//!
//! A client is the peer of one socket. What it takes beyond its own part it takes from a pool: clients that empty the pool leave
//! everybody else the 32 mappings that a VM needs. Each mapping holds one descriptor, so the same numbers bound descriptors: the pool is
//! no larger than half the descriptors that the process may have (RLIMIT_NOFILE when the first client comes), and no client takes more
//! than a quarter of it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::charge::{Charge, Usage};
pub use crate::charge::{Limits, Pin};
use crate::error::{MapError, MappingError};
use crate::files;
use crate::map::{MemoryRegion, RegionSpec};
use crate::mapping::Mapping;
pub use crate::quota::{CLIENTS, MOST, OWN};

/// The account of one client. What was mapped and pinned on it stays counted until it is gone, whoever holds it.
#[derive(Debug, Clone)]
pub struct Account(Arc<Usage>);

impl Account {
    /// An account for one socket's clients, one after the other. Refused where there are [`CLIENTS`] already.
    pub fn new(limits: Limits) -> Result<Self, MappingError> {
        Ok(Account(Arc::new(Usage::new(limits)?)))
    }

    /// Mappings that it has now.
    pub fn mappings(&self) -> usize {
        self.0.mappings()
    }

    /// Bytes pinned for it now.
    pub fn pinned(&self) -> u64 {
        self.0.pinned()
    }

    /// Maps `len` bytes of a file that the client sent, from `offset`, for loads and stores.
    pub fn mapping(&self, file: OwnedFd, offset: u64, len: u64) -> Result<Mapping, MappingError> {
        self.map(file, offset, len, true)
    }

    /// Maps a region of its guest's memory; for loads alone if it is not `writable`.
    pub fn region(&self, spec: RegionSpec, writable: bool) -> Result<MemoryRegion, MapError> {
        MemoryRegion::map_by(spec, |file, offset, len| self.map(file, offset, len, writable))
    }

    fn map(&self, file: OwnedFd, offset: u64, len: u64, writable: bool) -> Result<Mapping, MappingError> {
        files::check(&file, self.0.limits.files)?;
        Mapping::of(file, offset, len, writable, Charge::of(&self.0)?)
    }
}
