//! What content an image has that nobody may write while it is published: who comes back to another one has read what is not there any more
//! (docs/decisions/0052-claims.md).
//!
//! ```text
//!   file      mTIME     when it was last written, in ns; it is the same after a restart, and whatever the clock does a write changes it
//!   device    wSUM      of the boot, which disk of it that is, and the sectors that were written to that, by whomever: a device does not say when
//!                       it was written
//!   others    rRANDOM   nobody knows: another one after each start
//! ```

use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::random::random;
use crate::ledger;
use crate::refusal::Refusal;
use crate::small_file::hash;

/// What an image has.
pub struct Content {
    /// What clients are told.
    pub name: String,
    /// Of a file, when it was last written, in ns since 1970.
    pub written: Option<i64>,
}

impl Content {
    fn of_name(name: String) -> Content {
        Content { name, written: None }
    }
}

/// Of an image that is open, and that everybody who heeds locks is kept from writing. What it says is durable. Blocks.
pub fn of(image: BorrowedFd<'_>) -> Result<Content, Refusal> {
    let wrong = |error: std::io::Error| {
        Refusal::failed(
            format!("asking when the image was written: {error}"),
            "does its disk work, and is /proc mounted?",
        )
    };
    // What is on its way to a device counts when it has come. Of a file the time would otherwise be an earlier one after a power cut, perhaps with the later
    // content: fdatasync, by which its writers may have made that durable, leaves it out.
    let synced = ledger::beside(image).and_then(|own| Ok(rustix::fs::fsync(own)?));
    let stat = rustix::fs::fstat(image).map_err(|error| wrong(error.into()))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    match synced.map_err(|error| (Errno::from_io_error(&error), error)) {
        Ok(()) => {}
        // A file system that nobody writes to (iso9660, squashfs) has no fsync.
        Err((Some(Errno::INVAL | Errno::ROFS), _)) if kind == FileType::RegularFile => {}
        Err((_, error)) => return Err(wrong(error)),
    }
    match kind {
        FileType::RegularFile => {
            let written = written_at(&stat);
            Ok(Content { name: format!("m{written:x}"), written: Some(written) })
        }
        FileType::BlockDevice => {
            let number = format!("{}:{}", rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            match written_to(&Path::new("/sys/dev/block").join(number)) {
                Some(counts) => Ok(Content::of_name(format!(
                    "w{}",
                    hash(&[random("boot_id")?.as_bytes(), counts.as_bytes()], 8)
                ))),
                None => unknown(),
            }
        }
        _ => unknown(),
    }
}

fn unknown() -> Result<Content, Refusal> {
    Ok(Content::of_name(format!("r{}", hash(&[random("uuid")?.as_bytes()], 8))))
}

/// In ns since 1970.
pub fn written_at(stat: &Stat) -> i64 {
    let seconds = stat.st_mtime.saturating_mul(1_000_000_000);
    seconds.saturating_add(i64::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

/// What the kernel has counted of a device's writes and discards in this boot, if it counts them, and of which device: one that is made anew, as a logical volume
/// that is activated again, begins at 0, and would come by the same counts.
///
/// `diskseq` is another one for each disk that the kernel makes, since Linux 5.15 (Documentation/ABI/stable/sysfs-block). A partition has that of its disk, which stays
/// when a partition is made anew; the directory that sysfs makes for it has another inode then (fs/kernfs/dir.c gives numbers in a circle of 32 bits, and counts the rounds).
fn written_to(device: &Path) -> Option<String> {
    let read = |file: &str| {
        // Of a partition this is its disk's.
        let found = [device.join(file), device.join("..").join(file)];
        found.iter().find_map(|file| std::fs::read_to_string(file).ok())
    };
    let (counts, disk) = (read("queue/iostats")?, read("diskseq")?);
    let inode = std::fs::metadata(device).ok()?.ino();
    let stat = std::fs::read_to_string(device.join("stat")).ok()?;
    let counted = (counts.trim() == "1").then(|| counted(&stat)).flatten()?;
    Some(format!("{} {inode} {counted}", disk.trim()))
}

/// Of the fields of `/sys/block/DEVICE/stat` (Documentation/block/stat.rst) the sectors that were written, and those that were discarded. Not how many
/// requests those were: a flush may be one of them.
fn counted(stat: &str) -> Option<String> {
    let fields: Vec<&str> = stat.split_whitespace().collect();
    // Before Linux 4.18 discards count as writes.
    Some(format!("{} {}", fields.get(6)?, fields.get(13).unwrap_or(&"-")))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn an_image_that_was_written_has_another_content_and_nothing_else_changes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, [0; 4096]).unwrap();
        let image = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let content = || of(image.as_fd()).unwrap().name;
        let before = content();
        rustix::fs::fchmod(&image, 0o400.into()).unwrap();
        image.read_at(&mut [0; 512], 0).unwrap();
        std::fs::rename(&path, folder.path().join("other")).unwrap();
        assert_eq!(content(), before);
        // The kernel's time has steps of some ms.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while content() == before {
            assert!(std::time::Instant::now() < end, "a write does not show");
            image.write_at(&[0; 512], 0).unwrap();
        }
        let [a, b] = [(); 2].map(|()| unknown().unwrap().name);
        assert!(a != b && a.len() <= 17 && before.len() <= 17, "{a} {before}");
    }

    /// What sysfs says of a device, of a disk or of a partition of one.
    #[test]
    fn a_device_that_is_made_anew_has_another_content_with_the_same_counts() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("dm-0");
        let stat = "7 0 7 7 7 3 80 9 0 11 12 1 0 8 0 7 0\n";
        let make = |device: &Path| {
            std::fs::create_dir_all(device).unwrap();
            std::fs::write(device.join("stat"), stat).unwrap();
        };
        make(&disk);
        assert_eq!(written_to(&disk), None, "it says nothing of its counts");
        std::fs::create_dir(disk.join("queue")).unwrap();
        std::fs::write(disk.join("queue/iostats"), "1\n").unwrap();
        assert_eq!(written_to(&disk), None, "nobody knows which disk it is");
        let is = |sequence: &str| std::fs::write(disk.join("diskseq"), sequence).unwrap();
        is("9\n");
        let before = written_to(&disk).unwrap();
        assert_eq!(written_to(&disk).as_ref(), Some(&before));
        is("10\n");
        assert_ne!(written_to(&disk), Some(before));
        let partition = disk.join("dm-0p1");
        make(&partition);
        let before = written_to(&partition).unwrap();
        // The old one is there meanwhile, so that its inode is not used again at once.
        std::fs::rename(&partition, folder.path().join("old")).unwrap();
        make(&partition);
        assert_ne!(written_to(&partition), Some(before));
        std::fs::write(disk.join("queue/iostats"), "0\n").unwrap();
        assert_eq!((written_to(&disk), written_to(&partition)), (None, None));
    }

    #[test]
    fn the_counts_of_a_device_are_those_of_what_was_written() {
        let of = |sectors: u64, others: u64| {
            counted(&format!("  {others} 0 7 7 {others} 3 {sectors} 9 0 11 12 1 0 8 0 {others} 0\n"))
        };
        assert_eq!(of(80, 1).as_deref(), Some("80 8"));
        assert_eq!(of(80, 1), of(80, 99));
        assert_ne!(of(80, 1), of(81, 1));
        assert_eq!(counted("1 2 3 4 5 6 7 8 9 10 11\n").as_deref(), Some("7 -"));
        assert_eq!(counted("1 2 3"), None);
    }
}
