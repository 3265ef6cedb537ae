//! A guest that writes faster than a copy gets ahead: without a rate to which it is held the copy never gets ahead, with one it does, and afterwards the guest
//! writes as before. On a clock of the test's own: each millisecond the copier copies eight runs, and the guest offers more work than that.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::CoreContext;
use ioplane_device::clock::ManualClock;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::mirror::{Copier, Mirror, Step};
use ioplane_storage::*;

const CHUNK: u64 = 64 << 10;
const CHUNKS: u64 = 1024;
const DEPTH: u16 = 16;
/// Writes that the guest offers in a millisecond, each to some chunk.
const OFFERED: usize = 64;
/// Runs that the copier copies in a millisecond: of four chunks, or of one where few are marked.
const RUNS: usize = 8;
/// A chunk in a millisecond.
const HOLD: NonZeroU64 = NonZeroU64::new(CHUNK * 1000).unwrap();

struct Rig {
    clock: Arc<ManualClock>,
    context: CoreContext,
    mirror: Arc<Mirror>,
    copier: Copier,
    channel: Box<dyn IoChannel>,
    view: GuestView,
    free: Vec<u16>,
    random: u64,
    /// Writes that have ended.
    written: u64,
}

impl Rig {
    fn new() -> Rig {
        let disk = || MemoryBacking::new(CHUNKS * CHUNK).unwrap();
        let mirror = Mirror::new(disk(), disk()).unwrap();
        let clock = Arc::new(ManualClock::default());
        let context = CoreContext::new(clock.clone());
        let view = GuestView::new(Arc::new(GuestMap::anonymous(4096).unwrap()));
        let (copier, channel) = (mirror.copier().unwrap(), mirror.channel(DEPTH).unwrap());
        Rig {
            clock,
            context,
            mirror,
            copier,
            channel,
            view,
            free: (0..DEPTH).collect(),
            random: 7,
            written: 0,
        }
    }

    fn reap(&mut self) {
        let Rig { channel, context, free, written, .. } = self;
        channel.reap(context, &mut |tag, outcome| {
            assert_eq!(outcome, Ok(()));
            free.push(tag.0);
            *written += 1;
        });
    }

    /// A write of 4 KiB; `None` for somewhere.
    fn write(&mut self, chunk: Option<u64>) {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let chunk = chunk.unwrap_or((self.random >> 33) % CHUNKS);
        let Some(tag) = self.free.pop() else { return };
        let op = Op::Write { offset: chunk * CHUNK, from: &[GuestRange { gpa: 0, len: 4096 }] };
        if let Submitted::Done(outcome) = self.channel.submit(&mut self.context, &self.view, &op, Tag(tag)) {
            assert_eq!(outcome, Ok(()));
            self.free.push(tag);
            self.written += 1;
        }
    }

    /// A millisecond passes.
    fn tick(&mut self) {
        self.clock.advance(Duration::from_millis(1));
        self.reap();
        for _ in 0..OFFERED {
            self.write(None);
            // As a core does that polls: a few that have waited begin each time.
            self.reap();
        }
        for _ in 0..RUNS {
            let _: Step = self.copier.step(true).unwrap();
        }
    }

    /// From now on it is held, and the bucket is full.
    fn hold(&mut self) {
        self.mirror.hold(HOLD, self.context.look());
        self.clock.advance(Duration::from_secs(10));
    }

    /// What is left after each of so many passes.
    fn passes(&mut self, passes: u64) -> Vec<u64> {
        let mut left = Vec::new();
        for _ in 0..100_000 {
            let before = self.copier.passes();
            if left.len() as u64 >= passes {
                return left;
            }
            self.tick();
            left.extend((before..self.copier.passes()).map(|_| self.mirror.left()));
        }
        panic!("no pass ends: {left:?}");
    }

    /// Writes that end within 100 ms.
    fn speed(&mut self) -> u64 {
        let before = self.written;
        (0..100).for_each(|_| self.tick());
        self.written - before
    }
}

#[test]
fn a_copy_gets_ahead_of_a_guest_that_is_held_and_not_of_one_that_is_not() {
    let all = CHUNKS * CHUNK;
    let mut free = Rig::new();
    let left = free.passes(12);
    assert!(left.iter().all(|left| *left > all / 3), "{left:?}");
    let unheld = free.speed();
    assert_eq!(unheld, 100 * OFFERED as u64, "it gets all that it offers");

    let mut held = Rig::new();
    held.passes(1);
    held.hold();
    assert!(held.mirror.is_holding());
    let left = held.passes(6);
    assert!(left[5] < all / 16, "{left:?}");
    let slowed = held.speed();
    assert!(slowed < unheld / 4, "{slowed} of {unheld} writes in 100 ms");
    // It sleeps until its time, and does not poll for it.
    assert!(held.channel.held_until().is_some() && !held.channel.held_back() && held.channel.in_flight() > 0);
    held.mirror.start_mirroring();
    assert!(!held.mirror.is_holding());
    (0..10).for_each(|_| held.tick());
    assert_eq!(held.speed(), unheld, "it has its rate back");
    assert_eq!(held.channel.held_until(), None);
}

#[test]
fn what_is_to_be_copied_anyway_is_written_at_any_rate() {
    let mut rig = Rig::new();
    rig.hold();
    // Nothing is copied yet.
    for _ in 0..1000 {
        rig.write(None);
    }
    assert_eq!((rig.written, rig.channel.held_until()), (1000, None));
    rig.copier.run(None, &mut |_| false).unwrap();
    // One chunk, from now on, is one mark.
    for _ in 0..1000 {
        rig.write(Some(5));
    }
    assert_eq!(rig.written, 2000);
    // A discard is little work for the copier.
    rig.clock.advance(Duration::from_millis(1));
    let (offset, len) = (0, CHUNKS * CHUNK);
    let op = Op::WriteZeroes { offset, len, unmap: true };
    let tag = rig.free.pop().unwrap();
    let mut done = rig.channel.submit(&mut rig.context, &rig.view, &op, Tag(tag)) == Submitted::Done(Ok(()));
    for _ in 0..100 {
        rig.channel.reap(&mut rig.context, &mut |_, outcome| done |= outcome.is_ok());
    }
    assert!(done && rig.channel.held_until().is_none());
}

#[test]
fn a_copy_that_comes_to_nothing_holds_nobody() {
    let mut rig = Rig::new();
    rig.copier.run(None, &mut |_| false).unwrap();
    rig.hold();
    for _ in 0..1000 {
        rig.write(None);
    }
    assert!(rig.free.is_empty() && rig.channel.held_until().is_some());
    rig.mirror.abandon();
    assert!(!rig.mirror.is_holding());
    rig.reap();
    rig.reap();
    assert_eq!((rig.free.len(), rig.channel.in_flight()), (usize::from(DEPTH), 0));
    for _ in 0..1000 {
        rig.write(None);
    }
    assert_eq!(rig.channel.held_until(), None);
}

/// Whoever stops a queue waits for all that it has in flight: with long writes, and as many as there may be, a rate would take more time than that one has.
#[test]
fn a_queue_that_is_stopped_is_not_held() {
    let mut rig = Rig::new();
    rig.copier.run(None, &mut |_| false).unwrap();
    rig.hold();
    for _ in 0..1000 {
        rig.write(None);
    }
    assert!(rig.free.is_empty() && rig.channel.held_until().is_some());
    rig.channel.set_draining(true);
    // Nobody sleeps on it until the time that was told before.
    assert!(rig.channel.held_until().is_none() && rig.channel.held_back());
    // Its clock stands still.
    (0..DEPTH).for_each(|_| rig.reap());
    assert_eq!((rig.free.len(), rig.channel.in_flight()), (usize::from(DEPTH), 0));
    // It goes on after all.
    rig.channel.set_draining(false);
    for _ in 0..1000 {
        rig.write(None);
    }
    assert!(rig.free.is_empty() && rig.channel.held_until().is_some());
}
