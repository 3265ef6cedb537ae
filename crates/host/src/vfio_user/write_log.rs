//! Which pages of the client's memory the device writes by itself, while the client copies that memory: clients know nothing of it.
//!
//! The log reaches as far as the client's memory does. When memory comes above it, a longer one is put in its place before the device learns
//! of that memory.

use std::collections::BTreeSet;
use std::sync::Arc;

use ioplane_device::LifecycleError;
use ioplane_memory::{DirtyLog, MappingError};

/// Why nothing is logged.
#[derive(Debug, thiserror::Error)]
pub enum WriteLogError {
    /// No memory for the log.
    #[error("memory for the log of written pages: {0}")]
    Memory(#[from] MappingError),
    /// The device is not here.
    #[error(transparent)]
    Device(#[from] LifecycleError),
}

/// The log in force.
pub(super) struct WriteLog {
    pub now: Arc<DirtyLog>,
    /// Pages below this guest address are in it.
    pub limit: u64,
    /// Guest addresses of pages that an earlier, shorter log had.
    before: BTreeSet<u64>,
}

impl WriteLog {
    pub fn new(limit: u64) -> Result<Self, MappingError> {
        // One page at least: there may be no memory yet.
        let limit = limit.max(ioplane_memory::PAGE);
        Ok(WriteLog { now: Arc::new(DirtyLog::new(limit)?), limit, before: BTreeSet::new() })
    }

    /// What an earlier log has is in this one too. The device marks this one.
    pub fn follow(&mut self, mut earlier: WriteLog) {
        self.before.extend(earlier.take());
    }

    /// Guest addresses of the pages that were written since they were taken last, ascending.
    pub fn take(&mut self) -> Vec<u64> {
        let mut pages = std::mem::take(&mut self.before);
        pages.extend(self.now.take());
        pages.into_iter().collect()
    }
}
