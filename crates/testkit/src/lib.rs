//! ioplane-testkit

pub mod driver;
pub mod front;
