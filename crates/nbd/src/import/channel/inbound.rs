//! Receiving: replies, and the data of reads straight into guest memory. Whatever the server sends is hostile.

#![allow(unsafe_code)]
// UNSAFETY: calls `Socket::receive` on a buffer of ours and on guest memory whose map the operations hold.

use ioplane_memory::GuestFault;
use ioplane_memory::mutation::{Invariant, bound};
use ioplane_storage::Fault;

use super::outbound::HEADWAY;
use super::{BUFFER, ImportChannel};
use crate::error::Violation;
use crate::import::link::add;
use crate::import::operation::{Kind, Operation, Stage};
use crate::import::status::Loss;
use crate::records::StreamError;
use crate::spec::{
    NBD_EINVAL, NBD_EIO, NBD_ENOMEM, NBD_ENOSPC, NBD_ENOTSUP, NBD_EOVERFLOW, NBD_EPERM, NBD_ESHUTDOWN,
};
use crate::transmission::{ReplyEvent, Request};

/// Bytes that one reap receives. The last call may go over by as much as the buffer holds.
const MOST_RECEIVED: usize = 256 << 10;
/// What an event costs, in bytes copied.
const EVENT: usize = 128;
/// Most events of one reply: a request has 512 sectors at most.
const MOST_EVENTS: u16 = 4096;

impl ImportChannel {
    /// Receives what has come, up to a bound.
    pub(super) fn receive(&mut self) {
        let mut work = bound(Invariant::BoundsPolls, MOST_RECEIVED as u64) as usize;
        let mut dry = false;
        loop {
            if self.connection.is_none() {
                return;
            }
            if let Err(loss) = self.read_buffer(&mut work) {
                return self.disconnect(loss);
            }
            if work == 0 {
                // The socket tells of what is in it. What the buffer and the reader still have nobody tells of.
                self.left = true;
                return;
            }
            if dry {
                return self.all_is_read();
            }
            match self.fill(work) {
                Ok((got, asked)) => {
                    // What was looked at of records costs, whatever came of it.
                    let Some(connection) = &self.connection else { return };
                    work = work.saturating_sub(got.max(connection.socket.charge()));
                    // There may be more records, of which no socket tells.
                    dry = got < asked && !connection.socket.has_records();
                }
                Err(Refill::Later) => return self.all_is_read(),
                Err(Refill::Again) => {}
                // Where nothing can be sent any more, that says more than the end that follows.
                Err(Refill::Lost(Loss::Closed)) if self.outbound.broken.is_some() => {
                    return self.all_is_read();
                }
                Err(Refill::Lost(loss)) => return self.disconnect(loss),
            }
        }
    }

    /// A connection on which nothing can be sent is lost when nothing more is to be read.
    fn all_is_read(&mut self) {
        if let Some(errno) = self.outbound.broken {
            self.disconnect(Loss::System(errno));
        }
    }

    /// One call. The buffer is empty before. Says how many bytes came, of how many there was room for.
    fn fill(&mut self, work: usize) -> Result<(usize, usize), Refill> {
        let Some(connection) = &self.connection else { return Err(Refill::Later) };
        let inbound = &mut self.inbound;
        inbound.table.clear();
        let payload = inbound.reader.payload() as usize;
        let mut direct = 0;
        let mut reading = None;
        // Records are opened into memory of ours: nothing that is not right comes to the guest's.
        if payload > 0
            && !connection.socket.has_records()
            && let Ok(Some(ReplyEvent::Payload { cookie, offset, .. })) =
                inbound.reader.next(&mut &[][..], |_| None)
        {
            let operation = &mut self.operations[usize::from(cookie as u16)];
            if operation.fault.is_none() {
                match operation.incoming(offset, payload.min(work.max(BUFFER)), &mut inbound.table) {
                    Ok(bytes) => direct = bytes,
                    Err(wrong) => {
                        inbound.table.clear();
                        operation.fault = Some(wrong.into());
                    }
                }
            }
            reading = Some(cookie as u16);
        }
        if direct == payload || direct == 0 {
            inbound.table.push_own_mut(&mut inbound.buffer[..]);
        }
        let asked = inbound.table.bytes();
        // SAFETY: see the module's note.
        match unsafe { connection.socket.receive(&mut inbound.table) } {
            Ok(0) => Err(Refill::Lost(Loss::Closed)),
            Ok(got) => {
                if got >= HEADWAY {
                    add(&self.link.counters.progress, 1);
                }
                let stored = got.min(direct);
                if stored > 0 {
                    inbound.reader.advance(stored as u32);
                    inbound.claimed &= inbound.reader.payload() > 0;
                }
                (inbound.start, inbound.end) = (0, got - stored);
                Ok((got, asked))
            }
            Err(StreamError::System(libc::EAGAIN)) => Err(Refill::Later),
            Err(StreamError::System(libc::EINTR)) => Err(Refill::Again),
            Err(StreamError::System(libc::EFAULT)) if direct > 0 => {
                // What comes for it is thrown away, and the stream goes on.
                if let Some(tag) = reading {
                    self.operations[usize::from(tag)].fault = Some(Fault::Guest(GuestFault::MemoryShrank));
                }
                Err(Refill::Again)
            }
            Err(error) => Err(Refill::Lost(error.into())),
        }
    }

    /// Reads what is in the buffer, until it is empty or the work is done that one reap may do.
    fn read_buffer(&mut self, work: &mut usize) -> Result<(), Loss> {
        while *work > 0 {
            let inbound = &mut self.inbound;
            let mut input = &inbound.buffer[inbound.start..inbound.end];
            let operations = &self.operations;
            let event = inbound.reader.next(&mut input, |cookie| in_flight(operations, cookie));
            inbound.start = inbound.end - input.len();
            let Some(event) = event.map_err(Loss::Violation)? else { return Ok(()) };
            *work = work.saturating_sub(EVENT);
            match event {
                ReplyEvent::Payload { cookie, offset, length } => {
                    let operation = &mut self.operations[usize::from(cookie as u16)];
                    if !std::mem::replace(&mut inbound.claimed, true) {
                        claim(operation, offset, length)?;
                    }
                    let take = (length as usize).min(inbound.end - inbound.start);
                    if take == 0 {
                        return Ok(());
                    }
                    let bytes = &inbound.buffer[inbound.start..][..take];
                    if operation.fault.is_none()
                        && let Err(wrong) = operation.store(offset, bytes)
                    {
                        operation.fault = Some(wrong.into());
                    }
                    inbound.reader.advance(take as u32);
                    inbound.claimed = inbound.reader.payload() > 0;
                    inbound.start += take;
                    *work = work.saturating_sub(take);
                }
                ReplyEvent::Hole { cookie, offset, length } => {
                    let operation = &mut self.operations[usize::from(cookie as u16)];
                    claim(operation, offset, length)?;
                    if operation.fault.is_none()
                        && let Err(wrong) = operation.store_zeros(offset, length)
                    {
                        operation.fault = Some(wrong.into());
                    }
                    *work = work.saturating_sub(length as usize);
                }
                ReplyEvent::Error { error: NBD_ESHUTDOWN, .. } => return Err(Loss::ShuttingDown),
                ReplyEvent::Error { cookie, error, .. } => {
                    let operation = &mut self.operations[usize::from(cookie as u16)];
                    count_event(operation)?;
                    if operation.fault.is_none() {
                        operation.fault = Some(fault(error, operation.kind));
                    }
                }
                // Never asked for, so the reader refuses it.
                ReplyEvent::BlockStatus { .. } => return Err(Loss::Violation(Violation::Unasked)),
                ReplyEvent::Done { cookie } => self.answered(cookie as u16)?,
            }
        }
        Ok(())
    }

    /// The server has answered a request.
    fn answered(&mut self, tag: u16) -> Result<(), Loss> {
        let (link, operation) = (&self.link, &mut self.operations[usize::from(tag)]);
        let length = operation.request.length;
        add(&link.counters.progress, 1);
        add(&link.counters.replies, 1);
        if let Some(fault) = operation.fault {
            if !matches!(fault, Fault::Guest(_)) {
                add(&link.counters.device_errors, 1);
            }
            if operation.kind == Kind::Flush {
                link.writes.flush_has_failed();
            }
            self.end(tag, Err(fault));
            return Ok(());
        }
        match operation.kind {
            Kind::Read if operation.coverage.bytes() != length => {
                let came = operation.coverage.bytes();
                return Err(Loss::Violation(Violation::Incomplete { wanted: length, came }));
            }
            Kind::Read => add(&link.counters.bytes_read, length.into()),
            Kind::Flush => link.writes.flushed(operation.mark),
            Kind::Write | Kind::WriteZeroes | Kind::Discard => {
                add(&link.counters.bytes_written, operation.request.payload().into());
                if link.facts.can_flush() {
                    let copy = operation.copy.take();
                    let nth = link.writes.acknowledge(copy.is_some());
                    if let (Some(copy), Some(retained)) = (copy, &mut self.retained) {
                        retained.acknowledge(copy, nth);
                    }
                }
            }
        }
        if operation.piece_done() {
            self.remember(tag);
            self.end(tag, Ok(()));
        } else {
            self.note(tag);
        }
        Ok(())
    }
}

/// Why a call has brought nothing.
enum Refill {
    /// Nothing is there.
    Later,
    /// It is to be made again.
    Again,
    Lost(Loss),
}

/// The request that the server answers, if it is its turn.
fn in_flight(operations: &[Operation], cookie: u64) -> Option<Request> {
    let operation = operations.get(usize::from(cookie as u16))?;
    (operation.stage == Stage::Sent && operation.request.cookie == cookie).then_some(operation.request)
}

/// Enters a chunk into its request's books.
fn claim(operation: &mut Operation, offset: u64, length: u32) -> Result<(), Loss> {
    count_event(operation)?;
    operation.claim(offset, length).map_err(Loss::Violation)
}

fn count_event(operation: &mut Operation) -> Result<(), Loss> {
    operation.events += 1;
    if operation.events > MOST_EVENTS { Err(Loss::Violation(Violation::Endless)) } else { Ok(()) }
}

/// What an error value means (section "Error values"): one that is not listed is `NBD_EINVAL`.
fn fault(error: u32, kind: Kind) -> Fault {
    match error {
        NBD_EPERM if kind != Kind::Read => Fault::ReadOnly,
        NBD_ENOSPC => Fault::NoSpace,
        NBD_EPERM | NBD_EIO | NBD_ENOMEM | NBD_EINVAL | NBD_EOVERFLOW | NBD_ENOTSUP => {
            Fault::Io(error as i32)
        }
        _ => Fault::Io(libc::EINVAL),
    }
}
