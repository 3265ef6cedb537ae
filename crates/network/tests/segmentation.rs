//! What a receiver gets that does not take large frames: compared, byte for byte, with packets that another library makes.

mod support;

use etherparse::{
    IpFragOffset, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, TcpHeader, UdpHeader, ip_number::*,
};
use ioplane_network::gso::MOST_SEGMENTS;
use ioplane_network::{DropReason, Offload, RxOffloads, Sent, SideReading, Vlan, spec::*};
use proptest::prelude::*;
use support::*;

const FROM: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1];
const TO: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xff, 2];

/// A connection's end, from which frames are made: large ones as a driver makes them, small ones as the wire has them.
#[derive(Debug, Clone)]
struct Flow {
    v6: bool,
    tcp: bool,
    tags: Vec<u16>,
    /// Options for every hop and for the destination, in eight-byte units.
    extensions: Vec<usize>,
    ip_options: usize,
    tcp_options: usize,
    id: u16,
    sequence: u32,
    flags: u8,
    payload: Vec<u8>,
}

impl Flow {
    /// Headers up to the transport's, for a packet that carries `len` bytes with the transport header; the IPv4 id is the
    /// first's plus `count`.
    fn outer(&self, len: usize, count: u16) -> Vec<u8> {
        let mut bytes = [&mac(2)[..], &mac(1)].concat();
        for tag in &self.tags {
            bytes.extend([0x81, 0]);
            bytes.extend(tag.to_be_bytes());
        }
        let protocol = if self.tcp { TCP } else { UDP };
        if !self.v6 {
            bytes.extend([8, 0]);
            let mut ip = Ipv4Header {
                total_len: (20 + 4 * self.ip_options + len) as u16,
                identification: self.id.wrapping_add(count),
                dont_fragment: true,
                fragment_offset: IpFragOffset::ZERO,
                time_to_live: 64,
                protocol,
                source: [10, 0, 0, 1],
                destination: [10, 0, 255, 2],
                ..Ipv4Header::default()
            };
            ip.options = vec![1u8; 4 * self.ip_options].as_slice().try_into().unwrap();
            ip.header_checksum = ip.calc_header_checksum();
            ip.write(&mut bytes).unwrap();
            return bytes;
        }
        bytes.extend([0x86, 0xdd]);
        let extensions: usize = self.extensions.iter().map(|units| 8 + 8 * units).sum();
        let kinds = [0u8, 60];
        let next = |at: usize| if at < self.extensions.len() { kinds[at] } else { protocol.0 };
        let ip = Ipv6Header {
            traffic_class: 0,
            flow_label: Ipv6FlowLabel::ZERO,
            payload_length: (extensions + len) as u16,
            next_header: IpNumber(next(0)),
            hop_limit: 64,
            source: FROM,
            destination: TO,
        };
        ip.write(&mut bytes).unwrap();
        for (at, units) in self.extensions.iter().enumerate() {
            bytes.extend([next(at + 1), *units as u8, 1, (4 + 8 * units) as u8]);
            bytes.extend(vec![0; 4 + 8 * units]);
        }
        bytes
    }

    /// A packet as the wire has it: that piece of the payload, sums complete.
    fn packet(&self, from: usize, piece: &[u8], flags: u8, count: u16) -> Vec<u8> {
        let mut transport = Vec::new();
        if self.tcp {
            let mut tcp = TcpHeader::new(5001, 80, self.sequence.wrapping_add(from as u32), 4096);
            (tcp.fin, tcp.syn, tcp.rst, tcp.psh) =
                (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0, flags & 8 != 0);
            (tcp.ack, tcp.urg, tcp.ece, tcp.cwr) =
                (flags & 16 != 0, flags & 32 != 0, flags & 64 != 0, flags & 128 != 0);
            tcp.acknowledgment_number = 77;
            tcp.set_options_raw(&vec![1; 4 * self.tcp_options]).unwrap();
            let check = if self.v6 {
                tcp.calc_checksum_ipv6_raw(FROM, TO, piece)
            } else {
                tcp.calc_checksum_ipv4_raw([10, 0, 0, 1], [10, 0, 255, 2], piece)
            };
            tcp.checksum = check.unwrap();
            tcp.write(&mut transport).unwrap();
        } else {
            let len = (8 + piece.len()) as u16;
            let mut udp = UdpHeader { source_port: 5001, destination_port: 53, length: len, checksum: 0 };
            let check = if self.v6 {
                udp.calc_checksum_ipv6_raw(FROM, TO, piece)
            } else {
                udp.calc_checksum_ipv4_raw([10, 0, 0, 1], [10, 0, 255, 2], piece)
            };
            udp.checksum = check.unwrap();
            udp.write(&mut transport).unwrap();
        }
        let mut bytes = self.outer(transport.len() + piece.len(), count);
        bytes.extend(transport);
        bytes.extend(piece);
        bytes
    }

    fn start(&self) -> usize {
        self.outer(0, 0).len()
    }

    fn header(&self) -> usize {
        if self.tcp { 20 + 4 * self.tcp_options } else { 8 }
    }

    /// The large frame, with rubbish where sums and the like are to be filled in.
    fn large(&self, size: u16) -> (Vec<u8>, Offload) {
        let mut bytes = self.packet(0, &[], self.flags, 0);
        let start = self.start();
        let check = if self.tcp { 16 } else { 6 };
        bytes[start + check..][..2].copy_from_slice(&[0xde, 0xad]);
        bytes.extend(&self.payload);
        let gso = match (self.tcp, self.v6) {
            (false, _) => VIRTIO_NET_HDR_GSO_UDP_L4,
            (true, false) => VIRTIO_NET_HDR_GSO_TCPV4,
            (true, true) => VIRTIO_NET_HDR_GSO_TCPV6,
        };
        let ecn = if self.tcp && self.flags & 0x80 != 0 { VIRTIO_NET_HDR_GSO_ECN } else { 0 };
        let offload = Offload {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso: gso | ecn,
            hdr_len: (start + self.header()) as u16,
            gso_size: size,
            csum_start: start as u16,
            csum_offset: check as u16,
        };
        (bytes, offload)
    }

    /// What comes out, by the book: pieces of `size`; FIN and PSH with the last, CWR with the first.
    fn segments(&self, size: usize) -> Vec<Vec<u8>> {
        let pieces: Vec<_> = self.payload.chunks(size).collect();
        let segment = |(at, piece): (usize, &&[u8])| {
            let mut flags = self.flags;
            if at + 1 < pieces.len() {
                flags &= !9;
            }
            if at > 0 {
                flags &= !0x80;
            }
            self.packet(at * size, piece, flags, at as u16)
        };
        pieces.iter().enumerate().map(segment).collect()
    }
}

prop_compose! {
    fn flows()(
        (v6, tcp) in any::<(bool, bool)>(),
        tags in proptest::collection::vec(1u16..4095, 0..2),
        extensions in proptest::collection::vec(0usize..4, 0..3),
        (ip_options, tcp_options) in (0usize..=10, 0usize..=10),
        (id, sequence, flags) in any::<(u16, u32, u8)>(),
        len in prop_oneof![1usize..200, 1usize..65_000],
        seed in any::<u8>(),
    ) -> Flow {
        let payload = (0..len).map(|at| (at * 7 + at / 251) as u8 ^ seed).collect();
        Flow { v6, tcp, tags, extensions, ip_options, tcp_options, id, sequence, flags, payload }
    }
}

fn usual() -> Flow {
    Flow {
        v6: false,
        tcp: true,
        tags: vec![],
        extensions: vec![],
        ip_options: 0,
        tcp_options: 3,
        id: 65_534,
        sequence: u32::MAX - 2000,
        flags: 0x99,
        payload: (0..10_000u32).map(|n| (n / 3) as u8).collect(),
    }
}

/// Sends `frame` to a port that takes `takes`; gives what arrives there, and what became of it.
fn pass(
    frame: &[u8],
    offload: Offload,
    takes: RxOffloads,
    mtu: u16,
) -> (Sent, Vec<(Vec<u8>, Offload)>, SideReading) {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| (options.mac, options.mtu) = (Some(mac(1)), mtu));
    let mut b = Host::with(&switch, "b", |options| (options.mac, options.mtu) = (Some(mac(2)), mtu));
    b.port.takes(takes);
    let sent = a.add(frame, offload);
    a.port_tx.flush();
    let arrived = std::iter::from_fn(|| b.take()).collect();
    (sent, arrived, a.port.reading().sent)
}

fn bytes(arrived: Vec<(Vec<u8>, Offload)>) -> Vec<Vec<u8>> {
    arrived.into_iter().map(|(bytes, _)| bytes).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn segments_are_what_another_library_makes(flow in flows(), size in prop_oneof![64u16..1500, 1400u16..9000]) {
        let (frame, offload) = flow.large(size);
        let (sent, arrived, _) = pass(&frame, offload, RxOffloads::default(), 65_535);
        prop_assert_eq!(sent, Sent::Delivered(1));
        prop_assert!(arrived.iter().all(|(_, left)| *left == Offload::NONE));
        prop_assert!(bytes(arrived) == flow.segments(size.into()));
    }

    #[test]
    fn a_checksum_is_completed_as_another_library_does(flow in flows()) {
        let mut flow = flow;
        flow.payload.truncate(1200);
        let whole = flow.packet(0, &flow.payload, flow.flags, 0);
        let (start, check) = (flow.start(), if flow.tcp { 16 } else { 6 });
        let (mut frame, mut sum) = (whole.clone(), 0u32);
        // The pseudo-header by hand, as drivers leave it.
        let addresses: Vec<u8> =
            if flow.v6 { [FROM, TO].concat() } else { vec![10, 0, 0, 1, 10, 0, 255, 2] };
        let protocol = if flow.tcp { 6u32 } else { 17 };
        for word in addresses.chunks(2) {
            sum += u32::from(u16::from_be_bytes([word[0], word[1]]));
        }
        sum += protocol + (whole.len() - start) as u32;
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = ((sum & 0xffff) + (sum >> 16)) as u16;
        frame[start + check..][..2].copy_from_slice(&sum.to_be_bytes());
        let offload = Offload {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            csum_start: start as u16,
            csum_offset: check as u16,
            ..Offload::NONE
        };
        let (_, arrived, _) = pass(&frame, offload, RxOffloads::default(), 1500);
        let mut expected = whole;
        // Zero and its other form are the same sum; UDP may only have the other, and we always write that.
        if expected[start + check..][..2] == [0, 0] {
            expected[start + check..][..2].fill(0xff);
        }
        prop_assert_eq!(&arrived, &vec![(expected, Offload::NONE)]);
        let (_, arrived, _) = pass(&frame, offload, RxOffloads { checksum: true, ..RxOffloads::default() }, 1500);
        prop_assert_eq!(arrived, vec![(frame, offload)]);
    }

    #[test]
    fn hostile_headers_are_refused_or_segmented_never_worse(
        flow in flows(),
        size in any::<u16>(),
        (flags, gso, csum_start, csum_offset) in any::<(u8, u8, u16, u16)>(),
        honest in any::<[bool; 4]>(),
        (at, byte, cut) in (0usize..120, any::<u8>(), 0usize..300),
    ) {
        let (mut frame, mut offload) = flow.large(size);
        if !honest[0] { offload.gso = gso }
        if !honest[1] { offload.csum_start = csum_start }
        if !honest[2] { offload.csum_offset = csum_offset }
        if !honest[3] { offload.flags = flags }
        if let Some(place) = frame.get_mut(at) {
            *place = byte;
        }
        frame.truncate(frame.len().saturating_sub(cut).max(14));
        let long = frame.len();
        for takes in [RxOffloads::default(), RxOffloads::ALL] {
            let (sent, arrived, reading) = pass(&frame, offload, takes, 65_535);
            match sent {
                Sent::Delivered(_) => {
                    prop_assert!(!arrived.is_empty() || reading.frames == 1);
                    prop_assert!(arrived.len() <= MOST_SEGMENTS);
                    prop_assert!(arrived.iter().all(|(bytes, _)| bytes.len() <= long + 4));
                }
                Sent::Dropped(_) => prop_assert!(arrived.is_empty()),
                Sent::Fault | Sent::Begun => prop_assert!(false),
            }
        }
    }
}

#[test]
fn a_large_frame_goes_whole_to_who_takes_it() {
    let (frame, offload) = usual().large(1448);
    let (sent, arrived, _) = pass(&frame, Offload { hdr_len: 7, ..offload }, RxOffloads::ALL, 1500);
    assert_eq!(sent, Sent::Delivered(1));
    assert_eq!(arrived, [(frame.clone(), offload)], "but for the length of the headers, which is true now");
    // CWR is set, and this receiver does not take that.
    let (_, arrived, _) = pass(&frame, offload, RxOffloads { ecn: false, ..RxOffloads::ALL }, 1500);
    assert!(arrived.iter().all(|(_, left)| left.flags == VIRTIO_NET_HDR_F_DATA_VALID && left.gso == 0));
    assert_eq!(bytes(arrived), usual().segments(1448));
}

#[test]
fn the_longest_frame_of_all() {
    let mut flow = usual();
    flow.payload = (0..65_535 - 20 - 32).map(|n| (n % 253) as u8).collect();
    flow.tags = vec![5];
    let (frame, offload) = flow.large(1448);
    assert_eq!(frame.len(), 65_535 + 18);
    let (_, arrived, _) = pass(&frame, offload, RxOffloads::ALL, 1500);
    assert_eq!(arrived[0].0, frame);
    let (_, arrived, _) = pass(&frame, offload, RxOffloads::default(), 1500);
    assert_eq!(bytes(arrived), flow.segments(1448));
}

#[test]
fn every_lie_is_dropped_by_name() {
    let flow = usual();
    let (good, honest) = flow.large(1448);
    let with = |at: usize, byte: u8| {
        let mut frame = good.clone();
        frame[at] = byte;
        frame
    };
    let (ip, tcp) = (14, 34);
    let lies: Vec<(&str, Vec<u8>, Offload)> = vec![
        ("no size", good.clone(), Offload { gso_size: 0, ..honest }),
        ("a size that makes too many", good.clone(), Offload { gso_size: 1, ..honest }),
        ("no checksum left to do", good.clone(), Offload { flags: 0, ..honest }),
        ("another start", good.clone(), Offload { csum_start: 30, ..honest }),
        ("another place", good.clone(), Offload { csum_offset: 6, ..honest }),
        ("another IP", good.clone(), Offload { gso: VIRTIO_NET_HDR_GSO_TCPV6, ..honest }),
        ("another transport", good.clone(), Offload { gso: VIRTIO_NET_HDR_GSO_UDP_L4, ..honest }),
        ("fragments of UDP", good.clone(), Offload { gso: VIRTIO_NET_HDR_GSO_UDP, ..honest }),
        ("a type that is none", good.clone(), Offload { gso: 2, ..honest }),
        ("ECN of nothing", good.clone(), Offload { gso: VIRTIO_NET_HDR_GSO_ECN, ..honest }),
        ("UDP that says so", with(ip + 9, IPPROTO_UDP), honest),
        ("IP of another version", with(ip, 0x65), honest),
        ("a short IP header", with(ip, 0x44), honest),
        ("a long IP header", with(ip, 0x4f), honest),
        ("a fragment", with(ip + 6, 0x20), honest),
        ("a short TCP header", with(tcp + 12, 0x40), honest),
        ("another ethertype", with(13, 6), honest),
        ("headers only", good[..tcp + 32].to_vec(), honest),
        ("half a TCP header", good[..tcp + 10].to_vec(), honest),
        ("half an IP header", good[..ip + 10].to_vec(), honest),
        ("half an ethertype", good[..14].to_vec(), honest),
    ];
    for (lie, frame, offload) in lies {
        for takes in [RxOffloads::default(), RxOffloads::ALL] {
            let (sent, arrived, reading) = pass(&frame, offload, takes, 1500);
            assert_eq!(sent, Sent::Dropped(DropReason::Offload), "{lie}");
            assert_eq!((arrived.len(), reading.dropped(DropReason::Offload)), (0, 1), "{lie}");
        }
    }
}

#[test]
fn segments_that_are_too_long_for_their_receiver() {
    let (frame, offload) = usual().large(4000);
    let (sent, arrived, reading) = pass(&frame, offload, RxOffloads::default(), 1500);
    assert_eq!((sent, arrived.len(), reading.frames), (Sent::Dropped(DropReason::Giant), 0, 1));
}

#[test]
fn a_flood_gives_everybody_what_they_take() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.vlan = Vlan::Access(5));
    let mut whole = Host::with(&switch, "whole", |options| options.vlan = Vlan::Access(5));
    let mut tagged = Host::new(&switch, "tagged");
    let mut small = Host::with(&switch, "small", |options| options.vlan = Vlan::Access(5));
    whole.port.takes(RxOffloads::ALL);
    tagged.port.takes(RxOffloads::ALL);
    let mut flow = usual();
    let (frame, offload) = flow.large(1448);
    assert_eq!(a.add(&frame, offload), Sent::Delivered(3));
    a.port_tx.flush();
    assert_eq!(whole.take(), Some((frame, offload)));
    assert_eq!(small.take_all(), flow.segments(1448));
    flow.tags = vec![5];
    assert_eq!(tagged.take(), Some(flow.large(1448)));
    // And with the tag taken off, in segments.
    let mut trunk = Host::with(&switch, "trunk", |options| options.vlan = Vlan::Trunk(vec![5]));
    let (frame, offload) = flow.large(1000);
    trunk.add(&frame, offload);
    trunk.port_tx.flush();
    flow.tags = vec![];
    assert_eq!(small.take_all(), flow.segments(1000));
}

#[test]
fn a_receiver_without_room_gets_the_first_segments_and_a_count() {
    let switch = switch_with(|settings| settings.buffers = 4);
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let mut flow = usual();
    flow.payload = (0..64_000u32).map(|n| n as u8).collect();
    let (frame, offload) = flow.large(1000);
    // Three buffers for this sender, and 62 segments in each.
    assert_eq!(a.add(&frame, offload), Sent::Delivered(1));
    assert_eq!(a.add(&frame, offload), Sent::Delivered(1));
    assert_eq!(a.add(&frame, offload), Sent::Dropped(DropReason::Full));
    a.port_tx.flush();
    let arrived = b.take_all();
    assert_eq!(arrived.len() as u64 + b.missed(DropReason::Full), 3 * 64);
    assert!(b.missed(DropReason::Full) > 0 && arrived[..64] == flow.segments(1000));
}
