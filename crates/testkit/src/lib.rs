//! ioplane-testkit

pub mod allocator;
pub mod conformance;
pub mod driver;
pub mod front;
pub mod toy;
