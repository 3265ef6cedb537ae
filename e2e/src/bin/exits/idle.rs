//! What the library costs a VM that takes no exits for device accesses: the same work with clustering on and off in turn.

use super::pairs::{Compared, alternate};
use anyhow::{Context, Result};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::{L1, Version};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 0.5;
/// It computes, and reads a virtio disk, whose doorbell is an eventfd.
const WORK: &str = "perl -e '$x = 0; for (1..300000) { $x = sqrt($x + 2) }'
    dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct status=none";

/// How much more processor time the same work takes.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    pub idle_vm_cost_percent: Value,
    pub idle_vm_cost_interval_percent: Option<[f64; 2]>,
    pub idle_vm_cost_pairs: usize,
    #[serde(skip)]
    pub line: String,
}

impl Cost {
    fn of(compared: Compared) -> Cost {
        let line = format!(
            "\nA VM that takes no exits for device accesses, clustering on against off, processor time of L1: more by {}\n",
            compared.words()
        );
        Cost {
            idle_vm_cost_percent: compared.percent,
            idle_vm_cost_interval_percent: compared.interval,
            idle_vm_cost_pairs: compared.pairs,
            line,
        }
    }
}

/// Runs pairs until the interval is narrow, or for `limit`. `l1` has no other guest.
pub fn cost(l1: &L1, limit: Duration, say: &dyn Fn(&str)) -> Result<Cost> {
    let before = l1.interposed()?;
    let guest = l1.debian_after(&before, Version::Host, "still", "-machine pc -m 256M -vga none", "")?;
    let mut accesses = Vec::new();
    // All that L1's processor does is in it: the guest is its only work.
    let mut run = |on: bool| -> Result<f64> {
        let word = if on { "on" } else { "off" };
        l1.clustering(&format!("{word} --vm still"))?;
        let exits = l1.count_user_exits()?;
        let begun = l1.processor_time()?;
        guest.run(WORK)?;
        let time = l1.processor_time()?.saturating_sub(begun);
        accesses.push(exits.read_any()?.accesses());
        Ok(time.as_secs_f64())
    };
    // The first one reads programs.
    run(true)?;
    let cost = Cost::of(alternate(BOUND, limit, run)?);
    let saved = saved(&l1.clustering("--vm still").context("the status at the end")?);
    accesses.sort_unstable();
    say(&format!(
        "a VM without exits for devices: {cost:?}; at most {} accesses in a run, {saved} exits spared since it was started",
        accesses.last().copied().unwrap_or_default()
    ));
    guest.kill()?;
    Ok(cost)
}
