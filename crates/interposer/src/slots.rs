//! Numbers of KVM's memory slots. A number that the VMM uses would move its memory: ours are above all that it has used.

use std::ffi::c_int;

/// The highest number that each VMM has given a slot of its VM.
#[derive(Debug)]
pub(crate) struct SlotNumbers(Vec<(c_int, u32)>);

impl SlotNumbers {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// The VMM uses a number.
    pub(crate) fn used(&mut self, vm: c_int, slot: u32) {
        match self.0.iter_mut().find(|(known, _)| *known == vm) {
            Some((_, highest)) => *highest = slot.max(*highest),
            None => self.0.push((vm, slot)),
        }
    }

    /// The first one above those.
    pub(crate) fn above(&self, vm: c_int) -> u32 {
        let highest = self.0.iter().find(|(known, _)| *known == vm).map_or(0, |(_, highest)| *highest);
        highest.saturating_add(1)
    }

    /// The descriptor is another VM's now.
    pub(crate) fn forget(&mut self, vm: c_int) {
        self.0.retain(|(known, _)| *known != vm);
    }
}

/// A KVM of tests.
#[cfg(test)]
pub(crate) mod played {
    use std::cell::RefCell;

    use kvm_bindings::kvm_userspace_memory_region;

    /// The slots of a VM: number, address, bytes.
    #[derive(Debug, Default)]
    pub(crate) struct PlayedSlots(RefCell<Vec<(u32, u64, u64)>>);

    impl PlayedSlots {
        /// As KVM_SET_USER_MEMORY_REGION does it: a slot is put, moved, or removed with a size of 0. `false`: another one is there.
        pub(crate) fn put(&self, slot: u32, address: u64, size: u64) -> bool {
            let mut slots = self.0.borrow_mut();
            let before = slots.clone();
            slots.retain(|(number, _, _)| *number != slot);
            let free = slots.iter().all(|(_, at, len)| address + size <= *at || at + len <= address);
            if size > 0 && free {
                slots.push((slot, address, size));
            } else if size > 0 {
                *slots = before;
            }
            size == 0 || free
        }

        /// Those with a higher number than this.
        pub(crate) fn above(&self, number: u32) -> Vec<(u32, u64, u64)> {
            self.0.borrow().iter().filter(|slot| slot.0 > number).copied().collect()
        }
    }

    pub(crate) fn region(slot: u32, address: u64, size: u64, host: u64) -> kvm_userspace_memory_region {
        kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: address,
            memory_size: size,
            userspace_addr: host,
        }
    }
}
