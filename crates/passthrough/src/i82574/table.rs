//! The table.

use Check::{Deny, Descriptors};
use ioplane_model::{
    ANY, BufferLength, Check, CounterBlock, DescriptorBuffer, DescriptorFormat, DescriptorLayout,
    DescriptorRing, Flow, Given, Id, Interrupts, On, RESET, Reads, Region, Register, Reset, Restore, STAY,
    SplitMask, State, StateModel, TailQueue, Transition, Way, Writes,
};

/// The 82574L.
pub static MODEL: StateModel = StateModel {
    name: "i82574",
    title: "Intel 82574L, Gigabit Ethernet",
    ids: &[Id { vendor: 0x8086, device: 0x10d3, revisions: None }],
    bar: 0,
    aliases: &[],
    size: 0xb700,
    banks: None,
    registers: REGISTERS,
    interrupts: Interrupts {
        status: "ICR",
        mask: "IMS",
        bits: 0x01ff_ffff,
        live: 0,
        // TXDW, TXQE, RXDMT0, RXO, RXT0, ACK, and those of the queues.
        traffic: 0x00f2_00d3,
        // Of a failed bus access it has no bit. By RXSEQ drivers look at the link again.
        error: 0x08,
        split: Some(SplitMask {
            clear: "IMC",
            cause: "ICS",
            auto: "IAM",
            auto_on: ("CTRL_EXT", IAME),
            asserted: 1 << 31,
        }),
    },
    regions: &[ENGINE, TRANSMIT, NVM, PHY],
    rings: &[
        DescriptorRing {
            name: "transmit",
            base: ("TDBAL", "TDBAH"),
            flow: Flow::Transmit,
            enable: ("TCTL", EN),
            queue: Some(TailQueue {
                length: "TDLEN",
                head: "TDH",
                tail: "TDT",
                unit: 128,
                formats: TRANSMIT_FORMATS,
            }),
            ..RING
        },
        DescriptorRing {
            name: "receive",
            base: ("RDBAL", "RDBAH"),
            flow: Flow::Receive,
            enable: ("RCTL", EN),
            queue: Some(TailQueue {
                length: "RDLEN",
                head: "RDH",
                tail: "RDT",
                unit: 128,
                formats: RECEIVE_FORMATS,
            }),
            ..RING
        },
    ],
    blocks: &[],
    // Section 10.2.10: all of them are cleared when they are read.
    counters: Some(CounterBlock { register: "STATISTICS", wide: &[0x88, 0x90, 0xc0, 0xc8] }),
    port: None,
    // Section 4.6.3: nothing is accessed until the NVM has been read, and what the transceiver gets from it is written.
    reset: Reset { by: ("CTRL", Way::Write, RST), done: ("EECD", AUTO_RD, AUTO_RD), settle: 25 },
    halt: &[Restore::Value("RCTL", 0), Restore::Value("TCTL", 0)],
    restore: RESTORE,
    // Whether descriptors are the card's is seen in guest memory.
    told: &["transmit"],
};

/// Of CTRL: reset of all but the transceiver; reset of the transceiver.
const RST: u32 = 1 << 26;
const PHY_RST: u32 = 1 << 31;
/// Of EECD: the NVM has been read after a reset.
const AUTO_RD: u32 = 1 << 9;
/// Of EERD: read a word; it has come.
const START: u32 = 1 << 0;
const DONE: u32 = 1 << 1;
/// Of MDIC: the access has ended.
const READY: u32 = 1 << 28;
/// Of CTRL_EXT: the mask follows IAM when the status is accessed.
const IAME: u32 = 1 << 27;
/// Of CTRL_EXT: the same by vector; pending bits of MSI-X are cleared; the NVM is loaded anew.
const NOT_OFFERED: u32 = 1 << 24 | 1 << 31 | 1 << 13;
/// Of RCTL and TCTL: on.
const EN: u32 = 1 << 1;
/// Of RCTL: type of descriptors; size of buffers and its unit; size of buffers in KiB, if not zero.
const DTYP: u32 = 3 << 10;
const BSIZE: u32 = 3 << 16;
const BSEX: u32 = 1 << 25;
const FLXBUF: u32 = 0xf << 27;
/// Of RFCTL: receive descriptors are written back in the extended format.
const EXTEN: u32 = 1 << 15;
/// Of a transmit descriptor's third word: its format; context or data; the last of a frame; say when it is done; context of a large send.
const DEXT: u32 = 1 << 29;
const KIND: u32 = 0xf << 20;
const DATA: u32 = 1 << 20;
const EOP: u32 = 1 << 24;
const RS: u32 = 1 << 27;
const TSE: u32 = 1 << 26;
/// Done, of all formats.
const DD: u32 = 1;

/// Sections 7.1.4 and 7.2.10: descriptors of 16 bytes, at a multiple of 16; the length is a multiple of 128 bytes. The card takes more.
const RING: DescriptorRing = DescriptorRing {
    name: "",
    base: ("", ""),
    align: 16,
    most: 4096,
    flow: Flow::Transmit,
    // The longest buffer of a receive descriptor: 16 KiB.
    descriptor: DescriptorLayout { size: 16, status: 12, own: 0, end: 0, length: 0x3fff, address: (0, 4) },
    doorbell: None,
    enable: ("", 0),
    queue: None,
};

/// Section 7.2.10: legacy, context, data. The card writes the status, in the fourth word, if RS asks for it.
const TRANSMIT_FORMATS: &[DescriptorFormat] = &[
    DescriptorFormat {
        name: "legacy",
        tag: (2, DEXT, 0),
        given: None,
        buffer: Some(DescriptorBuffer { address: 0, length: BufferLength::Field(2, 0xffff) }),
        done: (3, DD),
        report: Some((2, RS)),
        last: Some((2, EOP)),
        written: 1 << 3,
        context: None,
    },
    DescriptorFormat {
        name: "context",
        tag: (2, DEXT | KIND, DEXT),
        given: None,
        buffer: None,
        done: (3, DD),
        report: Some((2, RS)),
        last: None,
        written: 1 << 3,
        context: Some((2, TSE)),
    },
    DescriptorFormat {
        name: "data",
        tag: (2, DEXT | KIND, DEXT | DATA),
        given: None,
        buffer: Some(DescriptorBuffer { address: 0, length: BufferLength::Field(2, 0xf_ffff) }),
        done: (3, DD),
        report: Some((2, RS)),
        last: Some((2, EOP)),
        written: 1 << 3,
        context: None,
    },
];

/// Sections 7.1.4 and 7.1.5: both have the address in their first two words. The extended format is written back over all of it.
const RECEIVE_FORMATS: &[DescriptorFormat] = &[
    DescriptorFormat {
        name: "legacy",
        tag: (0, 0, 0),
        given: Some(Given { register: "RFCTL", mask: EXTEN, is: 0 }),
        buffer: Some(DescriptorBuffer { address: 0, length: BufferLength::By("RCTL", buffer) }),
        done: (3, DD),
        report: None,
        last: None,
        written: 1 << 2 | 1 << 3,
        context: None,
    },
    DescriptorFormat {
        name: "extended",
        tag: (0, 0, 0),
        given: Some(Given { register: "RFCTL", mask: EXTEN, is: EXTEN }),
        buffer: Some(DescriptorBuffer { address: 0, length: BufferLength::By("RCTL", buffer) }),
        done: (2, DD),
        report: None,
        last: None,
        written: 0xf,
        context: None,
    },
];

/// Section 10.2.5.1: bytes of a receive buffer. The value that is reserved counts as the longest.
pub(super) fn buffer(rctl: u32) -> u32 {
    let flexible = (rctl & FLXBUF) >> FLXBUF.trailing_zeros();
    let size = (rctl & BSIZE) >> BSIZE.trailing_zeros();
    match (flexible, rctl & BSEX != 0) {
        (0, false) => 2048 >> size,
        (0, true) => [16384, 16384, 8192, 4096][size as usize],
        (kib, _) => kib * 1024,
    }
}

const CTRL_BITS: &[(&str, u32)] = &[("RST", RST), ("PHY_RST", PHY_RST)];

/// A row of the register table.
const fn row(name: &'static str, offset: u16, width: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, width, reads, writes)
}

/// Chapter 10. Where the card offers more than guests get (the second queues, flash, NVM, wake-up, management), writes have no effect.
#[rustfmt::skip]
const REGISTERS: &[Register] = &[
    row("CTRL",        0x0000, 4, Reads::Alive, Writes::Plain).hook_writes().bits(CTRL_BITS),
    row("STATUS",      0x0008, 4, Reads::Alive, Writes::Never),
    row("EECD",        0x0010, 4, Reads::Alive, Writes::Never).bits(&[("AUTO_RD", AUTO_RD)]),
    row("EERD",        0x0014, 4, Reads::Alive, Writes::Trigger).hook_writes().bits(&[("DONE", DONE), ("START", START)]),
    row("CTRL_EXT",    0x0018, 4, Reads::Alive, Writes::Plain).keeps(IAME | NOT_OFFERED).bits(&[("IAME", IAME)]),
    row("FLA",         0x001c, 4, Reads::Alive, Writes::Never),
    row("MDIC",        0x0020, 4, Reads::Alive, Writes::Trigger).hook_writes().bits(&[("READY", READY)]),
    row("FCAL",        0x0028, 4, Reads::Plain, Writes::Plain),
    row("FCAH",        0x002c, 4, Reads::Plain, Writes::Plain),
    row("FCT",         0x0030, 4, Reads::Plain, Writes::Plain),
    row("VET",         0x0038, 4, Reads::Plain, Writes::Plain),
    row("ICR",         0x00c0, 4, Reads::Alive, Writes::Clears).hook_all(),
    row("ITR",         0x00c4, 4, Reads::Plain, Writes::Plain),
    row("ICS",         0x00c8, 4, Reads::Plain, Writes::Sets).hook_writes(),
    row("IMS",         0x00d0, 4, Reads::Plain, Writes::Sets).hook_all(),
    row("IMC",         0x00d8, 4, Reads::Plain, Writes::Clears).hook_writes(),
    // Only with MSI-X do they mean anything.
    row("EIAC",        0x00dc, 4, Reads::Plain, Writes::Plain).keeps(!0),
    row("IAM",         0x00e0, 4, Reads::Plain, Writes::Plain).keeps(!0),
    row("IVAR",        0x00e4, 4, Reads::Plain, Writes::Plain).keeps(!0),
    row("EITR",        0x00e8, 0x14, Reads::Alive, Writes::Never),
    row("RCTL",        0x0100, 4, Reads::Plain, Writes::Plain).hook_writes().bits(&[("EN", EN), ("DTYP", DTYP), ("BSEX", BSEX), ("BSIZE", BSIZE), ("FLXBUF", FLXBUF)]),
    row("FCTTV",       0x0170, 4, Reads::Plain, Writes::Plain),
    row("TXCW",        0x0178, 4, Reads::Alive, Writes::Never),
    row("RXCW",        0x0180, 4, Reads::Alive, Writes::Never),
    row("TCTL",        0x0400, 4, Reads::Plain, Writes::Plain).hook_writes().bits(&[("EN", EN)]),
    row("TCTL_EXT",    0x0404, 4, Reads::Plain, Writes::Plain),
    row("TIPG",        0x0410, 4, Reads::Plain, Writes::Plain),
    row("AIT",         0x0458, 4, Reads::Plain, Writes::Plain),
    row("LEDCTL",      0x0e00, 4, Reads::Plain, Writes::Plain),
    row("EXTCNF_CTRL", 0x0f00, 4, Reads::Alive, Writes::Plain),
    row("EXTCNF_SIZE", 0x0f08, 4, Reads::Alive, Writes::Never),
    row("POEMB",       0x0f10, 4, Reads::Alive, Writes::Never),
    row("PBA",         0x1000, 4, Reads::Plain, Writes::Plain),
    row("PBS",         0x1008, 4, Reads::Alive, Writes::Never),
    // Management, flash, writing of the NVM.
    row("EEMNG",       0x1010, 0x30, Reads::Alive, Writes::Never),
    row("ERT",         0x2008, 4, Reads::Plain, Writes::Plain),
    row("FCRTL",       0x2160, 4, Reads::Plain, Writes::Plain),
    row("FCRTH",       0x2168, 4, Reads::Plain, Writes::Plain),
    row("PSRCTL",      0x2170, 4, Reads::Plain, Writes::Plain),
    row("RDFIFO",      0x2410, 0x24, Reads::Alive, Writes::Never),
    row("RDBAL",       0x2800, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("RDBAH",       0x2804, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("RDLEN",       0x2808, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("RDH",         0x2810, 4, Reads::Alive, Writes::Trigger).hook_writes(),
    row("RDT",         0x2818, 4, Reads::Plain, Writes::Trigger).hook_writes(),
    row("RDTR",        0x2820, 4, Reads::Plain, Writes::Plain),
    row("RXDCTL",      0x2828, 4, Reads::Plain, Writes::Plain),
    row("RADV",        0x282c, 4, Reads::Plain, Writes::Plain),
    row("QUEUE1_RX",   0x2900, 0x30, Reads::Alive, Writes::Never),
    row("RSRPD",       0x2c00, 4, Reads::Plain, Writes::Plain),
    row("RAID",        0x2c08, 4, Reads::Plain, Writes::Plain),
    row("CPUVEC",      0x2c10, 4, Reads::Plain, Writes::Plain),
    row("TDFIFO",      0x3410, 0x24, Reads::Alive, Writes::Never),
    row("TDBAL",       0x3800, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("TDBAH",       0x3804, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("TDLEN",       0x3808, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("TDH",         0x3810, 4, Reads::Alive, Writes::Trigger).hook_writes(),
    row("TDT",         0x3818, 4, Reads::Plain, Writes::Trigger).hook_writes(),
    row("TIDV",        0x3820, 4, Reads::Plain, Writes::Plain),
    row("TXDCTL",      0x3828, 4, Reads::Plain, Writes::Plain),
    row("TADV",        0x382c, 4, Reads::Plain, Writes::Plain),
    row("TARC0",       0x3840, 4, Reads::Plain, Writes::Plain),
    row("QUEUE1_TX",   0x3900, 0x30, Reads::Alive, Writes::Never),
    row("TARC1",       0x3940, 4, Reads::Plain, Writes::Plain),
    row("STATISTICS",  0x4000, 0x128, Reads::Effect, Writes::Never),
    row("RXCSUM",      0x5000, 4, Reads::Plain, Writes::Plain),
    row("RFCTL",       0x5008, 4, Reads::Plain, Writes::Plain).hook_writes().bits(&[("EXTEN", EXTEN)]),
    row("MAVTV",       0x5010, 0x10, Reads::Plain, Writes::Plain),
    // Multicast hash, addresses, VLANs.
    row("MTA",         0x5200, 0x200, Reads::Plain, Writes::Plain),
    row("RA",          0x5400, 0x80, Reads::Plain, Writes::Plain),
    row("VFTA",        0x5600, 0x200, Reads::Plain, Writes::Plain),
    // Wake-up: a guest that sleeps does not hold the card.
    row("WUC",         0x5800, 4, Reads::Alive, Writes::Never),
    row("WUFC",        0x5808, 4, Reads::Alive, Writes::Never),
    row("WUS",         0x5810, 4, Reads::Alive, Writes::Never),
    row("MRQC",        0x5818, 4, Reads::Plain, Writes::Plain),
    row("MANC",        0x5820, 4, Reads::Alive, Writes::Never),
    row("MANAGEMENT",  0x5824, 0xdc, Reads::Alive, Writes::Never),
    row("WUPL",        0x5900, 0x100, Reads::Alive, Writes::Never),
    row("WUPM",        0x5a00, 0x80, Reads::Alive, Writes::Never),
    row("GCR",         0x5b00, 4, Reads::Alive, Writes::Plain),
    row("GSCL",        0x5b04, 0x2c, Reads::Alive, Writes::Never),
    row("FACTPS",      0x5b30, 4, Reads::Alive, Writes::Never),
    row("SWSM",        0x5b50, 4, Reads::Alive, Writes::Plain),
    row("FWSM",        0x5b54, 4, Reads::Alive, Writes::Never),
    row("SWSM2",       0x5b58, 4, Reads::Alive, Writes::Plain),
    row("GCR2",        0x5b64, 4, Reads::Alive, Writes::Plain),
    row("PBACL",       0x5b68, 4, Reads::Alive, Writes::Never),
    row("RETA",        0x5c00, 0x80, Reads::Plain, Writes::Plain),
    row("RSSRK",       0x5c80, 0x28, Reads::Plain, Writes::Plain),
    row("FFLT",        0x5f00, 0x40, Reads::Alive, Writes::Never),
    row("FILTERS",     0x9000, 0x1000, Reads::Alive, Writes::Never),
    // Time stamps.
    row("SYSTIML",     0xb600, 4, Reads::Alive, Writes::Plain),
    row("SYSTIMH",     0xb604, 4, Reads::Alive, Writes::Plain),
    row("TIMINCA",     0xb608, 4, Reads::Plain, Writes::Plain),
    row("TIMADJL",     0xb60c, 4, Reads::Plain, Writes::Plain),
    row("TIMADJH",     0xb610, 4, Reads::Plain, Writes::Plain),
    row("TSYNCTXCTL",  0xb614, 4, Reads::Alive, Writes::Plain),
    row("TXSTMPL",     0xb618, 4, Reads::Alive, Writes::Never),
    row("TXSTMPH",     0xb61c, 4, Reads::Alive, Writes::Never),
    row("TSYNCRXCTL",  0xb620, 4, Reads::Alive, Writes::Plain),
    row("RXSTMPL",     0xb624, 4, Reads::Alive, Writes::Never),
    row("RXSTMPH",     0xb628, 4, Reads::Alive, Writes::Never),
    row("RXSATRL",     0xb62c, 4, Reads::Alive, Writes::Never),
    row("RXSATRH",     0xb630, 4, Reads::Alive, Writes::Never),
    row("RXMTRL",      0xb634, 4, Reads::Plain, Writes::Plain),
    row("RXUDP",       0xb638, 4, Reads::Plain, Writes::Plain),
];

const ONE_BUFFER: Check = Deny("packets are not split: a descriptor has one buffer");
const KNOWN_SIZE: Check =
    Deny("this size of buffers is reserved: nobody knows how much the card would write");

/// The reset, and what the card would do with descriptors that are not those that were checked.
const ENGINE: Region = Region {
    name: "engine",
    states: &[
        State::busy("Reset", "the card resets and reads its NVM; ends when EECD says so"),
        State::reusable("Ready", "its registers are the guest's"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("CTRL", RST, RST), RESET),
        Transition::new("Reset", On::became("EECD", AUTO_RD, AUTO_RD), "Ready"),
        Transition::new("Reset", On::written("CTRL"), "Ready"),
        Transition::new(ANY, On::sets("RCTL", DTYP), STAY).check(&[ONE_BUFFER]),
        Transition::new(ANY, On::write("RCTL", FLXBUF | BSEX | BSIZE, BSEX), STAY).check(&[KNOWN_SIZE]),
        Transition::new(ANY, On::written("RDT"), STAY).check(&[Descriptors("receive")]),
    ],
};

/// The ring that is sent from.
const TRANSMIT: Region = Region {
    name: "transmit",
    states: &[
        State::reusable("Quiet", "no descriptor of the ring is the card's"),
        State::busy("TxRun", "the card reads descriptors and frames; the ring drains"),
    ],
    transitions: &[
        Transition::new(ANY, On::written("TDT"), "TxRun")
            .given("TCTL", EN, EN)
            .check(&[Descriptors("transmit")]),
        Transition::new(ANY, On::written("TDT"), STAY).check(&[Descriptors("transmit")]),
        Transition::new("Quiet", On::write("TCTL", EN, EN), "TxRun"),
        Transition::new("TxRun", On::drained("transmit"), "Quiet"),
        Transition::new("TxRun", On::write("TCTL", EN, 0), "Quiet"),
    ],
};

/// A word of the NVM. Only reading is offered: EEWR and the pins in EECD are not written.
const NVM: Region = Region {
    name: "nvm",
    states: &[
        State::reusable("Quiet", "no word is being read"),
        State::busy("Read", "a word is read; ends when EERD says so"),
    ],
    transitions: &[
        Transition::new(ANY, On::sets("EERD", START), "Read"),
        Transition::new("Read", On::became("EERD", DONE, DONE), "Quiet"),
        Transition::new("Read", On::written("EERD"), "Quiet"),
    ],
};

/// An access to the transceiver.
const PHY: Region = Region {
    name: "phy",
    states: &[
        State::reusable("Quiet", "nothing goes over the management interface"),
        State::busy("Access", "a register of the transceiver is read or written; ends when MDIC says so"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("MDIC", READY, 0), "Access"),
        Transition::new("Access", On::became("MDIC", READY, READY), "Quiet"),
        Transition::new("Access", On::write("MDIC", READY, READY), "Quiet"),
    ],
};

/// In the order of a driver that starts: control, filters, times, rings, then receiver and transmitter. ICR and IMS are virtual.
const RESTORE: &[Restore] = &[
    Restore::Saved("CTRL", !(RST | PHY_RST)),
    Restore::Saved("CTRL_EXT", !0),
    Restore::Saved("EIAC", !0),
    Restore::Saved("IAM", !0),
    Restore::Saved("IVAR", !0),
    Restore::Saved("FCAL", !0),
    Restore::Saved("FCAH", !0),
    Restore::Saved("FCT", !0),
    Restore::Saved("FCTTV", !0),
    Restore::Saved("VET", !0),
    Restore::Saved("ITR", !0),
    Restore::Saved("LEDCTL", !0),
    Restore::Saved("PBA", !0),
    Restore::Saved("ERT", !0),
    Restore::Saved("FCRTL", !0),
    Restore::Saved("FCRTH", !0),
    Restore::Saved("PSRCTL", !0),
    Restore::Saved("RSRPD", !0),
    Restore::Saved("RAID", !0),
    Restore::Saved("CPUVEC", !0),
    Restore::Saved("RXCSUM", !0),
    Restore::Saved("RFCTL", !0),
    Restore::Saved("MRQC", !0),
    Restore::Saved("GCR", !0),
    Restore::Saved("GCR2", !0),
    Restore::Saved("TIMINCA", !0),
    Restore::Saved("TIMADJL", !0),
    Restore::Saved("TIMADJH", !0),
    Restore::Saved("SYSTIML", !0),
    Restore::Saved("SYSTIMH", !0),
    Restore::Saved("TSYNCTXCTL", !0),
    Restore::Saved("TSYNCRXCTL", !0),
    Restore::Saved("RXMTRL", !0),
    Restore::Saved("RXUDP", !0),
    Restore::Table("MAVTV", 0),
    Restore::Table("MTA", 0),
    // The first address is read from the NVM at a reset.
    Restore::Table("RA", 2),
    Restore::Table("VFTA", 0),
    Restore::Table("RETA", 0),
    Restore::Table("RSSRK", 0),
    Restore::Lost("EXTCNF_CTRL", "who has the transceiver is asked for anew by each access"),
    Restore::Lost("SWSM", "semaphores of the card's own firmware"),
    Restore::Lost("SWSM2", "semaphores of the card's own firmware"),
    Restore::Shown("EERD", 0),
    Restore::Shown("MDIC", 0),
    // Without the bits that write back at once.
    Restore::Saved("RDTR", 0xffff),
    Restore::Saved("RADV", !0),
    Restore::Saved("RXDCTL", !0),
    Restore::Saved("TIDV", 0xffff),
    Restore::Saved("TADV", !0),
    Restore::Saved("TXDCTL", !0),
    Restore::Saved("TARC0", !0),
    Restore::Saved("TARC1", !0),
    Restore::Saved("TIPG", !0),
    Restore::Saved("AIT", !0),
    Restore::Saved("TCTL_EXT", !0),
    Restore::Ring("transmit"),
    Restore::Ring("receive"),
    Restore::Saved("TCTL", !0),
    Restore::Saved("RCTL", !0),
];
