//! What the library costs a VM that takes no exits for device accesses: two of them do the same work at once, one with clustering, the other without, in turn.

use super::beside::TwoGuests;
use super::pairs::{Compared, alternate};
use anyhow::{Context, Result};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::{L1, Version};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 0.5;
const NAMES: [&str; 2] = ["still", "beside"];
/// It computes, and reads a virtio disk, whose doorbell is an eventfd.
const WORK: &str = "perl -e '$x = 0; for (1..1000000) { $x = sqrt($x + 2) }'
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
            "\nA VM that takes no exits for device accesses, clustering on against off, processor time of QEMU in L1: more by {}\n",
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
    let boot = |name| l1.debian_after(&before, Version::Host, name, "-machine pc -m 256M -vga none", "");
    let guests = TwoGuests::new(l1, [boot(NAMES[0])?, boot(NAMES[1])?])?;
    let mut accesses = Vec::new();
    let mut run = |first_on: bool| -> Result<f64> {
        for (name, on) in NAMES.into_iter().zip([first_on, !first_on]) {
            l1.clustering(&format!("{} --vm {name}", if on { "on" } else { "off" }))?;
        }
        let exits = l1.count_user_exits()?;
        let quotient = guests.run(WORK)?;
        accesses.push(exits.read_any()?.accesses());
        Ok(quotient)
    };
    // The first one reads programs.
    run(true)?;
    let cost = Cost::of(alternate(BOUND, limit, run)?);
    let mut spared = 0;
    for name in NAMES {
        spared += saved(&l1.clustering(&format!("--vm {name}")).context("the status at the end")?);
    }
    accesses.sort_unstable();
    say(&format!(
        "two VMs without exits for devices: {cost:?}; at most {} accesses in a run, {spared} exits spared since they were started",
        accesses.last().copied().unwrap_or_default()
    ));
    guests.kill()?;
    Ok(cost)
}
