//! `ioplane-migrate-bench [--json] [--quick] [--moves N] [--only PART]`: a guest whose NIC is a virtual function moves to another host and back, beside the
//! same guest with virtio-net on ioplane and with a pair of NICs of QEMU's (`failover`).
//!
//! ```text
//!   here:  models of the silicon, moved N times               --> vf82599, and the frames, pages and accesses of both cards
//!   L1:    moves there and back under UDP and TCP, by kind    --> gaps that the other end of the cable sees; frames by their numbers
//!          memories of both QEMUs compared at the switch-over --> pages missed, with the log of what the function writes and without
//!          pings in pairs                                     --> what it costs while nothing moves
//! ```
//!
//! QEMU's igb is the 82576. Counts are what they would be on hardware; times are those of a translated machine, and only ratios within a run mean
//! something. What was not measured is null, and `not_measured` says why.

mod cost;
mod figures;
mod model;
mod moves;
mod pages;
mod place;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use ioplane_e2e::L1;
use ioplane_figures::report::envelope_of;
use std::time::{Duration, Instant};

use figures::{Measured, table};
use moves::Course;
use place::{Kind, sides};

const MINUTE: Duration = Duration::from_secs(60);

/// Measures moves of a VM with a virtual function.
#[derive(Parser)]
struct Options {
    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
    /// Two moves of each guest, 60 of each model, and a minute of pings
    #[arg(long)]
    quick: bool,
    /// Moves of each guest [default: 10; with --quick 2]
    #[arg(long)]
    moves: Option<u32>,
    /// Moves of each model [default: 2000; with --quick 60]
    #[arg(long)]
    model_moves: Option<u32>,
    /// Datagrams a second, as far as the stage is fast enough
    #[arg(long, default_value_t = 300)]
    rate: u32,
    /// Only this part; may be given again
    #[arg(long)]
    only: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Models of the silicon
    Model,
    /// A virtual function of an 82576
    Vf,
    /// virtio-net
    Virtio,
    /// QEMU's pair
    Failover,
    /// Memories compared
    Pages,
    /// What it costs while nothing moves
    Cost,
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    fn moves(&self) -> u32 {
        self.moves.unwrap_or(if self.quick { 2 } else { 10 })
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        // What this program does for itself in L1.
        ["step", socket, method, path, body] => return pages::step(socket.as_ref(), method, path, body),
        ["compare", here, there] => return pages::compare(here, there),
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
    if [Part::Vf, Part::Virtio, Part::Failover, Part::Pages, Part::Cost]
        .into_iter()
        .any(|part| options.wants(part))
    {
        nested(&options, &mut measured, &say)?;
    }
    let figures = measured.figures();
    if options.json {
        println!("{}", serde_json::to_string_pretty(&envelope_of("migrate", &figures)?)?);
    } else {
        print!("{}", table(&measured, &figures));
    }
    Ok(())
}

/// All that needs a KVM host with cards.
fn nested(options: &Options, measured: &mut Measured, say: &dyn Fn(&str)) -> Result<()> {
    let (l1, cards) = L1::boot_with_igbs(2560, 2, 2, say)?;
    let both = sides(&l1, cards)?;
    say("both daemons serve");
    if options.wants(Part::Vf) || options.wants(Part::Pages) {
        let mut course = Course::begin(&l1, &both, Kind::Vf, options.rate)?;
        for _ in 0..if options.wants(Part::Vf) { options.moves() } else { 0 } {
            let moved = course.moves().context("a virtual function")?;
            say(&format!("a virtual function has moved: {:.0} ms; {}", moved.gap_ms, moved.report));
            measured.vf.push(moved);
        }
        if options.wants(Part::Pages) {
            for log in [true, false] {
                let stop = pages::stop(&course, log).context("memories compared")?;
                say(&format!("memories compared: {stop:?}"));
                measured.stops.push(stop);
            }
        }
        course.end()?;
    }
    if options.wants(Part::Virtio) {
        let mut course = Course::begin(&l1, &both, Kind::Virtio, options.rate)?;
        for _ in 0..options.moves() {
            let moved = course.moves().context("virtio-net")?;
            say(&format!("virtio-net has moved: {:.0} ms", moved.gap_ms));
            measured.virtio.push(moved);
        }
        course.end()?;
    }
    if options.wants(Part::Cost) {
        let seconds = if options.quick { 60 } else { 900 };
        let runtime = cost::runtime(&l1, &both[0], Duration::from_secs(seconds));
        say(&format!("while nothing moves: {runtime:?}"));
        measured.runtime = Some(runtime.map_err(|error| format!("{error:#}")));
    }
    if options.wants(Part::Failover) {
        for kind in [Kind::FailoverVf, Kind::FailoverEmulated] {
            let tried = failover(&l1, &both, kind, options, say);
            say(&format!(
                "{kind:?}: {}",
                tried.as_ref().map_or_else(Clone::clone, |moves| format!("{} moves", moves.len()))
            ));
            measured.failover.push((kind, tried));
        }
    }
    Ok(())
}

/// The pair may not be to be had: what was tried and how it ended is a result.
fn failover(
    l1: &L1,
    both: &[place::Side<'_>; 2],
    kind: Kind,
    options: &Options,
    say: &dyn Fn(&str),
) -> Result<Vec<moves::Moved>, String> {
    let tried = || -> Result<Vec<moves::Moved>> {
        let mut course = Course::begin(l1, both, kind, options.rate)?;
        let mut all = Vec::new();
        for _ in 0..options.moves() {
            let moved = course.moves()?;
            say(&format!(
                "{kind:?} has moved: {:.0} ms, {:?} ms while it was unplugged",
                moved.gap_ms, moved.unplug_gap_ms
            ));
            all.push(moved);
        }
        course.end()?;
        Ok(all)
    };
    tried().map_err(|error| format!("{error:#}"))
}
