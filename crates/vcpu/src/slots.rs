//! The memory slots that the VMM has given KVM (KVM_SET_USER_MEMORY_REGION): where guest-physical memory is mapped in the
//! VMM's own address space.
#![allow(unsafe_code)]
// UNSAFETY: turns addresses that the VMM has promised to KVM into pages that are read and written.

use thiserror::Error;

use crate::arithmetic::OperandSize;
use crate::host::HostPage;
use crate::paging::{PAGE, TableMemory};

/// A slot as KVM has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySlot {
    /// The slot's number, with the address space in its upper half.
    pub number: u32,
    /// The first guest-physical address.
    pub address: u64,
    /// In bytes.
    pub size: u64,
    /// Where the VMM has mapped it.
    pub host: usize,
    /// KVM_MEM_READONLY: a write is the VMM's, as an MMIO exit.
    pub read_only: bool,
    /// KVM_MEM_LOG_DIRTY_PAGES: a store from user space would be missing in KVM's log.
    pub logged: bool,
}

/// Why a slot is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SlotError {
    /// Address, size or mapping is no multiple of a page, or beyond what 64 bits can say.
    #[error("slot {0}: addresses and size must be multiples of 4096 and must not overflow")]
    Shape(u32),
    /// It overlaps a slot with another number.
    #[error("slot {0} overlaps slot {1}")]
    Overlap(u32, u32),
}

/// The slots of one VM, of address space 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemorySlots {
    /// By address, without overlap.
    slots: Vec<MemorySlot>,
}

impl MemorySlots {
    /// Adds a slot, or replaces the one with its number. On an error the slots are as before.
    ///
    /// # Safety
    /// As long as the slot is here, the `size` bytes from `host` are the guest's, or nothing is mapped there: a VMM that keeps
    /// a slot keeps its mapping for nothing else. Accesses fault where nothing is, as KVM's own do: a handler of SIGSEGV and
    /// SIGBUS must then call [`resume_refused_access`](crate::resume_refused_access).
    pub unsafe fn set(&mut self, slot: MemorySlot) -> Result<(), SlotError> {
        let host = slot.host as u64;
        let aligned = (slot.address | slot.size | host) & (PAGE - 1) == 0;
        let ends = slot.address.checked_add(slot.size).is_some() && host.checked_add(slot.size).is_some();
        if !aligned || !ends || slot.size == 0 {
            return Err(SlotError::Shape(slot.number));
        }
        let overlaps = |other: &&MemorySlot| {
            other.number != slot.number
                && other.address < slot.address + slot.size
                && slot.address < other.address + other.size
        };
        if let Some(other) = self.slots.iter().find(overlaps) {
            return Err(SlotError::Overlap(slot.number, other.number));
        }
        self.remove(slot.number);
        let place = self.slots.partition_point(|other| other.address < slot.address);
        self.slots.insert(place, slot);
        Ok(())
    }

    /// Takes a slot out; what KVM does with a size of 0.
    pub fn remove(&mut self, number: u32) {
        self.slots.retain(|slot| slot.number != number);
    }

    /// The slot that has a guest-physical address.
    pub fn find(&self, address: u64) -> Option<&MemorySlot> {
        let after = self.slots.partition_point(|slot| slot.address <= address);
        let slot = self.slots.get(after.checked_sub(1)?)?;
        (address - slot.address < slot.size).then_some(slot)
    }

    /// The page of a guest-physical address, with its slot.
    pub(crate) fn page(&self, address: u64) -> Option<(HostPage, &MemorySlot)> {
        let slot = self.find(address)?;
        let offset = usize::try_from((address - slot.address) & !(PAGE - 1)).ok()?;
        // SAFETY: inside the slot, which whoever called `set` has promised to be the guest's.
        Some((unsafe { HostPage::new(slot.host + offset) }, slot))
    }
}

impl TableMemory for MemorySlots {
    fn table_entry(&self, address: u64) -> Option<u64> {
        let (page, _) = self.page(address)?;
        page.load(address & (PAGE - 8), OperandSize::Qword).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u32, address: u64, pages: u64) -> MemorySlot {
        MemorySlot { number, address, size: pages * PAGE, host: 0x10_0000, read_only: false, logged: false }
    }

    fn set(slots: &mut MemorySlots, slot: MemorySlot) -> Result<(), SlotError> {
        // SAFETY: nothing here reads through a slot.
        unsafe { slots.set(slot) }
    }

    #[test]
    fn a_slot_is_found_by_its_addresses_only() {
        let mut slots = MemorySlots::default();
        set(&mut slots, slot(2, 0x10_0000, 2)).unwrap();
        set(&mut slots, slot(1, 0, 1)).unwrap();
        let number = |slots: &MemorySlots, address| slots.find(address).map(|slot| slot.number);
        assert_eq!(number(&slots, 0), Some(1));
        assert_eq!(number(&slots, 0xfff), Some(1));
        assert_eq!(number(&slots, 0x1000), None);
        assert_eq!(number(&slots, 0x10_1fff), Some(2));
        assert_eq!(number(&slots, 0x10_2000), None);
        set(&mut slots, slot(2, 0x20_0000, 1)).unwrap();
        assert_eq!(number(&slots, 0x10_0000), None, "a slot that moves leaves its place");
        slots.remove(1);
        assert_eq!(number(&slots, 0), None);
        assert_eq!(number(&slots, u64::MAX), None);
    }

    #[test]
    fn what_kvm_would_refuse_is_refused() {
        let mut slots = MemorySlots::default();
        set(&mut slots, slot(1, 0x1000, 2)).unwrap();
        let before = slots.clone();
        assert_eq!(set(&mut slots, slot(2, 0x2000, 1)), Err(SlotError::Overlap(2, 1)));
        assert_eq!(set(&mut slots, slot(2, 0, 2)), Err(SlotError::Overlap(2, 1)));
        assert_eq!(set(&mut slots, slot(2, 0x10, 1)), Err(SlotError::Shape(2)));
        assert_eq!(set(&mut slots, slot(2, 0x8000, 0)), Err(SlotError::Shape(2)));
        assert_eq!(set(&mut slots, slot(2, u64::MAX - 0xfff, 2)), Err(SlotError::Shape(2)));
        assert_eq!(slots, before);
    }
}
