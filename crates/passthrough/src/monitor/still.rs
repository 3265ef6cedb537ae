//! Stillness, recognised: the device is halted in a state from which it can change hands, looked at once more, and remembered.
//! And the way back: on the same card, or on one that was reset.

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{Flow, Machine, Reads, RegisterId, Transfer, Way};

use super::bus::bit;
use super::counts::{Fault, What};
use super::plan::{Role, Step};
use super::rings::RingV1;
use super::{BlockState, Monitor, MonitorError, Virtual};

/// How long a forced stop waits for what the hardware would finish by itself: a frame on the wire.
const FINISHES: Duration = Duration::from_millis(50);
/// How often a state may lead to the next by what the hardware says, in one look.
const TURNS: u32 = 8;

/// A device that stands still: everything that it takes to go on.
#[derive(Debug, Clone)]
pub(super) struct Remembered {
    pub(super) machine: Machine,
    /// What the list of restoring writes.
    pub(super) registers: Vec<(RegisterId, u32)>,
    pub(super) interrupts: Virtual,
    pub(super) rings: Vec<RingV1>,
    pub(super) blocks: Vec<BlockState>,
    pub(super) transfer: Option<Transfer>,
    /// The memory behind the data port, after a forced stop.
    pub(super) memory: Option<Vec<u8>>,
    /// The card has been another's meanwhile: it is reset first.
    pub(super) foreign: bool,
    /// What lies in that memory is not this guest's.
    pub(super) wipe: bool,
}

impl<H: Hardware> Monitor<H> {
    /// Holds the device if it is in a reusable state; else says which state is in the way.
    pub(super) fn recognise(&mut self) -> Result<(), &'static str> {
        if self.parked.is_some() || self.bus.gone() {
            return Ok(());
        }
        self.collect();
        self.follow();
        if let Some((_, state)) = self.machine.busy() {
            self.level();
            self.settle_faults();
            return Err(state);
        }
        let before = self.halt();
        // What came until it halted.
        self.collect();
        self.follow();
        let busy = self.machine.busy();
        self.level();
        self.park(&before, false);
        let Some((_, state)) = busy else { return Ok(()) };
        // It is the guest's turn again.
        if let Err(error) = self.go_on() {
            self.fault(Fault::hardware("deaf", error.to_string()));
        }
        Err(state)
    }

    /// Lets the model follow what the hardware says.
    fn follow(&mut self) {
        for _ in 0..TURNS {
            if self.machine.reusable() || !self.ask_hardware() {
                return;
            }
        }
    }

    /// Stops the device where it is. What was under way is remembered and taken up again; a transmission that the hardware does not
    /// finish in time is sent again from its descriptors or, on a card without rings, lost as on a bad wire.
    pub(super) fn force(&mut self) {
        if self.parked.is_some() || self.bus.gone() {
            return;
        }
        let deadline = Instant::now() + FINISHES;
        loop {
            self.collect();
            self.follow();
            let waits =
                self.machine.awaits().next().is_some() || self.machine.awaits_rings().next().is_some();
            if self.machine.reusable() || !waits || Instant::now() >= deadline || self.bus.gone() {
                break;
            }
            std::thread::yield_now();
        }
        let before = self.halt();
        self.collect();
        let busy = !self.machine.reusable();
        self.level();
        self.park(&before, busy);
    }

    /// Keeps the hardware from beginning anything by itself. Gives what the registers said before.
    fn halt(&mut self) -> Vec<(RegisterId, u32)> {
        let mut before = Vec::new();
        for at in 0..self.plan.halt.len() {
            let (register, mask, with) = match self.plan.halt[at] {
                Step::Saved { register, mask, with } => (register, mask, with),
                Step::Value(register, value) => (register, 0, value),
                Step::Ring(_) | Step::Memory | Step::Shown(..) => continue,
            };
            let value = self.present(register);
            before.push((register, value));
            self.poke(register, value & mask | with);
        }
        self.rechoose();
        before
    }

    /// What a register says, or what the guest last wrote where it cannot be read.
    fn present(&mut self, id: RegisterId) -> u32 {
        if self.recalled & bit(id) != 0 {
            return self.machine.value(id);
        }
        match self.plan.role(id) {
            Role::Status => self.status_kept(),
            Role::Mask => self.interrupts.mask,
            Role::Base { ring, high } => self.base_half(ring, high),
            Role::Block { block, high } => self.block_half(block, high),
            Role::Plain | Role::Port => match self.machine.register(id).reads {
                Reads::Never | Reads::Effect => self.machine.value(id),
                Reads::Plain | Reads::Alive => self.peek(id),
            },
        }
    }

    /// Remembers a halted device, and takes memory, rings and interrupts from the hardware.
    fn park(&mut self, before: &[(RegisterId, u32)], whole: bool) {
        self.learn_address();
        let mut registers = Vec::new();
        let saved: Vec<RegisterId> = self.plan.saved().collect();
        for id in saved {
            let known = before.iter().find(|(halted, _)| *halted == id).map(|(_, value)| *value);
            let value = known.unwrap_or_else(|| self.present(id));
            registers.push((id, value));
        }
        let transfer = self.open_transfer();
        let memory = if whole { self.save_memory(&registers) } else { None };
        self.poke(self.plan.mask, 0);
        self.rechoose();
        let silenced = self.bus.hardware().master(false);
        self.bus.judge(silenced);
        let mut rings = Vec::new();
        for ring in &mut self.rings {
            ring.harvest(&self.ground);
            let unfinished = ring.recall(&self.ground);
            rings.push(ring.save(unfinished));
        }
        for at in 0..self.blocks.len() {
            // It may have been written in part.
            if let (Some(gpa), Some(table)) = (self.blocks[at].busy, self.model.blocks.get(at)) {
                self.ground.view().wrote(gpa, table.size.into());
            }
        }
        self.parked = Some(Box::new(Remembered {
            machine: self.machine.clone(),
            registers,
            interrupts: self.interrupts,
            rings,
            blocks: self.blocks.clone(),
            transfer,
            memory,
            foreign: false,
            wipe: false,
        }));
        self.counts.happened(What::Parked);
        self.settle_faults();
    }

    /// Reads the memory of a halted card: started for that as it is when it is brought back, keeping no frame, and halted again.
    fn save_memory(&mut self, registers: &[(RegisterId, u32)]) -> Option<Vec<u8>> {
        self.open_port(registers)?;
        let bytes = self.read_memory();
        self.halt();
        bytes
    }

    /// Leaves nothing in the memory behind the data port.
    pub(super) fn wipe(&mut self) {
        if !self.bus.gone() && self.open_port(&[]).is_some() {
            self.fill_memory(None);
            self.halt();
        }
    }

    /// Everything that comes before the memory is brought back. `None`: it has none.
    fn open_port(&mut self, registers: &[(RegisterId, u32)]) -> Option<()> {
        let end = self.plan.restore.iter().position(|step| matches!(step, Step::Memory))?;
        for at in 0..end {
            match self.plan.restore[at] {
                Step::Saved { register, mask, with } => self.write_saved(register, mask, with, registers),
                Step::Value(register, value) => self.poke(register, value),
                Step::Ring(_) | Step::Memory | Step::Shown(..) => {}
            }
        }
        Some(())
    }

    fn write_saved(&mut self, id: RegisterId, mask: u32, with: u32, registers: &[(RegisterId, u32)]) {
        // What is virtual is not the hardware's.
        if self.plan.role(id) != Role::Plain {
            return;
        }
        if let Some((_, value)) = registers.iter().find(|(saved, _)| *saved == id) {
            self.poke(id, value & mask | with);
        }
    }

    /// As after a reset: the device stands still, and goes on from there.
    pub(super) fn remember_fresh(&mut self) {
        self.machine.reset();
        self.learn_bank();
        // Where a predecessor left off is not taken over.
        self.address_told = (true, true);
        self.park(&[], false);
        if let Some(parked) = &mut self.parked {
            parked.wipe = true;
        }
    }

    /// As at power-on.
    pub(super) fn start_over(&mut self) {
        self.config.reset();
        self.line.disable(false);
        self.parked = None;
        self.forget();
        (self.stopped, self.storm, self.idle) = (false, false, 0);
        let silenced = self.bus.hardware().master(false);
        self.bus.judge(silenced);
        let reset = self.reset_hardware();
        if self.unusable.take().is_some()
            && let Some(page) = &self.page
        {
            page.fill(0);
        }
        if let Err(error) = reset
            && !self.bus.gone()
        {
            let text = error.to_string();
            self.fault(Fault::hardware("not-reset", text.clone()));
            self.unusable = Some(text);
            self.cry();
        }
        self.remember_fresh();
        self.counts.happened(What::Reset);
        self.level();
        self.show_all();
        self.settle_faults();
    }

    /// Resets the hardware, by the bus or by its registers, and waits for the end of that.
    pub(super) fn reset_hardware(&mut self) -> Result<(), HardwareError> {
        match self.bus.hardware().reset() {
            Ok(true) => {
                self.bus.bank = 0;
                return Ok(());
            }
            Ok(false) => {}
            Err(error) => {
                self.bus.judge(Err(error));
            }
        }
        if self.bus.gone() {
            return Err(self.lost());
        }
        self.bus.bank = 0;
        let mut reset = self.plan.reset.reset(self.bus.hardware());
        if let Err(HardwareError::StuckInReset { .. }) = &reset {
            reset = self.reset_with_the_bus();
        }
        if let Err(HardwareError::Gone { .. }) = &reset {
            let gone = self.lost();
            self.bus.judge(Err(gone));
        }
        reset
    }

    /// The second try. A card that was given descriptors may not end its reset before it has done with those that it has begun, which it
    /// cannot while it is kept off the bus. It finds no further ones; what it has begun goes to the memory of the guest that gave them, or
    /// nowhere if that is gone.
    fn reset_with_the_bus(&mut self) -> Result<(), HardwareError> {
        for ring in &mut self.rings {
            ring.disown();
        }
        self.bus.hardware().master(true)?;
        let reset = self.plan.reset.reset(self.bus.hardware());
        let silenced = self.bus.hardware().master(false);
        reset.and(silenced)
    }

    pub(super) fn lost(&mut self) -> HardwareError {
        HardwareError::Gone { function: self.bus.hardware().name().to_owned() }
    }

    /// Takes the device up again where it was remembered. An error leaves it standing still.
    pub(super) fn go_on(&mut self) -> Result<(), MonitorError> {
        let Some(remembered) = self.parked.take() else { return Ok(()) };
        // What is gone answers all accesses with all ones: a guest must not wait for it.
        if let Err(error) = self.bring_back(&remembered)
            && !self.bus.gone()
        {
            self.parked = Some(remembered);
            self.settle_faults();
            return Err(error.into());
        }
        self.counts.happened(What::Resumed);
        Ok(())
    }

    fn bring_back(&mut self, remembered: &Remembered) -> Result<(), HardwareError> {
        if self.bus.gone() {
            return Err(self.lost());
        }
        if remembered.foreign {
            let silenced = self.bus.hardware().master(false);
            self.bus.judge(silenced);
            self.reset_hardware()?;
        }
        self.adopt(remembered);
        self.interrupts = remembered.interrupts;
        self.blocks.clone_from(&remembered.blocks);
        self.transfer = None;
        for (ring, saved) in self.rings.iter_mut().zip(&remembered.rings) {
            ring.load(saved);
        }
        self.lend_bus();
        for at in 0..self.plan.restore.len() {
            let step = self.plan.restore[at];
            self.restore(step, remembered);
        }
        self.poke(self.plan.mask, self.interrupts.mask);
        // The address was written with the rest.
        self.address_told = (true, true);
        if let Some(transfer) = remembered.transfer {
            self.continue_transfer(transfer);
        }
        self.rechoose();
        for at in 0..self.blocks.len() {
            self.write_block_again(at);
        }
        // Law 2: every ring is looked at again; what had not been sent is.
        for ring in 0..self.rings.len() {
            self.send_again(ring);
        }
        self.collect();
        // Law 3: the interrupt may have been lost on the way.
        let told = self.line.level() && self.line.masked();
        self.level();
        if told && self.line.level() {
            self.line.trigger();
        }
        self.masked = true;
        self.unmask();
        self.show_all();
        self.settle_faults();
        if self.bus.gone() { Err(self.lost()) } else { Ok(()) }
    }

    fn restore(&mut self, step: Step, remembered: &Remembered) {
        match step {
            Step::Saved { register, mask, with } => {
                self.write_saved(register, mask, with, &remembered.registers);
            }
            Step::Value(register, value) => self.poke(register, value),
            Step::Ring(ring) => {
                let at = usize::from(ring);
                if self.rings.get(at).is_some_and(|ring| ring.running) {
                    self.rings[at].go_on();
                    self.replenish(at);
                    self.point(at);
                }
            }
            // Hardware that was this guest's all the time has its own.
            Step::Shown(register, _) if remembered.foreign => {
                let saved = remembered.registers.iter().find(|(id, _)| *id == register);
                self.machine.note(register, saved.map_or(0, |(_, value)| *value));
                self.recalled |= bit(register);
            }
            Step::Shown(..) => {}
            Step::Memory => {
                if remembered.memory.is_some() || remembered.wipe {
                    self.fill_memory(remembered.memory.as_deref());
                }
            }
        }
    }

    /// A block whose writing was cut off is written again.
    fn write_block_again(&mut self, at: usize) {
        let Some((state, table)) = self.blocks.get(at).copied().zip(self.model.blocks.get(at)) else {
            return;
        };
        let (Some(gpa), Some((low, high))) = (state.busy, self.plan.blocks.get(at).copied()) else { return };
        if let Some(bus) = self.ground.bus(gpa, table.size.into(), Way::Write) {
            self.poke(high, (bus >> 32) as u32);
            self.poke(low, bus as u32 & !table.flags | state.low & table.flags);
            self.rechoose();
        } else if let Some(state) = self.blocks.get_mut(at) {
            state.busy = None;
        }
    }

    /// Gives the hardware what a transmit ring has for it, and rings.
    fn send_again(&mut self, at: usize) {
        let Some(ring) = self.rings.get(at) else { return };
        if ring.table.flow != Flow::Transmit || !ring.live || !ring.rung {
            return;
        }
        if let Err(fault) = self.vet(at as u8) {
            return self.fault(fault);
        }
        if self.publish(at) > 0
            && let Some((bell, bits)) = self.plan.doorbells[at]
        {
            self.poke(bell, bits);
            self.rechoose();
        }
    }
}
