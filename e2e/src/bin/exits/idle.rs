//! What the library costs a VM that takes no exits for device accesses: the same work with clustering on and off in turn.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::{L1, Version};
use ioplane_figures::compare::interval;
use ioplane_figures::goals::UNRESOLVED;
use ioplane_figures::report::median;
use serde::Serialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What the interval has to be narrower than.
const BOUND_PERCENT: f64 = 0.5;
const LEAST_PAIRS: usize = 20;
const MOST_PAIRS: usize = 100;
/// It computes, and reads a virtio disk, whose doorbell is an eventfd.
const WORK: &str = "perl -e '$x = 0; for (1..300000) { $x = sqrt($x + 2) }'
    dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct status=none";

/// How much more processor time the same work takes.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// The median of the pairs, or that it is not known closely enough.
    pub idle_vm_cost_percent: Value,
    /// Of that median, with 95 %; what was measured whether it is close enough or not.
    pub idle_vm_cost_interval_percent: Option<[f64; 2]>,
    pub idle_vm_cost_pairs: usize,
}

impl Cost {
    fn of(ratios: &[f64]) -> Cost {
        let percent = |ratio: f64| (ratio - 1.0) * 100.0;
        let ends = interval(ratios).map(|ends| ends.map(percent));
        let close = ratios.len() >= LEAST_PAIRS && ends.is_some_and(|[low, high]| high - low < BOUND_PERCENT);
        let middle = percent(median(ratios.iter().copied()));
        Cost {
            idle_vm_cost_percent: if close { json!(middle) } else { json!(UNRESOLVED) },
            idle_vm_cost_interval_percent: ends,
            idle_vm_cost_pairs: ratios.len(),
        }
    }

    fn is_known(&self) -> bool {
        self.idle_vm_cost_percent.is_number()
    }

    pub fn line(&self) -> String {
        let ends = self
            .idle_vm_cost_interval_percent
            .map_or("none".into(), |[low, high]| format!("{low:.2} to {high:.2} %"));
        let middle = self.idle_vm_cost_percent.as_f64();
        format!(
            "\nA VM that takes no exits for device accesses, clustering on against off, processor time of L1: {} more; 95 % interval of the \
             median {ends}, {} pairs\n",
            middle.map_or(UNRESOLVED.into(), |middle| format!("{middle:.2} %")),
            self.idle_vm_cost_pairs
        )
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
    let end = Instant::now() + limit;
    let mut ratios = Vec::new();
    let cost = loop {
        let on_first = ratios.len() % 2 == 0;
        let first = run(on_first)?;
        let second = run(!on_first)?;
        let (on, off) = if on_first { (first, second) } else { (second, first) };
        ensure!(off > 0.0, "no processor time was counted");
        ratios.push(on / off);
        let cost = Cost::of(&ratios);
        if cost.is_known() || ratios.len() == MOST_PAIRS || Instant::now() >= end {
            break cost;
        }
    };
    let saved = saved(&l1.clustering("--vm still").context("the status at the end")?);
    accesses.sort_unstable();
    say(&format!(
        "a VM without exits for devices: {cost:?}; at most {} accesses in a run, {saved} exits spared since it was started",
        accesses.last().copied().unwrap_or_default()
    ));
    guest.kill()?;
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::Cost;

    #[test]
    fn what_is_not_known_closely_enough_is_no_number() {
        let narrow: Vec<f64> = (0..20).map(|n| 1.001 + 0.0001 * f64::from(n % 4)).collect();
        let cost = Cost::of(&narrow);
        assert!(cost.is_known() && cost.idle_vm_cost_percent.as_f64().is_some_and(|percent| percent < 0.2));
        let wide: Vec<f64> = (0..20).map(|n| 0.98 + 0.002 * f64::from(n)).collect();
        assert!(!Cost::of(&wide).is_known());
        assert!(!Cost::of(&narrow[..3]).is_known());
    }
}
