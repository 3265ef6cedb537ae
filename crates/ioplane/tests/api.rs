//! A real daemon, by HTTP and by the command line.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};

const MIB: u64 = 1 << 20;

fn config() -> &'static str {
    "[[core]]\nnotify = \"notified\"\n[[disk]]\nname = \"ram\"\nmemory = \"8M\"\nqueues = 2\n"
}

#[test]
fn resources_answer_with_the_right_codes() {
    let daemon = TestDaemon::open(config());
    let image = daemon.image("a.img", 4 * MIB);
    let form = format!("{{\"path\": {image:?}, \"serial\": \"S1\"}}");

    let (code, disk) = daemon.http("PUT", "/v1/disks/a", &form);
    assert_eq!((code, &disk["size"], &disk["origin"]), (201, &(4 * MIB).into(), &"added".into()), "{disk}");
    assert_eq!(disk["socket"], daemon.path("a.sock").display().to_string());
    assert_eq!(daemon.http("GET", "/v1/disks/a", "").1["serial"], "S1");
    assert_eq!(daemon.http("GET", "/v1/disks", "").1.as_array().unwrap().len(), 2);
    assert_eq!(daemon.http("GET", "/v1/status", "").1["cores"][0]["notify"], "notified");
    assert_eq!(daemon.http("GET", "/v1/cores/0", "").1["id"], 0);

    let huge = format!("{{\"serial\": \"{}\"}}", "x".repeat(100_000));
    for (method, path, body, wanted) in [
        ("GET", "/v1/disks/none", "", 404),
        ("GET", "/v1/none", "", 404),
        ("GET", "/v1/cores/9", "", 404),
        ("GET", "/v1/cores/x", "", 404),
        ("POST", "/v1/status", "", 405),
        ("PUT", "/v1/disks/a", "{\"memory\": \"4M\"}", 409),
        ("GET", "/v1/disks?all=true", "", 422),
        ("PUT", "/v1/disks/b", "[]", 422),
        ("PUT", "/v1/switches/x", "{\"core\": 5}", 404),
        ("PUT", "/v1/disks/b", &form, 409),
        ("PUT", "/v1/disks/b", "{", 422),
        ("PUT", "/v1/disks/b", "{\"paht\": \"/x\"}", 422),
        ("PUT", "/v1/disks/b", "{\"path\": \"x.img\"}", 422),
        ("PUT", "/v1/disks/b", "{\"path\": \"/nowhere/x.img\"}", 422),
        ("PUT", "/v1/disks/b", "{\"memory\": \"8M\", \"core\": 5}", 404),
        ("PUT", "/v1/disks/b", "{\"memory\": 1000}", 422),
        ("PUT", "/v1/disks/..%2Fx", "{\"memory\": \"8M\"}", 422),
        ("PUT", "/v1/disks/control", "{\"memory\": \"8M\"}", 409),
        ("PUT", "/v1/disks/b", &huge, 413),
        ("PATCH", "/v1/disks/a", "{}", 422),
        ("PATCH", "/v1/disks/a", "{\"size\": \"2M\"}", 409),
        ("PATCH", "/v1/disks/a", "{\"size\": 1000}", 409),
        ("PATCH", "/v1/disks/a", "{\"size\": 9000001}", 422),
        ("PATCH", "/v1/disks/a", "{\"size\": \"8M\", \"memory\": \"8M\"}", 422),
        ("DELETE", "/v1/disks/a?force=perhaps", "", 422),
        ("POST", "/v1/queues/move", "{\"disk\": \"a\", \"queue\": 5, \"core\": 0}", 404),
        ("POST", "/v1/queues/move", "{\"disk\": \"a\", \"queue\": 0, \"core\": 5}", 404),
        ("PUT", "/v1/notify", "{\"notify\": \"loud\"}", 422),
        ("PUT", "/v1/notify", "{}", 422),
        ("DELETE", "/v1/cores/0", "", 409),
        ("POST", "/v1/cores", "{\"cpu\": 4095}", 422),
    ] {
        let (code, answer) = daemon.http(method, path, body);
        assert_eq!(code, wanted, "{method} {path} {body:.100}: {answer}");
        assert_eq!((&answer["status"], &answer["detail"]), (&wanted.into(), &answer["error"]), "{answer}");
        for field in ["error", "remedy", "code", "title", "type"] {
            assert!(answer[field].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}: {answer}");
        }
    }

    assert_eq!(daemon.http("PUT", "/v1/disks/a", &form).0, 200, "it is so already");
    assert_eq!(daemon.http("DELETE", "/v1/disks/a", "").0, 200);
    assert_eq!(daemon.http("GET", "/v1/disks/a", "").0, 404);
    assert!(!daemon.path("a.sock").exists());
    // The image is free again at once.
    assert_eq!(daemon.http("PUT", "/v1/disks/b", &form).0, 201);
}

#[test]
fn programs_read_codes_and_fields() {
    let daemon = TestDaemon::open(&format!("{}[[switch]]\nname = \"lan\"\n", config()));
    let nic = |mac: &str| format!("{{\"switch\": \"lan\", \"mac\": \"02:00:00:00:00:{mac}\"}}");
    assert_eq!(daemon.http("PUT", "/v1/nics/n", &nic("01")).0, 201);
    // A guest that migrates has a NIC of the same address at both ends.
    assert_eq!(daemon.http("PUT", "/v1/nics/n-2", &nic("01")).0, 201);
    for (path, body, code, field) in [
        ("/v1/disks/ram", "{\"memory\": \"8M\"}", "exists", "queues"),
        ("/v1/disks/b", "{\"memory\": \"8M\", \"quues\": 2}", "unknown_field", "quues"),
        ("/v1/disks/b", "{\"memory\": \"8M\", \"queues\": 99}", "invalid", "queues"),
        ("/v1/disks/b", "{\"memory\": \"8M\", \"queues\": \"two\"}", "invalid", "queues"),
        ("/v1/disks/b?force=true", "{\"memory\": \"8M\"}", "unknown_query", "force"),
        ("/v1/pci/m", &nic("01").replace('{', "{\"emulate\": \"ne2000\", "), "taken", "mac"),
    ] {
        let (status, answer) = daemon.http("PUT", path, body);
        assert_eq!((&answer["code"], &answer["field"]), (&code.into(), &field.into()), "{path}: {answer}");
        assert_eq!(
            (&answer["type"], &answer["retryable"]),
            (&format!("urn:ioplane:error:{code}").into(), &false.into())
        );
        assert_eq!(answer["status"], status);
    }
    let add =
        ["pci", "add", "m", "--emulate", "ne2000", "--switch", "lan", "--mac", "02:00:00:00:00:01", "--json"];
    let refused = daemon.cli(&add);
    let answer: serde_json::Value = serde_json::from_str(&refused.out).unwrap();
    assert_eq!((refused.code, &answer["code"], &answer["field"]), (1, &"taken".into(), &"mac".into()));
    // One configuration may have it while another goes: a reload says so by itself.
    assert_eq!(daemon.http("GET", "/v1/nics", "").1.as_array().unwrap().len(), 2);
    let (status, health) = daemon.http("GET", "/v1/health", "");
    assert_eq!((status, &health["health"]), (200, &"ok".into()), "{health}");
    assert_eq!(daemon.http("GET", "/v1/version", "").1["api"][0], "v1");
}

#[test]
fn events_come_as_they_happen() {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    let daemon = TestDaemon::open(config());
    let mut stream = UnixStream::connect(daemon.path("control.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    // Between them are the lengths of chunks.
    let mut events = lines
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(&line).ok().filter(|it| it.is_object()));
    let first = events.next().unwrap();
    assert_eq!(first["event"], "subscribed");
    daemon.json(&["disk", "add", "a", "--memory", "4M"]);
    daemon.json(&["disk", "resize", "a", "8M"]);
    daemon.json(&["core", "mode", "polled"]);
    daemon.json(&["disk", "remove", "a"]);
    daemon.json(&["reload"]);
    let wanted = [
        ("served", "disk", "a"),
        ("changed", "disk", "a"),
        ("changed", "core", "0"),
        ("removed", "disk", "a"),
    ];
    let mut number = first["number"].as_u64().unwrap();
    for (event, kind, name) in wanted {
        let next = events.next().unwrap();
        assert_eq!(
            (&next["event"], &next["kind"], &next["name"]),
            (&event.into(), &kind.into(), &name.into())
        );
        number += 1;
        assert_eq!(next["number"], number);
    }
    let next = events.next().unwrap();
    assert_eq!((&next["event"], &next["kind"]), (&"reloaded".into(), &serde_json::Value::Null));
}

#[test]
fn the_control_socket_is_this_users_alone() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = TestDaemon::open(config());
    for socket in ["control.sock", "ram.sock"] {
        let mode = std::fs::metadata(daemon.path(socket)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
}

#[test]
fn disks_are_changed_by_the_command_line() {
    let daemon = TestDaemon::open(config());
    let (a, b) = (daemon.image("a.img", 4 * MIB), daemon.image("b.img", 6 * MIB));
    let path = |path: &std::path::Path| path.display().to_string();
    let added =
        daemon.json(&["disk", "add", "a", "--path", &path(&a), "--queues", "2", "--block-size", "4096"]);
    assert_eq!(added["queues"].as_array().unwrap().len(), 2);
    assert_eq!(daemon.json(&["disk", "resize", "a", "5M"])["size"], 5 * MIB);
    assert_eq!(std::fs::metadata(&a).unwrap().len(), 5 * MIB);
    let refused = daemon.refused(&["disk", "resize", "a", "3M"]);
    assert!(refused.contains("from 5M to 3M") && refused.contains("--shrink"), "{refused}");
    assert_eq!(daemon.json(&["disk", "resize", "a", "3M", "--shrink"])["size"], 3 * MIB);

    let front_end = daemon.connect("a");
    let replaced = daemon.json(&["disk", "replace", "a", "--path", &path(&b)]);
    assert_eq!((&replaced["backing"]["path"], &replaced["size"]), (&path(&b).into(), &(6 * MIB).into()));
    assert_eq!(replaced["connected"], true, "a front end stays connected");
    // The old image is free, the new one is not.
    assert_eq!(daemon.json(&["disk", "add", "c", "--path", &path(&a)])["state"], "served");
    let refused = daemon.refused(&["disk", "add", "d", "--path", &path(&b)]);
    let holder = format!("b.img is in use by another disk of this daemon (pid {})", daemon.pid());
    assert!(refused.contains(&holder), "{refused}");

    let refused = daemon.refused(&["disk", "remove", "a"]);
    assert!(refused.contains("a guest is using the disk") && refused.contains("--force"), "{refused}");
    daemon.json(&["disk", "remove", "a", "--force"]);
    drop(front_end);
    assert!(daemon.disk("a").is_null());
    let refused = daemon.refused(&["disk", "remove", "a"]);
    assert!(refused.contains("there is no disk a"), "{refused}");
}

#[test]
fn cores_come_go_and_change() {
    let daemon = TestDaemon::open(config());
    assert_eq!(daemon.json(&["core", "add", "--notify", "polled", "--spin-us", "1000"])["id"], 1);
    assert_eq!(daemon.json(&["core", "list"]).as_array().unwrap().len(), 2);
    let cores = daemon.json(&["core", "mode", "polled"]);
    assert!(cores.as_array().unwrap().iter().all(|core| core["notify"] == "polled"), "{cores}");
    assert_eq!(daemon.json(&["core", "mode", "notified", "--core", "1"])["notify"], "notified");
    assert_eq!(daemon.json(&["core", "move", "ram", "1", "1"])["name"], "ram");
    assert!(daemon.json(&["core", "retire", "1"])["done"][0].as_str().unwrap().contains("retired"));
    assert!(daemon.refused(&["core", "retire", "0"]).contains("the only one"));
    assert!(daemon.refused(&["core", "move", "ram", "0", "1"]).contains("there is no I/O core 1"));
    assert_eq!(daemon.json(&["core", "add"])["id"], 2, "numbers are not used twice");
}

#[test]
fn qemu_arguments_fit_the_version() {
    let daemon = TestDaemon::open(config());
    let socket = daemon.path("ram.sock").display().to_string();
    let old = daemon.cli(&["qemu-args", "ram", "--memory", "256M", "--qemu-version", "7.2"]);
    assert_eq!(
        old.out.trim(),
        format!(
            "-object memory-backend-memfd,id=ioplane-memory,size=256M,share=on -machine memory-backend=ioplane-memory \
             -chardev socket,id=ioplane-ram-socket,path={socket},reconnect=1 \
             -device vhost-user-blk-pci,chardev=ioplane-ram-socket,id=ioplane-ram,num-queues=2,queue-size=128"
        )
    );
    let new =
        daemon.json(&["qemu-args", "ram", "--device-only", "--qemu-version", "11.1.3", "--bootindex", "1"]);
    let args: Vec<&str> = new["args"].as_array().unwrap().iter().filter_map(|arg| arg.as_str()).collect();
    assert_eq!(args.len(), 4);
    assert!(args[1].ends_with(",reconnect-ms=100") && args[3].ends_with(",bootindex=1"), "{args:?}");
}

/// QEMU 10 sets up 1024 entries if nobody tells it otherwise, and vhost-user has no message to tell it.
#[test]
fn a_front_end_chooses_the_size_of_its_rings() {
    let daemon = TestDaemon::open(config());
    let mut front = FrontEnd::connect(&daemon.path("ram.sock"), Wants::default()).unwrap();
    let mut memory = GuestMemory::new(4 << 20).unwrap();
    let plan = DiskPlan { slots: 4, max_bytes: 4096, segments: 1, shape: Shape::Direct };
    let mode = RingMode::of(front.features());
    let mut disks = [1024, 16].map(|size| Disk::new(&mut memory, size, mode, plan).unwrap());
    // As QEMU 10 does: for fewer entries than the rings turn out to have.
    front.track_inflight(2, 128).unwrap();
    front.share(&memory).unwrap();
    for (queue, disk) in (0..).zip(&mut disks) {
        front.start(queue, &memory, disk.place(), 0).unwrap();
        disk.submit(DiskOp::Flush, 0, 0).unwrap();
        front.kick(queue);
    }
    let end = Instant::now() + Duration::from_secs(60);
    for disk in &mut disks {
        let done = loop {
            match disk.reap().unwrap() {
                Some(done) => break done,
                None => assert!(Instant::now() < end, "a queue did not start"),
            }
        };
        assert!(done.ok());
    }
}

#[test]
fn text_and_codes_are_for_people() {
    let daemon = TestDaemon::open(config());
    let status = daemon.cli(&["status"]).out;
    for part in ["ioplane ", "ram", "waiting", "8M", "KICKS/REQ", "notified"] {
        assert!(status.contains(part), "{part}: {status}");
    }
    assert!(daemon.cli(&["completion", "bash"]).out.contains("ioplane"));
    assert_eq!(daemon.cli(&["disk", "resize", "ram", "large"]).code, 2, "usage");
    let nobody = TestDaemon::new("");
    let refused = nobody.refused(&["status"]);
    assert!(refused.contains("no daemon answers") && refused.contains("hint: start it"), "{refused}");
    let doctor = daemon.json(&["doctor"]);
    assert_eq!(doctor["can_serve"], true, "{doctor}");
    for finding in doctor["findings"].as_array().unwrap() {
        let lacking = finding["weight"] != "good";
        assert_eq!(finding["todo"].is_string() && finding["follows"].is_string(), lacking, "{finding}");
    }
}

#[test]
fn metrics_are_there_when_asked_for() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let _daemon = TestDaemon::open(&format!("[daemon]\nmetrics = \"127.0.0.1:{port}\"\n{}", config()));
    let ask =
        |path| daemon::http(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap(), "GET", path, "");
    let (code, text) = ask("/metrics");
    assert_eq!(code, 200);
    for line in [
        "ioplane_disk_requests_total{device=\"ram\",queue=\"1\"} 0",
        "ioplane_disk_errors_total{device=\"ram\",queue=\"0\",cause=\"io\"} 0",
        "ioplane_disk_request_duration_seconds_bucket{le=\"+Inf\",device=\"ram\",queue=\"0\"} 0",
        "ioplane_queue_info{device=\"ram\",queue=\"0\",kind=\"disk\",core=\"none\"} 1",
        "ioplane_disk_size_bytes{device=\"ram\"} 8388608",
        "ioplane_core_polled{core=\"0\"} 0",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    // Nothing else is there: the control plane stays on its socket.
    assert_eq!(ask("/v1/status").0, 404);
    let taken = TestDaemon::new(&format!("[daemon]\nmetrics = \"127.0.0.1:{port}\"\n"));
    let refused = taken.refuses();
    assert_eq!(refused.code, 2);
    assert!(
        refused.err.contains(&format!("ioplane.toml:2: metrics = 127.0.0.1:{port}: Address")),
        "{}",
        refused.err
    );
}
