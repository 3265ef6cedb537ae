//! The frames: what they look like, and the stamp by which each is known again.
//!
//! ```text
//!   0          12                   26 (64, 1500)   32               40
//!   | virtio_net_hdr | Ethernet 0x88b5 | zeros       | stamp, 8 bytes | filling
//!   | virtio_net_hdr | Ethernet, IPv4, TCP to 66     | 72: stamp      | filling          (TSO)
//! ```

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
/// Ethernet type for local experiments (IEEE 802, 0x88b5).
const LOCAL: [u8; 2] = [0x88, 0xb5];

/// What is sent.
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
        if self == Size::Large { 72 } else { 32 }
    }
}

/// Header and frame from `from` to `to`, whole; the stamp is zero and the filling depends on `salt`.
pub fn template(size: Size, from: [u8; 6], to: [u8; 6], salt: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..HEADER + size.bytes()).map(|at| (at as u8).wrapping_mul(31) ^ salt).collect();
    bytes[..HEADER as usize].fill(0);
    let frame = &mut bytes[HEADER as usize..];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&LOCAL);
    if size == Size::Large {
        tcp(frame);
        let header = &mut bytes[..HEADER as usize];
        (header[0], header[1]) = (NEEDS_CSUM, GSO_TCPV4);
        header[2..4].copy_from_slice(&TCP_HEADERS.to_le_bytes());
        header[4..6].copy_from_slice(&MSS.to_le_bytes());
        header[6..8].copy_from_slice(&34u16.to_le_bytes());
        header[8..10].copy_from_slice(&16u16.to_le_bytes());
    }
    let at = size.stamp_at();
    bytes[at..at + 8].fill(0);
    bytes
}

/// IPv4 and TCP headers for the whole of `frame`, the checksum left to whoever segments it: the field holds the sum of
/// the pseudo-header.
fn tcp(frame: &mut [u8]) {
    let ip_len = (frame.len() - 14) as u16;
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..54].fill(0);
    let ip = &mut frame[14..34];
    (ip[0], ip[8], ip[9]) = (0x45, 64, 6);
    ip[2..4].copy_from_slice(&ip_len.to_be_bytes());
    // Do not fragment.
    ip[6] = 0x40;
    ip[12..16].copy_from_slice(&[10, 0, 0, 1]);
    ip[16..20].copy_from_slice(&[10, 0, 0, 2]);
    let sum = !ones(ip.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])));
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let pseudo = ones([0x0a00, 1, 0x0a00, 2, 6, ip_len - 20]);
    let tcp = &mut frame[34..54];
    tcp[..4].copy_from_slice(&[0x30, 0x39, 0x13, 0x89]);
    // Twenty bytes of header; ACK and PSH; a window.
    (tcp[12], tcp[13], tcp[14]) = (0x50, 0x18, 0xff);
    tcp[16..18].copy_from_slice(&pseudo.to_be_bytes());
}

/// The ones' complement sum.
fn ones(words: impl IntoIterator<Item = u16>) -> u16 {
    let mut sum: u32 = words.into_iter().map(u32::from).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Who sent a frame, and the how manyth it was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Pair of the sender; of several senders with one each, which of them.
    pub pair: u16,
    /// From one on.
    pub number: u64,
}

impl Stamp {
    /// Writes it into the frame whose header begins at `at`.
    #[inline]
    pub fn put(self, buffers: &Window, at: usize, size: Size) {
        buffers.put_u64(at + size.stamp_at(), u64::from(self.pair) << 48 | self.number);
    }

    /// Reads it.
    #[inline]
    pub fn load(buffers: &Window, at: usize, size: Size) -> Self {
        let word = buffers.load_u64(at + size.stamp_at());
        Stamp { pair: (word >> 48) as u16, number: word & 0xffff_ffff_ffff }
    }
}
