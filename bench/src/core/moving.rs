//! A queue that moves to another core while it is busy: for how long nothing completes.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use ioplane_figures::report::median;

use super::Bench;
use super::stage::{FORM, Stage};
use crate::control::call;
use crate::daemon::Configuration;
use crate::gaps::{DEPTH, Gaps, while_busy};
use crate::measured::Figure;

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let moves = bench.pace.moves as usize;
    eprintln!("{moves} moves");
    let configuration = Configuration::new(bench.mode).cores(2);
    let mut stage =
        Stage::configured(bench, "moving", configuration, &[("disk", "memory = \"64M\"\ncore = 0")])?;
    stage.connect("disk", FORM)?;
    let control = stage.control();
    let (gaps, answers): (Gaps, Vec<f64>) = stage.turn(|stage| {
        while_busy(&mut stage.guests[0], bench.place.cpus.back, moves, |windows| {
            (0..moves).map(|number| windows.during(|| move_to(&control, (number + 1) % 2))).collect()
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

/// Moves queue 0 to a core. Returns for how long the call took, ms.
fn move_to(control: &Path, core: usize) -> Result<f64> {
    let begin = Instant::now();
    let body = format!("{{\"disk\":\"disk\",\"queue\":0,\"core\":{core}}}");
    call(control, "POST", "/v1/queues/move", &body)?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}
