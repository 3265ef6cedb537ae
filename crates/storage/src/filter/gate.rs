//! The channel that all filters share: operations are judged, and some kept back.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::channel::{
    Backing, Fault, IoChannel, MAX_RANGES, Op, Outcome, SLICE, StorageError, Submitted, Tag,
};
use crate::orphan::{Orphan, OrphanedIo};

/// What becomes of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    /// To the channel below.
    Pass,
    /// Kept until [`Judge::open`].
    Hold,
    /// Kept until then.
    Until(Instant),
    /// Ends at once, undone.
    Fail(Fault),
    /// Ends undone, but only when it is reaped.
    FailLater(Fault),
}

/// Judges operations. Shared by the channels of a filter.
pub(super) trait Judge: Send + Sync {
    fn judge(&self, op: &Op<'_>) -> Verdict;
    /// Whether what is on hold may go.
    fn open(&self) -> bool {
        true
    }
}

/// An eventfd that is raised by one side and lowered by the other.
#[derive(Debug)]
pub(super) struct Wake {
    event: OwnedFd,
    raised: AtomicBool,
}

impl Wake {
    fn new() -> rustix::io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Wake { event, raised: AtomicBool::new(false) })
    }

    /// Written first, noted after: whoever lowers it meets the write, now or the next time.
    pub fn raise(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        self.raised.store(true, Ordering::Release);
    }

    fn lower(&self) {
        if self.raised.swap(false, Ordering::AcqRel) {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Read { offset: u64 },
    Write { offset: u64 },
    Flush,
    Discard { offset: u64, len: u64 },
    WriteZeroes { offset: u64, len: u64, unmap: bool },
}

/// An operation kept back.
struct Kept {
    verdict: Verdict,
    kind: Kind,
    ranges: Vec<GuestRange>,
    view: Option<GuestView>,
}

pub(super) struct Gate<J: Judge + 'static> {
    inner: Option<Box<Core<J>>>,
    orphans: Arc<OrphanedIo>,
}

struct Core<J> {
    judge: Arc<J>,
    below: Box<dyn IoChannel>,
    kept: Box<[Kept]>,
    waiting: VecDeque<Tag>,
    wake: Arc<Wake>,
    timer: OwnedFd,
    all: OwnedFd,
}

/// A channel of `below` behind `judge`, and what wakes it when the judge opens.
pub(super) fn gate<J: Judge + 'static>(
    below: &dyn Backing,
    depth: u16,
    judge: &Arc<J>,
    orphans: &Arc<OrphanedIo>,
) -> Result<(Box<dyn IoChannel>, Arc<Wake>), StorageError> {
    let name = below.info().name;
    let below = below.channel(depth)?;
    let make = || -> rustix::io::Result<Core<J>> {
        let wake = Arc::new(Wake::new()?);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64;
        epoll::add(&all, &wake.event, data(0), epoll::EventFlags::IN)?;
        epoll::add(&all, &timer, data(1), epoll::EventFlags::IN)?;
        if let Some(waker) = below.waker() {
            epoll::add(&all, waker, data(2), epoll::EventFlags::IN)?;
        }
        let kept = || Kept {
            verdict: Verdict::Pass,
            kind: Kind::Flush,
            ranges: Vec::with_capacity(MAX_RANGES),
            view: None,
        };
        Ok(Core {
            judge: judge.clone(),
            below,
            kept: (0..depth.max(1)).map(|_| kept()).collect(),
            waiting: VecDeque::with_capacity(depth.max(1).into()),
            wake,
            timer,
            all,
        })
    };
    let core = make().map_err(|e| StorageError::Os {
        image: name,
        doing: "making the events of a filter",
        source: e.into(),
    })?;
    let wake = core.wake.clone();
    Ok((Box::new(Gate { inner: Some(Box::new(core)), orphans: orphans.clone() }), wake))
}

impl<J: Judge + 'static> Gate<J> {
    fn core(&mut self) -> &mut Core<J> {
        match &mut self.inner {
            Some(core) => core,
            None => unreachable!("a channel that is being dropped is not called"),
        }
    }
}

impl<J: Judge + 'static> IoChannel for Gate<J> {
    fn slice(&self) -> u32 {
        self.inner.as_ref().map_or(SLICE, |core| core.below.slice())
    }

    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let core = self.core();
        let (kind, ranges): (Kind, &[GuestRange]) = match *op {
            Op::Read { offset, into } => (Kind::Read { offset }, into),
            Op::Write { offset, from } => (Kind::Write { offset }, from),
            Op::Flush => (Kind::Flush, &[]),
            Op::Discard { offset, len } => (Kind::Discard { offset, len }, &[]),
            Op::WriteZeroes { offset, len, unmap } => (Kind::WriteZeroes { offset, len, unmap }, &[]),
        };
        // Every range is checked here, whatever comes after.
        if let Some(wrong) = ranges.iter().find_map(|range| view.iovec(*range).err()) {
            return Submitted::Done(Err(wrong.into()));
        }
        if ranges.len() > MAX_RANGES {
            return Submitted::Done(Err(Fault::Io(libc::E2BIG)));
        }
        let verdict = core.judge.judge(op);
        match verdict {
            Verdict::Pass => return core.below.submit(context, view, op, tag),
            Verdict::Fail(fault) => return Submitted::Done(Err(fault)),
            Verdict::FailLater(_) => core.wake.raise(),
            Verdict::Until(due) if core.waiting.is_empty() => core.alarm(Some(due)),
            Verdict::Until(_) | Verdict::Hold => {}
        }
        let kept = &mut core.kept[usize::from(tag.0)];
        (kept.verdict, kept.kind, kept.view) = (verdict, kind, Some(view.clone()));
        kept.ranges.clear();
        kept.ranges.extend_from_slice(ranges);
        core.waiting.push_back(tag);
        Submitted::Pending
    }

    fn push(&mut self, context: &mut CoreContext) {
        self.core().below.push(context);
    }

    fn held_back(&self) -> bool {
        self.inner.as_ref().is_some_and(|core| core.below.held_back())
    }

    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let core = self.core();
        core.let_go(context, done) + core.below.reap(context, done)
    }

    fn in_flight(&self) -> usize {
        self.inner.as_ref().map_or(0, |core| core.waiting.len() + core.below.in_flight())
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_ref().map(|core| core.all.as_fd())
    }

    fn detach(&mut self, context: &mut CoreContext) {
        self.core().below.detach(context);
    }
}

impl<J> Core<J> {
    /// Sets the timer to `due`, or stops it.
    fn alarm(&self, due: Option<Instant>) {
        let left = due.map_or(Duration::ZERO, |due| {
            due.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1))
        });
        let once = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() },
        };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }
}

impl<J: Judge> Core<J> {
    /// Hands down what may go now, ends what has failed.
    fn let_go(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        self.wake.lower();
        if self.waiting.is_empty() {
            return 0;
        }
        let (now, open) = (Instant::now(), self.judge.open());
        let (mut ended, mut went, mut next) = (0, false, None::<Instant>);
        for _ in 0..self.waiting.len() {
            let Some(tag) = self.waiting.pop_front() else { break };
            let kept = &mut self.kept[usize::from(tag.0)];
            match kept.verdict {
                Verdict::Hold if !open => self.waiting.push_back(tag),
                Verdict::Until(due) if due > now => {
                    next = Some(next.map_or(due, |n| n.min(due)));
                    self.waiting.push_back(tag);
                }
                Verdict::Fail(fault) | Verdict::FailLater(fault) => {
                    kept.view = None;
                    ended += 1;
                    done(tag, Err(fault));
                }
                Verdict::Pass | Verdict::Hold | Verdict::Until(_) => {
                    let op = match kept.kind {
                        Kind::Read { offset } => Op::Read { offset, into: &kept.ranges },
                        Kind::Write { offset } => Op::Write { offset, from: &kept.ranges },
                        Kind::Flush => Op::Flush,
                        Kind::Discard { offset, len } => Op::Discard { offset, len },
                        Kind::WriteZeroes { offset, len, unmap } => Op::WriteZeroes { offset, len, unmap },
                    };
                    let Some(view) = kept.view.take() else { continue };
                    match self.below.submit(context, &view, &op, tag) {
                        Submitted::Pending => went = true,
                        Submitted::Done(outcome) => {
                            ended += 1;
                            done(tag, outcome);
                        }
                    }
                }
            }
        }
        if went {
            self.below.push(context);
        }
        self.alarm(next);
        ended
    }
}

impl<J: Judge> Orphan for Core<J> {
    fn wait(&mut self) {
        // Off the cores: what goes below from here is done there on the spot.
        let mut context = CoreContext::default();
        while !self.waiting.is_empty() || self.below.in_flight() > 0 {
            let mut ready = [PollFd::new(&self.all, PollFlags::IN)];
            let _ = rustix::event::poll(&mut ready, None);
            self.let_go(&mut context, &mut |_, _| {});
            self.below.reap(&mut context, &mut |_, _| {});
        }
    }
}

impl<J: Judge + 'static> Drop for Gate<J> {
    fn drop(&mut self) {
        // What was kept back was accepted: like a request in a slow disk's own queue it is still carried out. What has been
        // handed down is orphaned I/O of the channel below.
        if let Some(core) = self.inner.take().filter(|core| !core.waiting.is_empty()) {
            self.orphans.take(core);
        }
    }
}
