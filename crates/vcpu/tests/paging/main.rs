//! The walk against another one that is written level by level as the manual's figures are, on tables that are mostly
//! right; and linear memory over slots.

#![allow(missing_docs, clippy::unwrap_used)]
#![allow(unsafe_code)]
// UNSAFETY: slots over buffers of the test.

use std::collections::BTreeMap;

use ioplane_vcpu::paging::{TableMemory, TableWalk, Translation, TranslationFault};
use ioplane_vcpu::registers::{cr0, cr4, efer};
use ioplane_vcpu::{
    CachedSegment, Denied, GuestSpace, LinearMemory, MemorySlot, MemorySlots, OperandSize, StopReason,
    SystemRegisters, TranslationCache,
};
use proptest::prelude::*;

mod legacy;

const SYSTEM: SystemRegisters = SystemRegisters {
    cr0: cr0::PE | cr0::PG | cr0::WP,
    cr3: 0x1000,
    cr4: cr4::PAE,
    efer: efer::LMA | efer::NXE,
    cpl: 0,
    code_long: true,
    code_default_big: false,
    flat: false,
    segments: [CachedSegment::UNUSABLE; 6],
    pdptes: [0; 4],
};
const BITS: u32 = 40;
/// Present, writable, accessed, dirty.
const GOOD: u64 = 0x63;

#[derive(Clone, Debug, Default)]
struct Tables(BTreeMap<u64, u64>);

impl TableMemory for Tables {
    fn table_entry(&self, address: u64) -> Option<u64> {
        assert_eq!(address % 8, 0);
        self.0.get(&address).copied()
    }
}

/// Tables at 0x1000, 0x2000 and so on, each with one entry, that for `linear`; from the root down.
fn tables(linear: u64, entries: &[u64]) -> Tables {
    let mut tables = Tables::default();
    for (depth, entry) in entries.iter().enumerate() {
        let level = entries.len() - depth;
        let shift = 12 + 9 * (level - 1);
        let address = 0x1000 * (depth as u64 + 1);
        tables.0.insert(address + 8 * (linear >> shift & 511), *entry);
    }
    tables
}

/// What the processor would allow, level by level, each check by itself.
fn by_the_book(
    tables: &Tables,
    system: &SystemRegisters,
    linear: u64,
    write: bool,
    fetch: bool,
) -> Option<u64> {
    let five = system.cr4 & cr4::LA57 != 0;
    let top = linear >> if five { 56 } else { 47 };
    if top != 0 && top != if five { 0xff } else { 0x1_ffff } {
        return None;
    }
    let nxe = system.efer & efer::NXE != 0;
    let field = |level: u64| linear >> (12 + 9 * (level - 1)) & 511;
    let mut base = system.cr3 & 0x000f_ffff_ffff_f000;
    let mut seen = Vec::new();
    let mut level = if five { 5 } else { 4 };
    let (leaf, size) = loop {
        let entry = *tables.0.get(&(base + 8 * field(level)))?;
        seen.push(entry);
        if entry & 1 == 0 || entry >> BITS & ((1 << (52 - BITS)) - 1) != 0 || !nxe && entry >> 63 == 1 {
            return None;
        }
        let size_bit = entry >> 7 & 1 == 1;
        match (level, size_bit) {
            (1, _) => break (entry, 1_u64 << 12),
            (2, true) => break (entry, 1 << 21),
            (3, true) => break (entry, 1 << 30),
            (_, true) => return None,
            _ => {}
        }
        base = entry & 0x000f_ffff_ffff_f000;
        level -= 1;
    };
    if size > 4096 && leaf & (size - 1) & !0x1fff != 0 {
        return None;
    }
    let all = |bit: u32| seen.iter().all(|entry| entry >> bit & 1 == 1);
    let user = all(2);
    let allowed = all(5)
        && user == (system.cpl == 3)
        && (!write || all(1) && leaf >> 6 & 1 == 1)
        && !(fetch && nxe && seen.iter().any(|entry| entry >> 63 == 1));
    allowed.then(|| (leaf & 0x000f_ffff_ffff_f000 & !(size - 1)) + (linear & (size - 1) & !0xfff))
}

fn entry() -> impl Strategy<Value = u64> {
    let flags = prop_oneof![
        6 => Just(GOOD),
        2 => Just(GOOD | 4),
        1 => (0_u64..0x200).prop_map(|random| GOOD ^ random),
        1 => (0_u64..9).prop_map(|bit| GOOD ^ 1 << bit),
    ];
    let high = prop_oneof![
        6 => Just(0_u64),
        1 => Just(1 << 63),
        1 => (30_u32..64).prop_map(|bit| 1 << bit),
        1 => (12_u32..30).prop_map(|bit| 1 << bit),
    ];
    (flags, high).prop_map(|(flags, high)| flags | high)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn as_the_manual_has_it(
        entries in proptest::collection::vec(entry(), 5),
        linear in prop_oneof![
            any::<u64>(),
            (0_u64..1 << 47),
            (0_u64..1 << 56),
            (0_u64..1 << 47).prop_map(|low| low | 0xffff_8000_0000_0000),
        ],
        five in any::<bool>(),
        user in any::<bool>(),
        no_execute in any::<bool>(),
    ) {
        let levels = if five { 5 } else { 4 };
        // Each table is where the entry before says, unless that was made to say something else.
        let linked: Vec<u64> = entries[..levels]
            .iter()
            .enumerate()
            .map(|(depth, entry)| {
                let level = levels - depth;
                // A large page begins at a multiple of its size; half of them do not.
                let large = entry & 0x80 != 0 && (2..=3).contains(&level) && linear & 1 == 0;
                entry | (depth as u64 + 2) << if large { 30 } else { 12 }
            })
            .collect();
        let mut tables = tables(linear, &linked);
        // An entry with further address bits leads to a copy, so that the walk goes on.
        for depth in 1..levels {
            let shift = 12 + 9 * (levels - depth - 1);
            let table = linked[depth - 1] & 0x000f_ffff_ffff_f000;
            tables.0.insert(table + 8 * (linear >> shift & 511), linked[depth]);
        }
        let system = SystemRegisters {
            cr4: cr4::PAE | if five { cr4::LA57 } else { 0 },
            efer: efer::LMA | if no_execute { efer::NXE } else { 0 },
            cpl: if user { 3 } else { 0 },
            ..SYSTEM
        };
        let walked = TableWalk::new(&system, BITS).translate(&tables, linear);
        let page = |allowed: fn(&Translation) -> bool| walked.ok().filter(allowed).map(|one| one.page);
        prop_assert_eq!(page(|_| true), by_the_book(&tables, &system, linear, false, false));
        prop_assert_eq!(page(|one| one.write.is_ok()), by_the_book(&tables, &system, linear, true, false));
        prop_assert_eq!(page(|one| one.fetch.is_ok()), by_the_book(&tables, &system, linear, false, true));
    }
}

#[test]
fn without_paging_addresses_are_physical() {
    let flat = SystemRegisters {
        cr0: cr0::PE,
        cr4: 0,
        efer: 0,
        code_long: false,
        code_default_big: true,
        flat: true,
        ..SYSTEM
    };
    let walk = |linear| TableWalk::new(&flat, BITS).translate(&tables(0, &[]), linear);
    let page = |page| Translation { page, write: Ok(()), fetch: Ok(()) };
    assert_eq!(walk(0xf_ffff), Ok(page(0xf_f000)));
    assert_eq!(walk(0xffff_ffff), Ok(page(0xffff_f000)));
    assert_eq!(walk(0x1_0000_0000), Err(TranslationFault::NotCanonical));
}

#[test]
fn each_refusal_by_its_name() {
    use TranslationFault as F;
    let linear = 0x0000_1234_5678_9abc;
    let walk = |system: &SystemRegisters, changed: usize, change: u64| {
        let mut entries = [GOOD | 0x2000, GOOD | 0x3000, GOOD | 0x4000, GOOD | 0x7000];
        entries[changed] ^= change;
        TableWalk::new(system, BITS).translate(&tables(linear, &entries), linear)
    };
    let good = walk(&SYSTEM, 0, 0).unwrap();
    assert_eq!(good, Translation { page: 0x7000, write: Ok(()), fetch: Ok(()) });
    for level in 0..4 {
        assert_eq!(walk(&SYSTEM, level, 1), Err(F::NotPresent));
        assert_eq!(walk(&SYSTEM, level, 1 << 5), Err(F::NotAccessed));
        assert_eq!(walk(&SYSTEM, level, 1 << 45), Err(F::Reserved));
        assert_eq!(walk(&SYSTEM, level, 1 << 1).unwrap().write, Err(F::ReadOnly));
        assert_eq!(walk(&SYSTEM, level, 1 << 63).unwrap().fetch, Err(F::NoExecute));
        let without = SystemRegisters { efer: efer::LMA, ..SYSTEM };
        assert_eq!(walk(&without, level, 1 << 63), Err(F::Reserved));
    }
    assert_eq!(walk(&SYSTEM, 3, 1 << 6).unwrap().write, Err(F::NotDirty));
    assert_eq!(walk(&SYSTEM, 0, 1 << 7), Err(F::Reserved), "no page of 512 GiB");
    assert_eq!(walk(&SYSTEM, 0, 0x2000 | 1 << 7), Err(F::Reserved), "not even at 0");
    assert_eq!(walk(&SYSTEM, 1, 0x1000), Err(F::Table));
    let user = SystemRegisters { cpl: 3, ..SYSTEM };
    assert_eq!(walk(&user, 0, 0), Err(F::SupervisorPage));
    let all_user = [GOOD | 0x2004, GOOD | 0x3004, GOOD | 0x4004, GOOD | 0x7004];
    let tables = tables(linear, &all_user);
    assert_eq!(TableWalk::new(&SYSTEM, BITS).translate(&tables, linear), Err(F::UserPage));
    assert_eq!(TableWalk::new(&user, BITS).translate(&tables, linear).unwrap().page, 0x7000);
    assert_eq!(TableWalk::new(&user, BITS).translate(&tables, 1 << 47), Err(F::NotCanonical));
}

/// Guest memory from 0: a root at 0x1000, then one table per level; 2 MiB at 0 by the first entry of each.
struct Guest {
    memory: Vec<u64>,
    slots: MemorySlots,
    cache: TranslationCache,
}

const PAGES: u64 = 16;

impl Guest {
    fn new() -> Self {
        let words = usize::try_from((PAGES + 1) * 512).unwrap();
        let mut memory = vec![0_u64; words];
        let host = memory.as_mut_ptr().expose_provenance().next_multiple_of(4096);
        let mut slots = MemorySlots::default();
        let slot =
            MemorySlot { number: 0, address: 0, size: PAGES * 4096, host, read_only: false, logged: false };
        // SAFETY: `memory` is never resized and lives beside the slots.
        unsafe { slots.set(slot).unwrap() };
        let mut guest = Self { memory, slots, cache: TranslationCache::new() };
        for (at, entry) in [(0x1000, 0x2000 | GOOD), (0x2000, 0x3000 | GOOD), (0x3000, 0x4000 | GOOD)] {
            guest.put(at, entry);
        }
        // A page to itself, up to the last; then pages of no slot.
        for page in 0..PAGES + 2 {
            guest.put(0x4000 + 8 * page, page << 12 | GOOD);
        }
        guest
    }

    fn put(&mut self, address: u64, value: u64) {
        // Through the slots as a guest's store, with an identity map of its own.
        let host = self.slots.find(address).unwrap().host + usize::try_from(address).unwrap();
        let place: *mut u64 = std::ptr::with_exposed_provenance_mut(host);
        // SAFETY: inside `memory`, which nobody borrows.
        unsafe { place.write_unaligned(value) };
        assert!(!self.memory.is_empty());
    }

    fn change(&mut self, change: impl FnOnce(&mut MemorySlot)) {
        let mut slot = *self.slots.find(0).unwrap();
        change(&mut slot);
        // SAFETY: the same memory as before.
        unsafe { self.slots.set(slot).unwrap() };
    }

    fn space(&mut self) -> GuestSpace<'_> {
        GuestSpace::new(&self.slots, &SYSTEM, BITS, &mut self.cache)
    }
}

const TRANSLATION: fn(TranslationFault) -> Denied = |fault| Denied::Stop(StopReason::Translation(fault));

#[test]
fn operands_cross_pages() {
    let mut guest = Guest::new();
    // The page after 0x8000 is elsewhere.
    guest.put(0x4000 + 8 * 9, 0xb000 | GOOD);
    let mut space = guest.space();
    space.store(0x8ffd, OperandSize::Qword, 0x1122_3344_5566_7788).unwrap();
    assert_eq!(space.load(0x8ffd, OperandSize::Qword), Ok(0x1122_3344_5566_7788));
    assert_eq!(space.load(0xb000, OperandSize::Dword), Ok(0x2233_4455), "the second part, by its own page");
    assert_eq!(space.load(0xb004, OperandSize::Byte), Ok(0x11));
    assert_eq!(
        space.compare_exchange(0x8ffd, OperandSize::Qword, 0, 0),
        Err(Denied::Stop(StopReason::Atomic))
    );
    assert_eq!(space.compare_exchange(0xb000, OperandSize::Dword, 0x2233_4455, 7), Ok(0x2233_4455));
    assert_eq!(space.load(0x9000, OperandSize::Dword), Ok(7));
    assert_eq!(space.compare_exchange_wide(0xb008, 0, 0), Err(Denied::Stop(StopReason::Exception)));
    assert_eq!(space.compare_exchange_wide(0xb010, 0, 1 << 64), Ok(0));
    assert_eq!(space.load(0xb018, OperandSize::Byte), Ok(1));
}

#[test]
fn a_store_that_cannot_be_finished_is_not_begun() {
    let mut guest = Guest::new();
    guest.put(0x4000 + 8 * 9, 0x9000 | GOOD & !2);
    let mut space = guest.space();
    let fault = TRANSLATION(TranslationFault::ReadOnly);
    assert_eq!(space.store(0x8ffd, OperandSize::Qword, u64::MAX), Err(fault));
    assert_eq!(space.load(0x8ff8, OperandSize::Qword), Ok(0));
    assert_eq!(space.check_store(0x9000, 4), Err(fault));
    assert_eq!(space.check_store(0x8ff0, 16), Ok(()));
    assert_eq!(space.check_store(0x8ff8, 16), Err(Denied::Stop(StopReason::Slot)));
}

#[test]
fn what_no_slot_has_is_a_device() {
    let mut guest = Guest::new();
    let end = PAGES << 12;
    let mut space = guest.space();
    assert_eq!(space.load(end + 4, OperandSize::Dword), Err(Denied::Device(end + 4)));
    assert_eq!(space.store(end + 4, OperandSize::Dword, 1), Err(Denied::Device(end + 4)));
    let partly = Err(Denied::Stop(StopReason::DeviceOperand));
    assert_eq!(space.load(end - 4, OperandSize::Qword), partly);
    assert_eq!(space.load(end + 0xffc, OperandSize::Qword), partly);
    assert_eq!(space.store(end - 4, OperandSize::Qword, 0).map(|()| 0), partly);
    assert_eq!(space.load(end + 0x2000, OperandSize::Byte), Err(TRANSLATION(TranslationFault::NotPresent)));
}

#[test]
fn slots_that_kvm_must_see_written() {
    let mut guest = Guest::new();
    guest.change(|slot| slot.logged = true);
    assert_eq!(guest.space().store(0x8000, OperandSize::Byte, 1), Err(Denied::Stop(StopReason::Slot)));
    assert_eq!(guest.space().load(0x8000, OperandSize::Byte), Ok(0));
    guest.change(|slot| (slot.logged, slot.read_only) = (false, true));
    assert_eq!(guest.space().store(0x8000, OperandSize::Byte, 1), Err(Denied::Device(0x8000)));
    assert_eq!(guest.space().load(0x8000, OperandSize::Byte), Ok(0));
    guest.change(|slot| slot.read_only = false);
    assert_eq!(guest.space().store(0x8000, OperandSize::Byte, 1), Ok(()));
}

#[test]
fn a_translation_lasts_one_run() {
    let mut guest = Guest::new();
    guest.put(0x8000, 8);
    guest.put(0xa000, 10);
    assert_eq!(guest.space().load(0x8000, OperandSize::Qword), Ok(8));
    let place = guest.slots.find(0x4000).unwrap().host + 0x4000 + 8 * 8;
    let mut space = guest.space();
    assert_eq!(space.load(0x8000, OperandSize::Qword), Ok(8));
    let entry: *mut u64 = std::ptr::with_exposed_provenance_mut(place);
    // SAFETY: inside the guest's memory; nobody borrows it.
    unsafe { entry.write_unaligned(0xa000 | GOOD) };
    assert_eq!(space.load(0x8000, OperandSize::Qword), Ok(8), "as a processor's, until it is flushed");
    assert_eq!(guest.space().load(0x8000, OperandSize::Qword), Ok(10));
    // Two pages that share a place in the cache.
    let mut space = guest.space();
    assert_eq!(space.load(0x8000, OperandSize::Qword), Ok(10));
    assert!(space.load(0x8000 + 64 * 4096, OperandSize::Qword).is_err());
    assert_eq!(space.load(0x8000, OperandSize::Qword), Ok(10));
}

#[test]
fn instructions_come_from_executable_pages() {
    let mut guest = Guest::new();
    guest.put(0x8ff8, u64::MAX);
    guest.put(0x9000, 0x0706_0504_0302_0100);
    let mut bytes = [0; 15];
    assert_eq!(guest.space().fetch(0x8ff0, &mut bytes), Ok(15));
    assert_eq!(bytes[7..], [0, 255, 255, 255, 255, 255, 255, 255]);
    assert_eq!(guest.space().fetch(0x8ffe, &mut bytes), Ok(15));
    assert_eq!(bytes[..6], [255, 255, 0, 1, 2, 3]);
    guest.put(0x4000 + 8 * 9, 0x9000 | GOOD | 1 << 63);
    assert_eq!(
        guest.space().fetch(0x8ffe, &mut bytes),
        Ok(2),
        "what is there; the decoder says if it suffices"
    );
    assert_eq!(guest.space().fetch(0x9000, &mut bytes), Err(TRANSLATION(TranslationFault::NoExecute)));
    guest.put(0x4000 + 8 * 9, 0);
    assert_eq!(guest.space().fetch(0x8ffe, &mut bytes), Ok(2));
}
