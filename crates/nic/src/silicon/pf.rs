//! What a physical function keeps of a virtual one, and the answers that Linux's igb and ixgbe give alike.

use std::collections::BTreeSet;

use super::rss::KEY;
use super::spec::*;

/// Longest frame that a port takes.
const LONGEST: u32 = 9728;
/// Longest frame without LPE.
pub(crate) const STANDARD: u32 = 1522;

/// Messages 1.4, as Linux's ixgbe has known since 5.1.
const NEWEST: u32 = 5;

/// What the PF keeps of its VF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfState {
    /// The address after a reset.
    pub own_mac: [u8; 6],
    /// The address that frames are delivered to.
    pub mac: [u8; 6],
    /// The VF knows it: it was told with the answer to RESET, or has set it since.
    pub mac_is_known: bool,
    /// An administrator has set the address: the VF may not change it.
    pub mac_is_set: bool,
    /// Hashes of multicast addresses.
    pub multicast: Vec<u16>,
    /// VLANs.
    pub vlans: BTreeSet<u16>,
    /// More addresses, by MACVLAN.
    pub more: Vec<[u8; 6]>,
    /// Longest frame.
    pub longest: u32,
    /// Flags, or the mode, of the last promiscuity message.
    pub promiscuous: u32,
    /// Of the hash that shares frames out.
    pub key: [u8; KEY],
    /// The version of the messages that was agreed upon.
    pub api: u32,
    /// The newest version that the PF knows.
    pub newest_api: u32,
    /// Queues that the VF has.
    pub queues: u8,
    /// The port is set up for long frames.
    pub jumbo: bool,
    /// Frames are delivered.
    pub delivers: bool,
    /// The VF has said RESET since it was reset.
    pub clear_to_send: bool,
    /// Messages taken, for tests that count them.
    pub taken: u64,
}

impl PfState {
    pub(crate) fn new(mac: [u8; 6], queues: u8) -> PfState {
        PfState {
            own_mac: mac,
            mac,
            mac_is_known: false,
            mac_is_set: false,
            multicast: Vec::new(),
            vlans: BTreeSet::new(),
            more: Vec::new(),
            longest: STANDARD,
            promiscuous: 0,
            key: super::rss::key(mac),
            api: 0,
            newest_api: NEWEST,
            queues,
            jumbo: true,
            delivers: false,
            clear_to_send: false,
            taken: 0,
        }
    }

    pub(crate) fn reset(&mut self) {
        let fresh = PfState::new(self.own_mac, self.queues);
        *self = PfState {
            mac_is_set: self.mac_is_set,
            key: self.key,
            newest_api: self.newest_api,
            jumbo: self.jumbo,
            taken: self.taken,
            ..fresh
        };
    }

    /// RESET: from here on it is listened to.
    pub(crate) fn begin(&mut self) {
        self.reset();
        (self.clear_to_send, self.delivers) = (true, true);
    }

    /// The VF has this address from now on, and knows it.
    pub(crate) fn has_address(&mut self, mac: [u8; 6]) {
        (self.mac, self.mac_is_known) = (mac, true);
    }

    /// Whether a frame to this address is for the VF, without promiscuity.
    pub(crate) fn wants(&self, to: &[u8]) -> bool {
        let group = to.first().is_some_and(|byte| byte & 1 == 1);
        to == self.mac
            || to == [0xff; 6]
            || group && !self.multicast.is_empty()
            || self.more.iter().any(|more| to == more)
    }

    /// Whether a frame with this VLAN tag is: without one, or only for a priority, always.
    pub(crate) fn is_member(&self, tag: Option<u16>) -> bool {
        tag.is_none_or(|tag| tag & 0xfff == 0 || self.vlans.contains(&(tag & 0xfff)))
    }

    /// SET_MULTICAST.
    pub(crate) fn set_multicast(&mut self, message: &[u32; MAILBOX_WORDS]) -> bool {
        let hashes = message[1..].iter().flat_map(|word| [*word as u16, (word >> 16) as u16]);
        self.multicast = hashes.take(info(message) as usize).collect();
        info(message) <= 30
    }

    /// SET_VLAN, where the port has so many filters.
    pub(crate) fn set_vlan(&mut self, message: &[u32; MAILBOX_WORDS], filters: usize) -> bool {
        let vlan = (message[1] & 0xfff) as u16;
        if info(message) == 0 {
            self.vlans.remove(&vlan);
            return true;
        }
        self.vlans.contains(&vlan) || self.vlans.len() < filters && self.vlans.insert(vlan)
    }

    /// SET_LPE.
    pub(crate) fn set_longest(&mut self, message: &[u32; MAILBOX_WORDS]) -> bool {
        let fits = (64..=LONGEST).contains(&message[1]);
        if fits {
            self.longest = message[1];
        }
        fits
    }
}

/// What a message adds to its kind, in its first word.
pub(crate) fn info(message: &[u32; MAILBOX_WORDS]) -> u32 {
    (message[0] & MESSAGE_INFO) >> 16
}

/// An address in the two words from `at` on.
pub(crate) fn address(message: &[u32; MAILBOX_WORDS], at: usize) -> [u8; 6] {
    let [a, b, c, d] = message[at].to_le_bytes();
    let [e, f, ..] = message[at + 1].to_le_bytes();
    [a, b, c, d, e, f]
}

/// The two words of an address.
pub(crate) fn words([a, b, c, d, e, f]: [u8; 6]) -> [u32; 2] {
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])]
}
