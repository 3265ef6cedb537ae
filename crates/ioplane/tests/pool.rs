//! Cores of a real daemon that come and go, and queues that change cores meanwhile. What guests have written is what they read, in the order in which
//! they asked for it.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape, Token};
use ioplane_testkit::front::{FrontEnd, Wants};
use serde_json::{Value, json};

/// Bytes of one request: one slice, so that a memory disk serves requests of a queue one after the other.
const BYTES: u32 = 128 << 10;
/// Parts of the disk that each queue writes.
const REGIONS: usize = 6;
/// Longer than the load has to be low before a core ends, and than anything else here.
const LIMIT: Duration = Duration::from_secs(60);

/// Two writes and a read of one region, all in flight at once.
struct Flight {
    read: Token,
    left: u8,
    wanted: u64,
}

/// One queue of a guest.
struct Queue {
    disk: Disk,
    number: u16,
    flights: [Option<Flight>; REGIONS],
    /// The region of each slot.
    region: Vec<usize>,
    stamp: u64,
}

impl Queue {
    fn submit(&mut self, op: DiskOp, region: usize) -> Token {
        if op == DiskOp::Write {
            self.stamp += 1;
            let token = self.disk.next().unwrap();
            self.disk.write_data(token, &self.stamp.to_le_bytes()).unwrap();
        }
        let at = (usize::from(self.number) * REGIONS + region) as u64 * u64::from(BYTES) / 512;
        let token = self.disk.submit(op, at, BYTES).unwrap();
        self.region[token.slot()] = region;
        token
    }

    /// Makes requests for every region that has none in flight; says whether it did.
    fn fill(&mut self) -> bool {
        let mut some = false;
        for region in 0..REGIONS {
            if self.flights[region].is_none() {
                self.submit(DiskOp::Write, region);
                self.submit(DiskOp::Write, region);
                let read = self.submit(DiskOp::Read, region);
                self.flights[region] = Some(Flight { read, left: 3, wanted: self.stamp });
                some = true;
            }
        }
        some
    }

    /// Takes what is answered: a read has what was written last before it. Says how many requests.
    fn reap(&mut self) -> u64 {
        let mut count = 0;
        while let Some(done) = self.disk.reap().unwrap() {
            assert!(done.ok(), "queue {}: status {}", self.number, done.status);
            let region = self.region[done.token.slot()];
            let flight = self.flights[region].as_mut().expect("an answer to nothing");
            flight.left = flight.left.checked_sub(1).expect("an answer too many");
            if done.token == flight.read {
                let mut found = [0; 8];
                self.disk.read_data(done.token, &mut found).unwrap();
                assert_eq!(
                    u64::from_le_bytes(found),
                    flight.wanted,
                    "queue {}, region {region}",
                    self.number
                );
            }
            if flight.left == 0 {
                self.flights[region] = None;
            }
            count += 1;
        }
        count
    }
}

/// A guest that writes and reads on two queues of one disk.
struct Guest {
    front: FrontEnd,
    queues: [Queue; 2],
    _memory: GuestMemory,
}

impl Guest {
    fn connect(daemon: &TestDaemon, name: &str) -> Guest {
        let slots = 3 * REGIONS as u16;
        let mut memory = GuestMemory::new((4 << 20) + 2 * u64::from(slots) * u64::from(BYTES)).unwrap();
        let mut front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), Wants::default()).unwrap();
        let mode = RingMode::of(front.features());
        let mut queue = |number| Queue {
            disk: Disk::new(&mut memory, 64, mode, DiskPlan::new(slots, BYTES, Shape::Indirect)).unwrap(),
            number,
            flights: [const { None }; REGIONS],
            region: vec![0; slots.into()],
            stamp: 0,
        };
        let queues = [queue(0), queue(1)];
        front.track_inflight(2, 64).unwrap();
        front.share(&memory).unwrap();
        for queue in &queues {
            front.start(queue.number, &memory, queue.disk.place(), 0).unwrap();
        }
        Guest { front, queues, _memory: memory }
    }

    /// Keeps `busy` of its queues at work until `met`, which is asked now and then, and then waits for all answers.
    fn work(&mut self, busy: &[usize], what: &str, mut met: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        let (mut asked, mut over, mut answered) = (Instant::now(), false, 0);
        loop {
            let mut idle = true;
            for at in busy {
                let queue = &mut self.queues[*at];
                let count = queue.reap();
                answered += count;
                idle &= count == 0;
                if !over && queue.fill() {
                    self.front.kick(queue.number);
                }
            }
            if over && self.queues.iter().all(|queue| queue.flights.iter().all(Option::is_none)) {
                assert!(answered > 0);
                return;
            }
            if !over && asked.elapsed() > Duration::from_millis(100) {
                over = met();
                asked = Instant::now();
            }
            assert!(Instant::now() < end, "{what}: it does not come (over: {over}, {answered} answered)");
            if idle {
                std::thread::yield_now();
            }
        }
    }
}

/// Cores that a queue of `disk` is on.
fn cores_of(daemon: &TestDaemon, disk: &str) -> Vec<Value> {
    daemon.disk(disk)["queues"].as_array().unwrap().iter().map(|queue| queue["core"].clone()).collect()
}

/// Numbers of the cores that there are.
fn cores(daemon: &TestDaemon) -> Vec<u64> {
    daemon
        .json(&["core", "list"])
        .as_array()
        .unwrap()
        .iter()
        .map(|core| core["id"].as_u64().unwrap())
        .collect()
}

fn queues_on(daemon: &TestDaemon, core: u64) -> u64 {
    let (_, core) = daemon.http("GET", &format!("/v1/cores/{core}"), "");
    core["queues"].as_u64().unwrap_or_else(|| panic!("{core}"))
}

fn decisions(daemon: &TestDaemon) -> Vec<Value> {
    let (code, report) = daemon.http("GET", "/v1/pool/decisions", "");
    assert_eq!(code, 200);
    let decisions = report["decisions"].as_array().unwrap().clone();
    for (at, one) in (0..).zip(&decisions) {
        assert_eq!(one["number"], at, "{report}");
        assert!(
            one["text"].as_str().is_some_and(|text| text.contains(": ") && !text.contains("device ")),
            "{one}"
        );
    }
    assert_eq!((&report["next"], &report["lost"]), (&json!(decisions.len()), &json!(0)));
    decisions
}

fn made(decisions: &[Value], word: &str) -> usize {
    decisions.iter().filter(|one| one["decision"] == word).count()
}

const DISK: &str = "[[disk]]\nname = \"a\"\nmemory = \"8M\"\nqueues = 2\n";

#[test]
fn a_core_comes_with_the_load_and_goes_after_it_and_nothing_is_lost_or_reordered() {
    let daemon = TestDaemon::open(&format!("[pool]\nmin = 1\nmax = 2\n{DISK}"));
    assert_eq!(cores(&daemon), [0]);
    let mut guest = Guest::connect(&daemon, "a");
    guest.work(&[0, 1], "each queue has a core", || {
        let on = cores_of(&daemon, "a");
        cores(&daemon) == [0, 1] && on.len() == 2 && on[0] != on[1]
    });
    let log = decisions(&daemon);
    assert!(made(&log, "grow") >= 1 && made(&log, "move") >= 1, "{log:?}");
    let moved = log.iter().find(|one| one["decision"] == "move").unwrap();
    assert_eq!((&moved["device"], &moved["from"], &moved["to"]), (&json!("a"), &json!(0), &json!(1)));
    let report = daemon.json(&["core", "pool"]);
    assert_eq!((&report["min"], &report["max"], &report["open"]), (&json!(1), &json!(2), &json!(2)));
    assert!(report["moved"].as_u64() >= Some(1) && report["grown"].as_u64() >= Some(2), "{report}");

    let end = Instant::now() + LIMIT;
    while cores(&daemon).len() > 1 {
        assert!(Instant::now() < end, "no core ends: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let on = cores_of(&daemon, "a");
    assert!(on[0] == on[1] && on[0] == cores(&daemon)[0], "{on:?}");
    let log = decisions(&daemon);
    assert!(made(&log, "shrink") >= 1, "{log:?}");
    // All that it knew of its rings went with them.
    guest.work(&[0, 1], "an answer", || true);
    let said = daemon.cli(&["core", "decisions"]).out;
    assert!(
        said.contains("one core more: ") && said.contains("a queue ") && said.contains(" ends: "),
        "{said}"
    );
}

#[test]
fn a_queue_that_is_pinned_stays_and_so_does_its_core() {
    let daemon = TestDaemon::open(&format!("[pool]\nmax = 2\n{DISK}"));
    let mut guest = Guest::connect(&daemon, "a");
    daemon.json(&["core", "pin", "a", "1", "0"]);
    guest.work(&[0, 1], "the other queue has a core of its own", || cores_of(&daemon, "a") == [1, 0]);
    let log = decisions(&daemon);
    assert!(log.iter().all(|one| one["decision"] != "move" || one["queue"] == 0), "{log:?}");
    let end = Instant::now() + LIMIT;
    while cores(&daemon) != [0] {
        assert!(Instant::now() < end, "core 1 does not end: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(cores_of(&daemon, "a"), [0, 0]);
    guest.work(&[0, 1], "an answer", || true);
    daemon.json(&["core", "unpin", "a", "1"]);
    guest.work(&[0, 1], "each queue has a core", || {
        let on = cores_of(&daemon, "a");
        on[0] != on[1]
    });
}

#[test]
fn a_core_that_is_drained_is_empty_soon_and_stays_so_until_it_is_opened() {
    let daemon = TestDaemon::open(&format!("[[core]]\n[[core]]\n{DISK}"));
    let mut guest = Guest::connect(&daemon, "a");
    guest.work(&[0, 1], "an answer", || true);
    daemon.until(|| (0..2).map(|core| queues_on(&daemon, core)).sum::<u64>() == 2);
    let [busy, other] = if queues_on(&daemon, 0) > 0 { [0, 1] } else { [1, 0] };
    let drained = daemon.json(&["core", "drain", &busy.to_string()]);
    assert_eq!(drained["draining"], true);
    guest.work(&[0, 1], "the core is empty", || queues_on(&daemon, busy) == 0);
    assert_eq!(cores_of(&daemon, "a"), [other, other]);
    let log = decisions(&daemon);
    assert!(log.iter().all(|one| one["decision"] == "move" && one["from"] == busy), "{log:?}");
    let refused = daemon.refused(&["core", "drain", &other.to_string()]);
    assert!(refused.contains("no other I/O core takes queues"), "{refused}");
    // What comes now goes elsewhere, and what was moved there by name stays: a pin is stronger.
    daemon.json(&["disk", "add", "b", "--memory", "8M", "--queues", "2"]);
    let mut second = Guest::connect(&daemon, "b");
    second.work(&[0, 1], "an answer", || true);
    assert_eq!(cores_of(&daemon, "b"), [other, other]);
    daemon.json(&["core", "move", "b", "0", &busy.to_string()]);
    second.work(&[0, 1], "an answer", || true);
    assert_eq!(cores_of(&daemon, "b"), [busy, other]);
    daemon.json(&["core", "unpin", "b", "0"]);
    second.work(&[0, 1], "the core is empty again", || queues_on(&daemon, busy) == 0);
    let opened = daemon.json(&["core", "open", &busy.to_string()]);
    assert_eq!(opened["draining"], false);
    // It may be drained so that it can be retired.
    daemon.json(&["core", "drain", &other.to_string()]);
    guest.work(&[0, 1], "the other is empty", || queues_on(&daemon, other) == 0);
    daemon.json(&["core", "retire", &other.to_string()]);
    guest.work(&[0, 1], "an answer", || true);
    second.work(&[0, 1], "an answer", || true);
}

#[test]
fn a_reserved_core_serves_its_group_and_nobody_else() {
    let daemon =
        TestDaemon::open(&format!("[[core]]\n[[core]]\n[[group]]\nname = \"web\"\n{DISK}group = \"web\"\n"));
    daemon.json(&["disk", "add", "b", "--memory", "8M", "--queues", "2"]);
    let mut guests = ["a", "b"].map(|disk| Guest::connect(&daemon, disk));
    guests.iter_mut().for_each(|guest| guest.work(&[0, 1], "an answer", || true));
    let refused = daemon.refused(&["core", "reserve", "1", "db"]);
    assert!(refused.contains("there is no group db"), "{refused}");
    assert_eq!(daemon.json(&["core", "reserve", "1", "web"])["reserve"], "web");
    let [web, other] = &mut guests;
    web.work(&[0, 1], "the group is on its core", || cores_of(&daemon, "a") == [1, 1]);
    other.work(&[0, 1], "the others are on theirs", || cores_of(&daemon, "b") == [0, 0]);
    let refused = daemon.refused(&["core", "reserve", "0", "web"]);
    assert!(refused.contains("no other I/O core takes queues"), "{refused}");
    daemon.json(&["disk", "set", "a", "--group", ""]);
    web.work(&[0, 1], "it is in the group no more", || cores_of(&daemon, "a") == [0, 0]);
    daemon.json(&["group", "add", "db"]);
    daemon.json(&["core", "add", "--reserve", "db"]);
    let refused = daemon.refused(&["group", "remove", "db"]);
    assert!(refused.contains("core 2 is reserved for group db"), "{refused}");
    daemon.json(&["core", "open", "2"]);
    daemon.json(&["group", "remove", "db"]);
    daemon.json(&["core", "open", "1"]);
    assert_eq!(daemon.json(&["core", "list"])[1]["reserve"], Value::Null);
    guests.iter_mut().for_each(|guest| guest.work(&[0, 1], "an answer", || true));
}

#[test]
fn a_pool_follows_its_configuration() {
    let with =
        |pool: &str| format!("{pool}[[core]]\nid = 5\n[[disk]]\nname = \"a\"\nmemory = \"8M\"\nqueues = 2\n");
    let mut daemon = TestDaemon::open(&with("[pool]\nmin = 2\nmax = 3\nnotify = \"notified\"\n"));
    assert_eq!(cores(&daemon), [0, 5]);
    let list = daemon.json(&["core", "list"]);
    assert_eq!((&list[0]["elastic"], &list[0]["notify"]), (&json!(true), &json!("notified")), "{list}");
    assert_eq!((&list[1]["elastic"], &list[1]["notify"]), (&json!(false), &json!("adaptive")), "{list}");
    let mut guest = Guest::connect(&daemon, "a");
    guest.work(&[0, 1], "an answer", || true);
    daemon.configure(&with("[pool]\nmin = 4\nmax = 4\n"));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    daemon.until(|| cores(&daemon) == [0, 1, 2, 5]);
    // What nobody has written down is not saved: the pool starts it again.
    let saved = daemon.cli(&["config", "save", "--print"]).out;
    assert!(!saved.contains("[[core]]"), "{saved}");
    daemon.kill9();
    daemon.start();
    assert_eq!(cores(&daemon), [0, 1, 2, 5]);
    daemon.configure(&with(""));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    daemon.until(|| cores(&daemon) == [5]);
    assert_eq!(daemon.json(&["core", "pool"])["configured"], false);
    for (config, line) in [
        ("[pool]\nmin = 3\nmax = 2\n", "max = 2 is below min = 3"),
        ("[pool]\ncpus = \"3-1\"\n", "write numbers and ranges as in 0-3,8"),
        ("[pool]\ncpus = \"0\"\nmax = 2\n", "cpus has 1 processors"),
        ("[pool]\nmost = 3\n", "[pool] has no \"most\""),
        ("[[pool]]\n", "write [pool] once"),
    ] {
        daemon.configure(&with(config));
        let refused = daemon.cli(&["reload"]);
        assert!(
            refused.code != 0 && format!("{}{}", refused.out, refused.err).contains(line),
            "{config}: {}",
            refused.err
        );
    }
}

#[test]
fn a_queue_goes_to_the_node_on_which_its_guest_runs() {
    // A made-up host: processor 0 is on node 0 and processor 1 on node 1, and so does /proc say of the process of the front end, which is this one.
    let daemon = TestDaemon::new(
        "[pool]\nmin = 2\nmax = 2\ncpus = \"0-1\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n",
    );
    let write = |path: &str, text: &str| {
        let path = daemon.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("sysfs/devices/system/cpu/online", "0-1\n");
    write("sysfs/devices/system/node/node0/cpulist", "0\n");
    write("sysfs/devices/system/node/node1/cpulist", "1\n");
    let process = format!("proc/{}", std::process::id());
    write(&format!("{process}/status"), "Mems_allowed_list:\t0-1\n");
    let trees = ["SYSFS", "PROC"]
        .map(|tree| format!("IOPLANE_TEST_{tree}={}", daemon.path(&tree.to_lowercase()).display()));
    let daemon = daemon.start_by(&["env", &trees[0], &trees[1]]);

    let cpu_of = |core: &Value| {
        let list = daemon.json(&["core", "list"]);
        let one = list.as_array().unwrap().iter().find(|one| one["id"] == *core).unwrap();
        one["cpu"].as_u64().unwrap()
    };
    let mut guest = daemon::reader::Reader::of(&daemon, "a", 128 << 10);
    guest.submit(1);
    guest.wait(1);
    // Wherever the queue is, the guest's thread runs on the other node.
    let wanted = 1 - cpu_of(&cores_of(&daemon, "a")[0]);
    let words = format!("its memory is on NUMA node {wanted}");
    let (began, mut ticks) = (Instant::now(), 0);
    loop {
        ticks += 100;
        let mut fields = ["0"; 50].map(str::to_owned);
        (fields[11], fields[36]) = (ticks.to_string(), wanted.to_string());
        let stat = format!("1 (CPU 0/KVM) {}\n", fields.join(" "));
        std::fs::create_dir_all(daemon.path(&format!("{process}/task/1"))).unwrap();
        std::fs::write(daemon.path(&format!("{process}/task/1/stat")), stat).unwrap();
        // More and more to do: enough that the node matters, before there is so much that the queue moves for balance.
        let pause = Duration::from_millis(40).saturating_sub(began.elapsed() / 1000);
        for _ in 0..20 {
            guest.submit(64);
            guest.wait(64);
            std::thread::sleep(pause);
        }
        if decisions(&daemon).iter().any(|one| one["text"].as_str().unwrap().contains(&words)) {
            break;
        }
        assert!(began.elapsed() < 2 * LIMIT, "it is not said that {words}: {:?}", decisions(&daemon));
    }
    daemon.until(|| cpu_of(&cores_of(&daemon, "a")[0]) == wanted);
    guest.submit(64);
    guest.wait(64);
}
