//! Where the headers of a frame are. Every length is checked against the bytes that are there.

use crate::spec::*;

/// The network header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Network {
    /// The first type that is no VLAN tag's.
    pub ethertype: u16,
    /// Where what it names begins.
    pub start: usize,
}

/// Most IPv6 extension headers that are walked.
const MOST_EXTENSIONS: usize = 8;

#[inline]
fn short(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// Finds the network header behind at most two VLAN tags.
#[inline]
pub(crate) fn network(frame: &[u8]) -> Option<Network> {
    let mut at = ETH_ADDRESSES;
    for _ in 0..=2 {
        let ethertype = short(frame, at)?;
        if ethertype != ETH_P_8021Q && ethertype != ETH_P_8021AD {
            return Some(Network { ethertype, start: at + 2 });
        }
        at += VLAN_HLEN;
    }
    None
}

/// What an IP packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transport {
    /// Its number.
    pub protocol: u8,
    /// Where it begins.
    pub start: usize,
}

/// The transport header of an IPv4 packet that is no fragment.
#[inline]
pub(crate) fn transport4(frame: &[u8], ip: usize) -> Option<Transport> {
    let header = frame.get(ip..ip + 20)?;
    let length = usize::from(header[0] & 0xf) * 4;
    let whole = u16::from_be_bytes([header[6], header[7]]) & 0x3fff == 0;
    if header[0] >> 4 != 4 || length < 20 || !whole || ip + length > frame.len() {
        return None;
    }
    Some(Transport { protocol: header[9], start: ip + length })
}

/// The transport header of an IPv6 packet that is no fragment, behind its extension headers.
#[inline]
pub(crate) fn transport6(frame: &[u8], ip: usize) -> Option<Transport> {
    let header = frame.get(ip..ip + 40)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let (mut protocol, mut start) = (header[6], ip + 40);
    for _ in 0..=MOST_EXTENSIONS {
        if !matches!(protocol, IPPROTO_HOPOPTS | IPPROTO_ROUTING | IPPROTO_DSTOPTS) {
            return (protocol != IPPROTO_FRAGMENT && start <= frame.len())
                .then_some(Transport { protocol, start });
        }
        let extension = frame.get(start..start + 2)?;
        protocol = extension[0];
        start += (usize::from(extension[1]) + 1) * 8;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_passed() {
        let mut frame = [0u8; 40];
        frame[12..14].copy_from_slice(&ETH_P_IP.to_be_bytes());
        assert_eq!(network(&frame), Some(Network { ethertype: ETH_P_IP, start: 14 }));
        frame[12..22].copy_from_slice(&[0x88, 0xa8, 0, 1, 0x81, 0, 0, 2, 0x86, 0xdd]);
        assert_eq!(network(&frame), Some(Network { ethertype: ETH_P_IPV6, start: 22 }));
        frame[12..26].copy_from_slice(&[0x81, 0, 0, 1, 0x81, 0, 0, 2, 0x81, 0, 0, 3, 8, 0]);
        assert_eq!(network(&frame), None, "three are one too many");
        assert_eq!(network(&frame[..13]), None);
    }

    #[test]
    fn extension_headers_are_walked_and_bounded() {
        let mut frame = vec![0u8; 200];
        frame[0] = 0x60;
        frame[6] = IPPROTO_HOPOPTS;
        frame[40] = IPPROTO_DSTOPTS;
        frame[41] = 1;
        frame[56] = IPPROTO_TCP;
        assert_eq!(transport6(&frame, 0), Some(Transport { protocol: IPPROTO_TCP, start: 64 }));
        frame[56] = IPPROTO_FRAGMENT;
        assert_eq!(transport6(&frame, 0), None);
        // Hop-by-hop options for ever.
        let mut frame = vec![0u8; 4000];
        frame[0] = 0x60;
        assert_eq!(transport6(&frame, 0), None);
        frame[41] = 255;
        assert_eq!(transport6(&frame[..100], 0), None);
    }

    #[test]
    fn fragments_have_no_transport_header() {
        let mut frame = [0u8; 40];
        (frame[0], frame[9]) = (0x45, IPPROTO_UDP);
        assert_eq!(transport4(&frame, 0), Some(Transport { protocol: IPPROTO_UDP, start: 20 }));
        frame[6] = 0x40;
        assert!(transport4(&frame, 0).is_some(), "do not fragment");
        frame[6] = 0x20;
        assert!(transport4(&frame, 0).is_none(), "more fragments");
        (frame[6], frame[0]) = (0, 0x44);
        assert!(transport4(&frame, 0).is_none(), "too short a header");
        frame[0] = 0x4f;
        assert!(transport4(&frame, 0).is_none(), "longer than what is there");
    }
}
