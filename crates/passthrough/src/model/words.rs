//! Models in words: for messages, tables and diagrams.

use super::{Check, Event, Given, Hook, Reads, Restore, Way, Writes};

/// An event, as short as a data sheet's remark: `write CR, 0x10 set`.
pub fn event(event: &Event) -> String {
    match *event {
        Event::Write { register, mask: 0, .. } => format!("write {register}"),
        Event::Write { register, mask, is } => format!("write {register}, {}", field(mask, is)),
        Event::Sets { register, any } => format!("write {register}, {} set", bits(any)),
        Event::Read { register } => format!("read {register}"),
        Event::Interrupt { any } => format!("interrupt {}", bits(any)),
        Event::Drained { ring } => format!("ring {ring} has drained"),
        Event::Became { register, mask, is } => format!("{register} shows {}", field(mask, is)),
        Event::Moved => "all bytes asked for have moved".to_owned(),
        Event::Emptied => "the card's ring was read empty".to_owned(),
    }
}

/// A condition on an earlier write: `CPCR has 0x03 set`.
pub fn given(given: &Given) -> String {
    format!("{} has {}", given.register, field(given.mask, given.is))
}

/// A check, as what must hold, or what happens instead.
pub fn check(check: &Check) -> String {
    match *check {
        Check::Ring(name) => format!("ring {name}: its descriptors and buffers lie in guest memory"),
        Check::Base(name) => format!("ring {name}: it is aligned and lies in guest memory"),
        Check::Block(name) => format!("block {name} lies in guest memory"),
        Check::Card { start, count, way } => {
            let verb = if way == Way::Read { "read" } else { "written" };
            format!("{}:{} + {}:{} may be {verb} on the card", start.1, start.0, count.1, count.0)
        }
        Check::CardPage { page, count } => {
            format!("page {page} + {}:{} bytes lie in the card's memory", count.1, count.0)
        }
        Check::Below(low, high) => format!("{low} is below {high}, both in the card's memory"),
        Check::Within(page) => format!("{page} is a page of the receive ring"),
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
        Restore::Card => "the card's memory".to_owned(),
        Restore::Lost(register, why) => format!("not {register}: {why}"),
    }
}

/// Bits and what they must be.
fn field(mask: u32, is: u32) -> String {
    match is {
        0 => format!("{mask:#04x} clear"),
        is if is == mask => format!("{mask:#04x} set"),
        is => format!("{mask:#04x} = {is:#04x}"),
    }
}

fn bits(any: u32) -> String {
    if any.count_ones() == 1 { format!("{any:#04x}") } else { format!("any of {any:#04x}") }
}
