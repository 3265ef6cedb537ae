//! The policy of quiescence, once for every owner: wait until a deadline; on a miss undrain or suspend; do the work; resume.
//!
//! ```text
//!   Running --begin--> draining --settled--> Quiescent --work--> resume --> Running
//!                         | deadline              ^                 '-- refused --> Quiescent, QuiesceError::NotResumed
//!                         |-- Suspend, Insist --> suspending
//!                         |                       | deadline, or refused
//!                         '-- Undrain ------------+--> undrain --> Running, QuiesceError::Missed
//!                                                       | refused
//!                                                       '--> recovering: suspended, then resumed with the queues that can
//! ```
//!
//! [`QuiesceAttempt`] is the state machine; it reads no clock and waits for nothing. [`quiesce`] and [`at_quiescence`] drive it for an
//! owner that is a task, [`quiesce_blocking`] and [`at_quiescence_blocking`] for one that is a thread; an owner with an event loop of its
//! own polls it there. At every moment the device is in its owner's [`Lifecycle`]: no error and no dropped future loses it.

use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::device::{Device, DeviceError};
use crate::inbox::{block, block_until};
use crate::lifecycle::{Lifecycle, LifecycleError, Presence};
use crate::poller::Stop;
use crate::quiescence::Quiescent;
use crate::slot::Placement;

/// How long queues that had to be suspended because they could not be undrained may take to park.
const RECOVERY: Duration = Duration::from_secs(5);
/// How long queues may take to drain that a guest has stopped while its device was on the way to a quiescent point.
const EFFECTS: Duration = Duration::from_millis(500);

/// What becomes of a device that is not quiescent by its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMiss {
    /// It goes on as if nothing had happened. The work is not done.
    Undrain,
    /// It is stopped by force: what is in flight is fenced and recorded. If it cannot be, or is not quiescent after `timeout`, it goes on
    /// and the work is not done.
    Suspend {
        /// Counted from the deadline.
        timeout: Duration,
    },
    /// As `Suspend`, for as long as that takes; one that cannot be stopped by force has to drain. For what cannot be left undone.
    Insist,
}

/// How long to wait for a quiescent point, and what then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuiescePolicy {
    /// Until when the device may become quiescent by itself.
    pub deadline: Instant,
    /// What becomes of one that has not.
    pub on_miss: OnMiss,
}

/// A device is quiescent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quiesced {
    /// How it was stopped.
    pub stop: Stop,
    /// What it was waiting for when its deadline passed, if it did.
    pub missed: Option<String>,
}

/// Why the work was not done, or what came of the device after it.
#[derive(Debug, thiserror::Error)]
pub enum QuiesceError {
    /// The device is with somebody else.
    #[error("the device is {0}")]
    NotHere(&'static str),
    /// It was not quiescent in time, and runs.
    #[error("{reason}")]
    Missed {
        /// What it was waiting for.
        reason: String,
    },
    /// It was not quiescent in time and does not go on as it was: it is on its way, or quiescent. Another attempt begins from there.
    #[error("{reason}; going on: {error}")]
    NotUndrained {
        /// What it was waiting for.
        reason: String,
        /// What keeps it.
        error: LifecycleError,
    },
    /// The work has been done; the device does not resume and is quiescent.
    #[error(transparent)]
    NotResumed(DeviceError),
}

/// Who owns a device, as the policy needs to know it.
pub trait DeviceOwner {
    /// Its device.
    type Device: Device;

    /// The device, and where its queues go when they run again.
    fn parts(&mut self) -> (&mut Lifecycle<Self::Device>, &dyn Placement);

    /// Whether somebody holds the device at its quiescent point: then it stays there after the work.
    fn is_held(&self) -> bool {
        false
    }

    /// The deadline has passed; `reason` is what the device waits for.
    fn missed(&mut self, reason: &str) {
        let _ = reason;
    }

    /// Resuming was refused for the `round`th time, counted from 0. Changes what was in the way and says whether to try once more.
    fn resume_refused(&mut self, error: &DeviceError, round: usize) -> bool {
        let _ = (error, round);
        false
    }

    /// Runs what may block this thread until every core has turned, or until a disk has answered.
    fn run_blocking<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        work(self)
    }
}

/// A device and where its queues go, with nothing else to say.
pub struct SimpleOwner<'a, D: Device> {
    /// The device.
    pub device: &'a mut Lifecycle<D>,
    /// Where its queues go.
    pub placement: &'a dyn Placement,
}

impl<D: Device> DeviceOwner for SimpleOwner<'_, D> {
    type Device = D;

    fn parts(&mut self) -> (&mut Lifecycle<D>, &dyn Placement) {
        (self.device, self.placement)
    }
}

#[derive(Debug)]
enum Phase {
    Draining,
    Suspending {
        until: Option<Instant>,
    },
    /// A queue could not be undrained. All are suspended, to be resumed with those that can.
    Recovering {
        until: Instant,
        error: Option<LifecycleError>,
    },
}

/// One attempt to bring a device to a quiescent point: a state machine over the owner's [`Lifecycle`]. Given up without
/// [`QuiesceAttempt::cancel`], the device stays on its way, and the next attempt begins from there.
#[derive(Debug)]
pub struct QuiesceAttempt {
    policy: QuiescePolicy,
    phase: Phase,
    missed: Option<String>,
}

impl QuiesceAttempt {
    /// Begins. A device that is quiescent has arrived; one that is on its way goes on from there.
    pub fn begin<O: DeviceOwner>(owner: &mut O, policy: QuiescePolicy) -> Result<Self, QuiesceError> {
        let (device, _) = owner.parts();
        match device {
            Lifecycle::Running(_) => {
                let _ = device.begin_quiesce();
            }
            Lifecycle::Quiescing(_) | Lifecycle::Quiescent(_) => {}
            Lifecycle::Absent => return Err(QuiesceError::NotHere(device.presence().name())),
        }
        Ok(QuiesceAttempt { policy, phase: Phase::Draining, missed: None })
    }

    /// When to poll again, even if nothing wakes the owner.
    pub fn wake_at(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Draining => Some(self.policy.deadline),
            Phase::Suspending { until } => *until,
            Phase::Recovering { until, .. } => Some(*until),
        }
    }

    /// The deadline is now.
    pub fn hurry(&mut self, now: Instant) {
        self.policy.deadline = self.policy.deadline.min(now);
    }

    /// Steps as far as it goes without waiting. Ready with `Ok`: the device is quiescent, and stays so until
    /// [`resume`]. Ready with an error: see there. Not to be polled again then.
    pub fn poll<O: DeviceOwner>(
        &mut self,
        owner: &mut O,
        now: Instant,
        context: &mut Context<'_>,
    ) -> Poll<Result<Quiesced, QuiesceError>> {
        loop {
            let (device, _) = owner.parts();
            if device.poll_settled(context).is_ready() {
                let _ = device.finish();
            }
            match device {
                Lifecycle::Quiescing(_) => {}
                Lifecycle::Quiescent(quiescent) => {
                    let stop = quiescent.stop();
                    return Poll::Ready(match &self.phase {
                        Phase::Recovering { .. } => Err(self.recovered(owner)),
                        _ => Ok(Quiesced { stop, missed: self.missed.take() }),
                    });
                }
                other => return Poll::Ready(Err(QuiesceError::NotHere(other.presence().name()))),
            }
            if self.wake_at().is_none_or(|at| now < at) {
                return Poll::Pending;
            }
            if let Some(error) = self.expired(owner, now) {
                return Poll::Ready(Err(error));
            }
        }
    }

    /// The time of this phase is over.
    fn expired<O: DeviceOwner>(&mut self, owner: &mut O, now: Instant) -> Option<QuiesceError> {
        match &mut self.phase {
            Phase::Draining => {
                // It may have arrived just now.
                let Err(reason) = owner.parts().0.finish() else { return None };
                owner.missed(&reason);
                self.missed = Some(reason);
                let until = match self.policy.on_miss {
                    OnMiss::Undrain => return self.give_back(owner, now),
                    OnMiss::Suspend { timeout } => Some(now + timeout),
                    OnMiss::Insist => None,
                };
                match owner.parts().0.suspend() {
                    Err(error) if until.is_some() => {
                        self.because(&format!("by force: {error}"));
                        self.give_back(owner, now)
                    }
                    // One that cannot be stopped by force has to drain.
                    Ok(()) | Err(_) => {
                        self.phase = Phase::Suspending { until };
                        None
                    }
                }
            }
            Phase::Suspending { .. } => {
                let Err(reason) = owner.parts().0.finish() else { return None };
                self.because(&format!("by force: {reason}"));
                self.give_back(owner, now)
            }
            Phase::Recovering { error, .. } => {
                let error = error.take();
                Some(self.stranded(error))
            }
        }
    }

    fn because(&mut self, more: &str) {
        let reason = self.missed.get_or_insert_default();
        reason.push_str("; ");
        reason.push_str(more);
    }

    fn reason(&mut self) -> String {
        self.missed.take().unwrap_or_default()
    }

    fn stranded(&mut self, error: Option<LifecycleError>) -> QuiesceError {
        let reason = self.reason();
        match error {
            Some(error) => QuiesceError::NotUndrained { reason, error },
            None => QuiesceError::Missed { reason },
        }
    }

    /// The device goes on. `None`: it could not at once; it is suspended first, and then resumed.
    fn give_back<O: DeviceOwner>(&mut self, owner: &mut O, now: Instant) -> Option<QuiesceError> {
        let undrained = owner.run_blocking(|owner| {
            let (device, placement) = owner.parts();
            let deferred = device.undrain(placement)?;
            // What the guest has asked for meanwhile.
            let done = deferred.into_iter().map(|effect| device.carry_out(effect, placement, EFFECTS));
            Ok::<_, LifecycleError>(done.filter_map(Result::err).last())
        });
        match undrained {
            Ok(failed) => {
                if let Some(error) = failed {
                    self.because(&error.to_string());
                }
                Some(QuiesceError::Missed { reason: self.reason() })
            }
            Err(error) => {
                // Already quiescent, or not to be suspended: then it drains.
                let _ = owner.parts().0.suspend();
                self.phase = Phase::Recovering { until: now + RECOVERY, error: Some(error) };
                None
            }
        }
    }

    /// Quiescent for having been suspended, only to go on.
    fn recovered<O: DeviceOwner>(&mut self, owner: &mut O) -> QuiesceError {
        let failed = resume(owner).err().map(LifecycleError::Device);
        self.stranded(failed)
    }

    /// Gives the attempt up: the device goes on, unless it is quiescent already. Blocks, at most until every core has turned.
    pub fn cancel<O: DeviceOwner>(mut self, owner: &mut O) -> Result<(), QuiesceError> {
        if owner.parts().0.presence() != Presence::Quiescing {
            return Ok(());
        }
        let error = match self.give_back(owner, Instant::now()) {
            Some(error) => Some(error),
            None => self.wait(owner).err(),
        };
        match error {
            None | Some(QuiesceError::Missed { .. }) => Ok(()),
            Some(error) => Err(error),
        }
    }

    /// Polls until it is ready. Blocks.
    pub fn wait<O: DeviceOwner>(&mut self, owner: &mut O) -> Result<Quiesced, QuiesceError> {
        loop {
            let wake_at = self.wake_at();
            let poll = |context: &mut Context<'_>| self.poll(owner, Instant::now(), context);
            match wake_at {
                Some(at) => {
                    if let Some(done) = block_until(at, poll) {
                        return done;
                    }
                }
                None => return block(poll),
            }
        }
    }
}

/// An attempt whose owner may stop waiting at any time: dropped then, it is cancelled.
struct Waiting<'a, O: DeviceOwner> {
    owner: &'a mut O,
    attempt: Option<QuiesceAttempt>,
}

impl<O: DeviceOwner> Drop for Waiting<'_, O> {
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            // Refused, it is quiescent, where its owner finds it.
            let _ = attempt.cancel(self.owner);
        }
    }
}

/// Brings the device to a quiescent point and leaves it there, for [`resume`]. `sleep_until` is the owner's timer. Dropped before it is
/// ready, the device goes on: the drop blocks until every core has turned.
pub async fn quiesce<O: DeviceOwner, S: Future<Output = ()>>(
    owner: &mut O,
    policy: QuiescePolicy,
    sleep_until: impl Fn(Instant) -> S,
) -> Result<Quiesced, QuiesceError> {
    let attempt = QuiesceAttempt::begin(owner, policy)?;
    let mut waiting = Waiting { owner, attempt: Some(attempt) };
    // A timer has its own clock: when it says that it is time, it is.
    let mut past = None;
    loop {
        let wake_at = waiting.attempt.as_ref().and_then(QuiesceAttempt::wake_at);
        let mut timer = pin!(async {
            match wake_at {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        });
        let step = poll_fn(|context| {
            let Waiting { owner, attempt } = &mut waiting;
            let Some(attempt) = attempt else { return Poll::Pending };
            let now = Instant::now().max(past.unwrap_or_else(Instant::now));
            if let Poll::Ready(done) = attempt.poll(&mut **owner, now, context) {
                return Poll::Ready(Some(done));
            }
            if attempt.wake_at() != wake_at {
                return Poll::Ready(None);
            }
            timer.as_mut().poll(context).map(|()| None)
        });
        if let Some(done) = step.await {
            waiting.attempt = None;
            return done;
        }
        past = wake_at;
    }
}

/// [`quiesce`] for an owner that is a thread.
pub fn quiesce_blocking<O: DeviceOwner>(
    owner: &mut O,
    policy: QuiescePolicy,
) -> Result<Quiesced, QuiesceError> {
    QuiesceAttempt::begin(owner, policy)?.wait(owner)
}

/// Does `work` at a quiescent point of the device and resumes it, whatever comes of the work: that is the outcome. An error tells that it
/// was not done, but for [`QuiesceError::NotResumed`].
pub async fn at_quiescence<O: DeviceOwner, S: Future<Output = ()>, R>(
    owner: &mut O,
    policy: QuiescePolicy,
    sleep_until: impl Fn(Instant) -> S,
    work: impl FnOnce(&mut Quiescent<O::Device>) -> R,
) -> Result<R, QuiesceError> {
    quiesce(owner, policy, sleep_until).await?;
    work_and_resume(owner, work)
}

/// [`at_quiescence`] for an owner that is a thread.
pub fn at_quiescence_blocking<O: DeviceOwner, R>(
    owner: &mut O,
    policy: QuiescePolicy,
    work: impl FnOnce(&mut Quiescent<O::Device>) -> R,
) -> Result<R, QuiesceError> {
    quiesce_blocking(owner, policy)?;
    work_and_resume(owner, work)
}

/// Does `work` to the quiescent device, then resumes it unless somebody holds it.
pub fn work_and_resume<O: DeviceOwner, R>(
    owner: &mut O,
    work: impl FnOnce(&mut Quiescent<O::Device>) -> R,
) -> Result<R, QuiesceError> {
    let (device, _) = owner.parts();
    let now = device.presence().name();
    let outcome = work(device.quiescent().map_err(|_| QuiesceError::NotHere(now))?);
    if !owner.is_held() {
        resume(owner).map_err(QuiesceError::NotResumed)?;
    }
    Ok(outcome)
}

/// The quiescent device goes on; one that runs already does. On an error it is quiescent. Blocks.
pub fn resume<O: DeviceOwner>(owner: &mut O) -> Result<(), DeviceError> {
    for round in 0.. {
        let resumed = owner.run_blocking(|owner| {
            let (device, placement) = owner.parts();
            device.resume(placement)
        });
        match resumed {
            Err(LifecycleError::Device(error)) => {
                if !owner.resume_refused(&error, round) {
                    return Err(error);
                }
            }
            // Somebody else's step, whose outcome stands.
            _ => break,
        }
    }
    Ok(())
}
