//! The steps of a job as blocking system calls, for threads and for whoever has no ring.

#![allow(unsafe_code)]
// UNSAFETY: system calls on addresses that stay valid until the job is done.

use std::os::fd::AsRawFd;

use super::image::Image;
use super::job::{Source, Step};
use crate::mutation::{Promise, removed};

/// Does one step. Bytes moved, or an errno below zero: what io_uring would have answered.
pub(super) fn carry_out(image: &Image, step: Step) -> i32 {
    let (file, zeros) = (image.file.as_raw_fd(), image.zeros.as_raw_fd());
    let of = |source| if source == Source::Image { file } else { zeros };
    // SAFETY: addresses and tables of a step stay valid until its result is taken; the kernel checks the rest.
    let result = unsafe {
        match step {
            Step::Read { at, len, offset, source } => {
                libc::pread64(of(source), at.cast(), len as usize, offset as i64)
            }
            Step::ReadV { table, count, offset, source } => {
                libc::preadv64(of(source), table, count as i32, offset as i64)
            }
            Step::Write { at, len, offset } => libc::pwrite64(file, at.cast(), len as usize, offset as i64),
            Step::WriteV { table, count, offset } => {
                libc::pwritev64(file, table, count as i32, offset as i64)
            }
            Step::Sync { .. } if removed(Promise::Flush) => 0,
            Step::Sync { full: true } => libc::fsync(file) as isize,
            Step::Sync { full: false } => libc::fdatasync(file) as isize,
            Step::Allocate { mode, offset, len } => {
                libc::fallocate64(file, mode, offset as i64, len as i64) as isize
            }
        }
    };
    if result < 0 {
        return -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    result.min(i32::MAX as isize) as i32
}
