//! Block status: which parts of the disk are holes. A thread asks the backing, whose file system may take its time; no I/O core waits for it.
//!
//! ```text
//!   I/O core:  ExportPoller --Lookup--> asked (ArrayQueue)        one of each connection at a time
//!   thread:                              '-> Backing::extents -> returned, and the poller's bell rings
//! ```
//! What is written while it is looked up may be told as it was before or after. What had been answered before the request came is never told as a hole.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ioplane_storage::{Backing, DiskExtent};

use super::bell::Bell;
use crate::spec::{NBD_STATE_HOLE, NBD_STATE_ZERO};
use crate::transmission::Extent;

/// Most extents of one reply.
pub(super) const MOST_EXTENTS: usize = 512;
/// How long one lookup goes on once it has found something: others wait for the thread.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Question {
    pub offset: u64,
    /// Not zero; both are multiples of `block`.
    pub length: u32,
    pub block: u32,
    /// Most extents, from 1 to [`MOST_EXTENTS`].
    pub most: usize,
}

/// What is known of a range from its start on: extents of whole blocks, of which two neighbours differ.
#[derive(Debug)]
struct Findings {
    question: Question,
    extents: Vec<Extent>,
    /// Up to where extents are told, and up to where is known what there is.
    told: u64,
    known: u64,
}

impl Findings {
    /// Nothing so far. `extents`: an empty list with room.
    fn new(question: Question, extents: Vec<Extent>) -> Findings {
        Findings { question, extents, told: question.offset, known: question.offset }
    }

    /// Takes in the next part; says whether there is room for more.
    fn take(&mut self, part: DiskExtent) -> bool {
        let Question { offset, length, block, .. } = self.question;
        let (block, end) = (u64::from(block), offset + u64::from(length));
        let from = self.known;
        self.known = from.saturating_add(part.bytes).min(end);
        if !part.is_hole {
            // A block that holds any data is data.
            return self.tell(self.known.next_multiple_of(block).min(end), 0);
        }
        let to = if self.known == end { end } else { self.known - self.known % block };
        // What comes before a hole's first whole block is told as the data that it is.
        let from = from.next_multiple_of(block).max(self.told);
        from >= to || (self.tell(from, 0) && self.tell(to, NBD_STATE_HOLE | NBD_STATE_ZERO))
    }

    /// Everything up to `to` that was not told yet is so.
    fn tell(&mut self, to: u64, flags: u32) -> bool {
        let Some(length) = to.checked_sub(self.told).filter(|length| *length > 0) else { return true };
        // As long as the request at most.
        let length = length as u32;
        let full = self.extents.len() == self.question.most;
        match self.extents.last_mut() {
            Some(last) if last.flags == flags => last.length += length,
            _ if full => return false,
            _ => self.extents.push(Extent { length, flags }),
        }
        self.told = to;
        true
    }

    /// One extent at least: what nobody knows is data.
    fn finish(mut self) -> Vec<Extent> {
        if self.extents.is_empty() {
            self.extents.push(Extent { length: self.question.length, flags: 0 });
        }
        self.extents
    }
}

/// A question on its way to the thread and back. Allocated once for each connection.
#[derive(Debug)]
pub(super) struct Lookup {
    backing: Weak<dyn Backing>,
    pub slot: u16,
    question: Question,
    /// The answer.
    pub extents: Vec<Extent>,
}

impl Lookup {
    fn answer(&mut self) {
        let mut extents = std::mem::take(&mut self.extents);
        extents.clear();
        let mut findings = Findings::new(self.question, extents);
        let until = Instant::now() + PATIENCE;
        if let Some(backing) = self.backing.upgrade() {
            let Question { offset, length, .. } = self.question;
            backing.extents(offset, length.into(), &mut |part| {
                findings.take(part) && (findings.extents.is_empty() || Instant::now() < until)
            });
        }
        self.extents = findings.finish();
    }
}

/// Where the answers to one connection come back.
#[derive(Debug)]
struct Desk {
    returned: ArrayQueue<Box<Lookup>>,
    bell: Arc<Bell>,
}

#[derive(Debug)]
struct Shared {
    asked: ArrayQueue<(Box<Lookup>, Arc<Desk>)>,
    closing: AtomicBool,
}

/// The thread of one export. Ends when this is dropped; what it is looking up then comes back, and it holds no backing afterwards.
#[derive(Debug)]
pub(super) struct StatusThread {
    shared: Arc<Shared>,
    thread: Thread,
}

impl StatusThread {
    /// For so many connections.
    pub fn start(connections: u16) -> std::io::Result<Arc<StatusThread>> {
        let asked = ArrayQueue::new(usize::from(connections.max(1)));
        let shared = Arc::new(Shared { asked, closing: AtomicBool::new(false) });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("status".into()).spawn(move || of_thread.serve())?;
        Ok(Arc::new(StatusThread { shared, thread: thread.thread().clone() }))
    }
}

impl Drop for StatusThread {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

impl Shared {
    fn serve(&self) {
        while !self.closing.load(Ordering::Acquire) {
            let Some((mut lookup, desk)) = self.asked.pop() else {
                std::thread::park();
                continue;
            };
            lookup.answer();
            // There is room: a connection has one.
            let _ = desk.returned.push(lookup);
            desk.bell.ring();
        }
    }
}

/// What a poller has for its block status requests.
#[derive(Debug)]
pub(super) struct StatusPlace {
    thread: Arc<StatusThread>,
    desk: Arc<Desk>,
    /// Gone while the thread has it.
    lookup: Option<Box<Lookup>>,
    /// Slots whose turn has not come.
    waiting: VecDeque<u16>,
}

impl StatusPlace {
    /// For a connection of so many requests at a time, which `bell` wakes.
    pub fn new(thread: Arc<StatusThread>, backing: &Arc<dyn Backing>, bell: Arc<Bell>, depth: u16) -> Self {
        let question = Question { offset: 0, length: 1, block: 1, most: 1 };
        let extents = Vec::with_capacity(MOST_EXTENTS);
        let lookup = Lookup { backing: Arc::downgrade(backing), slot: 0, question, extents };
        StatusPlace {
            thread,
            desk: Arc::new(Desk { returned: ArrayQueue::new(1), bell }),
            lookup: Some(Box::new(lookup)),
            waiting: VecDeque::with_capacity(depth.into()),
        }
    }

    /// Nothing is looked up, or waits to be.
    pub fn is_idle(&self) -> bool {
        self.lookup.is_some() && self.waiting.is_empty()
    }

    /// The request in `slot` is to be answered.
    pub fn push(&mut self, slot: u16) {
        self.waiting.push_back(slot);
    }

    /// The slot whose turn it is, if the thread can be asked.
    pub fn next(&mut self) -> Option<u16> {
        self.lookup.as_ref().and_then(|_| self.waiting.pop_front())
    }

    /// Has the thread look it up. False if that has too much to do.
    pub fn ask(&mut self, slot: u16, question: Question) -> bool {
        let Some(mut lookup) = self.lookup.take() else { return false };
        (lookup.slot, lookup.question) = (slot, question);
        match self.thread.shared.asked.push((lookup, self.desk.clone())) {
            Ok(()) => {
                self.thread.thread.unpark();
                true
            }
            Err((lookup, _)) => {
                self.lookup = Some(lookup);
                false
            }
        }
    }

    /// What the thread has found, to be given back.
    pub fn take(&mut self) -> Option<Box<Lookup>> {
        self.desk.returned.pop()
    }

    /// Gives it back.
    pub fn give_back(&mut self, lookup: Box<Lookup>) {
        self.lookup = Some(lookup);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(question: Question, parts: &[DiskExtent]) -> Vec<Extent> {
        let mut findings = Findings::new(question, Vec::new());
        let _ = parts.iter().all(|part| findings.take(*part));
        findings.finish()
    }

    fn data(bytes: u64) -> DiskExtent {
        DiskExtent { bytes, is_hole: false }
    }

    fn hole(bytes: u64) -> DiskExtent {
        DiskExtent { bytes, is_hole: true }
    }

    #[test]
    fn a_block_with_any_data_is_data() {
        const EMPTY: u32 = NBD_STATE_HOLE | NBD_STATE_ZERO;
        let of = |parts: &[DiskExtent], most| {
            let question = Question { offset: 4096, length: 64 << 10, block: 4096, most };
            let found = found(question, parts);
            found.into_iter().map(|extent| (extent.length / 4096, extent.flags)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[hole(64 << 10)], 9), [(16, EMPTY)]);
        assert_eq!(of(&[data(512), hole(63 << 10), data(512)], 9), [(1, 0), (14, EMPTY), (1, 0)]);
        assert_eq!(of(&[hole(4096 + 512), data(512), hole(59 << 10)], 9), [(1, EMPTY), (1, 0), (14, EMPTY)]);
        // A hole of less than a block is none.
        assert_eq!(of(&[data(4608), hole(3584), data(8192), hole(48 << 10)], 9), [(4, 0), (12, EMPTY)]);
        assert_eq!(of(&[data(512), hole(63 << 10), data(512)], 1), [(1, 0)]);
        assert_eq!(of(&[hole(8192), data(56 << 10)], 1), [(2, EMPTY)]);
        assert_eq!(of(&[], 9), [(16, 0)], "nothing is known");
        assert_eq!(of(&[hole(512)], 9), [(16, 0)], "nothing that could be told");
    }

    proptest! {
        /// Whatever a file system says, no byte of its data is told to be a hole.
        #[test]
        fn holes_are_those_that_were_found(
            parts in proptest::collection::vec((1u64..20_000, any::<bool>()), 0..60),
            first in 0u64..100,
            blocks in 1u32..200,
            shift in 9u32..=12,
            most in 1usize..=MOST_EXTENTS,
        ) {
            let block = 1u32 << shift;
            let question = Question { offset: first * u64::from(block), length: blocks * block, block, most };
            let parts: Vec<_> =
                parts.into_iter().map(|(bytes, is_hole)| DiskExtent { bytes, is_hole }).collect();
            let found = found(question, &parts);
            prop_assert!((1..=most).contains(&found.len()));
            let total: u64 = found.iter().map(|extent| u64::from(extent.length)).sum();
            prop_assert!(total <= question.length.into());
            prop_assert!(found.iter().all(|extent| extent.length > 0 && extent.length % block == 0));
            prop_assert!(found.windows(2).all(|pair| pair[0].flags != pair[1].flags));
            // Byte ranges of holes, from the start of the question on.
            let mut at = 0;
            let holes: Vec<_> = found.iter().filter_map(|extent| {
                let from = at;
                at += u64::from(extent.length);
                (extent.flags != 0).then_some(from..at)
            }).collect();
            let mut at = 0;
            let mut known = 0;
            for part in &parts {
                let range = at..at + part.bytes;
                at = range.end;
                known = at;
                let overlaps = holes.iter().any(|hole| hole.start < range.end && range.start < hole.end);
                prop_assert!(part.is_hole || !overlaps, "{part:?} at {range:?} is told as a hole: {found:?}");
            }
            prop_assert!(holes.iter().all(|hole| hole.end <= known), "{found:?}");
        }
    }
}
