//! Identities, and disks of other machines with TLS: daemons that know each other, and one that is not known.

mod daemon;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use daemon::identities::{authority, config, done, identity, known, member};
use daemon::load::{free_port, step_for, step_until_remote};
use daemon::{LIMIT, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::space::{NetworkSpace, or_skip};
use serde_json::json;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;

/// `host-a` publishes an image for `host-b`.
fn publish(mut exporter: TestDaemon, bytes: u64) -> (TestDaemon, u16) {
    let (port, image) = (free_port(), exporter.image("data.img", bytes));
    let export = format!(
        "[[export]]\nname = \"data\"\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\ntls = true\nallow = \"host-b\"\n"
    );
    exporter.configure(&config(&exporter, &export));
    exporter.start();
    (exporter, port)
}

fn uri(port: u16) -> String {
    format!("nbds://127.0.0.1:{port}/data?tls-hostname=host-a")
}

/// What is said when a disk cannot be added.
fn refused(importer: &TestDaemon, uri: &str) -> String {
    let said = importer.cli(&["disk", "add", "data", "--remote", uri]);
    assert_ne!(said.code, 0, "{uri} is accepted");
    said.err
}

/// The session beside the connections has the same security, and none that the disk would not have.
#[test]
fn a_disk_grows_over_tls_for_the_host_that_may_have_it() {
    let (exporter, port) = publish(authority(), 8 << 20);
    let (importer, other) = (member(&exporter, "host-b"), member(&exporter, "host-c"));
    assert_eq!(importer.cli(&["disk", "add", "data", "--remote", &uri(port)]).code, 0);
    importer.until(|| importer.disk("data")["backing"]["remote"]["exporter"] == "served");
    assert!(
        exporter.log().contains("a session with a host has begun client=Host(\"host-b\")"),
        "{}",
        exporter.log()
    );
    exporter.json(&["publish", "resize", "data", "16M"]);
    importer.until(|| importer.disk("data")["size"] == 16 << 20);
    assert!(refused(&other, &uri(port)).contains("host-c is not among the hosts"));
}

#[test]
fn each_host_shows_who_it_is_and_keeps_its_key_to_itself() {
    let a = authority();
    let json = |args: &[&str]| -> serde_json::Value {
        let out = done(identity(&a, &[args, &["--json"]].concat()));
        serde_json::from_str(&out).unwrap()
    };
    let shown = json(&["show"]);
    assert_eq!((&shown["host"]["name"], &shown["issues"]), (&"host-a".into(), &true.into()), "{shown}");
    // The last day is whole or begun.
    let left = |shown: &serde_json::Value| shown["host"]["days_left"].as_i64().unwrap();
    assert!((364..=365).contains(&left(&shown)), "{shown}");
    assert_eq!(shown["host"]["fingerprint"].as_str().map(str::len), Some(64), "{shown}");
    let renewed = json(&["renew", "--days", "10"]);
    assert!((9..=10).contains(&left(&renewed)), "{renewed}");
    assert_ne!(renewed["host"]["serial"], shown["host"]["serial"]);
    // It may have a day less left by now.
    for field in ["name", "fingerprint", "not_after"] {
        assert_eq!(renewed["authority"][field], shown["authority"][field], "{renewed}");
    }
    let soon = identity(&a, &["show"]);
    assert!(soon.err.contains("days: renew it"), "{}", soon.err);

    let nobody = TestDaemon::new_beside_the_build("");
    let said = identity(&nobody, &["show"]);
    assert!(
        said.code == 1 && said.err.contains("missing") && said.err.contains("create NAME"),
        "{}",
        said.err
    );
    let said = identity(&a, &["issue", "../x", "--out", "/nowhere/x"]);
    assert!(said.code == 1 && said.err.contains("not a host name"), "{}", said.err);
    let said = identity(&a, &["create", "host-a"]);
    assert!(said.code == 1 && said.err.contains("there already"), "{}", said.err);
    let file = a.path("b.pem");
    done(identity(&a, &["issue", "host-b", "--out", file.to_str().unwrap()]));
    let said = identity(&a, &["import", file.to_str().unwrap()]);
    assert!(
        said.code == 1 && said.err.contains("wrong host") && said.err.contains("--replace"),
        "{}",
        said.err
    );
}

#[test]
fn only_hosts_that_may_attach_and_never_without_tls() {
    let (exporter, port) = publish(authority(), 1 << 20);
    let (b, c) = (member(&exporter, "host-b"), member(&exporter, "host-c"));
    let mut stranger = authority();
    stranger.configure(&config(&stranger, ""));
    stranger.start();
    let mut nobody = TestDaemon::new_beside_the_build("");
    nobody.configure(&config(&nobody, ""));
    nobody.start();

    let plain = format!("nbd://127.0.0.1:{port}/data");
    let told = refused(&b, &plain);
    assert!(told.contains("requires TLS") && told.contains("nbds in place of nbd"), "{told}");
    let told = refused(&c, &uri(port));
    assert!(told.contains("host-c is not among the hosts"), "{told}");
    let told = refused(&stranger, &uri(port));
    assert!(told.contains("another authority") && told.contains("ioplane identity show"), "{told}");
    let told = refused(&nobody, &uri(port));
    assert!(told.contains("needs an identity") && told.contains("host.pem is missing"), "{told}");
    let told = refused(&b, &format!("nbds://127.0.0.1:{port}/data"));
    assert!(told.contains("another host than the one that was asked for: 127.0.0.1"), "{told}");
    done(b.cli(&["disk", "add", "data", "--remote", &uri(port)]));
    let shown = done(exporter.cli(&["publish", "show", "data"]));
    assert!(shown.contains("with TLS, for host-b"), "{shown}");
    exporter
        .until(|| exporter.log().contains("other authority") || exporter.log().contains("another authority"));

    // A server without TLS gets not even the name of the export from a client that wants it.
    let open = free_port();
    let image = c.image("open.img", 1 << 20).display().to_string();
    let listen = format!("127.0.0.1:{open}");
    done(c.cli(&["publish", "disk", "open", "--path", &image, "--listen", &listen, "--plain"]));
    let told = refused(&stranger, &format!("nbds://{listen}/open?tls-hostname=host-c"));
    assert!(told.contains("does not start TLS, and plain text is not allowed"), "{told}");
    // And an export with TLS needs an identity.
    let said = nobody.cli(&[
        "publish",
        "disk",
        "open",
        "--memory",
        "1M",
        "--listen",
        &format!("127.0.0.1:{}", free_port()),
        "--tls",
    ]);
    assert!(said.code != 0 && said.err.contains("needs an identity"), "{}", said.err);
    let said = nobody.cli(&["publish", "disk", "open", "--memory", "1M", "--listen", &listen]);
    assert!(said.code != 0 && said.err.contains("tls = true"), "{}", said.err);
}

/// Hosts are named, and nothing else: that means TLS, and NBD's port of all addresses.
#[test]
fn naming_the_hosts_is_enough_to_publish() {
    let mut nobody = TestDaemon::new_beside_the_build("");
    nobody.configure(&config(&nobody, ""));
    nobody.start();
    let told = nobody.refused(&["publish", "disk", "data", "--memory", "1M", "--allow", "host-b"]);
    assert!(told.contains("needs an identity") && told.contains("ioplane identity create"), "{told}");
    assert_eq!(nobody.json(&["publish", "list"]), json!([]));

    // That port may be another's on this host.
    let Some(space) = or_skip(NetworkSpace::new()) else { return };
    let a = authority();
    a.configure(&config(&a, ""));
    let [b, c] = ["host-b", "host-c"].map(|name| known(&a, name).start_by(&space.within()));
    let a = a.start_by(&space.within());
    let [data, many] =
        ["data", "many"].map(|name| a.image(&format!("{name}.img"), 1 << 20).display().to_string());
    done(a.cli(&["publish", "disk", "data", "--path", &data, "--allow", "host-b"]));
    // One word says what the other does, and both say no more.
    let share = ["publish", "disk", "many", "--path", &many, "--allow", "host-b,host-c"];
    done(a.cli(&[&share[..], &["--read-only", "--share"]].concat()));
    done(a.cli(&[&share[..], &["--share"]].concat()));
    let shown = |name: &str| {
        let export = a.json(&["publish", "show", name]);
        json!(["listen", "tls", "allow", "read_only"].map(|field| export[field].clone()))
    };
    assert_eq!(shown("data"), json!(["[::]:10809", true, "host-b", false]));
    assert_eq!(shown("many"), json!(["[::]:10809", true, "host-b,host-c", true]));
    let uri = |name: &str| format!("nbds://127.0.0.1/{name}?tls-hostname=host-a");
    done(b.cli(&["disk", "add", "data", "--remote", &uri("data")]));
    assert!(refused(&c, &uri("data")).contains("host-c is not among the hosts"));
    for reader in [&b, &c] {
        done(reader.cli(&["disk", "add", "many", "--remote", &uri("many")]));
        assert_eq!(reader.disk("many")["read_only"], true);
    }
    // Nobody writes, this host included.
    let said = a.refused(&["disk", "add", "mine", "--path", &many]);
    assert!(said.contains("in use"), "{said}");
    done(a.cli(&["disk", "add", "mine", "--path", &many, "--read-only"]));
    let said = a.cli(&["publish", "disk", "other", "--memory", "1M", "--plain", "--allow", "host-b"]);
    assert_eq!(said.code, 2, "{}", said.err);
}

/// What a program of others sees: copies of the identity by GnuTLS's names.
fn copies(daemon: &TestDaemon) -> PathBuf {
    let to = daemon.path("pki");
    done(identity(daemon, &["export", to.to_str().unwrap()]));
    to
}

/// An address with exports of both kinds tells those without TLS of the open one only.
#[test]
fn a_listener_with_open_and_closed_exports_keeps_them_apart() {
    let (exporter, port) = publish(authority(), 1 << 20);
    let listen = format!("127.0.0.1:{port}");
    done(exporter.cli(&["publish", "disk", "open", "--memory", "1M", "--listen", &listen, "--plain"]));
    let b = member(&exporter, "host-b");
    let told = refused(&b, &format!("nbd://{listen}/data"));
    assert!(told.contains("requires TLS"), "{told}");
    done(b.cli(&["disk", "add", "open", "--remote", &format!("nbd://{listen}/open")]));
    done(b.cli(&["disk", "remove", "open"]));
    done(b.cli(&["disk", "add", "data", "--remote", &uri(port)]));
    done(b.cli(&["disk", "add", "both", "--remote", &uri(port).replace("/data", "/open")]));
    assert!(copies(&b).join("client-key.pem").exists());
}

/// Every read finds the last write, whichever of the two is killed: what a relay had not passed on when one of its ends was gone is sent again.
#[test]
fn daemons_that_are_killed_again_and_again_lose_nothing() {
    let (mut exporter, port) = publish(authority(), CrashLoad::image_bytes(QUEUES));
    let mut importer = member(&exporter, "host-b");
    done(importer.cli(&["disk", "add", "data", "--remote", &uri(port), "--queues", &QUEUES.to_string()]));
    let mut load = CrashLoad::new(QUEUES, DEPTH, 48).unwrap();
    load.attach(&importer.path("data.sock")).unwrap();
    // What is not there yet cannot be lost.
    step_until_remote(&mut load, &importer, |remote| remote["state"] == "connected");
    for round in 1..=4u64 {
        step_for(&mut load, Duration::from_millis(20 + 17 * round));
        exporter.kill9();
        step_until_remote(&mut load, &importer, |remote| remote["state"] == "reconnecting");
        if round == 2 {
            // The identity is read at each connection.
            done(identity(&exporter, &["renew"]));
        }
        exporter.start();
        step_until_remote(&mut load, &importer, |remote| {
            remote["state"] == "connected" && remote["losses"].as_u64() >= Some(round * u64::from(QUEUES))
        });
    }
    assert!(importer.disk("data")["backing"]["remote"]["replays"].as_u64() > Some(0));
    for round in 1..=3u64 {
        step_for(&mut load, Duration::from_millis(20 + 13 * round));
        importer.kill9();
        importer.start();
        importer.until(|| load.attach(&importer.path("data.sock")).is_ok());
        step_for(&mut load, Duration::from_millis(20));
    }
    load.settle().unwrap();
    let disk = importer.disk("data");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    assert_eq!(disk["backing"]["remote"]["protection"], "tls", "{disk}");
    assert_eq!(exporter.json(&["publish", "show", "data"])["summed_connections"], 0);
    let end = Instant::now() + LIMIT;
    while exporter.json(&["publish", "show", "data"])["connections"] != QUEUES {
        assert!(
            Instant::now() < end,
            "those of the dead stay: {}",
            exporter.json(&["publish", "show", "data"])
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// By its name alone: the directory says where and who, the certificates that it is so.
#[test]
fn a_directory_with_tls_leads_to_hosts_that_show_who_they_are() {
    let (mut a, image) = (authority(), "data.img");
    let (directory, port, image) = (free_port(), free_port(), a.image(image, 1 << 20));
    let file = a.path("directory.redb");
    let here = format!("[directory]\nlisten = \"127.0.0.1:{directory}\"\nfile = {file:?}\n");
    let export =
        format!("[[export]]\nname = \"data\"\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\ntls = true\n");
    a.configure(&config(&a, &format!("{here}{export}")));
    a.start();
    let there = format!("[directory]\nat = \"127.0.0.1:{directory}\"\ntls_hostname = \"host-a\"\n");
    let mut b = member(&a, "host-b");
    b.terminate();
    b.configure(&config(&b, &there));
    b.start();
    b.until(|| b.json(&["devices"])["devices"][0]["state"] == "present");
    let seen = &b.json(&["devices"])["devices"][0];
    assert_eq!((&seen["name"], &seen["host"]), (&"data".into(), &"host-a".into()));
    done(b.cli(&["disk", "add", "data", "--remote", "data"]));
    let shown = b.disk("data");
    let uri = shown["backing"]["remote"]["uri"].as_str().unwrap();
    assert!(uri.starts_with("nbds://127.0.0.1") && uri.ends_with("tls-hostname=host-a"), "{uri}");
    // In plain text, and the directory is asked with TLS.
    let open = format!("127.0.0.1:{}", free_port());
    done(a.cli(&["publish", "disk", "open", "--memory", "1M", "--listen", &open, "--plain"]));
    b.until(|| b.json(&["devices"])["devices"].as_array().unwrap().len() == 2);
    let told = b.refused(&["disk", "add", "open", "--remote", "open"]);
    assert!(told.contains("in plain text, and the directory is asked with TLS"), "{told}");
    // Nobody of another authority.
    let mut stranger = authority();
    stranger.configure(&config(&stranger, &there));
    stranger.start();
    let told = stranger.refused(&["devices"]);
    assert!(told.contains("another authority") && told.contains("ioplane identity show"), "{told}");
}
