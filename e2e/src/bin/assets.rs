//! `ioplane-e2e-assets [--qemu] [--boot] | --l1`: makes what test guests are made of, with progress, and says where it is.
//!
//! `--l1` makes what a KVM host in a VM and its guests need, and nothing else. `--qemu` also makes the tree with a newer QEMU, where
//! the host's own is older than 10.1. With `--boot` the guests' disk is booted every way there is, with QEMU's own disks and with
//! qemu-storage-daemon's, without ioplane: what fails there is not ioplane's fault.

use anyhow::{Context, Result, bail, ensure};
use ioplane_e2e::assets::{Guest, Host, host_version, newer_qemu};
use ioplane_e2e::process::scratch;
use ioplane_e2e::stage::{MINUTE, expect_quiet, finish, mixed};
use ioplane_e2e::{Accelerator, Firmware, Qemu, StorageDaemon, Version, Vm};
use std::fs::File;
use std::time::Instant;

const DATA: u64 = 64 << 20;

fn main() -> Result<()> {
    let (mut qemu, mut boot, mut l1) = (false, false, false);
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--qemu" => qemu = true,
            "--boot" => (qemu, boot) = (true, true),
            "--l1" => l1 = true,
            other => bail!("unknown argument {other:?}; usage: ioplane-e2e-assets [--qemu] [--boot] | --l1"),
        }
    }
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    if l1 {
        println!("l1       {}", Host::prepare(&news)?.modules.display());
        return Ok(());
    }
    let guest = Guest::prepare(&news)?;
    println!("disk     {}", guest.disk.display());
    println!("kernel   {}", guest.kernel.display());
    println!("initrd   {}", guest.initrd.display());
    println!("program  {}", guest.program.display());
    println!("guests   run on {}", Accelerator::detect());
    let (major, minor) = host_version()?;
    println!("qemu     {major}.{minor}");
    if qemu {
        match newer_qemu(&news)? {
            Some(tree) => println!("newer    {}", tree.display()),
            None => println!("newer    not needed"),
        }
    }
    if boot {
        for version in [Version::Host, Version::Newer] {
            for firmware in [Firmware::Kernel, Firmware::SeaBios, Firmware::Ovmf] {
                from_files(&guest, firmware, version, &news)
                    .with_context(|| format!("boot by {firmware:?} in the {version:?} QEMU"))?;
                println!("boots    by {firmware:?} in the {version:?} QEMU");
            }
            from_the_peer(&guest, version, &news)
                .with_context(|| format!("run from qemu-storage-daemon in the {version:?} QEMU"))?;
            println!("runs     from qemu-storage-daemon in the {version:?} QEMU");
        }
    }
    Ok(())
}

/// A verified load of some seconds on the second disk, and a guest that complains of nothing.
fn exercise(vm: Vm) -> Result<()> {
    let run = || -> Result<()> {
        let agent = vm.agent();
        let load = agent.load(mixed("data", DATA))?;
        for _ in 0..3 {
            load.progress(MINUTE)?;
        }
        let (report, _) = finish(agent, load)?;
        let all = [report.reads, report.writes, report.discards, report.zeroes];
        ensure!(all.iter().all(|count| *count > 0), "not everything was tried: {report:?}");
        let copied = agent.copy_check("serial:data", 0, 8 << 20, MINUTE)?;
        ensure!(copied.same, "{copied:?}");
        expect_quiet(agent)
    };
    run().map_err(|error| vm.explain(error))?;
    vm.poweroff()
}

fn from_files(guest: &Guest, firmware: Firmware, version: Version, news: &dyn Fn(&str)) -> Result<()> {
    let folder = scratch("boot")?;
    let (root, data) = (folder.path().join("root.img"), folder.path().join("data.img"));
    guest.copy_to(&root)?;
    File::create(&data)?.set_len(DATA)?;
    let qemu = Qemu::new("boot").firmware(firmware).version(version).file(&root, "root").file(&data, "data");
    let vm = qemu.news(news).start(guest)?;
    let hello = vm.hello.as_ref().context("it was up")?;
    ensure!((hello.firmware == "efi") == (firmware == Firmware::Ovmf), "{hello:?}");
    exercise(vm)
}

/// The root disk over vhost-user; the second one is QEMU's, since the peer gives disks no serial.
fn from_the_peer(guest: &Guest, version: Version, news: &dyn Fn(&str)) -> Result<()> {
    let folder = scratch("peer")?;
    let (root, data) = (folder.path().join("root.img"), folder.path().join("data.img"));
    guest.copy_to(&root)?;
    File::create(&data)?.set_len(DATA)?;
    let peer = StorageDaemon::start(version, &root, 1)?;
    let qemu = Qemu::new("peer").version(version).vhost_user(peer.socket(), "root", 1)?.file(&data, "data");
    exercise(qemu.news(news).start(guest)?)
}
