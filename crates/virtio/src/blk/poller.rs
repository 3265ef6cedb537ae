//! Virtio-blk on an I/O core.

use std::sync::Arc;
use std::time::Instant;

use ioplane_device::{Armed, Budget, Change, Poller, Progress, Wakers};
use ioplane_memory::GuestRange;
use ioplane_storage::{Fault, Lane, Op, Outcome, Submitted, Tag};

use super::Shared;
use super::request::{Ask, Parser};
use super::spec::*;
use crate::buffers::Writer;
use crate::device::{QueueStart, RingState};
use crate::kill::{self, KillPoint};
use crate::queue::{Phase, Queue};
use crate::ring::{Chain, RingFault, Taken};

/// Requests taken between two publications.
const BATCH: u32 = 8;

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
struct Flying {
    taken: Taken,
    status: u64,
    started: Instant,
    bytes: u32,
    stage: Stage,
    read: bool,
    write: bool,
}

/// Room for what one request needs while it is in flight, by the head of its chain.
#[derive(Debug, Default)]
struct Slot {
    flying: Option<Flying>,
    /// Where a read goes, to mark it in the dirty log when it has ended.
    into: Vec<GuestRange>,
}

/// The poller of one queue of a disk.
pub struct BlkPoller {
    queue: Queue,
    work: Work,
}

/// All but the queue, so that both can be borrowed at once.
struct Work {
    lane: Box<dyn Lane>,
    shared: Arc<Shared>,
    /// The driver cannot flush.
    flushless: bool,
    chain: Chain,
    parser: Parser,
    slots: Box<[Slot]>,
    /// What the lane has just said: emptied in the same poll, never longer than the ring.
    ended: Vec<(Tag, Outcome)>,
    /// Requests completed and not yet counted in the histogram, all taken at `since`.
    fresh: u64,
    since: Option<Instant>,
}

impl BlkPoller {
    pub(super) fn new(start: QueueStart, lane: Box<dyn Lane>, shared: Arc<Shared>, flushless: bool) -> Self {
        let size = usize::from(start.ring.size());
        let slots = (0..size)
            .map(|_| Slot { flying: None, into: Vec::with_capacity(SEG_MAX as usize + 2) })
            .collect();
        let work = Work {
            lane,
            shared,
            flushless,
            chain: Chain::new(),
            parser: Parser::new(),
            slots,
            ended: Vec::with_capacity(size),
            fresh: 0,
            since: None,
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
    /// What is in flight stays so in the ring and its journal; the lane's limbo sees the I/O to its end.
    fn drop(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.flying.take()).for_each(|flying| flying.taken.abandon());
    }
}

impl Work {
    /// Takes up to `budget` requests on; says how many.
    #[inline]
    fn take(&mut self, queue: &mut Queue, budget: u32, now: &mut Option<Instant>) -> Result<u32, RingFault> {
        let mut count = 0;
        while count < budget {
            let Some((taken, replayed)) = queue.ring.take(&mut self.chain)? else { break };
            count += 1;
            let now = *now.get_or_insert_with(Instant::now);
            let head = taken.head();
            match self.parser.parse(queue.ring.view(), &self.chain, head) {
                Ok(ask) => self.begin(queue, taken, ask, now),
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

    /// Carries one request as far as it goes now.
    #[inline]
    fn begin(&mut self, queue: &mut Queue, taken: Taken, ask: Ask, started: Instant) {
        kill::here(KillPoint::Parsed);
        if let Ask::Read { offset } | Ask::Write { offset } = ask {
            kill::at_offset(offset);
        }
        let (read, write) =
            (matches!(ask, Ask::Read { .. }), matches!(ask, Ask::Write { .. } | Ask::WriteZeroes { .. }));
        let (data, bytes, status) = (self.parser.data(), self.parser.data_bytes(), self.parser.status());
        let op = match ask {
            Ask::Read { offset } => {
                self.shared.allows(offset, bytes, false).map(|()| Op::Read { offset, into: data })
            }
            Ask::Write { offset } => {
                self.shared.allows(offset, bytes, true).map(|()| Op::Write { offset, from: data })
            }
            Ask::Flush => Ok(Op::Flush),
            Ask::Discard { offset, len } => {
                self.shared.allows(offset, len, true).map(|()| Op::Discard { offset, len })
            }
            Ask::WriteZeroes { offset, len, unmap } => {
                self.shared.allows(offset, len, true).map(|()| Op::WriteZeroes { offset, len, unmap })
            }
            Ask::Id => {
                let copied = Writer::new(queue.ring.view(), data).write(&self.shared.id);
                let code = if copied.is_ok() { VIRTIO_BLK_S_OK } else { VIRTIO_BLK_S_IOERR };
                return self.answer(queue, taken, status, code, VIRTIO_BLK_ID_BYTES as u32 + 1);
            }
            Ask::Refuse(code) => {
                match code {
                    VIRTIO_BLK_S_UNSUPP => queue.tally.unsupported += 1,
                    _ => queue.tally.errors_request += 1,
                }
                return self.answer(queue, taken, status, code, 1);
            }
        };
        let flying = Flying { taken, status, started, bytes: bytes as u32, stage: Stage::Own, read, write };
        let tag = Tag(flying.taken.head());
        match op.map(|op| self.lane.submit(queue.ring.view(), &op, tag)) {
            Ok(Submitted::Pending) => self.park(queue, flying),
            Ok(Submitted::Done(outcome)) => self.ended(queue, flying, outcome),
            Err(fault) => self.ended(queue, flying, Err(fault)),
        }
    }

    /// Notes a request as in flight.
    #[inline]
    fn park(&mut self, queue: &mut Queue, flying: Flying) {
        let slot = &mut self.slots[usize::from(flying.taken.head())];
        if flying.stage == Stage::Own {
            slot.into.clear();
            if flying.read {
                slot.into.extend_from_slice(self.parser.data());
            }
        }
        queue.ring.release(&flying.taken);
        slot.flying = Some(flying);
        kill::here(KillPoint::Submitted);
    }

    /// An operation has ended: answers the request, or goes on with what is behind it.
    #[inline]
    fn ended(&mut self, queue: &mut Queue, mut flying: Flying, outcome: Outcome) {
        let write_through = self.flushless || self.shared.cache_off();
        if flying.write && flying.stage == Stage::Own && outcome.is_ok() && write_through {
            flying.stage = Stage::FlushBehind;
            match self.lane.submit(queue.ring.view(), &Op::Flush, Tag(flying.taken.head())) {
                Submitted::Pending => return self.park(queue, flying),
                Submitted::Done(outcome) => return self.ended(queue, flying, outcome),
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
            if flying.read {
                queue.tally.bytes_read += u64::from(flying.bytes);
                written += flying.bytes;
            } else if flying.write {
                queue.tally.bytes_written += u64::from(flying.bytes);
            }
        }
        if self.since != Some(flying.started) {
            self.flush_times(queue);
            self.since = Some(flying.started);
        }
        self.fresh += 1;
        self.answer(queue, flying.taken, flying.status, code, written);
    }

    /// Writes the status byte and the used element.
    #[inline]
    fn answer(&mut self, queue: &mut Queue, taken: Taken, status: u64, code: u8, written: u32) {
        // The address was checked when the request was read; if its region is gone since, so is its reader.
        if queue.ring.view().write(status, &[code]).is_err() {
            queue.stop_with(RingFault::NoStatus(taken.head()));
        }
        kill::here(KillPoint::StatusWritten);
        queue.ring.complete(taken, written);
    }

    /// Takes in what the storage has ended.
    #[inline]
    fn reap(&mut self, queue: &mut Queue) -> u32 {
        if self.lane.in_flight() == 0 {
            return 0;
        }
        // The lane is out of our hands while it calls back, so what it says is noted and acted on afterwards.
        let ended = &mut self.ended;
        self.lane.reap(&mut |tag, outcome| ended.push((tag, outcome)));
        let mut count = 0;
        while let Some((tag, outcome)) = self.ended.pop() {
            count += 1;
            let slot = &mut self.slots[usize::from(tag.0)];
            let Some(flying) = slot.flying.take() else {
                debug_assert!(false, "the lane ended {tag:?}, which is not in flight");
                continue;
            };
            queue.ring.touch(&flying.taken);
            kill::here(KillPoint::Reaped);
            if flying.stage == Stage::Own {
                // The kernel wrote there, perhaps in part, perhaps in vain: law 6.
                for range in &slot.into {
                    queue.ring.view().wrote(range.gpa, u64::from(range.len));
                }
            }
            self.ended(queue, flying, outcome);
        }
        count
    }

    /// Counts the times of what was completed since the last publication: all began at one moment.
    #[inline]
    fn flush_times(&mut self, queue: &mut Queue) {
        if let Some(since) = self.since.take()
            && self.fresh > 0
        {
            queue.meter().latency.record(since.elapsed().as_nanos() as u64, self.fresh);
        }
        self.fresh = 0;
    }

    /// Publishes what has been completed.
    #[inline]
    fn publish(&mut self, queue: &mut Queue) {
        if queue.ring.unpublished() > 0 {
            queue.publish();
            self.flush_times(queue);
        }
    }
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

impl Poller for BlkPoller {
    #[inline]
    fn poll(&mut self, budget: Budget) -> Progress {
        let BlkPoller { queue, work } = self;
        if queue.phase == Phase::Suspending {
            return Progress::Parked;
        }
        let mut done = work.reap(queue);
        work.publish(queue);
        if queue.takes() {
            let mut left = budget.0;
            let mut now = None;
            let before = done;
            while left > 0 {
                // Published in small batches: the driver can go on with the first while we do the next.
                match work.take(queue, left.min(BATCH), &mut now) {
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
                work.publish(queue);
            }
            match now {
                Some(now) => queue.took(done - before, now, left == 0),
                None => queue.found_dry(),
            }
        }
        if done > 0 {
            work.publish(queue);
            if let Err(fault) = queue.ring.check_memory() {
                queue.stop_with(fault);
            }
        }
        if work.lane.in_flight() > 0 {
            work.lane.push();
            kill::here(KillPoint::Pushed);
        } else if queue.phase == Phase::Draining && done == 0 {
            return Progress::Parked;
        }
        if done == 0 { Progress::Idle } else { Progress::Busy(done) }
    }

    fn drain(&mut self) {
        self.queue.drain();
    }

    fn undrain(&mut self) {
        self.queue.undrain();
    }

    fn suspend(&mut self) {
        self.queue.suspend();
    }

    fn resume(&mut self) {
        self.queue.resume();
    }

    fn arm(&mut self) -> Armed {
        let armed = self.queue.arm();
        if self.work.lane.held_back() { Armed::WorkLeft } else { armed }
    }

    fn disarm(&mut self, polling: bool) {
        self.queue.disarm(polling);
    }

    fn apply(&mut self, change: Change) {
        let _ = self.queue.apply(change);
    }

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: self.queue.kick(), completion: self.work.lane.waker() }
    }

    fn tidy(&mut self) {
        self.queue.tidy();
    }
}
