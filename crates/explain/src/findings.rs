//! The rules. Each looks at what one device did, and at its cores.

use ioplane_api::report::{ChoiceReason, Slowdown, SlowdownCause};

use crate::interval::{BackingActivity, CoreActivity, DeviceActivity, Interval};
use crate::limits;
use crate::side::{LimitActivity, Side};

/// Units below which nothing is said of times and rates: there was nearly no load.
const FEWEST: u64 = 50;

/// A wait for the core above which it is worth a word, us: a core takes 256 KiB worth of work from each queue in turn, some 40 us.
const LONG_WAIT_US: f64 = 300.0;

/// Half of the requests take longer than this on a slow disk, us. Flash takes 0.1 ms, a disk with heads 4 to 10 ms.
const SLOW_US: f64 = 5_000.0;

/// One of a hundred does.
const SLOW_P99_US: f64 = 50_000.0;

/// The part of the time from which a core is busy.
const BUSY: f64 = 0.8;

/// A core is starved if it waits for a processor for more than this part of the time in which it could run, and at all for more than
/// [`DELAYED`] of the time: one that has little to do waits for long in no time.
const STARVED: f64 = 0.2;

/// See [`STARVED`].
const DELAYED: f64 = 0.05;

/// Kicks for each unit from which a device waits for wake-ups of its core: more than the one of a hundred that no other time is asked of.
const WOKEN: f64 = 0.05;

/// The part of a core's work from which a neighbour is greedy.
const GREEDY: f64 = 0.6;

/// The part of the time for which a ceiling has to keep a queue from being polled.
const FORBIDDEN: f64 = 0.2;

/// The part of a ring from which it is full.
const FULL: f64 = 0.85;

/// The part of a device's work from which one queue has all.
const ALL: f64 = 0.95;

/// The part of the frames for a NIC from which drops are worth a word.
const DROPS: f64 = 0.01;

/// Interrupts and kicks for each unit from which VIRTIO_F_EVENT_IDX would help.
const MANY_EVENTS: f64 = 0.5;

/// VIRTIO_F_INDIRECT_DESC (virtio 1.3, section 6).
const INDIRECT_DESC: u64 = 1 << 28;

/// VIRTIO_F_EVENT_IDX.
const EVENT_IDX: u64 = 1 << 29;

/// Descriptors that a request takes without an indirect table: header, data, status (virtio 1.3, section 5.2.6).
const CHAIN: f64 = 3.0;

/// Everything that slows the device down.
pub fn of(device: &DeviceActivity, interval: &Interval) -> Vec<Slowdown> {
    let mut findings = stopped(device);
    if device.units() < FEWEST && device.dropped_full < FEWEST {
        return findings;
    }
    let bites = limits::biting(device, interval.seconds);
    findings.extend(limited(device, &bites, interval.seconds));
    let slow = slow_disk(device, interval.seconds);
    if !bites.is_empty() {
        // What a limit holds back waits in the ring: neither its waiting nor a full ring says more.
        findings.extend(slow);
    } else {
        findings.extend(cores(device, interval));
        findings.extend(ceiling(device));
        findings.extend(slow);
        findings.extend(full_ring(device, interval));
        findings.extend(one_queue(device, interval));
    }
    if !bites.iter().any(|(limit, _)| limit.side == Side::Receives) {
        // What a receive limit holds back fills the buffers of the switch, whatever the guest does.
        findings.extend(slow_receiver(device));
    }
    findings.extend(no_event_idx(device));
    findings
}

fn finding(cause: SlowdownCause, device: &DeviceActivity, text: String, remedy: String) -> Slowdown {
    Slowdown { cause, device: device.name.clone(), text, remedy }
}

fn stopped(device: &DeviceActivity) -> Vec<Slowdown> {
    let stopped = device.queues.iter().filter_map(|queue| Some((queue.index, queue.fault.as_ref()?)));
    let said = stopped.map(|(index, fault)| {
        let text = format!("queue {index} has stopped: {fault}");
        finding(
            SlowdownCause::StoppedQueue,
            device,
            text,
            "reset the device in the guest: reload its driver, or reboot".into(),
        )
    });
    said.collect()
}

fn limited(device: &DeviceActivity, bites: &[(&LimitActivity, u64)], seconds: f64) -> Vec<Slowdown> {
    let said = bites.iter().map(|(one, held)| {
        let LimitActivity { option, what, limit, passed, own, .. } = one;
        let [rate, own] = [passed, own].map(|count| *count as f64 / seconds);
        let (text, set) = match &one.group {
            None => (
                format!(
                    "its limit of {limit} {what} per second bites: {rate:.0} per second have passed, and {held} times others were left waiting"
                ),
                format!("{} set {}", device.kind, device.name),
            ),
            Some(group) => (
                format!(
                    "the limit of its group {group} of {limit} {what} per second bites: {rate:.0} per second have passed of the whole group, \
                     {own:.0} of them of this {}, and {held} times others of it were left waiting",
                    device.kind
                ),
                format!("group set {group}"),
            ),
        };
        let remedy = format!("ioplane {set} --{option} N, or 0 for no limit");
        finding(SlowdownCause::Limit, device, text, remedy)
    });
    said.collect()
}

/// What the waiting for a core comes from: it is starved, or a neighbour has it.
fn cores(device: &DeviceActivity, interval: &Interval) -> Vec<Slowdown> {
    let wait = device.waited().quantile(0.99);
    let its = device.cores().into_iter().filter_map(|core| interval.core(core));
    let said =
        its.filter_map(|core| starved(device, core, wait).or_else(|| greedy(device, core, interval, wait)));
    said.collect()
}

fn starved(device: &DeviceActivity, core: &CoreActivity, wait: f64) -> Option<Slowdown> {
    let runnable = core.ran + core.delayed;
    if core.delayed < DELAYED || core.delayed < STARVED * runnable {
        return None;
    }
    // What this wake-up took is in no histogram: the wait has what some measured ones took.
    let woken = device.kicks_for_each(core.id) >= WOKEN && core.delay_per_wake_us >= LONG_WAIT_US;
    let waits = if wait >= LONG_WAIT_US {
        format!("requests wait for it for up to {wait:.0} us (99 of 100)")
    } else if woken {
        format!("it waits for {:.0} us each time that it is woken", core.delay_per_wake_us)
    } else {
        return None;
    };
    let text = format!(
        "core {} wanted a processor for {:.0} % of the time and had it for {:.0} %; {waits}",
        core.id,
        runnable * 100.0,
        core.ran * 100.0,
    );
    let place = match core.cpu {
        Some(cpu) => format!("keep vCPUs and other programs off processor {cpu}"),
        None => "pin it to a processor (cpu = N of its [[core]]) and keep others off that".to_owned(),
    };
    let nice =
        if core.yield_policy == "nice" { "; it runs at nice 19: yield_policy = \"yields\"" } else { "" };
    Some(finding(SlowdownCause::StarvedCore, device, text, format!("{place}{nice}")))
}

fn greedy(device: &DeviceActivity, core: &CoreActivity, interval: &Interval, wait: f64) -> Option<Slowdown> {
    if wait < LONG_WAIT_US || core.busy < BUSY {
        return None;
    }
    let all: u64 = interval.devices.iter().map(|one| one.cost_on(core.id)).sum();
    let others = interval.devices.iter().filter(|one| one.name != device.name);
    let most = others.max_by_key(|one| one.cost_on(core.id))?;
    let part = most.cost_on(core.id) as f64 / (all.max(1)) as f64;
    if part < GREEDY {
        return None;
    }
    let text = format!(
        "core {} is busy for {:.0} % of the time, {:.0} % of its work is {} {}; requests wait for it for up to {wait:.0} us (99 of 100)",
        core.id,
        core.busy * 100.0,
        part * 100.0,
        most.kind,
        most.name,
    );
    let remedy = format!(
        "give {} another core (ioplane core add, ioplane core move), or limit it: ioplane {} set {}",
        most.name, most.kind, most.name
    );
    Some(finding(SlowdownCause::GreedyNeighbour, device, text, remedy))
}

fn ceiling(device: &DeviceActivity) -> Option<Slowdown> {
    let forbidden = device.queues.iter().find(|queue| {
        let why = queue.chosen.most.as_ref().map(|(reason, _)| *reason);
        queue.units >= FEWEST && queue.chosen.armed >= FORBIDDEN && why == Some(ChoiceReason::Ceiling)
    })?;
    let core = forbidden.core?;
    let text = format!(
        "the CPU ceiling of core {core} forbids polling: its driver was asked to kick {:.0} % of the time, and there were {:.2} kicks for each of its units",
        forbidden.chosen.armed * 100.0,
        forbidden.kicks as f64 / forbidden.units as f64,
    );
    let remedy = format!("ioplane core set {core} --cpu-percent N, or 0 for no ceiling");
    Some(finding(SlowdownCause::Ceiling, device, text, remedy))
}

fn slow_disk(device: &DeviceActivity, seconds: f64) -> Option<Slowdown> {
    let backing = device.backing.as_ref()?;
    let took = device.took();
    let (p50, p99) = (took.quantile(0.5), took.quantile(0.99));
    if p50 < SLOW_US && p99 < SLOW_P99_US {
        return None;
    }
    // Little's law.
    let in_flight = took.sum_s() / seconds;
    let text = format!(
        "the disk below takes {:.1} ms for half of the requests and {:.1} ms for 99 of 100, with {in_flight:.1} of them in flight on average",
        p50 / 1000.0,
        p99 / 1000.0,
    );
    let remedy = match backing {
        BackingActivity::Image(image) => {
            format!("look at the disk that has {image} (iostat -x 1), or move the image to a faster one")
        }
        BackingActivity::Remote(uri) => {
            format!(
                "look at the host that serves {uri} (ioplane explain there), and at the network between (ping, ss -ti)"
            )
        }
    };
    Some(finding(SlowdownCause::SlowDisk, device, text, remedy))
}

/// A ring whose entries are all in use, by requests that are in the device for the most part: of those that wait for a core a larger ring would only
/// have more. A disk in memory is copied by the core: whatever is in it waits for that.
fn full_ring(device: &DeviceActivity, interval: &Interval) -> Option<Slowdown> {
    if device.kind != "disk" || device.backing.is_none() {
        return None;
    }
    let per_request = if device.features & INDIRECT_DESC == 0 { CHAIN } else { 1.0 };
    let queue = device.queues.iter().find(|queue| {
        let took = queue.took.sum_s();
        // Little's law: mean number in the ring.
        let inside = (took + queue.waited_s(interval.seconds).min(took)) / interval.seconds;
        queue.size > 0 && inside * per_request >= FULL * f64::from(queue.size)
    })?;
    let text = format!(
        "the ring of queue {} is full: its {} entries are all in use, so further requests wait in the guest, where nobody sees them",
        queue.index, queue.size
    );
    let remedy = "add the disk with a larger --queue-size or with more --queues; if the disk is slow as well, that comes first";
    Some(finding(SlowdownCause::FullRing, device, text, remedy.into()))
}

fn one_queue(device: &DeviceActivity, interval: &Interval) -> Option<Slowdown> {
    // Of a NIC the two directions have queues of their own.
    for receives in [false, true] {
        let queues =
            || device.queues.iter().filter(move |queue| queue.receives == receives && queue.size > 0);
        let all: u64 = queues().map(|queue| queue.units).sum();
        let Some(most) = queues().max_by_key(|queue| queue.units) else { continue };
        let core = most.core.and_then(|core| interval.core(core));
        let busy = core.is_some_and(|core| core.busy >= BUSY);
        if queues().count() < 2 || all < FEWEST || (most.units as f64) < ALL * all as f64 || !busy {
            continue;
        }
        let what = device.units_word();
        let text = format!(
            "queue {} has {:.0} % of the {what}, and its core is busy; {} further queues are idle",
            most.index,
            most.units as f64 * 100.0 / all as f64,
            queues().count() - 1,
        );
        let remedy = if device.kind == "disk" {
            "let several vCPUs of the guest do I/O: Linux gives each its own queue"
        } else {
            "let the guest have several flows, and in the guest: ethtool -L DEVICE combined N"
        };
        return Some(finding(SlowdownCause::OneQueue, device, text, remedy.into()));
    }
    None
}

fn slow_receiver(device: &DeviceActivity) -> Option<Slowdown> {
    let received: u64 = device.queues.iter().filter(|queue| queue.receives).map(|queue| queue.units).sum();
    let all = received + device.dropped_full;
    if device.dropped_full == 0 || (device.dropped_full as f64) < DROPS * all as f64 {
        return None;
    }
    let text = format!(
        "{} of {all} frames for it were dropped: all buffers of its switch were full, since the guest did not take its frames fast enough",
        device.dropped_full
    );
    let remedy = "give the guest more vCPUs or pairs of queues, or a larger receive ring (--queue-size); a receive limit drops as well";
    Some(finding(SlowdownCause::SlowReceiver, device, text, remedy.into()))
}

fn no_event_idx(device: &DeviceActivity) -> Option<Slowdown> {
    let times = device.times(1.0);
    let events = times.kicks_per_unit + times.interrupts_per_unit;
    if device.features & EVENT_IDX != 0 || device.features == 0 || events < MANY_EVENTS {
        return None;
    }
    let text = format!(
        "its driver does not use VIRTIO_F_EVENT_IDX: {:.2} kicks and {:.2} interrupts for each unit",
        times.kicks_per_unit, times.interrupts_per_unit
    );
    let remedy = "use a driver that knows it (Linux since 2.6.39), and do not switch it off (event_idx=off of the VMM)";
    Some(finding(SlowdownCause::NoEventIdx, device, text, remedy.into()))
}
