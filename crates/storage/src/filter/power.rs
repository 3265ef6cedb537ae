//! A disk with a volatile cache, whose power can fail.

#![expect(clippy::disallowed_types, reason = "a test disk: its flush is one at a time, and blocks")]

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use rustix::event::{PollFd, PollFlags};

use crate::MemoryBacking;
use crate::channel::{Backing, BackingInfo, Fault, IoChannel, Op, Outcome, StorageError, Submitted, Tag};

const SECTOR: u64 = 512;
/// Sectors that one word of the map of dirty sectors stands for, and that one step of a flush moves at most.
const WORD: u64 = 64;

/// What of the cache survives a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing that was not flushed.
    Nothing,
    /// About half of the sectors that were not flushed, chosen by this seed: a disk may write back what it likes, in any order.
    Some(u64),
}

/// A disk in front of another, which only sees what has been flushed. After [`PowerCut::cut`] the disk in front is dead, and
/// the one below is what a machine would find after the power has come back.
///
/// Keeps a copy of the whole disk in memory; a flush blocks until the disk below has it.
pub struct PowerCut {
    below: Arc<dyn Backing>,
    cache: Arc<MemoryBacking>,
    shared: Arc<Shared>,
}

struct Shared {
    /// A bit for each sector written since the last flush.
    dirty: Box<[AtomicU64]>,
    dead: AtomicBool,
    store: Mutex<Store>,
}

/// The way from the cache to the disk below.
struct Store {
    cache: Box<dyn IoChannel>,
    below: Box<dyn IoChannel>,
    view: GuestView,
    /// Without a ring: what is done below is done on the spot.
    context: CoreContext,
}

impl PowerCut {
    /// Puts a volatile cache in front of `below`, which must have no other user from now on. The disk can grow to four times
    /// its size.
    pub fn new(below: Arc<dyn Backing>) -> Result<Arc<Self>, StorageError> {
        let BackingInfo { name, bytes, .. } = below.info();
        let cache = MemoryBacking::new(bytes)?;
        let map = GuestMap::anonymous(WORD * SECTOR).map_err(|e| StorageError::Os {
            image: name.clone(),
            doing: "making memory for a cache",
            source: std::io::Error::other(e),
        })?;
        let view = GuestView::new(Arc::new(map));
        let context = CoreContext::default();
        let mut store = Store { cache: cache.channel(1)?, below: below.channel(1)?, view, context };
        for at in (0..bytes).step_by((WORD * SECTOR) as usize) {
            store.load(at, (bytes - at).min(WORD * SECTOR)).map_err(|fault| StorageError::Os {
                image: name.clone(),
                doing: "reading the disk into the cache",
                source: std::io::Error::other(fault),
            })?;
        }
        let words = (bytes.saturating_mul(4) / SECTOR).div_ceil(WORD);
        let dirty = (0..words).map(|_| AtomicU64::new(0)).collect();
        let shared = Shared { dirty, dead: AtomicBool::new(false), store: Mutex::new(store) };
        Ok(Arc::new(PowerCut { below, cache, shared: Arc::new(shared) }))
    }

    /// The power fails: all channels answer with errors from now on, and what was not flushed is gone but for what `keep` says.
    /// Returns how many sectors were lost.
    pub fn cut(&self, keep: Keep) -> Result<u64, Fault> {
        let mut store = self.shared.store();
        self.shared.dead.store(true, Ordering::SeqCst);
        let mut state = match keep {
            Keep::Nothing => 0,
            Keep::Some(seed) => seed | 1,
        };
        let mut lost = 0;
        for (index, word) in self.shared.dirty.iter().enumerate() {
            let bits = word.swap(0, Ordering::AcqRel);
            let mut kept = 0;
            if state != 0 && bits != 0 {
                // xorshift64
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                kept = bits & state;
            }
            lost += u64::from((bits & !kept).count_ones());
            store.save(index as u64, kept)?;
        }
        store.whole(Op::Flush)?;
        Ok(lost)
    }

    /// How many bytes would be lost now.
    pub fn unflushed(&self) -> u64 {
        self.shared.dirty.iter().map(|w| u64::from(w.load(Ordering::Acquire).count_ones())).sum::<u64>()
            * SECTOR
    }
}

impl fmt::Debug for PowerCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PowerCut").field("below", &self.below).finish_non_exhaustive()
    }
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for sector in offset / SECTOR..=(offset + len - 1) / SECTOR {
            if let Some(word) = self.dirty.get((sector / WORD) as usize) {
                word.fetch_or(1 << (sector % WORD), Ordering::AcqRel);
            }
        }
    }

    fn flush(&self) -> Outcome {
        let mut store = self.store();
        for (index, word) in self.dirty.iter().enumerate() {
            let bits = word.swap(0, Ordering::AcqRel);
            if let Err(fault) = store.save(index as u64, bits) {
                word.fetch_or(bits, Ordering::AcqRel);
                return Err(fault);
            }
        }
        store.whole(Op::Flush)
    }
}

impl Store {
    /// One operation on the disk below, to its end.
    fn whole(&mut self, op: Op<'_>) -> Outcome {
        run(&mut *self.below, &mut self.context, &self.view, &op)
    }

    fn load(&mut self, at: u64, len: u64) -> Outcome {
        let span = [GuestRange { gpa: 0, len: len as u32 }];
        self.whole(Op::Read { offset: at, into: &span })?;
        run(&mut *self.cache, &mut self.context, &self.view, &Op::Write { offset: at, from: &span })
    }

    /// Copies the sectors of `word` whose bits are set from the cache to the disk below, run by run.
    fn save(&mut self, word: u64, mut bits: u64) -> Outcome {
        while bits != 0 {
            let first = u64::from(bits.trailing_zeros());
            let run_of = u64::from((!(bits >> first)).trailing_zeros()).min(WORD - first);
            let span = [GuestRange { gpa: 0, len: (run_of * SECTOR) as u32 }];
            let offset = (word * WORD + first) * SECTOR;
            match run(&mut *self.cache, &mut self.context, &self.view, &Op::Read { offset, into: &span }) {
                // Cut off by a resize since it was written.
                Err(Fault::BeyondEnd) => {}
                Err(fault) => return Err(fault),
                Ok(()) => self.whole(Op::Write { offset, from: &span })?,
            }
            bits &= !((u64::MAX >> (WORD - run_of)) << first);
        }
        Ok(())
    }
}

fn run(channel: &mut dyn IoChannel, context: &mut CoreContext, view: &GuestView, op: &Op<'_>) -> Outcome {
    if let Submitted::Done(outcome) = channel.submit(context, view, op, Tag(0)) {
        return outcome;
    }
    channel.push(context);
    let mut ended = None;
    while ended.is_none() {
        channel.reap(context, &mut |_, outcome| ended = Some(outcome));
        if ended.is_none()
            && let Some(waker) = channel.waker()
        {
            let _ = rustix::event::poll(&mut [PollFd::new(&waker, PollFlags::IN)], None);
        }
    }
    ended.unwrap_or(Ok(()))
}

impl Backing for PowerCut {
    fn info(&self) -> BackingInfo {
        BackingInfo { volatile_cache: true, bytes: self.cache.info().bytes, ..self.below.info() }
    }

    fn channel(&self, _depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let read_only = self.below.info().read_only;
        Ok(Box::new(PowerChannel { shared: self.shared.clone(), cache: self.cache.channel(1)?, read_only }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        if bytes.div_ceil(SECTOR * WORD) > self.shared.dirty.len() as u64 {
            let why = "a test disk with a cache grows to four times its size at most".into();
            return Err(StorageError::Size { image: self.below.info().name, bytes, why });
        }
        self.below.resize(bytes)?;
        self.cache.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.below.wait_quiet(deadline)
    }
}

struct PowerChannel {
    shared: Arc<Shared>,
    cache: Box<dyn IoChannel>,
    read_only: bool,
}

impl PowerChannel {
    fn now(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>) -> Outcome {
        if self.shared.dead.load(Ordering::SeqCst) {
            return Err(Fault::Io(libc::ENODEV));
        }
        if self.read_only && !matches!(op, Op::Read { .. } | Op::Flush) {
            return Err(Fault::ReadOnly);
        }
        match *op {
            Op::Read { .. } => run(&mut *self.cache, context, view, op),
            Op::Flush => self.shared.flush(),
            Op::Write { offset, from } => {
                run(&mut *self.cache, context, view, op)?;
                self.shared.mark(offset, from.iter().map(|range| u64::from(range.len)).sum());
                Ok(())
            }
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                run(&mut *self.cache, context, view, op)?;
                self.shared.mark(offset, len);
                Ok(())
            }
        }
    }
}

impl IoChannel for PowerChannel {
    fn slice(&self) -> u32 {
        self.cache.slice()
    }

    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, _tag: Tag) -> Submitted {
        Submitted::Done(self.now(context, view, op))
    }

    fn push(&mut self, _context: &mut CoreContext) {}

    fn held_back(&self) -> bool {
        false
    }

    fn reap(&mut self, _context: &mut CoreContext, _done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
