//! Where the time of I/O cores goes, told of cores and of groups, and what was decided about cores: in `status`, `top`, `group show`, and metrics.

mod daemon;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use daemon::TestDaemon;
use daemon::reader::Reader;
use serde_json::{Value, json};

/// Disk a of group web, and disk b of group idle.
const DISKS: &str = "[[group]]\nname = \"web\"\n[[group]]\nname = \"idle\"\n\
    [[disk]]\nname = \"a\"\nmemory = \"1M\"\ngroup = \"web\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\ngroup = \"idle\"\n";

/// Of a request that is some work.
const BLOCK: u32 = 256 << 10;

fn of(from: &Value, name: &str) -> u64 {
    from[name].as_u64().unwrap_or_else(|| panic!("{name}: {from}"))
}

fn used(daemon: &TestDaemon, group: &str) -> Value {
    daemon.json(&["group", "show", group])["used"].clone()
}

/// Reads until `met` says so.
fn read_until(daemon: &TestDaemon, guest: &mut Reader, mut met: impl FnMut() -> bool) {
    daemon.until(|| {
        guest.submit(16);
        guest.wait(16);
        met()
    });
}

/// An address of this host that nobody uses.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The samples of a page of metrics: family and labels, and the value.
fn metrics(address: SocketAddr) -> Vec<(String, f64)> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    samples.filter_map(sample).collect()
}

#[test]
fn the_time_of_a_core_is_told_of_the_core_and_of_each_group() {
    let address = free_address();
    let daemon = TestDaemon::open(&format!(
        "[daemon]\nmetrics = \"{address}\"\n[[core]]\nnotify = \"polled\"\nspin_us = 200000\n{DISKS}"
    ));
    let (mut guest, _idle) = (Reader::of(&daemon, "a", BLOCK), Reader::connect(&daemon, "b"));
    read_until(&daemon, &mut guest, || {
        of(&used(&daemon, "web"), "busy_us") > 1_000 && of(&used(&daemon, "idle"), "empty_us") > 1_000
    });
    // Both are polled, and one has work.
    assert_eq!(of(&used(&daemon, "idle"), "busy_us"), 0);
    assert!(of(&used(&daemon, "idle"), "empty_polls") > 0);
    let top = daemon.json(&["top", "--once", "--interval", "1s"]);
    let core = &top["cores"][0];
    let part = |name: &str| core[name].as_f64().unwrap();
    let all = part("busy_percent") + part("empty_percent") + part("asleep_percent");
    assert!((99.0..101.0).contains(&all), "{core}");
    let groups = ["idle", "web"].map(|name| {
        let mut rows = top["groups"].as_array().unwrap().iter();
        rows.find(|row| row["name"] == name).unwrap_or_else(|| panic!("{top}")).clone()
    });
    assert!(groups.iter().all(|group| group["empty_percent"].is_f64()), "{groups:?}");
    // With everything at rest the groups have what the core has.
    daemon.until(|| of(&daemon.json(&["status"])["cores"][0], "awake") == 0);
    let status = daemon.json(&["status"]);
    let core = &status["cores"][0];
    for name in ["busy_us", "empty_us"] {
        let groups = status["groups"].as_array().unwrap().iter();
        let sum: u64 = groups.map(|group| of(&group["used"], name)).sum();
        assert!(sum > 0 && sum <= of(core, name), "{name}: {sum} of {core}");
    }
    let spent: u64 = ["busy_us", "empty_us", "slept_us"].iter().map(|name| of(core, name)).sum();
    assert!(spent <= of(core, "age_us") + 3, "{core}");
    // Asleep it tells nobody, and its time asleep rises all the same.
    let slept = of(core, "slept_us");
    daemon.until(|| of(&daemon.json(&["status"])["cores"][0], "slept_us") > slept + 100_000);
    let page = metrics(address);
    let sample = |name: &str| {
        let found = page.iter().find(|(sample, _)| sample == name);
        found.unwrap_or_else(|| panic!("{name} is not in {page:#?}")).1
    };
    for name in ["busy", "empty_polling", "slept"] {
        assert!(sample(&format!("ioplane_core_{name}_seconds_total{{core=\"0\"}}")) > 0.0, "{name}");
    }
    let of_group = |what: &str| sample(&format!("ioplane_group_{what}_total{{group=\"web\",core=\"0\"}}"));
    assert!(of_group("busy_seconds") >= 0.001 && of_group("empty_polling_seconds") > 0.0);
    assert!(of_group("empty_polls") > 0.0);
    let said = daemon.cli(&["group", "show", "web"]).out;
    assert!(said.contains(" s with work; ") && said.contains("  of core 0"), "{said}");
}

#[test]
fn what_a_group_has_used_stays_when_its_queues_move_and_go_and_cores_end() {
    let daemon = TestDaemon::open(&format!("[[core]]\n[[core]]\n{DISKS}"));
    daemon.json(&["core", "move", "a", "0", "1"]);
    let mut guest = Reader::of(&daemon, "a", BLOCK);
    let on = |core: u64| {
        let group = daemon.json(&["group", "show", "web"]);
        let cores = group["used_per_core"].as_array().cloned().unwrap_or_default();
        cores.iter().find(|one| one["core"] == core).map_or(0, |one| of(one, "busy_us"))
    };
    read_until(&daemon, &mut guest, || on(1) > 500);
    daemon.json(&["core", "move", "a", "0", "0"]);
    let before = on(1);
    read_until(&daemon, &mut guest, || on(0) > 500);
    assert!(on(1) >= before);
    let whole = of(&used(&daemon, "web"), "busy_us");
    drop(guest);
    daemon.until(|| of(&daemon.json(&["status"])["cores"][0], "queues") == 0);
    daemon.json(&["core", "retire", "1"]);
    // Another core takes the place of the one that has ended.
    daemon.json(&["core", "add"]);
    let left = daemon.json(&["group", "show", "web"]);
    assert!(of(&left["used"], "busy_us") >= whole, "{whole}: {left}");
    let sum: u64 = left["used_per_core"].as_array().unwrap().iter().map(|one| of(one, "busy_us")).sum();
    assert_eq!(sum, of(&left["used"], "busy_us"), "{left}");
    // One that is made anew under the name begins with nothing.
    daemon.json(&["group", "add", "new"]);
    daemon.json(&["disk", "set", "a", "--group", "new"]);
    let mut guest = Reader::of(&daemon, "a", BLOCK);
    read_until(&daemon, &mut guest, || of(&used(&daemon, "new"), "busy_us") > 500);
    daemon.json(&["disk", "set", "a", "--group", ""]);
    daemon.json(&["group", "remove", "new"]);
    daemon.json(&["group", "add", "new"]);
    assert_eq!(used(&daemon, "new"), json!({"busy_us": 0, "empty_us": 0, "empty_polls": 0}));
}

#[test]
fn that_cores_come_and_go_and_queues_move_is_in_status_and_top_with_the_reason() {
    let with = |cores: u32| {
        format!("[pool]\nmin = {cores}\nmax = {cores}\n[[core]]\nid = 5\n[[core]]\nid = 6\n{DISKS}")
    };
    let daemon = TestDaemon::open(&with(3));
    daemon.json(&["core", "move", "a", "0", "5"]);
    let mut guest = Reader::connect(&daemon, "a");
    let mut read = || {
        guest.submit(1);
        guest.wait(1);
    };
    read();
    // The pool has started a third core; the queue leaves one that is drained; then there is one core too many.
    daemon.json(&["core", "unpin", "a", "0"]);
    daemon.json(&["core", "drain", "5"]);
    let status = || daemon.json(&["status"])["decisions"].as_array().unwrap().clone();
    let says = |word: &str, text: &str| {
        let hit = |one: &Value| one["decision"] == word && one["text"].as_str().unwrap().contains(text);
        status().iter().any(hit)
    };
    daemon.until(|| says("grow", "one core more: there are fewer than the minimum"));
    daemon.until(|| {
        read();
        says("move", "its core is being drained")
    });
    daemon.json(&["core", "open", "5"]);
    daemon.configure(&with(2));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    daemon.until(|| says("shrink", "there are more than the maximum"));
    let all = status();
    assert!(all.len() <= 16 && all.is_sorted_by_key(|one| of(one, "number")), "{all:?}");
    let top = daemon.json(&["top", "--once", "--interval", "100ms"]);
    let said = [daemon.cli(&["top", "--once", "--interval", "100ms"]).out, daemon.cli(&["status"]).out];
    for one in &all {
        // The others may be gone from the last ones meanwhile.
        if !matches!(one["decision"].as_str(), Some("grow" | "shrink")) {
            continue;
        }
        assert!(top["decisions"].as_array().unwrap().contains(one), "{one} is not in {top}");
        for said in &said {
            assert!(said.contains(one["text"].as_str().unwrap()), "{one} is not in\n{said}");
        }
    }
}
