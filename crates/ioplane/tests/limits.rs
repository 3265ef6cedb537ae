//! Limits of disks and NICs of a real daemon: given, shown, changed while a guest uses them, kept.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use daemon::nic::{Arrived, Flow, NicGuest, exchange, nic};
use daemon::reader::Reader;
use serde_json::{Value, json};

/// The limits of a disk as its report has them.
fn limits(report: &Value) -> [&Value; 4] {
    ["iops_limit", "iops_burst", "bandwidth_limit", "bandwidth_burst"].map(|field| &report[field])
}

#[test]
fn a_guest_gets_what_its_limit_allows_and_all_when_that_is_taken_away() {
    let daemon = TestDaemon::open("[[core]]\nspin_us = 500\n");
    let words = ["disk", "add", "a", "--memory", "1M", "--iops-limit", "200", "--iops-burst", "10"];
    let added = daemon.json(&words);
    assert_eq!(limits(&added), [&json!(200), &json!(10), &Value::Null, &Value::Null]);
    let mut guest = Reader::connect(&daemon, "a");
    let began = Instant::now();
    for _ in 0..4 {
        guest.submit(25);
        guest.wait(25);
    }
    // The burst, one more, and the rest at their rate.
    let least = Duration::from_secs(100 - 11) / 200;
    assert!(began.elapsed() >= least, "100 requests in {:?}", began.elapsed());
    // One per second: 60 requests do not come in the time that the test waits.
    daemon.json(&["disk", "set", "a", "--iops-limit", "1", "--iops-burst", "1"]);
    guest.submit(60);
    let early = guest.reap();
    assert!(early <= 3, "{early} answers at once");
    let said = daemon.cli(&["disk", "set", "a", "--iops-limit", "0"]);
    assert!(said.out.contains("limits") && said.out.contains("none"), "{}", said.out);
    guest.wait(60 - early);
    assert_eq!(limits(&daemon.disk("a")), [&Value::Null; 4]);
    assert_eq!(daemon.disk("a")["connected"], true);
}

#[test]
fn limits_of_a_configuration_change_by_a_reload_while_a_guest_uses_the_disk() {
    let config = |more: &str| format!("[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n{more}");
    let mut daemon = TestDaemon::open(&config("bandwidth_limit = \"1M\"\nbandwidth_burst = \"64K\"\n"));
    let mut guest = Reader::connect(&daemon, "a");
    guest.submit(1);
    guest.wait(1);
    daemon.configure(&config("iops_limit = 1\n"));
    let said = daemon.cli(&["reload"]);
    assert!(said.code == 0 && said.out.contains("disk a changed"), "{}{}", said.out, said.err);
    let none = Value::Null;
    assert_eq!(limits(&daemon.disk("a")), [&json!(1), &none, &none, &none]);
    guest.submit(60);
    std::thread::sleep(Duration::from_millis(50));
    assert!(guest.reap() < 10);
    // What is set at run time stays, through a death of the daemon too.
    daemon.json(&["disk", "set", "a", "--iops-limit", "5", "--bandwidth-limit", "10M"]);
    daemon.kill9();
    daemon.start();
    assert_eq!(limits(&daemon.disk("a")), [&json!(5), &none, &json!(10 << 20), &none]);
    // A field that the configuration changes is the configuration's again; others stay as they were set.
    daemon.configure(&config("iops_limit = 7\n"));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    assert_eq!(limits(&daemon.disk("a")), [&json!(7), &none, &json!(10 << 20), &none]);
    let shown = daemon.cli(&["disk", "show", "a"]).out;
    let words = "7 requests per second (burst 1), 10M per second (burst 1M)";
    assert!(shown.contains(words), "{shown}");
}

#[test]
fn a_burst_that_a_reload_leaves_alone_is_read_by_the_next_daemon() {
    let config = |more: &str| format!("[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n{more}");
    let mut daemon = TestDaemon::open(&config("iops_limit = 100\n"));
    daemon.json(&["disk", "set", "a", "--iops-burst", "30"]);
    daemon.configure(&config(""));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    let none = Value::Null;
    assert_eq!(limits(&daemon.disk("a")), [&none, &json!(30), &none, &none]);
    daemon.kill9();
    daemon.start();
    assert_eq!(limits(&daemon.disk("a")), [&none, &json!(30), &none, &none]);
}

#[test]
fn what_makes_no_sense_is_refused_by_field() {
    let daemon = TestDaemon::open(
        "[[core]]\n[[switch]]\nname = \"lan\"\n[[nic]]\nname = \"n\"\nswitch = \"lan\"\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\n",
    );
    let field = |method: &str, path: &str, body: Value| {
        let (status, answer) = daemon.http(method, path, &body.to_string());
        assert!((400..500).contains(&status), "{path} {body}: {status} {answer}");
        answer["field"].as_str().unwrap_or_default().to_owned()
    };
    let disk = |body| field("PATCH", "/v1/disks/a", body);
    assert_eq!(disk(json!({"iops_burst": 5})), "iops_burst");
    assert_eq!(disk(json!({"bandwidth_limit": 100})), "bandwidth_limit");
    assert_eq!(disk(json!({"iops_limit": -1})), "iops_limit");
    assert_eq!(disk(json!({"iops_limit": 5, "size": "2M"})), "");
    assert_eq!(limits(&daemon.disk("a")), [&Value::Null; 4]);
    let nic = |body| field("PATCH", "/v1/nics/n", body);
    assert_eq!(nic(json!({})), "");
    assert_eq!(nic(json!({"rx_bandwidth_burst": "1M"})), "rx_bandwidth_burst");
    assert_eq!(nic(json!({"tx_frame_limit": u64::MAX})), "tx_frame_limit");
    let put = field("PUT", "/v1/disks/b", json!({"memory": "1M", "bandwidth_burst": 1}));
    assert_eq!(put, "bandwidth_burst");
    // A PUT that differs in a limit is refused as any that differs.
    assert_eq!(field("PUT", "/v1/disks/a", json!({"memory": "1M", "iops_limit": 9})), "iops_limit");
}

#[test]
fn a_nic_has_limits_for_each_direction() {
    let daemon = TestDaemon::open("[[core]]\n[[switch]]\nname = \"lan\"\n");
    let added = daemon.json(&["nic", "add", "n", "--switch", "lan", "--tx-frame-limit", "1000"]);
    assert_eq!((&added["tx_frame_limit"], &added["rx_frame_limit"]), (&json!(1000), &Value::Null));
    let words =
        ["nic", "set", "n", "--rx-bandwidth-limit", "125M", "--tx-frame-limit", "0", "--link", "down"];
    let set = daemon.json(&words);
    assert_eq!((&set["tx_frame_limit"], &set["rx_bandwidth_limit"]), (&Value::Null, &json!(125 << 20)));
    assert_eq!(set["link"], "down");
    let shown = daemon.cli(&["nic", "show", "n"]).out;
    assert!(shown.contains("receive limits") && !shown.contains("send limits"), "{shown}");
    assert!(shown.contains("125M per second (burst 12.5M)"), "{shown}");
    let saved = daemon.cli(&["config", "save", "--print"]).out;
    assert!(saved.contains("rx_bandwidth_limit = \"125M\""), "{saved}");
}

/// What a limit allows.
#[derive(Debug, Clone, Copy)]
struct Allowed {
    per_second: u64,
    burst: u64,
    /// Bytes are limited, and not frames.
    bytes: bool,
}

/// A limit in the words of `nic set` and `group set`, a burst of a twentieth of a second, and the queue of a NIC that it holds back.
const NIC_LIMITS: [(&str, Allowed, usize); 4] = [
    ("tx-frame", Allowed { per_second: 200, burst: 10, bytes: false }, 1),
    ("rx-frame", Allowed { per_second: 200, burst: 10, bytes: false }, 0),
    ("tx-bandwidth", Allowed { per_second: 256 << 10, burst: 12 << 10, bytes: true }, 1),
    ("rx-bandwidth", Allowed { per_second: 256 << 10, burst: 12 << 10, bytes: true }, 0),
];
/// Of a frame that is counted by its bytes.
const LARGE: usize = 1400;

impl Allowed {
    /// Sets or takes away limit `name` of a NIC or a group.
    fn set(self, daemon: &TestDaemon, of: &[&str], name: &str, on: bool) {
        let (limit, burst) = (format!("--{name}-limit"), format!("--{name}-burst"));
        let (rate, most) = (self.per_second.to_string(), self.burst.to_string());
        let words: Vec<&str> = if on { vec![&limit, &rate, &burst, &most] } else { vec![&limit, "0"] };
        daemon.json(&[of, &words].concat());
    }

    fn frame_bytes(self) -> usize {
        if self.bytes { LARGE } else { 100 }
    }

    /// Frames that take seven tenths of a second at least.
    fn frames(self) -> u64 {
        let units = self.per_second * 3 / 4;
        if self.bytes { units / LARGE as u64 } else { units }
    }

    /// No more has come than the rate, the burst and one frame. What comes late is only less.
    fn check(self, what: &str, arrived: Arrived) {
        let (units, one) = if self.bytes { (arrived.bytes, LARGE as u64) } else { (arrived.frames, 1) };
        let most = self.per_second as f64 * arrived.within.as_secs_f64() + (self.burst + one) as f64;
        assert!(units as f64 <= most, "{what}: {arrived:?}, {most} at most");
    }
}

/// How often a limit has held back each queue of a NIC, and whether frames, or else bytes, were limited.
fn held_back(daemon: &TestDaemon, nic: &str) -> Vec<(u64, u64)> {
    let shown = daemon.json(&["nic", "show", nic]);
    let times = |queue: &Value, reason: &str| {
        let counts = queue["choice"]["counts"].as_array().unwrap();
        let of = counts.iter().filter(|count| count["choice"] == "held" && count["reason"] == reason);
        of.map(|count| count["times"].as_u64().unwrap()).sum()
    };
    let queues = shown["queues"].as_array().unwrap().iter();
    queues.map(|queue| (times(queue, "request_limit"), times(queue, "byte_limit"))).collect()
}

/// Waits until the daemon says that such a limit has held back `queue` of a NIC; no other queue of it was held back, and by no other limit.
fn was_held_back(daemon: &TestDaemon, nic: &str, queue: usize, allowed: Allowed) {
    let is = |(frames, bytes): (u64, u64)| {
        if allowed.bytes { bytes > 0 && frames == 0 } else { frames > 0 && bytes == 0 }
    };
    daemon.until(|| is(held_back(daemon, nic)[queue]));
    let held = held_back(daemon, nic);
    let others = held.iter().enumerate().filter(|(at, _)| *at != queue);
    assert!(others.clone().all(|(_, held)| *held == (0, 0)), "{nic}: {held:?}");
}

#[test]
fn frames_pass_at_the_rate_of_a_nic_and_no_faster_in_either_direction() {
    for (name, allowed, queue) in NIC_LIMITS {
        let config = ["[[core]]\n[[switch]]\nname = \"lan\"\n", &nic("a", 0, ""), &nic("b", 1, "")].concat();
        let daemon = TestDaemon::open(&config);
        let (limited, other) = if queue == 1 { ("a", "b") } else { ("b", "a") };
        allowed.set(&daemon, &["nic", "set", limited], name, true);
        let mut guests = ["a", "b"].map(|name| NicGuest::plug_in(&daemon, name));
        // What the limit is not for passes as it comes, though it is more than the limit.
        let free = allowed.frames();
        exchange(&mut guests, &mut [Flow::new(1, 0)], (allowed.frame_bytes(), free), |_| {});
        assert!(held_back(&daemon, limited).iter().all(|held| *held == (0, 0)), "{name}");
        let mut flow = [Flow::new(0, 1)];
        let amount = (allowed.frame_bytes(), allowed.frames());
        exchange(&mut guests, &mut flow, amount, |arrived| allowed.check(name, arrived));
        was_held_back(&daemon, limited, queue, allowed);
        assert!(held_back(&daemon, other).iter().all(|held| *held == (0, 0)), "{name}: {other} has no limit");
    }
}

#[test]
fn limits_of_a_nic_change_by_a_reload_while_a_guest_uses_it() {
    let config = |keys: &str| {
        ["[[core]]\n[[switch]]\nname = \"lan\"\n", &nic("a", 0, keys), &nic("b", 1, "")].concat()
    };
    let daemon = TestDaemon::open(&config(""));
    let mut guests = ["a", "b"].map(|name| NicGuest::plug_in(&daemon, name));
    for (name, allowed, queue) in NIC_LIMITS {
        let key = name.replace('-', "_");
        let Allowed { per_second, burst, .. } = allowed;
        daemon.configure(&config(&format!("{key}_limit = {per_second}\n{key}_burst = {burst}\n")));
        let said = daemon.cli(&["reload"]);
        assert!(said.code == 0 && said.out.contains("nic a changed"), "{}{}", said.out, said.err);
        assert_eq!(daemon.json(&["nic", "show", "a"])[format!("{key}_limit")], per_second);
        // Frames from a are what it sends, those to a what it receives.
        let mut flow = [if queue == 1 { Flow::new(0, 1) } else { Flow::new(1, 0) }];
        let amount = (allowed.frame_bytes(), allowed.frames());
        exchange(&mut guests, &mut flow, amount, |arrived| allowed.check(name, arrived));
    }
    daemon.configure(&config(""));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    assert_eq!(daemon.json(&["nic", "show", "a"])["rx_bandwidth_limit"], Value::Null);
}

#[test]
fn a_limit_of_a_nic_goes_while_frames_wait_for_it() {
    let config = ["[[core]]\n[[switch]]\nname = \"lan\"\n", &nic("a", 0, ""), &nic("b", 1, "")].concat();
    let daemon = TestDaemon::open(&config);
    let mut guests = ["a", "b"].map(|name| NicGuest::plug_in(&daemon, name));
    let mut flow = [Flow::new(0, 1)];
    for (name, _, queue) in NIC_LIMITS.into_iter().filter(|(_, allowed, _)| !allowed.bytes) {
        // Four minutes, which is longer than `exchange` waits for a frame in vain after the limit is gone.
        let allowed = Allowed { per_second: 1, burst: 1, bytes: false };
        let limited = ["nic", "set", if queue == 1 { "a" } else { "b" }];
        allowed.set(&daemon, &limited, name, true);
        let mut waits = true;
        let began = Instant::now();
        exchange(&mut guests, &mut flow, (100, 240), |arrived| {
            if waits {
                allowed.check(name, arrived);
                if held_back(&daemon, limited[2])[queue].0 > 0 {
                    allowed.set(&daemon, &limited, name, false);
                    waits = false;
                }
            }
        });
        assert!(!waits && began.elapsed() < Duration::from_secs(230), "{name}: the limit stays");
    }
}

#[test]
fn the_nics_of_a_group_share_its_limit_over_cores() {
    let config = [
        "[[core]]\n[[core]]\nid = 1\n[[group]]\nname = \"web\"\n[[switch]]\nname = \"lan\"\n",
        &nic("a", 0, "core = 0\ngroup = \"web\""),
        &nic("b", 1, "core = 1\ngroup = \"web\""),
        &nic("c", 2, ""),
    ]
    .concat();
    for (name, allowed, queue) in NIC_LIMITS {
        let daemon = TestDaemon::open(&config);
        allowed.set(&daemon, &["group", "set", "web"], name, true);
        let mut guests = ["a", "b", "c"].map(|name| NicGuest::plug_in(&daemon, name));
        let mut flows = match queue {
            1 => [Flow::new(0, 2), Flow::new(1, 2)],
            _ => [Flow::new(2, 0), Flow::new(2, 1)],
        };
        // Each of both sends half, and together they have one limit and one burst.
        let amount = (allowed.frame_bytes(), allowed.frames() / 2 + 1);
        exchange(&mut guests, &mut flows, amount, |arrived| allowed.check(name, arrived));
        for nic in ["a", "b"] {
            was_held_back(&daemon, nic, queue, allowed);
        }
        assert!(held_back(&daemon, "c").iter().all(|held| *held == (0, 0)), "{name}: c is in no group");
    }
}
