//! What one poll of a queue may cost, in the time that it takes to copy so many bytes.
//!
//! The queues of a core take turns, so what one poll does the others wait for. A guest chooses how much a request asks for;
//! bytes, buffers, commands and system calls are all charged, and what is too large for one poll is carried out in several
//! (docs/decisions/0017-work-per-poll.md has the measurements).

use ioplane_device::Budget;
use ioplane_device::mutation::{Invariant, bound};

/// What the poll may cost, unless a test has taken the bound out.
#[inline]
pub(crate) fn of_a_poll(budget: Budget) -> u64 {
    bound(Invariant::BoundsPolls, budget.bytes.into())
}

/// What a buffer costs beside its bytes: finding and checking it is as much work as copying so many.
pub(crate) const COST_OF_BUFFER: u64 = 256;
