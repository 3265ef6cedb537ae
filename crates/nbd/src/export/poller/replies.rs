//! Back to the socket: replies.

use ioplane_device::CoreContext;

use super::super::check::{Ask, Refused};
use super::super::connection::{Phase, ReplyPart};
use super::super::ended::ConnectionEnd;
use super::super::socket::{Moved, Sending};
use super::{COST_OF_CALL, ExportPoller};

impl ExportPoller {
    /// The reply of a request is known.
    pub(super) fn finish(&mut self, context: &CoreContext, number: u16, outcome: Result<(), Refused>) {
        self.count_answer(context, number, outcome);
        self.connection.reply(number, outcome);
    }

    /// Counts a request whose reply is known.
    pub(super) fn count_answer(&mut self, context: &CoreContext, number: u16, outcome: Result<(), Refused>) {
        let slot = &self.connection.slots[usize::from(number)];
        let length = u64::from(slot.request.length);
        match (slot.ask, outcome) {
            (Ask::Read, Ok(())) => self.tally.bytes_read += length,
            (Ask::Write, Ok(())) => self.tally.bytes_written += length,
            (_, Err(_)) if slot.phase == Phase::Receiving => self.tally.errors_request += 1,
            _ => {}
        }
        self.tally.requests += 1;
        let time = context.now().saturating_duration_since(slot.started);
        self.meter.latency.record(time.as_nanos() as u64, 1);
    }

    /// Sends what the socket takes now; says whether it took anything.
    pub(super) fn send(&mut self) -> bool {
        let mut any = false;
        while self.connection.has_replies() && !self.blocked {
            if self.cost.is_used_up() {
                self.more = true;
                break;
            }
            let mut records = self.connection.socket.take_records();
            let mut sending = Sending::new(self.connection.memory.view());
            let gathered = self.connection.each_part(&mut self.ranges, self.cost.left(), |part| match part {
                ReplyPart::Head(bytes) => Ok(sending.push(bytes)),
                ReplyPart::Range(range) => sending.push_range(range),
            });
            let bytes = sending.bytes();
            let moved = gathered.map(|()| sending.send(&self.connection.socket, records.as_deref_mut()));
            self.connection.socket.put_records(records);
            self.cost.spend(COST_OF_CALL);
            let Ok(moved) = moved else {
                self.connection.end(ConnectionEnd::Memory);
                break;
            };
            match moved {
                Ok(Moved::Bytes(sent)) => {
                    self.connection.advance(sent);
                    self.cost.spend(sent as u64);
                    self.blocked = sent < bytes;
                    any = true;
                }
                Ok(Moved::Later | Moved::End) => self.blocked = true,
                Err(errno) => self.connection.end(ConnectionEnd::Lost(errno.raw_os_error())),
            }
        }
        if !self.blocked && self.connection.has_output() && !self.connection.has_replies() {
            self.flush();
        }
        any
    }

    /// Has go to the kernel what the records have taken. Whether nothing is left.
    pub(super) fn flush(&mut self) -> bool {
        match self.connection.socket.flush() {
            Ok(all) => self.blocked = !all,
            Err(errno) => self.connection.end(ConnectionEnd::Lost(errno.raw_os_error())),
        }
        !self.connection.has_output()
    }
}
