//! Hardware handed to a guest as it is: registers and memory straight through, without a monitor.
//!
//! ```text
//!   guest: BARs ---------> as they are; mapped pages without us
//!          configuration -> header and MSI control: ours; status and the other capabilities: the hardware's
//!          memory --------> mapped for the function at the guest's own addresses
//!          interrupts <---- wired to the host's eventfds, past us
//! ```
//!
//! A client is given a descriptor of the hardware, to map its pages. Who has that can do everything to the hardware, for as long as it keeps it: so
//! the hardware is closed when its client has left, and opened and reset for the next, which fails while anybody keeps the old descriptor or a
//! mapping of it. Memory of the card's own, which no reset empties, is wiped by a state model if there is one: for each client, and when the
//! card is given back.

mod carry;
mod cooperate;
mod exchange;

use std::sync::Arc;

use ioplane_device::{
    Access, Activation, AfterStop, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet, Quiescence,
    QuiescenceProof, RegisterAddress, SavedState,
};
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, MemoryRegion};
use ioplane_model::StateModel;
use ioplane_pci::{BarMap, ConfigSpace, Function, Irq, Irqs, NotReady, Wire, WireError, spec};

pub use carry::{Carried, Carry, CarryError, Motion, Replayed};
pub use cooperate::Prepared;
pub use exchange::{ExchangeError, Exchanged};

use crate::monitor::{Monitor, MonitorError};
use crate::reset::ByRegisters;

/// What a guest, or the hardware, got wrong. Counted; nothing else happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct DirectFaults {
    /// Register accesses that the hardware does not have or did not answer: they read as all ones.
    pub accesses: u64,
    /// Resets and wipes that were wanted and did not happen, for want of a way or because they failed.
    pub resets: u64,
}

/// Whose a byte of the configuration space is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Hardware,
    /// The hardware's, which the guest may only read.
    Fixed,
    /// Of our header.
    Header,
    /// Ours, with these bits for the guest to write.
    Ours(u8),
}

/// The hardware, which is lent to whoever wipes it.
struct Held<H>(Option<H>);

const LENT: &str = "it comes back before anything else is done";

impl<H> Held<H> {
    fn take(&mut self) -> H {
        self.0.take().expect(LENT)
    }
}

impl<H> std::ops::Deref for Held<H> {
    type Target = H;

    fn deref(&self) -> &H {
        self.0.as_ref().expect(LENT)
    }
}

impl<H> std::ops::DerefMut for Held<H> {
    fn deref_mut(&mut self) -> &mut H {
        self.0.as_mut().expect(LENT)
    }
}

/// A physical function as one of PCI.
///
/// Its quiescence cannot be recognised: while the guest lets it use memory it is busy, and only a suspension stops it, by taking
/// bus mastering away. What it was doing then is lost, as when a cable is pulled.
pub struct Passthrough<H: Hardware> {
    info: DeviceInfo,
    hardware: Held<H>,
    bars: BarMap,
    irqs: Irqs,
    header: ConfigSpace,
    owners: Box<[Owner; spec::CONFIG_SIZE]>,
    ours: Box<[u8; spec::CONFIG_SIZE]>,
    fresh: Box<[u8; spec::CONFIG_SIZE]>,
    /// Where the byte with the bit for function-level reset is, if it has that.
    flr: Option<usize>,
    suspended: bool,
    mapped: Vec<MemoryRegion>,
    registers: Option<ByRegisters>,
    /// The model of a card with memory of its own.
    memory: Option<&'static StateModel>,
    /// Why the last reset did not happen.
    not_reset: Option<HardwareError>,
    /// Why it could not be opened for the last client that came.
    not_open: Option<String>,
    closed: bool,
    /// A client has it now; one has had it since it was taken from the host.
    admitted: bool,
    served: bool,
    faults: DirectFaults,
}

impl<H: Hardware> Passthrough<H> {
    /// Passes `hardware` through under the name that its owner gave it. Of `model`, if there is one for it, nothing is used but how
    /// registers reset it where it has no reset of its own, and how memory of its own is wiped.
    pub fn new(
        name: &str,
        mut hardware: H,
        model: Option<&'static StateModel>,
    ) -> Result<Self, HardwareError> {
        let info = DeviceInfo { name: name.into(), kind: "passthrough", queues: 0 };
        let (bars, irqs) = (hardware.bars().clone(), hardware.irqs());
        let header = ConfigSpace::new(&hardware.identity(), &bars, irqs);
        let mut owners = Box::new([Owner::Hardware; spec::CONFIG_SIZE]);
        let mut ours = Box::new([0; spec::CONFIG_SIZE]);
        owners[..spec::HEADER_END].fill(Owner::Fixed);
        // Errors seen are cleared by writing them.
        owners[spec::STATUS..spec::STATUS + 2].fill(Owner::Hardware);
        for (at, len) in [(spec::COMMAND, 2), (spec::BAR0, 24), (spec::ROM, 4)] {
            owners[at..at + len].fill(Owner::Header);
        }
        for at in [spec::CACHE_LINE_SIZE, spec::LATENCY_TIMER, spec::HEADER_TYPE, spec::INTERRUPT_LINE] {
            owners[at] = Owner::Header;
        }
        let mut own = |at: usize, bytes: &[u8], bits: &[u8]| {
            for (n, (byte, bits)) in bytes.iter().zip(bits).enumerate() {
                if let (Some(owner), Some(ours)) = (owners.get_mut(at + n), ours.get_mut(at + n)) {
                    (*owner, *ours) = (Owner::Ours(*bits), *byte);
                }
            }
        };
        // Vectors are switched on by wires: what the guest writes here is its own affair and its VMM's.
        if let Some(at) = hardware.capability(spec::CAP_MSI)? {
            let mut control = [0; 2];
            hardware.read_config(at + spec::MSI_CONTROL as u64, &mut control)?;
            let word = u16::from_le_bytes(control) & !(spec::MSI_ENABLE | 7 << 4);
            own(
                at as usize + spec::MSI_CONTROL,
                &word.to_le_bytes(),
                &(spec::MSI_ENABLE | 7 << 4).to_le_bytes(),
            );
            let wide = if word & spec::MSI_64 != 0 { 4 } else { 0 };
            let masks = if word & spec::MSI_MASKING != 0 { 10 } else { 2 };
            let mut bits = vec![0xff; 4 + wide + masks];
            bits[0] = 0xfc;
            // Reserved, then the mask bits; the pending bits after those are read only.
            if masks == 10 {
                bits[4 + wide + 2..4 + wide + 4].fill(0);
                bits[4 + wide + 6..].fill(0);
            }
            own(at as usize + 4, &vec![0; bits.len()], &bits);
        }
        if let Some(at) = hardware.capability(spec::CAP_MSIX)? {
            let mut control = [0; 2];
            hardware.read_config(at + spec::MSIX_CONTROL as u64, &mut control)?;
            let bits = spec::MSIX_ENABLE | spec::MSIX_FUNCTION_MASK;
            let word = u16::from_le_bytes(control) & !bits;
            own(at as usize + spec::MSIX_CONTROL, &word.to_le_bytes(), &bits.to_le_bytes());
        }
        let mut flr = None;
        if let Some(at) = hardware.capability(spec::CAP_EXPRESS)? {
            let mut word = [0; 4];
            hardware.read_config(at + spec::EXPRESS_DEVICE_CAPABILITIES as u64, &mut word)?;
            if u32::from_le_bytes(word) & spec::EXPRESS_FLR != 0 {
                flr = Some(at as usize + spec::EXPRESS_DEVICE_CONTROL + 1);
            }
        }
        let fresh = ours.clone();
        let mut direct = Passthrough {
            info,
            hardware: Held(Some(hardware)),
            bars,
            irqs,
            header,
            owners,
            ours,
            fresh,
            flr,
            suspended: false,
            mapped: Vec::new(),
            registers: model.and_then(ByRegisters::new),
            memory: model.filter(|model| model.port.is_some()),
            not_reset: None,
            not_open: None,
            closed: false,
            admitted: false,
            served: false,
            faults: DirectFaults::default(),
        };
        direct.command()?;
        Ok(direct)
    }

    /// What went wrong so far.
    pub fn faults(&self) -> DirectFaults {
        self.faults
    }

    /// Why the last reset that was wanted did not happen, if it did not.
    pub fn not_reset(&self) -> Option<&HardwareError> {
        self.not_reset.as_ref()
    }

    /// The hardware.
    pub fn hardware(&self) -> &H {
        &self.hardware
    }

    /// Gives the hardware back: its memory wiped if a guest had it, and out of reach of that guest's memory. Dropping this does the same.
    pub fn into_hardware(mut self) -> H {
        self.let_go();
        self.hardware.take()
    }

    fn let_go(&mut self) {
        let _ = self.hardware.master(false);
        for region in std::mem::take(&mut self.mapped) {
            let _ = self.hardware.unmap(region.gpa(), region.len());
        }
        let used = self.served || self.admitted;
        let Some(model) = self.memory.filter(|_| used) else { return };
        // One that its last client keeps open cannot be reached, nor its failures told to whoever takes it from the host.
        if self.closed && self.hardware.reopen().is_err() {
            return;
        }
        self.closed = false;
        let (hardware, _) = Monitor::empty(self.hardware.take(), model);
        self.hardware = Held(Some(hardware));
    }

    /// Its last reset was tried and failed: nobody knows what it would do. (What has no reset at all is as its guest has left it.)
    fn dead(&self) -> bool {
        matches!(&self.not_reset, Some(error) if !matches!(error, HardwareError::Unresettable { .. }))
    }

    /// As at power-on, or [`Passthrough::not_reset`].
    fn start_over(&mut self) {
        let reset = match (self.hardware.reset(), &self.registers) {
            (Ok(true), _) => Ok(()),
            // Also where its own reset failed: this one may do.
            (_, Some(registers)) => registers.reset(&mut *self.hardware),
            (Ok(false), None) => {
                Err(HardwareError::Unresettable { function: self.hardware.name().to_owned() })
            }
            (Err(error), None) => Err(error),
        };
        self.header.reset();
        self.ours = self.fresh.clone();
        self.not_reset = reset.err();
        if let Err(error) = self.command() {
            self.not_reset.get_or_insert(error);
        }
        self.faults.resets += u64::from(self.not_reset.is_some());
    }

    /// What the last user left in the card's own memory is gone, or [`Passthrough::not_reset`].
    fn wipe(&mut self) {
        let Some(model) = self.memory.filter(|_| self.not_reset.is_none()) else { return };
        let (hardware, wiped) = Monitor::empty(self.hardware.take(), model);
        self.hardware = Held(Some(hardware));
        let function = self.hardware.name().to_owned();
        self.not_reset = match wiped {
            Ok(()) => self.command().err(),
            Err(MonitorError::Hardware(error)) => Some(error),
            Err(error) => Some(HardwareError::NotWiped { function, why: error.to_string() }),
        };
        self.faults.resets += u64::from(self.not_reset.is_some());
    }

    /// Memory and ports stay switched on in hardware: where they are is the host's affair. Bus mastering and the wish for no INTA# are
    /// the guest's.
    fn command(&mut self) -> Result<(), HardwareError> {
        if self.closed {
            return Ok(());
        }
        let mut word = [0; 2];
        self.hardware.read_config(spec::COMMAND as u64, &mut word)?;
        let before = u16::from_le_bytes(word);
        let mut after = before & !(spec::COMMAND_MASTER | spec::COMMAND_INTX_DISABLE);
        for (_, bar) in self.bars.iter() {
            let ports = bar.space == ioplane_pci::Space::Port;
            after |= if ports { spec::COMMAND_IO } else { spec::COMMAND_MEMORY };
        }
        if self.header.bus_master() && !self.suspended && !self.dead() {
            after |= spec::COMMAND_MASTER;
        }
        if self.header.intx_disabled() {
            after |= spec::COMMAND_INTX_DISABLE;
        }
        if after != before {
            self.hardware.write_config(spec::COMMAND as u64, &after.to_le_bytes())?;
        }
        Ok(())
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) {
        if self.hardware.read_config(offset, out).is_err() {
            self.faults.accesses += 1;
            out.fill(0xff);
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (n, byte) in out.iter_mut().enumerate() {
            let at = start.saturating_add(n);
            match self.owners.get(at) {
                Some(Owner::Header) => self.header.read(at as u64, std::slice::from_mut(byte)),
                Some(Owner::Ours(_)) => *byte = self.ours[at],
                Some(Owner::Hardware | Owner::Fixed) => {}
                None => *byte = 0xff,
            }
        }
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Effect {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let before = self.header.command();
        let mut effect = Effect::None;
        let mut at = start;
        let mut rest = bytes;
        while let (Some(owner), Some((byte, after))) = (self.owners.get(at).copied(), rest.split_first()) {
            let mut done = 1;
            match owner {
                Owner::Fixed => {}
                Owner::Header => drop(self.header.write(at as u64, &[*byte])),
                Owner::Ours(bits) => self.ours[at] = self.ours[at] & !bits | byte & bits,
                Owner::Hardware
                    if self.flr == Some(at) && byte & (spec::EXPRESS_INITIATE_FLR >> 8) as u8 != 0 =>
                {
                    effect = Effect::Deactivate(QueueSet::new(), AfterStop::Reset);
                }
                Owner::Hardware => {
                    // In one piece, as the guest wrote it, except the bit above.
                    let run = |n: &usize| {
                        self.owners.get(at + n) == Some(&Owner::Hardware) && self.flr != Some(at + n)
                    };
                    done = 1 + (1..rest.len()).take_while(run).count();
                    if self.hardware.write_config(at as u64, &rest[..done]).is_err() {
                        self.faults.accesses += 1;
                    }
                }
            }
            at += done;
            rest = if done == 1 { after } else { &rest[done..] };
        }
        if self.header.command() != before && self.command().is_err() {
            self.faults.accesses += 1;
        }
        effect
    }

    /// Maps what of `map` is not mapped yet; nothing of it after an error.
    fn take_in(&mut self, map: &GuestMap) -> Result<(), DeviceError> {
        let had = self.mapped.len();
        for region in map.regions() {
            if self.mapped[..had].iter().any(|m| m.is_same(region)) {
                continue;
            }
            if let Err(error) = self.hardware.map(region.gpa(), region) {
                for region in self.mapped.split_off(had) {
                    let _ = self.hardware.unmap(region.gpa(), region.len());
                }
                return Err(below(error));
            }
            self.mapped.push(region.clone());
        }
        Ok(())
    }
}

impl<H: Hardware> Drop for Passthrough<H> {
    /// Whoever gets the hardware next, a driver of the host included, finds nothing of the guest's in its memory.
    fn drop(&mut self) {
        if self.hardware.0.is_some() {
            self.let_go();
        }
    }
}

fn below(error: HardwareError) -> DeviceError {
    DeviceError::Below(Box::new(error))
}

impl<H: Hardware> Device for Passthrough<H> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        let failed = match (at, op) {
            (RegisterAddress::Config(offset), Access::Read(out)) => {
                self.read_config(offset, out);
                return Effect::None;
            }
            (RegisterAddress::Config(offset), Access::Write(bytes)) => {
                return self.write_config(offset, bytes);
            }
            (RegisterAddress::Bar(bar, offset), Access::Read(out)) => {
                let failed = self.dead() || self.hardware.read(bar, offset, out).is_err();
                if failed {
                    out.fill(0xff);
                }
                failed
            }
            (RegisterAddress::Bar(bar, offset), Access::Write(bytes)) => {
                self.dead() || self.hardware.write(bar, offset, bytes).is_err()
            }
        };
        self.faults.accesses += u64::from(failed);
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    /// It has no queues; but whoever suspended it wants it to go on.
    fn activate(&mut self, _: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.suspended = false;
        self.command().map_err(below)
    }

    fn deactivate(&mut self, _: Parked) {}

    fn quiescence(&mut self) -> Quiescence {
        if self.suspended || !self.header.bus_master() {
            return Quiescence::Quiescent;
        }
        Quiescence::Busy("hardware without a monitor: only a suspension stops it")
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.suspended = true;
        self.command().map_err(below)
    }

    fn save(&self, _: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Err(below(HardwareError::Unwatched { function: self.hardware.name().into() }))
    }

    fn load(&mut self, _: &QuiescenceProof, _: &SavedState) -> Result<(), DeviceError> {
        Err(below(HardwareError::Unwatched { function: self.hardware.name().into() }))
    }

    fn reset(&mut self, _: &QuiescenceProof) {
        // One that is closed is reset when it is opened.
        if !self.closed {
            self.start_over();
        }
    }
}

impl<H: Hardware> Function for Passthrough<H> {
    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        self.irqs
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        self.hardware.wire(irq, vector, wire)
    }

    fn grow_memory(&mut self, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        self.take_in(&map)
    }

    fn admit(&mut self, _: &QuiescenceProof) -> Result<(), NotReady> {
        if self.closed {
            if let Err(error) = self.hardware.reopen() {
                let text = error.to_string();
                self.not_open = Some(text.clone());
                return Err(match error {
                    HardwareError::Kept { .. } => NotReady::Kept(text),
                    _ => NotReady::Unusable(text),
                });
            }
            self.closed = false;
            self.bars = self.hardware.bars().clone();
        }
        self.not_open = None;
        // Also of one that was reset when its client left: who kept a descriptor may have had it since.
        self.start_over();
        self.wipe();
        match self.unusable() {
            Some(why) => Err(NotReady::Unusable(why)),
            None => {
                self.admitted = true;
                Ok(())
            }
        }
    }

    fn dismiss(&mut self) {
        self.hardware.close();
        self.bars = self.hardware.bars().clone();
        self.mapped.clear();
        self.closed = true;
        self.served |= std::mem::take(&mut self.admitted);
    }

    fn unusable(&self) -> Option<String> {
        // The host's driver may have left it to the first client as it liked.
        let refuses =
            |error: &&HardwareError| self.served || !matches!(error, HardwareError::Unresettable { .. });
        self.not_open.clone().or_else(|| self.not_reset.as_ref().filter(refuses).map(ToString::to_string))
    }

    fn replace_memory(&mut self, _: &QuiescenceProof, map: Arc<GuestMap>) -> Result<(), DeviceError> {
        let mut outcome = Ok(());
        let gone = |mapped: &MemoryRegion| !map.regions().iter().any(|region| region.is_same(mapped));
        let (out, kept): (Vec<MemoryRegion>, Vec<MemoryRegion>) =
            std::mem::take(&mut self.mapped).into_iter().partition(gone);
        self.mapped = kept;
        for region in out {
            if let Err(error) = self.hardware.unmap(region.gpa(), region.len()) {
                // Still reached: the next call tries again.
                self.mapped.push(region);
                outcome = Err(below(error));
            }
        }
        outcome.and_then(|()| self.take_in(&map))
    }
}
