//! Who gets which frame, and what becomes of the others.

mod support;

use ioplane_network::{
    CaptureOptions, Direction, DropReason, HEAD, NetworkError, Offload, RxFilter, RxOffloads, Sent, Vlan,
    spec::*,
};
use support::*;

#[test]
fn learns_and_stops_flooding() {
    let switch = switch();
    let (mut a, mut b, mut c) = (Host::new(&switch, "a"), Host::new(&switch, "b"), Host::new(&switch, "c"));
    let to_b = frame(mac(2), mac(1), b"who are you?");
    assert_eq!(a.send(&to_b), Sent::Delivered(2), "nobody knows b yet");
    assert_eq!((b.take_all(), c.take_all()), (vec![to_b.clone()], vec![to_b.clone()]));
    let to_a = frame(mac(1), mac(2), b"b");
    assert_eq!(b.send(&to_a), Sent::Delivered(1));
    assert_eq!(a.take_all(), [to_a]);
    assert_eq!(a.send(&to_b), Sent::Delivered(1));
    assert_eq!((b.take_all().len(), c.take_all().len(), a.take_all().len()), (1, 0, 0));
    let mut known: Vec<_> = switch.table().into_iter().map(|l| (l.mac, l.port, l.vlan)).collect();
    known.sort();
    assert_eq!(known, [(mac(1), "a".to_owned(), 0), (mac(2), "b".to_owned(), 0)]);
    // To itself: nobody's.
    assert_eq!(a.send(&frame(mac(1), mac(1), b"")), Sent::Dropped(DropReason::NoPath));
    // b goes; what was learned of it goes too.
    drop(b);
    assert_eq!(a.send(&to_b), Sent::Delivered(1));
    assert_eq!(c.take_all().len(), 1);
    assert!(switch.table().iter().all(|learned| learned.port == "a"));
}

#[test]
fn a_batch_arrives_in_order_and_whole() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let frames: Vec<_> =
        (0..3000u32).map(|n| frame(mac(2), mac(1), &vec![n as u8; (n % 1480) as usize])).collect();
    for frame in &frames {
        assert_eq!(a.add(frame, Offload::NONE), Sent::Delivered(1));
    }
    a.port_tx.flush();
    assert_eq!(b.take_all(), frames);
    let (sent, received) = (a.port.reading().sent, b.port.reading().received);
    assert_eq!((sent.frames, sent.bytes), (received.frames, received.bytes));
    assert_eq!(sent.frames, 3000);
}

#[test]
fn configured_addresses_are_neither_learned_nor_stolen() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let mut c = Host::new(&switch, "c");
    assert_eq!(c.send(&frame(BROADCAST, mac(1), b"I am a")), Sent::Dropped(DropReason::Spoofed));
    assert_eq!(c.refused(DropReason::Spoofed), 1);
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Delivered(1));
    assert_eq!((b.take_all().len(), c.take_all().len()), (1, 0));
    assert_eq!(switch.table(), []);
    // A guest that has gone may be heard from elsewhere: it has migrated.
    a.port.set_up(false);
    assert_eq!(c.send(&frame(mac(2), mac(1), b"from far away")), Sent::Delivered(1));
    assert_eq!(b.send(&frame(mac(1), mac(2), b"there you are")), Sent::Delivered(1));
    assert_eq!(c.take_all().len(), 1);
    // And comes back.
    a.port.set_up(true);
    assert_eq!(b.send(&frame(mac(1), mac(2), b"")), Sent::Delivered(1));
    assert_eq!((a.take_all().len(), c.take_all().len()), (1, 0));
}

#[test]
fn of_two_ports_with_one_address_the_one_that_came_up_last_has_it() {
    let switch = switch();
    let mut source = Host::with(&switch, "source", |options| options.mac = Some(mac(1)));
    let mut target = Host::with(&switch, "target", |options| options.mac = Some(mac(1)));
    let mut b = Host::new(&switch, "b");
    b.send(&frame(mac(1), mac(2), b""));
    assert_eq!((source.take_all().len(), target.take_all().len()), (0, 1));
    assert_eq!(source.port.announce(mac(1)), Sent::Delivered(2), "the migration failed, the source goes on");
    let heard = b.take_all();
    assert_eq!((heard.len(), heard[0].len(), &heard[0][12..14]), (1, 60, &ETH_P_RARP.to_be_bytes()[..]));
    target.take_all();
    b.send(&frame(mac(1), mac(2), b""));
    assert_eq!((source.take_all().len(), target.take_all().len()), (1, 0));
}

#[test]
fn what_is_no_frame_is_dropped_by_name() {
    let switch = switch();
    let mut a = Host::new(&switch, "a");
    let mut b = Host::with(&switch, "b", |options| options.mtu = 1400);
    let good = frame(BROADCAST, mac(1), &[0; 46]);
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let group = with(6, &[0x33]);
    let nobody = with(6, &[0; 6]);
    let pause = with(0, &[1, 0x80, 0xc2, 0, 0, 1]);
    let cases: [(&[u8], DropReason); 8] = [
        (&[], DropReason::Runt),
        (&good[..13], DropReason::Runt),
        (&vec![2; 1500 + 23], DropReason::Giant),
        (&vec![2; 65_558], DropReason::Giant),
        (&group, DropReason::Malformed),
        (&nobody, DropReason::Malformed),
        (&pause, DropReason::Filtered),
        (&frame(mac(1), mac(1), &[]), DropReason::NoPath),
    ];
    a.send(&good);
    for (bytes, cause) in cases {
        let before = a.refused(cause);
        assert_eq!(a.send(bytes), Sent::Dropped(cause));
        assert_eq!(a.refused(cause), before + 1);
    }
    // As long as its sender may send, too long for its receiver.
    b.send(&frame(mac(1), mac(2), &[]));
    let long = frame(mac(2), mac(1), &[0; 1500]);
    assert_eq!(a.send(&long), Sent::Dropped(DropReason::Giant));
    assert_eq!((b.missed(DropReason::Giant), a.port.reading().sent.frames), (1, 2));
    assert_eq!(b.take_all(), [good]);
}

#[test]
fn memory_that_is_not_there_is_a_fault_and_leaves_nothing() {
    let switch = switch();
    let (mut a, mut b) = (Host::new(&switch, "a"), Host::new(&switch, "b"));
    let good = frame(mac(2), mac(1), &[0; 50]);
    b.send(&frame(mac(1), mac(2), &[]));
    for to in [mac(2), BROADCAST] {
        let bad = frame(to, mac(1), &[0; 500]);
        assert_eq!(a.port_tx.send(&bad[..HEAD], bad.len(), Offload::NONE, &mut |_| false), Sent::Fault);
    }
    assert_eq!(a.send(&good), Sent::Delivered(1));
    assert_eq!(b.take_all(), [good]);
    assert_eq!(a.port.reading().sent.dropped_in_all(), 0);
}

#[test]
fn what_was_judged_is_what_is_delivered() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let mut c = Host::with(&switch, "c", |options| options.vlan = Vlan::Access(5));
    let honest = frame(mac(2), mac(1), &[7; 160]);
    // By the time it is copied the guest has written another sender, and a tag, into its memory.
    let sent = a.port_tx.send(&honest[..HEAD], honest.len(), Offload::NONE, &mut |to| {
        to.fill(7);
        to[6..12].copy_from_slice(&mac(9));
        to[12..18].copy_from_slice(&[0x81, 0, 0, 5, 0x88, 0xb5]);
        true
    });
    a.port_tx.flush();
    assert_eq!(sent, Sent::Delivered(1));
    assert_eq!(b.take_all(), [honest]);
    assert_eq!(c.take_all().len(), 0);
}

#[test]
fn isolated_ports_do_not_hear_each_other() {
    let switch = switch();
    let isolated = |name: &str, n: u8| {
        Host::with(&switch, name, |options| (options.isolated, options.mac) = (true, Some(mac(n))))
    };
    let (mut a, mut b) = (isolated("a", 1), isolated("b", 2));
    let mut up = Host::with(&switch, "up", |options| (options.uplink, options.mac) = (true, Some(mac(3))));
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Dropped(DropReason::Isolated));
    assert_eq!(a.send(&frame(BROADCAST, mac(1), b"")), Sent::Delivered(1));
    assert_eq!((b.take_all().len(), up.take_all().len()), (0, 1));
    assert_eq!(up.send(&frame(BROADCAST, mac(3), b"")), Sent::Delivered(2));
    assert_eq!(a.send(&frame(mac(3), mac(1), b"")), Sent::Delivered(1));
}

#[test]
fn vlans_are_told_apart_and_tagged_as_their_ports_want() {
    let switch = switch();
    let mut a5 = Host::with(&switch, "a5", |options| options.vlan = Vlan::Access(5));
    let mut b5 = Host::with(&switch, "b5", |options| options.vlan = Vlan::Access(5));
    let mut c6 = Host::with(&switch, "c6", |options| options.vlan = Vlan::Access(6));
    let mut trunk = Host::with(&switch, "trunk", |options| options.vlan = Vlan::Trunk(vec![5, 7]));
    let mut all = Host::new(&switch, "all");
    assert_eq!(a5.send(&frame(BROADCAST, mac(1), b"five")), Sent::Delivered(3));
    assert_eq!(b5.take_all(), [frame(BROADCAST, mac(1), b"five")]);
    assert_eq!(trunk.take_all(), [tagged(BROADCAST, mac(1), 5, b"five")]);
    assert_eq!(all.take_all(), [tagged(BROADCAST, mac(1), 5, b"five")]);
    assert_eq!(c6.take_all().len(), 0);
    // Back again, to the address that was learned in this VLAN.
    assert_eq!(trunk.send(&tagged(mac(1), mac(4), 0xa005, b"back")), Sent::Delivered(1));
    assert_eq!(a5.take_all(), [frame(mac(1), mac(4), b"back")]);
    // In another VLAN it is nobody's.
    assert_eq!(trunk.send(&tagged(mac(1), mac(4), 7, b"")), Sent::Delivered(1));
    assert_eq!(all.take_all().len(), 1);
    // Refused at the door.
    assert_eq!(a5.send(&tagged(BROADCAST, mac(1), 6, b"hop")), Sent::Dropped(DropReason::Vlan));
    assert_eq!(trunk.send(&tagged(BROADCAST, mac(4), 6, b"")), Sent::Dropped(DropReason::Vlan));
    assert_eq!(trunk.send(&frame(BROADCAST, mac(4), b"")), Sent::Dropped(DropReason::Vlan));
    // A priority tag becomes the VLAN's.
    a5.send(&tagged(BROADCAST, mac(1), 0xe000, b"urgent"));
    assert_eq!(trunk.take_all(), [tagged(BROADCAST, mac(1), 0xe005, b"urgent")]);
    assert_eq!(b5.take_all(), [frame(BROADCAST, mac(1), b"urgent")]);
}

#[test]
fn frames_too_short_for_a_tag_are_not_taken_for_tagged_ones() {
    // Of the type of a tag, and no room for one; what is filled up with zeros or one byte of it are tags of others.
    let stump = |len| tagged(mac(2), mac(1), 0x0100, b"")[..len].to_vec();
    let other = |tag| tagged(mac(2), mac(1), tag, &[7; 50]);
    for tag in [0, 0x0100] {
        for (from, to) in [
            (Vlan::Access(256), Vlan::Access(256)),
            (Vlan::Trunk(vec![0, 5]), Vlan::All),
            (Vlan::All, Vlan::Access(256)),
            (Vlan::Access(5), Vlan::Trunk(vec![5])),
        ] {
            for first in [true, false] {
                let switch = switch();
                let mut a = Host::with(&switch, "a", |options| options.vlan = from.clone());
                let mut b = Host::with(&switch, "b", |options| {
                    (options.vlan, options.mac) = (to.clone(), Some(mac(2)));
                });
                // Alone, one after another, and in one batch they fare alike.
                let alone = a.send(&other(tag));
                let seen = b.take_all();
                let short: Vec<_> = [14, 15].map(|len| a.send(&stump(len))).into();
                let stumps = b.take_all();
                let long = |a: &mut Host| assert_eq!(a.add(&other(tag), Offload::NONE), alone);
                if first {
                    long(&mut a);
                }
                for (len, alone) in [14, 15].into_iter().zip(&short) {
                    assert_eq!(
                        a.add(&stump(len), Offload::NONE),
                        *alone,
                        "{from:?} to {to:?}, {tag:#x}, {len}"
                    );
                }
                if !first {
                    long(&mut a);
                }
                a.port_tx.flush();
                let together = if first { [seen, stumps].concat() } else { [stumps, seen].concat() };
                assert_eq!(b.take_all(), together);
            }
        }
    }
}

#[test]
fn what_is_no_frame_without_its_tag_goes_to_nobody_who_wants_it_so() {
    let switch = switch();
    let mut a = Host::new(&switch, "a");
    let mut b =
        Host::with(&switch, "b", |options| (options.vlan, options.mac) = (Vlan::Access(5), Some(mac(2))));
    let runt = |to| tagged(to, mac(1), 5, b"")[..17].to_vec();
    assert_eq!(a.send(&tagged(mac(2), mac(1), 5, b"")), Sent::Delivered(1));
    assert_eq!(b.take_all().len(), 1);
    assert_eq!(a.send(&runt(mac(2))), Sent::Dropped(DropReason::Runt));
    assert_eq!(a.send(&runt(BROADCAST)), Sent::Dropped(DropReason::NoPath));
    assert_eq!(b.take_all().len(), 0);
}

#[test]
fn a_tag_moves_where_the_checksum_begins() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.vlan = Vlan::Access(5));
    let mut all = Host::new(&switch, "all");
    let mut raw = Host::new(&switch, "raw");
    all.port.takes(RxOffloads::ALL);
    let plain = frame(BROADCAST, mac(1), &[0x11; 40]);
    let offload =
        Offload { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 14, csum_offset: 4, ..Offload::NONE };
    assert_eq!(a.add(&plain, offload), Sent::Delivered(2));
    a.port_tx.flush();
    let (whole, left) = all.take().unwrap();
    assert_eq!(
        (whole, left),
        (tagged(BROADCAST, mac(1), 5, &[0x11; 40]), Offload { csum_start: 18, ..offload })
    );
    let (summed, left) = raw.take().unwrap();
    assert_eq!(left, Offload::NONE);
    // Twenty words of 0x1111, in whose place the sum goes.
    let words = 20u32 * 0x1111;
    let sum = !((words & 0xffff) as u16 + (words >> 16) as u16);
    assert_eq!(summed[22..24], sum.to_be_bytes());
    assert_eq!(
        (&summed[..22], &summed[24..]),
        (&tagged(BROADCAST, mac(1), 5, &[0x11; 40])[..22], &[0x11; 34][..])
    );
}

#[test]
fn lies_about_checksums_are_dropped() {
    let switch = switch();
    let (mut a, mut b) = (Host::new(&switch, "a"), Host::new(&switch, "b"));
    for takes in [RxOffloads::ALL, RxOffloads::default()] {
        b.port.takes(takes);
        for (csum_start, csum_offset) in
            [(0, 0), (13, 0), (60, 0), (59, 0), (14, 45), (65_535, 65_535), (14, 65_535)]
        {
            let offload =
                Offload { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start, csum_offset, ..Offload::NONE };
            let bad = frame(BROADCAST, mac(1), &[0; 46]);
            assert_eq!(a.add(&bad, offload), Sent::Dropped(DropReason::Offload), "{offload:?}");
        }
    }
    a.port_tx.flush();
    assert_eq!((a.refused(DropReason::Offload), b.take_all().len()), (14, 0));
    // That a sum is right is not a guest's to say.
    let says = Offload { flags: VIRTIO_NET_HDR_F_DATA_VALID, ..Offload::NONE };
    b.port.takes(RxOffloads::ALL);
    a.add(&frame(BROADCAST, mac(1), &[]), says);
    a.port_tx.flush();
    assert_eq!(b.take().unwrap().1, Offload::NONE);
}

#[test]
fn floods_have_a_budget_and_the_rest_goes_on() {
    let switch = switch_with(|settings| (settings.flood_rate, settings.flood_burst) = (1, 10 * 2 * 256));
    let (mut a, mut b, mut c) = (Host::new(&switch, "a"), Host::new(&switch, "b"), Host::new(&switch, "c"));
    let storm = frame(BROADCAST, mac(1), &[0; 46]);
    let delivered = (0..1000).filter(|_| a.send(&storm) == Sent::Delivered(2)).count();
    assert_eq!((delivered, a.refused(DropReason::Storm)), (10, 990));
    // Its own unicast frames and everybody else's floods are not part of that.
    assert_eq!(b.send(&frame(BROADCAST, mac(2), b"")), Sent::Delivered(2));
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Delivered(1));
    assert_eq!((b.take_all().len(), c.take_all().len()), (11, 11));
}

#[test]
fn a_loop_is_held_and_the_address_stays_where_it_was() {
    let switch = switch();
    let (mut a, mut b, mut c) = (Host::new(&switch, "a"), Host::new(&switch, "b"), Host::new(&switch, "c"));
    let looping = frame(BROADCAST, mac(9), b"round and round");
    for _ in 0..50 {
        a.send(&looping);
        b.send(&looping);
    }
    let held = a.refused(DropReason::Loop) + b.refused(DropReason::Loop);
    assert!((40..=47).contains(&held), "{held} of 100");
    assert!(a.refused(DropReason::Loop) == 0 || b.refused(DropReason::Loop) == 0, "one of the two has it");
    assert!(switch.table().iter().any(|learned| learned.mac == mac(9) && learned.held));
    c.take_all();
    assert_eq!(c.send(&frame(mac(9), mac(3), b"")), Sent::Delivered(1));
}

#[test]
fn a_full_receiver_drops_its_own() {
    let switch = switch_with(|settings| settings.buffers = 4);
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut slow = Host::with(&switch, "slow", |options| options.mac = Some(mac(2)));
    let mut quick = Host::with(&switch, "quick", |options| options.mac = Some(mac(3)));
    let mut delivered = 0;
    for n in 0..100u8 {
        delivered += u64::from(a.add(&frame(mac(2), mac(1), &[n]), Offload::NONE) == Sent::Delivered(1));
        assert_eq!(a.add(&frame(mac(3), mac(1), &[n]), Offload::NONE), Sent::Delivered(1));
        a.port_tx.flush();
        assert_eq!(quick.take_all().len(), 1);
    }
    // A batch a buffer; one sender gets three quarters of them.
    assert_eq!(
        (delivered, slow.missed(DropReason::Full), quick.port.reading().received.dropped_in_all()),
        (3, 97, 0)
    );
    assert_eq!(quick.send(&frame(mac(2), mac(3), &[])), Sent::Delivered(1), "the last quarter is for others");
    assert_eq!(slow.take_all().len(), 4);
    assert_eq!(a.send(&frame(mac(2), mac(1), &[])), Sent::Delivered(1));
    assert_eq!(a.port.reading().sent.frames, 201);
}

#[test]
fn a_queue_that_starts_anew_goes_on_where_it_was() {
    let switch = switch();
    let (mut a, mut b) = (Host::new(&switch, "a"), Host::new(&switch, "b"));
    for n in 0..10 {
        a.add(&frame(BROADCAST, mac(1), &[n]), Offload::NONE);
    }
    a.port_tx.flush();
    a.send(&frame(BROADCAST, mac(1), &[10]));
    for n in 0..11u8 {
        b.port_rx = b.port.rx(0);
        assert_eq!(b.take().unwrap().0, frame(BROADCAST, mac(1), &[n]));
    }
    assert_eq!((b.take(), b.port.reading().waiting), (None, 0));
}

#[test]
fn a_link_that_is_down() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    a.send(&frame(mac(2), mac(1), b"waits"));
    b.port.set_up(false);
    assert_eq!((b.take_all().len(), b.missed(DropReason::Down)), (0, 1), "what waited is gone");
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Dropped(DropReason::Down));
    assert_eq!(a.send(&frame(BROADCAST, mac(1), b"")), Sent::Dropped(DropReason::NoPath));
    assert_eq!(b.send(&frame(mac(1), mac(2), b"")), Sent::Dropped(DropReason::Down));
    assert_eq!((b.missed(DropReason::Down), b.refused(DropReason::Down)), (2, 1));
    // With an outside it may be there by now.
    let mut up = Host::with(&switch, "up", |options| options.uplink = true);
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Delivered(1));
    assert_eq!(up.take_all().len(), 1);
}

#[test]
fn filters_of_the_receiver() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let group = [0x33, 0x33, 0, 0, 0, 9];
    let mut filter = RxFilter::NOTHING;
    filter.add(mac(2));
    b.port.filter(&filter);
    assert_eq!(a.send(&frame(group, mac(1), b"")), Sent::Dropped(DropReason::NoPath));
    assert_eq!(a.send(&frame(BROADCAST, mac(1), b"")), Sent::Delivered(1));
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Delivered(1));
    filter.add(group);
    b.port.filter(&filter);
    assert_eq!(a.send(&frame(group, mac(1), b"")), Sent::Delivered(1));
    filter.no_unicast = true;
    b.port.filter(&filter);
    assert_eq!(a.send(&frame(mac(2), mac(1), b"")), Sent::Dropped(DropReason::Filtered));
    assert_eq!((b.missed(DropReason::Filtered), b.take_all().len()), (1, 3));
}

/// A frame from host 1 to host 2, of the flow whose source port is `port`.
fn udp(port: u16) -> Vec<u8> {
    let mut packet = vec![0u8; 28];
    (packet[0], packet[9]) = (0x45, IPPROTO_UDP);
    packet[20..22].copy_from_slice(&port.to_be_bytes());
    let mut bytes = frame(mac(2), mac(1), &packet);
    bytes[12..14].copy_from_slice(&ETH_P_IP.to_be_bytes());
    bytes
}

#[test]
fn what_is_sent_on_a_pair_arrives_at_one_pair() {
    let switch = switch();
    let a = Host::with(&switch, "a", |options| (options.pairs, options.mac) = (8, Some(mac(1))));
    let b = Host::with(&switch, "b", |options| (options.pairs, options.mac) = (8, Some(mac(2))));
    let mut port_txs: Vec<_> = (0..8).map(|pair| a.port.tx(pair)).collect();
    let mut port_rxs: Vec<_> = (1..8).map(|pair| b.port.rx(pair)).collect();
    port_rxs.insert(0, b.port_rx);
    // (pairs that a uses, pairs that b uses, where what is sent on each of a's arrives); `None`: by flow.
    let arrivals = [
        (8, 8, Some([0, 1, 2, 3, 4, 5, 6, 7])),
        (8, 3, Some([0, 1, 2, 0, 1, 2, 0, 1])),
        (8, 1, Some([0; 8])),
        // A driver that sends on more pairs than it uses is served.
        (4, 4, Some([0, 1, 2, 3, 0, 1, 2, 3])),
        (7, 8, None),
        (1, 2, None),
    ];
    for (from, to, arrives) in arrivals {
        a.port.set_active_pairs(from);
        b.port.set_active_pairs(to);
        let mut by_flow = [None; 200];
        for (pair, port_tx) in port_txs.iter_mut().enumerate() {
            for port in 0..200 {
                assert_eq!(send(port_tx, &udp(port), Offload::NONE), Sent::Delivered(1));
            }
            port_tx.flush();
            let mut counts = [0; 8];
            for (at, port_rx) in port_rxs.iter_mut().enumerate() {
                let mut last = None;
                while let Some((bytes, _)) = take(port_rx) {
                    let port = u16::from_be_bytes([bytes[34], bytes[35]]);
                    assert!(last.is_none_or(|last| last < port), "in the order of the queue");
                    last = Some(port);
                    counts[at] += 1;
                    let place = by_flow[usize::from(port)].get_or_insert(at);
                    assert!(arrives.is_some() || *place == at, "flow {port} is at {at}, and was at {place}");
                }
            }
            match arrives {
                Some(arrives) => {
                    assert_eq!(counts[arrives[pair]], 200, "{from} to {to}, pair {pair}: {counts:?}")
                }
                None => assert!(counts[..usize::from(to)].iter().all(|count| *count > 0), "{counts:?}"),
            }
            assert_eq!(counts.iter().sum::<u32>(), 200);
        }
    }
}

#[test]
fn flows_keep_to_their_pair() {
    let switch = switch();
    let mut a = Host::new(&switch, "a");
    let b = Host::with(&switch, "b", |options| (options.pairs, options.mac) = (8, Some(mac(2))));
    let mut port_rxs: Vec<_> = (1..8).map(|pair| b.port.rx(pair)).collect();
    port_rxs.insert(0, b.port_rx);
    for active in [8, 3, 1] {
        b.port.set_active_pairs(active);
        for port in 0..400 {
            a.add(&udp(port), Offload::NONE);
            a.add(&udp(port), Offload::NONE);
        }
        a.port_tx.flush();
        let arrived: Vec<Vec<_>> =
            port_rxs.iter_mut().map(|port_rx| std::iter::from_fn(|| take(port_rx)).collect()).collect();
        for (pair, frames) in arrived.iter().enumerate() {
            assert_eq!(!frames.is_empty(), pair < usize::from(active), "pair {pair} of {active}");
            assert!(frames.chunks(2).all(|two| two[0] == two[1]), "a flow is split");
        }
        assert_eq!(arrived.iter().map(Vec::len).sum::<usize>(), 800);
    }
}

#[test]
fn a_batch_may_reach_more_queues_than_an_outlet_keeps_open() {
    let switch = switch();
    let mut a = Host::new(&switch, "a");
    let wide = |n: u8| Host::with(&switch, &format!("wide{n}"), |options| options.pairs = 16);
    let ports: Vec<_> = (0..18).map(wide).collect();
    let mut packet = frame(BROADCAST, mac(1), &[0; 46]);
    packet[12..15].copy_from_slice(&[8, 0, 0x45]);
    packet[23] = IPPROTO_UDP;
    for source in 0..100u16 {
        packet[34..36].copy_from_slice(&source.to_be_bytes());
        assert_eq!(a.add(&packet, Offload::NONE), Sent::Delivered(18));
    }
    a.port_tx.flush();
    for Host { port, .. } in ports {
        let queues: Vec<usize> = (0..16)
            .map(|pair| {
                let mut port_rx = port.rx(pair);
                std::iter::from_fn(|| take(&mut port_rx)).count()
            })
            .collect();
        assert_eq!(queues.iter().sum::<usize>(), 100);
        assert!(queues.iter().all(|count| *count > 0), "{queues:?}");
    }
}

#[test]
fn captures_see_both_directions_and_what_was_dropped() {
    let switch = switch();
    let (mut a, mut b) = (Host::new(&switch, "a"), Host::new(&switch, "b"));
    let mut capture = switch.capture("a", CaptureOptions { snaplen: 40, frames: 4 }).unwrap();
    assert!(matches!(switch.capture("a", CaptureOptions::default()), Err(NetworkError::Captured { .. })));
    assert!(matches!(switch.capture("x", CaptureOptions::default()), Err(NetworkError::NoSuchPort { .. })));
    let long = frame(BROADCAST, mac(1), &[5; 100]);
    let spoofed = frame(BROADCAST, [1; 6], &[6; 200]);
    let answer = frame(mac(1), mac(2), b"yes");
    a.send(&long);
    assert_eq!(a.send(&spoofed), Sent::Dropped(DropReason::Malformed));
    b.send(&answer);
    a.send(&frame(mac(2), mac(1), b"direct"));
    let seen: Vec<_> = capture.by_ref().map(|c| (c.direction, c.len, c.bytes)).collect();
    let direct = frame(mac(2), mac(1), b"direct");
    assert_eq!(
        seen,
        [
            (Direction::Sent, 114, long[..40].to_vec()),
            (Direction::Sent, 214, spoofed[..40].to_vec()),
            (Direction::Received, 17, answer),
            (Direction::Sent, 20, direct),
        ]
    );
    for _ in 0..9 {
        a.send(&long);
    }
    assert_eq!((capture.by_ref().count(), capture.overflow()), (4, 5));
    drop(capture);
    a.send(&long);
    assert!(switch.capture("a", CaptureOptions::default()).is_ok_and(|mut again| again.next().is_none()));
    assert!(switch.capture("a", CaptureOptions { snaplen: 1 << 20, frames: 1 << 10 }).is_err());
}

#[test]
fn plugging_is_checked_and_slots_come_back() {
    let switch = switch();
    let _a = Host::new(&switch, "a");
    let plug = |change: fn(&mut ioplane_network::PortOptions)| {
        let mut options = ioplane_network::PortOptions::new("b");
        change(&mut options);
        switch.plug(options).err()
    };
    assert!(matches!(plug(|options| options.name = "a".into()), Some(NetworkError::NameTaken { .. })));
    assert!(matches!(plug(|options| options.pairs = 0), Some(NetworkError::Pairs { .. })));
    assert!(matches!(plug(|options| options.pairs = 17), Some(NetworkError::Pairs { .. })));
    assert!(matches!(plug(|options| options.mac = Some([1; 6])), Some(NetworkError::Mac { .. })));
    assert!(matches!(plug(|options| options.vlan = Vlan::Access(4095)), Some(NetworkError::Vlan { .. })));
    assert!(plug(|_| ()).is_none());
    let mut ports = Vec::new();
    let full = loop {
        match switch.plug(ioplane_network::PortOptions::new(&format!("p{}", ports.len()))) {
            Ok(port) => ports.push(port),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, NetworkError::NoSlot { .. }));
    assert_eq!((ports.len(), switch.ports().len()), (255, 256));
    ports.truncate(3);
    assert_eq!(switch.ports().len(), 4);
}

#[test]
fn an_unplugged_port_leaves_working_halves_that_do_nothing() {
    let switch = switch();
    let (mut a, b) = (Host::new(&switch, "a"), Host::new(&switch, "b"));
    let Host { port, mut port_tx, mut port_rx } = b;
    // In a's hands while b goes.
    assert_eq!(a.add(&frame(BROADCAST, mac(1), b""), Offload::NONE), Sent::Delivered(1));
    drop(port);
    a.port_tx.flush();
    assert_eq!(
        send(&mut port_tx, &frame(BROADCAST, mac(2), b""), Offload::NONE),
        Sent::Dropped(DropReason::Down)
    );
    port_tx.flush();
    assert_eq!(a.send(&frame(BROADCAST, mac(1), b"")), Sent::Dropped(DropReason::NoPath));
    while take(&mut port_rx).is_some() {}
    assert_eq!(a.take(), None);
}

#[test]
fn what_waits_is_counted_as_lost_for_whoever_goes_on_and_stays_where_it_is() {
    let old = switch();
    let mut a = Host::with(&old, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&old, "b", |options| options.mac = Some(mac(2)));
    let frames: Vec<_> = (0..3000u32).map(|n| frame(mac(2), mac(1), &vec![n as u8; 500])).collect();
    for frame in &frames {
        assert_eq!(a.add(frame, Offload::NONE), Sent::Delivered(1));
    }
    a.port_tx.flush();
    // One has been read out of the first buffer, and its reader has gone.
    assert_eq!(b.port_rx.front().unwrap().bytes(), frames[0]);
    b.port_rx.pop();
    b.port_rx = b.port.rx(0);
    let (sent, received) = b.port.final_counts();
    assert_eq!((received.frames, received.dropped(DropReason::Upgrade)), (1, 2999));
    let new = switch();
    let restored = Host::with(&new, "b", |options| options.mac = Some(mac(2)));
    restored.port.restore((&sent, &received));
    assert_eq!((restored.port.reading().sent, restored.port.reading().received), (sent, received));
    // Taken back, nothing is lost.
    assert_eq!(b.take_all(), frames[1..]);
    assert_eq!(b.port.final_counts().1.dropped(DropReason::Upgrade), 0);
}
