//! Arithmetic as the processor does it, flags included: each operation is the instruction itself, run on values that
//! were taken out of the guest's registers and memory.
//!
//! The thread that interprets runs on the processor that would have run the guest, so what the manuals leave undefined
//! (AF after AND, flags after DIV, the destination of BSF when the source is 0) comes out as the guest would see it.
//! Nothing here can fault: [`divide`] refuses what would.
#![allow(unsafe_code)]
// UNSAFETY: inline assembly; each block changes registers of its own and a word of its own stack, and nothing else.

use core::arch::asm;

use crate::registers::rflags;

/// How wide an operand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperandSize {
    /// 8 bits.
    Byte,
    /// 16 bits.
    Word,
    /// 32 bits. Written to a register it clears the upper half.
    Dword,
    /// 64 bits.
    Qword,
}

impl OperandSize {
    /// In bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Byte => 1,
            Self::Word => 2,
            Self::Dword => 4,
            Self::Qword => 8,
        }
    }

    /// In bits.
    pub const fn bits(self) -> u32 {
        8 << self.shift()
    }

    /// Log2 of the bytes.
    pub const fn shift(self) -> u32 {
        self.bytes().trailing_zeros()
    }

    /// All ones in an operand of this size.
    pub const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// The low bits of `value`, with the sign bit repeated above them.
    pub const fn sign_extend(self, value: u64) -> u64 {
        let unused = 64 - self.bits();
        (((value << unused).cast_signed()) >> unused).cast_unsigned()
    }
}

/// Instructions with two operands that need at most the carry of what was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Or,
    Adc,
    Sbb,
    And,
    Sub,
    Xor,
    Cmp,
    Test,
}

/// Instructions with one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Inc,
    Dec,
    Neg,
    Not,
}

/// Shifts and rotations by a count of at most 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    Rol,
    Ror,
    Rcl,
    Rcr,
    Shl,
    Shr,
    Sar,
    /// SHLD: bits come from the second operand.
    ShlDouble,
    /// SHRD.
    ShrDouble,
}

/// Instructions on whole registers with a source: no 8-bit form, and the upper half may stay as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wide {
    /// IMUL with two operands.
    Multiply,
    ScanForward,
    ScanReverse,
    CountTrailing,
    CountLeading,
    Population,
    BitTest,
    BitSet,
    BitReset,
    BitComplement,
}

const fn merge(before: u64, after: u64) -> u64 {
    before & !rflags::STATUS | after & rflags::STATUS
}

/// `op a, b` with the carry of `flags`. BT leaves bit 0 of the flags, the carry, in the processor's.
macro_rules! with_carry {
    ($template:expr, $a:ident, $flags:ident, $($operand:tt)*) => {
        // SAFETY: see the note of this module.
        unsafe {
            asm!("bt {f}, 0", $template, "pushfq", "pop {f}",
                a = inout(reg) $a, f = inout(reg) $flags, $($operand)*)
        }
    };
}

/// The same with all status flags as they were, for what leaves some of them alone.
macro_rules! with_flags {
    ($template:expr, $flags:ident, $($operand:tt)*) => {
        // SAFETY: see the note of this module. The flags that POPFQ loads are the status flags.
        unsafe { asm!("push {f}", "popfq", $template, "pushfq", "pop {f}", f = inout(reg) $flags, $($operand)*) }
    };
}

macro_rules! binary {
    ($size:ident, $op:literal, $a:ident, $b:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte => with_carry!(concat!($op, " {a:l}, {b:l}"), $a, $flags, b = in(reg) $b),
            OperandSize::Word => with_carry!(concat!($op, " {a:x}, {b:x}"), $a, $flags, b = in(reg) $b),
            OperandSize::Dword => with_carry!(concat!($op, " {a:e}, {b:e}"), $a, $flags, b = in(reg) $b),
            OperandSize::Qword => with_carry!(concat!($op, " {a:r}, {b:r}"), $a, $flags, b = in(reg) $b),
        }
    };
}

/// The result of `op a, b` and RFLAGS after it. Only the low bits of the result count.
#[inline]
pub(crate) fn binary(op: Binary, size: OperandSize, mut a: u64, b: u64, before: u64) -> (u64, u64) {
    let mut flags = before & rflags::CF;
    match op {
        Binary::Add => binary!(size, "add", a, b, flags),
        Binary::Or => binary!(size, "or", a, b, flags),
        Binary::Adc => binary!(size, "adc", a, b, flags),
        Binary::Sbb => binary!(size, "sbb", a, b, flags),
        Binary::And => binary!(size, "and", a, b, flags),
        Binary::Sub => binary!(size, "sub", a, b, flags),
        Binary::Xor => binary!(size, "xor", a, b, flags),
        Binary::Cmp => binary!(size, "cmp", a, b, flags),
        Binary::Test => binary!(size, "test", a, b, flags),
    }
    (a, merge(before, flags))
}

macro_rules! unary {
    ($size:ident, $op:literal, $a:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte => with_carry!(concat!($op, " {a:l}"), $a, $flags,),
            OperandSize::Word => with_carry!(concat!($op, " {a:x}"), $a, $flags,),
            OperandSize::Dword => with_carry!(concat!($op, " {a:e}"), $a, $flags,),
            OperandSize::Qword => with_carry!(concat!($op, " {a:r}"), $a, $flags,),
        }
    };
}

/// The result of `op a` and RFLAGS after it.
#[inline]
pub(crate) fn unary(op: Unary, size: OperandSize, mut a: u64, before: u64) -> (u64, u64) {
    let mut flags = before & rflags::CF;
    match op {
        Unary::Inc => unary!(size, "inc", a, flags),
        Unary::Dec => unary!(size, "dec", a, flags),
        Unary::Neg => unary!(size, "neg", a, flags),
        Unary::Not => return (!a, before),
    }
    (a, merge(before, flags))
}

macro_rules! shift {
    ($size:ident, $op:literal, $a:ident, $count:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte => {
                with_flags!(concat!($op, " {a:l}, cl"), $flags, a = inout(reg) $a, in("rcx") $count)
            }
            OperandSize::Word => {
                with_flags!(concat!($op, " {a:x}, cl"), $flags, a = inout(reg) $a, in("rcx") $count)
            }
            OperandSize::Dword => {
                with_flags!(concat!($op, " {a:e}, cl"), $flags, a = inout(reg) $a, in("rcx") $count)
            }
            OperandSize::Qword => {
                with_flags!(concat!($op, " {a:r}, cl"), $flags, a = inout(reg) $a, in("rcx") $count)
            }
        }
    };
}

macro_rules! double_shift {
    ($size:ident, $op:literal, $a:ident, $b:ident, $count:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte | OperandSize::Word => with_flags!(concat!($op, " {a:x}, {b:x}, cl"), $flags,
                a = inout(reg) $a, b = in(reg) $b, in("rcx") $count),
            OperandSize::Dword => with_flags!(concat!($op, " {a:e}, {b:e}, cl"), $flags,
                a = inout(reg) $a, b = in(reg) $b, in("rcx") $count),
            OperandSize::Qword => with_flags!(concat!($op, " {a:r}, {b:r}, cl"), $flags,
                a = inout(reg) $a, b = in(reg) $b, in("rcx") $count),
        }
    };
}

/// The result of a shift of `a` by `count`, with bits from `b` for the double ones, and RFLAGS after it.
pub(crate) fn shift(op: Shift, size: OperandSize, mut a: u64, b: u64, count: u64, before: u64) -> (u64, u64) {
    let mut flags = before & rflags::STATUS | rflags::ONE;
    match op {
        Shift::Rol => shift!(size, "rol", a, count, flags),
        Shift::Ror => shift!(size, "ror", a, count, flags),
        Shift::Rcl => shift!(size, "rcl", a, count, flags),
        Shift::Rcr => shift!(size, "rcr", a, count, flags),
        Shift::Shl => shift!(size, "shl", a, count, flags),
        Shift::Shr => shift!(size, "shr", a, count, flags),
        Shift::Sar => shift!(size, "sar", a, count, flags),
        Shift::ShlDouble => double_shift!(size, "shld", a, b, count, flags),
        Shift::ShrDouble => double_shift!(size, "shrd", a, b, count, flags),
    }
    (a, merge(before, flags))
}

macro_rules! wide {
    ($size:ident, $op:literal, $a:ident, $b:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte | OperandSize::Word => {
                with_flags!(concat!($op, " {a:x}, {b:x}"), $flags, a = inout(reg) $a, b = in(reg) $b)
            }
            OperandSize::Dword => {
                with_flags!(concat!($op, " {a:e}, {b:e}"), $flags, a = inout(reg) $a, b = in(reg) $b)
            }
            OperandSize::Qword => {
                with_flags!(concat!($op, " {a:r}, {b:r}"), $flags, a = inout(reg) $a, b = in(reg) $b)
            }
        }
    };
}

/// All 64 bits of the register that held `a`, after `op a, b`, and RFLAGS after it.
pub(crate) fn wide(op: Wide, size: OperandSize, mut a: u64, b: u64, before: u64) -> (u64, u64) {
    let mut flags = before & rflags::STATUS | rflags::ONE;
    match op {
        Wide::Multiply => wide!(size, "imul", a, b, flags),
        Wide::ScanForward => wide!(size, "bsf", a, b, flags),
        Wide::ScanReverse => wide!(size, "bsr", a, b, flags),
        Wide::CountTrailing => wide!(size, "tzcnt", a, b, flags),
        Wide::CountLeading => wide!(size, "lzcnt", a, b, flags),
        Wide::Population => wide!(size, "popcnt", a, b, flags),
        Wide::BitTest => wide!(size, "bt", a, b, flags),
        Wide::BitSet => wide!(size, "bts", a, b, flags),
        Wide::BitReset => wide!(size, "btr", a, b, flags),
        Wide::BitComplement => wide!(size, "btc", a, b, flags),
    }
    (a, merge(before, flags))
}

macro_rules! accumulator {
    ($size:ident, $op:literal, $rax:ident, $rdx:ident, $b:ident, $flags:ident) => {
        match $size {
            OperandSize::Byte => with_flags!(concat!($op, " {b:l}"), $flags,
                b = in(reg) $b, inout("rax") $rax, inout("rdx") $rdx),
            OperandSize::Word => with_flags!(concat!($op, " {b:x}"), $flags,
                b = in(reg) $b, inout("rax") $rax, inout("rdx") $rdx),
            OperandSize::Dword => with_flags!(concat!($op, " {b:e}"), $flags,
                b = in(reg) $b, inout("rax") $rax, inout("rdx") $rdx),
            OperandSize::Qword => with_flags!(concat!($op, " {b:r}"), $flags,
                b = in(reg) $b, inout("rax") $rax, inout("rdx") $rdx),
        }
    };
}

/// RAX, RDX and RFLAGS after MUL or IMUL with one operand.
pub(crate) fn multiply(
    signed: bool,
    size: OperandSize,
    mut rax: u64,
    mut rdx: u64,
    b: u64,
    before: u64,
) -> (u64, u64, u64) {
    let mut flags = before & rflags::STATUS | rflags::ONE;
    if signed {
        accumulator!(size, "imul", rax, rdx, b, flags);
    } else {
        accumulator!(size, "mul", rax, rdx, b, flags);
    }
    (rax, rdx, merge(before, flags))
}

/// RAX, RDX and RFLAGS after DIV or IDIV; `None` if it raises a divide error.
pub(crate) fn divide(
    signed: bool,
    size: OperandSize,
    mut rax: u64,
    mut rdx: u64,
    b: u64,
    before: u64,
) -> Option<(u64, u64, u64)> {
    if !divides(signed, size, rax, rdx, b & size.mask()) {
        return None;
    }
    let mut flags = before & rflags::STATUS | rflags::ONE;
    if signed {
        accumulator!(size, "idiv", rax, rdx, b, flags);
    } else {
        accumulator!(size, "div", rax, rdx, b, flags);
    }
    Some((rax, rdx, merge(before, flags)))
}

/// Whether the divisor is not 0 and the quotient fits.
fn divides(signed: bool, size: OperandSize, rax: u64, rdx: u64, divisor: u64) -> bool {
    let bits = size.bits();
    // The dividend has twice the size: AX, DX:AX, EDX:EAX, RDX:RAX.
    let dividend = match size {
        OperandSize::Byte => u128::from(rax & 0xffff),
        _ => u128::from(rdx & size.mask()) << bits | u128::from(rax & size.mask()),
    };
    if divisor == 0 {
        return false;
    }
    if !signed {
        return dividend / u128::from(divisor) <= u128::from(size.mask());
    }
    let unused = 128 - 2 * bits;
    let dividend = (dividend << unused).cast_signed() >> unused;
    let divisor = i128::from(size.sign_extend(divisor).cast_signed());
    // The smallest number of 128 bits divided by -1 does not even fit the type.
    dividend.checked_div(divisor).is_some_and(|quotient| {
        let half = 1_i128 << (bits - 1);
        (-half..half).contains(&quotient)
    })
}

/// Waits until all loads and stores before are done, as the guest's fence would.
pub(crate) fn fence() {
    // SAFETY: a fence changes nothing.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) }
}

/// The processor's time stamp counter.
pub(crate) fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has it, and user space may read it unless a process forbids it to itself.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The same, read after all loads before and before all that follows, whatever the guest has around its own instruction.
pub(crate) fn ordered_cycles() -> u64 {
    // SAFETY: as in `cycles`; a fence changes nothing.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        let now = core::arch::x86_64::_rdtsc();
        core::arch::x86_64::_mm_lfence();
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OperandSize::{Byte, Dword, Qword, Word};

    #[test]
    fn carry_goes_in_and_comes_out() {
        let (sum, flags) = binary(Binary::Adc, Byte, 0xff, 0, rflags::CF);
        assert_eq!((sum & 0xff, flags & (rflags::CF | rflags::ZF)), (0, rflags::CF | rflags::ZF));
        let (difference, flags) = binary(Binary::Sbb, Dword, 0, 0, rflags::CF | rflags::IF);
        assert_eq!((difference, flags & rflags::CF), (0xffff_ffff, rflags::CF));
        assert_eq!(flags & rflags::IF, rflags::IF, "only status flags change");
        let (value, flags) = unary(Unary::Inc, Word, 0xffff, rflags::CF);
        assert_eq!((value & 0xffff, flags & (rflags::CF | rflags::ZF)), (0, rflags::CF | rflags::ZF));
        assert_eq!(unary(Unary::Not, Qword, 0, rflags::CF), (u64::MAX, rflags::CF));
    }

    #[test]
    fn a_shift_by_nothing_changes_no_flag() {
        for op in [Shift::Rol, Shift::Rcl, Shift::Shl, Shift::Sar, Shift::ShlDouble] {
            for flags in [0, rflags::STATUS] {
                assert_eq!(shift(op, Dword, 7, 9, 32, flags), (7, flags), "{op:?}");
            }
        }
    }

    #[test]
    fn what_raises_a_divide_error_is_not_run() {
        assert_eq!(divide(false, Qword, 1, 0, 0, 0), None);
        assert_eq!(divide(false, Qword, 0, 1, 1, 0), None);
        assert_eq!(divide(false, Byte, 0x1ff, 0, 1, 0), None);
        assert_eq!(divide(true, Qword, 0, 1 << 63, u64::MAX, 0), None, "the smallest of 128 bits by -1");
        assert_eq!(divide(true, Dword, 0x8000_0000, 0xffff_ffff, 0xffff_ffff, 0), None);
        assert_eq!(divide(true, Byte, 0x80, 0, 1, 0), None);
        assert_eq!(divide(true, Byte, 0xff80, 0, 1, 0).map(|(rax, ..)| rax & 0xffff), Some(0x0080));
        assert_eq!(divide(false, Dword, 7, 0, 2, 0).map(|(a, d, _)| (a, d)), Some((3, 1)));
        assert_eq!(
            divide(true, Qword, 7_u64.wrapping_neg(), u64::MAX, 2, 0).map(|(a, d, _)| (a, d)),
            Some((3_u64.wrapping_neg(), u64::MAX))
        );
    }

    #[test]
    fn sizes() {
        assert_eq!([Byte, Word, Dword, Qword].map(OperandSize::bits), [8, 16, 32, 64]);
        assert_eq!([Byte, Word, Dword, Qword].map(OperandSize::mask), [0xff, 0xffff, 0xffff_ffff, u64::MAX]);
        assert_eq!(Byte.sign_extend(0x80), 0xffff_ffff_ffff_ff80);
        assert_eq!(Qword.sign_extend(5), 5);
    }
}
