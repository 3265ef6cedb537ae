//! The functions of a model: what they are given, and what they let pass. They are called here, with all addresses.

use super::{Look, subject};
use crate::{ANY, Check, Condition, DataPort, On, Reads, Region, Register, State, VALUES, Way};

/// Addresses behind a data port: what two registers of a byte can say.
const ADDRESSES: u32 = 0x1_0000;

impl Look<'_> {
    /// A condition that is a check: the values of its registers are known at any time.
    pub(super) fn condition(&mut self, place: &str, condition: &Condition) {
        self.described(place, condition);
        for name in condition.registers {
            self.known(place, name);
            self.value(place, name);
        }
    }

    /// A condition that is an event: the hardware is asked for its registers, or they are known.
    pub(super) fn asked_condition(&mut self, place: &str, condition: &Condition) {
        self.described(place, condition);
        for name in condition.registers {
            self.value(place, name);
            let unreadable = |register: &Register| matches!(register.reads, Reads::Never | Reads::Effect);
            if self.model.registers.iter().any(|register| register.name == *name && unreadable(register)) {
                self.known(place, name);
            }
        }
    }

    fn described(&mut self, place: &str, condition: &Condition) {
        if condition.name.is_empty() || condition.words.is_empty() {
            self.say(place, "a condition that nobody can tell from others", "give it a name and words");
        }
        self.given(place, condition.registers);
    }

    /// The registers that a function is given.
    fn given(&mut self, place: &str, registers: &[&str]) {
        if registers.is_empty() || registers.len() > VALUES {
            let count = registers.len();
            self.say(place, format!("a function of {count} registers"), format!("name 1 to {VALUES}"));
        }
    }

    /// A register that a function is given has a value.
    fn value(&mut self, place: &str, name: &str) {
        if self.named(place, name).is_some_and(|register| register.width > 4) {
            self.say(place, format!("no value of {name} is kept"), "name registers of up to 4 bytes");
        }
    }

    pub(super) fn port(&mut self, port: &DataPort) {
        let place = "port";
        let wide = |register: &Register| !matches!(register.width, 1 | 2 | 4);
        let width = self.named(place, port.register).map_or(1, |register| register.width);
        if self.model.registers.iter().any(|register| register.name == port.register && wide(register)) {
            self.say(place, format!("{} is {width} bytes", port.register), "name one of 1, 2 or 4 bytes");
        }
        for name in [port.address.0, port.address.1, port.count.0, port.count.1] {
            self.byte(place, name);
        }
        self.known(place, port.command);
        self.given(place, port.registers);
        for name in port.registers {
            self.known(place, name);
            self.value(place, name);
        }
        for name in [port.reached.0, port.reached.1] {
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
        let (mask, read, write) = port.direction;
        for value in [read, write] {
            self.bits(place, port.command, mask, value);
        }
        for (from, to) in port.readable.iter().chain(port.writable) {
            if from >= to || *to > ADDRESSES {
                self.say(
                    place,
                    "a range ends before it begins, or is never reached",
                    "give first byte and end",
                );
            }
        }
        // They are moved whole, in accesses of the port's width, and counted by two bytes.
        let odd = |(from, to): &(u32, u32)| {
            to.saturating_sub(*from) % u32::from(width.max(1)) != 0 || to.saturating_sub(*from) >= ADDRESSES
        };
        if port.writable.iter().any(odd) {
            let what = format!("memory is not moved in accesses of {width} bytes, or by one transfer");
            self.say(place, what, "give ranges that are");
        }
        for (way, value, ranges) in [(Way::Read, read, port.readable), (Way::Write, write, port.writable)] {
            self.transfers(port, way, value, ranges);
        }
    }

    /// In whatever states the device is, the command for that way makes one and the same check of address and count, and that check lets
    /// no byte pass that lies beyond the ranges.
    fn transfers(&mut self, port: &DataPort, way: Way, value: u32, ranges: &[(u32, u32)]) {
        let mut checks = self.model.regions.iter().filter_map(|region| checked(port, region, value));
        let Some(condition) = checks.next() else {
            let word = if way == Way::Read { "read" } else { "written" };
            return self.say(
                "port",
                format!("{} lets memory be {word} that nobody has looked at", port.command),
                format!("give an edge on {} out of every state a check of address and count", port.command),
            );
        };
        let place = |name: &str| condition.registers.iter().position(|own| *own == name);
        let places = [port.address.0, port.address.1, port.count.0].map(place);
        let [Some(low), Some(high), Some(count)] = places else { return };
        let mut values = vec![0; condition.registers.len()];
        values[count] = 1;
        let passes = (0..ADDRESSES).find(|address| {
            (values[low], values[high]) = (address & 0xff, address >> 8);
            (condition.holds)(&values) && !ranges.iter().any(|range| (range.0..range.1).contains(address))
        });
        if let Some(address) = passes {
            self.say(
                "port",
                format!("{} lets the byte at {address:#06x} pass, which is in no range", condition.name),
                "correct the function or the ranges",
            );
        }
    }
}

/// The check of address and count that a region makes before a command that begins a transfer, if it makes it in every state.
fn checked(port: &DataPort, region: &Region, value: u32) -> Option<&'static Condition> {
    let names = [port.address.0, port.address.1, port.count.0, port.count.1];
    let looks = |condition: &Condition| names.iter().all(|name| condition.registers.contains(name));
    let of = |state: &State| {
        let mut edges = region.transitions.iter().filter(|edge| [ANY, state.name].contains(&edge.from));
        let edge =
            edges.find(|edge| subject(&edge.on) == Some(port.command) && fits(&edge.on, port, value))?;
        // Under a condition it would not always be made.
        edge.checks.iter().find_map(|check| match check {
            Check::Holds(condition) if edge.given.is_none() && looks(condition) => Some(*condition),
            _ => None,
        })
    };
    let mut all = region.states.iter().map(of);
    let first = all.next()??;
    all.all(|check| check == Some(first)).then_some(first)
}

/// Whether some command that begins a transfer that way fits an event.
fn fits(event: &On, port: &DataPort, value: u32) -> bool {
    let field = port.direction.0;
    match *event {
        On::Write { mask, is, .. } => is & field & mask == value & mask & field,
        On::Sets { any, .. } => any & !field != 0 || any & value != 0,
        _ => false,
    }
}
