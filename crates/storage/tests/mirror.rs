//! Swaps by seeded schedules: two queues of a guest that changes its buffers in flight, the copier, and two disks that carry operations out in
//! any order, in halves, and fail. Whenever the mirror says that both are equal they are, and each rule that is taken out is noticed.
//!
//! All in one thread: a schedule is its seed.

#![expect(clippy::disallowed_types, reason = "disks of the tests")]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::mirror::{Copier, Mirror, MirrorFault, Step};
use ioplane_storage::*;

/// Five chunks and some.
const DISK: u64 = 5 * (64 << 10) + 4608;
const DEPTH: u16 = 6;
/// Bytes of a request's buffer.
const BUFFER: u64 = 16 << 10;
const SEEDS: u64 = 100;
/// No schedule takes as many actions.
const STUCK: u32 = 400_000;

struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
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
struct Inside {
    content: Vec<u8>,
    durable: Vec<u8>,
    under: Vec<Under>,
    ended: Vec<VecDeque<(Tag, Outcome)>>,
    in_flight: Vec<usize>,
    /// Modifying operations until one fails.
    fails_in: Option<u64>,
}

/// A disk that does what it has when, and in what order, the schedule says.
#[derive(Clone, Default)]
struct Disorder(Arc<Mutex<Inside>>);

impl std::fmt::Debug for Disorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disorder")
    }
}

impl Disorder {
    fn new(random: &mut Random) -> Self {
        let content: Vec<u8> = (0..DISK).map(|_| random.below(256) as u8).collect();
        Disorder(Arc::new(Mutex::new(Inside { durable: content.clone(), content, ..Inside::default() })))
    }

    fn inside(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.0.lock().unwrap()
    }

    /// Carries out half of an operation, or all of it.
    fn act(&self, random: &mut Random) {
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

    fn wait_quiet(&self, _deadline: Instant) -> bool {
        true
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

/// A queue of the guest.
struct Queue {
    channel: Box<dyn IoChannel>,
    view: GuestView,
    busy: Vec<bool>,
    errors: u64,
}

impl Queue {
    fn new(backing: &dyn Backing) -> Self {
        let map = GuestMap::anonymous(u64::from(DEPTH) * BUFFER).unwrap();
        Queue {
            channel: backing.channel(DEPTH).unwrap(),
            view: GuestView::new(Arc::new(map)),
            busy: vec![false; usize::from(DEPTH)],
            errors: 0,
        }
    }

    fn submit(&mut self, context: &mut CoreContext, random: &mut Random, op: &Op<'_>) {
        let free: Vec<usize> = (0..self.busy.len()).filter(|tag| !self.busy[*tag]).collect();
        if free.is_empty() {
            return;
        }
        let tag = free[random.below(free.len() as u64) as usize];
        let buffer = tag as u64 * BUFFER;
        let whole = GuestRange { gpa: buffer, len: BUFFER as u32 };
        let cut = |len: u64, random: &mut Random| {
            let first = random.below(len / 512 + 1) * 512;
            [(0, first), (first, len - first)]
                .map(|(at, len)| GuestRange { gpa: whole.gpa + at, len: len as u32 })
        };
        let ranges;
        let op = match *op {
            Op::Write { offset, from } => {
                let len: u64 = from.iter().map(|range| u64::from(range.len)).sum();
                ranges = cut(len, random);
                self.change(random, buffer);
                Op::Write { offset, from: &ranges }
            }
            Op::Read { offset, into } => {
                let len: u64 = into.iter().map(|range| u64::from(range.len)).sum();
                ranges = cut(len, random);
                Op::Read { offset, into: &ranges }
            }
            op => op,
        };
        match self.channel.submit(context, &self.view, &op, Tag(tag as u16)) {
            Submitted::Pending => self.busy[tag] = true,
            Submitted::Done(outcome) => self.errors += u64::from(outcome.is_err()),
        }
    }

    /// What a guest does to a buffer, in flight or not.
    fn change(&self, random: &mut Random, buffer: u64) {
        let bytes: Vec<u8> = (0..BUFFER).map(|_| random.below(256) as u8).collect();
        self.view.write(buffer, &bytes).unwrap();
    }

    fn reap(&mut self, context: &mut CoreContext) {
        let Queue { channel, busy, errors, .. } = self;
        channel.reap(context, &mut |tag, outcome| {
            assert!(std::mem::replace(&mut busy[usize::from(tag.0)], false), "{tag:?} ended twice");
            *errors += u64::from(outcome.is_err());
        });
        channel.push(context);
        assert_eq!(channel.in_flight(), busy.iter().filter(|busy| **busy).count());
    }
}

/// What goes wrong in a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// A write to the old disk fails half-way; the guest is told.
    Old,
    /// A write to the new one does.
    New,
    /// The copier is taken away.
    Cancel,
}

struct Schedule {
    random: Random,
    context: CoreContext,
    old: Disorder,
    new: Disorder,
    mirror: Arc<Mirror>,
    copier: Option<Copier>,
    queues: [Queue; 2],
    actions: u32,
}

impl Schedule {
    fn new(seed: u64, trouble: Trouble) -> Self {
        let mut random = Random::new(seed);
        let (old, new) = (Disorder::new(&mut random), Disorder::new(&mut random));
        let when = 1 + random.below(60);
        match trouble {
            Trouble::Old => old.inside().fails_in = Some(when),
            Trouble::New => new.inside().fails_in = Some(when / 4),
            Trouble::None | Trouble::Cancel => {}
        }
        let mirror = Mirror::new(Arc::new(old.clone()), Arc::new(new.clone())).unwrap();
        let copier = Some(mirror.copier().unwrap());
        let queues = [Queue::new(&*mirror), Queue::new(&*mirror)];
        Schedule { random, context: CoreContext::default(), old, new, mirror, copier, queues, actions: 0 }
    }

    /// Where guests like to write: few places, that overlap.
    fn place(&mut self) -> (u64, u64) {
        let len = 512 * (1 + self.random.below(18));
        let around = [0, 60 << 10, 128 << 10, DISK - (12 << 10)][self.random.below(4) as usize];
        let offset = around + 512 * self.random.below(16);
        (offset.min(DISK - len), len)
    }

    fn guest(&mut self) {
        let (offset, len) = self.place();
        let bytes = [GuestRange { gpa: 0, len: len as u32 }];
        let op = match self.random.below(10) {
            0 => Op::Read { offset, into: &bytes },
            1 => Op::Discard { offset, len },
            2 => Op::WriteZeroes { offset, len, unmap: true },
            3 => Op::Flush,
            _ => Op::Write { offset, from: &bytes },
        };
        let queue = self.random.below(2) as usize;
        self.queues[queue].submit(&mut self.context, &mut self.random, &op);
    }

    /// Anything but a new request.
    fn go_on(&mut self) -> Option<Step> {
        self.actions += 1;
        assert!(
            self.actions < STUCK,
            "it does not end: {:?}, {} left",
            self.mirror.fault(),
            self.mirror.left()
        );
        let queue = self.random.below(2) as usize;
        match self.random.below(8) {
            0 | 1 => self.old.clone().act(&mut self.random),
            2 | 3 => self.new.clone().act(&mut self.random),
            4 | 5 => self.queues[queue].reap(&mut self.context),
            6 => {
                let buffer = self.random.below(DEPTH.into()) * BUFFER;
                self.queues[queue].change(&mut self.random, buffer);
            }
            _ => return self.copier.as_mut().and_then(|copier| copier.step(true).ok()),
        }
        None
    }

    fn busy(&self) -> bool {
        self.queues.iter().any(|queue| queue.busy.contains(&true))
    }

    /// To the point without anything in flight.
    fn drain(&mut self) {
        while self.busy() {
            self.go_on();
        }
    }

    /// Runs until the guest has sent `requests`, or copies are equal.
    fn load(&mut self, requests: u32) {
        for _ in 0..requests {
            self.guest();
            for _ in 0..self.random.below(8) {
                self.go_on();
            }
        }
    }

    /// Copies, with a guest that goes on, until nothing is left; false once it has failed.
    fn copy(&mut self) -> bool {
        loop {
            if self.mirror.fault().is_some() {
                return false;
            }
            if self.random.one_in(6) {
                self.guest();
            }
            if self.go_on() == Some(Step::Clean) {
                return true;
            }
        }
    }
}

/// One swap; what is wrong with it.
fn run(seed: u64, trouble: Trouble) -> Result<(), String> {
    let mut schedule = Schedule::new(seed, trouble);
    let requests = schedule.random.below(120) as u32;
    schedule.load(requests);
    schedule.mirror.start_mirroring();
    if trouble == Trouble::Cancel {
        schedule.load(20);
        schedule.copier = None;
    }
    // As the daemon does it: copied, made durable, and then a point without writes.
    let mut switched = false;
    while !switched && schedule.mirror.fault().is_none() {
        if schedule.copier.is_none() || !schedule.copy() {
            break;
        }
        if schedule.copier.as_mut().is_some_and(|copier| copier.sync().is_err()) {
            break;
        }
        let requests = schedule.random.below(20) as u32;
        for _ in 0..requests {
            schedule.guest();
            // Without the copier: what it copies after its flush it has to flush again.
            let queue = schedule.random.below(2) as usize;
            schedule.old.clone().act(&mut schedule.random);
            schedule.new.clone().act(&mut schedule.random);
            schedule.queues[queue].reap(&mut schedule.context);
        }
        let copied = schedule.mirror.copied();
        schedule.drain();
        schedule.queues[0].submit(&mut schedule.context, &mut schedule.random, &Op::Flush);
        schedule.drain();
        switched = schedule.mirror.is_equal() && schedule.mirror.copied() == copied;
    }
    schedule.drain();
    let errors: u64 = schedule.queues.iter().map(|queue| queue.errors).sum();
    if errors > u64::from(trouble == Trouble::Old) {
        return Err(format!("{errors} requests failed"));
    }
    let (old, new) = (schedule.old.inside(), schedule.new.inside());
    if switched {
        let differs = |new: &[u8]| old.content.iter().zip(new).position(|(old, new)| old != new);
        if let Some(at) = differs(&new.content) {
            return Err(format!("byte {at} differs"));
        }
        if let Some(at) = differs(&new.durable) {
            return Err(format!("byte {at} would be lost with the power"));
        }
    }
    match trouble {
        // A disk that was not used as often has not failed.
        Trouble::New if switched && new.fails_in.is_some() => Ok(()),
        Trouble::New | Trouble::Cancel if switched => Err("it switched to what is no copy".to_owned()),
        Trouble::None | Trouble::Old if !switched => {
            Err(format!("not switched: {:?}", schedule.mirror.fault()))
        }
        _ => Ok(()),
    }
}

const TROUBLES: [Trouble; 4] = [Trouble::None, Trouble::Old, Trouble::New, Trouble::Cancel];

#[test]
fn both_are_equal_when_the_disk_goes_on_with_the_new_one() {
    for seed in 0..SEEDS {
        for trouble in TROUBLES {
            run(seed, trouble).unwrap_or_else(|wrong| panic!("seed {seed}, {trouble:?}: {wrong}"));
        }
    }
}

#[cfg(feature = "mutations")]
#[test]
fn every_rule_that_is_taken_out_is_noticed() {
    use ioplane_storage::mirror::mutation::{SwapRule, remove};
    for rule in [
        SwapRule::OneWriter,
        SwapRule::Claim,
        SwapRule::OneRead,
        SwapRule::Mark,
        SwapRule::MarkFailed,
        SwapRule::Stale,
        SwapRule::FlushBoth,
    ] {
        remove(Some(rule));
        let mut schedules = (0..SEEDS).flat_map(|seed| TROUBLES.map(|trouble| (seed, trouble)));
        let noticed = schedules
            .find_map(|(seed, trouble)| run(seed, trouble).err().map(|wrong| (seed, trouble, wrong)));
        remove(None);
        println!("{rule:?}: {noticed:?}");
        assert!(noticed.is_some(), "nothing depends on {rule:?}?");
    }
}

/// A guest that is stopped with writes under way ends the copy, and its other queues go on.
#[test]
fn a_queue_that_is_dropped_with_writes_under_way_ends_the_copy() {
    let mut schedule = Schedule::new(1, Trouble::None);
    let bytes = [GuestRange { gpa: 0, len: 4096 }];
    let op = Op::Write { offset: 0, from: &bytes };
    let Schedule { queues: [first, second], context, random, mirror, old, .. } = &mut schedule;
    first.submit(context, random, &op);
    second.submit(context, random, &op);
    assert!(second.channel.held_back(), "it waits for the first");
    first.channel = mirror.channel(DEPTH).unwrap();
    assert_eq!(mirror.fault(), Some(MirrorFault::Stopped));
    while second.busy.contains(&true) {
        second.reap(context);
        old.act(random);
    }
    assert_eq!(second.errors, 0);
    assert!(!mirror.is_equal());
}

/// With real backings, and longer transfers than a piece.
#[test]
fn a_disk_in_memory_becomes_a_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("new.img");
    const BYTES: u64 = 24 << 20;
    std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
    let old = MemoryBacking::new(BYTES).unwrap();
    let new = FileBacking::open(FileOptions::new(&path)).unwrap();
    let mirror = Mirror::new(old.clone(), new.clone()).unwrap();
    let mut queue = Queue::new(&*mirror);
    let (mut context, mut random) = (CoreContext::default(), Random::new(7));
    let bytes = [GuestRange { gpa: 0, len: 8192 }];
    let all = |queue: &mut Queue, context: &mut CoreContext, random: &mut Random| {
        for at in 0..40u64 {
            queue.submit(context, random, &Op::Write { offset: at * 600 * 1024, from: &bytes });
        }
        let (offset, len) = (1 << 20, 9 << 20);
        queue.submit(context, random, &Op::WriteZeroes { offset, len, unmap: true });
        while queue.busy.contains(&true) {
            queue.reap(context);
        }
    };
    all(&mut queue, &mut context, &mut random);
    let mut copier = mirror.copier().unwrap();
    copier.run(None, &mut |_| false).unwrap();
    mirror.start_mirroring();
    all(&mut queue, &mut context, &mut random);
    copier.run(None, &mut |_| false).unwrap();
    copier.sync().unwrap();
    all(&mut queue, &mut context, &mut random);
    assert!(mirror.is_equal() && queue.errors == 0);
    let (mut from, mut to) = (Queue::new(&*old), Queue::new(&*new));
    for offset in (0..BYTES).step_by(BUFFER as usize) {
        let mut read = |queue: &mut Queue| {
            let into = [GuestRange { gpa: 0, len: BUFFER as u32 }];
            let done =
                queue.channel.submit(&mut context, &queue.view, &Op::Read { offset, into: &into }, Tag(0));
            assert_eq!(done, Submitted::Done(Ok(())));
            let mut bytes = vec![0; BUFFER as usize];
            queue.view.read(0, &mut bytes).unwrap();
            bytes
        };
        assert!(read(&mut from) == read(&mut to), "they differ at {offset}");
    }
}

#[test]
fn what_cannot_become_a_copy_is_refused() {
    let disk = |bytes| MemoryBacking::new(bytes).unwrap();
    let refused = Mirror::new(disk(1 << 20), disk(2 << 20)).unwrap_err();
    assert!(refused.to_string().contains("one size"), "{refused}");
    assert!(Mirror::new(disk(1 << 20), disk(1 << 20)).unwrap().resize(1 << 20).is_err());
}
