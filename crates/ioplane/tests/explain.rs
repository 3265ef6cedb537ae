//! `ioplane explain` with a real daemon: what is planted is found, and nothing else. (`crates/explain/tests` has each cause.)

mod daemon;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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

/// Reads now and then until `there` finds what it looks for in the log of decisions.
fn decision(
    daemon: &TestDaemon,
    guest: &mut Reader,
    at_once: usize,
    there: impl Fn(&Value) -> bool,
) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        guest.submit(at_once);
        std::thread::sleep(Duration::from_millis(2));
        guest.reap();
        let (_, log) = daemon.http("GET", "/v1/pool/decisions?from=0", "");
        if let Some(found) = log["decisions"].as_array().unwrap().iter().find(|one| there(one)) {
            return found.clone();
        }
        assert!(Instant::now() < deadline, "was not decided: {log}");
    }
}

#[test]
fn how_a_queue_is_served_is_told_with_the_reason() {
    let disk = "[[core]]\nnotify = \"adaptive\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";
    let daemon = TestDaemon::open(disk);
    let mut guest = Reader::connect(&daemon, "a");
    // One request every few ms: the driver is asked to kick.
    let found = decision(&daemon, &mut guest, 1, |one| one["decision"] == "arm");
    assert_eq!((&found["device"], &found["queue"], &found["from"]), (&"a".into(), &0.into(), &0.into()));
    let text = found["text"].as_str().unwrap();
    assert!(text.starts_with("a queue 0: armed ") && text.contains(", since "), "{text}");
    let report = found_while_reading(&daemon, guest, 1);
    let said = report["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{report}"));
    assert!(said.starts_with("armed most of the time (") && said.contains(", since "), "{report}");
    assert_eq!(causes(&report), [""; 0], "{report}");
    // The same in the other places, of the queue of another front end.
    let mut guest = Reader::connect(&daemon, "a");
    decision(&daemon, &mut guest, 1, |_| true);
    let (_, disk) = daemon.http("GET", "/v1/disks/a", "");
    let choice = &disk["queues"][0]["choice"];
    let counts = choice["counts"].as_array().unwrap();
    assert!(
        counts.iter().any(|count| count["choice"] == "armed" && count["us"].as_u64() > Some(0)),
        "{choice}"
    );
    assert!(daemon.cli(&["disk", "show", "a"]).out.contains("polled "), "{disk}");
    assert!(daemon.cli(&["core", "decisions"]).out.contains("a queue 0: armed "));
    let top = daemon.json(&["top", "--once", "--interval", "1s"]);
    assert_eq!(top["queues"][0]["armed_percent"].as_f64().map(f64::round), Some(100.0), "{top}");
}

#[test]
fn a_limit_that_begins_to_bite_and_ends_is_in_the_log() {
    let config =
        format!("{CORE}[[disk]]\nname = \"a\"\nmemory = \"1M\"\niops_limit = 200\niops_burst = 10\n");
    let daemon = TestDaemon::open(&config);
    let mut guest = Reader::connect(&daemon, "a");
    let found = decision(&daemon, &mut guest, 64, |one| one["decision"] == "throttle");
    let text = found["text"].as_str().unwrap();
    assert!(text.contains("since a limit of requests per second holds them back"), "{text}");
    assert_eq!(found["device"], "a");
    daemon.cli(&["disk", "set", "a", "--iops-limit", "0"]);
    let ended = decision(&daemon, &mut guest, 64, |one| {
        one["decision"] == "throttle" && one["number"].as_u64() > found["number"].as_u64()
    });
    assert!(ended["text"].as_str().unwrap().contains("throttled no longer"), "{ended}");
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
