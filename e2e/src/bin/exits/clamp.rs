//! What a guest that ticks by the PIT gains by a slower timer: the same work clamped and not, in turn.

use super::pairs::alternate;
use anyhow::{Context, Result, ensure};
use ioplane_e2e::clamped::{MACHINE, TICKS_BY_PIT, clamp, clamp_on};
use ioplane_e2e::{L1, Version};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 2.0;
/// Ticks per second: the guest's kernel's, and what they become.
const HZ: [u32; 2] = [250, 100];
const WORK: &str = "perl -e '$x = 0; for (1..1000000) { $x = sqrt($x + 2) }'";

/// How much more work is done in the same processor time.
#[derive(Clone, Debug, Serialize)]
pub struct Gain {
    pub timer_clamp_gain_percent: Value,
    pub timer_clamp_gain_interval_percent: Option<[f64; 2]>,
    pub timer_clamp_gain_pairs: usize,
    pub timer_clamp_hz: [u32; 2],
    #[serde(skip)]
    pub line: String,
}

/// Runs pairs until the interval is narrow, or for `limit`. `l1` has no other guest.
pub fn gain(l1: &L1, limit: Duration, say: &dyn Fn(&str)) -> Result<Gain> {
    let before = l1.interposed()?;
    let guest = l1.debian_after(&before, Version::Host, "ticks", MACHINE, TICKS_BY_PIT)?;
    let hz = clamp(l1, "--vm ticks")?["guest_hz"].as_f64().unwrap_or(0.0);
    ensure!((hz - f64::from(HZ[0])).abs() < 1.0, "the PIT ticks at {hz} per second");
    let mut clamped = None;
    // The first way is the guest's own rate: by as much more as that takes, the other gets done more.
    let mut run = |own: bool| -> Result<f64> {
        if clamped != Some(!own) {
            match own {
                true => clamp(l1, "off --vm ticks")?,
                false => clamp_on(l1, "ticks", HZ[1].into(), "kvm-clock")?,
            };
            clamped = Some(!own);
        }
        let begun = l1.processor_time()?;
        guest.run(WORK)?;
        Ok(l1.processor_time()?.saturating_sub(begun).as_secs_f64())
    };
    // The first one reads programs.
    run(true)?;
    let compared = alternate(BOUND, limit, run).context("a guest with and without a slower timer")?;
    let line = format!(
        "\nA guest that computes, its timer clamped from {} to {} ticks per second: processor time of L1 without against with it: more by {}\n",
        HZ[0],
        HZ[1],
        compared.words()
    );
    say(line.trim());
    guest.kill()?;
    Ok(Gain {
        timer_clamp_gain_percent: compared.percent,
        timer_clamp_gain_interval_percent: compared.interval,
        timer_clamp_gain_pairs: compared.pairs,
        timer_clamp_hz: HZ,
        line,
    })
}
