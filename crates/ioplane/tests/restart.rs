//! Ends, clean and unclean, and what is there afterwards; configurations read again.

mod daemon;

use daemon::TestDaemon;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A daemon where much has happened at run time.
fn lived_in() -> TestDaemon {
    let mut daemon = TestDaemon::new(
        "[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"a\"\npath = \"a.img\"\nserial = \"S1\"\n",
    );
    let images = ["a.img", "b.img", "c.img"].map(|name| daemon.image(name, 4 * MIB));
    daemon.start();
    daemon.json(&["core", "add", "--spin-us", "500"]);
    daemon.json(&["core", "add"]);
    daemon.json(&["core", "retire", "1"]);
    daemon.json(&["core", "mode", "polled", "--core", "0"]);
    daemon.json(&["disk", "replace", "a", "--path", &shown(&images[1])]);
    daemon.json(&[
        "disk",
        "add",
        "c",
        "--path",
        &shown(&images[2]),
        "--queues",
        "3",
        "--core",
        "2",
        "--serial",
        "C",
    ]);
    daemon.json(&["disk", "resize", "c", "5M"]);
    daemon.json(&["core", "move", "c", "2", "0"]);
    daemon.json(&["disk", "add", "m", "--memory", "8M"]);
    daemon.json(&["disk", "resize", "m", "12M"]);
    daemon.json(&["disk", "add", "gone", "--memory", "1M"]);
    daemon.json(&["disk", "remove", "gone"]);
    daemon
}

/// What of the status must survive.
fn lasting(daemon: &TestDaemon) -> serde_json::Value {
    let status = daemon.json(&["status"]);
    let pick = |value: &serde_json::Value, fields: &[&str]| -> Vec<serde_json::Value> {
        fields.iter().map(|field| value[field].clone()).collect()
    };
    let disks = status["disks"].as_array().unwrap().iter().map(|disk| {
        let fields = [
            "name",
            "state",
            "origin",
            "socket",
            "backing",
            "size",
            "read_only",
            "serial",
            "queue_size",
            "core",
        ];
        (pick(disk, &fields), disk["queues"].as_array().unwrap().len())
    });
    let disks: Vec<_> = disks.collect();
    let cores = status["cores"].as_array().unwrap().iter();
    let cores: Vec<_> = cores.map(|core| pick(core, &["id", "notify", "spin_us", "yield_policy"])).collect();
    serde_json::json!({ "disks": disks, "cores": cores })
}

#[test]
fn a_killed_daemon_comes_back_as_it_was() {
    let mut daemon = lived_in();
    let before = lasting(&daemon);
    for _ in 0..3 {
        daemon.kill9();
        assert!(daemon.path("c.sock").exists(), "left behind");
        daemon.start();
        daemon.until(|| daemon.disk("c")["state"] == "served" && daemon.disk("a")["state"] == "served");
        assert_eq!(lasting(&daemon), before);
    }
    assert_eq!(daemon.disk("a")["backing"]["path"], shown(&daemon.path("b.img")));
    drop(daemon.connect("c"));
    // The same after a clean end.
    daemon.terminate();
    assert!(!daemon.path("control.sock").exists() && !daemon.path("c.sock").exists());
    daemon.start();
    assert_eq!(lasting(&daemon), before);
}

#[test]
fn a_removed_disk_stays_removed_until_the_configuration_is_read_again() {
    let mut daemon = TestDaemon::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    daemon.json(&["disk", "remove", "a"]);
    daemon.kill9();
    daemon.start();
    assert!(daemon.disk("a").is_null());
    assert_eq!(daemon.json(&["reload"])["done"][0], "disk a added");
    daemon.kill9();
    daemon.start();
    assert_eq!(daemon.disk("a")["state"], "served");
}

#[test]
fn a_damaged_state_file_is_refused_and_kept() {
    let mut daemon = lived_in();
    daemon.kill9();
    let file = daemon.path("state.json");
    let good = std::fs::read_to_string(&file).unwrap();
    let damaged = &good[..good.len() / 3];
    std::fs::write(&file, damaged).unwrap();
    let refused = daemon.refuses();
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("state.json is damaged") && refused.err.contains("hint:"),
        "{}",
        refused.err
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), damaged, "touched");
    std::fs::write(&file, good).unwrap();
    daemon.start();
    assert_eq!(daemon.disk("c")["state"], "served");
}

#[test]
fn a_disk_whose_image_went_does_not_take_the_others_along() {
    let mut daemon = lived_in();
    daemon.kill9();
    std::fs::rename(daemon.path("c.img"), daemon.path("moved.img")).unwrap();
    daemon.start();
    daemon.until(|| daemon.disk("c")["state"] == "failed");
    assert_eq!(daemon.disk("a")["state"], "served");
    let disk = daemon.disk("c");
    assert!(disk["error"].as_str().unwrap().contains("there is no image"), "{disk}");
    // Nothing is lost: with the image back, so is the disk.
    daemon.kill9();
    std::fs::rename(daemon.path("moved.img"), daemon.path("c.img")).unwrap();
    daemon.start();
    daemon.until(|| daemon.disk("c")["state"] == "served");
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = TestDaemon::open("");
    let refused = daemon.refuses();
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("another ioplane daemon listens on"), "{}", refused.err);
    let beside = daemon.refuses_beside("other.sock");
    assert_eq!(beside.code, 1);
    let holder = format!("is in use by another ioplane daemon (pid {})", daemon.pid());
    assert!(beside.err.contains(&holder), "{}", beside.err);
    assert_eq!(daemon.json(&["status"])["pid"], daemon.pid());
}

#[test]
fn the_same_image_twice_names_the_holder() {
    let mut daemon = TestDaemon::new("[[disk]]\nname = \"a\"\npath = \"a.img\"\n");
    let image = daemon.image("a.img", MIB);
    daemon.start();
    let other = TestDaemon::open(&format!(
        "[[disk]]\nname = \"b\"\npath = {image:?}\n[[disk]]\nname = \"ok\"\nmemory = 512\n"
    ));
    other.until(|| other.disk("b")["state"] == "failed");
    let disk = other.disk("b");
    assert_eq!(disk["error"], format!("{} is in use by ioplane (pid {})", shown(&image), daemon.pid()));
    assert_eq!(disk["remedy"], "shut that down, or give this disk a copy of its own");
    assert_eq!(other.disk("ok")["state"], "served");
    // Nobody has it any more.
    daemon.terminate();
    other.until(|| other.disk("b")["state"] == "served");
}

#[test]
fn a_bad_configuration_keeps_what_is_served() {
    let daemon = TestDaemon::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let front_end = daemon.connect("a");
    daemon.configure("[[disk]]\nname = \"b\"\nmemory = \"1M\"\nquques = 2\n");
    daemon.signal("HUP");
    daemon.until(|| daemon.log().contains("the configuration was refused"));
    let log = daemon.log();
    assert!(
        log.contains("ioplane.toml:4: [[disk]] has no \"quques\"") && log.contains("write queues"),
        "{log}"
    );
    assert_eq!(daemon.disk("a")["connected"], true);
    assert!(daemon.disk("b").is_null());
    // One disk of it cannot be had: nothing of it is applied.
    daemon.configure("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n[[disk]]\nname = \"c\"\npath = \"none.img\"\n");
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("ioplane.toml:9: there is no image"), "{refused}");
    assert!(daemon.disk("b").is_null());
    drop(front_end);
}

#[test]
fn a_disk_that_cannot_be_changed_is_served_as_before() {
    let config = "[[disk]]\nname = \"a\"\npath = \"old.img\"\nserial = \"S1\"\n";
    let mut daemon = TestDaemon::new(config);
    let old = daemon.image("old.img", MIB);
    daemon.start();
    daemon.until(|| daemon.disk("a")["state"] == "served");
    daemon.configure(&config.replace("old.img", "new.img").replace("S1", "S2"));
    for _ in 0..2 {
        let refused = daemon.refused(&["reload"]);
        assert!(refused.contains("ioplane.toml:3: disk a: there is no image"), "{refused}");
        let disk = daemon.disk("a");
        let seen = (&disk["state"], &disk["serial"], disk["backing"]["path"].as_str().unwrap());
        assert_eq!(seen, (&"served".into(), &"S1".into(), old.to_str().unwrap()), "{disk}");
        drop(daemon.connect("a"));
        daemon.until(|| daemon.disk("a")["connected"] == false);
    }
    // Neither the one nor the other: that is said, and what it was is tried again.
    std::fs::remove_file(&old).unwrap();
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("disk a could not be served as before either"), "{refused}");
    assert_eq!((&daemon.disk("a")["state"], &daemon.disk("a")["serial"]), (&"failed".into(), &"S1".into()));
    daemon.image("new.img", MIB);
    assert_eq!(daemon.json(&["reload"])["done"], serde_json::json!(["disk a changed"]));
    assert_eq!(daemon.disk("a")["serial"], "S2");
}

#[test]
fn a_good_configuration_is_taken_over_and_disks_in_use_stay() {
    let daemon = TestDaemon::open(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n",
    );
    daemon.image("c.img", MIB);
    daemon.json(&["disk", "add", "own", "--memory", "1M"]);
    let front_end = daemon.connect("a");
    daemon.configure(
        "[[core]]\n[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"c\"\npath = \"c.img\"\ncore = 1\n",
    );
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("disk a is gone from the configuration, and a guest is using it"), "{refused}");
    assert!(daemon.disk("c").is_null() && daemon.disk("b")["state"] == "served");
    drop(front_end);
    daemon.until(|| daemon.disk("a")["connected"] == false);
    daemon.signal("HUP");
    daemon.until(|| daemon.log().contains("was read again"));
    assert!(daemon.disk("a").is_null() && daemon.disk("b").is_null());
    assert_eq!(
        (&daemon.disk("c")["state"], &daemon.disk("own")["state"]),
        (&"served".into(), &"served".into())
    );
    assert_eq!(daemon.json(&["core", "list"])[1]["notify"], "notified");
    assert_eq!(daemon.json(&["reload"])["done"].as_array().unwrap().len(), 0, "nothing differs");
    // A disk that changes is served anew; what the daemon stands on does not change.
    daemon.configure("[[core]]\n[[core]]\n[[disk]]\nname = \"c\"\npath = \"c.img\"\nserial = \"S2\"\n");
    assert_eq!(daemon.json(&["reload"])["done"], serde_json::json!(["disk c changed", "core 1 changed"]));
    assert_eq!(daemon.disk("c")["serial"], "S2");
    daemon.configure("[daemon]\nmetrics = \"127.0.0.1:1\"\n");
    assert!(
        daemon
            .refused(&["reload"])
            .contains("ioplane.toml:2: metrics cannot be changed while the daemon runs")
    );
}

/// A limit on the size of files (LimitFSIZE= of systemd) is an error of the write that meets it, not the end of everybody's daemon:
/// Linux sends SIGXFSZ, which kills whoever has not said otherwise.
#[test]
fn a_write_beyond_the_limit_of_file_sizes_is_an_error_of_that_write() {
    use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
    use ioplane_testkit::front::{FrontEnd, Wants};
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    use std::time::{Duration, Instant};

    for engine in ["io_uring", "threads"] {
        let mut daemon = TestDaemon::new(&format!(
            "[[core]]\nspin_us = 200\n[[disk]]\nname = \"a\"\npath = \"a.img\"\nengine = \"{engine}\"\n"
        ));
        daemon.image("a.img", 4 * MIB);
        daemon.start();
        let limit = Rlimit { current: Some(MIB), maximum: None };
        prlimit(Pid::from_raw(daemon.pid() as i32), Resource::Fsize, limit).unwrap();
        let mut front = FrontEnd::connect(&daemon.path("a.sock"), Wants::default()).unwrap();
        let mut memory = GuestMemory::new(4 * MIB).unwrap();
        let plan = DiskPlan::new(4, 65536, Shape::Direct);
        let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan).unwrap();
        front.share(&memory).unwrap();
        front.start(0, &memory, disk.place(), 0).unwrap();
        let mut write = |sector: u64, bytes: u32| {
            disk.submit(DiskOp::Write, sector, bytes).unwrap();
            front.kick(0);
            let end = Instant::now() + Duration::from_secs(60);
            while Instant::now() < end {
                if let Some(done) = disk.reap().unwrap() {
                    return Some(done.status);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        };
        assert_eq!(write(0, 4096), Some(0), "{engine}");
        assert_eq!(write(2 * MIB / 512, 4096), Some(1), "{engine}: {}", daemon.log());
        // Across the limit: its first half fits.
        assert_eq!(write(MIB / 512 - 64, 65536), Some(1), "{engine}");
        assert_eq!(write(8, 4096), Some(0), "{engine}: it goes on");
        assert!(daemon.disk("a")["totals"]["errors"]["io"].as_u64() >= Some(2), "{engine}");
    }
}
