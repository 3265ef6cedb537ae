//! Memory of the device, behind a data port: what the guest moves there is counted, what others left there is wiped. How the port goes along
//! the model's function says ([`ioplane_model::DataPort::step`]).

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{ModelInput, PortStep, RegisterId, Transfer, Way};

use super::Monitor;
use super::bus::full;
use super::plan::PortPlan;

/// Most bytes at a time through the data port.
const WIDEST: usize = 4;

impl<H: Hardware> Monitor<H> {
    fn pair(&self, (low, high): (RegisterId, RegisterId)) -> u32 {
        self.guest.machine.value(low) & 0xff | (self.guest.machine.value(high) & 0xff) << 8
    }

    /// After a write: of the address, or of the command, by which a transfer begins, or ends, or goes on.
    pub(super) fn begin_transfer(&mut self, id: RegisterId, value: u32) {
        let Some(plan) = &self.card.plan.port else { return };
        let told = &mut self.card.address_told;
        (told.0, told.1) = (told.0 || id == plan.address.0, told.1 || id == plan.address.1);
        if id != plan.command {
            return;
        }
        let (mask, read, write) = plan.table.direction;
        let way = match value & mask {
            bits if bits == read => Way::Read,
            bits if bits == write => Way::Write,
            _ => {
                self.guest.transfer = None;
                return;
            }
        };
        let (address, left) = (self.pair(plan.address), self.pair(plan.count));
        self.guest.transfer = Some(Transfer { way, address, left });
        self.card.counts.totals.vetted_bytes += u64::from(left);
    }

    /// Lets the address registers say where the device really is. A transfer moves on; who begins the next without an address, or with
    /// half of one, begins there. Whether a device goes on from what it has reached or from what was written is its own affair:
    /// both are the same after this.
    pub(super) fn learn_address(&mut self) {
        let Some(plan) = self.card.plan.port else { return };
        if self.card.address_told == (true, true) {
            return;
        }
        let reached = [plan.reached.0, plan.reached.1].map(|register| self.peek(register) & 0xff);
        for (register, value) in [plan.address.0, plan.address.1].into_iter().zip(reached) {
            if !self.card.bus.gone() && self.guest.machine.value(register) & 0xff != value {
                self.guest.machine.note(register, value);
                self.poke(register, value);
            }
        }
        self.rechoose();
        self.card.address_told = (true, true);
    }

    /// A transfer that the port is open for.
    pub(super) fn open_transfer(&self) -> Option<Transfer> {
        let port = self.card.plan.port?.register;
        self.guest
            .transfer
            .filter(|transfer| transfer.left > 0 && !self.guest.machine.hooked(port, transfer.way))
    }

    /// The next access to the port, of `wanted` bytes that are left of one of the guest's of `width`.
    fn port_step(&self, wanted: usize, width: usize) -> Option<PortStep> {
        let transfer = self.guest.transfer.filter(|transfer| transfer.left > 0)?;
        let PortPlan { table, inputs, .. } = self.card.plan.port.as_ref()?;
        let step = inputs.give(
            |id| self.guest.machine.value(id),
            |values| (table.step)(transfer, values, wanted, width),
        )?;
        // A function that says more would reach past the guest's bytes, one that says nothing never end.
        (1..=wanted).contains(&step.width).then_some(step)
    }

    /// The guest reads the data port. What was not asked for from the device reads as zero.
    pub(super) fn port_reads(&mut self, bar: u8, id: RegisterId, out: &mut [u8]) {
        let (offset, width) = (self.guest.machine.register(id).offset.into(), out.len());
        let mut from = 0;
        while let Some(step) = self.port_step(width - from, width) {
            self.card.bus.read_at(bar, offset, &mut out[from..from + step.width]);
            self.ported(step);
            from += step.width;
        }
    }

    /// The guest writes the data port.
    pub(super) fn port_writes(&mut self, bar: u8, id: RegisterId, bytes: &[u8]) {
        let (offset, width) = (self.guest.machine.register(id).offset.into(), bytes.len());
        let mut from = 0;
        while let Some(step) = self.port_step(width - from, width) {
            self.card.bus.write_at(bar, offset, &bytes[from..from + step.width]);
            self.ported(step);
            from += step.width;
        }
    }

    /// An access has gone through the data port.
    fn ported(&mut self, step: PortStep) {
        self.card.counts.totals.port_bytes += u64::from(step.moved);
        self.card.address_told = (false, false);
        self.guest.transfer = Some(step.after);
        if step.after.left == 0 {
            self.guest.transfer = None;
            // Told when the access is through.
            self.guest.all_moved = true;
        }
    }

    /// Tells the model that a transfer has ended, once the access that ended it has happened.
    pub(super) fn tell_moved(&mut self) {
        if std::mem::take(&mut self.guest.all_moved) {
            self.tell(ModelInput::Moved);
        }
    }

    /// Begins a transfer of the monitor's own, in the bank that the hardware has chosen for its registers.
    fn command(&mut self, transfer: Transfer) {
        let Some(plan) = self.card.plan.port else { return };
        let Transfer { way, address, left } = transfer;
        let (mask, read, write) = plan.table.direction;
        let now = self.peek(plan.command);
        let bits = if way == Way::Read { read } else { write };
        for ((low, high), value) in [(plan.address, address), (plan.count, left)] {
            self.poke(low, value & 0xff);
            self.poke(high, value >> 8 & 0xff);
        }
        let mut command = now & !mask | bits;
        if self.card.plan.bank == Some(plan.command)
            && let Some(banks) = self.card.model.banks
        {
            let field = u32::from(banks.mask);
            command = command & !field | u32::from(self.card.bus.bank) << (banks.shift % 8) & field;
        }
        self.poke(plan.command, command);
        self.card.address_told = (false, false);
    }

    /// The status bits that a transfer of ours left behind are nobody's.
    fn hush(&mut self) {
        let status = self.guest.machine.register(self.card.plan.status);
        let bits = full(status) & !self.card.model.interrupts.live;
        self.poke(self.card.plan.status, bits);
    }

    /// Fills the memory that a guest can write from `bytes`, or with zeros. The steps of bringing a device back that come before have made it
    /// reach all of it ([`ioplane_model::DataPort::fills`]).
    ///
    /// # Errors
    ///
    /// Whatever has failed since [`super::bus::Bus::forget_failure`], these steps included: what another guest left may still be there, and
    /// nobody may have the card.
    pub(super) fn fill_memory(&mut self, bytes: Option<&[u8]>) -> Result<(), HardwareError> {
        let Some(plan) = self.card.plan.port else { return Ok(()) };
        let port = self.guest.machine.register(plan.register);
        let step = usize::from(port.width).clamp(1, WIDEST);
        let mut at = 0;
        for (first, end) in plan.table.writable {
            let left = end.saturating_sub(*first);
            self.command(Transfer { way: Way::Write, address: *first, left });
            let until = at + left as usize;
            while at < until {
                let piece = bytes.and_then(|bytes| bytes.get(at..at + step)).unwrap_or(&[0; WIDEST][..step]);
                self.card.bus.write_at(self.card.model.bar, port.offset.into(), piece);
                at += step;
            }
        }
        self.hush();
        let function = self.card.bus.name().to_owned();
        match self.card.bus.failure() {
            Some(why) => Err(HardwareError::NotWiped { function, why: why.to_owned() }),
            None if self.card.bus.gone() => Err(self.card.lost()),
            None => Ok(()),
        }
    }

    /// All of the memory that a guest can write; before it comes what comes before [`Monitor::fill_memory`].
    pub(super) fn read_memory(&mut self) -> Option<Vec<u8>> {
        let plan = self.card.plan.port?;
        let port = self.guest.machine.register(plan.register);
        let step = usize::from(port.width).clamp(1, WIDEST);
        let mut bytes = Vec::with_capacity(self.memory_size());
        for (first, end) in plan.table.writable {
            let left = end.saturating_sub(*first);
            self.command(Transfer { way: Way::Read, address: *first, left });
            let until = bytes.len() + left as usize;
            while bytes.len() < until {
                let mut piece = [0; WIDEST];
                let piece = &mut piece[..step];
                self.card.bus.read_at(self.card.model.bar, port.offset.into(), piece);
                bytes.extend_from_slice(piece);
            }
        }
        self.hush();
        Some(bytes)
    }

    /// How many bytes [`Monitor::read_memory`] gives.
    pub(super) fn memory_size(&self) -> usize {
        let ranges = self.card.model.port.as_ref().map_or(&[][..], |port| port.writable);
        ranges.iter().map(|(first, end)| end.saturating_sub(*first) as usize).sum()
    }

    /// Takes a transfer up again where it was.
    pub(super) fn continue_transfer(&mut self, transfer: Transfer) {
        self.command(transfer);
        self.guest.transfer = Some(transfer);
        self.rechoose();
    }
}
