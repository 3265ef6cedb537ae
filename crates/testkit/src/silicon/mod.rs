//! A port of an 82599 with virtual functions, each behind a vfio-user socket: for a QEMU to have them as devices of its machine, so that what runs
//! in that drives the model of the silicon ([`ioplane_nic::vf82599`]) as it would drive the card.
//!
//! ```text
//!   QEMU -- vfio-user --> Function: configuration space, BAR 0, vectors --+
//!                                                                         +-- Port: the model of each function, its time, its switch
//!   TAP interface (the cable) --------------------------------------------+
//!   report socket <-- rules that were broken, and counts: nothing else leaves, and nothing comes in
//! ```
//!
//! Time: a step for each access before it is served, as registers take their time; and steps by a thread, as long as there may be something
//! to do. So a queue that was told to end has ended after some reads, however busy this machine is.

mod function;
mod port;

pub use function::{KIND, SiliconFunction};
pub use port::{SiliconPort, SiliconReading};
