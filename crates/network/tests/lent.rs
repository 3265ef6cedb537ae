//! Frames that are lent: copied once, from guest to guest, and their sender's again whenever it asks.

mod support;

use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestRange, GuestView, LentRanges};
use ioplane_network::{
    CaptureOptions, DropReason, FrameBytes, HEAD, LEND_FROM, MOST_LENT, Offload, PortOptions, PortRx, PortTx,
    Reclaim, Reclaimed, RxOffloads, Sent, Switch, spec::*,
};
use support::*;

/// Bytes of the frames here.
const LEN: usize = 20_000;
/// Where frames are in their guest's memory, one after the other, and again from the first.
const PLACE: u64 = 0x1000;
const STRIDE: u64 = 0x6000;
const PLACES: u64 = 40;
const PAGE: usize = 4096;

/// A port that sends from a guest's memory.
struct Guest {
    host: Host,
    view: GuestView,
    /// Where the last frame was put.
    place: u64,
}

impl Guest {
    fn new(switch: &Arc<Switch>, n: u8) -> Guest {
        Guest::with(switch, n, |_| {})
    }

    fn with(switch: &Arc<Switch>, n: u8, change: impl FnOnce(&mut PortOptions)) -> Guest {
        let mut host = Host::with(switch, &format!("h{n}"), |options| {
            (options.mac, options.mtu) = (Some(mac(n)), 60_000);
            change(options);
        });
        host.port_rx.take_lent_frames();
        let view = GuestView::new(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
        Guest { host, view, place: PLACE }
    }

    /// Writes a frame into memory, and lends it.
    fn lend(&mut self, frame: &[u8]) -> bool {
        self.lend_with(frame, Offload::NONE)
    }

    fn lend_with(&mut self, frame: &[u8], offload: Offload) -> bool {
        self.place = PLACE + (self.place - PLACE + STRIDE) % (PLACES * STRIDE);
        self.view.write(self.place, frame).unwrap();
        let Guest { host, view, place } = self;
        let lent = host.port_tx.lend(&frame[..HEAD.min(frame.len())], frame.len(), offload, || {
            ranges(view, *place, frame.len())
        });
        host.port_tx.flush();
        lent
    }

    fn reclaim(&mut self, how: Reclaim) -> Option<Reclaimed> {
        self.host.port_tx.reclaim(how)
    }

    /// Takes the frame at the front: its bytes, and whether they were in its sender's memory.
    fn take(&mut self) -> Option<(Vec<u8>, bool)> {
        take_lent(&mut self.host.port_rx)
    }
}

/// The bytes of a frame of `len` at `gpa` behind its first ones, in pieces of a page.
fn ranges(view: &GuestView, gpa: u64, len: usize) -> Option<LentRanges> {
    view.lend(
        (HEAD..len)
            .step_by(PAGE)
            .map(|at| GuestRange { gpa: gpa + at as u64, len: PAGE.min(len - at) as u32 }),
    )
}

fn take_lent(port_rx: &mut PortRx) -> Option<(Vec<u8>, bool)> {
    let len = port_rx.front()?.len();
    let taken = match port_rx.take_bytes() {
        FrameBytes::Whole(bytes) => (bytes.to_vec(), false),
        FrameBytes::Lent(frame) => {
            let mut bytes = frame.head().to_vec();
            for span in frame.spans() {
                let at = bytes.len();
                bytes.resize(at + span.len(), 0);
                span.read(0, &mut bytes[at..]);
            }
            frame.done();
            (bytes, true)
        }
        FrameBytes::Soon | FrameBytes::Revoked => return None,
    };
    assert_eq!(taken.0.len(), len);
    port_rx.pop();
    Some(taken)
}

/// A frame from host 1 to host 2.
fn long(salt: u8) -> Vec<u8> {
    let payload: Vec<u8> = (0..LEN - 14).map(|at| (at as u8).wrapping_mul(7) ^ salt).collect();
    frame(mac(2), mac(1), &payload)
}

fn pair() -> (Arc<Switch>, Guest, Guest) {
    let switch = switch();
    let (a, b) = (Guest::new(&switch, 1), Guest::new(&switch, 2));
    (switch, a, b)
}

#[test]
fn a_lent_frame_is_its_senders_again_when_its_receiver_is_done() {
    let (_switch, mut a, mut b) = pair();
    for round in 0..200u8 {
        assert!(a.lend(&long(round)));
        assert_eq!((a.reclaim(Reclaim::IfDone), a.host.port_tx.lent()), (None, 1));
        assert_eq!(b.take(), Some((long(round), true)));
        assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
        assert_eq!((a.reclaim(Reclaim::IfDone), a.host.port_tx.lent()), (None, 0));
    }
    let (sent, received) = (a.host.port.reading().sent, b.host.port.reading().received);
    assert_eq!((sent.frames, sent.bytes, sent.dropped_in_all()), (200, 200 * LEN as u64, 0));
    assert_eq!((received.frames, received.bytes, received.dropped_in_all()), (200, 200 * LEN as u64, 0));
}

#[test]
fn a_frame_that_is_recalled_is_what_it_was_then_and_keeps_its_place() {
    let (_switch, mut a, mut b) = pair();
    let (before, after) = (frame(mac(2), mac(1), b"before"), frame(mac(2), mac(1), b"after"));
    a.host.add(&before, Offload::NONE);
    assert!(a.lend(&long(1)));
    a.host.send(&after);
    assert_eq!(a.reclaim(Reclaim::Copy), Some(Reclaimed::Sent(LEN)));
    // The memory is the guest's again.
    a.view.write(a.place, &[0xff; LEN]).unwrap();
    assert_eq!(b.take(), Some((before, false)));
    assert_eq!(b.take(), Some((long(1), false)));
    assert_eq!(b.take(), Some((after, false)));
    assert_eq!(b.take(), None);
}

#[test]
fn a_frame_that_is_revoked_reaches_nobody_and_no_buffer_is_lost() {
    let (_switch, mut a, mut b) = pair();
    for round in 0..200u8 {
        assert!(a.lend(&long(round)), "round {round}");
        assert_eq!(a.reclaim(Reclaim::Revoke), Some(Reclaimed::Revoked));
        a.host.send(&frame(mac(2), mac(1), &[round]));
        // Found at the front, or when its bytes are asked for.
        let came: Vec<_> = std::iter::from_fn(|| {
            b.host.port_rx.front()?;
            Some(b.take())
        })
        .flatten()
        .collect();
        assert_eq!(came, [(frame(mac(2), mac(1), &[round]), false)]);
    }
    assert_eq!((a.host.port.reading().sent.frames, b.host.port.reading().received.frames), (200, 200));
    assert_eq!(b.host.port.reading().received.dropped_in_all(), 0);
}

#[test]
fn a_receiver_that_reads_is_waited_for_and_may_give_back() {
    let (_switch, mut a, mut b) = pair();
    assert!(a.lend(&long(3)));
    b.host.port_rx.front().unwrap();
    let FrameBytes::Lent(reading) = b.host.port_rx.take_bytes() else { panic!("it is lent") };
    for how in [Reclaim::IfDone, Reclaim::Copy, Reclaim::Revoke] {
        assert_eq!(a.reclaim(how), None, "{how:?}");
    }
    drop(reading);
    assert_eq!(b.host.port_rx.front().unwrap().len(), LEN, "it is still there");
    assert_eq!(a.reclaim(Reclaim::Copy), Some(Reclaimed::Sent(LEN)));
    assert_eq!(b.take(), Some((long(3), false)));
}

#[test]
fn no_more_are_lent_than_a_sender_may() {
    let (_switch, mut a, mut b) = pair();
    let lent = (0..200).filter(|round| a.lend(&long(*round))).count();
    assert_eq!(lent, MOST_LENT);
    assert!((0..MOST_LENT).all(|_| b.take().is_some_and(|(_, lent)| lent)));
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    assert!(a.lend(&long(0)));
}

#[test]
fn what_cannot_be_lent_is_left_to_be_sent() {
    let (switch, mut a, mut b) = pair();
    let refused = |a: &mut Guest, frame: &[u8], what: &str| {
        assert!(!a.lend(frame), "{what}");
        assert_eq!(a.host.port_tx.lent(), 0, "{what}");
    };
    refused(&mut a, &long(0)[..LEND_FROM - 1], "too short");
    let mut to_all = long(0);
    to_all[..6].fill(0xff);
    refused(&mut a, &to_all, "a broadcast");
    let mut to_nobody = long(0);
    to_nobody[5] = 77;
    refused(&mut a, &to_nobody, "an unknown receiver: flooded");
    let mut spoofed = long(0);
    spoofed[11] = 2;
    refused(&mut a, &spoofed, "another's source address");
    for port in ["h1", "h2"] {
        let capture = switch.capture(port, CaptureOptions::default()).unwrap();
        refused(&mut a, &long(0), "somebody looks on");
        drop(capture);
    }
    let summed =
        Offload { flags: VIRTIO_NET_HDR_F_NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..Offload::NONE };
    a.view.write(PLACE, &long(0)).unwrap();
    assert!(!a.lend_with(&long(0), summed), "a sum that its receiver does not take");
    b.host.port.takes(RxOffloads::ALL);
    let beyond = Offload { csum_start: LEN as u16, ..summed };
    assert!(!a.lend_with(&long(0), beyond), "a sum beyond its end");
    let large = Offload { gso: VIRTIO_NET_HDR_GSO_TCPV4, gso_size: 1000, csum_offset: 16, ..summed };
    assert!(!a.lend_with(&long(0), large), "it is not TCP");
    b.host.port_rx.arm();
    refused(&mut a, &long(0), "its receiver sleeps");
    b.host.port_rx.disarm();
    b.host.port.set_up(false);
    refused(&mut a, &long(0), "its receiver is down");
    b.host.port.set_up(true);
    let head = &long(0)[..HEAD];
    for (len, spoilt) in [(LEN, LEN - 1), (LEN - 1, LEN)] {
        let lent = a.host.port_tx.lend(head, len, Offload::NONE, || ranges(&a.view, PLACE, spoilt));
        assert!(!lent, "{spoilt} bytes for a frame of {len}");
    }
    assert!(!a.host.port_tx.lend(head, LEN, Offload::NONE, || ranges(&a.view, 1 << 40, LEN)), "no memory");
    let Guest { host: Host { port, port_rx, .. }, .. } = b;
    drop(port_rx);
    refused(&mut a, &long(0), "nobody takes lent frames");
    assert_eq!(a.host.send(&long(0)), Sent::Delivered(1));
    let mut port_rx = port.rx(0);
    assert_eq!(take(&mut port_rx).unwrap().0, long(0));
    port_rx.take_lent_frames();
    assert!(a.lend(&long(0)), "nothing else was wrong");
}

#[test]
fn a_sum_that_is_left_to_the_receiver_is_lent_with_its_frame() {
    let (_switch, mut a, mut b) = pair();
    b.host.port.takes(RxOffloads::ALL);
    let offload = Offload {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso: VIRTIO_NET_HDR_GSO_TCPV4,
        hdr_len: 1,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    let mut bytes = long(0);
    bytes[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, IPPROTO_TCP]);
    bytes[46] = 0x50;
    assert!(a.lend_with(&bytes, offload));
    let front = b.host.port_rx.front().unwrap();
    assert_eq!((front.len(), front.offload()), (LEN, Offload { hdr_len: 54, ..offload }));
    assert_eq!(b.take(), Some((bytes, true)));
}

#[test]
fn a_port_rx_that_takes_no_lent_frames_finds_their_bytes() {
    let (_switch, mut a, b) = pair();
    assert!(a.lend(&long(1)) && a.lend(&long(2)) && a.lend(&long(3)));
    assert_eq!(a.reclaim(Reclaim::Revoke), Some(Reclaimed::Revoked));
    let Guest { host: Host { port, port_rx, .. }, .. } = b;
    drop(port_rx);
    let mut port_rx = port.rx(0);
    assert_eq!(take(&mut port_rx).unwrap().0, long(2));
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    assert_eq!((port_rx.front().unwrap().bytes().len(), a.host.port_tx.lent()), (LEN, 1));
    port_rx.skip(DropReason::Offload);
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    assert!(port_rx.front().is_none());
}

#[test]
fn a_link_that_goes_down_drops_what_is_lent_and_leaks_nothing() {
    let (_switch, mut a, mut b) = pair();
    for round in 0..100u8 {
        assert!(a.lend(&long(round)) && a.lend(&long(round)) && a.lend(&long(round)), "round {round}");
        assert_eq!(a.reclaim(Reclaim::Revoke), Some(Reclaimed::Revoked));
        assert_eq!(a.reclaim(Reclaim::Copy), Some(Reclaimed::Sent(LEN)));
        b.host.port.set_up(false);
        assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
        assert!(b.host.port_rx.front().is_none());
        b.host.port.set_up(true);
    }
    assert_eq!(b.host.missed(DropReason::Down), 200, "what was taken back is not among them");
    assert_eq!(b.host.port.reading().waiting, 0);
}

#[test]
fn ports_that_come_and_go_leave_a_sender_its_memory() {
    let (switch, mut a, mut b) = pair();
    assert!(a.lend(&long(1)));
    // Another snapshot: who lends copies, and goes by the new one.
    let c = Guest::new(&switch, 3);
    assert!(a.lend(&long(2)));
    assert_eq!(b.take(), Some((long(1), false)));
    assert_eq!(b.take(), Some((long(2), true)));
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    drop(c);
    // The receiver goes, with what is lent to it, and with what is in its hands.
    assert!(a.lend(&long(3)) && a.lend(&long(4)));
    b.host.port_rx.front().unwrap();
    drop(b);
    assert_eq!(a.reclaim(Reclaim::Copy), Some(Reclaimed::Sent(LEN)));
    assert_eq!(a.reclaim(Reclaim::Revoke), Some(Reclaimed::Sent(LEN)));
    assert!(!a.lend(&long(5)));
}

#[test]
fn a_port_tx_that_goes_takes_its_frames_with_it() {
    let (_switch, mut a, mut b) = pair();
    let map = Arc::downgrade(a.view.map());
    assert!(a.lend(&long(1)) && a.lend(&long(2)));
    let Guest { host: Host { port, port_tx, .. }, view, .. } = a;
    drop(view);
    assert!(map.upgrade().is_some(), "what is lent stays mapped");
    drop(port_tx);
    assert!(map.upgrade().is_none());
    while b.host.port_rx.front().is_some() {
        assert_eq!(b.take(), None);
    }
    assert_eq!((b.host.port.reading().waiting, port.reading().sent.frames), (0, 0));
}

#[test]
fn a_core_does_not_unmap_memory() {
    let (_switch, mut a, mut b) = pair();
    let map = Arc::downgrade(a.view.map());
    assert!(a.lend(&long(1)));
    // Another map, while the frame is lent.
    a.view.set_map(Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    assert_eq!(b.take(), Some((long(1), true)));
    assert_eq!(a.reclaim(Reclaim::IfDone), Some(Reclaimed::Sent(LEN)));
    assert!(map.upgrade().is_some(), "the last reference was the core's");
    drop(a.host.port_tx);
    assert!(map.upgrade().is_none());
}

#[test]
fn what_waits_for_another_process_is_counted_without_what_was_taken_back() {
    let (_switch, mut a, mut b) = pair();
    assert!(a.lend(&long(1)) && a.lend(&long(2)));
    a.host.send(&frame(mac(2), mac(1), b"short"));
    assert_eq!(a.reclaim(Reclaim::Revoke), Some(Reclaimed::Revoked));
    assert_eq!(a.reclaim(Reclaim::Copy), Some(Reclaimed::Sent(LEN)));
    let (_, received) = b.host.port.final_counts();
    assert_eq!(received.dropped(DropReason::Upgrade), 2);
    assert_eq!(b.take(), Some((long(2), false)));
    assert_eq!(b.take(), Some((frame(mac(2), mac(1), b"short"), false)));
}

/// A frame in which every eight bytes behind the head say its number.
fn numbered(number: u64) -> Vec<u8> {
    let words = (LEN - HEAD).div_ceil(8);
    let mut bytes = frame(mac(2), mac(1), &number.to_le_bytes());
    bytes.resize(HEAD, 0);
    bytes.extend((0..words).flat_map(|_| number.to_le_bytes()));
    bytes
}

/// The number of a frame that is whole.
fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
    assert!(bytes[HEAD..].chunks_exact(8).all(|word| word == number.to_le_bytes()), "frame {number} is torn");
    number
}

/// A sender that takes its memory back by every way, and uses it for something else at once, beside a receiver that reads, gives back
/// and falls behind: what arrives is whole, in order, and all that was not taken back.
#[test]
fn whoever_has_the_memory_has_it_alone() {
    const FRAMES: u64 = 4000;
    let (_switch, a, mut b) = pair();
    let Guest { host: Host { port: _port_a, mut port_tx, .. }, view, .. } = a;
    let (mut sent, mut came) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut lending =
                Lending { port_tx: &mut port_tx, view: &view, out: Vec::new(), sent: Vec::new() };
            for number in 0..FRAMES {
                lending.send(number);
                lending.take_back(number.is_multiple_of(97));
            }
            while !lending.out.is_empty() {
                lending.take_back(true);
            }
            lending.sent
        });
        let mut came = Vec::new();
        let mut turn = 0u64;
        while !sender.is_finished() {
            turn += 1;
            if b.host.port_rx.front().is_none() {
                std::thread::yield_now();
                continue;
            }
            if turn.is_multiple_of(3)
                && let FrameBytes::Lent(frame) = b.host.port_rx.take_bytes()
            {
                // No room for it.
                drop(frame);
            }
            if b.host.port_rx.front().is_some()
                && let Some((bytes, _)) = b.take()
            {
                came.push(number(&bytes));
            }
        }
        (sender.join().unwrap(), came)
    });
    while b.host.port_rx.front().is_some() {
        came.extend(b.take().map(|(bytes, _)| number(&bytes)));
    }
    assert!(came.is_sorted(), "in order");
    sent.sort_unstable();
    assert_eq!(came, sent);
    assert_eq!(b.host.port.reading().waiting, 0);
}

struct Lending<'a> {
    port_tx: &'a mut PortTx,
    view: &'a GuestView,
    /// Lent: their numbers.
    out: Vec<u64>,
    /// Not taken back.
    sent: Vec<u64>,
}

impl Lending<'_> {
    fn place(number: u64) -> u64 {
        PLACE + number % PLACES * STRIDE
    }

    /// Lends a frame, or copies it while there is no room for more.
    fn send(&mut self, number: u64) {
        while self.out.first().is_some_and(|first| number - first >= PLACES) {
            self.take_back(true);
        }
        let (frame, at) = (numbered(number), Self::place(number));
        self.view.write(at, &frame).unwrap();
        let lent = self
            .port_tx
            .lend(&frame[..HEAD], frame.len(), Offload::NONE, || ranges(self.view, at, frame.len()));
        if lent {
            self.out.push(number);
        } else {
            eventually("a buffer comes back", || {
                send(self.port_tx, &frame, Offload::NONE) == Sent::Delivered(1)
            });
            self.sent.push(number);
        }
        self.port_tx.flush();
    }

    /// Asks for the oldest, one way or another; its memory is used for something else then.
    fn take_back(&mut self, at_once: bool) {
        let Some(number) = self.out.first().copied() else { return };
        let how = match number % 5 {
            _ if !at_once && number % 2 == 0 => Reclaim::IfDone,
            0 | 1 => Reclaim::Revoke,
            _ => Reclaim::Copy,
        };
        let Some(reclaimed) = self.port_tx.reclaim(how) else { return };
        self.out.remove(0);
        if reclaimed != Reclaimed::Revoked {
            self.sent.push(number);
        }
        self.view.write(Self::place(number), &[0xee; LEN]).unwrap();
    }
}
