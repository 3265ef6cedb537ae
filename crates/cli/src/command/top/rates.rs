//! From two looks to rates.

use std::collections::HashMap;

use ioplane_api::report::{
    ChoiceParts, ChoiceReport, CoreReport, DecisionReport, DeviceQueue, FailureReport, FunctionReport,
    GroupReport, QueueWork, Role, StatusReport, VmReport,
};
use serde::Serialize;

use crate::command::show;

/// What happened between two looks.
#[derive(Debug, Clone, Serialize)]
pub struct Rates {
    /// Seconds between them.
    pub seconds: f64,
    /// Version of the daemon.
    pub version: String,
    /// The I/O cores.
    pub cores: Vec<CoreRates>,
    /// The groups of devices.
    pub groups: Vec<GroupRates>,
    /// The last decisions about cores, about the places of queues and about how queues are served, oldest first.
    pub decisions: Vec<DecisionReport>,
    pub queues: Vec<QueueRates>,
    pub ports: Vec<PortRates>,
    pub functions: Vec<FunctionRates>,
    /// What is to be served and cannot be.
    pub failures: Vec<FailureReport>,
}

/// One I/O core.
#[derive(Debug, Clone, Serialize)]
pub struct CoreRates {
    pub id: u32,
    /// `polled`, `adaptive` or `notified`.
    pub notify: String,
    pub queues: u32,
    /// Share of its time with work, percent.
    pub busy_percent: f64,
    /// Share of its time in which it polled and found nothing, or had yielded its processor, percent.
    pub empty_percent: f64,
    /// Share of its time asleep, percent.
    pub asleep_percent: f64,
    /// Processor time, percent of the interval.
    pub cpu_percent: f64,
    /// Requests, frames and completions.
    pub units_per_s: f64,
    /// Times it went to sleep.
    pub sleeps_per_s: f64,
}

impl CoreRates {
    fn between(was: &CoreReport, now: &CoreReport, per_s: impl Fn(u64, u64) -> f64) -> Self {
        let [busy, empty, asleep] =
            [(now.busy_us, was.busy_us), (now.empty_us, was.empty_us), (now.slept_us, was.slept_us)]
                .map(|(now, was)| now.saturating_sub(was) as f64);
        // By the core's own clock. One that has said nothing in between had no processor.
        let all = busy + empty + asleep;
        let part = |of: f64| if all > 0.0 { 100.0 * of / all } else { 0.0 };
        CoreRates {
            id: now.id,
            notify: now.notify.clone(),
            queues: now.queues,
            busy_percent: if all > 0.0 { part(busy) } else { now.busy_percent },
            empty_percent: part(empty),
            asleep_percent: part(asleep),
            cpu_percent: per_s(now.cpu_us, was.cpu_us) / 1e4,
            units_per_s: per_s(now.units, was.units),
            sleeps_per_s: per_s(now.sleeps, was.sleeps),
        }
    }
}

/// One group. Times are of all cores together, percent of one core.
#[derive(Debug, Clone, Serialize)]
pub struct GroupRates {
    pub name: String,
    /// The cores that its queues have used.
    pub cores: Vec<u32>,
    /// Requests and frames of its devices.
    pub units_per_s: f64,
    /// Bytes, in units of a million.
    pub mb_per_s: f64,
    /// Time with work of its queues.
    pub busy_percent: f64,
    /// Its part of the time in which cores polled and found nothing.
    pub empty_percent: f64,
    /// Polls of its queues that found nothing.
    pub empty_polls_per_s: f64,
}

impl GroupRates {
    /// `queues`: those of its devices.
    fn between<'q>(
        was: Option<&GroupReport>,
        now: &GroupReport,
        queues: impl Iterator<Item = &'q QueueRates> + Clone,
        per_s: impl Fn(u64, u64) -> f64,
    ) -> Self {
        let before = was.map_or(now.used, |was| was.used);
        let cores = now.used_per_core.iter().filter(|one| {
            let same = was.and_then(|was| was.used_per_core.iter().find(|was| was.core == one.core));
            same.is_none_or(|same| same.used != one.used)
        });
        GroupRates {
            name: now.name.clone(),
            cores: cores.map(|one| one.core).collect(),
            units_per_s: queues.clone().map(|queue| queue.units_per_s).sum(),
            mb_per_s: queues.map(|queue| queue.mb_per_s).sum(),
            busy_percent: per_s(now.used.busy_us, before.busy_us) / 1e4,
            empty_percent: per_s(now.used.empty_us, before.empty_us) / 1e4,
            empty_polls_per_s: per_s(now.used.empty_polls, before.empty_polls),
        }
    }
}

/// One queue. Percentiles are since the device was added.
#[derive(Debug, Clone, Serialize)]
pub struct QueueRates {
    /// Its disk or NIC.
    pub device: String,
    /// `disk`, `receive` or `transmit`.
    pub kind: &'static str,
    pub queue: u16,
    /// The VM that uses it.
    pub vm: Option<String>,
    pub core: Option<u32>,
    /// Requests or frames.
    pub units_per_s: f64,
    /// Bytes, in units of a million.
    pub mb_per_s: f64,
    /// Kicks taken.
    pub kicks_per_s: f64,
    /// Batches that were found without one.
    pub kicks_avoided_per_s: f64,
    /// Interrupts sent.
    pub interrupts_per_s: f64,
    /// Batches shown without one.
    pub interrupts_avoided_per_s: f64,
    /// Waiting for the core, 99 of 100.
    pub wait_p99_us: f64,
    /// Device time, half.
    pub p50_us: f64,
    /// Device time, 99 of 100.
    pub p99_us: f64,
    /// From having results to having sent the interrupt for them, 99 of 100 interrupts.
    pub interrupt_p99_us: f64,
    /// Part of the time in which its core asked its driver to kick, percent; nothing where its core decides nothing for it.
    pub armed_percent: Option<f64>,
    /// Part of the time in which a limit held its requests back, percent.
    pub held_percent: f64,
    /// Why it was armed or held back for longest: `long_gaps`, `spun_in_vain`, ...
    pub why: Option<String>,
    /// Why it has stopped.
    pub fault: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct PortRates {
    pub switch: String,
    pub port: String,
    /// Frames from its owner.
    pub sent_per_s: f64,
    /// Frames to its owner.
    pub received_per_s: f64,
    /// Frames dropped, both ways.
    pub dropped_per_s: f64,
}

/// One PCI function. What only a monitor sees is `None` where there is none.
#[derive(Debug, Clone, Serialize)]
pub struct FunctionRates {
    pub name: String,
    /// `virtual` (mediated), `passthrough` or `emulated`.
    pub mode: String,
    /// The VM that uses it.
    pub vm: Option<String>,
    /// Where it stands, in a word.
    pub standing: &'static str,
    /// The state of each region of its model, and whether it is reusable.
    pub states: Option<String>,
    /// Mediated: accesses of the guest to registers. Otherwise: those that came to the daemon, the configuration space among them.
    pub accesses_per_s: f64,
    /// The share of them that the model was asked about, percent; since it was added if there were none in between.
    pub hooked_percent: Option<f64>,
    /// Interrupts of the hardware; of a function that is not mediated those that the daemon sent.
    pub interrupts_per_s: f64,
    /// Descriptors vetted.
    pub dma_vetted_per_s: Option<f64>,
    /// What was denied, since it was added.
    pub denied: Option<u64>,
}

/// By what queues and functions are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// Requests and frames; accesses.
    Rate,
    /// Kicks; accesses, which are exits too.
    Kicks,
    /// Device time; name.
    Latency,
    Name,
}

impl Sort {
    pub fn next(self) -> Self {
        match self {
            Sort::Rate => Sort::Kicks,
            Sort::Kicks => Sort::Latency,
            Sort::Latency => Sort::Name,
            Sort::Name => Sort::Rate,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Sort::Rate => "rate",
            Sort::Kicks => "kicks",
            Sort::Latency => "p99",
            Sort::Name => "name",
        }
    }
}

/// A queue at one moment: its work, how its core learned of its requests, and what does not need a difference.
type Looked = (QueueWork, Option<ChoiceReport>, QueueRates);

/// A queue at one moment, whatever its device: what grows, and what does not need a difference.
fn queue(device: &str, vm: &Option<VmReport>, queue: &impl DeviceQueue) -> Looked {
    let work = queue.work();
    let rates = QueueRates {
        device: device.to_owned(),
        kind: queue.role().map_or("disk", Role::word),
        queue: queue.index(),
        vm: vm.as_ref().map(|vm| vm.name.clone()),
        core: queue.core(),
        units_per_s: 0.0,
        mb_per_s: 0.0,
        kicks_per_s: 0.0,
        kicks_avoided_per_s: 0.0,
        interrupts_per_s: 0.0,
        interrupts_avoided_per_s: 0.0,
        wait_p99_us: work.wait_p99_us,
        p50_us: work.p50_us,
        p99_us: work.p99_us,
        interrupt_p99_us: work.interrupt_p99_us,
        armed_percent: None,
        held_percent: 0.0,
        why: None,
        fault: queue.fault().map(|fault| fault.name.clone()),
    };
    (work, queue.choice().cloned(), rates)
}

fn queues(status: &StatusReport) -> Vec<Looked> {
    let disks = status
        .disks
        .iter()
        .flat_map(|disk| disk.queues.iter().map(move |one| queue(&disk.name, &disk.vm, one)));
    let nics =
        status.nics.iter().flat_map(|nic| nic.queues.iter().map(move |one| queue(&nic.name, &nic.vm, one)));
    disks.chain(nics).collect()
}

/// What a function did between two looks.
fn function(was: &FunctionReport, now: &FunctionReport, per_s: impl Fn(u64, u64) -> f64) -> FunctionRates {
    let row = FunctionRates {
        name: now.name.clone(),
        mode: now.mode.clone(),
        vm: now.vm.as_ref().map(|vm| vm.name.clone()),
        standing: show::standing(now),
        states: None,
        accesses_per_s: 0.0,
        hooked_percent: None,
        interrupts_per_s: 0.0,
        dma_vetted_per_s: None,
        denied: None,
    };
    let Some(seen) = &now.watch else {
        let accesses = |one: &FunctionReport| one.traffic.reads.saturating_add(one.traffic.writes);
        return FunctionRates {
            accesses_per_s: per_s(accesses(now), accesses(was)),
            interrupts_per_s: per_s(now.traffic.interrupts, was.traffic.interrupts),
            ..row
        };
    };
    let before = was.watch.as_ref().unwrap_or(seen);
    let (accesses, hooked) = (per_s(seen.accesses, before.accesses), per_s(seen.hooked, before.hooked));
    let share = if accesses > 0.0 { 100.0 * hooked / accesses } else { seen.hooked_percent };
    FunctionRates {
        states: Some(show::states(seen)),
        accesses_per_s: accesses,
        hooked_percent: Some(share),
        interrupts_per_s: per_s(seen.interrupts, before.interrupts),
        dma_vetted_per_s: Some(per_s(seen.dma_vetted, before.dma_vetted)),
        denied: Some(seen.denied),
        ..row
    }
}

impl Rates {
    /// What happened in `seconds` between two looks. What was not there before has no rate yet; what was restarted begins
    /// again.
    pub fn between(before: &StatusReport, after: &StatusReport, seconds: f64) -> Rates {
        let per_s = |after: u64, before: u64| match after.checked_sub(before) {
            Some(more) if seconds > 0.0 => more as f64 / seconds,
            _ => 0.0,
        };
        let old: HashMap<(String, u16), (QueueWork, Option<ChoiceReport>)> = queues(before)
            .into_iter()
            .map(|(sums, choice, row)| ((row.device, row.queue), (sums, choice)))
            .collect();
        let rated: Vec<QueueRates> = queues(after)
            .into_iter()
            .map(|(sums, choice, row)| {
                let before = old.get(&(row.device.clone(), row.queue));
                let was = before.map_or(sums, |(was, _)| *was);
                let chosen = before.and_then(|(_, choice)| choice.as_ref());
                let parts = choice.map_or(ChoiceParts::default(), |choice| choice.since(chosen));
                let decided = parts.polled + parts.armed > 0.0;
                QueueRates {
                    armed_percent: decided.then_some(100.0 * parts.armed),
                    held_percent: 100.0 * parts.held,
                    why: parts.most.map(|(reason, _)| reason.word().to_owned()),
                    units_per_s: per_s(sums.units, was.units),
                    mb_per_s: per_s(sums.bytes, was.bytes) / 1e6,
                    kicks_per_s: per_s(sums.kicks, was.kicks),
                    kicks_avoided_per_s: per_s(sums.kicks_avoided, was.kicks_avoided),
                    interrupts_per_s: per_s(sums.interrupts, was.interrupts),
                    interrupts_avoided_per_s: per_s(sums.interrupts_avoided, was.interrupts_avoided),
                    ..row
                }
            })
            .collect();
        let groups = after.groups.iter().map(|group| {
            let was = before.groups.iter().find(|was| was.name == group.name);
            let inside = |queue: &&QueueRates| {
                let devices = if queue.kind == "disk" { &group.disks } else { &group.nics };
                devices.contains(&queue.device)
            };
            GroupRates::between(was, group, rated.iter().filter(inside), per_s)
        });
        let cores = after.cores.iter().map(|core| {
            let was = before.cores.iter().find(|was| was.id == core.id).unwrap_or(core);
            CoreRates::between(was, core, per_s)
        });
        let ports = after.switches.iter().flat_map(|switch| {
            let was = before.switches.iter().find(|was| was.name == switch.name);
            switch.ports.iter().map(move |port| {
                let was =
                    was.and_then(|was| was.ports.iter().find(|was| was.name == port.name)).unwrap_or(port);
                PortRates {
                    switch: switch.name.clone(),
                    port: port.name.clone(),
                    sent_per_s: per_s(port.sent_frames, was.sent_frames),
                    received_per_s: per_s(port.received_frames, was.received_frames),
                    dropped_per_s: per_s(port.dropped(), was.dropped()),
                }
            })
        });
        let functions = after.functions.iter().map(|now| {
            let was = before.functions.iter().find(|was| was.name == now.name).unwrap_or(now);
            function(was, now, per_s)
        });
        let (cores, ports, functions) = (cores.collect(), ports.collect(), functions.collect());
        let (version, failures) = (after.version.clone(), after.failures());
        let (groups, decisions) = (groups.collect(), after.decisions.clone());
        Rates { seconds, version, cores, groups, decisions, queues: rated, ports, functions, failures }
    }

    /// Puts the queues and the functions in order.
    pub fn sort(&mut self, by: Sort) {
        let key = |row: &QueueRates| match by {
            Sort::Rate => row.units_per_s,
            Sort::Kicks => row.kicks_per_s,
            Sort::Latency => row.p99_us,
            Sort::Name => 0.0,
        };
        self.queues.sort_by(|a, b| {
            let name = || (&a.device, a.queue).cmp(&(&b.device, b.queue));
            key(b).total_cmp(&key(a)).then_with(name)
        });
        let key = |row: &FunctionRates| match by {
            Sort::Rate | Sort::Kicks => row.accesses_per_s,
            Sort::Latency | Sort::Name => 0.0,
        };
        self.functions.sort_by(|a, b| key(b).total_cmp(&key(a)).then_with(|| a.name.cmp(&b.name)));
    }
}
