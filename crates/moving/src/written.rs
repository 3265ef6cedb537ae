//! Which pages of guest memory the device wrote. The hardware does not say; the rings do: buffers are written in the order in which they
//! were posted, up to the head, and each descriptor that is done is written back.
//!
//! A log is begun from a ring's state, told of each tail that the guest writes, and asked. It touches no hardware. Its answers may
//! name a page too much (a buffer that was filled in part), never one too few:
//!
//! | moment | what is known to be written |
//! |---|---|
//! | a slot is posted again | the buffer that stood there: a driver posts a slot anew when the device has done with it |
//! | a descriptor says that it is done | its buffer: the device writes data before it says so |
//! | the ring is at rest | every buffer up to the head |
//! | the ring was switched off or reset | nobody knows: every buffer that was posted, now and once more when the device is at rest |

use std::collections::BTreeSet;

use ioplane_memory::{GuestMap, GuestView};

use crate::plan::RingPlan;
use crate::state::Geometry;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Guest pages, by number (address / [`PAGE`]).
pub type PageSet = BTreeSet<u64>;

/// Adds the pages of a range that lie in the guest's memory: a guest may post any address, and what the IOMMU does not translate is not
/// written.
fn mark(map: &GuestMap, from: u64, len: u64, into: &mut PageSet) {
    let Some(end) = from.checked_add(len).filter(|_| len > 0) else { return };
    for region in map.regions() {
        let (first, last) = (from.max(region.gpa()), end.min(region.gpa().saturating_add(region.len())));
        if first < last {
            into.extend(first / PAGE..=(last - 1) / PAGE);
        }
    }
}

/// Slots from one index up to another, around the ring.
fn slots(count: u32, from: u32, to: u32) -> impl Iterator<Item = u32> {
    let len = (to + count - from) % count.max(1);
    (0..len).map(move |at| (from + at) % count)
}

/// Buffers of a descriptor: address and bytes.
type Buffers = [(u64, u32); 2];

/// A ring that is on.
#[derive(Debug)]
pub(super) struct RingLog {
    plan: RingPlan,
    geometry: Geometry,
    sizes: [u32; 2],
    /// What is posted in each slot and not yet known to be done with. A transmit ring's slots have no buffers that are written, and
    /// are written back themselves.
    posted: Vec<Option<Buffers>>,
    /// One past the last slot that was posted.
    tail: u32,
}

impl RingLog {
    /// Begins with a ring as it is: `shape` is the register with its buffers' sizes. One that was `used` before may have taken what it
    /// has not written yet. `None`: there is no ring.
    pub(super) fn begin(
        plan: RingPlan,
        geometry: Geometry,
        shape: u32,
        (head, tail): (u32, u32),
        used: bool,
        view: &GuestView,
    ) -> Option<RingLog> {
        let count = geometry.count();
        if count == 0 || count > plan.table.most || head >= count || tail >= count {
            return None;
        }
        let sizes = plan.buffers.map_or([0; 2], |(_, buffers)| (buffers.sizes)(shape));
        let mut log = RingLog { plan, geometry, sizes, posted: vec![None; count as usize], tail };
        // What the device has taken and not yet written back is behind the head. The slot at the tail is never one of them: a driver
        // leaves one free.
        let most = if used { plan.table.in_hand.min((head + count - tail - 1) % count) } else { 0 };
        let taken = (1..=most).take_while(|back| !log.done((head + count - back) % count, view)).last();
        let from = (head + count - taken.unwrap_or(0)) % count;
        for slot in slots(count, from, tail) {
            log.post(slot, view);
        }
        Some(log)
    }

    fn word(&self, slot: u32, at: u16, view: &GuestView) -> u64 {
        let address = self.geometry.at(slot).wrapping_add(at.into());
        view.bytes(address).map_or(0, u64::from_le_bytes)
    }

    fn done(&self, slot: u32, view: &GuestView) -> bool {
        let (at, bit) = self.plan.table.done;
        let address = self.geometry.at(slot).wrapping_add(at.into());
        view.bytes(address).is_ok_and(|word| u32::from_le_bytes(word) & bit != 0)
    }

    fn post(&mut self, slot: u32, view: &GuestView) {
        let mut buffers = [(0, 0); 2];
        let addresses = self.plan.buffers.map_or(&[][..], |(_, table)| table.addresses);
        for ((buffer, at), size) in buffers.iter_mut().zip(addresses).zip(self.sizes) {
            *buffer = (self.word(slot, *at, view), size);
        }
        self.posted[slot as usize] = Some(buffers);
    }

    /// The slot was written: its buffers and its descriptor.
    fn take(&mut self, slot: u32, map: &GuestMap, into: &mut PageSet) {
        if let Some(buffers) = self.posted[slot as usize].take() {
            for (address, size) in buffers {
                mark(map, address, size.into(), into);
            }
            mark(map, self.geometry.at(slot), self.geometry.size.into(), into);
        }
    }

    /// The guest is about to write the tail: the device has not yet heard of it.
    pub(super) fn tail_written(&mut self, tail: u32, view: &GuestView, into: &mut PageSet) {
        if tail >= self.geometry.count() {
            return;
        }
        for slot in slots(self.geometry.count(), self.tail, tail) {
            self.take(slot, view.map(), into);
            self.post(slot, view);
        }
        self.tail = tail;
    }

    /// While the device runs: what it says to have done with.
    pub(super) fn so_far(&mut self, view: &GuestView, into: &mut PageSet) {
        for slot in 0..self.geometry.count() {
            if self.posted[slot as usize].is_some() && self.done(slot, view) {
                self.take(slot, view.map(), into);
            }
        }
    }

    /// The device is at rest with this head: it has done with everything before it, and with nothing behind it.
    pub(super) fn at_rest(&mut self, head: u32, view: &GuestView, into: &mut PageSet) {
        let count = self.geometry.count();
        if head == self.tail {
            return self.all(view, into);
        }
        for slot in slots(count, self.tail, head % count) {
            self.take(slot, view.map(), into);
        }
    }

    /// The ring ends, and nobody knows how far it was.
    pub(super) fn all(&mut self, view: &GuestView, into: &mut PageSet) {
        for slot in 0..self.geometry.count() {
            self.take(slot, view.map(), into);
        }
    }
}
