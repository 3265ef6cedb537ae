//! The driver side of a virtqueue, split or packed.

use ioplane_memory::{GuestView, Window};

use super::layout::{DriverError, Part, RingMode, RingPlace, Used};
use super::packed::PackedRing;
use super::raw::{RawPacked, RawRing};
use super::spec::*;
use super::split::SplitRing;

/// The driver's half of one virtqueue. Used by one thread; allocates where chains are laid out, not where they are used.
#[derive(Debug)]
pub enum DriverRing {
    Split(SplitRing),
    Packed(PackedRing),
}

macro_rules! either {
    ($self:expr, $ring:ident => $does:expr) => {
        match $self {
            DriverRing::Split($ring) => $does,
            DriverRing::Packed($ring) => $does,
        }
    };
}

impl DriverRing {
    /// A fresh ring at `place`: zeroes its parts and asks for interrupts, as Linux does.
    pub fn new(view: &GuestView, place: RingPlace, mode: RingMode) -> Result<Self, DriverError> {
        Ok(match mode.packed {
            true => DriverRing::Packed(PackedRing::new(view, place, mode)?),
            false => DriverRing::Split(SplitRing::new(view, place, mode)?),
        })
    }

    /// Begins again with all parts zeroed and every descriptor free. Only while the queue is stopped.
    pub fn reset(&mut self) {
        either!(self, ring => ring.reset());
    }

    pub fn place(&self) -> RingPlace {
        either!(self, ring => ring.place())
    }

    /// Where a VMM lets a back end go on that it never saw stop: after a crash. Of a split ring the used index, as the device
    /// last published it. A VMM cannot know the places of a packed ring: it says what it said first.
    pub fn base(&self) -> u32 {
        match self {
            DriverRing::Split(ring) => ring.used_idx().into(),
            DriverRing::Packed(_) => PACKED_START,
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
            DriverRing::Split(ring) => {
                SplitRing::lay_table(table, from, parts);
                ring.lay_indirect(head, whole);
            }
            DriverRing::Packed(ring) => {
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
            DriverRing::Split(ring) => ring.raw(),
            DriverRing::Packed(_) => panic!("a packed ring has no such fields: raw_packed()"),
        }
    }

    /// As [`DriverRing::raw`], for a packed ring.
    pub fn raw_packed(&self) -> RawPacked<'_> {
        match self {
            DriverRing::Packed(ring) => ring.raw(),
            DriverRing::Split(_) => panic!("a split ring has no such fields: raw()"),
        }
    }
}
