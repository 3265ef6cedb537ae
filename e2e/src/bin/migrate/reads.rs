//! What a read of a statistics register takes in the guest (the paper's Table 2), in turn in one guest with the changed igbvf: `ethtool -S`, which reads nine of them.
//!
//! ```text
//!   nic0     cooperating        the driver's self-emulation: a load from the page
//!   trapped  migratable         a read that is trapped: the daemon reads the register and adds what was counted before
//!   orig     as it is, mapped   a read of the register
//!   idle     as it is, down     the same call, in which igbvf reads nothing
//! ```

use crate::place::{MEMORY, ORIGINAL, Side, bring_module};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::PERIODIC;
use ioplane_e2e::coop::{LOAD_IGBVF, STATISTICS};
use ioplane_e2e::{L1, L2, Version};
use ioplane_figures::compare::interval;
use ioplane_figures::report::{median, rounded};
use serde::Serialize;
use std::time::{Duration, Instant};

/// The statistics registers of an 82576's virtual function, which `igbvf_update_stats` reads.
const READS: u32 = 9;
const TRAPPED: &str = "trapped";
const IDLE: &str = "idle";
/// The functions, in the order in which the guest's bus has them, and calls at a time: each takes some tenths of a second.
const WAYS: [(&str, u32); 4] = [("nic0", 2000), (TRAPPED, 15), (ORIGINAL, 2000), (IDLE, 2000)];
/// How often they are called at a time where accesses are counted.
const COUNTED: u32 = 5;
/// Seconds in which nobody calls.
const QUIET: u32 = 10;
const MOST_ROUNDS: usize = 100;

/// One way to read.
#[derive(Debug, Serialize)]
pub struct Way {
    /// Of a call, us of the guest's clock: the median of rounds.
    pub call_us: f64,
    /// Of a read, us: a call less one that reads nothing.
    pub read_us: f64,
    /// So many were made where accesses to the daemon were counted, and these came.
    pub counted_reads: u64,
    pub accesses: u64,
    /// Those of the driver's watchdog in that time, by its rate while nobody called.
    pub watchdog_accesses: f64,
    /// The rest, for each read.
    pub accesses_per_read: f64,
}

/// A ratio of rounds.
#[derive(Debug, Serialize)]
pub struct Ratio {
    pub median: f64,
    /// Of that median, with 95 %.
    pub interval: Option<[f64; 2]>,
}

impl Ratio {
    fn of(ratios: &[f64]) -> Ratio {
        Ratio {
            median: rounded(median(ratios.iter().copied())),
            interval: interval(ratios).map(|ends| ends.map(rounded)),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Reads {
    pub rounds: usize,
    pub self_emulated: Way,
    pub trapped: Way,
    pub mapped: Way,
    /// Of a call that reads nothing, us.
    pub nothing_us: f64,
    /// A read against one that is trapped, each less what a call takes that reads nothing.
    pub self_emulated_vs_trapped: Ratio,
    pub mapped_vs_trapped: Ratio,
    /// The whole calls, whose nine reads are a part of what they do.
    pub call_self_emulated_vs_trapped: Ratio,
}

/// Of one way.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Of a call, us, one for each round.
    call_us: Vec<f64>,
    /// Accesses while it was called and counted, and how long that took.
    counted: (u64, f64),
    /// The same while nobody called.
    quiet: (u64, f64),
}

/// The interfaces of the four in the guest, once those that read have their links.
fn raise(guest: &L2<'_>) -> Result<Vec<String>> {
    let said = guest.run(&format!(
        "set -e; {LOAD_IGBVF}; bb=/folder/busybox
         set -- $(for one in $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/* | sort); do basename $one; done)
         echo $*
         for name in $1 $2 $3; do
             echo 1 >/proc/sys/net/ipv6/conf/$name/disable_ipv6; $bb ip link set $name up
             for try in $(seq 100); do [ $(cat /sys/class/net/$name/carrier) = 1 ] && break; sleep 0.3; done
             [ $(cat /sys/class/net/$name/carrier) = 1 ]
         done"
    ))?;
    Ok(said.split_whitespace().map(str::to_owned).collect())
}

/// Goes on for `limit` at most.
pub fn reads(l1: &L1, side: &Side<'_>, limit: Duration) -> Result<Reads> {
    side.add(TRAPPED, side.function(2)?, "migratable")?;
    side.add(IDLE, side.function(3)?, "passthrough")?;
    let names = WAYS.map(|(name, _)| name);
    let args = side.daemon.guest_args(&names, MEMORY)?;
    let guest = l1.debian_by(Version::Newer, "reads", &args, PERIODIC)?;
    let seen = bring_module(l1, &guest)
        .and_then(|()| rounds(&guest, side, limit))
        .with_context(|| format!("ioplane said {}", side.daemon.said()));
    guest.kill()?;
    for name in [TRAPPED, IDLE] {
        side.daemon.text(&format!("pci remove {name} --force"))?;
    }
    figures(&seen?)
}

fn rounds(guest: &L2<'_>, side: &Side<'_>, limit: Duration) -> Result<[Seen; 4]> {
    std::fs::write(guest.folder().join("statistics.pl"), STATISTICS)?;
    let interfaces = raise(guest)?;
    ensure!(interfaces.len() == WAYS.len(), "four interfaces: {interfaces:?}");
    let mut seen: [Seen; 4] = Default::default();
    for (at, seen) in seen.iter_mut().enumerate() {
        let (function, calls) = WAYS[at];
        let during = |script: &str| -> Result<(u64, f64)> {
            let (before, begun) = (side.daemon.accesses(function)?, Instant::now());
            guest.run(script)?;
            Ok((side.daemon.accesses(function)? - before, begun.elapsed().as_secs_f64()))
        };
        seen.quiet = during(&format!("sleep {QUIET}"))?;
        seen.counted = during(&call(&interfaces[at], COUNTED * calls))?;
    }
    // Each of them is the first one in turn.
    let order = |round: usize| (0..WAYS.len()).map(move |turn| (round + turn) % WAYS.len());
    let places: Vec<usize> = (0..WAYS.len()).flat_map(order).collect();
    let script: Vec<String> = places.iter().map(|at| call(&interfaces[*at], WAYS[*at].1)).collect();
    let end = Instant::now() + limit;
    while seen[0].call_us.len() < MOST_ROUNDS && Instant::now() < end {
        let said = guest.run(&format!("set -e\n{}", script.join("\n")))?;
        let times: Vec<f64> = said.lines().skip(1).step_by(2).filter_map(|line| line.parse().ok()).collect();
        ensure!(times.len() == places.len(), "a time for each: {said}");
        for (at, ns) in places.iter().zip(times) {
            seen[*at].call_us.push(ns / 1e3 / f64::from(WAYS[*at].1));
        }
    }
    Ok(seen)
}

/// A line for the guest's shell.
fn call(interface: &str, calls: u32) -> String {
    format!("perl /folder/statistics.pl {interface} {calls}")
}

fn figures(seen: &[Seen; 4]) -> Result<Reads> {
    let [own, trapped, mapped, nothing] = seen;
    let rounds = nothing.call_us.len();
    ensure!(rounds > 0, "no round");
    let read = |of: &Seen| -> Vec<f64> {
        of.call_us.iter().zip(&nothing.call_us).map(|(call, none)| (call - none) / f64::from(READS)).collect()
    };
    let middle = |of: &[f64]| rounded(median(of.iter().copied()));
    let way = |at: usize| {
        let of = &seen[at];
        let counted_reads = u64::from(COUNTED * WAYS[at].1 * READS);
        let watchdog = of.quiet.0 as f64 / of.quiet.1 * of.counted.1;
        Way {
            call_us: middle(&of.call_us),
            read_us: middle(&read(of)),
            counted_reads,
            accesses: of.counted.0,
            watchdog_accesses: rounded(watchdog),
            accesses_per_read: rounded((of.counted.0 as f64 - watchdog) / counted_reads as f64),
        }
    };
    let ratio = |one: &[f64], other: &[f64]| {
        Ratio::of(&one.iter().zip(other).map(|(one, other)| one / other).collect::<Vec<f64>>())
    };
    let trapped_reads = read(trapped);
    ensure!(trapped_reads.iter().all(|us| *us > 0.0), "trapped reads take no time: {trapped_reads:?}");
    Ok(Reads {
        rounds,
        self_emulated: way(0),
        trapped: way(1),
        mapped: way(2),
        nothing_us: middle(&nothing.call_us),
        self_emulated_vs_trapped: ratio(&read(own), &trapped_reads),
        mapped_vs_trapped: ratio(&read(mapped), &trapped_reads),
        call_self_emulated_vs_trapped: ratio(&own.call_us, &trapped.call_us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_a_call_less_one_that_reads_nothing() {
        let seen = |call: f64, accesses| Seen {
            call_us: vec![call; 6],
            counted: (accesses, 6.0),
            quiet: (10, 10.0),
        };
        let counted = u64::from(COUNTED * WAYS[1].1 * READS);
        let all = [seen(19.0, 6), seen(910.0, counted + 6), seen(100.0, 6), seen(10.0, 6)];
        let reads = figures(&all).expect("figures");
        assert_eq!((reads.self_emulated.read_us, reads.trapped.read_us), (1.0, 100.0));
        assert_eq!((reads.self_emulated_vs_trapped.median, reads.mapped_vs_trapped.median), (0.01, 0.1));
        assert_eq!((reads.trapped.accesses_per_read, reads.self_emulated.accesses_per_read), (1.0, 0.0));
        let none = [all[0].clone(), all[3].clone(), all[2].clone(), all[3].clone()];
        assert!(figures(&none).is_err(), "trapped reads that take no time");
    }
}
