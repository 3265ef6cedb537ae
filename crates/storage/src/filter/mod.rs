//! Backings around backings, for tests: slow, stalled and failing disks, and one whose power fails.
//!
//! ```text
//!   channel of a filter:  submit --Pass--> inner channel --------------------> reap
//!                            \--Hold--> kept here, until time or release --> inner channel
//! ```
//! They are backings like any other (wakers, operations in flight, orphaned I/O), and their channels do not allocate; some make system calls
//! where a real channel would not.

mod fail;
mod gate;
mod hold;
mod power;

pub use fail::{Fail, Failure, OpKind, When};
pub use hold::{Delay, Stall};
pub use power::{Keep, PowerCut};
