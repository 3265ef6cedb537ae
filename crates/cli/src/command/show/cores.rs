//! I/O cores, their pool, and what was decided about both.

use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_api::report::{CoreReport, DecisionReport, DecisionsReport, ObjectiveWord, PoolReport};

use super::or_dash;
use crate::command::table::Table;

/// What is asked of a core, and what came of it: `p99 20 us, at most 30 %: kept`.
fn objective(core: &CoreReport) -> String {
    let asked: Vec<String> = [
        core.p99_us.map(|us| format!("p99 {us} us")),
        core.cpu_percent.map(|percent| format!("at most {percent} %")),
    ]
    .into_iter()
    .flatten()
    .collect();
    let came = match core.objective {
        _ if asked.is_empty() => return "-".to_owned(),
        ObjectiveWord::Unknown => "too few requests to say".to_owned(),
        ObjectiveWord::Kept => "kept".to_owned(),
        ObjectiveWord::LateByCeiling => {
            format!("{:.1} % late, since the ceiling forbids polling", core.missed_percent)
        }
        ObjectiveWord::LateByLoad => format!("{:.1} % late: too much to do", core.missed_percent),
        ObjectiveWord::OverCeiling => format!("work takes {:.1} % more", core.missed_percent),
        ObjectiveWord::Unheeded => "only adaptive cores heed it".to_owned(),
    };
    format!("{}: {came}", asked.join(", "))
}

/// `core list`.
pub fn cores(cores: &[CoreReport]) -> String {
    let mut table = Table::new(&[
        "CORE",
        "CPU",
        "MODE",
        "FOR",
        "QUEUES",
        "AWAKE",
        "BUSY %",
        "SLEEPS",
        "WAKES",
        "SPIN US",
        "YIELD",
        "OBJECTIVE",
    ]);
    for core in cores {
        table.row(vec![
            core.id.to_string(),
            match core.cpu_refused {
                Some(cpu) => format!("{cpu} refused"),
                None => or_dash(core.cpu),
            },
            core.notify.clone(),
            core_use(core),
            core.queues.to_string(),
            core.awake.to_string(),
            format!("{:.1}", core.busy_percent),
            core.sleeps.to_string(),
            core.wakes.to_string(),
            core.spin_us.to_string(),
            core.yield_policy.clone(),
            objective(core),
        ]);
    }
    table.to_string()
}

/// Which queues a core takes.
fn core_use(core: &CoreReport) -> String {
    match &core.reserve {
        _ if core.draining => "none: draining".to_owned(),
        Some(group) => format!("group {group}"),
        None => "any".to_owned(),
    }
}

/// `core pool`.
pub fn pool(pool: &PoolReport) -> String {
    let PoolReport { open, draining, min, max, grown, shrunk, moved, failed, .. } = pool;
    let mut text = format!("cores that take queues: {open}; that are being emptied: {draining}\n");
    if pool.configured {
        let cpus = pool.cpus.as_ref().map_or("not pinned".to_owned(), |cpus| format!("on processors {cpus}"));
        text.push_str(&format!("there are to be {min} to {max}, {cpus}\n"));
    } else {
        text.push_str("cores come and go as you say: the configuration has no [pool]\n");
    }
    text + &format!(
        "cores started: {grown}, ended: {shrunk}; queues moved: {moved}; moves that failed: {failed}\n"
    )
}

/// `core decisions`.
pub fn decisions(report: &DecisionsReport) -> String {
    let mut text = String::new();
    if report.lost > 0 {
        text.push_str(&format!("{} older ones are no longer kept\n", report.lost));
    }
    if report.decisions.is_empty() {
        text.push_str("nothing was decided\n");
    }
    text + &decided(&report.decisions)
}

/// One line for each decision.
pub fn decided(decisions: &[DecisionReport]) -> String {
    let line = |one: &DecisionReport| format!("{:>6}  {:>9.2} s ago  {}\n", one.number, ago(one), one.text);
    decisions.iter().map(line).collect()
}

/// Seconds since the decision.
pub fn ago(one: &DecisionReport) -> f64 {
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    now_ms.saturating_sub(one.at_ms) as f64 / 1000.0
}
