//! PCI functions: configuration space, BARs and who may touch which page, interrupts.
//!
//! ```text
//!   host (vfio-user, our VMM) --access(RegisterAddress::Config | Bar)--> Function ---- owns ----> ConfigSpace, Line, Vectors
//!        |  wire(irq, vector, Wire)                                         |
//!        |  grow_memory, replace_memory(QuiescenceProof)                    +-- bars() -> BarMap: trapped, mapped, shadow pages
//!        +<---------------- attention(): readable when attend() has something to do
//! ```
//!
//! A [`Function`] is an [`ioplane_device::Device`] whose registers are those of a PCI function. A host that can serve one can serve
//! all: emulated NICs, mediated hardware, hardware passed through, virtio over PCI.
//!
//! Must not know: sockets, VFIO, what any device does.
#![forbid(unsafe_code)]

mod bars;
mod config;
mod function;
mod intx;
pub mod lent_pages;
pub mod register_file;
pub mod spec;
mod vectors;

pub use bars::{Bar, BarMap, PageError, Pages, Space, Touch};
pub use config::{Capability, ConfigChange, ConfigSpace, Identity};
pub use function::{AnyFunction, Function, Irq, Irqs, NotReady, Wire, WireError};
pub use intx::Line;
pub use lent_pages::{LentPages, LentPagesError, PageMessage};
pub use register_file::RegisterFile;
pub use vectors::Vectors;

/// The unit in which a BAR can be shared with a guest, in bytes.
pub const PAGE: u64 = 4096;
