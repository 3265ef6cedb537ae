//! Where the time of requests goes, by a clock that moves only where something takes time: in the storage, and in the call that interrupts the driver.

mod lan;
mod rig;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreContext, Histogram, Interrupt, Meter, QueueSet, Running};
use ioplane_memory::GuestView;
use ioplane_storage::{
    Backing, BackingInfo, IoChannel, MemoryBacking, Op, Outcome, StorageError, Submitted, Tag,
};
use ioplane_testkit::driver::net::NetHeader;
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::blk::Blk;
use ioplane_virtio::spec::feature::*;
use ioplane_virtio::{Vdev, VirtioDevice};
use lan::{Lan, Wants, mac, packet};
use rig::{PACKED, Rig, SPLIT, options};

/// What the storage takes for a request.
const COPY: u64 = 3_000;
/// What the call takes that interrupts the driver.
const CALL: u64 = 700;

/// An interrupt that takes time.
#[derive(Debug)]
struct SlowInterrupt(Arc<ManualClock>);

impl Interrupt for SlowInterrupt {
    fn signal(&self) {
        self.0.advance(Duration::from_nanos(CALL));
    }
}

/// Storage that takes time. While it is shut it keeps what it has done for itself.
#[derive(Debug, Clone)]
struct SlowDisk {
    below: Arc<MemoryBacking>,
    clock: Arc<ManualClock>,
    shut: Arc<AtomicBool>,
}

struct SlowLane {
    below: Box<dyn IoChannel>,
    disk: SlowDisk,
    kept: Vec<(Tag, Outcome)>,
}

impl Backing for SlowDisk {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let kept = Vec::with_capacity(depth.into());
        Ok(Box::new(SlowLane { below: self.below.channel(depth)?, disk: self.clone(), kept }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, _deadline: Instant) -> bool {
        true
    }
}

impl IoChannel for SlowLane {
    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let submitted = self.below.submit(context, view, op, tag);
        self.disk.clock.advance(Duration::from_nanos(COPY));
        match submitted {
            Submitted::Done(outcome) if self.disk.shut.load(Ordering::Relaxed) => {
                self.kept.push((tag, outcome));
                Submitted::Pending
            }
            submitted => submitted,
        }
    }

    fn push(&mut self, _context: &mut CoreContext) {}

    fn held_back(&self) -> bool {
        false
    }

    fn reap(&mut self, _context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        if self.disk.shut.load(Ordering::Relaxed) {
            return 0;
        }
        self.kept.drain(..).map(|(tag, outcome)| done(tag, outcome)).count()
    }

    fn in_flight(&self) -> usize {
        self.kept.len()
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// All of a queue's times at one moment.
struct Times {
    latency: Vec<u64>,
    wait: Vec<u64>,
    interrupt: Vec<u64>,
}

/// What was counted in between: how many, and the shortest and the longest in ns.
fn between(before: &[u64], after: &[u64]) -> (u64, u64, u64) {
    let new: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    (new.iter().sum(), Histogram::quantile(&new, 0.0), Histogram::quantile(&new, 1.0))
}

impl Times {
    fn of(meter: &Meter) -> Self {
        let [latency, wait, interrupt] =
            [&meter.latency, &meter.wait, &meter.interrupt].map(Histogram::snapshot);
        Times { latency, wait, interrupt }
    }

    fn latency_since(&self, before: &Times) -> (u64, u64, u64) {
        between(&before.latency, &self.latency)
    }

    fn wait_since(&self, before: &Times) -> (u64, u64, u64) {
        between(&before.wait, &self.wait)
    }

    fn interrupt_since(&self, before: &Times) -> (u64, u64, u64) {
        between(&before.interrupt, &self.interrupt)
    }
}

/// So many counts of that time, which a histogram knows to an eighth.
#[track_caller]
fn are((count, shortest, longest): (u64, u64, u64), times: u64, ns: u64) {
    assert_eq!(count, times);
    let alike = |said: u64| said >= ns && said <= ns + ns / 7 + 1;
    assert!(alike(shortest) && alike(longest), "{shortest} to {longest} ns in place of {ns}");
}

/// Has every queue of a device interrupt its driver by a call that takes time.
fn slow_interrupts<V: VirtioDevice>(
    running: &mut Running<Vdev<V>>,
    clock: &Arc<ManualClock>,
    core: &HandCore,
) {
    for queue in running.queues() {
        let call: Arc<dyn Interrupt> = Arc::new(SlowInterrupt(clock.clone()));
        let _ = running.apply(&QueueSet::from([queue]), &Change::Call(Some(call)));
    }
    core.turn();
}

/// A disk whose storage and interrupts take time.
struct Scene {
    clock: Arc<ManualClock>,
    shut: Arc<AtomicBool>,
    rig: Rig,
}

impl Scene {
    fn new(features: u64) -> Self {
        let (clock, shut) = (Arc::new(ManualClock::default()), Arc::new(AtomicBool::new(false)));
        let core = HandCore::by(clock.clone());
        let below = MemoryBacking::new(1 << 20).unwrap();
        let disk = SlowDisk { below, clock: clock.clone(), shut: shut.clone() };
        let plan = DiskPlan { slots: 16, max_bytes: 4096, segments: 2, shape: Shape::Direct };
        let mut rig = Rig::planned(options("disk"), Arc::new(disk), plan, features, &core);
        slow_interrupts(rig.running(), &clock, &core);
        Scene { clock, shut, rig }
    }

    fn times(&mut self) -> Times {
        let running: &mut Running<Vdev<Blk>> = self.rig.running();
        Times::of(&running.device().meters()[0])
    }

    fn submit(&mut self) {
        self.rig.disk.submit(DiskOp::Read, 0, 4096).unwrap();
    }

    /// Turns once; how many requests have been answered.
    fn turn(&mut self) -> u32 {
        self.rig.core.turn();
        let mut answered = 0;
        while self.rig.disk.reap().unwrap().is_some() {
            answered += 1;
        }
        answered
    }

    fn later(&self, ns: u64) {
        self.clock.advance(Duration::from_nanos(ns));
    }
}

fn every_ring(check: impl Fn(Scene)) {
    for features in [SPLIT, SPLIT & !VIRTIO_F_EVENT_IDX, PACKED, PACKED & !VIRTIO_F_EVENT_IDX] {
        check(Scene::new(features));
    }
}

#[test]
fn the_time_in_the_device_ends_where_that_to_the_interrupt_begins() {
    every_ring(|mut scene| {
        for requests in [1, 3] {
            let before = scene.times();
            (0..requests).for_each(|_| scene.submit());
            assert_eq!(scene.turn(), requests as u32);
            let after = scene.times();
            // One publication, and one interrupt for it.
            are(after.latency_since(&before), requests, requests * COPY);
            are(after.interrupt_since(&before), 1, CALL);
        }
    });
}

#[test]
fn a_later_batch_of_a_poll_waits_for_the_interrupt_of_the_one_before() {
    every_ring(|mut scene| {
        let before = scene.times();
        (0..16).for_each(|_| scene.submit());
        assert_eq!(scene.turn(), 16);
        let after = scene.times();
        // Two batches of eight. Both were taken when the poll began.
        let (count, shortest, longest) = after.latency_since(&before);
        are((8, shortest, shortest), 8, 8 * COPY);
        let interrupts = after.interrupt_since(&before);
        are((count, longest, longest), 16, 16 * COPY + CALL);
        // By its index a driver asks for one interrupt until it looks; by its flag for one each time.
        assert!(interrupts.0 == 1 || interrupts.0 == 2);
        are(interrupts, interrupts.0, CALL);
    });
}

#[test]
fn a_driver_that_polls_its_ring_has_no_time_to_the_interrupt() {
    every_ring(|mut scene| {
        // A driver with VIRTIO_F_EVENT_IDX disables interrupts by the index that it leaves behind, as Linux does.
        scene.submit();
        assert_eq!(scene.turn(), 1);
        scene.rig.disk.ring().disable_interrupts();
        let (before, counted) = (scene.times(), scene.rig.counts());
        scene.submit();
        assert_eq!(scene.turn(), 1);
        let (after, counts) = (scene.times(), scene.rig.counts());
        are(after.latency_since(&before), 1, COPY);
        assert_eq!(after.interrupt_since(&before).0, 0);
        assert_eq!(counts.interrupts_avoided - counted.interrupts_avoided, 1);
        assert_eq!(counts.interrupts, counted.interrupts);
    });
}

#[test]
fn a_queue_that_nobody_can_interrupt_has_no_time_to_the_interrupt() {
    every_ring(|mut scene| {
        let core = scene.rig.core.clone();
        let _ = scene.rig.running().apply(&QueueSet::from([0]), &Change::Call(None));
        core.turn();
        let before = scene.times();
        scene.submit();
        assert_eq!(scene.turn(), 1);
        assert_eq!(scene.times().interrupt_since(&before).0, 0);
    });
}

#[test]
fn what_the_storage_ends_later_is_in_the_device_until_the_core_takes_it_up() {
    every_ring(|mut scene| {
        let before = scene.times();
        scene.shut.store(true, Ordering::Relaxed);
        scene.submit();
        assert_eq!(scene.turn(), 0);
        scene.later(40_000);
        scene.submit();
        assert_eq!(scene.turn(), 0);
        scene.later(10_000);
        scene.shut.store(false, Ordering::Relaxed);
        assert_eq!(scene.turn(), 2);
        let after = scene.times();
        let (count, shortest, longest) = after.latency_since(&before);
        are((count, shortest, shortest), 2, 10_000 + COPY);
        are((count, longest, longest), 2, 50_000 + 2 * COPY);
        are(after.interrupt_since(&before), 1, CALL);
    });
}

#[test]
fn requests_that_are_found_behind_what_was_reaped_begin_after_its_interrupt() {
    every_ring(|mut scene| {
        scene.shut.store(true, Ordering::Relaxed);
        scene.submit();
        assert_eq!(scene.turn(), 0);
        scene.shut.store(false, Ordering::Relaxed);
        let before = scene.times();
        scene.submit();
        // The driver asks for an interrupt anew when it looks, so the second answer of this poll may have none.
        assert_eq!(scene.turn(), 2);
        let after = scene.times();
        let (count, shortest, longest) = after.latency_since(&before);
        assert_eq!(count, 2);
        are((1, shortest, longest), 1, COPY);
        let interrupts = after.interrupt_since(&before).0;
        are(after.interrupt_since(&before), interrupts, CALL);
        assert!(interrupts == 1 || interrupts == 2);
    });
}

#[test]
fn a_request_that_was_kicked_for_has_waited_for_the_wake_up_and_not_since_the_last_look() {
    const WAKE_UP: u64 = 60_000;
    every_ring(|mut scene| {
        for asleep in [1_000_000_000, 10_000] {
            let before = scene.times();
            assert_eq!(scene.turn(), 0);
            assert!(scene.rig.core.arm());
            scene.later(asleep);
            scene.submit();
            scene.rig.core.disarm_after(Duration::from_nanos(WAKE_UP));
            assert_eq!(scene.turn(), 1);
            // It cannot have come before the last look, however long wake-ups take as a rule.
            are(scene.times().wait_since(&before), 1, asleep.min(WAKE_UP));
        }
    });
}

#[test]
fn a_request_to_a_ring_that_is_polled_has_waited_since_the_last_look() {
    every_ring(|mut scene| {
        assert_eq!(scene.turn(), 0);
        let before = scene.times();
        scene.later(5_000);
        // Nobody had asked for a kick, so this says nothing of when it came.
        scene.rig.core.disarm_after(Duration::from_nanos(60_000));
        scene.submit();
        assert_eq!(scene.turn(), 1);
        are(scene.times().wait_since(&before), 1, 5_000);
    });
}

#[test]
fn frames_are_done_before_their_driver_is_interrupted() {
    for packed in [false, true] {
        let clock = Arc::new(ManualClock::default());
        let lan = Lan::on(HandCore::by(clock.clone()));
        let wants = |number| Wants { packed, ..Wants::new(number) };
        let (mut a, mut b) = (lan.plug_with(wants(1)), lan.plug_with(wants(2)));
        slow_interrupts(b.running(), &clock, &lan.core);
        let times = |nic: &mut lan::Nic| Times::of(&nic.running().device().meters()[0]);
        let before = times(&mut b);
        let frame = packet::plain(mac(2), mac(1), 200);
        a.send(NetHeader::default(), &frame);
        assert_eq!(b.receive().len(), 1);
        let after = times(&mut b);
        are(after.latency_since(&before), 1, 0);
        are(after.interrupt_since(&before), 1, CALL);
    }
}
