//! `network`: what a frame costs from one guest to another, against DPDK's testpmd.
//!
//! ```text
//!   processor A: generator = both NICs' drivers and front ends       processor B: one backend at a time, others frozen
//!     a.tx >------------------------------------------------------->   ioplane (two NICs on a switch)
//!     b.rx <-------------------------------------------------------<   | testpmd (two vhost ports, io forwarding)
//! ```
//!
//! Fair means: one processor each; the same generator, features, ring size, buffers and frames; every byte of some frames
//! compared beforehand, and the stamp of every frame while it is measured; rounds in turn (A B B A). testpmd forwards from
//! port to port without looking; ioplane is a switch: it looks the address up, checks the source, counts by cause.
//!
//! Rounds are short and many, and the half in which others took least processor time counts: on a shared machine a
//! median of all would measure the neighbours.

pub mod backend;
mod belt;
mod check;
pub mod frame;
pub mod ioplane;
pub mod load;
pub mod nic;
mod null;
mod report;
mod session;
mod testpmd;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

use crate::baseline::{Against, Pair};
use crate::mode::Mode;
use crate::served::{Place, scratch};
use backend::Backend;
use frame::Size;
use ioplane::Ioplane;
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use load::Load;
use nic::Shape;
use report::Report;
use session::Session;
use testpmd::Testpmd;

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds: about a minute, and noisier.
    #[arg(long)]
    quick: bool,
    /// Leave ioplane out: only the peer and the generator's ceiling.
    #[arg(long, conflicts_with = "baseline")]
    peers_only: bool,
    /// Only the load with this key, `split64` for example; may be given several times.
    #[arg(long)]
    only: Vec<String>,
    /// ioplane's core never yields its processor, as testpmd's does not.
    #[arg(long)]
    dedicated: bool,
    /// Where sockets and logs are made; the default is the directory of the build.
    #[arg(long = "directory", alias = "folder", value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Two builds in turn.
    #[command(flatten)]
    pub against: Against,
}

/// Rounds of each load in one of a pair of runs. The quieter half of them counts, as always.
const PAIR_ROUNDS: u32 = 4;
const PAIR_LOAD: Load =
    Load { rate: None, sleeps: false, warm: Duration::from_millis(10), time: Duration::from_millis(40) };
const PAIR_PING: Duration = Duration::from_millis(60);

struct Pace {
    /// Half of them count. Of twelve, six pairs do: the fewest with an interval.
    rounds: u32,
    asleep_rounds: u32,
    warm: Duration,
    time: Duration,
    ping: Duration,
    /// Time of one trial of a rate.
    trial: Duration,
    searches: u32,
}

impl Options {
    fn shapes(&self) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for pairs in [1, 8] {
            for size in Size::ALL {
                shapes.extend([false, true].map(|packed| Shape { packed, size, pairs }));
            }
        }
        shapes.retain(|shape| self.only.is_empty() || self.only.contains(&report::key(*shape)));
        shapes
    }

    fn pace(&self) -> Pace {
        let ms = Duration::from_millis;
        if self.quick {
            return Pace {
                rounds: 12,
                asleep_rounds: 1,
                warm: ms(10),
                time: ms(40),
                ping: ms(60),
                trial: ms(30),
                searches: 1,
            };
        }
        Pace {
            rounds: 40,
            asleep_rounds: 3,
            warm: ms(20),
            time: ms(100),
            ping: ms(200),
            trial: ms(100),
            searches: 3,
        }
    }
}

/// Measures everything. Fails if any byte was wrong, a frame came twice, or a contender could not be started.
pub fn run(options: &Options) -> Result<Report> {
    let begin = Instant::now();
    let pace = options.pace();
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let place = Place { cpus, room: CpuRoom::new(cpus.back) };
    let mut report = Report::new(cpus, place.room.describe());
    let folder = scratch(options.folder.as_deref())?;

    eprintln!("the generator's ceiling, through a backend that only moves ring entries");
    for (name, packed) in [("split64", false), ("packed64", true)] {
        report.ceiling(name, &null::ceiling(cpus, packed, pace.time)?);
    }
    let ioplane = Ioplane { mode: Mode::Polled, dedicated: options.dedicated, binary: None };
    let mut backends: Vec<&dyn Backend> = vec![&Testpmd];
    if !options.peers_only {
        backends.insert(0, &ioplane);
    }
    for backend in &backends {
        report.setup(backend.name(), &backend.describe());
    }
    for shape in options.shapes() {
        let key = report::key(shape);
        let mut sessions = Vec::new();
        for backend in &backends {
            eprintln!("{key}: {}: comparing frames", backend.name());
            sessions.push(Session::open(
                *backend,
                shape,
                &folder.path().join(format!("{key}-{}", backend.name())),
                &place,
            )?);
        }
        eprintln!("{key}: measuring");
        turns(&mut sessions, shape, &pace, &mut report)?;
    }
    report.took(begin.elapsed());
    Ok(report)
}

/// One pair of runs of two builds: rates and round trips of each load, without the peer.
pub fn pair(options: &Options, pair: &Pair<'_>) -> Result<[Value; 2]> {
    let folder = scratch(options.folder.as_deref())?;
    let mut reports = [Report::default(), Report::default()];
    for shape in options.shapes() {
        let key = report::key(shape);
        if !pair.wants(&format!("{key}.")) {
            continue;
        }
        let mut sessions = Vec::new();
        for side in pair.order {
            pair.go_on()?;
            let backend =
                Ioplane { mode: Mode::Polled, dedicated: false, binary: Some(pair.binary(side).to_owned()) };
            let folder = folder.path().join(format!("{key}-{}", side.name()));
            sessions.push((side, Session::open(&backend, shape, &folder, pair.place)?));
        }
        for _ in 0..PAIR_ROUNDS {
            for (side, session) in &mut sessions {
                pair.go_on()?;
                let report = &mut reports[*side as usize];
                report.flood(shape, session.name, session.stream(&PAIR_LOAD)?);
            }
        }
        for (side, session) in &mut sessions {
            pair.go_on()?;
            reports[*side as usize].ping(shape, session.name, &session.ping(PAIR_PING)?);
        }
    }
    Ok(reports.map(|report| report.figures().into()))
}

/// A B B A ...: the rounds of one load, everybody in turn.
fn turns(sessions: &mut [Session], shape: Shape, pace: &Pace, report: &mut Report) -> Result<()> {
    let load = Load { rate: None, sleeps: false, warm: pace.warm, time: pace.time };
    for round in 0..pace.rounds {
        for turn in 0..sessions.len() {
            let at = if round % 2 == 0 { turn } else { sessions.len() - 1 - turn };
            let session = &mut sessions[at];
            report.flood(shape, session.name, session.stream(&load)?);
        }
    }
    for _ in 0..pace.asleep_rounds {
        for session in sessions.iter_mut() {
            report.asleep(shape, session.name, session.stream(&Load { sleeps: true, ..load })?);
        }
    }
    for _ in 0..pace.searches {
        for session in sessions.iter_mut() {
            report.ping(shape, session.name, &session.ping(pace.ping)?);
            let most = report.rate(shape, session.name) * 1.2;
            report.loss_free(shape, session.name, session.loss_free(most, pace.trial)?);
        }
    }
    Ok(())
}
