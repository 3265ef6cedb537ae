//! Real mode: devices, and where its segments and its code end.

use ioplane_vcpu::{CachedSegment, DeviceAccess, OperandSize, StopReason, SystemRegisters, registers};
use registers::{RAX, RBX, RCX, RDI, RDX, RSI, RSP, rflags};

use crate::arena::{BASE, CODE, DATA, DEVICE, DEVICE_ADDRESS};
use crate::devices::{Machine, read, write};
use crate::generate::FLAT;

/// Segments of 64 KiB: the arena's code and data. The processor's bases are below 1 MiB; here they are where the arena is.
fn real(code: &[u8]) -> Machine {
    let segment = CachedSegment {
        selector: 0x1234,
        base: DATA,
        limit: 0xffff,
        readable: true,
        writable: true,
        big: false,
    };
    let code_segment = CachedSegment { selector: 0xf000, base: CODE, ..segment };
    let mut machine = Machine::new(code);
    machine.system = SystemRegisters {
        cr0: 0,
        cpl: 0,
        code_default_big: false,
        flat: false,
        segments: [segment, code_segment, segment, segment, segment, segment],
        ..FLAT
    };
    machine.general.rip = 0;
    machine.general.gpr[RSP] = 0xffff_0800;
    machine
}

fn unreal(code: &[u8]) -> Machine {
    let mut machine = real(code);
    for data in [0, 3] {
        machine.system.segments[data].base = 0;
        machine.system.segments[data].limit = u32::MAX;
    }
    machine
}

/// As a VGA BIOS and a disk's: ports, with registers of 16 bits, and strings.
#[test]
fn devices_in_real_mode() {
    // MOV DX, 0x3d4; MOV AX, 0x0c0b; OUT DX, AX; INC DX; IN AL, DX; MOV EDX, 0xcf8 (66); OUT DX, EAX; REP OUTSW; REP INSB
    let code = [
        0xba, 0xd4, 0x03, 0xb8, 0x0b, 0x0c, 0xef, 0x42, 0xec, 0x66, 0xba, 0xf8, 0x0c, 0, 0, 0x66, 0xef, 0xf3,
        0x6f, 0xb1, 0x02, 0xf3, 0x6c,
    ];
    let mut machine = real(&code);
    machine.general.gpr[RAX] = 0x7777_0000;
    machine.general.gpr[RSI] = 0xdead_0002;
    machine.general.gpr[RDI] = 0xdead_0100;
    machine.general.gpr[RCX] = 0xdead_0002;
    machine.arena.put(DATA, &[1, 2, 3, 4, 5, 6]);
    let (access, pending) = machine.access();
    assert_eq!((access, &machine.data[..2]), (write(0x3d4, OperandSize::Word, 1), &[0x0b, 0x0c][..]));
    machine.complete(pending, 0);
    machine.data[0] = 0x55;
    let (access, pending) = machine.access();
    assert_eq!(access, read(0x3d5, OperandSize::Byte, 1));
    machine.complete(pending, 0);
    let (access, pending) = machine.access();
    assert_eq!(
        (access, &machine.data[..4]),
        (write(0xcf8, OperandSize::Dword, 1), &[0x55, 0x0c, 0x77, 0x77][..])
    );
    machine.complete(pending, 0);
    let (access, pending) = machine.access();
    assert_eq!((access, &machine.data[..4]), (write(0xcf8, OperandSize::Word, 2), &[3, 4, 5, 6][..]));
    machine.complete(pending, 0);
    assert_eq!((machine.general.gpr[RSI], machine.general.gpr[RCX]), (0xdead_0006, 0xdead_0000));
    let (access, pending) = machine.access();
    assert_eq!(access, read(0xcf8, OperandSize::Byte, 2));
    machine.data[..2].copy_from_slice(&[8, 9]);
    machine.complete(pending, 0);
    let at = usize::try_from(DATA - BASE).unwrap() + 0x100;
    assert_eq!(machine.arena.bytes[at..at + 3], [8, 9, 0xf4]);
    assert_eq!((machine.general.gpr[RDI], machine.general.gpr[RCX]), (0xdead_0102, 0xdead_0000));
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Instruction, code.len() as u64));
}

/// A string ends where its offset begins at 0 again, and goes on there.
#[test]
fn strings_of_ports_wrap_at_64_kib() {
    // REP OUTSB
    let mut machine = real(&[0xf3, 0x6e]);
    // Not at the end of a page, which would end it as well.
    machine.system.segments[3].base = DATA + 0x800 - 0x1_0000;
    machine.general.gpr[RSI] = 0xfffe;
    machine.general.gpr[RCX] = 5;
    let (access, pending) = machine.access();
    assert_eq!(access, write(0, OperandSize::Byte, 2));
    machine.complete(pending, 0);
    let general = &machine.general;
    assert_eq!((general.gpr[RSI], general.gpr[RCX], general.rip), (0, 3, 0));
}

/// With addresses of 32 bits, as firmware reaches devices from real mode.
#[test]
fn device_memory_from_real_mode_with_large_limits() {
    // MOV EAX, [EBX] (66 67); MOV [EBX+4], AL (67); MOV AX, [BX], which is elsewhere
    let mut machine = unreal(&[0x66, 0x67, 0x8b, 0x03, 0x67, 0x88, 0x43, 0x04, 0x8b, 0x07]);
    machine.general.gpr[RBX] = DEVICE;
    let (access, pending) = machine.access();
    let size = OperandSize::Dword;
    assert_eq!(access, DeviceAccess::MemoryRead { address: DEVICE_ADDRESS, size });
    machine.complete(pending, 0x1122_3344);
    let (access, pending) = machine.access();
    let size = OperandSize::Byte;
    assert_eq!(access, DeviceAccess::MemoryWrite { address: DEVICE_ADDRESS + 4, size, value: 0x44 });
    machine.complete(pending, 0);
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Slot, 8), "nothing is at 0");
    // The same with limits of 64 KiB is the processor's.
    let mut machine = real(&[0x66, 0x67, 0x8b, 0x03]);
    machine.general.gpr[RBX] = DEVICE;
    assert_eq!((machine.stop(), machine.general.rip), (StopReason::Exception, 0));
}

#[test]
fn what_leaves_a_segment_is_the_processors() {
    // MOV AX, [0xffff]; MOV EAX, [0xfffd] (66); PUSH AX with SP 1; POP AX with SP 0xffff; JMP to 0x10000 (66); CALL there (66);
    // MOVSW from 0xffff; STOSW to 0xffff; INSW to 0xffff; OUTSW from 0xffff
    let cases: [(&[u8], u64); 10] = [
        (&[0xa1, 0xff, 0xff], 0x800),
        (&[0x66, 0xa1, 0xfd, 0xff], 0x800),
        (&[0x50], 1),
        (&[0x58], 0xffff),
        (&[0x66, 0xe9, 0xfa, 0xff, 0, 0], 0x800),
        (&[0x66, 0xe8, 0xfa, 0xff, 0, 0], 0x800),
        (&[0xa5], 0x800),
        (&[0xab], 0x800),
        (&[0x6d], 0x800),
        (&[0x6f], 0x800),
    ];
    for (code, sp) in cases {
        let mut machine = real(code);
        machine.general.gpr[RSP] = sp;
        machine.general.gpr[RSI] = 0xffff;
        machine.general.gpr[RDI] = 0xffff;
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::Exception, "{code:02x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "{code:02x?}");
    }
}

/// An instruction that ends at 0xffff is the processor's, whatever the limit: what follows it is beyond 16 bits.
#[test]
fn code_ends_at_64_kib() {
    for (limit, rip, code, wanted) in [
        // NOP; NOP
        (0xffff, 0xfffe, [0x90, 0x90], 0xffff),
        (u32::MAX, 0xfffe, [0x90, 0x90], 0xffff),
        // JMP, whose second byte is beyond the limit; and code that is
        (0xfffe, 0xfffe, [0xeb, 0xfe], 0xfffe),
        (0x1000, 0xfffe, [0x90, 0x90], 0xfffe),
    ] {
        let mut machine = real(&[]);
        machine.arena.put(DATA, &code);
        machine.system.segments[1].base = DATA - 0xfffe;
        machine.system.segments[1].limit = limit;
        machine.general.rip = rip;
        machine.stop();
        assert_eq!(machine.general.rip, wanted, "limit {limit:x}");
    }
}

/// IP is cut to 16 bits by a branch of that size, also forwards.
#[test]
fn branches_wrap() {
    // At 0xfffc: JMP +2, to 0
    let mut machine = real(&[]);
    machine.system.segments[1].base = DATA - 0xfffc;
    machine.arena.put(DATA, &[0xeb, 0x02]);
    machine.general.rip = 0xfffc;
    machine.stop();
    assert_eq!(machine.general.rip, 0);
}

#[test]
fn what_changes_segments_or_mode_stops() {
    // MOV DS, AX; POP ES; LES BX, [SI]; JMP FAR; CALL FAR [BX]; RETF; INT 0x10; IRET; MOV CR0, EAX; LGDT [BX]; MOV SS, AX
    let cases: [&[u8]; 11] = [
        &[0x8e, 0xd8],
        &[0x07],
        &[0xc4, 0x1c],
        &[0xea, 0, 0, 0, 0xf0],
        &[0xff, 0x1f],
        &[0xcb],
        &[0xcd, 0x10],
        &[0xcf],
        &[0x0f, 0x22, 0xc0],
        &[0x0f, 0x01, 0x17],
        &[0x8e, 0xd0],
    ];
    for code in cases {
        let mut machine = real(code);
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::Instruction, "{code:02x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "{code:02x?}");
    }
}

/// A segment that may not be written to, or not be read, as protected mode has them.
#[test]
fn rights_of_segments_are_the_processors_to_enforce() {
    // MOV CS:[BX], AX; XCHG CS:[BX], AX; ADD CS:[BX], AX; LOCK ADD; CMPXCHG; CMPXCHG8B; POP CS:[BX]; MOV AX, FS:[BX]; OUTSB FS
    let cases: [&[u8]; 9] = [
        &[0x2e, 0x89, 0x07],
        &[0x2e, 0x87, 0x07],
        &[0x2e, 0x01, 0x07],
        &[0xf0, 0x2e, 0x01, 0x07],
        &[0x2e, 0x0f, 0xb1, 0x07],
        &[0x2e, 0x0f, 0xc7, 0x0f],
        &[0x2e, 0x8f, 0x07],
        &[0x64, 0x8b, 0x07],
        &[0x64, 0x6e],
    ];
    for code in cases {
        let mut machine = real(code);
        machine.system.segments[1].writable = false;
        machine.system.segments[4] = CachedSegment::UNUSABLE;
        machine.general.gpr[RBX] = 0x1000;
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::Exception, "{code:02x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "{code:02x?}");
    }
    // MOV AX, CS:[BX] reads it.
    let mut machine = real(&[0x2e, 0x8b, 0x07]);
    machine.system.segments[1].writable = false;
    machine.general.gpr[RBX] = 0x1000;
    assert_eq!((machine.stop(), machine.general.gpr[RAX]), (StopReason::Instruction, 0xf4f4));
}

/// Pushes and pops change SP only, and flags of 16 bits leave the others.
#[test]
fn the_stack_has_addresses_of_16_bits() {
    // PUSH DS; PUSHF; STI, which waits for the processor
    let mut machine = real(&[0x1e, 0x9c, 0xfb]);
    machine.general.rflags |= rflags::AC;
    assert_eq!(machine.stop(), StopReason::InterruptWindow);
    assert_eq!(machine.general.gpr[RSP], 0xffff_07fc);
    let at = usize::try_from(DATA - BASE).unwrap() + 0x7fc;
    assert_eq!(machine.arena.bytes[at..at + 4], [0x02, 0x00, 0x34, 0x12]);
    // POPF
    let mut machine = real(&[0x9d]);
    machine.general.rflags |= rflags::AC;
    machine.arena.put(DATA + 0x800, &[0x03, 0x00]);
    assert_eq!(machine.stop(), StopReason::Instruction, "HLT");
    assert_eq!(machine.general.rflags, rflags::AC | rflags::ONE | rflags::CF);
    assert_eq!((machine.general.gpr[RSP], machine.general.gpr[RDX]), (0xffff_0802, 0));
}

/// With limits beyond 64 KiB, processors are not known to agree on what an operand at the end of 16 bits is.
#[test]
fn what_crosses_64_kib_is_the_processors() {
    // MOV AX, [0xffff]; PUSH AX with SP 1; POP AX with SP 0xffff; MOVSW, STOSW, OUTSW; RET; CALL; MOV [EBX], AX (67)
    let cases: [(&[u8], u64); 9] = [
        (&[0xa1, 0xff, 0xff], 0x800),
        (&[0x50], 1),
        (&[0x58], 0xffff),
        (&[0xa5], 0x800),
        (&[0xab], 0x800),
        (&[0x6f], 0x800),
        (&[0xc3], 0xffff),
        (&[0xe8, 0, 0], 1),
        (&[0x67, 0x89, 0x03], 0x800),
    ];
    for (code, sp) in cases {
        let mut machine = real(code);
        for segment in &mut machine.system.segments {
            // Where 0xffff is at the arena's data, so that memory is not what stops it.
            segment.limit = u32::MAX;
            segment.base = DATA + 0x100 - 0xffff;
        }
        machine.system.segments[1].base = CODE;
        machine.general.gpr[RSP] = sp;
        for register in [RBX, RSI, RDI] {
            machine.general.gpr[register] = 0xffff;
        }
        let before = (machine.general, machine.arena.bytes.clone());
        assert_eq!(machine.stop(), StopReason::Exception, "{code:02x?}");
        assert_eq!((machine.general, machine.arena.bytes.clone()), before, "{code:02x?}");
    }
}
