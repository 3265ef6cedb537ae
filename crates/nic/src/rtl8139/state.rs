//! What is saved of an RTL8139.

use std::time::Instant;

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{DeviceError, SavedState, StateError};
use ioplane_pci::spec::CONFIG_SIZE;
use serde::{Deserialize, Serialize};

use super::spec::*;
use super::{Chip, EepromV1, KIND, Rtl8139, TallyV1};

const VERSION: u32 = 1;

/// A saved RTL8139, as postcard encodes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateV1 {
    /// The configuration space, 256 bytes.
    pub config: Vec<u8>,
    /// The registers as a guest reads them, 256 bytes.
    pub registers: Vec<u8>,
    /// Whether the C+ command register has been written since the last reset.
    pub plus: bool,
    /// Next descriptors of the transmit rings, of normal and of high priority.
    pub transmit: [u32; 2],
    /// Next descriptor of the receive ring.
    pub receive: u32,
    /// Next descriptor of C mode.
    pub current: u64,
    /// The EEPROM's interface.
    pub eeprom: EepromV1,
    /// Counters for the guest.
    pub tally: TallyV1,
    /// The timer's count.
    pub ticks: u32,
}

impl StateV1 {
    /// Whether a chip can be in that state; `fresh` is one at power-on.
    fn check(&self, fresh: &Chip) -> Result<(), String> {
        fresh.registers.check(&self.registers)?;
        self.eeprom.check()?;
        if let Some(index) = self.transmit.iter().chain([&self.receive]).find(|index| **index >= RING) {
            return Err(format!("descriptor {index} of a ring of {RING}"));
        }
        if self.current >= TSDS {
            return Err(format!("descriptor {} of {TSDS}", self.current));
        }
        if self.config.len() != CONFIG_SIZE {
            return Err(format!("{} bytes of configuration space", self.config.len()));
        }
        let mut registers = fresh.registers.clone();
        registers.load(&self.registers);
        let (at, size) = (u32::from(registers.u16(CBR)), registers.buffer());
        if at >= size {
            return Err(format!("writes at {at} of a buffer of {size} bytes"));
        }
        if self.eeprom.out != (registers.u8(CR9346) & EEDO != 0) {
            return Err("the EEPROM's data out is not what the register says".into());
        }
        Ok(())
    }
}

impl Rtl8139 {
    pub(super) fn save_state(&self) -> Result<SavedState, DeviceError> {
        let Chip { registers, plus, transmit, receive, current, eeprom, tally } = &self.chip;
        let state = StateV1 {
            config: self.config.save(),
            registers: registers.bytes().to_vec(),
            plus: *plus,
            transmit: *transmit,
            receive: *receive,
            current: *current,
            eeprom: *eeprom,
            tally: *tally,
            ticks: self.clock.count(Instant::now()),
        };
        crate::encode(KIND, VERSION, &state)
    }

    pub(super) fn load_state(&mut self, state: &SavedState) -> Result<(), DeviceError> {
        let saved: StateV1 = crate::decode(state, KIND, VERSION)?;
        let mut chip = Chip::new(self.mac);
        // Invariant 4: whoever wrote this may want what no chip does.
        if !removed(Invariant::DistrustsLoaded) {
            saved.check(&chip).map_err(StateError::Impossible)?;
        }
        // From here on nothing fails.
        chip.registers.load(&saved.registers);
        self.chip = Chip {
            registers: chip.registers,
            plus: saved.plus,
            transmit: saved.transmit,
            receive: saved.receive,
            current: saved.current,
            eeprom: saved.eeprom,
            tally: saved.tally,
        };
        self.config.load(&saved.config);
        self.see_buffer();
        self.line.disable(self.config.intx_disabled());
        let wait = self.clock.set(Instant::now(), saved.ticks, self.chip.registers.u32(TIMER_INT));
        self.wake_sources.wake_after(wait);
        // Invariant 2: whatever has come meanwhile is looked at.
        self.wake_sources.wake();
        self.settle();
        Ok(())
    }
}
