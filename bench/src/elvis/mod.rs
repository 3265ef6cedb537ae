//! `elvis`: the evaluation of the paper that exitless I/O comes from (Gordon, Har'El, Landau, Ben-Yehuda, Traeger: "Towards
//! Exitless and Efficient Paravirtual I/O", SYSTOR 2012, section 5): 1 to 7 guests and a machine that they talk to, one
//! I/O core for all of them, notification against polling, and the core that chooses by itself.
//!
//! ```text
//!   processor A: the drivers of all guests and of the remote machine     processor B: one ioplane at a time
//!                asleep until an interrupt, as guests are                   notified: kicks, sleeps | polled: looks | adaptive
//! ```
//!
//! What is the paper's: the number of guests, one I/O core, both loads, notification as the baseline. What is not: guests are
//! drivers without a kernel on one processor together, so a frame costs its guest little and a kick costs a system call, not
//! an exit; each 64-byte write is a frame of its own; the remote machine is a port of the switch. Ratios carry over,
//! megabits do not.

mod load;
mod page;
mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::baseline::{Against, Pair};
use crate::mode::Mode;
use crate::network::backend::{Backend, mac, socket};
use crate::network::frame::Size;
use crate::network::ioplane::Ioplane;
use crate::network::nic::{Nic, Shape};
use crate::served::{Place, Served, scratch};
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use load::{Outcome, Party, Span, Work};
use report::Report;

/// As many as the paper's machine had processors for.
const GUESTS: u16 = 7;

/// Rounds after which the processes are started anew: where a process lies in memory can change its speed by more than its mode does.
const ROUNDS_PER_START: usize = 2;

/// The name of the second polled core.
const AGAIN: &str = "again";

/// Of each load in one of a pair of runs.
const PAIR_SPAN: Span = Span { warm: Duration::from_millis(10), time: Duration::from_millis(100) };

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds, and noisier.
    #[arg(long)]
    quick: bool,
    /// How long each load of a round takes, ms, a tenth of it before anything is counted; the default is 220, quick 70. A paced load runs for
    /// half a second (quick: 200 ms) at least before it is counted.
    #[arg(long, value_name = "MS", conflicts_with = "baseline", value_parser = clap::value_parser!(u64).range(20..=60_000))]
    round: Option<u64>,
    /// Measure nothing: the table for documents, and the plot, of a run whose JSON is there.
    #[arg(long, value_name = "JSON", conflicts_with_all = ["baseline", "quick", "json"])]
    from: Option<PathBuf>,
    /// Write the plot there, as SVG.
    #[arg(long, conflicts_with = "baseline")]
    plot: Option<PathBuf>,
    /// Most guests.
    #[arg(long, default_value_t = GUESTS, value_parser = clap::value_parser!(u16).range(1..=14))]
    guests: u16,
    /// Only rows with so many guests, as 1,2,3; the default is all
    #[arg(long, value_name = "GUESTS", value_delimiter = ',', conflicts_with_all = ["baseline", "from"])]
    only: Vec<u16>,
    /// Drivers look at their rings all the time, in place of sleeping until an interrupt: without the interrupts from processor to processor that
    /// wake them, what the core does by itself is compared. The report's name is elvis-awake
    #[arg(long, conflicts_with_all = ["baseline", "from"])]
    awake: bool,
    /// Where sockets and logs are made; the default is the directory of the build.
    #[arg(long = "directory", alias = "folder", value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Two builds in turn.
    #[command(flatten)]
    pub against: Against,
}

/// Measures everything. Fails if a frame came twice or nothing came at all.
pub fn run(options: &Options) -> Result<Report> {
    let begin = Instant::now();
    let ms = Duration::from_millis;
    let (rounds, span, settled) = if options.quick {
        (4, Span { warm: ms(10), time: ms(60) }, ms(200))
    } else {
        (8, Span { warm: ms(20), time: ms(200) }, ms(500))
    };
    let span = options.round.map_or(span, |all| Span { warm: ms(all / 10), time: ms(all - all / 10) });
    // Below saturation processor time is what counts, and an adaptive core takes some ms to forget the load before.
    let paced = Span { warm: span.warm.max(settled), ..span };
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let place = Place { cpus, room: CpuRoom::new(cpus.back) };
    let mut report = Report::new(cpus, place.room.describe(), options.awake);
    let folder = scratch(options.folder.as_deref())?;
    for guests in 1..=options.guests {
        if !options.wants(guests) {
            continue;
        }
        eprintln!("{guests} guests");
        let mut sessions = Vec::new();
        for round in 0..rounds {
            if round % ROUNDS_PER_START == 0 {
                sessions.clear();
                for (name, mode) in contenders() {
                    let backend = Ioplane { mode, dedicated: false, binary: None };
                    let folder = folder.path().join(format!("{name}-{guests}-{round}"));
                    let session = Session::open(&backend, guests, !options.awake, &folder, &place)?;
                    sessions.push(Session { name, ..session });
                }
            }
            for work in Work::ALL {
                for at in order(round, sessions.len()) {
                    let session = &mut sessions[at];
                    let span = if work == Work::Paced { paced } else { span };
                    report.outcome(guests, work, session.name, session.round(work, span)?);
                }
            }
        }
    }
    report.took(begin.elapsed());
    if let Some(path) = &options.plot {
        page::plot(&Value::Object(report.figures()), path)?;
    }
    Ok(report)
}

/// Each mode, and polled a second time: how far two of the same differ is what a row cannot tell.
fn contenders() -> impl Iterator<Item = (&'static str, Mode)> {
    Mode::ALL.map(|mode| (mode.contender(), mode)).into_iter().chain([(AGAIN, Mode::Polled)])
}

/// Whose turn it is in a round, by places. How soon a processor wakes depends on how long it slept in the turn before, so in the second half of the
/// rounds each has another one before it than in the first, and each is the first equally often.
fn order(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).map(|at| (at + round) % count).collect();
    if (round / count) % 2 == 1 {
        order.reverse();
    }
    order
}

impl Options {
    /// Whether rows with so many guests are to be measured.
    fn wants(&self, guests: u16) -> bool {
        self.only.is_empty() || self.only.contains(&guests)
    }

    /// The table of a run whose JSON is there, as documents have it, if that is what is asked for; writes its plot.
    pub fn page(&self) -> Result<Option<String>> {
        let Some(from) = &self.from else { return Ok(None) };
        let text = std::fs::read_to_string(from).with_context(|| format!("reading {}", from.display()))?;
        let report: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is no JSON of a run", from.display()))?;
        if let Some(path) = &self.plot {
            page::plot(&report["figures"], path)?;
        }
        Ok(Some(page::table(&report["figures"])))
    }
}

/// One pair of runs of two builds.
pub fn pair(options: &Options, pair: &Pair<'_>) -> Result<[Value; 2]> {
    let folder = scratch(options.folder.as_deref())?;
    let mut reports = [Report::default(), Report::default()];
    for guests in 1..=options.guests {
        if !pair.wants(&format!("guests{guests}.")) {
            continue;
        }
        for mode in Mode::OF_EACH_BUILD {
            let mut sessions = Vec::new();
            for side in pair.order {
                pair.go_on()?;
                let backend = Ioplane { mode, dedicated: false, binary: Some(pair.binary(side).to_owned()) };
                let folder = folder.path().join(format!("{}-{}-{guests}", side.name(), backend.name()));
                sessions.push((side, Session::open(&backend, guests, true, &folder, pair.place)?));
            }
            for work in Work::ALL {
                for (side, session) in &mut sessions {
                    pair.go_on()?;
                    let outcome = session.round(work, PAIR_SPAN)?;
                    reports[*side as usize].outcome(guests, work, session.name, outcome);
                }
            }
        }
    }
    Ok(reports.map(|report| report.figures().into()))
}

/// One ioplane with all its guests, thawed only while it is its turn.
struct Session {
    name: &'static str,
    served: Served,
    party: Party,
}

impl Session {
    /// `sleeps`: its drivers sleep until an interrupt.
    fn open(backend: &dyn Backend, guests: u16, sleeps: bool, folder: &Path, place: &Place) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let shape = Shape { packed: false, size: Size::Segment, pairs: 1 };
        let count = usize::from(guests);
        let mut served = backend.start(count + 1, shape, folder, place)?;
        for index in 0..=count {
            served.await_socket(&socket(folder, index))?;
        }
        let connect = || -> Result<Party> {
            let nic = |index, to| Nic::connect(&socket(folder, index), shape, mac(index), mac(to));
            let remote = nic(count, 0)?;
            let each: Result<Vec<_>> = (0..count).map(|index| nic(index, count)).collect();
            Ok(Party::new(each?, remote, sleeps))
        };
        let party = connect().with_context(|| format!("{}\n{}", backend.name(), served.log_tail()))?;
        let mut session = Session { name: backend.name(), served, party };
        session.party.drain()?;
        session.served.freeze();
        Ok(session)
    }

    fn round(&mut self, work: Work, span: Span) -> Result<Outcome> {
        self.served.thaw();
        let outcome = self.party.run(work, span, &self.served.pids());
        let outcome =
            outcome.with_context(|| format!("{}: {work:?}\n{}", self.name, self.served.log_tail()))?;
        self.served.freeze();
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_contender_is_first_equally_often_and_has_no_fixed_predecessor() {
        let orders: Vec<_> = (0..8).map(|round| order(round, 4)).collect();
        for one in 0..4 {
            assert_eq!(orders.iter().filter(|order| order[0] == one).count(), 2);
            let before =
                |order: &Vec<usize>| Some(order[order.iter().position(|at| *at == one)?.checked_sub(1)?]);
            let befores: std::collections::BTreeSet<_> = orders.iter().filter_map(before).collect();
            assert_eq!(befores.len(), 2);
        }
    }

    #[test]
    fn the_second_polled_core_is_no_mode_of_its_own() {
        let names: Vec<_> = contenders().map(|(name, _)| name).collect();
        assert_eq!(names, ["ioplane", "adaptive", "notified", AGAIN]);
    }
}
