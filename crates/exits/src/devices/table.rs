//! What lies where in every PC (ISA, ACPI, APIC), as QEMU and most VMMs lay it out.

use super::place::DeviceModel::{
    AcpiPowerManagement, DelayPort, Hpet, Ide, LocalApic, Msr, Pit, SerialPort, X2Apic,
};
use super::place::DevicePlace;
use super::place::RegisterRole::{Counter, EndOfInterrupt, InterruptCommand, Other, TimerDeadline};

/// The register of a port.
pub(super) fn port(port: u16) -> Option<DevicePlace> {
    let offset = |base: u16| u64::from(port - base);
    let named = |device: &str, register: &str, base: u16| DevicePlace::named(device, register, offset(base));
    let at =
        |device: &str, base: u16| DevicePlace::unnamed(device, format!("+{:#x}", port - base), offset(base));
    let pair = |names: [&'static str; 2]| names[usize::from(port & 1)];
    let serial = |device: &str, base: u16| {
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
        named(device, names[usize::from(port - base) & 7], base).of(SerialPort)
    };
    let ide = |device: &str, base: u16| {
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
        named(device, names[usize::from(port - base) & 7], base).of(Ide)
    };
    let acpi = |register: &str| named("ACPI power management", register, 0x600).of(AcpiPowerManagement);
    Some(match port {
        0x00..=0x1f => at("DMA controller 1", 0),
        0x20 | 0x21 => named("PIC, master", pair(["command", "mask"]), 0x20),
        0x2e | 0x2f => named("super I/O", pair(["index", "data"]), 0x2e),
        0x4e | 0x4f => named("super I/O", pair(["index", "data"]), 0x4e),
        0x40..=0x42 => named("PIT", &format!("counter {}", port - 0x40), 0x40).of(Pit),
        0x43 => named("PIT", "control", 0x40).of(Pit),
        0x60 => named("keyboard controller", "data", 0x60),
        0x61 => named("system control port B", "PIT counter 2's gate and output, NMI", 0x61),
        0x64 => named("keyboard controller", "status or command", 0x60),
        0x70 => named("RTC", "index", 0x70),
        0x71 => named("RTC", "data", 0x70),
        0x80 => named("POST", "code, or a delay", 0x80).of(DelayPort),
        0x81..=0x8f => at("DMA pages", 0x80),
        0x92 => named("system control port A", "A20 and reset", 0x92),
        0xa0 | 0xa1 => named("PIC, slave", pair(["command", "mask"]), 0xa0),
        0xb2 | 0xb3 => named("SMI", pair(["command", "status"]), 0xb2),
        0xc0..=0xdf => at("DMA controller 2", 0xc0),
        0xed => named("delay", "io_delay", 0xed).of(DelayPort),
        0x170..=0x177 => ide("IDE channel 2", 0x170),
        0x1f0..=0x1f7 => ide("IDE channel 1", 0x1f0),
        0x376 => named("IDE channel 2", "alternate status or control", 0x170).of(Ide),
        0x3f6 => named("IDE channel 1", "alternate status or control", 0x1f0).of(Ide),
        0x278..=0x27f => at("parallel port 2", 0x278),
        0x378..=0x37f => at("parallel port 1", 0x378),
        0x2e8..=0x2ef => serial("serial port 4", 0x2e8),
        0x2f8..=0x2ff => serial("serial port 2", 0x2f8),
        0x3b0..=0x3df => at("VGA", 0x3b0),
        0x3e8..=0x3ef => serial("serial port 3", 0x3e8),
        0x3f0..=0x3f5 | 0x3f7 => at("floppy controller", 0x3f0),
        0x3f8..=0x3ff => serial("serial port 1", 0x3f8),
        0x402 => named("firmware debug console", "data", 0x402),
        0x4d0 | 0x4d1 => named("PIC", "edge or level", 0x4d0),
        0x510 => named("fw_cfg", "selector", 0x510),
        0x511 => named("fw_cfg", "data", 0x510),
        0x514..=0x51b => named("fw_cfg", "DMA address", 0x510),
        // OVMF's place for the i440fx's (PIIX4_PMBA_VALUE in OvmfPkg/Include/OvmfPlatforms.h); its PCI ports begin at 0xc000.
        0xb008..=0xb00b => named("ACPI power management", "PM timer (i440fx, OVMF)", 0xb000)
            .of(AcpiPowerManagement)
            .role(Counter),
        0x600..=0x603 => acpi("PM1 event"),
        0x604..=0x605 => acpi("PM1 control"),
        0x608..=0x60b => acpi("PM timer (q35, i440fx)").role(Counter),
        0x620..=0x62f => at("ACPI general events", 0x620),
        0x660..=0x67f => at("TCO watchdog", 0x660),
        0xae00..=0xae0f => at("ACPI PCI hot-plug (i440fx)", 0xae00),
        0xcc0..=0xcd7 => at("ACPI hot-plug (q35)", 0xcc0),
        0xcf8 => named("PCI configuration", "address", 0xcf8),
        0xcf9 => named("reset control", "reset", 0xcf9),
        0xcfc..=0xcff => named("PCI configuration", "data", 0xcf8),
        0x5658 | 0x5659 => at("VMware backdoor", 0x5658),
        _ => return None,
    })
}

/// The register at a guest-physical address.
pub(super) fn memory(address: u64) -> Option<DevicePlace> {
    Some(match address {
        0xa_0000..=0xb_ffff => DevicePlace::named("VGA", "frame buffer window", address - 0xa_0000),
        0xfec0_0000..=0xfec0_0fff => {
            let offset = address & 0xfff;
            match address & 0xff0 {
                0 => DevicePlace::named("I/O APIC", "index", offset),
                0x10 => DevicePlace::named("I/O APIC", "data", offset),
                0x40 => DevicePlace::named("I/O APIC", "EOI", offset).role(EndOfInterrupt),
                _ => DevicePlace::unnamed("I/O APIC", "?", offset),
            }
        }
        0xfed0_0000..=0xfed0_03ff => hpet(address & 0x3ff).of(Hpet),
        0xfed4_0000..=0xfed4_4fff => {
            let offset = address & 0xffff;
            DevicePlace::unnamed("TPM", format!("+{offset:#x}"), offset)
        }
        0xfee0_0000..=0xfee0_0fff => {
            let offset = address & 0xfff;
            apic("local APIC", (offset >> 4) as u32, offset).of(LocalApic)
        }
        0xffc0_0000..=0xffff_ffff => {
            let offset = address - 0xffc0_0000;
            DevicePlace::unnamed("firmware flash", format!("+{offset:#x}"), offset)
        }
        _ => return None,
    })
}

fn hpet(offset: u64) -> DevicePlace {
    let named = |register: &str| DevicePlace::named("HPET", register, offset);
    match offset {
        0x00..=0x07 => named("capabilities"),
        0x10..=0x17 => named("configuration"),
        0x20..=0x27 => named("interrupt status"),
        0xf0..=0xf7 => named("main counter").role(Counter),
        0x100.. => {
            let part = ["configuration", "comparator", "interrupt route", "reserved"];
            named(&format!("timer {} {}", (offset - 0x100) / 0x20, part[(offset as usize >> 3) & 3]))
        }
        _ => DevicePlace::unnamed("HPET", format!("+{offset:#x}"), offset),
    }
}

/// A register of the local APIC by its number: the address's bits 4 to 11, or the x2APIC MSR's lowest eight.
fn apic(device: &str, register: u32, offset: u64) -> DevicePlace {
    let (role, name) = match register {
        0x02 => (Other, "ID"),
        0x03 => (Other, "version"),
        0x08 => (Other, "task priority"),
        0x0a => (Other, "processor priority"),
        0x0b => (EndOfInterrupt, "EOI"),
        0x0d => (Other, "logical destination"),
        0x0e => (Other, "destination format"),
        0x0f => (Other, "spurious vector"),
        0x10..=0x17 => (Other, "in service"),
        0x18..=0x1f => (Other, "trigger mode"),
        0x20..=0x27 => (Other, "interrupt request"),
        0x28 => (Other, "error status"),
        0x2f => (Other, "LVT CMCI"),
        0x30 => (InterruptCommand, "interrupt command"),
        0x31 => (InterruptCommand, "interrupt command, high"),
        0x32 => (Other, "LVT timer"),
        0x33 => (Other, "LVT thermal"),
        0x34 => (Other, "LVT performance"),
        0x35 => (Other, "LVT LINT0"),
        0x36 => (Other, "LVT LINT1"),
        0x37 => (Other, "LVT error"),
        0x38 => (TimerDeadline, "timer initial count"),
        0x39 => (Other, "timer current count"),
        0x3e => (Other, "timer divide"),
        0x3f => (InterruptCommand, "self IPI"),
        _ => return DevicePlace::unnamed(device, format!("register {register:#x}"), offset),
    };
    DevicePlace::named(device, name, offset).role(role)
}

/// An MSR.
pub(super) fn msr(index: u32) -> DevicePlace {
    let offset = index.into();
    let name = match index {
        0x800..=0x8ff => return apic("x2APIC", index & 0xff, offset).of(X2Apic),
        0x4000_0000..=0x4000_01ff => return hyperv(index),
        0x4b56_4d00..=0x4b56_4dff | 0x11 | 0x12 => return kvm(index),
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
        0x6e0 => {
            return DevicePlace::named("MSR", "IA32_TSC_DEADLINE", offset).of(Msr).role(TimerDeadline);
        }
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
        _ => return DevicePlace::unnamed("MSR", format!("{index:#x}"), offset).of(Msr),
    };
    DevicePlace::named("MSR", name, offset).of(Msr)
}

fn kvm(index: u32) -> DevicePlace {
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
        _ => return DevicePlace::unnamed("KVM", format!("{index:#x}"), index.into()),
    };
    DevicePlace::named("KVM", name, index.into())
}

fn hyperv(index: u32) -> DevicePlace {
    let name = match index {
        0x4000_0000 => "guest OS identity",
        0x4000_0001 => "hypercall page",
        0x4000_0002 => "virtual processor index",
        0x4000_0020 => "reference time",
        0x4000_0021 => "reference TSC",
        0x4000_0070 => {
            return DevicePlace::named("Hyper-V", "EOI", index.into()).role(EndOfInterrupt);
        }
        0x4000_0071 => "interrupt command",
        0x4000_0072 => "task priority",
        0x4000_0080..=0x4000_009f => "synthetic interrupt controller",
        0x4000_00b0..=0x4000_00b7 => "synthetic timer",
        _ => return DevicePlace::unnamed("Hyper-V", format!("{index:#x}"), index.into()),
    };
    DevicePlace::named("Hyper-V", name, index.into())
}

/// Linux, include/uapi/linux/kvm_para.h.
pub(super) fn hypercall(number: u32) -> DevicePlace {
    let name = match number {
        1 => "kick an APIC poll IRQ",
        5 => "kick a CPU",
        9 => "clock pairing",
        10 => "send IPIs",
        11 => "yield to a CPU",
        12 => "map a GPA range",
        _ => return DevicePlace::unnamed("KVM hypercall", format!("number {number}"), number.into()),
    };
    DevicePlace::named("KVM hypercall", name, number.into())
}
