//! Versions, information, registers, resets, and who may connect.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use ioplane_host::vfio_user::spec::{self, Header, Version};
use ioplane_host::vfio_user::{HandleError, Options, serve};
use ioplane_testkit::toy::ToyCard;
use ioplane_testkit::toy::card::registers::*;
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio;
use zerocopy::IntoBytes;

use super::{Nowhere, errno, eventually, running, served};

const CONFIG: u32 = vfio::VFIO_PCI_CONFIG_REGION_INDEX;

#[test]
fn a_version_is_agreed_on() {
    let card = served();
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    let ours = client.version(Some(r#"{"capabilities":{"max_msg_fds":8,"unheard_of":{"a":[1]}}}"#)).unwrap();
    assert_eq!(
        ours,
        r#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":65536,"max_dma_maps":509,"pgsizes":4096}}"#
    );
    assert_eq!(errno(client.version(None)), Errno::INVAL, "once is enough");
    let status = card.handle.status();
    assert!(status.connected && !status.shadows);
    assert_eq!((status.connections, status.peer), (1, Some(std::process::id())));
    for version in [None, Some(""), Some("{}"), Some(r#"{"capabilities":{}}"#)] {
        drop(client);
        eventually("the end", || !card.handle.status().connected);
        client = VfioUserClient::connect(&card.socket()).unwrap();
        client.version(version).unwrap();
    }
    // A later minor version is answered with ours.
    drop(client);
    eventually("the end", || !card.handle.status().connected);
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    let answer = client.must(spec::VERSION, Version { major: 0, minor: 7 }.as_bytes(), &[]).unwrap();
    assert_eq!(answer.prefix::<Version>().unwrap().0, Version { major: 0, minor: 0 });
}

#[test]
fn the_device_says_what_it_is() {
    let card = served();
    let mut client = card.client();
    let info = client.info().unwrap();
    assert_eq!((info.argsz, info.flags, info.num_regions, info.num_irqs), (16, 3, 9, 5));
    let irq = |client: &mut VfioUserClient, index| {
        let info = client.irq(index).unwrap();
        (info.flags, info.count)
    };
    assert_eq!(irq(&mut client, 0), (7, 1), "eventfd, maskable, automasked");
    assert_eq!(irq(&mut client, 1), (9, 4), "eventfd, noresize");
    assert_eq!(irq(&mut client, 2), (1, 4));
    assert_eq!(irq(&mut client, 3), (1, 1));
    assert_eq!(irq(&mut client, 4), (0, 0));
    assert_eq!(errno(client.irq(5)), Errno::INVAL);
    let fds = spec::RegionIoFds { argsz: 16, ..spec::RegionIoFds::default() };
    let answer = client.must(spec::DEVICE_GET_REGION_IO_FDS, fds.as_bytes(), &[]).unwrap();
    assert_eq!(answer.prefix::<spec::RegionIoFds>().unwrap().0, fds, "none");
}

#[test]
fn registers_of_every_region_are_reached_with_every_width() {
    let card = served();
    let mut client = card.client();
    assert_eq!(client.read(CONFIG, 0, 4).unwrap(), [0x36, 0x1b, 0x79, 0x70]);
    let all = client.read(CONFIG, 0, 256).unwrap();
    assert_eq!((all.len(), &all[..4]), (256, &[0x36, 0x1b, 0x79, 0x70][..]));
    client.write(CONFIG, 4, &[7, 0]).unwrap();
    assert_eq!(client.read(CONFIG, 4, 1).unwrap(), [7]);
    client.write64(0, SCRATCH, 0x1122_3344_5566_7788).unwrap();
    assert_eq!(client.read64(0, SCRATCH).unwrap(), 0x1122_3344_5566_7788);
    // Sixteen bytes are two accesses, and arrive at both.
    let mut wide = 5u64.to_le_bytes().to_vec();
    wide.extend(1u64.to_le_bytes());
    client.write(0, SCRATCH, &wide).unwrap();
    assert_eq!(client.read(0, SCRATCH, 16).unwrap(), wide);
    client.write64(0, BUSY, 0).unwrap();
    // Any bytes of the ports.
    client.write(2, 3, &[1, 2, 3]).unwrap();
    assert_eq!(client.read(2, 2, 5).unwrap(), [0, 1, 2, 3, 0]);
    assert!(client.read(2, 0, 0).unwrap().is_empty());
    // The last of them, and none beyond.
    assert_eq!(client.read(2, 31, 1).unwrap(), [0]);
    for (region, offset, count) in [
        (2, 32, 1),
        (2, 31, 2),
        (0, u64::MAX, 1),
        (0, u64::MAX - 7, 8),
        (1, 0, 1),
        (CONFIG, 256, 1),
        (8, 0, 1),
    ] {
        assert_eq!(errno(client.read(region, offset, count)), Errno::INVAL, "{region} {offset:#x}+{count}");
        assert_eq!(errno(client.write(region, offset, &vec![0; count as usize])), Errno::INVAL);
    }
    let status = card.handle.status();
    assert_eq!((status.region_writes, status.faults["no_such_bytes"]), (5, 14));
    assert_eq!(client.read64(0, SCRATCH).unwrap(), 5, "the place in the stream is kept");
}

#[test]
fn resets_of_both_kinds_reach_the_device() {
    let card = served();
    let mut client = card.client();
    client.write64(0, SCRATCH, 1).unwrap();
    // It cannot become still by itself: it is suspended.
    client.write64(0, BUSY, 1).unwrap();
    client.must(spec::DEVICE_RESET, &[], &[]).unwrap();
    assert_eq!((client.read64(0, SCRATCH).unwrap(), card.seen.resets.load(SeqCst)), (0, 1));
    // Function-level reset, by the express capability's control register.
    let express = u64::from(client.read(CONFIG, 0x34, 1).unwrap()[0]);
    client.write64(0, SCRATCH, 1).unwrap();
    client.write(CONFIG, express + 8, &0x8000u16.to_le_bytes()).unwrap();
    assert_eq!((client.read64(0, SCRATCH).unwrap(), card.seen.resets.load(SeqCst)), (0, 2));
}

#[test]
fn what_is_not_offered_is_refused_plainly() {
    let card = served();
    let mut client = card.client();
    for command in [14, 15, 16, 17, 18] {
        assert_eq!(errno(client.must(command, &[0; 24], &[])), Errno::NOTSUP, "{command}");
    }
    for command in [0, 11, 12, 19, 0xffff] {
        assert_eq!(errno(client.must(command, &[0; 40], &[])), Errno::NOSYS, "{command}");
    }
    assert_eq!(client.info().unwrap().num_regions, 9);
}

#[test]
fn a_command_that_wants_no_reply_gets_none() {
    let card = served();
    let mut client = card.client();
    let access = spec::RegionAccess { offset: SCRATCH, region: 0, count: 8 };
    let mut body = access.as_bytes().to_vec();
    body.extend(77u64.to_le_bytes());
    let quiet = |(_, mut bytes): (u16, Vec<u8>)| {
        bytes[8] = 0x10;
        bytes
    };
    // A good one, one that fails, one that nobody knows.
    let frames =
        [client.frame(spec::REGION_WRITE, &body), client.frame(spec::DMA_UNMAP, &[]), client.frame(99, &[])];
    for frame in frames {
        client.send(&quiet(frame), &[]).unwrap();
    }
    assert_eq!(
        client.read64(0, SCRATCH).unwrap(),
        77,
        "done before the next command, whose reply is the first"
    );
    assert_eq!(card.handle.status().faults["bad_size"], 1);
}

#[test]
fn commands_sent_in_a_row_are_answered_in_a_row() {
    let card = served();
    let mut client = card.client();
    let body = spec::RegionAccess { offset: ACCESSES, region: 0, count: 8 };
    let mut bytes = Vec::new();
    let ids: Vec<u16> = (0..100)
        .map(|_| {
            let (id, frame) = client.frame(spec::REGION_READ, body.as_bytes());
            bytes.extend(frame);
            id
        })
        .collect();
    client.send(&bytes, &[]).unwrap();
    for (number, id) in (1u64..).zip(ids) {
        let answer = client.expect(id, spec::REGION_READ).unwrap();
        assert_eq!(answer.body[16..], number.to_le_bytes());
    }
}

#[test]
fn a_message_in_pieces_is_one_message() {
    let card = served();
    let mut client = card.client();
    let body = spec::RegionAccess { offset: 0, region: CONFIG, count: 2 };
    let (id, bytes) = client.frame(spec::REGION_READ, body.as_bytes());
    for byte in bytes {
        client.send(&[byte], &[]).unwrap();
        // Also between two of them the device is attended to.
        let before = card.seen.attended.load(SeqCst);
        card.ring();
        eventually("attention", || card.seen.attended.load(SeqCst) > before);
    }
    assert_eq!(client.expect(id, spec::REGION_READ).unwrap().body[16..], [0x36, 0x1b]);
}

#[test]
fn a_second_client_is_turned_away_before_it_has_a_version() {
    let card = served();
    let mut first = card.client();
    let mut second = VfioUserClient::connect(&card.socket()).unwrap();
    let error = second.version(None).expect_err("turned away");
    assert!(
        matches!(error.kind(), std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::BrokenPipe)
            || error.raw_os_error() == Some(Errno::CONNRESET.raw_os_error()),
        "{error:?}"
    );
    assert_eq!(card.handle.status().faults["second_client"], 1);
    assert_eq!(card.handle.status().connections, 1);
    first.info().expect("the first one notices nothing");
}

#[test]
fn stopping_waits_for_the_client_unless_forced() {
    let card = served();
    let socket = card.socket();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let client = card.client();
    assert!(matches!(card.handle.stop(false), Err(HandleError::Connected)));
    card.handle.stop(true).unwrap();
    assert!(client.receive().is_err(), "the client has left");
    assert!(!socket.exists() && !card.handle.status().connected);
    assert_eq!(card.seen.resets.load(SeqCst), 1);
    card.handle.stop(false).expect("stopped already");
    assert!(matches!(card.handle.with(|_| ()).wait(), Err(HandleError::Gone)));
    // Another function, served where it was.
    let again = serve(running(ToyCard::default()), Arc::new(Nowhere), Options::new(&socket)).unwrap();
    let mut client = VfioUserClient::greet(&socket).unwrap();
    assert_eq!(client.info().unwrap().num_regions, 9);
    drop(client);
    eventually("the end", || !again.status().connected);
    again.stop(false).unwrap();
}

#[test]
fn a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("left");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let serve = || serve(running(ToyCard::default()), Arc::new(Nowhere), Options::new(&socket));
    let handle = serve().expect("replaced");
    assert!(VfioUserClient::greet(&socket).is_ok());
    let error = serve().expect_err("in use");
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    // Dropped without a word, it ends too.
    drop(handle);
    eventually("the end", || !socket.exists());
}

#[test]
fn several_functions_live_in_one_process() {
    let cards: Vec<_> = (0..8).map(|_| served()).collect();
    let mut clients: Vec<_> = cards.iter().map(|card| card.client()).collect();
    for (number, client) in (0u64..).zip(&mut clients) {
        client.write64(0, SCRATCH, number).unwrap();
    }
    for (number, client) in (0u64..).zip(&mut clients) {
        assert_eq!(client.read64(0, SCRATCH).unwrap(), number);
    }
    drop(clients.pop());
    cards[0].handle.stop(true).unwrap();
    clients[1].info().expect("the others go on");
}

#[test]
fn ids_are_echoed_whatever_they_are() {
    let card = served();
    let client = card.client();
    for id in [0u16, 7, 7, u16::MAX] {
        let header = Header { id, command: spec::DEVICE_RESET, size: 16, ..Header::default() };
        client.send(header.as_bytes(), &[]).unwrap();
        client.expect(id, spec::DEVICE_RESET).unwrap();
    }
}
