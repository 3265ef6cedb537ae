//! What part of a core the queues of a group have.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};

pub use ioplane_scheduler::{BlockDevice, GroupId};

/// The group of a queue and its weight, which stand with the queue's slot on a core: where several groups have work, each has a part of the
/// core's time in proportion to its weight, and its queues share that part. All queues of a group bring the same weight; the last one that
/// reaches a core holds there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Queues of one group are one tenant's.
    pub group: GroupId,
    /// Of the group, against the other groups of the core.
    pub weight: NonZeroU32,
}

impl Share {
    /// The share of a group that nobody else of this process has.
    pub fn new_group(weight: NonZeroU32) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Share { group: GroupId(NEXT.fetch_add(1, Ordering::Relaxed)), weight }
    }
}

/// What one core has of a group's weight, and of what the group may have in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPart {
    /// The group.
    pub group: GroupId,
    /// Of its weight, in parts of [`ioplane_scheduler::WHOLE`].
    pub part: u32,
    /// The most that it may have in flight from this core while others compete with it, bytes.
    pub in_flight: u64,
}

/// What a group may have in flight from one core on one block device of the host, whoever competes for the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePart {
    /// The group.
    pub group: GroupId,
    /// The device that backings lie on.
    pub device: BlockDevice,
    /// Bytes; `u64::MAX` if nobody else uses the disks that it lies on.
    pub in_flight: u64,
}

/// One group for everybody who says nothing: they take turns.
impl Default for Share {
    fn default() -> Self {
        Share { group: GroupId(0), weight: NonZeroU32::MIN }
    }
}
