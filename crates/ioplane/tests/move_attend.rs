//! `ioplane move attend`: a VM with an emulated NIC that somebody else migrates, with two QEMUs that this test plays, as in `move_functions`.

mod daemon;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use daemon::Said;
use daemon::moving::{LATCH, Library, SET, World, function};
use ioplane_vcpu::kvm::VcpuStop;

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
    let (world, library) = (World::new(), Arc::new(Library::new()));
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
    let (there, hidden) = (world.folder.path().join("there"), world.folder.path().join("hidden"));
    std::fs::rename(&there, &hidden).unwrap();
    let attended = attends_libvirt(&world);
    assert!(world.far().asked.is_empty(), "{:?}", world.far().asked);
    migrates(&world);
    // It has seen that, and looks for the other one.
    world.here.until(|| {
        let near = world.near();
        near.asked.iter().filter(|asked| *asked == "query-migrate-capabilities").count() == 2
    });
    std::fs::rename(&hidden, &there).unwrap();
    let said = attended.join().unwrap();
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

    let world = World::over_tls(|port| port);
    let args = libvirt_args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    assert!(world.here.cli(&args).err.contains("--qmp-there"));
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
    for moment in ["port", "commands", "rested", "taken"] {
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
