//! A VM whose disks are on a third host moves from one host to another by `ioplane move vm`, and back by QEMU's monitor alone: the claims to its
//! disks go along.

use anyhow::{Result, ensure};
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::hosts::{DISKS, DISKS_BY_NAME, holds, holds_none, machine, three};
use ioplane_e2e::migration::{BANDWIDTH, DOWNTIME};
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::{Qemu, Version, Vm};

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
const BYTES: u64 = 16 << 20;
const NAME: &str = "web";

/// Who asks QEMU to send the guest.
#[derive(Clone, Copy)]
enum By {
    Command,
    Monitor,
}

/// Moves the guest to a QEMU of the other host, and lets it go on there.
fn travel(stage: &Stage, mut vm: Vm, by: By, (here, there): (&Daemon, &Daemon)) -> Result<Vm> {
    ensure!(holds(here, &DISKS)? && holds_none(there, &DISKS)?, "before it moves");
    let args = there.qemu_args(Version::Host, MEMORY_MIB, &DISKS)?;
    let qemu = Qemu::new(NAME).version(Version::Host).memory_mib(MEMORY_MIB).args(&args).incoming();
    let mut next = qemu.machine(&machine()?).launch(&stage.guest)?;
    // It is connected, has read the sizes, and has claimed nothing.
    ensure!(
        holds(here, &DISKS)? && holds_none(there, &DISKS)?,
        "before it moves, with a QEMU that waits for it"
    );
    let stood = match by {
        By::Command => next.expect_guest().and_then(|to| {
            vm.pace(BANDWIDTH, DOWNTIME)?;
            let moved = vm.move_by_command(here, &to, &there.socket())?;
            ensure!(moved.disks == DISKS_BY_NAME, "{moved:?}");
            Ok(format!("{} ms by `ioplane move vm`", moved.downtime_ms))
        }),
        By::Monitor => vm.send_to(&mut next).map(|travelled| format!("{:.2?}", travelled.downtime)),
    };
    let stood = stood.map_err(|error| next.explain(vm.explain(error)))?;
    next.go_on_from(vm)?;
    stage.until("the other host holds the disks", || holds(there, &DISKS))?;
    stage.until("this one does not", || holds_none(here, &DISKS))?;
    stage.say(format!("it has moved, and stood still for {stood}"));
    Ok(next)
}

#[test]
fn a_guest_moves_to_another_host_and_back_under_load() -> Result<()> {
    play(CONFIG, |stage| {
        let (_exporter, other) = three(stage, CONFIG)?;
        let mut vm = stage.boot(stage.qemu(NAME, Version::Host, &DISKS)?.machine(&machine()?))?;
        let agent = vm.share_agent();
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = agent.load(LoadSpec { mix, ..mixed("data", BYTES) })?;
        load.progress(MINUTE)?;
        for (by, hosts) in [(By::Command, (&stage.daemon, &other)), (By::Monitor, (&other, &stage.daemon))] {
            vm = travel(stage, vm, by, hosts)?;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
        }
        let (report, verified) = finish(&agent, load).map_err(|error| vm.explain(error))?;
        expect_quiet(&agent).map_err(|error| vm.explain(error))?;
        stage.say(format!("{} requests, {} blocks are right", report.requests, verified.blocks));
        vm.poweroff()?;
        stage.until("nobody holds the disks", || holds_none(&stage.daemon, &DISKS))?;
        stage.expect_clean()
    })
}
