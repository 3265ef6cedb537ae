//! Orphaned I/O: the operations in flight of dropped channels, waited for off the I/O core.
//!
//! What the kernel still works on (guest memory, tables, the open image with its locks) stays alive here until it has finished.
//! Control plane only.

#![expect(
    clippy::disallowed_types,
    reason = "control plane: a channel comes here once it has left its I/O core"
)]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What is left of a dropped channel with operations in flight.
pub(crate) trait Orphan: Send {
    /// Blocks until nothing is in flight any more. Begins nothing new.
    fn wait(&mut self);
}

/// Counts the channels whose operations have not ended.
#[derive(Debug, Default)]
pub(crate) struct OrphanedIo {
    left: Mutex<usize>,
    fewer: Condvar,
}

impl OrphanedIo {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an orphan until the guard goes.
    pub fn guard(self: &Arc<Self>) -> CountGuard {
        *self.count() += 1;
        CountGuard(self.clone())
    }

    /// Waits for the operations of a dropped channel on a thread of its own. Returns at once.
    pub fn take(self: &Arc<Self>, orphan: Box<dyn Orphan>) {
        let guard = self.guard();
        let work = move || {
            let mut orphan = orphan;
            orphan.wait();
            // Everything is dropped, the open image too, before it counts as ended.
            drop(orphan);
            drop(guard);
        };
        // Without a thread the closure is dropped here, and with it the orphan, whose drop waits: slow, but safe.
        let _ = std::thread::Builder::new().name("orphaned-io".into()).spawn(work);
    }

    /// Blocks until it is empty or `deadline` has passed; says whether it is.
    pub fn wait_quiet(&self, deadline: Instant) -> bool {
        let mut left = self.count();
        while *left > 0 {
            let Some(time) = deadline.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) else {
                return false;
            };
            left = self.fewer.wait_timeout(left, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// What an orphan that waits elsewhere holds until it has ended.
pub(crate) struct CountGuard(Arc<OrphanedIo>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.fewer.notify_all();
    }
}
