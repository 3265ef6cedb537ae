//! What both chips know of Ethernet frames.

use ioplane_network::Mac;

/// Shortest frame on a wire, without its check sequence, in bytes.
pub(crate) const SHORTEST: usize = 60;
/// Bytes of the check sequence.
pub(crate) const FCS: usize = 4;

/// The check sequence, as it follows the frame.
pub(crate) fn fcs(frame: &[u8]) -> [u8; FCS] {
    crc32fast::hash(frame).to_le_bytes()
}

/// What tells switches on the way where an address is now: a reverse request for it (RFC 903), as hypervisors send after a guest has moved.
pub(crate) fn announcement(mac: Mac) -> [u8; SHORTEST] {
    let mut frame = [0; SHORTEST];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // RARP; Ethernet, IPv4, their lengths, "request reverse".
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

/// Whom a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cast {
    Uni,
    Multi,
    Broad,
}

/// Destination of a frame, and its kind. `None`: it is too short to have one.
pub(crate) fn destination(frame: &[u8]) -> Option<(Mac, Cast)> {
    let mac: Mac = *frame.first_chunk()?;
    let cast = match mac[0] & 1 {
        _ if mac == [0xff; 6] => Cast::Broad,
        0 => Cast::Uni,
        _ => Cast::Multi,
    };
    Some((mac, cast))
}

/// Whether `mac` is in a multicast hash of 64 bits: the CRC of the address, its upper six bits (as both data sheets have it).
pub(crate) fn hashed(mac: Mac, hash: &[u8]) -> bool {
    // The check sequence is the CRC bit-reversed and inverted.
    let bit = (!crc32fast::hash(&mac)).reverse_bits() >> 26;
    hash.get(bit as usize / 8).is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Linux's `ether_crc`: bit by bit, most significant first.
    fn ether_crc(bytes: &[u8]) -> u32 {
        let mut crc = !0u32;
        for byte in bytes {
            let mut byte = *byte;
            for _ in 0..8 {
                let odd = (crc >> 31) as u8 ^ byte & 1 != 0;
                crc = crc << 1 ^ if odd { 0x04c1_1db7 } else { 0 };
                byte >>= 1;
            }
        }
        crc
    }

    #[test]
    fn an_announcement_is_a_reverse_request() {
        let mac = [2, 0, 0, 0, 0, 7];
        let frame = announcement(mac);
        assert_eq!(destination(&frame), Some(([0xff; 6], Cast::Broad)));
        assert_eq!(
            (&frame[6..12], &frame[12..14], &frame[20..22]),
            (&mac[..], &[0x80, 0x35][..], &[0, 3][..])
        );
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac[..], &mac[..]));
    }

    #[test]
    fn the_hash_is_that_of_drivers() {
        for last in 0..=255 {
            let mac = [0x33, 0x33, 0xff, 0x12, 7, last];
            let bit = ether_crc(&mac) >> 26;
            let mut hash = [0; 8];
            hash[bit as usize / 8] |= 1 << (bit % 8);
            assert!(hashed(mac, &hash));
            assert!(!hashed(mac, &hash.map(|byte| !byte)));
        }
    }

    #[test]
    fn kinds_of_destinations() {
        assert_eq!(destination(&[0xff; 6]).map(|(_, cast)| cast), Some(Cast::Broad));
        assert_eq!(destination(&[1, 0, 0x5e, 0, 0, 1, 9]).map(|(_, cast)| cast), Some(Cast::Multi));
        assert_eq!(destination(&[2, 0, 0, 0, 0, 1]), Some(([2, 0, 0, 0, 0, 1], Cast::Uni)));
        assert_eq!(destination(&[2; 5]), None);
    }
}
