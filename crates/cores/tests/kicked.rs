//! What a core says of when the kick came that has woken a queue: the wait histogram of the queue counts from there.

mod counter;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, eventually, soon};
use ioplane_cores::{Core, CoreSettings, Notify, RingChoice};
use ioplane_device::CoreId;
use ioplane_device::clock::ManualClock;

/// What a core believes of its wake-ups, ns.
const WAKE_UPS: std::ops::RangeInclusive<u64> = 2_000..=200_000;

fn settings(notify: Notify, ring: RingChoice) -> CoreSettings {
    CoreSettings { notify, ring, spin: Duration::from_millis(1), ..CoreSettings::default() }
}

#[test]
fn a_core_that_slept_counts_its_wake_up() {
    for ring in [RingChoice::default(), RingChoice::Without] {
        for notify in [Notify::Polled, Notify::Notified, Notify::Adaptive] {
            let core = Core::start(CoreId(0), settings(notify, ring)).unwrap();
            let (running, lines) = Counter::run(1, &core);
            for _ in 0..3 {
                eventually("does not rest", || lines[0].rests());
                lines[0].kicked_ns.store(0, Ordering::Release);
                lines[0].publish();
                lines[0].wait();
                let kicked_ns = lines[0].kicked_ns.load(Ordering::Acquire);
                assert!(WAKE_UPS.contains(&kicked_ns), "{notify:?}: {kicked_ns} ns ago");
            }
            running.quiesce(soon()).unwrap();
        }
    }
}

#[test]
fn a_core_that_is_awake_counts_the_time_between_two_checks() {
    for ring in [RingChoice::default(), RingChoice::Without] {
        for notify in [Notify::Polled, Notify::Adaptive] {
            let clock = Arc::new(ManualClock::default());
            let core = Core::start_with(CoreId(0), settings(notify, ring), clock.clone()).unwrap();
            let (running, lines) = Counter::run(2, &core);
            lines[1].busy.store(true, Ordering::Relaxed);
            eventually("does not rest", || {
                clock.advance(Duration::from_millis(1));
                lines[0].rests()
            });
            lines[0].kicked_ns.store(0, Ordering::Release);
            lines[0].publish();
            eventually("is not served", || {
                clock.advance(Duration::from_micros(10));
                lines[0].served.load(Ordering::Acquire) > 0
            });
            let kicked_ns = lines[0].kicked_ns.load(Ordering::Acquire);
            assert!(kicked_ns >= 50_000, "{notify:?}: {kicked_ns} ns ago");
            lines[1].busy.store(false, Ordering::Relaxed);
            running.quiesce(soon()).unwrap();
        }
    }
}
