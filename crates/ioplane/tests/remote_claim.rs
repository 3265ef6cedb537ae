//! One writer: an export has one holder at a time, whoever dies, stops, restarts or lies (docs/decisions/0052-claims.md). Images are not locked here, but where
//! the lock is what is tested: one kernel would hide what keeps two hosts apart.

mod daemon;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use daemon::TestDaemon;
use daemon::load::{free_port, step_for, step_until, zero};
use daemon::reader::Reader;
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use serde_json::Value;

const DEPTH: u16 = 16;
/// Guests wait for a second for what another host holds.
const IMPATIENT: &str = "[daemon]\nclaim_wait_s = 1\n[[core]]\nspin_us = 200\n";

fn started(config: &str) -> TestDaemon {
    let mut daemon = TestDaemon::new_beside_the_build(config).without_locks();
    daemon.start();
    daemon
}

/// A host that publishes an image as `data`.
struct Exporter {
    daemon: TestDaemon,
    image: PathBuf,
    port: u16,
}

impl Exporter {
    fn new() -> Exporter {
        let (port, mut daemon) = (free_port(), TestDaemon::new_beside_the_build("").without_locks());
        let image = daemon.image("data.img", CrashLoad::image_bytes(1));
        daemon.configure(&format!(
            "[[core]]\n[[export]]\nname = \"data\"\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n"
        ));
        daemon.start();
        Exporter { daemon, image, port }
    }

    fn uri(&self) -> String {
        format!("nbd://127.0.0.1:{}/data", self.port)
    }

    fn add(&self, importer: &TestDaemon, more: &[&str]) -> daemon::Said {
        importer.cli(&[&["disk", "add", "data", "--remote", &self.uri()], more].concat())
    }

    /// A host with a disk `data` on it, which a guest has used.
    fn importer(&self) -> TestDaemon {
        let importer = started("[[core]]\nspin_us = 200\n");
        let said = self.add(&importer, &[]);
        assert_eq!(said.code, 0, "{}", said.err);
        zero(&importer);
        importer
    }

    /// Another host with it, whose guests are refused soon.
    fn other(&self) -> TestDaemon {
        let other = started(IMPATIENT);
        let said = self.add(&other, &[]);
        assert_eq!(said.code, 0, "{}", said.err);
        other
    }

    fn claim(&self) -> Value {
        self.daemon.json(&["publish", "show", "data"])["claim"].clone()
    }

    /// The generation of the claim, and whether somebody holds it.
    fn standing(&self) -> (u64, bool) {
        let claim = self.claim();
        (claim["generation"].as_u64().unwrap_or(0), claim["held"].as_bool().unwrap_or(false))
    }
}

fn remote(importer: &TestDaemon) -> Value {
    importer.disk("data")["backing"]["remote"].clone()
}

fn load_on(importer: &TestDaemon, seed: u64) -> CrashLoad {
    let mut load = CrashLoad::new(1, DEPTH, seed).unwrap();
    load.lost_after = Duration::from_secs(120);
    load.attach(&importer.path("data.sock")).unwrap();
    load
}

/// Why a guest of that host gets errors.
fn refusal(importer: &TestDaemon) -> String {
    let mut guest = Reader::connect(importer, "data");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "{}", remote(importer));
    let seen = remote(importer);
    assert_eq!((&seen["state"], &seen["claim"]), (&"refused".into(), &"refused".into()), "{seen}");
    seen["why"].as_str().unwrap().to_owned()
}

#[test]
fn the_second_importer_is_refused_by_the_name_of_the_first() {
    let exporter = Exporter::new();
    let first = exporter.importer();
    assert_eq!((exporter.standing(), &remote(&first)["generation"]), ((1, true), &1.into()));
    let second = exporter.other();
    let refused = refusal(&second);
    assert!(refused.contains("held by disk data of"), "{refused}");
    assert!(refused.contains("(generation 1) since 2") && refused.contains("waited for 1 s"), "{refused}");
    // Nor does another disk of the same daemon write beside it.
    assert_eq!(second.cli(&["disk", "add", "again", "--remote", &exporter.uri()]).code, 0);
    assert_eq!(Reader::connect(&second, "again").status_of(DiskOp::Read), 1);
    // It goes on as if nobody had asked.
    let mut load = load_on(&first, 1);
    step_for(&mut load, Duration::from_millis(50));
    load.settle().unwrap();
    drop(load);
    assert_eq!(first.cli(&["disk", "remove", "data", "--force"]).code, 0);
    assert_eq!(exporter.standing(), (1, false));
    zero(&second);
    assert_eq!((exporter.standing(), &remote(&second)["generation"]), ((2, true), &2.into()));
}

/// The first stands still with writes in flight, comes back behind the takeover, and finds that it is no more the one.
#[test]
fn nothing_of_the_old_holder_appears_after_a_takeover() {
    let exporter = Exporter::new();
    for round in 0..4u64 {
        let first = exporter.importer();
        zero(&first);
        let mut old = load_on(&first, 10 + round);
        step_for(&mut old, Duration::from_millis(40 + 23 * round));
        first.signal("STOP");
        let second = started("[[core]]\nspin_us = 200\n");
        assert_eq!(exporter.standing(), (1 + 2 * round, true), "it does not answer, and holds it");
        let said = exporter.add(&second, &["--takeover"]);
        assert_eq!(said.code, 0, "{}", said.err);
        zero(&second);
        let mut new = load_on(&second, 20 + round);
        step_for(&mut new, Duration::from_millis(50));
        first.signal("CONT");
        step_until(&mut new, || remote(&first)["state"] == "refused", || first.disk("data").to_string());
        step_for(&mut new, Duration::from_millis(50));
        new.settle().unwrap();
        let seen = remote(&first);
        let expected = format!("(generation {}, was {})", 2 + 2 * round, 1 + 2 * round);
        let why = seen["why"].as_str().unwrap().to_owned();
        assert!(why.contains("taken over by disk data of") && why.contains(&expected), "{why}");
        let shown = first.cli(&["disk", "show", "data"]).out;
        assert!(shown.contains("refuses this disk, requests fail"), "{shown}");
        // For good: whatever a person says there, and after a restart.
        let said = first.cli(&["disk", "accept", "data"]);
        assert_eq!(said.code, 0, "{}", said.err);
        step_until(&mut new, || remote(&first)["state"] == "refused", || first.disk("data").to_string());
        new.settle().unwrap();
        assert_eq!(exporter.standing(), (2 + 2 * round, true));
        drop((old, new));
        for importer in [first, second] {
            assert_eq!(importer.cli(&["disk", "remove", "data", "--force"]).code, 0);
        }
        assert_eq!(exporter.standing(), (2 + 2 * round, false));
    }
}

#[test]
fn a_holder_comes_back_with_its_generation_and_finds_out_that_it_was_taken_over() {
    let exporter = Exporter::new();
    let mut first = exporter.importer();
    for _ in 0..3 {
        first.kill9();
        first.start();
        first.until(|| first.disk("data")["state"] == "served");
        assert_eq!((exporter.standing(), &remote(&first)["generation"]), ((1, true), &1.into()));
    }
    // Its host reboots: the run directory goes, and what it is configured to serve comes back.
    first.kill9();
    std::fs::remove_file(first.path("state.json")).unwrap();
    first.configure(&format!("[[core]]\n[[disk]]\nname = \"data\"\nremote = {:?}\n", exporter.uri()));
    first.start();
    first.until(|| first.disk("data")["state"] == "served");
    // No guest has survived that.
    first.until(|| exporter.standing() == (1, false));
    first.until(|| remote(&first)["claim"] == "free");
    zero(&first);
    first.terminate();
    assert_eq!(exporter.standing(), (2, true), "it comes back");
    let second = started("[[core]]\n");
    assert_eq!(exporter.add(&second, &["--takeover"]).code, 0);
    first.start();
    first.until(|| first.disk("data")["state"] == "failed");
    let failed = first.disk("data");
    assert!(failed["error"].as_str().unwrap().contains("held by disk data of"), "{failed}");
    assert_eq!(exporter.standing(), (3, true));
}

#[test]
fn a_claim_survives_its_exporter_and_goes_with_the_image() {
    let mut exporter = Exporter::new();
    let first = exporter.importer();
    let mut load = load_on(&first, 30);
    for _ in 0..3 {
        step_for(&mut load, Duration::from_millis(40));
        exporter.daemon.kill9();
        // Whatever the run directory had goes with a host.
        std::fs::remove_file(exporter.daemon.path("state.json")).unwrap();
        exporter.daemon.start();
        assert_eq!(exporter.standing(), (1, true));
        step_until(&mut load, || remote(&first)["state"] == "connected", || first.disk("data").to_string());
        assert_eq!(exporter.standing(), (1, true));
    }
    load.settle().unwrap();
    // Another daemon publishes the same image under another name.
    exporter.daemon.kill9();
    let port = free_port();
    let other = started(&format!(
        "[[core]]\n[[export]]\nname = \"other\"\npath = {:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n",
        exporter.image
    ));
    let second = started(IMPATIENT);
    let uri = format!("nbd://127.0.0.1:{port}/other");
    assert_eq!(second.cli(&["disk", "add", "data", "--remote", &uri]).code, 0);
    let refused = refusal(&second);
    assert!(refused.contains("held by disk data of"), "{refused}");
    assert_eq!(other.json(&["publish", "show", "other"])["claim"]["generation"], 1);
}

#[test]
fn a_claim_that_was_damaged_lets_nobody_in() {
    let mut exporter = Exporter::new();
    let _first = exporter.importer();
    exporter.daemon.kill9();
    let cut = &b"ioplane-claim 1"[..];
    rustix::fs::setxattr(&exporter.image, "user.ioplane.claim", cut, rustix::fs::XattrFlags::empty())
        .unwrap();
    exporter.daemon.start();
    exporter.daemon.until(|| exporter.daemon.json(&["publish", "show", "data"])["state"] == "failed");
    let failed = exporter.daemon.json(&["publish", "show", "data"]);
    assert!(failed["error"].as_str().unwrap().contains("is damaged: it is cut off"), "{failed}");
    assert!(failed["remedy"].as_str().unwrap().contains("setfattr -x user.ioplane.claim"), "{failed}");
    rustix::fs::removexattr(&exporter.image, "user.ioplane.claim").unwrap();
    exporter.daemon.until(|| exporter.daemon.json(&["publish", "show", "data"])["state"] == "served");
    zero(&exporter.other());
    assert_eq!(exporter.standing(), (1, true));
}

/// A backing without attributes: an export of another host, published once more.
#[test]
fn a_claim_has_a_file_where_there_is_no_image() {
    let bottom = Exporter::new();
    let port = free_port();
    let config = format!(
        "[[core]]\n[[export]]\nname = \"data\"\nremote = {:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n",
        bottom.uri()
    );
    let mut middle = started(&config);
    middle.until(|| middle.json(&["publish", "show", "data"])["state"] == "served");
    let uri = format!("nbd://127.0.0.1:{port}/data");
    let [first, second] = ["", ""].map(|_| started(IMPATIENT));
    for importer in [&first, &second] {
        let said = importer.cli(&["disk", "add", "data", "--remote", &uri]);
        assert_eq!(said.code, 0, "{}", said.err);
    }
    zero(&first);
    middle.kill9();
    std::fs::remove_file(middle.path("state.json")).unwrap();
    middle.start();
    middle.until(|| middle.json(&["publish", "show", "data"])["state"] == "served");
    let refused = refusal(&second);
    assert!(refused.contains("held by disk data of"), "{refused}");
    middle.kill9();
    let folder = middle.path("claims").join("exports");
    let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    middle.start();
    middle.until(|| middle.json(&["publish", "show", "data"])["state"] == "failed");
    let failed = middle.json(&["publish", "show", "data"]);
    assert!(failed["error"].as_str().unwrap().contains("is damaged"), "{failed}");
}

/// Runs a program of others; `None` if it is not installed, which is said past the capture of the test harness.
fn foreign(program: &str, arguments: &[&str]) -> Option<(bool, String)> {
    match Command::new(program).args(arguments).stdin(Stdio::null()).output() {
        Ok(output) => {
            let said = [&output.stdout[..], &output.stderr[..]].concat();
            Some((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let why =
                format!("SKIPPED: claims were NOT tested with {program}: install qemu-utils and libnbd-bin");
            let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

#[test]
fn a_writer_without_a_claim_is_refused_until_a_release() {
    let exporter = Exporter::new();
    let uri = exporter.uri();
    let write = || foreign("qemu-io", &["-f", "raw", "-c", "write -P 0x5a 0 4k", &uri]);
    let copy = || {
        let source = exporter.daemon.image("source.img", 4096).display().to_string();
        foreign("nbdcopy", &[&source, &uri])
    };
    let first = exporter.importer();
    for refused in [write(), copy(), foreign("nbdinfo", &[&uri])].into_iter().flatten() {
        assert!(!refused.0, "{}", refused.1);
    }
    // QEMU says what the server said.
    if let Some((_, said)) = write() {
        assert!(said.contains("held by disk data of"), "{said}");
    }
    // An importer of an older version, which knows epochs and no claims, and one that lies.
    for queries in [
        &["ioplane:epoch=0a/17/0/1"][..],
        &["ioplane:epoch=0a/17/0/1/1"],
        &["ioplane:epoch=0a/17/0/1/18446744073709551615"],
        &["ioplane:claim=0a/own/1/somebody", "ioplane:epoch=0a/17/0/1/1"],
        &["ioplane:claim=0a/ask/0/somebody", "ioplane:epoch=0a/17/0/1/2"],
        &["ioplane:claim=0a/release/1/somebody"],
        &["ioplane:epoch", "ioplane:claim"],
        &["ioplane:epoch"],
    ] {
        let mut client = RawClient::connect(exporter.port);
        let contexts = client.select(queries);
        assert!(!contexts.iter().any(|name| name.starts_with("ioplane:epoch=")), "{queries:?}: {contexts:?}");
        assert!(
            !contexts.iter().any(|name| name.contains("granted") || name.contains("released")),
            "{contexts:?}"
        );
        assert!(client.enter().is_err() || !client.writes(), "{queries:?}: {contexts:?}");
        assert_eq!(exporter.standing(), (1, true), "{queries:?}");
    }
    let bytes = std::fs::read(&exporter.image).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "somebody has written");
    // A person lets others in. The holder has to be gone, or that has to be said.
    let mut load = load_on(&first, 40);
    step_for(&mut load, Duration::from_millis(50));
    let refused = exporter.daemon.refused(&["publish", "release", "data"]);
    assert!(refused.contains("1 connections are open"), "{refused}");
    let said = exporter.daemon.cli(&["publish", "release", "data", "--force"]);
    assert_eq!(said.code, 0, "{}", said.err);
    first.until(|| remote(&first)["state"] == "refused");
    assert!(remote(&first)["why"].as_str().unwrap().contains("was released"), "{}", remote(&first));
    assert!(exporter.daemon.refused(&["publish", "release", "data"]).contains("nobody holds"));
    for served in [write(), copy()].into_iter().flatten() {
        assert!(served.0, "{}", served.1);
    }
    let mut client = RawClient::connect(exporter.port);
    assert_eq!(client.select(&["ioplane:epoch=0a/17/0/1"]), ["ioplane:epoch=0a/17/0/1"]);
    client.enter().unwrap();
    assert!(client.writes());
    // It is there, and may write: so nobody gets a claim without ending it.
    let second = exporter.other();
    let refused = refusal(&second);
    assert!(refused.contains("clients that have no claim use it"), "{refused}");
    drop(client);
    second.until(|| {
        // A front end that comes before the daemon has seen the last one go is refused.
        second.until(|| second.disk("data")["connected"] == false);
        Reader::connect(&second, "data").status_of(DiskOp::Read) == 0
    });
    assert_eq!(exporter.standing(), (2, true));
}

/// The least of a client of NBD, which says what it likes.
struct RawClient(TcpStream);

impl RawClient {
    fn connect(port: u16) -> RawClient {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        let mut client = RawClient(stream);
        client.option(8, &[]);
        assert_eq!(client.reply().0, 1, "structured replies");
        client
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.0.write_all(&bytes).unwrap();
    }

    /// Type and data of one reply.
    fn reply(&mut self) -> (u32, Vec<u8>) {
        let mut header = [0; 20];
        self.0.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        let mut data = vec![0; word(16) as usize];
        self.0.read_exact(&mut data).unwrap();
        (word(12), data)
    }

    /// The names of the contexts that these queries find.
    fn select(&mut self, queries: &[&str]) -> Vec<String> {
        let mut data = 4u32.to_be_bytes().to_vec();
        data.extend(b"data");
        data.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.as_bytes());
        }
        self.option(10, &data);
        let mut names = Vec::new();
        loop {
            match self.reply() {
                (4, data) => names.push(String::from_utf8(data[4..].to_vec()).unwrap()),
                (1, _) => return names,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Begins with the requests; what it is told if it may not.
    fn enter(&mut self) -> Result<(), String> {
        let mut data = 4u32.to_be_bytes().to_vec();
        data.extend(b"data\0\0");
        self.option(7, &data);
        loop {
            match self.reply() {
                (1, _) => return Ok(()),
                (3, _) => {}
                (_, why) => return Err(String::from_utf8_lossy(&why).into_owned()),
            }
        }
    }

    /// Whether a write is answered, and well.
    fn writes(&mut self) -> bool {
        self.begin_write(7) && self.answered(7)
    }

    /// Sends a write with this cookie.
    fn begin_write(&mut self, cookie: u64) -> bool {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend([0, 0, 0, 1]);
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(8192u64.to_be_bytes());
        bytes.extend(512u32.to_be_bytes());
        bytes.extend([0xa5; 512]);
        self.0.write_all(&bytes).is_ok()
    }

    /// Whether the write with this cookie is answered, and well.
    fn answered(&mut self, cookie: u64) -> bool {
        loop {
            let mut reply = [0; 16];
            if self.0.read_exact(&mut reply).is_err() {
                return false;
            }
            // A simple reply without an error, or a chunk that is no error.
            let well = match u32::from_be_bytes(reply[..4].try_into().unwrap()) {
                0x6744_6698 => reply[4..8] == [0; 4],
                0x668e_33ef => reply[6] & 0x80 == 0,
                other => panic!("a reply with magic {other:#x}"),
            };
            if !well || reply[8..] == cookie.to_be_bytes() {
                return well;
            }
        }
    }
}

#[test]
fn a_swap_takes_its_claim_along_and_leaves_none_behind() {
    let (one, two) = (Exporter::new(), Exporter::new());
    let importer = one.importer();
    let mut load = load_on(&importer, 50);
    let swap = |args: &[&str]| {
        let said = importer.cli(&[&["swap", "data"], args].concat());
        (said.code, said.err)
    };
    // One that is held by another one cannot be a target.
    let other = two.importer();
    let refused = swap(&["--to", &two.uri(), "--overwrite"]);
    assert!(refused.0 != 0 && refused.1.contains("held by disk data of"), "{}", refused.1);
    assert_eq!(other.cli(&["disk", "remove", "data"]).code, 0);
    let command = std::thread::spawn(importer.later(&["swap", "data", "--to", &two.uri(), "--overwrite"]));
    while !command.is_finished() {
        step_for(&mut load, Duration::from_millis(5));
    }
    let said = command.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);
    step_until(&mut load, || !one.standing().1, || one.claim().to_string());
    assert_eq!((one.standing(), two.standing()), ((1, false), (2, true)));
    load.settle().unwrap();
    // Back to a file of this host.
    let local = importer.path("local.img").display().to_string();
    let command = std::thread::spawn(importer.later(&["swap", "data", "--to", &local]));
    while !command.is_finished() {
        step_for(&mut load, Duration::from_millis(5));
    }
    let said = command.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);
    step_until(&mut load, || !two.standing().1, || two.claim().to_string());
    load.settle().unwrap();
}

/// A daemon that is upgraded, and is then not the test's child any more.
struct Upgraded<'a>(&'a TestDaemon);

impl Drop for Upgraded<'_> {
    fn drop(&mut self) {
        self.0.kill_whoever_answers();
    }
}

#[test]
fn a_reload_and_an_upgrade_keep_the_claim_and_a_replacement_moves_it() {
    let (one, two) = (Exporter::new(), Exporter::new());
    let config = |queues: u16| {
        format!("[[core]]\n[[disk]]\nname = \"data\"\nremote = {:?}\nqueues = {queues}\n", one.uri())
    };
    let importer = started(&config(1));
    let _upgraded = [Upgraded(&importer), Upgraded(&one.daemon)];
    importer.until(|| importer.disk("data")["state"] == "served");
    zero(&importer);
    importer.configure(&config(2));
    assert_eq!(importer.cli(&["reload"]).code, 0);
    assert_eq!((one.standing(), importer.disk("data")["queues"].as_array().unwrap().len()), ((1, true), 2));
    let said = importer.cli(&["upgrade"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!((one.standing(), &remote(&importer)["generation"]), ((1, true), &1.into()));
    let mut load = load_on(&importer, 60);
    step_for(&mut load, Duration::from_millis(50));
    let command = std::thread::spawn(importer.later(&["upgrade"]));
    while !command.is_finished() {
        step_for(&mut load, Duration::from_millis(5));
    }
    let said = command.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);
    step_for(&mut load, Duration::from_millis(50));
    load.settle().unwrap();
    assert_eq!((one.standing(), &remote(&importer)["generation"]), ((1, true), &1.into()));
    // Its exporter can be upgraded only without clients, and knows the claim afterwards.
    drop(load);
    one.daemon.until(|| one.daemon.cli(&["upgrade"]).code == 0);
    one.daemon.until(|| one.daemon.json(&["publish", "show", "data"])["state"] == "served");
    assert_eq!(one.standing(), (1, true));
    let said = importer.cli(&["disk", "replace", "data", "--remote", &two.uri()]);
    assert_eq!(said.code, 0, "{}", said.err);
    // It was claimed to see whether that can be, and no guest uses the disk.
    assert_eq!(one.standing(), (1, false));
    importer.until(|| two.standing() == (1, false));
    zero(&importer);
    assert_eq!(two.standing(), (2, true));
    importer.configure("[[core]]\n");
    let said = importer.cli(&["reload"]);
    assert_eq!((said.code, two.standing()), (0, (2, false)), "{}", said.err);
}

/// An image that has a writer gets no readers; the image, which has neither in the end.
fn readers_and_writers(daemon: &TestDaemon) -> Result<String, &'static str> {
    let image = daemon.image("data.img", 1 << 20).display().to_string();
    assert_eq!(daemon.cli(&["disk", "add", "local", "--path", &image]).code, 0);
    let said = daemon.cli(&["publish", "disk", "data", "--path", &image, "--read-only"]);
    if said.code == 0 {
        return Err("it has a writer, and is published for reading");
    }
    assert!(said.err.contains("in use"), "{}", said.err);
    assert_eq!(daemon.cli(&["disk", "remove", "local"]).code, 0);
    Ok(image)
}

/// Read-only for many, and during that nobody writes, not even the host that publishes.
#[test]
fn what_is_published_for_reading_is_written_by_nobody() {
    let daemon = TestDaemon::open("[[core]]\n");
    let image = readers_and_writers(&daemon).unwrap();
    let publish = ["publish", "disk", "data", "--path", &image, "--read-only"];
    assert_eq!(daemon.cli(&publish).code, 0);
    assert!(daemon.refused(&["disk", "add", "local", "--path", &image]).contains("in use"));
    assert_eq!(daemon.json(&["publish", "show", "data"])["claim"], Value::Null);
    let uri = format!("nbd+unix:///data?socket={}", daemon.path("data.sock").display());
    let readers: Vec<TestDaemon> = (0..3).map(|_| started("[[core]]\n")).collect();
    for reader in &readers {
        let said = reader.cli(&["disk", "add", "data", "--remote", &uri, "--read-only"]);
        assert_eq!(said.code, 0, "{}", said.err);
        let mut guest = Reader::connect(reader, "data");
        guest.submit(4);
        guest.wait(4);
        assert_eq!(remote(reader)["generation"], Value::Null);
    }
    if let Some((served, said)) = foreign("nbdinfo", &[&uri]) {
        assert!(served, "{said}");
    }
}

/// Nobody publishes the image any more, and the guest of its holder would go on if somebody did: it is no local disk's.
#[test]
fn an_image_that_another_host_holds_is_no_local_disk() {
    let mut exporter = Exporter::new();
    let first = exporter.importer();
    let here = &exporter.daemon;
    assert_eq!(here.cli(&["publish", "remove", "data", "--force"]).code, 0, "{}", here.log());
    let image = &exporter.image.display().to_string();
    let link = here.path("link.img");
    std::os::unix::fs::symlink(&exporter.image, &link).unwrap();
    let spare = here.image("spare.img", CrashLoad::image_bytes(1)).display().to_string();
    assert_eq!(here.cli(&["disk", "add", "spare", "--path", &spare]).code, 0);
    for command in [
        &["disk", "add", "data", "--path", image][..],
        &["disk", "add", "other", "--path", link.to_str().unwrap()],
        &["disk", "replace", "spare", "--path", image],
        &["swap", "spare", "--to", image, "--overwrite"],
    ] {
        let refused = here.refused(command);
        assert!(refused.contains("held by disk data of") && refused.contains("(generation 1)"), "{refused}");
        assert!(refused.contains("publish release") && refused.contains("--remote"), "{refused}");
        let copy = "if this is a copy of the image that is held: setfattr -x user.ioplane.claim /";
        assert!(refused.to_lowercase().contains(copy), "{refused}");
    }
    assert_eq!(here.disk("spare")["backing"]["path"], spare.as_str());
    // Who only reads writes nothing that its guest would lose, and keeps everybody from publishing it for writing.
    let read = here.cli(&["disk", "add", "data", "--path", image, "--read-only"]);
    assert_eq!(read.code, 0, "{}", read.err);
    assert_eq!(here.cli(&["disk", "remove", "data"]).code, 0);
    // With such a configuration the others are served, and it is tried again.
    here.configure(&format!("[[core]]\n[[disk]]\nname = \"data\"\npath = {image:?}\n"));
    exporter.daemon.kill9();
    exporter.daemon.start();
    let here = &exporter.daemon;
    here.until(|| here.disk("data")["state"] == "failed");
    let failed = here.disk("data");
    assert!(failed["error"].as_str().unwrap().contains("held by disk data of"), "{failed}");
    assert!(failed["retry"]["next_ms"].is_u64() && here.disk("spare")["state"] == "served", "{failed}");
    // By whichever name it is published, its holder has it until somebody says that it has not.
    drop(first);
    for args in [&["disk", "another", "--path", image][..], &["release", "another"], &["remove", "another"]] {
        let said = here.cli(&[&["publish"], args].concat());
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
    }
    here.until(|| here.disk("data")["state"] == "served");
    drop(here.connect("data"));
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// The importer's state comes back from a backup, in which it holds the disk: others have had it since, and then it itself has had it by a later claim.
#[test]
fn a_restored_state_directory_lets_nobody_in() {
    let exporter = Exporter::new();
    let mut first = exporter.importer();
    first.kill9();
    assert_eq!(exporter.standing(), (1, true));
    let backup = tempfile::tempdir().unwrap();
    copy_folder(&first.path("claims"), &backup.path().join("claims"));
    std::fs::copy(first.path("state.json"), backup.path().join("state.json")).unwrap();
    let restored = |first: &mut TestDaemon, standing: (u64, bool)| {
        std::fs::remove_dir_all(first.path("claims")).unwrap();
        copy_folder(&backup.path().join("claims"), &first.path("claims"));
        std::fs::copy(backup.path().join("state.json"), first.path("state.json")).unwrap();
        first.start();
        first.until(|| first.disk("data")["state"] == "failed");
        let failed = first.disk("data");
        let (error, remedy) = (failed["error"].as_str().unwrap(), failed["remedy"].as_str().unwrap());
        assert_eq!(exporter.standing(), standing, "{failed}");
        (error.to_owned(), remedy.to_owned())
    };
    let second = started(IMPATIENT);
    assert_eq!(exporter.add(&second, &["--takeover"]).code, 0);
    zero(&second);
    // It finds out, and what it remembers then is not what is restored.
    first.start();
    first.until(|| first.disk("data")["state"] == "failed");
    first.kill9();
    let (error, _) = restored(&mut first, (2, true));
    assert!(error.contains("held by disk data of") && error.contains("(generation 2)"), "{error}");
    first.kill9();
    // Nobody has it, and others have written since.
    assert_eq!(second.cli(&["disk", "remove", "data", "--force"]).code, 0);
    let (error, remedy) = restored(&mut first, (2, false));
    assert!(error.contains("released"), "{error}");
    assert!(remedy.contains("others may have written to it"), "{remedy}");
    // A person begins anew; the same backup is older than that, too.
    assert_eq!(first.cli(&["disk", "remove", "data", "--force"]).code, 0);
    assert_eq!(exporter.add(&first, &[]).code, 0);
    zero(&first);
    assert_eq!(exporter.standing(), (3, true));
    first.kill9();
    let (error, _) = restored(&mut first, (3, true));
    assert!(error.contains("(generation 3)"), "{error}");
}

/// Each rule of the exporter is taken out in turn, and what it is for goes wrong.
#[cfg(feature = "kill-points")]
mod without {
    use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};

    use super::*;

    /// Somebody takes an export over while a write of its holder is in its slow disk; what goes wrong, if anything does.
    fn takeover(rule: Option<&'static str>) -> Option<&'static str> {
        const SLOW: Duration = Duration::from_millis(1500);
        let mut daemon = TestDaemon::new_beside_the_build("").without_locks().without_rule(rule);
        let disk = FuseDisk::new(&daemon.path("disk"), 1 << 20).unwrap();
        let port = free_port();
        daemon.configure(&format!(
            "[[core]]\n[[export]]\nname = \"data\"\npath = {:?}\ndirect = \"on\"\nlisten = \"127.0.0.1:{port}\"\nplain = true\n",
            disk.path()
        ));
        daemon.start();
        let select = |query: &str| {
            let mut client = RawClient::connect(port);
            let names = client.select(&[query]);
            (client, names)
        };
        let confirms = |names: &[String]| names.iter().any(|name| name.starts_with("ioplane:epoch="));
        assert_eq!(select("ioplane:claim=0a/ask/0/old").1, ["ioplane:claim=granted/1"]);
        let (mut old, names) = select("ioplane:epoch=0a/17/0/2/1");
        assert!(confirms(&names), "{names:?}");
        old.enter().unwrap();
        assert!(old.writes());
        // A handshake that was under way for long.
        if confirms(&select("ioplane:epoch=0a/17/0/1/1").1) {
            return Some("an older epoch is confirmed");
        }
        disk.faults(&[InjectedFault {
            call: Call::Write,
            bytes: 0..1 << 20,
            how: How::Slow(SLOW),
            times: 1,
        }]);
        assert!(old.begin_write(8));
        daemon.until(|| disk.calls().troubled == 1);
        assert_eq!(select("ioplane:claim=0b/takeover/0/new").1, ["ioplane:claim=granted/2"]);
        let mut new = (1..).map(|epoch| select(&format!("ioplane:epoch=0b/17/0/{epoch}/2")));
        let (mut new, _) = new.find(|(_, names)| confirms(names)).unwrap();
        let landed = disk.calls().slow_ended;
        new.enter().unwrap();
        assert!(new.writes());
        // Who is not read any more, and not told, hears nothing for ever.
        old.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        if old.begin_write(9) && old.answered(9) {
            return Some("the old holder writes on");
        }
        (landed == 0).then_some("the next one was let in before an old write had landed")
    }

    #[test]
    fn each_rule_of_the_fence_is_needed() {
        if let Err(why) = FuseDisk::new(&tempfile::tempdir().unwrap().path().join("disk"), 4096) {
            eprintln!("\n*** SKIPPED: {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
            return;
        }
        assert_eq!(takeover(None), None);
        assert_eq!(takeover(Some("NewestOnly")), Some("an older epoch is confirmed"));
        assert_eq!(takeover(Some("OldEnds")), Some("the old holder writes on"));
        let landed = "the next one was let in before an old write had landed";
        assert_eq!(takeover(Some("Landed")), Some(landed));
    }

    /// That readers exclude writers is the lock's work, so that it is noticed when it is taken out; and in the tests above it is.
    #[test]
    fn without_locks_an_image_has_readers_and_a_writer() {
        let wrong = Err("it has a writer, and is published for reading");
        assert_eq!(readers_and_writers(&started("[[core]]\n")), wrong);
    }
}
