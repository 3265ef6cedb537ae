//! Where the bytes of a disk live.
//!
//! ```text
//!   control plane:  Backing  (open, lock, size, resize; names the holder when somebody else has the image)
//!                      | channel(depth)       one for each queue, moved to the I/O core with its poller
//!   I/O core:        IoChannel  submit -> push -> reap     guest memory <--> kernel or memory, never a copy in between
//!
//!   FileBacking    image file or block device: io_uring, or a few threads where that is forbidden
//!   MemoryBacking  a memfd; every operation ends at once
//!   Mirror         two of them, while a disk goes from one to the other
//!   Watched        one of them, while it is compared with another copy
//!   filter::*      Delay, Stall, Fail, PowerCut around any of them, for tests
//! ```
//!
//! An I/O channel is the data half: it never locks, allocates, blocks or logs. What it cannot do at once it keeps in flight and
//! hands back by [`IoChannel::reap`]. Operations in flight when a channel is dropped (orphaned I/O) are waited for off the I/O core
//! before anybody may replay it ([`Backing::wait_quiet`]): until then a late write could overwrite newer data. I/O that a
//! *process* leaves behind when it is killed is fenced by the locks of the image, see [`FileBacking::open`].
//!
//! Must not know: rings, virtio, sockets, who the guest is.

mod channel;
pub mod compare;
mod extents;
mod file;
pub mod filter;
mod holder;
mod lock;
mod memory;
pub mod mirror;
pub mod mutation;
mod orphan;
mod pace;

pub use channel::{
    Backing, BackingInfo, Fault, IoChannel, MAX_RANGES, Op, Outcome, SLICE, StorageError, Submitted, Tag,
};
pub use extents::DiskExtent;
pub use file::{Direct, Engine, EngineChoice, FileBacking, FileOptions, ImageFormat, ImageId, Raw, Waiting};
pub use holder::Holder;
pub use memory::MemoryBacking;
