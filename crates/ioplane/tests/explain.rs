//! `ioplane explain` with a real daemon: what is planted is found, and nothing else. (`crates/explain/tests` has each cause.)

mod daemon;

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::driver::net::{NetHeader, Pair, PairPlan};
use ioplane_testkit::driver::spec::VIRTIO_F_EVENT_IDX;
use ioplane_testkit::driver::{GuestMemory, RingMode};
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};
use serde_json::Value;

/// A core as it is if nobody says how: it decides for each queue whether to poll it.
const ADAPTIVE: &str = "[[core]]\nnotify = \"adaptive\"\n";
/// One that is never awake for nothing.
const NOTIFIED: &str = "[[core]]\nnotify = \"notified\"\n";

/// Each of these tests on either core.
macro_rules! on_each_core {
    ($($name:ident,)*) => {
        mod on_an_adaptive_core { $(#[test] fn $name() { super::$name(super::ADAPTIVE) })* }
        mod on_a_notified_core { $(#[test] fn $name() { super::$name(super::NOTIFIED) })* }
    };
}

on_each_core! {
    a_healthy_disk_has_nothing_that_stands_out,
    a_limit_that_bites_is_found,
    a_limit_of_a_group_that_bites_is_found_and_its_neighbour_is_healthy,
    a_driver_without_event_idx_is_found,
    a_greedy_neighbour_is_found,
    a_slow_disk_is_found,
    a_full_ring_is_found,
    one_queue_in_use_is_found,
    a_slow_receiver_is_found,
    a_healthy_receiver_has_nothing_that_stands_out,
    a_healthy_image_with_several_queues_has_nothing_that_stands_out,
}

/// What else this machine runs has less of it than this test, its guest and its daemon: they inherit it.
fn undisturbed() {
    if let Err(error) = rustix::process::setpriority_process(None, -19) {
        eprintln!("this test shares the processors with whatever else runs here: {error}");
    }
}

/// One test at a time: each measures, and some want all of a processor.
static ALONE: Mutex<()> = Mutex::new(());

/// A daemon that is not disturbed, by other tests of this file least of all.
struct Undisturbed {
    daemon: TestDaemon,
    _alone: MutexGuard<'static, ()>,
}

impl Undisturbed {
    /// Nothing runs yet.
    fn new() -> Self {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        undisturbed();
        Undisturbed { daemon: TestDaemon::new(""), _alone }
    }
}

impl Deref for Undisturbed {
    type Target = TestDaemon;

    fn deref(&self) -> &TestDaemon {
        &self.daemon
    }
}

impl DerefMut for Undisturbed {
    fn deref_mut(&mut self) -> &mut TestDaemon {
        &mut self.daemon
    }
}

/// One with this configuration that answers.
fn daemon(config: &str) -> Undisturbed {
    let mut daemon = Undisturbed::new();
    daemon.configure(config);
    daemon.start();
    daemon
}

/// A guest that reads for as long as `during` takes: never more than so many requests in flight, with a pause between two rounds.
fn while_reading<T>(mut guest: Reader, at_once: usize, pause: Duration, during: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut in_flight = 0;
            while !over.load(Ordering::Acquire) {
                if in_flight < at_once {
                    guest.submit(at_once - in_flight);
                }
                in_flight = at_once - guest.reap();
                std::thread::sleep(pause);
            }
        });
        let _end = EndOf(&over);
        during()
    })
}

/// Says that it is over, also if what is under way panics.
struct EndOf<'a>(&'a AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn explained(daemon: &TestDaemon, name: &str) -> Value {
    daemon.json(&["explain", name, "--interval", "1s"])
}

/// Of a guest that reads now and then, between two requests.
const PAUSE: Duration = Duration::from_millis(1);

/// Looks until `cause` is found, which a busy machine may hide for a while, and nothing else before or with it.
fn look_for(daemon: &TestDaemon, name: &str, cause: &str) -> Value {
    let end = Instant::now() + LIMIT;
    loop {
        let report = explained(daemon, name);
        let mut found = causes(&report);
        // Several devices of a group may have it.
        let there = found.contains(&cause);
        found.retain(|other| *other != cause);
        assert_eq!(found, [""; 0], "beside {cause}, or instead of it: {report}");
        if there {
            return report;
        }
        assert!(Instant::now() < end, "{cause} is not found: {report}");
    }
}

/// Looks until nothing at all is found, a core starved by the rest of this machine included; all else is not found even once.
fn look_for_nothing(daemon: &TestDaemon, name: &str) -> Value {
    let end = Instant::now() + LIMIT;
    loop {
        let report = explained(daemon, name);
        assert_eq!(causes(&report), [""; 0], "{report}");
        if report["findings"].as_array().unwrap().is_empty() {
            return report;
        }
        assert!(Instant::now() < end, "the core is always starved: {report}");
    }
}

/// Where the time of the first device's requests goes, in words.
fn said(report: &Value) -> &str {
    report["devices"][0]["text"].as_str().unwrap()
}

/// The finding of that cause.
fn finding<'r>(report: &'r Value, cause: &str) -> &'r Value {
    report["findings"].as_array().unwrap().iter().find(|one| one["cause"] == cause).unwrap()
}

/// What is found. Where other tests have the processor a core is starved indeed, which is the only thing that nobody has planted.
fn causes(report: &Value) -> Vec<&str> {
    let all = report["findings"].as_array().unwrap().iter();
    all.map(|finding| finding["cause"].as_str().unwrap()).filter(|cause| *cause != "starved_core").collect()
}

fn a_healthy_disk_has_nothing_that_stands_out(core: &str) {
    let daemon = daemon(&format!("{core}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    let guest = Reader::connect(&daemon, "a");
    let report = while_reading(guest, 1, PAUSE, || look_for_nothing(&daemon, "a"));
    assert!(report["devices"][0]["units_per_s"].as_f64() > Some(50.0), "{report}");
    assert!(report["seconds"].as_f64() >= Some(1.0), "{report}");
    let text = said(&report);
    assert!(text.starts_with("A request of a takes "), "{report}");
    assert!(
        text.contains(" until the core takes it, ") && text.contains(" in the device (memory)"),
        "{report}"
    );
    let said = daemon.cli(&["explain", "a", "--interval", "1s"]);
    assert!(said.out.contains("no requests in this time"), "{}", said.out);
}

fn a_limit_that_bites_is_found(core: &str) {
    let config =
        format!("{core}[[disk]]\nname = \"a\"\nmemory = \"1M\"\niops_limit = 200\niops_burst = 10\n");
    let daemon = daemon(&config);
    let guest = Reader::connect(&daemon, "a");
    let report = while_reading(guest, 64, Duration::ZERO, || look_for(&daemon, "a", "limit"));
    let remedy = finding(&report, "limit")["remedy"].as_str().unwrap();
    assert!(remedy.contains("disk set a --iops-limit"), "{report}");
    assert!(said(&report).contains(" in the ring, since a limit holds it back"), "{report}");
}

/// Disks a and b of group g, whose limit they reach together, c of a group whose limit is far away, and d, which no VM has.
const GROUPS: &str = "[[group]]\nname = \"g\"\niops_limit = 200\niops_burst = 100\n[[group]]\nname = \"h\"\niops_limit = 1000000\n\
    [[disk]]\nname = \"a\"\nmemory = \"1M\"\ngroup = \"g\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\ngroup = \"g\"\n\
    [[disk]]\nname = \"c\"\nmemory = \"1M\"\ngroup = \"h\"\n[[disk]]\nname = \"d\"\nmemory = \"1M\"\ngroup = \"h\"\n";

fn a_limit_of_a_group_that_bites_is_found_and_its_neighbour_is_healthy(core: &str) {
    let daemon = daemon(&format!("{core}{GROUPS}"));
    let [a, b, c] = ["a", "b", "c"].map(|name| Reader::connect(&daemon, name));
    let pause = Duration::from_millis(1);
    let both = |during: &dyn Fn()| {
        while_reading(a, 48, pause, || while_reading(b, 16, pause, || while_reading(c, 1, pause, during)));
    };
    both(&|| {
        for name in ["a", "b", "g"] {
            let report = look_for(&daemon, name, "limit");
            let limit = finding(&report, "limit");
            let text = limit["text"].as_str().unwrap();
            assert!(text.starts_with("the limit of its group g of 200 requests per second bites"), "{text}");
            assert!(text.contains("of the whole group"), "{text}");
            assert_eq!(limit["remedy"], "ioplane group set g --iops-limit N, or 0 for no limit");
        }
        let report = explained(&daemon, "c");
        assert_eq!(causes(&report), [""; 0], "{report}");
        assert!(report["devices"][0]["units_per_s"].as_f64() > Some(50.0), "{report}");
        // What helps, as it was said.
        assert_eq!(daemon.cli(&["group", "set", "g", "--iops-limit", "0"]).code, 0);
        let end = Instant::now() + LIMIT;
        loop {
            let report = explained(&daemon, "g");
            let found = causes(&report);
            if !found.contains(&"limit") {
                assert_eq!(found, [""; 0], "{report}");
                return;
            }
            assert!(found.iter().all(|cause| *cause == "limit"), "{report}");
            assert!(Instant::now() < end, "it bites still: {report}");
        }
    });
}

#[test]
fn a_vm_and_a_group_are_explained_by_their_names() {
    let daemon = daemon(&format!("{ADAPTIVE}{GROUPS}"));
    let named = |report: &Value| {
        let devices = report["devices"].as_array().unwrap().iter();
        devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // Nobody is connected: a group has its devices all the same.
    assert_eq!(named(&explained(&daemon, "g")), ["a", "b"]);
    let [a, c] = ["a", "c"].map(|name| Reader::connect(&daemon, name));
    let vm = {
        let end = Instant::now() + LIMIT;
        loop {
            let (_, disk) = daemon.http("GET", "/v1/disks/c", "");
            if let Some(vm) = disk["vm"]["name"].as_str() {
                break vm.to_owned();
            }
            assert!(Instant::now() < end, "it has no VM: {disk}");
        }
    };
    let pause = Duration::from_millis(5);
    let report = while_reading(a, 1, pause, || while_reading(c, 1, pause, || explained(&daemon, &vm)));
    assert_eq!((named(&report), &report["name"]), (vec!["a".to_owned(), "c".to_owned()], &vm.into()));
    let reads = |at: usize| report["devices"][at]["units_per_s"].as_f64() > Some(0.0);
    assert!(reads(0) && reads(1), "{report}");
    assert_eq!(named(&explained(&daemon, "h")), ["c", "d"]);
    daemon.cli(&["group", "add", "none"]);
    let said = daemon.cli(&["explain", "none", "--interval", "1s"]);
    assert!(said.out.contains("it has no devices"), "{}", said.out);
}

fn a_driver_without_event_idx_is_found(core: &str) {
    let daemon = daemon(&format!("{core}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    let features = Wants::default().features & !VIRTIO_F_EVENT_IDX;
    let guest = Reader::connect_with(&daemon, "a", Wants { features, ..Wants::default() });
    let report = while_reading(guest, 1, PAUSE, || explained(&daemon, "a"));
    assert_eq!(causes(&report), ["no_event_idx"], "{report}");
}

fn a_greedy_neighbour_is_found(core: &str) {
    let daemon = daemon(&format!(
        "{core}[[group]]\nname = \"modest\"\n[[group]]\nname = \"greedy\"\nweight = 1000\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\ngroup = \"modest\"\n\
         [[disk]]\nname = \"b\"\nmemory = \"1M\"\ngroup = \"greedy\"\n"
    ));
    let (modest, greedy) = (Reader::connect(&daemon, "a"), Reader::of(&daemon, "b", 1 << 18));
    let [report, its] = while_reading(greedy, 64, Duration::ZERO, || {
        // Few in flight: its ring is not full.
        while_reading(modest, 4, Duration::from_millis(1), || {
            [look_for(&daemon, "a", "greedy_neighbour"), explained(&daemon, "b")]
        })
    });
    let text = finding(&report, "greedy_neighbour")["text"].as_str().unwrap();
    assert!(text.contains("of its work is disk b"), "{report}");
    // The greedy one itself waits for nobody, and a larger ring would not help it: what it waits for is the core.
    assert_eq!(causes(&its), [""; 0], "{its}");
}

/// A disk on a file whose reads take so long, two at a time.
fn slow_disk(core: &str, read: Duration) -> Option<(Undisturbed, FuseDisk)> {
    let mut daemon = Undisturbed::new();
    let fault = InjectedFault { call: Call::Read, bytes: 0..1 << 20, how: How::Slow(read), times: u32::MAX };
    let below = match FuseDisk::new(&daemon.path("fuse"), 1 << 20) {
        Ok(below) => below,
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            return None;
        }
    };
    below.faults(&[fault]);
    daemon.configure(&format!("{core}[[disk]]\nname = \"a\"\npath = {:?}\ndirect = \"on\"\n", below.path()));
    daemon.start();
    Some((daemon, below))
}

fn a_slow_disk_is_found(core: &str) {
    let Some((daemon, below)) = slow_disk(core, Duration::from_millis(8)) else { return };
    let guest = Reader::connect(&daemon, "a");
    let report = while_reading(guest, 1, Duration::from_millis(1), || look_for(&daemon, "a", "slow_disk"));
    let remedy = finding(&report, "slow_disk")["remedy"].as_str().unwrap();
    assert!(remedy.contains(below.path().to_str().unwrap()), "{report}");
    assert!(said(&report).contains(&format!(" in the device ({}", below.path().display())), "{report}");
}

fn a_full_ring_is_found(core: &str) {
    // 64 requests, two at a time: some 4 ms each, so that the guest has time to fill the ring again.
    let Some((daemon, _below)) = slow_disk(core, Duration::from_micros(80)) else { return };
    let guest = Reader::connect(&daemon, "a");
    while_reading(guest, 64, Duration::ZERO, || {
        let end = Instant::now() + LIMIT;
        loop {
            let report = explained(&daemon, "a");
            let mut found = causes(&report);
            // Where the machine is busy each takes as long as on a slow disk, and that is right then.
            let took = |part: &str| report["devices"][0][part].as_f64().unwrap();
            if took("device_p50_us") >= 5_000.0 || took("device_p99_us") >= 50_000.0 {
                found.retain(|cause| *cause != "slow_disk");
            }
            if found == ["full_ring"] {
                return;
            }
            assert_eq!(found, [""; 0], "{report}");
            assert!(Instant::now() < end, "it is not found: {report}");
        }
    });
}

fn one_queue_in_use_is_found(core: &str) {
    let daemon = daemon(&format!("{core}[[disk]]\nname = \"a\"\nmemory = \"1M\"\nqueues = 4\n"));
    let guest = Reader::of_queues(&daemon, "a", 1 << 18, 4);
    let report = while_reading(guest, 32, Duration::ZERO, || look_for(&daemon, "a", "one_queue"));
    assert!(report.to_string().contains("3 further queues are idle"), "{report}");
}

/// Four others that want the processor that the core is pinned to.
fn a_starved_core_is_found(core: &str, bytes: u32, at_once: usize, pause: Duration) {
    let daemon = daemon(&format!("{core}cpu = 0\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    let over = AtomicBool::new(false);
    let crowd = || {
        let mut set = rustix::thread::CpuSet::new();
        set.set(0);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        while !over.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
    };
    let guest = Reader::of(&daemon, "a", bytes);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(crowd);
        }
        let _end = EndOf(&over);
        while_reading(guest, at_once, pause, || {
            let end = Instant::now() + LIMIT;
            loop {
                let report = explained(&daemon, "a");
                assert_eq!(causes(&report), [""; 0], "{report}");
                let all = report["findings"].as_array().unwrap();
                if let Some(starved) = all.iter().find(|one| one["cause"] == "starved_core") {
                    let remedy = starved["remedy"].as_str().unwrap();
                    assert!(remedy.contains("off processor 0"), "{report}");
                    return;
                }
                assert!(Instant::now() < end, "{report}; {}", daemon.json(&["status"])["cores"]);
            }
        });
    });
}

#[test]
fn a_starved_core_that_polls_is_found() {
    a_starved_core_is_found("[[core]]\nnotify = \"polled\"\n", 4096, 1, Duration::from_millis(1));
}

/// One that sleeps most of the time is starved by nobody: the kernel prefers whoever wakes. So this one has much to do.
#[test]
fn a_starved_core_that_decides_for_itself_is_found() {
    a_starved_core_is_found(ADAPTIVE, 1 << 18, 32, Duration::ZERO);
}

#[test]
fn a_starved_core_that_is_kicked_is_found() {
    a_starved_core_is_found(NOTIFIED, 1 << 18, 32, Duration::ZERO);
}

/// A guest's end of a NIC.
struct Plug {
    front: FrontEnd,
    pair: Pair,
    _memory: GuestMemory,
}

fn plug(daemon: &TestDaemon, name: &str) -> Plug {
    let wants = Wants { features: Wants::default().features | 1 << 15, ..Wants::default() };
    let mut front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), wants).unwrap();
    let mut memory = GuestMemory::new(8 << 20).unwrap();
    let mut pair = Pair::new(&mut memory, PairPlan::mergeable(RingMode::of(front.features()))).unwrap();
    front.share(&memory).unwrap();
    let bases = [pair.rx().base(), pair.tx().base()];
    for (index, (place, base)) in (0..).zip(pair.places().into_iter().zip(bases)) {
        front.start(index, &memory, place, base).unwrap();
    }
    Plug { front, pair, _memory: memory }
}

/// Two NICs, one of which sends all the time; the other takes its frames, or has no buffers for them. What is found of that one.
fn found_at_a_receiver(core: &str, takes: bool, look: impl FnOnce(&TestDaemon) -> Value) -> Value {
    let daemon = daemon(&format!(
        "{core}[[switch]]\nname = \"lan\"\n[[nic]]\nname = \"a\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n\
         [[nic]]\nname = \"b\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0b\"\n"
    ));
    let (mut sender, mut receiver) = (plug(&daemon, "b"), plug(&daemon, "a"));
    let frame = [&[2, 0, 0, 0, 0, 0xa][..], &[2, 0, 0, 0, 0, 0xb], &[0x88, 0xb5], &[7; 200]].concat();
    if takes {
        receiver.pair.fill();
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                sender.pair.reap().unwrap();
                // Far fewer than it has buffers for.
                for _ in 0..8 {
                    sender.pair.send(NetHeader::default(), &frame).unwrap();
                }
                sender.front.kick(1);
                while receiver.pair.take_frame().unwrap().is_some() {}
                receiver.front.kick(0);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let _end = EndOf(&over);
        look(&daemon)
    })
}

fn a_slow_receiver_is_found(core: &str) {
    let report = found_at_a_receiver(core, false, |daemon| look_for(daemon, "a", "slow_receiver"));
    let text = finding(&report, "slow_receiver")["text"].as_str().unwrap();
    assert!(text.contains("were dropped"), "{report}");
}

fn a_healthy_receiver_has_nothing_that_stands_out(core: &str) {
    let report = found_at_a_receiver(core, true, |daemon| look_for_nothing(daemon, "a"));
    assert!(report["devices"][0]["units_per_s"].as_f64() > Some(50.0), "{report}");
}

fn a_healthy_image_with_several_queues_has_nothing_that_stands_out(core: &str) {
    let mut daemon = Undisturbed::new();
    let image = daemon.image("a.img", 1 << 20);
    daemon.configure(&format!("{core}[[disk]]\nname = \"a\"\npath = {image:?}\nqueues = 4\n"));
    daemon.start();
    let guest = Reader::of_queues(&daemon, "a", 4096, 4);
    let report = while_reading(guest, 1, PAUSE, || look_for_nothing(&daemon, "a"));
    assert!(report["devices"][0]["units_per_s"].as_f64() > Some(50.0), "{report}");
}

/// Reads now and then until `there` finds what it looks for in the log of decisions.
fn decision(
    daemon: &TestDaemon,
    guest: &mut Reader,
    at_once: usize,
    there: impl Fn(&Value) -> bool,
) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        guest.submit(at_once);
        std::thread::sleep(Duration::from_millis(2));
        guest.reap();
        let (_, log) = daemon.http("GET", "/v1/pool/decisions?from=0", "");
        if let Some(found) = log["decisions"].as_array().unwrap().iter().find(|one| there(one)) {
            return found.clone();
        }
        assert!(Instant::now() < deadline, "was not decided: {log}");
    }
}

#[test]
fn how_a_queue_is_served_is_told_with_the_reason() {
    let disk = "[[core]]\nnotify = \"adaptive\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";
    let daemon = daemon(disk);
    let mut guest = Reader::connect(&daemon, "a");
    // One request every few ms: the driver is asked to kick.
    let found = decision(&daemon, &mut guest, 1, |one| one["decision"] == "arm");
    assert_eq!((&found["device"], &found["queue"], &found["from"]), (&"a".into(), &0.into(), &0.into()));
    let text = found["text"].as_str().unwrap();
    assert!(text.starts_with("a queue 0: armed ") && text.contains(", since "), "{text}");
    // Where the core seldom has a processor it is polled for longer.
    let report = while_reading(guest, 1, Duration::from_millis(1), || {
        let end = Instant::now() + LIMIT;
        loop {
            let report = explained(&daemon, "a");
            let said = report["choices"][0]["text"].as_str().unwrap_or_default();
            if said.starts_with("armed most of the time (") && said.contains(", since ") {
                return report;
            }
            assert!(Instant::now() < end, "{report}");
        }
    });
    assert_eq!(causes(&report), [""; 0], "{report}");
    // The same in the other places, of the queue of another front end.
    let mut guest = Reader::connect(&daemon, "a");
    let end = Instant::now() + LIMIT;
    let armed = |count: &Value| count["choice"] == "armed" && count["us"].as_u64() > Some(0);
    let disk = loop {
        guest.submit(1);
        std::thread::sleep(Duration::from_millis(2));
        guest.reap();
        let (_, disk) = daemon.http("GET", "/v1/disks/a", "");
        if disk["queues"][0]["choice"]["counts"].as_array().is_some_and(|counts| counts.iter().any(armed)) {
            break disk;
        }
        assert!(Instant::now() < end, "it is never armed: {disk}");
    };
    assert!(daemon.cli(&["disk", "show", "a"]).out.contains("polled "), "{disk}");
    assert!(daemon.cli(&["core", "decisions"]).out.contains("a queue 0: armed "));
    let top = daemon.json(&["top", "--once", "--interval", "1s"]);
    // Whatever it had been told before, it has been armed since.
    assert!(top["queues"][0]["armed_percent"].as_f64() > Some(0.0), "{top}");
}

#[test]
fn a_limit_that_begins_to_bite_and_ends_is_in_the_log() {
    let config =
        format!("{NOTIFIED}[[disk]]\nname = \"a\"\nmemory = \"1M\"\niops_limit = 200\niops_burst = 10\n");
    let daemon = daemon(&config);
    let mut guest = Reader::connect(&daemon, "a");
    let found = decision(&daemon, &mut guest, 64, |one| one["decision"] == "throttle");
    let text = found["text"].as_str().unwrap();
    assert!(text.contains("since a limit of requests per second holds them back"), "{text}");
    assert_eq!(found["device"], "a");
    daemon.cli(&["disk", "set", "a", "--iops-limit", "0"]);
    let ended = decision(&daemon, &mut guest, 64, |one| {
        one["decision"] == "throttle" && one["number"].as_u64() > found["number"].as_u64()
    });
    assert!(ended["text"].as_str().unwrap().contains("throttled no longer"), "{ended}");
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let daemon = daemon(&format!("{NOTIFIED}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"));
    for (path, status, field) in [
        ("/v1/explain/nobody", 404, ""),
        ("/v1/explain/a?seconds=0", 422, "seconds"),
        ("/v1/explain/a?seconds=601", 422, "seconds"),
        ("/v1/explain/a?seconds=x", 422, "seconds"),
        ("/v1/explain/a?minutes=1", 422, "minutes"),
    ] {
        let (got, answer) = daemon.http("GET", path, "");
        assert_eq!((got, answer["field"].as_str().unwrap_or_default()), (status, field), "{path}: {answer}");
    }
}
