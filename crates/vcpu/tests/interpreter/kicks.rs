//! A kick in any instruction of a run ends the run between two instructions, and no device is asked after it.

use ioplane_vcpu::{GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters};

use crate::arena::{Arena, CODE, SIZE, Surroundings};
use crate::generate::{self, FLAT, Random, SYSTEM};

/// Steps within which a kick must be noticed: the one that it comes in, and those until the next look.
const NOTICED_WITHIN: u64 = 8;
/// Of a program, which then begins again.
const INSTRUCTIONS: usize = 40;
/// Of a string instruction; what jumps to itself does not end either.
const ELEMENTS: u32 = 8;
/// Of a run.
const MOST: u32 = 100;

struct Guest {
    interpreter: Interpreter,
    system: SystemRegisters,
    general: GeneralRegisters,
    arena: Arena,
    answers: u8,
}

impl Guest {
    fn new(system: SystemRegisters, general: GeneralRegisters, memory: Vec<u8>) -> Self {
        Self { interpreter: Interpreter::new(), system, general, arena: Arena::new(memory), answers: 0 }
    }

    /// Runs until a stop or a device access, which is answered; `None` after that.
    fn run(&mut self, budget: &mut RunBudget, surroundings: &mut Surroundings) -> Option<StopReason> {
        let mut data = [0; 4096];
        let (general, arena) = (&mut self.general, &mut self.arena);
        match self.interpreter.run(general, &self.system, arena, surroundings, &mut data, budget) {
            RunEnd::Stopped(reason) => Some(reason),
            RunEnd::Access(_, pending) => {
                self.answers = self.answers.wrapping_add(1);
                data.fill(self.answers);
                self.interpreter.complete(pending, general, arena, &data, self.answers.into());
                None
            }
        }
    }

    /// One instruction, or one element of a string instruction on memory; false at a stop.
    fn step(&mut self) -> bool {
        let mut one = RunBudget { instructions: 1, accesses: 1, deadline: u64::MAX };
        matches!(self.run(&mut one, &mut Surroundings::default()), None | Some(StopReason::InstructionLimit))
    }

    fn state(&self) -> State {
        State { general: self.general, memory: self.arena.bytes.clone(), answers: self.answers }
    }
}

#[derive(Clone, PartialEq, Eq)]
struct State {
    general: GeneralRegisters,
    memory: Vec<u8>,
    answers: u8,
}

/// A program of instructions that can be carried out one after the other, and the state that it begins with.
fn program(system: SystemRegisters, random: &mut Random) -> State {
    let mut memory: Vec<u8> = (0..SIZE).map(|_| random.byte()).collect();
    memory[..0x1000].fill(0xf4);
    let general = generate::registers(&system, random);
    let mut guest = Guest::new(system, general, memory.clone());
    let mut instructions = 0;
    while instructions < INSTRUCTIONS {
        let mut shape = generate::random_shape(random);
        if !system.code_long {
            shape.rex = None;
        }
        let before = guest.state();
        let at = before.general.rip;
        guest.arena.put(at, &generate::encode(&shape, &system, random));
        let done = (0..ELEMENTS).all(|_| guest.general.rip != at || guest.step());
        if done && (at + 1..at + 16).contains(&guest.general.rip) {
            instructions += 1;
        } else {
            (guest.general, guest.arena.bytes, guest.answers) =
                (before.general, before.memory, before.answers);
        }
    }
    // JMP to the beginning.
    let at = guest.general.rip;
    guest.arena.put(at, &[0xe9]);
    guest.arena.put(at + 1, &u32::try_from(CODE.wrapping_sub(at + 5) & 0xffff_ffff).unwrap().to_le_bytes());
    memory[..0x1000].copy_from_slice(&guest.arena.bytes[..0x1000]);
    State { general, memory, answers: 0 }
}

#[test]
fn a_kick_in_any_instruction_leaves_complete_instructions() {
    let mut random = Random(16);
    let (mut kicked, mut answered) = (0, 0);
    for round in 0..60 {
        let system = SystemRegisters { cpl: 0, ..[SYSTEM, FLAT][round % 2] };
        let start = program(system, &mut random);
        let begin = || Guest::new(system, start.general, start.memory.clone());
        let mut guest = begin();
        let mut after = vec![guest.state()];
        // The budget does not count those that ask a device.
        while after.len() <= 2 * MOST as usize && guest.step() {
            after.push(guest.state());
        }
        for step in 1..=guest.arena.fetches.get() {
            let mut guest = begin();
            let fetches = guest.arena.fetches.clone();
            let mut surroundings =
                Surroundings { kick_in_step: Some((fetches.clone(), step)), ..Surroundings::default() };
            let mut budget = RunBudget { instructions: MOST, accesses: MOST, deadline: u64::MAX };
            let reason = loop {
                match guest.run(&mut budget, &mut surroundings) {
                    Some(reason) => break reason,
                    None => assert!(fetches.get() < step, "a device was asked after the kick in step {step}"),
                }
            };
            let executed = usize::try_from(guest.interpreter.executed()).unwrap();
            assert!(
                guest.state() == after[executed],
                "round {round}, step {step}: {reason:?} after {executed}"
            );
            assert!(fetches.get() < step + NOTICED_WITHIN, "round {round}, step {step}: {}", fetches.get());
            if reason == StopReason::Kicked {
                kicked += 1;
                answered += usize::from(guest.answers);
            }
        }
    }
    println!("{kicked} kicks, {answered} answers of devices before them");
    assert!(kicked > 2000 && answered > 2000);
}
