//! The in-flight table of a packed ring: every chain taken and not returned, with all of its descriptors, since used descriptors
//! overwrite them in the ring. Its copy in the in-flight region is the journal.
//!
//! ```text
//!   0 features u64 | 8 version u16 | 10 desc_num u16 | 12 free_head u16 | 14 old_free_head u16
//!   16 used_idx u16 | 18 old_used_idx u16 | 20 used_wrap u8 | 21 old_used_wrap u8 | padding to 32
//!   32 + 32 n: inflight u8 | ours u8 | next u16 | last u16 | num u16 | counter u64 | id u16 | flags u16 | len u32 | addr u64
//! ```
//!
//! A chain lies in as many entries as it has descriptors, linked by `next`; the others are the free list, which ends at
//! `desc_num`. Taking a chain is one store (`free_head` and `old_free_head` together) behind all others. Showing a batch as
//! used is prepared in `free_head` and `used_*`, done by the flags of the first used descriptor in the ring, and settled in the
//! `old_*` fields: whoever finds them different asks the ring whether the batch was shown.
//! The byte `ours` is the padding: its top bit says in hand, the rest counts deaths.

use ioplane_memory::Window;
use ioplane_memory::mutation::{Invariant, removed};

use super::{JournalFault, Verdict, judge};
use crate::kill::{self, KillPoint};
use crate::ring::{Descriptor, Position};

/// Bytes before the entries: the fields, and what aligns the entries to eight bytes.
const HEADER: usize = 32;
/// Bytes of one entry.
const ENTRY: usize = 32;
const VERSION: u16 = 1;
const AT_VERSION: usize = 8;
const AT_DESC_NUM: usize = 10;
/// `free_head` and `old_free_head`, stored together.
const AT_FREE_HEADS: usize = 12;
/// `used_idx`, `old_used_idx` and both wrap counters, stored together.
const AT_USED: usize = 16;
/// In `ours`: our code has the request in hand.
const IN_HAND: u8 = 0x80;
/// No entry.
const NONE: u16 = u16::MAX;

/// Bytes of the region of a queue of `size` entries.
pub(super) const fn bytes(size: u16) -> usize {
    HEADER + ENTRY * size as usize
}

/// What was in flight, and of what is suspected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Buffer IDs in flight, in the order in which they were taken.
    pub heads: Vec<u16>,
    /// Those of them that were in hand when the process died.
    pub suspects: Vec<u16>,
}

/// One descriptor taken, or a free place for one.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    descriptor: Descriptor,
    id: u16,
    /// The next of the chain, or of the free list.
    next: u16,
    /// Of a chain's first entry: its last.
    last: u16,
    /// Of a chain's first entry: how many there are.
    num: u16,
}

/// The chains in flight of one packed ring. Allocates when it is made; what the region says is read once, then.
#[derive(Debug)]
pub struct InFlightTable {
    region: Option<Window>,
    entries: Box<[Entry]>,
    /// By buffer ID: the first entry of its chain.
    first: Box<[u16]>,
    free_head: u16,
    free: u16,
    /// The entry that the next descriptor of the chain being written down goes to, and how many it has so far.
    cursor: u16,
    staged: u16,
    /// The entry of the descriptor staged last.
    tail: u16,
    /// Where the device has come to, as the driver sees it.
    used: Position,
    /// The chains that the next batch shows as used: never longer than the ring.
    batch: Vec<UsedChain>,
    counter: u64,
}

/// A chain that the next batch shows as used.
#[derive(Debug, Clone, Copy)]
pub struct UsedChain {
    /// Its first entry.
    first: u16,
    /// Its buffer ID.
    pub id: u16,
    /// How many descriptors it has.
    pub num: u16,
    /// Bytes written for the driver.
    pub written: u32,
}

impl InFlightTable {
    /// Whether the memory of its region went away.
    #[inline]
    pub fn lost(&self) -> bool {
        self.region.as_ref().is_some_and(Window::poisoned)
    }

    /// An empty one without a region, for a ring of `size` entries on which the device has come to `used`.
    pub fn new(size: u16, used: Position) -> Self {
        let entry = |next| Entry { next, ..Entry::default() };
        InFlightTable {
            region: None,
            entries: (1..=size).map(entry).collect(),
            first: vec![NONE; usize::from(size)].into(),
            free_head: 0,
            free: size,
            cursor: 0,
            staged: 0,
            tail: NONE,
            used,
            batch: Vec::with_capacity(usize::from(size)),
            counter: 0,
        }
    }

    /// Takes over the region of a queue of `size` entries: a fresh one is begun at `used`, one that was in use is recovered
    /// (`Some`), and says itself where the device has come to. `ring` is the ring's descriptors. Called once a start of the
    /// queue, before it is polled.
    pub fn open(
        region: Window,
        size: u16,
        used: Position,
        ring: &Window,
    ) -> Result<(Self, Option<Recovered>), JournalFault> {
        if region.len() < bytes(size) {
            return Err(JournalFault::TooSmall);
        }
        match region.load_u16(AT_VERSION) {
            0 => Ok((Self::begin(region, size, used), None)),
            VERSION => {
                let opened = Self::recover(region, size, used, ring)?;
                kill::here(KillPoint::Recovered);
                Ok(opened)
            }
            // Invariant 4: somebody else has kept it meanwhile.
            other if !removed(Invariant::DistrustsLoaded) => Err(JournalFault::OtherVersion(other)),
            _ => Ok((Self::new(size, used), None)),
        }
    }

    fn begin(region: Window, size: u16, used: Position) -> Self {
        let table = Self::new(size, used);
        for index in 0..size {
            let at = at(index);
            (0..ENTRY).step_by(8).for_each(|word| region.put_u64(at + word, 0));
            region.put_u16(at + 2, index + 1);
        }
        region.put_u16(AT_DESC_NUM, size);
        region.put_u32(AT_FREE_HEADS, 0);
        region.put_u64(AT_USED, used_words(used, used));
        region.put_u16(AT_VERSION, VERSION);
        InFlightTable { region: Some(region), ..table }
    }

    fn recover(
        region: Window,
        size: u16,
        used: Position,
        ring: &Window,
    ) -> Result<(Self, Option<Recovered>), JournalFault> {
        let desc_num = region.load_u16(AT_DESC_NUM);
        if desc_num != size {
            if (0..size).any(|index| region.load_u8(at(index)) != 0) {
                return Err(JournalFault::OtherSize { found: desc_num, wanted: size });
            }
            // Nothing is in flight, and the driver has set up a queue of another size: begin again.
            return Ok((Self::begin(region, size, used), None));
        }
        let heads = region.load_u32(AT_FREE_HEADS);
        let (mut free_head, old_free_head) = (heads as u16, (heads >> 16) as u16);
        let (mut used, old_used) = parse_used(region.load_u64(AT_USED));
        if used.index >= size || old_used.index >= size {
            return Err(JournalFault::Contradiction);
        }
        // A batch was on its way: the flags of its first used descriptor decide.
        let slot = usize::from(old_used.index) * 16;
        if used == old_used || old_used.sees_available(ring.load_u16(slot + 14)) {
            (free_head, used) = (old_free_head, old_used);
        }
        let mut table = Self::new(size, used);
        (table.free_head, table.cursor) = (free_head, free_head);
        let mut seen = vec![false; usize::from(size)];
        table.free = table.recover_free(&region, &mut seen)?;
        let heads = table.recover_chains(&region, &mut seen)?;
        if seen.contains(&false) {
            return Err(JournalFault::Contradiction);
        }
        region.put_u32(AT_FREE_HEADS, u32::from(free_head) * 0x1_0001);
        region.put_u64(AT_USED, used_words(used, used));
        let suspects = table.count_deaths(&region, &heads)?;
        table.region = Some(region);
        Ok((table, Some(Recovered { heads, suspects })))
    }

    /// Follows the free list; what is on it is not in flight, whatever its mark says. How many there are.
    fn recover_free(&mut self, region: &Window, seen: &mut [bool]) -> Result<u16, JournalFault> {
        let (size, mut count, mut index) = (self.size(), 0, self.free_head);
        while index != size {
            self.see(index, seen)?;
            region.put_u16(at(index), 0);
            let next = region.load_u16(at(index) + 2);
            self.entries[usize::from(index)].next = next;
            (count, index) = (count + 1, next);
        }
        Ok(count)
    }

    /// Reads every chain in flight; their buffer IDs in the order in which they were taken.
    fn recover_chains(&mut self, region: &Window, seen: &mut [bool]) -> Result<Vec<u16>, JournalFault> {
        let mut chains = Vec::new();
        let marked = (0..self.size()).filter(|index| !seen[usize::from(*index)]);
        let marked: Vec<u16> = marked.filter(|index| region.load_u8(at(*index)) != 0).collect();
        for first in marked {
            let (links, counter) = (region.load_u32(at(first) + 4), region.load_u64(at(first) + 8));
            let (last, num) = (links as u16, (links >> 16) as u16);
            let (mut index, mut id) = (first, NONE);
            for nth in 0..num {
                self.see(index, seen)?;
                let next = region.load_u16(at(index) + 2);
                let word = region.load_u64(at(index) + 16);
                id = word as u16;
                let descriptor = Descriptor {
                    addr: region.load_u64(at(index) + 24),
                    len: (word >> 32) as u32,
                    flags: (word >> 16) as u16,
                };
                self.entries[usize::from(index)] = Entry { descriptor, id, next, last, num };
                if nth + 1 == num && index != last {
                    return Err(JournalFault::Contradiction);
                }
                index = next;
            }
            match self.first.get_mut(usize::from(id)) {
                Some(entry) if *entry == NONE => *entry = first,
                _ => return Err(JournalFault::Contradiction),
            }
            chains.push((counter, id));
        }
        chains.sort_unstable();
        self.counter = chains.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(chains.into_iter().map(|(_, id)| id).collect())
    }

    /// Every entry is in one place.
    fn see(&self, index: u16, seen: &mut [bool]) -> Result<(), JournalFault> {
        match seen.get_mut(usize::from(index)) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(JournalFault::Contradiction),
        }
        Ok(())
    }

    /// See [`judge`]. Gives back those that are suspected now.
    fn count_deaths(&self, region: &Window, heads: &[u16]) -> Result<Vec<u16>, JournalFault> {
        let (mut suspects, mut deadly) = (Vec::new(), None);
        for head in heads {
            let ours = at(self.first[usize::from(*head)]) + 1;
            let byte = region.load_u8(ours);
            let (deaths, verdict) = judge(byte & IN_HAND != 0, byte & !IN_HAND);
            match verdict {
                Verdict::Innocent => {}
                Verdict::Suspect => suspects.push(*head),
                Verdict::Deadly => deadly = Some(*head),
            }
            region.put_u8(ours, deaths & !IN_HAND);
        }
        deadly.map_or(Ok(suspects), |head| Err(JournalFault::Deadly(head)))
    }

    fn size(&self) -> u16 {
        self.entries.len() as u16
    }

    /// Where the device has come to, as the driver sees it.
    #[inline]
    pub fn used(&self) -> Position {
        self.used
    }

    /// How many descriptors are in flight, those of a batch that is not settled included.
    #[inline]
    pub fn descriptors_in_flight(&self) -> u16 {
        self.size() - self.free
    }

    /// Whether the chain with that buffer ID is in flight.
    #[inline]
    pub fn holds(&self, id: u16) -> bool {
        self.first.get(usize::from(id)).is_some_and(|first| *first != NONE)
    }

    /// How many descriptors the chain of `id`, which is in flight, has.
    #[inline]
    pub fn len_of(&self, id: u16) -> u16 {
        self.entries[usize::from(self.first[usize::from(id)])].num
    }

    /// The descriptors of `id`, which is in flight.
    #[inline]
    pub fn descriptors(&self, id: u16) -> impl Iterator<Item = &Descriptor> {
        let first = &self.entries[usize::from(self.first[usize::from(id)])];
        let next = |entry: &&Entry| self.entries.get(usize::from(entry.next));
        std::iter::successors(Some(first), next).take(first.num.into()).map(|entry| &entry.descriptor)
    }

    /// Writes down the next descriptor of the chain that is being read. False if there is no room: the chain is longer than
    /// any driver can make it.
    #[inline]
    #[must_use]
    pub fn stage(&mut self, descriptor: Descriptor, id: u16) -> bool {
        if self.staged == self.free {
            return false;
        }
        let entry = &mut self.entries[usize::from(self.cursor)];
        (entry.descriptor, entry.id) = (descriptor, id);
        (self.tail, self.cursor) = (self.cursor, entry.next);
        self.staged += 1;
        true
    }

    /// As [`InFlightTable::stage`] and [`InFlightTable::take`] of a chain of one descriptor. Nothing is staged.
    #[inline]
    #[must_use]
    pub fn take_one(&mut self, descriptor: Descriptor, id: u16) -> bool {
        debug_assert_eq!(self.staged, 0, "a chain is being read");
        if self.free == 0 {
            return false;
        }
        let first = self.free_head;
        let entry = &mut self.entries[usize::from(first)];
        let next = entry.next;
        *entry = Entry { descriptor, id, next, last: first, num: 1 };
        self.first[usize::from(id)] = first;
        (self.free_head, self.cursor, self.free) = (next, next, self.free - 1);
        if self.region.is_some() {
            self.record(first);
        }
        self.counter = self.counter.wrapping_add(1);
        true
    }

    /// How many descriptors have been written down of the chain that is being read.
    #[inline]
    pub fn staged(&self) -> u16 {
        self.staged
    }

    /// Forgets the chain that is being read.
    #[inline]
    pub fn unstage(&mut self) {
        (self.cursor, self.staged) = (self.free_head, 0);
    }

    /// The chain that was written down, at least one descriptor, has been taken under `id`, and our code has it in hand.
    #[inline]
    pub fn take(&mut self, id: u16) {
        let (first, num, last) = (self.free_head, self.staged, self.tail);
        let entry = &mut self.entries[usize::from(first)];
        (entry.num, entry.last) = (num, last);
        self.first[usize::from(id)] = first;
        (self.free_head, self.staged) = (self.cursor, 0);
        self.free -= num;
        if self.region.is_some() {
            self.record(first);
        }
        self.counter = self.counter.wrapping_add(1);
    }

    /// Writes the chain that begins at entry `first` through to the region. The free list begins behind it already.
    fn record(&self, first: u16) {
        let Some(region) = &self.region else { return };
        let Entry { num, last, .. } = self.entries[usize::from(first)];
        let mut index = first;
        for _ in 0..num {
            let Entry { descriptor: Descriptor { addr, len, flags }, id, next, .. } =
                self.entries[usize::from(index)];
            let word = u64::from(id) | u64::from(flags) << 16 | u64::from(len) << 32;
            region.put_u64(at(index) + 16, word);
            region.put_u64(at(index) + 24, addr);
            index = next;
        }
        region.put_u64(at(first) + 8, self.counter);
        region.put_u32(at(first) + 4, u32::from(last) | u32::from(num) << 16);
        region.put_u16(at(first), 1 | u16::from(IN_HAND) << 8);
        // From here on it is in flight.
        region.put_u32(AT_FREE_HEADS, u32::from(self.free_head) * 0x1_0001);
    }

    /// The chain of `id`, the last one taken, has been given back as if never taken.
    #[inline]
    pub fn rewind(&mut self, id: u16) {
        let first = std::mem::replace(&mut self.first[usize::from(id)], NONE);
        let Entry { last, num, .. } = self.entries[usize::from(first)];
        debug_assert_eq!(self.entries[usize::from(last)].next, self.free_head, "not the last one taken");
        (self.free_head, self.cursor) = (first, first);
        self.free += num;
        if let Some(region) = &self.region {
            region.put_u32(AT_FREE_HEADS, u32::from(first) * 0x1_0001);
            region.put_u16(at(first), 0);
        }
    }

    /// Our code takes the request `id` in hand (again).
    #[inline]
    pub fn touch(&mut self, id: u16) {
        self.put_ours(id, |ours| ours | IN_HAND);
    }

    /// Our code is done with the request `id` for now; the disk below has it.
    #[inline]
    pub fn release(&mut self, id: u16) {
        self.put_ours(id, |ours| ours & !IN_HAND);
    }

    /// Our code has nothing in hand any more.
    pub fn release_all(&mut self) {
        for id in 0..self.size() {
            if self.holds(id) {
                self.release(id);
            }
        }
    }

    #[inline]
    fn put_ours(&self, id: u16, change: impl FnOnce(u8) -> u8) {
        if let Some(region) = &self.region {
            let ours = at(self.first[usize::from(id)]) + 1;
            region.put_u8(ours, change(region.load_u8(ours)));
        }
    }

    /// The chain of `id` belongs to the batch that is shown as used next, with `written` bytes for the driver.
    #[inline]
    pub fn batch(&mut self, id: u16, written: u32) {
        let first = std::mem::replace(&mut self.first[usize::from(id)], NONE);
        let num = self.entries[usize::from(first)].num;
        self.batch.push(UsedChain { first, id, num, written });
    }

    /// The chains of the next batch, in the order in which they were completed.
    #[inline]
    pub fn batch_chains(&self) -> &[UsedChain] {
        &self.batch
    }

    /// How many chains the next batch has.
    #[inline]
    pub fn batched(&self) -> u16 {
        self.batch.len() as u16
    }

    /// The batch is about to be shown as used, after which the device has come to `used`.
    #[inline]
    pub fn prepare(&mut self, used: Position) {
        let old = (self.free_head, self.used);
        for UsedChain { first, num, .. } in &self.batch {
            let last = self.entries[usize::from(*first)].last;
            self.entries[usize::from(last)].next = self.free_head;
            if let Some(region) = &self.region {
                region.put_u16(at(last) + 2, self.free_head);
            }
            self.free_head = *first;
            self.free += num;
        }
        self.cursor = self.free_head;
        self.used = used;
        if let Some(region) = &self.region {
            region.put_u32(AT_FREE_HEADS, u32::from(self.free_head) | u32::from(old.0) << 16);
            region.put_u64(AT_USED, used_words(used, old.1));
        }
    }

    /// The batch has been shown.
    #[inline]
    pub fn settle(&mut self) {
        if let Some(region) = &self.region {
            for chain in &self.batch {
                region.put_u16(at(chain.first), 0);
            }
            kill::here(KillPoint::Unmarked);
            region.put_u32(AT_FREE_HEADS, u32::from(self.free_head) * 0x1_0001);
            region.put_u64(AT_USED, used_words(self.used, self.used));
        }
        self.batch.clear();
    }
}

/// Where entry `index` begins.
#[inline]
fn at(index: u16) -> usize {
    HEADER + ENTRY * usize::from(index)
}

/// The words at [`AT_USED`].
#[inline]
fn used_words(new: Position, old: Position) -> u64 {
    u64::from(new.index) | u64::from(old.index) << 16 | u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40
}

fn parse_used(words: u64) -> (Position, Position) {
    let at =
        |shift: u32, wrap: u32| Position { index: (words >> shift) as u16, wrap: words >> wrap & 0xff != 0 };
    (at(0, 32), at(16, 40))
}
