//! Hosts that join by a token, renew and are revoked: processes of their own, over loopback.

mod daemon;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use daemon::identities::{authority, config, done, identity, member};
use daemon::load::free_port;
use daemon::reader::Reader;
use daemon::{LIMIT, TestDaemon};
use ioplane_identity::{IdentityDirectory, Validity};

/// `identity serve` of a host.
struct Answering {
    process: Child,
    log: std::path::PathBuf,
}

impl Answering {
    /// Starts it, and waits until it answers. `kill`: the moment at which it dies.
    fn start(of: &TestDaemon, port: u16, kill: &str) -> Answering {
        let log = of.path(&format!("answering-{}.log", free_port()));
        let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
        command.args(["identity", "serve", "--listen", &format!("127.0.0.1:{port}"), "--dir"]);
        command.arg(of.path("identity")).env("IOPLANE_JOIN_KILL", kill).stdin(Stdio::null());
        let process = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let mut answering = Answering { process, log };
        answering.until("answering hosts");
        answering
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until the log says it.
    fn until(&mut self, text: &str) {
        let end = Instant::now() + LIMIT;
        while !self.log().contains(text) {
            assert!(self.process.try_wait().unwrap().is_none(), "it has ended: {}", self.log());
            assert!(Instant::now() < end, "it does not say {text:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until it has died by a signal.
    fn died(mut self) {
        let end = Instant::now() + LIMIT;
        loop {
            match self.process.try_wait().unwrap() {
                Some(status) => return assert!(status.code().is_none(), "{status}: {}", self.log()),
                None => assert!(Instant::now() < end, "it lives: {}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A token for a host, and nothing else on standard output.
fn token(of: &TestDaemon, rest: &[&str]) -> String {
    let out = done(identity(of, &[&["token"], rest].concat()));
    assert_eq!(out.lines().count(), 1, "{out}");
    out.trim().to_owned()
}

/// A host that is not started, and has no identity.
fn nobody() -> TestDaemon {
    TestDaemon::new_beside_the_build("")
}

fn refused(daemon: &TestDaemon, args: &[&str], why: &str) {
    let said = identity(daemon, args);
    assert!(said.code == 1 && said.err.contains(why), "{args:?}: {}{}", said.out, said.err);
}

fn started(mut daemon: TestDaemon, rest: &str) -> TestDaemon {
    daemon.configure(&config(&daemon, rest));
    daemon.start();
    daemon
}

fn export(daemon: &TestDaemon, name: &str, port: u16) -> String {
    let image = daemon.image(&format!("{name}.img"), 1 << 20);
    format!("[[export]]\nname = {name:?}\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\ntls = true\n")
}

fn uri(port: u16, export: &str, host: &str) -> String {
    format!("nbds://127.0.0.1:{port}/{export}?tls-hostname={host}")
}

#[test]
fn a_token_brings_a_host_in_and_works_once() {
    let (a, port, disk) = (authority(), free_port(), free_port());
    let rest = export(&a, "data", disk);
    let a = started(a, &rest);
    // Nobody has said yet where the authority answers.
    refused(&a, &["token", "--name", "host-b"], "is not known");
    let mut answers = Answering::start(&a, port, "");
    refused(&a, &["token", "--name", "../b"], "not a host name");
    refused(&a, &["token", "--name", "host-a"], "valid certificate already");
    refused(&a, &["token", "--at", "a/b"], "no address of an authority");

    let (b, c) = (nobody(), nobody());
    refused(&b, &["token", "--at", "127.0.0.1"], "authority.pem is missing");
    refused(&b, &["join", "host-b"], "no token");
    let first = token(&a, &["--name", "host-b", "--days", "100"]);
    refused(&b, &["join", &first[..first.len() - 3]], "damaged");
    refused(&b, &["join", &first, "--name", "host-c"], "for a host of another name");
    done(identity(&b, &["join", &first]));
    answers.until("a host has joined");
    let shown: serde_json::Value = serde_json::from_str(&done(identity(&b, &["show", "--json"]))).unwrap();
    assert_eq!(shown["host"]["name"], "host-b");
    assert_eq!(shown["authority_at"][0], format!("127.0.0.1:{port}"));
    assert!((99..=100).contains(&shown["host"]["days_left"].as_i64().unwrap()), "{shown}");
    let b = started(b, "");
    done(b.cli(&["disk", "add", "data", "--remote", &uri(disk, "data", "host-a")]));

    // Replayed: a name on both sides, also when the process that answers has been killed in between.
    refused(&c, &["join", &first], "has been used already");
    answers.until("has been used already");
    drop(answers);
    refused(&c, &["join", &first], "does not answer");
    let mut answers = Answering::start(&a, port, "");
    refused(&c, &["join", &first], "has been used already");
    answers.until("has been used already");

    let short = token(&a, &["--name", "host-c", "--valid", "1s"]);
    std::thread::sleep(Duration::from_secs(3));
    refused(&c, &["join", &short], "has expired");
    answers.until("has expired");
    // For any name but one that a host has.
    let any = token(&a, &[]);
    refused(&c, &["join", &any], "give one: `--name HOST`");
    refused(&c, &["join", &any, "--name", "host-b"], "valid certificate already");
    done(identity(&c, &["join", &any, "--name", "host-c"]));
    // The host has lost its key, and is to have another one.
    refused(&a, &["token", "--name", "host-b"], "`--replace`");
    let again = token(&a, &["--name", "host-b", "--replace"]);
    done(identity(&nobody(), &["join", &again]));
    // Of another authority: what it answers is not even asked for.
    let other = authority();
    let foreign = token(&other, &["--name", "host-x", "--at", &format!("127.0.0.1:{port}")]);
    refused(&nobody(), &["join", &foreign], "another authority");
}

/// The token is used up before anything is signed, and what was signed is known before anybody has it.
#[test]
fn a_process_that_dies_between_token_and_answer_lets_nobody_in_twice() {
    let a = authority();
    for (moment, known) in [("consumed", false), ("signed", true)] {
        let (b, port) = (nobody(), free_port());
        let name = format!("host-{moment}");
        let dies = Answering::start(&a, port, moment);
        let first = token(&a, &["--name", &name]);
        refused(&b, &["join", &first], "the answer of the authority is lost");
        dies.died();
        assert!(!b.path("identity/host.pem").exists());
        let mut answers = Answering::start(&a, port, "");
        refused(&b, &["join", &first], "has been used already");
        answers.until("has been used already");
        let plain = identity(&a, &["token", "--name", &name]);
        assert_eq!(plain.code == 1, known, "{}", plain.err);
        let second =
            if known { token(&a, &["--name", &name, "--replace"]) } else { plain.out.trim().to_owned() };
        done(identity(&b, &["join", &second]));
    }
}

/// A guest of a disk, which makes the daemon connect.
fn guest(daemon: &TestDaemon, disk: &str) -> Reader {
    let mut guest = Reader::connect(daemon, disk);
    guest.submit(1);
    guest.wait(1);
    guest
}

fn remote(daemon: &TestDaemon, disk: &str) -> serde_json::Value {
    daemon.disk(disk)["backing"]["remote"].clone()
}

/// As client, as server, in the directory; connections that are there, and those that would be.
#[test]
fn a_revoked_host_is_shut_out_when_the_list_is_there() {
    let (a, port) = (authority(), free_port());
    let _answers = Answering::start(&a, port, "");
    let [directory, of_a, of_b, of_c] = [(); 4].map(|()| free_port());
    let join = |name: &str| {
        let host = nobody();
        done(identity(&host, &["join", &token(&a, &["--name", name])]));
        host
    };
    let (b, c) = (join("host-b"), join("host-c"));
    let file = a.path("directory.redb");
    let own = format!("[directory]\nlisten = \"127.0.0.1:{directory}\"\nfile = {file:?}\n");
    let at = format!("[directory]\nat = \"127.0.0.1:{directory}\"\ntls_hostname = \"host-a\"\n");
    let (rest_b, rest_c) = (at.clone() + &export(&b, "of-b", of_b), at + &export(&c, "of-c", of_c));
    let rest_a = own + &export(&a, "of-a", of_a) + &export(&a, "more", of_a);
    let a = started(a, &rest_a);
    let (b, c) = (started(b, &rest_b), started(c, &rest_c));
    done(b.cli(&["disk", "add", "a", "--remote", &uri(of_a, "of-a", "host-a")]));
    done(b.cli(&["disk", "add", "c", "--remote", &uri(of_c, "of-c", "host-c")]));
    done(c.cli(&["disk", "add", "b", "--remote", &uri(of_b, "of-b", "host-b")]));
    done(c.cli(&["disk", "add", "a", "--remote", &uri(of_a, "more", "host-a")]));
    let mut guests = [(&b, "a"), (&b, "c"), (&c, "b")].map(|(host, disk)| guest(host, disk));
    let mut other = guest(&c, "a");
    b.until(|| b.json(&["devices"])["devices"].as_array().is_some_and(|all| all.len() == 4));

    let said = done(identity(&a, &["revoke", "host-b"]));
    assert!(said.contains("1 certificate is revoked, on list 1"), "{said}");
    // Where the list is: the connections end, and no other one is taken.
    a.until(|| a.log().matches("its certificate is revoked: a connection was ended").count() >= 2);
    b.until(|| remote(&b, "a")["state"] == "reconnecting");
    let why = "refuses this host's certificate: its authority has revoked it";
    b.until(|| remote(&b, "a")["why"].as_str().is_some_and(|told| told.contains(why)));
    a.until(|| a.log().contains("a host is refused: its certificate is revoked host=\"host-b\""));
    b.until(|| b.cli(&["devices"]).err.contains(why));
    other.submit(1);
    other.wait(1);
    assert_eq!(remote(&c, "a")["losses"], 0, "another host was shut out, too");
    // Where it is not: nothing has changed.
    assert_eq!(
        (&remote(&b, "c")["state"], &remote(&c, "b")["state"]),
        (&"connected".into(), &"connected".into())
    );
    let said = done(identity(&c, &["revocations", "--fetch"]));
    assert!(said.contains("list 1") && said.lines().count() == 2, "{said}");
    c.until(|| remote(&c, "b")["state"] == "reconnecting");
    c.until(|| {
        let why = remote(&c, "b")["why"].clone();
        why.as_str().is_some_and(|why| why.contains("the peer's certificate has been revoked"))
    });
    b.until(|| remote(&b, "c")["state"] == "reconnecting");
    // What its guests ask for, and guests of its disks, waits.
    guests.iter_mut().for_each(|guest| guest.submit(1));
    // It can neither renew nor fetch. By a token it comes back, and its daemon goes on by itself.
    refused(&b, &["renew"], "its authority has revoked it");
    refused(&b, &["revocations", "--fetch"], "its authority has revoked it");
    done(identity(&b, &["join", &token(&a, &["--name", "host-b"])]));
    guests.iter_mut().for_each(|guest| guest.wait(1));
    for (host, disk) in [(&b, "a"), (&b, "c"), (&c, "b")] {
        assert_eq!(remote(host, disk)["state"], "connected");
    }

    // A list that is none, or an older one, changes nothing for a daemon that runs.
    let list = c.path("identity/revoked.pem");
    let older = std::fs::read_to_string(&list).unwrap();
    done(identity(&a, &["revoke", "host-c"]));
    let newer = a.path("identity/revoked.pem");
    done(identity(&b, &["revocations", "--import", newer.to_str().unwrap()]));
    b.until(|| remote(&b, "c")["state"] == "reconnecting");
    let file = b.path("older.pem");
    std::fs::write(&file, &older).unwrap();
    refused(&b, &["revocations", "--import", file.to_str().unwrap()], "older than the present one");
    for (text, why) in [(older.as_str(), "older than the present one"), ("x", "no revocation list")] {
        std::fs::write(b.path("identity/revoked.pem"), text).unwrap();
        b.until(|| b.log().contains(why));
    }
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(remote(&b, "c")["state"], "reconnecting");
}

#[test]
fn hosts_renew_over_the_network_while_their_daemons_run() {
    let (a, port, disk) = (authority(), free_port(), free_port());
    let rest = export(&a, "data", disk);
    let mut a = started(a, &rest);
    let mut answers = Answering::start(&a, port, "");
    // It has come by a file, so it does not know where the authority answers.
    let b = member(&a, "host-b");
    done(b.cli(&["disk", "add", "data", "--remote", &uri(disk, "data", "host-a")]));
    let shown =
        || -> serde_json::Value { serde_json::from_str(&done(identity(&b, &["show", "--json"]))).unwrap() };
    let mut guest = guest(&b, "data");
    let before = shown();
    refused(&b, &["renew"], "--from HOST");
    refused(
        &b,
        &["renew", "--days", "3", "--from", &format!("127.0.0.1:{port}")],
        "`identity serve` there decides",
    );
    done(identity(&b, &["renew", "--from", &format!("127.0.0.1:{port}")]));
    answers.until("a host has renewed its certificate");
    let after = shown();
    assert_eq!(before["host"]["name"], after["host"]["name"]);
    assert_ne!(before["host"]["fingerprint"], after["host"]["fingerprint"]);
    let told = done(identity(&b, &["show"]));
    assert!(told.contains(&format!("renew: ioplane identity renew (asks 127.0.0.1:{port})")), "{told}");
    // The next connection is made with the new one: the old one may be revoked.
    let old = before["host"]["fingerprint"].as_str().unwrap();
    done(identity(&a, &["revoke", "host-b", "--fingerprint", old]));
    b.until(|| remote(&b, "data")["losses"].as_u64() > Some(0) && remote(&b, "data")["state"] == "connected");
    a.kill9();
    a.start();
    b.until(|| remote(&b, "data")["losses"].as_u64() > Some(1) && remote(&b, "data")["state"] == "connected");
    guest.submit(1);
    guest.wait(1);

    // What has expired joins again.
    let now = time::OffsetDateTime::now_utc();
    let validity = Validity { from: now - time::Duration::days(2), until: now - time::Duration::days(1) };
    let (late, file) = (nobody(), a.path("late.pem"));
    let directory = IdentityDirectory::new(a.path("identity"));
    directory.issue(&"host-l".parse().unwrap(), validity, &file).unwrap();
    std::fs::create_dir(late.path("identity")).unwrap();
    std::fs::set_permissions(late.path("identity"), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    std::fs::rename(file, late.path("identity/host.pem")).unwrap();
    refused(&late, &["renew", "--from", &format!("127.0.0.1:{port}")], "ioplane identity join TOKEN");
    done(identity(&late, &["join", &token(&a, &["--name", "host-l"])]));
    done(identity(&late, &["renew"]));
}
