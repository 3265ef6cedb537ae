//! RTL8139C+, revision 0x20: as 8139cp drives it (C+ mode, rings of descriptors), and C mode as 8139too does.
//!
//! ```text
//!   registers.rs   the bytes that reads give; splits writes of any width into registers
//!   command.rs     what a write to each register does
//!   transmit.rs    descriptors of C+ and C mode --> frames --> the port      sums.rs  checksums, large packets
//!   receive.rs     the port --> filter --> descriptors, or the buffer of C mode
//!   eeprom.rs      93C46        clock.rs  TCTR and TimerInt      tally.rs  counters dumped into guest memory
//!   shadow.rs      a page that the guest reads without an exit: shown before each interrupt and before each access is answered
//! ```
//!
//! What differs from the silicon: a frame for which there is no room waits at the port (the FIFO), with "no descriptor" raised, until a
//! register is written; so none is lost while the port has room. Flow control, wake-up, power management, early receive and
//! transmit thresholds do nothing. In the shadow page the timer's count stands still between trapped accesses.

mod clock;
mod command;
mod eeprom;
mod receive;
mod registers;
mod shadow;
pub mod spec;
mod state;
mod sums;
mod tally;
mod transmit;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::{
    Access, Activation, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState,
};
use ioplane_memory::{GuestFault, GuestMap, GuestView};
use ioplane_network::{Mac, Port, PortTx};
use ioplane_pci::{
    Bar, BarMap, ConfigChange, ConfigSpace, Function, Identity, Irq, Irqs, Line, PAGE, Space, Wire, WireError,
};

use crate::wake::WakeSources;
use crate::{ChipCounts, NicError};
use clock::Clock;
use registers::Registers;
use shadow::Shadow;
use spec::*;

pub use eeprom::{EepromV1, PhaseV1};
pub use state::StateV1;
pub use tally::TallyV1;

/// What [`DeviceInfo::kind`] and saved states say.
pub const KIND: &str = "rtl8139";
const IRQS: Irqs = Irqs { intx: 1, msi: 0, msix: 0, error: 0 };
/// Room for the longest frame that descriptors can describe, behind room for a tag.
const ROOM: usize = ioplane_network::LONGEST;

/// What can be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rtl8139Options {
    /// Its name.
    pub name: String,
    /// The address in its EEPROM.
    pub mac: Mac,
}

/// What the chip itself knows: all of it is saved.
#[derive(Debug, Clone)]
struct Chip {
    registers: Registers,
    /// The C+ command register has been written since the last reset: the registers at 0x10 are those of C+ mode.
    plus: bool,
    /// Next descriptor of the two transmit rings, normal and high priority, and of the receive ring.
    transmit: [u32; 2],
    receive: u32,
    /// Next descriptor of C mode.
    current: u64,
    eeprom: EepromV1,
    tally: TallyV1,
}

impl Chip {
    fn new(mac: Mac) -> Self {
        Chip {
            registers: Registers::new(mac),
            plus: false,
            transmit: [0; 2],
            receive: 0,
            current: 0,
            eeprom: EepromV1::default(),
            tally: TallyV1::default(),
        }
    }
}

/// An RTL8139C+ on a port.
pub struct Rtl8139 {
    info: DeviceInfo,
    mac: Mac,
    bars: BarMap,
    config: ConfigSpace,
    line: Line,
    chip: Chip,
    clock: Clock,
    memory: GuestView,
    port: Arc<Port>,
    port_tx: PortTx,
    wake_sources: WakeSources,
    shadow: Shadow,
    /// A frame waits at the port because there is no room for it.
    waiting: bool,
    /// Where frames to send are put together, and those received; taken out while they are in use.
    outgoing: Box<[u8]>,
    incoming: Vec<u8>,
    counts: ChipCounts,
}

impl Rtl8139 {
    /// One at power-on, in front of `memory`, on `port`, whose link it takes up. An instance that goes on with another's state may share
    /// its port, and finds the frames there that have not been received.
    pub fn new(
        options: Rtl8139Options,
        memory: Arc<GuestMap>,
        port: impl Into<Arc<Port>>,
    ) -> Result<Self, NicError> {
        let Rtl8139Options { name, mac } = options;
        let port = port.into();
        let shadow = Shadow::new().map_err(|source| NicError::Memory { name: name.clone(), source })?;
        let page = Bar::new(PAGE, Space::Memory32);
        // A whole page of a BAR of one page.
        let registers = page.clone().with_pages(shadow.pages()).unwrap_or(page);
        let bars = BarMap::new().with(BAR_PORT, Bar::new(REGISTERS, Space::Port)).with(BAR_MEMORY, registers);
        let identity = Identity {
            vendor: VENDOR,
            device: DEVICE,
            revision: REVISION,
            class: CLASS,
            subsystem: (VENDOR, DEVICE),
        };
        port.set_up(true);
        let wake_sources = WakeSources::new(&name, &port)?;
        // Frames may be there already.
        wake_sources.wake();
        Ok(Rtl8139 {
            config: ConfigSpace::new(&identity, &bars, IRQS),
            bars,
            wake_sources,
            port_tx: port.tx(0),
            port,
            info: DeviceInfo { name, kind: KIND, queues: 0 },
            mac,
            line: Line::new(),
            chip: Chip::new(mac),
            clock: Clock::new(),
            memory: GuestView::new(memory),
            shadow,
            waiting: false,
            outgoing: vec![0; ROOM].into(),
            incoming: Vec::new(),
            counts: ChipCounts::default(),
        })
    }

    /// What it has counted.
    pub fn counts(&self) -> ChipCounts {
        ChipCounts { interrupts: self.line.signals(), ..self.counts }
    }

    /// Its port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Whether it may use the guest's memory at all.
    fn master(&self) -> bool {
        self.config.bus_master()
    }

    fn enabled(&self, what: u8) -> bool {
        self.chip.registers.u8(CR) & what != 0
    }

    /// DMA went wrong: the guest is told as by a chip whose bus cycle was aborted.
    fn fault(&mut self, _fault: GuestFault) {
        self.counts.faults += 1;
        self.chip.registers.raise(INT_SERR);
    }

    /// The timer's interrupt, if it is due.
    fn tick(&mut self) {
        if !self.clock.armed() {
            return;
        }
        let now = Instant::now();
        if self.clock.due(now) {
            self.chip.registers.raise(INT_TIMEOUT);
            self.wake_sources.wake_after(self.clock.arm(now, self.chip.registers.u32(TIMER_INT)));
        }
    }

    /// The count as it is now, for whoever looks at the registers.
    fn look_at_clock(&mut self) {
        self.chip.registers.put(TCTR, 4, self.clock.count(Instant::now()));
    }

    /// The end of whatever was done: frames go, the page is right, then the interrupt.
    fn settle(&mut self) {
        self.port_tx.flush();
        if self.shadow.used() {
            self.look_at_clock();
            self.shadow.show(self.chip.registers.bytes());
        }
        let up = self.chip.registers.u16(ISR) & self.chip.registers.u16(IMR) != 0;
        self.config.set_interrupt(up);
        self.line.set(up);
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) {
        self.counts.reads += 1;
        if offset < TCTR + 4 && offset.saturating_add(out.len() as u64) > TCTR {
            self.look_at_clock();
        }
        let registers = self.chip.registers.bytes();
        for (at, byte) in (offset..).zip(out) {
            *byte = usize::try_from(at).ok().and_then(|at| registers.get(at)).copied().unwrap_or(0);
        }
    }

    fn configure(&mut self, offset: u64, bytes: &[u8]) {
        if self.config.write(offset, bytes) == ConfigChange::Command {
            self.line.disable(self.config.intx_disabled());
        }
    }
}

impl Device for Rtl8139 {
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
                self.configure(offset, bytes);
            }
            (RegisterAddress::Bar(BAR_PORT, offset), Access::Read(out)) if offset >= REGISTERS => {
                out.fill(0xff)
            }
            (RegisterAddress::Bar(BAR_MEMORY, offset), Access::Read(out)) if offset >= PAGE => out.fill(0xff),
            (RegisterAddress::Bar(BAR_PORT | BAR_MEMORY, offset), Access::Read(out)) => {
                self.tick();
                self.read(offset, out);
                self.settle();
            }
            (RegisterAddress::Bar(BAR_PORT | BAR_MEMORY, offset), Access::Write(bytes)) => {
                self.tick();
                self.counts.writes += 1;
                self.write(offset, bytes);
                if self.waiting {
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
        self.chip = Chip::new(self.mac);
        self.wake_sources.wake_after(self.clock.set(Instant::now(), 0, 0));
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

impl Function for Rtl8139 {
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
        self.tick();
        self.take_frames();
        self.settle();
    }

    fn use_shadows(&mut self, yes: bool) {
        self.shadow.use_it(yes);
        self.settle();
    }
}
