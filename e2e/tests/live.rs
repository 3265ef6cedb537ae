//! What can be done to a disk while its guest uses it.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, filled, finish, mixed, play, reads};
use ioplane_e2e::{Version, Vm};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const TWO_CORES: &str = "[[core]]\nnotify = \"polled\"\nspin_us = 200\n[[core]]\nnotify = \"notified\"\n";

/// Two vCPUs, a disk with two queues, two I/O cores: one polls, one is notified.
#[test]
fn queues_move_disks_grow_and_change_their_backing_under_load() -> Result<()> {
    play(TWO_CORES, |stage| {
        stage.add_root("root")?;
        stage.add_blank("data", 64 * MIB, &["--queues", "2"])?;
        let vm = stage.boot(stage.qemu("live", Version::Host, &["root", "data"])?.cpus(2))?;
        let tell = |error| vm.explain(error);
        let found = vm.agent().blockdev("serial:data")?;
        ensure!(found.queues == 2, "two vCPUs and two queues, but the guest uses one: {found:?}");
        queues_move(stage, &vm).map_err(tell)?;
        the_disk_grows(stage, &vm).map_err(tell)?;
        the_backing_is_replaced(stage, &vm).map_err(tell)?;
        expect_quiet(vm.agent()).map_err(tell)?;
        vm.poweroff()?;
        stage.expect_clean()
    })
}

fn queues_move(stage: &Stage, vm: &Vm) -> Result<()> {
    let load = vm.agent().load(mixed("data", 32 * MIB))?;
    load.progress(MINUTE)?;
    let (begun, mut moves) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(4) {
        let (queue, core) = ((moves % 2).to_string(), (moves / 2 % 2).to_string());
        stage.daemon.cli(&["core", "move", "data", &queue, &core])?;
        let moved = &stage.daemon.disk("data")?.queues[moves % 2];
        ensure!(
            moved.core == Some((moves / 2 % 2) as u32),
            "the queue is not where it was moved to: {moved:?}"
        );
        moves += 1;
    }
    for mode in ["notified", "polled"] {
        stage.daemon.cli(&["core", "mode", mode])?;
        load.progress(MINUTE)?;
    }
    let (report, _) = finish(vm.agent(), load)?;
    let queues = stage.daemon.disk("data")?.queues;
    ensure!(queues.iter().all(|queue| queue.counts.requests > 0), "a queue has done nothing: {queues:?}");
    stage.say(format!("{moves} moves between two cores under load; {report:?}"));
    Ok(())
}

fn the_disk_grows(stage: &Stage, vm: &Vm) -> Result<()> {
    let load = vm.agent().load(mixed("data", 32 * MIB))?;
    let mut size = 64 * MIB;
    for _ in 0..3 {
        load.progress(MINUTE)?;
        size += 32 * MIB;
        stage.daemon.cli(&["disk", "resize", "data", &format!("{}M", size / MIB)])?;
        // Nobody in the guest asks for it: the configuration interrupt does.
        vm.agent().wait_blockdev("serial:data", MINUTE, |disk| disk.size == size)?;
    }
    ensure!(std::fs::metadata(stage.image("data"))?.len() == size, "the image has not grown");
    let copied = vm.agent().copy_check("serial:data", size - 8 * MIB, 8 * MIB, MINUTE)?;
    ensure!(copied.same, "what lies in the new part: {copied:?}");
    let refused = stage.refused(&["disk", "resize", "data", "64M"])?;
    ensure!(refused.contains("shrink"), "{refused}");
    finish(vm.agent(), load)?;
    stage.say(format!("grown to {} MiB in three steps under load", size / MIB));
    Ok(())
}

/// Read, checked and written meanwhile: what is read before, during and after must be the same.
fn the_backing_is_replaced(stage: &Stage, vm: &Vm) -> Result<()> {
    let (agent, old, new) = (vm.agent(), stage.image("data"), stage.image("copy"));
    let load = agent.load(reads("data", 16 * MIB))?;
    filled(&load)?;
    let (mut here, mut there) = (old.clone(), new.clone());
    for _ in 0..4 {
        copy(&here, &there)?;
        stage.daemon.cli(&["disk", "replace", "data", "--path", text(&there)?])?;
        ensure!(
            stage.daemon.disk("data")?.backing.path.as_deref() == Some(&there),
            "another image is behind it"
        );
        load.progress(MINUTE)?;
        expect_right(&load.mark()?)?;
        (here, there) = (there, here);
    }
    finish(agent, load)?;
    // Written from here on: to the one, and not to the other.
    copy(&here, &there)?;
    let before = std::fs::read(&here)?;
    stage.daemon.cli(&["disk", "replace", "data", "--path", text(&there)?])?;
    let copied = agent.copy_check("serial:data", 0, 4 * MIB, MINUTE)?;
    ensure!(copied.same, "{copied:?}");
    ensure!(std::fs::read(&here)? == before, "the old image was written to after it was replaced");
    let now = agent.sha256("serial:data", 0, 4 * MIB, MINUTE)?;
    ensure!(now == copied.written_sha256, "what was written is not what is there");
    // One that is too small keeps no promise.
    let small = stage.blank("small", MIB)?;
    let refused = stage.refused(&["disk", "replace", "data", "--path", text(&small)?])?;
    stage
        .say(format!("five replacements under checked reads; a smaller one was refused: {}", last(&refused)));
    Ok(())
}

#[test]
fn disks_come_and_go_refuse_and_fail_as_they_should() -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        let mut vm = stage.boot(stage.qemu("guest", Version::Newer, &["root"])?)?;
        for round in 0..3 {
            comes_and_goes(stage, &mut vm, round).map_err(|error| vm.explain(error))?;
        }
        read_only(stage, &mut vm).map_err(|error| vm.explain(error))?;
        discarded(stage, &mut vm).map_err(|error| vm.explain(error))?;
        expect_quiet(vm.agent())?;
        stage.expect_clean()?;
        no_space(stage, &mut vm).map_err(|error| vm.explain(error))?;
        vm.poweroff()
    })
}

fn comes_and_goes(stage: &Stage, vm: &mut Vm, round: u32) -> Result<()> {
    let bytes = 32 * MIB + u64::from(round) * MIB;
    match round {
        // Not every disk is a file.
        1 => stage.daemon.cli(&["disk", "add", "hot", "--memory", &bytes.to_string()]).map(|_| ())?,
        _ => stage.add_blank("hot", bytes, &["--block-size", "4096"])?,
    }
    stage.plug(vm, "hot")?;
    let found = vm.agent().blockdev("serial:hot")?;
    ensure!(found.size == bytes, "{found:?}");
    let sizes = vec![found.logical_block_size.max(4096), 32768];
    let load = vm.agent().load(LoadSpec { block_sizes: sizes, ..mixed("hot", bytes / 2) })?;
    load.progress(MINUTE)?;
    let refused = stage.refused(&["disk", "remove", "hot"])?;
    let (report, _) = finish(vm.agent(), load)?;
    stage.unplug(vm, "hot")?;
    stage.daemon.cli(&["disk", "remove", "hot"])?;
    ensure!(stage.daemon.disk("hot").is_err(), "the disk is still there");
    stage.say(format!(
        "round {round}: plugged, {} requests, not removable in use ({}), unplugged, removed",
        report.requests,
        last(&refused)
    ));
    Ok(())
}

fn read_only(stage: &Stage, vm: &mut Vm) -> Result<()> {
    let image = stage.blank("sealed", 8 * MIB)?;
    std::fs::write(&image, vec![7; 8 * MIB as usize])?;
    stage.add("sealed", &image, &["--read-only"])?;
    stage.plug(vm, "sealed")?;
    let agent = vm.agent();
    ensure!(agent.blockdev("serial:sealed")?.ro, "the guest does not know that the disk is read-only");
    let before = agent.sha256("serial:sealed", 0, 8 * MIB, MINUTE)?;
    match agent.copy_check("serial:sealed", 0, MIB, MINUTE) {
        Ok(done) => anyhow::bail!("a read-only disk took writes: {done:?}"),
        Err(error) => stage.say(format!("a write to a read-only disk: {error:#}")),
    }
    ensure!(before == agent.sha256("serial:sealed", 0, 8 * MIB, MINUTE)?, "a read-only disk has changed");
    ensure!(std::fs::read(&image)?.iter().all(|byte| *byte == 7), "a read-only image has changed");
    stage.unplug(vm, "sealed")?;
    stage.daemon.cli(&["disk", "remove", "sealed"]).map(|_| ())
}

/// What the guest discards, the host gets back; what it zeroes, reads as zeros.
fn discarded(stage: &Stage, vm: &mut Vm) -> Result<()> {
    let bytes = 16 * MIB;
    stage.add_blank("holes", bytes, &[])?;
    stage.plug(vm, "holes")?;
    let agent = vm.agent();
    ensure!(agent.copy_check("serial:holes", 0, bytes, MINUTE)?.same);
    let full = std::fs::metadata(stage.image("holes"))?.blocks();
    let mix = Mix { read: 2, write: 0, sync: 0, discard: 5, zero: 1 };
    let spec = LoadSpec { seconds: None, block_sizes: vec![4096, 262_144], mix, ..mixed("holes", bytes) };
    let load = agent.load(spec)?;
    stage.until("most of the image is holes", || {
        Ok(std::fs::metadata(stage.image("holes"))?.blocks() < full / 2)
    })?;
    let (report, verified) = finish(agent, load)?;
    ensure!(report.discards > 0 && report.zeroes > 0, "{report:?}");
    stage.say(format!("discards gave space back; {} discarded or zeroed blocks are zeros", verified.blocks));
    stage.unplug(vm, "holes")?;
    stage.daemon.cli(&["disk", "remove", "holes"]).map(|_| ())
}

/// A file system of 8 MiB, mounted for a test.
struct Full(std::path::PathBuf);

impl Full {
    fn mount(at: std::path::PathBuf) -> Result<Full> {
        std::fs::create_dir(&at)?;
        ioplane_e2e::process::run("mount", &["-t", "tmpfs", "-o", "size=8m", "ioplane-e2e", text(&at)?])?;
        Ok(Full(at))
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// The host has no space left: an I/O error in the guest, counted by its cause, and not the end of the disk.
fn no_space(stage: &Stage, vm: &mut Vm) -> Result<()> {
    let full = match Full::mount(stage.image("full").with_extension("")) {
        Ok(full) => full,
        Err(error) => {
            eprintln!("SKIPPED: a full file system: no tmpfs can be mounted here: {error:#}");
            return Ok(());
        }
    };
    let image = full.0.join("thin.img");
    std::fs::File::create(&image)?.set_len(32 * MIB)?;
    stage.add("thin", &image, &[])?;
    stage.plug(vm, "thin")?;
    let agent = vm.agent();
    let load = LoadSpec { prefill: true, direct: true, seconds: Some(3), ..mixed("thin", 32 * MIB) };
    let report = agent.load(load)?.wait(MINUTE, |_| {})?;
    ensure!(report.errors > 0, "32 MiB fit in 8: {report:?}");
    ensure!(report.mismatches == 0, "what was acknowledged is gone: {report:?}");
    let errors = stage.daemon.disk("thin")?.totals.errors;
    ensure!(errors.space > 0 && errors.io == 0, "not counted as want of space: {errors:?}");
    let verified = agent.verify("thin", MINUTE)?;
    ensure!(verified.mismatches == 0 && verified.errors == 0, "what was acknowledged is gone: {verified:?}");
    ensure!(!agent.dmesg_errors()?.is_empty(), "the guest's kernel did not hear of it");
    // The host makes room, and it works again.
    ioplane_e2e::process::run("mount", &["-o", "remount,size=64m", text(&full.0)?])?;
    let copied = agent.copy_check("serial:thin", 0, 16 * MIB, MINUTE)?;
    ensure!(copied.same, "{copied:?}");
    stage.say(format!("{} requests failed for want of space; with more of it they work again", errors.space));
    stage.unplug(vm, "thin")?;
    stage.daemon.cli(&["disk", "remove", "thin"]).map(|_| ())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    ioplane_e2e::process::run("cp", &["--sparse=always", text(from)?, text(to)?]).map(|_| ())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8; choose another TMPDIR")
}

fn last(text: &str) -> &str {
    text.lines().last().unwrap_or(text)
}
