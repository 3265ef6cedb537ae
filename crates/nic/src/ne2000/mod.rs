//! NE2000 on PCI (RTL8029), whole.

pub mod spec;
