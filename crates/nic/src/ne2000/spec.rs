//! Registers of an NE2000 on PCI: the DP8390's, as National Semiconductor's data sheet (section 10) names them, and what Realtek's
//! RTL8029AS adds (section 6 of its data sheet). Offsets in bytes from the first port; all registers but the data port are one byte.
#![allow(missing_docs, reason = "names and values of the data sheets")]

/// Realtek.
pub const VENDOR: u16 = 0x10ec;
/// RTL8029.
pub const DEVICE: u16 = 0x8029;
/// Ethernet controller.
pub const CLASS: u32 = 0x02_00_00;
/// The only BAR: ports.
pub const BAR_PORT: u8 = 0;
/// Ports that do something; the BAR has [`PORTS`].
pub const USED: u64 = 0x20;
pub const PORTS: u64 = 0x100;

/// Command: on every page.
pub const CR: u64 = 0x00;

/// Page 0, read: current local DMA address; boundary; transmit status; collisions; FIFO; interrupt status; current remote DMA address;
/// the chip's two letters; receive status; tally counters of alignment errors, of CRC errors, of missed frames.
pub const CLDA0: u64 = 0x01;
pub const CLDA1: u64 = 0x02;
pub const BNRY: u64 = 0x03;
pub const TSR: u64 = 0x04;
pub const NCR: u64 = 0x05;
pub const FIFO: u64 = 0x06;
pub const ISR: u64 = 0x07;
pub const CRDA0: u64 = 0x08;
pub const CRDA1: u64 = 0x09;
pub const ID0: u64 = 0x0a;
pub const ID1: u64 = 0x0b;
pub const RSR: u64 = 0x0c;
pub const CNTR0: u64 = 0x0d;
pub const CNTR1: u64 = 0x0e;
pub const CNTR2: u64 = 0x0f;

/// Page 0, written: first and one past the last page of the receive ring; first page and bytes to transmit; remote start address and
/// byte count; receive, transmit and data configuration; interrupt mask. [`BNRY`] and [`ISR`] can be written too.
pub const PSTART: u64 = 0x01;
pub const PSTOP: u64 = 0x02;
pub const TPSR: u64 = 0x04;
pub const TBCR0: u64 = 0x05;
pub const TBCR1: u64 = 0x06;
pub const RSAR0: u64 = 0x08;
pub const RSAR1: u64 = 0x09;
pub const RBCR0: u64 = 0x0a;
pub const RBCR1: u64 = 0x0b;
pub const RCR: u64 = 0x0c;
pub const TCR: u64 = 0x0d;
pub const DCR: u64 = 0x0e;
pub const IMR: u64 = 0x0f;

/// Page 1: station address, six; current page; multicast hash, eight.
pub const PAR0: u64 = 0x01;
pub const CURR: u64 = 0x07;
pub const MAR0: u64 = 0x08;

/// Page 3 of the RTL8029.
pub const CR9346: u64 = 0x01;
pub const CONFIG0: u64 = 0x03;
pub const CONFIG2: u64 = 0x05;
pub const CONFIG3: u64 = 0x06;

/// Where data goes in and out of the card: one, two or four bytes.
pub const DATA: u64 = 0x10;
/// Ports that are the data port too.
pub const DATA_LAST: u64 = 0x17;
/// Reading resets the card, writing ends that.
pub const RESET: u64 = 0x1f;

/// Of [`CR`]: stop, start, transmit; remote DMA: read, write, send the next packet (read only as far as drivers know), end.
pub const CR_STP: u8 = 1 << 0;
pub const CR_STA: u8 = 1 << 1;
pub const CR_TXP: u8 = 1 << 2;
pub const CR_RD: u8 = 7 << 3;
pub const CR_RD_READ: u8 = 1 << 3;
pub const CR_RD_WRITE: u8 = 2 << 3;
pub const CR_RD_SEND: u8 = 3 << 3;
pub const CR_RD_ABORT: u8 = 4 << 3;
/// Of [`CR`]: the page of registers, and how far it is shifted.
pub const CR_PS: u8 = 3 << 6;
pub const CR_PS_SHIFT: u32 = 6;
pub const CR_PAGE0: u8 = 0;
pub const CR_PAGE1: u8 = 1 << 6;
pub const CR_PAGE2: u8 = 2 << 6;
pub const CR_PAGE3: u8 = 3 << 6;

/// Of [`ISR`]; all but the last in [`IMR`] too.
pub const ISR_PRX: u8 = 1 << 0;
pub const ISR_PTX: u8 = 1 << 1;
pub const ISR_RXE: u8 = 1 << 2;
pub const ISR_TXE: u8 = 1 << 3;
pub const ISR_OVW: u8 = 1 << 4;
pub const ISR_CNT: u8 = 1 << 5;
pub const ISR_RDC: u8 = 1 << 6;
pub const ISR_RST: u8 = 1 << 7;
/// What can be asked for.
pub const IMR_ALL: u8 = 0x7f;

/// Of [`DCR`]: words, byte order, long addresses, loop back *off*, auto-initialise remote, FIFO threshold.
pub const DCR_WTS: u8 = 1 << 0;
pub const DCR_BOS: u8 = 1 << 1;
pub const DCR_LAS: u8 = 1 << 2;
pub const DCR_LS: u8 = 1 << 3;
pub const DCR_AR: u8 = 1 << 4;
pub const DCR_FT: u8 = 3 << 5;

/// Of [`TCR`]: no CRC; loop back: none, inside, at the encoder, outside; auto transmit disable; offset.
pub const TCR_CRC: u8 = 1 << 0;
pub const TCR_LB: u8 = 3 << 1;
pub const TCR_ATD: u8 = 1 << 3;
pub const TCR_OFST: u8 = 1 << 4;

/// Of [`RCR`]: keep errors, runts; accept broadcast, multicast, all physical; monitor: keep nothing.
pub const RCR_SEP: u8 = 1 << 0;
pub const RCR_AR: u8 = 1 << 1;
pub const RCR_AB: u8 = 1 << 2;
pub const RCR_AM: u8 = 1 << 3;
pub const RCR_PRO: u8 = 1 << 4;
pub const RCR_MON: u8 = 1 << 5;

/// Of [`RSR`], and of the status byte before a frame.
pub const RSR_PRX: u8 = 1 << 0;
pub const RSR_CRC: u8 = 1 << 1;
pub const RSR_FAE: u8 = 1 << 2;
pub const RSR_FO: u8 = 1 << 3;
pub const RSR_MPA: u8 = 1 << 4;
/// Matched as multicast or broadcast.
pub const RSR_PHY: u8 = 1 << 5;
pub const RSR_DIS: u8 = 1 << 6;
pub const RSR_DFR: u8 = 1 << 7;

/// Of [`TSR`].
pub const TSR_PTX: u8 = 1 << 0;
pub const TSR_COL: u8 = 1 << 2;
pub const TSR_ABT: u8 = 1 << 3;
pub const TSR_CRS: u8 = 1 << 4;
pub const TSR_FU: u8 = 1 << 5;
pub const TSR_CDH: u8 = 1 << 6;
pub const TSR_OWC: u8 = 1 << 7;

/// What [`ID0`] and [`ID1`] read as: `P` and `C`.
pub const ID: [u8; 2] = [0x50, 0x43];

/// Bytes of a page of card memory.
pub const PAGE: u16 = 256;
/// The card's memory: first byte, one past the last, and in pages.
pub const MEMORY: u16 = 0x4000;
pub const MEMORY_END: u16 = 0x8000;
pub const MEMORY_PAGE: u8 = 0x40;
pub const MEMORY_END_PAGE: u8 = 0x80;
/// Bytes of the PROM at 0, as a driver in byte or in word mode reads them: each byte twice.
pub const PROM: u16 = 0x20;
/// What stands in the PROM's last two (doubled) bytes: a card for words.
pub const PROM_WORDS: u8 = 0x57;
/// Bytes before each frame in the receive ring: status, next page, bytes (16 bits, these four included).
pub const HEADER: u16 = 4;
/// Longest and shortest frame, without the CRC.
pub const LONGEST: u16 = 1514;
pub const SHORTEST: u16 = 60;
