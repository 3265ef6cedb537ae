//! A disk on a real file, by both engines, past the page cache and through it: what a flush makes durable, what a power cut
//! leaves, and how errors of the file become the status byte that the guest sees.

#![expect(clippy::disallowed_types, reason = "tests of one process take turns")]

mod rig;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{RwLock, RwLockReadGuard};
use std::time::Duration;

use ioplane_storage::{Direct, EngineChoice, FileBacking, FileOptions};
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape};
use ioplane_testkit::fuse::{Call, FuseDisk, How, InjectedFault};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::blk::spec::*;
use rig::{PACKED, Rig, SPLIT, options};

const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
const BYTES: usize = BLOCK * BLOCKS;

/// Held for writing while a promise is taken out of this process.
static WHOLE: RwLock<()> = RwLock::new(());

fn whole() -> RwLockReadGuard<'static, ()> {
    WHOLE.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// How a disk reaches its file.
#[derive(Debug, Clone, Copy)]
struct Way {
    engine: EngineChoice,
    direct: Direct,
    features: u64,
}

fn ways() -> impl Iterator<Item = Way> {
    [EngineChoice::IoUring, EngineChoice::Threads].into_iter().flat_map(|engine| {
        [(Direct::On, SPLIT), (Direct::Off, SPLIT), (Direct::On, PACKED), (Direct::Off, PACKED)]
            .map(move |(direct, features)| Way { engine, direct, features })
    })
}

impl Way {
    fn rig(self, path: &Path) -> Rig {
        let plan = DiskPlan { slots: 2, max_bytes: 512 << 10, segments: 8, shape: Shape::Direct };
        let options_of_file =
            FileOptions { engine: self.engine, direct: self.direct, ..FileOptions::new(path) };
        let backing = FileBacking::open(options_of_file).unwrap();
        Rig::planned(options("disk"), backing, plan, self.features, &HandCore::polling())
    }
}

struct Stage {
    folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        Stage { folder: tempfile::tempdir().unwrap() }
    }

    /// A file whose faults and power are ours, or `None` after having said loudly why not.
    fn disk(&self, name: &str, bytes: usize) -> Option<FuseDisk> {
        match FuseDisk::new(&self.folder.path().join(name), bytes) {
            Ok(disk) => Some(disk),
            Err(why) => {
                // Past the harness, which keeps what passing tests print to itself.
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: disks on a real file that fails were NOT tested: {why}"
                );
                None
            }
        }
    }
}

fn stamp(block: usize, round: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| (at / 512) as u8 ^ block as u8 ^ round.wrapping_mul(37)).collect()
}

fn at(image: &[u8], block: usize) -> &[u8] {
    &image[block * BLOCK..(block + 1) * BLOCK]
}

/// Writes blocks and makes them durable, by flushes or with the write cache off; each must be on the disk when that is said.
fn durable_when_acknowledged(way: Way, disk: &FuseDisk, cache: bool) -> Result<(), String> {
    let mut rig = way.rig(&disk.path());
    if !cache {
        rig.running().device_mut().model_mut().write_config(32, &[0]);
    }
    for block in 0..8 {
        let wanted = stamp(block, 1);
        if rig.write(block as u64 * 8, &wanted) != VIRTIO_BLK_S_OK {
            return Err("a write failed".into());
        }
        if cache {
            if at(&disk.durable(), block) == wanted {
                return Err("durable before a flush: this proves nothing".into());
            }
            if rig.request(DiskOp::Flush, 0, 0) != VIRTIO_BLK_S_OK {
                return Err("a flush failed".into());
            }
        }
        if at(&disk.durable(), block) != wanted {
            return Err(format!("block {block} was acknowledged as durable, and a power cut takes it"));
        }
    }
    Ok(())
}

#[test]
fn a_flush_reaches_the_disk() {
    let _whole = whole();
    let stage = Stage::new();
    for (n, way) in ways().enumerate() {
        for cache in [true, false] {
            let Some(disk) = stage.disk(&format!("{n}{cache}"), BYTES) else { return };
            // It takes its time: an answer that does not wait for it comes too early.
            let slow = How::Slow(Duration::from_millis(10));
            disk.faults(&[InjectedFault { call: Call::Sync, bytes: 0..0, how: slow, times: u32::MAX }]);
            durable_when_acknowledged(way, &disk, cache)
                .unwrap_or_else(|why| panic!("{way:?}, {cache}: {why}"));
        }
    }
}

/// The mutation: `fdatasync` does nothing, in the ring and in the threads. What it takes must be missed.
#[cfg(feature = "mutations")]
#[test]
fn without_fdatasync_the_same_is_noticed() {
    use ioplane_storage::mutation::{Promise, remove};

    let _alone = WHOLE.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let stage = Stage::new();
    for (n, way) in ways().enumerate() {
        for cache in [true, false] {
            let Some(disk) = stage.disk(&format!("{n}{cache}"), BYTES) else { return };
            remove(Some(Promise::Flush));
            let outcome = durable_when_acknowledged(way, &disk, cache);
            remove(None);
            let why = outcome.expect_err("nothing depends on fdatasync?");
            assert!(why.contains("a power cut takes it"), "{way:?}: {why}");
            assert_eq!(disk.calls().syncs, 0);
        }
    }
}

/// Random writes and flushes; the power fails after each flush, and what the disk had not synced survives in part. A new disk
/// on what is left holds everything that a flush had acknowledged.
#[test]
fn what_was_flushed_to_a_file_survives_a_power_cut_at_every_flush() {
    let _whole = whole();
    let stage = Stage::new();
    let left = stage.folder.path().join("left.img");
    let mut lost = 0;
    for (n, way) in ways().enumerate() {
        let Some(disk) = stage.disk(&n.to_string(), BYTES) else { return };
        let mut rig = way.rig(&disk.path());
        let (mut durable, mut newest) = ([0u8; BLOCKS], [0u8; BLOCKS]);
        let (mut dice, mut cuts) = (n as u64 + 1, 0);
        for round in 1..=120u8 {
            dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let block = (dice >> 33) as usize % BLOCKS;
            assert_eq!(rig.write(block as u64 * 8, &stamp(block, round)), VIRTIO_BLK_S_OK);
            newest[block] = round;
            if dice >> 61 == 0 {
                assert_eq!(rig.request(DiskOp::Flush, 0, 0), VIRTIO_BLK_S_OK);
                durable = newest;
            } else if dice >> 61 != 1 {
                continue;
            }
            cuts += 1;
            for image in [disk.durable(), disk.survives(dice)] {
                std::fs::write(&left, &image).unwrap();
                let mut after = way.rig(&left);
                for block in 0..BLOCKS {
                    let (status, bytes) = after.read(block as u64 * 8, BLOCK);
                    assert_eq!(status, VIRTIO_BLK_S_OK);
                    let zeros = vec![0; BLOCK];
                    let holds = |round: u8| if round == 0 { zeros.clone() } else { stamp(block, round) };
                    if durable[block] == newest[block] {
                        assert!(
                            bytes == holds(durable[block]),
                            "{way:?}: block {block}: a flushed write is gone"
                        );
                    } else if bytes != holds(newest[block]) {
                        lost += 1;
                    }
                }
            }
        }
        assert!(cuts > 10, "{cuts}");
    }
    assert!(lost > 0, "no cut took anything, so this proves nothing");
}

fn fault(call: Call, block: usize, how: How, times: u32) -> InjectedFault {
    InjectedFault { call, bytes: block * BLOCK..(block + 1) * BLOCK, how, times }
}

/// Each error of the file is one error of one request, the next one is served, and everything else holds what it must.
#[test]
fn errors_of_the_file_are_the_guests_status() {
    let _whole = whole();
    let stage = Stage::new();
    for (n, way) in ways().enumerate() {
        let Some(disk) = stage.disk(&n.to_string(), BYTES) else { return };
        let mut rig = way.rig(&disk.path());
        for block in 0..BLOCKS {
            assert_eq!(rig.write(block as u64 * 8, &stamp(block, 1)), VIRTIO_BLK_S_OK);
        }
        let (mut io, mut space) = (0, 0);
        for (round, errno) in
            (2u8..).zip([libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EREMOTEIO, libc::ETIMEDOUT])
        {
            let full = matches!(errno, libc::ENOSPC | libc::EDQUOT);
            for call in [Call::Write, Call::Read] {
                let block = usize::from(round);
                // What the page cache has is not read again.
                if call == Call::Read && way.direct == Direct::Off {
                    continue;
                }
                disk.faults(&[fault(call, block, How::Errno(errno), 1)]);
                let try_it = |rig: &mut Rig| match call {
                    Call::Write => rig.write(block as u64 * 8, &stamp(block, round)),
                    _ => rig.read(block as u64 * 8, BLOCK).0,
                };
                let beside = rig.write(8, &stamp(1, round));
                let (first, second) = (try_it(&mut rig), try_it(&mut rig));
                assert_eq!(
                    (beside, first, second),
                    (VIRTIO_BLK_S_OK, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK),
                    "{way:?}: {call:?} with errno {errno}"
                );
                if full {
                    space += 1
                } else {
                    io += 1
                };
            }
            let (status, bytes) = rig.read(u64::from(round) * 8, BLOCK);
            assert!(status == VIRTIO_BLK_S_OK && bytes == stamp(round.into(), round), "{way:?}");
        }
        let counts = rig.counts();
        assert_eq!((counts.errors_io, counts.errors_space), (io, space), "{way:?}");
        for block in 8..BLOCKS {
            assert!(rig.read(block as u64 * 8, BLOCK).1 == stamp(block, 1), "{way:?}: block {block}");
        }
    }
}

/// A vectored request of many pieces that the file carries out piece by piece: to its end if it can, and one error if not.
#[test]
fn short_transfers_of_a_file_are_carried_to_their_end_or_are_one_error() {
    let _whole = whole();
    let stage = Stage::new();
    const LARGE: usize = 512 << 10;
    for (n, way) in ways().enumerate() {
        // NOT TESTED by io_uring: after a short transfer the kernel goes on by itself, and on Linux 6.18 what comes out on FUSE is in the
        // wrong place. It is not our ring: a bare program that makes one such write sees the same, and pwrite does not.
        if way.engine == EngineChoice::IoUring {
            continue;
        }
        let Some(disk) = stage.disk(&n.to_string(), 2 * LARGE) else { return };
        let mut rig = way.rig(&disk.path());
        let pattern = |round: u8| (0..LARGE).map(|at| (at / 512) as u8 ^ round).collect::<Vec<u8>>();
        let mut met = 0;
        for (round, short) in (1u8..).zip([512, 1024, 4096, 12 << 10, 64 << 10]) {
            let some = |call| InjectedFault { call, bytes: 0..LARGE, how: How::Short(short), times: 9 };
            disk.faults(&[some(Call::Write)]);
            assert_eq!(rig.write(0, &pattern(round)), VIRTIO_BLK_S_OK, "{way:?}: writes of {short}");
            assert!(disk.content()[..LARGE] == pattern(round), "{way:?}: writes of {short}");
            // What the page cache has is not read again, and to it a short read is the file's end.
            if way.direct == Direct::On {
                disk.faults(&[some(Call::Read)]);
                let (status, bytes) = rig.read(0, LARGE);
                assert!(status == VIRTIO_BLK_S_OK && bytes == pattern(round), "{way:?}: reads of {short}");
            }
            // Nine, or as many as it takes.
            let each = (LARGE / short).min(9) as u64;
            met += if way.direct == Direct::On { 2 * each } else { each };
            assert_eq!(disk.calls().troubled, met, "{way:?}: not all was met");
        }
        // Short first, then an error: one answer, and the device goes on.
        let before = rig.counts().errors_io;
        for call in [Call::Write, Call::Read] {
            if call == Call::Read && way.direct == Direct::Off {
                continue;
            }
            let middle = LARGE / 2..LARGE / 2 + 512;
            disk.faults(&[
                // The first ends a call that has moved something: short. The second is all that the next call meets.
                InjectedFault { call, bytes: middle, how: How::Errno(libc::EIO), times: 2 },
                InjectedFault { call, bytes: 0..LARGE, how: How::Short(8192), times: 5 },
            ]);
            let try_it = |rig: &mut Rig| match call {
                Call::Write => rig.write(0, &pattern(77)),
                _ => rig.read(0, LARGE).0,
            };
            assert_eq!(try_it(&mut rig), VIRTIO_BLK_S_IOERR, "{way:?}: {call:?}");
            disk.faults(&[]);
            assert_eq!(try_it(&mut rig), VIRTIO_BLK_S_OK, "{way:?}: {call:?}");
        }
        assert!(rig.counts().errors_io > before);
        // Nothing at all is no progress: an error, not a loop.
        disk.faults(&[InjectedFault { call: Call::Write, bytes: 0..LARGE, how: How::Short(0), times: 1 }]);
        assert_eq!(rig.write(0, &pattern(78)), VIRTIO_BLK_S_IOERR, "{way:?}");
        // Interrupted is not an error.
        disk.faults(&[InjectedFault {
            call: Call::Write,
            bytes: 0..LARGE,
            how: How::Errno(libc::EINTR),
            times: 3,
        }]);
        assert_eq!(rig.write(0, &pattern(79)), VIRTIO_BLK_S_OK, "{way:?}");
        assert!(disk.content()[..LARGE] == pattern(79), "{way:?}");
        // No piece of it lies anywhere else.
        assert!(disk.content()[LARGE..].iter().all(|byte| *byte == 0), "{way:?}");
    }
}

/// A flush that failed has perhaps lost what it was to save: through the page cache Linux takes those pages for clean, and the
/// next sync succeeds without them. No later flush may say that all is safe.
#[test]
fn a_flush_that_failed_is_not_forgotten() {
    let _whole = whole();
    let stage = Stage::new();
    for (n, way) in ways().enumerate() {
        let Some(disk) = stage.disk(&n.to_string(), BYTES) else { return };
        let mut rig = way.rig(&disk.path());
        let direct = way.direct == Direct::On;
        let how = if direct { How::Errno(libc::EIO) } else { How::Lost(libc::EIO) };
        disk.faults(&[InjectedFault { call: Call::Sync, bytes: 0..0, how, times: 1 }]);
        assert_eq!(rig.write(0, &stamp(0, 1)), VIRTIO_BLK_S_OK);
        assert_eq!(rig.request(DiskOp::Flush, 0, 0), VIRTIO_BLK_S_IOERR, "{way:?}");
        // Reads and writes go on.
        assert_eq!(rig.write(8, &stamp(1, 1)), VIRTIO_BLK_S_OK);
        assert_eq!(rig.read(8, BLOCK), (VIRTIO_BLK_S_OK, stamp(1, 1)));
        let again = rig.request(DiskOp::Flush, 0, 0);
        let safe = at(&disk.durable(), 0) == stamp(0, 1);
        assert!(
            safe || again == VIRTIO_BLK_S_IOERR,
            "{way:?}: a flush says that all is safe, and block 0 is not"
        );
        // Past the page cache nothing was lost, and the disk recovers.
        assert_eq!(again, if direct { VIRTIO_BLK_S_OK } else { VIRTIO_BLK_S_IOERR }, "{way:?}");
        // A new opening of the image begins anew: whoever did that has seen to the disk.
        drop(rig);
        let mut rig = way.rig(&disk.path());
        assert_eq!(rig.request(DiskOp::Flush, 0, 0), VIRTIO_BLK_S_OK, "{way:?}");
    }
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A sparse image on a tmpfs that is too small for it.
#[test]
fn a_file_system_that_is_full_is_an_error_until_there_is_room() {
    let stage = Stage::new();
    let mount = stage.folder.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let small = ["-t", "tmpfs", "-o", "size=1m", "small"];
    let mounted = Command::new("mount").args(small).arg(&mount).status();
    if !mounted.is_ok_and(|status| status.success()) {
        let why = "SKIPPED: a full file system up to the guest was NOT tested: mounting a tmpfs takes root";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    }
    let _mounted = Mounted(mount.clone());
    let image = mount.join("disk.img");
    for way in ways() {
        let way = Way { direct: Direct::Auto, ..way };
        std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let mut rig = way.rig(&image);
        let data = vec![7; 64 << 10];
        let mut sector = 0;
        let status = loop {
            let status = rig.write(sector, &data);
            if status != VIRTIO_BLK_S_OK || sector > 32 << 11 {
                break status;
            }
            sector += 128;
        };
        assert_eq!(status, VIRTIO_BLK_S_IOERR, "{way:?}: at sector {sector}");
        assert!(rig.counts().errors_space > 0, "{way:?}");
        // What is there can be read and written.
        assert_eq!(rig.write(0, &stamp(0, 1)), VIRTIO_BLK_S_OK, "{way:?}");
        assert_eq!(rig.read(0, BLOCK), (VIRTIO_BLK_S_OK, stamp(0, 1)), "{way:?}");
        // The guest makes room, and goes on where it was refused.
        assert_eq!(rig.request(DiskOp::Discard, 0, 256 << 10), VIRTIO_BLK_S_OK, "{way:?}");
        assert_eq!(rig.write(sector, &data), VIRTIO_BLK_S_OK, "{way:?}");
    }
}

/// Somebody cuts the file below a running disk.
#[test]
fn a_file_that_is_cut_is_an_error_where_it_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    for way in ways() {
        let way = Way { direct: Direct::Auto, ..way };
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(BYTES as u64).unwrap();
        let mut rig = way.rig(&image);
        assert_eq!(rig.write(0, &stamp(0, 1)), VIRTIO_BLK_S_OK);
        file.set_len(8192).unwrap();
        // Whole, and in part: nothing is read as zeros.
        assert_eq!(rig.read(64, BLOCK).0, VIRTIO_BLK_S_IOERR, "{way:?}");
        assert_eq!(rig.read(0, 16384).0, VIRTIO_BLK_S_IOERR, "{way:?}");
        assert_eq!(rig.read(0, BLOCK), (VIRTIO_BLK_S_OK, stamp(0, 1)), "{way:?}");
        file.set_len(BYTES as u64).unwrap();
        assert_eq!(rig.read(64, BLOCK).0, VIRTIO_BLK_S_OK, "{way:?}");
    }
}
