//! Registers and bits of the 82574L, by its datasheet (revision 3.4, chapters 7 and 10).

#![allow(missing_docs, reason = "they are named as the datasheet names them")]

pub const VENDOR: u16 = 0x8086;
pub const DEVICE: u16 = 0x10d3;
/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 0x2_0000;

pub const CTRL: u64 = 0x0000;
pub const STATUS: u64 = 0x0008;
pub const EECD: u64 = 0x0010;
pub const EERD: u64 = 0x0014;
pub const CTRL_EXT: u64 = 0x0018;
pub const MDIC: u64 = 0x0020;
pub const ICR: u64 = 0x00c0;
pub const ICS: u64 = 0x00c8;
pub const IMS: u64 = 0x00d0;
pub const IMC: u64 = 0x00d8;
pub const IAM: u64 = 0x00e0;
pub const RCTL: u64 = 0x0100;
pub const TCTL: u64 = 0x0400;
pub const RDBAL: u64 = 0x2800;
pub const RDBAH: u64 = 0x2804;
pub const RDLEN: u64 = 0x2808;
pub const RDH: u64 = 0x2810;
pub const RDT: u64 = 0x2818;
pub const TDBAL: u64 = 0x3800;
pub const TDBAH: u64 = 0x3804;
pub const TDLEN: u64 = 0x3808;
pub const TDH: u64 = 0x3810;
pub const TDT: u64 = 0x3818;
pub const STATISTICS: u64 = 0x4000;
pub const STATISTICS_END: u64 = 0x4128;
pub const GPRC: u64 = 0x4074;
pub const GPTC: u64 = 0x4080;
pub const GORCL: u64 = 0x4088;
pub const GORCH: u64 = 0x408c;
pub const RFCTL: u64 = 0x5008;
pub const MTA: u64 = 0x5200;
pub const RAL0: u64 = 0x5400;
pub const RAH0: u64 = 0x5404;
pub const VFTA: u64 = 0x5600;

pub const CTRL_RST: u32 = 1 << 26;
/// Link up, full duplex, 1000 Mbit/s.
pub const STATUS_UP: u32 = 0x83;
pub const EECD_AUTO_RD: u32 = 1 << 9;
pub const EERD_START: u32 = 1;
pub const EERD_DONE: u32 = 2;
pub const MDIC_WRITE: u32 = 1 << 26;
pub const MDIC_READ: u32 = 2 << 26;
pub const MDIC_READY: u32 = 1 << 28;
pub const INT_TXDW: u32 = 1;
pub const INT_RXO: u32 = 1 << 6;
pub const INT_RXT0: u32 = 1 << 7;
pub const INT_ASSERTED: u32 = 1 << 31;
pub const EN: u32 = 1 << 1;
pub const RCTL_UPE: u32 = 1 << 3;
pub const RCTL_MPE: u32 = 1 << 4;
pub const RCTL_BAM: u32 = 1 << 15;
pub const RCTL_BSIZE: u32 = 3 << 16;
pub const RCTL_BSEX: u32 = 1 << 25;
pub const RCTL_SECRC: u32 = 1 << 26;
pub const RFCTL_EXTEN: u32 = 1 << 15;
pub const RAH_AV: u32 = 1 << 31;

/// Of the third word of a transmit descriptor.
pub const TX_EOP: u32 = 1 << 24;
pub const TX_RS: u32 = 1 << 27;
pub const TX_DEXT: u32 = 1 << 29;
pub const TX_KIND: u32 = 0xf << 20;
pub const TX_DATA: u32 = 1 << 20;
/// Of the fourth word of a data descriptor: put the TCP or UDP checksum in.
pub const TX_TXSM: u32 = 1 << 9;
/// Done, and the last of a frame.
pub const DD: u32 = 1;
pub const RX_EOP: u32 = 2;
