//! Rings that the hardware follows from a head to a tail. What the hardware has is a ring of the monitor's, as long as the guest's.
//!
//! ```text
//!   guest writes its tail --> descriptors up to it are copied once, checked by their format, translated
//!        whole frames only --> our ring --> our tail --> hardware
//!   guest's descriptors <-- words that the hardware wrote, if the guest asked for them <-- done, up to the end of a frame
//! ```
//!
//! Base, length, head and tail of the guest are kept here and never reach the hardware: it begins at the first of our descriptors after
//! each reset, whatever position the guest has. The hardware says that it has done with a descriptor only where it was asked to, so that the last
//! one of each turn asks.

use std::collections::VecDeque;

use ioplane_model::{BufferLength, DescriptorFormat, FORMATS, Flow, TailQueue, Way};

use super::ShadowRing;
use crate::monitor::counts::MonitorFault;
use crate::monitor::dma_window::DmaWindow;

/// Words of a descriptor.
pub(in crate::monitor) const WORDS: usize = 4;
type Words = [u32; WORDS];

/// Which formats descriptors of a ring may have now, by the device's registers: the length of the buffers where registers say it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::monitor) struct Shape(pub(in crate::monitor) [Option<u32>; FORMATS]);

/// A descriptor that passed its check, or comes back as it was.
#[derive(Debug, Clone, Copy)]
struct Flight {
    /// Where the guest's is. `None`: it is of the monitor.
    gpa: Option<u64>,
    place: u16,
    format: u8,
    /// Address in guest memory and length of its buffer.
    buffer: (u64, u32),
    /// As the hardware gets it.
    words: Words,
    /// The last of a frame, or one that stands for itself.
    ends: bool,
    /// The hardware gets it.
    issued: bool,
    /// The hardware says when it has done with it.
    reports: bool,
    /// The guest wants to be told.
    asked: bool,
}

/// What is saved of a ring that is followed to its tail, beside what is saved of every ring.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(in crate::monitor) struct QueueV1 {
    length: u32,
    tail: u16,
    contexts: [Option<Words>; 2],
}

/// The part of a ring that only those have that are followed to their tails.
#[derive(Debug)]
pub(in crate::monitor) struct Queue {
    table: &'static TailQueue,
    /// The guest's length, in bytes.
    length: u32,
    /// The guest's tail.
    tail: u16,
    /// The tail that it is about to write.
    proposed: Option<u16>,
    shape: Shape,
    /// The hardware was told where our ring is.
    pub(in crate::monitor) told: bool,
    /// What later descriptors of the guest refer to.
    contexts: [Option<Words>; 2],
    /// The hardware does not have them.
    owed: bool,
    flights: VecDeque<Flight>,
    vetted: Vec<Flight>,
}

impl Queue {
    pub(in crate::monitor) fn new(table: &'static TailQueue) -> Self {
        Queue {
            table,
            length: 0,
            tail: 0,
            proposed: None,
            shape: Shape::default(),
            told: false,
            contexts: [None; 2],
            owed: false,
            flights: VecDeque::new(),
            vetted: Vec::new(),
        }
    }

    pub(in crate::monitor) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    pub(in crate::monitor) fn length(&self) -> u32 {
        self.length
    }

    pub(in crate::monitor) fn tail(&self) -> u16 {
        self.tail
    }

    /// What the guest is about to write, for a check.
    pub(in crate::monitor) fn propose(&mut self, tail: u32) {
        self.proposed = Some(tail as u16);
    }

    /// What its descriptors mean from here on.
    pub(in crate::monitor) fn set_shape(&mut self, shape: Shape) {
        self.shape = shape;
    }

    /// Whether descriptors that the hardware has would mean something else.
    pub(in crate::monitor) fn mistakes(&self, shape: Shape) -> bool {
        shape != self.shape && !self.flights.is_empty()
    }

    pub(in crate::monitor) fn drop_vetted(&mut self) {
        self.vetted.clear();
        self.proposed = None;
    }

    /// The tail that was proposed, or this one, is the guest's.
    pub(in crate::monitor) fn accept(&mut self, tail: u32) {
        self.proposed = None;
        self.tail = tail as u16;
    }

    /// The guest begins elsewhere: nothing is the hardware's before the tail is written.
    pub(in crate::monitor) fn begin_at(&mut self, place: u16) {
        self.tail = place;
    }

    pub(in crate::monitor) fn save(&self) -> QueueV1 {
        QueueV1 { length: self.length, tail: self.tail, contexts: self.contexts }
    }

    /// Takes a saved one that [`Queue::fits`].
    pub(in crate::monitor) fn load(&mut self, saved: &QueueV1) {
        (self.length, self.tail, self.contexts) = (saved.length, saved.tail, saved.contexts);
    }

    /// Whether a saved one says what no guest could have left: what a context is must be one, or the hardware would follow it.
    pub(in crate::monitor) fn fits(&self, saved: &QueueV1) -> bool {
        saved.contexts.iter().flatten().all(|words| {
            let format = self.table.formats.iter().find(|format| tagged(format, words));
            format.is_some_and(|format| format.context.is_some() && format.buffer.is_none())
        })
    }

    /// Forgets everything of the guest's.
    pub(in crate::monitor) fn stop(&mut self) {
        let table = self.table;
        *self = Queue { flights: std::mem::take(&mut self.flights), ..Queue::new(table) };
        self.flights.clear();
    }

    /// The hardware begins at our first descriptor.
    pub(in crate::monitor) fn begin(&mut self) {
        self.flights.clear();
        self.vetted.clear();
        self.proposed = None;
        self.told = false;
        self.owed = self.contexts.iter().any(Option::is_some);
    }

    fn done(&self, flight: &Flight) -> (usize, u32) {
        let format = &self.table.formats[usize::from(flight.format) % self.table.formats.len()];
        (usize::from(format.done.0), format.done.1)
    }
}

fn tagged(format: &DescriptorFormat, words: &Words) -> bool {
    let (at, mask, is) = format.tag;
    words.get(usize::from(at)).is_some_and(|word| word & mask == is)
}

fn has(words: &Words, (at, bit): (u8, u32)) -> bool {
    words.get(usize::from(at)).is_some_and(|word| word & bit != 0)
}

impl ShadowRing {
    /// Descriptors of the guest's ring and of ours.
    fn slots(&self) -> u16 {
        let size = u32::from(self.table.descriptor.size).max(1);
        let length = self.queue.as_ref().map_or(0, |queue| queue.length);
        u16::try_from(length / size).unwrap_or(u16::MAX).clamp(1, self.table.most)
    }

    /// The guest's next descriptor that the hardware has not finished: what its head register says.
    pub(in crate::monitor) fn guest_head(&self) -> u16 {
        let queue = self.queue.as_ref();
        let first = queue.and_then(|queue| queue.flights.iter().find(|flight| flight.gpa.is_some()));
        first.map_or(self.next, |flight| flight.place)
    }

    /// The guest's length register. Ours is as long, and begins anew.
    pub(in crate::monitor) fn set_length(&mut self, length: u32) {
        if let Some(queue) = self.queue.as_mut().filter(|queue| queue.length != length) {
            (queue.length, queue.told) = (length, false);
            self.head = 0;
            self.disown();
        }
    }

    /// What the hardware's length register gets, in bytes.
    pub(in crate::monitor) fn own_length(&self) -> u32 {
        u32::from(self.slots()) * u32::from(self.table.descriptor.size)
    }

    /// What the hardware's tail register gets.
    pub(in crate::monitor) fn own_tail(&self) -> u16 {
        let issued = self
            .queue
            .as_ref()
            .map_or(0, |queue| queue.flights.iter().filter(|flight| flight.issued).count());
        ((usize::from(self.head) + issued) % usize::from(self.slots())) as u16
    }

    /// The guest's ring lies in its memory, and the tail in the ring. How many descriptors are new.
    fn new_ones(&mut self, dma: &DmaWindow) -> Result<u16, MonitorFault> {
        let Some(queue) = &self.queue else { return Ok(0) };
        let tail = queue.proposed.unwrap_or(queue.tail);
        if tail == self.next {
            return Ok(0);
        }
        let (length, unit, most) = (queue.length, queue.table.unit, self.table.most);
        let waiting = queue.flights.iter().filter(|flight| flight.gpa.is_some()).count();
        let (name, base, next) = (self.table.name, self.base, self.next);
        let longest = u32::from(most) * u32::from(self.table.descriptor.size);
        let says =
            |fault: &'static str, text: String| Err(MonitorFault::dma(fault, format!("ring {name}: {text}")));
        if !base.is_multiple_of(self.table.align) {
            return says(
                "ring-misaligned",
                format!("{base:#x} is not aligned to {} bytes", self.table.align),
            );
        }
        if length == 0 || !length.is_multiple_of(unit.max(1)) || length > longest {
            return says("ring-length", format!("{length} bytes are no multiple of {unit} up to {longest}"));
        }
        if dma.bus(base, length.into(), Way::Write).is_none() {
            return says("ring-outside", format!("{base:#x}+{length:#x} is outside the guest's memory"));
        }
        let slots = self.slots();
        if tail >= slots || next >= slots {
            return says("tail-outside", format!("head {next} and tail {tail} of {slots} descriptors"));
        }
        let count = (tail + slots - next) % slots;
        if usize::from(count) + waiting >= usize::from(slots) {
            return says("tail-laps", format!("tail {tail} is past the {waiting} that the hardware has"));
        }
        Ok(count)
    }

    /// As [`ShadowRing::vet`]. Of a ring that is sent from only whole frames pass: what follows is looked at again when it is complete.
    /// A frame with a buffer that is not the guest's comes back as a whole and unsent, if that is ignored.
    pub(in crate::monitor) fn vet_queue(
        &mut self,
        dma: &DmaWindow,
        ignored: bool,
    ) -> Result<(), MonitorFault> {
        self.looked = true;
        if let Some(queue) = &mut self.queue {
            queue.vetted.clear();
        }
        if !self.live {
            return Ok(());
        }
        let count = match self.new_ones(dma) {
            Ok(count) => count,
            Err(fault) => return self.once(fault),
        };
        let slots = self.slots();
        let receive = self.table.flow == Flow::Receive;
        let (mut place, mut frame, mut bad) = (self.next, 0, false);
        let mut outcome = Ok(());
        for _ in 0..count {
            let Some(queue) = &mut self.queue else { break };
            let owed = if queue.owed { queue.contexts.iter().flatten().count() } else { 0 };
            if queue.flights.len() + queue.vetted.len() + owed + 1 >= usize::from(slots) {
                break;
            }
            let at = u64::from(place) * u64::from(self.table.descriptor.size);
            let read = self.base.checked_add(at).map(|gpa| (gpa, dma.view().window(gpa, 16, 4)));
            let Some((gpa, Ok(window))) = read else {
                outcome =
                    Err(self
                        .about("ring-outside", format!("descriptor {place} is outside the guest's memory")));
                break;
            };
            // Each word is loaded once: what is checked is what the hardware gets.
            let mut words = [0; WORDS];
            for (at, word) in words.iter_mut().enumerate() {
                *word = window.load_u32(at * 4);
            }
            let flight = match self.understand(dma, words, frame == 0) {
                Ok(flight) => flight,
                Err(fault) if ignored => {
                    self.ignored.push(fault);
                    bad = true;
                    self.unusable(words, frame == 0)
                }
                Err(fault) => {
                    outcome = self.once(fault);
                    break;
                }
            };
            let flight = Flight { gpa: Some(gpa), place, ..flight };
            place = if place + 1 == slots { 0 } else { place + 1 };
            let Some(queue) = &mut self.queue else { break };
            queue.vetted.push(flight);
            frame += 1;
            if flight.ends {
                if bad && !receive {
                    let first = queue.vetted.len() - frame;
                    queue.vetted[first..].iter_mut().for_each(|flight| flight.issued = false);
                }
                (frame, bad) = (0, false);
            }
        }
        if let Some(queue) = &mut self.queue {
            let whole = queue.vetted.len() - frame;
            queue.vetted.truncate(whole);
        }
        outcome
    }

    fn about(&self, name: &'static str, text: String) -> MonitorFault {
        MonitorFault::dma(name, format!("ring {}: {text}", self.table.name))
    }

    /// A fault of a ring that is received into, once for as long as its first new descriptor is the same.
    fn once(&mut self, fault: MonitorFault) -> Result<(), MonitorFault> {
        let tail = self.queue.as_ref().map_or(0, |queue| queue.proposed.unwrap_or(queue.tail));
        let bad = Some((self.base, u32::from(self.next), u64::from(tail)));
        if self.bad == bad && self.queue.as_ref().is_some_and(|queue| queue.proposed.is_none()) {
            return Ok(());
        }
        self.bad = bad;
        Err(fault)
    }

    /// What a descriptor is, checked and translated. `first`: outside of a frame.
    fn understand(&self, dma: &DmaWindow, mut words: Words, first: bool) -> Result<Flight, MonitorFault> {
        let receive = self.table.flow == Flow::Receive;
        let found = self.format(&words);
        let Some((at, format, length)) = found else {
            return Err(
                self.about("descriptor-format", format!("a descriptor {words:08x?} of no known format"))
            );
        };
        let mut buffer = (0, 0);
        if let Some(place) = format.buffer {
            let low = usize::from(place.address);
            let gpa = u64::from(words[low % WORDS]) | u64::from(words[(low + 1) % WORDS]) << 32;
            let len = match place.length {
                BufferLength::Field(word, mask) => {
                    (words[usize::from(word) % WORDS] & mask) >> mask.trailing_zeros().min(31)
                }
                BufferLength::By(..) => length,
            };
            let way = if receive { Way::Write } else { Way::Read };
            let bus = match len {
                // Nothing is read: the address may be anything.
                0 if !receive => self.spare,
                _ => dma.bus(gpa, len.into(), way).ok_or_else(|| {
                    let text =
                        format!("buffer {gpa:#x}+{len:#x} is outside the guest's memory, or not for that");
                    self.about("buffer-outside", text)
                })?,
            };
            (words[low % WORDS], words[(low + 1) % WORDS]) = (bus as u32, (bus >> 32) as u32);
            buffer = (gpa, len);
        }
        words[usize::from(format.done.0) % WORDS] &= !format.done.1;
        let asked = format.report.is_none_or(|bit| has(&words, bit));
        let ends = receive || format.last.map_or(first, |bit| has(&words, bit));
        Ok(Flight {
            gpa: None,
            place: 0,
            format: at,
            buffer,
            words,
            ends,
            issued: true,
            reports: asked,
            asked,
        })
    }

    fn format(&self, words: &Words) -> Option<(u8, &'static DescriptorFormat, u32)> {
        let queue = self.queue.as_ref()?;
        let formats = queue.table.formats.iter().zip(queue.shape.0).zip(0u8..);
        let mut fitting = formats.filter_map(|((format, shape), at)| Some((at, format, shape?)));
        fitting.find(|(_, format, _)| tagged(format, words))
    }

    /// What stands for a descriptor that was ignored: it comes back in its turn. One to receive into gets a buffer that nobody sees.
    fn unusable(&self, mut words: Words, first: bool) -> Flight {
        let receive = self.table.flow == Flow::Receive;
        let found = self.format(&words);
        let (at, format) = found.map_or((0, None), |(at, format, _)| (at, Some(format)));
        let place = format.and_then(|format| format.buffer).filter(|_| receive);
        if let Some(place) = place {
            let low = usize::from(place.address);
            (words[low % WORDS], words[(low + 1) % WORDS]) = (self.spare as u32, (self.spare >> 32) as u32);
        }
        if let Some(format) = format {
            words[usize::from(format.done.0) % WORDS] &= !format.done.1;
        }
        let asked = format.is_some_and(|format| format.report.is_none_or(|bit| has(&words, bit)));
        let last = format.is_none_or(|format| format.last.map_or(first, |bit| has(&words, bit)));
        Flight {
            gpa: None,
            place: 0,
            format: at,
            buffer: (0, 0),
            words,
            ends: receive || last,
            issued: place.is_some(),
            reports: asked,
            asked,
        }
    }

    /// As [`ShadowRing::publish`]. The tail register is to be written then.
    pub(in crate::monitor) fn publish_queue(&mut self) -> (u64, u64) {
        self.looked = false;
        let (slots, size) = (self.slots(), usize::from(self.table.descriptor.size));
        let mut slot = usize::from(self.own_tail());
        let Some(queue) = &mut self.queue else { return (0, 0) };
        let mut batch = std::mem::take(&mut queue.vetted);
        let issues = batch.iter().rposition(|flight| flight.issued);
        if let Some(last) = issues {
            let format = &queue.table.formats[usize::from(batch[last].format) % queue.table.formats.len()];
            if let Some((word, bit)) = format.report {
                batch[last].words[usize::from(word) % WORDS] |= bit;
                batch[last].reports = true;
            }
            if std::mem::take(&mut queue.owed) {
                let first = batch[0].place;
                let formats = queue.table.formats;
                let owed = queue.contexts.iter().flatten().filter_map(|words| {
                    let format = formats.iter().position(|format| tagged(format, words))?;
                    Some(Flight {
                        gpa: None,
                        place: first,
                        format: format as u8,
                        buffer: (0, 0),
                        words: *words,
                        ends: true,
                        issued: true,
                        reports: false,
                        asked: false,
                    })
                });
                batch.splice(0..0, owed.collect::<Vec<_>>());
            }
        }
        let (mut count, mut total) = (0, 0);
        for flight in &batch {
            if flight.issued {
                for (at, word) in flight.words.iter().enumerate() {
                    self.own.put_u32(slot * size + at * 4, *word);
                }
                slot = (slot + 1) % usize::from(slots);
                count += 1;
                total += u64::from(flight.buffer.1);
            }
            if flight.gpa.is_some() {
                self.next = if flight.place + 1 == slots { 0 } else { flight.place + 1 };
            }
        }
        queue.flights.extend(batch.drain(..));
        // Its room is used again.
        queue.vetted = batch;
        (count, total)
    }

    /// As [`ShadowRing::harvest`].
    pub(in crate::monitor) fn harvest_queue(&mut self, dma: &DmaWindow) -> u32 {
        let (slots, size) = (usize::from(self.slots()), usize::from(self.table.descriptor.size));
        let receive = self.table.flow == Flow::Receive;
        let Some(queue) = &mut self.queue else { return 0 };
        let (mut finished, mut slot) = (0, usize::from(self.head));
        for (at, flight) in queue.flights.iter().enumerate() {
            if flight.issued {
                let (word, bit) = queue.done(flight);
                if flight.reports && self.own.load_u32(slot * size + word * 4) & bit != 0 {
                    finished = at + 1;
                } else if receive {
                    break;
                }
                slot = (slot + 1) % slots;
            } else if finished == at {
                finished = at + 1;
            }
        }
        while finished > 0 && !queue.flights[finished - 1].ends {
            finished -= 1;
        }
        for flight in queue.flights.drain(..finished).collect::<Vec<_>>() {
            let at = usize::from(self.head) * size;
            let format = &queue.table.formats[usize::from(flight.format) % queue.table.formats.len()];
            let done = usize::from(format.done.0) % WORDS;
            if receive && flight.buffer.1 > 0 {
                // How much of it the hardware wrote only its own format says: all of it may be.
                dma.view().wrote(flight.buffer.0, flight.buffer.1.into());
            }
            let window =
                flight.gpa.filter(|_| flight.asked).and_then(|gpa| dma.view().window(gpa, 16, 4).ok());
            if let Some(window) = window {
                let word = |at_word: usize| match flight.issued {
                    true => self.own.load_u32(at + at_word * 4),
                    false if at_word == done => flight.words[at_word] | format.done.1,
                    false => flight.words[at_word],
                };
                // The word that says so last.
                for other in (0..WORDS).filter(|other| *other != done && format.written >> other & 1 == 1) {
                    dma.view().store_u32(&window, other * 4, word(other));
                }
                dma.view().store_u32(&window, done * 4, word(done));
            }
            if let Some(choice) = format.context.filter(|_| flight.issued) {
                queue.contexts[usize::from(has(&flight.words, choice))] = Some(flight.words);
            }
            self.head = ((usize::from(self.head) + usize::from(flight.issued)) % slots) as u16;
        }
        finished as u32
    }

    /// As [`ShadowRing::recall`].
    pub(in crate::monitor) fn recall_queue(&mut self, dma: &DmaWindow) -> u16 {
        self.next = self.guest_head();
        self.live = false;
        let receive = self.table.flow == Flow::Receive;
        let Some(queue) = &mut self.queue else { return 0 };
        let unfinished = queue.flights.iter().filter(|flight| flight.gpa.is_some()).count();
        for flight in queue.flights.iter().filter(|flight| receive && flight.buffer.1 > 0) {
            dma.view().wrote(flight.buffer.0, flight.buffer.1.into());
        }
        queue.flights.clear();
        queue.drop_vetted();
        unfinished as u16
    }
}
