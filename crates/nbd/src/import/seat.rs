//! How many channels an import has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One channel's place. Free again when it is dropped.
#[derive(Debug)]
pub(super) struct Seat(Arc<AtomicUsize>);

impl Seat {
    /// A place, if fewer than `most` are taken.
    pub fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Seat> {
        let one_more = |count| (count < most).then_some(count + 1);
        taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Seat(taken.clone()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
