//! How the rows of a table are written: short, in the order of the data sheet's columns.

use crate::{Check, Given, Hook, On, Reads, Register, State, Transition, Way, Writes};

impl Register {
    /// A register in every bank, hooked where a state says so.
    pub const fn new(name: &'static str, offset: u16, width: u16, reads: Reads, writes: Writes) -> Self {
        Self { name, offset, width, bank: None, reads, writes, hook: Hook::ByState, bits: &[], kept: 0 }
    }

    /// It is in this bank only.
    pub const fn bank(mut self, bank: u8) -> Self {
        self.bank = Some(bank);
        self
    }

    /// Names of its bits and fields.
    pub const fn bits(mut self, bits: &'static [(&'static str, u32)]) -> Self {
        self.bits = bits;
        self
    }

    /// Bits that the hardware never hears of. Its writes are always hooked.
    pub const fn keeps(mut self, kept: u32) -> Self {
        self.kept = kept;
        self.hook_writes()
    }

    /// Its writes are always hooked.
    pub const fn hook_writes(mut self) -> Self {
        self.hook = Hook::Writes;
        self
    }

    /// Its reads and writes are always hooked: it is virtual, or reading it does something to the whole device.
    pub const fn hook_all(mut self) -> Self {
        self.hook = Hook::Both;
        self
    }
}

impl State {
    /// A state in which the device may not change hands.
    pub const fn busy(name: &'static str, note: &'static str) -> Self {
        Self { name, reusable: false, hooks: &[], note }
    }

    /// A state in which it may.
    pub const fn reusable(name: &'static str, note: &'static str) -> Self {
        Self { name, reusable: true, hooks: &[], note }
    }

    /// What is hooked here.
    pub const fn hooks(mut self, hooks: &'static [(&'static str, Way)]) -> Self {
        self.hooks = hooks;
        self
    }
}

impl Transition {
    /// An edge without a condition and without a check.
    pub const fn new(from: &'static str, on: On, to: &'static str) -> Self {
        Self { from, on, given: None, to, checks: &[] }
    }

    /// Only if `register & mask == is`.
    pub const fn given(mut self, register: &'static str, mask: u32, is: u32) -> Self {
        self.given = Some(Given { register, mask, is });
        self
    }

    /// What is checked before the hardware hears of it.
    pub const fn check(mut self, checks: &'static [Check]) -> Self {
        self.checks = checks;
        self
    }
}

impl On {
    /// Any write to the register.
    pub const fn written(register: &'static str) -> Self {
        Self::Write { register, mask: 0, is: 0 }
    }

    /// A write with `value & mask == is`.
    pub const fn write(register: &'static str, mask: u32, is: u32) -> Self {
        Self::Write { register, mask, is }
    }

    /// A write that sets any of these bits.
    pub const fn sets(register: &'static str, any: u32) -> Self {
        Self::Sets { register, any }
    }

    /// A read of the register.
    pub const fn read(register: &'static str) -> Self {
        Self::Read { register }
    }

    /// Any of these bits of the interrupt status.
    pub const fn interrupt(any: u32) -> Self {
        Self::Interrupt { any }
    }

    /// The hardware has nothing left to do in a ring.
    pub const fn drained(ring: &'static str) -> Self {
        Self::Drained { ring }
    }

    /// The hardware's register says `value & mask == is`.
    pub const fn became(register: &'static str, mask: u32, is: u32) -> Self {
        Self::Became { register, mask, is }
    }
}

impl Check {
    /// Whether it lets nothing pass whatever the registers say.
    pub const fn refuses(&self) -> bool {
        matches!(self, Self::Deny(_) | Self::Ignore(_))
    }
}
