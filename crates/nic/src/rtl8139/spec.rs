//! Registers of the RTL8139C+, as its data sheet (revision 1.6) names them: section 5 for C mode, section 6 for C+ mode. Offsets and
//! sizes in bytes; registers of several bytes are little-endian.
#![allow(missing_docs, reason = "names and values of the data sheet")]

/// Realtek.
pub const VENDOR: u16 = 0x10ec;
/// RTL8139, whatever its suffix.
pub const DEVICE: u16 = 0x8139;
/// Of the C+ chips. Drivers tell by it whether there is a C+ mode.
pub const REVISION: u8 = 0x20;
/// Ethernet controller.
pub const CLASS: u32 = 0x02_00_00;
/// Number of the BAR in port space, and of the one in memory. The same registers.
pub const BAR_PORT: u8 = 0;
pub const BAR_MEMORY: u8 = 1;
/// How many bytes of registers there are.
pub const REGISTERS: u64 = 0x100;

/// Station address, six bytes; eight can be written.
pub const IDR0: u64 = 0x00;
/// Multicast hash, 64 bits.
pub const MAR0: u64 = 0x08;
/// C mode: transmit status of four descriptors, four bytes each.
pub const TSD0: u64 = 0x10;
/// C+ mode: dump tally counter command, 64 bits: an address, and in its lowest bits the command.
pub const DTCCR: u64 = 0x10;
/// C mode: transmit start address of four descriptors, four bytes each.
pub const TSAD0: u64 = 0x20;
/// C+ mode: transmit normal priority descriptors, 64-bit address.
pub const TNPDS: u64 = 0x20;
/// C+ mode: transmit high priority descriptors, 64-bit address.
pub const THPDS: u64 = 0x28;
/// C mode: receive buffer start address.
pub const RBSTART: u64 = 0x30;
/// Early receive byte count and status.
pub const ERBCR: u64 = 0x34;
pub const ERSR: u64 = 0x36;
/// Command.
pub const CR: u64 = 0x37;
/// C mode: current address of packet read, less 16; current buffer address.
pub const CAPR: u64 = 0x38;
pub const CBR: u64 = 0x3a;
/// Interrupt mask, interrupt status: 16 bits.
pub const IMR: u64 = 0x3c;
pub const ISR: u64 = 0x3e;
/// Transmit and receive configuration.
pub const TCR: u64 = 0x40;
pub const RCR: u64 = 0x44;
/// Timer count, of 33 MHz ticks. Any write resets it.
pub const TCTR: u64 = 0x48;
/// Missed packets: 24 bits. Any write clears it.
pub const MPC: u64 = 0x4c;
/// 93C46 command.
pub const CR9346: u64 = 0x50;
pub const CONFIG0: u64 = 0x51;
pub const CONFIG1: u64 = 0x52;
/// Timer interrupt: 0 is never.
pub const TIMER_INT: u64 = 0x54;
/// Media status.
pub const MSR: u64 = 0x58;
pub const CONFIG3: u64 = 0x59;
pub const CONFIG4: u64 = 0x5a;
pub const HLTCLK: u64 = 0x5b;
/// Multiple interrupt select: 16 bits.
pub const MULINT: u64 = 0x5c;
/// Revision of the chip, 0x10.
pub const RERID: u64 = 0x5e;
/// C mode: transmit status of all descriptors, 16 bits.
pub const TSAD: u64 = 0x60;
/// MII: basic mode control and status, auto-negotiation advertisement, link partner, expansion.
pub const BMCR: u64 = 0x62;
pub const BMSR: u64 = 0x64;
pub const ANAR: u64 = 0x66;
pub const ANLPAR: u64 = 0x68;
pub const ANER: u64 = 0x6a;
/// Counts of the PHY: disconnects, false carriers.
pub const DIS: u64 = 0x6c;
pub const FCSC: u64 = 0x6e;
pub const NWAYTR: u64 = 0x70;
pub const REC: u64 = 0x72;
/// Chip status and configuration of the PHY.
pub const CSCR: u64 = 0x74;
pub const PHY1_PARM: u64 = 0x78;
pub const TW_PARM: u64 = 0x7c;
/// Wake-up frames: CRCs, patterns.
pub const CRC0: u64 = 0x80;
pub const WAKEUP0: u64 = 0x84;
pub const LSBCRC0: u64 = 0xcc;
pub const CONFIG5: u64 = 0xd8;
/// C+ mode: transmit priority polling. Written only.
pub const TPPOLL: u64 = 0xd9;
/// C+ mode: largest frame to be received (named so in drivers; the chip ignores it).
pub const RMS: u64 = 0xda;
/// C+ mode: command, 16 bits.
pub const CPCR: u64 = 0xe0;
/// C+ mode: interrupt mitigation (of later chips).
pub const INTR_MITIGATE: u64 = 0xe2;
/// C+ mode: receive descriptors, 64-bit address.
pub const RDSAR: u64 = 0xe4;
/// C+ mode: early transmit threshold, in units of 32 bytes.
pub const ETTHR: u64 = 0xec;
/// CardBus function events.
pub const FER: u64 = 0xf0;
pub const FEMR: u64 = 0xf4;
pub const FPSR: u64 = 0xf8;
pub const FFER: u64 = 0xfc;

/// Of [`CR`]: reset, which ends by itself; receiver, transmitter; the receive buffer of C mode is empty.
pub const CR_RST: u8 = 1 << 4;
pub const CR_RE: u8 = 1 << 3;
pub const CR_TE: u8 = 1 << 2;
pub const CR_BUFE: u8 = 1 << 0;

/// Of [`IMR`] and [`ISR`].
pub const INT_ROK: u16 = 1 << 0;
pub const INT_RER: u16 = 1 << 1;
pub const INT_TOK: u16 = 1 << 2;
pub const INT_TER: u16 = 1 << 3;
/// Receive buffer overflow; in C+ mode: no descriptor.
pub const INT_RXOVW: u16 = 1 << 4;
/// Packet underrun, or the link has changed.
pub const INT_PUN: u16 = 1 << 5;
pub const INT_FOVW: u16 = 1 << 6;
/// Transmit descriptor unavailable.
pub const INT_TDU: u16 = 1 << 7;
pub const INT_SW: u16 = 1 << 8;
/// Cable length changed.
pub const INT_LENCHG: u16 = 1 << 13;
pub const INT_TIMEOUT: u16 = 1 << 14;
/// System error: on the bus.
pub const INT_SERR: u16 = 1 << 15;
/// All that can be set in [`IMR`].
pub const INT_ALL: u16 = 0xe1ff;

/// Of [`TCR`]: clear abort; retries; burst; no CRC appended; loop back; interframe gap; version of the hardware, and that of the C+.
pub const TCR_CLRABT: u32 = 1 << 0;
pub const TCR_TXRR: u32 = 0xf << 4;
pub const TCR_MXDMA: u32 = 7 << 8;
pub const TCR_CRC: u32 = 1 << 16;
pub const TCR_LBK: u32 = 3 << 17;
pub const TCR_IFG: u32 = 3 << 24;
pub const TCR_HWVERID: u32 = 0x7cc0_0000;
pub const TCR_HWVERID_8139CP: u32 = 0x7480_0000;

/// Of [`RCR`]: accept all physical, my physical, multicast, broadcast, runts, errors; the EEPROM's size; C mode: no wrap at the end;
/// burst; C mode: length of the buffer (8 KiB shifted left by it); threshold.
pub const RCR_AAP: u32 = 1 << 0;
pub const RCR_APM: u32 = 1 << 1;
pub const RCR_AM: u32 = 1 << 2;
pub const RCR_AB: u32 = 1 << 3;
pub const RCR_AR: u32 = 1 << 4;
pub const RCR_AER: u32 = 1 << 5;
pub const RCR_9356SEL: u32 = 1 << 6;
pub const RCR_WRAP: u32 = 1 << 7;
pub const RCR_MXDMA: u32 = 7 << 8;
pub const RCR_RBLEN: u32 = 3 << 11;
pub const RCR_RBLEN_SHIFT: u32 = 11;
pub const RCR_RXFTH: u32 = 7 << 13;

/// Of [`CR9346`]: operating mode, and its values; in programming mode the pins of the EEPROM.
pub const EEM: u8 = 0xc0;
pub const EEM_NORMAL: u8 = 0x00;
pub const EEM_AUTOLOAD: u8 = 0x40;
pub const EEM_PROGRAM: u8 = 0x80;
pub const EEM_CONFIG: u8 = 0xc0;
pub const EECS: u8 = 1 << 3;
pub const EESK: u8 = 1 << 2;
pub const EEDI: u8 = 1 << 1;
pub const EEDO: u8 = 1 << 0;

/// Of [`CONFIG1`].
pub const CONFIG1_PMEN: u8 = 1 << 0;
pub const CONFIG1_VPD: u8 = 1 << 1;
pub const CONFIG1_IOMAP: u8 = 1 << 2;
pub const CONFIG1_MEMMAP: u8 = 1 << 3;
pub const CONFIG1_LWACT: u8 = 1 << 4;
pub const CONFIG1_DVRLOAD: u8 = 1 << 5;
pub const CONFIG1_LEDS: u8 = 3 << 6;
/// Of [`CONFIG3`].
pub const CONFIG3_FBTBEN: u8 = 1 << 0;
pub const CONFIG3_LINKUP: u8 = 1 << 4;
pub const CONFIG3_MAGIC: u8 = 1 << 5;
pub const CONFIG3_PARM_EN: u8 = 1 << 6;
/// Of [`CONFIG5`].
pub const CONFIG5_PME_STS: u8 = 1 << 0;
pub const CONFIG5_LANWAKE: u8 = 1 << 1;
pub const CONFIG5_LDPS: u8 = 1 << 2;
pub const CONFIG5_UWF: u8 = 1 << 4;
pub const CONFIG5_MWF: u8 = 1 << 5;
pub const CONFIG5_BWF: u8 = 1 << 6;

/// Of [`MSR`]: transmit flow control on, receive flow control on, auxiliary power there, speed is 10 Mbit/s, the link is down.
pub const MSR_TXFCE: u8 = 1 << 7;
pub const MSR_RXFCE: u8 = 1 << 6;
pub const MSR_AUX: u8 = 1 << 4;
pub const MSR_SPEED_10: u8 = 1 << 3;
pub const MSR_LINKB: u8 = 1 << 2;

/// Of [`BMCR`] and [`BMSR`] (IEEE 802.3, 22.2.4).
pub const BMCR_RESET: u16 = 1 << 15;
pub const BMCR_SPD: u16 = 1 << 13;
pub const BMCR_ANE: u16 = 1 << 12;
pub const BMCR_RESTART: u16 = 1 << 9;
pub const BMCR_DUPLEX: u16 = 1 << 8;
pub const BMSR_LINK: u16 = 1 << 2;
pub const BMSR_ANDONE: u16 = 1 << 5;

/// Of [`CPCR`]: transmit and receive in C+ mode, multiple reads and writes, 64-bit addresses, receive checksums, VLAN tags taken off.
pub const CPCR_TXEN: u16 = 1 << 0;
pub const CPCR_RXEN: u16 = 1 << 1;
pub const CPCR_MULRW: u16 = 1 << 3;
pub const CPCR_DAC: u16 = 1 << 4;
pub const CPCR_RXCHKSUM: u16 = 1 << 5;
pub const CPCR_RXVLAN: u16 = 1 << 6;

/// Of [`TPPOLL`]: descriptors of high, of normal priority; force a software interrupt.
pub const TPPOLL_HPQ: u8 = 1 << 7;
pub const TPPOLL_NPQ: u8 = 1 << 6;
pub const TPPOLL_FSWINT: u8 = 1 << 0;

/// Of [`DTCCR`]: dump, which ends by itself. The address is a multiple of 64.
pub const DTCCR_CMD: u64 = 1 << 3;
/// Bytes of the tally counters.
pub const TALLY: usize = 64;

/// C+ mode: bytes of a descriptor: two words, then a 64-bit address.
pub const DESCRIPTOR: u64 = 16;
/// Most descriptors of a ring.
pub const RING: u32 = 64;
/// A ring begins at a multiple of so many bytes.
pub const RING_ALIGN: u64 = 256;
/// First word of any descriptor: the chip's, the last of the ring, first and last segment of a frame.
pub const DESC_OWN: u32 = 1 << 31;
pub const DESC_EOR: u32 = 1 << 30;
pub const DESC_FS: u32 = 1 << 29;
pub const DESC_LS: u32 = 1 << 28;
/// First word to transmit: segment a large TCP packet, by that size; sum IPv4, UDP, TCP; bytes.
pub const TX_LGSEN: u32 = 1 << 27;
pub const TX_MSS_SHIFT: u32 = 16;
pub const TX_MSS: u32 = 0x7ff;
pub const TX_IPCS: u32 = 1 << 18;
pub const TX_UDPCS: u32 = 1 << 17;
pub const TX_TCPCS: u32 = 1 << 16;
pub const TX_LENGTH: u32 = 0xffff;
/// First word when it was transmitted: FIFO underrun, error, out of window, link failure, excessive collisions, how many collisions.
pub const TX_UNF: u32 = 1 << 25;
pub const TX_TES: u32 = 1 << 23;
pub const TX_OWC: u32 = 1 << 22;
pub const TX_LNKF: u32 = 1 << 21;
pub const TX_EXC: u32 = 1 << 20;
pub const TX_CC: u32 = 0xf << 16;
/// Second word to transmit: add the VLAN tag; the tag, its bytes exchanged.
pub const TX_TAGC: u32 = 1 << 17;
pub const VLAN_TAG: u32 = 0xffff;
/// First word to receive: bytes of the buffer.
pub const RX_BUFFER: u32 = 0x1fff;
/// First word when it was received.
pub const RX_FAE: u32 = 1 << 27;
pub const RX_MAR: u32 = 1 << 26;
pub const RX_PAM: u32 = 1 << 25;
pub const RX_BAR: u32 = 1 << 24;
pub const RX_BOVF: u32 = 1 << 23;
pub const RX_FOVF: u32 = 1 << 22;
/// Longer than 4096 bytes; sum of errors; shorter than 64 bytes; wrong CRC.
pub const RX_RWT: u32 = 1 << 21;
pub const RX_RES: u32 = 1 << 20;
pub const RX_RUNT: u32 = 1 << 19;
pub const RX_CRC: u32 = 1 << 18;
/// Protocol, and its values.
pub const RX_PID: u32 = 3 << 16;
pub const RX_PID_TCP: u32 = 1 << 16;
pub const RX_PID_UDP: u32 = 2 << 16;
pub const RX_PID_IP: u32 = 3 << 16;
/// The checksum of IPv4, of UDP, of TCP is wrong.
pub const RX_IPF: u32 = 1 << 15;
pub const RX_UDPF: u32 = 1 << 14;
pub const RX_TCPF: u32 = 1 << 13;
/// Bytes with the CRC.
pub const RX_LENGTH: u32 = 0x1fff;
/// Second word when it was received: a tag was taken off. The tag as in [`VLAN_TAG`].
pub const RX_TAVA: u32 = 1 << 16;

/// C mode, [`TSD0`]: carrier lost, aborted, out of window, collisions, early threshold, sent, underrun, the host's; bytes.
pub const TSD_CRS: u32 = 1 << 31;
pub const TSD_TABT: u32 = 1 << 30;
pub const TSD_OWC: u32 = 1 << 29;
pub const TSD_NCC: u32 = 0xf << 24;
pub const TSD_ERTXTH: u32 = 0x3f << 16;
pub const TSD_TOK: u32 = 1 << 15;
pub const TSD_TUN: u32 = 1 << 14;
pub const TSD_OWN: u32 = 1 << 13;
pub const TSD_SIZE: u32 = 0x1fff;
/// C mode, longest frame that can be sent, in bytes.
pub const TSD_LONGEST: u32 = 1792;
/// C mode: descriptors.
pub const TSDS: u64 = 4;
/// C mode, the word before each received frame: status below, bytes with the CRC above.
pub const HEAD_MAR: u32 = 1 << 15;
pub const HEAD_PAM: u32 = 1 << 14;
pub const HEAD_BAR: u32 = 1 << 13;
pub const HEAD_RUNT: u32 = 1 << 4;
pub const HEAD_LONG: u32 = 1 << 3;
pub const HEAD_ROK: u32 = 1 << 0;
/// C mode: what [`CAPR`] says is this much less than what is meant.
pub const CAPR_SHORT: u16 = 16;

/// Words of the 93C46, and bits of an address in it.
pub const EEPROM_WORDS: usize = 64;
pub const EEPROM_ADDRESS_BITS: u32 = 6;
/// First word of the EEPROM; the words of vendor, device and the first of the station address.
pub const EEPROM_ID: u16 = 0x8129;
pub const EEPROM_VENDOR: usize = 1;
pub const EEPROM_DEVICE: usize = 2;
pub const EEPROM_MAC: usize = 7;
