//! The data path allocates nothing and frees nothing, whatever is sent: also in the poll in which a new plan arrives.

#![allow(unsafe_code)]
// UNSAFETY: an allocator that counts, around the system's.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ioplane_network::{CaptureOptions, Offload, RxOffloads, spec::*};
use support::*;

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `work` went to the allocator.
fn calls(work: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    work();
    CALLS.get() - before
}

#[test]
fn nothing_is_allocated_between_send_and_pop() {
    let switch = switch();
    let mut a = Host::new(&switch, "a");
    let mut b = Host::with(&switch, "b", |options| options.pairs = 4);
    let mut whole = Host::new(&switch, "whole");
    whole.port.takes(RxOffloads::ALL);
    let plain = frame(BROADCAST, mac(1), &[0; 46]);
    let to_b = frame(mac(2), mac(1), &[0; 46]);
    let mut large = frame(mac(2), mac(1), &[0; 6000]);
    large[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, IPPROTO_TCP]);
    large[46] = 0x50;
    let tso = Offload {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso: VIRTIO_NET_HDR_GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    let mut all = Vec::new();
    for round in 0..3 {
        // A new plan, with a ring to copy to, then without.
        let capture = (round == 1).then(|| switch.capture("a", CaptureOptions::default()).unwrap());
        let made = calls(|| {
            for _ in 0..500 {
                a.add(&plain, Offload::NONE);
                a.add(&to_b, Offload::NONE);
                a.add(&large, tso);
                a.add(&large, Offload { gso_size: 0, ..tso });
            }
            a.port_tx.flush();
            for port_rx in [&mut b.port_rx, &mut whole.port_rx, &mut a.port_rx] {
                while port_rx.front().is_some() {
                    port_rx.pop();
                }
                port_rx.arm();
                port_rx.disarm();
            }
            b.add(&frame_of_b(), Offload::NONE);
            b.port_tx.flush();
        });
        all.push(made);
        drop(capture);
    }
    assert_eq!(all, [0, 0, 0]);
    assert!(a.port.reading().sent.frames > 1000 && whole.port.reading().received.frames > 500);
}

#[test]
fn a_core_frees_nothing_when_the_switch_has_gone_under_it() {
    let switch = switch();
    let mut b = Host::new(&switch, "b");
    b.send(&frame_of_b());
    let Host { port, mut port_tx, port_rx } = b;
    // Its port, and with it the switch: what was its snapshot is nobody's but the port TX's, and there is another.
    drop((port, switch));
    let frame = frame_of_b();
    let made = calls(|| {
        port_tx.send(&frame, frame.len(), Offload::NONE, &mut |_| false);
        port_tx.flush();
    });
    assert_eq!(made, 0);
    drop((port_tx, port_rx));
}

/// Built without the allocator.
fn frame_of_b() -> [u8; 60] {
    let mut bytes = [0; 60];
    bytes[..6].copy_from_slice(&mac(1));
    bytes[6..12].copy_from_slice(&mac(2));
    bytes
}

#[test]
fn nothing_is_allocated_for_a_frame_that_is_lent() {
    use ioplane_memory::{GuestMap, GuestRange, GuestView};
    use ioplane_network::{FrameBytes, HEAD, LEND_FROM, MOST_LENT, Reclaim};
    const LEN: usize = 2 * LEND_FROM;
    let switch = switch();
    let wide = |options: &mut ioplane_network::PortOptions| options.mtu = 60_000;
    let (mut a, mut b) = (Host::with(&switch, "a", wide), Host::with(&switch, "b", wide));
    b.send(&frame_of_b());
    b.port_rx.take_lent_frames();
    let mut view = GuestView::new(std::sync::Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    let mut head = [0; HEAD];
    head[..12].copy_from_slice(&[mac(2), mac(1)].concat());
    let (mut lent, mut read) = (0, 0);
    for round in 0..3 {
        // A new plan, and memory of which a frame has the last reference.
        let other = (round == 1).then(|| Host::new(&switch, "other"));
        let made = calls(|| {
            for ways in 0..100 {
                while a.port_tx.lent() < MOST_LENT / 2 {
                    let range = GuestRange { gpa: 0, len: (LEN - HEAD) as u32 };
                    let ranges = || view.lend([range].into_iter());
                    lent += u64::from(a.port_tx.lend(&head, LEN, Offload::NONE, ranges));
                }
                a.port_tx.flush();
                while b.port_rx.front().is_some() {
                    match b.port_rx.take_bytes() {
                        FrameBytes::Lent(frame) => frame.done(),
                        FrameBytes::Whole(_) => {}
                        FrameBytes::Soon | FrameBytes::Revoked => continue,
                    }
                    read += 1;
                    b.port_rx.pop();
                    if read % 3 == 0 {
                        break;
                    }
                }
                let how = [Reclaim::IfDone, Reclaim::Copy, Reclaim::Revoke][ways % 3];
                while a.port_tx.reclaim(how).is_some() {}
            }
        });
        assert_eq!(made, 0, "round {round}");
        view.set_map(std::sync::Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
        drop(other);
    }
    assert!(lent > 500 && read > 300, "{lent} lent, {read} read");
}
