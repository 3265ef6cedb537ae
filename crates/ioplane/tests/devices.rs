//! The directory of devices: what one host publishes another finds by name, whoever of them comes and goes.

mod daemon;

use std::time::Duration;

use daemon::TestDaemon;
use daemon::load::{free_port, step_for};
use ioplane_testkit::crash::CrashLoad;
use ioplane_testkit::etcd::EtcdCluster;
use serde_json::Value;

/// A host of a directory in plain text; `directory` says where that is.
fn host(name: &str, directory: &str) -> TestDaemon {
    let daemon = TestDaemon::new_beside_the_build("");
    let file = daemon.path("directory.redb");
    let file = if directory.starts_with("listen") { format!("file = {file:?}\n") } else { String::new() };
    daemon.configure(&format!(
        "[directory]\n{directory}\n{file}plain = true\nhost = \"{name}\"\n[[core]]\nspin_us = 200\n"
    ));
    let mut daemon = daemon;
    daemon.start();
    daemon
}

fn publish(host: &TestDaemon, name: &str, image: &str, bytes: u64) {
    let image = host.image(image, bytes).display().to_string();
    // Every address of the host: others are told the one by which the directory knows it.
    let listen = format!("0.0.0.0:{}", free_port());
    let said = host.cli(&["publish", "disk", name, "--path", &image, "--listen", &listen, "--plain"]);
    assert_eq!(said.code, 0, "{}", said.err);
}

/// A device as a host sees it; `null` if it is not there.
fn device(host: &TestDaemon, name: &str) -> Value {
    let report = host.json(&["devices"]);
    let devices = report["devices"].as_array().unwrap();
    devices.iter().find(|device| device["name"] == name).cloned().unwrap_or_default()
}

#[test]
fn hosts_find_each_others_disks_by_name() {
    let port = free_port();
    let mut a = host("host-a", &format!("listen = \"127.0.0.1:{port}\""));
    let mut b = host("host-b", &format!("at = \"127.0.0.1:{port}\""));
    let c = host("host-c", &format!("at = \"127.0.0.1:{port}\""));
    let none = b.refused(&["disk", "add", "data", "--remote", "data"]);
    assert!(none.contains("no host publishes data"), "{none}");

    let bytes = CrashLoad::image_bytes(1);
    publish(&a, "data", "data.img", bytes);
    c.until(|| device(&c, "data")["state"] == "present");
    let seen = device(&c, "data");
    assert_eq!(
        (&seen["kind"], &seen["size"], &seen["host"]),
        (&"disk".into(), &bytes.into(), &"host-a".into())
    );
    let location = seen["location"].as_str().unwrap();
    assert!(location.starts_with("nbd://127.0.0.1:") && location.ends_with("/data"), "{location}");

    // A name is one host's.
    publish(&b, "data", "other.img", 1 << 20);
    b.until(|| b.json(&["devices"])["taken"][0]["by"] == "host-a");
    let said = b.cli(&["devices"]);
    assert!(said.out.contains("data of this host is not listed: host-a publishes"), "{}", said.out);
    let present = c.refused(&["devices", "forget", "data"]);
    assert!(present.contains("host-a publishes data and is there"), "{present}");

    // By its name on a third host, under load; the directory says that it is used.
    let said = c.cli(&["disk", "add", "mine", "--remote", "data"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = CrashLoad::new(1, 16, 32).unwrap();
    load.attach(&c.path("mine.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(50));
    b.until(|| device(&b, "data")["users"].as_u64() >= Some(1));
    let holder = device(&b, "data")["holder"].as_str().unwrap().to_owned();
    assert!(holder.contains("disk mine of"), "{holder}");

    // The directory is started again: names are kept, and everybody comes back by itself.
    a.kill9();
    let gone = b.refused(&["devices"]);
    assert!(gone.contains(&format!("the directory at 127.0.0.1:{port}")), "{gone}");
    a.start();
    c.until(|| c.cli(&["devices"]).code == 0 && device(&c, "data")["state"] == "present");
    load.settle().unwrap();
    assert_eq!(c.disk("mine")["totals"]["errors"]["io"], 0);

    // A host that ends keeps its names until somebody forgets them.
    publish(&b, "more", "more.img", 1 << 20);
    c.until(|| device(&c, "more")["state"] == "present");
    b.terminate();
    c.until(|| device(&c, "more")["state"] == "lost");
    let said = c.cli(&["devices", "forget", "more"]);
    assert!(said.out.contains("its name is free"), "{}{}", said.out, said.err);
    assert!(device(&c, "more").is_null());

    // What is no more published is not listed.
    let said = c.cli(&["disk", "remove", "mine", "--force"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let said = a.cli(&["publish", "remove", "data", "--force"]);
    assert_eq!(said.code, 0, "{}", said.err);
    c.until(|| device(&c, "data").is_null());
}

#[test]
fn every_host_sees_what_an_export_can_do_and_how_much_of_that_is_reserved() {
    let port = free_port();
    let a = host("host-a", &format!("listen = \"127.0.0.1:{port}\""));
    let b = host("host-b", &format!("at = \"127.0.0.1:{port}\""));
    publish(&a, "data", "data.img", 1 << 20);
    b.until(|| device(&b, "data")["size"] == 1 << 20);
    let rates = || {
        let seen = device(&b, "data");
        ["iops_limit", "reserved_iops", "bandwidth_limit", "reserved_bandwidth"]
            .map(|field| seen[field].clone())
    };
    assert_eq!(rates(), [Value::Null, 0.into(), Value::Null, 0.into()]);
    let set = ["publish", "set", "data", "--iops-limit", "5000", "--bandwidth-limit", "8M"];
    assert_eq!(a.cli(&set).code, 0);
    let mega = |count: u64| Value::from(count << 20);
    b.until(|| rates() == [5000.into(), 0.into(), mega(8), 0.into()]);
    // It can be written: one uses it at a time, and the larger reservation counts.
    for (host, name, iops) in [(&b, "one", "1000"), (&a, "two", "4000")] {
        let words = ["--reserve-iops", iops, "--reserve-bandwidth", "1M"];
        let said = host.cli(&[&["disk", "add", name, "--remote", "data"], &words[..]].concat());
        assert_eq!(said.code, 0, "{}", said.err);
    }
    b.until(|| rates() == [5000.into(), 4000.into(), mega(8), mega(1)]);
    // A report whose host could not look at the export in time has no rates.
    b.until(|| {
        let table = b.cli(&["devices"]).out;
        table.contains("5000 IOPS, 8M/s") && table.contains("4000 IOPS, 1M/s")
    });
    assert_eq!(b.cli(&["disk", "remove", "one"]).code, 0);
    assert_eq!(a.cli(&["disk", "remove", "two"]).code, 0);
    b.until(|| rates() == [5000.into(), 0.into(), mega(8), 0.into()]);
}

#[test]
fn hosts_find_each_others_disks_by_names_in_etcd() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut etcd) = EtcdCluster::start(folder.path(), 3) else { return };
    let directory = format!("etcd = \"{}\"", etcd.urls().join(", "));
    let mut a = host("host-a", &directory);
    let b = host("host-b", &directory);
    publish(&a, "data", "data.img", CrashLoad::image_bytes(1));
    b.until(|| device(&b, "data")["state"] == "present");
    let report = b.json(&["devices"]);
    assert_eq!((&report["directory"], &report["host"]), (&etcd.urls().join(", ").into(), &"host-b".into()));

    // A name is one host's; another daemon of the same host is none.
    publish(&b, "data", "other.img", 1 << 20);
    b.until(|| b.json(&["devices"])["taken"][0]["by"] == "host-a");
    let present = b.refused(&["devices", "forget", "data"]);
    assert!(present.contains("host-a publishes data and is there"), "{present}");
    let second = host("host-a", &directory);
    let busy = second.refused(&["devices"]);
    assert!(busy.contains("another daemon of host-a"), "{busy}");
    drop(second);

    // By its name on the other host, under load, whatever happens to members meanwhile.
    let said = b.cli(&["disk", "add", "mine", "--remote", "data"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = CrashLoad::new(1, 16, 32).unwrap();
    load.attach(&b.path("mine.sock")).unwrap();
    step_for(&mut load, Duration::from_millis(50));
    b.until(|| device(&b, "data")["users"].as_u64() >= Some(1));
    etcd.kill(0);
    b.until(|| b.cli(&["devices"]).code == 0 && device(&b, "data")["state"] == "present");
    etcd.stop(1);
    b.until(|| b.cli(&["devices"]).code != 0);
    let none = b.refused(&["devices"]);
    assert!(none.contains(&format!("the directory at {}", etcd.urls()[0])), "{none}");
    let none = b.refused(&["disk", "add", "more", "--remote", "data"]);
    assert!(none.contains("etcd") && none.contains("endpoint health"), "{none}");
    step_for(&mut load, Duration::from_millis(50));
    etcd.go_on(1);
    b.until(|| b.cli(&["devices"]).code == 0 && device(&b, "data")["state"] == "present");
    load.settle().unwrap();
    assert_eq!(b.disk("mine")["totals"]["errors"]["io"], 0);

    // A host that dies keeps its names until somebody forgets them; then the other one that publishes the name has it.
    a.kill9();
    b.until(|| device(&b, "data")["state"] == "lost");
    assert!(device(&b, "data")["lost_ms"].is_null());
    assert_eq!(b.json(&["devices"])["taken"][0]["by"], "host-a");
    let said = b.cli(&["devices", "forget", "data"]);
    assert!(said.out.contains("its name is free"), "{}{}", said.out, said.err);
    b.until(|| device(&b, "data")["host"] == "host-b");
    a.start();
    b.until(|| a.cli(&["devices"]).code == 0 && a.json(&["devices"])["taken"][0]["by"] == "host-b");
}

#[test]
fn a_name_needs_a_directory() {
    let mut alone = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
    alone.start();
    let told = alone.refused(&["devices"]);
    assert!(told.contains("no directory of devices") && told.contains("[directory]"), "{told}");
    let told = alone.refused(&["disk", "add", "data", "--remote", "data"]);
    assert!(told.contains("no directory of devices"), "{told}");
    let (status, body) = alone.http("GET", "/v1/devices", "");
    assert_eq!((status, &body["code"]), (409, &"conflict".into()), "{body}");
}
