//! Shadow pages: registers that a guest reads without an exit, of devices that offer a register file ([`ioplane_pci::register_file`]).
//!
//! ```text
//!   VMM --KVM_SET_USER_MEMORY_REGION--> of a page: the marker page of a register file? ---> followed
//!   guest reads a register --KVM_RUN returns--> ask the device --VMM--> it answers the read, and grants
//!       <--KVM_RUN-- if granted: a read-only slot with the page of registers
//! ```
//!
//! The slot goes before the VMM's call that moves or removes the marker, or that wants its place or its number. A read that has exited proves that
//! nothing else of KVM's is there, and the grant that the VMM sends such reads to this device.
//!
//! [`crate::lent`] follows the same calls, for pages that a guest also writes.
//!
//! `IOPLANE_EXITS_SHADOW=off`: none of this; `on`: also in VMMs other than QEMU, where the library is on. Whether clusters are switched on later does not
//! matter to it.
#![allow(unsafe_code)]
// UNSAFETY: reads what the VMM gives the kernel by address, and what KVM_RUN has left for it.

mod follower;
mod found;

use std::cell::Cell;
use std::ffi::{c_int, c_ulong};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_CAP_NR_MEMSLOTS, KVM_EXIT_MMIO, KVM_MEM_READONLY, kvm_userspace_memory_region};

pub(crate) use follower::other_space;
use follower::{Follower, Host, PAGE};
use found::FoundRegisters;

use crate::{lent, vcpus};

const KVM_CREATE_VM: c_ulong = 0xae01;
const KVM_CHECK_EXTENSION: c_ulong = 0xae03;
const KVM_SET_USER_MEMORY_REGION: c_ulong = 0x4020_ae46;
/// Begins as the older structure does.
const KVM_SET_USER_MEMORY_REGION2: c_ulong = 0x40a0_ae49;
const KVM_RUN: c_ulong = 0xae80;

static ON: AtomicBool = AtomicBool::new(false);
/// Register files that a read may ask for: while there are none, KVM_RUN is not looked at.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static FOLLOWER: Mutex<Follower<FoundRegisters>> = Mutex::new(Follower::new());

thread_local! {
    /// The request that the read made with which this thread's KVM_RUN has returned; 0: none.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// Begins in QEMU, unless the environment says otherwise. Other VMMs may filter the system calls that this makes on a vCPU's thread.
pub(crate) fn begin(qemu: bool) {
    let on = match std::env::var_os("IOPLANE_EXITS_SHADOW") {
        Some(word) if word == "on" || word == "1" => true,
        Some(word) if word == "off" || word == "0" => false,
        _ => qemu,
    };
    ON.store(on, Ordering::Relaxed);
}

/// Whether calls have to be looked at, also when clustering has ended.
pub(crate) fn on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// A call of KVM's, with what has to be done around it. `call` makes it.
pub(crate) fn around(
    descriptor: c_int,
    request: c_ulong,
    argument: usize,
    call: impl Fn(c_int, c_ulong, usize) -> c_int,
) -> c_int {
    let made = || call(descriptor, request, argument);
    if !on() {
        return made();
    }
    let kernel = Kernel(&call);
    // C programs keep it in an `int`, whose sign is repeated.
    match request & 0xffff_ffff {
        KVM_RUN => {
            let asked = ASKED.take();
            if asked != 0 {
                guarded(|follower| follower.read_answered(&kernel, asked));
            }
            let result = made();
            if result == 0 && WAITING.load(Ordering::Relaxed) > 0 {
                read_exits(descriptor);
            }
            result
        }
        KVM_SET_USER_MEMORY_REGION | KVM_SET_USER_MEMORY_REGION2 => {
            set_region(&kernel, descriptor, argument, made)
        }
        KVM_CREATE_VM => {
            let result = made();
            if result >= 0 {
                guarded(|follower| follower.forget(result));
                lent::forget(result);
            }
            result
        }
        _ => made(),
    }
}

/// Nothing else changes slots meanwhile: neither the VMM nor a vCPU that has been answered.
fn set_region(
    kernel: &Kernel<'_, impl Fn(c_int, c_ulong, usize) -> c_int>,
    vm: c_int,
    argument: usize,
    made: impl Fn() -> c_int,
) -> c_int {
    let Some(region) = read_region(argument) else { return made() };
    let mut follower = lock();
    let followed = catch_unwind(AssertUnwindSafe(|| follower.before(kernel, vm, &region)));
    let result = lent::around(vm, &region, made);
    let followed = followed.and_then(|()| {
        catch_unwind(AssertUnwindSafe(|| {
            if result == 0 {
                follower.after(kernel, vm, &region);
            }
        }))
    });
    settle(follower, followed.is_ok());
    result
}

/// The structure, if there is one: the VMM's mistakes are the kernel's to find.
fn read_region(argument: usize) -> Option<kvm_userspace_memory_region> {
    let mut region = kvm_userspace_memory_region::default();
    let size = size_of_val(&region);
    let [local, remote] = [ptr::from_mut(&mut region).cast(), ptr::with_exposed_provenance_mut(argument)]
        .map(|iov_base| libc::iovec { iov_base, iov_len: size });
    // SAFETY: copies into a structure of that size; what cannot be read is an error.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    (usize::try_from(read) == Ok(size)).then_some(region)
}

fn read_exits(descriptor: c_int) {
    let Some(vcpu) = vcpus::find(descriptor) else { return };
    // SAFETY: the vCPU's page, which stays mapped; KVM_RUN has returned on this thread, and what it has left there are plain numbers.
    let (reason, mmio) = unsafe { ((*vcpu.run).exit_reason, (*vcpu.run).__bindgen_anon_1.mmio) };
    if reason == KVM_EXIT_MMIO && mmio.is_write == 0 {
        guarded(|follower| ASKED.set(follower.read_exits(vcpu.vm, mmio.phys_addr).unwrap_or(0)));
    }
}

fn lock() -> MutexGuard<'static, Follower<FoundRegisters>> {
    // A panic inside has ended all of it.
    FOLLOWER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn guarded(work: impl FnOnce(&mut Follower<FoundRegisters>)) {
    let mut follower = lock();
    let done = catch_unwind(AssertUnwindSafe(|| work(&mut follower)));
    settle(follower, done.is_ok());
}

/// After a fault of ours no registers are shown any more: nobody would follow the VMM's slots.
fn settle(mut follower: MutexGuard<'_, Follower<FoundRegisters>>, well: bool) {
    if !well && ON.swap(false, Ordering::Relaxed) {
        let direct = Kernel(&crate::kernel::ioctl);
        let _ = catch_unwind(AssertUnwindSafe(|| follower.end(&direct)));
        lent::end();
    }
    WAITING.store(follower.waiting(), Ordering::Relaxed);
}

/// KVM, by calls that the interpreter of clusters learns from as from the VMM's.
struct Kernel<'a, C>(&'a C);

impl<C: Fn(c_int, c_ulong, usize) -> c_int> Kernel<'_, C> {
    fn set(&self, vm: c_int, region: &kvm_userspace_memory_region) -> bool {
        let argument = ptr::from_ref(region).expose_provenance();
        (self.0)(vm, KVM_SET_USER_MEMORY_REGION, argument) == 0
    }
}

impl<C: Fn(c_int, c_ulong, usize) -> c_int> Host for Kernel<'_, C> {
    type Registers = FoundRegisters;

    fn find(&self, address: usize) -> Option<FoundRegisters> {
        found::find(address).ok()
    }

    fn slots(&self, vm: c_int) -> u32 {
        let slots = (self.0)(vm, KVM_CHECK_EXTENSION, KVM_CAP_NR_MEMSLOTS as usize);
        u32::try_from(slots).unwrap_or(0)
    }

    fn show(&self, vm: c_int, slot: u32, address: u64, registers: &FoundRegisters) -> bool {
        self.set(
            vm,
            &kvm_userspace_memory_region {
                slot,
                flags: KVM_MEM_READONLY,
                guest_phys_addr: address,
                memory_size: PAGE,
                userspace_addr: registers.address() as u64,
            },
        )
    }

    fn hide(&self, vm: c_int, slot: u32) {
        // A size of 0 removes it; the rest is not looked at.
        self.set(vm, &kvm_userspace_memory_region { slot, ..Default::default() });
    }
}
