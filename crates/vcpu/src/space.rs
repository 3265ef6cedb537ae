//! Linear memory of a vCPU: page tables over memory slots, with a cache of translations that lasts one run.

use crate::arithmetic::OperandSize;
use crate::host::HostPage;
use crate::memory::{Denied, INSTRUCTION_BYTES, LinearMemory, StopReason};
use crate::paging::{PAGE, TableWalk, Translation};
use crate::registers::SystemRegisters;
use crate::slots::MemorySlots;

/// Pages that are kept; a power of two.
const KEPT: usize = 64;
/// What the processor locks at most at once, in bytes.
const CACHE_LINE: u64 = 64;

/// Where the bytes of a page are.
#[derive(Clone, Copy, Debug)]
enum Backing {
    Memory {
        page: HostPage,
        store: Store,
    },
    /// In no slot.
    Device,
}

/// What happens to a store.
#[derive(Clone, Copy, Debug)]
enum Store {
    Allowed,
    /// To a read-only slot: the VMM's.
    Device,
    /// To a logged slot: KVM's.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct CachedPage {
    /// Of the run that it belongs to; 0 for none.
    run: u64,
    number: u64,
    translation: Translation,
    backing: Backing,
}

/// Translations of one vCPU. Those of one run are not used in the next: between two runs the VMM has run, and the guest
/// may have been entered and have flushed its own.
pub struct TranslationCache {
    run: u64,
    pages: Box<[CachedPage]>,
}

impl Default for TranslationCache {
    fn default() -> Self {
        Self::new()
    }
}

impl TranslationCache {
    /// Allocates all that it will need.
    pub fn new() -> Self {
        let empty = CachedPage {
            run: 0,
            number: 0,
            translation: Translation { page: 0, write: Ok(()), fetch: Ok(()) },
            backing: Backing::Device,
        };
        Self { run: 0, pages: vec![empty; KEPT].into_boxed_slice() }
    }
}

/// The guest's linear memory during one run.
pub struct GuestSpace<'a> {
    slots: &'a MemorySlots,
    walk: TableWalk,
    cache: &'a mut TranslationCache,
}

impl<'a> GuestSpace<'a> {
    /// Forgets the translations of the run before. `physical_bits` as for [`TableWalk::new`].
    pub fn new(
        slots: &'a MemorySlots,
        system: &SystemRegisters,
        physical_bits: u32,
        cache: &'a mut TranslationCache,
    ) -> Self {
        cache.run += 1;
        Self { slots, walk: TableWalk::new(system, physical_bits), cache }
    }

    fn page(&mut self, linear: u64) -> Result<CachedPage, Denied> {
        let number = linear / PAGE;
        let index = usize::try_from(number % KEPT as u64).unwrap_or(0);
        if let Some(cached) = self.cache.pages.get(index)
            && cached.run == self.cache.run
            && cached.number == number
        {
            return Ok(*cached);
        }
        let translation = self
            .walk
            .translate(self.slots, linear)
            .map_err(|fault| Denied::Stop(StopReason::Translation(fault)))?;
        let backing = match self.slots.page(translation.page) {
            None => Backing::Device,
            Some((page, slot)) => {
                let store = match (slot.read_only, slot.logged) {
                    (true, _) => Store::Device,
                    (false, true) => Store::Refused,
                    (false, false) => Store::Allowed,
                };
                Backing::Memory { page, store }
            }
        };
        let page = CachedPage { run: self.cache.run, number, translation, backing };
        if let Some(place) = self.cache.pages.get_mut(index) {
            *place = page;
        }
        Ok(page)
    }

    fn readable(&mut self, linear: u64) -> Result<HostPage, Denied> {
        let cached = self.page(linear)?;
        match cached.backing {
            Backing::Memory { page, .. } => Ok(page),
            Backing::Device => Err(Denied::Device(cached.translation.page + linear % PAGE)),
        }
    }

    fn writable(&mut self, linear: u64) -> Result<HostPage, Denied> {
        let cached = self.page(linear)?;
        cached.translation.write.map_err(|fault| Denied::Stop(StopReason::Translation(fault)))?;
        match cached.backing {
            Backing::Memory { page, store: Store::Allowed } => Ok(page),
            Backing::Memory { store: Store::Refused, .. } => Err(Denied::Stop(StopReason::Slot)),
            Backing::Memory { store: Store::Device, .. } | Backing::Device => {
                Err(Denied::Device(cached.translation.page + linear % PAGE))
            }
        }
    }

    fn lockable(&mut self, linear: u64, bytes: u64) -> Result<HostPage, Denied> {
        if linear % CACHE_LINE + bytes > CACHE_LINE {
            return Err(Denied::Stop(StopReason::Atomic));
        }
        self.writable(linear)
    }
}

/// Whether an operand reaches into the next page, which then begins at the second value.
fn crosses(linear: u64, bytes: u64) -> Option<u64> {
    (linear % PAGE + bytes > PAGE).then(|| (linear & !(PAGE - 1)).wrapping_add(PAGE))
}

/// An operand across two pages is memory in both, or the processor's.
fn no_device(denied: Denied) -> Denied {
    match denied {
        Denied::Device(_) => Denied::Stop(StopReason::DeviceOperand),
        stop => stop,
    }
}

impl LinearMemory for GuestSpace<'_> {
    fn fetch(&mut self, linear: u64, bytes: &mut [u8; INSTRUCTION_BYTES]) -> Result<usize, Denied> {
        let cached = self.page(linear)?;
        cached.translation.fetch.map_err(|fault| Denied::Stop(StopReason::Translation(fault)))?;
        let first = self.readable(linear)?;
        let start = linear % PAGE;
        if start + 16 <= PAGE {
            let low = first.load(start, OperandSize::Qword)?.to_le_bytes();
            let high = first.load(start + 8, OperandSize::Qword)?.to_le_bytes();
            for (to, from) in bytes.iter_mut().zip(low.into_iter().chain(high)) {
                *to = from;
            }
            return Ok(INSTRUCTION_BYTES);
        }
        let second = match self.page((linear & !(PAGE - 1)).wrapping_add(PAGE)) {
            Ok(CachedPage { translation, backing: Backing::Memory { page, .. }, .. })
                if translation.fetch.is_ok() =>
            {
                Some(page)
            }
            _ => None,
        };
        for (count, to) in bytes.iter_mut().enumerate() {
            let offset = start + count as u64;
            let byte = match (offset < PAGE, second) {
                (true, _) => first.load(offset, OperandSize::Byte)?,
                (false, Some(second)) => match second.load(offset - PAGE, OperandSize::Byte) {
                    Ok(byte) => byte,
                    Err(_) => return Ok(count),
                },
                (false, None) => return Ok(count),
            };
            *to = byte.to_le_bytes()[0];
        }
        Ok(INSTRUCTION_BYTES)
    }

    fn load(&mut self, linear: u64, size: OperandSize) -> Result<u64, Denied> {
        let start = linear % PAGE;
        let Some(next) = crosses(linear, size.bytes()) else {
            return Ok(self.readable(linear)?.load(start, size)?);
        };
        let first = self.readable(linear).map_err(no_device)?;
        let second = self.readable(next).map_err(no_device)?;
        let mut value = 0;
        for index in 0..size.bytes() {
            let offset = start + index;
            let byte = if offset < PAGE {
                first.load(offset, OperandSize::Byte)?
            } else {
                second.load(offset - PAGE, OperandSize::Byte)?
            };
            value |= byte << (8 * index);
        }
        Ok(value)
    }

    fn store(&mut self, linear: u64, size: OperandSize, value: u64) -> Result<(), Denied> {
        let start = linear % PAGE;
        let Some(next) = crosses(linear, size.bytes()) else {
            return Ok(self.writable(linear)?.store(start, size, value)?);
        };
        let first = self.writable(linear).map_err(no_device)?;
        let second = self.writable(next).map_err(no_device)?;
        // Before the first byte is changed. Memory that is taken away after this is lost with what was stored there.
        first.probe_store(start)?;
        second.probe_store(0)?;
        for index in 0..size.bytes() {
            let (offset, byte) = (start + index, value >> (8 * index));
            if offset < PAGE {
                first.store(offset, OperandSize::Byte, byte)?;
            } else {
                second.store(offset - PAGE, OperandSize::Byte, byte)?;
            }
        }
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        linear: u64,
        size: OperandSize,
        current: u64,
        new: u64,
    ) -> Result<u64, Denied> {
        let page = self.lockable(linear, size.bytes())?;
        Ok(page.compare_exchange(linear % PAGE, size, current, new)?)
    }

    fn compare_exchange_wide(&mut self, linear: u64, current: u128, new: u128) -> Result<u128, Denied> {
        if !linear.is_multiple_of(16) {
            return Err(Denied::Stop(StopReason::Exception));
        }
        if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
            return Err(Denied::Stop(StopReason::Instruction));
        }
        Ok(self.lockable(linear, 16)?.compare_exchange_wide(linear % PAGE, current, new)?)
    }

    fn check_store(&mut self, linear: u64, bytes: u64) -> Result<(), Denied> {
        if crosses(linear, bytes).is_some() {
            return Err(Denied::Stop(StopReason::Slot));
        }
        Ok(self.writable(linear)?.probe_store(linear % PAGE)?)
    }
}
