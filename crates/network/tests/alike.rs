//! Frames that are expected to go where the one before went.

mod support;

use ioplane_network::{
    CaptureOptions, Direction, DropReason, Offload, PortTx, RxOffloads, Sent, Vlan, spec::*,
};
use support::*;

/// A header that says that nothing is left to do; what a driver leaves in fields that mean nothing then.
const PLAIN: [u8; NET_HDR] = [0, 0, 54, 0, 0x5a, 5, 34, 0, 16, 0, 9, 9];

/// Offers a frame as one like that before; says whether it was sent as such.
fn offer(port_tx: &mut PortTx, header: [u8; NET_HDR], frame: &[u8]) -> bool {
    port_tx.send_alike(frame.len(), |to| {
        to[..NET_HDR].copy_from_slice(&header);
        to[NET_HDR..].copy_from_slice(frame);
        true
    })
}

/// As a NIC sends: as the one before if it is like that, otherwise from the beginning. Says whether it was.
fn send_either(host: &mut Host, frame: &[u8]) -> bool {
    let alike = offer(&mut host.port_tx, PLAIN, frame);
    if !alike {
        host.add(frame, Offload::NONE);
    }
    alike
}

/// `a` with address 1 and `b` with address 2.
fn pair_of(switch: &std::sync::Arc<ioplane_network::Switch>) -> (Host, Host) {
    let a = Host::with(switch, "a", |options| options.mac = Some(mac(1)));
    let b = Host::with(switch, "b", |options| options.mac = Some(mac(2)));
    (a, b)
}

#[test]
fn the_third_of_a_kind_is_expected_and_all_arrive_in_order() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    for batch in 0..3u8 {
        let frames: Vec<_> = (0..2000u32)
            .map(|n| frame(mac(2), mac(1), &vec![n as u8 ^ batch; 4 + (n * 37 % 1483) as usize]))
            .collect();
        let alike: Vec<_> = frames.iter().map(|frame| send_either(&mut a, frame)).collect();
        assert_eq!(alike[..3], [false, false, true], "each batch begins anew");
        let anew = alike[3..].iter().filter(|alike| !**alike).count();
        // A buffer of 64 KiB has room for some 85 of these.
        assert!((10..40).contains(&anew), "{anew} frames began a buffer");
        a.port_tx.flush();
        assert_eq!(b.take_all(), frames);
    }
    let (sent, received) = (a.port.reading().sent, b.port.reading().received);
    assert_eq!((sent.frames, sent.bytes), (received.frames, received.bytes));
    assert_eq!((sent.frames, sent.dropped_in_all(), received.dropped_in_all()), (6000, 0, 0));
}

#[test]
fn what_is_not_alike_is_nothing_until_it_is_sent_from_the_beginning() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    let mut c = Host::with(&switch, "c", |options| options.mac = Some(mac(3)));
    let good = frame(mac(2), mac(1), &[1; 50]);
    assert!(!offer(&mut a.port_tx, PLAIN, &good), "nothing was before");
    for _ in 0..2 {
        assert!(!send_either(&mut a, &good));
    }
    let with = |at: usize, byte: u8| {
        let mut header = PLAIN;
        header[at] = byte;
        header
    };
    let others = [
        (PLAIN, frame(mac(3), mac(1), &[2; 50]), "to somebody else"),
        (PLAIN, frame(mac(2), mac(4), &[3; 50]), "from somebody else"),
        (PLAIN, frame(BROADCAST, mac(1), &[4; 50]), "to all"),
        (PLAIN, tagged(mac(2), mac(1), 7, &[5; 50]), "with a tag"),
        (PLAIN, good[..ETH_HLEN + VLAN_HLEN - 1].to_vec(), "it may be too short for a tag"),
        (PLAIN, frame(mac(2), mac(1), &[6; 1600]), "longer than its receiver takes"),
        (with(0, VIRTIO_NET_HDR_F_NEEDS_CSUM), good.clone(), "with a sum to complete"),
        (with(1, VIRTIO_NET_HDR_GSO_TCPV4), good.clone(), "to be segmented"),
        (with(1, VIRTIO_NET_HDR_GSO_ECN), good.clone(), "of a kind that is none"),
    ];
    for (header, frame, why) in &others {
        assert!(!offer(&mut a.port_tx, *header, frame), "{why}");
        // Some are told by their length alone; after the others two more are needed until one is expected.
        let expected = offer(&mut a.port_tx, PLAIN, &good);
        assert!(expected || [false; 2].iter().all(|alike| send_either(&mut a, &good) == *alike), "{why}");
    }
    // What a driver says is known is not believed, and a flag that nobody knows is ignored.
    assert!(offer(&mut a.port_tx, with(0, VIRTIO_NET_HDR_F_DATA_VALID | 0x80), &good));
    let unreadable = |to: &mut [u8]| {
        to.fill(0xee);
        false
    };
    assert!(!a.port_tx.send_alike(good.len(), unreadable));
    assert!(!send_either(&mut a, &good));
    a.port_tx.flush();
    let got: Vec<_> = std::iter::from_fn(|| b.take()).collect();
    // Two by their length, which were followed by one; seven others, by two; and two before and after.
    assert_eq!(got, vec![(good, Offload::NONE); 2 + 2 + 14 + 2]);
    assert_eq!(c.take_all(), Vec::<Vec<u8>>::new());
    let reading = a.port.reading().sent;
    assert_eq!((reading.frames, reading.dropped_in_all()), (20, 0));
}

#[test]
fn receivers_in_turn_are_never_expected() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    let mut c = Host::with(&switch, "c", |options| options.mac = Some(mac(3)));
    let [to_b, to_c] = [2, 3].map(|n| frame(mac(n), mac(1), &[n; 100]));
    for _ in 0..50 {
        assert!(!send_either(&mut a, &to_b) && !send_either(&mut a, &to_c));
    }
    // Two at a time: nor are these.
    for _ in 0..50 {
        let sent = [&to_b, &to_b, &to_c, &to_c].map(|frame| send_either(&mut a, frame));
        assert_eq!(sent, [false; 4]);
    }
    a.port_tx.flush();
    assert_eq!((b.take_all(), c.take_all()), (vec![to_b; 150], vec![to_c; 150]));
}

#[test]
fn a_full_receiver_counts_each_frame_once() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    let frame = frame(mac(2), mac(1), &[7; 1400]);
    let all = 100_000;
    for _ in 0..all {
        send_either(&mut a, &frame);
    }
    a.port_tx.flush();
    let (got, missed) = (b.take_all().len() as u64, b.missed(DropReason::Full));
    assert!(missed > 0, "{got} frames have room");
    assert_eq!((got + missed, a.port.reading().sent.frames), (all, all));
}

/// A frame too short for a key is judged by itself: what the frame before it had been found is not of it.
#[test]
fn short_frames_confirm_nothing_about_the_frame_before_them() {
    let switch = switch();
    let [mut a, mut b, mut c] = [1, 2, 3].map(|n| {
        Host::with(&switch, ["", "a", "b", "c"][usize::from(n)], |options| {
            (options.mac, options.vlan) = (Some(mac(n)), Vlan::Access(5));
        })
    });
    let forbidden = [
        frame(mac(3), mac(2), &[1; 50]),
        tagged(mac(3), mac(1), 7, &[2; 50]),
        frame([1, 0x80, 0xc2, 0, 0, 0], mac(1), &[3; 50]),
        frame(mac(1), mac(1), &[4; 50]),
        frame(BROADCAST, mac(1), &[5; 50]),
    ];
    for (frame, short) in forbidden.iter().flat_map(|frame| [14, 15].map(|short| (frame, short))) {
        a.add(frame, Offload::NONE);
        let to_c = [&mac(3)[..], &mac(1), &[8, 0, 0]].concat();
        for _ in 0..3 {
            assert!(!send_either(&mut a, &to_c[..short]));
        }
        assert!(!offer(&mut a.port_tx, PLAIN, frame), "{frame:x?} after frames of {short} bytes");
        a.port_tx.flush();
        let others: Vec<_> = c.take_all().into_iter().filter(|got| got.len() > 15).collect();
        // A broadcast is for all, once; the others are for nobody.
        assert_eq!(others.len(), usize::from(frame[..6] == BROADCAST), "{others:x?}");
        b.take_all();
    }
}

/// What is found of a frame anew is not forgotten for what was expected before.
#[test]
fn what_is_judged_anew_is_expected_anew() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::new(&switch, "b");
    let mut c = Host::new(&switch, "c");
    b.send(&frame(mac(1), mac(9), b"at b"));
    let (to_9, other) = (frame(mac(9), mac(1), &[1; 60]), frame(mac(8), mac(1), &[2; 60]));
    for _ in 0..2 {
        assert!(!send_either(&mut a, &to_9));
    }
    assert!(send_either(&mut a, &to_9));
    // Whoever has that address is somewhere else by now, and something else was judged meanwhile.
    c.send(&frame(mac(1), mac(9), b"at c"));
    a.add(&other, Offload::NONE);
    for _ in 0..3 {
        send_either(&mut a, &to_9);
    }
    a.port_tx.flush();
    let count = |host: &mut Host| host.take_all().iter().filter(|got| **got == to_9).count();
    let learned_at = switch.table().into_iter().find(|learned| learned.mac == mac(9)).unwrap().port;
    let counts = (count(&mut b), count(&mut c));
    assert_eq!(counts, if learned_at == "c" { (3, 3) } else { (6, 0) }, "it is at {learned_at}");
}

#[test]
fn tags_are_told_apart_and_a_frame_that_loses_its_own_is_never_expected() {
    let switch = switch();
    let trunk = Vlan::Trunk(vec![7, 8]);
    let mut a = Host::with(&switch, "a", |options| (options.mac, options.vlan) = (Some(mac(1)), trunk));
    let mut b =
        Host::with(&switch, "b", |options| (options.mac, options.vlan) = (Some(mac(2)), Vlan::Access(7)));
    let of = |vlan| tagged(mac(2), mac(1), vlan, &[vlan as u8; 60]);
    for _ in 0..4 {
        assert!(!send_either(&mut a, &of(7)), "its tag is taken off");
    }
    for _ in 0..4 {
        assert!(!send_either(&mut a, &of(8)), "not for that port");
    }
    a.port_tx.flush();
    let front = b.port_rx.front().unwrap();
    assert_eq!((front.header_and_frame(), front.bytes()), (None, &frame(mac(2), mac(1), &[7; 60])[..]));
    assert_eq!(b.take_all().len(), 4);
}

#[test]
fn a_pair_of_several_is_expected_on_its_own() {
    let switch = switch();
    let a = Host::with(&switch, "a", |options| (options.mac, options.pairs) = (Some(mac(1)), 4));
    let b = Host::with(&switch, "b", |options| (options.mac, options.pairs) = (Some(mac(2)), 4));
    a.port.set_active_pairs(4);
    let mut port_tx = a.port.tx(3);
    let mut port_rxs: Vec<_> = (0..4).map(|pair| b.port.rx(pair)).collect();
    let frame = frame(mac(2), mac(1), &[9; 60]);
    for (active, arrives) in [(4, 3), (2, 1), (1, 0)] {
        b.port.set_active_pairs(active);
        let alike: Vec<_> = (0..5)
            .map(|_| {
                let alike = offer(&mut port_tx, PLAIN, &frame);
                if !alike {
                    send(&mut port_tx, &frame, Offload::NONE);
                }
                alike
            })
            .collect();
        assert_eq!(alike, [false, false, true, true, true]);
        port_tx.flush();
        let counts: Vec<_> =
            port_rxs.iter_mut().map(|port_rx| std::iter::from_fn(|| take(port_rx)).count()).collect();
        assert_eq!((counts[arrives], counts.iter().sum::<usize>()), (5, 5), "{active} pairs: {counts:?}");
    }
    // Two that went to different pairs say nothing of a third.
    for active in [4, 2, 2] {
        b.port.set_active_pairs(active);
        assert!(!offer(&mut port_tx, PLAIN, &frame));
        send(&mut port_tx, &frame, Offload::NONE);
    }
    assert!(offer(&mut port_tx, PLAIN, &frame));
}

#[test]
fn what_an_uplink_says_of_its_frames_is_never_expected() {
    let switch = switch();
    let mut up = Host::with(&switch, "up", |options| options.uplink = true);
    let b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    b.port.takes(RxOffloads::ALL);
    for _ in 0..4 {
        assert!(!send_either(&mut up, &frame(mac(2), mac(1), &[1; 60])));
    }
}

#[test]
fn captured_frames_are_never_expected() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    let captured = frame(mac(2), mac(1), &[8; 60]);
    for port in [a.port.name().to_owned(), b.port.name().to_owned()] {
        let mut capture = switch.capture(&port, CaptureOptions::default()).unwrap();
        for _ in 0..5 {
            assert!(!send_either(&mut a, &captured));
        }
        a.port_tx.flush();
        let directions: Vec<_> =
            std::iter::from_fn(|| capture.next()).map(|packet| packet.direction).collect();
        let direction = if port == "a" { Direction::Sent } else { Direction::Received };
        assert_eq!(directions, [direction; 5]);
        assert_eq!(b.take_all().len(), 5);
    }
    assert!([false, false, true].into_iter().all(|alike| send_either(&mut a, &captured) == alike));
}

#[test]
fn frames_that_are_spread_by_flow_are_never_expected() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let b = Host::with(&switch, "b", |options| (options.mac, options.pairs) = (Some(mac(2)), 4));
    b.port.set_active_pairs(4);
    let frame = frame(mac(2), mac(1), &[9; 60]);
    for _ in 0..5 {
        assert!(!send_either(&mut a, &frame));
    }
}

#[test]
fn a_frame_stands_behind_the_header_that_its_driver_gets() {
    let switch = switch();
    let (mut a, mut b) = pair_of(&switch);
    b.port.takes(RxOffloads::ALL);
    let udp = udp_frame();
    let sum = Offload { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Offload::NONE };
    for offload in [Offload::NONE, sum] {
        assert_eq!(a.add(&udp, offload), Sent::Delivered(1));
        a.port_tx.flush();
        let front = b.port_rx.front().unwrap();
        let Offload { flags, gso, hdr_len, gso_size, csum_start, csum_offset } = front.offload();
        let halves = [hdr_len, gso_size, csum_start, csum_offset, 1].map(u16::to_le_bytes).concat();
        let header = [&[flags, gso][..], &halves].concat();
        assert_eq!(front.header_and_frame(), Some(&[&header[..], &udp].concat()[..]));
        assert_eq!(front.bytes(), udp);
        b.port_rx.pop();
    }
}

/// A UDP datagram in IPv4 without a sum.
fn udp_frame() -> Vec<u8> {
    let mut frame = frame(mac(2), mac(1), &[0; 48]);
    frame[12..14].copy_from_slice(&ETH_P_IP.to_be_bytes());
    frame[14] = 0x45;
    frame[17] = 48;
    frame[23] = 17;
    frame[39] = 28;
    frame
}
