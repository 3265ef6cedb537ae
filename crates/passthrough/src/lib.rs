//! Physical functions, handed to guests: through VFIO as they are, or under watch.
//!
//! ```text
//!   guest --registers--> Direct ---------------------------------> Hardware: Vfio | testkit's Simulated
//!                        Monitor -- StateModel (a table) --------->    |
//!                           | vets and translates DMA                  | DMA, by the IOMMU
//!                           +---- GuestMap <---------------------------+
//! ```
//!
//! [`Hardware`] is one function of the host, whoever drives it. What stands on it is a [`ioplane_pci::Function`], which any host serves.
//!
//! Must not know: sockets of VMMs, names of users' devices; the monitor must not know any device.

mod address;
pub mod catalog;
pub mod direct;
#[cfg(test)]
mod fake;
pub mod hardware;
pub mod inventory;
pub mod lease;
pub mod monitor;
pub mod ne2000;
mod reset;
pub mod rtl8139;
mod sysfs;
#[cfg(test)]
mod tests;
pub mod vfio;

pub use address::{Address, NotAnAddress};
pub use direct::{Direct, DirectFaults};
pub use hardware::{Hardware, HardwareError};
pub use inventory::Found;
pub use lease::{Lease, LeaseError};
pub use monitor::Monitor;
pub use vfio::Vfio;
