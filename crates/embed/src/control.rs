//! The control side of a front: bringing the device to a quiescent point and back. One thread or task at a time.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use ioplane_device::mutation::{Law, removed};
use ioplane_device::{
    Change, CoreId, Device, Placement, QueueSet, Quiescent, Refused, Running, State, Stop, Unmoved,
};

use crate::{Front, FrontError, Stage};

/// A device that did not become quiescent in time. It still runs, draining: say what is to become of it.
#[must_use = "a missed deadline leaves the device draining: undrain, suspend or wait longer"]
pub struct Late<'a, D: Device> {
    /// What it was waiting for.
    pub reason: String,
    front: &'a Front<D>,
}

impl<'a, D: Device> Late<'a, D> {
    /// Back to running, all of it.
    pub fn undrain(self) -> Result<(), FrontError> {
        self.front.undrain()
    }

    /// Stops it by force, until `deadline`.
    pub fn suspend(self, deadline: Instant) -> Result<(), FrontError> {
        self.front.suspend(deadline)
    }

    /// Waits longer.
    pub fn keep_waiting(self, deadline: Instant) -> Result<(), Late<'a, D>> {
        self.front.wait_settled(deadline);
        self.front.finish()
    }
}

impl<D: Device> std::fmt::Debug for Late<'_, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Late").field("reason", &self.reason).finish_non_exhaustive()
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<D: Device> Front<D> {
    /// Begins to bring the device to a quiescent point; the guest goes on meanwhile.
    pub fn begin_quiesce(&self) -> Result<(), FrontError> {
        let mut inner = self.lock();
        match std::mem::replace(&mut inner.stage, Stage::Away) {
            Stage::Running(running) => {
                inner.stage = Stage::Quiescing(running.begin_quiesce());
                Ok(())
            }
            other => {
                let now = other.name();
                inner.stage = other;
                Err(FrontError::Not { now, wanted: "running" })
            }
        }
    }

    /// Ready when the device has settled (or is not on its way at all): [`Front::finish`] then holds it.
    pub fn poll_settled(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        let Stage::Quiescing(quiescing) = &mut inner.stage else { return Poll::Ready(()) };
        let settled = quiescing.poll_settled(context);
        inner.waiting = settled.is_pending().then(|| context.waker().clone());
        settled
    }

    /// The future of [`Front::poll_settled`]. Dropping it loses nothing: wait again, or undrain.
    pub async fn settled(&self) {
        poll_fn(|context| self.poll_settled(context)).await
    }

    /// Blocks until the device has settled or until `deadline`.
    pub fn wait_settled(&self, deadline: Instant) {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        while self.poll_settled(&mut context).is_pending() {
            match deadline.checked_duration_since(Instant::now()) {
                Some(left) => std::thread::park_timeout(left),
                None => return,
            }
        }
    }

    /// Holds the device if it has settled. Anything but a device on its way stays what it is.
    pub fn finish(&self) -> Result<(), Late<'_, D>> {
        let mut inner = self.lock();
        let mut reason = None;
        inner.stage = match std::mem::replace(&mut inner.stage, Stage::Away) {
            Stage::Quiescing(quiescing) => match quiescing.finish() {
                Ok(quiescent) => Stage::Held(quiescent),
                Err(missed) => {
                    reason = Some(missed.reason.clone());
                    Stage::Quiescing(missed.keep_waiting())
                }
            },
            other => other,
        };
        inner.waiting = None;
        self.announce(&mut inner);
        reason.map_or(Ok(()), |reason| Err(Late { reason, front: self }))
    }

    /// Brings the device to a quiescent point and holds it there, or gives the miss when `deadline` has passed.
    pub fn quiesce(&self, deadline: Instant) -> Result<Result<(), Late<'_, D>>, FrontError> {
        self.begin_quiesce()?;
        self.wait_settled(deadline);
        Ok(self.finish())
    }

    /// Takes a quiesce back. What the guest asked for meanwhile is carried out.
    pub fn undrain(&self) -> Result<(), FrontError> {
        let mut inner = self.lock();
        let mut quiescing = match std::mem::replace(&mut inner.stage, Stage::Away) {
            Stage::Quiescing(quiescing) => quiescing,
            other => {
                let now = other.name();
                inner.stage = other;
                return Err(FrontError::Not { now, wanted: "quiescing" });
            }
        };
        if removed(Law::GivesBack) && quiescing.with(|device| device.active().is_empty()) {
            // Law 5: a device without pollers has nothing else to take back but this. It is held as soon as it is still.
            inner.stage = Stage::Quiescing(quiescing);
            return Ok(());
        }
        let (stage, owed) = match quiescing.finish() {
            // It arrived after all; going on from there is the same to the guest.
            Ok(quiescent) => (self.resumed(quiescent), Ok(Vec::new())),
            Err(missed) => match missed.undrain(&*self.placement) {
                Ok((running, owed)) => (Ok(Stage::Running(running)), Ok(owed)),
                Err(Refused { kept, error }) => (Ok(Stage::Quiescing(kept.keep_waiting())), Err(error)),
            },
        };
        let (stage, failed) = match stage {
            Ok(stage) => (stage, None),
            Err((stage, error)) => (stage, Some(error)),
        };
        inner.stage = stage;
        let mut outcome = failed.map_or(Ok(()), Err);
        for effect in owed? {
            outcome = outcome.and(self.carry_out(&mut inner.stage, effect));
        }
        self.announce(&mut inner);
        outcome
    }

    fn resumed(&self, quiescent: Quiescent<D>) -> Result<Stage<D>, (Stage<D>, FrontError)> {
        match quiescent.resume(&*self.placement) {
            Ok(running) => Ok(Stage::Running(running)),
            Err(Refused { kept, error }) => Err((Stage::Held(kept), error.into())),
        }
    }

    /// Stops a device that is on its way by force; when this returns `Ok` it is held.
    pub fn suspend(&self, deadline: Instant) -> Result<(), FrontError> {
        {
            let mut inner = self.lock();
            let (stage, outcome) = match std::mem::replace(&mut inner.stage, Stage::Away) {
                Stage::Quiescing(quiescing) => match quiescing.finish() {
                    Ok(quiescent) => (Stage::Held(quiescent), Ok(())),
                    Err(missed) => match missed.suspend() {
                        Ok(quiescing) => (Stage::Quiescing(quiescing), Ok(())),
                        Err(Refused { kept, error }) => {
                            (Stage::Quiescing(kept.keep_waiting()), Err(error.into()))
                        }
                    },
                },
                other => {
                    let now = other.name();
                    (other, Err(FrontError::Not { now, wanted: "quiescing" }))
                }
            };
            inner.stage = stage;
            outcome?;
        }
        self.wait_settled(deadline);
        self.finish().map_err(|late| FrontError::Stuck(late.reason))
    }

    /// What another process or host needs to go on from here. The device must be held.
    pub fn save(&self) -> Result<State, FrontError> {
        match &self.lock().stage {
            Stage::Held(quiescent) => Ok(quiescent.save()?),
            other => Err(FrontError::Not { now: other.name(), wanted: "held" }),
        }
    }

    /// How the held device was stopped.
    pub fn stop(&self) -> Option<Stop> {
        match &self.lock().stage {
            Stage::Held(quiescent) => Some(quiescent.stop()),
            _ => None,
        }
    }

    /// Puts `fresh` with `state` in the place of the held device and starts it. If that is refused the old one stays held.
    pub fn transplant(&self, fresh: D, state: &State) -> Result<(), FrontError> {
        let old = self.take()?;
        let loaded = match Quiescent::new(fresh).load(state) {
            Ok(loaded) => loaded,
            Err(Refused { error, .. }) => {
                self.hold(old)?;
                return Err(error.into());
            }
        };
        if let Err(Refused { error, .. }) = self.start(loaded) {
            self.hold(old)?;
            return Err(error.into());
        }
        Ok(())
    }

    /// Tells the device and every poller of a change, and waits until `deadline` for all to acknowledge it; says whether
    /// they have. Whatever stage it is in. Accesses wait meanwhile: a poll of each core.
    pub fn change(&self, change: &Change, deadline: Instant) -> Result<bool, FrontError> {
        let mut inner = self.lock();
        let applied = match &mut inner.stage {
            Stage::Running(running) => {
                let all = running.queues();
                running.apply(&all, change)
            }
            Stage::Quiescing(quiescing) => quiescing.apply(change),
            Stage::Held(quiescent) => {
                quiescent.with(|device, _| device.apply(&QueueSet::new(), change));
                return Ok(true);
            }
            other => return Err(FrontError::Not { now: other.name(), wanted: "here" }),
        };
        // With the lock: an effect carried out meanwhile would take our place on the doorstep.
        let heard = applied.wait(deadline);
        inner.nudge();
        Ok(heard)
    }

    /// [`Running::move_queue`]. Accesses wait meanwhile.
    pub fn move_queue(
        &self,
        queue: u16,
        to: &dyn Placement,
        deadline: Instant,
    ) -> Result<Result<(), Unmoved>, FrontError> {
        self.running(|running| running.move_queue(queue, to, deadline))
    }

    /// The queues that have a poller on duty, and their cores.
    pub fn queues(&self) -> Result<Vec<(u16, Option<CoreId>)>, FrontError> {
        self.running(|running| running.queues().into_iter().map(|q| (q, running.core_of(q))).collect())
    }

    fn running<R>(&self, act: impl FnOnce(&mut Running<D>) -> R) -> Result<R, FrontError> {
        match &mut self.lock().stage {
            Stage::Running(running) => Ok(act(running)),
            other => Err(FrontError::Not { now: other.name(), wanted: "running" }),
        }
    }
}
