//! Groups that compete for one core: who gets how much of it. Counted in polls and in what they cost, while the core stands still.

mod counter;

use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use counter::{BYTES, Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreId, CoreMessage, Device, GroupPart, QueueSet, Running, Share};
use ioplane_scheduler::{IN_FLIGHT, LimitSet, LimitUnit, RateBucket, RateLimit, WHOLE, poll_cost};

const MS: Duration = Duration::from_millis(1);

fn of(count: &AtomicU64) -> u64 {
    count.load(Ordering::SeqCst)
}

fn weight(weight: u32) -> NonZeroU32 {
    NonZeroU32::new(weight).unwrap()
}

/// A core on which nobody rests.
fn polled() -> Core {
    let settings = CoreSettings { spin: Duration::from_secs(3600), ..CoreSettings::default() };
    Core::start(CoreId(0), settings).unwrap()
}

/// A device in a group of its own, every queue of which has work in every poll.
fn busy(core: &Core, queues: u16, of_weight: u32) -> (Running<Counter>, Vec<Arc<Line>>) {
    let (running, lines) = Counter::run_in(Share::new_group(weight(of_weight)), queues, core);
    lines.iter().for_each(|line| line.busy.store(true, Ordering::Relaxed));
    (running, lines)
}

/// What `look` sees while the core stands still in a poll of `line`.
fn still<R>(line: &Line, look: impl FnOnce() -> R) -> R {
    line.stalled.store(false, Ordering::SeqCst);
    line.stalls.store(true, Ordering::SeqCst);
    eventually("is not polled", || line.stalled.load(Ordering::SeqCst));
    let seen = look();
    line.stalls.store(false, Ordering::SeqCst);
    seen
}

/// How often each line is polled while the first is polled so many times.
fn polls(lines: &[&Line], of_the_first: u64) -> Vec<u64> {
    let all = || still(lines[0], || lines.iter().map(|line| of(&line.polls)).collect::<Vec<_>>());
    let before = all();
    eventually("is not polled", || of(&lines[0].polls) > before[0] + of_the_first);
    all().iter().zip(before).map(|(after, before)| after - before).collect()
}

/// Bytes that a line has in flight.
fn in_flight(line: &Line) -> u64 {
    of(&line.in_flight) * (of(&line.taken) - of(&line.served))
}

#[test]
fn what_groups_that_compete_have_in_flight_is_bounded_by_their_weights() {
    const BYTES_EACH: u64 = 64 << 10;
    let core = polled();
    let join = |of_weight: u32| {
        let (running, lines) = Counter::run_in(Share::new_group(weight(of_weight)), 2, &core);
        for line in &lines {
            line.in_flight.store(BYTES_EACH, Ordering::SeqCst);
            line.hold();
            line.published.store(1000, Ordering::SeqCst);
        }
        (running, lines)
    };
    let whole = |lines: &[Arc<Line>]| lines.iter().map(|line| in_flight(line)).sum::<u64>();
    let alone = join(1);
    eventually("is bounded although nobody competes", || whole(&alone.1) == 2000 * BYTES_EACH);
    // It has more than its part now, and gets no more until that has ended.
    let greedy = join(3);
    eventually("has less than its part", || whole(&greedy.1) == IN_FLIGHT * 3 / 4);
    alone.1.iter().for_each(|line| line.published.store(2000, Ordering::SeqCst));
    still(&greedy.1[0], || assert_eq!(whole(&greedy.1), IN_FLIGHT * 3 / 4));
    assert_eq!(whole(&alone.1), 2000 * BYTES_EACH);
    // What has ended makes room.
    alone.1.iter().for_each(|line| line.complete());
    eventually("does not end", || of(&alone.1[0].served) + of(&alone.1[1].served) >= 2000);
    let all = vec![alone, greedy];
    for (_, lines) in &all {
        lines.iter().for_each(|line| line.complete());
        for line in lines {
            line.wait();
        }
    }
    end(all);
}

fn end(all: Vec<(Running<Counter>, Vec<Arc<Line>>)>) {
    for (running, lines) in all {
        lines.iter().for_each(|line| line.busy.store(false, Ordering::Relaxed));
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn groups_that_always_have_work_are_polled_in_proportion_to_their_weights() {
    let core = polled();
    let mut all: Vec<_> = [1, 2, 5].into_iter().map(|weight| busy(&core, 1, weight)).collect();
    let check = |all: &[(Running<Counter>, Vec<Arc<Line>>)], weights: [u64; 3]| {
        let lines: Vec<&Line> = all.iter().map(|(_, lines)| &*lines[0]).collect();
        let got = polls(&lines, 20_000);
        let (sum, weight): (u64, u64) = (got.iter().sum(), weights.iter().sum());
        for (got, of_weight) in got.iter().zip(weights) {
            let error = (*got as f64 / sum as f64) / (of_weight as f64 / weight as f64);
            assert!(
                (0.98..1.02).contains(&error),
                "weights {weights:?}: {error:.3} of what {of_weight} is worth"
            );
        }
    };
    check(&all, [1, 2, 5]);
    // While they run.
    let share = Share { weight: weight(4), ..all[0].0.device().share() };
    assert!(all[0].0.apply(&QueueSet::from([0]), &Change::Share(share)).wait(soon()));
    check(&all, [4, 2, 5]);
    // Two of them become one group: each has half of what that is worth.
    let share = all[1].0.device().share();
    assert!(all[0].0.apply(&QueueSet::from([0]), &Change::Share(share)).wait(soon()));
    check(&all, [2, 2, 10]);
    end(all);
}

#[test]
fn of_a_group_on_two_cores_as_much_stands_on_each_as_that_core_is_told() {
    let cores = [0, 1].map(|id| {
        let settings = CoreSettings { spin: Duration::from_secs(3600), ..CoreSettings::default() };
        Core::start(CoreId(id), settings).unwrap()
    });
    let both = Share::new_group(weight(2));
    let mut all: Vec<_> = cores
        .iter()
        .flat_map(|core| {
            let (running, lines) = Counter::run_in(both, 1, core);
            lines[0].busy.store(true, Ordering::Relaxed);
            [(running, lines), busy(core, 1, 2)]
        })
        .collect();
    let tell = |core: usize, part: u32| {
        let part = GroupPart { group: both.group, part, in_flight: 1 << 20 };
        cores[core].sender().send(CoreMessage::Group(part)).unwrap();
    };
    // How often the group is polled there for each poll of the other group.
    let lines: Vec<_> = all.iter().map(|(_, lines)| lines[0].clone()).collect();
    let check = |core: usize, wanted: f64| {
        let (ours, others) = (&lines[2 * core], &lines[2 * core + 1]);
        let got = polls(&[others, ours], 20_000);
        let ratio = got[1] as f64 / got[0] as f64;
        assert!((wanted * 0.95..wanted * 1.05).contains(&ratio), "core {core}: {ratio:.3}, not {wanted}");
    };
    check(0, 1.0);
    tell(0, WHOLE / 4);
    tell(1, WHOLE * 3 / 4);
    check(0, 0.25);
    check(1, 0.75);
    // The weight of the whole group changes, and the parts stay what they are.
    let share = Share { weight: weight(4), ..both };
    for (running, _) in all.iter_mut().step_by(2) {
        assert!(running.apply(&QueueSet::from([0]), &Change::Share(share)).wait(soon()));
    }
    check(0, 0.5);
    check(1, 1.5);
    // Nobody of that group is here.
    let stranger = GroupPart { group: Share::new_group(weight(1)).group, part: 1, in_flight: 0 };
    cores[0].sender().send(CoreMessage::Group(stranger)).unwrap();
    check(0, 0.5);
    // What the control plane goes by.
    let wants = || cores.iter().flat_map(Core::meters).all(|meter| meter.wants_more());
    eventually("does not say that it would use more", wants);
    let shares: Vec<Share> = cores[0].meters().iter().map(|meter| meter.share()).collect();
    assert_eq!(shares, [share, all[1].0.device().share()]);
    end(all);
}

#[test]
fn a_group_whose_polls_cost_much_is_polled_seldom_and_does_not_starve() {
    const MUCH: u64 = 1 << 20;
    let core = polled();
    let all = vec![busy(&core, 1, 1), busy(&core, 1, 1)];
    all[0].1[0].costs.store(MUCH, Ordering::Relaxed);
    let got = polls(&[&all[0].1[0], &all[1].1[0]], 100);
    let (much, little) = (got[0] * poll_cost(1, MUCH as u32), got[1] * poll_cost(1, BYTES as u32));
    let ratio = much as f64 / little as f64;
    assert!((0.95..1.05).contains(&ratio), "{got:?} polls: {ratio:.3}");
    end(all);
}

#[test]
fn a_group_that_owes_does_not_wait_for_those_that_have_nothing_to_do() {
    let core = polled();
    let all = vec![busy(&core, 1, 1), busy(&core, 1, 1)];
    let (greedy, idle) = (&all[0].1[0], &all[1].1[0]);
    // 32 turns' worth.
    greedy.costs.store(4 << 20, Ordering::Relaxed);
    idle.busy.store(false, Ordering::Relaxed);
    let got = polls(&[greedy, idle], 10_000);
    assert!(got[1] <= 3 * got[0], "{got:?}: waits for turns in which nobody has work");
    assert!(got[1] > 0, "the idle one is not looked at");
    end(all);
}

#[test]
fn the_queues_of_a_group_have_its_part_together() {
    let core = polled();
    let all = vec![busy(&core, 3, 1), busy(&core, 1, 1)];
    let lines: Vec<&Line> = all.iter().flat_map(|(_, lines)| lines).map(|line| &**line).collect();
    let got = polls(&lines, 20_000);
    for queue in 0..3 {
        let part = 3.0 * got[queue] as f64 / got[3] as f64;
        assert!((0.97..1.03).contains(&part), "{got:?}");
    }
    end(all);
}

#[test]
fn devices_in_no_group_take_turns_whatever_they_cost_and_are_one_group_against_others() {
    let core = polled();
    let none = || {
        let (running, lines) = Counter::run_in(Share::default(), 1, &core);
        lines[0].busy.store(true, Ordering::Relaxed);
        (running, lines)
    };
    let mut all = vec![none(), none()];
    all[0].1[0].costs.store(1 << 20, Ordering::Relaxed);
    let got = polls(&[&all[0].1[0], &all[1].1[0]], 1000);
    assert!(got[0].abs_diff(got[1]) <= 1, "{got:?}: not in turn");
    all[0].1[0].costs.store(BYTES, Ordering::Relaxed);
    all.push(busy(&core, 1, 1));
    let got = polls(&[&all[0].1[0], &all[1].1[0], &all[2].1[0]], 10_000);
    for queue in 0..2 {
        let part = 2.0 * got[queue] as f64 / got[2] as f64;
        assert!((0.97..1.03).contains(&part), "{got:?}");
    }
    end(all);
}

#[test]
fn slots_that_rest_are_held_or_park_leave_the_turns_and_come_back() {
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        let clock = Arc::new(ManualClock::default());
        let settings = CoreSettings { notify, spin: MS * 5, ..CoreSettings::default() };
        let core = Core::start_with(CoreId(0), settings, clock.clone()).unwrap();
        let mut all: Vec<_> = (1..=4).map(|weight| busy(&core, 1, weight)).collect();
        let lines: Vec<_> = all.iter().map(|(_, lines)| lines[0].clone()).collect();
        let [busy, leaves, idle, held] = lines.try_into().unwrap();
        let turns = |count| {
            let polls = of(&busy.polls);
            eventually("does not turn", || of(&busy.polls) > polls + count);
        };
        turns(1000);
        idle.busy.store(false, Ordering::Relaxed);
        let bucket = RateBucket::new(RateLimit { per_second: NonZeroU64::new(1000).unwrap(), burst: 1 });
        let mut limits = LimitSet::default();
        assert!(limits.add(LimitUnit::Requests, Arc::new(bucket)));
        assert!(all[3].0.apply(&QueueSet::from([0]), &Change::Limits(limits)).wait(soon()));
        held.busy.store(false, Ordering::Relaxed);
        (0..20).for_each(|_| held.publish());
        eventually("is not held back", || of(&held.limited) > 0);
        turns(2000);
        clock.advance(MS * 5);
        eventually("does not rest", || idle.wants_kick());
        turns(2000);
        // Neither is polled while the others are.
        let before = [&idle, &held].map(|line| of(&line.polls));
        turns(5000);
        assert_eq!([&idle, &held].map(|line| of(&line.polls)), before, "{notify:?}: polled in vain");
        // Each comes back.
        let passed = of(&held.served);
        clock.advance(MS);
        eventually("is held back for too long", || of(&held.served) > passed);
        idle.publish();
        clock.advance(MS);
        idle.wait();
        // One leaves while it has work, and its place is taken by another group's.
        let (running, _) = all.remove(1);
        leaves.busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
        let polls = of(&leaves.polls);
        let (next, new) = Counter::run_in(Share::new_group(weight(2)), 1, &core);
        new[0].publish();
        new[0].wait();
        turns(1000);
        assert_eq!(of(&leaves.polls), polls, "{notify:?}: polled after it has parked");
        all.push((next, new));
        // A stop does not wait for the limit, nor for anybody's turn.
        end(all);
    }
}
