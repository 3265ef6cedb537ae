//! Slots: each holds one poller on an I/O core, and only [`PollerSlot::step`] makes [`Parked`]. Also the messages by which an
//! owner controls its pollers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_memory::mutation::{Invariant, removed};
use ioplane_scheduler::{LimitSet, LimitUnit, QueuePolling};

use crate::Armed;
use crate::context::CoreContext;
use crate::device::DeviceInfo;
use crate::inbox::ParkedInbox;
use crate::limits::SlotLimits;
use crate::outcome::{PollOutcome, PollState};
use crate::parked::{Parked, PollerId};
use crate::poller::{Budget, Change, Poller, Stop, Wakers};
use crate::share::{BlockDevice, DevicePart, GroupPart, Share};
use crate::slot_meter::SlotMeter;
use crate::watch;

/// Number of an I/O core of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CoreId(pub u32);

/// Most polls that a suspended poller needs to park.
const PARK_POLLS: u32 = 16;

/// Holds one poller on one I/O core.
pub struct PollerSlot {
    meter: Arc<SlotMeter>,
    queue: u16,
    poller: Option<Box<dyn Poller>>,
    inbox: Arc<ParkedInbox>,
    share: Share,
    /// While the poller is polled, in the core's context.
    limits: Option<Box<SlotLimits>>,
    fresh: bool,
    suspended: bool,
    /// What a core knows of when its requests come, on the way from one core to another.
    polling: Option<Box<QueuePolling>>,
}

impl PollerSlot {
    pub(crate) fn new(
        poller: Box<dyn Poller>,
        info: &DeviceInfo,
        queue: u16,
        inbox: Arc<ParkedInbox>,
        share: Share,
        block_device: Option<BlockDevice>,
        limits: LimitSet,
    ) -> Self {
        PollerSlot {
            meter: Arc::new(SlotMeter::new(info, queue, PollerId::fresh(), share, block_device)),
            queue,
            poller: Some(poller),
            inbox,
            share,
            limits: SlotLimits::of(limits),
            fresh: true,
            suspended: false,
            polling: None,
        }
    }

    /// The same, for a poller that was on another core. `polling`: what that one knew of it.
    pub(crate) fn with_polling(self, polling: Option<Box<QueuePolling>>) -> Self {
        PollerSlot { polling, ..self }
    }

    /// The core's side, of a slot that it attaches: what the core before it knew of when requests come.
    pub fn take_polling(&mut self) -> Option<Box<QueuePolling>> {
        self.polling.take()
    }

    /// The number of its poller.
    pub fn id(&self) -> PollerId {
        self.meter.poller()
    }

    /// Where its core publishes the time that it uses.
    #[inline]
    pub fn meter(&self) -> &Arc<SlotMeter> {
        &self.meter
    }

    /// The queue that its poller serves.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Its group, and the weight of that.
    pub fn share(&self) -> Share {
        self.share
    }

    /// The block device of the host that its backing lies on, if that is known.
    pub fn block_device(&self) -> Option<BlockDevice> {
        self.meter.block_device()
    }

    /// What the limit counts that has held its requests back last.
    pub fn held_by(&self) -> LimitUnit {
        self.limits.as_ref().map_or(LimitUnit::Requests, |limits| limits.binding)
    }

    /// One turn of the poller. In a fresh slot it first looks at its ring again and signals once. After [`PollState::Parked`] the
    /// poller is in its device's inbox and the slot is empty: free it.
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
            // Most queues have none, and most steps find nothing to do.
            if self.limits.is_none() {
                poller.poll(context, budget)
            } else {
                poll_limited(poller, &mut self.limits, context, budget)
            }
        };
        if outcome.state() == PollState::Parked {
            self.return_poller();
        }
        outcome
    }

    /// The poller has parked: puts it into its device's inbox.
    #[cold]
    fn return_poller(&mut self) {
        if let Some(mut poller) = self.poller.take() {
            poller.tidy();
            let stop = if self.suspended { Stop::Suspended } else { Stop::Drained };
            let (queue, polling) = (self.queue, self.polling.take());
            self.inbox.push(self.meter.poller(), Parked { poller, queue, stop, polling });
        }
    }

    /// Whether the core must step this slot before it may sleep on it: true until the first step (invariant 2).
    pub fn must_look(&self) -> bool {
        self.fresh && !removed(Invariant::LooksAgain)
    }

    /// Carries out a command of the device's owner.
    pub fn handle(&mut self, context: &mut CoreContext, command: PollerCommand) {
        let Some(poller) = self.poller.as_deref_mut() else { return };
        match command {
            PollerCommand::Drain => poller.drain(),
            PollerCommand::Leave(polling) => {
                self.polling = Some(polling);
                poller.drain();
            }
            PollerCommand::Undrain(ack) => {
                if self.suspended {
                    // What was in flight is fenced off already: the poller parks, then its owner makes a new one.
                    self.step(context, Budget::of(1));
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
                    Change::Share(share) => {
                        self.share = share;
                        self.meter.join(share);
                    }
                    Change::BlockDevice(device) => self.meter.moved_to(device),
                    Change::Limits(limits) => self.limits = SlotLimits::of(limits),
                    change => poller.apply(change),
                }
                ack.done();
            }
        }
    }

    /// No core took this slot: its poller parks here, on the owner's thread.
    pub(crate) fn park_unattached(mut self) {
        let mut context = CoreContext::default();
        self.handle(&mut context, PollerCommand::Suspend);
        for _ in 0..PARK_POLLS {
            if self.step(&mut context, Budget::of(1)).state() == PollState::Parked {
                return;
            }
        }
        debug_assert!(false, "queue {}: a suspended poller does not park", self.queue);
    }

    /// [`Poller::arm`] of the poller; an empty slot is armed.
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
        f.debug_struct("PollerSlot")
            .field("id", &self.id())
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

/// What the owner of a device asks of one of its pollers, through the core's mailbox.
#[derive(Debug)]
pub enum PollerCommand {
    /// [`Poller::drain`].
    Drain,
    /// [`Poller::drain`] of one that goes on on another core. Before the slot gets it, an adaptive core writes into it what it knows of the queue.
    Leave(Box<QueuePolling>),
    /// [`Poller::undrain`], acknowledged. A poller that has parked before stays parked.
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
    inbox: Arc<ParkedInbox>,
}

impl AcksLeft {
    pub(crate) fn new(inbox: Arc<ParkedInbox>) -> Arc<Self> {
        Arc::new(AcksLeft { left: AtomicU64::new(0), inbox })
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
            self.left.inbox.wake();
        }
    }
}

/// What goes into a core's mailbox.
#[derive(Debug)]
pub enum CoreMessage {
    /// Poll the poller of this slot from now on.
    Attach(PollerSlot),
    /// A command for that poller. Dropped if the poller has parked meanwhile.
    Poller(PollerId, PollerCommand),
    /// What stands on this core of a group that others have queues of, too. Dropped if the core has none of its queues; forgotten with the last
    /// of them.
    Group(GroupPart),
    /// What a group may have in flight on one block device from this core. Dropped if the core has none of its queues there; forgotten with the
    /// last of them.
    Device(DevicePart),
}

/// The core behind a [`CoreSender`] has ended. Returns the message.
#[derive(Debug)]
pub struct CoreEnded(pub CoreMessage);

/// The sending half of an I/O core's mailbox. The core handles messages in the order they were sent, between two polls.
pub trait CoreSender: Send + Sync + fmt::Debug {
    /// Which core.
    fn core(&self) -> CoreId;
    /// Sends a message and wakes the core if it sleeps.
    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded>;
}

/// Decides which core a queue goes to when a device is activated or resumed.
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

/// A poll during which the context has the slot's limits.
#[inline(never)]
fn poll_limited(
    poller: &mut dyn Poller,
    limits: &mut Option<Box<SlotLimits>>,
    context: &mut CoreContext,
    budget: Budget,
) -> PollOutcome {
    context.swap_limits(limits);
    let outcome = poller.poll(context, budget);
    context.swap_limits(limits);
    outcome
}
