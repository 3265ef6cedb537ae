//! An open image: one open file description, what it can do, and how big it is now.

#![allow(unsafe_code)]
// UNSAFETY: ioctls of block devices that store one number, and one trial read into memory made for it.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use ioplane_device::BlockDevice;
use ioplane_memory::GuestMap;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use serde::{Deserialize, Serialize};

use super::{Direct, FileOptions, ImageFormat, Raw};
use crate::StorageError;
use crate::orphan::OrphanedIo;

const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKPBSZGET: libc::c_ulong = 0x127b;

/// Nothing has been written in this opening. Whoever had it open before may have, and not flushed.
const INHERITED: u8 = 0;
/// The same, and the time of the last write before is durable.
const UNWRITTEN: u8 = 1;
/// Something has been written, and only fdatasync was called since, which leaves the time of a write to the file system (fsync(2)).
const WRITTEN: u8 = 2;
/// The time of one of its writes is durable: later than any from before it was opened.
const DURABLE: u8 = 3;

/// What a full sync found when it began.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteTime(u8);

/// An open image. Everything that may still touch the file holds an `Arc` of it; when the last goes, so do the locks.
///
/// **One open file description, never two.** An image is read and written either with `O_DIRECT` only or through the page
/// cache only, and what `O_DIRECT` does not take (guest addresses that are not aligned) goes through a bounce buffer.
/// Doing the odd transfer through a second, buffered description would lose writes: the page cache holds 4 KiB, so
/// a buffered write of one sector reads the seven beside it, and if a direct write to one of those is in flight, the
/// page is later written back with what it was before. No lock in the kernel spans the two.
#[derive(Debug)]
pub(crate) struct Image {
    pub name: String,
    pub file: File,
    /// A file of zeros, long enough for a sector.
    pub zeros: OwnedFd,
    pub read_only: bool,
    pub direct: bool,
    pub is_device: bool,
    pub logical_block: u32,
    pub physical_block: u32,
    /// What offsets and lengths must be a multiple of, bytes: 1 through the page cache.
    pub offset_align: u32,
    /// Bits that must be clear in guest addresses and in segment lengths of transfers that do not bounce.
    pub memory_mask: usize,
    pub length_mask: usize,
    pub ends_inside_sector: bool,
    pub discards: bool,
    /// The device of a device, and of a file that of its file system.
    pub block_device: BlockDevice,
    bytes: AtomicU64,
    /// The disk was made smaller at some time.
    shrunk: AtomicBool,
    no_punch: AtomicBool,
    no_zero: AtomicBool,
    /// The errno of a sync through the page cache that failed; 0 if none has.
    lost: AtomicI32,
    /// Whether the time at which it was written is durable: [`INHERITED`] to [`DURABLE`].
    write_time: AtomicU8,
    /// Backings and channels that have it, not counting channels that were dropped with I/O in flight.
    pub users: AtomicUsize,
    pub orphans: Arc<OrphanedIo>,
    /// Guest maps that channels no longer use. The control plane drops them, since an I/O core must not unmap.
    pub retired_maps: ArrayQueue<Arc<GuestMap>>,
}

/// Which image one is, whatever its name is: the same after a restart, another one if a file or a device was put in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageId {
    dev: u64,
    ino: u64,
    /// Of a block device, which.
    rdev: u64,
    /// A number of an inode is used again soon; the time at which it was made is not. In ns, 0 where there is none.
    born: i64,
}

impl fmt::Display for ImageId {
    /// Letters, digits and signs that any name may have.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{:x}-{:x}-{:x}", self.dev, self.ino, self.rdev, self.born)
    }
}

impl ImageId {
    /// Of whatever `path` names now, links followed, with its length in bytes: a block device has none here. Opens nothing, but waits for the file system.
    ///
    /// # Errors
    /// Those of statx(2): nothing is there, or the way to it is closed.
    pub fn at(path: &Path) -> io::Result<(ImageId, Option<u64>)> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), wanted)?;
        let is_device = FileType::from_raw_mode(found.stx_mode.into()).is_block_device();
        Ok((ImageId::from_stat(&found), (!is_device).then_some(found.stx_size)))
    }

    pub(super) fn of(file: impl AsFd) -> io::Result<ImageId> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        Ok(ImageId::from_stat(&rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?))
    }

    fn from_stat(found: &rustix::fs::Statx) -> ImageId {
        let seconds = found.stx_btime.tv_sec.saturating_mul(1_000_000_000);
        let born = seconds.saturating_add(i64::from(found.stx_btime.tv_nsec));
        ImageId {
            dev: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            ino: found.stx_ino,
            rdev: rustix::fs::makedev(found.stx_rdev_major, found.stx_rdev_minor),
            born: if found.stx_mask & StatxFlags::BTIME.bits() == 0 { 0 } else { born },
        }
    }
}

/// Bytes and block sizes, as the system says.
struct Shape {
    bytes: u64,
    logical: u32,
    physical: u32,
    /// Alignments of `O_DIRECT`, zero if there is no such thing.
    memory_align: u32,
    offset_align: u32,
}

impl Image {
    /// Opens it, without taking it: the locks come next, then [`Image::measure`] again.
    pub fn open(options: &FileOptions) -> Result<Image, StorageError> {
        let path = &options.path;
        let name = path.display().to_string();
        let os = |doing, source: io::Error| StorageError::Os { image: name.clone(), doing, source };
        let unsuitable = |why: &str| StorageError::Unsuitable { image: name.clone(), why: why.to_owned() };

        let metadata = std::fs::metadata(path).map_err(|e| os("looking for the image", e))?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(unsuitable("neither a file nor a block device: name one of those"));
        }
        let open = |flags: OFlags| -> io::Result<File> {
            let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
            let flags = access | flags | OFlags::CLOEXEC;
            // Without times of access: writing those down can make a read wait for the journal of the file system, on
            // an I/O core. Only the owner of a file may ask for that.
            let quiet = rustix::fs::open(path, flags | OFlags::NOATIME, Mode::empty());
            Ok(quiet.or_else(|_| rustix::fs::open(path, flags, Mode::empty()))?.into())
        };
        let buffered = open(OFlags::empty()).map_err(|e| {
            os("opening the image (may this user read and write it? is it to be read_only?)", e)
        })?;
        let wanted = options.logical_block;
        if wanted.is_some_and(|block| !block.is_power_of_two() || !(512..=4096).contains(&block)) {
            return Err(unsuitable("the logical block must be 512, 1024, 2048 or 4096 bytes"));
        }
        let mut file = buffered;
        let mut direct = false;
        let mut shape = Shape::of(&file, path).map_err(|e| os("asking for the size of the image", e))?;
        // A partition table inside a file counts in 512 bytes, whatever the disk below does; that of a device counts in
        // the blocks of that device.
        let logical = wanted.unwrap_or(if kind.is_block_device() { shape.logical } else { 512 });
        if options.direct != Direct::Off {
            match open(OFlags::DIRECT) {
                Ok(other) => {
                    if shape.offset_align == 0 {
                        shape.probe(&other);
                    }
                    let fits = shape.offset_align != 0 && shape.offset_align <= logical;
                    if fits {
                        (file, direct) = (other, true);
                    } else if options.direct == Direct::On {
                        return Err(unsuitable(&format!(
                            "direct = on needs blocks of {} bytes here, and the disk has {logical}: set logical_block to \
                             that (a guest's partition table must then count in it), or direct = auto",
                            shape.offset_align.max(4096)
                        )));
                    }
                }
                Err(source) if options.direct == Direct::On => {
                    return Err(os(
                        "opening the image with O_DIRECT (its file system may lack it: direct = auto)",
                        source,
                    ));
                }
                Err(_) => {}
            }
        }
        let physical = options.physical_block.unwrap_or(shape.physical).max(logical);
        if !physical.is_power_of_two() {
            return Err(unsuitable("the physical block must be a power of two"));
        }
        let lies = file.metadata().map_err(|e| os("looking for the device of the image", e))?;
        let block_device = BlockDevice(if kind.is_block_device() { lies.rdev() } else { lies.dev() });
        let zeros = zeros().map_err(|e| os("making a file of zeros in memory", e))?;
        let mut image = Image {
            name: name.clone(),
            file,
            zeros,
            read_only: options.read_only,
            direct,
            is_device: kind.is_block_device(),
            logical_block: logical,
            physical_block: physical,
            offset_align: if direct { shape.offset_align } else { 1 },
            memory_mask: if direct { shape.memory_align.max(4) as usize - 1 } else { 0 },
            length_mask: if direct { shape.offset_align as usize - 1 } else { 0 },
            ends_inside_sector: false,
            discards: false,
            block_device,
            bytes: AtomicU64::new(0),
            shrunk: AtomicBool::new(false),
            no_punch: AtomicBool::new(false),
            no_zero: AtomicBool::new(false),
            lost: AtomicI32::new(0),
            write_time: AtomicU8::new(INHERITED),
            users: AtomicUsize::new(0),
            orphans: Arc::new(OrphanedIo::default()),
            retired_maps: ArrayQueue::new(64),
        };
        image.measure()?;
        Ok(image)
    }

    /// Takes the size from the file: once open, and once more when the image is ours, for somebody may have written.
    pub fn measure(&mut self) -> Result<(), StorageError> {
        let os = |doing, source| StorageError::Os { image: self.name.clone(), doing, source };
        let bytes = length(&self.file).map_err(|e| os("asking for the size of the image", e))?;
        self.ends_inside_sector = !bytes.is_multiple_of(512);
        if bytes == 0 {
            return Err(StorageError::Size {
                image: self.name.clone(),
                bytes,
                why: "give it one: truncate -s 10G IMAGE".into(),
            });
        }
        self.bytes.store(bytes.next_multiple_of(512), Ordering::Release);
        Ok(())
    }

    /// Refuses an image that may be of another format than raw, unless it is known to be. Only once the image is ours.
    pub fn check_raw(&self, raw: Raw) -> Result<(), StorageError> {
        let known = match raw {
            Raw::Stated => true,
            Raw::Remembered(id) => ImageId::of(self).is_ok_and(|ours| ours == id),
            Raw::Probed => false,
        };
        if known {
            return Ok(());
        }
        let read = length(&self.file).and_then(|bytes| ImageFormat::read(&self.file, bytes));
        match read {
            Ok(None) => Ok(()),
            Ok(Some(format)) => Err(StorageError::NotRaw { image: self.name.clone(), format }),
            Err(source) => {
                let doing = "looking for the format of the image (format = raw does without)";
                Err(StorageError::Os { image: self.name.clone(), doing, source })
            }
        }
    }

    /// Asks whether free space can be given back. Only once the image is ours.
    pub fn probe_discard(&mut self) {
        if self.read_only {
            return;
        }
        self.discards = if self.is_device {
            discard_of_device(&self.file)
        } else {
            let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, flags, self.bytes().next_multiple_of(4096), 4096).is_ok()
        };
        self.no_punch.store(!self.discards && !self.is_device, Ordering::Relaxed);
    }

    /// Size of the disk now.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Changes the size: shrinking holds for the channels before the file is cut, growing after it is there.
    pub fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        let size = |why: String| StorageError::Size { image: self.name.clone(), bytes, why };
        let os = |doing, source| StorageError::Os { image: self.name.clone(), doing, source };
        let unit = u64::from(self.logical_block);
        if bytes == 0 || !bytes.is_multiple_of(unit) {
            return Err(size(format!("it must be a multiple of {unit}, and not zero")));
        }
        let there = || length(&self.file).map_err(|e| os("asking for the size of the image", e));
        if self.read_only {
            // Somebody else may have made it larger.
            if there()? < bytes || bytes < self.bytes() {
                return Err(size("the disk is read-only".into()));
            }
            self.bytes.store(bytes, Ordering::Release);
            return Ok(());
        }
        if self.is_device {
            let most = length(&self.file).map_err(|e| os("asking for the size of the device", e))?;
            if bytes > most {
                return Err(size(format!("the device has {most}: grow that first")));
            }
            self.bytes.store(bytes, Ordering::Release);
            return Ok(());
        }
        let before = self.bytes();
        if bytes >= before {
            let there = there()?;
            if there > bytes {
                return Err(size(format!("somebody else has made the file larger: it has {there} bytes")));
            }
            if there == bytes {
                self.bytes.store(bytes, Ordering::Release);
                return Ok(());
            }
        }
        if bytes < before {
            self.shrunk.store(true, Ordering::Release);
            self.bytes.store(bytes, Ordering::Release);
        }
        if let Err(source) = self.file.set_len(bytes) {
            self.bytes.store(before, Ordering::Release);
            return Err(os("changing the size of the image", source));
        }
        self.bytes.store(bytes, Ordering::Release);
        Ok(())
    }

    #[inline]
    pub fn can_punch(&self) -> bool {
        !self.no_punch.load(Ordering::Relaxed)
    }

    pub fn cannot_punch(&self) {
        self.no_punch.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub fn can_zero(&self) -> bool {
        !self.no_zero.load(Ordering::Relaxed)
    }

    pub fn cannot_zero(&self) {
        self.no_zero.store(true, Ordering::Relaxed);
    }

    /// A sync has failed. Through the page cache Linux takes the pages that it could not write for clean, and the next sync
    /// succeeds without them: from then on no flush of this opening may.
    #[cold]
    pub fn sync_failed(&self, errno: i32) {
        if !self.direct {
            self.lost.store(errno, Ordering::Relaxed);
        }
    }

    /// Why no flush can be promised any more.
    #[inline]
    pub fn lost(&self) -> Option<i32> {
        let errno = self.lost.load(Ordering::Relaxed);
        (errno != 0).then_some(errno)
    }

    /// A write has succeeded.
    #[inline]
    pub fn has_written(&self) {
        if self.write_time.load(Ordering::Relaxed) < WRITTEN {
            let _ = self.write_time.fetch_max(WRITTEN, Ordering::Relaxed);
        }
    }

    /// Whether the next sync has to be a full one. The first is, and the first behind a write: an exporter tells readers by the time of the last write what content an image
    /// has, and a power cut must not bring the time back with which they were told of another one.
    #[inline]
    pub fn full_sync(&self) -> Option<WriteTime> {
        let now = self.write_time.load(Ordering::Relaxed);
        matches!(now, INHERITED | WRITTEN).then_some(WriteTime(now))
    }

    /// A full sync has succeeded that began with what [`Image::full_sync`] said.
    pub fn has_synced_fully(&self, WriteTime(began): WriteTime) {
        // If something was written meanwhile its time may not be durable.
        let ended = if began == INHERITED { UNWRITTEN } else { DURABLE };
        let _ = self.write_time.compare_exchange(began, ended, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Unmaps guest memory that channels no longer use. Control plane.
    pub fn drop_retired_maps(&self) {
        while self.retired_maps.pop().is_some() {}
    }
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // A write that was under way while the disk was made smaller may have made the file longer again: now that the
        // last has ended, cut it. Never otherwise: an image that was only looked at belongs to somebody else.
        let (bytes, shrunk) = (self.bytes(), self.shrunk.load(Ordering::Acquire));
        if shrunk && length(&self.file).is_ok_and(|len| len > bytes) {
            let _ = self.file.set_len(bytes);
        }
    }
}

impl Shape {
    fn of(file: &File, path: &Path) -> io::Result<Shape> {
        let metadata = file.metadata()?;
        let mut shape =
            Shape { bytes: length(file)?, logical: 512, physical: 4096, memory_align: 0, offset_align: 0 };
        if metadata.file_type().is_block_device() {
            let logical = number(file, BLKSSZGET).unwrap_or(512);
            shape.physical = number(file, BLKPBSZGET).unwrap_or(logical).clamp(512, 1 << 20);
            (shape.memory_align, shape.offset_align) = (logical, logical);
            if !logical.is_power_of_two() || !(512..=4096).contains(&logical) {
                return Err(io::Error::other(format!("blocks of {logical} bytes at {}", path.display())));
            }
            shape.logical = logical;
        } else {
            let block = u32::try_from(metadata.blksize()).unwrap_or(4096).clamp(512, 4096);
            shape.physical = if block.is_power_of_two() { block } else { 4096 };
        }
        if let Ok(found) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
            && found.stx_mask & StatxFlags::DIOALIGN.bits() != 0
            && found.stx_dio_offset_align != 0
        {
            shape.offset_align = found.stx_dio_offset_align;
            shape.memory_align = found.stx_dio_mem_align;
        }
        Ok(shape)
    }

    /// Where statx does not tell (before Linux 6.1): the smallest read that works. A wrong guess of the memory's
    /// alignment costs a second try through the bounce buffer, no more.
    fn probe(&mut self, file: &File) {
        #[repr(align(4096))]
        struct Block([u8; 4096]);
        let mut block = Box::new(Block([0; 4096]));
        for align in [512u32, 4096] {
            if self.bytes >= u64::from(align) && file.read_at(&mut block.0[..align as usize], 0).is_ok() {
                (self.memory_align, self.offset_align) = (align, align);
                return;
            }
        }
    }
}

/// Bytes of a file or a block device.
fn length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_block_device() {
        return Ok(metadata.len());
    }
    let mut bytes = 0u64;
    // SAFETY: BLKGETSIZE64 stores one u64.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &mut bytes) } {
        0 => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A number that an ioctl stores as an int.
fn number(file: &File, request: libc::c_ulong) -> Option<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: the requests used here store one int.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) };
    (done == 0).then(|| u32::try_from(value).ok()).flatten()
}

fn discard_of_device(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    ["queue", "../queue"].iter().any(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/discard_max_bytes");
        std::fs::read_to_string(path).is_ok_and(|text| text.trim() != "0")
    })
}

fn zeros() -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("zeros", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, 4096)?;
    Ok(file)
}
