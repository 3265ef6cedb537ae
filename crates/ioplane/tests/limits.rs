//! Limits of disks and NICs of a real daemon: given, shown, changed while a guest uses them, kept.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
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
