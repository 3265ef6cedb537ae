//! One pair of runs of two builds: each load for a moment, one build after the other, without the peer.

use std::time::Duration;

use anyhow::Result;
use ioplane_testkit::driver::DiskOp;
use serde_json::Value;

use super::ioplane::Ioplane;
use super::load::{Load, Scatter, Waiting};
use super::report::{Key, Report};
use super::session::Session;
use super::{DEPTHS, FOREIGN, Folders, Options, Pace};
use crate::baseline::Pair;
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

/// Runs the pair: on memory and on a file, polled and notified, every load for which `pair` asks.
pub fn pair(options: &Options, pair: &Pair<'_>) -> Result<[Value; 2]> {
    let folders = Folders::new(options.folder.as_deref())?;
    let mut reports = [Report::default(), Report::default()];
    for on_file in [false, true] {
        for mode in Mode::OF_EACH_BUILD {
            let name = mode.contender();
            let wanted: Vec<Key> = keys(on_file)
                .filter(|key| {
                    key.judged(name).iter().any(|figure| pair.wants(figure) && options.wants(figure))
                })
                .collect();
            if wanted.is_empty() {
                continue;
            }
            let mut sessions = Vec::new();
            for side in pair.order {
                pair.go_on()?;
                let backend = Ioplane { mode, binary: Some(pair.binary(side).to_owned()) };
                let what = format!("{}-{name}-{on_file}", side.name());
                let backing = folders.backing(&what, on_file, PACE.bytes(on_file))?;
                sessions
                    .push((side, Session::open(&backend, &backing, &folders.run(&what), pair.place, true)?));
            }
            for key in wanted {
                let op = if key.write { DiskOp::Write } else { DiskOp::Read };
                let Key { depth, waiting, .. } = key;
                let load = Load { op, depth, blocks: 0, waiting, warm: PACE.warm, time: PACE.time };
                for (side, session) in &mut sessions {
                    let report = &mut reports[*side as usize];
                    loop {
                        pair.go_on()?;
                        // Both go to the same places.
                        let outcome = session.round(load, &mut Scatter::new(1))?;
                        if outcome.foreign <= FOREIGN || report.disturbed() > PACE.repeats {
                            report.outcome(session.name, key, outcome);
                            break;
                        }
                    }
                }
            }
            for (_, session) in sessions {
                session.close()?;
            }
        }
    }
    Ok(reports.map(|report| report.figures().into()))
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
}
