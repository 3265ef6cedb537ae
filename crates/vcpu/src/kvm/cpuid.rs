//! The two CPUID leaves that offer batches to a guest (docs/guide/batch.md), beside those that the VMM sets.

use kvm_bindings::kvm_cpuid_entry2;

use crate::batch::{DOORBELL, MOST_ENTRIES, SIGNATURE, VERSION};

/// What KVM takes (KVM_MAX_CPUID_ENTRIES).
const MOST_LEAVES: usize = 256;
/// Hypervisors announce themselves at multiples of 256 from 40000000h on. The first two are KVM's, Hyper-V's and Xen's.
const FIRST: u32 = 0x4000_0200;
const BEYOND: u32 = 0x4001_0000;
/// Leaf 1, ECX: there is a hypervisor. Guests look for its leaves only then.
const HYPERVISOR: u32 = 1 << 31;

/// `kvm_cpuid2` with room.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Cpuid {
    count: u32,
    padding: u32,
    leaves: [kvm_cpuid_entry2; MOST_LEAVES],
}

/// How a guest comes to know of batches.
#[derive(Debug)]
pub(super) enum BatchOffer {
    /// KVM is to be given these leaves.
    With(Box<Cpuid>),
    /// The VMM's own leaves say it: they were saved where this library had added them.
    Already,
    /// It does not: a guest that is not told of hypervisors, leaves that this library does not know, no room.
    None,
}

fn word(bytes: [u8; 12], at: usize) -> u32 {
    bytes.iter().skip(4 * at).take(4).rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn is_signature(leaf: &kvm_cpuid_entry2) -> bool {
    [leaf.ebx, leaf.ecx, leaf.edx] == [0, 1, 2].map(|at| word(SIGNATURE, at))
}

/// What the second leaf says.
fn terms(base: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: base + 1,
        eax: VERSION.into(),
        ebx: DOORBELL.into(),
        ecx: MOST_ENTRIES.into(),
        ..Default::default()
    }
}

/// The VMM's leaves and those of batches.
pub(super) fn offer(given: impl Iterator<Item = kvm_cpuid_entry2>) -> BatchOffer {
    let mut cpuid =
        Box::new(Cpuid { count: 0, padding: 0, leaves: [kvm_cpuid_entry2::default(); MOST_LEAVES] });
    let mut count = 0;
    for leaf in given {
        let Some(place) = cpuid.leaves.get_mut(count) else { return BatchOffer::None };
        *place = leaf;
        count += 1;
    }
    let (known, room) = cpuid.leaves.split_at_mut(count);
    let ranges = (FIRST..BEYOND).step_by(0x100);
    let hypervisors = known.iter().filter(|leaf| (0x4000_0000..BEYOND).contains(&leaf.function));
    if let Some(ours) = hypervisors.clone().find(|leaf| leaf.function & 0xff == 0 && is_signature(leaf)) {
        let wanted = terms(ours.function);
        return if known.contains(&wanted) { BatchOffer::Already } else { BatchOffer::None };
    }
    if !known.iter().any(|leaf| leaf.function == 1 && leaf.ecx & HYPERVISOR != 0) {
        return BatchOffer::None;
    }
    let free = |base: &u32| !hypervisors.clone().any(|leaf| leaf.function & !0xff == *base);
    let (Some(base), [first, second, ..]) = (ranges.into_iter().find(free), room) else {
        return BatchOffer::None;
    };
    *first = kvm_cpuid_entry2 {
        function: base,
        eax: base + 1,
        ebx: word(SIGNATURE, 0),
        ecx: word(SIGNATURE, 1),
        edx: word(SIGNATURE, 2),
        ..Default::default()
    };
    *second = terms(base);
    cpuid.count = u32::try_from(count + 2).unwrap_or(0);
    BatchOffer::With(cpuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ..Default::default() }
    }

    fn hypervisor() -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { ecx: HYPERVISOR, ..leaf(1) }
    }

    fn with(given: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
        match offer(given.iter().copied()) {
            BatchOffer::With(cpuid) => cpuid.leaves[..usize::try_from(cpuid.count).unwrap()].to_vec(),
            other => panic!("{other:?}"),
        }
    }

    fn nothing(given: &[kvm_cpuid_entry2]) -> bool {
        matches!(offer(given.iter().copied()), BatchOffer::None)
    }

    #[test]
    fn leaves_are_added_where_nobody_has_any() {
        let kvm = [hypervisor(), leaf(0x4000_0000), leaf(0x4000_0001), leaf(0x4000_0100), leaf(0x4000_0101)];
        let all = with(&kvm);
        assert_eq!(all[..5], kvm);
        let [first, second] = [all[5], all[6]];
        assert_eq!((first.function, first.eax), (0x4000_0200, 0x4000_0201));
        let name = [first.ebx, first.ecx, first.edx].map(u32::to_le_bytes).concat();
        assert_eq!(name, b"IOplaneBatch");
        assert_eq!(
            [second.function, second.eax, second.ebx, second.ecx, second.edx],
            [0x4000_0201, 1, 0xe60, 128, 0]
        );
        let taken = [hypervisor(), leaf(0x4000_0200), leaf(0x4000_0305)];
        assert_eq!(with(&taken)[3].function, 0x4000_0400, "each range has one owner");
    }

    #[test]
    fn a_guest_without_a_hypervisor_and_a_full_list_get_none() {
        assert!(nothing(&[leaf(1), leaf(0x4000_0000)]));
        assert!(nothing(&[]));
        let full = |count: usize| [vec![hypervisor()], vec![leaf(7); count - 1]].concat();
        assert!(nothing(&full(255)) && nothing(&full(256)));
        assert_eq!(with(&full(254)).len(), 256);
        let ranges: Vec<_> = (FIRST..BEYOND).step_by(0x100).map(leaf).collect();
        assert!(nothing(&[vec![hypervisor()], ranges].concat()), "as many hypervisors as there is room for");
    }

    /// As a VMM restores them that has saved what KVM_GET_CPUID2 says.
    #[test]
    fn leaves_that_are_there_are_not_added_again() {
        let mut saved = with(&[hypervisor()]);
        assert!(matches!(offer(saved.iter().copied()), BatchOffer::Already));
        saved[2].eax = 2;
        assert!(nothing(&saved), "of a version that is not known");
        saved.pop();
        assert!(nothing(&saved));
    }
}
