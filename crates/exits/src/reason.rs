//! Why the processor left the guest: Intel's basic exit reasons (SDM volume 3, appendix C) and AMD's exit codes (APM volume 2,
//! appendix C).

use ioplane_symbols::Instruction;
use serde::{Deserialize, Serialize};

/// Whose numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isa {
    /// VT-x.
    Vmx,
    /// AMD-V.
    Svm,
    /// Not said: the exit was seen by what KVM did about it only.
    Unknown,
}

impl Isa {
    /// From the field `isa` of `kvm_exit`.
    pub fn from_kvm(number: u64) -> Isa {
        match number {
            1 => Isa::Vmx,
            2 => Isa::Svm,
            _ => Isa::Unknown,
        }
    }
}

/// What sort of exit it is, whoever made the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// IN, OUT and their string forms.
    Port,
    /// A page that is not mapped, or only emulated: device registers, or memory on its first use.
    Memory,
    /// RDMSR, WRMSR.
    Msr,
    /// HLT, MWAIT: the guest has nothing to do, and its time is no cost.
    Halt,
    /// CPUID.
    Cpuid,
    /// VMCALL, VMMCALL.
    Hypercall,
    /// The host's own interrupt came while the guest ran.
    HostInterrupt,
    /// The guest can take an interrupt now.
    InterruptWindow,
    /// PAUSE in a loop: the guest spins.
    Pause,
    /// An access to the local APIC that the processor has partly virtualised.
    Apic,
    /// The preemption timer, which KVM arms for the guest's own timer.
    Timer,
    /// An exception, or anything else.
    Other,
}

impl Kind {
    /// The instruction that causes this kind of exit, where it is of one sort.
    pub fn instruction(self) -> Option<Instruction> {
        match self {
            Kind::Port => Some(Instruction::Port),
            Kind::Msr => Some(Instruction::Msr),
            Kind::Halt => Some(Instruction::Halt),
            Kind::Cpuid => Some(Instruction::Cpuid),
            Kind::Hypercall => Some(Instruction::Hypercall),
            Kind::Pause => Some(Instruction::Pause),
            Kind::Memory
            | Kind::HostInterrupt
            | Kind::InterruptWindow
            | Kind::Apic
            | Kind::Timer
            | Kind::Other => None,
        }
    }
}

/// One reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reason {
    /// Whose numbers.
    pub isa: Isa,
    /// The number, without flags.
    pub code: u32,
}

/// The reason of an exit that only its consequence betrays (no `kvm_exit`): see [`Reason::of_kind`].
const BY_KIND: [(u32, &str, Kind); 5] = [
    (0, "port I/O", Kind::Port),
    (1, "memory", Kind::Memory),
    (2, "MSR", Kind::Msr),
    (3, "CPUID", Kind::Cpuid),
    (4, "hypercall", Kind::Hypercall),
];

impl Reason {
    /// From the fields of `kvm_exit`: bit 31 of Intel's tells a failed entry, bits 16 to 30 are flags.
    pub fn from_kvm(isa: u64, number: u64) -> Reason {
        let isa = Isa::from_kvm(isa);
        let code = if isa == Isa::Vmx { number & 0xffff } else { number & 0xffff_ffff };
        Reason { isa, code: code as u32 }
    }

    /// For an exit of which nothing but its sort is known.
    pub fn of_kind(kind: Kind) -> Reason {
        let code = BY_KIND.iter().find(|entry| entry.2 == kind).map_or(u32::MAX, |entry| entry.0);
        Reason { isa: Isa::Unknown, code }
    }

    fn entry(self) -> Option<&'static (u32, &'static str, Kind)> {
        let table: &'static [(u32, &'static str, Kind)] = match self.isa {
            Isa::Vmx => VMX,
            Isa::Svm => SVM,
            Isa::Unknown => &BY_KIND,
        };
        table.binary_search_by_key(&self.code, |entry| entry.0).ok().map(|at| &table[at])
    }

    /// Its name, as the manual writes it; the number where it is unknown.
    pub fn name(self) -> String {
        if let Some(entry) = self.entry() {
            return entry.1.to_owned();
        }
        match (self.isa, self.code) {
            (Isa::Svm, 0x00..=0x0f) => format!("CR{} read", self.code),
            (Isa::Svm, 0x10..=0x1f) => format!("CR{} write", self.code - 0x10),
            (Isa::Svm, 0x20..=0x2f) => format!("DR{} read", self.code - 0x20),
            (Isa::Svm, 0x30..=0x3f) => format!("DR{} write", self.code - 0x30),
            (Isa::Svm, 0x40..=0x5f) => format!("exception {}", self.code - 0x40),
            (Isa::Svm, 0x90..=0x9f) => format!("CR{} written", self.code - 0x90),
            _ => format!("reason {:#x}", self.code),
        }
    }

    /// Its sort.
    pub fn kind(self) -> Kind {
        self.entry().map_or(Kind::Other, |entry| entry.2)
    }
}

const VMX: &[(u32, &str, Kind)] = &[
    (0, "exception or NMI", Kind::Other),
    (1, "external interrupt", Kind::HostInterrupt),
    (2, "triple fault", Kind::Other),
    (3, "INIT", Kind::Other),
    (4, "SIPI", Kind::Other),
    (7, "interrupt window", Kind::InterruptWindow),
    (8, "NMI window", Kind::InterruptWindow),
    (9, "task switch", Kind::Other),
    (10, "CPUID", Kind::Cpuid),
    (12, "HLT", Kind::Halt),
    (13, "INVD", Kind::Other),
    (14, "INVLPG", Kind::Other),
    (15, "RDPMC", Kind::Other),
    (16, "RDTSC", Kind::Other),
    (18, "VMCALL", Kind::Hypercall),
    (19, "VMCLEAR", Kind::Other),
    (20, "VMLAUNCH", Kind::Other),
    (21, "VMPTRLD", Kind::Other),
    (22, "VMPTRST", Kind::Other),
    (23, "VMREAD", Kind::Other),
    (24, "VMRESUME", Kind::Other),
    (25, "VMWRITE", Kind::Other),
    (26, "VMXOFF", Kind::Other),
    (27, "VMXON", Kind::Other),
    (28, "control register", Kind::Other),
    (29, "debug register", Kind::Other),
    (30, "I/O instruction", Kind::Port),
    (31, "RDMSR", Kind::Msr),
    (32, "WRMSR", Kind::Msr),
    (33, "invalid guest state", Kind::Other),
    (34, "MSR loading failed", Kind::Other),
    (36, "MWAIT", Kind::Halt),
    (37, "monitor trap flag", Kind::Other),
    (39, "MONITOR", Kind::Other),
    (40, "PAUSE", Kind::Pause),
    (41, "machine check at entry", Kind::Other),
    (43, "TPR below threshold", Kind::Apic),
    (44, "APIC access", Kind::Apic),
    (45, "virtualised EOI", Kind::Apic),
    (46, "GDTR or IDTR", Kind::Other),
    (47, "LDTR or TR", Kind::Other),
    (48, "EPT violation", Kind::Memory),
    (49, "EPT misconfiguration", Kind::Memory),
    (50, "INVEPT", Kind::Other),
    (51, "RDTSCP", Kind::Other),
    (52, "preemption timer", Kind::Timer),
    (53, "INVVPID", Kind::Other),
    (54, "WBINVD", Kind::Other),
    (55, "XSETBV", Kind::Other),
    (56, "APIC write", Kind::Apic),
    (57, "RDRAND", Kind::Other),
    (58, "INVPCID", Kind::Other),
    (59, "VMFUNC", Kind::Other),
    (60, "ENCLS", Kind::Other),
    (61, "RDSEED", Kind::Other),
    (62, "page-modification log full", Kind::Other),
    (63, "XSAVES", Kind::Other),
    (64, "XRSTORS", Kind::Other),
    (67, "UMWAIT", Kind::Halt),
    (68, "TPAUSE", Kind::Halt),
    (74, "bus lock", Kind::Other),
    (75, "notify", Kind::Other),
    (76, "SEAMCALL", Kind::Other),
    (77, "TDCALL", Kind::Hypercall),
    (84, "RDMSR, immediate", Kind::Msr),
    (85, "WRMSR, immediate", Kind::Msr),
];

const SVM: &[(u32, &str, Kind)] = &[
    (0x60, "physical interrupt", Kind::HostInterrupt),
    (0x61, "NMI", Kind::HostInterrupt),
    (0x62, "SMI", Kind::HostInterrupt),
    (0x63, "INIT", Kind::Other),
    (0x64, "virtual interrupt window", Kind::InterruptWindow),
    (0x65, "CR0 selective write", Kind::Other),
    (0x66, "IDTR read", Kind::Other),
    (0x67, "GDTR read", Kind::Other),
    (0x68, "LDTR read", Kind::Other),
    (0x69, "TR read", Kind::Other),
    (0x6a, "IDTR write", Kind::Other),
    (0x6b, "GDTR write", Kind::Other),
    (0x6c, "LDTR write", Kind::Other),
    (0x6d, "TR write", Kind::Other),
    (0x6e, "RDTSC", Kind::Other),
    (0x6f, "RDPMC", Kind::Other),
    (0x70, "PUSHF", Kind::Other),
    (0x71, "POPF", Kind::Other),
    (0x72, "CPUID", Kind::Cpuid),
    (0x73, "RSM", Kind::Other),
    (0x74, "IRET", Kind::InterruptWindow),
    (0x75, "software interrupt", Kind::Other),
    (0x76, "INVD", Kind::Other),
    (0x77, "PAUSE", Kind::Pause),
    (0x78, "HLT", Kind::Halt),
    (0x79, "INVLPG", Kind::Other),
    (0x7a, "INVLPGA", Kind::Other),
    (0x7b, "I/O instruction", Kind::Port),
    (0x7c, "MSR", Kind::Msr),
    (0x7d, "task switch", Kind::Other),
    (0x7e, "FERR freeze", Kind::Other),
    (0x7f, "shutdown", Kind::Other),
    (0x80, "VMRUN", Kind::Other),
    (0x81, "VMMCALL", Kind::Hypercall),
    (0x82, "VMLOAD", Kind::Other),
    (0x83, "VMSAVE", Kind::Other),
    (0x84, "STGI", Kind::Other),
    (0x85, "CLGI", Kind::Other),
    (0x86, "SKINIT", Kind::Other),
    (0x87, "RDTSCP", Kind::Other),
    (0x88, "ICEBP", Kind::Other),
    (0x89, "WBINVD", Kind::Other),
    (0x8a, "MONITOR", Kind::Other),
    (0x8b, "MWAIT", Kind::Halt),
    (0x8c, "MWAIT armed", Kind::Halt),
    (0x8d, "XSETBV", Kind::Other),
    (0x8e, "RDPRU", Kind::Other),
    (0x8f, "EFER written", Kind::Other),
    (0xa2, "INVPCID", Kind::Other),
    (0xa5, "bus lock", Kind::Other),
    (0xa6, "idle HLT", Kind::Halt),
    (0x400, "nested page fault", Kind::Memory),
    (0x401, "AVIC incomplete IPI", Kind::Apic),
    (0x402, "AVIC unaccelerated access", Kind::Apic),
    (0x403, "VMGEXIT", Kind::Hypercall),
    // Software's own numbers, of the protocol between encrypted guests and their host.
    (0x8000_0001, "VMGEXIT: MMIO read", Kind::Memory),
    (0x8000_0002, "VMGEXIT: MMIO write", Kind::Memory),
    (0x8000_0003, "VMGEXIT: NMI complete", Kind::Hypercall),
    (0x8000_0004, "VMGEXIT: AP waits", Kind::Halt),
    (0x8000_0005, "VMGEXIT: AP jump table", Kind::Hypercall),
    (0x8000_0010, "VMGEXIT: page state change", Kind::Hypercall),
    (0x8000_0011, "VMGEXIT: guest request", Kind::Hypercall),
    (0x8000_0012, "VMGEXIT: extended guest request", Kind::Hypercall),
    (0x8000_0013, "VMGEXIT: AP creation", Kind::Hypercall),
    (0x8000_fffd, "VMGEXIT: features", Kind::Hypercall),
    (0x8000_fffe, "VMGEXIT: termination", Kind::Hypercall),
    (0x8000_ffff, "VMGEXIT: unsupported event", Kind::Hypercall),
    (0xf000_0000, "reserved for the hypervisor", Kind::Other),
    (0xffff_ffff, "invalid guest state", Kind::Other),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_makers_number_differently() {
        let intel = Reason::from_kvm(1, 30);
        assert_eq!((intel.name().as_str(), intel.kind()), ("I/O instruction", Kind::Port));
        let amd = Reason::from_kvm(2, 0x7b);
        assert_eq!((amd.name().as_str(), amd.kind()), ("I/O instruction", Kind::Port));
        assert_eq!(Reason::from_kvm(2, 0x78).kind(), Kind::Halt);
        assert_eq!(Reason::from_kvm(2, 0x4e).name(), "exception 14");
    }

    #[test]
    fn what_newer_headers_name() {
        for (code, name) in [(84, "RDMSR, immediate"), (85, "WRMSR, immediate")] {
            let reason = Reason::from_kvm(1, code);
            assert_eq!((reason.name().as_str(), reason.kind()), (name, Kind::Msr));
        }
        assert_eq!(Reason::from_kvm(1, 77).name(), "TDCALL");
        assert_eq!(Reason::from_kvm(2, 0x94).name(), "CR4 written");
        assert_eq!(Reason::from_kvm(2, 0x9f).name(), "CR15 written");
        assert_eq!(Reason::from_kvm(2, 0x8000_0001).kind(), Kind::Memory);
    }

    #[test]
    fn flags_and_strange_numbers() {
        assert_eq!(Reason::from_kvm(1, 0x8000_0021).name(), "invalid guest state");
        assert_eq!(Reason::from_kvm(1, 999).name(), "reason 0x3e7");
        assert_eq!(Reason::from_kvm(9, 12).name(), "reason 0xc");
    }

    #[test]
    fn the_tables_are_sorted_and_have_no_number_twice() {
        // They are searched by halves.
        for table in [VMX, SVM, &BY_KIND[..]] {
            assert!(table.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }
}
