//! `ioplane move vm`: drives a QEMU's migration by its monitor. What could not go along is found before anything stops.
//!
//! ```text
//!   look: the VM's disks are of other machines, connected, held; the monitor is that VM's; the other daemon has the same disks
//!     -> migrate -> query-migrate until it has ended (Ctrl-C: migrate_cancel) -> the claims have been given back
//! ```

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::{
    ClaimWord, DiskReport, NicReport, RemoteReport, RemoteWord, ServedState, StatusReport,
};
use ioplane_api::size::Size;
use ioplane_cli::args::MoveVm;
use ioplane_cli::client::Client;
use ioplane_cli::output::{CommandError, hint, print_done};
use ioplane_cli::progress::{ByteBar, interrupted};
use ioplane_plain::plain;
use ioplane_qemu::{Endpoint, Qmp};
use serde::Serialize;
use serde_json::{Value, json};

use crate::vm_monitor::monitor_of;

/// For an answer of the monitor. QEMU's main thread serves it, and is held up while rings stop.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);
/// For the claims to change hands when the guest has gone.
const HANDED_OVER: Duration = Duration::from_secs(60);

/// What has been moved.
#[derive(Debug, Serialize)]
struct MoveReport {
    /// Name of the VM.
    vm: String,
    /// Where to, as QEMU was told.
    to: String,
    /// Its disks of other machines.
    disks: Vec<String>,
    /// From the beginning to the end, as QEMU measured it.
    total_ms: u64,
    /// For how long the guest stood still, as QEMU measured it.
    downtime_ms: u64,
    /// Memory that was sent, repetitions included.
    bytes: u64,
}

pub(crate) fn refused(error: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    CommandError::new(Code::Conflict, error, remedy).into()
}

fn failed(error: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    CommandError::new(Code::CommandFailed, error, remedy).into()
}

/// Moves the VM, or says why not.
pub fn run(client: &Client, args: &MoveVm, json: bool) -> Result<()> {
    let (disks, nics) = devices_of(client.get("/v1/status")?, &args.name)?;
    for disk in &disks {
        may_go(disk)?;
    }
    let there = args.there.as_deref().map(Client::new).transpose()?;
    if let Some(there) = &there {
        is_ready(there, &disks)?;
    }
    let mut monitor = match &args.qmp {
        Some(path) => Monitor::connect(path)?,
        None => found(&args.name, &disks, &nics)?,
    };
    let running = monitor.may_go(&args.name)?;
    let interrupted = interrupted()?;
    monitor.execute("migrate", &json!({ "uri": args.to }))?;
    let ended = monitor.follow(args, &interrupted)?;
    given_back(client, &disks)?;
    // A guest that stands still starts no rings there either.
    if let Some(there) = there.filter(|_| running) {
        taken(&there, &disks)?;
    }
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let report = MoveReport {
        vm: args.name.clone(),
        to: args.to.clone(),
        disks: disks.into_iter().map(|disk| disk.name).collect(),
        total_ms: number(&ended["total-time"]),
        downtime_ms: number(&ended["downtime"]),
        bytes: number(&ended["ram"]["transferred"]),
    };
    if !json {
        hint("the QEMU here has no guest any more: end it, and do not let it continue");
    }
    print_done(json, &report, |report| {
        format!(
            "{} is at {}: {:.1} s, {} sent, the guest stood still for {} ms\n",
            report.vm,
            report.to,
            report.total_ms as f64 / 1000.0,
            Size(report.bytes),
            report.downtime_ms
        )
    })
}

/// The monitor of a VM that nobody has named.
fn found(vm: &str, disks: &[DiskReport], nics: &[NicReport]) -> Result<Monitor> {
    let named = disks.iter().filter_map(|disk| disk.backing.remote.as_ref()?.qmp.clone()).collect();
    let reports = disks.iter().map(|disk| &disk.vm).chain(nics.iter().map(|nic| &nic.vm));
    let processes: BTreeSet<u32> = reports.flatten().map(|report| report.pid).collect();
    let mut monitor = Monitor::connect_to(&monitor_of(vm, &named, &processes)?)?;
    // The monitor was found, or named earlier for a disk: it has to say itself that it is this VM's.
    monitor.is_surely_of(vm)?;
    Ok(monitor)
}

/// The disks and NICs of this daemon that a VM uses; an error if there are none.
pub(crate) fn devices_of(status: StatusReport, vm: &str) -> Result<(Vec<DiskReport>, Vec<NicReport>)> {
    let of_it = |report: &Option<ioplane_api::report::VmReport>| {
        report.as_ref().is_some_and(|report| report.name == vm)
    };
    let nics: Vec<NicReport> = status.nics.into_iter().filter(|nic| of_it(&nic.vm)).collect();
    let disks: Vec<DiskReport> = status.disks.into_iter().filter(|disk| of_it(&disk.vm)).collect();
    if disks.is_empty() && nics.is_empty() {
        let error = format!("no VM {vm} uses a disk or a NIC of this daemon");
        return Err(CommandError::new(Code::NotFound, error, "`ioplane status` shows the VMs").into());
    }
    Ok((disks, nics))
}

/// The part of a disk's report that says how it stands with its server.
pub(crate) fn remote(disk: &DiskReport) -> Result<&RemoteReport> {
    let name = &disk.name;
    disk.backing.remote.as_ref().ok_or_else(|| {
        let (error, remedy) = match disk.backing.kind.as_str() {
            "memory" => (
                format!("disk {name} is memory of this host's daemon, and would not go along"),
                format!(
                    "put it where the other host can reach it: ioplane swap {name} --to nbds://HOST/EXPORT"
                ),
            ),
            _ => (
                format!("disk {name} is an image of this host, and would not go along"),
                format!(
                    "publish it first, for the other host: ioplane move prepare --publish, or ioplane publish disk EXPORT --disk {name} --allow HOST; or \
                     swap it to a disk of another machine: ioplane swap {name} --to nbds://HOST/EXPORT"
                ),
            ),
        };
        refused(error, remedy)
    })
}

/// Whether a disk is served, and nothing is being done with it.
pub(crate) fn is_settled(disk: &DiskReport) -> Result<()> {
    let name = &disk.name;
    if disk.state != ServedState::Served {
        return Err(refused(format!("disk {name} is not served"), format!("see `ioplane disk show {name}`")));
    }
    if disk.swap.as_ref().is_some_and(|swap| swap.state.is_under_way()) {
        return Err(refused(
            format!("disk {name} is being swapped"),
            format!("wait for it, or cancel it: ioplane swap {name} --cancel"),
        ));
    }
    Ok(())
}

/// Whether the guest may stop using this disk here and go on with it elsewhere.
pub(crate) fn may_go(disk: &DiskReport) -> Result<()> {
    is_settled(disk)?;
    let name = &disk.name;
    let remote = remote(disk)?;
    let why = remote.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
    if remote.state != RemoteWord::Connected {
        return Err(refused(
            format!("the server of disk {name} is {}{why}", remote.state.words()),
            "requests that have no answer cannot go along: wait until it is connected again",
        ));
    }
    match remote.claim {
        ClaimWord::Held => Ok(()),
        ClaimWord::None if disk.read_only => Ok(()),
        ClaimWord::None => {
            hint(format!("the server of disk {name} keeps no claims: that one host writes is up to QEMU"));
            Ok(())
        }
        _ => Err(refused(
            format!("disk {name} does not hold its export: nobody uses it, or another one does"),
            format!("see `ioplane disk show {name}`"),
        )),
    }
}

/// Whether a disk of the other daemon is the same disk for a guest, and another importer of the same image.
pub(crate) fn is_same(disk: &DiskReport, other: &DiskReport) -> Result<()> {
    let name = &disk.name;
    let here = remote(disk)?;
    let same = |remote: &RemoteReport| {
        // The boot of the exporter's host is behind the `@`, and may have changed between two looks.
        let image = |remote: &RemoteReport| {
            let instance = remote.instance.clone()?;
            instance.split_once('@').map(|(image, _)| image.to_owned())
        };
        image(remote) == image(here)
    };
    if other.size != disk.size || !other.backing.remote.as_ref().is_some_and(same) {
        return Err(refused(
            format!("disk {name} of the other host is another one"),
            format!("compare `ioplane disk show {name}` on both hosts"),
        ));
    }
    if other.read_only != disk.read_only || other.queues.len() != disk.queues.len() {
        return Err(refused(
            format!("disk {name} of the other host has other options"),
            "give it the same queues and the same --read-only on both hosts",
        ));
    }
    Ok(())
}

/// Whether the other daemon has the same disks, with a QEMU that waits for them.
fn is_ready(there: &Client, disks: &[DiskReport]) -> Result<()> {
    let status: StatusReport = there.get("/v1/status")?;
    for disk in disks {
        let name = &disk.name;
        let Some(other) = status.disks.iter().find(|other| other.name == *name) else {
            return Err(refused(
                format!("the other host has no disk {name}"),
                "add it there: ioplane move prepare, then start QEMU with -incoming",
            ));
        };
        is_same(disk, other)?;
        if !other.connected {
            return Err(refused(
                format!("no QEMU of the other host uses disk {name} yet"),
                format!("start it there with -incoming, and what `ioplane qemu-args {name}` prints there"),
            ));
        }
    }
    Ok(())
}

/// The monitor of the VM that moves.
pub(crate) struct Monitor {
    qmp: Qmp,
    path: String,
}

impl Monitor {
    pub(crate) fn connect(path: &Path) -> Result<Monitor> {
        Monitor::connect_to(&Endpoint::here(path))
    }

    fn connect_to(place: &Endpoint) -> Result<Monitor> {
        let shown = place.to_string();
        let qmp = Qmp::connect(place, PATIENCE).map_err(|error| {
            failed(
                format!("the monitor at {shown}: {error}"),
                "give the socket of -qmp; it serves one client at a time",
            )
        })?;
        Ok(Monitor { qmp, path: shown })
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.qmp.execute(command, arguments).map_err(|error| {
            failed(
                format!("the monitor at {}: {error}", self.path),
                "see what QEMU says, and whether the VM runs",
            )
        })
    }

    /// As [`Monitor::is_of`], where a VM without a name may be any.
    pub(crate) fn is_surely_of(&mut self, vm: &str) -> Result<()> {
        if self.is_of(vm)? {
            return Ok(());
        }
        let error =
            format!("the VM of the monitor at {} has no name, so it may be another than {vm}", self.path);
        Err(refused(error, "start its QEMU with -name"))
    }

    /// Whether it says that it is the VM's; an error if it says that it is another's.
    pub(crate) fn is_of(&mut self, vm: &str) -> Result<bool> {
        let name = self.execute("query-name", &json!({}))?;
        match name["name"].as_str() {
            Some(name) if name != vm => {
                let error = format!("the monitor at {} is that of VM {}", self.path, plain(name));
                Err(refused(error, format!("give the monitor of {vm}")))
            }
            name => Ok(name.is_some()),
        }
    }

    /// Whether it is the VM's, and that can migrate now. Says whether the VM runs.
    fn may_go(&mut self, vm: &str) -> Result<bool> {
        self.is_of(vm)?;
        let status = self.execute("query-status", &json!({}))?;
        let state = status["status"].as_str().unwrap_or_default();
        if !matches!(state, "running" | "paused") {
            let error = format!("VM {vm} is {}", plain(state));
            return Err(refused(error, "only one that runs, or is paused, can move"));
        }
        let migration = self.execute("query-migrate", &json!({}))?;
        if is_under_way(migration["status"].as_str().unwrap_or_default()) {
            let error = format!("a migration of VM {vm} is under way");
            return Err(refused(error, "wait for it, or cancel it where it was begun"));
        }
        let blocked = migration["blocked-reasons"].as_array().and_then(|reasons| reasons.first());
        if let Some(why) = blocked.and_then(Value::as_str) {
            return Err(refused(
                format!("VM {vm} cannot migrate: {}", plain(why)),
                "take that device out of the VM",
            ));
        }
        Ok(state == "running")
    }

    /// Shows how far it is until it has ended, and what QEMU says of it then.
    fn follow(&mut self, args: &MoveVm, interrupted: &AtomicBool) -> Result<Value> {
        let bar = ByteBar::new()?;
        let mut cancelled = false;
        loop {
            let now = self.execute("query-migrate", &json!({}))?;
            let status = now["status"].as_str().unwrap_or_default();
            let ram = |field: &str| now["ram"][field].as_u64().unwrap_or(0);
            match status {
                "completed" => {
                    bar.clear();
                    return Ok(now);
                }
                "failed" | "cancelled" => {
                    bar.clear();
                    let why =
                        now["error-desc"].as_str().map_or(String::new(), |why| format!(": {}", plain(why)));
                    return Err(self.stayed(&args.name, status == "cancelled", &why));
                }
                _ => {}
            }
            if interrupted.load(Ordering::SeqCst) && !cancelled {
                cancelled = true;
                self.execute("migrate_cancel", &json!({}))?;
            }
            let words = if cancelled { "cancelling" } else { status };
            bar.show(ram("total").saturating_sub(ram("remaining")), ram("total"), words.to_owned());
            std::thread::sleep(LOOK);
        }
    }

    /// It has not moved. Says whether it runs.
    fn stayed(&mut self, vm: &str, cancelled: bool, why: &str) -> anyhow::Error {
        let state = self.execute("query-status", &json!({})).ok();
        let running = state.as_ref().and_then(|state| state["running"].as_bool());
        let remedy = match running {
            Some(true) => "it runs here as before",
            Some(false) => {
                "it is here, and does not run: `cont` by its monitor lets it go on, if the other QEMU is gone"
            }
            None => "its monitor does not answer: see whether it runs",
        };
        match cancelled {
            true => refused(format!("the move of VM {vm} was cancelled{why}"), remedy),
            false => failed(format!("VM {vm} did not move{why}"), remedy),
        }
    }
}

/// Whether `query-migrate` speaks of a migration that has not ended.
fn is_under_way(status: &str) -> bool {
    !matches!(status, "" | "none" | "completed" | "failed" | "cancelled")
}

/// Waits until all disks are so, of which there may be reports; says which is not, and why.
pub(crate) fn until(
    client: &Client,
    disks: &[DiskReport],
    met: impl Fn(&RemoteReport) -> bool,
) -> Result<(), (String, String)> {
    let end = Instant::now() + HANDED_OVER;
    loop {
        let now: Vec<DiskReport> =
            client.get("/v1/disks").map_err(|error| (String::new(), format!("{error:#}")))?;
        let mut late = disks.iter().filter_map(|disk| {
            let report = now.iter().find(|now| now.name == disk.name)?.backing.remote.as_ref()?;
            (!met(report)).then(|| {
                let why = report.claim_why.clone().or_else(|| report.why.clone());
                (disk.name.clone(), why.unwrap_or_else(|| "it is still under way".to_owned()))
            })
        });
        match late.next() {
            None => return Ok(()),
            Some(late) if Instant::now() >= end => return Err(late),
            Some(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Until this host holds none of the disks any more.
fn given_back(client: &Client, disks: &[DiskReport]) -> Result<()> {
    let free = |remote: &RemoteReport| !matches!(remote.claim, ClaimWord::Held | ClaimWord::Releasing);
    until(client, disks, free).map_err(|(disk, why)| {
        failed(
            format!("the VM has moved, and this host still holds disk {disk}: {why}"),
            format!("its requests wait there; see `ioplane disk show {disk}` here"),
        )
    })
}

/// Until the other one does.
fn taken(there: &Client, disks: &[DiskReport]) -> Result<()> {
    let held = |remote: &RemoteReport| matches!(remote.claim, ClaimWord::Held | ClaimWord::None);
    until(there, disks, held).map_err(|(disk, why)| {
        failed(
            format!("the VM has moved, and the other host does not hold disk {disk}: {why}"),
            format!("see `ioplane disk show {disk}` there"),
        )
    })
}
