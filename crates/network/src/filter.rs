//! What a guest wants to hear: the results of its control queue.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::Mac;

/// Words of a table of 4096 bits.
const WORDS: usize = 64;

/// What a port's guest wants to hear. Addresses are kept as a hash, so a frame in a hundred that was not asked for comes
/// through: filtering is best effort (virtio 1.3, 5.1.6.5.1). VLANs are exact. By default everything is heard.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RxFilter {
    /// Every frame is heard, whatever else is said here (but for VLANs).
    pub promiscuous: bool,
    /// Every unicast frame is heard.
    pub all_unicast: bool,
    /// Every multicast frame is heard.
    pub all_multicast: bool,
    /// No unicast frame is heard.
    pub no_unicast: bool,
    /// No multicast frame (but broadcast) is heard.
    pub no_multicast: bool,
    /// No broadcast frame is heard.
    pub no_broadcast: bool,
    /// Only the VLANs added by [`RxFilter::add_vlan`] are heard, and what has no tag.
    pub vlan_filtering: bool,
    addresses: [u64; WORDS],
    vlans: [u64; WORDS],
}

impl Default for RxFilter {
    fn default() -> Self {
        RxFilter { promiscuous: true, ..RxFilter::NOTHING }
    }
}

impl RxFilter {
    /// Hears broadcast only, until addresses are added.
    pub const NOTHING: RxFilter = RxFilter {
        promiscuous: false,
        all_unicast: false,
        all_multicast: false,
        no_unicast: false,
        no_multicast: false,
        no_broadcast: false,
        vlan_filtering: false,
        addresses: [0; WORDS],
        vlans: [0; WORDS],
    };

    /// Hears frames to `mac`, unicast or multicast.
    pub fn add(&mut self, mac: Mac) {
        let at = place(mac);
        self.addresses[at / 64] |= 1 << (at % 64);
    }

    /// Hears VLAN `vlan`.
    pub fn add_vlan(&mut self, vlan: u16) {
        let at = usize::from(vlan & 0x0fff);
        self.vlans[at / 64] |= 1 << (at % 64);
    }

    fn flags(&self) -> u8 {
        let flags = [
            self.promiscuous,
            self.all_unicast,
            self.all_multicast,
            self.no_unicast,
            self.no_multicast,
            self.no_broadcast,
            self.vlan_filtering,
        ];
        flags.iter().enumerate().fold(0, |bits, (at, on)| bits | u8::from(*on) << at)
    }
}

impl std::fmt::Debug for RxFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ones = |words: &[u64]| words.iter().map(|word| word.count_ones()).sum::<u32>();
        f.debug_struct("Filter")
            .field("flags", &format_args!("{:#09b}", self.flags()))
            .field("addresses", &ones(&self.addresses))
            .field("vlans", &ones(&self.vlans))
            .finish()
    }
}

/// Where an address goes in the table. An address that no flow of bits makes equal to another's is not needed here: a guest
/// that collides with itself hears more than it asked for.
#[inline]
fn place(mac: Mac) -> usize {
    let word = u64::from_be_bytes([0, 0, mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]]);
    (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize
}

/// A filter that one thread changes while others ask.
#[derive(Debug)]
pub(crate) struct AtomicRxFilter {
    flags: AtomicU8,
    addresses: [AtomicU64; WORDS],
    vlans: [AtomicU64; WORDS],
}

const PROMISCUOUS: u8 = 1;
const ALL_UNICAST: u8 = 2;
const ALL_MULTICAST: u8 = 4;
const NO_UNICAST: u8 = 8;
const NO_MULTICAST: u8 = 16;
const NO_BROADCAST: u8 = 32;
const VLAN_FILTERING: u8 = 64;

impl AtomicRxFilter {
    pub fn new() -> Self {
        AtomicRxFilter {
            flags: AtomicU8::new(RxFilter::default().flags()),
            addresses: [const { AtomicU64::new(0) }; WORDS],
            vlans: [const { AtomicU64::new(0) }; WORDS],
        }
    }

    /// Takes another filter. Meanwhile both are heard, never less: the old tables go when the new ones are in.
    pub fn set(&self, filter: &RxFilter) {
        let tables = || {
            let addresses = self.addresses.iter().zip(&filter.addresses);
            addresses.chain(self.vlans.iter().zip(&filter.vlans))
        };
        for (word, new) in tables() {
            word.fetch_or(*new, Ordering::AcqRel);
        }
        self.flags.store(filter.flags(), Ordering::Release);
        tables().for_each(|(word, new)| word.store(*new, Ordering::Release));
    }

    /// Whether a frame to `mac` in VLAN `vlan` (zero: none) is heard.
    #[inline]
    pub fn hears(&self, mac: Mac, vlan: u16) -> bool {
        let flags = self.flags.load(Ordering::Relaxed);
        if flags == PROMISCUOUS {
            return true;
        }
        let on = |table: &[AtomicU64; WORDS], at: usize| {
            table[at / 64].load(Ordering::Relaxed) >> (at % 64) & 1 != 0
        };
        if flags & VLAN_FILTERING != 0 && vlan != 0 && !on(&self.vlans, usize::from(vlan & 0x0fff)) {
            return false;
        }
        if flags & PROMISCUOUS != 0 {
            return true;
        }
        let (all, none) = match mac[0] & 1 {
            _ if mac == [0xff; 6] => return flags & NO_BROADCAST == 0,
            0 => (ALL_UNICAST, NO_UNICAST),
            _ => (ALL_MULTICAST, NO_MULTICAST),
        };
        flags & none == 0 && (flags & all != 0 || on(&self.addresses, place(mac)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Mac = [2, 0, 0, 0, 0, 1];
    const OTHER: Mac = [2, 0, 0, 0, 0, 2];
    const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 1];

    fn hears(filter: RxFilter, mac: Mac, vlan: u16) -> bool {
        let shared = AtomicRxFilter::new();
        shared.set(&filter);
        shared.hears(mac, vlan)
    }

    #[test]
    fn what_was_asked_for_is_heard() {
        let mut filter = RxFilter::NOTHING;
        assert!(!hears(filter, OWN, 0) && !hears(filter, GROUP, 0) && hears(filter, [0xff; 6], 0));
        filter.add(OWN);
        filter.add(GROUP);
        assert!(hears(filter, OWN, 0) && hears(filter, GROUP, 0) && !hears(filter, OTHER, 0));
        assert!(hears(RxFilter { all_unicast: true, ..filter }, OTHER, 0));
        assert!(!hears(RxFilter { no_multicast: true, ..filter }, GROUP, 0));
        assert!(!hears(RxFilter { no_unicast: true, ..filter }, OWN, 0));
        assert!(!hears(RxFilter { no_broadcast: true, ..filter }, [0xff; 6], 0));
        assert!(hears(RxFilter { promiscuous: true, ..filter }, OTHER, 0));
    }

    #[test]
    fn vlans_are_exact() {
        let mut filter = RxFilter { vlan_filtering: true, ..RxFilter::default() };
        filter.add_vlan(7);
        assert!(hears(filter, OWN, 7) && hears(filter, OWN, 0) && !hears(filter, OWN, 8));
    }

    #[test]
    fn everything_at_first() {
        assert!(AtomicRxFilter::new().hears(OTHER, 9));
    }
}
