//! DMA ranges: with descriptors and without, how many, and what of them overlaps.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;

use ioplane_host::vfio_user::spec::{self, DmaMap, DmaUnmap};
use ioplane_memory::MAX_REGIONS;
use ioplane_testkit::toy::card::registers::*;
use ioplane_testkit::vfio_user::VfioUserClient;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::{errno, memory, served};

const MIB: u64 = 1 << 20;

/// What the card reads at a guest address.
fn peek(client: &mut VfioUserClient, address: u64) -> u64 {
    client.write64(0, ADDRESS, address).unwrap();
    client.read64(0, DATA).unwrap()
}

#[test]
fn the_device_reaches_what_came_with_a_descriptor() {
    let card = served();
    let mut client = card.client();
    let file = memory(MIB);
    rustix::io::pwrite(&file, &42u64.to_le_bytes(), 0x3008).unwrap();
    client.map(64 << 30, 0x4000, 0x2000, Some(file.as_fd())).unwrap();
    client.map(0, MIB, 0, None).unwrap();
    assert_eq!(peek(&mut client, (64 << 30) + 0x1008), 42);
    assert_eq!(peek(&mut client, 0x1000), u64::MAX, "remembered, but out of reach");
    client.write64(0, ADDRESS, (64 << 30) + 0x10).unwrap();
    client.write64(0, DATA, 43).unwrap();
    let mut bytes = [0; 8];
    rustix::io::pread(&file, &mut bytes, 0x2010).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 43);
    let status = card.handle.status();
    assert_eq!((status.dma_maps, status.dma_bytes), (2, MIB + 0x4000));
    assert_eq!((status.dma_shared, status.dma_shared_bytes), (1, 0x4000));
    client.unmap(0, MIB).unwrap();
    assert_eq!(card.seen.replaced.load(SeqCst), 0, "what the device does not reach needs no quiescent point");
    client.unmap(64 << 30, 0x4000).unwrap();
    assert_eq!((card.seen.replaced.load(SeqCst), card.seen.ranges.load(SeqCst)), (1, 0));
    assert_eq!(peek(&mut client, (64 << 30) + 0x1008), u64::MAX);
    assert_eq!(card.handle.status().dma_maps, 0);
}

#[test]
fn what_was_mapped_for_reading_is_not_written() {
    let card = served();
    let mut client = card.client();
    let file = memory(MIB);
    rustix::io::pwrite(&file, &42u64.to_le_bytes(), 0x1008).unwrap();
    let body = DmaMap { argsz: 32, flags: 1, offset: 0, address: 0x4000, size: 0x4000 };
    client.must(spec::DMA_MAP, body.as_bytes(), &[file.as_fd()]).unwrap();
    assert_eq!(peek(&mut client, 0x5008), 42);
    client.write64(0, ADDRESS, 0x5008).unwrap();
    let _ = client.write64(0, DATA, 43);
    assert_eq!(peek(&mut client, 0x5008), 42);
    client.unmap(0x4000, 0x4000).unwrap();
}

#[test]
fn ranges_that_overlap_are_refused() {
    let card = served();
    let mut client = card.client();
    let file = memory(MIB);
    client.map(0x10000, 0x3000, 0, Some(file.as_fd())).unwrap();
    client.map(0x20000, 0x1000, 0, None).unwrap();
    for (address, size) in [
        (0x10000, 0x3000),
        (0x10000, 0x1000),
        (0x12000, 0x1000),
        (0xf000, 0x2000),
        (0x8000, 0x20000),
        (0, 1 << 40),
    ] {
        assert_eq!(errno(client.map(address, size, 0, None)), Errno::EXIST, "{address:#x}+{size:#x}");
    }
    assert_eq!(errno(client.map(0x1f000, 0x2000, 0, Some(file.as_fd()))), Errno::EXIST);
    client.map(0x13000, 0xd000, 0, None).expect("between the two");
    client.map(0xf000, 0x1000, 0, Some(file.as_fd())).expect("just before");
    assert_eq!(card.seen.ranges.load(SeqCst), 2);
}

#[test]
fn unmapping_takes_what_lies_inside_and_nothing_is_no_error() {
    let card = served();
    let mut client = card.client();
    let file = memory(MIB);
    for at in 0..8u64 {
        let file = at.is_multiple_of(2).then(|| file.as_fd());
        client.map(at << 20, MIB, 0, file).unwrap();
    }
    client.unmap(1 << 40, MIB).expect("nothing there");
    assert_eq!(errno(client.unmap(0, MIB / 2)), Errno::INVAL, "part of one");
    assert_eq!(errno(client.unmap(MIB / 2, 2 * MIB)), Errno::INVAL, "one inside, one cut");
    assert_eq!(card.handle.status().dma_maps, 8, "nothing has happened");
    client.unmap(MIB, 3 * MIB).unwrap();
    assert_eq!((card.handle.status().dma_maps, card.seen.ranges.load(SeqCst)), (5, 3));
    // QEMU's two halves of everything.
    client.unmap(0, 1 << 63).unwrap();
    client.unmap(1 << 63, 1 << 63).unwrap();
    assert_eq!((card.handle.status().dma_maps, card.seen.ranges.load(SeqCst)), (0, 0));
    client.map(0, MIB, 0, Some(file.as_fd())).unwrap();
    client.map(u64::MAX - 0x1fff, 0x1000, 0, None).unwrap();
    client.unmap_all().unwrap();
    assert_eq!((card.handle.status().dma_maps, card.seen.ranges.load(SeqCst)), (0, 0));
    client.unmap_all().expect("twice");
}

#[test]
fn there_are_only_so_many_ranges() {
    let card = served();
    let mut client = card.client();
    for at in 0..MAX_REGIONS as u64 {
        client.map(at << 12, 0x1000, 0, None).unwrap();
    }
    assert_eq!(errno(client.map(1 << 40, 0x1000, 0, None)), Errno::NOSPC);
    assert_eq!(card.handle.status().dma_maps, MAX_REGIONS as u64);
    client.unmap(0, 0x1000).unwrap();
    client.map(1 << 40, 0x1000, 0, None).unwrap();
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    let card = served();
    let mut client = card.client();
    let file = memory(0x4000);
    let max = u64::MAX;
    for (address, size, offset) in [
        (0, 0, 0),
        (0x800, 0x1000, 0),
        (0, 0x1800, 0),
        (0, 0x1000, 0x800),
        (max - 0xfff, 0x1000, 0),
        (max - 0xfff, 0x2000, 0),
        (0, max - 0xfff, 0),
        (0, 0x8000, 0),
        (0, 0x1000, 0x4000),
        (0, 0x1000, max - 0xfff),
    ] {
        let outcome = client.map(address, size, offset, Some(file.as_fd()));
        assert_eq!(errno(outcome), Errno::INVAL, "{address:#x}+{size:#x} at {offset:#x}");
    }
    for flags in [0, 4, 8, 0xffff_ffff] {
        let body = DmaMap { argsz: 32, flags, offset: 0, address: 0, size: 0x1000 };
        assert_eq!(errno(client.must(spec::DMA_MAP, body.as_bytes(), &[])), Errno::INVAL);
    }
    for (flags, size, wanted) in
        [(0, 0, Errno::INVAL), (1, 0x1000, Errno::NOTSUP), (3, 0x1000, Errno::NOTSUP), (0, max, Errno::INVAL)]
    {
        let body = DmaUnmap { argsz: 24, flags, address: 0x1000, size };
        assert_eq!(errno(client.must(spec::DMA_UNMAP, body.as_bytes(), &[])), wanted);
    }
    // Files that are no memory.
    let pipe = rustix::pipe::pipe().unwrap().0;
    assert!(client.map(0, 0x1000, 0, Some(pipe.as_fd())).is_err());
    let null = std::fs::File::open("/dev/null").unwrap();
    assert!(client.map(0, 0x1000, 0, Some(null.as_fd())).is_err());
    assert_eq!((card.handle.status().dma_maps, card.seen.ranges.load(SeqCst)), (0, 0));
    assert_eq!(client.info().unwrap().num_regions, 9);
}

#[test]
fn memory_that_shrinks_under_us_kills_nobody() {
    let card = served();
    let mut client = card.client();
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, MIB).unwrap();
    client.map(0, MIB, 0, Some(file.as_fd())).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    peek(&mut client, 0x5000);
    client.unmap(0, MIB).unwrap();
    assert_eq!(client.info().unwrap().num_regions, 9);
}

#[test]
fn hole_03_files_that_may_not_answer_are_refused() {
    let card = served();
    let mut client = card.client();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(MIB).unwrap();
    assert_eq!(errno(client.map(0, MIB, 0, Some(file.as_fd()))), Errno::INVAL);
    let status = card.handle.status();
    assert_eq!((status.faults.get("slow_memory"), status.dma_maps, status.mappings), (Some(&1), 0, 0));
    assert!(status.last_fault.unwrap().contains("<source type='memfd'/>"));
    client.map(0, MIB, 0, Some(memory(MIB).as_fd())).expect("a memfd");
    assert_eq!(card.handle.status().mappings, 1);
}
