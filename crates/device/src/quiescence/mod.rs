//! Quiescence as ownership: the life of a device, one type for each part of it.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::device::{Access, Device, DeviceError, DeviceInfo, Effect, QueueSet, RegisterAddress};
use crate::inbox::{ParkedInbox, block, block_until};
use crate::poller::{Change, Stop};
use crate::slot::{AcksLeft, CoreId, CoreSender, Placement, PollerCommand};
use crate::state::SavedState;

mod attached;
mod moving;
pub(crate) mod proof;
mod quiescing;

use attached::AttachedPollers;
pub use moving::{Left, MoveError};
use proof::PROOF;
pub use proof::QuiescenceProof;
pub use quiescing::{Missed, Quiescing};

/// A step that did not succeed, with the device as it was before.
pub struct Refused<T> {
    /// What the step was asked of, unharmed.
    pub kept: T,
    /// Why.
    pub error: DeviceError,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A device at a quiescent point, with every one of its pollers: the only one that offers what needs it.
pub struct Quiescent<D: Device> {
    device: D,
    stop: Stop,
}

impl<D: Device> Quiescent<D> {
    /// A device that has not run yet is quiescent.
    pub fn new(device: D) -> Self {
        Quiescent { device, stop: Stop::Drained }
    }

    /// Whether something in flight was fenced and recorded on the way here, or nothing was in flight.
    pub fn stop(&self) -> Stop {
        self.stop
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Does to the device what needs the proof: replacing a backing, shrinking memory.
    pub fn with<R>(&mut self, change: impl FnOnce(&mut D, &QuiescenceProof) -> R) -> R {
        change(&mut self.device, &PROOF)
    }

    /// [`Device::save`].
    pub fn save(&self) -> Result<SavedState, DeviceError> {
        self.device.save(&PROOF)
    }

    /// [`Device::load`]: from here on only [`Loaded::start`] leads back to running.
    pub fn load(mut self, state: &SavedState) -> Result<Loaded<D>, Refused<Self>> {
        match self.device.load(&PROOF, state) {
            Ok(()) => Ok(Loaded { device: self.device }),
            Err(error) => Err(Refused { kept: self, error }),
        }
    }

    /// [`Device::reset`].
    pub fn reset(&mut self) {
        self.device.reset(&PROOF);
        self.stop = Stop::Drained;
    }

    /// Goes on after a pause: the device knows its own state to be true. Every queue is looked at again and signalled once.
    pub fn resume(mut self, placement: &dyn Placement) -> Result<Running<D>, Refused<Self>> {
        let mut attached = AttachedPollers::default();
        let queues = self.device.active();
        match attached.attach(&mut self.device, &queues, placement) {
            Ok(()) => Ok(Running { device: self.device, attached }),
            Err(error) => {
                // Pollers that were attached before the error are parked before anybody else may touch the device.
                let stop = if attached.pollers.is_empty() { self.stop } else { Stop::Suspended };
                let Running { device, .. } = recall(Running { device: self.device, attached });
                Err(Refused { kept: Quiescent { device, stop }, error })
            }
        }
    }

    /// Gives the device up.
    pub fn into_device(self) -> D {
        self.device
    }
}

/// Suspends every attached poller and waits until all have parked, which takes one poll. Without a deadline, since a device
/// whose poller is still on a core is not quiescent, however long that core takes to poll it.
fn recall<D: Device>(mut running: Running<D>) -> Running<D> {
    let all = running.queues();
    running.suspend(&all);
    block(|context| running.poll_stopped(context, &all));
    running
}

impl<D: Device> fmt::Debug for Quiescent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quiescent").field("device", self.device.info()).field("stop", &self.stop).finish()
    }
}

/// A device whose state came from outside and has been checked. It starts; it does not resume.
pub struct Loaded<D: Device> {
    device: D,
}

impl<D: Device> Loaded<D> {
    /// Starts from the loaded state: queues are built anew against the guest's memory, which is checked once more.
    pub fn start(self, placement: &dyn Placement) -> Result<Running<D>, Refused<Self>> {
        Quiescent::new(self.device)
            .resume(placement)
            .map_err(|refused| Refused { kept: Loaded { device: refused.kept.device }, error: refused.error })
    }

    /// Back to where it can be saved, loaded or reset.
    pub fn into_quiescent(self) -> Quiescent<D> {
        Quiescent::new(self.device)
    }
}

impl<D: Device> fmt::Debug for Loaded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("device", self.device.info()).finish()
    }
}

/// A running device: its control half here, its pollers on I/O cores.
pub struct Running<D: Device> {
    device: D,
    attached: AttachedPollers,
}

impl<D: Device> Running<D> {
    /// What is fixed about the device.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The control half, to look at.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The control half, for changes that need no quiescent point: those that do ask for a [`QuiescenceProof`].
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// [`Device::access`]. The effect is the caller's to carry out.
    pub fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        self.device.access(at, op)
    }

    /// The queues that have a poller on a core, draining or not.
    pub fn queues(&self) -> QueueSet {
        self.attached.queues()
    }

    /// On which core the poller of `queue` is.
    pub fn core_of(&self, queue: u16) -> Option<CoreId> {
        self.attached.pollers.iter().find(|p| p.queue == queue).map(|p| p.sender.core())
    }

    /// The mailbox of the core that the poller of `queue` is on. A [`Placement`] itself, which puts the queue there again.
    pub fn sender_of(&self, queue: u16) -> Option<Arc<dyn CoreSender>> {
        self.attached.pollers.iter().find(|p| p.queue == queue).map(|p| p.sender.clone())
    }

    /// Puts pollers for `queues` on cores; those that have one keep it.
    pub fn start(&mut self, queues: &QueueSet, placement: &dyn Placement) -> Result<(), DeviceError> {
        self.attached.attach(&mut self.device, queues, placement)
    }

    /// Asks the pollers of `queues` to drain and park; see [`Running::poll_stopped`].
    pub fn drain(&mut self, queues: &QueueSet) {
        self.attached.send(queues, || PollerCommand::Drain);
    }

    /// Undoes [`Running::drain`]: pollers that drain take work again, queues whose poller has parked get a new one if the
    /// device still wants them active. Blocks until every core has acknowledged. That takes one poll, or as long as a core
    /// that is starved of processor time needs: nobody would restart a queue whose poller parked after this had returned.
    pub fn undrain(&mut self, queues: &QueueSet, placement: &dyn Placement) -> Result<(), DeviceError> {
        let left = AcksLeft::new(self.attached.inbox.clone());
        self.attached.send(queues, || PollerCommand::Undrain(left.ack()));
        let applied = Applied { left, inbox: self.attached.inbox.clone() };
        block(|context| applied.poll_done(context));
        self.attached.collect_parked(&mut self.device);
        let again: QueueSet = self.device.active().intersection(queues).copied().collect();
        self.start(&again, placement)
    }

    /// Asks the pollers of `queues` to park at once, with what is in flight fenced and recorded.
    pub fn suspend(&mut self, queues: &QueueSet) {
        self.attached.send(queues, || PollerCommand::Suspend);
    }

    /// Ready when none of `queues` has a poller on a core any more; the device has got them back.
    pub fn poll_stopped(&mut self, context: &mut Context<'_>, queues: &QueueSet) -> Poll<()> {
        self.attached.inbox.register(context.waker());
        self.attached.collect_parked(&mut self.device);
        if self.attached.pollers.iter().any(|p| queues.contains(&p.queue)) {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// The future of [`Running::poll_stopped`]. Dropping it loses nothing.
    pub async fn stopped(&mut self, queues: &QueueSet) {
        poll_fn(|context| self.poll_stopped(context, queues)).await
    }

    /// Blocks until the pollers of `queues` have parked or `deadline` has passed; says whether they have.
    pub fn wait_stopped(&mut self, queues: &QueueSet, deadline: Instant) -> bool {
        block_until(deadline, |context| self.poll_stopped(context, queues)).is_some()
    }

    /// Applies a change to the device and to the pollers of `queues`. Returns what waits for all of them to acknowledge it.
    pub fn apply(&mut self, queues: &QueueSet, change: &Change) -> Applied {
        self.device.apply(queues, change);
        let left = AcksLeft::new(self.attached.inbox.clone());
        for attached in self.attached.pollers.iter().filter(|p| queues.contains(&p.queue)) {
            attached.send(PollerCommand::Apply(change.clone(), left.ack()));
        }
        Applied { left, inbox: self.attached.inbox.clone() }
    }

    /// Begins to bring the whole device to a quiescent point. The guest goes on meanwhile.
    pub fn begin_quiesce(mut self) -> Quiescing<D> {
        let all = self.queues();
        self.drain(&all);
        let mut quiescing =
            Quiescing { running: self, stop: Stop::Drained, held: false, deferred: Vec::new() };
        quiescing.look();
        quiescing
    }

    /// Blocks until the device is quiescent or `deadline` has passed.
    pub fn quiesce(self, deadline: Instant) -> Result<Quiescent<D>, Missed<D>> {
        self.begin_quiesce().wait(deadline)
    }
}

impl<D: Device> fmt::Debug for Running<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("device", self.device.info()).field("queues", &self.queues()).finish()
    }
}

/// Waits for every poller to acknowledge a change.
#[derive(Debug)]
pub struct Applied {
    left: Arc<AcksLeft>,
    inbox: Arc<ParkedInbox>,
}

impl Applied {
    fn poll_done(&self, context: &mut Context<'_>) -> Poll<()> {
        self.inbox.register(context.waker());
        if self.left.all_in() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Ready when every poller has acknowledged, or has left its core.
    pub async fn done(self) {
        poll_fn(|context| self.poll_done(context)).await
    }

    /// Blocks until then or until `deadline`; says whether all have.
    pub fn wait(self, deadline: Instant) -> bool {
        block_until(deadline, |context| self.poll_done(context)).is_some()
    }
}
