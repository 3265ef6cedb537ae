//! Reset, halt, and what a saved device would miss.

use super::{Look, subject};
use crate::{ANY, Condition, Hook, RESET, Reads, Register, Restore, State, TailQueue, Writes};

impl Look<'_> {
    pub(super) fn restore(&mut self) {
        let model = self.model;
        let (by, _, value) = model.reset.by;
        self.bits("reset", by, value, value);
        let (done, mask, is) = model.reset.done;
        self.bits("reset", done, mask, is);
        for name in [by, done] {
            let later = |register: &Register| register.name == name && register.bank.is_some_and(|n| n > 0);
            if model.registers.iter().any(later) {
                self.say(
                    "reset",
                    format!("{name} is not in the first bank"),
                    "take registers of the first bank, or of all: that one is chosen before a reset and after it",
                );
            }
        }
        let mut edges = model.regions.iter().flat_map(|region| region.transitions);
        if !edges.any(|edge| edge.to == RESET && subject(&edge.on) == Some(by)) {
            self.say(
                "reset",
                format!("no edge on {by} leads to RESET"),
                "give it one, or guests reset unnoticed",
            );
        }
        for step in model.halt {
            match step {
                Restore::Value(name, _) => {
                    self.named("halt", name);
                }
                _ => self.say(
                    "halt",
                    "it is more than a value",
                    "write values only: nothing has been saved yet",
                ),
            }
        }
        for step in model.restore {
            self.step(step);
        }
        self.whole();
        self.told();
    }

    fn step(&mut self, step: &Restore) {
        let place = "restore";
        match *step {
            Restore::Saved(name, mask) | Restore::With(name, mask, _) => {
                let Some(register) = self.named(place, name) else { return };
                if register.writes == Writes::Never || register.width > 4 {
                    self.say(place, format!("{name} cannot be written as one value"), "take it off the list");
                }
                let unknown = matches!(register.reads, Reads::Never | Reads::Effect);
                if unknown && register.hook == Hook::ByState {
                    self.say(
                        place,
                        format!(
                            "nobody knows what {name} holds: it cannot be read, and not every write is seen"
                        ),
                        format!("mark {name} with hook_writes()"),
                    );
                }
                if mask == 0 {
                    self.say(place, format!("no bit of {name} is brought back"), "name its bits");
                }
            }
            Restore::Value(name, _) => {
                let denied = |register: &&Register| register.writes == Writes::Never;
                if self.named(place, name).filter(denied).is_some() {
                    self.say(place, format!("{name} cannot be written"), "take it off the list");
                }
            }
            Restore::Lost(name, why) => {
                self.named(place, name);
                if why.is_empty() {
                    self.say(place, format!("{name} is lost for no reason"), "say why");
                }
            }
            Restore::Ring(name) => {
                if !self.model.rings.iter().any(|ring| ring.name == name) {
                    self.say(place, format!("there is no ring {name:?}"), "name one of the rings");
                }
            }
            Restore::Shown(name, until) => {
                let Some(register) = self.named(place, name) else { return };
                let readable = matches!(register.reads, Reads::Plain | Reads::Alive);
                let starts = until == 0 && register.writes == Writes::Trigger;
                if !(starts || register.writes == Writes::Never) || !readable || register.width > 4 {
                    self.say(
                        place,
                        format!("{name} is not a value that only the card sets"),
                        "bring it back with Saved, or name it Lost",
                    );
                }
                if !starts && (until == 0 || until & !self.model.interrupts.bits != 0) {
                    self.say(
                        place,
                        format!("{name} is shown until {until:#x}, which is not of the interrupts"),
                        "name bits of the interrupt status with which the card sets it",
                    );
                }
            }
            Restore::Table(name, preset) => {
                let Some(register) = self.named(place, name) else { return };
                let width = register.width;
                let words = width > 4 && width.is_multiple_of(4) && register.offset.is_multiple_of(4);
                if !words || register.writes != Writes::Plain || preset.saturating_mul(4) > width {
                    let what = format!("{name} is not a table of words that guests write");
                    self.say(place, what, "name a register of several words, written Plain");
                }
            }
            Restore::Memory => {
                if self.model.port.is_none() {
                    self.say(place, "there is no data port", "describe it in `port`");
                }
            }
        }
    }

    /// The memory behind the data port is filled through it. What the port has to be told for that is written before, whoever was there:
    /// the conditions of the port are called with the very values.
    fn filled(&mut self, fills: &[&'static Condition]) {
        let Some(at) = self.model.restore.iter().position(|step| *step == Restore::Memory) else {
            self.say("restore", "the memory behind the data port is not put back", "list Memory");
            return;
        };
        let before = |name: &&str| {
            self.model.restore[..at].iter().rev().find_map(|step| match *step {
                Restore::Value(own, value) if own == *name => Some(Some(value)),
                Restore::Saved(own, _) | Restore::With(own, ..) if own == *name => Some(None),
                _ => None,
            })
        };
        let mut findings = Vec::new();
        for condition in fills {
            let values: Option<Vec<u32>> =
                condition.registers.iter().map(|name| before(name).flatten()).collect();
            let what = match values {
                Some(values) if (condition.holds)(&values) => continue,
                Some(values) => (condition.refusal)(&values),
                None => format!("when memory is filled nobody knows whether {}", condition.words),
            };
            findings.push((what, condition.registers.join(" and ")));
        }
        for (what, names) in findings {
            self.say(
                "restore",
                what,
                format!("list a Value of {names} before Memory, and what was saved after it"),
            );
        }
    }

    /// What a region's state is told, and not derived, decides nothing but whether the device may change hands.
    fn told(&mut self) {
        for told in self.model.told {
            let Some(region) = self.model.regions.iter().find(|region| region.name == *told) else {
                self.say("told", format!("there is no region {told:?}"), "name one of the regions");
                continue;
            };
            let Some((first, others)) = region.states.split_first() else { continue };
            let checked = |state: &State| -> Vec<_> {
                let from = region.transitions.iter().filter(|edge| [ANY, state.name].contains(&edge.from));
                from.filter(|edge| !edge.checks.is_empty())
                    .map(|edge| (edge.on, edge.given, edge.checks))
                    .collect()
            };
            let least = checked(first);
            for other in others {
                let checks = checked(other);
                if other.hooks != first.hooks || !least.iter().all(|check| checks.contains(check)) {
                    self.say(
                        "told",
                        format!(
                            "who says that {told} is in {} gets round what {} checks",
                            other.name, first.name
                        ),
                        "make the checks of the first state in every state, or derive the region",
                    );
                }
            }
        }
    }

    /// Everything that guests can set is brought back, or somebody says why not.
    fn whole(&mut self) {
        let model = self.model;
        for register in model.registers.iter().filter(|register| register.writes == Writes::Plain) {
            let name = register.name;
            let listed = model.restore.iter().any(|step| match step {
                Restore::Saved(own, _) | Restore::With(own, ..) | Restore::Lost(own, _) => *own == name,
                Restore::Table(own, _) => *own == name,
                _ => false,
            });
            let of_queue = |queue: &TailQueue| [queue.length, queue.head, queue.tail].contains(&name);
            let of_ring = model.rings.iter().any(|ring| {
                [ring.base.0, ring.base.1].contains(&name) || ring.queue.as_ref().is_some_and(of_queue)
            });
            let of_block = model.blocks.iter().any(|block| [block.base.0, block.base.1].contains(&name));
            let virtual_mask = model.interrupts.mask == name;
            if !(listed || of_ring || of_block || virtual_mask) {
                self.say(
                    "restore",
                    format!("{name}, which guests can set, is not brought back"),
                    format!("list Saved({name:?}, its bits), or Lost({name:?}, why)"),
                );
            }
        }
        for ring in model.rings {
            let times = model.restore.iter().filter(|step| **step == Restore::Ring(ring.name)).count();
            if times != 1 {
                self.say("restore", format!("ring {} is pointed at {times} times", ring.name), "do it once");
            }
        }
        if let Some(port) = &model.port {
            self.filled(port.fills);
        }
    }
}
