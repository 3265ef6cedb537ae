//! A VM is paused when a disk of another machine has lost its server for longer than `timeout_s`, and continued when that is back.

mod daemon;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use daemon::load::{exporter, free_port};
use daemon::qmp::RunState;
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_qemu::{Endpoint, Qmp};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// A host with one published disk, and where it is.
fn publisher(name: &str) -> (TestDaemon, String) {
    let port = free_port();
    let mut exporter = exporter(name, port, 1 << 20);
    exporter.start();
    (exporter, format!("nbd://127.0.0.1:{port}/{name}"))
}

/// A host whose disks are these exports, paused after a second by `qmp` in its folder.
fn importer(disks: &[(&str, &str)]) -> TestDaemon {
    let mut importer = TestDaemon::new_beside_the_build("");
    let qmp = importer.path("qmp");
    let disk = |(name, uri): &(&str, &str)| {
        format!(
            "[[disk]]\nname = {name:?}\nremote = {uri:?}\ntimeout_s = 1\non_timeout = \"pause\"\nqmp = {qmp:?}\n"
        )
    };
    importer.configure(&format!("[[core]]\n{}", disks.iter().map(disk).collect::<String>()));
    importer.start();
    importer
}

/// A guest of disk `data` that has read.
fn reader(importer: &TestDaemon) -> Reader {
    let mut guest = Reader::connect(importer, "data");
    guest.submit(1);
    guest.wait(1);
    guest
}

fn pause_of(importer: &TestDaemon, name: &str) -> Value {
    importer.disk(name)["vm_pause"].clone()
}

fn until_pause(importer: &TestDaemon, name: &str, state: &str) -> Value {
    importer.until(|| pause_of(importer, name)["state"] == state);
    pause_of(importer, name)
}

/// All that was asked for has been answered, and nothing has failed.
fn nothing_failed(importer: &TestDaemon, name: &str) {
    let disk = importer.disk(name);
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
}

#[test]
fn a_vm_is_paused_after_the_time_and_goes_on_when_its_disk_is_back() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    assert_eq!(until_pause(&importer, "data", "armed")["timeout_s"], 1);
    let mut guest = reader(&importer);
    assert_eq!(vm.asked("query-status"), 0, "nobody connects without need");
    let events = UnixStream::connect(importer.path("control.sock")).unwrap();
    events.set_read_timeout(Some(PATIENCE)).unwrap();
    (&events).write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut events = BufReader::new(events);
    let mut begun = String::new();
    while !begun.contains("subscribed") {
        assert!(events.read_line(&mut begun).unwrap() > 0, "{begun}");
    }
    exporter.kill9();
    guest.submit(4);
    let said = until_pause(&importer, "data", "paused");
    assert!(vm.is("paused") && said["why"] == "held by data", "{said}");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("PAUSED by ioplane") && shown.contains("the VM is paused after 1 s"), "{shown}");
    assert!(importer.cli(&["disk", "list"]).out.contains("data: VM pause: PAUSED by ioplane"));
    assert_eq!(importer.disk("data")["backing"]["remote"]["state"], "reconnecting");
    exporter.start();
    guest.wait(4);
    until_pause(&importer, "data", "armed");
    assert!(vm.is("running"));
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (1, 1));
    nothing_failed(&importer, "data");
    let log = importer.log();
    assert!(log.contains("the VM is paused") && log.contains("the VM goes on"), "{log}");
    let told: Vec<String> = events
        .lines()
        .map(|line| line.unwrap())
        .filter(|line| line.contains("the VM"))
        .take(2)
        .map(|line| line[line.find('{').unwrap()..].to_owned())
        .collect();
    for (line, words) in told.iter().zip(["the VM is paused", "the VM goes on"]) {
        let event: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&event["event"], &event["name"]), (&"changed".into(), &"data".into()), "{event}");
        assert!(event["text"].as_str().unwrap().contains(words), "{event}");
    }
}

/// QEMU stops the rings of a VM that it pauses, so the disk has no connection by which its server could be seen again.
#[test]
fn a_vm_whose_rings_were_stopped_goes_on_as_well() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let mut guest = reader(&importer);
    exporter.kill9();
    guest.submit(4);
    until_pause(&importer, "data", "paused");
    let begun = Instant::now();
    guest.stop();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "QEMU's main thread waits for this: {:?}",
        begun.elapsed()
    );
    importer.until(|| pause_of(&importer, "data")["why"].as_str().is_some_and(|why| why.contains("refused")));
    assert!(vm.is("paused"));
    exporter.start();
    until_pause(&importer, "data", "armed");
    assert!(vm.is("running"));
}

/// It is noticed after 10 s without an answer; the handshake of another connection is not answered, either.
#[test]
fn a_vm_is_paused_when_the_server_hangs() {
    let (exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let mut guest = reader(&importer);
    exporter.signal("STOP");
    guest.submit(2);
    until_pause(&importer, "data", "paused");
    guest.stop();
    exporter.signal("CONT");
    until_pause(&importer, "data", "armed");
    assert!(vm.is("running"));
    nothing_failed(&importer, "data");
}

#[test]
fn a_vm_that_somebody_has_resumed_is_left_alone() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let mut guest = reader(&importer);
    exporter.kill9();
    guest.submit(1);
    until_pause(&importer, "data", "paused");
    vm.set("running");
    let said = until_pause(&importer, "data", "left_alone");
    assert!(said["why"].as_str().unwrap().contains("somebody else has continued it"), "{said}");
    // Whatever it does from now on is not our business.
    vm.set("paused");
    exporter.start();
    guest.wait(1);
    until_pause(&importer, "data", "armed");
    assert!(vm.is("paused"), "a person has paused it");
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (1, 0));
}

#[test]
fn a_vm_that_somebody_has_paused_is_left_alone() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let mut guest = reader(&importer);
    vm.set("paused");
    exporter.kill9();
    guest.submit(1);
    let said = until_pause(&importer, "data", "left_alone");
    assert!(said["why"].as_str().unwrap().contains("somebody else has paused it"), "{said}");
    exporter.start();
    guest.wait(1);
    until_pause(&importer, "data", "armed");
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (0, 0));
}

#[test]
fn a_vm_goes_on_when_all_its_disks_are_back() {
    let ((mut one, one_uri), (mut two, two_uri)) = (publisher("one"), publisher("two"));
    let importer = importer(&[("one", &one_uri), ("two", &two_uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let mut guests = ["one", "two"].map(|name| Reader::connect(&importer, name));
    for guest in &mut guests {
        guest.submit(1);
        guest.wait(1);
    }
    one.kill9();
    until_pause(&importer, "one", "paused");
    // One that is lost while the VM is paused holds it, too.
    two.kill9();
    importer.until(|| pause_of(&importer, "two")["why"] == "held by one, two");
    one.start();
    importer.until(|| importer.disk("one")["backing"]["remote"]["state"] == "connected");
    // So long that it would have gone on.
    std::thread::sleep(Duration::from_secs(2));
    assert!(vm.is("paused") && vm.asked("cont") == 0);
    two.start();
    until_pause(&importer, "one", "armed");
    assert!(vm.is("running"));
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (1, 1));
}

#[test]
fn a_daemon_that_is_killed_knows_that_it_has_paused_the_vm() {
    let (mut exporter, uri) = publisher("data");
    let mut importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let guest = Reader::connect(&importer, "data");
    exporter.kill9();
    until_pause(&importer, "data", "paused");
    drop(guest);
    importer.kill9();
    importer.start();
    assert!(vm.is("paused"));
    exporter.start();
    importer.until(|| vm.is("running"));
    until_pause(&importer, "data", "armed");
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (1, 1));
    let state: Value = serde_json::from_slice(&std::fs::read(importer.path("state.json")).unwrap()).unwrap();
    assert!(state["entries"].get("pauses").is_none(), "{state}");
}

/// It has paused a VM that another daemon is to continue: the disk is back, and the monitor is busy meanwhile.
#[test]
fn an_upgraded_daemon_knows_that_the_vm_is_paused() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let vm = RunState::serve(&importer.path("qmp"));
    let _guest = Reader::connect(&importer, "data");
    exporter.kill9();
    until_pause(&importer, "data", "paused");
    let held = UnixStream::connect(importer.path("qmp")).unwrap();
    exporter.start();
    let said = until_pause(&importer, "data", "cannot_continue");
    assert!(said["why"].as_str().unwrap().contains("one client at a time"), "{said}");
    let end = Instant::now() + LIMIT;
    while importer.cli(&["upgrade"]).code != 0 {
        assert!(Instant::now() < end, "{}", importer.log());
    }
    drop(held);
    importer.until(|| vm.is("running"));
    until_pause(&importer, "data", "armed");
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (1, 1));
    importer.kill_whoever_answers();
}

#[test]
fn a_disk_that_is_removed_or_has_another_policy_holds_no_vm() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[]);
    let vm = RunState::serve(&importer.path("qmp"));
    let add = || {
        let said = importer.cli(&["disk", "add", "data", "--remote", &uri]);
        assert_eq!(said.code, 0, "{}", said.err);
    };
    add();
    let guest = Reader::connect(&importer, "data");
    assert_eq!(importer.disk("data")["vm_pause"], Value::Null);
    exporter.kill9();
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "reconnecting");
    // While it is lost.
    let qmp = importer.path("qmp").display().to_string();
    let refused = importer.refused(&["disk", "set", "data", "--timeout-s", "1", "--on-timeout", "pause"]);
    assert!(refused.contains("without qmp"), "{refused}");
    let said =
        importer.cli(&["disk", "set", "data", "--timeout-s", "1", "--on-timeout", "pause", "--qmp", &qmp]);
    assert!(said.out.contains("the VM is paused after 1 s"), "{}{}", said.out, said.err);
    until_pause(&importer, "data", "paused");
    assert_eq!(importer.cli(&["disk", "set", "data", "--on-timeout", "wait"]).code, 0);
    importer.until(|| vm.is("running"));
    assert_eq!(importer.cli(&["disk", "set", "data", "--on-timeout", "pause"]).code, 0);
    importer.until(|| vm.asked("stop") == 2);
    until_pause(&importer, "data", "paused");
    drop(guest);
    let said = importer.cli(&["disk", "remove", "data", "--force"]);
    assert_eq!(said.code, 0, "{}", said.err);
    importer.until(|| vm.is("running"));
    assert_eq!((vm.asked("stop"), vm.asked("cont")), (2, 2));
}

#[test]
fn another_time_holds_for_a_connection_that_is_lost() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[]);
    assert_eq!(importer.cli(&["disk", "add", "data", "--remote", &uri]).code, 0);
    let mut guest = Reader::connect(&importer, "data");
    exporter.kill9();
    let state = |state: &str| importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == state);
    state("reconnecting");
    let said = importer.cli(&["disk", "set", "data", "--timeout-s", "1"]);
    assert!(said.out.contains("requests fail after 1 s"), "{}{}", said.out, said.err);
    state("failing");
    assert_eq!(guest.status_of(ioplane_testkit::driver::DiskOp::Read), 1, "VIRTIO_BLK_S_IOERR");
    let said = importer.cli(&["disk", "set", "data", "--timeout-s", "0"]);
    assert!(said.out.contains("requests wait"), "{}{}", said.out, said.err);
    state("reconnecting");
    guest.submit(1);
    exporter.start();
    guest.wait(1);
}

/// What a monitor does with a client.
type Behaviour = fn(UnixStream);

/// Requests wait meanwhile, it is said what is wrong, and the monitor is tried again.
#[test]
fn a_monitor_that_is_not_there_or_no_monitor_is_named_and_tried_again() {
    let (mut exporter, uri) = publisher("data");
    let importer = importer(&[("data", &uri)]);
    let qmp = importer.path("qmp");
    let mut guest = reader(&importer);
    exporter.kill9();
    guest.submit(2);
    let until_why = |words: &str| {
        importer.until(|| {
            let said = pause_of(&importer, "data");
            said["state"] == "cannot_pause" && said["why"].as_str().is_some_and(|why| why.contains(words))
        });
    };
    until_why("nobody listens there");
    assert!(importer.cli(&["disk", "show", "data"]).out.contains("could not be paused"));
    let hostile: [(&'static str, Behaviour); 3] = [
        ("it is no QMP monitor (it does not answer with JSON)", |mut stream| {
            let _ = stream.write_all(b"\x1b[2J no monitor\n");
        }),
        ("it is no QMP monitor (it sends a line of more than", |mut stream| {
            while stream.write_all(&[b'x'; 65536]).is_ok() {}
        }),
        ("it does not answer", |mut stream| {
            // Silent until the other end goes.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        }),
    ];
    for (words, behave) in hostile {
        let listener = UnixListener::bind(&qmp).unwrap();
        let served = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The test's own, to end this.
                if stream.peer_addr().is_ok_and(|peer| peer.as_pathname().is_some()) {
                    return;
                }
                behave(stream);
            }
        });
        until_why(words);
        end(&qmp, served);
    }
    let vm = RunState::serve(&qmp);
    until_pause(&importer, "data", "paused");
    exporter.start();
    guest.wait(2);
    importer.until(|| vm.is("running"));
    nothing_failed(&importer, "data");
}

/// Ends a listener, by a connection that has a name.
fn end(qmp: &Path, served: std::thread::JoinHandle<()>) {
    let name = qmp.with_extension("end");
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&name).unwrap()).unwrap();
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(qmp).unwrap()).unwrap();
    std::fs::remove_file(qmp).unwrap();
    std::fs::remove_file(&name).unwrap();
    served.join().unwrap();
}

/// A QEMU with a VM whose first sector reads itself for ever, and counts how often that went well (at 0x7e00) and did not (at 0x7e02).
struct Qemu {
    process: Child,
    qmp: PathBuf,
}

/// `again: mov ah, 42h; mov dl, 80h; mov si, packet; int 13h; jc bad; inc word [7e00h]; jmp again; bad: inc word [7e02h]; jmp again`
const SECTOR: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0xb4, 0x42, 0xb2, 0x80, 0xbe, 0x20, 0x7c, 0xcd, 0x13, 0x72, 0x06, 0xff, 0x06,
    0x00, 0x7e, 0xeb, 0xef, 0xff, 0x06, 0x02, 0x7e, 0xeb, 0xe9, 0, 0, 0, 0,
    0, // At 0x20: one sector, the first, to 0x8000.
    0x10, 0, 1, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

impl Qemu {
    /// Nothing if this host has no QEMU.
    fn start(importer: &TestDaemon) -> Option<Qemu> {
        let qmp = importer.path("qmp");
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            "tcg",
            "-m",
            "64",
            "-nodefaults",
            "-display",
            "none",
            "-numa",
            "node,memdev=m",
        ]);
        command.args(["-object", "memory-backend-memfd,id=m,size=64M,share=on"]);
        command.arg("-chardev").arg(format!("socket,id=c,path={}", importer.path("data.sock").display()));
        command.args(["-device", "vhost-user-blk-pci,chardev=c"]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", qmp.display()));
        let log = std::fs::File::create(importer.path("qemu.log")).unwrap();
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        match spawned {
            Ok(process) => Some(Qemu { process, qmp }),
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: a real QEMU was NOT tested: {error}");
                None
            }
        }
    }

    fn ask(&self, command: &str, arguments: &Value) -> Value {
        let end = Instant::now() + LIMIT;
        loop {
            let asked = Qmp::connect(&Endpoint::here(&self.qmp), PATIENCE)
                .and_then(|mut qmp| qmp.execute(command, arguments));
            match asked {
                Ok(answer) => return answer,
                Err(error) => assert!(Instant::now() < end, "{command}: {error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn status(&self) -> String {
        self.ask("query-status", &json!({}))["status"].as_str().unwrap().to_owned()
    }

    /// Reads that went well, and that did not.
    fn counts(&self) -> (u64, u64) {
        let said = self.ask("human-monitor-command", &json!({ "command-line": "xp /2hx 0x7e00" }));
        let words = said.as_str().unwrap().split_whitespace().skip(1);
        let mut words = words.map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap());
        (words.next().unwrap(), words.next().unwrap())
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_real_qemu_is_paused_and_goes_on_and_its_guest_sees_no_error() {
    let (mut exporter, uri) = publisher("data");
    let mut sector = SECTOR.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    let image = std::fs::File::options().write(true).open(exporter.path("data.img")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &sector, 0).unwrap();
    let importer = importer(&[("data", &uri)]);
    let Some(qemu) = Qemu::start(&importer) else { return };
    let reads = || importer.disk("data")["totals"]["requests"].as_u64().unwrap();
    importer.until(|| reads() > 100);
    for _ in 0..2 {
        exporter.kill9();
        let said = until_pause(&importer, "data", "paused");
        assert_eq!(qemu.status(), "paused", "{said}");
        importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "reconnecting");
        assert_eq!(importer.disk("data")["backing"]["remote"]["claim"], "held", "nobody else may have it");
        let before = reads();
        exporter.start();
        until_pause(&importer, "data", "armed");
        assert_eq!(qemu.status(), "running");
        importer.until(|| reads() > before + 100);
    }
    assert_eq!(qemu.counts().1, 0, "reads that failed");
    nothing_failed(&importer, "data");
    // A person decides otherwise.
    exporter.kill9();
    until_pause(&importer, "data", "paused");
    qemu.ask("cont", &json!({}));
    until_pause(&importer, "data", "left_alone");
    assert_eq!(qemu.status(), "running");
    exporter.start();
    until_pause(&importer, "data", "armed");
    assert_eq!(qemu.counts().1, 0, "reads that failed");
}
