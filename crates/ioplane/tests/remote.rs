//! Disks of other machines: two daemons, one of which publishes what a guest of the other uses.

mod daemon;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemon::TestDaemon;
use daemon::load::{exporter, free_port, step_for, step_until_remote};
use daemon::reader::Reader;
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;

/// Where disks have O_DIRECT and the two never share a folder.
fn daemon(config: &str) -> TestDaemon {
    let mut daemon = TestDaemon::new_beside_the_build(config);
    daemon.start();
    daemon
}

/// An exporter with one image, published as `data`, and an importer with a disk of that name.
fn pair() -> (TestDaemon, TestDaemon) {
    let port = free_port();
    let mut exporter = exporter("data", port, CrashLoad::image_bytes(QUEUES));
    exporter.start();
    let importer = daemon("[[core]]\nspin_us = 200\n");
    let uri = format!("nbd://127.0.0.1:{port}/data");
    let said = importer.cli(&["disk", "add", "data", "--remote", &uri, "--queues", &QUEUES.to_string()]);
    assert_eq!(said.code, 0, "{}", said.err);
    (exporter, importer)
}

#[test]
fn a_guest_uses_a_disk_of_another_machine() {
    let (exporter, importer) = pair();
    let mut load = CrashLoad::new(QUEUES, DEPTH, 7).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(300));
    load.settle().unwrap();
    let disk = importer.disk("data");
    let remote = &disk["backing"]["remote"];
    assert_eq!((&remote["state"], &remote["connections"]), (&"connected".into(), &QUEUES.into()), "{disk}");
    let export = &exporter.json(&["publish", "list"])[0];
    assert_eq!(export["connections"], QUEUES, "{export}");
    assert!(export["totals"]["bytes_written"].as_u64() > Some(0), "{export}");
    assert_eq!(export["instance"], remote["instance"]);
    // Whoever takes it away has to say so.
    let refused = exporter.refused(&["publish", "remove", "data"]);
    assert!(refused.contains("clients use it"), "{refused}");
}

/// Each time its requests wait, are sent again to the next one, and every read finds the last write.
#[test]
fn an_exporter_that_is_killed_again_and_again_loses_nothing() {
    let (mut exporter, importer) = pair();
    let mut load = CrashLoad::new(QUEUES, DEPTH, 8).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    for round in 1..=6u64 {
        // A write that no flush has covered may be lost with a machine, not with a process.
        step_for(&mut load, Duration::from_millis(20 + 17 * round));
        exporter.kill9();
        step_until_remote(&mut load, &importer, |remote| remote["state"] == "reconnecting");
        exporter.start();
        step_until_remote(&mut load, &importer, |remote| {
            remote["state"] == "connected" && remote["losses"].as_u64() >= Some(round * u64::from(QUEUES))
        });
    }
    load.settle().unwrap();
    let disk = importer.disk("data");
    assert!(disk["backing"]["remote"]["replays"].as_u64() > Some(0), "{disk}");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
}

/// What the dead one had sent is not carried out after what the next one sends: every read finds the last write.
#[test]
fn an_importer_that_is_killed_again_and_again_loses_nothing() {
    let (exporter, mut importer) = pair();
    let mut load = CrashLoad::new(QUEUES, DEPTH, 9).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    for round in 1..=6u64 {
        step_for(&mut load, Duration::from_millis(20 + 13 * round));
        importer.kill9();
        importer.start();
        importer.until(|| load.attach(&importer.path("data.sock")).is_ok());
        step_for(&mut load, Duration::from_millis(20));
    }
    load.settle().unwrap();
    let export = &exporter.json(&["publish", "list"])[0];
    assert_eq!(export["connections"], QUEUES, "those of the dead are gone: {export}");
}

#[test]
fn an_exporter_that_stops_answering_is_a_network_failure_and_nothing_fails() {
    let (exporter, importer) = pair();
    let mut load = CrashLoad::new(QUEUES, DEPTH, 10).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(50));
    exporter.signal("STOP");
    // Silence: nothing has ended, and requests wait.
    step_for(&mut load, Duration::from_millis(300));
    let waits = importer.disk("data");
    assert!(waits["backing"]["remote"]["in_flight"].as_u64() > Some(0), "{waits}");
    exporter.signal("CONT");
    step_for(&mut load, Duration::from_millis(100));
    load.settle().unwrap();
    assert_eq!(importer.disk("data")["totals"]["errors"]["io"], 0);
}

#[test]
fn requests_fail_after_the_time_that_was_asked_for_and_are_served_again() {
    let port = free_port();
    let mut exporter = exporter("data", port, 1 << 20);
    exporter.start();
    let uri = format!("nbd://127.0.0.1:{port}/data");
    let importer = daemon(&format!("[[core]]\n[[disk]]\nname = \"data\"\nremote = {uri:?}\ntimeout_s = 1\n"));
    let mut guest = daemon::reader::Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    exporter.kill9();
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "failing");
    let why = importer.cli(&["disk", "show", "data"]).out;
    assert!(why.contains("not reachable, requests fail"), "{why}");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "VIRTIO_BLK_S_IOERR");
    exporter.start();
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "connected");
    guest.submit(1);
    guest.wait(1);
}

/// The exporter's own disk hangs. Its importer dies and comes back, and is kept out, since what it had begun has not ended; others are served,
/// and the export can be taken away.
#[test]
fn a_disk_that_hangs_keeps_out_its_own_importer_and_nobody_else() {
    let [below, above] = [free_port(), free_port()];
    let export = |name: &str, what: &str, port: u16| {
        format!("[[export]]\nname = {name:?}\n{what}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n")
    };
    let bottom = daemon(&("[[core]]\n".to_owned() + &export("data", "memory = \"1M\"", below)));
    let exporter = daemon(
        &("[[core]]\n".to_owned()
            + &export("data", &format!("remote = \"nbd://127.0.0.1:{below}/data\""), above)
            + &export("other", "memory = \"1M\"", above)),
    );
    let uri = |name: &str| format!("nbd://127.0.0.1:{above}/{name}");
    let mut importer = daemon(&format!("[[core]]\n[[disk]]\nname = \"data\"\nremote = {:?}\n", uri("data")));
    let mut guest = daemon::reader::Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    bottom.signal("STOP");
    guest.submit(4);
    exporter.until(|| exporter.json(&["publish", "show", "data"])["connections"] == 1);
    importer.kill9();
    importer.start();
    let _again = daemon::reader::Reader::connect(&importer, "data");
    let said = importer.cli(&["disk", "add", "other", "--remote", &uri("other")]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut other = daemon::reader::Reader::connect(&importer, "other");
    other.submit(1);
    other.wait(1);
    let said = exporter.cli(&["publish", "remove", "data", "--force"]);
    assert_eq!(said.code, 0, "{}", said.err);
    bottom.signal("CONT");
}

#[test]
fn another_image_under_the_same_name_is_another_disk() {
    let port = free_port();
    let exporter = daemon("[[core]]\n");
    let image = exporter.image("data.img", 1 << 20).display().to_string();
    let listen = format!("127.0.0.1:{port}");
    let publish = || {
        let said =
            exporter.cli(&["publish", "disk", "data", "--path", &image, "--listen", &listen, "--plain"]);
        said.code == 0
    };
    assert!(publish());
    let importer =
        daemon(&format!("[[core]]\n[[disk]]\nname = \"data\"\nremote = \"nbd://{listen}/data\"\n"));
    let mut guest = daemon::reader::Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    assert_eq!(exporter.cli(&["publish", "remove", "data", "--force"]).code, 0);
    std::fs::remove_file(&image).unwrap();
    exporter.image("other.img", 1 << 20);
    exporter.image("data.img", 1 << 20);
    exporter.until(publish);
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "stopped");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("another disk under this name"), "{shown}");
}

#[test]
fn what_cannot_be_published_or_imported_is_said() {
    let exporter = daemon("[[core]]\n");
    let image = exporter.image("data.img", 1 << 20);
    let path = image.display().to_string();
    let refused = |args: &[&str], words: &str| {
        let said = exporter.cli(args);
        assert_ne!(said.code, 0, "{args:?}");
        assert!(said.err.contains(words), "{args:?}: {}", said.err);
    };
    refused(&["publish", "disk", "data", "--path", &path, "--listen", "127.0.0.1:1"], "plain = true");
    refused(&["publish", "disk", "data", "--path", "/nowhere/x.img"], "/nowhere/x.img");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    refused(
        &["publish", "disk", "data", "--path", &path, "--listen", &listen, "--plain"],
        "Address already in use",
    );
    drop(taken);
    let publish = |name: &str, listen: &str| {
        exporter.cli(&["publish", "disk", name, "--memory", "1M", "--listen", listen, "--plain"])
    };
    // All addresses beside one of them, in both orders: the one that is there is named, and both fit at the same place.
    let [one, two] = [free_port(), free_port()];
    for [first, second] in [
        [format!("127.0.0.1:{one}"), format!("[::]:{one}")],
        [format!("0.0.0.0:{two}"), format!("127.0.0.1:{two}")],
    ] {
        assert_eq!(publish("first", &first).code, 0);
        let said = publish("second", &second);
        assert!(said.code != 0 && said.err.contains(&format!("listen at {first}")), "{}", said.err);
        let said = publish("second", &first);
        assert_eq!(said.code, 0, "{}", said.err);
        for name in ["first", "second"] {
            assert_eq!(exporter.cli(&["publish", "remove", name]).code, 0);
        }
        // Nothing is left of it.
        assert_eq!(exporter.cli(&["publish", "disk", "data", "--path", &path]).code, 0);
        assert_eq!(exporter.cli(&["publish", "remove", "data"]).code, 0);
    }
    assert_eq!(exporter.cli(&["publish", "disk", "data", "--path", &path]).code, 0);
    // One image, one user.
    refused(&["disk", "add", "other", "--path", &path], "in use");
    refused(&["publish", "disk", "data", "--path", &path, "--read-only"], "another read_only");
    let importer = daemon("[[core]]\n");
    let uri = format!("nbd+unix:///data?socket={}", exporter.path("data.sock").display());
    assert_eq!(importer.cli(&["disk", "add", "data", "--remote", &uri]).code, 0);
    let said = importer.cli(&["disk", "add", "none", "--remote", &uri.replace("/data?", "/none?")]);
    assert!(said.err.contains("no export called \"none\""), "{}", said.err);
    let said = importer.cli(&["disk", "resize", "data", "2M"]);
    assert!(said.err.contains("that of the export"), "{}", said.err);
    let said = importer.cli(&["disk", "add", "both", "--remote", &uri, "--path", &path]);
    assert_ne!(said.code, 0);
}

/// A server that is not there when the disk is opened: waited for or refused, as was asked for.
#[test]
fn an_exporter_that_is_absent_is_waited_for_or_refused() {
    let port = free_port();
    let uri = format!("nbd://127.0.0.1:{port}/data");
    let configured = |name: &str, at_start: &str| {
        format!("[[disk]]\nname = {name:?}\nremote = {uri:?}\nqueues = 1\n{at_start}")
    };
    let importer = daemon(
        &("[[core]]\n".to_owned()
            + &configured("usual", "")
            + &configured("waits", "at_start = \"wait\"\n")
            + &configured("refuses", "at_start = \"refuse\"\n")),
    );
    let failed = |name: &str| importer.until(|| importer.disk(name)["state"] == "failed");
    ["usual", "waits", "refuses"].into_iter().for_each(failed);
    assert!(importer.disk("waits")["retry"]["next_ms"].is_u64());
    assert!(importer.disk("refuses")["retry"]["next_ms"].is_null(), "{}", importer.disk("refuses"));
    // `disk add` refuses unless it is to wait.
    let refused = importer.refused(&["disk", "add", "added", "--remote", &uri]);
    assert!(refused.contains("see whether the server runs"), "{refused}");
    assert_eq!(importer.disk("added"), serde_json::Value::Null);
    let said = importer.cli(&["disk", "add", "added", "--remote", &uri, "--at-start", "wait"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.contains("FAILED") && said.out.contains("again"), "{}", said.out);
    let mut exporter = exporter("data", port, 1 << 20);
    exporter.start();
    let served = |name: &str| importer.until(|| importer.disk(name)["state"] == "served");
    ["usual", "waits", "added"].into_iter().for_each(served);
    assert_eq!(importer.disk("refuses")["state"], "failed");
    importer.json(&["reload"]);
    served("refuses");
    let said = importer.cli(&["disk", "add", "here", "--memory", "1M", "--at-start", "wait"]);
    assert_ne!(said.code, 0);
}

/// More is written than the least that can be kept, and nobody flushes but the disk itself.
#[test]
fn how_much_is_kept_before_it_is_flushed_can_be_said() {
    const WRITES: u64 = 64;
    const BYTES: u64 = 64 << 10;
    let port = free_port();
    let uri = format!("nbd://127.0.0.1:{port}/data");
    for (retain, flushes) in [("1M", true), ("64M", false)] {
        let mut exporter = exporter("data", port, 8 << 20);
        exporter.start();
        // Of one moment: what came before a write is counted with it at the latest.
        let totals = || exporter.json(&["publish", "show", "data"])["totals"].clone();
        let counted = |what: &str, least: u64| {
            let mut seen = totals();
            exporter.until(|| {
                seen = totals();
                seen[what].as_u64().unwrap() >= least
            });
            seen["requests"].as_u64().unwrap()
        };
        let importer = daemon(&format!(
            "[[core]]\nspin_us = 200\n[[disk]]\nname = \"data\"\nremote = {uri:?}\nretain = \"{retain}\"\n"
        ));
        importer.until(|| importer.disk("data")["state"] == "served");
        let mut guest = Reader::of(&importer, "data", BYTES as u32);
        guest.submit(1);
        guest.wait(1);
        let before = counted("bytes_read", BYTES);
        for write in 0..WRITES {
            assert!(guest.write(write * 128));
            guest.wait(1);
        }
        let more = counted("bytes_written", WRITES * BYTES) - before - WRITES;
        assert_eq!(more > 0, flushes, "{retain}: {more} flushes");
        drop(guest);
        assert_eq!(importer.cli(&["disk", "remove", "data", "--force"]).code, 0);
    }
    let importer = daemon("[[core]]\n");
    for retain in ["512K", "1G"] {
        let refused = importer.refused(&["disk", "add", "data", "--remote", &uri, "--retain", retain]);
        assert!(refused.contains("1M to 256M"), "{refused}");
    }
}

/// A server that takes the connection and says nothing: who replaces waits for it, and nobody else does.
#[test]
fn a_disk_is_shown_while_its_next_backing_is_opened() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("nbd://127.0.0.1:{}/data", silent.local_addr().unwrap().port());
    let daemon = daemon("[[core]]\n[[disk]]\nname = \"data\"\nmemory = \"1M\"\n");
    let replacing = std::thread::spawn(daemon.later(&["disk", "replace", "data", "--remote", &uri]));
    let (connection, _) = silent.accept().unwrap();
    for command in [&["disk", "show", "data"][..], &["disk", "list"], &["status"]] {
        let said = daemon.cli(command);
        assert!(said.code == 0 && said.out.contains("data"), "{command:?}: {}{}", said.out, said.err);
    }
    assert!(!replacing.is_finished(), "they have waited for the server");
    drop((connection, silent));
    let said = replacing.join().unwrap();
    assert!(said.code != 0 && said.err.contains(&uri), "{}", said.err);
    assert_eq!(daemon.disk("data")["backing"]["kind"], "memory");
}

/// Passes bytes on, and changes one bit of requests and one of replies, each of another connection.
fn changing_network(exporter: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let left = Arc::new([AtomicBool::new(true), AtomicBool::new(true)]);
    std::thread::spawn(move || {
        for importer in listener.incoming() {
            let importer = importer.unwrap();
            let Ok(exporter) = TcpStream::connect(("127.0.0.1", exporter)) else { continue };
            let whole = Arc::new(AtomicBool::new(true));
            for (way, from, to) in [(0, &importer, &exporter), (1, &exporter, &importer)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let (left, whole) = (left.clone(), whole.clone());
                std::thread::spawn(move || {
                    let (mut buffer, mut passed) = ([0; 4096], 0);
                    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                        passed += bytes;
                        // Later than anything that is said about a disk.
                        if passed > 100_000
                            && left[way].load(Ordering::SeqCst)
                            && whole.swap(false, Ordering::SeqCst)
                            && left[way].swap(false, Ordering::SeqCst)
                        {
                            buffer[bytes / 2] ^= 0x10;
                        }
                        if to.write_all(&buffer[..bytes]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    port
}

/// What it changes is noticed on both sides and said by both, and every read finds the last write.
#[test]
fn a_network_that_changes_bits_is_found_out() {
    let port = free_port();
    let mut exporter = exporter("data", port, CrashLoad::image_bytes(QUEUES));
    exporter.start();
    let importer = daemon("[[core]]\nspin_us = 200\n");
    let uri = format!("nbd://127.0.0.1:{}/data", changing_network(port));
    let said = importer.cli(&["disk", "add", "data", "--remote", &uri, "--queues", &QUEUES.to_string()]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = CrashLoad::new(QUEUES, DEPTH, 73).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    step_until_remote(&mut load, &importer, |remote| {
        remote["state"] == "connected" && remote["changed"].as_u64() >= Some(2)
    });
    step_for(&mut load, Duration::from_millis(100));
    load.settle().unwrap();
    let disk = importer.disk("data");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    assert_eq!(disk["backing"]["remote"]["protection"], "crc32c", "{disk}");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    for words in
        ["on the way: plain text with CRC32C", "2 connections lost since data were changed on the way"]
    {
        assert!(shown.contains(words), "{words} is not in {shown}");
    }
    let export = &exporter.json(&["publish", "show", "data"]);
    assert_eq!(export["summed_connections"], QUEUES, "{export}");
    // Of changed requests it knows itself; of changed replies it is told, if the connection still carries that.
    let wrong = export["ends"]["wrong-sum"].as_u64().unwrap();
    assert!((1..=2).contains(&wrong), "{export}");
    let shown = exporter.cli(&["publish", "show", "data"]).out;
    assert!(
        shown.contains(&format!("{QUEUES} with CRC32C")) && shown.contains(&format!("{wrong} wrong-sum")),
        "{shown}"
    );
}
