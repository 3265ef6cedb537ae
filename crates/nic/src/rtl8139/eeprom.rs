//! The 93C46 behind [`CR9346`]: 64 words, read bit by bit. Writes and erasures are taken and denied: the words stay what they are,
//! and the chip is ready at once.

use ioplane_network::Mac;
use serde::{Deserialize, Serialize};

use super::spec::*;

/// What the serial interface is at. A command is a one, two bits of operation, and an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum PhaseV1 {
    /// Not selected, or done with something that takes nothing more.
    #[default]
    Idle,
    /// Selected: waits for a one.
    Start,
    /// So many bits of a command, and what they are.
    Command {
        /// How many.
        bits: u8,
        /// What.
        word: u8,
    },
    /// Gives a word.
    Read {
        /// Of that address.
        address: u8,
        /// Bits given.
        bits: u8,
    },
}

/// Pins and phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EepromV1 {
    /// Chip select.
    pub select: bool,
    /// Clock.
    pub clock: bool,
    /// Data out.
    pub out: bool,
    /// Phase.
    pub phase: PhaseV1,
}

const OPERATION_READ: u8 = 0b10;

impl EepromV1 {
    /// Whether the chip can be in that state.
    pub(super) fn check(&self) -> Result<(), String> {
        let possible = match self.phase {
            PhaseV1::Idle | PhaseV1::Start => true,
            PhaseV1::Command { bits, word } => {
                u32::from(bits) < EEPROM_ADDRESS_BITS + 2 && u32::from(word) >> bits == 0
            }
            PhaseV1::Read { address, bits } => usize::from(address) < EEPROM_WORDS && bits < 16,
        };
        if possible { Ok(()) } else { Err(format!("EEPROM in phase {:?}", self.phase)) }
    }

    /// The bits that were written to [`CR9346`] in programming mode; any other mode lets go of the pins.
    pub(super) fn pins(&mut self, bits: u8, mac: Mac) {
        let (select, clock, data) = (bits & EECS != 0, bits & EESK != 0, bits & EEDI != 0);
        let (selected, rising) = (select && !self.select, clock && !self.clock);
        (self.select, self.clock) = (select, clock);
        if !select {
            (self.phase, self.out) = (PhaseV1::Idle, false);
        } else if selected {
            // Ready: nothing is being programmed.
            (self.phase, self.out) = (PhaseV1::Start, true);
        } else if rising {
            self.tick(data, mac);
        }
    }

    fn tick(&mut self, data: bool, mac: Mac) {
        match self.phase {
            PhaseV1::Idle => {}
            PhaseV1::Start => {
                if data {
                    self.phase = PhaseV1::Command { bits: 0, word: 0 };
                }
            }
            PhaseV1::Command { bits, word } => {
                let (bits, word) = (bits + 1, word << 1 | u8::from(data));
                self.phase = if u32::from(bits) < EEPROM_ADDRESS_BITS + 2 {
                    PhaseV1::Command { bits, word }
                } else if word >> EEPROM_ADDRESS_BITS == OPERATION_READ {
                    self.out = false;
                    PhaseV1::Read { address: word & (EEPROM_WORDS as u8 - 1), bits: 0 }
                } else {
                    PhaseV1::Idle
                };
            }
            PhaseV1::Read { address, bits } => {
                self.out = word(address, mac) >> (15 - bits) & 1 != 0;
                // Word after word, while it is clocked.
                self.phase = match bits {
                    15 => PhaseV1::Read { address: (address + 1) & (EEPROM_WORDS as u8 - 1), bits: 0 },
                    _ => PhaseV1::Read { address, bits: bits + 1 },
                };
            }
        }
    }
}

/// What the EEPROM has at `address`.
fn word(address: u8, mac: Mac) -> u16 {
    let at = usize::from(address);
    match at {
        0 => EEPROM_ID,
        EEPROM_VENDOR => VENDOR,
        EEPROM_DEVICE => DEVICE,
        _ if (EEPROM_MAC..EEPROM_MAC + 3).contains(&at) => {
            let byte = 2 * (at - EEPROM_MAC);
            u16::from_le_bytes([mac[byte], mac[byte + 1]])
        }
        _ => 0,
    }
}
