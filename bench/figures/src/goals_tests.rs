use std::path::PathBuf;

use serde_json::json;

use super::Bound::{AtLeast, AtMost};
use super::table::BASELINE;
use super::*;

/// Goals that are newer than the recorded runs of their benchmarks, or in a part of them that is in no record.
const NOT_RECORDED_YET: [&str; 8] = [
    "elvis-awake.adaptive_latency_vs_best_min",
    "remote.per_cpu_vs_qemu_nbd",
    "migrate.runtime_cost_percent",
    "migrate.mapped_cost_percent",
    "migrate.cooperating_cost_percent",
    "migrate.runtime_after_move_cost_percent",
    "migrate.mapped_after_move_cost_percent",
    "migrate.cooperating_after_move_cost_percent",
];

/// Goals without a floor, and why: [`BASELINE`], what is unresolved in its record, and times of moves on a translated machine.
const NO_FLOOR: [&str; 15] = [
    "depth1.scheduled_iops.ratio",
    "depth32.scheduled_iops.ratio",
    "depth128.scheduled_iops.ratio",
    "idle_vm_cost_percent",
    "timer_clamp_gain_percent",
    "scheduler_none_percent",
    "napi_percent",
    "vf82576.downtime_less_device_vs_virtio",
    "vf82576.downtime_vs_failover",
    "runtime_cost_percent",
    "mapped_cost_percent",
    "cooperating_cost_percent",
    "runtime_after_move_cost_percent",
    "mapped_after_move_cost_percent",
    "cooperating_after_move_cost_percent",
];

fn run(ratio: f64) -> Value {
    json!({ "name": "network", "commit": "c", "machine": {}, "figures": { "split64": { "frames_vs_testpmd": ratio } } })
}

fn verdict(ratio: f64) -> Verdict {
    let verdicts = judge(&run(ratio)).unwrap();
    *verdicts.iter().find(|verdict| verdict.goal.figure == "split64.frames_vs_testpmd").unwrap()
}

#[test]
fn a_figure_is_judged_by_goal_and_floor() {
    assert!(verdict(1.2).reached() && verdict(1.2).kept());
    assert!(!verdict(0.95).reached() && verdict(0.95).kept());
    assert!(!verdict(0.5).reached() && !verdict(0.5).kept());
}

#[test]
fn a_missing_figure_keeps_no_floor() {
    let verdicts = judge(&run(1.0)).unwrap();
    assert!(verdicts.iter().any(|verdict| verdict.measured == Measured::Missing && !verdict.kept()));
    assert!(judge(&json!({ "figures": {} })).is_err());
}

#[test]
fn what_is_unresolved_has_not_reached_its_goal() {
    let run = json!({ "name": "exits-clusters", "commit": "c", "machine": {}, "figures": { "idle_vm_cost_percent": UNRESOLVED } });
    let verdicts = judge(&run).unwrap();
    let verdict = verdicts.iter().find(|verdict| verdict.measured == Measured::Unresolved).unwrap();
    assert!(!verdict.reached() && verdict.kept());
    assert!(
        verdict.to_string().starts_with("not known: exits-clusters.idle_vm_cost_percent = unresolved"),
        "{verdict}"
    );
}

#[test]
fn a_floor_is_no_stricter_than_its_goal() {
    for goal in GOALS {
        match (goal.goal, goal.floor) {
            (_, None) => {}
            (AtLeast(goal), Some(AtLeast(floor))) => assert!(floor <= goal),
            (AtMost(goal), Some(AtMost(floor))) => assert!(floor >= goal),
            _ => panic!("{}: goal and floor point in different directions", goal.figure),
        }
    }
}

#[test]
fn a_nightly_run_judges_each_goal() {
    let without: Vec<&str> =
        GOALS.iter().filter(|goal| goal.floor.is_none()).map(|goal| goal.figure).collect();
    assert_eq!(without, NO_FLOOR);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../script/nightly.sh");
    let script = std::fs::read_to_string(script).unwrap();
    let (_, stages) = script.split_once("\nnightly_stages=(").unwrap();
    let stages: Vec<&str> = stages.split(')').next().unwrap().split_whitespace().collect();
    for goal in GOALS.iter().filter(|goal| goal.bench != BASELINE) {
        let line = script.lines().find(|line| {
            let judges = |part: &str| part.split([' ', ';']).next() == Some(goal.bench);
            line.starts_with("nightly_") && line.split("judged ").skip(1).any(judges)
        });
        let line = line.unwrap_or_else(|| panic!("no stage of script/nightly.sh judges {}", goal.bench));
        let stage = line.strip_prefix("nightly_").and_then(|line| line.split("()").next()).unwrap();
        assert!(stages.contains(&stage), "{stage} is not among the stages");
    }
}

#[test]
fn a_part_may_have_a_run_of_its_own() {
    let whole = run(1.0);
    let part = json!({ "name": "network", "figures": { "split64_8pairs": { "frames_vs_testpmd": 0.5 } } });
    let goal = |figure: &str| GOALS.iter().find(|goal| goal.figure == figure).unwrap();
    let reports = [whole, part];
    assert_eq!(found(goal("split64.frames_vs_testpmd"), &reports), Measured::Figure(1.0));
    assert_eq!(found(goal("split64_8pairs.frames_vs_testpmd"), &reports), Measured::Figure(0.5));
    assert_eq!(found(goal("split64_8pairs.frames_vs_testpmd"), &reports[..1]), Measured::Missing);
}

#[test]
fn the_page_is_what_the_table_and_the_runs_say() {
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/measurements");
    let reports = recorded(&docs.join("results")).unwrap();
    let has_run = |goal: &&Goal| reports.iter().any(|report| report["name"] == goal.bench);
    let missing: Vec<String> = GOALS
        .iter()
        .filter(has_run)
        .filter(|goal| found(goal, &reports) == Measured::Missing)
        .map(|goal| format!("{}.{}", goal.bench, goal.figure))
        .collect();
    assert_eq!(missing, NOT_RECORDED_YET, "a key must not change; a goal that has a run leaves the list");
    let page = page(&reports);
    let stands = std::fs::read_to_string(docs.join("goals.md")).unwrap();
    assert!(page == stands, "docs/measurements/goals.md is not what `script/bench goals --write` makes");
}
