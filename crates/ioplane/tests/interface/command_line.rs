//! What commands print: JSON for programs, and text where it says nothing that differs from host to host.

use std::collections::BTreeSet;

use ioplane_testkit::golden;
use serde_json::{Value, json};

use super::normalize::{pretty, shape};
use super::recorder::Recorder;

/// Everything that asks, and nothing that changes.
#[test]
fn what_is_asked() {
    let mut recorder = Recorder::new();
    for (args, text) in [
        (&["status"][..], false),
        (&["disk", "list"], true),
        (&["disk", "show", "file"], true),
        (&["disk", "show", "broken"], false),
        (&["nic", "list"], true),
        (&["nic", "show", "web"], true),
        (&["switch", "list"], true),
        (&["switch", "show", "lan"], true),
        (&["group", "list"], true),
        (&["pci", "show", "old"], true),
        (&["core", "list"], false),
        (&["model", "list"], false),
        (&["reload"], true),
        (&["config", "save"], true),
        (&["qemu-args", "file", "--qemu-version", "7.2"], true),
        (
            &[
                "qemu-args",
                "file",
                "--qemu-version",
                "9.2",
                "--migration-socket",
                "--disk-only",
                "--bootindex",
                "1",
            ],
            true,
        ),
        (&["qemu-args", "web", "--qemu-version", "9.2", "--accel", "kvm", "--memory", "256M"], true),
        (&["qemu-args", "web", "--qemu-version", "9.2", "--accel", "tcg"], true),
        (&["qemu-args", "soft", "--qemu-version", "10.1"], true),
        (&["qemu-args", "soft", "--device-only", "--quoted", "--qemu-version", "10.1"], true),
        (&["libvirt-xml", "file", "web", "soft", "--qemu-version", "10.1", "--accel", "kvm"], false),
        (&["libvirt-xml", "file", "web", "--accel", "tcg"], false),
        (&["libvirt-xml", "file", "web", "--device-only", "--accel", "kvm"], false),
        // Refused, by the daemon and by the command itself.
        (&["disk", "resize", "none", "1G"], false),
        (&["switch", "show", "none"], false),
        (&["pci", "show", "none"], false),
        (&["model", "show", "none"], false),
        (&["qemu-args", "none"], false),
        (&["qemu-args", "memory", "--migration-socket", "--qemu-version", "9.2"], false),
        (&["qemu-args", "soft", "--qemu-version", "7.2"], false),
        (&["libvirt-xml", "soft", "--device-only"], false),
        (&["disk", "remove"], false),
        (&["top", "--interval", "soon"], false),
    ] {
        recorder.run(args, text);
    }
    golden!("command-line.json").check(&recorder.recorded());
}

#[test]
fn models() {
    let mut recorder = Recorder::new();
    recorder.run(&["model", "show", "ne2000"], true);
    golden!("model-ne2000.json").check(&recorder.recorded());
    recorder.run(&["model", "show", "rtl8139"], true);
    golden!("model-rtl8139.json").check(&recorder.recorded());
}

/// The keys of a report's objects, and of those in them.
fn keys(reports: &Value) -> Value {
    let mut all = BTreeSet::new();
    for report in reports.as_array().into_iter().flatten() {
        for (key, value) in report.as_object().unwrap() {
            all.insert(key.clone());
            all.extend(value.as_object().into_iter().flatten().map(|(inner, _)| format!("{key}.{inner}")));
        }
    }
    json!(all)
}

/// Reports about the host: what they say differs from one to the next, and not how.
#[test]
fn of_the_host() {
    let recorder = Recorder::new();
    let json = |args: &[&str]| -> Value {
        let said = recorder.daemon.cli(&[args, &["--json"]].concat());
        serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{args:?}: {error}: {}", said.err))
    };
    let (doctor, list) = (json(&["doctor"]), json(&["pci", "list"]));
    golden!("doctor-keys.json").check(&pretty(&json!({
        "report": keys(&json!([doctor])),
        "findings": keys(&doctor["findings"]),
    })));
    let functions = recorder.normalizer.value(list["functions"].clone());
    golden!("pci-list.json")
        .check(&pretty(&json!({ "report": keys(&json!([list])), "functions": functions })));
    // A machine without PCI has none.
    if list["hardware"] != json!([]) {
        golden!("pci-list-keys.json").check(&pretty(&keys(&list["hardware"])));
    }
}

/// Rates are of one interval in which nothing happens.
#[test]
fn rates() {
    let mut recorder = Recorder::new();
    recorder.run_as(&["top", "--once", "--interval", "0.1"], false, |value| shape(&value));
    golden!("command-line-top.json").check(&recorder.recorded());
}

/// Everything that changes something; the answers are mostly the interface's own.
#[test]
fn what_is_changed() {
    let mut recorder = Recorder::new();
    let (state, image) = (recorder.path("old.state"), recorder.path("file.img"));
    for args in [
        &["disk", "add", "more", "--memory", "1M", "--serial", "M1", "--queues", "2"][..],
        &["disk", "resize", "more", "2M"],
        &["disk", "migration-socket", "more"],
        &["disk", "migration-socket", "more", "--remove"],
        &["disk", "replace", "more", "--memory", "1M"],
        &["core", "move", "more", "1", "3"],
        &["disk", "remove", "more"],
        &["disk", "remove", "more"],
        &["disk", "add", "twice", "--path", &image],
        &["switch", "add", "more"],
        &[
            "nic",
            "add",
            "more",
            "--switch",
            "more",
            "--mac",
            "02:00:00:00:00:41",
            "--vlan",
            "7",
            "--pairs",
            "2",
        ],
        &["nic", "set", "more", "--link", "down"],
        &["group", "add", "vm", "--weight", "3", "--iops-limit", "2000"],
        &["group", "set", "vm", "--weight", "5", "--tx-bandwidth-limit", "10M"],
        &["nic", "set", "more", "--group", "vm"],
        &["group", "show", "vm"],
        &["group", "list"],
        &["group", "remove", "vm"],
        &["nic", "set", "more", "--group", ""],
        &["group", "remove", "vm"],
        &["switch", "remove", "more"],
        &["nic", "remove", "more"],
        &["switch", "remove", "more"],
        &["pci", "add", "more", "--emulate", "ne2000", "--switch", "lan", "--mac", "02:00:00:00:00:42"],
        &["pci", "quiesce", "more", "--deadline", "100ms"],
        &["pci", "resume", "more"],
        &["pci", "reset", "more"],
        &["pci", "save", "more", &state],
        &["pci", "load", "more", &state],
        &["pci", "load", "soft", &state],
        &["pci", "remove", "more"],
        &["core", "add", "--notify", "notified", "--yield-policy", "nice"],
        &["config", "save"],
        &["core", "mode", "notified", "--core", "4"],
        &["core", "mode", "notified"],
        &["core", "retire", "4"],
        &["core", "retire", "9"],
        &["capture", "db", &recorder.path("db.pcapng"), "--for", "0.1"],
        &["capture", "none", &recorder.path("none.pcapng"), "--for", "0.1"],
        &["upgrade", "--binary", "/bin/true"],
    ] {
        recorder.run(args, false);
    }
    // As it is stored for a later daemon.
    let saved = std::fs::read_to_string(&state).unwrap();
    let saved = recorder.normalizer.value(serde_json::from_str(&saved).unwrap());
    golden!("saved-function.json").check(&pretty(&saved));
    golden!("command-line-changes.json").check(&recorder.recorded());
}
