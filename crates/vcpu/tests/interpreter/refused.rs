//! An access that is refused or panics in the middle of an instruction leaves the state as before that instruction.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ioplane_vcpu::{GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters};

use crate::arena::{Arena, SIZE, Surroundings};
use crate::code16::{self, LAYOUTS};
use crate::generate::{self, FLAT, Random, SYSTEM};
use crate::segments32;

/// Refuses each access of an instruction in turn, and has each panic.
struct Refusal {
    interpreter: Interpreter,
    template: Vec<u8>,
    refused: u64,
    deepest: usize,
}

impl Refusal {
    fn new(random: &mut Random) -> Self {
        let template = (0..SIZE).map(|_| random.byte()).collect();
        Self { interpreter: Interpreter::new(), template, refused: 0, deepest: 0 }
    }

    fn each(&mut self, code: &[u8], system: &SystemRegisters, start: GeneralRegisters) {
        let mut memory = self.template.clone();
        memory[..code.len()].copy_from_slice(code);
        for denied in 0.. {
            let mut arena = Arena::new(memory.clone());
            arena.deny = Some(denied);
            let mut general = start;
            let before = self.interpreter.executed();
            let end = self.run(&mut general, system, &mut arena);
            if !arena.denied {
                break;
            }
            self.refused += 1;
            self.deepest = self.deepest.max(denied);
            assert!(matches!(end, RunEnd::Stopped(StopReason::Slot)), "{code:02x?}: {end:?}");
            let unchanged = |interpreter: &Interpreter, general: GeneralRegisters, arena: &Arena| {
                assert_eq!(interpreter.executed(), before, "{code:02x?} counts as done");
                assert_eq!(general, start, "{code:02x?}, access {denied}");
                assert!(arena.bytes == memory, "{code:02x?}: memory changed, access {denied}");
            };
            unchanged(&self.interpreter, general, &arena);
            (arena.deny, arena.panic, arena.accesses) = (None, Some(denied), 0);
            let ended = catch_unwind(AssertUnwindSafe(|| self.run(&mut general, system, &mut arena)));
            assert!(ended.is_err(), "{code:02x?}, access {denied}: {ended:?}");
            unchanged(&self.interpreter, general, &arena);
        }
    }

    fn run(&mut self, general: &mut GeneralRegisters, system: &SystemRegisters, arena: &mut Arena) -> RunEnd {
        let mut budget = RunBudget { instructions: 1, accesses: 1, deadline: u64::MAX };
        let surroundings = &mut Surroundings::default();
        self.interpreter.run(general, system, arena, surroundings, &mut [0; 4096], &mut budget)
    }

    fn enough(&self) {
        println!("{} accesses refused, at most the {}th of an instruction", self.refused, self.deepest);
        assert!(self.refused > 10_000 && self.deepest >= 2);
    }
}

/// Supervisor code as well, which may use ports.
#[test]
fn a_refused_access_leaves_no_trace() {
    let mut random = Random(4);
    let mut refusal = Refusal::new(&mut random);
    let long = SystemRegisters { cpl: 0, ..SYSTEM };
    let flat = SystemRegisters { cpl: 0, ..FLAT };
    let shapes_32 = generate::all_shapes().filter(|shape| shape.rex.is_none()).map(|shape| (flat, shape));
    for (supervisor, shape) in generate::all_shapes().map(|shape| (long, shape)).chain(shapes_32) {
        let code = generate::encode(&shape, &supervisor, &mut random);
        let start = generate::registers(&supervisor, &mut random);
        refusal.each(&code, &supervisor, start);
    }
    refusal.enough();
}

#[test]
fn a_refused_access_of_16_bit_code_leaves_no_trace() {
    let mut random = Random(10);
    for layout in LAYOUTS {
        let mut refusal = Refusal::new(&mut random);
        let supervisor = SystemRegisters { cpl: 0, ..layout.system() };
        for shape in code16::shapes() {
            let code = code16::encode(&shape, layout, &mut random);
            let start = code16::registers(layout, &mut random);
            refusal.each(&code, &supervisor, start);
        }
        refusal.enough();
    }
}

#[test]
fn a_refused_access_by_a_segment_of_32_bit_mode_leaves_no_trace() {
    let mut random = Random(14);
    let mut refusal = Refusal::new(&mut random);
    for layout in segments32::LAYOUTS {
        let supervisor = SystemRegisters { cpl: 0, ..layout.system() };
        for shape in segments32::shapes() {
            let code = segments32::encode(&shape, layout, &mut random);
            let start = segments32::registers(layout, &mut random);
            refusal.each(&code, &supervisor, start);
        }
    }
    refusal.enough();
}
