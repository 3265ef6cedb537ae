//! One pair of runs of two builds: each load for a moment, one build after the other, without the peer.

use std::time::Duration;

use anyhow::Result;
use ioplane_testkit::driver::DiskOp;
use serde_json::Value;

use super::competing::{self, Competition};
use super::ioplane::Ioplane;
use super::load::{Load, Outcome, Scatter, Waiting};
use super::report::{Key, Report};
use super::session::Session;
use super::{DEPTHS, FOREIGN, Folders, Options, Pace};
use crate::baseline::{Pair, Side};
use crate::daemon::Configuration;
use crate::mode::Mode;

/// Short, so that a pair is done in well under a minute: the pairs take the place of rounds.
const PACE: Pace = Pace {
    rounds: 1,
    repeats: 10,
    irq_rounds: 1,
    warm: Duration::from_millis(30),
    time: Duration::from_millis(100),
    memory: 64 << 20,
    file: 32 << 20,
};

/// Runs the pair: each mode on memory and on a file, and guests that compete; every load for which `pair` asks.
pub fn pair(options: &Options, pair: &Pair<'_>) -> Result<[Value; 2]> {
    let folders = Folders::new(options.folder.as_deref())?;
    let mut reports = [Report::default(), Report::default()];
    let wanted = |keys: &mut dyn Iterator<Item = Key>, name: &str| -> Vec<Key> {
        let is_wanted =
            |key: &Key| key.judged(name).iter().any(|figure| pair.wants(figure) && options.wants(figure));
        keys.filter(is_wanted).collect()
    };
    for on_file in [false, true] {
        for mode in Mode::ALL {
            let wanted = wanted(&mut keys(on_file), mode.contender());
            if !wanted.is_empty() {
                one_mode(pair, &folders, on_file, mode, &wanted, &mut reports)?;
            }
        }
    }
    let wanted = wanted(&mut competing_keys(), competing::NAME);
    if !wanted.is_empty() {
        competing(pair, &folders, &wanted, &mut reports)?;
    }
    Ok(reports.map(|report| report.figures().into()))
}

/// Both sides in their order; only this build if the other one does not start with `configuration`. Its figures are then named as those of one side.
fn sides(pair: &Pair<'_>, folders: &Folders, name: &str, configuration: &Configuration) -> Result<Vec<Side>> {
    let folder = folders.run(&format!("known-{name}"));
    if configuration.is_known_to(pair.binary(Side::Before), &folder, pair.place)? {
        return Ok(pair.order.to_vec());
    }
    eprintln!("the baseline does not start with the configuration for '{name}'");
    Ok(vec![Side::After])
}

/// The loads of one disk.
fn one_mode(
    pair: &Pair<'_>,
    folders: &Folders,
    on_file: bool,
    mode: Mode,
    wanted: &[Key],
    reports: &mut [Report; 2],
) -> Result<()> {
    let name = mode.contender();
    let sides = if Mode::OF_EACH_BUILD.contains(&mode) {
        pair.order.to_vec()
    } else {
        sides(pair, folders, &format!("{name}-{on_file}"), &Configuration::new(mode))?
    };
    let mut sessions = Vec::new();
    for side in sides {
        pair.go_on()?;
        let backend = Ioplane { mode, binary: Some(pair.binary(side).to_owned()) };
        let what = format!("{}-{name}-{on_file}", side.name());
        let backing = folders.backing(&what, on_file, PACE.bytes(on_file))?;
        sessions.push((side, Session::open(&backend, &backing, &folders.run(&what), pair.place, true)?));
    }
    for &key in wanted {
        let op = if key.write { DiskOp::Write } else { DiskOp::Read };
        let Key { depth, waiting, .. } = key;
        let load = Load { op, depth, blocks: 0, waiting, warm: PACE.warm, time: PACE.time };
        for (side, session) in &mut sessions {
            // Both go to the same places.
            undisturbed(pair, &mut reports[*side as usize], name, key, || {
                session.round(load, &mut Scatter::new(1))
            })?;
        }
    }
    for (_, session) in sessions {
        session.close()?;
    }
    Ok(())
}

/// The loads of guests that compete.
fn competing(pair: &Pair<'_>, folders: &Folders, wanted: &[Key], reports: &mut [Report; 2]) -> Result<()> {
    let name = competing::NAME;
    let known = folders.run(&format!("known-{name}"));
    let mut sessions = Vec::new();
    for side in sides(pair, folders, name, &competing::configuration(&known))? {
        pair.go_on()?;
        let folder = folders.run(&format!("{}-{name}", side.name()));
        sessions.push((side, Competition::open(pair.binary(side), &folder, pair.place)?));
    }
    for &key in wanted {
        for (side, session) in &mut sessions {
            undisturbed(pair, &mut reports[*side as usize], name, key, || {
                session.round(key.depth, PACE.warm, PACE.time)
            })?;
        }
    }
    for (_, session) in sessions {
        session.close()?;
    }
    Ok(())
}

/// Adds a round to `report`, after as many disturbed ones as the pace allows.
fn undisturbed(
    pair: &Pair<'_>,
    report: &mut Report,
    name: &'static str,
    key: Key,
    mut round: impl FnMut() -> Result<Outcome>,
) -> Result<()> {
    loop {
        pair.go_on()?;
        let outcome = round()?;
        if outcome.foreign <= FOREIGN || report.disturbed() > PACE.repeats {
            report.outcome(name, key, outcome);
            return Ok(());
        }
    }
}

/// Reads of a polling driver, on memory.
fn competing_keys() -> impl Iterator<Item = Key> {
    keys(false).filter(|key| !key.write && key.waiting == Waiting::Polling)
}

fn keys(on_file: bool) -> impl Iterator<Item = Key> {
    [false, true].into_iter().flat_map(move |write| {
        DEPTHS.into_iter().flat_map(move |depth| {
            [Waiting::Polling, Waiting::Interrupts].map(|waiting| Key { on_file, write, depth, waiting })
        })
    })
}

#[cfg(test)]
mod tests {
    use ioplane_figures::compare::direction;

    use super::*;

    #[test]
    fn what_is_judged_has_a_direction() {
        let figures: Vec<String> =
            keys(true).chain(keys(false)).flat_map(|key| key.judged("notified")).collect();
        assert_eq!(figures.len(), 96);
        assert!(figures.iter().all(|figure| direction(figure).is_some()));
        assert!(figures.contains(&"file_depth32.notified_irq_write_cpu_us_per_request".into()));
    }
    #[test]
    fn guests_that_compete_read_at_each_depth() {
        let figures: Vec<String> =
            competing_keys().map(|key| key.judged(competing::NAME)[0].clone()).collect();
        assert_eq!(figures, ["depth1.scheduled_iops", "depth32.scheduled_iops", "depth128.scheduled_iops"]);
    }
}
