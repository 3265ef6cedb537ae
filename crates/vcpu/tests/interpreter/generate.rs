//! Random instructions and states. Most operands lie in the arena, so that most instructions can be carried out.

use ioplane_vcpu::{CachedSegment, GeneralRegisters, SystemRegisters, registers};

use crate::arena::{CODE, DATA, END};

/// A generator of pseudo-random numbers (splitmix64): the same seed gives the same runs.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// User mode as Linux has it, with a GS base of 0.
pub const SYSTEM: SystemRegisters = SystemRegisters {
    cr0: registers::cr0::PE | registers::cr0::PG | registers::cr0::WP | registers::cr0::AM,
    cr3: 0x1000,
    cr4: registers::cr4::PAE,
    efer: registers::efer::LMA | registers::efer::NXE,
    cpl: 3,
    code_long: true,
    code_default_big: false,
    flat: false,
    segments: [CachedSegment::UNUSABLE; 6],
    pdptes: [0; 4],
};

/// A 32-bit program, which has no page tables here: the processor runs it as the kernel runs such programs.
pub const FLAT: SystemRegisters = SystemRegisters {
    cr0: registers::cr0::PE,
    cr3: 0,
    cr4: 0,
    efer: 0,
    cpl: 3,
    code_long: false,
    code_default_big: true,
    flat: true,
    segments: [CachedSegment::UNUSABLE; 6],
    pdptes: [0; 4],
};

/// One opcode with what surrounds it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub prefixes: &'static [u8],
    pub rex: Option<u8>,
    pub two_bytes: bool,
    pub opcode: u8,
    /// The reg field of ModR/M, where many opcodes have a further one.
    pub reg: u8,
    pub memory: bool,
}

pub const PREFIXES: [&[u8]; 9] =
    [&[], &[0x66], &[0xf2], &[0xf3], &[0xf0], &[0x66, 0xf3], &[0x66, 0xf0], &[0x67], &[0x65]];
pub const REX: [Option<u8>; 4] = [None, Some(0x40), Some(0x48), Some(0x4d)];

/// Every opcode of both maps with every prefix here, every reg field, a register and a memory operand.
pub fn all_shapes() -> impl Iterator<Item = Shape> {
    let opcodes = (0..=0xff).flat_map(|opcode| [(false, opcode), (true, opcode)]);
    opcodes.flat_map(|(two_bytes, opcode)| {
        PREFIXES.into_iter().flat_map(move |prefixes| {
            REX.into_iter().flat_map(move |rex| {
                (0..8).flat_map(move |reg| {
                    [false, true].into_iter().map(move |memory| Shape {
                        prefixes,
                        rex,
                        two_bytes,
                        opcode,
                        reg,
                        memory,
                    })
                })
            })
        })
    })
}

pub fn random_shape(random: &mut Random) -> Shape {
    let index = |random: &mut Random, of: usize| usize::try_from(random.below(of as u64)).unwrap();
    Shape {
        prefixes: if random.one_in(2) { &[] } else { PREFIXES[index(random, PREFIXES.len())] },
        rex: if random.one_in(2) { None } else { Some(0x40 | random.byte() & 0xf) },
        two_bytes: random.one_in(2),
        opcode: random.byte(),
        reg: random.byte() & 7,
        memory: random.one_in(2),
    }
}

/// The bytes of an instruction, with some of what may follow it.
pub fn encode(shape: &Shape, system: &SystemRegisters, random: &mut Random) -> Vec<u8> {
    let mut bytes = shape.prefixes.to_vec();
    bytes.extend(shape.rex);
    if shape.two_bytes {
        bytes.push(0x0f);
    }
    bytes.push(shape.opcode);
    let rm = random.byte() & 7;
    let displacement = i32::from(random.byte()) - 128;
    if shape.memory {
        let mode = u8::try_from(random.below(3)).unwrap();
        bytes.push(mode << 6 | shape.reg << 3 | rm);
        if rm == 4 {
            bytes.push(random.byte());
        }
        match mode {
            // RIP-relative, or without a base: into the data either way.
            0 if rm == 5 => {
                let base = if system.code_long { 0 } else { u32::try_from(CODE).unwrap() };
                bytes.extend((base + 0x1000 + u32::from(random.byte()) * 8).to_le_bytes());
            }
            1 => bytes.push(displacement.to_le_bytes()[0]),
            2 => bytes.extend(displacement.to_le_bytes()),
            _ => {}
        }
    } else {
        bytes.push(0xc0 | shape.reg << 3 | rm);
    }
    // An immediate: small ones are the interesting counts and bit numbers.
    let small = random.one_in(2);
    for place in 0..8 {
        bytes.push(if small && place > 0 { 0 } else { random.byte() });
    }
    bytes.truncate(15);
    bytes
}

fn value(random: &mut Random) -> u64 {
    match random.below(8) {
        0..2 => DATA + random.below(END - DATA),
        2 => DATA + random.below((END - DATA) / 16) * 16,
        3 => random.below(256),
        4 => random.below(64).wrapping_neg(),
        5 => 1 << random.below(64),
        6 => (1 << random.below(64)) - 1,
        _ => random.next(),
    }
}

pub fn registers(system: &SystemRegisters, random: &mut Random) -> GeneralRegisters {
    use registers::rflags;
    let mut gpr = [0; 16];
    for register in &mut gpr {
        *register = value(random);
    }
    gpr[registers::RSP] = DATA + 256 + random.below(END - DATA - 512);
    if random.one_in(2) {
        gpr[registers::RSI] = DATA + random.below(END - DATA);
        gpr[registers::RDI] = DATA + random.below(END - DATA);
        gpr[registers::RCX] = random.below(4);
    }
    if random.one_in(4) {
        // A small dividend, so that divisions are not all errors.
        gpr[registers::RDX] = 0;
        gpr[registers::RAX] = random.below(4096);
    }
    if !system.code_long {
        gpr.iter_mut().for_each(|register| *register &= u64::from(u32::MAX));
    }
    let down = if random.one_in(4) { rflags::DF } else { 0 };
    GeneralRegisters {
        gpr,
        rip: CODE,
        rflags: random.next() & rflags::STATUS | down | rflags::ONE | rflags::IF,
    }
}
