//! Which registers are shown where: followed from the VMM's memory slots. Makes no call itself.

use std::ffi::c_int;

use kvm_bindings::{KVM_MEM_GUEST_MEMFD, KVM_MEM_READONLY, kvm_userspace_memory_region};

pub(super) use crate::marker::PAGE;
use crate::slots::SlotNumbers;

/// Marker pages that are followed at a time, in all VMs of the process.
const MOST: usize = 16;
/// Requests in a row that come to nothing before an entry rests until the VMM changes its slots.
const TRIES: u32 = 8;

/// The register file behind a marker page, mapped here.
pub(super) trait Registers {
    /// Asks for them by a number that was never used before; 0: they are not wanted any more.
    fn want(&self, request: u64);
    /// The number of the last request that was granted.
    fn granted(&self) -> u64;
}

/// What the follower has done for it.
pub(super) trait Host {
    type Registers: Registers;
    /// The register file whose marker page is mapped at an address of the VMM.
    fn find(&self, address: usize) -> Option<Self::Registers>;
    /// How many slots a VM may have.
    fn slots(&self, vm: c_int) -> u32;
    /// Has KVM show registers at a guest-physical address, for reading only.
    fn show(&self, vm: c_int, slot: u32, address: u64, registers: &Self::Registers) -> bool;
    /// Takes such a slot away.
    fn hide(&self, vm: c_int, slot: u32);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A read of the registers that exits asks for them.
    Waits,
    /// Asked by this number. The vCPU that read comes back when the device has answered it.
    Asked(u64),
    /// Shown, by the slot of this number.
    Shown(u32),
    /// Could not be shown. Tried again when the VMM has changed its slots.
    Rests,
}

/// A marker page in the guest, and the registers in front of it.
#[derive(Debug)]
struct Entry<R> {
    vm: c_int,
    /// The VMM's slot.
    slot: u32,
    /// Where the marker is in the guest, and in the VMM.
    address: u64,
    host: u64,
    registers: R,
    state: State,
    tries: u32,
}

impl<R: Registers> Entry<R> {
    /// Where the registers are in the guest.
    fn registers_at(&self) -> u64 {
        self.address - PAGE
    }

    fn covers(&self, vm: c_int, address: u64) -> bool {
        self.vm == vm && (self.registers_at()..self.address).contains(&address)
    }

    fn overlaps(&self, region: &kvm_userspace_memory_region) -> bool {
        let end = region.guest_phys_addr.saturating_add(region.memory_size);
        region.guest_phys_addr < self.address && self.registers_at() < end
    }

    /// Whether a call takes its marker away or puts another thing there.
    fn is_replaced_by(&self, vm: c_int, region: &kvm_userspace_memory_region) -> bool {
        let same = (region.guest_phys_addr, region.userspace_addr, region.memory_size)
            == (self.address, self.host, PAGE);
        self.vm == vm && region.slot == self.slot && !same
    }

    /// Every read exits from here on.
    fn hide(&mut self, host: &impl Host<Registers = R>) {
        if let State::Shown(slot) = self.state {
            host.hide(self.vm, slot);
        }
        self.registers.want(0);
        self.state = State::Waits;
    }
}

/// All marker pages of a process.
#[derive(Debug)]
pub(super) struct Follower<R> {
    entries: Vec<Entry<R>>,
    numbers: SlotNumbers,
    /// The number of the last request.
    requests: u64,
}

impl<R: Registers> Follower<R> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), numbers: SlotNumbers::new(), requests: 0 }
    }

    /// How many would be asked for if the guest read them.
    pub(super) fn waiting(&self) -> usize {
        let waits = |entry: &&Entry<R>| matches!(entry.state, State::Waits | State::Asked(_));
        self.entries.iter().filter(waits).count()
    }

    /// Before the VMM's call: nothing of ours stands in its way.
    pub(super) fn before(
        &mut self,
        host: &impl Host<Registers = R>,
        vm: c_int,
        region: &kvm_userspace_memory_region,
    ) {
        if other_space(region) {
            return;
        }
        self.numbers.used(vm, region.slot);
        for entry in self.entries.iter_mut().filter(|entry| entry.vm == vm) {
            let number_taken = entry.state == State::Shown(region.slot);
            let in_the_way = region.memory_size > 0 && entry.overlaps(region);
            if number_taken || in_the_way || entry.is_replaced_by(vm, region) {
                entry.hide(host);
            }
            if number_taken {
                entry.state = State::Rests;
            }
        }
    }

    /// After the VMM's call, if KVM has accepted it.
    pub(super) fn after(
        &mut self,
        host: &impl Host<Registers = R>,
        vm: c_int,
        region: &kvm_userspace_memory_region,
    ) {
        if other_space(region) {
            return;
        }
        self.entries.retain(|entry| !entry.is_replaced_by(vm, region));
        for entry in self.entries.iter_mut().filter(|entry| entry.vm == vm && entry.state == State::Rests) {
            (entry.state, entry.tries) = (State::Waits, 0);
        }
        let known = |entry: &Entry<R>| entry.vm == vm && entry.slot == region.slot;
        let plain = region.flags & (KVM_MEM_READONLY | KVM_MEM_GUEST_MEMFD) == 0;
        if region.memory_size != PAGE
            || region.guest_phys_addr < PAGE
            || !plain
            || self.entries.len() >= MOST
            || self.entries.iter().any(known)
        {
            return;
        }
        let found = usize::try_from(region.userspace_addr).ok().and_then(|address| host.find(address));
        if let Some(registers) = found {
            self.entries.push(Entry {
                vm,
                slot: region.slot,
                address: region.guest_phys_addr,
                host: region.userspace_addr,
                registers,
                state: State::Waits,
                tries: 0,
            });
        }
    }

    /// A read of the guest has exited. If it is of registers that can be shown they are asked for: the number of the request.
    pub(super) fn read_exits(&mut self, vm: c_int, address: u64) -> Option<u64> {
        let asks = |entry: &&mut Entry<R>| {
            entry.covers(vm, address) && matches!(entry.state, State::Waits | State::Asked(_))
        };
        let entry = self.entries.iter_mut().find(asks)?;
        self.requests += 1;
        entry.registers.want(self.requests);
        entry.state = State::Asked(self.requests);
        Some(self.requests)
    }

    /// The VMM has answered that read. If the device has granted the request in the meantime, the read was one of its registers, and they are
    /// shown.
    pub(super) fn read_answered(&mut self, host: &impl Host<Registers = R>, request: u64) {
        let Some(at) = self.entries.iter().position(|entry| entry.state == State::Asked(request)) else {
            return;
        };
        let number = self.free_number(host, self.entries[at].vm);
        let entry = &mut self.entries[at];
        let shown = number.filter(|number| {
            entry.registers.granted() == request
                && host.show(entry.vm, *number, entry.registers_at(), &entry.registers)
        });
        if let Some(number) = shown {
            (entry.state, entry.tries) = (State::Shown(number), 0);
            return;
        }
        entry.registers.want(0);
        entry.tries += 1;
        entry.state = if entry.tries < TRIES { State::Waits } else { State::Rests };
    }

    /// A number that the VMM does not use: it takes the lowest, we take the highest.
    fn free_number(&self, host: &impl Host<Registers = R>, vm: c_int) -> Option<u32> {
        let taken =
            |number| self.entries.iter().any(|entry| entry.vm == vm && entry.state == State::Shown(number));
        (self.numbers.above(vm)..host.slots(vm)).rev().take(MOST).find(|number| !taken(*number))
    }

    /// A descriptor is another VM's now. What is mapped for the old one stays, since a vCPU may keep it alive.
    pub(super) fn forget(&mut self, vm: c_int) {
        while let Some(at) = self.entries.iter().position(|entry| entry.vm == vm) {
            std::mem::forget(self.entries.swap_remove(at).registers);
        }
        self.numbers.forget(vm);
    }

    /// Takes all away: nothing is followed any more.
    pub(super) fn end(&mut self, host: &impl Host<Registers = R>) {
        for entry in &mut self.entries {
            entry.hide(host);
        }
        self.entries.clear();
    }
}

/// The other address space is that of system management mode, where every read exits.
pub(crate) fn other_space(region: &kvm_userspace_memory_region) -> bool {
    region.slot >> 16 != 0
}

#[cfg(test)]
#[path = "follower_tests.rs"]
mod tests;
