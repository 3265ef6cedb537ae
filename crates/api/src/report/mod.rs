//! What the daemon says of itself: the JSON of `GET /v1/...` and of every `--json`. **The stable interface** that the demo, the
//! tests and other people's programs read: fields are added, never renamed or given another meaning.
//!
//! Counts are since the disk was added, or since the daemon was started if that was later. Times are in microseconds,
//! sizes in bytes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::size::Size;
use crate::spec::{LimitsSpec, limits_of};

mod arrival;
mod choice;
mod configuration;
mod daemon;
mod devices;
mod explain;
mod export;
mod function;
mod group;
mod network;
mod pool;
mod queue;
mod remote;
mod swap;
mod verify;
mod vm_pause;

pub use arrival::{ArrivalWord, ExpectedReport, MovePeerReport};
pub use choice::{ChoiceCount, ChoiceParts, ChoiceReason, ChoiceReport, ChoiceWord};
pub use configuration::SavedReport;
pub use daemon::{DaemonEvent, EventWord, HealthReport, HealthWord, MovedReport, VersionReport};
pub use devices::{DeviceReport, DevicesReport, HostWord, TakenReport};
pub use explain::{ChoiceText, DeviceTimes, ExplainReport, Slowdown, SlowdownCause};
pub use export::{ClaimReport, ExportReport, ReservationReport};
pub use function::{
    AheadFunctionReport, CarriedFunctionV1, ChipReport, CooperationReport, EventReport, FunctionReport,
    MoveStep, MovedFunctionReport, MsixReport, PhysicalReport, QuiesceReport, RegionReport,
    ReplayedFunctionReport, RestedFunctionReport, SaidFunctionV1, SetUpFunctionReport, Stage, StateFileV1,
    TrafficReport, VcpusReport, WatchFaultReport, WatchReport,
};
pub use group::{GroupCoreReport, GroupReport, GroupUseReport, InFlightReport};
pub use network::{
    FrameCounts, LearnedReport, NicQueueReport, NicReport, PortReport, Role, SwitchReport, SwitchTableReport,
};
pub use pool::{DecisionReport, DecisionWord, DecisionsReport, PoolReport};
pub use queue::{DeviceQueue, QueueWork};
pub use remote::{ClaimWord, ExporterWord, ProtectionWord, RemoteReport, RemoteWord};
pub use swap::{SwapReport, SwapWord};
pub use verify::{RangeReport, VerifyReport, VerifyWord};
pub use vm_pause::{VmPauseReport, VmPauseWord};

/// `ioplane status --json`, `GET /v1/status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StatusReport {
    /// Version of the daemon.
    pub version: String,
    /// Its process number.
    pub pid: u32,
    /// Since when it runs.
    pub uptime_s: u64,
    /// Its configuration file.
    pub config: PathBuf,
    /// Its disks, by name.
    pub disks: Vec<DiskReport>,
    /// Its switches, by name.
    #[serde(default)]
    pub switches: Vec<SwitchReport>,
    /// Its NICs, by name.
    #[serde(default)]
    pub nics: Vec<NicReport>,
    /// Its groups, by name.
    #[serde(default)]
    pub groups: Vec<GroupReport>,
    /// Its PCI functions, by name.
    #[serde(default)]
    pub functions: Vec<FunctionReport>,
    /// Its exports, by name.
    #[serde(default)]
    pub exports: Vec<ExportReport>,
    /// Its I/O cores.
    pub cores: Vec<CoreReport>,
    /// How many of them there are to be, and what was decided about them.
    #[serde(default)]
    pub pool: PoolReport,
    /// The last decisions, oldest first: up to 8 about cores and the places of queues, and up to 8 about how queues are served. More are kept: `GET
    /// /v1/pool/decisions`.
    #[serde(default)]
    pub decisions: Vec<DecisionReport>,
    /// How everything came to this process, if another one had it before.
    #[serde(default)]
    pub upgrade: Option<UpgradeReport>,
}

/// `ioplane upgrade --json`, `POST /v1/upgrade`: how everything went from one process to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UpgradeReport {
    /// The process that had it.
    pub from_pid: u32,
    /// Its version.
    pub from_version: String,
    /// The process that has it.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Each device.
    pub devices: Vec<PauseReport>,
}

/// How long one device's guest had to wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PauseReport {
    /// Of which kind the device is.
    pub kind: String,
    /// What it is called.
    pub name: String,
    /// From when the old process took no new requests to when the new one did; nothing if it did not within a second.
    pub pause_us: Option<u64>,
    /// Requests were still in flight, and are done again by the new process.
    pub suspended: bool,
}

/// The process that a front end is in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VmReport {
    /// Its number.
    pub pid: u32,
    /// The VM's name, as its VMM's command line has it (QEMU's `-name`); else the program's.
    pub name: String,
}

/// Whether a disk or a NIC is there for a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ServedState {
    /// Its socket is there.
    Served,
    /// Its image is being opened: perhaps I/O of a daemon that died is still landing there.
    Opening,
    /// It is to be served and cannot be; `error` says why. It is kept, and tried again, until it is removed.
    Failed,
    /// It is served, and busy with a change: its numbers are missing this time.
    Busy,
}

/// When one that could not be served is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RetryReport {
    /// How often it was tried so far.
    pub tries: u32,
    /// Milliseconds until the next try; 0 while it is being tried. Nothing if it is not tried by itself: `ioplane reload` does.
    pub next_ms: Option<u64>,
}

impl RetryReport {
    /// For people.
    pub fn words(self) -> String {
        let times = if self.tries == 1 { "once".to_owned() } else { format!("{} times", self.tries) };
        match self.next_ms {
            Some(0) => format!("tried {times}, and again just now"),
            Some(left) => format!("tried {times}, again in {} s", left.div_ceil(1000)),
            None => format!("tried {times}; `ioplane reload` tries again"),
        }
    }
}

/// Something that is to be served and cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FailureReport {
    /// `disk`, `nic`, `pci` or `switch`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Why.
    pub error: String,
    /// What to do about that.
    pub remedy: String,
    /// When it is tried again.
    pub retry: Option<RetryReport>,
}

impl FailureReport {
    /// For people.
    pub fn words(&self) -> String {
        let FailureReport { kind, name, error, .. } = self;
        let retry = self.retry.map_or(String::new(), |retry| format!("; {}", retry.words()));
        format!("{kind} {name}: {error}{retry}")
    }
}

impl StatusReport {
    /// All that is to be served and cannot be.
    pub fn failures(&self) -> Vec<FailureReport> {
        let disks = self.disks.iter().map(|one| ("disk", &one.name, &one.error, &one.remedy, one.retry));
        let nics = self.nics.iter().map(|one| ("nic", &one.name, &one.error, &one.remedy, one.retry));
        let functions =
            self.functions.iter().map(|one| ("pci", &one.name, &one.error, &one.remedy, one.retry));
        let switches =
            self.switches.iter().map(|one| ("switch", &one.name, &one.error, &one.remedy, one.retry));
        let exports =
            self.exports.iter().map(|one| ("export", &one.name, &one.error, &one.remedy, one.retry));
        let all = disks.chain(nics).chain(functions).chain(switches).chain(exports);
        let failures = all.filter_map(|one| {
            let (kind, name, error, remedy, retry) = one;
            let (error, remedy) = (error.clone()?, remedy.clone().unwrap_or_default());
            Some(FailureReport { kind: kind.to_owned(), name: name.clone(), error, remedy, retry })
        });
        failures.collect()
    }
}

/// A socket of a disk that may have two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum DiskSocket {
    /// Its own.
    Socket,
    /// The one for the destination of a migration.
    #[serde(alias = "twin")]
    MigrationSocket,
}

impl DiskSocket {
    /// What people call it.
    pub fn words(self) -> &'static str {
        match self {
            DiskSocket::Socket => "the first socket",
            DiskSocket::MigrationSocket => "the migration socket",
        }
    }
}

/// One disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Whether it is there.
    pub state: ServedState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// When it is tried again.
    #[serde(default)]
    pub retry: Option<RetryReport>,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// A front end (a VMM) is connected, to either socket.
    pub connected: bool,
    /// Front ends that have come so far, to either socket.
    pub connections: u64,
    /// Whose front end it is.
    #[serde(default)]
    pub vm: Option<VmReport>,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// Where the destination of a migration connects, if there is a migration socket.
    #[serde(default, alias = "twin")]
    pub migration_socket: Option<PathBuf>,
    /// Behind which of the two its rings run.
    #[serde(default)]
    pub owner: Option<DiskSocket>,
    /// Behind which of the two a front end has started rings that wait for the other's to stop.
    #[serde(default)]
    pub waiting: Option<DiskSocket>,
    /// What is behind it.
    pub backing: BackingReport,
    /// The swap that is under way, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<SwapReport>,
    /// The comparison with another copy that is under way, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
    /// How it stands with the pause of its VM, if its server may not be reachable and its policy is to pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_pause: Option<VmPauseReport>,
    /// Size, as the guest sees it.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// What the guest reads as its serial number.
    pub serial: String,
    /// Most entries of a ring.
    pub queue_size: u16,
    /// The core that its queues prefer.
    pub core: Option<u32>,
    /// The group it is in, if any.
    #[serde(default)]
    pub group: Option<String>,
    /// Requests per second that its guest may make, if they are limited.
    #[serde(default)]
    pub iops_limit: Option<u64>,
    /// Requests that may pass at once after a pause, if somebody has said so.
    #[serde(default)]
    pub iops_burst: Option<u64>,
    /// Bytes per second that its guest may read and write, if they are limited.
    #[serde(default)]
    pub bandwidth_limit: Option<Size>,
    /// Bytes that may pass at once after a pause, if somebody has said so.
    #[serde(default)]
    pub bandwidth_burst: Option<Size>,
    /// Virtio features that its driver accepted, as bits.
    pub features: u64,
    /// What front ends did wrong, by name of the fault.
    pub front_end_faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_front_end_fault: Option<String>,
    /// Memory mappings that front ends have taken.
    #[serde(default)]
    pub mappings: u64,
    /// All its queues together.
    pub totals: Counts,
    /// Each of them.
    pub queues: Vec<QueueReport>,
}

impl DiskReport {
    /// The limits of its guest.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(disk_limits of self)
    }
}

/// What is behind a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BackingReport {
    /// `file`, `memory` or `remote`.
    pub kind: String,
    /// The image.
    pub path: Option<PathBuf>,
    /// `io_uring` or `threads`.
    pub engine: Option<String>,
    /// Why it is threads, if io_uring was wanted.
    pub why_threads: Option<String>,
    /// Whether I/O goes past the host's page cache.
    pub direct: Option<bool>,
    /// How the connections to its server stand, while it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteReport>,
}

/// One queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueueReport {
    /// Its number.
    pub index: u16,
    /// Entries of its ring; 0 until the driver has set it up.
    pub size: u16,
    /// The I/O core it is on, if it runs.
    pub core: Option<u32>,
    /// Why it has stopped for good.
    pub fault: Option<FaultReport>,
    /// How its core learns of its requests, and why; nothing while it is on none.
    #[serde(default)]
    pub choice: Option<ChoiceReport>,
    /// What it did.
    #[serde(flatten)]
    pub counts: Counts,
}

/// What a guest did to its own queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FaultReport {
    /// Short name.
    pub name: String,
    /// In words.
    pub text: String,
}

/// What one queue, or all of a disk, did.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Requests answered.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Bytes read by the guest.
    pub bytes_read: u64,
    /// Bytes written by the guest.
    pub bytes_written: u64,
    /// Kicks: each is an exit of the guest.
    pub kicks: u64,
    /// That many for each request; 0 without requests.
    pub kicks_per_request: f64,
    /// Batches of requests that were found by looking, each without a kick.
    #[serde(default)]
    pub kicks_avoided: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// That many for each request; 0 without requests.
    pub interrupts_per_request: f64,
    /// Batches of answers without one.
    pub interrupts_avoided: u64,
    /// Times that the core looked at the queue and left requests in it because of a limit.
    #[serde(default)]
    pub limited: u64,
    /// Requests that failed, by cause.
    pub errors: Errors,
    /// Faults of the guest; each stops a queue.
    pub faults: u64,
    /// Requests done again after a crash of the daemon.
    pub replayed: u64,
    /// Device time: half of the requests had their results within this, from when they were taken.
    pub p50_us: f64,
    /// 99 of 100 were.
    pub p99_us: f64,
    /// Waiting for the core: half of the requests were taken within this; see `Meter::wait` of ioplane-device for what it can
    /// and cannot see.
    #[serde(default)]
    pub wait_p50_us: f64,
    /// 99 of 100 were.
    #[serde(default)]
    pub wait_p99_us: f64,
    /// Time to the interrupt: half of the interrupts were sent within this, from when the core had the results that they announce. Only
    /// interrupts count, since where the driver asks for none there is none to wait for.
    #[serde(default)]
    pub interrupt_p50_us: f64,
    /// 99 of 100 were.
    #[serde(default)]
    pub interrupt_p99_us: f64,
    /// Buckets of `Histogram` of ioplane-device for the device time, for the metrics.
    #[serde(skip)]
    pub latency: Vec<u64>,
    /// The same for the waiting.
    #[serde(skip)]
    pub wait: Vec<u64>,
    /// The same for the time to the interrupt.
    #[serde(skip)]
    pub interrupt: Vec<u64>,
}

/// Requests that failed, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Errors {
    /// The disk below reports an error.
    pub io: u64,
    /// No space left below, or beyond the end.
    pub space: u64,
    /// Malformed or not allowed.
    pub request: u64,
    /// Of a type that the disk does not know.
    pub unsupported: u64,
}

impl QueueReport {
    /// One of which nothing is known.
    pub fn blank(index: u16) -> Self {
        QueueReport { index, size: 0, core: None, fault: None, choice: None, counts: Counts::default() }
    }
}

words! {
    /// What came of what is asked of an I/O core.
    ObjectiveWord, Unknown,
    /// Nothing is asked of it, or it had too few requests to say.
    Unknown "unknown",
    /// It is kept.
    Kept "kept",
    /// Requests came late, since the ceiling forbade polling.
    LateByCeiling "late_by_ceiling",
    /// Requests came late although their queues were polled: the core has too much to do.
    LateByLoad "late_by_load",
    /// Work alone took more than the ceiling.
    OverCeiling "over_ceiling",
    /// The core is not adaptive: it pays no heed.
    Unheeded "unheeded",
}

/// One I/O core.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CoreReport {
    /// Its number.
    pub id: u32,
    /// The processor that it is pinned to.
    pub cpu: Option<u32>,
    /// The processor that it should be pinned to, where that was not allowed.
    pub cpu_refused: Option<u32>,
    /// `polled`, `adaptive` or `notified`.
    pub notify: String,
    /// Microseconds without work before a polled core stops polling a queue and asks for kicks.
    pub spin_us: u64,
    /// Microseconds within which it is to take up 99 % of requests.
    #[serde(default)]
    pub p99_us: Option<u64>,
    /// The most of its processor that it may take, percent.
    #[serde(default)]
    pub cpu_percent: Option<u32>,
    /// What came of both in the last second.
    #[serde(default)]
    pub objective: ObjectiveWord,
    /// Requests of the last second that were taken up late, percent. Where the objective is `over_ceiling`: what the core took above its ceiling,
    /// percent of a processor.
    #[serde(default)]
    pub missed_percent: f64,
    /// `dedicated`, `yields` or `nice`.
    #[serde(alias = "manners")]
    pub yield_policy: String,
    /// The pool has started it, and ends it.
    #[serde(default)]
    pub elastic: bool,
    /// The group whose devices alone it serves.
    #[serde(default)]
    pub reserve: Option<String>,
    /// Its queues are moved away: a user has asked for that, or the pool is ending it.
    #[serde(default)]
    pub draining: bool,
    /// Queues that are on it.
    #[serde(alias = "seats")]
    pub queues: u32,
    /// Queues that it looks at each turn.
    pub awake: u32,
    /// Share of the last tens of milliseconds spent on work, percent.
    pub busy_percent: f64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times it was woken.
    pub wakes: u64,
    /// Requests and completions handled.
    pub units: u64,
    /// Processor time of its thread so far, microseconds.
    pub cpu_us: u64,
    /// Time in which its thread could have run and had no processor so far, microseconds; 0 if the kernel does not say.
    #[serde(default)]
    pub run_delay_us: u64,
    /// Time spent on work so far, microseconds. At most some 10 ms old, as `slept_us` is.
    #[serde(default)]
    pub busy_us: u64,
    /// Time so far in which it polled and found nothing, or had yielded its processor to others, microseconds.
    #[serde(default)]
    pub empty_us: u64,
    /// Time asleep so far, microseconds.
    #[serde(default)]
    pub slept_us: u64,
    /// Since when it runs, microseconds.
    pub age_us: u64,
}

/// What a change came to, where there is nothing else to report.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DoneReport {
    /// What was done, one line each; empty if there was nothing to do.
    pub done: Vec<String>,
}
