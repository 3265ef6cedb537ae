//! `exitless`: what a request costs when the backend polls, against qemu-storage-daemon.
//!
//! ```text
//!   processor A: generator = driver side + vhost-user front end      processor B: one backend at a time, the others frozen
//!                 |  its own memory, ring, eventfds for each  <------>  ioplane | qsd | ioplane notified, each on memory and file
//! ```
//!
//! Fair means: one processor each; the same generator, features, ring size, request shape (indirect, as Linux); a disk of
//! the same size on the same file system; rounds in turn (A B B A), medians of all rounds, and of the ratios to the peer's round beside each; processor time of every
//! thread of the backend, io_uring's workers included. Two kinds of rounds: **polling** (the driver wants no interrupts;
//! all figures without `irq_`) and **interrupts** (the driver sleeps on its eventfd as Linux does; the figures with
//! `irq_`, and `interrupts_per_request`).

pub mod backend;
pub mod check;
mod competing;
pub mod ioplane;
pub mod load;
mod null;
mod pair;
pub mod qsd;
mod report;
pub mod session;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ioplane_testkit::driver::{DiskOp, Shape};

use crate::baseline::Against;
use crate::mode::Mode;
use crate::served::{Place, scratch};
use backend::{Backend, Backing};
use ioplane::Ioplane;
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use load::{Load, Outcome, Scatter, Waiting};
pub use pair::pair;
use qsd::{Aio, Qsd};
use report::{Key, Report};
use session::Session;

/// Entries of the ring.
const RING: u16 = 256;
/// Requests that can be in flight.
const SLOTS: u16 = 128;
/// Indirect descriptors, as Linux uses for every request of more than one part.
const SHAPE: Shape = Shape::Indirect;
const DEPTHS: [u16; 3] = [1, 32, 128];
/// A round in which others used more of a processor than this is repeated, as often as the pace allows.
pub const FOREIGN: f64 = 0.15;
/// The peer before its way to serve memory is known.
const QSD: Qsd = Qsd { memory: Aio::UringDirect, file: Aio::UringDirect, poll_max_ns: None };
/// How much cheaper than O_DIRECT with io_uring another way of the peer must be on memory to be taken.
const BETTER: f64 = 1.15;

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds on smaller disks: about a minute, and noisier.
    #[arg(long)]
    quick: bool,
    /// Leave ioplane out: only the peer and the generator's ceiling.
    #[arg(long, conflicts_with = "baseline")]
    peers_only: bool,
    /// Where the disk file is made; the default is the directory of the build, which should lie on a real disk.
    #[arg(long = "directory", alias = "folder", value_name = "DIR")]
    folder: Option<PathBuf>,
    /// With --baseline, only the loads whose figures begin so, `file_depth32` for example; may be given several times.
    #[arg(long, value_name = "PREFIX", requires = "baseline")]
    only: Vec<String>,
    /// Two builds in turn.
    #[command(flatten)]
    pub against: Against,
}

struct Pace {
    /// Six are the fewest with an interval.
    rounds: u32,
    /// Disturbed rounds that are repeated, in all.
    repeats: u64,
    irq_rounds: u32,
    warm: Duration,
    time: Duration,
    memory: u64,
    file: u64,
}

impl Pace {
    /// Size of a disk.
    fn bytes(&self, on_file: bool) -> u64 {
        if on_file { self.file } else { self.memory }
    }
}

impl Options {
    /// Whether a load with this figure is measured in pairs.
    fn wants(&self, figure: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|prefix| figure.starts_with(prefix.as_str()))
    }

    fn pace(&self) -> Pace {
        let ms = Duration::from_millis;
        if self.quick {
            return Pace {
                rounds: 6,
                repeats: 20,
                irq_rounds: 1,
                warm: ms(30),
                time: ms(100),
                memory: 64 << 20,
                file: 32 << 20,
            };
        }
        Pace {
            rounds: 10,
            repeats: 50,
            irq_rounds: 6,
            warm: ms(80),
            time: ms(300),
            memory: 512 << 20,
            file: 256 << 20,
        }
    }
}

/// Measures everything. Fails if any byte was wrong, any request failed, or a contender could not be started.
pub fn run(options: &Options) -> Result<Report> {
    let begin = Instant::now();
    let pace = options.pace();
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let place = Place { cpus, room: CpuRoom::new(cpus.back) };
    let mut report = Report::new(cpus, place.room.describe());
    let folders = Folders::new(options.folder.as_deref())?;

    eprintln!("the generator's ceiling, against a backend that does nothing");
    for (depth, outcome) in DEPTHS.iter().zip(null::ceiling(cpus, &DEPTHS, pace.time)?) {
        report.ceiling(*depth, &outcome);
    }
    let memory = choose_memory(&folders, &place, &pace, &mut report)?;

    let qsd = Qsd { memory, ..QSD };
    let [polled, adaptive, notified] = Mode::ALL.map(|mode| Ioplane { mode, binary: None });
    let mut backends: Vec<&dyn Backend> = vec![&qsd];
    if !options.peers_only {
        backends = vec![&polled, &qsd, &adaptive, &notified];
    }
    for on_file in [false, true] {
        let what = if on_file { "file" } else { "memory" };
        let mut sessions = Vec::new();
        for backend in &backends {
            eprintln!("{}: checking every block on {what}", backend.name());
            let backing = folders.backing(backend.name(), on_file, pace.bytes(on_file))?;
            let folder = folders.run(&format!("{}-{what}", backend.name()));
            let session = Session::open(*backend, &backing, &folder, &place, true)?;
            report.setup(session.name, what, &session.how);
            sessions.push(session);
        }
        for op in [DiskOp::Read, DiskOp::Write] {
            for depth in DEPTHS {
                for waiting in [Waiting::Polling, Waiting::Interrupts] {
                    eprintln!("{what}, {op:?}, depth {depth}, {waiting:?}");
                    let key = Key { on_file, write: op == DiskOp::Write, depth, waiting };
                    let load = Load { op, depth, blocks: 0, waiting, warm: pace.warm, time: pace.time };
                    turns(&mut sessions, key, load, &pace, &mut report)?;
                }
            }
        }
        for session in sessions {
            let name = session.name;
            let workers = session.close()?;
            report.workers(name, what, &workers);
        }
    }
    report.took(begin.elapsed());
    Ok(report)
}

/// A B B A ...: the rounds of one load, everybody in turn, so that nobody always comes after the same one.
fn turns(sessions: &mut [Session], key: Key, load: Load, pace: &Pace, report: &mut Report) -> Result<()> {
    let rounds = if load.waiting == Waiting::Polling { pace.rounds } else { pace.irq_rounds };
    for round in 0..rounds {
        for turn in 0..sessions.len() {
            let at = if round % 2 == 0 { turn } else { sessions.len() - 1 - turn };
            let session = &mut sessions[at];
            loop {
                // Everybody goes to the same places in the same round.
                let mut scatter = Scatter::new(u64::from(round) + 1);
                let outcome = session.round(load, &mut scatter)?;
                if outcome.foreign > FOREIGN && report.disturbed() <= pace.repeats {
                    continue;
                }
                report.outcome(session.name, key, outcome);
                break;
            }
        }
    }
    Ok(())
}

/// Which way the peer serves memory for the least processor time a request (what bounds it on one processor, and what
/// noise spoils least): measured at depth 32, reads and writes together. The way it serves the file wins ties
/// ([`BETTER`]), so that chance does not choose.
fn choose_memory(folders: &Folders, place: &Place, pace: &Pace, report: &mut Report) -> Result<Aio> {
    let mut found = Vec::new();
    for aio in Aio::ON_TMPFS.into_iter().chain([Aio::Null]) {
        eprintln!("qsd: trying {aio:?} on memory");
        let backing = folders.backing("probe", false, pace.memory)?;
        let folder = folders.run(&format!("probe-{aio:?}"));
        match probe(&Qsd { memory: aio, ..QSD }, &backing, &folder, place, pace) {
            Ok(outcomes) => {
                let cost = report.probe(&format!("{aio:?}"), &outcomes);
                if aio != Aio::Null {
                    found.push((aio, cost));
                }
            }
            Err(error) => eprintln!("qsd: {aio:?} does not work here: {error:#}"),
        }
    }
    let weighed = |(aio, cost): &(Aio, f64)| if *aio == Aio::UringDirect { cost / BETTER } else { *cost };
    let best = found.iter().min_by(|a, b| weighed(a).total_cmp(&weighed(b)));
    best.map(|(aio, _)| *aio).context("qemu-storage-daemon serves no memory here: is it installed?")
}

fn probe(qsd: &Qsd, backing: &Backing, folder: &Path, place: &Place, pace: &Pace) -> Result<[Outcome; 2]> {
    let mut session = match qsd.memory {
        Aio::Null => Session::open_unchecked(qsd, backing, folder, place)?,
        _ => Session::open(qsd, backing, folder, place, false)?,
    };
    let mut round = |op| {
        let (waiting, warm, time) = (Waiting::Polling, pace.warm, pace.time);
        session.round(Load { op, depth: 32, blocks: 0, waiting, warm, time }, &mut Scatter::new(7))
    };
    Ok([round(DiskOp::Read)?, round(DiskOp::Write)?])
}

/// Folders of a run, gone with it: one on tmpfs for memory, one on a disk for files, sockets and logs.
pub struct Folders {
    shm: tempfile::TempDir,
    disk: tempfile::TempDir,
}

impl Folders {
    pub fn new(on: Option<&Path>) -> Result<Self> {
        Ok(Folders { shm: scratch(Some(Path::new("/dev/shm")))?, disk: scratch(on)? })
    }

    pub fn run(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// A disk of `len` bytes, all of them there.
    pub fn backing(&self, name: &str, on_file: bool, len: u64) -> Result<Backing> {
        let folder = if on_file { &self.disk } else { &self.shm };
        let file = folder.path().join(format!("{name}.raw"));
        let handle = std::fs::File::create(&file)?;
        rustix::fs::fallocate(&handle, rustix::fs::FallocateFlags::empty(), 0, len)
            .with_context(|| format!("{len} bytes for {}", file.display()))?;
        Ok(if on_file { Backing::File { file, len } } else { Backing::Memory { file, len } })
    }
}
