//! The journal of what is in flight: vhost-user's in-flight region.
//!
//! It lives in memory that outlives the daemon (the front end keeps the file), and says after a crash which requests had
//! been taken and not yet returned, in which order, so that each is used exactly once. Layout and the order of stores
//! follow the vhost-user specification, "Inflight I/O tracking": [`split`] and [`packed`] virtqueues. What it leaves unused
//! in an entry (`padding`) holds two things of ours: whether our code had the request in hand when the process died, and how
//! often that has happened. A request that was in hand at two deaths stops its queue: it kills daemons.
//!
//! Must not know: rings (but for the places in a packed one), guest memory.

pub(crate) mod packed;
pub(crate) mod split;

use crate::spec::feature::VIRTIO_F_RING_PACKED;

/// Deaths with the same request in hand after which its queue stops.
const DEADLY: u8 = 2;

/// What is wrong with a journal. It comes from the front end: hostile input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JournalFault {
    /// Made for another queue size.
    #[error("the in-flight region was made for {found} descriptors, the queue has {wanted}")]
    OtherSize {
        /// What the region says.
        found: u16,
        /// What the queue has.
        wanted: u16,
    },
    /// A format of the future.
    #[error("the in-flight region has version {0}, this build knows version 1")]
    OtherVersion(u16),
    /// Its numbers contradict the ring.
    #[error("the in-flight region contradicts the ring")]
    Contradiction,
    /// Too small for the queue.
    #[error("the in-flight region is too small for the queue")]
    TooSmall,
    /// A request had been in hand at two deaths.
    #[error(
        "request {0} was in hand twice when the daemon died: its queue stays stopped until the guest resets it"
    )]
    Deadly(u16),
}

/// Bytes that the region of a queue of `size` entries needs under the negotiated `features`, rounded so that no two queues
/// share a cache line.
pub const fn region_bytes(size: u16, features: u64) -> usize {
    let bytes = if features & VIRTIO_F_RING_PACKED != 0 { packed::bytes(size) } else { split::bytes(size) };
    bytes.next_multiple_of(64)
}

/// What a death says of a request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It was not in hand.
    Innocent,
    /// It was in hand.
    Suspect,
    /// It has been in hand too often.
    Deadly,
}

/// Whoever was in hand when the process died is one death nearer to being stopped; who was not starts from zero, unless it
/// has stopped the queue already. Says how many deaths to note down.
fn judge(in_hand: bool, deaths: u8) -> (u8, Verdict) {
    let deaths = if in_hand { deaths.saturating_add(1) } else { deaths };
    if deaths >= DEADLY {
        (deaths, Verdict::Deadly)
    } else if in_hand {
        (deaths, Verdict::Suspect)
    } else {
        (0, Verdict::Innocent)
    }
}
