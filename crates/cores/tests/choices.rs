//! What a core notes of each queue: whether it is polled, armed or held back, why, how often and for how long. By a clock of the test's own.

mod counter;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, eventually, looked, requests, soon};
use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreId, QueueSet};
use ioplane_scheduler::{
    ArmReason, CoreObjective, LimitSet, LimitUnit, ModeCount, QueueChoices, QueueMode, RateBucket, RateLimit,
    SpinReason,
};

const SHORT: Duration = Duration::from_micros(3);
const LONG: Duration = Duration::from_millis(1);
const GAPS: QueueMode = QueueMode::Armed(ArmReason::LongGaps);
const SPUN: QueueMode = QueueMode::Armed(ArmReason::SpunInVain);

fn core(notify: Notify, objective: CoreObjective) -> (Arc<ManualClock>, Core) {
    let clock = Arc::new(ManualClock::default());
    let settings = CoreSettings { notify, objective, ..CoreSettings::default() };
    let core = Core::start_with(CoreId(0), settings, clock.clone()).unwrap();
    (clock, core)
}

/// What the core has noted of its only queue.
fn noted(core: &Core) -> QueueChoices {
    let meters = core.meters();
    assert_eq!(meters.len(), 1);
    std::iter::repeat_with(|| meters[0].choices().read()).flatten().next().unwrap()
}

/// Up to its last change.
fn of(core: &Core, mode: QueueMode) -> ModeCount {
    let noted = noted(core);
    noted.of(mode, noted.since_ns)
}

#[test]
fn a_slow_queue_is_noted_as_armed_for_its_gaps() {
    let (clock, core) = core(Notify::Adaptive, CoreObjective::default());
    let (running, lines) = Counter::run(1, &core);
    eventually("is not polled", || !lines[0].wants_kick());
    assert_eq!((noted(&core).mode, noted(&core).spin_reason), (QueueMode::Polled, SpinReason::FewGaps));
    requests(&lines[0], &clock, 64, LONG);
    eventually("does not rest", || lines[0].rests());
    let before = of(&core, GAPS);
    requests(&lines[0], &clock, 10, LONG);
    eventually("does not rest", || lines[0].rests() && noted(&core).mode == GAPS);
    let after = of(&core, GAPS);
    assert_eq!(after.times - before.times, 10, "once for each request");
    assert_eq!(after.ns - before.ns, 10 * LONG.as_nanos() as u64, "for the whole of each gap");
    assert_eq!((noted(&core).spin_ns, noted(&core).spin_reason), (0, SpinReason::Cheapest));
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_fast_queue_is_noted_as_polled_until_nothing_comes() {
    let (clock, core) = core(Notify::Adaptive, CoreObjective::default());
    let (running, lines) = Counter::run(1, &core);
    eventually("is not polled", || !lines[0].wants_kick());
    requests(&lines[0], &clock, 200, SHORT);
    assert_eq!(noted(&core).mode, QueueMode::Polled);
    let times = of(&core, QueueMode::Polled).times;
    assert!(noted(&core).spin_ns > SHORT.as_nanos() as u64);
    looked(&lines[0]);
    clock.advance(LONG);
    eventually("is looked at for too long", || noted(&core).mode == SPUN);
    assert_eq!(of(&core, QueueMode::Polled).times, times, "not once for each request");
    assert!(of(&core, QueueMode::Polled).ns >= 200 * SHORT.as_nanos() as u64);
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_ceiling_is_the_reason_where_it_forbids_polling() {
    let ceiling = CoreObjective { p99_ns: None, cpu_permille: Some(1) };
    let (clock, core) = core(Notify::Adaptive, ceiling);
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 100, SHORT);
    eventually("does not rest", || lines[0].rests());
    let armed = of(&core, QueueMode::Armed(ArmReason::Ceiling));
    assert!(armed.times > 90, "{armed:?}");
    running.quiesce(soon()).unwrap();
}

#[test]
fn an_objective_has_a_queue_polled_for_no_longer_than_a_polled_core_would() {
    let p99 = CoreObjective { p99_ns: Some(5_000), cpu_permille: None };
    let (clock, core) = core(Notify::Adaptive, p99);
    let (running, lines) = Counter::run(1, &core);
    // Too few to say how rarely a request may come after the spin.
    requests(&lines[0], &clock, 4, LONG);
    assert_eq!((noted(&core).spin_ns, noted(&core).spin_reason), (u64::MAX, SpinReason::Objective));
    looked(&lines[0]);
    clock.advance(CoreSettings::default().spin);
    eventually("is polled for ever", || noted(&core).mode == QueueMode::Armed(ArmReason::Objective));
    running.quiesce(soon()).unwrap();
}

#[test]
fn what_waits_for_a_slow_disk_is_armed_for_that() {
    let (clock, core) = core(Notify::Adaptive, CoreObjective::default());
    let (running, lines) = Counter::run_telling(1, &core);
    lines[0].hold();
    lines[0].publish();
    eventually("is not taken", || {
        lines[0].taken.load(Ordering::Relaxed) > lines[0].served.load(Ordering::Relaxed)
    });
    eventually("is polled for ever", || {
        clock.advance(CoreSettings::default().spin);
        noted(&core).mode == QueueMode::Armed(ArmReason::SlowDisk)
    });
    lines[0].complete();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

/// In every mode of the core, since limits hold in each.
#[test]
fn a_limit_is_noted_with_what_it_counts() {
    for (notify, free) in [(Notify::Adaptive, QueueMode::Polled), (Notify::Polled, QueueMode::Fixed)] {
        let (clock, core) = core(notify, CoreObjective::default());
        let (mut running, lines) = Counter::run(1, &core);
        let mut limits = LimitSet::default();
        let limit = RateLimit { per_second: NonZeroU64::new(512_000).unwrap(), burst: 512 };
        assert!(limits.add(LimitUnit::Bytes, Arc::new(RateBucket::new(limit))));
        assert!(running.apply(&QueueSet::from([0]), &Change::Limits(limits)).wait(soon()));
        let held = QueueMode::Held(LimitUnit::Bytes);
        (0..8).for_each(|_| lines[0].publish());
        eventually("is not held back", || noted(&core).mode == held);
        eventually("is held back for ever", || {
            clock.advance(LONG);
            lines[0].served.load(Ordering::Relaxed) == lines[0].published.load(Ordering::Relaxed)
        });
        eventually("is still noted", || noted(&core).mode == free || noted(&core).mode.is_armed());
        assert!(of(&core, held).ns >= LONG.as_nanos() as u64, "{:?}", noted(&core));
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_core_that_is_not_adaptive_notes_no_choice() {
    let (clock, core) = core(Notify::Notified, CoreObjective::default());
    let (running, lines) = Counter::run(1, &core);
    requests(&lines[0], &clock, 20, LONG);
    assert_eq!(noted(&core).mode, QueueMode::Fixed);
    assert_eq!(of(&core, QueueMode::Fixed).times, 1, "nothing is written on the way of a request");
    // It begins to choose, and what was chosen stays known.
    core.notify(Notify::Adaptive);
    requests(&lines[0], &clock, 64, LONG);
    eventually("does not rest", || lines[0].rests() && noted(&core).mode == GAPS);
    core.notify(Notify::Polled);
    eventually("goes on choosing", || noted(&core).mode == QueueMode::Fixed);
    assert!(of(&core, GAPS).times > 0);
    running.quiesce(soon()).unwrap();
}
