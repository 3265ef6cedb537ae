//! Comparing a disk with another copy while its guest uses it: what was planted is found, what the guest writes is not called different, and
//! nothing is left behind.

mod daemon;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use daemon::load;
use daemon::{Said, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use serde_json::Value;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
/// More than the guest writes to.
const BYTES: u64 = 12 << 20;
/// Slow enough that something can be done meanwhile, and soon over.
const RATE: &str = "3M";

/// An image of zeros and a pattern where the guest does not write, a copy of it, and a daemon whose disk `data` the image is.
fn with_copy() -> (TestDaemon, PathBuf) {
    let mut daemon = TestDaemon::new_beside_the_build("");
    let (image, copy) = (daemon.image("data.img", BYTES), daemon.path("copy.img"));
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    let pattern: Vec<u8> =
        (0..1u32 << 20).flat_map(|at| at.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    file.write_all_at(&pattern, 6 << 20).unwrap();
    assert!(CrashLoad::image_bytes(QUEUES) <= 6 << 20);
    std::fs::copy(&image, &copy).unwrap();
    daemon.configure(&format!(
        "[[core]]\nspin_us = 200\n[[disk]]\nname = \"data\"\npath = {image:?}\nqueues = {QUEUES}\n"
    ));
    daemon.start();
    (daemon, copy)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn flip(path: &Path, at: u64, bit: u8) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << bit], at).unwrap();
}

/// The exit code is that, and this the report.
fn verify(daemon: &TestDaemon, args: &[&str], code: i32) -> Value {
    let said = daemon.cli(&[&["verify", "data", "--json"], args].concat());
    assert_eq!(said.code, code, "{args:?}: {}{}{}", said.out, said.err, daemon.log());
    serde_json::from_str(&said.out).unwrap()
}

/// The exit code says that it is not known whether they differ.
fn fails(daemon: &TestDaemon, args: &[&str]) -> String {
    let said: Said = daemon.cli(&[&["verify", "data"], args].concat());
    assert_eq!(said.code, 2, "{args:?}: {}{}", said.out, said.err);
    said.err
}

fn state(daemon: &TestDaemon) -> String {
    daemon.disk("data")["verify"]["state"].as_str().unwrap_or("none").to_owned()
}

/// The disk can be used as before, and its backing changed.
fn is_settled(daemon: &TestDaemon, load: &mut CrashLoad) {
    load.settle().unwrap();
    let disk = daemon.disk("data");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    let size = daemon.cli(&["disk", "resize", "data", "16M"]);
    assert_eq!(size.code, 0, "{}", size.err);
}

#[test]
fn planted_differences_are_found_beside_a_guest_that_writes() {
    let (daemon, copy) = with_copy();
    let found = verify(&daemon, &["--with", text(&copy)], 0);
    assert_eq!(
        (&found["state"], &found["compared"], &found["different"], &found["written"]),
        (&"equal".into(), &BYTES.into(), &0.into(), &0.into())
    );
    // At the beginning the guest will write, too: it has not when this is compared.
    for (at, bit) in [(0, 0), (7 << 20, 3), (BYTES - 1, 7)] {
        flip(&copy, at, bit);
    }
    let found = verify(&daemon, &["--with", text(&copy)], 1);
    let range = |offset: u64| serde_json::json!({ "offset": offset, "len": 512 });
    assert_eq!(found["first"], Value::from(vec![range(0), range(7 << 20), range(BYTES - 512)]), "{found}");
    assert_eq!((&found["ranges"], &found["different"]), (&3.into(), &1536.into()));
    flip(&copy, 0, 0);
    // The guest writes from the beginning on, and as long as it takes.
    let mut load = CrashLoad::new(QUEUES, DEPTH, 31).unwrap();
    load.attach(&daemon.path("data.sock")).unwrap();
    let said = daemon.cli(&["verify", "data", "--with", text(&copy), "--rate", RATE, "--detach"]);
    assert_eq!(said.code, 0, "{}", said.err);
    load::step_until(&mut load, || state(&daemon) != "comparing", || daemon.log());
    let disk = daemon.disk("data");
    assert_eq!(disk["verify"]["first"], Value::from(vec![range(7 << 20), range(BYTES - 512)]), "{disk}");
    assert_eq!(disk["verify"]["state"], "different", "{disk}");
    assert_eq!(disk["verify"]["compared"], BYTES);
    is_settled(&daemon, &mut load);
}

#[test]
fn a_copy_of_another_size_is_different() {
    let (daemon, copy) = with_copy();
    for bytes in [BYTES + 4096, BYTES - 512, 5000] {
        std::fs::File::options().write(true).open(&copy).unwrap().set_len(bytes).unwrap();
        let found = verify(&daemon, &["--with", text(&copy)], 1);
        assert_eq!((&found["different"], &found["bytes"]), (&0.into(), &BYTES.into()), "{found}");
        let other = bytes.next_multiple_of(512);
        assert_eq!(
            (found["other_bytes"].as_u64(), found["compared"].as_u64()),
            (Some(other), Some(other.min(BYTES)))
        );
    }
}

/// What a swap has left behind, without saying where that is.
#[test]
fn after_a_swap_the_old_copy_is_compared() {
    let (daemon, _) = with_copy();
    assert!(fails(&daemon, &[]).contains("--with"));
    let new = daemon.path("new.img");
    let said = daemon.cli(&["swap", "data", "--to", text(&new)]);
    assert_eq!(said.code, 0, "{}", said.err);
    let old = daemon.path("data.img");
    assert_eq!(verify(&daemon, &[], 0)["with"], text(&old));
    flip(&old, 5_000_000, 6);
    assert_eq!(verify(&daemon, &[], 1)["first"][0]["offset"], 5_000_000 / 512 * 512);
    let said = daemon.cli(&["verify", "data"]);
    assert!(said.code == 1 && said.out.contains("512 in 1 range"), "{}{}", said.out, said.err);
}

#[test]
fn what_cannot_be_compared_is_said() {
    let (daemon, copy) = with_copy();
    assert!(fails(&daemon, &["--with", "/nowhere/copy.img"]).contains("/nowhere/copy.img"));
    assert!(fails(&daemon, &["--with", text(&daemon.path("data.img"))]).contains("in use"));
    assert!(fails(&daemon, &["--with", text(&copy), "--rate", "1"]).contains("never end"));
    assert!(fails(&daemon, &["--with", "nbd://127.0.0.1:1/data"]).contains("nbdinfo"));
    assert!(fails(&daemon, &["--with", "device:elsewhere"]).contains("directory"));
    assert!(fails(&daemon, &["--cancel"]).contains("not being compared"));
    let said = daemon.cli(&["disk", "add", "other", "--path", text(&copy)]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(fails(&daemon, &["--with", text(&copy)]).contains("in use"), "another guest writes to it");
    let (status, refused) =
        daemon.http("POST", "/v1/disks/data/verify", r#"{"path": "/a", "remote": "nbd://b/c"}"#);
    assert_eq!(status, 422, "{refused}");
    assert_eq!(daemon.disk("data")["verify"], Value::Null);
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let (daemon, copy) = with_copy();
    let mut load = CrashLoad::new(QUEUES, DEPTH, 32).unwrap();
    load.attach(&daemon.path("data.sock")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    command.arg("--socket").arg(daemon.path("control.sock"));
    command.args(["verify", "data", "--with", text(&copy), "--rate", "4K"]);
    let mut command = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    load::step_until(
        &mut load,
        || daemon.disk("data")["verify"]["compared"].as_u64() > Some(0),
        || daemon.log(),
    );
    for args in [&["disk", "resize", "data", "16M"][..], &["swap", "data", "--to", "memory"], &["upgrade"]] {
        let refused = daemon.refused(args);
        assert!(refused.contains("is being compared"), "{args:?}: {refused}");
    }
    assert!(fails(&daemon, &["--with", text(&copy)]).contains("is being compared"));
    daemon.signal_to(command.id().into(), "INT");
    load::step_until(&mut load, || command.try_wait().unwrap().is_some(), || daemon.log());
    assert_eq!(command.wait().unwrap().code(), Some(2));
    assert_eq!(state(&daemon), "cancelled");
    // The copy is closed: somebody else may have it.
    let said = daemon.cli(&["disk", "add", "other", "--path", text(&copy)]);
    assert_eq!(said.code, 0, "{}", said.err);
    is_settled(&daemon, &mut load);
}

/// A disk of another machine, and a replica of it here.
#[test]
fn a_disk_of_another_machine_is_compared_with_a_local_copy_over_a_connection_that_breaks() {
    let (mut exporter, copy) = (TestDaemon::new_beside_the_build(""), "copy.img");
    let images = ["data", "other"].map(|name| {
        let image = exporter.image(&format!("{name}.img"), BYTES);
        format!("[[export]]\nname = {name:?}\npath = {image:?}\n")
    });
    exporter.configure(&format!("[[core]]\n{}", images.concat()));
    exporter.start();
    let uri = |name: &str| {
        format!("nbd+unix:///{name}?socket={}", exporter.path(&format!("{name}.sock")).display())
    };
    let [data, other] = [uri("data"), uri("other")];
    let mut importer = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
    importer.start();
    let copy = importer.image(copy, BYTES);
    flip(&copy, BYTES - 4097, 1);
    let said = importer.cli(&["disk", "add", "data", "--remote", &data]);
    assert_eq!(said.code, 0, "{}", said.err);
    // Nobody uses the disk yet, so its export would be read by others too. The same export by another name is noticed all the same.
    let (socket, again) = (exporter.path("data.sock"), exporter.path("again.sock"));
    std::os::unix::fs::symlink(&socket, &again).unwrap();
    let again = format!("nbd+unix:///data?socket={}", again.display());
    assert!(fails(&importer, &["--with", &again]).contains("is what the disk is on"));
    // The exporter comes back: reads are sent again, on both sides of the comparison.
    for with in [text(&copy), &other] {
        let said = importer.cli(&["verify", "data", "--with", with, "--rate", RATE, "--detach"]);
        assert_eq!(said.code, 0, "{}", said.err);
        importer.until(|| importer.disk("data")["verify"]["compared"].as_u64() > Some(1 << 20));
        exporter.kill9();
        exporter.start();
        importer.until(|| state(&importer) != "comparing");
        let found = &importer.disk("data")["verify"];
        let differs = with == text(&copy);
        assert_eq!(found["state"], if differs { "different" } else { "equal" }, "{found}");
        assert_eq!(
            (&found["ranges"], &found["compared"]),
            (&u64::from(differs).into(), &BYTES.into()),
            "{found}"
        );
    }
    // Who holds the disk reads it; nobody else does.
    assert!(fails(&importer, &["--with", &data]).contains("is what the disk is on"));
    let third = TestDaemon::open("[[core]]\n[[disk]]\nname = \"data\"\nmemory = \"12M\"\n");
    assert!(fails(&third, &["--with", &data]).contains("is held by disk data"));
    assert_eq!(verify(&third, &["--with", &other], 0)["state"], "equal");
    // It does not come back: that is said, and the disk waits on.
    let said = third.cli(&["verify", "data", "--with", &other, "--rate", "256K", "--detach"]);
    assert_eq!(said.code, 0, "{}", said.err);
    third.until(|| third.disk("data")["verify"]["compared"].as_u64() > Some(0));
    exporter.kill9();
    third.until(|| state(&third) == "failed");
    let found = &third.disk("data")["verify"];
    assert!(found["error"].as_str().unwrap().starts_with("the other copy could not be read at"), "{found}");
    let said = third.cli(&["disk", "resize", "data", "16M"]);
    assert_eq!(said.code, 0, "{}", said.err);
}
