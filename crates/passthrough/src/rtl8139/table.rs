//! The table.

use Check::{Base, Deny, Descriptors};
use ioplane_model::{
    ANY, Block, Check, DescriptorLayout, DescriptorRing, Flow, Id, Interrupts, On, RESET, Reads, Region,
    Register, Reset, Restore, STAY, State, StateModel, Transition, Way, Writes,
};

/// The RTL8139C+.
pub static MODEL: StateModel = StateModel {
    name: "rtl8139",
    title: "Realtek RTL8139C+, 10/100 Mbit/s Ethernet",
    // 8139 chips below revision 20h have no C+ mode.
    ids: &[Id { vendor: 0x10ec, device: 0x8139, revisions: Some((0x20, 0xff)) }],
    bar: 1,
    aliases: &[0],
    size: 0x100,
    banks: None,
    registers: REGISTERS,
    // ROK, TOK, TDU are traffic; what else there is speaks of counters, the link, the timer.
    interrupts: Interrupts {
        status: "ISR",
        mask: "IMR",
        bits: 0xe1ff,
        live: 0,
        traffic: 0x0085,
        error: 0x8000,
        split: None,
    },
    regions: &[ENGINE, TRANSMIT, PRIORITY, TALLY, EEPROM],
    rings: &[
        DescriptorRing {
            name: "transmit",
            base: ("TNPDS_LO", "TNPDS_HI"),
            flow: Flow::Transmit,
            doorbell: Some(("TPPOLL", NPQ)),
            enable: ("CR", TE),
            ..RING
        },
        DescriptorRing {
            name: "priority",
            base: ("THPDS_LO", "THPDS_HI"),
            flow: Flow::Transmit,
            doorbell: Some(("TPPOLL", HPQ)),
            enable: ("CR", TE),
            ..RING
        },
        DescriptorRing {
            name: "receive",
            base: ("RDSAR_LO", "RDSAR_HI"),
            flow: Flow::Receive,
            descriptor: DescriptorLayout { length: 0x1fff, ..RING.descriptor },
            enable: ("CR", RE),
            ..RING
        },
    ],
    blocks: &[Block { name: "tally", base: ("DTCCR_LO", "DTCCR_HI"), flags: 0x3f, start: DUMP, size: 64 }],
    counters: None,
    port: None,
    reset: Reset { by: ("CR", Way::Write, RST), done: ("CR", RST, 0), settle: 0 },
    halt: &[Restore::Value("CR", 0)],
    restore: RESTORE,
    // Whether descriptors are the chip's is seen in guest memory.
    told: &["transmit", "priority"],
};

/// Of CR: reset, receiver and transmitter on.
const RST: u32 = 0x10;
const RE: u32 = 0x08;
const TE: u32 = 0x04;
/// Of CPCR: receive and transmit in C+ mode.
const RXEN: u32 = 0x02;
const TXEN: u32 = 0x01;
/// Of TPPOLL: look at the ring of high, of normal priority.
const HPQ: u32 = 0x80;
const NPQ: u32 = 0x40;
/// Of DTCCR: dump the counters.
const DUMP: u32 = 0x08;
/// Of CR9346: mode; chip select, clock, data in.
const EEM: u32 = 0xc0;
const CS: u32 = 0x08;
const SK: u32 = 0x04;
const DI: u32 = 0x02;
/// Values of EEM: normal, auto-load, programming, configuration unlocked.
const NORMAL: u32 = 0x00;
const AUTOLOAD: u32 = 0x40;
const PROGRAM: u32 = 0x80;
const UNLOCK: u32 = 0xc0;

/// What the three rings have in common (section 6.1): up to 64 descriptors of 16 bytes, at a multiple of 256.
const RING: DescriptorRing = DescriptorRing {
    name: "",
    base: ("", ""),
    align: 256,
    most: 64,
    flow: Flow::Transmit,
    descriptor: DescriptorLayout {
        size: 16,
        status: 0,
        own: 1 << 31,
        end: 1 << 30,
        length: 0xffff,
        address: (8, 12),
    },
    doorbell: None,
    enable: ("", 0),
    queue: None,
};

const CR_BITS: &[(&str, u32)] = &[("RST", RST), ("RE", RE), ("TE", TE)];
const CR9346_BITS: &[(&str, u32)] = &[("EEM", EEM), ("CS", CS), ("SK", SK), ("DI", DI)];

/// A row of the register table.
const fn row(name: &'static str, offset: u16, width: u16, reads: Reads, writes: Writes) -> Register {
    Register::new(name, offset, width, reads, writes)
}

/// Section 5. Where the chip offers more to write than guests get (C mode, flash, PHY tests, CardBus), writes have no effect.
#[rustfmt::skip]
const REGISTERS: &[Register] = &[
    // Station address and multicast hash. IDR can be written while CR9346 unlocks it.
    row("IDR0",      0x00, 4, Reads::Alive, Writes::Plain),
    row("IDR4",      0x04, 4, Reads::Alive, Writes::Plain),
    row("MAR0",      0x08, 4, Reads::Plain, Writes::Plain),
    row("MAR4",      0x0c, 4, Reads::Plain, Writes::Plain),
    // C+ mode: where the counters are dumped to. In C mode these four are transmit status.
    row("DTCCR_LO",  0x10, 4, Reads::Alive, Writes::Trigger).hook_writes().bits(&[("CMD", DUMP)]),
    row("DTCCR_HI",  0x14, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("TSD2",      0x18, 4, Reads::Alive, Writes::Trigger).hook_writes(),
    row("TSD3",      0x1c, 4, Reads::Alive, Writes::Trigger).hook_writes(),
    // C+ mode: descriptors to transmit, normal and high priority. What the chip has are the monitor's addresses.
    row("TNPDS_LO",  0x20, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("TNPDS_HI",  0x24, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("THPDS_LO",  0x28, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("THPDS_HI",  0x2c, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("RBSTART",   0x30, 4, Reads::Alive, Writes::Never),
    row("ERBCR",     0x34, 2, Reads::Alive, Writes::Never),
    row("ERSR",      0x36, 1, Reads::Alive, Writes::Never),
    row("CR",        0x37, 1, Reads::Alive, Writes::Trigger).hook_writes().bits(CR_BITS),
    row("CAPR",      0x38, 2, Reads::Alive, Writes::Never),
    row("CBR",       0x3a, 2, Reads::Alive, Writes::Never),
    row("IMR",       0x3c, 2, Reads::Plain, Writes::Plain).hook_all(),
    row("ISR",       0x3e, 2, Reads::Alive, Writes::Clears).hook_all(),
    row("TCR",       0x40, 4, Reads::Alive, Writes::Plain),
    row("RCR",       0x44, 4, Reads::Alive, Writes::Plain),
    // Any write sets the timer, the count of missed packets to zero.
    row("TCTR",      0x48, 4, Reads::Alive, Writes::Trigger),
    row("MPC",       0x4c, 4, Reads::Alive, Writes::Trigger),
    row("CR9346",    0x50, 1, Reads::Alive, Writes::Trigger).hook_writes().bits(CR9346_BITS),
    row("CONFIG0",   0x51, 1, Reads::Alive, Writes::Never),
    row("CONFIG1",   0x52, 1, Reads::Alive, Writes::Plain),
    row("TIMERINT",  0x54, 4, Reads::Plain, Writes::Plain),
    row("MSR",       0x58, 1, Reads::Alive, Writes::Never),
    row("CONFIG3",   0x59, 1, Reads::Alive, Writes::Plain),
    row("CONFIG4",   0x5a, 1, Reads::Alive, Writes::Plain),
    row("HLTCLK",    0x5b, 1, Reads::Alive, Writes::Never),
    row("MULINT",    0x5c, 2, Reads::Plain, Writes::Plain),
    row("RERID",     0x5e, 1, Reads::Alive, Writes::Never),
    row("TSAD",      0x60, 2, Reads::Alive, Writes::Never),
    // MII.
    row("BMCR",      0x62, 2, Reads::Alive, Writes::Plain),
    row("BMSR",      0x64, 2, Reads::Alive, Writes::Never),
    row("ANAR",      0x66, 2, Reads::Alive, Writes::Plain),
    row("ANLPAR",    0x68, 2, Reads::Alive, Writes::Never),
    row("ANER",      0x6a, 2, Reads::Alive, Writes::Never),
    row("DIS",       0x6c, 2, Reads::Alive, Writes::Never),
    row("FCSC",      0x6e, 2, Reads::Alive, Writes::Never),
    row("NWAYTR",    0x70, 2, Reads::Alive, Writes::Never),
    row("REC",       0x72, 2, Reads::Alive, Writes::Never),
    row("CSCR",      0x74, 2, Reads::Alive, Writes::Never),
    row("PHY1_PARM", 0x78, 4, Reads::Alive, Writes::Never),
    row("TW_PARM",   0x7c, 4, Reads::Alive, Writes::Never),
    // Wake-up frames: CRCs and patterns. A guest that sleeps does not hold the chip.
    row("WAKEUP",    0x80, 0x54, Reads::Alive, Writes::Never),
    row("FLASH",     0xd4, 4, Reads::Alive, Writes::Never),
    row("CONFIG5",   0xd8, 1, Reads::Alive, Writes::Plain),
    row("TPPOLL",    0xd9, 1, Reads::Never, Writes::Trigger).hook_writes().bits(&[("HPQ", HPQ), ("NPQ", NPQ)]),
    row("RMS",       0xda, 2, Reads::Alive, Writes::Never),
    row("CPCR",      0xe0, 2, Reads::Plain, Writes::Plain).hook_writes().bits(&[("RXEN", RXEN), ("TXEN", TXEN)]),
    row("MITIGATE",  0xe2, 2, Reads::Alive, Writes::Never),
    // C+ mode: descriptors to receive into.
    row("RDSAR_LO",  0xe4, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("RDSAR_HI",  0xe8, 4, Reads::Plain, Writes::Plain).hook_writes(),
    row("ETTHR",     0xec, 1, Reads::Plain, Writes::Plain),
    row("FER",       0xf0, 4, Reads::Alive, Writes::Never),
    row("FEMR",      0xf4, 4, Reads::Alive, Writes::Never),
    row("FPSR",      0xf8, 4, Reads::Alive, Writes::Never),
    row("FFER",      0xfc, 4, Reads::Alive, Writes::Never),
];

const NO_C_MODE: Check =
    Deny("C mode is not offered: the chip would follow addresses that nobody has checked");

/// Reset, C+ mode, receiver and transmitter. C mode is kept out by what is denied: neither half is ever on without its bit in CPCR.
const ENGINE: Region = Region {
    name: "engine",
    states: &[
        State::busy("Reset", "the chip resets itself; it ends that by clearing CR.RST"),
        State::reusable("Config", "receiver and transmitter are off; the driver sets rings and modes"),
        State::reusable("Idle", "receiver or transmitter is on"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("CR", RST, RST), RESET),
        Transition::new(ANY, On::write("CR9346", EEM, AUTOLOAD), RESET),
        Transition::new("Reset", On::became("CR", RST, 0), "Config"),
        Transition::new("Reset", On::written("CPCR"), "Config"),
        Transition::new("Idle", On::write("CR", RE | TE, 0), "Config"),
        Transition::new(ANY, On::write("CR", RE | TE, RE | TE), "Idle")
            .given("CPCR", RXEN | TXEN, RXEN | TXEN)
            .check(&[Base("receive"), Base("transmit")]),
        Transition::new(ANY, On::write("CR", RE | TE, RE), "Idle")
            .given("CPCR", RXEN, RXEN)
            .check(&[Base("receive")]),
        Transition::new(ANY, On::write("CR", RE | TE, TE), "Idle")
            .given("CPCR", TXEN, TXEN)
            .check(&[Base("transmit")]),
        Transition::new(ANY, On::sets("CR", RE | TE), STAY).check(&[NO_C_MODE]),
        Transition::new("Idle", On::write("CPCR", RXEN | TXEN, RXEN | TXEN), STAY),
        Transition::new("Idle", On::write("CPCR", RXEN, RXEN), STAY).given("CR", TE, 0),
        Transition::new("Idle", On::write("CPCR", TXEN, TXEN), STAY).given("CR", RE, 0),
        Transition::new("Idle", On::written("CPCR"), STAY).check(&[NO_C_MODE]),
        Transition::new(ANY, On::written("TSD2"), STAY).check(&[NO_C_MODE]),
        Transition::new(ANY, On::written("TSD3"), STAY).check(&[NO_C_MODE]),
    ],
};

/// The ring of normal priority.
const TRANSMIT: Region = Region {
    name: "transmit",
    states: &[
        State::reusable("Quiet", "no descriptor of the ring is the chip's"),
        State::busy("TxRun", "the chip reads descriptors and frames; the ring drains"),
    ],
    transitions: &[
        Transition::new(ANY, On::sets("TPPOLL", NPQ), "TxRun")
            .given("CR", TE, TE)
            .check(&[Descriptors("transmit")]),
        Transition::new("TxRun", On::drained("transmit"), "Quiet"),
        Transition::new("TxRun", On::write("CR", TE, 0), "Quiet"),
    ],
};

/// The ring of high priority.
const PRIORITY: Region = Region {
    name: "priority",
    states: &[
        State::reusable("Quiet", "no descriptor of the ring is the chip's"),
        State::busy("TxRun", "the chip reads descriptors and frames; the ring drains"),
    ],
    transitions: &[
        Transition::new(ANY, On::sets("TPPOLL", HPQ), "TxRun")
            .given("CR", TE, TE)
            .check(&[Descriptors("priority")]),
        Transition::new("TxRun", On::drained("priority"), "Quiet"),
        Transition::new("TxRun", On::write("CR", TE, 0), "Quiet"),
    ],
};

/// The dump of the counters.
const TALLY: Region = Region {
    name: "tally",
    states: &[
        State::reusable("Quiet", "no dump runs"),
        State::busy("Tally", "the chip writes its counters; it ends that by clearing the bit"),
    ],
    transitions: &[
        Transition::new(ANY, On::sets("DTCCR_LO", DUMP), "Tally").check(&[Check::Block("tally")]),
        Transition::new("Tally", On::became("DTCCR_LO", DUMP, 0), "Quiet"),
        // A driver that has waited long enough writes 0.
        Transition::new("Tally", On::write("DTCCR_LO", DUMP, 0), "Quiet"),
        Transition::new("Tally", On::written("DTCCR_HI"), STAY)
            .check(&[Deny("the address may not change while the counters are written to it")]),
    ],
};

const SELECT_LOW: Check =
    Deny("the EEPROM is selected with its clock low, from programming mode with it not selected");
const READ_ONLY: Check = Deny("the EEPROM is only read: it belongs to all who use this card");

/// The pins of the 93C46 (a start bit, two bits of command, an address; a bit counts when the clock rises). Only command 10, read, is
/// let through, so the clock is followed to the second bit of the command. What is denied does not reach the pins: chip and model stay
/// at the same bit.
const EEPROM: Region = Region {
    name: "eeprom",
    states: &[
        State::reusable("Closed", "not in programming mode"),
        State::busy("Open", "programming mode, not selected; ends when CR9346 leaves the mode"),
        State::busy("Start-", "selected; the start bit comes, clock low"),
        State::busy("Start+", "a zero before the start bit, clock high"),
        State::busy("First+", "start bit, clock high"),
        State::busy("First-", "the first bit of the command comes, clock low"),
        State::busy("Second+", "first bit 1, clock high"),
        State::busy("Second-", "the second bit of the command comes, clock low"),
        State::busy("Read", "a word is read; ends when the chip select falls"),
    ],
    transitions: &[
        Transition::new(ANY, On::write("CR9346", EEM, NORMAL), "Closed"),
        Transition::new(ANY, On::write("CR9346", EEM, UNLOCK), "Closed"),
        Transition::new(ANY, On::write("CR9346", EEM | CS, PROGRAM), "Open"),
        Transition::new("Closed", On::write("CR9346", EEM, PROGRAM), STAY).check(&[SELECT_LOW]),
        Transition::new("Open", On::write("CR9346", EEM | CS | SK, PROGRAM | CS), "Start-"),
        Transition::new("Open", On::write("CR9346", EEM, PROGRAM), STAY).check(&[SELECT_LOW]),
        Transition::new("Start-", On::write("CR9346", EEM | SK | DI, PROGRAM | SK), "Start+"),
        Transition::new("Start-", On::write("CR9346", EEM | SK | DI, PROGRAM | SK | DI), "First+"),
        Transition::new("Start+", On::write("CR9346", EEM | SK, PROGRAM), "Start-"),
        Transition::new("First+", On::write("CR9346", EEM | SK, PROGRAM), "First-"),
        Transition::new("First-", On::write("CR9346", EEM | SK | DI, PROGRAM | SK | DI), "Second+"),
        Transition::new("First-", On::write("CR9346", EEM | SK, PROGRAM | SK), STAY).check(&[READ_ONLY]),
        Transition::new("Second+", On::write("CR9346", EEM | SK, PROGRAM), "Second-"),
        Transition::new("Second-", On::write("CR9346", EEM | SK | DI, PROGRAM | SK), "Read"),
        Transition::new("Second-", On::write("CR9346", EEM | SK, PROGRAM | SK), STAY).check(&[READ_ONLY]),
    ],
};

/// In the order of a driver that starts: configuration unlocked, addresses, C+ mode, rings, receiver and transmitter, modes. IMR and ISR
/// are virtual.
const RESTORE: &[Restore] = &[
    Restore::Value("CR9346", UNLOCK),
    Restore::Saved("IDR0", !0),
    Restore::Saved("IDR4", !0),
    Restore::Saved("MAR0", !0),
    Restore::Saved("MAR4", !0),
    Restore::Saved("CONFIG1", 0xff),
    Restore::Saved("CONFIG3", 0xff),
    Restore::Saved("CONFIG4", 0xff),
    // Without PME status, which a one clears.
    Restore::Saved("CONFIG5", 0xfe),
    // Speed, auto-negotiation, duplex; not the bits that reset and restart.
    Restore::Saved("ANAR", 0xffff),
    Restore::Saved("BMCR", 0x3100),
    Restore::Saved("MULINT", 0xffff),
    Restore::Saved("CPCR", 0xffff),
    Restore::Ring("priority"),
    Restore::Ring("receive"),
    Restore::Ring("transmit"),
    Restore::Saved("CR", RE | TE),
    Restore::Saved("ETTHR", 0xff),
    Restore::Saved("RCR", !0),
    Restore::Saved("TCR", !1),
    Restore::Saved("TIMERINT", !0),
    Restore::Saved("CR9346", EEM),
];
