//! Hardware that can be brought to where it was on another function: what a guest that drives it itself does to its registers goes
//! through a [`Movable`], which keeps what cannot be read back.
//!
//! A VMM is offered no page of registers. One that it has mapped stays the first function's for as long as that VMM runs: after an exchange its guest
//! would drive the function that it has left. A library in the VMM's process can be [lent](Migratable::lend) pages that need not be trapped; they are
//! taken back before any step of a move. Without that no descriptor of the hardware leaves us.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_model::DirectModel;
use ioplane_moving::{Guarded, Movable, MovingError, Surroundings};
use ioplane_pci::{
    Bar, BarMap, Identity, Irq, Irqs, LentPages, LentPagesError, PAGE, Touch, Wire, WireError,
};

use crate::set_up::SetUp;
use crate::wires::Wires;

/// See the module.
pub struct Migratable<H: Hardware> {
    pub(crate) movable: Movable<Guarded<H>>,
    model: &'static DirectModel,
    bars: BarMap,
    wires: Wires,
    /// The guest's memory, as the function reaches it.
    memory: Vec<MemoryRegion>,
    /// A guest has written to its registers since the last reset.
    pub(crate) driven: bool,
    /// How it has to be set up before a state that was loaded is brought back.
    pub(crate) expected: Option<SetUp>,
    /// By what a library in the VMM's process finds the registers, if pages of them may be lent.
    marker: Option<LentPages>,
    /// Pages that are lent: bit 0 is page 0.
    lent: u64,
}

/// Pages that are lent, and by what they are mapped.
#[derive(Debug)]
pub struct Lent {
    /// The function. Whoever has it can do everything to it that a guest of a function that is passed through can.
    pub file: Arc<OwnedFd>,
    /// Where the BAR begins there, in bytes.
    pub at: u64,
    /// The pages of the BAR: bit 0 is page 0.
    pub pages: u64,
    /// No more will ever be lent of this function.
    pub all: bool,
}

/// The BARs that a VMM sees: all pages of registers are trapped.
fn offered(bars: &BarMap, bar: u8, marker: Option<&LentPages>) -> Result<BarMap, LentPagesError> {
    let trapped = bars.trapped();
    let Some(marker) = marker else { return Ok(trapped) };
    let mut offered = BarMap::new();
    for (index, own) in trapped.iter() {
        let own = if index == bar { marker.offered_by(own)? } else { own.clone() };
        offered = offered.with(index, own);
    }
    Ok(offered)
}

/// Why a function cannot be one that moves.
#[derive(Debug, thiserror::Error)]
pub enum MigratableError {
    /// Its table.
    #[error(transparent)]
    Moving(#[from] MovingError),
    /// Its pages.
    #[error(transparent)]
    Pages(#[from] LentPagesError),
}

/// What a failed access of a guest is to whoever passes it on.
fn below(function: &str, error: MovingError) -> HardwareError {
    match error {
        MovingError::Hardware(error) => error,
        other => HardwareError::Os {
            function: function.to_owned(),
            doing: "access its registers".to_owned(),
            source: io::Error::other(other.to_string()),
        },
    }
}

fn not_offered(function: &str, error: &LentPagesError) -> HardwareError {
    HardwareError::Os {
        function: function.to_owned(),
        doing: "offer its registers".to_owned(),
        source: io::Error::other(error.to_string()),
    }
}

impl<H: Hardware> Migratable<H> {
    /// `hardware` was reset, or is before anybody uses it.
    pub fn new(hardware: H, model: &'static DirectModel) -> Result<Self, MovingError> {
        let bars = hardware.bars().trapped();
        let movable = Movable::new(Guarded::new(hardware, model)?, model)?;
        Ok(Migratable {
            movable,
            model,
            bars,
            wires: Wires::default(),
            memory: Vec::new(),
            driven: false,
            expected: None,
            marker: None,
            lent: 0,
        })
    }

    /// The same, which lends pages to whoever connects to `socket`.
    pub fn lending(hardware: H, model: &'static DirectModel, socket: &Path) -> Result<Self, MigratableError> {
        let registers = hardware.bars().bar(model.model.bar).map_or(0, |bar| bar.size);
        let marker = LentPages::new(registers, socket)?;
        let mut lending = Self::new(hardware, model)?;
        lending.mark(Some(marker))?;
        Ok(lending)
    }

    /// Another function, to take the place of this one: the same is offered.
    pub(crate) fn another(&self, hardware: H) -> Result<Self, MovingError> {
        let mut another = Self::new(hardware, self.model)?;
        let marked = another.mark(self.marker.clone());
        marked.map_err(|error| not_offered(another.hardware().name(), &error))?;
        Ok(another)
    }

    fn mark(&mut self, marker: Option<LentPages>) -> Result<(), LentPagesError> {
        self.bars = offered(self.hardware().bars(), self.model.model.bar, marker.as_ref())?;
        self.marker = marker;
        if self.marker.is_some() {
            self.movable.maps();
        }
        Ok(())
    }

    /// Which pages are lent, if any may be: bit 0 is page 0.
    pub fn lent(&self) -> Option<u64> {
        self.marker.as_ref().map(|_| self.lent)
    }

    /// Lends the pages that need not be trapped now, or says that there are none: it was not driven since its last reset, it is copied or stands still,
    /// or some are lent. The guest uses them past us until [`Migratable::pages_are_back`].
    pub fn lend(&mut self) -> Option<Lent> {
        if self.marker.is_none() || self.lent != 0 || !self.driven || self.movable.is_copying() {
            return None;
        }
        let bar = self.hardware().bars().bar(self.model.model.bar)?.clone();
        let (file, at, mapped) = hardware_pages(&bar)?;
        let pages = self.movable.mappable() & mapped;
        if pages == 0 {
            return None;
        }
        self.lent = pages;
        self.movable.hardware().set_mapped(true);
        Some(Lent { file, at, pages, all: pages == self.movable.mappable_at_best() & mapped })
    }

    /// Whether more pages could be lent than are.
    pub fn could_lend_more(&self) -> bool {
        self.lent != 0 && self.movable.mappable() & !self.lent != 0
    }

    /// Nothing that was lent is mapped any more.
    pub fn pages_are_back(&mut self) {
        if std::mem::take(&mut self.lent) != 0 {
            // Nobody saw what the guest did.
            self.driven = true;
            self.movable.hardware().set_mapped(false);
            self.movable.pages_are_back();
        }
    }

    /// Its model.
    pub fn model(&self) -> &'static DirectModel {
        self.model
    }

    /// The hardware, to look at.
    pub fn hardware(&self) -> &Guarded<H> {
        self.movable.look_at()
    }

    /// Messages that bringing it back has sent by its mailbox so far.
    pub(crate) fn messages(&self) -> u64 {
        self.movable.messages()
    }

    /// Gives the hardware back, as it is.
    pub fn into_hardware(self) -> H {
        self.movable.into_hardware().into_hardware()
    }

    /// The vectors of MSI-X that signal somebody, ascending.
    pub(crate) fn wired(&self) -> Vec<u16> {
        self.wires.msix()
    }

    /// The guest's memory, as the function reaches it.
    pub(crate) fn view(&self) -> Result<GuestView, MovingError> {
        let map = GuestMap::new(self.memory.clone()).map_err(MovingError::Dummies)?;
        Ok(GuestView::new(Arc::new(map)))
    }

    /// What is logged is what it can write now: a VMM moves memory about while its guest is copied.
    fn log_there(&mut self) -> Result<(), HardwareError> {
        if self.movable.is_copying() {
            let view = self.view().map_err(|error| below(self.hardware().name(), error))?;
            self.movable.copy_of(view);
        }
        Ok(())
    }

    /// Brings it to its state, and it goes on.
    pub(crate) fn replay(
        &mut self,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        self.movable.replay(view, around)?;
        (self.driven, self.expected) = (true, None);
        Ok(())
    }

    /// Nothing of a guest is kept any more, also where a reset has failed.
    pub(crate) fn begin_anew(&mut self) {
        self.movable.was_reset();
        (self.driven, self.expected) = (false, None);
    }

    /// Wires `to` as this one is wired, which is wired to nothing then. After an error it may be called the other way round.
    pub(crate) fn hand_wires(&mut self, to: &mut Self) -> Result<(), WireError> {
        to.wires.take_over(to.movable.hardware(), &mut self.wires, self.movable.hardware())
    }
}

impl<H: Hardware> Hardware for Migratable<H> {
    fn name(&self) -> &str {
        self.hardware().name()
    }

    fn identity(&self) -> Identity {
        self.hardware().identity()
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        self.hardware().irqs()
    }

    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        if bar != self.model.model.bar {
            return self.movable.hardware().read(bar, offset, out);
        }
        let word = self.whole(bar, offset, out.len()).and_then(|()| {
            let read = self.movable.read(offset);
            read.map_err(|error| below(self.hardware().name(), error))
        })?;
        out.copy_from_slice(&word.to_le_bytes());
        Ok(())
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        if bar != self.model.model.bar {
            return self.movable.hardware().write(bar, offset, bytes);
        }
        self.whole(bar, offset, bytes.len())?;
        self.driven = true;
        let mut word = [0; 4];
        word.copy_from_slice(bytes);
        let written = self.movable.write(offset, u32::from_le_bytes(word));
        written.map_err(|error| below(self.hardware().name(), error))
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        self.movable.hardware().read_config(offset, out)
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        self.movable.hardware().write_config(offset, bytes)
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        self.movable.hardware().map(iova, region)?;
        self.memory.push(region.clone());
        self.log_there()
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        self.movable.hardware().unmap(iova, len)?;
        self.memory.retain(|region| (region.gpa(), region.len()) != (iova, len));
        self.log_there()
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.movable.hardware().wire(irq, vector, wire.clone())?;
        self.wires.note(irq, vector, wire);
        Ok(())
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        self.movable.hardware().listen()
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        self.hardware().interrupt()
    }

    fn take_interrupt(&mut self) -> bool {
        self.movable.hardware().take_interrupt()
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        self.movable.hardware().unmask()
    }

    fn close(&mut self) {
        // Whoever keeps a mapping keeps the function from being opened for the next one.
        self.lent = 0;
        self.wires.clear();
        self.memory.clear();
        // It would keep the memory of the guest that has left.
        self.movable.end_copy();
        self.movable.hardware().close();
    }

    fn reopen(&mut self) -> Result<(), HardwareError> {
        self.movable.hardware().reopen()?;
        // What its last client has written into its file the next one's library does not see.
        let marker = self.marker.as_ref().map(LentPages::renewed).transpose();
        let marked = marker.and_then(|marker| self.mark(marker));
        marked.map_err(|error| not_offered(self.hardware().name(), &error))
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        let reset = self.movable.hardware().reset()?;
        if reset {
            self.begin_anew();
        }
        Ok(reset)
    }
}

/// What of a BAR the hardware lets one map of its first 64 pages: the file, where the BAR begins there, and the pages.
fn hardware_pages(bar: &Bar) -> Option<(Arc<OwnedFd>, u64, u64)> {
    let mapped = || bar.pages().iter().filter(|pages| pages.touch == Touch::Mapped);
    let first = mapped().next()?;
    let at = first.at.checked_sub(first.offset)?;
    let same = |pages: &&ioplane_pci::Pages| {
        Arc::ptr_eq(&pages.file, &first.file) && pages.at.checked_sub(pages.offset) == Some(at)
    };
    let mut all = 0;
    for pages in mapped().filter(same) {
        let (from, to) = (pages.offset / PAGE, (pages.offset + pages.len) / PAGE);
        all |= (from..to.min(64)).fold(0, |all, page| all | 1 << page);
    }
    Some((first.file.clone(), at, all))
}

impl<H: Hardware> Migratable<H> {
    /// Registers are accessed whole: no driver does otherwise, and no chip promises anything then.
    fn whole(&self, bar: u8, offset: u64, len: usize) -> Result<(), HardwareError> {
        if len == 4 && offset.is_multiple_of(4) && offset < u64::from(self.model.model.size) {
            return Ok(());
        }
        Err(HardwareError::NoSuchRegister { function: self.hardware().name().to_owned(), bar, offset, len })
    }
}
