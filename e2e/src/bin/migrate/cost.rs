//! What a function that can move costs while it does not, before a move and after one: pings through it and through one that is handed over as it is, in
//! turn, from one guest.
//!
//! ```text
//!   migratable, trapped or mapped:  guest has nic0 and the original --> pings --> pci move nic0 to another function here --> pings
//!   cooperating, mapped:            guest has nic0 and the original --> pings
//!                                   another guest has nic0 --> move vm to the other side --> the original is plugged in --> pings
//! ```
//!
//! `pci move` refuses a function that cooperates and whose registers the VMM maps: a VMM maps once.

use crate::moves::Course;
use crate::place::{Kind, MEMORY, ORIGINAL, OTHER, Side, bring_module};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::coop::LOAD_IGBVF;
use ioplane_e2e::igb::{GUEST_IP, PEER_IP};
use ioplane_e2e::nics::Pings;
use ioplane_e2e::pairs::{Compared, alternate};
use ioplane_e2e::{Inner, L1, L2, PERIODIC, Version};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

/// Which function is compared with one that is handed over as it is.
#[derive(Clone, Copy, Debug)]
pub enum Moves {
    /// By a table, with its stock driver; all registers are trapped.
    ByTable,
    /// The same, with registers that the library in QEMU has mapped.
    Mapped,
    /// By the changed driver: it has both functions.
    ByDriver,
}

/// Per cent; the interval has to be narrower.
pub const BOUND: f64 = 0.75;
const PINGS: u32 = 40;
/// Of registers that the library maps: those of interrupts and queues.
const PAGES: u64 = 3;

#[derive(Debug, Serialize)]
pub struct Runtime {
    /// The median of pairs of mean round trips, or that it is not known closely enough.
    pub percent: Value,
    pub interval: Option<[f64; 2]>,
    pub pairs: usize,
    pub pings: u32,
    /// Register accesses that reached the daemon; each is an exit.
    pub accesses_per_packet: f64,
    pub original_accesses_per_packet: f64,
}

/// Gives an interface of the guest its address on the network of the function that is handed over as it is, raises it and waits for the other end. `$2` is
/// the second interface of igbvf by its place on the bus, `$1` the first.
fn second(busybox: &str) -> String {
    let [far, near] = OTHER;
    format!(
        "set -- $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/* | sort); \
         {busybox} ip addr add {near}/24 dev $(basename $2); {busybox} ip link set $(basename $2) up; \
         for try in $(seq 20); do {busybox} ping -q -c 1 -W 2 {far} >/dev/null && break; done; \
         {busybox} ping -q -c 1 -W 2 {far} >/dev/null"
    )
}

/// Both interfaces, in the order in which the guest's bus has them.
fn raise(guest: &L2<'_>, load: &str) -> Result<()> {
    let script = format!(
        "set -e; {load}; bb=/folder/busybox
         echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
         set -- $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/* | sort)
         $bb ip addr add {GUEST_IP}/24 dev $(basename $1); $bb ip link set $(basename $1) up
         for try in $(seq 20); do $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null && break; done
         $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null
         {}",
        second("$bb")
    );
    guest.run(&script).map(drop).context("raise both functions in the guest")
}

/// Pings through both in turn, for `limit` at most, or until the interval is narrow enough.
fn compare(
    daemon: &Inner<'_>,
    limit: Duration,
    ping: impl Fn(&str) -> Result<(Pings, Option<f64>)>,
) -> Result<Runtime> {
    let accesses = || Ok::<_, anyhow::Error>([daemon.accesses("nic0")?, daemon.accesses(ORIGINAL)?]);
    let begun = accesses()?;
    let mut batches = 0_u32;
    let compared = alternate(BOUND, limit, |movable| {
        let (pings, mean) = ping(if movable { PEER_IP } else { OTHER[0] })?;
        ensure!(pings.received == PINGS, "{pings:?}");
        batches += 1;
        mean.context("a mean round trip")
    })?;
    // A ping is a packet each way.
    let packets = f64::from(batches / 2 * PINGS * 2);
    let ended = accesses()?;
    let [movable, original] = [0, 1].map(|at| (ended[at] - begun[at]) as f64 / packets);
    let Compared { percent, interval, pairs } = compared;
    Ok(Runtime {
        percent,
        interval,
        pairs,
        pings: PINGS,
        accesses_per_packet: movable,
        original_accesses_per_packet: original,
    })
}

/// What it costs before a move, and after one if it can be made in the same guest; `limit` is for each.
pub fn runtime(
    l1: &L1,
    side: &Side<'_>,
    moves: Moves,
    limit: Duration,
) -> Result<(Runtime, Option<Result<Runtime>>)> {
    let name = match moves {
        Moves::ByTable => "cost",
        Moves::Mapped => "cost-mapped",
        Moves::ByDriver => "cost-driver",
    };
    let before = if let Moves::Mapped = moves { l1.interposed()? } else { String::new() };
    let args = side.daemon.guest_args(&["nic0", ORIGINAL], MEMORY)?;
    let guest = l1.debian_after(&before, Version::Newer, name, &args, PERIODIC)?;
    let load = match moves {
        Moves::ByTable | Moves::Mapped => "modprobe igbvf",
        Moves::ByDriver => {
            bring_module(l1, &guest)?;
            LOAD_IGBVF
        }
    };
    raise(&guest, load).with_context(|| format!("ioplane said {}", side.daemon.said()))?;
    let until_mapped = || match moves {
        Moves::Mapped => side.daemon.until_mapped("nic0", PAGES),
        Moves::ByTable | Moves::ByDriver => Ok(()),
    };
    let measure = || {
        until_mapped()?;
        compare(&side.daemon, limit, |ip| guest.ping_timed(ip, PINGS, 1000))
    };
    let at_rest = measure()?;
    let moved = match moves {
        Moves::ByDriver => None,
        Moves::ByTable | Moves::Mapped => Some(side.moves_on(name).and_then(|()| measure())),
    };
    guest.kill()?;
    Ok((at_rest, moved))
}

/// The same of a guest that has moved, which has one function: the other one is plugged in here.
pub fn after_moves(course: &Course<'_>, limit: Duration) -> Result<Runtime> {
    let (l1, side, name) = (course.l1, course.here(), course.qemu());
    ensure!(
        course.kind == Kind::Cooperating && course.has_moved(),
        "its driver cooperates, and it has moved"
    );
    side.plug_original(course.guest()?)?;
    let there = "[ $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/* | wc -l) = 2 ]";
    let script = format!(
        "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore; for try in $(seq 100); do {there} && break; sleep 0.3; done; {there} && {{ {}; }}",
        second("/tmp/busybox")
    );
    l1.ask(&name, &script).context("the function that was plugged into the guest")?;
    compare(&side.daemon, limit, |ip| l1.ask_ping_timed(&name, ip, PINGS, 1000))
}
