//! `remote`: a disk in the memory of another daemon, imported over NBD, against a disk of the daemon itself, and against QEMU's NBD programs.
//!
//! ```text
//!   processor A: generator = driver side + vhost-user front end      processor B: one contender at a time, the others frozen
//!                 |  its own memory, ring, eventfds for each  <------>  local:  ioplane
//!                                                                       remote: importer <--NBD, loopback--> exporter
//! ```
//!
//! Importer and exporter share processor B: what they cost together bounds the rate. Processor time is that of both processes and of all kernel
//! threads. Ratios are medians over rounds in which each contender has a turn, with the interval of [`ioplane_figures::compare`].

mod alone;
mod contender;
mod database;
mod link;
mod moving;
mod open;
mod ping;
mod readers;
mod reserved;
mod slow;
mod swap;
mod turns;
mod vm;
mod wan;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use ioplane_figures::report::{median, rounded};
use ioplane_testkit::driver::DiskOp;
use serde_json::{Map, json};

use crate::exitless::qsd::{self, Aio};
use crate::exitless::{Folders, session::Session};
use crate::measured::{Figure, Report};
use crate::mode::Mode;
use crate::served::{Place, ioplane};
use contender::{Contender, Exporter, Importer, Way, Wire};
use turns::{Sample, Samples, Turns};

/// Keys of `figures`.
const FIGURES: [&str; 35] = [
    "remote_vs_local",
    "remote_writes_vs_local",
    "remote_writes_vs_qemu_nbd",
    "remote_unix_vs_local",
    "remote_vs_local_limited",
    "qemu_nbd_vs_local_limited",
    "remote_vs_qemu_nbd",
    "qd1_extra_us",
    "per_cpu_closed_vs_qemu_nbd",
    "per_cpu_closed_vs_qemu_nbd_same_importer",
    "per_cpu_closed_vs_nbdkit",
    "per_cpu_closed_vs_nbdkit_same_importer",
    "tls_cost_percent",
    "tls_qd1_cost_us",
    "tls_vs_baseline",
    "swap_pause_p99_ms",
    "swap_pause_image_p99_ms",
    "quiesce_overhead_p99_ms",
    "wire_overhead_percent",
    "wire_overhead_tls_percent",
    "link_1g_vs_iperf3",
    "link_10g_vs_iperf3",
    "wan_vs_iperf3",
    "congestion",
    "stage_us",
    "move_downtime_ms",
    "move_device_ms",
    "per_cpu_vs_qemu_nbd",
    "per_cpu_vs_nbdkit",
    "readers",
    "readers_7_vs_local",
    "readers_7_min_share",
    "swap_pause_slow_p99_ms",
    "database",
    "reservation_held",
];

const DEEP: u16 = 32;
/// Moves of a VM in QEMU: each starts a QEMU.
const VM_MOVES: usize = 20;
/// Ways of qemu-nbd that might be the cheapest on tmpfs.
const WAYS: [(&str, Aio); 3] = [
    ("qemu_nbd_threads", Aio::Threads),
    ("qemu_nbd_uring", Aio::Uring),
    ("qemu_nbd_uring_direct", Aio::UringDirect),
];

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds on smaller disks: some minutes, and noisier. Parts with a VM only if --only names them.
    #[arg(long)]
    quick: bool,
    /// How the cores of importer, exporter and local disk learn of requests.
    #[arg(long, default_value = Mode::Notified.word(), value_enum)]
    mode: Mode,
    /// How often a busy disk is swapped in each way; default: 500, with --quick 50.
    #[arg(long)]
    swaps: Option<usize>,
    /// Measures this part alone; may be given several times. Figures of other parts are null.
    #[arg(long, value_enum)]
    only: Vec<Part>,
    /// Write the plot of the database there, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Another build of ioplane, for its remote disk with TLS beside that of this one.
    #[arg(long, value_name = "BINARY")]
    baseline: Option<PathBuf>,
    /// Where sockets and logs are made; the default is the directory of the build.
    #[arg(long = "directory", value_name = "DIR")]
    directory: Option<PathBuf>,
}

/// What can be measured by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Requests per second and latency of all contenders.
    Speed,
    /// Disks that take only so many requests per second.
    Limited,
    /// A busy disk that is swapped.
    Swaps,
    /// A link of 1 and 10 Gbit/s, what goes over it, and others on it. Needs root, for a network namespace.
    Link,
    /// A link of 200 ms and 1 % loss. Needs root, for network namespaces and TAP devices.
    Wan,
    /// A guest that moves between two importers, without a VM.
    Moves,
    /// A VM in QEMU that moves between them.
    Vm,
    /// Requests at a rate of their own from a front end that sleeps, by the busy time of the machine: nobody else may use it.
    Open,
    /// One to seven readers of one export.
    Readers,
    /// A busy disk each of whose requests takes 5 ms, and is swapped.
    Slow,
    /// A VM with a PostgreSQL that moves, and whose disk follows.
    Database,
    /// A reserved part of an export's capacity while others flood it.
    Reservations,
}

/// How much of everything.
#[derive(Clone, Copy)]
pub struct Pace {
    /// In each of which every contender has one turn.
    rounds: u32,
    /// Disturbed turns that are repeated, in all.
    repeats: u32,
    warm: Duration,
    time: Duration,
    memory: u64,
    swaps: usize,
    moves: usize,
}

impl Options {
    fn pace(&self) -> Pace {
        let ms = Duration::from_millis;
        let swaps = |usual| self.swaps.unwrap_or(usual);
        if self.quick {
            let memory = 32 << 20;
            return Pace {
                rounds: 8,
                repeats: 10,
                warm: ms(40),
                time: ms(150),
                memory,
                swaps: swaps(50),
                moves: 40,
            };
        }
        Pace {
            rounds: 20,
            repeats: 40,
            warm: ms(80),
            time: ms(300),
            memory: 256 << 20,
            swaps: swaps(500),
            moves: 200,
        }
    }
}

/// What every measurement needs.
struct Bench {
    mode: Mode,
    pace: Pace,
    place: Place,
    folders: Folders,
    baseline: Option<PathBuf>,
    identity: PathBuf,
}

impl Bench {
    fn open(&self, contender: &Contender) -> Result<Session> {
        // Its writes by qemu-storage-daemon take up to 40 ms each, and the pages of its file are there already.
        let whole = !matches!(contender.way, Way::Remote(_, _, Exporter::QemuNbd(_)));
        let checked = if whole { "every block" } else { "some blocks" };
        eprintln!("{}: checking {checked}", contender.name);
        let backing = self.folders.backing(contender.name, false, self.pace.memory)?;
        Session::open(contender, &backing, &self.folders.run(contender.name), &self.place, whole)
    }

    fn contender(&self, name: &'static str, way: Way) -> Contender {
        Contender {
            name,
            way,
            mode: self.mode,
            limited: false,
            binary: None,
            identity: self.identity.clone(),
            space: None,
        }
    }
}

/// Measures. Fails if a byte was wrong, a request failed, or ioplane did not start. Figures against programs that do not start are missing.
pub fn run(options: &Options) -> Result<Report> {
    let begin = Instant::now();
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let folders = Folders::new(options.directory.as_deref())?;
    let bench = Bench {
        mode: options.mode,
        pace: options.pace(),
        place: Place { cpus, room: CpuRoom::new(cpus.back) },
        baseline: options.baseline.clone(),
        identity: identity(&folders)?,
        folders,
    };
    let mut report = Report::new("remote", &FIGURES);
    let mut setup = |key: &str, value: serde_json::Value| report.setup.insert(key.into(), value);
    setup("mode", bench.mode.word().into());
    setup("generator_cpu", cpus.front.into());
    setup("back_end_cpu", cpus.back.into());
    setup("bound_by", bench.place.room.describe().into());
    setup("interval", "of the median, exact (binomial), 95 % or more".into());
    setup("qsd_version", qsd::version().into());
    setup(
        "work_on_memory",
        "unequal: ioplane copies from its own memory, qemu-nbd makes system calls on a file of a tmpfs"
            .into(),
    );
    // A VM takes its time whatever is asked for.
    let short = |part| !options.quick || !matches!(part, Part::Vm | Part::Database);
    let wanted = |part| options.only.contains(&part) || (options.only.is_empty() && short(part));
    if wanted(Part::Speed) {
        unlimited(&bench, &mut report)?;
    }
    if wanted(Part::Limited) {
        limited(&bench, &mut report)?;
    }
    if wanted(Part::Swaps) {
        report.add(swap::measure(&bench)?);
    }
    if wanted(Part::Link) {
        report.add(link::measure(&bench)?);
    }
    if wanted(Part::Wan) {
        report.add(wan::measure(&bench, options)?);
    }
    if wanted(Part::Moves) {
        report.add(moving::measure(&bench)?);
    }
    if wanted(Part::Vm) {
        report.add(vm::measure(&bench, VM_MOVES)?);
    }
    if wanted(Part::Open) {
        open::measure(&bench, &mut report)?;
    }
    if wanted(Part::Readers) {
        report.add(readers::measure(&bench)?);
    }
    if wanted(Part::Slow) {
        report.add(slow::measure(&bench)?);
    }
    if wanted(Part::Database) {
        let stay = Duration::from_secs(if options.quick { 8 } else { 20 });
        report.add(database::measure(&bench, stay, options.plot.as_deref())?);
    }
    if wanted(Part::Reservations) {
        report.add(reserved::measure(&bench)?);
    }
    report.setup.insert("seconds".into(), begin.elapsed().as_secs().into());
    Ok(report)
}

/// Makes the identity that importers and exporters with TLS have.
fn identity(folders: &Folders) -> Result<PathBuf> {
    let directory = folders.run("identity");
    let mut command = Command::new(ioplane()?);
    let made =
        command.args(["identity", "create", "localhost", "--quiet", "--dir"]).arg(&directory).output()?;
    ensure!(made.status.success(), "making an identity: {}", String::from_utf8_lossy(&made.stderr));
    Ok(directory)
}

/// Memory as fast as it goes.
fn unlimited(bench: &Bench, report: &mut Report) -> Result<()> {
    let ours = |wire| Way::Remote(Importer::Ioplane, wire, Exporter::Ioplane);
    let mut turns = Turns::default();
    turns.add(bench.open(&bench.contender("local", Way::Local))?);
    turns.add(bench.open(&bench.contender("remote", ours(Wire::Tcp)))?);
    turns.add(bench.open(&bench.contender("remote_unix", ours(Wire::Unix)))?);
    turns.add(bench.open(&bench.contender("remote_tls", ours(Wire::Tls)))?);
    let before = match &bench.baseline {
        None => Err(anyhow!("no --baseline")),
        Some(binary) => bench.open(&Contender {
            binary: Some(binary.clone()),
            ..bench.contender("remote_tls_before", ours(Wire::Tls))
        }),
    };
    turns.try_add("remote_tls_before", before);
    let (aio, probes) = cheapest_qemu_nbd(bench);
    report.setup.insert("qemu_nbd_cpu_us_per_request_by_way".into(), probes.into());
    for (name, importer) in [("qemu_nbd", Importer::Ioplane), ("qsd_qemu_nbd", Importer::Qsd)] {
        let contender = bench.contender(name, Way::Remote(importer, Wire::Tcp, Exporter::QemuNbd(aio)));
        turns.try_add(name, bench.open(&contender));
    }
    for (name, importer) in [("nbdkit", Importer::Ioplane), ("qsd_nbdkit", Importer::Qsd)] {
        let contender = bench.contender(name, Way::Remote(importer, Wire::Tcp, Exporter::Nbdkit));
        turns.try_add(name, bench.open(&contender));
    }
    for (name, how) in turns.described() {
        report.setup.insert(name.into(), how.into());
    }

    eprintln!("depth {DEEP}, {} rounds", bench.pace.rounds);
    let deep = turns.measure(DEEP, &bench.pace)?;
    let iops = |sample: &Sample| sample.iops;
    let per_cpu = |sample: &Sample| sample.per_cpu_second;
    report.add([
        ("remote_vs_local", deep.ratio("remote", "local", "iops", iops)),
        ("remote_unix_vs_local", deep.ratio("remote_unix", "local", "iops", iops)),
        ("remote_vs_qemu_nbd", deep.ratio("remote", "qemu_nbd", "iops", iops)),
        ("per_cpu_closed_vs_qemu_nbd", deep.ratio("remote", "qsd_qemu_nbd", "per_cpu_second", per_cpu)),
        (
            "per_cpu_closed_vs_qemu_nbd_same_importer",
            deep.ratio("remote", "qemu_nbd", "per_cpu_second", per_cpu),
        ),
        ("per_cpu_closed_vs_nbdkit", deep.ratio("remote", "qsd_nbdkit", "per_cpu_second", per_cpu)),
        ("per_cpu_closed_vs_nbdkit_same_importer", deep.ratio("remote", "nbdkit", "per_cpu_second", per_cpu)),
        (
            "tls_cost_percent",
            deep.ratio("remote_tls", "remote", "iops", iops).map(|ratio| (1.0 - ratio) * 100.0),
        ),
        ("tls_vs_baseline", deep.ratio("remote_tls", "remote_tls_before", "iops", iops)),
    ]);

    eprintln!("depth {DEEP}, writes, {} rounds", bench.pace.rounds);
    let writes = turns.measure_writes(DEEP, &bench.pace)?;
    report.add([
        ("remote_writes_vs_local", writes.ratio("remote", "local", "iops", iops)),
        ("remote_writes_vs_qemu_nbd", writes.ratio("remote", "qemu_nbd", "iops", iops)),
    ]);

    eprintln!("depth 1, {} rounds", bench.pace.rounds);
    let alone = alone::Alone::start(bench)?;
    let (mut pings, mut reads) = (Vec::new(), Vec::new());
    let (back, warm, time) = (bench.place.cpus.back, bench.pace.warm, bench.pace.time);
    let single = turns.measure_and(DiskOp::Read, 1, &bench.pace, || {
        pings.push(ping::round_trip(back, warm, time)?);
        reads.push(alone.round_trip(back, warm, time)?);
        Ok(())
    })?;
    report.add([
        ("qd1_extra_us", extra(&single, &pings)),
        ("stage_us", stages(&single, &pings, &reads)),
        ("tls_qd1_cost_us", single.difference("remote_tls", "remote", |sample| sample.p50_us)),
    ]);
    let repeated = deep.repeated + writes.repeated + single.repeated;
    report.setup.insert("turns_repeated".into(), repeated.into());
    turns.close()
}

/// What is added to network and disk at depth 1, in each round, us.
fn added(single: &Samples, pings: &[f64]) -> Vec<f64> {
    let (remote, local) = (single.of("remote"), single.of("local"));
    let rounds = remote.iter().zip(local).zip(pings);
    rounds.map(|((remote, local), ping)| remote.p50_us - ping - local.p50_us).collect()
}

fn extra(single: &Samples, pings: &[f64]) -> Figure {
    let mut figure =
        Figure::median(&added(single, pings)).beside("ping_pong_us", median(pings.iter().copied()));
    for name in single.names() {
        figure = figure.beside(&format!("{name}_us"), median(single.of(name).iter().map(|one| one.p50_us)));
    }
    figure
}

/// Where the time of a read goes at depth 1, as in Table 1 of the paper: the network (`pings`), the back end with its disk (what reads of the exporter by a
/// bare client take more than that), and the front end with the importer (what is left).
fn stages(single: &Samples, pings: &[f64], reads: &[f64]) -> Figure {
    let all: Vec<f64> = single.of("remote").iter().map(|one| one.p50_us).collect();
    let more = |long: &[f64], short: &[f64]| median(long.iter().zip(short).map(|(long, short)| long - short));
    Figure::median(&all)
        .beside("front_end_and_importer", more(&all, reads))
        .beside("network", median(pings.iter().copied()))
        .beside("exporter_and_disk", more(reads, pings))
        .beside("local_disk", median(single.of("local").iter().map(|one| one.p50_us)))
}

/// A disk that takes only so many requests per second.
fn limited(bench: &Bench, report: &mut Report) -> Result<()> {
    let mut turns = Turns::default();
    for (name, way) in [
        ("local_limited", Way::Local),
        ("remote_limited", Way::Remote(Importer::Ioplane, Wire::Tcp, Exporter::Ioplane)),
    ] {
        let contender = Contender { limited: true, ..bench.contender(name, way) };
        turns.add(bench.open(&contender)?);
    }
    let (aio, _) = cheapest_qemu_nbd(bench);
    let way = Way::Remote(Importer::Ioplane, Wire::Tcp, Exporter::QemuNbd(aio));
    let limited = Contender { limited: true, ..bench.contender("qemu_nbd_limited", way) };
    turns.try_add("qemu_nbd_limited", bench.open(&limited));
    eprintln!("{} requests per second, depth {DEEP}, {} rounds", contender::LIMIT, bench.pace.rounds);
    let samples = turns.measure(DEEP, &bench.pace)?;
    let beside_local = |name| samples.ratio(name, "local_limited", "iops", |sample| sample.iops);
    report.add([
        ("remote_vs_local_limited", beside_local("remote_limited")),
        ("qemu_nbd_vs_local_limited", beside_local("qemu_nbd_limited")),
    ]);
    turns.close()
}

/// The way of qemu-nbd to serve a file of a tmpfs that takes the least processor time per request with our importer, and what each takes, us.
fn cheapest_qemu_nbd(bench: &Bench) -> (Aio, Map<String, serde_json::Value>) {
    let mut best = (Aio::UringDirect, f64::INFINITY);
    let mut probes = Map::new();
    for (name, aio) in WAYS {
        let way = Way::Remote(Importer::Ioplane, Wire::Tcp, Exporter::QemuNbd(aio));
        let probe = || -> Result<f64> {
            let mut turns = Turns::default();
            turns.add(bench.open(&bench.contender(name, way))?);
            let pace = Pace { rounds: 3, repeats: 0, ..bench.pace };
            let samples = turns.measure(DEEP, &pace)?;
            Ok(median(samples.of(name).iter().map(|one| 1e6 / one.per_cpu_second)))
        };
        match probe() {
            Ok(cost) => {
                probes.insert(name.into(), json!(rounded(cost)));
                if cost < best.1 {
                    best = (aio, cost);
                }
            }
            Err(error) => {
                probes.insert(name.into(), format!("{error:#}").into());
            }
        }
    }
    (best.0, probes)
}

#[cfg(test)]
mod tests {
    use ioplane_figures::goals::GOALS;

    use super::*;

    #[test]
    fn every_goal_of_this_benchmark_has_a_figure() {
        let goals: Vec<_> = GOALS.iter().filter(|goal| goal.bench == "remote").collect();
        assert!(!goals.is_empty());
        for goal in goals {
            assert!(FIGURES.contains(&goal.figure), "{}", goal.figure);
        }
    }

    #[test]
    fn network_and_disk_are_taken_off() {
        let sample = |p50_us| Sample { iops: 0.0, per_cpu_second: 0.0, p50_us };
        let mut samples = Samples::default();
        for _ in 0..6 {
            samples.push("local", sample(10.0));
            samples.push("remote", sample(100.0));
        }
        assert_eq!(extra(&samples, &[40.0; 6]).value(), Some(50.0));
    }
}
