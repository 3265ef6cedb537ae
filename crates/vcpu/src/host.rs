//! Loads and stores of guest memory in the VMM's mapping, each by one instruction of the operand's size.
//!
//! Other vCPUs, devices and the VMM change these bytes at any moment, so no Rust reference or value type stands for them;
//! an instruction of the processor gives exactly the order and atomicity that the guest's own would have had.
//!
//! The mapping may have no memory behind it: a file that has been truncated, a page that is not mapped any more. Each
//! instruction here is entered into a table, with the place at which it is complete. A handler of SIGSEGV and SIGBUS that calls
//! [`resume_refused_access`] makes such an access a [`HostFault`], which changes nothing.
#![allow(unsafe_code)]
// UNSAFETY: inline assembly on raw addresses; who may be asked for them is said at `HostPage::new`.

use core::arch::asm;
use core::ffi::c_void;
use core::ptr;

use crate::arithmetic::OperandSize;
use crate::memory::{Denied, StopReason};
use crate::paging::PAGE;

/// The VMM's mapping refuses the access: no memory is there, or it is not writable. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostFault;

impl From<HostFault> for Denied {
    fn from(_: HostFault) -> Self {
        Denied::Stop(StopReason::HostFault)
    }
}

/// An instruction that may fault, and where to go on if it does; each relative to its own field.
#[repr(C)]
struct TableEntry {
    instruction: i32,
    resume: i32,
}

unsafe extern "C" {
    // The linker's names for the ends of the section that `guarded!` fills.
    #[link_name = "__start_ioplane_faults"]
    static TABLE_START: [TableEntry; 0];
    #[link_name = "__stop_ioplane_faults"]
    static TABLE_END: [TableEntry; 0];
}

/// Assembly with one instruction that may fault, and its table entry. The address is in RDI, where 0 is found
/// after a fault.
macro_rules! guarded {
    ($instruction:literal; $($operands:tt)*) => {
        guarded!([""] $instruction [""]; $($operands)*)
    };
    ([$before:literal] $instruction:literal [$after:literal]; $($operands:tt)*) => {
        asm!(
            $before,
            concat!("2: ", $instruction),
            concat!("3: ", $after),
            ".pushsection ioplane_faults, \"aR\", @progbits",
            ".long 2b - .",
            ".long 3b - .",
            ".popsection",
            $($operands)*
        )
    };
}

/// If a signal has interrupted an access to guest memory of this module, has the thread go on behind it as if it
/// had been refused, and returns true. Safe to call in a signal handler: it reads a constant table and writes two registers.
///
/// # Safety
/// `context` is the third argument of a handler (SA_SIGINFO) of SIGSEGV or SIGBUS that is running on this thread.
pub unsafe fn resume_refused_access(context: *mut c_void) -> bool {
    // SAFETY: said above.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = |index: i32| usize::try_from(index).unwrap_or(0);
    let (rip, rdi) = (at(libc::REG_RIP), at(libc::REG_RDI));
    let Some(resume) = resume_address(registers[rip].cast_unsigned()) else { return false };
    registers[rip] = resume.cast_signed();
    registers[rdi] = 0;
    true
}

/// Where to go on after a fault at `instruction`; `None` if it is not in the table.
fn resume_address(instruction: u64) -> Option<u64> {
    let end = &raw const TABLE_END as usize;
    let mut entry = &raw const TABLE_START as usize;
    while entry < end {
        let from = ptr::with_exposed_provenance::<TableEntry>(entry);
        // SAFETY: one of the entries between the two ends, which the linker has put next to each other.
        let TableEntry { instruction: this, resume } = unsafe { from.read() };
        let field = entry as u64;
        if field.wrapping_add_signed(this.into()) == instruction {
            return Some((field + 4).wrapping_add_signed(resume.into()));
        }
        entry += size_of::<TableEntry>();
    }
    None
}

/// A page of guest memory where the VMM has mapped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostPage(usize);

impl HostPage {
    /// # Safety
    /// `address` is the start of a page that the VMM has given to its guest, as long as the value is used. What is mapped there
    /// is nobody's but the guest's, or nothing at all; then a handler must call [`resume_refused_access`].
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
    pub(crate) fn load(self, offset: u64, size: OperandSize) -> Result<u64, HostFault> {
        let mut address = self.at(offset, size.bytes());
        let value: u64;
        // SAFETY: the page is the guest's (`new`), and `at` stays inside it; a fault leaves 0 in RDI.
        unsafe {
            match size {
                OperandSize::Byte => guarded!("movzx {v:e}, byte ptr [rdi]"; v = lateout(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags, readonly)),
                OperandSize::Word => guarded!("movzx {v:e}, word ptr [rdi]"; v = lateout(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags, readonly)),
                OperandSize::Dword => guarded!("mov {v:e}, dword ptr [rdi]"; v = lateout(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags, readonly)),
                OperandSize::Qword => guarded!("mov {v}, qword ptr [rdi]"; v = lateout(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags, readonly)),
            }
        }
        done(address, value)
    }

    /// Stores the low bits of `value`.
    #[inline]
    pub(crate) fn store(self, offset: u64, size: OperandSize, value: u64) -> Result<(), HostFault> {
        let mut address = self.at(offset, size.bytes());
        // SAFETY: as in `load`.
        unsafe {
            match size {
                OperandSize::Byte => guarded!("mov byte ptr [rdi], {v:l}"; v = in(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags)),
                OperandSize::Word => guarded!("mov word ptr [rdi], {v:x}"; v = in(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags)),
                OperandSize::Dword => guarded!("mov dword ptr [rdi], {v:e}"; v = in(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags)),
                OperandSize::Qword => guarded!("mov qword ptr [rdi], {v}"; v = in(reg) value,
                    inout("rdi") address, options(nostack, preserves_flags)),
            }
        }
        done(address, ())
    }

    /// LOCK CMPXCHG: what was there, zero-extended.
    pub(crate) fn compare_exchange(
        self,
        offset: u64,
        size: OperandSize,
        current: u64,
        new: u64,
    ) -> Result<u64, HostFault> {
        let mut address = self.at(offset, size.bytes());
        let mut found = current & size.mask();
        // SAFETY: as in `load`.
        unsafe {
            match size {
                OperandSize::Byte => guarded!("lock cmpxchg byte ptr [rdi], {v:l}"; v = in(reg) new,
                    inout("rdi") address, inout("rax") found, options(nostack)),
                OperandSize::Word => guarded!("lock cmpxchg word ptr [rdi], {v:x}"; v = in(reg) new,
                    inout("rdi") address, inout("rax") found, options(nostack)),
                OperandSize::Dword => guarded!("lock cmpxchg dword ptr [rdi], {v:e}"; v = in(reg) new,
                    inout("rdi") address, inout("rax") found, options(nostack)),
                OperandSize::Qword => guarded!("lock cmpxchg qword ptr [rdi], {v}"; v = in(reg) new,
                    inout("rdi") address, inout("rax") found, options(nostack)),
            }
        }
        done(address, found & size.mask())
    }

    /// LOCK CMPXCHG16B: what was there. `offset` is a multiple of 16, and the processor has the instruction.
    pub(crate) fn compare_exchange_wide(
        self,
        offset: u64,
        current: u128,
        new: u128,
    ) -> Result<u128, HostFault> {
        debug_assert_eq!(offset % 16, 0);
        let mut address = self.at(offset & !15, 16);
        let half = |value: u128| u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0);
        let (mut low, mut high) = (half(current), half(current >> 64));
        // SAFETY: as in `load`. RBX belongs to the compiler and is put back, after a fault too.
        unsafe {
            guarded!(["xchg rsi, rbx"] "lock cmpxchg16b xmmword ptr [rdi]" ["mov rbx, rsi"];
                inout("rsi") half(new) => _, inout("rdi") address, in("rcx") half(new >> 64),
                inout("rax") low, inout("rdx") high, options(nostack));
        }
        done(address, u128::from(high) << 64 | u128::from(low))
    }

    /// Whether the byte at `offset` can be stored now. It stays as it is.
    pub(crate) fn probe_store(self, offset: u64) -> Result<(), HostFault> {
        let value = self.load(offset, OperandSize::Byte)?;
        self.compare_exchange(offset, OperandSize::Byte, value, value).map(drop)
    }
}

fn done<T>(address: usize, value: T) -> Result<T, HostFault> {
    if address == 0 { Err(HostFault) } else { Ok(value) }
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
        host.store(1, OperandSize::Qword, u64::MAX).unwrap();
        host.store(3, OperandSize::Byte, 0x1200).unwrap();
        assert_eq!(host.load(0, OperandSize::Qword), Ok(0xffff_ffff_00ff_ff00));
        assert_eq!(host.load(3, OperandSize::Word), Ok(0xff00));
        assert_eq!(host.load(1, OperandSize::Dword), Ok(0xff00_ffff));
        assert_eq!(host.compare_exchange(8, OperandSize::Byte, 0x1ff, 7), Ok(0xff));
        assert_eq!(host.load(8, OperandSize::Word), Ok(7));
        assert_eq!(host.compare_exchange(8, OperandSize::Qword, 8, 9), Ok(7), "and nothing is written");
        assert_eq!(host.load(8, OperandSize::Qword), Ok(7));
        assert_eq!(host.compare_exchange_wide(16, 0, 5 << 64 | 3), Ok(0));
        assert_eq!(host.load(24, OperandSize::Qword), Ok(5));
        assert_eq!(host.compare_exchange_wide(16, 1, 0), Ok(5 << 64 | 3));
        assert_eq!(host.load(16, OperandSize::Qword), Ok(3));
        assert_eq!(host.load(4088, OperandSize::Qword), Ok(0));
        assert_eq!(page.0[16..18], [3, 0]);
    }
}
