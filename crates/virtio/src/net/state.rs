//! What of a NIC is saved: what its guest was promised, and what its driver wants.

use std::sync::atomic::Ordering;

use ioplane_network::Mac;
use serde::{Deserialize, Serialize};

use super::Net;
use super::rx_control::{MODES, MacTable, RxControl, TABLE, VLAN_WORDS, is_station};
use super::spec::*;

#[derive(Debug, Serialize, Deserialize)]
struct NetV1 {
    pairs: u16,
    mtu: u16,
    accepted: u64,
    announces: bool,
    rx_control: RxControlV1,
}

#[derive(Debug, Serialize, Deserialize)]
struct RxControlV1 {
    mac: Mac,
    modes: u8,
    unicast: TableV1,
    multicast: TableV1,
    vlans: Vec<u64>,
    pairs: u16,
    offloads: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct TableV1 {
    addresses: Vec<Mac>,
    overflown: bool,
}

impl From<&MacTable> for TableV1 {
    fn from(table: &MacTable) -> Self {
        TableV1 { addresses: table.addresses().to_vec(), overflown: table.overflown }
    }
}

impl TryFrom<TableV1> for MacTable {
    type Error = String;

    fn try_from(saved: TableV1) -> Result<Self, String> {
        if saved.addresses.len() > TABLE {
            return Err(format!("a table of {} addresses: {TABLE} is most", saved.addresses.len()));
        }
        let mut table = MacTable::default();
        saved.addresses.into_iter().for_each(|mac| table.add(mac));
        table.overflown = saved.overflown;
        Ok(table)
    }
}

impl RxControlV1 {
    fn of(rx_control: &RxControl) -> Self {
        RxControlV1 {
            mac: rx_control.mac,
            modes: rx_control.modes,
            unicast: (&rx_control.unicast).into(),
            multicast: (&rx_control.multicast).into(),
            vlans: rx_control.vlans.to_vec(),
            pairs: rx_control.pairs,
            offloads: rx_control.offloads,
        }
    }

    /// Of a driver that accepted `accepted`, at a NIC with `pairs` pairs.
    fn check(self, accepted: u64, pairs: u16) -> Result<RxControl, String> {
        if !is_station(&self.mac) {
            return Err(format!("{:02x?} is not a unicast MAC address", self.mac));
        }
        if self.modes >> MODES != 0 {
            return Err(format!("receive modes {:#x}, which nobody knows", self.modes));
        }
        if self.pairs == 0 || self.pairs > pairs {
            return Err(format!("{} queue pairs in use, this NIC has {pairs}", self.pairs));
        }
        if self.offloads & !(accepted & GUEST_OFFLOADS) != 0 {
            return Err("offloads switched on that the guest was not promised".to_owned());
        }
        let vlans: [u64; VLAN_WORDS] =
            self.vlans.try_into().map_err(|_| "a VLAN filter of another size than 4096 bits".to_owned())?;
        Ok(RxControl {
            mac: self.mac,
            modes: self.modes,
            unicast: self.unicast.try_into()?,
            multicast: self.multicast.try_into()?,
            vlans,
            pairs: self.pairs,
            offloads: self.offloads,
        })
    }
}

pub(super) fn save(net: &Net) -> Vec<u8> {
    let saved = NetV1 {
        pairs: net.options.pairs,
        mtu: net.options.mtu,
        accepted: net.accepted,
        announces: net.shared.status.load(Ordering::Acquire) & VIRTIO_NET_S_ANNOUNCE != 0,
        rx_control: RxControlV1::of(&net.rx_control),
    };
    postcard::to_stdvec(&saved).unwrap_or_default()
}

/// All or nothing. The bytes are hostile.
pub(super) fn load(net: &mut Net, bytes: &[u8]) -> Result<(), String> {
    use crate::device::VirtioDevice;
    let (saved, rest): (NetV1, _) = postcard::take_from_bytes(bytes).map_err(|error| error.to_string())?;
    if !rest.is_empty() {
        return Err(format!("{} bytes too many", rest.len()));
    }
    if saved.pairs != net.options.pairs {
        return Err(format!(
            "this NIC has {} queue pairs, the one saved had {}",
            net.options.pairs, saved.pairs
        ));
    }
    if saved.accepted & VIRTIO_NET_F_MTU != 0 && saved.mtu != net.options.mtu {
        return Err(format!("this NIC has an MTU of {}, the one saved had {}", net.options.mtu, saved.mtu));
    }
    if saved.accepted & !net.features() != 0 {
        return Err("the guest was promised features that this NIC does not have".to_owned());
    }
    let rx_control = saved.rx_control.check(saved.accepted, net.options.pairs)?;
    net.accepted = saved.accepted;
    *net.rx_control = rx_control;
    if saved.announces {
        net.shared.status.fetch_or(VIRTIO_NET_S_ANNOUNCE, Ordering::AcqRel);
    } else {
        net.shared.status.fetch_and(!VIRTIO_NET_S_ANNOUNCE, Ordering::AcqRel);
    }
    net.tell_port();
    Ok(())
}
