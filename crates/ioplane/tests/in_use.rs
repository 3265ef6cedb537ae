//! The image of a disk that a guest uses is published, and the disk goes on as its first client (docs/decisions/0069-publishing-a-disk-in-use.md).

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use daemon::load::{free_port, step_for, step_until};
use daemon::reader::Reader;
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};
use serde_json::Value;

const QUEUES: u16 = 2;
const BYTES: u64 = 12 << 20;
/// Longer than anything here takes on a loaded machine.
const LONG: Duration = Duration::from_secs(120);

/// A daemon with a local disk `data`, and a guest that uses it.
fn busy() -> (TestDaemon, CrashLoad) {
    let mut daemon = TestDaemon::new_beside_the_build("");
    let image = daemon.image("data.img", BYTES);
    daemon.configure(&format!(
        "[[core]]\nspin_us = 200\n[[disk]]\nname = \"data\"\npath = {image:?}\nqueues = {QUEUES}\n"
    ));
    daemon.start();
    let mut load = CrashLoad::new(QUEUES, 16, 41).unwrap();
    load.lost_after = LONG;
    load.attach(&daemon.path("data.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(100));
    (daemon, load)
}

/// A command, while the guest goes on.
fn beside(load: &mut CrashLoad, daemon: &TestDaemon, args: &[&str]) -> daemon::Said {
    let command = std::thread::spawn(daemon.later(args));
    step_until(load, || command.is_finished(), String::new);
    command.join().unwrap()
}

fn remote(daemon: &TestDaemon, disk: &str) -> Value {
    daemon.disk(disk)["backing"]["remote"].clone()
}

#[test]
fn a_disk_in_use_is_published_and_its_guest_sees_nothing() {
    let (mut daemon, mut load) = busy();
    let listen = format!("127.0.0.1:{}", free_port());
    let publish = ["publish", "disk", "web", "--disk", "data", "--listen", &listen, "--plain"];
    let said = beside(&mut load, &daemon, &publish);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    let seen = remote(&daemon, "data");
    assert_eq!((&seen["state"], &seen["claim"]), (&"connected".into(), &"held".into()), "{seen}");
    let export = daemon.json(&["publish", "show", "web"]);
    assert_eq!((&export["size"], &export["claim"]["held"]), (&BYTES.into(), &true.into()), "{export}");
    // For others it is a disk of another machine, which somebody holds.
    let mut there = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
    there.start();
    let said = there.cli(&["disk", "add", "data", "--remote", &format!("nbd://{listen}/web")]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(remote(&there, "data")["instance"], seen["instance"]);
    // It is in use, by the disk itself.
    let refused = daemon.refused(&["publish", "remove", "web"]);
    assert!(refused.contains("connections are open"), "{refused}");
    let refused = daemon.refused(&["publish", "disk", "again", "--disk", "data"]);
    assert!(refused.contains("is no image of this host"), "{refused}");
    step_for(&mut load, Duration::from_millis(300));
    // Whatever the daemon dies of, the next one has both.
    for kill in [true, false] {
        if kill {
            daemon.kill9()
        } else {
            daemon.terminate()
        }
        daemon.start();
        let end = Instant::now() + LONG;
        while load.attach(&daemon.path("data.sock")).is_err() {
            assert!(Instant::now() < end, "{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        step_for(&mut load, Duration::from_millis(200));
        assert_eq!(remote(&daemon, "data")["claim"], "held");
    }
    // It does not move after all: local again, and published again by the same name.
    let other = daemon.path("other.img");
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", other.to_str().unwrap()]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    let said = beside(&mut load, &daemon, &["publish", "remove", "web"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let said = beside(&mut load, &daemon, &publish);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    load.settle().unwrap();
    let disk = daemon.disk("data");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
}

#[test]
fn what_cannot_be_published_leaves_the_disk_as_it_was() {
    let (daemon, mut load) = busy();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (args, words) in [
        (&["--disk", "data", "--listen", &taken, "--plain"][..], "listening on"),
        (&["--disk", "none"], "there is no disk none"),
        (&["--disk", "data", "--listen", "127.0.0.1:1"], "in plain text"),
        (&["--disk", "data", "--connections", "1"], "has 2 queues"),
    ] {
        let said = beside(&mut load, &daemon, &[&["publish", "disk", "web"], args].concat());
        assert!(said.code != 0 && said.err.contains(words), "{args:?}: {}{}", said.out, said.err);
        assert_eq!(daemon.disk("data")["backing"]["kind"], "file");
        assert_eq!(daemon.json(&["publish", "list"]), serde_json::json!([]), "{args:?}");
    }
    let said = daemon.http("PUT", "/v1/exports/web", r#"{"disk": "data", "read_only": true}"#);
    assert!(said.0 == 422 || said.0 == 400, "{said:?}");
    // The name of a disk is taken.
    let said = beside(&mut load, &daemon, &["publish", "disk", "data", "--disk", "data"]);
    assert!(said.code != 0 && said.err.contains("data"), "{}", said.err);
    // And nothing of this stays behind.
    let said = beside(&mut load, &daemon, &["publish", "disk", "web", "--disk", "data"]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    load.settle().unwrap();
    assert_eq!(daemon.disk("data")["totals"]["errors"]["io"], 0);
}

/// A daemon with a disk `data` that its test can have fail, and a guest; `None`, which is said aloud, where there is no FUSE.
fn on_a_disk_that_fails() -> Option<(TestDaemon, FuseDisk, Reader)> {
    let mut daemon = TestDaemon::new_beside_the_build("");
    let disk = match FuseDisk::new(&daemon.path("disk"), BYTES as usize) {
        Ok(disk) => disk,
        Err(why) => {
            eprintln!("\n*** SKIPPED: the flush of a disk that is published was NOT tested: {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
            return None;
        }
    };
    daemon.configure(&format!(
        "[[core]]\nspin_us = 200\n[[disk]]\nname = \"data\"\npath = {:?}\n",
        disk.path()
    ));
    daemon.start();
    let mut guest = Reader::connect(&daemon, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    assert!(disk.unsynced() > 0);
    Some((daemon, disk, guest))
}

/// Syncs of the disk, one after the other, end like that.
fn syncs(disk: &FuseDisk, hows: &[How]) {
    let fault = |how: &How| InjectedFault { call: Call::Sync, bytes: 0..0, how: *how, times: 1 };
    disk.faults(&hows.iter().map(fault).collect::<Vec<_>>());
}

const FAILS: How = How::Errno(5);

/// What the guest has written and not flushed nobody would write again.
#[test]
fn a_disk_that_cannot_be_flushed_is_not_published() {
    let Some((daemon, disk, mut guest)) = on_a_disk_that_fails() else { return };
    syncs(&disk, &[FAILS]);
    let refused = daemon.refused(&["publish", "disk", "web", "--disk", "data"]);
    assert!(refused.contains("cannot be flushed") && refused.contains("nothing was published"), "{refused}");
    assert_eq!(daemon.disk("data")["backing"]["kind"], "file");
    assert_eq!(daemon.json(&["publish", "list"]), serde_json::json!([]));
    // When its disk works again nothing stands in the way.
    let said = daemon.cli(&["publish", "disk", "web", "--disk", "data"]);
    assert_eq!((said.code, disk.unsynced()), (0, 0), "{}", said.err);
    assert_eq!([DiskOp::Read, DiskOp::Write, DiskOp::Flush].map(|op| guest.status_of(op)), [0; 3]);
}

/// The disk is a client by then, and goes on as one; whoever is about to move its VM hears of it.
#[test]
fn a_disk_that_cannot_be_flushed_any_more_once_it_is_published_says_so() {
    let Some((daemon, disk, mut guest)) = on_a_disk_that_fails() else { return };
    syncs(&disk, &[How::Slow(Duration::from_millis(1)), FAILS]);
    let refused = daemon.refused(&["publish", "disk", "web", "--disk", "data"]);
    assert!(refused.contains("web is published, but its image could not be flushed"), "{refused}");
    assert!(refused.contains("before the VM moves"), "{refused}");
    let seen = remote(&daemon, "data");
    assert_eq!((&seen["state"], &seen["claim"]), (&"connected".into(), &"held".into()), "{seen}");
    assert_eq!(daemon.json(&["publish", "show", "web"])["state"], "served");
    assert_eq!([DiskOp::Read, DiskOp::Write, DiskOp::Flush].map(|op| guest.status_of(op)), [0; 3]);
    assert_eq!(disk.unsynced(), 0);
}

/// The host has rebooted: the configuration, which knows nothing of the export, decides. The claim on the image is the disk's own.
#[test]
fn after_a_reboot_a_disk_has_its_own_image_and_no_other_disk_does() {
    let (mut daemon, mut load) = busy();
    let image = daemon.path("data.img").display().to_string();
    let said = beside(&mut load, &daemon, &["publish", "disk", "web", "--disk", "data"]);
    assert_eq!((said.code, &remote(&daemon, "data")["claim"]), (0, &"held".into()), "{}", said.err);
    let configured = std::fs::read_to_string(daemon.path("ioplane.toml")).unwrap();
    let reboot = |daemon: &mut TestDaemon, configuration: &str| {
        daemon.kill9();
        std::fs::remove_file(daemon.path("state.json")).unwrap();
        daemon.configure(configuration);
        daemon.start();
    };
    let does = |daemon: &TestDaemon, args: &[&str]| {
        let said = daemon.cli(args);
        assert_eq!(said.code, 0, "{args:?}: {}{}", said.err, daemon.log());
    };
    // No disk has been on the image: not another one, and not this one while it is on something else.
    reboot(&mut daemon, "[[core]]\n");
    drop(load);
    does(&daemon, &["disk", "add", "data", "--memory", &BYTES.to_string()]);
    for command in [
        &["disk", "add", "other", "--path", &image][..],
        &["disk", "replace", "data", "--path", &image],
        &["swap", "data", "--to", &image, "--overwrite"],
    ] {
        let refused = daemon.refused(command);
        assert!(refused.contains("held by disk data of"), "{command:?}: {refused}");
    }
    reboot(&mut daemon, &configured);
    daemon.until(|| daemon.disk("data")["state"] == "served");
    assert_eq!(daemon.disk("data")["backing"]["kind"], "file");
    // And its claim is settled: the image is anybody's who comes first, and can be published again by any name.
    does(&daemon, &["disk", "remove", "data"]);
    does(&daemon, &["disk", "add", "other", "--path", &image]);
    does(&daemon, &["disk", "remove", "other"]);
    does(&daemon, &["disk", "add", "data", "--path", &image, "--queues", "2"]);
    does(&daemon, &["publish", "disk", "again", "--disk", "data"]);
    daemon.until(|| {
        remote(&daemon, "data")["state"] == "connected" || remote(&daemon, "data")["claim"] == "free"
    });
}
