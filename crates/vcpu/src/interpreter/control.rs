//! Branches, calls and returns, near ones only.

use iced_x86::{Code, Mnemonic, OpKind};

use super::{Done, Halt, Step};
use crate::arithmetic::OperandSize;
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{RCX, RSP, rflags};

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
            );
        if !known {
            return None;
        }
        // Intel's processors ignore the prefix here, AMD's cut RIP to 16 bits.
        if self.has_operand_size_prefix() {
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

    /// The target of a direct or indirect near branch.
    fn target(&mut self) -> Result<u64, Halt> {
        match self.instruction.op_kind(0) {
            OpKind::NearBranch64 => Ok(self.instruction.near_branch64()),
            OpKind::NearBranch32 => Ok(self.instruction.near_branch32().into()),
            OpKind::Register | OpKind::Memory => {
                // A far branch through memory has an operand of another size.
                let place = self.place(0)?;
                if place.size() != Some(self.word) {
                    return Err(UNKNOWN);
                }
                self.read(place)
            }
            _ => Err(UNKNOWN),
        }
    }

    fn jump_if(&mut self, taken: bool) -> Done {
        let target = self.target()?;
        if taken {
            self.next.rip = target;
        }
        Ok(())
    }

    fn jump(&mut self) -> Done {
        self.jump_if(true)
    }

    fn call(&mut self) -> Done {
        let target = self.target()?;
        // Before the store: the caller finds a target that is not canonical too late.
        if !self.system.canonical(target) {
            return Err(StopReason::Exception.into());
        }
        self.push(self.next.rip)?;
        self.next.rip = target;
        Ok(())
    }

    fn ret(&mut self) -> Done {
        let release = match (self.word, self.instruction.code()) {
            (OperandSize::Qword, Code::Retnq) | (OperandSize::Dword, Code::Retnd) => 0,
            (OperandSize::Qword, Code::Retnq_imm16) | (OperandSize::Dword, Code::Retnd_imm16) => {
                u64::from(self.instruction.immediate16())
            }
            _ => return Err(UNKNOWN),
        };
        self.next.rip = self.pop()?;
        self.set_pointer(RSP, self.next.gpr[RSP].wrapping_add(release));
        Ok(())
    }

    /// LOOP, LOOPE, LOOPNE and JRCXZ, by RCX in 64-bit mode and ECX in 32-bit mode only.
    fn count_down(&mut self) -> Done {
        let count = self.pointer(RCX);
        let left = count.wrapping_sub(1) & self.word.mask();
        let zero = self.next.rflags & rflags::ZF != 0;
        let taken = match self.instruction.code() {
            Code::Jrcxz_rel8_64 | Code::Jecxz_rel8_32 => return self.jump_if(count == 0),
            Code::Loop_rel8_64_RCX | Code::Loop_rel8_32_ECX => left != 0,
            // A processor was found on which REP and REPNE choose the condition, whatever the opcode says.
            Code::Loope_rel8_64_RCX
            | Code::Loope_rel8_32_ECX
            | Code::Loopne_rel8_64_RCX
            | Code::Loopne_rel8_32_ECX
                if self.has_repeat_prefix() =>
            {
                return Err(UNKNOWN);
            }
            Code::Loope_rel8_64_RCX | Code::Loope_rel8_32_ECX => left != 0 && zero,
            Code::Loopne_rel8_64_RCX | Code::Loopne_rel8_32_ECX => left != 0 && !zero,
            _ => return Err(UNKNOWN),
        };
        self.set_pointer(RCX, left);
        self.jump_if(taken)
    }
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
