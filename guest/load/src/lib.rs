//! What runs inside a test guest: verified disk loads, commanded from the host over one character device.
//!
//! ```text
//!   host (e2e::Agent) --JSON lines--> port --> serve --> one thread a command --> load | verify | copy-check | ...
//!                     <--JSON lines--       <-- answers, progress each second
//! ```
//!
//! Every sector a load writes names its disk, its own number, its sequence number and a checksum ([`sector`]); the load
//! remembers in a [`ledger`] what each block must hold and checks it on every read. Memory is bounded by the limits
//! in [`load::Limits`]. It must not know: who serves the disk, nor anything of the other crates; it speaks to Linux only.

pub mod blockdev;
pub mod copy;
pub mod iperf;
pub mod journal;
pub mod kernel;
pub mod ledger;
pub mod load;
pub mod network;
pub mod protocol;
pub mod sector;
pub mod serve;
mod worker;
