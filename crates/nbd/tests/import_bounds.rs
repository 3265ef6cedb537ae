//! What one reap of an import's channel does at most, and that no call allocates, with connections lost meanwhile.

#![allow(unsafe_code)]
// UNSAFETY: an allocator that counts, around the system's.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::{Backing, IoChannel, Op, Submitted, Tag};
use scripted::*;

struct Counting;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    if WATCHED.try_with(Cell::get).unwrap_or(false) {
        COUNT.with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SLICE: u64 = 256 << 10;

/// A channel that nobody polls but the test.
fn channel(backing: &dyn Backing, depth: u16) -> (Box<dyn IoChannel>, CoreContext, GuestView) {
    let view = GuestView::new(std::sync::Arc::new(GuestMap::anonymous(1 << 20).unwrap()));
    (backing.channel(depth).unwrap(), CoreContext::default(), view)
}

#[test]
fn nothing_is_allocated_or_freed_even_when_connections_are_lost() {
    nothing_is_allocated_or_freed(None);
}

/// The same where writes are kept until they are flushed, with copies of as little as may be, so that the channel flushes by itself.
#[test]
fn nothing_is_allocated_or_freed_where_writes_are_retained() {
    nothing_is_allocated_or_freed(Some("image@boot".to_owned()));
}

fn nothing_is_allocated_or_freed(instance: Option<String>) {
    let retains = instance.is_some();
    let disk = Disk::new(1 << 20);
    let served = disk.clone();
    let server = Server::start(Terms { instance, ..Terms::default() }, move |mut session| {
        // Each connection serves some requests, and ends in the middle of one.
        (session.reads, session.sends) =
            if session.number < 20 { (150_000, 70_001) } else { (usize::MAX, usize::MAX) };
        obey(session, &served);
    });
    let import = import(ioplane_nbd::import::ImportOptions { retain: 1, ..server.options() });
    let (mut channel, mut context, view) = channel(&*import, 8);
    let ranges = [
        GuestRange { gpa: 1, len: 700 },
        GuestRange { gpa: 5000, len: 324 },
        GuestRange { gpa: 8192, len: 4096 },
    ];
    WATCHED.set(true);
    for round in 0..200 {
        let ops = [
            Op::Write { offset: 0, from: &ranges },
            Op::Read { offset: 8192, into: &ranges[2..] },
            // Where writes are retained the guest leaves flushing to the channel.
            if retains { Op::Discard { offset: 0, len: 512 } } else { Op::Flush },
            Op::WriteZeroes { offset: 16384, len: 4096, unmap: round % 2 == 0 },
            Op::Discard { offset: 32768, len: 4096 },
            Op::Write { offset: 512, from: &ranges[2..] },
        ];
        for (tag, op) in ops.iter().enumerate() {
            assert_eq!(channel.submit(&mut context, &view, op, Tag(tag as u16)), Submitted::Pending);
        }
        while channel.in_flight() > 0 {
            channel.push(&mut context);
            channel.reap(&mut context, &mut |_, outcome| assert_eq!(outcome, Ok(())));
        }
    }
    WATCHED.set(false);
    assert_eq!(COUNT.take(), 0);
    assert!(disk.count(ioplane_nbd::spec::NBD_CMD_FLUSH) > 0);
    assert!(import.status().connections[0].losses >= 10, "{:?}", import.status());
}

#[test]
fn one_reap_of_an_import_takes_a_bounded_part_of_what_has_come() {
    let server = Server::start(Terms { bytes: 64 << 20, ..Terms::default() }, |mut session| {
        // Holes cost the server nothing, so all of them are there at once.
        while let Some(asked) = session.next() {
            let reply = hole_chunk(&asked, 1, asked.offset, asked.length);
            session.send(&reply);
        }
    });
    let import = import(server.options());
    let (mut channel, mut context, view) = channel(&*import, 64);
    until(&import, "connected", |status| status.connections.iter().any(is_connected));
    let into = [GuestRange { gpa: 0, len: SLICE as u32 }];
    for tag in 0..64 {
        let op = Op::Read { offset: u64::from(tag) * SLICE, into: &into };
        assert_eq!(channel.submit(&mut context, &view, &op, Tag(tag)), Submitted::Pending);
    }
    channel.push(&mut context);
    // Time for the server to answer all of them: with less, a reap finds fewer.
    until(&import, "all sent", |status| status.connections[0].requests == 64);
    std::thread::sleep(Duration::from_millis(50));
    let (mut reaps, mut most) = (0, 0);
    while channel.in_flight() > 0 {
        most = most.max(channel.reap(&mut context, &mut |_, outcome| assert_eq!(outcome, Ok(()))));
        reaps += 1;
    }
    assert!(most <= 2 && reaps >= 32, "{most} reads of 256 KiB in one reap, {reaps} reaps");
}
