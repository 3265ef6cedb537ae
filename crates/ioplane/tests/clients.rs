//! Issue 13, numbers 3, 4 and 7, as the command line and a running daemon show them.

mod daemon;

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use daemon::TestDaemon;
use ioplane_testkit::front::{FrontEnd, FrontEndRequest, Wants};

const MIB: u64 = 1 << 20;

/// Shares a file of a disk as memory of the guest; whether it was taken.
fn share_slow_file(daemon: &TestDaemon, disk: &str) -> bool {
    let front = FrontEnd::connect(&daemon.path(&format!("{disk}.sock")), Wants::default()).unwrap();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(MIB).unwrap();
    let body: Vec<u8> = [0, 0, MIB, 0, 0].iter().flat_map(|field: &u64| field.to_ne_bytes()).collect();
    let taken = front.tell(FrontEndRequest::ADD_MEM_REG, &body, &[file.as_fd()]).is_ok();
    if taken {
        assert_eq!(daemon.disk(disk)["mappings"], 1);
    }
    drop(front);
    daemon.until(|| daemon.disk(disk)["connected"] == false);
    assert_eq!(daemon.disk(disk)["mappings"], 0);
    taken
}

#[test]
fn hole_03_files_of_a_disk_are_memory_only_where_that_is_allowed() {
    let config = "[[core]]\nspin_us = 500\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                  [[disk]]\nname = \"b\"\nmemory = \"1M\"\nguest_memory = \"any\"\n";
    let mut daemon = TestDaemon::open(config);
    daemon.json(&["disk", "add", "c", "--memory", "1M", "--guest-memory", "any"]);
    for _ in 0..2 {
        assert!(!share_slow_file(&daemon, "a"));
        let disk = daemon.disk("a");
        assert_eq!(disk["front_end_faults"]["slow_memory"], 1);
        let said = disk["last_front_end_fault"].as_str().unwrap();
        assert!(said.contains("<source type='memfd'/>") && said.contains("guest_memory"), "{said}");
        assert!(share_slow_file(&daemon, "b") && share_slow_file(&daemon, "c"));
        // Written down.
        daemon.kill9();
        daemon.start();
    }
}

#[test]
fn hole_07_a_disks_socket_takes_the_place_of_no_file() {
    let daemon = TestDaemon::open("[[core]]\nspin_us = 500\n");
    let shadow = daemon.path("shadow");
    std::fs::write(&shadow, "root:*").unwrap();
    let at = shadow.display().to_string();
    let refused = daemon.refused(&["disk", "add", "a", "--memory", "1M", "--vhost-socket", &at]);
    assert!(refused.contains("is a file") && refused.contains("give another path"), "{refused}");
    assert_eq!(std::fs::read_to_string(&shadow).unwrap(), "root:*");
    // Nor of somebody's who listens.
    let other = daemon.path("other.sock");
    let listener = UnixListener::bind(&other).unwrap();
    let at = other.display().to_string();
    let refused = daemon.refused(&["disk", "add", "a", "--memory", "1M", "--vhost-socket", &at]);
    assert!(refused.contains("is in use"), "{refused}");
    drop(listener);
    daemon.json(&["disk", "add", "a", "--memory", "1M", "--vhost-socket", &at]);
    daemon.json(&["disk", "remove", "a"]);
    assert!(!other.exists());
}

#[test]
fn hole_07_the_control_socket_takes_the_place_of_no_file() {
    let mut daemon = TestDaemon::new("[[core]]\nspin_us = 500\n");
    std::fs::write(daemon.path("control.sock"), "data").unwrap();
    let said = daemon.refuses();
    assert!(said.code != 0 && said.err.contains("is a file"), "{}", said.err);
    assert_eq!(std::fs::read_to_string(daemon.path("control.sock")).unwrap(), "data");
    std::fs::remove_file(daemon.path("control.sock")).unwrap();
    daemon.start();
    daemon.kill9();
    daemon.start();
    assert!(daemon.disk("none").is_null());
}
