//! VMs move between two QEMUs while ioplane serves their disks: each disk behind two sockets, opened once.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::host_version;
use ioplane_e2e::migration::compare;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::{Agent, Version, Vm};
use std::sync::Arc;

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
const DISKS: [&str; 2] = ["root", "data"];
const BYTES: u64 = 16 << 20;

/// Every kind of request, read back and checked by the guest itself.
fn load() -> LoadSpec {
    let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
    LoadSpec { mix, ..mixed("data", BYTES) }
}

/// The machine of the host's own QEMU by its full name, which newer ones know too.
fn machine() -> Result<String> {
    let (major, minor) = host_version()?;
    Ok(format!("pc-q35-{major}.{minor}"))
}

/// Two disks with two sockets each, and a guest behind the first ones.
fn begin(stage: &Stage, version: Version) -> Result<Vm> {
    stage.add_root("root")?;
    stage.add_blank("data", 64 << 20, &[])?;
    for disk in DISKS {
        stage.daemon.cli(&["disk", "migration-socket", disk])?;
    }
    stage.boot(stage.qemu("first", version, &DISKS)?.machine(&machine()?))
}

/// Behind which socket each disk's guest runs.
fn expect_owner(stage: &Stage, socket: Option<&str>) -> Result<()> {
    for disk in DISKS {
        let found = stage.daemon.disk(disk)?.owner;
        ensure!(found.as_deref() == socket, "{disk}: its rings run behind {found:?}, not {socket:?}");
    }
    Ok(())
}

/// Moves the guest to a QEMU behind the other sockets, compares the memories, and lets it go on there.
fn travel(stage: &Stage, mut vm: Vm, version: Version, to_migration_socket: bool) -> Result<Vm> {
    let (name, sockets) = match to_migration_socket {
        true => ("second", ["socket", "migration_socket"]),
        false => ("first", ["migration_socket", "socket"]),
    };
    expect_owner(stage, Some(sockets[0]))?;
    let mut there = stage
        .destination(name, version, &DISKS, to_migration_socket)?
        .machine(&machine()?)
        .launch(&stage.guest)?;
    // The destination is connected, has read the configuration, and is not the owner.
    expect_owner(stage, Some(sockets[0]))?;
    let travelled = vm.send_to(&mut there).map_err(|error| there.explain(vm.explain(error)))?;
    expect_owner(stage, None)?;
    let (pages, differ) = compare(&vm, &there)?;
    ensure!(differ.is_empty(), "{} of {pages} pages differ, at {differ:x?}", differ.len());
    there.go_on_from(vm)?;
    stage.until("the disks have gone over", || Ok(expect_owner(stage, Some(sockets[1])).is_ok()))?;
    stage.say(format!(
        "to {name} in {:.2?}, {} passes, stood still for {:.2?}; {pages} pages are equal",
        travelled.total, travelled.passes, travelled.downtime
    ));
    Ok(there)
}

/// From QEMU to QEMU under load, the first being where the guest boots, with every page compared after each way.
fn goes(versions: &[Version]) -> Result<()> {
    play(CONFIG, |stage| {
        let mut vm = begin(stage, versions[0])?;
        let agent: Arc<Agent> = vm.share_agent();
        let load = agent.load(load())?;
        load.progress(MINUTE)?;
        for (way, version) in (1..).zip(&versions[1..]) {
            vm = travel(stage, vm, *version, way % 2 == 1)?;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            let report = load.mark()?;
            expect_right(&report).map_err(|error| vm.explain(error))?;
        }
        let (report, verified) = finish(&agent, load).map_err(|error| vm.explain(error))?;
        expect_quiet(&agent).map_err(|error| vm.explain(error))?;
        stage.say(format!("{} requests, {} blocks are right", report.requests, verified.blocks));
        vm.poweroff()?;
        stage.expect_clean()
    })
}

#[test]
fn a_guest_of_the_hosts_qemu_goes_there_and_back_under_load() -> Result<()> {
    goes(&[Version::Host; 3])
}

#[test]
fn a_guest_of_a_newer_qemu_goes_there_and_back_under_load() -> Result<()> {
    goes(&[Version::Newer; 3])
}

/// What a newer QEMU says of a virtio device of QEMU 10.0.13 (Debian 13), which makes every queue as long as the longest that
/// there can be, whatever its size is set to.
const QEMU_10_0_13: &str = "vring.num 1024 exceeds allocated max";

/// What the migration socket is for: another QEMU under a guest that does not notice.
#[test]
fn a_guest_goes_from_the_hosts_qemu_to_a_newer_one_under_load() -> Result<()> {
    let outcome = goes(&[Version::Host, Version::Newer]);
    match outcome {
        Err(error) if host_version()? == (10, 0) && format!("{error:#}").contains(QEMU_10_0_13) => {
            eprintln!(
                "SKIPPED (cannot be had here): a migration from this host's QEMU to a newer one was NOT tried: QEMU \
                 10.0.13 gives every virtio queue of every device 1,024 entries, and newer ones refuse that state"
            );
            Ok(())
        }
        outcome => outcome,
    }
}

/// A migration that fails leaves the guest where it was, with its disks: cancelled when the guest stands still already, and
/// with a destination that dies while memory is being copied.
#[test]
fn a_migration_that_fails_leaves_the_guest_and_its_disks_where_they_were() -> Result<()> {
    play(CONFIG, |stage| {
        let version = Version::Newer;
        let mut vm = begin(stage, version)?;
        let agent = vm.share_agent();
        let load = agent.load(load())?;
        load.progress(MINUTE)?;

        // Slowly, so that it is under way when the destination dies.
        let mut there =
            stage.destination("second", version, &DISKS, true)?.machine(&machine()?).launch(&stage.guest)?;
        vm.begin_to_send(&mut there, 4 << 20)?;
        vm.wait_migration(&["active"])?;
        load.progress(MINUTE)?;
        there.kill();
        vm.wait_migration(&["failed"])?;
        expect_owner(stage, Some("socket"))?;
        load.progress(MINUTE)?;
        expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
        drop(there);
        stage.say("the destination died in the middle; the guest has noticed nothing");

        // The guest stands still, its rings have stopped, all but the last bytes are there; and then it is called off.
        let mut there =
            stage.destination("second", version, &DISKS, true)?.machine(&machine()?).launch(&stage.guest)?;
        let pause = serde_json::json!({ "capabilities": [{ "capability": "pause-before-switchover", "state": true }] });
        vm.qmp().execute("migrate-set-capabilities", pause)?;
        vm.begin_to_send(&mut there, 4 << 30)?;
        vm.wait_migration(&["pre-switchover"])?;
        expect_owner(stage, None)?;
        vm.qmp().execute("migrate_cancel", serde_json::json!({}))?;
        vm.wait_migration(&["cancelled"])?;
        stage.until("the disks have come back", || Ok(expect_owner(stage, Some("socket")).is_ok()))?;
        load.progress(MINUTE)?;
        load.progress(MINUTE)?;
        drop(there);
        stage.say("called off at the last moment; the disks have come back to the source");

        let (report, _) = finish(&agent, load).map_err(|error| vm.explain(error))?;
        expect_quiet(&agent).map_err(|error| vm.explain(error))?;
        stage.say(format!("{} requests, none failed", report.requests));
        vm.poweroff()?;
        stage.expect_clean().context("after two migrations that failed")
    })
}
