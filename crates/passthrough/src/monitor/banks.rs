//! Registers of any bank, for the monitor itself: the guest's choice of a bank is put back after each use.

use ioplane_hardware::Hardware;
use ioplane_model::RegisterId;

use super::Monitor;
use super::bus::full;

impl<H: Hardware> Monitor<H> {
    /// Chooses a bank in the hardware, without starting anything.
    pub(super) fn choose(&mut self, bank: u8) {
        if self.card.bus.bank == bank {
            return;
        }
        if let Some((id, value)) = self.guest.machine.select(bank) {
            let register = self.guest.machine.register(id);
            self.card.bus.write(register, value);
            self.card.bus.bank = bank;
        }
    }

    /// Reads a register of any bank. Leaves its bank chosen: [`Monitor::choose`] that of the guest when done.
    pub(super) fn peek(&mut self, id: RegisterId) -> u32 {
        let register = self.guest.machine.register(id);
        if let Some(bank) = register.bank {
            self.choose(bank);
        }
        self.card.bus.read(register)
    }

    /// A register with bits that the hardware does not have as the guest has them.
    pub(super) fn with_kept(&mut self, id: RegisterId) -> u32 {
        let register = self.guest.machine.register(id);
        let mine = self.guest.machine.value(id) & register.kept;
        match register.kept & full(register) == full(register) {
            true => mine,
            false => self.peek(id) & !register.kept | mine,
        }
    }

    /// Writes a register of any bank, as [`Monitor::peek`] reads.
    pub(super) fn poke(&mut self, id: RegisterId, value: u32) {
        let register = self.guest.machine.register(id);
        if let Some(bank) = register.bank {
            self.choose(bank);
        }
        self.card.bus.write(register, value);
        if self.card.plan.bank == Some(id)
            && let Some(banks) = self.card.model.banks
        {
            self.card.bus.bank = (value as u8 & banks.mask) >> (banks.shift % 8);
        }
    }

    /// What the register of the banks says after a reset: its other bits are kept when a bank is chosen.
    pub(super) fn learn_bank(&mut self) {
        self.card.bus.bank = 0;
        if let Some(id) = self.card.plan.bank {
            let value = self.card.bus.read(self.guest.machine.register(id));
            self.guest.machine.note(id, value);
            self.card.bus.bank = self.guest.machine.bank();
        }
    }

    /// The bank that the guest has chosen, again.
    pub(super) fn rechoose(&mut self) {
        self.choose(self.guest.machine.bank());
    }
}
