//! Which device and register an exit was about.
//!
//! Ports and addresses that every PC has, MSRs by number, and the VM's own PCI layout where its VMM tells it.

mod monitor;
mod pci;
mod place;
mod regions;
mod table;

pub use pci::Layout;
pub use place::{DeviceModel, DevicePlace, RegisterRole};
pub use regions::GuestRegions;

use crate::event::{Detail, FaultCause};

/// Names what exits are about.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    /// The VM's PCI functions.
    pub pci: Layout,
    /// What the guest's own kernel calls the rest.
    pub guest: GuestRegions,
}

impl Devices {
    /// The device and the register, if there is one that we know. The VM's own layout goes before what PCs usually have, and
    /// that before what the guest says, which knows no registers.
    pub fn name(&self, detail: Detail) -> Option<DevicePlace> {
        match detail {
            Detail::Port { port, queue, .. } => {
                let pci = self.pci.port(port).map(|place| place.of_queue(queue.map(u64::from)));
                pci.or_else(|| table::port(port)).or_else(|| self.guest.port(port))
            }
            Detail::Memory { address, .. } => {
                let usual = || table::memory(address);
                self.pci.memory(address).or_else(usual).or_else(|| self.guest.memory(address))
            }
            Detail::Msr { index, .. } => Some(table::msr(index)),
            Detail::Cpuid { leaf } => {
                Some(DevicePlace::unnamed("CPUID", format!("leaf {leaf:#x}"), leaf.into()))
            }
            Detail::Hypercall { number } => Some(table::hypercall(number)),
            Detail::Fault(cause) => Some(DevicePlace::named(
                "memory",
                match cause {
                    FaultCause::Missing => "a page that is not mapped",
                    FaultCause::WriteProtected => "a write to a write-protected page",
                    FaultCause::Protected => "a page that is not allowed to be used so",
                    FaultCause::Unknown => "first use of a page",
                },
                0,
            )),
            Detail::Nothing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(detail: Detail) -> String {
        let place = Devices::default().name(detail).unwrap();
        format!("{}: {}", place.device, place.register)
    }

    #[test]
    fn what_every_pc_has() {
        let port = |port| Detail::Port { port, width: 1, write: true, queue: None };
        assert_eq!(name(port(0x3f8)), "serial port 1: data");
        assert_eq!(name(port(0x2fd)), "serial port 2: line status");
        assert_eq!(name(port(0x177)), "IDE channel 2: status or command");
        assert_eq!(name(port(0x608)), "ACPI power management: PM timer (q35, i440fx)");
        let memory = |address| Detail::Memory { address, width: 4, write: false };
        assert_eq!(name(memory(0xfee0_00b0)), "local APIC: EOI");
        assert_eq!(name(memory(0xfed0_00f0)), "HPET: main counter");
        assert_eq!(name(Detail::Msr { index: 0x6e0, write: true }), "MSR: IA32_TSC_DEADLINE");
        assert_eq!(name(Detail::Msr { index: 0x830, write: true }), "x2APIC: interrupt command");
        assert_eq!(name(Detail::Msr { index: 0x12345, write: true }), "MSR: 0x12345");
        assert_eq!(Devices::default().name(port(0xeeee)), None);
    }
}
