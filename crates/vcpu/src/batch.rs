//! Batches: an array of device accesses in guest memory that a guest has carried out with one doorbell.
//!
//! ```text
//!   page of the guest   | BatchHeader | BatchEntry 0 | BatchEntry 1 | ...
//!                           ^ RAX
//!   guest: IN EAX, DX   DX = DOORBELL, RAX = guest-physical address of the header
//!   answer in EAX       bits 0 to 15: entries done; bits 16 to 31: BatchStatus; all ones: nobody has looked at the array
//! ```
//!
//! The types here are the layout that guests use (docs/guide/batch.md). All of the array is the guest's input and may change at any
//! moment: each field is read once, when it is needed, and checked then. Nothing outside of the array's page is written.

use std::mem::offset_of;

use crate::arithmetic::OperandSize;
use crate::host::{HostFault, HostPage};
use crate::memory::DeviceAccess;
use crate::paging::PAGE;
use crate::slots::MemorySlots;

#[cfg(test)]
mod tests;

/// What CPUID says in EBX, ECX and EDX of the first of the two leaves.
pub const SIGNATURE: [u8; 12] = *b"IOplaneBatch";
/// Of the layout: EAX of the second leaf, and [`BatchHeader::version`].
pub const VERSION: u16 = 1;
/// The port whose 32-bit IN is the doorbell: EBX of the second leaf. No PC has a device there, and Linux gives ports of PCI devices from
/// 1000h on.
pub const DOORBELL: u16 = 0x0e60;
/// What [`BatchHeader::magic`] is: `IOpB`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"IOpB");
/// Entries of one batch at most: ECX of the second leaf.
pub const MOST_ENTRIES: u16 = 128;

/// The beginning of an array, at an address that is a multiple of 8. The array does not leave its page.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchHeader {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u16,
    /// Entries that follow: 1 to [`MOST_ENTRIES`].
    pub count: u16,
    /// Entries that need not be done. The guest writes 0; after each entry that is done it becomes one more.
    pub done: u16,
    /// [`BatchStatus`], written with errors only.
    pub status: u16,
    /// 0.
    pub reserved: u32,
}

/// One access.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchEntry {
    /// [`READ_PORT`], [`WRITE_PORT`], [`READ_MEMORY`] or [`WRITE_MEMORY`].
    pub kind: u8,
    /// Bytes: 1, 2 or 4, and for memory also 8.
    pub width: u8,
    /// [`EntryStatus`]; the guest writes 0.
    pub status: u16,
    /// 0.
    pub reserved: u32,
    /// The port, or a guest-physical address that is a multiple of `width`.
    pub address: u64,
    /// What is written, or what has been read, zero-extended.
    pub value: u64,
}

/// [`BatchEntry::kind`]: IN.
pub const READ_PORT: u8 = 0;
/// [`BatchEntry::kind`]: OUT.
pub const WRITE_PORT: u8 = 1;
/// [`BatchEntry::kind`]: a load from a device's memory.
pub const READ_MEMORY: u8 = 2;
/// [`BatchEntry::kind`]: a store to a device's memory.
pub const WRITE_MEMORY: u8 = 3;

/// What became of a batch.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchStatus {
    /// So many entries are done. If they are not all, the guest rings again.
    Done = 0,
    /// RAX is no address of memory that can be written to, or no multiple of 8, or too close to the end of a page.
    Address = 1,
    /// Magic, version or reserved field are others.
    Header = 2,
    /// No entries, too many, or more than the page has; or `done` is larger.
    Count = 3,
    /// An entry that is not done was refused: see its [`EntryStatus`]. But for [`EntryStatus::Kernel`], which stops a batch before that
    /// entry, this doorbell has led to no access.
    Entry = 4,
    /// The last entry that is done could not be entered into the array, as memory that is logged or has gone: RDX has what it has read, and
    /// its status and the header's `done` are the guest's to write.
    NotStored = 5,
}

/// What became of an entry.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryStatus {
    /// The device has answered.
    Done = 1,
    /// `kind` is unknown, or the reserved field is not 0.
    Kind = 2,
    /// `width` is another.
    Width = 3,
    /// A port beyond FFFFh, an address that is no multiple of the width or beyond what the processor has.
    Address = 4,
    /// KVM answers it itself, or an eventfd does: to be issued by an instruction of its own.
    Kernel = 5,
    /// Memory, of whatever kind, has this address.
    Memory = 6,
}

const HEADER: u64 = size_of::<BatchHeader>() as u64;
const ENTRY: u64 = size_of::<BatchEntry>() as u64;

/// Why a doorbell leads to no access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAccess {
    /// The guest is told that nobody is there. The array's memory is logged, and KVM would not know what is stored there.
    Nobody,
    /// The guest is told this.
    Answer(BatchStatus),
}

/// A batch that is under way: what of its array has been looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchProgress {
    /// Guest-physical, of the header.
    address: u64,
    count: u16,
    done: u16,
}

/// The page of an array, if the array can be written to.
fn page(slots: &MemorySlots, address: u64) -> Result<HostPage, NoAccess> {
    let wrong = NoAccess::Answer(BatchStatus::Address);
    if !address.is_multiple_of(8) || address % PAGE + HEADER > PAGE {
        return Err(wrong);
    }
    match slots.page(address) {
        Some((_, slot)) if slot.read_only => Err(wrong),
        Some((_, slot)) if slot.logged => Err(NoAccess::Nobody),
        Some((page, _)) => Ok(page),
        None => Err(wrong),
    }
}

impl From<HostFault> for NoAccess {
    fn from(_: HostFault) -> Self {
        NoAccess::Answer(BatchStatus::Address)
    }
}

fn word(page: HostPage, offset: u64) -> Result<u16, HostFault> {
    // A word has no more.
    Ok(u16::try_from(page.load(offset, OperandSize::Word)? & 0xffff).unwrap_or(0))
}

fn byte(page: HostPage, offset: u64) -> Result<u8, HostFault> {
    Ok(u8::try_from(page.load(offset, OperandSize::Byte)? & 0xff).unwrap_or(0))
}

/// The access that an entry means, as far as that does not depend on who answers it.
fn meaning(entry: &BatchEntry, slots: &MemorySlots, physical_bits: u32) -> Result<DeviceAccess, EntryStatus> {
    let BatchEntry { kind, width, reserved, address, value, .. } = *entry;
    if kind > WRITE_MEMORY || reserved != 0 {
        return Err(EntryStatus::Kind);
    }
    let size = match width {
        1 => OperandSize::Byte,
        2 => OperandSize::Word,
        4 => OperandSize::Dword,
        8 if kind >= READ_MEMORY => OperandSize::Qword,
        _ => return Err(EntryStatus::Width),
    };
    if kind < READ_MEMORY {
        let port = u16::try_from(address).map_err(|_| EntryStatus::Address)?;
        // An access that leaves the port space at its end is the processor's to answer.
        if u64::from(port) + size.bytes() > 1 << 16 {
            return Err(EntryStatus::Address);
        }
        return Ok(match kind {
            READ_PORT => DeviceAccess::PortRead { port, size, count: 1 },
            _ => DeviceAccess::PortWrite { port, size, count: 1 },
        });
    }
    let beyond = physical_bits < u64::BITS && address >> physical_bits != 0;
    if beyond || !address.is_multiple_of(size.bytes()) {
        return Err(EntryStatus::Address);
    }
    // Slots consist of pages, and an address that is a multiple of the width does not leave its page.
    if slots.find(address).is_some() {
        return Err(EntryStatus::Memory);
    }
    Ok(match kind {
        READ_MEMORY => DeviceAccess::MemoryRead { address, size },
        _ => DeviceAccess::MemoryWrite { address, size, value: value & size.mask() },
    })
}

impl BatchProgress {
    /// Looks at the header of an array whose guest-physical address a guest has given.
    pub(crate) fn begin(slots: &MemorySlots, address: u64) -> Result<Self, NoAccess> {
        let page = page(slots, address)?;
        let at = |field: usize| address % PAGE + field as u64;
        let magic = page.load(at(offset_of!(BatchHeader, magic)), OperandSize::Dword)?;
        let version = word(page, at(offset_of!(BatchHeader, version)))?;
        let reserved = page.load(at(offset_of!(BatchHeader, reserved)), OperandSize::Dword)?;
        if magic != u64::from(MAGIC) || version != VERSION || reserved != 0 {
            // It may be anything, so nothing is written there.
            return Err(NoAccess::Answer(BatchStatus::Header));
        }
        let count = word(page, at(offset_of!(BatchHeader, count)))?;
        let done = word(page, at(offset_of!(BatchHeader, done)))?;
        let batch = Self { address, count, done: done.min(count) };
        let end = address % PAGE + HEADER + ENTRY * u64::from(count);
        if count == 0 || count > MOST_ENTRIES || done > count || end > PAGE {
            batch.say(page, BatchStatus::Count);
            return Err(NoAccess::Answer(BatchStatus::Count));
        }
        Ok(batch)
    }

    /// How many entries are done.
    pub(crate) fn done(&self) -> u16 {
        self.done
    }

    /// Whether all of them are.
    pub(crate) fn is_complete(&self) -> bool {
        self.done >= self.count
    }

    /// Whether each entry that is not done means an access. What this has found may have changed when the entry's turn comes, so
    /// [`BatchProgress::access`] looks again.
    pub(crate) fn check(&self, slots: &MemorySlots, physical_bits: u32) -> Result<(), NoAccess> {
        let page = page(slots, self.address)?;
        for index in self.done..self.count {
            let entry = self.load(page, index)?;
            meaning(&entry, slots, physical_bits).map_err(|status| self.refuse(page, index, status))?;
        }
        Ok(())
    }

    /// The next access, with what a write carries. `leaves_kernel` says whether it is the VMM's to answer, and nobody else's;
    /// `physical_bits` is how many bits the guest's addresses have. An entry that is refused is told so in the array.
    pub(crate) fn access(
        &self,
        slots: &MemorySlots,
        physical_bits: u32,
        leaves_kernel: impl FnOnce(&DeviceAccess) -> bool,
    ) -> Result<(DeviceAccess, u64), NoAccess> {
        let page = page(slots, self.address)?;
        let entry = self.load(page, self.done)?;
        meaning(&entry, slots, physical_bits)
            .and_then(|access| if leaves_kernel(&access) { Ok(access) } else { Err(EntryStatus::Kernel) })
            .map(|access| (access, entry.value))
            .map_err(|status| self.refuse(page, self.done, status))
    }

    /// Reads each field of an entry once, but for its status, which does not matter here.
    fn load(&self, page: HostPage, index: u16) -> Result<BatchEntry, HostFault> {
        let at = |field: usize| self.entry(index, field);
        let reserved = page.load(at(offset_of!(BatchEntry, reserved)), OperandSize::Dword)?;
        Ok(BatchEntry {
            kind: byte(page, at(offset_of!(BatchEntry, kind)))?,
            width: byte(page, at(offset_of!(BatchEntry, width)))?,
            status: 0,
            reserved: u32::try_from(reserved).unwrap_or(u32::MAX),
            address: page.load(at(offset_of!(BatchEntry, address)), OperandSize::Qword)?,
            value: page.load(at(offset_of!(BatchEntry, value)), OperandSize::Qword)?,
        })
    }

    fn refuse(&self, page: HostPage, index: u16, status: EntryStatus) -> NoAccess {
        // EAX says it too, so an array that has gone meanwhile is no loss.
        let at = self.entry(index, offset_of!(BatchEntry, status));
        let _ = page.store(at, OperandSize::Word, u64::from(status as u16));
        self.say(page, BatchStatus::Entry);
        NoAccess::Answer(BatchStatus::Entry)
    }

    /// The device has answered the access at hand, with `read` if it was a read. It is done from now on; an error says that the array does
    /// not know.
    pub(crate) fn answered(
        &mut self,
        slots: Option<&MemorySlots>,
        read: Option<u64>,
    ) -> Result<(), BatchStatus> {
        let stored = slots.ok_or(BatchStatus::NotStored).and_then(|slots| self.store(slots, read));
        self.done = self.count.min(self.done.saturating_add(1));
        stored
    }

    /// In this order: what is said to be done is there.
    fn store(&self, slots: &MemorySlots, read: Option<u64>) -> Result<(), BatchStatus> {
        let page = page(slots, self.address).map_err(|_| BatchStatus::NotStored)?;
        let store = |offset: u64, size: OperandSize, value: u64| {
            page.store(offset, size, value).map_err(|_| BatchStatus::NotStored)
        };
        if let Some(read) = read {
            store(self.entry(self.done, offset_of!(BatchEntry, value)), OperandSize::Qword, read)?;
        }
        let status = u64::from(EntryStatus::Done as u16);
        store(self.entry(self.done, offset_of!(BatchEntry, status)), OperandSize::Word, status)?;
        let done = u64::from(self.done) + 1;
        store(self.address % PAGE + offset_of!(BatchHeader, done) as u64, OperandSize::Word, done)
    }

    /// The offset of a field of an entry, in the array's page.
    fn entry(&self, index: u16, field: usize) -> u64 {
        self.address % PAGE + HEADER + ENTRY * u64::from(index) + field as u64
    }

    fn say(&self, page: HostPage, status: BatchStatus) {
        let at = self.address % PAGE + offset_of!(BatchHeader, status) as u64;
        let _ = page.store(at, OperandSize::Word, u64::from(status as u16));
    }
}

/// What the doorbell gives in EAX.
pub(crate) fn answer(status: BatchStatus, done: u16) -> u32 {
    u32::from(status as u16) << 16 | u32::from(done)
}
