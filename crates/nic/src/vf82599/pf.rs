//! Answers as Linux's ixgbe gives them.

use super::spec::*;
use crate::silicon::{PfState, STANDARD, address, info, words};

/// Most VLANs: the 82599 has 64 filters.
const VLANS: usize = 64;
/// Most further addresses: ixgbevf sends 10.
const MORE: usize = 16;
/// Longest frame of a port that is not set up for long ones.
const SHORT: u32 = 1518;

pub(super) fn answer(pf: &mut PfState, message: &[u32; MAILBOX_WORDS]) -> [u32; MAILBOX_WORDS] {
    let mut reply = *message;
    if message[0] & 0xffff == MESSAGE_RESET {
        pf.begin();
        // What a port for long frames delivers is said by SET_LPE.
        pf.delivers = !pf.jumbo;
        reply = [0; MAILBOX_WORDS];
        reply[0] = MESSAGE_RESET | MESSAGE_NACK;
        if pf.mac_is_set {
            pf.has_address(pf.own_mac);
            reply[0] = MESSAGE_RESET | MESSAGE_ACK;
            reply[1..3].copy_from_slice(&words(pf.own_mac));
        }
        return reply;
    }
    let fine = pf.clear_to_send && accept(pf, message, &mut reply);
    let cts = if pf.clear_to_send { MESSAGE_CTS } else { 0 };
    reply[0] = message[0] | cts | if fine { MESSAGE_ACK } else { MESSAGE_NACK };
    reply
}

fn accept(pf: &mut PfState, message: &[u32; MAILBOX_WORDS], reply: &mut [u32; MAILBOX_WORDS]) -> bool {
    let mac = address(message, 1);
    let valid = mac[0] & 1 == 0 && mac != [0; 6];
    match message[0] & 0xffff {
        MESSAGE_MAC => {
            let fine = valid && (!pf.mac_is_set || mac == pf.mac);
            if fine {
                pf.has_address(mac);
            }
            fine
        }
        MESSAGE_MULTICAST => pf.set_multicast(message),
        MESSAGE_VLAN => pf.set_vlan(message, VLANS),
        MESSAGE_LPE => {
            // One port does not mix functions with long frames and without.
            let long = message[1] > SHORT;
            let fine = if pf.jumbo { pf.api >= API_1_1 } else { !long };
            let fine = fine && pf.set_longest(message);
            if fine && message[1] <= SHORT {
                pf.longest = STANDARD;
            }
            pf.delivers = fine;
            fine
        }
        MESSAGE_MACVLAN => {
            let index = info(message);
            if index > 0 && (pf.mac_is_set || !valid) {
                return false;
            }
            if index <= 1 {
                pf.more.clear();
            }
            if index > 0 {
                let room = pf.more.len() < MORE;
                if room {
                    pf.more.push(mac);
                }
                return room;
            }
            true
        }
        MESSAGE_API => {
            let known = message[1] != 1 && message[1] <= pf.newest_api;
            if known {
                pf.api = message[1];
            }
            known
        }
        MESSAGE_QUEUES if pf.api >= API_1_1 => {
            let queues = u32::from(pf.queues);
            reply[1..5].copy_from_slice(&[queues, queues, 0, 0]);
            true
        }
        // 128 entries of two bits, dealt out in turn.
        MESSAGE_RETA if pf.api >= API_1_2 => {
            let entry = |at: u32| (at % u32::from(pf.queues)) & 3;
            let word = (0..16).fold(0, |word, at| word | entry(at) << (2 * at));
            reply[1..9].fill(word);
            true
        }
        MESSAGE_RSS_KEY if pf.api >= API_1_2 => {
            for (place, bytes) in reply[1..].iter_mut().zip(pf.key.as_chunks().0) {
                *place = u32::from_le_bytes(*bytes);
            }
            true
        }
        MESSAGE_XCAST if pf.api >= API_1_2 => {
            let mode = message[1];
            if mode == XCAST_PROMISC && pf.api < API_1_3 {
                return false;
            }
            pf.promiscuous = mode;
            true
        }
        MESSAGE_LINK if pf.api >= API_1_5 => {
            reply[1] = 1;
            true
        }
        _ => false,
    }
}
