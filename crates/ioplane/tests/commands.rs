//! What holds of all commands: how much is said, errors for programs, words that have changed; and `config save` and `serve --check`.

mod daemon;

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use daemon::TestDaemon;
use ioplane_api::refusal::Code;
use serde_json::Value;

const CONFIG: &str = "# by hand\n[[disk]]\nname = \"a\"\nmemory = \"8M\"\nqueues = 2\n[[disk]]\nname = \"gone\"\nmemory = \"1M\"\n\
                      [[switch]]\nname = \"lan\"\n[[nic]]\nname = \"web\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:01\"\n";

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    command.args(args).env_remove("IOPLANE_SOCKET").stdin(Stdio::null()).output().unwrap()
}

fn read(output: &[u8]) -> Value {
    serde_json::from_slice(output).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(output)))
}

#[test]
fn one_disk_and_one_nic_are_shown_whole() {
    let daemon = TestDaemon::open(CONFIG);
    let disk = daemon.cli(&["disk", "show", "a"]).out;
    assert!(disk.starts_with("a: memory, 8M, writable, waiting\n"), "{disk}");
    for line in
        ["  VM                 none; 0 connections so far", "  queue 1            not set up by a driver"]
    {
        assert!(disk.lines().any(|found| found == line), "{line} is not in\n{disk}");
    }
    assert_eq!(daemon.json(&["disk", "show", "a"])["queues"].as_array().unwrap().len(), 2);
    let nic = daemon.cli(&["nic", "show", "web"]).out;
    assert!(nic.starts_with("web: 02:00:00:00:00:01 on switch lan, waiting\n"), "{nic}");
    assert!(nic.contains("\n  received           0 frames, 0; dropped: none\n"), "{nic}");
    assert!(daemon.refused(&["disk", "show", "web"]).contains("no disk web"));
    assert!(daemon.refused(&["nic", "show", "a"]).contains("no nic a"));
}

#[test]
fn what_is_there_already_is_shown_by_a_command_here_and_a_request_over_http() {
    let daemon = TestDaemon::open(CONFIG);
    let add: &[&[&str]] = &[
        &["disk", "add", "a", "--memory", "16M"],
        &["nic", "add", "web", "--switch", "lan", "--mac", "02:00:00:00:00:02"],
    ];
    for add in add {
        let show = format!("`ioplane {} show {}` shows how it is", add[0], add[2]);
        let said = daemon.refused(add);
        assert!(said.contains(&show) && !said.contains("GET"), "{said}");
        let for_programs = read(daemon.cli(&[add, &["--json"][..]].concat()).out.as_bytes());
        assert!(for_programs["remedy"].as_str().unwrap().ends_with(&show), "{for_programs}");
    }
    let (status, answer) = daemon.http("PUT", "/v1/disks/a", r#"{"memory": "16M"}"#);
    assert_eq!(status, 409, "{answer}");
    assert!(answer["remedy"].as_str().unwrap().ends_with("GET shows how it is"), "{answer}");
}

#[test]
fn top_for_programs_is_a_line_per_interval_and_ends_when_nobody_reads() {
    let daemon = TestDaemon::open(CONFIG);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    command.arg("--socket").arg(daemon.path("control.sock")).args(["top", "--json", "--interval", "0.1"]);
    let mut top = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let look = read(lines.next().unwrap().unwrap().as_bytes());
        assert_eq!(look["cores"].as_array().unwrap().len(), 1, "{look}");
    }
    drop(lines);
    daemon.until(|| top.try_wait().unwrap().is_some());
    assert!(top.wait().unwrap().success());
}

#[test]
fn what_was_added_is_saved_in_the_configuration() {
    let mut daemon = TestDaemon::open(CONFIG);
    let file = daemon.path("ioplane.toml");
    let text = || std::fs::read_to_string(&file).unwrap();
    let said = daemon.cli(&["config", "save"]);
    assert!(
        said.code == 0 && said.out.starts_with("nothing was added at run time"),
        "{}{}",
        said.out,
        said.err
    );
    assert_eq!(text(), CONFIG);

    let socket = daemon.path("b.vhost.sock").display().to_string();
    daemon.json(&["disk", "add", "b", "--memory", "2M", "--serial", "B1", "--vhost-socket", &socket]);
    daemon.json(&["switch", "add", "back"]);
    daemon.json(&["nic", "add", "db", "--switch", "back", "--vlan", "trunk:10,20"]);
    daemon.json(&["pci", "add", "old", "--emulate", "ne2000", "--switch", "back"]);
    daemon.json(&["core", "add", "--notify", "notified"]);
    daemon.json(&["disk", "remove", "gone"]);
    daemon.json(&["nic", "set", "web", "--link", "down"]);
    let printed = daemon.cli(&["config", "save", "--print"]);
    assert_eq!(text(), CONFIG, "nothing is written");
    for line in ["disk gone was removed at run time, and is in the file", "nic web was changed at run time"] {
        assert!(printed.err.contains(&format!("not saved: {line}\n")), "{}", printed.err);
    }
    let report = daemon.json(&["config", "save"]);
    assert_eq!(text(), format!("{CONFIG}{}", printed.out), "what was there is as it was");
    assert_eq!(report["text"], printed.out.as_str());
    let saved: Vec<&str> = report["saved"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let expected = [
        "core 1",
        "core 0 (there without being written)",
        "disk b",
        "switch back",
        "nic db",
        "PCI function old",
    ];
    assert_eq!(saved, expected);
    assert!(daemon.cli(&["config", "save"]).out.starts_with("nothing was added"), "it is there now");

    // A reload takes it as configured, and a daemon that remembers nothing serves the same.
    let mac = daemon.json(&["nic", "show", "db"])["mac"].clone();
    daemon.json(&["reload"]);
    assert_eq!(daemon.disk("b")["origin"], "config");
    daemon.terminate();
    std::fs::remove_file(daemon.path("state.json")).unwrap();
    daemon.start();
    let disk = daemon.disk("b");
    assert_eq!((&disk["serial"], &disk["socket"]), (&"B1".into(), &socket.as_str().into()));
    let nic = daemon.json(&["nic", "show", "db"]);
    assert_eq!((&nic["vlan"], &nic["mac"]), (&"trunk:10,20".into(), &mac));
    let cores = daemon.json(&["core", "list"]);
    assert_eq!((&cores[0]["id"], &cores[1]["notify"]), (&0.into(), &"notified".into()), "{cores}");
}

#[test]
fn a_configuration_that_cannot_take_it_stays_as_it_is() {
    let daemon = TestDaemon::open("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    daemon.json(&["disk", "add", "b", "--memory", "2M"]);
    for broken in ["[[disk]]\nname = \"a\"\nmemory = \n", "[[disk]]\nname = \"b\"\nmemory = \"1M\"\n"] {
        daemon.configure(broken);
        let said = daemon.cli(&["config", "save"]);
        let refused = said.code == 1 && said.err.contains("ioplane.toml:3");
        let other = said.code == 0 && said.err.contains("disk b: the file has another one of this name");
        assert!(refused || other, "{}{}", said.out, said.err);
        assert_eq!(std::fs::read_to_string(daemon.path("ioplane.toml")).unwrap(), broken);
    }
    // Somebody else's half-written file is not overwritten.
    daemon.configure("");
    std::fs::write(daemon.path("ioplane.toml.new"), "theirs").unwrap();
    assert!(daemon.refused(&["config", "save"]).contains("ioplane.toml.new is there already"));
    assert_eq!(std::fs::read_to_string(daemon.path("ioplane.toml.new")).unwrap(), "theirs");
}

#[test]
fn a_configuration_is_checked_without_a_daemon() {
    let daemon = TestDaemon::new(CONFIG);
    let file = daemon.path("ioplane.toml").display().to_string();
    let check = |more: &[&str]| run(&[&["serve", "--check", "--config", &file], more].concat());
    let good = check(&[]);
    let said = String::from_utf8(good.stdout).unwrap();
    assert_eq!(said, format!("{file}: accepted: 1 core, 2 disks, 1 switch, 1 NIC\n"));
    assert!(good.status.success() && !daemon.path("state.json").exists());
    assert!(check(&["-q"]).stdout.is_empty());

    daemon.configure("[[disk]]\nname = \"a\"\npath = \"none.img\"\n");
    let lacking = check(&[]);
    let said = String::from_utf8(lacking.stdout).unwrap();
    assert!(lacking.status.success() && said.contains(":3: there is no image "), "{said}");
    assert_eq!(read(&check(&["--json"]).stdout)["missing"][0]["line"], 3);

    daemon.configure("[[disk]]\nname = \"a\"\nmemory = \"1M\"\nquques = 2\n");
    let bad = check(&["--json"]);
    assert_eq!(bad.status.code(), Some(2));
    let report = read(&bad.stdout);
    assert_eq!((&report["accepted"], &report["problems"][0]["line"]), (&false.into(), &4.into()), "{report}");
    assert!(report["error"].is_string() && report["remedy"].is_string(), "{report}");
    assert_eq!(report["code"], "configuration");
}

#[test]
fn every_error_is_json_if_that_is_wanted() {
    let daemon = TestDaemon::open(CONFIG);
    let (nowhere, garbage) = (daemon.path("none.toml").display().to_string(), daemon.path("garbage"));
    std::fs::write(&garbage, "no state").unwrap();
    let garbage = garbage.display().to_string();
    for (args, exit, code) in [
        (&["disk", "show", "none"][..], 1, "not_found"),
        (&["qemu-args", "none"], 1, "not_found"),
        (&["model", "show", "none"], 1, "not_found"),
        (&["exits", "--vm", "none"], 1, "not_found"),
        (&["qemu-args", "a", "--qemu-version", "new"], 1, "usage"),
        (&["exits", "apply", "none", "--ssh", "guest"], 1, "usage"),
        (&["upgrade", "--deadline", "20m"], 1, "usage"),
        (&["qemu-args", "web", "--qemu-version", "9.2", "--migration-socket"], 1, "unsupported"),
        (&["qemu-args", "a", "--qemu-version", "9.2", "--migration-socket"], 1, "conflict"),
        (&["qemu-args", "a", "--qemu", "/none"], 1, "command_failed"),
        (&["pci", "load", "none", &garbage], 1, "invalid"),
        (&["capture", "web", "/none/file", "--for", "1s"], 1, "command_failed"),
        (&["serve", "--config", &nowhere], 2, "configuration"),
        (&["disk", "remove"], 2, "usage"),
        (&["top", "--interval", "soon"], 2, "usage"),
    ] {
        let said = daemon.cli(&[args, &["--json"]].concat());
        let error = read(said.out.as_bytes());
        assert_eq!((said.code, error["code"].as_str()), (exit, Some(code)), "{args:?}: {error}");
        let known = Code::of(code).expect("a code of docs/guide/errors.md");
        assert_eq!(error["type"], known.uri(), "{args:?}: {error}");
        assert!(error["error"].is_string() && error["remedy"].is_string(), "{args:?}: {error}");
        assert!(!said.err.is_empty());
    }
    let nobody = read(&run(&["--socket", "/nowhere", "status", "--json"]).stdout);
    assert!(nobody["error"].as_str().unwrap().starts_with("no daemon answers on /nowhere"), "{nobody}");
    assert_eq!(nobody["code"], "unreachable");
}

#[test]
fn how_much_is_said() {
    let daemon = TestDaemon::open(CONFIG);
    let quiet = daemon.cli(&["disk", "resize", "a", "16M", "-q"]);
    assert_eq!((quiet.code, quiet.out.as_str(), quiet.err.as_str()), (0, "", ""));
    assert!(daemon.cli(&["disk", "list", "-q"]).out.contains("16M"), "what is asked for is printed");
    assert_eq!(read(daemon.cli(&["disk", "resize", "a", "17M", "-q", "--json"]).out.as_bytes())["name"], "a");
    let said = daemon.cli(&["disk", "resize", "a", "18M", "-v"]);
    assert_eq!(said.err, "ioplane: PATCH /v1/disks/a\n");
    assert_eq!(daemon.cli(&["status", "-q", "-v"]).code, 2);

    let old = ["qemu-args", "a", "--qemu-version", "9.2", "--disk-only"];
    let new = ["qemu-args", "a", "--qemu-version", "9.2", "--device-only"];
    let (old, quiet, new) = (daemon.cli(&old), daemon.cli(&[&old[..], &["-q"]].concat()), daemon.cli(&new));
    assert_eq!((&old.out, &quiet.out), (&new.out, &new.out));
    assert!(old.err.contains("--disk-only is deprecated: use --device-only"), "{}", old.err);
    assert_eq!((quiet.err.as_str(), new.err.as_str()), ("", ""));
}

/// Old words of every interface: what they mean is what the new ones do, and configuration and command line warn of them.
#[test]
fn old_words_are_still_read() {
    let config = |policy: &str, socket: &str| {
        format!(
            "[[core]]\n{policy} = \"nice\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n{socket} = \"m.sock\"\n"
        )
    };
    let daemon = TestDaemon::open(&config("manners", "twin"));
    let socket = |name: &str| daemon.path(name).display().to_string();
    assert_eq!(daemon.disk("a")["migration_socket"], socket("m.sock"));
    assert_eq!(daemon.json(&["core", "list"])[0]["yield_policy"], "nice");
    let file = daemon.path("ioplane.toml").display().to_string();
    let said = run(&["serve", "--check", "--config", &file]);
    let text = String::from_utf8(said.stdout).unwrap();
    assert!(said.status.success(), "{text}");
    assert!(text.contains(":2: manners is deprecated\n  hint: write yield_policy\n"), "{text}");
    assert!(text.contains(":6: twin is deprecated\n  hint: write migration_socket\n"), "{text}");
    let report = read(&run(&["serve", "--check", "--config", &file, "--json"]).stdout);
    assert_eq!((&report["accepted"], &report["warnings"][1]["line"]), (&true.into(), &6.into()), "{report}");

    daemon.configure(&config("yield_policy", "migration_socket"));
    assert_eq!(daemon.json(&["reload"])["done"], Value::Array(Vec::new()), "it means the same");
    assert_eq!(
        read(&run(&["serve", "--check", "--config", &file, "--json"]).stdout)["warnings"],
        Value::Array(Vec::new())
    );

    let body = format!("{{\"memory\": \"1M\", \"twin\": \"{}\"}}", socket("b2.sock"));
    let (status, disk) = daemon.http("PUT", "/v1/disks/b", &body);
    assert_eq!((status, &disk["migration_socket"]), (201, &socket("b2.sock").into()));
    // It has one, not at the usual place: whoever names none has what was asked for.
    assert_eq!(daemon.http("PUT", "/v1/disks/b/migration-socket", "{}").0, 200);
    assert_eq!(daemon.http("DELETE", "/v1/disks/b/twin", "").0, 200);
    let (status, disk) = daemon.http("PUT", "/v1/disks/b/twin", "{}");
    assert_eq!((status, &disk["migration_socket"]), (201, &socket("b.migration.sock").into()));

    let said = daemon.cli(&["disk", "twin", "b", "--remove"]);
    assert!(said.code == 0 && said.err.contains("twin is deprecated: use migration-socket"), "{}", said.err);
    assert!(daemon.disk("b")["migration_socket"].is_null());
}

/// By a shell, as the guide says it.
#[test]
fn qemu_arguments_survive_a_substitution() {
    let daemon = TestDaemon::open(
        "[[switch]]\nname = \"lan\"\n[[pci]]\nname = \"soft\"\nemulate = \"rtl8139\"\nswitch = \"lan\"\n\
         [[disk]]\nname = \"odd\"\nmemory = \"1M\"\nsocket = \"o dd.sock\"\n",
    );
    let socket = daemon.path("control.sock").display().to_string();
    let ioplane = format!("{} --socket {socket} qemu-args", env!("CARGO_BIN_EXE_ioplane"));
    let through = |script: String| -> Vec<String> {
        let said = Command::new("sh").args(["-c", &script]).output().unwrap();
        String::from_utf8(said.stdout).unwrap().lines().map(str::to_owned).collect()
    };
    let wanted = |name: &str| -> Vec<String> {
        let report = daemon.json(&["qemu-args", name, "--qemu-version", "10.1"]);
        report["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap().to_owned()).collect()
    };
    let words = through(format!("printf '%s\\n' $({ioplane} soft --qemu-version 10.1)"));
    assert_eq!(words, wanted("soft"));
    let refused = daemon.refused(&["qemu-args", "odd", "--qemu-version", "10.1"]);
    assert!(refused.contains("o dd.sock") && refused.contains("--quoted"), "{refused}");
    let words = through(format!("eval \"printf '%s\\n' $({ioplane} odd --qemu-version 10.1 --quoted)\""));
    assert_eq!(words, wanted("odd"));
}
