//! The driver side of a virtqueue, split or packed: what both have in common.

use ioplane_memory::{GuestFault, GuestView, Window};

use super::memory::GuestMemory;
use super::packed::PackedRing;
use super::raw::{RawPacked, RawRing};
use super::spec::*;
use super::split::SplitRing;

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
        /// Where it was.
        from: u16,
        /// Where it is.
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
        /// Ring size.
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
    /// Head of the chain (of a packed ring: its buffer ID), now ours again; still allocated until [`Ring::free`].
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// The driver's half of one virtqueue. Used by one thread; allocates where chains are laid out, not where they are used.
#[derive(Debug)]
pub enum Ring {
    /// A split one.
    Split(SplitRing),
    /// A packed one.
    Packed(PackedRing),
}

macro_rules! either {
    ($self:expr, $ring:ident => $does:expr) => {
        match $self {
            Ring::Split($ring) => $does,
            Ring::Packed($ring) => $does,
        }
    };
}

impl Ring {
    /// A fresh ring at `place`: zeroes its parts and asks for interrupts, as Linux does.
    pub fn new(view: &GuestView, place: RingPlace, mode: RingMode) -> Result<Self, DriverError> {
        Ok(match mode.packed {
            true => Ring::Packed(PackedRing::new(view, place, mode)?),
            false => Ring::Split(SplitRing::new(view, place, mode)?),
        })
    }

    /// Begins again with all parts zeroed and every descriptor free. Only while the queue is stopped.
    pub fn reset(&mut self) {
        either!(self, ring => ring.reset());
    }

    /// Where it lies.
    pub fn place(&self) -> RingPlace {
        either!(self, ring => ring.place())
    }

    /// Where a VMM lets a back end go on that it never saw stop: after a crash. Of a split ring the used index, as the device
    /// last published it. A VMM cannot know the places of a packed ring: it says what it said first.
    pub fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.used_idx().into(),
            Ring::Packed(_) => PACKED_START,
        }
    }

    /// Chains the device holds.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// Free descriptors.
    pub fn room(&self) -> usize {
        either!(self, ring => ring.room())
    }

    /// Chains made available so far, free-running: the available index of a split ring.
    pub fn avail_idx(&self) -> u16 {
        either!(self, ring => ring.avail_idx())
    }

    /// Chains that the device has shown as used so far, taken back or not, free-running: the used index of a split ring.
    pub fn used_idx(&self) -> u16 {
        either!(self, ring => ring.used_idx())
    }

    /// Chains taken back so far, free-running.
    pub fn last_used(&self) -> u16 {
        either!(self, ring => ring.last_used())
    }

    /// Keeps `count` descriptors for a chain, and gives its head. `None` when there is no room.
    pub fn reserve(&mut self, count: usize) -> Option<u16> {
        either!(self, ring => ring.reserve(count))
    }

    /// The chain at `head`, not in flight, consists of `parts`: at most as many as are reserved.
    pub fn lay(&mut self, head: u16, parts: &[Part]) {
        either!(self, ring => ring.lay(head, parts));
    }

    /// The chain at `head`, not in flight, consists of `parts` in a table: descriptor `from` of `table` and those after it.
    pub fn lay_indirect(&mut self, head: u16, parts: &[Part], table: &Window, from: usize) {
        let gpa = table.gpa() + from as u64 * DESC_SIZE;
        let whole = Part { gpa, len: (parts.len() as u64 * DESC_SIZE) as u32, write: false };
        match self {
            Ring::Split(ring) => {
                SplitRing::lay_table(table, from, parts);
                ring.lay_indirect(head, whole);
            }
            Ring::Packed(ring) => {
                PackedRing::lay_table(table, from, parts);
                ring.lay_indirect(head, whole);
            }
        }
    }

    /// Takes descriptors for `parts`, lays out a direct chain and returns its head. `None` when there is no room.
    pub fn chain(&mut self, parts: &[Part]) -> Option<u16> {
        let head = self.reserve(parts.len())?;
        self.lay(head, parts);
        Some(head)
    }

    /// Takes one descriptor, writes `parts` as a table into `table` (16 bytes each) and returns the head.
    pub fn chain_indirect(&mut self, parts: &[Part], table: &Window) -> Option<u16> {
        let head = self.reserve(1)?;
        self.lay_indirect(head, parts, table, 0);
        Some(head)
    }

    /// Gives the chain at `head` back. It must not be in flight.
    pub fn free(&mut self, head: u16) {
        either!(self, ring => ring.free(head));
    }

    /// Makes the chain at `head` available at once, as Linux does for each request.
    #[inline]
    pub fn push(&mut self, head: u16) {
        either!(self, ring => ring.push(head));
    }

    /// Whether the device wants a kick for what was pushed since the last call. Call it once a batch.
    #[inline]
    pub fn kick_needed(&mut self) -> bool {
        either!(self, ring => ring.kick_needed())
    }

    /// Takes the next used element, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        either!(self, ring => ring.pop())
    }

    /// Whether the device has used something that we have not taken.
    #[inline]
    pub fn has_used(&self) -> bool {
        either!(self, ring => ring.has_used())
    }

    /// Says that interrupts are not wanted.
    pub fn disable_interrupts(&mut self) {
        either!(self, ring => ring.disable_interrupts());
    }

    /// Asks for an interrupt at the next used element. False if one is there already: reap again before sleeping.
    pub fn enable_interrupts(&mut self) -> bool {
        either!(self, ring => ring.enable_interrupts())
    }

    /// Every field of a split ring, to read and to spoil. Our own books do not hear of it. Panics for a packed one: the
    /// test is wrong.
    pub fn raw(&self) -> RawRing<'_> {
        match self {
            Ring::Split(ring) => ring.raw(),
            Ring::Packed(_) => panic!("a packed ring has no such fields: raw_packed()"),
        }
    }

    /// As [`Ring::raw`], for a packed ring.
    pub fn raw_packed(&self) -> RawPacked<'_> {
        match self {
            Ring::Packed(ring) => ring.raw(),
            Ring::Split(_) => panic!("a split ring has no such fields: raw()"),
        }
    }
}
