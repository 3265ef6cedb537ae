//! `ioplane move vm` of a VM with an emulated NIC, with two QEMUs that this test plays: their monitors, and the clients of both daemons' functions.

mod daemon;

use daemon::moving::{
    BAR1, BASE, CONFIG_SPACE, LATCH, SET, World, changes, function, is_brought_to_its_end, lock,
};
use serde_json::{Value, json};

#[test]
fn a_nic_goes_along() {
    let world = World::new();
    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("nic0, emulated: ") && said.out.contains("bytes of state"), "{}", said.out);
    let mut far = world.far();
    // As the guest had set it up, with the wired interrupt on.
    assert_eq!((far.state, far.command(), far.latch), ("running", SET, LATCH));
    let bar = far.client.read(CONFIG_SPACE, BAR1, 4).unwrap();
    assert_eq!(bar, BASE.to_le_bytes());
    let place = |asked: &[String], words: &str| {
        asked
            .iter()
            .position(|asked| asked.starts_with(words))
            .unwrap_or_else(|| panic!("{words} in {asked:?}"))
    };
    let near = world.near();
    let order =
        ["migrate-set-capabilities", "blockdev-del", "migrate", "o/h 0xcfc 0x407", "migrate-continue"];
    let places = order.map(|words| {
        near.asked.iter().rposition(|asked| asked == words).unwrap_or_else(|| panic!("{words}"))
    });
    assert!(places.is_sorted(), "{:?}", near.asked);
    // BARs before the command, which is last.
    let command = place(&far.asked, "o/h 0xcfc 0x7");
    assert!(
        place(&far.asked, "stop") < place(&far.asked, &format!("o/w 0xcfc {BASE:#x}")),
        "{:?}",
        far.asked
    );
    assert!(
        place(&far.asked, &format!("o/w 0xcfc {BASE:#x}")) < command && command < place(&far.asked, "cont")
    );
    drop((near, far));
    assert_eq!(function(&world.here)["stage"], "running");
    let mut near = world.near();
    assert_eq!(near.command() & SET, 0, "the one here was reset");
    assert_eq!(near.state, "postmigrate");
}

#[test]
fn whatever_the_monitors_refuse_the_guest_goes_on_with_its_nic() {
    let world = World::new();
    // How many commands there are, of one that goes well; on a world of its own.
    let (near, far) = {
        let other = World::new();
        assert_eq!(other.moves([None, None]).code, 0);
        (other.near().asked.len(), other.far().asked.len())
    };
    assert!(near > 20 && far > 15, "{near} {far}");
    for at in 0..near {
        let said = world.moves([Some(at), None]);
        let what = world.near().asked[at].clone();
        world.is_as_before(&said, &format!("{at}, {what} here"));
        world.again();
    }
    // The last is `cont`: then it is there.
    for breaks in [false, true] {
        world.far().breaks = breaks;
        for at in 0..far - 1 {
            let said = world.moves([None, Some(at)]);
            let what = world.far().asked[at].clone();
            world.is_as_before(&said, &format!("{at}, {what} there, breaks: {breaks}"));
            world.again();
        }
    }
    let said = world.moves([None, Some(far - 1)]);
    assert!(
        said.code != 0
            && said.err.contains("has moved")
            && said.err.contains("say `cont` by the monitor there"),
        "{}",
        said.err
    );
    assert_eq!(world.near().state, "postmigrate");
}

#[test]
fn a_guest_that_runs_by_itself_after_a_failure_is_stopped_before_anything_is_put_back() {
    let world = World::new();
    world.near().fails = true;
    let said = world.moves([None, None]);
    world.is_as_before(&said, "it failed at its end");
    assert!(
        said.err.contains("QEMU has given it up") && said.err.contains("it runs here as before"),
        "{}",
        said.err
    );
    let asked = world.near().asked.clone();
    let last = |words: &str| {
        asked.iter().rposition(|asked| asked == words).unwrap_or_else(|| panic!("{words} in {asked:?}"))
    };
    assert!(last("stop") < last("o/h 0xcfc 0x7") && last("o/h 0xcfc 0x7") < last("cont"), "{asked:?}");
}

#[test]
fn a_guest_that_is_paused_meanwhile_stays_paused_there() {
    let world = World::new();
    world.near().state = "paused";
    let said = world.moves([None, None]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!(world.far().state, "paused");
    assert!(!world.far().asked.iter().any(|asked| asked == "cont"));
}

#[test]
fn what_cannot_go_along_is_found_before_anything_is_done() {
    let world = World::new();
    let refused = |words: &str| {
        let said = world.moves([None, None]);
        assert!(said.code != 0 && said.err.contains(words), "{}", said.err);
        let touched = ["blockdev-del", "stop", "migrate"];
        let asked = [world.near().asked.clone(), world.far().asked.clone()].concat();
        assert!(!asked.iter().any(|asked| touched.contains(&asked.as_str())), "{asked:?}");
    };
    let args = world.args();
    let without: Vec<&str> = args[..7].iter().map(String::as_str).collect();
    let said = world.here.refused(&without);
    assert!(said.contains("give --there SOCKET") && said.contains("--qmp-there SOCKET"), "{said}");

    let own = ["--qmp-there", "--there"].map(|option| args.iter().position(|arg| arg == option).unwrap() + 1);
    let mut mine = args.clone();
    mine[own[1]] = world.here.path("control.sock").display().to_string();
    let mine: Vec<&str> = mine.iter().map(String::as_str).collect();
    assert!(world.here.refused(&mine).contains("leads to this host's own daemon"));

    world.far().state = "running";
    refused("does not wait for a guest: its VM is running");
    world.far().state = "inmigrate";
    world.far().version = 10;
    refused("the QEMU here is 11.1, and the one there is 10.1");
    world.far().version = 11;
    let own = std::mem::replace(&mut world.far().name, "mail".into());
    refused("is that of VM mail");
    world.far().name = own;
    for host in 0..2 {
        for capability in ["postcopy-ram", "x-colo", "background-snapshot", "mapped-ram", "x-ignore-shared"] {
            lock(&world.qemus[host]).capability = Some(capability);
            refused(&format!("is set to migrate with {capability}"));
            lock(&world.qemus[host]).capability = None;
        }
        for mode in ["cpr-reboot", "cpr-transfer"] {
            lock(&world.qemus[host]).mode = mode;
            refused(&format!("is set to migrate in mode {mode}"));
            lock(&world.qemus[host]).mode = "normal";
        }
    }
    // Held; another one there; another address; none.
    assert_eq!(world.there.cli(&["pci", "quiesce", "nic0"]).code, 0);
    refused("the other host: PCI function nic0 is held");
    assert_eq!(world.there.cli(&["pci", "resume", "nic0"]).code, 0);
    let replace = |args: &[&str]| {
        assert_eq!(world.there.cli(&["pci", "remove", "nic0", "--force"]).code, 0);
        let add = ["pci", "add", "nic0", "--switch", "lan"];
        assert_eq!(world.there.cli(&[&add[..], args].concat()).code, 0);
    };
    replace(&["--emulate", "ne2000", "--mac", "02:00:00:00:00:0a"]);
    refused("is emulated rtl8139 10ec:8139 here, and emulated ne2000 10ec:8029 on the other host");
    replace(&["--emulate", "rtl8139", "--mac", "02:00:00:00:00:0b"]);
    refused("has another address");
    replace(&["--emulate", "rtl8139", "--mac", "02:00:00:00:00:0a"]);
    refused("no QEMU of the other host uses PCI function nic0 yet");
    assert_eq!(world.there.cli(&["pci", "remove", "nic0"]).code, 0);
    refused("the other host has no PCI function nic0");
}

#[test]
fn a_move_that_is_killed_at_any_command_comes_to_its_end_by_another_one() {
    let mut world = World::new();
    let asked = {
        let other = World::new();
        assert_eq!(other.moves([None, None]).code, 0);
        [other.near().asked.clone(), other.far().asked.clone()]
    };
    let mut moved = 0;
    for (host, asked) in asked.iter().enumerate() {
        for (at, command) in asked.iter().enumerate() {
            for done in [false, true] {
                if done && !changes(command) {
                    continue;
                }
                let mut kills = [None, None];
                kills[host] = Some((at, done));
                world.move_is_killed(kills, None);
                let what = format!("{at}, {command} {}, done: {done}", ["here", "there"][host]);
                if is_brought_to_its_end(&world, &what) {
                    moved += 1;
                    assert_eq!(command, "cont", "{what}: nothing was given away before that");
                    world = World::new();
                } else {
                    world.again();
                }
            }
        }
    }
    assert_eq!(moved, 2, "before `cont` there and after it");
}

#[test]
fn a_move_that_is_killed_between_two_steps_comes_to_its_end_by_another_one() {
    let mut world = World::new();
    let here = ["noted", "logged", "commands", "rested", "taken", "sent", "revived", "replayed"];
    for moment in here {
        world.move_is_killed([None, None], Some(moment));
        assert!(!is_brought_to_its_end(&world, moment), "{moment}");
        world.again();
    }
    // One line on the daemon's disk is the difference.
    for moment in ["gone", "left", "continued"] {
        world.move_is_killed([None, None], Some(moment));
        if moment == "gone" {
            assert_eq!(function(&world.here)["step"], "at_rest");
            let refused = world.here.refused(&["pci", "resume", "nic0"]);
            assert!(refused.contains("does not go on here"), "{refused}");
        }
        assert!(is_brought_to_its_end(&world, moment), "{moment}");
        world = World::new();
    }
}

#[test]
fn a_recovery_that_is_killed_is_done_again() {
    let world = World::new();
    let name = world.near().name.clone();
    let args = ["move", "recover", &name];
    world.move_is_killed([None, None], Some("revived"));
    world.far().asked.clear();
    world.near().asked.clear();
    assert_eq!(world.recovers().code, 0);
    let asked = [world.near().asked.clone(), world.far().asked.clone()];
    assert!(asked[0].len() > 10 && asked[1].iter().any(|asked| asked == "quit"), "{asked:?}");
    for (host, asked) in asked.iter().enumerate() {
        for (at, command) in asked.iter().enumerate() {
            world.again();
            world.move_is_killed([None, None], Some("revived"));
            let mut kills = [None, None];
            kills[host] = Some((at, true));
            world.is_killed(&args, kills, None);
            let what = format!("{at}, {command} {}", ["here", "there"][host]);
            assert!(!is_brought_to_its_end(&world, &what));
        }
    }
}

/// As that of a QEMU is which is held back until functions whose driver cooperates are at rest.
#[test]
fn a_downtime_limit_that_was_lowered_is_put_back() {
    let world = World::new();
    let path = format!("/v1/moves/{}", world.near().name);
    for lowered in [true, false] {
        world.move_is_killed([None, None], Some("logged"));
        let mut note = world.here.http("GET", &path, "").1;
        assert_eq!(note["downtime_limit"], Value::Null);
        let limit = if lowered { 1 } else { 500 };
        if lowered {
            note["downtime_limit"] = json!(700);
            assert_eq!(world.here.http("PUT", &path, &note.to_string()).0, 200);
        }
        world.near().limit = limit;
        assert!(!is_brought_to_its_end(&world, "held back"));
        // One that the move has not touched is left alone.
        assert_eq!(world.near().limit, if lowered { 700 } else { 500 });
        world.again();
    }
}

#[test]
fn what_is_written_down_outlives_the_daemon() {
    let mut world = World::new();
    world.move_is_killed([None, None], Some("gone"));
    world.here.kill9();
    world.here.start();
    // Its VMM does not come back to the function, and whoever has the guest is no question.
    assert_eq!(function(&world.here)["step"], "lost");
    let said = world.recovers();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.contains("is on the other host, and runs"), "{}", said.out);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));

    let mut world = World::new();
    world.move_is_killed([None, None], Some("taken"));
    assert_eq!(function(&world.here)["step"], "at_rest");
    world.here.kill9();
    world.here.start();
    assert_eq!(function(&world.here)["step"], "lost");
    // It is this host's, with a function that is gone.
    let said = world.recovers();
    assert!(said.err.contains("nic0"), "{}{}", said.out, said.err);
    assert_eq!((world.near().state, world.far().state), ("running", "inmigrate"));
}

#[test]
fn a_guest_that_runs_there_is_not_let_run_here() {
    let world = World::new();
    world.move_is_killed([None, None], Some("sent"));
    // Somebody says so by hand, or whoever has the other host.
    world.far().state = "running";
    let said = world.recovers();
    assert!(said.code != 0 && said.err.contains("runs on the other host"), "{}", said.err);
    assert_eq!(world.near().state, "postmigrate");
    // Nobody can be asked there.
    world.far().state = "paused";
    let name = world.near().name.clone();
    let nowhere = world.folder.path().join("nowhere").display().to_string();
    let args = ["move", "recover", &name, "--qmp-there", &nowhere];
    let refused = world.here.refused(&args);
    assert!(refused.contains("say --ended-there"), "{refused}");
    assert_eq!(world.near().state, "postmigrate");
    // The next move waits for that.
    let said = world.moves([None, None]);
    assert!(said.code != 0, "{}", said.out);
    world.far().state = "shutdown";
    let said = world.here.cli(&[&args[..], &["--ended-there"]].concat());
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(!world.has_one_owner("ended there"));
}
