//! Shared mappings that survive their file being shrunk.
//!
//! A peer that hands over a file descriptor can `ftruncate` it later; touching a page beyond the new end raises SIGBUS.
//! One handler for the process looks the address up in a table of live mappings, puts an anonymous zero page where the
//! file's page was, and sets the mapping's poison flag. The thread then goes on, reads zeros, and its poller finds the
//! flag at the end of the batch and stops the queue. Faults elsewhere go to the handler that was there before.

#![allow(unsafe_code)]
// UNSAFETY: mmap, munmap and a signal handler; every pointer comes from a mapping whose bounds are kept beside it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::PAGE;

/// Most mappings that can live at once in one process; a table of fixed size, since a signal handler reads it.
pub const MAX_MAPPINGS: usize = 4096;

/// Why a mapping could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The peer promised more bytes than the file has.
    #[error(
        "the file behind the region has {file} bytes, but the region reaches to byte {end}: refuse the region"
    )]
    BeyondFile {
        /// Size of the file, bytes.
        file: u64,
        /// Where the region ends in it, bytes.
        end: u64,
    },
    /// Empty, not page-aligned, or larger than the address space.
    #[error(
        "a region of {len} bytes at file offset {offset} cannot be mapped: both must be page-aligned and not zero"
    )]
    Shape {
        /// Offset in the file, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
    },
    /// The table of [`MAX_MAPPINGS`] is full.
    #[error("more than {MAX_MAPPINGS} mappings: detach VMs, or start a second daemon")]
    TooMany,
    /// The kernel said no.
    #[error("mapping shared memory: {0} (is the memory limit of the service too low?)")]
    Os(#[from] rustix::io::Errno),
}

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), poisoned: AtomicBool::new(false) }
}; MAX_MAPPINGS];

/// A shared mapping of part of a file. Unmapped when the last `Arc` of it goes.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    slot: usize,
    file: OwnedFd,
    offset: u64,
    writable: bool,
}

// SAFETY: the mapping is plain shared memory; all access to it goes through atomics or raw copies, never references.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, for loads and stores; refuses what the file does not have.
    pub fn of_file(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::of(file, offset, len, true)
    }

    /// As [`Mapping::of_file`], for loads alone. A store ends the process: views refuse them before ([`GuestFault::ReadOnly`]).
    ///
    /// [`GuestFault::ReadOnly`]: crate::GuestFault::ReadOnly
    pub fn of_file_read_only(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::of(file, offset, len, false)
    }

    fn of(file: OwnedFd, offset: u64, len: u64, writable: bool) -> Result<Self, MappingError> {
        let shape = MappingError::Shape { offset, len };
        let (Some(end), Ok(length)) = (offset.checked_add(len), usize::try_from(len)) else {
            return Err(shape);
        };
        if len == 0 || !offset.is_multiple_of(PAGE) || len > isize::MAX as u64 {
            return Err(shape);
        }
        let size = rustix::fs::fstat(&file)?.st_size as u64;
        if end > size {
            return Err(MappingError::BeyondFile { file: size, end });
        }
        install();
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; nothing of ours is there.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ },
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                offset,
            )?
        };
        let at = start as usize;
        let Some(slot) = claim(at, at + length.next_multiple_of(PAGE as usize)) else {
            // SAFETY: made just above, and nobody else has seen it.
            let _ = unsafe { rustix::mm::munmap(start, length) };
            return Err(MappingError::TooMany);
        };
        let start = NonNull::new(start.cast()).ok_or(MappingError::Shape { offset, len })?;
        Ok(Mapping { start, len: length, slot, file, offset, writable })
    }

    /// A new anonymous file of `len` bytes (rounded up to pages) that cannot shrink or grow, mapped.
    pub fn anonymous(name: &str, len: u64) -> Result<Self, MappingError> {
        let len = len.max(1).next_multiple_of(PAGE);
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, len)?;
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW)?;
        Self::of_file(file, 0, len)
    }

    /// Whether it may be stored into.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Bytes mapped.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty mapping is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a page of it vanished under us since it was mapped.
    #[inline]
    pub fn poisoned(&self) -> bool {
        SLOTS[self.slot].poisoned.load(Ordering::Acquire)
    }

    /// The first byte. Only this crate and the crates that hand spans to the kernel may look behind it.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The file that is mapped.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where in the file the mapping begins, bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The slot goes first: after munmap the address may belong to somebody else's mapping.
        let slot = &SLOTS[self.slot];
        slot.end.store(0, Ordering::SeqCst);
        slot.start.store(0, Ordering::SeqCst);
        // SAFETY: start and len are what mmap gave, and the last owner is going.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Takes a free slot of the table for `start..end`. Control plane only.
fn claim(start: usize, end: usize) -> Option<usize> {
    for (index, slot) in SLOTS.iter().enumerate() {
        if slot.start.compare_exchange(0, start, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            slot.poisoned.store(false, Ordering::SeqCst);
            slot.end.store(end, Ordering::SeqCst);
            return Some(index);
        }
    }
    None
}

static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, once for the process.
fn install() {
    BEFORE.get_or_init(|| {
        // SAFETY: both structures are plain data; the handler is async-signal-safe (atomics and one mmap).
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigemptyset(&mut action.sa_mask);
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, &action, &mut before);
            before
        }
    });
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let at = unsafe { (*info).si_addr() } as usize;
    for slot in &SLOTS {
        let (start, end) = (slot.start.load(Ordering::SeqCst), slot.end.load(Ordering::SeqCst));
        if start != 0 && at >= start && at < end {
            slot.poisoned.store(true, Ordering::Release);
            let page = at & !(PAGE as usize - 1);
            // SAFETY: the page lies inside a mapping of ours; a zero page replaces it, so the access can be repeated.
            let patched = unsafe {
                libc::mmap(
                    page as *mut libc::c_void,
                    PAGE as usize,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            if patched != libc::MAP_FAILED {
                return;
            }
        }
    }
    // Not ours: as if we had never been here.
    // SAFETY: restores what was there or the default, and lets the instruction fault again.
    unsafe {
        match BEFORE.get() {
            Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(before.sa_sigaction);
                    call(signal, info, context);
                } else {
                    let call: extern "C" fn(libc::c_int) = std::mem::transmute(before.sa_sigaction);
                    call(signal);
                }
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Window;
    use std::sync::Arc;

    fn memfd(len: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    }

    #[test]
    fn a_region_beyond_its_file_is_refused() {
        assert!(matches!(
            Mapping::of_file(memfd(8192), 4096, 8192),
            Err(MappingError::BeyondFile { file: 8192, end: 12288 })
        ));
        assert!(matches!(Mapping::of_file(memfd(8192), 1, 4096), Err(MappingError::Shape { .. })));
        assert!(matches!(Mapping::of_file(memfd(8192), 4096, u64::MAX), Err(MappingError::Shape { .. })));
    }

    #[test]
    fn a_file_that_shrinks_poisons_the_mapping_and_nothing_dies() {
        let file = memfd(16384);
        let mapping = Arc::new(Mapping::of_file(file.try_clone().unwrap(), 0, 16384).unwrap());
        let window = Window::of_mapping(&mapping, 0, 16384).unwrap();
        assert_eq!(window.load_u16(8192), 0);
        assert!(!mapping.poisoned());
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(window.load_u16(8192), 0);
        assert!(mapping.poisoned());
    }

    #[test]
    fn slots_come_back() {
        for _ in 0..MAX_MAPPINGS + 10 {
            Mapping::anonymous("again", 4096).unwrap();
        }
    }
}
