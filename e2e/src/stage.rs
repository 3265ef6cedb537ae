//! What a story about guests plays on: a daemon, images, and the loads that every story uses.

use crate::agent::{Agent, RunningLoad};
use crate::assets::Guest;
use crate::daemon::Daemon;
use crate::process::scratch;
use crate::protocol::{LoadSpec, Mix, Report, Verified};
use crate::qemu::Qemu;
use crate::version::Version;
use crate::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long anything in a guest may take.
pub const MINUTE: Duration = Duration::from_secs(60);
/// Memory of each guest.
pub const MEMORY_MIB: u64 = 256;

/// A daemon and a folder for images. Guests that use it must go before it.
#[derive(Debug)]
pub struct Stage {
    pub daemon: Daemon,
    pub guest: Guest,
    images: TempDir,
    begun: Instant,
}

/// Plays a story on a stage with `config`, alone: two cores are enough for one. What went wrong is told with the daemon's last
/// words.
pub fn play(config: &str, story: impl FnOnce(&mut Stage) -> Result<()>) -> Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let guest = Guest::prepare(&|line| eprintln!("{line}"))?;
    let images = scratch("stage")?;
    let mut stage = Stage { daemon: Daemon::start(config)?, guest, images, begun: Instant::now() };
    let outcome = story(&mut stage);
    stage.say("the story ends");
    outcome.map_err(|error| error.context(format!("the daemon's last words:\n{}\n", stage.daemon.log())))
}

impl Stage {
    /// A line in the test's log.
    pub fn say(&self, line: impl AsRef<str>) {
        eprintln!("[{:5.1} s] {}", self.begun.elapsed().as_secs_f64(), line.as_ref());
    }

    /// The error, with what the daemon says of itself while the guest is still there.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let status =
            self.daemon.cli(&["status"]).map_or_else(|e| format!("{e:#}"), |status| status.to_string());
        error.context(format!("the daemon's status:\n{status}\n"))
    }

    pub fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(format!("{name}.img"))
    }

    /// An image of zeros.
    pub fn blank(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.image(name);
        File::create(&path)?.set_len(bytes)?;
        Ok(path)
    }

    pub fn add(&self, name: &str, image: &Path, options: &[&str]) -> Result<()> {
        let path = image.to_str().context("the image's path is not UTF-8; choose another TMPDIR")?;
        let args = [&["disk", "add", name, "--path", path], options].concat();
        self.daemon.cli(&args).map(|_| ())
    }

    /// Adds a disk of zeros.
    pub fn add_blank(&self, name: &str, bytes: u64, options: &[&str]) -> Result<()> {
        self.add(name, &self.blank(name, bytes)?, options)
    }

    /// Adds a disk that boots.
    pub fn add_root(&self, name: &str) -> Result<()> {
        self.guest.copy_to(&self.image(name))?;
        self.add(name, &self.image(name), &[])
    }

    /// Runs a command of `ioplane` that must be refused, and returns what it says.
    pub fn refused(&self, args: &[&str]) -> Result<String> {
        match self.daemon.cli(args) {
            Err(refused) => Ok(format!("{refused:#}")),
            Ok(done) => bail!("ioplane {} should have been refused: {done}", args.join(" ")),
        }
    }

    /// A guest with these disks, the first of which it boots.
    pub fn qemu<'a>(&self, name: &str, version: Version, disks: &[&str]) -> Result<Qemu<'a>> {
        let args = self.daemon.qemu_args(version, MEMORY_MIB, disks)?;
        Ok(Qemu::new(name).version(version).memory_mib(MEMORY_MIB).args(&args))
    }

    /// A QEMU for a guest that comes by migration, with the same disks: behind their migration sockets, or behind the first.
    pub fn destination<'a>(
        &self,
        name: &str,
        version: Version,
        disks: &[&str],
        migration_socket: bool,
    ) -> Result<Qemu<'a>> {
        let words: &[&str] = if migration_socket { &["--migration-socket"] } else { &[] };
        let args = self.daemon.qemu_args_with(version, MEMORY_MIB, disks, words)?;
        Ok(Qemu::new(name).version(version).memory_mib(MEMORY_MIB).args(&args).incoming())
    }

    /// Starts a guest and waits until it is up.
    pub fn boot(&self, qemu: Qemu<'_>) -> Result<Vm> {
        let vm = qemu.news(&|line| eprintln!("{line}")).start(&self.guest)?;
        self.say(format!("{} is up", vm.name()));
        Ok(vm)
    }

    /// Hot-plugs a disk and waits until the guest sees it.
    pub fn plug(&self, vm: &mut Vm, disk: &str) -> Result<()> {
        let version = vm.version().number()?;
        vm.plug(&self.daemon.text(&["qemu-args", disk, "--device-only", "--qemu-version", &version])?)?;
        let device = format!("serial:{disk}");
        vm.agent().wait_blockdev(&device, MINUTE, |found| found.size > 0).map(|_| ())
    }

    /// Unplugs it and waits until guest and daemon have let go of it.
    pub fn unplug(&self, vm: &mut Vm, disk: &str) -> Result<()> {
        vm.unplug(&format!("ioplane-{disk}"))?;
        vm.agent().wait_gone(disk, MINUTE)?;
        self.until(&format!("{disk} is left"), || Ok(!self.daemon.disk(disk)?.connected))
    }

    /// Asks again until it is so.
    pub fn until(&self, what: &str, so: impl FnMut() -> Result<bool>) -> Result<()> {
        until(what, so)
    }

    /// Nobody misbehaved and nothing failed, as the daemon sees it.
    pub fn expect_clean(&self) -> Result<()> {
        let complaints = self.daemon.status()?.complaints();
        ensure!(complaints.is_empty(), "the daemon complains: {complaints:?}");
        Ok(())
    }
}

/// Asks again until it is so.
pub fn until(what: &str, mut so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + MINUTE;
    while !so()? {
        ensure!(Instant::now() < end, "it does not come about within {MINUTE:?} that {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A verified mixed load with everything in it, until it is stopped, on the first `bytes` of the disk with the serial
/// `disk`; it goes by that name.
pub fn mixed(disk: &str, bytes: u64) -> LoadSpec {
    LoadSpec {
        load: disk.into(),
        device: format!("serial:{disk}"),
        seconds: None,
        depth: 8,
        block_sizes: vec![512, 4096, 65536],
        mix: Mix { read: 50, write: 40, sync: 2, discard: 4, zero: 4 },
        bytes,
        ..LoadSpec::default()
    }
}

/// A load that fills the first `bytes` and then only reads, each read checked.
pub fn reads(disk: &str, bytes: u64) -> LoadSpec {
    let mix = Mix { read: 1, write: 0, sync: 0, discard: 0, zero: 0 };
    LoadSpec { prefill: true, direct: true, block_sizes: vec![4096, 16384], mix, ..mixed(disk, bytes) }
}

/// Waits until the load has filled its region: nothing but the mix comes any more.
pub fn filled(load: &RunningLoad<'_>) -> Result<()> {
    let end = Instant::now() + MINUTE;
    while {
        load.progress(MINUTE)?;
        let report = load.mark()?;
        report.writes > 0 || report.reads == 0
    } {
        ensure!(Instant::now() < end, "the load has not filled its region within {MINUTE:?}");
    }
    Ok(())
}

/// Ends a load; nothing must have failed or been wrong, not when all is read once more either.
pub fn finish(agent: &Agent, load: RunningLoad<'_>) -> Result<(Report, Verified)> {
    let name = load.name().to_owned();
    let report = load.stop(MINUTE)?;
    expect_right(&report)?;
    ensure!(report.reads > 0, "the load read nothing: {report:?}");
    let verified = agent.verify(&name, MINUTE)?;
    let right = verified.errors == 0 && verified.mismatches == 0 && verified.blocks > 0;
    ensure!(right, "reading {name} once more: {verified:?}");
    agent.forget(&name)?;
    Ok((report, verified))
}

/// Nothing failed and nothing was wrong.
pub fn expect_right(report: &Report) -> Result<()> {
    ensure!(report.errors == 0 && report.mismatches == 0, "the load went wrong: {report:?}");
    Ok(())
}

/// The guest's kernel has nothing to complain of.
pub fn expect_quiet(agent: &Agent) -> Result<()> {
    let complaints = agent.dmesg_errors()?;
    ensure!(complaints.is_empty(), "the guest's kernel complains: {complaints:?}");
    Ok(())
}
