//! NE2000 on PCI (RTL8029), as ne2k-pci drives it: a DP8390 with 16 KiB of card memory behind a data port. Never a bus master.
//!
//! ```text
//!   registers.rs   pages 0 to 3: what a read gives, what a write does
//!   card.rs        PROM and card memory; remote DMA through the data port
//!   ring.rs        the receive ring in card memory
//!   wire.rs        card memory --> the port, the port --> filter --> the ring
//! ```
//!
//! What differs from the silicon: a frame for which the ring has no room waits at the port (the FIFO) until a register is written, so
//! that none is lost while the port has room; [`Ne2000::lose_when_full`] makes it lose frames and say so, as a chip does. An
//! acknowledgement that leaves frames unread raises the receive interrupt again. The send command of remote DMA is a read. Nothing
//! collides, no CRC is wrong.

mod card;
mod registers;
mod ring;
pub mod spec;
mod state;
mod wire;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{
    Access, Activation, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState,
};
use ioplane_memory::GuestMap;
use ioplane_network::{Mac, Port, PortTx};
use ioplane_pci::{
    Bar, BarMap, ConfigChange, ConfigSpace, Function, Identity, Irq, Irqs, Line, Space, Wire, WireError,
};

use crate::wake::WakeSources;
use crate::{ChipCounts, NicError};
use card::Card;
use registers::Registers;
use spec::*;

pub use registers::RegistersV1;
pub use state::StateV1;

/// What [`DeviceInfo::kind`] and saved states say.
pub const KIND: &str = "ne2000";
const IRQS: Irqs = Irqs { intx: 1, msi: 0, msix: 0, error: 0 };

/// What can be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ne2000Options {
    /// Its name.
    pub name: String,
    /// The address in its PROM.
    pub mac: Mac,
}

/// An NE2000 on a port.
pub struct Ne2000 {
    info: DeviceInfo,
    mac: Mac,
    bars: BarMap,
    config: ConfigSpace,
    line: Line,
    registers: Registers,
    card: Card,
    port: Arc<Port>,
    port_tx: PortTx,
    wake_sources: WakeSources,
    /// A frame waits at the port because there is no room for it.
    waiting: bool,
    lose: bool,
    incoming: Vec<u8>,
    counts: ChipCounts,
}

impl Ne2000 {
    /// One at power-on, on `port`, whose link it takes up. An instance that goes on with another's state may share its port, and finds
    /// the frames there that have not been received.
    pub fn new(options: Ne2000Options, port: impl Into<Arc<Port>>) -> Result<Self, NicError> {
        let Ne2000Options { name, mac } = options;
        let port = port.into();
        let bars = BarMap::new().with(BAR_PORT, Bar::new(PORTS, Space::Port));
        let identity = Identity {
            vendor: VENDOR,
            device: DEVICE,
            revision: 0,
            class: CLASS,
            subsystem: (VENDOR, DEVICE),
        };
        port.set_up(true);
        let wake_sources = WakeSources::new(&name, &port)?;
        // Frames may be there already.
        wake_sources.wake();
        Ok(Ne2000 {
            config: ConfigSpace::new(&identity, &bars, IRQS),
            bars,
            wake_sources,
            port_tx: port.tx(0),
            port,
            info: DeviceInfo { name, kind: KIND, queues: 0 },
            mac,
            line: Line::new(),
            registers: Registers::new(),
            card: Card::new(mac),
            waiting: false,
            lose: false,
            incoming: Vec::new(),
            counts: ChipCounts::default(),
        })
    }

    /// Whether frames for which the ring has no room are lost, with the overwrite interrupt and a count; at first they wait.
    pub fn lose_when_full(&mut self, yes: bool) {
        self.lose = yes;
    }

    /// What it has counted.
    pub fn counts(&self) -> ChipCounts {
        ChipCounts { interrupts: self.line.signals(), ..self.counts }
    }

    /// Its port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The end of whatever was done: frames go, then the interrupt.
    fn settle(&mut self) {
        self.port_tx.flush();
        let up = self.registers.interrupts();
        self.config.set_interrupt(up);
        self.line.set(up);
    }
}

impl Device for Ne2000 {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        match (at, op) {
            (RegisterAddress::Config(offset), Access::Read(out)) => {
                self.counts.config += 1;
                self.config.read(offset, out);
            }
            (RegisterAddress::Config(offset), Access::Write(bytes)) => {
                self.counts.config += 1;
                if self.config.write(offset, bytes) == ConfigChange::Command {
                    self.line.disable(self.config.intx_disabled());
                }
            }
            (RegisterAddress::Bar(BAR_PORT, offset), Access::Read(out)) => {
                self.counts.reads += 1;
                self.read(offset, out);
                self.settle();
            }
            (RegisterAddress::Bar(BAR_PORT, offset), Access::Write(bytes)) => {
                self.counts.writes += 1;
                self.write(offset, bytes);
                // The data port makes no room.
                if self.waiting && offset < DATA {
                    self.take_frames();
                }
                self.settle();
            }
            (RegisterAddress::Bar(..), Access::Read(out)) => out.fill(0xff),
            (RegisterAddress::Bar(..), Access::Write(_)) => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    fn activate(&mut self, _seating: &mut Activation<'_>) -> Result<(), DeviceError> {
        // Invariant 2: whatever has come meanwhile is looked at, by the first call of `attend`.
        self.wake_sources.wake();
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        // It never makes a poller: nobody can have one of its.
        debug_assert!(false, "{parked:?} of a device without pollers");
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        self.save_state()
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        self.load_state(state)
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.config.reset();
        self.line.disable(false);
        self.registers = Registers::new();
        self.card = Card::new(self.mac);
        self.settle();
    }
}

impl Function for Ne2000 {
    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        IRQS
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        crate::wire(&mut self.line, irq, vector, wire)
    }

    /// It never uses guest memory.
    fn grow_memory(&mut self, _map: Arc<GuestMap>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// It never uses guest memory.
    fn replace_memory(&mut self, _proof: &QuiescenceProof, _map: Arc<GuestMap>) -> Result<(), DeviceError> {
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
