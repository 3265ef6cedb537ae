//! Connections that are cut at every byte: each request is in effect, and every byte is right in the end.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::sync::Arc;

use ioplane_memory::GuestRange;
use ioplane_nbd::spec::*;
use ioplane_storage::{Op, Submitted, Tag};
use rig::Rig;
use scripted::*;

/// A write, a read, zeros, a discard and a flush at once, on a disk of ones; says how many requests were replayed.
fn run(server: &Server, disk: &Disk) -> u64 {
    disk.bytes.lock().unwrap().fill(1);
    let import = import(server.options());
    let mut rig = Rig::new(&*import, 8);
    rig.view.write(0, &[7; 1000]).unwrap();
    let (from, into) = (
        [GuestRange { gpa: 0, len: 600 }, GuestRange { gpa: 600, len: 400 }],
        [GuestRange { gpa: 8192, len: 700 }],
    );
    let ops = [
        Op::Write { offset: 4096, from: &from },
        Op::Read { offset: 512, into: &into },
        Op::WriteZeroes { offset: 8192, len: 512, unmap: true },
        Op::Discard { offset: 16384, len: 512 },
        Op::Flush,
    ];
    for (tag, op) in ops.iter().enumerate() {
        assert_eq!(rig.submit(op, Tag(tag as u16)), Submitted::Pending);
    }
    rig.push();
    let ended = rig.finish();
    assert_eq!(ended.len(), 5);
    assert!(ended.iter().all(|(_, outcome)| outcome.is_ok()), "{ended:?}");
    let mut read = [0; 700];
    rig.view.read(8192, &mut read).unwrap();
    assert_eq!(read, [1; 700]);
    let bytes = disk.bytes.lock().unwrap();
    let expected = |at: usize| match at {
        4096..5096 => 7,
        8192..8704 => 0,
        _ => 1,
    };
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    import.status().connections.iter().map(|connection| connection.replays).sum()
}

fn cut_everywhere(structured: bool) {
    // Of five requests with 1000 bytes of data, and of their replies with 700.
    let asked = 5 * 28 + 1000;
    let told = if structured { 4 * 16 + 28 + 700 } else { 5 * 16 + 700 };
    let terms = Terms { structured, bytes: 32 << 10, ..Terms::default() };
    for (reads, sends) in
        (0..asked).map(|cut| (cut, usize::MAX)).chain((0..told).map(|cut| (usize::MAX, cut)))
    {
        let disk = Disk::new(terms.bytes);
        let served = disk.clone();
        let server = Server::start(terms.clone(), move |mut session| {
            if session.number == 0 {
                (session.reads, session.sends) = (reads, sends);
            }
            obey(session, &served);
        });
        let replays = run(&server, &disk);
        let what = format!("after {reads} bytes in, {sends} out");
        assert_eq!(server.connections(), 2, "{what}");
        // All that the first connection has not answered, and nothing else, is sent again.
        let answered = disk.done.lock().unwrap().len() as u64 - 5;
        assert!(replays <= 5, "{what}: {replays} replays");
        if sends != usize::MAX {
            let whole = whole_replies(structured, sends);
            assert_eq!(replays, 5 - whole, "{what}");
            assert!(answered <= 5);
        }
    }
}

/// How many of the five replies are whole in the first `sent` bytes.
fn whole_replies(structured: bool, sent: usize) -> u64 {
    let read = if structured { 28 + 700 } else { 16 + 700 };
    let mut left = sent;
    let mut whole = 0;
    for reply in [16, read, 16, 16, 16] {
        if left < reply {
            break;
        }
        left -= reply;
        whole += 1;
    }
    whole
}

#[test]
fn cut_at_every_byte_with_structured_replies() {
    cut_everywhere(true);
}

#[test]
fn cut_at_every_byte_with_simple_replies() {
    cut_everywhere(false);
}

#[test]
fn nothing_is_replayed_without_a_cut() {
    let (server, disk) = Server::obedient(Terms { bytes: 32 << 10, ..Terms::default() });
    assert_eq!(run(&server, &disk), 0);
    assert_eq!(server.connections(), 1);
}

/// Large writes are cut where the socket's buffer ends, and arrive once the server reads on.
#[test]
fn a_full_socket_is_waited_for() {
    let gate = Arc::new(std::sync::Barrier::new(2));
    let disk = Disk::new(16 << 20);
    let (served, waits) = (disk.clone(), gate.clone());
    let server = Server::start(Terms { bytes: 16 << 20, ..Terms::default() }, move |session| {
        waits.wait();
        obey(session, &served);
    });
    let import = import(server.options());
    let mut rig = Rig::new(&*import, 64);
    let pattern: Vec<u8> = (0..rig::MEMORY).map(|at| (at / 4096) as u8 ^ at as u8).collect();
    rig.view.write(0, &pattern).unwrap();
    let from = [GuestRange { gpa: 0, len: 256 << 10 }];
    for tag in 0..64 {
        let offset = u64::from(tag) * (256 << 10);
        assert_eq!(rig.submit(&Op::Write { offset, from: &from }, Tag(tag)), Submitted::Pending);
    }
    // As a core polls: until the socket takes no more.
    until(&import, "connected", |status| status.connections.iter().any(is_connected));
    let mut polls = 0;
    while {
        rig.reap(&mut |_, _| {});
        rig.push();
        rig.channel.held_back()
    } {
        polls += 1;
        assert!(polls < 1000, "a full socket keeps the core awake");
    }
    assert!(!rig.readable(20), "the waker is readable although the socket is full and nothing has come");
    gate.wait();
    let mut ended = 0;
    while rig.channel.in_flight() > 0 {
        assert!(rig.channel.held_back() || rig.readable(10_000), "the waker stays silent");
        ended += rig.reap(&mut |_, outcome| assert_eq!(outcome, Ok(())));
        rig.push();
    }
    assert_eq!(ended, 64);
    let bytes = disk.bytes.lock().unwrap();
    assert!(bytes.chunks(256 << 10).all(|part| part == &pattern[..256 << 10]));
    assert_eq!(disk.count(NBD_CMD_WRITE), 64);
}
