//! A polled core, and an adaptive one, that has nothing to do but to wait for completions: it sleeps, asks for kicks where it sleeps for long, and finds everything.

mod counter;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreReading, CoreSettings, Notify, RingChoice, YieldPolicy};
use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreId, QueueSet};

const RINGS: [RingChoice; 3] = [RingChoice::Best, RingChoice::Plain, RingChoice::Without];

/// Nobody rests within any test, unless its clock is moved.
const SPIN: Duration = Duration::from_secs(3600);

/// So long that nothing but a descriptor or a timer (of 10 ms, for tidying) ends a sleep.
const LONG: Duration = Duration::from_secs(3600);

fn settings() -> CoreSettings {
    CoreSettings { notify: Notify::Polled, spin: SPIN, ..CoreSettings::default() }
}

fn one(settings: CoreSettings) -> Core {
    Core::start(CoreId(0), settings).unwrap()
}

/// What the core has published last, whole.
fn published(core: &Core) -> CoreReading {
    loop {
        let (first, second) = (core.read(), core.read());
        if (first.turns, first.steps, first.waits) == (second.turns, second.steps, second.waits) {
            return second;
        }
    }
}

/// Waits until all that the core has published is of after this call: it publishes every 10 ms, and sleeps no longer.
fn sleeps_for_long(core: &Core) {
    let waits = core.read().waits;
    eventually("does not sleep", || core.read().waits > waits + 3);
}

/// Has the line hold one more request, and sees that the poller has it.
fn held(line: &Line) {
    line.hold();
    line.publish();
    taken(line);
}

fn taken(line: &Line) {
    let published = line.published.load(Ordering::Relaxed);
    eventually("not taken", || line.taken.load(Ordering::Acquire) == published);
}

#[test]
fn a_core_that_waits_for_completions_sleeps_until_there_is_work() {
    [Notify::Polled, Notify::Adaptive].into_iter().for_each(sleeps_until_there_is_work);
}

fn sleeps_until_there_is_work(notify: Notify) {
    let core = one(CoreSettings { notify, ..settings() });
    let (running, lines) = Counter::run_telling(3, &core);
    lines.iter().for_each(|line| held(line));
    sleeps_for_long(&core);
    let first = published(&core);
    eventually("does not sleep", || core.read().waits > first.waits + 20);
    let last = published(&core);
    let (steps, waits) = (last.steps - first.steps, last.waits - first.waits);
    // Each of the three is looked at before a sleep, after it has asked to be kicked, and after it, and until it is clear that the wait goes on.
    // (What is published is of any moment between them.)
    assert!(steps <= 9 * (waits + 1), "{notify:?}: {steps} looks in {waits} sleeps");
    assert_eq!(last.sleeps, first.sleeps);
    assert!(last.slept_ns > first.slept_ns);
    lines.iter().for_each(|line| line.complete());
    lines.iter().for_each(|line| line.wait());
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_core_that_waits_for_long_asks_to_be_kicked() {
    let clock = Arc::new(ManualClock::default());
    let core = Core::start_with(CoreId(0), settings(), clock.clone()).unwrap();
    let (running, lines) = Counter::run_telling(1, &core);
    let line = &lines[0];
    line.publish();
    line.wait();
    held(line);
    // No time passes: it does not sleep at all, and asks for no kick.
    let polls = line.polls.load(Ordering::Relaxed);
    eventually("does not poll", || line.polls.load(Ordering::Relaxed) > polls + 1000);
    assert!(!line.wants_kick());
    clock.advance(Duration::from_millis(2));
    eventually("does not sleep", || line.wants_kick());
    line.publish();
    taken(line);
    line.complete();
    line.wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_request_ends_a_long_sleep_by_its_kick() {
    const TIMES: u64 = 40;
    for ring in RINGS {
        let core = one(CoreSettings { ring, ..settings() });
        let (running, lines) = Counter::run_telling(2, &core);
        lines.iter().for_each(|line| held(line));
        sleeps_for_long(&core);
        let wakes = core.read().wakes;
        for _ in 0..TIMES {
            eventually("does not ask for a kick", || lines[1].rests());
            let kicks = lines[1].kicks.load(Ordering::Relaxed);
            lines[1].publish();
            taken(&lines[1]);
            eventually("takes no kick", || lines[1].kicks.load(Ordering::Relaxed) > kicks);
        }
        // Now and then a sleep has just ended when the kick comes.
        eventually("timers end its sleeps", || core.read().wakes >= wakes + TIMES / 2);
        lines.iter().for_each(|line| line.complete());
        lines.iter().for_each(|line| line.wait());
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_queue_without_a_kick_is_looked_at_again_and_again() {
    let core = one(settings());
    let (running, lines) = Counter::run_telling(1, &core);
    let line = &lines[0];
    line.kickless.store(true, Ordering::Relaxed);
    held(line);
    eventually("does not sleep", || core.read().waits > 0);
    // Sleeps of 50 us, not of 10 ms.
    quick(line);
    line.complete();
    line.wait();
    running.quiesce(soon()).unwrap();
}

/// Sees the line polled 50 times within 100 ms.
fn quick(line: &Line) {
    eventually("is polled too late", || {
        let (began, polls) = (Instant::now(), line.polls.load(Ordering::Relaxed));
        eventually("is not polled", || line.polls.load(Ordering::Relaxed) >= polls + 50);
        began.elapsed() < Duration::from_millis(100)
    });
}

#[test]
fn a_completion_ends_the_sleep_and_so_does_a_message() {
    const ROUNDS: u64 = 24;
    let (mut by_completion, mut by_message) = (0, 0);
    for round in 0..ROUNDS {
        let ring = RINGS[round as usize % RINGS.len()];
        // A core that has yet to see how long its disk takes.
        let core = one(CoreSettings { completion_wait: LONG, ring, ..settings() });
        let (mut running, lines) = Counter::run_telling(2, &core);
        // Sleeps are as long as 10 ms: what comes after one has begun hardly ever comes between two of them, and wakes nobody.
        let sleeps = || {
            let waits = core.read().waits;
            eventually("does not sleep", || core.read().waits > waits + 2);
            core.read().wakes
        };
        let wakes = || {
            let waits = core.read().waits;
            eventually("does not sleep", || core.read().waits > waits + 1);
            core.read().wakes
        };
        lines.iter().for_each(|line| held(line));
        let before = sleeps();
        assert!(running.apply(&QueueSet::from([0]), &Change::Call(None)).wait(soon()));
        by_message += u64::from(wakes() > before);
        let before = sleeps();
        // The other is silent all the while.
        lines[0].complete();
        lines[0].wait();
        held(&lines[0]);
        by_completion += u64::from(wakes() > before);
        lines.iter().for_each(|line| line.complete());
        lines.iter().for_each(|line| line.wait());
        running.quiesce(soon()).unwrap();
    }
    assert!(by_completion >= ROUNDS / 2 && by_message >= ROUNDS / 2, "{by_completion}, {by_message}");
}

#[test]
fn a_kick_that_nobody_asked_for_ends_one_sleep() {
    // Its clock stands still, so nothing is tidied because of the time.
    let clock = Arc::new(ManualClock::default());
    let core = Core::start_with(CoreId(0), settings(), clock.clone()).unwrap();
    let (running, lines) = Counter::run_telling(1, &core);
    let line = &lines[0];
    line.kickless.store(true, Ordering::Relaxed);
    held(line);
    eventually("is not polled", || !line.wants_kick());
    let polls = line.polls.load(Ordering::Relaxed);
    eventually("is not polled", || line.polls.load(Ordering::Relaxed) > polls + 64);
    // It tries to ask for kicks once, and sleeps without since that is not promised.
    let armed = line.armed.load(Ordering::Relaxed);
    clock.advance(Duration::from_millis(1));
    eventually("does not sleep", || line.armed.load(Ordering::Relaxed) > armed && !line.wants_kick());
    for _ in 0..20 {
        let kicks = line.kicks.load(Ordering::Relaxed);
        line.kick();
        eventually("keeps its kick", || line.kicks.load(Ordering::Relaxed) > kicks);
    }
    line.complete();
    line.wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_core_polls_on_beside_an_idle_queue_and_where_it_is_to_or_must() {
    let sleeper = one(settings());
    let dedicated = one(CoreSettings { yield_policy: YieldPolicy::Dedicated, ..settings() });
    let never = one(CoreSettings { completion_wait: Duration::ZERO, ..settings() });
    // What is below the queue does not tell when something has ended.
    let untold = one(settings());
    let (idle, idle_lines) = Counter::run(1, &sleeper);
    idle_lines[0].publish();
    idle_lines[0].wait();
    for (core, tells) in [(&sleeper, true), (&dedicated, true), (&never, true), (&untold, false)] {
        let run = if tells { Counter::run_telling } else { Counter::run };
        let (running, lines) = run(1, core);
        held(&lines[0]);
        let first = published(core);
        eventually("does not poll", || core.read().turns > first.turns + 1000);
        assert_eq!(core.read().waits, 0);
        lines[0].complete();
        lines[0].wait();
        running.quiesce(soon()).unwrap();
    }
    idle.quiesce(soon()).unwrap();
}

#[test]
fn a_neighbour_that_rests_is_woken_by_its_kick() {
    let clock = Arc::new(ManualClock::default());
    let settings = CoreSettings { completion_wait: LONG, ..settings() };
    let core = Core::start_with(CoreId(0), settings, clock.clone()).unwrap();
    let (running, lines) = Counter::run_telling(2, &core);
    let (waits, rests) = (&lines[0], &lines[1]);
    let advance = |by| {
        let tidied = waits.tidied.load(Ordering::Relaxed);
        clock.advance(by);
        eventually("does not look at the clock", || waits.tidied.load(Ordering::Relaxed) > tidied);
    };
    waits.publish();
    waits.wait();
    for round in 0..20 {
        let kicks = rests.kicks.load(Ordering::Relaxed);
        rests.publish();
        rests.wait();
        assert!(round == 0 || rests.kicks.load(Ordering::Relaxed) > kicks, "served without its kick");
        // The time of the one begins anew, that of the other goes on.
        waits.complete();
        waits.wait();
        // It counts as idle since a poll that found nothing, by the clock of that turn.
        let polls = rests.polls.load(Ordering::SeqCst);
        eventually("is not polled", || rests.polls.load(Ordering::SeqCst) > polls + 2);
        advance(SPIN / 2);
        waits.publish();
        waits.wait();
        held(waits);
        advance(SPIN / 2 + Duration::from_secs(1));
        eventually("does not rest", || {
            // In this order, or turns go by between the two looks.
            let [of_rests, of_waits] = [rests, waits].map(|line| line.polls.load(Ordering::SeqCst));
            eventually("rests as well", || waits.polls.load(Ordering::SeqCst) > of_waits + 2);
            rests.polls.load(Ordering::SeqCst) == of_rests
        });
    }
    waits.complete();
    waits.wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_poller_that_waits_is_polled_when_it_said() {
    let core = one(CoreSettings { completion_wait: LONG, ..settings() });
    let (running, lines) = Counter::run_telling(1, &core);
    let line = &lines[0];
    line.wakes_in_us.store(100, Ordering::Relaxed);
    held(line);
    // Longer than 10 ms without work: but for what it said it is looked at every 10 ms, when it is tidied.
    let tidied = line.tidied.load(Ordering::Relaxed);
    eventually("is not tidied", || line.tidied.load(Ordering::Relaxed) > tidied + 2);
    quick(line);
    line.wakes_in_us.store(0, Ordering::Relaxed);
    line.complete();
    line.wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_disk_that_is_silent_for_long_costs_nothing() {
    let core = one(CoreSettings { spin: Duration::from_millis(5), ..settings() });
    let (running, lines) = Counter::run_telling(1, &core);
    held(&lines[0]);
    eventually("does not wait", || core.read().waits > 0);
    eventually("does not rest", || lines[0].wants_kick() && core.read().awake == 0);
    let first = published(&core);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(published(&core).steps, first.steps);
    // What is added is taken, and what ends is heard.
    lines[0].publish();
    taken(&lines[0]);
    lines[0].complete();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}
