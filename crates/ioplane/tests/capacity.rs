//! The capacity of exports of a real daemon, and what of it is reserved: declared, shown, changed while clients use it, kept.

mod daemon;

use std::io::{Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

use daemon::TestDaemon;
use daemon::load::free_port;
use daemon::reader::Reader;
use daemon::relay::TcpRelay;
use serde_json::{Value, json};

/// An exporter that publishes `data`, and where that is.
fn exporter(more: &str) -> (TestDaemon, String) {
    let port = free_port();
    let mut exporter = TestDaemon::new_beside_the_build("");
    configure(&exporter, port, more);
    exporter.start();
    export(&exporter);
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

/// Its report, once it is served and has the time for one.
fn export(exporter: &TestDaemon) -> Value {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let export = exporter.json(&["publish", "show", "data"]);
        if export["state"] == "served" {
            return export;
        }
        assert!(Instant::now() < end, "{export}");
        std::thread::sleep(Duration::from_millis(20));
    }
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
    assert!(status == 422 && body["error"].as_str().unwrap().contains("nothing is to be changed"), "{body}");
}

/// Has a disk `data` on a host of its own, with so many requests per second reserved.
fn reserving(uri: &str, iops: &str) -> TestDaemon {
    let importer = importer();
    let said = importer.cli(&["disk", "add", "data", "--remote", uri, "--read-only", "--reserve-iops", iops]);
    assert_eq!(said.code, 0, "{}", said.err);
    importer
}

fn reserved(exporter: &TestDaemon) -> Vec<u64> {
    let export = export(exporter);
    export["reservations"].as_array().unwrap().iter().map(|one| one["iops"].as_u64().unwrap()).collect()
}

#[test]
fn a_reservation_that_does_not_fit_is_refused_by_name_and_figures_and_outlives_the_exporter() {
    let (mut exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let b = reserving(&uri, "6000");
    let remote = &b.disk("data")["backing"]["remote"];
    assert_eq!((&remote["reserved_iops"], &remote["reserved_bandwidth"]), (&json!(6000), &json!(0)));
    let shown = b.cli(&["disk", "show", "data"]).out;
    assert!(shown.contains("6000 requests per second are reserved there"), "{shown}");
    let shown = exporter.cli(&["publish", "show", "data"]).out;
    assert!(shown.contains("6000 requests per second, by disk data of"), "{shown}");

    let c = importer();
    let add = |iops: &str| c.cli(&["disk", "add", "more", "--remote", &uri, "--reserve-iops", iops]);
    let refused = add("6000");
    let why = "disk more of";
    let figures = "asks for 6000 requests per second, 4000 of 10000 are free: reserved by disk data of";
    assert!(
        refused.code != 0 && refused.err.contains(why) && refused.err.contains(figures),
        "{}",
        refused.err
    );
    let nothing = c.refused(&["disk", "add", "more", "--remote", &uri, "--reserve-bandwidth", "1M"]);
    assert!(nothing.contains("declares no capacity in bytes"), "{nothing}");
    assert_eq!(reserved(&exporter), [6000], "who was refused has nothing");
    assert_eq!(add("4000").code, 0);

    // The exporter comes back with them, and its capacity stays above them.
    exporter.kill9();
    exporter.start();
    let sum = || reserved(&exporter).iter().sum::<u64>();
    assert_eq!(sum(), 10_000);
    let low = exporter.refused(&["publish", "set", "data", "--iops-limit", "9000"]);
    assert!(low.contains("9000") && low.contains("10000 are reserved"), "{low}");
    assert_eq!(limits(&export(&exporter))[0], &json!(10_000));

    // A disk that is removed gives its part back; one whose host is gone does when a person says so.
    let said = c.cli(&["disk", "remove", "more"]);
    assert_eq!(said.code, 0, "{}", said.err);
    // Given back beside, where the exporter takes its time.
    exporter.until(|| reserved(&exporter) == [6000]);
    drop(b);
    exporter.until(|| export(&exporter)["connections"] == 0);
    let said = exporter.cli(&["publish", "release", "data", "--reservations"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(reserved(&exporter), [0u64; 0]);
    let none = exporter.refused(&["publish", "release", "data", "--reservations"]);
    assert!(none.contains("has reserved anything"), "{none}");
}

/// A daemon that is started again under a guest does not take its disk away.
#[test]
fn a_disk_that_was_there_goes_on_without_what_is_refused() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 100");
    let mut b = reserving(&uri, "60");
    b.kill9();
    exporter.until(|| export(&exporter)["connections"] == 0);
    assert_eq!(exporter.cli(&["publish", "release", "data", "--reservations"]).code, 0);
    let _c = reserving(&uri, "90");
    b.start();
    b.until(|| b.disk("data")["state"] == "served");
    assert_eq!(b.disk("data")["backing"]["remote"]["reserved_iops"], 0);
    let mut guest = Reader::connect(&b, "data");
    guest.submit(1);
    guest.wait(1);
    assert_eq!(reserved(&exporter), [90]);
}

#[test]
fn a_reservation_changes_while_the_disk_is_used_or_stays_as_it_is() {
    let (mut exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let mut b = reserving(&uri, "2000");
    let c = reserving(&uri, "3000");
    let mut guest = Reader::connect(&b, "data");
    let mut works = || {
        guest.submit(4);
        guest.wait(4);
    };
    let kept = |host: &TestDaemon| host.disk("data")["backing"]["remote"]["reserved_iops"].clone();
    let both = |exporter: &TestDaemon| {
        let mut all = reserved(exporter);
        all.sort_unstable();
        all
    };
    works();
    let said = b.cli(&["disk", "set", "data", "--reserve-iops", "6000", "--iops-limit", "50000"]);
    assert!(said.code == 0 && said.out.contains("6000 requests per second"), "{}{}", said.out, said.err);
    assert_eq!((both(&exporter), kept(&b)), (vec![3000, 6000], json!(6000)));
    works();

    // Refused with the exporter's figures: neither the reservation nor what else was asked for changes, nor the connection.
    for (words, why) in [
        (
            &["--reserve-iops", "8000", "--iops-limit", "7"][..],
            "asks for 8000 requests per second, 7000 of 10000 are free: reserved by disk data of",
        ),
        (&["--reserve-bandwidth", "1M"], "declares no capacity in bytes"),
        (&["--reserve-iops", "200000000"], "reserve_iops = 200000000"),
    ] {
        let refused = b.refused(&[&["disk", "set", "data"], words].concat());
        assert!(refused.contains(why), "{refused}");
        assert_eq!((both(&exporter), kept(&b)), (vec![3000, 6000], json!(6000)));
        assert_eq!(b.disk("data")["iops_limit"], 50_000);
    }
    works();
    assert_eq!(b.disk("data")["backing"]["remote"]["losses"], 0);

    // An exporter that is not there cannot be asked; when it comes back it has what it had, and so has the disk after a start of its daemon.
    exporter.kill9();
    let said = b.cli(&["disk", "set", "data", "--reserve-iops", "1000"]);
    assert!(said.code != 0 && said.err.contains("stays as it was"), "{}{}", said.out, said.err);
    exporter.start();
    works();
    exporter.until(|| both(&exporter) == [3000, 6000]);
    assert_eq!(kept(&b), 6000);
    b.kill9();
    b.start();
    b.until(|| b.disk("data")["state"] == "served");
    assert_eq!((both(&exporter), kept(&b)), (vec![3000, 6000], json!(6000)));

    let said = b.cli(&["disk", "set", "data", "--reserve-iops", "0"]);
    assert!(said.code == 0 && said.out.contains("nothing"), "{}{}", said.out, said.err);
    assert_eq!((both(&exporter), kept(&b)), (vec![3000], json!(0)));
    // By the same export again, without a reservation: what was there is given back.
    let said = c.cli(&["disk", "replace", "data", "--remote", &uri]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(both(&exporter), [0u64; 0]);
}

#[test]
fn a_reservation_is_changed_by_a_reload_and_by_programs() {
    let (_exporter, uri) = exporter("read_only = true\niops_limit = 10000\nbandwidth_limit = \"1G\"");
    let _other = reserving(&uri, "3000");
    let mut b = TestDaemon::new_beside_the_build("");
    let configure = |b: &TestDaemon, more: &str| {
        b.configure(&format!(
            "[[core]]\nspin_us = 500\n[[disk]]\nname = \"data\"\nread_only = true\nremote = {uri:?}\n{more}\n[[disk]]\nname = \"local\"\nmemory = \"1M\"\n"
        ));
    };
    configure(&b, "reserve_iops = 1000");
    b.start();
    b.until(|| b.disk("data")["state"] == "served");
    let mut guest = Reader::connect(&b, "data");
    let kept = || {
        let remote = b.disk("data")["backing"]["remote"].clone();
        [remote["reserved_iops"].as_u64().unwrap(), remote["reserved_bandwidth"].as_u64().unwrap()]
    };
    assert_eq!(kept(), [1000, 0]);
    configure(&b, "reserve_iops = 5000\nreserve_bandwidth = \"2M\"");
    let said = b.cli(&["reload"]);
    assert!(said.code == 0 && said.out.contains("disk data changed"), "{}{}", said.out, said.err);
    assert_eq!(kept(), [5000, 2 << 20]);
    configure(&b, "reserve_iops = 8000");
    let said = b.cli(&["reload"]);
    assert!(said.code != 0 && said.err.contains("7000 of 10000 are free"), "{}{}", said.out, said.err);
    assert_eq!(kept(), [5000, 2 << 20]);
    guest.submit(4);
    guest.wait(4);
    assert_eq!(b.disk("data")["backing"]["remote"]["losses"], 0);

    let (status, body) = b.http("PATCH", "/v1/disks/data", "{\"reserve_bandwidth\": 0}");
    assert_eq!((status, &body["backing"]["remote"]["reserved_iops"]), (200, &json!(5000)), "{body}");
    assert_eq!(kept(), [5000, 0]);
    for (disk, form, status) in [
        ("local", json!({ "reserve_iops": 5 }), 409),
        ("data", json!({ "reserve_iops": 9000 }), 409),
        ("data", json!({ "reserve_iops": 200_000_000 }), 422),
    ] {
        let (answered, body) = b.http("PATCH", &format!("/v1/disks/{disk}"), &form.to_string());
        assert_eq!((answered, &body["field"]), (status, &json!("reserve_iops")), "{body}");
    }
    let (status, body) = b.http("PATCH", "/v1/disks/data", "{\"reserve_iops\": 5, \"size\": 4096}");
    assert_eq!((status, &body["code"]), (422, &json!("invalid")), "{body}");
    assert_eq!(kept(), [5000, 0]);
    guest.submit(4);
    guest.wait(4);
}

/// Keeps both busy until `slow` has had `count` answers, and says how many `fast` had meanwhile.
fn race(fast: &mut Reader, slow: &mut Reader, count: usize) -> usize {
    let end = Instant::now() + Duration::from_secs(60);
    let (mut had, mut other) = (0, 0);
    while other < count {
        assert!(Instant::now() < end, "{other} answers to one, {had} to the other");
        fast.submit(32);
        slow.submit(32);
        had += fast.reap();
        other += slow.reap();
        std::thread::sleep(Duration::from_millis(1));
    }
    had
}

/// How exactly, is a test on a made-up clock (crates/scheduler/tests/reservations.rs). Here: that connections draw from the bucket of whose they are.
#[test]
fn whoever_has_reserved_gets_more_than_one_that_floods() {
    let (mut exporter, uri) = exporter("read_only = true\niops_limit = 100\niops_burst = 1");
    let one = reserving(&uri, "90");
    let other = importer();
    let said = other.cli(&["disk", "add", "data", "--remote", &uri, "--read-only"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let (mut first, mut second) = (Reader::connect(&one, "data"), Reader::connect(&other, "data"));
    // A machine that stops for seconds gives both what is in flight; it does not do that for a minute.
    exporter.until(|| race(&mut first, &mut second, 10) >= 30);
    // The other way round: it was not the order in which they came.
    for (host, iops) in [(&one, None), (&other, Some("90"))] {
        let mut add = vec!["disk", "add", "late", "--remote", &uri, "--read-only"];
        add.extend(iops.iter().flat_map(|iops| ["--reserve-iops", iops]));
        if iops.is_some() {
            let refused = host.refused(&add);
            assert!(refused.contains("10 of 100 are free"), "{refused}");
        } else {
            assert_eq!(host.cli(&add).code, 0);
        }
    }
    drop(first);
    one.until(|| one.cli(&["disk", "remove", "data"]).code == 0);
    exporter.until(|| reserved(&exporter).is_empty());
    let said = other.cli(&["disk", "add", "late", "--remote", &uri, "--read-only", "--reserve-iops", "90"]);
    assert_eq!(said.code, 0, "{}", said.err);
    let (mut first, mut late) = (Reader::connect(&one, "late"), Reader::connect(&other, "late"));
    exporter.until(|| race(&mut late, &mut first, 10) >= 30);
    // The same without adding it anew: by a change, and on the connections that come after it.
    let given_back = other.cli(&["disk", "set", "late", "--reserve-iops", "0"]);
    assert_eq!(given_back.code, 0, "{}", given_back.err);
    let said = one.cli(&["disk", "set", "late", "--reserve-iops", "90"]);
    assert_eq!(said.code, 0, "{}", said.err);
    exporter.until(|| race(&mut first, &mut late, 10) >= 30);
    exporter.kill9();
    exporter.start();
    exporter.until(|| race(&mut first, &mut late, 10) >= 30);
    // Programs of others get what is left.
    let copied = Command::new("nbdcopy")
        .args(["--connections=1", "--request-size=1048576", &uri, "null:"])
        .output()
        .expect("nbdcopy runs: script/bootstrap installs libnbd-bin");
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    second.reap();
}

#[test]
fn a_disk_that_can_be_written_may_be_reserved_by_each_that_has_it() {
    let (exporter, uri) = exporter("iops_limit = 1000");
    let add = |host: &TestDaemon, iops: &str| {
        let said = host.cli(&["disk", "add", "data", "--remote", &uri, "--reserve-iops", iops]);
        (said.code, said.err)
    };
    let (source, destination) = (importer(), importer());
    let mut guest = {
        assert_eq!(add(&source, "800").0, 0);
        Reader::connect(&source, "data")
    };
    guest.submit(1);
    guest.wait(1);
    // While the other uses it.
    assert_eq!(add(&destination, "800"), (0, String::new()));
    let (code, why) = add(&importer(), "1001");
    assert!(
        code != 0 && why.contains("asks for 1001 requests per second, and the capacity is 1000"),
        "{why}"
    );
    assert_eq!(reserved(&exporter), [800, 800]);
    guest.submit(1);
    guest.wait(1);
}

#[test]
fn hostile_reservations_are_refused_and_keep_nobody_out() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 1000");
    let (status, body) =
        exporter.http("PUT", "/v1/disks/x", &format!("{{\"remote\": {uri:?}, \"reserve_iops\": 200000000}}"));
    assert!(status == 422 && body["field"] == "reserve_iops", "{body}");
    let (status, body) = exporter.http("PUT", "/v1/disks/x", "{\"memory\": 1048576, \"reserve_iops\": 2}");
    assert!(status == 422 && body["field"] == "reserve_iops", "{body}");
    let socket = exporter.path("data.sock");
    for query in [
        "ioplane:reserve=a/1/1",
        "ioplane:reserve=a/99999999999999999999/0/x",
        "ioplane:reserve=a b/1/0/x",
        "ioplane:reserve=a/5000/0/x",
    ] {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let (name, query) = ("data", query);
        let mut said = Vec::new();
        said.extend(3u32.to_be_bytes());
        let option = |said: &mut Vec<u8>, number: u32, data: &[u8]| {
            said.extend(0x4948_4156_454F_5054u64.to_be_bytes());
            said.extend(number.to_be_bytes());
            said.extend((data.len() as u32).to_be_bytes());
            said.extend(data);
        };
        option(&mut said, 8, &[]);
        let mut asked = (name.len() as u32).to_be_bytes().to_vec();
        asked.extend(name.as_bytes());
        asked.extend(1u32.to_be_bytes());
        asked.extend((query.len() as u32).to_be_bytes());
        asked.extend(query.as_bytes());
        option(&mut said, 10, &asked);
        // NBD_OPT_ABORT: the server answers all before it, and closes.
        option(&mut said, 2, &[]);
        stream.write_all(&said).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let text = String::from_utf8_lossy(&answer);
        assert!(!text.contains("granted"), "{query}: {text}");
        assert_eq!(text.contains("refused/x asks for 5000"), query.contains("5000"), "{query}: {text}");
    }
    assert_eq!(reserved(&exporter), [0u64; 0]);
    reserving(&uri, "1000");
}

/// A relay to the exporter at `uri`, and the URI by way of it.
fn relayed(uri: &str) -> (TcpRelay, String) {
    let relay = TcpRelay::to(port(uri));
    let by_relay = format!("nbd://127.0.0.1:{}/data", relay.port());
    (relay, by_relay)
}

/// What a disk says that is kept for it, once it is certain.
fn certain(host: &TestDaemon) -> u64 {
    let mut kept = 0;
    host.until(|| {
        let remote = host.disk("data")["backing"]["remote"].clone();
        kept = remote["reserved_iops"].as_u64().unwrap_or_default();
        remote["reserved_why"].is_null()
    });
    kept
}

/// The exporter is asked for as long as the network takes. What others change meanwhile stays changed.
#[test]
fn a_group_does_not_wait_for_the_exporter_of_its_disk_and_may_go_meanwhile() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let (relay, by_relay) = relayed(&uri);
    let b = importer();
    assert_eq!(b.cli(&["group", "add", "ours"]).code, 0);
    let add = [
        "disk",
        "add",
        "data",
        "--remote",
        &by_relay,
        "--read-only",
        "--reserve-iops",
        "2000",
        "--group",
        "ours",
    ];
    let said = b.cli(&add);
    assert_eq!(said.code, 0, "{}", said.err);
    // A machine that stops for so long that the exporter is not waited for any more proves nothing: once more.
    exporter.until(|| {
        b.cli(&["group", "add", "other"]);
        relay.hold();
        let set = ["disk", "set", "data", "--reserve-iops", "1000", "--iops-limit", "7", "--group", "other"];
        let set = std::thread::spawn(b.later(&set));
        b.until(|| relay.holds());
        let changed = b.cli(&["group", "set", "ours", "--weight", "5"]);
        let removed = b.cli(&["group", "remove", "other"]);
        let waits = relay.holds();
        relay.pass();
        let said = set.join().unwrap();
        assert_eq!((changed.code, removed.code), (0, 0), "{}{}", changed.err, removed.err);
        waits && said.code != 0 && said.err.contains("there is no group other")
    });
    assert_eq!(certain(&b), 2000);
    assert_eq!(reserved(&exporter), [2000], "what was granted was given back");
    let disk = b.disk("data");
    assert_eq!((&disk["group"], &disk["iops_limit"]), (&json!("ours"), &Value::Null));
}

#[test]
fn a_disk_that_is_removed_while_its_exporter_is_asked_stays_removed() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let (relay, by_relay) = relayed(&uri);
    let mut b = importer();
    exporter.until(|| {
        let said =
            b.cli(&["disk", "add", "data", "--remote", &by_relay, "--read-only", "--reserve-iops", "2000"]);
        assert_eq!(said.code, 0, "{}", said.err);
        relay.hold();
        let set = std::thread::spawn(b.later(&["disk", "set", "data", "--reserve-iops", "1000"]));
        b.until(|| relay.holds());
        let remove = std::thread::spawn(b.later(&["disk", "remove", "data"]));
        b.until(|| !b.path("data.sock").exists());
        relay.pass();
        let (said, removed) = (set.join().unwrap(), remove.join().unwrap());
        assert_eq!(removed.code, 0, "{}", removed.err);
        // The question is given up; or it was answered just before, and that is given back.
        said.code != 0 && (said.err.contains("given up") || said.err.contains("removed meanwhile"))
    });
    exporter.until(|| reserved(&exporter).is_empty());
    b.kill9();
    b.start();
    assert_eq!(b.json(&["status"])["disks"], json!([]));
}

#[test]
fn a_replacement_whose_grant_is_lost_leaves_the_reservation_as_it_was() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let (relay, by_relay) = relayed(&uri);
    let b = reserving(&by_relay, "2000");
    relay.lose_grants();
    let said = b.cli(&["disk", "replace", "data", "--remote", &by_relay, "--reserve-iops", "3000"]);
    assert!(said.code != 0 && relay.has_lost(), "{}{}", said.out, said.err);
    assert_eq!(reserved(&exporter), [3000]);
    relay.pass();
    exporter.until(|| reserved(&exporter) == [2000]);
    assert_eq!(certain(&b), 2000);
    let said = b.cli(&["disk", "replace", "data", "--remote", &by_relay, "--reserve-iops", "3000"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!((reserved(&exporter), certain(&b)), (vec![3000], 3000));
}

#[test]
fn a_grant_of_which_a_killed_importer_does_not_know_is_given_back() {
    let (exporter, uri) = exporter("read_only = true\niops_limit = 10000");
    let (relay, by_relay) = relayed(&uri);
    let mut b = importer();
    let said = b.cli(&["disk", "add", "data", "--remote", &by_relay, "--read-only"]);
    assert_eq!(said.code, 0, "{}", said.err);
    relay.lose_grants();
    let set = std::thread::spawn(b.later(&["disk", "set", "data", "--reserve-iops", "500"]));
    b.until(|| relay.has_lost());
    b.kill9();
    assert_ne!(set.join().unwrap().code, 0);
    assert_eq!(reserved(&exporter), [500]);
    relay.pass();
    b.start();
    b.until(|| b.disk("data")["state"] == "served");
    exporter.until(|| reserved(&exporter).is_empty());
    assert_eq!(certain(&b), 0);
}
