//! The monitor, with the emulated NICs as hardware and the drivers of testkit as guests.

mod hostile;
mod out;
mod rig;
mod rtl8139;
