//! The state model of a virtual function of Intel's 82576: registers as its data sheet (sections 7.8 and 8) has them, what has to be
//! seen of them, and how a function is brought to where another one was.
//!
//! | part | who answers | why |
//! |---|---|---|
//! | page 0: reset, mailbox, counters | the monitor | seldom used; a message in the mailbox and the counters have to follow the guest |
//! | page 1: causes, masks, vectors | the hardware | written for every turn of a driver's polling |
//! | pages 2 and 3: rings | the hardware; the monitor while the guest is being copied | what a tail posts is what the device may write |
//!
//! Nobody follows the rings while the guest runs: at the stop they are asked of the hardware and of memory.

mod table;

pub use table::{DIRECT, MODEL};
