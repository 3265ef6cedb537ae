//! Every family of the metrics: type, help, names of labels, and the words that a label may say; and that names and labels follow the
//! rules of Prometheus and OpenMetrics (docs/decisions/0030).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::golden;
use serde_json::json;

use super::daemon::http;
use super::recorder::Recorder;

/// Labels whose values are words of ours. Others name what a configuration names, or differ from run to run.
const WORDS: &[&str] = &["cause", "direction", "kind", "mode", "role", "le", "state", "fault"];

#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    unit: String,
    /// The labels of each name that its samples have.
    samples: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

/// Name and labels of a sample. No value of ours has a quotation mark, a comma or a brace in it, but an error's text may: it is the
/// last label.
fn sample(line: &str) -> (&str, Vec<(&str, &str)>) {
    let Some((name, rest)) = line.split_once('{') else {
        return (line.split(' ').next().unwrap(), Vec::new());
    };
    let labels = rest.rsplit_once('}').unwrap().0;
    let mut all = Vec::new();
    let mut left = labels;
    while let Some((label, rest)) = left.split_once("=\"") {
        let end = rest.find("\",").unwrap_or(rest.len() - 1);
        all.push((label, &rest[..end]));
        left = rest.get(end + 2..).unwrap_or_default();
    }
    (name, all)
}

/// Labels that place a thing, and may change while it lives: in `_info` families, and in those of the thing that they name.
const PLACES: [&str; 4] = ["core", "cpu", "vm", "pid"];
/// Labels that a family of ours may have. What a `device` is called is unique among disks, NICs and PCI functions.
const LABELS: [&str; 8] = ["device", "queue", "role", "switch", "port", "direction", "cause", "fault"];
/// Units that are not base units, and abbreviations of base units.
const UNITS: [&str; 9] =
    ["ms", "us", "ns", "percent", "kib", "mib", "kilobytes", "milliseconds", "microseconds"];

/// What is wrong with a family.
fn broken(name: &str, family: &Family) -> Vec<String> {
    let Family { kind, help, unit, samples } = family;
    let mut all = Vec::new();
    let mut rule = |holds: bool, what: &str| all.extend((!holds).then(|| format!("{name}: {what}")));
    let words: Vec<&str> = name.split('_').collect();
    let plain = |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
    rule(words.iter().all(plain), "words of small letters");
    rule(["ioplane", "process"].contains(&words[0]), "begins with what it is of");
    rule(!words.iter().any(|word| UNITS.contains(word)), "base units only");
    rule(!help.is_empty() && !help.ends_with('.'), "a help text, without a full stop");
    let last = *words.last().unwrap();
    rule(unit.is_empty() || name.ends_with(&format!("_{unit}")), "the unit ends the name");
    rule(!["bytes", "seconds"].contains(&last) || last == unit, "a name that ends with a unit declares it");
    rule(!["total", "info", "count", "sum", "bucket"].contains(&last), "suffixes are added by the format");
    rule(kind != "histogram" || name.ends_with("_duration_seconds"), "a histogram is of durations");
    let suffixes: &[&str] = match kind.as_str() {
        "counter" => &["_total"],
        "info" => &["_info"],
        "histogram" => &["_bucket", "_count", "_sum"],
        "gauge" => &[""],
        _ => &[],
    };
    for (sample, labels) in samples {
        rule(suffixes.iter().any(|suffix| *sample == format!("{name}{suffix}")), "samples by their type");
        for label in labels.keys().map(String::as_str) {
            let own = words.get(1) == Some(&label);
            rule(
                !PLACES.contains(&label) || kind == "info" || own,
                &format!("placement in the label {label}"),
            );
            let known =
                LABELS.contains(&label) || PLACES.contains(&label) || label == "le" || label == "kind";
            rule(known || kind == "info", &format!("the label {label}"));
            rule(!["name", "reason", "error"].contains(&label), &format!("the label {label} says nothing"));
        }
    }
    all
}

#[test]
fn families_that_break_the_rules_are_found() {
    let family = |kind: &str, name: &str, labels: &[&str]| -> Vec<String> {
        let labels = labels.iter().map(|label| ((*label).to_owned(), BTreeSet::new())).collect();
        let suffix = if kind == "counter" { "_total" } else { "" };
        let samples = BTreeMap::from([(format!("{name}{suffix}"), labels)]);
        broken(
            name,
            &Family { kind: kind.to_owned(), help: "What it is".to_owned(), unit: String::new(), samples },
        )
    };
    assert_eq!(family("counter", "ioplane_disk_requests", &["device", "queue"]), [""; 0]);
    assert_eq!(family("gauge", "ioplane_core_queues", &["core"]), [""; 0]);
    for (kind, name, labels) in [
        ("counter", "ioplane_disk_requests", &["device", "core"][..]),
        ("counter", "ioplane_disk_requests", &["disk"]),
        ("gauge", "ioplane_not_served", &["device", "reason"]),
        ("gauge", "ioplane_core_spin_us", &["core"]),
        ("gauge", "ioplane_disk_size_bytes", &["device"]),
        ("counter", "ioplane_disk_requests_total", &["device"]),
        ("histogram", "ioplane_disk_wait_seconds", &["device"]),
        ("gauge", "disk_connected", &["device"]),
    ] {
        assert_ne!(family(kind, name, labels), [""; 0], "{name} {labels:?}");
    }
}

#[test]
fn families() {
    let recorder = Recorder::new();
    let daemon = &recorder.daemon;
    let socket = daemon.path("published.sock").display().to_string();
    let uri = format!("nbd+unix:///published?socket={socket}");
    let export = json!({ "memory": 1 << 20, "iops_limit": 1000, "bandwidth_limit": 1 << 20 });
    let mut remote = json!({ "remote": uri, "reserve_iops": 100, "reserve_bandwidth": 4096 });
    (remote["timeout_s"], remote["on_timeout"], remote["qmp"]) =
        (30.into(), "pause".into(), "/run/vm.qmp".into());
    for (path, form) in [("/v1/exports/published", export), ("/v1/disks/remote", remote)] {
        let (status, answer) = daemon.http("PUT", path, &form.to_string());
        assert_eq!(status, 201, "{path}: {answer}");
    }
    // Some families say something only while somebody is connected.
    let _disk = FrontEnd::connect(&recorder.daemon.path("memory.sock"), Wants::default()).unwrap();
    recorder.daemon.until(|| recorder.daemon.disk("memory")["connected"] == true);
    let rates = [
        "ioplane_export_capacity_requests_per_second{device=\"published\"} 1000",
        "ioplane_export_capacity_bytes_per_second{device=\"published\"} 1048576",
        "ioplane_export_reserved_requests_per_second{device=\"published\"} 100",
        "ioplane_export_reserved_bytes_per_second{device=\"published\"} 4096",
        "ioplane_remote_reserved_requests_per_second{device=\"remote\"} 100",
        "ioplane_remote_reserved_bytes_per_second{device=\"remote\"} 4096",
    ];
    let end = Instant::now() + Duration::from_secs(60);
    let text = loop {
        let stream = std::net::TcpStream::connect(("127.0.0.1", recorder.port)).unwrap();
        let (status, text) = http(stream, "GET", "/metrics", "");
        assert_eq!(status, 200);
        // An export that has no time for an answer says nothing of its reservations.
        let missing = rates.iter().find(|rate| !text.lines().any(|line| line == **rate));
        let Some(missing) = missing else { break text };
        assert!(Instant::now() < end, "{missing} is not in {text}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF"), ..) => {}
            (Some("#"), Some(what), Some(name), rest) => {
                current = name.to_owned();
                let family = families.entry(current.clone()).or_default();
                let rest = rest.unwrap_or_default().to_owned();
                match what {
                    "TYPE" => family.kind = rest,
                    "HELP" => family.help = rest,
                    "UNIT" => family.unit = rest,
                    other => panic!("{other}: {line}"),
                }
            }
            _ => {
                let (name, labels) = sample(line);
                assert!(name.starts_with(&current), "{line} is not of {current}");
                let known = families.get_mut(&current).unwrap().samples.entry(name.to_owned()).or_default();
                for (label, value) in labels {
                    let values = known.entry(label.to_owned()).or_default();
                    values.insert(if WORDS.contains(&label) { value.to_owned() } else { "*".to_owned() });
                }
            }
        }
    }
    assert!(families.len() > 40, "{text}");
    let broken: Vec<String> = families.iter().flat_map(|(name, family)| broken(name, family)).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    let mut shown = String::new();
    for (name, Family { kind, help, unit, samples }) in families {
        let _ = writeln!(shown, "{}", format!("{name} {kind} {unit}").trim_end());
        let _ = writeln!(shown, "  {help}");
        for (name, labels) in samples {
            let _ = writeln!(shown, "  {name}");
            for (label, values) in labels {
                let _ = writeln!(shown, "    {label}: {}", values.into_iter().collect::<Vec<_>>().join(" "));
            }
        }
    }
    golden!("metrics.text").check(&shown);
}
