//! What a move of a virtual function takes and keeps, counted between models of the silicon: `count_moves MOVES`, at least so many of each card.
//!
//! ```text
//! cargo run --release -p ioplane-moving --example count_moves -- 200
//! ```
//! The driver, the wire and the rules are those of the test `moving`: it works all the time, and is moved before every 31st of its accesses and
//! ticks, in each run before others: in one half of the runs with resets, changes of the MTU and of rings, in the other under traffic alone, which is
//! where pages that are marked are compared with pages that the device wrote. It prints one line of JSON. Counts are exact, and the same each time.
#![allow(dead_code, unused_imports, unused_macros, reason = "the test's modules have more than this needs")]

#[path = "../tests/moving/card.rs"]
mod card;
#[path = "../tests/moving/driver.rs"]
mod driver;
#[path = "../tests/moving/hardware.rs"]
mod hardware;
#[path = "../tests/moving/world.rs"]
mod world;

use std::collections::BTreeSet;

use card::{Card, Igbvf, Ixgbevf};
use driver::Driver;
use ioplane_moving::MOST;
use world::{Plan, World};

/// Points between two moves.
const EVERY: u64 = 31;
/// Of the traffic of a run; in each a frame or two are sent.
const TURNS: u32 = 150;

/// Of all moves of a card.
#[derive(Default)]
struct Counts {
    moves: u64,
    /// Frames that were taken in or sent.
    frames: u64,
    /// The most of any move.
    rest_accesses: u64,
    replay_accesses: u64,
    messages: u64,
    /// Frames of the physical function that a head was moved by.
    dummies: u64,
    state_bytes: usize,
    /// Frames that the function had accepted, or the guest had given to it, and that did not arrive; and those that did so more than once.
    missed_frames: u64,
    duplicated_frames: u64,
    pages_missed: u64,
    pages_marked: u64,
    pages_written: u64,
}

/// How many of `due` are not among `came`, and how many of `came` are there once more.
fn compared(due: impl IntoIterator<Item = u64>, came: &[u64]) -> (u64, u64) {
    let once: BTreeSet<u64> = came.iter().copied().collect();
    let missed = due.into_iter().filter(|number| !once.contains(number)).count();
    (missed as u64, (came.len() - once.len()) as u64)
}

/// What the driver does in a run.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// Traffic, resets, another MTU, other rings.
    All,
    /// Traffic.
    Load,
}

/// One run, moved before these points.
fn run<C: Card>(work: Work, points: impl Iterator<Item = u64>, marking: bool, counts: &mut Counts) {
    let mut driver = Driver::<C>::new(World::new(Plan { marking, ..Plan::at(points) }));
    match work {
        Work::All => driver.work(),
        Work::Load => {
            driver.traffic(TURNS);
            driver.drain();
        }
    }
    let received = compared(driver.world.accepted.iter().copied(), &driver.received);
    let sent = compared(0..driver.sent, &driver.world.sent);
    // All rules of the silicon, the order of frames, and the counters too.
    let world = driver.finish();
    counts.moves += world.moves;
    counts.frames += world.accepted.len() as u64 + world.sent.len() as u64;
    counts.rest_accesses = counts.rest_accesses.max(world.accesses.0);
    counts.replay_accesses = counts.replay_accesses.max(world.accesses.1);
    counts.messages = counts.messages.max(world.said.0);
    counts.dummies = counts.dummies.max(world.said.1);
    counts.state_bytes = counts.state_bytes.max(world.largest_state);
    counts.missed_frames += received.0 + sent.0;
    counts.duplicated_frames += received.1 + sent.1;
    counts.pages_missed += world.missed;
    counts.pages_marked += world.marked.0;
    counts.pages_written += world.marked.1;
}

/// At least so many moves.
fn count<C: Card>(work: Work, moves: u64, marking: bool) -> Counts {
    let mut counts = Counts::default();
    // Those of one run are not those of another until all have been used.
    for first in (0..EVERY).cycle() {
        let points = (1..3000).filter(|point| point % EVERY == first);
        run::<C>(work, points, marking, &mut counts);
        if counts.moves >= moves {
            return counts;
        }
    }
    counts
}

fn card<C: Card>(moves: u64) -> String {
    let half = moves.div_ceil(2);
    let (all, load) = (count::<C>(Work::All, half, true), count::<C>(Work::Load, half, true));
    let without = count::<C>(Work::Load, half.min(200), false);
    let (rest, replay) =
        (all.rest_accesses.max(load.rest_accesses), all.replay_accesses.max(load.replay_accesses));
    let state = all.state_bytes.max(load.state_bytes);
    assert!(state <= MOST && without.pages_missed > 0, "the comparison of memories can fail");
    let ratio = |counts: &Counts| format!("{:.3}", counts.pages_marked as f64 / counts.pages_written as f64);
    let fields = [
        ("moves", all.moves + load.moves),
        ("frames", all.frames + load.frames),
        ("stop_accesses", rest + replay),
        ("rest_accesses", rest),
        ("replay_accesses", replay),
        ("stop_messages", all.messages.max(load.messages)),
        ("stop_frames", all.dummies.max(load.dummies)),
        ("state_bytes", state as u64),
        ("missed_frames", all.missed_frames + load.missed_frames),
        ("duplicated_frames", all.duplicated_frames + load.duplicated_frames),
        ("pages_missed", all.pages_missed + load.pages_missed),
        ("pages_marked", load.pages_marked),
        ("pages_written", load.pages_written),
    ];
    let mut text: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    text.push(format!("\"pages_marked_ratio\":{}", ratio(&load)));
    text.push(format!("\"pages_marked_ratio_with_resets\":{}", ratio(&all)));
    let Counts { moves, pages_missed, .. } = without;
    text.push(format!("\"without_marking\":{{\"moves\":{moves},\"pages_missed\":{pages_missed}}}"));
    format!("{{{}}}", text.join(","))
}

fn main() {
    let moves = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(200);
    println!("{{\"vf82576\":{},\"vf82599\":{}}}", card::<Igbvf>(moves), card::<Ixgbevf>(moves));
}
