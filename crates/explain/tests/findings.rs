//! Each cause is found where it is planted, alone; a healthy device has none.

use ioplane_api::report::{ChoiceCount, ChoiceReason, ChoiceReport, ChoiceWord, SlowdownCause, StatusReport};
use ioplane_explain::explain;
use serde_json::{Value, json};

/// Eight buckets for each power of two: the one of `us`, as [`ioplane_device::Histogram`] has it.
fn bucket(us: u64) -> usize {
    let histogram = ioplane_device::Histogram::default();
    histogram.record(us * 1000, 1);
    histogram.snapshot().iter().position(|count| *count > 0).unwrap()
}

fn times(us: u64, count: u64) -> Vec<u64> {
    let mut buckets = vec![0; bucket(us) + 1];
    buckets[bucket(us)] = count;
    buckets
}

/// What one queue did in ten seconds.
#[derive(Clone, Copy)]
struct Load {
    units: u64,
    bytes: u64,
    wait_us: u64,
    took_us: u64,
    limited: u64,
    events: u64,
}

/// 10,000 requests per second, each done 30 us after it was taken.
const HEALTHY: Load =
    Load { units: 100_000, bytes: 409_600_000, wait_us: 2, took_us: 30, limited: 0, events: 2_000 };
const IDLE: Load = Load { units: 0, bytes: 0, wait_us: 0, took_us: 0, limited: 0, events: 0 };
/// What the call takes that sends an interrupt.
const INTERRUPT_US: u64 = 5;
const FEATURES: u64 = 1 << 28 | 1 << 29 | 1 << 32;

/// A daemon with the disks web (of VM shop) and other, the NIC lan, all on core 0. Web and lan are in the group tenant, and other is as well if
/// that is said.
struct Daemon {
    web: Vec<Load>,
    other: Load,
    received: Load,
    dropped: u64,
    features: u64,
    iops_limit: Option<u64>,
    /// The group's limits, by name.
    group_limits: Value,
    other_in_group: bool,
    fault: bool,
    busy: u64,
    delayed: u64,
    ran: u64,
    wakes: u64,
    /// How each of web's queues was served: polled, and armed for this reason, percent.
    chosen: Option<(u64, u64, ChoiceReason)>,
}

fn healthy() -> Daemon {
    Daemon {
        web: vec![HEALTHY],
        other: IDLE,
        received: IDLE,
        dropped: 0,
        features: FEATURES,
        iops_limit: None,
        group_limits: json!({}),
        other_in_group: false,
        fault: false,
        busy: 3_000_000,
        delayed: 100_000,
        ran: 4_000_000,
        wakes: 0,
        chosen: None,
    }
}

/// As it is after so many seconds.
fn choice((polled, armed, reason): (u64, u64, ChoiceReason), seconds: u64) -> ChoiceReport {
    let count = |choice, reason, percent| ChoiceCount {
        choice,
        reason,
        why: format!("of {}", reason.word()),
        times: seconds,
        us: percent * 10_000 * seconds,
    };
    let counts =
        vec![count(ChoiceWord::Polled, ChoiceReason::None, polled), count(ChoiceWord::Armed, reason, armed)];
    ChoiceReport { counts, ..ChoiceReport::default() }
}

fn counts(units: &str, load: Option<Load>) -> Value {
    let Load { units: count, bytes, limited, events, .. } = load.unwrap_or(IDLE);
    json!({
        units: count, "bytes": bytes, "bytes_read": bytes, "bytes_written": 0, "kicks": events / 2,
        format!("kicks_per_{}", units.trim_end_matches('s')): 0.0, "interrupts": events / 2,
        format!("interrupts_per_{}", units.trim_end_matches('s')): 0.0, "interrupts_avoided": 0, "limited": limited,
        "errors": {"io": 0, "space": 0, "request": 0, "unsupported": 0}, "faults": 0, "replayed": 0,
        "p50_us": 0.0, "p99_us": 0.0, "wait_p50_us": 0.0, "wait_p99_us": 0.0, "kicks_avoided": 0,
    })
}

fn queue(index: usize, counts: Value, more: &Value) -> Value {
    let mut queue = json!({"index": index, "size": 128, "core": 0, "fault": null});
    for part in [&counts, more] {
        queue.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    queue
}

impl Daemon {
    /// Before anything was done, or after ten seconds.
    fn status(&self, after: bool) -> StatusReport {
        let did = |load: Load| after.then_some(load);
        let queues = |loads: &[Load]| -> Vec<Value> {
            let fault = match self.fault {
                true => {
                    json!({"fault": {"name": "bad_head", "text": "it named a descriptor that there is not"}})
                }
                false => json!({}),
            };
            let one = |(at, load): (usize, &Load)| queue(at, counts("requests", did(*load)), &fault);
            loads.iter().enumerate().map(one).collect()
        };
        let disk = |name: &str, vm: Value, group: Value, loads: &[Load]| {
            json!({
                "name": name, "state": "served", "error": null, "remedy": null, "origin": "config", "connected": true,
                "connections": 1, "vm": vm, "socket": "/s", "backing": {"kind": "file", "path": "/img", "engine": "io_uring",
                "why_threads": null, "direct": true}, "size": 1, "read_only": false, "serial": "", "queue_size": 128,
                "core": null, "group": group, "iops_limit": self.iops_limit, "features": self.features, "front_end_faults": {},
                "last_front_end_fault": null, "totals": counts("requests", None), "queues": queues(loads),
            })
        };
        let role = |role: &str| json!({"role": role});
        let drops = if after && self.dropped > 0 { json!({"full": self.dropped}) } else { json!({}) };
        let nic = json!({
            "name": "lan", "state": "served", "error": null, "remedy": null, "origin": "config", "connected": true,
            "connections": 1, "vm": null, "group": "tenant", "socket": "/n", "switch": "s", "mac": "", "isolated": false, "vlan": "all",
            "pairs": 1, "queue_size": 256, "mtu": 1500, "link": "up", "core": null, "features": FEATURES,
            "front_end_faults": {}, "last_front_end_fault": null,
            "port": {"name": "lan", "uplink": false, "up": true, "isolated": false, "mac": null, "learned": 0,
                "waiting": 0, "sent_frames": 0, "sent_bytes": 0, "sent_drops": {}, "received_frames": 0,
                "received_bytes": 0, "received_drops": drops},
            "received": counts("frames", None), "sent": counts("frames", None),
            "queues": [
                queue(0, counts("frames", did(self.received)), &role("receive")),
                queue(1, counts("frames", None), &role("transmit")),
            ],
        });
        let mut group = json!({"name": "tenant", "origin": "config", "weight": 1, "disks": [], "nics": []});
        group.as_object_mut().unwrap().extend(self.group_limits.as_object().unwrap().clone());
        let core = |us: u64| if after { us } else { 0 };
        let mut status: StatusReport = serde_json::from_value(json!({
            "version": "0", "pid": 1, "uptime_s": 1, "config": "/c",
            "disks": [
                disk("web", json!({"pid": 2, "name": "shop"}), json!("tenant"), &self.web),
                disk("other", Value::Null, json!(self.other_in_group.then_some("tenant")), &[self.other]),
            ],
            "groups": [group, {"name": "empty", "origin": "added", "weight": 1, "disks": [], "nics": []}],
            "nics": [nic],
            "cores": [{
                "id": 0, "cpu": 3, "cpu_refused": null, "notify": "polled", "spin_us": 1, "yield_policy": "yields",
                "queues": 4, "awake": 1, "busy_percent": 0.0, "sleeps": 0, "wakes": core(self.wakes), "units": 0,
                "cpu_us": core(self.ran), "age_us": core(10_000_000), "busy_us": core(self.busy),
                "run_delay_us": core(self.delayed),
            }],
        }))
        .unwrap();
        for queue in &mut status.disks[0].queues {
            // Before, it was served in another way for long.
            queue.choice = self.chosen.map(|chosen| {
                let mut choice = choice((50, 50, chosen.2), 1000);
                let more = self::choice(chosen, if after { 10 } else { 0 });
                for (all, more) in choice.counts.iter_mut().zip(more.counts) {
                    all.us += more.us;
                }
                choice
            });
        }
        if after {
            for (queue, load) in status.disks[0].queues.iter_mut().zip(&self.web) {
                queue.counts.wait = times(load.wait_us, load.units);
                queue.counts.latency = times(load.took_us, load.units);
                queue.counts.interrupt = times(INTERRUPT_US, load.events / 2);
            }
        }
        if after {
            status.nics[0].queues[0].counts.latency = times(self.received.took_us, self.received.units);
        }
        status
    }

    /// Where the time of a device's requests went, in words.
    fn said(&self, name: &str) -> String {
        let report = explain(&self.status(false), &self.status(true), 10.0, name).unwrap();
        let [device] = &report.devices[..] else { panic!("{report:?}") };
        device.text.clone()
    }

    fn causes(&self, name: &str) -> Vec<SlowdownCause> {
        let report = explain(&self.status(false), &self.status(true), 10.0, name).unwrap();
        for finding in &report.findings {
            assert!(finding.text.len() > 20 && finding.remedy.len() > 10, "{finding:?}");
            println!("{}\n  hint: {}", finding.text, finding.remedy);
        }
        report.findings.iter().map(|finding| finding.cause).collect()
    }
}

#[test]
fn nothing_is_found_in_a_healthy_device() {
    assert_eq!(healthy().causes("web"), []);
    assert_eq!(healthy().causes("lan"), []);
    assert_eq!(healthy().causes("other"), []);
}

#[test]
fn a_vm_has_its_devices_and_nobody_knows_a_name_that_there_is_not() {
    let (before, after) = (healthy().status(false), healthy().status(true));
    let report = explain(&before, &after, 10.0, "shop").unwrap();
    let [device] = &report.devices[..] else { panic!("{report:?}") };
    assert_eq!((device.name.as_str(), device.units_per_s), ("web", 10_000.0));
    assert!((30.0..35.0).contains(&device.device_p50_us), "{device:?}");
    assert_eq!(explain(&before, &after, 10.0, "nobody"), None);
}

#[test]
fn a_greedy_neighbour() {
    let load = Load { units: 20_000, bytes: 20_000 << 20, wait_us: 0, took_us: 100, ..HEALTHY };
    let daemon = Daemon {
        web: vec![Load { wait_us: 900, ..HEALTHY }],
        other: load,
        busy: 9_900_000,
        delayed: 50_000,
        ran: 9_950_000,
        ..healthy()
    };
    assert_eq!(daemon.causes("web"), [SlowdownCause::GreedyNeighbour]);
    // The neighbour itself waits for nobody.
    assert_eq!(daemon.causes("other"), []);
    // Work that is fairly shared is nobody's fault.
    let fair = Daemon { other: HEALTHY, ..daemon };
    assert_eq!(fair.causes("web"), []);
}

#[test]
fn a_starved_core() {
    let starved = Daemon {
        web: vec![Load { wait_us: 4_000, ..HEALTHY }],
        delayed: 5_000_000,
        ran: 4_000_000,
        ..healthy()
    };
    assert_eq!(starved.causes("web"), [SlowdownCause::StarvedCore]);
    // One that yields to others while it has nothing to do harms nobody.
    let yields = Daemon { web: vec![HEALTHY], ..starved };
    assert_eq!(yields.causes("web"), []);
    // Nor does one that waits for a quarter of the little that it runs.
    let little =
        Daemon { web: vec![Load { wait_us: 4_000, ..HEALTHY }], delayed: 100_000, ran: 300_000, ..healthy() };
    assert_eq!(little.causes("web"), []);
}

#[test]
fn a_starved_core_that_is_woken_for_its_requests() {
    // What a request waits from its kick until the core runs is in no histogram.
    let load = Load { units: 5_000, bytes: 5_000 << 12, events: 10_000, ..HEALTHY };
    let starved = Daemon { web: vec![load], delayed: 5_000_000, ran: 300_000, wakes: 5_000, ..healthy() };
    assert_eq!(starved.causes("web"), [SlowdownCause::StarvedCore]);
    // Each time for a few microseconds only.
    let often = Daemon { wakes: 500_000, ..starved };
    assert_eq!(often.causes("web"), []);
    // Others are starved by that, and this device's requests are found by looking.
    let other = Daemon { web: vec![Load { events: 0, ..load }], wakes: 5_000, ..often };
    assert_eq!(other.causes("web"), []);
}

#[test]
fn a_ring_that_waits_for_a_busy_core_is_not_called_full() {
    // It is never empty, so that each request seems to wait for seconds.
    let load = Load { units: 200_000, wait_us: 3_000_000, took_us: 40, ..HEALTHY };
    let busy = Daemon { web: vec![load], busy: 9_900_000, ran: 9_900_000, ..healthy() };
    assert_eq!(busy.causes("web"), []);
    // One of several queues is a cause, and its ring is not another.
    let one = Daemon { web: vec![load, IDLE], ..busy };
    assert_eq!(one.causes("web"), [SlowdownCause::OneQueue]);
    // All of a ring waits for a core that has no processor.
    let waits = Load { units: 20_000, wait_us: 60_000, took_us: 40, ..HEALTHY };
    let starved =
        Daemon { web: vec![waits], busy: 2_000_000, ran: 2_000_000, delayed: 8_000_000, ..healthy() };
    assert_eq!(starved.causes("web"), [SlowdownCause::StarvedCore]);
}

#[test]
fn a_ring_is_full_if_most_of_it_is_in_the_device_and_the_rest_waits() {
    // 80 of 128 are in the device, and 40 wait for a core that seldom has a processor.
    let load = Load { units: 800_000, wait_us: 500, took_us: 1_000, events: 0, ..HEALTHY };
    assert_eq!(Daemon { web: vec![load], ..healthy() }.causes("web"), [SlowdownCause::FullRing]);
    // The other way round the core is what they wait for.
    let load = Load { wait_us: 1_000, took_us: 500, ..load };
    assert_eq!(Daemon { web: vec![load], ..healthy() }.causes("web"), []);
}

#[test]
fn a_slow_disk() {
    let slow =
        |units, took_us| Daemon { web: vec![Load { units, took_us, events: 0, ..HEALTHY }], ..healthy() };
    assert_eq!(slow(2_000, 9_000).causes("web"), [SlowdownCause::SlowDisk]);
    assert_eq!(slow(2_000, 900).causes("web"), []);
    // All that a ring can hold is on its way, each for long.
    assert_eq!(slow(64_000, 20_000).causes("web"), [SlowdownCause::SlowDisk, SlowdownCause::FullRing]);
}

#[test]
fn a_full_ring() {
    // 128 of them at 1 ms each.
    let full = |features| Daemon {
        web: vec![Load { units: 1_250_000, took_us: 1_000, events: 0, ..HEALTHY }],
        features,
        ..healthy()
    };
    assert_eq!(full(FEATURES).causes("web"), [SlowdownCause::FullRing]);
    // Without indirect tables a ring holds a third.
    let third = |features| Daemon {
        web: vec![Load { units: 450_000, took_us: 1_000, events: 0, ..HEALTHY }],
        features,
        ..healthy()
    };
    assert_eq!(third(FEATURES).causes("web"), []);
    assert_eq!(third(1 << 29).causes("web"), [SlowdownCause::FullRing]);
}

#[test]
fn a_limit_that_bites() {
    let load = Load { units: 20_000, wait_us: 30_000, limited: 500, ..HEALTHY };
    let daemon = Daemon { web: vec![load], iops_limit: Some(2_000), ..healthy() };
    assert_eq!(daemon.causes("web"), [SlowdownCause::Limit]);
    // One that a guest does not reach.
    let daemon = Daemon { web: vec![HEALTHY], iops_limit: Some(20_000), ..healthy() };
    assert_eq!(daemon.causes("web"), []);
}

/// What is found of `name`, which is one limit and nothing else: in words, and what would help.
fn limit_of(daemon: &Daemon, name: &str) -> (String, String) {
    assert_eq!(daemon.causes(name), [SlowdownCause::Limit], "{name}");
    let report = explain(&daemon.status(false), &daemon.status(true), 10.0, name).unwrap();
    let finding = report.findings.into_iter().next().unwrap();
    (finding.text, finding.remedy)
}

#[test]
fn a_limit_of_a_group_that_bites() {
    let held = Load { units: 15_000, bytes: 15_000 << 12, wait_us: 60_000, limited: 700, ..HEALTHY };
    let other = Load { units: 4_900, wait_us: 3_000, limited: 40, ..HEALTHY };
    let group_limits = json!({"iops_limit": 2_000});
    let daemon =
        Daemon { web: vec![held], other, other_in_group: true, group_limits, received: HEALTHY, ..healthy() };
    let (text, remedy) = limit_of(&daemon, "web");
    assert!(text.starts_with("the limit of its group tenant of 2000 requests per second bites"), "{text}");
    assert!(
        text.contains("1990 per second have passed of the whole group, 1500 of them of this disk"),
        "{text}"
    );
    assert!(text.ends_with("and 700 times others of it were left waiting"), "{text}");
    assert_eq!(remedy, "ioplane group set tenant --iops-limit N, or 0 for no limit");
    assert!(limit_of(&daemon, "other").0.contains("490 of them of this disk"));
    // The NIC of the same group has another limit, which is none.
    assert_eq!(daemon.causes("lan"), []);
    // Nor is a member at fault that has not been held back, or one of another group.
    let daemon = Daemon { other: Load { limited: 0, ..HEALTHY }, ..daemon };
    assert_eq!(daemon.causes("other"), []);
    let daemon = Daemon { web: vec![Load { units: 19_900, ..held }], other_in_group: false, ..daemon };
    assert_eq!((daemon.causes("other"), daemon.causes("web")), (vec![], vec![SlowdownCause::Limit]));
    // What others do is not counted to the group.
    let daemon = Daemon { web: vec![Load { units: 15_000, limited: 0, wait_us: 2, ..held }], ..daemon };
    assert_eq!(daemon.causes("web"), []);
}

#[test]
fn of_two_limits_the_one_that_bites() {
    let held = Load { units: 20_000, wait_us: 60_000, limited: 700, ..HEALTHY };
    let limits = |own: u64, group: u64| Daemon {
        web: vec![held],
        iops_limit: Some(own),
        group_limits: json!({"iops_limit": group}),
        ..healthy()
    };
    assert!(limit_of(&limits(2_000, 2_100), "web").1.contains("disk set web"));
    assert!(limit_of(&limits(2_100, 2_000), "web").1.contains("group set tenant"));
    assert_eq!(limits(2_000, 2_000).causes("web"), [SlowdownCause::Limit, SlowdownCause::Limit]);
}

#[test]
fn a_limit_of_bytes_and_one_of_receiving_that_a_group_has() {
    let held = Load { units: 1_000, bytes: 100 << 20, wait_us: 60_000, limited: 700, ..HEALTHY };
    let disk = Daemon { web: vec![held], group_limits: json!({"bandwidth_limit": "10M"}), ..healthy() };
    assert!(limit_of(&disk, "web").1.contains("group set tenant --bandwidth-limit"));
    // Frames that a limit holds back fill the buffers of the switch: the guest is not slow.
    let group_limits = json!({"rx_frame_limit": 100});
    let nic = Daemon { received: held, dropped: 5_000, group_limits, ..healthy() };
    assert!(limit_of(&nic, "lan").1.contains("group set tenant --rx-frame-limit"));
    // What it receives is no reason to speak of its limit for sending.
    let nic = Daemon { group_limits: json!({"tx_frame_limit": 100}), ..nic };
    assert_eq!(nic.causes("lan"), [SlowdownCause::SlowReceiver]);
}

#[test]
fn a_group_has_its_devices() {
    let names = |daemon: &Daemon, name| {
        let report = explain(&daemon.status(false), &daemon.status(true), 10.0, name).unwrap();
        assert_eq!(report.findings, []);
        report.devices.into_iter().map(|device| device.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&healthy(), "tenant"), ["web", "lan"]);
    assert_eq!(names(&Daemon { other_in_group: true, ..healthy() }, "tenant"), ["web", "other", "lan"]);
    assert_eq!(names(&healthy(), "empty"), [""; 0]);
}

#[test]
fn one_queue_in_use() {
    let busy = |busy| Daemon {
        web: vec![HEALTHY, IDLE, IDLE, IDLE],
        busy,
        delayed: 100_000,
        ran: 9_900_000,
        ..healthy()
    };
    assert_eq!(busy(9_500_000).causes("web"), [SlowdownCause::OneQueue]);
    // It is enough while its core is not busy.
    assert_eq!(busy(3_000_000).causes("web"), []);
}

#[test]
fn a_guest_without_event_idx() {
    let without = |events| Daemon {
        web: vec![Load { events, ..HEALTHY }],
        features: FEATURES & !(1 << 29),
        ..healthy()
    };
    assert_eq!(without(150_000).causes("web"), [SlowdownCause::NoEventIdx]);
    assert_eq!(without(2_000).causes("web"), []);
}

#[test]
fn a_slow_receiver() {
    let daemon = |dropped| Daemon { received: HEALTHY, dropped, ..healthy() };
    assert_eq!(daemon(20_000).causes("lan"), [SlowdownCause::SlowReceiver]);
    assert_eq!(daemon(20).causes("lan"), []);
    // It takes none at all.
    assert_eq!(Daemon { received: IDLE, ..daemon(20_000) }.causes("lan"), [SlowdownCause::SlowReceiver]);
}

#[test]
fn a_queue_that_has_stopped() {
    assert_eq!(
        Daemon { fault: true, web: vec![IDLE], ..healthy() }.causes("web"),
        [SlowdownCause::StoppedQueue]
    );
}

#[test]
fn how_a_queue_was_served_is_said_and_no_finding() {
    let chosen = |polled, armed, reason| Daemon { chosen: Some((polled, armed, reason)), ..healthy() };
    let said = |daemon: &Daemon| {
        let report = explain(&daemon.status(false), &daemon.status(true), 10.0, "web").unwrap();
        report.choices.into_iter().map(|one| one.text).collect::<Vec<_>>()
    };
    let armed = chosen(3, 97, ChoiceReason::LongGaps);
    assert_eq!(said(&armed), ["armed most of the time (97 %), since of long_gaps"]);
    assert_eq!(armed.causes("web"), []);
    assert_eq!(said(&chosen(99, 1, ChoiceReason::SpunInVain)), ["polled most of the time (99 %)"]);
    let both = chosen(60, 40, ChoiceReason::SpunInVain);
    assert_eq!(said(&both), ["polled 60 %, armed 40 % of the time, since of spun_in_vain"]);
    // A core that decides nothing, and a queue without requests.
    assert_eq!(said(&healthy()), [""; 0]);
    assert_eq!(said(&Daemon { web: vec![IDLE], ..chosen(3, 97, ChoiceReason::LongGaps) }), [""; 0]);
}

#[test]
fn a_ceiling_that_forbids_polling() {
    let ceiling = |armed, reason| Daemon { chosen: Some((100 - armed, armed, reason)), ..healthy() };
    assert_eq!(ceiling(70, ChoiceReason::Ceiling).causes("web"), [SlowdownCause::Ceiling]);
    assert_eq!(ceiling(10, ChoiceReason::Ceiling).causes("web"), []);
    assert_eq!(ceiling(70, ChoiceReason::LongGaps).causes("web"), []);
}

#[test]
fn where_the_time_of_a_request_goes_is_said_of_a_healthy_device() {
    let said = "A request of web takes at most 32 us on average: at most 2.0 us until the core takes it, 30 us in the device (/img).";
    assert_eq!(healthy().said("web"), said);
    // An interrupt for each second request.
    let told = Daemon { web: vec![Load { events: 100_000, ..HEALTHY }], ..healthy() }.said("web");
    assert!(told.starts_with("A request of web takes at most 37 us on average"), "{told}");
    assert!(told.ends_with(", 30 us in the device (/img), 4.9 us until the interrupt is sent."), "{told}");
    // Each queue counts by its requests.
    let queues = vec![HEALTHY, Load { units: 300_000, took_us: 8_000, wait_us: 0, ..HEALTHY }, IDLE];
    let said = Daemon { web: queues, ..healthy() }.said("web");
    assert!(said.starts_with("A request of web takes at most 610"), "{said}");
    assert!(said.contains(": at most 0.5 us until the core takes it, 610"), "{said}");
    let nic = Daemon { received: HEALTHY, ..healthy() }.said("lan");
    assert!(nic.starts_with("A frame for lan takes 30 us on average to copy"), "{nic}");
}

#[test]
fn what_waits_for_a_limit_is_said_to() {
    // Its ring is never empty, so the histogram says nothing: 128 of them are in the ring at most.
    let load = Load { units: 20_000, wait_us: 5_000_000, limited: 500, events: 0, ..HEALTHY };
    let daemon = Daemon { web: vec![load], iops_limit: Some(2_000), ..healthy() };
    let said = daemon.said("web");
    assert!(
        said.contains("takes at most 64 ms on average: at most 64 ms in the ring, since a limit"),
        "{said}"
    );
    assert!(said.contains(", 30 us in the device"), "{said}");
}

#[test]
fn a_device_without_requests_is_said_to_have_none() {
    assert_eq!(healthy().said("other"), "other had no requests in this time.");
    assert_eq!(healthy().said("lan"), "lan had no frames in this time.");
    let silent = Daemon { web: vec![IDLE], ..healthy() };
    assert_eq!(silent.said("web"), "web had no requests in this time.");
    let (before, mut after) = (silent.status(false), silent.status(true));
    after.disks[0].queues[0].counts.wait = times(3, 7);
    let report = explain(&before, &after, 10.0, "web").unwrap();
    assert_eq!(report.devices[0].text, "7 requests of web were taken in this time, and none was answered.");
}
