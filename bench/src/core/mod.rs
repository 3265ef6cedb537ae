//! `core`: what an I/O core costs when there is little to do, and what it gives whom when there is too much.
//!
//! ```text
//!   processor A: generator = drivers + front ends of all guests     processor B: one daemon at a time, the others frozen
//! ```
//!
//! Ratios are medians over alternating pairs of runs, with the interval of [`ioplane_figures::compare`]. Processor time is that of all
//! threads of the daemon, io_uring's workers included.

mod boot;
mod devices;
pub mod drive;
mod fair;
mod file;
mod idle;
mod limits;
mod moving;
pub mod offered;
mod shares;
pub mod stage;
mod taken;
mod turns;
mod weights;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ioplane_figures::machine::{self, CpuRoom, Cpus};

use crate::exitless::{Folders, qsd};
use crate::measured::{Figure, Report};
use crate::mode::Mode;
use crate::served::{Place, ioplane};

/// ns.
pub const SECOND: u64 = 1_000_000_000;

/// Of measurements that are repeated without pairs: the fewest with an interval.
pub const ROUNDS: u32 = 6;

/// What is measured unless `--mode` says otherwise: the goals are those of cores that adapt by themselves.
const MODE: Mode = Mode::Adaptive;

/// Keys of `figures`.
pub const FIGURES: [&str; 20] = [
    "idle_cpu_percent",
    "idle_queues_loss_percent",
    "idle_queue_bytes",
    "wakeup_ratio",
    "slow_load_cpu_ratio",
    "square_wave_min_ratio",
    "min_share_ratio",
    "core_bound_share_ratio",
    "backing_bound_share_ratio",
    "weight_error_percent",
    "weighted_share_ratio",
    "modest_p99_ratio",
    "core_bound_p99_ratio",
    "backing_bound_p99_ratio",
    "limit_error_percent",
    "limit_excess_requests",
    "move_pause_us",
    "file_depth32_per_cpu_vs_qsd",
    "devices8_ratio",
    "boot_storm_s",
];

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer idle queues, fewer and shorter rounds: below three minutes, and noisier.
    #[arg(long)]
    quick: bool,
    /// How the cores under test learn of requests.
    #[arg(long, default_value = MODE.word(), value_enum)]
    mode: Mode,
    /// Only the figures whose keys begin so
    #[arg(long, value_name = "KEY")]
    only: Vec<String>,
    /// Where disk files, sockets and logs are made; the default is the directory of the build, which should lie on a real disk.
    #[arg(long = "directory", value_name = "DIR")]
    directory: Option<PathBuf>,
}

/// How much of everything.
struct Pace {
    /// Pairs of runs.
    pairs: u32,
    /// Of queues beside a busy one, in disks of [`idle::QUEUES`].
    idle_queues: u32,
    idle_span: Duration,
    /// Of one run of a closed loop.
    round: Duration,
    /// First requests in each run.
    wakeups: u32,
    slow_round: Duration,
    /// Starts of the daemons that square waves compare: where a process lies in memory can change its speed by more than its mode does.
    wave_starts: u32,
    /// Pairs of runs of each period in each start; half as many of the longest.
    wave_pairs: u32,
    /// Of a wave, at least; a whole period if that is longer.
    wave_round: Duration,
    limit_span: Duration,
    file_bytes: u64,
    moves: u32,
    /// Boot storms, each of a daemon of its own.
    boots: u32,
    /// Of each run beside a greedy guest.
    seconds: usize,
}

impl Options {
    fn pace(&self) -> Pace {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        if self.quick {
            return Pace {
                pairs: 10,
                idle_queues: 200,
                idle_span: s(10),
                round: ms(150),
                wakeups: 3,
                slow_round: ms(500),
                wave_starts: 2,
                wave_pairs: 6,
                wave_round: ms(80),
                limit_span: s(3),
                file_bytes: 32 << 20,
                moves: 20,
                boots: 3,
                seconds: 1,
            };
        }
        Pace {
            pairs: 20,
            idle_queues: 1000,
            idle_span: s(60),
            round: ms(300),
            wakeups: 10,
            slow_round: s(1),
            wave_starts: 3,
            wave_pairs: 10,
            wave_round: ms(150),
            limit_span: s(10),
            file_bytes: 256 << 20,
            moves: 60,
            boots: 6,
            seconds: 3,
        }
    }
}

/// What every measurement needs.
pub struct Bench {
    mode: Mode,
    pace: Pace,
    place: Place,
    binary: PathBuf,
    folders: Folders,
}

impl Bench {
    /// 0 and 1 in the order of pair `number`: who is first changes.
    fn order(number: u32) -> [usize; 2] {
        if number.is_multiple_of(2) { [0, 1] } else { [1, 0] }
    }
}

type Measurement = fn(&Bench) -> Result<Vec<(&'static str, Figure)>>;

/// Each with the keys of its figures.
const MEASUREMENTS: [(&[&str], Measurement); 12] = [
    (&["idle_cpu_percent", "idle_queues_loss_percent", "idle_queue_bytes"], idle::measure),
    (&["wakeup_ratio"], turns::wakeup),
    (&["slow_load_cpu_ratio"], turns::slow_load),
    (&["square_wave_min_ratio"], turns::square_waves),
    (&["limit_error_percent", "limit_excess_requests"], limits::measure),
    (&["file_depth32_per_cpu_vs_qsd"], file::measure),
    (&["move_pause_us"], moving::measure),
    (
        &[
            "min_share_ratio",
            "core_bound_share_ratio",
            "backing_bound_share_ratio",
            "modest_p99_ratio",
            "core_bound_p99_ratio",
            "backing_bound_p99_ratio",
        ],
        fair::measure,
    ),
    (&["weight_error_percent"], weights::measure),
    (&["weighted_share_ratio"], shares::measure),
    (&["devices8_ratio"], devices::measure),
    (&["boot_storm_s"], boot::measure),
];

/// Measures. Fails if a byte was wrong, a request failed, or a daemon did not start.
pub fn run(options: &Options) -> Result<Report> {
    let begin = Instant::now();
    let wanted = |key: &str| options.only.is_empty() || options.only.iter().any(|only| key.starts_with(only));
    ensure!(FIGURES.iter().any(|key| wanted(key)), "--only: the keys are {}", FIGURES.join(", "));
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let bench = Bench {
        mode: options.mode,
        pace: options.pace(),
        place: Place { cpus, room: CpuRoom::new(cpus.back) },
        binary: ioplane()?,
        folders: Folders::new(options.directory.as_deref())?,
    };
    let mut report = Report::new("core", &FIGURES);
    let mut setup = |key: &str, value: serde_json::Value| report.setup.insert(key.into(), value);
    setup("mode", bench.mode.word().into());
    setup("idle_queues", bench.pace.idle_queues.into());
    setup("generator_cpu", cpus.front.into());
    setup("back_end_cpu", cpus.back.into());
    setup("bound_by", bench.place.room.describe().into());
    setup("interval", "of the median, exact (binomial), 95 % or more".into());
    setup("qsd_version", qsd::version().into());
    for (keys, measure) in MEASUREMENTS {
        if keys.iter().any(|key| wanted(key)) {
            let figures = measure(&bench)?;
            report.add(figures.into_iter().filter(|(key, _)| wanted(key)));
        }
    }
    report.setup.insert("seconds".into(), begin.elapsed().as_secs().into());
    Ok(report)
}

#[cfg(test)]
mod tests {
    use ioplane_figures::goals::GOALS;

    use super::*;

    #[test]
    fn every_goal_of_this_benchmark_has_a_figure() {
        for goal in GOALS.iter().filter(|goal| goal.bench == "core") {
            assert!(FIGURES.contains(&goal.figure), "{}", goal.figure);
        }
    }

    #[test]
    fn every_figure_has_a_measurement() {
        let mut keys: Vec<&str> = MEASUREMENTS.iter().flat_map(|(keys, _)| keys.iter().copied()).collect();
        let mut all = FIGURES.to_vec();
        keys.sort_unstable();
        all.sort_unstable();
        assert_eq!(keys, all);
    }

    #[test]
    fn each_side_is_first_in_half_of_the_pairs() {
        let first: Vec<usize> = (0..10).map(|number| Bench::order(number)[0]).collect();
        assert_eq!(first.iter().filter(|side| **side == 0).count(), 5);
    }
}
