//! A disk with two sockets, as its daemon keeps it: added, written down, changed behind both, taken away.

mod house;

use std::path::Path;
use std::time::{Duration, Instant};

use house::House;
use ioplane_testkit::driver::{Disk, DiskPlan, GuestMemory, Op, RingMode, Shape};
use ioplane_testkit::front::{Front, Wants};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(20);

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A disk `a` of 4 MiB with a second socket.
fn house() -> House {
    let house = House::open("[[core]]\nspin_us = 500\n");
    let image = shown(&house.image("a.img", 4 * MIB));
    house.json(&["disk", "add", "a", "--path", &image]);
    house.json(&["disk", "twin", "a"]);
    house
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

    fn start(&self, socket: &Path) -> Front {
        let mut front = Front::connect(socket, Wants::default()).unwrap();
        front.track_inflight(1, 64).unwrap();
        front.share(&self.memory).unwrap();
        front.start(0, &self.memory, self.disk.place(), self.base).unwrap();
        front
    }

    /// One request that must succeed; the first byte of its data.
    fn request(&mut self, front: &mut Front, op: Op, sector: u64, data: u8) -> u8 {
        let token = self.disk.next().unwrap();
        if op == Op::Write {
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
fn a_second_socket_is_added_shown_and_taken_away() {
    let house = house();
    let twin = house.path("a.twin.sock");
    let disk = house.disk("a");
    assert_eq!((&disk["twin"], &disk["owner"]), (&shown(&twin).into(), &serde_json::Value::Null));
    assert!(twin.exists());
    let args = |more: &[&str]| house.cli(&[&["qemu-args", "a", "--qemu-version", "9.2"], more].concat()).out;
    assert!(args(&["--twin"]).contains(&shown(&twin)) && !args(&[]).contains("twin"));
    assert_eq!(args(&["--twin"]).replace("a.twin.sock", "a.sock"), args(&[]), "the same but for the socket");
    let list = house.cli(&["disk", "list"]).out;
    assert!(list.contains("a.twin.sock") && list.contains("its guest runs behind neither"), "{list}");

    // Said twice, where somebody else is, for a disk that has none.
    // It is so already; another one is refused.
    house.json(&["disk", "twin", "a"]);
    let other = house.path("other.sock").display().to_string();
    assert!(house.refused(&["disk", "twin", "a", "--vhost-socket", &other]).contains("--remove"));
    house.json(&["disk", "add", "b", "--memory", "1M"]);
    let taken = shown(&twin);
    for path in [taken.as_str(), &shown(&house.path("control.sock")), &shown(&house.path("b.sock"))] {
        let refused = house.refused(&["disk", "twin", "b", "--vhost-socket", path]);
        assert!(refused.contains("socket"), "{refused}");
    }
    assert!(
        house.refused(&["disk", "add", "c", "--memory", "1M", "--vhost-socket", &taken]).contains("disk a")
    );
    assert!(house.refused(&["disk", "add", "c", "--memory", "1M", "--twin", &taken]).contains("disk a"));
    assert!(house.refused(&["disk", "twin", "b", "--remove"]).contains("no second socket"));
    assert!(house.refused(&["qemu-args", "b", "--qemu-version", "9.2", "--twin"]).contains("disk twin b"));
    assert!(house.refused(&["disk", "twin", "none"]).contains("no disk none"));

    let front = Front::connect(&twin, Wants::default()).unwrap();
    assert!(house.refused(&["disk", "twin", "a", "--remove"]).contains("a guest is using"));
    assert!(house.refused(&["disk", "remove", "a"]).contains("a guest is using"));
    assert_eq!(house.disk("a")["connected"], true);
    drop(front);
    house.until(|| house.disk("a")["connected"] == false);
    house.json(&["disk", "twin", "a", "--remove"]);
    assert!(!twin.exists() && house.disk("a")["twin"].is_null());
    house.json(&["disk", "remove", "a"]);
}

#[test]
fn a_daemon_that_dies_comes_back_with_both_sockets() {
    let mut house = House::new("[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\ntwin = \"other.sock\"\n");
    house.start();
    house.json(&["disk", "add", "b", "--memory", "1M", "--twin", &shown(&house.path("b2.sock"))]);
    house.json(&["disk", "add", "c", "--memory", "1M"]);
    house.json(&["disk", "twin", "c"]);
    for _ in 0..2 {
        for (disk, socket) in [("a", "other.sock"), ("b", "b2.sock"), ("c", "c.twin.sock")] {
            assert_eq!(house.disk(disk)["twin"], shown(&house.path(socket)), "{disk}");
            Front::connect(&house.path(socket), Wants::default()).unwrap();
        }
        house.kill9();
        house.start();
        house.until(|| ["a", "b", "c"].iter().all(|disk| house.disk(disk)["state"] == "served"));
    }
    let one = "[[core]]\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\ntwin = \"t.sock\"\n";
    house.configure(&format!("{one}[[disk]]\nname = \"d\"\nmemory = \"1M\"\nsocket = \"t.sock\"\n"));
    let refused = house.refused(&["reload"]);
    assert!(refused.contains("the twin of disk a"), "{refused}");
}

#[test]
fn what_is_changed_is_changed_behind_both() {
    let house = house();
    let (first, second) = (house.path("a.sock"), house.path("a.twin.sock"));
    let mut guest = Guest::new();
    let mut source = guest.start(&first);
    let waiting = Front::connect(&second, Wants::default()).unwrap();
    assert_eq!(house.disk("a")["owner"], "socket");
    guest.request(&mut source, Op::Write, 0, 7);
    house.json(&["disk", "resize", "a", "8M"]);
    assert!(source.config_changed(LIMIT).unwrap() && waiting.config_changed(LIMIT).unwrap());
    assert_eq!(waiting.capacity().unwrap(), 8 * MIB / 512);

    // The copy is behind both, and nothing reaches the old image any more.
    std::fs::copy(house.path("a.img"), house.path("b.img")).unwrap();
    house.json(&["disk", "replace", "a", "--path", &shown(&house.path("b.img"))]);
    let before = std::fs::read(house.path("a.img")).unwrap();
    guest.request(&mut source, Op::Write, 8, 9);
    drop(waiting);
    house.until(|| house.disk("a")["queues"][0]["core"] == 0);
    guest.base = source.stop(0).unwrap();
    let mut there = guest.start(&second);
    assert_eq!(house.disk("a")["owner"], "twin");
    assert_eq!(guest.request(&mut there, Op::Read, 0, 0), 7);
    assert_eq!(guest.request(&mut there, Op::Read, 8, 0), 9);
    guest.request(&mut there, Op::Write, 16, 11);
    assert_eq!(std::fs::read(house.path("a.img")).unwrap(), before);
    // Nobody holds the old one.
    house.json(&["disk", "add", "old", "--path", &shown(&house.path("a.img"))]);
    // One that is too small is refused by both, and both keep what they have.
    let small = shown(&house.image("small.img", MIB));
    assert!(house.refused(&["disk", "replace", "a", "--path", &small]).contains("truncate"));
    assert_eq!(guest.request(&mut there, Op::Read, 16, 0), 11);
    guest.base = there.stop(0).unwrap();
    let mut source = guest.start_again(source);
    assert_eq!(guest.request(&mut source, Op::Read, 16, 0), 11);
    let counts = house.disk("a");
    assert_eq!((&counts["connections"], &counts["totals"]["requests"]), (&3.into(), &7.into()), "{counts}");
    assert_eq!(counts["front_end_faults"], serde_json::json!({}));
}

impl Guest {
    /// Goes back to a front end that has been here before and kept its connection, as after a migration that failed.
    fn start_again(&self, mut front: Front) -> Front {
        front.start(0, &self.memory, self.disk.place(), self.base).unwrap();
        front
    }
}
