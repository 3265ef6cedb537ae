//! `packed_ring`: as `ring_walk`, for packed rings: a driver that may do anything to its ring, and a journal that may say
//! anything.
//!
//! Oracles: no store outside the ring's descriptors and the device's event structure; buffer IDs in flight are unique; a
//! driver that keeps to the rules finds what was completed, in that order, in the places that it expects; and whoever opens
//! the ring again after a crash finds in the journal exactly what had been taken and not been shown as used, in its order.

use std::collections::VecDeque;
use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_memory::{Mapping, Window};
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use ioplane_virtio::spec::packed::*;
use ioplane_virtio::spec::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT};
use ioplane_virtio::{Chain, Descriptor, InFlightRequest, Ring, RingLayout, RingRequest};

use crate::Signature;
use crate::guest::{self, BUFFERS, Guest, TABLES};

/// Room for the largest journal.
const JOURNAL: u64 = 2 << 20;

thread_local! {
    static REGION: Arc<Mapping> = Arc::new(Mapping::anonymous("journal", JOURNAL).expect("journal memory"));
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    // Running out of input ends a run early, nothing more.
    let _ = walk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// Where one side has come to: a count of descriptors that never wraps.
type Place = u64;

struct Walk {
    guest: Guest,
    layout: RingLayout,
    ring: Ring,
    chain: Chain,
    held: Vec<RingRequest>,
    /// Buffers made available and not taken.
    offered: VecDeque<u16>,
    /// RingRequest and not yet shown as used, in order.
    in_flight: Vec<u16>,
    /// Of those, completed, in order.
    completed: Vec<u16>,
    /// Descriptors of each buffer that is the device's; zero: the driver's.
    lens: Vec<u16>,
    avail: Place,
    used: Place,
    /// The driver has kept to the rules so far.
    honest: bool,
    faulty: bool,
}

fn walk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let mut guest = Guest::zeroed();
    let mut layout = guest::layout(input)?;
    if layout.size <= 64 {
        layout.size = input.int_in_range(1..=64)?;
    }
    for index in 0..16 {
        let bytes = indirect_entry(input)?;
        guest.poke(TABLES + 16 * index, &bytes);
    }
    let features = VIRTIO_F_RING_PACKED | if input.ratio(1, 8)? { input.arbitrary()? } else { 0x1_3000_0000 };
    let (journal, hostile) = journal(input, layout.size)?;
    let base = if input.ratio(1, 8)? { Some(input.arbitrary()?) } else { None };
    let mut flights = Vec::new();
    if input.ratio(1, 8)? {
        for _ in 0..input.int_in_range(1..=4u8)? {
            flights.push(flight(input, layout.size)?);
        }
    }
    guest.settle(None);
    let ring = match Ring::open(guest.view(), &layout, features, base, journal.clone(), &flights) {
        Ok(ring) => ring,
        Err(fault) => {
            signature.saw(fault.name());
            // What a crash has left behind in the ring may be cleared away.
            let descs = (layout.desc, layout.desc.saturating_add(16 * u64::from(layout.size)));
            guest.settle(Some(&[descs]));
            return Ok(());
        }
    };
    let honest = guest::is_usual(&layout) && !hostile && base.is_none() && flights.is_empty();
    let mut walk = Walk {
        guest,
        ring,
        chain: Chain::new(),
        held: Vec::new(),
        offered: VecDeque::new(),
        in_flight: Vec::new(),
        completed: Vec::new(),
        lens: vec![0; layout.size.into()],
        layout,
        avail: 0,
        used: 0,
        honest,
        faulty: false,
    };
    let mut outcome = Ok(());
    for step in 1..=200 {
        outcome = walk.step(input, signature);
        if step % 32 == 0 || outcome.is_err() {
            walk.look();
        }
        if outcome.is_err() {
            break;
        }
    }
    walk.end(journal, features);
    outcome
}

fn flight(input: &mut Unstructured<'_>, size: u16) -> Result<InFlightRequest> {
    let head =
        if input.ratio(1, 8)? { input.arbitrary()? } else { input.int_in_range(0..=size.max(1) - 1)? };
    let mut descriptors = Vec::new();
    for _ in 0..input.int_in_range(0..=3u8)? {
        let (addr, len) = (guest::address(input)?, input.arbitrary::<u16>()?.into());
        descriptors.push(Descriptor { addr, len, flags: input.int_in_range(0..=7)? });
    }
    Ok(InFlightRequest { head, descriptors })
}

fn journal(input: &mut Unstructured<'_>, size: u16) -> Result<(Option<Window>, bool)> {
    if input.ratio(1, 4)? {
        return Ok((None, true));
    }
    let region = REGION.with(Clone::clone);
    let whole = region_bytes(size, VIRTIO_F_RING_PACKED);
    let len = if input.ratio(1, 16)? { input.arbitrary::<u16>()?.into() } else { whole };
    let Some(window) = Window::of_mapping(&region, 0, len.min(JOURNAL as usize)) else {
        return Ok((None, true));
    };
    (0..window.len() / 8).for_each(|at| window.put_u64(at * 8, 0));
    (window.len() & !7..window.len()).for_each(|at| window.put_u8(at, 0));
    let hostile = input.ratio(1, 3)?;
    if hostile && window.len() >= whole {
        plant(input, &window, size)?;
    }
    Ok((Some(window), hostile))
}

/// A region that is nearly right: some chains, the rest free, and some mistakes.
fn plant(input: &mut Unstructured<'_>, window: &Window, size: u16) -> Result<()> {
    let at = |index: u16| 32 + 32 * usize::from(index);
    window.put_u16(8, if input.ratio(1, 16)? { input.arbitrary()? } else { 1 });
    window.put_u16(10, if input.ratio(1, 16)? { input.arbitrary()? } else { size });
    (0..size).for_each(|index| window.put_u16(at(index) + 2, index + 1));
    let mut next = 0;
    while next < size.min(32) && input.ratio(3, 4)? {
        let num = input.int_in_range(1..=3u16)?.min(size - next);
        window.put_u16(at(next), input.int_in_range(0..=0x83ff)? & 0x8301 | 1);
        window.put_u16(at(next) + 4, next + num - 1);
        window.put_u16(at(next) + 6, num);
        window.put_u64(at(next) + 8, input.arbitrary::<u8>()?.into());
        for index in next..next + num {
            window.put_u16(at(index) + 16, input.int_in_range(0..=size)?);
            window.put_u16(at(index) + 18, input.int_in_range(0..=7)?);
            window.put_u32(at(index) + 20, input.arbitrary::<u16>()?.into());
            window.put_u64(at(index) + 24, guest::address(input)?);
        }
        next += num;
    }
    let used = input.int_in_range(0..=size.max(1) - 1)?;
    let (old, wraps) =
        (if input.ratio(1, 4)? { input.arbitrary()? } else { used }, input.int_in_range(0..=3u16)?);
    window.put_u16(12, if input.ratio(1, 8)? { input.arbitrary()? } else { next });
    window.put_u16(14, next);
    window.put_u16(16, used);
    window.put_u16(18, old);
    window.put_u16(20, wraps & 1 | (wraps & 2) << 7);
    if input.ratio(1, 2)? {
        let spot = input.int_in_range(0..=window.len().min(32 + 32 * 32) - 1)?;
        window.put_u8(spot, input.arbitrary()?);
    }
    Ok(())
}

fn indirect_entry(input: &mut Unstructured<'_>) -> Result<[u8; 16]> {
    if input.ratio(1, 12)? {
        return input.arbitrary();
    }
    let (addr, len) = (guest::address(input)?, input.arbitrary::<u16>()?);
    Ok(descriptor(addr, len.into(), input.arbitrary()?, input.int_in_range(0..=2)?))
}

/// The bytes of a packed descriptor (2.8.13).
fn descriptor(addr: u64, len: u32, id: u16, flags: u16) -> [u8; 16] {
    guest::descriptor(addr, len, id, flags)
}

impl Walk {
    fn step(&mut self, input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
        match input.int_in_range(0..=15u8)? {
            0..=3 => self.offer(input)?,
            4..=7 => self.take(input, signature)?,
            8..=10 => self.complete(input)?,
            11 => self.publish(),
            12 => {
                self.ring.ask_for_kick();
            }
            13 => self.ring.set_polled(true),
            14 => {
                if let Some(taken) = self.held.first() {
                    if input.arbitrary()? { self.ring.release(taken) } else { self.ring.touch(taken) }
                }
            }
            _ => self.meddle(input)?,
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.layout.size.into()
    }

    /// Where the descriptor at `place` lies, and whether that lap's wrap counter is 1.
    fn slot(&self, place: Place) -> (u64, bool) {
        (self.layout.desc.saturating_add(16 * (place % self.size())), (place / self.size()).is_multiple_of(2))
    }

    /// Whether the device kept to what is its own.
    fn look(&mut self) {
        let RingLayout { desc, used, .. } = self.layout;
        self.guest.settle(Some(&[(desc, desc + 16 * self.size()), (used, used + EVENT_SIZE)]));
    }

    /// The driver makes a chain available that is right as a rule.
    fn offer(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let theirs: u64 = self.lens.iter().map(|len| u64::from(*len)).sum();
        let mut count = input.int_in_range(1..=4u64)?;
        let mut id = input.int_in_range(0..=self.layout.size - 1)?;
        if input.ratio(1, 24)? {
            // In the middle of what is the device's, or under a name that is taken.
            id = if input.arbitrary()? { id } else { input.arbitrary()? };
            self.honest = false;
        } else if theirs + count > self.size() || self.lens[usize::from(id)] != 0 {
            return Ok(());
        }
        if input.ratio(1, 6)? {
            count = 1;
        }
        for nth in (0..count).rev() {
            let (at, wrap) = self.slot(self.avail + nth);
            let mut flags = if wrap { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED };
            flags |= if nth + 1 < count { VIRTQ_DESC_F_NEXT } else { 0 };
            // Readable first, as a rule.
            flags |= if input.ratio(1, 16)? { input.int_in_range(0..=7)? } else { u16::from(nth > 0) << 1 };
            let (mut addr, mut len) = (guest::address(input)?, u32::from(input.arbitrary::<u16>()?));
            if count == 1 && input.ratio(1, 4)? {
                (addr, len, flags) =
                    (TABLES, 16 * input.int_in_range(0..=16u32)?, flags | VIRTQ_DESC_F_INDIRECT);
            }
            if flags & VIRTQ_DESC_F_NEXT != 0 && nth + 1 == count {
                self.honest = false;
            }
            if nth + 1 < count && flags & VIRTQ_DESC_F_NEXT == 0 {
                self.honest = false;
            }
            self.guest.poke(at, &descriptor(addr, len, id, flags));
        }
        self.avail += count;
        if let Some(len) = self.lens.get_mut(usize::from(id)) {
            *len = count as u16;
        }
        self.offered.push_back(id);
        Ok(())
    }

    fn take(&mut self, input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
        if self.faulty {
            return Ok(());
        }
        let ahead = if input.ratio(1, 4)? { guest::taken_ahead(&mut self.ring, input)? } else { Vec::new() };
        let (base, replays) = (self.ring.base(), self.ring.replays());
        match self.ring.take(&mut self.chain) {
            Ok(None) => assert!(
                ahead.is_empty() && (!self.honest || self.offered.is_empty()),
                "what is available is not taken"
            ),
            Ok(Some((taken, replayed))) => {
                assert_eq!(replayed, replays);
                assert!(ahead.first().is_none_or(|head| *head == taken.head()), "not what was there before");
                let twice = self.held.iter().any(|other| other.head() == taken.head());
                assert!(!twice, "buffer {} is in flight twice", taken.head());
                assert!(taken.head() < self.layout.size);
                if !replayed && input.ratio(1, 16)? {
                    self.ring.rewind(taken);
                    assert_eq!(self.ring.base(), base, "what was given back has moved the ring on");
                    return Ok(());
                }
                if self.honest {
                    assert_eq!(self.offered.pop_front(), Some(taken.head()), "not the next one");
                }
                self.in_flight.push(taken.head());
                signature.count(self.chain.readable_bytes() + self.chain.writable_bytes());
                self.held.push(taken);
            }
            Err(fault) => {
                signature.saw(fault.name());
                // As a queue does: nothing is taken any more. What was journalled stays there.
                self.faulty = true;
                if self.ring.base() != base {
                    self.in_flight.extend(self.offered.pop_front());
                }
            }
        }
        assert!(self.held.len() <= usize::from(self.layout.size));
        Ok(())
    }

    fn complete(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let taken = self.held.swap_remove(input.choose_index(self.held.len())?);
        self.completed.push(taken.head());
        self.ring.complete(taken, input.arbitrary::<u16>()?.into());
        Ok(())
    }

    fn publish(&mut self) {
        self.ring.publish();
        let completed = std::mem::take(&mut self.completed);
        for id in &completed {
            let (at, wrap) = self.slot(self.used);
            let word = u128::from_le_bytes(self.guest.peek(at));
            let (found, flags) = ((word >> 96) as u16, (word >> 112) as u16);
            if self.honest {
                let both = VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED;
                assert_eq!(flags & both, if wrap { both } else { 0 }, "not shown as used at {}", self.used);
                assert_eq!(found, *id, "another buffer than the one that was completed");
            }
            if let Some(len) = self.lens.get_mut(usize::from(*id)) {
                self.used += u64::from(std::mem::take(len));
            }
        }
        if self.honest {
            let (at, wrap) = self.slot(self.used);
            let flags = (u128::from_le_bytes(self.guest.peek(at)) >> 112) as u16;
            let used = if wrap { VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED } else { 0 };
            let found = flags & (VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED) == used;
            assert!(!found, "more is shown as used than was completed");
        }
        self.in_flight.retain(|id| !completed.contains(id));
        self.ring.wants_interrupt();
    }

    /// The guest writes anywhere.
    fn meddle(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let at = if input.ratio(1, 4)? { guest::address(input)? } else { input.int_in_range(0..=BUFFERS)? };
        let bytes: [u8; 4] = input.arbitrary()?;
        self.guest.poke(at, &bytes);
        let desc = self.layout.desc;
        if at.saturating_add(4) > desc && at < desc.saturating_add(16 * self.size()) {
            self.honest = false;
        }
        Ok(())
    }

    /// The daemon dies here; the next one opens the ring again.
    fn end(self, journal: Option<Window>, features: u64) {
        let Walk { guest, layout, ring, held, in_flight, honest, .. } = self;
        held.into_iter().for_each(RingRequest::abandon);
        drop(ring);
        let again = Ring::open(guest.view(), &layout, features, Some(0x8000_8000), journal, &[]);
        if honest {
            let found = again.expect("an honest ring opens again").in_flight_heads();
            assert_eq!(found, in_flight, "the journal and what was in flight differ");
        }
    }
}
