//! What the policy is given and what it decides, written down look by look so that it can be replayed: `IOPLANE_TEST_POOL_TRACE` names the file.
//!
//! Each line is a JSON object. `settings` stands where they have changed. A look has `t`, in ns, and, where they are not as in the look before, `cores` and `queues`;
//! `not_quiet` and `plan` where these are not empty. `crates/scheduler/tests/pool_replay.rs` reads them.

use std::fs::File;
use std::io::Write;

use ioplane_scheduler::{CoreUse, Decision, PoolReadings, PoolSettings};
use serde_json::{Map, Value, json};

/// The file, and what stands in it last.
#[derive(Debug)]
pub struct PoolTrace {
    file: File,
    settings: Value,
    cores: Value,
    queues: Value,
}

impl PoolTrace {
    /// A new trace, if a test wants one.
    pub fn open() -> Option<Self> {
        let path = std::env::var_os("IOPLANE_TEST_POOL_TRACE")?;
        let file = File::create(path).ok()?;
        Some(PoolTrace { file, settings: Value::Null, cores: Value::Null, queues: Value::Null })
    }

    /// Writes a look down, in one piece.
    pub fn enter(&mut self, settings: &PoolSettings, readings: &PoolReadings, plan: &[Decision]) {
        let settings = settings_line(settings);
        let mut text = String::new();
        if self.settings != settings {
            text = format!("{}\n", json!({ "settings": &settings }));
            self.settings = settings;
        }
        let mut line = Map::from_iter([("t".to_owned(), readings.now_ns.into())]);
        let cores = readings.cores.iter().map(|core| {
            let used_for = match core.used_for {
                CoreUse::Open => json!("open"),
                CoreUse::Draining => json!("draining"),
                CoreUse::Ending => json!("ending"),
                CoreUse::Reserved(group) => json!(group.0),
            };
            json!([core.core, core.cpu, used_for, core.kept, core.busy_permille])
        });
        let queues = readings.queues.iter().map(|of| {
            let (queue, group) = (of.queue, of.group.0);
            json!([
                queue.device,
                queue.queue,
                group,
                of.core,
                of.load_permille,
                of.pinned,
                of.node,
                of.moving
            ])
        });
        for (key, now, last) in
            [("cores", cores.collect(), &mut self.cores), ("queues", queues.collect(), &mut self.queues)]
        {
            let now: Value = now;
            if *last != now {
                line.insert(key.to_owned(), now.clone());
                *last = now;
            }
        }
        if !readings.not_quiet.is_empty() {
            let queues = readings.not_quiet.iter().map(|queue| json!([queue.device, queue.queue]));
            line.insert("not_quiet".to_owned(), queues.collect());
        }
        if !plan.is_empty() {
            line.insert("plan".to_owned(), plan.iter().map(|one| json!(one.to_string())).collect());
        }
        text += &format!("{}\n", Value::from(line));
        if let Err(error) = self.file.write_all(text.as_bytes()) {
            tracing::error!(%error, "the trace of the pool");
        }
    }
}

fn settings_line(settings: &PoolSettings) -> Value {
    let PoolSettings { min_cores, max_cores, cpus, balance, .. } = settings;
    json!({ "min": min_cores, "max": max_cores, "cpus": cpus, "balance": balance })
}
