//! Guest memory: the only crate that touches guest bytes.
//!
//! ```text
//!   file descriptor --map--> Mapping <--Arc-- Region(gpa, front-end address)
//!                               ^                 |
//!                               |              GuestMap (immutable, swapped whole)
//!                            Window               |
//!                     (loads of one span)      GuestView = map + dirty log   (one for each poller)
//!                                                 \--> every store, and `wrote` after it: invariant 6
//! ```
//!
//! Whatever shares the memory is hostile. It may change any byte at any moment, so nothing here makes a Rust
//! reference to shared bytes: loads and stores go through atomics or raw copies of checked spans. It may shrink the
//! file behind a mapping: the page fault that follows is caught ([`mapping`]), zero pages take the place of what
//! was lost, and the mapping is marked poisoned: views refuse it from then on.
//!
//! Must not know: rings, devices, sockets.

pub mod account;
mod charge;
mod error;
mod files;
mod filesystem;
mod lent;
mod log;
mod map;
pub mod mapping;
pub mod mutation;
mod prefetch;
mod quota;
mod table;
mod view;
mod window;

pub use account::{Account, Limits, Pin};
pub use error::{MapError, MappingError};
pub use files::Files;
pub use filesystem::FileSystem;
pub use lent::{LentRanges, MOST_LENT_RANGES};
pub use log::DirtyLog;
pub use map::{GuestMap, MemoryRegion, RegionSpec};
pub use mapping::Mapping;
pub use quota::MAX_REGIONS;
pub use view::{GuestFault, GuestRange, GuestView};
pub use window::{IoVec, Span, Window};

/// The page size of the dirty log and of every check here, in bytes.
pub const PAGE: u64 = 4096;
