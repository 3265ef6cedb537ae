//! Seats: where pollers sit, and the only place that turns one into [`Parked`]; and how their owner speaks to them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_memory::mutation::{Invariant, removed};

use crate::Armed;
use crate::context::CoreContext;
use crate::inbox::ParkedInbox;
use crate::outcome::{PollOutcome, PollState};
use crate::parked::{Parked, PollerId};
use crate::poller::{Budget, Change, Poller, Stop, Wakers};
use crate::share::Share;
use crate::watch;

/// Names an I/O core of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CoreId(pub u32);

/// Most polls that a suspended poller may need to park.
const TURNS_BACK: u32 = 16;

/// Holds one poller on one I/O core.
pub struct PollerSlot {
    id: PollerId,
    queue: u16,
    poller: Option<Box<dyn Poller>>,
    home: Arc<ParkedInbox>,
    share: Share,
    fresh: bool,
    suspended: bool,
}

impl PollerSlot {
    pub(crate) fn new(poller: Box<dyn Poller>, queue: u16, home: Arc<ParkedInbox>) -> Self {
        PollerSlot {
            id: PollerId::fresh(),
            queue,
            poller: Some(poller),
            home,
            share: Share::default(),
            fresh: true,
            suspended: false,
        }
    }

    /// Its name.
    pub fn id(&self) -> PollerId {
        self.id
    }

    /// The queue that its poller serves.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// What it is entitled to.
    pub fn share(&self) -> Share {
        self.share
    }

    /// One turn of the poller. A fresh seat first lets it look again and signal once. After [`PollState::Parked`] the poller has gone
    /// home: take the seat away.
    #[inline]
    pub fn step(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        let Some(poller) = self.poller.as_deref_mut() else { return PollOutcome::PARKED };
        if self.fresh {
            self.fresh = false;
            if !removed(Invariant::SignalsOnce) {
                poller.resume();
            }
        }
        let outcome = {
            let _inside = watch::enter();
            poller.poll(context, budget)
        };
        if outcome.state() == PollState::Parked {
            self.leave();
        }
        outcome
    }

    /// The poller has parked: it goes home.
    #[cold]
    fn leave(&mut self) {
        if let Some(mut poller) = self.poller.take() {
            poller.tidy();
            let stop = if self.suspended { Stop::Suspended } else { Stop::Drained };
            self.home.arrive(self.id, Parked { poller, queue: self.queue, stop });
        }
    }

    /// Whether the core must step this seat before it may sleep on it: true until the first step (invariant 2).
    pub fn must_look(&self) -> bool {
        self.fresh && !removed(Invariant::LooksAgain)
    }

    /// Carries out what the owner told this seat.
    pub fn tell(&mut self, context: &mut CoreContext, tell: PollerCommand) {
        let Some(poller) = self.poller.as_deref_mut() else { return };
        match tell {
            PollerCommand::Drain => poller.drain(),
            PollerCommand::Undrain(ack) => {
                if self.suspended {
                    // What was in flight is fenced off already; home first, then its owner makes a new poller.
                    self.step(context, Budget(1));
                } else {
                    poller.undrain();
                }
                ack.done();
            }
            PollerCommand::Suspend => {
                self.suspended = true;
                poller.suspend();
            }
            PollerCommand::Apply(change, ack) => {
                match change {
                    Change::Share(share) => self.share = share,
                    change => poller.apply(change),
                }
                ack.done();
            }
        }
    }

    /// No core took this seat: its poller goes home from where it is, on the owner's thread.
    pub(crate) fn turn_back(mut self) {
        let mut context = CoreContext::default();
        self.tell(&mut context, PollerCommand::Suspend);
        for _ in 0..TURNS_BACK {
            if self.step(&mut context, Budget(1)).state() == PollState::Parked {
                return;
            }
        }
        debug_assert!(false, "queue {}: a suspended poller does not park", self.queue);
    }

    /// [`Poller::arm`] of the poller; an empty seat is armed.
    #[inline]
    pub fn arm(&mut self) -> Armed {
        self.poller.as_deref_mut().map_or(Armed::Armed, Poller::arm)
    }

    /// [`Poller::disarm`] of the poller.
    #[inline]
    pub fn disarm(&mut self, context: &CoreContext, polling: bool) {
        if let Some(poller) = self.poller.as_deref_mut() {
            poller.disarm(context, polling);
        }
    }

    /// [`Poller::tidy`] of the poller.
    pub fn tidy(&mut self) {
        if let Some(poller) = self.poller.as_deref_mut() {
            poller.tidy();
        }
    }

    /// [`Poller::wakers`] of the poller.
    pub fn wakers(&self) -> Wakers<'_> {
        self.poller.as_deref().map_or(Wakers::default(), Poller::wakers)
    }
}

impl fmt::Debug for PollerSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("id", &self.id).field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// What the owner of a device says to one of its seats, by way of the core's mailbox.
#[derive(Debug)]
pub enum PollerCommand {
    /// [`Poller::drain`].
    Drain,
    /// [`Poller::undrain`], acknowledged. A poller that had parked before it heard this stays parked.
    Undrain(Ack),
    /// [`Poller::suspend`].
    Suspend,
    /// [`Poller::apply`], acknowledged.
    Apply(Change, Ack),
}

/// Counts the pollers that have yet to acknowledge a change. Each `Ack` says so once, when it is done or dropped.
#[derive(Debug)]
pub struct Ack {
    left: Arc<AcksLeft>,
}

#[derive(Debug)]
pub(crate) struct AcksLeft {
    left: AtomicU64,
    home: Arc<ParkedInbox>,
}

impl AcksLeft {
    pub(crate) fn new(home: Arc<ParkedInbox>) -> Arc<Self> {
        Arc::new(AcksLeft { left: AtomicU64::new(0), home })
    }

    pub(crate) fn ack(self: &Arc<Self>) -> Ack {
        self.left.fetch_add(1, Ordering::AcqRel);
        Ack { left: self.clone() }
    }

    pub(crate) fn all_in(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

impl Ack {
    /// The change holds.
    pub fn done(self) {}
}

impl Drop for Ack {
    fn drop(&mut self) {
        if self.left.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.left.home.wake();
        }
    }
}

/// What goes into a core's mailbox.
#[derive(Debug)]
pub enum CoreMessage {
    /// Take this seat in.
    Attach(PollerSlot),
    /// Tell the seat of that name something. A seat that has been vacated meanwhile hears nothing.
    Poller(PollerId, PollerCommand),
}

/// The core behind a [`CoreSender`] has ended; the order comes back.
#[derive(Debug)]
pub struct CoreEnded(pub CoreMessage);

/// The sending half of an I/O core's mailbox. Orders are carried out in the order they were posted, between two polls.
pub trait CoreSender: Send + Sync + fmt::Debug {
    /// Which core.
    fn core(&self) -> CoreId;
    /// Posts an order and wakes the core if it sleeps.
    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded>;
}

/// Decides on which core a queue sits when a device is activated or resumed.
pub trait Placement: Send + Sync {
    /// The core for `queue` of the device called `device`.
    fn place(&self, device: &str, queue: u16) -> Arc<dyn CoreSender>;
}

/// The same core for every queue.
impl Placement for Arc<dyn CoreSender> {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.clone()
    }
}
