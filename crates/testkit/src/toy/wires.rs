//! What both halves of a toy ring, and its driver, have in common: the layout of a ring, what is kept of a queue, and the wires.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_device::{Interrupt, StateError};
use ioplane_memory::PAGE;
use rustix::event::{EventfdFlags, eventfd};

use super::Gate;

/// How many queues a [`super::ToyRing`] has.
pub const QUEUES: u16 = 2;
/// Requests in one ring.
pub const DEPTH: u16 = 32;
/// Bytes of guest memory that one ring takes.
pub const RING_BYTES: u64 = 2 * PAGE;

/// Offsets in either page.
pub(super) mod layout {
    /// Published (driver) or answered (device), counted up, 16 bits.
    pub const INDEX: usize = 0;
    /// Driver: the answer that it wants an interrupt for. Device: the request that it wants a kick for. 16 bits.
    pub const EVENT: usize = 2;
    /// Requests or answers, 64 bits each.
    pub const SLOTS: usize = 64;

    /// Where request `index` is.
    pub fn slot(index: u16) -> usize {
        SLOTS + usize::from(index % super::DEPTH) * 8
    }
}

/// Whether moving an index from `old` to `new` passes `event` (virtio 1.3, 2.7.10).
pub(super) fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// What one queue is when its poller is parked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct QueueV1 {
    pub(super) answered: u16,
    /// Requests taken on top of those, when it was suspended: they are done again from the ring.
    pub(super) in_flight: u16,
    /// Mix of all answered requests.
    pub(super) sum: u64,
}

impl QueueV1 {
    pub(super) fn check(&self) -> Result<(), StateError> {
        if self.in_flight > DEPTH {
            return Err(StateError::Impossible(format!("{} requests in flight", self.in_flight)));
        }
        Ok(())
    }
}

/// An interrupt that is counted.
#[derive(Debug, Default)]
pub struct Counted(AtomicU64);

impl Counted {
    /// How often it was sent.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

impl Interrupt for Counted {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// What belongs to the machine and outlives any one instance of the device: kicks, interrupts, the disk.
#[derive(Debug)]
pub struct Wires {
    pub(super) kicks: Vec<Arc<OwnedFd>>,
    /// How many kicks the device took, of each queue.
    pub taken: Vec<AtomicU64>,
    /// Of each queue.
    pub calls: Vec<Arc<Counted>>,
    pub gate: Arc<Gate>,
}

impl Wires {
    pub fn new() -> Arc<Self> {
        let kick =
            || Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"));
        Arc::new(Wires {
            kicks: (0..QUEUES).map(|_| kick()).collect(),
            taken: (0..QUEUES).map(|_| AtomicU64::new(0)).collect(),
            calls: (0..QUEUES).map(|_| Arc::default()).collect(),
            gate: Gate::new(QUEUES),
        })
    }
}
