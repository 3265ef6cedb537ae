//! What is missing: the others are served, and it is tried again.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn metrics(port: u16) -> String {
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    daemon::http(stream, "GET", "/metrics", "").1
}

fn named<'v>(status: &'v Value, kind: &str, name: &str) -> &'v Value {
    let mut all = status[kind].as_array().unwrap().iter();
    all.find(|one| one["name"] == name).unwrap_or(&Value::Null)
}

/// On a first start, as after every reboot: an image, an uplink and a PCI function are not there.
#[test]
fn hole_17_one_missing_disk_leaves_the_others_served() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut daemon = TestDaemon::new(&format!(
        "[daemon]\nmetrics = \"127.0.0.1:{port}\"\n[[disk]]\nname = \"there\"\npath = \"there.img\"\n\
         [[disk]]\nname = \"late\"\npath = \"late.img\"\n\
         [[switch]]\nname = \"lan\"\nuplink = \"lo\"\n\
         [[nic]]\nname = \"eth\"\nswitch = \"lan\"\n[[pci]]\nname = \"card\"\nhost = \"0000:ff:1f.7\"\n"
    ));
    daemon.image("there.img", MIB);
    daemon.start();
    daemon.until(|| daemon.disk("late")["state"] == "failed");
    let status = daemon.json(&["status"]);
    assert_eq!(named(&status, "disks", "there")["state"], "served", "{status}");
    assert_eq!(named(&status, "nics", "eth")["state"], "served", "{status}");
    for (kind, name) in [("disks", "late"), ("switches", "lan"), ("functions", "card")] {
        let one = named(&status, kind, name);
        assert!(one["error"].is_string() && one["remedy"].is_string(), "{one}");
        assert!(one["retry"]["tries"].as_u64().unwrap() >= 1, "{one}");
        assert!(one["retry"]["next_ms"].is_u64(), "{one}");
    }
    drop(daemon.connect("there"));
    // Everybody is told: the reason, and when it is tried again.
    let reason = format!("there is no image {}", daemon.path("late.img").display());
    for command in [&["status"][..], &["disk", "list"], &["top", "--once"], &["doctor"]] {
        let said = daemon.cli(command).out;
        let line =
            said.lines().find(|line| line.contains(&reason)).unwrap_or_else(|| panic!("{command:?}: {said}"));
        assert!(line.contains("tried ") && line.contains("again"), "{command:?}: {line}");
    }
    let text = metrics(port);
    for line in [
        "ioplane_disk_failed{device=\"late\"} 1",
        "ioplane_disk_failed{device=\"there\"} 0",
        "ioplane_not_served{device=\"late\",kind=\"disk\"} 1",
        "ioplane_not_served{device=\"lan\",kind=\"switch\"} 1",
        "ioplane_not_served{device=\"card\",kind=\"pci\"} 1",
        "ioplane_next_try_seconds{device=\"late\",kind=\"disk\"} ",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    // A reload works meanwhile, and says what still fails.
    let config = std::fs::read_to_string(daemon.path("ioplane.toml")).unwrap();
    daemon.configure(&(config.clone() + "[[disk]]\nname = \"more\"\nmemory = \"1M\"\n"));
    let done = daemon.json(&["reload"])["done"].to_string();
    assert!(done.contains("disk more added") && done.contains("disk late still not served"), "{done}");
    assert_eq!(daemon.disk("more")["state"], "served");
    // What was missing comes, and nobody says so.
    let tries = daemon.disk("late")["retry"]["tries"].as_u64().unwrap();
    daemon.until(|| daemon.disk("late")["retry"]["tries"].as_u64().unwrap() > tries);
    daemon.image("late.img", MIB);
    daemon.until(|| daemon.disk("late")["state"] == "served");
    assert_eq!(daemon.disk("late")["retry"], Value::Null);
    drop(daemon.connect("late"));
    assert!(!metrics(port).contains("ioplane_not_served{device=\"late\""));
}

#[test]
fn hole_17_a_malformed_configuration_still_refuses_the_start() {
    let daemon = TestDaemon::new("[[disk]]\nname = \"a\"\npath = \"none.img\"\nquques = 2\n");
    let refused = daemon.refuses();
    assert_eq!(refused.code, 2, "{}", refused.err);
    assert!(refused.err.contains("ioplane.toml:4: [[disk]] has no \"quques\""), "{}", refused.err);
    assert!(!daemon.path("control.sock").exists() && !daemon.path("state.json").exists());
}

/// What has failed can be taken away, given another image, and goes to a successor, as failed.
#[test]
fn hole_17_what_has_failed_can_be_changed_and_handed_over() {
    let mut daemon = TestDaemon::new(
        "[[disk]]\nname = \"a\"\npath = \"a.img\"\n[[disk]]\nname = \"b\"\npath = \"b.img\"\n",
    );
    daemon.start();
    daemon.until(|| daemon.disk("a")["state"] == "failed" && daemon.disk("b")["state"] == "failed");
    let upgraded = || daemon.cli(&["upgrade"]);
    let end = Instant::now() + Duration::from_secs(60);
    // A try that is under way is waited for by asking again.
    while upgraded().code != 0 {
        assert!(Instant::now() < end, "{}", daemon.log());
    }
    assert_eq!(daemon.disk("a")["state"], "failed");
    daemon.json(&["disk", "remove", "b"]);
    assert!(daemon.disk("b").is_null());
    daemon.image("other.img", MIB);
    daemon.configure("[[disk]]\nname = \"a\"\npath = \"other.img\"\n");
    assert_eq!(daemon.json(&["reload"])["done"][0], "disk a changed");
    assert_eq!(daemon.disk("a")["state"], "served");
    daemon.kill_whoever_answers();
}
