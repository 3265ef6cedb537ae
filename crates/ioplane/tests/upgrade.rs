//! Everything goes to another process while front ends are connected and busy: none sees a disconnect, each request is answered
//! once, every read finds the last write. If the other process will not have it, or dies, everything is as before.
//!
//! The load's front end does not reconnect: a closed socket ends the test.

mod daemon;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use daemon::{Said, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::slow::SlowDisk;
use serde_json::Value;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
const BINARY: &str = env!("CARGO_BIN_EXE_ioplane");

/// A daemon that changes its process, and its loads.
struct Stage {
    daemon: TestDaemon,
    loads: Vec<(String, CrashLoad)>,
    /// The uplink's device.
    tap: Option<String>,
}

impl Stage {
    /// A disk on a file and one in memory, each with a load; a switch with a NIC, and with an uplink where that may be.
    fn new() -> Stage {
        let may = rustix::process::geteuid().is_root() && Path::new("/dev/net/tun").exists();
        let tap = may.then(|| {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            format!("u{}n{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
        });
        let uplink = tap.as_ref().map_or(String::new(), |tap| format!("uplink = \"{tap}\"\n"));
        if !may {
            let why = "SKIPPED: an uplink that is handed over or comes back was NOT tested: it takes root and /dev/net/tun";
            let _ = writeln!(std::io::stderr(), "{why}");
        }
        let config = format!(
            "[[switch]]\nname = \"lan\"\n{uplink}[[nic]]\nname = \"web\"\nswitch = \"lan\"\n\
             [[core]]\nspin_us = 200\n[[disk]]\nname = \"file\"\npath = \"disk.img\"\nqueues = {QUEUES}\n\
             [[disk]]\nname = \"memory\"\nmemory = {}\nqueues = {QUEUES}\n",
            CrashLoad::image_bytes(QUEUES)
        );
        let mut daemon = TestDaemon::new_beside_the_build(&config);
        daemon.image("disk.img", CrashLoad::image_bytes(QUEUES));
        daemon.start();
        let mut stage = Stage { daemon, loads: Vec::new(), tap };
        for (seed, name) in (1..).zip(["file", "memory"]) {
            stage.load(name, seed);
        }
        stage
    }

    fn load(&mut self, disk: &str, seed: u64) {
        let mut load = CrashLoad::new(QUEUES, DEPTH, seed).unwrap();
        load.attach(&self.daemon.path(&format!("{disk}.sock"))).unwrap();
        self.loads.push((disk.to_owned(), load));
        self.run(Duration::from_millis(50));
    }

    fn step(&mut self) {
        for (name, load) in &mut self.loads {
            load.step().unwrap_or_else(|why| panic!("{name}: {why}\n{}", self.daemon.log()));
        }
    }

    /// Loads go on for that long.
    fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.step();
        }
    }

    /// A command, while the loads go on.
    fn during(&mut self, args: &[&str]) -> Said {
        let command = self.daemon.later(args);
        let task: JoinHandle<Said> = std::thread::spawn(command);
        while !task.is_finished() {
            self.step();
        }
        task.join().unwrap()
    }

    fn upgrade(&mut self, args: &[&str]) -> Value {
        let said = self.during(&[&["upgrade", "--json"], args].concat());
        assert_eq!(said.code, 0, "{}\n{}", said.err, self.daemon.log());
        serde_json::from_str(&said.out).unwrap()
    }

    /// An upgrade that must not be; says why. Everything is as it was.
    fn refused(&mut self, args: &[&str]) -> String {
        let before = self.pid();
        let said = self.during(&[&["upgrade"], args].concat());
        assert_eq!(said.code, 1, "{}{}", said.out, said.err);
        self.run(Duration::from_millis(50));
        assert_eq!(self.pid(), before, "another process answers");
        self.expect_unbroken();
        said.err
    }

    fn pid(&self) -> u64 {
        self.daemon.json(&["status"])["pid"].as_u64().unwrap()
    }

    /// No front end has noticed anything.
    fn expect_unbroken(&mut self) {
        for (name, load) in &self.loads {
            assert!(load.connected(), "{name}: disconnected\n{}", self.daemon.log());
            let disk = self.daemon.disk(name);
            assert_eq!((&disk["connected"], &disk["connections"]), (&true.into(), &1.into()), "{disk}");
            assert_eq!(disk["front_end_faults"], serde_json::json!({}), "{disk}");
        }
        let lan = self.daemon.json(&["switch", "show", "lan"]);
        assert_eq!(lan["error"], Value::Null, "{lan}");
        assert_eq!(
            lan["uplink"].is_null(),
            lan["uplink_core"].is_null(),
            "its uplink runs, if it has one: {lan}"
        );
    }

    /// The whole content is what was written.
    fn settle(&mut self) {
        for (name, load) in &mut self.loads {
            load.settle().unwrap_or_else(|why| panic!("{name}: {why}\n{}", self.daemon.log()));
        }
    }

    fn script(&self, name: &str, text: &str) -> String {
        let path = self.daemon.path(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path.display().to_string()
    }
}

impl Drop for Stage {
    /// The successor is not our child.
    fn drop(&mut self) {
        self.daemon.kill_whoever_answers();
        // What a daemon makes for a switch stays as long as the switch is to have it.
        if let Some(tap) = &self.tap {
            let _ = std::process::Command::new("ip").args(["link", "delete", tap]).status();
        }
    }
}

fn gone(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

fn descriptors(pid: u64) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut all: Vec<_> = folder.flatten().filter_map(|file| std::fs::read_link(file.path()).ok()).collect();
    all.sort();
    all
}

#[test]
fn five_upgrades_under_load_and_no_front_end_can_tell() {
    let mut stage = Stage::new();
    let state = std::fs::read_to_string(stage.daemon.path("state.json")).unwrap();
    let mut open = usize::MAX;
    for round in 0..5 {
        let before = stage.pid();
        let report = stage.upgrade(&["--binary", BINARY]);
        let after = stage.pid();
        assert_eq!((report["from_pid"].as_u64(), report["pid"].as_u64()), (Some(before), Some(after)));
        assert_eq!(stage.daemon.json(&["status"])["upgrade"], report, "the new one knows the same");
        stage.daemon.until(|| gone(before));
        let pauses: Vec<_> =
            report["devices"].as_array().unwrap().iter().map(|d| d["pause_us"].as_u64()).collect();
        println!("round {round}: paused {pauses:?} us");
        assert_eq!(pauses.len(), 3, "two disks and a NIC");
        assert!(pauses.iter().all(|pause| pause.is_some_and(|us| us < 2_000_000)), "{pauses:?}");
        stage.run(Duration::from_millis(100));
        stage.expect_unbroken();
        // Whoever has just asked may still be on the line; what leaks stays.
        stage.daemon.until(|| descriptors(after).len() <= open);
        if round > 0 {
            open = open.min(descriptors(after).len());
        }
    }
    assert_eq!(std::fs::read_to_string(stage.daemon.path("state.json")).unwrap(), state, "written to");
    // What can be changed can be changed still, and the counts go on.
    let answered: u64 = stage.loads.iter().map(|(_, load)| load.answered).sum();
    let counted: u64 = ["file", "memory"]
        .map(|name| stage.daemon.disk(name)["totals"]["requests"].as_u64().unwrap())
        .iter()
        .sum();
    assert!(counted >= answered, "{counted} counted of {answered}");
    stage.settle();
    stage.daemon.json(&["disk", "add", "more", "--memory", "1M"]);
    stage.daemon.json(&["disk", "resize", "memory", "8M"]);
    stage.daemon.json(&["disk", "remove", "more"]);
    stage.daemon.json(&["reload"]);
    // And it ends as a daemon ends.
    let last = stage.pid();
    stage.loads.clear();
    stage.daemon.signal_to(last, "TERM");
    stage.daemon.until(|| gone(last));
    assert!(!stage.daemon.path("file.sock").exists() && !stage.daemon.path("control.sock").exists());
}

/// One from before `-v` and `-q` hears of the log by the environment.
#[test]
fn a_successor_is_told_what_every_version_knows() {
    let daemon = TestDaemon::new("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let daemon = daemon.start_by(&["sh", "-c", "exec \"$0\" -v --json \"$@\""]);
    let old = daemon.path("old");
    std::fs::write(&old, "#!/bin/sh\necho \"old: $IOPLANE_LOG: $*\" >&2\n").unwrap();
    std::fs::set_permissions(&old, PermissionsExt::from_mode(0o755)).unwrap();
    daemon.refused(&["upgrade", "--binary", &old.display().to_string()]);
    let (config, socket) = (daemon.path("ioplane.toml"), daemon.path("control.sock"));
    let told = format!("serve --config {} --socket {} --inherit", config.display(), socket.display());
    let line = format!("old: info,ioplane=debug: {told}\n");
    assert!(daemon.log().contains(&line), "{}", daemon.log());
}

#[test]
fn a_binary_that_will_not_have_it_changes_nothing() {
    let mut stage = Stage::new();
    let wrong =
        stage.script("wrong", "#!/bin/sh\nprintf 'ioplane>\\002\\0\\0\\0\\011\\0\\0\\0' >&0\nsleep 60\n");
    let stranger =
        stage.script("stranger", "#!/bin/sh\necho 'usage: something else entirely' >&0\nsleep 60\n");
    let hangs = stage.script("hangs", "#!/bin/sh\nsleep 60\n");
    for (binary, args, why) in [
        ("/bin/false", &[][..], "it ended before it answered (exit status: 1)"),
        (&hangs, &["--deadline", "1s"][..], "it did not answer within 1s"),
        (&wrong, &[][..], "it hands over in formats 2 to 9, and this one in format 1"),
        (&stranger, &[][..], "it is no ioplane that can take over"),
        ("/nowhere/ioplane", &[][..], "cannot be started"),
    ] {
        let refused = stage.refused(&[&["--binary", binary], args].concat());
        assert!(refused.contains(why) && refused.contains("hint:"), "{binary}: {refused}");
    }
    // The new one reads the configuration first: what cannot be read is no reason to let guests wait.
    let config = std::fs::read_to_string(stage.daemon.path("ioplane.toml")).unwrap();
    stage.daemon.configure(&format!("{config}quques = 7\n"));
    let refused = stage.refused(&["--binary", BINARY]);
    assert!(refused.contains("ioplane.toml:") && refused.contains("quques"), "{refused}");
    stage.daemon.configure(&format!("[daemon]\nrun_dir = \"/tmp\"\n{config}"));
    let refused = stage.refused(&["--binary", BINARY]);
    assert!(refused.contains("run_dir in [daemon] is another now"), "{refused}");
    stage.daemon.configure(&config);
    stage.upgrade(&["--binary", BINARY]);
    stage.expect_unbroken();
    stage.settle();
}

#[cfg(feature = "kill-points")]
#[test]
fn a_successor_that_is_killed_before_it_has_said_mine_changes_nothing() {
    let mut stage = Stage::new();
    for point in ["greeted", "ready", "prepared", "device", "loaded", "committed"] {
        std::fs::write(stage.daemon.path("kill"), point).unwrap();
        let refused = stage.refused(&["--binary", BINARY]);
        assert!(refused.contains("signal: 9"), "{point}: {refused}");
    }
    std::fs::remove_file(stage.daemon.path("kill")).unwrap();
    stage.upgrade(&["--binary", BINARY]);
    stage.expect_unbroken();
    stage.settle();
}

/// Whoever dies after that word has died with everything: the old one must not touch it again, and ends. And the old one may
/// die at any moment, which leaves a successor that has nothing, or everything. What a service manager starts then finds the
/// disk, the journal and the front ends as after any crash.
#[cfg(feature = "kill-points")]
#[test]
fn a_death_that_leaves_nobody_is_a_crash_like_any_other() {
    let mut stage = Stage::new();
    let points = ["greeted", "ready", "prepared", "device", "loaded", "committed", "mine"];
    let deaths = points.map(|point| format!("predecessor {point}")).into_iter().chain(["mine".to_owned()]);
    let deaths: Vec<String> = deaths.collect();
    // A disk in memory dies with its daemon.
    stage.loads.retain(|(name, _)| name == "file");
    for death in &deaths {
        let before = stage.pid();
        std::fs::write(stage.daemon.path("kill"), death).unwrap();
        let said = stage.during(&["upgrade", "--binary", BINARY]);
        std::fs::remove_file(stage.daemon.path("kill")).unwrap();
        stage.daemon.until(|| gone(before));
        // A successor that has everything serves on, without a word to anybody; any other ends by itself.
        let serves = death == "predecessor mine";
        if serves {
            stage.run(Duration::from_millis(100));
            stage.daemon.until(|| stage.daemon.cli(&["status"]).code == 0);
            assert!(stage.loads[0].1.connected(), "{death}: disconnected\n{}", stage.daemon.log());
            let after = stage.pid();
            assert_ne!(after, before, "{death}");
            stage.settle();
            // It dies, too, for the next one.
            stage.daemon.signal_to(after, "KILL");
            stage.daemon.until(|| gone(after));
        } else {
            assert!(said.code != 0, "{death}: {}", said.out);
            stage.daemon.until(|| stage.daemon.daemons().into_iter().all(|pid| gone(pid.into())));
        }
        // Its first thread is gone before its last one, which keeps the doors open until then.
        let control = stage.daemon.path("control.sock");
        stage.daemon.until(|| std::os::unix::net::UnixStream::connect(&control).is_err());
        stage.daemon.start();
        let socket = stage.daemon.path("file.sock");
        stage.daemon.until(|| stage.daemon.disk("file")["state"] == "served");
        let (_, load) = &mut stage.loads[0];
        load.attach(&socket).unwrap_or_else(|why| panic!("{death}: {why}\n{}", stage.daemon.log()));
        stage.run(Duration::from_millis(100));
        stage.settle();
        let disk = stage.daemon.disk("file");
        assert_eq!(disk["front_end_faults"], serde_json::json!({}), "{death}: {disk}");
        assert_eq!(disk["totals"]["faults"], 0, "{death}: {disk}");
        let requests = &disk["totals"]["requests"];
        println!(
            "{death}: a new daemon has answered {requests}, {} of them again",
            disk["totals"]["replayed"]
        );
    }
}

/// The disk takes longer than the devices may take to drain: what is in flight is left to the new process, which waits until
/// the old one's I/O has ended before it does the same again.
#[test]
fn requests_in_flight_on_a_slow_disk_are_done_again_after_the_old_ones_have_ended() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let slow = match SlowDisk::new(folder.path(), CrashLoad::image_bytes(QUEUES), 256 << 10) {
        Ok(slow) => slow,
        Err(why) => {
            // Past the harness, which keeps what passing tests print to itself.
            let _ = writeln!(std::io::stderr(), "SKIPPED: an upgrade on a slow disk was NOT tested: {why}");
            return;
        }
    };
    let mut stage = Stage::new();
    let pid = u32::try_from(stage.pid()).unwrap();
    slow.slows(pid).unwrap();
    let queues = QUEUES.to_string();
    stage.daemon.json(&["disk", "add", "slow", "--path", slow.device(), "--queues", &queues]);
    stage.load("slow", 7);
    stage.run(Duration::from_millis(500));
    // On a busy machine the load may have nothing in flight at that moment.
    let mut suspended = 0;
    for _ in 0..10 {
        let before = replayed(&stage.daemon);
        let report = stage.upgrade(&["--binary", BINARY]);
        println!("{}", report["devices"]);
        let device = |name: &str| {
            let devices = report["devices"].as_array().unwrap();
            devices.iter().find(|device| device["name"] == name).unwrap().clone()
        };
        assert!(device("file")["pause_us"].as_u64().is_some_and(|us| us < 2_000_000), "{report}");
        if device("slow")["suspended"] == true {
            suspended += 1;
            assert!(device("slow")["pause_us"].as_u64().is_some(), "it goes on: {report}");
            stage.daemon.until(|| {
                stage.loads.iter_mut().all(|(_, load)| load.step().is_ok())
                    && replayed(&stage.daemon) > before
            });
        }
        stage.run(Duration::from_secs(1));
        stage.expect_unbroken();
        if suspended == 2 {
            break;
        }
    }
    assert_eq!(suspended, 2, "nothing was in flight, time and again");
    let (_, mut load) = stage.loads.pop().unwrap();
    stage.loads.clear();
    let last = stage.pid();
    // Off the leash for the look at every block.
    let _ = std::fs::write("/sys/fs/cgroup/blkio/cgroup.procs", last.to_string());
    let _ = std::fs::write("/sys/fs/cgroup/cgroup.procs", last.to_string());
    load.settle().unwrap();
    println!("{} requests on the slow disk, longest wait {:?}", load.answered, load.longest);
}

fn replayed(daemon: &TestDaemon) -> u64 {
    daemon.disk("slow")["totals"]["replayed"].as_u64().unwrap_or(0)
}

/// A front end that has said half of something says the other half to another process.
#[test]
fn half_a_message_goes_along() {
    let mut stage = Stage {
        daemon: TestDaemon::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n"),
        loads: Vec::new(),
        tap: None,
    };
    let mut front = stage.daemon.connect("a");
    let ask: Vec<u8> = [1u32, 1, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    front.write_all(&ask[..7]).unwrap();
    stage.upgrade(&["--binary", BINARY]);
    front.write_all(&ask[7..]).unwrap();
    let mut reply = [0; 20];
    front.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    front.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
    stage.upgrade(&["--binary", BINARY]);
    assert_eq!(stage.daemon.disk("a")["connections"], 1);
}

/// What is served and what could not be, cores that were added and retired, all numbers and names: as before.
#[test]
fn what_was_done_at_run_time_is_so_afterwards() {
    let mut daemon =
        TestDaemon::new("[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"a\"\npath = \"a.img\"\n");
    let lost = daemon.image("lost.img", 1 << 20);
    daemon.image("a.img", 4 << 20);
    daemon.start();
    daemon.json(&["core", "add", "--spin-us", "500"]);
    daemon.json(&["core", "add"]);
    daemon.json(&["core", "retire", "1"]);
    daemon.json(&["disk", "add", "m", "--memory", "8M", "--queues", "2", "--core", "2"]);
    daemon.json(&["disk", "resize", "m", "12M"]);
    daemon.json(&["core", "move", "m", "1", "0"]);
    daemon.json(&["disk", "add", "lost", "--path", &lost.display().to_string()]);
    daemon.kill9();
    std::fs::remove_file(&lost).unwrap();
    daemon.start();
    daemon.until(|| daemon.disk("lost")["state"] == "failed");
    let mut stage = Stage { daemon, loads: Vec::new(), tap: None };
    let lasting = |daemon: &TestDaemon| {
        let mut status = daemon.json(&["status"]);
        status["disks"].as_array_mut().unwrap().iter_mut().for_each(|disk| {
            disk["queues"] = Value::Null;
            // When it is tried again changes by the millisecond.
            disk["retry"]["next_ms"] = Value::Null;
        });
        let cores = status["cores"].as_array().unwrap().iter();
        let cores: Vec<_> =
            cores.map(|core| (core["id"].clone(), core["notify"].clone(), core["spin_us"].clone())).collect();
        serde_json::json!({ "disks": status["disks"], "cores": cores })
    };
    let before = lasting(&stage.daemon);
    // Written into the configuration, and not read yet: an upgrade is no reload.
    stage.daemon.configure("[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"a\"\npath = \"a.img\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n");
    stage.upgrade(&["--binary", BINARY]);
    assert_eq!(lasting(&stage.daemon), before);
    assert_eq!(stage.daemon.json(&["reload"])["done"][0], "disk b added");
    assert_eq!(stage.daemon.refuses_beside("other.sock").code, 1, "the run directory is taken");
    assert!(Path::new(BINARY).exists());
}
