//! `ioplane move vm` between hosts that know each other by their certificates. Both QEMUs are played by the test.

mod daemon;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use daemon::identities::{done, identity, member};
use daemon::moving::{BAR1, BASE, CONFIG_SPACE, LATCH, SET, World, changes, is_brought_to_its_end};
use daemon::{TestDaemon, http};
use serde_json::{Value, json};

/// The way between two hosts, which a test cuts.
#[derive(Clone, Default)]
struct Cable(Arc<Mutex<(bool, Vec<TcpStream>)>>);

impl Cable {
    /// Carries connections to that port of loopback; says at which port it takes them.
    fn lay(&self, to: u16) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cable = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut state = cable.0.lock().unwrap();
                if state.0 {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                for (from, into) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                    state.1.push(from.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut into);
                        let _ = into.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        port
    }

    fn cut(&self) {
        let mut state = self.0.lock().unwrap();
        state.0 = true;
        for stream in state.1.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.0.lock().unwrap().0 = false;
    }
}

fn expected(world: &World) -> Vec<Value> {
    world.there.json(&["move", "expected"]).as_array().unwrap().clone()
}

/// A world in which the VM is expected.
fn expecting() -> (World, Cable) {
    let cable = Cable::default();
    let world = World::over_tls(|port| cable.lay(port));
    assert_eq!(expected(&world), Vec::<Value>::new());
    let said = world.is_expected(&[]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.err.contains("then, on host-b: ioplane move vm"), "{}", said.err);
    (world, cable)
}

/// The other daemon and the monitor there, as sockets here.
fn peer(world: &World) -> (PathBuf, PathBuf) {
    let name = world.near().name.clone();
    let form = json!({ "host": "127.0.0.1", "port": world.ports.unwrap().1, "tls_hostname": "host-c" });
    let (status, said) = world.here.http("PUT", &format!("/v1/moves/{name}/peer"), &form.to_string());
    assert_eq!(status, 200, "{said}");
    let path = |field: &str| PathBuf::from(said[field].as_str().unwrap());
    (path("there"), path("qmp_there"))
}

/// The monitor there, from here.
struct FarMonitor(BufReader<UnixStream>);

impl FarMonitor {
    fn open(world: &World) -> FarMonitor {
        let stream = UnixStream::connect(peer(world).1).unwrap();
        stream.set_read_timeout(Some(daemon::LIMIT)).unwrap();
        let mut monitor = FarMonitor(BufReader::new(stream));
        assert!(monitor.line().contains("QMP"));
        monitor
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    fn says(&mut self, line: &str) -> String {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.line()
    }

    fn asks(&mut self, command: &str, arguments: Value) -> Value {
        let line = self.says(&json!({ "execute": command, "arguments": arguments, "id": 7 }).to_string());
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{command}: {error}: {line:?}"))
    }

    fn human(&mut self, line: &str) -> Value {
        self.asks("human-monitor-command", json!({ "command-line": line }))
    }
}

#[test]
fn a_vm_moves_to_a_host_that_expects_it() {
    let (world, _) = expecting();
    let all = expected(&world);
    assert_eq!((&all[0]["from"], &all[0]["state"], all.len()), (&json!("host-b"), &json!("expected"), 1));
    assert_eq!(all[0]["pid"], std::process::id());
    // The same again only begins its time anew; anything else is another one.
    assert_eq!(world.is_expected(&["--for", "10m"]).code, 0);
    let left = expected(&world)[0]["left_s"].as_u64().unwrap();
    assert!((1..=600).contains(&left), "{left}");
    let name = world.near().name.clone();
    let qmp = world.folder.path().join("there").display().to_string();
    let said = world.there.refused(&["move", "expect", &name, "--from", "host-d", "--qmp", &qmp]);
    assert!(said.contains("is expected already"), "{said}");

    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("nic0, emulated: "), "{}", said.out);
    assert!(world.has_one_owner("moved"));
    let bar = world.far().client.read(CONFIG_SPACE, BAR1, 4).unwrap();
    assert_eq!((bar, world.far().latch), (BASE.to_le_bytes().to_vec(), LATCH));
    // Once: nobody listens any more, and nothing is left here.
    assert_eq!(expected(&world), Vec::<Value>::new());
    assert!(TcpStream::connect(("127.0.0.1", world.ports.unwrap().0)).is_err());
    let left = std::fs::read_dir(world.here.folder.path()).unwrap().flatten();
    let left: Vec<_> = left
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with("move-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let log = world.there.log();
    for words in ["a VM is expected", "its move here has begun", "it has arrived", "has come to its end"] {
        assert!(log.contains(words), "{words}: {log}");
    }
    // All connections were closed, and none was lost.
    let log = world.here.log();
    assert!(!log.contains("WARN"), "{log}");
}

#[test]
fn a_guest_that_is_paused_moves_too() {
    let (world, _) = expecting();
    world.near().state = "paused";
    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!((world.far().state, expected(&world).len()), ("paused", 0));
}

/// Refused before anything is done, with these words.
fn is_refused(world: &World, words: &str) {
    is_refused_by_one_of(world, &[words]);
}

/// The same, with words of either sort.
fn is_refused_by_one_of(world: &World, either: &[&str]) {
    let said = world.moves([None, None]);
    let words = either[0];
    assert!(said.code != 0 && either.iter().any(|words| said.err.contains(words)), "{words}: {}", said.err);
    let near = world.near();
    let touched = ["blockdev-del", "stop", "migrate"];
    assert!(!near.asked.iter().any(|asked| touched.contains(&asked.as_str())), "{:?}", near.asked);
    drop(near);
    assert!(!world.has_one_owner(words), "{words}");
}

#[test]
fn only_the_host_that_was_named_moves_the_vm_that_was_named() {
    let cable = Cable::default();
    let world = World::over_tls(|port| cable.lay(port));
    // Nobody listens.
    is_refused(&world, "only while a VM is expected");
    // A monitor that is another VM's, or nobody's.
    let own = std::mem::replace(&mut world.far().name, "mail".into());
    let said = world.is_expected(&[]);
    assert!(said.err.contains("is that of VM mail"), "{}", said.err);
    world.far().name = own;
    // Another VM; another host.
    let name = world.near().name.clone();
    let qmp = world.folder.path().join("there").display().to_string();
    let listen = format!("127.0.0.1:{}", world.ports.unwrap().0);
    let said = world.is_expected(&[]);
    assert_eq!(said.code, 0, "{}", said.err);
    let d = member(world.authority.as_ref().unwrap(), "host-d");
    let form =
        json!({ "host": "127.0.0.1", "port": world.ports.unwrap().1, "tls_hostname": "host-c" }).to_string();
    let (status, said) = d.http("PUT", &format!("/v1/moves/{name}/peer"), &form);
    let words = said["error"].as_str().unwrap();
    assert!(status == 409 && words.contains(&format!("does not expect VM {name} from host-d")), "{said}");
    let (status, said) = world.here.http("PUT", "/v1/moves/mail/peer", &form);
    assert!(
        status == 409 && said["error"].as_str().unwrap().contains("does not expect VM mail from host-b"),
        "{said}"
    );
    // A host of another authority; and one that is not the one that was asked for.
    let stranger = TestDaemon::new_beside_the_build("");
    done(identity(&stranger, &["create", "host-b"]));
    let mut stranger = stranger;
    stranger.configure(&daemon::identities::config(&stranger, ""));
    stranger.start();
    let (status, said) = stranger.http("PUT", &format!("/v1/moves/{name}/peer"), &form);
    assert!(status != 200 && said["error"].as_str().unwrap().contains("authority"), "{said}");
    let other = form.replace("host-c", "host-x");
    let (status, said) = world.here.http("PUT", &format!("/v1/moves/{name}/peer"), &other);
    assert!(status != 200 && said["error"].as_str().unwrap().contains("another host"), "{said}");
    // Expected no longer.
    assert_eq!(world.there.cli(&["move", "unexpect", &name]).code, 0);
    is_refused(&world, "only while a VM is expected");
    // Its time is over; another one is expected at the same port, which is therefore still open.
    let args =
        ["move", "expect", &name, "--from", "host-b", "--qmp", &qmp, "--listen", &listen, "--for", "1s"];
    assert_eq!(world.there.cli(&args).code, 0);
    world.there.until(|| expected(&world).is_empty());
    is_refused(&world, "only while a VM is expected");
    let said = world.there.refused(&["move", "unexpect", &name]);
    assert!(said.contains("no VM") && said.contains("is expected here"), "{said}");
}

#[test]
fn an_address_needs_the_name_in_its_certificate() {
    let (world, _) = expecting();
    let args = world.args();
    let at = args.iter().position(|arg| arg == "--tls-hostname").unwrap();
    let without: Vec<&str> = args
        .iter()
        .enumerate()
        .filter(|(number, _)| *number != at && *number != at + 1)
        .map(|(_, arg)| arg.as_str())
        .collect();
    assert!(world.here.refused(&without).contains("--tls-hostname HOST"));
    let mut both: Vec<&str> = without.clone();
    both.extend(["--qmp-there", "/tmp/x"]);
    assert!(world.here.refused(&both).contains("--qmp-there goes with the control socket"));
    // The host of --to, where no other is named.
    let name = world.near().name.clone();
    let said = world.here.refused(&["move", "vm", &name, "--to", "127.0.0.1", "--tls-hostname", "host-c"]);
    assert!(said.contains("127.0.0.1:10806"), "{said}");
}

#[test]
fn a_host_that_is_revoked_loses_what_it_has_and_gets_nothing_more() {
    let (world, _) = expecting();
    let mut monitor = FarMonitor::open(&world);
    assert!(monitor.asks("query-status", json!({}))["return"]["status"] == "inmigrate");
    let authority = world.authority.as_ref().unwrap();
    done(identity(authority, &["revoke", "host-b"]));
    let list = authority.path("identity/revoked.pem").display().to_string();
    done(identity(&world.there, &["revocations", "--import", &list]));
    let mut rest = Vec::new();
    assert_eq!(monitor.0.read_to_end(&mut rest).unwrap(), 0, "it is closed by the other host");
    // The alert that says so does not come in each run: docs/decisions/0083, Open.
    is_refused_by_one_of(&world, &["revoked", "the peer closed the connection"]);
    let asked = world.far().asked.clone();
    assert!(asked.iter().all(|asked| asked.starts_with("query-")), "{asked:?}");
}

#[test]
fn a_monitor_does_nothing_that_no_move_needs() {
    let (world, _) = expecting();
    let mut monitor = FarMonitor::open(&world);
    assert_eq!(monitor.asks("qmp_capabilities", json!({}))["return"], json!({}));
    let before = world.far().asked.len();
    for (command, arguments) in [
        ("migrate-incoming", json!({ "uri": "exec:touch /tmp/x" })),
        ("blockdev-add", json!({ "driver": "file", "filename": "/etc/shadow", "node-name": "x" })),
        ("device_add", json!({ "driver": "virtio-rng-pci" })),
        ("qom-get", json!({ "path": "/", "property": "type" })),
        ("pmemsave", json!({ "val": 0, "size": 4096, "filename": "/tmp/x" })),
        ("quit", json!({ "now": true })),
    ] {
        let said = monitor.asks(command, arguments);
        assert!(
            said["error"]["desc"].as_str().unwrap().contains("may not ask that") && said["id"] == 7,
            "{said}"
        );
    }
    for line in [
        "xp /4xw 0xfee00000",
        "i/b 0x70",
        "o/b 0x64 0xfe",
        "migrate exec:id",
        "o/w 0xcf8 0x1;quit",
        "info registers",
    ] {
        assert!(monitor.human(line)["error"].is_object(), "{line}");
    }
    for line in ["", "{}", "[1]", "\u{7f}", "{\"exec-oob\": \"quit\"}"] {
        assert!(monitor.says(line).contains("may not ask that"), "{line}");
    }
    // Registers that no move writes, and ports of which nobody knows where they point.
    assert!(monitor.human("o/h 0xcfc 0x7")["error"].is_object());
    let asked = world.far().asked.clone();
    assert_eq!(asked.len(), before, "{asked:?}");
    assert!(monitor.human("o/w 0xcf8 0x8001000c")["return"] == "");
    assert!(monitor.human("o/w 0xcfc 0x1")["error"].is_object());
    assert!(monitor.human("o/w 0xcf8 0x80001234")["return"] == "");
    // It serves one at a time, and says so to whoever comes second.
    let second = UnixStream::connect(peer(&world).1).unwrap();
    let mut second = FarMonitor(BufReader::new(second));
    assert!(
        second.line().contains("QMP")
            && second.says("{\"execute\": \"qmp_capabilities\"}").contains("serves another connection")
    );
    // A line without an end.
    monitor.0.get_mut().write_all(&[b'x'; 5000]).unwrap();
    let mut said = String::new();
    // It is closed, and the answer may be lost with what was not read.
    let _ = monitor.0.read_to_string(&mut said);
    assert!(said.is_empty() || said.contains("may not ask that"), "{said}");
    // It is there for the next one, and the guest, once it runs, is this host's.
    let mut monitor = FarMonitor::open(&world);
    world.far().state = "running";
    for command in ["quit", "stop"] {
        assert!(monitor.asks(command, json!({}))["error"]["desc"].as_str().unwrap().contains("has arrived"));
    }
    assert!(monitor.human("o/w 0xcf8 0x80010004")["error"].is_object());
    assert_eq!(monitor.asks("query-status", json!({}))["return"]["status"], "running");
    assert_eq!((world.far().state, &expected(&world)[0]["state"]), ("running", &json!("arrived")));
}

#[test]
fn of_the_daemon_only_the_vms_functions_are_reached() {
    let (world, _) = expecting();
    let add = ["pci", "add", "nic9", "--emulate", "ne2000", "--switch", "lan", "--mac", "02:00:00:00:00:09"];
    assert_eq!(world.there.cli(&add).code, 0);
    let (there, _) = peer(&world);
    let ask =
        |method: &str, path: &str, body: &str| http(UnixStream::connect(&there).unwrap(), method, path, body);
    let (status, body) = ask("GET", "/v1/status", "");
    let shown: Value = serde_json::from_str(&body).unwrap();
    let names: Vec<&Value> = shown["functions"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!((status, names), (200, vec![&json!("nic0")]));
    // And that it is expected.
    let said: Value = serde_json::from_str(&ask("GET", "/v1/expected", "").1).unwrap();
    assert_eq!((&said[0]["vm"], &said[1]), (&json!(world.near().name), &Value::Null));
    for nothing in ["switches", "nics", "groups", "exports", "cores", "decisions", "disks"] {
        assert_eq!(shown[nothing], json!([]), "{nothing}");
    }
    let step = json!({ "deadline_ms": 4000, "guest_stopped": true }).to_string();
    for (method, path, body) in [
        ("PUT", "/v1/disks/x", "{\"size\": \"1M\"}"),
        ("GET", "/v1/pci", ""),
        ("GET", "/v1/config/save", ""),
        ("POST", "/v1/upgrade", "{}"),
        ("GET", "/v1/pci/nic9", ""),
        ("POST", "/v1/pci/nic9/rest", &step),
        ("POST", "/v1/pci/none/rest", &step),
        ("PUT", "/v1/pci/nic9/ahead", "{}"),
        ("DELETE", "/v1/pci/nic9/ahead", ""),
        ("DELETE", "/v1/expected/other", ""),
    ] {
        let (status, said) = ask(method, path, body);
        assert_eq!(status, 404, "{method} {path}: {said}");
    }
    for (method, path) in [
        ("DELETE", "/v1/pci/nic0"),
        ("POST", "/v1/pci/nic0"),
        ("GET", "/v1/pci/nic0/carried"),
        ("GET", "/v1/pci/nic0/ahead"),
    ] {
        assert_eq!(ask(method, path, "").0, 405, "{method} {path}");
    }
    // What is no state, what is too long, and what is no HTTP.
    let long = "x".repeat(3 << 20);
    let mut raw = UnixStream::connect(&there).unwrap();
    let head =
        format!("PUT /v1/pci/nic0/carried HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", long.len());
    // Whoever is not read may find the connection closed before the answer.
    let _ = raw.write_all(head.as_bytes()).and_then(|()| raw.write_all(long.as_bytes()));
    let mut said = Vec::new();
    let _ = raw.read_to_end(&mut said);
    assert!(said.is_empty() || said.starts_with(b"HTTP/1.1 413"), "{said:?}");
    assert_eq!(ask("PUT", "/v1/pci/nic0/carried", "{\"format\": 1}").0, 422);
    let mut raw = UnixStream::connect(&there).unwrap();
    raw.write_all(&[0xff; 4096]).unwrap();
    let mut said = Vec::new();
    let _ = raw.read_to_end(&mut said);
    assert!(said.is_empty() || said.starts_with(b"HTTP/1.1 400"), "{said:?}");
    // So many at a time, which is all that somebody who is slow takes.
    let slow: Vec<UnixStream> = (0..8)
        .map(|_| {
            let mut stream = UnixStream::connect(&there).unwrap();
            stream.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n").unwrap();
            stream
        })
        .collect();
    world.there.until(|| expected(&world)[0]["connections"] == 8);
    let (status, said) = ask("GET", "/v1/status", "");
    assert!(status == 409 && said.contains("connections about VM"), "{status} {said}");
    assert_eq!(world.there.json(&["pci", "show", "nic0"])["stage"], "running");
    // Whoever is told that it is over is let go.
    let name = world.near().name.clone();
    assert_eq!(world.there.cli(&["move", "unexpect", &name]).code, 0);
    for mut stream in slow {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
}

#[test]
fn whatever_the_monitors_refuse_the_guest_goes_on_with_its_nic() {
    let (other, _) = expecting();
    assert_eq!(other.moves([None, None]).code, 0);
    let cont = other.far().asked.iter().rposition(|asked| asked == "cont").unwrap();
    let (world, _) = expecting();
    // Just before it the daemon there looks whether the guest runs: by then it has been given away.
    for at in 0..cont - 1 {
        let said = world.moves([None, Some(at)]);
        let what = world.far().asked.get(at).cloned().unwrap_or_default();
        world.is_as_before(&said, &format!("{at}, {what} there"));
        world.again();
    }
    let said = world.moves([None, Some(cont)]);
    assert!(said.code != 0 && said.err.contains("has moved"), "{}", said.err);
    assert_eq!(world.near().state, "postmigrate");
    // `cont` again, by what is written down.
    assert!(is_brought_to_its_end(&world, "cont was refused"));
    assert_eq!(expected(&world).len(), 0);
}

#[test]
fn whenever_the_way_is_cut_one_host_has_the_guest() {
    let (other, _) = expecting();
    assert_eq!(other.moves([None, None]).code, 0);
    let asked = [other.near().asked.clone(), other.far().asked.clone()];
    drop(other);
    let mut moved = 0;
    for (host, asked) in asked.iter().enumerate() {
        for (at, command) in asked.iter().enumerate().filter(|(_, command)| changes(command)) {
            for done in [false, true] {
                if host == 0 && !done {
                    // A monitor that refuses is another test's.
                    continue;
                }
                let what = format!("{at}, {command} {}, done: {done}", ["here", "there"][host]);
                let (world, cable) = expecting();
                {
                    let mut qemu = if host == 0 { world.near() } else { world.far() };
                    let cable = cable.clone();
                    qemu.cuts = Some((at, done));
                    qemu.cut = Some(Box::new(move || cable.cut()));
                }
                let begun = std::time::Instant::now();
                let said = world.moves([None, None]);
                eprintln!("{what}: {:?}", begun.elapsed());
                let text = format!("{what}: {}{}", said.out, said.err);
                assert_ne!(said.code, 0, "{text}");
                cable.mend();
                if said.err.contains("has moved") {
                    moved += 1;
                    assert_eq!((command.as_str(), host), ("cont", 1), "{text}");
                } else {
                    assert!(!world.has_one_owner(&text));
                    let mut near = world.near();
                    assert_eq!((near.state, near.command()), ("running", SET), "{text}");
                }
                let moved_away = said.err.contains("has moved");
                let recovered = world.recovers();
                let over = recovered.err.contains("nothing is written down");
                assert_eq!(recovered.code == 0, !over, "{text}: {}", recovered.err);
                assert!(!(moved_away && over), "{text}");
                assert_eq!(world.has_one_owner(&text), moved_away, "{text}");
            }
        }
    }
    assert_eq!(moved, 2, "before `cont` there and after it");
}

#[test]
fn a_host_that_is_lost_while_memory_is_copied_is_not_waited_for() {
    let silent = |world: &World, seconds| {
        world.near().silent = Some(Instant::now() + Duration::from_secs(seconds));
    };
    // Only slow.
    let (other, _) = expecting();
    silent(&other, 8);
    let said = other.moves([None, None]);
    assert_eq!(said.code, 0, "{}", said.err);
    let at = other.near().asked.iter().position(|asked| asked == "migrate").unwrap();

    let (world, cable) = expecting();
    // As QEMU would wait for TCP.
    silent(&world, 900);
    world.near().cuts = Some((at, true));
    let cut = cable.clone();
    world.near().cut = Some(Box::new(move || cut.cut()));
    let begun = Instant::now();
    let said = world.moves([None, None]);
    assert!(said.code != 0 && said.err.contains("nothing is sent any more"), "{}", said.err);
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    assert!(said.err.contains("the monitor at 127.0.0.1: "), "{}", said.err);
    assert!(said.err.contains("it runs here as before"), "{}", said.err);
    world.is_as_before(&said, "the way was cut while memory was copied");
    cable.mend();
    world.near().silent = None;
    world.again();
    assert_eq!(world.moves([None, None]).code, 0);
}

#[test]
fn a_move_that_is_killed_comes_to_its_end_by_another_command() {
    let (mut world, _) = expecting();
    for moment in ["noted", "logged", "commands", "rested", "taken", "sent", "revived", "replayed"] {
        world.move_is_killed([None, None], Some(moment));
        assert!(!is_brought_to_its_end(&world, moment), "{moment}");
        assert_eq!(expected(&world).len(), 1, "it may be tried again");
        world.again();
    }
    for moment in ["gone", "left", "continued"] {
        world.move_is_killed([None, None], Some(moment));
        assert!(is_brought_to_its_end(&world, moment), "{moment}");
        assert_eq!(expected(&world).len(), 0, "{moment}");
        world = expecting().0;
    }
    // Both daemons restart in between: what was expected is forgotten, and expected again.
    world.move_is_killed([None, None], Some("gone"));
    world.there.terminate();
    world.there.start();
    world.here.kill9();
    world.here.start();
    let name = world.near().name.clone();
    let said = world.here.refused(&["move", "recover", &name]);
    assert!(said.contains("the guest of VM") && said.contains("only while a VM is expected"), "{said}");
    let said = world.is_expected(&[]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(expected(&world)[0]["state"], "under_way");
    let said = world.recovers();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));
}
