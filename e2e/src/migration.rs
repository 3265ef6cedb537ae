//! Guests that move from one QEMU to another while they run, and what of their memory arrives.

use crate::daemon::Daemon;
use crate::process::Process;
use crate::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a migration may take under a translator, on two cores, under load.
const LIMIT: Duration = Duration::from_secs(120);
/// How long the guest may stand still, in ms: long enough that a migration under load comes to its end.
pub const DOWNTIME: u64 = 2000;
/// Bytes a second: more than a socket takes.
pub const BANDWIDTH: u64 = 4 << 30;
const PAGE: usize = 4096;

/// How a migration went, as QEMU says.
#[derive(Clone, Debug)]
pub struct Travelled {
    /// The guest stood still for this long.
    pub downtime: Duration,
    /// From the command to the end.
    pub total: Duration,
    /// Passes over the dirty pages.
    pub passes: u64,
}

/// What `ioplane move vm --json` says of a move.
#[derive(Clone, Debug, Deserialize)]
pub struct MoveReport {
    pub vm: String,
    pub disks: Vec<String>,
    pub total_ms: u64,
    /// As QEMU measured it.
    pub downtime_ms: u64,
    pub bytes: u64,
}

/// `ioplane move vm` of a guest with PCI functions, to the QEMU `there`.
pub struct Move {
    args: Vec<OsString>,
    log: PathBuf,
}

impl Move {
    /// To where `next`, a QEMU of the host `there`, waits.
    pub fn of(vm: &Vm, here: &Daemon, uri: &str, there: &Daemon, next: &Vm) -> Result<Move> {
        let (socket, monitor) = (there.socket(), next.monitor());
        Move::by(vm, here, uri, ["--there".into(), socket.into(), "--qmp-there".into(), monitor.into()])
    }

    /// The same where the hosts know each other by their certificates ([`crate::hosts::know_each_other`]), and the one there expects the guest, once.
    pub fn by_certificate(vm: &Vm, here: &Daemon, uri: &str, there: &Daemon, next: &Vm) -> Result<Move> {
        let at = format!("127.0.0.1:{}", crate::libvirt::free_port()?);
        let monitor = next.monitor().display().to_string();
        let [from, name] = crate::hosts::NAMES;
        there.cli(&["move", "expect", vm.name(), "--from", from, "--qmp", &monitor, "--listen", &at])?;
        Move::by(vm, here, uri, ["--there", &at, "--tls-hostname", name].map(OsString::from))
    }

    fn by(vm: &Vm, here: &Daemon, uri: &str, way: [OsString; 4]) -> Result<Move> {
        let mut args: Vec<OsString> = vec!["--socket".into(), here.socket().into()];
        args.extend(["move", "vm", vm.name(), "--json", "--to", uri, "--qmp"].map(OsString::from));
        args.push(vm.monitor().into());
        args.extend(way);
        let log = vm.folder().join("move.log");
        let _ = std::fs::remove_file(&log);
        Ok(Move { args, log })
    }

    /// Begins.
    pub fn begin(self) -> Result<Moving> {
        let binary = crate::daemon::binary()?.display().to_string();
        Ok(Moving { process: Process::start(&binary, &self.args, &self.log)? })
    }

    /// Carries it out; what it reports.
    pub fn done(self) -> Result<Value> {
        let mut moving = self.begin()?;
        let status = moving.process.wait(LIMIT)?;
        let said = moving.process.wrote();
        ensure!(status.success(), "ioplane move vm ended with {status}: {said}");
        serde_json::from_str(&said).with_context(|| format!("ioplane move vm prints no JSON: {said}"))
    }
}

/// One that is under way.
pub struct Moving {
    process: Process,
}

impl Moving {
    /// It stands still.
    pub fn stop(&self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// It goes on.
    pub fn go_on(&self) -> Result<()> {
        self.process.signal(Signal::CONT)
    }

    /// Ctrl-C.
    pub fn interrupt(&self) -> Result<()> {
        self.process.interrupt()
    }

    /// It ends with an error, which it says.
    pub fn refused(mut self) -> Result<String> {
        let status = self.process.wait(LIMIT)?;
        let said = self.process.said();
        ensure!(!status.success(), "it should have been refused: {said}");
        Ok(said)
    }
}

impl Vm {
    /// Has this QEMU, made with [`crate::Qemu::incoming`], wait for a guest that goes on as soon as it is there. Returns where it waits.
    pub fn expect_guest(&mut self) -> Result<String> {
        let uri = format!("unix:{}", self.folder().join("incoming").display());
        self.qmp().execute("migrate-incoming", json!({ "uri": uri }))?;
        self.qmp().execute("cont", json!({}))?;
        Ok(uri)
    }

    /// How many bytes a second a migration of this guest may take, and how many ms the guest may stand still then.
    pub fn pace(&mut self, bandwidth: u64, downtime: u64) -> Result<()> {
        let how = json!({ "max-bandwidth": bandwidth, "downtime-limit": downtime });
        self.qmp().execute("migrate-set-parameters", how).map(|_| ())
    }

    /// Moves the guest from the host `here` by `ioplane move vm` to the QEMU that waits at `to`, whose host has the control socket
    /// `there`. It has gone on there when this returns.
    pub fn move_by_command(&mut self, here: &Daemon, to: &str, there: &Path) -> Result<MoveReport> {
        let (monitor, there) = (self.monitor(), there.display().to_string());
        let monitor = monitor.display().to_string();
        let moved =
            here.cli(&["move", "vm", self.name(), "--qmp", &monitor, "--to", to, "--there", &there])?;
        Ok(serde_json::from_value(moved)?)
    }

    /// Begins to send the guest to `there`, a QEMU made with [`crate::Qemu::incoming`], at `bandwidth` bytes a second; memory is
    /// copied while it runs.
    pub fn begin_to_send(&mut self, there: &mut Vm, bandwidth: u64) -> Result<()> {
        let uri = format!("unix:{}", there.folder().join("incoming").display());
        there.qmp().execute("migrate-incoming", json!({ "uri": uri }))?;
        self.pace(bandwidth, DOWNTIME)?;
        self.qmp().execute("migrate", json!({ "uri": uri })).map(|_| ())
    }

    /// Sends the guest to `there`, and waits until it has arrived. It stands still in both then.
    pub fn send_to(&mut self, there: &mut Vm) -> Result<Travelled> {
        self.begin_to_send(there, BANDWIDTH)?;
        let end = Instant::now() + LIMIT;
        let info = self.wait_migration(&["completed"])?;
        let number = |name: &str| info[name].as_u64().unwrap_or(0);
        while there.qmp().execute("query-status", json!({}))?["status"] == "inmigrate" {
            ensure!(Instant::now() < end, "the guest has left, and does not arrive");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Travelled {
            downtime: Duration::from_millis(number("downtime")),
            total: Duration::from_millis(number("total-time")),
            passes: info["ram"]["dirty-sync-count"].as_u64().unwrap_or(0),
        })
    }

    /// Waits until the migration is in one of these states; any other end is an error.
    pub fn wait_migration(&mut self, wanted: &[&str]) -> Result<Value> {
        let end = Instant::now() + LIMIT;
        loop {
            let info = self.qmp().execute("query-migrate", json!({}))?;
            let status = info["status"].as_str().unwrap_or("none").to_owned();
            if wanted.contains(&status.as_str()) {
                return Ok(info);
            }
            if matches!(status.as_str(), "completed" | "failed" | "cancelled") || Instant::now() >= end {
                bail!("the migration is {status}, not {wanted:?}: {info}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Lets the guest, which has arrived here from `left`, run. The QEMU that it has left ends; who talks to the guest goes on
    /// talking to it.
    pub fn go_on_from(&mut self, mut left: Vm) -> Result<()> {
        let (agent, hello) = (left.share_agent(), left.hello.clone());
        agent.leave();
        left.kill();
        agent.go_on(self.agent())?;
        self.agent_of(agent, hello);
        self.qmp().execute("cont", json!({})).map(|_| ())
    }

    /// The guest's memory, by the descriptor that QEMU has of it.
    fn memory(&self) -> Result<File> {
        let process = format!("/proc/{}", self.id());
        guest_memory(Path::new(&process)).with_context(|| format!("the memory of {}", self.name()))
    }
}

/// The memory of the guest whose QEMU this process is: its folder in `/proc`.
pub fn guest_memory(process: &Path) -> Result<File> {
    let folder = process.join("fd");
    for entry in std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        let link = std::fs::read_link(&path).unwrap_or_default();
        if link.to_string_lossy().contains("memory-backend-memfd") {
            return File::open(&path).with_context(|| format!("open {}", path.display()));
        }
    }
    bail!("no memory-backend-memfd in {}", folder.display())
}

/// Compares the memory of two guests that stand still, page by page: how many pages there are, and the addresses in the
/// file of those that differ.
pub fn compare(here: &Vm, there: &Vm) -> Result<(u64, Vec<u64>)> {
    let (ours, theirs) = (here.memory()?, there.memory()?);
    let size = ours.metadata()?.size();
    ensure!(size == theirs.metadata()?.size(), "the two have memories of different sizes");
    let mut differ = Vec::new();
    let (mut a, mut b) = (vec![0; 256 * PAGE], vec![0; 256 * PAGE]);
    for at in (0..size).step_by(a.len()) {
        let len = a.len().min((size - at) as usize);
        ours.read_exact_at(&mut a[..len], at)?;
        theirs.read_exact_at(&mut b[..len], at)?;
        let pages = a[..len].chunks(PAGE).zip(b[..len].chunks(PAGE)).zip((at..).step_by(PAGE));
        differ.extend(pages.filter(|((a, b), _)| a != b).map(|(_, page)| page));
    }
    Ok((size / PAGE as u64, differ))
}
