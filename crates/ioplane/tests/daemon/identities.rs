//! Hosts with identities of one authority.

use std::process::Command;

use super::{BINARY, Said, TestDaemon};

pub fn identity(daemon: &TestDaemon, args: &[&str]) -> Said {
    let output = Command::new(BINARY)
        .args(["identity", "--dir"])
        .arg(daemon.path("identity"))
        .args(args)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { code: output.status.code().unwrap(), out: text(&output.stdout), err: text(&output.stderr) }
}

pub fn done(said: Said) -> String {
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    said.out
}

pub fn config(daemon: &TestDaemon, rest: &str) -> String {
    format!("[daemon]\nidentity = {:?}\n[[core]]\nspin_us = 200\n{rest}", daemon.path("identity"))
}

/// A host that is not started yet. The first one has the authority; its identity is `host-a`.
pub fn authority() -> TestDaemon {
    let daemon = TestDaemon::new_beside_the_build("");
    done(identity(&daemon, &["create", "host-a"]));
    daemon
}

/// Another host, known to the authority of `of`, and running.
pub fn member(of: &TestDaemon, name: &str) -> TestDaemon {
    let mut daemon = known(of, name);
    daemon.start();
    daemon
}

/// The same, not started yet.
pub fn known(of: &TestDaemon, name: &str) -> TestDaemon {
    let daemon = TestDaemon::new_beside_the_build("");
    let file = of.path(&format!("{name}.pem")).display().to_string();
    done(identity(of, &["issue", name, "--out", &file]));
    done(identity(&daemon, &["import", &file]));
    daemon.configure(&config(&daemon, ""));
    daemon
}
