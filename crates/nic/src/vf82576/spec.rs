//! Registers of an 82576 virtual function, as Intel's data sheet (section 8, and 7.8 for the mailbox) names them. Offsets in bytes in BAR 0;
//! all but the mailbox memory are 32 bits.
#![allow(missing_docs, reason = "names and values of the data sheet")]

pub use crate::silicon::spec::*;

pub const DEVICE: u16 = 0x10ca;
pub const QUEUES: usize = 2;

pub const CTRL: u64 = 0x0000;
pub const STATUS: u64 = 0x0008;
pub const STATUS_LU: u32 = 1 << 1;

pub const VMBMEM: u64 = 0x0800;
pub const V2PMAILBOX: u64 = 0x0c40;

/// Of the first word of a message.
pub const MESSAGE_PROMISC: u32 = 6;
/// What SET_MAC_ADDR adds to its kind.
pub const MAC_FILTER_CLR: u32 = 1;
pub const MAC_FILTER_ADD: u32 = 2;

pub const PBACL: u64 = 0x0f04;
pub const PSRTYPE: u64 = 0x0f0c;
pub const VFGPRC: u64 = 0x0f10;
pub const VFGPTC: u64 = 0x0f14;
pub const VFGORC: u64 = 0x0f18;
pub const VFGOTC: u64 = 0x0f34;
pub const VFMPRC: u64 = 0x0f3c;
pub const VFGPRLBC: u64 = 0x0f40;
pub const VFGPTLBC: u64 = 0x0f44;
pub const VFGORLBC: u64 = 0x0f48;
pub const VFGOTLBC: u64 = 0x0f50;

pub const EICS: u64 = 0x1520;
pub const EIMS: u64 = 0x1524;
pub const EIMC: u64 = 0x1528;
pub const EIAC: u64 = 0x152c;
pub const EIAM: u64 = 0x1530;
pub const EICR: u64 = 0x1580;
pub const EITR: u64 = 0x1680;
pub const IVAR0: u64 = 0x1700;
pub const IVAR_MISC: u64 = 0x1740;

/// Queue `n` is 100h further on.
pub const RX: u64 = 0x2800;
pub const TX: u64 = 0x3800;
pub const QUEUE_STRIDE: u64 = 0x100;
pub const BAL: u64 = 0x00;
pub const BAH: u64 = 0x04;
pub const LEN: u64 = 0x08;
pub const SRRCTL: u64 = 0x0c;
pub const HEAD: u64 = 0x10;
pub const DCA: u64 = 0x14;
pub const TAIL: u64 = 0x18;
pub const DCTL: u64 = 0x28;
pub const RQDPC: u64 = 0x30;
pub const TDWBAL: u64 = 0x38;
pub const TDWBAH: u64 = 0x3c;
