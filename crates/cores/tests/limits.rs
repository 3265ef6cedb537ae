//! Slots whose requests a limit holds back: who steps them, and who does not.

mod counter;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreSettings, Notify, RingChoice};
use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreId, QueueSet, Running};
use ioplane_scheduler::{LimitSet, LimitUnit, RateBucket, RateLimit};

const MS: Duration = Duration::from_millis(1);

/// So many requests per second, one at a time.
fn bucket(per_second: u64) -> Arc<RateBucket> {
    Arc::new(RateBucket::new(RateLimit { per_second: NonZeroU64::new(per_second).unwrap(), burst: 1 }))
}

fn set(buckets: &[&Arc<RateBucket>]) -> LimitSet {
    let mut set = LimitSet::default();
    assert!(buckets.iter().all(|bucket| set.add(LimitUnit::Requests, (*bucket).clone())));
    set
}

fn limit(running: &mut Running<Counter>, queue: u16, set: LimitSet) {
    assert!(running.apply(&QueueSet::from([queue]), &Change::Limits(set)).wait(soon()));
}

fn settings(notify: Notify, ring: RingChoice) -> CoreSettings {
    CoreSettings { notify, ring, spin: Duration::from_millis(5), ..CoreSettings::default() }
}

const RINGS: [RingChoice; 3] = [RingChoice::Best, RingChoice::Plain, RingChoice::Without];

fn of(count: &std::sync::atomic::AtomicU64) -> u64 {
    count.load(Ordering::SeqCst)
}

/// Until a busy line has been polled so often: the core has made as many turns.
fn turns(busy: &Line, count: u64) {
    let polls = of(&busy.polls);
    eventually("does not turn", || of(&busy.polls) > polls + count);
}

#[test]
fn a_core_sleeps_until_the_next_request_may_pass() {
    const REQUESTS: u64 = 100;
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        for ring in RINGS {
            let core = Core::start(CoreId(0), settings(notify, ring)).unwrap();
            let (mut running, lines) = Counter::run(1, &core);
            limit(&mut running, 0, set(&[&bucket(1000)]));
            let (began, polls) = (Instant::now(), of(&lines[0].polls));
            (0..REQUESTS).for_each(|_| lines[0].publish());
            lines[0].wait();
            let (took, polls) = (began.elapsed(), of(&lines[0].polls) - polls);
            // The first two pass at once: the one that is allowed, and the one that may go over.
            assert!(took >= MS * (REQUESTS as u32 - 3), "{notify:?}, {ring:?}: {took:?}");
            // Each is two polls: one that takes it, and one that says until when to wait. What is more are the last 5 ms, which a polled
            // core spins.
            let held = of(&lines[0].limited);
            assert!(held <= REQUESTS + 4, "{notify:?}, {ring:?}: held back {held} times of {polls} polls");
            assert!(core.read().sleeps >= REQUESTS / 2, "{notify:?}, {ring:?}: does not sleep");
            running.quiesce(soon()).unwrap();
        }
    }
}

#[test]
fn nothing_passes_before_its_time_beside_a_busy_one() {
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        let clock = Arc::new(ManualClock::default());
        let core = Core::start_with(CoreId(0), settings(notify, RingChoice::Best), clock.clone()).unwrap();
        let (mut running, lines) = Counter::run(2, &core);
        limit(&mut running, 0, set(&[&bucket(1000)]));
        lines[1].busy.store(true, Ordering::Relaxed);
        lines[1].publish();
        turns(&lines[1], 200);
        (0..12).for_each(|_| lines[0].publish());
        turns(&lines[1], 2000);
        let first = of(&lines[0].served);
        assert!((1..=2).contains(&first), "{notify:?}: {first} passed at once");
        // Its timer is all that steps it: kicks do not, and are lowered.
        let (polls, kicks) = (of(&lines[0].polls), of(&lines[0].kicks));
        lines[0].kick();
        turns(&lines[1], 5000);
        clock.advance(MS / 10);
        turns(&lines[1], 2000);
        assert_eq!(of(&lines[0].polls), polls, "{notify:?}: stepped although it is held back");
        eventually("the kick stays", || of(&lines[0].kicks) > kicks);
        for passed in first + 1..=12 {
            clock.advance(MS);
            eventually("held back for too long", || of(&lines[0].served) >= passed);
            turns(&lines[1], 2000);
            assert_eq!(of(&lines[0].served), passed, "{notify:?}: more than one in a millisecond");
        }
        // With nothing left it rests as others do, and is heard.
        clock.advance(MS * 20);
        eventually("does not rest", || lines[0].wants_kick());
        clock.advance(MS * 20);
        lines[0].publish();
        turns(&lines[1], 200);
        clock.advance(MS);
        lines[0].wait();
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn what_is_in_flight_ends_although_the_rest_is_held_back() {
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        for ring in RINGS {
            let clock = Arc::new(ManualClock::default());
            let core = Core::start_with(CoreId(0), settings(notify, ring), clock.clone()).unwrap();
            let (mut running, lines) = Counter::run_telling(1, &core);
            let line = &lines[0];
            limit(&mut running, 0, set(&[&bucket(1)]));
            line.hold();
            (0..5).for_each(|_| line.publish());
            eventually("is not held back", || of(&line.taken) > 0 && of(&line.limited) > 0);
            let taken = of(&line.taken);
            assert!(taken < 5 && of(&line.served) == 0);
            // The clock stands still: only the completion can wake it.
            line.complete();
            eventually("a completion is lost", || of(&line.served) == taken);
            // Nor does a stop wait for the limit.
            running.quiesce(soon()).unwrap();
            assert_eq!(of(&line.served), taken, "{notify:?}, {ring:?}");
        }
    }
}

#[test]
fn limits_change_while_requests_are_held_back() {
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        let clock = Arc::new(ManualClock::default());
        let core = Core::start_with(CoreId(0), settings(notify, RingChoice::Best), clock.clone()).unwrap();
        let (mut running, lines) = Counter::run(1, &core);
        limit(&mut running, 0, set(&[&bucket(1)]));
        (0..100).for_each(|_| lines[0].publish());
        eventually("is not held back", || of(&lines[0].limited) > 0);
        assert!(of(&lines[0].served) < 3);
        // What it did is published although it rests.
        let tidied = of(&lines[0].tidied);
        clock.advance(MS * 20);
        eventually("is not tidied", || of(&lines[0].tidied) > tidied || of(&lines[0].limited) > 1);
        limit(&mut running, 0, LimitSet::default());
        lines[0].wait();
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_limit_of_a_group_holds_over_cores() {
    let clock = Arc::new(ManualClock::default());
    let start = |id| Core::start_with(CoreId(id), settings(Notify::Polled, RingChoice::Best), clock.clone());
    let cores = [start(0).unwrap(), start(1).unwrap()];
    let group = bucket(1000);
    let mut all: Vec<_> = cores.iter().map(|core| Counter::run(2, core)).collect();
    for (running, lines) in &mut all {
        limit(running, 0, set(&[&bucket(1_000_000), &group]));
        lines[1].busy.store(true, Ordering::Relaxed);
        lines[1].publish();
        (0..500).for_each(|_| lines[0].publish());
    }
    let served = || all.iter().map(|(_, lines)| of(&lines[0].served)).sum::<u64>();
    let look = || all.iter().for_each(|(_, lines)| turns(&lines[1], 500));
    look();
    let first = served();
    assert!(first <= 2, "{first} at once");
    for ms in 1..=40 {
        clock.advance(MS);
        let most = first + ms;
        eventually("held back for too long", || served() >= most);
        look();
        assert_eq!(served(), most, "more than one in a millisecond");
    }
    for (running, lines) in all {
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}
