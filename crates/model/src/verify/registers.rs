//! Offsets, widths, banks.

use super::Look;
use crate::layout::has_meaning;
use crate::limits::LARGEST;
use crate::{Hook, Register, Way};

impl Look<'_> {
    pub(super) fn registers(&mut self) {
        let model = self.model;
        if model.size == 0 || model.size > LARGEST {
            self.say("size", format!("{} bytes", model.size), format!("have 1 to {LARGEST}"));
        }
        let banks = self.banks();
        for (at, register) in model.registers.iter().enumerate() {
            let place = format!("register {}", register.name);
            if register.width == 0 {
                self.say(&place, "it has no bytes", "give it a width");
            }
            if u32::from(register.offset) + u32::from(register.width) > u32::from(model.size) {
                self.say(&place, format!("it ends beyond the {:#x} bytes", model.size), "enlarge `size`");
            }
            if register.bank.is_some_and(|bank| usize::from(bank) >= banks) {
                self.say(
                    &place,
                    format!("it is in bank {:?} of {banks}", register.bank),
                    "take a bank that can be chosen",
                );
            }
            if !has_meaning(register, Way::Read) && !has_meaning(register, Way::Write) {
                self.say(
                    &place,
                    "it can neither be read nor written",
                    "say what one of them does, or leave it out",
                );
            }
            for other in &model.registers[..at] {
                self.pair(&place, register, other);
            }
        }
    }

    fn pair(&mut self, place: &str, register: &Register, other: &Register) {
        if register.name == other.name {
            self.say(place, "there are two of this name", "rename one");
        }
        let banked = register.bank.is_none() || other.bank.is_none() || register.bank == other.bank;
        let end = |register: &Register| u32::from(register.offset) + u32::from(register.width);
        let apart = end(register) <= u32::from(other.offset) || end(other) <= u32::from(register.offset);
        if !banked || apart {
            return;
        }
        for (way, does) in [(Way::Read, "read"), (Way::Write, "written")] {
            if has_meaning(register, way) && has_meaning(other, way) {
                self.say(
                    place,
                    format!("it overlaps {}, and both can be {does}", other.name),
                    "correct an offset or a width, put them into different banks, or let one of them be only read and the other only \
                     written",
                );
                break;
            }
        }
    }

    /// How many banks there are.
    fn banks(&mut self) -> usize {
        let Some(banks) = self.model.banks else { return 1 };
        let low = banks.mask.trailing_zeros();
        let field = banks.mask.checked_shr(low).unwrap_or(0);
        if banks.mask == 0 || u32::from(banks.shift) != low || field.count_ones() != field.trailing_ones() {
            self.say(
                "banks",
                format!("the field {:#x} shifted by {} is not a number of banks", banks.mask, banks.shift),
                "give the mask of adjacent bits and the place of its lowest",
            );
            return 1;
        }
        if let Some(register) = self.named("banks", banks.register) {
            if register.bank.is_some() || register.width != 1 {
                self.say(
                    "banks",
                    format!("{} is not one byte in every bank", register.name),
                    "take a register that is",
                );
            }
            if register.hook == Hook::ByState {
                self.say(
                    "banks",
                    format!("not every write to {} is seen", register.name),
                    format!("mark {} with hook_writes()", register.name),
                );
            }
        }
        usize::from(field) + 1
    }
}
