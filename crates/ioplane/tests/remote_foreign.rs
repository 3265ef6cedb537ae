//! Servers of others, which cannot say what became of requests without an answer; and servers that say nothing for too long.

mod daemon;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use daemon::TestDaemon;
use daemon::load::free_port;
use daemon::reader::Reader;
use ioplane_testkit::driver::DiskOp;

/// nbdkit with an image; ends with the value.
struct Nbdkit(Child);

impl Nbdkit {
    /// Begins a write after `delay`, and writes down what it is asked for. `None`, said past the capture of the test harness, where it is missing.
    fn start(folder: &TestDaemon, log: &str, delay: &str) -> Option<Nbdkit> {
        let socket = folder.path("nbdkit.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--filter=log", "--filter=delay", "-U"]).arg(&socket).arg("file");
        command.arg(folder.path("data.img")).arg(format!("wdelay={delay}"));
        command.arg(format!("logfile={}", folder.path(log).display()));
        match command.stdin(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(child) => {
                let server = Nbdkit(child);
                folder.until(|| UnixStream::connect(&socket).is_ok());
                Some(server)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let why = "SKIPPED: a server of others that is killed was NOT tested: install nbdkit";
                let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
                assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
                None
            }
            Err(error) => panic!("nbdkit: {error}"),
        }
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a log of nbdkit's has a write.
fn has_write(log: &Path) -> bool {
    std::fs::read_to_string(log).is_ok_and(|text| text.contains(" Write "))
}

/// It is killed with a write that it has begun, and started again: that write fails, or is sent again where somebody has said so.
#[test]
fn writes_in_doubt_fail_or_are_sent_again_as_was_asked_for() {
    for resend in [false, true] {
        let mut importer = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
        importer.start();
        importer.image("data.img", 1 << 20);
        let Some(server) = Nbdkit::start(&importer, "first", "1000") else { return };
        let uri = format!("nbd+unix:///?socket={}", importer.path("nbdkit.sock").display());
        let asked: &[&str] = if resend { &["--in-doubt", "resend"] } else { &[] };
        let said = importer.cli(&[&["disk", "add", "data", "--remote", &uri], asked].concat());
        assert_eq!(said.code, 0, "{}", said.err);
        assert_eq!(said.err.contains("old data overwrite newer"), resend, "{}", said.err);
        // Also where it is published, and only for people.
        let published =
            importer.cli(&[&["publish", "disk", "onward", "--remote", &uri, "--json"], asked].concat());
        assert_eq!(published.code, 0, "{}", published.err);
        assert_eq!(published.err.contains("old data overwrite newer"), resend, "{}", published.err);
        assert!(serde_json::from_str::<serde_json::Value>(&published.out).is_ok(), "{}", published.out);
        assert_eq!(importer.cli(&["publish", "remove", "onward"]).code, 0);
        assert_eq!(importer.log().contains("sent again when the connection is lost"), resend);
        let mut guest = Reader::connect(&importer, "data");
        guest.submit(1);
        guest.wait(1);
        let (status, server) = std::thread::scope(|scope| {
            let written = scope.spawn(|| guest.status_of(DiskOp::Write));
            importer.until(|| has_write(&importer.path("first")));
            drop(server);
            // On this thread: nbdkit ends with the thread that has started it.
            let server = Nbdkit::start(&importer, "second", "0").unwrap();
            (written.join().unwrap(), server)
        });
        let remote = importer.disk("data")["backing"]["remote"].clone();
        let shown = importer.cli(&["disk", "show", "data"]).out;
        assert_eq!(remote["losses"], 1, "{remote}");
        if resend {
            assert_eq!((status, remote["in_doubt"].as_str()), (0, Some("resend")), "{remote}");
            assert!(remote["replays"].as_u64() > Some(0) && shown.contains("SENT AGAIN"), "{shown}");
        } else {
            assert_eq!(
                (status, remote["in_doubt"].as_str()),
                (1, Some("fail")),
                "VIRTIO_BLK_S_IOERR: {remote}"
            );
            assert!(shown.contains("writes without an answer fail"), "{shown}");
        }
        assert_eq!(has_write(&importer.path("second")), resend);
        // The disk goes on, whatever became of that one.
        assert_eq!(guest.status_of(DiskOp::Write), 0);
        assert!(has_write(&importer.path("second")));
        drop((guest, server));
    }
}

/// How long a server may say nothing is what was asked for, less than usual and more.
#[test]
fn silence_counts_as_a_lost_connection_after_the_time_that_was_asked_for() {
    const SHORT: Duration = Duration::from_secs(2);
    /// As long as it may take with [`SHORT`] on a loaded machine, and less than without.
    const LATE: Duration = Duration::from_secs(8);
    /// Longer than without.
    const LONGER: Duration = Duration::from_secs(12);
    let port = free_port();
    let export = |name: &str| {
        format!("[[export]]\nname = {name:?}\nmemory = \"1M\"\nlisten = \"127.0.0.1:{port}\"\nplain = true\n")
    };
    let mut exporter =
        TestDaemon::new_beside_the_build(&format!("[[core]]\n{}{}", export("short"), export("long")));
    exporter.start();
    let uri = |name: &str| format!("nbd://127.0.0.1:{port}/{name}");
    let disk = |name: &str, seconds: u64| {
        format!("[[disk]]\nname = {name:?}\nremote = {:?}\nsilence_s = {seconds}\n", uri(name))
    };
    let mut importer = TestDaemon::new_beside_the_build(&format!(
        "[[core]]\nspin_us = 200\n{}{}",
        disk("short", SHORT.as_secs()),
        disk("long", 60)
    ));
    importer.start();
    let remote = |name: &str| importer.disk(name)["backing"]["remote"].clone();
    let mut guests = ["short", "long"].map(|name| {
        importer.until(|| importer.disk(name)["state"] == "served");
        let mut guest = Reader::connect(&importer, name);
        guest.submit(1);
        guest.wait(1);
        guest
    });
    assert_eq!((&remote("short")["silence_s"], &remote("long")["silence_s"]), (&2.into(), &60.into()));
    exporter.signal("STOP");
    let begin = Instant::now();
    guests.iter_mut().for_each(|guest| guest.submit(1));
    importer.until(|| remote("short")["losses"] != 0);
    let took = begin.elapsed();
    assert!((SHORT..LATE).contains(&took), "{took:?}");
    // The connections that are tried then come to nothing: why the first was lost stays.
    let why = remote("short");
    assert!(why["why"].as_str().is_some_and(|why| why.contains("no reply for 2000 ms")), "{why}");
    while begin.elapsed() < LONGER {
        let long = remote("long");
        assert_eq!((&long["state"], &long["losses"]), (&"connected".into(), &0.into()), "{long}");
        std::thread::sleep(Duration::from_millis(250));
    }
    exporter.signal("CONT");
    guests.iter_mut().for_each(|guest| guest.wait(1));
    // Another time, while the guest uses it.
    let said = importer.cli(&["disk", "replace", "short", "--remote", &uri("short"), "--silence-s", "5"]);
    assert_eq!((said.code, &remote("short")["silence_s"]), (0, &5.into()), "{}", said.err);
    guests[0].submit(1);
    guests[0].wait(1);
    for seconds in ["0", "301"] {
        let said =
            importer.refused(&["disk", "add", "other", "--remote", &uri("short"), "--silence-s", seconds]);
        assert!(said.contains("1 to 300"), "{said}");
    }
}
