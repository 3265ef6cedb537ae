//! A queue that moves to another core while it is busy: for how long nothing completes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ioplane_figures::machine;
use ioplane_figures::report::median;

use super::Bench;
use super::drive::{Flow, drive};
use super::offered::Offered;
use super::stage::{FORM, Stage};
use crate::control::call;
use crate::daemon::Configuration;
use crate::exitless::load::BLOCK;
use crate::gaps::Gaps;
use crate::measured::Figure;

/// Requests in flight.
const DEPTH: u16 = 32;
/// Of quiet before a move, and how long after it a pause still counts as its own.
const QUIET: Duration = Duration::from_millis(10);
const AFTER: Duration = Duration::from_millis(2);

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let moves = bench.pace.moves as usize;
    eprintln!("{moves} moves");
    let configuration = Configuration::new(bench.mode).cores(2);
    let mut stage =
        Stage::configured(bench, "moving", configuration, &[("disk", "memory = \"64M\"\ncore = 0")])?;
    stage.connect("disk", FORM)?;
    // Even windows are quiet, a move begins and ends in each odd one.
    let (window, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut gaps = Gaps::new(moves);
    let answers = stage.turn(|stage| {
        let control = stage.control();
        let back = bench.place.cpus.back;
        std::thread::scope(|scope| -> Result<Vec<f64>> {
            let mover = scope.spawn(|| {
                // It waits for most of the time; the generator never does.
                let moved = machine::pin(back).and_then(|()| move_often(&control, moves, &window));
                over.store(true, Ordering::Release);
                moved
            });
            // In slices, to see that the mover is done; a slice begins without a gap.
            let mut driven = Ok(());
            while driven.is_ok() && !over.load(Ordering::Acquire) {
                let flow = Flow::new(&mut stage.guests[0], 0, Offered::Backlog(DEPTH), BLOCK, 1);
                gaps.pause();
                driven = drive(&mut [flow], Duration::from_secs(1), |completion| {
                    gaps.see(completion, window.load(Ordering::Relaxed));
                });
            }
            let moved = mover.join().map_err(|_| anyhow!("the thread that moves panicked"))?;
            driven.and(moved)
        })
    })?;
    let (with, without) = (gaps.us(true), gaps.us(false));
    let figure = Figure::median(&with)
        .beside("longest_gap_without_a_move_us", median(without))
        .beside("longest_pause_us", with.into_iter().fold(0.0, f64::max))
        .beside("answer_ms", median(answers))
        .beside("depth", DEPTH);
    Ok(vec![("move_pause_us", figure)])
}

/// Moves queue 0 there and back. Returns for how long each call took, ms.
fn move_often(control: &Path, moves: usize, window: &AtomicUsize) -> Result<Vec<f64>> {
    let mut took = Vec::with_capacity(moves);
    for number in 0..moves {
        std::thread::sleep(QUIET);
        window.store(2 * number + 1, Ordering::Relaxed);
        let begin = Instant::now();
        let body = format!("{{\"disk\":\"disk\",\"queue\":0,\"core\":{}}}", (number + 1) % 2);
        call(control, "POST", "/v1/queues/move", &body)?;
        took.push(begin.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(AFTER);
        window.store(2 * number + 2, Ordering::Relaxed);
    }
    Ok(took)
}
