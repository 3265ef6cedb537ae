//! PCI functions of a real daemon: emulated NICs on a switch, driven by a raw vfio-user client.

mod daemon;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::{Duration, Instant};

use daemon::TestDaemon;
use ioplane_device::{Access, RegisterAddress};
use ioplane_testkit::driver::GuestMemory;
use ioplane_testkit::nic::{Cp, Cut, Ne2k, Reach, frame};
use ioplane_testkit::vfio_user::{PATIENCE, VfioUserClient};
use serde_json::{Value, json};

/// Longer than anything here takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(120);
/// Numbers of regions (`linux/vfio.h`).
const BAR0: u32 = 0;
const BAR1: u32 = 1;
const CONFIG: u32 = 7;

fn config() -> &'static str {
    "[[core]]\nnotify = \"notified\"\n[[switch]]\nname = \"lan\"\n\
     [[pci]]\nname = \"soft\"\nemulate = \"rtl8139\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n"
}

fn connect(daemon: &TestDaemon, name: &str) -> VfioUserClient {
    let client = VfioUserClient::greet(&daemon.path(&format!("{name}.sock"))).unwrap();
    daemon.until(|| show(daemon, name)["connected"] == true);
    client
}

fn show(daemon: &TestDaemon, name: &str) -> Value {
    daemon.json(&["pci", "show", name])
}

/// Memory and ports on, as a guest does first of all.
fn switch_on(client: &mut VfioUserClient) {
    client.write(CONFIG, 4, &7u16.to_le_bytes()).unwrap();
}

#[test]
fn an_emulated_nic_is_added_used_and_removed() {
    let daemon = TestDaemon::open(config());
    let added = daemon.json(&["pci", "add", "old", "--emulate", "ne2000", "--switch", "lan"]);
    assert_eq!(
        (&added["mode"], &added["model"], &added["id"]),
        (&"emulated".into(), &"ne2000".into(), &"10ec:8029".into())
    );
    assert_eq!(added["state"], "served");
    assert_eq!(added["socket"], daemon.path("old.sock").display().to_string());

    let before = show(&daemon, "soft");
    assert_eq!(
        (&before["connected"], &before["traffic"]["reads"], &before["id"]),
        (&false.into(), &0.into(), &"10ec:8139".into())
    );
    let mut client = connect(&daemon, "soft");
    assert_eq!(client.read(CONFIG, 0, 4).unwrap(), [0xec, 0x10, 0x39, 0x81]);
    switch_on(&mut client);
    assert_eq!(client.read(BAR1, 0, 4).unwrap(), [2, 0, 0, 0], "the first bytes of its address");
    let used = show(&daemon, "soft");
    assert_eq!(
        (&used["connections"], &used["traffic"]["reads"], &used["traffic"]["writes"]),
        (&1.into(), &2.into(), &1.into())
    );
    assert_eq!(used["vm"]["pid"], std::process::id());

    let refused = daemon.refused(&["pci", "remove", "soft"]);
    assert!(
        refused.contains("a guest is using the PCI function") && refused.contains("--force"),
        "{refused}"
    );
    let refused = daemon.refused(&["switch", "remove", "lan"]);
    assert!(refused.contains("is plugged into switch lan"), "{refused}");
    daemon.json(&["pci", "remove", "soft", "--force"]);
    assert!(client.read(CONFIG, 0, 4).is_err(), "its client has been cut off");
    assert!(!daemon.path("soft.sock").exists());
    assert!(daemon.refused(&["pci", "show", "soft"]).contains("there is no PCI function soft"));

    daemon.json(&["pci", "remove", "old"]);
    daemon.json(&["switch", "remove", "lan"]);
    assert_eq!(daemon.json(&["status"])["functions"], json!([]));
}

#[test]
fn a_restarted_daemon_has_the_same_functions() {
    let mut daemon = TestDaemon::open(config());
    daemon.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let lasting = |daemon: &TestDaemon| -> Vec<Value> {
        let all = daemon.json(&["status"])["functions"].as_array().unwrap().clone();
        let fields = ["name", "mode", "model", "mac", "switch", "origin", "socket", "state", "id"];
        all.iter().map(|one| fields.map(|field| one[field].clone()).into_iter().collect()).collect()
    };
    let before = lasting(&daemon);
    assert_eq!(before.len(), 2);
    let client = connect(&daemon, "own");
    daemon.kill9();
    daemon.start();
    daemon.until(|| lasting(&daemon) == before);
    drop(client);
    drop(connect(&daemon, "own"));
    daemon.json(&["pci", "remove", "soft"]);
    daemon.terminate();
    assert!(!daemon.path("own.sock").exists());
    daemon.start();
    assert_eq!(daemon.json(&["status"])["functions"].as_array().unwrap().len(), 1, "soft was removed");
    assert_eq!(daemon.json(&["reload"])["done"], json!(["PCI function soft added"]));
}

#[test]
fn a_configuration_that_is_read_again_changes_functions() {
    let daemon = TestDaemon::open(config());
    let client = connect(&daemon, "soft");
    let other = config().replace("rtl8139", "ne2000")
        + "[[pci]]\nname = \"new\"\nemulate = \"ne2000\"\nswitch = \"lan\"\n";
    daemon.configure(&other);
    let refused = daemon.refused(&["reload"]);
    // The line of what differs.
    assert!(refused.contains("ioplane.toml:7: PCI function soft: a guest is using it"), "{refused}");
    drop(client);
    daemon.until(|| show(&daemon, "soft")["connected"] == false);
    let done = daemon.json(&["reload"]);
    assert_eq!(done["done"], json!(["PCI function new added", "PCI function soft changed"]));
    assert_eq!(show(&daemon, "soft")["id"], "10ec:8029");
    daemon.configure("[[core]]\nnotify = \"notified\"\n");
    let done = daemon.json(&["reload"]);
    assert_eq!(
        done["done"],
        json!(["PCI function new removed", "PCI function soft removed", "switch lan removed"])
    );
}

/// What a guest does to a held function waits, and is done when it goes on.
#[test]
fn a_function_is_held_and_goes_on() {
    let daemon = TestDaemon::open(config());
    let mut client = connect(&daemon, "soft");
    switch_on(&mut client);
    let rest = daemon.json(&["pci", "quiesce", "soft", "--deadline", "5s"]);
    assert_eq!((&rest["drained"], &rest["name"]), (&true.into(), &"soft".into()));
    assert_eq!(rest["connected"], true);
    // A second client hears nothing, and the log says of which function it was.
    let second = std::os::unix::net::UnixStream::connect(daemon.path("soft.sock")).unwrap();
    let turned_away = |line: &str| line.contains("a second client was turned away") && line.contains("soft");
    daemon.until(|| daemon.log().lines().any(turned_away));
    drop(second);
    assert_eq!(show(&daemon, "soft")["stage"], "held");
    assert!(show(&daemon, "soft")["held_ms"].as_u64().unwrap() > 0);
    assert!(daemon.refused(&["pci", "quiesce", "soft"]).contains("soft is held already"));
    let reading = std::thread::spawn(move || {
        let byte = client.read(BAR1, 0, 1).unwrap();
        (Instant::now(), byte, client)
    });
    let shown = daemon.cli(&["pci", "show", "soft"]).out;
    assert!(shown.contains("held") && shown.contains("ioplane pci resume soft"), "{shown}");
    // As long as it is held the read does not come back, however long that takes.
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        assert!(!reading.is_finished(), "it did not wait");
        std::thread::sleep(Duration::from_millis(10));
    }
    let resumed = Instant::now();
    daemon.json(&["pci", "resume", "soft"]);
    let (at, byte, _client) = reading.join().unwrap();
    assert!(at >= resumed, "it waited");
    assert_eq!(byte, [2]);
    assert_eq!(daemon.json(&["pci", "resume", "soft"])["done"], json!(["soft was not held: nothing to do"]));
    assert_eq!(show(&daemon, "soft")["held_ms"], Value::Null);
}

#[test]
fn a_state_is_saved_and_loaded() {
    let daemon = TestDaemon::open(config());
    let file = daemon.path("soft.state").display().to_string();
    let mut client = connect(&daemon, "soft");
    switch_on(&mut client);
    // The multicast filter of an RTL8139: registers 8 to 15.
    let filter = [1, 2, 3, 4];
    client.write(BAR1, 8, &filter).unwrap();
    daemon.json(&["pci", "save", "soft", &file]);
    client.write(BAR1, 8, &[9; 4]).unwrap();
    daemon.json(&["pci", "load", "soft", &file]);
    assert_eq!(client.read(BAR1, 8, 4).unwrap(), filter);
    // The same while it is held; loading lets it go on.
    daemon.json(&["pci", "quiesce", "soft"]);
    daemon.json(&["pci", "save", "soft", &file]);
    assert_eq!(show(&daemon, "soft")["stage"], "held");
    daemon.json(&["pci", "load", "soft", &file]);
    assert_eq!(
        (&show(&daemon, "soft")["stage"], client.read(BAR1, 8, 4).unwrap()),
        (&"running".into(), filter.to_vec())
    );

    // What is no state of this function is refused, and it goes on as it was.
    daemon.json(&["pci", "add", "old", "--emulate", "ne2000", "--switch", "lan"]);
    let refused = daemon.refused(&["pci", "load", "old", &file]);
    assert!(refused.contains("saved by a rtl8139") && refused.contains("hint: "), "{refused}");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut state: Value = serde_json::from_str(&text).unwrap();
    state["body"] = "AAAA".into();
    assert_eq!(daemon.http("POST", "/v1/pci/soft/load", &state.to_string()).0, 409);
    state["format"] = "x".into();
    assert_eq!(daemon.http("POST", "/v1/pci/soft/load", &state.to_string()).0, 422);
    assert_eq!(daemon.http("POST", "/v1/pci/soft/load", &"x".repeat(3 << 20)).0, 413);
    assert_eq!(client.read(BAR1, 8, 4).unwrap(), filter);
    assert_eq!(show(&daemon, "soft")["stage"], "running");
}

/// Registers behind a socket.
struct Remote(VfioUserClient);

impl Reach for Remote {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        let (region, offset) = match at {
            RegisterAddress::Bar(bar, offset) => (u32::from(bar), offset),
            RegisterAddress::Config(offset) => (CONFIG, offset),
        };
        match op {
            Access::Read(bytes) => {
                let read =
                    self.0.read(region, offset, bytes.len() as u32).map_err(|error| error.to_string())?;
                bytes.copy_from_slice(&read);
            }
            Access::Write(bytes) => {
                self.0.write(region, offset, bytes).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }
}

const SOFT: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const OLD: [u8; 6] = [2, 0, 0, 0, 0, 0xb];

/// The guest with the NE2000.
fn old(daemon: &TestDaemon) -> Ne2k<Remote> {
    let mut old = Remote(connect(daemon, "old"));
    old.enable(false).unwrap();
    let mut ne2k = Ne2k::new(old);
    assert_eq!(ne2k.probe().unwrap(), OLD);
    ne2k.open(OLD).unwrap();
    ne2k
}

/// Two guests: one drives the RTL8139 by rings in its memory, the other the NE2000 by its ports.
struct Guests {
    cp: Cp<Remote>,
    ne2k: Ne2k<Remote>,
}

impl Guests {
    fn plug_in(daemon: &TestDaemon, memory: &mut GuestMemory) -> Guests {
        let mut client = connect(daemon, "soft");
        for region in memory.regions() {
            client.map(region.gpa, region.len, region.offset, Some(region.file())).unwrap();
        }
        let base = memory.alloc(Cp::<Remote>::MEMORY, 4096).unwrap();
        let mut soft = Remote(client);
        soft.enable(false).unwrap();
        let mut cp = Cp::new(soft, memory.view().clone(), base);
        cp.open(SOFT).unwrap();
        Guests { cp, ne2k: old(daemon) }
    }

    /// One frame there and one back.
    fn ping(&mut self, daemon: &TestDaemon, seed: u8) {
        let payload = |seed: u8| -> Vec<u8> { (0..100u8).map(|at| at ^ seed).collect() };
        let (there, back) = (frame(OLD, SOFT, &payload(seed)), frame(SOFT, OLD, &payload(!seed)));
        self.cp.xmit(&there, Cut::default()).unwrap();
        let end = Instant::now() + LIMIT;
        let came = loop {
            if let Some(came) = self.ne2k.interrupt().unwrap().0.pop() {
                break came;
            }
            let all = || (show(daemon, "soft"), show(daemon, "old"), daemon.log());
            assert!(Instant::now() < end, "no frame comes to the NE2000: {:#?}", all());
        };
        assert_eq!(came[..there.len()], there);
        self.ne2k.xmit(&back).unwrap();
        let came = loop {
            if let Some(came) = self.cp.poll().unwrap().pop() {
                break came.bytes;
            }
            assert!(Instant::now() < end, "no frame comes to the RTL8139");
        };
        assert_eq!(came[..back.len()], back);
        self.cp.reclaim().unwrap();
        self.ne2k.interrupt().unwrap();
    }
}

/// Frames go through the switch, and go on through a hold, a save and a load.
#[test]
fn guests_talk_by_emulated_nics() {
    let daemon = TestDaemon::open(config());
    daemon.json(&[
        "pci",
        "add",
        "old",
        "--emulate",
        "ne2000",
        "--switch",
        "lan",
        "--mac",
        "02:00:00:00:00:0b",
    ]);
    let mut memory = GuestMemory::new(4 << 20).unwrap();
    let mut guests = Guests::plug_in(&daemon, &mut memory);
    (0..5).for_each(|seed| guests.ping(&daemon, seed));
    let file = daemon.path("soft.state").display().to_string();
    for name in ["soft", "old"] {
        daemon.json(&["pci", "quiesce", name]);
        daemon.json(&["pci", "save", name, &file]);
        daemon.json(&["pci", "load", name, &file]);
        (0..5).for_each(|seed| guests.ping(&daemon, seed));
        daemon.json(&["pci", "quiesce", name]);
        daemon.json(&["pci", "resume", name]);
        (0..5).for_each(|seed| guests.ping(&daemon, seed));
    }
    let soft = show(&daemon, "soft");
    assert_eq!((&soft["chip"]["sent"], &soft["port"]["sent_frames"]), (&25.into(), &25.into()), "{soft}");
    assert_eq!((&soft["chip"]["received"], &soft["chip"]["wrong_dma"]), (&25.into(), &0.into()), "{soft}");
    assert_eq!(soft["traffic"]["memory_bytes"], 4 << 20);
    let old = show(&daemon, "old");
    assert_eq!((&old["chip"]["sent"], &old["chip"]["received"]), (&25.into(), &25.into()), "{old}");
    let text = daemon.cli(&["pci", "watch", "soft", "--for", "200ms"]).out;
    assert!(text.contains("sent ") && text.contains("received "), "{text}");
}

fn with_old(config: &str) -> TestDaemon {
    let daemon = TestDaemon::open(config);
    let old = ["--emulate", "ne2000", "--switch", "lan", "--mac", "02:00:00:00:00:0b"];
    daemon.json(&[&["pci", "add", "old"], &old[..]].concat());
    daemon
}

/// Asks for the function to come to rest, and answers what its client is told to write meanwhile, or refuses it. Says the answer, and
/// what was written where.
fn rest(
    daemon: &TestDaemon,
    client: &VfioUserClient,
    memory: &GuestMemory,
    refuses: bool,
) -> ((u16, Value), BTreeMap<u64, Vec<u8>>) {
    let mut written = BTreeMap::new();
    client.stream().set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let answer = std::thread::scope(|scope| {
        let form = json!({"deadline_ms": 2000, "guest_stopped": true}).to_string();
        let rest = scope.spawn(move || daemon.http("POST", "/v1/pci/soft/rest", &form));
        while !rest.is_finished() {
            if let Ok(Some((address, data))) = client.obey(memory.view(), refuses) {
                written.insert(address, data);
            }
        }
        rest.join().unwrap()
    });
    client.stream().set_read_timeout(Some(PATIENCE)).unwrap();
    (answer, written)
}

/// A guest with an emulated NIC goes on at another daemon: what the NIC has written while memory is copied is sent, and its state goes along.
#[test]
fn an_emulated_nic_goes_to_another_daemon() {
    let (here, there) = (with_old(config()), with_old(config()));
    let mut memory = GuestMemory::new(4 << 20).unwrap();
    let mut guests = Guests::plug_in(&here, &mut memory);
    (0..3).for_each(|seed| guests.ping(&here, seed));
    let post = |daemon: &TestDaemon, step: &str, body: &str| {
        daemon.http("POST", &format!("/v1/pci/soft/{step}"), body)
    };
    let form = json!({"deadline_ms": 2000, "guest_stopped": true}).to_string();
    for (method, step) in [("GET", "carried"), ("POST", "replay"), ("POST", "leave")] {
        let (code, answer) = here.http(method, &format!("/v1/pci/soft/{step}"), &form);
        assert_eq!((code, &answer["error"]), (409, &"soft: it runs".into()), "{step}");
    }
    // Nothing is sent of what is not logged; and it goes on here.
    let ((code, rested), written) = rest(&here, &guests.cp.reach.0, &memory, false);
    assert_eq!((code, &rested["pages_sent"], written.len()), (200, &Value::Null, 0), "{rested}");
    assert_eq!(post(&here, "replay", &form).0, 200);
    guests.ping(&here, 3);

    assert_eq!(post(&here, "log", "").0, 200);
    let copied = |memory: &GuestMemory| {
        let mut bytes = vec![0; 4 << 20];
        memory.view().read(memory.regions()[0].gpa, &mut bytes).unwrap();
        bytes
    };
    let mut copy = copied(&memory);
    (4..9).for_each(|seed| guests.ping(&here, seed));
    // A VMM that does not write is not believed to have done so: the same pages are named again.
    let ((code, refused), _) = rest(&here, &guests.cp.reach.0, &memory, true);
    let error = refused["error"].as_str().unwrap_or_default();
    assert!(code == 409 && error.contains("bus mastering is off"), "{code} {refused}");
    // Other functions of its VM may not be at rest yet.
    let unsent = json!({"deadline_ms": 2000, "guest_stopped": true, "unsent": true}).to_string();
    let (code, rested) = post(&here, "rest", &unsent);
    assert_eq!((code, &rested["pages_sent"]), (200, &Value::Null), "{rested}");
    let ((code, rested), written) = rest(&here, &guests.cp.reach.0, &memory, false);
    assert_eq!(code, 200, "{rested}");
    assert!(rested["pages_sent"].as_u64() >= Some(2), "a ring and buffers: {rested}");
    // Only the card stores in receive buffers: all of them have arrived by what was sent.
    let now = copied(&memory);
    let base = memory.regions()[0].gpa;
    let buffers = Cp::<Remote>::RX_BUFFERS;
    let buffers = buffers.start as usize..buffers.end as usize;
    assert_ne!(copy[buffers.clone()], now[buffers.clone()], "frames came meanwhile");
    for (address, data) in written {
        let at = (address - base) as usize;
        copy[at..at + data.len()].copy_from_slice(&data);
    }
    assert_eq!(copy[buffers.clone()], now[buffers]);

    let (code, carried) = here.http("GET", "/v1/pci/soft/carried", "");
    assert_eq!(
        (code, &carried["kind"], &carried["command"]),
        (200, &"rtl8139".into(), &7.into()),
        "{carried}"
    );
    let take = || there.http("PUT", "/v1/pci/soft/carried", &carried.to_string());
    assert_eq!(take().0, 409, "nobody is there");
    let mut client = connect(&there, "soft");
    for region in memory.regions() {
        client.map(region.gpa, region.len, region.offset, Some(region.file())).unwrap();
    }
    let (code, taken) = take();
    assert_eq!(
        (code, &taken["done"][0]),
        (200, &"soft has the state, and goes on from there".into()),
        "{taken}"
    );
    assert_eq!(post(&here, "leave", "").0, 200);
    assert_eq!(guests.cp.get(0x37, 1).unwrap() & 0xc, 0, "the former neither sends nor receives");
    let cp = guests.cp.map(|_| Remote(client));
    let mut guests = Guests { cp, ne2k: old(&there) };
    (9..14).for_each(|seed| guests.ping(&there, seed));
    assert_eq!(show(&here, "soft")["stage"], "running");
}

#[test]
fn a_function_at_rest_for_a_move_waits_to_be_told_and_not_for_a_vmm_that_has_left() {
    let daemon = TestDaemon::open(config());
    let mut client = connect(&daemon, "soft");
    switch_on(&mut client);
    let form = json!({"deadline_ms": 2000, "guest_stopped": true}).to_string();
    let rest = || daemon.http("POST", "/v1/pci/soft/rest", &form);
    // One that is held for a while would go on while the other host has it.
    assert_eq!(daemon.cli(&["pci", "quiesce", "soft"]).code, 0);
    let (code, refused) = rest();
    assert!(code == 409 && refused["error"] == "soft: it is held", "{refused}");
    assert_eq!(daemon.cli(&["pci", "resume", "soft"]).code, 0);
    assert_eq!(rest().0, 200);
    let shown = show(&daemon, "soft");
    assert_eq!((&shown["stage"], &shown["held_ms"]), (&"held".into(), &Value::Null));
    assert!(daemon.cli(&["pci", "show", "soft"]).out.contains("for a move of its VM"));
    assert_eq!(daemon.http("GET", "/v1/pci/soft/carried", "").0, 200);
    drop(client);
    daemon.until(|| show(&daemon, "soft")["stage"] == "running");
    let mut client = connect(&daemon, "soft");
    assert_eq!(client.read(CONFIG, 4, 2).unwrap(), [0, 0], "it was reset");
}

#[test]
fn a_function_is_watched() {
    let daemon = TestDaemon::open(config());
    let mut client = connect(&daemon, "soft");
    switch_on(&mut client);
    let watching = std::thread::spawn(daemon.later(&[
        "pci",
        "watch",
        "soft",
        "--json",
        "--interval",
        "200ms",
        "--for",
        "2s",
    ]));
    let end = Instant::now() + LIMIT;
    while !watching.is_finished() {
        client.read(BAR1, 0, 4).unwrap();
        assert!(Instant::now() < end);
    }
    let said = watching.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);
    let looks: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(looks.len() >= 5, "{}", said.out);
    assert!(looks.iter().all(|look| look["per_second"]["reads"].as_f64().unwrap() > 1.0), "{}", said.out);
    assert_eq!(looks[0]["function"]["name"], "soft");
    let text = daemon.cli(&["pci", "watch", "soft", "--interval", "100ms", "--for", "200ms"]).out;
    assert!(text.starts_with("running  reads 0/s writes 0/s"), "{text}");
    let list = daemon.cli(&["pci", "list"]).out;
    assert!(list.contains("rtl8139 on switch lan") && list.contains("in use"), "{list}");
    assert_eq!(daemon.json(&["pci", "list"])["functions"][0]["name"], "soft");
}

#[test]
fn bad_requests_have_the_right_codes() {
    let daemon = TestDaemon::open(config());
    let emulate = "{\"emulate\": \"ne2000\", \"switch\": \"lan\"}";
    for (method, path, body, wanted) in [
        ("GET", "/v1/pci/none", "", 404),
        ("DELETE", "/v1/pci/none", "", 404),
        ("POST", "/v1/pci/none/quiesce", "", 404),
        ("POST", "/v1/pci/none/resume", "", 404),
        ("GET", "/v1/pci/soft/resume", "", 405),
        ("PUT", "/v1/pci/soft", emulate, 409),
        ("PUT", "/v1/pci/x", "{}", 422),
        ("PUT", "/v1/pci/x", "{\"emulate\": \"ne2000\"}", 422),
        ("PUT", "/v1/pci/x", "{\"emulate\": \"ne2000\", \"switch\": \"wan\"}", 404),
        ("PUT", "/v1/pci/x", "{\"host\": \"ffff:00:05.0\"}", 404),
        ("PUT", "/v1/pci/x", "{\"host\": \"five\"}", 422),
        ("PUT", "/v1/pci/control", emulate, 409),
        ("POST", "/v1/pci/soft/quiesce", "{\"deadline\": 5}", 422),
        // What nobody uses goes nowhere.
        ("POST", "/v1/pci/soft/rest", "{\"deadline_ms\": 5, \"guest_stopped\": true}", 409),
        ("POST", "/v1/pci/soft/rest", "{\"deadline_ms\": 5000, \"guest_stopped\": true}", 422),
        ("POST", "/v1/pci/soft/rest", "{}", 422),
        ("POST", "/v1/pci/soft/log", "", 409),
        ("DELETE", "/v1/pci/none/log", "", 404),
        // It is saved whole: nothing of it goes ahead.
        ("GET", "/v1/pci/soft/ahead", "", 409),
        (
            "PUT",
            "/v1/pci/soft/ahead",
            "{\"format\": \"ioplane-said-function\", \"version\": 1, \"said\": \"\"}",
            409,
        ),
        ("PUT", "/v1/pci/soft/ahead", "{\"format\": \"x\"}", 422),
        ("PUT", "/v1/pci/none/ahead", "{\"format\": \"x\", \"version\": 1, \"said\": \"\"}", 404),
        ("DELETE", "/v1/pci/soft/ahead", "", 409),
        ("DELETE", "/v1/pci/none/ahead", "", 404),
        ("GET", "/v1/pci/soft/carried", "", 409),
        ("PUT", "/v1/pci/soft/carried", "{\"format\": \"x\"}", 422),
        ("POST", "/v1/pci/soft/replay", "{\"deadline_ms\": 5, \"guest_stopped\": true}", 409),
        ("POST", "/v1/pci/soft/leave", "", 409),
        ("PUT", "/v1/pci/soft/vectors", "{\"table\": [], \"deadline_ms\": 5, \"guest_stopped\": true}", 409),
        ("PUT", "/v1/pci/soft/vectors", "{\"table\": [], \"deadline_ms\": 5}", 409),
        ("PUT", "/v1/pci/soft/vectors", "{\"table\": [{}], \"deadline_ms\": 5}", 422),
        (
            "PUT",
            "/v1/pci/soft/vectors",
            "{\"table\": [], \"deadline_ms\": 5000, \"guest_stopped\": true}",
            422,
        ),
        ("POST", "/v1/pci/soft/set-up", "{\"deadline_ms\": 5, \"guest_stopped\": true}", 409),
        ("POST", "/v1/pci/none/set-up", "{\"deadline_ms\": 5}", 404),
        ("PUT", "/v1/pci/soft/stop", "{\"stop\": \"ask\"}", 409),
        ("PUT", "/v1/pci/soft/stop", "{\"stop\": \"halt\"}", 422),
        ("PUT", "/v1/pci/none/stop", "{\"stop\": \"free\"}", 404),
        ("POST", "/v1/pci/none/leave", "", 404),
        ("POST", "/v1/pci/soft/move/check", "{\"to\": \"0000:00:05.0\", \"deadline_ms\": 5}", 409),
        ("POST", "/v1/pci/soft/carried/check", "{\"settings\": {\"trust\": true}}", 409),
        ("POST", "/v1/pci/soft/carried/check", "{}", 422),
        ("POST", "/v1/pci/soft/carried/check", "{\"settings\": {\"trust\": 1}}", 422),
        ("POST", "/v1/pci/soft/carried/check", "{\"settings\": {\"vlan\": {\"id\": 70000}}}", 422),
        ("POST", "/v1/pci/soft/carried/check", "{\"settings\": {\"mac\": \"01:00:00:00:00:01\"}}", 422),
        ("POST", "/v1/pci/none/carried/check", "{\"settings\": {}}", 404),
        ("GET", "/v1/moves/web", "", 404),
        ("DELETE", "/v1/moves/web", "", 404),
        ("PUT", "/v1/moves/web", "{}", 422),
        ("PUT", "/v1/disks/soft", "{\"memory\": \"1M\"}", 409),
    ] {
        let (code, answer) = daemon.http(method, path, body);
        assert_eq!(code, wanted, "{method} {path} {body}: {answer}");
        for field in ["error", "remedy"] {
            assert!(answer[field].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}: {answer}");
        }
    }
    // Nothing is left of what was refused.
    assert_eq!(daemon.json(&["pci", "list"])["functions"].as_array().unwrap().len(), 1);
    assert_eq!(daemon.http("PUT", "/v1/pci/x", emulate).0, 201);
}

/// Who has a guest that moves is one line, which is never taken back, and outlives the daemon.
#[test]
fn a_guest_that_was_given_away_stays_so() {
    let mut daemon = TestDaemon::open(config());
    let note = |pid: u32, gone: bool| {
        let (there, guards) = ("/run/c.sock", [json!({ "node": "unmovable-soft", "file": "/run/u.vdi" })]);
        let function = json!({ "name": "soft", "direct": false, "place": [1, 0, 0], "id": "x", "kind": "10ec:8029", "command": 7, "pin": false });
        json!({
            "pid": pid, "gone": gone, "to": "tcp:c:4444", "qmp": "/run/a", "there": there, "qmp_there": "/run/b", "running": true,
            "paused_before": false, "downtime_limit": 300, "latch": 1, "guards": guards, "functions": [function],
        })
    };
    let put = |daemon: &TestDaemon, note: &Value| daemon.http("PUT", "/v1/moves/web", &note.to_string()).0;
    assert_eq!(put(&daemon, &note(7, false)), 200);
    assert_eq!(put(&daemon, &note(7, true)), 200);
    daemon.kill9();
    daemon.start();
    assert_eq!(daemon.http("GET", "/v1/moves/web", "").1, note(7, true));
    let (code, answer) = daemon.http("PUT", "/v1/moves/web", &note(7, false).to_string());
    assert_eq!(
        (code, answer["error"].as_str().unwrap().contains("is the other host's")),
        (409, true),
        "{answer}"
    );
    assert_eq!(daemon.http("GET", "/v1/moves/web", "").1["gone"], true);
    // Another VMM of that name has another guest.
    assert_eq!(put(&daemon, &note(8, false)), 200);
    let mut long = note(8, false);
    long["to"] = "x".repeat(5000).into();
    assert_eq!(put(&daemon, &long), 422);
    assert_eq!(daemon.http("DELETE", "/v1/moves/web", "").0, 200);
    assert_eq!(daemon.http("GET", "/v1/moves/web", "").0, 404);
}

#[test]
fn qemu_and_libvirt_are_told_what_they_need() {
    let daemon = TestDaemon::open(config());
    let folder = daemon.folder.path().display().to_string();
    let args = daemon.json(&["qemu-args", "soft", "--memory", "256M", "--qemu-version", "11.1"]);
    let args: Vec<String> = args["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| arg.as_str().unwrap().replace(&folder, "/run/ioplane"))
        .collect();
    assert_eq!(
        args,
        [
            "-object",
            "memory-backend-memfd,id=ioplane-memory,size=256M,share=on",
            "-machine",
            "memory-backend=ioplane-memory",
            "-blockdev",
            r#"{"driver":"vdi","file":{"driver":"file","filename":"/run/ioplane/unmovable.vdi"},"node-name":"unmovable-soft","read-only":true}"#,
            "-device",
            r#"{"driver":"vfio-user-pci","id":"ioplane-soft","socket":{"path":"/run/ioplane/soft.sock","type":"unix"},"x-msg-timeout":60000}"#,
        ]
    );
    assert!(daemon.path("unmovable.vdi").exists());
    let refused = daemon.refused(&["qemu-args", "soft", "--qemu-version", "7.2"]);
    assert!(
        refused.contains("QEMU 7.2 has no vfio-user-pci") && refused.contains("10.1 or later"),
        "{refused}"
    );

    let refused = daemon.refused(&["libvirt-xml", "soft", "--device-only"]);
    assert!(refused.contains("libvirt has no element for it"), "{refused}");
    let xml = daemon
        .cli(&["libvirt-xml", "soft", "--memory", "2G", "--qemu-version", "11.1", "--accel", "kvm"])
        .out;
    let golden =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/function.xml")).unwrap();
    assert_eq!(xml.replace(&folder, "/run/ioplane"), golden);
    let file = daemon.path("domain.xml");
    std::fs::write(&file, &xml).unwrap();
    let valid = std::process::Command::new("virt-xml-validate").arg(&file).arg("domain").output();
    let valid = valid.expect("virt-xml-validate: script/bootstrap --checks installs it");
    assert!(valid.status.success(), "{}\n{xml}", String::from_utf8_lossy(&valid.stderr));
}

#[test]
fn models_are_shown_and_drawn_without_a_daemon() {
    let daemon = TestDaemon::new("");
    let models = daemon.json(&["model", "list"]);
    let names: Vec<&str> =
        models.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["i82574", "ne2000", "rtl8139", "vf82576", "vf82599"]);
    for name in names {
        assert_eq!(daemon.json(&["model", "show", name])["name"], name);
        let text = daemon.cli(&["model", "show", name]).out;
        assert!(text.contains("region ") && text.contains("reusable"), "{text}");
        let svg = daemon.cli(&["model", "show", name, "--svg"]).out;
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg:.100}");
        assert!(daemon.cli(&["model", "show", name, "--dot"]).out.starts_with("digraph"));
    }
    let refused = daemon.refused(&["model", "show", "none"]);
    assert!(refused.contains("name one of i82574, ne2000, rtl8139, vf82576, vf82599"), "{refused}");
}

#[test]
fn metrics_have_functions() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let daemon = TestDaemon::open(&format!("[daemon]\nmetrics = \"127.0.0.1:{port}\"\n{}", config()));
    let mut client = connect(&daemon, "soft");
    client.read(CONFIG, 0, 4).unwrap();
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let text = daemon::http(stream, "GET", "/metrics", "").1;
    for line in [
        "ioplane_pci_connected{device=\"soft\"} 1",
        "ioplane_pci_info{device=\"soft\",mode=\"emulated\",model=\"rtl8139\"} 1",
        "ioplane_pci_reads_total{device=\"soft\"} 1",
        "ioplane_pci_failed{device=\"soft\"} 0",
        "ioplane_port_frames_total{switch=\"lan\",port=\"soft\",direction=\"sent\"} 0",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("ioplane_device_vm_info{device=\"soft\",kind=\"pci\""), "{text}");
}

#[test]
fn top_has_functions() {
    let daemon = TestDaemon::open(config());
    daemon.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let mut client = connect(&daemon, "soft");
    let (done, ends) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // A guest that reads all the time that top looks.
        scope.spawn(move || {
            while matches!(ends.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
                client.read(CONFIG, 0, 4).unwrap();
            }
        });
        let top = daemon.json(&["top", "--once", "--interval", "0.2"]);
        let all = top["functions"].as_array().unwrap();
        let names: Vec<&Value> = all.iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["own", "soft"], "{top}");
        let [own, soft] = [&all[0], &all[1]];
        assert_eq!((&own["mode"], &own["standing"]), (&"emulated".into(), &"waiting".into()));
        assert_eq!((&own["vm"], &own["accesses_per_s"]), (&Value::Null, &0.0.into()));
        assert_eq!((&soft["standing"], &soft["denied"]), (&"in use".into(), &Value::Null));
        assert!(soft["accesses_per_s"].as_f64().unwrap() >= 1.0 && soft["vm"].is_string(), "{top}");
        let text = daemon.cli(&["top", "--once", "--interval", "0.1"]).out;
        let row = text.lines().find(|line| line.starts_with("soft")).unwrap_or_default();
        assert!(text.contains("HOOKED %") && row.contains("emulated"), "{text}");
        drop(done);
    });
}

/// Functions are not handed over: an upgrade waits for their guests, and the successor has the same ones.
#[test]
fn an_upgrade_is_refused_while_a_function_is_used() {
    let daemon = TestDaemon::open(config());
    daemon.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let mut client = connect(&daemon, "soft");
    let refused = daemon.refused(&["upgrade"]);
    assert!(
        refused.contains("a guest is using PCI function soft")
            && refused.contains("hint: shut its guest down"),
        "{refused}"
    );
    client.read(CONFIG, 0, 4).unwrap();
    drop(client);
    daemon.until(|| show(&daemon, "soft")["connected"] == false);
    // One that cannot take over changes nothing.
    let refused = daemon.refused(&["upgrade", "--binary", "/bin/true"]);
    assert!(refused.contains("does not take over"), "{refused}");
    drop(connect(&daemon, "own"));
    daemon.until(|| show(&daemon, "own")["connected"] == false);
    let before = daemon.json(&["status"])["pid"].clone();
    let upgraded = daemon.json(&["upgrade"]);
    assert_ne!(upgraded["pid"], before);
    daemon.until(|| daemon.json(&["status"])["pid"] == upgraded["pid"]);
    daemon.until(|| {
        let all = daemon.json(&["status"])["functions"].as_array().unwrap().clone();
        all.len() == 2 && all.iter().all(|one| one["state"] == "served")
    });
    let mut client = connect(&daemon, "soft");
    assert_eq!(client.read(CONFIG, 0, 4).unwrap(), [0xec, 0x10, 0x39, 0x81]);
    assert_eq!(show(&daemon, "own")["origin"], "added");
    drop(client);
    daemon.kill_whoever_answers();
}

/// A NIC of each kind on one switch, and a virtual cable to the host: what is plugged in where is what was asked for.
#[test]
fn a_tap_of_its_own_is_a_cable() {
    let may = rustix::process::geteuid().is_root() && std::path::Path::new("/dev/net/tun").exists();
    if !may {
        let why = "SKIPPED: an emulated NIC on a TAP was NOT tested: it takes root and /dev/net/tun";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    }
    let mut daemon = TestDaemon::open(config());
    let tap = format!("p{}", std::process::id());
    let there = || std::path::Path::new("/sys/class/net").join(&tap).exists();
    let added = daemon.json(&["pci", "add", "wire", "--emulate", "rtl8139", "--tap", &tap]);
    assert_eq!((&added["tap"], &added["switch"]), (&tap.as_str().into(), &Value::Null));
    assert!(there());
    let mut client = connect(&daemon, "wire");
    switch_on(&mut client);
    assert_eq!(client.read(BAR0, 0, 1).unwrap().len(), 1);
    daemon.kill9();
    assert!(there(), "it stays, and with it its place in a bridge");
    daemon.start();
    daemon.until(|| show(&daemon, "wire")["state"] == "served");
    assert!(there());
    daemon.json(&["pci", "remove", "wire"]);
    assert!(!there());
}
