//! An adaptive core looks at a queue for as long as that is worth more than a kick: each by itself, by the gaps between its requests.

mod counter;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, eventually, gap, looked, requests, soon};
use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::CoreId;
use ioplane_device::clock::ManualClock;

const SHORT: Duration = Duration::from_micros(3);
const LONG: Duration = Duration::from_millis(1);

fn adaptive() -> CoreSettings {
    CoreSettings { notify: Notify::Adaptive, ..CoreSettings::default() }
}

/// An adaptive core whose time is the test's.
fn adaptive_by_a_clock() -> (Arc<ManualClock>, Core) {
    let clock = Arc::new(ManualClock::default());
    let core = Core::start_with(CoreId(0), adaptive(), clock.clone()).unwrap();
    (clock, core)
}

#[test]
fn a_queue_whose_requests_come_slowly_asks_for_kicks_at_once() {
    let (clock, core) = adaptive_by_a_clock();
    let (running, lines) = Counter::run(1, &core);
    eventually("is not polled", || !lines[0].wants_kick());
    requests(&lines[0], &clock, 64, LONG);
    // No time passes from here on, and it asks all the same.
    eventually("is looked at in vain", || lines[0].rests());
    for _ in 0..10 {
        let kicks = lines[0].kicks.load(Ordering::Relaxed);
        lines[0].publish();
        lines[0].wait();
        eventually("is looked at in vain", || lines[0].rests());
        assert_eq!(lines[0].kicks.load(Ordering::Relaxed), kicks + 1);
    }
    // It was not tidied before it rested.
    let tidied = lines[0].tidied.load(Ordering::Relaxed);
    clock.advance(Duration::from_millis(10));
    eventually("its counts are not shown", || lines[0].tidied.load(Ordering::Relaxed) > tidied);
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_queue_whose_requests_come_fast_is_looked_at_and_armed_when_they_end() {
    let (clock, core) = adaptive_by_a_clock();
    let (running, lines) = Counter::run(1, &core);
    eventually("is not polled", || !lines[0].wants_kick());
    lines[0].publish();
    lines[0].wait();
    let kicks = lines[0].kicks.load(Ordering::Relaxed);
    requests(&lines[0], &clock, 200, SHORT);
    assert_eq!(lines[0].kicks.load(Ordering::Relaxed), kicks, "is kicked although it is polled");
    assert!(!lines[0].wants_kick());
    gap(&lines[0], &clock, LONG);
    eventually("is looked at for too long", || lines[0].rests());
    eventually("does not sleep", || core.read().sleeps > 0);
    running.quiesce(soon()).unwrap();
}

#[test]
fn each_queue_has_its_own_choice() {
    let (clock, core) = adaptive_by_a_clock();
    let (running, lines) = Counter::run(2, &core);
    let (slow, fast) = (&lines[0], &lines[1]);
    eventually("is not polled", || lines.iter().all(|line| !line.wants_kick()));
    for _ in 0..64 {
        requests(fast, &clock, 20, SHORT);
        // What goes by before the core has seen that it is done counts as work.
        looked(fast);
        gap(slow, &clock, LONG - 20 * SHORT);
        slow.publish();
        slow.wait();
    }
    eventually("the slow one is looked at in vain", || slow.rests());
    running.quiesce(soon()).unwrap();
}

/// A queue that waits for a disk is not armed before the disk takes long, so its driver need not kick; unless its requests come slowly.
#[test]
fn a_queue_that_waits_for_a_disk_is_looked_at() {
    let (clock, core) = adaptive_by_a_clock();
    let (running, lines) = Counter::run_telling(1, &core);
    let held = || lines[0].taken.load(Ordering::Relaxed) > lines[0].served.load(Ordering::Relaxed);
    lines[0].hold();
    lines[0].publish();
    eventually("is not taken", held);
    let polls = lines[0].polls.load(Ordering::Relaxed);
    clock.advance(Duration::from_micros(100));
    eventually("is not looked at", || lines[0].polls.load(Ordering::Relaxed) > polls + 10);
    assert!(!lines[0].wants_kick());
    lines[0].complete();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn what_a_core_knows_of_a_queue_goes_along_with_it() {
    let (clock, core) = adaptive_by_a_clock();
    let other = Core::start_with(CoreId(1), adaptive(), clock.clone()).unwrap();
    let (mut running, lines) = Counter::run(1, &core);
    eventually("is not polled", || !lines[0].wants_kick());
    requests(&lines[0], &clock, 64, LONG);
    eventually("is looked at in vain", || lines[0].rests());
    running.move_queue(0, &other, soon()).unwrap();
    // No time passes from here on: a queue of which nothing is known would be polled.
    eventually("is unknown to the other core", || lines[0].rests());
    let kicks = lines[0].kicks.load(Ordering::Relaxed);
    lines[0].publish();
    lines[0].wait();
    eventually("is looked at in vain", || lines[0].rests());
    assert_eq!(lines[0].kicks.load(Ordering::Relaxed), kicks + 1);
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_core_changes_between_all_modes_while_requests_come() {
    let core = Core::start(CoreId(0), adaptive()).unwrap();
    let (running, lines) = Counter::run(2, &core);
    let modes = [Notify::Polled, Notify::Notified, Notify::Adaptive];
    for round in 0..300 {
        core.notify(modes[round % 3]);
        for line in &lines {
            line.publish();
        }
        for line in &lines {
            line.wait();
        }
    }
    running.quiesce(soon()).unwrap();
}
