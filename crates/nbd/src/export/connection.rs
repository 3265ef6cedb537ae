//! One connection in its transmission phase: all that goes with it from core to core, and stays when its poller is parked.

use std::collections::VecDeque;
use std::time::Instant;

use ioplane_memory::{GuestFault, GuestRange, MapError};

use super::check::{Ask, Refused, Terms};
use super::ended::ConnectionEnd;
use super::memory::{Chain, DataMemory};
use super::socket::ClientSocket;
use super::status::MOST_EXTENTS;
use crate::error::Violation;
use crate::spec::*;
use crate::transmission::{Chunk, ChunkHeader, Extent, Request, SimpleReply};

/// What is received beside the data of writes: requests, and short writes that come with them.
pub(super) const STAGING: usize = 16 << 10;
/// Bytes of a block status chunk with one extent.
const STATUS_CHUNK: usize = ChunkHeader::SIZE + 12;
/// Bytes of a block status chunk before its extents.
const STATUS_HEAD: usize = ChunkHeader::SIZE + 4;
/// Bytes of the extents of the longest one.
pub(super) const STATUS_DATA: usize = 8 * MOST_EXTENTS;
/// Longest head of any other reply: an error chunk with a message of ours.
const HEAD: usize = 96;

/// Where a request in a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nobody is in the slot.
    Free,
    /// Its data are being received, or discarded.
    Receiving,
    /// Its next piece has yet to be submitted.
    Waiting,
    /// The backing has its current piece.
    InFlight,
    /// It has failed, and that is being written down.
    Unrecorded,
    /// It is looked up which parts of the disk are holes, or will be.
    Looking,
    /// Its reply is to be sent.
    Replying,
}

/// What a request in flight is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its own operation.
    Own,
    /// The flush behind a write with `NBD_CMD_FLAG_FUA`.
    FlushBehind,
}

/// The place of one request.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub phase: Phase,
    pub request: Request,
    pub ask: Ask,
    pub stage: Stage,
    pub chain: Chain,
    /// Bytes of a transfer whose pieces have ended.
    pub done: u32,
    /// Bytes of the piece after those.
    pub piece: u32,
    pub started: Instant,
    /// Bytes of the reply's head, and of the data behind it.
    head: u16,
    data: u32,
}

impl Slot {
    /// Bytes of the reply.
    fn reply(&self) -> u64 {
        u64::from(self.head) + u64::from(self.data)
    }

    /// Whether it moves data between memory and backing.
    pub fn transfers(&self) -> bool {
        matches!(self.ask, Ask::Read | Ask::Write)
    }

    /// Whether a flush has to follow before the reply.
    pub fn flushes_behind(&self) -> bool {
        let writes = matches!(self.ask, Ask::Write | Ask::Trim | Ask::WriteZeroes);
        writes && self.request.flags & NBD_CMD_FLAG_FUA != 0 && self.stage == Stage::Own
    }
}

/// What comes next from the socket.
#[derive(Debug, Clone, Copy)]
pub(super) enum Intake {
    /// A request.
    Header,
    /// A request has come and is not begun: there is no slot or no memory for it, or a limit holds it back.
    Held(Request),
    /// The data of the write in a slot, of which so much is there.
    Payload { slot: u16, got: u32 },
    /// Data of a write that is refused.
    Discard { slot: u16, left: u32, refused: Refused },
}

/// Bytes that were received ahead.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Staging {
    fn new(first: &[u8]) -> Option<Staging> {
        let mut bytes = vec![0; STAGING].into_boxed_slice();
        bytes.get_mut(..first.len())?.copy_from_slice(first);
        Some(Staging { bytes, start: 0, end: first.len() })
    }

    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn consume(&mut self, bytes: usize) {
        self.start = (self.start + bytes).min(self.end);
    }

    /// The room behind what is there, which is less than a request.
    pub fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..]
    }

    /// So many bytes are in the room.
    pub fn received(&mut self, bytes: usize) {
        self.end = (self.end + bytes).min(self.bytes.len());
    }
}

/// How a connection is set up.
#[derive(Debug)]
pub(super) struct Setup<'a> {
    pub queue: u16,
    pub terms: Terms,
    /// IDs of the metadata contexts.
    pub contexts: Vec<u32>,
    /// Which of them is about holes, if there is one and they are told.
    pub allocation: Option<u32>,
    /// Most requests at a time.
    pub depth: u16,
    /// Bytes of data at a time.
    pub memory: u32,
    /// What the client has sent beyond the handshake.
    pub ahead: &'a [u8],
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub socket: ClientSocket,
    pub queue: u16,
    pub terms: Terms,
    pub memory: DataMemory,
    pub staging: Staging,
    pub intake: Intake,
    pub slots: Box<[Slot]>,
    /// Slots whose next piece has not been submitted.
    pub waiting: VecDeque<u16>,
    pub end: Option<ConnectionEnd>,
    /// How many flushes had failed when the client was told which instance the export is, if it goes by that ([`super::Export::bind`]).
    pub told_failures: Option<u64>,
    /// Its owner has been told of the end.
    pub announced: bool,
    /// Nothing is sent any more.
    mute: bool,
    contexts: Vec<u32>,
    allocation: Option<u32>,
    free: Vec<u16>,
    /// Heads of replies, one after the other by slot.
    heads: Box<[u8]>,
    head_size: usize,
    /// Slots whose reply is to be sent, and how much of the first one is.
    outgoing: VecDeque<u16>,
    sent: u64,
}

impl Connection {
    /// `None` when more was sent ahead than is kept.
    pub fn new(socket: ClientSocket, setup: Setup<'_>) -> Result<Option<Connection>, MapError> {
        let Some(staging) = Staging::new(setup.ahead) else { return Ok(None) };
        let depth = usize::from(setup.depth.max(1));
        let head_size = HEAD.max(STATUS_CHUNK * setup.contexts.len());
        let request = Request { flags: 0, command: 0, cookie: 0, offset: 0, length: 0 };
        let slot = Slot {
            phase: Phase::Free,
            request,
            ask: Ask::Flush,
            stage: Stage::Own,
            chain: Chain::EMPTY,
            done: 0,
            piece: 0,
            started: Instant::now(),
            head: 0,
            data: 0,
        };
        Ok(Some(Connection {
            socket,
            queue: setup.queue,
            terms: setup.terms,
            memory: DataMemory::new(setup.memory)?,
            staging,
            intake: Intake::Header,
            slots: vec![slot; depth].into_boxed_slice(),
            waiting: VecDeque::with_capacity(depth),
            end: None,
            told_failures: None,
            announced: false,
            mute: false,
            contexts: setup.contexts,
            allocation: setup.allocation,
            free: (0..depth as u16).rev().collect(),
            heads: vec![0; depth * head_size].into_boxed_slice(),
            head_size,
            outgoing: VecDeque::with_capacity(depth),
            sent: 0,
        }))
    }

    /// Most requests at a time.
    pub fn depth(&self) -> u16 {
        self.slots.len() as u16
    }

    /// Whether it may ask for holes.
    pub fn tells_holes(&self) -> bool {
        self.allocation.is_some()
    }

    /// Whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Gives a request a slot, and memory for its data. The caller has seen that one is free.
    pub fn enter(&mut self, request: Request, ask: Ask, chain: Chain, now: Instant) -> Option<u16> {
        let number = self.free.pop()?;
        let slot = &mut self.slots[usize::from(number)];
        *slot = Slot {
            phase: Phase::Receiving,
            request,
            ask,
            stage: Stage::Own,
            chain,
            done: 0,
            piece: 0,
            started: now,
            head: 0,
            data: 0,
        };
        Some(number)
    }

    /// The connection ends: no request is taken any more. Replies are still sent where the client may wait for them.
    pub fn end(&mut self, end: ConnectionEnd) {
        use ConnectionEnd::{Closed, Disconnected, FlushFailed};
        if !matches!(end, Disconnected | Closed | FlushFailed) {
            self.mute = true;
            self.sent = 0;
            while let Some(number) = self.outgoing.pop_front() {
                self.leave(number);
            }
        }
        self.end.get_or_insert(end);
    }

    /// The connection ends for what the client did.
    pub fn violated(&mut self, violation: Violation) {
        self.end(ConnectionEnd::Violation(violation));
    }

    fn leave(&mut self, number: u16) {
        let slot = &mut self.slots[usize::from(number)];
        slot.phase = Phase::Free;
        let chain = std::mem::replace(&mut slot.chain, Chain::EMPTY);
        self.memory.give_back(chain);
        self.free.push(number);
    }

    /// Whether replies are to be sent.
    pub fn has_replies(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Whether replies are to be sent, or to go to the kernel.
    pub fn has_output(&self) -> bool {
        self.has_replies() || (!self.mute && self.socket.has_unsent())
    }

    /// Puts the reply to the request in a slot among those to be sent.
    pub fn reply(&mut self, number: u16, outcome: Result<(), Refused>) {
        let at = usize::from(number);
        let slot = &mut self.slots[at];
        let head = &mut self.heads[at * self.head_size..][..self.head_size];
        let Request { cookie, offset, length, .. } = slot.request;
        let reads = slot.ask == Ask::Read && outcome.is_ok();
        let written = match outcome {
            Err((error, message)) if self.terms.structured => {
                Chunk::Error { error, message }.encode(cookie, true, head)
            }
            Ok(()) if reads && self.terms.structured => match length {
                0 => Chunk::None.encode(cookie, true, head),
                _ => Chunk::OffsetData { offset, length }.encode(cookie, true, head),
            },
            Ok(()) if slot.ask == Ask::BlockStatus => {
                status(self.contexts.iter().copied(), cookie, length, (true, head))
            }
            outcome => {
                let error = outcome.err().map_or(0, |(error, _)| error);
                head[..SimpleReply::SIZE].copy_from_slice(&SimpleReply { error, cookie }.encode());
                Some(SimpleReply::SIZE)
            }
        };
        debug_assert!(written.is_some(), "a head of {} bytes is too short", self.head_size);
        slot.head = written.unwrap_or(0) as u16;
        slot.data = if reads { length } else { 0 };
        if !reads {
            let chain = std::mem::replace(&mut slot.chain, Chain::EMPTY);
            self.memory.give_back(chain);
        }
        self.send(number);
    }

    /// The same of a block status request: `extents` for holes, nothing for other contexts. Its memory has room for them.
    pub fn reply_status(&mut self, number: u16, extents: &[Extent]) -> Result<(), GuestFault> {
        let at = usize::from(number);
        let slot = &mut self.slots[at];
        let Some(context) = self.allocation else {
            self.reply(number, Ok(()));
            return Ok(());
        };
        let Request { cookie, length, .. } = slot.request;
        let mut chunk = [0; STATUS_HEAD + STATUS_DATA];
        let last = Chunk::BlockStatus { context, extents };
        let Some((size, written)) = last.encode(cookie, true, &mut chunk).and_then(|size| {
            let head = &mut self.heads[at * self.head_size..][..self.head_size];
            let others = self.contexts.iter().copied().filter(|other| *other != context);
            let written = status(others, cookie, length, (false, head))?;
            head.get_mut(written..written + STATUS_HEAD)?.copy_from_slice(&chunk[..STATUS_HEAD]);
            Some((size, written))
        }) else {
            debug_assert!(false, "{} extents do not fit", extents.len());
            self.reply(number, Ok(()));
            return Ok(());
        };
        self.memory.write(slot.chain, 0, &chunk[STATUS_HEAD..size])?;
        (slot.head, slot.data) = ((written + STATUS_HEAD) as u16, (size - STATUS_HEAD) as u32);
        self.send(number);
        Ok(())
    }

    /// Puts a reply that is ready among those to be sent.
    fn send(&mut self, number: u16) {
        self.slots[usize::from(number)].phase = Phase::Replying;
        if self.mute {
            self.leave(number);
        } else {
            self.outgoing.push_back(number);
        }
    }

    /// What is to be sent next, about `most` bytes of it: calls `part` in the order of the stream, until that says that it has no room.
    pub fn each_part<'a>(
        &'a self,
        ranges: &mut Vec<GuestRange>,
        most: u64,
        mut part: impl FnMut(ReplyPart<'a>) -> Result<bool, GuestFault>,
    ) -> Result<(), GuestFault> {
        let (mut skip, mut left) = (self.sent, most);
        for number in &self.outgoing {
            let at = usize::from(*number);
            let slot = &self.slots[at];
            let head = &self.heads[at * self.head_size..][..usize::from(slot.head)];
            let passed = skip.min(head.len() as u64);
            if left == 0 || !part(ReplyPart::Head(&head[passed as usize..]))? {
                return Ok(());
            }
            left = left.saturating_sub(head.len() as u64 - passed);
            // Of the data, what was sent before; less than all of them, or the slot would be free.
            let sent = (skip - passed) as u32;
            skip = 0;
            let len = u64::from(slot.data - sent).min(left) as u32;
            self.memory.ranges(slot.chain, sent, len, ranges);
            for range in ranges.iter() {
                if !part(ReplyPart::Range(*range))? {
                    return Ok(());
                }
            }
            left -= u64::from(len);
            if sent + len < slot.data {
                return Ok(());
            }
        }
        Ok(())
    }

    /// So many bytes of replies were sent: slots whose reply is out are free.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        while let Some(number) = self.outgoing.front().copied() {
            let reply = self.slots[usize::from(number)].reply();
            if reply > self.sent {
                break;
            }
            self.sent -= reply;
            self.outgoing.pop_front();
            self.leave(number);
        }
    }

    /// Its channel is gone with what was in flight: that is to be submitted again. Says how many requests that is.
    pub fn fence(&mut self) -> u64 {
        let mut count = 0;
        for number in 0..self.depth() {
            let slot = &mut self.slots[usize::from(number)];
            if matches!(slot.phase, Phase::InFlight | Phase::Unrecorded | Phase::Looking) {
                slot.phase = Phase::Waiting;
                self.waiting.push_back(number);
                count += 1;
            }
        }
        count
    }
}

/// A part of the stream of replies.
pub(super) enum ReplyPart<'a> {
    /// The head of a reply.
    Head(&'a [u8]),
    /// Data of a read.
    Range(GuestRange),
}

/// One extent for each context, of which nothing is known but that it may be read; `ends`: the last one ends the reply.
fn status(
    contexts: impl Iterator<Item = u32>,
    cookie: u64,
    length: u32,
    (ends, head): (bool, &mut [u8]),
) -> Option<usize> {
    let mut written = 0;
    let mut contexts = contexts.peekable();
    while let Some(context) = contexts.next() {
        let extents = [Extent { length, flags: 0 }];
        let chunk = Chunk::BlockStatus { context, extents: &extents };
        let last = ends && contexts.peek().is_none();
        written += chunk.encode(cookie, last, head.get_mut(written..)?)?;
    }
    Some(written)
}
