//! The io_uring lane: one ring a lane.
//!
//! `submit` writes a submission entry, `push` is one system call for all of them, `reap` reads the completion ring. The ring
//! is made with `COOP_TASKRUN` and `TASKRUN_FLAG`: a completion raises a flag in shared memory instead of interrupting the I/O core,
//! and `reap` makes one system call for all that have gathered when it sees the flag; without them (before Linux 5.19) the kernel
//! interrupts the core for each and `reap` never makes a call. `DEFER_TASKRUN` would tie the ring to one thread, and lanes
//! move between cores.

#![allow(unsafe_code)]
// UNSAFETY: pushes submission entries whose addresses stay valid until their completion has been seen: guest memory
// is kept mapped by `maps`, tables and bounce buffers by `arena`, and none of those is dropped before `wait` has returned.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{EnterFlags, IoUring, opcode, squeue};
use ioplane_memory::GuestView;
use ioplane_memory::mutation::{Invariant, bound};

use super::arena::{Arena, Maps};
use super::image::Image;
use super::job::{Job, Source, Step};
use crate::channel::{Fault, IoChannel, Op, Outcome, SLICE, Submitted, Tag};
use crate::mutation::{Promise, removed};
use crate::orphan::Orphan;

/// [`IoChannel::slice`] of an image that is read and written through the page cache.
const CACHED_SLICE: u32 = 256 << 10;
/// Bytes of bounce buffers that one reap goes through: what else has ended waits in the completion ring.
const MOST_BOUNCED: u64 = 256 << 10;

const IMAGE: Fixed = Fixed(0);
const ZEROS: Fixed = Fixed(1);

/// The lane as its poller has it.
#[derive(Debug)]
pub(super) struct RingChannel {
    /// Gone only while it is being dropped.
    inner: Option<Box<Inner>>,
}

struct Inner {
    ring: IoUring,
    image: Arc<Image>,
    maps: Maps,
    jobs: Box<[Job]>,
    /// In the submission ring, but not handed to the kernel, in that order.
    noted: VecDeque<u16>,
    in_flight: usize,
    /// The kernel takes nothing more, for this reason.
    broken: Option<i32>,
    /// Last, for the jobs point into it.
    _arena: Arena,
}

/// A ring on the files of `image`, or why there can be none here.
pub(super) fn ring(image: &Image, depth: u16) -> std::io::Result<IoUring> {
    let entries = u32::from(depth.max(1)).next_power_of_two();
    let ring = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(entries)
        .or_else(|_| IoUring::builder().build(entries))?;
    ring.submitter().register_files(&[image.file.as_raw_fd(), image.zeros.as_raw_fd()])?;
    Ok(ring)
}

impl RingChannel {
    pub fn new(image: &Arc<Image>, depth: u16) -> std::io::Result<Self> {
        let depth = depth.max(1);
        let ring = ring(image, depth)?;
        let (arena, jobs) = Arena::new(depth)?;
        image.users.fetch_add(1, Ordering::AcqRel);
        Ok(RingChannel {
            inner: Some(Box::new(Inner {
                ring,
                image: image.clone(),
                maps: Maps::new(depth),
                jobs,
                noted: VecDeque::with_capacity(usize::from(depth)),
                in_flight: 0,
                broken: None,
                _arena: arena,
            })),
        })
    }

    #[inline]
    fn inner(&mut self) -> &mut Inner {
        match &mut self.inner {
            Some(inner) => inner,
            None => unreachable!("a lane that is being dropped is not called"),
        }
    }
}

impl IoChannel for RingChannel {
    /// What the page cache has, the kernel copies while it takes a submission.
    fn slice(&self) -> u32 {
        self.inner.as_ref().map_or(SLICE, |inner| if inner.image.direct { SLICE } else { CACHED_SLICE })
    }

    #[inline]
    fn submit(&mut self, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let inner = self.inner();
        if let Some(errno) = inner.broken {
            return Submitted::Done(Err(Fault::Io(errno)));
        }
        let job = &mut inner.jobs[usize::from(tag.0)];
        if let Err(outcome) = job.begin(view, op, &inner.image) {
            return Submitted::Done(outcome);
        }
        job.map = inner.maps.hold(view.map(), &inner.image);
        inner.in_flight += 1;
        let entry = entry(job.step(Some(view.map())), tag.0);
        // SAFETY: see the module's note.
        if unsafe { inner.ring.submission().push(&entry) }.is_err() {
            // More in flight than the depth: a bug above, answered instead of lost.
            let map = inner.jobs[usize::from(tag.0)].map;
            inner.maps.release(map, &inner.image);
            inner.in_flight -= 1;
            return Submitted::Done(Err(Fault::Io(libc::EBUSY)));
        }
        inner.noted.push_back(tag.0);
        Submitted::Pending
    }

    #[inline]
    fn push(&mut self) {
        self.inner().push();
    }

    fn held_back(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| !inner.noted.is_empty())
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let inner = self.inner();
        if inner.in_flight == 0 { 0 } else { inner.reap(done) }
    }

    fn in_flight(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.in_flight)
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring lives as long as self does, and so does its descriptor.
        self.inner.as_ref().map(|inner| unsafe { BorrowedFd::borrow_raw(inner.ring.as_raw_fd()) })
    }
}

impl Drop for RingChannel {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        inner.image.users.fetch_sub(1, Ordering::AcqRel);
        if inner.with_kernel() > 0 {
            inner.image.limbo.clone().take(inner);
        }
    }
}

impl Inner {
    /// How many operations the kernel has.
    fn with_kernel(&self) -> usize {
        self.in_flight - self.noted.len()
    }

    #[inline]
    fn push(&mut self) {
        let mut tries = 0;
        while !self.noted.is_empty() && self.broken.is_none() {
            match self.ring.submit() {
                Ok(taken) => {
                    self.noted.drain(..taken.min(self.noted.len()));
                }
                // Not enough memory at the moment: what is left goes with the next push or reap.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) => {}
                Err(e) => self.broken = Some(e.raw_os_error().unwrap_or(libc::EIO)),
            }
            tries += 1;
            if tries == 4 {
                break;
            }
        }
    }

    fn reap(&mut self, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let (mut ended, mut bounced) = (0, 0);
        let (submitter, mut submissions, mut completions) = self.ring.split();
        if submissions.taskrun() {
            // SAFETY: waits for nothing and passes no argument.
            let _ = unsafe { submitter.enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
            completions.sync();
        }
        for completion in &mut completions {
            let tag = completion.user_data() as u16;
            let job = &mut self.jobs[usize::from(tag)];
            bounced += job.bounces();
            if let Some(outcome) = job.took(completion.result(), &self.image, self.maps.of(job.map)) {
                self.maps.release(job.map, &self.image);
                self.in_flight -= 1;
                ended += 1;
                done(Tag(tag), outcome);
            } else {
                let entry = entry(job.step(self.maps.of(job.map)), tag);
                // SAFETY: see the module's note.
                if self.broken.is_none() && unsafe { submissions.push(&entry) }.is_ok() {
                    self.noted.push_back(tag);
                } else {
                    self.maps.release(job.map, &self.image);
                    self.in_flight -= 1;
                    ended += 1;
                    done(Tag(tag), Err(Fault::Io(self.broken.unwrap_or(libc::EBUSY))));
                }
            }
            if bounced as u64 >= bound(Invariant::BoundsPolls, MOST_BOUNCED) {
                break;
            }
        }
        drop((submissions, completions));
        if !self.noted.is_empty() {
            ended += self.push_again(done);
        }
        ended
    }

    /// Hands down what goes on after a short transfer; ends what can no longer be handed down.
    #[cold]
    fn push_again(&mut self, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        self.push();
        let Some(errno) = self.broken else { return 0 };
        let lost = self.noted.len();
        for tag in self.noted.drain(..) {
            self.maps.release(self.jobs[usize::from(tag)].map, &self.image);
            self.in_flight -= 1;
            done(Tag(tag), Err(Fault::Io(errno)));
        }
        lost
    }
}

impl Orphan for Inner {
    fn wait(&mut self) {
        // What the kernel has not been given is never given: whoever replays it does so elsewhere. A short transfer is not
        // continued for the same reason.
        loop {
            let ended = self.ring.completion().count();
            self.in_flight -= ended.min(self.with_kernel());
            if self.with_kernel() == 0 {
                return;
            }
            // Enters without submitting: submit_and_wait would hand down what was only noted. With the flag of
            // COOP_TASKRUN the thread that submitted does its part within a tick, or in its next system call.
            // SAFETY: passes no argument.
            let entered = unsafe {
                self.ring.submitter().enter::<libc::sigset_t>(0, 1, EnterFlags::GETEVENTS.bits(), None)
            };
            if let Err(e) = entered
                && e.raw_os_error() != Some(libc::EINTR)
            {
                // Forbidden since (seccomp): completions still arrive in the ring.
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nothing that the kernel works on may go before it has done. Limbo has waited already: this is for its failure.
        self.wait();
        // The kernel takes a ring apart in its own time: without this the locks of the image would outlive us a little.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("image", &self.image.name).field("in_flight", &self.in_flight).finish()
    }
}

#[inline]
fn entry(step: Step, tag: u16) -> squeue::Entry {
    let of = |source| if source == Source::Image { IMAGE } else { ZEROS };
    match step {
        Step::Read { at, len, offset, source } => {
            opcode::Read::new(of(source), at, len).offset(offset).build()
        }
        Step::ReadV { table, count, offset, source } => {
            opcode::Readv::new(of(source), table, count).offset(offset).build()
        }
        Step::Write { at, len, offset } => opcode::Write::new(IMAGE, at, len).offset(offset).build(),
        Step::WriteV { table, count, offset } => {
            opcode::Writev::new(IMAGE, table, count).offset(offset).build()
        }
        Step::Sync if removed(Promise::Flush) => opcode::Nop::new().build(),
        Step::Sync => opcode::Fsync::new(IMAGE).flags(FsyncFlags::DATASYNC).build(),
        Step::Allocate { mode, offset, len } => {
            opcode::Fallocate::new(IMAGE, len).offset(offset).mode(mode).build()
        }
    }
    .user_data(u64::from(tag))
}
