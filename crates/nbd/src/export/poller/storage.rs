//! To the storage, piece by piece, and what it says.

use ioplane_device::CoreContext;
use ioplane_scheduler::LARGEST_SLICE;
use ioplane_storage::{Fault, Op, Outcome, Submitted, Tag};

use super::super::check::{Ask, error_of};
use super::super::connection::{Phase, Stage};
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
        if slot.ask == Ask::BlockStatus || (slot.request.length == 0 && slot.ask != Ask::Flush) {
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
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.phase = Phase::Waiting;
        match outcome {
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
                self.finish(context, number, Err(refused));
            }
        }
    }
}
