//! Instructions on RFLAGS itself.

use iced_x86::{Code, Mnemonic};

use super::{Done, Halt, Step};
use crate::arithmetic::OperandSize;
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{RAX, cr4, rflags};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);
/// What LAHF and SAHF carry.
const LOW: u64 = rflags::SF | rflags::ZF | rflags::AF | rflags::PF | rflags::CF;

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    pub(super) fn flag_operation(&mut self) -> Option<Done> {
        let before = self.next.rflags;
        let set = |flag| Ok(before | flag);
        let clear = |flag: u64| Ok(before & !flag);
        let after = match self.instruction.mnemonic() {
            Mnemonic::Clc => clear(rflags::CF),
            Mnemonic::Stc => set(rflags::CF),
            Mnemonic::Cmc => Ok(before ^ rflags::CF),
            Mnemonic::Cld => clear(rflags::DF),
            Mnemonic::Std => set(rflags::DF),
            Mnemonic::Cli if self.system.io_privileged(before) => clear(rflags::IF),
            Mnemonic::Cli => Err(StopReason::Privilege.into()),
            // Enabled already: no shadow follows, and nothing was pending.
            Mnemonic::Sti if !self.system.io_privileged(before) => Err(StopReason::Privilege.into()),
            Mnemonic::Sti if before & rflags::IF != 0 => Ok(before),
            Mnemonic::Sti if !self.platform.may_enable_interrupts() => {
                Err(StopReason::InterruptWindow.into())
            }
            Mnemonic::Sti => {
                self.holds_interrupts = true;
                set(rflags::IF)
            }
            Mnemonic::Clac => self.supervisor_access().map(|()| before & !rflags::AC),
            Mnemonic::Stac => self.supervisor_access().map(|()| before | rflags::AC),
            Mnemonic::Lahf => {
                let low = before & LOW | rflags::ONE;
                self.next.gpr[RAX] = self.next.gpr[RAX] & !0xff00 | low << 8;
                Ok(before)
            }
            Mnemonic::Sahf => Ok(before & !LOW | self.next.gpr[RAX] >> 8 & LOW),
            Mnemonic::Pushfq | Mnemonic::Pushfd | Mnemonic::Pushf => self
                .flags_size()
                .and_then(|size| self.push(before & !(rflags::RF | rflags::VM), size))
                .map(|()| before),
            Mnemonic::Popfq | Mnemonic::Popfd | Mnemonic::Popf => self.pop_flags(),
            _ => return None,
        };
        Some(after.map(|flags| self.next.rflags = flags))
    }

    /// CLAC and STAC: without SMAP in CR4 the processor may not know them.
    fn supervisor_access(&self) -> Done {
        if self.system.cpl == 0 && self.system.cr4 & cr4::SMAP != 0 { Ok(()) } else { Err(UNKNOWN) }
    }

    /// How much of RFLAGS PUSHF and POPF move.
    fn flags_size(&self) -> Result<OperandSize, Halt> {
        self.stack_operand(match self.instruction.code() {
            Code::Pushfq | Code::Popfq => Some(OperandSize::Qword),
            Code::Pushfd | Code::Popfd => Some(OperandSize::Dword),
            Code::Pushfw | Code::Popfw => Some(OperandSize::Word),
            _ => None,
        })
    }

    fn pop_flags(&mut self) -> Result<u64, Halt> {
        let size = self.flags_size()?;
        let before = self.next.rflags;
        let mut writable = rflags::STATUS | rflags::TF | rflags::DF | rflags::NT | rflags::AC | rflags::ID;
        if self.system.io_privileged(before) {
            writable |= rflags::IF;
        }
        if self.system.cpl == 0 {
            writable |= rflags::IOPL;
        }
        writable &= size.mask();
        let after = before & !writable | self.pop(size)? & writable;
        if after & rflags::TF != 0 {
            return Err(UNKNOWN);
        }
        if after & !before & rflags::IF != 0 && !self.platform.may_enable_interrupts() {
            return Err(StopReason::InterruptWindow.into());
        }
        Ok(after)
    }
}
