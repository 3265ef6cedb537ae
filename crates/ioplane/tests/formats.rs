//! Images that look as if they were not raw.

mod house;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use house::House;

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
    let house = House::open(
        "[[disk]]\nname = \"a\"\npath = \"a.img\"\nformat = \"raw\"\n[[disk]]\nname = \"b\"\npath = \"a.qcow2\"\n",
    );
    let image = house.path("a.qcow2");
    qcow2(&image);
    let before = std::fs::read(&image).unwrap();
    let add = ["disk", "add", "c", "--path", image.to_str().unwrap()];
    let refused = house.refused(&add);
    for words in
        ["looks like a qcow2 image", "qemu-img convert -f qcow2 -O raw", "--format raw", "format = \"raw\""]
    {
        assert!(refused.contains(words), "{words} is not in {refused}");
    }
    let body = format!("{{\"path\": {image:?}}}");
    let (status, said) = house.http("PUT", "/v1/disks/c", &body);
    assert_eq!(status, 422, "{said}");
    assert!(said["error"].as_str().unwrap().contains("qcow2"), "{said}");
    // As one that is in the configuration: failed, and the others are served.
    house.until(|| {
        house.disk("b")["error"].as_str().is_some_and(|error| error.contains("looks like a qcow2"))
    });
    // Not as another backing of a disk either.
    house.json(&["disk", "add", "m", "--memory", "64K"]);
    assert!(house.refused(&["disk", "replace", "m", "--path", image.to_str().unwrap()]).contains("qcow2"));
    assert_eq!(std::fs::read(&image).unwrap(), before, "touched");
    // Whoever says that it is raw has it so.
    house.json(&[&add[..], &["--format", "raw"]].concat());
    assert_eq!(house.disk("c")["size"], before.len().next_multiple_of(512));
    house.json(&["disk", "remove", "c"]);
    let body = format!("{{\"path\": {image:?}, \"format\": \"raw\"}}");
    assert_eq!(house.http("PUT", "/v1/disks/c", &body).0, 201);
    house.json(&["disk", "remove", "c"]);
    house.json(&["disk", "replace", "m", "--path", image.to_str().unwrap(), "--format", "raw"]);
    house.json(&["disk", "remove", "m"]);
    // Another word is none.
    assert_eq!(house.cli(&[&add[..], &["--format", "qcow2"]].concat()).code, 2);
}

/// A guest that writes the first bytes of a qcow2 image to its raw disk keeps it, until the host forgets what it was.
#[test]
fn hole_16_a_guest_that_writes_a_magic_locks_nobody_out() {
    let config = "[[disk]]\nname = \"a\"\npath = \"a.img\"\n[[disk]]\nname = \"b\"\npath = \"b.img\"\n";
    let mut house = House::new(config);
    let image = house.image("a.img", MIB);
    house.image("b.img", MIB);
    house.start();
    assert_eq!(house.disk("a")["state"], "served");
    // As its guest does, by way of the daemon.
    std::fs::File::options().write(true).open(&image).unwrap().write_all_at(MAGIC, 0).unwrap();
    house.kill9();
    house.start();
    house.until(|| house.disk("a")["state"] == "served");
    house.terminate();
    house.start();
    house.until(|| house.disk("a")["state"] == "served");
    // The host is booted anew: nothing in the run directory is left. Its own disk only, and it is said what to do.
    house.kill9();
    std::fs::remove_file(house.path("state.json")).unwrap();
    house.start();
    house.until(|| house.disk("a")["state"] == "failed");
    house.until(|| house.disk("b")["state"] == "served");
    assert!(house.disk("a")["remedy"].as_str().unwrap().contains("format = \"raw\""));
    house.configure(&config.replace("\"a.img\"\n", "\"a.img\"\nformat = \"raw\"\n"));
    assert_eq!(house.json(&["reload"])["done"][0], "disk a changed");
    assert_eq!(house.disk("a")["state"], "served");
    // To say so of one that a guest uses changes nothing for it.
    let front_end = house.connect("b");
    house.configure(&config.replace("img\"\n", "img\"\nformat = \"raw\"\n"));
    assert_eq!(house.json(&["reload"])["done"], serde_json::json!(["disk b changed"]));
    assert_eq!(house.disk("b")["connected"], true);
    drop(front_end);
}
