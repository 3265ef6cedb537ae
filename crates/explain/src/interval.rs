//! What devices and cores did between two readings.

use std::collections::BTreeSet;
use std::ops::Add;

use ioplane_api::report::{
    BackingReport, ChoiceParts, ChoiceReport, ChoiceText, CoreReport, DeviceTimes, DiskReport, NicReport,
    StatusReport,
};
use ioplane_device::Histogram;

use crate::side::{LimitActivity, Passed, Side};

/// What a request costs a core beside its bytes, in bytes that could be copied meanwhile (docs/decisions/0017-work-per-poll.md).
const REQUEST_COST: u64 = 512;

/// The part of the time from which a queue is mostly polled, or mostly armed.
const MOST: f64 = 0.8;

/// The part of the time from which a limit is worth a word.
const SOME: f64 = 0.05;

/// Buckets of times, as differences of two readings.
#[derive(Debug, Clone, Default)]
pub struct Times(Vec<u64>);

impl Times {
    fn between(before: &[u64], after: &[u64]) -> Self {
        let was = |at: usize| before.get(at).copied().unwrap_or(0);
        Times(after.iter().enumerate().map(|(at, now)| now.saturating_sub(was(at))).collect())
    }

    fn add(&mut self, other: &Times) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(all, one)| *all += one);
    }

    /// The time below which `part` (0 to 1) of them lie, us.
    pub fn quantile(&self, part: f64) -> f64 {
        Histogram::quantile(&self.0, part) as f64 / 1000.0
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Their sum, s: what lies in a bucket counts as the middle of it.
    pub fn sum_s(&self) -> f64 {
        let edge = |at: usize| Histogram::edge_ns(at) as f64;
        let middle = |at: usize| (at.checked_sub(1).map_or(0.0, edge) + edge(at)) / 2.0;
        self.0.iter().enumerate().map(|(at, count)| middle(at) / 1e9 * *count as f64).sum()
    }
}

/// What one queue did.
#[derive(Debug, Clone, Default)]
pub struct QueueActivity {
    pub index: u16,
    pub core: Option<u32>,
    /// Entries of its ring; 0 until its driver has set it up.
    pub size: u16,
    /// Only of a NIC: frames go to the guest.
    pub receives: bool,
    pub units: u64,
    pub bytes: u64,
    pub kicks: u64,
    pub interrupts: u64,
    /// Polls that left something in the ring because a limit held it back.
    pub limited: u64,
    pub waited: Times,
    pub took: Times,
    pub to_interrupt: Times,
    /// How its core learned of its requests.
    pub chosen: ChoiceParts,
    /// Why it has stopped, in words.
    pub fault: Option<String>,
}

/// What is behind a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackingActivity {
    /// An image of this host.
    Image(String),
    /// A disk of another host, by its NBD URI.
    Remote(String),
}

/// What one device did.
#[derive(Debug, Clone, Default)]
pub struct DeviceActivity {
    pub kind: &'static str,
    pub name: String,
    pub vm: Option<String>,
    pub group: Option<String>,
    /// Virtio features that its driver accepted, as bits.
    pub features: u64,
    /// What is behind a disk that can be slow: none behind one in memory.
    pub backing: Option<BackingActivity>,
    pub queues: Vec<QueueActivity>,
    /// Its own and its group's: entered by `limits`.
    pub limits: Vec<LimitActivity>,
    /// Frames for it that the switch has dropped because its buffers were full.
    pub dropped_full: u64,
}

/// What one core did.
#[derive(Debug, Clone, Default)]
pub struct CoreActivity {
    pub id: u32,
    pub cpu: Option<u32>,
    pub yield_policy: String,
    /// Parts of the time: with work, on a processor, without one although it could have run.
    pub busy: f64,
    pub ran: f64,
    pub delayed: f64,
    /// How long it was without a processor for each time that it was woken, us. It may have been without one at other times too.
    pub delay_per_wake_us: f64,
}

/// What there was between two readings.
#[derive(Debug, Clone, Default)]
pub struct Interval {
    pub seconds: f64,
    pub devices: Vec<DeviceActivity>,
    pub cores: Vec<CoreActivity>,
}

macro_rules! queue {
    ($before:expr, $after:expr, $units:ident, $receives:expr) => {{
        let (after, before) = ($after, $before.iter().find(|queue| queue.index == $after.index));
        // One that was not there before has no past; one that was restarted begins again.
        let of = |value: &dyn Fn(&_) -> u64| value(after).saturating_sub(before.map_or(0, value));
        let was = |value: fn(&_) -> &[u64]| before.map_or(&[][..], value);
        QueueActivity {
            index: after.index,
            core: after.core,
            size: after.size,
            receives: $receives,
            units: of(&|queue| queue.counts.$units),
            bytes: of(&|queue| queue.counts.bytes),
            kicks: of(&|queue| queue.counts.kicks),
            interrupts: of(&|queue| queue.counts.interrupts),
            limited: of(&|queue| queue.counts.limited),
            waited: Times::between(was(|queue| &queue.counts.wait), &after.counts.wait),
            took: Times::between(was(|queue| &queue.counts.latency), &after.counts.latency),
            to_interrupt: Times::between(was(|queue| &queue.counts.interrupt), &after.counts.interrupt),
            chosen: chosen(before.and_then(|queue| queue.choice.as_ref()), after.choice.as_ref()),
            fault: after.fault.as_ref().map(|fault| fault.text.clone()),
        }
    }};
}

/// How a queue was served. Of one that is on no core nothing is known.
fn chosen(before: Option<&ChoiceReport>, after: Option<&ChoiceReport>) -> ChoiceParts {
    after.map_or(ChoiceParts::default(), |after| after.since(before))
}

/// How a queue was served, in words; nothing where its core decided nothing.
fn words(chosen: &ChoiceParts) -> Option<String> {
    let ChoiceParts { polled, armed, held, most } = chosen;
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let since = most.as_ref().map_or(String::new(), |(_, why)| format!(", since {why}"));
    let (polled, armed, held) = (*polled, *armed, *held);
    if held >= SOME {
        Some(format!("held back {} of the time{since}", percent(held)))
    } else if armed >= MOST {
        Some(format!("armed most of the time ({}){since}", percent(armed)))
    } else if polled >= MOST {
        Some(format!("polled most of the time ({})", percent(polled)))
    } else if armed + polled + held > 0.0 {
        Some(format!("polled {}, armed {} of the time{since}", percent(polled), percent(armed)))
    } else {
        None
    }
}

fn disk(before: Option<&DiskReport>, after: &DiskReport) -> DeviceActivity {
    let old = before.map_or(&[][..], |disk| &disk.queues);
    let queues: Vec<QueueActivity> =
        after.queues.iter().map(|queue| queue!(old, queue, requests, false)).collect();
    DeviceActivity {
        kind: "disk",
        name: after.name.clone(),
        vm: after.vm.as_ref().map(|vm| vm.name.clone()),
        group: after.group.clone(),
        features: after.features,
        backing: backing(&after.backing),
        limits: Vec::new(),
        queues,
        dropped_full: 0,
    }
}

fn backing(report: &BackingReport) -> Option<BackingActivity> {
    let image = || Some(BackingActivity::Image(report.path.as_ref()?.display().to_string()));
    match &report.remote {
        Some(remote) => Some(BackingActivity::Remote(remote.uri.clone())),
        None => image(),
    }
}

fn nic(before: Option<&NicReport>, after: &NicReport) -> DeviceActivity {
    let old = before.map_or(&[][..], |nic| &nic.queues);
    let queues: Vec<QueueActivity> = after
        .queues
        .iter()
        .map(|queue| queue!(old, queue, frames, queue.role == ioplane_api::report::Role::Receive))
        .collect();
    let full = |nic: &NicReport| nic.port.received_drops.get("full").copied().unwrap_or(0);
    DeviceActivity {
        kind: "nic",
        name: after.name.clone(),
        vm: after.vm.as_ref().map(|vm| vm.name.clone()),
        group: after.group.clone(),
        features: after.features,
        backing: None,
        limits: Vec::new(),
        dropped_full: full(after).saturating_sub(before.map_or(0, full)),
        queues,
    }
}

fn core(before: Option<&CoreReport>, after: &CoreReport) -> CoreActivity {
    let of = |value: fn(&CoreReport) -> u64| value(after).saturating_sub(before.map_or(0, value)) as f64;
    // By the core's own clock: its counts and its age are read at one moment.
    let age = of(|core| core.age_us).max(1.0);
    let (wakes, delay_us) = (of(|core| core.wakes), of(|core| core.run_delay_us));
    CoreActivity {
        id: after.id,
        cpu: after.cpu,
        yield_policy: after.yield_policy.clone(),
        busy: (of(|core| core.busy_us) / age).min(1.0),
        ran: of(|core| core.cpu_us) / age,
        delayed: delay_us / age,
        delay_per_wake_us: delay_us / wakes.max(1.0),
    }
}

impl Interval {
    /// What there was in `seconds` between two readings.
    pub fn between(before: &StatusReport, after: &StatusReport, seconds: f64) -> Self {
        let disks =
            after.disks.iter().map(|now| disk(before.disks.iter().find(|was| was.name == now.name), now));
        let nics = after.nics.iter().map(|now| nic(before.nics.iter().find(|was| was.name == now.name), now));
        let cores = after.cores.iter().map(|now| core(before.cores.iter().find(|was| was.id == now.id), now));
        Interval { seconds, devices: disks.chain(nics).collect(), cores: cores.collect() }
    }

    /// The core of that number.
    pub fn core(&self, id: u32) -> Option<&CoreActivity> {
        self.cores.iter().find(|core| core.id == id)
    }
}

impl QueueActivity {
    /// How long its units have waited in the ring at most, all together, s. Of a ring that is never empty the histogram says nothing, but no more of
    /// them can have been there at once than it has entries.
    pub fn waited_s(&self, seconds: f64) -> f64 {
        let seen = self.waited.sum_s();
        if self.size == 0 {
            seen
        } else {
            seen.min((f64::from(self.size) * seconds - self.took.sum_s()).max(0.0))
        }
    }
}

impl DeviceActivity {
    /// Whether `name` is its, its VM's, or its group's.
    pub fn is(&self, name: &str) -> bool {
        self.name == name || [&self.vm, &self.group].into_iter().any(|of| of.as_deref() == Some(name))
    }

    /// Whether it is one of those that a limit of this side is for.
    pub fn has(&self, side: Side) -> bool {
        (self.kind == "disk") == (side == Side::Disk)
    }

    /// The queues of one side.
    pub fn side(&self, side: Side) -> impl Iterator<Item = &QueueActivity> {
        let has = self.has(side);
        self.queues.iter().filter(move |queue| has && queue.receives == (side == Side::Receives))
    }

    /// What passed on one side.
    pub fn passed(&self, side: Side) -> Passed {
        let of = |queue: &QueueActivity| Passed { units: queue.units, bytes: queue.bytes };
        self.side(side).map(of).fold(Passed::default(), Passed::add)
    }

    /// How often a limit left something in the rings of one side.
    pub fn held(&self, side: Side) -> u64 {
        self.side(side).map(|queue| queue.limited).sum()
    }

    /// What its units are called.
    pub fn units_word(&self) -> &'static str {
        if self.kind == "disk" { "requests" } else { "frames" }
    }

    pub fn units(&self) -> u64 {
        self.queues.iter().map(|queue| queue.units).sum()
    }

    fn all(&self, times: fn(&QueueActivity) -> &Times) -> Times {
        let mut all = Times::default();
        self.queues.iter().for_each(|queue| all.add(times(queue)));
        all
    }

    /// Waiting for the core, of all its queues.
    pub fn waited(&self) -> Times {
        self.all(|queue| &queue.waited)
    }

    /// In the device, of all its queues.
    pub fn took(&self) -> Times {
        self.all(|queue| &queue.took)
    }

    /// The cores that its queues are on.
    pub fn cores(&self) -> BTreeSet<u32> {
        self.queues.iter().filter(|queue| queue.units > 0).filter_map(|queue| queue.core).collect()
    }

    /// Kicks for each unit of its queues on a core.
    pub fn kicks_for_each(&self, core: u32) -> f64 {
        let there = self.queues.iter().filter(|queue| queue.core == Some(core));
        let (kicks, units) =
            there.fold((0, 0), |(kicks, units), queue| (kicks + queue.kicks, units + queue.units));
        kicks as f64 / units.max(1) as f64
    }

    /// What its queues cost a core, in bytes that could have been copied meanwhile.
    pub fn cost_on(&self, core: u32) -> u64 {
        let there = self.queues.iter().filter(|queue| queue.core == Some(core));
        there.map(|queue| queue.bytes + queue.units * REQUEST_COST).sum()
    }

    /// How the cores learned of the requests of each of its queues that had some, in words.
    pub fn choices(&self) -> impl Iterator<Item = ChoiceText> {
        let used = self.queues.iter().filter(|queue| queue.units > 0);
        used.filter_map(|queue| {
            let text = words(&queue.chosen)?;
            Some(ChoiceText { device: self.name.clone(), queue: queue.index, text })
        })
    }

    /// Its times, without words.
    pub fn times(&self, seconds: f64) -> DeviceTimes {
        let (waited, took, units) = (self.waited(), self.took(), self.units());
        let to_interrupt = self.all(|queue| &queue.to_interrupt);
        let sum = |value: fn(&QueueActivity) -> u64| self.queues.iter().map(value).sum::<u64>() as f64;
        let per_unit = |value| if units == 0 { 0.0 } else { sum(value) / units as f64 };
        DeviceTimes {
            kind: self.kind.to_owned(),
            name: self.name.clone(),
            units_per_s: units as f64 / seconds,
            mb_per_s: sum(|queue| queue.bytes) / seconds / 1e6,
            wait_p50_us: waited.quantile(0.5),
            wait_p99_us: waited.quantile(0.99),
            device_p50_us: took.quantile(0.5),
            device_p99_us: took.quantile(0.99),
            interrupt_p50_us: to_interrupt.quantile(0.5),
            interrupt_p99_us: to_interrupt.quantile(0.99),
            kicks_per_unit: per_unit(|queue| queue.kicks),
            interrupts_per_unit: per_unit(|queue| queue.interrupts),
            text: String::new(),
        }
    }
}
