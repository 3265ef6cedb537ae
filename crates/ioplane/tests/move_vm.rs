//! `ioplane move vm`, with a QEMU that this test plays: its monitor, and the front ends of both hosts.

mod daemon;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use daemon::identities::{self, done, identity, member};
use daemon::load::{exporter, free_port};
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const CONFIG: &str = "[daemon]\nclaim_wait_s = 600\n[[core]]\nspin_us = 200\n";

/// A VM with one disk, which a front end drives here and there.
struct Vm {
    memory: GuestMemory,
    disk: Disk,
    here: FrontEnd,
    there: Option<FrontEnd>,
}

impl Vm {
    fn start(host: &TestDaemon) -> Vm {
        let mut memory = GuestMemory::new(MIB).unwrap();
        let plan = DiskPlan::new(8, 4096, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(Wants::default().features), plan).unwrap();
        let mut here = Vm::connect(&memory, host);
        here.start(0, &memory, disk.place(), 0).unwrap();
        let mut vm = Vm { memory, disk, here, there: None };
        vm.write();
        vm
    }

    fn connect(memory: &GuestMemory, host: &TestDaemon) -> FrontEnd {
        let mut front = FrontEnd::connect(&host.path("data.sock"), Wants::default()).unwrap();
        front.track_inflight(1, 64).unwrap();
        front.share(memory).unwrap();
        front
    }

    /// A QEMU that waits there.
    fn is_expected(&mut self, host: &TestDaemon) {
        self.there = Some(Vm::connect(&self.memory, host));
    }

    fn write(&mut self) {
        self.disk.submit(DiskOp::Write, 0, 4096).unwrap();
        self.here.kick(0);
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.disk.reap().unwrap() {
                assert!(done.ok(), "status {}", done.status);
                return;
            }
            assert!(Instant::now() < end, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The guest stops here, and goes on there.
    fn migrate(&mut self) {
        let base = self.here.stop(0).unwrap();
        if let Some(mut there) = self.there.take() {
            there.start(0, &self.memory, self.disk.place(), base).unwrap();
            self.here = there;
        }
    }
}

/// What the monitor says of the VM and of its migration, and what it was asked.
struct Monitor {
    name: String,
    state: &'static str,
    blocked: Option<&'static str>,
    /// What becomes of a migration: each look at it takes the next of these, and the last one stays.
    course: Vec<&'static str>,
    /// The course of one that is cancelled.
    cancelled: bool,
    asked: Vec<String>,
}

struct Qemu {
    vm: Arc<Mutex<Vm>>,
    monitor: Arc<Mutex<Monitor>>,
    path: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Qemu {
    fn new(vm: Vm, name: &str) -> Qemu {
        let folder = tempfile::tempdir().unwrap();
        let mut qemu = Qemu::at(folder.path().join("qmp"), vm, name);
        qemu._folder = Some(folder);
        qemu
    }

    /// One whose monitor is at this path.
    fn at(path: PathBuf, vm: Vm, name: &str) -> Qemu {
        let monitor = Monitor {
            name: name.to_owned(),
            state: "running",
            blocked: None,
            course: vec!["setup", "active", "device", "completed"],
            cancelled: false,
            asked: Vec::new(),
        };
        let (vm, monitor) = (Arc::new(Mutex::new(vm)), Arc::new(Mutex::new(monitor)));
        let (of_vm, of_monitor) = (vm.clone(), monitor.clone());
        daemon::qmp::serve(&path, move |command, arguments| {
            answer(command, arguments, &of_vm, &mut of_monitor.lock().unwrap())
        });
        Qemu { vm, monitor, path, _folder: None }
    }

    fn change(&self, change: impl FnOnce(&mut Monitor)) {
        let mut monitor = self.monitor.lock().unwrap();
        monitor.asked.clear();
        change(&mut monitor);
    }

    fn asked(&self, command: &str) -> bool {
        self.monitor.lock().unwrap().asked.iter().any(|asked| asked == command)
    }
}

fn answer(command: &str, arguments: &Value, vm: &Mutex<Vm>, monitor: &mut Monitor) -> Value {
    monitor.asked.push(command.to_owned());
    match command {
        "query-name" => json!({ "name": monitor.name }),
        "query-status" => json!({ "status": monitor.state, "running": monitor.state == "running" }),
        "migrate" => {
            assert_eq!(*arguments, json!({ "uri": "tcp:host-c:4444" }));
            json!({})
        }
        "migrate_cancel" => {
            monitor.cancelled = true;
            json!({})
        }
        "query-migrate" if !monitor.asked.iter().any(|asked| asked == "migrate") => match monitor.blocked {
            Some(why) => json!({ "blocked-reasons": [why] }),
            None => json!({}),
        },
        "query-migrate" => migration(monitor, vm),
        _ => json!({}),
    }
}

fn migration(monitor: &mut Monitor, vm: &Mutex<Vm>) -> Value {
    if monitor.cancelled {
        return json!({ "status": "cancelled" });
    }
    let status = match monitor.course.len() {
        1 => monitor.course[0],
        _ => monitor.course.remove(0),
    };
    if status == "completed" {
        vm.lock().unwrap().migrate();
    }
    let ram = json!({ "total": 100 * MIB, "remaining": 40 * MIB, "transferred": 60 * MIB });
    json!({ "status": status, "ram": ram, "total-time": 1234, "downtime": 17, "error-desc": "the other end\u{1b}[2J is gone" })
}

fn remote(host: &TestDaemon) -> Value {
    host.disk("data")["backing"]["remote"].clone()
}

/// An exporter, and two hosts that have its export as a disk.
fn hosts() -> [TestDaemon; 3] {
    let port = free_port();
    let mut exporter = exporter("data", port, 4 * MIB);
    exporter.start();
    let importer = || {
        let mut importer = TestDaemon::new_beside_the_build(CONFIG);
        importer.start();
        let uri = format!("nbd://127.0.0.1:{port}/data");
        let said = importer.cli(&["disk", "add", "data", "--remote", &uri]);
        assert_eq!(said.code, 0, "{}", said.err);
        importer
    };
    let (here, there) = (importer(), importer());
    [exporter, here, there]
}

/// What this program is called among VMs.
fn name_of_vm(host: &TestDaemon) -> String {
    host.disk("data")["vm"]["name"].as_str().unwrap().to_owned()
}

#[test]
fn a_vm_moves_with_its_disk() {
    let [_exporter, here, there] = hosts();
    let mut vm = Vm::start(&here);
    vm.is_expected(&there);
    let name = name_of_vm(&here);
    let qemu = Qemu::new(vm, &name);
    let qmp = qemu.path.display().to_string();
    let control = there.path("control.sock").display().to_string();
    let said = here.cli(&[
        "move",
        "vm",
        &name,
        "--qmp",
        &qmp,
        "--to",
        "tcp:host-c:4444",
        "--there",
        &control,
        "--json",
    ]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let expected = json!({
        "vm": name, "to": "tcp:host-c:4444", "disks": ["data"], "functions": [], "total_ms": 1234, "downtime_ms": 17, "bytes": 60 * MIB
    });
    assert_eq!(report, expected);
    assert_eq!(remote(&here)["claim"], "free");
    until_held(&there);
    qemu.vm.lock().unwrap().write();
}

/// The path of the monitor of a test that runs in a process of its own, whose command line names it as a QEMU's does.
const PLAYED: &str = "IOPLANE_TEST_PLAYED_MONITOR";

/// As it is typed where hosts have QEMUs: a name, and where to.
#[test]
fn a_vm_moves_by_its_name_and_that_of_the_other_host() {
    let Some(path) = std::env::var_os(PLAYED) else {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let this = "a_vm_moves_by_its_name_and_that_of_the_other_host";
        let monitor = format!("unix:{},server=on,wait=off", path.display());
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this, "--nocapture", "--", "-name", "web", "-qmp", &monitor])
            .env(PLAYED, &path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let ran = said.contains("1 passed");
        assert!(output.status.success() && ran, "{said}{}", String::from_utf8_lossy(&output.stderr));
        return;
    };
    let [_exporter, here, there] = hosts();
    let mut vm = Vm::start(&here);
    vm.is_expected(&there);
    assert_eq!(name_of_vm(&here), "web");
    let qemu = Qemu::at(path.into(), vm, "web");
    let said = here.cli(&["move", "vm", "web", "--to", "host-c"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("web is at tcp:host-c:4444"), "{}", said.out);
    assert_eq!(remote(&here)["claim"], "free");
    until_held(&there);
    qemu.vm.lock().unwrap().write();
}

#[test]
fn the_monitor_is_that_of_the_disk_where_the_disk_names_it() {
    let [_exporter, here, there] = hosts();
    let mut vm = Vm::start(&here);
    vm.is_expected(&there);
    let name = name_of_vm(&here);
    let qemu = Qemu::new(vm, &name);
    let args = ["move", "vm", &name, "--to", "host-c"];
    let said = here.refused(&args);
    assert!(said.contains("is not known") && said.contains("--qmp SOCKET"), "{said}");
    let qmp = qemu.path.display().to_string();
    assert_eq!(here.cli(&["disk", "set", "data", "--qmp", &qmp]).code, 0);
    assert_eq!(remote(&here)["qmp"], qmp.as_str());
    // The monitor was named earlier for the disk: it has to say itself that it is this VM's.
    for other in ["mail", ""] {
        qemu.change(|monitor| monitor.name = other.into());
        let said = here.refused(&args);
        assert!(!qemu.asked("migrate") && said.contains("is that of VM"), "{said}");
    }
    qemu.change(|monitor| monitor.name = name.clone());
    let said = here.cli(&args);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    until_held(&there);
    qemu.vm.lock().unwrap().write();
}

#[test]
fn a_move_that_fails_or_is_cancelled_leaves_the_vm_where_it_was() {
    let [_exporter, here, _there] = hosts();
    let vm = Vm::start(&here);
    let name = name_of_vm(&here);
    let qemu = Qemu::new(vm, &name);
    let qmp = qemu.path.display().to_string();
    let args = ["move", "vm", &name, "--qmp", &qmp, "--to", "tcp:host-c:4444"];
    qemu.change(|monitor| monitor.course = vec!["active", "failed"]);
    let said = here.refused(&args);
    assert!(said.contains("did not move: the other end?[2J is gone"), "{said}");
    assert!(said.contains("it runs here as before"), "{said}");
    qemu.change(|monitor| (monitor.course, monitor.state) = (vec!["failed"], "paused"));
    assert!(here.refused(&args).contains("it is here, and does not run"));
    // Ctrl-C while memory is copied.
    qemu.change(|monitor| (monitor.course, monitor.state) = (vec!["active"], "running"));
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ioplane"))
        .arg("--socket")
        .arg(here.path("control.sock"))
        .args(args)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    here.until(|| qemu.asked("migrate"));
    here.signal_to(child.id().into(), "INT");
    let mut err = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut err).unwrap();
    assert!(!child.wait().unwrap().success());
    assert!(
        qemu.asked("migrate_cancel") && err.contains("was cancelled") && err.contains("runs here"),
        "{err}"
    );
    qemu.vm.lock().unwrap().write();
    assert_eq!(remote(&here)["claim"], "held");
}

#[test]
fn what_cannot_go_along_is_found_before_anything_stops() {
    let [exporter, here, there] = hosts();
    let vm = Vm::start(&here);
    let name = name_of_vm(&here);
    let qemu = Qemu::new(vm, &name);
    let qmp = qemu.path.display().to_string();
    let control = there.path("control.sock").display().to_string();
    let plain = ["move", "vm", &name, "--qmp", &qmp, "--to", "tcp:host-c:4444"];
    let compared = [&plain[..], &["--there", &control]].concat();
    let refused = |args: &[&str], words: &str| {
        let said = here.refused(args);
        assert!(said.contains(words), "{said}");
        assert!(!qemu.asked("migrate"), "{said}");
    };
    let mut other = plain;
    other[2] = "nobody";
    refused(&other, "no VM nobody uses");
    let mut other = plain;
    other[6] = "exec:rm";
    let said = here.cli(&other);
    assert!(said.code == 2 && said.err.contains("tcp:HOST:PORT"), "{}", said.err);
    // The monitor is another VM's, the VM is not there any more, or has something that cannot migrate.
    qemu.change(|monitor| monitor.name = "mail".into());
    refused(&plain, "is that of VM mail");
    qemu.change(|monitor| (monitor.name, monitor.state) = (name.clone(), "postmigrate"));
    refused(&plain, "is postmigrate");
    qemu.change(|monitor| (monitor.state, monitor.blocked) = ("running", Some("VFIO device")));
    refused(&plain, "cannot migrate: VFIO device");
    qemu.change(|monitor| monitor.blocked = None);
    // The other host has no QEMU for it, another disk of that name, or none.
    refused(&compared, "no QEMU of the other host uses disk data yet");
    assert_eq!(there.cli(&["disk", "remove", "data"]).code, 0);
    refused(&compared, "the other host has no disk data");
    assert_eq!(there.cli(&["disk", "add", "data", "--memory", "4M"]).code, 0);
    refused(&compared, "disk data of the other host is another one");
    // The network has failed.
    exporter.signal("STOP");
    let mut front = {
        let mut vm = qemu.vm.lock().unwrap();
        vm.disk.submit(DiskOp::Write, 8, 4096).unwrap();
        vm.here.kick(0);
        vm
    };
    here.until(|| remote(&here)["state"] == "reconnecting");
    refused(&plain, "the server of disk data is not reachable, requests wait");
    exporter.signal("CONT");
    here.until(|| remote(&here)["state"] == "connected");
    here.until(|| front.disk.reap().unwrap().is_some());
    drop(front);
    // A disk that is only here.
    let local = TestDaemon::open("[[core]]\n");
    let image = local.image("local.img", 4 * MIB).display().to_string();
    assert_eq!(local.cli(&["disk", "add", "data", "--path", &image]).code, 0);
    let _vm = Vm::start(&local);
    let said = local.refused(&plain);
    assert!(said.contains("is an image of this host") && said.contains("ioplane swap data --to"), "{said}");
}

/// What `move prepare` says of each device: kind, name, whether it was added.
fn prepared(here: &TestDaemon, vm: &str, there: &TestDaemon) -> Vec<(String, String, bool)> {
    let control = there.path("control.sock").display().to_string();
    let said = here.json(&["move", "prepare", vm, "--there", &control]);
    let device = |device: &Value| {
        let word = |field: &str| device[field].as_str().unwrap().to_owned();
        (word("kind"), word("name"), device["added"].as_bool().unwrap())
    };
    said["devices"].as_array().unwrap().iter().map(device).collect()
}

#[test]
fn what_a_vm_uses_is_made_on_the_other_host() {
    let [_exporter, here, there] = hosts();
    let uri = remote(&here)["uri"].as_str().unwrap().to_owned();
    assert_eq!(here.cli(&["disk", "replace", "data", "--remote", &uri, "--retain", "4M"]).code, 0);
    assert_eq!(remote(&here)["retain"], 4 * MIB);
    assert_eq!(here.cli(&["disk", "set", "data", "--iops-limit", "5000", "--timeout-s", "7"]).code, 0);
    assert_eq!(there.cli(&["disk", "remove", "data"]).code, 0);
    assert_eq!(here.cli(&["switch", "add", "lan"]).code, 0);
    let nic = ["nic", "add", "eth", "--switch", "lan", "--vlan", "7", "--pairs", "2"];
    assert_eq!(here.cli(&nic).code, 0);
    let mut vm = Vm::start(&here);
    let _nic = FrontEnd::connect(&here.path("eth.sock"), Wants::default()).unwrap();
    here.until(|| here.json(&["nic", "list"])[0]["connected"] == true);
    let name = name_of_vm(&here);
    let control = there.path("control.sock").display().to_string();

    let said = here.refused(&["move", "prepare", &name, "--there", &control]);
    assert!(said.contains("no switch lan"), "{said}");
    assert_eq!(there.json(&["disk", "list"]), json!([]), "nothing is made before all was looked at");
    assert_eq!(there.cli(&["switch", "add", "lan"]).code, 0);

    let device = |kind: &str, name: &str, added| (kind.to_owned(), name.to_owned(), added);
    assert_eq!(prepared(&here, &name, &there), [device("nic", "eth", true), device("disk", "data", true)]);
    let of = |host: &TestDaemon| {
        let disk = host.disk("data");
        let remote = &disk["backing"]["remote"];
        let words = ["uri", "timeout_s", "on_timeout", "retain"].map(|field| remote[field].clone());
        (["size", "serial", "queue_size", "iops_limit", "read_only"].map(|field| disk[field].clone()), words)
    };
    assert_eq!(of(&there), of(&here));
    let of = |host: &TestDaemon| {
        let nic = &host.json(&["nic", "list"])[0];
        ["mac", "vlan", "pairs", "queue_size", "mtu", "isolated"].map(|field| nic[field].clone())
    };
    assert_eq!(of(&there), of(&here));
    // What is there is left as it is, and a QEMU finds it.
    assert_eq!(prepared(&here, &name, &there), [device("nic", "eth", false), device("disk", "data", false)]);
    vm.is_expected(&there);
    vm.migrate();
    vm.write();
    until_held(&there);
}

fn until_held(host: &TestDaemon) {
    host.until(|| remote(host)["claim"] == "held");
}

#[test]
fn a_disk_of_this_host_that_is_published_is_made_by_the_address_of_its_export() {
    let here = TestDaemon::open(CONFIG);
    let there = TestDaemon::open(CONFIG);
    let image = here.image("local.img", 4 * MIB).display().to_string();
    assert_eq!(here.cli(&["disk", "add", "data", "--path", &image]).code, 0);
    let mut vm = Vm::start(&here);
    let name = name_of_vm(&here);
    let control = there.path("control.sock").display().to_string();
    let prepare = ["move", "prepare", &name, "--there", &control];
    let said = here.refused(&prepare);
    assert!(said.contains("is an image of this host"), "{said}");

    let listen = format!("0.0.0.0:{}", free_port());
    let said = here.cli(&["publish", "disk", "web-data", "--disk", "data", "--listen", &listen, "--plain"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let said = here.refused(&prepare);
    assert!(said.contains("listens at all addresses") && said.contains("--via"), "{said}");
    // A machine that is not there, and one that is.
    let said = here.refused(&[&prepare[..], &["--via", "ioplane.invalid"]].concat());
    assert!(said.contains("ioplane.invalid"), "{said}");
    assert_eq!(there.json(&["disk", "list"]), json!([]));
    let said = here.cli(&[&prepare[..], &["--via", "127.0.0.1"]].concat());
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(remote(&there)["uri"], format!("nbd://127.0.0.1:{}/web-data", &listen[8..]));
    vm.is_expected(&there);
    vm.migrate();
    vm.write();
    until_held(&there);
}

/// A host with an image as the disk of a VM, and another host.
fn with_an_image(here: TestDaemon, there: TestDaemon) -> (TestDaemon, TestDaemon, Vm, String) {
    let image = here.image("local.img", 4 * MIB).display().to_string();
    assert_eq!(here.cli(&["disk", "add", "data", "--path", &image]).code, 0);
    let vm = Vm::start(&here);
    let name = name_of_vm(&here);
    (here, there, vm, name)
}

#[test]
fn a_disk_of_this_host_is_published_when_its_vm_is_going_to_move() {
    let (here, there, mut vm, name) = with_an_image(TestDaemon::open(CONFIG), TestDaemon::open(CONFIG));
    let control = there.path("control.sock").display().to_string();
    let listen = format!("0.0.0.0:{}", free_port());
    let prepare = ["move", "prepare", &name, "--there", &control];
    let nothing_is_done = |more: &[&str], words: &str| {
        let said = here.refused(&[&prepare[..], more].concat());
        assert!(said.contains(words), "{said}");
        assert_eq!(here.json(&["publish", "list"]), json!([]));
        assert_eq!(there.json(&["disk", "list"]), json!([]));
        assert_eq!(here.disk("data")["backing"]["kind"], "file");
    };
    nothing_is_done(&[], "move prepare --publish");
    let publish = format!("--publish={listen}");
    nothing_is_done(&[&publish, "--plain"], "--via HOST");
    nothing_is_done(&["--publish"], "name in its certificate");
    nothing_is_done(&[&publish, "--via", "127.0.0.1"], "name in its certificate");
    nothing_is_done(&[&publish, "--via", "localhost"], "needs an identity");
    // One that cannot go along keeps the others from being published.
    assert_eq!(here.cli(&["disk", "add", "memory", "--memory", "1M"]).code, 0);
    let front = FrontEnd::connect(&here.path("memory.sock"), Wants::default()).unwrap();
    here.until(|| here.disk("memory")["connected"] == true);
    let plain = [&publish, "--plain", "--via", "127.0.0.1"];
    nothing_is_done(&plain, "disk memory is memory of this host's daemon");
    drop(front);
    here.until(|| here.disk("memory")["connected"] == false);

    let plain = [&prepare[..], &plain].concat();
    let export = format!("{name}-data");
    let device = |added: bool, export: Value| json!([{ "kind": "disk", "name": "data", "added": added, "export": export }]);
    assert_eq!(here.json(&plain)["devices"], device(true, export.as_str().into()));
    let uri = |host: &TestDaemon| remote(host)["uri"].as_str().unwrap().to_owned();
    assert!(uri(&here).starts_with(&format!("nbd+unix:///{export}?")), "{}", uri(&here));
    assert_eq!(uri(&there), format!("nbd://127.0.0.1:{}/{export}", &listen[8..]));
    // The VM goes on here by its export, which is its own until it moves, and nothing is left to be done.
    assert_eq!(remote(&here)["claim"], "held");
    vm.write();
    assert_eq!(here.json(&plain)["devices"], device(false, Value::Null));
    vm.is_expected(&there);
    vm.migrate();
    vm.write();
    until_held(&there);
}

#[test]
fn and_with_tls_for_the_hosts_that_are_named() {
    let mut here = TestDaemon::new_beside_the_build("");
    done(identity(&here, &["create", "localhost"]));
    here.configure(&identities::config(&here, ""));
    here.start();
    let there = member(&here, "host-c");
    let (here, there, mut vm, name) = with_an_image(here, there);
    let control = there.path("control.sock").display().to_string();
    let listen = format!("127.0.0.1:{}", free_port());
    let publish = format!("--publish={listen}");
    let prepare = ["move", "prepare", &publish, &name, "--there", &control, "--via", "localhost"];
    done(here.cli(&[&prepare[..], &["--allow", "host-c"]].concat()));
    let export = &here.json(&["publish", "list"])[0];
    assert_eq!((&export["tls"], &export["allow"]), (&true.into(), &"host-c".into()));
    assert_eq!(remote(&there)["uri"], format!("nbds://{listen}/{name}-data?tls-hostname=localhost"));
    vm.is_expected(&there);
    vm.migrate();
    vm.write();
    until_held(&there);
}

#[test]
fn another_disk_of_that_name_is_no_preparation() {
    let [_exporter, here, there] = hosts();
    let _vm = Vm::start(&here);
    let name = name_of_vm(&here);
    let control = there.path("control.sock").display().to_string();
    assert_eq!(there.cli(&["disk", "remove", "data"]).code, 0);
    assert_eq!(there.cli(&["disk", "add", "data", "--memory", "4M"]).code, 0);
    let said = here.refused(&["move", "prepare", &name, "--there", &control]);
    assert!(said.contains("disk data of the other host is another one"), "{said}");
}
