//! Large frames that go from guest to guest in one copy: what a driver sees of it, and that no queue waits for another.

mod lan;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::clock::ManualClock;
use ioplane_device::{Change, QueueSet};
use ioplane_memory::DirtyLog;
use ioplane_network::DropReason;
use ioplane_testkit::driver::net::{PairPlan, Sending};
use ioplane_testkit::hand::HandCore;
use lan::packet::{large_header, payload, tcp};
use lan::{Lan, Nic, Wants, mac};

/// The sending queue of the only pair.
const SENDING: u16 = 1;

/// Two NICs on a core that polls, whose clock stands still.
struct Scene {
    lan: Lan,
    clock: Arc<ManualClock>,
    a: Nic,
    b: Nic,
    /// Whether the second has room.
    filled: bool,
}

impl Scene {
    /// `room`: receive buffers of the second.
    fn new(packed: bool, room: u16) -> Scene {
        let clock = Arc::new(ManualClock::default());
        let lan = Lan::on(HandCore::by(clock.clone()));
        let wants = |number| {
            let wants = Wants { packed, ..Wants::new(number) };
            Wants { plan: PairPlan { sending: Sending::Indirect, ..wants.plan }, ..wants }
        };
        let (a, b) = (lan.plug_with(wants(1)), lan.plug_with(Wants { filled: room, ..wants(2) }));
        Scene { lan, clock, a, b, filled: room > 0 }
    }

    fn send(&mut self, salt: u8) {
        assert!(self.a.pairs[0].send(large_header(1448), &large(salt)).unwrap());
    }

    /// How many of its frames the sending driver gets back.
    fn reaped(&mut self) -> u32 {
        self.a.pairs[0].reap().unwrap()
    }

    /// Makes room, and takes what comes.
    fn came(&mut self) -> Vec<Vec<u8>> {
        if !std::mem::replace(&mut self.filled, true) {
            self.b.pairs[0].fill();
        }
        self.b.receive().into_iter().map(|(_, bytes)| bytes).collect()
    }

    /// Longer than a frame stays lent.
    fn wait(&self) {
        self.clock.advance(Duration::from_millis(5));
    }

    fn in_flight(&mut self) -> usize {
        self.a.running().device().queue(SENDING).unwrap().in_flight.len()
    }
}

fn large(salt: u8) -> Vec<u8> {
    let data: Vec<u8> = payload(40_000).iter().map(|byte| byte ^ salt).collect();
    tcp(mac(2), mac(1), (1, 2), &data)
}

#[test]
fn a_sender_gets_its_buffer_back_when_the_receiver_has_copied_it() {
    for packed in [false, true] {
        let mut scene = Scene::new(packed, u16::MAX);
        for round in 0..300u32 {
            scene.send(round as u8);
            scene.lan.core.turn();
            // The receiving queue is polled after the sending one: it has copied, and the sender does not know yet.
            assert_eq!(scene.reaped(), 0, "it was not lent");
            scene.lan.core.turn();
            assert_eq!(scene.reaped(), 1);
            assert_eq!(scene.came(), [large(round as u8)]);
        }
        let (sent, received) = (scene.a.reading().sent, scene.b.reading().received);
        assert_eq!((sent.frames, received.frames), (300, 300));
        assert_eq!(scene.a.counts(1).bytes_written, 300 * large(0).len() as u64);
        assert_eq!(scene.a.counts(1).requests, 300);
    }
}

#[test]
fn a_receiver_without_room_holds_nothing_of_its_sender_for_long() {
    for packed in [false, true] {
        let mut scene = Scene::new(packed, 0);
        for salt in 0..6 {
            scene.send(salt);
        }
        for _ in 0..10 {
            scene.lan.core.turn();
        }
        assert_eq!(scene.reaped(), 0);
        scene.wait();
        scene.lan.settle();
        assert_eq!(scene.reaped(), 6, "they are still lent");
        // The driver writes something else there.
        for salt in 6..12 {
            scene.send(salt);
        }
        scene.lan.core.turn();
        let all: Vec<_> = (0..12).map(large).collect();
        let mut came = scene.came();
        while came.len() < 12 {
            let more = scene.came();
            assert!(!more.is_empty(), "{} of 12 came", came.len());
            came.extend(more);
        }
        assert_eq!(came, all);
        scene.lan.settle();
        assert_eq!(scene.reaped(), 6);
    }
}

#[test]
fn a_receiver_that_stands_still_drops_as_if_nothing_were_lent() {
    let mut scene = Scene::new(false, 0);
    let queues = QueueSet::from([0]);
    scene.b.running().drain(&queues);
    scene.lan.settle();
    scene.lan.core.turn();
    assert!(scene.b.running().wait_stopped(&queues, Instant::now()));
    let mut done = 0;
    for salt in 0..100 {
        scene.send(salt);
        scene.wait();
        scene.lan.settle();
        done += scene.reaped();
    }
    assert_eq!(done, 100);
    let dropped = scene.b.received_dropped(DropReason::Full);
    assert!((1..=90).contains(&dropped), "{dropped} of 100 dropped: buffers are shared as before");
    let core = scene.lan.core.clone();
    scene.b.running().start(&queues, &core).unwrap();
    assert_eq!(scene.came().len() as u64, 100 - dropped);
}

#[test]
fn a_sender_that_drains_does_not_wait_for_its_receivers() {
    for packed in [false, true] {
        let mut scene = Scene::new(packed, 0);
        scene.send(1);
        scene.send(2);
        scene.lan.core.turn();
        assert_eq!(scene.reaped(), 0);
        let quiescent = scene.a.quiesce();
        assert_eq!(scene.reaped(), 2);
        assert!(quiescent.device().queue(SENDING).unwrap().in_flight.is_empty());
        assert_eq!(scene.came(), [large(1), large(2)]);
        scene.a.resume(quiescent);
        scene.send(3);
        assert_eq!(scene.came(), [large(3)]);
    }
}

#[test]
fn a_sender_that_is_suspended_takes_its_frames_back_and_sends_them_again_by_copy() {
    for packed in [false, true] {
        let mut scene = Scene::new(packed, 0);
        let queues = QueueSet::from([SENDING]);
        scene.send(1);
        scene.send(2);
        scene.lan.core.turn();
        scene.a.running().suspend(&queues);
        scene.lan.core.turn();
        assert!(scene.a.running().wait_stopped(&queues, Instant::now()));
        assert_eq!((scene.reaped(), scene.in_flight()), (0, 2));
        assert_eq!(scene.came(), [[0u8; 0]; 0], "what was taken back arrived");
        let core = scene.lan.core.clone();
        scene.a.running().start(&queues, &core).unwrap();
        scene.lan.core.turn();
        assert_eq!(scene.reaped(), 2, "what is replayed is not lent");
        assert_eq!(scene.came(), [large(1), large(2)]);
        scene.send(3);
        assert_eq!(scene.came(), [large(3)]);
        assert_eq!(scene.a.reading().sent.frames, 3, "each counts once");
    }
}

#[test]
fn a_sender_that_stops_by_a_fault_takes_its_frames_back() {
    let mut scene = Scene::new(false, 0);
    scene.send(1);
    scene.lan.core.turn();
    let ring = scene.a.pairs[0].tx();
    let outside = ioplane_testkit::driver::Part { gpa: 1 << 40, len: 100, write: false };
    let head = ring.chain(&[outside]).unwrap();
    ring.push(head);
    scene.lan.core.turn();
    assert!(scene.a.fault(SENDING).is_some(), "the queue met no fault");
    assert_eq!(scene.came(), [[0u8; 0]; 0]);
}

#[test]
fn nothing_is_lent_where_the_core_does_not_poll() {
    let lan = Lan::on(HandCore::default());
    let wants = |number| {
        let wants = Wants::new(number);
        Wants { plan: PairPlan { sending: Sending::Indirect, ..wants.plan }, ..wants }
    };
    let (mut a, mut b) = (lan.plug_with(wants(1)), lan.plug_with(Wants { filled: 0, ..wants(2) }));
    assert!(a.pairs[0].send(large_header(1448), &large(1)).unwrap());
    lan.core.turn();
    assert_eq!(a.pairs[0].reap().unwrap(), 1);
    b.pairs[0].fill_some(0, u16::MAX);
    assert_eq!(b.receive().len(), 1);
}

#[test]
fn a_core_that_is_to_sleep_calls_its_frames_back_first() {
    let mut scene = Scene::new(false, 0);
    scene.send(1);
    scene.lan.core.turn();
    assert!(!scene.lan.core.arm(), "it sleeps, and nobody completes the frame");
    scene.lan.core.disarm();
    scene.lan.settle();
    assert_eq!(scene.reaped(), 1);
    assert!(scene.lan.core.arm());
    scene.lan.core.disarm();
    assert_eq!(scene.came(), [large(1)]);
}

#[test]
fn a_receiver_that_goes_gives_its_senders_their_buffers() {
    let Scene { lan, mut a, b, .. } = Scene::new(false, 0);
    assert!(a.pairs[0].send(large_header(1448), &large(1)).unwrap());
    lan.core.turn();
    assert_eq!(a.pairs[0].reap().unwrap(), 0);
    b.unplug();
    lan.settle();
    assert_eq!(a.pairs[0].reap().unwrap(), 1);
}

#[test]
fn stores_of_a_lent_frame_are_marked_in_its_receivers_log_and_in_no_other() {
    let mut scene = Scene::new(false, u16::MAX);
    let log = |nic: &mut Nic| {
        let log = Arc::new(DirtyLog::new(nic.memory.view().map().limit()).unwrap());
        // Obeyed in the next turn.
        drop(nic.running().apply(&QueueSet::from([0, SENDING]), &Change::Log(Some(log.clone()))));
        log
    };
    let (of_a, of_b) = (log(&mut scene.a), log(&mut scene.b));
    scene.lan.core.turn();
    scene.send(1);
    scene.lan.core.turn();
    scene.lan.core.turn();
    assert_eq!(scene.reaped(), 1);
    // Its used ring alone; the receiver has ten pages of the frame at least.
    let (sent, received) = (of_a.take().len(), of_b.take().len());
    assert!((1..=2).contains(&sent), "{sent} pages of the sender's");
    assert!(received >= 10, "{received} pages of the receiver's");
    assert_eq!(scene.came(), [large(1)]);
}
