//! `disk show` and `nic show`: one device, whole.

use std::collections::BTreeMap;

use ioplane_api::report::{DiskReport, Door, FaultReport, NicReport, VmReport};
use ioplane_api::size::Size;

use super::{backing, fact, or_dash, state, trouble};

fn vm(vm: Option<&VmReport>, connections: u64) -> String {
    match vm {
        Some(VmReport { name, pid }) => format!("{name} (pid {pid})"),
        None => format!("none; {connections} connections so far"),
    }
}

/// Counts by name, the empty ones left out.
fn counted<N: AsRef<str>>(counts: impl IntoIterator<Item = (N, u64)>) -> String {
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    let each: Vec<String> = counts.map(|(name, count)| format!("{} {count}", name.as_ref())).collect();
    if each.is_empty() { "none".to_owned() } else { each.join(", ") }
}

/// What of a queue is the same for disks and NICs.
struct QueueLine<'r> {
    index: u16,
    role: &'r str,
    core: Option<u32>,
    size: u16,
    done: String,
    kicks: [u64; 2],
    interrupts: [u64; 2],
    /// Half and 99 of 100, microseconds: device time, waiting.
    times: [[f64; 2]; 2],
    fault: Option<&'r FaultReport>,
}

impl QueueLine<'_> {
    fn text(&self) -> String {
        let QueueLine { index, role, core, size, done, kicks, interrupts, times, fault } = self;
        let [[p50, p99], [wait50, wait99]] = times;
        let heading = format!("queue {index}{role}");
        let mut text = match fault {
            Some(FaultReport { text, name }) => fact(&heading, format!("STOPPED: {text} ({name})")),
            None if *size == 0 => fact(&heading, "not set up by a driver"),
            None => fact(&heading, format!("core {}, {size} entries", or_dash(*core))),
        };
        if *size > 0 || fault.is_some() {
            text += &fact("", done);
            text += &fact(
                "",
                format!(
                    "kicks {} ({} avoided), interrupts {} ({} avoided)",
                    kicks[0], kicks[1], interrupts[0], interrupts[1]
                ),
            );
            text += &fact(
                "",
                format!(
                    "device time p50 {p50:.0} us, p99 {p99:.0} us; wait p50 {wait50:.0} us, p99 {wait99:.0} us"
                ),
            );
        }
        text
    }
}

fn faults(faults: &BTreeMap<String, u64>, last: Option<&String>) -> String {
    let mut text = String::new();
    if !faults.is_empty() {
        text += &fact("front end's faults", counted(faults.iter().map(|(name, count)| (name, *count))));
    }
    text.extend(last.map(|last| fact("the last of them", last)));
    text
}

/// `disk show`.
pub fn disk(disk: &DiskReport) -> String {
    let DiskReport { name, totals, .. } = disk;
    let mode = if disk.read_only { "read-only" } else { "writable" };
    let mut text = format!(
        "{name}: {}, {}, {mode}, {}\n",
        backing(disk),
        Size(disk.size),
        state(disk.state, disk.connected)
    );
    text += &fact("socket", disk.socket.display());
    if let Some(twin) = &disk.twin {
        let owner = disk.owner.map_or("neither", Door::words);
        text += &fact("second socket", format!("{}; its guest runs behind {owner}", twin.display()));
    }
    text += &fact("VM", vm(disk.vm.as_ref(), disk.connections));
    text += &fact("serial", &disk.serial);
    text += &fact("origin", &disk.origin);
    text += &fact("preferred core", disk.core.map_or("any".to_owned(), |core| core.to_string()));
    text.extend(disk.backing.why_threads.as_ref().map(|why| fact("threads", format!("because {why}"))));
    text += &fact(
        "requests",
        format!(
            "{}, {} read, {} written",
            totals.requests,
            Size(totals.bytes_read),
            Size(totals.bytes_written)
        ),
    );
    let errors = totals.errors;
    let causes = [
        ("io", errors.io),
        ("space", errors.space),
        ("request", errors.request),
        ("unsupported", errors.unsupported),
    ];
    text += &fact("errors", counted(causes));
    if totals.replayed > 0 {
        text += &fact("replayed", format!("{} requests, after a crash of the daemon", totals.replayed));
    }
    text.extend(disk.queues.iter().map(|queue| {
        let counts = &queue.counts;
        let line = QueueLine {
            index: queue.index,
            role: "",
            core: queue.core,
            size: queue.size,
            done: format!("{} requests, {}", counts.requests, Size(counts.bytes)),
            kicks: [counts.kicks, counts.kicks_avoided],
            interrupts: [counts.interrupts, counts.interrupts_avoided],
            times: [[counts.p50_us, counts.p99_us], [counts.wait_p50_us, counts.wait_p99_us]],
            fault: queue.fault.as_ref(),
        };
        line.text()
    }));
    text += &faults(&disk.front_end_faults, disk.last_front_end_fault.as_ref());
    text + &trouble(name, &disk.error, &disk.remedy, disk.retry)
}

/// `nic show`.
pub fn nic(nic: &NicReport) -> String {
    let NicReport { name, port, .. } = nic;
    let mut text =
        format!("{name}: {} on switch {}, {}\n", nic.mac, nic.switch, state(nic.state, nic.connected));
    text += &fact("socket", nic.socket.display());
    text += &fact("VM", vm(nic.vm.as_ref(), nic.connections));
    let driver = if port.up { "its driver runs" } else { "no frames pass" };
    text += &fact("link", format!("{}; {driver}", nic.link));
    text += &fact("VLAN", if nic.isolated { format!("{}, isolated", nic.vlan) } else { nic.vlan.clone() });
    text += &fact("MTU", nic.mtu);
    text += &fact("origin", &nic.origin);
    text += &fact("preferred core", nic.core.map_or("any".to_owned(), |core| core.to_string()));
    for (direction, frames, bytes, drops) in [
        ("sent", port.sent_frames, port.sent_bytes, &port.sent_drops),
        ("received", port.received_frames, port.received_bytes, &port.received_drops),
    ] {
        let drops = counted(drops.iter().map(|(cause, count)| (cause, *count)));
        text += &fact(direction, format!("{frames} frames, {}; dropped: {drops}", Size(bytes)));
    }
    text.extend(nic.queues.iter().map(|queue| {
        let counts = &queue.counts;
        let line = QueueLine {
            index: queue.index,
            role: match queue.role.word() {
                "receive" => " receive",
                _ => " transmit",
            },
            core: queue.core,
            size: queue.size,
            done: format!("{} frames, {}", counts.frames, Size(counts.bytes)),
            kicks: [counts.kicks, counts.kicks_avoided],
            interrupts: [counts.interrupts, counts.interrupts_avoided],
            times: [[counts.p50_us, counts.p99_us], [counts.wait_p50_us, counts.wait_p99_us]],
            fault: queue.fault.as_ref(),
        };
        line.text()
    }));
    text += &faults(&nic.front_end_faults, nic.last_front_end_fault.as_ref());
    text + &trouble(name, &nic.error, &nic.remedy, nic.retry)
}
