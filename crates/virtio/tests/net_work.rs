//! What one poll of a NIC's queue brings about, counted; and what becomes of a flood that takes several polls.

mod lan;

use std::time::Instant;

use ioplane_device::QueueSet;
use ioplane_network::{DropReason, Port, PortOptions, PortRx, SwitchSettings};
use ioplane_testkit::driver::Part;
use ioplane_testkit::driver::net::{NetHeader, PairPlan};
use lan::packet::{self, payload, plain, tcp};
use lan::{Lan, Nic, Wants, mac};

/// Most frames that one poll may make of what its driver sends.
const MOST: usize = 2048;
/// Most bytes of copies that it may make.
const MOST_BYTES: usize = 768 << 10;
/// Most receivers that it may wake, each by a system call.
const MOST_WAKES: usize = 48;

/// A port without a guest, which takes nothing but plain frames unless it is told to.
struct Tap {
    port: Port,
    port_rx: PortRx,
}

/// A NIC with ports around it that nobody reads until the test does.
struct Scene {
    lan: Lan,
    nic: Nic,
    others: Vec<Tap>,
}

impl Scene {
    fn new(others: u8, packed: bool) -> Self {
        let settings =
            SwitchSettings { flood_burst: 1 << 30, flood_rate: 1 << 34, ..SwitchSettings::default() };
        let lan = Lan::with(settings);
        let wants = Wants::new(1);
        let plan = PairPlan { slots: 64, ..wants.plan };
        // Room for more commands than one poll obeys.
        let nic = lan.plug_with(Wants { packed, plan, commands: 128, ..wants });
        let others = (0..others)
            .map(|number| {
                let name = format!("tap{number}");
                let mac = Some(mac(100 + number));
                let port = lan.switch.plug(PortOptions { mac, ..PortOptions::new(&name) }).unwrap();
                port.set_up(true);
                let port_rx = port.rx(0);
                Tap { port, port_rx }
            })
            .collect();
        Scene { lan, nic, others }
    }

    /// Frames, and their bytes, that have come to all of the others since.
    fn came(&mut self) -> (usize, usize) {
        let mut all = (0, 0);
        for tap in &mut self.others {
            let (frames, bytes) = tap.came();
            all = (all.0 + frames, all.1 + bytes);
        }
        all
    }
}

impl Tap {
    fn came(&mut self) -> (usize, usize) {
        let (mut frames, mut bytes) = (0, 0);
        while let Some(frame) = self.port_rx.front() {
            bytes += frame.bytes().len();
            frames += 1;
            self.port_rx.pop();
        }
        (frames, bytes)
    }
}

#[test]
fn hole_05_one_poll_makes_a_bounded_number_of_segments() {
    for packed in [false, true] {
        let mut scene = Scene::new(1, packed);
        for _ in 0..64 {
            let frame = tcp(mac(100), mac(1), (1, 2), &payload(1000));
            assert!(scene.nic.pairs[0].send(packet::large_header(1), &frame).unwrap());
        }
        let mut all = 0;
        while scene.nic.pairs[0].sending() > 0 {
            scene.lan.core.turn();
            let (segments, _) = scene.came();
            assert!(segments > 0 && segments <= MOST, "{segments} segments in one poll");
            all += segments;
            scene.nic.pairs[0].reap().unwrap();
        }
        assert_eq!(all, 64_000);
        assert_eq!(scene.others[0].port.reading().received.drops, []);
    }
}

#[test]
fn hole_05_one_poll_floods_a_bounded_number_of_bytes_and_segments() {
    for (packed, large, count) in
        [(false, false, 1500), (true, false, 1500), (false, true, 60_000), (true, true, 60_000)]
    {
        let mut scene = Scene::new(100, packed);
        let (header, frame) = if large {
            (packet::large_header(64), tcp([0xff; 6], mac(1), (1, 2), &payload(count)))
        } else {
            (NetHeader::default(), plain([0xff; 6], mac(1), count))
        };
        let frames = if large { 1 } else { 64 };
        for _ in 0..frames {
            assert!(scene.nic.pairs[0].send(header, &frame).unwrap());
        }
        let mut all = 0;
        while scene.nic.pairs[0].sending() > 0 {
            scene.lan.core.turn();
            let (copies, bytes) = scene.came();
            assert!(
                copies > 0 && copies <= MOST && bytes <= MOST_BYTES,
                "{copies} frames, {bytes} bytes in one poll"
            );
            all += copies;
            scene.nic.pairs[0].reap().unwrap();
        }
        assert_eq!(all, 100 * if large { count.div_ceil(64) } else { frames });
        assert!(scene.others.iter().all(|tap| tap.port.reading().received.drops.is_empty()));
        assert_eq!(scene.nic.reading().sent.frames, frames as u64);
    }
}

#[test]
fn hole_05_one_poll_wakes_a_bounded_number_of_receivers() {
    let mut scene = Scene::new(150, false);
    scene.others.iter_mut().for_each(|tap| assert!(!tap.port_rx.arm()));
    let wakes = |scene: &Scene| scene.others.iter().map(|tap| tap.port.reading().wakes).sum::<usize>();
    // One frame to all, and one each to many.
    for (frames, all) in [(1, 150), (60, 60)] {
        let before = wakes(&scene);
        for number in 0..frames {
            let to = if frames == 1 { [0xff; 6] } else { mac(100 + number) };
            assert!(scene.nic.pairs[0].send(NetHeader::default(), &plain(to, mac(1), 60)).unwrap());
        }
        let mut last = before;
        while scene.nic.pairs[0].sending() > 0 {
            scene.lan.core.turn();
            let now = wakes(&scene);
            assert!(now - last <= MOST_WAKES, "{} interrupts in one poll", now - last);
            last = now;
            scene.nic.pairs[0].reap().unwrap();
        }
        assert_eq!(last - before, all);
        scene.came();
        for tap in &mut scene.others {
            tap.port_rx.disarm();
            assert!(!tap.port_rx.arm());
        }
    }
}

/// A flood of which some receivers have their frame and some do not.
fn half_flooded(packed: bool) -> (Scene, Vec<usize>) {
    let mut scene = Scene::new(100, packed);
    let frame = tcp([0xff; 6], mac(1), (1, 2), &payload(60_000));
    assert!(scene.nic.pairs[0].send(packet::large_header(1448), &frame).unwrap());
    scene.lan.core.turn();
    assert_eq!(scene.nic.pairs[0].reap().unwrap(), 0, "shown as sent, and some do not have it");
    let have: Vec<_> = scene.others.iter_mut().map(|tap| tap.came().0).collect();
    assert!(have.contains(&42) && have.contains(&0), "{have:?}");
    (scene, have)
}

#[test]
fn hole_05_draining_finishes_a_flood() {
    for packed in [false, true] {
        let (mut scene, have) = half_flooded(packed);
        let queues = QueueSet::from([1]);
        scene.nic.running().drain(&queues);
        scene.lan.settle();
        scene.lan.core.turn();
        assert!(scene.nic.running().wait_stopped(&queues, Instant::now()));
        assert_eq!(scene.nic.pairs[0].reap().unwrap(), 1);
        assert!(scene.nic.running().device().queue(1).unwrap().in_flight.is_empty());
        for (tap, had) in scene.others.iter_mut().zip(have) {
            assert_eq!(tap.came().0, 42 - had);
        }
    }
}

#[test]
fn hole_05_suspending_redoes_a_flood_whole() {
    for packed in [false, true] {
        let (mut scene, _) = half_flooded(packed);
        let queues = QueueSet::from([1]);
        scene.nic.running().suspend(&queues);
        scene.lan.core.turn();
        assert!(scene.nic.running().wait_stopped(&queues, Instant::now()));
        assert_eq!(scene.came().0, 0, "a suspended queue goes on flooding");
        assert_eq!(scene.nic.running().device().queue(1).unwrap().in_flight.len(), 1);
        let core = scene.lan.core.clone();
        scene.nic.running().start(&queues, &core).unwrap();
        scene.lan.settle();
        assert_eq!(scene.nic.pairs[0].reap().unwrap(), 1);
        assert!(scene.others.iter_mut().all(|tap| tap.came().0 == 42));
        // And the queue is in order.
        scene.nic.send(NetHeader::default(), &plain(mac(100), mac(1), 60));
        assert_eq!(scene.came().0, 1);
    }
}

#[test]
fn hole_05_the_core_does_not_sleep_on_a_flood_and_others_of_the_queue_wait_for_it() {
    let (mut scene, _) = half_flooded(false);
    assert!(!scene.lan.core.arm());
    scene.lan.core.disarm();
    // What comes behind it in the same queue stays behind it.
    assert!(scene.nic.pairs[0].send(NetHeader::default(), &plain([0xff; 6], mac(1), 60)).unwrap());
    scene.lan.settle();
    assert_eq!(scene.nic.pairs[0].reap().unwrap(), 2);
    assert!(scene.lan.core.arm());
    for tap in &mut scene.others {
        let mut last = 0;
        while let Some(frame) = tap.port_rx.front() {
            last = frame.bytes().len();
            tap.port_rx.pop();
        }
        assert_eq!(last, 60);
    }
}

#[test]
fn hole_05_a_port_that_is_plugged_in_meanwhile_gets_nothing_of_a_flood() {
    let (mut scene, have) = half_flooded(false);
    let at = have.iter().position(|had| *had == 0).unwrap();
    drop(scene.others.remove(at));
    let port = scene.lan.switch.plug(PortOptions::new("other")).unwrap();
    port.set_up(true);
    scene.lan.settle();
    assert_eq!(scene.nic.pairs[0].reap().unwrap(), 1);
    assert!(port.rx(0).front().is_none(), "it has the slot of one that was to have the frame");
    let rest = have.iter().filter(|had| **had == 0).count() - 1;
    assert_eq!(scene.came().0, 42 * rest);
}

#[test]
fn hole_05_one_poll_obeys_a_bounded_number_of_commands() {
    let mut scene = Scene::new(0, false);
    // Each makes the filter anew: addresses, and 4096 VLANs.
    let commands = scene.nic.commands.as_mut().unwrap();
    let mut put = 0;
    while put < 64 && commands.put(0, 0, &[1], &[]).is_ok() {
        put += 1;
    }
    assert!(put > 16, "the driver has room for {put} commands, which is within the bound");
    scene.lan.core.turn();
    let counts = scene.nic.running().device().meters()[2].read();
    assert!((1..=16).contains(&counts.requests), "{} of {put} commands in one poll", counts.requests);
}

#[test]
fn hole_05_looking_for_room_in_vain_is_charged() {
    // Tables of the largest size whose buffers have no room to speak of: each frame makes the device read three of them.
    let lan = Lan::new();
    let mut a = lan.plug(1);
    let wants = Wants::new(2);
    let plan = PairPlan { buffers: 64, ..wants.plan };
    let mut b = lan.plug_with(Wants { filled: 0, plan, ..wants });
    let gpa = b.memory.alloc(4096, 64).unwrap();
    let table = b.memory.carve(16 * 1024, 64).unwrap();
    let parts: Vec<_> =
        (0..1024).map(|at| Part { gpa, len: if at == 0 { 16 } else { 0 }, write: true }).collect();
    for _ in 0..8 {
        let head = b.pairs[0].rx().chain_indirect(&parts, &table).unwrap();
        b.pairs[0].rx().push(head);
    }
    for _ in 0..16 {
        assert!(a.pairs[0].send(NetHeader::default(), &plain(mac(2), mac(1), 400)).unwrap());
    }
    let (mut most, mut before) = (0, 0);
    for _ in 0..100 {
        lan.core.turn();
        let now = b.received_dropped(DropReason::NoBuffer);
        most = most.max(now - before);
        before = now;
    }
    // Three tables of 1024 descriptors each.
    assert!((1..=2).contains(&most), "{most} times 3,072 descriptors in one poll");
}
