//! Accesses of the guest to registers.

use super::Monitor;
use super::bus::{bit, full, lanes};
use super::check::{Refusal, outside_block};
use super::counts::{Fault, What};
use super::plan::Role;
use crate::Hardware;
use crate::model::{Flow, Pending, Piece, Reads, RegisterId, Seen, Way, Writes};

/// Widest access of a guest, in bytes.
const WIDEST: usize = 8;

impl<H: Hardware> Monitor<H> {
    /// Whether accesses to that BAR reach registers at all; if not, it is denied.
    fn reaches(&mut self, bar: u8, way: Way, offset: u64, width: usize) -> bool {
        self.counts.totals.accesses += 1;
        if self.stopped {
            let text = "the guest was to be stopped; nothing is done for it until the device is reset";
            self.counts.fault(Fault::register("stopped", text));
            return false;
        }
        let known = bar == self.model.bar || self.model.aliases.contains(&bar);
        if known && (1..=WIDEST).contains(&width) {
            return true;
        }
        self.fault(unknown(bar, way, offset, width));
        false
    }

    /// A read. What is denied reads as zero, what is gone as all ones.
    pub(super) fn guest_reads(&mut self, bar: u8, offset: u64, out: &mut [u8]) {
        if self.bus.gone() {
            out.fill(0xff);
            return;
        }
        out.fill(0);
        if !self.reaches(bar, Way::Read, offset, out.len()) {
            return;
        }
        let split = self.machine.at(Way::Read, offset, out.len());
        let seen = self.machine.hooks(Way::Read);
        if self.straight(&split, seen | self.plan.special, offset, out.len()) {
            self.counts.totals.straight += 1;
            self.bus.read_at(bar, offset, out);
            self.suspicious(out);
        } else {
            self.count_hooked(&split, seen);
            for piece in split.iter() {
                if self.stopped {
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
        if self.bus.gone() || !self.reaches(bar, Way::Write, offset, bytes.len()) {
            return;
        }
        let split = self.machine.at(Way::Write, offset, bytes.len());
        let seen = self.machine.hooks(Way::Write);
        if self.straight(&split, seen | self.plan.special, offset, bytes.len()) {
            self.counts.totals.straight += 1;
            self.bus.write_at(bar, offset, bytes);
            for piece in split.iter() {
                self.note(piece, bytes);
                self.show_written(piece.register);
            }
        } else {
            self.count_hooked(&split, seen);
            for piece in split.iter() {
                if self.stopped {
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
        let totals = &mut self.counts.totals;
        let kept = |piece: &Piece| {
            piece.register.is_none_or(|id| !matches!(self.plan.role(id), Role::Plain | Role::Port))
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
            self.bus.suspect();
        }
    }

    /// Keeps the value of a write that the model does not see: it may be saved.
    fn note(&mut self, piece: &Piece, bytes: &[u8]) {
        if let Some(id) = piece.register
            && self.machine.register(id).writes != Writes::Clears
        {
            let value = self.machine.merged(piece, bytes);
            self.machine.note(id, value);
        }
    }

    fn read_piece(&mut self, bar: u8, at: u64, piece: &Piece, out: &mut [u8]) {
        let Some(id) = piece.register else {
            return self.fault(unknown(bar, Way::Read, at, out.len()));
        };
        let role = self.plan.role(id);
        match role {
            // What has come up until now belongs to what the guest is about to see.
            Role::Status => {
                self.collect();
                self.level();
            }
            Role::Block { block, high: false } => self.ask_block(usize::from(block)),
            _ => {}
        }
        if !self.machine.hooked(id, Way::Read) {
            self.answer(bar, at, piece, role, out);
            return self.tell_moved();
        }
        let pending = self.machine.ask(Seen::Read { register: id });
        if let Err(refusal) = self.examine(&pending) {
            return self.refuse(refusal);
        }
        self.answer(bar, at, piece, role, out);
        let moves = self.machine.commit(pending);
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
            Role::Plain => {
                self.bus.read_at(bar, at, out);
                return self.suspicious(out);
            }
            Role::Port => {
                self.bus.read_at(bar, at, out);
                return self.ported(out.len());
            }
            Role::Status => self.status(),
            Role::Mask => self.interrupts.mask,
            Role::Base { ring, high } => self.base_half(ring, high),
            Role::Block { block, high } => self.block_half(block, high),
        };
        put(value, piece.within, out);
    }

    /// Half of a ring's base address as the guest knows it.
    pub(super) fn base_half(&self, ring: u8, high: bool) -> u32 {
        let base = self.rings.get(usize::from(ring)).map_or(0, |ring| ring.base);
        if high { (base >> 32) as u32 } else { base as u32 }
    }

    /// Half of a block's address as the guest knows it; the flag that starts it is there until [`Monitor::ask_block`] sees it gone.
    pub(super) fn block_half(&self, block: u8, high: bool) -> u32 {
        let block = self.blocks.get(usize::from(block));
        block.map_or(0, |block| if high { block.high } else { block.low })
    }

    /// Asks the hardware whether it has done with a block that it writes.
    pub(super) fn ask_block(&mut self, at: usize) {
        let Some(((low, _), table)) = self.plan.blocks.get(at).copied().zip(self.model.blocks.get(at)) else {
            return;
        };
        if self.blocks[at].busy.is_none() {
            return;
        }
        let value = self.peek(low);
        self.rechoose();
        if value & table.start == 0 && !self.bus.gone() {
            self.block_done(at);
            self.tell(Seen::Became { register: low, value });
        }
    }

    /// The device has written a block.
    pub(super) fn block_done(&mut self, at: usize) {
        let Some((state, table)) = self.blocks.get_mut(at).zip(self.model.blocks.get(at)) else { return };
        if let Some(gpa) = state.busy.take() {
            state.low &= !table.start;
            self.ground.view().wrote(gpa, table.size.into());
        }
    }

    fn refuse(&mut self, refusal: Refusal) {
        self.rings.iter_mut().for_each(super::rings::ShadowRing::drop_vetted);
        match refusal {
            Refusal::Ignored => {}
            Refusal::Fault(fault) => self.fault(fault),
        }
    }

    fn write_piece(&mut self, bar: u8, at: u64, piece: &Piece, part: &[u8], bytes: &[u8]) {
        let Some(id) = piece.register else {
            return self.fault(unknown(bar, Way::Write, at, part.len()));
        };
        let value = self.machine.merged(piece, bytes);
        if !self.machine.hooked(id, Way::Write) {
            if let Err(fault) = self.perform(bar, at, piece, id, part, value) {
                return self.fault(fault);
            }
            self.note(piece, bytes);
            self.begin_transfer(id, value);
            return self.performed(id);
        }
        let pending = self.machine.ask(Seen::Write { register: id, value });
        if let Err(refusal) = self.examine(&pending) {
            return self.refuse(refusal);
        }
        if pending.resets() && (id, Way::Write) == (self.plan.reset_by.0, self.plan.reset_by.1) {
            // What else the guest asks for in the same write would come before or after the reset: nobody knows.
            let register = self.machine.register(id);
            self.bus.write(register, self.plan.reset_by.2);
        } else if let Err(fault) = self.perform(bar, at, piece, id, part, value) {
            return self.fault(fault);
        }
        self.happen(pending, id, value);
    }

    /// A write that the hardware has heard of happens for the model.
    fn happen(&mut self, pending: Pending, id: RegisterId, value: u32) {
        let moves = self.machine.commit(pending);
        self.moved(&moves);
        if moves.reset() {
            return self.begun_again();
        }
        self.begin_transfer(id, value);
        self.performed(id);
    }

    /// What follows a write.
    fn performed(&mut self, id: RegisterId) {
        match self.plan.role(id) {
            Role::Status => {
                self.look();
                self.show_status();
                self.relieved();
            }
            Role::Mask => {
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
    ) -> Result<(), Fault> {
        let written = lanes(piece.within, piece.width);
        match self.plan.role(id) {
            Role::Status => {
                // The hardware's were cleared when they were collected.
                self.interrupts.status &= !(value & written);
            }
            Role::Mask => {
                self.interrupts.mask = value;
                self.bus.write_at(bar, at, part);
            }
            Role::Base { ring, high } => self.set_base(ring, high, value),
            Role::Block { block, high } => self.set_block(usize::from(block), high, value)?,
            Role::Port => {
                self.bus.write_at(bar, at, part);
                self.ported(part.len());
            }
            Role::Plain => {
                self.publish_rung(id, value & written)?;
                if !self.switch(id, value) {
                    self.bus.write_at(bar, at, part);
                    if self.plan.bank == Some(id)
                        && let Some(banks) = self.model.banks
                    {
                        self.bus.bank = (value as u8 & banks.mask) >> (banks.shift % 8);
                    }
                }
            }
        }
        Ok(())
    }

    fn set_base(&mut self, ring: u8, high: bool, value: u32) {
        let Some(ring) = self.rings.get_mut(usize::from(ring)) else { return };
        ring.base = match high {
            true => ring.base & 0xffff_ffff | u64::from(value) << 32,
            false => ring.base & !0xffff_ffff | u64::from(value),
        };
    }

    /// A write to a block's address: kept; if it starts the device, checked and translated.
    fn set_block(&mut self, at: usize, high: bool, value: u32) -> Result<(), Fault> {
        let Some((state, table)) = self.blocks.get_mut(at).zip(self.model.blocks.get(at)) else {
            return Ok(());
        };
        if high {
            state.high = value;
            return Ok(());
        }
        if value & table.start == 0 {
            state.low = value;
            return Ok(());
        }
        let gpa = u64::from(value & !table.flags) | u64::from(state.high) << 32;
        let Some(bus) = self.ground.bus(gpa, table.size.into()) else {
            return Err(outside_block(table.name, gpa, table.size));
        };
        (state.low, state.busy) = (value, Some(gpa));
        self.counts.totals.vetted_bytes += u64::from(table.size);
        if let Some((low, high)) = self.plan.blocks.get(at).copied() {
            self.poke(high, (bus >> 32) as u32);
            self.poke(low, bus as u32 & !table.flags | value & table.flags);
            self.rechoose();
        }
        Ok(())
    }

    /// Gives the hardware the descriptors of every ring whose doorbell a write rings. Vetted by the table's check or, if the table
    /// has none there, now.
    fn publish_rung(&mut self, id: RegisterId, value: u32) -> Result<(), Fault> {
        for ring in 0..self.plan.doorbells.len() {
            let rings = self.plan.doorbells[ring].is_some_and(|(bell, bits)| bell == id && value & bits != 0);
            if rings {
                if let Some(ring) = self.rings.get_mut(ring) {
                    ring.rung = true;
                }
                if !self.rings.get(ring).is_some_and(super::rings::ShadowRing::is_vetted) {
                    self.vet(ring as u8)?;
                }
                self.publish(ring);
            }
        }
        Ok(())
    }

    pub(super) fn publish(&mut self, ring: usize) -> u64 {
        let Some(ring) = self.rings.get_mut(ring) else { return 0 };
        let (count, bytes) = ring.publish();
        self.counts.totals.descriptors += count;
        self.counts.totals.vetted_bytes += bytes;
        count
    }

    /// A write to a register that enables rings: those that it enables begin again, on both sides. False: it enables none, ever.
    fn switch(&mut self, id: RegisterId, value: u32) -> bool {
        let of = |enable: &(RegisterId, u32)| enable.0 == id;
        if !self.plan.enables.iter().any(of) {
            return false;
        }
        let register = self.machine.register(id);
        let all = self.plan.enables.iter().filter(|enable| of(enable)).fold(0, |bits, (_, bit)| bits | bit);
        let live = (0..self.rings.len()).any(|ring| self.rings[ring].live && of(&self.plan.enables[ring]));
        if live {
            // Off first: the hardware lets go of our descriptors, and begins again with the first when it is on again.
            self.bus.write(register, value & !all & full(register));
        }
        for ring in 0..self.rings.len() {
            let (enable, bits) = self.plan.enables[ring];
            if enable != id {
                continue;
            }
            self.rings[ring].harvest(&self.ground);
            self.rings[ring].stop();
            if value & bits != 0 {
                self.rings[ring].start();
                self.point(ring);
                self.replenish(ring);
            }
        }
        self.bus.write(register, value);
        true
    }

    /// Tells the hardware where our ring is.
    pub(super) fn point(&mut self, ring: usize) {
        let bus = self.rings[ring].bus();
        let (low, high) = self.plan.bases[ring];
        self.poke(low, bus as u32);
        self.poke(high, (bus >> 32) as u32);
        self.rechoose();
    }

    /// Gives a receive ring what the guest has given since.
    pub(super) fn replenish(&mut self, at: usize) {
        let Some(ring) = self.rings.get_mut(at) else { return };
        if ring.table.flow != Flow::Receive || !ring.live {
            return;
        }
        let vetted = ring.vet(&self.ground);
        // Those before a bad one are good.
        self.publish(at);
        if let Err(fault) = vetted {
            // Not now: an access may be under way.
            self.bus.report(fault);
        }
    }

    /// Looks at the rings: statuses back to the guest, new buffers to the hardware. How many descriptors came back.
    pub(super) fn look(&mut self) -> u32 {
        let mut done = 0;
        for ring in 0..self.rings.len() {
            if self.rings[ring].live {
                done += self.rings[ring].harvest(&self.ground);
                self.replenish(ring);
            }
        }
        if !self.machine.reusable() {
            let mut drained = 0u32;
            for ring in self.machine.awaits_rings() {
                let empty = self.rings.get(usize::from(ring)).is_some_and(|ring| ring.in_flight() == 0);
                drained |= u32::from(empty).checked_shl(ring.into()).unwrap_or(0);
            }
            for ring in (0..32u8).filter(|ring| drained >> ring & 1 == 1) {
                self.tell(Seen::Drained { ring });
            }
        }
        done
    }

    /// The guest has reset the device.
    pub(super) fn begun_again(&mut self) {
        self.counts.happened(What::Reset);
        self.forget();
        self.learn_bank();
        // What came with the reset of another chip may not with that of this one.
        self.poke(self.plan.mask, 0);
        self.show_all();
        self.level();
        self.relieved();
    }

    /// Nothing of what a reset takes is left.
    pub(super) fn forget(&mut self) {
        for ring in &mut self.rings {
            ring.harvest(&self.ground);
            ring.recall(&self.ground);
            ring.stop();
            ring.base = 0;
        }
        for at in 0..self.blocks.len() {
            self.block_done(at);
            self.blocks[at] = super::BlockState::default();
        }
        self.interrupts = super::Virtual::default();
        self.transfer = None;
    }

    /// Shows a register that was written in the shadow page.
    fn show_written(&mut self, id: Option<RegisterId>) {
        let Some(id) = id.filter(|_| self.page.as_ref().is_some_and(|page| page.used)) else { return };
        self.show(id);
    }

    /// Shows a register's present value in the shadow page.
    pub(super) fn show(&mut self, id: RegisterId) {
        let register = self.machine.register(id);
        if matches!(register.reads, Reads::Never | Reads::Effect) || register.bank.is_some() {
            return;
        }
        let at = u64::from(register.offset);
        let width = usize::from(register.width).min(WIDEST);
        let mut bytes = [0; WIDEST];
        match self.plan.role(id) {
            Role::Plain => self.bus.read_at(self.model.bar, at, &mut bytes[..width]),
            Role::Port => return,
            role => {
                let value = match role {
                    Role::Status => self.status_kept(),
                    Role::Mask => self.interrupts.mask,
                    Role::Base { ring, high } => self.base_half(ring, high),
                    Role::Block { block, high } => self.block_half(block, high),
                    Role::Plain | Role::Port => 0,
                };
                bytes[..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        if let Some(page) = &self.page {
            page.put(at, &bytes[..width]);
        }
    }

    /// Shows what the device may have changed by itself.
    pub(super) fn show_alive(&mut self) {
        self.show_those(|reads| reads == Reads::Alive);
    }

    /// Shows everything.
    pub(super) fn show_all(&mut self) {
        self.show_those(|_| true);
    }

    fn show_those(&mut self, which: impl Fn(Reads) -> bool) {
        if !self.page.as_ref().is_some_and(|page| page.used) {
            return;
        }
        for at in 0..self.plan.all.len() {
            let id = self.plan.all[at];
            if which(self.machine.register(id).reads) {
                self.show(id);
            }
        }
    }
}

/// The bytes of a value from `within` on; what is beyond it is zero.
fn put(value: u32, within: u8, out: &mut [u8]) {
    let bytes = value.to_le_bytes();
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = bytes.get(usize::from(within) + at).copied().unwrap_or(0);
    }
}

fn unknown(bar: u8, way: Way, offset: u64, width: usize) -> Fault {
    let doing = if way == Way::Read { "read" } else { "write" };
    Fault::register("unknown-register", format!("{doing} of {width} bytes at {offset:#x} of BAR {bar}"))
}
