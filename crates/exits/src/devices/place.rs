//! Which register of which device: what rules match, and beside it the words that a reader sees.

use serde::{Deserialize, Serialize};

/// Devices that rules tell apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceModel {
    /// Any other, which only its name tells.
    #[default]
    Other,
    /// The registers of the ACPI PM block.
    AcpiPowerManagement,
    /// IA-PC HPET.
    Hpet,
    /// 8254.
    Pit,
    /// Ports 0x80 and 0xed, to which is written to pass the time.
    DelayPort,
    /// 8250 and its successors.
    SerialPort,
    /// The ports of the two ISA channels, and a PIIX's bus master.
    Ide,
    /// AHCI 1.x.
    Ahci,
    /// LSI Logic's SCSI adapter.
    Lsi53c895a,
    /// 82540EM, 82545EM.
    E1000,
    /// 82574L.
    E1000e,
    /// RTL8139C+.
    Rtl8139,
    /// RTL8029.
    Ne2000,
    /// Am79C970A.
    Pcnet,
    /// virtio device 1.
    VirtioNet,
    /// virtio device 2.
    VirtioBlk,
    /// virtio device 5.
    VirtioBalloon,
    /// Any other virtio device that has a name.
    Virtio,
    /// The local APIC by its page in memory.
    LocalApic,
    /// The local APIC by MSRs.
    X2Apic,
    /// Any other MSR.
    Msr,
}

impl DeviceModel {
    /// Whether its queues are virtio's.
    pub fn is_virtio(self) -> bool {
        use DeviceModel::*;
        matches!(self, VirtioNet | VirtioBlk | VirtioBalloon | Virtio)
    }

    /// Whether it is a NIC of which every access to a register is emulated.
    pub fn is_emulated_nic(self) -> bool {
        use DeviceModel::*;
        matches!(self, E1000 | E1000e | Rtl8139 | Ne2000 | Pcnet)
    }

    /// Whether Linux's driver polls it for a while after an interrupt (NAPI), and masks its interrupts or asks for their cause by registers.
    pub fn is_polled_by_napi(self) -> bool {
        use DeviceModel::*;
        matches!(self, E1000 | E1000e | Rtl8139 | VirtioNet)
    }

    /// Whether Linux's driver can make it interrupt less often.
    pub fn moderates_interrupts(self) -> bool {
        matches!(self, DeviceModel::E1000 | DeviceModel::E1000e)
    }
}

/// What a register is for, as far as rules ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegisterRole {
    /// Something else.
    #[default]
    Other,
    /// Not known: the register is called by its number or offset.
    Unnamed,
    /// Its value is the time.
    Counter,
    /// A write sets when the vCPU's own timer runs out.
    TimerDeadline,
    /// A write ends an interrupt.
    EndOfInterrupt,
    /// A write interrupts a vCPU.
    InterruptCommand,
    /// A read tells why the device has interrupted.
    InterruptCause,
    /// It turns the device's interrupts on or off.
    InterruptMask,
    /// Frames are sent by it.
    Transmit,
    /// A write tells the device that a queue has something new.
    QueueNotification,
}

/// A register of a device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DevicePlace {
    /// The device, in words: for readers only.
    pub device: String,
    /// The register, in words: for readers only.
    pub register: String,
    /// What sort of device it is.
    #[serde(default)]
    pub model: DeviceModel,
    /// What the register is for.
    #[serde(default)]
    pub role: RegisterRole,
    /// Bytes from where the device's ports, its page or its BAR begin; the number of an MSR, a CPUID leaf or a hypercall.
    #[serde(default)]
    pub offset: u64,
}

impl DevicePlace {
    /// A register that has a name.
    pub(super) fn named(device: &str, register: impl Into<String>, offset: u64) -> DevicePlace {
        let (device, register) = (device.to_owned(), register.into());
        DevicePlace { device, register, model: DeviceModel::Other, role: RegisterRole::Other, offset }
    }

    /// A register of which no more than this number or offset is known, in words.
    pub(super) fn unnamed(device: &str, register: impl Into<String>, offset: u64) -> DevicePlace {
        DevicePlace::named(device, register, offset).role(RegisterRole::Unnamed)
    }

    pub(super) fn of(self, model: DeviceModel) -> DevicePlace {
        DevicePlace { model, ..self }
    }

    pub(super) fn role(self, role: RegisterRole) -> DevicePlace {
        DevicePlace { role, ..self }
    }

    /// The same, if it is told of a queue, with that queue.
    pub(super) fn of_queue(mut self, queue: Option<u64>) -> DevicePlace {
        if let Some(queue) = queue.filter(|_| self.role == RegisterRole::QueueNotification) {
            self.register += &format!(", queue {queue}");
        }
        self
    }

    /// Whether it is known which register this is.
    pub fn is_named(&self) -> bool {
        self.role != RegisterRole::Unnamed
    }
}
