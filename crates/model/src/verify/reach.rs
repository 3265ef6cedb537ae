//! What the device can get at, and the checks before it does.

use super::{Look, regions::edge_place, subject};
use crate::{Block, Check, DescriptorLayout, DescriptorRing, Flow, Transition};

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
        self.descriptor(&place, &ring.descriptor);
        let name = ring.name;
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
