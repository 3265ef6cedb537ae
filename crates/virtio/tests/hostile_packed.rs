//! What a hostile driver does to a packed ring stops its queue, by name, and nothing else happens.

mod rig;

use ioplane_storage::MemoryBacking;
use ioplane_storage::filter::Stall;
use ioplane_testkit::driver::raw::RawPackedDesc;
use ioplane_testkit::driver::{DiskOp, Shape};
use ioplane_virtio::spec::packed::*;
use rig::{PACKED, QUEUE, Rig, options};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Outside memory.
const NOWHERE: u64 = 0x66_0000_0000;

fn rig() -> Rig {
    Rig::with(options("disk"), MemoryBacking::new(1 << 20).unwrap(), Shape::Direct, PACKED)
}

/// Makes descriptors (address, length, buffer ID, flags) available in a fresh ring, the first one last.
fn offer(rig: &mut Rig, descs: &[(u64, u32, u16, u16)]) {
    let base = rig.disk.data_gpa(rig.disk.next().unwrap());
    let raw = rig.disk.ring().raw_packed();
    for (slot, &(addr, len, id, flags)) in descs.iter().enumerate().rev() {
        // Small addresses are offsets into memory that is there.
        let addr = if addr < 0x10000 { base + addr } else { addr };
        raw.set_desc(slot as u16, RawPackedDesc { addr, len, id, flags: flags | VIRTQ_DESC_F_AVAIL });
    }
}

/// The fault that they cause.
fn offered(descs: &[(u64, u32, u16, u16)]) -> Option<&'static str> {
    let mut rig = rig();
    offer(&mut rig, descs);
    rig.core.turn_until_idle(100);
    assert_eq!(rig.counts().faults, u64::from(rig.counts().faults != 0));
    rig.fault()
}

#[test]
fn chains_that_no_driver_makes() {
    let endless = vec![(0, 16, 0, NEXT); QUEUE.into()];
    assert_eq!(offered(&endless), Some("descriptor_loop"), "longer than the queue");
    assert_eq!(offered(&[(0, 16, 0, NEXT), (64, 1, QUEUE, WRITE)]), Some("bad_descriptor"));
    assert_eq!(offered(&[(0, 16, 0, NEXT), (64, 1, u16::MAX, WRITE)]), Some("bad_descriptor"));
    assert_eq!(
        offered(&[(0, 16, 0, NEXT), (64, 16, 0, WRITE | NEXT), (128, 1, 0, 0)]),
        Some("readable_after_writable")
    );
    assert_eq!(offered(&[(0, 16, 0, 0)]), Some("no_status"));
    assert_eq!(offered(&[(0, 8, 0, NEXT), (64, 1, 0, WRITE)]), Some("no_status"), "half a header");
    assert_eq!(offered(&[(NOWHERE, 16, 0, NEXT), (64, 1, 0, WRITE)]), Some("outside_memory"));
    assert_eq!(offered(&[(0, 16, 0, NEXT), (NOWHERE, 1, 0, WRITE)]), Some("outside_memory"));
    assert_eq!(offered(&[(0, 16, 0, NEXT), (u64::MAX, 2, 0, WRITE)]), Some("no_status"), "a wrap");
    assert_eq!(offered(&[(0, u32::MAX, 0, NEXT), (64, u32::MAX, 0, WRITE)]), Some("chain_too_long"));
}

#[test]
fn indirect_tables_that_no_driver_makes() {
    assert_eq!(offered(&[(0, 0, 0, INDIRECT)]), Some("bad_indirect"), "empty");
    assert_eq!(offered(&[(0, 17, 0, INDIRECT)]), Some("bad_indirect"), "ragged");
    assert_eq!(offered(&[(0, 16 * 1025, 0, INDIRECT)]), Some("bad_indirect"), "longer than any queue");
    assert_eq!(offered(&[(0, 32, 0, INDIRECT | NEXT), (0, 16, 0, 0)]), Some("bad_indirect"), "goes on");
    assert_eq!(offered(&[(0, 16, 0, NEXT), (0, 32, 0, INDIRECT)]), Some("bad_indirect"), "in a chain");
    assert_eq!(offered(&[(NOWHERE, 32, 0, INDIRECT)]), Some("outside_memory"));
    let mut rig = rig();
    let gpa = rig.disk.data_gpa(rig.disk.next().unwrap());
    let table = rig.memory.view().window(gpa, 32, 16).unwrap();
    RawPackedDesc { addr: gpa + 512, len: 16, id: 0, flags: INDIRECT }.write(&table, 0);
    offer(&mut rig, &[(0, 32, 0, INDIRECT)]);
    rig.core.turn_until_idle(100);
    assert_eq!(rig.fault(), Some("bad_indirect"), "a table in a table");
}

#[test]
fn tables_that_were_not_negotiated() {
    let features = PACKED & !ioplane_virtio::spec::feature::VIRTIO_F_INDIRECT_DESC;
    let mut rig = Rig::with(options("disk"), MemoryBacking::new(1 << 20).unwrap(), Shape::Direct, features);
    offer(&mut rig, &[(0, 32, 0, INDIRECT)]);
    rig.core.turn_until_idle(100);
    assert_eq!(rig.fault(), Some("bad_indirect"));
}

#[test]
fn wrap_counters_that_make_no_sense_offer_nothing() {
    let mut rig = rig();
    let raw = rig.disk.ring().raw_packed();
    for flags in [0, VIRTQ_DESC_F_USED, VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED] {
        (0..QUEUE).for_each(|slot| raw.set_desc(slot, RawPackedDesc { flags, ..RawPackedDesc::default() }));
        assert_eq!(rig.core.turn(), 0, "flags {flags:#x}");
    }
    (0..QUEUE).for_each(|slot| raw.set_desc(slot, RawPackedDesc::default()));
    assert_eq!(rig.read(0, 512).0, 0, "a proper request is served still");
    assert_eq!(rig.fault(), None);
}

#[test]
fn suppression_that_makes_no_sense_is_harmless() {
    let mut rig = rig();
    for (place, flags) in [(QUEUE, 2), (0xffff, 2), (0x7fff, 2), (0, 3), (0xffff, 0xffff), (5, 1)] {
        rig.disk.ring().raw_packed().set_driver_event(place, flags);
        assert_eq!(rig.read(0, 512).0, 0);
    }
    assert_eq!(rig.fault(), None);
}

/// A disk that holds its requests back.
fn stalled() -> (Rig, std::sync::Arc<Stall>) {
    let stall = Stall::new(MemoryBacking::new(1 << 20).unwrap());
    (Rig::with(options("disk"), stall.clone(), Shape::Direct, PACKED), stall)
}

#[test]
fn what_is_in_flight_is_not_the_guests_to_change() {
    let (mut rig, stall) = stalled();
    assert_eq!(rig.write(0, &[7; 1024]), 0);
    stall.stall();
    let token = rig.disk.submit(DiskOp::Read, 0, 1024).unwrap();
    rig.core.turn();
    // All descriptors but the next free one are overwritten while the request is with the disk.
    let raw = rig.disk.ring().raw_packed();
    (0..8).for_each(|slot| raw.set_desc(slot, RawPackedDesc { addr: NOWHERE, len: 9, id: 60, flags: 0 }));
    stall.release();
    assert_eq!(rig.finish(), Some(0));
    let mut bytes = [0; 1024];
    rig.disk.read_data(token, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    assert_eq!(rig.fault(), None);
}

#[test]
fn a_buffer_that_comes_twice_and_a_chain_that_runs_into_what_is_in_flight() {
    let (mut twice, stall) = stalled();
    stall.stall();
    let token = twice.disk.submit(DiskOp::Read, 0, 512).unwrap();
    twice.core.turn();
    let id = twice.disk.head(token);
    // Three descriptors are in flight: header, data, status.
    let flags = VIRTQ_DESC_F_AVAIL;
    twice.disk.ring().raw_packed().set_desc(3, RawPackedDesc { addr: 0, len: 16, id, flags });
    twice.core.turn();
    stall.release();
    assert_eq!(twice.finish(), Some(0), "what was in flight is still answered");
    assert_eq!(twice.fault(), Some("head_in_flight"));

    let (mut long, stall) = stalled();
    stall.stall();
    long.disk.submit(DiskOp::Read, 0, 512).unwrap();
    long.core.turn();
    let raw = long.disk.ring().raw_packed();
    for slot in (3..QUEUE).rev() {
        raw.set_desc(slot, RawPackedDesc { addr: 0, len: 1, id: 40, flags: flags | NEXT });
    }
    long.core.turn();
    stall.release();
    assert_eq!(long.finish(), Some(0));
    assert_eq!(long.fault(), Some("descriptor_loop"));
}

#[test]
fn memory_that_shrinks_under_us_stops_the_queue() {
    let mut rig = rig();
    assert_eq!(rig.request(DiskOp::Flush, 0, 0), 0);
    rig.disk.submit(DiskOp::Flush, 0, 0).unwrap();
    rustix::fs::ftruncate(rig.memory.regions()[0].file(), 0).unwrap();
    rig.core.turn_until_idle(100);
    // A ring of zeros offers nothing: what stops the queue is the next look at what has become of the memory.
    rig.disk
        .ring()
        .raw_packed()
        .set_desc(2, RawPackedDesc { addr: 0, len: 1, id: 0, flags: VIRTQ_DESC_F_AVAIL });
    rig.core.turn_until_idle(100);
    assert_eq!(rig.fault(), Some("memory_shrank"));
}
