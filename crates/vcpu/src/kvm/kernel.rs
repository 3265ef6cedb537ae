//! What the interposer asks of the system.

use kvm_bindings::kvm_run;

use super::clamp::page::ClampPage;
use super::counters::VcpuCounters;
use super::page::ClusterSwitch;

/// The kernel. Results are those of the system calls: an error number with a minus sign, or what the call returns.
pub trait Kernel {
    /// `ioctl`.
    fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32;
    /// Maps a vCPU's descriptor, shared, for reading and writing.
    fn map_vcpu(&self, descriptor: i32, bytes: usize) -> Option<*mut kvm_run>;
    /// Where a new vCPU counts; `None` if there is no room for it, which leaves it alone.
    fn counters(&self) -> Option<&'static VcpuCounters>;
    /// Whether KVM keeps shadow tables of the guest's page tables, so that it must see each store to those.
    fn has_shadow_tables(&self) -> bool;
    /// Whether the signals of a fault reach their handler on this thread. Asked once for each vCPU, on its thread.
    fn faults_arrive(&self) -> bool;
    /// What is switched on now. Asked often.
    fn switched(&self) -> ClusterSwitch;
    /// The interposer has failed: clustering is off from now on.
    fn failed(&self);
    /// Whether guests are offered batches ([`crate::batch`]), which changes what CPUID says to them.
    fn offers_batches(&self) -> bool {
        false
    }
    /// Where the timer clamp is switched and says how it stands; `None` if there is none.
    fn clamp(&self) -> Option<&ClampPage> {
        None
    }
    /// The number of this thread, for [`Kernel::kick`].
    fn thread(&self) -> i32 {
        0
    }
    /// Interrupts KVM_RUN on a thread, so that it returns EINTR; false if that is not possible.
    fn kick(&self, _thread: i32) -> bool {
        false
    }
}
