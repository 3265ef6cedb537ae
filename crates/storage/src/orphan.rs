//! Where lanes go that are dropped with operations in flight: off the I/O core, to be seen to their end.
//!
//! What the kernel still works on (guest memory, tables, the open image with its locks) stays alive here until it has done.
//! Control plane only.

#![expect(
    clippy::disallowed_types,
    reason = "control plane: a lane comes here once it has left its I/O core"
)]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The rest of a lane.
pub(crate) trait Orphan: Send {
    /// Blocks until nothing is in flight any more. Begins nothing new.
    fn wait(&mut self);
}

/// Counts the lanes whose operations have not ended.
#[derive(Debug, Default)]
pub(crate) struct OrphanedIo {
    left: Mutex<usize>,
    fewer: Condvar,
}

impl OrphanedIo {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a lane in and returns at once.
    pub fn take(self: &Arc<Self>, remains: Box<dyn Orphan>) {
        *self.count() += 1;
        let place = Place(self.clone());
        let work = move || {
            let mut remains = remains;
            remains.wait();
            // First all of it goes, the open image too; then it is quiet.
            drop(remains);
            drop(place);
        };
        // Without a thread the closure is dropped on the spot, and with it the remains, which wait by themselves before they
        // go: slow, but safe.
        let _ = std::thread::Builder::new().name("limbo".into()).spawn(work);
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

struct Place(Arc<OrphanedIo>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.fewer.notify_all();
    }
}
