//! The table. Queue by queue the registers are the same: rows, rings and steps of all eight are written once.

use ioplane_model::{
    ANY, Buffers, Counter, DirectModel, Id, Interrupts, KeepRule, MailboxTable, MessageKind, On, PageRule,
    RESET, Reads, Region, Register, Replay, Reset, Restore, STAY, State, StateModel, TailRing, Transition,
    Way, Writes,
};

use crate::intel::*;

/// Registers and states.
pub static MODEL: StateModel = StateModel {
    name: "vf82599",
    title: "Intel 82599, virtual function, 10 Gbit/s Ethernet",
    ids: &[Id { vendor: 0x8086, device: 0x10ed, revisions: None }],
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
    reset: Reset { by: ("VFCTRL", Way::Write, RST), done: ("VFMAILBOX", RSTD, RSTD), settle: 0 },
    halt: HALT,
    restore: RESTORE,
    told: &[],
};

/// Rings, mailbox, and the order of bringing it back.
pub static DIRECT: DirectModel = DirectModel {
    model: &MODEL,
    pages: &[PageRule::Trapped, PageRule::MappedUntilMoved, PageRule::MappedUntilMoved, PageRule::Mapped],
    rings: RINGS,
    mailbox: MailboxTable {
        memory: "VFMBMEM",
        control: "VFMAILBOX",
        // What is not listed is refused: IPSEC_ADD and IPSEC_DEL, whose handles another card does not know.
        messages: &[
            MessageKind { name: "RESET", kind: 1, words: 3, keep: KeepRule::Begins { address: 1 } },
            MessageKind {
                name: "SET_MAC_ADDR",
                kind: 2,
                words: 3,
                keep: KeepRule::Address { word: 1, further: None },
            },
            // Before whatever needs more than version 1.0.
            MessageKind { name: "API_NEGOTIATE", kind: 8, words: 2, keep: KeepRule::Last },
            MessageKind { name: "SET_MULTICAST", kind: 3, words: 16, keep: KeepRule::Last },
            MessageKind {
                name: "SET_VLAN",
                kind: 4,
                words: 2,
                keep: KeepRule::Each { word: 1, field: 0xfff, adds: INFO, most: 64 },
            },
            MessageKind { name: "SET_LPE", kind: 5, words: 2, keep: KeepRule::Last },
            MessageKind {
                name: "SET_MACVLAN",
                kind: 6,
                words: 3,
                keep: KeepRule::List { number: INFO, most: 10 },
            },
            MessageKind { name: "UPDATE_XCAST_MODE", kind: 0xc, words: 2, keep: KeepRule::Last },
            MessageKind { name: "GET_QUEUES", kind: 9, words: 1, keep: KeepRule::Nothing },
            MessageKind { name: "GET_RETA", kind: 0xa, words: 1, keep: KeepRule::Nothing },
            MessageKind { name: "GET_RSS_KEY", kind: 0xb, words: 1, keep: KeepRule::Nothing },
            MessageKind { name: "GET_LINK_STATE", kind: 0x10, words: 1, keep: KeepRule::Nothing },
        ],
        ..PF_MAILBOX
    },
    counters: &[
        Counter::word("VFGPRC"),
        Counter::wide("VFGORC_LSB", "VFGORC_MSB", 0xf),
        Counter::word("VFMPRC"),
        Counter::word("VFGPTC"),
        Counter::wide("VFGOTC_LSB", "VFGOTC_MSB", 0xf),
    ],
    replay: REPLAY,
};

macro_rules! queues {
    ($($n:literal)*) => {
        /// Section 8.3. Where the chip offers more than drivers use (coalescing of segments), there is nothing for guests.
        #[rustfmt::skip]
        const REGISTERS: &[Register] = &[
            row("VFCTRL",     0x0000, Reads::Never, Writes::Trigger).hook_writes().bits(&[("RST", RST)]),
            row("VFSTATUS",   0x0008, Reads::Alive, Writes::Never),
            row("VFLINKS",    0x0010, Reads::Alive, Writes::Never),
            row("VFFRTIMER",  0x0048, Reads::Alive, Writes::Never),
            // Interrupts: ones set causes, set the mask, clear the mask.
            row("VTEICR",     0x0100, Reads::Effect, Writes::Clears),
            row("VTEICS",     0x0104, Reads::Never, Writes::Trigger),
            row("VTEIMS",     0x0108, Reads::Alive, Writes::Trigger),
            row("VTEIMC",     0x010c, Reads::Never, Writes::Trigger),
            row("VTEIAC",     0x0110, Reads::Plain, Writes::Plain),
            row("VTEIAM",     0x0114, Reads::Plain, Writes::Plain),
            row("VTIVAR0",    0x0120, Reads::Plain, Writes::Plain),
            row("VTIVAR1",    0x0124, Reads::Plain, Writes::Plain),
            row("VTIVAR2",    0x0128, Reads::Plain, Writes::Plain),
            row("VTIVAR3",    0x012c, Reads::Plain, Writes::Plain),
            row("VTIVAR_MISC", 0x0140, Reads::Plain, Writes::Plain),
            Register::new("VFMBMEM", 0x0200, 64, Reads::Alive, Writes::Trigger),
            // Reading clears three bits. The monitor keeps those that it reads for the guest.
            row("VFMAILBOX",  0x02fc, Reads::Alive, Writes::Trigger).hook_all().bits(MAILBOX_BITS),
            row("VFPSRTYPE",  0x0300, Reads::Plain, Writes::Plain),
            row("VTEITR0",    0x0820, Reads::Plain, Writes::Plain),
            row("VTEITR1",    0x0824, Reads::Plain, Writes::Plain),
            row("VTEITR2",    0x0828, Reads::Plain, Writes::Plain),
            // Good packets and octets, received and transmitted; multicast. They survive a reset.
            row("VFGPRC",     0x101c, Reads::Alive, Writes::Never),
            row("VFGORC_LSB", 0x1020, Reads::Alive, Writes::Never),
            row("VFGORC_MSB", 0x1024, Reads::Alive, Writes::Never),
            row("VFMPRC",     0x1034, Reads::Alive, Writes::Never),
            row("VFGPTC",     0x201c, Reads::Alive, Writes::Never),
            row("VFGOTC_LSB", 0x2020, Reads::Alive, Writes::Never),
            row("VFGOTC_MSB", 0x2024, Reads::Alive, Writes::Never),
            $(
            row(concat!("VFRDBAL", $n),      0x1000 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFRDBAH", $n),      0x1004 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFRDLEN", $n),      0x1008 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFDCA_RXCTRL", $n), 0x100c + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFRDH", $n),        0x1010 + $n * 0x40, Reads::Alive, Writes::Trigger),
            row(concat!("VFSRRCTL", $n),     0x1014 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFRDT", $n),        0x1018 + $n * 0x40, Reads::Alive, Writes::Trigger),
            row(concat!("VFRXDCTL", $n),     0x1028 + $n * 0x40, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
            row(concat!("VFTDBAL", $n),      0x2000 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFTDBAH", $n),      0x2004 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFTDLEN", $n),      0x2008 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFDCA_TXCTRL", $n), 0x200c + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFTDH", $n),        0x2010 + $n * 0x40, Reads::Alive, Writes::Trigger),
            row(concat!("VFTDT", $n),        0x2018 + $n * 0x40, Reads::Alive, Writes::Trigger),
            row(concat!("VFTXDCTL", $n),     0x2028 + $n * 0x40, Reads::Alive, Writes::Plain).bits(&[("ENABLE", ENABLE)]),
            row(concat!("VFTDWBAL", $n),     0x2038 + $n * 0x40, Reads::Plain, Writes::Plain),
            row(concat!("VFTDWBAH", $n),     0x203c + $n * 0x40, Reads::Plain, Writes::Plain),
            )*
        ];

        /// What is written back while the queues are off. Heads, tails and enable bits come later.
        const RESTORE: &[Restore] = &[
            Restore::Saved("VFPSRTYPE", !0),
            Restore::Saved("VTIVAR0", !0),
            Restore::Saved("VTIVAR1", !0),
            Restore::Saved("VTIVAR2", !0),
            Restore::Saved("VTIVAR3", !0),
            Restore::Saved("VTIVAR_MISC", !0),
            Restore::Saved("VTEITR0", !0),
            Restore::Saved("VTEITR1", !0),
            Restore::Saved("VTEITR2", !0),
            Restore::Saved("VTEIAC", !0),
            Restore::Saved("VTEIAM", !0),
            $(
            Restore::Saved(concat!("VFTDBAL", $n), !0),
            Restore::Saved(concat!("VFTDBAH", $n), !0),
            Restore::Saved(concat!("VFTDLEN", $n), !0),
            Restore::Saved(concat!("VFDCA_TXCTRL", $n), !0),
            Restore::Saved(concat!("VFTDWBAL", $n), !0),
            Restore::Saved(concat!("VFTDWBAH", $n), !0),
            Restore::Saved(concat!("VFTXDCTL", $n), !ENABLE),
            Restore::Saved(concat!("VFRDBAL", $n), !0),
            Restore::Saved(concat!("VFRDBAH", $n), !0),
            Restore::Saved(concat!("VFRDLEN", $n), !0),
            Restore::Saved(concat!("VFDCA_RXCTRL", $n), !0),
            Restore::Saved(concat!("VFSRRCTL", $n), !0),
            Restore::Saved(concat!("VFRXDCTL", $n), !ENABLE),
            )*
        ];

        const HALT: &[Restore] = &[
            $(Restore::Value(concat!("VFRXDCTL", $n), 0),)*
            $(Restore::Value(concat!("VFTXDCTL", $n), 0),)*
        ];

        const RINGS: &[TailRing] = &[
            $(TailRing {
                name: concat!("receive ", $n),
                base: (concat!("VFRDBAL", $n), concat!("VFRDBAH", $n)),
                length: concat!("VFRDLEN", $n),
                head: concat!("VFRDH", $n),
                tail: concat!("VFRDT", $n),
                enable: (concat!("VFRXDCTL", $n), ENABLE),
                buffers: Some(Buffers { shape: concat!("VFSRRCTL", $n), ..BUFFERS }),
                ..RECEIVE
            },)*
            $(TailRing {
                name: concat!("transmit ", $n),
                base: (concat!("VFTDBAL", $n), concat!("VFTDBAH", $n)),
                length: concat!("VFTDLEN", $n),
                head: concat!("VFTDH", $n),
                tail: concat!("VFTDT", $n),
                enable: (concat!("VFTXDCTL", $n), ENABLE),
                ..TRANSMIT
            },)*
        ];

        const REPLAY: &[Replay] = &[
            Replay::Messages,
            // A reset leaves control registers of queues and heads as they were (specification update, software clarification 5).
            Replay::Off,
            Replay::Registers,
            $(Replay::Ring(concat!("transmit ", $n)),)*
            $(Replay::Ring(concat!("receive ", $n)),)*
            Replay::Counters,
            $(Replay::Tail(concat!("transmit ", $n)),)*
            $(Replay::Tail(concat!("receive ", $n)),)*
            // What was pending on the source is made up for: a cause that was masked waits for its mask, and each vector comes once.
            Replay::Saved("VTEIMS", 7),
            Replay::Value("VTEICS", 7),
            Replay::Vectors,
        ];
    };
}

queues! { 0 1 2 3 4 5 6 7 }

crate::intel::regions!("VFCTRL", "VFMAILBOX");
