//! What the device can get at, and the checks before it does.

use super::{Look, regions::edge_place, subject};
use crate::{Block, Card, Check, Descriptor, Flow, Reads, Register, Ring, Transition, Way};

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
        if let Some(card) = &model.card {
            self.card(card);
        }
    }

    fn check(&mut self, place: &str, check: &Check) {
        match *check {
            Check::Ring(name) | Check::Base(name) => {
                if !self.model.rings.iter().any(|ring| ring.name == name) {
                    self.say(place, format!("there is no ring {name:?}"), "name one of the rings");
                }
            }
            Check::Block(name) => {
                if !self.model.blocks.iter().any(|block| block.name == name) {
                    self.say(place, format!("there is no block {name:?}"), "name one of the blocks");
                }
            }
            Check::Card { start, count, .. } => {
                self.on_card(place);
                for name in [start.0, start.1, count.0, count.1] {
                    self.byte(place, name);
                }
            }
            Check::CardPage { page, count } => {
                self.on_card(place);
                for name in [page, count.0, count.1] {
                    self.byte(place, name);
                }
            }
            Check::Below(low, high) => {
                self.on_card(place);
                for name in [low, high] {
                    self.byte(place, name);
                }
            }
            Check::Within(page) => {
                self.on_card(place);
                self.byte(place, page);
            }
            Check::Deny(why) | Check::Ignore(why) => {
                if why.is_empty() {
                    self.say(place, "it is refused for no reason", "say why");
                }
            }
        }
    }

    fn on_card(&mut self, place: &str) {
        if self.model.card.is_none() {
            self.say(place, "there is no card memory", "describe it in `card`");
        }
    }

    /// A register of one byte whose value is known.
    fn byte(&mut self, place: &str, name: &str) {
        self.known(place, name);
        let wide = self.model.registers.iter().any(|register| register.name == name && register.width != 1);
        if wide {
            self.say(place, format!("{name} is not one byte"), "name registers of one byte");
        }
    }

    /// Whether an edge that fits makes a check.
    fn checked(&self, fits: impl Fn(&Transition) -> bool, check: impl Fn(&Check) -> bool) -> bool {
        let edges = self.model.regions.iter().flat_map(|region| region.transitions);
        edges.filter(|edge| fits(edge)).any(|edge| edge.checks.iter().any(&check))
    }

    fn ring(&mut self, ring: &Ring) {
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
                if !self.checked(rings, |check| *check == Check::Ring(name)) {
                    self.say(
                        &place,
                        format!("{register} makes the hardware follow descriptors that nobody has looked at"),
                        format!("give an edge on {register} the check Ring({name:?})"),
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

    fn descriptor(&mut self, place: &str, descriptor: &Descriptor) {
        let words = [descriptor.status, descriptor.address.0, descriptor.address.1];
        if words.iter().any(|at| u32::from(*at) + 4 > u32::from(descriptor.size)) {
            self.say(place, "a word lies beyond the end of the descriptor", "correct its offset or the size");
        }
        let Descriptor { own, end, length, .. } = *descriptor;
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

    fn card(&mut self, card: &Card) {
        let place = "card";
        self.named(place, card.port);
        for name in [card.address.0, card.address.1, card.count.0, card.count.1, card.words.0] {
            self.byte(place, name);
        }
        let pages = &card.pages;
        for name in [pages.start, pages.stop] {
            self.byte(place, name);
        }
        for name in [pages.boundary, pages.current] {
            self.named(place, name);
        }
        self.known(place, card.command);
        for name in [card.reached.0, card.reached.1] {
            let one_byte = |register: &&Register| {
                register.width == 1 && matches!(register.reads, Reads::Plain | Reads::Alive)
            };
            if self.named(place, name).is_some_and(|register| !one_byte(&register)) {
                self.say(
                    place,
                    format!("{name} does not say where a transfer is"),
                    "name registers of one byte that are read without an effect",
                );
            }
        }
        let (mask, read, write) = card.direction;
        for value in [read, write] {
            self.bits(place, card.command, mask, value);
        }
        if card.readable.iter().chain(card.writable).any(|(from, to)| from >= to) {
            self.say(place, "a range ends before it begins", "give first byte and end");
        }
        let commands = |edge: &Transition| subject(&edge.on) == Some(card.command);
        for (wanted, word) in [(Way::Read, "read"), (Way::Write, "written")] {
            let made = |check: &Check| matches!(check, Check::Card { way, .. } if *way == wanted);
            if !self.checked(commands, made) {
                self.say(
                    place,
                    format!("{} lets memory be {word} that nobody has looked at", card.command),
                    format!("give an edge on {} the check Card for that way", card.command),
                );
            }
        }
    }
}
