//! What a driver wants to receive: the results of its commands, which outlive the poller that obeyed them.

use ioplane_network::{Mac, RxFilter};

use super::spec::control::*;
use super::spec::*;

/// Addresses of a kind that a table holds. A driver that gives more receives all of that kind.
pub const TABLE: usize = 64;
/// 64-bit words of a bit for each VLAN.
pub const VLAN_WORDS: usize = 4096 / 64;

/// Receive modes (5.1.6.5.1), each by the number of its command.
pub const MODES: u8 = 6;

/// Addresses that a driver wants to receive, of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MacTable {
    addresses: [Mac; TABLE],
    len: usize,
    /// The driver gave more than there is room for.
    pub overflown: bool,
}

impl Default for MacTable {
    fn default() -> Self {
        MacTable { addresses: [[0; 6]; TABLE], len: 0, overflown: false }
    }
}

impl MacTable {
    /// The addresses.
    pub fn addresses(&self) -> &[Mac] {
        &self.addresses[..self.len]
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        (self.len, self.overflown) = (0, false);
    }

    /// Adds one; without room for it, all of its kind are wanted.
    pub fn add(&mut self, mac: Mac) {
        match self.addresses.get_mut(self.len) {
            Some(place) => (*place, self.len) = (mac, self.len + 1),
            None => self.overflown = true,
        }
    }
}

/// All of it. Made when the device is made or reset, and changed in place: commands are obeyed on an I/O core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RxControl {
    /// Its own address.
    pub mac: Mac,
    /// Bit n: the receive mode of command n is on.
    pub modes: u8,
    /// Addresses of single stations besides its own.
    pub unicast: MacTable,
    /// Addresses of groups.
    pub multicast: MacTable,
    /// VLANs whose frames it wants, if it filters them at all.
    pub vlans: [u64; VLAN_WORDS],
    /// Queue pairs that it uses.
    pub pairs: u16,
    /// Those of [`GUEST_OFFLOADS`] that are switched on.
    pub offloads: u64,
}

impl RxControl {
    /// Of a driver that accepted `features` and has said nothing yet. It receives everything, as with devices that filter
    /// nothing: a driver that wants less says so.
    pub fn of(mac: Mac, features: u64) -> Self {
        RxControl {
            mac,
            modes: 1 << VIRTIO_NET_CTRL_RX_PROMISC,
            unicast: MacTable::default(),
            multicast: MacTable::default(),
            vlans: [0; VLAN_WORDS],
            pairs: 1,
            offloads: features & GUEST_OFFLOADS,
        }
    }

    /// The same as the port wants to hear it, of a driver that accepted `features`.
    pub fn filter(&self, features: u64) -> RxFilter {
        let on = |command: u8| self.modes & 1 << command != 0;
        let mut filter = RxFilter::NOTHING;
        filter.promiscuous = on(VIRTIO_NET_CTRL_RX_PROMISC);
        filter.all_unicast = on(VIRTIO_NET_CTRL_RX_ALLUNI) || self.unicast.overflown;
        filter.all_multicast = on(VIRTIO_NET_CTRL_RX_ALLMULTI) || self.multicast.overflown;
        filter.no_unicast = on(VIRTIO_NET_CTRL_RX_NOUNI);
        filter.no_multicast = on(VIRTIO_NET_CTRL_RX_NOMULTI);
        filter.no_broadcast = on(VIRTIO_NET_CTRL_RX_NOBCAST);
        filter.vlan_filtering = features & VIRTIO_NET_F_CTRL_VLAN != 0;
        filter.add(self.mac);
        let tables = self.unicast.addresses().iter().chain(self.multicast.addresses());
        tables.for_each(|mac| filter.add(*mac));
        for (word, bits) in (0u16..).zip(&self.vlans) {
            (0..64).filter(|bit| bits >> bit & 1 != 0).for_each(|bit| filter.add_vlan(64 * word + bit));
        }
        filter
    }
}

/// Whether it is a unicast address: neither a group's nor zero.
pub fn is_station(mac: &Mac) -> bool {
    mac[0] & 1 == 0 && *mac != [0; 6]
}
