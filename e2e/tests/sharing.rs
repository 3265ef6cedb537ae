//! One image, two users: refused, with the name of the one who has it. No guest boots.

use anyhow::{Result, ensure};
use ioplane_e2e::process::{Process, scratch};
use ioplane_e2e::stage::{Stage, play};
use ioplane_e2e::version::program;
use ioplane_e2e::{Daemon, Qmp, Version};
use std::ffi::OsString;
use std::path::Path;

fn add(disk: &str, image: &Path) -> Vec<String> {
    ["disk", "add", disk, "--path", &image.display().to_string()].map(str::to_owned).into()
}

fn refused(stage: &Stage, args: &[String]) -> Result<String> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    stage.refused(&args)
}

#[test]
fn an_image_in_use_is_refused_with_the_holders_name() -> Result<()> {
    play("", |stage| {
        let image = stage.blank("shared", 16 << 20)?;
        stage.add("first", &image, &[])?;
        let said = refused(stage, &add("second", &image))?;
        stage.say(format!("two disks of one daemon: {said}"));
        ensure!(said.contains("shared.img") && said.contains("daemon"), "{said}");

        // Another daemon, which serves what else it has, shows this disk as failed with the holder, and tries again.
        let other = Daemon::start(&format!("[[disk]]\nname = \"other\"\npath = \"{}\"\n", image.display()))?;
        let disk = other.disk("other")?;
        let said = disk.error.clone().unwrap_or_default();
        let holder = format!("pid {}", stage.daemon.id().unwrap_or_default());
        stage.say(format!("two daemons: {said}"));
        ensure!(disk.state == "failed" && said.contains(&holder), "no word of {holder}: {disk:?}");
        drop(other);

        // QEMU's own disk on an image that ioplane has, and the other way round.
        for version in [Version::Host, Version::Newer] {
            let folder = scratch("plain")?;
            let mut qemu = plain_qemu(version, &image, folder.path())?;
            let status = qemu.wait(ioplane_e2e::stage::MINUTE)?;
            ensure!(
                !status.success() && qemu.said().contains("lock"),
                "QEMU took the image: {}",
                qemu.said()
            );

            let own = stage.blank("own", 16 << 20)?;
            let mut qemu = plain_qemu(version, &own, folder.path())?;
            // It answers there once everything on its command line is made.
            stage.until("QEMU has its image open", || {
                qemu.still_runs()?;
                Ok(Qmp::connect(&folder.path().join("qmp")).is_ok())
            })?;
            let said = refused(stage, &add("taken", &own))?;
            stage.say(format!("an image of a running {version:?} QEMU: {said}"));
            ensure!(said.contains("qemu-system"), "the holder is not named: {said}");
            qemu.kill();
            stage.add("taken", &own, &[])?;
            stage.daemon.cli(&["disk", "remove", "taken"])?;
        }
        stage.expect_clean()
    })
}

/// A QEMU that has an image open and does not run.
fn plain_qemu(version: Version, image: &Path, folder: &Path) -> Result<Process> {
    let _ = std::fs::remove_file(folder.join("qmp"));
    let line = format!(
        "-S -nodefaults -display none -machine q35 -accel tcg -m 64 -drive if=none,id=d,format=raw,file={} \
         -device virtio-blk-pci,drive=d -qmp unix:{},server=on,wait=off",
        image.display(),
        folder.join("qmp").display()
    );
    let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    let (program, args) = program(version, "qemu-system-x86_64", args, &|line| eprintln!("{line}"))?;
    Process::start(&program, &args, &folder.join("log"))
}
