//! The slots of a core, each by itself: who is stepped, who rests, and who is stepped where it rests.

mod counter;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreReading, CoreSettings, Notify, RingChoice};
use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, CoreId, QueueSet, Share};

fn settings(notify: Notify, spin: Duration) -> CoreSettings {
    CoreSettings { notify, spin, ..CoreSettings::default() }
}

fn one(notify: Notify, spin: Duration) -> Core {
    Core::start(CoreId(0), settings(notify, spin)).unwrap()
}

/// What the core has published last, whole.
fn published(core: &Core) -> CoreReading {
    loop {
        let (first, second) = (core.read(), core.read());
        if (first.turns, first.steps, first.event_checks) == (second.turns, second.steps, second.event_checks)
        {
            return second;
        }
    }
}

/// A frame that one slot hands to the next is seen in the same turn only while they are stepped in the order in which they came to the core. An
/// adaptive core whose slots were stepped in the order in which they had woken lost a quarter of its requests.
#[test]
fn slots_are_stepped_in_their_order_whoever_woke_first() {
    let core = one(Notify::Notified, Duration::ZERO);
    let (running, lines) = Counter::run(3, &core);
    let together = Arc::new(AtomicU64::new(0));
    for line in &lines {
        line.together.set(together.clone()).unwrap();
        eventually("a queue does not rest", || line.rests());
    }
    for line in lines.iter().rev() {
        // From now on it is awake.
        line.busy.store(true, Ordering::Relaxed);
        line.publish();
        line.wait();
    }
    let polls = lines[0].polls.load(Ordering::Relaxed);
    eventually("busy queues are not polled", || lines[0].polls.load(Ordering::Relaxed) > polls + 10);
    let at = [0, 1, 2].map(|queue: usize| lines[queue].at.load(Ordering::Relaxed));
    assert_eq!([at[1] + 3 - at[0] % 3, at[2] + 3 - at[0] % 3].map(|after| after % 3), [1, 2], "{at:?}");
    lines.iter().for_each(|line| line.busy.store(false, Ordering::Relaxed));
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_polled_core_steps_the_busy_one_of_many_and_makes_no_call_for_the_idle() {
    for ring in [RingChoice::Best, RingChoice::Plain, RingChoice::Without] {
        the_busy_one_of_many(ring);
    }
}

fn the_busy_one_of_many(ring: RingChoice) {
    const IDLE: u16 = 1000;
    // Two descriptors for each, and some.
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.current.is_some_and(|current| current < 4096) {
        limit.current = limit.maximum.map_or(Some(4096), |most| Some(most.min(4096)));
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    }
    let settings = CoreSettings { ring, ..settings(Notify::Polled, Duration::from_millis(1)) };
    let core = Core::start(CoreId(0), settings).unwrap();
    let (running, lines) = Counter::run(IDLE + 1, &core);
    let (idle, busy) = (&lines[..usize::from(IDLE)], &lines[usize::from(IDLE)]);
    busy.busy.store(true, Ordering::Relaxed);
    busy.publish();
    busy.wait();
    eventually("idle queues do not rest", || core.read().awake == 1);
    // What rested within the last 10 ms is tidied once more.
    let tidied = busy.tidied.load(Ordering::Relaxed);
    eventually("is not tidied", || busy.tidied.load(Ordering::Relaxed) > tidied + 2);
    let calls = |line: &Line| {
        [&line.polls, &line.armed, &line.disarmed, &line.tidied].map(|count| count.load(Ordering::Relaxed))
    };
    let before: Vec<_> = idle.iter().map(|line| calls(line)).collect();
    let first = published(&core);
    eventually("does not turn", || core.read().turns > first.turns + 100_000);
    let last = published(&core);
    for (at, line) in idle.iter().enumerate() {
        assert_eq!(calls(line), before[at], "queue {at} was looked at for nothing");
    }
    assert_eq!(last.steps - first.steps, last.turns - first.turns, "one step per turn");
    // One question for all of them every 50 us; what is published is at most some 10 ms old.
    let most = (last.age_ns - first.age_ns + 100_000_000) / 50_000;
    // A deferred ring is told of all of them, and asked by a load.
    let least = u64::from(ring != RingChoice::Best);
    assert!(
        (least..most).contains(&(last.event_checks - first.event_checks)),
        "{} in {most}",
        last.event_checks - first.event_checks
    );
    assert_eq!(last.sleeps, first.sleeps);
    // Each is heard all the same.
    for line in idle.iter().step_by(97) {
        line.publish();
        line.wait();
        assert!(line.kicks.load(Ordering::Relaxed) > 0, "served without its kick");
    }
    busy.busy.store(false, Ordering::Relaxed);
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_busy_core_counts_each_question_to_the_kernel() {
    for ring in [RingChoice::Best, RingChoice::Plain, RingChoice::Without] {
        let settings = CoreSettings { ring, ..settings(Notify::Polled, Duration::ZERO) };
        let core = Core::start(CoreId(0), settings).unwrap();
        let (running, lines) = Counter::run_telling(2, &core);
        lines[1].busy.store(true, Ordering::Relaxed);
        lines[1].publish();
        lines[1].wait();
        for _ in 0..3 {
            lines[0].hold();
            lines[0].publish();
            let held = || lines[0].taken.load(Ordering::Relaxed) > lines[0].served.load(Ordering::Relaxed);
            eventually("does not rest with what it holds", || held() && lines[0].wants_kick());
            let before = published(&core).event_checks;
            // Only the epoll set has the news.
            lines[0].complete();
            lines[0].wait();
            eventually("is not counted", || core.read().event_checks > before);
        }
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_slot_rests_after_a_spin_of_its_own() {
    const SPIN: Duration = Duration::from_secs(1);
    let clock = Arc::new(ManualClock::default());
    let core = Core::start_with(CoreId(0), settings(Notify::Polled, SPIN), clock.clone()).unwrap();
    let (running, lines) = Counter::run(2, &core);
    lines[1].busy.store(true, Ordering::Relaxed);
    let turns = |count| {
        let polls = lines[1].polls.load(Ordering::Relaxed);
        eventually("does not turn", || lines[1].polls.load(Ordering::Relaxed) > polls + count);
    };
    turns(1000);
    assert!(!lines[0].wants_kick(), "rests although no time has passed");
    clock.advance(SPIN / 2);
    turns(1000);
    // A request begins its time anew.
    lines[0].publish();
    lines[0].wait();
    turns(1000);
    clock.advance(SPIN / 2);
    turns(1000);
    assert!(!lines[0].wants_kick(), "rests before its time");
    clock.advance(SPIN / 2);
    eventually("does not rest beside a busy one", || lines[0].wants_kick());
    turns(1000);
    let polls = lines[0].polls.load(Ordering::Relaxed);
    turns(1000);
    assert_eq!(lines[0].polls.load(Ordering::Relaxed), polls, "is looked at although it rests");
    assert!(!lines[1].wants_kick());
    // The core asks for its kick by the clock.
    lines[0].publish();
    turns(1000);
    clock.advance(Duration::from_millis(1));
    lines[0].wait();
    lines[1].busy.store(false, Ordering::Relaxed);
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_share_is_for_the_core_and_not_for_the_poller() {
    let core = one(Notify::Polled, Duration::ZERO);
    let (mut running, lines) = Counter::run(1, &core);
    let share = Share::new_group(NonZeroU32::new(3).unwrap());
    assert!(running.apply(&QueueSet::from([0]), &Change::Share(share)).wait(soon()));
    assert_eq!(lines[0].applied.load(Ordering::Relaxed), 0);
    lines[0].publish();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_poller_is_polled_when_it_said_also_beside_a_busy_one() {
    const EVERY_US: u64 = 2000;
    for notify in [Notify::Polled, Notify::Notified] {
        let core = one(notify, Duration::ZERO);
        let (running, lines) = Counter::run(2, &core);
        lines[0].wakes_in_us.store(EVERY_US, Ordering::Relaxed);
        // It hears of that in its next poll.
        lines[0].publish();
        lines[0].wait();
        for busy in [false, true] {
            lines[1].busy.store(busy, Ordering::Relaxed);
            lines[1].publish();
            lines[1].wait();
            let (began, polls) = (Instant::now(), lines[0].polls.load(Ordering::Relaxed));
            let woken = || lines[0].polls.load(Ordering::Relaxed) - polls;
            eventually("is not polled when it said", || woken() >= 20);
            let woken = woken();
            let most = began.elapsed().as_micros() as u64 / EVERY_US + 6;
            assert!(woken <= most, "{notify:?}: polled {woken} times instead of {most}");
            assert_eq!(lines[0].kicks.load(Ordering::Relaxed), 1, "woken by a kick");
        }
        // It takes that back in its next poll.
        lines[0].wakes_in_us.store(0, Ordering::Relaxed);
        lines[0].publish();
        lines[0].wait();
        let turned = || {
            let polls = lines[1].polls.load(Ordering::Relaxed);
            eventually("does not turn", || lines[1].polls.load(Ordering::Relaxed) > polls + 1000);
        };
        turned();
        let polls = lines[0].polls.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(10 * EVERY_US));
        turned();
        assert_eq!(lines[0].polls.load(Ordering::Relaxed), polls, "{notify:?}: polled for nothing");
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}
