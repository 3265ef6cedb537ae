//! Models in words: for messages, tables and diagrams.

use super::{Check, Event, Given, Way};

/// An event, as short as a data sheet's remark: `CR & 0x10 = 0x10`.
pub fn event(event: &Event) -> String {
    match *event {
        Event::Write { register, mask: 0, .. } => format!("write {register}"),
        Event::Write { register, mask, is } => format!("write {register} {}", field(mask, is)),
        Event::Sets { register, any } => format!("write {register} {}", bits(any)),
        Event::Read { register } => format!("read {register}"),
        Event::Interrupt { any } => format!("interrupt {}", bits(any)),
        Event::Drained { ring } => format!("ring {ring} drained"),
        Event::Became { register, mask, is } => format!("{register} shows {}", field(mask, is)),
        Event::Moved => "count moved".to_owned(),
        Event::Emptied => "ring read empty".to_owned(),
    }
}

/// A condition on an earlier write.
pub fn given(given: &Given) -> String {
    format!("{} has {}", given.register, field(given.mask, given.is))
}

/// A check, as what must hold or what happens.
pub fn check(check: &Check) -> String {
    match *check {
        Check::Ring(name) => format!(
            "every descriptor of ring {name} that is the hardware's lies in guest memory with its buffer"
        ),
        Check::Base(name) => format!("ring {name} is aligned and lies in guest memory"),
        Check::Block(name) => format!("block {name} lies in guest memory"),
        Check::Card { start, count, way } => {
            let verb = if way == Way::Read { "read" } else { "written" };
            format!("{}:{} + {}:{} may be {verb} on the card", start.1, start.0, count.1, count.0)
        }
        Check::CardPage { page, count } => {
            format!("page {page} + {}:{} lies in the card's memory", count.1, count.0)
        }
        Check::Below(low, high) => format!("{low} is below {high}, both in the card's memory"),
        Check::Within(page) => format!("{page} is a page of the receive ring"),
        Check::Deny(why) => format!("denied: {why}"),
        Check::Ignore(why) => format!("ignored: {why}"),
    }
}

/// Bits and what they must be: `0x10`, if all of them are one; else `0x38 = 0x8`.
fn field(mask: u32, is: u32) -> String {
    if mask == is {
        return format!("all of {mask:#x}");
    }
    format!("& {mask:#x} = {is:#x}")
}

fn bits(any: u32) -> String {
    if any.count_ones() == 1 { format!("with {any:#x}") } else { format!("with any of {any:#x}") }
}
