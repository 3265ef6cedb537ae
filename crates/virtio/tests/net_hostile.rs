//! What a hostile driver of a NIC does is dropped or stops its queue, by name, and the others do not notice.

mod lan;

use ioplane_network::{DropReason, SwitchSettings};
use ioplane_testkit::driver::Part;
use ioplane_testkit::driver::net::{Commands, NetHeader, PairPlan};
use ioplane_testkit::driver::raw::RawDesc;
use ioplane_virtio::net::spec::control::*;
use ioplane_virtio::net::spec::*;
use lan::packet::{self, payload, plain, tcp};
use lan::{Lan, Nic, Wants, mac};

/// A hostile NIC, its victim, and two honest ones that go on talking.
struct Scene {
    lan: Lan,
    bad: Nic,
    victim: Nic,
    honest: Nic,
    sent: u8,
}

impl Scene {
    fn new() -> Self {
        Self::with(Wants::new(1), SwitchSettings::default())
    }

    fn with(bad: Wants, settings: SwitchSettings) -> Self {
        let lan = Lan::with(settings);
        let (bad, victim, honest) = (lan.plug_with(bad), lan.plug(2), lan.plug(3));
        Scene { lan, bad, victim, honest, sent: 0 }
    }

    /// The honest one sends to the victim, which receives that and nothing else.
    fn goes_on(&mut self) {
        self.sent += 1;
        let frame = plain(mac(2), mac(3), 60 + usize::from(self.sent));
        self.honest.send(NetHeader::default(), &frame);
        let came: Vec<_> = self.victim.receive().into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(came, [frame], "the victim gets what is honest, and that alone");
    }

    fn dropped(&mut self, header: NetHeader, frame: &[u8], cause: DropReason) {
        let before = self.bad.sent_dropped(cause);
        self.bad.send(header, frame);
        assert_eq!(self.bad.sent_dropped(cause), before + 1, "{cause:?}: {header:?}");
        self.goes_on();
    }
}

#[test]
fn frames_that_nobody_may_send() {
    let mut scene = Scene::new();
    let none = NetHeader::default();
    for len in [0, 1, 13] {
        scene.dropped(none, &plain(mac(2), mac(1), 14)[..len], DropReason::Runt);
    }
    for len in [1523, 9000, 66_000] {
        scene.dropped(none, &plain(mac(2), mac(1), len), DropReason::Giant);
    }
    scene.dropped(none, &plain(mac(2), [0xff; 6], 60), DropReason::Malformed);
    scene.dropped(none, &plain(mac(2), [0; 6], 60), DropReason::Malformed);
    scene.dropped(none, &plain(mac(2), mac(3), 60), DropReason::Spoofed);
    assert_eq!(scene.bad.fault(1), None, "dropped, not stopped");
}

#[test]
fn headers_that_lie_about_offloads() {
    let mut scene = Scene::new();
    let frame = tcp(mac(2), mac(1), (1, 2), &payload(4000));
    let honest = packet::large_header(1448);
    for lie in [
        NetHeader { gso_size: 0, ..honest },
        NetHeader { flags: 0, ..honest },
        NetHeader { gso_type: 3, ..honest },
        NetHeader { gso_type: 0x7f, ..honest },
        NetHeader { csum_start: 13, ..honest },
        NetHeader { csum_start: u16::MAX, ..honest },
        NetHeader { csum_offset: u16::MAX, ..honest },
        NetHeader { csum_offset: 6, ..honest },
        NetHeader { hdr_len: u16::MAX, ..honest },
    ] {
        scene.dropped(lie, &frame, DropReason::Offload);
    }
    let short = plain(mac(2), mac(1), 60);
    for lie in [
        NetHeader { csum_offset: 25, ..packet::checksum_header() },
        NetHeader { csum_start: 59, csum_offset: 0, ..packet::checksum_header() },
    ] {
        scene.dropped(lie, &short, DropReason::Offload);
    }
}

#[test]
fn claims_that_were_not_negotiated() {
    let frame = tcp(mac(2), mac(1), (1, 2), &payload(4000));
    let small = tcp(mac(2), mac(1), (1, 2), &payload(100));
    let mut scene = Scene::with(Wants::new(1).without(VIRTIO_NET_F_CSUM), SwitchSettings::default());
    scene.dropped(packet::checksum_header(), &small, DropReason::Offload);
    scene.dropped(packet::large_header(1448), &frame, DropReason::Offload);
    let without = VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_ECN;
    let mut scene = Scene::with(Wants::new(1).without(without), SwitchSettings::default());
    scene.dropped(packet::large_header(1448), &frame, DropReason::Offload);
    let ecn = NetHeader { gso_type: 0x81, ..packet::large_header(1448) };
    scene.dropped(ecn, &frame, DropReason::Offload);
}

/// Puts a chain of `parts` on the transmit ring, and sees that it comes back.
fn chain(nic: &mut Nic, parts: &[Part]) {
    let head = nic.pairs[0].tx().chain(parts).unwrap();
    nic.pairs[0].tx().push(head);
    nic.core.turn_until_idle(1000);
    assert_eq!(nic.pairs[0].reap().unwrap(), 1, "a chain that did not come back");
}

#[test]
fn chains_of_one_byte_each_and_chains_without_a_frame() {
    let mut scene = Scene::new();
    let gpa = scene.bad.pairs[0].slot_gpa(0) - 12;
    let part = |at: u64, len, write| Part { gpa: gpa + at, len, write };
    // No header at all, half of one; buffers that are the device's to write.
    for parts in [vec![part(0, 0, false)], vec![part(0, 11, false)], vec![part(0, 100, true)]] {
        let before = scene.bad.sent_dropped(DropReason::Malformed);
        chain(&mut scene.bad, &parts);
        assert_eq!(scene.bad.sent_dropped(DropReason::Malformed), before + 1);
    }
    chain(&mut scene.bad, &[part(0, 12, false)]);
    assert_eq!(scene.bad.sent_dropped(DropReason::Runt), 1);
    scene.goes_on();
    // As many pieces as a chain may have, and more: in a table, since the ring is shorter.
    scene.bad.pairs[0].write(0, NetHeader::default(), &plain(mac(2), mac(1), 1000)).unwrap();
    let table = scene.bad.memory.carve(16 * 512, 64).unwrap();
    for (pieces, fits) in [(256, true), (257, false), (512, false)] {
        let parts: Vec<_> = (0..pieces).map(|at| part(at, 1, false)).collect();
        let before = scene.bad.sent_dropped(DropReason::Malformed);
        let head = scene.bad.pairs[0].tx().chain_indirect(&parts, &table).unwrap();
        scene.bad.pairs[0].tx().push(head);
        scene.lan.settle();
        assert_eq!(scene.bad.pairs[0].reap().unwrap(), 1);
        let came = scene.victim.receive();
        assert_eq!(came.len(), usize::from(fits), "{pieces} pieces");
        assert_eq!(scene.bad.sent_dropped(DropReason::Malformed), before + u64::from(!fits));
        if fits {
            assert_eq!(came[0].1, plain(mac(2), mac(1), 1000)[..256 - 12]);
        }
    }
    scene.goes_on();
}

#[test]
fn one_poll_is_bounded_by_what_it_costs() {
    let mut scene = Scene::new();
    let gpa = scene.bad.pairs[0].slot_gpa(0) - 12;
    scene.bad.pairs[0].write(0, NetHeader::default(), &plain(mac(2), mac(1), 1000)).unwrap();
    let table = scene.bad.memory.carve(16 * 256, 64).unwrap();
    let parts: Vec<_> = (0..256).map(|at| Part { gpa: gpa + at, len: 1, write: false }).collect();
    for _ in 0..64 {
        let head = scene.bad.pairs[0].tx().chain_indirect(&parts, &table).unwrap();
        scene.bad.pairs[0].tx().push(head);
    }
    scene.lan.core.turn();
    let first = scene.bad.pairs[0].reap().unwrap();
    assert!((1..=4).contains(&first), "{first} chains of 256 buffers in one poll");
    // Whole large frames: their bytes count.
    for _ in 0..8 {
        let frame = tcp(mac(2), mac(1), (1, 2), &payload(65_000));
        assert!(scene.bad.pairs[0].send(packet::large_header(1448), &frame).unwrap());
    }
    let mut turns = 0;
    while scene.bad.pairs[0].sending() > 0 {
        scene.lan.core.turn();
        scene.bad.pairs[0].reap().unwrap();
        turns += 1;
    }
    assert!(turns >= 15, "{turns} turns");
}

#[test]
fn buffers_outside_memory_stop_the_queue() {
    for from in [0, 1] {
        let mut scene = Scene::new();
        let gpa = scene.bad.pairs[0].slot_gpa(0) - 12;
        scene.bad.pairs[0].write(0, NetHeader::default(), &plain(mac(2), mac(1), 60)).unwrap();
        let nowhere = Part { gpa: 0x66_0000_0000, len: 60, write: false };
        let header = Part { gpa, len: 72, write: false };
        let head = scene.bad.pairs[0].tx().chain(&[header, nowhere][from..]).unwrap();
        scene.bad.pairs[0].tx().push(head);
        scene.lan.settle();
        scene.goes_on();
        assert_eq!(scene.bad.fault(1), Some("outside_memory"));
    }
    // The same where the device would write.
    let mut scene = Scene::new();
    let heads = scene.victim.pairs[0].rx().raw().size();
    for head in 0..heads {
        let raw = scene.victim.pairs[0].rx().raw();
        let desc = raw.desc(head);
        raw.set_desc(head, RawDesc { addr: 0x66_0000_0000, ..desc });
    }
    scene.bad.send(NetHeader::default(), &plain(mac(2), mac(1), 60));
    assert_eq!(scene.victim.fault(0), Some("outside_memory"));
    assert_eq!(scene.victim.pairs[0].rx().used_idx(), 0);
}

#[test]
fn receive_buffers_without_room_for_a_header_stop_the_queue() {
    for len in [0, 1, 11] {
        let mut scene = Scene::new();
        for head in 0..scene.victim.pairs[0].rx().raw().size() {
            let raw = scene.victim.pairs[0].rx().raw();
            let desc = raw.desc(head);
            raw.set_desc(head, RawDesc { len, ..desc });
        }
        scene.bad.send(NetHeader::default(), &plain(mac(2), mac(1), 60));
        assert_eq!(scene.victim.fault(0), Some("no_status"));
    }
}

#[test]
fn a_frame_that_needs_two_suspects_is_dropped_and_the_core_comes_to_rest() {
    for packed in [false, true] {
        let lan = Lan::new();
        let mut a = lan.plug(1);
        let mut b = lan.plug_with(Wants { packed, suspects: 2, ..Wants::new(2) });
        let large = tcp(mac(2), mac(1), (1, 2), &payload(2000));
        a.send(packet::large_header(1448), &large);
        lan.settle();
        assert_eq!((b.received_dropped(DropReason::NoBuffer), b.receive().len()), (1, 0));
        // Small ones try the suspects one by one, and then there is room for large ones.
        for len in [60, 61] {
            a.send(NetHeader::default(), &plain(mac(2), mac(1), len));
            assert_eq!(b.receive()[0].1, plain(mac(2), mac(1), len));
        }
        a.send(packet::large_header(1448), &large);
        assert_eq!(b.receive()[0].1, large);
    }
}

#[test]
fn buffers_of_many_sizes_get_every_frame() {
    let lan = Lan::new();
    let (mut a, mut b) = (lan.plug(1), lan.plug(2));
    let raw = b.pairs[0].rx().raw();
    for slot in 0..raw.size() {
        let desc = raw.desc(slot);
        raw.set_desc(slot, RawDesc { len: if slot % 3 == 1 { 100 } else { desc.len }, ..desc });
    }
    let frames: Vec<_> = (0..16).map(|nth| plain(mac(2), mac(1), 60 + 37 * (nth % 7))).collect();
    for frame in &frames {
        assert!(a.pairs[0].send(NetHeader::default(), frame).unwrap());
    }
    lan.settle();
    let mut came = Vec::new();
    while let Some(frame) = b.pairs[0].take_frame().expect("the device kept to the protocol") {
        came.push(frame.len);
    }
    assert_eq!(came, frames.iter().map(Vec::len).collect::<Vec<_>>());
    assert_eq!((b.reading().received.frames, b.fault(0)), (16, None));
}

#[test]
fn a_frame_without_bytes_at_the_end_of_memory_is_a_runt() {
    let mut scene = Scene::new();
    let end = scene.bad.memory.regions()[0].gpa + scene.bad.memory.regions()[0].len;
    let header = u64::from(NetHeader::LONG);
    let raw = scene.bad.pairs[0].tx().raw();
    raw.set_desc(0, RawDesc { addr: end - header, len: header as u32, flags: 0, next: 0 });
    raw.offer(0);
    scene.honest.send(NetHeader::default(), &plain(mac(1), mac(3), 60));
    assert_eq!(scene.bad.sent_dropped(DropReason::Runt), 1);
    assert_eq!(scene.bad.fault(1), None);
}

#[test]
fn indexes_that_jump() {
    for queue in [0, 1] {
        let mut scene = Scene::new();
        let raw = if queue == 0 { scene.bad.pairs[0].rx().raw() } else { scene.bad.pairs[0].tx().raw() };
        raw.set_avail_idx(raw.avail_idx().wrapping_add(1000));
        scene.honest.send(NetHeader::default(), &plain(mac(1), mac(3), 60));
        scene.goes_on();
        assert_eq!(scene.bad.fault(queue), Some("index_jump"));
    }
}

#[test]
fn commands_of_wrong_lengths_and_values() {
    let mut scene = Scene::with(Wants { pairs: 2, ..Wants::new(1) }, SwitchSettings::default());
    let bad = &mut scene.bad;
    let table = |counts: [u32; 2], bytes: usize| {
        let mut data = vec![2; 8 + bytes];
        data[..4].copy_from_slice(&counts[0].to_le_bytes());
        let second = (4 + 6 * counts[0] as usize).min(data.len() - 4);
        data[second..second + 4].copy_from_slice(&counts[1].to_le_bytes());
        data
    };
    let wrong: &[(u8, u8, Vec<u8>)] = &[
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC, vec![]),
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC, vec![0, 0]),
        (VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_NOBCAST, vec![2]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET, vec![2; 5]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET, vec![2; 7]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET, vec![0; 6]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET, vec![1; 6]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, vec![]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, vec![0; 4]),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, table([1, 0], 5)),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, table([1, 0], 7)),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, table([u32::MAX, 0], 6)),
        (VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_TABLE_SET, table([0, u32::MAX], 6)),
        (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, vec![1]),
        (VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_DEL, vec![0xff; 2]),
        (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, vec![1, 0, 0]),
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, vec![0; 7]),
        (VIRTIO_NET_CTRL_GUEST_OFFLOADS, VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, vec![0xff; 8]),
    ];
    for (class, command, data) in wrong {
        assert_eq!(bad.command(*class, *command, data), VIRTIO_NET_ERR, "{class}, {command}: {data:?}");
    }
    let unknown = [(0, 6), (1, 2), (2, 2), (3, 1), (4, 1), (4, 2), (5, 1), (6, 0), (0xff, 0xff)];
    for (class, command) in unknown {
        assert_eq!(bad.command(class, command, &[0]), VIRTIO_NET_ERR);
    }
    // Less than a class and a command.
    assert_eq!(bad.command_in(0, 0, &[0], &[1]), VIRTIO_NET_ERR);
    let counts = bad.counts(4);
    assert_eq!((counts.errors_request, counts.unsupported), (wrong.len() as u64 + 1, unknown.len() as u64));
    assert_eq!(bad.command(VIRTIO_NET_CTRL_RX, VIRTIO_NET_CTRL_RX_PROMISC, &[0]), VIRTIO_NET_OK);
    assert_eq!(bad.fault(4), None);
    scene.goes_on();
}

#[test]
fn a_command_without_a_place_for_its_answer_stops_the_control_queue() {
    let mut scene = Scene::new();
    let memory = scene.bad.memory.alloc(16, 16).unwrap();
    let commands: &mut Commands = scene.bad.commands.as_mut().unwrap();
    let head = commands.ring().chain(&[Part { gpa: memory, len: 3, write: false }]).unwrap();
    commands.ring().push(head);
    scene.goes_on();
    assert_eq!(scene.bad.fault(2), Some("no_status"));
}

#[test]
fn a_flood_is_bounded_and_others_get_through() {
    let settings = SwitchSettings { flood_rate: 1, flood_burst: 64 << 10, ..SwitchSettings::default() };
    let mut scene = Scene::with(Wants::new(1), settings);
    scene.goes_on();
    for _ in 0..1000 {
        scene.bad.send(NetHeader::default(), &plain([0xff; 6], mac(1), 60));
        scene.victim.receive();
        scene.honest.receive();
    }
    assert!(scene.bad.sent_dropped(DropReason::Storm) > 800);
    scene.goes_on();
    assert_eq!(scene.victim.reading().received.drops, []);
}

/// Found by `race.rs`: what was taken before the chain that cannot be read was given back behind it, and the books were wrong.
#[test]
fn a_frame_that_needs_a_good_chain_and_a_bad_one_stops_the_queue() {
    for packed in [false, true] {
        let lan = Lan::new();
        let mut a = lan.plug(1);
        let wants = Wants::new(2);
        let plan = PairPlan { buffers: 16, ..wants.plan };
        let mut b = lan.plug_with(Wants { packed, filled: 0, plan, ..wants });
        let gpa = b.memory.alloc(4096, 64).unwrap();
        let good = Part { gpa, len: 200, write: true };
        for parts in [&[good][..], &[good, Part { write: false, ..good }]] {
            let head = b.pairs[0].rx().chain(parts).unwrap();
            b.pairs[0].rx().push(head);
        }
        a.send(NetHeader::default(), &plain(mac(2), mac(1), 1000));
        lan.settle();
        assert_eq!(b.fault(0), Some("readable_after_writable"));
        assert_eq!(b.pairs[0].rx().used_idx(), 0);
    }
}
