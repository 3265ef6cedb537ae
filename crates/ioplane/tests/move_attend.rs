//! `ioplane move attend`: a VM with an emulated NIC that somebody else migrates, with two QEMUs that this test plays, as in `move_functions`.

mod daemon;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use daemon::Said;
use daemon::identities::member;
use daemon::moving::{LATCH, Library, SET, Stall, World, function};
use ioplane_vcpu::kvm::VcpuStop;
use serde_json::{Value, json};

/// The library is the process's, and so are all QEMUs of this test.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn args(world: &World) -> Vec<String> {
    let args = world.args();
    let place = args.iter().position(|arg| arg == "--to").unwrap();
    let mut args = [&args[..place], &args[place + 2..]].concat();
    args[1] = "attend".into();
    args
}

/// Begins to attend, and waits until somebody may migrate it.
fn attends(world: &World) -> JoinHandle<Said> {
    let args = args(world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    world.near().asked.clear();
    world.far().asked.clear();
    let run = world.here.later(&args);
    let said = std::thread::spawn(run);
    world.here.until(|| {
        let near = world.near();
        let logged = near.asked.windows(2).any(|two| two == ["query-migrate", "query-status"]);
        said.is_finished() || (!near.guarded && near.pauses && logged)
    });
    said
}

/// Somebody types `migrate`.
fn migrates(world: &World) {
    world.near().migration = Some("setup");
}

fn goes(world: &World) -> Said {
    let attended = attends(world);
    migrates(world);
    attended.join().unwrap()
}

#[test]
fn a_nic_goes_along_when_somebody_else_migrates_its_vm() {
    let _alone = alone();
    let world = World::new();
    let said = goes(&world);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.err.contains("may be migrated now"), "{}", said.err);
    // Nobody holds vCPUs of a QEMU without the library, and that is said.
    assert!(said.err.contains("has to leave `cont` there to this command"), "{}", said.err);
    assert!(said.out.contains("nic0, emulated: "), "{}", said.out);
    assert!(!world.near().asked.iter().any(|asked| asked == "migrate"), "somebody else did");
    assert!(world.has_one_owner("attended"));
}

#[test]
fn a_nic_goes_along_to_a_host_that_is_known_by_its_certificate() {
    let _alone = alone();
    let world = World::over_tls(|port| port);
    assert_eq!(world.is_expected(&[]).code, 0);
    let said = goes(&world);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(world.has_one_owner("by certificates"));
}

#[test]
fn a_migration_that_is_given_up_leaves_all_as_it_was() {
    let _alone = alone();
    let world = World::new();
    let attended = attends(&world);
    {
        let mut near = world.near();
        near.migration = Some("cancelled");
        assert!(near.pauses);
    }
    // One that had ended before nobody saw it begin is none: the next one goes.
    migrates(&world);
    let said = attended.join().unwrap();
    assert_eq!(said.code, 0, "{}", said.err);

    let world = World::new();
    world.near().silent = Some(std::time::Instant::now() + std::time::Duration::from_secs(60));
    let attended = attends(&world);
    migrates(&world);
    world.here.until(|| world.near().migration == Some("active"));
    world.near().migration = Some("cancelled");
    let said = attended.join().unwrap();
    world.is_as_before(&said, "cancelled");
    assert!(said.err.contains("did not move"), "{}", said.err);
    world.again();

    // At its end it fails, and QEMU has the guest run by itself.
    (world.near().silent, world.near().fails) = (None, true);
    world.is_as_before(&goes(&world), "failed");
}

#[test]
fn whoever_goes_on_too_early_is_told_so_and_the_guest_stays() {
    let _alone = alone();
    let world = World::new();
    world.near().hasty = true;
    let said = goes(&world);
    world.is_as_before(&said, "hasty");
    assert!(said.err.contains("somebody else has gone on with the switch-over"), "{}", said.err);
    assert!(world.far().asked.iter().any(|asked| asked == "quit"), "it has all of the guest");
}

#[test]
fn a_migration_by_which_no_function_goes_along_keeps_the_guest() {
    let _alone = alone();
    let world = World::new();
    let stays = |why: &str, set: fn(&World), unset: fn(&World)| {
        // QEMU takes such a setting until the migration begins.
        let attended = attends(&world);
        set(&world);
        migrates(&world);
        let said = attended.join().unwrap();
        assert!(said.err.contains(why), "{}", said.err);
        assert!(world.near().asked.iter().any(|asked| asked == "migrate_cancel"), "{why}");
        unset(&world);
        world.is_as_before(&said, why);
        world.again();
    };
    stays(
        "is set to migrate with postcopy-ram",
        |world| world.near().capability = Some("postcopy-ram"),
        |world| world.near().capability = None,
    );
    stays(
        "is set to migrate in mode cpr-transfer",
        |world| world.near().mode = "cpr-transfer",
        |world| world.near().mode = "normal",
    );
    assert_eq!(goes(&world).code, 0);
}

#[test]
fn a_guest_that_is_sent_to_another_qemu_stays() {
    let _alone = alone();
    let world = World::new();
    world.far().elsewhere = true;
    let said = goes(&world);
    world.is_as_before(&said, "elsewhere");
    assert!(said.err.contains("is sent somewhere else"), "{}", said.err);
    let near = world.near();
    assert!(near.asked.iter().any(|asked| asked == "migrate_cancel"), "nobody else is to have it");
    assert!(!near.asked.iter().any(|asked| asked == "migrate-continue"), "{:?}", near.asked);
    drop(near);

    // Nor does it run here once all of it is there.
    world.again();
    world.near().hasty = true;
    world.far().elsewhere = true;
    let attended = attends(&world);
    {
        let mut near = world.near();
        (near.migration, near.state) = (Some("completed"), "postmigrate");
    }
    let said = attended.join().unwrap();
    assert!(said.code != 0 && said.err.contains("has left without its PCI functions"), "{}", said.err);
    assert_eq!(world.near().state, "postmigrate");
}

#[test]
fn nobody_begins_and_it_is_ended() {
    let _alone = alone();
    let world = World::new();
    let args = args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = world.here.begin(&args, None);
    world.here.until(|| !world.near().guarded && world.near().pauses);
    world.here.signal_to(child.id().into(), "INT");
    assert!(!child.wait().unwrap().success());
    let near = world.near();
    assert!(near.guarded && !near.pauses && near.state == "running");
    drop(near);
    assert_eq!(function(&world.here)["stage"], "running");
    assert_eq!(world.far().state, "inmigrate");
}

#[test]
fn somebody_has_the_guest_run_there_before_its_functions_are_its() {
    let _alone = alone();
    let world = World::new();
    world.far().eager = true;
    // Nothing holds it there: it has no link there, and does not run here.
    let said = goes(&world);
    assert_ne!(said.code, 0, "{}", said.out);
    assert!(said.err.contains("has left without its PCI functions"), "{}", said.err);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));
    assert!(!world.far().asked.iter().any(|asked| asked == "quit"));

    let library = Library::new();
    let world = World::new();
    world.far().eager = true;
    let attended = attends(&world);
    assert!(library.says().held, "no vCPU there enters the guest");
    migrates(&world);
    let said = attended.join().unwrap();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(!library.says().held, "and now they may");
    assert!(!world.far().asked.iter().any(|asked| asked == "cont"), "it runs");
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));

    // The same by certificates: a guest that is held has not arrived, whatever its QEMU says.
    let world = World::over_tls(|port| port);
    assert_eq!(world.is_expected(&[]).code, 0);
    world.far().eager = true;
    let said = goes(&world);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));
    assert!(!library.says().held);

    // Ended before anybody began: they may, too.
    let world = World::new();
    let args = args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = world.here.begin(&args, None);
    world.here.until(|| library.says().held);
    world.here.signal_to(child.id().into(), "INT");
    assert!(!child.wait().unwrap().success());
    assert!(!library.says().held);
    // The attendance is killed: whoever brings the move to its end lets them, too.
    let mut child = world.here.begin(&args, None);
    world.here.until(|| library.says().held && world.near().pauses);
    world.here.signal_to(child.id().into(), "KILL");
    child.wait().unwrap();
    let said = world.recovers();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(!library.says().held && !world.has_one_owner("killed"));
    // Of a guest that runs nobody is held: a vCPU is inside.
    library.set_inside(1);
    let said = world.here.http("PUT", "/v1/pci/nic0/vcpus", "{\"held\": true}");
    assert_eq!(said.0, 409, "{}", said.1);
    assert!(said.1.to_string().contains("the guest of nic0 runs"), "{}", said.1);
    assert!(!library.says().held);
}

/// A world whose QEMU here waits for vCPUs that are kept. Whoever migrates it goes on at once, has the guest run there at once, and ends the QEMU here.
fn of_libvirt() -> (World, Arc<Library>) {
    migrated_by_libvirt(World::new())
}

fn migrated_by_libvirt(world: World) -> (World, Arc<Library>) {
    let library = Arc::new(Library::new());
    world.near().library = Arc::downgrade(&library);
    world.near().ends = true;
    world.far().eager = true;
    (world, library)
}

fn libvirt_args(world: &World) -> Vec<String> {
    args(world).into_iter().chain(["--libvirt".to_owned()]).collect()
}

/// Begins to attend in such a world, and waits until it may be migrated.
fn attends_libvirt(world: &World) -> JoinHandle<Said> {
    let args = libvirt_args(world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let said = std::thread::spawn(world.here.later(&args));
    let library = world.near().library.upgrade().unwrap();
    world.here.until(|| {
        said.is_finished() || (!world.near().guarded && matches!(library.says().stop, VcpuStop::Asked(4..)))
    });
    said
}

fn migrates_by_libvirt(world: &World) -> Said {
    let attended = attends_libvirt(world);
    migrates(world);
    attended.join().unwrap()
}

#[test]
fn a_nic_goes_along_when_nobody_waits_before_the_switch_over() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    // The QEMU there is started when somebody begins.
    let there = Absent::hide(&world);
    let attended = attends_libvirt(&world);
    assert!(world.far().asked.is_empty(), "{:?}", world.far().asked);
    migrates(&world);
    is_looked_for(&world);
    there.comes();
    is_gone_with_its_nic(&world, &library, &attended.join().unwrap());
}

/// The QEMU there, before it is started.
struct Absent {
    there: PathBuf,
    hidden: PathBuf,
}

impl Absent {
    fn hide(world: &World) -> Absent {
        let [there, hidden] = ["there", "hidden"].map(|name| world.folder.path().join(name));
        std::fs::rename(&there, &hidden).unwrap();
        Absent { there, hidden }
    }

    fn comes(&self) {
        std::fs::rename(&self.hidden, &self.there).unwrap();
    }
}

/// The attendance has seen that somebody has begun, and looks for the QEMU there.
fn is_looked_for(world: &World) {
    world.here.until(|| {
        let near = world.near();
        near.asked.iter().filter(|asked| *asked == "query-migrate-capabilities").count() == 2
    });
}

fn is_gone_with_its_nic(world: &World, library: &Library, said: &Said) {
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(
        said.out.contains("nic0, emulated: ") && !said.err.contains("could not be reset"),
        "{}",
        said.err
    );
    {
        let (mut near, mut far) = (world.near(), world.far());
        assert_eq!((near.state, near.command() & SET, near.misused), ("postmigrate", 0, false));
        // It was held there: whoever drives it has it run at once.
        assert_eq!((far.state, far.command(), far.latch), ("running", SET, LATCH));
    }
    assert_eq!(function(&world.there)["stage"], "running");
    let report = library.says();
    assert_eq!((report.held, report.stop, report.kept), (false, VcpuStop::Free, 0));
    let driven = |command: &str| {
        let asks = |asked: &[String]| asked.iter().any(|asked| asked == command);
        asks(&world.near().asked) || asks(&world.far().asked)
    };
    for command in ["migrate", "migrate-continue", "migrate-set-capabilities", "cont"] {
        assert!(!driven(command), "{command} is for whoever drives it");
    }
    assert!(world.near().asked.iter().any(|asked| asked.starts_with("o/")), "its wire was switched off");
}

#[test]
fn what_nobody_can_keep_is_refused_before_it_is_migrated() {
    let _alone = alone();
    let world = World::new();
    let args = libvirt_args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let said = world.here.cli(&args);
    world.is_as_before(&said, "without the library");
    assert!(said.err.contains("has no library of ioplane"), "{}", said.err);

    let library = Library::new();
    world.near().state = "paused";
    let said = world.here.cli(&args);
    assert!(said.code != 0 && said.err.contains("is paused"), "{}", said.err);
    world.near().state = "running";
    // Nobody waits: there is nothing to keep.
    let (code, said) = world.here.http("PUT", "/v1/pci/nic0/stop", "{\"stop\": \"keep\"}");
    assert!(code == 409 && said.to_string().contains("wants no vCPU back"), "{said}");
    assert_eq!(library.says().stop, VcpuStop::Free);

    let without: Vec<&str> = args.iter().copied().filter(|arg| *arg != "--qmp-there").collect();
    let there = world.folder.path().join("there").display().to_string();
    let without: Vec<&str> = without.into_iter().filter(|arg| *arg != there).collect();
    let said = world.here.cli(&without);
    assert!(said.code != 0 && said.err.contains("--qmp-there"), "{}", said.err);

    // A host that expects it from somebody who waits.
    let world = World::over_tls(|port| port);
    assert_eq!(world.is_expected(&[]).code, 0);
    let args = libvirt_args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let said = world.here.cli(&args);
    world.is_as_before(&said, "it waits already");
    assert!(
        said.err.contains("with a QEMU that waits already") && said.err.contains("--libvirt"),
        "{}",
        said.err
    );
}

#[test]
fn a_host_that_does_not_fit_is_found_out_while_the_guest_is_here() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    world.far().version = 10;
    let said = migrates_by_libvirt(&world);
    world.is_as_before(&said, "another version");
    assert!(said.err.contains("and the one there is 10.1"), "{}", said.err);
    assert!(!library.says().held && library.says().stop == VcpuStop::Free);
    assert!(world.near().asked.iter().any(|asked| asked == "migrate_cancel"));
}

#[test]
fn a_qemu_that_does_not_wait_for_its_vcpus_keeps_the_guest() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    let attended = attends_libvirt(&world);
    {
        let mut near = world.near();
        (near.library, near.hasty) = (Weak::new(), true);
    }
    migrates(&world);
    let said = attended.join().unwrap();
    world.is_as_before(&said, "it was not kept");
    assert!(said.err.contains("before the functions were at rest"), "{}", said.err);
    assert!(!library.says().held && library.says().stop == VcpuStop::Free);
}

#[test]
fn an_attendance_that_is_killed_while_a_vcpu_is_kept_is_brought_to_its_end() {
    let _alone = alone();
    for moment in ["commands", "rested", "taken"] {
        let (world, library) = of_libvirt();
        let args = libvirt_args(&world);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut child = world.here.begin(&args, Some(("IOPLANE_MOVE_KILL", moment)));
        world.here.until(|| !world.near().guarded && matches!(library.says().stop, VcpuStop::Asked(4..)));
        migrates(&world);
        assert!(!child.wait().unwrap().success(), "{moment}");
        assert_eq!((library.says().stop, library.says().kept), (VcpuStop::Kept, 1), "{moment}");
        assert_eq!(world.near().state, "finish-migrate", "{moment}: QEMU waits");
        let said = world.recovers();
        assert_eq!(said.code, 0, "{moment}: {}{}", said.out, said.err);
        assert!(!world.has_one_owner(moment), "{moment}");
        assert!(!library.says().held && library.says().stop == VcpuStop::Free, "{moment}");
    }
}

/// The same world of two hosts that know each other. The QEMU there is not there yet, and is expected.
fn of_libvirt_by_certificates() -> (World, Arc<Library>, Absent) {
    let (world, library) = migrated_by_libvirt(World::over_tls(|port| port));
    let there = Absent::hide(&world);
    // One that is not there is a mistake otherwise.
    let said = world.is_expected(&[]);
    assert!(said.code != 0 && said.err.contains("--libvirt"), "{}", said.err);
    let said = world.is_expected(&["--libvirt"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.err.contains("then, on host-b: ioplane move attend"), "{}", said.err);
    assert!(said.out.contains("there, not there yet"), "{}", said.out);
    (world, library, there)
}

fn expected(world: &World) -> Value {
    world.there.json(&["move", "expected"])
}

#[test]
fn a_nic_goes_to_a_host_that_expects_a_qemu_of_libvirt() {
    let _alone = alone();
    let (world, library, there) = of_libvirt_by_certificates();
    let one = &expected(&world)[0];
    assert_eq!(
        (&one["state"], &one["libvirt"], &one["pid"]),
        (&json!("expected"), &json!(true), &Value::Null)
    );
    let attended = attends_libvirt(&world);
    assert!(world.far().asked.is_empty(), "{:?}", world.far().asked);
    migrates(&world);
    is_looked_for(&world);
    there.comes();
    let said = attended.join().unwrap();
    is_gone_with_its_nic(&world, &library, &said);
    let place = there.there.display().to_string();
    assert!(said.err.contains(&format!("the monitor of its QEMU there is {place}")), "{}", said.err);
    // Once.
    assert_eq!(expected(&world), json!([]));
    assert!(std::net::TcpStream::connect(("127.0.0.1", world.ports.unwrap().0)).is_err());
    assert!(!world.here.log().contains("WARN"), "{}", world.here.log());
}

/// Somebody migrates it, and the guest stays, for this reason.
fn stays_for(world: &World, words: &str, meanwhile: impl FnOnce()) {
    let attended = attends_libvirt(world);
    migrates(world);
    is_looked_for(world);
    meanwhile();
    let said = attended.join().unwrap();
    world.is_as_before(&said, words);
    assert!(said.err.contains(words), "{words}: {}", said.err);
    assert!(world.near().asked.iter().any(|asked| asked == "migrate_cancel"), "{words}");
    assert!(!world.far().asked.iter().any(|asked| asked == "stop"), "{words}");
    world.near().asked.clear();
    world.again();
}

#[test]
fn a_qemu_of_libvirt_that_is_not_the_one_keeps_the_guest_here() {
    let _alone = alone();
    let (world, library, there) = of_libvirt_by_certificates();
    stays_for(&world, "No such file or directory", || {});
    // What stands there in its place: a file; the monitor of another VM; one that somebody serves who has nothing to do with it.
    stays_for(&world, "the file there is no socket", || std::fs::write(&there.there, "").unwrap());
    std::fs::remove_file(&there.there).unwrap();
    let own = std::mem::replace(&mut world.far().name, "mail".into());
    stays_for(&world, "is that of VM mail", || there.comes());
    // Now it is there from the beginning.
    let args = libvirt_args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    assert!(world.here.cli(&args).err.contains("is that of VM mail"));
    world.far().name = own.clone();
    std::fs::rename(&there.there, &there.hidden).unwrap();
    // A daemon serves this one, for a VM of the same name.
    let other = World::over_tls(|port| port);
    assert_eq!(other.is_expected(&[]).code, 0);
    let port = other.ports.unwrap().1;
    let form = json!({ "host": "127.0.0.1", "port": port, "tls_hostname": "host-c" }).to_string();
    let (status, peer) = other.here.http("PUT", &format!("/v1/moves/{own}/peer"), &form);
    assert_eq!(status, 200, "{peer}");
    let strangers = peer["qmp_there"].as_str().unwrap();
    stays_for(&world, "which uses no PCI function of this daemon", || {
        std::os::unix::fs::symlink(strangers, &there.there).unwrap();
    });
    std::fs::remove_file(&there.there).unwrap();
    assert_eq!(other.far().state, "inmigrate");

    // Another host gets nothing of it, whether it is there or not.
    let d = member(world.authority.as_ref().unwrap(), "host-d");
    let form =
        json!({ "host": "127.0.0.1", "port": world.ports.unwrap().1, "tls_hostname": "host-c" }).to_string();
    let tries = |vm: &str| d.http("PUT", &format!("/v1/moves/{vm}/peer"), &form);
    let absent = tries(&own);
    there.comes();
    let present = tries(&own);
    assert!(absent.0 == 409 && absent.1.to_string().contains("does not expect VM"), "{absent:?}");
    assert_eq!(absent, present);
    // After all of that it goes, by the same expectation.
    assert_eq!(expected(&world)[0]["state"], "expected");
    is_gone_with_its_nic(&world, &library, &migrates_by_libvirt(&world));
}

#[test]
fn an_expectation_that_ends_takes_all_of_it_along() {
    let _alone = alone();
    let (world, library, there) = of_libvirt_by_certificates();
    let name = world.near().name.clone();
    let end = || assert_eq!(world.there.cli(&["move", "unexpect", &name]).code, 0);
    // While somebody looks for the QEMU there.
    stays_for(&world, "only while a VM is expected", end);
    // While nobody has begun.
    assert_eq!(world.is_expected(&["--libvirt"]).code, 0);
    let attended = attends_libvirt(&world);
    end();
    let said = attended.join().unwrap();
    world.is_as_before(&said, "nobody has begun");
    assert!(said.err.contains("only while a VM is expected"), "{}", said.err);
    // While memory is copied.
    there.comes();
    assert_eq!(world.is_expected(&["--libvirt"]).code, 0);
    world.near().silent = Some(Instant::now() + Duration::from_secs(600));
    let attended = attends_libvirt(&world);
    migrates(&world);
    world.here.until(|| library.says().held);
    end();
    let said = attended.join().unwrap();
    world.is_as_before(&said, "memory was copied");
    assert!(said.err.contains("nothing is sent any more"), "{}", said.err);
    assert_eq!(library.says().stop, VcpuStop::Free);
}

#[test]
fn a_main_loop_that_waits_for_a_vcpu_has_it_soon() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    let attended = attends_libvirt(&world);
    for _ in 0..3 {
        world.near().stalls = Some(Stall::Resets);
        world.here.until(|| world.near().stalled.is_some());
        let stalled = world.near().stalled.take().unwrap();
        eprintln!("its main loop waited for {stalled:?}");
        // The library itself would take 4.5 s.
        assert!(stalled < Duration::from_secs(2), "{stalled:?}");
        // What is wanted back from then on waits.
        assert!(matches!(library.says().stop, VcpuStop::Asked(_)), "{:?}", library.says());
    }
    migrates(&world);
    let said = attended.join().unwrap();
    is_gone_with_its_nic(&world, &library, &said);
    assert_eq!(said.err.matches("waited for a vCPU, as for a reset of the guest").count(), 1, "{}", said.err);
}

#[test]
fn a_monitor_that_is_only_slow_does_not_lose_what_is_kept() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    let attended = attends_libvirt(&world);
    world.near().stalls = Some(Stall::Slow(Duration::from_secs(2)));
    world.here.until(|| world.near().stalled.is_some());
    assert!(matches!(library.says().stop, VcpuStop::Asked(_)), "{:?}", library.says());
    migrates(&world);
    let said = attended.join().unwrap();
    is_gone_with_its_nic(&world, &library, &said);
    assert!(!said.err.contains("waited for a vCPU"), "{}", said.err);
}

/// QEMU's migration thread stops the guest while its main loop waits for a vCPU: what is let go for one is let go for both.
#[test]
fn a_switch_over_that_meets_a_reset_keeps_the_guest() {
    let _alone = alone();
    let (world, library) = of_libvirt();
    world.near().silent = Some(Instant::now() + Duration::from_secs(600));
    let attended = attends_libvirt(&world);
    migrates(&world);
    world.here.until(|| library.says().held && world.near().migration == Some("active"));
    world.near().stalls = Some(Stall::ResetsAndStops);
    let said = attended.join().unwrap();
    world.is_as_before(&said, "it met a reset");
    assert!(world.near().stalled.unwrap() < Duration::from_secs(2));
    assert!(
        said.err.contains(
            "before the functions were at rest (a vCPU was let go while its monitor did not answer"
        ),
        "{}",
        said.err
    );
    assert!(world.near().asked.iter().any(|asked| asked == "migrate_cancel"));
    assert_eq!((library.says().stop, library.says().held), (VcpuStop::Free, false));
    // The next one goes.
    world.near().silent = None;
    world.again();
    is_gone_with_its_nic(&world, &library, &migrates_by_libvirt(&world));
}
