//! Hardware whose driver cooperates: it can be moved, and nothing here knows what it is. The guest's driver shares a [page](page) with us,
//! brings its function back by itself, and says in the page what has to be done around that.
//!
//! ```text
//!   driver: read lock --> registers, rings --> unlock        | a version that it does not know: it brings its function back
//!   we:     write lock --> to rest, by the driver's list --> another function, reset --> registers of the list --> version + 1, unlock,
//!           each vector is signalled once
//! ```
//!
//! All pages of registers are trapped, as in [`crate::Migratable`] and for its reason, or all but the first one are the VMM's to map: its guest's driver
//! needs nobody to see its accesses. One that is mapped does not go to another function under the same VMM, which would go on driving this one.
//! A guest that neither locks nor unlocks as it should harms its own function: at rest its trapped accesses are denied here, and it reaches no memory.

mod capability;
pub mod page;
mod steps;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_pci::{BarMap, Identity, Irq, Irqs, PAGE, Wire, WireError, spec};

use capability::{BELIEVED, Capability, NONE, REFUSED, Wish};
use page::{PageFlaw, SharedEntry, SharedPage};

pub(crate) use steps::KIND;

use crate::set_up::SetUp;
use crate::wires::Wires;

/// The BAR that lists are about.
const BAR: u8 = 0;
/// The counters in the page are at most so old while the driver uses its function: accesses to the first page, which is always trapped, tell that.
const FRESH: Duration = Duration::from_secs(1);

/// A counter of the function, as the guest has it.
#[derive(Debug, Clone, Copy)]
struct Counter {
    /// Which entry of the page it is.
    entry: usize,
    offset: u64,
    /// What the function said last.
    last: u32,
    /// What the guest sees.
    value: u64,
}

/// What a driver has announced.
#[derive(Debug, Clone)]
struct Shared {
    gpa: u64,
    entries: Vec<SharedEntry>,
    counters: Vec<Counter>,
}

/// How far the function is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// We ask for the lock.
    Locking,
    /// We have it. What the driver has written last may still be on its way from the VMM, which does not wait for that.
    Draining,
    /// We have it; the entry that is waited for, and since when.
    Stopping(usize, Instant),
    /// It does nothing any more, and memory is copied: its driver may mark what it has not seen yet. For so many looks, and since when.
    Marking(u32, Instant),
    /// It does nothing, and its registers are in the page.
    Still,
}

/// What is known of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cooperation {
    /// Entries of its list.
    pub entries: usize,
    /// How often its function was reset under it.
    pub moves: u32,
    /// What that was when it brought its function back last.
    pub replayed: u32,
}

/// See the module.
pub struct Cooperating<H: Hardware> {
    hardware: H,
    bars: BarMap,
    /// VMMs may map registers.
    mapped: bool,
    capability: Capability,
    wires: Wires,
    /// The guest's memory, as the function reaches it.
    memory: Vec<MemoryRegion>,
    shared: Option<Shared>,
    /// Why the last page that was announced is not believed.
    flaw: Option<PageFlaw>,
    phase: Phase,
    /// The guest's memory is copied.
    copied: bool,
    /// How it has to be set up before a state that was loaded is brought back.
    expected: Option<SetUp>,
    counted: Instant,
    accesses: u64,
    /// The guest's memory is being copied.
    pub(crate) logs: bool,
    /// It was reset under its driver, which has not read a register since: whatever is written was posted before.
    stale: bool,
}

/// What a VMM may map.
fn offered(bars: &BarMap, mapped: bool) -> BarMap {
    if mapped { bars.trapped_in(BAR, 0, PAGE) } else { bars.trapped() }
}

impl<H: Hardware> Cooperating<H> {
    /// `hardware` was reset, or is before anybody uses it. `mapped`: a VMM may map its registers, all but the first page.
    pub fn new(mut hardware: H, mapped: bool) -> Result<Self, HardwareError> {
        let Some(capability) = Capability::new(&mut hardware)? else {
            return Err(HardwareError::NoRoom { function: hardware.name().to_owned() });
        };
        Ok(Cooperating {
            bars: offered(hardware.bars(), mapped),
            hardware,
            mapped,
            capability,
            wires: Wires::default(),
            memory: Vec::new(),
            shared: None,
            flaw: None,
            phase: Phase::Running,
            copied: false,
            expected: None,
            counted: Instant::now(),
            accesses: 0,
            logs: false,
            stale: false,
        })
    }

    /// Whether a VMM may have mapped registers.
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Register accesses so far: the guest's that are trapped, and ours.
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// Gives the hardware back, as it is.
    pub fn into_hardware(self) -> H {
        self.hardware
    }

    /// What its driver has announced, if there is one that cooperates.
    pub fn cooperation(&self) -> Option<Cooperation> {
        let shared = self.shared.as_ref()?;
        let page = self.page(shared).ok()?;
        let entries = shared.entries.len();
        Some(Cooperation { entries, moves: page.moves(), replayed: page.replayed() })
    }

    /// Why the last page that was announced is not believed.
    pub fn flaw(&self) -> Option<&PageFlaw> {
        self.flaw.as_ref()
    }

    /// Whether it stands still, and waits for its driver to mark what it has written.
    pub fn is_marking(&self) -> bool {
        matches!(self.phase, Phase::Marking(..))
    }

    /// The vectors of MSI-X that signal somebody, ascending.
    pub(crate) fn wired(&self) -> Vec<u16> {
        self.wires.msix()
    }

    /// How it has to be set up before it goes on.
    pub(crate) fn expected(&self) -> Option<&SetUp> {
        self.expected.as_ref()
    }

    /// Wires `to` as this one is wired, which is wired to nothing then. After an error it may be called the other way round.
    pub(crate) fn hand_wires(&mut self, to: &mut Self) -> Result<(), WireError> {
        to.wires.take_over(&mut to.hardware, &mut self.wires, &mut self.hardware)
    }

    fn view(&self) -> Result<GuestView, HardwareError> {
        let map = GuestMap::new(self.memory.clone()).map_err(|error| self.broken(&error.to_string()))?;
        Ok(GuestView::new(Arc::new(map)))
    }

    fn broken(&self, why: &str) -> HardwareError {
        HardwareError::Os {
            function: self.hardware.name().to_owned(),
            doing: "look at its driver's page".to_owned(),
            source: std::io::Error::other(why.to_owned()),
        }
    }

    fn page(&self, shared: &Shared) -> Result<SharedPage, PageFlaw> {
        // Memory that cannot be mapped is none.
        let view = self.view().map_err(|_| PageFlaw::NotAPage)?;
        SharedPage::at(&view, shared.gpa)
    }

    fn size(&self) -> u64 {
        self.bars.bar(BAR).map_or(0, |bar| bar.size)
    }

    /// The page at `gpa`, whose counters go on from what it says (`goes_on`) or begin.
    fn believe(&self, gpa: u64) -> Result<Shared, PageFlaw> {
        let view = self.view().map_err(|_| PageFlaw::NotAPage)?;
        let page = SharedPage::at(&view, gpa)?;
        let entries = page.entries(self.size())?;
        let counters = (0..).zip(&entries).filter_map(|(entry, asked)| match *asked {
            SharedEntry::Counter { offset } => {
                Some(Counter { entry, offset, last: 0, value: page.count(entry) })
            }
            _ => None,
        });
        let counters = counters.collect();
        Ok(Shared { gpa, entries, counters })
    }

    fn wish(&mut self, wish: Wish) {
        self.flaw = None;
        // Up to date: a list that is announced anew goes on.
        let _ = self.count();
        let before = self.shared.take().map(|shared| shared.counters).unwrap_or_default();
        match wish {
            Wish::Withdraw => self.capability.say(NONE),
            Wish::Announce(gpa) => match self.believe(gpa) {
                Ok(mut shared) => {
                    for counter in &mut shared.counters {
                        // A register is what the guest has seen of it so far.
                        let known = before.iter().find(|known| known.offset == counter.offset);
                        (counter.last, counter.value) = match known {
                            Some(known) => (known.last, known.value),
                            None => {
                                let now = self.get(counter.offset).unwrap_or(0);
                                (now, now.into())
                            }
                        };
                    }
                    self.shared = Some(shared);
                    self.capability.say(BELIEVED);
                    self.publish();
                }
                Err(flaw) => {
                    self.capability.say(REFUSED);
                    self.flaw = Some(flaw);
                }
            },
        }
    }

    fn get(&mut self, offset: u64) -> Result<u32, HardwareError> {
        self.accesses += 1;
        let mut bytes = [0; 4];
        self.hardware.read(BAR, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn put(&mut self, offset: u64, value: u32) -> Result<(), HardwareError> {
        self.accesses += 1;
        self.hardware.write(BAR, offset, &value.to_le_bytes())
    }

    /// Adds what the function has counted since it was asked last.
    fn count(&mut self) -> Result<(), HardwareError> {
        let Some(mut shared) = self.shared.take() else { return Ok(()) };
        let mut outcome = Ok(());
        for counter in &mut shared.counters {
            match self.get(counter.offset) {
                Ok(now) => {
                    counter.value = counter.value.wrapping_add(u64::from(now.wrapping_sub(counter.last)));
                    counter.last = now;
                }
                Err(error) => outcome = Err(error),
            }
        }
        self.shared = Some(shared);
        self.publish();
        outcome
    }

    /// After an access of the driver's: its counters are not much older than that.
    fn refresh(&mut self) {
        if self.shared.is_some() && self.counted.elapsed() >= FRESH {
            // The access itself has worked.
            let _ = self.count();
        }
    }

    /// From here on the function counts from what it says now: it is another one, or was reset.
    fn count_from_here(&mut self) -> Result<(), HardwareError> {
        let Some(mut shared) = self.shared.take() else { return Ok(()) };
        let mut outcome = Ok(());
        for counter in &mut shared.counters {
            match self.get(counter.offset) {
                Ok(now) => counter.last = now,
                Err(error) => outcome = Err(error),
            }
        }
        self.shared = Some(shared);
        outcome
    }

    /// Writes the counters into the page.
    fn publish(&mut self) {
        self.counted = Instant::now();
        let Some(shared) = &self.shared else { return };
        // A page that has gone is noticed when it is needed.
        let Ok(page) = self.page(shared) else { return };
        for counter in &shared.counters {
            page.put_count(counter.entry, counter.value);
        }
    }

    /// Signals each vector that signals somebody.
    fn signal(&mut self) {
        for vector in self.wires.msix() {
            // A driver looks by itself as well, a moment later.
            let _ = self.hardware.wire(Irq::Msix, vector, Wire::Trigger);
        }
    }

    /// Nobody has announced anything any more.
    fn begin_anew(&mut self) {
        // A driver that is still there sets its function up, and would wait for us.
        if self.phase != Phase::Running
            && let Some(page) = self.shared.as_ref().and_then(|shared| self.page(shared).ok())
        {
            page.unlock();
        }
        (self.shared, self.flaw, self.expected) = (None, None, None);
        (self.phase, self.copied, self.logs, self.stale) = (Phase::Running, false, false, false);
        self.capability.reset();
    }

    /// At rest, or on the way.
    fn is_denied(&self) -> bool {
        matches!(self.phase, Phase::Stopping(..) | Phase::Marking(..) | Phase::Still)
    }

    /// Whoever reads registers at rest has not locked.
    fn denied(&self, bar: u8, offset: u64, len: usize) -> Result<(), HardwareError> {
        if !self.is_denied() {
            return Ok(());
        }
        let function = self.hardware.name().to_owned();
        Err(HardwareError::NoSuchRegister { function, bar, offset, len })
    }
}

impl<H: Hardware> Hardware for Cooperating<H> {
    fn name(&self) -> &str {
        self.hardware.name()
    }

    fn identity(&self) -> Identity {
        self.hardware.identity()
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        self.hardware.irqs()
    }

    /// A counter reads as it goes on.
    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.denied(bar, offset, out.len())?;
        // It waits for the answer, and has come behind all that was posted.
        self.stale = false;
        let found = self
            .shared
            .as_ref()
            .filter(|_| bar == BAR && out.len() == 4)
            .and_then(|shared| shared.counters.iter().position(|counter| counter.offset == offset));
        if let Some(at) = found {
            self.count()?;
            let value = self.shared.as_ref().map_or(0, |shared| shared.counters[at].value);
            out.copy_from_slice(&(value as u32).to_le_bytes());
            return Ok(());
        }
        self.accesses += 1;
        self.hardware.read(bar, offset, out)?;
        self.refresh();
        Ok(())
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        // A VMM posts writes: this one may have been made before the lock was given back. The driver's state has what it was for, and its
        // function gets that by the replay, which begins with a read.
        if self.stale || self.is_denied() {
            return Ok(());
        }
        self.accesses += 1;
        self.hardware.write(bar, offset, bytes)?;
        self.refresh();
        Ok(())
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.hardware.read_config(offset, out)?;
        self.capability.read(offset, out);
        Ok(())
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        // What is written across its edge is the capability's alone: no driver does that.
        if (offset..).zip(bytes).any(|(at, _)| self.capability.has(at)) {
            if let Some(wish) = self.capability.write(offset, bytes) {
                // Only a driver that does not wait for its lock comes here at rest.
                if self.is_denied() {
                    self.capability.say(REFUSED);
                } else {
                    self.wish(wish);
                }
            }
            return Ok(());
        }
        let mut bytes = bytes.to_vec();
        // At rest it stays without bus mastering.
        if self.is_denied()
            && let Some(low) =
                (spec::COMMAND as u64).checked_sub(offset).and_then(|at| bytes.get_mut(at as usize))
        {
            *low &= !(spec::COMMAND_MASTER as u8);
        }
        self.hardware.write_config(offset, &bytes)
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        self.hardware.map(iova, region)?;
        self.memory.push(region.clone());
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        self.hardware.unmap(iova, len)?;
        self.memory.retain(|region| (region.gpa(), region.len()) != (iova, len));
        Ok(())
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.hardware.wire(irq, vector, wire.clone())?;
        self.wires.note(irq, vector, wire);
        Ok(())
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        self.hardware.listen()
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        self.hardware.interrupt()
    }

    fn take_interrupt(&mut self) -> bool {
        self.hardware.take_interrupt()
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        self.hardware.unmask()
    }

    fn close(&mut self) {
        self.wires.clear();
        self.memory.clear();
        self.begin_anew();
        self.hardware.close();
        // Pages keep the hardware's descriptor.
        self.bars = self.bars.trapped();
    }

    fn reopen(&mut self) -> Result<(), HardwareError> {
        self.hardware.reopen()?;
        self.bars = offered(self.hardware.bars(), self.mapped);
        Ok(())
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        let reset = self.hardware.reset()?;
        if reset {
            self.begin_anew();
        }
        Ok(reset)
    }
}
