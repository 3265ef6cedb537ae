//! A disk with two sockets, as its daemon keeps it: added, written down, changed behind both, taken away.

mod daemon;

use std::path::Path;
use std::time::{Duration, Instant};

use daemon::TestDaemon;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(120);

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A disk `a` of 4 MiB with a migration socket.
fn daemon() -> TestDaemon {
    let daemon = TestDaemon::open("[[core]]\nspin_us = 500\n");
    let image = shown(&daemon.image("a.img", 4 * MIB));
    daemon.json(&["disk", "add", "a", "--path", &image]);
    daemon.json(&["disk", "migration-socket", "a"]);
    daemon
}

/// A guest with one ring, which goes from front end to front end.
struct Guest {
    memory: GuestMemory,
    disk: Disk,
    base: u32,
}

impl Guest {
    fn new() -> Self {
        let mut memory = GuestMemory::new(MIB).unwrap();
        let plan = DiskPlan::new(8, 4096, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(Wants::default().features), plan).unwrap();
        Guest { memory, disk, base: 0 }
    }

    fn start(&self, socket: &Path) -> FrontEnd {
        let mut front = FrontEnd::connect(socket, Wants::default()).unwrap();
        front.track_inflight(1, 64).unwrap();
        front.share(&self.memory).unwrap();
        front.start(0, &self.memory, self.disk.place(), self.base).unwrap();
        front
    }

    /// One request that must succeed; the first byte of its data.
    fn request(&mut self, front: &mut FrontEnd, op: DiskOp, sector: u64, data: u8) -> u8 {
        let token = self.disk.next().unwrap();
        if op == DiskOp::Write {
            self.disk.write_data(token, &[data; 4096]).unwrap();
        }
        self.disk.submit(op, sector, 4096).unwrap();
        front.kick(0);
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.disk.reap().unwrap() {
                assert!(done.ok(), "status {}", done.status);
                let mut byte = [0];
                self.disk.read_data(token, &mut byte).unwrap();
                return byte[0];
            }
            assert!(Instant::now() < deadline, "no answer");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_migration_socket_is_added_shown_and_taken_away() {
    let daemon = daemon();
    let second = daemon.path("a.migration.sock");
    let disk = daemon.disk("a");
    assert_eq!(
        (&disk["migration_socket"], &disk["owner"]),
        (&shown(&second).into(), &serde_json::Value::Null)
    );
    assert!(second.exists());
    let args = |more: &[&str]| daemon.cli(&[&["qemu-args", "a", "--qemu-version", "9.2"], more].concat()).out;
    assert!(args(&["--migration-socket"]).contains(&shown(&second)) && !args(&[]).contains("migration.sock"));
    assert_eq!(
        args(&["--migration-socket"]).replace("a.migration.sock", "a.sock"),
        args(&[]),
        "the same but for the socket"
    );
    let list = daemon.cli(&["disk", "list"]).out;
    assert!(list.contains("a.migration.sock") && list.contains("its guest runs behind neither"), "{list}");

    // Said twice, where somebody else is, for a disk that has none.
    // It is so already; another one is refused.
    daemon.json(&["disk", "migration-socket", "a"]);
    let other = daemon.path("other.sock").display().to_string();
    assert!(
        daemon.refused(&["disk", "migration-socket", "a", "--vhost-socket", &other]).contains("--remove")
    );
    daemon.json(&["disk", "add", "b", "--memory", "1M"]);
    let taken = shown(&second);
    for path in [taken.as_str(), &shown(&daemon.path("control.sock")), &shown(&daemon.path("b.sock"))] {
        let refused = daemon.refused(&["disk", "migration-socket", "b", "--vhost-socket", path]);
        assert!(refused.contains("socket"), "{refused}");
    }
    assert!(
        daemon.refused(&["disk", "add", "c", "--memory", "1M", "--vhost-socket", &taken]).contains("disk a")
    );
    assert!(
        daemon
            .refused(&["disk", "add", "c", "--memory", "1M", "--migration-socket", &taken])
            .contains("disk a")
    );
    assert!(daemon.refused(&["disk", "migration-socket", "b", "--remove"]).contains("no migration socket"));
    assert!(
        daemon
            .refused(&["qemu-args", "b", "--qemu-version", "9.2", "--migration-socket"])
            .contains("disk migration-socket b")
    );
    assert!(daemon.refused(&["disk", "migration-socket", "none"]).contains("no disk none"));

    let front = FrontEnd::connect(&second, Wants::default()).unwrap();
    assert!(daemon.refused(&["disk", "migration-socket", "a", "--remove"]).contains("a guest is using"));
    assert!(daemon.refused(&["disk", "remove", "a"]).contains("a guest is using"));
    assert_eq!(daemon.disk("a")["connected"], true);
    drop(front);
    daemon.until(|| daemon.disk("a")["connected"] == false);
    daemon.json(&["disk", "migration-socket", "a", "--remove"]);
    assert!(!second.exists() && daemon.disk("a")["migration_socket"].is_null());
    daemon.json(&["disk", "remove", "a"]);
}

#[test]
fn a_daemon_that_dies_comes_back_with_both_sockets() {
    let mut daemon = TestDaemon::new(
        "[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\nmigration_socket = \"other.sock\"\n",
    );
    daemon.start();
    daemon.json(&[
        "disk",
        "add",
        "b",
        "--memory",
        "1M",
        "--migration-socket",
        &shown(&daemon.path("b2.sock")),
    ]);
    daemon.json(&["disk", "add", "c", "--memory", "1M"]);
    daemon.json(&["disk", "migration-socket", "c"]);
    for _ in 0..2 {
        for (disk, socket) in [("a", "other.sock"), ("b", "b2.sock"), ("c", "c.migration.sock")] {
            assert_eq!(daemon.disk(disk)["migration_socket"], shown(&daemon.path(socket)), "{disk}");
            FrontEnd::connect(&daemon.path(socket), Wants::default()).unwrap();
        }
        daemon.kill9();
        daemon.start();
        daemon.until(|| ["a", "b", "c"].iter().all(|disk| daemon.disk(disk)["state"] == "served"));
    }
    let one = "[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\nmigration_socket = \"t.sock\"\n";
    daemon.configure(&format!("{one}[[disk]]\nname = \"d\"\nmemory = \"1M\"\nsocket = \"t.sock\"\n"));
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("the migration_socket of disk a"), "{refused}");
}

#[test]
fn what_is_changed_is_changed_behind_both() {
    let daemon = daemon();
    let (first, second) = (daemon.path("a.sock"), daemon.path("a.migration.sock"));
    let mut guest = Guest::new();
    let mut source = guest.start(&first);
    let waiting = FrontEnd::connect(&second, Wants::default()).unwrap();
    assert_eq!(daemon.disk("a")["owner"], "socket");
    guest.request(&mut source, DiskOp::Write, 0, 7);
    daemon.json(&["disk", "resize", "a", "8M"]);
    assert!(source.config_changed(LIMIT).unwrap() && waiting.config_changed(LIMIT).unwrap());
    assert_eq!(waiting.capacity().unwrap(), 8 * MIB / 512);

    // The copy is behind both, and nothing reaches the old image any more.
    std::fs::copy(daemon.path("a.img"), daemon.path("b.img")).unwrap();
    daemon.json(&["disk", "replace", "a", "--path", &shown(&daemon.path("b.img"))]);
    let before = std::fs::read(daemon.path("a.img")).unwrap();
    guest.request(&mut source, DiskOp::Write, 8, 9);
    drop(waiting);
    daemon.until(|| daemon.disk("a")["queues"][0]["core"] == 0);
    guest.base = source.stop(0).unwrap();
    let mut there = guest.start(&second);
    assert_eq!(daemon.disk("a")["owner"], "migration_socket");
    assert_eq!(guest.request(&mut there, DiskOp::Read, 0, 0), 7);
    assert_eq!(guest.request(&mut there, DiskOp::Read, 8, 0), 9);
    guest.request(&mut there, DiskOp::Write, 16, 11);
    assert_eq!(std::fs::read(daemon.path("a.img")).unwrap(), before);
    // Nobody holds the old one.
    daemon.json(&["disk", "add", "old", "--path", &shown(&daemon.path("a.img"))]);
    // One that is too small is refused by both, and both keep what they have.
    let small = shown(&daemon.image("small.img", MIB));
    assert!(daemon.refused(&["disk", "replace", "a", "--path", &small]).contains("truncate"));
    assert_eq!(guest.request(&mut there, DiskOp::Read, 16, 0), 11);
    guest.base = there.stop(0).unwrap();
    let mut source = guest.start_again(source);
    assert_eq!(guest.request(&mut source, DiskOp::Read, 16, 0), 11);
    // A core shows what it has counted every 10 ms.
    daemon.until(|| daemon.disk("a")["totals"]["requests"] == 7);
    let counts = daemon.disk("a");
    assert_eq!((&counts["connections"], &counts["totals"]["requests"]), (&3.into(), &7.into()), "{counts}");
    assert_eq!(counts["front_end_faults"], serde_json::json!({}));
}

impl Guest {
    /// Goes back to a front end that has been here before and kept its connection, as after a migration that failed.
    fn start_again(&self, mut front: FrontEnd) -> FrontEnd {
        front.start(0, &self.memory, self.disk.place(), self.base).unwrap();
        front
    }
}
