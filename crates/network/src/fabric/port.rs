//! A port as the data path sees it: shared by its owner, its port RXs, and everybody's port TXs.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use super::budget::Budget;
use super::counts::Counts;
use super::pool::FramePool;
use super::table::Place;
use crate::Mac;
use crate::filter::AtomicRxFilter;
use crate::offload::RxOffloads;
use crate::vlan::Membership;

/// One port. What can change while frames flow is atomic; the rest is fixed when it is plugged.
#[derive(Debug)]
pub(crate) struct PortShared {
    pub name: String,
    pub place: Place,
    pub mac: Option<Mac>,
    pub isolated: bool,
    pub uplink: bool,
    pub vlan: Membership,
    /// Addresses that may be learned here.
    pub share: u32,
    /// One for each queue pair.
    pub pools: Box<[FramePool]>,
    pub up: AtomicBool,
    /// When (by the switch's count) its link came up last, or it announced itself.
    pub raised: AtomicU64,
    takes: AtomicU8,
    active: AtomicU16,
    pub mtu: AtomicU16,
    pub filter: AtomicRxFilter,
    /// For what it floods.
    pub budget: Budget,
    pub sent: CachePadded<Counts>,
    pub received: CachePadded<Counts>,
}

impl PortShared {
    /// With everything that can change as it is at first: the link down, nothing taken but plain frames.
    #[expect(clippy::too_many_arguments)]
    pub fn new(
        name: String,
        place: Place,
        mac: Option<Mac>,
        (isolated, uplink): (bool, bool),
        vlan: Membership,
        share: u32,
        pools: Box<[FramePool]>,
        (mtu, budget): (u16, Budget),
    ) -> Self {
        let active = pools.len() as u16;
        PortShared {
            name,
            place,
            mac,
            isolated,
            uplink,
            vlan,
            share,
            pools,
            up: AtomicBool::new(false),
            raised: AtomicU64::new(0),
            takes: AtomicU8::new(0),
            active: AtomicU16::new(active),
            mtu: AtomicU16::new(mtu),
            filter: AtomicRxFilter::new(),
            budget,
            sent: CachePadded::new(Counts::new()),
            received: CachePadded::new(Counts::new()),
        }
    }

    #[inline]
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn takes(&self) -> RxOffloads {
        RxOffloads::of_bits(self.takes.load(Ordering::Relaxed))
    }

    pub fn set_takes(&self, takes: RxOffloads) {
        self.takes.store(takes.bits(), Ordering::Relaxed);
    }

    /// Pairs that frames are spread over: one at least.
    #[inline]
    pub fn active(&self) -> u16 {
        self.active.load(Ordering::Relaxed)
    }

    pub fn set_active(&self, pairs: u16) {
        self.active.store(pairs.clamp(1, self.pools.len() as u16), Ordering::Relaxed);
    }

    /// Longest frame that is not to be segmented: an Ethernet header and two tags beside the MTU.
    #[inline]
    pub fn longest(&self) -> usize {
        usize::from(self.mtu.load(Ordering::Relaxed)) + 14 + 8
    }
}
