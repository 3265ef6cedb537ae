//! Ends, clean and unclean, and what is there afterwards; configurations read again.

mod house;

use house::House;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A house where much has happened at run time.
fn lived_in() -> House {
    let mut house = House::new(
        "[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"a\"\npath = \"a.img\"\nserial = \"S1\"\n",
    );
    let images = ["a.img", "b.img", "c.img"].map(|name| house.image(name, 4 * MIB));
    house.start();
    house.json(&["core", "add", "--spin-us", "500"]);
    house.json(&["core", "add"]);
    house.json(&["core", "retire", "1"]);
    house.json(&["core", "mode", "polled", "--core", "0"]);
    house.json(&["disk", "replace", "a", "--path", &shown(&images[1])]);
    house.json(&[
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
    house.json(&["disk", "resize", "c", "5M"]);
    house.json(&["core", "move", "c", "2", "0"]);
    house.json(&["disk", "add", "m", "--memory", "8M"]);
    house.json(&["disk", "resize", "m", "12M"]);
    house.json(&["disk", "add", "gone", "--memory", "1M"]);
    house.json(&["disk", "remove", "gone"]);
    house
}

/// What of the status must survive.
fn lasting(house: &House) -> serde_json::Value {
    let status = house.json(&["status"]);
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
    let cores: Vec<_> = cores.map(|core| pick(core, &["id", "notify", "spin_us", "manners"])).collect();
    serde_json::json!({ "disks": disks, "cores": cores })
}

#[test]
fn a_killed_daemon_comes_back_as_it_was() {
    let mut house = lived_in();
    let before = lasting(&house);
    for _ in 0..3 {
        house.kill9();
        assert!(house.path("c.sock").exists(), "left behind");
        house.start();
        house.until(|| house.disk("c")["state"] == "served" && house.disk("a")["state"] == "served");
        assert_eq!(lasting(&house), before);
    }
    assert_eq!(house.disk("a")["backing"]["path"], shown(&house.path("b.img")));
    drop(house.connect("c"));
    // The same after a clean end.
    house.terminate();
    assert!(!house.path("control.sock").exists() && !house.path("c.sock").exists());
    house.start();
    assert_eq!(lasting(&house), before);
}

#[test]
fn a_removed_disk_stays_removed_until_the_configuration_is_read_again() {
    let mut house = House::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    house.json(&["disk", "remove", "a"]);
    house.kill9();
    house.start();
    assert!(house.disk("a").is_null());
    assert_eq!(house.json(&["reload"])["done"][0], "disk a added");
    house.kill9();
    house.start();
    assert_eq!(house.disk("a")["state"], "served");
}

#[test]
fn a_damaged_state_file_is_refused_and_kept() {
    let mut house = lived_in();
    house.kill9();
    let file = house.path("state.json");
    let good = std::fs::read_to_string(&file).unwrap();
    let damaged = &good[..good.len() / 3];
    std::fs::write(&file, damaged).unwrap();
    let refused = house.refuses();
    assert_eq!(refused.code, 1);
    assert!(
        refused.err.contains("state.json is damaged") && refused.err.contains("to do:"),
        "{}",
        refused.err
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), damaged, "touched");
    std::fs::write(&file, good).unwrap();
    house.start();
    assert_eq!(house.disk("c")["state"], "served");
}

#[test]
fn a_disk_whose_image_went_does_not_take_the_others_along() {
    let mut house = lived_in();
    house.kill9();
    std::fs::rename(house.path("c.img"), house.path("moved.img")).unwrap();
    house.start();
    house.until(|| house.disk("c")["state"] == "failed");
    assert_eq!(house.disk("a")["state"], "served");
    let disk = house.disk("c");
    assert!(disk["error"].as_str().unwrap().contains("there is no image"), "{disk}");
    // Nothing is lost: with the image back, so is the disk.
    house.kill9();
    std::fs::rename(house.path("moved.img"), house.path("c.img")).unwrap();
    house.start();
    house.until(|| house.disk("c")["state"] == "served");
}

#[test]
fn a_second_daemon_is_refused() {
    let house = House::open("");
    let refused = house.refuses();
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("another ioplane daemon listens on"), "{}", refused.err);
    let beside = house.refuses_beside("other.sock");
    assert_eq!(beside.code, 1);
    let holder = format!("is in use by another ioplane daemon (pid {})", house.pid());
    assert!(beside.err.contains(&holder), "{}", beside.err);
    assert_eq!(house.json(&["status"])["pid"], house.pid());
}

#[test]
fn the_same_image_twice_names_the_holder() {
    let mut house = House::new("[[disk]]\nname = \"a\"\npath = \"a.img\"\n");
    let image = house.image("a.img", MIB);
    house.start();
    let other = House::open(&format!(
        "[[disk]]\nname = \"b\"\npath = {image:?}\n[[disk]]\nname = \"ok\"\nmemory = 512\n"
    ));
    other.until(|| other.disk("b")["state"] == "failed");
    let disk = other.disk("b");
    assert_eq!(disk["error"], format!("{} is in use by ioplane (pid {})", shown(&image), house.pid()));
    assert_eq!(disk["remedy"], "shut that down, or give this disk a copy of its own");
    assert_eq!(other.disk("ok")["state"], "served");
    // Nobody has it any more.
    house.terminate();
    other.until(|| other.disk("b")["state"] == "served");
}

#[test]
fn a_bad_configuration_keeps_what_is_served() {
    let house = House::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let front_end = house.connect("a");
    house.configure("[[disk]]\nname = \"b\"\nmemory = \"1M\"\nquques = 2\n");
    house.signal("HUP");
    house.until(|| house.log().contains("the configuration was refused"));
    let log = house.log();
    assert!(
        log.contains("ioplane.toml:4: [[disk]] has no \"quques\"") && log.contains("write queues"),
        "{log}"
    );
    assert_eq!(house.disk("a")["connected"], true);
    assert!(house.disk("b").is_null());
    // One disk of it cannot be had: nothing of it is applied.
    house.configure("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n[[disk]]\nname = \"c\"\npath = \"none.img\"\n");
    let refused = house.refused(&["reload"]);
    assert!(refused.contains("ioplane.toml:9: there is no image"), "{refused}");
    assert!(house.disk("b").is_null());
    drop(front_end);
}

#[test]
fn a_good_configuration_is_taken_over_and_disks_in_use_stay() {
    let house =
        House::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n");
    house.image("c.img", MIB);
    house.json(&["disk", "add", "own", "--memory", "1M"]);
    let front_end = house.connect("a");
    house.configure(
        "[[core]]\n[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"c\"\npath = \"c.img\"\ncore = 1\n",
    );
    let refused = house.refused(&["reload"]);
    assert!(refused.contains("disk a is gone from the configuration, and a guest is using it"), "{refused}");
    assert!(house.disk("c").is_null() && house.disk("b")["state"] == "served");
    drop(front_end);
    house.until(|| house.disk("a")["connected"] == false);
    house.signal("HUP");
    house.until(|| house.log().contains("was read again"));
    assert!(house.disk("a").is_null() && house.disk("b").is_null());
    assert_eq!(
        (&house.disk("c")["state"], &house.disk("own")["state"]),
        (&"served".into(), &"served".into())
    );
    assert_eq!(house.json(&["core", "list"])[1]["notify"], "notified");
    assert_eq!(house.json(&["reload"])["done"].as_array().unwrap().len(), 0, "nothing differs");
    // A disk that changes is served anew; what the daemon stands on does not change.
    house.configure("[[core]]\n[[core]]\n[[disk]]\nname = \"c\"\npath = \"c.img\"\nserial = \"S2\"\n");
    assert_eq!(house.json(&["reload"])["done"], serde_json::json!(["disk c changed", "core 1 changed"]));
    assert_eq!(house.disk("c")["serial"], "S2");
    house.configure("[daemon]\nmetrics = \"127.0.0.1:1\"\n");
    assert!(
        house
            .refused(&["reload"])
            .contains("ioplane.toml:2: metrics cannot be changed while the daemon runs")
    );
}

/// A limit on the size of files (LimitFSIZE= of systemd) is an error of the write that meets it, not the end of everybody's daemon:
/// Linux sends SIGXFSZ, which kills whoever has not said otherwise.
#[test]
fn a_write_beyond_the_limit_of_file_sizes_is_an_error_of_that_write() {
    use ioplane_testkit::driver::{Disk, DiskPlan, GuestMemory, Op, RingMode, Shape};
    use ioplane_testkit::front::{Front, Wants};
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    use std::time::{Duration, Instant};

    for engine in ["io_uring", "threads"] {
        let mut house = House::new(&format!(
            "[[core]]\nspin_us = 200\n[[disk]]\nname = \"a\"\npath = \"a.img\"\nengine = \"{engine}\"\n"
        ));
        house.image("a.img", 4 * MIB);
        house.start();
        let limit = Rlimit { current: Some(MIB), maximum: None };
        prlimit(Pid::from_raw(house.pid() as i32), Resource::Fsize, limit).unwrap();
        let mut front = Front::connect(&house.path("a.sock"), Wants::default()).unwrap();
        let mut memory = GuestMemory::new(4 * MIB).unwrap();
        let plan = DiskPlan::new(4, 65536, Shape::Direct);
        let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan).unwrap();
        front.share(&memory).unwrap();
        front.start(0, &memory, disk.place(), 0).unwrap();
        let mut write = |sector: u64, bytes: u32| {
            disk.submit(Op::Write, sector, bytes).unwrap();
            front.kick(0);
            let end = Instant::now() + Duration::from_secs(20);
            while Instant::now() < end {
                if let Some(done) = disk.reap().unwrap() {
                    return Some(done.status);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        };
        assert_eq!(write(0, 4096), Some(0), "{engine}");
        assert_eq!(write(2 * MIB / 512, 4096), Some(1), "{engine}: {}", house.log());
        // Across the limit: its first half fits.
        assert_eq!(write(MIB / 512 - 64, 65536), Some(1), "{engine}");
        assert_eq!(write(8, 4096), Some(0), "{engine}: it goes on");
        assert!(house.disk("a")["totals"]["errors"]["io"].as_u64() >= Some(2), "{engine}");
    }
}
