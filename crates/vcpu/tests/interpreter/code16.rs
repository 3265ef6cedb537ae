//! 16-bit code against the processor: a program of segments that this process has made for itself (modify_ldt). Protected mode
//! does with the cached bases and limits what real mode does.

use std::collections::{BTreeMap, BTreeSet};

use ioplane_vcpu::{CachedSegment, GeneralRegisters, SystemRegisters, registers};
use registers::rflags;

use crate::arena::{BASE, CODE, DATA};
use crate::coverage;
use crate::generate::{FLAT, Random, Shape, all_shapes};
use crate::native::{Ended, OwnSegment, Program};
use crate::rig::{Rig, runs_and_seed};

/// The whole arena as code; its data; and the whole of it, which may be read only.
const SEGMENTS: [OwnSegment; 6] = {
    let all = OwnSegment { number: 0, base: BASE, limit: 0x3fff, code: true, writable: false, big: false };
    [
        all,
        OwnSegment { number: 1, code: false, writable: true, ..all },
        OwnSegment { number: 2, base: DATA, limit: 0x2fff, code: false, writable: true, ..all },
        OwnSegment { number: 3, code: false, ..all },
        // A stack whose address has 32 bits.
        OwnSegment { number: 4, code: false, writable: true, big: true, ..all },
        // As firmware has it: with addresses of 32 bits everything is in reach.
        OwnSegment { number: 5, base: 0, limit: u32::MAX, code: false, writable: true, big: true },
    ]
};

/// Which segments ES, CS, SS, DS and GS have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Small,
    BigStack,
    Unreal,
}

pub const LAYOUTS: [Layout; 3] = [Layout::Small, Layout::BigStack, Layout::Unreal];

impl Layout {
    fn numbers(self) -> [usize; 5] {
        match self {
            Self::Small => [2, 0, 1, 2, 3],
            Self::BigStack => [2, 0, 4, 2, 3],
            Self::Unreal => [5, 0, 1, 5, 3],
        }
    }

    fn program(self) -> Program {
        Program::Segments(self.numbers().map(|number| SEGMENTS[number].selector()))
    }

    /// What is 0 in DS and ES, as this layout's registers have it.
    fn data(self) -> u64 {
        if self == Self::Unreal { DATA } else { 0 }
    }

    pub fn system(self) -> SystemRegisters {
        let [es, cs, ss, ds, gs] = self.numbers().map(|number| {
            let one = &SEGMENTS[number];
            CachedSegment {
                selector: one.selector(),
                base: one.base,
                limit: one.limit,
                readable: true,
                writable: one.writable,
                big: one.big,
            }
        });
        let fs = CachedSegment::UNUSABLE;
        SystemRegisters { code_default_big: false, flat: false, segments: [es, cs, ss, ds, fs, gs], ..FLAT }
    }
}

const PREFIXES: [&[u8]; 22] = [
    &[],
    &[0x66],
    &[0x67],
    &[0x66, 0x67],
    &[0xf2],
    &[0xf3],
    &[0xf0],
    &[0x66, 0xf2],
    &[0x66, 0xf3],
    &[0x67, 0xf3],
    &[0x67, 0xf2],
    &[0x66, 0x67, 0xf3],
    &[0x66, 0xf0],
    &[0x67, 0xf0],
    &[0x26],
    &[0x2e],
    &[0x36],
    &[0x3e],
    &[0x65],
    &[0x66, 0x2e],
    &[0x67, 0x2e],
    &[0x66, 0x67, 0x36],
];

/// Every opcode of both maps with every prefix here, every reg field, a register and a memory operand.
pub fn shapes() -> impl Iterator<Item = Shape> {
    let plain = all_shapes().filter(|shape| shape.rex.is_none() && shape.prefixes.is_empty());
    plain.flat_map(|shape| PREFIXES.into_iter().map(move |prefixes| Shape { prefixes, ..shape }))
}

fn random_shape(random: &mut Random) -> Shape {
    let shape = crate::generate::random_shape(random);
    let index = usize::try_from(random.below(PREFIXES.len() as u64)).unwrap();
    Shape { prefixes: if random.one_in(3) { &[] } else { PREFIXES[index] }, rex: None, ..shape }
}

/// The bytes of an instruction, with some of what may follow it.
pub fn encode(shape: &Shape, layout: Layout, random: &mut Random) -> Vec<u8> {
    let mut bytes = shape.prefixes.to_vec();
    if shape.two_bytes {
        bytes.push(0x0f);
    }
    bytes.push(shape.opcode);
    let rm = random.byte() & 7;
    if !shape.memory {
        bytes.push(0xc0 | shape.reg << 3 | rm);
    } else {
        let mode = u8::try_from(random.below(3)).unwrap();
        bytes.push(mode << 6 | shape.reg << 3 | rm);
        let wide = shape.prefixes.contains(&0x67);
        let displacement = i32::from(random.byte()) - 128;
        let absolute = u32::try_from(layout.data()).unwrap() + u32::try_from(random.below(0x3000)).unwrap();
        if wide && rm == 4 {
            bytes.push(random.byte());
        }
        match (mode, wide) {
            (0, false) if rm == 6 => bytes.extend(&absolute.to_le_bytes()[..2]),
            (0, true) if rm == 5 => bytes.extend(absolute.to_le_bytes()),
            (1, _) => bytes.push(displacement.to_le_bytes()[0]),
            (2, false) => bytes.extend(&displacement.to_le_bytes()[..2]),
            (2, true) => bytes.extend(displacement.to_le_bytes()),
            _ => {}
        }
    }
    let small = random.one_in(2);
    for place in 0..8 {
        bytes.push(if small && place > 0 { 0 } else { random.byte() });
    }
    bytes.truncate(15);
    bytes
}

pub fn registers(layout: Layout, random: &mut Random) -> GeneralRegisters {
    let mut gpr = [0; 16];
    // Those above 16 bits are no part of addresses of 16 bits.
    let junk = random.one_in(3);
    for register in &mut gpr[..8] {
        let low = match random.below(8) {
            0..3 => random.below(0x1800),
            3 => random.below(0x100) * 16,
            4 => 0x2ff0 + random.below(32),
            5 => random.below(64).wrapping_neg() & 0xffff,
            6 => 1 << random.below(16),
            _ => random.next() & 0xffff,
        };
        *register = if junk { low | random.next() & 0xffff_0000 } else { low + layout.data() };
    }
    gpr[registers::RSP] = 0x1100 + random.below(0x2d00);
    if random.one_in(2) {
        gpr[registers::RSI] = layout.data() + random.below(0x3000);
        gpr[registers::RDI] = layout.data() + random.below(0x3000);
        let upper = if random.one_in(4) { 0x7_0000 } else { 0 };
        gpr[registers::RCX] = upper + random.below(4);
    }
    if random.one_in(4) {
        gpr[registers::RDX] = 0;
        gpr[registers::RAX] = random.below(4096);
    }
    let down = if random.one_in(4) { rflags::DF } else { 0 };
    let rflags = random.next() & rflags::STATUS | down | rflags::ONE | rflags::IF;
    GeneralRegisters { gpr, rip: 0, rflags }
}

fn rig(layout: Layout, seed: u64) -> Rig {
    let mut rig = Rig::new(layout.system(), layout.program(), 16, 0, seed);
    SEGMENTS.iter().for_each(|segment| rig.native.segment(segment));
    rig
}

#[test]
fn every_opcode_of_16_bit_code_as_the_processor_does_it() {
    let mut all = BTreeMap::new();
    for (layout, seed) in LAYOUTS.into_iter().zip(7..) {
        let mut rig = rig(layout, seed);
        for shape in shapes() {
            let code = encode(&shape, layout, &mut rig.random);
            rig.compare(&code, 1, |random| registers(layout, random));
        }
        println!("{layout:?}: {} instruction forms, stops: {:?}", rig.executed.len(), rig.stopped);
        all.extend(rig.executed);
    }
    println!("{} instruction forms", all.len());
    coverage::check_16(&all);
}

#[test]
fn random_sequences_of_16_bit_code_as_the_processor_does_them() {
    let (runs, seed) = runs_and_seed(8);
    for layout in LAYOUTS {
        rig(layout, seed).sequences(
            runs / 5,
            |random| {
                let shape = random_shape(random);
                encode(&shape, layout, random)
            },
            |random| registers(layout, random),
        );
    }
}

/// Without this the comparison could be one of 32-bit code.
#[test]
fn the_processor_takes_it_as_16_bit_code() {
    let mut rig = rig(Layout::Small, 9);
    let mut memory = rig.template.clone();
    // MOV AX, 0x1234; then what 32-bit code would have taken for its upper half: PUSH CS; PUSH CS
    memory[..5].copy_from_slice(&[0xb8, 0x34, 0x12, 0x0e, 0x0e]);
    let start = GeneralRegisters { gpr: [0x2000; 16], rip: 0, rflags: rflags::ONE | rflags::IF };
    let program = Layout::Small.program();
    let Ended::Complete(end) = rig.native.run(&start, program, 2, &mut memory) else { panic!("a fault") };
    // The upper half of RSP is the kernel's: IRET to a stack of 16 bits sets only the lower.
    assert_eq!((end.gpr[0], end.rip, end.gpr[registers::RSP] & 0xffff), (0x1234, 4, 0x1ffe));
    assert_eq!(u16::from_le_bytes([memory[0x1ffe], memory[0x1fff]]), SEGMENTS[0].selector());
    // Beyond the limit: MOV AX, [0x2fff]
    memory[..3].copy_from_slice(&[0xa1, 0xff, 0x2f]);
    assert_eq!(rig.native.run(&start, program, 1, &mut memory), Ended::Fault(libc::SIGSEGV));
    let forms: BTreeSet<usize> = LAYOUTS.iter().map(|layout| layout.numbers()[2]).collect();
    assert_eq!((forms.len(), CODE), (2, BASE), "stacks of both sizes");
}
