//! The daemon's process changes under a running guest that reads, writes, and exchanges TCP with the host: no disconnect, no
//! error, a pause.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::exchange::{End, Passage};
use ioplane_e2e::protocol::{Command, LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::uplink::{HOST_MAC, Host};
use ioplane_e2e::{RunningLoad, Version, Vm, network};

/// Two cores share a TCG guest, its VMM and two daemons: what is asserted is only that nothing has waited for a time-out.
const GENEROUS_US: u64 = 2_000_000;

/// Seconds of TCP, both ways at once: longer than all upgrades.
const STRETCH: f64 = 16.0;

#[test]
fn a_guest_goes_on_while_five_daemons_take_over_from_each_other() -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        let tap = format!("iou{}", std::process::id() % 100_000);
        stage.daemon.cli(&["switch", "add", "lan", "--uplink", &tap])?;
        stage.daemon.cli(&["nic", "add", "net", "--switch", "lan"])?;
        stage.add_root("root")?;
        stage.add_blank("data", 64 << 20, &["--queues", "2"])?;
        let vm = stage.boot(stage.qemu("guest", Version::Host, &["root", "data", "net"])?.cpus(1))?;
        let host = Host::new(&tap)?;
        let mac = stage.daemon.status()?.nic("net")?.mac.clone();
        let index = End::up(vm.agent(), &mac).map_err(|error| vm.explain(error))?.interface.index;
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = vm.agent().load(LoadSpec { mix, ..mixed("data", 32 << 20) })?;
        load.progress(MINUTE)?;

        let (to, seconds) = (HOST_MAC.to_owned(), Some(STRETCH));
        let out = vm.agent().begin(Command::NetSend { index, to, port: 4200, seconds, seed: 1, write: 0 })?;
        let back = vm.agent().begin(Command::NetReceive { index, port: 4201 })?;
        let (pauses, received, sent) = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| host.within(|index| network::receive(index, 4200)));
            let sending =
                scope.spawn(|| host.within(|index| network::send(index, &mac, 4201, STRETCH, 2, 0)));
            let pauses = upgrades(stage, &vm, &load);
            let busy = !receiving.is_finished() && !sending.is_finished();
            let panicked = |_| anyhow::anyhow!("the host's end panicked");
            let (received, sent) = (receiving.join().map_err(panicked)?, sending.join().map_err(panicked)?);
            let pauses = pauses?;
            ensure!(busy, "the transfers had ended before the last upgrade");
            anyhow::Ok((pauses, received?, sent?))
        })?;
        let out = Passage { sent: serde_json::from_value(out.end(MINUTE, |_| {})?)?, received }.right()?;
        let back = Passage { sent, received: serde_json::from_value(back.end(MINUTE, |_| {})?)? }.right()?;

        let (report, verified) = finish(vm.agent(), load).map_err(|error| vm.explain(error))?;
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        stage.say(format!(
            "5 upgrades: pauses {pauses:?} us, {} requests in all, {} blocks right, {} and {} MB of TCP right",
            report.requests,
            verified.blocks,
            out.bytes >> 20,
            back.bytes >> 20
        ));
        vm.poweroff()?;
        stage.expect_clean()?;
        stage.daemon.terminate(MINUTE)
    })
}

/// Five of them, each seen by nobody; how long devices paused, in order, us.
fn upgrades(stage: &mut Stage, vm: &Vm, load: &RunningLoad<'_>) -> Result<Vec<u64>> {
    let mut pauses = Vec::new();
    for round in 0..5 {
        load.mark()?;
        let before = stage.daemon.id();
        let frames = stage.daemon.status()?.sum_nics(&["net"])?.frames;
        let said = stage.daemon.upgrade()?;
        ensure!(stage.daemon.id() != before, "the same process: {said}");
        let devices = said["devices"].as_array().context("no devices")?;
        ensure!(devices.len() == 3, "{said}");
        for device in devices {
            let pause = device["pause_us"].as_u64().with_context(|| format!("{device} does not go on"))?;
            ensure!(pause < GENEROUS_US, "{said}");
            pauses.push(pause);
        }
        load.progress(MINUTE)?;
        let report = load.mark()?;
        expect_right(&report).map_err(|error| vm.explain(error))?;
        let status = stage.daemon.cli(&["status"])?;
        for device in ["disks", "nics"].iter().flat_map(|kind| status[kind].as_array().into_iter().flatten())
        {
            let connected = (device["connected"].as_bool(), device["connections"].as_u64());
            ensure!(connected == (Some(true), Some(1)), "QEMU has noticed: {device}");
        }
        stage.until("frames go on", || Ok(stage.daemon.status()?.sum_nics(&["net"])?.frames > frames))?;
        let waits: Vec<_> = devices.iter().map(|it| format!("{} {}", it["name"], it["pause_us"])).collect();
        stage.say(format!("upgrade {round}: {} us, longest request {} us", waits.join(", "), report.max_us));
    }
    pauses.sort();
    Ok(pauses)
}
