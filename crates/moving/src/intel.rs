//! What tables of Intel's virtual functions have in common: bits of registers, descriptors, and the states of function and mailbox.

use ioplane_model::{Buffers, Dummy, Flow, MailboxTable, Reads, Register, TailRing, Writes};

/// Of the control register.
pub(crate) const RST: u32 = 1 << 26;
/// Of the mailbox's control register.
pub(crate) const REQ: u32 = 0x01;
pub(crate) const ACK: u32 = 0x02;
pub(crate) const VFU: u32 = 0x04;
pub(crate) const PFU: u32 = 0x08;
pub(crate) const PFSTS: u32 = 0x10;
pub(crate) const PFACK: u32 = 0x20;
pub(crate) const RSTI: u32 = 0x40;
pub(crate) const RSTD: u32 = 0x80;
/// Of the first word of a message: what it adds, by number or as a flag.
pub(crate) const INFO: u32 = 0x00ff_0000;
/// Of RXDCTL and TXDCTL.
pub(crate) const ENABLE: u32 = 1 << 25;
/// Of the first half of a descriptor's last word but one (receive) or last (transmit): done.
const DD: u32 = 1;

/// The status of a receive descriptor is its third word. Rings are up to 32,768 descriptors of 16 bytes; a cache has fewer than 64.
pub(crate) const RECEIVE: TailRing = TailRing {
    name: "",
    base: ("", ""),
    length: "",
    head: "",
    tail: "",
    enable: ("", 0),
    flow: Flow::Receive,
    size: 16,
    most: 32_768,
    in_hand: 64,
    done: (8, DD),
    buffers: None,
    dummy: Dummy::Frame,
};

/// The status of a transmit descriptor is its fourth word. A context descriptor sends nothing, and without RS nothing is written back for
/// it.
pub(crate) const TRANSMIT: TailRing = TailRing {
    flow: Flow::Transmit,
    done: (12, DD),
    dummy: Dummy::Descriptor([0, 0, 0x2020_0000, 0]),
    ..RECEIVE
};

/// SRRCTL: the packet's buffer in units of 1 KiB (none: 2 KiB), the header's in units of 64 bytes where the descriptor's type has one.
pub(crate) const BUFFERS: Buffers = Buffers {
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

/// The mailbox's bits. An answer that refuses says as well that the other side listens.
pub(crate) const PF_MAILBOX: MailboxTable = MailboxTable {
    memory: "",
    control: "",
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
    refused: 0x6000_0000,
    messages: &[],
};

pub(crate) const MAILBOX_BITS: &[(&str, u32)] = &[
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
pub(crate) const fn row(name: &'static str, offset: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, 4, reads, writes)
}

/// The regions of a table whose control register and mailbox's control register have these names.
macro_rules! regions {
    ($control:literal, $mailbox:literal) => {
        /// Whether the function is there. Rings are not followed: their pages are the guest's.
        const FUNCTION: Region = Region {
            name: "function",
            states: &[
                State::busy("Reset", concat!("the function resets; ", $mailbox, ".RSTD ends that")),
                State::reusable("Ready", "it runs, whatever its rings do"),
            ],
            transitions: &[
                Transition::new(ANY, On::write($control, RST, RST), RESET),
                Transition::new("Reset", On::became($mailbox, RSTD, RSTD), "Ready"),
                // Some set RSTD when the PF has reset, and not for a reset of a virtual function. One that answers is not resetting.
                Transition::new("Reset", On::became($mailbox, PFSTS, PFSTS), "Ready"),
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
                Transition::new(ANY, On::write($mailbox, REQ, REQ), "Asked"),
                Transition::new("Asked", On::became($mailbox, PFSTS, PFSTS), "Answered"),
                Transition::new("Answered", On::write($mailbox, ACK, ACK), "Free"),
                Transition::new("Answered", On::written($mailbox), STAY),
                Transition::new("Free", On::write($mailbox, VFU, VFU), "Held"),
                Transition::new("Held", On::write($mailbox, VFU, 0), "Free"),
            ],
        };
    };
}

pub(crate) use regions;
