//! A toy PCI function: whatever a host has to serve, in the smallest form.
//!
//! ```text
//!   BAR 0, memory: page 0 registers (trapped) | page 1 mapped | page 2 shadow (its own file) | page 3 trapped, nothing there
//!   BAR 2, ports:  32 bytes that keep what is written
//!   busy --BUSY := 0, attend(), suspend(), reset--> still
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use ioplane_device::{
    Access, Activation, AfterStop, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet,
    Quiescence, QuiescenceProof, RegisterAddress, SavedState,
};
use ioplane_memory::{GuestMap, GuestView, Mapping};
use ioplane_pci::{
    Bar, BarMap, Capability, ConfigChange, ConfigSpace, Function, Identity, Irq, Irqs, Line, Pages, Space,
    Touch, Vectors, Wire, WireError,
};

use super::{Word, decode, encode, word};

/// Registers in `RegisterAddress::Bar(0, ..)`, 64 bits each. Other widths read as ones and write nothing.
pub mod registers {
    /// Keeps what is written.
    pub const SCRATCH: u64 = 0x00;
    /// Not zero: something is under way, until zero is written, the card is attended to, suspended or reset.
    pub const BUSY: u64 = 0x08;
    /// The level of INTA#.
    pub const LINE: u64 = 0x10;
    /// A write signals that vector of MSI-X.
    pub const MSIX: u64 = 0x18;
    /// A write signals that vector of MSI.
    pub const MSI: u64 = 0x20;
    /// A write signals the error interrupt.
    pub const ERROR: u64 = 0x28;
    /// Guest address for the next two.
    pub const ADDRESS: u64 = 0x30;
    /// Eight bytes of guest memory; all ones where there is none.
    pub const DATA: u64 = 0x38;
    /// How often BAR 0 was accessed, this time too.
    pub const ACCESSES: u64 = 0x40;
}
use registers::*;

/// Bytes of BAR 0.
pub const BAR0: u64 = 0x4000;
/// Bytes of BAR 2.
pub const BAR2: u64 = 0x20;
/// Vectors of MSI and of MSI-X.
pub const VECTORS: u16 = 4;
/// Where the mapped page lies in its file.
pub const MAPPED_AT: u64 = 0x3000;
/// Where the shadow page lies in its file.
pub const SHADOW_AT: u64 = 0x2000;

const KIND: &str = "toy-card";

/// What happened to a card, seen from outside.
#[derive(Debug, Default)]
pub struct Seen {
    pub resets: AtomicU64,
    /// Forced stops.
    pub suspends: AtomicU64,
    /// Calls of [`Function::attend`].
    pub attended: AtomicU64,
    /// Calls of [`Function::replace_memory`].
    pub replaced: AtomicU64,
    /// Ranges of guest memory now.
    pub ranges: AtomicU64,
    /// The host maps shadow pages.
    pub shadows: AtomicBool,
    /// A forced stop is to fail.
    pub stubborn: AtomicBool,
    /// [`Function::attend`] leaves the card busy.
    pub tireless: AtomicBool,
}

pub struct ToyCard {
    info: DeviceInfo,
    config: ConfigSpace,
    bars: BarMap,
    registers: [u64; 9],
    ports: [u8; BAR2 as usize],
    halted: bool,
    memory: GuestView,
    line: Line,
    msi: Vectors,
    msix: Vectors,
    error: Vectors,
    event: Arc<OwnedFd>,
    seen: Arc<Seen>,
}

fn irqs() -> Irqs {
    Irqs { intx: 1, msi: VECTORS, msix: VECTORS, error: 1 }
}

fn file(pages: u64) -> Arc<OwnedFd> {
    let mapping = Mapping::anonymous("toy-card", pages << 12).expect("a memfd");
    Arc::new(mapping.file().try_clone_to_owned().expect("dup"))
}

impl Default for ToyCard {
    fn default() -> Self {
        let page = |offset, touch, file, at| Pages { offset, len: 0x1000, touch, file, at };
        let bar0 = Bar::new(BAR0, Space::Memory32)
            .with_pages(page(0x1000, Touch::Mapped, file(4), MAPPED_AT))
            .and_then(|bar| bar.with_pages(page(0x2000, Touch::Shadow, file(3), SHADOW_AT)))
            .expect("pages of the BAR");
        let bars = BarMap::new().with(0, bar0).with(2, Bar::new(BAR2, Space::Port));
        let identity =
            Identity { vendor: 0x1b36, device: 0x7079, revision: 1, class: 0xff0000, subsystem: (0, 0) };
        let mut config = ConfigSpace::new(&identity, &bars, irqs());
        config.add(&Capability::Express).expect("room");
        ToyCard {
            info: DeviceInfo { name: "card0".into(), kind: KIND, queues: 0 },
            config,
            bars,
            registers: [0; 9],
            ports: [0; BAR2 as usize],
            halted: false,
            memory: GuestView::new(Arc::default()),
            line: Line::new(),
            msi: Vectors::new(VECTORS),
            msix: Vectors::new(VECTORS),
            error: Vectors::new(1),
            event: Arc::new(
                rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd"),
            ),
            seen: Arc::default(),
        }
    }
}

impl ToyCard {
    /// What is to happen to it.
    pub fn seen(&self) -> Arc<Seen> {
        self.seen.clone()
    }

    /// Written eight bytes, it wants attention: its hardware has finished, and raises the line.
    pub fn event(&self) -> Arc<OwnedFd> {
        self.event.clone()
    }

    /// The file behind the pages of that kind.
    pub fn file(&self, touch: Touch) -> Arc<OwnedFd> {
        let bar = self.bars.bar(0).expect("there is one");
        bar.pages().iter().find(|pages| pages.touch == touch).expect("there is one").file.clone()
    }

    fn read(&mut self, offset: u64) -> u64 {
        match offset {
            LINE => self.line.level().into(),
            DATA => self.memory.bytes(self.registers[6]).map_or(u64::MAX, u64::from_le_bytes),
            SCRATCH | BUSY | ADDRESS | ACCESSES => self.registers[(offset / 8) as usize],
            _ => u64::MAX,
        }
    }

    fn write(&mut self, offset: u64, value: u64) {
        let vector = u16::try_from(value).unwrap_or(u16::MAX);
        match offset {
            LINE => self.line.set(value != 0),
            MSI => drop(self.msi.signal(vector)),
            MSIX => drop(self.msix.signal(vector)),
            ERROR => drop(self.error.signal(0)),
            DATA => drop(self.memory.write(self.registers[6], &value.to_le_bytes())),
            SCRATCH | BUSY | ADDRESS => self.registers[(offset / 8) as usize] = value,
            _ => {}
        }
        self.config.set_interrupt(self.line.level());
    }

    fn remember(&mut self, map: Arc<GuestMap>) {
        self.seen.ranges.store(map.regions().len() as u64, SeqCst);
        self.memory.set_map(map);
    }
}

impl Device for ToyCard {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        match (at, op) {
            (RegisterAddress::Config(at), Access::Read(bytes)) => self.config.read(at, bytes),
            (RegisterAddress::Config(at), Access::Write(bytes)) => match self.config.write(at, bytes) {
                ConfigChange::Command => self.line.disable(self.config.intx_disabled()),
                ConfigChange::Reset => return Effect::Deactivate(QueueSet::new(), AfterStop::Reset),
                ConfigChange::Other => {}
            },
            (RegisterAddress::Bar(0, at), op) => {
                self.registers[8] += 1;
                match word(op) {
                    Word::Read(bytes) => bytes.copy_from_slice(&self.read(at).to_le_bytes()),
                    Word::Write(value) => self.write(at, value),
                    Word::Bad => {}
                }
            }
            (RegisterAddress::Bar(2, at), op) => {
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                match op {
                    Access::Read(bytes) => {
                        for (byte, kept) in bytes.iter_mut().zip(self.ports.iter().skip(at)) {
                            *byte = *kept;
                        }
                    }
                    Access::Write(bytes) => {
                        for (byte, kept) in bytes.iter().zip(self.ports.iter_mut().skip(at)) {
                            *kept = *byte;
                        }
                    }
                }
            }
            (_, Access::Read(bytes)) => bytes.fill(0xff),
            _ => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    fn activate(&mut self, _seating: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.halted = false;
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        unreachable!("{parked:?} of a device without pollers");
    }

    fn quiescence(&mut self) -> Quiescence {
        if self.registers[1] != 0 && !self.halted {
            Quiescence::Busy("it was told to be busy")
        } else {
            Quiescence::Quiescent
        }
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.seen.suspends.fetch_add(1, SeqCst);
        if self.seen.stubborn.load(SeqCst) {
            return Err(DeviceError::Below("it does not want to".into()));
        }
        self.halted = true;
        Ok(())
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Ok(SavedState { kind: KIND.into(), version: 1, body: encode(&self.registers) })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        let words = decode(state.expect(KIND, 1)?)?;
        let count = words.len();
        self.registers = words.try_into().map_err(|_| {
            ioplane_device::StateError::Damaged(format!(
                "{count} numbers instead of {}",
                self.registers.len()
            ))
        })?;
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.seen.resets.fetch_add(1, SeqCst);
        self.registers = [0; 9];
        self.ports = [0; BAR2 as usize];
        self.halted = false;
        self.config.reset();
        self.line.disable(false);
        self.line.set(false);
    }

    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        match change {
            Change::Log(log) => self.memory.set_log(log.clone()),
            Change::Memory(map) => self.remember(map.clone()),
            _ => {}
        }
    }
}

impl Function for ToyCard {
    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        irqs()
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        let vectors = match irq {
            Irq::Intx if vector == 0 => {
                match wire {
                    Wire::Call(call) => self.line.connect(call),
                    Wire::Mask => self.line.mask(),
                    Wire::Unmask => self.line.unmask(),
                    Wire::Trigger => self.line.trigger(),
                }
                return Ok(());
            }
            Irq::Intx => return Err(WireError::NoSuchVector { irq, vector }),
            Irq::Msi => &mut self.msi,
            Irq::Msix => &mut self.msix,
            Irq::Error => &mut self.error,
        };
        let there = match wire {
            Wire::Call(call) => vectors.connect(vector, call),
            Wire::Mask => vectors.mask(vector, true),
            Wire::Unmask => vectors.mask(vector, false),
            Wire::Trigger => vectors.signal(vector),
        };
        if there { Ok(()) } else { Err(WireError::NoSuchVector { irq, vector }) }
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.remember(map);
        Ok(())
    }

    fn replace_memory(&mut self, _proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.seen.replaced.fetch_add(1, SeqCst);
        self.remember(map);
        Ok(())
    }

    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        Some(&self.event)
    }

    fn attend(&mut self) {
        if rustix::io::read(&self.event, &mut [0u8; 8]).is_ok() {
            self.seen.attended.fetch_add(1, SeqCst);
            if !self.seen.tireless.load(SeqCst) {
                self.registers[1] = 0;
            }
            self.line.set(true);
            self.config.set_interrupt(true);
        }
    }

    fn use_shadows(&mut self, yes: bool) {
        self.seen.shadows.store(yes, SeqCst);
    }
}
