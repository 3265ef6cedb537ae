//! What is known of a VM: its memory, which devices KVM has itself, and what forbids interpreting its code.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::arithmetic::OperandSize;
use crate::slots::MemorySlots;

/// Where the interrupt controllers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterruptController {
    /// All in the VMM.
    #[default]
    UserSpace,
    /// The local APIC in KVM, PIC and IOAPIC in the VMM (KVM_CAP_SPLIT_IRQCHIP).
    Split,
    /// All in KVM (KVM_CREATE_IRQCHIP).
    Kernel,
}

/// Why nothing of a VM is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
pub enum ClusterObstacle {
    /// Task priority and interrupts of a local APIC in the VMM are exchanged at every exit.
    #[error("the local APIC is in the VMM")]
    UserSpaceApic,
    /// SEV, TDX or another protected type: registers and memory are not the VMM's to read.
    #[error("the VM is protected from its VMM")]
    Protected,
    /// Part of its memory is not mapped by the VMM.
    #[error("memory is in a guest_memfd")]
    GuestMemfd,
    /// Stores are recorded in a ring, which only KVM fills.
    #[error("dirty pages are recorded in a ring")]
    DirtyRing,
    /// A debugger controls the guest.
    #[error("a debugger is attached to a vCPU")]
    GuestDebug,
    /// Another vCPU may flush the translations of one that interprets and not wait for it.
    #[error("several vCPUs, and CPUID offers flushing translations without the vCPU that has them")]
    RemoteFlush,
    /// KVM translates by tables of its own, and must see each store to the guest's.
    #[error("KVM keeps shadow page tables: the host has no EPT or NPT, or does not use it")]
    ShadowTables,
    /// KVM has taken a memory slot that cannot be followed here.
    #[error("a memory slot overlaps another or is not made of pages")]
    UnknownMemory,
}

/// What a guest's CPUID says of interest here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestCpuid {
    /// Bits of a guest-physical address.
    pub physical_bits: u32,
    /// INVLPGB, KVM's PV TLB flush, or Hyper-V's remote flush.
    pub remote_flush: bool,
    /// RDTSCP.
    pub rdtscp: bool,
}

impl GuestCpuid {
    /// From what KVM_SET_CPUID or KVM_SET_CPUID2 is given: (leaf, index, EAX, EBX, ECX, EDX).
    pub fn of(leaves: impl Iterator<Item = (u32, u32, [u32; 4])>) -> Self {
        // Before processors said how many.
        let mut cpuid = Self { physical_bits: 36, remote_flush: false, rdtscp: false };
        let mut hypervisors = BTreeSet::new();
        let mut kvm_flush = false;
        let mut hyperv_flush = false;
        for (leaf, _, [eax, ebx, ecx, edx]) in leaves {
            match leaf {
                0x8000_0008 => {
                    cpuid.physical_bits = eax & 0xff;
                    cpuid.remote_flush |= ebx & 1 << 3 != 0;
                }
                0x8000_0001 => cpuid.rdtscp = edx & 1 << 27 != 0,
                // Hypervisors announce themselves from 40000000 on, each at a multiple of 256.
                0x4000_0000..0x4001_0000 if leaf & 0xff == 0 => {
                    let name: Vec<u8> = [ebx, ecx, edx].into_iter().flat_map(u32::to_le_bytes).collect();
                    hypervisors.insert(name);
                }
                0x4000_0000..0x4001_0000 if leaf & 0xff == 1 => kvm_flush |= eax & 1 << 9 != 0,
                0x4000_0004 => hyperv_flush |= eax & 1 << 2 != 0,
                _ => {}
            }
        }
        let names = |name: &[u8]| hypervisors.iter().any(|other| other == name);
        cpuid.remote_flush |= kvm_flush && names(b"KVMKVMKVM\0\0\0");
        cpuid.remote_flush |= hyperv_flush && names(b"Microsoft Hv");
        cpuid
    }
}

/// A range that KVM answers itself: an eventfd, by KVM_IOEVENTFD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EventRange {
    port: bool,
    address: u64,
    /// 0 stands for any length.
    length: u64,
}

/// One VM, as its descriptor's calls have made it.
#[derive(Debug, Default)]
pub struct VmState {
    /// Its memory.
    pub slots: MemorySlots,
    controller: InterruptController,
    timer: bool,
    events: Vec<EventRange>,
    /// Memory of devices that the guest reaches past the VMM: address and bytes.
    devices: Vec<(u64, u64)>,
    vcpus: u32,
    remote_flush: bool,
    time_stamp_scaled: bool,
    obstacles: BTreeSet<ClusterObstacle>,
}

impl VmState {
    /// KVM_CREATE_IRQCHIP or KVM_CAP_SPLIT_IRQCHIP has succeeded.
    pub fn interrupt_controller(&mut self, controller: InterruptController) {
        self.controller = controller;
    }

    /// Whether the PIC is KVM's: then the VMM hands it no interrupts.
    pub fn has_interrupt_controller(&self) -> bool {
        self.controller == InterruptController::Kernel
    }

    /// KVM_CREATE_PIT or KVM_CREATE_PIT2 has succeeded.
    pub fn timer_created(&mut self) {
        self.timer = true;
    }

    /// KVM_CREATE_VCPU has succeeded.
    pub fn vcpu_created(&mut self) {
        self.vcpus += 1;
    }

    /// KVM_SET_TSC_KHZ has succeeded on the VM: vCPUs to come may count at another speed than the host.
    pub fn scale_time_stamp(&mut self) {
        self.time_stamp_scaled = true;
    }

    /// Whether [`VmState::scale_time_stamp`] was called.
    pub fn time_stamp_scaled(&self) -> bool {
        self.time_stamp_scaled
    }

    /// How many vCPUs have been made.
    pub fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// KVM_SET_CPUID or KVM_SET_CPUID2 has succeeded.
    pub fn cpuid_set(&mut self, cpuid: GuestCpuid) {
        self.remote_flush |= cpuid.remote_flush;
    }

    /// KVM_IOEVENTFD has succeeded. What a written value selects does not matter: the whole range is left to KVM.
    pub fn event_range(&mut self, port: bool, address: u64, length: u32, removed: bool) {
        let range = EventRange { port, address, length: u64::from(length) };
        if removed {
            if let Some(at) = self.events.iter().position(|other| *other == range) {
                self.events.swap_remove(at);
            }
        } else {
            self.events.push(range);
        }
    }

    /// A device's registers are mapped into the guest, by a slot that is not in `slots`: all accesses there are left to KVM.
    pub fn device_range(&mut self, address: u64, length: u64, removed: bool) {
        if removed {
            if let Some(at) = self.devices.iter().position(|other| *other == (address, length)) {
                self.devices.swap_remove(at);
            }
        } else {
            self.devices.push((address, length));
        }
    }

    /// From now on nothing of this VM is interpreted, until [`VmState::allow`].
    pub fn refuse(&mut self, obstacle: ClusterObstacle) {
        self.obstacles.insert(obstacle);
    }

    /// An obstacle is gone: the debugger has left.
    pub fn allow(&mut self, obstacle: ClusterObstacle) {
        self.obstacles.remove(&obstacle);
    }

    /// Why nothing is interpreted; `None` if it may be.
    pub fn obstacle(&self) -> Option<ClusterObstacle> {
        if let Some(first) = self.obstacles.first() {
            return Some(*first);
        }
        if self.controller == InterruptController::UserSpace {
            return Some(ClusterObstacle::UserSpaceApic);
        }
        (self.remote_flush && self.vcpus > 1).then_some(ClusterObstacle::RemoteFlush)
    }

    fn event(&self, port: bool, address: u64, size: OperandSize) -> bool {
        self.events.iter().any(|range| {
            range.port == port
                && address < range.address.saturating_add(range.length.max(8))
                && range.address < address.saturating_add(size.bytes())
        })
    }

    fn device(&self, address: u64, size: OperandSize) -> bool {
        let end = address.saturating_add(size.bytes());
        self.devices.iter().any(|(first, length)| address < first.saturating_add(*length) && *first < end)
    }

    /// Whether an access to ports is answered by the VMM and nowhere else.
    pub fn port_leaves_kernel(&self, port: u16, size: OperandSize, write: bool) -> bool {
        let last = u64::from(port) + size.bytes() - 1;
        let touches = |first: u64, end: u64| u64::from(port) <= end && first <= last;
        let controller = self.controller == InterruptController::Kernel
            && (touches(0x20, 0x21) || touches(0xa0, 0xa1) || touches(0x4d0, 0x4d1));
        let timer = self.timer && (touches(0x40, 0x43) || touches(0x61, 0x61));
        // 7E: KVM moves RIP before it exits (a quirk for kexec). B2, B3: system management interrupts.
        let special = touches(0x7e, 0x7e) || touches(0xb2, 0xb3);
        !(controller || timer || special || write && self.event(true, u64::from(port), size))
    }

    /// The same for guest-physical memory that no slot has. `apic_page` is where this vCPU has its local APIC.
    pub fn address_leaves_kernel(
        &self,
        address: u64,
        size: OperandSize,
        write: bool,
        apic_page: u64,
    ) -> bool {
        const IOAPIC: u64 = 0xfec0_0000;
        let page = address & !0xfff;
        let controller =
            page == apic_page || self.controller == InterruptController::Kernel && page == IOAPIC;
        !(controller || self.device(address, size) || write && self.event(false, address, size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OperandSize::{Byte, Dword, Word};

    fn kernel() -> VmState {
        let mut vm = VmState::default();
        vm.interrupt_controller(InterruptController::Kernel);
        vm.timer_created();
        vm
    }

    #[test]
    fn ports_of_the_kernel() {
        let vm = kernel();
        for port in [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1, 0x40, 0x43, 0x61, 0x7e, 0xb2, 0xb3] {
            assert!(!vm.port_leaves_kernel(port, Byte, false), "{port:x}");
        }
        assert!(!vm.port_leaves_kernel(0x1f, Word, false), "its second byte is the PIC's");
        assert!(!vm.port_leaves_kernel(0x3e, Dword, false));
        for port in [0x1f, 0x22, 0x60, 0x64, 0x70, 0x1f0, 0xcf8, 0xffff] {
            assert!(vm.port_leaves_kernel(port, Byte, true), "{port:x}");
        }
        let mut split = VmState::default();
        split.interrupt_controller(InterruptController::Split);
        assert!(split.port_leaves_kernel(0x20, Byte, true));
        assert!(split.port_leaves_kernel(0x40, Byte, true));
        assert!(!split.port_leaves_kernel(0xb2, Byte, true));
    }

    #[test]
    fn memory_of_the_kernel() {
        let vm = kernel();
        assert!(!vm.address_leaves_kernel(0xfee0_0300, Dword, true, 0xfee0_0000));
        assert!(vm.address_leaves_kernel(0xfee0_0300, Dword, true, 0xfef0_0000), "an APIC that has moved");
        assert!(!vm.address_leaves_kernel(0xfec0_0010, Dword, false, 0xfee0_0000));
        assert!(vm.address_leaves_kernel(0xfebc_0000, Dword, false, 0xfee0_0000));
    }

    #[test]
    fn writes_that_wake_an_eventfd() {
        let mut vm = kernel();
        vm.event_range(false, 0xfe00_0000, 2, false);
        vm.event_range(true, 0xc010, 0, false);
        assert!(!vm.address_leaves_kernel(0xfe00_0000, Word, true, 0));
        assert!(!vm.address_leaves_kernel(0xfdff_fffe, Dword, true, 0));
        assert!(vm.address_leaves_kernel(0xfe00_0000, Word, false, 0), "reads are the VMM's");
        assert!(!vm.port_leaves_kernel(0xc010, Word, true));
        vm.event_range(true, 0xc010, 0, true);
        assert!(vm.port_leaves_kernel(0xc010, Word, true));
    }

    #[test]
    fn registers_that_the_guest_has_mapped() {
        let mut vm = kernel();
        vm.device_range(0xfe00_1000, 0x3000, false);
        for address in [0xfe00_1000, 0xfe00_3ffc, 0xfe00_0ffe] {
            assert!(!vm.address_leaves_kernel(address, Dword, false, 0), "{address:x}");
            assert!(!vm.address_leaves_kernel(address, Dword, true, 0), "{address:x}");
        }
        assert!(vm.address_leaves_kernel(0xfe00_0ffc, Dword, true, 0), "in front of them");
        assert!(vm.address_leaves_kernel(0xfe00_4000, Byte, false, 0), "behind them");
        vm.device_range(0xfe00_1000, 0x1000, true);
        assert!(!vm.address_leaves_kernel(0xfe00_1000, Dword, true, 0), "another range");
        vm.device_range(0xfe00_1000, 0x3000, true);
        assert!(vm.address_leaves_kernel(0xfe00_1000, Dword, true, 0));
    }

    #[test]
    fn obstacles() {
        let mut vm = VmState::default();
        assert_eq!(vm.obstacle(), Some(ClusterObstacle::UserSpaceApic));
        vm.interrupt_controller(InterruptController::Split);
        vm.vcpu_created();
        assert_eq!(vm.obstacle(), None);
        vm.refuse(ClusterObstacle::GuestDebug);
        assert_eq!(vm.obstacle(), Some(ClusterObstacle::GuestDebug));
        vm.allow(ClusterObstacle::GuestDebug);
        vm.cpuid_set(GuestCpuid { physical_bits: 40, remote_flush: true, rdtscp: false });
        assert_eq!(vm.obstacle(), None, "one vCPU flushes its own");
        vm.vcpu_created();
        assert_eq!(vm.obstacle(), Some(ClusterObstacle::RemoteFlush));
    }

    #[test]
    fn what_cpuid_says() {
        let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let kvm = (0x4000_0000, 0, [0x4000_0001, word(b"KVMK"), word(b"VMKV"), word(b"M\0\0\0")]);
        let hyperv = (0x4000_0000, 0, [0x4000_0005, word(b"Micr"), word(b"osof"), word(b"t Hv")]);
        let of = |leaves: &[(u32, u32, [u32; 4])]| GuestCpuid::of(leaves.iter().copied());
        assert_eq!(of(&[]), GuestCpuid { physical_bits: 36, remote_flush: false, rdtscp: false });
        assert!(of(&[(0x8000_0001, 0, [0, 0, 0, 1 << 27])]).rdtscp);
        assert_eq!(of(&[(0x8000_0008, 0, [0x3028, 0, 0, 0])]).physical_bits, 40);
        assert!(of(&[(0x8000_0008, 0, [40, 8, 0, 0])]).remote_flush, "INVLPGB");
        assert!(of(&[kvm, (0x4000_0001, 0, [1 << 9, 0, 0, 0])]).remote_flush);
        assert!(!of(&[kvm, (0x4000_0001, 0, [1 << 8, 0, 0, 0])]).remote_flush);
        assert!(of(&[hyperv, (0x4000_0004, 0, [1 << 2, 0, 0, 0])]).remote_flush);
        assert!(!of(&[kvm, (0x4000_0004, 0, [1 << 2, 0, 0, 0])]).remote_flush);
    }
}
