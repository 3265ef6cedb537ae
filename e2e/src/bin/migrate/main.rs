//! `ioplane-migrate-bench [--json] [--quick] [--moves N] [--only PART] [--plot FILE]`: a guest whose NIC is a virtual function moves to another host and back, beside the
//! same guest with virtio-net on ioplane and with a pair of NICs of QEMU's (`failover`).
//!
//! ```text
//!   here:  models of the silicon, moved N times               --> vf82599, and the frames, pages and accesses of both cards
//!   L1:    moves there and back under UDP and TCP, by kind    --> gaps that the other end of the cable, on this machine, sees; frames by their numbers
//!          memories of both QEMUs compared at the switch-over --> pages missed, with the log of what the function writes and without
//!          pings in pairs                                     --> what it costs while nothing moves, before a move and after one
//!          statistics in turn                                 --> a read that the driver makes of memory against one that is trapped
//! ```
//!
//! QEMU's igb is the 82576. Counts are what they would be on hardware; times are those of a translated machine, and only ratios within a run mean
//! something. What was not measured is null, and `not_measured` says why.

mod cost;
mod figures;
mod model;
mod moves;
mod over_time;
mod place;
mod plot;
mod reads;

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use ioplane_e2e::assets::{CoopDriver, Host};
use ioplane_e2e::uplink;
use ioplane_e2e::{L1, memories};
use ioplane_figures::report::envelope_of;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cost::Moves;
use figures::{Measured, table};
use moves::Course;
use place::{Kind, sides};

const MINUTE: Duration = Duration::from_secs(60);
/// Mode of a function whose driver cooperates.
const COOPERATING: &str = "cooperating --mapped";

/// Measures moves of a VM with a virtual function.
#[derive(Parser)]
struct Options {
    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
    /// Two moves of each guest, 60 of each model, and a minute of pings before a move and after it
    #[arg(long)]
    quick: bool,
    /// Moves of each guest [default: 10; with --quick 2]
    #[arg(long)]
    moves: Option<u32>,
    /// Moves of each model [default: 2000; with --quick 60]
    #[arg(long)]
    model_moves: Option<u32>,
    /// Memories compared with what the function writes logged; one more is without that
    #[arg(long, default_value_t = 1)]
    comparisons: usize,
    /// Datagrams a second, as far as the stage is fast enough
    #[arg(long, default_value_t = moves::RATE)]
    rate: u32,
    /// Only this part; may be given again
    #[arg(long)]
    only: Vec<Part>,
    /// Write what came from each guest over time there, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Models of the silicon
    Model,
    /// A virtual function of an 82576
    Vf,
    /// virtio-net
    Virtio,
    /// A virtual function of an 82576 whose driver cooperates
    Cooperating,
    /// QEMU's pair
    Failover,
    /// Memories compared
    Pages,
    /// What it costs while nothing moves, before a move and after one: the following three
    Cost,
    /// The same of a function that moves by a table, all of whose registers are trapped
    CostTrapped,
    /// The same of one whose registers the library maps
    CostMapped,
    /// The same of one whose driver cooperates
    CostCooperating,
    /// Reads of statistics, by self-emulation and trapped
    Reads,
}

impl Part {
    /// Whether `--only` this one asks for `part` too.
    fn has(self, part: Part) -> bool {
        let costs = [Part::CostTrapped, Part::CostMapped, Part::CostCooperating];
        self == part || self == Part::Cost && costs.contains(&part)
    }
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only.has(part))
    }

    fn moves(&self) -> u32 {
        self.moves.unwrap_or(if self.quick { 2 } else { 10 })
    }

    /// How long pings go on before a move, and after it. With boots and the move each kind of function takes less than six minutes.
    fn pinging(&self) -> Duration {
        Duration::from_secs(if self.quick { 60 } else { 135 })
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        // What this program does for itself in L1.
        ["step", socket, method, path, body] => return memories::step(socket.as_ref(), method, path, body),
        ["compare", here, there] => return memories::compare(here, there),
        ["copy", qemu, to] => return memories::copy(qemu, to.as_ref()),
        _ => {}
    }
    let options = Options::parse();
    let begun = Instant::now();
    let say = |line: &str| eprintln!("[{:6.1} s] {line}", begun.elapsed().as_secs_f64());
    let mut measured = Measured::default();
    if options.wants(Part::Model) {
        measured.model =
            Some(model::counted(options.model_moves.unwrap_or(if options.quick { 60 } else { 2000 }))?);
        say("moves between models");
    }
    if options.only.is_empty() || options.only.iter().any(|part| *part != Part::Model) {
        nested(&options, &mut measured, &say)?;
    }
    let figures = measured.figures();
    if let Some((path, picture)) = options.plot.as_ref().zip(plot::plot(&measured)) {
        std::fs::write(path, picture).with_context(|| format!("writing {}", path.display()))?;
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&envelope_of("migrate", &figures)?)?);
    } else {
        print!("{}", table(&figures));
    }
    Ok(())
}

/// All that needs a KVM host with cards.
fn nested(options: &Options, measured: &mut Measured, say: &dyn Fn(&str)) -> Result<()> {
    let drivers = [Part::Cooperating, Part::CostCooperating, Part::Reads];
    if drivers.into_iter().any(|part| options.wants(part)) {
        // It takes long to make, and no guest should wait for it.
        let made = Host::prepare(say).and_then(|host| host.cooperating(CoopDriver::Igbvf, say));
        measured.note("the changed igbvf", made.map(drop), say);
    }
    let (l1, cards, far) = place::boot(say)?;
    let both = sides(&l1, cards)?;
    say("both daemons serve");
    let ground = (&l1, &both, &far);
    // What goes wrong in one part says so, and the others are measured all the same.
    if options.wants(Part::Vf) || options.wants(Part::Pages) {
        let moves = if options.wants(Part::Vf) { options.moves() } else { 0 };
        let stops = std::iter::repeat_n(true, options.comparisons).chain([false]);
        let (vf, memories) = (&mut measured.vf, &mut measured.stops);
        let done = course(ground, Kind::Vf, (options.rate, moves), vf, say, |course| {
            if !options.wants(Part::Pages) {
                return Ok(());
            }
            let traffic = course.traffic()?;
            for (number, log) in stops.enumerate() {
                let stop = course.compared(number, log, &traffic).context("memories compared")?;
                say(&format!("memories compared: {stop:?}"));
                memories.push(stop);
            }
            traffic.end().map(drop)
        });
        measured.note("vf", done, say);
    }
    if options.wants(Part::Virtio) {
        let way = (options.rate, options.moves());
        let done = course(ground, Kind::Virtio, way, &mut measured.virtio, say, |_| Ok(()));
        measured.note("virtio", done, say);
    }
    if options.wants(Part::Failover) {
        let way = (options.rate, options.moves());
        let done = place::pair_addresses(&l1)
            .and_then(|()| course(ground, Kind::FailoverVf, way, &mut measured.failover, say, |_| Ok(())));
        measured.note("failover", done, say);
    }
    if options.wants(Part::Cooperating) || options.wants(Part::CostCooperating) {
        let (mut unasked, mut after) = (Vec::new(), None);
        let (moves, rows) = match options.wants(Part::Cooperating) {
            true => (options.moves(), &mut measured.cooperating),
            false => (1, &mut unasked),
        };
        let changed = both.iter().try_for_each(|side| side.becomes(COOPERATING));
        let done = changed.and_then(|()| {
            course(ground, Kind::Cooperating, (options.rate, moves), rows, say, |course| {
                if options.wants(Part::CostCooperating) {
                    after = Some(cost::after_moves(course, options.pinging()));
                }
                Ok(())
            })
        });
        let missing = || Err(anyhow!("the guest has not come that far"));
        let after = options.wants(Part::CostCooperating).then(|| after.unwrap_or_else(missing));
        measured.note("cooperating", done, say);
        if let Some(after) = after {
            measured.cost("cooperating_after_move", after, say);
        }
    }
    let here = &both[0];
    let mut costs = |part: Part, keys: [&'static str; 2], mode: &str, moves: Moves| {
        if !options.wants(part) {
            return;
        }
        match here.becomes(mode).and_then(|()| cost::runtime(&l1, here, moves, options.pinging())) {
            Ok((before, after)) => {
                measured.cost(keys[0], Ok(before), say);
                if let Some(after) = after {
                    measured.cost(keys[1], after, say);
                }
            }
            Err(error) => measured.cost(keys[0], Err(error), say),
        }
    };
    costs(Part::CostTrapped, ["runtime", "runtime_after_move"], "migratable", Moves::ByTable);
    costs(Part::CostMapped, ["mapped", "mapped_after_move"], "migratable --mapped", Moves::Mapped);
    costs(Part::CostCooperating, ["cooperating", "cooperating_after_move"], COOPERATING, Moves::ByDriver);
    if options.wants(Part::Reads) {
        let limit = Duration::from_secs(if options.quick { 60 } else { 150 });
        let reads = here.becomes(COOPERATING).and_then(|()| reads::reads(&l1, here, limit));
        say(&format!("reads of statistics: {reads:?}"));
        measured.reads = Some(reads.map_err(|error| format!("{error:#}")));
    }
    Ok(())
}

/// The host with both sides, and the other end.
type Ground<'a> = (&'a L1, &'a [place::Side<'a>; 2], &'a uplink::Host);

/// A guest that moves so often, at so many datagrams a second; then something else is done with it.
fn course<'a>(
    (l1, both, far): Ground<'a>,
    kind: Kind,
    (rate, moves): (u32, u32),
    into: &mut Vec<moves::Moved>,
    say: &dyn Fn(&str),
    then: impl FnOnce(&Course<'a>) -> Result<()>,
) -> Result<()> {
    let mut course = Course::begin(l1, both, far, kind, rate)?;
    say(&format!("{kind:?}: the guest is up"));
    let mut done = Ok(());
    for _ in 0..moves {
        match course.moves() {
            Ok(moved) => {
                say(&format!("{kind:?} has moved: {}", serde_json::to_string(&moved)?));
                into.push(moved);
            }
            Err(error) => {
                done = Err(error);
                break;
            }
        }
    }
    let done = done.and_then(|()| then(&course));
    // Another guest of that name would be in its way.
    let ended = course.end();
    done.and(ended)
}
