//! Where the bytes of a disk live.
//!
//! ```text
//!   control plane:  Backing  (open, lock, size, resize; names the holder when somebody else has the image)
//!                      | lane(depth)          one for each queue, moved to the I/O core with its poller
//!   I/O core:        Lane    submit -> push -> reap          guest memory <--> kernel or memory, never a copy in between
//! ```
//!
//! A lane is the data half: it never locks, allocates, blocks or logs. What it cannot do at once it keeps in flight and
//! hands back by [`Lane::reap`]. I/O that a lane leaves behind when it is dropped is seen to its end by [limbo]
//! before anybody may replay it: until then a late write could overwrite newer data.
//!
//! Must not know: rings, virtio, sockets, who the guest is.

mod lane;

pub use lane::{Backing, BackingInfo, Fault, Lane, Op, Outcome, StorageError, Submitted, Tag};
