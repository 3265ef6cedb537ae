//! What is wrong with a table. Found when a model is to run and by its tests, before any guest is near.
//!
//! | file | what it looks at |
//! |---|---|
//! | `registers` | offsets, widths, banks, who shadows whom |
//! | `regions` | states, ways there and back, events that nobody would see, edges that are never taken |
//! | `reach` | what the device can get at: rings, blocks, and the checks before it does |
//! | `functions` | the model's functions: what they are given, and, by calling them, what they let pass |
//! | `restore` | what a saved device would miss |
//! | `direct` | rings that the guest drives, the mailbox, what another function would miss |

mod direct;
mod functions;
mod reach;
mod regions;
mod registers;
mod restore;

pub use direct::verify_direct;

use crate::limits::{DIRECT_REGISTERS, REGIONS, REGISTERS, STATES};
use crate::{Check, Hook, Interrupts, On, Register, StateModel, TableFlaw};

/// Everything that is wrong with a table; empty if it is sound.
pub fn verify(model: &StateModel) -> Vec<TableFlaw> {
    let mut look = Look { model, findings: Vec::new() };
    let direct = model.interrupts == Interrupts::PAST_THE_MONITOR;
    look.most("registers", model.registers.len(), if direct { DIRECT_REGISTERS } else { REGISTERS });
    for register in model.registers.iter().skip(REGISTERS).filter(|register| register.hook != Hook::ByState) {
        let what = format!("{} is hooked and none of the first {REGISTERS}", register.name);
        look.say("registers", what, "list it further up");
    }
    look.most("regions", model.regions.len(), REGIONS);
    let states: usize = model.regions.iter().map(|region| region.states.len()).sum();
    if states > STATES {
        look.most("states of all regions", states, STATES);
    }
    if look.findings.is_empty() {
        look.registers();
        look.interrupts();
        look.regions();
        look.reach();
        look.restore();
    }
    look.findings
}

/// Most ways that an event can go, over all states: what a number of 16 bits can count.
const MOST_EDGES: usize = 16_000;

/// A look at a table.
struct Look<'a> {
    model: &'a StateModel,
    findings: Vec<TableFlaw>,
}

impl<'a> Look<'a> {
    fn say(&mut self, place: impl Into<String>, what: impl Into<String>, remedy: impl Into<String>) {
        let finding = TableFlaw { place: place.into(), what: what.into(), remedy: remedy.into() };
        if !self.findings.contains(&finding) {
            self.findings.push(finding);
        }
    }

    fn most(&mut self, what: &str, has: usize, most: usize) {
        if has == 0 || has > most {
            self.say(what, format!("there are {has}"), format!("have 1 to {most}"));
        }
    }

    /// A register by its name, or a finding.
    fn named(&mut self, place: &str, name: &str) -> Option<&'a Register> {
        let found = self.model.registers.iter().find(|register| register.name == name);
        if found.is_none() {
            self.say(place, format!("there is no register {name:?}"), "name one of the register table");
        }
        found
    }

    /// A register of one byte whose value is known.
    fn byte(&mut self, place: &str, name: &str) {
        self.known(place, name);
        let wide = self.model.registers.iter().any(|register| register.name == name && register.width != 1);
        if wide {
            self.say(place, format!("{name} is not one byte"), "name registers of one byte");
        }
    }

    /// A register whose value the monitor must know at any time.
    fn known(&mut self, place: &str, name: &str) {
        if let Some(register) = self.named(place, name)
            && register.hook == Hook::ByState
        {
            self.say(
                place,
                format!("the value of {name} is needed, and not every write to it is seen"),
                format!("mark {name} with hook_writes()"),
            );
        }
    }

    /// Bits of a register, and what they must be.
    fn bits(&mut self, place: &str, name: &str, mask: u32, is: u32) {
        let Some(register) = self.named(place, name) else { return };
        if register.width > 4 {
            self.say(
                place,
                format!("{name} is {} bytes wide, and no value of it is kept", register.width),
                "split it into registers of up to 4 bytes",
            );
        } else if register.width < 4 && mask >> (u32::from(register.width) * 8) != 0 {
            let (width, bits) = (register.width, mask);
            self.say(
                place,
                format!("mask {bits:#x} has bits that {name} ({width} bytes) has not"),
                "take bits of the register",
            );
        }
        if is & !mask != 0 {
            self.say(place, format!("{name} & {mask:#x} is never {is:#x}"), "take a value within the mask");
        }
    }

    fn interrupts(&mut self) {
        let of = &self.model.interrupts;
        if *of == Interrupts::PAST_THE_MONITOR {
            return;
        }
        let (status, mask) = (of.status, of.mask);
        for (name, bits) in [(status, of.bits | of.live), (mask, of.bits)] {
            self.bits("interrupts", name, bits, 0);
            self.known("interrupts", name);
        }
        if let Some(register) = self.named("interrupts", status)
            && register.hook != Hook::Both
        {
            self.say(
                "interrupts",
                format!("reads of {status} are not seen, and it is virtual"),
                format!("mark {status} with hook_all()"),
            );
        }
        if let Some(split) = of.split {
            for name in [split.clear, split.cause, split.auto, split.auto_on.0] {
                self.known("interrupts", name);
            }
            self.bits("interrupts", split.auto_on.0, split.auto_on.1, 0);
            if split.asserted & (of.bits | of.live) != 0 {
                self.say("interrupts", "the bit that says asserted is a cause too", "take another");
            }
        }
        if of.error & !of.bits != 0 {
            self.say(
                "interrupts",
                format!("the error bit {:#x} does not interrupt", of.error),
                "take one of the bits that do",
            );
        }
    }
}

/// The register that an event is about.
fn subject(event: &On) -> Option<&'static str> {
    match *event {
        On::Write { register, .. }
        | On::Sets { register, .. }
        | On::Read { register }
        | On::Became { register, .. } => Some(register),
        On::Interrupt { .. } | On::Drained { .. } | On::Moved | On::Holds(_) => None,
    }
}

/// Whether a list of checks lets nothing pass.
fn refused(checks: &[Check]) -> bool {
    checks.iter().any(Check::refuses)
}
