//! What the interpreter carries out, the processor carries out to the same registers, flags and memory.
//!
//! The short form takes every opcode with its operand sizes, and 50,000 random sequences.
//! `IOPLANE_DIFFERENTIAL_RUNS=1000000` is the long form, `script/test nightly:differential`.

use ioplane_vcpu::{GeneralRegisters, SystemRegisters, registers};
use registers::rflags;

use crate::arena::{CODE, DATA, END};
use crate::coverage;
use crate::generate::{self, FLAT, SYSTEM};
use crate::native::{Ended, Program};
use crate::rig::{Rig, runs_and_seed};

fn rig(system: SystemRegisters, seed: u64) -> Rig {
    let (program, bits) = if system.code_long { (Program::Long, 64) } else { (Program::Flat32, 32) };
    Rig::new(system, program, bits, CODE, seed)
}

#[test]
fn every_opcode_as_the_processor_does_it() {
    let mut rig = rig(SYSTEM, 1);
    every_opcode(&mut rig, generate::all_shapes());
    coverage::check(&rig.executed);
}

#[test]
fn every_opcode_of_32_bit_mode_as_the_processor_does_it() {
    let mut rig = rig(FLAT, 5);
    every_opcode(&mut rig, generate::all_shapes().filter(|shape| shape.rex.is_none()));
    coverage::check_32(&rig.executed);
}

fn every_opcode(rig: &mut Rig, shapes: impl Iterator<Item = generate::Shape>) {
    let system = rig.system;
    for shape in shapes {
        for _ in 0..2 {
            let code = generate::encode(&shape, &system, &mut rig.random);
            rig.compare(&code, 1, |random| generate::registers(&system, random));
        }
    }
    println!("{} instruction forms, stops: {:?}", rig.executed.len(), rig.stopped);
}

#[test]
fn random_sequences_as_the_processor_does_them() {
    let (runs, seed) = runs_and_seed(2);
    for (system, runs) in [(SYSTEM, runs), (FLAT, runs / 4)] {
        rig(system, seed).sequences(
            runs,
            |random| {
                let mut shape = generate::random_shape(random);
                if !system.code_long {
                    shape.rex = None;
                }
                generate::encode(&shape, &system, random)
            },
            |random| generate::registers(&system, random),
        );
    }
}

#[test]
fn the_rig_finds_a_difference() {
    let mut rig = rig(SYSTEM, 3);
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
