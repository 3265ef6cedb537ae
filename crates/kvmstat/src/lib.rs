//! The KVM VMs of this host, and what KVM itself counts of them, as the tool `kvm_stat` reads it. KVM counts whether anybody reads or not.
//!
//! ```text
//!   /proc --> Vm
//!   debugfs, or statistics descriptors that a VMM has open --> Totals (one VM), HostLook --> HostRates (all), OpenMetrics
//! ```
//!
//! Must not know: why a VM exits, tracepoints, devices.

mod error;
mod hostwide;
mod totals;
mod vm;

pub use error::KvmStatError;
pub use hostwide::{HostLook, HostRates, KvmCounters, VmRates};
pub use totals::{Totals, exits_of};
pub use vm::{Vm, VmThread, command_line};
