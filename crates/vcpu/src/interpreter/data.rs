//! Moves: between registers, memory and the stack. Plain loads and stores may be a device's.

use iced_x86::{Code, Mnemonic, OpKind, Register};

use super::control::condition;
use super::operand::{Place, RegisterOperand};
use super::port::Destination;
use super::{Done, Halt, Step};
use crate::arithmetic::{OperandSize, fence};
use crate::memory::{Denied, DeviceAccess, LinearMemory, Platform, StopReason};
use crate::registers::{RAX, RBP, RCX, RDX, cr4};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);
/// How often a locked operation is tried again when another vCPU has changed the word in between.
const ATTEMPTS: u32 = 64;

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    pub(super) fn data_movement(&mut self) -> Option<Done> {
        let mnemonic = self.instruction.mnemonic();
        Some(match mnemonic {
            Mnemonic::Mov => self.mov(false),
            Mnemonic::Movzx => self.mov(false),
            // With 66, Intel's processors read 16 bits, AMD's 32.
            Mnemonic::Movsxd if self.instruction.code() == Code::Movsxd_r16_rm16 => Err(UNKNOWN),
            Mnemonic::Movsx | Mnemonic::Movsxd => self.mov(true),
            Mnemonic::Lea => self.lea(),
            Mnemonic::Xchg => self.exchange(),
            Mnemonic::Bswap => self.byte_swap(),
            Mnemonic::Cbw
            | Mnemonic::Cwde
            | Mnemonic::Cdqe
            | Mnemonic::Cwd
            | Mnemonic::Cdq
            | Mnemonic::Cqo => self.widen(mnemonic),
            Mnemonic::Push => self.push_operand(),
            Mnemonic::Pop => self.pop_operand(),
            Mnemonic::Leave => self.leave(),
            // With REX.B it is XCHG R8, RAX, which the decoder does not know (found by the differential test).
            Mnemonic::Pause if self.instruction.len() != 2 => Err(UNKNOWN),
            Mnemonic::Nop
            | Mnemonic::Pause
            | Mnemonic::Endbr64
            | Mnemonic::Prefetchnta
            | Mnemonic::Prefetcht0
            | Mnemonic::Prefetcht1
            | Mnemonic::Prefetcht2
            | Mnemonic::Prefetchw => Ok(()),
            Mnemonic::Lfence | Mnemonic::Sfence | Mnemonic::Mfence => {
                fence();
                Ok(())
            }
            _ => match self.instruction.code() {
                Code::Rdtsc | Code::Rdtscp => self.time_stamp(),
                _ => return self.conditional_move(),
            },
        })
    }

    /// MOV, MOVZX, MOVSX: the source may be narrower than the destination.
    fn mov(&mut self, signed: bool) -> Done {
        if self.instruction.code() == Code::Mov_rm16_Sreg && self.word == OperandSize::Word {
            let to = self.place(0)?;
            let selector = self.segment(self.instruction.op_register(1))?.selector;
            return self.write(to, selector.into());
        }
        let (to, from) = (self.place(0)?, self.place(1)?);
        if let (Place::Register(register), Place::Memory(linear, size)) = (to, from) {
            return match self.memory.load(linear, size) {
                Ok(value) => {
                    register.write(&mut self.next, if signed { size.sign_extend(value) } else { value });
                    Ok(())
                }
                Err(Denied::Device(address)) => {
                    self.leaves_kernel(address, size, false)?;
                    let destination = Destination::Register { register, size, signed };
                    let pending = self.pending(destination);
                    Err(Halt::Access(DeviceAccess::MemoryRead { address, size }, pending))
                }
                Err(denied) => Err(denied.into()),
            };
        }
        let value = self.read(from)?;
        if let Place::Memory(linear, size) = to {
            self.check_operand_writable()?;
            return match self.memory.store(linear, size, value) {
                Err(Denied::Device(address)) => {
                    self.leaves_kernel(address, size, true)?;
                    let value = value & size.mask();
                    let pending = self.pending(Destination::None);
                    Err(Halt::Access(DeviceAccess::MemoryWrite { address, size, value }, pending))
                }
                done => Ok(done?),
            };
        }
        let value = match from.size() {
            Some(size) if signed => size.sign_extend(value),
            _ => value,
        };
        self.write(to, value)
    }

    fn leaves_kernel(&mut self, address: u64, size: OperandSize, write: bool) -> Done {
        if self.platform.address_leaves_kernel(address, size, write) {
            Ok(())
        } else {
            Err(StopReason::KernelDevice.into())
        }
    }

    fn lea(&mut self) -> Done {
        let to = self.place(0)?;
        if self.instruction.op_kind(1) != OpKind::Memory {
            return Err(UNKNOWN);
        }
        let address = self.effective_address()?;
        self.write(to, address)
    }

    /// XCHG: with memory it is locked, whatever the prefix.
    fn exchange(&mut self) -> Done {
        let (first, second) = (self.place(0)?, self.place(1)?);
        match (first, second) {
            (Place::Memory(linear, size), Place::Register(register))
            | (Place::Register(register), Place::Memory(linear, size)) => {
                let new = register.read(&self.next);
                let old = self.update_locked(linear, size, |_| new)?;
                register.write(&mut self.next, old);
            }
            (Place::Register(first), Place::Register(second)) => {
                let (a, b) = (first.read(&self.next), second.read(&self.next));
                // XCHG EAX, EAX that is no NOP writes both.
                first.write(&mut self.next, b);
                second.write(&mut self.next, a);
            }
            _ => return Err(UNKNOWN),
        }
        Ok(())
    }

    /// Changes a word atomically and returns what it was.
    pub(super) fn update_locked(
        &mut self,
        linear: u64,
        size: OperandSize,
        new: impl Fn(u64) -> u64,
    ) -> Result<u64, Halt> {
        self.check_operand_writable()?;
        let mut expected = self.memory.load(linear, size)?;
        for _ in 0..ATTEMPTS {
            let found = self.memory.compare_exchange(linear, size, expected, new(expected) & size.mask())?;
            if found == expected {
                return Ok(found);
            }
            expected = found;
        }
        Err(StopReason::Atomic.into())
    }

    fn byte_swap(&mut self) -> Done {
        let to = self.place(0)?;
        let value = self.read(to)?;
        let swapped = match to.size() {
            Some(OperandSize::Dword) => value.swap_bytes() >> 32,
            Some(OperandSize::Qword) => value.swap_bytes(),
            // Undefined.
            _ => return Err(UNKNOWN),
        };
        self.write(to, swapped)
    }

    /// The sign of RAX, or a part of it, spread over the rest of it or over RDX.
    fn widen(&mut self, mnemonic: Mnemonic) -> Done {
        let registers = &mut self.next.gpr;
        let rax = registers[RAX];
        let sign = |size: OperandSize| size.sign_extend(rax);
        match mnemonic {
            Mnemonic::Cbw => registers[RAX] = rax & !0xffff | sign(OperandSize::Byte) & 0xffff,
            Mnemonic::Cwde => registers[RAX] = sign(OperandSize::Word) & OperandSize::Dword.mask(),
            Mnemonic::Cdqe => registers[RAX] = sign(OperandSize::Dword),
            Mnemonic::Cwd => registers[RDX] = registers[RDX] & !0xffff | sign(OperandSize::Word) >> 48,
            Mnemonic::Cdq => registers[RDX] = sign(OperandSize::Dword) >> 32,
            Mnemonic::Cqo => registers[RDX] = (rax.cast_signed() >> 63).cast_unsigned(),
            _ => return Err(UNKNOWN),
        }
        Ok(())
    }

    fn push_operand(&mut self) -> Done {
        use OperandSize::{Dword, Qword, Word};
        let register = self.instruction.op_register(0);
        let selectors = [Register::ES, Register::CS, Register::SS, Register::DS, Register::FS, Register::GS];
        if self.word == Word && selectors.contains(&register) {
            use Code::{Pushw_CS, Pushw_DS, Pushw_ES, Pushw_FS, Pushw_GS, Pushw_SS};
            // Of 32 bits, some processors write only half.
            let code = self.instruction.code();
            if !matches!(code, Pushw_CS | Pushw_DS | Pushw_ES | Pushw_FS | Pushw_GS | Pushw_SS) {
                return Err(UNKNOWN);
            }
            let selector = self.segment(register)?.selector;
            return self.push(selector.into(), Word);
        }
        let place = self.place(0)?;
        let size = match self.instruction.op_kind(0) {
            OpKind::Immediate8to64 | OpKind::Immediate32to64 => Some(Qword),
            OpKind::Immediate8to32 | OpKind::Immediate32 => Some(Dword),
            OpKind::Immediate8to16 | OpKind::Immediate16 => Some(Word),
            _ => place.size(),
        };
        let size = self.stack_operand(size)?;
        let value = self.read(place)?;
        self.push(value, size)
    }

    /// What the stack takes at once: words of the mode, and in 16-bit code those of 32 bits as well.
    pub(super) fn stack_operand(&self, size: Option<OperandSize>) -> Result<OperandSize, Halt> {
        let wide = self.word == OperandSize::Word && size == Some(OperandSize::Dword);
        size.filter(|size| wide || *size == self.word).ok_or(UNKNOWN)
    }

    pub(super) fn push(&mut self, value: u64, size: OperandSize) -> Done {
        let top = self.stack_pointer().wrapping_sub(size.bytes()) & self.stack.mask();
        let linear = self.linear_writable(Register::SS, top, size.bytes())?;
        self.memory.store(linear, size, value)?;
        self.set_stack_pointer(top);
        Ok(())
    }

    pub(super) fn pop(&mut self, size: OperandSize) -> Result<u64, Halt> {
        let top = self.stack_pointer();
        let linear = self.linear(Register::SS, top, size.bytes())?;
        let value = self.memory.load(linear, size)?;
        self.set_stack_pointer(top.wrapping_add(size.bytes()));
        Ok(value)
    }

    fn pop_operand(&mut self) -> Done {
        let size = match self.instruction.op_kind(0) {
            OpKind::Memory => Some(self.memory_size()?),
            _ => self.place(0)?.size(),
        };
        let size = self.stack_operand(size)?;
        let value = self.pop(size)?;
        // An address that is relative to RSP is taken after RSP has moved.
        let to = self.place(0)?;
        self.write(to, value)
    }

    fn leave(&mut self) -> Done {
        let size = match self.instruction.code() {
            Code::Leaveq => OperandSize::Qword,
            Code::Leaved => OperandSize::Dword,
            Code::Leavew => OperandSize::Word,
            _ => return Err(UNKNOWN),
        };
        let size = self.stack_operand(Some(size))?;
        self.set_stack_pointer(self.next.gpr[RBP]);
        let value = self.pop(size)?;
        RegisterOperand::low(RBP, size).write(&mut self.next, value);
        Ok(())
    }

    /// RDTSC and RDTSCP, without prefixes: not all processors take the latter with them.
    fn time_stamp(&mut self) -> Done {
        if self.system.cpl != 0 && self.system.cr4 & cr4::TSD != 0 {
            return Err(StopReason::Privilege.into());
        }
        let numbered = self.instruction.code() == Code::Rdtscp;
        if self.instruction.len() != if numbered { 3 } else { 2 } {
            return Err(UNKNOWN);
        }
        if numbered {
            let number = self.platform.guest_time_stamp_auxiliary().ok_or(UNKNOWN)?;
            self.next.gpr[RCX] = number.into();
        }
        let now = self.platform.guest_cycles().ok_or(UNKNOWN)?;
        self.next.gpr[RAX] = now & OperandSize::Dword.mask();
        self.next.gpr[RDX] = now >> 32;
        Ok(())
    }

    /// CMOVcc and SETcc.
    fn conditional_move(&mut self) -> Option<Done> {
        let holds = condition(self.instruction.mnemonic())?.holds(self.next.rflags);
        let to = match self.place(0) {
            Ok(to) => to,
            Err(halt) => return Some(Err(halt)),
        };
        match self.instruction.op_count() {
            1 => Some(self.write(to, u64::from(holds))),
            // Memory is read and a 32-bit register written even if the condition does not hold.
            2 => Some(self.place(1).and_then(|from| self.read(from)).and_then(|value| {
                let kept = self.read(to)?;
                self.write(to, if holds { value } else { kept })
            })),
            _ => None,
        }
    }
}
