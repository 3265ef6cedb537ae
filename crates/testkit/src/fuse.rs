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

#![expect(clippy::disallowed_types, reason = "a test disk: its file system has threads of its own")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

const FILE: INodeNo = INodeNo(2);
const NAME: &str = "disk.img";
const SECTOR: usize = 512;
const LIFE: Duration = Duration::from_secs(60);

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

/// A trouble to come.
#[derive(Debug, Clone)]
pub struct Trouble {
    /// For which calls.
    pub call: Call,
    /// Those that touch these bytes; any sync.
    pub bytes: Range<usize>,
    /// What happens.
    pub how: How,
    /// How often.
    pub times: u32,
}

/// How many calls there were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Syncs that have ended.
    pub syncs: u64,
    /// Those of all kinds that met a trouble.
    pub troubled: u64,
}

#[derive(Debug, Default)]
struct State {
    cache: Vec<u8>,
    durable: Vec<u8>,
    /// Sectors written since the last sync that began.
    dirty: BTreeSet<usize>,
    troubles: Vec<Trouble>,
    calls: Calls,
}

/// The file, mounted; unmounted when dropped.
pub struct FuseDisk {
    state: Arc<Mutex<State>>,
    folder: PathBuf,
    session: Option<BackgroundSession>,
}

impl FuseDisk {
    /// A file of `bytes` zeros in `folder`, which is made.
    pub fn new(folder: &Path, bytes: usize) -> Result<FuseDisk, String> {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        let zeros = vec![0; bytes];
        let state = State { cache: zeros.clone(), durable: zeros, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("ioplane-test".into())];
        // A sync that takes its time holds up no write.
        config.n_threads = Some(2);
        let session = fuser::spawn_mount(Files { state: state.clone() }, folder, &config)
            .map_err(|error| format!("no FUSE here (it takes root and /dev/fuse): {error}"))?;
        Ok(FuseDisk { state, folder: folder.to_owned(), session: Some(session) })
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this goes wrong, and nothing else.
    pub fn troubles(&self, troubles: &[Trouble]) {
        self.state().troubles = troubles.to_vec();
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

    /// Sectors that a power cut could take now.
    pub fn unsynced(&self) -> usize {
        self.state().dirty.len()
    }
}

impl Drop for FuseDisk {
    fn drop(&mut self) {
        // Lazily: a daemon that is being killed may have it open still.
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
        drop(self.session.take());
    }
}

impl std::fmt::Debug for FuseDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FuseDisk").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl State {
    /// What goes wrong with this call, if anything.
    fn meets(&mut self, call: Call, bytes: Range<usize>) -> Option<How> {
        let met = |trouble: &&mut Trouble| {
            trouble.call == call
                && trouble.times > 0
                && (call == Call::Sync || trouble.bytes.start < bytes.end && bytes.start < trouble.bytes.end)
        };
        let trouble = self.troubles.iter_mut().find(met)?;
        trouble.times -= 1;
        self.calls.troubled += 1;
        Some(trouble.how)
    }
}

struct Files {
    state: Arc<Mutex<State>>,
}

impl Files {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, node: INodeNo) -> FileAttr {
        let size = if node == FILE { self.state().cache.len() as u64 } else { 0 };
        let kind = if node == FILE { FileType::RegularFile } else { FileType::Directory };
        FileAttr {
            ino: node,
            size,
            blocks: size / SECTOR as u64,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&LIFE, &self.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&LIFE, &self.attributes(node));
    }

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            let mut state = self.state();
            state.cache.resize(size as usize, 0);
            state.durable.resize(size as usize, 0);
        }
        reply.attr(&LIFE, &self.attributes(node));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.state();
        state.calls.reads += 1;
        let end = (offset as usize).saturating_add(size as usize).min(state.cache.len());
        let bytes = (offset as usize).min(end)..end;
        match state.meets(Call::Read, bytes.clone()) {
            Some(How::Errno(errno) | How::Lost(errno)) => return reply.error(Errno::from_i32(errno)),
            Some(How::Short(most)) => return reply.data(&state.cache[bytes][..most.min(size as usize)]),
            Some(How::Slow(time)) => {
                drop(state);
                std::thread::sleep(time);
                state = self.state();
            }
            None => {}
        }
        reply.data(&state.cache[bytes]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        state.calls.writes += 1;
        let from = offset as usize;
        if from + data.len() > state.cache.len() {
            return reply.error(Errno::EFBIG);
        }
        let mut most = data.len();
        match state.meets(Call::Write, from..from + data.len()) {
            Some(How::Errno(errno) | How::Lost(errno)) => return reply.error(Errno::from_i32(errno)),
            Some(How::Short(bytes)) => most = most.min(bytes),
            Some(How::Slow(time)) => {
                drop(state);
                std::thread::sleep(time);
                state = self.state();
            }
            None => {}
        }
        state.cache[from..from + most].copy_from_slice(&data[..most]);
        if most > 0 {
            state.dirty.extend(from / SECTOR..=(from + most - 1) / SECTOR);
        }
        reply.written(most as u32);
    }

    /// Not a sync: what `close` calls.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state();
        let how = state.meets(Call::Sync, 0..0);
        match how {
            Some(How::Errno(errno)) => return reply.error(Errno::from_i32(errno)),
            Some(How::Lost(errno)) => {
                state.dirty.clear();
                return reply.error(Errno::from_i32(errno));
            }
            _ => {}
        }
        // What was written when it began, and only at its end.
        let begun: Vec<(usize, Vec<u8>)> = std::mem::take(&mut state.dirty)
            .into_iter()
            .map(|sector| (sector * SECTOR, state.cache[sector * SECTOR..(sector + 1) * SECTOR].to_vec()))
            .collect();
        if let Some(How::Slow(time)) = how {
            drop(state);
            std::thread::sleep(time);
            state = self.state();
        }
        for (at, bytes) in begun {
            state.durable[at..at + SECTOR].copy_from_slice(&bytes);
        }
        state.calls.syncs += 1;
        reply.ok();
    }
}
