//! Functions of the host's PCI bus: which there are, taking one from its driver and giving it back, and driving it through VFIO.
//!
//! ```text
//!   inventory (sysfs) --> Lease (bound to vfio-pci, and given back) --> Vfio: Hardware
//! ```
//!
//! [`Hardware`] is one function, whoever drives it: [`Vfio`], or the simulated one of ioplane-testkit.
//!
//! Must not know: state models, guests' devices, sockets of VMMs, names of users' devices.

mod error;
#[cfg(test)]
mod fake;
mod hardware;
pub mod inventory;
pub mod lease;
mod physical;
mod ranges;
mod record;
mod sysfs;
mod vf;
pub mod vfio;

pub use hardware::{Hardware, HardwareError};
pub use inventory::Found;
pub use ioplane_api::spec::PciAddress;
pub use lease::{Lease, LeaseError};
pub use physical::{PhysicalFunction, flow_frame};
pub use vf::{Keeper, VfError, VfShown, recover_settings};
pub use vfio::Vfio;
