//! The state model of an NE2000 on PCI: National Semiconductor's DP8390 (data sheet, section 10) as in Realtek's RTL8029AS, with 16 KiB
//! of memory on the card. It never is a bus master: guests move every byte through the data port, and what is checked are addresses on
//! the card.
//!
//! `table.rs` is the table; `functions.rs` has what a table cannot say, as functions of register values: ranges on the card, its receive
//! ring, the steps of its data port.
//!
//! Five small machines side by side. The card may change hands when none of them is busy:
//!
//! | region | what it follows | busy while |
//! |---|---|---|
//! | run | started or stopped | the card resets |
//! | ring | whether the card may go on where it stopped to receive | never; what would not be safe is denied |
//! | dma | the data port | a transfer of a checked range goes on; only then does the port move data, and it is not hooked |
//! | transmit | buffers on the card | a frame has been put there and is not sent |
//! | receive | the ring on the card | it holds frames that the guest has not fetched |

pub(crate) mod functions;
mod table;
#[cfg(test)]
mod tests;

pub use table::MODEL;
