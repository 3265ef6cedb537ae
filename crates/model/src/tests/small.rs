//! A small device: a command register, a ring, a mask and a status.

use crate::*;

pub const ON: u32 = 1;
pub const RESETS: u32 = 2;

pub const REGISTERS: &[Register] = &[
    Register::new("CMD", 0, 1, Reads::Alive, Writes::Trigger).hook_writes(),
    Register::new("BELL", 1, 1, Reads::Never, Writes::Trigger).hook_writes(),
    Register::new("SPARE", 2, 2, Reads::Alive, Writes::Plain),
    Register::new("LO", 4, 4, Reads::Plain, Writes::Plain).hook_writes(),
    Register::new("HI", 8, 4, Reads::Plain, Writes::Plain).hook_writes(),
    Register::new("MASK", 12, 2, Reads::Plain, Writes::Plain).hook_all(),
    Register::new("STATUS", 14, 2, Reads::Alive, Writes::Clears).hook_all(),
    Register::new("WIDE", 16, 16, Reads::Alive, Writes::Never),
];

pub const STATES: &[State] = &[
    State::reusable("Off", "nothing goes on"),
    State::busy("Run", "the ring is worked on; ends when it has drained"),
];

pub const REGION: Region = Region {
    name: "only",
    states: STATES,
    transitions: &[
        Transition::new(ANY, On::write("CMD", RESETS, RESETS), RESET),
        Transition::new("Off", On::sets("BELL", 1), "Run")
            .given("CMD", ON, ON)
            .check(&[Check::Descriptors("ring")]),
        Transition::new("Run", On::drained("ring"), "Off"),
        Transition::new("Run", On::became("CMD", ON, 0), "Off"),
        Transition::new("Run", On::interrupt(0x10), "Off"),
    ],
};

pub const RING: DescriptorRing = DescriptorRing {
    name: "ring",
    base: ("LO", "HI"),
    align: 16,
    most: 8,
    flow: Flow::Transmit,
    descriptor: DescriptorLayout {
        size: 16,
        status: 0,
        own: 1 << 31,
        end: 1 << 30,
        length: 0xffff,
        address: (8, 12),
    },
    doorbell: Some(("BELL", 1)),
    enable: ("CMD", ON),
    queue: None,
};

pub static SMALL: StateModel = StateModel {
    name: "small",
    title: "a small device",
    ids: &[],
    bar: 0,
    aliases: &[],
    size: 32,
    banks: None,
    registers: REGISTERS,
    interrupts: Interrupts {
        status: "STATUS",
        mask: "MASK",
        bits: 0x13,
        live: 0,
        traffic: 0,
        error: 0x02,
        split: None,
    },
    regions: &[REGION],
    rings: &[RING],
    blocks: &[],
    counters: None,
    port: None,
    reset: Reset { by: ("CMD", Way::Write, RESETS), done: ("CMD", RESETS, 0), settle: 0 },
    halt: &[Restore::Value("CMD", 0)],
    restore: &[Restore::Ring("ring"), Restore::Saved("SPARE", 0xffff), Restore::Saved("CMD", ON)],
    told: &[],
};
