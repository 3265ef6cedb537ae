//! Random page tables of 32-bit modes: where the interpreter's walk leads, KVM's own leads too (KVM_TRANSLATE).

use std::os::raw::c_int;
use std::ptr;

use ioplane_vcpu::paging::{TableWalk, TranslationFault};
use ioplane_vcpu::{CachedSegment, MemorySlot, MemorySlots, SystemRegisters};
use kvm_bindings::{kvm_sregs, kvm_translation};

use super::{Guest, KVM_SET_SREGS, MEMORY, at, call, put};

const KVM_TRANSLATE: u64 = 0xc018_ae85;
const CASES: u64 = 4000;
const DIRECTORY: u64 = 0x5000;
const TABLE: u64 = 0x6000;
const POINTERS: u64 = 0x7000;
const LARGE: u64 = 0x80;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % bound
    }

    /// Present, writable, accessed and dirty, and now and then another bit.
    fn entry(&mut self, address: u64) -> u64 {
        let large = if self.below(2) == 0 { LARGE } else { 0 };
        let other = match self.below(4) {
            0 => 1 << self.below(64),
            1 => self.below(1 << 12) & !0x20,
            _ => 0,
        };
        (address | 0x63 | large) ^ other | 0x20
    }
}

/// The vCPU has these registers but for CR3, and has them again afterwards.
pub fn compare(
    vcpu: c_int,
    memory: *mut u8,
    guest: Guest,
    special: kvm_sregs,
    physical_bits: u32,
) -> Result<(), String> {
    let narrow = guest == Guest::Narrow;
    let cr3 = if narrow { DIRECTORY } else { POINTERS };
    (0..4).for_each(|number| put(memory, POINTERS + 8 * number, &(DIRECTORY | 1).to_le_bytes()));
    call(vcpu, KVM_SET_SREGS, at(&kvm_sregs { cr3, ..special }))?;
    let mut slots = MemorySlots::default();
    let host = memory.expose_provenance();
    let slot =
        MemorySlot { number: 0, address: 0, size: MEMORY as u64, host, read_only: false, logged: false };
    // SAFETY: the guest's memory, which stays mapped.
    unsafe { slots.set(slot).unwrap() };
    let system = SystemRegisters {
        cr0: special.cr0,
        cr3,
        cr4: special.cr4,
        efer: special.efer,
        cpl: 0,
        code_long: false,
        code_default_big: true,
        flat: true,
        segments: [CachedSegment::UNUSABLE; 6],
        pdptes: [DIRECTORY | 1; 4],
    };
    assert_eq!(system.uses_pdptes(), !narrow);
    let mut random = Random(1);
    let (mut same, mut refused, mut careful) = (0, 0, 0);
    for case in 0..CASES {
        let linear = random.below(1 << 32);
        let target = random.below(MEMORY as u64) & !0xfff;
        let mut pde = random.entry(TABLE);
        if pde & LARGE != 0 && random.below(4) != 0 {
            let beyond = if narrow { 1 << 22 } else { 1 << 21 };
            pde = pde & !0xf000 | (beyond * random.below(8));
        }
        let pte = random.entry(target);
        if narrow {
            let short = |entry: u64| u32::try_from(entry & 0xffff_ffff).unwrap().to_le_bytes();
            put(memory, DIRECTORY + 4 * (linear >> 22), &short(pde));
            put(memory, TABLE + 4 * (linear >> 12 & 0x3ff), &short(pte));
        } else {
            put(memory, DIRECTORY + 8 * (linear >> 21 & 0x1ff), &pde.to_le_bytes());
            put(memory, TABLE + 8 * (linear >> 12 & 0x1ff), &pte.to_le_bytes());
        }
        let ours = TableWalk::new(&system, physical_bits).translate(&slots, linear);
        let mut theirs = kvm_translation { linear_address: linear, ..Default::default() };
        call(vcpu, KVM_TRANSLATE, ptr::from_mut(&mut theirs).expose_provenance())?;
        let what = format!("case {case}: {linear:x} by {pde:x} and {pte:x}: {ours:x?}, KVM has {theirs:x?}");
        match ours {
            Ok(page) => {
                assert_eq!(
                    (theirs.valid, theirs.physical_address),
                    (1, page.page | linear & 0xfff),
                    "{what}"
                );
                same += 1;
            }
            // PSE-36, and what KVM does not check with PAE.
            Err(TranslationFault::Reserved) if theirs.valid == 1 => {
                let allowed = if narrow {
                    pde & LARGE != 0 && pde & 0x1f_e000 != 0
                } else {
                    (pde | pte) & 0x7ff0_0000_0000_0000 != 0
                };
                assert!(allowed, "{what}");
                careful += 1;
            }
            Err(TranslationFault::NotPresent | TranslationFault::Reserved | TranslationFault::Table) => {
                assert_eq!(theirs.valid, 0, "{what}");
                refused += 1;
            }
            // KVM is asked for no particular access.
            Err(TranslationFault::UserPage) => careful += 1,
            Err(other) => panic!("{other:?}: {what}"),
        }
        // Nothing is left for another case to find.
        put(memory, DIRECTORY, &[0; 0x2000]);
    }
    println!(
        "{}: {same} translations are KVM's, {refused} are refused by both, {careful} here only",
        guest.name()
    );
    assert!(same > CASES / 3 && refused > CASES / 20, "{same} and {refused} of {CASES} prove nothing");
    call(vcpu, KVM_SET_SREGS, at(&special)).map(|_| ())
}
