//! Readers of one export: what their guests have cached holds as long as nobody has written the image.

mod daemon;

use std::io::{Read, Write};

use daemon::TestDaemon;
use daemon::reader::Reader;
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::slow::SlowDisk;
use serde_json::Value;

fn started(config: &str) -> TestDaemon {
    let mut daemon = TestDaemon::new_beside_the_build(config).without_locks();
    daemon.start();
    daemon
}

fn remote(importer: &TestDaemon) -> Value {
    importer.disk("data")["backing"]["remote"].clone()
}

/// What its guest has cached holds as long as nobody has written the image, whatever else becomes of it.
fn check_returning_reader(image: &str, kind: &str) {
    let mut daemon = started("[[core]]\n");
    let publish = ["publish", "disk", "data", "--path", image, "--read-only"];
    let publishes = |daemon: &TestDaemon| {
        let said = daemon.cli(&publish);
        assert_eq!(said.code, 0, "{kind}: {}", said.err);
    };
    publishes(&daemon);
    let uri = format!("nbd+unix:///data?socket={}", daemon.path("data.sock").display());
    let reader = started("[[core]]\nspin_us = 200\n");
    let add = ["disk", "add", "data", "--remote", &uri, "--read-only"];
    assert_eq!(reader.cli(&add).code, 0);
    let mut guest = Reader::connect(&reader, "data");
    let mut reads = |why: &str, losses: u64| {
        reader.until(|| remote(&reader)["losses"] == losses);
        assert_eq!(guest.status_of(DiskOp::Read), 0, "{kind}, {why}: {}", remote(&reader));
    };
    reads("as it was", 0);
    daemon.kill9();
    daemon.start();
    reads("its exporter was restarted", 1);
    let withdraw = |daemon: &TestDaemon| {
        assert_eq!(daemon.cli(&["publish", "remove", "data", "--force"]).code, 0, "{}", daemon.log());
    };
    withdraw(&daemon);
    publishes(&daemon);
    reads("it was published again", 2);
    // Whoever reads it, and what it is called, changes nothing.
    withdraw(&daemon);
    let metadata = std::fs::metadata(image).unwrap();
    std::fs::set_permissions(image, metadata.permissions()).unwrap();
    std::fs::File::open(image).unwrap().read_exact(&mut [0; 4096]).unwrap();
    daemon.kill9();
    daemon.start();
    publishes(&daemon);
    reads("it was read, and its attributes were set", 3);
    withdraw(&daemon);
    let said = daemon.cli(&["disk", "add", "local", "--path", image]);
    assert_eq!(said.code, 0, "{kind}: {}", said.err);
    let mut local = Reader::connect(&daemon, "local");
    assert_eq!([DiskOp::Write, DiskOp::Flush].map(|op| local.status_of(op)), [0; 2]);
    drop(local);
    assert_eq!(daemon.cli(&["disk", "remove", "local", "--force"]).code, 0);
    publishes(&daemon);
    reader.until(|| remote(&reader)["state"] == "stopped");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "{kind}: {}", remote(&reader));
    let why = remote(&reader)["why"].as_str().unwrap().to_owned();
    assert!(why.contains("was written to while it was not published"), "{kind}: {why}");
    // Nothing makes it what it was.
    assert_eq!(reader.cli(&["disk", "accept", "data"]).code, 0);
    reader.until(|| remote(&reader)["state"] == "stopped");
    assert_eq!(guest.status_of(DiskOp::Read), 1, "{kind}: {}", remote(&reader));
    drop(guest);
    assert_eq!(reader.cli(&["disk", "remove", "data", "--force"]).code, 0);
    assert_eq!(reader.cli(&add).code, 0);
    assert_eq!(Reader::connect(&reader, "data").status_of(DiskOp::Read), 0);
}

#[test]
fn a_reader_that_comes_back_to_another_content_stops() {
    let folder = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = folder.path().join("data.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    check_returning_reader(image.to_str().unwrap(), "an image");
}

/// Which does not say when it was written.
#[test]
fn a_reader_that_comes_back_to_a_device_with_another_content_stops() {
    let folder = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match SlowDisk::new(folder.path(), 1 << 20, 1 << 30) {
        Ok(disk) => check_returning_reader(disk.device(), "a device"),
        Err(why) => {
            let _ = writeln!(
                std::io::stderr(),
                "\n*** SKIPPED: the content of a device was NOT tested: {why} ***"
            );
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
        }
    }
}
