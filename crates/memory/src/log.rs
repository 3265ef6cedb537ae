//! The dirty log: one bit a guest page, set after every store (invariant 6).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::PAGE;
use crate::error::MappingError;
use crate::mapping::Mapping;
use crate::window::Window;

/// A bitmap of guest pages that have been written, laid out as the vhost-user specification's log: bit `n % 8` of byte
/// `n / 8` for page `n`. Shared with a migration, or with QEMU through a file descriptor. Marked by any thread.
#[derive(Debug)]
pub struct DirtyLog {
    bits: Window,
}

impl DirtyLog {
    /// A log of our own for guest addresses below `limit` bytes.
    pub fn new(limit: u64) -> Result<Self, MappingError> {
        let mapping = Arc::new(Mapping::anonymous("dirty-log", limit.div_ceil(PAGE).div_ceil(8))?);
        let len = mapping.len();
        Ok(DirtyLog { bits: Window::whole(mapping, len) })
    }

    /// The log that a front end keeps in `file` (vhost-user `SET_LOG_BASE`).
    pub fn of_file(file: OwnedFd, offset: u64, len: u64) -> Result<Self, MappingError> {
        Mapping::of_file(file, offset, len).map(Self::of_mapping)
    }

    /// The log that fills `mapping`.
    pub fn of_mapping(mapping: Mapping) -> Self {
        let len = mapping.len();
        DirtyLog { bits: Window::whole(Arc::new(mapping), len) }
    }

    /// The file that the log is in, and where: offset and length in bytes.
    pub fn place(&self) -> (BorrowedFd<'_>, u64, u64) {
        let mapping = self.bits.mapping();
        (mapping.file(), mapping.offset(), self.bits.len() as u64)
    }

    /// Whether the memory of the log went away.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.bits.poisoned()
    }

    /// Sets the bits of every page that `len` bytes from `gpa` touch. Pages beyond the log's end are not in it.
    pub fn mark(&self, gpa: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (first, last) = (gpa / PAGE, gpa.saturating_add(len - 1) / PAGE);
        for page in first..=last {
            let Ok(byte) = usize::try_from(page / 8) else { return };
            if byte >= self.bits.len() {
                return;
            }
            self.bits.or_u8(byte, 1 << (page % 8), Ordering::AcqRel);
        }
    }

    /// Whether the page of `gpa` is marked.
    pub fn is_marked(&self, gpa: u64) -> bool {
        let page = gpa / PAGE;
        usize::try_from(page / 8)
            .is_ok_and(|byte| byte < self.bits.len() && self.bits.load_u8(byte) & (1 << (page % 8)) != 0)
    }

    /// Takes all bits out and returns the guest addresses of the pages that were marked.
    pub fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for byte in 0..self.bits.len() {
            let bits = self.bits.swap_u8(byte, 0, Ordering::AcqRel);
            pages.extend(
                (0..8).filter(|bit| bits & (1 << bit) != 0).map(|bit| (byte as u64 * 8 + bit) * PAGE),
            );
        }
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_every_page_touched_and_no_other() {
        let log = DirtyLog::new(1 << 20).unwrap();
        log.mark(4095, 2);
        log.mark(10 * 4096, 4096);
        log.mark(20 * 4096, 0);
        log.mark(u64::MAX - 1, 10);
        assert_eq!(log.take(), [0, 4096, 40960]);
        assert_eq!(log.take(), [0u64; 0]);
    }
}
