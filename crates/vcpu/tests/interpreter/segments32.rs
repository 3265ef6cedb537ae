//! 32-bit mode with a segment of its own in GS, as 32-bit systems have the data of a processor or of a thread there or in FS: against the
//! processor, and what ends at the segment's limit.

use std::collections::BTreeSet;

use ioplane_vcpu::{
    CachedSegment, DeviceAccess, GeneralRegisters, OperandSize, StopReason, SystemRegisters, registers,
};
use registers::{RAX, RBX, RCX, RSI};

use crate::arena::{BASE, CODE, DATA, DEVICE, DEVICE_ADDRESS, END};
use crate::devices::{Machine, write};
use crate::generate::{self, FLAT, Random, Shape, all_shapes};
use crate::native::{Ended, OwnSegment, Program};
use crate::rig::{Rig, runs_and_seed};

/// What is in GS. The numbers are those that 16-bit code leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The arena's data.
    Small,
    /// All of it, from a base beyond: the sum with the offset begins at 0 again, as for Linux's data of a processor.
    Down,
    /// The arena, which may be read only.
    ReadOnly,
}

pub const LAYOUTS: [Layout; 3] = [Layout::Small, Layout::Down, Layout::ReadOnly];

/// Of the processor's number of GS.
const GS: usize = 5;

impl Layout {
    fn segment(self) -> OwnSegment {
        let all = OwnSegment { number: 6, base: BASE, limit: 0x3fff, code: false, writable: true, big: true };
        match self {
            Self::Small => OwnSegment { base: DATA, limit: 0x2fff, ..all },
            Self::Down => OwnSegment { number: 7, base: 0xd000_0000, limit: u32::MAX, ..all },
            Self::ReadOnly => OwnSegment { number: 8, writable: false, ..all },
        }
    }

    /// The offset of a linear address.
    fn offset(self, linear: u64) -> u64 {
        linear.wrapping_sub(self.segment().base) & u64::from(u32::MAX)
    }

    fn program(self) -> Program {
        let [es, cs, ss, ds, _] = Program::Flat32.selectors();
        Program::Segments([es, cs, ss, ds, self.segment().selector()])
    }

    pub fn system(self) -> SystemRegisters {
        let one = self.segment();
        let mut system = FLAT;
        system.segments[GS] = CachedSegment {
            selector: one.selector(),
            base: one.base,
            limit: one.limit,
            readable: true,
            writable: one.writable,
            big: one.big,
        };
        system
    }
}

const PREFIXES: [&[u8]; 7] = [
    &[0x65],
    &[0x65, 0x66],
    &[0x65, 0xf0],
    &[0x65, 0xf2],
    &[0x65, 0xf3],
    &[0x65, 0x66, 0xf0],
    &[0x65, 0x66, 0xf3],
];

/// Every opcode of both maps that has a memory operand or a string's, by GS.
pub fn shapes() -> impl Iterator<Item = Shape> {
    let plain = all_shapes().filter(|one| one.rex.is_none() && one.prefixes.is_empty() && one.memory);
    plain.flat_map(|shape| PREFIXES.into_iter().map(move |prefixes| Shape { prefixes, ..shape }))
}

fn random_shape(random: &mut Random) -> Shape {
    let index = usize::try_from(random.below(PREFIXES.len() as u64)).unwrap();
    let prefixes = if random.one_in(3) { &[][..] } else { PREFIXES[index] };
    Shape { prefixes, rex: None, ..generate::random_shape(random) }
}

/// As without a segment, but where an address is in the instruction it is most often one in the segment.
pub fn encode(shape: &Shape, layout: Layout, random: &mut Random) -> Vec<u8> {
    let mut bytes = generate::encode(shape, &FLAT, random);
    let opcode = shape.prefixes.len() + usize::from(shape.two_bytes);
    // MOV between EAX and an address; ModR/M with nothing but an address.
    let direct = !shape.two_bytes && (0xa0..0xa4).contains(&shape.opcode);
    let absolute = shape.memory && bytes[opcode + 1] & 0xc7 == 5;
    if shape.prefixes.contains(&0x65) && (direct || absolute) {
        let at = opcode + if direct { 1 } else { 2 };
        let address = if random.one_in(4) { END - 8 + random.below(16) } else { DATA + random.below(0x2f00) };
        let offset = u32::try_from(layout.offset(address)).unwrap();
        bytes[at..at + 4].copy_from_slice(&offset.to_le_bytes());
    }
    bytes
}

/// Half of what points into the arena points there by GS.
pub fn registers(layout: Layout, random: &mut Random) -> GeneralRegisters {
    let mut general = generate::registers(&FLAT, random);
    for (number, register) in general.gpr.iter_mut().enumerate() {
        if number != registers::RSP && (DATA..END).contains(register) && !random.one_in(3) {
            *register = layout.offset(*register);
        }
    }
    general
}

fn rig(layout: Layout, seed: u64) -> Rig {
    let mut rig = Rig::new(layout.system(), layout.program(), 32, CODE, seed);
    rig.native.segment(&layout.segment());
    rig
}

#[test]
fn every_opcode_by_a_segment_as_the_processor_does_it() {
    for (layout, seed) in LAYOUTS.into_iter().zip(11..) {
        let mut rig = rig(layout, seed);
        for shape in shapes() {
            for _ in 0..2 {
                let code = encode(&shape, layout, &mut rig.random);
                rig.compare(&code, 1, |random| registers(layout, random));
            }
        }
        let forms: BTreeSet<_> = rig.executed.keys().copied().collect();
        println!("{layout:?}: {} instruction forms, stops: {:?}", forms.len(), rig.stopped);
        let least = if layout == Layout::ReadOnly { FORMS_READ } else { FORMS };
        assert!(forms.len() >= least, "{layout:?}: {} forms, there were {least}", forms.len());
        // Limits and rights come up.
        assert!(layout == Layout::Down || rig.stopped["Exception"] > 100, "{:?}", rig.stopped);
    }
}

/// How many forms there were when this was written, at least.
const FORMS: usize = 200;
const FORMS_READ: usize = 150;

#[test]
fn random_sequences_by_a_segment_as_the_processor_does_them() {
    let (runs, seed) = runs_and_seed(12);
    for layout in LAYOUTS {
        rig(layout, seed).sequences(
            runs / 10,
            |random| {
                let shape = random_shape(random);
                encode(&shape, layout, random)
            },
            |random| registers(layout, random),
        );
    }
}

/// Without this the comparison could be one of the segments that all have.
#[test]
fn the_processor_uses_the_segment() {
    // MOV EAX, GS:[EBX]
    let code = [0x65, 0x8b, 0x03];
    for layout in LAYOUTS {
        let mut rig = rig(layout, 13);
        let mut memory = rig.template.clone();
        memory[..3].copy_from_slice(&code);
        let at = usize::try_from(DATA - BASE).unwrap() + 0x10;
        memory[at..at + 4].copy_from_slice(&[1, 2, 3, 4]);
        let mut start = GeneralRegisters { gpr: [DATA; 16], rip: CODE, rflags: 0x202 };
        start.gpr[RBX] = layout.offset(DATA + 0x10);
        let ended = rig.native.run(&start, layout.program(), 1, &mut memory);
        let Ended::Complete(end) = ended else { panic!("{layout:?}: {ended:?}") };
        assert_eq!((end.gpr[RAX], end.rip), (0x0403_0201, CODE + 3), "{layout:?}");
    }
    // One byte beyond the limit, where there is memory; and a store to what may only be read.
    for (layout, code, offset) in
        [(Layout::Small, code, 0x2ffd), (Layout::ReadOnly, [0x65, 0x89, 0x03], 0x1000)]
    {
        let mut rig = rig(layout, 13);
        let mut memory = rig.template.clone();
        memory[..3].copy_from_slice(&code);
        let start = GeneralRegisters { gpr: [offset; 16], rip: CODE, rflags: 0x202 };
        assert_eq!(rig.native.run(&start, layout.program(), 1, &mut memory), Ended::Fault(libc::SIGSEGV));
    }
}

fn machine(code: &[u8], segment: CachedSegment) -> Machine {
    let mut machine = Machine::new(code);
    machine.system = SystemRegisters { cpl: 0, ..FLAT };
    machine.system.segments[4] = segment;
    machine.system.segments[GS] = segment;
    machine
}

const WHOLE: CachedSegment =
    CachedSegment { selector: 0xd8, base: 0, limit: u32::MAX, readable: true, writable: true, big: true };

/// A device by FS, whose segment Linux has for data of a processor.
#[test]
fn devices_by_a_segment() {
    // MOV EAX, FS:[EBX]; MOV FS:[EBX+4], AL; MOV EAX, FS:[moffs]
    let mut code = vec![0x64, 0x8b, 0x03, 0x64, 0x88, 0x43, 0x04, 0x64, 0xa1];
    code.extend(0x4000_1010_u32.to_le_bytes());
    let mut machine = machine(&code, CachedSegment { base: 0xd000_0000, ..WHOLE });
    machine.general.gpr[RBX] = 0x5000_0000;
    machine.arena.put(DATA + 0x10, &[5, 6, 7, 8]);
    let (access, pending) = machine.access();
    assert_eq!(access, DeviceAccess::MemoryRead { address: DEVICE_ADDRESS, size: OperandSize::Dword });
    machine.complete(pending, 0x1122_3344);
    let (access, pending) = machine.access();
    let size = OperandSize::Byte;
    assert_eq!(access, DeviceAccess::MemoryWrite { address: DEVICE_ADDRESS + 4, size, value: 0x44 });
    machine.complete(pending, 0);
    assert_eq!((machine.stop(), machine.general.gpr[RAX]), (StopReason::Instruction, 0x0807_0605));
    assert_eq!(DEVICE, 0x2000_0000, "what the base and RBX come to");
}

/// OUTS carries no more than the segment has.
#[test]
fn a_string_of_ports_ends_with_the_segment() {
    // REP OUTSB by GS
    let mut machine = machine(&[0x65, 0xf3, 0x6e], CachedSegment { base: DATA, limit: 0x102, ..WHOLE });
    machine.general.gpr[RSI] = 0x100;
    machine.general.gpr[RCX] = 5;
    let (access, pending) = machine.access();
    assert_eq!(access, write(0, OperandSize::Byte, 3));
    machine.complete(pending, 0);
    assert_eq!((machine.general.gpr[RSI], machine.general.gpr[RCX], machine.general.rip), (0x103, 2, CODE));
    assert_eq!(machine.stop(), StopReason::Exception);
}

#[test]
fn what_leaves_a_segment_or_its_rights_is_the_processors() {
    // With EBX: MOV EAX, FS:[EBX]; MOV FS:[EBX], AL; ADD GS:[EBX], EAX; LOCK ADD; XCHG; CMPXCHG; CMPXCHG8B; POP GS:[EBX]; LODSD GS; BT GS:[EBX], ECX; OUTSD FS
    let loads: [&[u8]; 4] = [&[0x64, 0x8b, 0x03], &[0x65, 0xad], &[0x65, 0x0f, 0xa3, 0x0b], &[0x64, 0x6f]];
    let stores: [&[u8]; 7] = [
        &[0x64, 0x88, 0x03],
        &[0x65, 0x01, 0x03],
        &[0xf0, 0x65, 0x01, 0x03],
        &[0x65, 0x87, 0x03],
        &[0x65, 0x0f, 0xb1, 0x03],
        &[0x65, 0x0f, 0xc7, 0x0b],
        &[0x65, 0x8f, 0x03],
    ];
    let small = CachedSegment { base: DATA, limit: 0x1fff, ..WHOLE };
    let unreadable = CachedSegment { readable: false, writable: false, ..small };
    let locked = CachedSegment { writable: false, ..small };
    let cases = loads.into_iter().map(|code| (code, unreadable, 0x40));
    let cases = cases.chain(loads.into_iter().map(|code| (code, CachedSegment::UNUSABLE, 0x40)));
    let cases = cases.chain(loads.into_iter().map(|code| (code, small, 0x1ffd)));
    let cases = cases.chain(stores.into_iter().map(|code| (code, small, 0x2000)));
    let cases = cases.chain(stores.into_iter().map(|code| (code, locked, 0x40)));
    for (code, segment, offset) in cases {
        let mut machine = machine(code, segment);
        machine.general.gpr[RBX] = offset;
        machine.general.gpr[RSI] = offset;
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::Exception, "{code:02x?} at {offset:x} of {segment:x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "{code:02x?}");
    }
    // A bit number leads beyond the limit, and within it.
    for (number, wanted) in [(0x1_0000 - 0x200, StopReason::Instruction), (0x1_0000, StopReason::Exception)] {
        let mut machine = machine(&[0x65, 0x0f, 0xa3, 0x0b], small);
        machine.general.gpr[RCX] = number;
        assert_eq!(machine.stop(), wanted, "bit {number:x}");
    }
    // CS may be read, and is left to the processor all the same: MOV EAX, CS:[EBX]
    let mut machine = machine(&[0x2e, 0x8b, 0x03], small);
    assert_eq!(machine.stop(), StopReason::Instruction);
    assert_eq!(machine.general.rip, CODE);
}
