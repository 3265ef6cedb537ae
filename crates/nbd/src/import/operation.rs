//! One operation in flight, and the request that carries its next piece.
//!
//! ```text
//!   begin -> Waiting (for a write that it overlaps) -> Noted (to be sent) -> Sent -> answered: next piece, or ended
//!                                                        ^-- connection lost ---/
//! ```
//! A piece is at most [`Facts::slice`] bytes of data, or [`Facts::freed`] without. One at a time is on its way.

use std::sync::Arc;

use ioplane_memory::{GuestFault, GuestMap, GuestRange, GuestView};
use ioplane_storage::{Fault, MAX_RANGES, Op, Outcome};

use super::coverage::Coverage;
use super::facts::Facts;
use super::retained::Retained;
use super::socket::IoTable;
use crate::error::Violation;
use crate::spec::{
    NBD_CMD_FLAG_NO_HOLE, NBD_CMD_FLUSH, NBD_CMD_READ, NBD_CMD_TRIM, NBD_CMD_WRITE, NBD_CMD_WRITE_ZEROES,
};
use crate::transmission::Request;

/// What is sent for zeros to a server that cannot be asked for them, and stored for holes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not in flight.
    Free,
    /// Behind a write that it overlaps, or for room for its copy.
    Waiting,
    /// Not, or not wholly, handed to the socket.
    Noted,
    /// The server's turn.
    Sent,
}

#[derive(Debug, Clone)]
pub(super) struct Operation {
    pub kind: Kind,
    pub stage: Stage,
    /// The request of the piece that is on its way.
    pub request: Request,
    pub header: [u8; Request::SIZE],
    /// Where in the order of submission.
    pub order: u64,
    /// A part of the request has been sent, on this connection or on one that was lost.
    pub begun: bool,
    /// What the first error chunk said, or what is wrong with the guest's memory.
    pub fault: Option<Fault>,
    /// Of a flush: what it covers.
    pub mark: u64,
    /// Of a write: the number of the copy of its piece.
    pub copy: Option<u64>,
    /// Which bytes of the piece have come.
    pub coverage: Coverage,
    /// Chunks of its reply so far.
    pub events: u16,
    offset: u64,
    len: u64,
    /// Bytes of the pieces that have ended.
    done: u64,
    unmap: bool,
    map: Option<GuestView>,
    ranges: Vec<GuestRange>,
}

impl Operation {
    /// Allocates all that it will ever need.
    pub fn new() -> Self {
        Operation {
            kind: Kind::Flush,
            stage: Stage::Free,
            request: Request { flags: 0, command: NBD_CMD_FLUSH, cookie: 0, offset: 0, length: 0 },
            header: [0; Request::SIZE],
            order: 0,
            begun: false,
            fault: None,
            mark: 0,
            copy: None,
            coverage: Coverage::EMPTY,
            events: 0,
            offset: 0,
            len: 0,
            done: 0,
            unmap: false,
            map: None,
            ranges: Vec::with_capacity(MAX_RANGES),
        }
    }

    /// Becomes a flush that nobody has asked for.
    pub fn begin_flush(&mut self) {
        (self.kind, self.offset, self.len, self.done) = (Kind::Flush, 0, 0, 0);
        (self.fault, self.begun, self.copy) = (None, false, None);
    }

    /// Checks `op` whole and notes it down. `Err` if it has ended with that already.
    /// `bytes`: the size of the export now.
    pub fn begin(&mut self, view: &GuestView, op: &Op<'_>, facts: &Facts, bytes: u64) -> Result<(), Outcome> {
        debug_assert_eq!(self.stage, Stage::Free, "two operations with one tag");
        (self.done, self.fault, self.begun, self.unmap, self.copy) = (0, None, false, false, None);
        self.ranges.clear();
        let of_ranges = |ranges: &[GuestRange]| ranges.iter().map(|range| u64::from(range.len)).sum();
        let ranges: &[GuestRange] = match *op {
            Op::Read { offset, into } => {
                (self.kind, self.offset, self.len) = (Kind::Read, offset, of_ranges(into));
                into
            }
            Op::Write { offset, from } => {
                (self.kind, self.offset, self.len) = (Kind::Write, offset, of_ranges(from));
                from
            }
            Op::Flush => {
                (self.kind, self.offset, self.len) = (Kind::Flush, 0, 0);
                // What cannot be flushed has no cache that a client could know of (section "Transmission flags").
                let nothing_to_do = facts.read_only() || !facts.can_flush();
                return if nothing_to_do { Err(Ok(())) } else { Ok(()) };
            }
            Op::Discard { offset, len } => {
                (self.kind, self.offset, self.len) = (Kind::Discard, offset, len);
                &[]
            }
            Op::WriteZeroes { offset, len, unmap } => {
                (self.kind, self.offset, self.len, self.unmap) = (Kind::WriteZeroes, offset, len, unmap);
                &[]
            }
        };
        if ranges.len() > MAX_RANGES {
            return Err(Err(Fault::Io(libc::E2BIG)));
        }
        for range in ranges {
            view.iovec(*range).map_err(|wrong| Err(wrong.into()))?;
        }
        if self.kind != Kind::Read && facts.read_only() {
            return Err(Err(Fault::ReadOnly));
        }
        if self.offset.checked_add(self.len).is_none_or(|end| end > bytes) {
            return Err(Err(Fault::BeyondEnd));
        }
        if self.len == 0 || (self.kind == Kind::Discard && !facts.can_trim()) {
            return Err(Ok(()));
        }
        if !(self.offset | self.len).is_multiple_of(facts.minimum_block.into()) {
            return Err(Err(Fault::Io(libc::EINVAL)));
        }
        self.ranges.extend_from_slice(ranges);
        // Without the log: who polls marks what was read when it has ended.
        self.map = (!ranges.is_empty()).then(|| GuestView::new(view.map().clone()));
        Ok(())
    }

    /// Whether it changes the export: which bytes.
    pub fn writes(&self) -> Option<(u64, u64)> {
        let writes = matches!(self.kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
        writes.then_some((self.offset, self.len))
    }

    /// Makes the request for the next piece, or the same piece again.
    pub fn next_piece(&mut self, facts: &Facts, cookie: u64) {
        let left = self.len - self.done;
        let most = |most: u32| left.min(most.into()) as u32;
        let (command, flags, length) = match self.kind {
            Kind::Read => (NBD_CMD_READ, 0, most(facts.slice())),
            Kind::Write => (NBD_CMD_WRITE, 0, most(facts.slice())),
            Kind::Flush => (NBD_CMD_FLUSH, 0, 0),
            Kind::Discard => (NBD_CMD_TRIM, 0, most(facts.freed())),
            Kind::WriteZeroes if !facts.can_write_zeroes() => (NBD_CMD_WRITE, 0, most(facts.slice())),
            Kind::WriteZeroes if self.unmap => (NBD_CMD_WRITE_ZEROES, 0, most(facts.freed())),
            Kind::WriteZeroes => (NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_NO_HOLE, most(facts.freed())),
        };
        self.request = Request { flags, command, cookie, offset: self.offset + self.done, length };
        self.header = self.request.encode();
        self.coverage.clear();
        (self.fault, self.events) = (None, 0);
        self.stage = Stage::Noted;
    }

    /// Bytes on the wire of the request with its data.
    pub fn wire_bytes(&self) -> usize {
        Request::SIZE + self.request.payload() as usize
    }

    /// The piece has succeeded. Says whether it was the last.
    pub fn piece_done(&mut self) -> bool {
        self.done += u64::from(self.request.length);
        self.begun = false;
        self.done >= self.len
    }

    /// Copies the data of the piece that is to be sent.
    pub fn copy_piece(&self, into: &mut [u8]) -> Result<(), GuestFault> {
        let Some(view) = &self.map else { return Ok(()) };
        let mut rest = &mut *into;
        self.parts(self.done, rest.len(), |range, skip, len| {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            view.read(range.gpa + skip as u64, here)?;
            // Pages that went away meanwhile have read as zeros, and the region says so now.
            view.iovec(range).map(|_| true)
        })
    }

    /// The piece is a write of zeros whose data are not the guest's.
    pub fn zeros(&self) -> bool {
        self.kind == Kind::WriteZeroes
    }

    /// Whether its data are the guest's, and some of the guest's memory has gone.
    pub fn has_lost_data(&self) -> bool {
        let data = self.request.payload() > 0 && self.copy.is_none() && !self.zeros();
        data && self.map.as_ref().is_some_and(|view| view.map().poisoned())
    }

    /// Adds what is sent from byte `at` of the request and its data on. Whether all of it had room.
    pub fn outgoing(
        &self,
        at: usize,
        retained: Option<&Retained>,
        table: &mut IoTable,
    ) -> Result<bool, GuestFault> {
        let data = at.saturating_sub(Request::SIZE);
        if at < Request::SIZE && !table.push_own(&self.header[at..]) {
            return Ok(false);
        }
        let left = self.request.payload() as usize - data;
        if self.kind == Kind::WriteZeroes {
            let mut left = left;
            while left > 0 {
                let part = left.min(ZEROS.len());
                if !table.push_own(&ZEROS[..part]) {
                    return Ok(false);
                }
                left -= part;
            }
            return Ok(true);
        }
        if let (Some(retained), Some(copy)) = (retained, self.copy)
            && let Some(bytes) = retained.data(copy).get(data..)
            && bytes.len() == left
        {
            return Ok(table.push_own(bytes));
        }
        Ok(self.guest_memory(self.done + data as u64, left, table)? == left)
    }

    /// Adds where `len` bytes belong that the export has at `offset`; says for how many of them there was room.
    pub fn incoming(&self, offset: u64, len: usize, table: &mut IoTable) -> Result<usize, GuestFault> {
        self.guest_memory(offset - self.offset, len, table)
    }

    fn guest_memory(&self, at: u64, len: usize, table: &mut IoTable) -> Result<usize, GuestFault> {
        let Some(view) = &self.map else { return Ok(0) };
        let mut added = 0;
        self.parts(at, len, |part, skip, len| {
            let span = view.iovec(part)?;
            if table.push_guest(&span, skip, len) {
                added += len;
                Ok(true)
            } else {
                Ok(false)
            }
        })?;
        Ok(added)
    }

    /// Goes through the guest ranges from byte `at` of the operation on, for `len` bytes: range, where in it, how many. Until `each` says
    /// false.
    fn parts(
        &self,
        at: u64,
        len: usize,
        mut each: impl FnMut(GuestRange, usize, usize) -> Result<bool, GuestFault>,
    ) -> Result<(), GuestFault> {
        let (mut skip, mut left) = (at, len);
        for range in &self.ranges {
            let size = u64::from(range.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let part = ((size - skip) as usize).min(left);
            if part == 0 || !each(*range, skip as usize, part)? {
                break;
            }
            (skip, left) = (0, left - part);
        }
        Ok(())
    }

    /// Notes that the data of `len` bytes at `offset` of the export come now, each once.
    pub fn claim(&mut self, offset: u64, len: u32) -> Result<(), Violation> {
        self.coverage.add((offset - self.request.offset) as u32, len)
    }

    /// Copies data that the export has at `offset` to where they belong.
    pub fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), GuestFault> {
        let Some(view) = &self.map else { return Ok(()) };
        let mut rest = bytes;
        self.parts(offset - self.offset, bytes.len(), |range, skip, len| {
            let (here, after) = rest.split_at(len);
            rest = after;
            view.write(range.gpa + skip as u64, here).map(|()| true)
        })
    }

    /// The same with zeros.
    pub fn store_zeros(&self, offset: u64, len: u32) -> Result<(), GuestFault> {
        let (mut offset, mut left) = (offset, len as usize);
        while left > 0 {
            let part = left.min(ZEROS.len());
            self.store(offset, &ZEROS[..part])?;
            (offset, left) = (offset + part as u64, left - part);
        }
        Ok(())
    }

    /// It has ended. Gives back the map that its memory was in.
    pub fn end(&mut self) -> Option<Arc<GuestMap>> {
        self.stage = Stage::Free;
        self.map.take().map(|view| view.map().clone())
    }
}

/// What a test needs that sends answered writes again.
#[cfg(feature = "mutations")]
impl Operation {
    /// The same write, from its start.
    pub fn ghost(&self) -> Operation {
        Operation { stage: Stage::Free, done: 0, begun: false, copy: None, ..self.clone() }
    }

    /// It is sent on the next connection, if it has not been.
    pub fn raise(&mut self) {
        if self.map.is_some() {
            self.stage = Stage::Noted;
        }
    }
}
