//! The table.

use Check::{Deny, Holds, Ignore};
use ioplane_model::{
    ANY, Banks, Check, DataPort, Id, Interrupts, On, RESET, Reads, Region, Register, Reset, Restore, STAY,
    State, StateModel, Transition, Way, Writes,
};

use super::functions::{
    CURRENT_INSIDE, FRAME_INSIDE, IN_WORDS, MAY_READ, MAY_WRITE, NO_RING, READABLE, RING_EMPTY, RING_INSIDE,
    STEP, WRITABLE, step,
};

/// The NE2000 on PCI.
pub static MODEL: StateModel = StateModel {
    name: "ne2000",
    title: "NE2000 on PCI (Realtek RTL8029AS), 10 Mbit/s Ethernet",
    ids: &[Id { vendor: 0x10ec, device: 0x8029, revisions: None }],
    bar: 0,
    aliases: &[],
    size: 0x20,
    banks: Some(Banks { register: "CR", mask: 0xc0, shift: 6, keep: STP | STA, set: ABORT as u8 }),
    registers: REGISTERS,
    // RST says that the card is in its reset state. No bit says that a transfer failed; TXE comes nearest.
    interrupts: Interrupts {
        status: "ISR",
        mask: "IMR",
        bits: 0x7f,
        live: RST,
        traffic: 0,
        error: TXE,
        split: None,
    },
    regions: &[RUN, RING, DMA, TRANSMIT, RECEIVE],
    rings: &[],
    blocks: &[],
    counters: None,
    port: Some(DataPort {
        register: "DATA",
        address: ("RSAR0", "RSAR1"),
        count: ("RBCR0", "RBCR1"),
        reached: ("CRDA0", "CRDA1"),
        command: "CR",
        direction: (RD, READ, WRITE),
        readable: READABLE,
        writable: WRITABLE,
        registers: STEP,
        step,
        fills: &[&NO_RING, &IN_WORDS],
    }),
    reset: Reset { by: ("RESET", Way::Read, 0), done: ("ISR", RST, RST), settle: 0 },
    // Stopped, no transfer. What comes in on the wire after this is lost.
    halt: &[Restore::Value("CR", STP as u32 | ABORT)],
    restore: RESTORE,
    // What lies on the card and waits. Nothing is being sent when it is brought back.
    told: &["transmit", "receive"],
};

/// Of CR: stop, start, transmit; the field of the transfer, and its values read, write, send packet, abort (or complete).
const STP: u8 = 0x01;
const STA: u8 = 0x02;
const STOP: u32 = 0x01;
const START: u32 = 0x02;
const TXP: u32 = 0x04;
const RD: u32 = 0x38;
const READ: u32 = 0x08;
const WRITE: u32 = 0x10;
const SEND: u32 = 0x18;
const ABORT: u32 = 0x20;
/// Of ISR: received, transmitted, receive error, transmit error, overwritten, transfer complete, in reset.
const PRX: u32 = 0x01;
const PTX: u32 = 0x02;
const RXE: u32 = 0x04;
const TXE: u32 = 0x08;
const OVW: u32 = 0x10;
const RDC: u32 = 0x40;
const RST: u32 = 0x80;
/// Of RCR: monitor, that is, keep no frame.
const MON: u32 = 0x20;
/// Of CR9346: mode; normal, configuration unlocked.
const EEM: u32 = 0xc0;
const NORMAL: u32 = 0x00;
const UNLOCK: u32 = 0xc0;
/// Every bit of a register.
const ALL: u32 = 0xff;

const CR_BITS: &[(&str, u32)] = &[("RD", RD), ("RD2", ABORT), ("TXP", TXP), ("STA", START), ("STP", STOP)];
const ISR_BITS: &[(&str, u32)] =
    &[("PRX", PRX), ("PTX", PTX), ("RXE", RXE), ("TXE", TXE), ("OVW", OVW), ("RDC", RDC), ("RST", RST)];

/// A register in every bank.
const fn row(name: &'static str, offset: u16, width: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, width, reads, writes)
}

/// A register of one byte on a page.
const fn page(page: u8, name: &'static str, offset: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, 1, reads, writes).bank(page)
}

/// Sections 10.2 and 10.3; page 3 is Realtek's. What can only be written is always hooked, for its value cannot be had later.
#[rustfmt::skip]
const REGISTERS: &[Register] = &[
    row("CR",          0x00, 1, Reads::Alive, Writes::Trigger).hook_writes().bits(CR_BITS),
    // Page 0, read.
    page(0, "CLDA0",   0x01, Reads::Alive, Writes::Never),
    page(0, "CLDA1",   0x02, Reads::Alive, Writes::Never),
    page(0, "BNRY",    0x03, Reads::Plain, Writes::Plain),
    page(0, "TSR",     0x04, Reads::Alive, Writes::Never),
    page(0, "NCR",     0x05, Reads::Alive, Writes::Never),
    page(0, "FIFO",    0x06, Reads::Effect, Writes::Never),
    page(0, "ISR",     0x07, Reads::Alive, Writes::Clears).hook_all().bits(ISR_BITS),
    page(0, "CRDA0",   0x08, Reads::Alive, Writes::Never),
    page(0, "CRDA1",   0x09, Reads::Alive, Writes::Never),
    page(0, "ID0",     0x0a, Reads::Alive, Writes::Never),
    page(0, "ID1",     0x0b, Reads::Alive, Writes::Never),
    page(0, "RSR",     0x0c, Reads::Alive, Writes::Never),
    page(0, "CNTR0",   0x0d, Reads::Effect, Writes::Never),
    page(0, "CNTR1",   0x0e, Reads::Effect, Writes::Never),
    page(0, "CNTR2",   0x0f, Reads::Effect, Writes::Never),
    // Page 0, written.
    page(0, "PSTART",  0x01, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "PSTOP",   0x02, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "TPSR",    0x04, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "TBCR0",   0x05, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "TBCR1",   0x06, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "RSAR0",   0x08, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "RSAR1",   0x09, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "RBCR0",   0x0a, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "RBCR1",   0x0b, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "RCR",     0x0c, Reads::Never, Writes::Plain).hook_writes().bits(&[("MON", MON)]),
    page(0, "TCR",     0x0d, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "DCR",     0x0e, Reads::Never, Writes::Plain).hook_writes(),
    page(0, "IMR",     0x0f, Reads::Never, Writes::Plain).hook_writes(),
    // Page 1: station address, current page, multicast hash.
    page(1, "PAR0",    0x01, Reads::Plain, Writes::Plain),
    page(1, "PAR1",    0x02, Reads::Plain, Writes::Plain),
    page(1, "PAR2",    0x03, Reads::Plain, Writes::Plain),
    page(1, "PAR3",    0x04, Reads::Plain, Writes::Plain),
    page(1, "PAR4",    0x05, Reads::Plain, Writes::Plain),
    page(1, "PAR5",    0x06, Reads::Plain, Writes::Plain),
    page(1, "CURR",    0x07, Reads::Alive, Writes::Plain).hook_writes(),
    page(1, "MAR0",    0x08, Reads::Plain, Writes::Plain),
    page(1, "MAR1",    0x09, Reads::Plain, Writes::Plain),
    page(1, "MAR2",    0x0a, Reads::Plain, Writes::Plain),
    page(1, "MAR3",    0x0b, Reads::Plain, Writes::Plain),
    page(1, "MAR4",    0x0c, Reads::Plain, Writes::Plain),
    page(1, "MAR5",    0x0d, Reads::Plain, Writes::Plain),
    page(1, "MAR6",    0x0e, Reads::Plain, Writes::Plain),
    page(1, "MAR7",    0x0f, Reads::Plain, Writes::Plain),
    // Page 2, for diagnosis: what was written on page 0. Writing here is for the maker's tests.
    page(2, "PSTART2", 0x01, Reads::Alive, Writes::Never),
    page(2, "PSTOP2",  0x02, Reads::Alive, Writes::Never),
    page(2, "TPSR2",   0x04, Reads::Alive, Writes::Never),
    page(2, "RCR2",    0x0c, Reads::Alive, Writes::Never),
    page(2, "TCR2",    0x0d, Reads::Alive, Writes::Never),
    page(2, "DCR2",    0x0e, Reads::Alive, Writes::Never),
    // Page 3, Realtek's: configuration, from the EEPROM.
    page(3, "CR9346",  0x01, Reads::Alive, Writes::Trigger).hook_writes().bits(&[("EEM", EEM)]),
    page(3, "CONFIG0", 0x03, Reads::Alive, Writes::Never),
    page(3, "CONFIG2", 0x05, Reads::Alive, Writes::Plain),
    page(3, "CONFIG3", 0x06, Reads::Alive, Writes::Plain),
    // Data goes through here, one, two or four bytes at a time.
    row("DATA",        0x10, 4, Reads::Effect, Writes::Trigger),
    // Read: the card resets. Written: that ends.
    row("RESET",       0x1f, 1, Reads::Effect, Writes::Trigger).hook_all(),
];

/// The receive ring lies in the packet memory, and the page that is written next in the ring.
const IN_RING: &[Check] = &[Holds(&RING_INSIDE), Holds(&CURRENT_INSIDE)];
const IN_PLACE: &[Check] = &[Holds(&CURRENT_INSIDE)];
const RING_MOVES: &[Check] =
    &[Deny("the receive ring is only moved while the card is stopped or keeps no frame")];

/// Started or stopped. While RCR.MON is set no frame is kept, and drivers start the card before they have set the ring.
const RUN: Region = Region {
    name: "run",
    states: &[
        State::busy("Reset", "the card resets; ISR.RST says that it has"),
        State::reusable("Stopped", "off the wire"),
        State::reusable("Started", "on the wire"),
    ],
    transitions: &[
        Transition::new(ANY, On::read("RESET"), RESET),
        Transition::new("Reset", On::became("ISR", RST, RST), "Stopped"),
        Transition::new(ANY, On::sets("CR", STOP), "Stopped"),
        // Every command has the start bit set: only the one that starts it is looked at.
        Transition::new("Started", On::sets("CR", START), STAY),
        Transition::new(ANY, On::sets("CR", START), "Started").given("RCR", MON, MON),
        Transition::new(ANY, On::sets("CR", START), "Started").check(IN_RING),
        Transition::new("Started", On::write("RCR", MON, 0), STAY).check(IN_RING),
        Transition::new("Started", On::written("PSTART"), STAY).given("RCR", MON, 0).check(RING_MOVES),
        Transition::new("Started", On::written("PSTOP"), STAY).given("RCR", MON, 0).check(RING_MOVES),
        Transition::new("Started", On::written("CURR"), STAY).given("RCR", MON, 0).check(IN_PLACE),
        Transition::new(ANY, On::write("CR9346", EEM, NORMAL), STAY),
        Transition::new(ANY, On::write("CR9346", EEM, UNLOCK), STAY),
        Transition::new(ANY, On::written("CR9346"), STAY)
            .check(&[Deny("the EEPROM is not programmed: it belongs to all who use this card")]),
    ],
};

const NO_PLACE: &[Check] = &[Deny(
    "the card would go on at a page that may lie outside: the ring was moved, and CURR not set since",
)];

/// Whether CURR is what the driver wrote. While the card receives it moves it; it stays within the ring, unless the ring is moved.
const RING: Region = Region {
    name: "ring",
    states: &[
        State::reusable("Set", "CURR is as the driver set it"),
        State::reusable("Used", "the card has moved CURR along the ring"),
        State::reusable(
            "Shifted",
            "the ring was moved since; CURR has to be set again before the card receives",
        ),
    ],
    transitions: &[
        Transition::new(ANY, On::written("CURR"), "Set").given("CR", STOP, STOP),
        Transition::new("Shifted", On::written("CURR"), "Used"),
        Transition::new("Set", On::sets("CR", START), "Used").given("RCR", MON, 0),
        Transition::new("Set", On::write("RCR", MON, 0), "Used").given("CR", STOP, 0),
        Transition::new("Used", On::written("PSTART"), "Shifted"),
        Transition::new("Used", On::written("PSTOP"), "Shifted"),
        Transition::new("Shifted", On::sets("CR", START), STAY).given("RCR", MON, 0).check(NO_PLACE),
        Transition::new("Shifted", On::write("RCR", MON, 0), STAY).given("CR", STOP, 0).check(NO_PLACE),
    ],
};

const READS: &[Check] = &[Holds(&MAY_READ)];
const WRITES: &[Check] = &[Holds(&MAY_WRITE)];
const NO_TRANSFER: &[Check] = &[Ignore("no transfer was begun: the data port has nothing to move")];
const WRONG_WAY: &[Check] = &[Deny("the data port moves data the other way")];

/// The data port (section 11, remote DMA). A range is checked when the command begins it; then the port is not hooked until the range
/// has been moved, the driver says that it is done (a new command, or ISR.RDC cleared), or what was checked is written over.
const DMA: Region = Region {
    name: "dma",
    states: &[
        State::reusable("Quiet", "the data port moves nothing")
            .hooks(&[("DATA", Way::Read), ("DATA", Way::Write)]),
        State::busy("DmaRd", "the guest reads the card's memory; ends with the count")
            .hooks(&[("DATA", Way::Write)]),
        State::busy("DmaWr", "the guest writes the card's memory; ends with the count")
            .hooks(&[("DATA", Way::Read)]),
    ],
    transitions: &[
        Transition::new(ANY, On::sets("CR", ABORT), "Quiet"),
        Transition::new(ANY, On::write("CR", RD, READ), "DmaRd").check(READS),
        Transition::new(ANY, On::write("CR", RD, WRITE), "DmaWr").check(WRITES),
        Transition::new(ANY, On::write("CR", RD, SEND), STAY)
            .check(&[Deny("'send packet' is not offered: the card would choose the range by itself")]),
        // "Not allowed" (10.3): what a card makes of it is its own affair.
        Transition::new(ANY, On::write("CR", RD, 0), "Quiet"),
        Transition::new(ANY, On::Moved, "Quiet"),
        Transition::new(ANY, On::sets("ISR", RDC), "Quiet"),
        Transition::new(ANY, On::written("RSAR0"), "Quiet"),
        Transition::new(ANY, On::written("RSAR1"), "Quiet"),
        Transition::new(ANY, On::written("RBCR0"), "Quiet"),
        Transition::new(ANY, On::written("RBCR1"), "Quiet"),
        // Words or bytes: an address that was checked for bytes may be odd.
        Transition::new(ANY, On::written("DCR"), "Quiet"),
        // The port goes from the end of the receive ring to its beginning.
        Transition::new(ANY, On::written("PSTART"), "Quiet"),
        Transition::new(ANY, On::written("PSTOP"), "Quiet"),
        Transition::new("Quiet", On::read("DATA"), STAY).check(NO_TRANSFER),
        Transition::new("Quiet", On::written("DATA"), STAY).check(NO_TRANSFER),
        Transition::new("DmaRd", On::written("DATA"), STAY).check(WRONG_WAY),
        Transition::new("DmaWr", On::read("DATA"), STAY).check(WRONG_WAY),
    ],
};

const FRAME: &[Check] = &[Holds(&FRAME_INSIDE)];

/// Buffers on the card that hold something to be sent. Drivers use two: one fills while the other is sent.
const TRANSMIT: Region = Region {
    name: "transmit",
    states: &[
        State::reusable("Idle", "no buffer holds anything that matters"),
        State::busy("Loaded", "a buffer was written; ends when it has been sent"),
        State::busy("TxBusy", "a frame is being sent; PTX or TXE ends that"),
        State::busy("TxBoth", "one is being sent, the next was written"),
    ],
    transitions: &[
        // Stopped before it was sent: drivers send it again.
        Transition::new("TxBusy", On::sets("CR", STOP), "Loaded"),
        Transition::new("TxBoth", On::sets("CR", STOP), "Loaded"),
        Transition::new("Idle", On::write("CR", STOP | TXP, TXP), "TxBusy").check(FRAME),
        Transition::new("Loaded", On::write("CR", STOP | TXP, TXP), "TxBusy").check(FRAME),
        Transition::new("TxBusy", On::write("CR", STOP | TXP, TXP), STAY).check(FRAME),
        Transition::new("TxBoth", On::write("CR", STOP | TXP, TXP), STAY).check(FRAME),
        Transition::new("Idle", On::write("CR", RD, WRITE), "Loaded"),
        Transition::new("TxBusy", On::write("CR", RD, WRITE), "TxBoth"),
        Transition::new("TxBusy", On::interrupt(PTX | TXE), "Idle"),
        Transition::new("TxBoth", On::interrupt(PTX | TXE), "Loaded"),
        // A driver that sets the page while the card is stopped begins anew.
        Transition::new("Loaded", On::written("TPSR"), "Idle").given("CR", STOP, STOP),
        Transition::new("TxBusy", On::written("TPSR"), STAY).check(FRAME),
        Transition::new("TxBusy", On::written("TBCR0"), STAY).check(FRAME),
        Transition::new("TxBusy", On::written("TBCR1"), STAY).check(FRAME),
        Transition::new("TxBoth", On::written("TPSR"), STAY).check(FRAME),
        Transition::new("TxBoth", On::written("TBCR0"), STAY).check(FRAME),
        Transition::new("TxBoth", On::written("TBCR1"), STAY).check(FRAME),
    ],
};

/// The receive ring on the card.
const RECEIVE: Region = Region {
    name: "receive",
    states: &[
        State::reusable("Empty", "the ring holds no frame"),
        State::busy("RxPending", "frames came in; ends when BNRY has followed CURR"),
        State::busy("Overrun", "the ring was full; the driver stops, drains, and clears ISR.OVW"),
    ],
    transitions: &[
        Transition::new(ANY, On::interrupt(OVW), "Overrun"),
        Transition::new("Empty", On::interrupt(PRX | RXE), "RxPending"),
        Transition::new("RxPending", On::Holds(&RING_EMPTY), "Empty"),
        Transition::new("Overrun", On::sets("ISR", OVW), "RxPending"),
        // A driver that sets the current page while the card is stopped begins anew.
        Transition::new(ANY, On::written("CURR"), "Empty").given("CR", STOP, STOP),
    ],
};

/// As drivers start it: stopped, looped back and keeping nothing until the registers are set. IMR and ISR are virtual. The card's memory
/// is filled before there is a receive ring: the data port leaves out what lies behind the ring's end. For that the card moves
/// words, and is started, or it would move none.
const RESTORE: &[Restore] = &[
    Restore::Value("CR", STOP | ABORT),
    Restore::Value("DCR", 0x49),
    Restore::Value("RBCR0", 0),
    Restore::Value("RBCR1", 0),
    Restore::Value("RCR", MON),
    Restore::Value("TCR", 0x02),
    Restore::Value("PSTART", 0),
    Restore::Value("PSTOP", 0),
    Restore::Value("CR", START | ABORT),
    Restore::Memory,
    Restore::Value("CR", STOP | ABORT),
    Restore::Saved("DCR", ALL),
    Restore::Saved("PSTART", ALL),
    Restore::Saved("PSTOP", ALL),
    Restore::Saved("BNRY", ALL),
    Restore::Saved("TPSR", ALL),
    Restore::Saved("TBCR0", ALL),
    Restore::Saved("TBCR1", ALL),
    Restore::Saved("PAR0", ALL),
    Restore::Saved("PAR1", ALL),
    Restore::Saved("PAR2", ALL),
    Restore::Saved("PAR3", ALL),
    Restore::Saved("PAR4", ALL),
    Restore::Saved("PAR5", ALL),
    Restore::Saved("MAR0", ALL),
    Restore::Saved("MAR1", ALL),
    Restore::Saved("MAR2", ALL),
    Restore::Saved("MAR3", ALL),
    Restore::Saved("MAR4", ALL),
    Restore::Saved("MAR5", ALL),
    Restore::Saved("MAR6", ALL),
    Restore::Saved("MAR7", ALL),
    Restore::Saved("CURR", ALL),
    Restore::Value("CR9346", UNLOCK),
    Restore::Saved("CONFIG2", ALL),
    Restore::Saved("CONFIG3", ALL),
    Restore::Saved("CR9346", EEM),
    Restore::Value("ISR", ALL),
    Restore::Saved("RSAR0", ALL),
    Restore::Saved("RSAR1", ALL),
    Restore::Saved("RBCR0", ALL),
    Restore::Saved("RBCR1", ALL),
    // Drivers also write commands that neither start nor stop: the card then goes on, as it did. RCR.MON is set, so that the ring
    // is looked at when RCR is written.
    Restore::Value("CR", START | ABORT),
    // The page, started or stopped; neither a transfer nor a frame begins.
    Restore::With("CR", 0xc0 | STOP | START, ABORT),
    Restore::Saved("TCR", ALL),
    Restore::Saved("RCR", ALL),
    // Drivers read it after the interrupt that says that a frame has been sent.
    Restore::Shown("TSR", PTX | TXE),
];
