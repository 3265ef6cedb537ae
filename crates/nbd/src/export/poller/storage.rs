//! To the storage, piece by piece, and what it says.

use ioplane_device::CoreContext;
use ioplane_scheduler::LARGEST_SLICE;
use ioplane_storage::{Fault, Op, Outcome, Submitted, Tag};

use super::super::check::{Ask, Refused, error_of};
use super::super::connection::{Phase, Stage};
use super::super::ended::ConnectionEnd;
use super::super::status::{MOST_EXTENTS, Question, StatusPlace};
use super::{ExportPoller, cost_of_freeing};
use crate::spec::*;
use crate::transmission::Request;

/// Requests ended by the storage that one poll answers.
const MOST_ENDED: u32 = 128;

impl ExportPoller {
    /// A request has come whole.
    pub(super) fn begin(&mut self, context: &mut CoreContext, number: u16) {
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.phase = Phase::Waiting;
        if slot.request.length == 0 && slot.ask != Ask::Flush {
            return self.finish(context, number, Ok(()));
        }
        if self.connection.waiting.is_empty() && self.fits(number) {
            self.submit(context, number);
        } else {
            self.connection.waiting.push_back(number);
        }
    }

    /// Bytes of the next piece of a transfer of which so many are left.
    fn piece(&self, left: u32) -> u32 {
        let slice = if self.room.is_some() { self.slice.min(LARGEST_SLICE as u32) } else { self.slice };
        left.min(slice)
    }

    /// Whether the next piece of a request may be handed to the storage; if not, notes it.
    fn fits(&mut self, number: u16) -> bool {
        let slot = &self.connection.slots[usize::from(number)];
        if !slot.transfers() || slot.stage == Stage::FlushBehind {
            return true;
        }
        let piece = self.piece(slot.request.length - slot.done);
        let fits = self.room.is_none_or(|room| u64::from(piece) <= room);
        self.roomless |= !fits;
        fits
    }

    /// Submits the next piece of a request.
    fn submit(&mut self, context: &mut CoreContext, number: u16) {
        let slot = &self.connection.slots[usize::from(number)];
        if slot.ask == Ask::BlockStatus {
            return self.look_up_later(context, number);
        }
        let (chain, done) = (slot.chain, slot.done);
        let Request { offset, length, flags, .. } = slot.request;
        let ask = if slot.stage == Stage::FlushBehind { Ask::Flush } else { slot.ask };
        let piece = if matches!(ask, Ask::Read | Ask::Write) { self.piece(length - done) } else { 0 };
        let at = offset + u64::from(done);
        if piece > 0 {
            self.connection.memory.ranges(chain, done, piece, &mut self.ranges);
        }
        let (op, cost) = match ask {
            Ask::Read => (Op::Read { offset: at, into: &self.ranges }, piece.into()),
            Ask::Write => (Op::Write { offset: at, from: &self.ranges }, piece.into()),
            Ask::Flush | Ask::BlockStatus => (Op::Flush, 0),
            Ask::Trim => (Op::Discard { offset, len: length.into() }, cost_of_freeing(length)),
            Ask::WriteZeroes => {
                let unmap = flags & NBD_CMD_FLAG_NO_HOLE == 0;
                (Op::WriteZeroes { offset, len: length.into(), unmap }, cost_of_freeing(length))
            }
        };
        let submitted = self.channel.submit(context, self.connection.memory.view(), &op, Tag(number));
        self.cost.spend(cost);
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.piece = piece;
        match submitted {
            Submitted::Pending => {
                slot.phase = Phase::InFlight;
                context.submitted(piece.into());
                self.room = self.room.map(|room| room.saturating_sub(piece.into()));
            }
            Submitted::Done(outcome) => self.ended(context, number, outcome),
        }
    }

    /// Has it looked up which parts of the disk are holes, when those before it are; without a thread for that nothing is known.
    fn look_up_later(&mut self, context: &CoreContext, number: u16) {
        let Some(status) = &mut self.status else { return self.finish(context, number, Ok(())) };
        self.connection.slots[usize::from(number)].phase = Phase::Looking;
        status.push(number);
        self.look_up(context);
    }

    /// Hands the next one to the thread, if that can be asked.
    fn look_up(&mut self, context: &CoreContext) {
        while let Some(number) = self.status.as_mut().and_then(StatusPlace::next) {
            let Request { offset, length, flags, .. } = self.connection.slots[usize::from(number)].request;
            let most = if flags & NBD_CMD_FLAG_REQ_ONE != 0 { 1 } else { MOST_EXTENTS };
            let question = Question { offset, length, block: self.connection.terms.block, most };
            if self.status.as_mut().is_some_and(|status| status.ask(number, question)) {
                return;
            }
            self.finish(context, number, Ok(()));
        }
    }

    /// Answers what the thread has looked up; says how many requests those are.
    #[cold]
    pub(super) fn answer_looked_up(&mut self, context: &CoreContext) -> u32 {
        let Some(lookup) = self.status.as_mut().and_then(StatusPlace::take) else { return 0 };
        self.count_answer(context, lookup.slot, Ok(()));
        self.cost.spend(8 * lookup.extents.len() as u64);
        if self.connection.reply_status(lookup.slot, &lookup.extents).is_err() {
            self.connection.end(ConnectionEnd::Memory);
        }
        if let Some(status) = &mut self.status {
            status.give_back(lookup);
        }
        self.look_up(context);
        1
    }

    /// Submits the next pieces of those that wait for it, each in its turn, until only `keep` is left of what this poll may cost; says
    /// how many.
    pub(super) fn go_on(&mut self, context: &mut CoreContext, keep: u64) -> u32 {
        let mut count = 0;
        while self.cost.left() > keep
            && let Some(&number) = self.connection.waiting.front()
            && self.fits(number)
        {
            self.connection.waiting.pop_front();
            count += 1;
            self.submit(context, number);
        }
        count
    }

    /// Takes in what the storage has ended; says how many.
    pub(super) fn reap(&mut self, context: &mut CoreContext) -> u32 {
        if self.channel.in_flight() > 0 {
            let finished = &mut self.finished;
            self.channel.reap(context, &mut |tag, outcome| finished.push_back((tag, outcome)));
        }
        let mut count = 0;
        while count < MOST_ENDED
            && let Some((Tag(number), outcome)) = self.finished.pop_front()
        {
            count += 1;
            let slot = &self.connection.slots[usize::from(number)];
            if slot.phase != Phase::InFlight {
                debug_assert!(false, "the channel ended {number}, which is not in flight");
                continue;
            }
            context.completed(slot.piece.into());
            self.ended(context, number, outcome);
        }
        count
    }

    /// A piece has ended: goes on with what is behind it, or answers the request.
    fn ended(&mut self, context: &mut CoreContext, number: u16, outcome: Outcome) {
        let outdated = self.is_outdated();
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.phase = Phase::Waiting;
        let flushes = slot.ask == Ask::Flush || slot.stage == Stage::FlushBehind;
        match outcome {
            // It does not cover what the failed one has lost, and its client would take it to.
            Ok(()) if flushes && outdated => {
                let refused = (NBD_EIO, "another flush of the disk has failed");
                self.refuse_recorded(context, number, self.failed.count(), refused);
            }
            Ok(()) => {
                slot.done += slot.piece;
                slot.piece = 0;
                if slot.transfers() && slot.done < slot.request.length {
                    self.connection.waiting.push_back(number);
                } else if slot.flushes_behind() {
                    slot.stage = Stage::FlushBehind;
                    self.submit(context, number);
                } else {
                    self.finish(context, number, Ok(()));
                }
            }
            Err(fault) => {
                match fault {
                    Fault::Io(_) | Fault::Guest(_) => self.tally.errors_io += 1,
                    Fault::NoSpace | Fault::BeyondEnd => self.tally.errors_space += 1,
                    Fault::ReadOnly => self.tally.errors_request += 1,
                }
                let refused = error_of(slot.ask, fault);
                match flushes.then(|| self.failed.report()).flatten() {
                    Some(failure) => self.refuse_recorded(context, number, failure, refused),
                    None => self.finish(context, number, Err(refused)),
                }
            }
        }
    }

    /// Refuses a request, once it is recorded that so many flushes have failed.
    #[cold]
    fn refuse_recorded(&mut self, context: &CoreContext, number: u16, failed: u64, refused: Refused) {
        if self.failed.is_recorded(failed) {
            return self.finish(context, number, Err(refused));
        }
        self.connection.slots[usize::from(number)].phase = Phase::Unrecorded;
        self.unrecorded.push_back((failed, number, refused));
    }

    /// Answers flushes that have failed, once the next process knows of that; says how many.
    #[cold]
    pub(super) fn answer_recorded(&mut self, context: &CoreContext) -> u32 {
        let mut count = 0;
        while let Some(&(failure, number, refused)) = self.unrecorded.front()
            && self.failed.is_recorded(failure)
        {
            self.unrecorded.pop_front();
            count += 1;
            self.finish(context, number, Err(refused));
        }
        count
    }
}
