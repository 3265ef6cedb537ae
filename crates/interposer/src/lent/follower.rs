//! Which pages are shown where: followed from the VMM's memory slots. Makes no call itself.

use std::ffi::c_int;

use kvm_bindings::{KVM_MEM_GUEST_MEMFD, KVM_MEM_READONLY, kvm_userspace_memory_region};

use crate::marker::PAGE;
use crate::shadow::other_space;
use crate::slots::SlotNumbers;

/// Marker pages that are followed at a time, in all VMs of the process.
const MOST: usize = 16;
/// Slots of a VM that pages may take.
const SLOTS: u32 = 64;
/// The highest numbers are those of shadow pages.
const RESERVED: u32 = 16;

/// Where the device behind a marker page is told of what has become of its pages.
pub(super) trait Link {
    /// Nothing of a loan is mapped any more.
    fn taken(&self, number: u64);
    /// The marker is gone, and nobody listens any more.
    fn end(&self);
}

/// Pages that follow each other, mapped here. Dropped, they are unmapped.
pub(super) trait Run {
    /// Which pages of the BAR: the first one, and how many.
    fn pages(&self) -> (u64, u64);
}

/// What the follower has done for it.
pub(super) trait Host {
    type Link: Link;
    type Run: Run;
    /// The link of the marker page that is mapped at an address of the VMM, and how many bytes of registers are in front of it. `id` is what the
    /// link is called from here on.
    fn find(&self, address: usize, id: u64) -> Option<(Self::Link, u64)>;
    /// How many slots a VM may have.
    fn slots(&self, vm: c_int) -> u32;
    /// Has KVM show pages at a guest-physical address. `false`: something else is there.
    fn show(&self, vm: c_int, slot: u32, address: u64, run: &Self::Run) -> bool;
    /// Takes such a slot away.
    fn hide(&self, vm: c_int, slot: u32, address: u64, run: &Self::Run);
}

/// Pages, and the slot by which they are shown.
#[derive(Debug)]
struct Shown<R> {
    run: R,
    slot: Option<u32>,
}

/// What a device has lent.
#[derive(Debug)]
struct Loan<R> {
    number: u64,
    runs: Vec<Shown<R>>,
}

/// A marker page in the guest, and the registers in front of it.
#[derive(Debug)]
struct Entry<L, R> {
    id: u64,
    vm: c_int,
    /// The VMM's slot.
    slot: u32,
    /// Where the marker is in the guest, and in the VMM.
    address: u64,
    host: u64,
    /// Bytes of registers in front of it.
    registers: u64,
    link: L,
    loan: Option<Loan<R>>,
}

impl<L: Link, R: Run> Entry<L, R> {
    /// The slots of ours.
    fn slots(&self) -> impl Iterator<Item = u32> {
        self.loan.iter().flat_map(|loan| &loan.runs).filter_map(|shown| shown.slot)
    }

    fn overlaps(&self, region: &kvm_userspace_memory_region) -> bool {
        let end = region.guest_phys_addr.saturating_add(region.memory_size);
        region.guest_phys_addr < self.address && self.address - self.registers < end
    }

    /// Whether a call takes its marker away or puts another thing there.
    fn is_replaced_by(&self, vm: c_int, region: &kvm_userspace_memory_region) -> bool {
        let same = (region.guest_phys_addr, region.userspace_addr, region.memory_size)
            == (self.address, self.host, PAGE);
        self.vm == vm && region.slot == self.slot && !same
    }

    /// Every access exits from here on.
    fn hide(&mut self, host: &impl Host<Link = L, Run = R>) {
        let (vm, first) = (self.vm, self.address - self.registers);
        for shown in self.loan.iter_mut().flat_map(|loan| &mut loan.runs) {
            if let Some(slot) = shown.slot.take() {
                host.hide(vm, slot, first + shown.run.pages().0 * PAGE, &shown.run);
            }
        }
    }

    /// Nothing of the device is mapped here any more, and it is told so.
    fn give_back(&mut self, host: &impl Host<Link = L, Run = R>) {
        self.hide(host);
        if let Some(Loan { number, runs }) = self.loan.take() {
            // Unmapped before it is said.
            drop(runs);
            self.link.taken(number);
        }
    }
}

/// All marker pages of a process.
#[derive(Debug)]
pub(super) struct Follower<L, R> {
    entries: Vec<Entry<L, R>>,
    numbers: SlotNumbers,
    /// The last link's.
    ids: u64,
}

impl<L: Link, R: Run> Follower<L, R> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), numbers: SlotNumbers::new(), ids: 0 }
    }

    /// How many marker pages there are.
    #[cfg(test)]
    pub(super) fn markers(&self) -> usize {
        self.entries.len()
    }

    /// Before the VMM's call: nothing of ours stands in its way, and nothing of a device is mapped whose marker goes.
    pub(super) fn before(
        &mut self,
        host: &impl Host<Link = L, Run = R>,
        vm: c_int,
        region: &kvm_userspace_memory_region,
    ) {
        if other_space(region) {
            return;
        }
        self.numbers.used(vm, region.slot);
        for entry in self.entries.iter_mut().filter(|entry| entry.vm == vm) {
            let number_taken = entry.slots().any(|slot| slot == region.slot);
            if number_taken || region.memory_size > 0 && entry.overlaps(region) {
                entry.hide(host);
            }
            if entry.is_replaced_by(vm, region) {
                entry.give_back(host);
                entry.link.end();
            }
        }
        self.entries.retain(|entry| !entry.is_replaced_by(vm, region));
    }

    /// After the VMM's call, if KVM has accepted it.
    pub(super) fn after(
        &mut self,
        host: &impl Host<Link = L, Run = R>,
        vm: c_int,
        region: &kvm_userspace_memory_region,
    ) {
        if other_space(region) {
            return;
        }
        // What stood in the way may have gone.
        for at in 0..self.entries.len() {
            if self.entries[at].vm == vm {
                self.show(host, at);
            }
        }
        let known = |entry: &Entry<L, R>| entry.vm == vm && entry.slot == region.slot;
        let plain = region.flags & (KVM_MEM_READONLY | KVM_MEM_GUEST_MEMFD) == 0;
        if region.memory_size != PAGE
            || !plain
            || self.entries.len() >= MOST
            || self.entries.iter().any(known)
        {
            return;
        }
        self.ids += 1;
        let id = self.ids;
        let found = usize::try_from(region.userspace_addr).ok().and_then(|address| host.find(address, id));
        let Some((link, registers)) = found else { return };
        if registers > region.guest_phys_addr {
            return link.end();
        }
        self.entries.push(Entry {
            id,
            vm,
            slot: region.slot,
            address: region.guest_phys_addr,
            host: region.userspace_addr,
            registers,
            link,
            loan: None,
        });
    }

    /// The device has lent pages, which are mapped. `false`: its marker has gone meanwhile, or they are not in front of it.
    pub(super) fn lend(
        &mut self,
        host: &impl Host<Link = L, Run = R>,
        id: u64,
        number: u64,
        runs: Vec<R>,
    ) -> bool {
        let Some(at) = self.entries.iter().position(|entry| entry.id == id) else { return false };
        let entry = &mut self.entries[at];
        let inside = |run: &R| run.pages().0 + run.pages().1 <= entry.registers / PAGE;
        if entry.loan.is_some() || !runs.iter().all(inside) {
            return false;
        }
        let runs = runs.into_iter().map(|run| Shown { run, slot: None }).collect();
        entry.loan = Some(Loan { number, runs });
        self.show(host, at);
        true
    }

    /// The device wants them back. What is not lent is not mapped either.
    pub(super) fn take(&mut self, host: &impl Host<Link = L, Run = R>, id: u64, number: u64) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.id == id) else { return };
        match &entry.loan {
            Some(loan) if loan.number == number => entry.give_back(host),
            _ => entry.link.taken(number),
        }
    }

    /// The device is gone.
    pub(super) fn lost(&mut self, host: &impl Host<Link = L, Run = R>, id: u64) {
        if let Some(at) = self.entries.iter().position(|entry| entry.id == id) {
            let mut entry = self.entries.swap_remove(at);
            entry.give_back(host);
            entry.link.end();
        }
    }

    /// Shows what is lent, if nothing is in the way: all of it, or nothing.
    fn show(&mut self, host: &impl Host<Link = L, Run = R>, at: usize) {
        let vm = self.entries[at].vm;
        let runs = self.entries[at].loan.as_ref().map_or(0, |loan| loan.runs.len());
        for run in 0..runs {
            let number = self.free_number(host, vm);
            let entry = &mut self.entries[at];
            let first = entry.address - entry.registers;
            let Some(shown) = entry.loan.as_mut().map(|loan| &mut loan.runs[run]) else { return };
            if shown.slot.is_some() {
                continue;
            }
            let address = first + shown.run.pages().0 * PAGE;
            shown.slot = number.filter(|number| host.show(vm, *number, address, &shown.run));
            if shown.slot.is_none() {
                return entry.hide(host);
            }
        }
    }

    /// A number that neither the VMM nor a shadow page uses.
    fn free_number(&self, host: &impl Host<Link = L, Run = R>, vm: c_int) -> Option<u32> {
        let taken = |number: &u32| {
            self.entries.iter().any(|entry| entry.vm == vm && entry.slots().any(|slot| slot == *number))
        };
        let end = host.slots(vm).saturating_sub(RESERVED);
        let first = self.numbers.above(vm).max(end.saturating_sub(SLOTS));
        (first..end).rev().find(|number| !taken(number))
    }

    /// A descriptor is another VM's now. Nothing of a device stays mapped for the old one.
    pub(super) fn forget(&mut self, vm: c_int) {
        while let Some(at) = self.entries.iter().position(|entry| entry.vm == vm) {
            let Entry { link, loan, .. } = self.entries.swap_remove(at);
            if let Some(Loan { number, runs }) = loan {
                drop(runs);
                link.taken(number);
            }
            link.end();
        }
        self.numbers.forget(vm);
    }

    /// Takes all away: nothing is followed any more.
    pub(super) fn end(&mut self, host: &impl Host<Link = L, Run = R>) {
        for entry in &mut self.entries {
            entry.give_back(host);
            entry.link.end();
        }
        self.entries.clear();
    }
}

#[cfg(test)]
#[path = "follower_tests.rs"]
mod tests;
