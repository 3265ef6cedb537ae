//! What tests of several crates need: the guest's side of devices, devices to test the layers above them, and what all must pass.
//!
//! ```text
//!   driver, nic           what a guest's drivers do            front, vfio_user    what a VMM does, without a VM
//!   toy, simulated        the smallest devices, hardware       fuse, slow          disks that fail, or are late
//!   conformance           invariants 1 to 6, every device, every host
//!   etcd                  members that are killed, or stand still
//!   space, relay          hosts of their own, and packets between them that are late or lost
//!   silicon               an 82599's virtual functions, for a QEMU to have as devices
//!   crash                 a daemon that is killed under load   oracle, qtest       our NICs against QEMU's
//! ```
//!
//! Must not know: the daemon, the command line.
#![allow(missing_docs, reason = "only tests use it: a comment says what a name does not")]

pub mod allocator;
pub mod conformance;
pub mod crash;
pub mod driver;
pub mod etcd;
pub mod front;
pub mod fuse;
pub mod golden;
pub mod hand;
pub mod hostile;
pub mod nic;
pub mod oracle;
pub mod qtest;
pub mod relay;
pub mod silicon;
pub mod simulated;
pub mod slow;
pub mod space;
pub mod toy;
pub mod vfio_user;
