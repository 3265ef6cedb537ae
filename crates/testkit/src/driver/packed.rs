//! The driver side of a packed virtqueue (virtio 1.3, 2.8), deciding about kicks and interrupts as Linux's driver does.

use std::sync::atomic::{Ordering, fence};

use ioplane_memory::{GuestView, Window};

use super::layout::{DriverError, Part, RingMode, RingPlace, Used};
use super::raw::{RawPacked, RawPackedDesc};
use super::spec::*;

/// A place in the ring, and what the wrap counter of the side that stands there says (2.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spot {
    slot: u16,
    wrap: bool,
}

impl Spot {
    const FIRST: Spot = Spot { slot: 0, wrap: true };

    #[inline]
    fn next(self, size: u16) -> Spot {
        if self.slot + 1 == size {
            Spot { slot: 0, wrap: !self.wrap }
        } else {
            Spot { slot: self.slot + 1, ..self }
        }
    }

    /// As event suppression structures have it: offset in 15 bits, wrap counter above.
    fn event(self) -> u16 {
        self.slot | if self.wrap { 0x8000 } else { 0 }
    }

    #[inline]
    fn at(self) -> usize {
        DESC_SIZE as usize * usize::from(self.slot)
    }
}

/// What belongs to one buffer ID.
#[derive(Debug, Default, Clone)]
struct Buffer {
    /// Its descriptors, and whether the only one refers to a table.
    parts: Vec<Part>,
    indirect: bool,
    /// Descriptors kept for it.
    reserved: usize,
    held: bool,
}

/// The driver's half of one packed virtqueue; see [`super::DriverRing`] for what the methods are for.
#[derive(Debug)]
pub struct PackedRing {
    place: RingPlace,
    mode: RingMode,
    desc: Window,
    driver: Window,
    device: Window,
    buffers: Vec<Buffer>,
    free: Vec<u16>,
    /// Descriptors kept for chains.
    reserved: usize,
    in_flight: u16,
    pushed: u16,
    popped: u16,
    /// Where the next chain begins.
    avail: Spot,
    /// Where what was pushed since the last decision about a kick begins.
    added: Spot,
    /// Where the next used descriptor comes.
    used: Spot,
    /// Flags of our event suppression structure.
    suppression: u16,
}

impl PackedRing {
    pub(super) fn new(view: &GuestView, place: RingPlace, mode: RingMode) -> Result<Self, DriverError> {
        let size = place.size;
        let mut ring = PackedRing {
            place,
            mode,
            desc: view.window(place.desc, RingPlace::desc_bytes(size), 16)?,
            driver: view.window(place.avail, EVENT_SIZE, 4)?,
            device: view.window(place.used, EVENT_SIZE, 4)?,
            buffers: Vec::new(),
            free: Vec::new(),
            reserved: 0,
            in_flight: 0,
            pushed: 0,
            popped: 0,
            avail: Spot::FIRST,
            added: Spot::FIRST,
            used: Spot::FIRST,
            suppression: RING_EVENT_FLAGS_ENABLE,
        };
        ring.reset();
        Ok(ring)
    }

    pub(super) fn reset(&mut self) {
        let size = self.place.size;
        self.buffers = vec![Buffer::default(); size.into()];
        self.free = (0..size).rev().collect();
        (self.reserved, self.in_flight, self.pushed, self.popped) = (0, 0, 0, 0);
        (self.avail, self.added, self.used) = (Spot::FIRST, Spot::FIRST, Spot::FIRST);
        self.suppression = RING_EVENT_FLAGS_ENABLE;
        (0..self.desc.len()).step_by(8).for_each(|at| self.desc.put_u64(at, 0));
        self.driver.put_u32(0, 0);
        self.device.put_u32(0, 0);
    }

    pub(super) fn place(&self) -> RingPlace {
        self.place
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn room(&self) -> usize {
        usize::from(self.place.size) - self.reserved
    }

    pub(super) fn avail_idx(&self) -> u16 {
        self.pushed
    }

    pub(super) fn used_idx(&self) -> u16 {
        let (mut spot, mut count) = (self.used, self.popped);
        while count != self.pushed && self.is_used(spot) {
            let id = self.desc.load_u16(spot.at() + 12);
            let len = self.buffers.get(usize::from(id)).map_or(1, |buffer| buffer.parts.len());
            (0..len.max(1)).for_each(|_| spot = spot.next(self.place.size));
            count = count.wrapping_add(1);
        }
        count
    }

    pub(super) fn last_used(&self) -> u16 {
        self.popped
    }

    pub(super) fn reserve(&mut self, count: usize) -> Option<u16> {
        if count == 0 || count > self.room() {
            return None;
        }
        let id = self.free.pop()?;
        self.reserved += count;
        self.buffers[usize::from(id)] = Buffer { reserved: count, ..Buffer::default() };
        Some(id)
    }

    pub(super) fn lay(&mut self, id: u16, parts: &[Part]) {
        let buffer = &mut self.buffers[usize::from(id)];
        assert!(
            !buffer.held && (1..=buffer.reserved).contains(&parts.len()),
            "buffer {id}: {} parts",
            parts.len()
        );
        buffer.parts.clear();
        buffer.parts.extend_from_slice(parts);
        buffer.indirect = false;
    }

    pub(super) fn lay_indirect(&mut self, id: u16, table: Part) {
        self.lay(id, &[table]);
        self.buffers[usize::from(id)].indirect = true;
    }

    /// 2.8.7: one after the other; flags other than WRITE, and the buffer ID, are ignored, so they hold anything.
    pub(super) fn lay_table(table: &Window, from: usize, parts: &[Part]) {
        for (index, part) in parts.iter().enumerate() {
            let flags = if part.write { VIRTQ_DESC_F_WRITE } else { 0 };
            let flags = flags | if index % 2 == 1 { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED };
            RawPackedDesc { addr: part.gpa, len: part.len, id: !(index as u16), flags }
                .write(table, from + index);
        }
    }

    pub(super) fn free(&mut self, id: u16) {
        let buffer = std::mem::take(&mut self.buffers[usize::from(id)]);
        assert!(!buffer.held && buffer.reserved > 0, "buffer {id} is still the device's, or nobody's");
        self.reserved -= buffer.reserved;
        self.free.push(id);
    }

    /// Writes the descriptors of the chain at the next place, the flags of the first one last (2.8.6, 2.8.21.1).
    #[inline]
    pub(super) fn push(&mut self, id: u16) {
        let buffer = &mut self.buffers[usize::from(id)];
        assert!(!buffer.held && !buffer.parts.is_empty(), "buffer {id} is already the device's, or empty");
        buffer.held = true;
        let first = self.avail;
        let (count, mut first_flags) = (buffer.parts.len(), 0);
        for (index, part) in buffer.parts.iter().enumerate() {
            let last = index + 1 == count;
            let mut flags = if self.avail.wrap { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED };
            flags |= if part.write { VIRTQ_DESC_F_WRITE } else { 0 };
            flags |= if buffer.indirect { VIRTQ_DESC_F_INDIRECT } else { 0 };
            flags |= if last { 0 } else { VIRTQ_DESC_F_NEXT };
            let at = self.avail.at();
            self.desc.put_u64(at, part.gpa);
            self.desc.put_u32(at + 8, part.len);
            // Only the last one's counts.
            self.desc.put_u16(at + 12, if last { id } else { !id });
            if index == 0 {
                first_flags = flags;
            } else {
                self.desc.put_u16(at + 14, flags);
            }
            self.avail = self.avail.next(self.place.size);
        }
        // A release store: all of the chain, and all that it leads to, are visible before its first flags.
        self.desc.put_u16(first.at() + 14, first_flags);
        self.in_flight += 1;
        self.pushed = self.pushed.wrapping_add(1);
    }

    /// 2.8.10 and 2.8.21.3.1: with RING_EVENT_FLAGS_DESC, if one of the descriptors added is the one that the device waits for.
    #[inline]
    pub(super) fn kick_needed(&mut self) -> bool {
        let mut spot = std::mem::replace(&mut self.added, self.avail);
        if spot == self.avail {
            return false;
        }
        fence(Ordering::SeqCst);
        let suppression = self.device.load_u32(0);
        let flags = (suppression >> 16) as u16;
        if flags != RING_EVENT_FLAGS_DESC || !self.mode.event_idx {
            return flags != RING_EVENT_FLAGS_DISABLE;
        }
        while spot != self.avail {
            if spot.event() == suppression as u16 {
                return true;
            }
            spot = spot.next(self.place.size);
        }
        false
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        if !self.has_used() {
            return Ok(None);
        }
        let at = self.used.at();
        let (len, id) = (self.desc.load_u32(at + 8), self.desc.load_u16(at + 12));
        let wrote = self.desc.load_u16(at + 14) & VIRTQ_DESC_F_WRITE != 0;
        let buffer = match self.buffers.get_mut(usize::from(id)) {
            Some(buffer) if buffer.held => buffer,
            _ => return Err(DriverError::NotInFlight { at: self.popped, id: id.into() }),
        };
        buffer.held = false;
        // One used descriptor stands for the whole chain (2.8.6).
        for _ in 0..buffer.parts.len() {
            self.used = self.used.next(self.place.size);
        }
        self.in_flight -= 1;
        self.popped = self.popped.wrapping_add(1);
        if self.suppression == RING_EVENT_FLAGS_DESC {
            self.put_wish(RING_EVENT_FLAGS_DESC);
        }
        // 2.8.4: without the flag the length says nothing.
        Ok(Some(Used { head: id, len: if wrote { len } else { 0 } }))
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.is_used(self.used)
    }

    /// 2.8.1: both bits match the device's wrap counter.
    #[inline]
    fn is_used(&self, spot: Spot) -> bool {
        let flags = self.desc.load_u16(spot.at() + 14);
        let (avail, used) = (flags & VIRTQ_DESC_F_AVAIL != 0, flags & VIRTQ_DESC_F_USED != 0);
        avail == used && used == spot.wrap
    }

    pub(super) fn disable_interrupts(&mut self) {
        if self.suppression != RING_EVENT_FLAGS_DISABLE {
            self.put_wish(RING_EVENT_FLAGS_DISABLE);
        }
    }

    pub(super) fn enable_interrupts(&mut self) -> bool {
        let flags = if self.mode.event_idx { RING_EVENT_FLAGS_DESC } else { RING_EVENT_FLAGS_ENABLE };
        self.put_wish(flags);
        !self.has_used()
    }

    #[inline]
    fn put_wish(&mut self, flags: u16) {
        self.suppression = flags;
        self.driver.put_u32(0, u32::from(self.used.event()) | u32::from(flags) << 16);
        fence(Ordering::SeqCst);
    }

    pub(super) fn raw(&self) -> RawPacked<'_> {
        RawPacked { desc: &self.desc, driver: &self.driver, device: &self.device }
    }
}
