//! The channel that does its I/O by the ring of the core that its queue is on ([`ioplane_device::CoreIo`]).
//!
//! `submit` notes an operation down; the core hands it to the kernel with those of all other queues, at the end of its turn;
//! `reap` takes what the core has sorted out for this queue. A poller that leaves with operations in flight leaves them to the ring: what
//! they work on (guest memory, tables, the open image with its locks) is kept there until the last has ended. Where there is no ring, off
//! a core, an operation is done on the spot.

#![allow(unsafe_code)]
// UNSAFETY: submits operations whose addresses stay valid until their completion has been seen: guest memory is kept mapped by
// `maps`, tables and bounce buffers by `arena`, the file by `image`. With something in flight none of those is dropped here: `detach`
// gives them to the ring, and a channel that is dropped without it loses them.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use io_uring::IoUring;
use ioplane_device::{CoreContext, FileOp, IoCompletion, IoHandle};
use ioplane_memory::GuestView;
use ioplane_memory::mutation::{Invariant, bound};

use super::arena::{Arena, Maps};
use super::calls;
use super::image::Image;
use super::job::{Job, Source, Step};
use crate::channel::{Fault, IoChannel, Op, Outcome, SLICE, Submitted, Tag};
use crate::mutation::{Promise, removed};
use crate::orphan::CountGuard;

/// [`IoChannel::slice`] of an image that is read and written through the page cache.
const CACHED_SLICE: u32 = 256 << 10;
/// Bytes of bounce buffers that one reap goes through: what else has ended waits.
const MOST_BOUNCED: u64 = 256 << 10;

/// The channel as its poller has it.
#[derive(Debug)]
pub(super) struct RingChannel {
    image: Arc<Image>,
    depth: u16,
    /// Gone once it has been left to a ring; made again if the channel is used after that.
    inner: Option<Box<Inner>>,
}

struct Inner {
    image: Arc<Image>,
    maps: Maps,
    jobs: Box<[Job]>,
    handle: Option<IoHandle>,
    /// For [`CoreContext::attach`], while there is no handle.
    completed: VecDeque<IoCompletion>,
    /// What the ring did not take, in that order.
    held: VecDeque<u16>,
    in_flight: usize,
    /// Something has ended that the last reap has left.
    left: bool,
    /// After the jobs, which point into it.
    _arena: Arena,
    /// Of an orphan. Last: when it goes, all else has gone, the open image too.
    orphan: Option<CountGuard>,
}

/// Whether this process may have rings; else why not.
pub(super) fn probe() -> std::io::Result<()> {
    IoUring::new(1).map(drop)
}

impl RingChannel {
    pub fn new(image: &Arc<Image>, depth: u16) -> std::io::Result<Self> {
        let depth = depth.max(1);
        let inner = Some(Inner::new(image, depth)?);
        image.users.fetch_add(1, Ordering::AcqRel);
        Ok(RingChannel { image: image.clone(), depth, inner })
    }
}

impl IoChannel for RingChannel {
    /// What the page cache has, the kernel copies while it takes a submission.
    fn slice(&self) -> u32 {
        if self.image.direct { SLICE } else { CACHED_SLICE }
    }

    #[inline]
    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let inner = match &mut self.inner {
            Some(inner) => inner,
            none => match Inner::new(&self.image, self.depth) {
                Ok(inner) => none.insert(inner),
                Err(e) => return Submitted::Done(Err(Fault::Io(e.raw_os_error().unwrap_or(libc::ENOMEM)))),
            },
        };
        if let Err(outcome) = inner.jobs[usize::from(tag.0)].begin(view, op, &inner.image) {
            return Submitted::Done(outcome);
        }
        inner.jobs[usize::from(tag.0)].map = inner.maps.hold(view.map(), &inner.image);
        if !inner.attach(context) {
            return Submitted::Done(inner.on_the_spot(tag.0));
        }
        inner.in_flight += 1;
        inner.hand_down(context, tag.0);
        Submitted::Pending
    }

    #[inline]
    fn push(&mut self, context: &mut CoreContext) {
        if let Some(inner) = &mut self.inner
            && !inner.held.is_empty()
        {
            inner.push(context);
        }
    }

    fn held_back(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.left || !inner.held.is_empty())
    }

    #[inline]
    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        match &mut self.inner {
            Some(inner) if inner.in_flight > 0 => inner.reap(context, done),
            _ => 0,
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.in_flight)
    }

    /// The core knows.
    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn detach(&mut self, context: &mut CoreContext) {
        let Some(mut inner) = self.inner.take() else { return };
        let Some((handle, io)) = inner.handle.take().zip(context.io()) else {
            self.inner = Some(inner);
            return;
        };
        if inner.in_flight == 0 {
            inner.completed = io.detach(handle);
            self.inner = Some(inner);
        } else {
            inner.orphan = Some(self.image.orphans.guard());
            io.orphan(handle, inner);
        }
    }
}

impl Drop for RingChannel {
    fn drop(&mut self) {
        self.image.users.fetch_sub(1, Ordering::AcqRel);
        if let Some(inner) = self.inner.take_if(|inner| inner.handle.is_some() && inner.in_flight > 0) {
            debug_assert!(false, "a channel is dropped that was not detached");
            tracing::error!(image = self.image.name, "memory of operations in flight is lost");
            std::mem::forget(inner);
        }
    }
}

impl Inner {
    fn new(image: &Arc<Image>, depth: u16) -> std::io::Result<Box<Self>> {
        let (arena, jobs) = Arena::new(depth)?;
        Ok(Box::new(Inner {
            image: image.clone(),
            maps: Maps::new(depth),
            jobs,
            handle: None,
            completed: VecDeque::with_capacity(usize::from(depth)),
            held: VecDeque::with_capacity(usize::from(depth)),
            in_flight: 0,
            left: false,
            orphan: None,
            _arena: arena,
        }))
    }

    /// Attaches to the core's ring. False if there is none.
    #[inline]
    fn attach(&mut self, context: &mut CoreContext) -> bool {
        if self.handle.is_none() && context.io().is_some() {
            self.handle = context.attach(std::mem::take(&mut self.completed));
        }
        self.handle.is_some()
    }

    /// Gives the next step of a job to the ring, or keeps it back.
    #[inline]
    fn hand_down(&mut self, context: &mut CoreContext, tag: u16) {
        let job = &mut self.jobs[usize::from(tag)];
        if let Some((handle, io)) = self.handle.zip(context.io()) {
            let op = file_op(job.step(self.maps.of(job.map)), &self.image);
            // SAFETY: see the module's note.
            if self.held.is_empty() && unsafe { io.submit(handle, tag, op) } {
                return;
            }
        }
        self.held.push_back(tag);
    }

    /// Tries again with what was kept back.
    #[cold]
    fn push(&mut self, context: &mut CoreContext) {
        let Some((handle, io)) = self.handle.zip(context.io()) else { return };
        while let Some(&tag) = self.held.front() {
            let job = &mut self.jobs[usize::from(tag)];
            let op = file_op(job.step(self.maps.of(job.map)), &self.image);
            // SAFETY: see the module's note.
            if !unsafe { io.submit(handle, tag, op) } {
                return;
            }
            self.held.pop_front();
        }
    }

    #[inline]
    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let Some(handle) = self.handle else { return 0 };
        let (mut ended, mut bounced) = (0, 0);
        self.left = false;
        while let Some(IoCompletion { tag, result }) = context.io().and_then(|io| io.next(handle)) {
            let job = &mut self.jobs[usize::from(tag)];
            bounced += job.bounces();
            if let Some(outcome) = job.took(result, &self.image, self.maps.of(job.map)) {
                self.maps.release(job.map, &self.image);
                self.in_flight -= 1;
                ended += 1;
                done(Tag(tag), outcome);
            } else {
                self.hand_down(context, tag);
            }
            if bounced as u64 >= bound(Invariant::BoundsPolls, MOST_BOUNCED) {
                self.left = true;
                break;
            }
        }
        ended
    }

    /// Does the whole job by system calls.
    #[cold]
    fn on_the_spot(&mut self, tag: u16) -> Outcome {
        let job = &mut self.jobs[usize::from(tag)];
        let map = self.maps.of(job.map);
        let outcome = loop {
            let result = calls::carry_out(&self.image, job.step(map));
            if let Some(outcome) = job.took(result, &self.image, map) {
                break outcome;
            }
        };
        self.maps.release(job.map, &self.image);
        outcome
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("image", &self.image.name).field("in_flight", &self.in_flight).finish()
    }
}

#[inline]
fn file_op(step: Step, image: &Image) -> FileOp {
    let file = image.file.as_raw_fd();
    let of = |source| if source == Source::Image { file } else { image.zeros.as_raw_fd() };
    match step {
        Step::Read { at, len, offset, source } => FileOp::Read { file: of(source), into: at, len, offset },
        Step::ReadV { table, count, offset, source } => {
            FileOp::ReadVectored { file: of(source), table, count, offset }
        }
        Step::Write { at, len, offset } => FileOp::Write { file, from: at, len, offset },
        Step::WriteV { table, count, offset } => FileOp::WriteVectored { file, table, count, offset },
        Step::Sync { .. } if removed(Promise::Flush) => FileOp::Nop,
        Step::Sync { full: true } => FileOp::Sync { file },
        Step::Sync { full: false } => FileOp::SyncData { file },
        Step::Allocate { mode, offset, len } => FileOp::Allocate { file, mode, offset, len },
    }
}
