//! Keeping copies of writes: when one is made, and the flush that makes room for more.

use ioplane_memory::mutation::{Invariant, bound};
use ioplane_storage::{Fault, Outcome};

use super::{GHOSTS, ImportChannel};
use crate::import::operation::Stage;
use crate::import::status::Loss;

/// Bytes that one turn copies.
const MOST_COPIED: usize = 256 << 10;
/// What a copy costs, in bytes.
const COPY: usize = 128;

impl ImportChannel {
    /// Takes the copies for this turn. False while the control half has them: nothing may be sent or answered then.
    pub(super) fn begin_turn(&mut self) -> bool {
        let Some(locker) = &self.link.retained else { return true };
        self.retained = locker.take();
        let Some(retained) = &mut self.retained else { return false };
        if std::mem::take(&mut self.gave_up) {
            retained.void_unacknowledged();
        }
        if std::mem::take(&mut retained.cut) {
            self.disconnect(Loss::Instance);
        }
        true
    }

    /// Nobody is told any more of writes in flight, so that they must not be written again.
    pub(super) fn give_up_copies(&mut self) {
        match self.link.retained.as_ref().map(|locker| (locker, locker.take())) {
            Some((locker, Some(mut retained))) => {
                retained.void_unacknowledged();
                locker.put(retained);
            }
            Some((_, None)) => self.gave_up = true,
            None => {}
        }
    }

    /// Puts them back.
    pub(super) fn end_turn(&mut self) {
        if let (Some(locker), Some(retained)) = (&self.link.retained, self.retained.take()) {
            locker.put(retained);
        }
    }

    /// Copies writes that are to be sent, as far as there is room and a turn lasts, and sees to it that there is room again.
    pub(super) fn keep(&mut self) {
        if self.retained.is_none() || self.connection.is_none() {
            return;
        }
        if let Some(retained) = &mut self.retained {
            retained.release(self.link.writes.durable());
        }
        let most = bound(Invariant::BoundsPolls, MOST_COPIED as u64) as usize;
        let mut copied = 0;
        while let Some(&tag) = self.roomless.front() {
            let Some(retained) = &mut self.retained else { break };
            let operation = &mut self.operations[usize::from(tag)];
            let (request, zeros) = (operation.request, operation.zeros());
            let bytes = if zeros { 0 } else { request.payload() as usize };
            if !retained.has_room(bytes) {
                break;
            }
            if copied >= most {
                self.left = true;
                break;
            }
            self.roomless.pop_front();
            copied += bytes + COPY;
            let Some(copy) = retained.add(request, zeros, self.link.writes.stamp()) else { break };
            operation.copy = Some(copy);
            match operation.copy_piece(retained.data_mut(copy)) {
                Ok(()) => {
                    operation.stage = Stage::Noted;
                    self.outbound.noted.push_back(tag);
                }
                Err(wrong) => self.end(tag, Err(Fault::Guest(wrong))),
            }
        }
        self.make_room();
    }

    /// Sends a flush if one is wanted.
    fn make_room(&mut self) {
        let Some(retained) = &self.retained else { return };
        let writes = &self.link.writes;
        let left_over = !self.caught_up && writes.incomplete();
        let own = self.own();
        // After one that failed the next is for those who wait for room, not for its own sake.
        let in_vain = self.own_failed && self.roomless.is_empty();
        if self.operations[own].stage != Stage::Free
            || in_vain
            || !(left_over || retained.wants_flush(writes.durable()))
        {
            return;
        }
        self.caught_up = true;
        self.order += 1;
        let operation = &mut self.operations[own];
        operation.begin_flush();
        (operation.order, operation.mark) = (self.order, writes.mark());
        self.in_flight += 1;
        // The keeper is told first: without anything in flight an answer would be one to nothing.
        self.link.publish(self.in_flight);
        self.note(own as u16);
    }

    /// The tag of the channel's own flush.
    pub(super) fn own(&self) -> usize {
        self.depth + GHOSTS
    }

    /// It has been answered. If the exporter's disk has failed there will be no room: what waits for it fails as the disk does.
    pub(super) fn own_flush_ended(&mut self, outcome: Outcome) {
        self.in_flight -= 1;
        self.own_failed = outcome.is_err();
        if outcome.is_err() {
            while let Some(tag) = self.roomless.pop_front() {
                self.end(tag, outcome);
            }
        }
    }

    /// With its connection it is of no use.
    pub(super) fn forget_own_flush(&mut self) {
        let own = self.own();
        (self.caught_up, self.own_failed) = (false, false);
        if self.operations[own].stage != Stage::Free {
            self.operations[own].stage = Stage::Free;
            self.in_flight -= 1;
        }
    }
}
