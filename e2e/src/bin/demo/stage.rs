//! What the demo plays on: a daemon with one I/O core, four disks, a switch with two NICs, two guests.

use crate::show::Show;
use anyhow::{Context, Result, anyhow, ensure};
use ioplane_e2e::assets::{Guest, host_version};
use ioplane_e2e::exchange::End;
use ioplane_e2e::process::scratch;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::{Accelerator, Daemon, Qemu, RunningLoad, Version, Vm};
use std::fs::File;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// The guests' second disks.
pub const DATA: [&str; 2] = ["data-a", "data-b"];
pub const NICS: [&str; 2] = ["nic-a", "nic-b"];
const SWITCH: &str = "lan";
const ROOTS: [&str; 2] = ["root-a", "root-b"];
pub const NAMES: [&str; 2] = ["guest-a", "guest-b"];
const DATA_BYTES: u64 = 256 << 20;
/// What the load covers; the copy check takes what lies behind.
const LOAD_BYTES: u64 = 32 << 20;
const COPY_BYTES: u64 = 16 << 20;
const MEMORY_MIB: u64 = 256;
const MINUTE: Duration = Duration::from_secs(60);

/// Everything, to be dropped in this order: guests, daemon, disks.
pub struct Stage {
    guests: Vec<Vm>,
    pub daemon: Daemon,
    pub accelerator: Accelerator,
    _images: TempDir,
}

impl Stage {
    /// Makes the images, starts the daemon, adds disks and NICs, boots the guests.
    pub fn build(show: &Show) -> Result<Stage> {
        let accelerator = Accelerator::detect();
        show.line(&format!("guests run on {accelerator}"));
        show.busy("guests' disks");
        let guest = Guest::prepare(&|line| show.line(line))?;
        let images = scratch("demo")?;
        let image = |name: &str| images.path().join(format!("{name}.img"));
        for name in ROOTS {
            guest.copy_to(&image(name))?;
        }
        for name in DATA {
            File::create(image(name))?.set_len(DATA_BYTES)?;
        }
        show.busy("starting the daemon");
        let daemon = Daemon::start(&configuration())?;
        for name in ROOTS.iter().chain(&DATA) {
            add(&daemon, name, &image(name))?;
        }
        daemon.cli(&["switch", "add", SWITCH])?;
        for name in NICS {
            daemon.cli(&["nic", "add", name, "--switch", SWITCH])?;
        }
        show.line("ioplane serves four disks and two NICs on a switch with one I/O core, notified");
        let mut guests = boot(&daemon, &guest, &accelerator)?;
        show.busy("two guests boot");
        for vm in &mut guests {
            vm.wait_up(MINUTE * accelerator.patience(), &|line| show.busy(line))?;
            let kernel = vm.hello.as_ref().map_or("?", |hello| hello.kernel.as_str());
            let seconds = vm.boot_time.as_secs_f64();
            show.line(&format!(
                "{}: Linux {kernel} is up from its ioplane disk after {seconds:.1} s",
                vm.name()
            ));
        }
        Ok(Stage { guests, daemon, accelerator, _images: images })
    }

    /// Brings the guests' NICs up.
    pub fn connect(&self, show: &Show) -> Result<[End<'_>; 2]> {
        show.busy("the guests bring their NICs up");
        let status = self.daemon.status()?;
        let mut ends = Vec::new();
        for (vm, nic) in self.guests.iter().zip(NICS) {
            ends.push(End::up(vm.agent(), &status.nic(nic)?.mac).map_err(|error| vm.explain(error))?);
        }
        let names: Vec<_> = ends.iter().map(|end| end.interface.address.as_str()).collect();
        show.line(&format!("the guests are on the switch {SWITCH}: {}", names.join(" and ")));
        ends.try_into().map_err(|ends| anyhow!("there are not two ends: {ends:?}"))
    }

    /// Adds what both guests last said to an error.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        self.guests.iter().fold(error, |error, vm| vm.explain(error))
    }

    /// Starts the loads and waits until the disks are filled, so that every read has something to check.
    pub fn start_loads(&self, show: &Show) -> Result<Vec<RunningLoad<'_>>> {
        show.busy("the guests fill their second disks");
        let mut loads = Vec::new();
        for (vm, disk) in self.guests.iter().zip(DATA) {
            let spec = LoadSpec {
                load: disk.into(),
                device: format!("serial:{disk}"),
                seconds: None,
                depth: 8,
                block_sizes: vec![4096, 16384],
                mix: Mix { read: 55, write: 43, sync: 2, discard: 0, zero: 0 },
                bytes: LOAD_BYTES,
                direct: true,
                prefill: true,
                ..LoadSpec::default()
            };
            loads.push(vm.agent().load(spec).map_err(|error| vm.explain(error))?);
        }
        for (load, vm) in loads.iter().zip(&self.guests) {
            // Once it reads it has filled its part; the slowest worker is done when nothing but the mix comes.
            let filled = |progress: ioplane_e2e::protocol::Progress| progress.bytes > LOAD_BYTES;
            while !filled(load.progress(MINUTE).map_err(|error| vm.explain(error))?) {}
        }
        show.line("the guests' second disks are filled; both guests write, sync, read back and check");
        Ok(loads)
    }

    /// Switches all cores while the guests run.
    pub fn switch(&self, mode: &str) -> Result<()> {
        self.daemon.cli(&["core", "mode", mode]).map(|_| ())
    }

    /// All cores are in that mode.
    pub fn expect(&self, mode: &str) -> Result<()> {
        let cores = self.daemon.status()?.cores;
        ensure!(cores.iter().all(|core| core.notify == mode), "the cores are not {mode}: {cores:?}");
        Ok(())
    }

    /// Ends the loads and looks at everything on the disks once more; returns what was wrong.
    pub fn check_disks(&self, loads: Vec<RunningLoad<'_>>, show: &Show) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        for ((load, vm), disk) in loads.into_iter().zip(&self.guests).zip(DATA) {
            show.busy(&format!("{}: reading everything once more", vm.name()));
            let (agent, name) = (vm.agent(), vm.name());
            let report = load.stop(MINUTE).map_err(|error| vm.explain(error))?;
            let verified = agent.verify(disk, MINUTE)?;
            let copied = agent.copy_check(&format!("serial:{disk}"), LOAD_BYTES, COPY_BYTES, MINUTE)?;
            let mut problem = |wrong: bool, text: String| {
                if wrong {
                    problems.push(format!("{name}: {text}"));
                }
            };
            let (errors, wrong) = (report.errors + verified.errors, report.mismatches + verified.mismatches);
            problem(errors > 0, format!("{errors} requests failed: {:?}", report.problems));
            problem(
                wrong > 0,
                format!("{wrong} blocks are wrong: {:?} {:?}", report.problems, verified.problems),
            );
            problem(verified.blocks == 0, "nothing was verified".into());
            problem(!copied.same, format!("what was copied came back different: {copied:?}"));
            let (checked, copied) = (verified.bytes as f64 / 1e6, copied.bytes as f64 / 1e6);
            show.line(&format!(
                "{name}: {} reads checked while it ran, {checked:.0} MB verified, {copied:.0} MB copied, sha256 {}",
                report.reads,
                verified.sha256.get(..16).unwrap_or_default()
            ));
        }
        Ok(problems)
    }

    /// What the guests' kernels and the daemon complain of.
    pub fn complaints(&self) -> Result<Vec<String>> {
        let mut found = self.daemon.status()?.complaints();
        for vm in &self.guests {
            let complaints = vm.agent().dmesg_errors()?;
            if !complaints.is_empty() {
                found.push(format!("{}: its kernel complains: {complaints:?}", vm.name()));
            }
        }
        Ok(found)
    }

    /// Switches the guests off, from inside, and ends the daemon.
    pub fn end(mut self, show: &Show) -> Result<()> {
        show.busy("switching off");
        for vm in self.guests.drain(..) {
            vm.poweroff()?;
        }
        self.daemon.terminate(MINUTE)
    }
}

/// One core. Where it would have a processor to itself it gets the last one; else it shares, and says so by its yield policy.
fn configuration() -> String {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let place =
        if processors > 3 { format!("cpu = {}", processors - 1) } else { "yield_policy = \"yields\"".into() };
    format!("[[core]]\nnotify = \"notified\"\n{place}\n")
}

fn add(daemon: &Daemon, name: &str, image: &Path) -> Result<()> {
    let path = image.to_str().context("the image's path is not UTF-8; choose another TMPDIR")?;
    daemon.cli(&["disk", "add", name, "--path", path]).map(|_| ())
}

fn boot(daemon: &Daemon, guest: &Guest, accelerator: &Accelerator) -> Result<Vec<Vm>> {
    ensure!(
        host_version()? >= (7, 2),
        "QEMU 7.2 or newer is needed; install qemu-system-x86 of Debian 12 or 13"
    );
    let mut guests = Vec::new();
    for (index, name) in NAMES.iter().enumerate() {
        let devices = [ROOTS, DATA, NICS].map(|names| names[index]);
        let args = daemon.qemu_args(Version::Host, MEMORY_MIB, &devices)?;
        let qemu =
            Qemu::new(name).accelerator(accelerator.clone()).memory_mib(MEMORY_MIB).slots(0).args(&args);
        guests.push(qemu.launch(guest)?);
    }
    Ok(guests)
}
