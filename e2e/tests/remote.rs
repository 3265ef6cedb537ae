//! A guest's disk is on another host. That host's daemon dies, the cable is pulled, and the guest sees pauses and no error.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ioplane_e2e::Version;
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_figures::cable::{Cable, FAR};
use serde_json::Value;

const BYTES: u64 = 16 << 20;
/// Shorter than the importer takes silence for a lost connection, and longer: TCP sends again, or a new connection is made.
const PULLED: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(14)];

fn export() -> String {
    format!(
        "[[core]]\nspin_us = 200\n[[export]]\nname = \"data\"\npath = \"{{folder}}/data.img\"\nlisten = \"{FAR}:10809\"\n\
         plain = true\n"
    )
}

/// What the importer says of its connections.
fn remote(stage: &Stage) -> Result<Value> {
    let disks = stage.daemon.cli(&["disk", "list"])?;
    let disk = disks.as_array().and_then(|disks| disks.iter().find(|disk| disk["name"] == "data"));
    Ok(disk.context("no disk data")?["backing"]["remote"].clone())
}

#[test]
fn a_guest_outlives_its_exporter_and_its_cable() -> Result<()> {
    let cable = Cable::lay("ioprmt")?;
    let image = |folder: &std::path::Path| {
        std::fs::File::create(folder.join("data.img"))?.set_len(64 << 20).context("make an image")
    };
    let mut exporter = Daemon::start_in(cable.space(), &export(), image)?;
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        let uri = format!("nbd://{FAR}/data");
        stage.daemon.cli(&["disk", "add", "data", "--remote", &uri, "--queues", "2"])?;
        let vm = stage.boot(stage.qemu("guest", Version::Host, &["root", "data"])?)?;
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = vm.agent().load(LoadSpec { mix, ..mixed("data", BYTES) })?;
        load.progress(MINUTE)?;
        for kill in 1..=3u64 {
            exporter.kill9();
            stage.until("the importer misses its exporter", || {
                Ok(remote(stage)?["state"] == "reconnecting")
            })?;
            exporter.restart()?;
            stage.until("the importer is connected again", || {
                let remote = remote(stage)?;
                Ok(remote["state"] == "connected" && remote["losses"].as_u64() >= Some(kill))
            })?;
            load.progress(MINUTE)?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
            stage.say(format!("the exporter was killed: {}", remote(stage)?));
        }
        for time in PULLED {
            let losses = remote(stage)?["losses"].as_u64().unwrap_or_default();
            cable.pull()?;
            std::thread::sleep(time);
            let pulled = remote(stage)?;
            let lost = pulled["losses"].as_u64() > Some(losses);
            ensure!(lost == (time > Duration::from_secs(10)), "after {time:?}: {pulled}");
            ensure!(pulled["in_flight"].as_u64() > Some(0), "nothing waits: {pulled}");
            cable.plug()?;
            stage.until("the importer is connected again", || Ok(remote(stage)?["state"] == "connected"))?;
            load.progress(MINUTE)?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
            stage.say(format!("the cable was pulled for {time:?}: {}", remote(stage)?));
        }
        let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        let end = remote(stage)?;
        ensure!(
            end["replays"].as_u64() > Some(0),
            "no request was in flight: the load proves nothing: {end}"
        );
        ensure!(end["device_errors"] == 0, "{end}");
        stage.say(format!("{} requests, {} blocks right, {end}", report.requests, verified.blocks));
        vm.poweroff()?;
        stage.expect_clean()
    })
}
