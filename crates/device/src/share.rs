//! How much of a core a queue is entitled to.

use std::num::NonZeroU32;

/// The group and the weight of one queue, which stand with its slot on the core: of what the queues of a core have together, each is
/// entitled to a part in proportion to its weight. Carried and accounted for; no core schedules by it yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Queues of one group are one tenant's. 0 if nobody has said.
    pub group: u32,
    /// Against the other queues of the core.
    pub weight: NonZeroU32,
}

impl Default for Share {
    fn default() -> Self {
        Share { group: 0, weight: NonZeroU32::MIN }
    }
}
