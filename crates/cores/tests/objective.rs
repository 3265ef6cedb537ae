//! What a user asks of an adaptive core: a p99, a ceiling. By a clock of the test's own.

mod counter;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, Line, eventually, looked, requests, soon};
use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::CoreId;
use ioplane_device::clock::ManualClock;
use ioplane_scheduler::{CoreObjective, ObjectiveReport};

const SHORT: Duration = Duration::from_micros(3);
const LONG: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn core(objective: CoreObjective) -> (Arc<ManualClock>, Core) {
    let clock = Arc::new(ManualClock::default());
    let settings = CoreSettings { notify: Notify::Adaptive, objective, ..CoreSettings::default() };
    let core = Core::start_with(CoreId(0), settings, clock.clone()).unwrap();
    (clock, core)
}

fn p99(us: u64) -> CoreObjective {
    CoreObjective { p99_ns: Some(us * 1000), cpu_permille: None }
}

fn ceiling(permille: u32) -> CoreObjective {
    CoreObjective { p99_ns: None, cpu_permille: Some(permille) }
}

/// What the core says of its objective once a second has gone by.
fn report(line: &Line, clock: &ManualClock, core: &Core, is: impl Fn(ObjectiveReport) -> bool) {
    eventually("does not say what came of it", || {
        clock.advance(SECOND);
        line.publish();
        line.wait();
        is(core.read().objective)
    });
}

#[test]
fn an_objective_shorter_than_a_wake_up_is_kept_by_polling() {
    let (clock, core) = core(p99(5));
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 64, LONG);
    assert_eq!(requests(&lines[0], &clock, 64, LONG), 0, "is kicked, which takes longer than was asked for");
    // None of the second's requests is late: the core has looked after each step of the clock.
    eventually("does not say what came of it", || {
        requests(&lines[0], &clock, 1000, LONG);
        core.read().objective == ObjectiveReport::Kept
    });
    // As long as a polled core would, and no longer: nobody waits for this one.
    looked(&lines[0]);
    clock.advance(CoreSettings::default().spin);
    eventually("is polled for ever", || lines[0].rests());
    // Taken back, its requests come slowly enough to be kicked.
    core.objective(&CoreObjective::default());
    let kicked = requests(&lines[0], &clock, 64, LONG);
    assert!(kicked > 60, "{kicked} of 64 kicked");
    running.quiesce(soon()).unwrap();
}

#[test]
fn requests_that_came_late_are_told() {
    let (clock, core) = core(p99(5));
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 98, SHORT);
    for _ in 0..2 {
        // The core gets no processor time while a request comes.
        lines[0].stalled.store(false, Ordering::SeqCst);
        lines[0].stalls.store(true, Ordering::SeqCst);
        eventually("is not polled", || lines[0].stalled.load(Ordering::SeqCst));
        lines[0].publish();
        clock.advance(10 * SHORT);
        lines[0].stalls.store(false, Ordering::SeqCst);
        lines[0].wait();
    }
    let late =
        |report| matches!(report, ObjectiveReport::LateByLoad(permille) if (15..=25).contains(&permille));
    looked(&lines[0]);
    clock.advance(SECOND);
    eventually("does not say what came of it", || late(core.read().objective));
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_ceiling_forbids_polling_and_not_work() {
    let (clock, core) = core(ceiling(100));
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 200, SHORT);
    // Asleep for long enough to be allowed to poll again.
    looked(&lines[0]);
    clock.advance(LONG);
    eventually("does not rest", || lines[0].rests());
    clock.advance(50 * LONG);
    let kicked = requests(&lines[0], &clock, 100, SHORT);
    assert!(kicked <= 2, "{kicked} of 100 kicked although nothing forbids to poll");
    // 20 ms at a tenth of a processor are 2 ms of polling.
    requests(&lines[0], &clock, 700, SHORT);
    let kicked = requests(&lines[0], &clock, 100, SHORT);
    assert_eq!(kicked, 100, "polled above the ceiling");
    running.quiesce(soon()).unwrap();
}

#[test]
fn the_ceiling_wins_and_is_told() {
    let (clock, core) = core(CoreObjective { cpu_permille: Some(1), ..p99(5) });
    let (running, lines) = Counter::run(1, &core);
    let kicked = requests(&lines[0], &clock, 200, SHORT);
    assert!(kicked > 190, "{kicked} of 200 kicked");
    looked(&lines[0]);
    report(&lines[0], &clock, &core, |report| {
        report != ObjectiveReport::Kept && report != ObjectiveReport::Unknown
    });
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_core_that_is_not_adaptive_pays_no_heed() {
    let (clock, core) = core(ceiling(1));
    core.notify(Notify::Polled);
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 10, SHORT);
    assert_eq!(requests(&lines[0], &clock, 500, SHORT), 0);
    core.notify(Notify::Adaptive);
    requests(&lines[0], &clock, 500, SHORT);
    assert!(requests(&lines[0], &clock, 100, SHORT) > 90, "the ceiling does not hold");
    running.quiesce(soon()).unwrap();
}
