//! The daemon dies by `kill -9` while guests use its disks: they see a pause and no error.

use anyhow::{Result, ensure};
use ioplane_e2e::Version;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, expect_quiet, expect_right, finish, mixed, play};
use std::time::{Duration, Instant};

const BYTES: u64 = 32 << 20;
/// From the daemon's return to the guest's next request: QEMU 7.2 reconnects in whole seconds.
const PAUSE: Duration = Duration::from_secs(20);

fn killed(version: Version, kills: u32) -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        stage.add_blank("data", 64 << 20, &["--queues", "2"])?;
        let cpus = if version == Version::Host { 1 } else { 2 };
        let vm = stage.boot(stage.qemu("guest", version, &["root", "data"])?.cpus(cpus))?;
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = vm.agent().load(LoadSpec { mix, ..mixed("data", BYTES) })?;
        load.progress(MINUTE)?;
        let (mut replayed, mut pauses) = (0, Vec::new());
        // At least so many, and then until one has hit a request in flight; forty that do not are no chance.
        for kill in 0..40 {
            if kill >= kills && replayed > 0 {
                break;
            }
            load.mark()?;
            // Any moment will do; the nanoseconds of the clock choose it.
            let chance = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.subsec_nanos();
            std::thread::sleep(Duration::from_millis(u64::from(chance % 700)));
            let begun = Instant::now();
            stage.daemon.kill9();
            stage.daemon.restart()?;
            let back = begun.elapsed();
            stage.until("the guest's requests are answered again", || {
                let disk = stage.daemon.disk("data")?;
                Ok(disk.connected && disk.totals.requests > disk.totals.replayed + 20)
            })?;
            load.progress(MINUTE)?;
            let report = load.mark()?;
            expect_right(&report).map_err(|error| vm.explain(error))?;
            let pause = Duration::from_micros(report.max_us);
            ensure!(pause < back + PAUSE, "a request took {pause:?}, the daemon was back after {back:?}");
            let status = stage.daemon.status()?;
            ensure!(status.disks.len() == 2, "disks added at run time must come back: {status:?}");
            let again = status.disk("data")?.totals.replayed;
            stage.say(format!(
                "kill {kill}: daemon back after {back:.2?}, longest request {pause:.2?}, {again} replayed"
            ));
            pauses.push(pause);
            replayed += again;
        }
        // And once as an upgrade would.
        stage.daemon.terminate(MINUTE)?;
        stage.daemon.restart()?;
        load.progress(MINUTE)?;
        stage.until("the guest is back", || Ok(stage.daemon.disk("data")?.totals.requests > 20))?;
        let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        pauses.sort();
        stage.say(format!(
            "{kills} kills: pauses {pauses:.2?}, {replayed} requests replayed, {} requests in all, {} blocks right",
            report.requests, verified.blocks
        ));
        ensure!(replayed > 0, "no kill hit a request in flight: the load is too weak to prove anything");
        vm.poweroff()?;
        stage.expect_clean()
    })
}

#[test]
fn guests_of_the_hosts_qemu_see_a_pause_and_no_error() -> Result<()> {
    killed(Version::Host, 3)
}

#[test]
fn guests_of_a_newer_qemu_see_a_pause_and_no_error() -> Result<()> {
    killed(Version::Newer, 5)
}
