//! The table.

use ioplane_model::{
    ANY, Buffers, Counter, DirectModel, FurtherAddresses, Id, Interrupts, KeepRule, MailboxTable,
    MessageKind, On, PageRule, RESET, Reads, Region, Register, Replay, Reset, Restore, STAY, State,
    StateModel, TailRing, Transition, Way, Writes,
};

use crate::intel::*;

/// Registers and states.
pub static MODEL: StateModel = StateModel {
    name: "vf82576",
    title: "Intel 82576, virtual function, 1 Gbit/s Ethernet",
    ids: &[Id { vendor: 0x8086, device: 0x10ca, revisions: None }],
    bar: 0,
    aliases: &[],
    size: 0x4000,
    banks: None,
    registers: REGISTERS,
    interrupts: Interrupts::PAST_THE_MONITOR,
    regions: &[FUNCTION, MAILBOX],
    rings: &[],
    blocks: &[],
    counters: None,
    port: None,
    reset: Reset { by: ("CTRL", Way::Write, RST), done: ("V2PMAILBOX", RSTD, RSTD), settle: 0 },
    halt: &[
        Restore::Value("RXDCTL0", 0),
        Restore::Value("RXDCTL1", 0),
        Restore::Value("TXDCTL0", 0),
        Restore::Value("TXDCTL1", 0),
    ],
    restore: RESTORE,
    told: &[],
};

/// Rings, mailbox, and the order of bringing it back.
pub static DIRECT: DirectModel = DirectModel {
    model: &MODEL,
    pages: &[PageRule::Trapped, PageRule::Mapped, PageRule::MappedAtRest, PageRule::MappedAtRest],
    rings: &[
        TailRing {
            name: "receive 0",
            base: ("RDBAL0", "RDBAH0"),
            length: "RDLEN0",
            head: "RDH0",
            tail: "RDT0",
            enable: ("RXDCTL0", ENABLE),
            buffers: Some(Buffers { shape: "SRRCTL0", ..BUFFERS }),
            ..RECEIVE
        },
        TailRing {
            name: "receive 1",
            base: ("RDBAL1", "RDBAH1"),
            length: "RDLEN1",
            head: "RDH1",
            tail: "RDT1",
            enable: ("RXDCTL1", ENABLE),
            buffers: Some(Buffers { shape: "SRRCTL1", ..BUFFERS }),
            ..RECEIVE
        },
        TailRing {
            name: "transmit 0",
            base: ("TDBAL0", "TDBAH0"),
            length: "TDLEN0",
            head: "TDH0",
            tail: "TDT0",
            enable: ("TXDCTL0", ENABLE),
            ..TRANSMIT
        },
        TailRing {
            name: "transmit 1",
            base: ("TDBAL1", "TDBAH1"),
            length: "TDLEN1",
            head: "TDH1",
            tail: "TDT1",
            enable: ("TXDCTL1", ENABLE),
            ..TRANSMIT
        },
    ],
    mailbox: MailboxTable {
        memory: "VMBMEM",
        control: "V2PMAILBOX",
        messages: &[
            MessageKind { name: "RESET", kind: 1, words: 3, keep: KeepRule::Begins { address: 1 } },
            // igbvf clears and adds further addresses by the same kind.
            MessageKind {
                name: "SET_MAC_ADDR",
                kind: 2,
                words: 3,
                keep: KeepRule::Address {
                    word: 1,
                    further: Some(FurtherAddresses { clear: 1 << 16, add: 2 << 16, most: 16 }),
                },
            },
            MessageKind { name: "SET_MULTICAST", kind: 3, words: 16, keep: KeepRule::Last },
            MessageKind {
                name: "SET_VLAN",
                kind: 4,
                words: 2,
                keep: KeepRule::Each { word: 1, field: 0xfff, adds: INFO, most: 32 },
            },
            MessageKind { name: "SET_LPE", kind: 5, words: 2, keep: KeepRule::Last },
            MessageKind { name: "SET_PROMISC", kind: 6, words: 1, keep: KeepRule::Last },
        ],
        ..PF_MAILBOX
    },
    counters: &[
        Counter::word("VFGPRC"),
        Counter::word("VFGPTC"),
        Counter::word("VFGORC"),
        Counter::word("VFGOTC"),
        Counter::word("VFMPRC"),
        Counter::word("VFGPRLBC"),
        Counter::word("VFGPTLBC"),
        Counter::word("VFGORLBC"),
        Counter::word("VFGOTLBC"),
    ],
    replay: &[
        Replay::Messages,
        Replay::Registers,
        Replay::Ring("transmit 0"),
        Replay::Ring("transmit 1"),
        Replay::Ring("receive 0"),
        Replay::Ring("receive 1"),
        Replay::Counters,
        Replay::Tail("transmit 0"),
        Replay::Tail("transmit 1"),
        Replay::Tail("receive 0"),
        Replay::Tail("receive 1"),
        // What was pending on the source is made up for: a cause that was masked waits for its mask, and each vector comes once.
        Replay::Saved("EIMS", 7),
        Replay::Value("EICS", 7),
        Replay::Vectors,
    ],
};

/// Section 8.26 and the tables of the VF's space (8.28). Where the chip offers more than drivers use, there is nothing for guests.
#[rustfmt::skip]
const REGISTERS: &[Register] = &[
    row("CTRL",       0x0000, Reads::Alive, Writes::Trigger).hook_writes().bits(&[("RST", RST)]),
    row("STATUS",     0x0008, Reads::Alive, Writes::Never),
    Register::new("VMBMEM", 0x0800, 64, Reads::Alive, Writes::Trigger),
    // Reading clears three bits. The monitor keeps those that it reads for the guest.
    row("V2PMAILBOX", 0x0c40, Reads::Alive, Writes::Trigger).hook_all().bits(MAILBOX_BITS),
    row("PBACL",      0x0f04, Reads::Plain, Writes::Plain),
    row("PSRTYPE",    0x0f0c, Reads::Plain, Writes::Plain),
    // Good packets and octets, received and transmitted; multicast; looped back. They survive a reset.
    row("VFGPRC",     0x0f10, Reads::Alive, Writes::Never),
    row("VFGPTC",     0x0f14, Reads::Alive, Writes::Never),
    row("VFGORC",     0x0f18, Reads::Alive, Writes::Never),
    row("VFGOTC",     0x0f34, Reads::Alive, Writes::Never),
    row("VFMPRC",     0x0f3c, Reads::Alive, Writes::Never),
    row("VFGPRLBC",   0x0f40, Reads::Alive, Writes::Never),
    row("VFGPTLBC",   0x0f44, Reads::Alive, Writes::Never),
    row("VFGORLBC",   0x0f48, Reads::Alive, Writes::Never),
    row("VFGOTLBC",   0x0f50, Reads::Alive, Writes::Never),
    // Interrupts: ones set causes, set the mask, clear the mask.
    row("EICS",       0x1520, Reads::Never, Writes::Trigger),
    row("EIMS",       0x1524, Reads::Alive, Writes::Trigger),
    row("EIMC",       0x1528, Reads::Alive, Writes::Trigger),
    row("EIAC",       0x152c, Reads::Plain, Writes::Plain),
    row("EIAM",       0x1530, Reads::Plain, Writes::Plain),
    row("EICR",       0x1580, Reads::Effect, Writes::Clears),
    row("EITR0",      0x1680, Reads::Plain, Writes::Plain),
    row("EITR1",      0x1684, Reads::Plain, Writes::Plain),
    row("EITR2",      0x1688, Reads::Plain, Writes::Plain),
    row("IVAR0",      0x1700, Reads::Plain, Writes::Plain),
    row("IVAR_MISC",  0x1740, Reads::Plain, Writes::Plain),
    // Receive queues.
    row("RDBAL0",     0x2800, Reads::Plain, Writes::Plain),
    row("RDBAH0",     0x2804, Reads::Plain, Writes::Plain),
    row("RDLEN0",     0x2808, Reads::Plain, Writes::Plain),
    row("SRRCTL0",    0x280c, Reads::Plain, Writes::Plain),
    row("RDH0",       0x2810, Reads::Alive, Writes::Trigger),
    row("RDT0",       0x2818, Reads::Alive, Writes::Trigger),
    row("RXDCTL0",    0x2828, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
    row("RQDPC0",     0x2830, Reads::Alive, Writes::Never),
    row("RDBAL1",     0x2900, Reads::Plain, Writes::Plain),
    row("RDBAH1",     0x2904, Reads::Plain, Writes::Plain),
    row("RDLEN1",     0x2908, Reads::Plain, Writes::Plain),
    row("SRRCTL1",    0x290c, Reads::Plain, Writes::Plain),
    row("RDH1",       0x2910, Reads::Alive, Writes::Trigger),
    row("RDT1",       0x2918, Reads::Alive, Writes::Trigger),
    row("RXDCTL1",    0x2928, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
    row("RQDPC1",     0x2930, Reads::Alive, Writes::Never),
    // Transmit queues.
    row("TDBAL0",     0x3800, Reads::Plain, Writes::Plain),
    row("TDBAH0",     0x3804, Reads::Plain, Writes::Plain),
    row("TDLEN0",     0x3808, Reads::Plain, Writes::Plain),
    row("TDH0",       0x3810, Reads::Alive, Writes::Trigger),
    row("DCA_TXCTRL0", 0x3814, Reads::Plain, Writes::Plain),
    row("TDT0",       0x3818, Reads::Alive, Writes::Trigger),
    row("TXDCTL0",    0x3828, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
    row("TDWBAL0",    0x3838, Reads::Plain, Writes::Plain),
    row("TDWBAH0",    0x383c, Reads::Plain, Writes::Plain),
    row("TDBAL1",     0x3900, Reads::Plain, Writes::Plain),
    row("TDBAH1",     0x3904, Reads::Plain, Writes::Plain),
    row("TDLEN1",     0x3908, Reads::Plain, Writes::Plain),
    row("TDH1",       0x3910, Reads::Alive, Writes::Trigger),
    row("DCA_TXCTRL1", 0x3914, Reads::Plain, Writes::Plain),
    row("TDT1",       0x3918, Reads::Alive, Writes::Trigger),
    row("TXDCTL1",    0x3928, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
    row("TDWBAL1",    0x3938, Reads::Plain, Writes::Plain),
    row("TDWBAH1",    0x393c, Reads::Plain, Writes::Plain),
];

crate::intel::regions!("CTRL", "V2PMAILBOX");

/// What is written back while the queues are off. Heads, tails and enable bits come later.
#[rustfmt::skip]
const RESTORE: &[Restore] = &[
    Restore::Saved("PBACL", !0),
    Restore::Saved("PSRTYPE", !0),
    Restore::Saved("IVAR0", !0),
    Restore::Saved("IVAR_MISC", !0),
    Restore::Saved("EITR0", !0),
    Restore::Saved("EITR1", !0),
    Restore::Saved("EITR2", !0),
    Restore::Saved("EIAC", !0),
    Restore::Saved("EIAM", !0),
    Restore::Saved("TDBAL0", !0),
    Restore::Saved("TDBAH0", !0),
    Restore::Saved("TDLEN0", !0),
    Restore::Saved("DCA_TXCTRL0", !0),
    Restore::Saved("TDWBAL0", !0),
    Restore::Saved("TDWBAH0", !0),
    Restore::Saved("TXDCTL0", !ENABLE),
    Restore::Saved("TDBAL1", !0),
    Restore::Saved("TDBAH1", !0),
    Restore::Saved("TDLEN1", !0),
    Restore::Saved("DCA_TXCTRL1", !0),
    Restore::Saved("TDWBAL1", !0),
    Restore::Saved("TDWBAH1", !0),
    Restore::Saved("TXDCTL1", !ENABLE),
    Restore::Saved("RDBAL0", !0),
    Restore::Saved("RDBAH0", !0),
    Restore::Saved("RDLEN0", !0),
    Restore::Saved("SRRCTL0", !0),
    Restore::Saved("RXDCTL0", !ENABLE),
    Restore::Saved("RDBAL1", !0),
    Restore::Saved("RDBAH1", !0),
    Restore::Saved("RDLEN1", !0),
    Restore::Saved("SRRCTL1", !0),
    Restore::Saved("RXDCTL1", !ENABLE),
];
