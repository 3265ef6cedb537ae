//! What a transmit queue does to a frame before it leaves: VLAN tag, checksums, large TCP frames in segments (82599 data sheet, 7.2.3 to
//! 7.2.5; as its drivers use it).

use ioplane_network::checksum;
use ioplane_network::gso::{Large, Segments};
use ioplane_network::{Offload, spec as net};

use super::spec::*;

/// The shortest frame, without its check sum.
const SHORTEST: usize = 60;

/// What a context descriptor says. A queue remembers two of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TxContext {
    /// VLAN tag, bytes before the IP header, bytes of that.
    lengths: u32,
    /// Kinds of headers.
    kinds: u32,
    /// Payload of a segment, and bytes of its TCP header.
    segment: u32,
}

impl TxContext {
    /// Of a descriptor; says which of the two it is.
    pub(crate) fn of(descriptor: &[u8; 16]) -> (usize, TxContext) {
        let words: [u32; 4] = std::array::from_fn(|at| {
            let at = 4 * at;
            u32::from_le_bytes(descriptor[at..at + 4].try_into().unwrap_or_default())
        });
        let context = TxContext { lengths: words[0], kinds: words[2], segment: words[3] };
        ((words[3] >> TX_INDEX_SHIFT & 1) as usize, context)
    }

    fn network(&self) -> usize {
        (self.lengths >> 9 & 0x7f) as usize
    }

    fn transport(&self) -> usize {
        self.network() + (self.lengths & 0x1ff) as usize
    }

    fn is_tcp(&self) -> bool {
        self.kinds & TX_L4_KIND == TX_L4_TCP
    }
}

/// What the first descriptor of a frame asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    command: u32,
    options: u32,
}

impl Asked {
    /// Of a data descriptor.
    pub(crate) fn of(descriptor: &[u8; 16]) -> Asked {
        let word = |at: usize| u32::from_le_bytes(descriptor[at..at + 4].try_into().unwrap_or_default());
        Asked { command: word(8), options: word(12) }
    }

    /// Which context it uses.
    pub(crate) fn context(&self) -> usize {
        (self.options >> TX_INDEX_SHIFT & 1) as usize
    }

    /// What leaves by the wire. `None`: the context does not fit the frame, or asks for what is not modelled (SCTP, IPsec).
    pub(crate) fn frames(&self, mut frame: Vec<u8>, context: &TxContext) -> Option<Vec<Vec<u8>>> {
        if self.options & TX_IPSEC != 0 {
            return None;
        }
        let mut frames = if self.command & TX_TSE != 0 {
            segments(&mut frame, context)?
        } else {
            if self.options & TX_IXSM != 0 && context.kinds & TX_IPV4 != 0 {
                network_sum(&mut frame, context)?;
            }
            if self.options & TX_TXSM != 0 {
                checksum::complete(&mut frame, &transport_sum(context)?).ok()?;
            }
            vec![frame]
        };
        // As ports of these cards pad what is shorter than a frame may be.
        frames.iter_mut().for_each(|frame| frame.resize(frame.len().max(SHORTEST), 0));
        if self.command & TX_VLE != 0 {
            let tag = (context.lengths >> 16) as u16;
            for frame in &mut frames {
                let at = frame.len().min(net::ETH_ADDRESSES);
                let tag = [0x81, 0x00, (tag >> 8) as u8, tag as u8];
                frame.splice(at..at, tag);
            }
        }
        Some(frames)
    }
}

/// The sum of the IPv4 header.
fn network_sum(frame: &mut [u8], context: &TxContext) -> Option<()> {
    let header = frame.get_mut(context.network()..context.transport())?;
    let place = header.get_mut(10..12)?;
    place.fill(0);
    let check = checksum::Sum::default().bytes(header).check();
    header[10..12].copy_from_slice(&check.to_be_bytes());
    Some(())
}

/// Where the sum of TCP or UDP is. Its place has that of the pseudo-header.
fn transport_sum(context: &TxContext) -> Option<Offload> {
    let csum_offset = match context.kinds & TX_L4_KIND {
        TX_L4_TCP => 16,
        TX_L4_UDP => 6,
        _ => return None,
    };
    let csum_start = u16::try_from(context.transport()).ok()?;
    Some(Offload { flags: net::VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start, csum_offset, ..Offload::NONE })
}

/// A large TCP frame, whose driver has left lengths and sums to the function.
fn segments(frame: &mut [u8], context: &TxContext) -> Option<Vec<Vec<u8>>> {
    let v4 = context.kinds & TX_IPV4 != 0;
    let gso = if v4 { net::VIRTIO_NET_HDR_GSO_TCPV4 } else { net::VIRTIO_NET_HDR_GSO_TCPV6 };
    let gso_size = (context.segment >> 16) as u16;
    let offload = Offload { gso, gso_size, ..transport_sum(context).filter(|_| context.is_tcp())? };
    let large = Large::check(frame, &offload).ok()?;
    let mut segments = Segments::new(frame, large);
    let mut frames = Vec::with_capacity(segments.left());
    while let Some(len) = segments.next_len() {
        let mut out = vec![0; len];
        segments.write(&mut out);
        frames.push(out);
    }
    Some(frames)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};

    /// A descriptor of these words.
    fn descriptor(words: [u32; 4]) -> [u8; 16] {
        words.map(u32::to_le_bytes).concat().try_into().expect("16 bytes")
    }

    /// A frame of TCP over IPv4, and its context: 14 bytes before the IP header, 20 of that, 20 of TCP's.
    fn large(payload: usize, segment: u32) -> (Vec<u8>, TxContext) {
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .tcp(1, 2, 1000, 64);
        let bytes: Vec<u8> = (0..payload).map(|at| at as u8).collect();
        let mut frame = Vec::new();
        builder.write(&mut frame, &bytes).expect("a frame");
        let (_, context) = TxContext::of(&descriptor([
            5 << 16 | 14 << 9 | 20,
            0,
            TX_CONTEXT | TX_IPV4 | TX_L4_TCP,
            segment << 16 | 20 << 8,
        ]));
        (frame, context)
    }

    fn is_right(frame: &[u8]) -> Vec<u8> {
        let packet = SlicedPacket::from_ethernet(frame).expect("a frame");
        let Some(etherparse::NetSlice::Ipv4(ip)) = &packet.net else { panic!("IPv4") };
        assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { panic!("TCP") };
        let sum = tcp.to_header().calc_checksum_ipv4_raw(
            ip.header().source(),
            ip.header().destination(),
            tcp.payload(),
        );
        assert_eq!(tcp.checksum(), sum.expect("a length"));
        tcp.payload().to_vec()
    }

    #[test]
    fn a_large_frame_leaves_in_segments() {
        let (mut frame, context) = large(2500, 1000);
        // As drivers leave it: no length, no sums.
        frame[16..18].fill(0);
        frame[24..26].fill(0);
        let asked = Asked::of(&descriptor([0, 0, TX_DATA | TX_TSE | TX_VLE, TX_IXSM | TX_TXSM]));
        let frames = asked.frames(frame.clone(), &context).expect("it fits");
        assert_eq!(frames.iter().map(Vec::len).collect::<Vec<_>>(), [1058, 1058, 558]);
        let payload: Vec<u8> = frames
            .iter()
            .flat_map(|frame| {
                assert_eq!(frame[12..16], [0x81, 0, 0, 5], "the context's tag");
                is_right(&[&frame[..12], &frame[16..]].concat())
            })
            .collect();
        assert_eq!(payload, frame[54..]);
    }

    #[test]
    fn sums_are_put_in() {
        let (whole, context) = large(100, 0);
        let mut frame = whole.clone();
        frame[24..26].fill(0xee);
        // What a driver has put there: the sum of the pseudo-header.
        let pseudo = checksum::Sum::default().bytes(&whole[26..34]).word(6).word(120).partial();
        frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
        let asked = Asked::of(&descriptor([0, 0, TX_DATA, TX_IXSM | TX_TXSM]));
        assert_eq!(asked.frames(frame, &context), Some(vec![whole]));
    }

    #[test]
    fn a_context_that_does_not_fit_is_no_frame() {
        let (frame, context) = large(100, 0);
        let asks = |command, options| Asked::of(&descriptor([0, 0, TX_DATA | command, options]));
        assert_eq!(asks(TX_TSE, TX_TXSM).frames(frame.clone(), &context), None, "segments of nothing");
        assert_eq!(asks(0, TX_IPSEC).frames(frame.clone(), &context), None);
        assert_eq!(asks(0, TX_TXSM).frames(frame[..40].to_vec(), &context), None, "beyond the frame's end");
        assert_eq!(asks(0, TX_IXSM).frames(frame[..20].to_vec(), &context), None);
        assert_eq!(asks(TX_VLE, 0).frames(Vec::new(), &context).map(|frames| frames.len()), Some(1));
        assert_eq!(asks(0, 0).frames(frame.clone(), &context), Some(vec![frame]));
    }
}
