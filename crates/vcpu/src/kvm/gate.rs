//! A VM's state, read by vCPUs while they interpret and changed by the VMM's calls.
//!
//! KVM promises that when a call that removes memory has returned, no vCPU uses it. So a change waits until no vCPU
//! interprets, and a vCPU that finds a change under way does not interpret: it calls KVM. Nobody holds anything while the
//! guest is entered.
#![allow(unsafe_code)]
// UNSAFETY: hands out references to a cell; who may have one is counted.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::vm::VmState;

/// Set while a change waits or is made. The bits below count vCPUs that read.
const CHANGE: u32 = 1 << 31;

/// The state of one VM, for all of its threads.
#[derive(Debug, Default)]
pub struct SharedVm {
    gate: AtomicU32,
    /// The interposer has failed once: nothing is interpreted any more.
    failed: AtomicBool,
    /// Interrupts that the VMM has raised; it may wrap.
    interrupts: AtomicU32,
    state: UnsafeCell<VmState>,
}

// SAFETY: `VmRead` and `VmChange` exclude each other by `gate`, and so do two of the latter.
unsafe impl Sync for SharedVm {}

/// The state, for one run of one vCPU.
#[derive(Debug)]
pub struct VmRead<'a>(&'a SharedVm);

/// The state, to be changed.
#[derive(Debug)]
pub struct VmChange<'a>(&'a SharedVm);

impl SharedVm {
    /// The state, unless it is being changed. Does not wait.
    pub fn read(&self) -> Option<VmRead<'_>> {
        let before = self.gate.fetch_add(1, Ordering::Acquire);
        let read = VmRead(self);
        // Dropping it counts down again.
        (before & CHANGE == 0).then_some(read)
    }

    /// The interposer cannot be trusted any more: no cluster begins from now on.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether [`SharedVm::fail`] was called.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The VMM has raised an interrupt.
    pub fn interrupt_raised(&self) {
        self.interrupts.fetch_add(1, Ordering::Release);
    }

    /// How often [`SharedVm::interrupt_raised`] was called; it wraps.
    pub fn interrupts(&self) -> u32 {
        self.interrupts.load(Ordering::Acquire)
    }

    /// Whether a run should end because somebody waits to change the state.
    pub fn change_waits(&self) -> bool {
        self.gate.load(Ordering::Relaxed) & CHANGE != 0
    }

    /// Waits until no vCPU reads. A run ends within its limits, and sooner because of
    /// [`SharedVm::change_waits`]. Not to be called by a thread that reads.
    pub fn change(&self) -> VmChange<'_> {
        let mut turns = 0_u32;
        // First among those that change, then against those that read.
        while self.gate.fetch_or(CHANGE, Ordering::Acquire) & CHANGE != 0 {
            pause(&mut turns);
        }
        let change = VmChange(self);
        while self.gate.load(Ordering::Acquire) != CHANGE {
            pause(&mut turns);
        }
        change
    }
}

fn pause(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    if *turns < 1000 {
        std::hint::spin_loop();
    } else {
        // The reader has lost its processor: give it ours.
        std::thread::yield_now();
    }
}

impl Deref for VmRead<'_> {
    type Target = VmState;

    fn deref(&self) -> &VmState {
        // SAFETY: counted in `gate` while no change was under way, so none begins before this is dropped.
        unsafe { &*self.0.state.get() }
    }
}

impl Drop for VmRead<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_sub(1, Ordering::Release);
    }
}

impl Deref for VmChange<'_> {
    type Target = VmState;

    fn deref(&self) -> &VmState {
        // SAFETY: the only one, and nobody reads: `SharedVm::change`.
        unsafe { &*self.0.state.get() }
    }
}

impl DerefMut for VmChange<'_> {
    fn deref_mut(&mut self) -> &mut VmState {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.0.state.get() }
    }
}

impl Drop for VmChange<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!CHANGE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::kvm::InterruptController;

    #[test]
    fn a_change_waits_for_readers_and_keeps_others_out() {
        let vm = SharedVm::default();
        let first = vm.read().unwrap();
        let second = vm.read().unwrap();
        assert!(first.obstacle().is_some() && second.obstacle().is_some());
        let changed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let changer = scope.spawn(|| {
                let mut change = vm.change();
                change.interrupt_controller(InterruptController::Split);
                changed.store(true, Ordering::SeqCst);
            });
            while !vm.change_waits() {
                std::thread::yield_now();
            }
            assert!(vm.read().is_none());
            assert!(!changed.load(Ordering::SeqCst));
            drop(first);
            assert!(vm.read().is_none());
            assert!(!changed.load(Ordering::SeqCst));
            drop(second);
            changer.join().unwrap();
        });
        assert_eq!(vm.read().unwrap().obstacle(), None);
    }

    #[test]
    fn many_changes_and_readers_lose_nothing() {
        let vm = SharedVm::default();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        // Both are one change: nobody sees a VM with an odd number.
                        let mut change = vm.change();
                        change.vcpu_created();
                        change.vcpu_created();
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if let Some(read) = vm.read() {
                            assert_eq!(read.vcpus() % 2, 0);
                        }
                    }
                });
            }
        });
        assert_eq!(vm.read().unwrap().vcpus(), 12_000);
    }
}
