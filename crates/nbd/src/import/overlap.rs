//! One writer per range: a write that overlaps one in flight waits until that has ended.
//!
//! Why: a write that is replayed may have been carried out before. That changes nothing as long as no other write of the same bytes
//! can come in between (docs/decisions/0044-remote-requests-once.md).

use std::collections::VecDeque;

/// A range of the export that is being written, or will be: whose, first byte, one past the last.
#[derive(Debug, Clone, Copy)]
struct Range {
    tag: u16,
    start: u64,
    end: u64,
}

impl Range {
    fn overlaps(&self, other: &Range) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The writes of a channel. Its memory is allocated once.
#[derive(Debug)]
pub(super) struct WriteRanges {
    under_way: Vec<Range>,
    /// In the order of submission. The first one is the next to go.
    waiting: VecDeque<Range>,
}

impl WriteRanges {
    pub fn new(depth: usize) -> Self {
        WriteRanges { under_way: Vec::with_capacity(depth), waiting: VecDeque::with_capacity(depth) }
    }

    /// A write of `len` bytes at `offset` is submitted. Says whether it may go now; otherwise [`WriteRanges::next`] says when.
    pub fn begin(&mut self, tag: u16, offset: u64, len: u64) -> bool {
        let range = Range { tag, start: offset, end: offset + len };
        let free = !self.under_way.iter().chain(&self.waiting).any(|other| other.overlaps(&range));
        if free {
            self.under_way.push(range);
        } else {
            self.waiting.push_back(range);
        }
        free
    }

    /// A write that was under way has ended.
    pub fn end(&mut self, tag: u16) {
        if let Some(at) = self.under_way.iter().position(|range| range.tag == tag) {
            self.under_way.swap_remove(at);
        }
    }

    /// The next write that has waited and may go now.
    pub fn next(&mut self) -> Option<u16> {
        let first = self.waiting.front()?;
        if self.under_way.iter().any(|other| other.overlaps(first)) {
            return None;
        }
        let range = self.waiting.pop_front()?;
        self.under_way.push(range);
        Some(range.tag)
    }

    pub fn clear(&mut self) {
        self.under_way.clear();
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_write_waits_for_those_that_it_overlaps_and_for_no_other() {
        let mut writes = WriteRanges::new(8);
        assert!(writes.begin(0, 0, 4096));
        assert!(writes.begin(1, 4096, 4096));
        assert!(!writes.begin(2, 2048, 4096));
        // Behind one that waits, not beside it.
        assert!(!writes.begin(3, 6000, 100));
        assert!(writes.begin(4, 8192, 1));
        writes.end(0);
        assert_eq!(writes.next(), None);
        writes.end(1);
        assert_eq!(writes.next(), Some(2));
        assert_eq!(writes.next(), None);
        writes.end(2);
        assert_eq!(writes.next(), Some(3));
    }

    proptest! {
        /// No two overlapping writes are under way, each goes once, and overlapping ones go in order.
        #[test]
        fn never_two_on_one_byte(parts in prop::collection::vec((0u64..32, 1u64..8), 1..40), seed: u64) {
            let mut writes = WriteRanges::new(parts.len());
            let (mut going, mut gone, mut random) = (Vec::new(), Vec::new(), seed);
            for (tag, (offset, len)) in parts.iter().enumerate() {
                if writes.begin(tag as u16, *offset, *len) {
                    going.push(tag);
                    gone.push(tag);
                }
            }
            while !going.is_empty() {
                for (index, a) in going.iter().enumerate() {
                    for b in &going[index + 1..] {
                        let (a, b) = (parts[*a], parts[*b]);
                        prop_assert!(a.0 + a.1 <= b.0 || b.0 + b.1 <= a.0, "{a:?} and {b:?}");
                    }
                }
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                let ended = going.swap_remove((random >> 33) as usize % going.len());
                writes.end(ended as u16);
                while let Some(tag) = writes.next() {
                    going.push(tag.into());
                    gone.push(tag.into());
                }
            }
            let place: Vec<_> = (0..parts.len()).map(|tag| gone.iter().position(|t| *t == tag).unwrap()).collect();
            for a in 0..parts.len() {
                for b in a + 1..parts.len() {
                    let (x, y) = (parts[a], parts[b]);
                    let overlap = x.0 < y.0 + y.1 && y.0 < x.0 + x.1;
                    prop_assert!(!overlap || place[a] < place[b]);
                }
            }
        }
    }
}
