//! Physical functions, handed to guests: as they are, or mediated by a state model.
//!
//! ```text
//!   guest --registers--> Passthrough ----------------------------> Hardware: Vfio | testkit's Simulated
//!                        Monitor -- StateModel (a table) --------->    |
//!                           | vets and translates DMA                  | DMA, by the IOMMU
//!                           +---- GuestMap <---------------------------+
//! ```
//!
//! What stands on [`ioplane_hardware::Hardware`] is a [`ioplane_pci::Function`], which any host serves.
//!
//! Must not know: sockets of VMMs, names of users' devices; the monitor must not know any device.

pub mod catalog;
pub mod cooperating;
pub mod direct;
pub mod i82574;
mod migratable;
pub mod monitor;
pub mod ne2000;
mod reset;
pub mod rtl8139;
mod set_up;
#[cfg(test)]
mod tests;
mod wires;

pub use cooperating::{Cooperating, Cooperation};
pub use direct::{
    Carried, Carry, CarryError, DirectFaults, ExchangeError, Exchanged, Motion, Passthrough, Prepared,
    Replayed,
};
pub use migratable::{Lent, Migratable, MigratableError};
pub use monitor::Monitor;
pub use set_up::SetUp;
