//! A backing that one process hands to another: here both are this one, which tells their locks apart as two would.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ioplane_storage::{Backing, FileBacking, FileOptions, MemoryBacking, StorageError};

fn file_of(backing: &dyn Backing) -> OwnedFd {
    backing.file().unwrap().try_clone_to_owned().unwrap()
}

fn image(path: &Path) -> FileOptions {
    std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
    FileOptions {
        timeout: Duration::from_millis(100),
        owner: Some("me".to_owned()),
        ..FileOptions::new(path)
    }
}

fn quiet(backing: &dyn Backing, within: u64) -> bool {
    backing.wait_quiet(Instant::now() + Duration::from_millis(within))
}

#[test]
fn nobody_comes_between_the_old_holder_and_the_new() {
    let folder = tempfile::tempdir().unwrap();
    for read_only in [false, true] {
        let path = folder.path().join(format!("{read_only}.img"));
        let options = FileOptions { read_only, ..image(&path) };
        let old = FileBacking::open(options.clone()).unwrap();
        let new = FileBacking::adopt(&options, file_of(&*old)).unwrap();
        assert_eq!((new.info().name, new.info().bytes), (path.display().to_string(), 1 << 20));
        let writer = FileOptions { read_only: false, ..options.clone() };
        assert!(FileBacking::open(writer.clone()).is_err(), "while both have it");
        assert!(!quiet(&*new, 50), "the old one could still write");
        drop(old);
        assert!(FileBacking::open(writer.clone()).is_err(), "the new one has it");
        assert!(quiet(&*new, 5000), "the old one is gone");
        assert!(FileBacking::open(writer.clone()).is_err(), "the new one has it all");
        drop(new);
        FileBacking::open(writer).unwrap();
    }
}

#[test]
fn an_image_that_was_renamed_since_is_the_one_that_is_adopted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    let options = image(&path);
    let old = FileBacking::open(options.clone()).unwrap();
    std::fs::rename(&path, folder.path().join("elsewhere.img")).unwrap();
    std::fs::write(&path, vec![1; 512]).unwrap();
    let new = FileBacking::adopt(&options, file_of(&*old)).unwrap();
    assert_eq!(new.info().bytes, 1 << 20);
}

#[test]
fn whoever_says_that_all_is_quiet_is_believed() {
    let folder = tempfile::tempdir().unwrap();
    let options = image(&folder.path().join("disk.img"));
    let old = FileBacking::open(options.clone()).unwrap();
    let new = FileBacking::adopt(&options, file_of(&*old)).unwrap();
    new.trust_quiet();
    assert!(quiet(&*new, 0));
}

#[test]
fn a_disk_in_memory_is_the_same_bytes() {
    let old = MemoryBacking::new(4096).unwrap();
    let new = MemoryBacking::adopt(file_of(&*old), 4096).unwrap();
    assert_eq!(new.info().bytes, 4096);
    // With the room to grow that the old one had.
    new.resize(1 << 30).unwrap();
    let refused = MemoryBacking::adopt(file_of(&*old), 1 << 60).unwrap_err();
    assert!(matches!(refused, StorageError::Size { .. }), "{refused}");
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    assert!(MemoryBacking::adopt(file, 512).is_err());
}
