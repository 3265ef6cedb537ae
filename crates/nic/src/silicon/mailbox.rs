//! The mailbox between the function and its PF, which takes a message in one step and answers in the next.

use std::collections::VecDeque;

use super::SiliconViolation;
use super::chip::{Chip, RegisterLayout};
use super::pf::PfState;
use super::spec::*;

/// Where a message of the VF is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    None,
    /// Announced, not yet taken.
    Announced,
    /// Taken; the answer is to come.
    Taken,
}

/// The mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    memory: [u32; MAILBOX_WORDS],
    bits: u32,
    request: Request,
    message: [u32; MAILBOX_WORDS],
    /// The driver has asked and goes on holding it: the PF reads the message nevertheless.
    over: bool,
    /// What the PF says by itself.
    to_say: VecDeque<u32>,
    pub(crate) pf: PfState,
}

impl Mailbox {
    pub(crate) fn new(pf: PfState) -> Mailbox {
        Mailbox {
            memory: [0; MAILBOX_WORDS],
            bits: RSTD,
            request: Request::None,
            message: [0; MAILBOX_WORDS],
            over: false,
            to_say: VecDeque::new(),
            pf,
        }
    }

    /// The function begins to reset.
    pub(crate) fn reset(&mut self) {
        let to_say = std::mem::take(&mut self.to_say);
        let mut pf = self.pf.clone();
        pf.reset();
        *self = Mailbox { bits: 0, to_say, ..Mailbox::new(pf) };
    }

    /// The reset has ended.
    pub(crate) fn ready(&mut self) {
        self.bits |= RSTD;
    }

    pub(crate) fn say(&mut self, word: u32) {
        self.to_say.push_back(word);
    }

    /// `None`: no register of the mailbox.
    pub(crate) fn read(&mut self, layout: &RegisterLayout, offset: u64) -> Option<u32> {
        if offset == layout.mailbox {
            let value = self.bits;
            self.bits &= !READ_TO_CLEAR;
            return Some(value);
        }
        self.memory.get(word(layout, offset)?).copied()
    }

    /// `false`: no register of the mailbox.
    pub(crate) fn write(
        &mut self,
        layout: &RegisterLayout,
        offset: u64,
        value: u32,
    ) -> Result<bool, SiliconViolation> {
        let held = self.bits & VFU != 0;
        if offset != layout.mailbox {
            let Some(place) = word(layout, offset).and_then(|at| self.memory.get_mut(at)) else {
                return Ok(false);
            };
            if !held {
                return Err(SiliconViolation::MailboxNotHeld { offset });
            }
            *place = value;
            return Ok(true);
        }
        if value & REQ != 0 {
            if !held {
                return Err(SiliconViolation::MailboxNotHeld { offset });
            }
            if self.request != Request::None {
                return Err(SiliconViolation::RequestOnRequest);
            }
            self.message = self.memory;
            self.request = Request::Announced;
            self.over = value & VFU != 0;
        }
        if value & VFU != 0 && self.bits & PFU == 0 {
            self.bits |= VFU;
        } else {
            self.bits &= !VFU;
        }
        Ok(true)
    }

    /// What the PF does in one step. Whether the function is to be interrupted.
    pub(crate) fn step<C: Chip>(&mut self) -> bool {
        // Whoever holds the mailbox keeps the other out, but for reading what it has asked.
        if self.bits & VFU != 0 && !(self.over && self.request == Request::Announced) {
            return false;
        }
        match self.request {
            Request::Announced => {
                self.request = Request::Taken;
                self.pf.taken += 1;
                self.bits |= PFACK;
                true
            }
            Request::Taken => {
                self.memory = C::answer(&mut self.pf, &self.message);
                self.request = Request::None;
                self.bits |= PFSTS;
                true
            }
            Request::None if self.bits & PFSTS == 0 => {
                let Some(word) = self.to_say.pop_front() else { return false };
                self.memory = [0; MAILBOX_WORDS];
                self.memory[0] = word;
                self.bits |= PFSTS;
                true
            }
            Request::None => false,
        }
    }
}

/// Which word of the mailbox is there.
fn word(layout: &RegisterLayout, offset: u64) -> Option<usize> {
    let at = offset.checked_sub(layout.memory)? / 4;
    usize::try_from(at).ok().filter(|at| *at < MAILBOX_WORDS)
}
