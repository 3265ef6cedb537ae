//! The client's memory, range by range.

use std::collections::BTreeMap;
use std::sync::Arc;

use ioplane_memory::GuestMap;

#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub len: u64,
    /// It came with a descriptor.
    pub shared: bool,
}

/// All ranges, by address. Those without a descriptor (ROMs, BARs of other devices) are remembered, but the device does not reach
/// them.
#[derive(Debug, Default)]
pub(super) struct Dma {
    pub ranges: BTreeMap<u64, Range>,
    pub map: Arc<GuestMap>,
}

impl Dma {
    /// Ranges that share a byte with `first..=last`, in order.
    pub fn touching(&self, first: u64, last: u64) -> impl Iterator<Item = (u64, Range)> {
        // Ranges do not overlap: of those that begin before, only the last can reach in.
        let before = self.ranges.range(..first).next_back();
        let inside = self.ranges.range(first..=last);
        before
            .into_iter()
            .chain(inside)
            .map(|(at, range)| (*at, *range))
            .filter(move |(at, range)| at + (range.len - 1) >= first)
    }
}
