//! Sending: requests and the data of writes, as many as the socket takes.

#![allow(unsafe_code)]
// UNSAFETY: calls `Socket::send` on headers of operations in flight, on constant zeros, on copies of writes, and on guest memory whose map
// the operations hold.

use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::GuestFault;
use ioplane_memory::mutation::{Invariant, bound};
use ioplane_storage::Fault;

use super::{ImportChannel, RETRY};
use crate::import::link::add;
use crate::import::operation::Stage;
use crate::import::status::Loss;

/// Bytes that one push sends.
const MOST_SENT: usize = 256 << 10;
/// Bytes of one call that count as headway of the server.
pub(super) const HEADWAY: usize = 4096;

impl ImportChannel {
    /// Sends what is noted down, as far as the socket takes it.
    pub(super) fn send(&mut self, context: &mut CoreContext) {
        if self.outbound.broken.is_some() {
            return;
        }
        let unsent = self.connection.as_ref().map(|connection| connection.socket.has_unsent());
        if unsent.is_none_or(|unsent| self.outbound.noted.is_empty() && !unsent) {
            // What it was full of has gone: nobody is to be woken for room.
            return if self.outbound.full.is_some() {
                self.set_full(None)
            };
        }
        if self.outbound.full.is_some_and(|since| context.look().saturating_duration_since(since) < RETRY) {
            return;
        }
        let most = bound(Invariant::BoundsPolls, MOST_SENT as u64) as usize;
        let mut sent = 0;
        while sent < most && !self.outbound.noted.is_empty() {
            self.fill_table(most - sent);
            let Some(connection) = &self.connection else { return };
            if self.outbound.table.bytes() == 0 {
                continue;
            }
            let (operations, noted) = (&self.operations, &self.outbound.noted);
            let lost = || noted.iter().any(|tag| operations[usize::from(*tag)].has_lost_data());
            // SAFETY: see the module's note.
            match unsafe { connection.socket.send(&mut self.outbound.table, lost) } {
                Ok(bytes) => {
                    sent += bytes;
                    if bytes >= HEADWAY {
                        add(&self.link.counters.progress, 1);
                    }
                    if self.sent(bytes) {
                        return self.set_full(Some(context.look()));
                    }
                }
                Err(libc::EAGAIN) => return self.set_full(Some(context.look())),
                Err(libc::EINTR) => {}
                Err(libc::EFAULT) if !self.outbound.careful => self.outbound.careful = true,
                Err(libc::EFAULT) => self.unsendable(GuestFault::MemoryShrank),
                Err(errno) => return self.break_off(errno),
            }
        }
        self.pass_on(context);
    }

    /// Has go to the kernel what was taken and has not; the core is woken when there is room for it.
    fn pass_on(&mut self, context: &mut CoreContext) {
        match self.connection.as_ref().map(|connection| connection.socket.flush()) {
            None | Some(Ok(true)) => self.set_full(None),
            Some(Ok(false) | Err(libc::EAGAIN)) => self.set_full(Some(context.look())),
            Some(Err(errno)) => self.break_off(errno),
        }
    }

    /// The connection takes nothing more. What has come is read first: the server may have said why it has ended it.
    #[cold]
    fn break_off(&mut self, errno: i32) {
        self.outbound.broken = Some(errno);
        self.left = true;
    }

    /// Fills the table from the requests that come next, up to some `most` bytes.
    fn fill_table(&mut self, most: usize) {
        self.outbound.table.clear();
        let mut at = self.outbound.head;
        for place in 0..self.outbound.noted.len() {
            let operation = &self.operations[usize::from(self.outbound.noted[place])];
            let before = self.outbound.table.mark();
            match operation.outgoing(at, self.retained.as_deref(), &mut self.outbound.table) {
                Ok(true) => {}
                // What has no room follows in the next call.
                Ok(false) => break,
                Err(wrong) if place == 0 => {
                    self.outbound.table.clear();
                    return self.unsendable(wrong);
                }
                // Its turn comes in the next call.
                Err(_) => {
                    self.outbound.table.cut(before);
                    break;
                }
            }
            at = 0;
            if self.outbound.careful || self.outbound.table.bytes() >= most {
                break;
            }
        }
        if self.outbound.careful {
            self.outbound.table.keep_first();
        }
    }

    /// So many bytes more have been sent. Says whether the socket has left some of the table.
    fn sent(&mut self, mut bytes: usize) -> bool {
        let left = bytes < self.outbound.table.bytes();
        while let Some(&tag) = self.outbound.noted.front() {
            let operation = &mut self.operations[usize::from(tag)];
            let rest = operation.wire_bytes() - self.outbound.head;
            operation.begun |= bytes > 0;
            if bytes < rest {
                self.outbound.head += bytes;
                break;
            }
            bytes -= rest;
            operation.stage = Stage::Sent;
            self.outbound.noted.pop_front();
            (self.outbound.head, self.outbound.careful) = (0, false);
            add(&self.link.counters.requests, 1);
        }
        left && !self.outbound.careful
    }

    /// The memory of the first request is gone. If it is sent in part already, the stream cannot go on.
    #[cold]
    fn unsendable(&mut self, wrong: GuestFault) {
        let Some(tag) = self.outbound.noted.pop_front() else { return };
        let head = std::mem::take(&mut self.outbound.head);
        self.outbound.careful = false;
        self.end(tag, Err(Fault::Guest(wrong)));
        if head > 0 {
            self.disconnect(Loss::GuestMemory);
        }
    }

    /// Notes whether the socket takes no more for now; the core is woken when it does.
    fn set_full(&mut self, full: Option<Instant>) {
        let changed = full.is_some() != self.outbound.full.is_some();
        self.outbound.full = full;
        if changed
            && let Some(connection) = &self.connection
            && let Err(errno) = self.link.watch(&connection.socket, full.is_some(), false)
        {
            self.disconnect(Loss::System(errno.raw_os_error()));
        }
    }
}
