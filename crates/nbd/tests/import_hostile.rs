//! Servers that break the protocol: each fault has a name, ends its connection and nothing else, and is not replayed for ever.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ioplane_memory::GuestRange;
use ioplane_nbd::Violation;
use ioplane_nbd::import::{ConnectionState, Loss};
use ioplane_nbd::spec::*;
use ioplane_storage::{Fault, Op, Submitted, Tag};
use rig::Rig;
use scripted::*;

/// What a server sends in place of the reply to a read of 1024 bytes at 512.
type Wrong = fn(&Session, &Asked) -> Vec<u8>;

fn structured(wrong: Wrong) -> (bool, Wrong) {
    (true, wrong)
}

fn cases() -> Vec<(&'static str, (bool, Wrong))> {
    vec![
        ("magic", structured(|_, _| vec![0xab; 32])),
        (
            "no request in flight",
            structured(|_, a| {
                data_chunk(&Asked { cookie: a.cookie ^ 1 << 20, ..a.clone() }, 1, 512, &[0; 1024])
            }),
        ),
        (
            "no request in flight",
            structured(|_, a| data_chunk(&Asked { cookie: u64::MAX, ..a.clone() }, 1, 512, &[0; 1024])),
        ),
        ("no request in flight", (false, |s, a| [s.reply(a, &[3; 1024]), s.reply(a, &[3; 1024])].concat())),
        (
            "no request in flight",
            structured(|s, a| [s.reply(a, &[3; 1024]), s.reply(a, &[3; 1024])].concat()),
        ),
        ("simple reply", structured(|_, a| [simple(a, 0), vec![0; 1024]].concat())),
        ("not negotiated", (false, |_, a| data_chunk(a, 1, 512, &[0; 1024]))),
        ("outside its request", structured(|_, a| data_chunk(a, 1, 511, &[0; 1024]))),
        ("outside its request", structured(|_, a| data_chunk(a, 1, 512, &[0; 1025]))),
        ("outside its request", structured(|_, a| data_chunk(a, 1, u64::MAX - 10, &[0; 1024]))),
        ("outside its request", structured(|_, a| hole_chunk(a, 1, 512, 1025))),
        ("outside its request", structured(|_, a| hole_chunk(a, 1, 512, 0))),
        (
            "two chunks",
            structured(|_, a| [data_chunk(a, 0, 512, &[0; 512]), data_chunk(a, 1, 1023, &[0; 513])].concat()),
        ),
        (
            "two chunks",
            structured(|_, a| [hole_chunk(a, 0, 512, 1024), data_chunk(a, 1, 600, &[0; 1])].concat()),
        ),
        ("ended with 512", structured(|_, a| data_chunk(a, 1, 512, &[0; 512]))),
        ("ended with 0", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_NONE, &[]))),
        ("not the last", structured(|_, a| chunk(a, 0, NBD_REPLY_TYPE_NONE, &[]))),
        ("payload of 8", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_OFFSET_DATA, &[0; 8]))),
        ("payload of 11", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_OFFSET_HOLE, &[0; 11]))),
        ("type 5", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_BLOCK_STATUS, &[0; 12]))),
        ("type 99", structured(|_, a| chunk(a, 1, 99, &[0; 12]))),
        ("no error", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_ERROR, &[0; 6]))),
        ("message of 65535", structured(|_, a| chunk(a, 1, NBD_REPLY_TYPE_ERROR, &[0, 0, 0, 5, 255, 255]))),
        (
            "payload of",
            structured(|_, a| {
                let mut endless = chunk(a, 1, NBD_REPLY_TYPE_ERROR, &[]);
                endless[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
                [endless, vec![0; 70_000]].concat()
            }),
        ),
        (
            "separate pieces",
            structured(|_, a| (0..512).flat_map(|at| data_chunk(a, 0, 512 + 2 * at, &[0; 1])).collect()),
        ),
        (
            "does not end",
            structured(|_, a| {
                chunk(a, 0, NBD_REPLY_TYPE_ERROR_OFFSET, &[&[0, 0, 0, 5, 0, 0][..], &[0; 8]].concat())
                    .repeat(5000)
            }),
        ),
        (
            "no request in flight",
            structured(|_, a| simple(&Asked { cookie: a.cookie + 65535, ..a.clone() }, 5)),
        ),
    ]
}

/// The first read is answered wrongly, the others as they should be.
#[test]
fn each_fault_has_a_name_and_is_got_over() {
    for (number, (word, (structured, wrong))) in cases().into_iter().enumerate() {
        let disk = Disk::new(1 << 20);
        disk.bytes.lock().unwrap().fill(3);
        let served = disk.clone();
        let server = Server::start(Terms { structured, ..Terms::default() }, move |mut session| {
            if session.number > 0 {
                return obey(session, &served);
            }
            let asked = session.next().unwrap();
            let bytes = wrong(&session, &asked);
            session.send(&bytes);
            // Kept open: the client has to end it.
            while session.next().is_some() {}
        });
        let import = import(server.options());
        let mut rig = Rig::new(&*import, 4);
        rig.view.write(0, &[9; 4096]).unwrap();
        let into = [GuestRange { gpa: 1024, len: 1024 }];
        // A second request, so that something is in flight when a reply comes twice.
        assert_eq!(rig.submit(&Op::Read { offset: 512, into: &into }, Tag(1)), Submitted::Pending);
        let other = [GuestRange { gpa: 8192, len: 512 }];
        assert_eq!(rig.submit(&Op::Read { offset: 0, into: &other }, Tag(2)), Submitted::Pending);
        rig.push();
        let ended = rig.finish();
        assert_eq!(ended.len(), 2, "case {number}, {word}");
        assert!(ended.iter().all(|(_, outcome)| outcome.is_ok()), "case {number}, {word}: {ended:?}");
        let mut bytes = [0; 4096];
        rig.view.read(0, &mut bytes).unwrap();
        let right = |at| if (1024..2048).contains(&at) { 3 } else { 9 };
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == right(at)), "case {number}, {word}");
        let status = import.status();
        assert_eq!(
            (status.connections[0].losses, server.connections()),
            (1, 2),
            "case {number}, {word}: {status:?}"
        );
    }
}

/// One that goes on doing it is a device failure, which says what was wrong and lasts until a person decides.
#[test]
fn a_server_that_never_keeps_to_the_protocol_is_a_device_failure() {
    for (number, (word, (structured, wrong))) in cases().into_iter().enumerate() {
        let good = Arc::new(AtomicBool::new(false));
        let (disk, behaves) = (Disk::new(1 << 20), good.clone());
        let server = Server::start(Terms { structured, ..Terms::default() }, move |mut session| {
            if behaves.load(Ordering::Acquire) {
                return obey(session, &disk);
            }
            if let Some(asked) = session.next() {
                let bytes = wrong(&session, &asked);
                session.send(&bytes);
                while session.next().is_some() {}
            }
        });
        let import = import(server.options());
        let mut rig = Rig::new(&*import, 4);
        let into = [GuestRange { gpa: 1024, len: 1024 }];
        assert_eq!(rig.submit(&Op::Read { offset: 512, into: &into }, Tag(1)), Submitted::Pending);
        rig.push();
        let ended = rig.finish();
        // Where the first half is a good reply the request succeeds, and the server is found out afterwards.
        let twice = word == "no request in flight" && ended[0].1.is_ok();
        if twice {
            continue;
        }
        assert_eq!(ended, [(Tag(1), Err(Fault::Io(libc::EIO)))], "case {number}, {word}");
        let status = until(&import, "stopped", |status| {
            matches!(status.connections[0].state, ConnectionState::Stopped { .. })
        });
        assert_eq!((status.connections[0].losses, server.connections()), (5, 5), "case {number}, {word}");
        assert_eq!(rig.read(512, 512), Err(Fault::Io(libc::EIO)), "case {number}, {word}");
        good.store(true, Ordering::Release);
        import.retry();
        until(&import, "connected", |status| status.connections.iter().all(is_connected));
        assert_eq!(rig.read(512, 512), Ok(vec![0; 512]), "case {number}, {word}");
    }
}

/// What is wrong is in the status while the connection is made again.
#[test]
fn the_reason_is_told() {
    for (word, (structured, wrong)) in cases() {
        let server = Server::start(Terms { structured, ..Terms::default() }, move |mut session| {
            if let Some(asked) = session.next() {
                let bytes = wrong(&session, &asked);
                session.send(&bytes);
                while session.next().is_some() {}
            }
        });
        let mut options = server.options();
        options.retry = (Duration::from_secs(3600), Duration::from_secs(3600));
        let import = import(options);
        let mut rig = Rig::new(&*import, 4);
        let into = [GuestRange { gpa: 1024, len: 1024 }];
        let other = [GuestRange { gpa: 8192, len: 512 }];
        assert_eq!(rig.submit(&Op::Read { offset: 512, into: &into }, Tag(1)), Submitted::Pending);
        assert_eq!(rig.submit(&Op::Read { offset: 0, into: &other }, Tag(2)), Submitted::Pending);
        rig.push();
        while !matches!(import.status().connections[0].state, ConnectionState::Reconnecting { .. }) {
            rig.reap(&mut |_, _| {});
            rig.push();
            rig.readable(10);
        }
        let state = import.status().connections[0].state.clone();
        let ConnectionState::Reconnecting { loss, .. } = state else { panic!("{word}: {state:?}") };
        assert!(matches!(loss, Loss::Violation(_)) && loss.to_string().contains(word), "{word}: {loss}");
    }
}

/// Bytes that nobody asked for do not keep a core awake.
#[test]
fn chatter_on_an_idle_connection_ends_it() {
    let server = Server::start(Terms::default(), |mut session| {
        while session.number == 0
            && let Some(asked) = session.next()
        {
            let reply = session.reply(&asked, &[0; 512]);
            session.send(&reply);
            session.send(&[0x67; 100]);
        }
        while session.next().is_some() {}
    });
    let mut options = server.options();
    options.dead_after = Duration::from_millis(100);
    let import = import(options);
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
    until(&import, "another connection", |status| {
        status.connections[0].losses == 1 && is_connected(&status.connections[0])
    });
    let waker = rig.channel.waker().unwrap();
    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ready = [rustix::event::PollFd::new(&waker, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ready, Some(&time)), Ok(0));
}

#[test]
fn what_is_unasked_has_a_name() {
    assert!(Violation::Unasked.to_string().contains("nothing was asked for"));
}
