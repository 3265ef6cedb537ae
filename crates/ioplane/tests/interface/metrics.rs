//! Every family of the metrics: type, help, names of labels, and the words that a label may say.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use ioplane_testkit::front::{Front, Wants};
use ioplane_testkit::golden;

use super::house::http;
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

#[test]
fn families() {
    let recorder = Recorder::new();
    // Some families say something only while somebody is connected.
    let _disk = Front::connect(&recorder.house.path("memory.sock"), Wants::default()).unwrap();
    recorder.house.until(|| recorder.house.disk("memory")["connected"] == true);
    let stream = std::net::TcpStream::connect(("127.0.0.1", recorder.port)).unwrap();
    let (status, text) = http(stream, "GET", "/metrics", "");
    assert_eq!(status, 200);
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
