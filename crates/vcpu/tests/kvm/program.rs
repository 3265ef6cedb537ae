//! Random guest programs: device accesses of all kinds, and little between them.

use crate::fake::DEVICE;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ z >> 29
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The port whose lowest bit is set in every third answer.
pub const STATUS: u16 = 0x1f7;

fn mov_edx(code: &mut Vec<u8>, port: u16) {
    code.push(0xba);
    code.extend(u32::from(port).to_le_bytes());
}

pub fn random_program(random: &mut Random) -> Vec<u8> {
    let mut code = Vec::new();
    for _ in 0..random.below(20) + 1 {
        piece(random, &mut code);
    }
    code.push(0xf4);
    code
}

fn piece(random: &mut Random, code: &mut Vec<u8>) {
    let byte = |random: &mut Random| random.next().to_le_bytes()[0];
    let count = u8::try_from(random.below(5) + 1).unwrap();
    match random.below(16) {
        // MOV AL, value; MOV EDX, port; OUT
        0 | 1 => {
            code.extend([0xb0, byte(random)]);
            mov_edx(code, 0x300 + u16::from(byte(random)));
            code.extend([[0xee].as_slice(), &[0x66, 0xef], &[0xef]][usize::from(count % 3)]);
        }
        // IN; ADD EBX, EAX
        2 | 3 => {
            mov_edx(code, 0x300 + u16::from(byte(random)));
            code.extend([[0xec].as_slice(), &[0x66, 0xed], &[0xed]][usize::from(count % 3)]);
            code.extend([0x01, 0xc3]);
        }
        // Several reads at one RIP: MOV ECX, count; IN AL, DX; ADD EBX, EAX; DEC ECX; JNZ
        4 => {
            code.extend([0xb9, count, 0, 0, 0, 0xec, 0x01, 0xc3, 0xff, 0xc9, 0x75, 0xf9]);
        }
        // Until the device is ready: MOV EDX, STATUS; IN AL, DX; TEST AL, 1; JZ
        5 => {
            mov_edx(code, STATUS);
            code.extend([0xec, 0xa8, 0x01, 0x74, 0xfb]);
        }
        // MOV EDI, buffer; MOV ECX, count; REP INSB, INSW
        6 | 7 => {
            code.extend([0xbf, 0xf8, 0x8f, 0, 0, 0xb9, count, 0, 0, 0, 0xf3]);
            code.extend([[0x6c].as_slice(), &[0x6d]][usize::from(count % 2)]);
        }
        // MOV ESI, buffer across a page; MOV ECX, count; REP OUTSB, OUTSD, then an OUT that looks like it
        8 | 9 => {
            code.extend([0xbe, 0xfc, 0x8f, 0, 0, 0xb9, count, 0, 0, 0, 0xf3]);
            code.extend([[0x6e, 0xee].as_slice(), &[0x6f, 0xef]][usize::from(count % 2)]);
        }
        // MOV EDI, device; MOV [RDI+8], EAX; MOV EAX, [RDI]; MOVZX EBX, BYTE [RDI+count]
        10 | 11 => {
            code.push(0xbf);
            code.extend(u32::try_from(DEVICE + 0x100).unwrap().to_le_bytes());
            code.extend([0x89, 0x47, 0x08, 0x8b, 0x07, 0x0f, 0xb6, 0x5f, count]);
        }
        // ADD [RDI], device or not: kept in memory. MOV EDI, buffer; ADD [RDI], EAX; PUSH RAX; POP RCX
        12 => code.extend([0xbf, 0, 0x90, 0, 0, 0x01, 0x07, 0x50, 0x59]),
        // OUT 0x20, AL: the PIC is KVM's.
        13 => code.extend([0xb0, 0x20, 0xe6, 0x20]),
        // CLI; STI
        14 => code.extend([0xfa, 0xfb]),
        // CPUID is the processor's; XOR EAX, EBX
        _ => code.extend([0x0f, 0xa2, 0x31, 0xd8]),
    }
}
