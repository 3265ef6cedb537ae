//! The shared object that a VMM's process loads (`LD_PRELOAD`): its `ioctl` stands between the VMM and KVM, so that a
//! cluster of device accesses takes one exit.
//!
//! ```text
//!   VMM --ioctl--> not KVM's, or switched off --> the next `ioctl`: libc's --> the kernel
//!            `---> Interposer (ioplane-vcpu): descriptors, slots, KVM_RUN --^
//!   VMM --sigaction, signal--> of SIGSEGV and SIGBUS: remembered, and called by our handler --> the kernel
//! ```
//!
//! `IOPLANE_EXITS_CLUSTER=off` leaves every call alone, as for programs other than QEMU unless it is `on`. `IOPLANE_EXITS_CLUSTER_MICROSECONDS` is how long a guest may be kept from
//! its interrupts by a cluster. `IOPLANE_EXITS_BATCH=on` has CPUID offer batches to guests (docs/decisions/0042); `only` does, and begins without clusters. `IOPLANE_EXITS_CLAMP` is the most ticks per second of a guest's
//! PIT (docs/decisions/0059). `IOPLANE_EXITS_SHADOW=off` leaves all registers of devices to exits (docs/decisions/0065, 0088).
//!
//! KVM_RUN waits while the vCPUs are held (docs/decisions/0085).
//!
//! A panic never leaves this library. Must not know: what the VMM is. See docs/decisions/0040.
#![allow(unsafe_code)]
// UNSAFETY: defines symbols of libc, and makes system calls with arguments that the VMM has given.

mod clamp;
mod clock;
mod hold;
mod kernel;
mod lent;
mod marker;
mod shadow;
mod shared;
mod signals;
mod slots;
mod symbols;
mod vcpus;

use std::cell::Cell;
use std::ffi::{c_int, c_ulong};
use std::panic::catch_unwind;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ioplane_vcpu::kvm::{ClusterLimits, ClusterSwitch, Interposer, makes_timer};

use kernel::Linux;

const KVM_CREATE_VCPU: c_ulong = 0xae41;
const KVM_RUN: c_ulong = 0xae80;
/// Between two looks of a vCPU that is held.
const LOOK: Duration = Duration::from_millis(1);
/// The type of KVM's requests, in bits 8 to 15.
const KVM: c_ulong = 0xae;
/// What one cluster may take, beside time.
const INSTRUCTIONS: u32 = 4000;
const ACCESSES: u32 = 256;
/// Of QEMU, which does them one by one: a page of `REP OUTSB`. Others get one at a time, as from KVM.
const OUTPUT_ELEMENTS: u32 = 4096;
const MICROSECONDS: u64 = 50;

/// Set by the environment when the library is loaded: every call goes to the kernel.
static OFF: AtomicBool = AtomicBool::new(false);
thread_local! {
    /// This thread's vCPU is in the guest, or its exit is being handled.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

static INTERPOSER: OnceLock<Interposer<Linux>> = OnceLock::new();

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

/// Runs before the VMM's own code, on its only thread.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn loaded() {
    clock::begin();
    symbols::find();
    let off = match std::env::var_os("IOPLANE_EXITS_CLUSTER") {
        Some(word) if word == "on" || word == "1" => false,
        Some(word) if word == "off" || word == "0" => true,
        _ => !is_qemu(),
    };
    OFF.store(off, Ordering::Relaxed);
    if !off {
        // Before the VMM may have shut itself in.
        kernel::find_shadow_tables();
        shadow::begin(is_qemu());
    }
}

/// Whether the VMM is QEMU. Others may filter the system calls that a cluster makes on a vCPU's thread (Cloud Hypervisor does), or take all
/// elements of REP OUTS as one write, so they have to ask.
fn is_qemu() -> bool {
    let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    program.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"qemu-"))
}

fn interposer() -> &'static Interposer<Linux> {
    INTERPOSER.get_or_init(|| {
        // Nothing is printed: a message is a system call that the VMM may not be allowed on this thread.
        std::panic::set_hook(Box::new(|_| ()));
        signals::install();
        let microseconds = std::env::var("IOPLANE_EXITS_CLUSTER_MICROSECONDS").ok();
        let microseconds = microseconds.and_then(|word| word.parse().ok()).unwrap_or(MICROSECONDS);
        let (batches, switch) = match std::env::var_os("IOPLANE_EXITS_BATCH") {
            Some(word) if word == "only" => (true, ClusterSwitch::BatchOnly),
            word => (word.is_some_and(|word| word == "on" || word == "1"), ClusterSwitch::On),
        };
        let speed = clock::cycles_per_microsecond();
        let limits = ClusterLimits {
            instructions: INSTRUCTIONS,
            accesses: ACCESSES,
            cycles: speed.saturating_mul(microseconds),
            output_elements: if is_qemu() { OUTPUT_ELEMENTS } else { 1 },
        };
        Interposer::new(Linux::new(speed, batches, switch), limits)
    })
}

/// libc's, as far as a caller can tell. It is variadic in C; every request has one argument at most, which comes where a
/// third argument comes.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(descriptor: c_int, request: c_ulong, argument: usize) -> c_int {
    let switched_off = OFF.load(Ordering::Relaxed) && !shadow::on();
    let result = if request >> 8 & 0xff != KVM || switched_off {
        if let Some(next) = symbols::ioctl() {
            // Another library may stand there as well.
            // SAFETY: the caller's.
            return unsafe { next(descriptor, request, argument) };
        }
        kernel::ioctl(descriptor, request, argument)
    } else {
        shadow::around(descriptor, request, argument, clustered)
    };
    if request & 0xffff_ffff == KVM_CREATE_VCPU && result >= 0 && !switched_off {
        vcpus::keep(descriptor, result);
    }
    if result < 0 {
        // SAFETY: this thread's error number.
        unsafe { *libc::__errno_location() = -result };
        return -1;
    }
    result
}

/// Registers of a device are mapped into a VM's guest, or no longer: the interpreter leaves accesses there to KVM.
fn device_range(vm: c_int, address: u64, length: u64, removed: bool) {
    if !OFF.load(Ordering::Relaxed) {
        interposer().device_range(vm, address, length, removed);
    }
}

/// A call of KVM's, which may be answered by the interpreter.
fn clustered(descriptor: c_int, request: c_ulong, argument: usize) -> c_int {
    if OFF.load(Ordering::Relaxed) {
        return kernel::ioctl(descriptor, request, argument);
    }
    catch_unwind(|| {
        let call = || interposer().ioctl(descriptor, request, argument);
        let result = if request & 0xffff_ffff == KVM_RUN { held(descriptor, call) } else { call() };
        if result == 0 && makes_timer(request) {
            clamp::begin(descriptor);
        }
        result
    })
    .unwrap_or_else(|_| {
        // Not known what was done: the VMM tries KVM_RUN again, and clustering has ended.
        OFF.store(true, Ordering::Relaxed);
        -libc::EINTR
    })
}

/// KVM_RUN, once vCPUs may enter the guest.
fn held(descriptor: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let Some(page) = interposer().kernel().hold() else { return call() };
    let mut inside = INSIDE.get();
    let Some(vcpu) = vcpus::find(descriptor) else {
        // It cannot be held: it counts as inside for good, so nobody is told that it is.
        if !inside {
            page.enter();
            INSIDE.set(true);
        }
        return call();
    };
    let result = hold::run(page, &mut inside, call, || vcpu.is_wanted(), || std::thread::sleep(LOOK));
    INSIDE.set(inside);
    result
}
