//! Errors by cause, and how the odd ends of an image behave.

mod support;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ioplane_memory::{GuestFault, GuestMap, GuestRange, Mapping, MemoryRegion, RegionSpec};
use ioplane_storage::*;
use support::{MEMORY, Mount, Rig, image, skip, ways};

const BEYOND: GuestFault = GuestFault::OutsideMemory { gpa: MEMORY - 512, len: 1024 };

fn outside() -> [GuestRange; 2] {
    [GuestRange { gpa: 0, len: 512 }, GuestRange { gpa: MEMORY - 512, len: 1024 }]
}

/// What every backing answers at once, before anything is done.
fn refusals(backing: &dyn Backing) {
    let bytes = backing.info().bytes;
    let mut rig = Rig::new(backing, 2);
    assert_eq!(rig.write(0, &[7; 512]), Ok(()));
    let one = [GuestRange { gpa: 0, len: 512 }];
    for (op, fault) in [
        (Op::Read { offset: bytes, into: &one }, Fault::BeyondEnd),
        (Op::Read { offset: u64::MAX - 511, into: &one }, Fault::BeyondEnd),
        (Op::Write { offset: bytes - 256, from: &one }, Fault::BeyondEnd),
        (Op::Discard { offset: 512, len: bytes }, Fault::BeyondEnd),
        (Op::Discard { offset: 512, len: u64::MAX }, Fault::BeyondEnd),
        (Op::WriteZeroes { offset: u64::MAX, len: u64::MAX, unmap: true }, Fault::BeyondEnd),
        (Op::Read { offset: 0, into: &outside() }, Fault::Guest(BEYOND)),
        (Op::Write { offset: 0, from: &outside() }, Fault::Guest(BEYOND)),
        (Op::Read { offset: 0, into: &[one[0]; MAX_RANGES + 1] }, Fault::Io(libc::E2BIG)),
    ] {
        assert_eq!(rig.submit(&op, Tag(0)), Submitted::Done(Err(fault)), "{op:?}");
        assert_eq!(rig.channel.in_flight(), 0);
    }
    // The first range of a transfer whose second is refused has not been touched, on either side.
    rig.view.write(0, &[9; 512]).unwrap();
    assert!(rig.run(&Op::Write { offset: 0, from: &outside() }).is_err());
    assert_eq!(rig.read(0, 512).unwrap(), [7; 512]);
    rig.view.write(0, &[9; 512]).unwrap();
    assert!(rig.run(&Op::Read { offset: 0, into: &outside() }).is_err());
    let mut bytes = [0; 512];
    rig.view.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 512]);
    // Nothing to do is done.
    for op in [
        Op::Read { offset: 0, into: &[] },
        Op::Write { offset: 512, from: &[GuestRange { gpa: 0, len: 0 }] },
        Op::Discard { offset: 0, len: 0 },
        Op::WriteZeroes { offset: 0, len: 0, unmap: false },
    ] {
        assert_eq!(rig.run(&op), Ok(()), "{op:?}");
    }
    // As many ranges as are allowed, none beside another.
    let many: Vec<_> = (0..MAX_RANGES as u64).map(|n| GuestRange { gpa: n * 1024, len: 512 }).collect();
    assert_eq!(rig.run(&Op::Write { offset: 0, from: &many }), Ok(()));
    assert_eq!(rig.run(&Op::Read { offset: 0, into: &many }), Ok(()));
}

#[test]
fn what_is_refused_is_refused_before_anything_is_done() {
    refusals(&*MemoryBacking::new(1 << 20).unwrap());
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (_, options) in ways(&path) {
        refusals(&*FileBacking::open(options).unwrap());
    }
}

#[test]
fn read_only_disks_are_not_written() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (_, options) in ways(&path) {
        let backing = FileBacking::open(FileOptions { read_only: true, ..options }).unwrap();
        let info = backing.info();
        assert!(info.read_only && !info.discards);
        let mut rig = Rig::new(&*backing, 1);
        assert_eq!(rig.write(0, &[1; 512]), Err(Fault::ReadOnly));
        assert_eq!(rig.run(&Op::Discard { offset: 0, len: 512 }), Err(Fault::ReadOnly));
        assert_eq!(rig.run(&Op::WriteZeroes { offset: 0, len: 512, unmap: false }), Err(Fault::ReadOnly));
        assert_eq!(rig.run(&Op::Flush), Ok(()));
        assert_eq!(rig.read(0, 512).unwrap(), [0; 512]);
        assert!(matches!(backing.resize(2 << 20), Err(StorageError::Size { .. })));
    }
}

#[test]
fn a_full_file_system_is_told_from_a_broken_disk() {
    let Some(mount) = Mount::ext4(16 << 20, 512) else { return skip("no loop devices, or not root") };
    let path = image(&mount.path, 1 << 30);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let mut rig = Rig::new(&*backing, 4);
        let mut outcome = Ok(());
        let mut written = 0;
        while outcome.is_ok() && written < 64 << 20 {
            outcome = rig.write(written, &[1; 256 << 10]);
            written += 256 << 10;
        }
        assert_eq!(outcome, Err(Fault::NoSpace), "{name} after {written} bytes");
        let zero = Op::WriteZeroes { offset: 512 << 20, len: 64 << 20, unmap: false };
        assert_eq!(rig.run(&zero), Err(Fault::NoSpace), "{name}");
        // Discarding makes room again.
        assert!(backing.info().discards);
        assert_eq!(rig.run(&Op::Discard { offset: 0, len: 1 << 30 }), Ok(()));
        assert_eq!(rig.write(0, &[1; 4096]), Ok(()), "{name}");
        assert_eq!(rig.run(&Op::Discard { offset: 0, len: 1 << 30 }), Ok(()));
    }
}

#[test]
fn an_image_may_end_inside_a_sector() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path().join("disk.img");
    for (name, options) in ways(&path) {
        for read_only in [true, false] {
            std::fs::write(&path, [5; 1000]).unwrap();
            let backing = FileBacking::open(FileOptions { read_only, ..options.clone() }).unwrap();
            assert_eq!(backing.info().bytes, 1024);
            let mut rig = Rig::new(&*backing, 1);
            let wanted: Vec<u8> = (0..1024).map(|n| if n < 1000 { 5 } else { 0 }).collect();
            rig.view.write(0, &[9; 4096]).unwrap();
            assert_eq!(rig.read(0, 1024).unwrap(), wanted, "{name}");
            rig.view.write(0, &[9; 4096]).unwrap();
            assert_eq!(rig.read(512, 512).unwrap(), wanted[512..], "{name}");
            // Cut up, and at addresses that O_DIRECT does not take.
            let parts = [GuestRange { gpa: 3001, len: 700 }, GuestRange { gpa: 13, len: 324 }];
            assert_eq!(rig.run(&Op::Read { offset: 0, into: &parts }), Ok(()), "{name}");
            let mut bytes = [0; 324];
            rig.view.read(13, &mut bytes).unwrap();
            assert_eq!(bytes, wanted[700..], "{name}");
            if !read_only {
                assert_eq!(rig.write(512, &[6; 512]), Ok(()));
                assert_eq!(rig.read(512, 512).unwrap(), [6; 512]);
                drop((rig, backing));
                assert_eq!(std::fs::metadata(&path).unwrap().len(), 1024);
            }
        }
    }
}

#[test]
fn an_image_that_somebody_cuts_is_an_error_not_zeros() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(4096).unwrap();
        let mut rig = Rig::new(&*backing, 1);
        assert_eq!(rig.read(0, 8192), Err(Fault::Io(libc::EIO)), "{name}");
        assert_eq!(rig.read(64 << 10, 512), Err(Fault::Io(libc::EIO)), "{name}");
        file.set_len(1 << 20).unwrap();
    }
}

#[test]
fn guest_memory_that_goes_away_is_the_guests_fault() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let memfd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, MEMORY).unwrap();
        let file = memfd.try_clone().unwrap();
        let region = MemoryRegion::map(RegionSpec { gpa: 0, len: MEMORY, user: 0, offset: 0, file }).unwrap();
        let mut rig = Rig::new(&*backing, 1);
        rig.view.set_map(Arc::new(GuestMap::new(vec![region]).unwrap()));
        rustix::fs::ftruncate(&memfd, 4096).unwrap();
        let gone = [GuestRange { gpa: 64 << 10, len: 4096 }];
        let shrank = Err(Fault::Guest(GuestFault::MemoryShrank));
        assert_eq!(rig.run(&Op::Read { offset: 0, into: &gone }), shrank, "{name}");
        assert_eq!(rig.run(&Op::Write { offset: 0, from: &gone }), shrank, "{name}");
        assert_eq!(rig.run(&Op::Flush), Ok(()));
    }
}

#[test]
fn a_lane_keeps_guest_memory_mapped_while_it_works_on_it() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let mut rig = Rig::new(&*backing, 4);
        let old = Arc::downgrade(rig.view.map());
        let op = Op::Write { offset: 0, from: &[GuestRange { gpa: 0, len: 4096 }] };
        assert_eq!(rig.submit(&op, Tag(3)), Submitted::Pending);
        rig.view.set_map(Arc::new(GuestMap::anonymous(MEMORY).unwrap()));
        assert_eq!(rig.submit(&op, Tag(1)), Submitted::Pending);
        assert!(old.upgrade().is_some(), "{name}");
        rig.push();
        rig.finish();
        // Unmapping is for the control plane, which comes by now.
        assert!(old.upgrade().is_some(), "{name}");
        backing.info();
        assert!(old.upgrade().is_none(), "{name}");
    }
}

#[test]
fn the_waker_tells_and_then_is_quiet() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let mut rig = Rig::new(&*backing, 8);
        for _ in 0..3000 {
            for tag in 0..8 {
                let from = [GuestRange { gpa: tag * 4096, len: 4096 }];
                let op = Op::Write { offset: tag * 4096, from: &from };
                assert_eq!(rig.submit(&op, Tag(tag as u16)), Submitted::Pending);
            }
            rig.push();
            let mut left = 8;
            while left > 0 {
                assert!(rig.readable(10_000), "{name}");
                left -= rig.reap(&mut |_, outcome| assert_eq!(outcome, Ok(())));
            }
            // A late count of a thread may make it readable once more; a reap with nothing to reap ends that.
            while rig.readable(0) {
                assert_eq!(rig.reap(&mut |_, _| ()), 0);
            }
        }
    }
}

/// What somebody else has put behind the end is cut by nobody who only names a size that the disk has, or less than that.
#[test]
fn a_file_that_was_grown_by_hand_is_not_cut() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    let backing = FileBacking::open(FileOptions::new(&path)).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4 << 20).unwrap();
    let length = || std::fs::metadata(&path).unwrap().len();
    for less in [1 << 20, 2 << 20] {
        let refused = backing.resize(less).unwrap_err();
        assert!(refused.to_string().contains("made the file larger"), "{refused}");
        assert_eq!((length(), backing.info().bytes), (4 << 20, 1 << 20));
    }
    backing.resize(4 << 20).unwrap();
    assert_eq!((length(), backing.info().bytes), (4 << 20, 4 << 20));
    // The same size again changes nothing.
    backing.resize(4 << 20).unwrap();
    drop(backing);
    assert_eq!(length(), 4 << 20);
}

#[test]
fn sizes_change_under_open_lanes() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let mut rig = Rig::new(&*backing, 2);
        assert_eq!(rig.write((1 << 20) - 512, &[1; 512]), Ok(()));
        backing.resize(512 << 10).unwrap();
        assert_eq!(rig.read((1 << 20) - 512, 512), Err(Fault::BeyondEnd), "{name}");
        backing.resize(1 << 20).unwrap();
        assert_eq!(rig.read((1 << 20) - 512, 512).unwrap(), [0; 512]);
        for wrong in [0, 1000] {
            assert!(matches!(backing.resize(wrong), Err(StorageError::Size { .. })));
        }
    }
    let memory = MemoryBacking::new(1 << 20).unwrap();
    let mut rig = Rig::new(&*memory, 2);
    assert_eq!(rig.write((1 << 20) - 512, &[1; 512]), Ok(()));
    memory.resize(512).unwrap();
    assert_eq!(rig.read(512, 512), Err(Fault::BeyondEnd));
    memory.resize(1 << 30).unwrap();
    assert_eq!(rig.read((1 << 20) - 512, 512).unwrap(), [0; 512]);
    assert_eq!(rig.write((1 << 30) - 512, &[1; 512]), Ok(()));
    // More than one poll's worth of zeroing: in flight, with a waker, and readable as zeros in the end.
    let zero = Op::WriteZeroes { offset: 0, len: 1 << 30, unmap: true };
    assert_eq!(rig.submit(&zero, Tag(1)), Submitted::Pending);
    assert!(rig.readable(0));
    assert_eq!(rig.finish(), [(Tag(1), Ok(()))]);
    assert!(!rig.readable(0));
    assert_eq!(rig.read((1 << 30) - 512, 512).unwrap(), [0; 512]);
    assert!(matches!(memory.resize(1 << 60), Err(StorageError::Size { .. })));
    assert!(MemoryBacking::new(100).is_err());
}

#[test]
fn what_cannot_be_a_disk_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let say = |options| FileBacking::open(options).unwrap_err().to_string();
    let missing = say(FileOptions::new(folder.path().join("none")));
    assert!(missing.contains("No such file"), "{missing}");
    assert!(say(FileOptions::new(folder.path())).contains("neither a file nor a block device"));
    assert!(say(FileOptions::new("/dev/null")).contains("neither a file nor a block device"));
    let path = image(folder.path(), 0);
    assert!(say(FileOptions::new(&path)).contains("truncate -s"));
    std::fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0; 512], 0).unwrap();
    let odd = FileOptions { logical_block: Some(1000), ..FileOptions::new(&path) };
    assert!(say(odd).contains("512"));
    FileBacking::open(FileOptions::new(&path)).unwrap();
}

#[test]
fn memory_is_a_mapping_that_survives() {
    // More room than the host will ever have is no reason not to make a small disk.
    let disks: Vec<_> = (0..64).map(|_| MemoryBacking::new(512).unwrap()).collect();
    assert!(Mapping::anonymous("x", 1).is_ok());
    drop(disks);
}
