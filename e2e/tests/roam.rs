//! Guests go there and back between two QEMUs while they exchange TCP with another guest and use a disk. Seconds for each
//! kernel by `IOPLANE_SOAK_SECONDS`, a migration every 30 of them; unless told, one there and one back in half a minute.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{Kernel, host_version};
use ioplane_e2e::exchange::{End, exchange};
use ioplane_e2e::migration::compare;
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::{Version, Vm};
use std::time::{Duration, Instant};

const CONFIG: &str = "[[core]]\nspin_us = 200\n[[switch]]\nname = \"lan\"\n";
const DISKS: [&str; 2] = ["root", "data"];
/// The traveller's NIC in each of the two places: the same address, on the same switch.
const NICS: [&str; 2] = ["here", "there"];
const MAC: &str = "02:00:00:00:00:07";
/// Seconds between two migrations in the long form, and in the short one.
const LEGS: [u32; 2] = [30, 12];

/// How long, from the environment.
fn plan() -> Result<(u32, u32)> {
    match std::env::var("IOPLANE_SOAK_SECONDS") {
        Err(_) => Ok((2 * LEGS[1], LEGS[1])),
        Ok(text) => {
            let seconds =
                text.parse().with_context(|| format!("IOPLANE_SOAK_SECONDS={text}: give a number"))?;
            Ok((seconds, LEGS[0]))
        }
    }
}

fn nic(stage: &Stage, name: &str, version: Version) -> Result<String> {
    stage.daemon.text(&["qemu-args", name, "--device-only", "--qemu-version", &version.number()?])
}

/// One migration, with the memories compared; the guest runs in `place` then.
fn travel(stage: &Stage, mut vm: Vm, version: Version, machine: &str, place: usize) -> Result<Vm> {
    let mut there = stage
        .destination(NICS[place], version, &DISKS, place == 1)?
        .args(&nic(stage, NICS[place], version)?)
        .machine(machine)
        .launch(&stage.guest)?;
    let travelled = vm.send_to(&mut there).map_err(|error| there.explain(vm.explain(error)))?;
    let (pages, differ) = compare(&vm, &there)?;
    ensure!(differ.is_empty(), "{} of {pages} pages differ, at {differ:x?}", differ.len());
    there.go_on_from(vm)?;
    stage.say(format!(
        "to {} in {:.2?}, {} passes, stood still for {:.2?}; {pages} pages are equal",
        NICS[place], travelled.total, travelled.passes, travelled.downtime
    ));
    Ok(there)
}

/// A guest with this kernel goes there and back in QEMUs of this version.
fn roams(kernel: Kernel, version: Version) -> Result<()> {
    let (seconds, leg) = plan()?;
    let (major, minor) = host_version()?;
    let machine = format!("pc-q35-{major}.{minor}");
    play(CONFIG, |stage| {
        stage.guest = stage.guest.clone().with(kernel, &|line| eprintln!("{line}"))?;
        stage.add_root("root")?;
        stage.add_blank("data", 64 << 20, &[])?;
        for disk in DISKS {
            stage.daemon.cli(&["disk", "migration-socket", disk])?;
        }
        for name in NICS {
            stage.daemon.cli(&["nic", "add", name, "--switch", "lan", "--mac", MAC])?;
        }
        stage.add_root("home-root")?;
        stage.daemon.cli(&["nic", "add", "home", "--switch", "lan"])?;
        let home = stage.boot(stage.qemu("home", version, &["home-root", "home"])?)?;
        let first = stage.qemu(NICS[0], version, &DISKS)?.args(&nic(stage, NICS[0], version)?);
        let mut vm = stage.boot(first.machine(&machine))?;
        let agent = vm.share_agent();
        let mac = stage.daemon.status()?.nic("home")?.mac.clone();
        let b = End::up(home.agent(), &mac).map_err(|error| home.explain(error))?;
        let a = End::up(&agent, MAC).map_err(|error| vm.explain(error))?;
        let load = agent.load(mixed("data", 16 << 20))?;

        let begun = Instant::now();
        let (mut sums, mut legs) = ([0u64; 4], 0u16);
        while legs < 2 || begun.elapsed() < Duration::from_secs(seconds.into()) {
            let place = usize::from(legs + 1) % 2;
            let port = 4000 + 10 * legs;
            let before = stage.daemon.status()?.sum_nics(&["home"])?.bytes;
            let (arrived, checked, speed) = std::thread::scope(|scope| {
                let checked = scope.spawn(|| exchange(&a, &b, port, f64::from(leg)));
                let speed = scope.spawn(|| a.iperf(&b, port + 5, leg));
                let arrived = (|| {
                    stage.until("frames flow", || {
                        Ok(stage.daemon.status()?.sum_nics(&["home"])?.bytes > before + (8 << 20))
                    })?;
                    std::thread::sleep(Duration::from_secs(u64::from(leg) / 6));
                    let arrived = travel(stage, vm, version, &machine, place)?;
                    let busy = !checked.is_finished() && !speed.is_finished();
                    ensure!(
                        busy,
                        "the transfers had ended before the guest had arrived: a longer leg is needed"
                    );
                    Ok(arrived)
                })();
                let joined = |_| anyhow::anyhow!("a transfer panicked");
                (arrived, checked.join().map_err(joined), speed.join().map_err(joined))
            });
            vm = arrived?;
            let [there, back] = checked?.map_err(|error| home.explain(vm.explain(error)))?;
            let speed = speed?.map_err(|error| home.explain(vm.explain(error)))?;
            for (sum, bytes) in sums.iter_mut().zip([there.bytes, back.bytes, speed.there, speed.back]) {
                *sum += bytes;
            }
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
            legs += 1;
        }
        let (report, verified) = finish(&agent, load).map_err(|error| vm.explain(error))?;
        let [there, back, iperf_there, iperf_back] = sums.map(|bytes| bytes >> 20);
        stage.say(format!(
            "{} after {legs} migrations in {:.0} s: {there} and {back} MB verified, {iperf_there} and {iperf_back} MB by \
             iperf3, {} disk requests, {} blocks right",
            vm.hello.as_ref().map_or("", |hello| hello.kernel.as_str()),
            begun.elapsed().as_secs_f64(),
            report.requests,
            verified.blocks
        ));
        for guest in [&vm, &home] {
            expect_quiet(guest.agent()).map_err(|error| guest.explain(error))?;
        }
        vm.poweroff()?;
        home.poweroff()?;
        stage.expect_clean()
    })
}

#[test]
fn a_guest_with_linux_6_1_roams_between_the_hosts_qemus() -> Result<()> {
    roams(Kernel::Old, Version::Host)
}

#[test]
fn a_guest_with_the_newest_linux_roams_between_newer_qemus() -> Result<()> {
    roams(Kernel::Newest, Version::Newer)
}
