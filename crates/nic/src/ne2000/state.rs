//! What is saved of an NE2000.

use ioplane_device::{DeviceError, State, StateError};
use serde::{Deserialize, Serialize};

use super::card::Card;
use super::{KIND, Ne2000, RegistersV1};

const VERSION: u32 = 1;

/// A saved NE2000, as postcard encodes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateV1 {
    /// The configuration space, 256 bytes.
    pub config: Vec<u8>,
    /// The registers.
    pub registers: RegistersV1,
    /// Card memory, 16 KiB.
    pub memory: Vec<u8>,
}

impl Ne2000 {
    pub(super) fn save_state(&self) -> Result<State, DeviceError> {
        let state = StateV1 {
            config: self.config.save(),
            registers: self.registers.clone(),
            memory: self.card.memory().to_vec(),
        };
        crate::encode(KIND, VERSION, &state)
    }

    pub(super) fn load_state(&mut self, state: &State) -> Result<(), DeviceError> {
        let saved: StateV1 = crate::decode(state, KIND, VERSION)?;
        let impossible = |what: String| DeviceError::State(StateError::Impossible(what));
        saved.registers.check().map_err(impossible)?;
        let mut card = Card::new(self.mac);
        if !card.load(&saved.memory) {
            return Err(impossible(format!("{} bytes of card memory", saved.memory.len())));
        }
        let mut config = self.config.clone();
        if !config.load(&saved.config) {
            return Err(impossible(format!("{} bytes of configuration space", saved.config.len())));
        }
        // From here on nothing fails.
        (self.registers, self.card, self.config) = (saved.registers, card, config);
        self.line.disable(self.config.intx_disabled());
        // Law 2: whatever has come meanwhile is looked at.
        self.bells.ring();
        self.settle();
        Ok(())
    }
}
