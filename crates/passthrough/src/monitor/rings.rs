//! Shadow rings: the hardware works on descriptors of the monitor's, copied from the guest's and checked on the way.
//!
//! ```text
//!   guest's ring                 monitor's ring (bus address OWN ..)            hardware
//!   [own buffer len] --copy once, check, translate--> [own bus len] --doorbell--> DMA to WINDOW + buffer
//!   [status]        <------- status words back ------ [status]      <------------ writes status
//! ```
//!
//! A descriptor is read once: what was checked is what the hardware gets, however the guest changes its own meanwhile. The
//! hardware's position begins at 0 whenever it is enabled and never shows; the guest's position is kept here, so that a
//! restored device goes on where the guest thinks it is.

pub(super) mod queue;

use std::collections::VecDeque;
use std::sync::Arc;

use ioplane_memory::{MapError, Mapping, MemoryRegion, PAGE, RegionSpec, Window};
use ioplane_model::{DescriptorRing, Flow, Way};

use super::counts::MonitorFault;
use super::dma_window::{DmaWindow, OWN};
use queue::{Queue, WORDS};

/// Largest descriptor and most descriptors of a ring that a model may have.
const LARGEST: usize = 64;
const MOST: u16 = 4096;
/// Most bytes of a buffer that a descriptor of a model may speak of.
const LONGEST: u32 = 1 << 20;

/// A descriptor of the guest's that the hardware has a copy of.
#[derive(Debug, Clone, Copy)]
struct DescriptorInFlight {
    /// Where the guest's descriptor is.
    gpa: u64,
    /// Its place in the guest's ring.
    place: u16,
    /// Whether it is the last of the guest's ring.
    end: bool,
    buffer: u64,
    len: u32,
    /// The first word of it, as the guest wrote it.
    status: u32,
    /// The hardware has it. One that it must not see only waits for its turn.
    issued: bool,
}

/// A descriptor that passed its check, and is not the hardware's yet.
#[derive(Debug, Clone, Copy)]
struct Vetted {
    flight: DescriptorInFlight,
    bytes: [u8; LARGEST],
}

/// What a ring tells of itself to be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct RingV1 {
    /// The guest's base address.
    pub(super) base: u64,
    /// Whether the guest has it enabled.
    pub(super) running: bool,
    /// The guest's next descriptor that the hardware has not finished.
    pub(super) position: u16,
    /// How many descriptors the hardware had and had not finished.
    pub(super) unfinished: u16,
    /// [`ShadowRing::rung`].
    pub(super) rung: bool,
}

/// One ring.
#[derive(Debug)]
pub(super) struct ShadowRing {
    pub(super) table: &'static DescriptorRing,
    /// Our descriptors.
    own: Window,
    bus: u64,
    /// The guest's base address, as it wrote it.
    pub(super) base: u64,
    /// Whether the guest has enabled it.
    pub(super) running: bool,
    /// Whether the guest has rung its doorbell since it enabled it. A ring that it never uses may lie over anything: what looks like
    /// a descriptor there is none.
    pub(super) rung: bool,
    /// Whether the hardware works on it now: not while the device is parked.
    pub(super) live: bool,
    /// The next descriptor of the guest's to be copied.
    pub(super) next: u16,
    /// The hardware's oldest unfinished descriptor.
    head: u16,
    in_flight: VecDeque<DescriptorInFlight>,
    vetted: Vec<Vetted>,
    /// It was looked at, and what passed waits to be published.
    looked: bool,
    /// The descriptor that failed last, so that one that just lies there is counted once.
    bad: Option<(u64, u32, u64)>,
    /// Bus address of the buffer that stands in for one to receive into that is not the guest's, where that is ignored. Nobody sees what is written
    /// there.
    spare: u64,
    /// Faults that were ignored, to be counted.
    ignored: Vec<MonitorFault>,
    /// What a ring has that is followed to its tail.
    pub(super) queue: Option<Queue>,
}

impl ShadowRing {
    fn new(table: &'static DescriptorRing, mapping: &Arc<Mapping>, at: usize, spare: u64) -> Option<Self> {
        let most = table.most;
        let own = Window::of_mapping(mapping, at, usize::from(most) * usize::from(table.descriptor.size))?;
        Some(ShadowRing::over(table, own, OWN + at as u64, spare))
    }

    /// An empty one with its descriptors in `own`, which the hardware sees at `bus`.
    fn over(table: &'static DescriptorRing, own: Window, bus: u64, spare: u64) -> Self {
        let most = usize::from(table.most);
        ShadowRing {
            table,
            own,
            bus,
            base: 0,
            running: table.queue.is_some(),
            rung: false,
            live: false,
            next: 0,
            head: 0,
            in_flight: VecDeque::with_capacity(if table.queue.is_some() { 0 } else { most }),
            vetted: Vec::with_capacity(if table.queue.is_some() { 0 } else { most }),
            looked: false,
            bad: None,
            spare,
            ignored: Vec::with_capacity(if table.queue.is_some() { 0 } else { most }),
            queue: table.queue.as_ref().map(Queue::new),
        }
    }

    /// The same place for descriptors, of the next guest: empty.
    pub(super) fn emptied(&self) -> ShadowRing {
        let ring = ShadowRing::over(self.table, self.own.clone(), self.bus, self.spare);
        ring.disown();
        ring
    }

    /// What the hardware's base register gets.
    pub(super) fn bus(&self) -> u64 {
        self.bus
    }

    /// Descriptors that the hardware has not finished.
    pub(super) fn in_flight(&self) -> usize {
        self.queue.as_ref().map_or(self.in_flight.len(), Queue::in_flight)
    }

    fn gpa(&self, place: u16) -> Option<u64> {
        self.base.checked_add(u64::from(place) * u64::from(self.table.descriptor.size))
    }

    /// The base address is aligned, and a descriptor fits there.
    pub(super) fn check_base(&self, dma: &DmaWindow) -> Result<(), MonitorFault> {
        let name = self.table.name;
        if !self.base.is_multiple_of(self.table.align) {
            let text =
                format!("ring {name} at {:#x} is not aligned to {} bytes", self.base, self.table.align);
            return Err(MonitorFault::dma("ring-misaligned", text));
        }
        if dma.bus(self.base, self.table.descriptor.size.into(), Way::Write).is_none() {
            let text = format!("ring {name} at {:#x} is outside the guest's memory", self.base);
            return Err(MonitorFault::dma("ring-outside", text));
        }
        Ok(())
    }

    /// Copies what the guest has given to the hardware since, and checks it. Nothing is the hardware's before
    /// [`ShadowRing::publish`]. On a fault those before the faulty one are kept. If faults are `ignored`, a descriptor whose buffer is
    /// not the guest's does not keep those behind it: see [`ShadowRing::ignored`]. One to be sent comes back in its turn and the hardware never
    /// sees it, one to receive into gets the spare buffer.
    pub(super) fn vet(&mut self, dma: &DmaWindow, ignored: bool) -> Result<(), MonitorFault> {
        if self.queue.is_some() {
            return self.vet_queue(dma, ignored);
        }
        self.vetted.clear();
        self.looked = true;
        if !self.live {
            return Ok(());
        }
        let layout = &self.table.descriptor;
        let mut place = self.next;
        // Bounded by the number of our descriptors: each turn uses one up.
        while self.in_flight.len() + self.vetted.len() < usize::from(self.table.most) {
            let Some(gpa) = self.gpa(place) else {
                return self.fault(0, 0, u64::MAX, "ring-outside", || "it runs past all addresses".into());
            };
            let oldest = self.in_flight.front().map(|flight| flight.gpa);
            if oldest.or(self.vetted.first().map(|vetted| vetted.flight.gpa)) == Some(gpa) {
                return Ok(());
            }
            let Ok(window) = dma.view().window(gpa, layout.size.into(), 4) else {
                return self.fault(gpa, 0, 0, "ring-outside", || {
                    format!("descriptor {place} at {gpa:#x} is outside the guest's memory")
                });
            };
            // The word with ownership first: what the driver wrote before it is there then. Each word is loaded once.
            let status = window.load_u32(layout.status.into());
            if status & layout.own == 0 {
                return Ok(());
            }
            let mut bytes = [0; LARGEST];
            for at in (0..usize::from(layout.size)).step_by(4) {
                let word = if at == usize::from(layout.status) { status } else { window.load_u32(at) };
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
            let half = |at: u16| u64::from(word(&bytes, at));
            let buffer = half(layout.address.0) | half(layout.address.1) << 32;
            let len = (status & layout.length) >> layout.length.trailing_zeros().min(31);
            let way = if self.table.flow == Flow::Receive { Way::Write } else { Way::Read };
            let reached = dma.bus(buffer, len.into(), way);
            let text = || {
                format!(
                    "descriptor {place}: buffer {buffer:#x}+{len:#x} is outside the guest's memory, or not for that"
                )
            };
            let (bus, issued, len) = match reached {
                Some(bus) => (bus, true, len),
                None if ignored => {
                    let text = format!("ring {}: {}", self.table.name, text());
                    self.ignored.push(MonitorFault::dma("buffer-outside", text));
                    (self.spare, self.table.flow == Flow::Receive, 0)
                }
                None => return self.fault(gpa, status, buffer, "buffer-outside", text),
            };
            let end = status & layout.end != 0;
            put(&mut bytes, layout.address.0, bus as u32);
            put(&mut bytes, layout.address.1, (bus >> 32) as u32);
            put(&mut bytes, layout.status, status & !layout.end);
            self.vetted.push(Vetted {
                flight: DescriptorInFlight { gpa, place, end, buffer, len, status, issued },
                bytes,
            });
            place = if end { 0 } else { place + 1 };
            if place >= self.table.most {
                // The next one would be beyond the limit: the ring has no end.
                let most = self.table.most;
                self.vetted.pop();
                return self.fault(gpa, status, buffer, "ring-endless", || {
                    format!("no end mark within {most} descriptors")
                });
            }
        }
        Ok(())
    }

    /// Faults that [`ShadowRing::vet`] has ignored since this was asked last.
    pub(super) fn ignored(&mut self) -> impl Iterator<Item = MonitorFault> + '_ {
        self.ignored.drain(..)
    }

    /// A fault, once for as long as the same descriptor is just as bad; a doorbell rung on it counts again.
    fn fault(
        &mut self,
        gpa: u64,
        status: u32,
        buffer: u64,
        name: &'static str,
        text: impl FnOnce() -> String,
    ) -> Result<(), MonitorFault> {
        let bad = Some((gpa, status, buffer));
        if self.bad == bad && self.table.flow == Flow::Receive {
            return Ok(());
        }
        self.bad = bad;
        Err(MonitorFault::dma(name, format!("ring {}: {}", self.table.name, text())))
    }

    /// Whether [`ShadowRing::vet`] has let pass what now waits for [`ShadowRing::publish`].
    pub(super) fn is_vetted(&self) -> bool {
        self.looked
    }

    /// Forgets what was vetted and not published.
    pub(super) fn drop_vetted(&mut self) {
        self.looked = false;
        self.vetted.clear();
        if let Some(queue) = &mut self.queue {
            queue.drop_vetted();
        }
    }

    /// Gives the hardware what passed; how many descriptors, of how many bytes.
    pub(super) fn publish(&mut self) -> (u64, u64) {
        if self.queue.is_some() {
            return self.publish_queue();
        }
        let layout = &self.table.descriptor;
        let (mut count, mut total) = (0, 0);
        self.looked = false;
        for Vetted { flight, bytes } in self.vetted.drain(..) {
            self.next = if flight.end { 0 } else { flight.place + 1 };
            if !flight.issued {
                self.in_flight.push_back(flight);
                continue;
            }
            let issued = self.in_flight.iter().filter(|flight| flight.issued).count();
            let slot = (usize::from(self.head) + issued) % usize::from(self.table.most);
            let at = slot * usize::from(layout.size);
            let last = slot + 1 == usize::from(self.table.most);
            for offset in (0..usize::from(layout.size)).step_by(4) {
                if offset != usize::from(layout.status) {
                    self.own.put_u32(at + offset, word(&bytes, offset as u16));
                }
            }
            // Ownership last: the hardware looks at any time.
            let status = word(&bytes, layout.status) | if last { layout.end } else { 0 };
            self.own.put_u32(at + usize::from(layout.status), status);
            count += 1;
            total += u64::from(flight.len);
            self.in_flight.push_back(flight);
        }
        (count, total)
    }

    /// Gives the guest back what the hardware has finished; how many descriptors.
    pub(super) fn harvest(&mut self, dma: &DmaWindow) -> u32 {
        if self.queue.is_some() {
            return self.harvest_queue(dma);
        }
        let layout = &self.table.descriptor;
        let mut done = 0;
        while let Some(flight) = self.in_flight.front() {
            let at = usize::from(self.head) * usize::from(layout.size);
            let status = match flight.issued {
                true => self.own.load_u32(at + usize::from(layout.status)),
                false => flight.status & !layout.own,
            };
            if status & layout.own != 0 {
                break;
            }
            let status = status & !layout.end | if flight.end { layout.end } else { 0 };
            let receive = self.table.flow == Flow::Receive;
            if receive {
                // How much of it the hardware wrote only its own format says: all of it may be.
                dma.view().wrote(flight.buffer, flight.len.into());
            }
            // The guest may have taken its ring away; then nobody waits for the status.
            if let Ok(window) = dma.view().window(flight.gpa, layout.size.into(), 4) {
                for offset in (0..layout.size).step_by(4) {
                    let address = offset == layout.address.0 || offset == layout.address.1;
                    if receive && !address && offset != layout.status {
                        let word = self.own.load_u32(at + usize::from(offset));
                        dma.view().store_u32(&window, offset.into(), word);
                    }
                }
                dma.view().store_u32(&window, layout.status.into(), status);
            }
            let issued = flight.issued;
            self.in_flight.pop_front();
            self.head = (self.head + u16::from(issued)) % self.table.most;
            done += 1;
        }
        done
    }

    /// The guest has enabled it: from the start, on both sides.
    pub(super) fn start(&mut self) {
        self.running = true;
        self.begin(0);
    }

    /// The guest has disabled it, or reset the device.
    pub(super) fn stop(&mut self) {
        self.running = self.queue.is_some();
        self.rung = false;
        self.live = false;
        self.in_flight.clear();
        self.vetted.clear();
        self.next = 0;
        if let Some(queue) = &mut self.queue {
            queue.stop();
        }
    }

    /// Nothing in it is the hardware's any more.
    pub(super) fn disown(&self) {
        for at in (0..self.own.len()).step_by(4) {
            self.own.put_u32(at, 0);
        }
    }

    /// The hardware begins at our first descriptor, with the guest's `position`.
    fn begin(&mut self, position: u16) {
        self.disown();
        let layout = &self.table.descriptor;
        match &mut self.queue {
            Some(queue) => queue.begin(),
            None => {
                let last = self.own.len() - usize::from(layout.size);
                self.own.put_u32(last + usize::from(layout.status), layout.end);
            }
        }
        self.head = 0;
        self.next = position;
        self.in_flight.clear();
        self.vetted.clear();
        self.bad = None;
        self.live = true;
    }

    /// The hardware works on it no longer, though the guest has it enabled: what it has not finished is the guest's again,
    /// to be given once more. Harvest first. Gives how many descriptors these are.
    pub(super) fn recall(&mut self, dma: &DmaWindow) -> u16 {
        if self.queue.is_some() {
            return self.recall_queue(dma);
        }
        let unfinished = self.in_flight.len() as u16;
        if let Some(oldest) = self.in_flight.front() {
            self.next = oldest.place;
        }
        if self.table.flow == Flow::Receive {
            for flight in &self.in_flight {
                dma.view().wrote(flight.buffer, flight.len.into());
            }
        }
        self.in_flight.clear();
        self.vetted.clear();
        self.live = false;
        unfinished
    }

    /// Takes back [`ShadowRing::recall`].
    pub(super) fn go_on(&mut self) {
        if self.running {
            self.begin(self.next);
        }
    }

    /// To be saved, while recalled.
    pub(super) fn save(&self, unfinished: u16) -> RingV1 {
        RingV1 { base: self.base, running: self.running, position: self.next, unfinished, rung: self.rung }
    }

    /// Whether a saved one fits.
    pub(super) fn fits(&self, saved: &RingV1) -> bool {
        saved.position < self.table.most && saved.unfinished <= self.table.most
    }

    /// Takes a saved one that [`ShadowRing::fits`] over; [`ShadowRing::go_on`] starts it.
    pub(super) fn load(&mut self, saved: &RingV1) {
        self.stop();
        (self.base, self.running, self.next) = (saved.base, saved.running, saved.position);
        self.rung = saved.rung;
    }
}

fn word(bytes: &[u8; LARGEST], at: u16) -> u32 {
    let at = usize::from(at);
    bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn put(bytes: &mut [u8; LARGEST], at: u16, value: u32) {
    let at = usize::from(at);
    if let Some(place) = bytes.get_mut(at..at + 4) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

/// Whether a ring's descriptors can be copied by this code.
pub(super) fn sound(ring: &DescriptorRing) -> bool {
    let layout = &ring.descriptor;
    if ring.queue.is_some() {
        return (1..=MOST).contains(&ring.most) && usize::from(layout.size) == WORDS * 4 && ring.align > 0;
    }
    let inside = |at: u16| at.is_multiple_of(4) && at.checked_add(4).is_some_and(|end| end <= layout.size);
    (1..=MOST).contains(&ring.most)
        && layout.size.is_multiple_of(4)
        && (4..=LARGEST).contains(&usize::from(layout.size))
        && [layout.status, layout.address.0, layout.address.1].into_iter().all(inside)
        && ring.align > 0
        && layout.length >> layout.length.trailing_zeros().min(31) < LONGEST
}

/// The rings of one device, and the memory that the hardware sees them in: to be mapped at [`OWN`].
pub(super) fn make(
    tables: &'static [DescriptorRing],
) -> Result<(Vec<ShadowRing>, Option<MemoryRegion>), MapError> {
    let mut at = 0u64;
    let mut places = Vec::new();
    for table in tables {
        at = at.next_multiple_of(table.align.max(PAGE));
        places.push((table, at));
        at += u64::from(table.most) * u64::from(table.descriptor.size);
    }
    if places.is_empty() {
        return Ok((Vec::new(), None));
    }
    // Behind the rings the spare buffer.
    let spare = at.next_multiple_of(PAGE);
    let lengths =
        tables.iter().filter(|table| table.flow == Flow::Receive).map(|table| table.descriptor.length);
    let longest = lengths.map(|mask| u64::from(mask >> mask.trailing_zeros().min(31)) + 1).max();
    let len = spare + longest.unwrap_or(0).next_multiple_of(PAGE);
    let mapping = Arc::new(Mapping::anonymous("shadow-rings", len)?);
    let file = mapping.file().try_clone_to_owned().map_err(|error| {
        ioplane_memory::MappingError::Os(
            rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE),
        )
    })?;
    let memory = MemoryRegion::map(RegionSpec { gpa: OWN, len, user: 0, offset: 0, file })?;
    let ring = |(table, at): (&'static DescriptorRing, u64)| {
        ShadowRing::new(table, &mapping, at as usize, OWN + spare)
    };
    let rings = places.into_iter().filter_map(ring).collect();
    Ok((rings, Some(memory)))
}
