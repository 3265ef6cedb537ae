//! `ioplane explain` with a real daemon: what is planted is found, and nothing else. (`crates/explain/tests` has each cause.)

mod daemon;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemon::TestDaemon;
use daemon::reader::Reader;
use ioplane_testkit::driver::spec::VIRTIO_F_EVENT_IDX;
use ioplane_testkit::front::Wants;
use serde_json::Value;

/// A core that is never awake for nothing: whether this machine is busy is not what is tested.
const CORE: &str = "[[core]]\nnotify = \"notified\"\n";

/// What is found while a guest reads: one request at a time, or as many as it has room for.
fn found_while_reading(daemon: &TestDaemon, mut guest: Reader, at_once: usize) -> Value {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                guest.submit(at_once);
                guest.reap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let report = daemon.json(&["explain", "a", "--interval", "1s"]);
        over.store(true, Ordering::Release);
        report
    })
}

fn causes(report: &Value) -> Vec<&str> {
    report["findings"].as_array().unwrap().iter().map(|finding| finding["cause"].as_str().unwrap()).collect()
}

#[test]
fn a_healthy_disk_has_nothing_that_stands_out() {
    let daemon = TestDaemon::open(&format!("{CORE}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    let guest = Reader::connect(&daemon, "a");
    let report = found_while_reading(&daemon, guest, 1);
    assert_eq!(causes(&report), [""; 0], "{report}");
    assert!(report["devices"][0]["units_per_s"].as_f64() > Some(50.0), "{report}");
    assert!(report["seconds"].as_f64() >= Some(1.0), "{report}");
    let said = daemon.cli(&["explain", "a", "--interval", "1s"]);
    assert!(said.out.contains("no requests in this time"), "{}", said.out);
}

#[test]
fn a_limit_that_bites_is_found() {
    let config =
        format!("{CORE}[[disk]]\nname = \"a\"\nmemory = \"1M\"\niops_limit = 200\niops_burst = 10\n");
    let daemon = TestDaemon::open(&config);
    let guest = Reader::connect(&daemon, "a");
    let report = found_while_reading(&daemon, guest, 64);
    assert_eq!(causes(&report), ["limit"], "{report}");
    let finding = &report["findings"][0];
    assert!(finding["remedy"].as_str().unwrap().contains("disk set a --iops-limit"), "{finding}");
}

#[test]
fn a_driver_without_event_idx_is_found() {
    let daemon = TestDaemon::open(&format!("{CORE}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    let features = Wants::default().features & !VIRTIO_F_EVENT_IDX;
    let guest = Reader::connect_with(&daemon, "a", Wants { features, ..Wants::default() });
    let report = found_while_reading(&daemon, guest, 1);
    assert_eq!(causes(&report), ["no_event_idx"], "{report}");
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let daemon = TestDaemon::open(&format!("{CORE}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    for (path, status, field) in [
        ("/v1/explain/nobody", 404, ""),
        ("/v1/explain/a?seconds=0", 422, "seconds"),
        ("/v1/explain/a?seconds=601", 422, "seconds"),
        ("/v1/explain/a?seconds=x", 422, "seconds"),
        ("/v1/explain/a?minutes=1", 422, "minutes"),
    ] {
        let (got, answer) = daemon.http("GET", path, "");
        assert_eq!((got, answer["field"].as_str().unwrap_or_default()), (status, field), "{path}: {answer}");
    }
}
