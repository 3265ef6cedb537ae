//! Which parts of a disk hold data, as far as the file below it knows.
//!
//! Only file systems whose `SEEK_DATA` knows what is in their cache and not on their disk are asked ([`tells_holes`]): others may call a hole what a write has
//! just put there.

#![expect(clippy::disallowed_types, reason = "control plane: no method of it is called on an I/O core")]

use std::os::fd::BorrowedFd;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;

/// A part of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskExtent {
    /// How long it is.
    pub bytes: u64,
    /// Whether it takes no space, and reads as zeros. Of the rest nothing is known.
    pub is_hole: bool,
}

/// `f_type` of the file systems that are asked (linux/magic.h, fs/xfs/libxfs/xfs_format.h). ext2 and ext3 have the number of ext4; Linux's own driver of ext2 says
/// that all is data.
const ASKED: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];

/// A look for the end of data that took this long is one of a file with very many extents.
const SLOW: Duration = Duration::from_millis(5);
/// For so many times as long as such a look took its answer is taken again: looks take a hundredth of a thread's time at most.
const REMEMBERED: u32 = 100;
/// How many answers are remembered: clients may look at different parts.
const ANSWERS: usize = 8;

/// What is known of one file.
#[derive(Debug, Default)]
pub(crate) struct FileExtents {
    asked: OnceLock<bool>,
    data: Mutex<DataRanges>,
}

/// Parts that were found to be data by a look that took long. A hole that is made there since is told as data for a while, which is never wrong.
#[derive(Debug, Default)]
struct DataRanges(Vec<DataRange>);

#[derive(Debug)]
struct DataRange {
    from: u64,
    to: u64,
    until: Instant,
}

impl DataRanges {
    /// Up to where all is data from `at` on, if that is known.
    fn end(&mut self, at: u64, now: Instant) -> Option<u64> {
        self.0.retain(|range| now < range.until);
        self.0.iter().find(|range| range.from <= at && at < range.to).map(|range| range.to)
    }

    /// A look that began at `now` and took so long has found data in that part.
    fn learn(&mut self, (from, to): (u64, u64), now: Instant, took: Duration) {
        if took < SLOW || from >= to {
            return;
        }
        if self.0.len() == ANSWERS {
            self.0.remove(0);
        }
        self.0.push(DataRange { from, to, until: now + took + took * REMEMBERED });
    }
}

/// Whether `SEEK_DATA` of this file knows every write that has ended. Not of a device: it has no holes that anybody knows, and its own file system may be of a
/// kind that is asked.
fn tells_holes(file: BorrowedFd<'_>) -> bool {
    let is_file = rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    // As the kernel compares them: in 32 bits, whatever the width and sign of the field.
    let kind = rustix::fs::fstatfs(file).map(|found| u64::from(found.f_type as u32));
    is_file && kind.is_ok_and(|kind| ASKED.contains(&kind))
}

impl FileExtents {
    /// Tells `each` about `len` bytes from `offset` on, until it says no; `file` is all of a disk of `disk` bytes. What cannot be found out counts as data.
    ///
    /// The kernel counts what it has written to its cache as data, also before there is room for it on the disk below. Neighbouring parts may be told
    /// that are alike. One look for the end of data, or of a hole, takes as long as its file system does: `lseek` has no end at which to stop looking.
    pub fn seek(
        &self,
        file: BorrowedFd<'_>,
        disk: u64,
        (offset, len): (u64, u64),
        each: &mut dyn FnMut(DiskExtent) -> bool,
    ) {
        let end = offset.saturating_add(len);
        if !*self.asked.get_or_init(|| tells_holes(file)) {
            each(DiskExtent { bytes: end - offset, is_hole: false });
            return;
        }
        let mut at = offset;
        let mut tell = |from: &mut u64, to: u64, is_hole| {
            let bytes = to - *from;
            *from = to;
            bytes == 0 || each(DiskExtent { bytes, is_hole })
        };
        while at < end {
            if let Some(known) = self.known_data(at) {
                if !tell(&mut at, known.min(end), false) {
                    return;
                }
                continue;
            }
            let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(data) => data.clamp(at, end),
                // Nothing behind it. What is beyond the end of a file that has become shorter is no hole: reads fail there.
                Err(Errno::NXIO) if is_whole(file, disk) => end,
                Err(_) => at,
            };
            if !tell(&mut at, data, true) || at == end {
                return;
            }
            let hole = self.end_of_data(file, at, end);
            if !tell(&mut at, hole, false) {
                return;
            }
        }
    }

    fn known_data(&self, at: u64) -> Option<u64> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner).end(at, Instant::now())
    }

    /// Where the data end that begin at `at`, or `end` if that comes before.
    fn end_of_data(&self, file: BorrowedFd<'_>, at: u64, end: u64) -> u64 {
        let begun = Instant::now();
        match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            // The end of a file counts as a hole.
            Ok(hole) if hole > at => {
                let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
                data.learn((at, hole), begun, begun.elapsed());
                hole.min(end)
            }
            Ok(_) | Err(_) => end,
        }
    }
}

/// Whether the file has all of the disk, but for what its last sector lacks.
fn is_whole(file: BorrowedFd<'_>, disk: u64) -> bool {
    rustix::fs::fstat(file)
        .is_ok_and(|stat| u64::try_from(stat.st_size).unwrap_or(0).next_multiple_of(512) >= disk)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn all(extents: &FileExtents, file: BorrowedFd<'_>, bytes: u64) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        extents.seek(file, bytes, (0, bytes), &mut |part| {
            found.push((part.bytes, part.is_hole));
            true
        });
        found
    }

    #[test]
    fn only_file_systems_that_know_their_cache_are_asked() {
        const BYTES: u64 = 1 << 20;
        let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, BYTES).unwrap();
        assert!(tells_holes(memory.as_fd()));
        assert_eq!(all(&FileExtents::default(), memory.as_fd(), BYTES), [(BYTES, true)]);
        // procfs is none of them.
        let proc = std::fs::File::open("/proc/self/status").unwrap();
        assert!(!tells_holes(proc.as_fd()));
        assert_eq!(all(&FileExtents::default(), proc.as_fd(), BYTES), [(BYTES, false)]);
        // A device is none, although its name may be on a tmpfs.
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(!tells_holes(null.as_fd()));
        assert_eq!(all(&FileExtents::default(), null.as_fd(), BYTES), [(BYTES, false)]);
    }

    #[test]
    fn what_took_long_to_find_out_is_not_looked_up_again_and_again() {
        let (mut ranges, now) = (DataRanges::default(), Instant::now());
        ranges.learn((0, 100), now, SLOW / 2);
        assert_eq!(ranges.end(0, now), None, "that was quick");
        ranges.learn((100, 200), now, SLOW);
        let later = now + SLOW * REMEMBERED;
        assert_eq!([99, 100, 199, 200].map(|at| ranges.end(at, later)), [None, Some(200), Some(200), None]);
        assert_eq!(ranges.end(100, later + SLOW * 2), None, "it may be a hole by now");
        for at in 0..2 * ANSWERS as u64 {
            ranges.learn((at, at + 1), now, SLOW);
        }
        assert_eq!(ranges.0.len(), ANSWERS);
        assert_eq!(ranges.end(2 * ANSWERS as u64 - 1, now), Some(2 * ANSWERS as u64));
    }

    /// A part that is known to be data is told without a look, and what is behind it by one.
    #[test]
    fn what_is_remembered_is_told_and_the_rest_is_looked_up() {
        const BYTES: u64 = 1 << 20;
        let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, BYTES).unwrap();
        let extents = FileExtents::default();
        extents.data.lock().unwrap().learn((4096, 8192), Instant::now(), Duration::from_secs(60));
        let mut found = Vec::new();
        extents.seek(memory.as_fd(), BYTES, (4096, 8192), &mut |part| {
            found.push((part.bytes, part.is_hole));
            true
        });
        assert_eq!(found, [(4096, false), (4096, true)]);
    }
}
