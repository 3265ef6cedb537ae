//! A disk in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView, Mapping, MappingError, Window};
use rustix::event::EventfdFlags;
use rustix::fs::FallocateFlags;

use crate::channel::{
    Backing, BackingInfo, Fault, IoChannel, MAX_RANGES, Op, Outcome, StorageError, Submitted, Tag,
};
use crate::extents::{DiskExtent, FileExtents};

/// Address space that every memory disk has at least, so that it can grow: costs nothing until it is used.
const ROOM: u64 = 16 << 30;
/// [`IoChannel::slice`]: some 15 us of copying.
const COPY: u32 = 128 << 10;
/// Most that one poll zeroes: freeing a page takes the kernel about 0.1 us.
const SLICE: u64 = 1 << 20;

/// A disk in a memfd. Reads and writes are one copy and end at once; nothing survives the process.
///
/// The memfd is mapped once, with room to grow, and stays: a channel never has to learn of another mapping. The size of the
/// disk is one shared number, checked by every operation.
#[derive(Debug)]
pub struct MemoryBacking {
    disk: Arc<Disk>,
    extents: FileExtents,
}

#[derive(Debug)]
struct Disk {
    window: Window,
    mapping: Arc<Mapping>,
    bytes: AtomicU64,
}

impl MemoryBacking {
    /// A disk of `bytes` (a multiple of 512), all zeros, that can grow to four times its size and to 16 GiB at least.
    pub fn new(bytes: u64) -> Result<Arc<Self>, StorageError> {
        check(bytes)?;
        let room = bytes.saturating_mul(4).max(ROOM);
        // Where address space or file sizes are limited, one that cannot grow.
        let disk = Disk::new(bytes, room).or_else(|_| Disk::new(bytes, bytes))?;
        Ok(Arc::new(MemoryBacking { disk: Arc::new(disk), extents: FileExtents::default() }))
    }

    /// The disk of another process, whose memory is in `file` ([`Backing::file`]) and which has `bytes` now. Both see the same
    /// bytes; only one may serve them.
    pub fn adopt(file: OwnedFd, bytes: u64) -> Result<Arc<Self>, StorageError> {
        check(bytes)?;
        let room = rustix::fs::fstat(&file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        if room < bytes {
            let why = format!("the memory that came has {room}");
            return Err(StorageError::Size { image: "memory".into(), bytes, why });
        }
        let disk = Disk::of(Mapping::of_file(file, 0, room), bytes)?;
        Ok(Arc::new(MemoryBacking { disk: Arc::new(disk), extents: FileExtents::default() }))
    }
}

fn check(bytes: u64) -> Result<(), StorageError> {
    if bytes == 0 || !bytes.is_multiple_of(512) {
        let why = "it must be a multiple of 512, and not zero".into();
        return Err(StorageError::Size { image: "memory".into(), bytes, why });
    }
    Ok(())
}

impl Disk {
    fn new(bytes: u64, room: u64) -> Result<Disk, StorageError> {
        Self::of(Mapping::anonymous("disk", room), bytes)
    }

    fn of(mapping: Result<Mapping, MappingError>, bytes: u64) -> Result<Disk, StorageError> {
        let os =
            |source| StorageError::Os { image: "memory".into(), doing: "making a disk in memory", source };
        let mapping = mapping.map_err(|error| match error {
            MappingError::Os(errno) => os(errno.into()),
            other => os(std::io::Error::other(other)),
        })?;
        let mapping = Arc::new(mapping);
        let window = Window::of_mapping(&mapping, 0, mapping.len());
        let window = window.ok_or_else(|| os(std::io::Error::other("the mapping is too short")))?;
        Ok(Disk { window, mapping, bytes: AtomicU64::new(bytes) })
    }

    /// Makes a range read as zeros and gives its pages back.
    fn punch(&self, offset: u64, len: u64) -> Result<(), rustix::io::Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(self.mapping.file(), flags, offset, len) {
                Err(rustix::io::Errno::INTR) => {}
                done => return done,
            }
        }
    }
}

fn fault(done: Result<(), rustix::io::Errno>) -> Outcome {
    done.map_err(|e| Fault::of_errno(e.raw_os_error()))
}

impl Backing for MemoryBacking {
    fn info(&self) -> BackingInfo {
        BackingInfo {
            name: "memory".into(),
            bytes: self.disk.bytes.load(Ordering::Acquire),
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            volatile_cache: false,
            discards: true,
            block_device: None,
        }
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|e| StorageError::Os {
            image: "memory".into(),
            doing: "making an eventfd",
            source: e.into(),
        })?;
        let depth = usize::from(depth.max(1));
        Ok(Box::new(MemoryChannel { disk: self.disk.clone(), slow: Vec::with_capacity(depth), depth, event }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        check(bytes)?;
        let disk = &self.disk;
        if bytes > disk.window.len() as u64 {
            let why = format!("this one can grow to {} at most", disk.window.len());
            return Err(StorageError::Size { image: "memory".into(), bytes, why });
        }
        let before = disk.bytes.load(Ordering::Acquire);
        // What is cut off is gone, and what is added reads as zeros, even if a channel was just writing there as it was cut off.
        if bytes < before {
            disk.bytes.store(bytes, Ordering::Release);
        }
        let cut = bytes.min(before);
        disk.punch(cut, disk.window.len() as u64 - cut).map_err(|e| StorageError::Os {
            image: "memory".into(),
            doing: "giving memory back",
            source: e.into(),
        })?;
        disk.bytes.store(bytes, Ordering::Release);
        Ok(())
    }

    fn wait_quiet(&self, _deadline: Instant) -> bool {
        // What is in flight in a channel (zeroing, by slices) ends with the channel.
        true
    }

    /// Pages that were never touched, or were given back.
    fn extents(&self, offset: u64, len: u64, each: &mut dyn FnMut(DiskExtent) -> bool) {
        let bytes = self.disk.bytes.load(Ordering::Acquire);
        self.extents.seek(self.disk.mapping.file(), bytes, (offset, len), each);
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.disk.mapping.file())
    }
}

/// A long zeroing, done a slice a poll.
#[derive(Debug)]
struct Slow {
    tag: Tag,
    offset: u64,
    left: u64,
}

struct MemoryChannel {
    disk: Arc<Disk>,
    /// Never grows beyond the depth that it was made with.
    slow: Vec<Slow>,
    depth: usize,
    /// Readable while `slow` is not empty.
    event: OwnedFd,
}

impl MemoryChannel {
    #[inline]
    fn fits(&self, offset: u64, len: u64) -> Outcome {
        let bytes = self.disk.bytes.load(Ordering::Acquire);
        if offset.checked_add(len).is_none_or(|end| end > bytes) { Err(Fault::BeyondEnd) } else { Ok(()) }
    }

    /// Checks all of a transfer before anything is copied.
    #[inline]
    fn check(&self, view: &GuestView, offset: u64, ranges: &[GuestRange]) -> Outcome {
        let mut total = 0u64;
        if ranges.len() > MAX_RANGES {
            return Err(Fault::Io(libc::E2BIG));
        }
        for range in ranges {
            view.iovec(*range)?;
            total += u64::from(range.len);
        }
        self.fits(offset, total)
    }

    #[inline]
    fn read(&self, view: &GuestView, offset: u64, into: &[GuestRange]) -> Outcome {
        self.check(view, offset, into)?;
        let mut at = offset as usize;
        for (number, range) in into.iter().enumerate() {
            view.prefetch_store_after(*range, into.get(number + 1));
            view.copy_from(range.gpa, &self.disk.window, at, range.len as usize)?;
            at += range.len as usize;
        }
        self.intact()
    }

    #[inline]
    fn write(&self, view: &GuestView, offset: u64, from: &[GuestRange]) -> Outcome {
        self.check(view, offset, from)?;
        let mut at = offset as usize;
        for range in from {
            view.copy_to(range.gpa, &self.disk.window, at, range.len as usize)?;
            at += range.len as usize;
        }
        self.intact()
    }

    /// The host ran out of memory under the disk: from then on some of it is lost.
    #[inline]
    fn intact(&self) -> Outcome {
        if self.disk.window.poisoned() { Err(Fault::NoSpace) } else { Ok(()) }
    }

    fn zero(&mut self, offset: u64, len: u64, tag: Tag) -> Submitted {
        if let Err(fault) = self.fits(offset, len) {
            return Submitted::Done(Err(fault));
        }
        if len == 0 {
            return Submitted::Done(Ok(()));
        }
        if len <= SLICE {
            return Submitted::Done(fault(self.disk.punch(offset, len)));
        }
        if self.slow.len() == self.depth {
            return Submitted::Done(Err(Fault::Io(libc::EBUSY)));
        }
        if self.slow.is_empty() {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
        self.slow.push(Slow { tag, offset, left: len });
        Submitted::Pending
    }
}

impl IoChannel for MemoryChannel {
    fn slice(&self) -> u32 {
        COPY
    }

    /// Asks for the first lines of both sides of the copy: each is in a page that nobody has touched lately.
    #[inline]
    fn expect(&self, view: &GuestView, read: bool, offset: u64, buffer: GuestRange) {
        if self.fits(offset, buffer.len.into()).is_ok() {
            self.disk.window.prefetch_lines(offset as usize, buffer.len as usize, !read);
            view.prefetch_lines(buffer, read);
        }
    }

    #[inline]
    fn submit(&mut self, _context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        match *op {
            Op::Read { offset, into } => Submitted::Done(self.read(view, offset, into)),
            Op::Write { offset, from } => Submitted::Done(self.write(view, offset, from)),
            Op::Flush => Submitted::Done(Ok(())),
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => self.zero(offset, len, tag),
        }
    }

    #[inline]
    fn push(&mut self, _context: &mut CoreContext) {}

    fn held_back(&self) -> bool {
        false
    }

    #[inline]
    fn reap(&mut self, _context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let Some(slow) = self.slow.first_mut() else { return 0 };
        let slice = slow.left.min(SLICE);
        let outcome = fault(self.disk.punch(slow.offset, slice));
        slow.offset += slice;
        slow.left -= slice;
        if slow.left > 0 && outcome.is_ok() {
            return 0;
        }
        let tag = slow.tag;
        self.slow.remove(0);
        if self.slow.is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        done(tag, outcome);
        1
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.slow.len()
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}
