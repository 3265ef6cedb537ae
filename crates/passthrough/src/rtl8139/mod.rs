//! The state model of Realtek's RTL8139C+, in C+ mode: registers as its data sheet (revision 1.6, sections 5 and 6) has them.
//!
//! Five small machines side by side. The chip may change hands when none of them is busy:
//!
//! | region | what it follows | busy while |
//! |---|---|---|
//! | engine | reset, C+ mode, receiver and transmitter on or off | the chip resets |
//! | transmit | the ring of normal priority | descriptors belong to the chip |
//! | priority | the ring of high priority | descriptors belong to the chip |
//! | tally | the dump of the counters | it writes 64 bytes into guest memory |
//! | eeprom | the pins of the 93C46 | it is being read; what would write it is denied |
//!
//! Receiving keeps nothing busy: the monitor owns the rings that the chip sees, and switches the receiver off ([`halt`](ioplane_model::StateModel::halt))
//! before the chip changes hands. What belongs to C mode (transmit status at 18h, the receive buffer, CAPR) does not exist for guests.

mod table;
#[cfg(test)]
mod tests;

pub use table::MODEL;
