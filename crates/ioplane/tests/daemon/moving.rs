//! A VM with an emulated NIC that moves between two daemons, with two QEMUs that the test plays: their monitors, and the clients of both daemons' functions.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use ioplane_testkit::vfio_user::VfioUserClient;
use ioplane_vcpu::kvm::{CLUSTER_PAGE_NAME, ClusterPage, HoldReport, VcpuStop};
use rustix::fs::MemfdFlags;
use serde_json::{Value, json};

use super::identities::{authority, config as with_identity, known};
use super::load::free_port;
use super::{Said, TestDaemon, qmp};

pub const CONFIG_SPACE: u32 = 7;
pub const COMMAND: u64 = 4;
pub const BAR1: u64 = 0x14;
/// What the guest's driver has set: ports, memory, bus mastering; where registers are; what it left in the address port.
pub const SET: u16 = 7;
pub const BASE: u32 = 0xfebf_1000;
pub const LATCH: u32 = 0x8000_1234;
/// Which interrupts the wires of the bus are routed to.
const ROUTES: u32 = 0x0b0a_0b0a;

fn config() -> String {
    "[[core]]\nnotify = \"notified\"\n[[switch]]\nname = \"lan\"\n\
     [[pci]]\nname = \"nic0\"\nemulate = \"rtl8139\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n"
        .to_owned()
}

/// A QEMU.
pub struct Qemu {
    pub client: VfioUserClient,
    pub name: String,
    pub state: &'static str,
    pub migration: Option<&'static str>,
    pub version: u64,
    pub latch: u32,
    pub guarded: bool,
    pub pauses: bool,
    /// Its downtime limit, ms.
    pub limit: u64,
    pub capability: Option<&'static str>,
    /// Its parameter `mode`.
    pub mode: &'static str,
    /// It gives up at the end of the migration, and has the guest run by itself a moment later.
    pub fails: bool,
    /// Somebody else has the guest that arrives run at once.
    pub eager: bool,
    /// Somebody else goes on with the switch-over at once.
    pub hasty: bool,
    /// Somebody else sends the guest to another QEMU than this one.
    pub elsewhere: bool,
    /// Looks until then.
    pub delay: u32,
    /// Until when it sends nothing.
    pub silent: Option<Instant>,
    /// Ports were written while the guest could use them.
    pub misused: bool,
    /// Which command of those that it is asked is refused; and whether all after it are, as if the way there had broken.
    pub refuses: Option<usize>,
    pub breaks: bool,
    /// Which command kills whoever asks; and whether it is done all the same.
    pub kills: Option<(usize, bool)>,
    /// Who that is.
    pub mover: Option<u32>,
    /// Which command cuts the way between the hosts; and whether it is done all the same.
    pub cuts: Option<(usize, bool)>,
    pub cut: Option<Box<dyn Fn() + Send>>,
    pub asked: Vec<String>,
    /// Its vCPU obeys this, which is the test's alone: the next test has another one. Whoever drives its migration does not wait before the switch-over.
    pub library: Weak<Library>,
    /// Whoever drives its migration ends it when its guest is there.
    pub ends: bool,
    /// Its main loop waits for its vCPU the next time that it is asked how the VM does, as for a reset of the guest; and its migration thread stops the guest
    /// in the same moment.
    pub stalls: Option<Stall>,
    /// How long that took.
    pub stalled: Option<Duration>,
}

/// What a main loop does that does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// It waits for the vCPU.
    Resets,
    /// The same, and the migration thread has that vCPU, too.
    ResetsAndStops,
    /// Something else, for so long.
    Slow(Duration),
}

/// A file as of the library, in the process that both daemons take for their VMM: this one.
pub struct Library {
    file: File,
    inside: u64,
    kept: u64,
}

/// What the library of this build has in the first words of its file.
const HEAD: &[u8] = b"ioplexit\x08\0\0\0";

impl Library {
    pub fn new() -> Library {
        let file = File::from(rustix::fs::memfd_create(CLUSTER_PAGE_NAME, MemfdFlags::CLOEXEC).unwrap());
        file.set_len(size_of::<ClusterPage>() as u64).unwrap();
        file.write_all_at(HEAD, 0).unwrap();
        // Words that others only read have no names here.
        let find = |is_it: &dyn Fn(HoldReport) -> u32| {
            let mut words = (HEAD.len() as u64..4096).step_by(4);
            let found = words.find(|at| {
                file.write_all_at(&7_u32.to_ne_bytes(), *at).unwrap();
                let found = is_it(ClusterPage::read_hold(&file).unwrap()) == 7;
                file.write_all_at(&[0; 4], *at).unwrap();
                found
            });
            found.unwrap()
        };
        let (inside, kept) = (find(&|report| report.inside), find(&|report| report.kept));
        Library { file, inside, kept }
    }

    pub fn says(&self) -> HoldReport {
        ClusterPage::read_hold(&self.file).unwrap()
    }

    pub fn set_inside(&self, vcpus: u32) {
        self.file.write_all_at(&vcpus.to_ne_bytes(), self.inside).unwrap();
    }

    fn set_kept(&self, vcpus: u32) {
        self.file.write_all_at(&vcpus.to_ne_bytes(), self.kept).unwrap();
    }
}

impl Qemu {
    /// Its vCPU is wanted back for the switch-over: whether it waits.
    fn is_kept(&self) -> bool {
        let Some(library) = self.library.upgrade() else { return false };
        let waits = library.says().stop != VcpuStop::Free;
        library.set_kept(waits.into());
        waits
    }

    /// Its main loop does not answer for a while.
    fn stall(&mut self, stall: Stall) {
        let begun = Instant::now();
        if let Stall::Slow(time) = stall {
            std::thread::sleep(time);
        } else {
            let library = self.library.upgrade().unwrap();
            let before = library.says().stop;
            library.set_kept((before != VcpuStop::Free).into());
            while library.says().stop.keeps_since(before) {
                assert!(begun.elapsed() < Duration::from_secs(20), "nobody lets it go");
                std::thread::sleep(Duration::from_millis(1));
            }
            library.set_kept(0);
        }
        if stall == Stall::ResetsAndStops {
            (self.state, self.migration) = ("finish-migrate", Some("pre-switchover"));
        }
        self.stalled = Some(begun.elapsed());
    }

    fn new(host: &TestDaemon, state: &'static str) -> Qemu {
        let client = VfioUserClient::greet(&host.path("nic0.sock")).unwrap();
        host.until(|| function(host)["connected"] == true);
        let name = function(host)["vm"]["name"].as_str().unwrap().to_owned();
        Qemu {
            client,
            name,
            state,
            migration: None,
            version: 11,
            latch: LATCH,
            guarded: true,
            pauses: false,
            limit: 300,
            capability: None,
            mode: "normal",
            fails: false,
            eager: false,
            hasty: false,
            elsewhere: false,
            delay: 0,
            silent: None,
            misused: false,
            refuses: None,
            breaks: false,
            kills: None,
            mover: None,
            cuts: None,
            cut: None,
            asked: Vec::new(),
            library: Weak::new(),
            ends: false,
            stalls: None,
            stalled: None,
        }
    }

    /// An access to the ports of configuration mechanism #1.
    fn port(&mut self, line: &str) -> String {
        let mut words = line.split(' ');
        let (verb, port) = (words.next().unwrap(), words.next().unwrap());
        let number = |word: &str| u32::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
        let (port, value) = (number(port), words.next().map(number));
        self.misused |= value.is_some() && self.state == "running";
        let size = match &verb[2..] {
            "b" => 1,
            "h" => 2,
            "w" => 4,
            other => panic!("{other}"),
        };
        if port == 0xcf8 {
            return match value {
                Some(value) => {
                    self.latch = value;
                    String::new()
                }
                None => format!("portl[0x0cf8] = {:#010x}\r\n", self.latch),
            };
        }
        if self.latch == 0x8000_f860 {
            // Of the bridge that routes wires: what is written is what was there.
            assert!(size == 4 && value.is_none_or(|value| value == ROUTES), "{line}");
            return if value.is_some() { String::new() } else { format!("portl[0x0cfc] = {ROUTES:#x}\r\n") };
        }
        assert_eq!(self.latch & 0xffff_ff00, 0x8001_0000, "bus 1, slot 0: behind a port");
        let at = u64::from(self.latch & 0xfc) + u64::from(port - 0xcfc);
        match value {
            Some(value) => {
                // Nothing happens where its daemon has died.
                let _ = self.client.write(CONFIG_SPACE, at, &value.to_le_bytes()[..size]);
                String::new()
            }
            None => {
                let bytes = self.client.read(CONFIG_SPACE, at, size as u32).unwrap();
                let digits: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
                format!("portl[{port:#06x}] = 0x{digits}\r\n")
            }
        }
    }

    pub fn command(&mut self) -> u16 {
        let bytes = self.client.read(CONFIG_SPACE, COMMAND, 2).unwrap();
        u16::from_le_bytes([bytes[0], bytes[1]])
    }
}

/// Both.
pub struct World {
    pub here: TestDaemon,
    pub there: TestDaemon,
    pub qemus: [Arc<Mutex<Qemu>>; 2],
    pub folder: tempfile::TempDir,
    /// Both hosts have identities, and reach each other by these ports: where the one there listens, and where it is reached.
    pub ports: Option<(u16, u16)>,
    pub authority: Option<TestDaemon>,
}

pub fn function(host: &TestDaemon) -> Value {
    host.json(&["pci", "show", "nic0"])
}

pub fn lock(qemu: &Mutex<Qemu>) -> MutexGuard<'_, Qemu> {
    qemu.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn answer(command: &str, arguments: &Value, own: &Mutex<Qemu>, other: &Mutex<Qemu>) -> Value {
    if command == "qmp_capabilities" {
        return json!({});
    }
    let mut qemu = lock(own);
    let line = arguments["command-line"].as_str().map(str::to_owned);
    qemu.asked.push(line.clone().unwrap_or_else(|| command.to_owned()));
    let (number, breaks) = (qemu.asked.len() - 1, qemu.breaks);
    if let Some((_, done)) = qemu.kills.take_if(|(at, _)| *at == number) {
        let mover = i32::try_from(qemu.mover.unwrap()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
        rustix::process::kill_process(mover, rustix::process::Signal::KILL).unwrap();
        if !done {
            return json!({ "error": "killed by the test" });
        }
    }
    if let Some((_, done)) = qemu.cuts.take_if(|(at, _)| *at == number) {
        (qemu.cut.as_ref().unwrap())();
        if !done {
            return json!({ "error": "cut off by the test" });
        }
    }
    if qemu.ends && qemu.migration == Some("completed") {
        return json!({ "error": "it has ended" });
    }
    if qemu.refuses.is_some_and(|at| number == at || (breaks && number > at)) {
        return json!({ "error": "refused by the test" });
    }
    match command {
        "query-name" => json!({ "name": qemu.name }),
        "query-status" => {
            if let Some(stall) = qemu.stalls.take() {
                qemu.stall(stall);
            }
            if qemu.delay > 0 {
                qemu.delay -= 1;
                if qemu.delay == 0 {
                    qemu.state = "running";
                }
            }
            json!({ "status": qemu.state, "running": qemu.state == "running" })
        }
        "query-version" => json!({ "qemu": { "major": qemu.version, "minor": 1, "micro": 3 } }),
        "query-migrate" if qemu.state == "inmigrate" => {
            json!({ "status": if qemu.elsewhere { "setup" } else { "active" } })
        }
        "query-migrate" => {
            let now = qemu.migration;
            // The next look sees it further.
            if let Some(next) = match now {
                Some("setup") => Some("active"),
                Some("active") if qemu.silent.is_some_and(|until| Instant::now() < until) => None,
                Some("active") if qemu.library.strong_count() > 0 => {
                    qemu.state = "finish-migrate";
                    if qemu.is_kept() { None } else { Some("device") }
                }
                Some("active") => {
                    qemu.state = "finish-migrate";
                    Some("pre-switchover")
                }
                Some("pre-switchover") if qemu.hasty => Some("device"),
                Some("device") if qemu.fails => {
                    qemu.delay = 3;
                    Some("failed")
                }
                Some("device") => {
                    qemu.state = "postmigrate";
                    drop(qemu);
                    let mut there = lock(other);
                    there.state = if there.eager { "running" } else { "paused" };
                    drop(there);
                    qemu = lock(own);
                    Some("completed")
                }
                _ => None,
            } {
                qemu.migration = Some(next);
            }
            let why = "The vdi format used by node 'unmovable-nic0' does not support live migration";
            let mut said = json!({ "ram": { "total": 4096, "remaining": 0, "transferred": 4096 }, "total-time": 9, "downtime": 2 });
            if let Some(now) = now {
                said["status"] = now.into();
            }
            if qemu.guarded {
                said["blocked-reasons"] = json!([why]);
            }
            said
        }
        "query-migrate-capabilities" => {
            let mut all = vec![json!({ "capability": "pause-before-switchover", "state": qemu.pauses })];
            all.extend(qemu.capability.map(|name| json!({ "capability": name, "state": true })));
            json!(all)
        }
        "qom-get" => {
            let nic = arguments["path"] == "/machine/peripheral/ioplane-nic0";
            if nic { "vfio-user-pci" } else { "pcie-root-port" }.into()
        }
        "query-migrate-parameters" => json!({ "mode": qemu.mode, "downtime-limit": qemu.limit }),
        "migrate-set-parameters" => {
            qemu.limit = arguments["downtime-limit"].as_u64().unwrap();
            json!({})
        }
        "query-named-block-nodes" if qemu.guarded => {
            json!([{ "node-name": "unmovable-nic0", "drv": "vdi", "file": "/run/unmovable.vdi" }])
        }
        "query-named-block-nodes" => json!([]),
        "blockdev-del" => {
            assert_eq!(*arguments, json!({ "node-name": "unmovable-nic0" }));
            qemu.guarded = false;
            json!({})
        }
        "blockdev-add" => {
            assert_eq!(
                (&arguments["driver"], &arguments["node-name"]),
                (&"vdi".into(), &"unmovable-nic0".into())
            );
            qemu.guarded = true;
            json!({})
        }
        "query-pci" => {
            let nic = json!({ "bus": 1, "slot": 0, "function": 0, "qdev_id": "ioplane-nic0", "id": { "vendor": 0x10ec, "device": 0x8139 } });
            let port = json!({ "bus": 0, "slot": 1, "function": 0, "qdev_id": "rp1", "id": { "vendor": 0x1b36, "device": 12 }, "pci_bridge": { "devices": [nic] } });
            let isa = json!({ "bus": 0, "slot": 31, "function": 0, "qdev_id": "", "class_info": { "class": 0x601 }, "id": { "vendor": 0x8086, "device": 0x2918 } });
            json!([{ "bus": 0, "devices": [port, isa] }])
        }
        "human-monitor-command" => qemu.port(&line.unwrap()).into(),
        "migrate-set-capabilities" => {
            qemu.pauses = arguments["capabilities"][0]["state"] == true;
            json!({})
        }
        "migrate" => {
            assert!(qemu.pauses && !qemu.guarded);
            qemu.migration = Some("setup");
            json!({})
        }
        "migrate-continue" => {
            assert_eq!(qemu.migration, Some("pre-switchover"));
            qemu.migration = Some("device");
            json!({})
        }
        // It comes too late.
        "migrate_cancel" if qemu.migration == Some("completed") => json!({}),
        "migrate_cancel" => {
            qemu.migration = Some("cancelled");
            if qemu.state == "finish-migrate" {
                qemu.state = "running";
            }
            json!({})
        }
        "stop" => {
            if qemu.state != "inmigrate" {
                qemu.state = "paused";
            }
            json!({})
        }
        "cont" => {
            qemu.state = "running";
            json!({})
        }
        "quit" => {
            qemu.state = "shutdown";
            json!({})
        }
        other => panic!("{other}"),
    }
}

impl World {
    pub fn new() -> World {
        World::of(TestDaemon::open(&config()), TestDaemon::open(&config()), None)
    }

    /// Hosts that are called `host-b` and `host-c`, and the one that has made them known. The one there is reached by the port that `cable` makes of the one where it listens.
    pub fn over_tls(cable: impl FnOnce(u16) -> u16) -> World {
        let authority = authority();
        let (mut here, mut there) = (known(&authority, "host-b"), known(&authority, "host-c"));
        for host in [&mut here, &mut there] {
            host.configure(&with_identity(host, &config().replace("[[core]]\n", "")));
            host.start();
        }
        let listens = free_port();
        let mut world = World::of(here, there, Some((listens, cable(listens))));
        world.authority = Some(authority);
        world
    }

    fn of(here: TestDaemon, there: TestDaemon, ports: Option<(u16, u16)>) -> World {
        let qemus = [Qemu::new(&here, "running"), Qemu::new(&there, "inmigrate")]
            .map(|qemu| Arc::new(Mutex::new(qemu)));
        {
            let mut guest = lock(&qemus[0]);
            guest.client.write(CONFIG_SPACE, BAR1, &BASE.to_le_bytes()).unwrap();
            guest.client.write(CONFIG_SPACE, COMMAND, &SET.to_le_bytes()).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        for (own, other, name) in [(0, 1, "here"), (1, 0, "there")] {
            let (own, other) = (qemus[own].clone(), qemus[other].clone());
            qmp::serve(&folder.path().join(name), move |command, arguments| {
                answer(command, arguments, &own, &other)
            });
        }
        World { here, there, qemus, folder, ports, authority: None }
    }

    pub fn near(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemus[0])
    }

    pub fn far(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemus[1])
    }

    pub fn args(&self) -> Vec<String> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let there = self.there.path("control.sock").display().to_string();
        let name = self.near().name.clone();
        let args = ["move", "vm", &name, "--to", "tcp:host-b:4444", "--qmp", &at("here")].map(str::to_owned);
        let more = match self.ports {
            None => ["--qmp-there".into(), at("there"), "--there".into(), there],
            Some((_, port)) => {
                let at = format!("127.0.0.1:{port}");
                ["--tls-hostname".into(), "host-c".into(), "--there".into(), at]
            }
        };
        args.into_iter().chain(more).collect()
    }

    /// The host there is told that the VM comes.
    pub fn is_expected(&self, more: &[&str]) -> Said {
        let name = self.near().name.clone();
        let qmp = self.folder.path().join("there").display().to_string();
        let listen = format!("127.0.0.1:{}", self.ports.unwrap().0);
        let args = ["move", "expect", &name, "--from", "host-b", "--qmp", &qmp, "--listen", &listen];
        self.there.cli(&[&args[..], more].concat())
    }

    /// Moves it. `refuses`: which command the monitor here, or the one there, refuses.
    pub fn moves(&self, refuses: [Option<usize>; 2]) -> Said {
        for (qemu, refuses) in self.qemus.iter().zip(refuses) {
            let mut qemu = lock(qemu);
            (qemu.refuses, qemu.asked) = (refuses, Vec::new());
        }
        let args = self.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = self.here.cli(&args);
        for qemu in &self.qemus {
            lock(qemu).refuses = None;
        }
        said
    }

    /// Begins a command that is killed on its way: by a monitor at that command, done or not, or by itself at a moment.
    pub fn is_killed(&self, args: &[&str], kills: [Option<(usize, bool)>; 2], moment: Option<&str>) {
        let mut child = {
            let mut qemus = self.qemus.each_ref().map(|qemu| lock(qemu));
            let child = self.here.begin(args, moment.map(|moment| ("IOPLANE_MOVE_KILL", moment)));
            for (qemu, kills) in qemus.iter_mut().zip(kills) {
                (qemu.kills, qemu.mover, qemu.asked) = (kills, Some(child.id()), Vec::new());
            }
            child
        };
        let status = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{kills:?} {moment:?}: {status}"
        );
        // A monitor that is at a command that nobody waits for has done it before the next one is asked.
        for qemu in &self.qemus {
            lock(qemu).kills = None;
        }
    }

    pub fn move_is_killed(&self, kills: [Option<(usize, bool)>; 2], moment: Option<&str>) {
        let args = self.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.is_killed(&args, kills, moment);
    }

    pub fn recovers(&self) -> Said {
        let name = self.near().name.clone();
        self.here.cli(&["move", "recover", &name])
    }

    /// Exactly one side has the guest, which runs there with its function as before. Says whether it is the other one.
    pub fn has_one_owner(&self, what: &str) -> bool {
        let (here, there) = (function(&self.here), function(&self.there));
        let (mut near, mut far) = (self.near(), self.far());
        assert!(!near.misused && !far.misused, "{what}");
        let moved = far.state == "running";
        assert_eq!(near.state == "running", !moved, "{what}: {} here, {} there", near.state, far.state);
        assert_eq!(if moved { &there } else { &here }["stage"], "running", "{what}");
        assert_eq!((&here["stage"], here["step"] == "at_rest"), (&json!("running"), false), "{what}: {here}");
        let (command, latch) = if moved { (far.command(), far.latch) } else { (near.command(), near.latch) };
        assert_eq!((command, latch), (SET, LATCH), "{what}");
        if moved {
            assert_eq!(
                (near.command() & SET, near.state),
                (0, "postmigrate"),
                "{what}: the one here was reset"
            );
        } else {
            assert!(near.guarded && !near.pauses, "{what}: guarded {}, pauses {}", near.guarded, near.pauses);
            let under_way = ["setup", "active", "pre-switchover", "device"];
            assert!(
                !near.migration.is_some_and(|now| under_way.contains(&now)),
                "{what}: {:?}",
                near.migration
            );
        }
        moved
    }

    /// The guest is here as before, whatever was tried.
    pub fn is_as_before(&self, said: &Said, what: &str) {
        let text = format!("{what}: {}{}", said.out, said.err);
        assert_ne!(said.code, 0, "{text}");
        assert_eq!(function(&self.here)["stage"], "running", "{text}");
        let mut near = self.near();
        assert_eq!((near.state, near.command(), near.latch), ("running", SET, LATCH), "{text}");
        assert!(near.guarded && !near.pauses && !near.misused, "{text}");
        assert_ne!(self.far().state, "running", "{text}");
    }

    /// It may be tried again: the other QEMU is started anew.
    pub fn again(&self) {
        let mut near = self.near();
        near.migration = None;
        drop(near);
        let mut far = self.far();
        (far.state, far.migration, far.latch) = ("inmigrate", None, LATCH);
        far.client.write(CONFIG_SPACE, COMMAND, &[0, 0]).unwrap();
        far.client.write(CONFIG_SPACE, BAR1, &[0; 4]).unwrap();
    }
}

/// Commands that change something: killed before one of them and after it are two things.
pub fn changes(command: &str) -> bool {
    let ports = command.starts_with("o/");
    ports || !(command.starts_with("query-") || command.starts_with("i/") || command.starts_with("qom-"))
}

/// What was killed comes to its end by one more command. Says whether the guest is there.
pub fn is_brought_to_its_end(world: &World, what: &str) -> bool {
    let said = world.recovers();
    if said.err.contains("nothing is written down") {
        // Nothing was begun, or all was done.
        return world.has_one_owner(what);
    }
    assert_eq!(said.code, 0, "{what}: {}{}", said.out, said.err);
    let moved = world.has_one_owner(what);
    let words = if moved { "is on the other host, and runs" } else { "is here, and runs" };
    assert!(said.out.contains(words), "{what}: {}", said.out);
    assert!(world.recovers().err.contains("nothing is written down"), "{what}");
    moved
}
