//! Where a virtqueue lies, what it is made of and what can be wrong with it: the same for split and packed rings.

use ioplane_memory::GuestFault;

use super::memory::GuestMemory;
use super::spec::*;

/// What the back end did that a device must not do. A test that sees one has found a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The used ring names a head that is not in the device's hands: used twice, or never made available.
    #[error("used entry {at} names descriptor {id}, which the device does not hold")]
    NotInFlight {
        /// Free-running index of the entry.
        at: u16,
        /// The `id` found there.
        id: u32,
    },
    /// The used index went back, or further than there are requests.
    #[error("the used index jumped from {from} to {to} with {held} requests in flight")]
    UsedJumped {
        from: u16,
        to: u16,
        /// Heads the device holds.
        held: u16,
    },
    /// The memory for rings or buffers is used up, or was addressed wrongly.
    #[error(transparent)]
    Memory(#[from] GuestFault),
    /// A frame whose header names more buffers than were published with it, or that has no header at all.
    #[error(
        "half a frame: its header names {wanted} buffers, and fewer were published, or none with room for it"
    )]
    HalfFrame {
        /// What `num_buffers` says.
        wanted: u16,
    },
    /// Fewer descriptors in the ring than the plan needs.
    #[error("a ring of {size} descriptors has no room for this plan: make fewer slots or a larger ring")]
    NoRoom {
        /// Entries of the ring.
        size: u16,
    },
}

/// Where a ring lies, as guest addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// Entries, a power of two up to 32768; of a packed ring any number.
    pub size: u16,
    /// Descriptor table or ring, 16-byte aligned.
    pub desc: u64,
    /// Driver area: available ring, 2-byte aligned, or event suppression structure, 4-byte aligned.
    pub avail: u64,
    /// Device area: used ring or event suppression structure, 4-byte aligned.
    pub used: u64,
}

impl RingPlace {
    /// Carves a ring of `size` entries out of `memory`, laid out as Linux does for a modern device (one block, the used
    /// ring on a cache line of its own). A packed ring needs less, and uses the beginning of each part.
    pub fn carve(memory: &mut GuestMemory, size: u16) -> Result<Self, DriverError> {
        let (desc, avail) = (Self::desc_bytes(size), Self::avail_bytes(size));
        let used_at = (desc + avail).next_multiple_of(64);
        let len = used_at + Self::used_bytes(size);
        let at = memory.alloc(len, 4096).ok_or(GuestFault::OutsideMemory { gpa: u64::MAX, len })?;
        Ok(RingPlace { size, desc: at, avail: at + desc, used: at + used_at })
    }

    /// Size of the descriptor table of `size` entries, bytes.
    pub fn desc_bytes(size: u16) -> u64 {
        DESC_SIZE * u64::from(size)
    }

    /// Size of the available ring with `used_event`, bytes.
    pub fn avail_bytes(size: u16) -> u64 {
        6 + 2 * u64::from(size)
    }

    /// Size of the used ring with `avail_event`, bytes.
    pub fn used_bytes(size: u16) -> u64 {
        6 + USED_SIZE * u64::from(size)
    }
}

/// Which features of the ring were negotiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingMode {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
}

impl RingMode {
    /// The mode that negotiated `features` mean.
    pub fn of(features: u64) -> Self {
        RingMode {
            event_idx: features & VIRTIO_F_EVENT_IDX != 0,
            packed: features & VIRTIO_F_RING_PACKED != 0,
        }
    }
}

/// One buffer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Guest address.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub write: bool,
}

/// A used element or descriptor, taken out of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain (of a packed ring: its buffer ID), now ours again; still allocated until [`super::DriverRing::free`].
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}
