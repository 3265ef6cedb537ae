//! The disks that misbehave, do so as promised.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_memory::GuestRange;
use ioplane_storage::filter::*;
use ioplane_storage::*;
use support::{Rig, image};

fn sector(n: u64) -> [GuestRange; 1] {
    [GuestRange { gpa: n * 512, len: 512 }]
}

fn memory() -> Arc<MemoryBacking> {
    MemoryBacking::new(1 << 20).unwrap()
}

#[test]
fn a_stalled_disk_hangs_until_it_is_released() {
    let below = memory();
    let disk = Stall::new(below.clone());
    let mut rig = Rig::new(&*disk, 4);
    let mut direct = Rig::new(&*below, 1);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    disk.stall();
    rig.view.write(0, &[2; 512]).unwrap();
    let op = Op::Write { offset: 0, from: &sector(0) };
    assert_eq!(rig.submit(&op, Tag(2)), Submitted::Pending);
    assert_eq!(rig.submit(&Op::Flush, Tag(0)), Submitted::Pending);
    rig.push();
    for _ in 0..10 {
        assert_eq!(rig.reap(&mut |_, _| panic!("stalled")), 0);
    }
    assert_eq!(rig.channel.in_flight(), 2);
    assert!(!rig.readable(20));
    assert_eq!(direct.read(0, 512).unwrap(), [1; 512]);
    disk.release();
    assert!(rig.readable(0));
    assert_eq!(rig.finish(), [(Tag(2), Ok(())), (Tag(0), Ok(()))]);
    assert!(!rig.readable(0));
    assert_eq!(direct.read(0, 512).unwrap(), [2; 512]);
}

#[test]
fn what_hung_lands_late_even_if_its_lane_has_gone() {
    let folder = tempfile::tempdir().unwrap();
    let file = FileBacking::open(FileOptions::new(image(folder.path(), 1 << 20))).unwrap();
    for below in [memory() as Arc<dyn Backing>, file] {
        let disk = Stall::new(below.clone());
        let mut rig = Rig::new(&*disk, 4);
        disk.stall();
        rig.view.write(0, &[3; 512]).unwrap();
        let op = Op::Write { offset: 0, from: &sector(0) };
        assert_eq!(rig.submit(&op, Tag(0)), Submitted::Pending);
        rig.push();
        drop(rig);
        assert!(!disk.wait_quiet(Instant::now() + Duration::from_millis(20)));
        let mut direct = Rig::new(&*below, 1);
        assert_eq!(direct.read(0, 512).unwrap(), [0; 512]);
        disk.release();
        assert!(disk.wait_quiet(Instant::now() + Duration::from_secs(20)));
        assert_eq!(direct.read(0, 512).unwrap(), [3; 512]);
    }
}

#[test]
fn a_slow_disk_takes_its_time() {
    let delay = Duration::from_millis(30);
    let disk = Delay::new(memory(), delay);
    let mut rig = Rig::new(&*disk, 4);
    let start = Instant::now();
    for tag in 0..4 {
        let op = Op::Read { offset: 0, into: &sector(0) };
        assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
    }
    rig.push();
    assert_eq!(rig.finish().len(), 4);
    assert!(start.elapsed() >= delay);
    assert!(start.elapsed() < delay * 20, "side by side, not one after the other");
    assert_eq!(rig.submit(&Op::Flush, Tag(0)), Submitted::Pending);
    drop(rig);
    assert!(!disk.wait_quiet(Instant::now()));
    assert!(disk.wait_quiet(Instant::now() + Duration::from_secs(20)));
}

#[test]
fn failures_come_as_planned() {
    let failure = |op, when, errno, late| Failure { op, when, errno, late };
    let disk = Fail::new(
        memory(),
        vec![
            failure(OpKind::Write, When::Nth(2), libc::ENOSPC, false),
            failure(OpKind::Read, When::Every(3), libc::EIO, true),
            failure(OpKind::Flush, When::From(2), libc::EROFS, false),
        ],
    );
    let mut rig = Rig::new(&*disk, 4);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    assert_eq!(rig.write(0, &[2; 512]), Err(Fault::NoSpace));
    assert_eq!(rig.write(512, &[3; 512]), Ok(()));
    let mut again = Rig::new(&*disk, 4);
    assert_eq!(again.read(0, 512).unwrap(), [1; 512], "what failed has done nothing");
    assert_eq!(rig.read(512, 512).unwrap(), [3; 512]);
    // Counted over all channels. Late: in flight until it is reaped.
    let op = Op::Read { offset: 0, into: &sector(0) };
    assert_eq!(again.submit(&op, Tag(3)), Submitted::Pending);
    assert!(again.readable(0));
    assert_eq!(again.finish(), [(Tag(3), Err(Fault::Io(libc::EIO)))]);
    assert!(!again.readable(0));
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!(rig.run(&Op::Flush), Err(Fault::ReadOnly));
    assert_eq!(rig.run(&Op::Flush), Err(Fault::ReadOnly));
    assert_eq!((disk.seen(OpKind::Flush), disk.seen(OpKind::Read), disk.seen(OpKind::Discard)), (3, 3, 0));
}

#[test]
fn a_power_cut_takes_what_was_not_flushed() {
    let below = memory();
    let disk = PowerCut::new(below.clone()).unwrap();
    assert!(disk.info().volatile_cache);
    let mut rig = Rig::new(&*disk, 4);
    assert_eq!(rig.write(0, &[1; 4096]), Ok(()));
    assert_eq!(disk.unflushed(), 4096);
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!(disk.unflushed(), 0);
    assert_eq!(rig.write(512, &[2; 1024]), Ok(()));
    assert_eq!(rig.run(&Op::WriteZeroes { offset: 2048, len: 512, unmap: true }), Ok(()));
    let now = rig.read(0, 4096).unwrap();
    assert_eq!((now[0], now[512], now[1535], now[2048], now[4095]), (1, 2, 2, 0, 1));
    assert_eq!(disk.cut(Keep::Nothing), Ok(3));
    assert_eq!(rig.read(0, 512), Err(Fault::Io(libc::ENODEV)));
    assert_eq!(rig.write(0, &[4; 512]), Err(Fault::Io(libc::ENODEV)));
    assert_eq!(rig.run(&Op::Flush), Err(Fault::Io(libc::ENODEV)));
    assert_eq!(Rig::new(&*below, 1).read(0, 4096).unwrap(), [1; 4096]);
}

#[test]
fn a_power_cut_may_keep_some_of_it_and_the_same_seed_the_same() {
    let left = |seed| {
        let below = memory();
        let disk = PowerCut::new(below.clone()).unwrap();
        let mut rig = Rig::new(&*disk, 4);
        assert_eq!(rig.write(0, &[1; 64 << 10]), Ok(()));
        assert_eq!(rig.run(&Op::Flush), Ok(()));
        assert_eq!(rig.write(0, &[2; 64 << 10]), Ok(()));
        let lost = disk.cut(Keep::Some(seed)).unwrap();
        let bytes = Rig::new(&*below, 1).read(0, 64 << 10).unwrap();
        let sectors: Vec<u8> = bytes.chunks(512).map(|sector| sector[0]).collect();
        assert!(
            bytes.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])),
            "no torn sectors"
        );
        assert_eq!(sectors.iter().filter(|byte| **byte == 1).count() as u64, lost);
        sectors
    };
    let one = left(7);
    assert!(one.contains(&1) && one.contains(&2));
    assert_eq!(one, left(7));
    assert_ne!(one, left(1 << 20));
}

#[test]
fn filters_compose_over_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let file = FileBacking::open(FileOptions::new(&path)).unwrap();
    let power = PowerCut::new(file.clone()).unwrap();
    let disk = Delay::new(Stall::new(power.clone()), Duration::from_micros(50));
    let mut rig = Rig::new(&*disk, 4);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    assert_eq!(rig.write(512, &[1; 512]), Ok(()));
    power.cut(Keep::Nothing).unwrap();
    drop((rig, disk, power));
    let mut found = Rig::new(&*file, 1);
    assert_eq!(found.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(found.read(512, 512).unwrap(), [0; 512]);
}
