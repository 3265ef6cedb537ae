//! Shared mappings that survive their file being shrunk: see [`table`](crate::table) for what happens then.

#![allow(unsafe_code)]
// UNSAFETY: mmap and munmap; every pointer comes from a mapping whose bounds are kept beside it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::PAGE;
use crate::charge::Charge;
use crate::error::MappingError;
use crate::filesystem::HUGETLBFS;
pub use crate::quota::MAX_MAPPINGS;
use crate::table::Entry;

/// A shared mapping of part of a file. Unmapped when the last `Arc` of it goes.
#[derive(Debug)]
pub struct Mapping {
    /// The first byte that was asked for, and how many were.
    start: NonNull<u8>,
    len: usize,
    /// What is mapped: whole pages of the file, which may be huge ones.
    whole: NonNull<u8>,
    whole_len: usize,
    entry: Entry,
    file: OwnedFd,
    offset: u64,
    writable: bool,
    charge: Charge,
}

// SAFETY: the mapping is plain shared memory; all access to it goes through atomics or raw copies, never references.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, for loads and stores; refuses what the file does not have.
    pub fn of_file(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::of(file, offset, len, true, Charge::of_process()?)
    }

    /// As [`Mapping::of_file`], for loads alone. A store ends the process: views refuse them before ([`GuestFault::ReadOnly`]).
    ///
    /// [`GuestFault::ReadOnly`]: crate::GuestFault::ReadOnly
    pub fn of_file_read_only(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::of(file, offset, len, false, Charge::of_process()?)
    }

    pub(crate) fn of(
        file: OwnedFd,
        offset: u64,
        len: u64,
        writable: bool,
        charge: Charge,
    ) -> Result<Self, MappingError> {
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
        // A file of huge pages is mapped and unmapped by those alone.
        let page = page_of(&file)?;
        let skip = offset % page;
        let (Some(first), Some(span)) = (
            offset.checked_sub(skip),
            len.checked_add(skip).and_then(|len| len.checked_next_multiple_of(page)),
        ) else {
            return Err(shape);
        };
        let (Ok(skip), Ok(whole_len), Ok(page)) =
            (usize::try_from(skip), usize::try_from(span), usize::try_from(page))
        else {
            return Err(shape);
        };
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; nothing of ours is there.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                whole_len,
                if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ },
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                first,
            )?
        };
        let entry = Entry::of(at as usize, at as usize + whole_len, page);
        let (Some(entry), Some(whole)) = (entry, NonNull::new(at.cast::<u8>())) else {
            // SAFETY: made just above, and nobody else has seen it.
            let _ = unsafe { rustix::mm::munmap(at, whole_len) };
            return Err(MappingError::TooMany);
        };
        // SAFETY: skip is less than a page, and whole_len at least one.
        let start = unsafe { whole.add(skip) };
        Ok(Mapping { start, len: length, whole, whole_len, entry, file, offset, writable, charge })
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

    /// Whether a page of it vanished under us since it was mapped. It holds nothing but zeros then, all of it.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.entry.lost().load(Ordering::Acquire)
    }

    /// What [`Mapping::poisoned`] asks, to be kept near by those who keep the mapping.
    pub(crate) fn lost(&self) -> &'static AtomicBool {
        self.entry.lost()
    }

    /// The first byte. Only this crate and the crates that hand spans to the kernel may look behind it.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// On whose account it is.
    pub(crate) fn charge(&self) -> &Charge {
        &self.charge
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
        self.entry.leave();
        // SAFETY: what mmap gave, and the last owner is going.
        let _ = unsafe { rustix::mm::munmap(self.whole.as_ptr().cast(), self.whole_len) };
    }
}

/// Bytes of one page of `file`: those of hugetlbfs are as large as its file system says.
fn page_of(file: &OwnedFd) -> Result<u64, MappingError> {
    let system = rustix::fs::fstatfs(file)?;
    let page = if system.f_type as u32 == HUGETLBFS { system.f_bsize as u64 } else { PAGE };
    Ok(page.max(PAGE))
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
