//! What a poller has begun when its core wants to sleep, and of which no descriptor tells: the core goes on with it.

mod counter;

use std::sync::atomic::Ordering;
use std::time::Duration;

use counter::{Counter, eventually, soon};
use ioplane_cores::{Core, CoreSettings, Notify, RingChoice};
use ioplane_device::CoreId;

const PIECES: u64 = 5;

/// For each kind of core; `held`: with a request in flight, so that the poller waits for its completion.
fn on_each_core(held: bool, act: impl Fn(&counter::Line)) {
    for ring in [RingChoice::default(), RingChoice::Without] {
        for notify in [Notify::Polled, Notify::Notified, Notify::Adaptive] {
            let settings =
                CoreSettings { notify, ring, spin: Duration::from_millis(1), ..CoreSettings::default() };
            let core = Core::start(CoreId(0), settings).unwrap();
            let (running, lines) = Counter::run(1, &core);
            let line = &lines[0];
            line.tells.store(true, Ordering::Relaxed);
            if held {
                line.hold();
                line.publish();
            }
            act(line);
            eventually("what was begun is not gone on with", || {
                line.pieces.load(Ordering::Acquire) == PIECES
            });
            eventually("does not rest afterwards", || line.rests());
            if held {
                line.complete();
                line.wait();
            }
            running.quiesce(soon()).unwrap();
        }
    }
}

#[test]
fn what_comes_after_it_was_armed_is_gone_on_with() {
    for held in [false, true] {
        on_each_core(held, |line| line.come_when_armed.store(PIECES, Ordering::Release));
    }
}

#[test]
fn what_comes_while_it_rests_and_a_timer_polls_it_is_gone_on_with() {
    on_each_core(false, |line| {
        line.wakes_in_us.store(200, Ordering::Relaxed);
        line.publish();
        line.wait();
        line.come_at_rest.store(PIECES, Ordering::Release);
    });
}
