//! The io_uring of one core: operations on files for all of its pollers, kicks, and sleep.
//!
//! Two kinds. A *deferred* ring (`SINGLE_ISSUER`, `DEFER_TASKRUN`: Linux 6.1) does nothing until its core enters the kernel, so that
//! one call submits, runs what has ended and takes it, and the core sleeps in it: it polls the kicks of resting slots, and the epoll
//! set for all other descriptors. A *plain* ring is what older kernels have: it stands in the core's epoll set, in which the core sleeps,
//! and polls nothing.
//!
//! Files are not registered: what a registered file saves (some 20 ns of an operation) is little beside a disk, and before Linux 6.13 a file
//! that is taken out of the table stays open, with the locks of its image, until every operation that was begun
//! before has ended: one silent disk would keep the images of its neighbours.

#![allow(unsafe_code)]
// UNSAFETY: pushes submission entries. Those of pollers name memory that `CoreIo::submit`'s caller promises to keep; what is given to
// `orphan` is kept here until the last operation has ended. Those of polls name a descriptor, and no memory.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use ioplane_device::{CoreContext, CoreIo, FileOp, IoCompletion, IoHandle};

use crate::readable::Readable;
use crate::registered::RegisteredRing;
use crate::shares::{LEAST_SHARE, admits};

/// Entries of the submission ring: what is queued between two system calls.
const SUBMISSIONS: u32 = 256;

/// Entries of the completion ring, 256 KiB: 512 queues of 32 requests. What does not fit the kernel keeps aside.
const COMPLETIONS: u32 = 16 << 10;

/// Of those, what is left for polls.
const FOR_POLLS: usize = 1024;

/// What `user_data` names: the two highest bits.
const KIND: u64 = 0b11 << 62;
/// An operation: tag, index of its entry, generation of that.
const IO: u64 = 0;
/// A kick: token, generation.
const KICK: u64 = 1 << 62;
/// The epoll set.
const SET: u64 = 2 << 62;
/// What nobody waits for.
const NOBODY: u64 = 3 << 62;

/// Bits of the generation of a poll.
const GENERATION: u64 = (1 << 24) - 1;

/// Which rings to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RingChoice {
    /// The best that the kernel has; none where io_uring is forbidden.
    #[default]
    Best,
    /// As on a kernel before Linux 6.1.
    Plain,
    /// None, as where io_uring is forbidden: a poller that could use one does its I/O on the spot.
    Without,
}

/// What one poller has attached.
struct Entry {
    /// In use.
    attached: bool,
    /// Counts the users of this entry, so that none hears of another's operations.
    generation: u16,
    /// Who is woken.
    slot: usize,
    /// Submitted, and its completion not taken by its owner.
    in_flight: usize,
    completed: VecDeque<IoCompletion>,
    /// Stands in [`CoreRing::to_wake`].
    to_wake: bool,
    /// Of an orphan: what the kernel still works on.
    keep: Option<Box<dyn Send>>,
}

/// A kick that the ring polls. The descriptor is a duplicate.
struct Kick {
    fd: OwnedFd,
    data: u64,
    /// Stands in [`CoreRing::kicked`].
    told: bool,
}

/// The ring of one core.
pub(crate) struct CoreRing {
    ring: IoUring,
    deferred: bool,
    /// Of a deferred ring, which one thread uses.
    registered: Option<RegisteredRing>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// `user_data` of what is in the submission ring and not submitted, in that order.
    queued: VecDeque<u64>,
    /// It was entered since the completion ring was read.
    entered: bool,
    /// With the kernel, of all pollers.
    in_flight: usize,
    /// Operations that have ended since it was made.
    ended: u64,
    most_in_flight: usize,
    orphans: usize,
    /// What orphans have kept that have ended, until the core is between two polls.
    finished: Vec<Box<dyn Send>>,
    /// What orphans had for their completions, until then.
    emptied: Vec<VecDeque<IoCompletion>>,
    kicks: Vec<Option<Kick>>,
    polls: u64,
    /// The epoll set is polled.
    set_polled: bool,
    /// In flight by slot.
    of_slot: Vec<u32>,
    /// Entries with completions since [`CoreRing::take_fired`].
    to_wake: Vec<u32>,
    /// Tokens of kicks since then, each once.
    kicked: Vec<usize>,
    /// The set has news.
    set_fired: bool,
    /// Kicks whose poll has ended by itself: for the epoll set from now on.
    lost_kicks: Vec<usize>,
    /// The kernel takes nothing more, for this reason.
    broken: Option<i32>,
}

impl CoreRing {
    /// A ring, or `None` where this process may have none. Made disabled, so that any thread may make it: [`CoreRing::enable`] first.
    pub(crate) fn new(choice: RingChoice) -> io::Result<Option<Self>> {
        let best = (choice == RingChoice::Best).then(Self::deferred).and_then(Result::ok);
        let (ring, deferred) = match (choice, best) {
            (RingChoice::Without, _) => return Ok(None),
            (_, Some(ring)) => (ring, true),
            (_, None) => match Self::plain() {
                Ok(ring) => (ring, false),
                Err(e) if forbidden(&e) => return Ok(None),
                Err(e) => return Err(e),
            },
        };
        let most_in_flight = (ring.params().cq_entries() as usize).saturating_sub(FOR_POLLS).max(LEAST_SHARE);
        Ok(Some(CoreRing {
            ring,
            deferred,
            registered: None,
            entries: Vec::new(),
            free: Vec::new(),
            queued: VecDeque::with_capacity(SUBMISSIONS as usize),
            entered: false,
            in_flight: 0,
            ended: 0,
            most_in_flight,
            orphans: 0,
            finished: Vec::new(),
            emptied: Vec::new(),
            kicks: Vec::new(),
            polls: 0,
            set_polled: false,
            of_slot: Vec::new(),
            to_wake: Vec::new(),
            kicked: Vec::new(),
            set_fired: false,
            lost_kicks: Vec::new(),
            broken: None,
        }))
    }

    fn deferred() -> io::Result<IoUring> {
        let ring = IoUring::builder()
            .setup_cqsize(COMPLETIONS)
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .setup_r_disabled()
            .dontfork()
            .build(SUBMISSIONS)?;
        if ring.params().is_feature_nodrop() && ring.params().is_feature_ext_arg() {
            Ok(ring)
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOSYS))
        }
    }

    fn plain() -> io::Result<IoUring> {
        let builder = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(COMPLETIONS).dontfork();
            builder
        };
        builder()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(SUBMISSIONS)
            .or_else(|_| builder().build(SUBMISSIONS))
    }

    /// The calling thread is the one that uses it from now on.
    pub(crate) fn enable(&mut self) -> io::Result<()> {
        if self.deferred {
            self.ring.submitter().register_enable_rings()?;
            self.registered = RegisteredRing::enter_in_table(self.descriptor());
        }
        Ok(())
    }

    /// Whether the core sleeps in it. Else it stands in the core's epoll set.
    pub(crate) fn sleeps(&self) -> bool {
        self.deferred && self.broken.is_none()
    }

    /// Its descriptor, readable while something has ended.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring lives as long as self does, and so does its descriptor.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Makes room for so many slots, so that no turn allocates.
    pub(crate) fn reserve(&mut self, slots: usize) {
        let room = |used: usize| slots.saturating_sub(used);
        self.entries.reserve(room(self.entries.len()));
        self.free.reserve(room(self.free.len()));
        self.to_wake.reserve(room(self.to_wake.len()));
        self.kicked.reserve(room(self.kicked.len()));
        self.of_slot.resize(self.of_slot.len().max(slots), 0);
        self.lost_kicks.reserve(room(self.lost_kicks.len()));
        self.finished.reserve(room(self.finished.len()));
        self.emptied.reserve(room(self.emptied.len()));
        self.kicks.reserve(room(self.kicks.len()));
    }

    /// Operations of all pollers that the kernel has.
    pub(crate) fn with_kernel(&self) -> usize {
        self.in_flight
    }

    /// Operations that have ended since it was made.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Pollers that have left with something in flight.
    pub(crate) fn orphans(&self) -> usize {
        self.orphans
    }

    /// Whether something is queued, or an operation in flight. Else nothing but polls can end.
    #[inline]
    pub(crate) fn has_operations(&self) -> bool {
        self.in_flight > 0 || !self.queued.is_empty()
    }

    /// Whether the poller of that slot has something in flight.
    pub(crate) fn serves(&self, slot: usize) -> bool {
        self.of_slot.get(slot).is_some_and(|in_flight| *in_flight > 0)
    }

    /// Whether [`CoreRing::take_fired`] has something.
    #[inline]
    pub(crate) fn has_fired(&self) -> bool {
        !self.to_wake.is_empty() || !self.kicked.is_empty() || self.set_fired || !self.lost_kicks.is_empty()
    }

    /// Moves who is to be woken to the end of `fired`; says whether the epoll set has news, once, if `set_due`.
    pub(crate) fn take_fired(&mut self, fired: &mut Vec<Readable>, set_due: bool) -> bool {
        for index in self.to_wake.drain(..) {
            let entry = &mut self.entries[index as usize];
            if std::mem::take(&mut entry.to_wake) {
                fired.push(Readable::Completion(entry.slot));
            }
        }
        for token in self.kicked.drain(..) {
            if let Some(Some(kick)) = self.kicks.get_mut(token) {
                kick.told = false;
            }
            fired.push(Readable::Kick(token));
        }
        set_due && std::mem::take(&mut self.set_fired)
    }

    /// A kick that the ring can no longer poll: its token and descriptor.
    pub(crate) fn lost_kick(&mut self) -> Option<(usize, OwnedFd)> {
        let token = self.lost_kicks.pop()?;
        self.kicks.get_mut(token)?.take().map(|kick| (token, kick.fd))
    }

    /// Polls `fd` until [`CoreRing::forget_kick`]. Only of a deferred ring.
    pub(crate) fn poll_kick(&mut self, fd: OwnedFd, token: usize) {
        self.polls = (self.polls + 1) & GENERATION;
        let data = KICK | (self.polls << 32) | token as u64;
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true);
        if token >= self.kicks.len() {
            self.kicks.resize_with(token + 1, || None);
        }
        self.kicks[token] = Some(Kick { fd, data, told: false });
        if !self.queue(entry.build(), data) {
            self.lost_kicks.push(token);
        }
        // The descriptor is looked up now: it may be another's number by the next turn.
        self.enter();
    }

    /// Polls it no longer.
    pub(crate) fn forget_kick(&mut self, token: usize) {
        let Some(kick) = self.kicks.get_mut(token).and_then(Option::take) else { return };
        if kick.told {
            self.kicked.retain(|other| *other != token);
        }
        self.queue(opcode::PollRemove::new(kick.data).build(), NOBODY);
        self.enter();
    }

    /// Polls the epoll set `set`.
    pub(crate) fn poll_set(&mut self, set: BorrowedFd<'_>) {
        if !self.set_polled {
            let entry = opcode::PollAdd::new(Fd(set.as_raw_fd()), libc::POLLIN as u32).multi(true);
            self.set_polled = self.queue(entry.build(), SET);
        }
    }

    /// Sleeps until `least` operations or polls have ended, at most for `timeout` (`None`: for ever). Submits what is queued.
    pub(crate) fn sleep(&mut self, least: usize, timeout: Option<Duration>) {
        self.collect();
        if self.has_fired() || self.broken.is_some() {
            return;
        }
        let time = timeout.map(|time| Timespec::new().sec(time.as_secs()).nsec(time.subsec_nanos()));
        let args = time.as_ref().map(|time| SubmitArgs::new().timespec(time));
        let done = self.enter_kernel(least, args.as_ref());
        self.submitted(done);
        self.collect();
        self.drop_finished();
    }

    /// Submits what is queued, and waits for `least` completions.
    fn enter_kernel(&mut self, least: usize, args: Option<&SubmitArgs<'_, '_>>) -> io::Result<usize> {
        let Some(registered) = &self.registered else {
            let submitter = self.ring.submitter();
            return match args {
                Some(args) => submitter.submit_with_args(least, args),
                None => submitter.submit_and_wait(least),
            };
        };
        let submissions = self.ring.submission();
        let (queued, ended) = (submissions.len(), submissions.taskrun() || submissions.cq_overflow());
        drop(submissions);
        // Without it the kernel runs nothing that was deferred.
        let fetch = least > 0 || ended;
        let flags = if fetch { EnterFlags::GETEVENTS } else { EnterFlags::empty() };
        registered.enter(queued as u32, least as u32, flags, args)
    }

    /// Queues an entry.
    #[inline]
    fn queue(&mut self, entry: squeue::Entry, data: u64) -> bool {
        let entry = entry.user_data(data);
        // SAFETY: see the module's note.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.submit_queued();
            // SAFETY: as above.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return false;
            }
        }
        self.queued.push_back(data);
        true
    }

    /// One system call for all that is queued and for all that has ended.
    fn submit_queued(&mut self) {
        if self.broken.is_none() {
            let done = self.enter_kernel(0, None);
            self.submitted(done);
        }
    }

    /// Counts what the kernel has taken.
    fn submitted(&mut self, done: io::Result<usize>) {
        self.entered = true;
        let left = self.ring.submission().len();
        self.queued.drain(..self.queued.len().saturating_sub(left));
        match done {
            Ok(_) => {}
            Err(e) => match e.raw_os_error() {
                // The time of a sleep is up; not enough memory at the moment; a signal. What is left goes with the next call.
                Some(libc::ETIME | libc::EAGAIN | libc::EBUSY | libc::EINTR) => {}
                errno => self.give_up(errno.unwrap_or(libc::EIO)),
            },
        }
    }

    /// The kernel will never take what is queued: it ends with an error.
    #[cold]
    fn give_up(&mut self, errno: i32) {
        self.broken = Some(errno);
        self.lost_kicks.extend((0..self.kicks.len()).filter(|token| self.kicks[*token].is_some()));
        while let Some(data) = self.queued.pop_front() {
            if data & KIND == IO {
                self.completed(data, -errno);
            }
        }
    }

    /// Takes what has ended from the completion ring.
    fn collect(&mut self) {
        self.entered = false;
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            let (data, result, more) =
                (completion.user_data(), completion.result(), cqueue::more(completion.flags()));
            match data & KIND {
                IO => self.completed(data, result),
                KICK => {
                    let token = (data & u64::from(u32::MAX)) as usize;
                    if let Some(Some(kick)) = self.kicks.get_mut(token)
                        && kick.data == data
                    {
                        if !std::mem::replace(&mut kick.told, true) {
                            self.kicked.push(token);
                        }
                        if !more {
                            self.poll_again(token, result);
                        }
                    }
                }
                SET => {
                    self.set_fired = true;
                    self.set_polled &= more;
                }
                _ => {}
            }
        }
    }

    /// The poll of a kick has ended by itself: the completion ring was full, or it cannot be polled.
    #[cold]
    fn poll_again(&mut self, token: usize, result: i32) {
        let Some(Some(kick)) = self.kicks.get(token) else { return };
        let entry = opcode::PollAdd::new(Fd(kick.fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
        let data = kick.data;
        if result < 0 || !self.queue(entry, data) {
            self.lost_kicks.push(token);
        }
    }

    /// Between two polls: gives up what orphans had that have ended.
    #[inline]
    fn drop_finished(&mut self) {
        if !self.emptied.is_empty() || !self.finished.is_empty() {
            self.emptied.clear();
            self.finished.drain(..).for_each(drop_elsewhere);
        }
    }

    /// An operation of a poller has ended.
    fn completed(&mut self, data: u64, result: i32) {
        let index = (data >> 16) as u32 & 0xff_ffff;
        let Some(entry) = self.entries.get_mut(index as usize) else { return };
        debug_assert_eq!(
            entry.generation,
            (data >> 40) as u16,
            "an entry is used again before all has ended"
        );
        self.in_flight -= 1;
        self.ended += 1;
        if entry.attached {
            entry.completed.push_back(IoCompletion { tag: data as u16, result });
            if !std::mem::replace(&mut entry.to_wake, true) {
                self.to_wake.push(index);
            }
            return;
        }
        entry.in_flight -= 1;
        if entry.in_flight == 0 {
            let keep = entry.keep.take();
            self.orphans -= usize::from(keep.is_some());
            self.free.push(index);
            self.finished.extend(keep);
        }
    }

    /// Frees the entry, or leaves it to the last completion.
    fn leave(&mut self, handle: IoHandle, keep: Option<Box<dyn Send>>) -> VecDeque<IoCompletion> {
        let entry = &mut self.entries[handle.0 as usize];
        (entry.attached, entry.to_wake) = (false, false);
        self.of_slot[entry.slot] -= entry.in_flight as u32;
        let mut completed = std::mem::take(&mut entry.completed);
        entry.in_flight -= completed.len();
        completed.clear();
        if entry.in_flight == 0 {
            self.free.push(handle.0);
            self.finished.extend(keep);
        } else if let Some(keep) = keep {
            entry.keep = Some(keep);
            self.orphans += 1;
        }
        completed
    }
}

/// A context with a ring of its own, for whoever steps pollers by hand: [`CoreIo::enter`] after each turn. A plain one may go from thread
/// to thread. Without a ring where this process may have none.
pub fn context_with_ring(choice: RingChoice) -> io::Result<CoreContext> {
    let mut ring = CoreRing::new(choice)?;
    if let Some(ring) = &mut ring {
        ring.enable()?;
        ring.reserve(64);
    }
    Ok(CoreContext::default().with_io(ring.map(|ring| Box::new(ring) as _)))
}

/// Drops what an orphan has kept: to unmap memory and to close an image takes time that no core has. Without a thread it is dropped
/// on the spot.
fn drop_elsewhere(keep: Box<dyn Send>) {
    let _ = std::thread::Builder::new().name("orphaned-io".into()).spawn(move || drop(keep));
}

/// Whether the error says that this process may have no ring, or that the kernel has none.
fn forbidden(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS))
}

impl CoreIo for CoreRing {
    fn attach(&mut self, slot: usize, completed: VecDeque<IoCompletion>) -> IoHandle {
        self.of_slot.resize(self.of_slot.len().max(slot + 1), 0);
        let fresh = |generation| Entry {
            attached: true,
            generation,
            slot,
            in_flight: 0,
            completed,
            to_wake: false,
            keep: None,
        };
        match self.free.pop() {
            Some(index) => {
                let generation = self.entries[index as usize].generation.wrapping_add(1);
                self.entries[index as usize] = fresh(generation);
                IoHandle(index)
            }
            None => {
                self.entries.push(fresh(0));
                IoHandle(self.entries.len() as u32 - 1)
            }
        }
    }

    #[inline]
    unsafe fn submit(&mut self, handle: IoHandle, tag: u16, op: FileOp) -> bool {
        let pollers = self.entries.len() - self.free.len();
        let entry = &mut self.entries[handle.0 as usize];
        if !admits(self.most_in_flight, self.in_flight, pollers, entry.in_flight) {
            return false;
        }
        let data = IO | (u64::from(entry.generation) << 40) | (u64::from(handle.0) << 16) | u64::from(tag);
        entry.in_flight += 1;
        self.of_slot[entry.slot] += 1;
        self.in_flight += 1;
        if let Some(errno) = self.broken {
            self.completed(data, -errno);
            return true;
        }
        let queued = self.queue(submission(op), data);
        if !queued {
            self.in_flight -= 1;
            self.entries[handle.0 as usize].in_flight -= 1;
            self.of_slot[self.entries[handle.0 as usize].slot] -= 1;
        }
        queued
    }

    #[inline]
    fn next(&mut self, handle: IoHandle) -> Option<IoCompletion> {
        let entry = &mut self.entries[handle.0 as usize];
        let completion = entry.completed.pop_front()?;
        entry.in_flight -= 1;
        self.of_slot[entry.slot] -= 1;
        Some(completion)
    }

    fn in_flight(&self, handle: IoHandle) -> usize {
        self.entries[handle.0 as usize].in_flight
    }

    fn detach(&mut self, handle: IoHandle) -> VecDeque<IoCompletion> {
        self.leave(handle, None)
    }

    fn orphan(&mut self, handle: IoHandle, keep: Box<dyn Send>) {
        let completed = self.leave(handle, Some(keep));
        self.emptied.push(completed);
        // What was only queued is submitted, too: its owner waits for its end as for that of all others.
        self.submit_queued();
    }

    #[inline]
    fn enter(&mut self) {
        let work = {
            let submissions = self.ring.submission();
            submissions.taskrun() || submissions.cq_overflow()
        };
        if work || !self.queued.is_empty() {
            self.submit_queued();
        }
        // The kernel writes completions of a deferred ring only while it is entered.
        if self.entered || !self.deferred {
            self.collect();
        }
        self.drop_finished();
    }

    fn wait(&mut self, timeout: Duration) -> bool {
        self.enter();
        let something =
            |ring: &CoreRing| ring.entries.iter().any(|entry| entry.attached && !entry.completed.is_empty());
        if !something(self) {
            self.to_wake.clear();
            self.sleep(1, Some(timeout));
            // The thread may only have been interrupted for what has ended.
            self.enter();
        }
        something(self)
    }
}

impl Drop for CoreRing {
    /// Nothing that the kernel works on may go before it has done.
    fn drop(&mut self) {
        // By another thread its index would name another ring. Its entry goes with the thread that made it.
        self.registered = self.registered.take().filter(RegisteredRing::is_here);
        while self.orphans > 0 && self.broken.is_none() {
            self.take_fired(&mut Vec::new(), true);
            self.lost_kicks.clear();
            self.sleep(1, None);
        }
        for entry in &mut self.entries {
            // The kernel may still write there: better lost than used again.
            std::mem::forget(entry.keep.take());
        }
        if let Some(registered) = self.registered.take() {
            registered.remove(self.descriptor());
        }
    }
}

impl fmt::Debug for CoreRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoreRing")
            .field("deferred", &self.deferred)
            .field("in_flight", &self.in_flight)
            .field("orphans", &self.orphans)
            .finish_non_exhaustive()
    }
}

#[inline]
fn submission(op: FileOp) -> squeue::Entry {
    match op {
        FileOp::Read { file, into, len, offset } => {
            opcode::Read::new(Fd(file), into, len).offset(offset).build()
        }
        FileOp::ReadVectored { file, table, count, offset } => {
            opcode::Readv::new(Fd(file), table, count).offset(offset).build()
        }
        FileOp::Write { file, from, len, offset } => {
            opcode::Write::new(Fd(file), from, len).offset(offset).build()
        }
        FileOp::WriteVectored { file, table, count, offset } => {
            opcode::Writev::new(Fd(file), table, count).offset(offset).build()
        }
        FileOp::Sync { file } => opcode::Fsync::new(Fd(file)).build(),
        FileOp::SyncData { file } => opcode::Fsync::new(Fd(file)).flags(FsyncFlags::DATASYNC).build(),
        FileOp::Allocate { file, mode, offset, len } => {
            opcode::Fallocate::new(Fd(file), len).offset(offset).mode(mode).build()
        }
        FileOp::Nop => opcode::Nop::new().build(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Write, pipe};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    const KINDS: [RingChoice; 2] = [RingChoice::Best, RingChoice::Plain];

    fn ring(choice: RingChoice) -> CoreRing {
        let mut ring = CoreRing::new(choice).unwrap().expect("this process may have a ring");
        ring.enable().unwrap();
        ring
    }

    /// One byte from the pipe, into memory that is never given back.
    fn read(ring: &mut CoreRing, handle: IoHandle, tag: u16, from: &PipeReader) -> bool {
        let into: &'static mut u8 = Box::leak(Box::new(0));
        let op = FileOp::Read { file: from.as_raw_fd(), into, len: 1, offset: 0 };
        // SAFETY: the memory is never given back.
        unsafe { ring.submit(handle, tag, op) }
    }

    #[test]
    fn a_poller_over_its_share_is_refused_until_some_have_ended() {
        for choice in KINDS {
            let mut ring = ring(choice);
            ring.most_in_flight = 100;
            let (from, mut to) = pipe().unwrap();
            let [greedy, modest] = [0, 1].map(|slot| ring.attach(slot, VecDeque::with_capacity(256)));
            let taken = (0..200).take_while(|tag| read(&mut ring, greedy, *tag, &from)).count();
            assert_eq!(taken, 50, "a half is left to the other");
            let taken = (0..200).take_while(|tag| read(&mut ring, modest, *tag, &from)).count();
            assert_eq!(taken, 22, "half of that, but for what is left to newcomers");
            assert!(!read(&mut ring, greedy, 99, &from));
            to.write_all(&[0; 72]).unwrap();
            let mut told = 0;
            while told < 72 {
                assert!(CoreIo::wait(&mut ring, Duration::from_secs(20)), "{told} have ended");
                told += [greedy, modest]
                    .map(|handle| std::iter::from_fn(|| ring.next(handle)).count())
                    .iter()
                    .sum::<usize>();
            }
            assert!(read(&mut ring, greedy, 99, &from));
            assert_eq!(
                (ring.in_flight(greedy), ring.in_flight(modest), ring.serves(0), ring.serves(1)),
                (1, 0, true, false)
            );
            to.write_all(&[0]).unwrap();
            assert!(CoreIo::wait(&mut ring, Duration::from_secs(20)));
            assert_eq!(ring.next(greedy), Some(IoCompletion { tag: 99, result: 1 }));
        }
    }

    #[test]
    fn what_the_kernel_refuses_ends_with_its_error_and_kicks_are_given_back() {
        for choice in KINDS {
            let mut ring = ring(choice);
            let (from, _to) = pipe().unwrap();
            let handle = ring.attach(3, VecDeque::with_capacity(8));
            if ring.sleeps() {
                ring.poll_kick(eventfd(0, EventfdFlags::CLOEXEC).unwrap(), 3);
            }
            assert!(read(&mut ring, handle, 1, &from));
            let kicks = usize::from(ring.sleeps());
            ring.give_up(libc::EPERM);
            assert!(read(&mut ring, handle, 2, &from));
            let ended = [1, 2].map(|tag| IoCompletion { tag, result: -libc::EPERM });
            assert_eq!(std::iter::from_fn(|| ring.next(handle)).collect::<Vec<_>>(), ended);
            assert_eq!(std::iter::from_fn(|| ring.lost_kick()).count(), kicks);
            assert!(!ring.sleeps(), "nobody may sleep in it");
        }
    }

    #[test]
    fn a_kick_is_told_once_each_time_until_it_is_forgotten() {
        let mut ring = ring(RingChoice::Best);
        if !ring.sleeps() {
            return eprintln!("SKIPPED (cannot be had here): a ring with DEFER_TASKRUN");
        }
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        ring.poll_kick(kick.try_clone().unwrap(), 5);
        let fired = |ring: &mut CoreRing| {
            ring.sleep(1, Some(Duration::from_millis(1)));
            let mut fired = Vec::new();
            assert!(!ring.take_fired(&mut fired, true));
            fired
        };
        assert_eq!(fired(&mut ring), []);
        for _ in 0..3 {
            // Never lowered: each write is an event.
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            assert_eq!(fired(&mut ring), [Readable::Kick(5)]);
            assert_eq!(fired(&mut ring), []);
        }
        let kicks = |ring: &mut CoreRing| {
            for _ in 0..3 {
                rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
                ring.enter();
            }
        };
        kicks(&mut ring);
        assert_eq!(fired(&mut ring), [Readable::Kick(5)], "several kicks between two looks are one");
        kicks(&mut ring);
        ring.forget_kick(5);
        assert!(!ring.has_fired(), "what uses the token next is told of a kick that was not its own");
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(fired(&mut ring), []);
    }
}
