//! The frames: what they look like, and the stamp by which each is known again.
//!
//! ```text
//!   0                12               26     46         54       56               64
//!   | virtio_net_hdr | Ethernet       | IPv4 | UDP      |        | stamp, 8 bytes | filling
//!   | virtio_net_hdr | Ethernet       | IPv4 | TCP to 66         | 72: stamp      | filling       (TSO)
//! ```
//!
//! Each buffer of each transmit queue is a flow of its own (its source port), so that frames are spread over the queues of
//! a receiver that has several, and those of one flow stay in their order.

use ioplane_memory::Window;

/// Bytes of `struct virtio_net_hdr_v1` (virtio 1.3, 5.1.6).
pub const HEADER: u32 = 12;
/// Where `num_buffers` lies in it.
pub const NUM_BUFFERS: usize = 10;
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
/// Payload of each frame on the wire that a large one stands for: TCP with time stamps in an MTU of 1500, less its options.
const MSS: u16 = 1448;
const TCP_HEADERS: u16 = 54;
/// Where a large frame has its TCP checksum, from the header's first byte on.
pub const TCP_CHECKSUM: std::ops::Range<usize> = 62..64;
const UDP_HEADERS: u16 = 42;
/// Source port of the first flow.
const FIRST_PORT: u16 = 0x3000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// 64 bytes, without checksum.
    Small,
    /// 130 bytes: 64 of payload behind the headers of TCP with time stamps.
    Segment,
    /// 1500 bytes.
    Mtu,
    /// 64 KiB less what TCP leaves of it: 45 segments of 1448 bytes in one frame.
    Large,
}

impl Size {
    /// Those of `network`.
    pub const ALL: [Size; 3] = [Size::Small, Size::Mtu, Size::Large];

    /// Bytes from the first address to the last of the payload.
    pub fn bytes(self) -> u32 {
        match self {
            Size::Small => 64,
            Size::Segment => 130,
            Size::Mtu => 1500,
            Size::Large => u32::from(TCP_HEADERS) + 45 * u32::from(MSS),
        }
    }

    /// As in the keys of the figures.
    pub fn name(self) -> &'static str {
        match self {
            Size::Small => "64",
            Size::Segment => "130",
            Size::Mtu => "1500",
            Size::Large => "64k",
        }
    }

    /// Where the stamp lies, from the header's first byte on: a multiple of eight.
    #[inline]
    pub fn stamp_at(self) -> usize {
        if self == Size::Large { 72 } else { 56 }
    }
}

/// Header and frame from `from` to `to`, whole; the stamp is zero and the filling depends on `salt`.
pub fn template(size: Size, from: [u8; 6], to: [u8; 6], flow: u16, salt: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..HEADER + size.bytes()).map(|at| (at as u8).wrapping_mul(31) ^ salt).collect();
    let large = size == Size::Large;
    let headers = if large { TCP_HEADERS } else { UDP_HEADERS };
    bytes[..usize::from(HEADER as u16 + headers)].fill(0);
    let frame = &mut bytes[HEADER as usize..];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&[8, 0]);
    let pseudo = ipv4(frame, if large { 6 } else { 17 });
    frame[34..36].copy_from_slice(&(FIRST_PORT + flow).to_be_bytes());
    frame[36..38].copy_from_slice(&5001u16.to_be_bytes());
    if large {
        // Twenty bytes of header; ACK and PSH; a window. The checksum is left to whoever segments it: the field holds the
        // sum of the pseudo-header.
        (frame[46], frame[47], frame[48]) = (0x50, 0x18, 0xff);
        frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
        let header = &mut bytes[..HEADER as usize];
        (header[0], header[1]) = (NEEDS_CSUM, GSO_TCPV4);
        header[2..4].copy_from_slice(&TCP_HEADERS.to_le_bytes());
        header[4..6].copy_from_slice(&MSS.to_le_bytes());
        header[6..8].copy_from_slice(&34u16.to_le_bytes());
        header[8..10].copy_from_slice(&16u16.to_le_bytes());
    } else {
        // No checksum (zero), as UDP over IPv4 may.
        let len = frame.len() as u16 - 34;
        frame[38..40].copy_from_slice(&len.to_be_bytes());
    }
    let at = size.stamp_at();
    bytes[at..at + 8].fill(0);
    bytes
}

/// The flow of a frame with its header before it.
pub fn flow(bytes: &[u8]) -> u16 {
    let port = bytes.get(46..48).map_or(0, |port| u16::from_be_bytes([port[0], port[1]]));
    port.wrapping_sub(FIRST_PORT)
}

/// An IPv4 header for the rest of `frame`; returns the sum of the pseudo-header.
fn ipv4(frame: &mut [u8], protocol: u8) -> u16 {
    let len = (frame.len() - 14) as u16;
    let ip = &mut frame[14..34];
    (ip[0], ip[8], ip[9]) = (0x45, 64, protocol);
    ip[2..4].copy_from_slice(&len.to_be_bytes());
    // Do not fragment.
    ip[6] = 0x40;
    ip[12..16].copy_from_slice(&[10, 0, 0, 1]);
    ip[16..20].copy_from_slice(&[10, 0, 0, 2]);
    let sum = !ones(ip.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])));
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ones([0x0a00, 1, 0x0a00, 2, protocol.into(), len - 20])
}

/// The ones' complement sum.
fn ones(words: impl IntoIterator<Item = u16>) -> u16 {
    let mut sum: u32 = words.into_iter().map(u32::from).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The flow of a frame, and the how manyth it was of its sender's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Its flow; of several senders with one each, which of them.
    pub flow: u16,
    /// From one on.
    pub number: u64,
}

impl Stamp {
    /// Writes it into the frame whose header begins at `at`.
    #[inline]
    pub fn put(self, buffers: &Window, at: usize, size: Size) {
        buffers.put_u64(at + size.stamp_at(), u64::from(self.flow) << 48 | self.number);
    }

    #[inline]
    pub fn load(buffers: &Window, at: usize, size: Size) -> Self {
        let word = buffers.load_u64(at + size.stamp_at());
        Stamp { flow: (word >> 48) as u16, number: word & 0xffff_ffff_ffff }
    }
}
