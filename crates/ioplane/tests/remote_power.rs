//! Disks of another machine that loses power: what its daemon had acknowledged and no flush had made durable is gone, and the guest must not notice.
//!
//! The image is on a file system of the test's own, which forgets what was not synced; the exporter is killed, and the next one is
//! told another boot of its host.

mod daemon;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use daemon::load::{free_port, step_for, step_until_remote};
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::fuse::FuseDisk;
use serde_json::Value;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A host with one image, published as `data`, whose power can fail.
struct Host {
    exporter: Option<TestDaemon>,
    disk: FuseDisk,
    boot: PathBuf,
    boots: u64,
    uri: String,
}

impl Host {
    /// `None`, which is said aloud, where there is no FUSE or no mount namespace.
    fn new(bytes: u64) -> Option<Host> {
        let exporter = TestDaemon::new_beside_the_build("");
        let disk = match FuseDisk::new(&exporter.path("disk"), bytes as usize) {
            Ok(disk) => disk,
            Err(why) => {
                eprintln!("\n*** SKIPPED: {why} ***");
                assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
                return None;
            }
        };
        let port = free_port();
        exporter.configure(&format!(
            "[[core]]\n[[export]]\nname = \"data\"\npath = {:?}\ndirect = \"on\"\nlisten = \"127.0.0.1:{port}\"\nplain = true\n",
            disk.path()
        ));
        let (boot, uri) = (exporter.path("boot_id"), format!("nbd://127.0.0.1:{port}/data"));
        let mut host = Host { exporter: Some(exporter), disk, boot, boots: 0, uri };
        host.boot();
        Some(host)
    }

    /// Starts the daemon, in a boot that has not been there before.
    fn boot(&mut self) {
        self.boots += 1;
        std::fs::write(&self.boot, format!("{}\n", self.boot_id())).unwrap();
        let bind = format!("mount --bind {} {BOOT_ID} && exec \"$0\" \"$@\"", self.boot.display());
        let exporter = self.exporter.take().unwrap();
        self.exporter = Some(exporter.start_by(&["unshare", "--mount", "sh", "-c", &bind]));
    }

    fn boot_id(&self) -> String {
        format!("00000000-0000-4000-8000-{:012}", self.boots)
    }

    fn exporter(&mut self) -> &mut TestDaemon {
        self.exporter.as_mut().unwrap()
    }

    /// Some of what was not synced survives, chosen by `seed`.
    fn lose_power(&mut self, seed: u64) {
        self.exporter().kill9();
        self.disk.cut_power(seed);
    }
}

/// Where the host's disk is given to a guest.
fn importer(host: &Host) -> TestDaemon {
    let mut importer = TestDaemon::new("[[core]]\nspin_us = 200\n");
    importer.start();
    let said = importer.cli(&["disk", "add", "data", "--remote", &host.uri, "--queues", &QUEUES.to_string()]);
    assert_eq!(said.code, 0, "{}", said.err);
    importer
}

/// How the importer sees the export.
fn remote(importer: &TestDaemon) -> Value {
    importer.disk("data")["backing"]["remote"].clone()
}

fn wait_for(importer: &TestDaemon, what: &str, mut met: impl FnMut(&Value) -> bool) {
    let end = Instant::now() + LIMIT;
    while !met(&remote(importer)) {
        assert!(Instant::now() < end, "it is not {what}: {}", remote(importer));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Each time writes are gone that the guest was told of. Every read finds the last write, and no request fails.
#[test]
fn a_host_that_loses_power_again_and_again_loses_nothing() {
    let Some(mut host) = Host::new(CrashLoad::image_bytes(QUEUES)) else { return };
    let importer = importer(&host);
    let mut load = CrashLoad::new(QUEUES, DEPTH, 17).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    for round in 1..=6u64 {
        step_for(&mut load, Duration::from_millis(30 + 11 * round));
        host.lose_power(round);
        host.boot();
        let boot = host.boot_id();
        step_until_remote(&mut load, &importer, |remote| {
            let instance = remote["instance"].as_str().unwrap_or_default();
            remote["state"] == "connected" && instance.ends_with(&boot)
        });
    }
    load.settle().unwrap();
    let disk = importer.disk("data");
    assert!(disk["backing"]["remote"]["rewritten"].as_u64() > Some(0), "{disk}");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    // What is closed is flushed.
    drop(load);
    importer.until(|| importer.disk("data")["connected"] == false);
    assert_eq!(importer.cli(&["disk", "remove", "data", "--force"]).code, 0);
    assert_eq!(host.disk.unsynced(), 0);
}

/// The exporter's host loses power, and the guest's rings stop before anybody has noticed: what was not durable is written again before others may have the
/// disk.
#[test]
fn what_was_not_durable_is_written_again_before_the_claim_is_given_back() {
    let Some(mut host) = Host::new(1 << 20) else { return };
    let importer = importer(&host);
    let mut guest = Reader::of_queues(&importer, "data", 4096, QUEUES);
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    wait_for(&importer, "dirty", |remote| remote["dirty"] == true && remote["retained"] == true);
    host.lose_power(3);
    guest.stop();
    wait_for(&importer, "releasing", |remote| remote["claim"] == "releasing");
    host.boot();
    wait_for(&importer, "given back", |remote| remote["claim"] == "free");
    let seen = remote(&importer);
    assert_eq!((&seen["dirty"], &seen["rewritten"]), (&false.into(), &1.into()), "{seen}");
    assert_eq!(host.disk.unsynced(), 0);
    // Anybody may have it now.
    assert_eq!(importer.cli(&["disk", "remove", "data", "--force"]).code, 0);
}

/// The importer dies with the only copies of writes that were not flushed, and the exporter's host loses power. Its successor answers nothing before
/// a person has decided.
#[test]
fn without_copies_a_person_decides() {
    let Some(mut host) = Host::new(1 << 20) else { return };
    let mut importer = importer(&host);
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    wait_for(&importer, "dirty", |remote| remote["dirty"] == true && remote["retained"] == true);
    let said = importer.cli(&["disk", "accept", "data"]);
    assert!(said.code != 0 && said.err.contains("nothing to accept"), "{}", said.err);
    importer.kill9();
    host.lose_power(1);
    host.boot();
    importer.start();
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "VIRTIO_BLK_S_IOERR");
    wait_for(&importer, "stopped", |remote| remote["state"] == "stopped");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("another instance") && shown.contains("ioplane disk accept data"), "{shown}");
    let said = importer.cli(&["disk", "accept", "data"]);
    assert_eq!(said.code, 0, "{}", said.err);
    wait_for(&importer, "accepted", |remote| remote["state"] == "connected");
    assert_eq!([DiskOp::Write, DiskOp::Flush, DiskOp::Read].map(|op| guest.status_of(op)), [0; 3]);
}

/// The importer is killed with unflushed writes, and the exporter is as it was: nothing is lost, and nobody has to decide.
#[test]
fn a_successor_flushes_what_its_predecessor_has_left() {
    let Some(host) = Host::new(1 << 20) else { return };
    let mut importer = importer(&host);
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    assert!(host.disk.unsynced() > 0);
    importer.kill9();
    importer.start();
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Read), 0);
    wait_for(&importer, "clean", |remote| remote["dirty"] == false);
    assert_eq!(host.disk.unsynced(), 0);
}
