//! `ioplane move vm` of a VM with an emulated NIC, with two QEMUs that this test plays: their monitors, and the clients of both daemons' functions.

mod daemon;

use std::sync::{Arc, Mutex, MutexGuard};

use daemon::TestDaemon;
use ioplane_testkit::vfio_user::VfioUserClient;
use serde_json::{Value, json};

const CONFIG_SPACE: u32 = 7;
const COMMAND: u64 = 4;
const BAR1: u64 = 0x14;
/// What the guest's driver has set: ports, memory, bus mastering; where registers are; what it left in the address port.
const SET: u16 = 7;
const BASE: u32 = 0xfebf_1000;
const LATCH: u32 = 0x8000_1234;
/// Which interrupts the wires of the bus are routed to.
const ROUTES: u32 = 0x0b0a_0b0a;

fn config() -> String {
    "[[core]]\nnotify = \"notified\"\n[[switch]]\nname = \"lan\"\n\
     [[pci]]\nname = \"nic0\"\nemulate = \"rtl8139\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n"
        .to_owned()
}

/// A QEMU.
struct Qemu {
    client: VfioUserClient,
    name: String,
    state: &'static str,
    migration: Option<&'static str>,
    version: u64,
    latch: u32,
    guarded: bool,
    pauses: bool,
    /// Its downtime limit, ms.
    limit: u64,
    capability: Option<&'static str>,
    /// It gives up at the end of the migration, and has the guest run by itself a moment later.
    fails: bool,
    /// Looks until then.
    delay: u32,
    /// Ports were written while the guest could use them.
    misused: bool,
    /// Which command of those that it is asked is refused; and whether all after it are, as if the way there had broken.
    refuses: Option<usize>,
    breaks: bool,
    /// Which command kills whoever asks; and whether it is done all the same.
    kills: Option<(usize, bool)>,
    /// Who that is.
    mover: Option<u32>,
    asked: Vec<String>,
}

impl Qemu {
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
            fails: false,
            delay: 0,
            misused: false,
            refuses: None,
            breaks: false,
            kills: None,
            mover: None,
            asked: Vec::new(),
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

    fn command(&mut self) -> u16 {
        let bytes = self.client.read(CONFIG_SPACE, COMMAND, 2).unwrap();
        u16::from_le_bytes([bytes[0], bytes[1]])
    }
}

/// Both.
struct World {
    here: TestDaemon,
    there: TestDaemon,
    qemus: [Arc<Mutex<Qemu>>; 2],
    folder: tempfile::TempDir,
}

fn function(host: &TestDaemon) -> Value {
    host.json(&["pci", "show", "nic0"])
}

fn lock(qemu: &Mutex<Qemu>) -> MutexGuard<'_, Qemu> {
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
    if qemu.refuses.is_some_and(|at| number == at || (breaks && number > at)) {
        return json!({ "error": "refused by the test" });
    }
    match command {
        "query-name" => json!({ "name": qemu.name }),
        "query-status" => {
            if qemu.delay > 0 {
                qemu.delay -= 1;
                if qemu.delay == 0 {
                    qemu.state = "running";
                }
            }
            json!({ "status": qemu.state, "running": qemu.state == "running" })
        }
        "query-version" => json!({ "qemu": { "major": qemu.version, "minor": 1, "micro": 3 } }),
        "query-migrate" => {
            let now = qemu.migration;
            // The next look sees it further.
            if let Some(next) = match now {
                Some("setup") => Some("active"),
                Some("active") => {
                    qemu.state = "finish-migrate";
                    Some("pre-switchover")
                }
                Some("device") if qemu.fails => {
                    qemu.delay = 3;
                    Some("failed")
                }
                Some("device") => {
                    qemu.state = "postmigrate";
                    drop(qemu);
                    lock(other).state = "paused";
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
        "query-migrate-parameters" => json!({ "mode": "normal", "downtime-limit": qemu.limit }),
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
    fn new() -> World {
        let (here, there) = (TestDaemon::open(&config()), TestDaemon::open(&config()));
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
            daemon::qmp::serve(&folder.path().join(name), move |command, arguments| {
                answer(command, arguments, &own, &other)
            });
        }
        World { here, there, qemus, folder }
    }

    fn near(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemus[0])
    }

    fn far(&self) -> MutexGuard<'_, Qemu> {
        lock(&self.qemus[1])
    }

    fn args(&self) -> Vec<String> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let there = self.there.path("control.sock").display().to_string();
        let name = self.near().name.clone();
        [
            "move",
            "vm",
            &name,
            "--to",
            "tcp:host-b:4444",
            "--qmp",
            &at("here"),
            "--qmp-there",
            &at("there"),
            "--there",
            &there,
        ]
        .map(str::to_owned)
        .into()
    }

    /// Moves it. `refuses`: which command the monitor here, or the one there, refuses.
    fn moves(&self, refuses: [Option<usize>; 2]) -> daemon::Said {
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
    fn is_killed(&self, args: &[&str], kills: [Option<(usize, bool)>; 2], moment: Option<&str>) {
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

    fn move_is_killed(&self, kills: [Option<(usize, bool)>; 2], moment: Option<&str>) {
        let args = self.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.is_killed(&args, kills, moment);
    }

    fn recovers(&self) -> daemon::Said {
        let name = self.near().name.clone();
        self.here.cli(&["move", "recover", &name])
    }

    /// Exactly one side has the guest, which runs there with its function as before. Says whether it is the other one.
    fn has_one_owner(&self, what: &str) -> bool {
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
    fn is_as_before(&self, said: &daemon::Said, what: &str) {
        let text = format!("{what}: {}{}", said.out, said.err);
        assert_ne!(said.code, 0, "{text}");
        assert_eq!(function(&self.here)["stage"], "running", "{text}");
        let mut near = self.near();
        assert_eq!((near.state, near.command(), near.latch), ("running", SET, LATCH), "{text}");
        assert!(near.guarded && !near.pauses && !near.misused, "{text}");
        assert_ne!(self.far().state, "running", "{text}");
    }

    /// It may be tried again: the other QEMU is started anew.
    fn again(&self) {
        let mut near = self.near();
        near.migration = None;
        drop(near);
        let mut far = self.far();
        (far.state, far.migration, far.latch) = ("inmigrate", None, LATCH);
        far.client.write(CONFIG_SPACE, COMMAND, &[0, 0]).unwrap();
        far.client.write(CONFIG_SPACE, BAR1, &[0; 4]).unwrap();
    }
}

#[test]
fn a_nic_goes_along() {
    let world = World::new();
    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("nic0, emulated: ") && said.out.contains("bytes of state"), "{}", said.out);
    let mut far = world.far();
    // As the guest had set it up, with the wired interrupt on.
    assert_eq!((far.state, far.command(), far.latch), ("running", SET, LATCH));
    let bar = far.client.read(CONFIG_SPACE, BAR1, 4).unwrap();
    assert_eq!(bar, BASE.to_le_bytes());
    let place = |asked: &[String], words: &str| {
        asked
            .iter()
            .position(|asked| asked.starts_with(words))
            .unwrap_or_else(|| panic!("{words} in {asked:?}"))
    };
    let near = world.near();
    let order =
        ["blockdev-del", "migrate-set-capabilities", "migrate", "o/h 0xcfc 0x407", "migrate-continue"];
    let places = order.map(|words| {
        near.asked.iter().rposition(|asked| asked == words).unwrap_or_else(|| panic!("{words}"))
    });
    assert!(places.is_sorted(), "{:?}", near.asked);
    // BARs before the command, which is last.
    let command = place(&far.asked, "o/h 0xcfc 0x7");
    assert!(
        place(&far.asked, "stop") < place(&far.asked, &format!("o/w 0xcfc {BASE:#x}")),
        "{:?}",
        far.asked
    );
    assert!(
        place(&far.asked, &format!("o/w 0xcfc {BASE:#x}")) < command && command < place(&far.asked, "cont")
    );
    drop((near, far));
    assert_eq!(function(&world.here)["stage"], "running");
    let mut near = world.near();
    assert_eq!(near.command() & SET, 0, "the one here was reset");
    assert_eq!(near.state, "postmigrate");
}

#[test]
fn whatever_the_monitors_refuse_the_guest_goes_on_with_its_nic() {
    let world = World::new();
    // How many commands there are, of one that goes well; on a world of its own.
    let (near, far) = {
        let other = World::new();
        assert_eq!(other.moves([None, None]).code, 0);
        (other.near().asked.len(), other.far().asked.len())
    };
    assert!(near > 20 && far > 15, "{near} {far}");
    for at in 0..near {
        let said = world.moves([Some(at), None]);
        let what = world.near().asked[at].clone();
        world.is_as_before(&said, &format!("{at}, {what} here"));
        world.again();
    }
    // The last is `cont`: then it is there.
    for breaks in [false, true] {
        world.far().breaks = breaks;
        for at in 0..far - 1 {
            let said = world.moves([None, Some(at)]);
            let what = world.far().asked[at].clone();
            world.is_as_before(&said, &format!("{at}, {what} there, breaks: {breaks}"));
            world.again();
        }
    }
    let said = world.moves([None, Some(far - 1)]);
    assert!(
        said.code != 0
            && said.err.contains("has moved")
            && said.err.contains("say `cont` by the monitor there"),
        "{}",
        said.err
    );
    assert_eq!(world.near().state, "postmigrate");
}

#[test]
fn a_guest_that_runs_by_itself_after_a_failure_is_stopped_before_anything_is_put_back() {
    let world = World::new();
    world.near().fails = true;
    let said = world.moves([None, None]);
    world.is_as_before(&said, "it failed at its end");
    assert!(
        said.err.contains("QEMU has given it up") && said.err.contains("it runs here as before"),
        "{}",
        said.err
    );
    let asked = world.near().asked.clone();
    let last = |words: &str| {
        asked.iter().rposition(|asked| asked == words).unwrap_or_else(|| panic!("{words} in {asked:?}"))
    };
    assert!(last("stop") < last("o/h 0xcfc 0x7") && last("o/h 0xcfc 0x7") < last("cont"), "{asked:?}");
}

#[test]
fn a_guest_that_is_paused_meanwhile_stays_paused_there() {
    let world = World::new();
    world.near().state = "paused";
    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!(world.far().state, "paused");
    assert!(!world.far().asked.iter().any(|asked| asked == "cont"));
}

#[test]
fn what_cannot_go_along_is_found_before_anything_is_done() {
    let world = World::new();
    let refused = |words: &str| {
        let said = world.moves([None, None]);
        assert!(said.code != 0 && said.err.contains(words), "{}", said.err);
        let touched = ["blockdev-del", "stop", "migrate"];
        let asked = [world.near().asked.clone(), world.far().asked.clone()].concat();
        assert!(!asked.iter().any(|asked| touched.contains(&asked.as_str())), "{asked:?}");
    };
    let args = world.args();
    let without: Vec<&str> = args[..7].iter().map(String::as_str).collect();
    let said = world.here.refused(&without);
    assert!(said.contains("give --there SOCKET") && said.contains("--qmp-there SOCKET"), "{said}");

    let own = ["--qmp-there", "--there"].map(|option| args.iter().position(|arg| arg == option).unwrap() + 1);
    let mut mine = args.clone();
    mine[own[1]] = world.here.path("control.sock").display().to_string();
    let mine: Vec<&str> = mine.iter().map(String::as_str).collect();
    assert!(world.here.refused(&mine).contains("leads to this host's own daemon"));

    world.far().state = "running";
    refused("does not wait for a guest: its VM is running");
    world.far().state = "inmigrate";
    world.far().version = 10;
    refused("the QEMU here is 11.1, and the one there is 10.1");
    world.far().version = 11;
    let own = std::mem::replace(&mut world.far().name, "mail".into());
    refused("is that of VM mail");
    world.far().name = own;
    for host in 0..2 {
        for capability in ["postcopy-ram", "x-colo", "background-snapshot", "mapped-ram"] {
            lock(&world.qemus[host]).capability = Some(capability);
            refused(&format!("is set to migrate with {capability}"));
            lock(&world.qemus[host]).capability = None;
        }
    }
    // Held; another one there; another address; none.
    assert_eq!(world.there.cli(&["pci", "quiesce", "nic0"]).code, 0);
    refused("the other host: PCI function nic0 is held");
    assert_eq!(world.there.cli(&["pci", "resume", "nic0"]).code, 0);
    let replace = |args: &[&str]| {
        assert_eq!(world.there.cli(&["pci", "remove", "nic0", "--force"]).code, 0);
        let add = ["pci", "add", "nic0", "--switch", "lan"];
        assert_eq!(world.there.cli(&[&add[..], args].concat()).code, 0);
    };
    replace(&["--emulate", "ne2000", "--mac", "02:00:00:00:00:0a"]);
    refused("is emulated rtl8139 10ec:8139 here, and emulated ne2000 10ec:8029 on the other host");
    replace(&["--emulate", "rtl8139", "--mac", "02:00:00:00:00:0b"]);
    refused("has another address");
    replace(&["--emulate", "rtl8139", "--mac", "02:00:00:00:00:0a"]);
    refused("no QEMU of the other host uses PCI function nic0 yet");
    assert_eq!(world.there.cli(&["pci", "remove", "nic0"]).code, 0);
    refused("the other host has no PCI function nic0");
}

/// Commands that change something: killed before one of them and after it are two things.
fn changes(command: &str) -> bool {
    let ports = command.starts_with("o/");
    ports || !(command.starts_with("query-") || command.starts_with("i/") || command.starts_with("qom-"))
}

/// What was killed comes to its end by one more command. Says whether the guest is there.
fn is_brought_to_its_end(world: &World, what: &str) -> bool {
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

#[test]
fn a_move_that_is_killed_at_any_command_comes_to_its_end_by_another_one() {
    let mut world = World::new();
    let asked = {
        let other = World::new();
        assert_eq!(other.moves([None, None]).code, 0);
        [other.near().asked.clone(), other.far().asked.clone()]
    };
    let mut moved = 0;
    for (host, asked) in asked.iter().enumerate() {
        for (at, command) in asked.iter().enumerate() {
            for done in [false, true] {
                if done && !changes(command) {
                    continue;
                }
                let mut kills = [None, None];
                kills[host] = Some((at, done));
                world.move_is_killed(kills, None);
                let what = format!("{at}, {command} {}, done: {done}", ["here", "there"][host]);
                if is_brought_to_its_end(&world, &what) {
                    moved += 1;
                    assert_eq!(command, "cont", "{what}: nothing was given away before that");
                    world = World::new();
                } else {
                    world.again();
                }
            }
        }
    }
    assert_eq!(moved, 2, "before `cont` there and after it");
}

#[test]
fn a_move_that_is_killed_between_two_steps_comes_to_its_end_by_another_one() {
    let mut world = World::new();
    let here = ["noted", "logged", "port", "commands", "rested", "taken", "sent", "revived", "replayed"];
    for moment in here {
        world.move_is_killed([None, None], Some(moment));
        assert!(!is_brought_to_its_end(&world, moment), "{moment}");
        world.again();
    }
    // One line on the daemon's disk is the difference.
    for moment in ["gone", "left", "continued"] {
        world.move_is_killed([None, None], Some(moment));
        if moment == "gone" {
            assert_eq!(function(&world.here)["step"], "at_rest");
            let refused = world.here.refused(&["pci", "resume", "nic0"]);
            assert!(refused.contains("does not go on here"), "{refused}");
        }
        assert!(is_brought_to_its_end(&world, moment), "{moment}");
        world = World::new();
    }
}

#[test]
fn a_recovery_that_is_killed_is_done_again() {
    let world = World::new();
    let name = world.near().name.clone();
    let args = ["move", "recover", &name];
    world.move_is_killed([None, None], Some("revived"));
    world.far().asked.clear();
    world.near().asked.clear();
    assert_eq!(world.recovers().code, 0);
    let asked = [world.near().asked.clone(), world.far().asked.clone()];
    assert!(asked[0].len() > 10 && asked[1].iter().any(|asked| asked == "quit"), "{asked:?}");
    for (host, asked) in asked.iter().enumerate() {
        for (at, command) in asked.iter().enumerate() {
            world.again();
            world.move_is_killed([None, None], Some("revived"));
            let mut kills = [None, None];
            kills[host] = Some((at, true));
            world.is_killed(&args, kills, None);
            let what = format!("{at}, {command} {}", ["here", "there"][host]);
            assert!(!is_brought_to_its_end(&world, &what));
        }
    }
}

/// As that of a QEMU is which is held back until functions whose driver cooperates are at rest.
#[test]
fn a_downtime_limit_that_was_lowered_is_put_back() {
    let world = World::new();
    let path = format!("/v1/moves/{}", world.near().name);
    for lowered in [true, false] {
        world.move_is_killed([None, None], Some("logged"));
        let mut note = world.here.http("GET", &path, "").1;
        assert_eq!(note["downtime_limit"], Value::Null);
        let limit = if lowered { 1 } else { 500 };
        if lowered {
            note["downtime_limit"] = json!(700);
            assert_eq!(world.here.http("PUT", &path, &note.to_string()).0, 200);
        }
        world.near().limit = limit;
        assert!(!is_brought_to_its_end(&world, "held back"));
        // One that the move has not touched is left alone.
        assert_eq!(world.near().limit, if lowered { 700 } else { 500 });
        world.again();
    }
}

#[test]
fn what_is_written_down_outlives_the_daemon() {
    let mut world = World::new();
    world.move_is_killed([None, None], Some("gone"));
    world.here.kill9();
    world.here.start();
    // Its VMM does not come back to the function, and whoever has the guest is no question.
    assert_eq!(function(&world.here)["step"], "lost");
    let said = world.recovers();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("is on the other host, and runs"), "{}", said.out);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));

    let mut world = World::new();
    world.move_is_killed([None, None], Some("taken"));
    assert_eq!(function(&world.here)["step"], "at_rest");
    world.here.kill9();
    world.here.start();
    assert_eq!(function(&world.here)["step"], "lost");
    // It is this host's, with a function that is gone.
    let said = world.recovers();
    assert!(said.err.contains("nic0"), "{}{}", said.out, said.err);
    assert_eq!((world.near().state, world.far().state), ("running", "inmigrate"));
}

#[test]
fn a_guest_that_runs_there_is_not_let_run_here() {
    let world = World::new();
    world.move_is_killed([None, None], Some("sent"));
    // Somebody says so by hand, or whoever has the other host.
    world.far().state = "running";
    let said = world.recovers();
    assert!(said.code != 0 && said.err.contains("runs on the other host"), "{}", said.err);
    assert_eq!(world.near().state, "postmigrate");
    // Nobody can be asked there.
    world.far().state = "paused";
    let name = world.near().name.clone();
    let nowhere = world.folder.path().join("nowhere").display().to_string();
    let args = ["move", "recover", &name, "--qmp-there", &nowhere];
    let refused = world.here.refused(&args);
    assert!(refused.contains("say --ended-there"), "{refused}");
    assert_eq!(world.near().state, "postmigrate");
    // The next move waits for that.
    let said = world.moves([None, None]);
    assert!(said.code != 0, "{}", said.out);
    world.far().state = "shutdown";
    let said = world.here.cli(&[&args[..], &["--ended-there"]].concat());
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(!world.has_one_owner("ended there"));
}
