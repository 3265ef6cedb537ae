//! What a hostile driver does to a ring stops its queue, by name, and nothing else happens.

mod rig;

use std::sync::Arc;

use ioplane_storage::MemoryBacking;
use ioplane_testkit::driver::raw::RawDesc;
use ioplane_testkit::driver::{DiskOp, Shape};
use rig::{QUEUE, Rig, options};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn rig() -> Rig {
    Rig::new(MemoryBacking::new(1 << 20).unwrap())
}

/// Offers a chain whose descriptors `spoil` has written; the fault's name.
fn offered(descs: &[(u16, u64, u32, u16, u16)]) -> Option<&'static str> {
    let mut rig = rig();
    let base = rig.disk.data_gpa(rig.disk.next().unwrap());
    let raw = rig.disk.ring().raw();
    for &(id, addr, len, flags, next) in descs {
        // Small addresses are offsets into memory that is there.
        let addr = if addr < 0x10000 { base + addr } else { addr };
        raw.set_desc(id, RawDesc { addr, len, flags, next });
    }
    raw.offer(descs[0].0);
    rig.core.turn_until_idle(100);
    assert_eq!(rig.counts().faults, u64::from(rig.counts().faults != 0));
    rig.fault()
}

#[test]
fn chains_that_no_driver_makes() {
    assert_eq!(offered(&[(0, 0, 16, NEXT, 0)]), Some("descriptor_loop"));
    assert_eq!(offered(&[(0, 0, 16, NEXT, 1), (1, 64, 16, NEXT, 0)]), Some("descriptor_loop"));
    assert_eq!(offered(&[(0, 0, 16, NEXT, QUEUE)]), Some("bad_descriptor"));
    assert_eq!(
        offered(&[(0, 0, 16, NEXT, 1), (1, 64, 16, WRITE | NEXT, 2), (2, 128, 1, 0, 0)]),
        Some("readable_after_writable")
    );
    assert_eq!(offered(&[(0, 0, 16, 0, 0)]), Some("no_status"));
    assert_eq!(offered(&[(0, 0, 8, NEXT, 1), (1, 64, 1, WRITE, 0)]), Some("no_status"), "half a header");
    assert_eq!(offered(&[(0, 0, 16, NEXT, 1), (1, 64, 0, WRITE, 0)]), Some("no_status"), "an empty status");
    assert_eq!(offered(&[(0, 0x66_0000_0000, 16, NEXT, 1), (1, 64, 1, WRITE, 0)]), Some("outside_memory"));
    assert_eq!(offered(&[(0, 0, 16, NEXT, 1), (1, 0x66_0000_0000, 1, WRITE, 0)]), Some("outside_memory"));
    assert_eq!(
        offered(&[(0, 0, 16, NEXT, 1), (1, u64::MAX, 2, WRITE, 0)]),
        Some("no_status"),
        "an address that wraps"
    );
    assert_eq!(offered(&[(0, 0, u32::MAX, NEXT, 1), (1, 64, u32::MAX, WRITE, 0)]), Some("chain_too_long"));
}

#[test]
fn indirect_tables_that_no_driver_makes() {
    assert_eq!(offered(&[(0, 0, 0, INDIRECT, 0)]), Some("bad_indirect"), "empty");
    assert_eq!(offered(&[(0, 0, 17, INDIRECT, 0)]), Some("bad_indirect"), "ragged");
    assert_eq!(offered(&[(0, 0, 16 * 1025, INDIRECT, 0)]), Some("bad_indirect"), "longer than any queue");
    assert_eq!(offered(&[(0, 0, 32, INDIRECT | NEXT, 1)]), Some("bad_indirect"), "with a successor");
    assert_eq!(offered(&[(0, 0x66_0000_0000, 32, INDIRECT, 0)]), Some("outside_memory"));
    // A table within a table, and one that loops: the table lies in the data area of a slot.
    for (flags, next, name) in
        [(INDIRECT, 0, "bad_indirect"), (NEXT, 0, "descriptor_loop"), (NEXT, 9, "bad_descriptor")]
    {
        let mut rig = rig();
        let gpa = rig.disk.data_gpa(rig.disk.next().unwrap());
        let table = rig.memory.view().window(gpa, 32, 16).unwrap();
        RawDesc { addr: gpa + 512, len: 16, flags, next }.write(&table, 0);
        RawDesc { addr: gpa + 512, len: 16, flags: 0, next: 0 }.write(&table, 1);
        let raw = rig.disk.ring().raw();
        raw.set_desc(0, RawDesc { addr: gpa, len: 32, flags: INDIRECT, next: 0 });
        raw.offer(0);
        rig.core.turn_until_idle(100);
        assert_eq!(rig.fault(), Some(name));
    }
}

#[test]
fn indexes_that_jump_and_heads_that_come_twice() {
    let mut one = rig();
    let idx = one.disk.ring().avail_idx();
    one.disk.ring().raw().set_avail_idx(idx.wrapping_add(QUEUE + 1));
    one.core.turn_until_idle(100);
    assert_eq!(one.fault(), Some("index_jump"));

    let mut two = rig();
    two.disk.ring().raw().offer(QUEUE);
    two.core.turn_until_idle(100);
    assert_eq!(two.fault(), Some("bad_descriptor"));

    // Twice in flight: behind a backing that holds requests back.
    let stalled = ioplane_storage::filter::Stall::new(MemoryBacking::new(1 << 20).unwrap());
    let mut three = Rig::new(stalled.clone());
    stalled.stall();
    let token = three.disk.submit(DiskOp::Read, 0, 512).unwrap();
    three.core.turn();
    let head = three.disk.head(token);
    three.disk.ring().raw().offer(head);
    three.core.turn();
    stalled.release();
    assert_eq!(three.finish(), Some(0), "what was in flight is still answered");
    assert_eq!(three.fault(), Some("head_in_flight"));
}

#[test]
fn data_outside_memory_fails_the_request_and_not_the_queue() {
    let mut rig = Rig::with(options("disk"), MemoryBacking::new(1 << 20).unwrap(), Shape::Direct, rig::SPLIT);
    let token = rig.disk.stage(DiskOp::Read, 0, 512).unwrap();
    let head = rig.disk.head(token);
    let raw = rig.disk.ring().raw();
    let header = raw.desc(head);
    let mut data = raw.desc(header.next);
    data.addr = 0x66_0000_0000;
    raw.set_desc(header.next, data);
    rig.disk.push(token);
    assert_eq!(rig.finish(), Some(1));
    let counts = rig.counts();
    assert_eq!((counts.errors_request, counts.faults), (1, 0));
}

#[test]
fn memory_that_shrinks_under_us_stops_the_queue() {
    let mut rig = rig();
    assert_eq!(rig.request(DiskOp::Flush, 0, 0), 0);
    rustix::fs::ftruncate(rig.memory.regions()[0].file(), 0).unwrap();
    rig.disk.ring().raw().set_avail_idx(5);
    rig.core.turn_until_idle(100);
    assert_eq!(rig.fault(), Some("memory_shrank"));
}

#[test]
fn a_stopped_queue_stays_stopped_and_its_neighbour_runs() {
    let backing = MemoryBacking::new(1 << 20).unwrap();
    let (mut bad, mut good) = (Rig::new(backing.clone()), Rig::new(backing as Arc<_>));
    bad.disk.ring().raw().offer(QUEUE);
    bad.core.turn_until_idle(100);
    bad.disk.submit(DiskOp::Read, 0, 512).unwrap();
    for _ in 0..100 {
        bad.core.turn();
    }
    assert!(bad.disk.reap().unwrap().is_none(), "nothing more is taken from a stopped queue");
    assert_eq!(good.read(0, 512).0, 0);
    assert_eq!(bad.fault(), Some("bad_descriptor"));
}
