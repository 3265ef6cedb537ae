//! One operation on a file, as a machine of steps. Both engines drive it: a step becomes a submission or a system call,
//! its result comes back by [`Job::took`], until there is an outcome.
//!
//! ```text
//!   begin -> step -> (engine) -> took --Some(outcome)--> end
//!              ^------------------ None: short, interrupted, or the file system lacks it: another way
//! ```

#![allow(unsafe_code)]
// UNSAFETY: fills tables and bounce buffers of the channel's own arena, each job in its own slice of it; hands addresses of
// guest memory that were checked to the kernel, never touches the bytes behind them.

use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestRange, GuestView};

use super::image::{Image, WriteTime};
use crate::channel::{Fault, MAX_RANGES, Op, Outcome};

/// Bytes of a job's bounce buffer: what its misaligned or zero-filling transfers move in one step.
pub(super) const BOUNCE: usize = 64 << 10;

/// How often in a row the kernel may answer EAGAIN or EINTR before that counts as an error.
const MAX_RETRIES: u16 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// How the rest of the job is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Between guest memory and the file, nothing in between.
    Straight,
    /// Through the bounce buffer: guest addresses that `O_DIRECT` does not take.
    Bounced,
    /// The image ends inside its last sector: what a read finds there is zeros.
    Tail,
    Punch,
    ZeroRange,
    /// Writing zeros from the bounce buffer.
    Zeros,
    Sync,
}

/// What an engine is to do next. Addresses stay valid until the result is handed to [`Job::took`].
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    Read {
        at: *mut u8,
        len: u32,
        offset: u64,
        source: Source,
    },
    ReadV {
        table: *const libc::iovec,
        count: u32,
        offset: u64,
        source: Source,
    },
    Write {
        at: *const u8,
        len: u32,
        offset: u64,
    },
    WriteV {
        table: *const libc::iovec,
        count: u32,
        offset: u64,
    },
    /// `full`: the times of the file, too.
    Sync {
        full: bool,
    },
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
}

/// What a read reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Image,
    /// A file of zeros, so that the kernel fills guest memory and we need not.
    Zeros,
}

/// A job's tables and bounce buffer: slices of the channel's arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobBuffers {
    pub table: *mut libc::iovec,
    pub ranges: *mut GuestRange,
    pub bounce: *mut u8,
}

#[derive(Debug)]
pub(super) struct Job {
    buffers: JobBuffers,
    kind: Kind,
    way: Way,
    unmap: bool,
    /// Of a flush: fsync, and not fdatasync.
    full: Option<WriteTime>,
    /// Next byte of the file.
    offset: u64,
    /// Bytes to go.
    left: u64,
    /// Bytes done.
    moved: u64,
    /// First entry of the table that is not done, and one past the last.
    first: usize,
    end: usize,
    /// How many ranges the guest gave.
    ranges: usize,
    again: u16,
    /// Which of the channel's maps keeps the memory mapped.
    pub map: u16,
}

// SAFETY: the pointers go into the channel's arena, which moves with the job.
unsafe impl Send for Job {}

impl Job {
    pub fn new(buffers: JobBuffers) -> Self {
        Job {
            buffers,
            kind: Kind::Flush,
            way: Way::Sync,
            unmap: false,
            full: None,
            offset: 0,
            left: 0,
            moved: 0,
            first: 0,
            end: 0,
            ranges: 0,
            again: 0,
            map: 0,
        }
    }

    /// Checks `op` whole before anything is done. `Err` if it has ended with that already.
    #[inline]
    pub fn begin(&mut self, view: &GuestView, op: &Op<'_>, image: &Image) -> Result<(), Outcome> {
        (self.moved, self.again, self.first, self.end, self.ranges) = (0, 0, 0, 0, 0);
        match *op {
            Op::Read { offset, into } => {
                (self.kind, self.offset) = (Kind::Read, offset);
                self.transfer(view, into, image)?;
            }
            Op::Write { offset, from } => {
                (self.kind, self.offset) = (Kind::Write, offset);
                self.transfer(view, from, image)?;
            }
            Op::Flush => {
                if image.read_only {
                    return Err(Ok(()));
                }
                if let Some(errno) = image.lost() {
                    return Err(Err(Fault::of_errno(errno)));
                }
                (self.kind, self.way, self.offset, self.left) = (Kind::Flush, Way::Sync, 0, 0);
                self.full = image.full_sync();
                return Ok(());
            }
            Op::Discard { offset, len } => {
                (self.kind, self.way, self.offset, self.left) = (Kind::Discard, Way::Punch, offset, len);
            }
            Op::WriteZeroes { offset, len, unmap } => {
                (self.kind, self.offset, self.left, self.unmap) = (Kind::WriteZeroes, offset, len, unmap);
                self.way = if unmap { Way::Punch } else { Way::ZeroRange };
            }
        }
        if self.kind != Kind::Read && image.read_only {
            return Err(Err(Fault::ReadOnly));
        }
        if self.offset.checked_add(self.left).is_none_or(|end| end > image.bytes()) {
            return Err(Err(Fault::BeyondEnd));
        }
        if self.left == 0 {
            return Err(Ok(()));
        }
        let unit = u64::from(image.offset_align);
        if (self.kind != Kind::Discard || image.is_device) && !(self.offset | self.left).is_multiple_of(unit)
        {
            return Err(Err(Fault::Io(libc::EINVAL)));
        }
        match self.way {
            Way::Punch if !image.can_punch() => self.without_punch(image),
            Way::ZeroRange if !image.can_zero() => {
                self.write_zeros();
                None
            }
            _ => None,
        }
        .map_or(Ok(()), Err)
    }

    /// Fills the tables for a read or a write.
    #[inline]
    fn transfer(&mut self, view: &GuestView, ranges: &[GuestRange], image: &Image) -> Result<(), Outcome> {
        let fault = |fault: Fault| Err(Err(fault));
        if ranges.len() > MAX_RANGES {
            return fault(Fault::Io(libc::E2BIG));
        }
        let (mut total, mut crooked) = (0u64, 0usize);
        let mut end = 0;
        let mut last: Option<libc::iovec> = None;
        for (index, range) in ranges.iter().enumerate() {
            let span = match view.iovec(*range) {
                Ok(span) => span,
                Err(wrong) => return fault(Fault::Guest(wrong)),
            };
            // SAFETY: index < MAX_RANGES, the size of the slice.
            unsafe { self.buffers.ranges.add(index).write(*range) };
            if span.is_empty() {
                continue;
            }
            total += span.len() as u64;
            match &mut last {
                Some(before) if before.iov_base as usize + before.iov_len == span.base() as usize => {
                    before.iov_len += span.len();
                }
                _ => {
                    if let Some(before) = last {
                        crooked |=
                            before.iov_base as usize & image.memory_mask | before.iov_len & image.length_mask;
                        // SAFETY: end < ranges.len() <= MAX_RANGES, the size of the slice.
                        unsafe { self.buffers.table.add(end).write(before) };
                        end += 1;
                    }
                    last = Some(libc::iovec { iov_base: span.base().cast(), iov_len: span.len() });
                }
            }
        }
        if let Some(before) = last {
            crooked |= before.iov_base as usize & image.memory_mask | before.iov_len & image.length_mask;
            // SAFETY: as above.
            unsafe { self.buffers.table.add(end).write(before) };
            end += 1;
        }
        (self.left, self.end, self.ranges) = (total, end, ranges.len());
        self.way = if crooked == 0 { Way::Straight } else { Way::Bounced };
        Ok(())
    }

    /// What to do next. `map` is the one that was in force at [`Job::begin`].
    #[inline]
    pub fn step(&mut self, map: Option<&Arc<GuestMap>>) -> Step {
        let JobBuffers { table, bounce, .. } = self.buffers;
        match self.way {
            Way::Straight | Way::Tail => {
                let source = if self.way == Way::Tail { Source::Zeros } else { Source::Image };
                let offset = if self.way == Way::Tail { 0 } else { self.offset };
                let count = (self.end - self.first) as u32;
                // SAFETY: first < end <= MAX_RANGES while anything is left; the entry was written by transfer.
                let (table, span) = unsafe { (table.add(self.first), table.add(self.first).read()) };
                let at: *mut u8 = span.iov_base.cast();
                // One call moves at most 2 GiB less a page; the rest follows as after any short transfer.
                let len = span.iov_len.min(1 << 30) as u32;
                match (self.kind, count) {
                    (Kind::Read, 1) => Step::Read { at, len, offset, source },
                    (Kind::Read, _) => Step::ReadV { table, count, offset, source },
                    (_, 1) => Step::Write { at, len, offset },
                    (_, _) => Step::WriteV { table, count, offset },
                }
            }
            Way::Bounced => {
                let len = self.left.min(BOUNCE as u64) as u32;
                if self.kind == Kind::Read {
                    return Step::Read { at: bounce, len, offset: self.offset, source: Source::Image };
                }
                // SAFETY: the bounce buffer is this job's own, and nothing is in flight on it now.
                let buffer = unsafe { std::slice::from_raw_parts_mut(bounce, len as usize) };
                if let Some(map) = map {
                    let view = GuestView::new(map.clone());
                    // Checked at begin, and the map still stands: cannot fail.
                    let _ = self.copy(buffer.len(), |gpa, at, n| view.read(gpa, &mut buffer[at..at + n]));
                }
                Step::Write { at: bounce, len, offset: self.offset }
            }
            Way::Zeros => {
                Step::Write { at: bounce, len: self.left.min(BOUNCE as u64) as u32, offset: self.offset }
            }
            Way::Punch => Step::Allocate {
                mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset: self.offset,
                len: self.left,
            },
            Way::ZeroRange => Step::Allocate {
                mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                offset: self.offset,
                len: self.left,
            },
            Way::Sync => Step::Sync { full: self.full.is_some() },
        }
    }

    /// Bytes that taking the result of the last step, and the next step, may copy.
    #[inline]
    pub fn bounces(&self) -> usize {
        if self.way == Way::Bounced { self.left.min(BOUNCE as u64) as usize } else { 0 }
    }

    /// Takes the result of the last step: bytes moved, or an errno below zero. `None` if there is a next step.
    #[inline]
    pub fn took(&mut self, result: i32, image: &Image, map: Option<&Arc<GuestMap>>) -> Option<Outcome> {
        if result >= 0 {
            self.again = 0;
            match self.kind {
                Kind::Read => {}
                Kind::Flush => {
                    if let Some(errno) = image.lost() {
                        // Two syncs under way at once, and the kernel tells one of them what was lost.
                        return Some(Err(Fault::of_errno(errno)));
                    }
                    if let Some(began) = self.full {
                        image.has_synced_fully(began);
                    }
                }
                Kind::Write | Kind::Discard | Kind::WriteZeroes => image.has_written(),
            }
            return match self.way {
                Way::Sync | Way::Punch | Way::ZeroRange => Some(Ok(())),
                _ => self.moved(result as usize, image, map),
            };
        }
        match -result {
            libc::EAGAIN | libc::EINTR if self.again < MAX_RETRIES => {
                self.again += 1;
                None
            }
            // What statx promised, or what we guessed without it, was not true for this transfer.
            libc::EINVAL if self.way == Way::Straight && image.direct => {
                self.way = Way::Bounced;
                None
            }
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV if self.way == Way::Punch => {
                image.cannot_punch();
                self.without_punch(image)
            }
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV if self.way == Way::ZeroRange => {
                image.cannot_zero();
                self.write_zeros();
                None
            }
            errno => {
                if self.way == Way::Sync {
                    image.sync_failed(errno);
                }
                Some(Err(Fault::of_errno(errno)))
            }
        }
    }

    fn without_punch(&mut self, image: &Image) -> Option<Outcome> {
        if self.kind == Kind::Discard {
            return Some(Ok(()));
        }
        if image.can_zero() {
            self.way = Way::ZeroRange;
        } else {
            self.write_zeros();
        }
        None
    }

    fn write_zeros(&mut self) {
        self.way = Way::Zeros;
        // SAFETY: BOUNCE bytes of the arena belong to this job, and nothing is in flight on them.
        unsafe { self.buffers.bounce.write_bytes(0, BOUNCE) };
    }

    #[inline]
    fn moved(&mut self, bytes: usize, image: &Image, map: Option<&Arc<GuestMap>>) -> Option<Outcome> {
        if bytes as u64 >= self.left && self.way != Way::Bounced {
            return Some(Ok(()));
        }
        self.moved_part(bytes, image, map)
    }

    #[cold]
    fn moved_part(&mut self, bytes: usize, image: &Image, map: Option<&Arc<GuestMap>>) -> Option<Outcome> {
        let mut bytes = bytes as u64;
        let asked = if self.way == Way::Bounced { self.left.min(BOUNCE as u64) } else { self.left };
        let at_end = bytes == 0 || (image.direct && !bytes.is_multiple_of(u64::from(image.offset_align)));
        if self.kind != Kind::Read && bytes == 0 {
            return Some(Err(Fault::Io(libc::EIO)));
        }
        let short_tail = self.kind == Kind::Read && at_end && self.way != Way::Tail && bytes < asked;
        if short_tail && self.offset + self.left > image.bytes() {
            return Some(Err(Fault::BeyondEnd));
        }
        if short_tail && !(image.ends_inside_sector && self.offset + bytes + 512 > image.bytes()) {
            return Some(Err(Fault::Io(libc::EIO)));
        }
        if self.way == Way::Bounced && self.kind == Kind::Read {
            if short_tail {
                // SAFETY: asked <= BOUNCE, and the buffer is this job's own.
                unsafe { self.buffers.bounce.add(bytes as usize).write_bytes(0, (asked - bytes) as usize) };
                bytes = asked;
            }
            // SAFETY: at most BOUNCE bytes of this job's buffer, and the kernel has done with it.
            let buffer = unsafe { std::slice::from_raw_parts(self.buffers.bounce, bytes as usize) };
            if let Some(map) = map {
                let view = GuestView::new(map.clone());
                if let Err(wrong) = self.copy(buffer.len(), |gpa, at, n| view.write(gpa, &buffer[at..at + n]))
                {
                    return Some(Err(Fault::Guest(wrong)));
                }
            }
        }
        self.offset += bytes;
        self.left -= bytes.min(self.left);
        self.moved += bytes;
        if self.left == 0 {
            return Some(Ok(()));
        }
        if matches!(self.way, Way::Straight | Way::Tail) {
            self.skip(bytes as usize);
            if short_tail {
                self.way = Way::Tail;
            }
        }
        None
    }

    /// Takes `bytes` off the front of the table.
    fn skip(&mut self, mut bytes: usize) {
        while bytes > 0 && self.first < self.end {
            // SAFETY: first < end <= MAX_RANGES, written by transfer, and no step is in flight.
            let entry = unsafe { &mut *self.buffers.table.add(self.first) };
            if bytes < entry.iov_len {
                entry.iov_base = entry.iov_base.wrapping_byte_add(bytes);
                entry.iov_len -= bytes;
                return;
            }
            bytes -= entry.iov_len;
            self.first += 1;
        }
    }

    /// Goes through the guest ranges from `moved` on for `len` bytes: guest address, offset from there, how many.
    fn copy<E>(&self, len: usize, mut part: impl FnMut(u64, usize, usize) -> Result<(), E>) -> Result<(), E> {
        let (mut skip, mut at) = (self.moved, 0);
        for index in 0..self.ranges {
            // SAFETY: index < ranges <= MAX_RANGES, written by transfer.
            let range = unsafe { self.buffers.ranges.add(index).read() };
            let size = u64::from(range.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let n = ((size - skip) as usize).min(len - at);
            part(range.gpa + skip, at, n)?;
            (skip, at) = (0, at + n);
            if at == len {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
