//! Interrupts: the hardware's are ours, the guest has virtual ones (V8).
//!
//! The hardware's status is read and cleared at each of its interrupts, and whenever the guest looks at its own. What came of it
//! stands in the virtual status until the guest clears it there. Rings are looked at between clearing the hardware's status and
//! showing the guest's: when a bit is seen, what it speaks of is in guest memory, and what comes later has its bit set again.
//!
//! While the guest's line is up the hardware's stays masked: the guest already has a reason to look.

use ioplane_hardware::Hardware;
use ioplane_model::{Await, ModelInput, Reads, RegisterId};

use super::Monitor;
use super::bus::{bit, full};
use super::counts::MonitorFault;

/// Interrupts in a row without any effect, until they are no longer listened to.
pub(super) const STORM: u32 = 128;
/// Registers that are asked for what a state waits for, at most.
const AWAITS: usize = 16;

impl<H: Hardware> Monitor<H> {
    /// The status as a guest reads it, live bits asked of the hardware by [`Monitor::collect`] just before.
    pub(super) fn status(&self) -> u32 {
        self.status_kept()
    }

    pub(super) fn status_kept(&self) -> u32 {
        let live = self.card.model.interrupts.live;
        self.guest.interrupts.status & !live | self.guest.interrupts.live & live
    }

    /// Takes the hardware's status over and looks at the rings. Gives the bits that came, and how many descriptors.
    pub(super) fn collect(&mut self) -> (u32, u32) {
        let register = self.guest.machine.register(self.card.plan.status);
        let raw = self.peek(self.card.plan.status);
        if raw == full(register) {
            self.card.bus.suspect();
        }
        if self.card.bus.gone() {
            self.settle_faults();
            return (0, 0);
        }
        let live = self.card.model.interrupts.live;
        // A bit that says asserted is no cause.
        let asserted = self.card.plan.split.map_or(0, |split| split.asserted);
        let fresh = raw & !live & !asserted;
        if fresh != 0 {
            self.poke(self.card.plan.status, fresh);
        }
        self.rechoose();
        let done = self.look();
        let risen = raw & live & !self.guest.interrupts.live;
        self.guest.interrupts.live = raw & live;
        self.guest.interrupts.status |= fresh;
        if self.guest.recalled != 0 {
            let anew = self.card.plan.shown().filter(|(_, until)| fresh & until != 0);
            self.guest.recalled &= !anew.fold(0, |bits, (id, _)| bits | bit(id));
            self.show_alive();
        }
        if fresh | risen != 0 {
            self.tell(ModelInput::Interrupt { bits: fresh | risen });
            self.look_again();
        }
        if (fresh | risen) & !self.card.model.interrupts.traffic != 0 {
            self.show_alive();
        }
        self.show_status();
        (fresh, done)
    }

    /// A state that an interrupt led to may wait for what the rings have shown already.
    fn look_again(&mut self) {
        if !self.guest.machine.reusable() {
            self.look();
        }
    }

    /// Shows the virtual status in the shadow page.
    pub(super) fn show_status(&mut self) {
        if self.guest.page.as_ref().is_some_and(super::page::Page::used) {
            self.show(self.card.plan.status);
        }
    }

    /// The guest's line, as status and mask say.
    pub(super) fn level(&mut self) {
        let up = self.status_kept() & self.guest.interrupts.mask & self.card.model.interrupts.bits != 0;
        let up = up && !self.card.dead() && !self.guest.stopped;
        self.guest.config.set_interrupt(up);
        self.guest.line.set(up);
    }

    /// The hardware's mask. It is never masked by an access to its status: that is played to the guest.
    pub(super) fn mask_hardware(&mut self, mask: u32) {
        if let Some(split) = self.card.plan.split {
            self.poke(split.clear, !mask);
        }
        if self.card.plan.split.is_none() || mask != 0 {
            self.poke(self.card.plan.mask, mask);
        }
    }

    /// The guest reads a status whose reading clears it.
    pub(super) fn read_split(&mut self) -> u32 {
        let status = self.status_kept();
        let Some(split) = self.card.plan.split else { return status };
        let asserted = status & self.guest.interrupts.mask & self.card.model.interrupts.bits != 0;
        if asserted || self.guest.interrupts.mask == 0 {
            self.guest.interrupts.status = 0;
        }
        self.mask_automatically(asserted);
        if asserted { status | split.asserted } else { status }
    }

    /// The guest has accessed its status while an interrupt was asserted.
    pub(super) fn mask_automatically(&mut self, asserted: bool) {
        let Some(split) = self.card.plan.split.filter(|_| asserted) else { return };
        if self.guest.machine.value(split.auto_on.0) & split.auto_on.1 != 0 {
            let mask = self.guest.interrupts.mask & !self.guest.machine.value(split.auto);
            self.set_virtual_mask(mask);
        }
    }

    /// The guest's mask, and the hardware's with it.
    pub(super) fn set_virtual_mask(&mut self, mask: u32) {
        self.guest.interrupts.mask = mask;
        self.mask_hardware(mask);
        self.rechoose();
    }

    /// After the guest has touched its status or mask: its line, and if that is down the hardware may interrupt again.
    pub(super) fn relieved(&mut self) {
        if self.card.storm {
            // One more try for each time that the guest asks.
            (self.card.storm, self.card.idle) = (false, STORM - 1);
        }
        self.level();
        self.unmask();
    }

    pub(super) fn unmask(&mut self) {
        if self.card.masked && !self.guest.line.level() && !self.card.storm && !self.card.dead() {
            self.card.masked = false;
            let unmasked = self.card.bus.hardware().unmask();
            self.card.bus.judge(unmasked);
            self.settle_faults();
        }
    }

    /// An interrupt of the hardware, if there is one.
    pub(super) fn hear(&mut self) {
        if self.card.dead() || !self.card.bus.hardware().take_interrupt() {
            return;
        }
        self.card.counts.totals.heard += 1;
        self.stir_page();
        self.card.masked = true;
        if self.card.parked.is_some() {
            // Nothing happens now; it is asked again when the device goes on.
            return;
        }
        let (fresh, done) = self.collect();
        self.level();
        if fresh & self.guest.interrupts.mask == 0 && done == 0 && !self.guest.line.level() {
            self.card.idle = self.card.idle.saturating_add(1);
            if self.card.idle >= STORM && !self.card.storm {
                self.card.storm = true;
                let text = format!("{STORM} interrupts in a row without a reason; no longer listened to");
                self.fault(MonitorFault::hardware("storm", text));
            }
        } else {
            self.card.idle = 0;
        }
        self.unmask();
    }

    /// Asks the hardware for what the present states wait for. False: nothing came of it.
    pub(super) fn ask_hardware(&mut self) -> bool {
        let before = self.guest.machine.updates();
        for at in 0..self.guest.blocks.len() {
            self.ask_block(at);
        }
        let mut awaits = [None::<Await>; AWAITS];
        for (place, wait) in awaits.iter_mut().zip(self.guest.machine.awaits()) {
            *place = Some(wait);
        }
        for wait in awaits.into_iter().flatten() {
            let value = self.peek(wait.register);
            self.rechoose();
            if value & wait.mask == wait.is && !self.card.bus.gone() {
                self.tell(ModelInput::Became { register: wait.register, value });
            }
        }
        for condition in 0..self.guest.machine.conditions().len() as u8 {
            // Asked one by one: what is told of one may end the wait for the next.
            if self.guest.machine.awaits_conditions().any(|waits| waits == condition)
                && self.came_to_hold(condition)
            {
                self.tell(ModelInput::Holds { condition });
            }
        }
        self.look();
        self.settle_faults();
        self.guest.machine.updates() != before
    }

    /// Whether a condition that a state waits for holds, by the hardware's registers where they can be read and by what was written
    /// where they cannot.
    fn came_to_hold(&mut self, condition: u8) -> bool {
        let Some(condition) = self.card.plan.awaited.get(usize::from(condition)).copied() else {
            return false;
        };
        let read = |id: RegisterId| match self.guest.machine.register(id).reads {
            Reads::Plain | Reads::Alive => self.peek(id),
            Reads::Never | Reads::Effect => self.guest.machine.value(id),
        };
        let holds = condition.inputs.give(read, condition.table.holds);
        self.rechoose();
        holds && !self.card.bus.gone()
    }
}
