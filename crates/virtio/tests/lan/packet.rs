//! Packets as guests make them, and the sums that they should have: written anew from the RFCs, to check the switch's.

use ioplane_network::Mac;
use ioplane_testkit::driver::net::{NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4};

pub const ETHERNET: usize = 14;
const IP: usize = 20;
const TCP: usize = 20;
/// All headers of [`tcp`].
pub const HEADERS: usize = ETHERNET + IP + TCP;

/// Some frame of `len` bytes that is neither IP nor ARP.
pub fn plain(to: Mac, from: Mac, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5]].concat();
    frame.extend((frame.len()..len).map(|at| (at * 7 + at / 251) as u8));
    frame
}

/// The same with a VLAN tag.
pub fn tagged(to: Mac, from: Mac, vlan: u16, len: usize) -> Vec<u8> {
    let mut frame = plain(to, from, len - 4);
    frame.splice(12..12, [0x81, 0, (vlan >> 8) as u8, vlan as u8]);
    frame
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}

/// The sum over the addresses, the protocol and the length (RFC 793, 3.1).
fn pseudo(ip: &[u8], len: usize) -> u32 {
    sum(&ip[12..20]) + 6 + len as u32
}

/// A TCP segment over IPv4 with these ports, whose checksum is left to the device: the field has the pseudo header's sum.
pub fn tcp(to: Mac, from: Mac, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[8, 0]].concat();
    let total = (IP + TCP + payload.len()) as u16;
    let mut ip = [0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    let checksum = !fold(sum(&ip));
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut segment = vec![0; TCP];
    segment[..2].copy_from_slice(&ports.0.to_be_bytes());
    segment[2..4].copy_from_slice(&ports.1.to_be_bytes());
    segment[4..8].copy_from_slice(&1000u32.to_be_bytes());
    (segment[12], segment[13], segment[14]) = (0x50, 0x18, 0xff);
    let partial = fold(pseudo(&ip, TCP + payload.len()));
    segment[16..18].copy_from_slice(&partial.to_be_bytes());
    frame.extend(ip);
    frame.extend(segment);
    frame.extend(payload);
    frame
}

/// The header that goes with [`tcp`].
pub fn checksum_header() -> NetHeader {
    NetHeader { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..NetHeader::default() }
}

/// The header of a [`tcp`] of any length, to be cut into segments of `size` bytes of payload.
pub fn large_header(size: u16) -> NetHeader {
    NetHeader {
        gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
        gso_size: size,
        hdr_len: HEADERS as u16,
        ..checksum_header()
    }
}

/// Checks every sum and length of a TCP segment over IPv4; its sequence number and its payload.
pub fn open(frame: &[u8]) -> Result<(u32, &[u8]), String> {
    let ip = &frame[ETHERNET..];
    if fold(sum(&ip[..IP])) != 0xffff {
        return Err("the IP header's sum is wrong".into());
    }
    let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    if total != ip.len() {
        return Err(format!("the IP header says {total} bytes, there are {}", ip.len()));
    }
    let segment = &ip[IP..];
    if fold(pseudo(ip, segment.len()) + sum(segment)) != 0xffff {
        return Err("the TCP sum is wrong".into());
    }
    Ok((u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]), &segment[TCP..]))
}

/// Bytes to send.
pub fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 997) as u8).collect()
}
