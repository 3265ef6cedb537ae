//! The paper's figure 7: a guest that ticks by the PIT at 1000, 250 and 100 per second, idle and computing, clamped to 100 and not.

use super::MINUTE;
use anyhow::{Context, Result};
use ioplane_e2e::preload::library;
use ioplane_e2e::{L1, daemon::binary};
use serde::Serialize;
use serde_json::Value;

const RATES: [u32; 3] = [1000, 250, 100];
const CLAMP: u32 = 100;
const SECONDS: u32 = 4;
/// Until the guest ticks, and until the clamp has seen the timer unchanged for as long as it wants to and has set it.
const AFTER: [u32; 2] = [2, 13];

/// A guest for some seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What the guest has set.
    pub hz: u32,
    /// `idle` or `busy`.
    pub load: &'static str,
    pub clamp: Option<u32>,
    pub ticks_per_s: f64,
    pub exits_per_s: f64,
    /// Turns of its loop, if it is busy.
    pub work_per_s: f64,
}

pub fn rows(l1: &L1, say: &dyn Fn(&str)) -> Result<Vec<Row>> {
    let own = std::env::current_exe()?;
    let guest = own.parent().context("a folder")?.join("examples/tiny-guest").display().to_string();
    let mut rows = Vec::new();
    for hz in RATES {
        for load in ["idle", "busy"] {
            for clamp in [None, Some(CLAMP)].into_iter().filter(|clamp| clamp.is_none_or(|clamp| clamp < hz))
            {
                let before = match clamp {
                    None => String::new(),
                    Some(clamp) => format!(
                        "IOPLANE_EXITS_CLUSTER=on {} run --library {} --clamp {clamp} --",
                        binary()?.display(),
                        library()?.display()
                    ),
                };
                let after = AFTER[usize::from(clamp.is_some())];
                let said = l1.run(
                    &format!("env {before} {guest} tick {hz} {load} {after} {SECONDS} 2>/dev/null"),
                    MINUTE,
                )?;
                let said: Value = serde_json::from_str(&said).with_context(|| said)?;
                let each = |key: &str| -> Result<f64> {
                    let count = said[key].as_f64().with_context(|| format!("{key}: {said}"))?;
                    Ok(count / said["seconds"].as_f64().context("seconds")?)
                };
                rows.push(Row {
                    hz,
                    load,
                    clamp,
                    ticks_per_s: each("ticks")?,
                    exits_per_s: each("exits")?,
                    work_per_s: each("work")?,
                });
            }
        }
        say(&format!("{hz} ticks per second"));
    }
    Ok(rows)
}

pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "\nA guest of tiny-guest in L1 that ticks by the PIT:\n\n\
         | HZ | load | clamped to | ticks/s | exits/s | turns of its loop per s |\n|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let clamp = row.clamp.map_or("not".into(), |clamp| clamp.to_string());
        text += &format!(
            "| {} | {} | {clamp} | {:.0} | {:.0} | {:.0} |\n",
            row.hz, row.load, row.ticks_per_s, row.exits_per_s, row.work_per_s
        );
    }
    text
}
