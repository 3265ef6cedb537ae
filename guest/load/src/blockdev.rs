//! Disks: finding them, what the kernel says of them, and the requests a load makes of them.
// UNSAFETY: BLKDISCARD has no safe wrapper; it is one ioctl with a plain array of two numbers.
#![allow(unsafe_code)]

use crate::protocol::Blockdev;
use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// All block buffers and offsets of direct requests are multiples of this.
pub const ALIGN: usize = 4096;

/// Finds the node of `device`: a path, a name in `/dev`, or `serial:NAME`.
pub fn node(device: &str) -> Result<PathBuf> {
    if let Some(serial) = device.strip_prefix("serial:") {
        let disks = list()?;
        let found: Vec<&Blockdev> = disks.iter().filter(|d| d.serial == serial).collect();
        return match found[..] {
            [disk] => Ok(Path::new("/dev").join(&disk.name)),
            [] => {
                let have: Vec<_> = disks.iter().map(|d| format!("{}={:?}", d.name, d.serial)).collect();
                bail!("no disk has the serial {serial:?}; there are {}", have.join(", "))
            }
            _ => bail!("{} disks have the serial {serial:?}; name the node instead", found.len()),
        };
    }
    let path = if device.contains('/') { PathBuf::from(device) } else { Path::new("/dev").join(device) };
    if !path.exists() {
        bail!("{} does not exist; `list` tells the disks", path.display());
    }
    Ok(path)
}

/// All disks of the guest, by name.
pub fn list() -> Result<Vec<Blockdev>> {
    let mut names = Vec::new();
    for entry in fs::read_dir("/sys/block").context("read /sys/block; is /sys mounted?")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !["loop", "ram", "zram", "dm-"].iter().any(|skip| name.starts_with(skip)) {
            names.push(name);
        }
    }
    names.sort();
    // A disk may be unplugged while it is looked at.
    Ok(names.iter().filter_map(|name| describe(name).ok()).collect())
}

/// What the kernel says of the disk `name` (`vdb`).
pub fn describe(name: &str) -> Result<Blockdev> {
    let base = Path::new("/sys/block").join(name);
    let text = |at: &str| fs::read_to_string(base.join(at)).map(|t| t.trim().to_string());
    let number = |at: &str| -> u64 { text(at).ok().and_then(|t| t.parse().ok()).unwrap_or(0) };
    let sectors: u64 = text("size").with_context(|| format!("no disk {name}"))?.parse()?;
    Ok(Blockdev {
        name: name.into(),
        serial: text("serial").unwrap_or_default(),
        size: sectors * 512,
        ro: number("ro") != 0,
        logical_block_size: number("queue/logical_block_size") as u32,
        physical_block_size: number("queue/physical_block_size") as u32,
        write_cache: text("queue/write_cache").unwrap_or_default(),
        discard_max: number("queue/discard_max_bytes"),
        write_zeroes_max: number("queue/write_zeroes_max_bytes"),
        minimum_io_size: number("queue/minimum_io_size") as u32,
        optimal_io_size: number("queue/optimal_io_size") as u32,
        queues: fs::read_dir(base.join("mq")).map(|d| d.count() as u32).unwrap_or(0),
    })
}

/// [`describe`] for a device as commands name it.
pub fn describe_device(device: &str) -> Result<Blockdev> {
    let node = node(device)?;
    let name = node.file_name().context("a disk's node has a name")?.to_string_lossy().into_owned();
    describe(&name)
}

/// How many interrupts the disk's queues have raised since boot, over all vCPUs.
pub fn interrupts(device: &str) -> Result<u64> {
    let name = describe_device(device)?.name;
    let parent = fs::canonicalize(format!("/sys/block/{name}/device"))?;
    let virtio = parent.file_name().context("a disk has a device")?.to_string_lossy().into_owned();
    let table = fs::read_to_string("/proc/interrupts")?;
    let own = |line: &&str| {
        line.split_whitespace().last().is_some_and(|last| {
            last.strip_prefix(&virtio)
                .is_some_and(|rest| rest.starts_with("-req") || rest.starts_with("-virtqueues"))
        })
    };
    let mut lines = table.lines().filter(own).peekable();
    lines.peek().with_context(|| format!("no line of /proc/interrupts is of {virtio} ({name})"))?;
    let sum =
        |line: &str| -> u64 { line.split_whitespace().skip(1).map_while(|w| w.parse::<u64>().ok()).sum() };
    Ok(lines.map(sum).sum())
}

/// An open disk (or, in tests, a regular file), once past the page cache and once through it.
#[derive(Debug)]
pub struct Disk {
    direct: File,
    cached: File,
    regular: bool,
    /// Bytes, when it was opened.
    pub size: u64,
    /// The serial, or the node's name where there is none: what sectors are stamped with.
    pub name: String,
    /// Smallest request.
    pub logical: u32,
    /// Whether discards are offered.
    pub discards: bool,
}

impl Disk {
    /// Opens `device` for reading, and for writing too if `write`.
    pub fn open(device: &str, write: bool) -> Result<Self> {
        let node = node(device)?;
        let open = |flags: OFlags| {
            OpenOptions::new()
                .read(true)
                .write(write)
                .custom_flags(flags.bits() as i32)
                .open(&node)
                .with_context(|| format!("open {}", node.display()))
        };
        let (direct, mut cached) = (open(OFlags::DIRECT)?, open(OFlags::empty())?);
        let regular = !cached.metadata()?.file_type().is_block_device();
        let size = cached.seek(SeekFrom::End(0))?;
        // No read-ahead: it would read blocks that other workers are writing.
        let _ = rustix::fs::fadvise(&cached, 0, None, rustix::fs::Advice::Random);
        let file = node.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let told = if regular { Blockdev::default() } else { describe(&file)? };
        Ok(Disk {
            direct,
            cached,
            regular,
            size,
            name: if told.serial.is_empty() { file } else { told.serial },
            logical: if regular { 512 } else { told.logical_block_size },
            discards: regular || told.discard_max > 0,
        })
    }

    /// Reads all of `buffer` from `at`; past the page cache if `direct`.
    pub fn read(&self, buffer: &mut [u8], at: u64, direct: bool) -> io::Result<()> {
        self.file(direct).read_exact_at(buffer, at)
    }

    /// Writes all of `buffer` at `at`; past the page cache if `direct`.
    pub fn write(&self, buffer: &[u8], at: u64, direct: bool) -> io::Result<()> {
        self.file(direct).write_all_at(buffer, at)
    }

    /// Waits until everything written before is on the disk for good.
    pub fn sync(&self) -> io::Result<()> {
        self.cached.sync_data()
    }

    /// Tells the disk that the range is not needed.
    pub fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        if self.regular {
            return self.zero(at, bytes);
        }
        const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);
        // SAFETY: BLKDISCARD reads two u64 (start, length) from the address it is given, and `Setter` passes a pointer
        // to exactly such an array, which lives until the call returns.
        let done = unsafe {
            rustix::ioctl::ioctl(
                &self.direct,
                rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([at, bytes]),
            )
        };
        done.map_err(io::Error::from)
    }

    /// Makes the range read as zeroes.
    pub fn zero(&self, at: u64, bytes: u64) -> io::Result<()> {
        let flags = if self.regular { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        loop {
            match rustix::fs::fallocate(&self.direct, flags | FallocateFlags::KEEP_SIZE, at, bytes) {
                Err(Errno::INTR) => continue,
                done => return done.map_err(io::Error::from),
            }
        }
    }

    fn file(&self, direct: bool) -> &File {
        if direct { &self.direct } else { &self.cached }
    }
}

/// Checks that `offset..offset + bytes` can be read directly and lies on the disk; `bytes` 0 means to its end.
pub fn range(disk: &Disk, offset: u64, bytes: u64) -> Result<u64> {
    let end =
        if bytes == 0 { disk.size } else { offset.checked_add(bytes).context("the range is too large")? };
    let whole = |n: u64| n.is_multiple_of(ALIGN as u64);
    if !whole(offset) || !whole(bytes) {
        bail!("offset {offset} and bytes {bytes} must be multiples of {ALIGN}");
    }
    if end > disk.size || offset >= end {
        bail!("bytes {offset} to {end} are not on {}, which has {} bytes", disk.name, disk.size);
    }
    Ok((end - offset) / ALIGN as u64 * ALIGN as u64)
}

/// A buffer whose bytes start on a page, as direct requests need.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    /// `length` zero bytes.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0u8; length + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Aligned { bytes, start, length }
    }

    /// The bytes.
    pub fn all(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }

    /// The first `length` bytes.
    pub fn first(&mut self, length: usize) -> &mut [u8] {
        &mut self.all()[..length]
    }
}

/// An I/O error in words that tell the request.
pub fn failed(what: &str, at: u64, bytes: usize, error: &io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::UnexpectedEof => anyhow!("{what} of {bytes} bytes at {at}: the disk ends there"),
        _ => anyhow!("{what} of {bytes} bytes at {at}: {error}"),
    }
}
