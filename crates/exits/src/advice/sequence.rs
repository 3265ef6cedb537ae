//! Device accesses that were seen one after another.

use std::collections::BTreeMap;

use super::{Certainty, Finding, PERCENT, RATE, about, enough};
use crate::event::Detail;
use crate::reason::Kind;
use crate::report::{Report, RunRow, RunStart};

const ID: &str = "sequence-";
/// So many findings of this sort.
const FINDINGS: usize = 10;

fn exits(run: &RunRow) -> f64 {
    run.rate * run.accesses.len() as f64
}

fn spared(run: &RunRow) -> f64 {
    exits(run) - run.rate
}

/// How many of a run's accesses the VMM answers: the interposer sees no others.
fn answered(run: &RunRow) -> f64 {
    (run.user as f64 / run.times.max(1) as f64).min(run.accesses.len() as f64)
}

/// What one exit in place of those that the VMM answers spares.
fn clustered(run: &RunRow) -> f64 {
    (answered(run) - 1.0).max(0.0) * run.rate
}

/// `out 0x1f2, in 0x1f7, write 0xfebf0010`.
fn words(run: &RunRow) -> String {
    let word = |access: &Detail| match access {
        Detail::Port { port, write, .. } => format!("{} {port:#x}", if *write { "out" } else { "in" }),
        Detail::Memory { address, write, .. } => {
            format!("{} {address:#x}", if *write { "write" } else { "read" })
        }
        _ => "?".into(),
    };
    let mut words: Vec<String> = run.accesses.iter().map(word).collect();
    if run.longer {
        words.push("and more".into());
    }
    words.join(", ")
}

/// How many exits a second another report has in runs that begin there.
pub(super) fn rate(start: &RunStart, report: &Report) -> f64 {
    // A sum of nothing is minus zero.
    report.runs.iter().filter(|run| run.start() == *start).map(exits).sum::<f64>() + 0.0
}

fn remedy(clusters: bool, report: &Report) -> String {
    if clusters {
        format!(
            "start the VM by `ioplane run -- COMMAND`: such a run then takes one exit, and guest and VMM stay as they are (`ioplane exits cluster --vm pid:{}` \
             says what it saves); or a paravirtual device instead of this one",
            report.pid
        )
    } else {
        "a paravirtual device instead of this one. KVM answers most of these accesses itself, so `ioplane run` does not save them".into()
    }
}

/// One finding for each place where runs begin; `others` may be about the same exits.
pub(super) fn all(report: &Report, others: &[Finding]) -> Vec<Finding> {
    let mut starts: BTreeMap<RunStart, Vec<&RunRow>> = BTreeMap::new();
    for run in &report.runs {
        starts.entry(run.start()).or_default().push(run);
    }
    let all = report.exits as f64 / report.seconds.max(1e-9);
    let finding = |(start, runs): (RunStart, Vec<&RunRow>)| {
        let all_spared: f64 = runs.iter().map(|run| spared(run)).sum();
        let by_cluster: f64 = runs.iter().map(|run| clustered(run)).sum();
        // Most are the VMM's: then that is the gain. Of the others only another device gets rid.
        let clusters = by_cluster * 2.0 >= all_spared;
        let gain = if clusters { by_cluster } else { all_spared };
        let percent = runs.iter().map(|run| exits(run)).sum::<f64>() * 100.0 / all.max(1e-9);
        let most = runs.iter().max_by(|a, b| spared(a).total_cmp(&spared(b)))?;
        let seen: u64 = runs.iter().map(|run| run.times).sum();
        if gain < RATE || percent < PERCENT || !enough(report, seen as f64) {
            return None;
        }
        let kind =
            |access: &Detail| if matches!(access, Detail::Port { .. }) { Kind::Port } else { Kind::Memory };
        let about = about(runs.iter().flat_map(|run| &run.accesses).map(|access| (kind(access), *access)));
        let length = if most.longer {
            format!("{} or more", most.accesses.len())
        } else {
            most.accesses.len().to_string()
        };
        let mut evidence = format!("{}: {:.0} times a second", words(most), most.rate);
        if runs.len() > 1 {
            evidence += &format!(", and {} other runs from there", runs.len() - 1);
        }
        evidence += &format!("; {percent:.1} % of all exits are in such runs");
        let same = others.iter().filter(|other| other.about.iter().any(|exit| about.contains(exit)));
        let same: Vec<&str> = same.map(|other| other.id.as_str()).collect();
        if !same.is_empty() {
            evidence += &format!("; exits of {} too", same.join(", "));
        }
        Some(Finding {
            id: format!("{ID}{start}"),
            title: format!("{start} begins {length} device accesses in a row"),
            about,
            evidence,
            gain,
            remedy: remedy(clusters, report),
            certainty: if clusters { Certainty::Fair } else { Certainty::Low },
            action: None,
            sequence: Some(start),
        })
    };
    let mut found: Vec<Finding> = starts.into_iter().filter_map(finding).collect();
    found.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    found.truncate(FINDINGS);
    found
}
