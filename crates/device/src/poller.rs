//! The data half of a device: what runs on an I/O core.

use std::any::Any;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_memory::{DirtyLog, GuestMap};
use ioplane_scheduler::{BlockDevice, LimitSet, MOST_PER_POLL};

use crate::context::CoreContext;
use crate::outcome::PollOutcome;
use crate::share::Share;

/// What one call of [`Poller::poll`] may do, so that one ring starves no other. The last thing that it takes may go over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Units of work (requests, frames) that it may take.
    pub requests: u32,
    /// What it may cost, in bytes that could be copied meanwhile, at least 1 (docs/decisions/0017-work-per-poll.md has the charges).
    pub bytes: u32,
    /// What it may hand to a backing that does not end it at once, bytes: pieces that fit into this, none if none fits. [`Budget::UNBOUNDED`] where
    /// nobody competes for backings. What it hands on it tells by [`CoreContext::submitted`].
    pub room: u32,
}

impl Budget {
    /// [`Budget::room`] without a bound.
    pub const UNBOUNDED: u32 = u32::MAX;

    /// So many requests, and as much work as any poll may do.
    pub const fn of(requests: u32) -> Self {
        Budget { requests, bytes: MOST_PER_POLL as u32, room: Self::UNBOUNDED }
    }
}

/// The answer to [`Poller::arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// From now on whatever arrives makes one of the [`Wakers`] readable: the core may sleep.
    Armed,
    /// Something is there already: the core must not sleep.
    WorkLeft,
}

/// The two kinds of stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Nothing in flight.
    Drained,
    /// What is in flight is fenced off from the guest and recorded, for somebody to replay.
    Suspended,
}

/// How a queue notifies its driver that buffers were used. Called on an I/O core: must not block.
pub trait Interrupt: Send + Sync + fmt::Debug {
    /// Sends one interrupt.
    fn signal(&self);

    /// The descriptor that it writes, if it does: with it another process interrupts the same driver.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// What can be changed while a poller runs. Everything else needs the device quiescent.
#[derive(Debug, Clone)]
pub enum Change {
    /// Another way to interrupt the driver, or none.
    Call(Option<Arc<dyn Interrupt>>),
    /// Another eventfd to be kicked by, or none (then the ring is polled only).
    Kick(Option<Arc<OwnedFd>>),
    /// The dirty log on or off. Acknowledged when every store from then on is marked in it.
    Log(Option<Arc<DirtyLog>>),
    /// Guest memory has grown: every range of the old map is in this one. (Shrinking needs the device quiescent.)
    Memory(Arc<GuestMap>),
    /// Another group, or another weight of it. The core applies it; pollers do not get it.
    Share(Share),
    /// Other limits, or none. The core applies them; pollers do not get them.
    Limits(LimitSet),
    /// The queue's backing lies on another block device of the host, or on none that is known. The core applies it; pollers do not get it.
    BlockDevice(Option<BlockDevice>),
    /// What the device's control half wants its pollers to know, in a type of their own.
    Own(Arc<dyn Any + Send + Sync>),
}

/// What a sleeping core waits on for one poller. All level-triggered, readable when there is something to do, whether or not the
/// poller is armed.
#[derive(Debug, Default, Clone, Copy)]
pub struct Wakers<'a> {
    /// The guest's kick.
    pub kick: Option<BorrowedFd<'a>>,
    /// Completions of the storage or the network below.
    pub completion: Option<BorrowedFd<'a>>,
}

/// The data half of one queue (or of a device without queues). Lives in a [`crate::PollerSlot`] on one I/O core.
///
/// `poll` never locks, allocates, blocks, logs or formats. Everything else is called by the core between two polls.
pub trait Poller: Any + Send {
    /// One turn: complete what has ended, take at most `budget` of what is new. Returns [`PollOutcome::PARKED`] only after
    /// [`Poller::drain`] when nothing is in flight, or after [`Poller::suspend`].
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome;

    /// Take no new work, keep completing: parks at the first poll with nothing in flight.
    fn drain(&mut self);

    /// Go on as if [`Poller::drain`] had not been called.
    fn undrain(&mut self);

    /// Park at the next poll even if something is in flight: fence it and record it for replay.
    fn suspend(&mut self);

    /// Whether it, which has parked after [`Poller::drain`], may be polled again as it is, after [`Poller::undrain`] and on whichever core: then a
    /// move takes it along ([`crate::Running::move_queue`]). Otherwise its device takes it apart and makes another one.
    fn goes_on(&self) -> bool {
        false
    }

    /// Called once by the slot before the first poll: the ring may have moved on while nobody looked. Looks at it again
    /// and signals the driver once, whatever it asked for: a crash can fall between the used index and the interrupt
    /// (invariants 2 and 3).
    fn resume(&mut self);

    /// The core is about to sleep: ask to be kicked, then look once more. The core polls once afterwards, and what that poll has begun and nobody would
    /// wake the poller for it says by [`PollOutcome::has_more`].
    fn arm(&mut self) -> Armed;

    /// The core is awake: `polling` says whether it will look at the ring by itself from now on, so that kicks are waste.
    /// Empties the kick if it was raised.
    fn disarm(&mut self, context: &CoreContext, polling: bool);

    /// Something changes while the poller runs. It holds from the next poll on.
    fn apply(&mut self, change: Change);

    /// What to wait on while armed. Asked again after every [`Poller::apply`] of a [`Change::Kick`] or a [`Change::Own`]; other
    /// changes leave it what it is.
    fn wakers(&self) -> Wakers<'_>;

    /// About every 10 ms, before sleeping, and when a kick comes that was not asked for while the poller is
    /// [`crate::PollState::Waiting`] or [`crate::PollState::Limited`]: counts such kicks and lowers their eventfd, publishes meters.
    fn tidy(&mut self);
}
