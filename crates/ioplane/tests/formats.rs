//! Images that look as if they were not raw.

mod daemon;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use daemon::TestDaemon;

const MIB: u64 = 1 << 20;
/// Of a qcow2 image.
const MAGIC: &[u8] = b"QFI\xfb\0\0\0\x03";

/// What `qemu-img` makes; script/bootstrap installs it.
fn qcow2(path: &Path) {
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(path).arg("4M").status();
    assert!(made.expect("qemu-img (package qemu-utils)").success());
}

#[test]
fn hole_16_a_qcow2_image_is_not_served_as_raw_unless_that_is_said() {
    let daemon = TestDaemon::open(
        "[[disk]]\nname = \"a\"\npath = \"a.img\"\nformat = \"raw\"\n[[disk]]\nname = \"b\"\npath = \"a.qcow2\"\n",
    );
    let image = daemon.path("a.qcow2");
    qcow2(&image);
    let before = std::fs::read(&image).unwrap();
    let add = ["disk", "add", "c", "--path", image.to_str().unwrap()];
    let refused = daemon.refused(&add);
    for words in
        ["looks like a qcow2 image", "qemu-img convert -f qcow2 -O raw", "--format raw", "format = \"raw\""]
    {
        assert!(refused.contains(words), "{words} is not in {refused}");
    }
    let body = format!("{{\"path\": {image:?}}}");
    let (status, said) = daemon.http("PUT", "/v1/disks/c", &body);
    assert_eq!(status, 422, "{said}");
    assert!(said["error"].as_str().unwrap().contains("qcow2"), "{said}");
    // As one that is in the configuration: failed, and the others are served.
    daemon.until(|| {
        daemon.disk("b")["error"].as_str().is_some_and(|error| error.contains("looks like a qcow2"))
    });
    // Not as another backing of a disk either.
    daemon.json(&["disk", "add", "m", "--memory", "64K"]);
    assert!(daemon.refused(&["disk", "replace", "m", "--path", image.to_str().unwrap()]).contains("qcow2"));
    assert_eq!(std::fs::read(&image).unwrap(), before, "touched");
    // Whoever says that it is raw has it so.
    daemon.json(&[&add[..], &["--format", "raw"]].concat());
    assert_eq!(daemon.disk("c")["size"], before.len().next_multiple_of(512));
    daemon.json(&["disk", "remove", "c"]);
    let body = format!("{{\"path\": {image:?}, \"format\": \"raw\"}}");
    assert_eq!(daemon.http("PUT", "/v1/disks/c", &body).0, 201);
    daemon.json(&["disk", "remove", "c"]);
    daemon.json(&["disk", "replace", "m", "--path", image.to_str().unwrap(), "--format", "raw"]);
    daemon.json(&["disk", "remove", "m"]);
    // Another word is none.
    assert_eq!(daemon.cli(&[&add[..], &["--format", "qcow2"]].concat()).code, 2);
}

/// A guest that writes the first bytes of a qcow2 image to its raw disk keeps it, until the host forgets what it was.
#[test]
fn hole_16_a_guest_that_writes_a_magic_locks_nobody_out() {
    let config = "[[disk]]\nname = \"a\"\npath = \"a.img\"\n[[disk]]\nname = \"b\"\npath = \"b.img\"\n";
    let mut daemon = TestDaemon::new(config);
    let image = daemon.image("a.img", MIB);
    daemon.image("b.img", MIB);
    daemon.start();
    assert_eq!(daemon.disk("a")["state"], "served");
    // As its guest does, by way of the daemon.
    std::fs::File::options().write(true).open(&image).unwrap().write_all_at(MAGIC, 0).unwrap();
    daemon.kill9();
    daemon.start();
    daemon.until(|| daemon.disk("a")["state"] == "served");
    daemon.terminate();
    daemon.start();
    daemon.until(|| daemon.disk("a")["state"] == "served");
    // The host is booted anew: nothing in the run directory is left. Its own disk only, and it is said what to do.
    daemon.kill9();
    std::fs::remove_file(daemon.path("state.json")).unwrap();
    daemon.start();
    daemon.until(|| daemon.disk("a")["state"] == "failed");
    daemon.until(|| daemon.disk("b")["state"] == "served");
    assert!(daemon.disk("a")["remedy"].as_str().unwrap().contains("format = \"raw\""));
    daemon.configure(&config.replace("\"a.img\"\n", "\"a.img\"\nformat = \"raw\"\n"));
    assert_eq!(daemon.json(&["reload"])["done"][0], "disk a changed");
    assert_eq!(daemon.disk("a")["state"], "served");
    // To say so of one that a guest uses changes nothing for it.
    let front_end = daemon.connect("b");
    daemon.configure(&config.replace("img\"\n", "img\"\nformat = \"raw\"\n"));
    assert_eq!(daemon.json(&["reload"])["done"], serde_json::json!(["disk b changed"]));
    assert_eq!(daemon.disk("b")["connected"], true);
    drop(front_end);
}
