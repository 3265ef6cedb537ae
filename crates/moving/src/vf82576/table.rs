//! The table.

use ioplane_model::{
    ANY, Buffers, DirectModel, Dummy, Flow, Id, Interrupts, KeepRule, MailboxTable, MessageKind, On,
    PageRule, RESET, Reads, Region, Register, Replay, Reset, Restore, STAY, State, StateModel, TailRing,
    Transition, Way, Writes,
};

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
    port: None,
    reset: Reset { by: ("CTRL", Way::Write, RST), done: ("V2PMAILBOX", RSTD, RSTD) },
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
        request: REQ,
        acknowledge: ACK,
        hold: VFU,
        held: PFU,
        message: PFSTS,
        taken: PFACK,
        ready: RSTD,
        latched: RSTD | PFACK | PFSTS,
        kind: 0xffff,
        accepted: 0x8000_0000,
        messages: &[
            MessageKind { name: "RESET", kind: 1, words: 3, keep: KeepRule::Begins { address: 1 } },
            MessageKind { name: "SET_MAC_ADDR", kind: 2, words: 3, keep: KeepRule::Address { word: 1 } },
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
    },
    counters: &[
        "VFGPRC", "VFGPTC", "VFGORC", "VFGOTC", "VFMPRC", "VFGPRLBC", "VFGPTLBC", "VFGORLBC", "VFGOTLBC",
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

/// Of CTRL.
const RST: u32 = 1 << 26;
/// Of V2PMAILBOX.
const REQ: u32 = 0x01;
const ACK: u32 = 0x02;
const VFU: u32 = 0x04;
const PFU: u32 = 0x08;
const PFSTS: u32 = 0x10;
const PFACK: u32 = 0x20;
const RSTI: u32 = 0x40;
const RSTD: u32 = 0x80;
/// Of the first word of a message: what it adds, by number or as a flag.
const INFO: u32 = 0x00ff_0000;
/// Of RXDCTL and TXDCTL.
const ENABLE: u32 = 1 << 25;
/// Of the first half of a descriptor's last word but one (receive) or last (transmit): done.
const DD: u32 = 1;

/// Section 7.1.5: the status of a receive descriptor is its third word. Rings are up to 32,768 descriptors of 16 bytes.
const RECEIVE: TailRing = TailRing {
    name: "",
    base: ("", ""),
    length: "",
    head: "",
    tail: "",
    enable: ("", 0),
    flow: Flow::Receive,
    size: 16,
    most: 32_768,
    done: (8, DD),
    buffers: None,
    dummy: Dummy::Frame,
};

/// Section 7.2.2: the status of a transmit descriptor is its fourth word. A context descriptor sends nothing, and without RS nothing is
/// written back for it.
const TRANSMIT: TailRing = TailRing {
    flow: Flow::Transmit,
    done: (12, DD),
    dummy: Dummy::Descriptor([0, 0, 0x2020_0000, 0]),
    ..RECEIVE
};

/// SRRCTL: the packet's buffer in units of 1 KiB (none: 2 KiB), the header's in units of 64 bytes where the descriptor's type has one.
const BUFFERS: Buffers = Buffers {
    shape: "",
    addresses: &[0, 8],
    sizes: |shape| {
        let packet = match shape & 0x7f {
            0 => 2048,
            kilobytes => kilobytes << 10,
        };
        let split = shape >> 25 & 7 >= 2;
        [packet, if split { (shape >> 8 & 0x3f) << 6 } else { 0 }]
    },
};

const MAILBOX_BITS: &[(&str, u32)] = &[
    ("REQ", REQ),
    ("ACK", ACK),
    ("VFU", VFU),
    ("PFU", PFU),
    ("PFSTS", PFSTS),
    ("PFACK", PFACK),
    ("RSTI", RSTI),
    ("RSTD", RSTD),
];

/// A row of the register table: all but the mailbox's memory are 32 bits.
const fn row(name: &'static str, offset: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, 4, reads, writes)
}

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

/// Whether the function is there. Rings are not followed: pages 2 and 3 are the guest's.
const FUNCTION: Region = Region {
    name: "function",
    states: &[
        State::busy("Reset", "the function resets; V2PMAILBOX.RSTD ends that"),
        State::reusable("Ready", "it runs, whatever its rings do"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("CTRL", RST, RST), RESET),
        Transition::new("Reset", On::became("V2PMAILBOX", RSTD, RSTD), "Ready"),
        // QEMU's igb sets RSTD when its PF has reset, and not for a reset of a virtual function. One that answers is not resetting.
        Transition::new("Reset", On::became("V2PMAILBOX", PFSTS, PFSTS), "Ready"),
    ],
};

/// The mailbox. Its words and bits are the monitor's: a message goes to the PF when all of it is there.
const MAILBOX: Region = Region {
    name: "mailbox",
    states: &[
        State::reusable("Free", "nobody uses it"),
        State::reusable("Held", "the driver writes or reads words"),
        State::busy("Asked", "the PF has a message and has not answered"),
        State::reusable("Answered", "the answer is there, the driver has not taken it"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("V2PMAILBOX", REQ, REQ), "Asked"),
        Transition::new("Asked", On::became("V2PMAILBOX", PFSTS, PFSTS), "Answered"),
        Transition::new("Answered", On::write("V2PMAILBOX", ACK, ACK), "Free"),
        Transition::new("Answered", On::written("V2PMAILBOX"), STAY),
        Transition::new("Free", On::write("V2PMAILBOX", VFU, VFU), "Held"),
        Transition::new("Held", On::write("V2PMAILBOX", VFU, 0), "Free"),
    ],
};

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
