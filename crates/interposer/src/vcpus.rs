//! The vCPUs of the process: what KVM_RUN leaves for the VMM, and what the VMM has set for it.
#![allow(unsafe_code)]
// UNSAFETY: maps the page of a vCPU.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use kvm_bindings::kvm_run;

/// vCPUs that are known: those whose descriptors are below this number.
const VCPUS: usize = 4096;
const PAGE: usize = 4096;

/// What KVM_RUN leaves for the VMM, and whose vCPU it is.
pub(crate) struct Vcpu {
    pub vm: c_int,
    pub run: *const kvm_run,
}

static VCPU: [AtomicPtr<Vcpu>; VCPUS] = [const { AtomicPtr::new(ptr::null_mut()) }; VCPUS];

impl Vcpu {
    /// Whether the VMM has KVM_RUN return at once.
    pub fn is_wanted(&self) -> bool {
        // SAFETY: a byte of the vCPU's page, which stays mapped; the VMM writes it in signal handlers and on other threads.
        let wanted = unsafe { AtomicU8::from_ptr((&raw const (*self.run).immediate_exit).cast_mut()) };
        wanted.load(Ordering::SeqCst) != 0
    }
}

pub(crate) fn find(descriptor: c_int) -> Option<&'static Vcpu> {
    let place = VCPU.get(usize::try_from(descriptor).ok()?)?;
    // SAFETY: null, or from a box that is never freed.
    unsafe { place.load(Ordering::Acquire).as_ref() }
}

/// KVM_CREATE_VCPU has returned this descriptor. A number that is used again is that of the new vCPU; the old one's mapping stays, since a call may be using it.
pub(crate) fn keep(vm: c_int, descriptor: c_int) {
    let Some(place) = usize::try_from(descriptor).ok().and_then(|number| VCPU.get(number)) else { return };
    // SAFETY: a new mapping, wherever the kernel puts it.
    let run = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_SHARED, descriptor, 0) };
    let vcpu = match run {
        libc::MAP_FAILED => ptr::null_mut(),
        run => Box::into_raw(Box::new(Vcpu { vm, run: run.cast() })),
    };
    place.store(vcpu, Ordering::Release);
}
