//! String instructions on memory, element by element: the state after each is one that the processor shows too.

use iced_x86::{Mnemonic, OpKind, Register};

use super::{Done, Halt, Step};
use crate::arithmetic::{self, Binary, OperandSize};
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{RAX, RCX, RDI, RSI, rflags};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StringOperation {
    Move,
    Store,
    Load,
    Compare,
    Scan,
}

/// What the mnemonic says. MOVSD and CMPSD are names of SSE instructions too; those have other operands.
fn operation(mnemonic: Mnemonic) -> Option<(StringOperation, OperandSize)> {
    use Mnemonic as N;
    use OperandSize::{Byte, Dword, Qword, Word};
    use StringOperation::{Compare, Load, Move, Scan, Store};
    Some(match mnemonic {
        N::Movsb => (Move, Byte),
        N::Movsw => (Move, Word),
        N::Movsd => (Move, Dword),
        N::Movsq => (Move, Qword),
        N::Stosb => (Store, Byte),
        N::Stosw => (Store, Word),
        N::Stosd => (Store, Dword),
        N::Stosq => (Store, Qword),
        N::Lodsb => (Load, Byte),
        N::Lodsw => (Load, Word),
        N::Lodsd => (Load, Dword),
        N::Lodsq => (Load, Qword),
        N::Cmpsb => (Compare, Byte),
        N::Cmpsw => (Compare, Word),
        N::Cmpsd => (Compare, Dword),
        N::Cmpsq => (Compare, Qword),
        N::Scasb => (Scan, Byte),
        N::Scasw => (Scan, Word),
        N::Scasd => (Scan, Dword),
        N::Scasq => (Scan, Qword),
        _ => return None,
    })
}

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    pub(super) fn string(&mut self) -> Option<Done> {
        let (operation, size) = operation(self.instruction.mnemonic())?;
        let first = self.string_element(operation, size);
        let again = self.instruction.ip();
        // What cannot be done now ends this, and is found again as the next instruction.
        while first.is_ok() && self.next.rip == again && self.executed < self.most {
            *self.complete = self.next;
            if self.string_element(operation, size).is_err() {
                break;
            }
            self.executed += 1;
        }
        Some(first)
    }

    /// Whether the string operands are addressed by registers of the instruction's size, and are string operands at all.
    pub(super) fn string_operands(&self) -> bool {
        let wide = |kind| match self.address {
            OperandSize::Qword => matches!(kind, OpKind::MemorySegRSI | OpKind::MemoryESRDI),
            OperandSize::Word => matches!(kind, OpKind::MemorySegSI | OpKind::MemoryESDI),
            _ => matches!(kind, OpKind::MemorySegESI | OpKind::MemoryESEDI),
        };
        let mut kinds = self.instruction.op_kinds();
        self.instruction.op_kinds().any(wide) && kinds.all(|kind| wide(kind) || kind == OpKind::Register)
    }

    fn string_element(&mut self, operation: StringOperation, size: OperandSize) -> Done {
        use StringOperation as S;
        let repeat = self.instruction.has_rep_prefix();
        let repeat_not_equal = self.instruction.has_repne_prefix();
        let compares = matches!(operation, S::Compare | S::Scan);
        if !self.string_operands() || repeat_not_equal && !compares {
            return Err(UNKNOWN);
        }
        let repeated = repeat || repeat_not_equal;
        if repeated && self.pointer(RCX) == 0 {
            return Ok(());
        }
        let has_source = matches!(operation, S::Move | S::Load | S::Compare);
        let (mut source, mut destination) = (0, 0);
        if has_source {
            source = self.linear(self.instruction.memory_segment(), self.pointer(RSI), size.bytes())?;
        }
        if compares {
            destination = self.linear(Register::ES, self.pointer(RDI), size.bytes())?;
        } else if operation != S::Load {
            destination = self.linear_writable(Register::ES, self.pointer(RDI), size.bytes())?;
        }
        let rax = self.next.gpr[RAX];
        match operation {
            S::Move => {
                let value = self.memory.load(source, size)?;
                self.memory.store(destination, size, value)?;
            }
            S::Store => self.memory.store(destination, size, rax)?,
            S::Load => {
                let value = self.memory.load(source, size)?;
                super::operand::RegisterOperand::accumulator(size).write(&mut self.next, value);
            }
            S::Compare | S::Scan => {
                let first = if operation == S::Scan { rax } else { self.memory.load(source, size)? };
                let second = self.memory.load(destination, size)?;
                self.next.rflags = arithmetic::binary(Binary::Cmp, size, first, second, self.next.rflags).1;
            }
        }
        let down = self.next.rflags & rflags::DF != 0;
        let stride = if down { size.bytes().wrapping_neg() } else { size.bytes() };
        if has_source {
            self.set_pointer(RSI, self.next.gpr[RSI].wrapping_add(stride));
        }
        if operation != S::Load {
            self.set_pointer(RDI, self.next.gpr[RDI].wrapping_add(stride));
        }
        if repeated {
            let left = self.next.gpr[RCX].wrapping_sub(1) & self.address.mask();
            self.set_pointer(RCX, left);
            let equal = self.next.rflags & rflags::ZF != 0;
            let goes_on = !compares || equal == repeat;
            self.next.rip =
                if left != 0 && goes_on { self.instruction.ip() } else { self.instruction.next_ip() };
        }
        Ok(())
    }
}
