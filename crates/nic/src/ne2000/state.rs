//! What is saved of an NE2000.

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{DeviceError, SavedState, StateError};
use ioplane_pci::spec::CONFIG_SIZE;
use serde::{Deserialize, Serialize};

use super::card::SIZE;
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

impl StateV1 {
    /// Whether a card can be in that state.
    fn check(&self) -> Result<(), String> {
        self.registers.check()?;
        if self.memory.len() != SIZE {
            return Err(format!("{} bytes of card memory", self.memory.len()));
        }
        if self.config.len() != CONFIG_SIZE {
            return Err(format!("{} bytes of configuration space", self.config.len()));
        }
        Ok(())
    }
}

impl Ne2000 {
    pub(super) fn save_state(&self) -> Result<SavedState, DeviceError> {
        let state = StateV1 {
            config: self.config.save(),
            registers: self.registers.clone(),
            memory: self.card.memory().to_vec(),
        };
        crate::encode(KIND, VERSION, &state)
    }

    pub(super) fn load_state(&mut self, state: &SavedState) -> Result<(), DeviceError> {
        let saved: StateV1 = crate::decode(state, KIND, VERSION)?;
        // Invariant 4: whoever wrote this may want what no card does.
        if !removed(Invariant::DistrustsLoaded) {
            saved.check().map_err(StateError::Impossible)?;
        }
        // From here on nothing fails.
        self.registers = saved.registers;
        self.card.load(&saved.memory);
        self.config.load(&saved.config);
        self.line.disable(self.config.intx_disabled());
        // Invariant 2: whatever has come meanwhile is looked at.
        self.wake_sources.wake();
        self.settle();
        Ok(())
    }
}
