//! What both sides of a swap share about ranges of the disk: which are to be copied, and which are in use just now. Atomics only: I/O
//! cores and the copier's thread use them at the same time.

use std::sync::atomic::{AtomicU64, Ordering};

use super::mutation::{SwapRule, removed};

/// Unit of what is to be copied: a bit of [`DirtyMap`] each.
pub(super) const CHUNK: u64 = 64 << 10;
/// Unit of what is in use: a bit of [`RangeLocks`] each.
const BLOCK: u64 = 4 << 10;
/// Words of each table of [`RangeLocks`]: 4 GiB of disk, after which places are used again.
const WORDS: u64 = 16 << 10;

/// A bit for each chunk of a disk: of a swap, one that the new backing may have otherwise than the old one.
#[derive(Debug)]
pub(crate) struct DirtyMap {
    words: Box<[AtomicU64]>,
    /// Bytes of a chunk.
    unit: u64,
    /// How many bits are set.
    count: AtomicU64,
    chunks: u64,
}

impl DirtyMap {
    /// Everything is to be copied.
    pub fn all(bytes: u64) -> Self {
        let chunks = bytes.div_ceil(CHUNK);
        let words = chunks.div_ceil(64);
        let bits = |word: u64| match chunks - word * 64 {
            left if left < 64 => (1 << left) - 1,
            _ => u64::MAX,
        };
        DirtyMap {
            words: (0..words).map(|word| AtomicU64::new(bits(word))).collect(),
            unit: CHUNK,
            count: AtomicU64::new(chunks),
            chunks,
        }
    }

    /// Nothing is marked. `unit`: bytes of a chunk.
    pub fn none(bytes: u64, unit: u64) -> Self {
        let chunks = bytes.div_ceil(unit);
        let words = (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        DirtyMap { words, unit, count: AtomicU64::new(0), chunks }
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// How many chunks are marked.
    #[inline]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Marks all chunks of a range. Within the disk: what is beyond is left out.
    #[inline]
    pub fn mark(&self, offset: u64, len: u64) {
        let end = (offset + len).div_ceil(self.unit).min(self.chunks);
        let mut at = offset / self.unit;
        // A word at a time: a discard may be long, and this is an I/O core.
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            let before = self.words[(at / 64) as usize].fetch_or(mask, Ordering::SeqCst);
            let new = u64::from((mask & !before).count_ones());
            if new > 0 {
                self.count.fetch_add(new, Ordering::SeqCst);
            }
            at += bits;
        }
    }

    /// Takes the mark of a chunk away; says whether there was one.
    pub fn take(&self, chunk: u64) -> bool {
        let bit = 1 << (chunk % 64);
        let before = self.words[(chunk / 64) as usize].fetch_and(!bit, Ordering::SeqCst);
        let was = before & bit != 0;
        if was {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
        was
    }

    /// Whether a chunk is marked.
    pub fn is_marked(&self, chunk: u64) -> bool {
        self.words[(chunk / 64) as usize].load(Ordering::SeqCst) & (1 << (chunk % 64)) != 0
    }

    /// Bytes of the chunks of a range that are not marked: of a short one, as each of its chunks is looked at.
    #[inline]
    pub fn unmarked(&self, offset: u64, len: u64) -> u64 {
        let end = (offset + len).div_ceil(self.unit).min(self.chunks);
        let unmarked = (offset / self.unit..end).filter(|chunk| !self.is_marked(*chunk)).count();
        unmarked as u64 * self.unit
    }

    /// The first marked chunk from `from` on, up to the end of the disk.
    pub fn next(&self, from: u64) -> Option<u64> {
        let mut mask = u64::MAX << (from % 64);
        for (index, word) in self.words.iter().enumerate().skip((from / 64) as usize) {
            let bits = word.load(Ordering::SeqCst) & mask;
            if bits != 0 {
                return Some(index as u64 * 64 + u64::from(bits.trailing_zeros()));
            }
            mask = u64::MAX;
        }
        None
    }
}

/// Who uses which range: writes of the guest among themselves, and against the copier.
///
/// A range stands for the places of its blocks in a table, so two that are 4 GiB apart wait for each other for nothing, and the table has
/// the same size for any disk. Nobody waits inside: whoever does not get all of a range has nothing of it, and asks again.
///
/// *A write* takes its places, all or none, and then looks for claims: with one, it gives its places back. *The copier* claims first, and
/// then waits until nobody has the places. Both orders are sequentially consistent, so of a write and a claim that come at once one sees
/// the other. A claim keeps new writes out, so that the copier's turn comes however busy the range is.
#[derive(Debug)]
pub(super) struct RangeLocks {
    locks: Box<[AtomicU64]>,
    claims: Box<[AtomicU64]>,
}

impl RangeLocks {
    pub fn new() -> Self {
        let table = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        RangeLocks { locks: table(), claims: table() }
    }

    /// Takes all of a range, or nothing.
    pub fn try_lock(&self, offset: u64, len: u64) -> bool {
        for (index, (word, mask)) in places(offset, len).enumerate() {
            if !take(&self.locks[word], mask) && !removed(SwapRule::OneWriter) {
                self.unlock_first(offset, len, index);
                return false;
            }
        }
        if !removed(SwapRule::Claim) && self.is_claimed(offset, len) {
            self.unlock(offset, len);
            return false;
        }
        true
    }

    /// Gives a range back.
    pub fn unlock(&self, offset: u64, len: u64) {
        self.unlock_first(offset, len, usize::MAX);
    }

    fn unlock_first(&self, offset: u64, len: u64, words: usize) {
        for (word, mask) in places(offset, len).take(words) {
            self.locks[word].fetch_and(!mask, Ordering::SeqCst);
        }
    }

    /// Whether somebody has a part of a range.
    pub fn is_locked(&self, offset: u64, len: u64) -> bool {
        places(offset, len).any(|(word, mask)| self.locks[word].load(Ordering::SeqCst) & mask != 0)
    }

    /// Whether nobody has any range.
    pub fn are_free(&self) -> bool {
        self.locks.iter().all(|word| word.load(Ordering::SeqCst) == 0)
    }

    fn is_claimed(&self, offset: u64, len: u64) -> bool {
        places(offset, len).any(|(word, mask)| self.claims[word].load(Ordering::SeqCst) & mask != 0)
    }

    /// The copier's: keeps new writes out of a range. False if the copier has a claim on those places already. There is one copier.
    pub fn claim(&self, offset: u64, len: u64) -> bool {
        if self.is_claimed(offset, len) {
            return false;
        }
        for (word, mask) in places(offset, len) {
            self.claims[word].fetch_or(mask, Ordering::SeqCst);
        }
        true
    }

    /// The copier's: whether the writes that were under way at the claim have ended.
    pub fn is_free(&self, offset: u64, len: u64) -> bool {
        removed(SwapRule::Claim) || !self.is_locked(offset, len)
    }

    /// The copier's: lets writes in again.
    pub fn release(&self, offset: u64, len: u64) {
        for (word, mask) in places(offset, len) {
            self.claims[word].fetch_and(!mask, Ordering::SeqCst);
        }
    }
}

/// Sets all of `mask` if none of it is set.
#[inline]
fn take(word: &AtomicU64, mask: u64) -> bool {
    let free = |now: u64| (now & mask == 0).then_some(now | mask);
    word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free).is_ok()
}

/// The places of a range: words of the table, each once, and the bits in them.
fn places(offset: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
    let first = offset / BLOCK;
    // No place twice, however long the range is.
    let end = (offset + len).div_ceil(BLOCK).min(first - first % 64 + WORDS * 64);
    let mut at = first;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (word, bit) = (at / 64, at % 64);
        let bits = (64 - bit).min(end - at);
        at += bits;
        let mask = if bits == 64 { u64::MAX } else { ((1 << bits) - 1) << bit };
        Some(((word % WORDS) as usize, mask))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_has_each_of_its_places_once() {
        assert_eq!(places(0, 0).count(), 0);
        assert_eq!(places(1, 1).collect::<Vec<_>>(), [(0, 1)]);
        assert_eq!(places(62 * BLOCK, 3 * BLOCK).collect::<Vec<_>>(), [(0, 3 << 62), (1, 1)]);
        for offset in [0, 5 * BLOCK, u64::from(u32::MAX) * BLOCK] {
            let mut words: Vec<usize> = places(offset, 1 << 40).map(|(word, _)| word).collect();
            assert!(words.len() as u64 <= WORDS);
            words.sort_unstable();
            words.dedup();
            assert_eq!(words.len(), places(offset, 1 << 40).count());
        }
    }

    #[test]
    fn a_claim_keeps_writes_out_and_waits_for_those_under_way() {
        let locks = RangeLocks::new();
        assert!(locks.try_lock(BLOCK, BLOCK));
        assert!(locks.claim(0, CHUNK) && !locks.is_free(0, CHUNK));
        assert!(!locks.try_lock(2 * BLOCK, 1) && locks.try_lock(CHUNK, BLOCK));
        locks.unlock(BLOCK, BLOCK);
        assert!(locks.is_free(0, CHUNK), "a write that was refused has left nothing");
        assert!(!locks.claim(0, 1), "there is a claim");
        locks.release(0, CHUNK);
        assert!(locks.try_lock(2 * BLOCK, 1));
    }

    proptest! {
        /// Against a set of blocks.
        #[test]
        fn ranges_that_overlap_exclude_each_other(ranges in prop::collection::vec((0u64..400, 1u64..200), 1..40)) {
            let (locks, mut held) = (RangeLocks::new(), Vec::<(u64, u64)>::new());
            for (at, len) in ranges {
                let (offset, bytes) = (at * BLOCK / 2, len * BLOCK / 2);
                let blocks = |(offset, bytes): (u64, u64)| offset / BLOCK..(offset + bytes).div_ceil(BLOCK);
                let mine = blocks((offset, bytes));
                let meets = held.iter().any(|other| {
                    let other = blocks(*other);
                    mine.start < other.end && other.start < mine.end
                });
                prop_assert_eq!(locks.try_lock(offset, bytes), !meets);
                if !meets {
                    held.push((offset, bytes));
                } else if held.len() > 3 {
                    let (offset, bytes) = held.remove(0);
                    locks.unlock(offset, bytes);
                }
            }
            for (offset, bytes) in held {
                locks.unlock(offset, bytes);
            }
            prop_assert!(locks.is_free(0, 1 << 40));
        }

        #[test]
        fn the_map_counts_what_is_marked(bytes in 1u64..(200 * CHUNK), marks in prop::collection::vec((any::<u64>(), 0u64..(9 * CHUNK)), 0..20)) {
            let map = DirtyMap::all(bytes);
            prop_assert_eq!(map.count(), bytes.div_ceil(CHUNK));
            let mut wanted = std::collections::BTreeSet::new();
            while let Some(chunk) = map.next(0) {
                prop_assert!(map.take(chunk) && !map.take(chunk));
            }
            prop_assert_eq!(map.count(), 0);
            for (at, len) in marks {
                let offset = at % bytes;
                let len = len.min(bytes - offset);
                map.mark(offset, len);
                wanted.extend(offset / CHUNK..(offset + len).div_ceil(CHUNK));
            }
            let mut found = std::collections::BTreeSet::new();
            let mut from = 0;
            while let Some(chunk) = map.next(from) {
                found.insert(chunk);
                from = chunk + 1;
                if from == map.chunks() { break }
            }
            prop_assert_eq!(map.count(), wanted.len() as u64);
            prop_assert_eq!(found, wanted);
        }
    }
}
