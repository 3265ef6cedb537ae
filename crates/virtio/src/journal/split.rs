//! The in-flight region of a split ring.
//!
//! ```text
//!   0 features u64 | 8 version u16 | 10 desc_num u16 | 12 last_batch_head u16 | 14 used_idx u16
//!   16 + 16 n: inflight u8 | in hand u8 | deaths u8 | - | - | - | next u16 | counter u64
//! ```

use ioplane_memory::Window;
use ioplane_memory::mutation::{Invariant, removed};

use super::{JournalFault, Verdict, judge};
use crate::kill::{self, KillPoint};

/// Bytes before the entries.
const HEADER: usize = 16;
/// Bytes of one entry.
const ENTRY: usize = 16;
const VERSION: u16 = 1;
const AT_VERSION: usize = 8;
const AT_DESC_NUM: usize = 10;
const AT_LAST_BATCH_HEAD: usize = 12;
const AT_USED_IDX: usize = 14;
/// What a journal says after a crash (or after nothing at all).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Heads in flight, in the order in which they were taken.
    pub heads: Vec<u16>,
    /// Those of them that were in hand when the process died.
    pub suspects: Vec<u16>,
}

/// The in-flight region of one queue.
#[derive(Debug)]
pub struct Journal {
    window: Window,
    size: u16,
    counter: u64,
}

/// Bytes of the region of a queue of `size` entries.
pub(super) const fn bytes(size: u16) -> usize {
    HEADER + ENTRY * size as usize
}

impl Journal {
    /// Takes over the region of a queue of `size` entries whose ring shows `used_idx`: a fresh region is begun, one that
    /// was in use is recovered. Called once a start of the queue, before it is polled.
    pub fn open(window: Window, size: u16, used_idx: u16) -> Result<(Self, Recovered), JournalFault> {
        if window.len() < bytes(size) {
            return Err(JournalFault::TooSmall);
        }
        let mut journal = Journal { window, size, counter: 0 };
        match journal.window.load_u16(AT_VERSION) {
            0 => {
                journal.begin(used_idx);
                Ok((journal, Recovered::default()))
            }
            VERSION => {
                let recovered = journal.recover(used_idx)?;
                kill::here(KillPoint::Recovered);
                Ok((journal, recovered))
            }
            // Invariant 4: somebody else has kept it meanwhile.
            other if !removed(Invariant::DistrustsLoaded) => Err(JournalFault::OtherVersion(other)),
            _ => Ok((journal, Recovered::default())),
        }
    }

    /// Whether its memory went away.
    #[inline]
    pub fn lost(&self) -> bool {
        self.window.poisoned()
    }

    fn begin(&mut self, used_idx: u16) {
        for head in 0..self.size {
            self.window.put_u64(self.entry(head), 0);
            self.window.put_u64(self.entry(head) + 8, 0);
        }
        self.window.put_u16(AT_DESC_NUM, self.size);
        self.window.put_u16(AT_LAST_BATCH_HEAD, 0);
        self.window.put_u16(AT_USED_IDX, used_idx);
        self.window.put_u16(AT_VERSION, VERSION);
    }

    fn recover(&mut self, used_idx: u16) -> Result<Recovered, JournalFault> {
        let desc_num = self.window.load_u16(AT_DESC_NUM);
        let mut heads = self.marked();
        if desc_num != self.size {
            if !heads.is_empty() {
                return Err(JournalFault::OtherSize { found: desc_num, wanted: self.size });
            }
            // Nothing is in flight, and the driver has set up a queue of another size: begin again.
            self.begin(used_idx);
            return Ok(Recovered::default());
        }
        if !heads.is_empty() {
            // The used index moved, but the marks of that batch were not all taken off: take them off now.
            let batch = used_idx.wrapping_sub(self.window.load_u16(AT_USED_IDX));
            if batch > self.size {
                return Err(JournalFault::Contradiction);
            }
            let mut head = self.window.load_u16(AT_LAST_BATCH_HEAD);
            for _ in 0..batch {
                if head >= self.size {
                    return Err(JournalFault::Contradiction);
                }
                self.window.put_u16(self.entry(head), 0);
                head = self.window.load_u16(self.entry(head) + 6);
            }
            heads = self.marked();
        }
        self.window.put_u16(AT_USED_IDX, used_idx);
        heads.sort_by_key(|head| self.window.load_u64(self.entry(*head) + 8));
        self.counter =
            heads.last().map_or(0, |head| self.window.load_u64(self.entry(*head) + 8).wrapping_add(1));
        let suspects = self.count_deaths(&heads)?;
        Ok(Recovered { heads, suspects })
    }

    /// See [`judge`]. Gives back those that are suspected now.
    fn count_deaths(&self, heads: &[u16]) -> Result<Vec<u16>, JournalFault> {
        let (mut suspects, mut deadly) = (Vec::new(), None);
        for head in heads {
            let at = self.entry(*head);
            let (deaths, verdict) = judge(self.window.load_u8(at + 1) != 0, self.window.load_u8(at + 2));
            match verdict {
                Verdict::Innocent => {}
                Verdict::Suspect => suspects.push(*head),
                Verdict::Deadly => deadly = Some(*head),
            }
            self.window.put_u8(at + 2, deaths);
            self.window.put_u8(at + 1, 0);
        }
        deadly.map_or(Ok(suspects), |head| Err(JournalFault::Deadly(head)))
    }

    fn marked(&self) -> Vec<u16> {
        (0..self.size).filter(|head| self.window.load_u8(self.entry(*head)) != 0).collect()
    }

    #[inline]
    fn entry(&self, head: u16) -> usize {
        HEADER + ENTRY * usize::from(head)
    }

    /// The request at `head` has been taken, and our code has it in hand.
    #[inline]
    pub fn take(&mut self, head: u16) {
        let at = self.entry(head);
        self.window.put_u64(at + 8, self.counter);
        self.counter = self.counter.wrapping_add(1);
        // One store: in flight, in hand, no deaths.
        self.window.put_u32(at, 0x0000_0101);
    }

    /// The request at `head` has been given back as if never taken.
    #[inline]
    pub fn rewind(&mut self, head: u16) {
        self.window.put_u32(self.entry(head), 0);
    }

    /// Our code takes the request at `head` in hand again (to replay it, to complete it).
    #[inline]
    pub fn touch(&mut self, head: u16) {
        self.window.put_u8(self.entry(head) + 1, 1);
    }

    /// Our code is done with the request at `head` for now; the disk below has it.
    #[inline]
    pub fn release(&mut self, head: u16) {
        self.window.put_u8(self.entry(head) + 1, 0);
    }

    /// The used element of `head` has been written, and belongs to the batch that the next used index shows.
    #[inline]
    pub fn batch(&mut self, head: u16) {
        let at = self.entry(head);
        self.window.put_u16(at + 6, self.window.load_u16(AT_LAST_BATCH_HEAD));
        self.window.put_u16(AT_LAST_BATCH_HEAD, head);
    }

    /// The ring shows `used_idx`: the `count` heads batched since are no longer in flight.
    #[inline]
    pub fn settle(&mut self, used_idx: u16, count: u16) {
        let mut head = self.window.load_u16(AT_LAST_BATCH_HEAD);
        for _ in 0..count {
            if head >= self.size {
                // Somebody else wrote into the region: what it says is of no use, and harms only its own guest.
                break;
            }
            let at = self.entry(head);
            self.window.put_u32(at, 0);
            head = self.window.load_u16(at + 6);
        }
        kill::here(KillPoint::Unmarked);
        self.window.put_u16(AT_USED_IDX, used_idx);
    }
}
