//! The header before every frame (5.1.6.1): what a driver may claim there, and what it is told.

use ioplane_network::{DropReason, Offload, RxOffloads};

use super::spec::*;
use crate::spec::feature::VIRTIO_F_VERSION_1;

/// Bytes of an Ethernet header: no checksum begins before its end.
const ETHERNET: u16 = 14;

/// Bytes of the header for a driver that accepted `features`.
pub fn header_bytes(features: u64) -> usize {
    if features & (VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF) != 0 {
        HEADER_BYTES
    } else {
        LEGACY_HEADER_BYTES
    }
}

/// What the device takes from a driver that accepted `features`: what that may claim.
pub fn taken_from_driver(features: u64) -> RxOffloads {
    let has = |bit: u64| features & bit != 0;
    RxOffloads {
        checksum: has(VIRTIO_NET_F_CSUM),
        tso4: has(VIRTIO_NET_F_HOST_TSO4),
        tso6: has(VIRTIO_NET_F_HOST_TSO6),
        ecn: has(VIRTIO_NET_F_HOST_ECN),
        uso4: has(VIRTIO_NET_F_HOST_USO),
        uso6: has(VIRTIO_NET_F_HOST_USO),
    }
}

/// What a driver takes, with those of [`GUEST_OFFLOADS`] that are switched on.
pub fn taken_by_driver(offloads: u64) -> RxOffloads {
    let has = |bit: u64| offloads & bit != 0;
    RxOffloads {
        checksum: has(VIRTIO_NET_F_GUEST_CSUM),
        tso4: has(VIRTIO_NET_F_GUEST_TSO4),
        tso6: has(VIRTIO_NET_F_GUEST_TSO6),
        ecn: has(VIRTIO_NET_F_GUEST_ECN),
        uso4: has(VIRTIO_NET_F_GUEST_USO4),
        uso6: has(VIRTIO_NET_F_GUEST_USO6),
    }
}

/// Whether what is left to do for a frame is among what is taken.
#[inline]
pub fn covers(takes: &RxOffloads, offload: &Offload) -> bool {
    takes.whole(offload.gso) && (takes.checksum || !offload.needs_csum())
}

/// Reads the header of a frame of `len` bytes. A claim that its driver may not make, or that the frame cannot keep, is a
/// lie: the frame is dropped. What the claims mean is checked here by numbers alone; whether the protocol is the one
/// claimed, whoever carries them out has to see for himself.
#[inline]
pub fn parse(header: &[u8; HEADER_BYTES], len: usize, may: &RxOffloads) -> Result<Offload, DropReason> {
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    // 5.1.6.2.2: flags that are not known are ignored; only a device says that a checksum is valid.
    let flags = header[0] & VIRTIO_NET_HDR_F_NEEDS_CSUM;
    let gso = header[1];
    if flags == 0 && gso == VIRTIO_NET_HDR_GSO_NONE {
        return Ok(Offload::NONE);
    }
    let kind = gso & !VIRTIO_NET_HDR_GSO_ECN;
    let tcp = matches!(kind, VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_TCPV6);
    let mut offload = Offload {
        flags,
        gso,
        hdr_len: word(2),
        gso_size: word(4),
        csum_start: word(6),
        csum_offset: word(8),
    };
    if flags == 0 || (gso != kind && !tcp) || !covers(may, &offload) {
        return Err(DropReason::Offload);
    }
    let start = usize::from(offload.csum_start);
    let transport = match kind {
        VIRTIO_NET_HDR_GSO_NONE => usize::from(offload.csum_offset) + 2,
        _ if tcp => 20,
        _ => 8,
    };
    if offload.csum_start < ETHERNET || start + transport > len || usize::from(offload.hdr_len) > len {
        return Err(DropReason::Offload);
    }
    if gso == VIRTIO_NET_HDR_GSO_NONE {
        (offload.hdr_len, offload.gso_size) = (0, 0);
    } else {
        // Where TCP and UDP have their checksums, and nowhere else.
        let field = if tcp { 16 } else { 6 };
        if offload.gso_size == 0 || offload.csum_offset != field {
            return Err(DropReason::Offload);
        }
    }
    Ok(offload)
}

/// The header of a frame for a driver, in `buffers` buffers.
#[inline]
pub fn emit(offload: &Offload, buffers: u16) -> [u8; HEADER_BYTES] {
    let Offload { flags, gso, hdr_len, gso_size, csum_start, csum_offset } = *offload;
    // Put together in registers: bytes that have just been stored one by one cannot be copied as one word before they
    // have left the processor.
    let first = u64::from(flags)
        | u64::from(gso) << 8
        | u64::from(hdr_len) << 16
        | u64::from(gso_size) << 32
        | u64::from(csum_start) << 48;
    let second = u32::from(csum_offset) | u32::from(buffers) << 16;
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: RxOffloads = RxOffloads::ALL;
    const NOTHING: RxOffloads =
        RxOffloads { checksum: false, tso4: false, tso6: false, ecn: false, uso4: false, uso6: false };

    fn tso4() -> Offload {
        Offload { flags: 1, gso: 1, hdr_len: 54, gso_size: 1448, csum_start: 34, csum_offset: 16 }
    }

    fn read(offload: Offload, len: usize, may: &RxOffloads) -> Result<Offload, DropReason> {
        parse(&emit(&offload, 0), len, may)
    }

    #[test]
    fn honest_headers_come_through() {
        let none = Offload::NONE;
        assert_eq!(read(none, 60, &NOTHING), Ok(none));
        assert_eq!(read(tso4(), 4000, &ALL), Ok(tso4()));
        let sum = Offload { flags: 1, csum_start: 34, csum_offset: 6, ..none };
        assert_eq!(read(sum, 42, &ALL), Ok(sum));
        assert_eq!(read(Offload { gso: 0x81, ..tso4() }, 4000, &ALL), Ok(Offload { gso: 0x81, ..tso4() }));
        // What only a device says, and what nobody knows, is ignored.
        assert_eq!(read(Offload { flags: 0xfe, ..none }, 60, &NOTHING), Ok(none));
    }

    #[test]
    fn lies_are_found() {
        let sum = Offload { flags: 1, csum_start: 34, csum_offset: 6, ..Offload::NONE };
        let lies = [
            (sum, 41, ALL),
            (Offload { csum_start: 13, ..sum }, 60, ALL),
            (Offload { csum_start: u16::MAX, csum_offset: u16::MAX, ..sum }, 65000, ALL),
            (sum, 60, RxOffloads { checksum: false, ..ALL }),
            (Offload { gso_size: 0, ..tso4() }, 4000, ALL),
            (Offload { flags: 0, ..tso4() }, 4000, ALL),
            (Offload { csum_offset: 6, ..tso4() }, 4000, ALL),
            (Offload { hdr_len: 4001, ..tso4() }, 4000, ALL),
            (tso4(), 53, ALL),
            (tso4(), 4000, RxOffloads { tso4: false, ..ALL }),
            (Offload { gso: 0x81, ..tso4() }, 4000, RxOffloads { ecn: false, ..ALL }),
            (Offload { gso: 3, ..tso4() }, 4000, ALL),
            (Offload { gso: 0x80, ..tso4() }, 4000, ALL),
            (Offload { gso: 0x85, csum_offset: 6, ..tso4() }, 4000, ALL),
        ];
        for (offload, len, may) in lies {
            assert_eq!(read(offload, len, &may), Err(DropReason::Offload), "{offload:?} of {len} bytes");
        }
    }

    #[test]
    fn large_frames_need_checksums() {
        let offload = Offload { flags: 1, gso: 1, ..Offload::NONE };
        assert!(!covers(&taken_from_driver(VIRTIO_NET_F_HOST_TSO4), &offload));
        assert!(covers(&taken_from_driver(VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_CSUM), &offload));
        assert!(!covers(&taken_by_driver(VIRTIO_NET_F_GUEST_TSO4), &offload));
        assert!(covers(&taken_by_driver(VIRTIO_NET_F_GUEST_TSO4 | VIRTIO_NET_F_GUEST_CSUM), &offload));
        assert_eq!((header_bytes(0), header_bytes(VIRTIO_F_VERSION_1)), (10, 12));
    }
}
