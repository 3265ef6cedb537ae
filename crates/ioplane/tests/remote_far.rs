//! Hosts that share nothing but a cable: each has a network namespace and a mount namespace of its own, and between them is a relay that delays, loses
//! and drops packets. It never closes a connection: who is cut off hears nothing. They have one kernel nevertheless, so images are not locked.

mod daemon;

use std::time::{Duration, Instant};

use daemon::load::{await_no_guest, step_for, step_until, step_until_remote, zero};
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};
use ioplane_testkit::relay::{BOTH, Relay, RelayDirection};
use ioplane_testkit::space::{NetworkSpace, or_skip};
use serde_json::Value;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
const PORT: u16 = 10809;
/// How soon an import notices silence (docs/guide/failure.md).
const SILENCE: Duration = Duration::from_secs(10);
/// It looks once per second, and then somebody has to look at it, on a machine that does other things too.
const SLACK: Duration = Duration::from_secs(20);

/// An exporter, and importers each at the end of a cable of its own. Fields are dropped in this order.
struct Far {
    relays: Vec<Relay>,
    exporter: TestDaemon,
    importers: Vec<TestDaemon>,
    _spaces: Vec<NetworkSpace>,
}

/// Starts a host in its network, without a sight of the directories of the others among all. It dies with this test, else it would keep the namespaces.
fn start(host: TestDaemon, space: &NetworkSpace, all: &[String]) -> TestDaemon {
    let own = folder(&host);
    let others = all.iter().filter(|other| **other != own);
    let hide: String = others.map(|other| format!("mount -t tmpfs hidden {other} && ")).collect();
    let script = format!("{hide}exec \"$0\" \"$@\"");
    let dies = ["setpriv", "--pdeathsig", "KILL"];
    host.start_by(&[&space.within()[..], &dies, &["sh", "-c", &script]].concat())
}

fn folder(host: &TestDaemon) -> String {
    host.folder.path().display().to_string()
}

impl Far {
    /// With so many importers, none of which has the disk yet. `image` makes what is exported in the exporter's directory, and says which keys of the
    /// configuration name it. `None`, which is said aloud, where there are no namespaces or no TAP devices.
    fn new(importers: u8, seed: u64, image: impl FnOnce(&TestDaemon) -> String) -> Option<Far> {
        let wires = || -> std::io::Result<(Vec<Relay>, Vec<NetworkSpace>)> {
            let hub = NetworkSpace::new()?;
            let (mut relays, mut spaces) = (Vec::new(), Vec::new());
            for link in 0..importers {
                let space = NetworkSpace::new()?;
                let ends = [(&space, [10, 77, link, 2].into()), (&hub, [10, 77, link, 1].into())];
                relays.push(Relay::join(ends, seed + u64::from(link))?);
                spaces.push(space);
            }
            spaces.push(hub);
            Ok((relays, spaces))
        };
        let (relays, spaces) = or_skip(wires())?;
        let exporter = TestDaemon::new_beside_the_build("").without_locks();
        let keys = image(&exporter);
        exporter.configure(&format!(
            "[[core]]\n[[export]]\nname = \"data\"\n{keys}\nlisten = \"0.0.0.0:{PORT}\"\nplain = true\n"
        ));
        let config = "[daemon]\nclaim_wait_s = 1\n[[core]]\nspin_us = 200\n";
        let importing: Vec<TestDaemon> =
            (0..importers).map(|_| TestDaemon::new_beside_the_build(config).without_locks()).collect();
        let all: Vec<String> = importing.iter().chain([&exporter]).map(folder).collect();
        let exporter = start(exporter, &spaces[usize::from(importers)], &all);
        let hosts = importing.into_iter().zip(&spaces);
        let importers = hosts.map(|(host, space)| start(host, space, &all)).collect();
        Some(Far { relays, exporter, importers, _spaces: spaces })
    }

    /// The same with an image of these bytes.
    fn of_image(importers: u8, seed: u64, bytes: u64) -> Option<Far> {
        Far::new(importers, seed, |exporter| format!("path = {:?}", exporter.image("data.img", bytes)))
    }

    /// Gives an importer the disk.
    fn add(&self, importer: usize, more: &[&str]) -> daemon::Said {
        let uri = format!("nbd://10.77.{importer}.1:{PORT}/data");
        self.importers[importer].cli(&[&["disk", "add", "data", "--remote", &uri], more].concat())
    }
}

fn remote(importer: &TestDaemon) -> Value {
    importer.disk("data")["backing"]["remote"].clone()
}

/// A guest that has had its first answer: the importer is connected.
fn load_on(importer: &TestDaemon, queues: u16, seed: u64) -> CrashLoad {
    let mut load = CrashLoad::new(queues, DEPTH, seed).unwrap();
    load.lost_after = LIMIT;
    load.attach(&importer.path("data.sock")).unwrap();
    let end = Instant::now() + LIMIT;
    while load.answered == 0 {
        assert!(Instant::now() < end, "no answer: {}", importer.disk("data"));
        load.step().unwrap();
    }
    load
}

/// One importer with the disk, and a guest on it that goes on.
fn pair(seed: u64) -> Option<(Far, CrashLoad)> {
    let far = Far::of_image(1, seed, CrashLoad::image_bytes(QUEUES))?;
    let said = far.add(0, &["--queues", &QUEUES.to_string()]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = load_on(&far.importers[0], QUEUES, seed);
    step_for(&mut load, Duration::from_millis(200));
    Some((far, load))
}

/// Requests wait and none fails, silence is noticed in time and called by its name, and when the network is back all bytes are right.
fn a_partition_is_outlived(ways: &[RelayDirection], seed: u64) {
    let Some((far, mut load)) = pair(seed) else { return };
    let (importer, relay) = (&far.importers[0], &far.relays[0]);
    let cut = Instant::now();
    relay.cut(ways);
    step_until_remote(&mut load, importer, |remote| remote["losses"] == QUEUES);
    let noticed = cut.elapsed();
    assert!((SILENCE - Duration::from_secs(1)..SILENCE + SLACK).contains(&noticed), "{noticed:?}");
    let answered = load.answered;
    step_for(&mut load, Duration::from_secs(1));
    assert_eq!(load.answered, answered, "nobody can have answered");
    let seen = remote(importer);
    assert_eq!((&seen["state"], &seen["device_errors"]), (&"reconnecting".into(), &0.into()), "{seen}");
    assert!(seen["in_flight"].as_u64() > Some(0), "{seen}");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("not reachable, requests wait"), "{shown}");
    relay.heal();
    step_until_remote(&mut load, importer, |remote| remote["state"] == "connected");
    step_for(&mut load, Duration::from_millis(300));
    load.settle().unwrap();
    let disk = importer.disk("data");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    assert!(disk["backing"]["remote"]["replays"].as_u64() > Some(0), "{disk}");
    // What the exporter has not heard the end of is gone too.
    let export = &far.exporter.json(&["publish", "list"])[0];
    assert_eq!(export["connections"], QUEUES, "{export}");
}

#[test]
fn a_partition_is_outlived_in_both_directions() {
    a_partition_is_outlived(&BOTH, 1);
}

/// Nothing that the importer sends arrives.
#[test]
fn a_partition_is_outlived_in_the_direction_of_requests() {
    a_partition_is_outlived(&[RelayDirection::There], 2);
}

/// What the importer sends arrives and is carried out, and it hears nothing.
#[test]
fn a_partition_is_outlived_in_the_direction_of_replies() {
    a_partition_is_outlived(&[RelayDirection::Back], 3);
}

/// A cut that is shorter than the set time is TCP's: the connections stay.
#[test]
fn a_short_cut_ends_no_connection() {
    let Some((far, mut load)) = pair(4) else { return };
    let (importer, relay) = (&far.importers[0], &far.relays[0]);
    for ways in [&BOTH[..], &[RelayDirection::There], &[RelayDirection::Back]] {
        relay.cut(ways);
        step_for(&mut load, Duration::from_millis(700));
        relay.heal();
        let answered = load.answered;
        let more = |load: &CrashLoad| load.answered > answered + 1000;
        let end = Instant::now() + SILENCE;
        while !more(&load) {
            assert!(Instant::now() < end, "{}", importer.disk("data"));
            step_for(&mut load, Duration::from_millis(5));
        }
    }
    load.settle().unwrap();
    let seen = remote(importer);
    assert_eq!((&seen["state"], &seen["losses"]), (&"connected".into(), &0.into()), "{seen}");
}

/// Far away, and one packet in fifty is lost.
#[test]
fn delay_and_loss_cost_time_and_nothing_else() {
    let Some((far, mut load)) = pair(5) else { return };
    let (importer, relay) = (&far.importers[0], &far.relays[0]);
    relay.set_both(|conditions| {
        conditions.delay = Duration::from_millis(25);
        conditions.loss_percent = 2.0;
    });
    let before = load.answered;
    step_for(&mut load, Duration::from_secs(4));
    assert!(load.answered > before + 100, "{} answers", load.answered - before);
    assert!(BOTH.iter().all(|way| relay.counts(*way).lost > 0));
    relay.set_both(|conditions| conditions.loss_percent = 0.0);
    relay.set_both(|conditions| conditions.delay = Duration::ZERO);
    load.settle().unwrap();
    let seen = remote(importer);
    assert_eq!((&seen["losses"], &seen["device_errors"]), (&0.into(), &0.into()), "{seen}");
}

/// The holder stops, cut off, with writes in three places: in its guest's ring, in itself, and in the buffers of its sockets, which its kernel goes on sending
/// while it stands still. Another host takes the disk over and writes; no byte of the first appears, neither when the cable is back nor when it goes on.
#[test]
fn no_old_byte_appears_after_a_takeover_through_a_partition() {
    let Some(far) = Far::of_image(2, 6, CrashLoad::image_bytes(1)) else { return };
    let [first, second] = [&far.importers[0], &far.importers[1]];
    assert_eq!(far.add(0, &[]).code, 0);
    let mut old = load_on(first, 1, 60);
    step_for(&mut old, Duration::from_millis(100));
    // Requests go into the buffer of its socket and no further, while what was on its way is answered.
    far.relays[0].cut(&[RelayDirection::There]);
    step_for(&mut old, Duration::from_millis(300));
    step_until_remote(&mut old, first, |remote| remote["in_flight"].as_u64() >= Some(u64::from(DEPTH) / 2));
    far.relays[0].cut(&BOTH);
    first.signal("STOP");
    step_for(&mut old, Duration::from_millis(50));
    let said = far.add(1, &["--takeover"]);
    assert_eq!(said.code, 0, "{}", said.err);
    zero(second);
    let mut new = load_on(second, 1, 62);
    step_for(&mut new, Duration::from_millis(100));
    // The kernel of the host that stands still sends again what was in the buffer. The connection is gone at the exporter, whose kernel refuses the first
    // segment of it, which may be no more than a request to read; no other follows.
    let data = || far.relays[0].counts(RelayDirection::There).data_bytes;
    let before = data();
    far.relays[0].heal();
    step_until(&mut new, || data() > before, || format!("{} bytes of data", data() - before));
    step_for(&mut new, Duration::from_millis(200));
    first.signal("CONT");
    step_until(&mut new, || remote(first)["state"] == "refused", || first.disk("data").to_string());
    step_for(&mut new, Duration::from_millis(100));
    new.settle().unwrap();
    let seen = remote(first);
    assert!(seen["why"].as_str().unwrap().contains("taken over by disk data of"), "{seen}");
    assert_eq!(remote(second)["device_errors"], 0);
}

/// Writes of the old holder stand in the disk of the exporter, which is slow: the next one is served when they have landed, and not before.
#[test]
fn no_old_byte_appears_out_of_a_slow_disk() {
    const SLOW: Duration = Duration::from_secs(5);
    let bytes = CrashLoad::image_bytes(1) as usize;
    let mut made = None;
    let far = Far::new(2, 7, |exporter| {
        let disk = FuseDisk::new(&exporter.path("disk"), bytes).unwrap();
        let keys = format!("path = {:?}\ndirect = \"on\"", disk.path());
        made = Some(disk);
        keys
    });
    let (Some(far), Some(disk)) = (far, made) else { return };
    let [first, second] = [&far.importers[0], &far.importers[1]];
    assert_eq!(far.add(0, &[]).code, 0);
    let mut old = load_on(first, 1, 70);
    step_for(&mut old, Duration::from_millis(100));
    disk.faults(&[InjectedFault { call: Call::Write, bytes: 0..bytes, how: How::Slow(SLOW), times: 1 }]);
    step_until(&mut old, || disk.calls().troubled == 1, || "no write".to_owned());
    first.signal("STOP");
    far.relays[0].cut(&BOTH);
    assert_eq!(disk.calls().slow_ended, 0, "this took too long to say anything about the takeover");
    let takeover = std::thread::spawn(second.later(&[
        "disk",
        "add",
        "data",
        "--remote",
        &format!("nbd://10.77.1.1:{PORT}/data"),
        "--takeover",
    ]));
    let said = takeover.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);
    // A read: the kernel lets none of the writes to this file overtake another.
    let mut guest = Reader::connect(second, "data");
    assert_eq!(guest.status_of(DiskOp::Read), 0);
    assert_eq!(disk.calls().slow_ended, 1, "the old write had not landed");
    drop(guest);
    await_no_guest(second);
    zero(second);
    let mut new = load_on(second, 1, 72);
    step_for(&mut new, Duration::from_millis(100));
    far.relays[0].heal();
    first.signal("CONT");
    step_until(&mut new, || remote(first)["state"] == "refused", || first.disk("data").to_string());
    new.settle().unwrap();
}
