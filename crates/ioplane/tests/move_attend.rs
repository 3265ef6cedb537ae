//! `ioplane move attend`: a VM with an emulated NIC that somebody else migrates, with two QEMUs that this test plays, as in `move_functions`.

mod daemon;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use daemon::Said;
use daemon::moving::{World, function};
use ioplane_vcpu::kvm::{CLUSTER_PAGE_NAME, ClusterPage};
use rustix::fs::MemfdFlags;

/// What the library of this build has in the first words of its file.
const HEAD: &[u8] = b"ioplexit\x07\0\0\0";

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

/// A file as of the library, in the process that both daemons take for their VMM: this one.
fn library() -> File {
    let file = File::from(rustix::fs::memfd_create(CLUSTER_PAGE_NAME, MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size_of::<ClusterPage>() as u64).unwrap();
    file.write_all_at(HEAD, 0).unwrap();
    file
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

    let file = library();
    let world = World::new();
    world.far().eager = true;
    let attended = attends(&world);
    assert!(ClusterPage::read_hold(&file).unwrap().held, "no vCPU there enters the guest");
    migrates(&world);
    let said = attended.join().unwrap();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(!ClusterPage::read_hold(&file).unwrap().held, "and now they may");
    assert!(!world.far().asked.iter().any(|asked| asked == "cont"), "it runs");
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));

    // The same by certificates: a guest that is held has not arrived, whatever its QEMU says.
    let world = World::over_tls(|port| port);
    assert_eq!(world.is_expected(&[]).code, 0);
    world.far().eager = true;
    let said = goes(&world);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert_eq!((world.near().state, world.far().state), ("postmigrate", "running"));
    assert!(!ClusterPage::read_hold(&file).unwrap().held);

    // Ended before anybody began: they may, too.
    let world = World::new();
    let args = args(&world);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut child = world.here.begin(&args, None);
    world.here.until(|| ClusterPage::read_hold(&file).unwrap().held);
    world.here.signal_to(child.id().into(), "INT");
    assert!(!child.wait().unwrap().success());
    assert!(!ClusterPage::read_hold(&file).unwrap().held);
    // The attendance is killed: whoever brings the move to its end lets them, too.
    let mut child = world.here.begin(&args, None);
    world.here.until(|| ClusterPage::read_hold(&file).unwrap().held && world.near().pauses);
    world.here.signal_to(child.id().into(), "KILL");
    child.wait().unwrap();
    let said = world.recovers();
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(!ClusterPage::read_hold(&file).unwrap().held && !world.has_one_owner("killed"));
    // Of a guest that runs nobody is held: a vCPU is inside.
    let inside = (0..size_of::<ClusterPage>() as u64).step_by(4).find(|at| {
        file.write_all_at(&1_u32.to_ne_bytes(), *at).unwrap();
        let found = ClusterPage::read_hold(&file).is_ok_and(|report| report.inside == 1);
        let before = HEAD.get(*at as usize..*at as usize + 4).unwrap_or(&[0; 4]);
        file.write_all_at(if found { &[1, 0, 0, 0] } else { before }, *at).unwrap();
        found
    });
    assert!(inside.is_some());
    let said = world.here.http("PUT", "/v1/pci/nic0/vcpus", "{\"held\": true}");
    assert_eq!(said.0, 409, "{}", said.1);
    assert!(said.1.to_string().contains("the guest of nic0 runs"), "{}", said.1);
    assert!(!ClusterPage::read_hold(&file).unwrap().held);
}
