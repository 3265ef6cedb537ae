//! `--remote`: a guest whose disk is on another host. That host's daemon is killed and the cable is pulled, and the guest sees pauses. At the end the
//! disk is swapped to an image of this host, and the other one is not needed any more.
//!
//! ```text
//!   this host                                     the far host (a network namespace)
//!   guest --vhost-user--> ioplane --NBD, cable--> ioplane --> data.img
//!     writes, syncs, reads back      1. runs
//!     and checks all the time        2. the far daemon is killed and started again
//!                                    3. the cable is pulled, and plugged in before anybody misses it
//!                                    4. the same for longer than a connection lives
//!                                    5. ioplane swap data --to IMAGE
//!                                    6. the cable is pulled for good
//! ```

mod outcome;

pub use outcome::RemoteOutcome;

use crate::show::Show;
use anyhow::{Context, Result, ensure};

use ioplane_figures::cable::{Cable, FAR};

use ioplane_e2e::process::{ended, scratch};
use ioplane_e2e::protocol::{LoadSpec, Mix, Report};
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, finish, mixed};
use ioplane_e2e::{Accelerator, Daemon, Qemu, RunningLoad, Version, Vm, assets};
use outcome::{Remote, Step};
use serde_json::Value;
use std::fs::File;
use std::time::{Duration, Instant};

const DISK: &str = "data";
const DISK_BYTES: u64 = 64 << 20;
/// What the load covers, filled at first, so that each read has something to check.
const LOAD_BYTES: u64 = 32 << 20;
const RUNS: Duration = Duration::from_secs(5);
/// TCP sends again what the cable has lost.
const SHORT: Duration = Duration::from_secs(3);
/// Longer than the importer takes silence for a lost connection.
const LONG: Duration = Duration::from_secs(14);

/// The guest, its host and the cable, to be dropped in this order.
struct Hosts {
    guest: Vm,
    near: Daemon,
    cable: Cable,
    images: tempfile::TempDir,
}

/// Lays the cable, starts both daemons, boots the guest, and does all of the above to it.
pub fn run(show: &Show) -> Result<RemoteOutcome> {
    let accelerator = Accelerator::detect();
    let (hosts, mut far) = build(&accelerator, show)?;
    let (steps, blocks, remote) = play(&hosts, &mut far, show).map_err(|error| {
        hosts.guest.explain(error).context(format!("this host's daemon: {}", hosts.near.log()))
    })?;
    let complaints = hosts.guest.agent().dmesg_errors()?;
    show.busy("the guest shuts down");
    hosts.guest.poweroff()?;
    Ok(RemoteOutcome::judge(accelerator, steps, blocks, complaints, remote).took(show.seconds()))
}

fn build(accelerator: &Accelerator, show: &Show) -> Result<(Hosts, Daemon)> {
    show.line(&format!("the guest runs on {accelerator}"));
    show.busy("the guest's disks");
    let image = assets::Guest::prepare(&|line| show.line(line))?;
    let images = scratch("demo")?;
    let root = images.path().join("root.img");
    image.copy_to(&root)?;

    let cable = Cable::lay("iopdemo")?;
    let far = Daemon::start_in(cable.space(), "[[core]]\nspin_us = 200\n", |folder| {
        File::create(folder.join("data.img"))?.set_len(DISK_BYTES).context("make an image")
    })?;
    let path = far.folder().join("data.img").display().to_string();
    let listen = format!("{FAR}:10809");
    far.cli(&["publish", "disk", DISK, "--path", &path, "--listen", &listen, "--plain"])?;
    show.line(&format!("the far host publishes {DISK} at {listen}"));
    let near = Daemon::start("[[core]]\nspin_us = 200\n")?;
    near.cli(&["disk", "add", "root", "--path", root.to_str().context("TMPDIR is not UTF-8")?])?;
    near.cli(&["disk", "add", DISK, "--remote", &format!("nbd://{FAR}/{DISK}"), "--queues", "2"])?;
    show.line(&format!("this host has it as a disk: nbd://{FAR}/{DISK}"));

    show.busy("the guest boots");
    let args = near.qemu_args(Version::Host, MEMORY_MIB, &["root", DISK])?;
    let qemu = Qemu::new("guest").version(Version::Host).memory_mib(MEMORY_MIB).args(&args);
    let guest = qemu.news(&|line| show.busy(line)).start(&image)?;
    show.line(&format!("the guest is up after {:.1} s", guest.boot_time.as_secs_f64()));
    Ok((Hosts { guest, near, cable, images }, far))
}

impl Hosts {
    /// What this host's daemon says of the remote disk.
    fn remote(&self) -> Result<Remote> {
        let disk: Value = self.near.cli(&["disk", "show", DISK])?;
        let remote = &disk["backing"]["remote"];
        serde_json::from_value(remote.clone()).with_context(|| format!("no remote disk: {disk}"))
    }

    /// Waits until it is so.
    fn until(&self, what: &str, so: impl Fn(&Remote) -> bool) -> Result<()> {
        let end = Instant::now() + 2 * MINUTE;
        while !so(&self.remote()?) {
            ensure!(!ended(), "interrupted");
            ensure!(Instant::now() < end, "it does not come about that {what}: {:?}", self.remote()?);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Sleeps with something to look at.
fn pause(time: Duration, text: &str, show: &Show) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < time {
        ensure!(!ended(), "interrupted");
        show.progress(begun.elapsed().as_secs_f64() / time.as_secs_f64(), text);
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// What the guest has met since it was asked last. Returns when what waited has ended, and more has come after it.
fn met(load: &RunningLoad<'_>) -> Result<Report> {
    let mut report = load.mark()?;
    let mut marks_left = 2;
    while marks_left > 0 {
        ensure!(!ended(), "interrupted");
        std::thread::sleep(Duration::from_millis(500));
        let more = load.mark()?;
        marks_left -= u32::from(more.requests >= 50);
        report.requests += more.requests;
        report.errors += more.errors;
        report.mismatches += more.mismatches;
        report.max_us = report.max_us.max(more.max_us);
    }
    Ok(report)
}

/// One step is over when requests end again; what it cost the guest.
fn step(
    what: &'static str,
    hosts: &Hosts,
    load: &RunningLoad<'_>,
    before: &Remote,
    show: &Show,
) -> Result<Step> {
    hosts.until("the disk is connected", |remote| remote.state == "connected")?;
    let report = met(load)?;
    let now = hosts.remote()?;
    let step =
        Step::of(what, &report).with_connections(now.losses - before.losses, now.replays - before.replays);
    show.line(&step.sentence());
    Ok(step)
}

/// The steps, how many blocks were read once more at the end and were right, and the remote disk when it was left.
fn play(hosts: &Hosts, far: &mut Daemon, show: &Show) -> Result<(Vec<Step>, u64, Remote)> {
    let guest = &hosts.guest;
    let spec = LoadSpec {
        block_sizes: vec![4096, 16384],
        mix: Mix { read: 50, write: 46, sync: 2, discard: 1, zero: 1 },
        direct: true,
        prefill: true,
        ..mixed(DISK, LOAD_BYTES)
    };
    show.busy("the guest fills its disk");
    let load = guest.agent().load(spec)?;
    while load.progress(MINUTE)?.bytes <= LOAD_BYTES {
        ensure!(!ended(), "interrupted");
    }
    load.mark()?;
    show.line("the guest has filled its disk; it writes, syncs, reads back and checks");

    let mut steps = Vec::new();
    let before = hosts.remote()?;
    pause(RUNS, "the guest uses the disk of the other host", show)?;
    steps.push(step("undisturbed", hosts, &load, &before, show)?);

    let before = hosts.remote()?;
    show.busy("the far daemon is killed (SIGKILL) and started again");
    far.kill9();
    hosts.until("the disk is missed", |remote| remote.state == "reconnecting")?;
    far.restart()?;
    expect_published(far)?;
    steps.push(step("far daemon killed", hosts, &load, &before, show)?);

    for (what, time) in [("cable pulled for 3 s", SHORT), ("cable pulled for 14 s", LONG)] {
        let before = hosts.remote()?;
        hosts.cable.pull()?;
        pause(time, "the cable is pulled; the guest's requests wait", show)?;
        hosts.cable.plug()?;
        steps.push(step(what, hosts, &load, &before, show)?);
    }

    let left = hosts.remote()?;
    let local = hosts.images.path().join("data.img");
    show.busy("ioplane swap data --to an image of this host");
    hosts.near.cli(&["swap", DISK, "--to", local.to_str().context("TMPDIR is not UTF-8")?])?;
    let swapped = Step::of("swapped to a local image", &met(&load)?);
    show.line(&swapped.sentence());
    hosts.cable.pull()?;
    pause(RUNS, "the cable is pulled for good", show)?;
    let pulled = Step::of("cable pulled for good", &met(&load)?);
    show.line(&pulled.sentence());
    steps.extend([swapped, pulled]);

    show.busy("reading everything once more");
    let (_, verified) = finish(guest.agent(), load)?;
    Ok((steps, verified.blocks, left))
}

/// What was published by command is in the daemon's state, so it is there again.
fn expect_published(far: &Daemon) -> Result<()> {
    let exports = far.cli(&["publish", "list"])?;
    ensure!(exports.as_array().is_some_and(|exports| exports.len() == 1), "after a restart: {exports}");
    Ok(())
}
