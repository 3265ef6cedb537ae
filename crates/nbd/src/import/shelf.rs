//! Copies of writes whose channels are gone: kept until they are durable, or the next channel goes on with them.

#![expect(clippy::disallowed_types, reason = "control plane")]
#![expect(clippy::vec_box, reason = "boxes as channels have them: an I/O core moves a pointer")]

use std::collections::TryReserveError;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::link::Link;
use super::retained::Retained;
use super::writes::Writes;

/// See the module.
#[derive(Debug)]
pub(super) struct Shelf {
    bytes: usize,
    left: Mutex<Vec<Box<Retained>>>,
}

/// The shelf, while nobody else may put anything there or take it away.
pub(super) struct OpenShelf<'a> {
    bytes: usize,
    left: MutexGuard<'a, Vec<Box<Retained>>>,
}

impl Shelf {
    /// For copies of so many bytes for each channel.
    pub fn new(bytes: usize) -> Shelf {
        Shelf { bytes, left: Mutex::default() }
    }

    /// Waits for whoever has it, none of whom waits for anything.
    pub fn open(&self) -> OpenShelf<'_> {
        OpenShelf { bytes: self.bytes, left: self.left.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

impl OpenShelf<'_> {
    /// For a new channel: what an earlier one has left, or an empty one.
    pub fn take(&mut self, writes: &Writes) -> Result<Box<Retained>, TryReserveError> {
        self.clear(writes);
        self.left.pop().map_or_else(|| Retained::new(self.bytes).map(Box::new), Ok)
    }

    /// A channel is gone. Says whether its copies are here now; the control half may have them.
    pub fn put(&mut self, link: &Link, writes: &Writes) -> bool {
        let Some(mut retained) = link.retained.as_ref().and_then(|locker| locker.take()) else {
            return link.retained.is_none();
        };
        retained.void_unacknowledged();
        link.set_shelved();
        self.left.push(retained);
        self.clear(writes);
        true
    }

    /// All that channels have left.
    pub fn take_all(&mut self) -> Vec<Box<Retained>> {
        std::mem::take(&mut self.left)
    }

    /// Puts back what [`OpenShelf::take_all`] took.
    pub fn put_back(&mut self, retained: Box<Retained>) {
        self.left.push(retained);
    }

    /// Throws away what is durable.
    fn clear(&mut self, writes: &Writes) {
        let durable = writes.durable();
        self.left.retain_mut(|retained| {
            retained.release(durable);
            retained.left(durable).next().is_some()
        });
    }
}
