//! Swaps by seeded schedules: two queues of a guest that changes its buffers in flight, the copier, and two disks that carry operations out in
//! any order, in halves, and fail. Whenever the mirror says that both are equal they are; while it commits the new one has all that the guest
//! was told; and each rule that is taken out is noticed.
//!
//! All in one thread: a schedule is its seed.

mod disorder;

use std::sync::Arc;

use disorder::{DISK, Disorder, Random};
use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::mirror::{Copier, Mirror, MirrorFault, Step};
use ioplane_storage::*;

const DEPTH: u16 = 6;
/// Bytes of a request's buffer.
const BUFFER: u64 = 16 << 10;
const SEEDS: u64 = 100;
/// No schedule takes as many actions.
const STUCK: u32 = 400_000;

/// A queue of the guest.
struct Queue {
    channel: Box<dyn IoChannel>,
    view: GuestView,
    busy: Vec<bool>,
    /// What each request that is busy changes: offset and length.
    changes: Vec<(u64, u64)>,
    /// What requests that failed may have changed in part, since this was last emptied.
    failed: Vec<(u64, u64)>,
    errors: u64,
    /// Flushes that have ended well.
    flushes: u64,
    /// Which of the busy ones are flushes.
    flushing: Vec<bool>,
}

/// What an operation changes: offset and length.
fn change(op: &Op<'_>) -> (u64, u64) {
    match *op {
        Op::Write { offset, from } => (offset, from.iter().map(|range| u64::from(range.len)).sum()),
        Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => (offset, len),
        Op::Read { .. } | Op::Flush => (0, 0),
    }
}

impl Queue {
    fn new(backing: &dyn Backing) -> Self {
        let map = GuestMap::anonymous(u64::from(DEPTH) * BUFFER).unwrap();
        Queue {
            channel: backing.channel(DEPTH).unwrap(),
            view: GuestView::new(Arc::new(map)),
            busy: vec![false; usize::from(DEPTH)],
            changes: vec![(0, 0); usize::from(DEPTH)],
            failed: Vec::new(),
            errors: 0,
            flushes: 0,
            flushing: vec![false; usize::from(DEPTH)],
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
        (self.changes[tag], self.flushing[tag]) = (change(&op), matches!(op, Op::Flush));
        match self.channel.submit(context, &self.view, &op, Tag(tag as u16)) {
            Submitted::Pending => self.busy[tag] = true,
            Submitted::Done(outcome) => self.ended(tag, outcome),
        }
    }

    fn ended(&mut self, tag: usize, outcome: Outcome) {
        self.busy[tag] = false;
        match outcome {
            Ok(()) => self.flushes += u64::from(self.flushing[tag]),
            Err(_) => {
                self.errors += 1;
                self.failed.push(self.changes[tag]);
            }
        }
    }

    /// What a guest does to a buffer, in flight or not.
    fn change(&self, random: &mut Random, buffer: u64) {
        let bytes: Vec<u8> = (0..BUFFER).map(|_| random.below(256) as u8).collect();
        self.view.write(buffer, &bytes).unwrap();
    }

    fn reap(&mut self, context: &mut CoreContext) {
        let mut ended = Vec::new();
        self.channel.reap(context, &mut |tag, outcome| ended.push((usize::from(tag.0), outcome)));
        for (tag, outcome) in ended {
            assert!(self.busy[tag], "{tag} ended twice");
            self.ended(tag, outcome);
        }
        self.channel.push(context);
        assert_eq!(self.channel.in_flight(), self.busy.iter().filter(|busy| **busy).count());
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
    /// A write to the new one does while it is being written down that the disk is on it.
    Commit,
    /// The copier is taken away.
    Cancel,
    /// The old disk loses what it has not flushed, as a person accepts, and the copy begins anew.
    Loss,
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
    /// Actions until the old disk loses what it has not flushed.
    loses_in: Option<u64>,
}

impl Schedule {
    fn new(seed: u64, trouble: Trouble) -> Self {
        let mut random = Random::new(seed);
        let (old, new) = (Disorder::new(&mut random), Disorder::new(&mut random));
        let when = 1 + random.below(60);
        match trouble {
            Trouble::Old => old.inside().fails_in = Some(when),
            Trouble::New => new.inside().fails_in = Some(when / 4),
            Trouble::None | Trouble::Cancel | Trouble::Commit | Trouble::Loss => {}
        }
        let mirror = Mirror::new(Arc::new(old.clone()), Arc::new(new.clone())).unwrap();
        let copier = Some(mirror.copier().unwrap());
        let queues = [Queue::new(&*mirror), Queue::new(&*mirror)];
        let loses_in = (trouble == Trouble::Loss).then(|| random.below(600));
        let context = CoreContext::default();
        Schedule { random, context, old, new, mirror, copier, queues, actions: 0, loses_in }
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
        if self.loses_in == Some(0) {
            self.old.lose();
            self.mirror.restart();
        }
        self.loses_in = self.loses_in.and_then(|left| left.checked_sub(1));
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

    /// While the daemon writes down that the disk is on the new backing: `requests` of the guest, a flush, and all until it has ended, or until
    /// the new one has failed and some time has passed. Whatever dies in between, the new one has all that the guest was told.
    fn commit(&mut self, requests: u64) -> Result<(), String> {
        for _ in 0..requests {
            self.told(Self::guest)?;
            for _ in 0..self.random.below(8) {
                self.told(Self::act)?;
            }
        }
        self.end_all()?;
        let flush = |schedule: &mut Self| {
            schedule.queues[0].submit(&mut schedule.context, &mut schedule.random, &Op::Flush);
        };
        self.told(flush)?;
        self.end_all()
    }

    fn end_all(&mut self) -> Result<(), String> {
        while self.busy() && self.mirror.fault().is_none() {
            self.told(Self::act)?;
        }
        let after = if self.busy() { 100 } else { 0 };
        (0..after).try_for_each(|_| self.told(Self::act))
    }

    /// Without the copier: what it copies after its flush it has to flush again.
    fn act(&mut self) {
        let queue = self.random.below(2) as usize;
        match self.random.below(6) {
            0 | 1 => self.old.clone().act(&mut self.random),
            2 | 3 => self.new.clone().act(&mut self.random),
            _ => self.queues[queue].reap(&mut self.context),
        }
    }

    fn told(&mut self, step: impl FnOnce(&mut Self)) -> Result<(), String> {
        let flushes = |schedule: &Self| schedule.queues.iter().map(|queue| queue.flushes).sum::<u64>();
        let before = flushes(self);
        step(self);
        self.new_has_what_was_told(flushes(self) > before)
    }

    /// Where nothing is in flight and nothing has failed, both are the same; `flushed`: or the power may fail.
    fn new_has_what_was_told(&self, flushed: bool) -> Result<(), String> {
        let (old, new) = (self.old.inside(), self.new.inside());
        const SECTOR: usize = 512;
        let mut open = [false; DISK as usize / SECTOR];
        for queue in &self.queues {
            let busy = queue.busy.iter().zip(&queue.changes).filter(|(busy, _)| **busy);
            for (offset, len) in busy.map(|(_, change)| change).chain(&queue.failed) {
                open[*offset as usize / SECTOR..(offset + len) as usize / SECTOR].fill(true);
            }
        }
        let differs = |new: &[u8]| {
            let pairs = old.content.chunks(SECTOR).zip(new.chunks(SECTOR)).zip(open);
            pairs.enumerate().find(|(_, ((old, new), open))| !open && old != new).map(|(at, _)| at * SECTOR)
        };
        if let Some(at) = differs(&new.content) {
            return Err(format!("byte {at} was told to be written, and the new one lacks it"));
        }
        // What was written since the flush may be lost, so only a flush just now says something.
        match differs(&new.durable) {
            Some(at) if flushed => {
                Err(format!("byte {at} was told to be durable, and would be lost with the power"))
            }
            _ => Ok(()),
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
        if !schedule.mirror.begin_commit() {
            // An old write that failed has marked something again.
            continue;
        }
        schedule.queues.iter_mut().for_each(|queue| queue.failed.clear());
        if trouble == Trouble::Commit {
            schedule.new.inside().fails_in = Some(schedule.random.below(6));
        }
        let requests = schedule.random.below(20);
        schedule.commit(requests)?;
        switched = !schedule.busy() && schedule.mirror.decide();
        if !switched {
            schedule.mirror.end_commit();
        }
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
        Trouble::New | Trouble::Commit if switched && new.fails_in.is_some() => Ok(()),
        Trouble::New | Trouble::Commit | Trouble::Cancel if switched => {
            Err("it switched to what is no copy".to_owned())
        }
        Trouble::None | Trouble::Old | Trouble::Loss if !switched => {
            Err(format!("not switched: {:?}", schedule.mirror.fault()))
        }
        _ => Ok(()),
    }
}

const TROUBLES: [Trouble; 6] =
    [Trouble::None, Trouble::Old, Trouble::New, Trouble::Commit, Trouble::Cancel, Trouble::Loss];

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
        SwapRule::Hold,
        SwapRule::Restart,
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
    assert!(mirror.begin_commit() && mirror.decide() && queue.errors == 0);
    mirror.abandon();
    assert_eq!(mirror.fault(), None, "the disk is on the new one: there is nothing to abandon");
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
    // Whoever still uses the mirror uses the new one, which alone is written from now on.
    let mut fourth = |queue: &mut Queue, byte: Option<u8>| {
        let (offset, bytes) = (4 * BUFFER, [GuestRange { gpa: 0, len: BUFFER as u32 }]);
        let op = match byte {
            Some(byte) => {
                queue.view.write(0, &vec![byte; BUFFER as usize]).unwrap();
                Op::Write { offset, from: &bytes }
            }
            None => Op::Read { offset, into: &bytes },
        };
        assert_eq!(queue.channel.submit(&mut context, &queue.view, &op, Tag(0)), Submitted::Done(Ok(())));
        let mut byte = [0];
        queue.view.read(0, &mut byte).unwrap();
        byte[0]
    };
    let before = fourth(&mut from, None);
    fourth(&mut queue, Some(!before));
    assert_eq!([fourth(&mut queue, None), fourth(&mut to, None)], [!before; 2]);
    assert_eq!(fourth(&mut from, None), before);
}

#[test]
fn what_cannot_become_a_copy_is_refused() {
    let disk = |bytes| MemoryBacking::new(bytes).unwrap();
    let refused = Mirror::new(disk(1 << 20), disk(2 << 20)).unwrap_err();
    assert!(refused.to_string().contains("one size"), "{refused}");
    assert!(Mirror::new(disk(1 << 20), disk(1 << 20)).unwrap().resize(1 << 20).is_err());
}

/// What the old one gains while it is copied is not promised to a guest that goes on with the new one.
#[test]
fn a_mirror_is_as_long_as_both_were_although_the_old_one_grows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let old: Arc<dyn Backing> = FileBacking::open(FileOptions::new(&path)).unwrap();
    let mirror = Mirror::new(old.clone(), MemoryBacking::new(1 << 20).unwrap()).unwrap();
    old.resize(2 << 20).unwrap();
    assert_eq!((mirror.info().bytes, old.info().bytes), (1 << 20, 2 << 20));
}
