//! The daemon's process changes under a running guest: no disconnect, no error, a pause.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::Version;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, expect_quiet, expect_right, finish, mixed, play};

/// Two cores share a TCG guest, its VMM and two daemons: what is asserted is only that nothing has waited for a time-out.
const GENEROUS_US: u64 = 2_000_000;

#[test]
fn a_guest_goes_on_while_five_daemons_take_over_from_each_other() -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        stage.add_blank("data", 64 << 20, &["--queues", "2"])?;
        let vm = stage.boot(stage.qemu("guest", Version::Host, &["root", "data"])?.cpus(1))?;
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = vm.agent().load(LoadSpec { mix, ..mixed("data", 32 << 20) })?;
        load.progress(MINUTE)?;
        let mut pauses = Vec::new();
        for round in 0..5 {
            load.mark()?;
            let before = stage.daemon.id();
            let said = stage.daemon.upgrade()?;
            ensure!(stage.daemon.id() != before, "the same process: {said}");
            let devices = said["devices"].as_array().context("no devices")?;
            ensure!(devices.len() == 2, "{said}");
            for device in devices {
                let pause =
                    device["pause_us"].as_u64().with_context(|| format!("{device} does not go on"))?;
                ensure!(pause < GENEROUS_US, "{said}");
                pauses.push(pause);
            }
            load.progress(MINUTE)?;
            let report = load.mark()?;
            expect_right(&report).map_err(|error| vm.explain(error))?;
            for disk in stage.daemon.cli(&["status"])?["disks"].as_array().context("no disks")? {
                let connected = (disk["connected"].as_bool(), disk["connections"].as_u64());
                ensure!(connected == (Some(true), Some(1)), "QEMU has noticed: {disk}");
            }
            stage.say(format!("upgrade {round}: {}, longest request {} us", said["devices"], report.max_us));
        }
        let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        pauses.sort();
        stage.say(format!(
            "5 upgrades: pauses {pauses:?} us, {} requests in all, {} blocks right",
            report.requests, verified.blocks
        ));
        vm.poweroff()?;
        stage.expect_clean()?;
        stage.daemon.terminate(MINUTE)
    })
}
