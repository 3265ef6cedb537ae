//! The state model of a virtual function of Intel's 82599: registers as its data sheet (331520, section 8.3) has them, what has to be seen
//! of them, and how a function is brought to where another one was.
//!
//! | part | who answers | why |
//! |---|---|---|
//! | page 0: reset, mailbox, causes, masks, vectors | the monitor | the mailbox has to follow the guest, and shares the page with masks |
//! | pages 1 and 2: rings, counters | the hardware; the monitor while the guest is copied, and after a move until the driver resets | counters lie between the registers of the rings, and ixgbevf takes one that falls for one that has wrapped |
//! | page 3: nothing that the 82599 has | the hardware | |
//!
//! Today the daemon traps all pages, always: then counters go on by offsets for ever.

mod table;

pub use table::{DIRECT, MODEL};
