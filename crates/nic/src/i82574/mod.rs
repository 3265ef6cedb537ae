//! An 82574L as the hardware of tests: one ring each way, INTA#. It enforces what the silicon asks of drivers, and records who does not.
//!
//! ```text
//!   registers     here                       rings.rs   descriptors of all formats that are supported, checksums by context
//! ```
//!
//! What differs from the silicon: descriptors are taken within the access that writes the tail; a frame without room waits at the port until a
//! register is written; the NVM and the transceiver answer at once. Packet split, large sends, the second queues, wake-up and
//! management do nothing.

mod rings;
pub mod spec;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{
    Access, Activation, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState,
};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_network::{Mac, Port, PortTx};
use ioplane_pci::{
    Bar, BarMap, ConfigChange, ConfigSpace, Function, Identity, Irq, Irqs, Line, Space, Wire, WireError,
};

use crate::wake::WakeSources;
use crate::{ChipCounts, NicError};
use spec::*;

/// What [`DeviceInfo::kind`] says.
pub const KIND: &str = "i82574";
const IRQS: Irqs = Irqs { intx: 1, msi: 0, msix: 0, error: 0 };
/// Words of registers that there are.
const WORDS: usize = 0xb700 / 4;

/// An 82574L on a port.
pub struct I82574 {
    info: DeviceInfo,
    mac: Mac,
    bars: BarMap,
    config: ConfigSpace,
    line: Line,
    registers: Vec<u32>,
    phy: [u16; 32],
    /// What the last context descriptor said: words of it.
    context: Option<[u32; 4]>,
    /// A frame that is being put together, and whether its checksum is wanted.
    outgoing: Vec<u8>,
    memory: GuestView,
    port: Arc<Port>,
    port_tx: PortTx,
    wake_sources: WakeSources,
    waiting: bool,
    counts: ChipCounts,
    violations: Vec<String>,
}

impl I82574 {
    /// One at power-on, on `port`, whose link it takes up. Its NVM has the address.
    ///
    /// # Errors
    ///
    /// [`NicError::Os`]: the system gave no descriptor.
    pub fn new(name: &str, mac: Mac, port: impl Into<Arc<Port>>) -> Result<Self, NicError> {
        let port = port.into();
        let bars = BarMap::new().with(0, Bar::new(BAR_SIZE, Space::Memory32));
        let identity = Identity {
            vendor: VENDOR,
            device: DEVICE,
            revision: 0,
            class: 0x02_0000,
            subsystem: (VENDOR, 0xa01f),
        };
        port.set_up(true);
        let wake_sources = WakeSources::new(name, &port)?;
        wake_sources.wake();
        let mut card = I82574 {
            config: ConfigSpace::new(&identity, &bars, IRQS),
            bars,
            wake_sources,
            port_tx: port.tx(0),
            port,
            info: DeviceInfo { name: name.to_owned(), kind: KIND, queues: 0 },
            mac,
            line: Line::new(),
            registers: vec![0; WORDS],
            phy: [0; 32],
            context: None,
            outgoing: Vec::new(),
            memory: GuestView::new(Arc::new(GuestMap::default())),
            waiting: false,
            counts: ChipCounts::default(),
            violations: Vec::new(),
        };
        // Link up, negotiated; the 82574's identifier.
        (card.phy[1], card.phy[2], card.phy[3]) = (0x796d, 0x0141, 0x0cb1);
        card.reset_registers();
        Ok(card)
    }

    /// What it has counted.
    pub fn counts(&self) -> ChipCounts {
        ChipCounts { interrupts: self.line.signals(), ..self.counts }
    }

    /// What drivers did that the silicon forbids, first to last.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// A register as it stands, without what reading does.
    pub fn peek(&self, offset: u64) -> u32 {
        usize::try_from(offset / 4).ok().and_then(|at| self.registers.get(at)).copied().unwrap_or(0)
    }

    fn set(&mut self, offset: u64, value: u32) {
        if let Some(word) = usize::try_from(offset / 4).ok().and_then(|at| self.registers.get_mut(at)) {
            *word = value;
        }
    }

    fn count(&mut self, offset: u64, by: u32) {
        self.set(offset, self.peek(offset).saturating_add(by));
    }

    fn reset_registers(&mut self) {
        self.registers.fill(0);
        let [a, b, c, d, e, f] = self.mac;
        self.set(RAL0, u32::from_le_bytes([a, b, c, d]));
        self.set(RAH0, u32::from_le_bytes([e, f, 0, 0]) | RAH_AV);
        self.set(STATUS, STATUS_UP);
        self.set(EECD, EECD_AUTO_RD);
        self.context = None;
        self.outgoing.clear();
    }

    fn raise(&mut self, causes: u32) {
        self.set(ICR, self.peek(ICR) | causes);
    }

    fn asserted(&self) -> bool {
        self.peek(ICR) & self.peek(IMS) != 0
    }

    /// The end of whatever was done: frames go, then the interrupt.
    fn settle(&mut self) {
        self.port_tx.flush();
        let up = self.asserted();
        self.config.set_interrupt(up);
        self.line.set(up);
    }

    fn read_register(&mut self, offset: u64) -> u32 {
        let value = self.peek(offset);
        match offset {
            ICR => {
                // Section 10.2.4.1.
                let asserted = self.asserted();
                if asserted || self.peek(IMS) == 0 {
                    self.set(ICR, 0);
                }
                return if asserted { value | INT_ASSERTED } else { value };
            }
            IMC => return self.peek(IMS),
            // The high half clears both.
            GORCL => {}
            GORCH => {
                self.set(GORCL, 0);
                self.set(GORCH, 0);
            }
            STATISTICS..STATISTICS_END => self.set(offset, 0),
            _ => {}
        }
        value
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            CTRL if value & CTRL_RST != 0 => {
                self.counts.resets += 1;
                self.reset_registers();
            }
            STATUS | EECD | STATISTICS..STATISTICS_END => {}
            EERD if value & EERD_START != 0 => {
                let word = match value >> 2 & 0x3fff {
                    at @ 0..3 => {
                        u16::from_le_bytes([self.mac[at as usize * 2], self.mac[at as usize * 2 + 1]])
                    }
                    at => at as u16,
                };
                self.set(EERD, value & 0xfffc | EERD_DONE | u32::from(word) << 16);
            }
            MDIC => self.manage(value),
            ICR => self.set(ICR, self.peek(ICR) & !value),
            ICS => self.raise(value),
            IMS => self.set(IMS, self.peek(IMS) | value),
            IMC => self.set(IMS, self.peek(IMS) & !value),
            RDH | TDH => {
                if value != 0 {
                    self.violations.push(format!("{offset:#x}: the head is written as {value}"));
                }
                self.set(offset, value & 0xffff);
            }
            RDT | TDT => {
                let length = self.peek(if offset == RDT { RDLEN } else { TDLEN });
                if value != 0 && value >= length / 16 {
                    self.violations.push(format!("{offset:#x}: tail {value} of a ring of {length} bytes"));
                }
                self.set(offset, value & 0xffff);
                self.transmit();
            }
            TCTL => {
                self.set(TCTL, value);
                self.transmit();
            }
            _ => self.set(offset, value),
        }
    }

    /// Section 10.2.2.7: an access to the transceiver, over at once.
    fn manage(&mut self, value: u32) {
        let register = (value >> 16 & 0x1f) as usize;
        let mut done = value & !0xffff | value & 0xffff | MDIC_READY;
        if value & MDIC_READ != 0 {
            done = done & !0xffff | u32::from(self.phy[register]);
        } else if value & MDIC_WRITE != 0 {
            self.phy[register] = value as u16;
        }
        self.set(MDIC, done);
    }

    fn access_bar(&mut self, offset: u64, op: Access<'_>) {
        let len = match &op {
            Access::Read(out) => out.len(),
            Access::Write(bytes) => bytes.len(),
        };
        if len != 4 || !offset.is_multiple_of(4) {
            self.violations.push(format!("{offset:#x}: an access of {len} bytes"));
            if let Access::Read(out) = op {
                out.fill(0xff);
            }
            return;
        }
        match op {
            Access::Read(out) => {
                self.counts.reads += 1;
                let value = self.read_register(offset);
                out.copy_from_slice(&value.to_le_bytes());
            }
            Access::Write(bytes) => {
                self.counts.writes += 1;
                if let Ok(word) = bytes.try_into() {
                    self.write_register(offset, u32::from_le_bytes(word));
                }
                if self.waiting {
                    self.take_frames();
                }
            }
        }
        self.settle();
    }
}

impl Device for I82574 {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        match (at, op) {
            (RegisterAddress::Config(offset), Access::Read(out)) => self.config.read(offset, out),
            (RegisterAddress::Config(offset), Access::Write(bytes)) => {
                if self.config.write(offset, bytes) == ConfigChange::Command {
                    self.line.disable(self.config.intx_disabled());
                }
            }
            (RegisterAddress::Bar(0, offset), op) if offset < BAR_SIZE => self.access_bar(offset, op),
            (RegisterAddress::Bar(..), Access::Read(out)) => out.fill(0xff),
            (RegisterAddress::Bar(..), Access::Write(_)) => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    fn activate(&mut self, _seating: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.wake_sources.wake();
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        debug_assert!(false, "{parked:?} of a device without pollers");
    }

    /// Hardware of tests is never saved.
    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Err(DeviceError::Below("an 82574L of tests has no state to save".into()))
    }

    fn load(&mut self, _proof: &QuiescenceProof, _state: &SavedState) -> Result<(), DeviceError> {
        Err(DeviceError::Below("an 82574L of tests has no state to load".into()))
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.config.reset();
        self.line.disable(false);
        self.reset_registers();
        self.settle();
    }

    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        match change {
            Change::Log(log) => self.memory.set_log(log.clone()),
            Change::Memory(map) => self.memory.set_map(map.clone()),
            _ => {}
        }
    }
}

impl Function for I82574 {
    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        IRQS
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        crate::wire(&mut self.line, irq, vector, wire)
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.memory.set_map(map);
        Ok(())
    }

    fn replace_memory(&mut self, _proof: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.memory.set_map(map);
        Ok(())
    }

    fn attention(&self) -> Option<&Arc<OwnedFd>> {
        Some(self.wake_sources.fd())
    }

    fn attend(&mut self) {
        self.wake_sources.clear();
        self.take_frames();
        self.settle();
    }
}
