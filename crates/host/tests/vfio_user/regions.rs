//! What can be mapped, and by whom.

use std::sync::atomic::Ordering::SeqCst;

use ioplane_host::vfio_user::spec::{Area, CapHeader, REGION_CAP_SHADOW, RegionInfo, Shadows, Sparse};
use ioplane_memory::PAGE;
use ioplane_testkit::toy::card::{BAR0, MAPPED_AT, SHADOW_AT};
use ioplane_testkit::vfio_user::{Answer, VfioUserClient};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio;
use zerocopy::FromBytes;

use super::{errno, served};

/// Whether two descriptors are of the same file.
fn same(one: &std::os::fd::OwnedFd, other: &std::os::fd::OwnedFd) -> bool {
    let of = |file| rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino)).expect("fstat");
    of(one) == of(other)
}

/// The bytes of the capability of that kind, from behind its header.
fn capability(answer: &Answer, id: u16) -> Option<Vec<u8>> {
    let (info, _) = answer.prefix::<RegionInfo>().expect("a region");
    let mut at = info.cap_offset as usize;
    while at != 0 {
        let (header, rest) = CapHeader::read_from_prefix(&answer.body[at..]).expect("a capability");
        if header.id == id {
            return Some(rest.to_vec());
        }
        assert!(header.next == 0 || header.next as usize > at);
        at = header.next as usize;
    }
    None
}

fn areas(bytes: &[u8], count: u32) -> Vec<(u64, u64)> {
    let areas = bytes.chunks(16).take(count as usize);
    areas.map(|bytes| Area::read_from_bytes(bytes).expect("an area")).map(|a| (a.offset, a.size)).collect()
}

#[test]
fn regions_say_how_large_they_are() {
    let card = served();
    let mut client = card.client();
    let sizes: Vec<_> = (0..9)
        .map(|index| {
            let (info, _) = client.region(index, 32).unwrap().prefix::<RegionInfo>().unwrap();
            assert_eq!(info.index, index);
            (info.size, info.flags & 3)
        })
        .collect();
    let none = (0, 0);
    assert_eq!(sizes, [(BAR0, 3), none, (32, 3), none, none, none, none, (256, 3), none]);
    assert_eq!(errno(client.region(9, 32)), Errno::INVAL);
    assert_eq!(errno(client.region(0, 31)), Errno::INVAL);
}

#[test]
fn mapped_pages_come_as_a_sparse_region_with_one_descriptor() {
    let card = served();
    let mut client = card.client();
    let small = client.region(0, 32).unwrap();
    let (info, rest) = small.prefix::<RegionInfo>().unwrap();
    let needed = 32 + 8 + 8 + 16;
    assert_eq!((info.argsz, info.cap_offset, rest.len(), small.files.len()), (needed, 32, 0, 0), "ask again");
    let answer = client.region(0, needed).unwrap();
    let (info, _) = answer.prefix::<RegionInfo>().unwrap();
    let all = vfio::VFIO_REGION_INFO_FLAG_READ
        | vfio::VFIO_REGION_INFO_FLAG_WRITE
        | vfio::VFIO_REGION_INFO_FLAG_MMAP
        | vfio::VFIO_REGION_INFO_FLAG_CAPS;
    assert_eq!((info.flags, info.argsz, answer.body.len()), (all, needed, needed as usize));
    let sparse = capability(&answer, 1).expect("sparse");
    let (head, rest) = Sparse::read_from_prefix(&sparse).unwrap();
    assert_eq!(areas(rest, head.nr_areas), [(PAGE, PAGE)]);
    assert_eq!(info.offset + PAGE, MAPPED_AT, "where the area lies in the file");
    assert_eq!(capability(&answer, REGION_CAP_SHADOW), None, "who does not ask gets no shadows");
    let [file] = &answer.files[..] else { panic!("{} descriptors", answer.files.len()) };
    assert!(same(file, &card.mapped));
    rustix::io::pwrite(file, b"doorbell", MAPPED_AT).expect("open for writing");
    assert!(!card.seen.shadows.load(SeqCst) && !card.handle.status().shadows);
    let ports = client.region(2, 4096).unwrap();
    assert_eq!((ports.body.len(), ports.files.len()), (32, 0), "ports cannot be mapped");
}

#[test]
fn shadow_pages_go_to_those_who_ask_and_for_reading_only() {
    let card = served();
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    let ours =
        client.version(Some(r#"{"capabilities":{"max_msg_fds":2,"ioplane_shadow_pages":true}}"#)).unwrap();
    assert!(ours.contains(r#""ioplane_shadow_pages":true"#), "{ours}");
    assert!(card.seen.shadows.load(SeqCst) && card.handle.status().shadows);
    let answer = client.region(0, 4096).unwrap();
    let (head, rest) = {
        let bytes = capability(&answer, REGION_CAP_SHADOW).expect("shadows");
        let (head, rest) = Shadows::read_from_prefix(&bytes).unwrap();
        (head, rest.to_vec())
    };
    assert_eq!(areas(&rest, head.nr_areas), [(2 * PAGE, PAGE)]);
    assert_eq!((head.descriptor, head.base + 2 * PAGE), (1, SHADOW_AT));
    assert!(capability(&answer, 1).is_some(), "beside the mapped ones");
    let file = &answer.files[head.descriptor as usize];
    assert!(same(file, &card.shadow));
    rustix::io::pwrite(&*card.shadow, b"status", SHADOW_AT).unwrap();
    let mut seen = [0; 6];
    rustix::io::pread(file, &mut seen, SHADOW_AT).unwrap();
    assert_eq!(&seen, b"status");
    assert_eq!(rustix::io::pwrite(file, b"x", SHADOW_AT), Err(Errno::BADF), "not for writing");
    drop(client);
    super::eventually("the end", || !card.handle.status().connected);
    assert!(!card.seen.shadows.load(SeqCst) && !card.handle.status().shadows);
}

#[test]
fn who_takes_one_descriptor_gets_no_second() {
    let card = served();
    let mut client = VfioUserClient::connect(&card.socket()).unwrap();
    client.version(Some(r#"{"capabilities":{"ioplane_shadow_pages":true}}"#)).unwrap();
    let answer = client.region(0, 4096).unwrap();
    assert_eq!(answer.files.len(), 1);
    assert!(capability(&answer, 1).is_some() && capability(&answer, REGION_CAP_SHADOW).is_none());
    assert_eq!(answer.body.len(), 64);
}
