//! The table of goals: what each benchmark must reach, read by `bench judge`, by the nightly tests and by
//! `docs/measurements/goals.md`.
//!
//! A goal comes from an issue or a paper, but for `attributed_percent`: no issue names its bound, 95 is ours. A *floor* is what the nightly tests refuse to fall below: a ratio within one run, with
//! room for the noise of a shared machine. Floors of absolute rates and times leave room for a machine that is several times slower.

use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// The figure is this or more.
    AtLeast(f64),
    /// The figure is this or less.
    AtMost(f64),
}

impl Bound {
    pub fn holds(self, figure: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => figure >= bound,
            Bound::AtMost(bound) => figure <= bound,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::AtLeast(bound) => write!(f, "at least {bound}"),
            Bound::AtMost(bound) => write!(f, "at most {bound}"),
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Goal {
    /// What is measured, in words, with its unit.
    pub what: &'static str,
    /// The benchmark: `name` of its JSON.
    pub bench: &'static str,
    /// Where in `figures` it stands, parts separated by dots.
    pub figure: &'static str,
    pub goal: Bound,
    /// What a nightly run must not fall below.
    pub floor: Option<Bound>,
}

impl Goal {
    /// The command whose JSON has the figure.
    pub fn generator(&self) -> String {
        match self.bench.strip_suffix("-baseline") {
            Some(bench) => format!("script/bench {bench} --json --baseline BINARY"),
            None => format!("script/bench {} --json", self.bench),
        }
    }
}

use Bound::{AtLeast, AtMost};

/// Two builds compared. No nightly test has the other build, so its goals have no floors.
const BASELINE: &str = "exitless-baseline";

const fn goal(
    bench: &'static str,
    figure: &'static str,
    what: &'static str,
    goal: Bound,
    floor: Option<Bound>,
) -> Goal {
    Goal { what, bench, figure, goal, floor }
}

pub const GOALS: &[Goal] = &[
    goal(
        "exitless",
        "depth32.kicks_per_request",
        "kicks per request, polled, depth 32",
        AtMost(0.02),
        Some(AtMost(0.02)),
    ),
    goal(
        "exitless",
        "depth1.notified_irq_kicks_per_request",
        "kicks per request, notified, depth 1, a driver that sleeps as guests do",
        AtLeast(0.9),
        Some(AtLeast(0.9)),
    ),
    goal(
        "exitless",
        "depth32.per_cpu_vs_qsd",
        "requests per CPU second against qemu-storage-daemon, memory, depth 32 (unequal work: a copy in memory against system calls on tmpfs)",
        AtLeast(5.0),
        Some(AtLeast(2.5)),
    ),
    goal(
        "exitless",
        "file_depth32.per_cpu_vs_qsd",
        "the same on a file, polled (equal work: both io_uring, O_DIRECT)",
        AtLeast(5.0),
        Some(AtLeast(0.1)),
    ),
    goal(
        "exitless",
        "file_depth32.notified_per_cpu_vs_qsd",
        "the same on a file, notified",
        AtLeast(5.0),
        Some(AtLeast(1.2)),
    ),
    goal(
        "exitless",
        "depth32.iops",
        "IOPS of one core on memory, 4 KiB reads, depth 32",
        AtLeast(1.4e6),
        Some(AtLeast(6e5)),
    ),
    goal(
        BASELINE,
        "depth1.scheduled_iops.ratio",
        "4 KiB random reads of memory per second, against the commit before, with groups that compete: four guests, one request in flight of each",
        AtLeast(1.0),
        None,
    ),
    goal(BASELINE, "depth32.scheduled_iops.ratio", "the same, 32 in flight of each", AtLeast(1.0), None),
    goal(BASELINE, "depth128.scheduled_iops.ratio", "the same, 128 in flight of each", AtLeast(1.0), None),
    goal(
        "network",
        "split64.frames_vs_testpmd",
        "frames of 64 bytes against testpmd, split (one process with the switch, not the daemon)",
        AtLeast(1.2),
        // In this machine's slow state the generator is what bounds the row.
        Some(AtLeast(0.65)),
    ),
    goal(
        "network",
        "split64_8pairs.frames_vs_testpmd",
        "the same, eight pairs",
        AtLeast(1.0),
        Some(AtLeast(0.7)),
    ),
    goal(
        "network",
        "packed64.frames_vs_testpmd",
        "frames of 64 bytes against testpmd, packed",
        AtLeast(1.2),
        Some(AtLeast(0.6)),
    ),
    goal(
        "network",
        "packed64_8pairs.frames_vs_testpmd",
        "the same, eight pairs",
        AtLeast(1.0),
        Some(AtLeast(0.5)),
    ),
    goal(
        "network",
        "split64k.frames_vs_testpmd",
        "frames of 64 KiB against testpmd, split",
        AtLeast(2.0),
        Some(AtLeast(1.2)),
    ),
    goal(
        "network",
        "packed64k.frames_vs_testpmd",
        "frames of 64 KiB against testpmd, packed",
        AtLeast(2.0),
        Some(AtLeast(0.9)),
    ),
    goal("network", "split64.kicks_per_frame", "kicks per frame, polled", AtMost(0.02), Some(AtMost(0.02))),
    goal(
        "elvis",
        "guests1.polled_vs_notified_stream",
        "64-byte stream, 1 guest: polled against notified (the paper: 1.45)",
        AtLeast(1.45),
        Some(AtLeast(1.1)),
    ),
    goal(
        "elvis",
        "guests2.polled_vs_notified_stream",
        "64-byte stream, 2 guests (the paper: 1.23)",
        AtLeast(1.23),
        Some(AtLeast(1.0)),
    ),
    goal(
        "elvis",
        "guests1.polled_vs_notified_latency",
        "request-response, 1 guest: mean latency polled against notified",
        AtMost(0.75),
        Some(AtMost(0.9)),
    ),
    goal(
        "elvis",
        "adaptive_vs_best_min",
        "adaptive against the better of polled and notified in its worst row: 1 to 7 guests, stream, request-response, paced",
        AtLeast(0.95),
        Some(AtLeast(0.5)),
    ),
    goal(
        "elvis",
        "adaptive_latency_vs_best_min",
        "mean latency of the better of polled and notified, as a part of adaptive's, in the worst of the same rows (a stream: one frame in 64)",
        AtLeast(0.95),
        Some(AtLeast(0.1)),
    ),
    goal(
        "elvis",
        "adaptive_cpu_vs_notified_max",
        "adaptive's processor time per frame against notified's below saturation, in its worst row: 1 to 7 guests with 2,000 requests per second each",
        AtMost(1.1),
        Some(AtMost(2.0)),
    ),
    goal(
        "elvis-awake",
        "adaptive_vs_best_min",
        "the same rows with drivers that do not sleep: adaptive against the better mode in the worst of them",
        AtLeast(0.95),
        Some(AtLeast(0.8)),
    ),
    goal(
        "elvis-awake",
        "adaptive_latency_vs_best_min",
        "mean latency of the better mode as a part of adaptive's in the worst row, drivers that do not sleep",
        AtLeast(0.95),
        Some(AtLeast(0.04)),
    ),
    goal(
        "elvis-awake",
        "adaptive_cpu_vs_notified_max",
        "adaptive's processor time against notified's in the worst row below saturation, drivers that do not sleep",
        AtMost(1.1),
        Some(AtMost(2.5)),
    ),
    goal(
        "neighbour",
        "p99_ratio",
        "p99 of a guest's reads beside a hostile neighbour on the same core, as a multiple of the quiet one",
        AtMost(2.0),
        Some(AtMost(2.0)),
    ),
    goal(
        "core",
        "idle_cpu_percent",
        "processor time of a daemon all of whose queues are idle, percent of one processor, io_uring's workers included",
        AtMost(1.0),
        Some(AtMost(1.0)),
    ),
    goal(
        "core",
        "idle_queues_loss_percent",
        "requests that idle queues on its core cost a busy one, percent, depth 1 or 32, whichever is worse",
        AtMost(5.0),
        Some(AtMost(15.0)),
    ),
    goal(
        "core",
        "idle_queue_bytes",
        "memory of the daemon per idle queue that was used, bytes (PSS; disks of eight queues)",
        AtMost(65536.0),
        Some(AtMost(80_000.0)),
    ),
    goal(
        "core",
        "wakeup_ratio",
        "latency of the first request after 100 ms of silence, as a multiple of notified mode's",
        AtMost(1.1),
        Some(AtMost(1.5)),
    ),
    goal(
        "core",
        "slow_load_cpu_ratio",
        "processor time per request at 1,000 requests per second, as a multiple of notified mode's",
        AtMost(2.0),
        Some(AtMost(2.0)),
    ),
    goal(
        "core",
        "square_wave_min_ratio",
        "requests on square waves with periods from 10 us to 1 s, as a part of the better of polled and notified mode's",
        AtLeast(0.9),
        Some(AtLeast(0.6)),
    ),
    goal(
        "core",
        "min_share_ratio",
        "what a modest guest gets beside a greedy one, as a part of what it should get, in its worst second",
        AtLeast(0.95),
        Some(AtLeast(0.9)),
    ),
    goal(
        "core",
        "core_bound_share_ratio",
        "the same, where the core is what bounds all",
        AtLeast(0.95),
        Some(AtLeast(0.9)),
    ),
    goal(
        "core",
        "weight_error_percent",
        "how far from its weight the group is that is off most of three that always ask, percent (no issue names a bound: 5 is ours)",
        AtMost(5.0),
        Some(AtMost(5.0)),
    ),
    goal(
        "core",
        "weighted_share_ratio",
        "what a guest gets of its weighted max-min share, in its worst second: weights 1, 2, 2, 4, 4, demand of 200 %",
        AtLeast(0.95),
        Some(AtLeast(0.85)),
    ),
    goal(
        "core",
        "modest_p99_ratio",
        "p99 of a modest guest beside a greedy one, less the quanta of all groups, as a multiple of its p99 alone",
        AtMost(2.0),
        Some(AtMost(8.0)),
    ),
    goal(
        "core",
        "core_bound_p99_ratio",
        "the same, where the core is what bounds all",
        AtMost(2.0),
        Some(AtMost(4.0)),
    ),
    goal(
        "core",
        "limit_error_percent",
        "how far from its limit a guest is that always asks, percent, of requests and of bytes, whichever is worse",
        AtMost(2.0),
        Some(AtMost(15.0)),
    ),
    goal(
        "core",
        "limit_excess_requests",
        "requests above rate * T + burst + 1 in any interval T",
        AtMost(0.0),
        Some(AtMost(5.0)),
    ),
    goal(
        "core",
        "move_pause_us",
        "longest time without a completion while a busy queue moves to another core, us (no issue names a bound: 1000 is ours)",
        AtMost(1000.0),
        Some(AtMost(5000.0)),
    ),
    goal(
        "core",
        "file_depth32_per_cpu_vs_qsd",
        "requests per CPU second on a file, depth 32, against the cheapest way of qemu-storage-daemon with O_DIRECT",
        AtLeast(2.0),
        Some(AtLeast(0.9)),
    ),
    goal(
        "core",
        "devices8_ratio",
        "requests per second over 8 devices of different VMs, as a part of those over one with the same total load, memory, 4 KiB reads, 32 in flight",
        AtLeast(0.9),
        Some(AtLeast(0.6)),
    ),
    goal(
        "core",
        "boot_storm_s",
        "the slowest first read of 200 front ends that connect at once, s after that, memory",
        AtMost(5.0),
        Some(AtMost(5.0)),
    ),
    goal(
        "exits",
        "profiler_cost_percent",
        "fewer exits per second while all of them are counted, percent (a software KVM, where kvm_exit never fires)",
        AtMost(10.0),
        Some(AtMost(15.0)),
    ),
    goal(
        "exits",
        "l1_profiler_cost_percent",
        "the same where kvm_exit fires, profiler and guest on one translated processor",
        AtMost(5.0),
        Some(AtMost(20.0)),
    ),
    goal(
        "exits",
        "sampled_cost_percent",
        "the same while a hundredth of the time is recorded, natively",
        AtMost(1.0),
        Some(AtMost(4.0)),
    ),
    goal(
        "exits",
        "attributed_percent",
        "exits with function, device and register named, percent",
        AtLeast(95.0),
        Some(AtLeast(90.0)),
    ),
    goal(
        "exits-clusters",
        "ide_exits_plain",
        "exits for the 11 register writes of an IDE command of libata, stock QEMU",
        AtLeast(11.0),
        Some(AtLeast(11.0)),
    ),
    goal(
        "exits-clusters",
        "ide_exits_clustered",
        "the same with clustering, the select before them included",
        AtMost(1.0),
        Some(AtMost(1.0)),
    ),
    goal(
        "exits-clusters",
        "ide_exits_batch",
        "the same by batches, without clustering",
        AtMost(1.0),
        Some(AtMost(1.5)),
    ),
    goal(
        "exits-clusters",
        "boot_user_exits_ratio",
        "exits to stock QEMU for a device access at boot, with clustering, as a part of those without",
        AtMost(0.1),
        Some(AtMost(0.15)),
    ),
    goal(
        "exits-clusters",
        "ne2000_exits_per_ping",
        "NE2000 of stock QEMU, clustering: exits for a device access per ping",
        AtMost(20.0),
        Some(AtMost(20.0)),
    ),
    goal(
        "exits-clusters",
        "idle_vm_cost_percent",
        "processor time that clustering costs a VM which takes no exits for device accesses, percent",
        AtMost(0.5),
        None,
    ),
    goal(
        "exits-clusters",
        "timer_clamp_gain_percent",
        "what a guest that ticks by the PIT computes more in the same processor time, clamped from 250 to 100 ticks per second, percent (no issue names a bound: 0 is ours)",
        AtLeast(0.0),
        None,
    ),
    goal(
        "exits-sweeps",
        "scheduler_none_percent",
        "throughput that two writers of an IDE disk gain without a scheduler, translated processor, percent (no issue names a bound: 0 is ours)",
        AtLeast(0.0),
        None,
    ),
    goal(
        "exits-sweeps",
        "napi_percent",
        "throughput that an e1000 gains by napi_defer_hard_irqs, translated processor, percent (no issue names a bound: 0 is ours)",
        AtLeast(0.0),
        None,
    ),
    goal(
        "passthrough",
        "rtl8139.virtual_page.exits_per_ping",
        "RTL8139, mediated, stock QEMU with the library, by the shadow page alone: exits per ping of 1,000 bytes (of 9 without)",
        AtMost(5.1),
        Some(AtMost(5.6)),
    ),
    goal(
        "passthrough",
        "rtl8139.virtual_page_clustered.exits_per_ping",
        "the same with clustering",
        AtMost(5.1),
        Some(AtMost(6.0)),
    ),
    goal(
        "passthrough",
        "ne2000.virtual_clustered.exits_per_ping",
        "NE2000, mediated, stock QEMU with the library, clustering: exits per ping of 1,000 bytes (of 319 without)",
        AtMost(20.0),
        Some(AtMost(20.0)),
    ),
    goal(
        "passthrough",
        "shadow.shadow.exits_per_ping",
        "RTL8139, mediated, a VMM that maps the shadow page: exits per ping",
        AtMost(5.0),
        Some(AtMost(5.05)),
    ),
    goal(
        "passthrough",
        "ne2000.virtual.hooked_percent",
        "NE2000, mediated: hooked accesses, percent (the paper: 15.6 to 34.8)",
        AtMost(10.0),
        Some(AtMost(10.0)),
    ),
    goal(
        "passthrough",
        "model_instructions_per_update",
        "instructions per update of the dearer state model",
        AtMost(200.0),
        Some(AtMost(200.0)),
    ),
    goal(
        "remote",
        "remote_vs_local",
        "a disk in the memory of another daemon over NBD (TCP, loopback, importer and exporter on one processor) against one in memory of the same daemon: 4 KiB reads, depth 32, requests per second",
        AtLeast(0.95),
        Some(AtLeast(0.08)),
    ),
    goal(
        "remote",
        "remote_vs_local_limited",
        "the same where both disks take 50,000 requests per second",
        AtLeast(0.95),
        Some(AtLeast(0.9)),
    ),
    goal(
        "remote",
        "remote_vs_qemu_nbd",
        "the same against the same importer with qemu-nbd as the exporter (unequal work: a copy in memory against system calls on tmpfs; no issue names a bound: 1 is ours)",
        AtLeast(1.0),
        Some(AtLeast(1.0)),
    ),
    goal(
        "remote",
        "qd1_extra_us",
        "median latency of a 4 KiB read from another daemon's memory, less a TCP ping-pong of the same bytes, less the same read of a local disk, us",
        AtMost(30.0),
        Some(AtMost(60.0)),
    ),
    goal(
        "remote",
        "per_cpu_closed_vs_qemu_nbd",
        "requests per CPU second of importer, exporter and kernel threads, depth 32, against qemu-storage-daemon and qemu-nbd (closed loop; the same unequal work)",
        AtLeast(1.3),
        Some(AtLeast(1.3)),
    ),
    goal(
        "remote",
        "per_cpu_closed_vs_nbdkit",
        "the same against qemu-storage-daemon and nbdkit with its plugin memory (equal work: both copy from memory of their own)",
        AtLeast(1.3),
        Some(AtLeast(1.3)),
    ),
    goal(
        "remote",
        "link_1g_vs_iperf3",
        "reads of 4 KiB, depth 32, over a link of 1 Gbit/s without delay or loss, against one connection of iperf3 on it",
        AtLeast(0.8),
        Some(AtLeast(0.7)),
    ),
    goal(
        "remote",
        "wan_vs_iperf3",
        "reads and writes over a link of 200 ms, 1 % loss each way and 200 Mbit/s, 8 connections, with this host's congestion control and with cubic, the worst of them against iperf3 with as many connections",
        AtLeast(0.8),
        Some(AtLeast(0.6)),
    ),
    goal(
        "remote",
        "tls_cost_percent",
        "requests per second that TLS 1.3 costs, importer and exporter on one processor, 4 KiB reads, depth 32, percent (no issue names a bound: 50 is ours)",
        AtMost(50.0),
        Some(AtMost(60.0)),
    ),
    goal(
        "remote",
        "swap_pause_p99_ms",
        "longest time without a completion while a busy disk in memory is swapped to memory, p99, control threads and I/O core on one processor, ms",
        AtMost(1.0),
        Some(AtMost(50.0)),
    ),
    goal(
        "remote",
        "quiesce_overhead_p99_ms",
        "time in which the daemon lets no request begin at the switch of such swaps where the disk comes to rest (it has a migration socket), p99, ms",
        AtMost(1.0),
        Some(AtMost(50.0)),
    ),
    goal(
        "remote",
        "swap_pause_slow_p99_ms",
        "longest time without a completion while a busy disk each of whose reads and writes takes 5 ms is swapped to another such disk, p99, ms",
        AtMost(1.0),
        Some(AtMost(200.0)),
    ),
    goal(
        "remote",
        "per_cpu_vs_qemu_nbd",
        "requests per second of the whole machine's busy time at the same open-loop rate (the worse of 2,000 and 10,000 per second), front end sleeping, against qemu-storage-daemon and qemu-nbd (unequal work: a copy in memory against system calls on tmpfs)",
        AtLeast(1.3),
        Some(AtLeast(1.0)),
    ),
    goal(
        "remote",
        "per_cpu_vs_nbdkit",
        "the same against qemu-storage-daemon and nbdkit with its plugin memory (equal work)",
        AtLeast(1.3),
        Some(AtLeast(0.9)),
    ),
    goal(
        "remote",
        "move_downtime_ms",
        "median of the longest time without a completion, from the command on, while a VM in QEMU moves between two hosts of a remote disk, under whatever the processor has (translated: QEMU is most of it), ms (no issue names a bound: the paper's stop-and-copy phase has 115)",
        AtMost(115.0),
        Some(AtMost(5000.0)),
    ),
    goal(
        "remote",
        "move_device_ms",
        "of a move without a VM, median: from the answer to the source's last GET_VRING_BASE to the first completion at the destination, flush, release and claim included, the image on a disk, ms (no issue names a bound: the paper's disk takes 7)",
        AtMost(7.0),
        Some(AtMost(200.0)),
    ),
    goal(
        "remote",
        "reservation_held",
        "what a host gets of the 6,000 requests per second that it has reserved of an export of 10,000, while two others flood it, over 10 s",
        AtLeast(0.95),
        Some(AtLeast(0.9)),
    ),
];

/// In place of a figure: it was measured, and the noise was too much for a number.
pub const UNRESOLVED: &str = "unresolved";

/// What a run has for a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Measured {
    Figure(f64),
    /// See [`UNRESOLVED`].
    Unresolved,
    /// The run has no such figure.
    Missing,
}

/// The figure of `goal` in the JSON of its benchmark.
fn measured(goal: &Goal, report: &Value) -> Measured {
    let found = goal.figure.split('.').try_fold(&report["figures"], |at, part| at.get(part));
    match found.map(|value| (value.as_f64(), value.as_str())) {
        Some((Some(figure), _)) => Measured::Figure(figure),
        Some((None, Some(UNRESOLVED))) => Measured::Unresolved,
        _ => Measured::Missing,
    }
}

/// What a run says of one goal.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    pub goal: &'static Goal,
    pub measured: Measured,
}

impl Verdict {
    pub fn reached(&self) -> bool {
        matches!(self.measured, Measured::Figure(figure) if self.goal.goal.holds(figure))
    }

    /// The floor is kept. A figure that is not there keeps none; one that is unresolved keeps what is no floor.
    pub fn kept(&self) -> bool {
        match self.measured {
            Measured::Figure(figure) => self.goal.floor.is_none_or(|floor| floor.holds(figure)),
            Measured::Unresolved => self.goal.floor.is_none(),
            Measured::Missing => false,
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Measured::Figure(figure) => write!(f, "{figure}"),
            Measured::Unresolved => f.write_str(UNRESOLVED),
            Measured::Missing => f.write_str("no such figure"),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match (self.reached(), self.kept()) {
            (_, true) if self.measured == Measured::Unresolved => "not known",
            (_, false) => "BELOW ITS FLOOR",
            (true, _) => "reached",
            (false, true) => "missed",
        };
        let Goal { bench, figure, goal, .. } = self.goal;
        write!(f, "{word}: {bench}.{figure} = {}, goal {goal}", self.measured)?;
        if let Some(floor) = self.goal.floor {
            write!(f, ", floor {floor}")?;
        }
        Ok(())
    }
}

/// Judges the JSON of a run.
///
/// # Errors
/// When it is not the JSON of a benchmark.
pub fn judge(report: &Value) -> Result<Vec<Verdict>> {
    for key in ["name", "commit", "machine", "figures"] {
        ensure!(!report[key].is_null(), "no '{key}': this is not what `script/bench NAME --json` prints");
    }
    let name = report["name"].as_str().context("'name' is no string")?;
    let mine = GOALS.iter().filter(|goal| goal.bench == name);
    Ok(mine.map(|goal| Verdict { goal, measured: measured(goal, report) }).collect())
}

/// The JSON of the run that documents show, of each benchmark: `docs/measurements/results/NAME.json`.
///
/// # Errors
/// When one is there and cannot be read.
pub fn recorded(results: &Path) -> Result<Vec<Value>> {
    let mut names: Vec<&str> = GOALS.iter().map(|goal| goal.bench).collect();
    names.dedup();
    let mut reports = Vec::new();
    for name in names {
        let path = results.join(format!("{name}.json"));
        if path.is_file() {
            let text = std::fs::read_to_string(&path)?;
            reports.push(serde_json::from_str(&text).with_context(|| path.display().to_string())?);
        }
    }
    Ok(reports)
}

/// The page of goals, as `docs/measurements/goals.md` has it.
pub fn page(reports: &[Value]) -> String {
    let mut page = String::from(
        "# Goals\n\nMade by `script/bench goals --write` from the table in `bench/figures/src/goals.rs` and from the runs in \
         `docs/measurements/results`; a test compares. The nightly tests fail for a figure beyond its floor. Most figures are ratios within \
         one run; floors of absolute ones leave room for a machine that is several times slower. These machines are shared: two runs differ by up to a factor of two, ratios by less.\n\n\
         | figure | goal | floor | measured | | key |\n|---|---|---|---|---|---|\n",
    );
    for goal in GOALS {
        let report = reports.iter().find(|report| report["name"] == goal.bench);
        let measured = report.map_or(Measured::Missing, |report| measured(goal, report));
        let verdict = Verdict { goal, measured };
        let floor = goal.floor.map_or(String::new(), |floor| floor.to_string());
        let (measured, word) = match measured {
            Measured::Figure(_) => {
                (measured.to_string(), if verdict.reached() { "reached" } else { "**missed**" })
            }
            Measured::Unresolved => (measured.to_string(), "not known"),
            Measured::Missing => (format!("no run of `{}` recorded", goal.generator()), ""),
        };
        let _ = writeln!(
            page,
            "| {} | {} | {floor} | {measured} | {word} | `{}.{}` |",
            goal.what, goal.goal, goal.bench, goal.figure
        );
    }
    page.push_str(
        "\n## The runs\n\n| benchmark | command | commit | date | machine |\n|---|---|---|---|---|\n",
    );
    for report in reports {
        let text = |key: &str| report[key].as_str().unwrap_or("not recorded").to_string();
        let machine = &report["machine"];
        let _ = writeln!(
            page,
            "| {} | `{}` | {} | {} | {} CPUs, {}, {} kB, Linux {} |",
            text("name"),
            text("command"),
            text("commit"),
            text("date"),
            machine["cpus"],
            machine["cpu"].as_str().unwrap_or_default(),
            machine["memory"].as_str().unwrap_or_default().trim_end_matches(" kB"),
            machine["kernel"].as_str().unwrap_or_default(),
        );
    }
    page
}

#[cfg(test)]
#[path = "goals_tests.rs"]
mod tests;
