//! The data half of a [`super::Mirror`]: what one queue of the guest does I/O with.
//!
//! Once the disk has gone on with the new backing everything goes there alone, beside what is still under way to both.
//!
//! A modifying operation takes its range, chooses by the mode where it goes, and gives the range back when it has ended everywhere. One that
//! does not get its range, or no buffer, waits in the order of submission, and all later ones of this queue behind it. Others are only
//! handed on.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::CoreContext;
use ioplane_device::clock::epoch;
use ioplane_memory::{GuestMap, GuestRange, GuestView, Window};
use rustix::event::epoll;

use super::mutation::{SwapRule, removed};
use super::{Choosing, MirrorFault, State, errno};
use crate::channel::{Backing, Fault, IoChannel, MAX_RANGES, Op, Outcome, StorageError, Submitted, Tag};

/// Most bytes of one write, and so of one copy on the I/O core.
const SLICE: u32 = 128 << 10;
/// Mirrored writes of one queue that are under way at once: each has a buffer of [`SLICE`] bytes.
const BUFFERS: u16 = 32;
/// Discards and zeros are done in pieces of so many bytes, so that they hold up no more than that.
const PIECE: u64 = 4 << 20;
/// How many that waited are begun in one poll.
const MOST_BEGUN: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes { unmap: bool },
}

impl Kind {
    fn modifies(self) -> bool {
        matches!(self, Kind::Write | Kind::Discard | Kind::WriteZeroes { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Old,
    New,
}

/// One operation of the guest.
struct Slot {
    kind: Kind,
    /// What is left of it: pieces that have ended are not.
    offset: u64,
    len: u64,
    /// Of this piece: how long it is, and whether its range is ours.
    piece: u64,
    locked: bool,
    both: bool,
    /// The disk has gone on with the new backing, and this channel is still to follow: it alone is asked.
    only_new: bool,
    /// Below, whether it has yet to end there.
    in_old: bool,
    in_new: bool,
    /// How it ended in the old backing: that is how it ended for the guest, unless the disk has gone on with the new one meanwhile.
    outcome: Outcome,
    /// How it ended in the new one, of what went to both.
    in_new_ended: Outcome,
    buffer: Option<u16>,
    /// While it waits, and between two pieces.
    ranges: Vec<GuestRange>,
    view: Option<GuestView>,
}

impl Slot {
    fn part_ended(&mut self, state: &State, side: Side, outcome: Outcome) {
        match (side, outcome) {
            (Side::Old, outcome) => (self.in_old, self.outcome) = (false, outcome),
            (Side::New, outcome) if self.only_new => (self.in_new, self.outcome) = (false, outcome),
            (Side::New, Err(fault)) if !removed(SwapRule::Stale) => {
                self.in_new_ended = Err(fault);
                state.fail(MirrorFault::New(errno(fault)));
                // As if it had not ended yet: it is answered once the new backing is known to be no copy.
                self.in_new = state.holds();
            }
            (Side::New, _) => self.in_new = false,
        }
    }

    fn is_under_way(&self) -> bool {
        self.in_old || self.in_new
    }
}

/// Memory of ours, from which both backings get the same bytes whatever the guest does to its own.
struct Buffers {
    view: GuestView,
    window: Window,
    free: Vec<u16>,
}

impl Buffers {
    fn new(depth: u16) -> Result<Self, StorageError> {
        let count = depth.min(BUFFERS);
        let os = |error: &dyn std::fmt::Display| StorageError::Os {
            image: "mirror".to_owned(),
            doing: "making buffers",
            source: std::io::Error::other(error.to_string()),
        };
        let bytes = u64::from(count) * u64::from(SLICE);
        let view = GuestView::new(Arc::new(GuestMap::anonymous(bytes).map_err(|error| os(&error))?));
        let window = view.window(0, bytes, 1).map_err(|error| os(&error))?;
        Ok(Buffers { view, window, free: (0..count).rev().collect() })
    }

    fn range(buffer: u16, len: u64) -> GuestRange {
        GuestRange { gpa: u64::from(buffer) * u64::from(SLICE), len: len as u32 }
    }

    /// Copies what the guest's ranges hold, once.
    fn fill(&self, buffer: u16, view: &GuestView, ranges: &[GuestRange]) -> Outcome {
        let mut at = usize::from(buffer) * SLICE as usize;
        for range in ranges {
            view.copy_to(range.gpa, &self.window, at, range.len as usize)?;
            at += range.len as usize;
        }
        Ok(())
    }
}

/// What became of an operation that was to begin.
enum Begun {
    /// Its range or a buffer is not to be had.
    Not,
    UnderWay,
    Ended(Outcome),
}

pub(super) struct MirrorChannel {
    old: Box<dyn IoChannel>,
    new: Box<dyn IoChannel>,
    own: Own,
    /// Readable when one of the two has something, if they say so by descriptors.
    wakers: Option<OwnedFd>,
}

/// All but the channels below.
struct Own {
    state: Arc<State>,
    slots: Box<[Slot]>,
    buffers: Buffers,
    waiting: VecDeque<u16>,
    /// When the first of these may begin, if it waits for the rate to which the guest is held.
    held_until: Option<Instant>,
    /// Whoever stops the queue waits for what waits here: no rate holds it.
    draining: bool,
    /// All parts of these have ended: a list of one reap.
    settled: Vec<u16>,
    /// The new backing is not used any more.
    abandoned: bool,
    in_flight: usize,
}

impl MirrorChannel {
    pub fn new(
        old: &Arc<dyn Backing>,
        new: &Arc<dyn Backing>,
        state: &Arc<State>,
        depth: u16,
    ) -> Result<Self, StorageError> {
        let depth = depth.max(1);
        let (old, new, name) = (old.channel(depth)?, new.channel(depth)?, new.info().name);
        let wakers = both_wakers(old.waker(), new.waker()).map_err(|errno| StorageError::Os {
            image: name,
            doing: "making the events of a mirror",
            source: errno.into(),
        })?;
        let slot = || Slot {
            kind: Kind::Read,
            offset: 0,
            len: 0,
            piece: 0,
            locked: false,
            both: false,
            only_new: false,
            in_old: false,
            in_new: false,
            outcome: Ok(()),
            in_new_ended: Ok(()),
            buffer: None,
            ranges: Vec::with_capacity(MAX_RANGES),
            view: None,
        };
        let own = Own {
            state: state.clone(),
            slots: (0..depth).map(|_| slot()).collect(),
            buffers: Buffers::new(depth)?,
            waiting: VecDeque::with_capacity(depth.into()),
            held_until: None,
            draining: false,
            settled: Vec::with_capacity(depth.into()),
            abandoned: false,
            in_flight: 0,
        };
        Ok(MirrorChannel { old, new, own, wakers })
    }

    /// Begins an operation, or its next piece. `ranges` of a write.
    fn begin(
        &mut self,
        context: &mut CoreContext,
        view: &GuestView,
        ranges: &[GuestRange],
        tag: u16,
    ) -> Begun {
        let Own { state, slots, buffers, held_until, draining, .. } = &mut self.own;
        let slot = &mut slots[usize::from(tag)];
        let alone = state.has_failed();
        if slot.kind.modifies() {
            *held_until = None;
        }
        if slot.kind != Kind::Read && state.holds() {
            return Begun::Not;
        }
        slot.piece = if slot.kind == Kind::Write { slot.len } else { slot.len.min(PIECE) };
        (slot.outcome, slot.in_new_ended) = (Ok(()), Ok(()));
        (slot.locked, slot.only_new) = (false, state.is_decided());
        if slot.kind.modifies() && !alone && !slot.only_new {
            let mirroring = state.mirroring.load(std::sync::atomic::Ordering::SeqCst);
            let held = state.hold.is_on() && !mirroring && !*draining;
            let marks = match slot.kind == Kind::Write && held {
                true => state.map.unmarked(slot.offset, slot.piece),
                false => 0,
            };
            if marks > 0
                && let Err(at) = state.hold.take(context.look(), marks)
            {
                *held_until = Some(epoch() + Duration::from_nanos(at));
                return Begun::Not;
            }
            if !state.locks.try_lock(slot.offset, slot.piece) {
                state.hold.give_back(marks);
                return Begun::Not;
            }
            slot.locked = true;
            if state.is_decided() {
                // Whoever waits for the end of all that goes to both may have looked before this had its range.
                state.locks.unlock(slot.offset, slot.piece);
                (slot.locked, slot.only_new) = (false, true);
            }
        }
        if slot.only_new && slot.kind != Kind::Flush && !removed(SwapRule::Settled) {
            // Somebody may have read from the old backing what has yet to land in the new one: what begins later comes after it.
            let read = ranges.iter().map(|range| u64::from(range.len)).sum();
            let len = if slot.kind == Kind::Read { read } else { slot.piece };
            if state.locks.is_locked(slot.offset, len) {
                return Begun::Not;
            }
        }
        // Only once the range is ours: what was copied before is copied, and what is copied later sees the mark.
        let mut choosing = slot.locked.then(|| Choosing::new(state));
        slot.both = !alone
            && !slot.only_new
            && slot.kind != Kind::Read
            && state.mirroring.load(std::sync::atomic::Ordering::SeqCst);
        if slot.both {
            choosing = None;
        }
        if slot.kind == Kind::Flush && removed(SwapRule::FlushBoth) {
            slot.both = false;
        }
        let mut filled = None;
        if slot.both && slot.kind == Kind::Write && !removed(SwapRule::OneRead) {
            let copied = match buffers.free.pop() {
                None => Err(Begun::Not),
                Some(buffer) => buffers.fill(buffer, view, ranges).map(|()| buffer).map_err(|fault| {
                    buffers.free.push(buffer);
                    Begun::Ended(Err(fault))
                }),
            };
            let buffer = match copied {
                Ok(buffer) => buffer,
                Err(begun) => {
                    state.locks.unlock(slot.offset, slot.piece);
                    slot.locked = false;
                    return begun;
                }
            };
            slot.buffer = Some(buffer);
            filled = Some([Buffers::range(buffer, slot.len)]);
        }
        if slot.locked && !slot.both && !removed(SwapRule::Mark) {
            state.map.mark(slot.offset, slot.piece);
        }
        drop(choosing);
        let (view, from) = match &filled {
            Some(range) => (&buffers.view, &range[..]),
            None => (view, ranges),
        };
        let op = match slot.kind {
            Kind::Read => Op::Read { offset: slot.offset, into: ranges },
            Kind::Write => Op::Write { offset: slot.offset, from },
            Kind::Flush => Op::Flush,
            Kind::Discard => Op::Discard { offset: slot.offset, len: slot.piece },
            Kind::WriteZeroes { unmap } => Op::WriteZeroes { offset: slot.offset, len: slot.piece, unmap },
        };
        (slot.in_old, slot.in_new) = (!slot.only_new, slot.both || slot.only_new);
        if slot.in_old
            && let Submitted::Done(outcome) = self.old.submit(context, view, &op, Tag(tag))
        {
            slot.part_ended(state, Side::Old, outcome);
        }
        if slot.in_new
            && let Submitted::Done(outcome) = self.new.submit(context, view, &op, Tag(tag))
        {
            slot.part_ended(state, Side::New, outcome);
        }
        if slot.is_under_way() { Begun::UnderWay } else { self.own.settle(tag) }
    }

    /// Begins what has waited, in its order.
    fn begin_waiting(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let mut ended = 0;
        for _ in 0..MOST_BEGUN {
            let Some(&tag) = self.own.waiting.front() else { break };
            let slot = &mut self.own.slots[usize::from(tag)];
            let ranges = std::mem::take(&mut slot.ranges);
            let Some(view) = slot.view.take() else {
                debug_assert!(false, "what waits has a view");
                break;
            };
            let begun = self.begin(context, &view, &ranges, tag);
            let slot = &mut self.own.slots[usize::from(tag)];
            (slot.ranges, slot.view) = (ranges, Some(view));
            match begun {
                Begun::Not => {
                    // The last piece may have ended on the spot, and the next one waits where it was.
                    break;
                }
                Begun::UnderWay => {
                    self.own.waiting.pop_front();
                }
                Begun::Ended(outcome) => {
                    self.own.waiting.pop_front();
                    self.own.end(tag);
                    ended += 1;
                    done(Tag(tag), outcome);
                }
            }
        }
        ended
    }
}

impl Own {
    /// All parts of a piece have ended: gives back what it had. `Not` if there is another piece, or it is to be read again.
    fn settle(&mut self, tag: u16) -> Begun {
        let Own { state, slots, buffers, .. } = self;
        let slot = &mut slots[usize::from(tag)];
        if slot.kind == Kind::Read && !slot.only_new && state.is_decided() && !removed(SwapRule::ReadAgain) {
            // The old one may have lost something meanwhile, or have failed: the new one says what is there.
            return Begun::Not;
        }
        if slot.both && state.is_decided() && !removed(SwapRule::Decided) {
            // The disk has gone on with the new backing while this was under way: what the old one says is of no consequence.
            slot.outcome = slot.in_new_ended;
        }
        if slot.locked {
            // It may be there in part, in one of the two.
            if slot.both && slot.outcome.is_err() && !state.is_decided() && !removed(SwapRule::MarkFailed) {
                state.map.mark(slot.offset, slot.piece);
            }
            state.locks.unlock(slot.offset, slot.piece);
            slot.locked = false;
        }
        buffers.free.extend(slot.buffer.take());
        if slot.kind.modifies() {
            slot.offset += slot.piece;
            slot.len -= slot.piece;
        }
        match slot.outcome {
            Ok(()) if slot.kind.modifies() && slot.len > 0 => Begun::Not,
            outcome => Begun::Ended(outcome),
        }
    }

    /// The guest is told.
    fn end(&mut self, tag: u16) {
        self.in_flight -= 1;
        self.slots[usize::from(tag)].view = None;
    }

    fn reaped(&mut self, side: Side, tag: Tag, outcome: Outcome) {
        let slot = &mut self.slots[usize::from(tag.0)];
        if side == Side::New && !slot.in_new || side == Side::Old && !slot.in_old {
            // Nobody waits for it: the copy has failed, or the disk has gone on with it.
            return;
        }
        slot.part_ended(&self.state, side, outcome);
        if !slot.is_under_way() {
            self.settled.push(tag.0);
        }
    }

    /// The copy has failed: the guest waits for the old backing only. What the new one still has under way ends for nobody, and keeps its
    /// buffers.
    #[cold]
    fn abandon(&mut self) {
        self.abandoned = true;
        for (tag, slot) in self.slots.iter_mut().enumerate() {
            if std::mem::take(&mut slot.in_new) {
                slot.buffer = None;
                if !slot.in_old {
                    self.settled.push(tag as u16);
                }
            }
        }
    }
}

impl Own {
    /// The disk has gone on with the new backing: of what goes to both nobody waits for the old one, which may be gone. What it still has under way
    /// keeps its buffers.
    #[cold]
    fn pass_on(&mut self) {
        for (tag, slot) in self.slots.iter_mut().enumerate() {
            if slot.both && std::mem::take(&mut slot.in_old) {
                slot.buffer = None;
                if !slot.in_new {
                    self.settled.push(tag as u16);
                }
            }
        }
    }
}

impl IoChannel for MirrorChannel {
    fn slice(&self) -> u32 {
        self.old.slice().min(self.new.slice()).min(SLICE)
    }

    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let (kind, offset, len, ranges): (Kind, u64, u64, &[GuestRange]) = match *op {
            Op::Read { offset, into } => (Kind::Read, offset, 0, into),
            Op::Write { offset, from } => {
                (Kind::Write, offset, from.iter().map(|range| u64::from(range.len)).sum(), from)
            }
            Op::Flush => (Kind::Flush, 0, 0, &[]),
            Op::Discard { offset, len } => (Kind::Discard, offset, len, &[]),
            Op::WriteZeroes { offset, len, unmap } => (Kind::WriteZeroes { unmap }, offset, len, &[]),
        };
        if let Err(fault) = self.own.check(view, kind, (offset, len), ranges) {
            return Submitted::Done(Err(fault));
        }
        let slot = &mut self.own.slots[usize::from(tag.0)];
        (slot.kind, slot.offset, slot.len) = (kind, offset, len);
        // Nobody overtakes those that wait.
        let begun = match kind.modifies() && !self.own.waiting.is_empty() {
            true => Begun::Not,
            false => self.begin(context, view, ranges, tag.0),
        };
        match begun {
            Begun::Ended(outcome) => return Submitted::Done(outcome),
            Begun::UnderWay => {}
            Begun::Not => self.own.waiting.push_back(tag.0),
        }
        self.own.in_flight += 1;
        // What may be begun once more: those that wait, those of several pieces, and reads.
        if matches!(begun, Begun::Not) || !matches!(kind, Kind::Write | Kind::Flush) {
            let slot = &mut self.own.slots[usize::from(tag.0)];
            slot.ranges.clear();
            slot.ranges.extend_from_slice(ranges);
            slot.view = Some(view.clone());
        }
        Submitted::Pending
    }

    fn push(&mut self, context: &mut CoreContext) {
        self.old.push(context);
        self.new.push(context);
    }

    /// What waits for a range is not told when it is free.
    fn held_back(&self) -> bool {
        let failed = !self.own.abandoned && self.own.state.has_failed();
        let waits = !self.own.waiting.is_empty() && self.own.held_until.is_none();
        let passing =
            self.own.state.is_decided() && self.own.slots.iter().any(|slot| slot.both && slot.in_old);
        waits || failed || passing || self.old.held_back() || self.new.held_back()
    }

    fn held_until(&self) -> Option<Instant> {
        self.own.held_until
    }

    fn set_draining(&mut self, draining: bool) {
        self.own.draining = draining;
        // Whatever waits begins in the next poll, or is held anew.
        self.own.held_until = None;
        self.old.set_draining(draining);
        self.new.set_draining(draining);
    }

    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let own = &mut self.own;
        self.old.reap(context, &mut |tag, outcome| own.reaped(Side::Old, tag, outcome));
        self.new.reap(context, &mut |tag, outcome| own.reaped(Side::New, tag, outcome));
        if own.state.has_failed() && !own.state.holds() && !own.abandoned {
            own.abandon();
        }
        if own.state.is_decided() {
            own.pass_on();
        }
        let mut ended = 0;
        while let Some(tag) = own.settled.pop() {
            match own.settle(tag) {
                Begun::Ended(outcome) => {
                    own.end(tag);
                    ended += 1;
                    done(Tag(tag), outcome);
                }
                Begun::Not | Begun::UnderWay => own.waiting.push_back(tag),
            }
        }
        ended + self.begin_waiting(context, done)
    }

    fn in_flight(&self) -> usize {
        self.own.in_flight
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.wakers.as_ref().map(AsFd::as_fd)
    }

    fn detach(&mut self, context: &mut CoreContext) {
        self.old.detach(context);
        self.new.detach(context);
    }
}

impl Own {
    /// Whether an operation can be taken on: what the channels below would refuse, too.
    fn check(
        &self,
        view: &GuestView,
        kind: Kind,
        (offset, len): (u64, u64),
        ranges: &[GuestRange],
    ) -> Outcome {
        if !kind.modifies() {
            return Ok(());
        }
        if offset.checked_add(len).is_none_or(|end| end > self.state.bytes) {
            return Err(Fault::BeyondEnd);
        }
        if ranges.len() > MAX_RANGES || (kind == Kind::Write && len > u64::from(SLICE)) {
            return Err(Fault::Io(libc::E2BIG));
        }
        ranges.iter().try_for_each(|range| view.iovec(*range).map(drop).map_err(Fault::from))
    }
}

impl Drop for MirrorChannel {
    fn drop(&mut self) {
        let Own { state, slots, .. } = &self.own;
        let locked = || slots.iter().filter(|slot| slot.locked);
        if locked().next().is_none() {
            return;
        }
        // Its ranges stay taken, which nobody asks for any more once this has failed.
        state.fail(MirrorFault::Stopped);
        if state.is_decided() && !removed(SwapRule::Left) {
            // What it left behind is the new backing's alone, and whoever starts the queue again waits for that (`Backing::wait_quiet`).
            locked().for_each(|slot| state.locks.unlock(slot.offset, slot.piece));
        }
    }
}

/// One descriptor that is readable while one of both is. None if neither says anything by a descriptor.
fn both_wakers(
    old: Option<BorrowedFd<'_>>,
    new: Option<BorrowedFd<'_>>,
) -> Result<Option<OwnedFd>, rustix::io::Errno> {
    if old.is_none() && new.is_none() {
        return Ok(None);
    }
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for waker in [old, new].into_iter().flatten() {
        epoll::add(&all, waker, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(Some(all))
}
