//! In which states a device is after it was brought back: derived from the writes that bring it back, on hardware that was reset, and
//! not from what somebody says.
//!
//! A saved state tells the states of the model's regions. As these decide what is checked and hooked, a claim could let anything pass: that a word of the EEPROM is being read, while the guest has yet to say what is to be done; that a
//! transfer of some range was checked. So the same writes are played to a model of its own. What it says is what is saved, what a
//! saved state is held against, and what is taken over.

use ioplane_hardware::Hardware;
use ioplane_model::{Machine, ModelInput, ModelStateV1, Pending, RegisterId, Transfer, Way};

use super::Monitor;
use super::guest::BlockState;
use super::plan::{Role, Step};
use super::quiescence::QuiescentState;

/// What a device is brought back from.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplayInput<'a> {
    pub(super) registers: &'a [(RegisterId, u32)],
    pub(super) transfer: Option<Transfer>,
    pub(super) blocks: &'a [BlockState],
}

impl QuiescentState {
    pub(super) fn grounds(&self) -> ReplayInput<'_> {
        ReplayInput { registers: &self.registers, transfer: self.transfer, blocks: &self.blocks }
    }
}

impl<H: Hardware> Monitor<H> {
    /// What a model of its own says, from a reset on, of the writes with which a device is brought back. Strict: what no guest would
    /// have been let do is an error. Rings and blocks are not looked at here: they are, in guest memory, when the device goes on.
    pub(super) fn derive(&self, grounds: ReplayInput<'_>, strict: bool) -> Result<Machine, String> {
        let mut machine = self.guest.machine.clone();
        machine.reset();
        for step in &self.card.plan.restore {
            let (register, value) = match *step {
                Step::Saved { register, mask, with } => {
                    let saved = grounds.registers.iter().find(|(id, _)| *id == register);
                    (register, saved.map_or(0, |(_, value)| *value) & mask | with)
                }
                Step::Value(register, value) => (register, value),
                Step::Ring(_) | Step::Memory | Step::Shown(..) | Step::Table(..) => continue,
            };
            if self.card.plan.role(register) == Role::Plain {
                self.play(&mut machine, register, value, strict)?;
            }
        }
        if let (Some(transfer), Some(plan)) = (grounds.transfer, self.card.plan.port) {
            let Transfer { way, address, left } = transfer;
            for ((low, high), value) in [(plan.address, address), (plan.count, left)] {
                machine.note(low, value & 0xff);
                machine.note(high, value >> 8 & 0xff);
            }
            let (mask, read, write) = plan.table.direction;
            let bits = if way == Way::Read { read } else { write };
            let command = machine.value(plan.command) & !mask | bits;
            self.play(&mut machine, plan.command, command, strict)?;
        }
        let blocks = self.card.model.blocks.iter().zip(self.card.plan.blocks.iter()).zip(grounds.blocks);
        for ((table, (low, _)), _) in blocks.filter(|(_, state)| state.busy.is_some()) {
            self.play(&mut machine, *low, table.start, strict)?;
        }
        Ok(machine)
    }

    /// One write.
    fn play(
        &self,
        machine: &mut Machine,
        register: RegisterId,
        value: u32,
        strict: bool,
    ) -> Result<(), String> {
        let pending = machine.ask(ModelInput::Write { register, value });
        if strict {
            let name = machine.register(register).name;
            self.permitted(machine, &pending).map_err(|why| format!("{name} {value:#x}: {why}"))?;
        }
        let _ = machine.commit(pending);
        Ok(())
    }

    fn permitted(&self, machine: &Machine, pending: &Pending) -> Result<(), String> {
        if pending.resets() {
            return Err("it resets the device".to_owned());
        }
        for check in pending.checks() {
            self.check_registers(machine, pending, self.card.plan.rule(check)).map_err(|fault| fault.text)?;
        }
        Ok(())
    }

    /// What a machine says, with what a derived one knows better: the states of all regions but those that have to be told
    /// ([`ioplane_model::StateModel::told`]), and the registers that were written.
    pub(super) fn corrected(&self, machine: &Machine, derived: &Machine) -> ModelStateV1 {
        let mut saved = machine.save();
        for (name, state) in derived.states().filter(|(name, _)| !self.card.model.told.contains(name)) {
            if let Some((_, own)) = saved.states.iter_mut().find(|(own, _)| own == name) {
                state.name.clone_into(own);
            }
        }
        let written = self.card.plan.restore.iter().filter_map(|step| match *step {
            Step::Saved { register, .. } | Step::Value(register, _) => Some(register),
            Step::Ring(_) | Step::Memory | Step::Shown(..) | Step::Table(..) => None,
        });
        for id in written.filter(|id| self.card.plan.role(*id) == Role::Plain) {
            let name = machine.register(id).name;
            saved.values.retain(|(own, _)| own != name);
            if derived.value(id) != 0 {
                saved.values.push((name.to_owned(), derived.value(id)));
            }
        }
        saved
    }

    /// Holds what a state says of its regions against what was derived.
    pub(super) fn compare(&self, claimed: &Machine, derived: &Machine) -> Result<(), String> {
        for ((name, claim), (_, state)) in claimed.states().zip(derived.states()) {
            if claim.name != state.name && !self.card.model.told.contains(&name) {
                return Err(format!(
                    "region {name} is said to be in {}, and by its registers it is in {}",
                    claim.name, state.name
                ));
            }
        }
        Ok(())
    }

    /// The model is where the guest was, but for what the writes of bringing back have moved: a word of an EEPROM that was half read
    /// begins anew, whatever the guest believes.
    pub(super) fn adopt(&mut self, remembered: &QuiescentState) {
        self.guest.machine.adopt(&remembered.machine);
        let Ok(derived) = self.derive(remembered.grounds(), false) else { return };
        let corrected = self.corrected(&remembered.machine, &derived);
        let loaded = self.guest.machine.load(&corrected);
        debug_assert!(loaded.is_ok(), "{loaded:?}: states of this very model");
    }
}
