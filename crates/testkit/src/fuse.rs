//! One file on a file system of our own (FUSE): to the kernel and the daemon a real file, with system calls, page cache and
//! `O_DIRECT`; below it a disk that can fail on plan and whose power can fail.
//!
//! ```text
//!   daemon --pwrite, io_uring--> kernel --FUSE_WRITE--> cache        what reads find
//!                                       --FUSE_FSYNC--> durable      what is there after the power has come back
//! ```
//!
//! The durable half changes by FSYNC only, so a flush that is acknowledged without one is seen. Fails to mount where there
//! is no `/dev/fuse` or the user is not root: the test that wanted it has to say loudly that it did not run.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::mount::MountFlags;

const FILE: u64 = 2;
const NAME: &str = "disk.img";
const SECTOR: usize = 512;

/// A system call that can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Of any kind of read.
    Read,
    /// Of any kind of write.
    Write,
    /// `fsync`, `fdatasync`.
    Sync,
}

/// How it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It fails, and does nothing.
    Errno(i32),
    /// A sync that fails and leaves what was written before as clean: what Linux does with its page cache. The next sync
    /// succeeds, and does not bring it to the disk.
    Lost(i32),
    /// It moves so many bytes, and no more.
    Short(usize),
    /// It takes so long.
    Slow(Duration),
}

#[derive(Debug, Clone)]
pub struct InjectedFault {
    pub call: Call,
    /// Those that touch these bytes; any sync.
    pub bytes: Range<usize>,
    pub how: How,
    pub times: u32,
}

/// Calls so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    pub reads: u64,
    pub writes: u64,
    /// Syncs that have ended.
    pub syncs: u64,
    /// Those of all kinds that met a fault.
    pub troubled: u64,
    /// Those that met a fault that takes time, and have moved their bytes.
    pub slow_ended: u64,
}

#[derive(Debug, Default)]
struct State {
    cache: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors written since the last sync that began.
    dirty: BTreeSet<usize>,
    faults: Vec<InjectedFault>,
    calls: Calls,
}

/// The file, mounted; unmounted when dropped.
pub struct FuseDisk {
    state: Arc<Mutex<State>>,
    folder: PathBuf,
}

impl FuseDisk {
    /// A file of `bytes` zeros in `folder`, which is made.
    pub fn new(folder: &Path, bytes: usize) -> Result<FuseDisk, String> {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        let zeros = vec![0; bytes];
        let state = State { cache: zeros.clone(), durable: zeros, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = Arc::new(device.map_err(|error| format!("no FUSE here: /dev/fuse: {error}"))?);
        mount(&device, folder).map_err(|error| format!("mounting a FUSE takes root: {error}"))?;
        // A sync that takes its time holds up no write.
        for _ in 0..2 {
            let (device, state) = (device.clone(), state.clone());
            std::thread::spawn(move || serve(&device, &state));
        }
        Ok(FuseDisk { state, folder: folder.to_owned() })
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// From now on this goes wrong, and nothing else.
    pub fn faults(&self, faults: &[InjectedFault]) {
        self.state().faults = faults.to_vec();
    }

    /// How many calls there were so far.
    pub fn calls(&self) -> Calls {
        self.state().calls
    }

    /// What reads find.
    pub fn content(&self) -> Vec<u8> {
        self.state().cache.clone()
    }

    /// What is there if the power fails now and nothing but what was synced survives.
    pub fn durable(&self) -> Vec<u8> {
        self.state().durable.clone()
    }

    /// The same if some of the sectors that were not synced survive, chosen by `seed`: a disk may write back what it likes, in
    /// any order.
    pub fn survives(&self, seed: u64) -> Vec<u8> {
        let state = self.state();
        let (mut left, mut dice) = (state.durable.clone(), seed | 1);
        for sector in &state.dirty {
            // xorshift64
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            if dice & 1 == 0 {
                let bytes = sector * SECTOR..(sector + 1) * SECTOR;
                left[bytes.clone()].copy_from_slice(&state.cache[bytes]);
            }
        }
        left
    }

    /// The power fails and comes back: what [`FuseDisk::survives`] says is there from now on. Whoever has read the file through the page cache
    /// still finds what is there.
    pub fn cut_power(&self, seed: u64) {
        let left = self.survives(seed);
        let mut state = self.state();
        (state.cache, state.durable) = (left.clone(), left);
        state.dirty.clear();
    }

    /// Sectors that a power cut could take now.
    pub fn unsynced(&self) -> usize {
        self.state().dirty.len()
    }
}

impl Drop for FuseDisk {
    fn drop(&mut self) {
        // Lazily: a daemon that is being killed may have it open still.
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
    }
}

impl std::fmt::Debug for FuseDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FuseDisk").field("path", &self.path()).finish_non_exhaustive()
    }
}

/// By the system call: mount(8) wants fusermount, which not everybody has.
fn mount(device: &File, folder: &Path) -> std::io::Result<()> {
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
    let options = CString::new(options)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("ioplane-test", folder, "fuse", flags, options.as_c_str())?;
    Ok(())
}

impl State {
    /// What goes wrong with this call, if anything.
    fn meets(&mut self, call: Call, bytes: Range<usize>) -> Option<How> {
        let met = |fault: &&mut InjectedFault| {
            fault.call == call
                && fault.times > 0
                && (call == Call::Sync || fault.bytes.start < bytes.end && bytes.start < fault.bytes.end)
        };
        let fault = self.faults.iter_mut().find(met)?;
        fault.times -= 1;
        self.calls.troubled += 1;
        Some(fault.how)
    }
}

/// What the kernel asks, and what it is answered: `struct fuse_*` of `linux/fuse.h`, as far as one file needs it. A crate for this
/// (fuser) would bring seven more with it.
mod wire {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    /// Not a sync: what `close` calls.
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
    /// Bytes of the header of a question.
    pub const HEADER: usize = 40;
    /// Bytes of what comes before the data of a write.
    pub const WRITE_IN: usize = 40;
    /// Most bytes of one write.
    pub const MOST: usize = 128 << 10;
    const ASYNC_READ: u32 = 1 << 0;
    const BIG_WRITES: u32 = 1 << 5;
    /// Bit of `valid` of a change of attributes.
    pub const SIZE: u32 = 1 << 3;
    const DIRECTORY: u32 = 0o040_755;
    const REGULAR: u32 = 0o100_644;
    /// Seconds that the kernel may believe an answer.
    const LIFE: u64 = 60;

    pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
        bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
    }

    pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
        bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn longs(longs: &[u64]) -> Vec<u8> {
        longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
    }

    /// `fuse_init_out` of version 7.31.
    pub fn init() -> Vec<u8> {
        let background = u32::from_ne_bytes([64, 0, 48, 0]);
        // Not ASYNC_DIO: with that Linux makes EIO of every short direct write.
        let flags = ASYNC_READ | BIG_WRITES;
        let mut out = vec![7, 31, 128 << 10, flags, background, MOST as u32, 1];
        out.resize(16, 0);
        words(&out)
    }

    /// `fuse_attr`: of the file if it has a size, of the root otherwise.
    fn attr(node: u64, size: Option<u64>) -> Vec<u8> {
        let bytes = size.unwrap_or(0);
        let mode = if size.is_some() { REGULAR } else { DIRECTORY };
        [longs(&[node, bytes, bytes / 512, 0, 0, 0]), words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
    }

    pub fn attr_out(node: u64, size: Option<u64>) -> Vec<u8> {
        [longs(&[LIFE, 0]), attr(node, size)].concat()
    }

    pub fn entry_out(node: u64, size: u64) -> Vec<u8> {
        [longs(&[node, 0, LIFE, LIFE, 0]), attr(node, Some(size))].concat()
    }

    /// Past the page cache (FOPEN_DIRECT_IO) if it was opened so: otherwise Linux writes the rest of a short write through it.
    pub fn open_out(flags: u32) -> Vec<u8> {
        let direct = u32::from(flags & libc::O_DIRECT as u32 != 0);
        [longs(&[0]), words(&[direct, 0])].concat()
    }

    pub fn write_out(size: usize) -> Vec<u8> {
        words(&[size as u32, 0])
    }

    /// `fuse_statfs_out`: a million free blocks.
    pub fn statfs_out() -> Vec<u8> {
        let (blocks, free) = (1 << 20, 1 << 20);
        [longs(&[blocks, free, free, 2, 2]), words(&[4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0])].concat()
    }
}

/// Answers the kernel until the file system is gone.
fn serve(device: &File, state: &Mutex<State>) {
    let mut question = vec![0; wire::HEADER + wire::WRITE_IN + wire::MOST + 4096];
    loop {
        let length = match rustix::io::read(device, &mut question) {
            Ok(length) => length,
            // One that was interrupted before it was read.
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            Err(_) => return,
        };
        let (opcode, unique) = (wire::u32_at(&question, 4), wire::u64_at(&question, 8));
        if matches!(opcode, wire::FORGET | wire::BATCH_FORGET | wire::INTERRUPT) {
            continue;
        }
        let answer = answer(state, opcode, wire::u64_at(&question, 16), &question[wire::HEADER..length]);
        let (error, body) = answer.map_or_else(|errno| (-errno, Vec::new()), |body| (0, body));
        let mut bytes = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(error.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.extend(body);
        // Refused if the one who asked is gone.
        let _ = rustix::io::write(device, &bytes);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is answered, or an errno.
fn answer(state: &Mutex<State>, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
    let size = || lock(state).cache.len() as u64;
    let attributes = || wire::attr_out(node, (node == FILE).then(size));
    match opcode {
        wire::INIT => Ok(wire::init()),
        wire::LOOKUP if body.strip_suffix(&[0]) == Some(NAME.as_bytes()) => Ok(wire::entry_out(FILE, size())),
        wire::LOOKUP => Err(libc::ENOENT),
        wire::GETATTR => Ok(attributes()),
        wire::SETATTR => {
            if wire::u32_at(body, 0) & wire::SIZE != 0 {
                let (mut state, size) = (lock(state), wire::u64_at(body, 16) as usize);
                state.cache.resize(size, 0);
                state.durable.resize(size, 0);
            }
            Ok(attributes())
        }
        wire::OPEN => Ok(wire::open_out(wire::u32_at(body, 0))),
        wire::STATFS => Ok(wire::statfs_out()),
        wire::RELEASE | wire::FLUSH => Ok(Vec::new()),
        wire::READ => read(state, wire::u64_at(body, 8) as usize, wire::u32_at(body, 16) as usize),
        wire::WRITE => write(state, wire::u64_at(body, 8) as usize, &body[wire::WRITE_IN..]),
        wire::FSYNC => sync(state),
        _ => Err(libc::ENOSYS),
    }
}

fn read(shared: &Mutex<State>, offset: usize, size: usize) -> Result<Vec<u8>, i32> {
    let mut state = lock(shared);
    state.calls.reads += 1;
    let end = offset.saturating_add(size).min(state.cache.len());
    let mut bytes = offset.min(end)..end;
    match state.meets(Call::Read, bytes.clone()) {
        Some(How::Errno(errno) | How::Lost(errno)) => return Err(errno),
        Some(How::Short(most)) => bytes.end = bytes.end.min(bytes.start + most),
        Some(How::Slow(time)) => state = pass(shared, state, time),
        None => {}
    }
    Ok(state.cache[bytes].to_vec())
}

fn write(shared: &Mutex<State>, from: usize, data: &[u8]) -> Result<Vec<u8>, i32> {
    let mut state = lock(shared);
    state.calls.writes += 1;
    if from + data.len() > state.cache.len() {
        return Err(libc::EFBIG);
    }
    let mut most = data.len();
    match state.meets(Call::Write, from..from + data.len()) {
        Some(How::Errno(errno) | How::Lost(errno)) => return Err(errno),
        Some(How::Short(bytes)) => most = most.min(bytes),
        Some(How::Slow(time)) => state = pass(shared, state, time),
        None => {}
    }
    state.cache[from..from + most].copy_from_slice(&data[..most]);
    if most > 0 {
        state.dirty.extend(from / SECTOR..=(from + most - 1) / SECTOR);
    }
    Ok(wire::write_out(most))
}

fn sync(shared: &Mutex<State>) -> Result<Vec<u8>, i32> {
    let mut state = lock(shared);
    let how = state.meets(Call::Sync, 0..0);
    match how {
        Some(How::Errno(errno)) => return Err(errno),
        Some(How::Lost(errno)) => {
            state.dirty.clear();
            return Err(errno);
        }
        _ => {}
    }
    // What was written when it began, and only at its end.
    let begun: Vec<(usize, Vec<u8>)> = std::mem::take(&mut state.dirty)
        .into_iter()
        .map(|sector| (sector * SECTOR, state.cache[sector * SECTOR..(sector + 1) * SECTOR].to_vec()))
        .collect();
    if let Some(How::Slow(time)) = how {
        state = pass(shared, state, time);
    }
    for (at, bytes) in begun {
        state.durable[at..at + SECTOR].copy_from_slice(&bytes);
    }
    state.calls.syncs += 1;
    Ok(Vec::new())
}

/// Lets time go by, and others in.
fn pass<'a>(shared: &'a Mutex<State>, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
    drop(state);
    std::thread::sleep(time);
    let mut state = lock(shared);
    // Its caller moves the bytes before anybody else sees the state.
    state.calls.slow_ended += 1;
    state
}
