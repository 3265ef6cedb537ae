//! Streams that lie: what can be answered is, and the rest ends the connection; the next client finds a good device.

use std::os::fd::AsFd;

use ioplane_host::vfio_user::spec::{self, Header, Version};
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{Served, errno, eventfd, eventually, memory, served};

/// The server leaves such a client, counts why, and takes the next.
#[track_caller]
fn left(card: &Served, client: &VfioUserClient, fault: &str) {
    assert!(client.receive().is_err(), "it is left, not answered");
    eventually("the end", || !card.handle.status().connected);
    let faults = card.handle.status().faults;
    assert!(faults.get(fault).is_some_and(|count| *count > 0), "{faults:?}");
    assert_eq!(card.client().info().unwrap().num_regions, 9);
    eventually("the end", || !card.handle.status().connected);
}

#[test]
fn headers_that_lie_end_the_connection() {
    let card = served();
    let good = Header { id: 1, command: spec::DEVICE_RESET, size: 16, ..Header::default() };
    for (header, fault) in [
        (Header { size: 0, ..good }, "bad_length"),
        (Header { size: 15, ..good }, "bad_length"),
        (Header { size: spec::MAX_MESSAGE + 1, ..good }, "bad_length"),
        (Header { size: u32::MAX, ..good }, "bad_length"),
        (Header { flags: 1, ..good }, "not_a_command"),
        (Header { flags: 0xf, ..good }, "not_a_command"),
    ] {
        let client = card.client();
        client.send(header.as_bytes(), &[]).unwrap();
        left(&card, &client, fault);
    }
}

#[test]
fn a_connection_begins_with_a_version_that_is_served() {
    let card = served();
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    let (_, bytes) = client.frame(spec::DEVICE_GET_INFO, &[0; 16]);
    client.send(&bytes, &[]).unwrap();
    left(&card, &client, "no_version");
    let version = |text: &str| {
        let mut body = Version { major: 0, minor: 0 }.as_bytes().to_vec();
        body.extend(text.as_bytes());
        body
    };
    let long = format!(r#"{{"capabilities":{{"x":"{}"}}}}"#, "x".repeat(5000));
    let deep = "[".repeat(4000);
    let bodies = [
        (Version { major: 1, minor: 0 }.as_bytes().to_vec(), "bad_version"),
        (version("{"), "bad_capabilities"),
        (version("[]x"), "bad_capabilities"),
        (version(r#"{"capabilities":7}"#), "bad_capabilities"),
        (version(r#"{"capabilities":{"max_msg_fds":-1}}"#), "bad_capabilities"),
        (version(r#"{"capabilities":{"ioplane_shadow_pages":"yes"}}"#), "bad_capabilities"),
        (version(&long), "bad_capabilities"),
        (version(&deep), "bad_capabilities"),
        (version("\u{1}"), "bad_capabilities"),
    ];
    for (body, fault) in bodies {
        let mut client = VfioUserClient::connect(&card.socket()).unwrap();
        // It is told before it is left.
        assert_eq!(errno(client.must(spec::VERSION, &body, &[])), Errno::INVAL);
        left(&card, &client, fault);
    }
    // One that is only too short may try again.
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    assert_eq!(errno(client.must(spec::VERSION, &[0, 0], &[])), Errno::INVAL);
    client.version(None).unwrap();
}

#[test]
fn bodies_of_the_wrong_size_are_answered() {
    let card = served();
    let mut client = card.client();
    for command in [2, 3, 4, 5, 6, 7, 8, 9, 10] {
        for size in [0, 1, 7, 15, 33, 4096, 65_536] {
            let answer = client.ask(command, &vec![0; size], &[]).unwrap();
            assert_eq!(answer.errno(), Some(Errno::INVAL.raw_os_error()), "{command} with {size} bytes");
        }
    }
    assert_eq!(errno(client.must(spec::DEVICE_RESET, &[0], &[])), Errno::INVAL);
    // Counts that lie about the data that follows.
    for (count, data) in [(8u32, 7usize), (8, 9), (u32::MAX, 8), (0, 1)] {
        let mut body = spec::RegionAccess { offset: 0, region: 0, count }.as_bytes().to_vec();
        body.resize(16 + data, 0);
        assert_eq!(errno(client.must(spec::REGION_WRITE, &body, &[])), Errno::INVAL);
    }
    for count in [spec::MAX_TRANSFER + 1, u32::MAX] {
        let body = spec::RegionAccess { offset: 0, region: 0, count };
        assert_eq!(errno(client.must(spec::REGION_READ, body.as_bytes(), &[])), Errno::INVAL);
    }
    assert_eq!(client.info().unwrap().num_regions, 9, "the place in the stream is kept");
}

#[test]
fn descriptors_where_none_or_fewer_belong_are_closed() {
    let card = served();
    let mut client = card.client();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let body = spec::DeviceInfo { argsz: 16, ..spec::DeviceInfo::default() };
    for many in [1, 16, 17, 253] {
        let files = vec![writer.as_fd(); many];
        assert_eq!(
            errno(client.must(spec::DEVICE_GET_INFO, body.as_bytes(), &files)),
            Errno::INVAL,
            "{many}"
        );
    }
    let (one, two) = (memory(0x1000), memory(0x1000));
    let map = spec::DmaMap { argsz: 32, flags: 3, size: 0x1000, ..spec::DmaMap::default() };
    let outcome = client.must(spec::DMA_MAP, map.as_bytes(), &[one.as_fd(), two.as_fd()]);
    assert_eq!(errno(outcome), Errno::INVAL);
    assert_eq!(card.handle.status().faults["bad_descriptors"], 5);
    // Nobody holds the pipe any more: its reader sees the end.
    drop(writer);
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
    // A message in pieces, with descriptors in each.
    let (id, bytes) = client.frame(spec::DEVICE_GET_INFO, body.as_bytes());
    let event = eventfd();
    for piece in bytes.chunks(1) {
        client.send(piece, &[event.as_fd()]).unwrap();
    }
    assert!(client.expect(id, spec::DEVICE_GET_INFO).unwrap().errno().is_some());
    assert_eq!(client.info().unwrap().num_regions, 9);
}

#[test]
fn a_client_that_ends_in_the_middle_is_let_go() {
    let card = served();
    for (cut, map) in [(1usize, false), (16, false), (20, true), (47, true)] {
        let mut client = card.client();
        let file = memory(0x1000);
        if map {
            client.map(0, 0x1000, 0, Some(file.as_fd())).unwrap();
        }
        let (_, bytes) = client.frame(spec::DMA_MAP, &[0; 32]);
        client.send(&bytes[..cut], &[file.as_fd()]).unwrap();
        drop(client);
        eventually("the end", || !card.handle.status().connected);
        assert_eq!(card.handle.status().dma_maps, 0);
    }
    assert!(card.handle.status().faults.is_empty(), "leaving is no fault");
}

#[test]
fn a_client_that_does_not_read_is_left() {
    let card = served();
    let mut client = card.client();
    let body = spec::RegionAccess { offset: 0, region: 0, count: ioplane_testkit::toy::card::BAR0 as u32 };
    let (_, bytes) = client.frame(spec::REGION_READ, body.as_bytes());
    // Until nothing more fits, which takes the replies' room too.
    client.stream().set_nonblocking(true).unwrap();
    while client.send(&bytes, &[]).is_ok() {}
    eventually("the end", || !card.handle.status().connected);
    assert_eq!(card.handle.status().faults["deaf"], 1);
    assert_eq!(card.client().info().unwrap().num_regions, 9);
}
