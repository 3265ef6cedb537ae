//! Stillness, recognised: the device is halted in a state from which it can change hands, looked at once more, and remembered.
//! And the way back: on the same card, or on one that was reset.

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{Flow, Machine, Reads, RegisterId, Transfer, Way};

use super::bus::{bit, full};
use super::counts::{MonitorEventKind, MonitorFault};
use super::guest::{BlockState, Virtual};
use super::plan::{Role, Step};
use super::rings::RingV1;
use super::rings::queue::{Queue, QueueV1};
use super::words::{Tables, Unread};
use super::{Monitor, MonitorError};

/// How long a forced stop waits for what the hardware would finish by itself: a frame on the wire.
const FINISHES: Duration = Duration::from_millis(50);
/// How often a state may lead to the next by what the hardware says, in one look.
const TURNS: u32 = 8;

/// A device that stands still: everything that it takes to go on.
#[derive(Debug, Clone)]
pub(super) struct QuiescentState {
    pub(super) machine: Machine,
    /// What the list of restoring writes.
    pub(super) registers: Vec<(RegisterId, u32)>,
    pub(super) interrupts: Virtual,
    pub(super) rings: Vec<RingV1>,
    /// Of rings that are followed to their tails; of others there is nothing in it.
    pub(super) queues: Vec<QueueV1>,
    pub(super) tables: Tables,
    pub(super) unread: Unread,
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
        if self.card.parked.is_some() || self.card.bus.gone() {
            return Ok(());
        }
        self.collect();
        self.follow();
        if let Some((_, state)) = self.guest.machine.busy() {
            self.level();
            self.settle_faults();
            return Err(state);
        }
        let before = self.halt();
        // What came until it halted.
        self.collect();
        self.follow();
        let busy = self.guest.machine.busy();
        self.level();
        self.park(&before, false);
        let Some((_, state)) = busy else { return Ok(()) };
        // It is the guest's turn again.
        if let Err(error) = self.go_on() {
            self.fault(MonitorFault::hardware("deaf", error.to_string()));
        }
        Err(state)
    }

    /// Lets the model follow what the hardware says.
    fn follow(&mut self) {
        for _ in 0..TURNS {
            if self.guest.machine.reusable() || !self.ask_hardware() {
                return;
            }
        }
    }

    /// Stops the device where it is. What was under way is remembered and taken up again; a transmission that the hardware does not
    /// finish in time is sent again from its descriptors or, on a card without rings, lost as on a bad wire.
    pub(super) fn force(&mut self) {
        if self.card.parked.is_some() || self.card.bus.gone() {
            return;
        }
        let deadline = Instant::now() + FINISHES;
        loop {
            self.collect();
            self.follow();
            let waits = self.guest.machine.awaits().next().is_some()
                || self.guest.machine.awaits_rings().next().is_some();
            if self.guest.machine.reusable() || !waits || Instant::now() >= deadline || self.card.bus.gone() {
                break;
            }
            std::thread::yield_now();
        }
        let before = self.halt();
        self.collect();
        let busy = !self.guest.machine.reusable();
        self.level();
        self.park(&before, busy);
    }

    /// Keeps the hardware from beginning anything by itself. Gives what the registers said before.
    pub(super) fn halt(&mut self) -> Vec<(RegisterId, u32)> {
        let mut before = Vec::new();
        for at in 0..self.card.plan.halt.len() {
            let (register, mask, with) = match self.card.plan.halt[at] {
                Step::Saved { register, mask, with } => (register, mask, with),
                Step::Value(register, value) => (register, 0, value),
                Step::Ring(_) | Step::Memory | Step::Shown(..) | Step::Table(..) => continue,
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
        if self.guest.recalled & bit(id) != 0 {
            return self.guest.machine.value(id);
        }
        match self.card.plan.role(id) {
            Role::Plain if self.guest.machine.register(id).kept != 0 => self.with_kept(id),
            Role::Plain | Role::Port => match self.guest.machine.register(id).reads {
                Reads::Never | Reads::Effect => self.guest.machine.value(id),
                Reads::Plain | Reads::Alive => self.peek(id),
            },
            role => self.kept_word(role),
        }
    }

    /// What the guest finds in a register that the monitor keeps; 0 for those that no list names and no page has.
    pub(super) fn kept_word(&self, role: Role) -> u32 {
        match role {
            Role::Status => self.status_kept(),
            Role::Mask => self.guest.interrupts.mask,
            Role::Base { ring, high } => self.guest.base_half(ring, high),
            Role::Block { block, high } => self.guest.block_half(block, high),
            // Kept elsewhere; their models have registers whose reading has an effect.
            Role::Length { .. }
            | Role::Head { .. }
            | Role::Tail { .. }
            | Role::Unmask
            | Role::Cause
            | Role::Table
            | Role::Counters
            | Role::Plain
            | Role::Port => 0,
        }
    }

    /// Remembers a halted device, and takes memory, rings and interrupts from the hardware.
    fn park(&mut self, before: &[(RegisterId, u32)], whole: bool) {
        self.learn_address();
        let mut registers = Vec::new();
        let saved: Vec<RegisterId> = self.card.plan.saved().collect();
        for id in saved {
            let known = before.iter().find(|(halted, _)| *halted == id).map(|(_, value)| *value);
            let value = known.unwrap_or_else(|| self.present(id));
            registers.push((id, value));
        }
        let transfer = self.open_transfer();
        let memory = if whole { self.save_memory(&registers) } else { None };
        self.mask_hardware(0);
        self.rechoose();
        self.keep_counters();
        self.card.silence();
        let mut rings = Vec::new();
        for ring in &mut self.guest.rings {
            ring.harvest(&self.guest.dma);
            let unfinished = ring.recall(&self.guest.dma);
            rings.push(ring.save(unfinished));
        }
        let queues = self
            .guest
            .rings
            .iter()
            .map(|ring| ring.queue.as_ref().map_or_else(QueueV1::default, Queue::save));
        for at in 0..self.guest.blocks.len() {
            // It may have been written in part.
            if let (Some(gpa), Some(table)) = (self.guest.blocks[at].busy, self.card.model.blocks.get(at)) {
                self.guest.dma.view().wrote(gpa, table.size.into());
            }
        }
        self.card.parked = Some(Box::new(QuiescentState {
            machine: self.guest.machine.clone(),
            registers,
            interrupts: self.guest.interrupts,
            rings,
            queues: queues.collect(),
            tables: self.guest.tables.clone(),
            unread: self.guest.unread.clone(),
            blocks: self.guest.blocks.clone(),
            transfer,
            memory,
            foreign: false,
            wipe: false,
        }));
        self.card.counts.happened(MonitorEventKind::Parked);
        self.settle_faults();
    }

    /// Reads the memory of a halted card: started for that as it is when it is brought back, keeping no frame, and halted again.
    fn save_memory(&mut self, registers: &[(RegisterId, u32)]) -> Option<Vec<u8>> {
        self.open_port(registers)?;
        let bytes = self.read_memory();
        self.halt();
        bytes
    }

    /// Everything that comes before the memory is brought back. `None`: it has none.
    pub(super) fn open_port(&mut self, registers: &[(RegisterId, u32)]) -> Option<()> {
        let end = self.card.plan.restore.iter().position(|step| matches!(step, Step::Memory))?;
        for at in 0..end {
            match self.card.plan.restore[at] {
                Step::Saved { register, mask, with } => self.write_saved(register, mask, with, registers),
                Step::Value(register, value) => self.poke(register, value),
                Step::Ring(_) | Step::Memory | Step::Shown(..) | Step::Table(..) => {}
            }
        }
        Some(())
    }

    fn write_saved(&mut self, id: RegisterId, mask: u32, with: u32, registers: &[(RegisterId, u32)]) {
        // What is virtual is not the hardware's.
        if self.card.plan.role(id) != Role::Plain {
            return;
        }
        let kept = self.guest.machine.register(id).kept;
        if kept & full(self.guest.machine.register(id)) == full(self.guest.machine.register(id)) {
            return;
        }
        if let Some((_, value)) = registers.iter().find(|(saved, _)| *saved == id) {
            self.poke(id, (value & mask | with) & !kept);
        }
    }

    /// As after a reset: the device stands still, and goes on from there.
    pub(super) fn remember_fresh(&mut self) {
        self.guest.machine.reset();
        self.learn_bank();
        // Where a predecessor left off is not taken over.
        self.card.address_told = (true, true);
        self.park(&[], false);
        // What it has counted for others is not the next guest's.
        self.guest.unread.clear();
        if let Some(parked) = &mut self.card.parked {
            parked.wipe = true;
            parked.unread.clear();
        }
    }

    /// As at power-on.
    pub(super) fn start_over(&mut self) {
        self.guest.config.reset();
        self.guest.line.disable(false);
        self.card.parked = None;
        self.forget();
        (self.guest.stopped, self.card.storm, self.card.idle) = (false, false, 0);
        self.guest.reset_at = self.card.counts.totals.accesses;
        self.card.silence();
        let reset = self.reset_hardware();
        if self.card.unusable.take().is_some()
            && let Some(page) = &self.guest.page
        {
            page.fill(0);
        }
        if let Err(error) = reset
            && !self.card.bus.gone()
        {
            self.keep_guest_out("not-reset", &error);
        }
        self.remember_fresh();
        self.card.counts.happened(MonitorEventKind::Reset);
        self.level();
        self.show_all();
        self.settle_faults();
    }

    /// Leaves the hardware alone, off the bus, until a reset and a wipe succeed: its guest reads all ones, and no other is admitted.
    fn keep_guest_out(&mut self, name: &'static str, error: &HardwareError) {
        let text = error.to_string();
        self.card.silence();
        self.fault(MonitorFault::hardware(name, text.clone()));
        self.card.unusable = Some(text);
        self.guest.line.set(false);
        self.show_dead();
        self.guest.cry();
    }

    /// Between two guests: resets hardware that could not be reset or wiped, and wipes it before its guest comes, so that it is refused.
    pub(super) fn try_again(&mut self) {
        self.start_over();
        if self.card.dead() {
            return;
        }
        let wiped = self.wipe().and_then(|()| self.reset_hardware());
        self.remember_fresh();
        if let Err(error) = wiped
            && !self.card.bus.gone()
        {
            self.keep_guest_out("not-wiped", &error);
        }
        self.settle_faults();
    }

    /// Resets the hardware, by the bus or by its registers, and waits for the end of that.
    pub(super) fn reset_hardware(&mut self) -> Result<(), HardwareError> {
        match self.card.bus.hardware().reset() {
            // Not every bus resets rings.
            Ok(true) if !self.card.plan.follows_tails() => {
                self.card.bus.bank = 0;
                return Ok(());
            }
            Ok(_) => {}
            Err(error) => {
                self.card.bus.judge(Err(error));
            }
        }
        if self.card.bus.gone() {
            return Err(self.card.lost());
        }
        self.reset_by_registers()
    }

    fn reset_by_registers(&mut self) -> Result<(), HardwareError> {
        self.card.bus.bank = 0;
        let mut reset = self.card.plan.reset.reset(self.card.bus.hardware());
        if let Err(HardwareError::StuckInReset { .. }) = &reset {
            reset = self.reset_with_the_bus();
        }
        if let Err(HardwareError::Gone { .. }) = &reset {
            let gone = self.card.lost();
            self.card.bus.judge(Err(gone));
        }
        reset
    }

    /// The second try. A card that was given descriptors may not end its reset before it has done with those that it has begun, which it
    /// cannot while it is kept off the bus. It finds no further ones; what it has begun goes to the memory of the guest that gave them, or
    /// nowhere if that is gone.
    fn reset_with_the_bus(&mut self) -> Result<(), HardwareError> {
        for ring in &mut self.guest.rings {
            ring.disown();
        }
        self.card.bus.hardware().master(true)?;
        let reset = self.card.plan.reset.reset(self.card.bus.hardware());
        let silenced = self.card.bus.hardware().master(false);
        reset.and(silenced)
    }

    /// Takes the device up again where it was remembered. An error leaves it standing still.
    pub(super) fn go_on(&mut self) -> Result<(), MonitorError> {
        let Some(remembered) = self.card.parked.take() else { return Ok(()) };
        // What is gone answers all accesses with all ones: a guest must not wait for it.
        if let Err(error) = self.bring_back(&remembered)
            && !self.card.bus.gone()
        {
            self.card.parked = Some(remembered);
            self.settle_faults();
            if matches!(error, HardwareError::NotWiped { .. }) {
                self.halt();
                self.keep_guest_out("not-wiped", &error);
                self.settle_faults();
                return Ok(());
            }
            return Err(error.into());
        }
        self.card.counts.happened(MonitorEventKind::Resumed);
        Ok(())
    }

    fn bring_back(&mut self, remembered: &QuiescentState) -> Result<(), HardwareError> {
        if self.card.bus.gone() {
            return Err(self.card.lost());
        }
        if remembered.foreign {
            self.card.silence();
            self.reset_hardware()?;
        } else if self.card.plan.follows_tails() {
            self.card.silence();
            self.reset_by_registers()?;
        }
        self.adopt(remembered);
        self.guest.interrupts = remembered.interrupts;
        self.guest.blocks.clone_from(&remembered.blocks);
        self.guest.transfer = None;
        for (ring, saved) in self.guest.rings.iter_mut().zip(&remembered.rings) {
            ring.load(saved);
        }
        for (ring, saved) in self.guest.rings.iter_mut().zip(&remembered.queues) {
            if let Some(queue) = &mut ring.queue {
                queue.load(saved);
            }
        }
        self.guest.tables.clone_from(&remembered.tables);
        self.guest.unread.clone_from(&remembered.unread);
        self.card.bus.forget_failure();
        self.lend_bus();
        for at in 0..self.card.plan.restore.len() {
            let step = self.card.plan.restore[at];
            self.restore(step, remembered)?;
        }
        self.mask_hardware(self.guest.interrupts.mask);
        // The address was written with the rest.
        self.card.address_told = (true, true);
        if let Some(transfer) = remembered.transfer {
            self.continue_transfer(transfer);
        }
        self.rechoose();
        for at in 0..self.guest.blocks.len() {
            self.write_block_again(at);
        }
        // Invariant 2: every ring is looked at again; what had not been sent is.
        for ring in 0..self.guest.rings.len() {
            self.send_again(ring);
        }
        self.collect();
        // Invariant 3: the interrupt may have been lost on the way.
        let told = self.guest.line.level() && self.guest.line.masked();
        self.level();
        if told && self.guest.line.level() {
            self.guest.line.trigger();
        }
        self.card.masked = true;
        self.unmask();
        self.show_all();
        self.settle_faults();
        if self.card.bus.gone() { Err(self.card.lost()) } else { Ok(()) }
    }

    fn restore(&mut self, step: Step, remembered: &QuiescentState) -> Result<(), HardwareError> {
        match step {
            Step::Saved { register, mask, with } => {
                self.write_saved(register, mask, with, &remembered.registers);
            }
            Step::Value(register, value) => self.poke(register, value),
            Step::Ring(ring) => {
                let at = usize::from(ring);
                if self.guest.rings.get(at).is_some_and(|ring| ring.running) {
                    self.guest.rings[at].go_on();
                    self.replenish(at);
                    // One that is followed to its tail is pointed at before that is written.
                    if self.guest.rings[at].queue.is_none() {
                        self.point(at);
                    }
                }
            }
            // Hardware that was this guest's all the time has its own.
            Step::Shown(register, _) if remembered.foreign => {
                let saved = remembered.registers.iter().find(|(id, _)| *id == register);
                self.guest.machine.note(register, saved.map_or(0, |(_, value)| *value));
                self.guest.recalled |= bit(register);
            }
            Step::Shown(..) => {}
            Step::Table(id, preset) => self.restore_table(id, preset),
            Step::Memory => {
                if remembered.memory.is_some() || remembered.wipe {
                    self.fill_memory(remembered.memory.as_deref())?;
                }
            }
        }
        Ok(())
    }

    /// A block whose writing was cut off is written again.
    fn write_block_again(&mut self, at: usize) {
        let Some((state, table)) = self.guest.blocks.get(at).copied().zip(self.card.model.blocks.get(at))
        else {
            return;
        };
        let (Some(gpa), Some((low, high))) = (state.busy, self.card.plan.blocks.get(at).copied()) else {
            return;
        };
        if let Some(bus) = self.guest.dma.bus(gpa, table.size.into(), Way::Write) {
            self.poke(high, (bus >> 32) as u32);
            self.poke(low, bus as u32 & !table.flags | state.low & table.flags);
            self.rechoose();
        } else if let Some(state) = self.guest.blocks.get_mut(at) {
            state.busy = None;
        }
    }

    /// Gives the hardware what a transmit ring has for it, and rings.
    fn send_again(&mut self, at: usize) {
        let Some(ring) = self.guest.rings.get(at) else { return };
        if ring.table.flow != Flow::Transmit || !ring.live || !ring.rung {
            return;
        }
        if let Err(fault) = self.vet(at as u8) {
            return self.fault(fault);
        }
        if self.publish(at) > 0
            && let Some((doorbell, bits)) = self.card.plan.doorbells[at]
        {
            self.poke(doorbell, bits);
            self.rechoose();
        }
    }
}
