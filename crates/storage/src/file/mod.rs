//! A raw image: a file or a block device.

#![expect(clippy::disallowed_types, reason = "the list of images open in this process: control plane")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::channel::{Backing, BackingInfo, IoChannel, StorageError};
use crate::extents::{DiskExtent, FileExtents};
use crate::lock::{self, Claim, Refusal};

mod arena;
mod calls;
mod fence;
mod format;
mod image;
mod job;
mod ring;
mod threads;

use fence::Fence;
use image::Image;

pub use format::ImageFormat;
pub use image::ImageId;

/// Whether to go past the page cache of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// Where the image can be addressed in blocks of the disk's own size.
    #[default]
    Auto,
    /// Always; refused where that cannot be.
    On,
    /// Never.
    Off,
}

/// Who does the I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The kernel, by io_uring.
    IoUring,
    /// Threads of ours.
    Threads,
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Engine::IoUring => "io_uring",
            Engine::Threads => "threads",
        })
    }
}

/// Who shall do the I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// io_uring if this process may have a ring.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Threads.
    Threads,
}

/// How it is known that an image is raw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Raw {
    /// It is not: an image that looks like one of another format is refused, see [`ImageFormat`].
    #[default]
    Probed,
    /// This image was served as raw before, and a guest may have written anything since; another one in its place is probed.
    Remembered(ImageId),
    /// Somebody says so: its content is not looked at.
    Stated,
}

/// How to open an image.
#[derive(Debug, Clone)]
pub struct FileOptions {
    /// The image: a file or a block device.
    pub path: PathBuf,
    /// Writes are refused, and others may read it too.
    pub read_only: bool,
    /// How it is known that it is raw.
    pub raw: Raw,
    /// Past the page cache or through it.
    pub direct: Direct,
    /// Who does the I/O.
    pub engine: EngineChoice,
    /// Bytes, 512 to 4096, instead of what the image suggests: 512 for a file, the device's own for a device.
    pub logical_block: Option<u32>,
    /// Bytes, instead of what the file system or the device says.
    pub physical_block: Option<u32>,
    /// How long to wait for I/O that a dead process has left in flight.
    pub timeout: Duration,
    /// Whose disk this is, the same after a restart and nobody else's. Needed by read-only disks for the fence: their image
    /// may have many readers, and only the reads of this owner's dead daemon matter.
    pub owner: Option<String>,
}

impl FileOptions {
    /// A writable disk, everything else automatic, a timeout of a minute.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileOptions {
            path: path.into(),
            read_only: false,
            raw: Raw::default(),
            direct: Direct::default(),
            engine: EngineChoice::default(),
            logical_block: None,
            physical_block: None,
            timeout: Duration::from_secs(60),
            owner: None,
        }
    }
}

/// What [`FileBacking::open_watched`] reports while it waits for an image to become free.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    /// Since when.
    pub waited: Duration,
    /// Until when at most.
    pub timeout: Duration,
}

/// An image that this process has taken for itself. It is read and written either with `O_DIRECT` only or through the page cache
/// only, never by turns.
#[derive(Debug)]
pub struct FileBacking {
    image: Arc<Image>,
    extents: FileExtents,
    engine: Engine,
    why_threads: Option<String>,
    /// Up until the process that had the image before has closed it.
    fence: Option<Arc<Fence>>,
}

/// Every image open in this process, to tell one that a backing uses from one that only orphaned I/O keeps open.
static OPEN: Mutex<Vec<Weak<Image>>> = Mutex::new(Vec::new());

impl FileBacking {
    /// Opens the image and takes its locks. Blocks: while a process that has died still has I/O on its way to this image (at
    /// most [`FileOptions::timeout`], then [`StorageError::NotQuiet`]). When it returns, no I/O of an earlier holder
    /// will reach the image any more. If somebody alive has it, [`StorageError::InUse`] with the name.
    pub fn open(options: FileOptions) -> Result<Arc<Self>, StorageError> {
        Self::open_watched(options, &mut |_| {})
    }

    /// As [`FileBacking::open`]; calls `progress` about every 50 ms while it waits.
    pub fn open_watched(
        options: FileOptions,
        progress: &mut dyn FnMut(Waiting),
    ) -> Result<Arc<Self>, StorageError> {
        let image = Image::open(&options)?;
        let name = image.name.clone();
        let timeout = options.timeout;
        let claim = Claim::disk(options.read_only, options.owner.as_deref());
        let alive = || in_use_here(&image);
        let mut waiting = |waited| progress(Waiting { waited, timeout });
        match lock::take(image.as_fd(), &claim, timeout, &alive, &mut waiting) {
            Ok(()) => {}
            Err(Refusal::Held(holder)) => return Err(StorageError::InUse { image: name, holder }),
            Err(Refusal::IoInFlight) => {
                return Err(StorageError::NotQuiet { image: name, seconds: timeout.as_secs() });
            }
            Err(Refusal::Os(source)) => {
                let doing = "locking the image (does its file system have locks?)";
                return Err(StorageError::Os { image: name, doing, source });
            }
        }
        // Not before it is ours: somebody may have written.
        image.check_raw(options.raw)?;
        Self::begin(image, options.engine, None)
    }

    /// Opens the image that another process of ours has open as `file`, beside it: the name may mean another file by now. It is
    /// served as raw already, so it is not probed. The
    /// byte locks are taken at once, so that no third process gets the image; the rest of the claim when the other process has closed
    /// the image and the last of its I/O has ended, which [`Backing::wait_quiet`] waits for. `options` must say the
    /// same as the other's did.
    pub fn adopt(options: &FileOptions, file: OwnedFd) -> Result<Arc<Self>, StorageError> {
        let beside =
            FileOptions { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), ..options.clone() };
        let mut image = Image::open(&beside)?;
        image.name = options.path.display().to_string();
        let claim = Claim::disk(options.read_only, options.owner.as_deref());
        lock::join(image.as_fd(), &claim).map_err(|source| {
            let doing = "locking the image beside the daemon that has it";
            StorageError::Os { image: image.name.clone(), doing, source }
        })?;
        Self::begin(image, options.engine, Some(claim))
    }

    /// An image that is ours; of one that was joined, `joined` says what is still to be inherited.
    fn begin(
        mut image: Image,
        engine: EngineChoice,
        joined: Option<Claim>,
    ) -> Result<Arc<Self>, StorageError> {
        let name = image.name.clone();
        image.measure()?;
        image.probe_discard();
        let (engine, why_threads) = match engine {
            EngineChoice::Threads => (Engine::Threads, None),
            choice => match ring::probe() {
                Ok(()) => (Engine::IoUring, None),
                Err(source) if choice == EngineChoice::IoUring => {
                    let doing = "making an io_uring (forbidden here? engine = auto takes threads)";
                    return Err(StorageError::Os { image: name, doing, source });
                }
                Err(e) => (Engine::Threads, Some(e.to_string())),
            },
        };
        image.users.store(1, Ordering::Release);
        let image = Arc::new(image);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&image));
        drop(open);
        tracing::debug!(image = name, %engine, direct = image.direct, "image opened");
        let fence = joined.map(|claim| Fence::raise(&image, claim));
        let extents = FileExtents::default();
        Ok(Arc::new(FileBacking { image, extents, engine, why_threads, fence }))
    }

    /// Who does the I/O.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Why it is not io_uring, if that was wanted.
    pub fn why_threads(&self) -> Option<&str> {
        self.why_threads.as_deref()
    }

    /// Which image it is, for [`Raw::Remembered`].
    pub fn id(&self) -> Option<ImageId> {
        ImageId::of(&self.image).ok()
    }

    /// Whether I/O goes past the page cache.
    pub fn is_direct(&self) -> bool {
        self.image.direct
    }
}

/// Whether a backing or a channel of this process has the file of `image`; orphaned I/O does not count.
fn in_use_here(image: &Image) -> bool {
    let identity = |image: &Image| rustix::fs::fstat(image).map(|s| (s.st_dev, s.st_ino)).ok();
    let wanted = identity(image);
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut same = open.iter().filter_map(Weak::upgrade).filter(|other| identity(other) == wanted).peekable();
    // A lock of this process on an image that we do not know is somebody's who is alive: ourselves.
    same.peek().is_none() || same.any(|other| other.users.load(Ordering::Acquire) > 0)
}

impl Backing for FileBacking {
    fn info(&self) -> BackingInfo {
        let image = &self.image;
        image.drop_retired_maps();
        BackingInfo {
            name: image.name.clone(),
            bytes: image.bytes(),
            logical_block: image.logical_block,
            physical_block: image.physical_block,
            read_only: image.read_only,
            volatile_cache: !image.read_only,
            discards: image.discards,
            block_device: Some(image.block_device),
        }
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        self.image.drop_retired_maps();
        let channel: std::io::Result<Box<dyn IoChannel>> = match self.engine {
            Engine::IoUring => {
                ring::RingChannel::new(&self.image, depth).map(|channel| Box::new(channel) as _)
            }
            Engine::Threads => {
                threads::ThreadChannel::new(&self.image, depth).map(|channel| Box::new(channel) as _)
            }
        };
        channel.map_err(|source| StorageError::Os {
            image: self.image.name.clone(),
            doing: "opening an I/O channel (too many rings or threads for this process?)",
            source,
        })
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.image.drop_retired_maps();
        self.image.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.image.drop_retired_maps();
        self.image.orphans.wait_quiet(deadline)
            && self.fence.as_ref().is_none_or(|fence| fence.wait(deadline))
    }

    fn extents(&self, offset: u64, len: u64, each: &mut dyn FnMut(DiskExtent) -> bool) {
        self.extents.seek(self.image.as_fd(), self.image.bytes(), (offset, len), each);
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.image.as_fd())
    }

    fn fails_on(&self) -> bool {
        !self.image.direct
    }

    fn trust_quiet(&self) {
        self.fence.iter().for_each(|fence| fence.lower());
    }
}

impl Drop for FileBacking {
    fn drop(&mut self) {
        self.image.users.fetch_sub(1, Ordering::AcqRel);
    }
}
