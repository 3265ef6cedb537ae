//! What a move of a virtual function takes and keeps, counted between models of the silicon: `count_moves MOVES`, at least so many of each card.
//!
//! ```text
//! cargo run --release -p ioplane-moving --example count_moves -- 200
//! ```
//! The driver, the wire and the rules are those of the test `moving`: it works all the time, and is moved before every 31st of its accesses and
//! ticks, in each run before others. It prints one line of JSON. Counts are exact, and the same each time.
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

/// Of all moves of a card.
#[derive(Default)]
struct Counts {
    moves: u64,
    /// The most of any move.
    rest_accesses: u64,
    replay_accesses: u64,
    messages: u64,
    frames: u64,
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

/// One run of all that the driver does, moved before these points.
fn run<C: Card>(points: impl Iterator<Item = u64>, marking: bool, counts: &mut Counts) {
    let mut driver = Driver::<C>::new(World::new(Plan { marking, ..Plan::at(points) }));
    driver.work();
    let received = compared(driver.world.accepted.iter().copied(), &driver.received);
    let sent = compared(0..driver.sent, &driver.world.sent);
    // All rules of the silicon, the order of frames, and the counters too.
    let world = driver.finish();
    counts.moves += world.moves;
    counts.rest_accesses = counts.rest_accesses.max(world.accesses.0);
    counts.replay_accesses = counts.replay_accesses.max(world.accesses.1);
    counts.messages = counts.messages.max(world.said.0);
    counts.frames = counts.frames.max(world.said.1);
    counts.state_bytes = counts.state_bytes.max(world.largest_state);
    counts.missed_frames += received.0 + sent.0;
    counts.duplicated_frames += received.1 + sent.1;
    counts.pages_missed += world.missed;
    counts.pages_marked += world.marked.0;
    counts.pages_written += world.marked.1;
}

/// At least so many moves.
fn count<C: Card>(moves: u64, marking: bool) -> Counts {
    let mut counts = Counts::default();
    // A run has some 900 points; those of one run are not those of another until all have been used.
    for first in (0..EVERY).cycle() {
        let points = (1..2000).filter(|point| point % EVERY == first);
        run::<C>(points, marking, &mut counts);
        if counts.moves >= moves {
            return counts;
        }
    }
    counts
}

fn card<C: Card>(moves: u64) -> String {
    let (with, without) = (count::<C>(moves, true), count::<C>(moves.min(50), false));
    let Counts { moves, rest_accesses, replay_accesses, messages, frames, state_bytes, .. } = with;
    let Counts { missed_frames, duplicated_frames, pages_missed, pages_marked, pages_written, .. } = with;
    let ratio = pages_marked as f64 / pages_written as f64;
    assert!(state_bytes <= MOST && without.pages_missed > 0, "the comparison of memories can fail");
    format!(
        "{{\"moves\":{moves},\"stop_accesses\":{},\"rest_accesses\":{rest_accesses},\"replay_accesses\":{replay_accesses},\
         \"stop_messages\":{messages},\"stop_frames\":{frames},\"state_bytes\":{state_bytes},\
         \"missed_frames\":{missed_frames},\"duplicated_frames\":{duplicated_frames},\
         \"pages_missed\":{pages_missed},\"pages_marked\":{pages_marked},\"pages_written\":{pages_written},\"pages_marked_ratio\":{ratio:.3},\
         \"without_marking\":{{\"moves\":{},\"pages_missed\":{}}}}}",
        rest_accesses + replay_accesses,
        without.moves,
        without.pages_missed
    )
}

fn main() {
    let moves = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(200);
    println!("{{\"vf82576\":{},\"vf82599\":{}}}", card::<Igbvf>(moves), card::<Ixgbevf>(moves));
}
