//! One virtqueue whose buffers go round: the least that a driver can do for a frame.
//!
//! ```text
//!   take() <-- used by the device      slot: one buffer with one descriptor (direct, or indirect with its parts),
//!      |                                     laid out once; what goes round is its number
//!   put(slot), publish() --> made available to the device, a batch at a time
//! ```
//!
//! The testkit's rings check the device at every step and publish each request by itself, as Linux does for a disk. A
//! generator of frames must be faster than what it measures: here a frame costs two stores and two loads beside its own
//! bytes, split and packed. What the device must not do is still found out (`check.rs` before anything is timed; the
//! stamps of the frames meanwhile; a slot number out of range at once).

use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, bail, ensure};
use ioplane_memory::Window;
use ioplane_testkit::driver::spec::*;
use ioplane_testkit::driver::{GuestMemory, RingPlace};

/// Flags of a packed descriptor (virtio 1.3, 2.8.1).
const PACKED_AVAIL: u16 = 1 << 7;
const PACKED_USED: u16 = 1 << 15;
/// Event suppression of a packed ring (2.8.14).
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// How many slots are taken at a time.
pub const TAKE: usize = 32;

/// How a ring is laid out, and what was negotiated about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
}

/// The buffers of a belt: all alike.
#[derive(Debug, Clone, Copy)]
pub struct Slots {
    /// How many, at most as the ring has entries.
    pub count: u16,
    /// From one to the next, bytes.
    pub stride: u32,
    /// What the descriptors of one cover, bytes.
    pub len: u32,
    /// Bytes of a part; if that is less than `len`, the descriptor is indirect.
    pub part: u32,
    /// Whether the device writes them.
    pub write: bool,
}

/// A buffer that the device has used.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Its slot, ours again.
    pub slot: u16,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// The driver's half of one queue. Used by one thread; allocates only in `new`.
pub struct Belt {
    place: RingPlace,
    mode: Mode,
    slots: Slots,
    desc: Window,
    driver: Window,
    device: Window,
    buffers: Window,
    /// Address, length and flags of each slot's descriptor.
    each: Vec<(u64, u32, u16)>,
    /// Slots that are not the device's.
    idle: Vec<u16>,
    /// Free-running count of slots made available; its low bits are the place (split), with the wrap above them (packed).
    put: u32,
    /// What of it the device was shown, and what it was last considered for a kick.
    shown: u32,
    kicked: u32,
    /// Free-running count of slots taken back, and the device's index as last read (split).
    taken: u32,
    seen: u16,
    /// The first descriptor of a batch (packed): shown last.
    first: Option<(usize, u16)>,
}

impl Belt {
    /// Carves a ring of `size` entries and its buffers out of `memory`; all slots are idle.
    pub fn new(memory: &mut GuestMemory, size: u16, mode: Mode, slots: Slots) -> Result<Self> {
        ensure!(slots.count <= size && slots.len <= slots.stride, "{slots:?} in a ring of {size}");
        // A packed ring's parts are smaller than a split one's: descriptors, and two words each for driver and device.
        let place = RingPlace::carve(memory, size)?;
        let view = memory.view().clone();
        let desc = view.window(place.desc, RingPlace::desc_bytes(size), 16)?;
        let driver = view.window(place.avail, RingPlace::avail_bytes(size), 2)?;
        let device = view.window(place.used, RingPlace::used_bytes(size), 4)?;
        let buffers = memory.carve(u64::from(slots.count) * u64::from(slots.stride), 64)?;
        let mut belt = Belt {
            place,
            mode,
            slots,
            desc,
            driver,
            device,
            buffers,
            each: Vec::new(),
            idle: (0..slots.count).rev().collect(),
            put: 0,
            shown: 0,
            kicked: 0,
            taken: 0,
            seen: 0,
            first: None,
        };
        for slot in 0..slots.count {
            let each = belt.lay(memory, slot)?;
            belt.each.push(each);
            if !mode.packed {
                let (gpa, len, flags) = each;
                put_desc(&belt.desc, slot.into(), gpa, len, flags, 0);
            }
        }
        Ok(belt)
    }

    /// Lays a slot out: the buffer itself, or a table of its parts.
    fn lay(&self, memory: &mut GuestMemory, slot: u16) -> Result<(u64, u32, u16)> {
        let Slots { stride, len, part, write, .. } = self.slots;
        let gpa = self.buffers.gpa() + u64::from(slot) * u64::from(stride);
        let write = if write { VIRTQ_DESC_F_WRITE } else { 0 };
        if part >= len {
            return Ok((gpa, len, write));
        }
        let parts = len.div_ceil(part);
        let table = memory.carve(u64::from(parts) * DESC_SIZE, 64)?;
        for at in 0..parts {
            let from = at * part;
            let more = at + 1 < parts && !self.mode.packed;
            let flags = write | if more { VIRTQ_DESC_F_NEXT } else { 0 };
            let next = if more { at as u16 + 1 } else { 0 };
            put_desc(&table, at as usize, gpa + u64::from(from), part.min(len - from), flags, next);
        }
        Ok((table.gpa(), parts * DESC_SIZE as u32, VIRTQ_DESC_F_INDIRECT))
    }

    /// Where the ring lies: for a packed one descriptors, driver's and device's event suppression.
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// What SET_VRING_BASE says of a fresh ring: for a packed one that both wrap counters are set.
    pub fn base(&self) -> u32 {
        if self.mode.packed { 0x8000_8000 } else { 0 }
    }

    /// How its buffers are laid out.
    pub fn slots(&self) -> Slots {
        self.slots
    }

    /// All buffers: slot `i` begins at `i * stride`.
    #[inline]
    pub fn buffers(&self) -> &Window {
        &self.buffers
    }

    /// Where slot `slot` begins in [`Belt::buffers`].
    #[inline]
    pub fn at(&self, slot: u16) -> usize {
        usize::from(slot) * self.slots.stride as usize
    }

    /// Slots that the device has.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.put.wrapping_sub(self.taken) as u16
    }

    #[inline]
    pub fn idle(&mut self) -> Option<u16> {
        self.idle.pop()
    }

    #[inline]
    pub fn idle_count(&self) -> usize {
        self.idle.len()
    }

    /// Takes back what the device has used, without looking at it.
    #[inline]
    pub fn reap(&mut self) -> Result<()> {
        let mut used = [Used::default(); TAKE];
        loop {
            let count = self.take(&mut used)?;
            self.idle.extend(used[..count].iter().map(|used| used.slot));
            if count < TAKE {
                return Ok(());
            }
        }
    }

    /// The place of count `at` in the ring, and what the wrap counter is there.
    #[inline]
    fn locate(&self, at: u32) -> (usize, bool) {
        let size = u32::from(self.place.size);
        ((at & (size - 1)) as usize, at & size == 0)
    }

    /// Makes a slot available; the device sees it at the next [`Belt::publish`].
    #[inline]
    pub fn put(&mut self, slot: u16) {
        let (at, wrap) = self.locate(self.put);
        if self.mode.packed {
            let (gpa, len, flags) = self.each[usize::from(slot)];
            let flags = flags | if wrap { PACKED_AVAIL } else { PACKED_USED };
            self.desc.put_u64(16 * at, gpa);
            self.desc.put_u32(16 * at + 8, len);
            self.desc.put_u16(16 * at + 12, slot);
            if self.first.is_none() {
                self.first = Some((at, flags));
            } else {
                self.desc.put_u16(16 * at + 14, flags);
            }
        } else {
            self.driver.put_u16(4 + 2 * at, slot);
        }
        self.put = self.put.wrapping_add(1);
    }

    /// Shows the device what was put. True if it wants a kick for that.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.shown != self.put {
            if let Some((at, flags)) = self.first.take() {
                self.desc.put_u16(16 * at + 14, flags);
            }
            if !self.mode.packed {
                self.driver.put_u16(2, self.put as u16);
            }
            self.shown = self.put;
        }
        self.kick_wanted()
    }

    #[inline]
    fn kick_wanted(&mut self) -> bool {
        if self.kicked == self.put {
            return false;
        }
        fence(Ordering::SeqCst);
        let (old, new) = (self.kicked as u16, self.put as u16);
        self.kicked = self.put;
        if !self.mode.packed {
            if !self.mode.event_idx {
                return self.device.load_u16(0) & VIRTQ_USED_F_NO_NOTIFY == 0;
            }
            let event = self.device.load_u16(4 + 8 * usize::from(self.place.size));
            return passed(event, old, new);
        }
        match self.device.load_u16(2) {
            EVENT_DISABLE => false,
            EVENT_DESC => {
                let word = self.device.load_u16(0);
                // The device names a place and its wrap; as a free-running count it is the last one before `new`.
                let (at, wrap) = (word & 0x7fff, word & 0x8000 != 0);
                let size = self.place.size;
                let round = new & !(size - 1);
                let same = (new & size == 0) == wrap;
                let event = round.wrapping_add(at).wrapping_sub(if same { 0 } else { size });
                passed(event, old, new)
            }
            _ => true,
        }
    }

    /// Takes slots that the device has used, as many as there are and `out` holds, and asks for the lines in which their
    /// buffers begin: every line on the way comes from the other processor, and many are under way at once only if nothing
    /// is made to wait for one of them.
    #[inline]
    pub fn take(&mut self, out: &mut [Used]) -> Result<usize> {
        let most = self.used_now().min(out.len());
        let mut taken = 0;
        let mut worst = 0;
        for used in &mut out[..most] {
            let (at, wrap) = self.locate(self.taken);
            let (slot, len) = if self.mode.packed {
                if !self.is_used(at, wrap) {
                    break;
                }
                (self.desc.load_u16(16 * at + 12).into(), self.desc.load_u32(16 * at + 8))
            } else {
                (self.device.load_u32(4 + 8 * at), self.device.load_u32(8 + 8 * at))
            };
            worst = slot.max(worst);
            *used = Used { slot: slot as u16, len };
            if self.slots.write {
                self.buffers.prefetch(slot as usize * self.slots.stride as usize);
            }
            self.taken = self.taken.wrapping_add(1);
            taken += 1;
        }
        if worst >= self.slots.count.into() {
            bail!("the device used {worst}, which is none of the {} descriptors", self.slots.count);
        }
        Ok(taken)
    }

    /// How many slots there can be to take.
    #[inline]
    fn used_now(&mut self) -> usize {
        if self.mode.packed {
            return self.shown.wrapping_sub(self.taken) as usize;
        }
        if self.seen == self.taken as u16 {
            self.seen = self.device.load_u16(2);
        }
        self.seen.wrapping_sub(self.taken as u16).into()
    }

    #[inline]
    fn is_used(&self, at: usize, wrap: bool) -> bool {
        let flags = self.desc.load_u16(16 * at + 14);
        (flags & PACKED_USED != 0) == wrap && (flags & PACKED_AVAIL != 0) == wrap
    }

    /// Says that interrupts are not wanted.
    pub fn quiet(&mut self) {
        if self.mode.packed {
            self.driver.put_u16(2, EVENT_DISABLE);
        } else if self.mode.event_idx {
            // There is no way to say never: this leaves one interrupt in 65536 buffers, as Linux does.
            self.used_event((self.taken as u16).wrapping_sub(1));
        } else {
            self.driver.put_u16(0, VIRTQ_AVAIL_F_NO_INTERRUPT);
        }
    }

    /// Asks for an interrupt when `count` more slots have been used (at least one; without EVENT_IDX one). False if they
    /// have been already: take them.
    pub fn wake_after(&mut self, count: u16) -> bool {
        let count = if self.mode.event_idx { count.max(1) } else { 1 };
        let (at, wrap) = self.locate(self.taken.wrapping_add(u32::from(count) - 1));
        match (self.mode.packed, self.mode.event_idx) {
            (false, true) => self.used_event((self.taken as u16).wrapping_add(count - 1)),
            (false, false) => self.driver.put_u16(0, 0),
            (true, true) => {
                self.driver.put_u16(0, at as u16 | if wrap { 0x8000 } else { 0 });
                self.driver.put_u16(2, EVENT_DESC);
            }
            (true, false) => self.driver.put_u16(2, EVENT_ENABLE),
        }
        fence(Ordering::SeqCst);
        if self.mode.packed {
            return !self.is_used(at, wrap);
        }
        self.device.load_u16(2).wrapping_sub(self.taken as u16) < count
    }

    fn used_event(&self, value: u16) {
        self.driver.put_u16(4 + 2 * usize::from(self.place.size), value);
    }
}

/// Whether going from `old` to `new` passed `event` (2.7.10).
#[inline]
fn passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A descriptor of a split table, or of either kind of indirect one.
fn put_desc(table: &Window, at: usize, gpa: u64, len: u32, flags: u16, next: u16) {
    let at = 16 * at;
    table.put_u64(at, gpa);
    table.put_u32(at + 8, len);
    table.put_u16(at + 12, flags);
    table.put_u16(at + 14, next);
}
