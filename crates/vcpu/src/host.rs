//! Loads and stores of guest memory in the VMM's mapping, each by one instruction of the operand's size.
//!
//! Other vCPUs, devices and the VMM change these bytes at any moment, so no Rust reference or value type stands for them;
//! an instruction of the processor gives exactly the order and atomicity that the guest's own would have had.
#![allow(unsafe_code)]
// UNSAFETY: inline assembly on raw addresses; who may be asked for them is said at `HostPage::new`.

use core::arch::asm;

use crate::arithmetic::OperandSize;
use crate::paging::PAGE;

/// A page of guest memory where the VMM has mapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostPage(usize);

impl HostPage {
    /// # Safety
    /// `address` is the start of a page that stays mapped and readable as long as the value is used, and writable if
    /// [`HostPage::store`] or [`HostPage::compare_exchange`] is called.
    pub(crate) unsafe fn new(address: usize) -> Self {
        Self(address)
    }

    /// The address of `bytes` bytes at `offset`. What does not fit into the page is cut to its beginning, which no
    /// caller relies on.
    fn at(self, offset: u64, bytes: u64) -> usize {
        debug_assert!(offset + bytes <= PAGE);
        let offset = if offset + bytes <= PAGE { offset } else { 0 };
        self.0 + usize::try_from(offset).unwrap_or(0)
    }

    /// Loads an operand that lies in the page.
    #[inline]
    pub(crate) fn load(self, offset: u64, size: OperandSize) -> u64 {
        let address = self.at(offset, size.bytes());
        let value: u64;
        // SAFETY: the page is readable (`new`), and `at` stays inside it.
        unsafe {
            match size {
                OperandSize::Byte => asm!("movzx {v:e}, byte ptr [{p}]", v = lateout(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags, readonly)),
                OperandSize::Word => asm!("movzx {v:e}, word ptr [{p}]", v = lateout(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags, readonly)),
                OperandSize::Dword => asm!("mov {v:e}, dword ptr [{p}]", v = lateout(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags, readonly)),
                OperandSize::Qword => asm!("mov {v}, qword ptr [{p}]", v = lateout(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags, readonly)),
            }
        }
        value
    }

    /// Stores the low bits of `value`.
    #[inline]
    pub(crate) fn store(self, offset: u64, size: OperandSize, value: u64) {
        let address = self.at(offset, size.bytes());
        // SAFETY: the page is writable (`new`), and `at` stays inside it.
        unsafe {
            match size {
                OperandSize::Byte => asm!("mov byte ptr [{p}], {v:l}", v = in(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags)),
                OperandSize::Word => asm!("mov word ptr [{p}], {v:x}", v = in(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags)),
                OperandSize::Dword => asm!("mov dword ptr [{p}], {v:e}", v = in(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags)),
                OperandSize::Qword => asm!("mov qword ptr [{p}], {v}", v = in(reg) value,
                    p = in(reg) address, options(nostack, preserves_flags)),
            }
        }
    }

    /// LOCK CMPXCHG: what was there, zero-extended.
    pub(crate) fn compare_exchange(self, offset: u64, size: OperandSize, current: u64, new: u64) -> u64 {
        let address = self.at(offset, size.bytes());
        let mut found = current & size.mask();
        // SAFETY: the page is writable (`new`), and `at` stays inside it.
        unsafe {
            match size {
                OperandSize::Byte => asm!("lock cmpxchg byte ptr [{p}], {v:l}", v = in(reg) new,
                    p = in(reg) address, inout("rax") found, options(nostack)),
                OperandSize::Word => asm!("lock cmpxchg word ptr [{p}], {v:x}", v = in(reg) new,
                    p = in(reg) address, inout("rax") found, options(nostack)),
                OperandSize::Dword => asm!("lock cmpxchg dword ptr [{p}], {v:e}", v = in(reg) new,
                    p = in(reg) address, inout("rax") found, options(nostack)),
                OperandSize::Qword => asm!("lock cmpxchg qword ptr [{p}], {v}", v = in(reg) new,
                    p = in(reg) address, inout("rax") found, options(nostack)),
            }
        }
        found & size.mask()
    }

    /// LOCK CMPXCHG16B: what was there. `offset` is a multiple of 16, and the processor has the instruction.
    pub(crate) fn compare_exchange_wide(self, offset: u64, current: u128, new: u128) -> u128 {
        debug_assert_eq!(offset % 16, 0);
        let address = self.at(offset & !15, 16);
        let half = |value: u128| u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0);
        let (mut low, mut high) = (half(current), half(current >> 64));
        // SAFETY: the page is writable (`new`), and `at` stays inside it. RBX belongs to the compiler and is put back;
        // the address has a register of its own, so that it is not RBX.
        unsafe {
            asm!("xchg {b}, rbx", "lock cmpxchg16b xmmword ptr [rdi]", "mov rbx, {b}",
                b = inout(reg) half(new) => _, in("rdi") address, in("rcx") half(new >> 64),
                inout("rax") low, inout("rdx") high, options(nostack));
        }
        u128::from(high) << 64 | u128::from(low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Page([u8; 4096]);

    #[test]
    fn each_size_touches_its_own_bytes() {
        let mut page = Page([0; 4096]);
        // SAFETY: the page outlives its use here, and nothing else reads it meanwhile.
        let host = unsafe { HostPage::new((&raw mut page).expose_provenance()) };
        host.store(1, OperandSize::Qword, u64::MAX);
        host.store(3, OperandSize::Byte, 0x1200);
        assert_eq!(host.load(0, OperandSize::Qword), 0xffff_ffff_00ff_ff00);
        assert_eq!(host.load(3, OperandSize::Word), 0xff00);
        assert_eq!(host.load(1, OperandSize::Dword), 0xff00_ffff);
        assert_eq!(host.compare_exchange(8, OperandSize::Byte, 0x1ff, 7), 0xff);
        assert_eq!(host.load(8, OperandSize::Word), 7);
        assert_eq!(host.compare_exchange(8, OperandSize::Qword, 8, 9), 7, "and nothing is written");
        assert_eq!(host.load(8, OperandSize::Qword), 7);
        assert_eq!(host.compare_exchange_wide(16, 0, 5 << 64 | 3), 0);
        assert_eq!(host.load(24, OperandSize::Qword), 5);
        assert_eq!(host.compare_exchange_wide(16, 1, 0), 5 << 64 | 3);
        assert_eq!(host.load(16, OperandSize::Qword), 3);
        assert_eq!(host.load(4088, OperandSize::Qword), 0);
        assert_eq!(page.0[16..18], [3, 0]);
    }
}
