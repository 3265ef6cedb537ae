//! Replies as a client reads them: bytes in, events out, in pieces of any size.

use super::chunk::Extent;
use super::field;
use super::reply::{ChunkHeader, SimpleReply};
use super::request::Request;
use crate::error::Violation;
use crate::spec::{
    MAX_EXTENTS, MAX_STRING, NBD_CMD_BLOCK_STATUS, NBD_CMD_READ, NBD_REPLY_FLAG_DONE,
    NBD_REPLY_TYPE_BLOCK_STATUS, NBD_REPLY_TYPE_ERROR_OFFSET, NBD_REPLY_TYPE_FLAG_ERROR, NBD_REPLY_TYPE_NONE,
    NBD_REPLY_TYPE_OFFSET_DATA, NBD_REPLY_TYPE_OFFSET_HOLE, NBD_SIMPLE_REPLY_MAGIC,
    NBD_STRUCTURED_REPLY_MAGIC,
};

/// Largest payload of an error chunk: the longest message, and room for fields that are still to be specified.
const MAX_ERROR_PAYLOAD: u32 = 2 * MAX_STRING as u32;

/// What a server has said. Every request in flight gets its events, in any order with those of others, and then one
/// [`ReplyEvent::Done`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyEvent {
    /// The next `length` bytes of the stream are what the export has at `offset`. Take as many of them as are there, say so by
    /// [`ReplyReader::advance`], and ask again: the event comes back with what is missing.
    Payload {
        /// Of the request.
        cookie: u64,
        /// In the export; in the range that was asked for.
        offset: u64,
        /// Bytes that are still to come; not zero.
        length: u32,
    },
    /// Zeros.
    Hole {
        /// Of the request.
        cookie: u64,
        /// In the export; in the range that was asked for.
        offset: u64,
        /// Bytes; not zero.
        length: u32,
    },
    /// The next extent of a metadata context. The first one starts at the request's offset.
    BlockStatus {
        /// Of the request.
        cookie: u64,
        /// The metadata context's ID.
        context: u32,
        /// The last one may reach beyond the request.
        extent: Extent,
    },
    /// The request failed; [`ReplyReader::message`] may have a word for people. More than one may come.
    Error {
        /// Of the request.
        cookie: u64,
        /// As the server sent it; not zero. A value that the specification does not list means `NBD_EINVAL`.
        error: u32,
        /// Where it failed, if the server knows; any number.
        offset: Option<u64>,
    },
    /// The reply is complete: the cookie is free.
    Done {
        /// Of the request.
        cookie: u64,
    },
}

/// Where in the stream the reader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before or in the header of a reply.
    Header,
    /// Before or in what follows the header of a chunk.
    Fields,
    /// In the bytes of a read.
    Payload { offset: u64, left: u32 },
    /// Between the extents of a metadata context, with so many to come.
    Extents { context: u32, left: u32 },
    /// In an error message, with so many bytes in it and so many after it.
    Message { error: u32, length: usize, after: u32 },
    /// In what follows an error message; `offset` once it is known.
    AfterMessage { error: u32, offset: Option<u64>, left: u32 },
    /// After a simple reply with an error.
    Failed { error: u32 },
    /// A reply has ended.
    Done,
}

/// Reads the stream of a server. Its memory does not grow, and it allocates only when it is made.
///
/// It checks every chunk against its request. It does not check that the data of a read cover the whole request and do not overlap,
/// as that takes memory for each request: the caller counts the bytes of [`ReplyEvent::Payload`] and [`ReplyEvent::Hole`], which
/// must be as many as were asked for at a [`ReplyEvent::Done`] without an error. After a [`Violation`] the stream cannot be read on.
#[derive(Debug)]
pub struct ReplyReader {
    structured: bool,
    state: State,
    /// Of the reply that is being read.
    header: ChunkHeader,
    request: Request,
    /// What has come of a header or of fields.
    gathered: [u8; ChunkHeader::SIZE],
    filled: usize,
    message: Box<[u8; MAX_STRING]>,
    message_length: usize,
}

impl ReplyReader {
    /// At the start of the transmission phase. `structured`: structured replies were negotiated.
    pub fn new(structured: bool) -> ReplyReader {
        ReplyReader {
            structured,
            state: State::Header,
            header: ChunkHeader { flags: 0, kind: 0, cookie: 0, length: 0 },
            request: Request { flags: 0, command: 0, cookie: 0, offset: 0, length: 0 },
            gathered: [0; ChunkHeader::SIZE],
            filled: 0,
            message: Box::new([0; MAX_STRING]),
            message_length: 0,
        }
    }

    /// Back to the start of the transmission phase, of another connection. Does not allocate.
    pub fn restart(&mut self, structured: bool) {
        self.structured = structured;
        self.state = State::Header;
        (self.filled, self.message_length) = (0, 0);
    }

    /// The message of the last [`ReplyEvent::Error`], until [`ReplyReader::next`] is called; empty if there was none. Should be
    /// UTF-8, and is what the server sent.
    pub fn message(&self) -> &[u8] {
        &self.message[..self.message_length]
    }

    /// How many bytes of payload come next in the stream. As many may be read straight to where they belong.
    pub fn payload(&self) -> u32 {
        if let State::Payload { left, .. } = self.state { left } else { 0 }
    }

    /// The caller has taken so many bytes of payload from the stream: at most [`ReplyReader::payload`].
    pub fn advance(&mut self, taken: u32) {
        debug_assert!(taken <= self.payload(), "took {taken} bytes of {}", self.payload());
        if let State::Payload { offset, left } = &mut self.state {
            let taken = taken.min(*left);
            *offset += u64::from(taken);
            *left -= taken;
            if *left == 0 {
                self.state = self.after_chunk();
            }
        }
    }

    /// The next event, and what it has used of `input` taken off its front; `None` when more input is needed, and then `input` is
    /// empty. `request` finds the request in flight that has a cookie.
    pub fn next(
        &mut self,
        input: &mut &[u8],
        request: impl Fn(u64) -> Option<Request>,
    ) -> Result<Option<ReplyEvent>, Violation> {
        loop {
            let cookie = self.header.cookie;
            match self.state {
                State::Header => {
                    if !self.header(input, &request)? {
                        return Ok(None);
                    }
                }
                State::Failed { error } => {
                    self.message_length = 0;
                    self.state = State::Done;
                    return Ok(Some(ReplyEvent::Error { cookie, error, offset: None }));
                }
                State::Fields => match self.fields(input)? {
                    Fields::Short => return Ok(None),
                    Fields::Read(None) => {}
                    Fields::Read(event) => return Ok(event),
                },
                State::Payload { offset, left } => {
                    return Ok(Some(ReplyEvent::Payload { cookie, offset, length: left }));
                }
                State::Extents { context, left } => {
                    let Some(bytes) = self.gather::<8>(input) else { return Ok(None) };
                    let length = u32::from_be_bytes(field(&bytes, 0));
                    if length == 0 {
                        return Err(Violation::EmptyExtent);
                    }
                    self.state = match left {
                        1 => self.after_chunk(),
                        _ => State::Extents { context, left: left - 1 },
                    };
                    let extent = Extent { length, flags: u32::from_be_bytes(field(&bytes, 4)) };
                    return Ok(Some(ReplyEvent::BlockStatus { cookie, context, extent }));
                }
                State::Message { error, length, after } => {
                    let take = input.len().min(length - self.message_length);
                    let (here, rest) = input.split_at(take);
                    self.message[self.message_length..][..take].copy_from_slice(here);
                    self.message_length += take;
                    *input = rest;
                    if self.message_length < length {
                        return Ok(None);
                    }
                    self.state = State::AfterMessage { error, offset: None, left: after };
                }
                State::AfterMessage { error, offset: None, left }
                    if self.header.kind == NBD_REPLY_TYPE_ERROR_OFFSET =>
                {
                    let Some(bytes) = self.gather::<8>(input) else { return Ok(None) };
                    let offset = Some(u64::from_be_bytes(bytes));
                    self.state = State::AfterMessage { error, offset, left: left - 8 };
                }
                State::AfterMessage { error, offset, left } => {
                    let skip = input.len().min(left as usize);
                    *input = &input[skip..];
                    let left = left - skip as u32;
                    if left > 0 {
                        self.state = State::AfterMessage { error, offset, left };
                        return Ok(None);
                    }
                    self.state = self.after_chunk();
                    return Ok(Some(ReplyEvent::Error { cookie, error, offset }));
                }
                State::Done => {
                    self.state = State::Header;
                    return Ok(Some(ReplyEvent::Done { cookie }));
                }
            }
        }
    }

    fn after_chunk(&self) -> State {
        if self.header.is_last() { State::Done } else { State::Header }
    }

    /// The next `N` bytes, once all have come.
    fn gather<const N: usize>(&mut self, input: &mut &[u8]) -> Option<[u8; N]> {
        if !self.fill(input, N) {
            return None;
        }
        self.filled = 0;
        Some(field(&self.gathered, 0))
    }

    /// Whether `size` bytes have been gathered.
    fn fill(&mut self, input: &mut &[u8], size: usize) -> bool {
        let take = input.len().min(size.saturating_sub(self.filled));
        let (here, rest) = input.split_at(take);
        self.gathered[self.filled..][..take].copy_from_slice(here);
        self.filled += take;
        *input = rest;
        self.filled >= size
    }

    /// Reads a header; false when it has not come whole.
    fn header(
        &mut self,
        input: &mut &[u8],
        request: impl Fn(u64) -> Option<Request>,
    ) -> Result<bool, Violation> {
        if !self.fill(input, 4) {
            return Ok(false);
        }
        match u32::from_be_bytes(field(&self.gathered, 0)) {
            NBD_SIMPLE_REPLY_MAGIC => {
                let Some(bytes) = self.gather(input) else { return Ok(false) };
                self.simple(SimpleReply::decode(&bytes)?, request)?;
            }
            NBD_STRUCTURED_REPLY_MAGIC if !self.structured => return Err(Violation::NotNegotiated),
            NBD_STRUCTURED_REPLY_MAGIC => {
                let Some(bytes) = self.gather(input) else { return Ok(false) };
                self.chunk(ChunkHeader::decode(&bytes)?, request)?;
            }
            magic => return Err(Violation::ReplyMagic(magic)),
        }
        Ok(true)
    }

    fn simple(
        &mut self,
        reply: SimpleReply,
        request: impl Fn(u64) -> Option<Request>,
    ) -> Result<(), Violation> {
        let cookie = reply.cookie;
        self.request = request(cookie).ok_or(Violation::UnknownCookie(cookie))?;
        self.header =
            ChunkHeader { flags: NBD_REPLY_FLAG_DONE, kind: NBD_REPLY_TYPE_NONE, cookie, length: 0 };
        self.state = match (reply.error, self.request.command) {
            // Harmless, if not allowed, in reply to a read that asked for chunks: it has no data.
            (error @ 1.., _) => State::Failed { error },
            (0, NBD_CMD_READ) if self.structured => return Err(Violation::SimpleReply(NBD_CMD_READ)),
            (0, command @ NBD_CMD_BLOCK_STATUS) => return Err(Violation::SimpleReply(command)),
            (0, NBD_CMD_READ) if self.request.length > 0 => {
                State::Payload { offset: self.request.offset, left: self.request.length }
            }
            (0, _) => State::Done,
        };
        Ok(())
    }

    fn chunk(
        &mut self,
        header: ChunkHeader,
        request: impl Fn(u64) -> Option<Request>,
    ) -> Result<(), Violation> {
        let ChunkHeader { kind, cookie, length, .. } = header;
        self.request = request(cookie).ok_or(Violation::UnknownCookie(cookie))?;
        let command = self.request.command;
        let fits = match (kind, command) {
            (NBD_REPLY_TYPE_NONE, _) => length == 0,
            (NBD_REPLY_TYPE_OFFSET_DATA, NBD_CMD_READ) => length > 8,
            (NBD_REPLY_TYPE_OFFSET_HOLE, NBD_CMD_READ) => length == 12,
            (NBD_REPLY_TYPE_BLOCK_STATUS, NBD_CMD_BLOCK_STATUS) => {
                (12..=4 + 8 * MAX_EXTENTS).contains(&length) && length % 8 == 4
            }
            (NBD_REPLY_TYPE_ERROR_OFFSET, _) => (14..=MAX_ERROR_PAYLOAD).contains(&length),
            (NBD_REPLY_TYPE_FLAG_ERROR.., _) => (6..=MAX_ERROR_PAYLOAD).contains(&length),
            _ => return Err(Violation::UnexpectedChunk { kind, command }),
        };
        if !fits {
            return Err(Violation::ChunkLength { kind, length });
        }
        self.header = header;
        self.state = match kind {
            NBD_REPLY_TYPE_NONE if !header.is_last() => return Err(Violation::NotDone),
            NBD_REPLY_TYPE_NONE => State::Done,
            _ => State::Fields,
        };
        Ok(())
    }

    /// Reads what follows the header of a chunk, up to what has no fixed length.
    fn fields(&mut self, input: &mut &[u8]) -> Result<Fields, Violation> {
        let ChunkHeader { kind, cookie, length, .. } = self.header;
        match kind {
            NBD_REPLY_TYPE_OFFSET_DATA => {
                let Some(bytes) = self.gather::<8>(input) else { return Ok(Fields::Short) };
                let (offset, left) = (u64::from_be_bytes(bytes), length - 8);
                self.within(offset, left)?;
                self.state = State::Payload { offset, left };
            }
            NBD_REPLY_TYPE_OFFSET_HOLE => {
                let Some(bytes) = self.gather::<12>(input) else { return Ok(Fields::Short) };
                let (offset, length) =
                    (u64::from_be_bytes(field(&bytes, 0)), u32::from_be_bytes(field(&bytes, 8)));
                self.within(offset, length)?;
                self.state = self.after_chunk();
                return Ok(Fields::Read(Some(ReplyEvent::Hole { cookie, offset, length })));
            }
            NBD_REPLY_TYPE_BLOCK_STATUS => {
                let Some(bytes) = self.gather::<4>(input) else { return Ok(Fields::Short) };
                self.state = State::Extents { context: u32::from_be_bytes(bytes), left: (length - 4) / 8 };
            }
            _ => {
                let Some(bytes) = self.gather::<6>(input) else { return Ok(Fields::Short) };
                let error = u32::from_be_bytes(field(&bytes, 0));
                let message = u16::from_be_bytes(field(&bytes, 4));
                if error == 0 {
                    return Err(Violation::ErrorZero);
                }
                let fixed = if kind == NBD_REPLY_TYPE_ERROR_OFFSET { 14 } else { 6 };
                let longest = (length - fixed).min(MAX_STRING as u32);
                if u32::from(message) > longest {
                    return Err(Violation::MessageLength(message));
                }
                self.message_length = 0;
                let after = length - 6 - u32::from(message);
                self.state = State::Message { error, length: message.into(), after };
            }
        }
        Ok(Fields::Read(None))
    }

    fn within(&self, offset: u64, length: u32) -> Result<(), Violation> {
        match self.request.covers(offset, length) {
            true => Ok(()),
            false => Err(Violation::OutsideRequest { offset, length }),
        }
    }
}

/// What reading the fields of a chunk came to.
enum Fields {
    /// They have not come whole.
    Short,
    /// All is there, perhaps with an event.
    Read(Option<ReplyEvent>),
}
