//! Limits of disks and NICs, by a clock that the test moves: counts only.

mod lan;
mod rig;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::clock::{Clock, ManualClock};
use ioplane_device::{Change, Device, QueueSet, Running};
use ioplane_scheduler::{LimitUnit, RateBucket, RateLimit};
use ioplane_storage::MemoryBacking;
use ioplane_storage::mirror::Mirror;
use ioplane_testkit::driver::net::NetHeader;
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::blk::spec::VIRTIO_BLK_S_OK;
use ioplane_virtio::{Chain, DeviceLimits, Ring, Vdev, VirtioDevice};
use lan::{Lan, Wants, mac, packet};
use rig::{PACKED, Rig, SPLIT, options};

const SECOND: u64 = 1_000_000_000;

fn rate(per_second: u64, burst: u64) -> Option<RateLimit> {
    NonZeroU64::new(per_second).map(|per_second| RateLimit { per_second, burst })
}

fn limits(requests: Option<RateLimit>, bytes: Option<RateLimit>) -> DeviceLimits {
    let mut limits = DeviceLimits::default();
    limits.change(requests, bytes, Instant::now());
    limits
}

/// Tells the pollers of the limits that their device has now.
fn tell<V: VirtioDevice>(running: &mut Running<Vdev<V>>, core: &HandCore) {
    for queue in running.queues() {
        let limits = running.device().queue_limits(queue);
        let _ = running.apply(&QueueSet::from([queue]), &Change::Limits(limits));
    }
    core.turn();
}

/// A disk on its core, with requests of up to `most` bytes.
fn disk(core: &HandCore, name: &str, features: u64, most: u32) -> Rig {
    let plan = DiskPlan { slots: 16, max_bytes: most, segments: 2, shape: Shape::Direct };
    Rig::planned(options(name), MemoryBacking::new(1 << 20).unwrap(), plan, features, core)
}

fn limit_disk(rig: &mut Rig, to: DeviceLimits) {
    let core = rig.core.clone();
    rig.running().device_mut().model_mut().set_limits(to);
    tell(rig.running(), &core);
}

/// A fixed series of numbers that look like any.
struct Series(u64);

impl Series {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// What passed, as (time in ns, units of the request).
#[derive(Default)]
struct Passed {
    all: Vec<(u64, u64)>,
}

impl Passed {
    /// The most by which any interval has more than the rate lets through in it, the last request not counted.
    fn most_above(&self, rate: u64) -> i128 {
        let (mut before, mut lowest, mut most) = (0i128, i128::MAX, 0i128);
        for (at, units) in &self.all {
            let level = before * i128::from(SECOND) - i128::from(*at) * i128::from(rate);
            lowest = lowest.min(level);
            most = most.max(level - lowest);
            before += i128::from(*units);
        }
        most / i128::from(SECOND)
    }

    fn sum(&self) -> u64 {
        self.all.iter().map(|(_, units)| units).sum()
    }

    /// At most the rate, the burst and one request in any interval, and at least 98 % of the rate in all of it.
    fn check(&self, what: &str, (rate, burst): (u64, u64), span: u64, largest: u64) {
        let above = self.most_above(rate);
        // A bucket lets through what comes in a millisecond at least, and counts to a millionth.
        let burst = burst.max(rate / 1000) + 1 + rate / 100_000;
        assert!(above <= i128::from(burst), "{what}: {above} above the rate, of a burst of {burst}");
        let (sum, wanted) = (self.sum(), rate as u128 * span as u128 / SECOND as u128);
        assert!(u128::from(sum + largest) * 100 >= wanted * 98, "{what}: {sum} of {wanted}");
    }
}

/// Bytes of the requests that are on their way, by slot.
type Sizes = HashMap<usize, u64>;

/// As [`backlogged_with`], of a disk that has been idle until now.
fn backlogged(rig: &mut Rig, clock: &ManualClock, span: u64, most: u64) -> (Passed, Passed) {
    backlogged_with(rig, clock, (span, most), &mut Sizes::new())
}

/// A disk that always has requests, looked at up to 50 us late, for `span` ns; what passed in requests and in bytes.
fn backlogged_with(
    rig: &mut Rig,
    clock: &ManualClock,
    (span, most): (u64, u64),
    sizes: &mut Sizes,
) -> (Passed, Passed) {
    let (mut requests, mut bytes) = (Passed::default(), Passed::default());
    let (mut series, mut now) = (Series(span), 0);
    while now < span {
        while let Some(token) = rig.disk.next() {
            let size = 512 * (1 + series.next() % (most / 512));
            let op = if series.next().is_multiple_of(2) { DiskOp::Read } else { DiskOp::Write };
            rig.disk.submit(op, 0, size as u32).unwrap();
            sizes.insert(token.slot(), size);
        }
        rig.core.turn();
        while let Some(done) = rig.disk.reap().unwrap() {
            assert_eq!(done.status, VIRTIO_BLK_S_OK);
            requests.all.push((now, 1));
            bytes.all.push((now, sizes.remove(&done.token.slot()).unwrap()));
        }
        let step = 1000 + series.next() % 50_000;
        clock.advance(Duration::from_nanos(step));
        now += step;
    }
    (requests, bytes)
}

#[test]
fn a_disk_gets_its_rate_and_no_interval_has_more() {
    for features in [SPLIT, PACKED] {
        for (iops, burst) in [(500, 1), (2000, 100), (20_000, 2000)] {
            let clock = Arc::new(ManualClock::default());
            let core = HandCore::by(clock.clone());
            let mut rig = disk(&core, "disk", features, 4096);
            limit_disk(&mut rig, limits(rate(iops, burst), None));
            let (requests, _) = backlogged(&mut rig, &clock, SECOND, 4096);
            requests.check("requests", (iops, burst), SECOND, 1);
        }
        for (bandwidth, burst) in [(1 << 20, 1), (10 << 20, 1 << 20)] {
            let clock = Arc::new(ManualClock::default());
            let core = HandCore::by(clock.clone());
            let mut rig = disk(&core, "disk", features, 64 << 10);
            limit_disk(&mut rig, limits(None, rate(bandwidth, burst)));
            let (_, bytes) = backlogged(&mut rig, &clock, SECOND, 64 << 10);
            bytes.check("bytes", (bandwidth, burst), SECOND, 64 << 10);
        }
    }
}

#[test]
fn a_transfer_of_several_slices_passes_whole() {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    let mut rig = disk(&core, "disk", SPLIT, 256 << 10);
    limit_disk(&mut rig, limits(None, rate(10 << 20, 1)));
    let (_, bytes) = backlogged(&mut rig, &clock, SECOND, 256 << 10);
    // What a millisecond lets through is the smallest burst.
    let most = (10 << 20) + (10 << 20) / 1000 + (256 << 10);
    assert!((9 << 20..=most).contains(&bytes.sum()), "{} of {most}", bytes.sum());
}

#[test]
fn both_limits_hold_and_change_while_the_disk_is_used() {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    let mut rig = disk(&core, "disk", SPLIT, 4096);
    let mut now = limits(rate(1000, 10), rate(64 << 20, 1 << 20));
    let mut sizes = Sizes::new();
    limit_disk(&mut rig, now.clone());
    let (requests, bytes) = backlogged_with(&mut rig, &clock, (SECOND, 4096), &mut sizes);
    requests.check("requests", (1000, 10), SECOND, 1);
    assert!(bytes.sum() < 8 << 20);
    // Now bytes are what is scarce.
    now.change(rate(1_000_000, 10), rate(1 << 20, 4096), clock.now());
    limit_disk(&mut rig, now.clone());
    let (_, bytes) = backlogged_with(&mut rig, &clock, (SECOND, 4096), &mut sizes);
    bytes.check("bytes", (1 << 20, 4096), SECOND, 4096);
    // And nothing is: all that is there passes without a step of the clock.
    now.change(None, None, clock.now());
    limit_disk(&mut rig, now);
    let (requests, _) = backlogged_with(&mut rig, &clock, (SECOND / 100, 4096), &mut sizes);
    let turns = 16 * SECOND / 100 / 51_000;
    assert!(requests.sum() >= turns, "{} of {turns}", requests.sum());
}

#[test]
fn a_flush_is_not_starved_by_a_neighbour_that_is_always_first() {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    // Polled first in each turn, since it is attached first.
    let mut greedy = disk(&core, "greedy", SPLIT, 4096);
    let mut modest = disk(&core, "modest", SPLIT, 4096);
    let group = [(LimitUnit::Requests, Arc::new(RateBucket::new(rate(100, 1).unwrap())))];
    for rig in [&mut greedy, &mut modest] {
        let mut limits = DeviceLimits::default();
        limits.join(group.to_vec());
        limit_disk(rig, limits);
    }
    let mut flushes = 0;
    modest.disk.submit(DiskOp::Flush, 0, 0).unwrap();
    let (mut reads, steps) = (0, 10_000);
    for _ in 0..steps {
        while greedy.disk.submit(DiskOp::Read, 0, 512).is_some() {}
        core.turn();
        while greedy.disk.reap().unwrap().is_some() {
            reads += 1;
        }
        if modest.disk.reap().unwrap().is_some() {
            flushes += 1;
            modest.disk.submit(DiskOp::Flush, 0, 0).unwrap();
        }
        clock.advance(Duration::from_micros(100));
    }
    // One second of a hundred. A flush has the next place but one at the latest.
    assert!((98..=103).contains(&(reads + flushes)), "{reads} reads, {flushes} flushes");
    assert!(flushes >= 45, "{flushes} flushes beside {reads} reads");
}

#[test]
fn a_stop_does_not_wait_for_a_limit_and_loses_nothing() {
    for features in [SPLIT, PACKED] {
        let clock = Arc::new(ManualClock::default());
        let core = HandCore::by(clock.clone());
        let mut rig = disk(&core, "disk", features, 4096);
        limit_disk(&mut rig, limits(rate(10, 1), None));
        for _ in 0..10 {
            rig.disk.submit(DiskOp::Write, 0, 512).unwrap();
        }
        rig.disk.submit(DiskOp::Flush, 0, 0).unwrap();
        core.turn_until_idle(100);
        let mut done = 0;
        let mut count = |rig: &mut Rig| {
            while let Some(answer) = rig.disk.reap().unwrap() {
                assert_eq!(answer.status, VIRTIO_BLK_S_OK);
                done += 1;
            }
            done
        };
        assert!(count(&mut rig) <= 2);
        rig.quiesce();
        let setup = rig.running().device().queue(0).unwrap();
        assert!(setup.in_flight.is_empty(), "what is held back is not in flight");
        // Started again it has its limits from the first poll on.
        let core = rig.core.clone();
        rig.running().start(&QueueSet::from([0]), &core).unwrap();
        core.turn_until_idle(100);
        assert!(count(&mut rig) <= 2);
        for _ in 0..12 {
            clock.advance(Duration::from_millis(100));
            core.turn_until_idle(100);
        }
        assert_eq!(count(&mut rig), 11);
        assert_eq!(rig.counts().requests, 11);
    }
}

#[test]
fn freeing_counts_as_a_request_and_by_what_it_costs() {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    let mut rig = disk(&core, "disk", SPLIT, 4096);
    limit_disk(&mut rig, limits(None, rate(1 << 20, 1)));
    // 1 MiB is freed, and costs 264 KiB.
    assert_eq!(rig.request(DiskOp::Discard, 0, 1 << 20), VIRTIO_BLK_S_OK);
    rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
    let mut waited = 0;
    while rig.disk.reap().unwrap().is_none() {
        clock.advance(Duration::from_millis(1));
        rig.core.turn();
        waited += 1;
        assert!(waited < 10_000, "waits for ever");
    }
    assert!((255..=260).contains(&waited), "{waited} ms");
}

#[test]
fn what_was_in_flight_when_a_daemon_died_is_limited_as_well() {
    for features in [SPLIT, PACKED] {
        let clock = Arc::new(ManualClock::default());
        let core = HandCore::by(clock.clone());
        let mut rig = disk(&core, "disk", features, 4096);
        rig.quiesce();
        for _ in 0..6 {
            rig.disk.submit(DiskOp::Write, 0, 512).unwrap();
        }
        // Taken by a process that is no more: the journal knows.
        let running = rig.running();
        let setup = running.device().queue(0).unwrap();
        let (view, features) = (running.device().view().clone(), running.device().features());
        let journal = setup.journal.clone();
        let mut ring = Ring::open(view, &setup.layout, features, setup.base, journal, &[]).unwrap();
        for _ in 0..6 {
            let (taken, _) = ring.take(&mut Chain::new()).unwrap().unwrap();
            ring.release(&taken);
            taken.abandon();
        }
        drop(ring);
        rig.running().device_mut().model_mut().set_limits(limits(rate(10, 1), None));
        let core = rig.core.clone();
        rig.running().start(&QueueSet::from([0]), &core).unwrap();
        core.turn_until_idle(100);
        let mut done = 0;
        let mut count = |rig: &mut Rig| {
            while let Some(answer) = rig.disk.reap().unwrap() {
                assert_eq!(answer.status, VIRTIO_BLK_S_OK);
                done += 1;
            }
            done
        };
        assert!((1..=2).contains(&count(&mut rig)));
        for _ in 0..8 {
            clock.advance(Duration::from_millis(100));
            core.turn_until_idle(100);
        }
        assert_eq!((count(&mut rig), rig.counts().replayed), (6, 6));
    }
}

#[test]
fn a_request_that_cannot_be_done_puts_nobody_into_debt() {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    let mut rig = disk(&core, "disk", SPLIT, 64 << 10);
    limit_disk(&mut rig, limits(None, rate(4096, 1)));
    let end = (1 << 20) / 512;
    for _ in 0..100 {
        rig.disk.submit(DiskOp::Read, end, 64 << 10).unwrap();
        core.turn_until_idle(10);
        assert_ne!(rig.disk.reap().unwrap().expect("is answered at once").status, VIRTIO_BLK_S_OK);
    }
    rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
    core.turn_until_idle(10);
    assert_eq!(rig.disk.reap().unwrap().expect("is answered at once").status, VIRTIO_BLK_S_OK);
}

/// Sends frames of `bytes` bytes from one NIC to another for a second, without a pause; what came, and when.
fn stream(packed: bool, tx: DeviceLimits, rx: DeviceLimits, bytes: usize) -> (Passed, Passed) {
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    let lan = Lan::on(core.clone());
    let mut from = lan.plug_with(Wants { packed, ..Wants::new(1) });
    let mut to = lan.plug_with(Wants { packed, ..Wants::new(2) });
    from.running().device_mut().model_mut().set_limits(tx, DeviceLimits::default());
    to.running().device_mut().model_mut().set_limits(DeviceLimits::default(), rx);
    tell(from.running(), &core);
    tell(to.running(), &core);
    let frame = packet::plain(mac(2), mac(1), bytes);
    let (mut frames, mut octets) = (Passed::default(), Passed::default());
    let (mut series, mut now) = (Series(1), 0);
    while now < SECOND {
        for _ in 0..4 {
            from.pairs[0].send(NetHeader::default(), &frame).unwrap();
        }
        core.turn();
        from.pairs[0].reap().unwrap();
        while let Some(got) = to.pairs[0].take_frame().unwrap() {
            frames.all.push((now, 1));
            octets.all.push((now, got.len as u64));
        }
        let step = 1000 + series.next() % 50_000;
        clock.advance(Duration::from_nanos(step));
        now += step;
    }
    (frames, octets)
}

#[test]
fn a_nic_has_limits_for_what_it_sends_and_for_what_it_receives() {
    let none = DeviceLimits::default;
    for packed in [false, true] {
        for (tx, rx) in [
            (limits(rate(2000, 20), None), none()),
            (none(), limits(rate(2000, 20), None)),
            (limits(rate(2000, 20), None), limits(rate(50_000, 20), None)),
        ] {
            let (frames, _) = stream(packed, tx, rx, 200);
            frames.check("frames", (2000, 20), SECOND, 1);
        }
        for (tx, rx) in
            [(limits(None, rate(1 << 20, 64 << 10)), none()), (none(), limits(None, rate(1 << 20, 64 << 10)))]
        {
            let (_, bytes) = stream(packed, tx, rx, 1400);
            bytes.check("bytes", (1 << 20, 64 << 10), SECOND, 1514);
        }
    }
}

/// Of a swap whose copy is outrun: writes wait for a rate within the storage. A stop waits for them, and its front end for the stop.
#[test]
fn a_queue_that_is_stopped_does_not_wait_for_the_rate_of_a_swap() {
    const MIB: u32 = 1 << 20;
    const WRITES: u16 = 12;
    let disk = || MemoryBacking::new(64 * u64::from(MIB)).unwrap();
    let mirror = Mirror::new(disk(), disk()).unwrap();
    mirror.copier().unwrap().run(None, &mut |_| false).unwrap();
    let clock = Arc::new(ManualClock::default());
    let core = HandCore::by(clock.clone());
    mirror.hold(NonZeroU64::new(4 << 20).unwrap(), clock.now());
    let plan = DiskPlan { slots: WRITES, max_bytes: MIB, segments: 2, shape: Shape::Indirect };
    let mut rig = Rig::planned(options("disk"), mirror, plan, SPLIT, &core);
    // Each time to other places, of which none is to be copied yet.
    let fill = |rig: &mut Rig, from: u64| {
        for write in 0..u64::from(WRITES) {
            let sector = (from + write) * u64::from(MIB) / 512;
            rig.disk.submit(DiskOp::Write, sector, MIB).unwrap();
        }
        for _ in 0..200 {
            core.turn();
        }
        assert!(rig.disk.reap().unwrap().is_none(), "a write of 1 MiB takes 250 ms");
    };
    let ended = |rig: &mut Rig| {
        let mut ended = 0;
        while let Some(done) = rig.disk.reap().unwrap() {
            assert!(done.ok());
            ended += 1;
        }
        ended
    };
    fill(&mut rig, 0);
    // The clock stands still.
    rig.quiesce();
    assert_eq!(ended(&mut rig), WRITES);
    rig.running().start(&QueueSet::from([0]), &core).unwrap();
    fill(&mut rig, 20);
    let mut all = 0;
    for step in 0..100 {
        clock.advance(Duration::from_millis(50));
        for _ in 0..20 {
            core.turn();
        }
        all += ended(&mut rig);
        assert!(step > 19 || all < WRITES, "{WRITES} MiB in a second");
    }
    assert_eq!(all, WRITES);
}
