//! Cores at work with the smallest device.

mod counter;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counter::{BYTES, Counter, eventually, soon};
use ioplane_cores::{Core, CoreSettings, EndedCore, Notify, Pool, PoolError, RingChoice};
use ioplane_device::{Change, CoreId, CoreSender, MoveError, Placement, QueueSet, Quiescent};

fn settings(notify: Notify, spin: Duration) -> CoreSettings {
    CoreSettings { notify, spin, ..CoreSettings::default() }
}

fn one(notify: Notify, spin: Duration) -> Core {
    Core::start(CoreId(0), settings(notify, spin)).unwrap()
}

#[test]
fn sleeping_as_often_as_possible_loses_nothing() {
    let rings = [RingChoice::Best, RingChoice::Plain, RingChoice::Without];
    for (notify, ring) in [Notify::Polled, Notify::Notified].into_iter().flat_map(|n| rings.map(|r| (n, r))) {
        let settings = CoreSettings { ring, ..settings(notify, Duration::ZERO) };
        let core = Core::start(CoreId(0), settings).unwrap();
        let (running, lines) = Counter::run(3, &core);
        std::thread::scope(|scope| {
            for line in &lines {
                scope.spawn(move || {
                    for n in 0..3000 {
                        line.publish();
                        // Now and then a burst, so that publishing meets every stage of falling asleep.
                        if n % 7 != 0 {
                            line.wait();
                        }
                    }
                    line.wait();
                });
            }
        });
        eventually("the core does not fall asleep", || core.read().sleeps > 1);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn a_polled_core_is_not_kicked_and_then_sleeps() {
    let core = one(Notify::Polled, Duration::from_secs(3600));
    let (running, lines) = Counter::run(1, &core);
    lines[0].publish();
    lines[0].wait();
    eventually("never polled", || lines[0].polls.load(Ordering::Relaxed) > 100);
    let kicks = lines[0].kicks.load(Ordering::Relaxed);
    // It may have slept before the queue came.
    let sleeps = core.read().sleeps;
    for _ in 0..1000 {
        lines[0].publish();
        lines[0].wait();
    }
    assert_eq!(lines[0].kicks.load(Ordering::Relaxed), kicks, "kicked while polled");
    assert_eq!(core.read().sleeps, sleeps);
    // Told to spin no longer, it sleeps; and the first request after that wakes it.
    core.spin(Duration::ZERO);
    eventually("spins for ever", || core.read().sleeps > sleeps);
    lines[0].publish();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn idle_queues_of_a_notified_core_are_not_polled() {
    let core = one(Notify::Notified, Duration::ZERO);
    let (running, lines) = Counter::run(200, &core);
    eventually("a new queue was not looked at", || {
        lines.iter().all(|l| l.tidied.load(Ordering::Relaxed) > 0)
    });
    // Each was stepped; with the second of these the turn in which the last of them came to rest is over.
    for _ in 0..2 {
        lines[7].publish();
        lines[7].wait();
    }
    let polls: Vec<u64> = lines.iter().map(|l| l.polls.load(Ordering::Relaxed)).collect();
    for _ in 0..500 {
        lines[7].publish();
        lines[7].wait();
    }
    for (at, line) in lines.iter().enumerate().filter(|(at, _)| *at != 7) {
        assert_eq!(line.polls.load(Ordering::Relaxed), polls[at], "queue {at} was polled for nothing");
    }
    assert!(lines[7].kicks.load(Ordering::Relaxed) > 0);
    assert_eq!(core.read().queues, 200);
    running.quiesce(soon()).unwrap();
    eventually("slots stay behind", || core.read().queues == 0);
}

#[test]
fn switching_the_mode_under_load_loses_nothing() {
    let core = one(Notify::Polled, Duration::ZERO);
    let (running, lines) = Counter::run(4, &core);
    std::thread::scope(|scope| {
        for line in &lines {
            scope.spawn(move || {
                for _ in 0..2000 {
                    line.publish();
                    line.wait();
                }
            });
        }
        for n in 0..200 {
            core.notify(if n % 2 == 0 { Notify::Notified } else { Notify::Polled });
            core.spin(Duration::from_micros(n % 3 * 50));
            std::thread::yield_now();
        }
    });
    running.quiesce(soon()).unwrap();
}

#[test]
fn queues_move_between_cores_under_load() {
    let pool =
        Pool::with([settings(Notify::Polled, Duration::ZERO), settings(Notify::Notified, Duration::ZERO)])
            .unwrap();
    let (mut running, lines) = Counter::run(2, &pool);
    assert_ne!(running.core_of(0), running.core_of(1), "the second queue belongs on the idle core");
    std::thread::scope(|scope| {
        for line in &lines {
            scope.spawn(move || {
                for _ in 0..3000 {
                    line.publish();
                    line.wait();
                }
            });
        }
        for n in 0..100u32 {
            let to = CoreId(n % 2);
            running.move_queue(0, &pool.on(to).unwrap(), soon()).unwrap();
            assert_eq!(running.core_of(0), Some(to));
        }
    });
    assert_eq!(lines[0].made.load(Ordering::Relaxed), 1, "a queue that moves is not built anew");
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_queue_that_cannot_drain_stays_and_goes_on() {
    let pool = Pool::with([CoreSettings::default(), CoreSettings::default()]).unwrap();
    let here = CoreId(0);
    let (mut running, lines) = Counter::run(1, &pool.on(here).unwrap());
    lines[0].open.store(false, Ordering::Release);
    lines[0].publish();
    let polls = lines[0].polls.load(Ordering::Relaxed);
    eventually("not taken", || lines[0].polls.load(Ordering::Relaxed) > polls + 1);
    let moved = running.move_queue(0, &pool.on(CoreId(1)).unwrap(), Instant::now());
    assert!(matches!(moved, Err(MoveError::Busy(0))), "{moved:?}");
    assert_eq!(running.core_of(0), Some(here));
    lines[0].publish();
    lines[0].open.store(true, Ordering::Release);
    lines[0].wait();
    // A core that is no more refuses, and the queue stays.
    let gone = pool.on(CoreId(1)).unwrap();
    pool.retire(CoreId(1), soon()).unwrap();
    let moved = running.move_queue(0, &gone, soon());
    assert!(matches!(moved, Err(MoveError::Refused(_))), "{moved:?}");
    assert_eq!(lines[0].made.load(Ordering::Relaxed), 2, "the core that was to take it has parked it");
    lines[0].publish();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_stalled_queue_costs_short_sleeps_and_not_a_processor() {
    let core = one(Notify::Polled, Duration::ZERO);
    let (running, lines) = Counter::run(1, &core);
    lines[0].open.store(false, Ordering::Release);
    lines[0].publish();
    eventually("spins although it has nothing to do", || core.read().short_sleeps > 20);
    lines[0].open.store(true, Ordering::Release);
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn hole_08_a_queue_that_nobody_wakes_is_looked_at_beside_a_busy_one() {
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        let core = one(notify, Duration::ZERO);
        let (running, lines) = Counter::run(2, &core);
        // What it has taken ends without a sign: only by being looked at does it come to an end.
        lines[0].open.store(false, Ordering::Release);
        lines[0].publish();
        eventually("does not rest", || core.read().short_sleeps > 3);
        lines[1].busy.store(true, Ordering::Relaxed);
        lines[1].publish();
        lines[1].wait();
        let polls = lines[1].polls.load(Ordering::Relaxed);
        eventually("does not work", || lines[1].polls.load(Ordering::Relaxed) > polls + 1000);
        lines[0].open.store(true, Ordering::Release);
        lines[0].wait();
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn hole_06_a_flood_of_changes_leaves_the_neighbour_its_turns() {
    const FLOOD: u64 = 1000;
    for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
        let core = one(notify, Duration::ZERO);
        let (mut running, lines) = Counter::run(2, &core);
        lines[1].neighbour.set(lines[0].clone()).unwrap();
        lines[1].busy.store(true, Ordering::Relaxed);
        lines[1].publish();
        lines[1].wait();
        // All of it is in the mailbox before the core turns again.
        lines[1].stalls.store(true, Ordering::Relaxed);
        eventually("does not turn", || lines[1].stalled.load(Ordering::Relaxed));
        let told: Vec<_> =
            (0..FLOOD).map(|_| running.apply(&QueueSet::from([0]), &Change::Call(None))).collect();
        lines[1].stalls.store(false, Ordering::Relaxed);
        assert!(told.into_iter().all(|change| change.wait(soon())), "a change was not heard");
        assert_eq!(lines[0].applied.load(Ordering::Relaxed), FLOOD);
        let most = lines[1].most_applied.load(Ordering::Relaxed);
        assert!((1..=8).contains(&most), "{notify:?}: {most} changes between two turns");
        lines[1].busy.store(false, Ordering::Relaxed);
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn hole_06_messages_that_wait_for_the_next_turn_are_not_slept_on() {
    let core = one(Notify::Notified, Duration::ZERO);
    // More slots than are attached in one turn, and none awake before.
    let (running, lines) = Counter::run(100, &core);
    for line in &lines {
        line.publish();
        line.wait();
    }
    running.quiesce(soon()).unwrap();
}

/// The first queue is placed on a core, the second on one that has ended.
struct HalfGone<'a>(&'a Core);

impl Placement for HalfGone<'_> {
    fn place(&self, _device: &str, queue: u16) -> Arc<dyn CoreSender> {
        if queue == 0 { self.0.sender() } else { Arc::new(EndedCore(CoreId(9))) }
    }
}

#[test]
fn hole_08_a_device_is_not_quiescent_before_its_pollers_have_parked() {
    let core = one(Notify::Polled, Duration::ZERO);
    let counter = Counter::new(2);
    let line = counter.lines[0].clone();
    line.stalls.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let resumed = scope.spawn(|| Quiescent::new(counter).resume(&HalfGone(&core)));
        eventually("is not attached", || line.stalled.load(Ordering::Relaxed));
        // Longer than the timeout of a device's owner for a core: the owner still must not get the device.
        std::thread::sleep(Duration::from_millis(5500));
        assert!(!resumed.is_finished(), "returned while a poller runs");
        line.stalls.store(false, Ordering::Relaxed);
        let refused = resumed.join().unwrap().unwrap_err();
        assert!(refused.error.to_string().contains("core 9 has ended"), "{}", refused.error);
        let polls = line.polls.load(Ordering::Relaxed);
        let running = refused.kept.resume(&core).unwrap();
        assert_eq!(running.queues().len(), 2);
        line.publish();
        line.wait();
        assert!(line.polls.load(Ordering::Relaxed) > polls);
        running.quiesce(soon()).unwrap();
    });
}

#[test]
fn a_core_retires_when_it_is_empty() {
    let pool = Pool::with([CoreSettings::default()]).unwrap();
    let id = pool.add(CoreSettings { cpu: Some(0), ..CoreSettings::default() }).unwrap();
    let (running, lines) = Counter::run(1, &pool.on(id).unwrap());
    let sender = running.sender_of(0).unwrap();
    lines[0].publish();
    lines[0].wait();
    assert!(matches!(pool.retire(id, Instant::now()), Err(PoolError::Occupied { queues: 1, .. })));
    lines[0].publish();
    lines[0].wait();
    let quiescent = running.quiesce(soon()).unwrap();
    pool.retire(id, soon()).unwrap();
    assert!(matches!(pool.core(id), Err(PoolError::NoSuchCore(1))));
    // A sender that was kept returns what is sent: nothing is lost.
    let back = quiescent.resume(&sender).unwrap_err();
    assert!(back.error.to_string().contains("core 1 has ended"), "{}", back.error);
    let running = back.kept.resume(&pool).unwrap();
    assert_eq!(running.core_of(0), Some(CoreId(0)));
    lines[0].publish();
    lines[0].wait();
    assert_eq!(pool.add(CoreSettings::default()).unwrap(), CoreId(2));
    running.quiesce(soon()).unwrap();
}

#[test]
fn the_number_of_a_core_that_has_ended_can_be_asked_for_again() {
    let pool = Pool::with([CoreSettings::default()]).unwrap();
    pool.add_as(CoreId(7), CoreSettings::default()).unwrap();
    assert!(matches!(pool.add_as(CoreId(7), CoreSettings::default()), Err(PoolError::Taken(7))));
    for _ in 0..20 {
        pool.retire(CoreId(7), soon()).unwrap();
        assert!(pool.core(CoreId(7)).is_err());
        pool.add_as(CoreId(7), CoreSettings::default()).unwrap();
    }
    assert_eq!(pool.add(CoreSettings::default()).unwrap(), CoreId(8), "a number that no core has had");
    let (running, lines) = Counter::run(1, &pool.on(CoreId(7)).unwrap());
    lines[0].publish();
    lines[0].wait();
    running.quiesce(soon()).unwrap();
}

#[test]
fn a_core_that_is_not_open_gets_only_queues_that_name_it() {
    let pool = Pool::with((0..2).map(|_| settings(Notify::Notified, Duration::ZERO))).unwrap();
    pool.core(CoreId(0)).unwrap().open(false);
    let (running, _lines) = Counter::run(4, &pool);
    assert!((0..4).all(|queue| running.core_of(queue) == Some(CoreId(1))));
    let (named, lines) = Counter::run(1, &pool.on(CoreId(0)).unwrap());
    assert_eq!(named.core_of(0), Some(CoreId(0)));
    lines[0].publish();
    lines[0].wait();
    pool.core(CoreId(0)).unwrap().open(true);
    let (again, _lines) = Counter::run(1, &pool);
    assert_eq!(again.core_of(0), Some(CoreId(0)));
    for running in [running, named, again] {
        running.quiesce(soon()).unwrap();
    }
}

#[test]
fn the_time_of_each_queue_is_known_while_it_is_on_the_core() {
    let pool = Pool::with((0..2).map(|_| settings(Notify::Polled, Duration::from_secs(60)))).unwrap();
    let (mut running, lines) = Counter::run(2, &pool.on(CoreId(0)).unwrap());
    let core = |id| pool.core(CoreId(id)).unwrap();
    let time = |id: u32, queue: u16| {
        core(id).meters().iter().find(|meter| meter.queue() == queue).map(|meter| meter.busy_ns())
    };
    eventually("queue 1 works, and no time is charged to it", || {
        lines[1].publish();
        lines[1].wait();
        time(0, 1).is_some_and(|ns| ns > 0)
    });
    assert_eq!(time(0, 0), Some(0), "the other has done nothing");
    running.move_queue(1, &pool.on(CoreId(1)).unwrap(), soon()).unwrap();
    eventually("the old core still names it", || time(0, 1).is_none());
    let meters = core(1).meters();
    assert_eq!((meters.len(), meters[0].device(), meters[0].kind()), (1, "counter", "counter"));
    drop(meters);
    running.quiesce(soon()).unwrap();
    eventually("queues that have stopped are still named", || (0..2).all(|id| core(id).meters().is_empty()));
}

#[test]
fn sending_while_a_core_ends_returns_every_slot_or_serves_it() {
    for _ in 0..100 {
        let core = one(Notify::Polled, Duration::ZERO);
        let sender = core.sender();
        std::thread::scope(|scope| {
            let attached = scope.spawn(move || {
                let counter = Counter::new(1);
                let line = counter.lines[0].clone();
                match ioplane_device::Quiescent::new(counter).resume(&sender) {
                    Ok(running) => {
                        line.publish();
                        line.wait();
                        running.quiesce(soon()).unwrap();
                        true
                    }
                    Err(_) => false,
                }
            });
            let _ = core.retire(Instant::now());
            attached.join().unwrap();
        });
        core.retire(soon()).unwrap();
    }
}

#[test]
fn the_least_loaded_core_gets_the_queue() {
    let pool = Pool::with((0..3).map(|_| settings(Notify::Notified, Duration::ZERO))).unwrap();
    let (running, _lines) = Counter::run(9, &pool);
    for core in pool.cores() {
        assert_eq!(core.queues(), 3);
    }
    running.quiesce(soon()).unwrap();
}

#[test]
fn meters_tell_what_happened() {
    let core = Core::start(CoreId(5), CoreSettings { cpu: Some(0), ..CoreSettings::default() }).unwrap();
    let (running, lines) = Counter::run(1, &core);
    for _ in 0..100 {
        lines[0].publish();
        lines[0].wait();
    }
    eventually("never published", || core.read().units >= 100);
    let reading = core.read();
    assert_eq!(
        (reading.core, reading.cpu, reading.queues, reading.notify),
        (5, Some(0), 1, Notify::default())
    );
    assert!(reading.turns >= reading.busy_turns && reading.busy_turns > 0);
    assert_eq!(reading.bytes, reading.units * BYTES);
    assert!(reading.cpu_ns > 0 && reading.cpu_ns <= reading.age_ns);
    let sleeps = core.read().sleeps;
    lines[0].publish();
    lines[0].wait();
    eventually("does not sleep", || core.read().sleeps > sleeps);
    running.quiesce(soon()).unwrap();
    core.retire(soon()).unwrap();
    assert!(core.read().slept_ns > 0);
}

#[test]
fn a_command_to_a_poller_that_has_parked_is_dropped() {
    let core = one(Notify::Polled, Duration::ZERO);
    let (mut running, _lines) = Counter::run(1, &core);
    let all = QueueSet::from([0]);
    running.drain(&all);
    assert!(running.wait_stopped(&all, soon()));
    running.undrain(&all, &core).unwrap();
    assert_eq!(running.queues(), all);
    running.suspend(&all);
    // A suspended poller parks before an undrain is acknowledged, and a new one takes its place.
    running.undrain(&all, &core).unwrap();
    assert_eq!(running.queues(), all);
    let quiescent = running.quiesce(soon()).unwrap();
    drop(quiescent);
    let sender = core.sender();
    core.retire(soon()).unwrap();
    let (running, _lines) = {
        let other = one(Notify::Polled, Duration::ZERO);
        Counter::run(1, &other)
    };
    // Its core has been dropped, and lives as long as the queue does.
    running.quiesce(soon()).unwrap();
    assert_eq!(sender.core(), CoreId(0));
}

#[test]
fn a_poller_that_panics_takes_the_process_with_it() {
    const ASKED: &str = "IOPLANE_TEST_PANIC";
    if std::env::var_os(ASKED).is_some() {
        let core = one(Notify::Polled, Duration::ZERO);
        let (_running, lines) = Counter::run(1, &core);
        lines[0].panics.store(true, Ordering::Relaxed);
        lines[0].publish();
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_poller_that_panics_takes_the_process_with_it", "--nocapture"])
        .env(ASKED, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("I/O core 0 panicked while serving queue 0"), "{told}");
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(6), "{:?}", output.status);
}
