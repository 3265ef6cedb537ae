//! Taking an image: the locks that QEMU takes, so that each refuses the other, and the fence against I/O of dead processes.
//!
//! QEMU (`block/file-posix.c`) holds a *shared* record lock on byte 100 + n for each permission n that it uses, and on byte
//! 200 + n for each permission n that it does not share, on an open file description. Who comes later asks, without taking it,
//! whether an exclusive lock would be possible on byte 100 + n of each permission that he does not share, and on byte 200 + n of
//! each that he wants. Permissions: 0 consistent read, 1 write, 2 write unchanged, 3 resize.
//!
//! On top of that a `flock` of the whole file. Both kinds belong to the open file description and go when it goes, and a
//! request in flight in io_uring keeps it: so the locks of a process that was killed stay until the last of its I/O
//! has ended. An image that is locked while no living process holds the locks still has I/O in flight, so taking it waits.

#![allow(unsafe_code)]
// UNSAFETY: fcntl on a structure of its own.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use crate::holder::{Held, Holder, holders};
use crate::mutation::{Promise, removed};

const PERMISSION: u64 = 100;
const UNSHARED: u64 = 200;
/// Bytes where read-only disks leave a mark of whose they are, far from QEMU's.
const OWNER: u64 = 1 << 32;

const CONSISTENT_READ: u8 = 1 << 0;
const WRITE: u8 = 1 << 1;
const RESIZE: u8 = 1 << 3;

/// What of an image is wanted.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    /// Permissions used, and permissions not shared.
    uses: u8,
    refuses: u8,
    exclusive: bool,
    owner: Option<u64>,
}

impl Claim {
    /// A guest's disk. `owner` only matters to read-only disks, of which there may be many on one image: it tells whose
    /// reads are still under way.
    pub fn disk(read_only: bool, owner: Option<&str>) -> Self {
        let uses = if read_only { CONSISTENT_READ } else { CONSISTENT_READ | WRITE | RESIZE };
        let owner = owner.filter(|_| read_only).map(|name| OWNER + (hash(name) & 0xffff_ffff));
        Claim { uses, refuses: WRITE | RESIZE, exclusive: !read_only, owner }
    }

    fn holds(&self) -> impl Iterator<Item = u64> {
        let (uses, refuses) = (self.uses, self.refuses);
        bits(uses).map(|n| PERMISSION + n).chain(bits(refuses).map(|n| UNSHARED + n)).chain(self.owner)
    }

    fn fears(&self) -> impl Iterator<Item = u64> {
        let (uses, refuses) = (self.uses, self.refuses);
        bits(refuses).map(|n| PERMISSION + n).chain(bits(uses).map(|n| UNSHARED + n)).chain(self.owner)
    }
}

fn bits(mask: u8) -> impl Iterator<Item = u64> {
    (0..8u64).filter(move |n| mask & (1 << n) != 0)
}

/// FNV-1a: the same in every build, for two daemons must agree.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Why an image could not be taken.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Somebody alive has it.
    Held(String),
    /// No living process has it, but I/O of a dead one still is in flight after the timeout.
    IoInFlight,
    /// The system does not lock.
    Os(io::Error),
}

/// How long somebody alive may hold the image and still be waited for: udev looks at new devices, `qemu-img info` at images. It is counted from when
/// somebody alive was first seen: what has just been closed here looks alive for a moment, when its lock is gone already.
const PASSING: Duration = Duration::from_millis(400);

/// Takes `claim` on `file`, waiting up to `timeout` for the I/O of dead processes. `alive` says of a lock of this very process
/// whether a backing still has it; `waiting` hears about once in 50 ms how long it has been.
pub(crate) fn take(
    file: BorrowedFd<'_>,
    claim: &Claim,
    timeout: Duration,
    alive: &dyn Fn() -> bool,
    waiting: &mut dyn FnMut(Duration),
) -> Result<(), Refusal> {
    let start = Instant::now();
    let identity = rustix::fs::fstat(file).map_err(|e| Refusal::Os(e.into()))?;
    let ours = file.as_raw_fd() as u32;
    let mut pause = Duration::from_millis(2);
    let mut alive_since = None::<Instant>;
    loop {
        let Some(held) = attempt(file, claim).map_err(Refusal::Os)? else { return Ok(()) };
        let found = holders(identity.st_dev, identity.st_ino, held, ours);
        let living: Option<&Holder> =
            found.iter().find(|h| if h.pid == std::process::id() { alive() } else { !h.ending });
        let waited = start.elapsed();
        let promise = if living.is_some() { Promise::Locks } else { Promise::Fence };
        if removed(promise) {
            return Ok(());
        }
        alive_since = living.map(|_| alive_since.unwrap_or_else(Instant::now));
        match living {
            Some(holder) if alive_since.is_some_and(|since| since.elapsed() >= PASSING) => {
                return Err(Refusal::Held(holder.to_string()));
            }
            None if waited >= timeout.max(PASSING) => {
                // Every ioplane holds the flock, and its byte locks stay with it.
                return Err(
                    if found.is_empty()
                        && held != Held::Whole
                        && claim.owner.is_none_or(|b| held != Held::Byte(b))
                    {
                        Refusal::Held(
                            "a process that cannot be seen from here (another container or user)".into(),
                        )
                    } else {
                        Refusal::IoInFlight
                    },
                );
            }
            _ => {}
        }
        waiting(waited);
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Takes the byte locks of `claim` beside those of another open file description with the same claim: they are shared, so both
/// can have them, and nobody else gets in between. [`inherit`] is the rest.
pub(crate) fn join(file: BorrowedFd<'_>, claim: &Claim) -> io::Result<()> {
    for byte in claim.holds() {
        if record(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1)? {
            return Err(io::Error::other("somebody holds the image alone"));
        }
    }
    Ok(())
}

/// Takes the rest of a claim that was [`join`]ed, if the other description is gone, its last request with it; says whether it
/// is. What was joined stays either way.
pub(crate) fn inherit(file: BorrowedFd<'_>, claim: &Claim) -> io::Result<bool> {
    if !flock(file, claim)? {
        return Ok(false);
    }
    for byte in claim.fears() {
        if record(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte, 1)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Takes the `flock`, where there is one; false if somebody else has it.
fn flock(file: BorrowedFd<'_>, claim: &Claim) -> io::Result<bool> {
    if !has_flock(file) {
        return Ok(true);
    }
    let kind = if claim.exclusive {
        FlockOperation::NonBlockingLockExclusive
    } else {
        FlockOperation::NonBlockingLockShared
    };
    match rustix::fs::flock(file, kind) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Takes all of it or nothing, and says what stood in the way.
fn attempt(file: BorrowedFd<'_>, claim: &Claim) -> io::Result<Option<Held>> {
    // First the flock: it orders us among ourselves, so that of two who come at once one gets the image.
    if !flock(file, claim)? {
        return Ok(Some(Held::Whole));
    }
    let taken = attempt_bytes(file, claim);
    if !matches!(taken, Ok(None)) {
        let _ = record(file, libc::F_OFD_SETLK, libc::F_UNLCK, PERMISSION, 200);
        if let Some(byte) = claim.owner {
            let _ = record(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte, 1);
        }
        if has_flock(file) {
            let _ = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock);
        }
    }
    taken
}

fn attempt_bytes(file: BorrowedFd<'_>, claim: &Claim) -> io::Result<Option<Held>> {
    // A mark of our own must not be there before we set it; all others are asked after ours are set, as QEMU does: of two
    // who come at once both may be refused, never both let in.
    if let Some(byte) = claim.owner
        && record(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte, 1)?
    {
        return Ok(Some(Held::Byte(byte)));
    }
    for byte in claim.holds() {
        if record(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1)? {
            return Ok(Some(Held::Byte(byte)));
        }
    }
    for byte in claim.fears() {
        if record(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte, 1)? {
            return Ok(Some(Held::Byte(byte)));
        }
    }
    Ok(None)
}

/// One record lock, set or asked for; true if somebody is in the way.
fn record(file: BorrowedFd<'_>, command: i32, kind: i32, start: u64, len: u64) -> io::Result<bool> {
    // SAFETY: plain data, for which all zeros is a value.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start as i64;
    lock.l_len = len as i64;
    // SAFETY: the commands used here take a flock structure.
    if unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } == 0 {
        return Ok(command == libc::F_OFD_GETLK && i32::from(lock.l_type) != libc::F_UNLCK);
    }
    match io::Error::last_os_error() {
        e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(true),
        e => Err(e),
    }
}

/// NFS and SMB make a flock into a record lock of the whole file, which would stand in the way of QEMU's bytes. The byte
/// locks fence there alone.
fn has_flock(file: impl AsFd) -> bool {
    const NFS: u32 = 0x6969;
    const SMB: [u32; 3] = [0x517b, 0xff53_4d42, 0xfe53_4d42];
    rustix::fs::fstatfs(file).is_ok_and(|system| {
        let kind = system.f_type as u32;
        kind != NFS && !SMB.contains(&kind)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// The last I/O of a dropped backing ends between the look at the lock and the question who has it.
    #[test]
    fn what_is_closed_just_now_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, [0; 512]).unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let (claim, first, second) = (Claim::disk(false, None), open(), open());
        take(first.as_fd(), &claim, Duration::ZERO, &|| true, &mut |_| {}).unwrap();
        let (first, begun) = (Cell::new(Some(first)), Instant::now());
        let alive = || {
            let closes = begun.elapsed() > 2 * PASSING;
            closes && first.take().is_some()
        };
        take(second.as_fd(), &claim, Duration::from_secs(60), &alive, &mut |_| {}).unwrap();
        assert!(first.take().is_none());
        // Who stays is named.
        let third = open();
        let refused = take(third.as_fd(), &claim, Duration::from_secs(60), &|| true, &mut |_| {});
        assert!(matches!(refused, Err(Refusal::Held(_))), "{refused:?}");
    }
}
