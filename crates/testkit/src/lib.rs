//! ioplane-testkit

pub mod allocator;
pub mod conformance;
pub mod crash;
pub mod driver;
pub mod front;
pub mod fuse;
pub mod golden;
pub mod hand;
pub mod hostile;
pub mod nic;
pub mod oracle;
pub mod qtest;
pub mod simulated;
pub mod slow;
pub mod toy;
pub mod vfio_user;
