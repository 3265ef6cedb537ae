//! Files that a client may share as memory.
//!
//! Whoever touches shared memory waits until the page is there. Of a memfd, of tmpfs and of hugetlbfs that is the kernel's own
//! work; of any other file it can be a disk's, a network's or another process's (FUSE), which need never answer, and an I/O core
//! would wait with all guests on it. So only the former are taken, unless the operator trusts the client and its storage.
//!
//! What is left, and bounded by the host: pages of tmpfs can be swapped out (by the host, or by the client with MADV_PAGEOUT) and
//! are read back by a fault; where a hole is being punched into tmpfs, a fault there waits until that is done, and then finds zeros;
//! a first touch allocates, on the account of the daemon's control group. Huge pages have none of the first.

use std::os::fd::AsFd;

use crate::error::MappingError;
use crate::filesystem::{FileSystem, HUGETLBFS, TMPFS};

/// Which files are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Files {
    /// Those whose pages are memory: memfd, tmpfs, hugetlbfs.
    #[default]
    Ram,
    /// Those of any file system: the operator vouches for it.
    Any,
}

/// Refuses what is not to be memory.
pub(crate) fn check(file: impl AsFd, allowed: Files) -> Result<(), MappingError> {
    // memfd, tmpfs and hugetlbfs files have seals, others do not. This question never waits, while fstat may ask a server.
    if rustix::fs::fcntl_get_seals(&file).is_ok() {
        return Ok(());
    }
    // Devices of /dev are in a tmpfs of the kernel's; what they map is not.
    let mode = rustix::fs::fstat(&file)?.st_mode;
    if !rustix::fs::FileType::from_raw_mode(mode).is_file() {
        return Err(MappingError::NotAFile);
    }
    let kind = rustix::fs::fstatfs(&file)?.f_type as u32;
    if allowed == Files::Any || kind == TMPFS || kind == HUGETLBFS {
        return Ok(());
    }
    Err(MappingError::Slow(FileSystem(kind)))
}
