//! `ring_walk`: a driver that may do anything to its ring, and a journal that may say anything.
//!
//! Oracles: no store outside the used ring; heads in flight are unique; the used index counts what was completed; and
//! whoever opens the ring again after a crash finds in the journal exactly what had been taken and not been shown as
//! used, in its order (as long as the guest kept its hands off both).

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_memory::{Mapping, Window};
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use ioplane_virtio::spec::split::*;
use ioplane_virtio::{Chain, InFlightRequest, Ring, RingLayout, RingRequest};

use crate::Signature;
use crate::guest::{self, BUFFERS, Guest, TABLES, descriptor};

/// Room for the largest journal.
const JOURNAL: u64 = 1 << 20;

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

struct Walk {
    guest: Guest,
    layout: RingLayout,
    ring: Ring,
    chain: Chain,
    held: Vec<RingRequest>,
    /// RingRequest and not yet shown as used, in order.
    in_flight: Vec<u16>,
    /// Of those, completed.
    completed: Vec<u16>,
    avail: u16,
    /// What the used index is to show.
    used: u16,
    /// The guest has not touched what only the device writes.
    honest: bool,
    faulty: bool,
}

fn walk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let mut guest = Guest::zeroed();
    let layout = guest::layout(input)?;
    let used: u16 = input.arbitrary()?;
    guest.poke(layout.used.saturating_add(2), &used.to_le_bytes());
    guest.poke(layout.avail.saturating_add(2), &used.to_le_bytes());
    for index in 0..layout.size.min(64) {
        let bytes = fill_descriptor(input, layout.size)?;
        guest.poke(layout.desc.saturating_add(16 * u64::from(index)), &bytes);
    }
    for index in 0..16 {
        let bytes = fill_descriptor(input, 16)?;
        guest.poke(TABLES + 16 * index, &bytes);
    }
    // Packed rings have a target of their own.
    let features =
        if input.ratio(1, 8)? { input.arbitrary()? } else { 0x1_3000_0000 } & !VIRTIO_F_RING_PACKED;
    let (journal, hostile) = journal(input, layout.size)?;
    let mut in_flight: Vec<u16> = Vec::new();
    if input.ratio(1, 8)? {
        in_flight = input.arbitrary_iter()?.take(6).collect::<Result<_>>()?;
    }
    let base: u16 =
        if input.ratio(1, 8)? { input.arbitrary()? } else { used.wrapping_add(in_flight.len() as u16) };
    guest.settle(None);
    let flights: Vec<_> =
        in_flight.iter().map(|head| InFlightRequest { head: *head, descriptors: Vec::new() }).collect();
    let opened =
        Ring::open(guest.view(), &layout, features, Some(u16::into(base)), journal.clone(), &flights);
    let ring = match opened {
        Ok(ring) => ring,
        Err(fault) => {
            signature.saw(fault.name());
            guest.settle(Some(&[]));
            return Ok(());
        }
    };
    let honest = guest::is_usual(&layout) && !hostile && in_flight.is_empty();
    // The ring counts on from what memory holds: descriptors that overlap it have changed the index above.
    let shown = guest.peek_u16(layout.used + 2);
    let mut walk = Walk {
        guest,
        layout,
        ring,
        chain: Chain::new(),
        held: Vec::new(),
        in_flight: Vec::new(),
        completed: Vec::new(),
        avail: used,
        used: shown,
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

fn journal(input: &mut Unstructured<'_>, size: u16) -> Result<(Option<Window>, bool)> {
    if input.ratio(1, 4)? {
        return Ok((None, true));
    }
    let region = REGION.with(Clone::clone);
    let len = if input.ratio(1, 16)? { input.arbitrary::<u16>()?.into() } else { region_bytes(size, 0) };
    let Some(window) = Window::of_mapping(&region, 0, len.min(JOURNAL as usize)) else {
        return Ok((None, true));
    };
    (0..window.len() / 8).for_each(|at| window.put_u64(at * 8, 0));
    (window.len() & !7..window.len()).for_each(|at| window.put_u8(at, 0));
    let hostile = input.ratio(1, 4)?;
    if hostile && window.len() >= 16 {
        // The header mostly right, so that the entries are looked at.
        window.put_u16(8, if input.ratio(1, 8)? { input.arbitrary()? } else { 1 });
        window.put_u16(10, if input.ratio(1, 8)? { input.arbitrary()? } else { size });
        window.put_u16(12, input.int_in_range(0..=size)?);
        window.put_u16(14, input.arbitrary()?);
        for at in 16..window.len().min(16 + 16 * 64) {
            let byte = if input.ratio(1, 3)? { input.int_in_range(0..=3)? } else { 0 };
            window.put_u8(at, byte);
        }
    }
    Ok((Some(window), hostile))
}

fn fill_descriptor(input: &mut Unstructured<'_>, size: u16) -> Result<[u8; 16]> {
    if input.ratio(1, 12)? {
        return input.arbitrary();
    }
    let mut flags = input.int_in_range(0..=3u16)?;
    if input.ratio(1, 6)? {
        let entries = input.int_in_range(0..=16u32)?;
        flags = VIRTQ_DESC_F_INDIRECT | if input.ratio(1, 8)? { flags } else { 0 };
        return Ok(descriptor(TABLES, 16 * entries, flags, 0));
    }
    let next = if input.ratio(1, 12)? {
        input.arbitrary()?
    } else {
        input.int_in_range(0..=size.saturating_sub(1))?
    };
    Ok(descriptor(guest::address(input)?, input.arbitrary::<u16>()?.into(), flags, next))
}

impl Walk {
    fn step(&mut self, input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
        match input.int_in_range(0..=15u8)? {
            0..=3 => self.offer(input)?,
            4..=7 => self.take(input, signature)?,
            8..=10 => self.complete(input)?,
            11 => {
                let some = self.ring.unpublished() > 0;
                self.ring.publish();
                let completed = std::mem::take(&mut self.completed);
                self.used = self.used.wrapping_add(completed.len() as u16);
                self.in_flight.retain(|head| !completed.contains(head));
                let shown = self.guest.peek_u16(self.layout.used + 2);
                assert!(!some || shown == self.used, "the used index does not count what was completed");
                self.ring.wants_interrupt();
            }
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

    /// Whether the device kept to what is its own.
    fn look(&mut self) {
        let used = (self.layout.used, self.layout.used + used_bytes(self.layout.size));
        self.guest.settle(Some(&[used]));
    }

    /// The driver makes some heads available, and now and then jumps.
    fn offer(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let mask = u64::from(self.layout.size - 1);
        for _ in 0..input.int_in_range(1..=4u8)? {
            let head: u16 = if input.ratio(1, 24)? {
                input.arbitrary()?
            } else {
                input.int_in_range(0..=self.layout.size - 1)?
            };
            let slot = u64::from(self.avail) & mask;
            self.guest.poke(self.layout.avail + 4 + 2 * slot, &head.to_le_bytes());
            self.avail = self.avail.wrapping_add(1);
        }
        if input.ratio(1, 32)? {
            self.avail = input.arbitrary()?;
        }
        self.guest.poke(self.layout.avail + 2, &self.avail.to_le_bytes());
        Ok(())
    }

    fn take(&mut self, input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
        if self.faulty {
            return Ok(());
        }
        let ahead = if input.ratio(1, 4)? { guest::taken_ahead(&mut self.ring, input)? } else { Vec::new() };
        let (base, replays) = (self.ring.base(), self.ring.replays());
        let slot = u64::from(base as u16 & (self.layout.size - 1));
        let head = self.guest.peek_u16(self.layout.avail + 4 + 2 * slot);
        match self.ring.take(&mut self.chain) {
            Ok(None) => assert!(ahead.is_empty()),
            Ok(Some((taken, replayed))) => {
                assert_eq!(replayed, replays);
                assert!(ahead.first().is_none_or(|head| *head == taken.head()), "not what was there before");
                let twice = self.held.iter().any(|other| other.head() == taken.head());
                assert!(!twice, "head {} is in flight twice", taken.head());
                assert!(taken.head() < self.layout.size);
                // A driver that offers a head again before it has been shown as used spoils its own journal.
                self.honest &= !self.completed.contains(&taken.head());
                self.in_flight.push(taken.head());
                signature.count(self.chain.readable_bytes() + self.chain.writable_bytes());
                self.held.push(taken);
            }
            Err(fault) => {
                signature.saw(fault.name());
                // As a queue does: nothing is taken any more. What was journalled stays there.
                self.faulty = true;
                if self.ring.base() != base {
                    self.honest &= !self.completed.contains(&head);
                    self.in_flight.push(head);
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
        if self.ring.unpublished() == self.layout.size {
            self.ring.publish();
            let completed = std::mem::take(&mut self.completed);
            self.used = self.used.wrapping_add(completed.len() as u16);
            self.in_flight.retain(|head| !completed.contains(head));
        }
        Ok(())
    }

    /// The guest writes anywhere.
    fn meddle(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let at = if input.ratio(1, 4)? { guest::address(input)? } else { input.int_in_range(0..=BUFFERS)? };
        let bytes: [u8; 4] = input.arbitrary()?;
        self.guest.poke(at, &bytes);
        if at.saturating_add(4) > self.layout.used && at < self.layout.used + used_bytes(self.layout.size) {
            self.honest = false;
        }
        Ok(())
    }

    /// The daemon dies here; the next one opens the ring again.
    fn end(self, journal: Option<Window>, features: u64) {
        let Walk { guest, layout, ring, held, in_flight, honest, .. } = self;
        held.into_iter().for_each(RingRequest::abandon);
        drop(ring);
        // Nor does one that has moved its index further than its ring is long.
        let used = guest.peek_u16(layout.used + 2);
        let ahead = guest.peek_u16(layout.avail + 2).wrapping_sub(used.wrapping_add(in_flight.len() as u16));
        let honest = honest && ahead <= layout.size;
        let again = Ring::open(guest.view(), &layout, features, Some(0), journal, &[]);
        if honest {
            let found = again.expect("an honest ring opens again").in_flight_heads();
            assert_eq!(found, in_flight, "the journal and what was in flight differ");
        }
    }
}
