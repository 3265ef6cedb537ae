//! The driver side of a split virtqueue (virtio 1.3, 2.7), deciding about kicks and interrupts as Linux's driver does.

use std::sync::atomic::{Ordering, fence};

use ioplane_memory::{GuestView, Window};

use super::layout::{DriverError, Part, RingMode, RingPlace, Used};
use super::raw::RawRing;
use super::spec::*;

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

    /// Takes `count` descriptors and links them in our own books; nothing is written to the table. Gives the head.
    pub fn reserve(&mut self, count: usize) -> Option<u16> {
        if count == 0 || count > self.free.len() {
            return None;
        }
        let head = *self.free.last()?;
        for left in (0..count).rev() {
            let id = self.free.pop()?;
            self.next[usize::from(id)] = if left == 0 { None } else { self.free.last().copied() };
        }
        Some(head)
    }

    /// Writes `parts` into the descriptors reserved at `head`, of which there are enough.
    pub fn lay(&mut self, head: u16, parts: &[Part]) {
        let mut id = head;
        for (index, part) in parts.iter().enumerate() {
            let next = if index + 1 < parts.len() { self.next[usize::from(id)] } else { None };
            write_desc(&self.desc, id.into(), *part, false, next);
            id = next.unwrap_or(id);
        }
    }

    /// Makes the descriptor reserved at `head` refer to the table that [`SplitRing::lay_table`] has written.
    pub fn lay_indirect(&mut self, head: u16, table: Part) {
        write_desc(&self.desc, head.into(), table, true, None);
    }

    /// Writes `parts` as an indirect table into `table`, from descriptor `from` of it on.
    pub fn lay_table(table: &Window, from: usize, parts: &[Part]) {
        for (index, part) in parts.iter().enumerate() {
            let next = (index + 1 < parts.len()).then_some(index as u16 + 1);
            write_desc(table, from + index, *part, false, next);
        }
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
        self.added = self.added.saturating_add(1);
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
fn write_desc(table: &Window, id: usize, part: Part, indirect: bool, next: Option<u16>) {
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
