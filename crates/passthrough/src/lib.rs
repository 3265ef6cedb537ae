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

pub mod catalog;
pub mod hardware;
pub mod model;
pub mod monitor;
pub mod ne2000;
pub mod rtl8139;

pub use hardware::{Hardware, HardwareError};
pub use monitor::Monitor;
