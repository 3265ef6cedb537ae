//! `neighbour`: what a guest feels of a hostile one on the same polling I/O core: the p99 of its reads beside a neighbour
//! that spoils rings and conversations and is greedy, as a multiple of the p99 beside a quiet one.
//!
//! ```text
//!   processor A: the good guest's front end | the hostile one | the daemon's control threads      processor B: one polled I/O core
//! ```
//!
//! The good guest's front end sleeps between two requests, and while it waits for one the others on its processor do not run: it has the priority, so what
//! they cost it there is not measured. What they cost it on the I/O core is.
//!
//! Rounds in turn (quiet, hostile, quiet, ...), each with as many acts as fit; the figure is the median of the ratios of
//! neighbouring rounds. The hostile one rests between two acts: it is hostile to its device, not to the processor that the
//! good one's front end runs on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use ioplane_figures::machine::{self, CpuRoom, Cpus};
use ioplane_figures::report::{envelope, median, rounded, setup_lines};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::hostile;
use serde_json::{Map, Value};

use crate::baseline::{Against, Pair};
use crate::daemon::Configuration;
use crate::mode::Mode;
use crate::served::{Place, ioplane, scratch};

/// Between two acts.
const BREATH: Duration = Duration::from_millis(2);
const BLOCK: u32 = 4096;
/// Pairs of rounds of a short run, and the time of each round.
const QUICK: (usize, Duration) = (5, Duration::from_millis(400));

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Print one JSON object in place of the table.
    #[arg(long)]
    pub json: bool,
    /// Fewer and shorter rounds, and noisier.
    #[arg(long)]
    quick: bool,
    /// Two builds in turn.
    #[command(flatten)]
    pub against: Against,
}

/// What came out.
pub struct Report {
    setup: Map<String, Value>,
    figures: Map<String, Value>,
}

impl Report {
    pub fn json(&self) -> Value {
        envelope("neighbour", &self.setup, self.figures.clone())
    }

    pub fn table(&self) -> String {
        format!("{}\n{}", setup_lines(&self.setup, 24), setup_lines(&self.figures, 24))
    }
}

/// The good guest: reads of one block, one at a time, each checked.
struct Good {
    front: FrontEnd,
    disk: Disk,
    _memory: GuestMemory,
}

impl Good {
    fn connect(socket: &Path) -> Result<Good> {
        let mut front = FrontEnd::connect(socket, Wants::default())?;
        let mut memory = GuestMemory::new(4 << 20)?;
        let plan = DiskPlan::new(4, BLOCK, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan)?;
        front.share(&memory)?;
        front.start(0, &memory, disk.place(), 0)?;
        let mut good = Good { front, disk, _memory: memory };
        for block in 0..64 {
            let token = good.disk.next().context("a free slot")?;
            good.disk.write_data(token, &[block as u8 + 1; BLOCK as usize])?;
            good.disk.submit(DiskOp::Write, block * 8, BLOCK);
            good.wait()?;
        }
        Ok(good)
    }

    /// Until the request is answered.
    fn wait(&mut self) -> Result<ioplane_testkit::driver::Token> {
        let begun = Instant::now();
        if self.disk.ring().kick_needed() {
            self.front.kick(0);
        }
        loop {
            if let Some(done) = self.disk.reap()? {
                ensure!(done.ok(), "a request of the good guest ended with status {}", done.status);
                return Ok(done.token);
            }
            ensure!(begun.elapsed() < Duration::from_secs(10), "the good guest stands still");
            std::hint::spin_loop();
        }
    }

    fn round(&mut self, time: Duration) -> Result<Histogram<u64>> {
        let mut times = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        let (end, mut block) = (Instant::now() + time, 0u64);
        while Instant::now() < end {
            block = (block * 5 + 1) % 64;
            let begun = Instant::now();
            self.disk.submit(DiskOp::Read, block * 8, BLOCK).context("a free slot")?;
            let token = self.wait()?;
            times.saturating_record(begun.elapsed().as_nanos() as u64);
            let mut data = [0; BLOCK as usize];
            self.disk.read_data(token, &mut data)?;
            ensure!(data == [block as u8 + 1; BLOCK as usize], "block {block} is wrong");
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(times)
    }
}

/// Lets the calling thread run before the others of its processor.
fn take_precedence() -> Result<()> {
    let why = "the good guest's front end has to run before its neighbour's: run as root";
    rustix::process::setpriority_process(Some(rustix::thread::gettid()), -19).context(why)
}

/// Measures. Fails if a byte was wrong, a request failed, or the neighbour could not be hostile.
pub fn run(options: &Options) -> Result<Report> {
    let (pairs, time) = if options.quick { QUICK } else { (15, Duration::from_millis(1500)) };
    let cpus = Cpus::choose()?;
    machine::pin(cpus.front)?;
    let place = Place { cpus, room: CpuRoom::new(cpus.back) };
    let figures = measure(&ioplane()?, &place, pairs, time)?;
    let mut setup = Map::new();
    setup.insert("rounds".into(), format!("{pairs} quiet and {pairs} hostile, {time:?} each").into());
    setup.insert("backend".into(), format!("one polled core on processor {}", cpus.back).into());
    Ok(Report { setup, figures })
}

/// One pair of runs of two builds.
pub fn pair(pair: &Pair<'_>) -> Result<[Value; 2]> {
    let mut figures = [Value::Null, Value::Null];
    for side in pair.order {
        pair.go_on()?;
        let (rounds, time) = QUICK;
        figures[side as usize] = measure(pair.binary(side), pair.place, rounds, time)?.into();
    }
    Ok(figures)
}

/// The figures of `binary`, from `pairs` quiet and as many hostile rounds.
fn measure(binary: &Path, place: &Place, pairs: usize, time: Duration) -> Result<Map<String, Value>> {
    let folder = scratch(None)?;
    let [good, evil] = ["good", "evil"].map(|name| folder.path().join(name).with_extension("sock"));
    let configuration = Configuration::new(Mode::Polled)
        .core_alone()
        .disk("good", &good, "memory = \"32M\"")
        .disk("evil", &evil, "memory = \"32M\"");
    let mut served = configuration.start(binary, folder.path(), place)?;
    served.await_socket(&good)?;
    served.await_socket(&evil)?;
    let mut guest = Good::connect(&good)?;
    guest.round(time / 4)?;
    let (on, over, acts) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let mut rounds = [Vec::new(), Vec::new()];
    std::thread::scope(|scope| -> Result<()> {
        let neighbour = scope.spawn(|| -> Result<(), String> {
            while !over.load(Ordering::Acquire) {
                if on.load(Ordering::Acquire) {
                    hostile::act(&evil, acts.fetch_add(1, Ordering::Relaxed), BREATH)?;
                }
                std::thread::sleep(BREATH);
            }
            Ok(())
        });
        // A thread of its own: whatever is started later has no precedence.
        let measured = scope.spawn(|| -> Result<()> {
            take_precedence()?;
            (0..2 * pairs).try_for_each(|turn| {
                on.store(turn % 2 == 1, Ordering::Release);
                // Its last act ends before a quiet round begins.
                std::thread::sleep(10 * BREATH);
                rounds[turn % 2].push(guest.round(time)?);
                Ok(())
            })
        });
        let measured = measured.join().map_err(|_| anyhow!("the good guest panicked"))?;
        over.store(true, Ordering::Release);
        let neighbour = neighbour.join().map_err(|_| anyhow!("the neighbour panicked"))?;
        measured.and(neighbour.map_err(|why| anyhow!("the neighbour: {why}")))
    })
    .with_context(|| served.log_tail())?;
    let acts = acts.into_inner();
    ensure!(acts > hostile::ROUND * pairs as u64, "{acts} hostile acts in {pairs} rounds: too few to feel");
    let ratio = |part: f64| {
        let of = |times: &Histogram<u64>| times.value_at_quantile(part) as f64;
        median(rounds[0].iter().zip(&rounds[1]).map(|(quiet, hostile)| of(hostile) / of(quiet).max(1.0)))
    };
    let us = |times: &[Histogram<u64>]| median(times.iter().map(|t| t.value_at_quantile(0.99) as f64 / 1e3));
    let mut figures = Map::new();
    for (name, figure) in [
        ("p99_ratio", ratio(0.99)),
        ("p50_ratio", ratio(0.5)),
        ("quiet_p99_us", us(&rounds[0])),
        ("hostile_p99_us", us(&rounds[1])),
        ("hostile_acts_per_second", acts as f64 / (pairs as f64 * time.as_secs_f64())),
    ] {
        figures.insert(name.into(), rounded(figure).into());
    }
    Ok(figures)
}
