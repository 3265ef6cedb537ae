//! Virtio-net against drivers on both sides of a switch: frames, offloads, filters, pairs, and the control queue.

mod lan;

use ioplane_device::Quiescent;
use ioplane_network::DropReason;
use ioplane_testkit::driver::Part;
use ioplane_testkit::driver::net::{NetHeader, PairPlan, Sending};
use ioplane_virtio::net::Net;
use ioplane_virtio::net::spec::control::*;
use ioplane_virtio::net::spec::*;
use ioplane_virtio::spec::feature::*;
use ioplane_virtio::{Vdev, VirtioDevice};
use lan::packet::{self, payload, plain, tagged, tcp};
use lan::{Lan, Nic, Wants, mac};

const NONE: NetHeader = NetHeader {
    flags: 0,
    gso_type: 0,
    hdr_len: 0,
    gso_size: 0,
    csum_start: 0,
    csum_offset: 0,
    num_buffers: 0,
};

fn bytes(frames: Vec<(NetHeader, Vec<u8>)>) -> Vec<Vec<u8>> {
    frames.into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn frames_cross_whole_in_every_shape() {
    for sending in [Sending::Together, Sending::Apart, Sending::Indirect] {
        for refused in
            [0, VIRTIO_F_EVENT_IDX, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF]
        {
            let lan = Lan::new();
            let wants = |number| {
                let wants = Wants::new(number).without(refused);
                Wants { plan: PairPlan { sending, ..wants.plan }, ..wants }
            };
            let (mut a, mut b) = (lan.plug_with(wants(1)), lan.plug_with(wants(2)));
            let frames: Vec<_> =
                [14, 60, 61, 128, 129, 1000, 1514].map(|len| plain(mac(2), mac(1), len)).into();
            for frame in &frames {
                a.send(NONE, frame);
            }
            let came = b.receive();
            for (header, _) in &came {
                // Without the field of a legacy driver the header ends before it.
                let buffers = if refused & VIRTIO_F_VERSION_1 != 0 { 0 } else { 1 };
                assert_eq!(*header, NetHeader { num_buffers: buffers, ..NONE });
            }
            assert_eq!(bytes(came), frames, "{sending:?} without {refused:#x}");
            let total: usize = frames.iter().map(Vec::len).sum();
            assert_eq!((a.counts(1).requests, a.counts(1).bytes_written), (7, total as u64));
            assert_eq!((b.counts(0).requests, b.counts(0).bytes_read), (7, total as u64));
        }
    }
}

#[test]
fn a_ring_goes_round_many_times() {
    for packed in [false, true] {
        let lan = Lan::new();
        let (mut a, mut b) = (
            lan.plug_with(Wants { packed, ..Wants::new(1) }),
            lan.plug_with(Wants { packed, ..Wants::new(2) }),
        );
        for round in 0..2000u32 {
            let len = 60 + (round % 1400) as usize;
            a.send(NONE, &plain(mac(2), mac(1), len));
            assert_eq!(bytes(b.receive()), [plain(mac(2), mac(1), len)]);
        }
        assert_eq!((a.reading().sent.frames, b.reading().received.frames), (2000, 2000));
    }
}

#[test]
fn large_frames_go_whole_to_who_takes_them_and_in_segments_to_who_does_not() {
    let data = payload(50_000);
    let large = |from| tcp(mac(2), mac(from), (1, 2), &data);
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    a.send(packet::large_header(1448), &large(1));
    let came = b.receive();
    let [(header, whole)] = &came[..] else { panic!("{} frames instead of a whole one", came.len()) };
    assert_eq!(*whole, large(1));
    let buffers = (large(1).len() + 12).div_ceil(1536) as u16;
    assert_eq!(*header, NetHeader { num_buffers: buffers, ..packet::large_header(1448) });
    b.unplug();

    // Neither large frames nor buffers that are merged: small segments, whose sums are right.
    for refused in [GUEST_OFFLOADS, VIRTIO_NET_F_GUEST_TSO4, GUEST_OFFLOADS | VIRTIO_NET_F_MRG_RXBUF] {
        let mut b = lan.plug_with(Wants::new(2).without(refused));
        a.send(packet::large_header(1448), &large(1));
        let came = b.receive();
        assert_eq!(came.len(), 50_000usize.div_ceil(1448));
        let mut all = Vec::new();
        for (header, segment) in &came {
            assert_eq!((header.gso_type, header.flags & 1), (0, 0));
            let (sequence, part) = packet::open(segment).unwrap();
            assert_eq!(sequence, 1000 + all.len() as u32);
            assert!(segment.len() <= 1514);
            all.extend_from_slice(part);
        }
        assert_eq!(all, data);
        b.unplug();
    }
}

#[test]
fn a_checksum_is_completed_for_who_does_not_take_it_so() {
    let lan = Lan::new();
    let mut a = lan.plug(1);
    for (refused, left) in [(0, 1), (GUEST_OFFLOADS, 0)] {
        let mut b = lan.plug_with(Wants::new(2).without(refused));
        let frame = tcp(mac(2), mac(1), (7, 8), b"to be summed");
        a.send(packet::checksum_header(), &frame);
        let came = b.receive();
        assert_eq!((came.len(), came[0].0.flags & 1), (1, left));
        if left == 1 {
            assert_eq!(came[0].1, frame);
        } else {
            assert_eq!(packet::open(&came[0].1).unwrap().1, b"to be summed");
        }
        b.unplug();
    }
}

#[test]
fn what_a_driver_takes_can_be_switched_while_it_runs() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    let frame = tcp(mac(2), mac(1), (1, 2), &payload(3000));
    let set = |b: &mut Nic, bits: u64| {
        let set = VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET;
        b.command(VIRTIO_NET_CTRL_GUEST_OFFLOADS, set, &bits.to_le_bytes())
    };
    assert_eq!(set(&mut b, 0), VIRTIO_NET_OK);
    a.send(packet::large_header(1448), &frame);
    assert_eq!(b.receive().len(), 3);
    assert_eq!(set(&mut b, GUEST_OFFLOADS), VIRTIO_NET_OK);
    a.send(packet::large_header(1448), &frame);
    assert_eq!(b.receive().len(), 1);
    assert_eq!(set(&mut b, 1 << 30), VIRTIO_NET_ERR, "never promised");
    // Switched off while one is on its way: it does not reach a driver that would not know what to do with it.
    let mut c = lan.plug_with(Wants { filled: 0, ..Wants::new(3) });
    a.send(packet::large_header(1448), &tcp(mac(3), mac(1), (1, 2), &payload(3000)));
    assert_eq!(set(&mut c, 0), VIRTIO_NET_OK);
    c.pairs[0].fill();
    assert_eq!((c.receive().len(), c.received_dropped(DropReason::Offload)), (0, 1));
}

#[test]
fn a_frame_waits_for_room_and_is_never_seen_by_half() {
    for packed in [false, true] {
        let lan = Lan::new();
        let mut a = lan.plug(1);
        let mut b = lan.plug_with(Wants { filled: 3, packed, ..Wants::new(2) });
        let frame = tcp(mac(2), mac(1), (1, 2), &payload(8000));
        a.send(packet::large_header(1448), &frame);
        a.send(NONE, &plain(mac(2), mac(1), 60));
        for _ in 0..100 {
            lan.core.turn();
        }
        assert!(!b.pairs[0].rx().has_used(), "half of a frame has been published");
        // It may sleep, but wants to hear of more room.
        b.pairs[0].rx().kick_needed();
        assert!(lan.core.arm(), "nobody can do anything now");
        b.pairs[0].fill_some(3, 1);
        assert!(b.pairs[0].rx().kick_needed(), "a frame waits for room");
        assert!(!lan.core.arm(), "there may be enough now");
        lan.core.disarm();
        lan.settle();
        assert!(!b.pairs[0].rx().has_used());
        b.pairs[0].fill_some(4, 100);
        assert_eq!(bytes(b.receive()), [frame, plain(mac(2), mac(1), 60)]);
        assert_eq!(b.reading().received.drops, []);
    }
}

#[test]
fn nothing_is_lost_by_a_pause_while_a_frame_waits_for_room() {
    for packed in [false, true] {
        let lan = Lan::new();
        let mut a = lan.plug(1);
        let mut b = lan.plug_with(Wants { filled: 2, packed, ..Wants::new(2) });
        let frame = tcp(mac(2), mac(1), (1, 2), &payload(8000));
        a.send(packet::large_header(1448), &frame);
        let quiescent = b.quiesce();
        let setup = quiescent.device().queue(0).unwrap();
        assert_eq!(setup.in_flight.len(), 0, "chains gathered are given back");
        assert!(packed || setup.base == Some(0));
        a.send(NONE, &plain(mac(2), mac(1), 60));
        b.resume(quiescent);
        b.pairs[0].fill_some(2, 100);
        assert_eq!(bytes(b.receive()), [frame, plain(mac(2), mac(1), 60)]);
    }
}

#[test]
fn a_slow_receiver_loses_its_own_frames_and_nobody_elses() {
    let lan = Lan::new();
    let (mut a, mut good) = (lan.plug(1), lan.plug(3));
    let slow = lan.plug_with(Wants { filled: 0, ..Wants::new(2) });
    let mut sent = 0;
    while slow.received_dropped(DropReason::Full) == 0 {
        a.send(NONE, &plain(mac(2), mac(1), 1514));
        a.send(NONE, &plain(mac(3), mac(1), 1514));
        sent += 1;
        assert_eq!(good.receive().len(), 1);
        assert!(sent < 100_000, "an inbox without an end");
    }
    assert!(sent > 16, "{sent} frames fill it");
    assert_eq!(good.reading().received.drops, []);
}

#[test]
fn an_idle_receiver_wants_no_kicks_for_its_room() {
    for (refused, packed) in [(0, false), (VIRTIO_F_EVENT_IDX, false), (0, true), (VIRTIO_F_EVENT_IDX, true)]
    {
        let lan = Lan::new();
        let mut a = lan.plug(1);
        let mut b = lan.plug_with(Wants { filled: 100, packed, ..Wants::new(2).without(refused) });
        b.pairs[0].rx().kick_needed();
        a.send(NONE, &plain(mac(2), mac(1), 60));
        assert_eq!(b.receive().len(), 1);
        b.pairs[0].rx().kick_needed();
        assert!(lan.core.arm());
        b.pairs[0].fill_some(100, 50);
        assert!(!b.pairs[0].rx().kick_needed(), "room that nothing waits for");
        // A frame wakes a receiver that sleeps.
        assert!(a.pairs[0].send(NONE, &plain(mac(2), mac(1), 60)).unwrap());
        assert!(a.pairs[0].tx().kick_needed(), "work that sleeps");
        lan.core.disarm();
        assert_eq!(b.receive().len(), 1);
    }
}

#[test]
fn what_can_never_fit_is_dropped_by_name() {
    let lan = Lan::new();
    let mut a = lan.plug(1);
    let small = |number, refused| {
        let wants = Wants::new(number).without(refused);
        Wants { plan: PairPlan { buffer_bytes: 100, size: 16, buffers: 16, slots: 4, ..wants.plan }, ..wants }
    };
    let (mut one, mut merged) = (lan.plug_with(small(2, VIRTIO_NET_F_MRG_RXBUF)), lan.plug_with(small(3, 0)));
    for (nic, number, fits) in [(&mut one, 2, 88), (&mut merged, 3, 1588)] {
        let fitting = |len: usize| {
            if len <= 1514 {
                plain(mac(number), mac(1), len)
            } else {
                tcp(mac(number), mac(1), (1, 2), &payload(len - packet::HEADERS))
            }
        };
        for len in [fits, fits + 1, 60] {
            let frame = fitting(len);
            let header = if len > 1514 { packet::large_header(1448) } else { NONE };
            a.send(header, &frame);
        }
        assert_eq!(bytes(nic.receive()), [fitting(fits), fitting(60)]);
        assert_eq!(nic.received_dropped(DropReason::NoBuffer), 1);
    }
}

#[test]
fn receive_modes_and_addresses() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    let rx = |b: &mut Nic, mode, on: u8| {
        assert_eq!(b.command(VIRTIO_NET_CTRL_RX, mode, &[on]), VIRTIO_NET_OK);
    };
    let group = [0x33, 0x33, 0, 0, 0, 9];
    let other = [0x33, 0x33, 0, 0, 0, 0x77];
    let stranger = [2, 2, 2, 2, 2, 2];
    let mut hears = |b: &mut Nic| {
        [mac(2), stranger, group, other, [0xff; 6]].map(|to| {
            a.send(NONE, &plain(to, mac(1), 60));
            b.receive().len() == 1
        })
    };
    assert_eq!(hears(&mut b), [true; 5], "all, until it says what it wants");
    rx(&mut b, VIRTIO_NET_CTRL_RX_PROMISC, 0);
    assert_eq!(hears(&mut b), [true, false, false, false, true]);
    let table = |unicast: &[[u8; 6]], multicast: &[[u8; 6]]| {
        let part = |macs: &[[u8; 6]]| [&(macs.len() as u32).to_le_bytes()[..], &macs.concat()].concat();
        [part(unicast), part(multicast)].concat()
    };
    let set = (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET);
    assert_eq!(b.command(set.0, set.1, &table(&[stranger], &[group])), VIRTIO_NET_OK);
    assert_eq!(hears(&mut b), [true, true, true, false, true]);
    rx(&mut b, VIRTIO_NET_CTRL_RX_ALLMULTI, 1);
    assert_eq!(hears(&mut b), [true; 5]);
    rx(&mut b, VIRTIO_NET_CTRL_RX_NOBCAST, 1);
    rx(&mut b, VIRTIO_NET_CTRL_RX_NOUNI, 1);
    assert_eq!(hears(&mut b), [false, false, true, true, false]);
    for mode in [VIRTIO_NET_CTRL_RX_NOBCAST, VIRTIO_NET_CTRL_RX_NOUNI, VIRTIO_NET_CTRL_RX_ALLMULTI] {
        rx(&mut b, mode, 0);
    }
    // More than there is room for, in pieces: all of that kind.
    let many: Vec<_> = (0..200u8).map(|n| [0x33, 0x33, 1, 1, 1, n]).collect();
    let data = table(&[], &many);
    let pieces = [1, 1, 3, 1, data.len() as u32 - 4];
    assert_eq!(b.command_in(set.0, set.1, &data, &pieces), VIRTIO_NET_OK);
    assert_eq!(hears(&mut b), [true, false, true, true, true]);
    assert_eq!(b.command(set.0, set.1, &table(&[], &[])), VIRTIO_NET_OK);
    assert_eq!(hears(&mut b), [true, false, false, false, true]);
    // Another address of its own.
    assert_eq!(b.command(set.0, VIRTIO_NET_CTRL_MAC_ADDR_SET, &stranger), VIRTIO_NET_OK);
    assert!(hears(&mut b)[1]);
    let mut shown = [0; 6];
    b.running().device().model().read_config(0, &mut shown);
    assert_eq!(shown, stranger);
}

#[test]
fn vlans_are_filtered_once_the_driver_can_say_which() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    let mut old = lan.plug_with(Wants::new(3).without(VIRTIO_NET_F_CTRL_VLAN));
    let mut hears = |nic: &mut Nic, to| {
        [7u16, 4094].map(|vlan| {
            a.send(NONE, &tagged(to, mac(1), vlan, 64));
            nic.receive().len() == 1
        })
    };
    assert_eq!(hears(&mut b, mac(2)), [false, false]);
    assert_eq!(hears(&mut old, mac(3)), [true, true], "a driver without a filter");
    let vlan = |b: &mut Nic, command, id: u16| b.command(VIRTIO_NET_CTRL_VLAN, command, &id.to_le_bytes());
    assert_eq!(vlan(&mut b, VIRTIO_NET_CTRL_VLAN_ADD, 7), VIRTIO_NET_OK);
    assert_eq!(vlan(&mut b, VIRTIO_NET_CTRL_VLAN_ADD, 4094), VIRTIO_NET_OK);
    assert_eq!(hears(&mut b, mac(2)), [true, true]);
    assert_eq!(vlan(&mut b, VIRTIO_NET_CTRL_VLAN_DEL, 7), VIRTIO_NET_OK);
    assert_eq!(hears(&mut b, mac(2)), [false, true]);
    assert_eq!(vlan(&mut b, VIRTIO_NET_CTRL_VLAN_ADD, 4096), VIRTIO_NET_ERR);
}

#[test]
fn flows_spread_over_the_pairs_in_use_and_each_stays_on_one() {
    let lan = Lan::new();
    let mut a = lan.plug(1);
    let mut b = lan.plug_with(Wants { pairs: 4, ..Wants::new(2) });
    let mut spread = |b: &mut Nic| {
        for flow in 0..64u16 {
            for n in 0..3 {
                a.send(packet::checksum_header(), &tcp(mac(2), mac(1), (1000 + flow, 80), &[n; 10]));
            }
        }
        let mut pairs = Vec::new();
        for pair in 0..4 {
            let came = bytes(b.receive_on(pair));
            let ports: Vec<u16> =
                came.iter().map(|frame| u16::from_be_bytes([frame[34], frame[35]])).collect();
            for port in &ports {
                assert_eq!(ports.iter().filter(|other| *other == port).count(), 3, "a flow on two pairs");
            }
            pairs.push(came.len());
        }
        assert_eq!(pairs.iter().sum::<usize>(), 192, "{pairs:?}");
        pairs
    };
    assert_eq!(spread(&mut b), [192, 0, 0, 0], "one pair, until the driver asks for more");
    let set = |b: &mut Nic, pairs: u16| {
        b.command(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, &pairs.to_le_bytes())
    };
    assert_eq!(set(&mut b, 4), VIRTIO_NET_OK);
    assert!(spread(&mut b).iter().all(|frames| *frames > 0));
    assert_eq!(set(&mut b, 2), VIRTIO_NET_OK);
    assert_eq!(spread(&mut b)[2..], [0, 0]);
    for wrong in [0, 5, u16::MAX] {
        assert_eq!(set(&mut b, wrong), VIRTIO_NET_ERR);
    }
    assert_eq!(spread(&mut b)[2..], [0, 0], "a wrong command changes nothing");
}

#[test]
fn without_a_control_queue_the_pairs_in_use_are_those_that_run() {
    let lan = Lan::new();
    let mut b = lan.plug_with(Wants { pairs: 3, control: false, ..Wants::new(2) });
    assert_eq!(b.reading().active_pairs, 3);
    assert_eq!(b.running().device().model().info().queues, 6);
    let features = b.running().device().model().features();
    assert_eq!(features & NEED_CTRL_VQ, 0);
    assert_ne!(features & VIRTIO_NET_F_MQ, 0);
    assert_eq!(b.fault(4), None);
    assert_eq!(b.reading().active_pairs, 2, "the third has stopped");
    let quiescent = b.quiesce();
    assert!(b.running.is_none() && quiescent.device().model().port().is_up(), "a pause is no unplugging");
    b.resume(quiescent);
    assert_eq!(b.reading().active_pairs, 3);
}

/// Linux ends its probe of a NIC that offers MQ or GUEST_ANNOUNCE without CTRL_VQ; Cloud Hypervisor offers its own control queue only
/// if the backend offers CTRL_VQ.
#[test]
fn nothing_is_offered_that_a_driver_would_refuse_without_a_control_queue() {
    let lan = Lan::new();
    for (number, control) in [(1, true), (2, false)] {
        let mut nic = lan.plug_with(Wants { pairs: 2, control, ..Wants::new(number) });
        let features = nic.running().device().model().features();
        let need = NEED_CTRL_VQ | VIRTIO_NET_F_MQ | VIRTIO_NET_F_GUEST_ANNOUNCE;
        assert!(features & need != 0 && features & VIRTIO_NET_F_CTRL_VQ != 0, "{features:#x}");
        // Accepted, it adds no queue here where the VMM serves it.
        let model = nic.running().device_mut().model_mut();
        model.accept(VIRTIO_F_VERSION_1 | VIRTIO_NET_F_CTRL_VQ);
        assert_eq!(model.info().queues, if control { 5 } else { 4 });
    }
}

#[test]
fn the_third_queue_is_the_control_queue_of_a_driver_without_multiqueue() {
    let lan = Lan::new();
    let mut b = lan.plug_with(Wants { pairs: 2, ..Wants::new(2).without(VIRTIO_NET_F_MQ) });
    assert_eq!(b.command(VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC, &[0]), VIRTIO_NET_OK);
    let pairs = 2u16.to_le_bytes();
    assert_eq!(b.command(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, &pairs), VIRTIO_NET_ERR);
}

#[test]
fn the_configuration_the_link_and_the_announcement() {
    let lan = Lan::new();
    let mut b = lan.plug_with(Wants { pairs: 2, mtu: 9000, ..Wants::new(2) });
    let mut config = [0xee; 14];
    let mut look = |b: &mut Nic| {
        b.running().device().model().read_config(0, &mut config);
        assert_eq!((config[..6].to_vec(), &config[8..]), (mac(2).to_vec(), &[2, 0, 0x28, 0x23, 0, 0][..]));
        config[6]
    };
    assert_eq!(look(&mut b), 1);
    assert!(b.reading().up);
    let model = |b: &mut Nic, change: fn(&mut Net) -> bool| change(b.running().device_mut().model_mut());
    assert!(model(&mut b, |net| net.set_link(false)));
    assert!(!model(&mut b, |net| net.set_link(false)), "no change, no interrupt");
    assert_eq!((look(&mut b), b.reading().up), (0, false));
    let mut a = lan.plug(1);
    a.send(NONE, &plain(mac(2), mac(1), 60));
    assert_eq!((b.receive().len(), b.received_dropped(DropReason::Down)), (0, 1));
    assert!(model(&mut b, |net| net.set_link(true)));
    assert!(model(&mut b, Net::ask_for_announcement));
    assert_eq!(look(&mut b), 3);
    assert_eq!(b.command(VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, &[0]), VIRTIO_NET_ERR);
    assert_eq!(b.command(VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, &[]), VIRTIO_NET_OK);
    assert_eq!(look(&mut b), 1);
    // On behalf of a guest that cannot.
    let address = b.mac;
    b.running().device_mut().model_mut().announce(address);
    let came = bytes(a.receive());
    assert_eq!(came.len(), 1);
    assert_eq!(
        (&came[0][..6], &came[0][6..12], &came[0][12..14]),
        (&[0xff; 6][..], &mac(2)[..], &[0x80, 0x35][..])
    );
}

#[test]
fn a_reset_device_is_as_new_and_what_waited_is_gone() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    assert_eq!(b.command(VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC, &[0]), VIRTIO_NET_OK);
    let mut quiescent = b.quiesce();
    a.send(NONE, &plain(mac(2), mac(1), 60));
    assert_eq!(b_waiting(&quiescent), 1);
    quiescent.reset();
    assert_eq!(b_waiting(&quiescent), 0);
    let reading = quiescent.device().model().port().reading();
    assert!(!reading.up && reading.received.dropped(DropReason::Down) == 1, "{reading:?}");
    assert!(!reading.takes.checksum);
}

fn b_waiting(quiescent: &Quiescent<Vdev<Net>>) -> usize {
    quiescent.device().model().port().reading().waiting
}

#[test]
fn a_saved_nic_goes_on_in_a_fresh_one() {
    let lan = Lan::new();
    let mut a = lan.plug(1);
    let mut b = lan.plug_with(Wants { pairs: 2, ..Wants::new(2) });
    let filter = [VIRTIO_NET_CTRL_RX_PROMISC, VIRTIO_NET_CTRL_RX_ALLMULTI];
    for mode in filter {
        assert_eq!(b.command(VIRTIO_NET_CTRL_RX, mode, &[0]), VIRTIO_NET_OK);
    }
    let vlan = 9u16.to_le_bytes();
    assert_eq!(b.command(VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, &vlan), VIRTIO_NET_OK);
    let pairs = 2u16.to_le_bytes();
    assert_eq!(b.command(VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, &pairs), VIRTIO_NET_OK);
    let quiescent = b.quiesce();
    let state = quiescent.save().unwrap();
    // The old one leaves the switch, the new one takes its place.
    drop(quiescent);
    let fresh = lan.fresh(&b, 2);
    let loaded = Quiescent::new(fresh).load(&state).unwrap().into_quiescent();
    assert_eq!(loaded.save().unwrap(), state);
    assert_eq!(loaded.device().model().port().reading().active_pairs, 2);
    b.resume(loaded);
    a.send(NONE, &tagged(mac(2), mac(1), 9, 64));
    a.send(NONE, &tagged(mac(2), mac(1), 10, 64));
    a.send(NONE, &plain([0x33, 0x33, 0, 0, 0, 1], mac(1), 60));
    let came = [0, 1].map(|pair| bytes(b.receive_on(pair))).concat();
    assert_eq!(came, [tagged(mac(2), mac(1), 9, 64)]);
    // Every cut and every flipped byte is refused or loads something possible; nothing panics.
    b.running = None;
    lan.settle();
    for at in 0..state.body.len() {
        let (mut cut, mut flipped) = (state.clone(), state.clone());
        cut.body.truncate(at);
        flipped.body[at] ^= 0xff;
        for hostile in [cut, flipped] {
            let _ = Quiescent::new(lan.fresh(&b, 2)).load(&hostile);
        }
    }
}

#[test]
fn what_is_in_an_indirect_table_or_in_many_pieces_is_one_frame() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    let frame = plain(mac(2), mac(1), 200);
    let pair = &mut a.pairs[0];
    let slot = pair.next().unwrap();
    pair.write(slot, NONE, &frame).unwrap();
    let from = pair.slot_gpa(slot) - 12;
    // Header and addresses cut in the middle; an empty buffer; the rest byte by byte.
    let mut parts: Vec<_> = [(0, 5), (5, 10), (15, 0), (15, 85)]
        .map(|(at, len)| Part { gpa: from + at, len, write: false })
        .into();
    parts.extend((100..212).map(|at| Part { gpa: from + at, len: 1, write: false }));
    let head = pair.tx().chain(&parts).unwrap();
    pair.tx().push(head);
    lan.settle();
    assert_eq!(bytes(b.receive()), [frame]);
    assert_eq!(a.pairs[0].reap().unwrap(), 1);
}
