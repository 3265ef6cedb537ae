//! What a function that can move costs while it does not: pings through it and through one that is handed over as it is, in turn, from one guest.

use crate::MINUTE;
use crate::place::{FAR, MEMORY, ORIGINAL, Side};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::{GUEST_IP, PEER_IP};
use ioplane_e2e::pairs::{Compared, alternate};
use ioplane_e2e::{L1, L2, Version};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Which function is compared with one that is handed over as it is.
#[derive(Clone, Copy, Debug)]
pub enum Moves<'m> {
    /// By a table, with its stock driver; all registers are trapped.
    ByTable,
    /// The same, with registers that the library in QEMU has mapped.
    Mapped,
    /// By the driver, this module: it has both functions.
    ByDriver(&'m Path),
}

/// Per cent; the interval has to be narrower.
pub const BOUND: f64 = 0.75;
const PINGS: u32 = 40;
/// Of registers that the library maps: those of interrupts and queues.
const PAGES: u64 = 3;
/// Network of the function that is handed over as it is.
const OTHER: [&str; 2] = ["10.0.22.1", "10.0.22.2"];

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

/// Both interfaces, in the order in which the guest's bus has them.
fn raise(l1: &L1, guest: &L2<'_>, load: &str) -> Result<()> {
    let [far, near] = OTHER;
    l1.run(&format!("ip addr replace {far}/24 dev {FAR}"), MINUTE)?;
    let script = format!(
        "set -e; {load}; bb=/folder/busybox
         echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
         set -- $(ls -d /sys/bus/pci/drivers/igbvf/0*/net/* | sort)
         $bb ip addr add {GUEST_IP}/24 dev $(basename $1); $bb ip addr add {near}/24 dev $(basename $2)
         for one; do $bb ip link set $(basename $one) up; done
         for try in $(seq 20); do
             $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null && $bb ping -q -c 1 -W 2 {far} >/dev/null && exit 0
         done
         echo no answer; $bb ip addr; exit 1"
    );
    guest.run(&script).map(drop).context("raise both functions in the guest")
}

/// Goes on for `limit` at most, or until the interval is narrow enough.
pub fn runtime(l1: &L1, side: &Side<'_>, moves: Moves<'_>, limit: Duration) -> Result<Runtime> {
    let name = match moves {
        Moves::ByTable => "cost",
        Moves::Mapped => "cost-mapped",
        Moves::ByDriver(_) => "cost-driver",
    };
    let before = if let Moves::Mapped = moves { l1.interposed()? } else { String::new() };
    let args = side.daemon.guest_args(&["nic0", ORIGINAL], MEMORY)?;
    let guest = l1.debian_after(&before, Version::Newer, name, &args, "")?;
    let load = match moves {
        Moves::ByTable | Moves::Mapped => "modprobe igbvf",
        Moves::ByDriver(module) => {
            std::fs::copy(module, guest.folder().join("igbvf.ko"))?;
            "insmod /folder/igbvf.ko"
        }
    };
    raise(l1, &guest, load).with_context(|| format!("ioplane said {}", side.daemon.said()))?;
    if let Moves::Mapped = moves {
        side.daemon.until_mapped("nic0", PAGES)?;
    }
    let begun = (side.daemon.accesses("nic0")?, side.daemon.accesses(ORIGINAL)?);
    let mut batches = 0_u32;
    let compared = alternate(BOUND, limit, |movable| {
        let (pings, mean) = guest.ping_timed(if movable { PEER_IP } else { OTHER[0] }, PINGS, 1000)?;
        ensure!(pings.received == PINGS, "{pings:?}");
        batches += 1;
        mean.context("a mean round trip")
    })?;
    // A ping is a packet each way.
    let packets = f64::from(batches / 2 * PINGS * 2);
    let each = |now: u64, before: u64| (now - before) as f64 / packets;
    let (movable, original) = (side.daemon.accesses("nic0")?, side.daemon.accesses(ORIGINAL)?);
    guest.kill()?;
    let Compared { percent, interval, pairs } = compared;
    Ok(Runtime {
        percent,
        interval,
        pairs,
        pings: PINGS,
        accesses_per_packet: each(movable, begun.0),
        original_accesses_per_packet: each(original, begun.1),
    })
}
