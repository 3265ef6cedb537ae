//! Branches, calls and returns, near ones only.

use iced_x86::{Code, Mnemonic, OpKind};

use super::{Done, Halt, Step};
use crate::arithmetic::OperandSize;
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{RCX, rflags};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);

/// A condition by its number in the opcode (Intel SDM volume 2, appendix B.1.4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Condition(u8);

impl Condition {
    pub(crate) fn holds(self, flags: u64) -> bool {
        let set = |flag: u64| flags & flag != 0;
        let less = set(rflags::SF) != set(rflags::OF);
        let holds = match self.0 >> 1 {
            0 => set(rflags::OF),
            1 => set(rflags::CF),
            2 => set(rflags::ZF),
            3 => set(rflags::CF) || set(rflags::ZF),
            4 => set(rflags::SF),
            5 => set(rflags::PF),
            6 => less,
            _ => less || set(rflags::ZF),
        };
        holds != (self.0 & 1 == 1)
    }
}

/// The condition of a CMOVcc or SETcc.
pub(super) fn condition(mnemonic: Mnemonic) -> Option<Condition> {
    use Mnemonic as M;
    Some(Condition(match mnemonic {
        M::Seto | M::Cmovo => 0,
        M::Setno | M::Cmovno => 1,
        M::Setb | M::Cmovb => 2,
        M::Setae | M::Cmovae => 3,
        M::Sete | M::Cmove => 4,
        M::Setne | M::Cmovne => 5,
        M::Setbe | M::Cmovbe => 6,
        M::Seta | M::Cmova => 7,
        M::Sets | M::Cmovs => 8,
        M::Setns | M::Cmovns => 9,
        M::Setp | M::Cmovp => 10,
        M::Setnp | M::Cmovnp => 11,
        M::Setl | M::Cmovl => 12,
        M::Setge | M::Cmovge => 13,
        M::Setle | M::Cmovle => 14,
        M::Setg | M::Cmovg => 15,
        _ => return None,
    }))
}

/// The condition of a Jcc.
fn jump_condition(mnemonic: Mnemonic) -> Option<Condition> {
    use Mnemonic as M;
    Some(Condition(match mnemonic {
        M::Jo => 0,
        M::Jno => 1,
        M::Jb => 2,
        M::Jae => 3,
        M::Je => 4,
        M::Jne => 5,
        M::Jbe => 6,
        M::Ja => 7,
        M::Js => 8,
        M::Jns => 9,
        M::Jp => 10,
        M::Jnp => 11,
        M::Jl => 12,
        M::Jge => 13,
        M::Jle => 14,
        M::Jg => 15,
        _ => return None,
    }))
}

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    pub(super) fn control(&mut self) -> Option<Done> {
        let mnemonic = self.instruction.mnemonic();
        let jump = jump_condition(mnemonic);
        let known = jump.is_some()
            || matches!(
                mnemonic,
                Mnemonic::Jmp
                    | Mnemonic::Call
                    | Mnemonic::Ret
                    | Mnemonic::Loop
                    | Mnemonic::Loope
                    | Mnemonic::Loopne
                    | Mnemonic::Jrcxz
                    | Mnemonic::Jecxz
                    | Mnemonic::Jcxz
            );
        if !known {
            return None;
        }
        // In 64-bit mode Intel's processors ignore the prefix, AMD's cut RIP to 16 bits.
        if self.word != OperandSize::Word && self.has_operand_size_prefix() {
            return Some(Err(UNKNOWN));
        }
        Some(match (jump, mnemonic) {
            (Some(condition), _) => self.jump_if(condition.holds(self.next.rflags)),
            (None, Mnemonic::Jmp) => self.jump(),
            (None, Mnemonic::Call) => self.call(),
            (None, Mnemonic::Ret) => self.ret(),
            _ => self.count_down(),
        })
    }

    /// The target of a direct or indirect near branch, and its size, which is that of a return address.
    fn target(&mut self) -> Result<(u64, OperandSize), Halt> {
        use OperandSize::{Dword, Qword, Word};
        Ok(match self.instruction.op_kind(0) {
            OpKind::NearBranch64 => (self.instruction.near_branch64(), self.stack_operand(Some(Qword))?),
            OpKind::NearBranch32 => {
                (self.instruction.near_branch32().into(), self.stack_operand(Some(Dword))?)
            }
            OpKind::NearBranch16 => {
                (self.instruction.near_branch16().into(), self.stack_operand(Some(Word))?)
            }
            OpKind::Register | OpKind::Memory => {
                // A far branch through memory has an operand of another size.
                let place = self.place(0)?;
                let size = self.stack_operand(place.size())?;
                (self.read(place)?, size)
            }
            _ => return Err(UNKNOWN),
        })
    }

    fn jump_if(&mut self, taken: bool) -> Done {
        let (target, _) = self.target()?;
        if taken {
            self.next.rip = target;
        }
        Ok(())
    }

    fn jump(&mut self) -> Done {
        self.jump_if(true)
    }

    fn call(&mut self) -> Done {
        let (target, size) = self.target()?;
        // Before the store: the caller finds a target that is not allowed too late.
        self.check_target(target)?;
        self.push(self.next.rip, size)?;
        self.next.rip = target;
        Ok(())
    }

    fn ret(&mut self) -> Done {
        use OperandSize::{Dword, Qword, Word};
        let size = match self.instruction.code() {
            Code::Retnq | Code::Retnq_imm16 => Qword,
            Code::Retnd | Code::Retnd_imm16 => Dword,
            Code::Retnw | Code::Retnw_imm16 => Word,
            _ => return Err(UNKNOWN),
        };
        let size = self.stack_operand(Some(size))?;
        let release = if self.instruction.op_count() == 0 { 0 } else { self.instruction.immediate16() };
        self.next.rip = self.pop(size)?;
        self.set_stack_pointer(self.stack_pointer().wrapping_add(release.into()));
        Ok(())
    }

    /// LOOP, LOOPE, LOOPNE and JCXZ, by RCX in 64-bit mode, by ECX in 32-bit mode, and by either of CX and ECX in 16-bit code.
    fn count_down(&mut self) -> Done {
        let code = self.instruction.code();
        let known = match self.word {
            OperandSize::Qword => COUNTS_64.contains(&code),
            OperandSize::Dword => COUNTS_32.contains(&code),
            _ => COUNTS_16.contains(&code) || counts_by_ecx(code),
        };
        if !known {
            return Err(UNKNOWN);
        }
        let count = self.pointer(RCX);
        let left = count.wrapping_sub(1) & self.address.mask();
        let zero = self.next.rflags & rflags::ZF != 0;
        let taken = match self.instruction.mnemonic() {
            Mnemonic::Loop => left != 0,
            // A processor was found on which REP and REPNE choose the condition, whatever the opcode says.
            Mnemonic::Loope | Mnemonic::Loopne if self.has_repeat_prefix() => return Err(UNKNOWN),
            Mnemonic::Loope => left != 0 && zero,
            Mnemonic::Loopne => left != 0 && !zero,
            _ => return self.jump_if(count == 0),
        };
        self.set_pointer(RCX, left);
        self.jump_if(taken)
    }
}

const COUNTS_64: [Code; 4] =
    [Code::Jrcxz_rel8_64, Code::Loop_rel8_64_RCX, Code::Loope_rel8_64_RCX, Code::Loopne_rel8_64_RCX];
const COUNTS_32: [Code; 4] =
    [Code::Jecxz_rel8_32, Code::Loop_rel8_32_ECX, Code::Loope_rel8_32_ECX, Code::Loopne_rel8_32_ECX];
/// By CX, with a target of either size.
const COUNTS_16: [Code; 8] = [
    Code::Jcxz_rel8_16,
    Code::Jcxz_rel8_32,
    Code::Loop_rel8_16_CX,
    Code::Loop_rel8_32_CX,
    Code::Loope_rel8_16_CX,
    Code::Loope_rel8_32_CX,
    Code::Loopne_rel8_16_CX,
    Code::Loopne_rel8_32_CX,
];

/// In 16-bit code: LOOP and its kin, with a target of either size.
pub(super) fn counts_by_ecx(code: Code) -> bool {
    let narrow =
        [Code::Jecxz_rel8_16, Code::Loop_rel8_16_ECX, Code::Loope_rel8_16_ECX, Code::Loopne_rel8_16_ECX];
    COUNTS_32.contains(&code) || narrow.contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_and_their_opposites() {
        for number in 0..16 {
            for flags in (0..1 << 12).map(|flags: u64| flags & rflags::STATUS) {
                let (this, other) = (Condition(number), Condition(number ^ 1));
                assert_ne!(this.holds(flags), other.holds(flags), "{number} {flags:x}");
            }
        }
        assert!(Condition(15).holds(rflags::SF | rflags::OF), "greater");
        assert!(Condition(12).holds(rflags::OF), "less");
        assert!(Condition(7).holds(0), "above");
    }
}
