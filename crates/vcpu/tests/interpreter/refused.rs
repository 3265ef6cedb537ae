//! An access that is refused in the middle of an instruction leaves the state as before that instruction.

use ioplane_vcpu::{Interpreter, RunBudget, RunEnd, StopReason, registers};

use crate::arena::{Arena, CODE, SIZE, Surroundings};
use crate::generate::{self, FLAT, Random, SYSTEM};

#[test]
fn a_refused_access_leaves_no_trace() {
    let mut random = Random(4);
    let template: Vec<u8> = (0..SIZE).map(|_| random.byte()).collect();
    let mut interpreter = Interpreter::new();
    // Supervisor code as well, which may use ports.
    let long = registers::SystemRegisters { cpl: 0, ..SYSTEM };
    let flat = registers::SystemRegisters { cpl: 0, ..FLAT };
    let (mut refused, mut deepest) = (0_u64, 0);
    let shapes_32 = generate::all_shapes().filter(|shape| shape.rex.is_none()).map(|shape| (flat, shape));
    for (supervisor, shape) in generate::all_shapes().map(|shape| (long, shape)).chain(shapes_32) {
        let code = generate::encode(&shape, &supervisor, &mut random);
        let start = generate::registers(&supervisor, &mut random);
        let mut memory = template.clone();
        memory[..code.len()].copy_from_slice(&code);
        for denied in 0.. {
            let mut arena = Arena::new(memory.clone());
            arena.deny = Some(denied);
            let mut general = start;
            let before = interpreter.executed();
            let end = interpreter.run(
                &mut general,
                &supervisor,
                &mut arena,
                &mut Surroundings::default(),
                &mut [0; 4096],
                &mut RunBudget { instructions: 1, accesses: 1, deadline: u64::MAX },
            );
            if !arena.denied {
                break;
            }
            refused += 1;
            deepest = deepest.max(denied);
            assert_eq!(interpreter.executed(), before, "{code:02x?} counts as done");
            assert!(matches!(end, RunEnd::Stopped(StopReason::Slot)), "{code:02x?}: {end:?}");
            assert_eq!(general, start, "{code:02x?} at {CODE:x}, access {denied} refused");
            assert!(arena.bytes == memory, "{code:02x?}: memory changed, access {denied} refused");
        }
    }
    println!("{refused} accesses refused, at most the {deepest}th of an instruction");
    assert!(refused > 10_000 && deepest >= 2);
}
