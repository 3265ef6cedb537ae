//! What groups may have in flight on one disk of the host, from cores that know nothing of each other. Counted in requests.

mod counter;

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreSettings};
use ioplane_device::{
    BlockDevice, Change, CoreId, CoreMessage, Device, DevicePart, GroupId, QueueSet, Running, Share,
};
use ioplane_scheduler::IN_FLIGHT;

const EACH: u64 = 64 << 10;
const MIB: u64 = 1 << 20;
const MANY: u64 = 1000;
const HERE: BlockDevice = BlockDevice(1);
const ELSEWHERE: BlockDevice = BlockDevice(2);

fn of(count: &AtomicU64) -> u64 {
    count.load(Ordering::SeqCst)
}

fn group() -> Share {
    Share::new_group(NonZeroU32::MIN)
}

/// Cores on which nobody rests.
fn polled(count: u32) -> Vec<Core> {
    let settings = || CoreSettings { spin: Duration::from_secs(3600), ..CoreSettings::default() };
    (0..count).map(|id| Core::start(CoreId(id), settings()).unwrap()).collect()
}

/// A device of that group whose requests stay in flight on that device.
fn waiting(core: &Core, share: Share, device: BlockDevice) -> (Running<Counter>, Arc<Line>) {
    let (running, lines) = Counter::run_on(device, share, 1, core);
    lines[0].in_flight.store(EACH, Ordering::SeqCst);
    lines[0].may_serve.store(0, Ordering::SeqCst);
    (running, lines[0].clone())
}

fn tell(core: &Core, group: GroupId, device: BlockDevice, in_flight: u64) {
    core.sender().send(CoreMessage::Device(DevicePart { group, device, in_flight })).unwrap();
}

/// Bytes that a line has in flight.
fn in_flight(line: &Line) -> u64 {
    EACH * (of(&line.taken) - of(&line.served))
}

/// Until the core has polled the line some times more.
fn polls(line: &Line) {
    let polls = of(&line.polls);
    eventually("is not polled", || of(&line.polls) > polls + 100);
}

fn end(all: Vec<(Running<Counter>, Arc<Line>)>) {
    for (running, line) in all {
        line.may_serve.store(u64::MAX, Ordering::SeqCst);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_bound_holds_on_a_core_that_a_group_has_to_itself_and_for_that_device_only() {
    let cores = polled(1);
    let share = group();
    let (here, elsewhere) = (waiting(&cores[0], share, HERE), waiting(&cores[0], share, ELSEWHERE));
    tell(&cores[0], share.group, HERE, MIB);
    for line in [&here.1, &elsewhere.1] {
        line.published.store(MANY, Ordering::SeqCst);
    }
    eventually("is bounded although nothing was said", || in_flight(&elsewhere.1) == MANY * EACH);
    eventually("has less than it may", || in_flight(&here.1) == MIB);
    polls(&here.1);
    assert_eq!(in_flight(&here.1), MIB);
    // The control plane sees what it has, and that it would have more.
    let meters = cores[0].meters();
    let meter = meters.iter().find(|meter| meter.block_device() == Some(HERE)).unwrap();
    let used = || (meter.in_flight(), meter.backing_use());
    eventually("does not say what it has in flight", || used().0 == MIB && used().1.peak == MIB);
    eventually("does not say that it lacks room", || used().1.lacks);
    // Less: what has ended is not replaced. Then more again.
    tell(&cores[0], share.group, HERE, MIB / 2);
    here.1.may_serve.store(MIB / EACH, Ordering::SeqCst);
    eventually("has less than it may", || of(&here.1.served) == MIB / EACH && in_flight(&here.1) == MIB / 2);
    polls(&here.1);
    assert_eq!(in_flight(&here.1), MIB / 2);
    tell(&cores[0], share.group, HERE, u64::MAX);
    eventually("is still bounded", || of(&here.1.taken) == MANY);
    eventually("lacks nothing", || !used().1.lacks);
    end(vec![here, elsewhere]);
}

#[test]
fn groups_that_compete_for_a_core_are_bounded_by_their_disks_where_those_are_known() {
    let cores = polled(1);
    let shares = [(); 3].map(|()| group());
    // The first has a disk to itself, the second shares one with somebody elsewhere, of the third nothing was said.
    let all: Vec<_> = [HERE, ELSEWHERE, ELSEWHERE]
        .into_iter()
        .zip(shares)
        .map(|(device, share)| waiting(&cores[0], share, device))
        .collect();
    tell(&cores[0], shares[0].group, HERE, u64::MAX);
    tell(&cores[0], shares[1].group, ELSEWHERE, 2 * MIB);
    all.iter().for_each(|(_, line)| line.published.store(MANY, Ordering::SeqCst));
    let part = IN_FLIGHT / 3 / EACH * EACH;
    for ((_, line), wanted) in all.iter().zip([MANY * EACH, 2 * MIB, part]) {
        eventually("has less than it may", || in_flight(line) == wanted);
        polls(line);
        assert_eq!(in_flight(line), wanted);
    }
    // It goes into a group of which nothing was said, and is bounded by the core.
    let mut all = all;
    let other = group();
    assert!(all[1].0.apply(&QueueSet::from([0]), &Change::Share(other)).wait(soon()));
    all[1].1.may_serve.store(2 * MIB / EACH, Ordering::SeqCst);
    eventually("has what its old group may have", || in_flight(&all[1].1) == part);
    polls(&all[1].1);
    assert_eq!(in_flight(&all[1].1), part);
    end(all);
}

#[test]
fn a_disk_that_answers_in_turn_divides_itself_by_what_cores_are_told() {
    let cores = polled(2);
    let all: Vec<_> = cores.iter().map(|core| waiting(core, group(), HERE)).collect();
    let bounds = [MIB, 3 * MIB];
    for ((core, (running, line)), bound) in cores.iter().zip(&all).zip(bounds) {
        tell(core, running.device().share().group, HERE, bound);
        line.published.store(1 << 20, Ordering::SeqCst);
    }
    let (mut queue, mut seen) = (VecDeque::new(), [0; 2]);
    // Four times all that is in flight.
    for _ in 0..4 * IN_FLIGHT / EACH {
        for (at, (_, line)) in all.iter().enumerate() {
            eventually("does not fill its part", || in_flight(line) == bounds[at]);
            let taken = of(&line.taken);
            queue.extend((seen[at]..taken).map(|_| at));
            seen[at] = taken;
        }
        let line = &all[queue.pop_front().unwrap()].1;
        let answered = line.may_serve.fetch_add(1, Ordering::SeqCst) + 1;
        eventually("does not see the answer", || of(&line.served) == answered);
    }
    let served = [0, 1].map(|at| of(&all[at].1.served));
    assert_eq!(served, bounds.map(|bound| 4 * bound / EACH));
    end(all);
}
