//! Who is plugged in where: made anew by the control side for every change, read by port TXs without a lock.

use std::sync::Arc;

use super::capture::Ring;
use super::port::PortShared;
use crate::{MOST_PAIRS, MOST_PORTS, Mac};

/// A slot of a snapshot.
#[derive(Debug, Clone)]
pub(crate) struct PortEntry {
    pub shared: Arc<PortShared>,
    /// Whoever looks on.
    pub ring: Option<Arc<Ring>>,
}

/// The ports of a switch at one moment.
#[derive(Debug)]
pub(crate) struct SwitchSnapshot {
    entries: Box<[Option<PortEntry>]>,
    /// Slots that have a port.
    pub taken: Box<[u16]>,
    /// Whether there is an uplink among them.
    pub uplinks: bool,
    /// Configured addresses and their slots, hashed, with linear probing; always some are empty.
    fixed: Box<[Option<(Mac, u16)>]>,
}

impl SwitchSnapshot {
    /// Of entries by slot.
    pub fn new(entries: Vec<Option<PortEntry>>) -> Self {
        debug_assert_eq!(entries.len(), usize::from(MOST_PORTS));
        let taken: Box<[u16]> =
            (0..MOST_PORTS).filter(|slot| entries[usize::from(*slot)].is_some()).collect();
        let mut fixed = vec![None; (2 * taken.len() + 2).next_power_of_two()].into_boxed_slice();
        for entry in entries.iter().flatten() {
            let Some(mac) = entry.shared.mac else { continue };
            let mut at = first(mac, fixed.len());
            while fixed[at].is_some() {
                at = (at + 1) & (fixed.len() - 1);
            }
            fixed[at] = Some((mac, entry.shared.place.slot));
        }
        let uplinks = entries.iter().flatten().any(|entry| entry.shared.uplink);
        SwitchSnapshot { entries: entries.into(), taken, uplinks, fixed }
    }

    /// An empty one.
    pub fn empty() -> Self {
        SwitchSnapshot::new(vec![None; usize::from(MOST_PORTS)])
    }

    /// Its entries, to make another of.
    pub fn entries(&self) -> Vec<Option<PortEntry>> {
        self.entries.to_vec()
    }

    #[inline]
    pub fn entry(&self, slot: u16) -> Option<&PortEntry> {
        self.entries[usize::from(slot)].as_ref()
    }

    /// The ports whose configured address is `mac`: more than one while a guest migrates within this host.
    #[inline]
    pub fn fixed(&self, mac: Mac) -> impl Iterator<Item = &PortEntry> {
        let mask = self.fixed.len() - 1;
        let from = first(mac, self.fixed.len());
        (0..self.fixed.len())
            .map_while(move |step| self.fixed[(from + step) & mask])
            .filter(move |(fixed, _)| *fixed == mac)
            .filter_map(|(_, slot)| self.entry(slot))
    }
}

#[inline]
fn first(mac: Mac, len: usize) -> usize {
    let word = u64::from_be_bytes([0, 0, mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]]);
    (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (len - 1)
}

/// The number of a receiving queue among all of a switch.
#[inline]
pub(crate) fn queue_number(slot: u16, pair: u16) -> usize {
    usize::from(slot) * usize::from(MOST_PAIRS) + usize::from(pair)
}

/// How many there can be.
pub(crate) const QUEUES: usize = MOST_PORTS as usize * MOST_PAIRS as usize;
