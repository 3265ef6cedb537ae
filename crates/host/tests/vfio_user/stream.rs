//! Messages that come behind one another: each is told from the next, with what came beside it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ioplane_host::vfio_user::spec::{self, DmaMap, RegionAccess};
use ioplane_host::vfio_user::{Connection, Message};
use ioplane_testkit::vfio_user::VfioUserClient;
use zerocopy::IntoBytes;

use super::{memory, served};

const ACCESS: RegionAccess = RegionAccess { offset: 8, region: 0, count: 8 };

fn pair() -> (VfioUserClient, Connection) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    (VfioUserClient::over(theirs).unwrap(), Connection::new(ours).unwrap())
}

/// The next message: it is in the buffer or on the socket.
#[track_caller]
fn next(connection: &mut Connection) -> Message {
    let received = (0..10).find_map(|_| connection.receive().expect("a message"));
    received.expect("all of it has been sent")
}

fn number(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_ino
}

#[test]
fn descriptors_belong_to_the_message_that_they_came_with() {
    let files: Vec<OwnedFd> = (0..4).map(|_| memory(0x1000)).collect();
    // Whole messages, and how the bytes of each are sent: at once, or cut there, with the descriptors beside the first part.
    for cut in [None, Some(1), Some(16), Some(30), Some(40)] {
        for before in 0..3 {
            let (mut client, mut connection) = pair();
            let mut expected = Vec::new();
            for file in &files {
                for _ in 0..before {
                    let (id, bytes) = client.frame(spec::REGION_READ, ACCESS.as_bytes());
                    client.send(&bytes, &[]).unwrap();
                    expected.push((id, None));
                }
                let (id, bytes) =
                    client.frame(spec::DMA_MAP, DmaMap { argsz: 32, ..DmaMap::default() }.as_bytes());
                let (first, second) = bytes.split_at(cut.unwrap_or(bytes.len()));
                client.send(first, &[file.as_fd()]).unwrap();
                if !second.is_empty() {
                    client.send(second, &[]).unwrap();
                }
                expected.push((id, Some(number(file))));
                // Shorter than what is received at once.
                let (id, bytes) = client.frame(spec::DEVICE_RESET, &[]);
                client.send(&bytes, &[]).unwrap();
                expected.push((id, None));
            }
            for (id, file) in expected {
                let message = next(&mut connection);
                assert_eq!(message.header.id, id, "cut {cut:?}, {before} before");
                assert_eq!(message.header.size as usize, 16 + message.body.len());
                assert!(!message.surplus);
                let came: Vec<u64> = message.files.iter().map(number).collect();
                assert_eq!(came, Vec::from_iter(file), "cut {cut:?}, {before} before");
            }
            assert!(!connection.has_message());
            assert!(connection.receive().unwrap().is_none());
        }
    }
}

#[test]
fn what_is_here_already_is_not_waited_for() {
    let (mut client, mut connection) = pair();
    let resets: Vec<u8> = (0..2).flat_map(|_| client.frame(spec::DEVICE_RESET, &[]).1).collect();
    client.send(&resets, &[]).unwrap();
    assert!(!connection.has_message(), "nothing has been received");
    assert_eq!(next(&mut connection).header.id, 0);
    assert!(connection.has_message(), "it came with the first");
    assert_eq!(next(&mut connection).header.id, 1);
    assert!(!connection.has_message());
    // A header that lies is heard at once, too.
    let (_, mut both) = client.frame(spec::DEVICE_RESET, &[]);
    both.extend(spec::Header { size: u32::MAX, ..spec::Header::default() }.as_bytes());
    client.send(&both, &[]).unwrap();
    next(&mut connection);
    assert!(connection.has_message());
    assert!(connection.receive().is_err());
}

#[test]
fn commands_that_come_at_once_are_answered_one_by_one() {
    let card = served();
    let mut client = card.client();
    for command in [spec::REGION_READ, spec::DEVICE_RESET] {
        let body: &[u8] = if command == spec::REGION_READ { ACCESS.as_bytes() } else { &[] };
        let frames: Vec<_> = (0..50).map(|_| client.frame(command, body)).collect();
        let bytes: Vec<u8> = frames.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        let none: [BorrowedFd<'_>; 0] = [];
        client.send(&bytes, &none).unwrap();
        for (id, _) in frames {
            assert!(client.expect(id, command).unwrap().errno().is_none());
        }
    }
    assert_eq!(card.handle.status().region_reads, 50);
}
