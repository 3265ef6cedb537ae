//! What each block of a load's region must hold: four bytes a block.
//!
//! Workers own disjoint chunks of the region, so no block is written by two at a time; the atomics only carry the
//! knowledge from the workers to the final verification. Called on worker threads and on the thread that verifies.

use crate::sector::Expect;
use std::sync::atomic::{AtomicU32, Ordering};

const DISCARDED: u32 = 1 << 31;
const ZEROED: u32 = 1 << 30;
/// The highest sequence number a ledger can tell.
pub const LAST_SEQUENCE: u32 = ZEROED - 1;

/// The record of a region.
#[derive(Debug)]
pub struct Ledger {
    blocks: Vec<AtomicU32>,
    sequence: AtomicU32,
}

impl Ledger {
    /// Knows nothing of `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        let mut all = Vec::with_capacity(blocks);
        all.resize_with(blocks, || AtomicU32::new(0));
        Ledger { blocks: all, sequence: AtomicU32::new(1) }
    }

    /// How many blocks the region has.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The number of the next write, from 1; none once they are used up (a billion writes).
    pub fn next(&self) -> Option<u32> {
        let next = self.sequence.fetch_add(1, Ordering::Relaxed);
        if next <= LAST_SEQUENCE {
            return Some(next);
        }
        self.sequence.store(LAST_SEQUENCE + 1, Ordering::Relaxed);
        None
    }

    /// What block `at` must hold.
    pub fn expect(&self, at: usize) -> Expect {
        match self.blocks[at].load(Ordering::Relaxed) {
            0 => Expect::Anything,
            ZEROED => Expect::Zero,
            state if state & DISCARDED != 0 => Expect::Discarded(state & !DISCARDED),
            sequence => Expect::Content(sequence),
        }
    }

    /// Blocks hold write `sequence`.
    pub fn written(&self, blocks: std::ops::Range<usize>, sequence: u32) {
        for block in &self.blocks[blocks] {
            block.store(sequence, Ordering::Relaxed);
        }
    }

    /// Blocks hold zeroes.
    pub fn zeroed(&self, blocks: std::ops::Range<usize>) {
        for block in &self.blocks[blocks] {
            block.store(ZEROED, Ordering::Relaxed);
        }
    }

    /// A request on the blocks failed: what they hold is anybody's guess until they are written again.
    pub fn unknown(&self, blocks: std::ops::Range<usize>) {
        for block in &self.blocks[blocks] {
            block.store(0, Ordering::Relaxed);
        }
    }

    /// Blocks were discarded: they hold zeroes or what they held.
    pub fn discarded(&self, blocks: std::ops::Range<usize>) {
        for block in &self.blocks[blocks] {
            let state = match block.load(Ordering::Relaxed) {
                0 => 0,
                ZEROED => ZEROED,
                state => state | DISCARDED,
            };
            block.store(state, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_the_last_thing_done() {
        let ledger = Ledger::new(4);
        assert_eq!(ledger.expect(0), Expect::Anything);
        let first = ledger.next().unwrap();
        ledger.written(0..3, first);
        assert_eq!(ledger.expect(2), Expect::Content(first));
        ledger.discarded(1..4);
        assert_eq!(ledger.expect(1), Expect::Discarded(first));
        assert_eq!(ledger.expect(3), Expect::Anything);
        ledger.zeroed(1..2);
        assert_eq!(ledger.expect(1), Expect::Zero);
        ledger.discarded(1..2);
        assert_eq!(ledger.expect(1), Expect::Zero);
        ledger.unknown(0..1);
        assert_eq!(ledger.expect(0), Expect::Anything);
    }

    #[test]
    fn numbers_run_out_instead_of_wrapping() {
        let ledger = Ledger::new(1);
        ledger.sequence.store(LAST_SEQUENCE, Ordering::Relaxed);
        assert_eq!(ledger.next(), Some(LAST_SEQUENCE));
        assert_eq!(ledger.next(), None);
        assert_eq!(ledger.next(), None);
    }
}
