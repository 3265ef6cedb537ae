//! What the interpreter carries out, the processor carries out to the same registers, flags and memory.
//!
//! The short form takes every opcode with its operand sizes, and 50,000 random sequences.
//! `IOPLANE_DIFFERENTIAL_RUNS=1000000` is the long form.

use std::collections::BTreeMap;

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use ioplane_vcpu::{
    GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters, registers,
};
use registers::rflags;

use crate::arena::{Arena, CODE, DATA, END, SIZE, Surroundings};
use crate::coverage;
use crate::generate::{self, FLAT, Random, SYSTEM};
use crate::native::{Ended, Native, Program};

/// The flags that user code can change and that a signal handler can put in place. ID is not among them.
pub const COMPARED: u64 = rflags::STATUS | rflags::DF;

pub struct Rig {
    system: SystemRegisters,
    interpreter: Interpreter,
    native: Native,
    random: Random,
    template: Vec<u8>,
    pub executed: BTreeMap<Code, u64>,
    pub stopped: BTreeMap<String, u64>,
}

impl Rig {
    pub fn new(system: SystemRegisters, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut template: Vec<u8> = (0..SIZE).map(|_| random.byte()).collect();
        // HLT, which user code cannot run, around the code.
        template[..0x1000].fill(0xf4);
        Self {
            system,
            interpreter: Interpreter::new(),
            native: Native::new(),
            random,
            template,
            executed: BTreeMap::new(),
            stopped: BTreeMap::new(),
        }
    }

    fn bits(&self) -> u32 {
        if self.system.code_long { 64 } else { 32 }
    }

    /// Runs the code in both and compares; says how many instructions were carried out.
    fn compare(&mut self, code: &[u8], most: u32) -> u64 {
        let mut memory = self.template.clone();
        let start = generate::registers(&self.system, &mut self.random);
        memory[..code.len()].copy_from_slice(code);
        if self.random.one_in(4) {
            // Somewhere to return to.
            let at = usize::try_from(start.gpr[registers::RSP] - crate::arena::BASE).unwrap();
            let target = CODE + self.random.below(END - CODE);
            // The upper half is 0, as 32-bit code has it.
            memory[at..at + 8].copy_from_slice(&target.to_le_bytes());
        }
        // What follows the code counts as well, if it is cut off.
        let bits = self.bits();
        let instruction = Decoder::with_ip(bits, &memory[..15], CODE, DecoderOptions::NONE).decode();
        if instruction.segment_prefix() == Register::FS {
            // This process has a base there.
            return 0;
        }
        let flags_instruction = is_flags_word(&instruction);
        if matches!(instruction.mnemonic(), Mnemonic::Popfq | Mnemonic::Popfd) {
            keep_flags_harmless(&mut memory, start.gpr[registers::RSP]);
        }
        let most = if flags_instruction { 1 } else { most };

        let mut arena = Arena::new(memory.clone());
        let decode = |arena: &Arena, rip| decode(arena, bits, rip);
        let (general, executed, compared) = interpret(
            &mut self.interpreter,
            &self.system,
            &mut arena,
            &start,
            most,
            decode,
            &mut self.stopped,
        );
        if executed == 0 {
            assert_eq!(general, start, "a stop changed registers: {code:02x?}");
            assert!(arena.bytes == memory, "a stop changed memory: {code:02x?}");
            return 0;
        }
        *self.executed.entry(instruction.code()).or_default() += 1;

        let mut native_memory = memory.clone();
        let program = if self.system.code_long { Program::Long } else { Program::Flat32 };
        let ended = self.native.run(&start, program, executed, &mut native_memory);
        let Ended::Complete(mut native) = ended else {
            panic!(
                "the processor faults ({ended:?}), the interpreter goes on: {}",
                describe(bits, code, &start)
            )
        };
        if matches!(instruction.mnemonic(), Mnemonic::Pushfq | Mnemonic::Pushfd) {
            // The processor was stepping, and says so in the word that it pushes.
            let at = usize::try_from(native.gpr[registers::RSP] - crate::arena::BASE).unwrap();
            native_memory[at + 1] &= !1;
        }
        native.rflags &= compared;
        let mut ours = general;
        ours.rflags &= compared;
        if !self.system.code_long {
            // What 32-bit code cannot see: upper halves, and R8 and above.
            for side in [&mut ours, &mut native] {
                side.gpr[..8].iter_mut().for_each(|register| *register &= u64::from(u32::MAX));
                side.gpr[8..].fill(0);
            }
        }
        assert_eq!(ours, native, "registers (ours, the processor's) after {}", describe(bits, code, &start));
        if arena.bytes != native_memory {
            let at = arena.bytes.iter().zip(&native_memory).position(|(a, b)| a != b).unwrap();
            panic!(
                "memory at {:x}: {:02x}, the processor has {:02x}, after {}",
                crate::arena::BASE + at as u64,
                arena.bytes[at],
                native_memory[at],
                describe(bits, code, &start)
            );
        }
        executed
    }
}

/// Interprets one instruction after the other, `most` at most; says what the registers are then, how many were carried out, and which
/// flags are to be compared.
pub fn interpret(
    interpreter: &mut Interpreter,
    system: &SystemRegisters,
    arena: &mut Arena,
    start: &GeneralRegisters,
    most: u32,
    decode: impl Fn(&Arena, u64) -> Option<Instruction>,
    stopped: &mut BTreeMap<String, u64>,
) -> (GeneralRegisters, u64, u64) {
    let (mut general, mut executed, mut compared) = (*start, 0, COMPARED);
    while executed < u64::from(most) {
        // A branch may lead anywhere, also to what must not be run in sequences.
        let next = decode(arena, general.rip);
        if executed > 0 && next.is_some_and(|next| is_unfit(&next)) {
            break;
        }
        let end = interpreter.run(
            &mut general,
            system,
            arena,
            &mut Surroundings::default(),
            &mut [0; 4096],
            &mut RunBudget { instructions: 1, accesses: 0, deadline: u64::MAX },
        );
        match end {
            RunEnd::Stopped(StopReason::InstructionLimit) => executed += 1,
            RunEnd::Stopped(reason) => {
                *stopped.entry(format!("{reason:?}")).or_default() += 1;
                break;
            }
            RunEnd::Access(access, _) => panic!("a device is asked without a budget: {access:?}"),
        }
        if next.is_some_and(|next| is_shift_by_number(&next)) {
            compared &= !rflags::OF;
            break;
        }
        // Between two elements an Intel Xeon shows the flags from before the instruction, an AMD EPYC those of the
        // element. The processor that goes on sets them anew.
        if next.is_some_and(|next| compares_strings(&next) && general.rip == next.ip()) {
            compared &= !rflags::STATUS;
            break;
        }
    }
    (general, executed, compared)
}

fn describe(bits: u32, code: &[u8], start: &GeneralRegisters) -> String {
    let decoder = Decoder::with_ip(bits, code, CODE, DecoderOptions::NONE);
    let codes: Vec<Code> = decoder.into_iter().take(4).map(|one| one.code()).collect();
    format!("{code:02x?} {codes:?} from {start:x?}")
}

fn decode(arena: &Arena, bits: u32, rip: u64) -> Option<Instruction> {
    let code = arena.bytes.get(usize::try_from(rip.checked_sub(CODE)?).ok()?..)?;
    Some(Decoder::with_ip(bits, code, rip, DecoderOptions::NONE).decode())
}

pub fn is_unfit(one: &Instruction) -> bool {
    is_flags_word(one) || one.segment_prefix() == Register::FS
}

pub fn is_flags_word(one: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(one.mnemonic(), M::Popfq | M::Pushfq | M::Popfd | M::Pushfd | M::Popf | M::Pushf)
}

/// The interpreter shifts and rotates by CL only. By more than 1 OF is undefined, and an Intel Xeon was found on which it
/// then differs between CL and a number in the instruction.
pub fn is_shift_by_number(one: &Instruction) -> bool {
    use Mnemonic as M;
    let shifts = matches!(
        one.mnemonic(),
        M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shl | M::Shr | M::Sar | M::Shld | M::Shrd
    );
    shifts && one.op_kinds().any(|kind| kind == OpKind::Immediate8) && one.immediate8() != 1
}

pub fn compares_strings(one: &Instruction) -> bool {
    use Mnemonic as M;
    let strings = [M::Cmpsb, M::Cmpsw, M::Cmpsd, M::Cmpsq, M::Scasb, M::Scasw, M::Scasd, M::Scasq]
        .contains(&one.mnemonic());
    strings && (one.has_rep_prefix() || one.has_repne_prefix())
}

/// Alignment checks and nested tasks would follow this process out of the test.
pub fn keep_flags_harmless(memory: &mut [u8], stack: u64) {
    let at = usize::try_from(stack - crate::arena::BASE).unwrap();
    let word = u64::from_le_bytes(memory[at..at + 8].try_into().unwrap());
    let harmless = word & !(rflags::AC | rflags::NT | rflags::TF | rflags::RF | rflags::ID);
    memory[at..at + 8].copy_from_slice(&harmless.to_le_bytes());
}

#[test]
fn every_opcode_as_the_processor_does_it() {
    let mut rig = Rig::new(SYSTEM, 1);
    every_opcode(&mut rig, generate::all_shapes());
    coverage::check(&rig.executed);
}

#[test]
fn every_opcode_of_32_bit_mode_as_the_processor_does_it() {
    let mut rig = Rig::new(FLAT, 5);
    every_opcode(&mut rig, generate::all_shapes().filter(|shape| shape.rex.is_none()));
    coverage::check_32(&rig.executed);
}

fn every_opcode(rig: &mut Rig, shapes: impl Iterator<Item = generate::Shape>) {
    for shape in shapes {
        for _ in 0..2 {
            let code = generate::encode(&shape, &rig.system, &mut rig.random);
            rig.compare(&code, 1);
        }
    }
    println!("{} instruction forms, stops: {:?}", rig.executed.len(), rig.stopped);
}

#[test]
fn random_sequences_as_the_processor_does_them() {
    let runs: u64 = std::env::var("IOPLANE_DIFFERENTIAL_RUNS")
        .ok()
        .map_or(50_000, |runs| runs.parse().expect("IOPLANE_DIFFERENTIAL_RUNS is a number"));
    // The long form takes other numbers each time and says which.
    let seed =
        std::env::var("IOPLANE_DIFFERENTIAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(2);
    println!("IOPLANE_DIFFERENTIAL_SEED={seed}");
    random_sequences(&mut Rig::new(SYSTEM, seed), runs);
    random_sequences(&mut Rig::new(FLAT, seed), runs / 4);
}

fn random_sequences(rig: &mut Rig, runs: u64) {
    let (mut done, mut instructions) = (0, 0);
    while done < runs {
        let mut code = Vec::new();
        for _ in 0..4 {
            let mut shape = generate::random_shape(&mut rig.random);
            if !rig.system.code_long {
                shape.rex = None;
            }
            let bytes = generate::encode(&shape, &rig.system, &mut rig.random);
            let one = Decoder::with_ip(rig.bits(), &bytes, CODE, DecoderOptions::NONE).decode();
            if !one.is_invalid() && !is_flags_word(&one) {
                code.extend_from_slice(&bytes[..one.len()]);
            }
        }
        let executed = rig.compare(&code, 4);
        done += u64::from(executed > 0);
        instructions += executed;
    }
    let (bits, forms) = (rig.bits(), rig.executed.len());
    println!("{bits} bits: {runs} sequences, {instructions} instructions, {forms} forms");
}

#[test]
fn the_rig_finds_a_difference() {
    let mut rig = Rig::new(SYSTEM, 3);
    let start = GeneralRegisters { gpr: [DATA; 16], rip: CODE, rflags: rflags::ONE | rflags::IF };
    let mut memory = rig.template.clone();
    // ADD RAX, 1, then a load from nowhere.
    memory[..4].copy_from_slice(&[0x48, 0x83, 0xc0, 0x01]);
    let Ended::Complete(end) = rig.native.run(&start, Program::Long, 1, &mut memory) else {
        panic!("a fault")
    };
    assert_eq!((end.gpr[0], end.rip), (DATA + 1, CODE + 4));
    memory[..3].copy_from_slice(&[0x48, 0x8b, 0x00]);
    let outside = GeneralRegisters { gpr: [END; 16], ..start };
    assert_eq!(rig.native.run(&outside, Program::Long, 1, &mut memory), Ended::Fault(libc::SIGSEGV));
    // A division by zero.
    memory[..2].copy_from_slice(&[0xf7, 0xf1]);
    let zero = GeneralRegisters { gpr: [0; 16], ..start };
    assert_eq!(rig.native.run(&zero, Program::Long, 1, &mut memory), Ended::Fault(libc::SIGFPE));
}
