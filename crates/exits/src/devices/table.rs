//! What lies where in every PC (ISA, ACPI, APIC), as QEMU and most VMMs lay it out.

/// The device and register of a port.
pub(super) fn port(port: u16) -> Option<(&'static str, String)> {
    let serial = |base: u16| {
        let names = [
            "data",
            "interrupt enable",
            "interrupt identification or FIFO control",
            "line control",
            "modem control",
            "line status",
            "modem status",
            "scratch",
        ];
        names[usize::from(port - base) & 7].to_owned()
    };
    let ide = |base: u16| {
        let names = [
            "data",
            "error or features",
            "sector count",
            "LBA low",
            "LBA mid",
            "LBA high",
            "drive and head",
            "status or command",
        ];
        names[usize::from(port - base) & 7].to_owned()
    };
    let at = |base: u16| format!("+{:#x}", port - base);
    Some(match port {
        0x00..=0x1f => ("DMA controller 1", at(0)),
        0x20 | 0x21 => ("PIC, master", ["command", "mask"][usize::from(port & 1)].into()),
        0x2e | 0x2f | 0x4e | 0x4f => ("super I/O", ["index", "data"][usize::from(port & 1)].into()),
        0x40..=0x42 => ("PIT", format!("counter {}", port - 0x40)),
        0x43 => ("PIT", "control".into()),
        0x60 => ("keyboard controller", "data".into()),
        0x61 => ("system control port B", "PIT counter 2's gate and output, NMI".into()),
        0x64 => ("keyboard controller", "status or command".into()),
        0x70 => ("RTC", "index".into()),
        0x71 => ("RTC", "data".into()),
        0x80 => ("POST", "code, or a delay".into()),
        0x81..=0x8f => ("DMA pages", at(0x80)),
        0x92 => ("system control port A", "A20 and reset".into()),
        0xa0 | 0xa1 => ("PIC, slave", ["command", "mask"][usize::from(port & 1)].into()),
        0xb2 | 0xb3 => ("SMI", ["command", "status"][usize::from(port & 1)].into()),
        0xc0..=0xdf => ("DMA controller 2", at(0xc0)),
        0xed => ("delay", "io_delay".into()),
        0x170..=0x177 => ("IDE channel 2", ide(0x170)),
        0x1f0..=0x1f7 => ("IDE channel 1", ide(0x1f0)),
        0x376 => ("IDE channel 2", "alternate status or control".into()),
        0x3f6 => ("IDE channel 1", "alternate status or control".into()),
        0x278..=0x27f => ("parallel port 2", at(0x278)),
        0x378..=0x37f => ("parallel port 1", at(0x378)),
        0x2e8..=0x2ef => ("serial port 4", serial(0x2e8)),
        0x2f8..=0x2ff => ("serial port 2", serial(0x2f8)),
        0x3b0..=0x3df => ("VGA", at(0x3b0)),
        0x3e8..=0x3ef => ("serial port 3", serial(0x3e8)),
        0x3f0..=0x3f5 | 0x3f7 => ("floppy controller", at(0x3f0)),
        0x3f8..=0x3ff => ("serial port 1", serial(0x3f8)),
        0x402 => ("firmware debug console", "data".into()),
        0x4d0 | 0x4d1 => ("PIC", "edge or level".into()),
        0x510 => ("fw_cfg", "selector".into()),
        0x511 => ("fw_cfg", "data".into()),
        0x514..=0x51b => ("fw_cfg", "DMA address".into()),
        0x600..=0x603 => ("ACPI power management", "PM1 event".into()),
        0x604..=0x605 => ("ACPI power management", "PM1 control".into()),
        0x608..=0x60b => ("ACPI power management", "PM timer (q35, i440fx)".into()),
        0x620..=0x62f => ("ACPI general events", at(0x620)),
        0x660..=0x67f => ("TCO watchdog", at(0x660)),
        0xae00..=0xae0f => ("ACPI PCI hot-plug (i440fx)", at(0xae00)),
        0xcc0..=0xcd7 => ("ACPI hot-plug (q35)", at(0xcc0)),
        0xcf8 => ("PCI configuration", "address".into()),
        0xcf9 => ("reset control", "reset".into()),
        0xcfc..=0xcff => ("PCI configuration", "data".into()),
        0x5658 | 0x5659 => ("VMware backdoor", at(0x5658)),
        _ => return None,
    })
}

/// The device and register of a guest-physical address.
pub(super) fn memory(address: u64) -> Option<(&'static str, String)> {
    Some(match address {
        0xa_0000..=0xb_ffff => ("VGA", "frame buffer window".into()),
        0xfec0_0000..=0xfec0_0fff => {
            let register = match address & 0xff0 {
                0 => "index",
                0x10 => "data",
                0x40 => "EOI",
                _ => "?",
            };
            ("I/O APIC", register.into())
        }
        0xfed0_0000..=0xfed0_03ff => ("HPET", hpet(address & 0x3ff)),
        0xfed4_0000..=0xfed4_4fff => ("TPM", format!("+{:#x}", address & 0xffff)),
        0xfee0_0000..=0xfee0_0fff => ("local APIC", apic((address & 0xff0) as u32 >> 4)),
        0xffc0_0000..=0xffff_ffff => ("firmware flash", format!("+{:#x}", address - 0xffc0_0000)),
        _ => return None,
    })
}

fn hpet(offset: u64) -> String {
    match offset {
        0x00..=0x07 => "capabilities".into(),
        0x10..=0x17 => "configuration".into(),
        0x20..=0x27 => "interrupt status".into(),
        0xf0..=0xf7 => "main counter".into(),
        0x100.. => {
            let part = ["configuration", "comparator", "interrupt route", "reserved"];
            format!("timer {} {}", (offset - 0x100) / 0x20, part[(offset as usize >> 3) & 3])
        }
        _ => format!("+{offset:#x}"),
    }
}

/// A register of the local APIC by its number: the address's bits 4 to 11, or the x2APIC MSR's lowest eight.
fn apic(register: u32) -> String {
    let name = match register {
        0x02 => "ID",
        0x03 => "version",
        0x08 => "task priority",
        0x0a => "processor priority",
        0x0b => "EOI",
        0x0d => "logical destination",
        0x0e => "destination format",
        0x0f => "spurious vector",
        0x10..=0x17 => "in service",
        0x18..=0x1f => "trigger mode",
        0x20..=0x27 => "interrupt request",
        0x28 => "error status",
        0x2f => "LVT CMCI",
        0x30 => "interrupt command",
        0x31 => "interrupt command, high",
        0x32 => "LVT timer",
        0x33 => "LVT thermal",
        0x34 => "LVT performance",
        0x35 => "LVT LINT0",
        0x36 => "LVT LINT1",
        0x37 => "LVT error",
        0x38 => "timer initial count",
        0x39 => "timer current count",
        0x3e => "timer divide",
        0x3f => "self IPI",
        _ => return format!("register {register:#x}"),
    };
    name.into()
}

/// The group and name of an MSR.
pub(super) fn msr(index: u32) -> (&'static str, String) {
    let name = match index {
        0x800..=0x8ff => return ("x2APIC", apic(index & 0xff)),
        0x4000_0000..=0x4000_01ff => return ("Hyper-V", hyperv(index)),
        0x4b56_4d00..=0x4b56_4dff | 0x11 | 0x12 => return ("KVM", kvm(index)),
        0x10 => "IA32_TIME_STAMP_COUNTER",
        0x17 => "IA32_PLATFORM_ID",
        0x1b => "IA32_APIC_BASE",
        0x34 => "MSR_SMI_COUNT",
        0x3a => "IA32_FEATURE_CONTROL",
        0x3b => "IA32_TSC_ADJUST",
        0x48 => "IA32_SPEC_CTRL",
        0x49 => "IA32_PRED_CMD",
        0x79 => "IA32_BIOS_UPDT_TRIG",
        0x8b => "IA32_BIOS_SIGN_ID",
        0xc1..=0xc8 => "IA32_PMC",
        0xce => "MSR_PLATFORM_INFO",
        0xe7 => "IA32_MPERF",
        0xe8 => "IA32_APERF",
        0xfe => "IA32_MTRRCAP",
        0x10a => "IA32_ARCH_CAPABILITIES",
        0x10b => "IA32_FLUSH_CMD",
        0x122 => "IA32_TSX_CTRL",
        0x140 => "MISC_FEATURES_ENABLES",
        0x174 => "IA32_SYSENTER_CS",
        0x175 => "IA32_SYSENTER_ESP",
        0x176 => "IA32_SYSENTER_EIP",
        0x179 => "IA32_MCG_CAP",
        0x17a => "IA32_MCG_STATUS",
        0x17b => "IA32_MCG_CTL",
        0x186..=0x189 => "IA32_PERFEVTSEL",
        0x198 => "IA32_PERF_STATUS",
        0x199 => "IA32_PERF_CTL",
        0x19b => "IA32_THERM_INTERRUPT",
        0x19c => "IA32_THERM_STATUS",
        0x1a0 => "IA32_MISC_ENABLE",
        0x1a4 => "MSR_MISC_FEATURE_CONTROL",
        0x1b0 => "IA32_ENERGY_PERF_BIAS",
        0x1d9 => "IA32_DEBUGCTL",
        0x200..=0x26f => "MTRR",
        0x277 => "IA32_PAT",
        0x2ff => "IA32_MTRR_DEF_TYPE",
        0x345 => "IA32_PERF_CAPABILITIES",
        0x38d => "IA32_FIXED_CTR_CTRL",
        0x38e => "IA32_PERF_GLOBAL_STATUS",
        0x38f => "IA32_PERF_GLOBAL_CTRL",
        0x390 => "IA32_PERF_GLOBAL_OVF_CTRL",
        0x400..=0x47f => "machine-check bank",
        0x606 => "MSR_RAPL_POWER_UNIT",
        0x610..=0x61f => "RAPL",
        0x6e0 => "IA32_TSC_DEADLINE",
        0xda0 => "IA32_XSS",
        0xc000_0080 => "EFER",
        0xc000_0081 => "STAR",
        0xc000_0082 => "LSTAR",
        0xc000_0084 => "SFMASK",
        0xc000_0100 => "FS_BASE",
        0xc000_0101 => "GS_BASE",
        0xc000_0102 => "KERNEL_GS_BASE",
        0xc000_0103 => "TSC_AUX",
        0xc000_0104 => "TSC_RATIO",
        0xc000_0200..=0xc000_020b => "AMD performance counter",
        0xc001_0000..=0xc001_0007 => "AMD performance counter",
        0xc001_0015 => "HWCR",
        0xc001_001f => "NB_CFG",
        0xc001_0055 => "AMD interrupt pending",
        0xc001_0114 => "VM_CR",
        0xc001_0117 => "VM_HSAVE_PA",
        0xc001_011f => "VIRT_SPEC_CTRL",
        0xc001_0140 | 0xc001_0141 => "OSVW",
        0xc001_1020 => "LS_CFG",
        0xc001_1029 => "DE_CFG",
        _ => return ("MSR", format!("{index:#x}")),
    };
    ("MSR", name.into())
}

fn kvm(index: u32) -> String {
    let name = match index {
        0x11 => "wall clock (old)",
        0x12 => "system time (old)",
        0x4b56_4d00 => "wall clock",
        0x4b56_4d01 => "system time",
        0x4b56_4d02 => "asynchronous page faults",
        0x4b56_4d03 => "steal time",
        0x4b56_4d04 => "paravirtual EOI",
        0x4b56_4d05 => "halt polling control",
        0x4b56_4d06 => "asynchronous page fault interrupt",
        0x4b56_4d07 => "asynchronous page fault acknowledgement",
        0x4b56_4d08 => "migration control",
        _ => return format!("{index:#x}"),
    };
    name.into()
}

fn hyperv(index: u32) -> String {
    let name = match index {
        0x4000_0000 => "guest OS identity",
        0x4000_0001 => "hypercall page",
        0x4000_0002 => "virtual processor index",
        0x4000_0020 => "reference time",
        0x4000_0021 => "reference TSC",
        0x4000_0070 => "EOI",
        0x4000_0071 => "interrupt command",
        0x4000_0072 => "task priority",
        0x4000_0080..=0x4000_009f => "synthetic interrupt controller",
        0x4000_00b0..=0x4000_00b7 => "synthetic timer",
        _ => return format!("{index:#x}"),
    };
    name.into()
}

/// Linux, include/uapi/linux/kvm_para.h.
pub(super) fn hypercall(number: u32) -> String {
    let name = match number {
        1 => "kick an APIC poll IRQ",
        5 => "kick a CPU",
        9 => "clock pairing",
        10 => "send IPIs",
        11 => "yield to a CPU",
        12 => "map a GPA range",
        _ => return format!("number {number}"),
    };
    name.into()
}
