//! RDTSC and RDTSCP: the value cannot be the processor's, all else is.

use ioplane_vcpu::{
    GeneralRegisters, Interpreter, RunBudget, RunEnd, StopReason, SystemRegisters, registers,
};
use registers::{RAX, RCX, RDX, cr4, rflags};

use crate::arena::{Arena, CODE, SIZE};
use crate::generate::SYSTEM;
use crate::native::{Ended, Native, Program, stay_on_one_processor, time_stamp};
use crate::quiet::Quiet;

const RDTSC: &[u8] = &[0x0f, 0x31];
const RDTSCP: &[u8] = &[0x0f, 0x01, 0xf9];

fn memory(code: &[u8]) -> Vec<u8> {
    let mut memory = vec![0xf4; SIZE];
    memory[..code.len()].copy_from_slice(code);
    memory
}

fn start() -> GeneralRegisters {
    GeneralRegisters { gpr: [u64::MAX; 16], rip: CODE, rflags: rflags::ONE | rflags::IF | rflags::STATUS }
}

fn interpret(code: &[u8], system: &SystemRegisters, known: bool) -> (GeneralRegisters, StopReason) {
    let mut general = start();
    let end = Interpreter::new().run(
        &mut general,
        system,
        &mut Arena::new(memory(code)),
        // The guest's counter is this processor's, if it is known.
        &mut Quiet { time_stamp: known.then_some(time_stamp) },
        &mut [],
        &mut RunBudget { instructions: 1, accesses: 0, deadline: u64::MAX },
    );
    match end {
        RunEnd::Stopped(reason) => (general, reason),
        RunEnd::Access(access, _) => panic!("{access:?}"),
    }
}

fn value(general: &GeneralRegisters) -> u64 {
    assert!(general.gpr[RAX] <= 0xffff_ffff && general.gpr[RDX] <= 0xffff_ffff, "the upper halves are 0");
    general.gpr[RDX] << 32 | general.gpr[RAX]
}

#[test]
fn the_counter_goes_on_and_all_else_is_as_the_processor_has_it() {
    stay_on_one_processor();
    let mut native = Native::new();
    for code in [RDTSC, RDTSCP] {
        let mut by_processor = || match native.run(&start(), Program::Long, 1, &mut memory(code)) {
            Ended::Complete(general) => general,
            Ended::Fault(signal) => panic!("signal {signal}"),
        };
        let before = by_processor();
        let (mut ours, reason) = interpret(code, &SYSTEM, true);
        let after = by_processor();
        assert_eq!(reason, StopReason::InstructionLimit);
        let values = [&before, &ours, &after].map(value);
        assert!(values.is_sorted(), "{code:02x?}: {values:x?}");
        assert_eq!(ours.gpr[RCX] == u64::MAX, code == RDTSC);
        for register in [RAX, RDX] {
            ours.gpr[register] = after.gpr[register];
        }
        ours.rflags &= !rflags::TF;
        let after = GeneralRegisters { rflags: after.rflags & !rflags::TF, ..after };
        assert_eq!(ours, after, "{code:02x?}");
    }
}

#[test]
fn what_is_not_known_or_not_allowed_changes_nothing() {
    let forbidden = SystemRegisters { cr4: SYSTEM.cr4 | cr4::TSD, ..SYSTEM };
    let supervisor = SystemRegisters { cpl: 0, ..forbidden };
    for code in [RDTSC, RDTSCP] {
        assert_eq!(interpret(code, &SYSTEM, false), (start(), StopReason::Instruction), "not known");
        assert_eq!(interpret(code, &forbidden, true), (start(), StopReason::Privilege), "CR4.TSD");
        assert_eq!(interpret(code, &supervisor, true).1, StopReason::InstructionLimit, "at level 0");
        for prefix in [0x66, 0xf2, 0xf3, 0x48, 0x65] {
            let code = [&[prefix], code].concat();
            assert_eq!(interpret(&code, &SYSTEM, true), (start(), StopReason::Instruction), "{code:02x?}");
        }
        let locked = [&[0xf0], code].concat();
        assert_eq!(interpret(&locked, &SYSTEM, true), (start(), StopReason::Instruction));
    }
}
