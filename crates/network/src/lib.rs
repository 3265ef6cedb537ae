//! Where frames go: ports, the switch between them, and the uplink to the host's own network.
//!
//! ```text
//!   control side (switch/):  Switch --plug--> Port     names, addresses, VLANs, counts; dropped = unplugged
//!                              | snapshots      | tx(pair), rx(pair): made anew whenever a queue starts
//!   data side (fabric/), on I/O cores             v                                          PortRx
//!     send --> judge (VLAN, source, destination) --> buffer of the receiver --flush--> inbox --> front, pop
//!                |            |                        ^  empty buffers come back <--------------'
//!                |            '-- Table: (MAC, VLAN) -> port, lock-free, ages
//!                '-- what the receiver does not take: segmented and summed here (gso, checksum)
//! ```
//!
//! A frame is copied twice: into a buffer that belongs to its *receiver*, and out of it (docs/decisions/0008). So a receiver
//! that does not take its frames runs out of its own buffers, and nobody else is any slower; and nothing refers to the
//! sender's memory once [`PortTx::send`] has returned. A large frame may also be lent ([`PortTx::lend`]) and copied once
//! (docs/decisions/0054): its receiver may read the sender's memory until that reclaims it, which never has to wait for more than one copy.
//!
//! Everything that a sender says is hostile: frames are judged by a private copy of their first bytes, which is also what is
//! delivered; every refusal is a [`DropReason`], counted by name on one port. Work for one frame is bounded: by the ports
//! for a flood (and that by a budget), by [`gso::MOST_SEGMENTS`] for a segmentation.
//!
//! Memory: a port has [`SwitchSettings::buffers`] buffers of [`BUFFER_BYTES`] bytes for each queue pair (64 of them: 4.2 MB), reserved
//! when it is plugged and touched as far as it is needed; the switch has 16 bytes for each address it can learn.
//!
//! Must not know: rings, descriptors, addresses of guests, sockets, which device a port belongs to.

mod cause;
pub mod checksum;
mod error;
mod fabric;
mod filter;
mod flow;
pub mod gso;
mod headers;
mod offload;
pub mod spec;
mod switch;
mod tap;
mod vlan;

pub use cause::DropReason;
pub use error::NetworkError;
pub use fabric::capture::{CaptureOptions, Captured, Direction};
pub use fabric::lent::{LentFrame, Reclaim};
pub use fabric::rx::{Frame, FrameBytes, PortRx};
pub use fabric::tx::{LEND_FROM, MOST_LENT, PortTx, Reclaimed, Sent};
pub use fabric::{BUFFER_BYTES, SideReading};
pub use filter::RxFilter;
pub use offload::{Offload, RxOffloads};
pub use switch::{Capture, Learned, Port, PortOptions, PortReading, Switch, SwitchSettings};
pub use tap::{Tap, interface, tap_of_frames};
pub use vlan::Vlan;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Most ports of one switch.
pub const MOST_PORTS: u16 = 256;
/// Most queue pairs of one port.
pub const MOST_PAIRS: u16 = 16;
/// How many of a frame's first bytes [`PortTx::send`] wants to see; all of them if it has fewer.
pub const HEAD: usize = 128;
/// Longest frame: the largest IP packet, an Ethernet header and two VLAN tags.
pub const LONGEST: usize = 65_535 + 14 + 8;
