//! Constants of NBD, by their names in `doc/proto.md`. All integers on the wire are big-endian.

/// First eight bytes of every server: "NBDMAGIC".
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of a newstyle server, and the start of every option: "IHAVEOPT".
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Second eight bytes of an oldstyle server.
pub const CLISERV_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Start of every option reply.
pub const NBD_REP_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const NBD_REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of every simple reply.
pub const NBD_SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of every structured reply chunk.
pub const NBD_STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Longest string that a peer may send (section "Conventions").
pub const MAX_STRING: usize = 4096;
/// Zeros after the answer to `NBD_OPT_EXPORT_NAME`, unless `NBD_FLAG_C_NO_ZEROES` was negotiated.
pub const EXPORT_NAME_ZEROES: usize = 124;
/// Maximum payload, where none has been announced (section "Size constraints").
pub const DEFAULT_MAX_PAYLOAD: u32 = 1 << 25;
/// Preferred block size, where none has been announced.
pub const DEFAULT_PREFERRED_BLOCK: u32 = 1 << 12;
/// Largest minimum block size that may be announced.
pub const LARGEST_MINIMUM_BLOCK: u32 = 1 << 16;

// Handshake flags.
/// The server speaks fixed newstyle.
pub const NBD_FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// The server can leave the zeros after `NBD_OPT_EXPORT_NAME` out.
pub const NBD_FLAG_NO_ZEROES: u16 = 1 << 1;

// Client flags.
/// The client speaks fixed newstyle.
pub const NBD_FLAG_C_FIXED_NEWSTYLE: u32 = 1 << 0;
/// The client wants no zeros after `NBD_OPT_EXPORT_NAME`.
pub const NBD_FLAG_C_NO_ZEROES: u32 = 1 << 1;

// Transmission flags.
/// Always set.
pub const NBD_FLAG_HAS_FLAGS: u16 = 1 << 0;
/// The export cannot be written.
pub const NBD_FLAG_READ_ONLY: u16 = 1 << 1;
/// The server understands `NBD_CMD_FLUSH`.
pub const NBD_FLAG_SEND_FLUSH: u16 = 1 << 2;
/// The server understands `NBD_CMD_FLAG_FUA`.
pub const NBD_FLAG_SEND_FUA: u16 = 1 << 3;
/// The export is a rotating disk.
pub const NBD_FLAG_ROTATIONAL: u16 = 1 << 4;
/// The server understands `NBD_CMD_TRIM`.
pub const NBD_FLAG_SEND_TRIM: u16 = 1 << 5;
/// The server understands `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE`.
pub const NBD_FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// The server understands `NBD_CMD_FLAG_DF`.
pub const NBD_FLAG_SEND_DF: u16 = 1 << 7;
/// A flush on one connection covers what was completed on all.
pub const NBD_FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// Experimental.
pub const NBD_FLAG_SEND_RESIZE: u16 = 1 << 9;
/// The server understands `NBD_CMD_CACHE`.
pub const NBD_FLAG_SEND_CACHE: u16 = 1 << 10;
/// The server understands `NBD_CMD_FLAG_FAST_ZERO`.
pub const NBD_FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

// Option types.
/// Choose an export and start transmission; cannot fail but by a lost connection.
pub const NBD_OPT_EXPORT_NAME: u32 = 1;
/// End the session.
pub const NBD_OPT_ABORT: u32 = 2;
/// List the exports.
pub const NBD_OPT_LIST: u32 = 3;
/// Go on over TLS.
pub const NBD_OPT_STARTTLS: u32 = 5;
/// Describe an export.
pub const NBD_OPT_INFO: u32 = 6;
/// Choose an export and start transmission.
pub const NBD_OPT_GO: u32 = 7;
/// Use structured replies.
pub const NBD_OPT_STRUCTURED_REPLY: u32 = 8;
/// List metadata contexts.
pub const NBD_OPT_LIST_META_CONTEXT: u32 = 9;
/// Select metadata contexts.
pub const NBD_OPT_SET_META_CONTEXT: u32 = 10;

// Option reply types.
/// The option is accepted, or its list is complete.
pub const NBD_REP_ACK: u32 = 1;
/// One export of a list.
pub const NBD_REP_SERVER: u32 = 2;
/// One information about an export.
pub const NBD_REP_INFO: u32 = 3;
/// One metadata context.
pub const NBD_REP_META_CONTEXT: u32 = 4;
/// Set in every reply type that is an error.
pub const NBD_REP_FLAG_ERROR: u32 = 1 << 31;
/// The option is not known.
pub const NBD_REP_ERR_UNSUP: u32 = NBD_REP_FLAG_ERROR | 1;
/// Policy forbids it.
pub const NBD_REP_ERR_POLICY: u32 = NBD_REP_FLAG_ERROR | 2;
/// The option is malformed, or does not fit here.
pub const NBD_REP_ERR_INVALID: u32 = NBD_REP_FLAG_ERROR | 3;
/// Not on this platform.
pub const NBD_REP_ERR_PLATFORM: u32 = NBD_REP_FLAG_ERROR | 4;
/// TLS must be started first.
pub const NBD_REP_ERR_TLS_REQD: u32 = NBD_REP_FLAG_ERROR | 5;
/// There is no such export.
pub const NBD_REP_ERR_UNKNOWN: u32 = NBD_REP_FLAG_ERROR | 6;
/// The server is shutting down.
pub const NBD_REP_ERR_SHUTDOWN: u32 = NBD_REP_FLAG_ERROR | 7;
/// The client must ask for the block size.
pub const NBD_REP_ERR_BLOCK_SIZE_REQD: u32 = NBD_REP_FLAG_ERROR | 8;
/// The option, or its reply, is too large.
pub const NBD_REP_ERR_TOO_BIG: u32 = NBD_REP_FLAG_ERROR | 9;

// Information types.
/// Size and transmission flags.
pub const NBD_INFO_EXPORT: u16 = 0;
/// The export's canonical name.
pub const NBD_INFO_NAME: u16 = 1;
/// A description for people.
pub const NBD_INFO_DESCRIPTION: u16 = 2;
/// Minimum and preferred block size, maximum payload.
pub const NBD_INFO_BLOCK_SIZE: u16 = 3;

// Metadata contexts.
/// The one context that the specification defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// `base:allocation`: not allocated.
pub const NBD_STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: reads as zeros.
pub const NBD_STATE_ZERO: u32 = 1 << 1;

// Command flags.
/// Reply only when the data are durable.
pub const NBD_CMD_FLAG_FUA: u16 = 1 << 0;
/// Allocate the zeros.
pub const NBD_CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// Reply with one content chunk at most.
pub const NBD_CMD_FLAG_DF: u16 = 1 << 2;
/// One extent for each context.
pub const NBD_CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Fail unless this is faster than writing zeros.
pub const NBD_CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

// Structured reply flags.
/// The last chunk of a reply.
pub const NBD_REPLY_FLAG_DONE: u16 = 1 << 0;

// Structured reply types.
/// Nothing but the end.
pub const NBD_REPLY_TYPE_NONE: u16 = 0;
/// Data at an offset.
pub const NBD_REPLY_TYPE_OFFSET_DATA: u16 = 1;
/// Zeros at an offset.
pub const NBD_REPLY_TYPE_OFFSET_HOLE: u16 = 2;
/// Extents of one metadata context.
pub const NBD_REPLY_TYPE_BLOCK_STATUS: u16 = 5;
/// Set in every type that is an error.
pub const NBD_REPLY_TYPE_FLAG_ERROR: u16 = 1 << 15;
/// An error.
pub const NBD_REPLY_TYPE_ERROR: u16 = NBD_REPLY_TYPE_FLAG_ERROR | 1;
/// An error at an offset.
pub const NBD_REPLY_TYPE_ERROR_OFFSET: u16 = NBD_REPLY_TYPE_FLAG_ERROR | 2;
/// Most extents of one block status chunk.
pub const MAX_EXTENTS: u32 = 1 << 20;

// Request types.
/// Read.
pub const NBD_CMD_READ: u16 = 0;
/// Write; the data follow the request.
pub const NBD_CMD_WRITE: u16 = 1;
/// End the session; no reply.
pub const NBD_CMD_DISC: u16 = 2;
/// Make what was written durable.
pub const NBD_CMD_FLUSH: u16 = 3;
/// The content does not matter any more.
pub const NBD_CMD_TRIM: u16 = 4;
/// Read ahead.
pub const NBD_CMD_CACHE: u16 = 5;
/// Write zeros.
pub const NBD_CMD_WRITE_ZEROES: u16 = 6;
/// Describe extents.
pub const NBD_CMD_BLOCK_STATUS: u16 = 7;

// Error values.
/// Not permitted.
pub const NBD_EPERM: u32 = 1;
/// Input/output error.
pub const NBD_EIO: u32 = 5;
/// No memory.
pub const NBD_ENOMEM: u32 = 12;
/// Invalid argument.
pub const NBD_EINVAL: u32 = 22;
/// No space.
pub const NBD_ENOSPC: u32 = 28;
/// Too large.
pub const NBD_EOVERFLOW: u32 = 75;
/// Not supported.
pub const NBD_ENOTSUP: u32 = 95;
/// The server is shutting down.
pub const NBD_ESHUTDOWN: u32 = 108;
