//! Registers of an 82599 virtual function, as Intel's data sheet (331520, section 8.3) and Linux's ixgbevf name them. Offsets in bytes in
//! BAR 0; all but the mailbox memory are 32 bits.
#![allow(missing_docs, reason = "names and values of the data sheet")]

pub use crate::silicon::spec::*;

pub const DEVICE: u16 = 0x10ed;
/// A pool has 2, 4 or 8 queues, as the PF divides 128.
pub const QUEUES: usize = 8;

pub const VFCTRL: u64 = 0x0000;
pub const VFSTATUS: u64 = 0x0008;
pub const VFLINKS: u64 = 0x0010;
pub const LINKS_UP: u32 = 1 << 30;
/// 10 Gbit/s.
pub const LINKS_SPEED: u32 = 3 << 28;
pub const VFFRTIMER: u64 = 0x0048;

pub const VTEICR: u64 = 0x0100;
pub const VTEICS: u64 = 0x0104;
pub const VTEIMS: u64 = 0x0108;
pub const VTEIMC: u64 = 0x010c;
pub const VTEIAC: u64 = 0x0110;
pub const VTEIAM: u64 = 0x0114;
/// Queues 0 and 1; the next two are 4 further on.
pub const VTIVAR: u64 = 0x0120;
pub const VTIVAR_MISC: u64 = 0x0140;
pub const VTEITR: u64 = 0x0820;

pub const VFMBMEM: u64 = 0x0200;
pub const VFMAILBOX: u64 = 0x02fc;
pub const VFPSRTYPE: u64 = 0x0300;

/// Of the first word of a message.
pub const MESSAGE_MACVLAN: u32 = 6;
pub const MESSAGE_API: u32 = 8;
pub const MESSAGE_QUEUES: u32 = 9;
pub const MESSAGE_RETA: u32 = 0xa;
pub const MESSAGE_RSS_KEY: u32 = 0xb;
pub const MESSAGE_XCAST: u32 = 0xc;
pub const MESSAGE_LINK: u32 = 0x10;
/// Versions of the messages, in the order of their numbers.
pub const API_1_0: u32 = 0;
pub const API_1_1: u32 = 2;
pub const API_1_2: u32 = 3;
pub const API_1_3: u32 = 4;
pub const API_1_4: u32 = 5;
pub const API_1_5: u32 = 6;
/// Modes of XCAST.
pub const XCAST_MULTI: u32 = 1;
pub const XCAST_ALLMULTI: u32 = 2;
pub const XCAST_PROMISC: u32 = 3;

/// Queue `n` is 40h further on.
pub const RX: u64 = 0x1000;
pub const TX: u64 = 0x2000;
pub const QUEUE_STRIDE: u64 = 0x40;
pub const BAL: u64 = 0x00;
pub const BAH: u64 = 0x04;
pub const LEN: u64 = 0x08;
pub const DCA: u64 = 0x0c;
pub const HEAD: u64 = 0x10;
pub const SRRCTL: u64 = 0x14;
pub const TAIL: u64 = 0x18;
pub const DCTL: u64 = 0x28;
pub const TDWBAL: u64 = 0x38;
pub const TDWBAH: u64 = 0x3c;

/// Counters, between the registers of the first queues.
pub const VFGPRC: u64 = 0x101c;
pub const VFGORC_LSB: u64 = 0x1020;
pub const VFGORC_MSB: u64 = 0x1024;
pub const VFMPRC: u64 = 0x1034;
pub const VFGPTC: u64 = 0x201c;
pub const VFGOTC_LSB: u64 = 0x2020;
pub const VFGOTC_MSB: u64 = 0x2024;
