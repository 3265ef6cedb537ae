//! Many elements of a string instruction in one step are as many steps with one element.

use ioplane_vcpu::{
    GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters, registers,
};
use registers::{RAX, RCX, RDI, RSI, rflags};

use crate::arena::{Arena, CODE, DATA, END, SIZE, Surroundings};
use crate::generate::{FLAT, Random, SYSTEM};

/// The end, what is in memory then, and how many elements were done.
fn run(
    start: &GeneralRegisters,
    system: &SystemRegisters,
    memory: &[u8],
    most: u32,
) -> (GeneralRegisters, StopReason, Vec<u8>, u64) {
    let (mut general, mut arena, mut interpreter) = (*start, Arena::new(memory.to_vec()), Interpreter::new());
    loop {
        let end = interpreter.run(
            &mut general,
            system,
            &mut arena,
            &mut Surroundings::default(),
            &mut [],
            &mut RunBudget { instructions: most, accesses: 0, deadline: u64::MAX },
        );
        match end {
            RunEnd::Stopped(StopReason::InstructionLimit) => {}
            RunEnd::Stopped(reason) => return (general, reason, arena.bytes, interpreter.executed()),
            RunEnd::Access(access, _) => panic!("{access:?}"),
        }
    }
}

#[test]
fn many_at_once_are_as_many_one_by_one() {
    let mut random = Random(6);
    let (mut elements, mut halted, mut refused) = (0, 0, 0);
    for round in 0..4000 {
        let long = random.one_in(2);
        let system = if long { SYSTEM } else { FLAT };
        let mut memory: Vec<u8> = (0..SIZE).map(|_| random.byte() & 3).collect();
        memory[..0x1000].fill(0xf4);
        let opcodes = [0xa4, 0xa5, 0xa6, 0xa7, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf];
        let opcode = opcodes[usize::try_from(random.below(10)).unwrap()];
        let mut code = vec![if random.one_in(4) { 0xf2 } else { 0xf3 }];
        if random.one_in(3) {
            code.insert(0, 0x66);
        } else if long && random.one_in(2) {
            code.push(0x48);
        }
        code.push(opcode);
        memory[..code.len()].copy_from_slice(&code);
        let mut gpr = [0; 16];
        gpr[RAX] = random.below(4) * 0x0101_0101;
        gpr[RCX] = random.below(100);
        gpr[RSI] = DATA + random.below(END - DATA);
        // Near each other, so that they overlap; or near the end of memory, which they reach.
        gpr[RDI] = if random.one_in(2) { gpr[RSI] + random.below(9) } else { END - random.below(60) };
        let down = if random.one_in(3) { rflags::DF } else { 0 };
        let start = GeneralRegisters { gpr, rip: CODE, rflags: rflags::ONE | down };
        let many = run(&start, &system, &memory, 10_000);
        let single = run(&start, &system, &memory, 1);
        assert!(
            many == single,
            "round {round}, {code:02x?} from {start:x?}: {:x?}, one by one {:x?}",
            many.0,
            single.0
        );
        elements += many.3;
        match many.1 {
            StopReason::Slot => refused += 1,
            _ => halted += 1,
        }
    }
    assert!(elements > 40_000 && halted > 500 && refused > 300, "{elements} {halted} {refused}");
}

/// A fault of the interpreter in the middle of a string leaves what was done before it done, in registers as in memory.
#[test]
fn a_panic_leaves_the_elements_before_it_complete() {
    let mut memory = vec![0xf4; SIZE];
    // REP MOVSB, downwards by 1: done twice it moves twice.
    memory[..2].copy_from_slice(&[0xf3, 0xa4]);
    let mut gpr = [0; 16];
    (gpr[RCX], gpr[RSI], gpr[RDI]) = (20, DATA + 1, DATA);
    let start = GeneralRegisters { gpr, rip: CODE, rflags: rflags::ONE };
    // The code, and two accesses for each element.
    for (accesses, elements) in [(1, 0), (2, 0), (3, 1), (10, 4), (40, 19)] {
        let (mut general, mut arena) = (start, Arena::new(memory.clone()));
        arena.panic = Some(accesses);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut budget = RunBudget { instructions: 100, accesses: 0, deadline: u64::MAX };
            let surroundings = &mut Surroundings::default();
            Interpreter::new().run(&mut general, &SYSTEM, &mut arena, surroundings, &mut [], &mut budget)
        }));
        assert!(ended.is_err());
        let done = (20 - general.gpr[RCX], general.gpr[RSI] - DATA - 1, general.gpr[RDI] - DATA, general.rip);
        assert_eq!(done, (elements, elements, elements, CODE), "access {accesses}");
    }
}
