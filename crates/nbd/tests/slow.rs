//! Peers that are not silent but slow, a byte at a time: clients of our exports in their handshake, their requests, the data of their writes and
//! the replies that they read; servers of our imports in their handshake and in their replies.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_nbd::NbdError;
use ioplane_nbd::export::{ConnectionEnd, ExportOptions, Handshakes};
use ioplane_nbd::import::{AtStart, ConnectionState, Import, ImportOptions, Loss};
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::Request;
use ioplane_storage::{Fault, MemoryBacking};
use rig::Rig;
use scripted::{is_connected, until};
use support::{Client, PATIENCE, Server, hello, pattern};

const SIZE: u64 = 64 << 20;
/// Between two bytes.
const DRIP: Duration = Duration::from_millis(20);

fn server(options: ExportOptions) -> Server {
    Server::with(MemoryBacking::new(SIZE).unwrap(), options, Notify::Notified)
}

/// Writes byte by byte until that fails, or `stop`; how many it has written.
fn drip(mut to: impl Write, bytes: &[u8], every: Duration, stop: &AtomicBool) -> usize {
    for (sent, byte) in bytes.iter().enumerate() {
        if stop.load(Ordering::Relaxed) || to.write_all(&[*byte]).is_err() {
            return sent;
        }
        std::thread::sleep(every);
    }
    bytes.len()
}

/// The time of a handshake is that of all of it, not of the silence between two bytes.
#[test]
fn a_handshake_that_drips_has_its_place_for_its_time_and_no_longer() {
    const LIMIT: Duration = Duration::from_millis(100);
    let server = server(ExportOptions::default());
    let handshakes = Handshakes::new(1, LIMIT);
    server.tokio.block_on(async {
        let (theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let ours = tokio::net::UnixStream::from_std(ours).unwrap();
        let (hello, stop) = (hello(), Arc::<AtomicBool>::default());
        let all = hello.len();
        assert!(DRIP * all as u32 > 4 * LIMIT, "it would end in time");
        let stopped = stop.clone();
        let dripping = std::thread::spawn(move || drip(theirs, &hello, DRIP, &stopped));
        let (_other, second) = tokio::net::UnixStream::pair().unwrap();
        let begun = Instant::now();
        let (first, second) = tokio::join!(handshakes.accept(ours, &server.published), async {
            handshakes.accept(second, &server.published).await
        });
        assert!(matches!(first, Err(NbdError::Slow(LIMIT))), "{first:?}");
        assert!(matches!(second, Err(NbdError::Handshakes(1))), "{second:?}");
        assert!(begun.elapsed() >= LIMIT);
        // It was sent away in the middle of what it had to say, and its place is free.
        let (third, ours) = tokio::net::UnixStream::pair().unwrap();
        drop(third);
        assert!(!matches!(handshakes.accept(ours, &server.published).await, Err(NbdError::Handshakes(_))));
        let sent = dripping.join().unwrap();
        assert!(sent < all, "all {all} bytes were taken");
    });
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// Requests and the data of writes come a byte at a time, on every place but one: whoever has that is served as ever, no core spins, and what is
/// held for the slow ones is what they have begun to send.
#[test]
fn requests_and_data_that_drip_hold_up_nobody_else() {
    const PLACES: u16 = 16;
    const LARGE: u32 = 2 << 20;
    let options = ExportOptions { connections: PLACES, ..ExportOptions::default() };
    let all_their_memory = usize::from(PLACES) * options.memory as usize;
    let mut server = server(options);
    let (mut other, _) = server.connect(true);
    let mut slow: Vec<Client> = (1..PLACES).map(|_| server.connect(true).0).collect();
    let before = resident();
    let dripping: Vec<_> = (0..)
        .zip(&mut slow)
        .map(|(number, client)| {
            // The first of them sends a small write to its end, the others the beginning of a large one.
            let length = if number == 0 { 512 } else { LARGE };
            let offset = number * u64::from(LARGE);
            let mut bytes = client.encode(NBD_CMD_WRITE, 0, offset, length);
            bytes.extend(pattern(offset, 512, 1));
            let stream = client.stream.try_clone().unwrap();
            std::thread::spawn(move || {
                // The header at the pace of a slow one, the data at that of a test.
                drip(&stream, &bytes[..28], DRIP, &AtomicBool::new(false))
                    + drip(&stream, &bytes[28..], Duration::from_millis(2), &AtomicBool::new(false))
            })
        })
        .collect();
    let steps = server.core.read().steps;
    let (begun, mut served) = (Instant::now(), 0);
    while dripping.iter().any(|one| !one.is_finished()) {
        assert!(begun.elapsed() < PATIENCE);
        assert_eq!(other.write(SIZE - 4096, &pattern(0, 4096, 2)).error, 0);
        assert_eq!(other.read(SIZE - 4096, 4096).data, pattern(0, 4096, 2));
        served += 2;
        std::thread::sleep(Duration::from_millis(1));
    }
    let (steps, held) = (server.core.read().steps - steps, resident().saturating_sub(before));
    for one in dripping {
        assert_eq!(one.join().unwrap(), 28 + 512);
    }
    // One for each byte that comes by itself, and a few for each request.
    let bytes = u64::from(PLACES) * (28 + 512);
    assert!(steps < 4 * (bytes + served), "{steps} polls for {bytes} bytes and {served} requests");
    assert!(held < all_their_memory / 2, "{held} bytes are held for {PLACES} connections");
    // What has come whole is carried out.
    assert_eq!(slow[0].reply().unwrap().error, 0);
    assert_eq!(other.read(0, 512).data, pattern(0, 512, 1));
    // The rest of the others never comes: nothing of it is in effect, each ends as cut off, and its place is free.
    drop(slow.split_off(1));
    for _ in 2..PLACES {
        assert_eq!(server.ended().end, ConnectionEnd::CutOff);
    }
    assert_eq!(other.read(2 * u64::from(LARGE), 512).data, [0; 512]);
    let (mut next, _) = server.connect(true);
    assert_eq!(next.read(0, 512).error, 0);
}

/// A client that reads its replies a byte at a time gets all of them, and nobody waits for it.
#[test]
fn replies_that_are_read_a_byte_at_a_time() {
    let mut server = server(ExportOptions::default());
    let (mut other, _) = server.connect(true);
    let data = pattern(0, 1 << 20, 3);
    assert_eq!(other.write(0, &data).error, 0);
    let (slow, queue) = server.connect(false);
    let mut stream = slow.stream.try_clone().unwrap();
    const READS: u64 = 4;
    for cookie in 0..READS {
        let request = Request { flags: 0, command: NBD_CMD_READ, cookie, offset: 0, length: 1 << 20 };
        stream.write_all(&request.encode()).unwrap();
    }
    let mut byte = [0];
    let mut came = Vec::with_capacity(READS as usize * ((1 << 20) + 16));
    let steps = server.core.read().steps;
    for _ in 0..40 {
        stream.read_exact(&mut byte).unwrap();
        came.push(byte[0]);
        assert_eq!(other.read(4096, 4096).data, data[4096..8192]);
        std::thread::sleep(DRIP);
    }
    let steps = server.core.read().steps - steps;
    assert!(steps < 1000, "{steps} polls while a client reads 40 bytes");
    while came.len() < came.capacity() {
        stream.read_exact(&mut byte).unwrap();
        came.push(byte[0]);
    }
    let mut replies = came.chunks_exact((1 << 20) + 16);
    assert!(replies.all(|reply| reply[4..8] == [0; 4] && reply[16..] == data), "a reply has other bytes");
    assert_eq!(server.running().device().meter(queue).unwrap().read().requests, READS);
    drop(slow);
    drop(stream);
    assert_eq!(server.ended().end, ConnectionEnd::Closed);
}

/// By TCP it does not take forever: who frees no more than a byte of its window at a time acknowledges nothing.
#[test]
fn a_tcp_client_that_reads_a_byte_at_a_time_is_lost_by_name() {
    let options = ExportOptions { silence: Duration::from_secs(3), ..ExportOptions::default() };
    let mut server = server(options);
    let (mut client, _) = server.connect_by_tcp();
    for cookie in 0..64 {
        let request = Request { flags: 0, command: NBD_CMD_READ, cookie, offset: 0, length: 2 << 20 };
        client.write_all(&request.encode()).unwrap();
    }
    let stop = Arc::<AtomicBool>::default();
    let stopped = stop.clone();
    let reader = std::thread::spawn(move || {
        let mut taken = 0;
        while !stopped.load(Ordering::Relaxed) && matches!(client.read(&mut [0]), Ok(1)) {
            taken += 1;
            std::thread::sleep(DRIP);
        }
        taken
    });
    assert_eq!(server.ended().end, ConnectionEnd::Lost(libc::ETIMEDOUT));
    stop.store(true, Ordering::Relaxed);
    assert!(reader.join().unwrap() > 0, "it has read nothing");
    let (mut next, _) = server.connect(true);
    assert_eq!(next.read(0, 512).error, 0);
}

fn address(path: &std::path::Path) -> ImportOptions {
    ImportOptions {
        connect_timeout: Duration::from_millis(150),
        retry: (Duration::from_millis(5), Duration::from_millis(20)),
        ..ImportOptions::new(format!("nbd+unix:///x?socket={}", path.display()).parse().unwrap())
    }
}

/// A server whose greeting comes a byte at a time.
#[test]
fn a_server_whose_handshake_drips_is_given_up_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (stop, connections) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (stopped, counted) = (stop.clone(), connections.clone());
    let dripping = std::thread::spawn(move || {
        let mut most = 0;
        for stream in listener.incoming() {
            if stopped.load(Ordering::Relaxed) {
                return most;
            }
            counted.fetch_add(1, Ordering::Relaxed);
            most = most.max(drip(
                stream.unwrap(),
                &[&b"NBDMAGICIHAVEOPT\0\x03"[..], &[0; 1 << 10]].concat(),
                DRIP,
                &stopped,
            ));
        }
        most
    });
    let options = address(&path);
    let limit = options.connect_timeout;
    let begun = Instant::now();
    let refused =
        scripted::runtime().block_on(Import::open(ImportOptions { at_start: AtStart::Refuse, ..options }));
    assert!(matches!(refused, Err(NbdError::Slow(time)) if time == limit), "{refused:?}");
    assert!(begun.elapsed() >= limit);
    // One that waits for it says why, tries again, and its requests fail when they have waited for as long as they may.
    let opened = Import::open(ImportOptions {
        at_start: AtStart::Wait,
        give_up_after: Some(Duration::from_millis(600)),
        ..address(&path)
    });
    let waiting = scripted::runtime().block_on(async {
        tokio::time::timeout(Duration::from_millis(900), opened).await.map(|opened| opened.map(drop))
    });
    assert!(!matches!(waiting, Ok(Ok(()))), "it took a server for one that never said which it is");
    assert!(connections.load(Ordering::Relaxed) >= 3);
    stop.store(true, Ordering::Relaxed);
    let _ = UnixStream::connect(&path);
    let sent = dripping.join().unwrap();
    assert!(sent > 1 && sent < 60, "{sent} bytes were read of one greeting");
}

/// A server whose replies come a byte at a time makes no headway: its connection is lost by that name, and the request is sent again.
#[test]
fn a_server_whose_replies_drip_is_lost_by_name_and_the_requests_are_sent_again() {
    let disk = scripted::Disk::new(1 << 20);
    disk.bytes.lock().unwrap().fill(7);
    let served = disk.clone();
    let server = scripted::Server::start(scripted::Terms::default(), move |mut session| {
        if session.number > 0 {
            return scripted::obey(session, &served);
        }
        while let Some(asked) = session.next() {
            let data = served.carry_out(&asked);
            let reply = session.reply(&asked, &data);
            drip(&session.stream, &reply, DRIP, &AtomicBool::new(false));
        }
    });
    let dead_after = Duration::from_millis(300);
    // Long enough to be looked at in between.
    let retry = (Duration::from_millis(400), Duration::from_millis(500));
    let import = scripted::import(ImportOptions { dead_after, retry, ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    let begun = Instant::now();
    assert_eq!(rig.read(512, 4096), Ok(vec![7; 4096]));
    assert!(
        begun.elapsed() >= dead_after,
        "a reply of 4096 bytes at 20 ms each was waited for {:?}",
        begun.elapsed()
    );
    let status = import.status();
    let one = &status.connections[0];
    assert_eq!((one.losses, one.replays, one.device_errors, one.in_flight), (1, 1, 0, 0), "{one:?}");
    assert_eq!(server.connections(), 2);
}

/// One that goes on doing so: the status says what is wrong, no more is in flight than was asked for, and the guest waits for as long as it may.
#[test]
fn a_server_that_always_drips_is_named_while_it_is_tried_again() {
    let disk = scripted::Disk::new(1 << 20);
    let server = scripted::Server::start(scripted::Terms::default(), move |mut session| {
        while let Some(asked) = session.next() {
            let reply = session.reply(&asked, &disk.carry_out(&asked));
            drip(&session.stream, &reply, DRIP, &AtomicBool::new(false));
        }
    });
    let dead_after = Duration::from_millis(150);
    let retry = (Duration::from_millis(50), Duration::from_millis(100));
    let import = scripted::import(ImportOptions { dead_after, retry, ..server.options() });
    let mut rig = Rig::new(&*import, 4);
    let into = [ioplane_memory::GuestRange { gpa: 0, len: 4096 }];
    let op = ioplane_storage::Op::Read { offset: 0, into: &into };
    for tag in 0..4 {
        assert_eq!(rig.submit(&op, ioplane_storage::Tag(tag)), ioplane_storage::Submitted::Pending);
    }
    rig.push();
    let end = Instant::now() + Duration::from_secs(20);
    let mut named = false;
    while import.status().connections[0].losses < 3 || !named {
        assert!(Instant::now() < end, "{:?}", import.status());
        let ended = rig.reap(&mut |_, outcome| assert_eq!(outcome, Err(Fault::Io(libc::EIO))));
        assert_eq!(ended, 0, "a request has ended");
        rig.push();
        rig.readable(5);
        let one = import.status().connections[0].clone();
        assert!(one.in_flight <= 4, "{one:?}");
        if let ConnectionState::Reconnecting { loss, .. } = &one.state {
            assert_eq!(*loss, Loss::Silent(dead_after));
            assert_eq!(loss.to_string(), "no reply for 150 ms");
            named = true;
        }
    }
    drop(rig);
    until(&import, "closed", |status| status.connections.iter().all(|one| !is_connected(one)));
}
