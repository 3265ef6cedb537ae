//! A disk for schedules: it carries operations out in any order, in halves, and fails.

#![expect(clippy::disallowed_types, reason = "a disk of the tests")]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};
use ioplane_storage::*;

/// Five chunks and some.
pub const DISK: u64 = 5 * (64 << 10) + 4608;

/// A sequence that is its seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Debug, Clone)]
enum Work {
    Read(u64, Vec<GuestRange>),
    Write(u64, Vec<GuestRange>),
    Zero(u64, u64),
}

/// An operation that a disk has: its second half may come later than its first.
struct Under {
    channel: usize,
    tag: Tag,
    work: Work,
    view: GuestView,
    first_half_done: bool,
}

#[derive(Default)]
pub struct Inside {
    pub content: Vec<u8>,
    pub durable: Vec<u8>,
    under: Vec<Under>,
    ended: Vec<VecDeque<(Tag, Outcome)>>,
    in_flight: Vec<usize>,
    /// Channels that were dropped.
    gone: Vec<usize>,
    /// Modifying operations until one fails.
    pub fails_in: Option<u64>,
}

/// A disk that does what it has when, and in what order, the schedule says.
#[derive(Clone, Default)]
pub struct Disorder(Arc<Mutex<Inside>>);

impl std::fmt::Debug for Disorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disorder")
    }
}

impl Disorder {
    pub fn new(random: &mut Random) -> Self {
        let content: Vec<u8> = (0..DISK).map(|_| random.below(256) as u8).collect();
        Disorder(Arc::new(Mutex::new(Inside { durable: content.clone(), content, ..Inside::default() })))
    }

    pub fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }

    /// The power fails and comes back; what it has of operations is asked for again.
    #[allow(dead_code, reason = "not every test that has this disk takes its power away")]
    pub fn lose(&self) {
        let mut inside = self.inside();
        inside.content = inside.durable.clone();
        inside.under.iter_mut().for_each(|under| under.first_half_done = false);
    }

    /// Carries out half of an operation, or all of it.
    pub fn act(&self, random: &mut Random) {
        let mut inside = self.inside();
        if inside.under.is_empty() {
            return;
        }
        let index = random.below(inside.under.len() as u64) as usize;
        let half = !inside.under[index].first_half_done && random.one_in(2);
        let Under { work, view, first_half_done, .. } = &inside.under[index];
        let (work, view, skip) = (work.clone(), view.clone(), *first_half_done);
        let modifies = !matches!(work, Work::Read(..));
        let fails = modifies && inside.fails_in == Some(0);
        carry_out(&mut inside.content, &work, &view, half || fails, skip);
        if half && !fails {
            inside.under[index].first_half_done = true;
            return;
        }
        let Under { channel, tag, .. } = inside.under.swap_remove(index);
        if modifies {
            inside.fails_in = inside.fails_in.and_then(|left| left.checked_sub(1));
        }
        let outcome = if fails { Err(Fault::Io(libc::EIO)) } else { Ok(()) };
        inside.ended[channel].push_back((tag, outcome));
    }
}

/// Where its bytes are: pairs of places on the disk and in memory, by halves.
fn carry_out(content: &mut [u8], work: &Work, view: &GuestView, first_only: bool, second_only: bool) {
    let (offset, ranges, len) = match work {
        Work::Read(offset, ranges) | Work::Write(offset, ranges) => {
            (*offset, &ranges[..], ranges.iter().map(|range| u64::from(range.len)).sum::<u64>())
        }
        Work::Zero(offset, len) => (*offset, &[][..], *len),
    };
    let half = len / 2 / 512 * 512;
    let wanted = match (first_only, second_only) {
        (true, false) => 0..half,
        (false, true) => half..len,
        (true, true) => 0..0,
        (false, false) => 0..len,
    };
    let disk = |at: std::ops::Range<u64>| (offset + at.start) as usize..(offset + at.end) as usize;
    if let Work::Zero(..) = work {
        content[disk(wanted)].fill(0);
        return;
    }
    let mut at = 0;
    for range in ranges {
        let end = at + u64::from(range.len);
        let part = at.max(wanted.start)..end.min(wanted.end);
        if part.start < part.end {
            let gpa = range.gpa + part.start - at;
            let bytes = &mut content[disk(part)];
            match work {
                Work::Read(..) => view.write(gpa, bytes).unwrap(),
                _ => view.read(gpa, bytes).unwrap(),
            }
        }
        at = end;
    }
}

struct DisorderChannel {
    disk: Disorder,
    channel: usize,
}

impl Backing for Disorder {
    fn info(&self) -> BackingInfo {
        BackingInfo {
            name: "disorder".to_owned(),
            bytes: DISK,
            logical_block: 512,
            physical_block: 512,
            read_only: false,
            volatile_cache: true,
            discards: true,
            block_device: None,
        }
    }

    fn channel(&self, _depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let mut inside = self.inside();
        inside.ended.push(VecDeque::new());
        inside.in_flight.push(0);
        let channel = inside.ended.len() - 1;
        drop(inside);
        Ok(Box::new(DisorderChannel { disk: self.clone(), channel }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        let why = "nobody asks for it here".to_owned();
        Err(StorageError::Size { image: "disorder".to_owned(), bytes, why })
    }

    /// Without waiting: whoever asks lets the disk act meanwhile.
    fn wait_quiet(&self, _deadline: Instant) -> bool {
        let inside = self.inside();
        !inside.under.iter().any(|under| inside.gone.contains(&under.channel))
    }
}

impl Drop for DisorderChannel {
    fn drop(&mut self) {
        self.disk.inside().gone.push(self.channel);
    }
}

impl IoChannel for DisorderChannel {
    fn submit(&mut self, _context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let mut inside = self.disk.inside();
        let work = match *op {
            Op::Read { offset, into } => Work::Read(offset, into.to_vec()),
            Op::Write { offset, from } => Work::Write(offset, from.to_vec()),
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => Work::Zero(offset, len),
            // What has ended is durable then.
            Op::Flush => {
                inside.durable = inside.content.clone();
                return Submitted::Done(Ok(()));
            }
        };
        inside.in_flight[self.channel] += 1;
        assert!(inside.in_flight[self.channel] <= 9, "more in flight than was said");
        inside.under.push(Under {
            channel: self.channel,
            tag,
            work,
            view: view.clone(),
            first_half_done: false,
        });
        Submitted::Pending
    }

    fn push(&mut self, _context: &mut CoreContext) {}

    fn held_back(&self) -> bool {
        false
    }

    fn reap(&mut self, _context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let mut inside = self.disk.inside();
        let ended = std::mem::take(&mut inside.ended[self.channel]);
        inside.in_flight[self.channel] -= ended.len();
        let count = ended.len();
        drop(inside);
        ended.into_iter().for_each(|(tag, outcome)| done(tag, outcome));
        count
    }

    fn in_flight(&self) -> usize {
        self.disk.inside().in_flight[self.channel]
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
