//! Rings that the guest drives, the mailbox, and what another function would miss.

use super::{Look, verify};
use crate::{
    Buffers, DirectModel, Dummy, Flow, Hook, KeepRule, PageRule, Reads, Replay, Restore, TableFlaw, TailRing,
    Writes,
};

/// Bytes of a page.
const PAGE: u32 = 4096;

/// Everything that is wrong with the table of hardware that guests drive themselves, its states included; empty if it is sound.
pub fn verify_direct(direct: &DirectModel) -> Vec<TableFlaw> {
    let mut look = Look { model: direct.model, findings: verify(direct.model) };
    look.pages(direct);
    for ring in direct.rings {
        look.tail_ring(direct, ring);
    }
    look.mailbox(direct);
    for counter in direct.counters {
        look.counter(direct, counter.low);
        if let Some((high, bits)) = counter.high {
            look.counter(direct, high);
            if bits == 0 || bits & bits.wrapping_add(1) != 0 {
                look.say("counters", format!("{high} has no low bits"), "name its bits from the first on");
            }
        }
    }
    look.replay(direct);
    look.findings
}

impl Look<'_> {
    fn page(&self, direct: &DirectModel, name: &str) -> Option<PageRule> {
        let register = self.model.registers.iter().find(|register| register.name == name)?;
        direct.pages.get((u32::from(register.offset) / PAGE) as usize).copied()
    }

    fn trapped(&mut self, direct: &DirectModel, place: &str, name: &str) {
        if self.named(place, name).is_some() && self.page(direct, name) != Some(PageRule::Trapped) {
            self.say(place, format!("{name} lies on a page that the guest maps"), "trap the page");
        }
    }

    fn counter(&mut self, direct: &DirectModel, name: &str) {
        let counts = |register: &&crate::Register| {
            register.writes == Writes::Never && register.width == 4 && register.reads == Reads::Alive
        };
        if self.named("counters", name).is_some_and(|register| !counts(&register)) {
            self.say(
                "counters",
                format!("{name} is not 32 bits that only the hardware writes"),
                "take it off the list",
            );
        }
        if self.page(direct, name) != Some(PageRule::MappedUntilMoved) {
            self.trapped(direct, "counters", name);
        }
    }

    fn pages(&mut self, direct: &DirectModel) {
        let pages = u32::from(self.model.size).div_ceil(PAGE) as usize;
        if direct.pages.len() != pages {
            self.say(
                "pages",
                format!("{} rules for {pages} pages", direct.pages.len()),
                "say of each page who answers",
            );
        }
        if !self.model.rings.is_empty() || !self.model.blocks.is_empty() || self.model.port.is_some() {
            self.say(
                "model",
                "it has rings, blocks or a port that a monitor would copy",
                "describe them here or nowhere",
            );
        }
        for register in self.model.registers.iter().filter(|register| register.hook != Hook::ByState) {
            if self.page(direct, register.name) != Some(PageRule::Trapped) {
                let what = format!("{} is hooked on a page that the guest maps", register.name);
                self.say("pages", what, "trap the page, or let the register be");
            }
        }
    }

    fn tail_ring(&mut self, direct: &DirectModel, ring: &TailRing) {
        let place = format!("ring {}", ring.name);
        let names = [ring.base.0, ring.base.1, ring.length, ring.head, ring.tail, ring.enable.0];
        for name in names {
            let unreadable = |register: &&crate::Register| {
                matches!(register.reads, Reads::Never | Reads::Effect) || register.width != 4
            };
            if self.named(&place, name).filter(unreadable).is_some() {
                self.say(
                    &place,
                    format!("{name} cannot be read as 32 bits without an effect"),
                    "the state is read from it",
                );
            }
        }
        // A tail that nobody sees tells nobody which buffers were posted.
        if ring.flow == Flow::Receive && self.page(direct, ring.tail) == Some(PageRule::Mapped) {
            let what =
                format!("writes of {} are never seen, and they say which memory is written", ring.tail);
            self.say(&place, what, "let its page be MappedAtRest or Trapped");
        }
        self.bits(&place, ring.enable.0, ring.enable.1, ring.enable.1);
        if ring.enable.1.count_ones() != 1 || ring.done.1.count_ones() != 1 {
            self.say(&place, "enable and done are not one bit each", "name one bit");
        }
        if ring.in_hand == 0 || ring.in_hand > ring.most {
            self.say(
                &place,
                format!("it has {} descriptors in hand", ring.in_hand),
                "name as many as the cache has",
            );
        }
        if ring.done.0 + 4 > ring.size || !ring.size.is_multiple_of(4) || ring.most == 0 {
            self.say(
                &place,
                "the descriptor has no such word, or there are none",
                "take the data sheet's layout",
            );
        }
        let fits = |buffers: &Buffers| {
            buffers.addresses.iter().all(|at| at + 8 <= ring.size) && buffers.addresses.len() <= 2
        };
        match (ring.flow, &ring.buffers, ring.dummy) {
            (Flow::Receive, Some(buffers), Dummy::Frame) if fits(buffers) => {
                self.named(&place, buffers.shape);
            }
            (Flow::Transmit, None, Dummy::Descriptor(words)) if usize::from(ring.size) == words.len() * 4 => {}
            _ => self.say(
                &place,
                "its buffers or its dummy do not fit the way that data flows",
                "receive: buffers and Frame; transmit: no buffers and a Descriptor as long as its descriptors",
            ),
        }
        let halted = self.model.halt.iter().any(|step| {
            matches!(step, Restore::Value(name, value) if *name == ring.enable.0 && value & ring.enable.1 == 0)
        });
        if !halted {
            self.say(
                &place,
                format!("nothing switches it off: {} is not in `halt`", ring.enable.0),
                "list it",
            );
        }
        let switched_on = self.model.restore.iter().any(|step| match *step {
            Restore::Saved(name, mask) => name == ring.enable.0 && mask & ring.enable.1 != 0,
            Restore::With(name, mask, set) => name == ring.enable.0 && (mask | set) & ring.enable.1 != 0,
            Restore::Value(name, value) => name == ring.enable.0 && value & ring.enable.1 != 0,
            _ => false,
        });
        if switched_on {
            self.say(&place, "it is switched on while registers are written back", "leave that to Ring");
        }
        for name in [ring.head, ring.tail] {
            let listed = |step: &Restore| matches!(step, Restore::Saved(own, _) | Restore::With(own, ..) if *own == name);
            if self.model.restore.iter().any(listed) {
                self.say(
                    &place,
                    format!("{name} is written back while the ring is off"),
                    "leave that to Ring and Tail",
                );
            }
        }
    }

    fn mailbox(&mut self, direct: &DirectModel) {
        let place = "mailbox";
        let mailbox = &direct.mailbox;
        self.trapped(direct, place, mailbox.memory);
        self.trapped(direct, place, mailbox.control);
        if self.named(place, mailbox.control).is_some_and(|register| register.hook != Hook::Both) {
            self.say(
                place,
                format!("not every access to {} is seen", mailbox.control),
                "mark it with hook_all()",
            );
        }
        let bits = [
            mailbox.request,
            mailbox.acknowledge,
            mailbox.hold,
            mailbox.held,
            mailbox.message,
            mailbox.taken,
            mailbox.ready,
        ];
        let all = bits.iter().fold(0, |all, bit| all | bit);
        if bits.iter().any(|bit| bit.count_ones() != 1) || all.count_ones() != bits.len() as u32 {
            self.say(place, "its bits are not one bit each", "name seven bits");
        }
        if mailbox.refused == 0 || mailbox.refused & (mailbox.kind | mailbox.accepted) != 0 {
            self.say(
                place,
                "an answer that refuses looks like another",
                "name bits that no other answer has",
            );
        }
        if mailbox.latched & !all != 0 {
            self.say(place, "reading clears bits that nobody knows", "name bits of the control register");
        }
        let begins =
            mailbox.messages.iter().filter(|message| matches!(message.keep, KeepRule::Begins { .. })).count();
        let address = mailbox
            .messages
            .iter()
            .filter(|message| matches!(message.keep, KeepRule::Address { .. }))
            .count();
        if begins != 1 || address != 1 {
            self.say(
                place,
                format!("{begins} messages begin anew and {address} set the address"),
                "have one of each",
            );
        }
        let words = self.named(place, mailbox.memory).map_or(0, |register| register.width / 4);
        for (at, message) in mailbox.messages.iter().enumerate() {
            let last = match message.keep {
                KeepRule::Each { word, .. } => word + 1,
                KeepRule::Begins { address } | KeepRule::Address { word: address, .. } => address + 2,
                KeepRule::Nothing | KeepRule::Last | KeepRule::List { .. } => 1,
            };
            if let KeepRule::Address { further: Some(further), .. } = message.keep
                && (further.clear == 0
                    || further.add == 0
                    || further.clear & further.add != 0
                    || (further.clear | further.add) & mailbox.kind != 0)
            {
                let what = format!("further addresses of {} cannot be told from its own", message.name);
                self.say(place, what, "name bits beside its kind");
            }
            if matches!(message.keep, KeepRule::List { number, .. } if number == 0 || number & mailbox.kind != 0)
            {
                self.say(
                    place,
                    format!("the number of {} is not beside its kind", message.name),
                    "correct it",
                );
            }
            if u16::from(message.words) > words || last > message.words || message.kind & !mailbox.kind != 0 {
                self.say(
                    place,
                    format!("{} has words or a kind that messages do not have", message.name),
                    "correct it",
                );
            }
            if mailbox.messages[..at].iter().any(|other| other.kind == message.kind) {
                self.say(
                    place,
                    format!("{} is of the kind of another", message.name),
                    "take one of them away",
                );
            }
        }
    }

    fn replay(&mut self, direct: &DirectModel) {
        let place = "replay";
        let at = |wanted: &Replay| direct.replay.iter().position(|step| step == wanted);
        let times = |wanted: &Replay| direct.replay.iter().filter(|step| *step == wanted).count();
        for step in [Replay::Messages, Replay::Registers, Replay::Counters, Replay::Vectors] {
            if times(&step) != 1 {
                self.say(place, format!("{step:?} is done {} times", times(&step)), "do it once");
            }
        }
        if times(&Replay::Off) > 1 || at(&Replay::Off) > at(&Replay::Registers) {
            self.say(
                place,
                "rings are switched off after registers are written",
                "list Off once, before Registers",
            );
        }
        for ring in direct.rings {
            let (on, tail) = (Replay::Ring(ring.name), Replay::Tail(ring.name));
            if times(&on) != 1 || times(&tail) != 1 {
                self.say(
                    place,
                    format!("ring {} is not brought back once", ring.name),
                    "list Ring and Tail of it",
                );
                continue;
            }
            if at(&on) < at(&Replay::Registers) {
                self.say(
                    place,
                    format!("ring {} is switched on before it has a base", ring.name),
                    "list Ring after Registers",
                );
            }
            if at(&tail) < at(&on) || at(&tail) < at(&Replay::Counters) {
                let what = format!("frames of ring {} would be counted as dummies", ring.name);
                self.say(place, what, "list Tail after Ring and Counters");
            }
            if at(&on) > at(&Replay::Counters) {
                let what = format!("dummies of ring {} would be counted as frames", ring.name);
                self.say(place, what, "list Counters after Ring");
            }
            if ring.dummy == Dummy::Frame && at(&on) < at(&Replay::Messages) {
                let what =
                    format!("ring {} waits for frames to an address that is not yet its own", ring.name);
                self.say(place, what, "list Ring after Messages");
            }
        }
        for step in direct.replay {
            match *step {
                Replay::Ring(name) | Replay::Tail(name)
                    if !direct.rings.iter().any(|ring| ring.name == name) =>
                {
                    self.say(place, format!("there is no ring {name:?}"), "name one of the rings");
                }
                Replay::Value(name, _) => {
                    self.named(place, name);
                }
                Replay::Saved(name, mask) => self.bits(place, name, mask, mask),
                _ => {}
            }
        }
    }
}
