//! The driver side of a split virtqueue (virtio 1.3, 2.7), deciding about kicks and interrupts as Linux's driver does.

use std::sync::atomic::{Ordering, fence};

use ioplane_memory::{GuestFault, GuestView, Window};

use super::memory::GuestMemory;
use super::raw::RawRing;
use super::spec::*;

/// What the back end did that a device must not do. A test that sees one has found a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The used ring names a head that is not in the device's hands: used twice, or never made available.
    #[error("used ring entry {at} names descriptor {id}, which the device does not hold")]
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
    /// Entries, a power of two up to 32768.
    pub size: u16,
    /// Descriptor table, 16-byte aligned.
    pub desc: u64,
    /// Available ring, 2-byte aligned.
    pub avail: u64,
    /// Used ring, 4-byte aligned.
    pub used: u64,
}

impl RingPlace {
    /// Carves a ring of `size` entries out of `memory`, laid out as Linux does for a modern device (one block, the used
    /// ring on a cache line of its own).
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
}

impl RingMode {
    /// The mode that negotiated `features` mean.
    pub fn of(features: u64) -> Self {
        RingMode { event_idx: features & VIRTIO_F_EVENT_IDX != 0 }
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

/// An element taken out of the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Head of the chain, now ours again; still allocated until [`SplitRing::free`].
    pub head: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// The driver's half of one split virtqueue. Used by one thread; allocates only in `new`.
#[derive(Debug)]
pub struct SplitRing {
    place: RingPlace,
    mode: RingMode,
    desc: Window,
    avail: Window,
    used: Window,
    /// Descriptors that are free, last in first out.
    free: Vec<u16>,
    /// Own copy of each descriptor's successor inside a direct chain; the device cannot touch it.
    next: Vec<Option<u16>>,
    held: Vec<bool>,
    in_flight: u16,
    avail_idx: u16,
    /// Entries published since the last decision about a kick.
    added: u16,
    /// Used index as last read, and how far we have come.
    seen: u16,
    last_used: u16,
    interrupts: bool,
}

impl SplitRing {
    /// A fresh ring at `place`: zeroes its three parts and asks for interrupts, as Linux does.
    pub fn new(view: &GuestView, place: RingPlace, mode: RingMode) -> Result<Self, DriverError> {
        let size = place.size;
        let mut ring = SplitRing {
            place,
            mode,
            desc: view.window(place.desc, RingPlace::desc_bytes(size), 16)?,
            avail: view.window(place.avail, RingPlace::avail_bytes(size), 2)?,
            used: view.window(place.used, RingPlace::used_bytes(size), 4)?,
            free: (0..size).rev().collect(),
            next: vec![None; size.into()],
            held: vec![false; size.into()],
            in_flight: 0,
            avail_idx: 0,
            added: 0,
            seen: 0,
            last_used: 0,
            interrupts: true,
        };
        ring.zero();
        Ok(ring)
    }

    /// Begins again at index zero, with all three parts zeroed and every descriptor free. Only while the queue is stopped.
    pub fn reset(&mut self) {
        let size = self.place.size;
        self.free.clear();
        self.free.extend((0..size).rev());
        self.next.fill(None);
        self.held.fill(false);
        (self.in_flight, self.avail_idx, self.added, self.seen, self.last_used) = (0, 0, 0, 0, 0);
        self.interrupts = true;
        self.zero();
    }

    fn zero(&mut self) {
        for window in [&self.desc, &self.avail, &self.used] {
            for at in (0..window.len() / 2 * 2).step_by(2) {
                window.put_u16(at, 0);
            }
        }
    }

    /// Where it lies.
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// Chains the device holds.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Free-running index of the next available entry.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// Free-running index of the next used entry that we take.
    pub fn last_used(&self) -> u16 {
        self.last_used
    }

    /// The used index as the device last published it: the base that QEMU gives a back end after a crash.
    pub fn used_idx(&self) -> u16 {
        self.used.load_u16(2)
    }

    /// Takes `count` descriptors and links them in our own books; nothing is written to the table. First is the head.
    pub fn take(&mut self, count: usize) -> Option<Box<[u16]>> {
        if count == 0 || count > self.free.len() {
            return None;
        }
        let ids: Box<[u16]> = (0..count).filter_map(|_| self.free.pop()).collect();
        for pair in ids.windows(2) {
            self.next[usize::from(pair[0])] = Some(pair[1]);
        }
        self.next[usize::from(ids[count - 1])] = None;
        Some(ids)
    }

    /// Writes descriptor `id` of the table.
    #[inline]
    pub fn write_desc(&self, id: u16, part: Part, indirect: bool, next: Option<u16>) {
        write_desc(&self.desc, id.into(), part, indirect, next);
    }

    /// Takes descriptors for `parts`, writes a direct chain and returns its head. `None` when there is no room.
    pub fn chain(&mut self, parts: &[Part]) -> Option<u16> {
        let ids = self.take(parts.len())?;
        for (index, part) in parts.iter().enumerate() {
            self.write_desc(ids[index], *part, false, ids.get(index + 1).copied());
        }
        Some(ids[0])
    }

    /// Takes one descriptor, writes `parts` as a table into `table` (16 bytes each) and returns the head.
    pub fn chain_indirect(&mut self, parts: &[Part], table: &Window) -> Option<u16> {
        let head = self.take(1)?[0];
        for (index, part) in parts.iter().enumerate() {
            let next = (index + 1 < parts.len()).then_some(index as u16 + 1);
            write_desc(table, index, *part, false, next);
        }
        let len = (parts.len() as u64 * DESC_SIZE) as u32;
        self.write_desc(head, Part { gpa: table.gpa(), len, write: false }, true, None);
        Some(head)
    }

    /// Gives the chain at `head` back to the free list. It must not be in flight.
    pub fn free(&mut self, head: u16) {
        assert!(!self.held[usize::from(head)], "descriptor {head} is still the device's");
        let mut id = Some(head);
        while let Some(at) = id {
            id = self.next[usize::from(at)].take();
            self.free.push(at);
        }
    }

    /// Makes the chain at `head` available and publishes the index at once, as Linux does for each request.
    #[inline]
    pub fn push(&mut self, head: u16) {
        assert!(!self.held[usize::from(head)], "descriptor {head} is already the device's");
        self.held[usize::from(head)] = true;
        self.in_flight += 1;
        let slot = self.avail_idx & (self.place.size - 1);
        self.avail.put_u16(4 + 2 * usize::from(slot), head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.added += 1;
        // A release store: the entry and all that it leads to are visible before the index.
        self.avail.put_u16(2, self.avail_idx);
    }

    /// Whether the device wants a kick for what was pushed since the last call (2.7.10.1, 2.7.13.4). Call it once a batch.
    #[inline]
    pub fn kick_needed(&mut self) -> bool {
        if self.added == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        let (old, new) = (self.avail_idx.wrapping_sub(self.added), self.avail_idx);
        self.added = 0;
        if self.mode.event_idx {
            let event = self.used.load_u16(4 + USED_SIZE as usize * usize::from(self.place.size));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.used.load_u16(0) & VIRTQ_USED_F_NO_NOTIFY == 0
        }
    }

    /// Takes the next used element, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        if self.seen == self.last_used {
            let to = self.used.load_u16(2);
            if to == self.last_used {
                return Ok(None);
            }
            if to.wrapping_sub(self.last_used) > self.in_flight {
                return Err(DriverError::UsedJumped { from: self.last_used, to, held: self.in_flight });
            }
            self.seen = to;
        }
        let at = 4 + USED_SIZE as usize * usize::from(self.last_used & (self.place.size - 1));
        let (id, len) = (self.used.load_u32(at), self.used.load_u32(at + 4));
        match self.held.get_mut(id as usize) {
            Some(held) if *held => *held = false,
            _ => return Err(DriverError::NotInFlight { at: self.last_used, id }),
        }
        self.in_flight -= 1;
        self.last_used = self.last_used.wrapping_add(1);
        if self.interrupts && self.mode.event_idx {
            self.put_used_event(self.last_used);
            fence(Ordering::SeqCst);
        }
        Ok(Some(Used { head: id as u16, len }))
    }

    /// Whether the device has used something that we have not taken.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.seen != self.last_used || self.used.load_u16(2) != self.last_used
    }

    /// Says that interrupts are not wanted. With EVENT_IDX there is no way to say never:
    /// Linux writes 0 and so does this, which leaves one interrupt in 65536 requests.
    pub fn disable_interrupts(&mut self) {
        if self.interrupts {
            self.interrupts = false;
            if self.mode.event_idx {
                self.put_used_event(0);
            } else {
                self.avail.put_u16(0, VIRTQ_AVAIL_F_NO_INTERRUPT);
            }
        }
    }

    /// Asks for an interrupt at the next used element. False if one is there already: reap again before sleeping.
    pub fn enable_interrupts(&mut self) -> bool {
        if !self.interrupts {
            self.interrupts = true;
            if !self.mode.event_idx {
                self.avail.put_u16(0, 0);
            }
        }
        if self.mode.event_idx {
            self.put_used_event(self.last_used);
        }
        fence(Ordering::SeqCst);
        !self.has_used()
    }

    #[inline]
    fn put_used_event(&self, value: u16) {
        self.avail.put_u16(4 + 2 * usize::from(self.place.size), value);
    }

    /// Every field, to read and to spoil. Our own books do not hear of it.
    pub fn raw(&self) -> RawRing<'_> {
        RawRing { size: self.place.size, desc: &self.desc, avail: &self.avail, used: &self.used }
    }
}

/// Writes entry `id` of the descriptor table in `table`.
#[inline]
pub(super) fn write_desc(table: &Window, id: usize, part: Part, indirect: bool, next: Option<u16>) {
    let at = DESC_SIZE as usize * id;
    let mut flags = 0;
    if part.write {
        flags |= VIRTQ_DESC_F_WRITE;
    }
    if indirect {
        flags |= VIRTQ_DESC_F_INDIRECT;
    }
    if next.is_some() {
        flags |= VIRTQ_DESC_F_NEXT;
    }
    table.put_u64(at, part.gpa);
    table.put_u32(at + 8, part.len);
    table.put_u16(at + 12, flags);
    table.put_u16(at + 14, next.unwrap_or(0));
}
