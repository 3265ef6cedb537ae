//! The mailbox between the function and its PF, and a PF that answers as Linux's igb does: it takes a message in one step and answers in
//! the next.

use std::collections::{BTreeSet, VecDeque};

use super::SiliconViolation;
use super::spec::*;

/// Most VLANs: the 82576 has 32 filters.
const VLANS: usize = 32;
/// Longest frame that the port takes.
const LONGEST: u32 = 9728;
/// Longest frame without LPE.
const STANDARD: u32 = 1522;

/// What the PF keeps of its VF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfState {
    /// The address after a reset.
    pub own_mac: [u8; 6],
    /// The address that frames are delivered to.
    pub mac: [u8; 6],
    /// An administrator has set the address: the VF may not change it.
    pub mac_is_set: bool,
    /// Hashes of multicast addresses.
    pub multicast: Vec<u16>,
    /// VLANs.
    pub vlans: BTreeSet<u16>,
    /// Longest frame.
    pub longest: u32,
    /// Flags of the last promiscuity message.
    pub promiscuous: u32,
    /// The VF has said RESET since it was reset.
    pub clear_to_send: bool,
    /// Messages taken, for tests that count them.
    pub taken: u64,
}

impl PfState {
    fn new(mac: [u8; 6]) -> PfState {
        PfState {
            own_mac: mac,
            mac,
            mac_is_set: false,
            multicast: Vec::new(),
            vlans: BTreeSet::new(),
            longest: STANDARD,
            promiscuous: 0,
            clear_to_send: false,
            taken: 0,
        }
    }

    fn reset(&mut self) {
        let fresh = PfState::new(self.own_mac);
        *self = PfState { mac_is_set: self.mac_is_set, taken: self.taken, ..fresh };
    }

    fn answer(&mut self, message: &[u32; MAILBOX_WORDS]) -> [u32; MAILBOX_WORDS] {
        let mut reply = [0; MAILBOX_WORDS];
        let code = message[0] & 0xffff;
        let info = (message[0] & MESSAGE_INFO) >> 16;
        let fine = match code {
            MESSAGE_RESET => {
                self.reset();
                self.clear_to_send = true;
                let [a, b, c, d, e, f] = self.mac;
                reply[1] = u32::from_le_bytes([a, b, c, d]);
                reply[2] = u32::from_le_bytes([e, f, 0, 0]);
                true
            }
            _ if !self.clear_to_send => false,
            MESSAGE_MAC if !self.mac_is_set => {
                let [a, b, c, d] = message[1].to_le_bytes();
                let [e, f, ..] = message[2].to_le_bytes();
                self.mac = [a, b, c, d, e, f];
                true
            }
            MESSAGE_MULTICAST => {
                let hashes = message[1..].iter().flat_map(|word| [*word as u16, (word >> 16) as u16]);
                self.multicast = hashes.take(info as usize).collect();
                info <= 30
            }
            MESSAGE_VLAN => {
                let vlan = (message[1] & 0xfff) as u16;
                if info == 0 {
                    self.vlans.remove(&vlan);
                }
                info == 0 || self.vlans.contains(&vlan) || {
                    let room = self.vlans.len() < VLANS;
                    room && self.vlans.insert(vlan)
                }
            }
            MESSAGE_LPE if (64..=LONGEST).contains(&message[1]) => {
                self.longest = message[1];
                true
            }
            MESSAGE_PROMISC => {
                self.promiscuous = info;
                true
            }
            _ => false,
        };
        let cts = if self.clear_to_send { MESSAGE_CTS } else { 0 };
        reply[0] = message[0] | cts | if fine { MESSAGE_ACK } else { MESSAGE_NACK };
        reply
    }
}

/// Where a message of the VF is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    None,
    /// Announced, not yet taken.
    Announced,
    /// Taken; the answer is to come.
    Taken,
}

/// The mailbox.
#[derive(Debug)]
pub(super) struct Mailbox {
    memory: [u32; MAILBOX_WORDS],
    bits: u32,
    request: Request,
    message: [u32; MAILBOX_WORDS],
    /// What the PF says by itself.
    to_say: VecDeque<u32>,
    pub(super) pf: PfState,
}

impl Mailbox {
    pub(super) fn new(mac: [u8; 6]) -> Mailbox {
        Mailbox {
            memory: [0; MAILBOX_WORDS],
            bits: RSTD,
            request: Request::None,
            message: [0; MAILBOX_WORDS],
            to_say: VecDeque::new(),
            pf: PfState::new(mac),
        }
    }

    /// The function begins to reset.
    pub(super) fn reset(&mut self) {
        let to_say = std::mem::take(&mut self.to_say);
        let mut pf = self.pf.clone();
        pf.reset();
        *self = Mailbox { bits: 0, to_say, pf, ..Mailbox::new(self.pf.own_mac) };
    }

    /// The reset has ended.
    pub(super) fn ready(&mut self) {
        self.bits |= RSTD;
    }

    pub(super) fn say(&mut self, word: u32) {
        self.to_say.push_back(word);
    }

    pub(super) fn read(&mut self, offset: u64) -> u32 {
        if offset == V2PMAILBOX {
            let value = self.bits;
            self.bits &= !READ_TO_CLEAR;
            return value;
        }
        self.memory[((offset - VMBMEM) / 4) as usize % MAILBOX_WORDS]
    }

    pub(super) fn write(&mut self, offset: u64, value: u32) -> Result<(), SiliconViolation> {
        let held = self.bits & VFU != 0;
        if offset != V2PMAILBOX {
            if !held {
                return Err(SiliconViolation::MailboxNotHeld { offset });
            }
            self.memory[((offset - VMBMEM) / 4) as usize % MAILBOX_WORDS] = value;
            return Ok(());
        }
        if value & REQ != 0 {
            if !held {
                return Err(SiliconViolation::MailboxNotHeld { offset });
            }
            if self.request != Request::None {
                return Err(SiliconViolation::RequestOnRequest);
            }
            self.message = self.memory;
            self.request = Request::Announced;
        }
        if value & VFU != 0 && self.bits & PFU == 0 {
            self.bits |= VFU;
        } else {
            self.bits &= !VFU;
        }
        Ok(())
    }

    /// What the PF does in one step. Whether the function is to be interrupted.
    pub(super) fn step(&mut self) -> bool {
        // Whoever holds the mailbox keeps the other out.
        if self.bits & VFU != 0 {
            return false;
        }
        match self.request {
            Request::Announced => {
                self.request = Request::Taken;
                self.pf.taken += 1;
                self.bits |= PFACK;
                true
            }
            Request::Taken => {
                self.memory = self.pf.answer(&self.message);
                self.request = Request::None;
                self.bits |= PFSTS;
                true
            }
            Request::None if self.bits & PFSTS == 0 => {
                let Some(word) = self.to_say.pop_front() else { return false };
                self.memory = [0; MAILBOX_WORDS];
                self.memory[0] = word;
                self.bits |= PFSTS;
                true
            }
            Request::None => false,
        }
    }
}
