//! The driver side of virtio over shared memory that we own: what a guest's kernel does, without a guest.
//!
//! ```text
//!   GuestMemory (memfds, guest addresses) --alloc--> RingPlace --> Ring --> Disk (virtio-blk requests)
//!        |                                          SplitRing | PackedRing \--> net::Pair, net::Commands (virtio-net frames)
//!        +--- file descriptors, to give to a back end         +--> RawRing, RawPacked: any field, any value (bad input)
//! ```
//!
//! Written from the virtio 1.3 specification and from what Linux's driver does (when it kicks, how it asks for
//! interrupts), on purpose without a line of the device side: the two check each other. One thread drives a ring.

pub mod disk;
pub mod layout;
pub mod memory;
pub mod net;
pub mod packed;
#[cfg(test)]
mod packed_tests;
pub mod raw;
pub mod ring;
pub mod spec;
pub mod split;
#[cfg(test)]
mod tests;

pub use disk::{Disk, DiskOp, DiskPlan, Done, Shape, Token};
pub use layout::{DriverError, Part, RingMode, RingPlace, Used};
pub use memory::{GuestMemory, SharedRegion};
pub use raw::{RawPacked, RawRing};
pub use ring::DriverRing;
