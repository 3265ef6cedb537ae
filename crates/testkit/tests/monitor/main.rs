//! The monitor, with the emulated NICs as hardware and the drivers of testkit as guests.

mod handed_on;
mod handover;
mod hostile;
mod i82574;
mod i82574_hostile;
mod ne2000;
mod out;
mod page;
mod rig;
mod rtl8139;
mod saved;
mod still;
mod trouble;
