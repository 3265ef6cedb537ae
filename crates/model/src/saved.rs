//! A machine, saved and loaded.

use serde::{Deserialize, Serialize};

use crate::limits::REGIONS;
use crate::{Machine, ModelFault};

impl Machine {
    /// The states and what was written, to be loaded by another machine of the same model.
    pub fn save(&self) -> ModelStateV1 {
        ModelStateV1 {
            model: self.model.name.to_owned(),
            states: self.states().map(|(region, state)| (region.to_owned(), state.name.to_owned())).collect(),
            values: self
                .model
                .registers
                .iter()
                .zip(&self.values)
                .filter(|(_, value)| **value != 0)
                .map(|(register, value)| (register.name.to_owned(), *value))
                .collect(),
        }
    }

    /// Takes a saved state, which is hostile: it is either taken whole, or refused and nothing has changed.
    pub fn load(&mut self, saved: &ModelStateV1) -> Result<(), ModelFault> {
        let fault = |why: String| ModelFault::State { model: self.model.name, why };
        if saved.model != self.model.name {
            return Err(fault(format!("it is of model {:?}", shortened(&saved.model))));
        }
        if saved.states.len() != self.model.regions.len() {
            return Err(fault(format!("it has {} regions", saved.states.len())));
        }
        let mut now = self.table.first;
        for (place, region) in self.model.regions.iter().enumerate() {
            let Some((_, state)) = saved.states.iter().find(|(name, _)| name == region.name) else {
                return Err(fault(format!("region {} is missing", region.name)));
            };
            let Some(state) = region.states.iter().position(|own| own.name == state) else {
                let state = shortened(state);
                return Err(fault(format!("region {} has no state {state:?}", region.name)));
            };
            now[place] = self.table.first[place] + state as u8;
        }
        if saved.values.len() > self.model.registers.len() {
            return Err(fault(format!("it has {} registers", saved.values.len())));
        }
        let mut values = vec![0; self.model.registers.len()].into_boxed_slice();
        for (name, value) in &saved.values {
            let Some(id) = self.find(name) else {
                return Err(fault(format!("there is no register {:?}", shortened(name))));
            };
            let bits = u32::from(self.register(id).width) * 8;
            if bits < 32 && value >> bits != 0 {
                return Err(fault(format!("register {name} cannot hold {value:#x}")));
            }
            if let Some(place) = values.get_mut(id.index()) {
                *place = *value;
            }
        }
        self.take(now, values);
        Ok(())
    }

    /// Takes the states and what was written from another machine of the same model: the hardware has been brought to where that
    /// one's was. Of another model: nothing happens, `false`.
    pub fn adopt(&mut self, other: &Machine) -> bool {
        if !std::ptr::eq(self.model, other.model) {
            return false;
        }
        self.take(other.now, other.values.clone());
        true
    }

    fn take(&mut self, now: [u8; REGIONS], values: Box<[u32]>) {
        self.now = now;
        self.values = values;
        self.bank = self.table.bank.map_or(0, |id| self.table.bank_of(self.value(id)));
        self.rehook();
    }
}

/// Of a name that a stranger wrote, so much as fits in a message.
fn shortened(name: &str) -> String {
    name.chars().take(40).collect()
}

/// A saved [`Machine`]. Hostile until it is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStateV1 {
    /// The model's name.
    pub model: String,
    /// Region and state.
    pub states: Vec<(String, String)>,
    /// Register and what was last written to it, if not zero.
    pub values: Vec<(String, u32)>,
}
