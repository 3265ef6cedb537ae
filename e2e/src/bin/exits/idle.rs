//! What the library costs a VM that takes no exits for device accesses.
//!
//! Natively: a guest of our own that counts, whose VMM is interrupted a thousand times a second, with the library and without it. In L1: two stock VMs do the same work at once, one
//! with clustering, the other without, in turn.

use super::beside::TwoGuests;
use super::cost::Tiny;
use anyhow::{Context, Result};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::pairs::{Compared, alternate};
use ioplane_e2e::preload::library;
use ioplane_e2e::{L1, Version};
use ioplane_figures::report::median;
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsStr;
use std::time::Duration;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 0.5;
const NAMES: [&str; 2] = ["still", "still-beside"];
/// It computes, and reads a virtio disk, whose doorbell is an eventfd.
const WORK: &str = "perl -e '$x = 0; for (1..1000000) { $x = sqrt($x + 2) }'
    dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct status=none";

/// Turns of the native guest's loop at a time, how often both count, and how often both are started: where a process lies in memory can change its speed by more than what is measured.
const TURNS: &str = "50000";
const PAIRS: usize = 2;
const STARTS: usize = 400;

/// How much more processor time the same work takes.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    #[serde(flatten)]
    native: Native,
    /// In L1.
    pub l1_idle_vm_cost_percent: Value,
    pub l1_idle_vm_cost_interval_percent: Option<[f64; 2]>,
    pub l1_idle_vm_cost_pairs: usize,
    #[serde(skip)]
    pub line: String,
}

/// Natively.
#[derive(Clone, Debug, Serialize)]
pub struct Native {
    idle_vm_cost_percent: Value,
    idle_vm_cost_interval_percent: Option<[f64; 2]>,
    idle_vm_cost_pairs: usize,
}

impl Native {
    pub fn of(compared: Compared) -> Native {
        Native {
            idle_vm_cost_percent: compared.percent,
            idle_vm_cost_interval_percent: compared.interval,
            idle_vm_cost_pairs: compared.pairs,
        }
    }
}

impl Cost {
    fn of(native: Compared, l1: Compared) -> Cost {
        let line = format!(
            "\nA VM that takes no exits for device accesses. With the library against without, natively: the VMM's thread takes more by {}. \
             Clustering on against off, a stock VM in L1: QEMU takes more by {}\n",
            native.words(),
            l1.words()
        );
        Cost {
            native: Native::of(native),
            l1_idle_vm_cost_percent: l1.percent,
            l1_idle_vm_cost_interval_percent: l1.interval,
            l1_idle_vm_cost_pairs: l1.pairs,
            line,
        }
    }
}

/// On this machine's own KVM, by the time of the vCPU's thread. Always as many pairs: to end with the first narrow interval would favour one that is so by chance.
pub fn native() -> Result<Compared> {
    let library = library()?;
    let on: [(&str, &OsStr); 2] =
        [("LD_PRELOAD", library.as_os_str()), ("IOPLANE_EXITS_CLUSTER", OsStr::new("on"))];
    // One of each start: those of one start have in common where its processes lie.
    let mut medians = Vec::with_capacity(STARTS);
    for _ in 0..STARTS {
        let mut ratios = Vec::with_capacity(PAIRS);
        let mut guests = [Tiny::start_as(&["still", TURNS], &on)?, Tiny::start_as(&["still", TURNS], &[])?];
        for pair in 0..=PAIRS {
            let mut ns = [0.0; 2];
            for turn in 0..2 {
                let which = (pair + turn) % 2;
                ns[which] = guests[which].go()?.1;
            }
            // The first pair finds its pages missing.
            if pair > 0 {
                ratios.push(ns[0] / ns[1]);
            }
        }
        guests.into_iter().try_for_each(Tiny::end)?;
        medians.push(median(ratios));
    }
    Ok(Compared::of(&medians, BOUND))
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
    let l1_cost = alternate(BOUND, limit, run)?;
    let cost = Cost::of(native().context("natively")?, l1_cost);
    let mut spared = 0;
    for name in NAMES {
        spared += saved(&l1.clustering(&format!("--vm {name}")).context("the status at the end")?);
    }
    accesses.sort_unstable();
    say(&format!(
        "VMs without exits for devices: {cost:?}; in L1 at most {} accesses in a run, {spared} exits spared since they were started",
        accesses.last().copied().unwrap_or_default()
    ));
    guests.kill()?;
    Ok(cost)
}
