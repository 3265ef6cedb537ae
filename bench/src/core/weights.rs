//! Groups of different weights that always ask: how far from its weight what each gets is.

use std::time::Duration;

use anyhow::Result;
use ioplane_figures::machine::Books;

use super::drive::{Flow, drive};
use super::offered::Offered;
use super::stage::Stage;
use super::{Bench, ROUNDS};
use crate::daemon::Configuration;
use crate::guest::Form;
use crate::measured::Figure;
use ioplane_testkit::driver::{DiskPlan, Shape};

const WEIGHTS: [u32; 3] = [1, 2, 4];
/// Bytes of a request.
const BYTES: u32 = 64 << 10;
const DEPTH: u16 = 64;
/// Rounds in which others took more than this part of a side's processor say nothing: no group asks while the generator does not run.
const DISTURBED: f64 = 0.02;
const FORM: Form = Form {
    ring: 128,
    queues: 1,
    plan: DiskPlan { slots: DEPTH, max_bytes: BYTES, segments: 1, shape: Shape::Indirect },
};

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("groups of weights {WEIGHTS:?}");
    let names = WEIGHTS.map(|weight| format!("weight{weight}"));
    let keys = names.each_ref().map(|name| format!("memory = \"64M\"\ngroup = {name:?}"));
    let configuration =
        WEIGHTS.iter().zip(&names).fold(Configuration::new(bench.mode), |all, (weight, name)| {
            all.group(name, &format!("weight = {weight}"))
        });
    let disks: Vec<_> = names.iter().zip(&keys).map(|(name, keys)| (name.as_str(), keys.as_str())).collect();
    let mut stage = Stage::configured(bench, "weights", configuration, &disks)?;
    for name in &names {
        stage.connect(name, FORM)?;
    }
    let (mut errors, mut disturbed) = (Vec::new(), 0u32);
    for round in 0..3 * ROUNDS {
        if errors.len() == ROUNDS as usize {
            break;
        }
        let (counts, account) = stage.turn(|stage| {
            let mut counts = [0u64; WEIGHTS.len()];
            let pids = stage.pids();
            let flow = |guest| Flow::new(guest, 0, Offered::Backlog(DEPTH), BYTES, u64::from(round) + 1);
            let mut flows: Vec<_> = stage.guests.iter_mut().map(flow).collect();
            let books = Books::open(&pids);
            drive(&mut flows, Duration::from_secs(1), |completion| counts[completion.flow] += 1)?;
            Ok((counts, books.close(&pids)))
        })?;
        if account.disturbance() > DISTURBED {
            disturbed += 1;
        } else {
            errors.push(error_percent(counts));
        }
    }
    let parts = WEIGHTS.map(|weight| weight.to_string()).join(" : ");
    let figure = match errors.len() {
        0 => Figure::missing(
            "in every round others took more than 2 % of the generator's or the core's processor",
        ),
        _ => Figure::median(&errors),
    };
    Ok(vec![("weight_error_percent", figure.beside("weights", parts).beside("rounds_disturbed", disturbed))])
}

/// By how many percent of its own part the group is off that is off most.
fn error_percent(counts: [u64; WEIGHTS.len()]) -> f64 {
    let (all, weights) = (counts.iter().sum::<u64>().max(1) as f64, f64::from(WEIGHTS.iter().sum::<u32>()));
    let off = counts.iter().zip(WEIGHTS).map(|(count, weight)| {
        let due = f64::from(weight) / weights;
        (*count as f64 / all / due - 1.0).abs() * 100.0
    });
    off.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_that_is_off_most_counts() {
        assert!(error_percent([100, 200, 400]) < 1e-9);
        // The lightest has twice its part, the heaviest 3/4 of it.
        assert!((error_percent([200, 200, 300]) - 100.0).abs() < 1e-9);
        assert!((error_percent([0, 0, 0]) - 100.0).abs() < 1e-9, "nothing passed");
    }
}
