//! Two backings of one disk, while it goes from the one to the other.
//!
//! ```text
//!   guest's queues -> MirrorChannel --+--> old     reads; writes
//!                       |  locks      +--> new     writes, once mirroring
//!                     State: dirty map, range locks, mode, first failure        (atomics)
//!                       |  claims
//!                     Copier (a thread of the control side) -- old --> memory of ours --> new
//! ```
//!
//! *Copying*: writes go to the old backing alone and mark what they touch; the copier copies what is marked. *Mirroring*: writes go to both,
//! so that nothing is marked any more, and what is still marked is copied once. When nothing is, both are equal but for writes under
//! way. *Committing*: the owner writes down that the disk is on the new one, and nothing is answered that only the old one has. *Decided*: the
//! disk goes on with the new one. The argument is in docs/decisions/0047-swap.md and 0075-exchange-under-way.md.

mod channel;
mod copier;
mod hold;
pub mod mutation;
pub(crate) mod ranges;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::channel::{Backing, BackingInfo, Fault, IoChannel, StorageError};
use channel::MirrorChannel;
use hold::Hold;
use mutation::{SwapRule, removed};
use ranges::{CHUNK, DirtyMap, RangeLocks};

pub use copier::{Copier, Step};

/// Why the new backing is no copy, and will not become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MirrorFault {
    /// The new backing failed, by errno.
    #[error("the new backing failed: {}", std::io::Error::from_raw_os_error(*.0))]
    New(i32),
    /// The old backing could not be read, by errno.
    #[error("the old backing could not be read: {}", std::io::Error::from_raw_os_error(*.0))]
    Old(i32),
    /// A queue was stopped with writes under way: nobody knows to which of the two they have got.
    #[error("a queue of the guest was stopped with writes under way")]
    Stopped,
    /// It is not wanted any more.
    #[error("it was cancelled")]
    Cancelled,
}

impl MirrorFault {
    fn code(self) -> u64 {
        match self {
            MirrorFault::New(errno) => 1 << 32 | u64::from(errno as u32),
            MirrorFault::Old(errno) => 2 << 32 | u64::from(errno as u32),
            MirrorFault::Stopped => 3 << 32,
            MirrorFault::Cancelled => 4 << 32,
        }
    }

    fn of_code(code: u64) -> Option<Self> {
        let errno = code as u32 as i32;
        match code >> 32 {
            1 => Some(MirrorFault::New(errno)),
            2 => Some(MirrorFault::Old(errno)),
            3 => Some(MirrorFault::Stopped),
            4 => Some(MirrorFault::Cancelled),
            _ => None,
        }
    }
}

/// The code of no failure: the disk has gone on with the new backing, and nothing can fail any more.
const DECIDED: u64 = 5 << 32;
/// How long [`Mirror::begin_commit`] waits for writes that are choosing where to go.
const CHOOSING: Duration = Duration::from_millis(100);

/// The errno that says the same as a fault.
fn errno(fault: Fault) -> i32 {
    match fault {
        Fault::Io(errno) => errno,
        Fault::NoSpace => libc::ENOSPC,
        Fault::BeyondEnd => libc::EFBIG,
        Fault::ReadOnly => libc::EROFS,
        Fault::Guest(_) => libc::EFAULT,
    }
}

/// What channels and copier share.
#[derive(Debug)]
struct State {
    bytes: u64,
    map: DirtyMap,
    locks: RangeLocks,
    mirroring: AtomicBool,
    /// How fast writes may mark chunks while they go to the old backing alone.
    hold: Hold,
    /// Nothing is answered that only the old backing has.
    committing: AtomicBool,
    /// Operations that are just choosing where to go, and have not yet marked their chunks.
    choosing: AtomicU64,
    /// [`MirrorFault::code`]; 0 for none, or [`DECIDED`].
    fault: AtomicU64,
    copied: AtomicU64,
    /// Runs that the copier has under way: they are not marked any more, and not copied yet.
    runs: AtomicU64,
}

impl State {
    /// Notes the first failure. From then on the old backing is used as if it were alone.
    #[cold]
    fn fail(&self, fault: MirrorFault) {
        let _ = self.fault.compare_exchange(0, fault.code(), Ordering::SeqCst, Ordering::SeqCst);
    }

    #[inline]
    fn has_failed(&self) -> bool {
        !matches!(self.fault.load(Ordering::SeqCst), 0 | DECIDED)
    }

    #[inline]
    fn is_decided(&self) -> bool {
        self.fault.load(Ordering::SeqCst) == DECIDED
    }

    /// Whether the new backing has failed, and what it lacks may not be answered yet.
    ///
    /// Asked after a failure has been noted, as [`Mirror::begin_commit`] looks for failures after it has said that it commits: one of the
    /// two sees the other.
    #[inline]
    fn holds(&self) -> bool {
        self.has_failed() && self.committing.load(Ordering::SeqCst) && !removed(SwapRule::Hold)
    }
}

/// An operation that is choosing where to go.
struct Choosing<'a>(&'a AtomicU64);

impl<'a> Choosing<'a> {
    fn new(state: &'a State) -> Self {
        state.choosing.fetch_add(1, Ordering::SeqCst);
        Choosing(&state.choosing)
    }
}

impl Drop for Choosing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A disk on its way from one backing to another. It looks like the old one.
#[derive(Debug)]
pub struct Mirror {
    old: Arc<dyn Backing>,
    new: Arc<dyn Backing>,
    state: Arc<State>,
}

impl Mirror {
    /// Of two backings of one size. Nothing is known of the new one's content: all is to be copied.
    pub fn new(old: Arc<dyn Backing>, new: Arc<dyn Backing>) -> Result<Arc<Self>, StorageError> {
        let (from, to) = (old.info(), new.info());
        let unsuitable = |why: String| StorageError::Unsuitable { image: to.name.clone(), why };
        if to.bytes != from.bytes {
            let why = format!("the disk has {}, and both have to be of one size", from.bytes);
            return Err(StorageError::Size { image: to.name.clone(), bytes: to.bytes, why });
        }
        if to.read_only {
            return Err(unsuitable("it is read-only, and nothing can be copied there".to_owned()));
        }
        if to.logical_block > from.logical_block {
            let why = format!(
                "it has blocks of {} bytes, and the disk was promised {}",
                to.logical_block, from.logical_block
            );
            return Err(unsuitable(why));
        }
        let state = State {
            bytes: from.bytes,
            map: DirtyMap::all(from.bytes),
            locks: RangeLocks::new(),
            mirroring: AtomicBool::new(false),
            hold: Hold::default(),
            committing: AtomicBool::new(false),
            choosing: AtomicU64::new(0),
            fault: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            runs: AtomicU64::new(0),
        };
        Ok(Arc::new(Mirror { old, new, state: Arc::new(state) }))
    }

    /// The one that has everything.
    pub fn old(&self) -> &Arc<dyn Backing> {
        &self.old
    }

    /// The one that is to have everything.
    pub fn replica(&self) -> &Arc<dyn Backing> {
        &self.new
    }

    /// What copies. One for each mirror.
    pub fn copier(&self) -> Result<Copier, StorageError> {
        Copier::new(&self.old, &self.new, &self.state)
    }

    /// From now on writes go to both, and at whatever rate: nothing is marked any more.
    pub fn start_mirroring(&self) {
        self.state.mirroring.store(true, Ordering::SeqCst);
        self.state.hold.release();
    }

    /// From `now` on writes of the guest make at most so many bytes per second to be copied again, all queues together, until writes go to both or this comes to
    /// nothing. A write to what is to be copied anyway is held only behind another one of its queue, and a queue that is being stopped is not held. Control plane.
    pub fn hold(&self, bytes_per_second: std::num::NonZeroU64, now: Instant) {
        self.state.hold.hold(bytes_per_second, now);
    }

    /// Whether writes are held to a rate.
    pub fn is_holding(&self) -> bool {
        self.state.hold.is_on() && !self.is_mirroring() && self.fault().is_none()
    }

    /// The old backing may have lost some of what was copied from it, and nobody knows what: all of it is copied again. Called before anything is read from it
    /// that it has lost, or at least before [`Mirror::decide`]. Control plane.
    pub fn restart(&self) {
        if !removed(SwapRule::Restart) {
            self.state.map.mark(0, self.state.bytes);
        }
    }

    /// Whether writes go to both.
    pub fn is_mirroring(&self) -> bool {
        self.state.mirroring.load(Ordering::SeqCst)
    }

    /// From now on nothing is answered that the new backing lacks: whoever finds it instead of the old one, after whatever crash, finds all
    /// that the guest was told. False, and nothing has changed, if it lacks something already. The copier has nothing under way. May block for
    /// a tenth of a second.
    ///
    /// Until [`Mirror::end_commit`] writes that the new backing fails are not answered at all, so the caller looks at
    /// [`Mirror::fault`] meanwhile.
    pub fn begin_commit(&self) -> bool {
        self.state.committing.store(true, Ordering::SeqCst);
        // One that chose the old backing alone before mirroring began has marked its chunks then.
        let deadline = Instant::now() + CHOOSING;
        let mut chosen = false;
        while !chosen && Instant::now() < deadline {
            chosen = self.state.choosing.load(Ordering::SeqCst) == 0;
            std::thread::yield_now();
        }
        let may = chosen && self.is_equal();
        if !may {
            self.end_commit();
        }
        may
    }

    /// From now on writes that the new backing lacks are answered again, so nobody may use it in place of the old one.
    pub fn end_commit(&self) {
        self.state.committing.store(false, Ordering::SeqCst);
    }

    /// Whether both are equal. If so the disk goes on with the new one: from now on nothing fails or ends this mirror, and whoever still uses it uses the
    /// new one alone. What is under way to both ends as the new one has ended it; until then ([`Mirror::has_settled`]) the new one is used by this
    /// mirror only.
    pub fn decide(&self) -> bool {
        let fault = &self.state.fault;
        let undisturbed = || fault.compare_exchange(0, DECIDED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.state.is_decided() || self.is_equal() && undisturbed()
    }

    /// Whether the disk has gone on with the new backing ([`Mirror::decide`]).
    pub fn is_decided(&self) -> bool {
        self.state.is_decided()
    }

    /// Whether nothing is under way to both any more, after [`Mirror::decide`].
    pub fn has_settled(&self) -> bool {
        self.state.is_decided() && self.state.locks.are_free()
    }

    /// Why this comes to nothing, if it does.
    pub fn fault(&self) -> Option<MirrorFault> {
        MirrorFault::of_code(self.state.fault.load(Ordering::SeqCst))
    }

    /// The new backing cannot be used any more, by errno. From now on as after [`Mirror::abandon`].
    pub fn fail(&self, errno: i32) {
        self.state.fail(MirrorFault::New(errno));
    }

    /// From now on the old backing is used as if it were alone, and nobody waits for the new one.
    pub fn abandon(&self) {
        self.state.fail(MirrorFault::Cancelled);
    }

    /// Whether the new backing has what the old one has, but for what is in flight. Whether it still does when that has ended nobody knows.
    pub fn is_equal(&self) -> bool {
        let none_left = self.state.map.count() == 0 && self.state.runs.load(Ordering::SeqCst) == 0;
        self.is_mirroring() && self.fault().is_none() && none_left
    }

    /// Bytes that are still to be copied, in whole chunks.
    pub fn left(&self) -> u64 {
        (self.state.map.count() * CHUNK).min(self.state.bytes)
    }

    /// Bytes that the copier has copied, some of them several times.
    pub fn copied(&self) -> u64 {
        self.state.copied.load(Ordering::Relaxed)
    }
}

impl Backing for Mirror {
    /// As long as both were: what the old one has gained since is not copied, and the new one has not got it.
    fn info(&self) -> BackingInfo {
        BackingInfo { bytes: self.state.bytes, ..self.old.info() }
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        Ok(Box::new(MirrorChannel::new(&self.old, &self.new, &self.state, depth)?))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        let why = "it is being swapped: cancel that, or wait for it".to_owned();
        Err(StorageError::Size { image: self.old.info().name, bytes, why })
    }

    fn is_stalled(&self) -> bool {
        self.old.is_stalled() || self.new.is_stalled()
    }

    /// A queue that left writes behind has ended the copy ([`MirrorFault::Stopped`]): what still lands in the new backing is of no
    /// consequence, unless the disk has gone on with that.
    fn wait_quiet(&self, deadline: Instant) -> bool {
        (!self.state.is_decided() || self.new.wait_quiet(deadline)) && self.old.wait_quiet(deadline)
    }
}
