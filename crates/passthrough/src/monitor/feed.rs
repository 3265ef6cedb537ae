//! Rings and blocks: what the guest's writes to their registers do, and what goes to and fro in guest memory.

use ioplane_hardware::Hardware;
use ioplane_model::{Flow, ModelInput, RegisterId, Way};

use super::Monitor;
use super::bus::full;
use super::check::outside_block;
use super::counts::{MonitorEventKind, MonitorFault};
use super::guest::{BlockState, Virtual};
use super::policy::{Cause, Policy};
use super::rings::ShadowRing;
use super::rings::queue::Shape;

impl<H: Hardware> Monitor<H> {
    /// Asks the hardware whether it has done with a block that it writes.
    pub(super) fn ask_block(&mut self, at: usize) {
        let Some(((low, _), table)) =
            self.card.plan.blocks.get(at).copied().zip(self.card.model.blocks.get(at))
        else {
            return;
        };
        if self.guest.blocks[at].busy.is_none() {
            return;
        }
        let value = self.peek(low);
        self.rechoose();
        if value & table.start == 0 && !self.card.bus.gone() {
            self.guest.block_done(at);
            self.tell(ModelInput::Became { register: low, value });
        }
    }

    /// A write to a block's address: kept; if it starts the device, checked and translated.
    pub(super) fn set_block(&mut self, at: usize, high: bool, value: u32) -> Result<(), MonitorFault> {
        let Some((state, table)) = self.guest.blocks.get_mut(at).zip(self.card.model.blocks.get(at)) else {
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
            // Invariant 6: one that is under way is marked before the next begins. The read lets it end first.
            if let Some((low, _)) = self.card.plan.blocks.get(at).copied() {
                self.peek(low);
                self.rechoose();
            }
            self.guest.block_done(at);
        }
        let Some((state, table)) = self.guest.blocks.get_mut(at).zip(self.card.model.blocks.get(at)) else {
            return Ok(());
        };
        let gpa = u64::from(value & !table.flags) | u64::from(state.high) << 32;
        let Some(bus) = self.guest.dma.bus(gpa, table.size.into(), Way::Write) else {
            return Err(outside_block(table.name, gpa, table.size));
        };
        (state.low, state.busy) = (value, Some(gpa));
        self.card.counts.totals.vetted_bytes += u64::from(table.size);
        if let Some((low, high)) = self.card.plan.blocks.get(at).copied() {
            self.poke(high, (bus >> 32) as u32);
            self.poke(low, bus as u32 & !table.flags | value & table.flags);
            self.rechoose();
        }
        Ok(())
    }

    /// Gives the hardware the descriptors of every ring whose doorbell a write rings. Vetted by the table's check or, if the table
    /// has none there, now.
    pub(super) fn publish_rung(&mut self, id: RegisterId, value: u32) -> Result<(), MonitorFault> {
        for ring in 0..self.card.plan.doorbells.len() {
            let rings = self.card.plan.doorbells[ring]
                .is_some_and(|(doorbell, bits)| doorbell == id && value & bits != 0);
            if rings {
                if let Some(ring) = self.guest.rings.get_mut(ring) {
                    ring.rung = true;
                }
                if !self.guest.rings.get(ring).is_some_and(ShadowRing::is_vetted) {
                    self.vet(ring as u8)?;
                }
                self.publish(ring);
            }
        }
        Ok(())
    }

    pub(super) fn publish(&mut self, at: usize) -> u64 {
        let Some(ring) = self.guest.rings.get_mut(at) else { return 0 };
        let (count, bytes) = ring.publish();
        self.card.counts.totals.descriptors += count;
        self.card.counts.totals.vetted_bytes += bytes;
        if count > 0 && ring.queue.is_some() {
            self.advance(at);
        }
        count
    }

    /// Tells the hardware the tail of our ring, and before the first one where that is.
    fn advance(&mut self, at: usize) {
        let Some((ring, Some(plan))) = self.guest.rings.get_mut(at).zip(self.card.plan.queues.get(at)) else {
            return;
        };
        let (head, tail, length) = (plan.head, plan.tail, plan.length);
        let (bytes, place) = (ring.own_length(), ring.own_tail());
        if ring.queue.as_mut().is_some_and(|queue| !std::mem::replace(&mut queue.told, true)) {
            self.point(at);
            self.poke(length, bytes);
            self.poke(head, 0);
            self.poke(tail, 0);
        }
        self.poke(tail, place.into());
        self.rechoose();
    }

    /// The guest writes the tail of a ring.
    pub(super) fn set_tail(&mut self, ring: u8, value: u32) -> Result<(), MonitorFault> {
        let at = usize::from(ring);
        if !self.guest.rings.get(at).is_some_and(ShadowRing::is_vetted) {
            self.guest.propose(ring, value);
            self.vet(ring)?;
        }
        if let Some(ring) = self.guest.rings.get_mut(at) {
            ring.rung = true;
            if let Some(queue) = &mut ring.queue {
                queue.accept(value);
            }
        }
        self.publish(at);
        Ok(())
    }

    /// What descriptors of a ring mean by the registers as the guest has them, one of them about to be written.
    fn shape(&self, at: usize, written: Option<(RegisterId, u32)>) -> Option<Shape> {
        let plan = self.card.plan.queues.get(at)?.as_ref()?;
        let value = |id: RegisterId| match written {
            Some((own, value)) if own == id => value,
            _ => self.guest.machine.value(id),
        };
        let mut shape = Shape::default();
        for (place, format) in shape.0.iter_mut().zip(&plan.formats) {
            if format.given.is_none_or(|(id, mask, is)| value(id) & mask == is) {
                *place = Some(format.by.map_or(0, |(id, length)| length(value(id))));
            }
        }
        Some(shape)
    }

    /// Before descriptors are looked at: what they mean now.
    pub(super) fn shape_ring(&mut self, at: usize) {
        if let Some(shape) = self.shape(at, None)
            && let Some(queue) = self.guest.rings.get_mut(at).and_then(|ring| ring.queue.as_mut())
        {
            queue.set_shape(shape);
        }
    }

    /// A register that says what descriptors mean does not change while the hardware has some that were checked.
    pub(super) fn keeps_shape(&mut self, id: RegisterId, value: u32) -> Result<(), MonitorFault> {
        for at in 0..self.guest.rings.len() {
            let depends = self
                .card
                .plan
                .queues
                .get(at)
                .and_then(Option::as_ref)
                .is_some_and(|plan| plan.depends_on(id));
            let Some(shape) = self.shape(at, Some((id, value))).filter(|_| depends) else { continue };
            let ring = &mut self.guest.rings[at];
            ring.harvest(&self.guest.dma);
            if ring.queue.as_ref().is_some_and(|queue| queue.mistakes(shape)) {
                let name = self.guest.machine.register(id).name;
                let text = format!("{name} changes what the descriptors of ring {} mean", ring.table.name);
                return Err(MonitorFault::register("ring-busy", text));
            }
        }
        Ok(())
    }

    /// A write to a register that enables rings: those that it enables begin again, on both sides. False: it enables none, ever.
    pub(super) fn switch(&mut self, id: RegisterId, value: u32) -> bool {
        let of = |enable: &(RegisterId, u32)| enable.0 == id;
        // A ring that is followed to its tail goes on where it was.
        if self.card.plan.follows_tails() || !self.card.plan.enables.iter().any(of) {
            return false;
        }
        let register = self.guest.machine.register(id);
        let all =
            self.card.plan.enables.iter().filter(|enable| of(enable)).fold(0, |bits, (_, bit)| bits | bit);
        let live = (0..self.guest.rings.len())
            .any(|ring| self.guest.rings[ring].live && of(&self.card.plan.enables[ring]));
        if live {
            // Off first: the hardware lets go of our descriptors, and begins again with the first when it is on again.
            self.card.bus.write(register, value & !all & full(register));
            // Read back: what the hardware was writing is there when this returns.
            self.card.bus.read(register);
        }
        for ring in 0..self.guest.rings.len() {
            let (enable, bits) = self.card.plan.enables[ring];
            if enable != id {
                continue;
            }
            self.guest.rings[ring].harvest(&self.guest.dma);
            // Invariant 6: buffers that were the hardware's may have been written.
            self.guest.rings[ring].recall(&self.guest.dma);
            self.guest.rings[ring].stop();
            if value & bits != 0 {
                self.guest.rings[ring].start();
                self.point(ring);
                self.replenish(ring);
            }
        }
        self.card.bus.write(register, value);
        true
    }

    /// Tells the hardware where our ring is.
    pub(super) fn point(&mut self, ring: usize) {
        let bus = self.guest.rings[ring].bus();
        let (low, high) = self.card.plan.bases[ring];
        self.poke(low, bus as u32);
        self.poke(high, (bus >> 32) as u32);
        self.rechoose();
    }

    /// Gives a receive ring what the guest has given since, and a ring that is followed to its tail what there was no room for.
    pub(super) fn replenish(&mut self, at: usize) {
        self.shape_ring(at);
        let Some(ring) = self.guest.rings.get_mut(at) else { return };
        let feeds = ring.table.flow == Flow::Receive || ring.queue.is_some() && ring.rung;
        if !feeds || !ring.live {
            return;
        }
        let vetted = ring.vet(&self.guest.dma, self.card.policies.of(Cause::Dma) != Policy::Stop);
        for fault in ring.ignored() {
            self.card.bus.report(fault);
        }
        // Those before a bad one are good.
        self.publish(at);
        if let Err(fault) = vetted {
            // Not now: an access may be under way.
            self.card.bus.report(fault);
        }
    }

    /// Looks at the rings: statuses back to the guest, new buffers to the hardware. How many descriptors came back.
    pub(super) fn look(&mut self) -> u32 {
        let mut done = 0;
        for ring in 0..self.guest.rings.len() {
            if self.guest.rings[ring].live {
                done += self.guest.rings[ring].harvest(&self.guest.dma);
                self.replenish(ring);
            }
        }
        if !self.guest.machine.reusable() {
            let mut drained = 0u32;
            for ring in self.guest.machine.awaits_rings() {
                let empty = self.guest.rings.get(usize::from(ring)).is_some_and(|ring| ring.in_flight() == 0);
                drained |= u32::from(empty).checked_shl(ring.into()).unwrap_or(0);
            }
            for ring in (0..32u8).filter(|ring| drained >> ring & 1 == 1) {
                self.tell(ModelInput::Drained { ring });
            }
        }
        done
    }

    /// The guest has reset the device.
    pub(super) fn begun_again(&mut self) {
        self.card.counts.happened(MonitorEventKind::Reset);
        self.forget();
        for ring in self.guest.rings.iter_mut().filter(|ring| ring.queue.is_some()) {
            ring.go_on();
        }
        self.learn_bank();
        // What came with the reset of another chip may not with that of this one.
        self.mask_hardware(0);
        self.show_all();
        self.level();
        self.relieved();
    }

    /// Nothing of what a reset takes is left.
    pub(super) fn forget(&mut self) {
        for ring in &mut self.guest.rings {
            ring.harvest(&self.guest.dma);
            ring.recall(&self.guest.dma);
            ring.stop();
            ring.base = 0;
        }
        for at in 0..self.guest.blocks.len() {
            self.guest.block_done(at);
            self.guest.blocks[at] = BlockState::default();
        }
        self.guest.interrupts = Virtual::default();
        self.guest.recalled = 0;
        self.guest.transfer = None;
        self.guest.tables.clear();
        self.guest.unread.clear();
        // A reset leaves a card's address where it is.
        self.card.address_told = (false, false);
    }
}
