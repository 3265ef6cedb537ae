//! What is left to do for a frame, and what a receiver does itself.

use crate::spec::*;

/// The header that comes with a frame, as `virtio_net_hdr` (virtio 1.3, 5.1.6), in host byte order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offload {
    /// `VIRTIO_NET_HDR_F_*`.
    pub flags: u8,
    /// `VIRTIO_NET_HDR_GSO_*`.
    pub gso: u8,
    /// Bytes of headers. A hint from senders that is not believed; to receivers it is true if `gso` is not none.
    pub hdr_len: u16,
    /// Most payload bytes in a segment.
    pub gso_size: u16,
    /// Where the sum begins, from the frame's first byte.
    pub csum_start: u16,
    /// Where the sum goes, from `csum_start`.
    pub csum_offset: u16,
}

impl Offload {
    /// Nothing to do.
    pub const NONE: Offload =
        Offload { flags: 0, gso: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };

    /// Whether the frame is to be segmented.
    #[inline]
    pub fn is_large(&self) -> bool {
        self.gso != VIRTIO_NET_HDR_GSO_NONE
    }

    /// Whether a checksum is to be completed.
    #[inline]
    pub fn needs_csum(&self) -> bool {
        self.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0
    }

    /// The frame became longer (or shorter) by so much before its network header.
    pub(crate) fn shifted(mut self, by: isize) -> Offload {
        if self.needs_csum() {
            self.csum_start = self.csum_start.saturating_add_signed(by as i16);
        }
        if self.is_large() {
            self.hdr_len = self.hdr_len.saturating_add_signed(by as i16);
        }
        self
    }
}

/// What the receiver's guest has negotiated to take as it is (`VIRTIO_NET_F_GUEST_*`). The rest is done for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct RxOffloads {
    /// Frames whose checksum is not complete, or said to be right (`GUEST_CSUM`). Without it nothing below counts.
    pub checksum: bool,
    /// Large TCP over IPv4 (`GUEST_TSO4`).
    pub tso4: bool,
    /// Large TCP over IPv6 (`GUEST_TSO6`).
    pub tso6: bool,
    /// Large TCP with CWR set (`GUEST_ECN`).
    pub ecn: bool,
    /// Large UDP over IPv4 (`GUEST_USO4`).
    pub uso4: bool,
    /// Large UDP over IPv6 (`GUEST_USO6`).
    pub uso6: bool,
}

impl RxOffloads {
    /// Everything.
    pub const ALL: RxOffloads =
        RxOffloads { checksum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true };

    pub(crate) fn bits(self) -> u8 {
        [self.checksum, self.tso4, self.tso6, self.ecn, self.uso4, self.uso6]
            .iter()
            .enumerate()
            .fold(0, |bits, (at, on)| bits | u8::from(*on) << at)
    }

    #[inline]
    pub(crate) fn of_bits(bits: u8) -> RxOffloads {
        let on = |at: u8| bits >> at & 1 != 0;
        RxOffloads { checksum: on(0), tso4: on(1), tso6: on(2), ecn: on(3), uso4: on(4), uso6: on(5) }
    }

    /// Whether a frame of that type can go whole. UDP does not say in its type over which IP it goes: then both count.
    #[inline]
    pub fn whole(self, gso: u8) -> bool {
        let ecn = self.ecn || gso & VIRTIO_NET_HDR_GSO_ECN == 0;
        match gso & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_NONE => true,
            VIRTIO_NET_HDR_GSO_TCPV4 => self.checksum && self.tso4 && ecn,
            VIRTIO_NET_HDR_GSO_TCPV6 => self.checksum && self.tso6 && ecn,
            VIRTIO_NET_HDR_GSO_UDP_L4 => self.checksum && self.uso4 && self.uso6,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_keep_what_is_taken() {
        for bits in 0..64 {
            assert_eq!(RxOffloads::of_bits(bits).bits(), bits);
        }
    }

    #[test]
    fn what_goes_whole() {
        let no_ecn = RxOffloads { ecn: false, ..RxOffloads::ALL };
        assert!(no_ecn.whole(VIRTIO_NET_HDR_GSO_TCPV4));
        assert!(!no_ecn.whole(VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_ECN));
        assert!(RxOffloads::ALL.whole(VIRTIO_NET_HDR_GSO_TCPV6 | VIRTIO_NET_HDR_GSO_ECN));
        assert!(!RxOffloads { checksum: false, ..RxOffloads::ALL }.whole(VIRTIO_NET_HDR_GSO_TCPV6));
        assert!(!RxOffloads::ALL.whole(VIRTIO_NET_HDR_GSO_UDP));
    }
}
