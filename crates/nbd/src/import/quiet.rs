//! Connections of channels that are gone, on which servers may still work.

#![expect(clippy::disallowed_types, reason = "control plane: a channel only counts itself, by an atomic")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// Counts them. A channel counts itself on its core, in the moment that it leaves; whoever sees the connection to its end takes that back.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    leaving: AtomicUsize,
    lock: Mutex<()>,
    fewer: Condvar,
}

impl Quiet {
    /// One more, until somebody drops the [`Leave`] that belongs to it.
    pub fn begin(&self) {
        self.leaving.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether there is none.
    pub fn now(&self) -> bool {
        self.leaving.load(Ordering::Acquire) == 0
    }

    /// Blocks until there is none or `deadline` has passed; says whether there is none.
    pub fn wait(&self, deadline: Instant) -> bool {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.now() {
            let Some(time) = deadline.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) else {
                return false;
            };
            lock = self.fewer.wait_timeout(lock, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Takes one [`Quiet::begin`] back when it is dropped.
#[derive(Debug)]
pub(super) struct Leave(pub Arc<Quiet>);

impl Drop for Leave {
    fn drop(&mut self) {
        let _lock = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.leaving.fetch_sub(1, Ordering::AcqRel);
        self.0.fewer.notify_all();
    }
}
