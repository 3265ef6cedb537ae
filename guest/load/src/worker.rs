//! One request in flight of a load: choose, do, check, count, again.

use crate::blockdev::{Aligned, Disk, failed};
use crate::ledger::Ledger;
use crate::protocol::Mix;
use crate::sector::{Expect, SECTOR, Stamp, mix};
use hdrhistogram::Histogram;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PROBLEMS: usize = 8;
/// Longest time that is told apart, in microseconds: one hour.
const LONGEST: u64 = 3_600_000_000;

/// What all workers of a load share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub disk: Disk,
    pub stamp: Stamp,
    pub ledger: Ledger,
    pub plan: Plan,
    pub tally: Tally,
    pub started: Instant,
    pub stop: AtomicBool,
    /// For each worker when its request began, in microseconds since `started`, plus one; 0 when it has none.
    pub in_flight: Vec<AtomicU64>,
}

/// What to do, in numbers that are easy to use.
#[derive(Debug)]
pub(crate) struct Plan {
    pub offset: u64,
    pub unit: u64,
    pub units_per_chunk: u64,
    pub chunks: u64,
    pub workers: u64,
    pub sizes: Vec<u32>,
    pub mix: Mix,
    pub direct: bool,
    pub prefill: bool,
    pub seed: u64,
    pub until: Option<Instant>,
}

/// Counts since the start or the last mark, and the totals.
#[derive(Debug)]
pub(crate) struct Tally {
    pub counts: Mutex<Counts>,
}

/// What was counted over a stretch of time.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    pub since: Instant,
    pub requests: [u64; 5],
    pub bytes: u64,
    pub errors: u64,
    pub mismatches: u64,
    pub problems: Vec<String>,
    pub times: Histogram<u32>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Read,
    Write,
    Sync,
    Discard,
    Zero,
}

impl Counts {
    pub fn new(since: Instant) -> Self {
        let times = Histogram::new_with_bounds(1, LONGEST, 2).expect("fixed bounds are valid");
        Counts { since, requests: [0; 5], bytes: 0, errors: 0, mismatches: 0, problems: Vec::new(), times }
    }

    pub fn problem(&mut self, what: String) {
        if self.problems.len() < PROBLEMS {
            self.problems.push(what);
        }
    }

    /// Adds a later stretch.
    pub fn add(&mut self, other: &Counts) {
        for (sum, n) in self.requests.iter_mut().zip(other.requests) {
            *sum += n;
        }
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.mismatches += other.mismatches;
        for problem in &other.problems {
            self.problem(problem.clone());
        }
        self.times.add(&other.times).expect("same bounds");
    }
}

impl Tally {
    pub fn new(since: Instant) -> Self {
        Tally { counts: Mutex::new(Counts::new(since)) }
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        let mut counts = self.counts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        change(&mut counts)
    }
}

/// Where the next request goes: bytes on the disk and blocks of the ledger.
struct Place {
    at: u64,
    blocks: Range<usize>,
}

/// Runs until the load is stopped or its time is over. Worker `index` alone touches the chunks `index`, `index +
/// workers`, and so on.
pub(crate) fn run(shared: &Shared, index: u64) {
    let plan = &shared.plan;
    let largest = plan.sizes.iter().copied().max().unwrap_or(0) as usize;
    let mut worker = Worker {
        shared,
        index,
        random: mix(plan.seed ^ mix(index)),
        buffer: Aligned::new(largest.max((plan.unit * plan.units_per_chunk) as usize)),
    };
    if plan.prefill {
        worker.prefill();
    }
    while !worker.over() {
        worker.step();
    }
}

struct Worker<'a> {
    shared: &'a Shared,
    index: u64,
    random: u64,
    buffer: Aligned,
}

impl Worker<'_> {
    fn over(&self) -> bool {
        let late = |until: Instant| Instant::now() >= until;
        self.shared.stop.load(Ordering::Relaxed) || self.shared.plan.until.is_some_and(late)
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.random) % below.max(1)
    }

    fn own_chunks(&self) -> u64 {
        let plan = &self.shared.plan;
        plan.chunks / plan.workers + u64::from(self.index < plan.chunks % plan.workers)
    }

    fn place(&mut self, bytes: u64) -> Place {
        let plan = &self.shared.plan;
        let units = bytes / plan.unit;
        let nth = self.draw(self.own_chunks());
        let within = self.draw(plan.units_per_chunk - units + 1);
        let first = (self.index + nth * plan.workers) * plan.units_per_chunk + within;
        Place { at: plan.offset + first * plan.unit, blocks: first as usize..(first + units) as usize }
    }

    fn prefill(&mut self) {
        let plan = &self.shared.plan;
        let bytes = plan.unit * plan.units_per_chunk;
        for nth in 0..self.own_chunks() {
            if self.over() {
                return;
            }
            let first = (self.index + nth * plan.workers) * plan.units_per_chunk;
            let blocks = first as usize..(first + plan.units_per_chunk) as usize;
            let place = Place { at: plan.offset + first * plan.unit, blocks };
            self.request(Kind::Write, &place, bytes as usize, true);
        }
    }

    fn step(&mut self) {
        let plan = &self.shared.plan;
        let sizes = plan.sizes.len() as u64;
        let bytes = plan.sizes[self.draw(sizes) as usize] as usize;
        let place = self.place(bytes as u64);
        let direct = plan.direct || self.draw(4) != 0;
        let Mix { read, write, sync, discard, zero } = plan.mix;
        let weights = [
            (Kind::Read, read),
            (Kind::Write, write),
            (Kind::Sync, sync),
            (Kind::Discard, discard),
            (Kind::Zero, zero),
        ];
        let mut ticket = self.draw(weights.iter().map(|(_, weight)| u64::from(*weight)).sum());
        for (kind, weight) in weights {
            match ticket.checked_sub(u64::from(weight)) {
                Some(rest) => ticket = rest,
                None => return self.request(kind, &place, bytes, direct),
            }
        }
    }

    fn request(&mut self, kind: Kind, place: &Place, bytes: usize, direct: bool) {
        let Shared { disk, stamp, ledger, .. } = self.shared;
        let (at, blocks) = (place.at, place.blocks.clone());
        let buffer = self.buffer.first(bytes);
        let mut sequence = 0;
        if kind == Kind::Write {
            let Some(next) = ledger.next() else {
                self.shared.stop.store(true, Ordering::Relaxed);
                self.shared.tally.with(|c| c.problem("sequence numbers are used up; the load ends".into()));
                return;
            };
            sequence = next;
            stamp.fill(buffer, at / SECTOR as u64, sequence);
        }
        let begun = Instant::now();
        let slot = &self.shared.in_flight[self.index as usize];
        slot.store(begun.duration_since(self.shared.started).as_micros() as u64 + 1, Ordering::Relaxed);
        let (what, done) = match kind {
            Kind::Read => ("read", disk.read(buffer, at, direct)),
            Kind::Write => ("write", disk.write(buffer, at, direct)),
            Kind::Sync => ("sync", disk.sync()),
            Kind::Discard => ("discard", disk.discard(at, bytes as u64)),
            Kind::Zero => ("zeroing", disk.zero(at, bytes as u64)),
        };
        let took = begun.elapsed();
        slot.store(0, Ordering::Relaxed);
        let moved = if matches!(kind, Kind::Read | Kind::Write) { bytes as u64 } else { 0 };
        let mut wrong = Vec::new();
        let mut count = 0;
        match (&done, kind) {
            (Ok(()), Kind::Read) => {
                count = check(self.shared, buffer, &place.blocks, &mut wrong, direct);
            }
            (Ok(()), Kind::Write) => ledger.written(blocks, sequence),
            (Ok(()), Kind::Discard) => ledger.discarded(blocks),
            (Ok(()), Kind::Zero) => ledger.zeroed(blocks),
            (Err(_), Kind::Write | Kind::Discard | Kind::Zero) => ledger.unknown(blocks),
            (Ok(()), Kind::Sync) | (Err(_), Kind::Read | Kind::Sync) => {}
        }
        self.shared.tally.with(|counts| {
            counts.times.saturating_record((took.as_micros() as u64).max(1));
            counts.requests[kind as usize] += 1;
            counts.mismatches += count;
            match &done {
                Ok(()) => counts.bytes += moved,
                Err(error) => {
                    counts.errors += 1;
                    counts.problem(failed(what, at, bytes, error).to_string());
                }
            }
            for problem in wrong {
                counts.problem(problem);
            }
        });
        if done.is_err() {
            // A dead disk answers at once; do not spin on it.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Checks what was read of `blocks`; returns how many are wrong and puts the first few in words.
fn check(shared: &Shared, bytes: &[u8], blocks: &Range<usize>, wrong: &mut Vec<String>, direct: bool) -> u64 {
    let mut count = 0;
    for (block, bytes) in blocks.clone().zip(bytes.chunks_exact(shared.plan.unit as usize)) {
        let sector = (shared.plan.offset + block as u64 * shared.plan.unit) / SECTOR as u64;
        let expect = shared.ledger.expect(block);
        if let Err(mismatch) = shared.stamp.check(bytes, sector, expect) {
            count += 1;
            // One a request, so that the few that are told come from different requests.
            if wrong.is_empty() {
                let way = if direct { "direct" } else { "cached" };
                wrong.push(format!("{mismatch} ({way} read)"));
            }
            // Told once; the next write makes it known again.
            shared.ledger.unknown(block..block + 1);
        }
    }
    count
}

/// Whether a block's content is known well enough to verify.
pub(crate) fn known(expect: Expect) -> bool {
    expect != Expect::Anything
}
