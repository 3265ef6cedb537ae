//! What the daemon says of itself: the JSON of `GET /v1/...` and of every `--json`. **The stable interface** that the demo, the
//! tests and other people's programs read: fields are added, never renamed or given another meaning.
//!
//! Counts are since the disk was added, or since the daemon was started if that was later. Times are in microseconds,
//! sizes in bytes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ioplane_device::{Histogram, MeterReading};
use serde::{Deserialize, Serialize};

/// `ioplane status --json`, `GET /v1/status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    /// Its I/O cores.
    pub cores: Vec<CoreReport>,
}

/// Whether a disk is there for a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    /// Its socket is there.
    Served,
    /// Its image is being opened: perhaps I/O of a daemon that died is still landing there.
    Opening,
    /// It is to be served and cannot be; `error` says why. It is kept until it is removed.
    Failed,
    /// It is served, and busy with a change: its numbers are missing this time.
    Busy,
}

/// One disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Whether it is there.
    pub state: DiskState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// A front end (a VMM) is connected.
    pub connected: bool,
    /// Front ends that have come so far.
    pub connections: u64,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// What is behind it.
    pub backing: BackingReport,
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
    /// Virtio features that its driver accepted, as bits.
    pub features: u64,
    /// What front ends did wrong, by name of the fault.
    pub front_end_faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_front_end_fault: Option<String>,
    /// All its queues together.
    pub totals: Counts,
    /// Each of them.
    pub queues: Vec<QueueReport>,
}

/// What is behind a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingReport {
    /// `file` or `memory`.
    pub kind: String,
    /// The image.
    pub path: Option<PathBuf>,
    /// `io_uring` or `threads`.
    pub engine: Option<String>,
    /// Why it is threads, if io_uring was wanted.
    pub why_threads: Option<String>,
    /// Whether I/O goes past the host's page cache.
    pub direct: Option<bool>,
}

/// One queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueReport {
    /// Its number.
    pub index: u16,
    /// Entries of its ring; 0 until the driver has set it up.
    pub size: u16,
    /// The I/O core it is on, if it runs.
    pub core: Option<u32>,
    /// Why it has stopped for good.
    pub fault: Option<FaultReport>,
    /// What it did.
    #[serde(flatten)]
    pub counts: Counts,
}

/// What a guest did to its own queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultReport {
    /// Short name.
    pub name: String,
    /// In words.
    pub text: String,
}

/// What one queue, or all of a disk, did.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
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
    /// Interrupts sent.
    pub interrupts: u64,
    /// That many for each request; 0 without requests.
    pub interrupts_per_request: f64,
    /// Batches of answers without one.
    pub interrupts_avoided: u64,
    /// Requests that failed, by cause.
    pub errors: Errors,
    /// Faults of the guest; each stops a queue.
    pub faults: u64,
    /// Requests done again after a crash of the daemon.
    pub replayed: u64,
    /// Half of the requests took at most this long.
    pub p50_us: f64,
    /// 99 of 100 took at most this long.
    pub p99_us: f64,
    /// Buckets of [`Histogram`], for the metrics.
    #[serde(skip)]
    pub latency: Vec<u64>,
}

/// Requests that failed, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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

impl Counts {
    /// The counts of a meter with its histogram.
    pub fn new(meter: &MeterReading, latency: Vec<u64>) -> Self {
        let per = |count: u64| if meter.requests == 0 { 0.0 } else { count as f64 / meter.requests as f64 };
        let us = |part| Histogram::quantile(&latency, part) as f64 / 1000.0;
        Counts {
            requests: meter.requests,
            bytes: meter.bytes_read + meter.bytes_written,
            bytes_read: meter.bytes_read,
            bytes_written: meter.bytes_written,
            kicks: meter.kicks,
            kicks_per_request: per(meter.kicks),
            interrupts: meter.interrupts,
            interrupts_per_request: per(meter.interrupts),
            interrupts_avoided: meter.interrupts_avoided,
            errors: Errors {
                io: meter.errors_io,
                space: meter.errors_space,
                request: meter.errors_request,
                unsupported: meter.unsupported,
            },
            faults: meter.faults,
            replayed: meter.replayed,
            p50_us: us(0.5),
            p99_us: us(0.99),
            latency,
        }
    }

    /// All of them together.
    pub fn sum<'q>(queues: impl Iterator<Item = (&'q MeterReading, &'q [u64])>) -> Self {
        let (mut meter, mut latency) = (MeterReading::default(), Vec::new());
        for (counts, buckets) in queues {
            meter.add(counts);
            latency.resize(latency.len().max(buckets.len()), 0);
            latency.iter_mut().zip(buckets).for_each(|(all, one)| *all += one);
        }
        Counts::new(&meter, latency)
    }
}

/// One I/O core.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CoreReport {
    /// Its number.
    pub id: u32,
    /// The processor that it is pinned to.
    pub cpu: Option<u32>,
    /// The processor that it should be pinned to, where that was not allowed.
    pub cpu_refused: Option<u32>,
    /// `polled` or `notified`.
    pub notify: String,
    /// Microseconds without work before it sleeps.
    pub spin_us: u64,
    /// `dedicated`, `yields` or `nice`.
    pub manners: String,
    /// Queues that are on it.
    pub seats: u32,
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
    /// Since when it runs, microseconds.
    pub age_us: u64,
}

/// What a change came to, where there is nothing else to report.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DoneReport {
    /// What was done, one line each; empty if there was nothing to do.
    pub done: Vec<String>,
}
