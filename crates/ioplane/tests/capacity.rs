//! The capacity of exports of a real daemon: declared, shown, changed while clients use it, kept.

mod daemon;

use std::time::{Duration, Instant};

use daemon::TestDaemon;
use daemon::load::free_port;
use daemon::reader::Reader;
use serde_json::{Value, json};

/// An exporter that publishes `data`, and where that is.
fn exporter(more: &str) -> (TestDaemon, String) {
    let port = free_port();
    let mut exporter = TestDaemon::new_beside_the_build("");
    configure(&exporter, port, more);
    exporter.start();
    (exporter, format!("nbd://127.0.0.1:{port}/data"))
}

fn configure(exporter: &TestDaemon, port: u16, more: &str) {
    let image = exporter.image("data.img", 8 << 20);
    exporter.configure(&format!(
        "[[core]]\nspin_us = 500\n[[export]]\nname = \"data\"\npath = {image:?}\nlisten = \"127.0.0.1:{port}\"\nplain = true\n{more}\n"
    ));
}

fn port(uri: &str) -> u16 {
    let address = uri.trim_start_matches("nbd://127.0.0.1:");
    address.split('/').next().unwrap().parse().unwrap()
}

fn importer() -> TestDaemon {
    let mut importer = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 500\n");
    importer.start();
    importer
}

fn export(exporter: &TestDaemon) -> Value {
    exporter.json(&["publish", "show", "data"])
}

/// The capacity of an export as its report has it.
fn limits(report: &Value) -> [&Value; 4] {
    ["iops_limit", "iops_burst", "bandwidth_limit", "bandwidth_burst"].map(|field| &report[field])
}

#[test]
fn all_clients_of_an_export_get_its_capacity_together_and_it_changes_while_they_use_it() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 200\niops_burst = 10");
    let importer = importer();
    let mut guests: Vec<Reader> = ["a", "b"]
        .iter()
        .map(|name| {
            let said = importer.cli(&["disk", "add", name, "--remote", &uri, "--read-only"]);
            assert_eq!(said.code, 0, "{}", said.err);
            Reader::connect(&importer, name)
        })
        .collect();
    let began = Instant::now();
    for _ in 0..4 {
        guests.iter_mut().for_each(|guest| guest.submit(13));
        guests.iter_mut().for_each(|guest| guest.wait(13));
    }
    // The burst, one more, and the rest at their rate.
    let least = Duration::from_secs(104 - 11) / 200;
    assert!(began.elapsed() >= least, "104 requests in {:?}", began.elapsed());
    // One per second: 40 requests of each do not come in the time that the test waits.
    let said = exporter.cli(&["publish", "set", "data", "--iops-limit", "1", "--iops-burst", "1"]);
    assert!(said.out.contains("1 requests per second (burst 1)"), "{}{}", said.out, said.err);
    guests.iter_mut().for_each(|guest| guest.submit(40));
    std::thread::sleep(Duration::from_millis(50));
    let early: Vec<usize> = guests.iter_mut().map(Reader::reap).collect();
    assert!(early.iter().sum::<usize>() < 20, "{early:?} answers at once");
    let said = exporter.cli(&["publish", "set", "data", "--iops-limit", "0"]);
    assert!(said.out.contains("capacity") && said.out.contains("none"), "{}", said.out);
    guests.iter_mut().zip(early).for_each(|(guest, early)| guest.wait(40 - early));
    assert_eq!(limits(&export(&exporter)), [&Value::Null; 4]);
}

#[test]
fn the_capacity_of_an_export_is_kept_and_changed_by_a_reload() {
    let (mut exporter, uri) = exporter("bandwidth_limit = \"1M\"");
    let importer = importer();
    let said = importer.cli(&["disk", "add", "data", "--remote", &uri]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut guest = Reader::connect(&importer, "data");
    guest.submit(1);
    guest.wait(1);
    assert_eq!(limits(&export(&exporter))[2], &json!(1 << 20));
    configure(&exporter, port(&uri), "iops_limit = 500");
    let said = exporter.cli(&["reload"]);
    assert!(said.code == 0 && said.out.contains("export data changed"), "{}{}", said.out, said.err);
    assert_eq!(limits(&export(&exporter)), [&json!(500), &Value::Null, &Value::Null, &Value::Null]);
    assert_eq!(export(&exporter)["connections"], 1, "its client stays");
    // What is set at run time stays, through a death of the daemon too.
    exporter.json(&["publish", "set", "data", "--bandwidth-limit", "10M"]);
    exporter.kill9();
    exporter.start();
    assert_eq!(limits(&export(&exporter)), [&json!(500), &Value::Null, &json!(10 << 20), &Value::Null]);
    guest.submit(1);
    guest.wait(1);
    for (words, why) in [
        (&["--iops-burst", "0"][..], "iops_burst = 0"),
        (&["--bandwidth-limit", "0", "--bandwidth-burst", "1M"], "bandwidth_burst without bandwidth_limit"),
    ] {
        let refused = exporter.refused(&[&["publish", "set", "data"], words].concat());
        assert!(refused.contains(why), "{refused}");
    }
    let (status, body) = exporter.http("PATCH", "/v1/exports/data", "{}");
    assert!(status == 400 && body["error"].as_str().unwrap().contains("nothing is to be changed"), "{body}");
}
