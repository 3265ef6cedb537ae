//! Models in words: for messages, tables and diagrams.

use crate::{Check, Given, Hook, On, Reads, Restore, StateModel, Way, Writes};

/// An event, as short as a data sheet's remark: `write CR, RST=1`.
pub fn event(model: &StateModel, event: &On) -> String {
    match *event {
        On::Write { register, mask: 0, .. } => format!("write {register}"),
        On::Write { register, mask, is } => {
            format!("write {register}, {}", field(model, register, mask, is))
        }
        On::Sets { register, any: bits } => {
            format!("write {register}, {}", any(model, register, bits, "=1"))
        }
        On::Read { register } => format!("read {register}"),
        On::Interrupt { any: bits } => {
            format!("interrupt {}", any(model, model.interrupts.status, bits, ""))
        }
        On::Drained { ring } => format!("ring {ring} has drained"),
        On::Became { register, mask, is } => {
            format!("{register} shows {}", field(model, register, mask, is))
        }
        On::Moved => "all bytes asked for have moved".to_owned(),
        On::Holds(condition) => condition.words.to_owned(),
    }
}

/// A condition on an earlier write: `CPCR has RXEN=1 TXEN=1`.
pub fn given(model: &StateModel, given: &Given) -> String {
    format!("{} has {}", given.register, field(model, given.register, given.mask, given.is))
}

/// A check, as what must hold, or what happens instead.
pub fn check(check: &Check) -> String {
    match *check {
        Check::Descriptors(name) => format!("ring {name}: its descriptors and buffers lie in guest memory"),
        Check::Base(name) => format!("ring {name}: it is aligned and lies in guest memory"),
        Check::Block(name) => format!("block {name} lies in guest memory"),
        Check::Holds(condition) => condition.words.to_owned(),
        Check::Deny(why) => format!("denied: {why}"),
        Check::Ignore(why) => format!("ignored: {why}"),
    }
}

/// Which way, as a verb.
pub fn way(way: Way) -> &'static str {
    match way {
        Way::Read => "read",
        Way::Write => "write",
    }
}

/// What reading does.
pub fn reads(reads: Reads) -> &'static str {
    match reads {
        Reads::Plain => "as written",
        Reads::Alive => "alive",
        Reads::Effect => "effect",
        Reads::Never => "-",
    }
}

/// What writing does.
pub fn writes(writes: Writes) -> &'static str {
    match writes {
        Writes::Plain => "plain",
        Writes::Clears => "ones clear",
        Writes::Sets => "ones set",
        Writes::Trigger => "trigger",
        Writes::Never => "-",
    }
}

/// When it is hooked.
pub fn hook(hook: Hook) -> &'static str {
    match hook {
        Hook::ByState => "-",
        Hook::Writes => "writes",
        Hook::Both => "both",
    }
}

/// A step of bringing a saved device back.
pub fn restore(step: &Restore) -> String {
    match *step {
        Restore::Saved(register, mask) if mask == !0 => format!("{register}, as saved"),
        Restore::Saved(register, mask) => format!("{register}, as saved & {mask:#04x}"),
        Restore::With(register, mask, set) => format!("{register}, as saved & {mask:#04x} | {set:#04x}"),
        Restore::Value(register, value) => format!("{register} = {value:#04x}"),
        Restore::Ring(ring) => format!("ring {ring}"),
        Restore::Memory => "the card's memory".to_owned(),
        Restore::Shown(register, 0) => format!("{register}, shown as saved until it is written"),
        Restore::Shown(register, until) => format!("{register}, shown as saved until interrupt {until:#04x}"),
        Restore::Table(register, _) => format!("{register}, word by word, as saved"),
        Restore::Lost(register, why) => format!("not {register}: {why}"),
    }
}

/// The names of a register's bits and fields.
fn names(model: &StateModel, register: &str) -> &'static [(&'static str, u32)] {
    model.registers.iter().find(|own| own.name == register).map_or(&[], |register| register.bits)
}

/// Bits and what they must be: by name `RD=1`, without one `& 0x38 = 0x08`.
fn field(model: &StateModel, register: &str, mask: u32, is: u32) -> String {
    let mut left = mask;
    let mut parts = Vec::new();
    for (name, bits) in names(model, register) {
        if *bits != 0 && left & bits == *bits {
            parts.push(format!("{name}={}", (is & bits) >> bits.trailing_zeros()));
            left &= !bits;
        }
    }
    if left != 0 {
        parts.push(format!("& {left:#04x} = {:#04x}", is & left));
    }
    parts.join(" ")
}

/// Any of some bits, each followed by `after`: `RE=1 or TE=1`.
fn any(model: &StateModel, register: &str, any: u32, after: &str) -> String {
    let mut left = any;
    let mut parts = Vec::new();
    for (name, bits) in names(model, register) {
        if bits.count_ones() == 1 && left & bits == *bits {
            parts.push(format!("{name}{after}"));
            left &= !bits;
        }
    }
    if left != 0 {
        parts.push(if left.count_ones() == 1 {
            format!("{left:#04x}{after}")
        } else {
            format!("a bit of {left:#04x}{after}")
        });
    }
    parts.join(" or ")
}
