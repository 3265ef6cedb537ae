//! Several cores at once: no frame is lost on the way, no wake-up, and a port that does not take its frames is nobody
//! else's trouble. Counts, not times.

mod support;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ioplane_network::{DropReason, Offload, PortRx, Sent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::*;

const FRAMES: u32 = 60_000;

/// Sleeps as a core does. False if it was not woken within 20 s.
fn sleep_until_woken(event: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&event, PollFlags::IN)];
    let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
    poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready == 1)
}

/// Waits for frames as a core does: looks, asks to be woken, looks again, sleeps.
fn receive(port_rx: &mut PortRx, mut each: impl FnMut(&[u8]) -> bool) -> u32 {
    let mut sleeps = 0;
    loop {
        while let Some(frame) = port_rx.front() {
            let more = each(frame.bytes());
            port_rx.pop();
            if !more {
                return sleeps;
            }
        }
        if !port_rx.arm() {
            sleeps += 1;
            assert!(sleep_until_woken(port_rx.waker()), "a wake-up was lost");
        }
        port_rx.disarm();
    }
}

fn number(frame: &[u8]) -> u32 {
    u32::from_le_bytes([frame[14], frame[15], frame[16], frame[17]])
}

#[test]
fn no_frame_and_no_wake_up_is_lost() {
    let switch = switch();
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let received = AtomicU64::new(0);
    let rounds = std::thread::scope(|scope| {
        let counted = &received;
        scope.spawn(move || {
            let mut n = 0;
            while n < FRAMES {
                // One to seven a batch; never more on the way than b has room for.
                for _ in 0..1 + n % 7 {
                    let bytes = frame(mac(2), mac(1), &[&n.to_le_bytes()[..], &[n as u8; 40]].concat());
                    assert_eq!(a.add(&bytes, Offload::NONE), Sent::Delivered(1));
                    n += 1;
                }
                a.port_tx.flush();
                // Often not before b has everything and lies down.
                let behind = if n.is_multiple_of(3) { 0 } else { 30 };
                eventually("b sleeps on", || counted.load(Ordering::Acquire) + behind >= u64::from(n));
            }
        });
        let receiver = scope.spawn(|| {
            let mut next = 0;
            receive(&mut b.port_rx, |bytes| {
                assert_eq!(number(bytes), next, "in order");
                assert!(bytes[18..].iter().all(|byte| *byte == next as u8), "whole");
                next += 1;
                received.store(u64::from(next), Ordering::Release);
                next < FRAMES
            })
        });
        receiver.join().unwrap()
    });
    let reading = b.port.reading();
    assert!(reading.wakes as u32 >= rounds / 2 && rounds > 100, "it slept {rounds} times");
    assert_eq!(reading.received.dropped_in_all(), 0);
}

#[test]
fn a_port_that_never_takes_a_frame_is_nobody_elses_trouble() {
    let switch = switch_with(|settings| settings.flood_rate = u64::MAX >> 20);
    let hosts: Vec<_> = (1..=2)
        .map(|n| Host::with(&switch, &format!("h{n}"), |options| options.mac = Some(mac(n))))
        .collect();
    let dead = Host::with(&switch, "dead", |options| options.mac = Some(mac(9)));
    let window = AtomicU64::new(0);
    let totals = std::thread::scope(|scope| {
        let window = &window;
        let threads: Vec<_> = hosts
            .into_iter()
            .enumerate()
            .map(|(at, mut own)| {
                scope.spawn(move || {
                    // Both send to each other and to the dead one, and wait for each other only.
                    let (me, other) = (mac(1 + at as u8), mac(2 - at as u8));
                    let (mut received, mut full) = (0u32, 0u32);
                    for n in 0..FRAMES / 20 {
                        for part in 0..10u32 {
                            let payload = (n * 10 + part).to_le_bytes();
                            assert_eq!(
                                own.add(&frame(other, me, &payload), Offload::NONE),
                                Sent::Delivered(1)
                            );
                            let sent = own.add(&frame(mac(9), me, &[0; 1400]), Offload::NONE);
                            full += u32::from(sent == Sent::Dropped(DropReason::Full));
                        }
                        own.port_tx.flush();
                        window.fetch_add(1, Ordering::AcqRel);
                        let mut look = || {
                            while let Some((bytes, _)) = own.take() {
                                assert_eq!(number(&bytes), received);
                                received += 1;
                            }
                            received >= n * 10
                        };
                        eventually("the other has sent its last round", &mut look);
                    }
                    eventually("the last round arrives", || {
                        received += own.take_all().len() as u32;
                        received == FRAMES / 2
                    });
                    (own.port.reading(), full)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for (reading, _) in &totals {
        assert_eq!((reading.received.frames, reading.received.dropped_in_all()), (u64::from(FRAMES / 2), 0));
        assert_eq!((reading.sent.frames, reading.sent.dropped_in_all()), (u64::from(FRAMES), 0));
    }
    let full: u64 = totals.iter().map(|(_, full)| u64::from(*full)).sum();
    assert!(full > u64::from(FRAMES) / 2);
    assert_eq!(dead.missed(DropReason::Full), full);
    assert!(dead.port.reading().waiting <= 64);
}

#[test]
fn ports_come_and_go_while_frames_flow() {
    let switch = switch_with(|settings| settings.flood_rate = u64::MAX >> 20);
    let mut a = Host::with(&switch, "a", |options| options.mac = Some(mac(1)));
    let mut b = Host::with(&switch, "b", |options| options.mac = Some(mac(2)));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = &over;
        let sender = scope.spawn(move || {
            let mut delivered = 0u64;
            while !over.load(Ordering::Acquire) {
                for n in 0..32u8 {
                    a.add(&frame(BROADCAST, mac(1), &[n; 100]), Offload::NONE);
                    delivered += u64::from(
                        a.add(&frame(mac(2), mac(1), &[n; 100]), Offload::NONE) == Sent::Delivered(1),
                    );
                }
                a.port_tx.flush();
            }
            delivered
        });
        let receiver = scope.spawn(move || {
            let mut received = 0u64;
            while !over.load(Ordering::Acquire) {
                received += b.take_all().iter().filter(|frame| frame[0] == 2).count() as u64;
            }
            (received, b)
        });
        for round in 0..300 {
            let mut guest = Host::new(&switch, &format!("guest{}", round % 7));
            guest.send(&frame(BROADCAST, mac(50 + (round % 7) as u8), b"hello"));
            guest.take();
            if round % 3 == 0 {
                let capture =
                    switch.capture("a", ioplane_network::CaptureOptions { snaplen: 60, frames: 16 });
                drop(guest);
                assert!(capture.unwrap().all(|captured| captured.bytes.len() <= 60));
            }
        }
        over.store(true, Ordering::Release);
        let delivered = sender.join().unwrap();
        let (received, mut b) = receiver.join().unwrap();
        let rest = b.take_all().iter().filter(|frame| frame[0] == 2).count() as u64;
        assert_eq!(received + rest, delivered);
        assert!(delivered > 0 && switch.ports().len() == 1, "{delivered}");
    });
}
