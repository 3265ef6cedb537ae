//! Arrays as a guest may leave them.
#![allow(unsafe_code)]
// UNSAFETY: memory slots take addresses.

use proptest::prelude::*;

use super::*;
use crate::slots::MemorySlot;

const BITS: u32 = 40;
/// Guest-physical; two pages of memory, and nothing else below 4 GiB.
const MEMORY: u64 = 0x10_0000;
const DEVICE: u64 = 0xfebc_0000;

#[repr(C, align(4096))]
struct Pages([u64; 1024]);

/// Memory of a guest, with an array at `at`.
struct Guest {
    pages: Box<Pages>,
    slots: MemorySlots,
}

impl Guest {
    fn new() -> Self {
        let mut guest = Self { pages: Box::new(Pages([0; 1024])), slots: MemorySlots::default() };
        guest.slot(false, false);
        guest
    }

    fn slot(&mut self, read_only: bool, logged: bool) {
        let host = (&raw mut *self.pages).expose_provenance();
        let slot = MemorySlot { number: 0, address: MEMORY, size: 2 * PAGE, host, read_only, logged };
        // SAFETY: the pages live as long as the slots, and nobody borrows them while slots are used.
        unsafe { self.slots.set(slot).unwrap() };
    }

    fn words(&self) -> [u64; 1024] {
        // SAFETY: plain numbers, which are written by address.
        unsafe { (&raw const (*self.pages).0).read_volatile() }
    }

    fn place<T>(&mut self, address: u64) -> *mut T {
        let offset = usize::try_from(address - MEMORY).unwrap();
        assert!(offset + size_of::<T>() <= size_of::<Pages>());
        (&raw mut *self.pages).cast::<u8>().wrapping_add(offset).cast()
    }

    fn put(&mut self, address: u64, header: BatchHeader, entries: &[BatchEntry]) {
        // SAFETY: inside the pages, and aligned.
        unsafe { self.place::<BatchHeader>(address).write(header) };
        for (entry, at) in entries.iter().zip((address + HEADER..).step_by(size_of::<BatchEntry>())) {
            // SAFETY: as above.
            unsafe { self.place::<BatchEntry>(at).write(*entry) };
        }
    }

    fn header(&mut self, address: u64) -> BatchHeader {
        // SAFETY: inside the pages, and aligned.
        unsafe { self.place::<BatchHeader>(address).read() }
    }

    fn entry(&mut self, address: u64, index: u64) -> BatchEntry {
        // SAFETY: inside the pages, and aligned.
        unsafe { self.place::<BatchEntry>(address + HEADER + ENTRY * index).read() }
    }
}

fn header(count: u16) -> BatchHeader {
    BatchHeader { magic: MAGIC, version: VERSION, count, ..Default::default() }
}

fn entry(kind: u8, width: u8, address: u64, value: u64) -> BatchEntry {
    BatchEntry { kind, width, address, value, ..Default::default() }
}

/// All are the VMM's.
fn open(_: &DeviceAccess) -> bool {
    true
}

fn refused(status: BatchStatus) -> NoAccess {
    NoAccess::Answer(status)
}

/// The layout is other people's: C programs have it too.
#[test]
fn the_layout_has_no_gaps() {
    assert_eq!((HEADER, ENTRY), (16, 24));
    let at = [
        offset_of!(BatchHeader, version),
        offset_of!(BatchHeader, count),
        offset_of!(BatchHeader, done),
        offset_of!(BatchHeader, status),
        offset_of!(BatchHeader, reserved),
    ];
    assert_eq!(at, [4, 6, 8, 10, 12]);
    let at = [
        offset_of!(BatchEntry, width),
        offset_of!(BatchEntry, status),
        offset_of!(BatchEntry, reserved),
        offset_of!(BatchEntry, address),
        offset_of!(BatchEntry, value),
    ];
    assert_eq!(at, [1, 2, 4, 8, 16]);
    assert!(HEADER + ENTRY * u64::from(MOST_ENTRIES) <= PAGE, "the largest array fits into a page");
    assert_eq!(&MAGIC.to_le_bytes(), b"IOpB");
}

#[test]
fn entries_are_done_in_their_order_and_the_array_says_so() {
    let mut guest = Guest::new();
    let entries = [
        entry(WRITE_PORT, 1, 0x1f2, 0xffff_ff08),
        entry(READ_PORT, 2, 0x1f0, 0),
        entry(WRITE_MEMORY, 8, DEVICE, u64::MAX),
        entry(READ_MEMORY, 4, DEVICE + 4, 7),
    ];
    guest.put(MEMORY + 64, header(4), &entries);
    let mut batch = BatchProgress::begin(&guest.slots, MEMORY + 64).unwrap();
    let mut seen = Vec::new();
    for read in [None, Some(0x50), None, Some(0x1234_5678)] {
        assert!(!batch.is_complete());
        seen.push(batch.access(&guest.slots, BITS, open).unwrap());
        batch.answered(Some(&guest.slots), read).unwrap();
        assert_eq!(guest.header(MEMORY + 64).done, batch.done());
    }
    assert!(batch.is_complete());
    use DeviceAccess::*;
    use OperandSize::*;
    let wanted = [
        PortWrite { port: 0x1f2, size: Byte, count: 1 },
        PortRead { port: 0x1f0, size: Word, count: 1 },
        MemoryWrite { address: DEVICE, size: Qword, value: u64::MAX },
        MemoryRead { address: DEVICE + 4, size: Dword },
    ];
    assert_eq!(seen.iter().map(|(access, _)| *access).collect::<Vec<_>>(), wanted);
    assert_eq!(seen[0].1, 0xffff_ff08, "what is written");
    let after = |index| guest.entry(MEMORY + 64, index);
    let values = [0, 1, 2, 3].map(after).map(|entry| (entry.status, entry.value));
    assert_eq!(values, [(1, 0xffff_ff08), (1, 0x50), (1, u64::MAX), (1, 0x1234_5678)]);
    assert_eq!(guest.header(MEMORY + 64), BatchHeader { done: 4, ..header(4) });
}

#[test]
fn a_batch_goes_on_behind_what_is_done() {
    let mut guest = Guest::new();
    guest.put(
        MEMORY,
        BatchHeader { done: 1, ..header(2) },
        &[entry(9, 9, 9, 9), entry(READ_PORT, 1, 0x60, 0)],
    );
    let mut batch = BatchProgress::begin(&guest.slots, MEMORY).unwrap();
    assert_eq!(batch.check(&guest.slots, BITS), Ok(()), "what is done is not looked at");
    let (access, _) = batch.access(&guest.slots, BITS, open).unwrap();
    assert_eq!(access, DeviceAccess::PortRead { port: 0x60, size: OperandSize::Byte, count: 1 });
    batch.answered(Some(&guest.slots), Some(1)).unwrap();
    assert!(batch.is_complete());
    assert!(BatchProgress::begin(&guest.slots, MEMORY).unwrap().is_complete());
}

#[test]
fn where_an_array_may_be() {
    let mut guest = Guest::new();
    let begin = |guest: &Guest, address| BatchProgress::begin(&guest.slots, address).unwrap_err();
    for address in
        [MEMORY + 4, MEMORY + 1, 0, MEMORY - PAGE, MEMORY + 2 * PAGE, u64::MAX, u64::MAX - 7, 1 << 63]
    {
        assert_eq!(begin(&guest, address), refused(BatchStatus::Address), "{address:x}");
    }
    assert_eq!(begin(&guest, MEMORY + PAGE - 8), refused(BatchStatus::Address), "half a header");
    // A header alone at the end of a page, entries in the next.
    guest.put(MEMORY + PAGE - 16, header(1), &[entry(READ_PORT, 1, 0x60, 0)]);
    assert_eq!(begin(&guest, MEMORY + PAGE - 16), refused(BatchStatus::Count));
    assert_eq!(guest.header(MEMORY + PAGE - 16).status, BatchStatus::Count as u16, "and it is said");
    guest.put(MEMORY, header(1), &[entry(READ_PORT, 1, 0x60, 0)]);
    guest.slot(false, true);
    assert_eq!(begin(&guest, MEMORY), NoAccess::Nobody, "logged");
    guest.slot(true, false);
    assert_eq!(begin(&guest, MEMORY), refused(BatchStatus::Address), "read-only");
    guest.slot(true, true);
    assert_eq!(begin(&guest, MEMORY), refused(BatchStatus::Address));
}

#[test]
fn headers_that_are_refused() {
    let good = header(2);
    let mut guest = Guest::new();
    for other in [
        BatchHeader { magic: MAGIC + 1, ..good },
        BatchHeader { version: 0, ..good },
        BatchHeader { version: 2, ..good },
        BatchHeader { reserved: 1, ..good },
    ] {
        guest.put(MEMORY, other, &[]);
        assert_eq!(
            BatchProgress::begin(&guest.slots, MEMORY),
            Err(refused(BatchStatus::Header)),
            "{other:?}"
        );
        assert_eq!(guest.header(MEMORY), other, "nothing is written into what is no array");
    }
    for other in [
        BatchHeader { count: 0, ..good },
        BatchHeader { count: MOST_ENTRIES + 1, ..good },
        BatchHeader { count: u16::MAX, ..good },
        BatchHeader { done: 3, ..good },
        BatchHeader { count: 0, done: u16::MAX, ..good },
    ] {
        guest.put(MEMORY, other, &[]);
        assert_eq!(BatchProgress::begin(&guest.slots, MEMORY), Err(refused(BatchStatus::Count)), "{other:?}");
        assert_eq!(guest.header(MEMORY), BatchHeader { status: BatchStatus::Count as u16, ..other });
    }
    guest.put(MEMORY, header(MOST_ENTRIES), &[]);
    assert!(BatchProgress::begin(&guest.slots, MEMORY).is_ok());
}

#[test]
fn entries_that_are_refused() {
    use EntryStatus as S;
    let cases = [
        (entry(4, 1, 0x60, 0), S::Kind),
        (entry(255, 1, 0x60, 0), S::Kind),
        (BatchEntry { reserved: 1, ..entry(READ_PORT, 1, 0x60, 0) }, S::Kind),
        (entry(4, 3, 0x60, 0), S::Kind),
        (entry(READ_PORT, 0, 0x60, 0), S::Width),
        (entry(READ_PORT, 3, 0x60, 0), S::Width),
        (entry(WRITE_PORT, 8, 0x60, 0), S::Width),
        (entry(READ_MEMORY, 16, DEVICE, 0), S::Width),
        (entry(READ_PORT, 1, 0x1_0000, 0), S::Address),
        (entry(READ_PORT, 4, 0xfffd, 0), S::Address),
        (entry(WRITE_PORT, 2, 0xffff, 0), S::Address),
        (entry(WRITE_PORT, 2, u64::MAX, 0), S::Address),
        (entry(READ_MEMORY, 4, DEVICE + 2, 0), S::Address),
        (entry(WRITE_MEMORY, 8, DEVICE + 4, 0), S::Address),
        (entry(READ_MEMORY, 1, 1 << BITS, 0), S::Address),
        (entry(READ_MEMORY, 1, u64::MAX, 0), S::Address),
        (entry(READ_MEMORY, 4, MEMORY, 0), S::Memory),
        (entry(WRITE_MEMORY, 1, MEMORY + 2 * PAGE - 1, 0), S::Memory),
    ];
    for (wrong, status) in cases {
        let mut guest = Guest::new();
        guest.put(MEMORY, header(2), &[entry(READ_PORT, 1, 0x60, 0), wrong]);
        let mut batch = BatchProgress::begin(&guest.slots, MEMORY).unwrap();
        // Before anything is done, and once more when its turn comes: it may have changed in between.
        assert_eq!(batch.check(&guest.slots, BITS), Err(refused(BatchStatus::Entry)), "{wrong:?}");
        assert_eq!(guest.entry(MEMORY, 1), BatchEntry { status: status as u16, ..wrong });
        assert_eq!(guest.header(MEMORY), BatchHeader { status: BatchStatus::Entry as u16, ..header(2) });
        guest.put(MEMORY, header(2), &[entry(READ_PORT, 1, 0x60, 0), wrong]);
        assert!(batch.access(&guest.slots, BITS, open).is_ok());
        batch.answered(Some(&guest.slots), Some(0)).unwrap();
        let found = batch.access(&guest.slots, BITS, open);
        assert_eq!(found, Err(refused(BatchStatus::Entry)), "{wrong:?}");
        assert_eq!(guest.entry(MEMORY, 1), BatchEntry { status: status as u16, ..wrong });
        let said = BatchHeader { done: 1, status: BatchStatus::Entry as u16, ..header(2) };
        assert_eq!(guest.header(MEMORY), said);
    }
    for good in [entry(READ_PORT, 1, 0xffff, 0), entry(READ_PORT, 4, 0xfffc, 0), entry(READ_PORT, 4, 1, 0)] {
        let mut guest = Guest::new();
        guest.put(MEMORY, header(1), &[good]);
        let batch = BatchProgress::begin(&guest.slots, MEMORY).unwrap();
        assert_eq!(batch.check(&guest.slots, BITS), Ok(()));
        assert!(batch.access(&guest.slots, BITS, open).is_ok());
    }
}

#[test]
fn what_the_kernel_answers_is_left_to_an_instruction() {
    let mut guest = Guest::new();
    guest.put(MEMORY, header(1), &[entry(WRITE_PORT, 1, 0x20, 0x20)]);
    let batch = BatchProgress::begin(&guest.slots, MEMORY).unwrap();
    assert_eq!(batch.check(&guest.slots, BITS), Ok(()), "it stops the batch when its turn comes");
    let pic = DeviceAccess::PortWrite { port: 0x20, size: OperandSize::Byte, count: 1 };
    let found = batch.access(&guest.slots, BITS, |access| *access != pic);
    assert_eq!(found, Err(refused(BatchStatus::Entry)));
    assert_eq!(guest.entry(MEMORY, 0).status, EntryStatus::Kernel as u16);
}

/// Memory that is logged or gone when the device has answered: the answer is not lost, and the array stays as it was.
#[test]
fn an_answer_that_cannot_be_stored() {
    for why in ["logged", "read-only", "gone", "changing"] {
        let mut guest = Guest::new();
        guest.put(MEMORY, header(2), &[entry(READ_PORT, 1, 0x60, 0), entry(READ_PORT, 1, 0x60, 0)]);
        let mut batch = BatchProgress::begin(&guest.slots, MEMORY).unwrap();
        batch.access(&guest.slots, BITS, open).unwrap();
        match why {
            "logged" => guest.slot(false, true),
            "read-only" => guest.slot(true, false),
            "gone" => guest.slots.remove(0),
            _ => {}
        }
        let before = guest.words();
        let slots = (why != "changing").then_some(&guest.slots);
        assert_eq!(batch.answered(slots, Some(5)), Err(BatchStatus::NotStored), "{why}");
        assert_eq!(batch.done(), 1, "the device has answered it");
        assert!(guest.words() == before, "{why}");
        let next = match why {
            "logged" => Err(NoAccess::Nobody),
            "changing" => continue,
            _ => Err(refused(BatchStatus::Address)),
        };
        assert_eq!(batch.access(&guest.slots, BITS, open), next);
    }
}

#[test]
fn an_answer_is_never_all_ones() {
    for status in [BatchStatus::Done, BatchStatus::NotStored] {
        for done in [0, MOST_ENTRIES] {
            assert_ne!(answer(status, done), u32::MAX);
        }
    }
    assert_eq!(answer(BatchStatus::Entry, 3), 0x4_0003);
}

proptest! {
    /// Whatever is in memory, and however it changes meanwhile: no panic, at most so many accesses, none to memory, and only the array's
    /// page is written.
    #[test]
    fn any_memory_is_an_array_or_refused(
        words in proptest::collection::vec(any::<u64>(), 512),
        start in 0..PAGE / 8,
        count in 0..160_u16,
        done in 0..4_u16,
        kinds in proptest::collection::vec(0..6_u8, 128),
        change in any::<u16>(),
    ) {
        let mut guest = Guest::new();
        let at = MEMORY + 8 * start;
        for (index, word) in (MEMORY..).step_by(8).zip(&words) {
            // SAFETY: inside the first page.
            unsafe { guest.place::<u64>(index).write(*word) };
        }
        let room = usize::try_from((PAGE - at % PAGE).saturating_sub(HEADER) / ENTRY).unwrap();
        if at % PAGE + HEADER <= PAGE {
            let entries: Vec<_> = kinds
                .iter()
                .zip(&words)
                .take(room)
                .map(|(kind, word)| entry(*kind, 1 << (word % 5), word >> (word % 64), *word))
                .collect();
            guest.put(at, BatchHeader { done, ..header(count) }, &entries);
        }
        let second: Vec<u64> = guest.words()[512..].to_vec();
        let mut accesses = 0_u16;
        if let Ok(mut batch) = BatchProgress::begin(&guest.slots, at) {
            // The entries may change as soon as they have been looked at, so nothing follows from what this says.
            let _ = batch.check(&guest.slots, BITS);
            while !batch.is_complete() {
                let Ok((access, _)) = batch.access(&guest.slots, BITS, open) else { break };
                match access {
                    DeviceAccess::MemoryRead { address, .. } | DeviceAccess::MemoryWrite { address, .. } => {
                        prop_assert!(guest.slots.find(address).is_none() && address >> BITS == 0);
                    }
                    DeviceAccess::PortRead { count, .. } | DeviceAccess::PortWrite { count, .. } => {
                        prop_assert_eq!(count, 1);
                    }
                }
                accesses += 1;
                // Another vCPU writes into the array.
                let elsewhere = MEMORY + 8 * u64::from(change.wrapping_mul(accesses)) % PAGE;
                // SAFETY: inside the first page.
                unsafe { guest.place::<u64>(elsewhere & !7).write(u64::from(change) << 32) };
                batch.answered(Some(&guest.slots), Some(u64::MAX)).unwrap();
            }
        }
        prop_assert!(accesses <= MOST_ENTRIES);
        prop_assert_eq!(&guest.words()[512..], &second[..]);
    }
}
