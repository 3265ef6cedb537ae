//! The real kernel: system calls without libc, whose `ioctl` is ours.
#![allow(unsafe_code)]
// UNSAFETY: makes system calls with arguments of the VMM, and maps the page of a vCPU.

use std::arch::asm;
use std::ffi::{c_int, c_ulong};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use ioplane_vcpu::kvm::{ClampPage, ClusterSwitch, HoldPage, Kernel, VcpuCounters};
use kvm_bindings::kvm_run;

use crate::shared::SharedPage;
use crate::{clamp, signals};

/// What a system call returns: an error number with a minus sign, or a result.
pub(crate) fn ioctl(descriptor: c_int, request: c_ulong, argument: usize) -> c_int {
    let result: i64;
    // SAFETY: the arguments are the VMM's own; what they refer to is between it and the kernel.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") libc::SYS_ioctl => result,
            in("rdi") i64::from(descriptor),
            in("rsi") request,
            in("rdx") argument,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    c_int::try_from(result).unwrap_or(-libc::EIO)
}

/// What KVM's modules say of page tables of the guest's memory that the processor walks itself.
const NESTED_PAGING: [&str; 2] =
    ["/sys/module/kvm_intel/parameters/ept", "/sys/module/kvm_amd/parameters/npt"];
static SHADOW_TABLES: AtomicBool = AtomicBool::new(false);

/// Looks whether KVM keeps shadow tables of the guest's, which it has the guest's stores exit for.
pub(crate) fn find_shadow_tables() {
    let says_no = |path: &str| std::fs::read(path).is_ok_and(|value| is_no(&value));
    SHADOW_TABLES.store(NESTED_PAGING.into_iter().any(says_no), Ordering::Relaxed);
}

/// A parameter as Linux writes it: a letter, or a number in old versions.
fn is_no(value: &[u8]) -> bool {
    matches!(value.first(), Some(b'N' | b'n' | b'0'))
}

/// This process's kernel.
pub(crate) struct Linux {
    shared: Option<SharedPage>,
    batches: bool,
}

impl Linux {
    /// `batches`: guests are offered them. `switch`: how it stands until somebody else switches it.
    pub(crate) fn new(cycles_per_microsecond: u64, batches: bool, switch: ClusterSwitch) -> Self {
        Self { shared: SharedPage::new(switch, batches, cycles_per_microsecond), batches }
    }
}

impl Linux {
    /// Whether vCPUs may enter the guest.
    pub(crate) fn hold(&self) -> Option<&HoldPage> {
        self.shared.as_ref().map(SharedPage::hold)
    }
}

impl Kernel for Linux {
    fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        ioctl(descriptor, request, argument)
    }

    fn map_vcpu(&self, descriptor: i32, bytes: usize) -> Option<*mut kvm_run> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, 0) };
        (mapped != libc::MAP_FAILED).then_some(mapped.cast())
    }

    fn counters(&self) -> Option<&'static VcpuCounters> {
        self.shared.as_ref()?.next_vcpu()
    }

    fn has_shadow_tables(&self) -> bool {
        SHADOW_TABLES.load(Ordering::Relaxed)
    }

    fn faults_arrive(&self) -> bool {
        signals::faults_arrive()
    }

    fn switched(&self) -> ClusterSwitch {
        self.shared.as_ref().map_or(ClusterSwitch::Off, SharedPage::switched)
    }

    fn offers_batches(&self) -> bool {
        self.batches
    }

    fn clamp(&self) -> Option<&ClampPage> {
        self.shared.as_ref().map(SharedPage::clamp)
    }

    fn thread(&self) -> i32 {
        clamp::thread()
    }

    fn kick(&self, thread: i32) -> bool {
        clamp::kick(thread)
    }

    fn failed(&self) {
        if let Some(shared) = &self.shared {
            shared.set_failed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_modules() {
        assert!(is_no(b"N\n") && is_no(b"0\n"));
        assert!(!is_no(b"Y\n") && !is_no(b"1\n") && !is_no(b""));
    }

    #[test]
    fn errors_come_with_a_minus_sign() {
        assert_eq!(ioctl(-1, 0x5401, 0), -libc::EBADF);
    }
}
