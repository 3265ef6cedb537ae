//! Every backing, with every engine, against a vector of bytes.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::filter::{Delay, Fail, PowerCut, Stall};
use ioplane_storage::*;
use proptest::prelude::*;
use support::{LoopDevice, MEMORY, Mount, Rig, image, skip, ways};

const DISK: u64 = 1 << 20;
const DEPTH: u16 = 8;

#[derive(Debug, Clone)]
enum Do {
    Read {
        offset: u64,
        parts: Vec<GuestRange>,
    },
    Write {
        offset: u64,
        parts: Vec<GuestRange>,
        seed: u8,
    },
    Flush,
    Discard {
        offset: u64,
        len: u64,
    },
    Zero {
        offset: u64,
        len: u64,
        unmap: bool,
    },
    Resize(u64),
    /// Another map of the same memory, as when memory is added.
    Remap,
}

/// Guest ranges of `unit`s in all, cut anywhere, at any address.
fn parts(unit: u64, aligned: bool) -> impl Strategy<Value = Vec<GuestRange>> {
    let cuts = prop::collection::vec(0u32..20_000, 0..9);
    (1u64..=160, cuts, 0u64..4096, any::<bool>()).prop_map(move |(units, mut cuts, shift, contiguous)| {
        let total = (units * unit).min(160 * 512) as u32;
        if aligned {
            cuts.iter_mut().for_each(|cut| *cut = *cut / 512 * 512);
        }
        cuts.retain(|cut| *cut < total);
        cuts.extend([0, total]);
        cuts.sort_unstable();
        let mut gpa = if aligned { shift / 512 * 512 } else { shift };
        cuts.windows(2)
            .map(|cut| {
                let part = GuestRange { gpa, len: cut[1] - cut[0] };
                gpa += u64::from(part.len) + if contiguous { 0 } else { 4096 };
                part
            })
            .collect()
    })
}

fn one(unit: u64) -> impl Strategy<Value = Do> {
    // A little past the end, too.
    let place = (0..DISK / unit + 20).prop_map(move |n| n * unit);
    let len = (0u64..200).prop_map(move |n| n * unit);
    prop_oneof![
        6 => (place.clone(), parts(unit, false)).prop_map(|(offset, parts)| Do::Read { offset, parts }),
        4 => (place.clone(), parts(unit, true)).prop_map(|(offset, parts)| Do::Read { offset, parts }),
        6 => (place.clone(), parts(unit, false), any::<u8>()).prop_map(|(offset, parts, seed)| Do::Write { offset, parts, seed }),
        4 => (place.clone(), parts(unit, true), any::<u8>()).prop_map(|(offset, parts, seed)| Do::Write { offset, parts, seed }),
        1 => Just(Do::Flush),
        1 => (place.clone(), len.clone()).prop_map(|(offset, len)| Do::Discard { offset, len }),
        2 => (place, len, any::<bool>()).prop_map(|(offset, len, unmap)| Do::Zero { offset, len, unmap }),
        1 => (DISK / 8192..=DISK / 4096).prop_map(|n| Do::Resize(n * 4096)),
        1 => Just(Do::Remap),
    ]
}

/// What the disk holds as far as it is said.
struct Model(Vec<Option<u8>>);

fn total(parts: &[GuestRange]) -> u64 {
    parts.iter().map(|part| u64::from(part.len)).sum()
}

fn gather(view: &GuestView, parts: &[GuestRange]) -> Vec<u8> {
    let mut all = Vec::new();
    for part in parts {
        let mut bytes = vec![0; part.len as usize];
        view.read(part.gpa, &mut bytes).unwrap();
        all.extend(bytes);
    }
    all
}

fn check(backing: &dyn Backing, steps: &[Do], fixed: bool) {
    let mut rig = Rig::new(backing, DEPTH);
    let mut bytes = backing.info().bytes;
    let mut model = Model(vec![Some(0); bytes as usize]);
    for step in steps {
        let span = |offset: u64, len: u64| {
            (offset + len <= bytes).then_some(offset as usize..(offset + len) as usize)
        };
        match step {
            Do::Read { offset, parts } => {
                let outcome = rig.run(&Op::Read { offset: *offset, into: parts });
                let Some(span) = span(*offset, total(parts)) else {
                    assert_eq!(outcome, Err(Fault::BeyondEnd), "{step:?}");
                    continue;
                };
                assert_eq!(outcome, Ok(()), "{step:?}");
                for (index, (want, is)) in model.0[span].iter().zip(gather(&rig.view, parts)).enumerate() {
                    assert!(
                        want.is_none_or(|want| want == is),
                        "byte {index} of {step:?}: {is} instead of {want:?}"
                    );
                }
            }
            Do::Write { offset, parts, seed } => {
                let pattern: Vec<u8> = (0..MEMORY).map(|n| (n as u8).wrapping_mul(31) ^ seed).collect();
                rig.view.write(0, &pattern).unwrap();
                let outcome = rig.run(&Op::Write { offset: *offset, from: parts });
                let Some(span) = span(*offset, total(parts)) else {
                    assert_eq!(outcome, Err(Fault::BeyondEnd), "{step:?}");
                    continue;
                };
                assert_eq!(outcome, Ok(()), "{step:?}");
                for (is, byte) in model.0[span].iter_mut().zip(gather(&rig.view, parts)) {
                    *is = Some(byte);
                }
            }
            Do::Flush => assert_eq!(rig.run(&Op::Flush), Ok(())),
            Do::Discard { offset, len } => {
                let outcome = rig.run(&Op::Discard { offset: *offset, len: *len });
                match span(*offset, *len) {
                    None => assert_eq!(outcome, Err(Fault::BeyondEnd), "{step:?}"),
                    Some(span) => {
                        assert_eq!(outcome, Ok(()), "{step:?}");
                        model.0[span].fill(None);
                    }
                }
            }
            Do::Zero { offset, len, unmap } => {
                let outcome = rig.run(&Op::WriteZeroes { offset: *offset, len: *len, unmap: *unmap });
                match span(*offset, *len) {
                    None => assert_eq!(outcome, Err(Fault::BeyondEnd), "{step:?}"),
                    Some(span) => {
                        assert_eq!(outcome, Ok(()), "{step:?}");
                        model.0[span].fill(Some(0));
                    }
                }
            }
            Do::Resize(to) if !fixed => {
                backing.resize(*to).unwrap();
                assert_eq!(backing.info().bytes, *to);
                bytes = *to;
                model.0.resize(*to as usize, Some(0));
            }
            Do::Resize(_) => {}
            Do::Remap => {
                let regions = rig.view.map().regions().to_vec();
                rig.view.set_map(Arc::new(GuestMap::new(regions).unwrap()));
            }
        }
    }
}

fn run(name: &str, unit: u64, fixed: bool, make: &dyn Fn() -> Arc<dyn Backing>) {
    let config = ProptestConfig {
        cases: 24,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    };
    let result = proptest::test_runner::TestRunner::new(config).run(
        &prop::collection::vec(one(unit), 1..50),
        |steps| {
            check(&*make(), &steps, fixed);
            Ok(())
        },
    );
    if let Err(e) = result {
        panic!("{name}: {e}");
    }
}

fn files(folder: &Path, unit_direct: u64) {
    for (name, options) in ways(&folder.join("disk.img")) {
        let unit = if options.direct == Direct::On { unit_direct } else { 1 };
        run(&format!("{name} in {}", folder.display()), unit, false, &|| {
            let _ = std::fs::remove_file(folder.join("disk.img"));
            image(folder, DISK);
            FileBacking::open(options.clone()).unwrap()
        });
    }
}

#[test]
fn files_on_a_disk() {
    files(tempfile::tempdir_in("/var/tmp").unwrap().path(), 512);
}

#[test]
fn files_in_memory() {
    files(tempfile::tempdir_in("/dev/shm").unwrap().path(), 512);
}

#[test]
fn files_on_a_disk_with_large_sectors() {
    let Some(mount) = Mount::ext4(32 << 20, 4096) else { return skip("no loop devices, or not root") };
    let path = image(&mount.path, DISK);
    // 512 bytes is what a guest counts in: not with O_DIRECT here.
    assert!(!FileBacking::open(FileOptions::new(&path)).unwrap().is_direct());
    let refused = FileBacking::open(FileOptions { direct: Direct::On, ..FileOptions::new(&path) });
    assert!(refused.unwrap_err().to_string().contains("logical_block"));
    for (name, options) in ways(&path) {
        let options = FileOptions { logical_block: Some(4096), ..options };
        run(&name, 4096, false, &|| {
            let _ = std::fs::remove_file(&path);
            image(&mount.path, DISK);
            FileBacking::open(options.clone()).unwrap()
        });
    }
}

#[test]
fn block_devices() {
    for sector in [512, 4096] {
        let Some(device) = LoopDevice::new(DISK, sector) else { return skip("no loop devices, or not root") };
        for (name, options) in ways(Path::new(&device.path)) {
            let backing = FileBacking::open(options.clone()).unwrap();
            let info = backing.info();
            assert_eq!((info.bytes, info.logical_block), (DISK, sector));
            assert!(matches!(backing.resize(DISK * 2), Err(StorageError::Size { .. })));
            drop(backing);
            run(&format!("{name} {sector}"), u64::from(sector), true, &|| {
                let backing = FileBacking::open(options.clone()).unwrap();
                let zero = Op::WriteZeroes { offset: 0, len: DISK, unmap: false };
                assert_eq!(Rig::new(&*backing, 1).run(&zero), Ok(()));
                backing
            });
        }
    }
}

#[test]
fn memory_and_filters() {
    let memory = || MemoryBacking::new(DISK).unwrap();
    run("memory", 1, false, &|| memory());
    run("delay", 1, false, &|| Delay::new(memory(), Duration::from_micros(20)));
    run("stall", 1, false, &|| Stall::new(memory()));
    run("fail", 1, false, &|| Fail::new(memory(), Vec::new()));
    run("power cut", 1, false, &|| PowerCut::new(memory()).unwrap());
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    run("delayed file", 512, false, &|| {
        let _ = std::fs::remove_file(folder.path().join("disk.img"));
        let file = FileBacking::open(FileOptions::new(image(folder.path(), DISK))).unwrap();
        Delay::new(file, Duration::from_micros(20))
    });
}

/// Many at a time, each sector with its own content, through every kind of address.
#[test]
fn full_depth() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), DISK);
    for (name, options) in ways(&path) {
        let backing = FileBacking::open(options).unwrap();
        let mut rig = Rig::new(&*backing, 64);
        for round in 0..20u64 {
            for crooked in [0, 1] {
                for tag in 0..64u64 {
                    let gpa = tag * 8192 + crooked;
                    rig.view.write(gpa, &[(tag + round) as u8; 4096]).unwrap();
                    let from = [GuestRange { gpa, len: 1000 }, GuestRange { gpa: gpa + 1000, len: 3096 }];
                    let op = Op::Write { offset: tag * 4096, from: &from };
                    assert_eq!(rig.submit(&op, Tag(tag as u16)), Submitted::Pending);
                }
                assert_eq!(rig.channel.in_flight(), 64);
                rig.push();
                let mut ended = rig.finish();
                ended.sort_by_key(|(tag, _)| tag.0);
                let wanted: Vec<_> = (0..64).map(|tag| (Tag(tag), Ok(()))).collect();
                assert_eq!(ended, wanted, "{name}");
            }
            for tag in 0..64u64 {
                let wanted = vec![(tag + round) as u8; 4096];
                assert_eq!(rig.read(tag * 4096, 4096).unwrap(), wanted, "{name} {tag}");
            }
        }
    }
}
