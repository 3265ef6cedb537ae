//! What can go wrong: what a peer has done, and what came of a connection.

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
    /// More chunks in reply to one request than any reply needs.
    #[error("a reply that does not end")]
    Endless,
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
    /// A refused write whose data are too long to be read over.
    #[error("a write of {0} bytes, which is refused, and too long to be read over")]
    PayloadLength(u32),
    /// A server starts with other bytes than every server of fixed or plain newstyle does.
    #[error("the server does not speak NBD's newstyle handshake (it sent {0:#018x})")]
    Greeting(u64),
    /// A client answers the greeting with flags that it was not offered.
    #[error("client flags {0:#010x}, which were not offered")]
    ClientFlags(u32),
    /// An option that only fixed newstyle has, from a client that did not choose that.
    #[error("option {0} from a client that did not choose fixed newstyle")]
    NotFixedNewstyle(u32),
    /// An option starts with another number than `IHAVEOPT`.
    #[error("an option with magic {0:#018x}")]
    OptionMagic(u64),
    /// An option that is longer than one that is skipped.
    #[error("an option with {0} bytes of data")]
    OptionLength(u32),
    /// More options than any client needs.
    #[error("more than {0} options in one handshake")]
    TooManyOptions(u32),
    /// Something was sent behind `NBD_OPT_STARTTLS`, or behind its answer, before TLS was there: it is not trusted.
    #[error("plain text where TLS was to start")]
    PlainTextBeforeTls,
    /// An option reply starts with another number than `NBD_REP_MAGIC`.
    #[error("an option reply with magic {0:#018x}")]
    OptionReplyMagic(u64),
    /// A reply to another option than the one that was sent.
    #[error("a reply to option {got} where option {sent} was sent")]
    OptionReplyTo {
        /// Of the reply.
        got: u32,
        /// What was sent.
        sent: u32,
    },
    /// A reply type that does not answer the option, or not in that form.
    #[error("a malformed reply of type {kind:#x} to option {option}")]
    OptionReply {
        /// `NBD_REP_*`.
        kind: u32,
        /// `NBD_OPT_*`.
        option: u32,
    },
    /// More replies to one option than any server sends.
    #[error("more than {0} replies to one option")]
    TooManyReplies(u32),
    /// An option reply that is longer than its longest string.
    #[error("an option reply of {0} bytes")]
    OptionReplyLength(u32),
    /// The sum of a record is not that of its bytes, or that of queries is not theirs.
    #[error(
        "the data were changed on the way: their CRC32C is said to be {told:#010x}, and is {counted:#010x}"
    )]
    Sum {
        /// What it says.
        told: u32,
        /// What the bytes have.
        counted: u32,
    },
    /// A record with sums has a length that none has.
    #[error("the data were changed on the way: a record with a length of {0} that cannot be")]
    RecordLength(u16),
    /// The peer has got a record with a wrong sum.
    #[error("the peer says that data from here were changed on the way")]
    ChangedThere,
    /// An exporter that has sums answers a handshake as if it had none.
    #[error(
        "the handshake was changed on the way: this exporter has had CRC32C before, and is said to have none"
    )]
    SumsGone,
    /// Block sizes that are no powers of two, or that contradict each other.
    #[error("announced block sizes that cannot be: minimum {minimum}, preferred {preferred}, most {maximum}")]
    BlockSizes {
        /// Smallest unit.
        minimum: u32,
        /// Unit in which requests are cheap.
        preferred: u32,
        /// Largest payload.
        maximum: u32,
    },
}

impl Violation {
    /// Whether it says no more than that bytes were changed on the way: the peer may be right, and the network is not.
    pub fn is_of_sums(self) -> bool {
        use Violation::{ChangedThere, RecordLength, Sum, SumsGone};
        matches!(self, Sum { .. } | RecordLength(_) | ChangedThere | SumsGone)
    }
}

/// What came of a connection, for a person.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The peer broke the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// A name that cannot be sent.
    #[error("{0:?} is not a name for NBD: at most 4096 bytes of UTF-8 without NUL")]
    Name(String),
    /// A server from before 2012.
    #[error("the server speaks NBD's oldstyle handshake, which has no names: use a newer server")]
    Oldstyle,
    /// TLS is required here, and the server does not start it.
    #[error("the server does not start TLS, and plain text is not allowed for this disk: {0}")]
    TlsRefused(String),
    /// TLS did not start, or the peer has ended it for a reason that it has told.
    #[error(transparent)]
    Tls(ioplane_identity::TlsFault),
    /// This host has no identity to show.
    #[error("TLS needs an identity of this host: {0}")]
    Identity(#[from] ioplane_identity::IdentityError),
    /// The server insists on TLS.
    #[error(
        "the server requires TLS: write nbds in place of nbd (of a socket nbds+unix, with &tls-hostname=HOST)"
    )]
    TlsRequired,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// There is no export of that name.
    #[error("the server has no export called {0:?}")]
    NoSuchExport(String),
    /// The server refuses, for a reason of its own.
    #[error("the server refuses the export (NBD error {code}): {message}")]
    Refused {
        /// `NBD_REP_ERR_*` without its bit 31.
        code: u32,
        /// What it said.
        message: String,
    },
    /// Not an address of an export.
    #[error("{address:?} is no address of an export: {why}")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong, and what would do.
        why: String,
    },
    /// The export cannot be a disk here.
    #[error("the export cannot be used: {0}")]
    Unsuitable(String),
    /// More than an export takes.
    #[error("all {0} connections of the export are in use: close one, or raise their number")]
    Connections(u16),
    /// The client sent more ahead than is kept.
    #[error("the client sent {0} bytes ahead of the handshake's end")]
    Ahead(usize),
    /// More handshakes at a time than there are places.
    #[error("all {0} places for handshakes are taken")]
    Handshakes(usize),
    /// A handshake took too long.
    #[error("the handshake has not ended within {0:?}")]
    Slow(std::time::Duration),
    /// Nobody waits for the answer any more: whoever asked is not used any more.
    #[error("the question was given up, as nobody uses the disk any more")]
    GivenUp,
    /// The file that says what a predecessor has left unflushed.
    #[error("{path}: {why}: check the disk, then remove the file", path = path.display())]
    Mark {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another one may write the export, or nobody may.
    #[error("the claim to write it is refused: {0}")]
    Claim(crate::claim::ClaimRefusal),
    /// What is to be kept for this import is not.
    #[error("the reservation is refused: {0}")]
    Reservation(String),
    /// What has to be remembered of a claim cannot be written down.
    #[error("the claim cannot be remembered: {0}")]
    ClaimFile(String),
    /// Memory for a connection's data.
    #[error("memory for a connection: {0}")]
    Memory(#[from] ioplane_memory::MapError),
    /// Options that do not fit together.
    #[error("an export with {0}")]
    Options(&'static str),
    /// The system said no.
    #[error("{doing}: {source}")]
    Os {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}
