//! What an adder stands on, as a disk does below its device: the sums, and a gate that stalls the answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Gate, mix};

/// How many queues an [`super::Adder`] has.
pub const QUEUES: u16 = 2;
/// What the device stands on; outlives any one instance of it, as a disk outlives a daemon.
#[derive(Debug)]
pub struct Bench {
    /// Stalls the answers.
    pub gate: Arc<Gate>,
    sums: [AtomicU64; QUEUES as usize],
}

impl Bench {
    /// One with sums of zero.
    pub fn new() -> Arc<Self> {
        Arc::new(Bench { gate: Gate::new(QUEUES), sums: Default::default() })
    }

    /// Adds to the sum of `queue`; one poller at a time does.
    pub(super) fn add(&self, queue: u16, number: u64) -> u64 {
        let sum = &self.sums[usize::from(queue)];
        let mixed = mix(sum.load(Ordering::Relaxed), number);
        sum.store(mixed, Ordering::Relaxed);
        mixed
    }
}
