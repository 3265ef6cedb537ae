//! Groups of a real daemon: given, shown, changed while guests use their devices, kept.

mod daemon;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use serde_json::{Value, json};

/// One group of the daemon.
fn group(daemon: &TestDaemon, name: &str) -> Value {
    daemon.json(&["group", "show", name])
}

#[test]
fn the_limits_of_a_group_are_those_of_all_its_disks_together() {
    let daemon = TestDaemon::open("[[core]]\nspin_us = 500\n");
    let added = daemon.json(&["group", "add", "web", "--iops-limit", "200", "--iops-burst", "10"]);
    assert_eq!(
        (&added["weight"], &added["iops_limit"], &added["origin"]),
        (&json!(1), &json!(200), &json!("added"))
    );
    for disk in ["a", "b"] {
        let added = daemon.json(&["disk", "add", disk, "--memory", "1M", "--group", "web"]);
        assert_eq!(added["group"], "web");
    }
    daemon.json(&["disk", "add", "c", "--memory", "1M"]);
    assert_eq!(group(&daemon, "web")["disks"], json!(["a", "b"]));
    let mut guests = ["a", "b"].map(|disk| Reader::connect(&daemon, disk));
    let mut other = Reader::connect(&daemon, "c");
    let began = Instant::now();
    for _ in 0..2 {
        guests.iter_mut().for_each(|guest| guest.submit(25));
        guests.iter_mut().for_each(|guest| guest.wait(25));
    }
    // The burst, one more, and the rest at their rate.
    let least = Duration::from_secs(100 - 11) / 200;
    assert!(began.elapsed() >= least, "100 requests in {:?}", began.elapsed());
    // One per second: 60 requests do not come in the time that the test waits.
    daemon.json(&["group", "set", "web", "--iops-limit", "1", "--iops-burst", "1"]);
    guests.iter_mut().for_each(|guest| guest.submit(30));
    for _ in 0..4 {
        other.submit(25);
        other.wait(25);
    }
    let early: Vec<usize> = guests.iter_mut().map(Reader::reap).collect();
    assert!(early.iter().sum::<usize>() <= 6, "{early:?} answers at once");
    // One of them leaves: it has no limit any more, and the other has.
    let said = daemon.cli(&["disk", "set", "a", "--group", ""]);
    assert!(said.out.contains("group") && said.out.contains("none"), "{}", said.out);
    guests[0].wait(30 - early[0]);
    let late = guests[1].reap();
    assert!(early[1] + late < 20, "{late} answers of one that is limited");
    assert_eq!(group(&daemon, "web")["disks"], json!(["b"]));
    daemon.json(&["group", "set", "web", "--iops-limit", "0"]);
    guests[1].wait(30 - early[1] - late);
    assert_eq!(group(&daemon, "web")["iops_limit"], Value::Null);
    assert_eq!(daemon.disk("b")["connected"], true);
}

/// How many requests of `slow`, which begins first, are done when all 64 of `fast` are.
fn behind(fast: &mut Reader, slow: &mut Reader) -> usize {
    slow.submit(64);
    fast.submit(64);
    let (mut left, end) = (64, Instant::now() + Duration::from_secs(20));
    while left > 0 {
        left -= fast.reap();
        assert!(Instant::now() < end, "{left} of 64 are not answered");
    }
    let done = slow.reap();
    slow.wait(64 - done);
    done
}

#[test]
fn weights_divide_a_core_and_change_while_guests_use_it() {
    let daemon = TestDaemon::open(
        "[[core]]\n[[group]]\nname = \"one\"\nweight = 4\n[[group]]\nname = \"two\"\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\ngroup = \"one\"\n\
         [[disk]]\nname = \"b\"\nmemory = \"1M\"\ngroup = \"two\"\n",
    );
    let [mut a, mut b] = ["a", "b"].map(|disk| Reader::of(&daemon, disk, 512 << 10));
    // With equal weights it would be some 64 each time. This thread may be late, so the core may have done more than it seems.
    let shows = |fast: &mut Reader, slow: &mut Reader| (0..50).any(|_| behind(fast, slow) <= 32);
    assert!(shows(&mut a, &mut b), "a group of weight 4 is not ahead of one of weight 1");
    daemon.json(&["group", "set", "one", "--weight", "1"]);
    let set = daemon.json(&["group", "set", "two", "--weight", "4"]);
    assert_eq!(set["weight"], 4);
    assert!(shows(&mut b, &mut a), "weights do not change while guests run");
}

#[test]
fn a_reload_changes_groups_and_what_is_set_at_run_time_is_kept() {
    let disk = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";
    let with = |group: &str| format!("[[core]]\n[[group]]\nname = \"web\"\n{group}{disk}group = \"web\"\n");
    let mut daemon = TestDaemon::open(&with("weight = 3\n"));
    assert_eq!(
        (&group(&daemon, "web")["weight"], &group(&daemon, "web")["origin"]),
        (&json!(3), &json!("config"))
    );
    let mut guest = Reader::connect(&daemon, "a");
    guest.submit(1);
    guest.wait(1);
    daemon.configure(&with("weight = 5\nbandwidth_limit = \"10M\"\n"));
    let said = daemon.cli(&["reload"]);
    assert!(said.code == 0 && said.out.contains("group web changed"), "{}{}", said.out, said.err);
    assert_eq!(group(&daemon, "web")["bandwidth_limit"], 10 << 20);
    // What is set at run time stays, through a death of the daemon too; what the configuration changes is the configuration's again.
    daemon.json(&["group", "set", "web", "--weight", "7", "--iops-limit", "9"]);
    daemon.json(&["group", "add", "db", "--weight", "2"]);
    daemon.json(&["disk", "add", "b", "--memory", "1M", "--group", "db"]);
    let saved = daemon.cli(&["config", "save", "--print"]).out;
    assert!(
        saved.contains("[[group]]\nname = \"db\"\nweight = 2\n") && saved.contains("group = \"db\""),
        "{saved}"
    );
    daemon.kill9();
    daemon.start();
    assert_eq!(
        (&group(&daemon, "web")["weight"], &group(&daemon, "web")["iops_limit"]),
        (&json!(7), &json!(9))
    );
    assert_eq!((&group(&daemon, "db")["disks"], &daemon.disk("b")["group"]), (&json!(["b"]), &json!("db")));
    daemon.configure(&with("weight = 6\nbandwidth_limit = \"10M\"\n"));
    assert_eq!(daemon.cli(&["reload"]).code, 0);
    assert_eq!(
        (&group(&daemon, "web")["weight"], &group(&daemon, "web")["iops_limit"]),
        (&json!(6), &json!(9))
    );
    // A disk leaves its group while a guest uses it, and the group goes with the configuration, but not from under a disk.
    let guest = Reader::connect(&daemon, "a");
    daemon.configure(&format!("[[core]]\n{disk}"));
    daemon.json(&["disk", "set", "b", "--group", "web"]);
    let refused = daemon.refused(&["reload"]);
    assert!(refused.contains("group web is gone from the configuration, and disk b is in it"), "{refused}");
    daemon.json(&["disk", "set", "b", "--group", "db"]);
    let said = daemon.cli(&["reload"]);
    assert!(
        said.out.contains("disk a changed") && said.out.contains("group web removed"),
        "{}{}",
        said.out,
        said.err
    );
    assert_eq!((&daemon.disk("a")["group"], &daemon.disk("a")["connected"]), (&Value::Null, &json!(true)));
    let names: Vec<Value> = daemon
        .json(&["group", "list"])
        .as_array()
        .unwrap()
        .iter()
        .map(|group| group["name"].clone())
        .collect();
    assert_eq!(names, [json!("db")]);
    drop(guest);
}

#[test]
fn a_group_goes_on_in_the_process_that_takes_over() {
    let daemon = TestDaemon::open("[[core]]\nspin_us = 500\n");
    daemon.json(&["group", "add", "web", "--weight", "3", "--iops-limit", "1", "--iops-burst", "1"]);
    daemon.json(&["disk", "add", "a", "--memory", "1M", "--group", "web"]);
    let mut guest = Reader::connect(&daemon, "a");
    guest.submit(40);
    let said = daemon.cli(&["upgrade"]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    let after = group(&daemon, "web");
    assert_eq!((&after["weight"], &after["disks"]), (&json!(3), &json!(["a"])));
    std::thread::sleep(Duration::from_millis(100));
    let early = guest.reap();
    assert!(early < 20, "{early} answers of one that is limited");
    daemon.json(&["group", "set", "web", "--iops-limit", "0"]);
    guest.wait(40 - early);
    daemon.kill_whoever_answers();
}

#[test]
fn what_makes_no_sense_is_refused_by_field() {
    let daemon = TestDaemon::open(
        "[[core]]\n[[switch]]\nname = \"lan\"\n[[group]]\nname = \"web\"\n\
         [[nic]]\nname = \"n\"\nswitch = \"lan\"\ngroup = \"web\"\n",
    );
    let refused = |method: &str, path: &str, body: Value| {
        let (status, answer) = daemon.http(method, path, &body.to_string());
        assert!((400..500).contains(&status), "{path} {body}: {status} {answer}");
        let word = |key: &str| answer[key].as_str().unwrap_or_default().to_owned();
        (word("code"), word("field"))
    };
    let field = |method: &str, path: &str, body: Value| refused(method, path, body).1;
    assert_eq!(field("PUT", "/v1/disks/a", json!({"memory": "1M", "group": "wbe"})), "group");
    assert_eq!(field("PUT", "/v1/disks/a", json!({"memory": "1M", "group": "a b"})), "group");
    assert_eq!(field("PATCH", "/v1/nics/n", json!({"group": "db"})), "group");
    assert_eq!(field("PUT", "/v1/groups/db", json!({"weight": 0})), "weight");
    assert_eq!(field("PATCH", "/v1/groups/web", json!({"weight": 1001})), "weight");
    assert_eq!(field("PATCH", "/v1/groups/web", json!({"iops_burst": 4})), "iops_burst");
    assert_eq!(refused("PATCH", "/v1/groups/web", json!({})).1, "");
    assert_eq!(refused("PUT", "/v1/groups/web", json!({"weight": 2})), ("exists".into(), "weight".into()));
    assert_eq!(daemon.http("PUT", "/v1/groups/web", "{\"weight\": 1}").0, 200);
    assert_eq!(refused("GET", "/v1/groups/db", json!({})).0, "not_found");
    assert_eq!(daemon.http("PUT", "/v1/groups/db", "").0, 201);
    assert_eq!(daemon.http("PATCH", "/v1/nics/n", "{\"group\": \"db\"}").1["group"], "db");
    // Not from under a device, nor from the configuration.
    assert_eq!(refused("DELETE", "/v1/groups/db", json!({})).0, "in_use");
    assert_eq!(refused("DELETE", "/v1/groups/web", json!({})).0, "conflict");
    assert_eq!(daemon.http("PATCH", "/v1/nics/n", "{\"group\": \"\"}").1["group"], Value::Null);
    assert_eq!(daemon.http("DELETE", "/v1/groups/db", "").0, 200);
    let shown = daemon.cli(&["nic", "show", "n"]).out;
    assert!(shown.lines().any(|line| line.split_whitespace().eq(["group", "none"])), "{shown}");
}

#[test]
fn a_configuration_with_a_group_that_is_not_there_is_refused() {
    let daemon = TestDaemon::open("[[core]]\n");
    let text = "[[core]]\n[[group]]\nname = \"web\"\nweight = 1001\n[[group]]\nname = \"db\"\n[[group]]\nname = \"db\"\n\
                [[disk]]\nname = \"a\"\nmemory = \"1M\"\ngroup = \"dbb\"\n";
    daemon.configure(text);
    let refused = daemon.refused(&["reload"]);
    for said in ["weight = 1001", "group db is there already, in line 5", "there is no group dbb", "write db"]
    {
        assert!(refused.contains(said), "{said}: {refused}");
    }
}

/// A guest that keeps both queues of its disk at work.
struct TwoQueues {
    front: FrontEnd,
    queues: [Disk; 2],
    _memory: GuestMemory,
}

impl TwoQueues {
    const BYTES: u32 = 512 << 10;

    fn connect(daemon: &TestDaemon, name: &str) -> Self {
        let mut memory = GuestMemory::new((4 << 20) + 128 * u64::from(Self::BYTES)).unwrap();
        let mut front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), Wants::default()).unwrap();
        let mode = RingMode::of(front.features());
        let plan = DiskPlan::new(64, Self::BYTES, Shape::Indirect);
        let queues = [(); 2].map(|()| Disk::new(&mut memory, 64, mode, plan).unwrap());
        front.track_inflight(2, 64).unwrap();
        front.share(&memory).unwrap();
        for (number, queue) in (0..).zip(&queues) {
            front.start(number, &memory, queue.place(), 0).unwrap();
        }
        TwoQueues { front, queues, _memory: memory }
    }

    /// Makes as many requests available as there are slots.
    fn fill(&mut self, queue: u16) {
        while self.queues[usize::from(queue)].submit(DiskOp::Read, 0, Self::BYTES).is_some() {}
        self.front.kick(queue);
    }

    fn reap(&mut self, queue: u16) -> usize {
        let mut count = 0;
        while let Some(done) = self.queues[usize::from(queue)].reap().unwrap() {
            assert!(done.ok(), "status {}", done.status);
            count += 1;
        }
        count
    }

    /// How many requests of the first queue, which has 64 in flight before `other` has, are done when all 64 of `other` are. `both`: its second
    /// queue has work all the time.
    fn behind(&mut self, other: &mut Reader, both: bool) -> usize {
        self.reap(0);
        self.fill(0);
        other.submit(64);
        let (mut left, end) = (64, Instant::now() + LIMIT);
        while left > 0 {
            if both {
                self.reap(1);
                self.fill(1);
            }
            left -= other.reap();
            assert!(Instant::now() < end, "{left} of 64 are not answered");
        }
        self.reap(0)
    }
}

#[test]
fn a_weight_holds_over_the_cores_of_a_group() {
    let daemon = TestDaemon::open(
        "[[core]]\n[[core]]\n[[group]]\nname = \"wide\"\n[[group]]\nname = \"narrow\"\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\nqueues = 2\ngroup = \"wide\"\n\
         [[disk]]\nname = \"b\"\nmemory = \"1M\"\ncore = 0\ngroup = \"narrow\"\n",
    );
    for queue in ["0", "1"] {
        daemon.json(&["core", "pin", "a", queue, queue]);
    }
    let mut wide = TwoQueues::connect(&daemon, "a");
    let mut narrow = Reader::of(&daemon, "b", TwoQueues::BYTES);
    // It has core 1 for itself, and leaves core 0 to the one that has no other: of the first queue, with 64 in flight all the time, hardly any
    // is done. Where each core goes by whole weights it is some 64.
    let end = Instant::now() + LIMIT;
    while wide.behind(&mut narrow, true) > 16 {
        assert!(Instant::now() < end, "on core 0 a group with two cores has what one with a single core has");
    }
    // Without work on core 1 its weight stands on core 0.
    while wide.behind(&mut narrow, false) < 40 {
        assert!(Instant::now() < end, "the weight does not come back");
    }
    wide.fill(1);
    while wide.behind(&mut narrow, true) > 16 {
        assert!(Instant::now() < end, "the weight does not follow a second time");
    }
}

/// What a group has in flight, and may have, on a disk of the host: (core, disks, bytes, bound).
fn in_flight(daemon: &TestDaemon, name: &str) -> Vec<(u64, Value, u64, Option<u64>)> {
    let shown = group(daemon, name);
    let lanes = shown["in_flight"].as_array().cloned().unwrap_or_default();
    let number = |lane: &Value, key: &str| lane[key].as_u64();
    let lane = |lane: &Value| {
        let bytes = number(lane, "bytes").unwrap();
        (number(lane, "core").unwrap(), lane["host_disks"].clone(), bytes, number(lane, "bound_bytes"))
    };
    lanes.iter().map(lane).collect()
}

/// Keeps guests at work until it is dropped.
struct Pump {
    busy: Arc<[AtomicBool; 2]>,
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pump {
    fn new(mut guests: [Reader; 2]) -> Self {
        let busy = Arc::new([true, true].map(AtomicBool::new));
        let ends = Arc::new(AtomicBool::new(false));
        let (is_busy, is_over) = (busy.clone(), ends.clone());
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                for (guest, busy) in guests.iter_mut().zip(&*is_busy) {
                    guest.reap();
                    if busy.load(Ordering::SeqCst) {
                        guest.submit(64);
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Pump { busy, ends, thread: Some(thread) }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))), "the guests have failed");
    }
}

#[test]
fn groups_on_two_cores_share_a_disk_of_the_host_by_weight() {
    const MIB: u64 = 1 << 20;
    let daemon = TestDaemon::new_beside_the_build("");
    let images = ["a.img", "b.img"].map(|image| daemon.path(image));
    for image in &images {
        std::fs::write(image, vec![1; 8 << 20]).unwrap();
    }
    let [a, b] = images.each_ref().map(|image| image.display());
    daemon.configure(&format!(
        "[[core]]\n[[core]]\n[[group]]\nname = \"one\"\n[[group]]\nname = \"three\"\nweight = 3\n\
         [[disk]]\nname = \"a\"\npath = \"{a}\"\ncore = 0\ngroup = \"one\"\n\
         [[disk]]\nname = \"b\"\npath = \"{b}\"\ncore = 1\ngroup = \"three\"\n"
    ));
    // They lie on a made-up disk, whatever file system the test is run on.
    let device = std::fs::metadata(&images[0]).unwrap().dev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let (disk, link) = (daemon.path("sys/devices/madeup"), daemon.path("sys/dev/block").join(number));
    std::fs::create_dir_all(&disk).unwrap();
    std::fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    let tree = format!("IOPLANE_TEST_SYSFS={}", daemon.path("sys").display());
    let daemon = daemon.start_by(&["env", &tree]);

    let pump = Pump::new(["a", "b"].map(|disk| Reader::of(&daemon, disk, 1 << 20)));
    let lane = |name: &str| in_flight(&daemon, name).into_iter().next();
    let bound = |name: &str| lane(name).and_then(|(.., bound)| bound);
    let eventually = |what: &str, come: &dyn Fn() -> bool| {
        let end = Instant::now() + LIMIT;
        while !come() {
            assert!(Instant::now() < end, "{what}: {:?} {:?}", lane("one"), lane("three"));
        }
    };
    eventually("what may be in flight is not 1 : 3", &|| {
        (bound("one"), bound("three")) == (Some(MIB), Some(3 * MIB))
    });
    let (core, disks, ..) = lane("three").unwrap();
    assert_eq!((core, disks), (1, json!(["madeup"])));
    eventually("more is in flight than may be", &|| {
        [("one", MIB), ("three", 3 * MIB)].iter().all(|(name, most)| {
            lane(name).is_some_and(|(_, _, bytes, bound)| bytes > 0 && bytes <= *most && bound == Some(*most))
        })
    });
    daemon.json(&["group", "set", "one", "--weight", "3"]);
    eventually("a new weight changes nothing", &|| {
        (bound("one"), bound("three")) == (Some(2 * MIB), Some(2 * MIB))
    });
    eventually("a person does not see it", &|| {
        daemon.cli(&["group", "show", "one"]).out.contains(" of at most 2M on madeup from core 0")
    });
    // One that asks for nothing gives its part to the other, and at last it is as if there was no other.
    pump.busy[1].store(false, Ordering::SeqCst);
    eventually("an idle group keeps its part", &|| lane("one").is_some() && bound("one") != Some(2 * MIB));
    eventually("an idle group is not forgotten", &|| lane("one").is_some() && bound("one").is_none());
    pump.busy[1].store(true, Ordering::SeqCst);
    eventually("a group that comes back has no part", &|| {
        (bound("one"), bound("three")) == (Some(2 * MIB), Some(2 * MIB))
    });
}
