//! `ioplane move vm`: drives a QEMU's migration by its monitor. What could not go along is found before anything stops.
//!
//! ```text
//!   look: the VM's disks are of other machines, connected, held; the monitor is that VM's; the other daemon has the same disks and PCI functions
//!     -> migrate -> query-migrate until it has ended (Ctrl-C: migrate_cancel) -> the claims have been given back
//! ```
//!
//! With PCI functions the guest is taken along in more steps: [`functions`]. Of these a migration that somebody else drives is attended by `ioplane move attend`.

mod bus;
mod disks;
mod functions;
mod guard;
mod journal;
mod monitor;
mod peer;
mod ready;
mod recover;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use ioplane_api::refusal::{Code, RefusalBody};
use ioplane_api::report::{DiskReport, FunctionReport, NicReport, StatusReport, VmReport};
use ioplane_api::request::MoveNoteForm;
use ioplane_api::size::Size;
use ioplane_cli::args::{Destination, MoveAttend, MoveVm};
use ioplane_cli::client::Client;
use ioplane_cli::output::{CommandError, hint, print_done};
use ioplane_cli::progress::told_to_end;
use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use self::disks::{is_same, is_settled, may_go, remote, until};
use self::functions::{DeviceTime, Functions, Moved, MovedFunction};
use self::monitor::Followed;
pub(crate) use self::monitor::Monitor;
use self::peer::Reached;
use self::ready::Far;
pub(crate) use self::recover::run as recover;
use crate::vm_monitor::monitor_of;

/// Where a VM goes that somebody else moves: only QEMU was told.
const ELSEWHERE: &str = "the other host";
/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);
/// For a step of a PCI function at a daemon; none takes longer than 4 s.
const STEP: Duration = Duration::from_secs(20);

/// What has been moved.
#[derive(Debug, Serialize)]
struct MoveReport {
    /// Name of the VM.
    vm: String,
    /// Where to, as QEMU was told.
    to: String,
    /// Its disks of other machines.
    disks: Vec<String>,
    /// Its PCI functions.
    functions: Vec<MovedFunction>,
    /// From the beginning to the end, as QEMU measured it.
    total_ms: u64,
    /// For how long the guest stood still, as QEMU measured it: without what its PCI functions took after that.
    downtime_ms: u64,
    /// What its PCI functions took of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_time: Option<DeviceTime>,
    /// Memory that was sent, repetitions included.
    bytes: u64,
}

pub(crate) fn refused(error: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    CommandError::new(Code::Conflict, error, remedy).into()
}

fn failed(error: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    CommandError::new(Code::CommandFailed, error, remedy).into()
}

/// The same error with what it means before it, and what else to do behind it.
fn with_remedy(error: anyhow::Error, before: &str, more: &str) -> anyhow::Error {
    let mut body = match error.downcast::<CommandError>() {
        Ok(CommandError(body)) => body,
        Err(other) => RefusalBody::new(Code::CommandFailed, format!("{other:#}"), ""),
    };
    body.error = format!("{before}: {}", body.error);
    body.detail.clone_from(&body.error);
    let remedies = [body.remedy.as_str(), more];
    body.remedy = remedies.into_iter().filter(|remedy| !remedy.is_empty()).collect::<Vec<_>>().join("; ");
    CommandError(body).into()
}

/// Moves the VM, or says why not.
pub fn run(client: &Client, args: &MoveVm, json: bool) -> Result<()> {
    go(client, args, Driver::Own, json)
}

/// Brings the PCI functions of a VM along when somebody else migrates it, or says why not.
pub fn attend(client: &Client, args: &MoveAttend, json: bool) -> Result<()> {
    let MoveAttend { name, qmp, there, tls_hostname, qmp_there, libvirt } = args.clone();
    let to = Destination { uri: ELSEWHERE.to_owned(), host: None };
    let driver = if libvirt { Driver::Libvirt } else { Driver::Other };
    go(client, &MoveVm { name, qmp, to, there: Some(there), tls_hostname, qmp_there }, driver, json)
}

/// Who drives the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    /// This command.
    Own,
    /// Somebody else, who leaves the switch-over to this command.
    Other,
    /// Somebody else, who does not wait for it.
    Libvirt,
}

fn go(client: &Client, args: &MoveVm, driver: Driver, json: bool) -> Result<()> {
    let attended = driver != Driver::Own;
    let late = driver == Driver::Libvirt;
    let vm = args.name.as_str();
    let status: StatusReport = client.get("/v1/status")?;
    let own = status.pid;
    let devices = devices_of(status, vm)?;
    devices.disks.iter().try_for_each(may_go)?;
    devices.functions.iter().try_for_each(ready::may_leave)?;
    if attended && devices.functions.is_empty() {
        let remedy = "migrate it: its disks and NICs need nobody who attends";
        return Err(refused(format!("VM {vm} has no PCI functions of this daemon"), remedy));
    }
    let reached = Reached::of(client, args, !devices.functions.is_empty())?;
    let there = reached.daemon()?;
    if let Some(there) = there.as_ref().filter(|_| !late) {
        disks::is_ready(there, &devices.disks)?;
    }
    let mut monitor = match &args.qmp {
        Some(path) => Monitor::connect(path)?,
        None => found(vm, &devices)?,
    };
    let steps = Client::new(client.socket())?.with_patience(STEP);
    let moving = match &devices.functions[..] {
        [] => None,
        reports => {
            monitor.is_surely_of(vm)?;
            let version = monitor.execute("query-version", &json!({}))?;
            let (reached, there) = (&reached, there.as_ref());
            let far = match there.filter(|_| late) {
                Some(there) => Far::later(vm, (reports, &devices.disks), there, reached, &version, own)?,
                None => {
                    let (there, monitor) = Far::look(vm, reports, there, reached, &version, own)?;
                    Far { there, monitor: Some(monitor), late: None }
                }
            };
            let pid = reports.iter().find_map(|report| report.vm.as_ref()).map_or(0, |vm| vm.pid);
            let sockets = [reached.there.as_deref(), reached.qmp_there.as_deref()];
            let [socket, qmp_there] = sockets.map(|path| path.map(absolute).transpose());
            let (socket, qmp_there) = (socket?.unwrap_or_default(), qmp_there?.unwrap_or_default());
            let qmp = absolute(Path::new(monitor.place()))?.display().to_string();
            let note = journal::blank(pid, &args.to.uri, &qmp, socket, qmp_there);
            let note = MoveNoteForm { peer: reached.form.clone(), ..note };
            Some(Functions::look(vm, reports, &steps, &mut monitor, far, note)?)
        }
    };
    let mut running = monitor.may_go(vm, |why| moving.as_ref().is_some_and(|moving| moving.removes(why)))?;
    if late && !running {
        return Err(refused(
            format!("VM {vm} is paused: QEMU waits for no vCPU of it when it is handed over"),
            "have it run first, or migrate it by `ioplane move vm`",
        ));
    }
    let interrupted = told_to_end()?;
    let (ended, functions, device_time) = match moving {
        None => {
            monitor.execute("migrate", &json!({ "uri": args.to.uri }))?;
            match monitor.follow("completed", LOOK, &interrupted, None, None)? {
                Followed::There(ended) => (ended, Vec::new(), None),
                Followed::Ended { cancelled, why } => return Err(monitor.stayed(vm, cancelled, &why)),
            }
        }
        Some(moving) => {
            let uri = (!attended).then_some(args.to.uri.as_str());
            let Moved { ended, functions, time, running: ran } =
                moving.go(&mut monitor, uri, running, &interrupted)?;
            running = ran;
            (ended, functions, Some(time))
        }
    };
    disks::given_back(client, &devices.disks)?;
    // A guest that stands still starts no rings there either.
    if let Some(there) = there.as_ref().filter(|_| running) {
        disks::taken(there, &devices.disks)?;
    }
    if let Some(there) = &there {
        reached.settled(there);
    }
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let report = MoveReport {
        vm: vm.to_owned(),
        to: args.to.uri.clone(),
        disks: devices.disks.into_iter().map(|disk| disk.name).collect(),
        functions,
        total_ms: number(&ended["total-time"]),
        downtime_ms: number(&ended["downtime"]),
        device_time,
        bytes: number(&ended["ram"]["transferred"]),
    };
    if !json && !late {
        hint("the QEMU here has no guest any more: end it, and do not let it continue");
    }
    print_done(json, &report, shown)
}

fn shown(report: &MoveReport) -> String {
    // What QEMU measured ends before its PCI functions go on.
    let stood_still =
        report.device_time.as_ref().map_or(report.downtime_ms as f64, |time| time.stood_still_ms);
    let mut text = format!(
        "{} is at {}: {:.1} s, {} sent, the guest stood still for {stood_still:.0} ms\n",
        report.vm,
        report.to,
        report.total_ms as f64 / 1000.0,
        Size(report.bytes),
    );
    for function in &report.functions {
        let MovedFunction { name, mode, state_bytes, pages_sent, stop_accesses, replay_accesses, .. } =
            function;
        text.push_str(&format!(
            "  {name}, {mode}: {state_bytes} bytes of state, {pages_sent} pages sent once more"
        ));
        if stop_accesses + replay_accesses > 0 {
            text.push_str(&format!(
                ", {stop_accesses} register accesses to stop and {replay_accesses} to replay"
            ));
        }
        text.push('\n');
        if function.brought_back == Some(false) {
            text.push_str(&format!(
                "  the guest's driver has not brought PCI function {name} back yet: see `ioplane pci show {name}` there, and the guest's kernel log\n"
            ));
        }
    }
    text
}

/// The same from wherever it is asked for.
fn absolute(path: &Path) -> Result<PathBuf> {
    Ok(std::path::absolute(path)?)
}

/// The monitor of a VM that nobody has named.
fn found(vm: &str, devices: &VmDevices) -> Result<Monitor> {
    let named = devices.disks.iter().filter_map(|disk| disk.backing.remote.as_ref()?.qmp.clone()).collect();
    let disks = devices.disks.iter().map(|disk| &disk.vm);
    let nics = devices.nics.iter().map(|nic| &nic.vm);
    let reports = disks.chain(nics).chain(devices.functions.iter().map(|function| &function.vm));
    let processes: BTreeSet<u32> = reports.flatten().map(|report| report.pid).collect();
    let mut monitor = Monitor::connect_to(&monitor_of(vm, &named, &processes)?)?;
    // The monitor was found, or named earlier for a disk: it has to say itself that it is this VM's.
    monitor.is_surely_of(vm)?;
    Ok(monitor)
}

/// What a VM uses of a daemon.
#[derive(Debug)]
pub(crate) struct VmDevices {
    pub disks: Vec<DiskReport>,
    pub nics: Vec<NicReport>,
    pub functions: Vec<FunctionReport>,
}

/// The devices of this daemon that a VM uses; an error if there are none.
pub(crate) fn devices_of(status: StatusReport, vm: &str) -> Result<VmDevices> {
    let of_it = |report: &Option<VmReport>| report.as_ref().is_some_and(|report| report.name == vm);
    let devices = VmDevices {
        nics: status.nics.into_iter().filter(|nic| of_it(&nic.vm)).collect(),
        disks: status.disks.into_iter().filter(|disk| of_it(&disk.vm)).collect(),
        functions: status.functions.into_iter().filter(|function| of_it(&function.vm)).collect(),
    };
    if devices.disks.is_empty() && devices.nics.is_empty() && devices.functions.is_empty() {
        let error = format!("no VM {vm} uses a device of this daemon");
        return Err(CommandError::new(Code::NotFound, error, "`ioplane status` shows the VMs").into());
    }
    Ok(devices)
}
