//! RTL8139C+, whole.

pub mod spec;
