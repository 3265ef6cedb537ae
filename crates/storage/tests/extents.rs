//! What backings know of holes.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ioplane_storage::{Backing, DiskExtent, FileBacking, FileOptions, MemoryBacking, Raw};

fn open(path: &Path, read_only: bool) -> Arc<FileBacking> {
    FileBacking::open(FileOptions { raw: Raw::Stated, read_only, ..FileOptions::new(path) }).unwrap()
}

/// Neighbours that are alike are joined.
fn extents(backing: &dyn Backing, offset: u64, len: u64) -> Vec<(u64, bool)> {
    let mut found: Vec<(u64, bool)> = Vec::new();
    backing.extents(offset, len, &mut |DiskExtent { bytes, is_hole }| {
        match found.last_mut() {
            Some(last) if last.1 == is_hole => last.0 += bytes,
            _ => found.push((bytes, is_hole)),
        }
        true
    });
    assert_eq!(found.iter().map(|(bytes, _)| bytes).sum::<u64>(), len);
    found
}

fn file(folder: &Path, bytes: u64) -> std::path::PathBuf {
    let path = folder.join("image");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

#[test]
fn an_image_has_holes_and_its_end_is_one() {
    let folder = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = file(folder.path(), (1 << 20) + 100);
    let image = std::fs::File::options().write(true).open(&path).unwrap();
    image.write_all_at(&[1; 4096], 64 << 10).unwrap();
    let backing = open(&path, true);
    let disk = backing.info().bytes;
    assert_eq!(disk, (1 << 20) + 512, "its last sector is not whole");
    let rest = disk - (68 << 10);
    assert_eq!(extents(&*backing, 0, disk), [(64 << 10, true), (4096, false), (rest, true)]);
    assert_eq!(extents(&*backing, 65 << 10, 1024), [(1024, false)]);
    assert_eq!(extents(&*backing, disk - 512, 512), [(512, true)]);
    // Whoever has had enough is told no more.
    let mut told = 0;
    backing.extents(0, disk, &mut |_| {
        told += 1;
        false
    });
    assert_eq!(told, 1);
}

/// Reads fail there: nobody may take it for zeros.
#[test]
fn what_was_cut_off_an_image_is_no_hole() {
    let folder = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = file(folder.path(), 1 << 20);
    let backing = open(&path, true);
    assert_eq!(extents(&*backing, 0, 1 << 20), [(1 << 20, true)]);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(512 << 10).unwrap();
    assert!(extents(&*backing, 0, 1 << 20).last().is_some_and(|(_, is_hole)| !is_hole));
    assert_eq!(extents(&*backing, 768 << 10, 4096), [(4096, false)]);
}

#[test]
fn memory_that_was_never_written_is_a_hole() {
    let backing = MemoryBacking::new(1 << 20).unwrap();
    assert_eq!(extents(&*backing, 0, 1 << 20), [(1 << 20, true)]);
    backing.resize(2 << 20).unwrap();
    assert_eq!(extents(&*backing, 4096, (2 << 20) - 4096), [((2 << 20) - 4096, true)]);
}
