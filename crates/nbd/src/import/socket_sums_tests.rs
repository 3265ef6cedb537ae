//! What two sockets with sums do when one of them ends, stops, or is not understood.

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::tests::{come_second, send_what_goes};
use super::{IoTable, Socket};
use crate::error::Violation;
use crate::protection::Protection;
use crate::records::StreamError::{self, System};
use crate::records::{Heard, Records};
use crate::sums::{RecordReader, RecordWriter, StreamSum};

const LONG: Duration = Duration::from_secs(120);

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

fn socket(stream: TcpStream) -> Socket {
    let sum = StreamSum::default();
    let records = Records::summed(RecordReader::new(sum), RecordWriter::new(sum));
    Socket::new(stream.into(), Some(records), LONG).unwrap()
}

fn pair() -> (Socket, Socket) {
    let (ours, theirs) = streams();
    (socket(ours), socket(theirs))
}

/// Does something until the socket is not the reason why it does not.
fn tried<T, E: Into<StreamError>>(mut call: impl FnMut() -> Result<T, E>) -> Result<T, StreamError> {
    let end = Instant::now() + LONG;
    loop {
        match call().map_err(Into::into) {
            Err(System(libc::EAGAIN)) => assert!(Instant::now() < end, "nothing comes or goes"),
            done => return done,
        }
        std::thread::yield_now();
    }
}

/// Receives to the end: what came, and the error that it ends with.
fn received(socket: &Socket) -> (Vec<u8>, Result<usize, StreamError>) {
    let (mut came, mut buffer) = (Vec::new(), vec![0; 5000]);
    loop {
        match tried(|| socket.receive_own(&mut buffer)) {
            Ok(bytes @ 1..) => came.extend_from_slice(&buffer[..bytes]),
            end => return (came, end),
        }
    }
}

fn send(socket: &Socket, mut bytes: &[u8], sizes: &[usize]) {
    for size in sizes.iter().cycle() {
        let part = &bytes[..bytes.len().min(*size)];
        let sent = tried(|| socket.send_own(part)).unwrap();
        bytes = &bytes[sent..];
        if bytes.is_empty() {
            break;
        }
    }
    tried(|| if socket.flush()? { Ok(()) } else { Err(libc::EAGAIN) }).unwrap();
    assert!(!socket.has_unsent());
}

/// A record as the first one of a connection, by hand.
fn record(bytes: &[u8]) -> Vec<u8> {
    let mut writer = RecordWriter::new(StreamSum::default());
    let gather = &mut |into: &mut [u8]| {
        into.copy_from_slice(bytes);
        true
    };
    writer.seal(bytes.len(), gather).unwrap();
    writer.unsent().to_vec()
}

/// Much more than any buffer holds, in calls of all sizes.
#[test]
fn what_is_taken_arrives_in_order_and_each_direction_ends_by_itself() {
    let (client, server) = pair();
    assert_eq!((client.protection(), server.listen()), (Protection::Sums, Heard::Nothing));
    let bytes: Vec<u8> = (0..8_000_000_u32).map(|at| (at / 11) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            send(&client, &bytes, &[1, 40, 4096, 16 << 10, (16 << 10) + 1, 300_000]);
            client.finish();
        });
        let (came, end) = received(&server);
        assert!(came == bytes && end == Ok(0));
    });
    assert_eq!(server.listen(), Heard::End);
    send(&server, b"reply", &[5]);
    assert_eq!(tried(|| client.receive_own(&mut [0; 3])), Ok(3));
    assert_eq!(client.listen(), Heard::Bytes);
    assert_eq!(tried(|| client.receive_own(&mut [0; 3])), Ok(2));
    assert_eq!(client.listen(), Heard::Nothing);
}

#[test]
fn an_end_in_the_middle_of_a_record_is_no_orderly_one() {
    let whole = record(b"whole");
    for left in 1..whole.len() {
        let (ours, mut raw) = streams();
        let ours = socket(ours);
        raw.write_all(&whole[..left]).unwrap();
        raw.shutdown(Shutdown::Write).unwrap();
        assert_eq!(received(&ours), (Vec::new(), Err(System(libc::ECONNRESET))), "after {left} bytes");
        assert_eq!(ours.listen(), Heard::End);
    }
}

/// What has come of a record is nothing yet.
#[test]
fn only_whole_records_are_something_to_receive() {
    let (ours, mut raw) = streams();
    let ours = socket(ours);
    let whole = record(b"whole");
    let (part, rest) = whole.split_at(10);
    raw.write_all(part).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(ours.listen(), Heard::Nothing);
    assert_eq!(ours.receive_own(&mut [0; 9]), Err(System(libc::EAGAIN)));
    raw.write_all(rest).unwrap();
    assert_eq!(tried(|| ours.receive_own(&mut [0; 9])), Ok(5));
}

#[test]
fn a_changed_record_is_never_received_and_its_sender_is_told() {
    let (ours, mut raw) = streams();
    let theirs = socket(raw.try_clone().unwrap());
    let ours = socket(ours);
    let mut changed = record(b"bytes");
    changed[9] ^= 4;
    raw.write_all(&changed).unwrap();
    let (came, end) = received(&ours);
    assert!(came.is_empty() && matches!(end, Err(StreamError::Violation(Violation::Sum { .. }))), "{end:?}");
    // Again and again, also to whoever did not see the first time.
    assert_eq!(received(&ours), (came, end));
    assert_eq!(ours.listen(), Heard::Failed(end.unwrap_err()));
    ours.finish();
    assert_eq!(received(&theirs), (Vec::new(), Err(Violation::ChangedThere.into())));
}

/// What could not be copied is not sealed.
#[test]
fn memory_that_has_gone_is_not_sent_as_zeros() {
    let (client, server) = pair();
    send_what_goes(&client);
    client.finish();
    assert_eq!(received(&server), (vec![1; 16 << 10], Ok(0)));
}

/// The bytes that are summed are those that are sent, whatever is written to where they come from.
#[test]
fn what_changes_while_it_is_sent_is_right_on_the_other_side() {
    let (client, server) = pair();
    let bytes: Vec<std::sync::atomic::AtomicU64> = (0..32 << 10).map(|_| 0.into()).collect();
    let done = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1.. {
                bytes.iter().for_each(|word| word.store(value, relaxed));
                if done.load(relaxed) {
                    break;
                }
            }
        });
        let receiving = scope.spawn(|| received(&server));
        let mut table = IoTable::with_room(1);
        // By address, as a guest's memory.
        table.push(bytes.as_ptr().cast_mut().cast(), bytes.len() * 8);
        let mut sent = 0;
        while sent < 50 << 20 {
            // SAFETY: it is kept.
            sent += tried(|| unsafe { client.send(&mut table, || false) }).unwrap();
        }
        done.store(true, relaxed);
        send(&client, b"end", &[3]);
        client.finish();
        let (came, end) = receiving.join().unwrap();
        assert_eq!((came.len(), end), (sent + 3, Ok(0)));
    });
}

/// Each half asks without waiting for the other.
#[test]
fn whoever_comes_second_comes_again() {
    let (socket, _peer) = pair();
    come_second(&socket);
}
