//! What is asked of a core of a real daemon, a p99 and a ceiling: kept where that is possible, and told where it is not.

mod daemon;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemon::TestDaemon;
use daemon::reader::Reader;
use serde_json::{Value, json};

const CONFIG: &str =
    "[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n";

/// Keeps `at_once` requests of a guest coming, with a pause after each answer to all of them, for as long as `during` takes.
fn while_reading<T>(guest: &mut Reader, at_once: usize, pause: Duration, during: impl FnOnce() -> T) -> T {
    /// Ends the guest also where `during` panics.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                guest.submit(at_once);
                guest.wait(at_once);
                std::thread::sleep(pause);
            }
        });
        let ends = Over(&over);
        let done = during();
        drop(ends);
        reading.join().unwrap();
        done
    })
}

fn core(daemon: &TestDaemon) -> Value {
    daemon.json(&["core", "list"])[0].clone()
}

/// Waits until the core says one of `words` of what is asked of it.
fn until_it_says(daemon: &TestDaemon, words: &[&str]) -> Value {
    let mut said = Value::Null;
    daemon.until(|| {
        said = core(daemon);
        words.iter().any(|word| said["objective"] == *word)
    });
    said
}

/// How often queue 0 of disk `b` was armed since the ceiling of its core forbids to poll it.
fn armed_by_ceiling(daemon: &TestDaemon) -> u64 {
    let disk = daemon.disk("b");
    let counts = disk["queues"][0]["choice"]["counts"].as_array().unwrap().iter();
    let of = counts.filter(|count| count["choice"] == "armed" && count["reason"] == "ceiling");
    of.map(|count| count["times"].as_u64().unwrap()).sum()
}

#[test]
fn a_latency_is_kept_where_it_can_be_and_told_to_be_late_where_it_cannot() {
    let daemon = TestDaemon::open(CONFIG);
    let mut guest = Reader::of(&daemon, "a", 512 << 10);
    let set = daemon.json(&["core", "set", "0", "--p99-us", "1000000"]);
    assert_eq!((&set["p99_us"], &set["cpu_percent"]), (&json!(1_000_000), &Value::Null));
    while_reading(&mut guest, 16, Duration::ZERO, || {
        let said = until_it_says(&daemon, &["kept"]);
        assert!(said["missed_percent"].as_f64().unwrap() <= 1.0, "{said}");
        // While one request is copied, which takes longer, the others wait.
        daemon.json(&["core", "set", "0", "--p99-us", "1"]);
        let said = until_it_says(&daemon, &["late_by_load"]);
        assert!(said["missed_percent"].as_f64().unwrap() > 1.0, "{said}");
        let shown = daemon.cli(&["core", "list"]).out;
        // It enters the log of decisions when it has lasted for some seconds.
        daemon.until(|| {
            let (_, log) = daemon.http("GET", "/v1/pool/decisions", "");
            log["decisions"].as_array().unwrap().iter().any(|one| one["decision"] == "objective")
        });
        assert!(shown.contains("late"), "{shown}");
        let said = daemon.json(&["core", "set", "0", "--notify", "polled"]);
        assert_eq!(said["p99_us"], 1);
        until_it_says(&daemon, &["unheeded"]);
        daemon.json(&["core", "set", "0", "--notify", "adaptive", "--p99-us", "1000000"]);
        until_it_says(&daemon, &["kept"]);
    });
    let set = daemon.json(&["core", "set", "0", "--p99-us", "0"]);
    assert_eq!((&set["p99_us"], &set["objective"]), (&Value::Null, &json!("unknown")));
}

#[test]
fn a_ceiling_wins_over_a_latency_and_bounds_polling_and_not_work() {
    let daemon = TestDaemon::open(CONFIG);
    let mut guest = Reader::of(&daemon, "a", 512 << 10);
    let set = daemon.json(&["core", "set", "0", "--p99-us", "1", "--cpu-percent", "1"]);
    assert_eq!((&set["p99_us"], &set["cpu_percent"]), (&json!(1), &json!(1)));
    // Work alone is more than the ceiling: it is done all the same, and said.
    while_reading(&mut guest, 16, Duration::ZERO, || {
        let said = until_it_says(&daemon, &["over_ceiling"]);
        assert!(said["missed_percent"].as_f64().unwrap() > 0.0, "{said}");
    });
    // Work that a fifth of a processor has time for, where polling for the latency would take all of it. Many requests at once, since nothing is said of less than a
    // hundred in a second.
    let mut guest = Reader::of(&daemon, "b", 512);
    daemon.json(&["core", "set", "0", "--cpu-percent", "20"]);
    let before = armed_by_ceiling(&daemon);
    while_reading(&mut guest, 64, Duration::from_millis(1), || {
        // Where others take this machine's time from the core while it works, its work seems to be more than the ceiling.
        let said = until_it_says(&daemon, &["late_by_ceiling", "over_ceiling"]);
        assert!(said["missed_percent"].as_f64().unwrap() > 0.0, "{said}");
        daemon.until(|| armed_by_ceiling(&daemon) > before);
        // Without the ceiling nothing forbids to poll. What is said to be kept is what is asked now.
        daemon.json(&["core", "set", "0", "--cpu-percent", "0", "--p99-us", "1000000"]);
        until_it_says(&daemon, &["kept"]);
        let forbidden = armed_by_ceiling(&daemon);
        for _ in 0..3 {
            daemon.json(&["core", "list"]);
        }
        assert_eq!(armed_by_ceiling(&daemon), forbidden, "a ceiling that is gone forbids to poll");
    });
}
