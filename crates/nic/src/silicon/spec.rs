//! What the virtual functions of the 82576 and the 82599 have in common: bits of registers, messages to the physical function, and
//! descriptors, as Intel's data sheets and the drivers' headers name them.
#![allow(missing_docs, reason = "names and values of the data sheets")]

pub const VENDOR: u16 = 0x8086;
pub const CLASS: u32 = 0x02_00_00;
pub const BAR_SIZE: u64 = 0x4000;
pub const VECTORS: u16 = 3;

/// Of the control register.
pub const CTRL_RST: u32 = 1 << 26;

/// Of the mailbox's control register.
pub const REQ: u32 = 0x01;
pub const ACK: u32 = 0x02;
pub const VFU: u32 = 0x04;
pub const PFU: u32 = 0x08;
pub const PFSTS: u32 = 0x10;
pub const PFACK: u32 = 0x20;
pub const RSTI: u32 = 0x40;
pub const RSTD: u32 = 0x80;
/// Cleared by reading.
pub const READ_TO_CLEAR: u32 = RSTD | PFACK | PFSTS;
pub const MAILBOX_WORDS: usize = 16;

/// Of the first word of a message.
pub const MESSAGE_ACK: u32 = 0x8000_0000;
pub const MESSAGE_NACK: u32 = 0x4000_0000;
pub const MESSAGE_CTS: u32 = 0x2000_0000;
pub const MESSAGE_INFO: u32 = 0x00ff_0000;
pub const MESSAGE_RESET: u32 = 1;
pub const MESSAGE_MAC: u32 = 2;
pub const MESSAGE_MULTICAST: u32 = 3;
pub const MESSAGE_VLAN: u32 = 4;
pub const MESSAGE_LPE: u32 = 5;

/// An entry of IVAR is in use.
pub const IVAR_VALID: u32 = 0x80;
/// Of RXDCTL and TXDCTL.
pub const ENABLE: u32 = 1 << 25;

/// Advanced descriptors: 16 bytes, length of rings in units of 128.
pub const DESCRIPTOR: u32 = 16;
pub const LEN_UNIT: u32 = 128;
pub const DD: u32 = 1;
pub const RX_EOP: u32 = 2;
/// Its VLAN tag is in the descriptor; RXDCTL wants that.
pub const RX_VP: u32 = 8;
pub const RX_VME: u32 = 1 << 30;
pub const TX_EOP: u32 = 1 << 24;
pub const TX_RS: u32 = 1 << 27;
pub const TX_DEXT: u32 = 1 << 29;
pub const TX_TYPE: u32 = 0xf << 20;
pub const TX_CONTEXT: u32 = 2 << 20;
pub const TX_DATA: u32 = 3 << 20;
/// The frame gets the context's VLAN tag; it is large.
pub const TX_VLE: u32 = 1 << 30;
pub const TX_TSE: u32 = 1 << 31;
/// Of the last word of a data descriptor: its context, and what is to be done by that.
pub const TX_INDEX_SHIFT: u32 = 4;
pub const TX_IXSM: u32 = 1 << 8;
pub const TX_TXSM: u32 = 1 << 9;
pub const TX_IPSEC: u32 = 1 << 10;
/// Of a context: kinds of headers.
pub const TX_IPV4: u32 = 1 << 10;
pub const TX_L4_KIND: u32 = 3 << 11;
pub const TX_L4_UDP: u32 = 0;
pub const TX_L4_TCP: u32 = 1 << 11;
