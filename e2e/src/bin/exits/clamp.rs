//! What a guest that ticks by the PIT gains by a slower timer: two of them do the same work at once, one clamped, the other not, in turn.

use super::beside::TwoGuests;
use anyhow::{Context, Result, ensure};
use ioplane_e2e::clamped::{MACHINE, TICKS_BY_PIT, clamp, clamp_on};
use ioplane_e2e::pairs::alternate;
use ioplane_e2e::{L1, Version};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 2.0;
/// Ticks per second: the guest's kernel's, and what they become.
const HZ: [u32; 2] = [250, 100];
const NAMES: [&str; 2] = ["ticks", "ticks-beside"];
const WORK: &str = "perl -e '$x = 0; for (1..2000000) { $x = sqrt($x + 2) }'";

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
    let boot = |name| l1.debian_after(&before, Version::Host, name, MACHINE, TICKS_BY_PIT);
    let guests = TwoGuests::new(l1, [boot(NAMES[0])?, boot(NAMES[1])?])?;
    for name in NAMES {
        let hz = clamp(l1, &format!("--vm {name}"))?["guest_hz"].as_f64().unwrap_or(0.0);
        ensure!((hz - f64::from(HZ[0])).abs() < 1.0, "the PIT ticks at {hz} per second");
    }
    let mut clamped = [false; 2];
    // The first way is the guest's own rate: by as much more as that takes, the other gets done more.
    let mut run = |first_own: bool| -> Result<f64> {
        for ((name, clamped), own) in NAMES.into_iter().zip(&mut clamped).zip([first_own, !first_own]) {
            if *clamped == own {
                match own {
                    true => clamp(l1, &format!("off --vm {name}"))?,
                    false => clamp_on(l1, name, HZ[1].into(), "kvm-clock")?,
                };
                *clamped = !own;
            }
        }
        guests.run(WORK)
    };
    // The first one reads programs.
    run(true)?;
    let compared = alternate(BOUND, limit, run).context("a guest with and without a slower timer")?;
    let line = format!(
        "\nA guest that computes, its timer clamped from {} to {} ticks per second: processor time of QEMU in L1 without against with it: more by {}\n",
        HZ[0],
        HZ[1],
        compared.words()
    );
    say(line.trim());
    guests.kill()?;
    Ok(Gain {
        timer_clamp_gain_percent: compared.percent,
        timer_clamp_gain_interval_percent: compared.interval,
        timer_clamp_gain_pairs: compared.pairs,
        timer_clamp_hz: HZ,
        line,
    })
}
