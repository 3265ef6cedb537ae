//! Which flow a frame belongs to: both directions of a connection are one.

use crate::headers::{network, transport4, transport6};
use crate::spec::*;

/// A number that all frames of a flow share, in both directions: of addresses and ports of TCP and UDP, of addresses of
/// other IP packets and fragments, else of the MAC addresses. `head` are a frame's first bytes, 14 or more.
#[inline]
pub(crate) fn flow(head: &[u8]) -> u32 {
    ip(head).unwrap_or_else(|| {
        let (to, from) = (word(&head[..6]), word(&head[6..12]));
        mix(to ^ from, 0)
    })
}

#[inline]
fn ip(head: &[u8]) -> Option<u32> {
    let network = network(head)?;
    let at = network.start;
    let (addresses, transport) = match network.ethertype {
        ETH_P_IP => {
            let both = head.get(at + 12..at + 20)?;
            (word(&both[..4]) ^ word(&both[4..]), transport4(head, at))
        }
        ETH_P_IPV6 => {
            let (from, to) = head.get(at + 8..at + 40)?.split_at(16);
            let fold = |address: &[u8]| word(&address[..8]) ^ word(&address[8..]).rotate_left(29);
            (fold(from) ^ fold(to), transport6(head, at))
        }
        _ => return None,
    };
    let ports = transport
        .filter(|transport| matches!(transport.protocol, IPPROTO_TCP | IPPROTO_UDP))
        .and_then(|transport| head.get(transport.start..transport.start + 4))
        .map_or(0, |ports| word(&ports[..2]) ^ word(&ports[2..]));
    Some(mix(addresses, ports))
}

/// At most eight bytes as a number.
#[inline]
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

#[inline]
fn mix(addresses: u64, ports: u64) -> u32 {
    let word = (addresses ^ ports.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

/// One of `pairs`, by a flow's number.
#[inline]
pub(crate) fn steer(flow: u32, pairs: u16) -> u16 {
    ((u64::from(flow) * u64::from(pairs)) >> 32) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(from: u8, to: u8, ports: (u16, u16)) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0, 0x45];
        frame.resize(64, 0);
        frame[23] = IPPROTO_UDP;
        frame[29] = from;
        frame[33] = to;
        frame[34..36].copy_from_slice(&ports.0.to_be_bytes());
        frame[36..38].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    #[test]
    fn both_directions_are_one_flow() {
        assert_eq!(flow(&udp(1, 2, (1000, 53))), flow(&udp(2, 1, (53, 1000))));
        assert_ne!(flow(&udp(1, 2, (1000, 53))), flow(&udp(1, 2, (1001, 53))));
    }

    #[test]
    fn fragments_stay_with_their_addresses() {
        let (mut one, mut other) = (udp(1, 2, (1000, 53)), udp(1, 2, (7, 9)));
        (one[20], other[20]) = (0x20, 0x20);
        assert_eq!(flow(&one), flow(&other));
    }

    #[test]
    fn flows_spread() {
        let mut count = [0u32; 8];
        for port in 0..8000 {
            count[usize::from(steer(flow(&udp(1, 2, (port, 80))), 8))] += 1;
        }
        assert!(count.iter().all(|n| (800..1200).contains(n)), "{count:?}");
    }

    #[test]
    fn short_heads_are_flows_by_address() {
        let frame = udp(1, 2, (1, 2));
        for len in 14..frame.len() {
            flow(&frame[..len]);
        }
    }
}
