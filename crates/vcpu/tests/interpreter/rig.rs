//! The interpreter and the processor side by side: the same code from the same state, compared.

use std::collections::BTreeMap;

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use ioplane_vcpu::{
    GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters, registers,
};
use registers::rflags;

use crate::arena::{Arena, BASE, SIZE, Surroundings};
use crate::generate::Random;
use crate::native::{Ended, Native, Program};

/// The flags that user code can change and that a signal handler can put in place. ID is not among them.
const COMPARED: u64 = rflags::STATUS | rflags::DF;

pub struct Rig {
    pub system: SystemRegisters,
    /// As what the processor takes the code.
    pub program: Program,
    pub bits: u32,
    /// RIP of the arena's first byte.
    pub origin: u64,
    interpreter: Interpreter,
    pub native: Native,
    pub random: Random,
    pub template: Vec<u8>,
    pub executed: BTreeMap<Code, u64>,
    pub stopped: BTreeMap<String, u64>,
}

impl Rig {
    pub fn new(system: SystemRegisters, program: Program, bits: u32, origin: u64, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut template: Vec<u8> = (0..SIZE).map(|_| random.byte()).collect();
        // HLT, which user code cannot run, around the code.
        template[..0x1000].fill(0xf4);
        Self {
            system,
            program,
            bits,
            origin,
            interpreter: Interpreter::new(),
            native: Native::new(),
            random,
            template,
            executed: BTreeMap::new(),
            stopped: BTreeMap::new(),
        }
    }

    /// Where the stack's top is in the arena.
    fn top(&self, general: &GeneralRegisters) -> usize {
        let stack = general.gpr[registers::RSP];
        usize::try_from(if self.bits == 16 { stack & 0xffff } else { stack - BASE }).unwrap()
    }

    pub fn decode(&self, bytes: &[u8]) -> Instruction {
        Decoder::with_ip(self.bits, bytes, self.origin, DecoderOptions::NONE).decode()
    }

    /// Runs the code in both and compares; says how many instructions were carried out. `start` makes the registers.
    pub fn compare(
        &mut self,
        code: &[u8],
        most: u32,
        start: impl FnOnce(&mut Random) -> GeneralRegisters,
    ) -> u64 {
        let mut memory = self.template.clone();
        let start = start(&mut self.random);
        memory[..code.len()].copy_from_slice(code);
        let top = self.top(&start);
        if self.random.one_in(4) {
            // Somewhere to return to. The upper half is 0, as 32-bit code has it; 16-bit code takes two or four bytes.
            let target = self.origin + self.random.below(SIZE as u64);
            let bytes = if self.bits == 16 { 4 } else { 8 };
            memory[top..top + bytes].copy_from_slice(&target.to_le_bytes()[..bytes]);
        }
        // What follows the code counts as well, if it is cut off.
        let instruction = self.decode(&memory[..15]);
        if instruction.segment_prefix() == Register::FS {
            // This process has a base there.
            return 0;
        }
        if is_flags_word(&instruction) {
            keep_flags_harmless(&mut memory, top);
        }
        let most = if is_flags_word(&instruction) { 1 } else { most };

        let mut arena = Arena::new(memory.clone());
        let (bits, origin) = (self.bits, self.origin);
        let decode = |arena: &Arena, rip: u64| {
            let code = arena.bytes.get(usize::try_from(rip.checked_sub(origin)?).ok()?..)?;
            Some(Decoder::with_ip(bits, code, rip, DecoderOptions::NONE).decode())
        };
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
        let ended = self.native.run(&start, self.program, executed, &mut native_memory);
        let what = || {
            let decoder = Decoder::with_ip(bits, code, origin, DecoderOptions::NONE);
            let codes: Vec<Code> = decoder.into_iter().take(4).map(|one| one.code()).collect();
            format!("{code:02x?} {codes:?} from {start:x?}")
        };
        let Ended::Complete(mut native) = ended else {
            panic!("the processor faults ({ended:?}), the interpreter goes on: {}", what())
        };
        if matches!(instruction.mnemonic(), Mnemonic::Pushfq | Mnemonic::Pushfd | Mnemonic::Pushf) {
            // The processor was stepping, and says so in the word that it pushes.
            native_memory[self.top(&native) + 1] &= !1;
        }
        let mut ours = general;
        for side in [&mut ours, &mut native] {
            side.rflags &= compared;
            if bits != 64 {
                // What such code cannot see: upper halves, and R8 and above.
                side.gpr[..8].iter_mut().for_each(|register| *register &= u64::from(u32::MAX));
                side.gpr[8..].fill(0);
            }
        }
        let program = self.program;
        assert_eq!(ours, native, "registers (ours, the processor's) after {} as {program:x?}", what());
        if let Some(at) = arena.bytes.iter().zip(&native_memory).position(|(a, b)| a != b) {
            let (a, b) = (arena.bytes[at], native_memory[at]);
            panic!("memory at {at:x}: {a:02x}, the processor has {b:02x}, after {} as {program:x?}", what());
        }
        executed
    }

    /// Random sequences of four instructions, until so many have been carried out at least in part.
    pub fn sequences(
        &mut self,
        runs: u64,
        encode: impl Fn(&mut Random) -> Vec<u8>,
        start: impl Fn(&mut Random) -> GeneralRegisters,
    ) {
        let (mut done, mut instructions) = (0, 0);
        while done < runs {
            let mut code = Vec::new();
            for _ in 0..4 {
                let bytes = encode(&mut self.random);
                let one = self.decode(&bytes);
                if !one.is_invalid() && !is_flags_word(&one) {
                    code.extend_from_slice(&bytes[..one.len()]);
                }
            }
            let executed = self.compare(&code, 4, &start);
            done += u64::from(executed > 0);
            instructions += executed;
        }
        let forms = self.executed.len();
        println!("{:x?}: {runs} sequences, {instructions} instructions, {forms} forms", self.program);
    }
}

/// Interprets one instruction after the other, `most` at most; says what the registers are then, how many were carried out, and which
/// flags are to be compared.
fn interpret(
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

fn is_unfit(one: &Instruction) -> bool {
    is_flags_word(one) || one.segment_prefix() == Register::FS
}

pub fn is_flags_word(one: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(one.mnemonic(), M::Popfq | M::Pushfq | M::Popfd | M::Pushfd | M::Popf | M::Pushf)
}

/// The interpreter shifts and rotates by CL only. By more than 1 OF is undefined, and an Intel Xeon was found on which it
/// then differs between CL and a number in the instruction.
fn is_shift_by_number(one: &Instruction) -> bool {
    use Mnemonic as M;
    let shifts = matches!(
        one.mnemonic(),
        M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shl | M::Shr | M::Sar | M::Shld | M::Shrd
    );
    shifts && one.op_kinds().any(|kind| kind == OpKind::Immediate8) && one.immediate8() != 1
}

fn compares_strings(one: &Instruction) -> bool {
    use Mnemonic as M;
    let strings = [M::Cmpsb, M::Cmpsw, M::Cmpsd, M::Cmpsq, M::Scasb, M::Scasw, M::Scasd, M::Scasq]
        .contains(&one.mnemonic());
    strings && (one.has_rep_prefix() || one.has_repne_prefix())
}

/// Alignment checks and nested tasks would follow this process out of the test.
fn keep_flags_harmless(memory: &mut [u8], at: usize) {
    let word = u64::from_le_bytes(memory[at..at + 8].try_into().unwrap());
    let harmless = word & !(rflags::AC | rflags::NT | rflags::TF | rflags::RF | rflags::ID);
    memory[at..at + 8].copy_from_slice(&harmless.to_le_bytes());
}

/// How many random sequences to run, and from which seed: `seed` unless the environment names another, as the long form does each
/// night. Printed, so that a failure can be repeated.
pub fn runs_and_seed(seed: u64) -> (u64, u64) {
    let runs = number("IOPLANE_DIFFERENTIAL_RUNS").unwrap_or(50_000);
    let seed = number("IOPLANE_DIFFERENTIAL_SEED").unwrap_or(seed);
    println!("IOPLANE_DIFFERENTIAL_RUNS={runs} IOPLANE_DIFFERENTIAL_SEED={seed}");
    (runs, seed)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|number| number.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}
