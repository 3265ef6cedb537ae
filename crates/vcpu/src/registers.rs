//! The registers that the interpreter reads and changes: what `kvm_run` shares by KVM_CAP_SYNC_REGS, in the
//! processor's own numbering.

use thiserror::Error;

use crate::segments::{CS, CachedSegment};

/// Bits of RFLAGS (Intel SDM volume 1, 3.4.3).
pub mod rflags {
    /// Carry.
    pub const CF: u64 = 1;
    /// Always one.
    pub const ONE: u64 = 1 << 1;
    /// Parity of the low byte.
    pub const PF: u64 = 1 << 2;
    /// Carry out of bit 3.
    pub const AF: u64 = 1 << 4;
    /// Zero.
    pub const ZF: u64 = 1 << 6;
    /// Sign.
    pub const SF: u64 = 1 << 7;
    /// Trap after each instruction.
    pub const TF: u64 = 1 << 8;
    /// Interrupts are taken.
    pub const IF: u64 = 1 << 9;
    /// String instructions count down.
    pub const DF: u64 = 1 << 10;
    /// Signed overflow.
    pub const OF: u64 = 1 << 11;
    /// The privilege level that may use ports, two bits.
    pub const IOPL: u64 = 3 << 12;
    /// Nested task.
    pub const NT: u64 = 1 << 14;
    /// No breakpoint on the next instruction.
    pub const RF: u64 = 1 << 16;
    /// Virtual-8086 mode.
    pub const VM: u64 = 1 << 17;
    /// Alignment check, and with SMAP: supervisor code may touch user pages.
    pub const AC: u64 = 1 << 18;
    /// Virtual interrupt flag.
    pub const VIF: u64 = 1 << 19;
    /// Virtual interrupt pending.
    pub const VIP: u64 = 1 << 20;
    /// CPUID is there.
    pub const ID: u64 = 1 << 21;
    /// What arithmetic changes.
    pub const STATUS: u64 = CF | PF | AF | ZF | SF | OF;
}

/// What one instruction may change besides memory. The interpreter works on a copy and puts it in place when the
/// instruction is complete, so an instruction that cannot be completed has changed nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneralRegisters {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15: the processor's numbering, not that of `kvm_regs`.
    pub gpr: [u64; 16],
    /// Where the next instruction is.
    pub rip: u64,
    /// [`rflags`].
    pub rflags: u64,
}

/// Index of RAX in [`GeneralRegisters::gpr`].
pub const RAX: usize = 0;
/// Index of RCX.
pub const RCX: usize = 1;
/// Index of RDX.
pub const RDX: usize = 2;
/// Index of RBX.
pub const RBX: usize = 3;
/// Index of RSP.
pub const RSP: usize = 4;
/// Index of RBP.
pub const RBP: usize = 5;
/// Index of RSI.
pub const RSI: usize = 6;
/// Index of RDI.
pub const RDI: usize = 7;

/// What the interpreter reads and never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemRegisters {
    /// CR0.
    pub cr0: u64,
    /// CR3: the root of the page tables.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// The EFER register.
    pub efer: u64,
    /// The current privilege level: DPL of SS, and 0 in real mode.
    pub cpl: u8,
    /// CS.L: 64-bit code.
    pub code_long: bool,
    /// CS.D.
    pub code_default_big: bool,
    /// CS, DS, ES and SS begin at 0 and end at 4 GiB, and allow what their register is for.
    pub flat: bool,
    /// ES, CS, SS, DS, FS, GS: the processor's numbering.
    pub segments: [CachedSegment; 6],
    /// The first level of page tables with PAE paging, of which the processor has a copy (Intel SDM volume 3, 4.4.1). Not used
    /// elsewhere. 0 stands for no table.
    pub pdptes: [u64; 4],
}

/// Bits of CR0.
pub mod cr0 {
    /// Protected mode.
    pub const PE: u64 = 1;
    /// Supervisor code honours read-only pages.
    pub const WP: u64 = 1 << 16;
    /// RFLAGS.AC checks alignment at level 3.
    pub const AM: u64 = 1 << 18;
    /// Paging.
    pub const PG: u64 = 1 << 31;
}

/// Bits of CR4.
pub mod cr4 {
    /// What is interpreted knows of these, or they change nothing of what is interpreted: VME to PCE, OSFXSR, OSXMMEXCPT, UMIP, LA57,
    /// FSGSBASE, PCIDE, OSXSAVE, SMEP, SMAP, PKE.
    pub const KNOWN: u64 = 0x77_1fff;
    /// RDTSC at level 0 only.
    pub const TSD: u64 = 1 << 2;
    /// Pages of 4 MiB in the tables of 32-bit paging.
    pub const PSE: u64 = 1 << 4;
    /// Physical address extension.
    pub const PAE: u64 = 1 << 5;
    /// Five levels of page tables.
    pub const LA57: u64 = 1 << 12;
    /// VMX is on.
    pub const VMXE: u64 = 1 << 13;
    /// SMX is on.
    pub const SMXE: u64 = 1 << 14;
    /// Supervisor code may not touch user pages.
    pub const SMAP: u64 = 1 << 21;
    /// Protection keys for user pages.
    pub const PKE: u64 = 1 << 22;
    /// Control-flow enforcement.
    pub const CET: u64 = 1 << 23;
    /// Protection keys for supervisor pages.
    pub const PKS: u64 = 1 << 24;
    /// Linear address masking for supervisor pointers.
    pub const LAM_SUP: u64 = 1 << 28;
    /// Flexible return and event delivery.
    pub const FRED: u64 = 1 << 32;
}

/// Bits of EFER.
pub mod efer {
    /// What is interpreted knows of these, or they change nothing of what is interpreted: SCE, LME, LMA, NXE, FFXSR, TCE, AIBRSE.
    pub const KNOWN: u64 = 1 | 1 << 8 | LMA | NXE | 1 << 14 | 1 << 15 | 1 << 21;
    /// Long mode is active.
    pub const LMA: u64 = 1 << 10;
    /// Pages can be marked as not executable.
    pub const NXE: u64 = 1 << 11;
    /// SVM is on.
    pub const SVME: u64 = 1 << 12;
}

/// CR3's bits that mask linear addresses (LAM_U57, LAM_U48).
const CR3_LAM: u64 = 3 << 61;

/// How instructions are read and addresses made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeMode {
    /// 64-bit mode with paging.
    Long,
    /// 32-bit protected mode with CS, DS, ES and SS of 4 GiB, without paging or with: that of firmware, boot loaders and 32-bit systems.
    Flat32,
    /// 16-bit code without paging: real mode, with whatever limits its segments have, and protected mode.
    Code16,
}

/// A state of the processor in which nothing is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum UnsupportedMode {
    /// 16-bit code with paging, 32-bit mode with other segments, or a 32-bit program of a 64-bit system.
    #[error("neither 64-bit mode, nor flat 32-bit mode, nor 16-bit code without paging")]
    NotKnown,
    /// Level 1 or 2.
    #[error("privilege level 1 or 2")]
    Privilege,
    /// VMXE, SMXE or SVME: the guest may be a hypervisor.
    #[error("the guest runs VMX, SMX or SVM")]
    Virtualization,
    /// Protection keys.
    #[error("protection keys are on")]
    ProtectionKeys,
    /// Shadow stacks or branch tracking, or FRED.
    #[error("control-flow enforcement or FRED is on")]
    ControlFlow,
    /// Linear address masking.
    #[error("linear address masking is on")]
    AddressMasking,
    /// TF, RF, VM, VIF or VIP is set.
    #[error("RFLAGS has TF, RF, VM, VIF or VIP")]
    Flags,
    /// RFLAGS.AC checks alignment.
    #[error("alignment checks are on")]
    AlignmentCheck,
    /// A bit of CR4 or EFER that is not known, such as LASS, LMSLE and UAIE, which change what an address may be.
    #[error("CR4 or EFER has a bit that is not known")]
    ControlBits,
}

impl SystemRegisters {
    /// The linear address of the instruction at `rip`. Only 16-bit code has a segment that begins elsewhere than at 0.
    pub fn linear_rip(&self, rip: u64) -> u64 {
        if self.code_long { rip } else { self.segments[CS].base.wrapping_add(rip) }
    }

    /// The mode, if it is one that is interpreted.
    pub fn mode(&self) -> Option<CodeMode> {
        let switches = self.cr0 & (cr0::PE | cr0::PG);
        let long_active = self.efer & efer::LMA != 0;
        match (self.code_long, self.code_default_big) {
            (true, false) if long_active && switches == cr0::PE | cr0::PG && self.cr4 & cr4::PAE != 0 => {
                Some(CodeMode::Long)
            }
            (false, true) if !long_active && switches & cr0::PE != 0 && self.flat => Some(CodeMode::Flat32),
            (false, false) if !long_active && switches & cr0::PG == 0 && self.segments[CS].readable => {
                Some(CodeMode::Code16)
            }
            _ => None,
        }
    }

    /// Whether addresses are translated by [`SystemRegisters::pdptes`]: PAE paging.
    pub fn uses_pdptes(&self) -> bool {
        self.cr0 & cr0::PG != 0 && self.cr4 & cr4::PAE != 0 && self.efer & efer::LMA == 0
    }

    /// Why nothing is interpreted in this state; `None` if it may be.
    pub fn unsupported(&self, rflags: u64) -> Option<UnsupportedMode> {
        use UnsupportedMode as U;
        let flags = rflags::TF | rflags::RF | rflags::VM | rflags::VIF | rflags::VIP;
        if self.mode().is_none() {
            return Some(U::NotKnown);
        }
        if self.cpl != 0 && self.cpl != 3 {
            return Some(U::Privilege);
        }
        if self.cr4 & (cr4::VMXE | cr4::SMXE) != 0 || self.efer & efer::SVME != 0 {
            return Some(U::Virtualization);
        }
        // Keys for user pages say nothing about supervisor pages, and supervisor code gets no others here.
        if self.cr4 & cr4::PKS != 0 || self.cr4 & cr4::PKE != 0 && self.cpl == 3 {
            return Some(U::ProtectionKeys);
        }
        if self.cr4 & (cr4::CET | cr4::FRED) != 0 {
            return Some(U::ControlFlow);
        }
        if self.cr4 & cr4::LAM_SUP != 0 || self.cr3 & CR3_LAM != 0 {
            return Some(U::AddressMasking);
        }
        if self.cr4 & !cr4::KNOWN != 0 || self.efer & !efer::KNOWN != 0 {
            return Some(U::ControlBits);
        }
        if rflags & flags != 0 {
            return Some(U::Flags);
        }
        if rflags & rflags::AC != 0 && self.cpl == 3 && self.cr0 & cr0::AM != 0 {
            return Some(U::AlignmentCheck);
        }
        None
    }

    /// Whether a linear address is canonical: its upper bits repeat bit 47, or bit 56 with five levels. Outside of
    /// 64-bit mode it has no upper bits.
    pub fn canonical(&self, linear: u64) -> bool {
        if !self.code_long {
            return linear <= u64::from(u32::MAX);
        }
        let unused = if self.cr4 & cr4::LA57 != 0 { 7 } else { 16 };
        let shifted = (linear << unused).cast_signed() >> unused;
        shifted.cast_unsigned() == linear
    }

    /// Whether CLI, and port instructions without a look at the TSS, are allowed.
    pub(crate) fn io_privileged(&self, rflags: u64) -> bool {
        u64::from(self.cpl) <= (rflags & rflags::IOPL) >> 12
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: CachedSegment =
        CachedSegment { selector: 8, base: 0, limit: 0xffff, readable: true, writable: false, big: false };
    const LONG: SystemRegisters = SystemRegisters {
        cr0: cr0::PE | cr0::PG | cr0::WP | cr0::AM,
        cr3: 0x1000,
        cr4: cr4::PAE,
        efer: efer::LMA | efer::NXE,
        cpl: 0,
        code_long: true,
        code_default_big: false,
        flat: false,
        segments: [CODE; 6],
        pdptes: [0; 4],
    };
    const FLAT: SystemRegisters = SystemRegisters {
        cr0: cr0::PE,
        cr4: 0,
        efer: 0,
        code_long: false,
        code_default_big: true,
        flat: true,
        ..LONG
    };

    #[test]
    fn flat_mode_is_interpreted_and_no_other_of_32_bits() {
        let paged = SystemRegisters { cr0: cr0::PE | cr0::PG, ..FLAT };
        let extended = SystemRegisters { cr4: cr4::PAE | cr4::PSE, efer: efer::NXE, ..paged };
        for flat in [FLAT, paged, extended] {
            assert_eq!((flat.unsupported(rflags::ONE), flat.mode()), (None, Some(CodeMode::Flat32)));
            assert_eq!(flat.unsupported(rflags::VM), Some(UnsupportedMode::Flags), "virtual 8086");
        }
        assert!(extended.uses_pdptes() && !paged.uses_pdptes() && !LONG.uses_pdptes());
        assert!(!SystemRegisters { cr0: cr0::PE, ..extended }.uses_pdptes());
        assert_eq!(LONG.mode(), Some(CodeMode::Long));
        for other in [
            SystemRegisters { flat: false, ..FLAT },
            SystemRegisters { flat: false, ..paged },
            SystemRegisters { cr0: 0, ..FLAT },
            SystemRegisters { code_default_big: false, cr0: cr0::PE | cr0::PG, ..FLAT },
            SystemRegisters { code_default_big: false, efer: efer::LMA, ..FLAT },
            SystemRegisters { code_default_big: false, segments: [CachedSegment::default(); 6], ..FLAT },
            SystemRegisters { efer: efer::LMA, ..FLAT },
            SystemRegisters { efer: efer::LMA, cr0: cr0::PE | cr0::PG, cr4: cr4::PAE, ..FLAT },
        ] {
            assert_eq!(other.unsupported(rflags::ONE), Some(UnsupportedMode::NotKnown), "{other:x?}");
        }
        assert!(FLAT.canonical(0xffff_ffff) && !FLAT.canonical(0x1_0000_0000));
    }

    #[test]
    fn code_of_16_bits_is_interpreted_in_real_and_in_protected_mode() {
        for cr0 in [0, cr0::PE] {
            let system = SystemRegisters { cr0, code_default_big: false, flat: false, ..FLAT };
            assert_eq!((system.unsupported(rflags::ONE), system.mode()), (None, Some(CodeMode::Code16)));
            assert_eq!(system.unsupported(rflags::VM), Some(UnsupportedMode::Flags), "virtual 8086");
        }
    }

    #[test]
    fn long_mode_is_interpreted_and_nothing_else() {
        assert_eq!(LONG.unsupported(rflags::ONE), None);
        let cases = [
            (SystemRegisters { code_long: false, ..LONG }, UnsupportedMode::NotKnown),
            (SystemRegisters { code_default_big: true, ..LONG }, UnsupportedMode::NotKnown),
            (SystemRegisters { efer: 0, ..LONG }, UnsupportedMode::NotKnown),
            (SystemRegisters { cr0: cr0::PE, ..LONG }, UnsupportedMode::NotKnown),
            (SystemRegisters { cpl: 1, ..LONG }, UnsupportedMode::Privilege),
            (SystemRegisters { cr4: LONG.cr4 | cr4::VMXE, ..LONG }, UnsupportedMode::Virtualization),
            (SystemRegisters { efer: LONG.efer | efer::SVME, ..LONG }, UnsupportedMode::Virtualization),
            (SystemRegisters { cr4: LONG.cr4 | cr4::PKS, ..LONG }, UnsupportedMode::ProtectionKeys),
            (SystemRegisters { cr4: LONG.cr4 | cr4::PKE, cpl: 3, ..LONG }, UnsupportedMode::ProtectionKeys),
            (SystemRegisters { cr4: LONG.cr4 | cr4::CET, ..LONG }, UnsupportedMode::ControlFlow),
            (SystemRegisters { cr4: LONG.cr4 | cr4::FRED, ..LONG }, UnsupportedMode::ControlFlow),
            (SystemRegisters { cr4: LONG.cr4 | cr4::LAM_SUP, ..LONG }, UnsupportedMode::AddressMasking),
            (SystemRegisters { cr3: LONG.cr3 | 1 << 62, ..LONG }, UnsupportedMode::AddressMasking),
        ];
        for (registers, why) in cases {
            assert_eq!(registers.unsupported(rflags::ONE), Some(why), "{registers:x?}");
        }
        // LASS, UINTR, Key Locker, and what nobody knows yet; LMSLE, which gives segments of 64-bit mode a limit, UAIE.
        for bit in [27, 25, 19, 15, 33, 63] {
            let registers = SystemRegisters { cr4: LONG.cr4 | 1 << bit, ..LONG };
            assert!(registers.unsupported(rflags::ONE).is_some(), "CR4, bit {bit}");
        }
        for bit in [13, 20, 63] {
            let registers = SystemRegisters { efer: LONG.efer | 1 << bit, ..LONG };
            assert!(registers.unsupported(rflags::ONE).is_some(), "EFER, bit {bit}");
        }
        // As Linux and Windows have them: all of VME to PCE, OSFXSR to UMIP, FSGSBASE, PCIDE, OSXSAVE, SMEP, SMAP; SCE, LME, FFXSR, TCE.
        let usual = SystemRegisters { cr4: 0x37_0fff, efer: 0xcd01, ..LONG };
        assert_eq!(usual.unsupported(rflags::ONE), None);
        for flag in [rflags::TF, rflags::RF, rflags::VM, rflags::VIF, rflags::VIP] {
            assert_eq!(LONG.unsupported(flag), Some(UnsupportedMode::Flags));
        }
        assert_eq!(LONG.unsupported(rflags::AC), None, "supervisor code has no alignment checks");
        assert_eq!(SystemRegisters { cr4: LONG.cr4 | cr4::PKE, ..LONG }.unsupported(0), None);
        let user = SystemRegisters { cpl: 3, ..LONG };
        assert_eq!(user.unsupported(rflags::AC), Some(UnsupportedMode::AlignmentCheck));
    }

    #[test]
    fn canonical_addresses() {
        let five = SystemRegisters { cr4: LONG.cr4 | cr4::LA57, ..LONG };
        for (linear, four_levels, five_levels) in [
            (0, true, true),
            (0x7fff_ffff_ffff, true, true),
            (0x8000_0000_0000, false, true),
            (0xffff_8000_0000_0000, true, true),
            (0xffff_7fff_ffff_ffff, false, true),
            (0x00ff_ffff_ffff_ffff, false, true),
            (0x0100_0000_0000_0000, false, false),
            (u64::MAX, true, true),
        ] {
            assert_eq!(LONG.canonical(linear), four_levels, "{linear:x}");
            assert_eq!(five.canonical(linear), five_levels, "{linear:x}");
        }
    }
}
