//! Reports for people.

mod cores;
mod device;
mod explain;
mod export;
mod group;
mod network;
mod pci;
#[cfg(test)]
pub mod tests;

use ioplane_api::report::{
    DeviceQueue, DiskReport, DiskSocket, PauseReport, RetryReport, ServedState, StatusReport, UpgradeReport,
    VmPauseWord,
};
use ioplane_api::size::Size;

pub use cores::{ago, cores, decisions, pool};
pub use device::{disk, disk_limits, group_of, nic, nic_limits, on_timeout, reservation};
pub use explain::explain;
pub use export::{export, export_limits, exports};
pub use group::{group, groups};
pub use network::{nics, switch, switches};
pub use pci::{function, functions, quiesced, standing, states};

use crate::command::table::Table;

/// A number, or a dash where there is none.
fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// One line of what is said of one thing: of what, and what. Further lines of the same begin empty.
fn fact(of: &str, what: impl std::fmt::Display) -> String {
    format!("  {of:<18} {what}\n")
}

/// Why one is not served, what to do, and when it is tried again; nothing if it is.
fn error_lines(
    name: &str,
    error: &Option<String>,
    remedy: &Option<String>,
    retry: Option<RetryReport>,
) -> String {
    let Some(error) = error else { return String::new() };
    let retry = retry.map_or(String::new(), |retry| format!(" ({})", retry.words()));
    let remedy = remedy.as_ref().map_or(String::new(), |remedy| format!("  hint: {remedy}\n"));
    format!("{name}: {error}{retry}\n{remedy}")
}

fn state(state: ServedState, connected: bool) -> &'static str {
    match state {
        ServedState::Served if connected => "in use",
        ServedState::Served => "waiting",
        ServedState::Opening => "opening",
        ServedState::Failed => "FAILED",
        ServedState::Busy => "busy",
    }
}

fn backing(disk: &DiskReport) -> String {
    if let Some(remote) = &disk.backing.remote {
        return remote.uri.clone();
    }
    match (&disk.backing.path, &disk.backing.engine) {
        (Some(path), Some(engine)) => {
            let direct = if disk.backing.direct == Some(true) { ", direct" } else { "" };
            format!("{} ({engine}{direct})", path.display())
        }
        (Some(path), None) => path.display().to_string(),
        (None, _) => disk.backing.kind.clone(),
    }
}

/// `disk list`.
pub fn disks(disks: &[DiskReport]) -> String {
    if disks.is_empty() {
        return "no disks: add one with `ioplane disk add`\n".to_owned();
    }
    let mut table =
        Table::new(&["NAME", "STATE", "SIZE", "MODE", "QUEUES", "CORE", "ORIGIN", "SOCKET", "BACKING"]);
    for disk in disks {
        table.row(vec![
            disk.name.clone(),
            state(disk.state, disk.connected).to_owned(),
            Size(disk.size).to_string(),
            if disk.read_only { "ro" } else { "rw" }.to_owned(),
            disk.queues.len().to_string(),
            or_dash(disk.core),
            disk.origin.clone(),
            disk.socket.display().to_string(),
            backing(disk),
        ]);
    }
    let mut text = table.to_string();
    for disk in disks {
        if let Some(socket) = &disk.migration_socket {
            let (socket, owner) = (socket.display(), disk.owner.map_or("neither", DiskSocket::words));
            text.push_str(&format!(
                "{}: migration socket {socket}; its guest runs behind {owner}\n",
                disk.name
            ));
        }
        if let Some(door) = disk.waiting {
            let name = &disk.name;
            text.push_str(&format!("{name}: a VM behind {} waits for the other to stop\n", door.words()));
        }
        if let Some(pause) = disk.vm_pause.as_ref().filter(|pause| pause.state != VmPauseWord::Armed) {
            text.push_str(&format!("{}: VM pause: {}\n", disk.name, pause.words()));
        }
        text.push_str(&error_lines(&disk.name, &disk.error, &disk.remedy, disk.retry));
    }
    text
}

/// A row of `status` about a queue.
fn queue_row(device: &str, queue: &impl DeviceQueue) -> Vec<String> {
    let work = queue.work();
    vec![
        device.to_owned(),
        queue.role().map_or(queue.index().to_string(), |role| format!("{} {}", queue.index(), role.word())),
        or_dash(queue.core()),
        work.units.to_string(),
        Size(work.bytes).to_string(),
        format!("{:.3}", work.kicks_per_unit),
        format!("{:.3}", work.interrupts_per_unit),
        format!("{:.0}", work.wait_p99_us),
        format!("{:.0}", work.p50_us),
        format!("{:.0}", work.p99_us),
        queue.choice().map_or("-", |choice| choice.choice.word()).to_owned(),
    ]
}

/// What `status` says below the table of a device: queues that have stopped, and its last front end that was turned out.
fn device_faults<Q: DeviceQueue>(device: &str, queues: &[Q], front_end: Option<&String>) -> String {
    let stopped = queues.iter().filter_map(|queue| {
        let fault = queue.fault()?;
        let index = queue.index();
        Some(format!("{device} queue {index} has stopped: {} ({})\n", fault.text, fault.name))
    });
    let turned_out =
        front_end.map(|fault| format!("{device}: the last front end that was turned out: {fault}\n"));
    stopped.chain(turned_out).collect()
}

pub fn status(status: &StatusReport) -> String {
    let StatusReport { version, pid, uptime_s, config, .. } = status;
    let mut text = format!("ioplane {version}, pid {pid}, up {uptime_s} s, {}\n\n", config.display());
    text.push_str(&disks(&status.disks));
    let mut table = Table::new(&[
        "DISK",
        "QUEUE",
        "CORE",
        "REQUESTS",
        "BYTES",
        "KICKS/REQ",
        "INTR/REQ",
        "WAIT P99",
        "P50 US",
        "P99 US",
        "NOW",
        "ERRORS",
    ]);
    let mut faults = String::new();
    for disk in &status.disks {
        for queue in &disk.queues {
            let errors = queue.counts.errors;
            let mut row = queue_row(&disk.name, queue);
            row.push((errors.io + errors.space + errors.request + errors.unsupported).to_string());
            table.row(row);
        }
        faults += &device_faults(&disk.name, &disk.queues, disk.last_front_end_fault.as_ref());
    }
    if !status.disks.is_empty() {
        text.push_str(&format!("\n{table}"));
    }
    text.push_str(&faults);
    text.push_str(&network::status(status));
    if !status.groups.is_empty() {
        text.push_str(&format!("\n{}", groups(&status.groups)));
    }
    text.push_str(&pci::status(status));
    if !status.exports.is_empty() {
        text.push_str(&format!("\n{}", exports(&status.exports)));
    }
    text.push_str(&format!("\n{}", cores(&status.cores)));
    if !status.decisions.is_empty() {
        text.push_str(&format!(
            "\nDECIDED (all of it: ioplane core decisions)\n{}",
            cores::decided(&status.decisions)
        ));
    }
    text
}

/// Who has everything now, and how long each guest had to wait.
pub fn upgrade(report: &UpgradeReport) -> String {
    let UpgradeReport { from_pid, from_version, pid, version, devices } = report;
    let mut text = format!("ioplane {from_version} (pid {from_pid}) -> ioplane {version} (pid {pid})\n");
    for PauseReport { kind, name, pause_us, suspended } in devices {
        let again = if *suspended { ", requests in flight done again" } else { "" };
        text += &match pause_us {
            Some(us) => format!("{kind} {name}: paused {:.1} ms{again}\n", *us as f64 / 1000.0),
            None => format!("{kind} {name}: waits for I/O of the old process to end{again}\n"),
        };
    }
    text
}
