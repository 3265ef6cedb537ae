//! Two cards under the same script: what each access gives, each frame, each level of INTA# and each byte of memory is written down,
//! and the two lists are held against each other.
//!
//! ```text
//!   script --> Logged --> a Rig: QEMU's card | our chip | our chip, mediated
//!                |-- list of Entry --> compare(theirs, ours, known)
//! ```
//!
//! Where the other chip is known to differ a [`Known`] says so, with its source. One that explains nothing any more fails the test:
//! [`Book::check`].

use ioplane_device::{Access, RegisterAddress};
use ioplane_memory::GuestView;
use ioplane_pci::{Function, spec};

use crate::nic::{Lan, Reach, Unhosted};
use crate::qtest::Qemu;

/// A card on a wire, with a guest's memory.
pub trait Rig: Reach {
    /// A frame comes in; when this returns the card has dealt with it.
    fn arrive(&mut self, frame: &[u8]) -> Result<(), String>;
    /// Frames that the card has sent since.
    fn sent(&mut self) -> Vec<Vec<u8>>;
    /// The guest's memory.
    fn view(&self) -> &GuestView;
    /// Lets everything happen that happens by itself.
    fn settle(&mut self) {}
}

/// One thing that a script did, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Read {
        at: RegisterAddress,
        /// Bytes.
        width: usize,
        value: u32,
    },
    /// A register was written.
    Write {
        at: RegisterAddress,
        /// Bytes.
        width: usize,
        value: u32,
    },
    /// A frame came in: its length.
    Arrived(usize),
    /// Frames that were sent.
    Sent(Vec<Vec<u8>>),
    /// The level of INTA#, by the status register of the configuration space.
    Line(bool),
    /// Memory of the guest.
    Memory {
        /// Where.
        at: u64,
        bytes: Vec<u8>,
    },
}

/// A card whose script is written down.
pub struct Logged<'a> {
    rig: &'a mut dyn Rig,
    pub log: Vec<Entry>,
}

impl<'a> Logged<'a> {
    /// An empty list.
    pub fn new(rig: &'a mut dyn Rig) -> Self {
        Logged { rig, log: Vec::new() }
    }

    pub fn arrive(&mut self, frame: &[u8]) -> Result<(), String> {
        self.rig.arrive(frame)?;
        self.log.push(Entry::Arrived(frame.len()));
        Ok(())
    }

    /// What has been sent since.
    pub fn sent(&mut self) -> Vec<Vec<u8>> {
        let frames = self.rig.sent();
        self.log.push(Entry::Sent(frames.clone()));
        frames
    }

    /// The level of INTA#.
    pub fn line(&mut self) -> Result<bool, String> {
        self.rig.settle();
        let status = self.rig.read(RegisterAddress::Config(spec::STATUS as u64), 2)?;
        let up = status & u32::from(spec::STATUS_INTERRUPT) != 0;
        self.log.push(Entry::Line(up));
        Ok(up)
    }

    /// What the guest's memory holds.
    pub fn memory(&mut self, at: u64, len: usize) -> Result<Vec<u8>, String> {
        self.rig.settle();
        let mut bytes = vec![0; len];
        self.rig.view().read(at, &mut bytes).map_err(|fault| fault.to_string())?;
        self.log.push(Entry::Memory { at, bytes: bytes.clone() });
        Ok(bytes)
    }

    /// Writes the guest's memory.
    pub fn store(&mut self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.rig.view().write(at, bytes).map_err(|fault| fault.to_string())
    }

    /// The guest's memory, for drivers that keep rings there.
    pub fn view(&self) -> GuestView {
        self.rig.view().clone()
    }
}

impl Reach for Logged<'_> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        let word = |bytes: &[u8]| {
            let mut word = [0; 4];
            let len = bytes.len().min(4);
            word[..len].copy_from_slice(&bytes[..len]);
            u32::from_le_bytes(word)
        };
        let entry = match op {
            Access::Read(out) => {
                self.rig.access(at, Access::Read(out))?;
                Entry::Read { at, width: out.len(), value: word(out) }
            }
            Access::Write(bytes) => {
                self.rig.access(at, Access::Write(bytes))?;
                Entry::Write { at, width: bytes.len(), value: word(bytes) }
            }
        };
        self.log.push(entry);
        Ok(())
    }
}

impl Rig for (Qemu, GuestView) {
    fn arrive(&mut self, frame: &[u8]) -> Result<(), String> {
        self.0.send(frame)
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        self.0.sent()
    }

    fn view(&self) -> &GuestView {
        &self.1
    }
}

impl Reach for (Qemu, GuestView) {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.0.access(at, op)
    }
}

/// What stands on a wire and is driven by a script: a chip of ours with nobody in between, or a mediated one.
pub trait Driven: Reach {
    /// A frame has come.
    fn arrived(&mut self);
    /// What is under way comes to its end.
    fn settle(&mut self);
}

impl<F: Function> Driven for Unhosted<F> {
    fn arrived(&mut self) {
        self.attend();
    }

    fn settle(&mut self) {
        self.attend();
    }
}

/// One of ours on the wire `lan`, in front of the memory `view`.
pub struct Wired<D> {
    driven: D,
    lan: Lan,
    view: GuestView,
}

impl<D: Driven> Wired<D> {
    pub fn new(driven: D, lan: Lan, view: GuestView) -> Self {
        Wired { driven, lan, view }
    }
}

impl<F: Function> Wired<Unhosted<F>> {
    /// `chip` with nobody in between.
    pub fn bare(chip: F, lan: Lan, view: GuestView) -> Self {
        let mut chip = Unhosted::new(chip);
        chip.attend();
        Wired::new(chip, lan, view)
    }
}

impl<D: Driven> Reach for Wired<D> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.driven.access(at, op)
    }
}

impl<D: Driven> Rig for Wired<D> {
    fn arrive(&mut self, frame: &[u8]) -> Result<(), String> {
        self.lan.neighbour.send(frame);
        self.driven.arrived();
        Ok(())
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.lan.neighbour.take()).collect()
    }

    fn view(&self) -> &GuestView {
        &self.view
    }

    fn settle(&mut self) {
        self.driven.settle();
    }
}

/// Which of ours is held against QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// The chip of `ioplane-nic`.
    Chip,
    /// The same under the monitor.
    Watched,
}

/// Two entries that differ.
#[derive(Debug, Clone, Copy)]
pub struct Difference<'a> {
    pub script: &'a str,
    pub whose: Whose,
    /// What happened before, with QEMU's values.
    pub before: &'a [Entry],
    /// QEMU's.
    pub theirs: &'a Entry,
    pub ours: &'a Entry,
}

impl Difference<'_> {
    /// A read of the register at `offset`: what they said, what we said.
    pub fn read(&self, offset: u64) -> Option<(u32, u32)> {
        match (self.theirs, self.ours) {
            (Entry::Read { at: RegisterAddress::Bar(_, at), value, .. }, Entry::Read { value: ours, .. })
                if *at == offset =>
            {
                Some((*value, *ours))
            }
            _ => None,
        }
    }

    /// Words of memory that differ: where, theirs, ours.
    pub fn words(&self) -> Vec<(u64, u32, u32)> {
        let (Entry::Memory { at, bytes }, Entry::Memory { bytes: ours, .. }) = (self.theirs, self.ours)
        else {
            return Vec::new();
        };
        let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let pairs = bytes.as_chunks::<4>().0.iter().zip(ours.as_chunks::<4>().0);
        let places = (*at..).step_by(4).zip(pairs);
        places.filter(|(_, (a, b))| a != b).map(|(at, (a, b))| (at, word(a), word(b))).collect()
    }

    /// What was last written to the register at `offset`, if anything was.
    pub fn written(&self, offset: u64) -> Option<u32> {
        self.before.iter().rev().find_map(|entry| match entry {
            Entry::Write { at: RegisterAddress::Bar(_, at), value, .. } if *at == offset => Some(*value),
            _ => None,
        })
    }
}

/// How the other chip is known to differ from ours.
pub struct Known {
    pub what: &'static str,
    /// Who says which is right: a data sheet, QEMU's source, our own head.
    pub source: &'static str,
    pub explains: fn(&Difference<'_>) -> bool,
}

/// The known differences of a chip, and which of them were met.
pub struct Book {
    known: &'static [Known],
    met: Vec<u64>,
}

impl Book {
    /// None met.
    pub fn new(known: &'static [Known]) -> Self {
        Book { known, met: vec![0; known.len()] }
    }

    /// Holds two lists against each other. Says which entries no known difference explains, with what came before the first.
    pub fn compare(
        &mut self,
        script: &str,
        whose: Whose,
        theirs: &[Entry],
        ours: &[Entry],
    ) -> Result<(), String> {
        let mut wrong = String::new();
        let mut count = 0;
        for (at, (their, our)) in theirs.iter().zip(ours).enumerate() {
            if their == our {
                continue;
            }
            let difference = Difference { script, whose, before: &theirs[..at], theirs: their, ours: our };
            if let Some(found) = self.known.iter().position(|known| (known.explains)(&difference)) {
                self.met[found] += 1;
                continue;
            }
            if count == 0 {
                wrong += &format!("{script}, {whose:?}:\n");
                let before = &theirs[at.saturating_sub(CONTEXT)..at];
                wrong.extend(before.iter().map(|entry| format!("        {}\n", short(entry))));
            }
            count += 1;
            if count <= SHOWN {
                let words: String = difference
                    .words()
                    .iter()
                    .take(4)
                    .map(|(at, a, b)| format!(" {at:#x}: {a:#x}, {b:#x};"))
                    .collect();
                wrong += &format!("    entry {at}: QEMU {}, ours {}{words}\n", short(their), short(our));
            }
        }
        if theirs.len() != ours.len() {
            wrong +=
                &format!("{script}, {whose:?}: {} entries of QEMU, {} of ours\n", theirs.len(), ours.len());
        }
        if wrong.is_empty() { Ok(()) } else { Err(format!("{wrong}    {count} in all")) }
    }

    /// Every known difference has been met; if not, it is none.
    pub fn check(&self) -> Result<(), String> {
        let unmet = self.known.iter().zip(&self.met).filter(|(_, met)| **met == 0);
        let unmet: Vec<_> = unmet.map(|(known, _)| known.what).collect();
        if unmet.is_empty() { Ok(()) } else { Err(format!("known differences that are none: {unmet:?}")) }
    }
}

/// Entries shown before the first that differs, and of those that differ.
const CONTEXT: usize = 16;
const SHOWN: usize = 24;

/// An entry in one line.
fn short(entry: &Entry) -> String {
    match entry {
        Entry::Read { at, width, value } => format!("read {at:x?}/{width} = {value:#x}"),
        Entry::Write { at, width, value } => format!("write {at:x?}/{width} = {value:#x}"),
        Entry::Memory { at, bytes } => format!("{} bytes at {at:#x}", bytes.len()),
        other => format!("{other:02x?}"),
    }
}
