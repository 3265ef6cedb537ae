//! The channel for hosts where io_uring is forbidden: a few threads that make blocking system calls. Same jobs, same answers.
//!
//! ```text
//!   I/O core: submit -> todo (ArrayQueue of tags) --work (eventfd)--> thread: step, took, step, took ...
//!             reap   <- done (ArrayQueue)         <--ready (eventfd)------/
//! ```
//! A tag has exactly one owner at a time: the channel, the queue, or one thread. That is what makes the jobs safe
//! to share without a lock.

#![allow(unsafe_code)]
// UNSAFETY: jobs in cells that are reached only by who holds the tag; no other access to them.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_queue::ArrayQueue;
use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestView};
use rustix::event::EventfdFlags;

use super::arena::{Arena, Maps};
use super::calls;
use super::image::Image;
use super::job::Job;
use crate::channel::{Fault, IoChannel, Op, Outcome, Submitted, Tag};
use crate::orphan::Orphan;

/// Most threads of one channel.
const THREADS: u16 = 4;

struct Task {
    job: Job,
    /// Kept here too, for the thread to copy through; the channel's `maps` keeps it alive.
    map: Option<Arc<GuestMap>>,
}

struct Shared {
    image: Arc<Image>,
    tasks: Box<[UnsafeCell<Task>]>,
    todo: ArrayQueue<u16>,
    done: ArrayQueue<(u16, Outcome)>,
    /// Counts what is in `todo`; a semaphore, on which idle threads block.
    work: OwnedFd,
    /// Counts what was put into `done`.
    ready: OwnedFd,
    closing: AtomicBool,
    _arena: Arena,
}

// SAFETY: `tasks` is reached by tag only, and a tag has one owner at a time (see above); the queues hand it over with
// the ordering that it takes. The rest is Sync by itself.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// The channel as its poller has it.
pub(super) struct ThreadChannel {
    inner: Option<Box<Inner>>,
}

struct Inner {
    shared: Arc<Shared>,
    maps: Maps,
    noted: VecDeque<u16>,
    in_flight: usize,
    /// Reaped, but not yet taken off the count of `ready`.
    owed: i64,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadChannel {
    pub fn new(image: &Arc<Image>, depth: u16) -> std::io::Result<Self> {
        let depth = depth.max(1);
        let (arena, jobs) = Arena::new(depth)?;
        let shared = Arc::new(Shared {
            image: image.clone(),
            tasks: jobs.into_iter().map(|job| UnsafeCell::new(Task { job, map: None })).collect(),
            todo: ArrayQueue::new(depth.into()),
            done: ArrayQueue::new(depth.into()),
            work: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?,
            ready: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
            _arena: arena,
        });
        let mut inner = Box::new(Inner {
            shared,
            maps: Maps::new(depth),
            noted: VecDeque::with_capacity(depth.into()),
            in_flight: 0,
            owed: 0,
            threads: Vec::new(),
        });
        for _ in 0..depth.min(THREADS) {
            let shared = inner.shared.clone();
            let thread = std::thread::Builder::new().name("disk".into()).spawn(move || shared.serve());
            inner.threads.push(thread?);
        }
        image.users.fetch_add(1, Ordering::AcqRel);
        Ok(ThreadChannel { inner: Some(inner) })
    }

    #[inline]
    fn inner(&mut self) -> &mut Inner {
        match &mut self.inner {
            Some(inner) => inner,
            None => unreachable!("a channel that is being dropped is not called"),
        }
    }
}

impl IoChannel for ThreadChannel {
    fn submit(&mut self, _context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let inner = self.inner();
        let image = &inner.shared.image;
        // SAFETY: the tag is not in flight, so the channel owns it.
        let task = unsafe { &mut *inner.shared.tasks[usize::from(tag.0)].get() };
        if let Err(outcome) = task.job.begin(view, op, image) {
            return Submitted::Done(outcome);
        }
        task.job.map = inner.maps.hold(view.map(), image);
        task.map = Some(view.map().clone());
        inner.in_flight += 1;
        inner.noted.push_back(tag.0);
        Submitted::Pending
    }

    fn push(&mut self, _context: &mut CoreContext) {
        let inner = self.inner();
        let mut handed = 0;
        while let Some(tag) = inner.noted.front() {
            if inner.shared.todo.push(*tag).is_err() {
                break;
            }
            inner.noted.pop_front();
            handed += 1;
        }
        if handed > 0 {
            add(&inner.shared.work, handed);
        }
    }

    fn held_back(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| !inner.noted.is_empty())
    }

    fn reap(&mut self, _context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let inner = self.inner();
        let mut ended = 0;
        loop {
            while let Some((tag, outcome)) = inner.shared.done.pop() {
                // SAFETY: a thread has put the tag into `done`, which makes the channel its owner.
                let task = unsafe { &mut *inner.shared.tasks[usize::from(tag)].get() };
                // Never the last of it: `maps` has it too.
                task.map = None;
                inner.maps.release(task.job.map, &inner.shared.image);
                inner.in_flight -= 1;
                inner.owed += 1;
                ended += 1;
                done(Tag(tag), outcome);
            }
            if inner.owed == 0 {
                return ended;
            }
            // A thread adds to `ready` after it has put something into `done`. So what is taken off here is in `done`: look
            // again, or the waker would be quiet with something to reap. What is not added yet is taken off next time.
            let mut count = [0; 8];
            if rustix::io::read(&inner.shared.ready, &mut count).is_err() {
                return ended;
            }
            inner.owed -= u64::from_ne_bytes(count) as i64;
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.in_flight)
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_ref().map(|inner| inner.shared.ready.as_fd())
    }
}

impl Drop for ThreadChannel {
    fn drop(&mut self) {
        let Some(mut inner) = self.inner.take() else { return };
        let image = inner.shared.image.clone();
        image.users.fetch_sub(1, Ordering::AcqRel);
        inner.close();
        if inner.in_flight > 0 {
            image.orphans.take(inner);
        }
    }
}

impl Inner {
    /// Lets every thread end once it has done what it is doing; what is only queued is not begun.
    fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        add(&self.shared.work, u64::from(THREADS));
    }
}

impl Orphan for Inner {
    fn wait(&mut self) {
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Guest memory (`maps`) must not go before the last system call on it has returned.
        self.close();
        self.wait();
    }
}

impl Shared {
    /// The life of one thread.
    fn serve(&self) {
        let mut count = [0; 8];
        loop {
            match rustix::io::read(&self.work, &mut count) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            let Some(tag) = self.todo.pop() else { continue };
            // SAFETY: popped, so this thread owns the tag until it is put into `done`.
            let task = unsafe { &mut *self.tasks[usize::from(tag)].get() };
            let outcome = loop {
                let result = calls::carry_out(&self.image, task.job.step(task.map.as_ref()));
                if let Some(outcome) = task.job.took(result, &self.image, task.map.as_ref()) {
                    break outcome;
                }
                if self.closing.load(Ordering::Acquire) {
                    break Err(Fault::Io(libc::ECANCELED));
                }
            };
            // There is room: at most `depth` tags exist.
            let _ = self.done.push((tag, outcome));
            add(&self.ready, 1);
        }
    }
}

/// Adds to an eventfd. It would only block at 2^64, and the ones here count what is in flight.
fn add(event: &OwnedFd, count: u64) {
    let _ = rustix::io::write(event, &count.to_ne_bytes());
}
