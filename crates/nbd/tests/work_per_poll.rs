//! What one poll of a connection does at most, whatever its client sends; and that it allocates nothing.

#![allow(unsafe_code)]
// UNSAFETY: an allocator that counts, around the system's.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::PollState;
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::Request;
use ioplane_storage::filter::Delay;
use ioplane_storage::{Backing, MemoryBacking};
use support::hand::ByHand;

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

/// What a poll may cost, and the last thing that it takes: a slice of a memory disk, a chunk of a socket, some system calls.
const MOST: u32 = (256 << 10) + (256 << 10);

fn memory() -> Arc<dyn Backing> {
    MemoryBacking::new(64 << 20).unwrap()
}

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let request = Request { flags: 0, command, cookie, offset, length };
    let mut bytes = request.encode().to_vec();
    bytes.resize(bytes.len() + request.payload() as usize, cookie as u8);
    bytes
}

/// All commands, short and long, in turn.
fn flood() -> Vec<u8> {
    let mut bytes = Vec::new();
    for round in 0..20 {
        let at = round << 16;
        bytes.extend(request(NBD_CMD_WRITE, round, at, 4096));
        bytes.extend(request(NBD_CMD_READ, round, at, 4096));
        bytes.extend(request(NBD_CMD_WRITE, round, at, 64 << 10));
        bytes.extend(request(NBD_CMD_FLUSH, round, 0, 0));
        bytes.extend(request(NBD_CMD_TRIM, round, at, 1 << 20));
        bytes.extend(request(NBD_CMD_WRITE_ZEROES, round, at, 1 << 20));
        bytes.extend(request(NBD_CMD_READ, round, at, 1 << 20));
        bytes.extend(request(NBD_CMD_WRITE, round, 1, 512));
        bytes.extend(request(99, round, 1, 512));
        bytes.extend(request(NBD_CMD_BLOCK_STATUS, round, 0, 4096));
    }
    bytes
}

/// Polls until all of `bytes` is taken and answered; what `each` makes of every poll. Gives the bytes that came back.
fn serve(hand: &mut ByHand, bytes: &[u8], mut each: impl FnMut(&mut ByHand) -> PollState) -> usize {
    let (mut left, mut got, mut idle) = (bytes, 0, 0);
    let mut buffer = vec![0; 256 << 10];
    while idle < 200 {
        let mut moved = false;
        match hand.client.write(left) {
            Ok(written) => (left, moved) = (&left[written..], written > 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        let state = each(hand);
        match hand.client.read(&mut buffer) {
            Ok(read) => (got, moved) = (got + read, true),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        idle = if moved || state == PollState::Busy || state == PollState::Waiting { 0 } else { idle + 1 };
    }
    assert!(left.is_empty(), "{} bytes were not taken", left.len());
    got
}

#[test]
fn one_poll_costs_no_more_than_it_may() {
    let mut hand = ByHand::new(memory(), true);
    let mut largest = 0;
    let got = serve(&mut hand, &flood(), |hand| {
        let outcome = hand.poll();
        largest = largest.max(outcome.cost().bytes);
        assert!(outcome.cost().requests <= 64 * 3, "{} requests", outcome.cost().requests);
        outcome.state()
    });
    assert!(got > 20 << 20, "{got} bytes came back");
    assert!(largest <= MOST, "a poll cost {largest} bytes");
}

#[test]
fn one_poll_takes_a_bounded_part_of_a_long_write_and_sends_a_bounded_part_of_replies() {
    let mut hand = ByHand::new(memory(), true);
    let bytes = request(NBD_CMD_WRITE, 1, 0, 2 << 20);
    let (mut left, mut buffer) = (&bytes[..], vec![0; 4 << 20]);
    // The socket holds all of it before the first poll.
    while !left.is_empty() {
        match hand.client.write(left) {
            Ok(written) => left = &left[written..],
            Err(_) => {
                hand.poll();
            }
        }
    }
    for number in 0..8 {
        hand.client.write_all(&request(NBD_CMD_READ, number, 0, 2 << 20)).unwrap();
    }
    let mut total = 0;
    for _ in 0..200_000 {
        let cost = hand.poll().cost().bytes;
        assert!(cost <= MOST, "a poll cost {cost} bytes");
        match hand.client.read(&mut buffer) {
            Ok(read) => {
                assert!(read <= MOST as usize, "{read} bytes were sent in one poll");
                total += read;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if total >= 16 << 20 {
            return;
        }
    }
    panic!("only {total} bytes have come");
}

#[test]
fn a_poll_allocates_nothing() {
    for (backing, structured) in [(memory(), true), (memory(), false)] {
        let mut hand = ByHand::new(backing, structured);
        hand.poll();
        let mut calls = 0;
        serve(&mut hand, &flood(), |hand| {
            let before = CALLS.get();
            let outcome = hand.poll();
            hand.slot.tidy();
            hand.slot.arm();
            hand.slot.disarm(&hand.context, false);
            calls += CALLS.get() - before;
            outcome.state()
        });
        // The end of a connection, too.
        hand.client.write_all(b"GET / HTTP/1.1, or so it seems").unwrap();
        let before = CALLS.get();
        for _ in 0..50 {
            hand.poll();
        }
        calls += CALLS.get() - before;
        assert_eq!(calls, 0);
    }
}

#[test]
fn a_disk_that_takes_its_time_is_waited_for() {
    let mut hand = ByHand::new(Delay::new(memory(), Duration::from_millis(2)), true);
    let mut states = Vec::new();
    let got = serve(&mut hand, &request(NBD_CMD_READ, 1, 0, 4096), |hand| {
        let state = hand.poll().state();
        states.push(state);
        state
    });
    assert_eq!(got, 28 + 4096);
    assert!(states.contains(&PollState::Waiting));
    assert_eq!(states.last(), Some(&PollState::Idle));
}
