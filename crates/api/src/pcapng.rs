//! Packet captures (pcapng, draft-ietf-opsawg-pcapng): what the daemon writes and the command line follows. Only what these two need.

/// Block: begins a section and tells its byte order.
pub const SECTION_HEADER: u32 = 0x0a0d_0d0a;
/// Block: an interface that packets are captured on.
pub const INTERFACE_DESCRIPTION: u32 = 1;
/// Block: what an interface has counted so far.
pub const INTERFACE_STATISTICS: u32 = 5;
/// Block: one packet.
pub const ENHANCED_PACKET: u32 = 6;

/// `opt_endofopt`: the last option of a block.
pub const END_OF_OPTIONS: u16 = 0;
/// `isb_ifdrop`, of statistics: packets that could not be kept.
pub const ISB_IFDROP: u16 = 5;
