//! Guests with NICs of one pair that send each other numbered frames.

use std::time::{Duration, Instant};

use ioplane_testkit::driver::net::{NetHeader, Pair, PairPlan};
use ioplane_testkit::driver::{GuestMemory, RingMode};
use ioplane_testkit::front::{FrontEnd, Wants};

use super::{LIMIT, TestDaemon};

/// VIRTIO_NET_F_MRG_RXBUF.
const MERGEABLE: u64 = 1 << 15;
/// Frames of one flow on their way at once: fewer than rings and switch hold, so that none is dropped.
const IN_FLIGHT: u64 = 32;
/// Header of Ethernet, and the frame's number.
const HEAD: usize = 14 + 8;

/// A guest's end of a NIC.
pub struct NicGuest {
    front: FrontEnd,
    pair: Pair,
    memory: GuestMemory,
}

/// Frames from one guest to another, by their places in the list of guests.
pub struct Flow {
    from: usize,
    to: usize,
    sent: u64,
    came: u64,
}

/// What came at one moment, of all flows.
#[derive(Debug, Clone, Copy)]
pub struct Arrived {
    pub frames: u64,
    pub bytes: u64,
    /// From before the first frame was sent until after these were taken.
    pub within: Duration,
}

/// The MAC address of guest `at`: a configuration gives its NIC the same.
fn mac(at: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, at as u8]
}

/// A `[[nic]]` of the switch `lan` for guest `at`; `keys` are further lines.
pub fn nic(name: &str, at: usize, keys: &str) -> String {
    format!("[[nic]]\nname = \"{name}\"\nswitch = \"lan\"\nmac = \"02:00:00:00:00:{at:02x}\"\n{keys}\n")
}

impl NicGuest {
    pub fn plug_in(daemon: &TestDaemon, name: &str) -> NicGuest {
        let wants = Wants { features: Wants::default().features | MERGEABLE, ..Wants::default() };
        let front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), wants).unwrap();
        let mut memory = GuestMemory::new(8 << 20).unwrap();
        let plan = PairPlan {
            slots: 2 * IN_FLIGHT as u16,
            slot_bytes: 2048,
            ..PairPlan::mergeable(RingMode::of(front.features()))
        };
        let mut pair = Pair::new(&mut memory, plan).unwrap();
        front.share(&memory).unwrap();
        pair.fill();
        let mut guest = NicGuest { front, pair, memory };
        for (index, place) in (0..).zip(guest.pair.places()) {
            guest.front.start(index, &guest.memory, place, 0).unwrap();
        }
        guest.front.kick(0);
        guest
    }
}

impl Flow {
    pub fn new(from: usize, to: usize) -> Flow {
        Flow { from, to, sent: 0, came: 0 }
    }

    /// Sends as many frames as may be on their way.
    fn send(&mut self, guests: &mut [NicGuest], bytes: usize, total: u64) {
        let guest = &mut guests[self.from];
        guest.pair.reap().unwrap();
        let before = self.sent;
        while self.sent < total && self.sent - self.came < IN_FLIGHT {
            let mut frame = vec![0; bytes];
            frame[..6].copy_from_slice(&mac(self.to));
            frame[6..12].copy_from_slice(&mac(self.from));
            frame[12..14].copy_from_slice(&[0x88, 0xb5]);
            frame[14..HEAD].copy_from_slice(&self.sent.to_le_bytes());
            if !guest.pair.send(NetHeader::default(), &frame).unwrap() {
                break;
            }
            self.sent += 1;
        }
        if self.sent > before {
            guest.front.kick(1);
        }
    }
}

/// Has each flow send `total` more frames of so many bytes, many at once. They come whole and in order, none is lost. `look` is asked whenever
/// some have come, and when none has come for a while.
pub fn exchange(
    guests: &mut [NicGuest],
    flows: &mut [Flow],
    (bytes, total): (usize, u64),
    mut look: impl FnMut(Arrived),
) {
    let already: Vec<u64> = flows.iter().map(|flow| flow.came).collect();
    let ends: Vec<u64> = already.iter().map(|came| came + total).collect();
    let (began, mut arrived_at) = (Instant::now(), Instant::now());
    let mut arrived = Arrived { frames: 0, bytes: 0, within: Duration::ZERO };
    let mut frame = Vec::new();
    while flows.iter().zip(&ends).any(|(flow, end)| flow.came < *end) {
        for (flow, end) in flows.iter_mut().zip(&ends) {
            flow.send(guests, bytes, *end);
        }
        let before = arrived.frames;
        for (at, guest) in guests.iter_mut().enumerate() {
            while guest.pair.take_frame().unwrap().is_some() {
                guest.pair.read_frame(&mut frame).unwrap();
                assert_eq!((frame.len(), &frame[..6]), (bytes, &mac(at)[..]));
                let from = usize::from(frame[11]);
                let flow = flows.iter_mut().find(|flow| (flow.from, flow.to) == (from, at)).unwrap();
                let number = u64::from_le_bytes(frame[14..HEAD].try_into().unwrap());
                assert_eq!(number, flow.came, "from guest {from} to guest {at}");
                flow.came += 1;
                arrived.frames += 1;
                arrived.bytes += bytes as u64;
            }
            guest.front.kick(0);
        }
        arrived.within = began.elapsed();
        if arrived.frames > before {
            arrived_at = Instant::now();
        }
        look(arrived);
        let waiting: Vec<u64> = flows.iter().map(|flow| flow.sent - flow.came).collect();
        assert!(arrived_at.elapsed() < LIMIT, "no frame comes any more; of each flow there wait {waiting:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
