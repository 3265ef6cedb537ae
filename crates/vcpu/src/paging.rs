//! The guest's page tables, walked in memory: four and five levels of 64-bit mode (Intel SDM volume 3, 4.5). Without paging a linear
//! address is a guest-physical one.
//!
//! The walk never writes. A bit that the processor would set (accessed, dirty) must be set already, and whatever would
//! fault, or depends on more than the tables, is a [`TranslationFault`]: then the processor does the access.

use thiserror::Error;

use crate::registers::{SystemRegisters, cr0, cr4, efer};

/// Bytes of the smallest page.
pub const PAGE: u64 = 4096;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// Where physical addresses are in CR3 and in entries, for the widest processor.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// The PAT bit of a large page, below its address.
const LARGE_PAT: u64 = 1 << 12;
/// The highest level at which an entry may map a page: 1 GiB.
const HIGHEST_LEAF: u32 = 3;

/// Why a linear address is not translated here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum TranslationFault {
    /// The upper bits do not repeat the sign.
    #[error("the address is not canonical")]
    NotCanonical,
    /// A table is not in the guest's memory.
    #[error("a page table is not in memory")]
    Table,
    /// An entry is not present.
    #[error("not present")]
    NotPresent,
    /// An entry has a bit that must be 0.
    #[error("a reserved bit is set")]
    Reserved,
    /// The processor would set an accessed bit.
    #[error("not accessed yet")]
    NotAccessed,
    /// The processor would set the dirty bit.
    #[error("not dirty yet")]
    NotDirty,
    /// The page is read-only. That supervisor code may write to it without CR0.WP is not used here.
    #[error("read-only")]
    ReadOnly,
    /// The page is not executable.
    #[error("not executable")]
    NoExecute,
    /// Supervisor code touches a user page: SMAP, SMEP and RFLAGS.AC decide.
    #[error("a user page")]
    UserPage,
    /// User code touches a supervisor page.
    #[error("a supervisor page")]
    SupervisorPage,
}

/// Where page tables are read.
pub trait TableMemory {
    /// The 8 bytes at a guest-physical address, read at once; `None` if that is not memory. The address is a multiple
    /// of 8.
    fn table_entry(&self, address: u64) -> Option<u64>;
}

/// A page of 4 KiB as the vCPU may use it, also where the tables have a larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The guest-physical address of the page.
    pub page: u64,
    /// Why it may not be written, if so.
    pub write: Result<(), TranslationFault>,
    /// Why no instructions may come from it, if so.
    pub fetch: Result<(), TranslationFault>,
}

/// The walk for one state of the vCPU's system registers.
#[derive(Clone, Copy, Debug)]
pub struct TableWalk {
    paging: bool,
    root: u64,
    levels: u32,
    no_execute: bool,
    user: bool,
    reserved: u64,
    canonical_of: SystemRegisters,
}

impl TableWalk {
    /// `physical_bits` is the guest's CPUID 80000008, EAX bits 7 to 0.
    pub fn new(system: &SystemRegisters, physical_bits: u32) -> Self {
        let implemented = 1_u64.checked_shl(physical_bits.clamp(12, 52)).unwrap_or(0).wrapping_sub(1);
        let no_execute = system.efer & efer::NXE != 0;
        Self {
            paging: system.cr0 & cr0::PG != 0,
            root: system.cr3 & ADDRESS,
            levels: if system.cr4 & cr4::LA57 != 0 { 5 } else { 4 },
            no_execute,
            user: system.cpl == 3,
            reserved: ADDRESS & !implemented | if no_execute { 0 } else { NO_EXECUTE },
            canonical_of: *system,
        }
    }

    /// The page of a linear address.
    pub fn translate(&self, memory: &impl TableMemory, linear: u64) -> Result<Translation, TranslationFault> {
        if !self.canonical_of.canonical(linear) {
            return Err(TranslationFault::NotCanonical);
        }
        if !self.paging {
            return Ok(Translation { page: linear & !(PAGE - 1), write: Ok(()), fetch: Ok(()) });
        }
        let mut table = self.root;
        // What all levels agree on.
        let mut rights = WRITABLE | USER;
        let mut no_execute = false;
        let mut level = self.levels;
        loop {
            let shift = 12 + 9 * (level - 1);
            let index = linear >> shift & 511;
            let entry = memory.table_entry(table + 8 * index).ok_or(TranslationFault::Table)?;
            let leaf = level == 1 || entry & LARGE != 0;
            self.check_entry(entry, level, leaf)?;
            rights &= entry;
            no_execute |= self.no_execute && entry & NO_EXECUTE != 0;
            if !leaf {
                table = entry & ADDRESS;
                level -= 1;
                continue;
            }
            match (self.user, rights & USER != 0) {
                (true, false) => return Err(TranslationFault::SupervisorPage),
                (false, true) => return Err(TranslationFault::UserPage),
                _ => {}
            }
            let within = (1 << shift) - 1;
            let write = if rights & WRITABLE == 0 {
                Err(TranslationFault::ReadOnly)
            } else if entry & DIRTY == 0 {
                Err(TranslationFault::NotDirty)
            } else {
                Ok(())
            };
            return Ok(Translation {
                page: (entry & ADDRESS & !within | linear & within) & !(PAGE - 1),
                write,
                fetch: if no_execute { Err(TranslationFault::NoExecute) } else { Ok(()) },
            });
        }
    }

    fn check_entry(&self, entry: u64, level: u32, leaf: bool) -> Result<(), TranslationFault> {
        if entry & PRESENT == 0 {
            return Err(TranslationFault::NotPresent);
        }
        let mut reserved = self.reserved;
        if leaf && level > 1 {
            // Address bits inside the page.
            reserved |= ((1 << (12 + 9 * (level - 1))) - 1) & ADDRESS & !LARGE_PAT;
            if level > HIGHEST_LEAF {
                reserved |= LARGE;
            }
        }
        if entry & reserved != 0 {
            return Err(TranslationFault::Reserved);
        }
        if entry & ACCESSED == 0 {
            return Err(TranslationFault::NotAccessed);
        }
        Ok(())
    }
}
