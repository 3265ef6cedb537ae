//! Exports on a core, over socket pairs: what a client may ask, what it may not, and what happens to its connection.

mod support;

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_device::QueueSet;
use ioplane_nbd::export::{ConnectionEnd, Export, ExportOptions};
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::Request;
use ioplane_nbd::{NbdError, Violation};
use ioplane_scheduler::{LimitSet, LimitUnit, RateBucket, RateLimit};
use ioplane_storage::filter::{Delay, Fail, Failure, OpKind, Stall, When};
use ioplane_storage::{Backing, MemoryBacking};
use support::*;

const SIZE: u64 = 64 << 20;

fn memory() -> Arc<MemoryBacking> {
    MemoryBacking::new(SIZE).unwrap()
}

#[test]
fn what_is_written_is_read_again_in_every_form() {
    for notify in [Notify::Notified, Notify::Polled] {
        for structured in [false, true] {
            let mut server = Server::with(memory(), ExportOptions::default(), notify);
            let (mut client, _) = server.connect(structured);
            assert_eq!(client.connected.info.bytes, SIZE);
            assert_eq!(client.connected.structured, structured);
            // A block, what is sliced, what is received directly, and the longest.
            for (offset, length) in [(0, 512), (4096, 4096), (1 << 20, 300 << 10), (8 << 20, 2 << 20)] {
                let data = pattern(offset, length, 7);
                assert_eq!(client.write(offset, &data).error, 0);
                let reply = client.read(offset, length as u32);
                assert!(reply.error == 0 && reply.data == data, "{length} bytes at {offset}");
            }
            assert_eq!(client.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
            let data = pattern(0, 4096, 9);
            assert_eq!(client.call(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 4096, &data).error, 0);
            assert_eq!(client.call(NBD_CMD_WRITE_ZEROES, 0, 4096, 4096, &[]).error, 0);
            let reply = client.read(0, 8192);
            assert!(reply.data[..4096] == data && reply.data[4096..] == [0; 4096]);
            assert_eq!(client.call(NBD_CMD_TRIM, NBD_CMD_FLAG_FUA, 8 << 20, 32 << 20, &[]).error, 0);
            assert_eq!(client.read(0, 0).error, 0);
            client.disconnect();
            assert_eq!(server.ended().end, ConnectionEnd::Disconnected);
            assert_eq!(server.running().device().connections(), 0);
        }
    }
}

#[test]
fn what_may_not_be_asked_is_refused_and_the_connection_goes_on() {
    for structured in [false, true] {
        let mut server = Server::new(memory());
        let (mut client, _) = server.connect(structured);
        let mut error = |command, flags, offset, length, data: &[u8]| {
            let reply = client.call(command, flags, offset, length, data);
            assert!(reply.data.is_empty());
            assert_eq!(structured && reply.error != 0, !reply.message.is_empty());
            reply.error
        };
        assert_eq!(error(NBD_CMD_READ, 0, SIZE, 512, &[]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_READ, 0, 0, 3 << 20, &[]), NBD_EOVERFLOW);
        assert_eq!(error(NBD_CMD_READ, 0, 7, 512, &[]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_WRITE, 0, SIZE, 512, &[1; 512]), NBD_ENOSPC);
        assert_eq!(error(NBD_CMD_WRITE, 0, 0, 3 << 20, &vec![1; 3 << 20]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_WRITE, 0, 0, 100, &[1; 100]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_CACHE, 0, 0, 512, &[]), NBD_EINVAL);
        assert_eq!(error(999, 0, 0, 512, &[]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_READ, 0x8000, 0, 512, &[]), NBD_EINVAL);
        assert_eq!(error(NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, 0, 512, &[]), NBD_EINVAL);
        // Nothing of it was written, and the stream is in step.
        assert_eq!(client.read(0, 512).data, [0; 512]);
        server.running().device().meter(0).unwrap();
    }
}

#[test]
fn a_read_only_export_is_not_written() {
    let options = ExportOptions { read_only: true, ..ExportOptions::default() };
    let mut server = Server::with(memory(), options, Notify::Notified);
    let (mut client, _) = server.connect(true);
    assert!(client.connected.info.read_only());
    assert!(
        !client.connected.info.has(NBD_FLAG_SEND_TRIM)
            && !client.connected.info.has(NBD_FLAG_SEND_WRITE_ZEROES)
    );
    assert_eq!(client.write(0, &[1; 512]).error, NBD_EPERM);
    assert_eq!(client.call(NBD_CMD_TRIM, 0, 0, 512, &[]).error, NBD_EPERM);
    assert_eq!(client.read(0, 512).data, [0; 512]);
    assert_eq!(client.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
}

/// Whoever writes failures down is asked first; others go on meanwhile, and so does the export when nobody does any more.
#[test]
fn a_failed_flush_is_answered_once_that_is_written_down() {
    for notify in [Notify::Notified, Notify::Polled] {
        let fail = Failure { op: OpKind::Flush, when: When::From(1), errno: libc::EIO, late: true };
        let mut server = Server::with(Fail::new(memory(), vec![fail]), ExportOptions::default(), notify);
        let failed = server.running().device().failed_flushes().clone();
        failed.begin_at(4);
        let (mut client, queue) = server.connect(true);
        assert_eq!(client.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, NBD_EIO);
        assert_eq!(failed.count(), 5, "it counts, whoever knows");
        failed.begin_at(5);
        let recorder = failed.recorder();
        let told = async || tokio::time::timeout(PATIENCE, recorder.next()).await.expect("nobody is told");
        // Of a write, the flush behind it.
        let flush = client.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
        assert_eq!(server.tokio.block_on(told()), 6);
        let write = client.send(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 512, &[7; 512]);
        let end = Instant::now() + PATIENCE;
        while recorder.count() < 7 {
            assert!(Instant::now() < end, "the second failure is not told");
            std::thread::yield_now();
        }
        for _ in 0..20 {
            assert_eq!(client.read(0, 512).error, 0, "the next reply is that of the read");
        }
        recorder.recorded(6);
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (flush, NBD_EIO));
        assert_eq!(client.read(0, 512).error, 0);
        recorder.recorded(7);
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (write, NBD_EIO));
        // A drain waits for the record, and for nothing when nobody is there to write it.
        let last = client.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
        assert_eq!(server.tokio.block_on(told()), 8);
        drop(recorder);
        server.stop(queue);
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (last, NBD_EIO));
    }
}

/// A flush that succeeds later must not be taken to cover what an earlier one has lost: a client that goes by the instance comes back, and is told of another one.
#[test]
fn who_was_told_of_an_instance_is_served_no_more_once_a_flush_has_failed() {
    for notify in [Notify::Notified, Notify::Polled] {
        let fail = Failure { op: OpKind::Flush, when: When::Nth(1), errno: libc::EIO, late: true };
        let disk: Arc<dyn Backing> = Fail::new(memory(), vec![fail]);
        let mut server = Server::with(disk, ExportOptions::default(), notify);
        let failed = server.running().device().failed_flushes().clone();
        let recorder = failed.recorder();
        let [(mut one, _), (mut other, _), (mut late, _)] =
            [Some(0), Some(0), Some(0)].map(|told| server.connect_told(true, told));
        let (mut foreign, _) = server.connect(true);
        let lost = one.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
        let told = server.tokio.block_on(async { tokio::time::timeout(PATIENCE, recorder.next()).await });
        assert_eq!(told.expect("nobody is told"), 1);
        // These succeed below. What is written after the failure is not read, or flushed with no success.
        let again = one.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
        // The other connection may have ended by now.
        let mut asked = other.encode(NBD_CMD_FLUSH, 0, 0, 0);
        asked.extend(other.encode(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 512));
        asked.extend([7; 512]);
        let _ = other.stream.write_all(&asked);
        // For a client to which the instance says nothing it is the disk's word that counts.
        assert_eq!(foreign.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        // Who has been told of the failure goes on meanwhile.
        let (mut new, _) = server.connect_told(true, Some(1));
        assert_eq!(new.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        recorder.recorded(1);
        let reply = one.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (lost, NBD_EIO));
        let flushed =
            |client: &mut Client| std::iter::from_fn(|| client.reply()).any(|reply| reply.error == 0);
        assert!(!flushed(&mut one) && one.in_flight.contains_key(&again), "a flush after the failed one");
        assert!(!flushed(&mut other), "a flush of another connection");
        // It has asked for nothing, and sleeps.
        assert!(late.reply().is_none());
        for _ in 0..3 {
            assert_eq!(server.ended().end, ConnectionEnd::FlushFailed);
        }
        assert_eq!(server.running().device().ended().try_next(), None);
        assert_eq!(new.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        assert_eq!(foreign.read(0, 512).error, 0);
        // One that was told of less than there was when it was started.
        let (mut old, _) = server.connect_told(true, Some(0));
        assert!(old.reply().is_none());
        assert_eq!(server.ended().end, ConnectionEnd::FlushFailed);
    }
}

/// What was in flight when another connection's flush fails ends without success, and is answered.
#[test]
fn a_flush_that_succeeds_beside_one_that_fails_is_refused() {
    let fail = Failure { op: OpKind::Flush, when: When::Nth(2), errno: libc::EIO, late: false };
    let stalled = Stall::new(memory());
    stalled.stall();
    let disk = Fail::new(stalled.clone(), vec![fail]);
    let mut server = Server::new(disk.clone());
    let failed = server.running().device().failed_flushes().clone();
    let recorder = failed.recorder();
    let [(mut one, _), (mut other, _)] = [(); 2].map(|()| server.connect_told(true, Some(0)));
    let slow = one.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
    let end = Instant::now() + PATIENCE;
    while disk.seen(OpKind::Flush) == 0 {
        assert!(Instant::now() < end, "it is not in flight");
        std::thread::yield_now();
    }
    let lost = other.send(NBD_CMD_FLUSH, 0, 0, 0, &[]);
    let told = server.tokio.block_on(async { tokio::time::timeout(PATIENCE, recorder.next()).await });
    assert_eq!(told.expect("nobody is told"), 1);
    stalled.release();
    recorder.recorded(1);
    for (client, cookie) in [(&mut one, slow), (&mut other, lost)] {
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (cookie, NBD_EIO));
        assert!(client.reply().is_none());
    }
    assert_eq!(failed.count(), 1, "it counts once");
}

/// As of any disk of which nothing is known.
#[test]
fn block_status_is_one_extent_where_holes_are_not_told() {
    let options = ExportOptions { holes: false, ..ExportOptions::default() };
    let mut server = Server::with(memory(), options, Notify::Notified);
    let (mut client, _) = server.connect(true);
    let context = client.connected.contexts[0].id;
    let reply = client.call(NBD_CMD_BLOCK_STATUS, 0, 1 << 20, 32 << 20, &[]);
    assert_eq!(reply.error, 0);
    let (found, extent) = reply.extents[0];
    assert_eq!((found, extent.length, extent.flags, reply.extents.len()), (context, 32 << 20, 0, 1));
    // Not without the context.
    let (mut plain, _) = server.connect(false);
    assert_eq!(plain.call(NBD_CMD_BLOCK_STATUS, 0, 0, 512, &[]).error, NBD_EINVAL);
}

#[test]
fn many_requests_at_a_time_in_one_packet_and_byte_by_byte() {
    let mut server = Server::with(
        Delay::new(memory(), Duration::from_millis(1)),
        ExportOptions::default(),
        Notify::Notified,
    );
    let (mut client, _) = server.connect(true);
    // More than there are slots, in one piece.
    let mut all = Vec::new();
    for number in 0..200_u64 {
        let data = pattern(number * 4096, 4096, 3);
        all.extend(client.encode(NBD_CMD_WRITE, 0, number * 4096, 4096));
        all.extend(data);
    }
    let mut stream = client.stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || stream.write_all(&all).unwrap());
    for _ in 0..200 {
        assert_eq!(client.reply().unwrap().error, 0);
    }
    writer.join().unwrap();
    let mut bytes = client.encode(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 1024);
    bytes.extend(pattern(0, 1024, 4));
    for byte in bytes {
        client.stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(client.reply().unwrap().error, 0);
    let data = client.read(0, 200 * 4096).data;
    assert!(data[..1024] == pattern(0, 1024, 4) && data[1024..] == pattern(1024, 200 * 4096 - 1024, 3));
}

#[test]
fn what_the_disk_cannot_do_is_said() {
    let fail = |op, when, errno| Failure { op, when, errno, late: true };
    let failures = [
        fail(OpKind::Read, When::Nth(1), libc::EIO),
        fail(OpKind::Write, When::Nth(1), libc::ENOSPC),
        fail(OpKind::Flush, When::Nth(2), libc::EIO),
    ];
    let mut server = Server::new(Fail::new(memory(), failures.into()));
    let (mut client, _) = server.connect(true);
    assert_eq!(client.read(0, 4096).error, NBD_EIO);
    assert_eq!(client.write(0, &[1; 512]).error, NBD_ENOSPC);
    assert_eq!(client.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
    // The write lands, its flush does not: so the write has failed.
    assert_eq!(client.call(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 512, &[1; 512]).error, NBD_EIO);
    assert_eq!(client.call(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 512, &[1; 512]).error, 0);
}

#[test]
fn a_write_with_fua_is_answered_after_its_flush() {
    let disk = Stall::new(memory());
    let fail = Failure { op: OpKind::Flush, when: When::Nth(1), errno: libc::EIO, late: false };
    let mut server = Server::new(Fail::new(disk, vec![fail]));
    let (mut client, _) = server.connect(false);
    assert_eq!(client.write(0, &[1; 512]).error, 0);
    assert_eq!(client.call(NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA, 0, 512, &[]).error, NBD_EIO);
}

#[test]
fn a_client_that_reads_no_replies_is_read_no_more_and_others_go_on() {
    let mut server = Server::new(memory());
    let (mut slow, _) = server.connect(true);
    let (mut other, _) = server.connect(true);
    let request = slow.encode(NBD_CMD_READ, 0, 0, 1 << 20);
    slow.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut sent = 0;
    // The socket's buffers take some thousands of them, and then no more.
    let stopped = loop {
        match slow.stream.write_all(&request) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 100_000, "an endless number of requests is taken");
    };
    assert_eq!(stopped.kind(), std::io::ErrorKind::WouldBlock);
    for _ in 0..50 {
        assert_eq!(other.read(0, 4096).error, 0);
    }
    // Taken requests have slots: what was answered and not read is in the socket, or in memory, both of which are bounded.
    let meter = server.running().device().meter(0).unwrap().clone();
    assert!(meter.read().requests < 100, "{} requests were answered", meter.read().requests);
    drop(slow);
    assert!(matches!(server.ended().end, ConnectionEnd::Lost(_) | ConnectionEnd::CutOff));
}

/// How the connection ends of a client that does that.
fn end_of(act: impl FnOnce(&mut Client)) -> ConnectionEnd {
    let mut server = Server::new(memory());
    let (mut other, _) = server.connect(true);
    let (mut client, queue) = server.connect(true);
    act(&mut client);
    let ended = server.ended();
    assert_eq!(ended.queue, queue);
    // It is its own fault and nobody else's.
    assert_eq!(other.write(0, &[1; 512]).error, 0);
    let device = server.running().device();
    let counted: Vec<_> = device.ends().filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [(ended.end.name(), 1)]);
    assert_eq!(device.connections(), 1);
    // The queue is free for the next one.
    assert_eq!(server.connect(false).1, queue);
    ended.end
}

#[test]
fn connections_end_for_a_reason() {
    assert_eq!(end_of(|client| client.stream.shutdown(Shutdown::Both).unwrap()), ConnectionEnd::Closed);
    assert_eq!(
        end_of(|client| client
            .stream
            .write_all(&[0x25, 0x60])
            .and_then(|()| client.stream.shutdown(Shutdown::Write))
            .unwrap()),
        ConnectionEnd::CutOff
    );
    let write = |client: &mut Client| {
        client.send(NBD_CMD_WRITE, 0, 0, 4096, &[1; 100]);
        client.stream.shutdown(Shutdown::Write).unwrap();
    };
    assert_eq!(end_of(write), ConnectionEnd::CutOff);
    let magic = Violation::RequestMagic(0x4745_5420);
    assert_eq!(
        end_of(|client| client.stream.write_all(b"GET / HTTP/1.1\r\nHost: disk\r\n\r\n").unwrap()),
        ConnectionEnd::Violation(magic)
    );
    let huge = |client: &mut Client| {
        client.send(NBD_CMD_WRITE, 0, 0, u32::MAX, &[]);
    };
    assert_eq!(end_of(huge), ConnectionEnd::Violation(Violation::PayloadLength(u32::MAX)));
}

#[test]
fn a_client_that_closes_its_side_gets_its_replies() {
    let mut server = Server::new(Delay::new(memory(), Duration::from_millis(20)));
    let (mut client, _) = server.connect(true);
    for number in 0..8 {
        client.send(NBD_CMD_READ, 0, number * 4096, 4096, &[]);
    }
    client.stream.shutdown(Shutdown::Write).unwrap();
    for _ in 0..8 {
        assert_eq!(client.reply().unwrap().error, 0);
    }
    assert_eq!(client.reply(), None);
    assert_eq!(server.ended().end, ConnectionEnd::Closed);
}

#[test]
fn replies_are_sent_before_a_disconnect() {
    let mut server = Server::new(Delay::new(memory(), Duration::from_millis(20)));
    let (mut client, _) = server.connect(false);
    let mut all = Vec::new();
    for number in 0..8 {
        all.extend(client.encode(NBD_CMD_READ, 0, number << 20, 1 << 20));
    }
    all.extend(Request { flags: 0, command: NBD_CMD_DISC, cookie: 0, offset: 0, length: 0 }.encode());
    client.stream.write_all(&all).unwrap();
    for _ in 0..8 {
        assert_eq!(client.reply().unwrap().data.len(), 1 << 20);
    }
    assert_eq!(client.reply(), None);
    assert_eq!(server.ended().end, ConnectionEnd::Disconnected);
}

#[test]
fn a_connection_rests_while_its_export_does_and_goes_on() {
    let mut server = Server::new(Delay::new(memory(), Duration::from_millis(10)));
    let (mut client, _) = server.connect(true);
    client.write(0, &pattern(0, 8192, 1));
    let cookie = client.send(NBD_CMD_READ, 0, 0, 8192, &[]);
    // Half of a write is there when the export is brought to rest.
    let mut write = client.encode(NBD_CMD_WRITE, 0, 8192, 8192);
    write.extend(pattern(8192, 8192, 1));
    client.stream.write_all(&write[..3000]).unwrap();
    // What was taken is answered; the half of the write may have been taken or not.
    let reply = client.reply().unwrap();
    assert_eq!((reply.cookie, reply.data), (cookie, pattern(0, 8192, 1)));
    let quiescent = server.hold();
    assert_eq!(quiescent.device().connections(), 1);
    client.stream.write_all(&write[3000..]).unwrap();
    let read = client.send(NBD_CMD_READ, 0, 0, 512, &[]);
    client.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert!(std::io::Read::read(&mut client.stream, &mut [0]).is_err(), "somebody answers for one at rest");
    client.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    server.resume(quiescent);
    let replies = [client.reply().unwrap(), client.reply().unwrap()];
    assert!(replies.iter().all(|reply| reply.error == 0) && replies.iter().any(|reply| reply.cookie == read));
    assert_eq!(client.read(0, 16384).data, pattern(0, 16384, 1));
}

#[test]
fn a_client_that_reads_nothing_does_not_keep_its_export_from_resting() {
    let mut server = Server::new(memory());
    let (mut client, _) = server.connect(true);
    for _ in 0..16 {
        client.send(NBD_CMD_READ, 0, 0, 1 << 20, &[]);
    }
    let quiescent = server.hold();
    server.resume(quiescent);
    for _ in 0..16 {
        assert_eq!(client.reply().unwrap().data.len(), 1 << 20);
    }
}

#[test]
fn what_was_in_flight_when_an_export_was_suspended_is_done_again() {
    let disk = Stall::new(memory());
    let mut server = Server::new(disk.clone());
    let (mut client, queue) = server.connect(true);
    disk.stall();
    let data = pattern(0, 1 << 20, 5);
    client.send(NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 1 << 20, &data);
    let meter = server.running().device().meter(queue).unwrap().clone();
    let queues = QueueSet::from([queue]);
    // Until the write has come whole it is not in flight, and nothing would be done again.
    let deadline = Instant::now() + PATIENCE;
    loop {
        server.running().suspend(&queues);
        assert!(server.running().wait_stopped(&queues, deadline));
        if meter.read().replayed > 0 {
            break;
        }
        server.start(queue);
    }
    disk.release();
    server.start(queue);
    assert_eq!(client.reply().unwrap().error, 0);
    assert_eq!(client.read(0, 1 << 20).data, data);
}

#[test]
fn an_owner_closes_a_connection() {
    let mut server = Server::new(memory());
    let (mut client, queue) = server.connect(true);
    assert_eq!(client.write(0, &[1; 512]).error, 0);
    server.running().device_mut().close(queue);
    server.stop(queue);
    assert_eq!(server.running().device().connections(), 0);
    assert_eq!(client.reply(), None);
    assert_eq!(server.running().device().ends().find(|(_, count)| *count > 0), Some(("by-owner", 1)));
}

#[test]
fn there_are_no_more_connections_than_places() {
    let options = ExportOptions { connections: 2, ..ExportOptions::default() };
    let mut server = Server::with(memory(), options, Notify::Notified);
    let (_first, _) = server.connect(true);
    let (second, _) = server.connect(true);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let refused = std::thread::spawn(move || {
        std::panic::catch_unwind(|| Client::shake(theirs, true))
            .err()
            .map(|why| format!("{:?}", why.downcast_ref::<String>()))
    });
    ours.set_nonblocking(true).unwrap();
    let (handshakes, published) = (&server.handshakes, &server.published);
    let accepted = server.tokio.block_on(async {
        handshakes.accept(tokio::net::UnixStream::from_std(ours).unwrap(), published).await
    });
    assert!(accepted.unwrap().is_none());
    let why = refused.join().unwrap().expect("the third one is refused");
    assert!(why.contains("all 2 connections"), "{why}");
    second.disconnect();
    server.ended();
    let (mut third, _) = server.connect(true);
    assert_eq!(third.read(0, 512).error, 0);
}

#[test]
fn slow_and_many_handshakes_hold_no_places() {
    let server = Server::new(memory());
    let handshakes = ioplane_nbd::export::Handshakes::new(1, Duration::from_millis(100));
    server.tokio.block_on(async {
        let (_silent, ours) = tokio::net::UnixStream::pair().unwrap();
        let (_other, second) = tokio::net::UnixStream::pair().unwrap();
        let (first, second) = tokio::join!(handshakes.accept(ours, &server.published), async {
            handshakes.accept(second, &server.published).await
        });
        assert!(matches!(first, Err(NbdError::Slow(_))), "{first:?}");
        assert!(matches!(second, Err(NbdError::Handshakes(1))), "{second:?}");
        // The place is free again.
        let (third, ours) = tokio::net::UnixStream::pair().unwrap();
        drop(third);
        assert!(!matches!(handshakes.accept(ours, &server.published).await, Err(NbdError::Handshakes(_))));
    });
}

#[test]
fn the_backing_is_replaced_at_a_quiescent_point() {
    let (first, second) = (memory(), memory());
    let mut server = Server::new(first);
    let (mut client, _) = server.connect(true);
    assert_eq!(client.write(0, &[1; 512]).error, 0);
    let mut quiescent = server.hold();
    let small = MemoryBacking::new(512).unwrap();
    assert!(quiescent.with(|export, proof| export.replace_backing(proof, small)).is_err());
    quiescent.with(|export, proof| export.replace_backing(proof, second)).unwrap();
    server.resume(quiescent);
    assert_eq!(client.read(0, 512).data, [0; 512]);
}

#[test]
fn options_that_cannot_be_are_refused() {
    let with = |change: fn(&mut ExportOptions)| {
        let mut options = ExportOptions::default();
        change(&mut options);
        Export::new("disk", memory() as Arc<dyn Backing>, options).is_err()
    };
    assert!(with(|options| options.connections = 0));
    assert!(with(|options| options.depth = 0));
    assert!(with(|options| options.largest = 4 << 20));
    assert!(with(|options| options.memory = 1 << 20));
    assert!(!with(|_| ()));
    let named = |name: &str| Export::new(name, memory() as Arc<dyn Backing>, ExportOptions::default());
    assert!(matches!(named("a\0b"), Err(NbdError::Name(_))));
    assert!(matches!(named(&"x".repeat(4097)), Err(NbdError::Name(_))));
}

/// Polls of the core while `act` waits and nothing can be done.
fn steps_while_resting(server: &Server) -> u64 {
    let before = server.core.read();
    std::thread::sleep(Duration::from_millis(400));
    server.core.read().steps - before.steps
}

#[test]
fn a_core_sleeps_while_clients_are_silent_or_read_nothing() {
    for notify in [Notify::Notified, Notify::Polled] {
        let stall = Stall::new(memory());
        let mut server = Server::with(stall.clone(), ExportOptions::default(), notify);
        let (mut silent, _) = server.connect(true);
        let (mut deaf, _) = server.connect(true);
        let (mut half, _) = server.connect(true);
        let (mut waiting, _) = server.connect(true);
        assert_eq!(silent.read(0, 4096).error, 0);
        half.send(NBD_CMD_WRITE, 0, 0, 4096, &[1; 100]);
        for _ in 0..64 {
            deaf.send(NBD_CMD_READ, 0, 0, 1 << 20, &[]);
        }
        // More than it takes, on a disk that hangs: what is left stays in the socket, which is readable all the time.
        stall.stall();
        for _ in 0..100 {
            waiting.send(NBD_CMD_READ, 0, 0, 4096, &[]);
        }
        // The spin of a polled core is 50 ms.
        std::thread::sleep(Duration::from_millis(200));
        let steps = steps_while_resting(&server);
        assert!(steps < 400, "{notify:?}: {steps} polls in 400 ms of silence");
        stall.release();
        for _ in 0..100 {
            assert_eq!(waiting.reply().unwrap().error, 0);
        }
        half.stream.write_all(&[1; 3996]).unwrap();
        assert_eq!(half.reply().unwrap().error, 0);
        for _ in 0..64 {
            assert_eq!(deaf.reply().unwrap().data.len(), 1 << 20);
        }
        assert_eq!(silent.read(0, 4096).error, 0);
    }
}

#[test]
fn limits_hold_requests_back() {
    let limit = RateLimit { per_second: 200.try_into().unwrap(), burst: 1 };
    let mut limits = LimitSet::default();
    limits.add(LimitUnit::Requests, Arc::new(RateBucket::new(limit)));
    let mut server = Server::new(memory());
    server.running().device_mut().set_limits(0, limits);
    let (mut client, _) = server.connect(true);
    let began = Instant::now();
    for number in 0..40 {
        client.send(NBD_CMD_READ, 0, number * 4096, 4096, &[]);
    }
    let steps = steps_while_resting(&server);
    for _ in 0..40 {
        assert_eq!(client.reply().unwrap().error, 0);
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(190), "40 requests took {took:?} at 200 a second");
    assert!(steps < 1000, "{steps} polls for 40 requests");
}

#[test]
fn the_end_of_a_connection_that_its_owner_closes_is_not_told_of_the_next_one() {
    let mut server = Server::new(memory());
    let (client, queue) = server.connect(true);
    drop(client);
    // It has ended by itself, or is about to, when the owner closes it.
    server.running().device_mut().close(queue);
    server.stop(queue);
    let (mut next, again) = server.connect(true);
    assert_eq!(again, queue);
    assert_eq!(server.running().device().ended().try_next(), None);
    assert_eq!(next.read(0, 512).error, 0);
}

#[test]
fn a_tcp_client_that_reads_nothing_for_too_long_is_lost() {
    let options = ExportOptions { silence: Duration::from_secs(3), ..ExportOptions::default() };
    let mut server = Server::with(memory(), options, Notify::Notified);
    let (mut client, _) = server.connect_by_tcp();
    // More replies than the buffers of both sockets hold.
    for cookie in 0..64 {
        let request = Request { flags: 0, command: NBD_CMD_READ, cookie, offset: 0, length: 2 << 20 };
        client.write_all(&request.encode()).unwrap();
    }
    assert_eq!(server.ended().end, ConnectionEnd::Lost(libc::ETIMEDOUT));
}
