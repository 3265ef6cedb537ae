//! What the device can get at, and the checks before it does.

use super::{Look, regions::edge_place, subject};
use crate::{
    Block, BufferLength, Check, CounterBlock, DescriptorLayout, DescriptorRing, FORMATS, Flow, TailQueue,
    Transition,
};

impl Look<'_> {
    pub(super) fn reach(&mut self) {
        let model = self.model;
        for region in model.regions {
            for transition in region.transitions {
                let place = edge_place(model, region, transition);
                for check in transition.checks {
                    self.check(&place, check);
                }
            }
        }
        for ring in model.rings {
            self.ring(ring);
        }
        for block in model.blocks {
            self.block(block);
        }
        if let Some(port) = &model.port {
            self.port(port);
        }
        if let Some(counters) = &model.counters {
            self.counters(counters);
        }
    }

    fn check(&mut self, place: &str, check: &Check) {
        match *check {
            Check::Descriptors(name) | Check::Base(name) => {
                if !self.model.rings.iter().any(|ring| ring.name == name) {
                    self.say(place, format!("there is no ring {name:?}"), "name one of the rings");
                }
            }
            Check::Block(name) => {
                if !self.model.blocks.iter().any(|block| block.name == name) {
                    self.say(place, format!("there is no block {name:?}"), "name one of the blocks");
                }
            }
            Check::Holds(condition) => self.condition(place, condition),
            Check::Deny(why) | Check::Ignore(why) => {
                if why.is_empty() {
                    self.say(place, "it is refused for no reason", "say why");
                }
            }
        }
    }

    /// Whether an edge that fits makes a check.
    fn checked(&self, fits: impl Fn(&Transition) -> bool, check: impl Fn(&Check) -> bool) -> bool {
        let edges = self.model.regions.iter().flat_map(|region| region.transitions);
        edges.filter(|edge| fits(edge)).any(|edge| edge.checks.iter().any(&check))
    }

    fn ring(&mut self, ring: &DescriptorRing) {
        let place = format!("ring {}", ring.name);
        for name in [ring.base.0, ring.base.1] {
            self.known(&place, name);
        }
        self.bits(&place, ring.enable.0, ring.enable.1, 0);
        self.known(&place, ring.enable.0);
        if ring.most == 0 || !ring.align.is_power_of_two() {
            self.say(
                &place,
                "no address and length fit it",
                "give an alignment that is a power of two, and descriptors",
            );
        }
        let name = ring.name;
        if let Some(queue) = &ring.queue {
            return self.queue(&place, ring, queue);
        }
        self.descriptor(&place, &ring.descriptor);
        match (ring.flow, ring.doorbell) {
            (Flow::Transmit, None) => {
                self.say(&place, "nothing makes the hardware look at it", "name its doorbell");
            }
            (_, Some((register, bit))) => {
                self.bits(&place, register, bit, 0);
                self.known(&place, register);
                let rings = |edge: &Transition| subject(&edge.on) == Some(register);
                if !self.checked(rings, |check| *check == Check::Descriptors(name)) {
                    self.say(
                        &place,
                        format!("{register} makes the hardware follow descriptors that nobody has looked at"),
                        format!("give an edge on {register} the check Descriptors({name:?})"),
                    );
                }
            }
            (Flow::Receive, None) => {}
        }
        let enable = ring.enable.0;
        let starts = |edge: &Transition| subject(&edge.on) == Some(enable);
        if ring.flow == Flow::Receive && !self.checked(starts, |check| *check == Check::Base(name)) {
            self.say(
                &place,
                format!("{enable} makes the hardware write through a ring that nobody has looked at"),
                format!("give an edge on {enable} the check Base({name:?})"),
            );
        }
    }

    /// A ring that the hardware follows to its tail.
    fn queue(&mut self, place: &str, ring: &DescriptorRing, queue: &TailQueue) {
        for name in [queue.length, queue.head, queue.tail] {
            self.known(place, name);
        }
        let (tail, name) = (queue.tail, ring.name);
        let rings = |edge: &Transition| subject(&edge.on) == Some(tail);
        if !self.checked(rings, |check| *check == Check::Descriptors(name)) {
            self.say(
                place,
                format!("{tail} makes the hardware follow descriptors that nobody has looked at"),
                format!("give an edge on {tail} the check Descriptors({name:?})"),
            );
        }
        let size = u32::from(ring.descriptor.size);
        if size == 0 || !size.is_multiple_of(4) || queue.unit == 0 || !queue.unit.is_multiple_of(size) {
            self.say(place, "its length is no number of descriptors", "give a unit of whole descriptors");
        }
        if queue.formats.is_empty() || queue.formats.len() > FORMATS {
            let count = queue.formats.len();
            self.say(place, format!("its descriptors have {count} formats"), format!("have 1 to {FORMATS}"));
        }
        let words = size / 4;
        for format in queue.formats {
            let mut used = vec![u32::from(format.tag.0), u32::from(format.done.0)];
            used.extend(
                [format.report, format.last, format.context]
                    .into_iter()
                    .flatten()
                    .map(|(at, _)| u32::from(at)),
            );
            if let Some(buffer) = format.buffer {
                used.push(u32::from(buffer.address) + 1);
                match buffer.length {
                    BufferLength::Field(at, mask) => {
                        used.push(at.into());
                        if mask == 0 {
                            self.say(
                                place,
                                format!("buffers of {} have no length", format.name),
                                "give its bits",
                            );
                        }
                    }
                    BufferLength::By(name, _) => self.known(place, name),
                }
            }
            if used.iter().any(|at| *at >= words)
                || u32::from(format.written).checked_shr(words).unwrap_or(0) != 0
            {
                let what = format!("a word of format {} lies beyond the end of the descriptor", format.name);
                self.say(place, what, "correct its number or the size");
            }
            if format.written >> format.done.0.min(7) & 1 == 0 {
                let what = format!("the word by which {} is done is not written back", format.name);
                self.say(place, what, "list it among the written ones");
            }
            if let Some(given) = format.given {
                self.bits(place, given.register, given.mask, given.is);
                self.known(place, given.register);
            }
        }
    }

    fn counters(&mut self, counters: &CounterBlock) {
        let place = "counters";
        let Some(register) = self.named(place, counters.register) else { return };
        let words = register.width.is_multiple_of(4) && register.width > 4;
        if !words || register.reads != crate::Reads::Effect || register.writes != crate::Writes::Never {
            let what = format!("{} are not words that reading clears and nobody writes", register.name);
            self.say(place, what, "name a register of several words, of Effect and Never");
        }
        let width = register.width;
        if counters.wide.iter().any(|at| !at.is_multiple_of(4) || at.saturating_add(8) > width) {
            self.say(place, "a wide one is not within them", "give offsets of low halves, in bytes");
        }
    }

    fn descriptor(&mut self, place: &str, descriptor: &DescriptorLayout) {
        let words = [descriptor.status, descriptor.address.0, descriptor.address.1];
        if words.iter().any(|at| u32::from(*at) + 4 > u32::from(descriptor.size)) {
            self.say(place, "a word lies beyond the end of the descriptor", "correct its offset or the size");
        }
        let DescriptorLayout { own, end, length, .. } = *descriptor;
        if own == 0 || length == 0 || own & end != 0 || (own | end) & length != 0 {
            self.say(
                place,
                "owner, end and length share bits, or are missing",
                "give each its bits of the status word",
            );
        }
    }

    fn block(&mut self, block: &Block) {
        let place = format!("block {}", block.name);
        for name in [block.base.0, block.base.1] {
            self.known(&place, name);
        }
        if block.start & !block.flags != 0 || block.start == 0 || block.size == 0 {
            self.say(
                &place,
                "the bit that starts it is not one of its flags, or it has no size",
                "correct them",
            );
        }
        let (name, base) = (block.name, block.base.0);
        let starts = |edge: &Transition| subject(&edge.on) == Some(base);
        if !self.checked(starts, |check| *check == Check::Block(name)) {
            self.say(
                &place,
                format!("{base} makes the hardware write where nobody has looked"),
                format!("give an edge on {base} the check Block({name:?})"),
            );
        }
    }
}
