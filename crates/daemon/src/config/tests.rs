//! Every way to be wrong, with its exact line, reason and remedy.

use std::path::Path;

use ioplane_api::spec::{DirectWord, EngineWord};

use super::*;
use crate::lower::limits;

/// What is said of `text`, without the file's name.
fn said(folder: &Path, text: &str) -> Vec<(usize, String, String)> {
    let file = folder.join("ioplane.toml");
    let checked = Config::parse(&file, text).and_then(|config| config.images(|_| true).map(|()| config));
    let problems = match checked {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(problems) => problems,
    };
    assert_eq!(problems.file, file);
    problems.list.into_iter().map(|p| (p.line, p.reason, p.remedy)).collect()
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [("a.img", 1 << 20), ("b.img", 1 << 20), ("odd.img", 1000), ("empty.img", 0)] {
        std::fs::File::create(folder.path().join(name)).unwrap().set_len(bytes).unwrap();
    }
    std::os::unix::fs::symlink("a.img", folder.path().join("link.img")).unwrap();
    folder
}

#[test]
fn a_whole_configuration_is_read() {
    let folder = folder();
    let text = r#"
        [daemon]
        socket = "/run/x/control.sock"
        run_dir = "/run/x"
        metrics = "[::1]:9750"
        [[core]]
        cpu = 0
        notify = "notified"
        spin_us = 1000
        yield_policy = "nice"
        [[core]]
        id = 7
        [[disk]]
        name = "root"
        path = "a.img"
        queues = 2
        queue_size = 256
        block_size = 4096
        direct = "off"
        engine = "threads"
        core = 7
        serial = "S1"
        [[disk]]
        name = "scratch"
        memory = "64M"
        read_only = false
        [[switch]]
        name = "lan"
        [[pci]]
        name = "card"
        host = "0000:00:05.0"
        on_fault = "dma=error"
        [[pci]]
        name = "soft"
        emulate = "ne2000"
        switch = "lan"
        guest_memory = "any"
    "#;
    let config = Config::parse(&folder.path().join("c.toml"), text).unwrap();
    config.images(|_| true).unwrap();
    assert_eq!(config.cores.iter().map(|(core, _)| core.id).collect::<Vec<_>>(), [0, 7]);
    assert_eq!(config.cores[0].0.spin_us, 1000);
    let root = config.disk("root").unwrap();
    let BackingSpec::File { path, direct, engine, format: None } = &root.backing else { panic!("{root:?}") };
    assert_eq!(*path, folder.path().join("a.img"), "relative to the configuration");
    assert_eq!((*direct, *engine), (DirectWord::Off, EngineWord::Threads));
    assert_eq!((root.queues, root.queue_size, root.core), (2, 256, Some(7)));
    let scratch = config.disk("scratch").unwrap();
    assert_eq!(scratch.backing, BackingSpec::Memory { bytes: 64 << 20 });
    assert_eq!((scratch.serial.as_str(), scratch.queue_size), ("scratch", 128));
    let functions: Vec<_> = config.functions.iter().map(|(f, _)| (f.name.as_str(), f.mode())).collect();
    assert_eq!(functions, [("card", "virtual"), ("soft", "emulated")]);
    let files = |n: usize| limits(&config.functions[n].0).files;
    assert_eq!((files(0), files(1)), (ioplane_memory::Files::Ram, ioplane_memory::Files::Any));
}

#[test]
fn nothing_but_a_core_is_a_configuration() {
    let config = Config::parse(Path::new("/x.toml"), "").unwrap();
    assert_eq!(config.cores.len(), 1);
    assert!(config.disks.is_empty());
}

/// One wrong text, and the one line, reason and remedy that it must get.
#[test]
fn each_problem_has_its_line_reason_and_remedy() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (a, odd, missing) = (at("a.img"), at("odd.img"), at("missing.img"));
    let whole = folder.path().display().to_string();
    let cpus = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let cpus = format!("this host has {}; leave cpu out to run unpinned", cpus.trim());
    let toml = "write TOML: `key = value` lines under [daemon], [directory], [pool], [[core]], [[group]], [[disk]], [[switch]], [[nic]], [[pci]] and [[export]]";
    let name = "use 1 to 40 letters, digits, '-', '_' and '.', beginning with a letter or a digit";
    let metrics =
        "write metrics = \"127.0.0.1:9750\"; to let others ask, put a proxy that knows them before it";
    let disk = |rest: &str| format!("\n[[disk]]\nname = \"d\"\n{rest}\n");
    let memory = |rest: &str| disk(&format!("memory = \"1M\"\n{rest}"));
    let cases: Vec<(String, usize, String, String)> = [
        (
            "[daemon]\nsocket = \n".into(),
            2,
            "string values must be quoted, expected literal string".into(),
            toml.into(),
        ),
        (
            "x = 1\n".into(),
            1,
            "\"x\" is no part of a configuration".into(),
            "there are [daemon], [directory], [pool], [[core]], [[group]], [[disk]], [[switch]], [[nic]], [[pci]] and [[export]]"
                .into(),
        ),
        (
            "\n\n[[disks]]\nname = \"a\"".into(),
            3,
            "\"disks\" is no part of a configuration".into(),
            "write [[disk]]".into(),
        ),
        (
            "[disk]\nname = \"a\"".into(),
            1,
            "[disk] is one table, and there may be several".into(),
            "write [[disk]]".into(),
        ),
        ("disk = [1]".into(), 1, "disk is a list of values".into(), "write [[disk]]".into()),
        ("daemon = 3".into(), 1, "daemon is not one table".into(), "write [daemon] once".into()),
        (
            "[daemon]\nmetrics = \"0.0.0.0:9750\"".into(),
            2,
            "metrics = \"0.0.0.0:9750\": 0.0.0.0 is not a loopback address".into(),
            metrics.into(),
        ),
        (
            "[daemon]\nmetrics = \"localhost\"".into(),
            2,
            "metrics = \"localhost\" is no ADDRESS:PORT".into(),
            metrics.into(),
        ),
        (
            "[daemon]\nmetricks = \"x\"".into(),
            2,
            "[daemon] has no \"metricks\"".into(),
            "write metrics, or leave it out".into(),
        ),
        ("[[core]]\ncpu = 4095".into(), 2, "there is no CPU 4095".into(), cpus),
        (
            "[[core]]\nnotify = \"fast\"".into(),
            2,
            "notify = \"fast\"".into(),
            "write one of \"polled\", \"adaptive\", \"notified\"".into(),
        ),
        ("[[core]]\nspin_us = -1".into(), 2, "spin_us = -1".into(), "write a number from 0 on".into()),
        ("[[core]]\nid = 900".into(), 2, "id = 900".into(), "number the cores from 0 to 255".into()),
        (
            "[[core]]\nid = 3\n\n[[core]]\nid = 3".into(),
            5,
            "core 3 is there already, in line 1".into(),
            "give every core a number of its own".into(),
        ),
        (
            "\n[[disk]]\nmemory = \"1M\"".into(),
            2,
            "a disk without a name".into(),
            "write name = \"NAME\"".into(),
        ),
        (
            "[[disk]]\nname = \"../x\"\nmemory = \"1M\"".into(),
            2,
            "'/' in the name \"../x\"".into(),
            name.into(),
        ),
        (
            "[[disk]]\nname = \".x\"\nmemory = \"1M\"".into(),
            2,
            "the name \".x\" begins with a sign".into(),
            name.into(),
        ),
        (disk(""), 2, "neither path nor memory nor remote".into(), "give path = \"IMAGE\", memory = \"64M\" or remote = \"nbd://HOST/EXPORT\"".into()),
        (disk("path = \"a.img\"\nmemory = 512"), 5, "both path and memory".into(), "give one of them".into()),
        (
            disk("memory = \"64X\""),
            4,
            "`64X` is not a size: write bytes, or a number with K, M, G or T (powers of 1024), as in 64M"
                .into(),
            "write memory = \"64M\"".into(),
        ),
        (
            disk("memory = 1000"),
            4,
            "1000 bytes is no size for a disk with blocks of 512".into(),
            "give a multiple of the block size, and not zero".into(),
        ),
        (
            disk("path = \"missing.img\""),
            4,
            format!("there is no image {missing}"),
            format!("make it: truncate -s 10G {missing}"),
        ),
        (
            disk("path = \"odd.img\""),
            4,
            format!("{odd} has 1000 bytes, which is no multiple of 512, or zero"),
            format!("if nobody uses it: truncate -s 1024 {odd}"),
        ),
        (
            disk("path = \".\""),
            4,
            format!("{whole}/. is a directory"),
            "name a file or a block device".into(),
        ),
        (
            memory("read_only = \"yes\""),
            5,
            "read_only is a string".into(),
            "write read_only = true or read_only = false, without quotes".into(),
        ),
        (memory("queues = 0"), 5, "queues = 0".into(), "give 1 to 64".into()),
        (
            memory("queue_size = 100"),
            5,
            "queue_size = 100".into(),
            "give a power of two from 2 to 1024".into(),
        ),
        (memory("block_size = 100"), 5, "block_size = 100".into(), "give 512, 1024, 2048 or 4096".into()),
        (
            memory("serial = \"123456789012345678901\""),
            5,
            "\"123456789012345678901\" is no serial number".into(),
            "give at most 20 characters of ASCII without spaces".into(),
        ),
        (
            memory("direct = \"on\""),
            5,
            "direct says nothing about a disk in memory".into(),
            "leave it out, or give path".into(),
        ),
        (
            memory("core = 4"),
            5,
            "there is no core 4".into(),
            "add a [[core]] with id = 4, or name one of 0".into(),
        ),
        (
            memory("") + &memory(""),
            8,
            "disk d is there already, in line 2".into(),
            "give every disk a name of its own".into(),
        ),
        (
            disk("path = \"a.img\"") + "[[disk]]\nname = \"e\"\npath = \"link.img\"",
            7,
            format!("{} is the image of disk d already, in line 4", at("link.img")),
            "give each its own copy, or make both read_only; a disk uses an export of its host by remote".into(),
        ),
    ]
    .into();
    let network = network_cases().into_iter().chain(function_cases());
    assert!(!a.is_empty());
    for (text, line, reason, remedy) in cases.into_iter().chain(network) {
        assert_eq!(said(folder.path(), &text), [(line, reason, remedy)], "{text}");
    }
}

fn function_cases() -> Vec<(String, usize, String, String)> {
    let nic = "[[pci]]\nname = \"f\"\nemulate = \"rtl8139\"\n";
    let host = "[[pci]]\nname = \"h\"\nhost = \"00:05.0\"\n";
    let lan = "[[switch]]\nname = \"lan\"\nuplink = \"tap7\"\n";
    let cases: &[(String, usize, &str, &str)] = &[
        ("[[pci]]\n".into(), 1, "a PCI function without a name", "write name = \"NAME\""),
        (
            "[[pci]]\nname = \"h\"\n".into(),
            1,
            "neither host nor emulate",
            "give host = \"0000:00:05.0\" (see `ioplane pci list`) or emulate = \"rtl8139\"",
        ),
        (
            nic.into(),
            1,
            "an emulated NIC with neither switch nor tap",
            "give switch = \"NAME\" or tap = \"tap0\"",
        ),
        (
            host.replace("00:05.0", "5"),
            3,
            "host: \"5\" is not the address of a PCI function",
            "write it as 0000:00:05.0 or 00:05.0 (`ioplane pci list` shows them)",
        ),
        (
            format!("{host}mode = \"shared\"\n"),
            4,
            "mode = \"shared\"",
            "write one of \"virtual\", \"passthrough\", \"migratable\", \"cooperating\"",
        ),
        (
            format!("{host}on_fault = \"panic\"\n"),
            4,
            "on_fault: `panic` says nothing about faults",
            "write stop, ignore or error, or each by its cause, as in dma=stop,register=ignore",
        ),
        (
            format!("{host}\nswitch = \"lan\"\n"),
            5,
            "switch says nothing about a function of the host",
            "leave it out, or give emulate in place of host",
        ),
        (
            format!("{host}mode = \"passthrough\"\non_fault = \"stop\"\n"),
            5,
            "on_fault says nothing about a function that is passed through as it is",
            "leave it out, or give mode = \"virtual\"",
        ),
        (
            format!("{nic}switch = \"lan\"\n"),
            4,
            "there is no switch lan",
            "add a [[switch]] with name = \"lan\"",
        ),
        (
            format!("{lan}{nic}tap = \"tap7\"\n"),
            7,
            "tap7 is the uplink of switch lan, in line 3",
            "write switch = \"lan\" in place of tap",
        ),
        (
            format!("{host}{}", host.replace("\"h\"", "\"g\"")),
            6,
            "0000:00:05.0 is that of PCI function h, in line 3",
            "a function of the host can be handed to one guest at a time",
        ),
        (
            format!("{host}[[disk]]\nname = \"h\"\nmemory = \"1M\"\n"),
            2,
            "h is the name of a disk, in line 4",
            "give disks, NICs and PCI functions names of their own",
        ),
        (format!("{host}hots = 3\n"), 4, "[[pci]] has no \"hots\"", "write host, or leave it out"),
        (
            format!("{host}mtu = 3\n"),
            4,
            "[[pci]] has no \"mtu\"",
            "it goes into [[nic]]: [[pci]] has name, host, mode, on_fault, force, unsafe_interrupts, adopt, mapped, uplink, emulate, switch, tap, \
             mac, socket, guest_memory, pinned_memory",
        ),
    ];
    cases
        .iter()
        .map(|(text, line, why, todo)| (text.clone(), *line, (*why).to_owned(), (*todo).to_owned()))
        .collect()
}

fn network_cases() -> Vec<(String, usize, String, String)> {
    let lan = "[[switch]]\nname = \"lan\"\n[[nic]]\nname = \"n\"\nswitch = \"lan\"\n";
    let mac = "six bytes as in 52:54:00:12:34:56, the first of them even";
    let vlan = "write all, or a number from 1 to 4094, or trunk:10,20";
    let tap = "give the name of a TAP interface, such as tap0: at most 15 characters without '/'";
    let second = "[[nic]]\nname = \"m\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:01\"\n";
    let cases: &[(String, usize, &str, String)] = &[
        ("[[switch]]\n".into(), 1, "a switch without a name", "write name = \"NAME\"".into()),
        ("[[nic]]\nswitch = \"x\"\n".into(), 1, "a nic without a name", "write name = \"NAME\"".into()),
        ("[[nic]]\nname = \"n\"\n".into(), 1, "a NIC without a switch", "give switch = \"NAME\"".into()),
        (
            lan.replace("switch = \"lan\"", "switch = \"la\""),
            5,
            "there is no switch la",
            "write lan, or add a [[switch]] with name = \"la\"".into(),
        ),
        (
            "[[nic]]\nname = \"n\"\nswitch = \"lan\"\n".into(),
            3,
            "there is no switch lan",
            "add a [[switch]] with name = \"lan\"".into(),
        ),
        (
            "[[switch]]\nname = \"lan\"\nuplink = \"a/b\"\n".into(),
            3,
            "\"a/b\" is no name of an interface",
            tap.into(),
        ),
        (
            "[[switch]]\nname = \"lan\"\n[[switch]]\nname = \"lan\"\n".into(),
            4,
            "switch lan is there already, in line 1",
            "give every switch a name of its own".into(),
        ),
        (
            format!("{lan}mac = \"01:00:00:00:00:01\"\n"),
            6,
            "mac: `01:00:00:00:00:01` is not a unicast MAC address",
            format!("write {mac}"),
        ),
        (format!("{lan}vlan = 4095\n"), 6, "vlan = 4095", vlan.into()),
        (format!("{lan}vlan = \"10,20\"\n"), 6, "vlan: `10,20` says no VLANs", vlan.into()),
        (format!("{lan}pairs = 9\n"), 6, "pairs = 9", "give 1 to 8".into()),
        (format!("{lan}mtu = 60\n"), 6, "mtu = 60", "give 68 to 65517".into()),
        (
            format!("{lan}queue_size = 300\n"),
            6,
            "queue_size = 300",
            "give a power of two from 64 to 1024".into(),
        ),
        (format!("{lan}link = \"on\"\n"), 6, "link = \"on\"", "write one of \"up\", \"down\"".into()),
        (
            format!("{lan}core = 3\n"),
            6,
            "there is no core 3",
            "add a [[core]] with id = 3, or name one of 0".into(),
        ),
        (format!("{lan}macc = \"x\"\n"), 6, "[[nic]] has no \"macc\"", "write mac, or leave it out".into()),
        (
            format!("{lan}mac = \"02:00:00:00:00:01\"\n{second}"),
            10,
            "02:00:00:00:00:01 is the address of nic n already, in line 6",
            "give every NIC of a switch its own address, or leave it out".into(),
        ),
        (
            format!("[[disk]]\nname = \"n\"\nmemory = \"1M\"\n{lan}"),
            7,
            "n is the name of a disk, in line 1",
            "give disks, NICs and PCI functions names of their own".into(),
        ),
        (
            format!(
                "[[disk]]\nname = \"d\"\nmemory = \"1M\"\nmigration_socket = \"/run/m.sock\"\n{lan}socket = \"/run/m.sock\"\n"
            ),
            10,
            "the migration_socket of disk d, in line 4",
            "give every NIC a socket of its own, or leave it out".into(),
        ),
        (
            "[daemon]\nsocket_group = \"nobody-here\"\n".into(),
            2,
            "there is no group \"nobody-here\"",
            "name a group that `getent group` knows, such as kvm or libvirt-qemu, or give its number".into(),
        ),
        (
            "[daemon]\nsocket_mode = \"0888\"\n".into(),
            2,
            "socket_mode = \"0888\" is no mode for a socket",
            "write three octal digits, the first of them 6 or 7, as in \"0660\"".into(),
        ),
    ];
    cases
        .iter()
        .map(|(text, line, why, todo)| (text.clone(), *line, (*why).to_owned(), todo.clone()))
        .collect()
}

#[test]
fn all_problems_are_said_at_once_and_in_order() {
    let folder = folder();
    let text =
        "[[disk]]\nname = \"a b\"\nmemory = 3\nsise = 1\n[[core]]\ncpu = true\n[daemon]\nmetrics = 5\n";
    let lines: Vec<usize> = said(folder.path(), text).into_iter().map(|(line, ..)| line).collect();
    assert_eq!(lines, [2, 3, 4, 6, 8]);
    let syntax = said(folder.path(), "[[disk]\nname = \nqueues = =\n");
    assert!(syntax.len() > 1, "{syntax:?}");
}

#[test]
fn shared_images_must_be_read_only() {
    let folder = folder();
    let twice = |read_only: bool| {
        let disk = |name| format!("[[disk]]\nname = \"{name}\"\npath = \"a.img\"\nread_only = {read_only}\n");
        disk("x") + &disk("y")
    };
    let file = folder.path().join("ioplane.toml");
    assert!(Config::parse(&file, &twice(true)).is_ok());
    assert!(Config::parse(&file, &twice(false)).is_err());
}

#[test]
fn problems_are_shown_with_file_and_line() {
    let problems = Config::parse(Path::new("/etc/ioplane.toml"), "\n[[core]]\nid = 999").unwrap_err();
    assert_eq!(problems.to_string(), "/etc/ioplane.toml:3: id = 999\n  hint: number the cores from 0 to 255");
    let missing = Config::read(Path::new("/nowhere/ioplane.toml")).unwrap_err();
    assert!(
        missing.to_string().starts_with("/nowhere/ioplane.toml: cannot be read: No such file"),
        "{missing}"
    );
}
