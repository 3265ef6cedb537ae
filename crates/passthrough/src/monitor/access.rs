//! Accesses of the guest to registers.

use ioplane_hardware::Hardware;
use ioplane_model::{ModelInput, Pending, Piece, RegisterId, Way, Writes};

use super::Monitor;
use super::bus::{bit, full, lanes};
use super::check::Refusal;
use super::counts::MonitorFault;
use super::plan::Role;

/// Widest access of a guest, in bytes.
const WIDEST: usize = 8;

impl<H: Hardware> Monitor<H> {
    /// Whether accesses to that BAR reach registers at all; if not, it is denied.
    fn reaches(&mut self, bar: u8, way: Way, offset: u64, width: usize) -> bool {
        self.card.counts.totals.accesses += 1;
        if self.guest.stopped {
            let text = "the guest was to be stopped; nothing is done for it until the device is reset";
            self.card.counts.fault(MonitorFault::register("stopped", text));
            return false;
        }
        let known = bar == self.card.model.bar || self.card.model.aliases.contains(&bar);
        if known && (1..=WIDEST).contains(&width) {
            return true;
        }
        self.fault(unknown(bar, way, offset, width));
        false
    }

    /// A read. What is denied reads as zero, what is gone as all ones.
    pub(super) fn guest_reads(&mut self, bar: u8, offset: u64, out: &mut [u8]) {
        if self.card.dead() {
            out.fill(0xff);
            return;
        }
        out.fill(0);
        if !self.reaches(bar, Way::Read, offset, out.len()) {
            return;
        }
        let split = self.guest.machine.at(Way::Read, offset, out.len());
        let seen = self.guest.machine.hooks(Way::Read);
        if self.straight(&split, seen | self.card.plan.special | self.guest.recalled, offset, out.len()) {
            self.card.counts.totals.straight += 1;
            self.card.bus.read_at(bar, offset, out);
            self.suspicious(out);
        } else {
            self.count_hooked(&split, seen);
            for piece in split.iter() {
                if self.guest.stopped {
                    break;
                }
                let from = usize::from(piece.from);
                let Some(part) = out.get_mut(from..from + usize::from(piece.width)) else { continue };
                self.read_piece(bar, offset + u64::from(piece.from), piece, part);
            }
        }
        self.settle_faults();
    }

    /// A write. What is denied is dropped.
    pub(super) fn guest_writes(&mut self, bar: u8, offset: u64, bytes: &[u8]) {
        if self.card.dead() || !self.reaches(bar, Way::Write, offset, bytes.len()) {
            return;
        }
        self.stir_page();
        let split = self.guest.machine.at(Way::Write, offset, bytes.len());
        let seen = self.guest.machine.hooks(Way::Write);
        if self.straight(&split, seen | self.card.plan.special | self.card.plan.silent, offset, bytes.len()) {
            self.card.counts.totals.straight += 1;
            self.card.bus.write_at(bar, offset, bytes);
            for piece in split.iter() {
                self.note(piece, bytes);
                self.show_written(piece.register);
            }
        } else {
            self.count_hooked(&split, seen);
            for piece in split.iter() {
                if self.guest.stopped {
                    break;
                }
                self.write_piece(bar, offset + u64::from(piece.from), piece, piece.of(bytes), bytes);
            }
        }
        self.settle_faults();
    }

    /// Whether an access may go to the hardware as it is: the monitor has nothing to see, and the hardware has such accesses.
    fn straight(&self, split: &[Piece], seen: u128, offset: u64, width: usize) -> bool {
        let natural = width.is_power_of_two() && width <= 4 && offset.is_multiple_of(width as u64);
        natural && split.iter().all(|piece| piece.register.is_some_and(|id| seen & bit(id) == 0))
    }

    fn count_hooked(&mut self, split: &[Piece], hooks: u128) {
        let totals = &mut self.card.counts.totals;
        let kept = |piece: &Piece| {
            piece.register.is_none_or(|id| !matches!(self.card.plan.role(id), Role::Plain | Role::Port))
        };
        if split.iter().any(|piece| piece.register.is_some_and(|id| hooks & bit(id) != 0)) {
            totals.hooked += 1;
        } else if split.iter().all(kept) {
            totals.kept += 1;
        } else {
            totals.straight += 1;
        }
    }

    /// All ones where no register has them may be all that is left.
    fn suspicious(&mut self, bytes: &[u8]) {
        if bytes.len() >= 2 && bytes.iter().all(|byte| *byte == 0xff) {
            self.card.bus.suspect();
        }
    }

    /// Keeps the value of a write that the model does not see: it may be saved.
    fn note(&mut self, piece: &Piece, bytes: &[u8]) {
        if let Some(id) = piece.register
            && !matches!(self.guest.machine.register(id).writes, Writes::Clears | Writes::Sets)
        {
            let value = self.guest.machine.merged(piece, bytes);
            self.guest.machine.note(id, value);
        }
    }

    fn read_piece(&mut self, bar: u8, at: u64, piece: &Piece, out: &mut [u8]) {
        let Some(id) = piece.register else {
            return self.fault(unknown(bar, Way::Read, at, out.len()));
        };
        let role = self.card.plan.role(id);
        match role {
            // What has come up until now belongs to what the guest is about to see.
            Role::Status => {
                self.collect();
                self.level();
            }
            Role::Block { block, high: false } => self.ask_block(usize::from(block)),
            // The card may have set it anew.
            _ if self.guest.recalled & bit(id) != 0 => {
                self.collect();
                self.level();
            }
            _ => {}
        }
        if !self.guest.machine.hooked(id, Way::Read) {
            self.answer(bar, at, piece, role, out);
            return self.tell_moved();
        }
        let pending = self.guest.machine.ask(ModelInput::Read { register: id });
        if let Err(refusal) = self.examine(&pending) {
            return self.refuse(refusal);
        }
        self.answer(bar, at, piece, role, out);
        if role == Role::Status && self.card.plan.split.is_some() {
            self.relieved();
        }
        let moves = self.guest.machine.commit(pending);
        self.moved(&moves);
        if moves.reset() {
            self.begun_again();
        } else if role == Role::Plain {
            self.look();
        }
        self.tell_moved();
    }

    /// What the guest reads there.
    fn answer(&mut self, bar: u8, at: u64, piece: &Piece, role: Role, out: &mut [u8]) {
        let value = match role {
            Role::Plain if piece.register.is_some_and(|id| self.guest.recalled & bit(id) != 0) => {
                piece.register.map_or(0, |id| self.guest.machine.value(id))
            }
            Role::Plain if piece.register.is_some_and(|id| self.guest.machine.register(id).kept != 0) => {
                piece.register.map_or(0, |id| self.with_kept(id))
            }
            Role::Plain => {
                self.card.bus.read_at(bar, at, out);
                return self.suspicious(out);
            }
            Role::Port => {
                if let Some(id) = piece.register {
                    self.port_reads(bar, id, out);
                }
                return;
            }
            Role::Status if self.card.plan.split.is_some() => self.read_split(),
            Role::Status => self.status(),
            Role::Mask | Role::Unmask => self.guest.interrupts.mask,
            Role::Base { ring, high } => self.guest.base_half(ring, high),
            Role::Block { block, high } => self.guest.block_half(block, high),
            Role::Length { ring } => self.guest.of_queue(ring, |_, queue| queue.length()),
            Role::Head { ring } => self.guest.of_queue(ring, |ring, _| ring.guest_head().into()),
            Role::Tail { ring } => self.guest.of_queue(ring, |_, queue| queue.tail().into()),
            Role::Cause => 0,
            Role::Table => {
                self.card.bus.read_at(bar, at, out);
                return self.suspicious(out);
            }
            Role::Counters => return self.read_counters(bar, at, out),
        };
        put(value, piece.within, out);
    }

    fn refuse(&mut self, refusal: Refusal) {
        self.guest.rings.iter_mut().for_each(super::rings::ShadowRing::drop_vetted);
        match refusal {
            Refusal::Ignored => {}
            Refusal::Fault(fault) => self.fault(fault),
        }
    }

    fn write_piece(&mut self, bar: u8, at: u64, piece: &Piece, part: &[u8], bytes: &[u8]) {
        let Some(id) = piece.register else {
            return self.fault(unknown(bar, Way::Write, at, part.len()));
        };
        if self.card.plan.role(id) == Role::Status {
            // What has come up until now is cleared too, as it is on the card.
            self.collect();
        }
        let value = self.guest.machine.merged(piece, bytes);
        if !self.guest.machine.hooked(id, Way::Write) {
            // Boot ROM, tests of the chip: what a card keeps beyond its guest. The hardware does not hear of it.
            if self.card.plan.silent & bit(id) != 0 {
                return;
            }
            if let Err(fault) = self.perform(bar, at, piece, id, part, value) {
                return self.fault(fault);
            }
            if !matches!(self.card.plan.role(id), Role::Table) {
                self.note(piece, bytes);
            }
            self.begin_transfer(id, value);
            return self.performed(id);
        }
        let pending = self.guest.machine.ask(ModelInput::Write { register: id, value });
        if let Err(refusal) = self.examine(&pending) {
            return self.refuse(refusal);
        }
        if pending.resets()
            && let Some((register, value)) = self.card.plan.reset.written()
            && std::ptr::eq(register, self.guest.machine.register(id))
        {
            // What else the guest asks for in the same write would come before or after the reset: nobody knows.
            self.card.bus.write(register, value);
        } else if let Err(fault) = self.perform(bar, at, piece, id, part, value) {
            return self.fault(fault);
        }
        self.happen(pending, id, value);
    }

    /// A write that the hardware has heard of happens for the model.
    fn happen(&mut self, pending: Pending, id: RegisterId, value: u32) {
        let moves = self.guest.machine.commit(pending);
        self.moved(&moves);
        if moves.reset() {
            return self.begun_again();
        }
        self.begin_transfer(id, value);
        self.performed(id);
    }

    /// What follows a write.
    fn performed(&mut self, id: RegisterId) {
        // What another card had is not what this one makes of the write.
        self.guest.recalled &= !bit(id);
        match self.card.plan.role(id) {
            Role::Status => {
                self.look();
                self.show_status();
                self.relieved();
            }
            Role::Mask | Role::Unmask | Role::Cause => {
                self.collect();
                self.relieved();
            }
            Role::Port => self.tell_moved(),
            _ => {
                self.look();
            }
        }
        self.show_written(Some(id));
    }

    /// Does what a write asks for, in the hardware and in what is virtual.
    fn perform(
        &mut self,
        bar: u8,
        at: u64,
        piece: &Piece,
        id: RegisterId,
        part: &[u8],
        value: u32,
    ) -> Result<(), MonitorFault> {
        let written = lanes(piece.within, piece.width);
        match self.card.plan.role(id) {
            Role::Status => {
                // The hardware's were cleared when they were collected.
                let raised = self.guest.interrupts.mask & self.card.model.interrupts.bits;
                let asserted = self.status_kept() & raised != 0;
                self.guest.interrupts.status &= !(value & written);
                self.mask_automatically(asserted);
            }
            Role::Mask if self.card.plan.split.is_some() => {
                let mask = self.guest.interrupts.mask | value & self.card.model.interrupts.bits;
                self.set_virtual_mask(mask);
            }
            Role::Unmask => self.set_virtual_mask(self.guest.interrupts.mask & !value),
            Role::Cause => {
                self.guest.interrupts.status |= value & self.card.model.interrupts.bits;
            }
            Role::Mask => {
                self.guest.interrupts.mask = value;
                self.card.bus.write_at(bar, at, part);
            }
            Role::Base { ring, high } => {
                self.guest.movable(ring)?;
                self.guest.set_base(ring, high, value);
            }
            Role::Length { ring } => {
                self.guest.movable(ring)?.set_length(value);
            }
            Role::Head { ring } => {
                let ring = self.guest.movable(ring)?;
                ring.next = value as u16;
                if let Some(queue) = &mut ring.queue {
                    queue.begin_at(value as u16);
                }
            }
            Role::Tail { ring } => self.set_tail(ring, value)?,
            Role::Table => self.write_table(bar, at, part)?,
            Role::Counters => {}
            Role::Block { block, high } => self.set_block(usize::from(block), high, value)?,
            Role::Port => self.port_writes(bar, id, part),
            Role::Plain => {
                self.keeps_shape(id, value)?;
                self.publish_rung(id, value & written)?;
                let register = self.guest.machine.register(id);
                if register.kept != 0 {
                    if register.kept & full(register) != full(register) {
                        self.card.bus.write(register, value & !register.kept);
                    }
                } else if !self.switch(id, value) {
                    self.card.bus.write_at(bar, at, part);
                    if self.card.plan.bank == Some(id)
                        && let Some(banks) = self.card.model.banks
                    {
                        self.card.bus.bank = (value as u8 & banks.mask) >> (banks.shift % 8);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The bytes of a value from `within` on; what is beyond it is zero.
fn put(value: u32, within: u16, out: &mut [u8]) {
    let bytes = value.to_le_bytes();
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = bytes.get(usize::from(within) + at).copied().unwrap_or(0);
    }
}

fn unknown(bar: u8, way: Way, offset: u64, width: usize) -> MonitorFault {
    let doing = if way == Way::Read { "read" } else { "write" };
    MonitorFault::register(
        "unknown-register",
        format!("{doing} of {width} bytes at {offset:#x} of BAR {bar}"),
    )
}
