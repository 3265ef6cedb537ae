//! Operands: where they are, how wide, and what they hold.

use iced_x86::{MemorySize, OpKind, Register};

use super::{Done, Halt, LAST_16, Step};
use crate::arithmetic::OperandSize;
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{GeneralRegisters, RAX, RSP};
use crate::segments::{CachedSegment, FS, GS};

/// A general register, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegisterOperand {
    index: usize,
    size: OperandSize,
    /// AH, CH, DH, BH.
    high: bool,
}

impl RegisterOperand {
    pub(crate) fn of(register: Register) -> Option<Self> {
        let number = register as usize;
        let from = |first: Register| number.checked_sub(first as usize).filter(|index| *index < 16);
        let plain = |index, size| Some(Self { index, size, high: false });
        if let Some(index) = from(Register::RAX) {
            return plain(index, OperandSize::Qword);
        }
        if let Some(index) = from(Register::EAX) {
            return plain(index, OperandSize::Dword);
        }
        if let Some(index) = from(Register::AX) {
            return plain(index, OperandSize::Word);
        }
        // AL CL DL BL, AH CH DH BH, SPL BPL SIL DIL R8L and so on.
        match number.checked_sub(Register::AL as usize)? {
            index @ 0..4 => plain(index, OperandSize::Byte),
            index @ 4..8 => Some(Self { index: index - 4, size: OperandSize::Byte, high: true }),
            index @ 8..20 => plain(index - 4, OperandSize::Byte),
            _ => None,
        }
    }

    /// AL, AX, EAX or RAX.
    pub(crate) fn accumulator(size: OperandSize) -> Self {
        Self { index: RAX, size, high: false }
    }

    /// The low bits of a register by its number.
    pub(crate) fn low(index: usize, size: OperandSize) -> Self {
        Self { index, size, high: false }
    }

    pub(crate) fn size(self) -> OperandSize {
        self.size
    }

    /// The 64-bit register that this is a part of.
    pub(crate) fn index(self) -> usize {
        self.index
    }

    pub(crate) fn read(self, registers: &GeneralRegisters) -> u64 {
        let value = registers.gpr[self.index];
        if self.high { value >> 8 & 0xff } else { value & self.size.mask() }
    }

    /// Writes the low bits of `value`. 32 bits clear the upper half, fewer leave the rest.
    pub(crate) fn write(self, registers: &mut GeneralRegisters, value: u64) {
        let register = &mut registers.gpr[self.index];
        *register = match (self.size, self.high) {
            (OperandSize::Byte, true) => *register & !0xff00 | (value & 0xff) << 8,
            (OperandSize::Byte | OperandSize::Word, _) => {
                let mask = self.size.mask();
                *register & !mask | value & mask
            }
            (OperandSize::Dword, _) => value & OperandSize::Dword.mask(),
            (OperandSize::Qword, _) => value,
        };
    }
}

/// Where an operand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Register(RegisterOperand),
    /// Linear address and size.
    Memory(u64, OperandSize),
    /// Sign-extended as the instruction says.
    Immediate(u64),
}

impl Place {
    /// `None` for an immediate, which takes the size of the other operand.
    pub(crate) fn size(self) -> Option<OperandSize> {
        match self {
            Place::Register(register) => Some(register.size()),
            Place::Memory(_, size) => Some(size),
            Place::Immediate(_) => None,
        }
    }
}

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    /// The operand's place, if it is one of the kinds that are known here.
    pub(super) fn place(&self, operand: u32) -> Result<Place, Halt> {
        if operand >= self.instruction.op_count() {
            return Err(UNKNOWN);
        }
        match self.instruction.op_kind(operand) {
            OpKind::Register => {
                let register = RegisterOperand::of(self.instruction.op_register(operand)).ok_or(UNKNOWN)?;
                Ok(Place::Register(register))
            }
            OpKind::Memory => {
                let size = self.memory_size()?;
                Ok(Place::Memory(self.linear_address(size.bytes())?, size))
            }
            OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64 => Ok(Place::Immediate(self.instruction.immediate(operand))),
            _ => Err(UNKNOWN),
        }
    }

    pub(super) fn read(&mut self, place: Place) -> Result<u64, Halt> {
        match place {
            Place::Register(register) => Ok(register.read(&self.next)),
            Place::Memory(linear, size) => Ok(self.memory.load(linear, size)?),
            Place::Immediate(value) => Ok(value),
        }
    }

    pub(super) fn write(&mut self, place: Place, value: u64) -> Done {
        match place {
            Place::Register(register) => register.write(&mut self.next, value),
            Place::Memory(linear, size) => {
                self.check_operand_writable()?;
                self.memory.store(linear, size, value)?;
            }
            Place::Immediate(_) => return Err(UNKNOWN),
        }
        Ok(())
    }

    /// The address of the memory operand, without the base of its segment.
    pub(super) fn effective_address(&self) -> Result<u64, Halt> {
        Ok(self.sized_address()?.0)
    }

    /// The same, and the size of the registers or the displacement that it is made of; that of the mode if neither tells.
    fn sized_address(&self) -> Result<(u64, OperandSize), Halt> {
        let base = self.instruction.memory_base();
        let index = self.instruction.memory_index();
        let mut address = self.instruction.memory_displacement64();
        let word = self.word == OperandSize::Word;
        let mut narrow = word && self.instruction.memory_displ_size() == 4;
        for (register, scale) in [(base, 1), (index, self.instruction.memory_index_scale())] {
            // The decoder has added RIP to the displacement.
            if register == Register::None || register == Register::RIP {
                continue;
            }
            let operand = RegisterOperand::of(register).ok_or(UNKNOWN)?;
            narrow |= match operand.size() {
                OperandSize::Qword => false,
                OperandSize::Dword => true,
                OperandSize::Word if word => false,
                OperandSize::Byte | OperandSize::Word => return Err(UNKNOWN),
            };
            address = address.wrapping_add(operand.read(&self.next).wrapping_mul(u64::from(scale)));
        }
        let size = if narrow { OperandSize::Dword } else { self.word };
        Ok((address & size.mask(), size))
    }

    /// The linear address of the memory operand, which has so many bytes.
    pub(super) fn linear_address(&self, bytes: u64) -> Result<u64, Halt> {
        self.linear(self.instruction.memory_segment(), self.effective_address()?, bytes)
    }

    /// The linear address of what lies some bytes beyond the memory operand.
    pub(super) fn linear_beyond(&self, beyond: u64, bytes: u64) -> Result<u64, Halt> {
        let (offset, size) = self.sized_address()?;
        // Where an address of fewer bits than the mode's leads from there is not known of all processors.
        let cut = match self.word {
            OperandSize::Qword => size != self.word || self.instruction.memory_displ_size() == 4,
            OperandSize::Dword => self.instruction.memory_displ_size() == 2,
            _ => false,
        };
        if cut {
            return Err(UNKNOWN);
        }
        self.linear(self.instruction.memory_segment(), offset.wrapping_add(beyond) & size.mask(), bytes)
    }

    /// The linear address of `bytes` bytes at an offset, which may be read. In 64-bit mode only FS and GS have a base. In flat
    /// 32-bit mode DS, ES and SS begin at 0; CS, which may not be written to, stops.
    pub(super) fn linear(&self, segment: Register, offset: u64, bytes: u64) -> Result<u64, Halt> {
        match (self.word, segment) {
            (OperandSize::Qword, Register::FS) => Ok(offset.wrapping_add(self.system.segments[FS].base)),
            (OperandSize::Qword, Register::GS) => Ok(offset.wrapping_add(self.system.segments[GS].base)),
            (OperandSize::Qword, _) => Ok(offset),
            (OperandSize::Dword, Register::DS | Register::ES | Register::SS) => Ok(offset),
            _ if self.is_checked(segment) => {
                let segment = self.segment(segment)?;
                // Only a limit beyond 64 KiB allows an operand across its end. What it is with an address of 16 bits, and what a push or a
                // pop there does, the processor says.
                let narrow = self.word == OperandSize::Word;
                let crosses = narrow && offset <= LAST_16 && offset + bytes > LAST_16 + 1;
                let linear = if segment.readable && !crosses { segment.linear(offset, bytes) } else { None };
                linear.ok_or(Halt::Stop(StopReason::Exception))
            }
            _ => Err(UNKNOWN),
        }
    }

    /// The same for what may be written to.
    pub(super) fn linear_writable(&self, segment: Register, offset: u64, bytes: u64) -> Result<u64, Halt> {
        self.check_writable(segment)?;
        self.linear(segment, offset, bytes)
    }

    /// Whether base, limit and rights of a segment register count: of all in 16-bit code, and of FS and GS in 32-bit mode, whose
    /// others are flat.
    pub(super) fn is_checked(&self, segment: Register) -> bool {
        match self.word {
            OperandSize::Word => true,
            OperandSize::Dword => matches!(segment, Register::FS | Register::GS),
            _ => false,
        }
    }

    /// A segment register, as the processor has cached it.
    pub(super) fn segment(&self, segment: Register) -> Result<&CachedSegment, Halt> {
        let index = (segment as usize).checked_sub(Register::ES as usize).ok_or(UNKNOWN)?;
        self.system.segments.get(index).ok_or(UNKNOWN)
    }

    fn check_writable(&self, segment: Register) -> Done {
        if self.is_checked(segment) && !self.segment(segment)?.writable {
            return Err(StopReason::Exception.into());
        }
        Ok(())
    }

    /// Before a store to the memory operand. Where segments are not checked, one that may be read may be written to.
    pub(super) fn check_operand_writable(&self) -> Done {
        self.check_writable(self.instruction.memory_segment())
    }

    /// A register that holds the address of a string, or counts.
    pub(super) fn pointer(&self, register: usize) -> u64 {
        self.next.gpr[register] & self.address.mask()
    }

    pub(super) fn set_pointer(&mut self, register: usize, value: u64) {
        RegisterOperand::low(register, self.address).write(&mut self.next, value);
    }

    /// Where the stack is.
    pub(super) fn stack_pointer(&self) -> u64 {
        self.next.gpr[RSP] & self.stack.mask()
    }

    pub(super) fn set_stack_pointer(&mut self, value: u64) {
        RegisterOperand::low(RSP, self.stack).write(&mut self.next, value);
    }

    pub(super) fn memory_size(&self) -> Result<OperandSize, Halt> {
        match self.instruction.memory_size() {
            MemorySize::UInt8 | MemorySize::Int8 => Ok(OperandSize::Byte),
            MemorySize::UInt16 | MemorySize::Int16 => Ok(OperandSize::Word),
            MemorySize::UInt32 | MemorySize::Int32 | MemorySize::DwordOffset => Ok(OperandSize::Dword),
            MemorySize::UInt64 | MemorySize::Int64 | MemorySize::QwordOffset => Ok(OperandSize::Qword),
            _ => Err(UNKNOWN),
        }
    }

    /// The prefixes before the opcode, REX included wherever it stands.
    fn prefixes(&self) -> impl Iterator<Item = u8> {
        self.bytes.iter().copied().take_while(
            |byte| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3),
        )
    }

    /// Whether a prefix 66 stands before the opcode. Processors disagree on what it does to near branches.
    pub(super) fn has_operand_size_prefix(&self) -> bool {
        self.prefixes().any(|byte| byte == 0x66)
    }

    /// Whether REP or REPNE stands before the opcode.
    pub(super) fn has_repeat_prefix(&self) -> bool {
        self.prefixes().any(|byte| matches!(byte, 0xf2 | 0xf3))
    }
}
