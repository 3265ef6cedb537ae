//! Virtio-blk against a driver: each request of section 5.2.6, each status, each counter.

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ioplane_device::{Change, QueueSet, Stop};
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::{DiskOp, Shape};
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::blk::spec::*;
use ioplane_virtio::spec::feature::*;
use rig::{PACKED, Rig, SPLIT, options};

const MIB: u64 = 1 << 20;

fn memory() -> Arc<dyn Backing> {
    MemoryBacking::new(MIB).unwrap()
}

#[test]
fn what_is_written_is_read_in_both_shapes_and_with_and_without_event_indexes() {
    for shape in [Shape::Direct, Shape::Indirect] {
        for features in [SPLIT, SPLIT & !VIRTIO_F_EVENT_IDX, PACKED, PACKED & !VIRTIO_F_EVENT_IDX] {
            let mut rig = Rig::with(options("disk"), memory(), shape, features);
            let bytes: Vec<u8> = (0..16384u32).map(|n| (n * 7 + n / 251) as u8).collect();
            assert_eq!(rig.write(3, &bytes), VIRTIO_BLK_S_OK);
            assert_eq!(rig.read(3, 16384), (VIRTIO_BLK_S_OK, bytes.clone()));
            assert_eq!(rig.read(4, 512), (VIRTIO_BLK_S_OK, bytes[512..1024].to_vec()));
            let counts = rig.counts();
            assert_eq!((counts.requests, counts.bytes_written, counts.bytes_read), (3, 16384, 16896));
        }
    }
}

#[test]
fn flush_discard_zeroes_and_id() {
    let mut rig = Rig::new(memory());
    assert_eq!(rig.write(0, &[0xaa; 4096]), VIRTIO_BLK_S_OK);
    assert_eq!(rig.request(DiskOp::Flush, 0, 0), VIRTIO_BLK_S_OK);
    assert_eq!(rig.request(DiskOp::WriteZeroes { unmap: false }, 1, 512), VIRTIO_BLK_S_OK);
    assert_eq!(rig.request(DiskOp::WriteZeroes { unmap: true }, 2, 512), VIRTIO_BLK_S_OK);
    let (_, bytes) = rig.read(0, 4096);
    assert!(bytes[..512].iter().all(|b| *b == 0xaa) && bytes[512..1536].iter().all(|b| *b == 0));
    assert_eq!(rig.request(DiskOp::Discard, 0, 4096), VIRTIO_BLK_S_OK);
    let token = rig.disk.next().unwrap();
    assert_eq!(rig.request(DiskOp::Id, 0, 0), VIRTIO_BLK_S_OK);
    let mut id = [0; 20];
    rig.disk.read_data(token, &mut id).unwrap();
    assert_eq!(&id, b"serial-number\0\0\0\0\0\0\0");
}

#[test]
fn errors_become_statuses_and_are_counted_by_cause() {
    let mut rig = Rig::new(memory());
    let end = MIB / SECTOR;
    assert_eq!(rig.read(end, 512).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(rig.read(end - 1, 1024).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(rig.read(u64::MAX, 512).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(rig.read(u64::MAX / SECTOR, 512).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(rig.read(0, 100).0, VIRTIO_BLK_S_IOERR, "not a multiple of a sector");
    assert_eq!(rig.request(DiskOp::Other { kind: 99, write: true }, 0, 512), VIRTIO_BLK_S_UNSUPP);
    let counts = rig.counts();
    assert_eq!((counts.errors_space, counts.errors_request, counts.unsupported, counts.faults), (3, 2, 1, 0));
}

#[test]
fn a_read_only_disk_refuses_writes_and_says_so() {
    let options = ioplane_virtio::blk::BlkOptions { read_only: true, ..options("disk") };
    let mut rig = Rig::with(options, memory(), Shape::Direct, SPLIT);
    assert_ne!(rig.running().device().features() & VIRTIO_BLK_F_RO, 0);
    for op in [DiskOp::Write, DiskOp::Discard, DiskOp::WriteZeroes { unmap: false }] {
        assert_eq!(rig.request(op, 0, 512), VIRTIO_BLK_S_IOERR);
    }
    assert_eq!(rig.read(0, 512).0, VIRTIO_BLK_S_OK);
    assert_eq!(rig.counts().errors_request, 3);
}

#[test]
fn the_configuration_space_says_what_the_disk_is() {
    let mut rig = Rig::new(memory());
    let mut space = [0; 64];
    rig.running().device().model().read_config(0, &mut space);
    assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), MIB / SECTOR);
    assert_eq!(u32::from_le_bytes(space[12..16].try_into().unwrap()), SEG_MAX);
    let mut two = [0; 2];
    rig.running().device().model().read_config(34, &mut two);
    assert_eq!(u16::from_le_bytes(two), 1, "one queue");
    rig.running().device().model().read_config(u32::MAX, &mut two);
    assert_eq!(two, [0, 0]);
}

#[test]
fn resizing_while_running_takes_effect_at_once() {
    let mut rig = Rig::new(memory());
    assert_eq!(rig.read(MIB / SECTOR, 512).0, VIRTIO_BLK_S_IOERR);
    rig.running().device_mut().model_mut().resize(2 * MIB).unwrap();
    assert_eq!(rig.read(MIB / SECTOR, 512).0, VIRTIO_BLK_S_OK);
    rig.running().device_mut().model_mut().resize(MIB / 2).unwrap();
    assert_eq!(rig.read(MIB / SECTOR - 1, 512).0, VIRTIO_BLK_S_IOERR);
    assert!(rig.running().device_mut().model_mut().resize(0).is_err());
    assert!(rig.running().device_mut().model_mut().resize(100).is_err());
}

#[test]
fn the_backing_is_replaced_at_a_quiescent_point() {
    let mut rig = Rig::new(memory());
    assert_eq!(rig.write(0, &[1; 512]), VIRTIO_BLK_S_OK);
    let core = rig.core.clone();
    let mut quiescing = rig.running.take().unwrap().begin_quiesce();
    core.turn();
    assert!(quiescing.is_settled());
    let mut quiescent = quiescing.finish().unwrap();
    assert_eq!(quiescent.stop(), Stop::Drained);
    quiescent.with(|vdev, proof| vdev.model_mut().replace_backing(proof, memory())).unwrap();
    // Invariant 1 and 2: made available while nobody looked, without a kick.
    rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
    let interrupts = rig.interrupt.0.load(Ordering::Relaxed);
    rig.running = Some(quiescent.resume(&core).unwrap());
    assert_eq!(rig.finish(), Some(VIRTIO_BLK_S_OK));
    assert!(rig.interrupt.0.load(Ordering::Relaxed) > interrupts, "invariant 3: an interrupt after resuming");
    assert_eq!(rig.read(0, 512).1, vec![0; 512], "the new backing is empty");
}

#[test]
fn kicks_are_refused_while_polled_and_asked_for_when_armed() {
    for features in [SPLIT, SPLIT & !VIRTIO_F_EVENT_IDX, PACKED, PACKED & !VIRTIO_F_EVENT_IDX] {
        let mut rig = Rig::with(options("disk"), memory(), Shape::Direct, features);
        assert_eq!(rig.read(0, 512).0, VIRTIO_BLK_S_OK);
        rig.disk.ring().kick_needed();
        for _ in 0..10 {
            rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
            assert!(!rig.disk.ring().kick_needed(), "a polled ring wants no kicks");
            assert_eq!(rig.finish(), Some(VIRTIO_BLK_S_OK));
        }
        assert!(rig.core.arm(), "nothing to do: may sleep");
        rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
        assert!(rig.disk.ring().kick_needed(), "a sleeping one does");
        assert!(!rig.core.arm(), "there is work: must not sleep");
        rig.core.disarm();
        assert_eq!(rig.finish(), Some(VIRTIO_BLK_S_OK));
        // Of a kick that was asked for and did not come.
        assert!(rig.core.arm(), "nothing to do: may sleep");
        rig.core.disarm();
        rig.disk.submit(DiskOp::Read, 0, 512).unwrap();
        assert!(!rig.disk.ring().kick_needed(), "one that is polled again wants none");
        assert_eq!(rig.finish(), Some(VIRTIO_BLK_S_OK));
    }
}

#[test]
fn the_write_cache_can_be_switched_off_by_those_who_negotiated_it() {
    let mut rig = Rig::new(memory());
    let model = rig.running().device_mut().model_mut();
    let mut byte = [9];
    model.read_config(32, &mut byte);
    assert_eq!(byte, [1], "write-back: the driver can flush");
    model.write_config(32, &[0]);
    model.read_config(32, &mut byte);
    assert_eq!(byte, [0]);
    assert_eq!(rig.write(0, &[1; 512]), VIRTIO_BLK_S_OK);
    let without = SPLIT & !(VIRTIO_BLK_F_FLUSH | VIRTIO_BLK_F_CONFIG_WCE);
    let mut rig = Rig::with(options("disk"), memory(), Shape::Direct, without);
    rig.running().device_mut().model().read_config(32, &mut byte);
    assert_eq!(byte, [0], "a driver that cannot flush gets write-through");
}

#[test]
fn a_saved_disk_goes_on_in_a_fresh_one() {
    saved_and_loaded(SPLIT);
}

/// What was completed before may have sent its interrupt to an eventfd that is no longer read.
#[test]
fn a_new_bell_rings_once() {
    let mut rig = Rig::new(memory());
    assert_eq!(rig.write(0, &[1; 512]), VIRTIO_BLK_S_OK);
    let (old, new) = (rig.interrupt.clone(), Arc::new(rig::CountedInterrupt::default()));
    let before = old.0.load(Ordering::Relaxed);
    let change = Change::Call(Some(new.clone()));
    drop(rig.running().apply(&QueueSet::from([0]), &change));
    rig.core.turn();
    assert_eq!((old.0.load(Ordering::Relaxed), new.0.load(Ordering::Relaxed)), (before, 1));
}

#[test]
fn a_saved_disk_with_packed_rings_goes_on_in_a_fresh_one() {
    saved_and_loaded(PACKED);
}

fn saved_and_loaded(features: u64) {
    let backing = memory();
    let mut rig = Rig::with(options("disk"), backing.clone(), Shape::Direct, features);
    assert_eq!(rig.write(8, &[7; 1024]), VIRTIO_BLK_S_OK);
    let core = rig.core.clone();
    let mut quiescing = rig.running.take().unwrap().begin_quiesce();
    core.turn();
    assert!(quiescing.is_settled());
    let quiescent = quiescing.finish().unwrap();
    let state = quiescent.save().unwrap();
    let mut fresh = ioplane_virtio::Vdev::new(
        ioplane_virtio::blk::Blk::new(options("disk"), backing),
        rig.memory.view().map().clone(),
    );
    fresh.queue_mut(0).unwrap().call = Some(rig.interrupt.clone());
    let loaded = ioplane_device::Quiescent::new(fresh).load(&state).unwrap();
    rig.running = Some(loaded.start(&core).unwrap());
    assert_eq!(rig.read(8, 1024), (VIRTIO_BLK_S_OK, vec![7; 1024]));
    assert_eq!(rig.running().queues(), QueueSet::from([0]));
    // Every cut and every flipped byte is refused or loads something possible; nothing panics.
    for at in 0..state.body.len() {
        let mut cut = state.clone();
        cut.body.truncate(at);
        let mut flipped = state.clone();
        flipped.body[at] ^= 0xff;
        for hostile in [cut, flipped] {
            let vdev = ioplane_virtio::Vdev::new(
                ioplane_virtio::blk::Blk::new(options("disk"), memory()),
                rig.memory.view().map().clone(),
            );
            let _ = ioplane_device::Quiescent::new(vdev).load(&hostile);
        }
    }
}
