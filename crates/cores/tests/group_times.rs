//! What groups have used of cores: work by what it cost, polling that found nothing by polls; and where the time of a core goes.

mod counter;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{CoreReading, CoreSettings, GroupTime, Notify, Pool};
use ioplane_device::{CoreId, GroupId, Running, Share};

/// Cores on which nobody rests.
fn polled(cores: usize) -> Pool {
    let spin = Duration::from_secs(3600);
    let settings = CoreSettings { notify: Notify::Polled, spin, ..CoreSettings::default() };
    Pool::with(std::iter::repeat_n(settings, cores)).unwrap()
}

/// A device with one queue, alone in a group.
fn device(pool: &Pool, core: u32) -> (GroupId, Running<Counter>, Arc<Line>) {
    let share = Share::new_group(NonZeroU32::MIN);
    let (running, lines) = Counter::run_in(share, 1, &pool.on(CoreId(core)).unwrap());
    (share.group, running, lines[0].clone())
}

/// Of one core.
fn used(pool: &Pool, group: GroupId, core: u32) -> GroupTime {
    pool.group_times().get(&group).and_then(|cores| cores.get(&core)).copied().unwrap_or_default()
}

fn reading(pool: &Pool) -> CoreReading {
    pool.core(CoreId(0)).unwrap().read()
}

#[test]
fn work_is_of_the_group_that_has_it_and_empty_polling_of_all_that_are_polled() {
    let pool = polled(1);
    let [(busy, busy_device, line), (idle, idle_device, _)] = [device(&pool, 0), device(&pool, 0)];
    eventually("neither is polled in vain", || {
        [busy, idle].iter().all(|group| used(&pool, *group, 0).empty_ns > 0)
    });
    assert_eq!((used(&pool, busy, 0).busy_ns, used(&pool, idle, 0).busy_ns), (0, 0));
    line.busy.store(true, Ordering::Relaxed);
    eventually("has no work", || used(&pool, busy, 0).busy_ns > 20_000_000);
    line.busy.store(false, Ordering::Relaxed);
    // Until all of the work has been published.
    eventually("does not end", || {
        let before = reading(&pool);
        eventually("is not polled in vain", || reading(&pool).empty_ns > before.empty_ns + 30_000_000);
        reading(&pool).busy_ns == before.busy_ns
    });
    // Together they have what the core has, but for rounding.
    let before = reading(&pool);
    let times = pool.group_times();
    let [of_busy, of_idle] = [busy, idle].map(|group| times[&group][&0]);
    assert_eq!(of_idle.busy_ns, 0);
    let (sum, all) = (of_busy.busy_ns, before.busy_ns);
    assert!(sum <= all && sum >= all / 10 * 9, "{sum} of {all}");
    let (sum, all) = (of_busy.empty_ns + of_idle.empty_ns, before.empty_ns);
    assert!(sum <= reading(&pool).empty_ns && sum >= all / 10 * 9, "{sum} of {all}");
    // A queue that has left has used what it has used.
    busy_device.quiesce(soon()).unwrap();
    idle_device.quiesce(soon()).unwrap();
    let of_busy_now = used(&pool, busy, 0);
    assert!(of_busy_now.busy_ns >= of_busy.busy_ns && of_busy_now.empty_polls >= of_busy.empty_polls);
    assert!(of_busy_now.empty_ns >= of_busy.empty_ns);
    eventually("does not sleep", || reading(&pool).awake == 0);
    let of_idle = used(&pool, idle, 0);
    pool.forget_group(busy);
    assert_eq!((used(&pool, busy, 0), used(&pool, idle, 0)), (GroupTime::default(), of_idle));
}

#[test]
fn what_was_used_of_a_core_that_has_ended_is_kept() {
    let pool = polled(2);
    let (group, running, line) = device(&pool, 1);
    line.busy.store(true, Ordering::Relaxed);
    eventually("has no work", || used(&pool, group, 1).busy_ns > 1_000_000);
    line.busy.store(false, Ordering::Relaxed);
    running.quiesce(soon()).unwrap();
    pool.retire(CoreId(1), soon()).unwrap();
    let ended = used(&pool, group, 1);
    assert!(ended.busy_ns > 1_000_000, "{ended:?}");
    // Another core with its number takes its place in the list.
    pool.add_as(CoreId(1), CoreSettings::default()).unwrap();
    assert_eq!(used(&pool, group, 1), ended);
    let (_, other, _) = device(&pool, 1);
    assert_eq!(used(&pool, group, 1), ended);
    other.quiesce(soon()).unwrap();
}

#[test]
fn a_core_is_busy_polls_in_vain_or_sleeps() {
    let pool = polled(1);
    let spent = |reading: &CoreReading| reading.busy_ns + reading.empty_ns + reading.slept_ns;
    // It publishes nothing while it sleeps, and one can see that it does.
    eventually("does not sleep", || reading(&pool).slept_ns > 0);
    let before = reading(&pool);
    eventually("sleeps no longer", || reading(&pool).slept_ns > before.slept_ns + 50_000_000);
    let asleep = reading(&pool);
    assert_eq!((asleep.sleeps, asleep.busy_ns), (before.sleeps, before.busy_ns));
    let (_, running, line) = device(&pool, 0);
    let mut last = asleep;
    let mut rises = |pool: &Pool| {
        let now = reading(pool);
        assert!(now.empty_ns >= last.empty_ns && now.slept_ns >= last.slept_ns, "{last:?} {now:?}");
        last = now;
        now
    };
    eventually("does not poll in vain", || rises(&pool).empty_ns > asleep.empty_ns + 50_000_000);
    line.busy.store(true, Ordering::Relaxed);
    eventually("has no work", || rises(&pool).busy_ns > asleep.busy_ns + 50_000_000);
    line.busy.store(false, Ordering::Relaxed);
    running.quiesce(soon()).unwrap();
    let sleeps = rises(&pool).slept_ns;
    eventually("does not sleep again", || rises(&pool).slept_ns > sleeps + 50_000_000);
    // All of its time is one of the three.
    let end = reading(&pool);
    assert!(spent(&end) <= end.age_ns && spent(&end) >= end.age_ns / 10 * 9, "{end:?}");
}
