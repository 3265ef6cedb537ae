//! A disk and another copy of it: what differs is found, whatever a guest writes meanwhile.

mod support;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_storage::compare::{CompareFault, Comparer, Findings, MOST_RANGES, Range, Watched};
use ioplane_storage::filter::{Fail, Failure, OpKind, Stall, When};
use ioplane_storage::mirror::Step;
use ioplane_storage::*;
use support::{MEMORY, Rig};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

fn content(bytes: u64) -> Vec<u8> {
    let mut random = Random(bytes | 1);
    (0..bytes).map(|_| random.below(256) as u8).collect()
}

fn fill(backing: &dyn Backing, content: &[u8]) {
    let mut rig = Rig::new(backing, 1);
    for (at, piece) in content.chunks(MEMORY as usize).enumerate() {
        rig.write(at as u64 * MEMORY, piece).unwrap();
    }
}

fn disk(content: &[u8]) -> Arc<dyn Backing> {
    let disk = MemoryBacking::new(content.len() as u64).unwrap();
    fill(&*disk, content);
    disk
}

fn compare(disk: &Arc<dyn Backing>, other: &Arc<dyn Backing>) -> Result<Findings, CompareFault> {
    let watched = Watched::new(disk.clone());
    let mut comparer = watched.comparer(other).unwrap();
    comparer.run(None, &mut |_| false)?;
    Ok(comparer.findings().clone())
}

#[test]
fn a_single_bit_is_found_wherever_it_is() {
    for bytes in [512, 4096, 4608, (256 << 10) + 512, (3 << 20) + 1536] {
        let right = content(bytes);
        let one = disk(&right);
        let found = compare(&one, &disk(&right)).unwrap();
        let nothing = Findings { bytes, compared: bytes, ..Findings::default() };
        assert_eq!(found, nothing);
        for at in [0, 511, bytes / 2, bytes - 512, bytes - 1] {
            for bit in [0, 7] {
                let mut wrong = right.clone();
                wrong[at as usize] ^= 1 << bit;
                let found = compare(&one, &disk(&wrong)).unwrap();
                let first = vec![Range { offset: at / 512 * 512, len: 512 }];
                assert_eq!(found, Findings { different: 512, ranges: 1, first, ..nothing.clone() });
            }
        }
    }
}

#[test]
fn ranges_are_joined_and_counted_and_the_first_ones_told() {
    let bytes: u64 = 4 << 20;
    let right = content(bytes);
    let mut wrong = right.clone();
    // One over the border of two runs, and then every other sector of a megabyte.
    let border = 256 << 10;
    wrong[border - 1024..border + 512].iter_mut().for_each(|byte| *byte ^= 1);
    for at in ((2 << 20)..(3 << 20)).step_by(1024) {
        wrong[at] ^= 0x80;
    }
    let found = compare(&disk(&right), &disk(&wrong)).unwrap();
    assert_eq!((found.different, found.ranges), (1536 + 1024 * 512, 1 + 1024));
    assert_eq!(found.first.len(), MOST_RANGES);
    assert_eq!(found.first[0], Range { offset: border as u64 - 1024, len: 1536 });
    assert_eq!(found.first[63], Range { offset: (2 << 20) + 62 * 1024, len: 512 });
    // All of it is one range, also when no more are told.
    let other: Vec<u8> = right.iter().map(|byte| !byte).collect();
    let found = compare(&disk(&right), &disk(&other)).unwrap();
    assert_eq!(
        (found.different, found.ranges, found.first),
        (bytes, 1, vec![Range { offset: 0, len: bytes }])
    );
}

#[test]
fn of_two_sizes_what_both_have_is_compared() {
    let right = content(1 << 20);
    for bytes in [512, (1 << 20) - 512] {
        let shrunk = disk(&right[..bytes]);
        for (one, other) in [(&disk(&right), &shrunk), (&shrunk, &disk(&right))] {
            let found = compare(one, other).unwrap();
            assert_eq!((found.bytes, found.compared, found.different), (bytes as u64, bytes as u64, 0));
        }
    }
}

/// Files, in each way to open them; one of them ends within a block, and within a sector.
#[test]
fn files_of_odd_sizes_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let right = content(700_001);
    let mut padded = right.clone();
    padded.resize(700_001usize.next_multiple_of(4096), 0);
    let whole = disk(&padded);
    let path = folder.path().join("odd.img");
    std::fs::write(&path, &right).unwrap();
    for (way, options) in support::ways(&path) {
        let options = FileOptions { read_only: true, raw: Raw::Stated, ..options };
        let Ok(file) = FileBacking::open(options) else {
            eprintln!("SKIPPED: {way}: this file system does not open it so");
            continue;
        };
        let file: Arc<dyn Backing> = file;
        for (one, other) in [(&file, &whole), (&whole, &file)] {
            let found = compare(one, other).unwrap();
            assert_eq!((found.bytes, found.different), (700_416, 0), "{way}");
        }
    }
    let mut wrong = right;
    wrong[700_000] ^= 1;
    std::fs::write(&path, &wrong).unwrap();
    let options = FileOptions { read_only: true, raw: Raw::Stated, ..FileOptions::new(&path) };
    let file: Arc<dyn Backing> = FileBacking::open(options).unwrap();
    let found = compare(&whole, &file).unwrap();
    assert_eq!(found.first, [Range { offset: 700_001 / 512 * 512, len: 512 }]);
}

/// Both read until the copies are held up between the two reads.
fn step_until(comparer: &mut Comparer, what: Step) {
    let end = Instant::now() + Duration::from_secs(60);
    while comparer.step(true).unwrap() != what {
        assert!(Instant::now() < end, "{comparer:?}");
    }
}

#[test]
fn what_a_guest_writes_between_the_two_reads_is_not_different() {
    let bytes = 1 << 20;
    let right = content(bytes);
    let new = vec![0x5a; 4096];
    // The copy that nobody updates, and one that follows the disk.
    for follows in [false, true] {
        let (below, copy) = (disk(&right), disk(&right));
        let watched = Watched::new(below);
        let mut guest = Rig::new(&*watched, 1);
        let slow = Stall::new(copy.clone());
        slow.stall();
        let other: Arc<dyn Backing> = slow.clone();
        let mut comparer = watched.comparer(&other).unwrap();
        if !follows {
            guest.write(8192, &new).unwrap();
        }
        // The disk has been read, the copy not.
        step_until(&mut comparer, Step::Waits);
        if follows {
            guest.write(8192, &new).unwrap();
            Rig::new(&*copy, 1).write(8192, &new).unwrap();
        }
        slow.release();
        step_until(&mut comparer, Step::Clean);
        let found = comparer.findings();
        assert_eq!((found.different, found.ranges, found.compared), (0, 0, bytes));
        // What follows is found equal by another look.
        assert_eq!(found.written, if follows { 0 } else { 4096 });
        assert_eq!(found.passes, if follows { 1 } else { 3 });
    }
}

/// A guest that discards and zeros has written, too; one that reads and flushes has not.
#[test]
fn all_that_changes_the_disk_counts_as_written() {
    let right = content(1 << 20);
    let (below, copy) = (disk(&right), disk(&right));
    let watched = Watched::new(below.clone());
    let mut guest = Rig::new(&*watched, 1);
    guest.run(&Op::WriteZeroes { offset: 4096, len: 512, unmap: false }).unwrap();
    guest.run(&Op::Discard { offset: 64 << 10, len: 128 << 10 }).unwrap();
    guest.run(&Op::Flush).unwrap();
    guest.read(512 << 10, 4096).unwrap();
    assert!(guest.write(1 << 20, &[1; 512]).is_err(), "beyond the end");
    // Behind its back: what nobody knows to be written.
    Rig::new(&*below, 1).write(512 << 10, &[0; 512]).unwrap();
    let mut comparer = watched.comparer(&copy).unwrap();
    comparer.run(None, &mut |_| false).unwrap();
    let found = comparer.findings();
    assert_eq!(found.first, [Range { offset: 512 << 10, len: 512 }]);
    assert!(found.written >= 4096 && found.written <= 4096 + (128 << 10), "{found:?}");
}

/// Whatever the order in which both copies answer, and whatever the guest writes meanwhile: what is called different is what was planted where
/// nobody writes, all of it and nothing else.
#[test]
fn a_guest_that_never_stops_writing_hides_nothing_and_makes_up_nothing() {
    const BLOCK: u64 = 4096;
    let bytes = (2 << 20) + 1536;
    for seed in 1..60u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let right = content(bytes);
        let (disk_below, copy_below) = (disk(&right), disk(&right));
        let mut planted = Vec::new();
        let mut spoil = Rig::new(&*copy_below, 1);
        for _ in 0..random.below(6) {
            // The guest leaves every eighth block alone.
            let offset = random.below(bytes / BLOCK / 8) * 8 * BLOCK + random.below(8) * 512;
            let mut sector = right[offset as usize..offset as usize + 512].to_vec();
            sector[random.below(512) as usize] ^= 1 << random.below(8);
            spoil.write(offset, &sector).unwrap();
            planted.push(offset);
        }
        planted.sort_unstable();
        planted.dedup();
        let stalls = [Stall::new(disk_below.clone()), Stall::new(copy_below)];
        let (slow_disk, slow_copy): (Arc<dyn Backing>, Arc<dyn Backing>) =
            (stalls[0].clone(), stalls[1].clone());
        let watched = Watched::new(slow_disk);
        let mut guest = Rig::new(&*watched, 4);
        let mut comparer = watched.comparer(&slow_copy).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match random.below(6) {
                0 => stalls[random.below(2) as usize].stall(),
                1 => stalls[random.below(2) as usize].release(),
                2 if guest.channel.in_flight() == 0 => {
                    let block = random.below(bytes / BLOCK);
                    if !block.is_multiple_of(8) {
                        guest.view.write(0, &[random.below(256) as u8; 1024]).unwrap();
                        let from = [ioplane_memory::GuestRange { gpa: 0, len: 1024 }];
                        let at = Op::Write { offset: block * BLOCK + 512, from: &from };
                        let _ = guest.submit(&at, Tag(0));
                        guest.push();
                    }
                }
                _ => {
                    if comparer.step(random.below(3) > 0).unwrap() == Step::Clean {
                        break;
                    }
                }
            }
            guest.reap(&mut |_, outcome| outcome.unwrap());
            assert!(Instant::now() < end, "seed {seed}: {comparer:?}");
        }
        stalls.iter().for_each(|stall| stall.release());
        guest.finish();
        let found = comparer.findings();
        let sectors: Vec<u64> = found
            .first
            .iter()
            .flat_map(|range| (range.offset..range.offset + range.len).step_by(512))
            .collect();
        assert_eq!(sectors, planted, "seed {seed}: {found:?}");
        assert_eq!(found.different, 512 * planted.len() as u64, "seed {seed}");
        assert_eq!(found.compared, bytes, "seed {seed}");
    }
}

#[test]
fn a_copy_that_cannot_be_read_is_named_and_a_disk_too() {
    let right = content(1 << 20);
    let bad = || -> Arc<dyn Backing> {
        let failure = Failure { op: OpKind::Read, when: When::Nth(3), errno: libc::EIO, late: true };
        Fail::new(disk(&right), vec![failure])
    };
    let found = compare(&disk(&right), &bad()).unwrap_err();
    assert_eq!(found, CompareFault::Other { offset: 512 << 10, fault: Fault::Io(libc::EIO) });
    let found = compare(&bad(), &disk(&right)).unwrap_err();
    assert_eq!(found, CompareFault::Disk { offset: 512 << 10, fault: Fault::Io(libc::EIO) });
    // An image that is cut off while it is compared.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.img");
    std::fs::write(&path, &right).unwrap();
    let options = FileOptions { read_only: true, raw: Raw::Stated, ..FileOptions::new(&path) };
    let cut: Arc<dyn Backing> = FileBacking::open(options).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(600_000).unwrap();
    let outcome = compare(&disk(&right), &cut);
    match outcome {
        Err(CompareFault::Other { offset, .. }) => assert_eq!(offset, 512 << 10),
        // What is not there reads as zeros, and those differ.
        Ok(found) => assert!(found.different > 400_000, "{found:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_that_is_cancelled_has_nothing_under_way() {
    let right = content(4 << 20);
    let (one, other) = (disk(&right), disk(&right));
    let watched = Watched::new(one);
    let slow = Stall::new(other);
    slow.stall();
    let backing: Arc<dyn Backing> = slow.clone();
    let mut comparer = watched.comparer(&backing).unwrap();
    let mut asked = 0;
    let outcome = comparer.run(Some(4096), &mut |_| {
        asked += 1;
        if asked == 20 {
            slow.release();
        }
        asked > 20
    });
    assert_eq!(outcome, Err(CompareFault::Cancelled));
    drop(comparer);
    assert!(backing.wait_quiet(Instant::now()) && watched.wait_quiet(Instant::now()));
}

/// At least as long as the rate says, however slow the machine is.
#[test]
fn a_rate_is_kept() {
    let right = content(2 << 20);
    let (one, other) = (disk(&right), disk(&right));
    let watched = Watched::new(one);
    let mut comparer = watched.comparer(&other).unwrap();
    let began = Instant::now();
    comparer.run(Some(4 << 20), &mut |_| false).unwrap();
    // All but the first and the last run.
    let least = Duration::from_millis(6 * 1000 / 16);
    assert!(began.elapsed() >= least, "{:?}", began.elapsed());
}

/// The file below is the same, for whoever takes the disk over.
#[test]
fn a_watched_disk_is_what_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = support::image(folder.path(), 1 << 20);
    let file: Arc<dyn Backing> = FileBacking::open(FileOptions::new(&path)).unwrap();
    let watched = Watched::new(file.clone());
    assert_eq!(watched.info(), file.info());
    assert!(watched.file().is_some() == file.file().is_some());
    assert!(watched.resize(2 << 20).is_err());
    // What is below grows: it is not known what would be written there.
    file.resize(2 << 20).unwrap();
    assert_eq!((watched.info().bytes, file.info().bytes), (1 << 20, 2 << 20));
    Rig::new(&*watched, 1).write(4096, &[7; 4096]).unwrap();
    let mut bytes = [0; 4096];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [7; 4096]);
}
