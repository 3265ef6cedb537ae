//! The guest's page tables, walked in memory: 32-bit paging, PAE paging, and four and five levels of 64-bit mode (Intel SDM volume 3,
//! 4.3 to 4.5). Without paging a linear address is a guest-physical one.
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
/// What legacy modes have of CR3, and entries of 4 bytes.
const LEGACY: u64 = 0xffff_ffff;
/// With PAE paging, bits above the address are reserved; with four levels they are software's.
const PAE_RESERVED: u64 = 0x7ff0_0000_0000_0000;
/// Reserved in PDPTEs of PAE paging, beside the highest: where other entries have rights, accessed, dirty and size.
const PDPTE_RESERVED: u64 = 0x1e6;
/// Software's in a PDPTE.
const PDPTE_IGNORED: u64 = 7 << 9;

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
    /// The 8 bytes at a guest-physical address, read at once: an entry, or two of 4 bytes. `None` if that is not memory. The address is a
    /// multiple of 8.
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

/// How a linear address leads to a page (Intel SDM volume 3, 4.1.1).
#[derive(Clone, Copy, Debug)]
enum Paging {
    /// It is the physical one.
    Off,
    /// Two levels of entries of 4 bytes (4.3). `large_pages` as CR4.PSE says.
    Narrow { large_pages: bool },
    /// Two levels below PDPTEs that the processor has (4.4).
    Pae { pdptes: [u64; 4] },
    /// Four or five levels (4.5).
    Long { levels: u32 },
}

impl Paging {
    fn of(system: &SystemRegisters) -> Self {
        if system.cr0 & cr0::PG == 0 {
            Self::Off
        } else if system.uses_pdptes() {
            Self::Pae { pdptes: system.pdptes }
        } else if system.cr4 & cr4::PAE == 0 {
            Self::Narrow { large_pages: system.cr4 & cr4::PSE != 0 }
        } else {
            Self::Long { levels: if system.cr4 & cr4::LA57 != 0 { 5 } else { 4 } }
        }
    }

    /// Bits of a linear address that choose an entry of a table.
    fn index_bits(self) -> u32 {
        if matches!(self, Self::Narrow { .. }) { 10 } else { 9 }
    }

    /// The highest level at which an entry may map a page. Above, the bit that says so is reserved; 0 if it is ignored.
    fn highest_leaf(self) -> u32 {
        match self {
            Self::Off | Self::Narrow { large_pages: false } => 0,
            // 4 MiB, 2 MiB.
            Self::Narrow { .. } | Self::Pae { .. } => 2,
            // 1 GiB.
            Self::Long { .. } => 3,
        }
    }
}

/// The walk for one state of the vCPU's system registers.
#[derive(Clone, Copy, Debug)]
pub struct TableWalk {
    paging: Paging,
    cr3: u64,
    no_execute: bool,
    user: bool,
    /// Bits that no entry may have.
    reserved: u64,
    canonical_of: SystemRegisters,
}

impl TableWalk {
    /// `physical_bits` is the guest's CPUID 80000008, EAX bits 7 to 0.
    pub fn new(system: &SystemRegisters, physical_bits: u32) -> Self {
        let implemented = 1_u64.checked_shl(physical_bits.clamp(12, 52)).unwrap_or(0).wrapping_sub(1);
        let no_execute = system.efer & efer::NXE != 0;
        let paging = Paging::of(system);
        let reserved = match paging {
            // Entries have no bits beyond an address of 32 bits.
            Paging::Off | Paging::Narrow { .. } => 0,
            Paging::Pae { .. } => (ADDRESS | PAE_RESERVED) & !implemented,
            Paging::Long { .. } => ADDRESS & !implemented,
        };
        Self {
            paging,
            cr3: system.cr3,
            no_execute,
            user: system.cpl == 3,
            reserved: reserved | if no_execute { 0 } else { NO_EXECUTE },
            canonical_of: *system,
        }
    }

    /// The page of a linear address.
    pub fn translate(&self, memory: &impl TableMemory, linear: u64) -> Result<Translation, TranslationFault> {
        if !self.canonical_of.canonical(linear) {
            return Err(TranslationFault::NotCanonical);
        }
        let (mut table, mut level) = match self.paging {
            Paging::Off => {
                return Ok(Translation { page: linear & !(PAGE - 1), write: Ok(()), fetch: Ok(()) });
            }
            Paging::Narrow { .. } => (self.cr3 & ADDRESS & LEGACY, 2),
            Paging::Pae { pdptes } => (self.directory(pdptes, linear)?, 2),
            Paging::Long { levels } => (self.cr3 & ADDRESS, levels),
        };
        let index_bits = self.paging.index_bits();
        // What all levels agree on.
        let mut rights = WRITABLE | USER;
        let mut no_execute = false;
        loop {
            let shift = 12 + index_bits * (level - 1);
            let entry = self.entry(memory, table, linear >> shift & ((1 << index_bits) - 1))?;
            let leaf = level == 1 || entry & LARGE != 0 && self.paging.highest_leaf() != 0;
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

    /// The page directory of a linear address with PAE paging. PDPTEs have no rights, and no accessed bit.
    fn directory(&self, pdptes: [u64; 4], linear: u64) -> Result<u64, TranslationFault> {
        let [first, second, third, fourth] = pdptes;
        let pdpte = match linear >> 30 & 3 {
            0 => first,
            1 => second,
            2 => third,
            _ => fourth,
        };
        if pdpte & PRESENT == 0 {
            return Err(TranslationFault::NotPresent);
        }
        if pdpte & (self.reserved | NO_EXECUTE | PDPTE_RESERVED) != 0 {
            return Err(TranslationFault::Reserved);
        }
        Ok(pdpte & ADDRESS)
    }

    fn entry(&self, memory: &impl TableMemory, table: u64, index: u64) -> Result<u64, TranslationFault> {
        let read = |address| memory.table_entry(address).ok_or(TranslationFault::Table);
        if !matches!(self.paging, Paging::Narrow { .. }) {
            return read(table + 8 * index);
        }
        let both = read(table + 4 * (index & !1))?;
        Ok(if index & 1 == 0 { both & LEGACY } else { both >> 32 })
    }

    fn check_entry(&self, entry: u64, level: u32, leaf: bool) -> Result<(), TranslationFault> {
        if entry & PRESENT == 0 {
            return Err(TranslationFault::NotPresent);
        }
        let mut reserved = self.reserved;
        if leaf && level > 1 {
            // Address bits inside the page. In a page of 4 MiB they can be those beyond 32 bits (PSE-36), which is not done here.
            reserved |= ((1 << (12 + self.paging.index_bits() * (level - 1))) - 1) & ADDRESS & !LARGE_PAT;
            if level > self.paging.highest_leaf() {
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

/// Whether these PDPTEs of PAE paging are those that are in memory. The processor need not look there again (VMX), or does so at
/// each walk (SVM with nested paging), so only what both agree on says how it translates.
pub(crate) fn pdptes_are_in_memory(pdptes: [u64; 4], cr3: u64, memory: &impl TableMemory) -> bool {
    // 32 bytes at a multiple of 32.
    let first = cr3 & LEGACY & !31;
    pdptes.into_iter().zip((first..).step_by(8)).all(|(pdpte, address)| {
        let Some(entry) = memory.table_entry(address) else { return false };
        // The rest of one that is not present, and what the processor ignores, VMX need not keep (Intel SDM volume 3, 28.3.4).
        (pdpte | entry) & PRESENT == 0 || (pdpte ^ entry) & !PDPTE_IGNORED == 0
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    struct Memory(BTreeMap<u64, u64>);

    impl TableMemory for Memory {
        fn table_entry(&self, address: u64) -> Option<u64> {
            self.0.get(&address).copied()
        }
    }

    #[test]
    fn pdptes_must_be_those_in_memory() {
        const CR3: u64 = 0x7_0000_1fff;
        let pdptes = [0x2001, 0, 0x4e19, 0xff_ffff_f000];
        let in_memory = |changed: usize, change: u64| {
            let mut entries = pdptes;
            entries[changed] ^= change;
            Memory((0x1fe0..).step_by(8).zip(entries).collect())
        };
        let same = |changed, change| pdptes_are_in_memory(pdptes, CR3, &in_memory(changed, change));
        assert!(same(0, 0));
        for number in 0..64 {
            let ignored = (9..12).contains(&number);
            assert_eq!(same(0, 1 << number), ignored, "bit {number} of one that is present");
            assert_eq!(same(2, 1 << number), ignored, "bit {number} of another");
            assert_eq!(same(1, 1 << number), number != 0, "bit {number} of one that is not");
            assert_eq!(same(3, 1 << number), number != 0, "bit {number} of another");
        }
        let mut partly = in_memory(0, 0);
        partly.0.remove(&0x1ff8);
        assert!(!pdptes_are_in_memory(pdptes, CR3, &partly), "beyond memory");
    }
}
