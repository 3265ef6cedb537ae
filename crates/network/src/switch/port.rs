//! A port, as its owner has it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Switch, SwitchSettings};
use crate::cause::DropReason;
use crate::error::NetworkError;
use crate::fabric::rx::{self, PortRx};
use crate::fabric::tx::{PortTx, Sent};
use crate::fabric::{Budget, FramePool, Place, PortShared, SideReading, Table};
use crate::filter::RxFilter;
use crate::offload::{Offload, RxOffloads};
use crate::spec::ETH_P_RARP;
use crate::vlan::{Membership, Vlan};
use crate::{MOST_PAIRS, Mac};

/// What can be chosen about a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortOptions {
    /// Its name: unique in its switch.
    pub name: String,
    /// The address of the guest behind it: never learned elsewhere, and nobody else may send from it while this port is up.
    /// Two ports may have the same (a guest that migrates within this host): frames go to the one that came up last.
    pub mac: Option<Mac>,
    /// Exchanges no frames with other isolated ports.
    pub isolated: bool,
    /// Its VLANs.
    pub vlan: Vlan,
    /// Queue pairs, 1 to [`MOST_PAIRS`].
    pub pairs: u16,
    /// Leads out of the host: may have many addresses behind it, and gets frames for those that nobody knows.
    pub uplink: bool,
    /// Largest packet that it sends or receives unsegmented, in bytes without the Ethernet header.
    pub mtu: u16,
}

impl PortOptions {
    /// A port with one queue pair, nothing special about it.
    pub fn new(name: &str) -> Self {
        PortOptions {
            name: name.to_owned(),
            mac: None,
            isolated: false,
            vlan: Vlan::All,
            pairs: 1,
            uplink: false,
            mtu: 1500,
        }
    }

    pub(super) fn shared(&self, place: Place, settings: &SwitchSettings) -> Result<PortShared, NetworkError> {
        if !(1..=MOST_PAIRS).contains(&self.pairs) {
            return Err(NetworkError::Pairs { port: self.name.clone(), pairs: self.pairs });
        }
        if let Some(mac) = self.mac.filter(|mac| mac[0] & 1 != 0 || *mac == [0; 6]) {
            return Err(NetworkError::Mac { port: self.name.clone(), mac });
        }
        let vlan = Membership::new(&self.name, &self.vlan)?;
        let pools: std::io::Result<Box<[FramePool]>> =
            (0..self.pairs).map(|_| FramePool::new(settings.buffers)).collect();
        let pools = pools.map_err(|source| NetworkError::Os {
            what: format!("port {}", self.name),
            doing: "reserving memory and an eventfd for its frames (is the limit of open files or of address space reached?)",
            source,
        })?;
        Ok(PortShared::new(
            self.name.clone(),
            place,
            self.mac,
            (self.isolated, self.uplink),
            vlan,
            if self.uplink { u32::MAX } else { settings.addresses_per_port },
            pools,
            (self.mtu, Budget::new(settings.flood_rate, settings.flood_burst)),
        ))
    }
}

/// A port at one moment.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PortReading {
    /// Its name.
    pub name: String,
    /// Its configured address.
    pub mac: Option<Mac>,
    /// Whether its link is up.
    pub up: bool,
    /// Whether it leads out of the host.
    pub uplink: bool,
    /// Whether it is isolated.
    pub isolated: bool,
    /// Queue pairs.
    pub pairs: u16,
    /// Queue pairs that frames are spread over.
    pub active_pairs: u16,
    /// What its guest takes.
    pub takes: RxOffloads,
    /// Addresses that have been learned there.
    pub learned: u32,
    /// Buffers with frames that wait to be received, all pairs together.
    pub waiting: usize,
    /// How often its receivers were woken by an eventfd.
    pub wakes: usize,
    /// From the port's owner into the switch.
    pub sent: SideReading,
    /// From the switch to the port's owner.
    pub received: SideReading,
}

impl PortReading {
    pub(super) fn of(shared: &PortShared, table: &Table) -> Self {
        PortReading {
            name: shared.name.clone(),
            mac: shared.mac,
            up: shared.is_up(),
            uplink: shared.uplink,
            isolated: shared.isolated,
            pairs: shared.pools.len() as u16,
            active_pairs: shared.active(),
            takes: shared.takes(),
            learned: table.owned(shared.place.slot),
            waiting: shared.pools.iter().map(FramePool::waiting).sum(),
            wakes: shared.pools.iter().map(|pool| pool.wakes.load(Ordering::Relaxed)).sum(),
            sent: shared.sent.read(),
            received: shared.received.read(),
        }
    }
}

/// A port of a switch. Dropped, it is unplugged: its frames and buffers are gone, what was learned there is forgotten, port TXs
/// and port RXs that are left of it send and give nothing.
///
/// [`Port::tx`], [`Port::rx`], [`Port::announce`] and [`Port::reading`] allocate: control side. The rest only stores to
/// atomics, and may also be called by the poller of a control queue.
#[derive(Debug)]
pub struct Port {
    switch: Arc<Switch>,
    shared: Arc<PortShared>,
    vlan: Vlan,
}

impl Port {
    pub(super) fn new(switch: Arc<Switch>, shared: Arc<PortShared>, vlan: Vlan) -> Self {
        Port { switch, shared, vlan }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its configured address.
    pub fn mac(&self) -> Option<Mac> {
        self.shared.mac
    }

    /// Its VLANs.
    pub fn vlan(&self) -> &Vlan {
        &self.vlan
    }

    /// Queue pairs that it has room for.
    pub fn pairs(&self) -> u16 {
        self.shared.pools.len() as u16
    }

    /// Its switch.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    /// The sending half of a pair, for one poller.
    ///
    /// # Panics
    /// If the port has no such pair.
    pub fn tx(&self, pair: u16) -> PortTx {
        assert!(pair < self.pairs(), "port {} has {} pairs", self.name(), self.pairs());
        PortTx::new(self.switch.fabric.clone(), self.shared.clone(), pair)
    }

    /// The receiving half of a pair, for one poller. It goes on where the last one ended.
    ///
    /// # Panics
    /// If the port has no such pair.
    pub fn rx(&self, pair: u16) -> PortRx {
        assert!(pair < self.pairs(), "port {} has {} pairs", self.name(), self.pairs());
        PortRx::new(self.shared.clone(), pair)
    }

    /// What the port's guest takes as it is, from the next frame on. At first: nothing.
    pub fn takes(&self, takes: RxOffloads) {
        self.shared.set_takes(takes);
    }

    /// Over how many pairs frames are spread, from the first one on; at first all.
    pub fn set_active_pairs(&self, pairs: u16) {
        self.shared.set_active(pairs);
    }

    /// Largest packet that is not segmented.
    pub fn mtu(&self) -> u16 {
        self.shared.mtu.load(Ordering::Relaxed)
    }

    /// Changes [`Port::mtu`].
    pub fn set_mtu(&self, mtu: u16) {
        self.shared.mtu.store(mtu, Ordering::Relaxed);
    }

    /// The link: at first it is down. While it is down nothing is sent or received; taking it down drops what waits (counted
    /// as [`DropReason::Down`]). A queue that only pauses leaves it up, and finds its frames when it goes on.
    pub fn set_up(&self, up: bool) {
        if up {
            self.shared.raised.store(self.switch.fabric.raise(), Ordering::Relaxed);
        }
        self.shared.up.store(up, Ordering::Release);
        if !up {
            for pair in 0..self.pairs() {
                let mut port_rx = PortRx::to_skip(self.shared.clone(), pair);
                // Those that a port TX is about to hand over come a moment later: bounded, and few.
                while port_rx.front().is_some() {
                    port_rx.skip(DropReason::Down);
                }
            }
        }
    }

    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        self.shared.is_up()
    }

    /// If the link is up: when it came up, by the switch's count.
    pub fn link(&self) -> Option<u64> {
        self.is_up().then(|| self.shared.raised.load(Ordering::Relaxed))
    }

    /// The link is as [`Port::link`] said of another port in whose place this one goes on.
    pub fn restore_link(&self, link: Option<u64>) {
        let Some(raised) = link else { return self.set_up(false) };
        self.switch.fabric.raised_at_least(raised);
        self.shared.raised.store(raised, Ordering::Relaxed);
        self.shared.up.store(true, Ordering::Release);
    }

    /// What the port's guest wants to hear.
    pub fn filter(&self, filter: &RxFilter) {
        self.shared.filter.set(filter);
    }

    /// Tells everybody that `mac` is here now, by a reverse ARP request in the name of the guest, as after a migration
    /// (vhost-user's `VHOST_USER_SEND_RARP`).
    pub fn announce(&self, mac: Mac) -> Sent {
        self.shared.raised.store(self.switch.fabric.raise(), Ordering::Relaxed);
        let mut frame = [0u8; 60];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&mac);
        frame[12..14].copy_from_slice(&ETH_P_RARP.to_be_bytes());
        // Ethernet, IPv4, lengths of their addresses, reverse request (RFC 903); sender and target hardware address.
        frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 3]);
        frame[22..28].copy_from_slice(&mac);
        frame[32..38].copy_from_slice(&mac);
        let mut port_tx = self.tx(0);
        let sent = port_tx.send(&frame, frame.len(), Offload::NONE, &mut |to| {
            to.copy_from_slice(&frame);
            true
        });
        port_tx.flush();
        sent
    }

    /// Its counts.
    pub fn reading(&self) -> PortReading {
        PortReading::of(&self.shared, &self.switch.fabric.table)
    }

    /// Its counts for a port of another process that goes on in its place ([`Port::restore`]): what waits here is lost then, as
    /// [`DropReason::Upgrade`]. Only while neither the pollers of this port nor those of others run.
    pub fn final_counts(&self) -> (SideReading, SideReading) {
        let (sent, mut received) = (self.shared.sent.read(), self.shared.received.read());
        let waiting: u64 = self.shared.pools.iter().map(rx::waiting).sum();
        if waiting > 0 {
            let before = received.dropped(DropReason::Upgrade);
            received.drops.retain(|(cause, _)| *cause != DropReason::Upgrade);
            received.drops.push((DropReason::Upgrade, before + waiting));
        }
        (sent, received)
    }

    /// Goes on counting where another has ended.
    pub fn restore(&self, (sent, received): (&SideReading, &SideReading)) {
        self.shared.sent.restore(sent);
        self.shared.received.restore(received);
    }
}

impl std::ops::Drop for Port {
    fn drop(&mut self) {
        self.shared.up.store(false, Ordering::Release);
        self.switch.unplug(&self.shared);
        self.shared.pools.iter().for_each(FramePool::retire);
    }
}
