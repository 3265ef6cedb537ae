//! 32-bit paging and PAE paging, each against another walk that is written as the manual's tables are (Intel SDM volume 3, 4.3 and 4.4).

use ioplane_vcpu::paging::{TableWalk, Translation, TranslationFault as F};
use ioplane_vcpu::registers::{cr0, cr4, efer};
use ioplane_vcpu::{Denied, GuestSpace, LinearMemory, OperandSize, StopReason, SystemRegisters};
use proptest::prelude::*;

use crate::{BITS, GOOD, Guest, SYSTEM, Tables, entry};

/// Two levels of entries of 4 bytes, with pages of 4 MiB.
const NARROW: SystemRegisters = SystemRegisters {
    cr0: cr0::PE | cr0::PG | cr0::WP,
    cr4: cr4::PSE,
    efer: 0,
    code_long: false,
    code_default_big: true,
    flat: true,
    ..SYSTEM
};
/// Page directories at 0x2000 and 0x4000; of the others, one has no table and one a reserved bit.
const PAE: SystemRegisters =
    SystemRegisters { cr4: cr4::PAE, efer: efer::NXE, pdptes: [0x2001, 0, 0x4001, 0x2021], ..NARROW };
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

impl Tables {
    fn put_short(&mut self, address: u64, entry: u64) {
        let word = self.0.entry(address & !7).or_default();
        let shift = address % 8 * 8;
        *word = *word & !(0xffff_ffff << shift) | (entry & 0xffff_ffff) << shift;
    }

    fn short(&self, address: u64) -> Option<u64> {
        self.0.get(&(address & !7)).map(|word| word >> (address % 8 * 8) & 0xffff_ffff)
    }
}

fn bit(entry: u64, number: u32) -> bool {
    entry >> number & 1 == 1
}

/// What all entries, the last of which maps the page, allow.
fn allowed(entries: &[u64], system: &SystemRegisters, write: bool, fetch: bool, no_execute: bool) -> bool {
    let all = |number| entries.iter().all(|entry| bit(*entry, number));
    all(5)
        && all(2) == (system.cpl == 3)
        && (!write || all(1) && entries.last().is_some_and(|leaf| bit(*leaf, 6)))
        && !(fetch && no_execute && entries.iter().any(|entry| bit(*entry, 63)))
}

/// Tables 4-5 and 4-6, and 4-4 for pages of 4 MiB, without those beyond 4 GiB.
fn narrow_by_the_book(
    tables: &Tables,
    system: &SystemRegisters,
    linear: u64,
    write: bool,
    fetch: bool,
) -> Option<u64> {
    let linear = u64::from(u32::try_from(linear).ok()?);
    let directory = system.cr3 & 0xffff_f000;
    let pde = tables.short(directory | linear >> 22 << 2).filter(|pde| bit(*pde, 0))?;
    if bit(pde, 7) && system.cr4 & cr4::PSE != 0 {
        let page = pde & 0xffc0_0000 | linear & 0x003f_f000;
        return (pde >> 13 & 0x1ff == 0 && allowed(&[pde], system, write, fetch, false)).then_some(page);
    }
    let table = pde & 0xffff_f000;
    let pte = tables.short(table | (linear >> 12 & 0x3ff) << 2).filter(|pte| bit(*pte, 0))?;
    allowed(&[pde, pte], system, write, fetch, false).then_some(pte & 0xffff_f000)
}

/// Tables 4-8 to 4-11.
fn pae_by_the_book(
    tables: &Tables,
    system: &SystemRegisters,
    linear: u64,
    write: bool,
    fetch: bool,
) -> Option<u64> {
    let linear = u64::from(u32::try_from(linear).ok()?);
    let no_execute = system.efer & efer::NXE != 0;
    let pdpte = system.pdptes[usize::try_from(linear >> 30).unwrap()];
    if !bit(pdpte, 0) || pdpte & 0b1_1110_0110 != 0 || pdpte >> BITS != 0 {
        return None;
    }
    let present = |address: u64| {
        let entry = *tables.0.get(&address)?;
        let reserved = entry & !(1 << 63) >> BITS << BITS != 0 || bit(entry, 63) && !no_execute;
        (bit(entry, 0) && !reserved).then_some(entry)
    };
    let pde = present(pdpte & ADDRESS | (linear >> 21 & 0x1ff) << 3)?;
    if bit(pde, 7) {
        let page = pde & 0x000f_ffff_ffe0_0000 | linear & 0x001f_f000;
        return (pde >> 13 & 0xff == 0 && allowed(&[pde], system, write, fetch, no_execute)).then_some(page);
    }
    let pte = present(pde & ADDRESS | (linear >> 12 & 0x1ff) << 3)?;
    allowed(&[pde, pte], system, write, fetch, no_execute).then_some(pte & ADDRESS)
}

type Book = fn(&Tables, &SystemRegisters, u64, bool, bool) -> Option<u64>;

fn compare(tables: &Tables, system: &SystemRegisters, linear: u64, book: Book) -> Result<(), TestCaseError> {
    let walked = TableWalk::new(system, BITS).translate(tables, linear);
    let page = |allowed: fn(&Translation) -> bool| walked.ok().filter(allowed).map(|one| one.page);
    prop_assert_eq!(page(|_| true), book(tables, system, linear, false, false));
    prop_assert_eq!(page(|one| one.write.is_ok()), book(tables, system, linear, true, false));
    prop_assert_eq!(page(|one| one.fetch.is_ok()), book(tables, system, linear, false, true));
    Ok(())
}

fn linear() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => any::<u32>().prop_map(u64::from),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn narrow_tables_as_the_manual_has_them(
        entries in proptest::collection::vec(entry(), 2),
        linear in linear(),
        large in any::<bool>(),
        aligned in any::<bool>(),
        user in any::<bool>(),
        ignored in (0_u64..1 << 32, any::<bool>()),
    ) {
        let system = SystemRegisters {
            // What legacy modes do not have of CR3.
            cr3: 0x1018 | ignored.0 << 32,
            cr4: if large { cr4::PSE } else { 0 },
            // Without PAE it says nothing.
            efer: if ignored.1 { efer::NXE } else { 0 },
            cpl: if user { 3 } else { 0 },
            ..NARROW
        };
        let pde = entries[0] | if entries[0] & 0x80 != 0 && aligned { 3 << 22 } else { 0x2000 };
        let pte = entries[1] | 0x7000;
        let mut tables = Tables::default();
        tables.put_short(0x1000 | (linear & 0xffff_ffff) >> 22 << 2, pde);
        tables.put_short(pde & 0xffff_f000 | (linear >> 12 & 0x3ff) << 2, pte);
        compare(&tables, &system, linear, narrow_by_the_book)?;
    }

    #[test]
    fn pae_tables_as_the_manual_has_them(
        entries in proptest::collection::vec(entry(), 2),
        pdpte in prop_oneof![
            8 => Just(0_u64),
            1 => (0_u32..64).prop_map(|bit| 1 << bit),
            1 => 0_u64..1 << 12,
        ],
        linear in linear(),
        aligned in any::<bool>(),
        user in any::<bool>(),
        no_execute in any::<bool>(),
        large in any::<bool>(),
    ) {
        let pdpte = pdpte ^ 0x2001;
        let mut pdptes = [0, 0x3021, 0x9001, 0];
        pdptes[usize::try_from(linear >> 30 & 3).unwrap()] = pdpte;
        let system = SystemRegisters {
            // With PAE it says nothing.
            cr4: cr4::PAE | if large { cr4::PSE } else { 0 },
            efer: if no_execute { efer::NXE } else { 0 },
            cpl: if user { 3 } else { 0 },
            pdptes,
            ..PAE
        };
        let pde = entries[0] | if entries[0] & 0x80 != 0 && aligned { 6 << 21 } else { 0x5000 };
        let pte = entries[1] | 0x7000;
        let mut tables = Tables::default();
        tables.0.insert(pdpte & ADDRESS | (linear >> 21 & 0x1ff) << 3, pde);
        tables.0.insert(pde & ADDRESS | (linear >> 12 & 0x1ff) << 3, pte);
        compare(&tables, &system, linear, pae_by_the_book)?;
    }
}

const LINEAR: u64 = 0x8765_4321;

/// For [`LINEAR`]: a directory at 0x1000 that says 0x3000, whose table says 0x7000.
fn narrow(pde: u64, pte: u64) -> Tables {
    let mut tables = Tables::default();
    tables.put_short(0x1000 + 4 * (LINEAR >> 22), GOOD ^ 0x3000 ^ pde);
    tables.put_short(0x3000 + 4 * (LINEAR >> 12 & 0x3ff), GOOD ^ 0x7000 ^ pte);
    tables
}

/// The same below the third PDPTE.
fn pae(pde: u64, pte: u64) -> Tables {
    let mut tables = Tables::default();
    tables.0.insert(0x4000 + 8 * (LINEAR >> 21 & 0x1ff), GOOD ^ 0x3000 ^ pde);
    tables.0.insert(0x3000 + 8 * (LINEAR >> 12 & 0x1ff), GOOD ^ 0x7000 ^ pte);
    tables
}

/// What both formats have in common, by its name.
#[test]
fn rights_of_two_levels() {
    for (system, tables) in [(NARROW, narrow as fn(u64, u64) -> Tables), (PAE, pae)] {
        let walk = |system: &SystemRegisters, pde, pte| {
            TableWalk::new(system, BITS).translate(&tables(pde, pte), LINEAR)
        };
        assert_eq!(walk(&system, 0, 0), Ok(Translation { page: 0x7000, write: Ok(()), fetch: Ok(()) }));
        let user = SystemRegisters { cpl: 3, ..system };
        for (pde, pte) in [(1, 0), (0, 1)] {
            let on = |number: u32| (pde << number, pte << number);
            let with = |number| walk(&system, on(number).0, on(number).1);
            assert_eq!(with(0), Err(F::NotPresent));
            assert_eq!(with(5), Err(F::NotAccessed));
            assert_eq!(with(1).unwrap().write, Err(F::ReadOnly));
            // PWT, PCD, G, and what is software's.
            for number in [3, 4, 8, 9, 10, 11] {
                assert!(with(number).is_ok(), "bit {number}");
            }
            assert_eq!(with(2).unwrap().page, 0x7000, "one level says supervisor");
            assert_eq!(walk(&user, on(2).0, on(2).1), Err(F::SupervisorPage));
        }
        assert_eq!(walk(&system, 4, 4), Err(F::UserPage));
        assert_eq!(walk(&user, 4, 4).unwrap().page, 0x7000);
        assert_eq!(walk(&system, 0, 1 << 6).unwrap().write, Err(F::NotDirty));
        assert!(walk(&system, 1 << 6, 0).unwrap().write.is_ok(), "what points to a table has no dirty bit");
        assert!(walk(&system, 0, 1 << 7).is_ok(), "PAT");
        assert_eq!(walk(&system, 0x1000, 0), Err(F::Table));
        let beyond = TableWalk::new(&system, BITS).translate(&tables(0, 0), LINEAR | 1 << 32);
        assert_eq!(beyond, Err(F::NotCanonical));
    }
}

#[test]
fn pages_of_4_mib() {
    const LARGE: u64 = 0x80;
    let walk = |system: &SystemRegisters, pde: u64| {
        let tables = narrow(pde ^ 0x3000 ^ LARGE, 0);
        TableWalk::new(system, BITS).translate(&tables, LINEAR)
    };
    let at = |page| Ok(Translation { page, write: Ok(()), fetch: Ok(()) });
    assert_eq!(walk(&NARROW, 0x0a40_0000), at(0x0a65_4000));
    assert_eq!(walk(&NARROW, 0xffc0_0000), at(0xffc0_0000 | LINEAR & 0x003f_f000));
    assert_eq!(walk(&NARROW, 0x1000), at(LINEAR & 0x003f_f000), "PAT");
    // What is beyond 4 GiB with PSE-36, and the bit that is reserved with it.
    for number in 13..22 {
        assert_eq!(walk(&NARROW, 1 << number), Err(F::Reserved), "bit {number}");
    }
    assert_eq!(walk(&NARROW, 1 << 6).unwrap().write, Err(F::NotDirty));
    // Without CR4.PSE the bit is ignored.
    let small = SystemRegisters { cr4: 0, ..NARROW };
    let tables = narrow(LARGE, 0);
    assert_eq!(TableWalk::new(&small, BITS).translate(&tables, LINEAR), at(0x7000));
}

/// Address bits are 32, whatever the processor has: no entry has a bit that would be beyond.
#[test]
fn narrow_entries_have_no_reserved_address_bits() {
    let tables = narrow(0, 0xffff_0000);
    assert_eq!(TableWalk::new(&NARROW, 20).translate(&tables, LINEAR).unwrap().page, 0xffff_7000);
}

#[test]
fn pages_of_2_mib_and_reserved_bits_of_pae() {
    let walk = |system: &SystemRegisters, pde: u64, pte: u64| {
        TableWalk::new(system, BITS).translate(&pae(pde, pte), LINEAR)
    };
    let at = |page| Ok(Translation { page, write: Ok(()), fetch: Ok(()) });
    let large = |pde: u64| walk(&PAE, pde ^ 0x3080, 0);
    assert_eq!(large(0x12_3460_0000), at(0x12_3460_0000 | LINEAR & 0x001f_f000));
    assert_eq!(large(0x1000), at(LINEAR & 0x001f_f000), "PAT");
    for number in 13..21 {
        assert_eq!(large(1 << number), Err(F::Reserved), "bit {number}");
    }
    for number in 40..63 {
        assert_eq!(large(1 << number), Err(F::Reserved), "bit {number}");
        assert_eq!(walk(&PAE, 1 << number, 0), Err(F::Reserved), "bit {number}");
        assert_eq!(walk(&PAE, 0, 1 << number), Err(F::Reserved), "bit {number}");
    }
    let without = SystemRegisters { efer: 0, ..PAE };
    for (pde, pte) in [(1 << 63, 0), (0, 1 << 63), (1 << 63 ^ 0x3080, 0)] {
        assert_eq!(walk(&PAE, pde, pte).unwrap().fetch, Err(F::NoExecute));
        assert_eq!(walk(&PAE, pde, pte).unwrap().write, Ok(()));
        assert_eq!(walk(&without, pde, pte), Err(F::Reserved));
    }
}

#[test]
fn pdptes_are_the_processors() {
    let walk = |pdpte: u64, linear: u64| {
        let mut system = PAE;
        system.pdptes[2] = pdpte;
        // What CR3 says does not count.
        TableWalk::new(&SystemRegisters { cr3: u64::MAX >> 3, ..system }, BITS).translate(&pae(0, 0), linear)
    };
    assert_eq!(walk(0x4001, LINEAR).unwrap().page, 0x7000);
    assert_eq!(walk(0x4000, LINEAR), Err(F::NotPresent));
    // PWT, PCD, and what is ignored.
    assert_eq!(walk(0x4e19, LINEAR).unwrap().page, 0x7000);
    for number in [1, 2, 5, 6, 7, 8].into_iter().chain(40..64) {
        assert_eq!(walk(0x4001 | 1 << number, LINEAR), Err(F::Reserved), "bit {number}");
    }
    assert_eq!(walk(0x4001, LINEAR & 0x3fff_ffff), Err(F::Table), "the first, which is empty");
    assert_eq!(walk(0x4001, 0x4000_0000), Err(F::NotPresent), "the second");
    assert_eq!(walk(0x4001, 0xffff_ffff), Err(F::Reserved), "the fourth");
}

/// Through slots, as a 32-bit system has it: the last page of 4 GiB has no next one.
#[test]
fn operands_of_32_bit_paging() {
    let mut guest = Guest::new();
    // A directory at 0x5000 and a table at 0x6000, for the first page and the last.
    guest.put(0x5000, 0x6000 | GOOD);
    guest.put(0x5ff8, (0x6000 | GOOD) << 32);
    guest.put(0x6000, 0x8000 | GOOD | (0xa000 | GOOD) << 32);
    guest.put(0x6ff8, (0x9000 | GOOD) << 32);
    let system = SystemRegisters { cr3: 0x5000, ..NARROW };
    let mut space = GuestSpace::new(&guest.slots, &system, BITS, &mut guest.cache);
    space.store(0xffe, OperandSize::Dword, 0x4433_2211).unwrap();
    assert_eq!(space.load(0xffe, OperandSize::Dword), Ok(0x4433_2211));
    space.store(0xffff_fffc, OperandSize::Dword, 0x8877_6655).unwrap();
    let around = Err(Denied::Stop(StopReason::Translation(F::NotCanonical)));
    assert_eq!(space.load(0xffff_fffe, OperandSize::Dword), around);
    assert_eq!(space.store(0xffff_fffe, OperandSize::Dword, 0).map(|()| 0), around);
    let mut bytes = [0; 15];
    assert_eq!(space.fetch(0xffff_fffc, &mut bytes), Ok(4));
    assert_eq!(bytes[..4], [0x55, 0x66, 0x77, 0x88]);
    let mut flat = GuestSpace::new(&guest.slots, &SYSTEM, BITS, &mut guest.cache);
    assert_eq!(flat.load(0x8ffe, OperandSize::Word), Ok(0x2211));
    assert_eq!(flat.load(0xa000, OperandSize::Word), Ok(0x4433));
    assert_eq!(flat.load(0x9ffc, OperandSize::Dword), Ok(0x8877_6655), "nothing of the refused store");
}
