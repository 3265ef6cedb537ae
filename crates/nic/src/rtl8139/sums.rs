//! Checksums of IPv4, UDP and TCP, as the chip makes and checks them.

use ioplane_network::Offload;
use ioplane_network::checksum::Sum;
use ioplane_network::spec::*;

use super::spec::*;

/// Where the headers of an IPv4 packet are in a frame. Lengths are those of the packet: what follows is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Packet {
    /// Where the IPv4 header begins.
    start: usize,
    /// Where what it carries begins, and ends.
    payload: usize,
    end: usize,
    protocol: u8,
    /// It is a piece of a packet: what it carries has no sum of its own.
    fragment: bool,
}

fn word(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

impl Packet {
    /// Of a frame with at most one VLAN tag. `None`: no IPv4, or not whole.
    fn find(frame: &[u8]) -> Option<Self> {
        let tagged = frame.len() >= ETH_HLEN && word(frame, ETH_ADDRESSES) == ETH_P_8021Q;
        let start = ETH_HLEN + if tagged { VLAN_HLEN } else { 0 };
        if frame.len() < start + 20 || word(frame, start - 2) != ETH_P_IP {
            return None;
        }
        let header = usize::from(frame[start] & 0xf) * 4;
        let (payload, end) = (start + header, start + usize::from(word(frame, start + 2)));
        let sound = frame[start] >> 4 == 4 && header >= 20 && payload <= end && end <= frame.len();
        let fragment = word(frame, start + 6) & 0x3fff != 0;
        sound.then_some(Packet { start, payload, end, protocol: frame[start + 9], fragment })
    }

    /// Where the sum of what it carries is, if that is UDP or TCP, whole.
    fn place(&self) -> Option<usize> {
        let (least, offset) = match self.protocol {
            IPPROTO_TCP => (20, 16),
            IPPROTO_UDP => (8, 6),
            _ => return None,
        };
        (!self.fragment && self.end - self.payload >= least).then_some(self.payload + offset)
    }

    fn pseudo(&self, frame: &[u8]) -> Sum {
        let addresses = &frame[self.start + 12..self.start + 20];
        Sum::default().bytes(addresses).word(self.protocol.into()).word((self.end - self.payload) as u16)
    }
}

/// Does to a frame what its first descriptor word asks for, as far as it can be done. Says what is left to the switch, and how many
/// bytes the frame has: a large one ends with its packet.
pub(super) fn fill(frame: &mut [u8], opts1: u32) -> (Offload, usize) {
    let whole = frame.len();
    let nothing = (Offload::NONE, whole);
    if opts1 & (TX_LGSEN | TX_IPCS | TX_UDPCS | TX_TCPCS) == 0 {
        return nothing;
    }
    let Some(packet) = Packet::find(frame) else { return nothing };
    if opts1 & TX_LGSEN != 0 {
        // What else would be sums is the size of a segment here.
        return large(frame, &packet, (opts1 >> TX_MSS_SHIFT & TX_MSS) as u16).unwrap_or(nothing);
    }
    if opts1 & TX_IPCS != 0 {
        let at = packet.start + 10;
        frame[at..at + 2].fill(0);
        let check = Sum::default().bytes(&frame[packet.start..packet.payload]).check();
        frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
    let wanted = match packet.protocol {
        IPPROTO_TCP => opts1 & TX_TCPCS,
        IPPROTO_UDP => opts1 & TX_UDPCS,
        _ => 0,
    };
    if wanted != 0
        && let Some(at) = packet.place()
    {
        frame[at..at + 2].fill(0);
        let sum = packet.pseudo(frame).and(Sum::default().bytes(&frame[packet.payload..packet.end]));
        let check = if packet.protocol == IPPROTO_UDP { sum.check_nonzero() } else { sum.check() };
        frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
    nothing
}

/// A large TCP packet: the switch cuts it up, or a receiver takes it whole.
fn large(frame: &mut [u8], packet: &Packet, mss: u16) -> Option<(Offload, usize)> {
    let at = packet.place().filter(|_| packet.protocol == IPPROTO_TCP && mss > 0)?;
    let headers = packet.payload + usize::from(frame[packet.payload + 12] >> 4) * 4;
    if headers < packet.payload + 20 || headers >= packet.end {
        return None;
    }
    let pseudo = packet.pseudo(frame).partial();
    frame[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
    // CWR is in the first segment only: a type of its own.
    let ecn = if frame[packet.payload + 13] & 0x80 != 0 { VIRTIO_NET_HDR_GSO_ECN } else { 0 };
    let offload = Offload {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso: VIRTIO_NET_HDR_GSO_TCPV4 | ecn,
        hdr_len: headers as u16,
        gso_size: mss,
        csum_start: packet.payload as u16,
        csum_offset: 16,
    };
    Some((offload, packet.end))
}

/// What a receive descriptor says of the sums of a frame: protocol, and what is wrong.
pub(super) fn verdict(frame: &[u8]) -> u32 {
    let Some(packet) = Packet::find(frame) else { return 0 };
    let right = |sum: Sum| sum.check() == 0;
    let ip = if right(Sum::default().bytes(&frame[packet.start..packet.payload])) { 0 } else { RX_IPF };
    let Some(at) = packet.place() else { return RX_PID_IP | ip };
    let (protocol, wrong) = match packet.protocol {
        IPPROTO_TCP => (RX_PID_TCP, RX_TCPF),
        _ => (RX_PID_UDP, RX_UDPF),
    };
    // UDP: zero is no sum.
    let none = packet.protocol == IPPROTO_UDP && word(frame, at) == 0;
    let sum = || packet.pseudo(frame).and(Sum::default().bytes(&frame[packet.payload..packet.end]));
    protocol | ip | if none || right(sum()) { 0 } else { wrong }
}
