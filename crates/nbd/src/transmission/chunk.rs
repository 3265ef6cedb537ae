//! Chunks as a server writes them (section "Structured reply types").

use super::reply::ChunkHeader;
use crate::spec::{
    MAX_STRING, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_BLOCK_STATUS, NBD_REPLY_TYPE_ERROR,
    NBD_REPLY_TYPE_ERROR_OFFSET, NBD_REPLY_TYPE_NONE, NBD_REPLY_TYPE_OFFSET_DATA, NBD_REPLY_TYPE_OFFSET_HOLE,
};

/// One descriptor of a block status chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes; not zero.
    pub length: u32,
    /// What the metadata context defines; `NBD_STATE_*` for `base:allocation`.
    pub flags: u32,
}

/// A chunk of a structured reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Nothing but the end of the reply; always the last one.
    None,
    /// The next `length` bytes in the stream, which the caller sends behind it, are what is at `offset`.
    OffsetData {
        /// First byte in the export.
        offset: u64,
        /// Bytes; from 1 to 2^32 - 9.
        length: u32,
    },
    /// Zeros.
    OffsetHole {
        /// First byte in the export.
        offset: u64,
        /// Bytes; not zero.
        length: u32,
    },
    /// Extents from the request's offset on.
    BlockStatus {
        /// The metadata context's ID.
        context: u32,
        /// At least one, at most `MAX_EXTENTS`.
        extents: &'a [Extent],
    },
    /// The request failed.
    Error {
        /// Error value; not zero.
        error: u32,
        /// For people; what is beyond `MAX_STRING` bytes is left out.
        message: &'a str,
    },
    /// The request failed at an offset.
    ErrorOffset {
        /// Error value; not zero.
        error: u32,
        /// For people; what is beyond `MAX_STRING` bytes is left out.
        message: &'a str,
        /// Where.
        offset: u64,
    },
}

impl Chunk<'_> {
    /// Bytes of the encoded chunk, without the data of an [`Chunk::OffsetData`].
    pub fn encoded_len(&self) -> usize {
        ChunkHeader::SIZE
            + match self {
                Chunk::None => 0,
                Chunk::OffsetData { .. } => 8,
                Chunk::OffsetHole { .. } => 12,
                Chunk::BlockStatus { extents, .. } => 4 + 8 * extents.len(),
                Chunk::Error { message, .. } => 6 + fitting(message).len(),
                Chunk::ErrorOffset { message, .. } => 14 + fitting(message).len(),
            }
    }

    /// Writes the chunk to the start of `out`; `None` when it has no room for [`Chunk::encoded_len`] bytes. With `last` it ends the
    /// reply; [`Chunk::None`] always does.
    pub fn encode(&self, cookie: u64, last: bool, out: &mut [u8]) -> Option<usize> {
        let size = self.encoded_len();
        let mut out = Writer(out.get_mut(..size)?);
        let (kind, data) = match self {
            Chunk::None => (NBD_REPLY_TYPE_NONE, 0),
            Chunk::OffsetData { length, .. } => (NBD_REPLY_TYPE_OFFSET_DATA, *length),
            Chunk::OffsetHole { .. } => (NBD_REPLY_TYPE_OFFSET_HOLE, 0),
            Chunk::BlockStatus { .. } => (NBD_REPLY_TYPE_BLOCK_STATUS, 0),
            Chunk::Error { .. } => (NBD_REPLY_TYPE_ERROR, 0),
            Chunk::ErrorOffset { .. } => (NBD_REPLY_TYPE_ERROR_OFFSET, 0),
        };
        let last = last || matches!(self, Chunk::None);
        let flags = if last { NBD_REPLY_FLAG_DONE } else { 0 };
        let length = u32::try_from(size - ChunkHeader::SIZE).ok()?.checked_add(data)?;
        out.put(&ChunkHeader { flags, kind, cookie, length }.encode());
        match self {
            Chunk::None => {}
            Chunk::OffsetData { offset, .. } => out.put(&offset.to_be_bytes()),
            Chunk::OffsetHole { offset, length } => {
                out.put(&offset.to_be_bytes());
                out.put(&length.to_be_bytes());
            }
            Chunk::BlockStatus { context, extents } => {
                out.put(&context.to_be_bytes());
                for extent in *extents {
                    out.put(&extent.length.to_be_bytes());
                    out.put(&extent.flags.to_be_bytes());
                }
            }
            Chunk::Error { error, message } => out.error(*error, message),
            Chunk::ErrorOffset { error, message, offset } => {
                out.error(*error, message);
                out.put(&offset.to_be_bytes());
            }
        }
        Some(size)
    }
}

/// As much of a message as a string may have.
fn fitting(message: &str) -> &str {
    &message[..message.floor_char_boundary(MAX_STRING)]
}

/// Fills a buffer that is as long as what is put.
struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let (here, rest) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        here.copy_from_slice(bytes);
        self.0 = rest;
    }

    fn error(&mut self, error: u32, message: &str) {
        let message = fitting(message);
        self.put(&error.to_be_bytes());
        self.put(&(message.len() as u16).to_be_bytes());
        self.put(message.as_bytes());
    }
}
