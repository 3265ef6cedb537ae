//! PCI functions of a real daemon: emulated NICs on a switch, driven by a raw vfio-user client.

mod house;

use std::io::Write as _;
use std::time::{Duration, Instant};

use house::House;
use ioplane_device::{Access, RegisterAddress};
use ioplane_testkit::driver::GuestMemory;
use ioplane_testkit::nic::{Cp, Cut, Ne2k, Reach, frame};
use ioplane_testkit::vfio_user::Client;
use serde_json::{Value, json};

/// Longer than anything here takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);
/// Numbers of regions (`linux/vfio.h`).
const BAR0: u32 = 0;
const BAR1: u32 = 1;
const CONFIG: u32 = 7;

fn config() -> &'static str {
    "[[core]]\nnotify = \"notified\"\n[[switch]]\nname = \"lan\"\n\
     [[pci]]\nname = \"soft\"\nemulate = \"rtl8139\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n"
}

fn connect(house: &House, name: &str) -> Client {
    let client = Client::greet(&house.path(&format!("{name}.sock"))).unwrap();
    house.until(|| show(house, name)["connected"] == true);
    client
}

fn show(house: &House, name: &str) -> Value {
    house.json(&["pci", "show", name])
}

/// Memory and ports on, as a guest does first of all.
fn switch_on(client: &mut Client) {
    client.write(CONFIG, 4, &7u16.to_le_bytes()).unwrap();
}

#[test]
fn an_emulated_nic_is_added_used_and_removed() {
    let house = House::open(config());
    let added = house.json(&["pci", "add", "old", "--emulate", "ne2000", "--switch", "lan"]);
    assert_eq!(
        (&added["mode"], &added["model"], &added["id"]),
        (&"emulated".into(), &"ne2000".into(), &"10ec:8029".into())
    );
    assert_eq!(added["state"], "served");
    assert_eq!(added["socket"], house.path("old.sock").display().to_string());

    let before = show(&house, "soft");
    assert_eq!(
        (&before["connected"], &before["traffic"]["reads"], &before["id"]),
        (&false.into(), &0.into(), &"10ec:8139".into())
    );
    let mut client = connect(&house, "soft");
    assert_eq!(client.read(CONFIG, 0, 4).unwrap(), [0xec, 0x10, 0x39, 0x81]);
    switch_on(&mut client);
    assert_eq!(client.read(BAR1, 0, 4).unwrap(), [2, 0, 0, 0], "the first bytes of its address");
    let used = show(&house, "soft");
    assert_eq!(
        (&used["connections"], &used["traffic"]["reads"], &used["traffic"]["writes"]),
        (&1.into(), &2.into(), &1.into())
    );
    assert_eq!(used["vm"]["pid"], std::process::id());

    let refused = house.refused(&["pci", "remove", "soft"]);
    assert!(
        refused.contains("a guest is using the PCI function") && refused.contains("--force"),
        "{refused}"
    );
    let refused = house.refused(&["switch", "remove", "lan"]);
    assert!(refused.contains("is plugged into switch lan"), "{refused}");
    house.json(&["pci", "remove", "soft", "--force"]);
    assert!(client.read(CONFIG, 0, 4).is_err(), "its client has been cut off");
    assert!(!house.path("soft.sock").exists());
    assert!(house.refused(&["pci", "show", "soft"]).contains("there is no PCI function soft"));

    house.json(&["pci", "remove", "old"]);
    house.json(&["switch", "remove", "lan"]);
    assert_eq!(house.json(&["status"])["functions"], json!([]));
}

#[test]
fn a_restarted_daemon_has_the_same_functions() {
    let mut house = House::open(config());
    house.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let lasting = |house: &House| -> Vec<Value> {
        let all = house.json(&["status"])["functions"].as_array().unwrap().clone();
        let fields = ["name", "mode", "model", "mac", "switch", "origin", "socket", "state", "id"];
        all.iter().map(|one| fields.map(|field| one[field].clone()).into_iter().collect()).collect()
    };
    let before = lasting(&house);
    assert_eq!(before.len(), 2);
    let client = connect(&house, "own");
    house.kill9();
    house.start();
    house.until(|| lasting(&house) == before);
    drop(client);
    drop(connect(&house, "own"));
    house.json(&["pci", "remove", "soft"]);
    house.terminate();
    assert!(!house.path("own.sock").exists());
    house.start();
    assert_eq!(house.json(&["status"])["functions"].as_array().unwrap().len(), 1, "soft was removed");
    assert_eq!(house.json(&["reload"])["done"], json!(["PCI function soft added"]));
}

#[test]
fn a_configuration_that_is_read_again_changes_functions() {
    let house = House::open(config());
    let client = connect(&house, "soft");
    let other = config().replace("rtl8139", "ne2000")
        + "[[pci]]\nname = \"new\"\nemulate = \"ne2000\"\nswitch = \"lan\"\n";
    house.configure(&other);
    let refused = house.refused(&["reload"]);
    // The line of what differs.
    assert!(refused.contains("ioplane.toml:7: PCI function soft: a guest is using it"), "{refused}");
    drop(client);
    house.until(|| show(&house, "soft")["connected"] == false);
    let done = house.json(&["reload"]);
    assert_eq!(done["done"], json!(["PCI function new added", "PCI function soft changed"]));
    assert_eq!(show(&house, "soft")["id"], "10ec:8029");
    house.configure("[[core]]\nnotify = \"notified\"\n");
    let done = house.json(&["reload"]);
    assert_eq!(
        done["done"],
        json!(["PCI function new removed", "PCI function soft removed", "switch lan removed"])
    );
}

/// What a guest does to a held function waits, and is done when it goes on.
#[test]
fn a_function_is_held_and_goes_on() {
    let house = House::open(config());
    let mut client = connect(&house, "soft");
    switch_on(&mut client);
    let rest = house.json(&["pci", "quiesce", "soft", "--deadline", "5s"]);
    assert_eq!((&rest["drained"], &rest["name"]), (&true.into(), &"soft".into()));
    assert_eq!(show(&house, "soft")["stage"], "held");
    assert!(show(&house, "soft")["held_ms"].as_u64().unwrap() > 0);
    assert!(house.refused(&["pci", "quiesce", "soft"]).contains("soft is held already"));
    let reading = std::thread::spawn(move || {
        let byte = client.read(BAR1, 0, 1).unwrap();
        (Instant::now(), byte, client)
    });
    let shown = house.cli(&["pci", "show", "soft"]).out;
    assert!(shown.contains("held") && shown.contains("ioplane pci resume soft"), "{shown}");
    // As long as it is held the read does not come back, however long that takes.
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        assert!(!reading.is_finished(), "it did not wait");
        std::thread::sleep(Duration::from_millis(10));
    }
    let resumed = Instant::now();
    house.json(&["pci", "resume", "soft"]);
    let (at, byte, _client) = reading.join().unwrap();
    assert!(at >= resumed, "it waited");
    assert_eq!(byte, [2]);
    assert_eq!(house.json(&["pci", "resume", "soft"])["done"], json!(["soft was not held: nothing to do"]));
    assert_eq!(show(&house, "soft")["held_ms"], Value::Null);
}

#[test]
fn a_state_is_saved_and_loaded() {
    let house = House::open(config());
    let file = house.path("soft.state").display().to_string();
    let mut client = connect(&house, "soft");
    switch_on(&mut client);
    // The multicast filter of an RTL8139: registers 8 to 15.
    let filter = [1, 2, 3, 4];
    client.write(BAR1, 8, &filter).unwrap();
    house.json(&["pci", "save", "soft", &file]);
    client.write(BAR1, 8, &[9; 4]).unwrap();
    house.json(&["pci", "load", "soft", &file]);
    assert_eq!(client.read(BAR1, 8, 4).unwrap(), filter);
    // The same while it is held; loading lets it go on.
    house.json(&["pci", "quiesce", "soft"]);
    house.json(&["pci", "save", "soft", &file]);
    assert_eq!(show(&house, "soft")["stage"], "held");
    house.json(&["pci", "load", "soft", &file]);
    assert_eq!(
        (&show(&house, "soft")["stage"], client.read(BAR1, 8, 4).unwrap()),
        (&"running".into(), filter.to_vec())
    );

    // What is no state of this function is refused, and it goes on as it was.
    house.json(&["pci", "add", "old", "--emulate", "ne2000", "--switch", "lan"]);
    let refused = house.refused(&["pci", "load", "old", &file]);
    assert!(refused.contains("saved by a rtl8139") && refused.contains("to do: "), "{refused}");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut state: Value = serde_json::from_str(&text).unwrap();
    state["body"] = "AAAA".into();
    assert_eq!(house.http("POST", "/v1/pci/soft/load", &state.to_string()).0, 409);
    state["format"] = "x".into();
    assert_eq!(house.http("POST", "/v1/pci/soft/load", &state.to_string()).0, 422);
    assert_eq!(house.http("POST", "/v1/pci/soft/load", &"x".repeat(3 << 20)).0, 413);
    assert_eq!(client.read(BAR1, 8, 4).unwrap(), filter);
    assert_eq!(show(&house, "soft")["stage"], "running");
}

/// Registers behind a socket.
struct Remote(Client);

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

/// Two guests: one drives the RTL8139 by rings in its memory, the other the NE2000 by its ports.
struct Guests {
    cp: Cp<Remote>,
    ne2k: Ne2k<Remote>,
}

impl Guests {
    fn plug_in(house: &House, memory: &mut GuestMemory) -> Guests {
        let mut client = connect(house, "soft");
        for region in memory.regions() {
            client.map(region.gpa, region.len, region.offset, Some(region.file())).unwrap();
        }
        let base = memory.alloc(Cp::<Remote>::MEMORY, 4096).unwrap();
        let mut soft = Remote(client);
        soft.enable(false).unwrap();
        let mut cp = Cp::new(soft, memory.view().clone(), base);
        cp.open(SOFT).unwrap();
        let mut old = Remote(connect(house, "old"));
        old.enable(false).unwrap();
        let mut ne2k = Ne2k::new(old);
        assert_eq!(ne2k.probe().unwrap(), OLD);
        ne2k.open(OLD).unwrap();
        Guests { cp, ne2k }
    }

    /// One frame there and one back.
    fn ping(&mut self, house: &House, seed: u8) {
        let payload = |seed: u8| -> Vec<u8> { (0..100u8).map(|at| at ^ seed).collect() };
        let (there, back) = (frame(OLD, SOFT, &payload(seed)), frame(SOFT, OLD, &payload(!seed)));
        self.cp.xmit(&there, Cut::default()).unwrap();
        let end = Instant::now() + LIMIT;
        let came = loop {
            if let Some(came) = self.ne2k.interrupt().unwrap().0.pop() {
                break came;
            }
            let all = || (show(house, "soft"), show(house, "old"), house.log());
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
    let house = House::open(config());
    house.json(&[
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
    let mut guests = Guests::plug_in(&house, &mut memory);
    (0..5).for_each(|seed| guests.ping(&house, seed));
    let file = house.path("soft.state").display().to_string();
    for name in ["soft", "old"] {
        house.json(&["pci", "quiesce", name]);
        house.json(&["pci", "save", name, &file]);
        house.json(&["pci", "load", name, &file]);
        (0..5).for_each(|seed| guests.ping(&house, seed));
        house.json(&["pci", "quiesce", name]);
        house.json(&["pci", "resume", name]);
        (0..5).for_each(|seed| guests.ping(&house, seed));
    }
    let soft = show(&house, "soft");
    assert_eq!((&soft["chip"]["sent"], &soft["port"]["sent_frames"]), (&25.into(), &25.into()), "{soft}");
    assert_eq!((&soft["chip"]["received"], &soft["chip"]["wrong_dma"]), (&25.into(), &0.into()), "{soft}");
    assert_eq!(soft["traffic"]["memory_bytes"], 4 << 20);
    let old = show(&house, "old");
    assert_eq!((&old["chip"]["sent"], &old["chip"]["received"]), (&25.into(), &25.into()), "{old}");
    let text = house.cli(&["pci", "watch", "soft", "--for", "200ms"]).out;
    assert!(text.contains("sent ") && text.contains("received "), "{text}");
}

#[test]
fn a_function_is_watched() {
    let house = House::open(config());
    let mut client = connect(&house, "soft");
    switch_on(&mut client);
    let watching = std::thread::spawn(house.later(&[
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
    let text = house.cli(&["pci", "watch", "soft", "--interval", "100ms", "--for", "200ms"]).out;
    assert!(text.starts_with("running  reads 0/s writes 0/s"), "{text}");
    let list = house.cli(&["pci", "list"]).out;
    assert!(list.contains("rtl8139 on switch lan") && list.contains("in use"), "{list}");
    assert_eq!(house.json(&["pci", "list"])["functions"][0]["name"], "soft");
}

#[test]
fn bad_requests_have_the_right_codes() {
    let house = House::open(config());
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
        ("PUT", "/v1/disks/soft", "{\"memory\": \"1M\"}", 409),
    ] {
        let (code, answer) = house.http(method, path, body);
        assert_eq!(code, wanted, "{method} {path} {body}: {answer}");
        for field in ["error", "remedy"] {
            assert!(answer[field].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}: {answer}");
        }
    }
    // Nothing is left of what was refused.
    assert_eq!(house.json(&["pci", "list"])["functions"].as_array().unwrap().len(), 1);
    assert_eq!(house.http("PUT", "/v1/pci/x", emulate).0, 201);
}

#[test]
fn qemu_and_libvirt_are_told_what_they_need() {
    let house = House::open(config());
    let folder = house.folder.path().display().to_string();
    let args = house.json(&["qemu-args", "soft", "--memory", "256M", "--qemu-version", "11.1"]);
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
    assert!(house.path("unmovable.vdi").exists());
    let refused = house.refused(&["qemu-args", "soft", "--qemu-version", "7.2"]);
    assert!(
        refused.contains("QEMU 7.2 has no vfio-user-pci") && refused.contains("10.1 or later"),
        "{refused}"
    );

    let refused = house.refused(&["libvirt-xml", "soft", "--device-only"]);
    assert!(refused.contains("libvirt has no element for it"), "{refused}");
    let xml = house.cli(&["libvirt-xml", "soft", "--memory", "2G", "--qemu-version", "11.1"]).out;
    let golden =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/function.xml")).unwrap();
    assert_eq!(xml.replace(&folder, "/run/ioplane"), golden);
    let file = house.path("domain.xml");
    std::fs::write(&file, &xml).unwrap();
    let valid = std::process::Command::new("virt-xml-validate").arg(&file).arg("domain").output();
    let valid = valid.expect("virt-xml-validate: script/bootstrap --checks installs it");
    assert!(valid.status.success(), "{}\n{xml}", String::from_utf8_lossy(&valid.stderr));
}

#[test]
fn models_are_shown_and_drawn_without_a_daemon() {
    let house = House::new("");
    let models = house.json(&["model", "list"]);
    let names: Vec<&str> =
        models.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ne2000", "rtl8139"]);
    for name in names {
        assert_eq!(house.json(&["model", "show", name])["name"], name);
        let text = house.cli(&["model", "show", name]).out;
        assert!(text.contains("region ") && text.contains("reusable"), "{text}");
        let svg = house.cli(&["model", "show", name, "--svg"]).out;
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg:.100}");
        assert!(house.cli(&["model", "show", name, "--dot"]).out.starts_with("digraph"));
    }
    assert!(house.refused(&["model", "show", "none"]).contains("name one of ne2000, rtl8139"));
}

#[test]
fn metrics_have_functions() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let house = House::open(&format!("[daemon]\nmetrics = \"127.0.0.1:{port}\"\n{}", config()));
    let mut client = connect(&house, "soft");
    client.read(CONFIG, 0, 4).unwrap();
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let text = house::http(stream, "GET", "/metrics", "").1;
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
    let house = House::open(config());
    house.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let mut client = connect(&house, "soft");
    let (done, ends) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // A guest that reads all the time that top looks.
        scope.spawn(move || {
            while matches!(ends.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
                client.read(CONFIG, 0, 4).unwrap();
            }
        });
        let top = house.json(&["top", "--once", "--interval", "0.2"]);
        let all = top["functions"].as_array().unwrap();
        let names: Vec<&Value> = all.iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["own", "soft"], "{top}");
        let [own, soft] = [&all[0], &all[1]];
        assert_eq!((&own["mode"], &own["standing"]), (&"emulated".into(), &"waiting".into()));
        assert_eq!((&own["vm"], &own["accesses_per_s"]), (&Value::Null, &0.0.into()));
        assert_eq!((&soft["standing"], &soft["denied"]), (&"in use".into(), &Value::Null));
        assert!(soft["accesses_per_s"].as_f64().unwrap() >= 1.0 && soft["vm"].is_string(), "{top}");
        let text = house.cli(&["top", "--once", "--interval", "0.1"]).out;
        let row = text.lines().find(|line| line.starts_with("soft")).unwrap_or_default();
        assert!(text.contains("HOOKED %") && row.contains("emulated"), "{text}");
        drop(done);
    });
}

/// Functions are not handed over: an upgrade waits for their guests, and the successor has the same ones.
#[test]
fn an_upgrade_is_refused_while_a_function_is_used() {
    let house = House::open(config());
    house.json(&["pci", "add", "own", "--emulate", "ne2000", "--switch", "lan"]);
    let mut client = connect(&house, "soft");
    let refused = house.refused(&["upgrade"]);
    assert!(
        refused.contains("a guest is using PCI function soft")
            && refused.contains("to do: shut its guest down"),
        "{refused}"
    );
    client.read(CONFIG, 0, 4).unwrap();
    drop(client);
    house.until(|| show(&house, "soft")["connected"] == false);
    // One that cannot take over changes nothing.
    let refused = house.refused(&["upgrade", "--binary", "/bin/true"]);
    assert!(refused.contains("does not take over"), "{refused}");
    drop(connect(&house, "own"));
    house.until(|| show(&house, "own")["connected"] == false);
    let before = house.json(&["status"])["pid"].clone();
    let upgraded = house.json(&["upgrade"]);
    assert_ne!(upgraded["pid"], before);
    house.until(|| house.json(&["status"])["pid"] == upgraded["pid"]);
    house.until(|| {
        let all = house.json(&["status"])["functions"].as_array().unwrap().clone();
        all.len() == 2 && all.iter().all(|one| one["state"] == "served")
    });
    let mut client = connect(&house, "soft");
    assert_eq!(client.read(CONFIG, 0, 4).unwrap(), [0xec, 0x10, 0x39, 0x81]);
    assert_eq!(show(&house, "own")["origin"], "added");
    drop(client);
    house.kill_whoever_answers();
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
    let mut house = House::open(config());
    let tap = format!("p{}", std::process::id());
    let there = || std::path::Path::new("/sys/class/net").join(&tap).exists();
    let added = house.json(&["pci", "add", "wire", "--emulate", "rtl8139", "--tap", &tap]);
    assert_eq!((&added["tap"], &added["switch"]), (&tap.as_str().into(), &Value::Null));
    assert!(there());
    let mut client = connect(&house, "wire");
    switch_on(&mut client);
    assert_eq!(client.read(BAR0, 0, 1).unwrap().len(), 1);
    house.kill9();
    assert!(there(), "it stays, and with it its place in a bridge");
    house.start();
    house.until(|| show(&house, "wire")["state"] == "served");
    assert!(there());
    house.json(&["pci", "remove", "wire"]);
    assert!(!there());
}
