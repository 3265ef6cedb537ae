//! The policy of a pool on readings that a daemon took: `traces/`, written by `IOPLANE_TEST_POOL_TRACE` while `crates/ioplane/tests/pool_trace.rs` ran. The same
//! readings give the same decisions again, and each plan keeps the rules.

mod rules;

use std::collections::BTreeSet;

use ioplane_scheduler::{
    CoreLoad, CoreUse, CpuTopology, GroupId, PoolPlanner, PoolReadings, PoolSettings, QueueKey, QueueLoad,
};
use rules::Rules;
use serde_json::Value;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn small(value: &Value) -> u32 {
    u32::try_from(number(value)).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

fn maybe(value: &Value) -> Option<u32> {
    (!value.is_null()).then(|| small(value))
}

fn flag(value: &Value) -> bool {
    value.as_bool().unwrap_or_else(|| panic!("{value} is neither true nor false"))
}

fn key(device: &Value, queue: &Value) -> QueueKey {
    QueueKey { device: small(device), queue: small(queue) as u16 }
}

fn core(value: &Value) -> CoreLoad {
    let [core, cpu, used_for, kept, busy] = list(value) else { panic!("{value} is no core") };
    let used_for = match used_for.as_str() {
        Some("open") => CoreUse::Open,
        Some("draining") => CoreUse::Draining,
        Some("ending") => CoreUse::Ending,
        _ => CoreUse::Reserved(GroupId(small(used_for))),
    };
    CoreLoad { core: small(core), cpu: maybe(cpu), used_for, kept: flag(kept), busy_permille: small(busy) }
}

fn queue(value: &Value) -> QueueLoad {
    let [device, queue, group, core, load, pinned, node, moving] = list(value) else {
        panic!("{value} is no queue")
    };
    QueueLoad {
        queue: key(device, queue),
        group: GroupId(small(group)),
        core: small(core),
        load_permille: small(load),
        pinned: maybe(pinned),
        node: maybe(node),
        moving: flag(moving),
    }
}

fn settings(value: &Value) -> PoolSettings {
    PoolSettings {
        min_cores: small(&value["min"]),
        max_cores: small(&value["max"]),
        cpus: list(&value["cpus"]).iter().map(small).collect::<BTreeSet<u32>>(),
        balance: flag(&value["balance"]),
        ..PoolSettings::default()
    }
}

/// Replays a trace. All that was decided in it, with the times.
fn replay(trace: &str) -> Vec<(u64, String)> {
    let (mut planner, mut rules) = (PoolPlanner::new(PoolSettings::default()), Rules::default());
    let (mut now, mut asked) = (PoolReadings::default(), PoolSettings::default());
    // None of its cores is pinned to a processor.
    let topology = CpuTopology::default();
    let mut decided = Vec::new();
    for (number_of_line, line) in (1..).zip(trace.lines()) {
        let line: Value = serde_json::from_str(line).unwrap();
        if let Some(given) = line.get("settings") {
            asked = settings(given);
            planner.set(asked.clone());
            continue;
        }
        now.now_ns = number(&line["t"]);
        if let Some(cores) = line.get("cores") {
            now.cores = list(cores).iter().map(core).collect();
        }
        if let Some(queues) = line.get("queues") {
            now.queues = list(queues).iter().map(queue).collect();
        }
        let not_quiet = line.get("not_quiet").map_or(&[][..], |queues| list(queues));
        now.not_quiet = not_quiet.iter().map(|queue| key(&queue[0], &queue[1])).collect();
        let plan = planner.plan(&now, &topology);
        rules.check(&asked, &now, &plan);
        let words: Vec<String> = plan.iter().map(ToString::to_string).collect();
        let recorded = line.get("plan").map_or(&[][..], |plan| list(plan));
        let recorded: Vec<&str> = recorded.iter().map(|one| one.as_str().unwrap()).collect();
        assert_eq!(words, recorded, "line {number_of_line}: another decision than the daemon's");
        decided.extend(words.into_iter().map(|one| (now.now_ns, one)));
    }
    decided
}

/// How many of the decisions have all of these words in them.
fn count(decided: &[(u64, String)], words: &[&str]) -> usize {
    decided.iter().filter(|(_, one)| words.iter().all(|word| one.contains(word))).count()
}

#[test]
fn a_recorded_load_is_decided_about_as_the_daemon_did() {
    let decided = replay(include_str!("traces/pool.jsonl"));
    let all = || decided.iter().map(|(at, one)| format!("{} ms: {one}", at / 1_000_000)).collect::<Vec<_>>();
    // What it was recorded for is in it: a load that rises, a queue that takes a core, a disk that is silent while its core is drained, a load that falls.
    for (words, least) in [
        (&["one core more: 1 core carries"][..], 1),
        (&[" moves from core ", " busy against "], 2),
        (&["it takes a whole core by itself"], 1),
        (&["its requests in flight do not end"], 1),
        (&[" moves from core ", "its core is being drained"], 2),
        (&[" ends: "], 1),
    ] {
        assert!(count(&decided, words) >= least, "{words:?}: {:#?}", all());
    }
    // The load went from queue to queue nine times. A queue may be moved for balance at 0, 0.25, 0.75, 1.75, 3.75 and 7.75 s.
    for device in 0..3 {
        let queue = format!("queue 0 of device {device} moves");
        assert!(count(&decided, &[&queue, " busy against "]) <= 6, "{queue}: {:#?}", all());
    }
}

#[test]
fn a_trace_whose_decisions_are_others_is_refused() {
    let trace = include_str!("traces/pool.jsonl");
    let other = trace.replacen("from core 0 to core 1", "from core 0 to core 2", 1);
    assert_ne!(trace, other);
    let refused = std::panic::catch_unwind(|| replay(&other)).unwrap_err();
    assert!(refused.downcast_ref::<String>().unwrap().contains("another decision than the daemon's"));
}
