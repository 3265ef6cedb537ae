//! Copies of the writes of one queue, from the moment they are first sent until a flush has made them durable at the exporter.
//!
//! ```text
//!   add -> sent from here, and from here again after a lost connection -> acknowledged -> durable: released, oldest first
//!                                                                     \-> failed, or its queue is gone: void
//! ```
//! Made once, used on an I/O core: nothing is allocated later. While the control half has it, nothing is sent and nothing is answered
//! ([`super::turnover`]).

use std::collections::{TryReserveError, VecDeque};

use crate::mutation::{Rule, removed};
use crate::transmission::Request;

/// Least bytes: four of the longest requests, so that one always fits beside what a flush is under way for.
pub(super) const LEAST: usize = 1 << 20;
/// Bytes for each write that there is an entry for. Guests with shorter writes cause a flush before the bytes are full.
const BYTES_PER_ENTRY: usize = 2048;

/// A write, as it was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct RetainedWrite {
    /// Write, write-zeroes or trim. The cookie means nothing.
    pub request: Request,
    /// A write of zeros, of which there are no bytes here.
    pub zeros: bool,
    /// Its place in the order in which all queues of the disk sent theirs.
    pub stamp: u64,
    /// What [`super::writes::Writes::acknowledge`] said. 0: not yet.
    acknowledged: u64,
    /// Nobody was told that it succeeded, and nobody will be.
    void: bool,
    /// Where its bytes begin, counted on through all that were ever here.
    at: u64,
}

impl RetainedWrite {
    fn bytes(&self) -> usize {
        if self.zeros { 0 } else { self.request.payload() as usize }
    }

    fn durable(&self, durable: u64) -> bool {
        self.acknowledged != 0 && self.acknowledged <= durable
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Retained {
    bytes: Box<[u8]>,
    writes: VecDeque<RetainedWrite>,
    most: usize,
    /// Number of the first of `writes`.
    first: u64,
    /// Where the next bytes go, counted as [`RetainedWrite::at`].
    head: u64,
    /// Set by the control half: the connection that the channel has is of another time.
    pub cut: bool,
}

impl Retained {
    /// Allocates all that it will ever need, so that no store finds a page missing.
    pub fn new(bytes: usize) -> Result<Retained, TryReserveError> {
        let bytes = bytes.max(LEAST);
        let most = bytes / BYTES_PER_ENTRY;
        let (mut memory, mut writes) = (Vec::new(), VecDeque::new());
        memory.try_reserve_exact(bytes)?;
        memory.resize(bytes, 0u8);
        writes.try_reserve_exact(most)?;
        memory.iter_mut().step_by(4096).for_each(|byte| *std::hint::black_box(byte) = 1);
        Ok(Retained { bytes: memory.into(), writes, most, first: 0, head: 0, cut: false })
    }

    /// Where `bytes` go, if there is room.
    fn room(&self, bytes: usize) -> Option<u64> {
        let all = self.bytes.len() as u64;
        let at = self.head % all;
        // In one piece.
        let from = if at + bytes as u64 > all { self.head + (all - at) } else { self.head };
        let oldest = self.writes.front().map_or(from, |first| first.at);
        (self.writes.len() < self.most && from + bytes as u64 - oldest <= all).then_some(from)
    }

    /// Whether a write with so many bytes of data has room.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.room(bytes).is_some()
    }

    /// Adds a write, and says its number. `None` without room.
    pub fn add(&mut self, request: Request, zeros: bool, stamp: u64) -> Option<u64> {
        if self.writes.is_empty() {
            self.head = 0;
        }
        let mut write = RetainedWrite { request, zeros, stamp, acknowledged: 0, void: false, at: 0 };
        write.at = self.room(write.bytes())?;
        self.head = write.at + write.bytes() as u64;
        self.writes.push_back(write);
        Some(self.first + self.writes.len() as u64 - 1)
    }

    fn index(&self, number: u64) -> Option<usize> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        (index < self.writes.len()).then_some(index)
    }

    /// The bytes of a write.
    pub fn data(&self, number: u64) -> &[u8] {
        self.index(number).map_or(&[], |index| self.data_of(&self.writes[index]))
    }

    /// The same by what it says of itself.
    pub fn data_of(&self, write: &RetainedWrite) -> &[u8] {
        let at = (write.at % self.bytes.len() as u64) as usize;
        &self.bytes[at..at + write.bytes()]
    }

    /// Where the bytes of a write are to be put.
    pub fn data_mut(&mut self, number: u64) -> &mut [u8] {
        let Some(index) = self.index(number) else { return &mut [] };
        let write = &self.writes[index];
        let at = (write.at % self.bytes.len() as u64) as usize;
        &mut self.bytes[at..at + write.bytes()]
    }

    /// The server has acknowledged it, as the import's `nth`.
    pub fn acknowledge(&mut self, number: u64, nth: u64) {
        if let Some(index) = self.index(number) {
            self.writes[index].acknowledged = nth;
        }
    }

    /// It has failed.
    pub fn void(&mut self, number: u64) {
        if let Some(index) = self.index(number) {
            self.writes[index].void = true;
        }
    }

    /// Nobody is told any more of what was not acknowledged.
    pub fn void_unacknowledged(&mut self) {
        self.writes.iter_mut().filter(|write| write.acknowledged == 0).for_each(|write| write.void = true);
    }

    /// Lets go of what need not be kept, oldest first.
    #[inline]
    pub fn release(&mut self, durable: u64) {
        while self.writes.front().is_some_and(|first| first.void || first.durable(durable)) {
            self.writes.pop_front();
            self.first += 1;
        }
    }

    /// Whether more than a half is taken by writes that a flush would free: the other half is for what comes while it is under way.
    #[inline]
    pub fn wants_flush(&self, durable: u64) -> bool {
        let Some(oldest) = self.writes.front() else { return false };
        let half = self.head - oldest.at > self.bytes.len() as u64 / 2 || self.writes.len() > self.most / 2;
        half && oldest.acknowledged > durable
    }

    /// What another instance of the exporter may have lost.
    pub fn left(&self, durable: u64) -> impl Iterator<Item = &RetainedWrite> {
        let all = removed(Rule::NotTheDurable);
        self.writes.iter().filter(move |write| !write.void && (all || !write.durable(durable)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::{NBD_CMD_TRIM, NBD_CMD_WRITE};

    fn request(command: u16, length: u32) -> Request {
        Request { flags: 0, command, cookie: 0, offset: 0, length }
    }

    #[test]
    fn what_is_durable_is_released_oldest_first() {
        let mut retained = Retained::new(LEAST).unwrap();
        let write = request(NBD_CMD_WRITE, 4096);
        let numbers: Vec<u64> = (0..4).map(|at| retained.add(write, false, at).unwrap()).collect();
        for (nth, number) in [(1, 1), (2, 0), (3, 2)] {
            retained.acknowledge(numbers[number], nth);
        }
        let left = |retained: &Retained, durable| -> Vec<u64> {
            retained.left(durable).map(|write| write.stamp).collect()
        };
        assert_eq!(left(&retained, 1), [0, 2, 3]);
        retained.release(1);
        assert_eq!(retained.writes.len(), 4, "the first is not durable");
        retained.release(2);
        assert_eq!(left(&retained, 2), [2, 3]);
        retained.void(numbers[3]);
        retained.release(3);
        assert!(retained.writes.is_empty());
        // A number that is gone is nobody's.
        retained.void(numbers[0]);
        assert!(retained.data(numbers[0]).is_empty());
    }

    #[test]
    fn memory_that_there_is_not_is_an_error() {
        assert!(Retained::new(isize::MAX as usize).is_err());
    }

    #[test]
    fn a_flush_is_wanted_once_a_half_is_taken_by_what_it_would_free() {
        let mut retained = Retained::new(LEAST).unwrap();
        let mut numbers = Vec::new();
        while retained.has_room(4096) {
            numbers.push(retained.add(request(NBD_CMD_WRITE, 4096), false, 0).unwrap());
        }
        assert_eq!(numbers.len(), LEAST / 4096);
        assert!(!retained.wants_flush(0), "none is acknowledged");
        for (nth, number) in numbers.iter().enumerate() {
            retained.acknowledge(*number, nth as u64 + 1);
        }
        assert!(retained.wants_flush(0));
        retained.release(100);
        assert!(retained.wants_flush(100), "156 are left");
        retained.release(200);
        assert!(!retained.wants_flush(200));
        // What has no bytes takes places, too.
        let mut retained = Retained::new(LEAST).unwrap();
        while let Some(number) = retained.add(request(NBD_CMD_TRIM, 1 << 20), false, 0) {
            retained.acknowledge(number, number + 1);
        }
        assert_eq!(retained.writes.len(), LEAST / BYTES_PER_ENTRY);
        assert!(retained.wants_flush(0));
    }

    proptest! {
        /// Whatever is added and released, each write keeps its bytes, and no more than the memory is taken.
        #[test]
        fn bytes_stay_as_they_are(lengths in prop::collection::vec((1u32..300_000, 0usize..5), 1..60)) {
            let mut retained = Retained::new(LEAST).unwrap();
            let mut kept = VecDeque::new();
            let mut nth = 0;
            for (at, (length, gone)) in lengths.iter().enumerate() {
                let length = (*length).min(256 << 10);
                while !retained.has_room(length as usize) {
                    let (number, _, _) = kept.pop_front().expect("it is empty, and has no room");
                    nth += 1;
                    retained.acknowledge(number, nth);
                    retained.release(nth);
                }
                let number = retained.add(request(NBD_CMD_WRITE, length), false, at as u64).unwrap();
                retained.data_mut(number).fill(at as u8);
                kept.push_back((number, at as u8, length));
                for _ in 0..*gone {
                    let Some((number, _, _)) = kept.pop_front() else { break };
                    nth += 1;
                    retained.acknowledge(number, nth);
                    retained.release(nth);
                }
                for (number, byte, length) in &kept {
                    prop_assert_eq!(retained.data(*number).len(), *length as usize);
                    prop_assert!(retained.data(*number).iter().all(|each| each == byte));
                }
            }
        }
    }
}
