//! Disks of another machine that loses power, or whose disk fails when it is flushed: what its daemon had acknowledged and no flush had made durable is gone,
//! and the guest must not notice, or be told.
//!
//! The image is on a file system of the test's own, which forgets what was not synced; the exporter is killed, and the next one is
//! told another boot of its host.

mod daemon;

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use daemon::guest::Guest;
use daemon::load::{free_port, step_for, step_until, step_until_remote};
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};
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
        Host::with(bytes, "on")
    }

    /// Past the page cache of the host, or through it.
    fn with(bytes: u64, direct: &str) -> Option<Host> {
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
            "[[core]]\n[[export]]\nname = \"data\"\npath = {:?}\ndirect = {direct:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n",
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
        self.start();
    }

    /// Starts the daemon once more, in the same boot.
    fn start(&mut self) {
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
    importer_on(TestDaemon::new("[[core]]\nspin_us = 200\n"), host)
}

fn importer_on(mut importer: TestDaemon, host: &Host) -> TestDaemon {
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

/// A guest of a daemon that was started without copies: it gets errors until a person has decided.
fn accepted(importer: &TestDaemon, case: &str) -> Reader {
    let mut guest = Reader::connect(importer, "data");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "VIRTIO_BLK_S_IOERR, {case}");
    wait_for(importer, "stopped", |remote| remote["state"] == "stopped");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("another instance") && shown.contains("ioplane disk accept data"), "{shown}");
    let said = importer.cli(&["disk", "accept", "data"]);
    assert_eq!(said.code, 0, "{}", said.err);
    wait_for(importer, "accepted", |remote| remote["state"] == "connected");
    guest
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
    let mut guest = accepted(&importer, "without power");
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

/// The next sync fails, and takes what was written for clean: as Linux does.
fn lose_a_flush(host: &Host) {
    lose_flushes(host, 1);
}

fn lose_flushes(host: &Host, times: u32) {
    let how = How::Lost(rustix::io::Errno::IO.raw_os_error());
    host.disk.faults(&[InjectedFault { call: Call::Sync, bytes: 0..0, how, times }]);
}

fn instance(importer: &TestDaemon) -> String {
    remote(importer)["instance"].as_str().unwrap_or_default().to_owned()
}

/// A flush fails, and the importer dies with the only copies of what that has lost. Its successor flushes well, whether the exporter is the same process or another
/// one, and nothing but the exporter's count says that writes are missing.
#[test]
fn a_flush_that_failed_before_the_importer_died_is_not_forgotten() {
    for (direct, restart) in [("on", false), ("on", true), ("off", false), ("off", true)] {
        let Some(mut host) = Host::with(1 << 20, direct) else { return };
        let mut importer = importer(&host);
        let mut guest = Reader::connect(&importer, "data");
        assert_eq!(guest.status_of(DiskOp::Write), 0);
        wait_for(&importer, "dirty", |remote| remote["dirty"] == true && remote["retained"] == true);
        let before = instance(&importer);
        // Past the page cache the importer hears of another instance at once, and fails once more to make durable what it has copies of.
        lose_flushes(&host, if direct == "on" { 2 } else { 1 });
        assert_eq!(guest.status_of(DiskOp::Flush), 1, "VIRTIO_BLK_S_IOERR");
        if direct == "on" {
            wait_for(&importer, "stopped", |remote| remote["state"] == "stopped");
        }
        assert_eq!(host.disk.unsynced(), 0, "nothing below knows of it any more");
        importer.kill9();
        if restart {
            host.exporter().kill9();
            host.start();
        }
        importer.start();
        let mut guest = accepted(&importer, &format!("direct = {direct}, restarted: {restart}"));
        assert_eq!([DiskOp::Write, DiskOp::Read].map(|op| guest.status_of(op)), [0; 2]);
        // Through the page cache no flush of that opening is good any more (decision 0022).
        let lost = direct == "off" && !restart;
        assert_eq!(guest.status_of(DiskOp::Flush), u8::from(lost), "direct = {direct}, restarted: {restart}");
        // The flush of whoever accepts it fails as well there.
        let failed = if direct == "on" || lost { 2 } else { 1 };
        assert_eq!(
            instance(&importer),
            format!("{before}.{failed}"),
            "direct = {direct}, restarted: {restart}"
        );
    }
}

/// The importer lives, and has copies: nobody has to decide.
#[test]
fn what_a_failed_flush_has_lost_is_written_again() {
    let Some(mut host) = Host::with(1 << 20, "off") else { return };
    let importer = importer(&host);
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    lose_a_flush(&host);
    assert_eq!(guest.status_of(DiskOp::Flush), 1, "VIRTIO_BLK_S_IOERR");
    let before = host.disk.calls();
    assert_eq!((host.disk.unsynced(), before.syncs), (0, 0), "nothing below knows of it any more");
    host.exporter().kill9();
    host.start();
    assert_eq!([DiskOp::Read, DiskOp::Flush].map(|op| guest.status_of(op)), [0; 2]);
    let after = host.disk.calls();
    assert_eq!((&remote(&importer)["rewritten"], after.writes - before.writes), (&1.into(), 1));
    assert!(host.disk.unsynced() == 0 && after.syncs > 0, "{after:?}");
}

/// Past the page cache the next flush succeeds, on the same disk and in the same process: it must not be taken to cover what the first has lost.
#[test]
fn what_a_failed_flush_has_lost_is_written_again_before_the_next_one_succeeds() {
    let Some(host) = Host::with(1 << 20, "on") else { return };
    let importer = importer(&host);
    let mut guest = Guest::new();
    let mut front = guest.start_on(&importer);
    guest.write(&mut front, 0);
    let (before, written) = (instance(&importer), guest.written[0]);
    lose_a_flush(&host);
    assert_eq!(guest.request(&mut front, DiskOp::Flush, 0, 0).0, 1, "VIRTIO_BLK_S_IOERR");
    assert_eq!(guest.request(&mut front, DiskOp::Flush, 0, 0).0, 0);
    let seen = remote(&importer);
    assert_eq!((&seen["rewritten"], &seen["losses"]), (&1.into(), &1.into()), "{seen}");
    assert_eq!((host.disk.unsynced(), instance(&importer)), (0, format!("{before}.1")));
    assert_eq!(host.disk.durable()[0], written, "the guest's write is not durable");
    let shown = host.exporter.as_ref().unwrap().json(&["publish", "show", "data"]);
    assert_eq!(shown["ends"]["flush-failed"], 1, "{shown}");
}

/// Its client is told, and nobody goes on until the next process would know of it.
#[test]
fn an_export_whose_failed_flush_cannot_be_written_down_lets_nobody_in() {
    let Some(mut host) = Host::new(1 << 20) else { return };
    let importer = importer(&host);
    let mut guest = Reader::connect(&importer, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    let before = instance(&importer);
    // The file system of this image has no attributes.
    let folder = host.exporter().path("claims").join("flushes");
    let file = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    lose_a_flush(&host);
    assert_eq!(guest.status_of(DiskOp::Flush), 1, "VIRTIO_BLK_S_IOERR");
    let refused = "a flush has failed, and that cannot be written down";
    wait_for(&importer, "refused", |remote| {
        remote["state"] == "reconnecting" && remote["why"].as_str().is_some_and(|why| why.contains(refused))
    });
    let exporter = host.exporter();
    exporter.until(|| {
        let shown = exporter.json(&["publish", "show", "data"]);
        shown["trouble"].as_str().is_some_and(|trouble| trouble.contains(refused))
            && shown["connections"] == 0
    });
    std::fs::remove_dir(&file).unwrap();
    wait_for(&importer, "let in", |remote| remote["state"] == "connected" && remote["rewritten"] == 1);
    assert_eq!([DiskOp::Read, DiskOp::Flush].map(|op| guest.status_of(op)), [0; 2]);
    assert_eq!((host.disk.unsynced(), instance(&importer)), (0, format!("{before}.1")));
    host.exporter().kill9();
    host.start();
    wait_for(&importer, "connected again", |remote| remote["state"] == "connected" && remote["losses"] == 2);
    assert_eq!((guest.status_of(DiskOp::Read), instance(&importer)), (0, format!("{before}.1")));
}

fn swap_state(daemon: &TestDaemon) -> String {
    daemon.disk("data")["swap"]["state"].as_str().unwrap_or("none").to_owned()
}

fn swap_has_ended(daemon: &TestDaemon) -> bool {
    ["done", "failed", "cancelled"].contains(&swap_state(daemon).as_str())
}

/// A host with a disk `data` of its own, of these bytes, all but the first of which are not zero.
fn with_image(mut daemon: TestDaemon, bytes: u64, zeros: u64) -> (TestDaemon, PathBuf) {
    let image = daemon.path("old.img");
    let content = (0..bytes).map(|at| if at < zeros { 0 } else { (at % 251) as u8 + 1 });
    std::fs::write(&image, content.collect::<Vec<u8>>()).unwrap();
    daemon.configure(&format!(
        "[[core]]\nspin_us = 200\n[[disk]]\nname = \"data\"\npath = {image:?}\nqueues = {QUEUES}\n"
    ));
    daemon.start();
    (daemon, image)
}

/// The host of a swap's target loses power while the disk is copied, or mirrored, there. What it had acknowledged and not flushed is written again, so the
/// swap ends as if nothing had been.
#[test]
fn a_swap_ends_right_when_the_host_of_its_target_loses_power() {
    const BYTES: u64 = 6 << 20;
    for phase in ["copying", "mirroring"] {
        let Some(mut host) = Host::new(BYTES) else { return };
        let (daemon, old) =
            with_image(TestDaemon::new_beside_the_build(""), BYTES, CrashLoad::image_bytes(QUEUES));
        let mut load = CrashLoad::new(QUEUES, DEPTH, 18).unwrap();
        load.lost_after = LIMIT;
        load.attach(&daemon.path("data.sock")).unwrap();
        step_for(&mut load, Duration::from_millis(50));
        // Some bytes at once, and then it pauses.
        let swap = ["swap", "data", "--to", &host.uri, "--overwrite", "--rate", "768K", "--detach"];
        let command = std::thread::spawn(daemon.later(&swap));
        step_until(&mut load, || command.is_finished(), String::new);
        let said = command.join().unwrap();
        assert_eq!(said.code, 0, "{}", said.err);
        step_until(&mut load, || daemon.disk("data")["swap"]["copied"].as_u64() > Some(0), || daemon.log());
        step_until(&mut load, || swap_state(&daemon) == phase, || daemon.disk("data").to_string());
        let mut lost = 0;
        for round in 1..=3 {
            step_for(&mut load, Duration::from_millis(100));
            step_until(&mut load, || host.disk.unsynced() > 0, || daemon.disk("data").to_string());
            lost += host.disk.unsynced();
            host.lose_power(round);
            host.boot();
            step_for(&mut load, Duration::from_millis(300));
        }
        assert!(lost > 0, "{phase}: nothing could be lost");
        step_until(&mut load, || swap_has_ended(&daemon), || daemon.disk("data").to_string());
        let disk = daemon.disk("data");
        assert_eq!(disk["swap"]["state"], "done", "{phase}: {disk}");
        assert!(disk["backing"]["remote"]["rewritten"].as_u64() > Some(0), "{phase}: {disk}");
        // All of that is durable there, and what is written from now on is retained.
        step_for(&mut load, Duration::from_millis(50));
        host.lose_power(4);
        host.boot();
        let boot = host.boot_id();
        step_until_remote(&mut load, &daemon, |remote| {
            remote["state"] == "connected" && remote["instance"].as_str().unwrap_or_default().ends_with(&boot)
        });
        load.settle().unwrap();
        let first = CrashLoad::image_bytes(QUEUES) as usize;
        assert!(host.disk.content()[first..] == std::fs::read(&old).unwrap()[first..], "{phase}");
        assert_eq!(daemon.disk("data")["totals"]["errors"]["io"], 0);
        assert!(
            daemon.refused(&["disk", "add", "other", "--path", old.to_str().unwrap()]).contains("superseded")
        );
    }
}

/// nbdkit with a file, at a port; killed when dropped.
struct Foreign(std::process::Child);

/// A server whose disk has a cache, as far as a client can know: it cannot be asked to flush.
const UNFLUSHED: [&str; 6] = [
    "eval",
    r#"config=ln -sf "$(realpath "$3")" $tmpdir/file"#,
    "get_size=stat -Lc %s $tmpdir/file",
    "pread=dd if=$tmpdir/file skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none",
    "pwrite=dd of=$tmpdir/file seek=$4 conv=notrunc oflag=seek_bytes status=none",
    "can_multi_conn=exit 0",
];

impl Foreign {
    /// `None`, which is said aloud, where there is no nbdkit. `plugin`: which, and what it is told beside the file.
    fn start(port: u16, plugin: &[&str], file: &Path) -> Option<Foreign> {
        let mut command = Command::new("nbdkit");
        command.args([
            "--foreground",
            "--exit-with-parent",
            "--ipaddr",
            "127.0.0.1",
            "--port",
            &port.to_string(),
        ]);
        command.args(plugin).arg(format!("file={}", file.display()));
        match command.stdin(Stdio::null()).spawn() {
            Ok(process) => {
                let foreign = Foreign(process);
                let end = Instant::now() + LIMIT;
                while TcpStream::connect(("127.0.0.1", port)).is_err() {
                    assert!(Instant::now() < end, "nbdkit does not answer");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Some(foreign)
            }
            Err(why) => {
                eprintln!("\n*** SKIPPED: swaps to foreign servers were NOT tested: nbdkit: {why} ***");
                assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: nbdkit: {why}");
                None
            }
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Twelve runs of the copier, which begins nine at most before it looks at its rate.
const SLOW_BYTES: u64 = 12 * (256 << 10);

/// Begins a swap of a disk of [`SLOW_BYTES`], which pauses for more than a second behind each run of those that it has begun at once, and returns in
/// a pause.
fn begin_slow_swap(daemon: &TestDaemon, to: &str) {
    let said = daemon.cli(&["swap", "data", "--to", to, "--overwrite", "--rate", "192K", "--detach"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let copied = || daemon.disk("data")["swap"]["copied"].as_u64().unwrap();
    daemon.until(|| copied() > 0);
    let mut before = 0;
    daemon.until(|| {
        std::thread::sleep(Duration::from_millis(100));
        std::mem::replace(&mut before, copied()) == before
    });
    assert_eq!(swap_state(daemon), "copying", "{}", daemon.disk("data"));
}

/// A server of others is started again while a disk is copied there, and has lost what it had by then. How the swap ends, and whether the target has all.
fn a_foreign_server_is_restarted(daemon: TestDaemon, plugin: &[&str]) -> Option<(Value, bool)> {
    let (daemon, old) = with_image(daemon, SLOW_BYTES, 0);
    let (port, target) = (free_port(), daemon.image("target.img", SLOW_BYTES));
    let mut guest = Reader::connect(&daemon, "data");
    assert_eq!(guest.status_of(DiskOp::Write), 0);
    let server = Foreign::start(port, plugin, &target)?;
    begin_slow_swap(&daemon, &format!("nbd://127.0.0.1:{port}"));
    drop(server);
    let target = daemon.image("target.img", SLOW_BYTES);
    let _server = Foreign::start(port, plugin, &target)?;
    daemon.until(|| swap_has_ended(&daemon));
    let disk = daemon.disk("data");
    if disk["swap"]["state"] == "failed" {
        assert_eq!(disk["backing"]["path"], old.to_str().unwrap());
        assert_eq!([DiskOp::Write, DiskOp::Flush, DiskOp::Read].map(|op| guest.status_of(op)), [0; 3]);
    }
    Some((disk["swap"].clone(), std::fs::read(target).unwrap() == std::fs::read(old).unwrap()))
}

/// One whose flush says so, and one that cannot be asked.
#[test]
fn a_swap_to_a_foreign_server_that_was_restarted_fails() {
    for (plugin, why) in [
        (&["file"][..], "the new backing failed: Input/output error"),
        (&UNFLUSHED[..], "cannot say whether it has kept everything"),
    ] {
        let daemon = TestDaemon::new_beside_the_build("");
        let Some((swap, whole)) = a_foreign_server_is_restarted(daemon, plugin) else { return };
        let error = swap["error"].as_str().unwrap_or_default();
        assert!(swap["state"] == "failed" && error.contains(why), "{plugin:?}: {swap}");
        assert!(!whole, "{plugin:?}: nothing was lost");
    }
}

/// The source of a swap loses power when a write that was not flushed has been copied already, its disk fails when that is written again, and a person
/// accepts it as it is. What the guest reads of that block then, and after the swap; `None`, which is said aloud, where this cannot run.
fn a_source_is_accepted_with_a_loss(importer: TestDaemon) -> Option<[u8; 2]> {
    let mut host = Host::new(SLOW_BYTES)?;
    let importer = importer_on(importer, &host);
    let mut guest = Guest::new();
    let mut front = guest.start_on(&importer);
    guest.write(&mut front, 0);
    let flushed = guest.written[0];
    assert_eq!(guest.request(&mut front, DiskOp::Flush, 0, 0).0, 0);
    guest.write(&mut front, 0);
    // The first reads take so long that the copier has begun all that it may, and pauses for ten seconds behind that.
    let (all, how) = (0..SLOW_BYTES as usize, How::Slow(Duration::from_millis(300)));
    host.disk.faults(&[InjectedFault { call: Call::Read, bytes: all.clone(), how, times: 2 }]);
    begin_slow_swap(&importer, importer.path("new.img").to_str().unwrap());
    assert_eq!(host.disk.content()[0], guest.written[0]);
    let seed = (1..).find(|seed| host.disk.survives(*seed)[0] == flushed).unwrap();
    host.lose_power(seed);
    let how = How::Errno(rustix::io::Errno::IO.raw_os_error());
    host.disk.faults(&[InjectedFault { call: Call::Write, bytes: all, how, times: u32::MAX }]);
    host.boot();
    wait_for(&importer, "stopped", |remote| remote["state"] == "stopped");
    // It is tried once more, in vain.
    let said = importer.cli(&["disk", "accept", "data"]);
    assert_eq!(said.code, 0, "{}", said.err);
    wait_for(&importer, "accepted", |remote| remote["state"] == "connected");
    host.disk.faults(&[]);
    let (status, accepted) = guest.request(&mut front, DiskOp::Read, 0, 0);
    assert_eq!((status, accepted), (0, flushed), "the disk has lost it");
    assert_eq!(swap_state(&importer), "copying", "{}", importer.disk("data"));
    importer.until(|| swap_has_ended(&importer));
    let disk = importer.disk("data");
    assert_eq!(disk["swap"]["state"], "done", "{disk}");
    let (status, swapped) = guest.request(&mut front, DiskOp::Read, 0, 0);
    assert_eq!(status, 0);
    Some([accepted, swapped])
}

/// What a disk has lost, and its guest has seen that, does not come back with the new backing.
#[test]
fn what_a_person_has_accepted_as_lost_stays_lost_after_a_swap() {
    let importer = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
    let Some([accepted, swapped]) = a_source_is_accepted_with_a_loss(importer) else { return };
    assert_eq!(accepted, swapped);
}

/// Each rule is taken out, and is missed.
#[cfg(feature = "kill-points")]
#[test]
fn without_their_rules_swaps_end_wrong() {
    let daemon =
        |rule| TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n").without_rule(Some(rule));
    if let Some((swap, whole)) = a_foreign_server_is_restarted(daemon("KeptAll"), &UNFLUSHED) {
        assert_eq!((&swap["state"], whole), (&"done".into(), false), "{swap}");
    }
    if let Some([accepted, swapped]) = a_source_is_accepted_with_a_loss(daemon("CopyRestarts")) {
        assert_ne!(accepted, swapped, "it is copied again all the same");
    }
}
