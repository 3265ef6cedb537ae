//! What a peer has done wrong.

/// A peer broke the protocol. Its connection ends; nothing else does. Plain data, so that a poller can count and hand it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A request starts with another number than `NBD_REQUEST_MAGIC`.
    #[error("a request with magic {0:#010x}: the client lost its place in the stream, or does not speak NBD")]
    RequestMagic(u32),
    /// A reply starts with neither of the two magic numbers.
    #[error("a reply with magic {0:#010x}: the server lost its place in the stream, or does not speak NBD")]
    ReplyMagic(u32),
    /// A structured reply chunk although none were negotiated.
    #[error("a structured reply that was not negotiated")]
    NotNegotiated,
    /// A reply to no request in flight.
    #[error("a reply with cookie {0:#x}, which no request in flight has")]
    UnknownCookie(u64),
    /// A simple reply, without an error, to a command that only a structured reply can answer.
    #[error("a simple reply to command {0}, which only a structured reply answers")]
    SimpleReply(u16),
    /// A chunk of a type that this client does not know, or that does not answer this request.
    #[error("a chunk of type {kind} in reply to command {command}")]
    UnexpectedChunk {
        /// `NBD_REPLY_TYPE_*`.
        kind: u16,
        /// `NBD_CMD_*` of the request.
        command: u16,
    },
    /// The length of a chunk does not fit its type.
    #[error("a chunk of type {kind} with a payload of {length} bytes")]
    ChunkLength {
        /// `NBD_REPLY_TYPE_*`.
        kind: u16,
        /// Bytes of payload.
        length: u32,
    },
    /// A chunk about bytes that were not asked for, or about none.
    #[error("a chunk about {length} bytes at {offset}, outside its request")]
    OutsideRequest {
        /// Where the chunk starts in the export.
        offset: u64,
        /// Its bytes.
        length: u32,
    },
    /// `NBD_REPLY_TYPE_NONE` without `NBD_REPLY_FLAG_DONE`.
    #[error("a chunk of type NONE that is not the last one")]
    NotDone,
    /// An error chunk with error 0.
    #[error("an error chunk that reports no error")]
    ErrorZero,
    /// An error message that does not fit its chunk, or that is longer than a string may be.
    #[error("an error message of {0} bytes")]
    MessageLength(u16),
    /// A chunk about bytes that an earlier chunk of the same reply was about.
    #[error("two chunks of one reply are about the byte at {offset} of the request")]
    Overlap {
        /// First byte of the later one, from the start of the request.
        offset: u64,
    },
    /// The data of a read come in more separate pieces than are kept track of.
    #[error("the data of a read in more than 32 separate pieces")]
    Scattered,
    /// A read that succeeded without all of its data.
    #[error("a read of {wanted} bytes that ended with {came}")]
    Incomplete {
        /// Bytes that were asked for.
        wanted: u32,
        /// Bytes that came.
        came: u32,
    },
    /// Something was sent although no request is in flight.
    #[error("data although nothing was asked for")]
    Unasked,
    /// A block status extent of no bytes.
    #[error("a block status extent of zero bytes")]
    EmptyExtent,
}
