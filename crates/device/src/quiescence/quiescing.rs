//! On the way to a quiescent point, and what becomes of a device that does not get there in time.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use ioplane_memory::mutation::{Invariant, removed};

use super::{Applied, Quiescent, Refused, Running};
use crate::device::{Access, AfterStop, Device, DeviceInfo, Effect, Quiescence, RegisterAddress};
use crate::inbox::{ParkedInbox, block_until};
use crate::poller::{Change, Stop};
use crate::slot::Placement;

/// A device on its way to a quiescent point. Its guest goes on: registers are served, which is how hardware that the
/// guest drives comes to be still; the moment it is, it is held there.
pub struct Quiescing<D: Device> {
    pub(super) running: Running<D>,
    pub(super) stop: Stop,
    pub(super) held: bool,
    pub(super) deferred: Vec<Effect>,
}

impl<D: Device> Quiescing<D> {
    /// What is fixed about the device.
    pub fn info(&self) -> &DeviceInfo {
        self.running.info()
    }

    /// The device, to look at.
    pub fn device(&self) -> &D {
        self.running.device()
    }

    /// One register access by the guest. `None`: the device is held at its quiescent point, the access has to wait.
    /// What the access asks for is deferred: carried out at the quiescent point, or returned by [`Missed::undrain`].
    pub fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Option<()> {
        self.look();
        if self.held {
            return None;
        }
        let effect = self.running.access(at, op);
        // The device names queues that were started meanwhile when it resumes; the rest is deferred.
        if let Effect::Deactivate(..) = effect {
            self.deferred.push(effect);
        }
        self.look();
        Some(())
    }

    /// An event of the device itself (its interrupt, the end of its DMA), which may make it still.
    pub fn event(&mut self, event: impl FnOnce(&mut D)) {
        if !self.held {
            event(&mut self.running.device);
        }
        self.look();
    }

    /// Changes the device, also where it is held: what needs no quiescent point, and what its guest does not wait for.
    pub fn with<R>(&mut self, change: impl FnOnce(&mut D) -> R) -> R {
        let done = change(&mut self.running.device);
        self.look();
        done
    }

    pub(super) fn look(&mut self) {
        if self.running.attached.collect_parked(&mut self.running.device) == Some(Stop::Suspended) {
            self.stop = Stop::Suspended;
        }
        if !self.held && self.running.attached.pollers.is_empty() {
            self.held = self.running.device.quiescence() == Quiescence::Quiescent;
        }
    }

    /// Ready when the device is held at its quiescent point.
    pub fn poll_settled(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.running.attached.inbox.register(context.waker());
        self.look();
        if self.held { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The future of [`Quiescing::poll_settled`]. Dropping it loses nothing: ask again, or [`Quiescing::finish`].
    pub async fn settled(&mut self) {
        poll_fn(|context| self.poll_settled(context)).await
    }

    /// [`Running::apply`], to every poller that has not parked yet.
    pub fn apply(&mut self, change: &Change) -> Applied {
        let left = self.running.queues();
        self.running.apply(&left, change)
    }

    /// Whether the device is held at its quiescent point.
    pub fn is_settled(&mut self) -> bool {
        self.look();
        self.held
    }

    /// The same, without looking whether that has changed.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Where parked pollers arrive: for an owner that waits by other means.
    pub fn inbox(&self) -> Arc<ParkedInbox> {
        self.running.attached.inbox.clone()
    }

    /// The quiescent device; or, if it is not there yet, the miss with its reason.
    pub fn finish(mut self) -> Result<Quiescent<D>, Missed<D>> {
        self.look();
        if !self.held {
            let queues = self.running.queues();
            let reason = match self.running.device.quiescence() {
                Quiescence::Busy(what) => what.to_owned(),
                Quiescence::Quiescent => format!("queues {queues:?} still have requests in flight"),
            };
            return Err(Missed { reason, quiescing: self });
        }
        let mut quiescent = Quiescent { device: self.running.device, stop: self.stop };
        for effect in self.deferred.drain(..) {
            if let Effect::Deactivate(_, AfterStop::Reset) = effect {
                quiescent.reset();
            }
        }
        Ok(quiescent)
    }

    /// Blocks until the device is quiescent or `deadline` has passed. For owners whose guest does not need them to serve
    /// its registers meanwhile.
    pub fn wait(mut self, deadline: Instant) -> Result<Quiescent<D>, Missed<D>> {
        block_until(deadline, |context| self.poll_settled(context));
        self.finish()
    }
}

impl<D: Device> fmt::Debug for Quiescing<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quiescing")
            .field("device", self.info())
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

/// The deadline passed first. The device still runs, draining; say what is to become of it.
#[must_use = "a missed deadline leaves the device draining: undrain or suspend it"]
pub struct Missed<D: Device> {
    /// What it was waiting for.
    pub reason: String,
    quiescing: Quiescing<D>,
}

impl<D: Device> Missed<D> {
    /// Back to running: pollers that drain take work again, queues whose poller has parked get a new one. Returns what the
    /// guest asked for meanwhile (queues to stop, a reset), for the owner to carry out.
    pub fn undrain(self, placement: &dyn Placement) -> Result<(Running<D>, Vec<Effect>), Refused<Self>> {
        let Missed { reason, quiescing: Quiescing { mut running, stop, held, deferred } } = self;
        if removed(Invariant::GivesBack) {
            return Ok((running, deferred));
        }
        let all = running.queues().union(&running.device.active()).copied().collect();
        match running.undrain(&all, placement) {
            Ok(()) => Ok((running, deferred)),
            Err(error) => {
                let quiescing = Quiescing { running, stop, held, deferred };
                Err(Refused { kept: Missed { reason, quiescing }, error })
            }
        }
    }

    /// Stops it by force: what is in flight is fenced and recorded. Wait for the result once more; it takes one poll.
    pub fn suspend(self) -> Result<Quiescing<D>, Refused<Self>> {
        let Missed { reason, mut quiescing } = self;
        let left = quiescing.running.queues();
        quiescing.running.suspend(&left);
        if let Err(error) = quiescing.running.device.suspend() {
            return Err(Refused { kept: Missed { reason, quiescing }, error });
        }
        quiescing.stop = Stop::Suspended;
        Ok(quiescing)
    }

    /// Goes on waiting.
    pub fn keep_waiting(self) -> Quiescing<D> {
        self.quiescing
    }
}

impl<D: Device> fmt::Debug for Missed<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Missed").field("device", self.quiescing.info()).field("reason", &self.reason).finish()
    }
}
