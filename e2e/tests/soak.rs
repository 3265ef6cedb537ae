//! Two guests under verified mixed load, while everything that can be done to disks is done to theirs. Seconds by
//! `IOPLANE_SOAK_SECONDS`: 30 unless told; the long form is 600.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, filled, finish, mixed, play, reads};
use ioplane_e2e::{RunningLoad, Version, Vm};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CONFIG: &str = "[[core]]\nspin_us = 200\n[[core]]\nspin_us = 200\nyield_policy = \"nice\"\n";
const NAMES: [&str; 2] = ["anna", "bert"];

/// What a guest has: a root disk, one under mixed load, one that is only read and changes its backing.
struct Player<'a> {
    name: &'static str,
    mixed: RunningLoad<'a>,
    reads: RunningLoad<'a>,
    size: u64,
    images: [&'static str; 2],
}

#[test]
fn two_guests_under_load_while_everything_changes() -> Result<()> {
    let text = std::env::var("IOPLANE_SOAK_SECONDS").unwrap_or_else(|_| "30".into());
    let seconds: u64 = text.parse().with_context(|| format!("IOPLANE_SOAK_SECONDS={text}: give a number"))?;
    play(CONFIG, |stage| {
        let mut guests = Vec::new();
        for (name, version) in NAMES.iter().zip([Version::Host, Version::Newer]) {
            let disks = ["root", "mixed", "reads"].map(|role| format!("{name}-{role}"));
            stage.add_root(&disks[0])?;
            stage.add_blank(&disks[1], 64 * MIB, &["--queues", "2"])?;
            stage.add_blank(&disks[2], 32 * MIB, &[])?;
            let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
            guests.push(
                stage
                    .qemu(name, version, &disks)?
                    .cpus(if version == Version::Host { 1 } else { 2 })
                    .launch(&stage.guest)?,
            );
        }
        for vm in &mut guests {
            vm.wait_up(2 * MINUTE, &|line| eprintln!("{line}"))?;
        }
        let done = soak(stage, &mut guests, Duration::from_secs(seconds)).map_err(|error| {
            // Now, while the guests are there: whether a request waits in the guest, the daemon or the disk.
            let status = stage.daemon.cli(&["status"]).map_or_else(|e| format!("{e:#}"), |s| s.to_string());
            guests.iter().fold(error.context(status), |error, vm| vm.explain(error))
        })?;
        for vm in &guests {
            expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        }
        for vm in guests {
            vm.poweroff()?;
        }
        stage.say(format!("{seconds} s without an error: {done:?}"));
        ensure!(done.len() == 5, "not everything was tried: {done:?}");
        stage.expect_clean()
    })
}

/// Everything in turn until the time is over; returns how often each was done.
fn soak(stage: &Stage, guests: &mut [Vm], time: Duration) -> Result<BTreeMap<&'static str, u32>> {
    let mut done = BTreeMap::new();
    let agents: Vec<_> = guests.iter().map(Vm::share_agent).collect();
    let mut players = Vec::new();
    for (agent, name) in agents.iter().zip(NAMES) {
        let images = if name == "anna" { ["anna-reads", "anna-other"] } else { ["bert-reads", "bert-other"] };
        let reads = agent.load(reads(images[0], 8 * MIB))?;
        filled(&reads)?;
        let mixed = agent.load(mixed(&format!("{name}-mixed"), 32 * MIB))?;
        players.push(Player { name, mixed, reads, size: 64 * MIB, images });
    }
    stage.say("both guests are under load");
    let begun = Instant::now();
    let mut turn = 0usize;
    while begun.elapsed() < time {
        let which = turn % 2;
        let player = &mut players[which];
        let what = match turn / 2 % 5 {
            0 => moves(stage, player, turn)?,
            1 => resizes(stage, player)?,
            2 => replaces(stage, player)?,
            3 => plugs(stage, &mut guests[which], player.name)?,
            _ => switches(stage, turn)?,
        };
        *done.entry(what).or_insert(0) += 1;
        stage.expect_clean().with_context(|| format!("after: {what} of {}", player.name))?;
        for load in [&player.mixed, &player.reads] {
            load.progress(MINUTE)?;
            expect_right(&load.mark()?)?;
        }
        turn += 1;
    }
    for (player, agent) in players.into_iter().zip(&agents) {
        for load in [player.mixed, player.reads] {
            let (report, verified) = finish(agent, load)?;
            stage.say(format!("{}: {report:?}, {} blocks verified", player.name, verified.blocks));
        }
    }
    Ok(done)
}

fn moves(stage: &Stage, player: &Player<'_>, turn: usize) -> Result<&'static str> {
    let core = (turn / 10 % 2).to_string();
    for (disk, queue) in [("root", "0"), ("mixed", "0"), ("mixed", "1"), ("reads", "0")] {
        stage.daemon.cli(&["core", "move", &format!("{}-{disk}", player.name), queue, &core])?;
    }
    Ok("queues moved")
}

fn resizes(stage: &Stage, player: &mut Player<'_>) -> Result<&'static str> {
    // Up and down again, never below what the load uses.
    player.size = if player.size >= 256 * MIB { 64 * MIB } else { player.size + 64 * MIB };
    let size = player.size.to_string();
    stage.daemon.cli(&["disk", "resize", &format!("{}-mixed", player.name), &size, "--shrink"])?;
    Ok("disk resized")
}

fn replaces(stage: &Stage, player: &mut Player<'_>) -> Result<&'static str> {
    let [here, there] = player.images.map(|name| stage.image(name).display().to_string());
    ioplane_e2e::process::run("cp", &["--sparse=always", &here, &there])?;
    stage.daemon.cli(&["disk", "replace", &format!("{}-reads", player.name), "--path", &there])?;
    player.images.swap(0, 1);
    Ok("backing replaced")
}

fn plugs(stage: &Stage, vm: &mut Vm, name: &str) -> Result<&'static str> {
    let disk = format!("{name}-guest");
    stage.add_blank(&disk, 16 * MIB, &[])?;
    stage.plug(vm, &disk)?;
    let copied = vm.agent().copy_check(&format!("serial:{disk}"), 0, MIB, MINUTE)?;
    ensure!(copied.same, "{copied:?}");
    stage.unplug(vm, &disk)?;
    stage.daemon.cli(&["disk", "remove", &disk])?;
    Ok("disk added, plugged, unplugged, removed")
}

fn switches(stage: &Stage, turn: usize) -> Result<&'static str> {
    let mode = ["notified", "polled"][turn / 10 % 2];
    stage.daemon.cli(&["core", "mode", mode])?;
    Ok("mode switched")
}
