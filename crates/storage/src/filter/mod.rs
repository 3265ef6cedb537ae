//! Backings around backings, for tests: slow, stalled and failing disks, and one whose power fails.
//!
//! ```text
//!   lane of a filter:  submit --Pass--> inner lane --------------------> reap
//!                         \--Hold--> kept here, until time or release --> inner lane
//! ```
//! They are backings like any other (wakers, operations in flight, limbo), and their lanes do not allocate; some make system calls
//! where a real lane would not.

mod fail;
mod gate;
mod hold;
mod power;

pub use fail::{Fail, Failure, OpKind, When};
pub use hold::{Delay, Stall};
pub use power::{Keep, PowerCut};
