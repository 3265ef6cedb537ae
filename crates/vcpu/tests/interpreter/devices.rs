//! Ports, device memory, and what ends a run.

use ioplane_vcpu::{
    DeviceAccess, GeneralRegisters, Interpreter, OperandSize, PendingAccess, RunBudget, RunEnd, StopReason,
    SystemRegisters, registers,
};
use registers::{RAX, RCX, RDI, RDX, RSI, RSP, cr4, rflags};

use crate::arena::{Arena, BASE, CODE, DATA, DEVICE, DEVICE_ADDRESS, SIZE, Surroundings};
use crate::generate::{FLAT, SYSTEM};

const SUPERVISOR: SystemRegisters = SystemRegisters { cpl: 0, ..SYSTEM };

pub struct Machine {
    pub interpreter: Interpreter,
    pub general: GeneralRegisters,
    pub system: SystemRegisters,
    pub arena: Arena,
    surroundings: Surroundings,
    pub data: Vec<u8>,
    budget: RunBudget,
}

impl Machine {
    pub fn new(code: &[u8]) -> Self {
        let mut arena = Arena::new(vec![0xf4; SIZE]);
        arena.put(CODE, code);
        let mut gpr = [0; 16];
        gpr[RSP] = DATA + 0x800;
        Self {
            interpreter: Interpreter::new(),
            general: GeneralRegisters { gpr, rip: CODE, rflags: rflags::ONE },
            system: SUPERVISOR,
            arena,
            surroundings: Surroundings::default(),
            data: vec![0; 4096],
            budget: RunBudget { instructions: 10_000, accesses: 100, deadline: u64::MAX },
        }
    }

    fn run(&mut self) -> RunEnd {
        self.interpreter.run(
            &mut self.general,
            &self.system,
            &mut self.arena,
            &mut self.surroundings,
            &mut self.data,
            &mut self.budget,
        )
    }

    pub fn access(&mut self) -> (DeviceAccess, PendingAccess) {
        match self.run() {
            RunEnd::Access(access, pending) => (access, pending),
            RunEnd::Stopped(reason) => panic!("stopped at {:x}: {reason:?}", self.general.rip),
        }
    }

    pub fn stop(&mut self) -> StopReason {
        match self.run() {
            RunEnd::Stopped(reason) => reason,
            RunEnd::Access(access, _) => panic!("an access: {access:?}"),
        }
    }

    pub fn complete(&mut self, pending: PendingAccess, value: u64) {
        self.interpreter.complete(pending, &mut self.general, &mut self.arena, &self.data, value);
    }
}

pub fn write(port: u16, size: OperandSize, count: u32) -> DeviceAccess {
    DeviceAccess::PortWrite { port, size, count }
}

pub fn read(port: u16, size: OperandSize, count: u32) -> DeviceAccess {
    DeviceAccess::PortRead { port, size, count }
}

/// The paper's eleven writes of an IDE command: one cluster.
#[test]
fn eleven_writes_of_an_ide_command() {
    let ports = [0x1f1, 0x1f2, 0x1f3, 0x1f4, 0x1f5, 0x1f1, 0x1f2, 0x1f3, 0x1f4, 0x1f5, 0x1f6_u16];
    let mut code = Vec::new();
    for (value, port) in ports.iter().enumerate() {
        // MOV EDX, port; MOV AL, value; OUT DX, AL
        code.push(0xba);
        code.extend(u32::from(*port).to_le_bytes());
        code.extend([0xb0, u8::try_from(value).unwrap() + 1, 0xee]);
    }
    let mut machine = Machine::new(&code);
    for (value, port) in ports.iter().enumerate() {
        let (access, pending) = machine.access();
        assert_eq!(access, write(*port, OperandSize::Byte, 1));
        assert_eq!(usize::from(machine.data[0]), value + 1);
        machine.complete(pending, 0);
    }
    assert_eq!(machine.stop(), StopReason::Instruction, "HLT");
    assert_eq!(machine.general.rip, CODE + code.len() as u64);
    assert_eq!(machine.interpreter.executed(), 33);
}

#[test]
fn a_read_fills_its_part_of_rax() {
    // IN AL, 0x60; IN AX, DX; IN EAX, DX
    let mut machine = Machine::new(&[0xe4, 0x60, 0x66, 0xed, 0xed]);
    machine.general.gpr[RAX] = u64::MAX;
    machine.general.gpr[RDX] = 0xffff_0cfc;
    machine.data[..4].copy_from_slice(&[0x11, 0x22, 0x33, 0x44]);
    for (wanted, after) in [
        (read(0x60, OperandSize::Byte, 1), 0xffff_ffff_ffff_ff11),
        (read(0xcfc, OperandSize::Word, 1), 0xffff_ffff_ffff_2211),
        (read(0xcfc, OperandSize::Dword, 1), 0x4433_2211),
    ] {
        let before = machine.general;
        let (access, pending) = machine.access();
        assert_eq!(access, wanted);
        assert_eq!(machine.general, before, "nothing changes before the device has answered");
        machine.complete(pending, 0);
        assert_eq!(machine.general.gpr[RAX], after);
    }
}

#[test]
fn a_dropped_access_is_a_stop_before_it() {
    let mut machine = Machine::new(&[0xee]);
    let before = machine.general;
    let (_, pending) = machine.access();
    drop(pending);
    assert_eq!(machine.general, before);
    assert_eq!(machine.access().0, write(0, OperandSize::Byte, 1), "and can be made again");
}

#[test]
fn repeated_output_carries_a_page_per_exit() {
    // REP OUTSW
    let mut machine = Machine::new(&[0xf3, 0x66, 0x6f]);
    let from = DATA + 0x1000 - 6;
    machine.general.gpr[RSI] = from;
    machine.general.gpr[RCX] = 5;
    machine.general.gpr[RDX] = 0x300;
    machine.arena.put(from, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    let (access, pending) = machine.access();
    assert_eq!((access, &machine.data[..6]), (write(0x300, OperandSize::Word, 3), &[1, 2, 3, 4, 5, 6][..]));
    machine.complete(pending, 0);
    assert_eq!((machine.general.gpr[RSI], machine.general.gpr[RCX]), (from + 6, 2));
    assert_eq!(machine.general.rip, CODE, "two elements are left");
    let (access, pending) = machine.access();
    assert_eq!((access, &machine.data[..4]), (write(0x300, OperandSize::Word, 2), &[7, 8, 9, 10][..]));
    machine.complete(pending, 0);
    assert_eq!((machine.general.gpr[RCX], machine.general.rip), (0, CODE + 3));
}

#[test]
fn repeated_input_lands_in_memory() {
    // REP INSD
    let mut machine = Machine::new(&[0xf3, 0x6d]);
    machine.general.gpr[RDI] = DATA;
    machine.general.gpr[RCX] = 2;
    machine.general.gpr[RDX] = 0x1f0;
    let (access, pending) = machine.access();
    assert_eq!(access, read(0x1f0, OperandSize::Dword, 2));
    machine.data[..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    machine.complete(pending, 0);
    let at = usize::try_from(DATA - BASE).unwrap();
    assert_eq!(machine.arena.bytes[at..at + 9], [1, 2, 3, 4, 5, 6, 7, 8, 0xf4]);
    assert_eq!((machine.general.gpr[RDI], machine.general.gpr[RCX]), (DATA + 8, 0));
    assert_eq!(machine.general.rip, CODE + 2);
}

#[test]
fn a_string_that_cannot_be_taken_asks_no_device() {
    // REP INSD downwards, across pages, to nowhere.
    for (flags, to) in [(rflags::DF, DATA), (0, DATA + 0x1000 - 2), (0, 0x5000_0000)] {
        let mut machine = Machine::new(&[0xf3, 0x6d]);
        machine.general.gpr[RDI] = to;
        machine.general.gpr[RCX] = 2;
        machine.general.rflags |= flags;
        let before = machine.general;
        machine.stop();
        assert_eq!(machine.general, before);
    }
    let mut machine = Machine::new(&[0xf3, 0x6d]);
    assert_eq!(machine.stop(), StopReason::Instruction, "HLT: a count of 0 asks for nothing");
    assert_eq!(machine.general.rip, CODE + 2);
}

#[test]
fn device_memory_is_read_and_written_by_plain_moves() {
    // MOVSX RAX, WORD [RDI+2]; MOV [RDI+4], EAX; MOV BYTE [RDI], 7
    let code = [0x48, 0x0f, 0xbf, 0x47, 0x02, 0x89, 0x47, 0x04, 0xc6, 0x07, 0x07];
    let mut machine = Machine::new(&code);
    machine.general.gpr[RDI] = DEVICE;
    let (access, pending) = machine.access();
    let size = OperandSize::Word;
    assert_eq!(access, DeviceAccess::MemoryRead { address: DEVICE_ADDRESS + 2, size });
    machine.complete(pending, 0xffff_8001);
    assert_eq!(machine.general.gpr[RAX], 0xffff_ffff_ffff_8001, "only the bytes that were asked for count");
    for (address, size, value) in
        [(DEVICE_ADDRESS + 4, OperandSize::Dword, 0xffff_8001), (DEVICE_ADDRESS, OperandSize::Byte, 7)]
    {
        let (access, pending) = machine.access();
        assert_eq!(access, DeviceAccess::MemoryWrite { address, size, value });
        machine.complete(pending, 0);
    }
    assert_eq!(machine.stop(), StopReason::Instruction);
    assert_eq!(machine.general.rip, CODE + code.len() as u64);
}

#[test]
fn other_instructions_on_device_memory_are_kvms() {
    // ADD [RDI], EAX; LOCK XADD [RDI], EAX; PUSH [RDI]; CMP [RDI], EAX; STOSB; MOVSB from it; CALL [RDI]
    let cases: [&[u8]; 7] = [
        &[0x01, 0x07],
        &[0xf0, 0x0f, 0xc1, 0x07],
        &[0xff, 0x37],
        &[0x39, 0x07],
        &[0xaa],
        &[0xa4],
        &[0xff, 0x17],
    ];
    for code in cases {
        let mut machine = Machine::new(code);
        machine.general.gpr[RDI] = DEVICE;
        machine.general.gpr[RSI] = DEVICE;
        let before = machine.general;
        assert_eq!(machine.stop(), StopReason::DeviceOperand, "{code:02x?}");
        assert_eq!(machine.general, before);
    }
}

#[test]
fn devices_of_the_kernel_are_left_to_it() {
    for code in [&[0xe6, 0x20][..], &[0xe4, 0x20], &[0x89, 0x07], &[0x8b, 0x07]] {
        let mut machine = Machine::new(code);
        machine.general.gpr[RDI] = DEVICE;
        machine.surroundings.in_kernel = vec![0x20, DEVICE_ADDRESS];
        assert_eq!(machine.stop(), StopReason::KernelDevice, "{code:02x?}");
    }
}

#[test]
fn ports_need_the_privilege() {
    let mut machine = Machine::new(&[0xee]);
    machine.system.cpl = 3;
    assert_eq!(machine.stop(), StopReason::Privilege, "the TSS has to be asked");
    machine.general.rflags |= rflags::IOPL;
    assert_eq!(machine.access().0, write(0, OperandSize::Byte, 1));
}

#[test]
fn interrupts_are_disabled_here_and_enabled_by_the_processor() {
    // CLI; STI
    let mut machine = Machine::new(&[0xfa, 0xfb]);
    machine.general.rflags |= rflags::IF;
    assert_eq!(machine.stop(), StopReason::InterruptWindow);
    assert_eq!((machine.general.rip, machine.general.rflags & rflags::IF), (CODE + 1, 0));
    // PUSHFQ; CLI; POPFQ: the last enables them again.
    let mut machine = Machine::new(&[0x9c, 0xfa, 0x9d]);
    machine.general.rflags |= rflags::IF;
    assert_eq!(machine.stop(), StopReason::InterruptWindow);
    assert_eq!(machine.general.rip, CODE + 2);
    assert_eq!(machine.general.gpr[RSP], DATA + 0x800 - 8);
    // STI where they are enabled does nothing.
    let mut machine = Machine::new(&[0xfb]);
    machine.general.rflags |= rflags::IF;
    assert_eq!(machine.stop(), StopReason::Instruction, "HLT");
    // POPFQ that sets TF is the processor's.
    let mut machine = Machine::new(&[0x9d]);
    machine.arena.put(DATA + 0x800, &rflags::TF.to_le_bytes());
    assert_eq!(machine.stop(), StopReason::Instruction);
    assert_eq!(machine.general.gpr[RSP], DATA + 0x800);
}

#[test]
fn a_run_goes_on_with_interrupts_enabled_if_none_waits() {
    let quiet = |code: &[u8]| {
        let mut machine = Machine::new(code);
        machine.surroundings.may_enable_interrupts = true;
        machine.general.gpr[RDI] = DATA;
        machine
    };
    // STI; NOP
    let mut machine = quiet(&[0xfb, 0x90]);
    assert_eq!(machine.stop(), StopReason::Instruction, "HLT");
    assert_eq!((machine.general.rip, machine.general.rflags & rflags::IF), (CODE + 2, rflags::IF));
    assert_eq!(machine.interpreter.executed(), 2);
    // STI; STOSB, of which one is done
    let mut machine = quiet(&[0xfb, 0xf3, 0xaa]);
    machine.general.gpr[RCX] = 3;
    machine.budget.instructions = 2;
    assert_eq!(machine.stop(), StopReason::InstructionLimit);
    assert_eq!((machine.general.rip, machine.general.gpr[RCX]), (CODE + 1, 2));
    // What follows STI is not done: HLT, OUT, a store to a device or to nowhere, STI; CLI; STI; HLT.
    let cases: [&[u8]; 4] = [&[0xfb, 0xf4], &[0xfb, 0xee], &[0xfb, 0x89, 0x07], &[0xfb, 0x89, 0x06]];
    for code in cases {
        let mut machine = quiet(code);
        machine.general.gpr[RDI] = DEVICE;
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::InterruptWindow, "{code:02x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "neither is done: {code:02x?}");
    }
    // PUSHFQ; CLI; POPFQ: no instruction is held.
    let mut machine = quiet(&[0x9c, 0xfa, 0x9d, 0xee]);
    machine.general.rflags |= rflags::IF;
    assert_eq!(machine.access().0, write(0, OperandSize::Byte, 1));
    assert_eq!(machine.general.rflags & rflags::IF, rflags::IF);
}

#[test]
fn an_interrupt_that_waits_ends_a_run_that_has_them_enabled() {
    // JMP to itself.
    let mut machine = Machine::new(&[0xeb, 0xfe]);
    machine.surroundings.interrupt_at = Some(3);
    assert_eq!(machine.stop(), StopReason::InstructionLimit, "disabled");
    let mut machine = Machine::new(&[0xeb, 0xfe]);
    machine.surroundings.interrupt_at = Some(3);
    machine.general.rflags |= rflags::IF;
    assert_eq!(machine.stop(), StopReason::InterruptWindow);
    assert_eq!(machine.interpreter.executed(), 24, "after three looks");
}

#[test]
fn supervisor_access_is_a_flag() {
    // STAC; CLAC
    let mut machine = Machine::new(&[0x0f, 0x01, 0xcb]);
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Instruction, CODE));
    machine.system.cr4 |= cr4::SMAP;
    machine.stop();
    assert_eq!((machine.general.rip, machine.general.rflags & rflags::AC), (CODE + 3, rflags::AC));
}

#[test]
fn every_run_is_bounded() {
    // JMP to itself.
    let mut machine = Machine::new(&[0xeb, 0xfe]);
    assert_eq!(machine.stop(), StopReason::InstructionLimit);
    assert_eq!(machine.interpreter.executed(), 10_000);
    let mut machine = Machine::new(&[0xeb, 0xfe]);
    machine.budget.deadline = 5;
    assert_eq!(machine.stop(), StopReason::TimeLimit);
    assert!(machine.interpreter.executed() <= 40);
    let mut machine = Machine::new(&[0xeb, 0xfe]);
    machine.surroundings.kick_at = Some(3);
    assert_eq!(machine.stop(), StopReason::Kicked);
    // OUT, again and again.
    let mut machine = Machine::new(&[0xee, 0xeb, 0xfd]);
    machine.budget.accesses = 3;
    for _ in 0..3 {
        let (_, pending) = machine.access();
        machine.complete(pending, 0);
    }
    assert_eq!(machine.stop(), StopReason::AccessLimit);
    assert_eq!(machine.general.rip, CODE);
}

/// As firmware has it: 32-bit code, flat segments, no paging.
#[test]
fn devices_in_32_bit_mode() {
    // MOV EDX, 0xcf8; MOV EAX, 0x80000000; OUT DX, EAX; MOV DL, 0xfc; IN AX, DX; MOV EBX, [ESI+2]; MOV [ESI-4], AL;
    // REP INSW; DS OUTSB
    let code = [
        0xba, 0xf8, 0x0c, 0, 0, 0xb8, 0, 0, 0, 0x80, 0xef, 0xb2, 0xfc, 0x66, 0xed, 0x8b, 0x5e, 0x02, 0x88,
        0x46, 0xfc, 0xf3, 0x66, 0x6d, 0x3e, 0x6e,
    ];
    let mut machine = Machine::new(&code);
    machine.system = SystemRegisters { cpl: 0, ..FLAT };
    // What 64-bit code has left in the upper halves does not count.
    let upper = 0xdead_beef << 32;
    machine.general.gpr[RSI] = upper | (DEVICE + 4);
    machine.general.gpr[RDI] = upper | DATA;
    machine.general.gpr[RCX] = upper | 2;
    machine.data[..4].copy_from_slice(&[1, 2, 3, 4]);
    let (access, pending) = machine.access();
    assert_eq!((access, &machine.data[..4]), (write(0xcf8, OperandSize::Dword, 1), &[0, 0, 0, 0x80][..]));
    machine.complete(pending, 0);
    machine.data[..4].copy_from_slice(&[1, 2, 3, 4]);
    let (access, pending) = machine.access();
    assert_eq!(access, read(0xcfc, OperandSize::Word, 1));
    machine.complete(pending, 0);
    assert_eq!(machine.general.gpr[RAX], 0x8000_0201);
    let (access, pending) = machine.access();
    let size = OperandSize::Dword;
    assert_eq!(access, DeviceAccess::MemoryRead { address: DEVICE_ADDRESS + 6, size });
    machine.complete(pending, 0x1122_3344);
    assert_eq!(machine.general.gpr[registers::RBX], 0x1122_3344);
    let (access, pending) = machine.access();
    let size = OperandSize::Byte;
    assert_eq!(access, DeviceAccess::MemoryWrite { address: DEVICE_ADDRESS, size, value: 1 });
    machine.complete(pending, 0);
    let (access, pending) = machine.access();
    assert_eq!(access, read(0xcfc, OperandSize::Word, 2));
    machine.data[..4].copy_from_slice(&[5, 6, 7, 8]);
    machine.complete(pending, 0);
    let at = usize::try_from(DATA - BASE).unwrap();
    assert_eq!(machine.arena.bytes[at..at + 4], [5, 6, 7, 8]);
    assert_eq!((machine.general.gpr[RDI], machine.general.gpr[RCX]), (DATA + 4, 0));
    machine.general.gpr[RSI] = DATA;
    let (access, pending) = machine.access();
    assert_eq!((access, machine.data[0]), (write(0xcfc, OperandSize::Byte, 1), 5));
    machine.complete(pending, 0);
    assert_eq!(machine.general.rip, CODE + code.len() as u64);
}

#[test]
fn operands_of_32_bit_mode_that_are_not_known_stop() {
    // MOV CS:[ESI], EAX, and a read; MOV EAX, FS; PUSH FS; MOV AX, [SI]
    let cases: [&[u8]; 5] =
        [&[0x2e, 0x89, 0x06], &[0x2e, 0x8b, 0x06], &[0x8c, 0xe0], &[0x0f, 0xa0], &[0x67, 0x66, 0x8b, 0x04]];
    for code in cases {
        let mut machine = Machine::new(code);
        machine.system = SystemRegisters { cpl: 0, ..FLAT };
        machine.general.gpr[RSI] = DATA;
        let before = machine.general;
        assert_eq!(machine.stop(), StopReason::Instruction, "{code:02x?}");
        assert_eq!(machine.general, before);
    }
}

/// Processors differ in how much MOVSXD with 66 reads, and are not known to agree on where a bit number leads from an address that is cut.
#[test]
fn what_processors_do_differently_stops() {
    // MOVSXD AX, [RDI] (66); BT [EDI], ECX (67); BTS [EDI], ECX (67)
    for code in [&[0x66, 0x63, 0x07][..], &[0x67, 0x0f, 0xa3, 0x0f], &[0x67, 0x0f, 0xab, 0x0f]] {
        let mut machine = Machine::new(code);
        machine.general.gpr[RDI] = DATA;
        assert_eq!((machine.stop(), machine.general.rip), (StopReason::Instruction, CODE), "{code:02x?}");
    }
    // In 32-bit mode, BT [disp16], ECX (67)
    let [low, high, ..] = DATA.to_le_bytes();
    let mut machine = Machine::new(&[0x67, 0x0f, 0xa3, 0x0e, low, high]);
    machine.system = SystemRegisters { cpl: 0, ..FLAT };
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Instruction, CODE));
    // BT [RDI], ECX; BT DWORD [EDI], 3 (67)
    for code in [&[0x0f, 0xa3, 0x0f][..], &[0x67, 0x0f, 0xba, 0x27, 3]] {
        let mut machine = Machine::new(code);
        machine.general.gpr[RDI] = DATA;
        machine.stop();
        assert_eq!(machine.general.rip, CODE + code.len() as u64, "{code:02x?}");
    }
}

/// One address holds 64-bit code and then 32-bit code: firmware starts again.
#[test]
fn the_mode_decides_what_an_instruction_is() {
    // 64-bit: a REX prefix and NOP. 32-bit: INC EAX; NOP.
    let mut machine = Machine::new(&[0x40, 0x90]);
    assert_eq!((machine.stop(), machine.general.gpr[RAX]), (StopReason::Instruction, 0));
    machine.general.rip = CODE;
    machine.system = SystemRegisters { cpl: 0, ..FLAT };
    assert_eq!((machine.stop(), machine.general.gpr[RAX]), (StopReason::Instruction, 1));
    assert_eq!(machine.general.rip, CODE + 2);
}

#[test]
fn modes_that_are_not_known_stop_at_once() {
    let mut machine = Machine::new(&[0x90]);
    machine.system.code_long = false;
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Mode, CODE));
}

#[test]
fn code_that_changes_is_decoded_anew() {
    // INC EAX; MOV BYTE [RIP-8], 0xc8, which makes it DEC EAX; JMP to the beginning.
    let mut code = vec![0xff, 0xc0, 0xc6, 0x05];
    code.extend((-8_i32).to_le_bytes());
    code.extend([0xc8, 0xeb, 0xf5]);
    let mut machine = Machine::new(&code);
    machine.budget.instructions = 4;
    machine.stop();
    assert_eq!(machine.general.gpr[RAX], 0, "one up, one down");
}
