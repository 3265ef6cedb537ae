//! The data side of a switch: what cores hold and read while frames flow. Nothing here takes a lock, but for publishing a snapshot,
//! which is the control side's.
//!
//! ```text
//!   Switch (control) --publish--> SwitchSnapshot --inbox-> PortTx --FrameBatch--> FramePool of the receiver --> PortRx
//!                     PortShared: what of a port changes while frames flow    Table: addresses learned
//! ```
//!
//! Must not know: the control side ([`crate::switch`]), who owns a port.

mod budget;
pub(crate) mod capture;
mod counts;
pub(crate) mod lent;
mod pool;
mod port;
pub(crate) mod rx;
mod snapshot;
mod snapshots;
mod stack;
mod table;
pub(crate) mod tx;
mod tx_batch;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) use budget::Budget;
pub use counts::SideReading;
pub use pool::BUFFER_BYTES;
pub(crate) use pool::FramePool;
pub(crate) use port::PortShared;
pub(crate) use snapshot::PortEntry;
use snapshots::Snapshots;
pub(crate) use table::{Place, Table, Tick};

/// What all port TXs of a switch share with its control side. It lives as long as any of them, with all snapshots that they go by.
#[derive(Debug)]
pub(crate) struct Fabric {
    pub snapshots: Snapshots,
    pub table: Table,
    /// Counts links that came up.
    raised: AtomicU64,
    began: Instant,
}

impl Fabric {
    /// A switch without ports that learns about `addresses` addresses; see [`crate::SwitchSettings`].
    pub fn new(name: &str, addresses: usize, ageing: Duration, hold: Duration) -> Self {
        // Unknown to guests: who knows it can choose addresses that share a set of the table.
        let seed = RandomState::new().hash_one(name);
        Fabric {
            snapshots: Snapshots::new(),
            table: Table::new(addresses, ageing, hold, seed),
            raised: AtomicU64::new(0),
            began: Instant::now(),
        }
    }

    /// Time since the switch was made.
    #[inline]
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// [`Fabric::elapsed`], as the table has it.
    #[inline]
    pub fn tick(&self) -> Tick {
        Tick::of(self.elapsed())
    }

    /// The next number of a link that comes up. Links come up on cores, too: a guest's control queue announces them.
    pub fn raise(&self) -> u64 {
        self.raised.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Links that come up later have higher numbers than `raised`.
    pub fn raised_at_least(&self, raised: u64) {
        self.raised.fetch_max(raised.min(u64::MAX / 2), Ordering::Relaxed);
    }
}
