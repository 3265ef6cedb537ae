//! The two halves of a backing.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use ioplane_device::{BlockDevice, CoreContext};
use ioplane_memory::{GuestFault, GuestRange, GuestView};

use crate::extents::DiskExtent;

/// What is known of a backing now. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingInfo {
    /// What to call it in messages: a path, or `memory`.
    pub name: String,
    /// Size of the disk.
    pub bytes: u64,
    /// Unit in which the disk is addressed (a power of two, 512 to 4096): what a guest's partition table counts in. Ranges
    /// that are no multiple of it may be refused.
    pub logical_block: u32,
    /// Unit in which writes are cheap (a power of two).
    pub physical_block: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost in a power cut until a flush has completed.
    pub volatile_cache: bool,
    /// Discards free space (otherwise they are accepted and do nothing).
    pub discards: bool,
    /// The block device of this host that it lies on, as `stat` says; it may be no real device (a network file system). `None` if it lies on none.
    pub block_device: Option<BlockDevice>,
}

/// Why an operation failed; becomes a virtio status and a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The disk below reports an error, by errno.
    #[error("input or output error (errno {0})")]
    Io(i32),
    /// No space left below.
    #[error("no space left on the file system of the image")]
    NoSpace,
    /// Reaches past the end of the disk.
    #[error("beyond the end of the disk")]
    BeyondEnd,
    /// A write to a read-only backing.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The guest named memory that it does not have.
    #[error(transparent)]
    Guest(#[from] GuestFault),
}

impl Fault {
    /// The fault that an errno from below means.
    pub fn of_errno(errno: i32) -> Fault {
        match errno {
            libc::ENOSPC | libc::EDQUOT => Fault::NoSpace,
            // The memory behind a region went away between the check and the transfer.
            libc::EFAULT => Fault::Guest(GuestFault::MemoryShrank),
            libc::EROFS => Fault::ReadOnly,
            errno => Fault::Io(errno),
        }
    }
}

/// Most ranges in one read or write, after neighbours have been joined; more end with `Fault::Io(E2BIG)`. A virtio-blk device
/// promises its driver a `seg_max` below this.
pub const MAX_RANGES: usize = 128;

/// [`IoChannel::slice`] of a channel that does not copy on the I/O core: above what guests ask for at once, so that only outsized
/// requests pay for a second turn.
pub const SLICE: u32 = 1 << 20;

/// How an operation ended.
pub type Outcome = Result<(), Fault>;

/// Identifies an operation of one channel, which returns it unchanged. Unique among those in flight, and
/// below the depth that the channel was opened with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(pub u16);

/// One operation. Offsets and lengths in bytes; the ranges together are the length of a read or write.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    /// Disk to guest memory.
    Read {
        /// Where on the disk.
        offset: u64,
        /// Where in guest memory.
        into: &'a [GuestRange],
    },
    /// Guest memory to disk.
    Write {
        /// Where on the disk.
        offset: u64,
        /// Where in guest memory.
        from: &'a [GuestRange],
    },
    /// Everything that has completed before is durable when this has.
    Flush,
    /// The content of the range no longer matters; what is read there afterwards is not said.
    Discard {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// The range reads as zeros afterwards.
    WriteZeroes {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
        /// The space may be freed.
        unmap: bool,
    },
}

/// The answer to [`IoChannel::submit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// Ended already; will not be reaped.
    Done(Outcome),
    /// In flight; [`IoChannel::reap`] will name its tag once.
    Pending,
}

/// The data half of a backing: what one queue's poller does I/O with. Moves between threads, but only between polls.
///
/// Reads into guest memory that are [`Submitted::Pending`] are marked in the dirty log by the poller when they are reaped
/// (invariant 6); what a channel copies itself is marked by the view.
pub trait IoChannel: Send {
    /// Most bytes of one read or write. Copying, and handing pages to the kernel, holds the I/O core for a time that grows with
    /// the bytes, so whoever polls cuts a longer transfer into operations of this size and submits them one by one.
    fn slice(&self) -> u32 {
        SLICE
    }

    /// A read (or a write) of the disk from `offset` may come soon, whose data is in `buffer` first: a hint, which comes from a guest and is
    /// not checked. Changes nothing; for a channel that copies by itself.
    #[inline]
    fn expect(&self, _view: &GuestView, _read: bool, _offset: u64, _buffer: GuestRange) {}

    /// Takes an operation on. At most as many as the channel's depth are in flight. Every guest range is checked here
    /// before anything is done; the channel keeps `view.map()` alive while the operation is in flight. May only note it down
    /// until [`IoChannel::push`].
    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted;

    /// Hands everything noted down to whoever does it. Called once a poll, and only needed after [`Submitted::Pending`].
    fn push(&mut self, context: &mut CoreContext);

    /// Whether something is still noted down after [`IoChannel::push`] (the core's ring has enough of this queue's), or something that has
    /// ended was left by the last [`IoChannel::reap`]: nothing will wake anybody for it, so whoever polls must come again before long.
    fn held_back(&self) -> bool;

    /// What waits for a rate only, and for nothing below, may begin then; the owner comes again at that time. Nothing wakes anybody for it.
    fn held_until(&self) -> Option<Instant> {
        None
    }

    /// Whether the owner waits for the end of all that is in flight, and hands down no more than the rest of that: from then on nothing waits for a rate
    /// ([`IoChannel::held_until`]). Until the owner says otherwise.
    fn set_draining(&mut self, _draining: bool) {}

    /// Calls `done` once for each operation that has ended since, in any order, and says how many those were.
    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize;

    /// How many operations are in flight.
    fn in_flight(&self) -> usize;

    /// Readable (level-triggered) while there is something to reap; `None` if nothing is ever in flight, or only on the core's ring,
    /// and then the core knows.
    fn waker(&self) -> Option<BorrowedFd<'_>>;

    /// Its queue leaves the core of `context`: what is in flight on the core's ring is left to it, and never reaped. Called on
    /// the core, before the channel is dropped or goes to another core.
    fn detach(&mut self, _context: &mut CoreContext) {}
}

/// The control half of a backing. Shared by the queues of one disk; no method is called on an I/O core.
pub trait Backing: Send + Sync + std::fmt::Debug {
    /// What is known of it now.
    fn info(&self) -> BackingInfo;

    /// Opens a channel for a queue that keeps at most `depth` operations in flight. Everything that the channel will ever need is
    /// allocated here.
    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError>;

    /// Changes the size. Shrinking is allowed: operations beyond the new end fail from then on.
    fn resize(&self, bytes: u64) -> Result<(), StorageError>;

    /// Blocks until all I/O of channels that were dropped with operations in flight has ended, or until `deadline`; says
    /// whether it has. Replaying before would race with it.
    fn wait_quiet(&self, deadline: Instant) -> bool;

    /// Which parts of `len` bytes from `offset` on are holes: tells `each` about them in that order, until it says no. What was written before this is called
    /// is never told to be a hole; what is written meanwhile may be. What is not known counts as data, which is all that most backings know. Blocks for as
    /// long as a file system does.
    fn extents(&self, _offset: u64, len: u64, each: &mut dyn FnMut(DiskExtent) -> bool) {
        each(DiskExtent { bytes: len, is_hole: false });
    }

    /// What another process of ours needs to open the same bytes beside this one, if that can be done.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether each flush fails once one has failed, until the backing is opened anew: none can succeed then without what that one has lost.
    fn fails_on(&self) -> bool {
        false
    }

    /// Whoever had this backing before says that none of its I/O is under way: there is nothing to wait for. Only heard by one
    /// that was opened beside another process's.
    fn trust_quiet(&self) {}

    /// The front end has stopped all rings of the disk; it may start them again. What others wait for may be given back, in the background. `migrates`: its
    /// guest may go on elsewhere. A note on a local disk may be waited for.
    fn rest(&self, migrates: bool) {
        let _ = migrates;
    }

    /// Requests in flight will not end before somebody mends a network: whoever stops a queue need not wait for them.
    fn is_stalled(&self) -> bool {
        false
    }

    /// The front end has left, and its guest with it: the next one knows nothing of the disk's content.
    fn forget_guest(&self) {}
}

/// What a backing could not do, for a person.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// Somebody else has the image.
    #[error("{image} is in use by {holder}: shut that down, or use a copy")]
    InUse {
        /// The image.
        image: String,
        /// Who holds it, as far as this host can tell.
        holder: String,
    },
    /// The I/O of a daemon that died has not ended within the time given.
    #[error(
        "{image}: I/O of a process that has ended is still on its way to the disk after {seconds} s: going on now could \
         lose newer data. Wait for the disk, then try again"
    )]
    NotQuiet {
        /// The image.
        image: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The size does not fit.
    #[error("{image}: {bytes} bytes is not a size for a disk: {why}")]
    Size {
        /// The image.
        image: String,
        /// The size.
        bytes: u64,
        /// What is wrong with it.
        why: String,
    },
    /// It looks like an image of another format.
    #[error(
        "{image} looks like a {format} image, and would be served as it stands, as raw: convert it (qemu-img convert -O raw \
         {image} RAW), or say that it is raw (format = raw) if its guest wrote that itself"
    )]
    NotRaw {
        /// The image.
        image: String,
        /// What it looks like.
        format: crate::ImageFormat,
    },
    /// Not something that can be a disk, or not in the way asked for.
    #[error("{image}: {why}")]
    Unsuitable {
        /// The image.
        image: String,
        /// Why, and what would do.
        why: String,
    },
    /// The system said no.
    #[error("{image}: {doing}: {source}")]
    Os {
        /// The image.
        image: String,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}
