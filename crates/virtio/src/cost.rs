//! What one poll of a queue may cost, in the time that it takes to copy so many bytes.
//!
//! The queues of a core take turns, so what one poll does the others wait for. A guest chooses how much a request asks for;
//! bytes, buffers, commands and system calls are all charged, and what is too large for one poll is carried out in several
//! (docs/decisions/0017-work-per-poll.md has the measurements).

use ioplane_device::mutation::{Invariant, bound};

/// What one poll may cost: some 30 us of copying.
pub(crate) const COST: u64 = 256 << 10;

/// [`COST`], unless a test has taken the bound out.
#[inline]
pub(crate) fn of_a_poll() -> u64 {
    bound(Invariant::BoundsPolls, COST)
}
/// What a buffer costs beside its bytes: finding and checking it is as much work as copying so many.
pub(crate) const COST_OF_BUFFER: u64 = 256;
