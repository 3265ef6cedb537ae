//! Commodity NICs, emulated whole: an RTL8139C+ and an NE2000, each a [`ioplane_pci::Function`] on a port of the switch.
//!
//! ```text
//!   guest's stock driver --registers--> Rtl8139 | Ne2000 --Outlet--> Switch
//!                 ^------ INTA# ------------|   ^--------Inlet-------'
//! ```
//!
//! Each is also the hardware of tests: what stands on `ioplane_passthrough::Hardware` runs on them without VFIO.
//!
//! Must not know: VFIO, who watches it, hosts.
#![forbid(unsafe_code)]

pub mod ne2000;
pub mod rtl8139;
