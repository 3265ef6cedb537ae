//! What clustering asks KVM for.

use kvm_bindings::{kvm_debugregs, kvm_regs, kvm_vcpu_events};

use super::page::ClusterSwitch;

/// The calls that clustering makes on a vCPU's descriptor: none but those that VMMs make too. Each returns what the
/// system call would have: 0, or an error number with a minus sign.
pub trait VcpuDescriptor {
    /// KVM_RUN.
    fn run(&mut self) -> i32;
    /// KVM_GET_REGS.
    fn registers(&mut self, registers: &mut kvm_regs) -> i32;
    /// KVM_SET_REGS.
    fn set_registers(&mut self, registers: &kvm_regs) -> i32;
    /// KVM_GET_DEBUGREGS.
    fn debug_registers(&mut self, registers: &mut kvm_debugregs) -> i32;
    /// KVM_GET_VCPU_EVENTS.
    fn events(&mut self, events: &mut kvm_vcpu_events) -> i32;
    /// KVM_SET_VCPU_EVENTS.
    fn set_events(&mut self, events: &kvm_vcpu_events) -> i32;
    /// What the guest's time stamp counter is ahead of the host's (KVM_GET_DEVICE_ATTR, KVM_VCPU_TSC_OFFSET); `None` if KVM
    /// does not say.
    fn time_stamp_offset(&mut self) -> Option<u64> {
        None
    }
    /// IA32_TSC_AUX (KVM_GET_MSRS); `None` if KVM does not say.
    fn time_stamp_auxiliary(&mut self) -> Option<u32> {
        None
    }
    /// The processor's PDPTEs (KVM_GET_SREGS2) while it uses PAE paging; `None` if KVM does not say.
    fn pdptes(&mut self) -> Option<[u64; 4]> {
        None
    }
    /// Whether the signals of a fault reach their handler on this thread. Asked once.
    fn faults_arrive(&self) -> bool {
        true
    }
    /// What is switched on now.
    fn switched(&self) -> ClusterSwitch {
        ClusterSwitch::On
    }
}
