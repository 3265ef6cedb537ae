//! Switches and NICs of a real daemon: two front ends exchange frames over a switch.

mod daemon;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon::TestDaemon;
use ioplane_testkit::driver::net::{NetHeader, Pair, PairPlan, Sending};
use ioplane_testkit::driver::{GuestMemory, RingMode};
use ioplane_testkit::front::{FrontEnd, Wants};

const MIB: u64 = 1 << 20;
/// Longer than anything here takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(120);
const A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];

fn config() -> &'static str {
    "[[core]]\nnotify = \"notified\"\n[[core]]\nnotify = \"polled\"\n\
     [[switch]]\nname = \"lan\"\n\
     [[nic]]\nname = \"a\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\n\
     [[nic]]\nname = \"b\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0b\"\npairs = 2\n"
}

/// A guest's end of a NIC with one pair.
struct Guest {
    front: FrontEnd,
    pair: Pair,
    memory: GuestMemory,
}

impl Guest {
    fn plug_in(daemon: &TestDaemon, name: &str) -> Guest {
        Self::plug_in_as(daemon, name, 0, Sending::Together)
    }

    /// With more features.
    fn plug_in_as(daemon: &TestDaemon, name: &str, features: u64, sending: Sending) -> Guest {
        let features = Wants::default().features | 1 << 15 | features;
        let wants = Wants { features, ..Wants::default() };
        let front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), wants).unwrap();
        let mut memory = GuestMemory::new(8 * MIB).unwrap();
        let plan = PairPlan { sending, ..PairPlan::mergeable(RingMode::of(front.features())) };
        let pair = Pair::new(&mut memory, plan).unwrap();
        front.share(&memory).unwrap();
        let mut guest = Guest { front, pair, memory };
        guest.start();
        guest.pair.fill();
        guest.front.kick(0);
        guest
    }

    /// Starts both rings where the driver says that they are.
    fn start(&mut self) {
        let bases = [self.pair.rx().base(), self.pair.tx().base()];
        for (index, (place, base)) in (0..).zip(self.pair.places().into_iter().zip(bases)) {
            self.front.start(index, &self.memory, place, base).unwrap();
        }
    }

    /// The daemon has died and is there again: as QEMU does, which knows nothing but the used indexes.
    fn plug_in_again(&mut self, daemon: &TestDaemon, name: &str) {
        self.front.reconnect(&daemon.path(&format!("{name}.sock"))).unwrap();
        self.front.share(&self.memory).unwrap();
        self.start();
        for queue in 0..2 {
            self.front.kick(queue);
        }
    }

    /// The guest's driver sets the NIC up again.
    fn reset(&mut self) {
        for queue in 0..2 {
            self.front.stop(queue).unwrap();
        }
        self.pair.reset().unwrap();
        self.start();
        self.pair.fill();
        self.front.kick(0);
    }

    fn send(&mut self, to: [u8; 6], from: [u8; 6], payload: &[u8]) {
        let frame = [&to[..], &from[..], &[0x88, 0xb5], payload].concat();
        self.pair.reap().unwrap();
        assert!(self.pair.send(NetHeader::default(), &frame).unwrap(), "all slots are on their way");
        self.front.kick(1);
    }

    /// The payload of the next frame.
    fn receive(&mut self) -> Vec<u8> {
        let end = Instant::now() + LIMIT;
        loop {
            if self.pair.take_frame().unwrap().is_some() {
                let mut frame = Vec::new();
                self.pair.read_frame(&mut frame).unwrap();
                self.front.kick(0);
                return frame.split_off(14);
            }
            assert!(Instant::now() < end, "no frame comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn payload(seed: u8) -> Vec<u8> {
    (0..200u8).map(|at| at.wrapping_mul(3) ^ seed).collect()
}

/// `count` frames there and back.
fn talk(a: &mut Guest, b: &mut Guest, count: u8) {
    for seed in 0..count {
        a.send(B, A, &payload(seed));
        assert_eq!(b.receive(), payload(seed));
        b.send(A, B, &payload(!seed));
        assert_eq!(a.receive(), payload(!seed));
    }
}

fn port<'v>(switch: &'v serde_json::Value, name: &str) -> &'v serde_json::Value {
    switch["ports"].as_array().unwrap().iter().find(|port| port["name"] == name).unwrap()
}

#[test]
fn frames_cross_the_switch_and_are_counted() {
    let daemon = TestDaemon::open(config());
    let (mut a, mut b) = (Guest::plug_in(&daemon, "a"), Guest::plug_in(&daemon, "b"));
    talk(&mut a, &mut b, 20);
    // Whoever sends from the address of somebody else is not heard, and counted by name.
    a.send(B, B, &payload(0));
    a.send(B, A, &payload(1));
    assert_eq!(b.receive(), payload(1));

    let shown = daemon.json(&["switch", "show", "lan"]);
    assert_eq!(port(&shown, "a")["sent_frames"], 21, "{shown}");
    assert_eq!(port(&shown, "a")["sent_drops"]["spoofed"], 1, "{shown}");
    assert_eq!(port(&shown, "b")["received_frames"], 21, "{shown}");
    // Meters are published some milliseconds later.
    daemon.until(|| {
        let nics = daemon.json(&["nic", "list"]);
        nics[0]["queues"][1]["frames"] == 22 && nics[1]["queues"][0]["frames"] == 21
    });
    let nics = daemon.json(&["nic", "list"]);
    let (transmit, receive) = (&nics[0]["queues"][1], &nics[1]["queues"][0]);
    assert_eq!((&transmit["role"], &receive["role"]), (&"transmit".into(), &"receive".into()));
    assert_eq!(receive["frames"], 21, "{nics}");
    assert!(receive["bytes"].as_u64().unwrap() >= 21 * 214, "{nics}");
    assert_eq!(nics[0]["vm"]["pid"], std::process::id(), "{nics}");
    assert_eq!(nics[1]["queues"].as_array().unwrap().len(), 4, "two pairs");

    // A queue changes cores while its guest runs, and the link is pulled and plugged in.
    assert_eq!(daemon.json(&["core", "move", "b", "0", "1"])["queues"][0]["core"], 1);
    assert_eq!(daemon.json(&["core", "move", "a", "1", "1"])["queues"][1]["core"], 1);
    talk(&mut a, &mut b, 20);
    assert_eq!(daemon.json(&["nic", "set", "b", "--link", "down"])["link"], "down");
    a.send(B, A, &payload(2));
    let down = || daemon.json(&["switch", "show", "lan"]);
    daemon.until(|| {
        port(&down(), "a")["sent_drops"].as_object().unwrap().len() > 1
            || port(&down(), "b")["received_drops"].as_object().is_some_and(|drops| !drops.is_empty())
    });
    daemon.json(&["nic", "set", "b", "--link", "up"]);
    talk(&mut a, &mut b, 3);

    let top = daemon.json(&["top", "--once", "--interval", "0.2"]);
    assert_eq!(top["queues"].as_array().unwrap().len(), 6, "{top}");
    assert!(daemon.refused(&["nic", "remove", "a"]).contains("a guest is using"));
    assert!(daemon.refused(&["switch", "remove", "lan"]).contains("nic a is plugged into switch lan"));
    daemon.json(&["nic", "remove", "a", "--force"]);
    assert!(!daemon.path("a.sock").exists());
    assert!(!down()["ports"].as_array().unwrap().iter().any(|port| port["name"] == "a"), "unplugged");
}

#[test]
fn a_capture_has_every_frame_of_a_port() {
    let daemon = TestDaemon::open(config());
    let (mut a, mut b) = (Guest::plug_in(&daemon, "a"), Guest::plug_in(&daemon, "b"));
    let file = daemon.path("out.pcapng");
    let mut capture = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    capture.arg("--socket").arg(daemon.path("control.sock")).args(["capture", "a"]).arg(&file);
    let mut capture =
        capture.args(["--count", "10", "--json"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    daemon.until(|| file.exists());
    talk(&mut a, &mut b, 5);
    let status = capture.wait().unwrap();
    let mut said = String::new();
    std::io::Read::read_to_string(&mut capture.stdout.take().unwrap(), &mut said).unwrap();
    assert!(status.success());
    assert_eq!(serde_json::from_str::<serde_json::Value>(&said).unwrap()["frames"], 10);
    let read = Command::new("tcpdump").args(["-nexr"]).arg(&file).output();
    let read = read.expect("tcpdump: script/bootstrap --checks installs it");
    let text = String::from_utf8_lossy(&read.stdout).into_owned();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    assert_eq!(text.matches("02:00:00:00:00:0a > 02:00:00:00:00:0b").count(), 5, "{text}");
    assert_eq!(text.matches("02:00:00:00:00:0b > 02:00:00:00:00:0a").count(), 5, "{text}");
    assert!(daemon.refused(&["capture", "none", "/dev/null"]).contains("no switch has a port none"));
}

#[test]
fn nics_and_switches_come_and_go_and_stay() {
    let mut daemon = TestDaemon::open(config());
    let refused = daemon.refused(&["nic", "add", "c", "--switch", "wan"]);
    assert!(refused.contains("there is no switch wan") && refused.contains("switch add wan"), "{refused}");
    daemon.json(&["switch", "add", "wan"]);
    let added = daemon.json(&[
        "nic",
        "add",
        "c",
        "--switch",
        "wan",
        "--vlan",
        "trunk:20,10",
        "--isolated",
        "--mtu",
        "9000",
    ]);
    assert_eq!((&added["vlan"], &added["mtu"]), (&"trunk:10,20".into(), &9000.into()));
    let mac = added["mac"].as_str().unwrap().to_owned();
    assert!(mac.starts_with("02:"), "{mac}");
    assert!(daemon.refused(&["disk", "add", "c", "--memory", "1M"]).contains("nic c is there already"));
    daemon.json(&["core", "move", "c", "1", "1"]);
    daemon.json(&["nic", "set", "c", "--link", "down"]);
    daemon.json(&["nic", "remove", "b"]);

    daemon.kill9();
    daemon.start();
    let nics = daemon.json(&["nic", "list"]);
    let names: Vec<&str> = nics.as_array().unwrap().iter().map(|nic| nic["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "c"], "b was removed");
    assert_eq!(
        (&nics[1]["mac"], &nics[1]["link"], &nics[1]["state"]),
        (&mac.into(), &"down".into(), &"served".into())
    );

    // The configuration loses a switch with its NIC, gains another, and changes the link of the one that stays.
    daemon.configure(
        "[[core]]\nnotify = \"notified\"\n[[core]]\nnotify = \"polled\"\n[[switch]]\nname = \"lan\"\n\
         [[switch]]\nname = \"dmz\"\n[[nic]]\nname = \"d\"\nswitch = \"dmz\"\n\
         [[nic]]\nname = \"a\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0a\"\nlink = \"down\"\n",
    );
    let guest = Guest::plug_in(&daemon, "a");
    let done = daemon.json(&["reload"]);
    let done: Vec<&str> =
        done["done"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    assert_eq!(done, ["switch dmz set up", "nic d added", "nic a changed"]);
    assert_eq!(daemon.json(&["nic", "list"])[0]["link"], "down", "while its guest runs");
    drop(guest);
    daemon.configure("[[core]]\nnotify = \"notified\"\n[[core]]\nnotify = \"polled\"\n");
    daemon.until(|| daemon.json(&["nic", "list"])[0]["connected"] == false);
    daemon.json(&["reload"]);
    assert_eq!(daemon.json(&["nic", "list"]).as_array().unwrap().len(), 1, "c was added at run time");
    assert_eq!(daemon.json(&["switch", "list"]).as_array().unwrap().len(), 1);
    daemon.json(&["nic", "remove", "c"]);
    daemon.json(&["switch", "remove", "wan"]);
    assert_eq!(daemon.json(&["status"])["switches"].as_array().unwrap().len(), 0);
}

#[test]
fn qemu_is_told_what_it_needs() {
    let daemon = TestDaemon::open(config());
    let socket = |name: &str| daemon.path(&format!("{name}.sock")).display().to_string();
    let line =
        daemon.cli(&["qemu-args", "a", "--memory", "256M", "--qemu-version", "7.2", "--accel", "kvm"]).out;
    assert_eq!(
        line.trim(),
        format!(
            "-object memory-backend-memfd,id=ioplane-memory,size=256M,share=on -machine memory-backend=ioplane-memory \
             -chardev socket,id=ioplane-a-socket,path={},reconnect=1 \
             -netdev vhost-user,id=ioplane-a-netdev,chardev=ioplane-a-socket \
             -device virtio-net-pci,netdev=ioplane-a-netdev,id=ioplane-a,mac=02:00:00:00:00:0a,rx_queue_size=256,tx_queue_size=256",
            socket("a")
        )
    );
    let b = ["qemu-args", "b", "--device-only", "--qemu-version", "11.1", "--accel"];
    for (accel, vectors) in [("kvm", 6), ("tcg", 0)] {
        let line = daemon.cli(&[&b[..], &[accel]].concat()).out;
        let expected = format!(
            "-chardev socket,id=ioplane-b-socket,path={},reconnect-ms=100 \
             -netdev vhost-user,id=ioplane-b-netdev,chardev=ioplane-b-socket,queues=2 \
             -device virtio-net-pci,netdev=ioplane-b-netdev,id=ioplane-b,mac=02:00:00:00:00:0b,rx_queue_size=256,tx_queue_size=256,mq=on,vectors={vectors}",
            socket("b")
        );
        assert_eq!(line.trim(), expected);
    }
    assert!(
        daemon.refused(&["qemu-args", "none"]).contains("there is no disk, no nic and no PCI function none")
    );
}

#[test]
fn libvirt_gets_what_its_schema_allows() {
    let daemon = TestDaemon::open(config());
    daemon.json(&["disk", "add", "root", "--memory", "8M", "--queues", "2"]);
    daemon.json(&[
        "nic",
        "add",
        "jumbo",
        "--switch",
        "lan",
        "--mtu",
        "9000",
        "--pairs",
        "4",
        "--queue-size",
        "512",
    ]);
    let whole =
        daemon.cli(&["libvirt-xml", "root", "a", "b", "jumbo", "--memory", "2G", "--accel", "kvm"]).out;
    let golden = |file: &str| {
        std::fs::read_to_string(format!("{}/tests/golden/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let folder = daemon.folder.path().display().to_string();
    let jumbo = daemon.json(&["nic", "list"])[2]["mac"].as_str().unwrap().to_owned();
    let regular = |xml: &str| xml.replace(&folder, "/run/ioplane").replace(&jumbo, "02:00:00:00:00:0c");
    assert_eq!(regular(&whole), golden("domain.xml"));
    let emulated =
        daemon.cli(&["libvirt-xml", "root", "a", "jumbo", "--accel", "tcg", "--qemu", "/opt/q&a/qemu"]).out;
    assert_eq!(regular(&emulated), golden("domain-tcg.xml"));
    for xml in [&whole, &emulated] {
        let file = daemon.path("domain.xml");
        std::fs::write(&file, xml).unwrap();
        let valid = Command::new("virt-xml-validate").arg(&file).arg("domain").output();
        let valid = valid.expect("virt-xml-validate: script/bootstrap --checks installs it");
        assert!(valid.status.success(), "{}\n{xml}", String::from_utf8_lossy(&valid.stderr));
    }
    // A name is looked for in PATH: libvirt wants a path.
    let named = daemon.cli(&["libvirt-xml", "root", "--qemu", "sh"]).out;
    assert!(named.contains("/sh</emulator>") && !named.contains("<emulator>sh"), "{named}");
    let refused = daemon.refused(&["libvirt-xml", "root", "--qemu", "no-such-qemu"]);
    assert!(refused.contains("no program no-such-qemu in PATH"), "{refused}");
    let device = daemon.cli(&["libvirt-xml", "a", "--device-only", "--accel", "kvm"]).out;
    assert!(device.starts_with("<interface type='vhostuser'>") && !device.contains("<domain"), "{device}");
}

#[test]
fn sockets_are_for_whom_the_configuration_says() {
    use std::os::unix::fs::MetadataExt;
    let daemon = TestDaemon::open(&format!("[daemon]\nsocket_group = \"daemon\"\n{}", config()));
    let meta = std::fs::metadata(daemon.path("a.sock")).unwrap();
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let group = groups.lines().find(|line| line.starts_with("daemon:")).unwrap().split(':').nth(2).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.gid().to_string().as_str()), (0o660, group));
    let control = std::fs::metadata(daemon.path("control.sock")).unwrap();
    assert_eq!(control.mode() & 0o777, 0o600, "the control socket stays root's");
}

#[test]
fn metrics_have_nics_and_ports() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let one_core = config().replacen("[[core]]\nnotify = \"polled\"\n", "", 1);
    let daemon = TestDaemon::open(&format!("[daemon]\nmetrics = \"127.0.0.1:{port}\"\n{one_core}"));
    let (mut a, mut b) = (Guest::plug_in(&daemon, "a"), Guest::plug_in(&daemon, "b"));
    talk(&mut a, &mut b, 4);
    a.send(B, B, &payload(0));
    let text = || {
        let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        daemon::http(stream, "GET", "/metrics", "").1
    };
    daemon.until(|| text().contains("cause=\"spoofed\"} 1"));
    daemon.until(|| text().contains("ioplane_nic_frames_total{device=\"b\",queue=\"0\",role=\"receive\"} 4"));
    let text = text();
    for line in [
        "ioplane_port_frames_total{switch=\"lan\",port=\"a\",direction=\"sent\"} 4",
        "ioplane_port_drops_total{switch=\"lan\",port=\"a\",direction=\"sent\",cause=\"spoofed\"} 1",
        "ioplane_nic_up{device=\"a\"} 1",
        "ioplane_queue_info{device=\"b\",queue=\"0\",kind=\"nic\",core=\"0\"} 1",
        "ioplane_nic_wait_duration_seconds_count{device=\"b\",queue=\"1\",role=\"transmit\"} 4",
        &format!(
            "ioplane_device_vm_info{{device=\"a\",kind=\"nic\",vm=\"{}\",pid=\"{}\"}} 1",
            vm(),
            std::process::id()
        ),
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

/// How the daemon calls this process.
fn vm() -> String {
    let program = std::env::current_exe().unwrap();
    program.file_name().unwrap().to_string_lossy().into_owned()
}

/// Sends numbered frames from `a` and takes what has come at `b`, counting how often each has; for `time`, or until `b` has
/// frame `until`.
fn flow(a: &mut Guest, b: &mut Guest, came: &mut Vec<u8>, time: Duration, until: Option<usize>) {
    let end = Instant::now() + time;
    loop {
        a.pair.reap().unwrap();
        let number = came.len() as u32;
        let frame = [&B[..], &A[..], &[0x88, 0xb5], &number.to_le_bytes(), &payload(number as u8)].concat();
        if a.pair.send(NetHeader::default(), &frame).unwrap() {
            came.push(0);
        }
        a.front.kick(1);
        let mut bytes = Vec::new();
        while b.pair.take_frame().unwrap().is_some() {
            b.pair.read_frame(&mut bytes).unwrap();
            let (number, rest) = bytes[14..].split_first_chunk::<4>().unwrap();
            let number = u32::from_le_bytes(*number);
            assert_eq!(rest, payload(number as u8), "frame {number} is damaged");
            came[number as usize] += 1;
            if until.is_some_and(|until| number as usize >= until) {
                return;
            }
        }
        b.front.kick(0);
        if Instant::now() >= end {
            assert_eq!(until, None, "no frame comes any more");
            return;
        }
    }
}

/// What `flow` sent and the switch still holds reaches `b` after its driver has set the NIC up again, as on a wire. Frames of
/// one sender stay in order, so all of it has come when a frame sent now is there.
fn receive_what_waits(a: &mut Guest, b: &mut Guest) {
    let last = payload(0);
    a.send(B, A, &last);
    loop {
        let came = b.receive();
        if came == last {
            return;
        }
        let (number, rest) = came.split_first_chunk::<4>().unwrap();
        assert_eq!(rest, payload(number[0]), "frame {number:?} is damaged");
    }
}

/// A NIC has no journal. Frames on their way may be lost, or sent twice; a buffer that the guest has given comes back once
/// (the driver here refuses a second time), and none is kept.
#[test]
fn a_daemon_that_is_killed_in_the_middle_of_traffic_gives_every_buffer_back_once() {
    let mut daemon = TestDaemon::open(config());
    let (mut a, mut b) = (Guest::plug_in(&daemon, "a"), Guest::plug_in(&daemon, "b"));
    let mut came = Vec::new();
    for round in 0..10u64 {
        // Both ways to look at rings, and another moment each time.
        let mode = ["polled", "notified"][round as usize % 2];
        daemon.json(&["core", "mode", mode]);
        flow(&mut a, &mut b, &mut came, Duration::from_micros(20_000 + 3_711 * round), None);
        daemon.kill9();
        daemon.start();
        a.plug_in_again(&daemon, "a");
        b.plug_in_again(&daemon, "b");
        let fresh = came.len();
        flow(&mut a, &mut b, &mut came, LIMIT, Some(fresh));
    }
    daemon.until(|| {
        a.pair.reap().unwrap();
        while b.pair.take_frame().unwrap().is_some() {}
        b.front.kick(0);
        a.pair.sending() == 0
    });
    let buffers = PairPlan::mergeable(RingMode::of(0)).buffers;
    assert_eq!(b.pair.rx().in_flight(), buffers, "all are there to receive");
    let (lost, doubled) = (came.iter().filter(|n| **n == 0).count(), came.iter().filter(|n| **n > 1).count());
    println!("10 kills: {} frames, {lost} lost, {doubled} doubled", came.len());
    // What a ring can hold of frames that were sent and not shown as used, each time.
    assert!(doubled <= 10 * 256, "{doubled} doubled");
}

/// The fault of a NIC's queue, by name.
fn fault(daemon: &TestDaemon, name: &str, queue: usize) -> Option<String> {
    let status = daemon.json(&["status"]);
    let nic = status["nics"].as_array().unwrap().iter().find(|nic| nic["name"] == name).unwrap();
    nic["queues"][queue]["fault"]["name"].as_str().map(str::to_owned)
}

/// QEMU has no memory for a NIC's journal, and knows no place of a packed ring but the one where it was started. A queue that
/// has come further stops with a fault that says so: no frame is sent or received from the wrong place, no buffer given back
/// that was not meant. A queue that is still there goes on. The guest's driver sets the others up again.
#[test]
fn a_packed_nic_that_is_not_where_it_began_stops_by_name_when_its_daemon_dies() {
    const PACKED: u64 = 1 << 34;
    let (mut lost, mut counts) = (0, Vec::new());
    for round in 0..8u64 {
        let mut daemon = TestDaemon::open(config());
        let sending = [Sending::Together, Sending::Apart][round as usize % 2];
        let mut a = Guest::plug_in_as(&daemon, "a", PACKED, sending);
        let mut b = Guest::plug_in_as(&daemon, "b", PACKED, sending);
        assert!(a.front.features() & PACKED != 0);
        let mut came = Vec::new();
        // Within the first lap of the rings, about at its end, and some laps later.
        let wanted = [3, 100, 250, 256, 300, 515, 900, 1_500][round as usize];
        while came.len() < wanted || came.iter().all(|times| *times == 0) {
            flow(&mut a, &mut b, &mut came, Duration::from_micros(300), None);
        }
        daemon.kill9();
        let sent = came.len();
        daemon.start();
        a.plug_in_again(&daemon, "a");
        b.plug_in_again(&daemon, "b");
        // Whatever comes is checked: damaged frames, unknown buffers, buffers given back twice.
        flow(&mut a, &mut b, &mut came, Duration::from_millis(150), None);
        let faults = [fault(&daemon, "a", 1), fault(&daemon, "b", 0)];
        counts.push((sent, came.len() - sent, faults.clone()));
        for (fault, guest) in faults.iter().zip(["a", "b"]) {
            match fault.as_deref() {
                Some("lost_place") => lost += 1,
                // By chance it was where rings begin, and went on.
                None => println!("round {round}: {guest} goes on"),
                Some(other) => panic!("{guest}: {other}\n{}", daemon.log()),
            }
        }
        // The other queue of each has not moved.
        assert_eq!([fault(&daemon, "a", 0), fault(&daemon, "b", 1)], [None, None]);
        a.reset();
        b.reset();
        assert_eq!([fault(&daemon, "a", 1), fault(&daemon, "b", 0)], [None, None], "set up again");
        receive_what_waits(&mut a, &mut b);
        talk(&mut a, &mut b, 3);
        let doubled = came.iter().filter(|times| **times > 1).count();
        assert!(doubled <= 256, "{doubled} doubled");
    }
    println!("{counts:?}");
    // Descriptors do not always tell: most of 16 queues, on this machine 10 to 14. Without the check it is none.
    assert!(lost >= 4, "hardly any queue was beyond its beginning: {counts:?}");
}

/// Kinds of frames that a guest can send and should not.
const BAD_FRAMES: usize = 7;

/// Sends bad frames of one kind, more of them than there is room for. Returns whether there was room for any.
fn misbehave(c: &mut Guest, kind: usize) -> bool {
    const C: [u8; 6] = [2, 0, 0, 0, 0, 0xc];
    let frame = |to: [u8; 6], from: [u8; 6], len: usize| {
        let mut frame = [&to[..], &from[..], &[8, 0], &vec![0x45; len.saturating_sub(14)]].concat();
        frame.truncate(len);
        frame
    };
    let plain = NetHeader::default();
    let (header, frame) = match kind {
        0 => (plain, frame([0xff; 6], C, 60)),
        1 => (plain, frame(B, C, 9)),
        2 => (plain, frame(B, C, 65_600)),
        3 => (plain, frame(B, A, 60)),
        // Offloads that are none: past the end, of no kind that there is, segments of nothing.
        4 => (NetHeader { flags: 1, csum_start: 60_000, csum_offset: 4, ..plain }, frame(B, C, 60)),
        5 => (NetHeader { gso_type: 0x77, gso_size: 1000, ..plain }, frame(B, C, 3000)),
        _ => {
            (NetHeader { flags: 1, gso_type: 1, csum_start: 34, csum_offset: 16, ..plain }, frame(B, C, 3000))
        }
    };
    c.pair.reap().unwrap();
    let mut sent = false;
    while c.pair.send(header, &frame).unwrap() {
        sent = true;
    }
    c.front.kick(1);
    while c.pair.take_frame().unwrap().is_some() {}
    sent
}

/// The time that 99 of 100 frames from `a` need at most to `b`.
fn p99(a: &mut Guest, b: &mut Guest) -> Duration {
    let mut times: Vec<Duration> = (0..400u32)
        .map(|seed| {
            let begun = Instant::now();
            a.send(B, A, &payload(seed as u8));
            // What else comes is the neighbour's.
            let mut bytes = Vec::new();
            loop {
                if b.pair.take_frame().unwrap().is_some() {
                    b.pair.read_frame(&mut bytes).unwrap();
                    if bytes[6..12] == A && bytes.len() == 214 {
                        assert_eq!(bytes[14..], payload(seed as u8));
                        return begun.elapsed();
                    }
                }
                assert!(begun.elapsed() < LIMIT, "no frame comes");
                std::thread::yield_now();
            }
        })
        .collect();
    times.sort();
    times[times.len() * 99 / 100]
}

/// What one guest sends is its own harm: no frame of the others is lost or damaged beside it, each of its own is counted by cause.
/// How much slower they are is shown, and asserted by no test: two processors have the core, three guests and whatever else
/// runs here (`script/bench neighbour` has the goal).
#[test]
fn a_neighbour_that_sends_what_it_should_not_harms_nobody_else() {
    let daemon = TestDaemon::open(&format!(
        "{}[[nic]]\nname = \"c\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:0c\"\n",
        config()
    ));
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|name| Guest::plug_in(&daemon, name));
    daemon.json(&["core", "mode", "polled"]);
    talk(&mut a, &mut b, 20);
    let (over, hostile) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut ratios: Vec<f64> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sent = 0;
            loop {
                let over = over.load(Ordering::Acquire);
                // A busy machine may have left little time to be hostile in: each kind is sent at least once.
                if over && sent >= BAD_FRAMES {
                    break;
                }
                if (over || hostile.load(Ordering::Acquire)) && misbehave(&mut c, sent % BAD_FRAMES) {
                    sent += 1;
                }
                // Hostile to the switch, not to this machine's processors.
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let ratios = (0..5).map(|_| {
            let quiet = p99(&mut a, &mut b);
            hostile.store(true, Ordering::Release);
            let loud = p99(&mut a, &mut b);
            hostile.store(false, Ordering::Release);
            loud.as_secs_f64() / quiet.as_secs_f64()
        });
        let ratios = ratios.collect();
        over.store(true, Ordering::Release);
        ratios
    });
    ratios.sort_by(f64::total_cmp);
    println!("p99 beside a neighbour that misbehaves: {ratios:.1?} times the quiet one (goal: 2)");
    let show = || daemon.json(&["switch", "show", "lan"]);
    for cause in ["runt", "giant", "spoofed", "offload"] {
        daemon.until(|| port(&show(), "c")["sent_drops"][cause].as_u64() > Some(0));
    }
    let shown = show();
    assert_eq!(port(&shown, "a")["sent_drops"], serde_json::json!({}), "{shown}");
}

#[test]
fn a_guest_that_does_not_take_its_frames_is_explained() {
    let daemon = TestDaemon::open(config());
    let [mut a, _b] = ["a", "b"].map(|name| Guest::plug_in(&daemon, name));
    let over = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                a.pair.reap().unwrap();
                let frame = [&B[..], &A[..], &[0x88, 0xb5], &payload(1)].concat();
                while a.pair.send(NetHeader::default(), &frame).unwrap() {}
                a.front.kick(1);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let report = daemon.json(&["explain", "b", "--interval", "2s"]);
        over.store(true, Ordering::Release);
        report
    });
    let causes: Vec<_> =
        report["findings"].as_array().unwrap().iter().map(|finding| finding["cause"].clone()).collect();
    assert!(causes.contains(&"slow_receiver".into()), "{report}");
}

#[test]
fn nics_switches_and_uplinks_go_to_another_process_and_no_front_end_sees_it() {
    let uplink = rustix::process::geteuid().is_root() && std::path::Path::new("/dev/net/tun").exists();
    let tap = format!("iou{}", std::process::id() % 100_000);
    let config = if uplink {
        config().replace("name = \"lan\"", &format!("name = \"lan\"\nuplink = \"{tap}\""))
    } else {
        let why = "SKIPPED: handing over an uplink was NOT tested: it takes root and /dev/net/tun";
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{why}\n").as_bytes());
        config().to_owned()
    };
    let daemon = TestDaemon::open(&config);
    let (mut a, mut b) = (Guest::plug_in(&daemon, "a"), Guest::plug_in(&daemon, "b"));
    talk(&mut a, &mut b, 20);
    let pid = || daemon.json(&["status"])["pid"].as_u64().unwrap();
    for round in 1..=3 {
        // Heard by b, and by the host, whose side is down.
        a.send([0xff; 6], A, &payload(7));
        assert_eq!(b.receive(), payload(7));
        let before = pid();
        let report = daemon.json(&["upgrade", "--binary", env!("CARGO_BIN_EXE_ioplane")]);
        assert_ne!(pid(), before);
        let devices = report["devices"].as_array().unwrap();
        let names: Vec<_> = devices.iter().map(|device| device["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b"], "{report}");
        assert!(devices.iter().all(|device| device["pause_us"].as_u64().is_some()), "{report}");
        talk(&mut a, &mut b, 20);
        let shown = daemon.json(&["switch", "show", "lan"]);
        let frames = 20 + round * 21;
        daemon.until(|| port(&daemon.json(&["switch", "show", "lan"]), "b")["received_frames"] == frames);
        assert_eq!(port(&shown, "a")["sent_frames"], frames, "{shown}");
        if uplink {
            assert_eq!((&shown["uplink"], &shown["error"]), (&tap.as_str().into(), &().into()), "{shown}");
            let drops = &port(&shown, &tap)["received_drops"];
            assert_eq!(drops["down"], round, "{shown}");
        }
        for nic in daemon.json(&["nic", "list"]).as_array().unwrap() {
            assert_eq!((&nic["connections"], &nic["connected"]), (&1.into(), &true.into()), "{nic}");
        }
    }
    // It is a daemon like any other.
    daemon.json(&["nic", "add", "c", "--switch", "lan"]);
    daemon.json(&["nic", "remove", "c"]);
    daemon.json(&["reload"]);
    if uplink {
        let done = std::process::Command::new("ip").args(["link", "delete", &tap]).status().unwrap();
        assert!(done.success());
        let error = || daemon.json(&["switch", "show", "lan"])["error"].clone();
        daemon.until(|| error().as_str().is_some_and(|error| error.contains("has been deleted")));
        // It is no reason not to be upgraded.
        daemon.json(&["upgrade"]);
        daemon.until(|| error().as_str().is_some_and(|error| error.contains("has been deleted")));
        daemon.json(&["reload"]);
        assert_eq!(error(), serde_json::Value::Null, "it has been made anew");
        // It would stay.
        let _ = std::process::Command::new("ip").args(["link", "delete", &tap]).status();
    }
    daemon.kill_whoever_answers();
}
