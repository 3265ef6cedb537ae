//! The HTTP interface: what each resource answers, and how it refuses.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::golden;
use ioplane_testkit::vfio_user::VfioUserClient;
use serde_json::json;

use super::normalize::pretty;
use super::recorder::{MIB, Recorder, content_type};

/// Number of the configuration space among the regions of a function (`linux/vfio.h`).
const CONFIG: u32 = 7;
/// Block of a capture with a time in it (pcapng, Interface Statistics Block).
const STATISTICS: u32 = 5;

#[test]
fn disks() {
    let mut recorder = Recorder::new();
    let image = recorder.daemon.image("a.img", 4 * MIB).display().to_string();
    let other = recorder.daemon.image("b.img", 6 * MIB).display().to_string();
    recorder.get("/v1/disks");
    recorder.get("/v1/disks/memory");
    // With as little as possible: the defaults.
    recorder.ask("PUT", "/v1/disks/least", json!({ "memory": "4M" }));
    let all = json!({
        "path": image, "format": "raw", "read_only": false, "serial": "S1", "queues": 3, "queue_size": 64, "block_size": 512,
        "direct": "off", "engine": "threads", "core": 0, "socket": recorder.path("all.vhost.sock"),
        "migration_socket": recorder.path("all.migration.sock"), "guest_memory": "any",
    });
    recorder.ask("PUT", "/v1/disks/all", &all);
    recorder.ask("PATCH", "/v1/disks/least", json!({ "size": "8M" }));
    recorder.ask("PATCH", "/v1/disks/least", json!({ "size": 2 * MIB, "shrink": true }));
    recorder.ask("PATCH", "/v1/disks/least", json!({ "memory": "1M" }));
    let backing = json!({ "path": other, "format": "raw", "direct": "off", "engine": "threads" });
    recorder.ask("PATCH", "/v1/disks/all", backing);
    recorder.ask("PUT", "/v1/disks/least/migration-socket", "{}");
    recorder.ask("DELETE", "/v1/disks/least/migration-socket", "");
    recorder.ask(
        "PUT",
        "/v1/disks/least/migration-socket",
        json!({ "socket": recorder.path("elsewhere.sock") }),
    );
    recorder.ask("DELETE", "/v1/disks/least/migration-socket?force=true", "");
    recorder.ask("POST", "/v1/queues/move", json!({ "disk": "all", "queue": 2, "core": 3 }));
    recorder.ask("POST", "/v1/queues/move", json!({ "device": "memory", "queue": 0, "core": 3 }));

    recorder.get("/v1/disks/none");
    recorder.ask("PUT", "/v1/disks/all", &all);
    recorder.ask("PUT", "/v1/disks/x", json!({ "path": other }));
    recorder.ask("PUT", "/v1/disks/x", json!({ "memory": "8M", "socket": recorder.path("memory.sock") }));
    recorder.ask("PUT", "/v1/disks/control", json!({ "memory": "8M" }));
    recorder.ask("PUT", "/v1/disks/web", json!({ "memory": "8M" }));
    recorder.ask("PUT", "/v1/disks/x", json!({ "memory": "8M", "core": 5 }));
    for body in [
        "{",
        "[]",
        r#"{"paht": "/x"}"#,
        "{}",
        r#"{"path": "x.img"}"#,
        r#"{"path": "/nowhere/x.img"}"#,
        r#"{"path": "/x", "memory": "1M"}"#,
        r#"{"memory": 1000, "queues": 65, "queue_size": 3, "block_size": 100, "serial": "two words", "socket": "x.sock"}"#,
        r#"{"memory": "1M", "direct": "on", "engine": "threads", "format": "raw"}"#,
        r#"{"memory": "large"}"#,
        r#"{"memory": "1M", "direct": "maybe"}"#,
    ] {
        recorder.ask("PUT", "/v1/disks/x", body);
    }
    recorder.ask("PUT", "/v1/disks/..%2Fx", json!({ "memory": "8M" }));
    recorder.ask("PUT", &format!("/v1/disks/{}", "x".repeat(41)), json!({ "memory": "8M" }));
    recorder.ask("PUT", "/v1/disks/x", json!({ "serial": "x".repeat(100_000) }));
    recorder.ask("PUT", "/v1/disks/x", json!({ "path": recorder.path("broken.img") }));
    for body in [
        json!({}),
        json!({ "size": "1M" }),
        json!({ "size": 1000, "shrink": true }),
        json!({ "size": "8M", "memory": "8M" }),
        json!({ "path": recorder.path("none.img") }),
    ] {
        recorder.ask("PATCH", "/v1/disks/least", body);
    }
    recorder.ask("DELETE", "/v1/disks/all?force=perhaps", "");
    recorder.ask("DELETE", "/v1/disks/all?fast=true", "");
    recorder.ask("DELETE", "/v1/disks/least/migration-socket", "");
    recorder.ask("PUT", "/v1/disks/file/migration-socket", "{}");
    for body in [
        json!({ "disk": "all", "queue": 3, "core": 0 }),
        json!({ "disk": "all", "queue": 0, "core": 5 }),
        json!({ "disk": "none", "queue": 0, "core": 0 }),
        json!({ "disk": "all", "queue": 0 }),
    ] {
        recorder.ask("POST", "/v1/queues/move", body);
    }
    let used = UnixStream::connect(recorder.daemon.path("memory.sock")).unwrap();
    recorder.daemon.until(|| recorder.daemon.disk("memory")["connected"] == true);
    recorder.ask("DELETE", "/v1/disks/memory", "");
    recorder.ask("DELETE", "/v1/disks/memory?force=true", "");
    drop(used);
    recorder.ask("DELETE", "/v1/disks/all", "");
    recorder.ask("DELETE", "/v1/disks/all", "");
    golden!("api-disks.json").check(&recorder.recorded());
}

#[test]
fn switches_and_nics() {
    let mut recorder = Recorder::new();
    recorder.get("/v1/switches");
    recorder.get("/v1/switches/lan");
    recorder.get("/v1/nics");
    recorder.get("/v1/nics/web");
    recorder.ask("PUT", "/v1/switches/more", "{}");
    let least = json!({ "switch": "more", "mac": "02:00:00:00:00:21" });
    recorder.ask("PUT", "/v1/nics/least", &least);
    let all = json!({
        "switch": "more", "mac": "02-00-00-00-00-22", "isolated": true, "vlan": "trunk:7,9", "pairs": 8, "queue_size": 64,
        "mtu": 68, "link": "down", "core": 0, "socket": recorder.path("all.vhost.sock"), "guest_memory": "ram",
    });
    recorder.ask("PUT", "/v1/nics/all", &all);
    recorder.ask("PATCH", "/v1/nics/all", json!({ "link": "up" }));
    recorder.ask("POST", "/v1/queues/move", json!({ "disk": "all", "queue": 3, "core": 3 }));
    recorder.get("/v1/switches/more");

    recorder.get("/v1/switches/none");
    recorder.get("/v1/nics/none");
    recorder.ask("PUT", "/v1/switches/lan", "{}");
    recorder.ask("PUT", "/v1/switches/x", json!({ "uplink": "eth0/1" }));
    recorder.ask("PUT", "/v1/switches/x", json!({ "uplnk": "tap0" }));
    recorder.ask("PUT", "/v1/switches/x", json!({ "core": 5 }));
    recorder.ask("PUT", "/v1/switches/-x", "{}");
    recorder.ask("DELETE", "/v1/switches/lan", "");
    recorder.ask("DELETE", "/v1/switches/back", "");
    recorder.ask("DELETE", "/v1/switches/none", "");
    recorder.ask("PUT", "/v1/nics/all", &all);
    recorder.ask("PUT", "/v1/nics/x", json!({ "switch": "none", "mac": "02:00:00:00:00:23" }));
    // Two NICs of one address: what a guest that migrates needs.
    recorder.ask("PUT", "/v1/nics/least-2", json!({ "switch": "more", "mac": "02:00:00:00:00:21" }));
    recorder.ask("DELETE", "/v1/nics/least-2", "");
    recorder.ask("PUT", "/v1/nics/memory", json!({ "switch": "more", "mac": "02:00:00:00:00:23" }));
    for body in [
        json!({}),
        json!({ "switch": "lan", "mac": "01:00:00:00:00:01" }),
        json!({ "switch": "lan", "vlan": "4095" }),
        json!({ "switch": "lan", "mac": "02:00:00:00:00:24", "vlan": 10 }),
        json!({ "switch": "lan", "mac": "02:00:00:00:00:23", "pairs": 9, "queue_size": 63, "mtu": 67 }),
        json!({ "switch": "lan", "link": "left" }),
    ] {
        recorder.ask("PUT", "/v1/nics/x", body);
    }
    recorder.ask("PATCH", "/v1/nics/all", "{}");
    recorder.ask("PATCH", "/v1/nics/all", json!({ "link": "left" }));
    recorder.ask("PATCH", "/v1/nics/none", json!({ "link": "up" }));
    recorder.get("/v1/ports/none/capture");
    recorder.get("/v1/ports/web/capture?snaplen=none");
    let used = UnixStream::connect(recorder.daemon.path("web.sock")).unwrap();
    recorder.daemon.until(|| {
        let nics = recorder.daemon.json(&["nic", "list"]);
        nics.as_array().unwrap().iter().any(|nic| nic["name"] == "web" && nic["connected"] == true)
    });
    recorder.ask("DELETE", "/v1/nics/web", "");
    recorder.ask("DELETE", "/v1/nics/web?force=true", "");
    drop(used);
    recorder.ask("DELETE", "/v1/nics/all", "");
    recorder.ask("DELETE", "/v1/nics/least", "");
    recorder.ask("DELETE", "/v1/nics/least", "");
    recorder.ask("DELETE", "/v1/switches/more", "");
    golden!("api-network.json").check(&recorder.recorded());
}

#[test]
fn groups() {
    let mut recorder = Recorder::new();
    recorder.get("/v1/groups");
    recorder.ask("PUT", "/v1/groups/least", "");
    let all = json!({
        "weight": 1000, "iops_limit": 1, "iops_burst": 2, "bandwidth_limit": "4K", "bandwidth_burst": 4, "tx_frame_limit": 5,
        "tx_frame_burst": 6, "tx_bandwidth_limit": "7K", "tx_bandwidth_burst": 8, "rx_frame_limit": 9, "rx_frame_burst": 10,
        "rx_bandwidth_limit": "11K", "rx_bandwidth_burst": 12,
    });
    recorder.ask("PUT", "/v1/groups/all", &all);
    recorder.ask("PUT", "/v1/groups/all", &all);
    recorder.ask("PUT", "/v1/disks/in", json!({ "memory": "1M", "group": "all" }));
    recorder.ask("PATCH", "/v1/nics/web", json!({ "group": "all" }));
    recorder.ask("PATCH", "/v1/groups/all", json!({ "weight": 2, "iops_limit": 0 }));
    recorder.get("/v1/groups/all");
    recorder.get("/v1/groups");
    recorder.ask("PATCH", "/v1/disks/in", json!({ "group": "least" }));

    recorder.get("/v1/groups/none");
    recorder.ask("PUT", "/v1/groups/least", json!({ "weight": 2 }));
    recorder.ask("PUT", "/v1/groups/a%20b", "{}");
    for body in
        [json!({ "weight": 0 }), json!({ "weight": "2" }), json!({ "wieght": 2 }), json!({ "iops_burst": 2 })]
    {
        recorder.ask("PUT", "/v1/groups/x", body);
    }
    recorder.ask("PATCH", "/v1/groups/least", "{}");
    recorder.ask("PATCH", "/v1/groups/none", json!({ "weight": 2 }));
    recorder.ask("PUT", "/v1/disks/x", json!({ "memory": "1M", "group": "none" }));
    recorder.ask("PATCH", "/v1/disks/in", json!({ "group": "none" }));
    recorder.ask("DELETE", "/v1/groups/least", "");
    recorder.ask("PATCH", "/v1/disks/in", json!({ "group": "" }));
    recorder.ask("DELETE", "/v1/groups/least", "");
    recorder.ask("DELETE", "/v1/groups/least", "");
    golden!("api-groups.json").check(&recorder.recorded());
}

/// The head of an answer that has no end, and the first blocks of its file.
#[test]
fn captures() {
    let recorder = Recorder::new();
    let mut stream = UnixStream::connect(recorder.daemon.path("control.sock")).unwrap();
    stream.write_all(b"GET /v1/ports/web/capture?snaplen=99 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    let head = String::from_utf8(answer).unwrap();
    let status = head.lines().next().unwrap().to_owned();
    // A chunk: its length in hex on a line, then the section and the interface, each a block that says how long it is.
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let length = usize::from_str_radix(String::from_utf8(line).unwrap().trim(), 16).unwrap();
    let mut blocks = vec![0; length];
    stream.read_exact(&mut blocks).unwrap();
    let mut parts = vec![(format!("{status}, {}", content_type(&head)), Vec::new())];
    while !blocks.is_empty() {
        let kind = u32::from_le_bytes(blocks[..4].try_into().unwrap());
        let length = u32::from_le_bytes(blocks[4..8].try_into().unwrap()) as usize;
        let rest = blocks.split_off(length);
        let mut block = std::mem::replace(&mut blocks, rest);
        if kind == STATISTICS {
            block[12..20].fill(0);
        }
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        if let Some(at) = block.windows(version.len()).position(|bytes| bytes == version) {
            block[at..at + version.len()].fill(b'#');
        }
        parts.push((format!("block of type {kind:#x}"), block));
    }
    golden!("api-capture.bytes").check_parts(&parts);
}

#[test]
fn functions() {
    let mut recorder = Recorder::new();
    recorder.get("/v1/pci");
    recorder.get("/v1/pci/soft");
    let least = json!({ "emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:31" });
    recorder.ask("PUT", "/v1/pci/least", &least);
    let all = json!({
        "emulate": "ne2000", "switch": "lan", "mac": "02:00:00:00:00:32", "socket": recorder.path("all.vfio.sock"),
        "guest_memory": "any",
    });
    recorder.ask("PUT", "/v1/pci/all", &all);
    recorder.ask("POST", "/v1/pci/old/quiesce", json!({ "deadline_ms": 100, "or_resume": true }));
    recorder.get("/v1/pci/old");
    recorder.ask("POST", "/v1/pci/old/quiesce", "");
    recorder.ask("POST", "/v1/pci/old/resume", "");
    recorder.ask("POST", "/v1/pci/old/resume", "");
    recorder.ask("POST", "/v1/pci/old/reset", "");
    recorder.ask("POST", "/v1/pci/old/save", "");
    let (_, saved) = recorder.daemon.http("POST", "/v1/pci/old/save", "");
    recorder.ask("POST", "/v1/pci/all/load", &saved);

    recorder.get("/v1/pci/none");
    recorder.get("/v1/pci/soft/resume");
    recorder.ask("PUT", "/v1/pci/all", &all);
    let other = json!({ "emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:39" });
    recorder.ask("PUT", "/v1/pci/control", &other);
    recorder.ask("PUT", "/v1/pci/memory", &other);
    recorder.ask("PUT", "/v1/disks/soft", json!({ "memory": "1M" }));
    for body in [
        json!({}),
        json!({ "emulate": "ne2000" }),
        json!({ "emulate": "ne2000", "switch": "none" }),
        json!({ "emulate": "ne2000", "switch": "lan", "tap": "tap0" }),
        json!({ "emulate": "ne2000", "tap": "tap0/1" }),
        json!({ "emulate": "e1000", "switch": "lan" }),
        json!({ "emulate": "ne2000", "switch": "lan", "mode": "virtual", "on_fault": "stop", "force": true, "pinned_memory": 1,
            "unsafe_interrupts": true }),
        json!({ "host": "ffff:00:05.0" }),
        json!({ "host": "five" }),
        json!({ "host": "ffff:00:05.0", "emulate": "ne2000" }),
        json!({ "host": "ffff:00:05.0", "switch": "lan", "tap": "tap0", "mac": "02:00:00:00:00:33" }),
        json!({ "host": "ffff:00:05.0", "mode": "passthrough", "on_fault": "stop" }),
        json!({ "host": "ffff:00:05.0", "on_fault": "panic" }),
    ] {
        recorder.ask("PUT", "/v1/pci/x", body);
    }
    recorder.ask("POST", "/v1/pci/none/quiesce", "");
    recorder.ask("POST", "/v1/pci/soft/quiesce", json!({ "deadline": 5 }));
    for change in [
        json!({ "format": "other" }),
        json!({ "version": 2 }),
        json!({ "kind": "rtl8139" }),
        json!({ "state_version": 9 }),
        json!({ "body": "%" }),
        json!({ "body": "AAAA" }),
    ] {
        let mut spoilt = saved.clone();
        spoilt.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        recorder.ask("POST", "/v1/pci/old/load", spoilt);
    }
    recorder.ask("POST", "/v1/pci/old/load", json!({ "format": "ioplane-function" }));
    let used = VfioUserClient::greet(&recorder.daemon.path("soft.sock")).unwrap();
    recorder.daemon.until(|| recorder.daemon.json(&["pci", "show", "soft"])["connected"] == true);
    recorder.ask("DELETE", "/v1/pci/soft", "");
    recorder.ask("DELETE", "/v1/pci/soft?force=true", "");
    drop(used);
    recorder.ask("DELETE", "/v1/pci/all", "");
    recorder.ask("DELETE", "/v1/pci/all", "");
    golden!("api-pci.json").check(&recorder.recorded());
}

#[test]
fn cores_and_the_daemon() {
    let mut recorder = Recorder::new();
    recorder.normalizer = recorder.normalizer.with(env!("CARGO_BIN_EXE_ioplane"), "BINARY");
    recorder.get("/v1/cores");
    recorder.get("/v1/cores/3");
    recorder.ask("POST", "/v1/cores", "{}");
    recorder.ask(
        "POST",
        "/v1/cores",
        json!({ "notify": "notified", "spin_us": 7, "budget": 9, "yield_policy": "yields" }),
    );
    recorder.ask("PATCH", "/v1/cores/4", json!({ "notify": "notified", "spin_us": 5 }));
    recorder.ask("PUT", "/v1/notify", json!({ "notify": "notified" }));
    recorder.ask("DELETE", "/v1/cores/5", "");
    recorder.get("/v1/cores/9");
    recorder.get("/v1/cores/x");
    recorder.ask("PATCH", "/v1/cores/9", json!({ "notify": "polled" }));
    recorder.ask("PATCH", "/v1/cores/0", "{}");
    recorder.ask("PUT", "/v1/notify", json!({ "notify": "loud" }));
    recorder.ask("PUT", "/v1/notify", json!({ "spin_us": 60_000_001 }));
    recorder.ask("POST", "/v1/cores", json!({ "budget": 0, "spin_us": 60_000_001 }));
    recorder.ask("POST", "/v1/cores", json!({ "yield_policy": "rude" }));
    for core in ["4", "0", "3", "9"] {
        recorder.ask("DELETE", &format!("/v1/cores/{core}"), "");
    }
    recorder.ask("DELETE", "/v1/cores/0", "");

    recorder.get("/v1/version");
    recorder.get("/v1/health");
    recorder.get("/v1/none");
    recorder.get("/v1/version?verbose=true");
    recorder.ask("POST", "/v1/status", "");
    recorder.ask("POST", "/v1/reload", "");
    let before = std::fs::read_to_string(recorder.daemon.path("ioplane.toml")).unwrap();
    recorder.daemon.configure(&before.replace(
        "memory = \"8M\"",
        "memory = \"8M\"\nqueues = 2\n[[disk]]\nname = \"more\"\nmemory = \"1M\"",
    ));
    recorder.ask("POST", "/v1/reload", "");
    recorder.daemon.configure("[[disk]]\nname = \"memory\"\nmemroy = \"8M\"\n");
    recorder.ask("POST", "/v1/reload", "");
    recorder.daemon.configure("[[core]]\n");
    recorder.ask("POST", "/v1/reload", "");
    recorder.ask("POST", "/v1/upgrade", json!({ "binary": "/bin/true" }));
    recorder.ask("POST", "/v1/upgrade", json!({ "binary": "/nowhere/ioplane" }));
    recorder.ask("POST", "/v1/upgrade", json!({ "binry": "/nowhere/ioplane" }));
    recorder.ask("POST", "/v1/upgrade", "");
    golden!("api-daemon.json").check(&recorder.recorded());
}

/// Whoever generates a client from it sees here what has changed.
#[test]
fn the_openapi_document() {
    let recorder = Recorder::new();
    let document = recorder.normalizer.value(recorder.contract.document().clone());
    golden!("openapi.json").check(&pretty(&document));
}

/// What is so already answers 200, what is new 201, what differs 409 with the field.
#[test]
fn puts_of_the_same() {
    let mut recorder = Recorder::new();
    let disk = json!({ "memory": "4M", "queues": 2 });
    recorder.ask("PUT", "/v1/disks/twice", &disk);
    recorder.ask("PUT", "/v1/disks/twice", &disk);
    recorder.ask("PUT", "/v1/disks/twice", json!({ "memory": "4M", "queues": 1, "serial": "other" }));
    recorder.ask("PUT", "/v1/disks/memory", json!({ "memory": "8M" }));
    recorder.ask("PUT", "/v1/disks/broken", json!({ "path": recorder.path("broken.img") }));
    recorder.ask("PUT", "/v1/disks/twice/migration-socket", "");
    recorder.ask("PUT", "/v1/disks/twice/migration-socket", "{}");
    recorder.ask("PUT", "/v1/disks/twice/migration-socket", json!({ "socket": recorder.path("x.sock") }));
    recorder.ask("PUT", "/v1/switches/lan", "");
    recorder.ask("PUT", "/v1/switches/lan", json!({ "core": 3 }));
    let nic = json!({ "switch": "lan", "mac": "02:00:00:00:00:21" });
    recorder.ask("PUT", "/v1/nics/twice-nic", &nic);
    recorder.ask("PUT", "/v1/nics/twice-nic", &nic);
    recorder.ask("PUT", "/v1/nics/twice-nic", json!({ "switch": "lan", "mac": "02:00:00:00:00:22" }));
    let function = json!({ "emulate": "ne2000", "switch": "lan", "mac": "02:00:00:00:00:31" });
    recorder.ask("PUT", "/v1/pci/twice-pci", &function);
    recorder.ask("PUT", "/v1/pci/twice-pci", &function);
    recorder.ask(
        "PUT",
        "/v1/pci/twice-pci",
        json!({ "emulate": "rtl8139", "switch": "lan", "mac": "02:00:00:00:00:31" }),
    );
    // One address on one switch, whichever kind has it.
    recorder.ask("PUT", "/v1/nics/other", json!({ "switch": "lan", "mac": "02:00:00:00:00:31" }));
    recorder.ask(
        "PUT",
        "/v1/pci/other",
        json!({ "emulate": "ne2000", "switch": "lan", "mac": "02:00:00:00:00:21" }),
    );
    recorder.ask("PUT", "/v1/nics/other", json!({ "switch": "back", "mac": "02:00:00:00:00:31" }));
    golden!("api-put.json").check(&recorder.recorded());
}

/// With nobody connected, and with a guest at a disk, a NIC and a PCI function.
#[test]
fn status() {
    let mut recorder = Recorder::new();
    recorder.get("/v1/status");
    let daemon = &recorder.daemon;
    let mut front = FrontEnd::connect(&daemon.path("memory.sock"), Wants::default()).unwrap();
    let mut memory = GuestMemory::new(4 * MIB).unwrap();
    let plan = DiskPlan { slots: 4, max_bytes: 4096, segments: 1, shape: Shape::Direct };
    let mut disk = Disk::new(&mut memory, 16, RingMode::of(front.features()), plan).unwrap();
    front.share(&memory).unwrap();
    front.start(0, &memory, disk.place(), 0).unwrap();
    for op in [DiskOp::Write, DiskOp::Read, DiskOp::Flush, DiskOp::Other { kind: 99, write: true }] {
        disk.submit(op, 8, if op == DiskOp::Flush { 0 } else { 4096 }).unwrap();
        front.kick(0);
        while disk.reap().unwrap().is_none() {
            std::thread::yield_now();
        }
    }
    let _nic = FrontEnd::connect(&daemon.path("web.sock"), Wants::default()).unwrap();
    let mut function = VfioUserClient::greet(&daemon.path("soft.sock")).unwrap();
    function.read(CONFIG, 0, 4).unwrap();
    // Counts are published now and then.
    daemon.until(|| {
        let status = daemon.json(&["status"]);
        let seen = status["disks"].as_array().unwrap().iter().any(|disk| disk["totals"]["requests"] == 4);
        seen && status["functions"][1]["traffic"]["reads"] == 1 && status["nics"][1]["connected"] == true
    });
    recorder.normalizer = recorder.normalizer.in_traffic();
    recorder.get("/v1/status");
    golden!("api-status.json").check(&recorder.recorded());
}
