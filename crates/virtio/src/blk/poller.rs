//! Virtio-blk on an I/O core.
//!
//! One poll moves a bounded number of bytes, whatever is asked for: a transfer longer than [`IoChannel::slice`] is submitted slice by slice.
//! Between two slices it waits in `Work::waiting`; it is in flight, in the ring and in the journal, until the last one has
//! ended. Draining finishes it. Suspending, or a crash, leaves it in flight as a whole: it is taken again from its first byte.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{Armed, Budget, Change, CoreContext, PollCost, PollOutcome, Poller, Wakers};
use ioplane_scheduler::LARGEST_SLICE;
use ioplane_storage::{Fault, IoChannel, Op, Outcome, Submitted, Tag};

use super::Shared;
use super::channels::{ChannelExchange, Channels};
use super::lists::BufferLists;
use super::request::{BlkRequest, cut, expected_transfer};
use super::scratch::{self, Scratch};
use super::spec::*;
use crate::buffers::Writer;
use crate::cost::{self, COST_OF_BUFFER};
use crate::device::{QueueStart, RingState};
use crate::kill::{self, KillPoint};
use crate::queue::{Phase, Queue};
use crate::ring::{RingFault, RingRequest};

/// Requests taken between two publications.
const BATCH: u32 = 8;
/// What submitting anything but a transfer costs, beside the bytes that it frees: about a system call.
const COST_OF_CALL: u64 = 8 << 10;
/// How many bytes are freed in the time in which one is copied.
const FREED_PER_COPIED: u64 = 4;
/// Most bytes that the core frees by itself for one request.
const MOST_FREED: u64 = 1 << 20;
/// Requests ended by the storage that one poll answers.
const MOST_ENDED: u32 = 128;

/// What a request in flight is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its own operation.
    Own,
    /// The flush that write-through puts behind a write.
    FlushBehind,
}

/// A request that the storage has not answered yet.
#[derive(Debug)]
struct PendingRequest {
    taken: RingRequest,
    status: u64,
    started: Instant,
    /// Where on the disk a transfer begins.
    offset: u64,
    bytes: u32,
    /// Bytes of a transfer whose slices have ended.
    done: u32,
    /// Bytes of the slice after those: all of them, unless it is sliced.
    slice: u32,
    stage: Stage,
    read: bool,
    write: bool,
}

impl PendingRequest {
    /// Whether a transfer goes on after this slice.
    #[inline]
    fn goes_on(&self) -> bool {
        self.stage == Stage::Own && self.done + self.slice < self.bytes
    }

    /// Bytes of a transfer whose slices have not ended, as far as is known.
    fn left(&self) -> u32 {
        self.bytes - self.done
    }

    /// Whether it is carried out in slices.
    #[inline]
    fn sliced(&self) -> bool {
        self.slice < self.bytes
    }
}

/// The poller of one queue of a disk.
pub struct BlkPoller {
    queue: Queue,
    work: Work,
}

/// All but the queue, so that both can be borrowed at once.
struct Work {
    channel: Channels,
    /// Of the queue.
    index: u16,
    shared: Arc<Shared>,
    /// The driver cannot flush.
    flushless: bool,
    /// Requests that the storage has not answered yet, by head.
    pending: Box<[Option<PendingRequest>]>,
    /// The buffers of reads among them, to mark them in the dirty log when they have ended, and of what is carried out in slices.
    lists: BufferLists,
    /// Requests whose next slice has not been submitted, by head.
    waiting: VecDeque<u16>,
    /// [`IoChannel::slice`].
    slice: u32,
    /// What this poll may cost, and has cost.
    cost: PollCost,
    /// What is left of what it may hand to the storage; `None` without a bound.
    room: Option<u64>,
    /// A request or a slice did not fit into that.
    roomless: bool,
    /// The slices of the last poll left nothing for new requests, which come first in the next.
    sliced_last: bool,
    /// What the channel has said and nobody has acted on: never longer than the ring.
    ended: Vec<(Tag, Outcome)>,
    /// Requests completed and not yet counted in the histogram, all taken at `since`.
    fresh: u64,
    since: Option<Instant>,
    /// When this poll took up what the storage has ended, while that is answered.
    reaped: Option<Instant>,
    /// The poll has done something since the last look at the clock.
    worked: bool,
}

impl BlkPoller {
    pub(super) fn new(
        start: QueueStart,
        channel: Box<dyn IoChannel>,
        shared: Arc<Shared>,
        flushless: bool,
    ) -> Self {
        let size = usize::from(start.ring.size());
        let channel = Channels::new(channel);
        let work = Work {
            slice: slice_of(&channel),
            channel,
            index: start.index,
            shared,
            flushless,
            pending: (0..size).map(|_| None).collect(),
            lists: BufferLists::new(size),
            waiting: VecDeque::with_capacity(size),
            cost: PollCost::default(),
            room: None,
            roomless: false,
            sliced_last: false,
            ended: Vec::with_capacity(size),
            fresh: 0,
            since: None,
            reaped: None,
            worked: false,
        };
        BlkPoller { queue: Queue::new(start), work }
    }

    /// Takes it apart. Requests in flight stay in the state, and their I/O is left to the storage to see to its end.
    pub(super) fn into_state(self: Box<Self>) -> RingState {
        let BlkPoller { queue, work } = *self;
        drop(work);
        queue.into_state()
    }
}

impl Drop for Work {
    /// What is in flight stays so in the ring and its journal; the channel's orphaned I/O is seen to its end.
    fn drop(&mut self) {
        self.pending.iter_mut().filter_map(Option::take).for_each(|pending| pending.taken.abandon());
    }
}

impl Work {
    /// Takes up to `budget` requests on; says how many.
    #[inline]
    fn take(
        &mut self,
        scratch: &mut Scratch,
        context: &mut CoreContext,
        queue: &mut Queue,
        budget: u32,
        now: &mut Option<Instant>,
    ) -> Result<u32, RingFault> {
        let mut count = 0;
        self.look_ahead(queue, budget);
        while count < budget && !self.cost.is_used_up() {
            let Some((taken, replayed)) = queue.ring.take(&mut scratch.chain)? else { break };
            count += 1;
            self.cost.spend(u64::from(scratch.chain.descriptors()) * COST_OF_BUFFER);
            let now = *now.get_or_insert_with(|| self.begins(context));
            self.worked = true;
            let head = taken.head();
            match scratch.parser.parse(queue.ring.view(), &scratch.chain, head) {
                Ok(ask)
                    if self.has_room(&ask, scratch.parser.data_bytes())
                        && self.admits(context, &ask, scratch.parser.data_bytes()) =>
                {
                    self.begin(scratch, context, queue, taken, ask, now);
                }
                Ok(_) => {
                    // It stays the guest's, as those behind it do: a stop does not wait for a limit, nor for others of its group.
                    queue.ring.rewind(taken);
                    count -= 1;
                    break;
                }
                Err(fault) => {
                    taken.abandon();
                    return Err(fault);
                }
            }
            if replayed {
                queue.tally.replayed += 1;
                kill::here(KillPoint::Replayed);
            }
        }
        Ok(count)
    }

    /// When what this poll does next begins. Looks at the clock, unless nothing was done since the last look.
    #[inline]
    fn begins(&self, context: &mut CoreContext) -> Instant {
        if self.worked { context.look() } else { context.work_begins() }
    }

    /// Asks for what the next requests need, at most `most`, of all of them before the first is taken: rings, tables, headers, and
    /// where the storage copies itself both ends of the copy. What is found out here is a hint, and checked by nobody.
    #[inline]
    fn look_ahead(&self, queue: &mut Queue, most: u32) {
        let ahead = queue.ring.look_ahead(most as usize);
        let view = queue.ring.view();
        for request in ahead.requests() {
            if u64::from(request.first.len) < HEADER_BYTES {
                continue;
            }
            let Ok(header) = view.bytes::<{ HEADER_BYTES as usize }>(request.first.gpa) else { continue };
            if let Some((read, offset)) = expected_transfer(&header) {
                self.channel.expect(view, read, offset, request.second);
            }
        }
    }

    /// Bytes of the next piece of a transfer of which so many are left.
    #[inline]
    fn piece(&self, left: u32) -> u32 {
        let slice = if self.room.is_some() { self.slice.min(LARGEST_SLICE as u32) } else { self.slice };
        left.min(slice)
    }

    /// Whether so many bytes may be handed to the storage; if not, notes it.
    #[inline]
    fn fits(&mut self, bytes: u32) -> bool {
        let fits = self.room.is_none_or(|room| u64::from(bytes) <= room);
        self.roomless |= !fits;
        fits
    }

    /// Whether what is handed to the storage first may be, of a request with so much data.
    #[inline]
    fn has_room(&mut self, ask: &BlkRequest, bytes: u64) -> bool {
        let transfers = matches!(ask, BlkRequest::Read { .. } | BlkRequest::Write { .. });
        self.room.is_none() || !transfers || self.fits(self.piece(bytes as u32))
    }

    /// Whether the limits let a request with so much data pass.
    #[inline]
    fn admits(&self, context: &mut CoreContext, ask: &BlkRequest, bytes: u64) -> bool {
        !context.has_limits() || self.ask_limits(context, ask, bytes)
    }

    fn ask_limits(&self, context: &mut CoreContext, ask: &BlkRequest, bytes: u64) -> bool {
        let passed = match ask {
            // One that cannot be done moves no bytes, however many it names: a limit that is its group's as well does not pay for them.
            BlkRequest::Read { offset } if self.shared.allows(*offset, bytes, false).is_ok() => {
                context.admit(bytes)
            }
            BlkRequest::Write { offset } if self.shared.allows(*offset, bytes, true).is_ok() => {
                context.admit(bytes)
            }
            BlkRequest::Flush => context.reserve(),
            BlkRequest::Discard { len, .. } | BlkRequest::WriteZeroes { len, .. } => {
                context.admit(cost_of_freeing(*len))
            }
            _ => context.admit(0),
        };
        passed.is_ok()
    }

    /// Carries one request as far as it goes now.
    #[inline]
    fn begin(
        &mut self,
        scratch: &mut Scratch,
        context: &mut CoreContext,
        queue: &mut Queue,
        taken: RingRequest,
        ask: BlkRequest,
        started: Instant,
    ) {
        kill::here(KillPoint::Parsed);
        if let BlkRequest::Read { offset } | BlkRequest::Write { offset } = ask {
            kill::at_offset(offset);
        }
        let (read, write) = (
            matches!(ask, BlkRequest::Read { .. }),
            matches!(ask, BlkRequest::Write { .. } | BlkRequest::WriteZeroes { .. }),
        );
        let parser = &scratch.parser;
        let (data, bytes, status) = (parser.data(), parser.data_bytes(), parser.status());
        let offset = match ask {
            BlkRequest::Read { offset } | BlkRequest::Write { offset } => offset,
            _ => 0,
        };
        let (bytes, slice, done) = (bytes as u32, bytes as u32, 0);
        let pending = PendingRequest {
            taken,
            status,
            started,
            offset,
            bytes,
            done,
            slice,
            stage: Stage::Own,
            read,
            write,
        };
        let op = match ask {
            BlkRequest::Read { offset } => {
                self.shared.allows(offset, bytes.into(), false).map(|()| Op::Read { offset, into: data })
            }
            BlkRequest::Write { offset } => {
                self.shared.allows(offset, bytes.into(), true).map(|()| Op::Write { offset, from: data })
            }
            BlkRequest::Flush => Ok(Op::Flush),
            BlkRequest::Discard { offset, len } => {
                self.shared.allows(offset, len, true).map(|()| Op::Discard { offset, len })
            }
            BlkRequest::WriteZeroes { offset, len, unmap } => {
                self.shared.allows(offset, len, true).map(|()| Op::WriteZeroes { offset, len, unmap })
            }
            BlkRequest::Id => {
                let copied = Writer::new(queue.ring.view(), data).write(&self.shared.id);
                let code = if copied.is_ok() { VIRTIO_BLK_S_OK } else { VIRTIO_BLK_S_IOERR };
                return self.answer(queue, pending.taken, status, code, VIRTIO_BLK_ID_BYTES as u32 + 1);
            }
            BlkRequest::Refuse(code) => {
                match code {
                    VIRTIO_BLK_S_UNSUPP => queue.tally.unsupported += 1,
                    _ => queue.tally.errors_request += 1,
                }
                return self.answer(queue, pending.taken, status, code, 1);
            }
        };
        let cost = match op {
            Ok(Op::Read { .. } | Op::Write { .. }) if bytes > self.piece(bytes) => {
                return self.begin_slices(scratch, context, queue, pending);
            }
            Ok(Op::Read { .. } | Op::Write { .. }) => bytes.into(),
            Ok(Op::Discard { len, .. } | Op::WriteZeroes { len, .. }) => cost_of_freeing(len),
            Ok(Op::Flush) | Err(_) => 0,
        };
        let tag = Tag(pending.taken.head());
        let submitted = op.map(|op| self.channel.submit(context, queue.ring.view(), &op, tag));
        self.cost.spend(cost);
        match submitted {
            Ok(Submitted::Pending) => {
                if pending.read {
                    self.lists.keep(tag.0, scratch.parser.data());
                }
                self.park(context, queue, pending);
            }
            Ok(Submitted::Done(outcome)) => self.ended(context, queue, pending, outcome),
            Err(fault) => self.ended(context, queue, pending, Err(fault)),
        }
    }

    /// Begins a transfer that is too long to be submitted at once.
    #[cold]
    fn begin_slices(
        &mut self,
        scratch: &mut Scratch,
        context: &mut CoreContext,
        queue: &mut Queue,
        mut pending: PendingRequest,
    ) {
        // Checked whole before anything is moved, as the channel does with what comes at once.
        let view = queue.ring.view();
        if let Some(wrong) = scratch.parser.data().iter().find_map(|range| view.iovec(*range).err()) {
            return self.ended(context, queue, pending, Err(wrong.into()));
        }
        self.lists.keep(pending.taken.head(), scratch.parser.data());
        pending.slice = 0;
        self.submit_slice(scratch, context, queue, pending);
    }

    /// Submits the next slice of a transfer.
    fn submit_slice(
        &mut self,
        scratch: &mut Scratch,
        context: &mut CoreContext,
        queue: &mut Queue,
        mut pending: PendingRequest,
    ) {
        let tag = Tag(pending.taken.head());
        pending.slice = self.piece(pending.left());
        scratch.cut.clear();
        cut(self.lists.of(tag.0), pending.done.into(), pending.slice.into(), &mut scratch.cut);
        let offset = pending.offset + u64::from(pending.done);
        let op = if pending.read {
            Op::Read { offset, into: &scratch.cut }
        } else {
            Op::Write { offset, from: &scratch.cut }
        };
        let submitted = self.channel.submit(context, queue.ring.view(), &op, tag);
        self.cost.spend(u64::from(pending.slice) + scratch.cut.len() as u64 * COST_OF_BUFFER);
        match submitted {
            Submitted::Pending => self.park(context, queue, pending),
            Submitted::Done(outcome) => self.ended(context, queue, pending, outcome),
        }
    }

    /// Submits the next slices of those that wait for it, each in its turn, until only `keep` is left of what this poll may
    /// cost; says how many.
    #[inline]
    fn go_on(
        &mut self,
        scratch: &mut Scratch,
        context: &mut CoreContext,
        queue: &mut Queue,
        keep: u64,
    ) -> u32 {
        let mut count = 0;
        while self.cost.left() > keep
            && queue.fault().is_none()
            && let Some(&head) = self.waiting.front()
        {
            let left = self.pending[usize::from(head)].as_ref().map_or(0, PendingRequest::left);
            if !self.fits(self.piece(left)) {
                break;
            }
            self.waiting.pop_front();
            let Some(pending) = self.pending[usize::from(head)].take() else {
                debug_assert!(false, "request {head} waits for its next slice, and is not in flight");
                continue;
            };
            count += 1;
            self.worked = true;
            queue.ring.touch(&pending.taken);
            self.submit_slice(scratch, context, queue, pending);
        }
        count
    }

    /// Whether a request waits for its next slice, or an answer of the storage for us.
    #[inline]
    fn has_more(&self, queue: &Queue) -> bool {
        !self.ended.is_empty() || (!self.waiting.is_empty() && queue.fault().is_none())
    }

    /// Notes a request as in flight.
    #[inline]
    fn park(&mut self, context: &mut CoreContext, queue: &mut Queue, pending: PendingRequest) {
        if pending.stage == Stage::Own {
            context.submitted(pending.slice.into());
            self.room = self.room.map(|room| room.saturating_sub(pending.slice.into()));
        }
        let slot = &mut self.pending[usize::from(pending.taken.head())];
        queue.ring.release(&pending.taken);
        *slot = Some(pending);
        kill::here(KillPoint::Submitted);
    }

    /// A slice has ended, and it was not the last: the rest is for the next polls.
    #[cold]
    fn wait(&mut self, queue: &mut Queue, mut pending: PendingRequest) {
        pending.done += pending.slice;
        let head = pending.taken.head();
        queue.ring.release(&pending.taken);
        self.pending[usize::from(head)] = Some(pending);
        self.waiting.push_back(head);
    }

    /// An operation has ended: answers the request, or goes on with what is behind it.
    #[inline]
    fn ended(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        mut pending: PendingRequest,
        outcome: Outcome,
    ) {
        if pending.goes_on() && outcome.is_ok() {
            return self.wait(queue, pending);
        }
        let write_through = self.flushless || self.shared.cache_off();
        if pending.write && pending.stage == Stage::Own && outcome.is_ok() && write_through {
            pending.stage = Stage::FlushBehind;
            match self.channel.submit(context, queue.ring.view(), &Op::Flush, Tag(pending.taken.head())) {
                Submitted::Pending => return self.park(context, queue, pending),
                Submitted::Done(outcome) => return self.ended(context, queue, pending, outcome),
            }
        }
        let code = match outcome {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(fault) => {
                count(queue, fault);
                VIRTIO_BLK_S_IOERR
            }
        };
        let mut written = 1;
        if code == VIRTIO_BLK_S_OK {
            if pending.read {
                queue.tally.bytes_read += u64::from(pending.bytes);
                written += pending.bytes;
            } else if pending.write {
                queue.tally.bytes_written += u64::from(pending.bytes);
            }
        }
        if self.since != Some(pending.started) {
            if self.fresh > 0 {
                let had = self.reaped.unwrap_or_else(|| context.look());
                self.flush_times(queue, had);
            }
            self.since = Some(pending.started);
        }
        self.fresh += 1;
        self.lists.release(pending.taken.head());
        self.answer(queue, pending.taken, pending.status, code, written);
    }

    /// Writes the status byte and the used element.
    #[inline]
    fn answer(&mut self, queue: &mut Queue, taken: RingRequest, status: u64, code: u8, written: u32) {
        // The address was checked when the request was read; if its region is gone since, so is its reader.
        if queue.ring.view().write(status, &[code]).is_err() {
            queue.stop_with(RingFault::NoStatus(taken.head()));
        }
        kill::here(KillPoint::StatusWritten);
        queue.ring.complete(taken, written);
    }

    /// Takes in what the storage has ended, and answers some of it.
    #[inline]
    fn reap(&mut self, scratch: &mut Scratch, context: &mut CoreContext, queue: &mut Queue) -> u32 {
        if self.channel.in_flight() > 0 {
            // By the core, since the last poll.
            kill::here(KillPoint::Pushed);
            // The channel is out of our hands while it calls back, so what it says is noted and acted on afterwards.
            let ended = &mut self.ended;
            self.channel.reap(context, &mut |tag, outcome| ended.push((tag, outcome)));
        }
        let mut count = 0;
        while count < MOST_ENDED
            && let Some((tag, outcome)) = self.ended.pop()
        {
            count += 1;
            if self.reaped.is_none() {
                self.reaped = Some(self.begins(context));
                self.worked = true;
            }
            let Some(pending) = self.pending[usize::from(tag.0)].take() else {
                debug_assert!(false, "the channel ended {tag:?}, which is not in flight");
                continue;
            };
            queue.ring.touch(&pending.taken);
            kill::here(KillPoint::Reaped);
            if pending.stage == Stage::Own {
                context.completed(pending.slice.into());
            }
            if pending.stage == Stage::Own && pending.read {
                // The kernel wrote there, perhaps in part, perhaps in vain: invariant 6.
                let ranges = if pending.sliced() {
                    scratch.cut.clear();
                    cut(self.lists.of(tag.0), pending.done.into(), pending.slice.into(), &mut scratch.cut);
                    &scratch.cut
                } else {
                    self.lists.of(tag.0)
                };
                for range in ranges {
                    queue.ring.view().wrote(range.gpa, u64::from(range.len));
                }
            }
            self.ended(context, queue, pending, outcome);
        }
        count
    }

    /// Counts the times of what was completed since the last publication: all began at one moment, and were done at `had`.
    #[inline]
    fn flush_times(&mut self, queue: &mut Queue, had: Instant) {
        if let Some(since) = self.since.take() {
            let took = had.saturating_duration_since(since);
            queue.meter().latency.record(took.as_nanos() as u64, std::mem::take(&mut self.fresh));
        }
    }

    /// Publishes what has been completed.
    #[inline]
    fn publish(&mut self, context: &mut CoreContext, queue: &mut Queue) {
        let reaped = self.reaped.take();
        if queue.ring.unpublished() > 0 {
            let had = reaped.unwrap_or_else(|| context.look());
            self.flush_times(queue, had);
            let interrupted = queue.publish(context, Some(had)).is_some();
            // What was reaped was answered after that look.
            self.worked = reaped.is_some() && !interrupted;
        }
    }
}

/// Most bytes of one transfer.
fn slice_of(channel: &Channels) -> u32 {
    bound(Invariant::BoundsPolls, u64::from(channel.slice().max(SECTOR as u32))) as u32
}

/// What a discard or write-zeroes request of so many bytes costs, in bytes copied.
fn cost_of_freeing(len: u64) -> u64 {
    COST_OF_CALL + len.min(MOST_FREED) / FREED_PER_COPIED
}

/// Counts an error by its cause.
#[cold]
fn count(queue: &mut Queue, fault: Fault) {
    match fault {
        Fault::Io(_) => queue.tally.errors_io += 1,
        Fault::NoSpace | Fault::BeyondEnd => queue.tally.errors_space += 1,
        Fault::ReadOnly | Fault::Guest(_) => queue.tally.errors_request += 1,
    }
}

impl BlkPoller {
    #[inline]
    fn poll_with(&mut self, scratch: &mut Scratch, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        let BlkPoller { queue, work } = self;
        if queue.phase == Phase::Suspending {
            work.channel.detach(context);
            return PollOutcome::PARKED;
        }
        let whole = cost::of_a_poll(budget);
        work.cost = PollCost::of(whole);
        work.room = (budget.room != Budget::UNBOUNDED).then_some(budget.room.into());
        work.roomless = false;
        work.worked = false;
        let mut done = work.reap(scratch, context, queue);
        work.channel.let_go(context);
        work.publish(context, queue);
        let mut left = budget.requests;
        // Requests that are being sliced get a half, so that neither they nor others of the same queue stand still; of a poll that is not worth
        // two slices, every other one.
        if !std::mem::take(&mut work.sliced_last) {
            done += work.go_on(scratch, context, queue, whole / 2);
            work.sliced_last = work.cost.is_used_up() || work.roomless;
        }
        // New requests may be shorter than the slice that did not fit.
        let slices_wait = std::mem::take(&mut work.roomless);
        if queue.takes() && !work.cost.is_used_up() {
            let mut now = None;
            let before = done;
            while left > 0 && context.limited().is_none() && !work.roomless {
                // Published in small batches: the driver can go on with the first while we do the next.
                match work.take(scratch, context, queue, left.min(BATCH), &mut now) {
                    Ok(0) => break,
                    Ok(taken) => {
                        left -= taken;
                        done += taken;
                    }
                    Err(fault) => {
                        queue.stop_with(fault);
                        done += 1;
                        break;
                    }
                }
                work.publish(context, queue);
            }
            let limited = context.limited().is_some();
            queue.set_limited(limited);
            match now {
                Some(now) if done > before => {
                    let more = left == 0 || work.cost.is_used_up() || limited || work.roomless;
                    queue.took(done - before, now, more);
                }
                _ if limited || work.roomless => {}
                _ => queue.found_dry(context),
            }
        }
        done += work.go_on(scratch, context, queue, 0);
        work.roomless |= slices_wait && work.has_more(queue);
        if done > 0 {
            work.publish(context, queue);
            if let Err(fault) = queue.ring.check_memory() {
                queue.stop_with(fault);
            }
        }
        if work.roomless {
            context.lacked_room();
        }
        let waits = work.channel.in_flight() > 0;
        // What the core does for requests in flight before it polls the next queue is none of that queue's time.
        if done > 0 && !work.worked && !waits {
            context.work_ended();
        }
        if waits {
            work.channel.push(context);
        } else if queue.phase == Phase::Draining && done == 0 && !work.has_more(queue) {
            work.channel.detach(context);
            return PollOutcome::PARKED;
        }
        let held_until = work.channel.held_until();
        match (done, context.limited()) {
            // What nobody is woken for is polled for.
            (0, _) if work.channel.held_back() => PollOutcome::IDLE.with_more(true),
            (0, Some(at)) => PollOutcome::limited(at.min(held_until.unwrap_or(at)), context),
            (0, None) if waits => match held_until {
                Some(at) => PollOutcome::WAITING.wake_at(at, context),
                None => PollOutcome::WAITING,
            },
            (0, None) => PollOutcome::IDLE,
            (_, limited) => {
                let cut_short = left == 0 || work.cost.is_used_up();
                let more = (cut_short && limited.is_none()) || work.has_more(queue);
                // Without room it waits for what is in flight.
                let more = more && !work.roomless;
                PollOutcome::busy(done, work.cost.spent()).with_more(more)
            }
        }
    }
}

impl Poller for BlkPoller {
    #[inline]
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        let mut scratch = scratch::borrow();
        let outcome = self.poll_with(&mut scratch, context, budget);
        scratch::give_back(scratch);
        outcome
    }

    fn drain(&mut self) {
        self.queue.drain();
        self.work.channel.set_draining(true);
    }

    fn undrain(&mut self) {
        self.queue.undrain();
        self.work.channel.set_draining(false);
    }

    fn suspend(&mut self) {
        self.queue.suspend();
    }

    fn goes_on(&self) -> bool {
        self.queue.goes_on()
    }

    fn resume(&mut self) {
        // So that no poll allocates.
        scratch::give_back(scratch::borrow());
        self.queue.resume();
    }

    fn arm(&mut self) -> Armed {
        let armed = self.queue.arm();
        // What others of its group have in flight tells only them when it ends.
        let waits_for_others = self.work.roomless && self.work.channel.in_flight() == 0;
        let more = self.work.channel.held_back() || self.work.has_more(&self.queue) || waits_for_others;
        if more { Armed::WorkLeft } else { armed }
    }

    fn disarm(&mut self, context: &CoreContext, polling: bool) {
        self.queue.disarm(context, polling);
    }

    fn apply(&mut self, change: Change) {
        let Some(Change::Own(own)) = self.queue.apply(change) else { return };
        if let Ok(exchange) = own.downcast::<ChannelExchange>()
            && self.work.channel.exchange(exchange, self.work.index)
        {
            self.work.slice = slice_of(&self.work.channel);
        }
    }

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: self.queue.kick(), completion: self.work.channel.waker() }
    }

    fn tidy(&mut self) {
        self.queue.tidy();
    }
}
