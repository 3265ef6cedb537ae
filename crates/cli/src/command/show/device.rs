//! `disk show` and `nic show`: one device, whole.

use std::collections::BTreeMap;

use ioplane_api::report::{
    ChoiceReport, ClaimWord, DeviceQueue, DiskReport, DiskSocket, FaultReport, NicReport, QueueWork,
    RemoteReport, RemoteWord, VmReport,
};
use ioplane_api::size::Size;
use ioplane_api::spec::{DoubtWord, LimitsSpec, LinkWord};

use super::{backing, error_lines, fact, or_dash, state};

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

fn queue<Q: DeviceQueue>(queue: &Q) -> String {
    let (size, work) = (queue.size(), queue.work());
    let role = queue.role().map_or(String::new(), |role| format!(" {}", role.word()));
    let heading = format!("queue {}{role}", queue.index());
    let mut text = match queue.fault() {
        Some(FaultReport { text, name }) => fact(&heading, format!("STOPPED: {text} ({name})")),
        None if size == 0 => fact(&heading, "not set up by a driver"),
        None => fact(&heading, format!("core {}, {size} entries", or_dash(queue.core()))),
    };
    if size > 0 || queue.fault().is_some() {
        let QueueWork { units, bytes, kicks, kicks_avoided, interrupts, interrupts_avoided, .. } = work;
        let QueueWork {
            p50_us, p99_us, wait_p50_us, wait_p99_us, interrupt_p50_us, interrupt_p99_us, ..
        } = work;
        text += &fact("", format!("{units} {}, {}", Q::UNITS, Size(bytes)));
        text += &fact(
            "",
            format!(
                "kicks {kicks} ({kicks_avoided} avoided), interrupts {interrupts} ({interrupts_avoided} avoided)"
            ),
        );
        text += &fact(
            "",
            format!(
                "wait p50 {wait_p50_us:.0} us, p99 {wait_p99_us:.0} us; device time p50 {p50_us:.0} us, p99 {p99_us:.0} us; \
                 to the interrupt p50 {interrupt_p50_us:.0} us, p99 {interrupt_p99_us:.0} us"
            ),
        );
        text += &queue.choice().map_or(String::new(), choice);
    }
    text
}

/// How the core learns of a queue's requests, and what was chosen for it so far; nothing where nothing ever was.
fn choice(choice: &ChoiceReport) -> String {
    let parts = choice.since(None);
    if parts.polled + parts.armed + parts.held == 0.0 {
        return String::new();
    }
    let now =
        choice.counts.iter().find(|count| (count.choice, count.reason) == (choice.choice, choice.reason));
    let why = now.map_or(String::new(), |count| format!(", since {}", count.why));
    let all: u64 = choice.counts.iter().map(|count| count.us).sum();
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let mut text = fact("", format!("{} for {:.1} s{why}", choice.choice.word(), choice.for_us as f64 / 1e6));
    text += &fact(
        "",
        format!(
            "of {:.0} s polled {}, armed {}, held back by limits {}",
            all as f64 / 1e6,
            percent(parts.polled),
            percent(parts.armed),
            percent(parts.held)
        ),
    );
    text
}

fn faults(faults: &BTreeMap<String, u64>, last: Option<&String>) -> String {
    let mut text = String::new();
    if !faults.is_empty() {
        text += &fact("front end's faults", counted(faults.iter().map(|(name, count)| (name, *count))));
    }
    text.extend(last.map(|last| fact("the last of them", last)));
    text
}

/// What limits a guest. Without limits nothing, unless somebody has just asked.
pub fn disk_limits(disk: &DiskReport, asked: bool) -> String {
    limits("limits", disk.limits(), "requests", asked)
}

/// What is reserved for it on the other machine.
pub fn reservation(disk: &DiskReport) -> String {
    let words = disk.backing.remote.as_ref().and_then(|remote| remote.reserved().rates("requests"));
    fact("reserved", words.as_deref().unwrap_or("nothing"))
}

/// What happens when its server is not reachable.
pub fn on_timeout(disk: &DiskReport) -> String {
    let words = disk.backing.remote.as_ref().map(RemoteReport::timeout_words);
    words.map_or(String::new(), |words| fact("not reachable", words))
}

/// The same of a NIC, each direction.
pub fn nic_limits(nic: &NicReport, asked: bool) -> String {
    limits("send limits", nic.tx_limits(), "frames", asked)
        + &limits("receive limits", nic.rx_limits(), "frames", asked)
}

/// The group of a device.
pub fn group_of(group: Option<&str>) -> String {
    fact("group", group.unwrap_or("none"))
}

/// Limits in words, if there are any or somebody has just asked.
pub(super) fn limits(what: &str, limits: LimitsSpec, unit: &str, asked: bool) -> String {
    let words = limits.words(unit).or(asked.then(|| "none".to_owned()));
    words.map_or(String::new(), |words| fact(what, words))
}

/// Whether it may write there.
fn claim(name: &str, remote: &RemoteReport) -> String {
    let why = remote.claim_why.as_ref().map_or(String::new(), |why| format!(": {why}"));
    let generation = remote.generation.map_or(String::new(), |generation| format!("generation {generation}"));
    match remote.claim {
        // A server of others, an older one, or an export that cannot be written.
        ClaimWord::None => {
            "no claim: read-only, or the server does not keep other hosts from writing".to_owned()
        }
        ClaimWord::Free => "not claimed: it is when a VM uses it".to_owned(),
        ClaimWord::Waiting => format!("waits for its claim to write, requests wait{why}"),
        ClaimWord::Held => format!("claim to write: {generation}"),
        ClaimWord::Releasing => format!("gives its claim to write back ({generation}){why}"),
        ClaimWord::Refused if remote.generation.is_some() => {
            "what its guest has not flushed is lost: shut the guest down, then remove the disk".to_owned()
        }
        ClaimWord::Refused => {
            format!(
                "shut its guest down; or, when the one that holds it has stopped: ioplane disk accept {name}"
            )
        }
    }
}

/// How a disk of another machine is reached.
fn remote(name: &str, remote: &RemoteReport) -> String {
    let time = remote.for_ms.map_or(String::new(), |ms| format!(" for {:.1} s", ms as f64 / 1000.0));
    let why = remote.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
    let mut text = fact("server", format!("{}{time}{why}", remote.state.words()));
    text += &fact(
        "",
        format!(
            "{} connections, {} lost; {} requests sent again, {} failed there",
            remote.connections, remote.losses, remote.replays, remote.device_errors
        ),
    );
    let on_the_way = remote.protection.map(|protection| format!("on the way: {}", protection.words()));
    text.extend(on_the_way.map(|words| fact("", words)));
    if remote.changed > 0 {
        text += &fact("", format!("{} connections lost since data were changed on the way", remote.changed));
    }
    let said = remote.exporter.words().map(|words| match &remote.exporter_why {
        Some(why) => format!("the exporter says: {words} ({why})"),
        None => format!("the exporter says: {words}"),
    });
    text.extend(said.map(|said| fact("", said)));
    text += &fact("", format!("while it is not reachable: {}", remote.timeout_words()));
    if remote.silence_s > 0 {
        text += &fact("", format!("lost after {} s without an answer", remote.silence_s));
    }
    // Those to another ioplane are sent again for certain.
    if remote.instance.is_none() {
        let words = match remote.in_doubt {
            DoubtWord::Fail => "writes without an answer fail when the connection is lost",
            DoubtWord::Resend => {
                "writes without an answer are SENT AGAIN when the connection is lost, whatever the server has begun with them (in_doubt)"
            }
        };
        text += &fact("", words);
    }
    if remote.state == RemoteWord::Stopped {
        text += &fact("", format!("to go on after you have checked it: ioplane disk accept {name}"));
    }
    text += &fact("", claim(name, remote));
    let reserved = remote.reserved().rates("requests");
    text.extend(reserved.map(|words| fact("", format!("{words} are reserved there"))));
    let why = remote.reserved_why.as_ref();
    text.extend(why.map(|why| fact("", format!("its reservation is not as it was asked for: {why}"))));
    if remote.rewritten > 0 {
        text += &fact("", format!("{} writes written again after its host lost power", remote.rewritten));
    }
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
    if let Some(socket) = &disk.migration_socket {
        let owner = disk.owner.map_or("neither", DiskSocket::words);
        text += &fact("migration socket", format!("{}; its guest runs behind {owner}", socket.display()));
    }
    text += &fact("VM", vm(disk.vm.as_ref(), disk.connections));
    text += &fact("serial", &disk.serial);
    text += &fact("origin", &disk.origin);
    text += &fact("preferred core", disk.core.map_or("any".to_owned(), |core| core.to_string()));
    text += &group_of(disk.group.as_deref());
    text += &disk_limits(disk, false);
    text.extend(disk.backing.why_threads.as_ref().map(|why| fact("threads", format!("because {why}"))));
    text.extend(disk.backing.remote.as_ref().map(|one| remote(name, one)));
    text.extend(disk.vm_pause.as_ref().map(|pause| fact("VM pause", pause.words())));
    text.extend(disk.swap.as_ref().map(|swap| fact("swap", swap.words())));
    text.extend(disk.verify.as_ref().map(|verify| fact("verify", verify.words())));
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
    text.extend(disk.queues.iter().map(queue));
    text += &faults(&disk.front_end_faults, disk.last_front_end_fault.as_ref());
    text + &error_lines(name, &disk.error, &disk.remedy, disk.retry)
}

/// How the link is set, and whether frames pass: if not, why. `up`: the port is up; `connected`: a VM is.
pub fn link(set: &str, up: bool, connected: bool) -> String {
    let why = match (up, connected) {
        (true, _) => "; frames pass",
        (false, _) if set == LinkWord::Down.word() => "; no frames pass",
        (false, false) => "; no frames pass, as no VM is connected",
        (false, true) => "; no frames pass, as the guest's driver has not started the NIC",
    };
    set.to_owned() + why
}

/// `nic show`.
pub fn nic(nic: &NicReport) -> String {
    let NicReport { name, port, .. } = nic;
    let mut text =
        format!("{name}: {} on switch {}, {}\n", nic.mac, nic.switch, state(nic.state, nic.connected));
    text += &fact("socket", nic.socket.display());
    text += &fact("VM", vm(nic.vm.as_ref(), nic.connections));
    text += &fact("link", link(&nic.link, port.up, nic.connected));
    text += &fact("VLAN", if nic.isolated { format!("{}, isolated", nic.vlan) } else { nic.vlan.clone() });
    text += &fact("MTU", nic.mtu);
    text += &fact("origin", &nic.origin);
    text += &fact("preferred core", nic.core.map_or("any".to_owned(), |core| core.to_string()));
    text += &group_of(nic.group.as_deref());
    text += &nic_limits(nic, false);
    for (direction, frames, bytes, drops) in [
        ("sent", port.sent_frames, port.sent_bytes, &port.sent_drops),
        ("received", port.received_frames, port.received_bytes, &port.received_drops),
    ] {
        let drops = counted(drops.iter().map(|(cause, count)| (cause, *count)));
        text += &fact(direction, format!("{frames} frames, {}; dropped: {drops}", Size(bytes)));
    }
    text.extend(nic.queues.iter().map(queue));
    text += &faults(&nic.front_end_faults, nic.last_front_end_fault.as_ref());
    text + &error_lines(name, &nic.error, &nic.remedy, nic.retry)
}
