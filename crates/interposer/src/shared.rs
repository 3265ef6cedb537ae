//! Where the counters and the switch are: a memfd, which others find as `/proc/PID/fd`, so that whoever may look into the VMM may
//! read it, and nothing is left behind when the VMM ends.
#![allow(unsafe_code)]
// UNSAFETY: maps the page of counters.

use std::ffi::{CString, c_int, c_void};
use std::ptr;

use ioplane_vcpu::kvm::{CLUSTER_PAGE_NAME, ClampPage, ClusterPage, ClusterSwitch, HoldPage, VcpuCounters};

use crate::clamp;

/// The mapping; it stays until the process ends.
pub(crate) struct SharedPage(&'static ClusterPage);

const BYTES: usize = size_of::<ClusterPage>();

impl SharedPage {
    /// Makes one that nobody else finds if the kernel refuses the file.
    pub(crate) fn new(switch: ClusterSwitch, batches: bool, cycles_per_microsecond: u64) -> Option<Self> {
        let mapped = file().and_then(|file| map(libc::MAP_SHARED, file));
        let mapped = mapped.or_else(|| map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1))?;
        // SAFETY: a mapping of that size, aligned to a page, of zeros, which are a value; it is never taken away, and all
        // fields are atomic.
        let page: &'static ClusterPage = unsafe { &*mapped.cast::<ClusterPage>() };
        page.begin(switch, batches, cycles_per_microsecond);
        page.clamp().begin(clamp::from_environment());
        Some(Self(page))
    }

    pub(crate) fn next_vcpu(&self) -> Option<&'static VcpuCounters> {
        self.0.next_vcpu()
    }

    pub(crate) fn switched(&self) -> ClusterSwitch {
        self.0.switched()
    }

    pub(crate) fn clamp(&self) -> &ClampPage {
        self.0.clamp()
    }

    pub(crate) fn hold(&self) -> &HoldPage {
        self.0.hold()
    }

    pub(crate) fn set_failed(&self) {
        self.0.set_failed();
    }
}

/// A descriptor that is never closed: it is how others find the memory. It cannot shrink, so that nobody who has it can have
/// the VMM fault.
fn file() -> Option<c_int> {
    let name = CString::new(CLUSTER_PAGE_NAME).ok()?;
    // SAFETY: a name with its end.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    let size = libc::off_t::try_from(BYTES).ok()?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: a descriptor of our own.
    let ready = file >= 0
        && unsafe { libc::ftruncate(file, size) == 0 && libc::fcntl(file, libc::F_ADD_SEALS, seals) == 0 };
    ready.then_some(file)
}

fn map(flags: c_int, file: c_int) -> Option<*mut c_void> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel puts it.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), BYTES, access, flags, file, 0) };
    (mapped != libc::MAP_FAILED).then_some(mapped)
}
