//! The control side of a front: bringing the device to a quiescent point and back. One thread or task at a time.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use ioplane_device::{
    Change, CoreId, Device, Lifecycle, MoveError, OnMiss, Placement, Presence, QueueSet, QuiesceAttempt,
    QuiesceError, QuiescePolicy, Quiesced, Quiescent, Refused, Running, SavedState, SimpleOwner, Stop,
    work_and_resume,
};

use crate::{SharedDevice, SharedDeviceError};

/// A device that did not become quiescent in time. It still runs, draining: say what is to become of it.
#[must_use = "a missed deadline leaves the device draining: undrain, suspend or wait longer"]
pub struct DeadlineMissed<'a, D: Device> {
    /// What it was waiting for.
    pub reason: String,
    front: &'a SharedDevice<D>,
}

impl<'a, D: Device> DeadlineMissed<'a, D> {
    /// Back to running, all of it.
    pub fn undrain(self) -> Result<(), SharedDeviceError> {
        self.front.undrain()
    }

    /// Stops it by force, until `deadline`.
    pub fn suspend(self, deadline: Instant) -> Result<(), SharedDeviceError> {
        self.front.suspend(deadline)
    }

    /// Waits longer.
    pub fn keep_waiting(self, deadline: Instant) -> Result<(), DeadlineMissed<'a, D>> {
        self.front.wait_settled(deadline);
        self.front.finish()
    }
}

impl<D: Device> std::fmt::Debug for DeadlineMissed<'_, D> {
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

impl<D: Device> SharedDevice<D> {
    /// Begins to bring the device to a quiescent point; the guest goes on meanwhile.
    pub fn begin_quiesce(&self) -> Result<(), SharedDeviceError> {
        Ok(self.open()?.device.begin_quiesce()?)
    }

    /// Ready when the device has settled (or is not on its way at all): [`SharedDevice::finish`] then holds it.
    pub fn poll_settled(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        let settled = inner.device.poll_settled(context);
        inner.waiting = settled.is_pending().then(|| context.waker().clone());
        settled
    }

    /// The future of [`SharedDevice::poll_settled`]. Dropping it loses nothing: wait again, or undrain.
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
    pub fn finish(&self) -> Result<(), DeadlineMissed<'_, D>> {
        let mut inner = self.lock();
        let finished = inner.device.finish();
        inner.waiting = None;
        self.announce(&mut inner);
        finished.map_err(|reason| DeadlineMissed { reason, front: self })
    }

    fn begin_attempt(&self, policy: QuiescePolicy) -> Result<QuiesceAttempt, SharedDeviceError> {
        let mut inner = self.open()?;
        inner.device.running()?;
        let owner = &mut SimpleOwner { device: &mut inner.device, placement: &*self.placement };
        QuiesceAttempt::begin(owner, policy).map_err(|error| SharedDeviceError::Stuck(error.to_string()))
    }

    /// Polls it once; when it is ready `then` follows before anybody else reaches the device.
    fn poll_then<R>(
        &self,
        attempt: &mut QuiesceAttempt,
        now: Instant,
        context: &mut Context<'_>,
        then: impl FnOnce(&mut SimpleOwner<'_, D>, Result<Quiesced, QuiesceError>) -> R,
    ) -> Poll<R> {
        let mut inner = self.lock();
        let owner = &mut SimpleOwner { device: &mut inner.device, placement: &*self.placement };
        let polled = attempt.poll(owner, now, context).map(|outcome| then(owner, outcome));
        // An access that settles the device wakes whoever waits, too.
        inner.waiting = polled.is_pending().then(|| context.waker().clone());
        if polled.is_ready() {
            self.announce(&mut inner);
        }
        polled
    }

    /// Brings the running device to a quiescent point by a policy and holds it there, or gives it back. Blocks; its guest is served
    /// meanwhile. Nothing else may bring it to a quiescent point until this returns.
    pub fn quiesce_by(
        &self,
        policy: QuiescePolicy,
    ) -> Result<Result<Quiesced, QuiesceError>, SharedDeviceError> {
        self.wait_then(policy, |_, outcome| outcome)
    }

    /// [`SharedDevice::quiesce_by`], then `work` at the quiescent point; then the device goes on.
    pub fn at_quiescence<R>(
        &self,
        policy: QuiescePolicy,
        work: impl FnOnce(&mut Quiescent<D>) -> R,
    ) -> Result<Result<R, QuiesceError>, SharedDeviceError> {
        self.wait_then(policy, |owner, outcome| outcome.and_then(|_| work_and_resume(owner, work)))
    }

    fn wait_then<R>(
        &self,
        policy: QuiescePolicy,
        then: impl FnOnce(&mut SimpleOwner<'_, D>, Result<Quiesced, QuiesceError>) -> R,
    ) -> Result<R, SharedDeviceError> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut attempt = self.begin_attempt(policy)?;
        let mut then = Some(then);
        loop {
            let polled = self.poll_then(&mut attempt, Instant::now(), &mut context, |owner, outcome| {
                then.take().map(|then| then(owner, outcome))
            });
            if let Poll::Ready(Some(done)) = polled {
                return Ok(done);
            }
            match attempt.wake_at() {
                Some(at) => std::thread::park_timeout(at.saturating_duration_since(Instant::now())),
                None => std::thread::park(),
            }
        }
    }

    /// Brings the device to a quiescent point and holds it there, or gives the miss when `deadline` has passed.
    pub fn quiesce(&self, deadline: Instant) -> Result<Result<(), DeadlineMissed<'_, D>>, SharedDeviceError> {
        self.begin_quiesce()?;
        self.wait_settled(deadline);
        Ok(self.finish())
    }

    /// Takes a quiesce back. What the guest asked for meanwhile is carried out. A device that cannot go on is held.
    pub fn undrain(&self) -> Result<(), SharedDeviceError> {
        let mut inner = self.open()?;
        let now = inner.device.presence();
        if now != Presence::Quiescing {
            return Err(SharedDeviceError::Not { now: now.name(), wanted: "quiescing" });
        }
        let policy = QuiescePolicy { deadline: Instant::now(), on_miss: OnMiss::Undrain };
        let owner = &mut SimpleOwner { device: &mut inner.device, placement: &*self.placement };
        let undrained = QuiesceAttempt::begin(owner, policy).and_then(|attempt| attempt.cancel(owner));
        self.announce(&mut inner);
        undrained.map_err(|error| SharedDeviceError::Stuck(error.to_string()))
    }

    /// Stops a device that is on its way by force; when this returns `Ok` it is held.
    pub fn suspend(&self, deadline: Instant) -> Result<(), SharedDeviceError> {
        self.open()?.device.suspend()?;
        self.wait_settled(deadline);
        self.finish().map_err(|late| SharedDeviceError::Stuck(late.reason))
    }

    /// What another process or host needs to go on from here. The device must be held.
    pub fn save(&self) -> Result<SavedState, SharedDeviceError> {
        Ok(self.open()?.device.quiescent()?.save()?)
    }

    /// How the held device was stopped.
    pub fn stop(&self) -> Option<Stop> {
        Some(self.lock().device.quiescent().ok()?.stop())
    }

    /// Puts `fresh` with `state` in the place of the held device and starts it. If that is refused the old one stays held.
    pub fn transplant(&self, fresh: D, state: &SavedState) -> Result<(), SharedDeviceError> {
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
    pub fn change(&self, change: &Change, deadline: Instant) -> Result<bool, SharedDeviceError> {
        let mut inner = self.open()?;
        let applied = match &mut inner.device {
            Lifecycle::Running(running) => {
                let all = running.queues();
                running.apply(&all, change)
            }
            Lifecycle::Quiescing(quiescing) => quiescing.apply(change),
            Lifecycle::Quiescent(quiescent) => {
                quiescent.with(|device, _| device.apply(&QueueSet::new(), change));
                return Ok(true);
            }
            Lifecycle::Absent => return Err(SharedDeviceError::Not { now: "away", wanted: "here" }),
        };
        // With the lock: an effect carried out meanwhile would replace our waker in the inbox.
        let acknowledged = applied.wait(deadline);
        inner.nudge();
        Ok(acknowledged)
    }

    /// [`Running::move_queue`]. Accesses wait meanwhile.
    pub fn move_queue(
        &self,
        queue: u16,
        to: &dyn Placement,
        deadline: Instant,
    ) -> Result<Result<(), MoveError>, SharedDeviceError> {
        self.running(|running| running.move_queue(queue, to, deadline))
    }

    /// The queues that have a poller on a core, and their cores.
    pub fn queues(&self) -> Result<Vec<(u16, Option<CoreId>)>, SharedDeviceError> {
        self.running(|running| running.queues().into_iter().map(|q| (q, running.core_of(q))).collect())
    }

    fn running<R>(&self, act: impl FnOnce(&mut Running<D>) -> R) -> Result<R, SharedDeviceError> {
        Ok(act(self.open()?.device.running()?))
    }
}
