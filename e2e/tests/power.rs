//! The power fails at every flush of a guest, and everything that was acknowledged is there when it is back.
//!
//! ```text
//!   L2: Linux, ioplane-load write-stamp ---> L1: ioplane, io_uring or threads, O_DIRECT
//!                                                  |  a block device, or a file on ext4
//!                                               dm-log-writes: what each flush made durable, and a mark for each that the guest heard
//! ```
//!
//! Needs a kernel with dm-log-writes, so it runs in L1. Afterwards the log is replayed to each mark: what is there then is all that a
//! disk with a volatile cache would have. A daemon whose `fdatasync` does nothing loses what it acknowledged.
//! `IOPLANE_POWER_ROUNDS` rounds of stamps, two unless told.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::Guest;
use ioplane_e2e::{L1, Version};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// Bytes of each disk.
const BYTES: u64 = 16 << 20;
/// Blocks that are stamped in a round, a flush after every second.
const COUNT: u64 = 12;
const MEMORY_MIB: u64 = 320;

/// The example; cargo builds examples with the tests of their crate, next to this test's folder.
fn stamps() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("examples/stamps")).find(|path| path.is_file());
    found.context("no example stamps; build it: cargo build -p ioplane-e2e --examples")
}

/// Disks with a log each, in memory: `/dev/mapper/NAME`, its log on `/dev/ramN`.
fn logged(l1: &L1, names: &[&str]) -> Result<()> {
    let modules = l1.host.modules.display();
    let mut script = format!(
        "set -e\nfor module in brd dm-log-writes ext4; do /usr/sbin/modprobe -d {modules} $module rd_nr=8 rd_size=49152 || \
         /usr/sbin/modprobe -d {modules} $module; done\n"
    );
    for (n, name) in names.iter().enumerate() {
        script += &format!(
            "dmsetup create --noudevsync {name} --table '0 {} log-writes /dev/ram{} /dev/ram{}'\n",
            BYTES / 512,
            2 * n,
            2 * n + 1
        );
        script += &format!("dmsetup mknodes {name}; test -b /dev/mapper/{name}\n");
    }
    l1.run(&script, MINUTE).map(drop)
}

#[test]
fn the_power_may_fail_at_any_flush() -> Result<()> {
    if !Path::new("/usr/sbin/dmsetup").exists() {
        let why = "SKIPPED: a power cut under a guest was NOT tested: no dmsetup here (package dmsetup)";
        let _ = writeln!(std::io::stderr(), "{why}");
        return Ok(());
    }
    let rounds = std::env::var("IOPLANE_POWER_ROUNDS").unwrap_or_else(|_| "2".into());
    let rounds: u64 = rounds.trim().parse().with_context(|| format!("IOPLANE_POWER_ROUNDS={rounds}"))?;
    let program = Guest::prepare(&|line| eprintln!("{line}"))?.program;
    let l1 = L1::boot(1800, "", &|line| eprintln!("{line}"))?;
    logged(&l1, &["raw", "file", "loser"])?;
    l1.run(
        "set -e; mke2fs -q -t ext4 /dev/mapper/file; mkdir -p /tmp/ext4; mount /dev/mapper/file /tmp/ext4\n\
             dd if=/dev/zero of=/tmp/ext4/file bs=64k count=16 status=none; sync",
        MINUTE,
    )?;
    let disk = |name: &str, path: &str, engine: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nserial = \"{name}\"\npath = \"{path}\"\nengine = \"{engine}\"\n"
        )
    };
    let core = "[[core]]\nnotify = \"notified\"\n";
    let honest = disk("raw", "/dev/mapper/raw", "io_uring") + &disk("file", "/tmp/ext4/file", "threads");
    let honest = l1.serve("honest", &format!("{core}{honest}"))?;
    let loser = disk("loser", "/dev/mapper/loser", "io_uring");
    let loser = l1.serve_with("loser", &format!("{core}{loser}"), "IOPLANE_WITHOUT_FLUSH=1")?;

    // The guest: its disks, a port for the program, and the program by the shared folder.
    let number = Version::Host.number()?;
    let mut args = format!("-machine q35 -m {MEMORY_MIB} ");
    args += &honest.text(&format!("qemu-args raw --memory {MEMORY_MIB}M --qemu-version {number}"))?;
    args += &format!(" {}", honest.text(&format!("qemu-args file --device-only --qemu-version {number}"))?);
    args += &format!(" {}", loser.text(&format!("qemu-args loser --device-only --qemu-version {number}"))?);
    args += " -chardev socket,id=agent,path=/tmp/agent,server=on,wait=off -device virtio-serial-pci \
             -device virtserialport,chardev=agent,name=org.ioplane.load";
    let guest = l1.debian("guest", &args.replace('\n', " "), "")?;
    std::fs::copy(program, guest.folder().join("ioplane-load"))?;
    guest.start("modprobe virtio_console; chmod 755 /folder/ioplane-load; exec /folder/ioplane-load")?;
    let stamps = stamps()?;
    let stamps = stamps.display();
    let write = format!("{stamps} write /tmp/agent {rounds} {COUNT} raw=raw file=file loser=loser");
    l1.run(&write, (2 * MINUTE).max(Duration::from_secs(15 * rounds)))
        .with_context(|| format!("the daemon has said:\n{}", honest.said()))?;
    // The guest has switched itself off.
    honest.kill()?;
    loser.kill()?;

    l1.run("set -e; umount /tmp/ext4; for name in raw file loser; do dmsetup remove $name; done", MINUTE)?;
    let least = rounds * COUNT / 2;
    let check = |name: &str, log: u32, device: &str| {
        format!("{stamps} check /dev/ram{log} {BYTES} {name} {COUNT} {least} {device}")
    };
    for (name, log, device) in [("raw", 1, ""), ("file", 3, "/dev/ram6")] {
        let said = l1.run(&check(name, log, device), 3 * MINUTE)?;
        eprintln!("{name}: {}", said.trim());
    }
    let lost = l1.start(&check("loser", 5, ""))?.wait(3 * MINUTE)?;
    ensure!(
        lost.status != 0 && lost.output.contains("LOST"),
        "a daemon whose fdatasync does nothing loses nothing: this proves nothing\n{}",
        lost.output
    );
    eprintln!("without fdatasync: {}", lost.output.lines().next().unwrap_or_default());
    Ok(())
}
