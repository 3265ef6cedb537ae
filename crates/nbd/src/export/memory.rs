//! The memory of one connection: where the data of its requests are received, and replies are sent from.

use std::sync::Arc;

use ioplane_memory::{GuestFault, GuestMap, GuestRange, GuestView, MapError};
use ioplane_storage::MAX_RANGES;

/// Unit in which memory is given to requests.
pub(super) const BLOCK: u32 = 16 << 10;
/// Largest payload: blocks that are not neighbours are a range each.
pub(super) const LARGEST: u32 = MAX_RANGES as u32 * BLOCK;
/// Ends a chain, and stands for one without blocks.
const NONE: u16 = u16::MAX;

/// The blocks of one request, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chain(u16);

impl Chain {
    /// No blocks.
    pub const EMPTY: Chain = Chain(NONE);
}

/// Memory of a fixed size, given out in chains of blocks. To a backing it looks like a guest's.
#[derive(Debug)]
pub(super) struct DataMemory {
    view: GuestView,
    /// The block after each, in its chain or among the free ones.
    next: Box<[u16]>,
    free: u16,
    available: u32,
}

impl DataMemory {
    /// At least `bytes`. Pages that were never used take no memory.
    pub fn new(bytes: u32) -> Result<DataMemory, MapError> {
        let blocks = bytes.div_ceil(BLOCK).clamp(1, u32::from(NONE));
        let map = GuestMap::anonymous(u64::from(blocks) * u64::from(BLOCK))?;
        let next = (1..=blocks).map(|next| if next == blocks { NONE } else { next as u16 }).collect();
        Ok(DataMemory { view: GuestView::new(Arc::new(map)), next, free: 0, available: blocks })
    }

    /// As a backing wants it.
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    /// Blocks for so many bytes, if they are there.
    pub fn take(&mut self, bytes: u32) -> Option<Chain> {
        let count = bytes.div_ceil(BLOCK);
        if count == 0 {
            return Some(Chain::EMPTY);
        }
        self.available = self.available.checked_sub(count)?;
        let first = self.free;
        let last = self.after(first, count - 1);
        self.free = std::mem::replace(&mut self.next[usize::from(last)], NONE);
        Some(Chain(first))
    }

    /// Takes blocks back.
    pub fn give_back(&mut self, chain: Chain) {
        let Chain(first) = chain;
        if first == NONE {
            return;
        }
        let (mut last, mut count) = (first, 1);
        while self.next[usize::from(last)] != NONE {
            last = self.next[usize::from(last)];
            count += 1;
        }
        self.next[usize::from(last)] = self.free;
        self.free = first;
        self.available += count;
    }

    /// The ranges of `len` bytes from `at` on; neighbours are joined.
    pub fn ranges(&self, chain: Chain, at: u32, len: u32, out: &mut Vec<GuestRange>) {
        out.clear();
        let (mut block, mut at, mut left) = (self.after(chain.0, at / BLOCK), at % BLOCK, len);
        while left > 0 && block != NONE {
            let len = left.min(BLOCK - at);
            let gpa = u64::from(block) * u64::from(BLOCK) + u64::from(at);
            match out.last_mut() {
                Some(last) if last.gpa + u64::from(last.len) == gpa => last.len += len,
                _ => out.push(GuestRange { gpa, len }),
            }
            left -= len;
            at = 0;
            block = self.next[usize::from(block)];
        }
    }

    /// Stores `bytes` from `at` on.
    pub fn write(&self, chain: Chain, at: u32, mut bytes: &[u8]) -> Result<(), GuestFault> {
        let (mut block, mut at) = (self.after(chain.0, at / BLOCK), at % BLOCK);
        while !bytes.is_empty() && block != NONE {
            let (here, rest) = bytes.split_at(bytes.len().min((BLOCK - at) as usize));
            self.view.write(u64::from(block) * u64::from(BLOCK) + u64::from(at), here)?;
            (bytes, at) = (rest, 0);
            block = self.next[usize::from(block)];
        }
        Ok(())
    }

    /// The block that comes `count` after `block`.
    fn after(&self, mut block: u16, count: u32) -> u16 {
        for _ in 0..count {
            if block == NONE {
                break;
            }
            block = self.next[usize::from(block)];
        }
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_whatever_the_order() {
        let mut memory = DataMemory::new(8 * BLOCK).unwrap();
        let chains: Vec<_> = (0..4).map(|_| memory.take(BLOCK + 1).unwrap()).collect();
        assert_eq!(memory.take(1), None);
        for at in [2, 0, 3, 1] {
            memory.give_back(chains[at]);
        }
        let whole = memory.take(8 * BLOCK).unwrap();
        assert_eq!(memory.take(1), None);
        memory.give_back(whole);
        assert!(memory.take(0).is_some_and(|chain| chain == Chain::EMPTY));
        assert!(memory.take(8 * BLOCK + 1).is_none() && memory.take(8 * BLOCK).is_some());
    }

    #[test]
    fn ranges_are_joined_where_they_are_neighbours() {
        let mut memory = DataMemory::new(4 * BLOCK).unwrap();
        let mut ranges = Vec::new();
        let chain = memory.take(3 * BLOCK).unwrap();
        memory.ranges(chain, 10, 2 * BLOCK, &mut ranges);
        assert_eq!(ranges, [GuestRange { gpa: 10, len: 2 * BLOCK }]);
        memory.give_back(chain);
        let (first, second) = (memory.take(1).unwrap(), memory.take(1).unwrap());
        memory.give_back(second);
        memory.give_back(first);
        // Blocks 0, 1, and now 3 would come; what was given back first comes last.
        memory.take(1).unwrap();
        let chain = memory.take(3 * BLOCK).unwrap();
        memory.ranges(chain, 0, 3 * BLOCK, &mut ranges);
        assert_eq!(ranges.iter().map(|range| range.len).sum::<u32>(), 3 * BLOCK);
    }

    #[test]
    fn what_is_written_lies_in_the_ranges() {
        let mut memory = DataMemory::new(4 * BLOCK).unwrap();
        let chain = memory.take(3 * BLOCK).unwrap();
        let bytes: Vec<u8> = (0..BLOCK + 100).map(|byte| byte as u8).collect();
        memory.write(chain, BLOCK - 7, &bytes).unwrap();
        let mut ranges = Vec::new();
        memory.ranges(chain, BLOCK - 7, bytes.len() as u32, &mut ranges);
        let mut read = vec![0; bytes.len()];
        memory.view().read(ranges[0].gpa, &mut read).unwrap();
        assert_eq!(read, bytes);
    }
}
