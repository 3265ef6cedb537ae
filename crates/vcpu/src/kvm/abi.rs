//! Numbers of KVM's calls (include/uapi/linux/kvm.h), which `kvm-bindings` does not have.

use std::mem::size_of;

use kvm_bindings::{
    kvm_cpuid, kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_enable_cap, kvm_guest_debug, kvm_ioeventfd,
    kvm_irq_level, kvm_msi, kvm_msr_entry, kvm_pit_config, kvm_pit_state, kvm_pit_state2, kvm_regs,
    kvm_sregs, kvm_sregs2, kvm_userspace_memory_region, kvm_userspace_memory_region2, kvm_vcpu_events,
};

const KVMIO: u64 = 0xae;

const fn io(number: u64) -> u64 {
    KVMIO << 8 | number
}

const fn iow<T>(number: u64) -> u64 {
    1 << 30 | (size_of::<T>() as u64) << 16 | io(number)
}

const fn ior<T>(number: u64) -> u64 {
    2 << 30 | (size_of::<T>() as u64) << 16 | io(number)
}

/// Whether a request is KVM's at all.
pub(super) const fn is_kvm(request: u64) -> bool {
    request >> 8 & 0xff == KVMIO
}

pub(super) const KVM_CREATE_VM: u64 = io(0x01);
pub(super) const KVM_CHECK_EXTENSION: u64 = io(0x03);
pub(super) const KVM_GET_VCPU_MMAP_SIZE: u64 = io(0x04);
pub(super) const KVM_CREATE_VCPU: u64 = io(0x41);
pub(super) const KVM_SET_USER_MEMORY_REGION: u64 = iow::<kvm_userspace_memory_region>(0x46);
pub(super) const KVM_SET_USER_MEMORY_REGION2: u64 = iow::<kvm_userspace_memory_region2>(0x49);
pub(super) const KVM_CREATE_IRQCHIP: u64 = io(0x60);
pub(super) const KVM_IRQ_LINE: u64 = iow::<kvm_irq_level>(0x61);
pub(super) const KVM_IRQ_LINE_STATUS: u64 = 3 << 30 | (size_of::<kvm_irq_level>() as u64) << 16 | io(0x67);
pub(super) const KVM_SIGNAL_MSI: u64 = iow::<kvm_msi>(0xa5);
pub(super) const KVM_CREATE_PIT: u64 = io(0x64);
pub(super) const KVM_CREATE_PIT2: u64 = iow::<kvm_pit_config>(0x77);
/// Reads and writes.
pub(super) const KVM_GET_PIT: u64 = 3 << 30 | (size_of::<kvm_pit_state>() as u64) << 16 | io(0x65);
/// The header says that it reads, though it writes.
pub(super) const KVM_SET_PIT: u64 = ior::<kvm_pit_state>(0x66);
pub(super) const KVM_GET_PIT2: u64 = ior::<kvm_pit_state2>(0x9f);
pub(super) const KVM_SET_PIT2: u64 = iow::<kvm_pit_state2>(0xa0);
pub(super) const KVM_IOEVENTFD: u64 = iow::<kvm_ioeventfd>(0x79);
pub(super) const KVM_RUN: u64 = io(0x80);
/// The structure ends in an array, which does not count.
pub(super) const KVM_SET_CPUID: u64 = iow::<kvm_cpuid>(0x8a);
pub(super) const KVM_GET_REGS: u64 = ior::<kvm_regs>(0x81);
pub(super) const KVM_SET_REGS: u64 = iow::<kvm_regs>(0x82);
pub(super) const KVM_GET_SREGS: u64 = ior::<kvm_sregs>(0x83);
/// The structure ends in an array, which does not count.
pub(super) const KVM_SET_CPUID2: u64 = iow::<kvm_cpuid2>(0x90);
pub(super) const KVM_GET_VCPU_EVENTS: u64 = ior::<kvm_vcpu_events>(0x9f);
pub(super) const KVM_SET_VCPU_EVENTS: u64 = iow::<kvm_vcpu_events>(0xa0);
pub(super) const KVM_SET_GUEST_DEBUG: u64 = iow::<kvm_guest_debug>(0x9b);
pub(super) const KVM_SET_TSC_KHZ: u64 = io(0xa2);
pub(super) const KVM_GET_TSC_KHZ: u64 = io(0xa3);
pub(super) const KVM_GET_DEBUGREGS: u64 = ior::<kvm_debugregs>(0xa1);
pub(super) const KVM_ENABLE_CAP: u64 = iow::<kvm_enable_cap>(0xa3);
/// Reads and writes a structure whose entries do not count.
pub(super) const KVM_GET_MSRS: u64 = 3 << 30 | (size_of::<u64>() as u64) << 16 | io(0x88);
pub(super) const KVM_GET_DEVICE_ATTR: u64 = iow::<kvm_device_attr>(0xe2);
pub(super) const KVM_GET_SREGS2: u64 = ior::<kvm_sregs2>(0xcc);
pub(super) const KVM_MEMORY_ENCRYPT_OP: u64 = 3 << 30 | (size_of::<u64>() as u64) << 16 | io(0xba);

/// `kvm_msrs` with one entry.
#[repr(C)]
#[derive(Debug)]
pub(super) struct OneMsr {
    pub(super) count: u32,
    pub(super) padding: u32,
    pub(super) entry: kvm_msr_entry,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `strace` prints them for QEMU.
    #[test]
    fn numbers() {
        assert_eq!(KVM_RUN, 0xae80);
        assert_eq!(KVM_CREATE_VM, 0xae01);
        assert_eq!(KVM_SET_USER_MEMORY_REGION, 0x4020_ae46);
        assert_eq!(KVM_SET_USER_MEMORY_REGION2, 0x40a0_ae49);
        assert_eq!(KVM_CREATE_PIT2, 0x4040_ae77);
        assert_eq!(KVM_GET_PIT, 0xc048_ae65);
        assert_eq!(KVM_SET_PIT, 0x8048_ae66);
        assert_eq!(KVM_GET_PIT2, 0x8070_ae9f);
        assert_eq!(KVM_SET_PIT2, 0x4070_aea0);
        assert_eq!(KVM_GET_SREGS, 0x8138_ae83);
        assert_eq!(KVM_IOEVENTFD, 0x4040_ae79);
        assert_eq!(KVM_GET_REGS, 0x8090_ae81);
        assert_eq!(KVM_SET_REGS, 0x4090_ae82);
        assert_eq!(KVM_SET_CPUID, 0x4008_ae8a);
        assert_eq!(KVM_SET_CPUID2, 0x4008_ae90);
        assert_eq!(KVM_SET_GUEST_DEBUG, 0x4048_ae9b);
        assert_eq!(KVM_GET_VCPU_EVENTS, 0x8040_ae9f);
        assert_eq!(KVM_SET_VCPU_EVENTS, 0x4040_aea0);
        assert_eq!(KVM_GET_DEBUGREGS, 0x8080_aea1);
        assert_eq!(KVM_ENABLE_CAP, 0x4068_aea3);
        assert_eq!(KVM_IRQ_LINE, 0x4008_ae61);
        assert_eq!(KVM_IRQ_LINE_STATUS, 0xc008_ae67);
        assert_eq!(KVM_SIGNAL_MSI, 0x4020_aea5);
        assert_eq!(KVM_SET_TSC_KHZ, 0xaea2);
        assert_eq!(KVM_GET_TSC_KHZ, 0xaea3);
        assert_eq!(KVM_GET_MSRS, 0xc008_ae88);
        assert_eq!(KVM_GET_DEVICE_ATTR, 0x4018_aee2);
        assert_eq!(KVM_GET_SREGS2, 0x8140_aecc);
        assert_eq!(KVM_MEMORY_ENCRYPT_OP, 0xc008_aeba);
        assert!(is_kvm(KVM_ENABLE_CAP) && !is_kvm(0x5401));
    }
}
