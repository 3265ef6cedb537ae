//! A disk of another machine goes from host to host with its guest: claimed when its rings start, given back when they have stopped
//! (docs/decisions/0056-claims-at-ring-start.md). One guest, whose memory both hosts share, plays the VM that migrates.

mod daemon;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use daemon::guest::{BLOCKS, Guest};
use daemon::load::free_port;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::front::{F_LOG_ALL, FrontEnd, FrontEndRequest, Wants, protocol};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// A guest waits for its disk for as long as any test lasts.
const PATIENT: &str = "[daemon]\nclaim_wait_s = 600\n[[core]]\nspin_us = 200\n";
/// Or hardly.
const IMPATIENT: &str = "[daemon]\nclaim_wait_s = 1\n[[core]]\nspin_us = 200\n";

/// A host that publishes an image as `data`, and hosts that have it as a disk.
struct Hosts {
    exporter: TestDaemon,
    uri: String,
}

impl Hosts {
    fn new() -> Hosts {
        let (port, mut exporter) = (free_port(), TestDaemon::new_beside_the_build("").without_locks());
        let image = exporter.image("data.img", 4 * MIB);
        exporter.configure(&format!(
            "[[core]]\n[[export]]\nname = \"data\"\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n"
        ));
        exporter.start();
        Hosts { exporter, uri: format!("nbd://127.0.0.1:{port}/data") }
    }

    fn importer(&self, config: &str) -> TestDaemon {
        let mut importer = TestDaemon::new_beside_the_build(config);
        importer.start();
        let said = importer.cli(&["disk", "add", "data", "--remote", &self.uri]);
        assert_eq!(said.code, 0, "{}", said.err);
        importer
    }

    /// The generation of the claim, and whether somebody holds it.
    fn standing(&self) -> (u64, bool) {
        let claim = self.exporter.json(&["publish", "show", "data"])["claim"].clone();
        (claim["generation"].as_u64().unwrap_or(0), claim["held"].as_bool().unwrap_or(false))
    }

    fn until_standing(&self, standing: (u64, bool)) {
        self.exporter.until(|| self.standing() == standing);
    }
}

fn remote(importer: &TestDaemon) -> Value {
    importer.disk("data")["backing"]["remote"].clone()
}

fn until_claim(importer: &TestDaemon, word: &str) {
    importer.until(|| remote(importer)["claim"] == word);
}

#[test]
fn a_disk_is_defined_without_a_claim_and_claimed_while_its_rings_run() {
    let hosts = Hosts::new();
    let [first, second] = [(); 2].map(|()| hosts.importer(IMPATIENT));
    for host in [&first, &second] {
        assert_eq!(host.disk("data")["size"], 4 * MIB);
        assert_eq!(remote(host)["claim"], "free");
        let shown = host.cli(&["disk", "show", "data"]).out;
        assert!(shown.contains("not claimed: it is when a VM uses it"), "{shown}");
    }
    assert_eq!(hosts.standing(), (0, false));
    let mut guest = Guest::new();
    // A front end that only looks claims nothing.
    let mut front = guest.connect(&first);
    assert_eq!(front.capacity().unwrap(), 4 * MIB / 512);
    assert_eq!(hosts.standing(), (0, false));
    // A driver starts its rings, and they are stopped: by a reset, by the end of the driver, by a pause.
    for round in 1..=3 {
        guest.start(&mut front);
        guest.work(&mut front, round as usize);
        assert_eq!((hosts.standing(), &remote(&first)["claim"]), ((round, true), &"held".into()));
        guest.stop(&front);
        hosts.until_standing((round, false));
        until_claim(&first, "free");
        assert_eq!(remote(&first)["dirty"], false, "it was flushed first");
    }
    // A VMM that dies stops no ring: its guest may be there again at once, so the claim stays.
    guest.start(&mut front);
    guest.work(&mut front, 4);
    drop(front);
    first.until(|| first.disk("data")["connected"] == false);
    assert_eq!((hosts.standing(), &remote(&first)["claim"]), ((4, true), &"held".into()));
    assert_eq!(first.cli(&["disk", "remove", "data"]).code, 0);
    assert_eq!(hosts.standing(), (4, false));
}

#[test]
fn a_guest_moves_whichever_host_is_first() {
    let hosts = Hosts::new();
    let importers = [(); 2].map(|()| hosts.importer(PATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&importers[0]);
    for round in 1..=12usize {
        guest.work(&mut front, round);
        assert_eq!(hosts.standing(), (round as u64, true));
        let there = &importers[round % 2];
        let mut next = guest.connect(there);
        if round % 3 == 0 {
            // The release is there long before.
            guest.stop(&front);
            hosts.until_standing((round as u64, false));
            guest.start(&mut next);
        } else {
            // Both at once, or the destination first, whose requests wait.
            guest.stop(&front);
            guest.start(&mut next);
        }
        drop(front);
        front = next;
    }
    guest.work(&mut front, 13);
}

/// A disk of the source's own: published while its guest uses it, it goes along, and the source serves it from then on.
#[test]
fn a_local_disk_is_published_and_goes_along() {
    let mut source = TestDaemon::new_beside_the_build(PATIENT);
    let image = source.image("data.img", 4 * MIB);
    source.start();
    let said = source.cli(&["disk", "add", "data", "--path", image.to_str().unwrap()]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    guest.work(&mut front, 0);
    let listen = format!("127.0.0.1:{}", free_port());
    let said = source.cli(&["publish", "disk", "web", "--disk", "data", "--listen", &listen, "--plain"]);
    assert_eq!(said.code, 0, "{}", said.err);
    guest.work(&mut front, 1);
    let mut there = TestDaemon::new_beside_the_build(PATIENT);
    there.start();
    let said = there.cli(&["disk", "add", "data", "--remote", &format!("nbd://{listen}/web")]);
    assert_eq!(said.code, 0, "{}", said.err);
    // There, back, and there again.
    for (round, host) in [&there, &source, &there].into_iter().enumerate() {
        let mut next = guest.connect(host);
        guest.stop(&front);
        guest.start(&mut next);
        guest.work(&mut next, round + 2);
        assert_eq!(remote(host)["claim"], "held");
        front = next;
    }
    // What is left here is the export alone, once the daemon has seen that its front end is gone.
    source.until(|| source.json(&["disk", "show", "data"])["connected"] == false);
    assert_eq!(source.cli(&["disk", "remove", "data"]).code, 0);
    guest.work(&mut front, 5);
}

/// The destination's rings start while the source still has the disk.
#[test]
fn a_destination_waits_for_the_release_and_says_for_whose() {
    let hosts = Hosts::new();
    let [source, there] = [(); 2].map(|()| hosts.importer(PATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    guest.work(&mut front, 0);
    // Another guest, since the first one's ring runs.
    let mut early = Guest::new();
    let mut next = early.start_on(&there);
    let token = early.submit(&mut next, DiskOp::Read, 0, 0);
    until_claim(&there, "waiting");
    let why = remote(&there)["claim_why"].as_str().unwrap().to_owned();
    assert!(why.contains("held by disk data of") && why.contains("generation 1"), "{why}");
    let shown = there.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("waits for its claim to write, requests wait: it is held by"), "{shown}");
    guest.work(&mut front, 1);
    guest.stop(&front);
    assert_eq!(early.answer(token), (0, guest.written[0]));
    assert_eq!((hosts.standing(), &remote(&there)["generation"]), ((2, true), &2.into()));
    // It has stopped before it got the disk: then nobody has it, or it gives back what it had already asked for.
    guest.start(&mut front);
    until_claim(&source, "waiting");
    guest.stop(&front);
    early.stop(&next);
    until_claim(&there, "free");
    until_claim(&source, "free");
    hosts.exporter.until(|| matches!(hosts.standing(), (2 | 3, false)));
}

/// A destination that waits in vain, and what a person does then.
#[test]
fn a_destination_that_waits_in_vain_is_refused_by_name() {
    let hosts = Hosts::new();
    let (source, there) = (hosts.importer(PATIENT), hosts.importer(IMPATIENT));
    let mut guest = Guest::new();
    let front = &mut guest.start_on(&source);
    guest.work(front, 0);
    let mut early = Guest::new();
    let mut next = early.start_on(&there);
    assert_eq!(early.request(&mut next, DiskOp::Read, 0, 0).0, 1);
    let seen = remote(&there);
    let why = seen["why"].as_str().unwrap();
    assert_eq!((&seen["state"], &seen["claim"]), (&"refused".into(), &"refused".into()));
    assert!(why.contains("held by disk data of") && why.contains("waited for 1 s"), "{why}");
    assert_eq!(early.request(&mut next, DiskOp::Write, 0, 9).0, 1, "nor does it write");
    guest.work(front, 1);
    guest.stop(front);
    hosts.until_standing((1, false));
    let shown = there.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("ioplane disk accept data"), "{shown}");
    assert_eq!(there.cli(&["disk", "accept", "data"]).code, 0);
    until_claim(&there, "held");
    assert_eq!(early.request(&mut next, DiskOp::Read, 0, 0), (0, guest.written[0]));
}

/// A migration that is called off, and one after which both guests run.
#[test]
fn a_source_goes_on_unless_others_have_had_the_disk() {
    let hosts = Hosts::new();
    let (source, there) = (hosts.importer(IMPATIENT), hosts.importer(PATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    for round in 0..4 {
        guest.work(&mut front, round);
        let (generation, _) = hosts.standing();
        guest.stop(&front);
        // Before the release has reached the exporter, or behind it.
        if round % 2 == 0 {
            hosts.until_standing((generation, false));
        }
        guest.start(&mut front);
    }
    guest.work(&mut front, 4);
    let (generation, held) = hosts.standing();
    assert!(
        held && (3..=5).contains(&generation),
        "a release that has not begun may be taken back: {generation}"
    );
    // Now it goes on elsewhere.
    guest.stop(&front);
    hosts.until_standing((generation, false));
    let mut moved = guest.fork();
    let mut next = moved.start_on(&there);
    moved.work(&mut next, 5);
    // And is resumed here all the same.
    guest.start(&mut front);
    assert_eq!(guest.request(&mut front, DiskOp::Write, 0, 0xee).0, 1);
    let seen = remote(&source);
    assert!(seen["why"].as_str().unwrap().contains("held by disk data of"), "{seen}");
    moved.work(&mut next, 6);
    assert_eq!(hosts.standing(), (generation + 1, true));
    // Also when the other one has stopped: what this guest knows of the disk is not so any more.
    guest.stop(&front);
    moved.stop(&next);
    hosts.until_standing((generation + 1, false));
    guest.start(&mut front);
    assert_eq!(guest.request(&mut front, DiskOp::Write, 0, 0xee).0, 1);
    let seen = remote(&source);
    assert!(seen["why"].as_str().unwrap().contains("others have held it since this guest"), "{seen}");
    hosts.until_standing((generation + 2, false));
    // A person knows better, or the guest begins anew.
    assert_eq!(source.cli(&["disk", "accept", "data"]).code, 0);
    until_claim(&source, "held");
    assert_eq!(guest.request(&mut front, DiskOp::Read, 0, 0), (0, moved.written[0]));
    guest.stop(&front);
    until_claim(&source, "free");
    let mut anew = moved.fork();
    drop((front, next));
    let mut front = anew.start_on(&there);
    anew.work(&mut front, 7);
    anew.stop(&front);
    let mut front = anew.start_on(&source);
    anew.work(&mut front, 8);
}

/// The exporter does not answer when the source's rings stop, or is killed and comes back.
#[test]
fn a_release_that_is_held_up_is_waited_for() {
    let mut hosts = Hosts::new();
    let importers = [(); 2].map(|()| hosts.importer(PATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&importers[0]);
    for round in 1..=4usize {
        guest.work(&mut front, round);
        let (here, there) = (&importers[(round + 1) % 2], &importers[round % 2]);
        match round % 2 {
            0 => hosts.exporter.signal("STOP"),
            _ => hosts.exporter.kill9(),
        }
        guest.stop(&front);
        // The answer to the front end does not wait for that.
        until_claim(here, "releasing");
        let mut next = guest.start_on(there);
        let token = guest.submit(&mut next, DiskOp::Read, 0, 0);
        match round % 2 {
            0 => hosts.exporter.signal("CONT"),
            _ => hosts.exporter.start(),
        }
        assert_eq!(guest.answer(token), (0, guest.written[0]));
        front = next;
    }
    guest.work(&mut front, 5);
}

/// A VMM that migrates its guest stops rings whose requests have no answer: these cannot go along, so the disk stays.
#[test]
fn requests_that_cannot_go_along_keep_the_disk_where_they_are() {
    let hosts = Hosts::new();
    let source = hosts.importer(PATIENT);
    let mut guest = Guest::new();
    let usual = Wants::default();
    let wants = Wants { protocol: usual.protocol | protocol::LOG_SHMFD, ..usual };
    let mut front = FrontEnd::connect(&source.path("data.sock"), wants).unwrap();
    front.track_inflight(1, 64).unwrap();
    front.share(&guest.memory).unwrap();
    front.wire().patience(LIMIT).unwrap();
    guest.start(&mut front);
    guest.work(&mut front, 0);
    // The front end has the pages logged that are written, since its guest migrates.
    let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&log, 4096).unwrap();
    let body = [4096u64.to_ne_bytes(), [0; 8]].concat();
    front.wire().send(FrontEndRequest::SET_LOG_BASE as u32, 0, &body, &[log.as_fd()]).unwrap();
    front.wire().reply(FrontEndRequest::SET_LOG_BASE).unwrap();
    let features = front.features() | F_LOG_ALL;
    front.tell(FrontEndRequest::SET_FEATURES, &features.to_ne_bytes(), &[]).unwrap();
    hosts.exporter.signal("STOP");
    let token = guest.submit(&mut front, DiskOp::Write, 1, 0x77);
    source.until(|| remote(&source)["in_flight"] == 1);
    // It is answered when the requests have been suspended.
    guest.stop(&front);
    hosts.exporter.signal("CONT");
    let seen = remote(&source);
    assert_eq!(seen["claim"], "releasing", "{seen}");
    assert!(seen["claim_why"].as_str().unwrap().contains("were in flight"), "{seen}");
    assert_eq!(hosts.standing(), (1, true));
    guest.start(&mut front);
    assert_eq!(guest.answer(token).0, 0);
    guest.written[1] = 0x77;
    guest.work(&mut front, 1);
    assert_eq!((hosts.standing(), &remote(&source)["claim"]), ((1, true), &"held".into()));
}

/// The source's daemon dies when its rings have stopped and the exporter has not heard of it: the next one makes up for the release.
#[test]
fn a_source_that_dies_before_its_release_releases_when_it_is_back() {
    let hosts = Hosts::new();
    let (mut source, there) = (hosts.importer(PATIENT), hosts.importer(PATIENT));
    let mut guest = Guest::new();
    for round in 0..3 {
        let mut front = guest.start_on(&source);
        guest.work(&mut front, round);
        let (generation, _) = hosts.standing();
        hosts.exporter.signal("STOP");
        guest.stop(&front);
        source.kill9();
        hosts.exporter.signal("CONT");
        assert_eq!(hosts.standing(), (generation, true), "nobody has told it");
        let mut next = guest.start_on(&there);
        let token = guest.submit(&mut next, DiskOp::Read, 0, 0);
        until_claim(&there, "waiting");
        source.start();
        assert_eq!(guest.answer(token), (0, guest.written[0]));
        guest.work(&mut next, round);
        guest.stop(&next);
        until_claim(&there, "free");
    }
}

/// When the source's daemon stands still.
#[derive(Debug, Clone, Copy)]
enum Stands {
    /// Its rings have stopped, and its exporter has heard nothing of the release.
    BeforeTheRelease,
    /// So long after its rings have stopped, whatever the exporter has heard by then.
    Around(Duration),
    /// The exporter has the release.
    Released,
}

/// Every block of the image is what `guest` has written there last.
fn image_is_of(guest: &Guest, hosts: &Hosts) {
    let image = std::fs::read(hosts.exporter.path("data.img")).unwrap();
    let firsts = image.chunks(4096).map(|block| block[0]);
    assert_eq!(firsts.take(BLOCKS).collect::<Vec<_>>(), guest.written);
}

/// A person takes the disk over at a host that has it already, and is refused it or waits for it.
fn take_over(hosts: &Hosts, there: &TestDaemon) {
    for args in [
        &["disk", "remove", "data", "--force"][..],
        &["disk", "add", "data", "--remote", &hosts.uri, "--takeover"],
    ] {
        let said = there.cli(args);
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
    }
}

/// A guest has moved, and has written everything anew; the source's daemon stands still, with unflushed writes in it, and goes on now. Says whether the
/// release had reached the exporter by then.
fn a_source_stands_still(when: Stands) -> bool {
    let hosts = Hosts::new();
    let (source, there) = (hosts.importer(PATIENT), hosts.importer(PATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    guest.work(&mut front, 0);
    assert_eq!(remote(&source)["dirty"], true, "nobody has flushed");
    match when {
        Stands::BeforeTheRelease => {
            hosts.exporter.signal("STOP");
            guest.stop(&front);
            until_claim(&source, "releasing");
            source.signal("STOP");
            hosts.exporter.signal("CONT");
        }
        Stands::Around(time) => {
            guest.stop(&front);
            std::thread::sleep(time);
            source.signal("STOP");
        }
        Stands::Released => {
            guest.stop(&front);
            hosts.until_standing((1, false));
            source.signal("STOP");
        }
    }
    // Another guest finds out whether it may: it would wait for ever if nobody gave the claim back.
    let mut early = Guest::new();
    let mut next = early.start_on(&there);
    let token = early.submit(&mut next, DiskOp::Read, 0, 0);
    let end = Instant::now() + Duration::from_secs(2);
    while remote(&there)["claim"] != "held" && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let released = remote(&there)["claim"] == "held";
    if released {
        assert_eq!(early.answer(token), (0, guest.written[0]));
        early.stop(&next);
        until_claim(&there, "free");
        drop(next);
    } else {
        let seen = remote(&there);
        let why = seen["claim_why"].as_str().unwrap_or_default();
        assert!(seen["claim"] == "waiting" && why.contains("held by disk data of"), "{when:?}: {seen}");
        assert_eq!(hosts.standing(), (1, true));
        drop(next);
        take_over(&hosts, &there);
    }
    let mut next = guest.start_on(&there);
    guest.work(&mut next, 1);
    (0..BLOCKS).for_each(|block| guest.write(&mut next, block));
    let standing = hosts.standing();
    assert!(standing.1, "{standing:?}");
    source.signal("CONT");
    source.until(|| ["free", "refused"].iter().any(|word| remote(&source)["claim"] == *word));
    guest.work(&mut next, 2);
    image_is_of(&guest, &hosts);
    assert_eq!(hosts.standing(), standing, "{when:?}");
    released
}

#[test]
fn a_source_that_stands_still_in_its_release_writes_nothing_more() {
    assert!(!a_source_stands_still(Stands::BeforeTheRelease));
    assert!(a_source_stands_still(Stands::Released));
    for time in [0, 300, 1000, 3000] {
        let released = a_source_stands_still(Stands::Around(Duration::from_micros(time)));
        println!("{time} us behind its rings the release was {}there", if released { "" } else { "not " });
    }
}

/// The source's daemon stands still before its rings have stopped, with writes in its guest's ring, in itself and in the buffers of its sockets: the
/// destination is refused until a person takes the disk over, and nothing of them appears afterwards.
#[test]
fn a_source_that_stands_still_with_writes_in_flight_is_taken_over() {
    const IN_FLIGHT: usize = 8;
    let hosts = Hosts::new();
    let (source, there) = (hosts.importer(PATIENT), hosts.importer(IMPATIENT));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    guest.work(&mut front, 0);
    hosts.exporter.signal("STOP");
    let mut tokens = Vec::new();
    for block in 0..IN_FLIGHT {
        tokens.push(guest.submit(&mut front, DiskOp::Write, block, 0xee));
        if block == IN_FLIGHT / 2 {
            source.until(|| remote(&source)["in_flight"].as_u64() > Some(block as u64));
        }
    }
    source.signal("STOP");
    hosts.exporter.signal("CONT");
    let mut early = Guest::new();
    let mut next = early.start_on(&there);
    assert_eq!(early.request(&mut next, DiskOp::Read, 0, 0).0, 1);
    let seen = remote(&there);
    let why = seen["why"].as_str().unwrap();
    assert!(why.contains("held by disk data of") && why.contains("waited for 1 s"), "{seen}");
    assert_eq!(early.request(&mut next, DiskOp::Write, 0, 9).0, 1, "nor does it write");
    drop(next);
    take_over(&hosts, &there);
    let mut moved = guest.fork();
    let mut next = moved.start_on(&there);
    // Which of the old writes had been carried out by then nobody knows.
    (0..IN_FLIGHT).for_each(|block| moved.write(&mut next, block));
    moved.work(&mut next, 1);
    source.signal("CONT");
    until_claim(&source, "refused");
    assert!(
        remote(&source)["why"].as_str().unwrap().contains("taken over by disk data of"),
        "{}",
        remote(&source)
    );
    moved.work(&mut next, 2);
    image_is_of(&moved, &hosts);
    assert_eq!(hosts.standing(), (2, true));
    // Its guest is told, but for what the exporter had answered before.
    tokens.into_iter().for_each(|token| _ = guest.answer(token));
    assert_eq!(guest.request(&mut front, DiskOp::Read, 0, 0).0, 1);
}

/// A daemon that is upgraded keeps the claim of a guest that runs, and has none that it did not have.
#[test]
fn an_upgrade_changes_nothing_of_it() {
    let hosts = Hosts::new();
    let source = hosts.importer(PATIENT);
    let _upgraded = Upgraded(&source);
    let upgrade = || {
        let said = source.cli(&["upgrade"]);
        assert_eq!(said.code, 0, "{}", said.err);
    };
    upgrade();
    assert_eq!((hosts.standing(), &remote(&source)["claim"]), ((0, false), &"free".into()));
    let mut guest = Guest::new();
    let mut front = guest.start_on(&source);
    guest.work(&mut front, 0);
    upgrade();
    guest.work(&mut front, 1);
    assert_eq!((hosts.standing(), &remote(&source)["claim"]), ((1, true), &"held".into()));
    guest.stop(&front);
    hosts.until_standing((1, false));
    upgrade();
    assert_eq!((hosts.standing(), &remote(&source)["claim"]), ((1, false), &"free".into()));
    guest.start(&mut front);
    guest.work(&mut front, 2);
    assert_eq!(hosts.standing(), (2, true));
}

/// A daemon that is upgraded, and is then not the test's child any more.
struct Upgraded<'a>(&'a TestDaemon);

impl Drop for Upgraded<'_> {
    fn drop(&mut self) {
        self.0.kill_whoever_answers();
    }
}
