//! The guests' disk boots every way there is, with QEMU's own disks and with the peer's, without ioplane: what fails here is
//! not ioplane's fault.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{Guest, host_version, newer_qemu};
use ioplane_e2e::process::scratch;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::{Firmware, Qemu, StorageDaemon, Version, Vm};
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
const DATA: u64 = 64 << 20;

/// One guest at a time: two cores.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn news(line: &str) {
    eprintln!("{line}");
}

fn data(path: &Path) -> Result<()> {
    Ok(File::create(path)?.set_len(DATA)?)
}

/// A verified load of three seconds on the disk, all of it read again, and a guest that complains of nothing.
fn exercise(vm: &Vm, device: &str) -> Result<()> {
    let agent = vm.agent();
    let spec = LoadSpec {
        load: device.into(),
        device: device.into(),
        seconds: Some(3),
        depth: 8,
        block_sizes: vec![512, 4096, 65536],
        mix: Mix { read: 50, write: 40, sync: 2, discard: 4, zero: 4 },
        ..LoadSpec::default()
    };
    let report = agent.load(spec)?.wait(MINUTE, |progress| news(&format!("{progress:?}")))?;
    news(&format!("{report:?}"));
    ensure!(report.errors == 0 && report.mismatches == 0, "the load failed: {report:?}");
    ensure!(report.reads > 0 && report.writes > 0 && report.discards > 0 && report.zeroes > 0, "{report:?}");
    let verified = agent.verify(device, MINUTE)?;
    ensure!(verified.errors == 0 && verified.mismatches == 0 && verified.blocks > 0, "{verified:?}");
    let copied = agent.copy_check(device, 0, 8 << 20, MINUTE)?;
    ensure!(copied.same, "{copied:?}");
    news(&format!("{copied:?}; {} interrupts", agent.interrupts(device)?));
    let complaints = agent.dmesg_errors()?;
    ensure!(complaints.is_empty(), "the guest's kernel complains: {complaints:?}");
    Ok(())
}

fn boots(firmware: Firmware, version: Version) -> Result<()> {
    let _turn = turn();
    let guest = Guest::prepare(&news)?;
    let folder = scratch("boot")?;
    let (root, disk) = (folder.path().join("root.img"), folder.path().join("data.img"));
    guest.copy_to(&root)?;
    data(&disk)?;
    let qemu = Qemu::new("boot").firmware(firmware).version(version).file(&root, "root").file(&disk, "data");
    let vm = qemu.news(&news).start(&guest)?;
    let hello = vm.hello.as_ref().context("it was up")?;
    ensure!((hello.firmware == "efi") == (firmware == Firmware::Ovmf), "{hello:?}");
    let found = vm.agent().blockdev("serial:data")?;
    ensure!(found.size == DATA && !found.ro && found.write_cache == "write back", "{found:?}");
    exercise(&vm, "serial:data").map_err(|error| vm.explain(error))?;
    vm.poweroff()
}

#[test]
fn by_direct_kernel_boot() -> Result<()> {
    boots(Firmware::Kernel, Version::Host)
}

#[test]
fn by_seabios() -> Result<()> {
    boots(Firmware::SeaBios, Version::Host)
}

#[test]
fn by_ovmf() -> Result<()> {
    boots(Firmware::Ovmf, Version::Host)
}

#[test]
fn by_direct_kernel_boot_in_a_newer_qemu() -> Result<()> {
    boots(Firmware::Kernel, Version::Newer)
}

/// Root disk and a hot-plugged disk from qemu-storage-daemon over vhost-user.
fn runs_from_the_peer(version: Version) -> Result<()> {
    let _turn = turn();
    let guest = Guest::prepare(&news)?;
    let folder = scratch("peer")?;
    let (root, disk) = (folder.path().join("root.img"), folder.path().join("data.img"));
    guest.copy_to(&root)?;
    data(&disk)?;
    let (root, disk) = (StorageDaemon::start(version, &root, 1)?, StorageDaemon::start(version, &disk, 2)?);
    let qemu = Qemu::new("peer").cpus(2).version(version).vhost_user(root.socket(), "root", 1)?.news(&news);
    let mut vm = qemu.start(&guest)?;
    let before = vm.agent().list()?;
    ensure!(before.len() == 1, "{before:?}");
    vm.plug_vhost_user(disk.socket(), "data", 2)?;
    let plugged = vm.agent().wait_blockdev("vdb", MINUTE, |disk| disk.size == DATA)?;
    ensure!(plugged.queues == 2, "{plugged:?}");
    news(&format!("{plugged:?}"));
    exercise(&vm, "vdb").map_err(|error| vm.explain(error))?;
    vm.unplug("data")?;
    ensure!(vm.agent().list()?.len() == 1, "the disk is still there");
    vm.poweroff()
}

#[test]
fn from_the_peer_in_the_hosts_qemu() -> Result<()> {
    runs_from_the_peer(Version::Host)
}

#[test]
fn from_the_peer_in_a_newer_qemu() -> Result<()> {
    let (major, minor) = host_version()?;
    if newer_qemu(&news)?.is_none() {
        // Nothing is skipped: the host's QEMU is the newer one, and the test above ran on it.
        eprintln!("the host's own QEMU {major}.{minor} is new enough");
    }
    runs_from_the_peer(Version::Newer)
}
