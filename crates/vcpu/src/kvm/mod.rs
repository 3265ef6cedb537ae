//! Clustering on KVM's own interface: a vCPU whose KVM_RUN may return with an access that the interpreter has found, and
//! what has to be known of its VM.
//!
//! Nothing here calls KVM: the caller is given as [`VcpuDescriptor`], so that tests stand in for the kernel.

mod abi;
mod clamp;
mod counters;
mod cpuid;
mod descriptor;
mod gate;
mod guest_clock;
mod hold;
mod kernel;
mod page;
mod predictor;
mod process;
mod run_page;
mod vcpu;
mod vm;

pub use clamp::{
    ClampPage, ClampReport, ClampState, HIGHEST_HZ, LOWEST_HZ, PIT_HZ, PitClamp, PitWish, SETTLED,
};
pub use counters::{
    BatchCounts, ClusterCounts, ClusterEnd, ClusterSite, REASON_COUNTERS, REASONS, SITES, VcpuCounters,
};
pub use descriptor::VcpuDescriptor;
pub use gate::{SharedVm, VmChange, VmRead};
pub use hold::{HoldPage, HoldReport, VcpuStop};
pub use kernel::Kernel;
pub use page::{CLUSTER_PAGE_NAME, ClusterPage, ClusterReport, ClusterSwitch, MOST_VCPUS, VcpuReport};
pub use predictor::Predictor;
pub use process::{Interposer, makes_timer};
pub use run_page::RunPage;
pub use vcpu::{ClusterLimits, ClusteredVcpu};
pub use vm::{ClusterObstacle, GuestCpuid, InterruptController, VmState};
