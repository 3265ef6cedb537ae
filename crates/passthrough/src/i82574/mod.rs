//! The state model of Intel's 82574L: registers and descriptors as its datasheet (revision 3.4, chapters 7 and 10) has them.
//!
//! Four small machines side by side. The card may change hands when none of them is busy:
//!
//! | region | what it follows | busy while |
//! |---|---|---|
//! | engine | the reset | the card resets and loads its NVM |
//! | transmit | the ring that is sent from | descriptors are the card's |
//! | nvm | a word of the NVM that is read by EERD | the word has not come |
//! | phy | an access to the transceiver by MDIC | it has not ended |
//!
//! Receiving keeps nothing busy: the monitor owns the ring that the card sees. Guests get one ring to send from and one to receive into, and INTA#.
//! What outlives a guest is not theirs: the flash, writing the NVM, wake-up, management.

mod table;
#[cfg(test)]
mod tests;

pub use table::MODEL;
