//! Rings and blocks: what the guest's writes to their registers do, and what goes to and fro in guest memory.

use ioplane_hardware::Hardware;
use ioplane_model::{Flow, RegisterId, Seen, Way};

use super::bus::full;
use super::check::outside_block;
use super::counts::{Fault, What};
use super::policy::{Cause, Policy};
use super::rings::ShadowRing;
use super::{BlockState, Monitor, Virtual};

impl<H: Hardware> Monitor<H> {
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

    pub(super) fn set_base(&mut self, ring: u8, high: bool, value: u32) {
        let Some(ring) = self.rings.get_mut(usize::from(ring)) else { return };
        ring.base = match high {
            true => ring.base & 0xffff_ffff | u64::from(value) << 32,
            false => ring.base & !0xffff_ffff | u64::from(value),
        };
    }

    /// A write to a block's address: kept; if it starts the device, checked and translated.
    pub(super) fn set_block(&mut self, at: usize, high: bool, value: u32) -> Result<(), Fault> {
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
        if state.busy.is_some() {
            // Law 6: one that is under way is marked before the next begins. The read lets it end first.
            if let Some((low, _)) = self.plan.blocks.get(at).copied() {
                self.peek(low);
                self.rechoose();
            }
            self.block_done(at);
        }
        let Some((state, table)) = self.blocks.get_mut(at).zip(self.model.blocks.get(at)) else {
            return Ok(());
        };
        let gpa = u64::from(value & !table.flags) | u64::from(state.high) << 32;
        let Some(bus) = self.ground.bus(gpa, table.size.into(), Way::Write) else {
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
    pub(super) fn publish_rung(&mut self, id: RegisterId, value: u32) -> Result<(), Fault> {
        for ring in 0..self.plan.doorbells.len() {
            let rings = self.plan.doorbells[ring].is_some_and(|(bell, bits)| bell == id && value & bits != 0);
            if rings {
                if let Some(ring) = self.rings.get_mut(ring) {
                    ring.rung = true;
                }
                if !self.rings.get(ring).is_some_and(ShadowRing::is_vetted) {
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
    pub(super) fn switch(&mut self, id: RegisterId, value: u32) -> bool {
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
            // Read back: what the hardware was writing is there when this returns.
            self.bus.read(register);
        }
        for ring in 0..self.rings.len() {
            let (enable, bits) = self.plan.enables[ring];
            if enable != id {
                continue;
            }
            self.rings[ring].harvest(&self.ground);
            // Law 6: buffers that were the hardware's may have been written.
            self.rings[ring].recall(&self.ground);
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
        let vetted = ring.vet(&self.ground, self.policies.of(Cause::Dma) != Policy::Stop);
        for fault in ring.ignored() {
            self.bus.report(fault);
        }
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
            self.blocks[at] = BlockState::default();
        }
        self.interrupts = Virtual::default();
        self.recalled = 0;
        self.transfer = None;
        // A reset leaves a card's address where it is.
        self.address_told = (false, false);
    }
}
