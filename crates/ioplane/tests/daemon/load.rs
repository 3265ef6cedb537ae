//! A guest of a remote disk that goes on, and what both of its hosts need.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::driver::DiskOp;
use serde_json::Value;

use super::reader::Reader;
use super::{LIMIT, TestDaemon};

/// A port of this host that nobody listens on now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A host, not started yet, that publishes an image `data.img` under this name at this port.
pub fn exporter(name: &str, port: u16, bytes: u64) -> TestDaemon {
    let exporter = TestDaemon::new_beside_the_build("");
    let image = exporter.image("data.img", bytes);
    exporter.configure(&format!(
        "[[core]]\n[[export]]\nname = {name:?}\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n"
    ));
    exporter
}

/// Zeros all over a disk `data` of one queue, as the load finds it at its beginning.
pub fn zero(importer: &TestDaemon) {
    let mut guest = Reader::of(importer, "data", CrashLoad::image_bytes(1) as u32);
    assert_eq!(guest.status_of(DiskOp::WriteZeroes { unmap: false }), 0);
    drop(guest);
    await_no_guest(importer);
}

/// Who comes while a guest is still leaving is sent away.
pub fn await_no_guest(importer: &TestDaemon) {
    importer.until(|| importer.disk("data")["connected"] == false);
}

/// The guest goes on for so long.
pub fn step_for(load: &mut CrashLoad, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        load.step().unwrap();
    }
}

/// The guest goes on for as long as it takes until `met`; `state` is what is told if it does not come.
pub fn step_until(load: &mut CrashLoad, mut met: impl FnMut() -> bool, state: impl Fn() -> String) {
    let end = Instant::now() + LIMIT;
    while !met() {
        assert!(Instant::now() < end, "it does not come: {}", state());
        step_for(load, Duration::from_millis(5));
    }
}

/// The same until what the importer says of the connections of its disk `data` is so.
pub fn step_until_remote(load: &mut CrashLoad, importer: &TestDaemon, mut met: impl FnMut(&Value) -> bool) {
    let disk = || importer.disk("data");
    step_until(load, || met(&disk()["backing"]["remote"]), || disk().to_string());
}
