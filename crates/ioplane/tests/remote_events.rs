//! What the exporter of a disk tells beside its connections: the disk grows while it is used, an export is withdrawn, fails, or its host stops.

mod daemon;

use std::time::Duration;

use daemon::TestDaemon;
use daemon::load::{exporter, free_port, step_for, step_until};
use daemon::reader::Reader;
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// As virtio-blk has them.
const OK: u8 = 0;
const IOERR: u8 = 1;

fn running(config: &str) -> TestDaemon {
    let mut daemon = TestDaemon::new_beside_the_build(config);
    daemon.start();
    daemon
}

fn add(importer: &TestDaemon, name: &str, port: u16) {
    let uri = format!("nbd://127.0.0.1:{port}/{name}");
    let said = importer.cli(&["disk", "add", name, "--remote", &uri]);
    assert_eq!(said.code, 0, "{}", said.err);
}

/// An exporter of `data`, and an importer that has it.
fn pair(bytes: u64) -> (TestDaemon, TestDaemon, u16) {
    let port = free_port();
    let mut exporter = exporter("data", port, bytes);
    exporter.start();
    let importer = running("[[core]]\nspin_us = 200\n");
    add(&importer, "data", port);
    (exporter, importer, port)
}

/// What the exporter of a disk says, as its importer shows it.
fn said(importer: &TestDaemon, disk: &str) -> Value {
    importer.disk(disk)["backing"]["remote"]["exporter"].clone()
}

fn until_said(importer: &TestDaemon, disk: &str, word: &str) {
    importer.until(|| said(importer, disk) == word);
}

/// Sessions that an exporter has had.
fn sessions(exporter: &TestDaemon) -> usize {
    exporter.log().matches("a session with a host has begun").count()
}

#[test]
fn a_disk_grows_while_its_guest_writes_and_nothing_is_connected_anew() {
    let bytes = CrashLoad::image_bytes(2);
    let port = free_port();
    let mut exporter = exporter("data", port, bytes);
    exporter.start();
    let importer = running("[[core]]\nspin_us = 200\n");
    let uri = format!("nbd://127.0.0.1:{port}/data");
    assert_eq!(importer.cli(&["disk", "add", "data", "--remote", &uri, "--queues", "2"]).code, 0);
    let mut load = CrashLoad::new(2, 16, 31).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(100));
    let instance = importer.disk("data")["backing"]["remote"]["instance"].clone();
    for factor in [2, 3] {
        let size = (bytes * factor).to_string();
        assert_eq!(exporter.json(&["publish", "resize", "data", &size])["size"], bytes * factor);
        let disk = || importer.disk("data");
        step_until(&mut load, || disk()["size"] == bytes * factor, || disk().to_string());
    }
    step_for(&mut load, Duration::from_millis(100));
    load.settle().unwrap();
    let disk = importer.disk("data");
    let remote = &disk["backing"]["remote"];
    assert_eq!((&remote["losses"], &remote["instance"]), (&0.into(), &instance), "{disk}");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    assert_eq!(std::fs::metadata(exporter.path("data.img")).unwrap().len(), 3 * bytes);
}

#[test]
fn the_guest_is_told_of_the_size_and_uses_what_was_added() {
    let (exporter, importer, _) = pair(8 * MIB);
    let mut guest = Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    // Whoever comes is told of the size as it is.
    assert_eq!(guest.new_size(), 8 * MIB);
    assert_eq!(guest.status_at_end(DiskOp::Write, 16 * MIB), IOERR);
    exporter.json(&["publish", "resize", "data", "16M"]);
    assert_eq!(guest.new_size(), 16 * MIB);
    assert_eq!(guest.status_at_end(DiskOp::Write, 16 * MIB), OK);
    assert_eq!(guest.status_at_end(DiskOp::Read, 16 * MIB), OK);
    assert_eq!(importer.disk("data")["backing"]["remote"]["losses"], 0);
    // It is the exporter's to say, and what was said holds after a restart.
    let refused = importer.refused(&["disk", "resize", "data", "32M"]);
    assert!(refused.contains("ioplane publish resize"), "{refused}");
}

/// The connection is lost, the image grows, and the importer learns of it when it connects again.
#[test]
fn a_disk_that_was_cut_off_has_the_new_size_when_it_is_back() {
    let (mut exporter, importer, port) = pair(8 * MIB);
    let mut guest = Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    assert_eq!(guest.new_size(), 8 * MIB);
    exporter.kill9();
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "reconnecting");
    let image = exporter.path("data.img");
    let local = format!("[[core]]\n[[export]]\nname = \"data\"\npath = {image:?}\n");
    exporter.configure(&local);
    exporter.start();
    assert_eq!(exporter.json(&["publish", "resize", "data", "12M"])["size"], 12 * MIB);
    exporter.kill9();
    exporter.configure(&format!("{local}listen = \"127.0.0.1:{port}\"\nplain = true\n"));
    exporter.start();
    assert_eq!(guest.new_size(), 12 * MIB);
    assert_eq!(guest.status_at_end(DiskOp::Write, 12 * MIB), OK);
    // Another daemon of the importer's host finds it so, too.
    importer.until(|| importer.disk("data")["size"] == 12 * MIB);
}

/// A VMM reads the size when it makes the device, and its daemon may be another one by the time that the size is found: it is told when it connects again.
#[test]
fn a_guest_is_told_of_a_size_that_its_daemon_found_at_its_start() {
    let (exporter, mut importer, _) = pair(8 * MIB);
    let guest = Reader::connect(&importer, "data");
    assert_eq!(guest.new_size(), 8 * MIB);
    importer.kill9();
    drop(guest);
    exporter.until(|| exporter.cli(&["publish", "resize", "data", "16M"]).code == 0);
    importer.start();
    let guest = Reader::connect(&importer, "data");
    assert_eq!(guest.new_size(), 16 * MIB);
    drop(guest);
    // And once more by each connection, since nobody knows what this front end knew.
    let guest = Reader::connect(&importer, "data");
    assert_eq!(guest.new_size(), 16 * MIB);
}

#[test]
fn an_export_becomes_smaller_only_when_nobody_has_it() {
    let (exporter, importer, port) = pair(8 * MIB);
    let refused = exporter.refused(&["publish", "resize", "data", "4M"]);
    assert!(refused.contains("from 8M to 4M") && refused.contains("--shrink"), "{refused}");
    // No guest uses it, but the disk is there.
    until_said(&importer, "data", "served");
    let refused = exporter.refused(&["publish", "resize", "data", "4M", "--shrink"]);
    assert!(refused.contains("would be smaller") && refused.contains("a host in plain text"), "{refused}");
    let mut guest = Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    let refused = exporter.refused(&["publish", "resize", "data", "4M", "--shrink"]);
    assert!(refused.contains("connections are open"), "{refused}");
    assert_eq!(importer.disk("data")["size"], 8 * MIB);
    guest.stop();
    drop(guest);
    assert_eq!(importer.cli(&["disk", "remove", "data"]).code, 0);
    exporter.until(|| exporter.cli(&["publish", "resize", "data", "4M", "--shrink"]).code == 0);
    add(&importer, "data", port);
    assert_eq!(importer.disk("data")["size"], 4 * MIB);
    let refused = exporter.refused(&["publish", "resize", "data", "4194305"]);
    assert!(refused.contains("multiple of"), "{refused}");
}

/// A file that somebody has made larger is used as far as it is published, until that is changed.
#[test]
fn a_file_that_was_grown_by_hand_is_followed_when_that_is_asked_for() {
    let (exporter, importer, _) = pair(8 * MIB);
    let guest = Reader::connect(&importer, "data");
    assert_eq!(guest.new_size(), 8 * MIB);
    let file = std::fs::File::options().write(true).open(exporter.path("data.img")).unwrap();
    file.set_len(32 * MIB).unwrap();
    // Nor is it cut by whoever names the size that it has as far as it is published.
    for less in ["16M", "8M"] {
        let refused = exporter.refused(&["publish", "resize", "data", less]);
        assert!(refused.contains("made the file larger"), "{refused}");
        assert_eq!(exporter.json(&["publish", "list"])[0]["size"], 8 * MIB);
        assert_eq!(std::fs::metadata(exporter.path("data.img")).unwrap().len(), 32 * MIB);
    }
    exporter.json(&["publish", "resize", "data", "32M"]);
    assert_eq!(guest.new_size(), 32 * MIB);
}

#[test]
fn two_disks_of_one_host_share_one_session_and_hear_what_becomes_of_them() {
    let ports = [free_port(), free_port()];
    let mut exporter = TestDaemon::new_beside_the_build("");
    let export = |name: &str| {
        let image = exporter.image(&format!("{name}.img"), MIB);
        format!(
            "[[export]]\nname = {name:?}\npath = {image:?}\nlisten = \"127.0.0.1:{}\"\nplain = true\n",
            ports[0]
        )
    };
    let config = format!("[[core]]\n{}{}", export("data"), export("other"));
    exporter.configure(&config);
    exporter.start();
    let importer = running("[[core]]\n");
    for name in ["data", "other"] {
        add(&importer, name, ports[0]);
        until_said(&importer, name, "served");
    }
    assert_eq!(sessions(&exporter), 1, "{}", exporter.log());
    // A person takes one away.
    assert_eq!(exporter.cli(&["publish", "remove", "other", "--force"]).code, 0);
    until_said(&importer, "other", "withdrawn");
    let shown = importer.cli(&["disk", "show", "other"]).out;
    assert!(shown.contains("withdrawn there"), "{shown}");
    assert_eq!(said(&importer, "data"), "served");
    // The other one goes with its daemon, which says so.
    exporter.terminate();
    until_said(&importer, "data", "stopped");
    importer.until(|| importer.log().contains("the daemon there has been stopped"));
    exporter.start();
    until_said(&importer, "data", "served");
    assert_eq!(said(&importer, "other"), "withdrawn");
    exporter.json(&["reload"]);
    until_said(&importer, "other", "served");
    // One that dies says nothing: that may be the network.
    exporter.kill9();
    until_said(&importer, "data", "unknown");
    // Nobody is left who wants to be told.
    exporter.start();
    until_said(&importer, "data", "served");
    let ended = || exporter.log().matches("a session with a host has ended").count();
    let before = ended();
    for name in ["data", "other"] {
        assert_eq!(importer.cli(&["disk", "remove", name]).code, 0);
    }
    exporter.until(|| ended() > before);
}

/// The disk below the export fails: that is no failure of the network, and is told as soon as it happens.
#[test]
fn a_disk_that_fails_at_the_exporter_is_told_apart_from_the_network() {
    let [below, above] = [free_port(), free_port()];
    let mut bottom = exporter("data", below, MIB);
    bottom.start();
    let middle = running(&format!(
        "[[core]]\n[[export]]\nname = \"data\"\nremote = \"nbd://127.0.0.1:{below}/data\"\ntimeout_s = 1\n\
         listen = \"127.0.0.1:{above}\"\nplain = true\n"
    ));
    let importer = running("[[core]]\n");
    add(&importer, "data", above);
    let mut guest = Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    until_said(&importer, "data", "served");
    bottom.kill9();
    assert_eq!(guest.status_of(DiskOp::Read), IOERR);
    until_said(&importer, "data", "failing");
    let disk = importer.disk("data");
    let remote = &disk["backing"]["remote"];
    assert_eq!(remote["state"], "connected", "{disk}");
    assert!(remote["exporter_why"].as_str().unwrap().contains("requests below it fail"), "{disk}");
    importer.until(|| {
        let why = importer.disk("data")["backing"]["remote"]["exporter_why"].to_string();
        why.contains("the server of its disk is not reachable")
    });
    assert!(middle.json(&["publish", "list"])[0]["trouble"].is_string());
}

/// What the exporter of `data` says is wrong with it, once that contains `text`: to its importer, and at its own host.
fn until_wrong(exporter: &TestDaemon, importer: &TestDaemon, text: &str) {
    let why = || importer.disk("data")["backing"]["remote"]["exporter_why"].to_string();
    importer.until(|| why().contains(text));
    until_said(importer, "data", "failing");
    let trouble = exporter.json(&["publish", "list"])[0]["trouble"].to_string();
    assert!(trouble.contains(text), "{trouble}");
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("something is wrong with the disk there") && shown.contains(text), "{shown}");
    exporter.until(|| exporter.log().contains("its image is not as it was published"));
    assert!(exporter.log().contains(text), "{}", exporter.log());
}

/// The file of a published disk is cut: reads behind its end fail, as those of a broken disk, and it is said what was done.
#[test]
fn an_image_that_is_cut_is_a_device_failure_and_says_what_was_done() {
    let (exporter, importer, _) = pair(8 * MIB);
    let mut guest = Reader::connect(&importer, "data");
    until_said(&importer, "data", "served");
    assert_eq!(guest.status_at_end(DiskOp::Write, 8 * MIB), OK);
    let file = std::fs::File::options().write(true).open(exporter.path("data.img")).unwrap();
    file.set_len(4 * MIB).unwrap();
    assert_eq!(guest.status_at_end(DiskOp::Read, 8 * MIB), IOERR);
    let cut = format!("its image was cut to {} bytes of {}", 4 * MIB, 8 * MIB);
    until_wrong(&exporter, &importer, &cut);
    let remote = importer.disk("data")["backing"]["remote"].clone();
    assert_eq!((&remote["state"], &remote["losses"]), (&"connected".into(), &0.into()), "{remote}");
    assert!(remote["device_errors"].as_u64() >= Some(1), "{remote}");
    // What is left of it is served.
    assert_eq!(guest.status_at_end(DiskOp::Read, 4 * MIB), OK);
    assert_eq!(guest.status_at_end(DiskOp::Write, 4 * MIB), OK);
    // Its length is put back: requests are served, the disk is known to have failed for a while longer.
    file.set_len(8 * MIB).unwrap();
    assert_eq!(guest.status_at_end(DiskOp::Read, 8 * MIB), OK);
    exporter.until(|| exporter.log().contains("its image is again as it was published"));
    let why = || importer.disk("data")["backing"]["remote"]["exporter_why"].to_string();
    importer.until(|| !why().contains("was cut"));
    assert!(!exporter.log().contains("panicked"), "{}", exporter.log());
}

/// The file is removed, put back, and then another one is in its place.
#[test]
fn an_image_that_vanishes_is_told_before_anything_is_lost() {
    let (mut exporter, importer, _) = pair(8 * MIB);
    let mut guest = Reader::connect(&importer, "data");
    until_said(&importer, "data", "served");
    let (image, spare) = (exporter.path("data.img"), exporter.path("spare.img"));
    std::fs::hard_link(&image, &spare).unwrap();
    std::fs::remove_file(&image).unwrap();
    until_wrong(&exporter, &importer, "its image was moved or removed");
    // Its guest reads and writes the file that the exporter has open.
    assert_eq!(guest.status_at_end(DiskOp::Write, 8 * MIB), OK);
    assert_eq!(guest.status_of(DiskOp::Read), OK);
    std::fs::hard_link(&spare, &image).unwrap();
    until_said(&importer, "data", "served");
    exporter.until(|| exporter.log().contains("its image is again as it was published"));

    std::fs::remove_file(&image).unwrap();
    exporter.image("data.img", 8 * MIB);
    until_wrong(&exporter, &importer, "another file is where its image was");
    assert_eq!(guest.status_of(DiskOp::Read), OK);
    let remote = importer.disk("data")["backing"]["remote"].clone();
    assert_eq!((&remote["losses"], &remote["device_errors"]), (&0.into(), &0.into()), "{remote}");
    // An exporter that is started now has another disk under that name. Nothing of the guest goes into it, or comes from it.
    exporter.kill9();
    exporter.start();
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "stopped");
    assert_eq!(guest.status_of(DiskOp::Read), IOERR);
    assert_eq!(guest.status_at_end(DiskOp::Write, 8 * MIB), IOERR);
    let shown = importer.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("another"), "{shown}");
    // The right file is put back in its place, and the exporter started with it.
    exporter.kill9();
    std::fs::rename(&spare, &image).unwrap();
    exporter.start();
    importer.cli(&["disk", "accept", "data"]);
    importer.until(|| importer.disk("data")["backing"]["remote"]["state"] == "connected");
    assert_eq!(guest.status_of(DiskOp::Read), OK);
    for host in [&exporter, &importer] {
        assert!(!host.log().contains("panicked"), "{}", host.log());
    }
}

/// Who holds an export is told to those who have it, too.
#[test]
fn who_holds_the_export_is_told() {
    let (exporter, importer, port) = pair(MIB);
    until_said(&importer, "data", "served");
    let holder = |of: &TestDaemon| of.disk("data")["backing"]["remote"]["exporter_holder"].clone();
    assert_eq!(holder(&importer), Value::Null);
    let other = running("[[core]]\n");
    add(&other, "data", port);
    let mut guest = Reader::connect(&other, "data");
    guest.submit(1);
    guest.wait(1);
    importer.until(|| holder(&importer).is_string());
    assert_eq!(holder(&importer), exporter.json(&["publish", "list"])[0]["claim"]["holder"]);
    guest.stop();
    importer.until(|| holder(&importer) == Value::Null);
}
