//! Segmentation in software, for receivers that do not take large frames.
//!
//! ```text
//!   Large::check(frame, offload) --> where the headers end, how much payload there is
//!      |                                                         write(out), once for each segment
//!      '--> Segments: headers | payload ------> headers' | piece    (IPv4 length, id, sum; TCP sequence, flags, sum; UDP
//!                                                                    length, sum)
//! ```
//!
//! Rules as Linux's `tcp_gso_segment` and `__udp_gso_segment` have them: IPv4's identification counts up, FIN and PSH are the
//! last segment's, CWR is the first's. Sums are computed anew, so that what a sender left in their place does not matter.

use crate::cause::DropReason;
use crate::checksum::Sum;
use crate::headers::{network, transport4, transport6};
use crate::offload::Offload;
use crate::spec::*;

/// Most segments of one frame: enough for 64 bytes in each.
pub const MOST_SEGMENTS: usize = 1024;

const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const TCP_CHECK: usize = 16;
const UDP_CHECK: usize = 6;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// A large frame whose offload header is true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Large {
    /// Where the IP header begins.
    network: usize,
    /// Whether that is IPv6.
    v6: bool,
    /// Where the TCP or UDP header begins.
    transport: usize,
    /// Whether that is TCP.
    tcp: bool,
    /// Where the payload begins.
    payload: usize,
    /// Most payload bytes in a segment.
    size: usize,
}

impl Large {
    /// Checks what the offload header of a large frame says against the frame. Every lie is [`DropReason::Offload`].
    #[inline]
    pub fn check(frame: &[u8], offload: &Offload) -> Result<Large, DropReason> {
        Self::of_head(frame, frame.len(), offload).ok_or(DropReason::Offload)
    }

    /// As [`Large::check`], of a frame of `len` bytes by its first ones: `None` also if its headers go beyond these.
    #[inline]
    pub(crate) fn of_head(frame: &[u8], len: usize, offload: &Offload) -> Option<Large> {
        let kind = offload.gso & !VIRTIO_NET_HDR_GSO_ECN;
        let network = network(frame)?;
        let v6 = network.ethertype == ETH_P_IPV6;
        let transport = match network.ethertype {
            ETH_P_IP if kind != VIRTIO_NET_HDR_GSO_TCPV6 => transport4(frame, network.start)?,
            ETH_P_IPV6 if kind != VIRTIO_NET_HDR_GSO_TCPV4 => transport6(frame, network.start)?,
            _ => return None,
        };
        let (tcp, check) = match (kind, transport.protocol) {
            (VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_TCPV6, IPPROTO_TCP) => (true, TCP_CHECK),
            (VIRTIO_NET_HDR_GSO_UDP_L4, IPPROTO_UDP) if offload.gso == kind => (false, UDP_CHECK),
            _ => return None,
        };
        let header = if tcp {
            let header = frame.get(transport.start..transport.start + TCP_HEADER)?;
            let length = usize::from(header[12] >> 4) * 4;
            (length >= TCP_HEADER).then_some(length)?
        } else {
            UDP_HEADER
        };
        let payload = transport.start + header;
        let size = usize::from(offload.gso_size);
        // A driver that sends a large frame also leaves its sum to the device (virtio 1.3, 5.1.6.2).
        let summed = offload.needs_csum()
            && usize::from(offload.csum_start) == transport.start
            && usize::from(offload.csum_offset) == check;
        let pieces = len.checked_sub(payload)?.div_ceil(size.max(1));
        // What one segment's length fields can say; headers alone are no large frame.
        let fits = payload - network.start + size <= 65_535;
        (summed && size > 0 && fits && (1..=MOST_SEGMENTS).contains(&pieces)).then_some(Large {
            network: network.start,
            v6,
            transport: transport.start,
            tcp,
            payload,
            size,
        })
    }

    /// Bytes of all headers.
    pub fn headers(&self) -> usize {
        self.payload
    }

    /// Bytes of the longest segment of a frame of `len` bytes.
    pub fn longest(&self, len: usize) -> usize {
        self.payload + self.size.min(len - self.payload)
    }
}

/// The segments of a frame, one after the other. `frame` must not change while there are some to come.
#[derive(Debug)]
pub struct Segments<'a> {
    frame: &'a [u8],
    large: Large,
    /// How many have been written.
    count: usize,
    /// Payload bytes written.
    done: usize,
    /// Sum of what all segments' pseudo-headers share.
    pseudo: Sum,
}

impl<'a> Segments<'a> {
    /// Segments of `frame`, which `large` was found for.
    pub fn new(frame: &'a [u8], large: Large) -> Self {
        let ip = large.network;
        let addresses = if large.v6 { &frame[ip + 8..ip + 40] } else { &frame[ip + 12..ip + 20] };
        let protocol = if large.tcp { IPPROTO_TCP } else { IPPROTO_UDP };
        let pseudo = Sum::default().bytes(addresses).word(protocol.into());
        Segments { frame, large, count: 0, done: 0, pseudo }
    }

    /// Length of the next segment, in bytes.
    #[inline]
    pub fn next_len(&self) -> Option<usize> {
        let left = self.frame.len() - self.large.payload - self.done;
        (left > 0).then(|| self.large.payload + left.min(self.large.size))
    }

    /// Segments that have not been written.
    pub fn left(&self) -> usize {
        (self.frame.len() - self.large.payload - self.done).div_ceil(self.large.size)
    }

    /// Writes the next segment into `out`, which is as long as [`Segments::next_len`] says.
    #[inline]
    pub fn write(&mut self, out: &mut [u8]) {
        let Large { network, v6, transport, tcp, payload, .. } = self.large;
        let piece = out.len() - payload;
        out[..payload].copy_from_slice(&self.frame[..payload]);
        out[payload..].copy_from_slice(&self.frame[payload + self.done..][..piece]);
        let last = payload + self.done + piece == self.frame.len();
        self.finish_network(&mut out[network..], v6);
        let segment = &mut out[transport..];
        if tcp {
            self.finish_tcp(segment, last);
        } else {
            finish_udp(segment, self.pseudo);
        }
        self.count += 1;
        self.done += piece;
    }

    #[inline]
    fn finish_network(&self, packet: &mut [u8], v6: bool) {
        let length = packet.len();
        if v6 {
            put(packet, 4, (length - 40) as u16);
            return;
        }
        put(packet, 2, length as u16);
        let first = u16::from_be_bytes([packet[4], packet[5]]);
        put(packet, 4, first.wrapping_add(self.count as u16));
        put(packet, 10, 0);
        let header = self.large.transport - self.large.network;
        let check = Sum::default().bytes(&packet[..header]).check();
        put(packet, 10, check);
    }

    #[inline]
    fn finish_tcp(&self, segment: &mut [u8], last: bool) {
        let sequence = u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]);
        segment[4..8].copy_from_slice(&sequence.wrapping_add(self.done as u32).to_be_bytes());
        if !last {
            segment[13] &= !(FIN | PSH);
        }
        if self.count > 0 {
            segment[13] &= !CWR;
        }
        put(segment, TCP_CHECK, 0);
        let check = self.pseudo.word(segment.len() as u16).bytes(segment).check();
        put(segment, TCP_CHECK, check);
    }
}

#[inline]
fn finish_udp(segment: &mut [u8], pseudo: Sum) {
    let length = segment.len() as u16;
    put(segment, 4, length);
    put(segment, UDP_CHECK, 0);
    let check = pseudo.word(length).bytes(segment).check_nonzero();
    put(segment, UDP_CHECK, check);
}

#[inline]
fn put(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}
