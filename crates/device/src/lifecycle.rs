//! A device in the hands of its one owner, whatever part of its life it is in. Every step leaves it there, also one that is refused:
//! an owner that is interrupted, or that drops a future, finds its device where it left it.

use std::fmt;
use std::task::{Context, Poll};

use ioplane_memory::mutation::{Invariant, removed};

use crate::device::{Device, DeviceError, Effect};
use crate::quiescence::{Quiescent, Quiescing, Refused, Running};
use crate::slot::Placement;
use crate::state::SavedState;

/// Which part of its life a device is in, as others than its owner see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Running.
    Running,
    /// On its way to a quiescent point.
    Quiescing,
    /// At one.
    Held,
    /// Taken out.
    Away,
    /// Gone for good.
    Closed,
}

impl Presence {
    /// In one word, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Presence::Running => "running",
            Presence::Quiescing => "quiescing",
            Presence::Held => "held",
            Presence::Away => "away",
            Presence::Closed => "closed",
        }
    }
}

/// A step that a device did not take. It is in the part of its life that it was in, unless the step says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    /// The step starts from another part of its life.
    #[error("the device is {now}; this needs it {wanted}")]
    Not {
        /// What it is.
        now: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
    /// The device said no.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest asked for a stop, and neither draining nor suspending parked every poller in time.
    #[error("queues did not stop when the guest asked for it: {0}")]
    Stuck(String),
}

/// A device and the part of its life that it is in. Owned by one task or thread, or behind that one's lock.
pub enum Lifecycle<D: Device> {
    /// Running.
    Running(Running<D>),
    /// On its way to a quiescent point. Its guest goes on.
    Quiescing(Quiescing<D>),
    /// At one.
    Quiescent(Quiescent<D>),
    /// Somebody has taken it out, and may put it in again.
    Absent,
}

impl<D: Device> From<Running<D>> for Lifecycle<D> {
    fn from(running: Running<D>) -> Self {
        Lifecycle::Running(running)
    }
}

impl<D: Device> From<Quiescent<D>> for Lifecycle<D> {
    fn from(quiescent: Quiescent<D>) -> Self {
        Lifecycle::Quiescent(quiescent)
    }
}

impl<D: Device> Lifecycle<D> {
    /// Which part of its life it is in.
    pub fn presence(&self) -> Presence {
        match self {
            Lifecycle::Running(_) => Presence::Running,
            Lifecycle::Quiescing(_) => Presence::Quiescing,
            Lifecycle::Quiescent(_) => Presence::Held,
            Lifecycle::Absent => Presence::Away,
        }
    }

    pub(crate) fn not(&self, wanted: &'static str) -> LifecycleError {
        LifecycleError::Not { now: self.presence().name(), wanted }
    }

    /// The device, if it runs.
    pub fn running(&mut self) -> Result<&mut Running<D>, LifecycleError> {
        match self {
            Lifecycle::Running(running) => Ok(running),
            other => Err(other.not("running")),
        }
    }

    /// The device, if it is quiescent.
    pub fn quiescent(&mut self) -> Result<&mut Quiescent<D>, LifecycleError> {
        match self {
            Lifecycle::Quiescent(quiescent) => Ok(quiescent),
            other => Err(other.not("held")),
        }
    }

    /// Looks at the device, unless it is away.
    pub fn look(&self) -> Option<&D> {
        match self {
            Lifecycle::Running(running) => Some(running.device()),
            Lifecycle::Quiescing(quiescing) => Some(quiescing.device()),
            Lifecycle::Quiescent(quiescent) => Some(quiescent.device()),
            Lifecycle::Absent => None,
        }
    }

    /// Changes the device, unless it is away: what needs no quiescent point, and what its guest does not wait for.
    pub fn with<R>(&mut self, change: impl FnOnce(&mut D) -> R) -> Result<R, LifecycleError> {
        match self {
            Lifecycle::Running(running) => Ok(change(running.device_mut())),
            Lifecycle::Quiescing(quiescing) => Ok(quiescing.with(change)),
            Lifecycle::Quiescent(quiescent) => Ok(quiescent.with(|device, _| change(device))),
            Lifecycle::Absent => Err(self.not("here")),
        }
    }

    /// Takes the quiescent device out.
    pub fn take(&mut self) -> Result<Quiescent<D>, LifecycleError> {
        self.step(|now| match now {
            Lifecycle::Quiescent(quiescent) => (Lifecycle::Absent, Ok(quiescent)),
            other => {
                let error = other.not("held");
                (other, Err(error))
            }
        })
    }

    /// Moves the device through a step. Nobody sees it absent: there is no other owner, and no step waits for one.
    fn step<R>(&mut self, step: impl FnOnce(Self) -> (Self, R)) -> R {
        let (next, outcome) = step(std::mem::replace(self, Lifecycle::Absent));
        *self = next;
        outcome
    }

    /// [`Running::begin_quiesce`].
    pub fn begin_quiesce(&mut self) -> Result<(), LifecycleError> {
        self.step(|now| match now {
            Lifecycle::Running(running) => (Lifecycle::Quiescing(running.begin_quiesce()), Ok(())),
            other => {
                let error = other.not("running");
                (other, Err(error))
            }
        })
    }

    /// Ready when [`Lifecycle::finish`] makes it quiescent, or when it is not on its way at all.
    pub fn poll_settled(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match self {
            Lifecycle::Quiescing(quiescing) => quiescing.poll_settled(context),
            _ => Poll::Ready(()),
        }
    }

    /// The device that is on its way is quiescent, or it goes on being on its way and this says what it waits for. Anything else stays
    /// what it is.
    pub fn finish(&mut self) -> Result<(), String> {
        self.step(|now| match now {
            Lifecycle::Quiescing(quiescing) => match quiescing.finish() {
                Ok(quiescent) => (Lifecycle::Quiescent(quiescent), Ok(())),
                Err(missed) => {
                    let reason = missed.reason.clone();
                    (Lifecycle::Quiescing(missed.keep_waiting()), Err(reason))
                }
            },
            other => (other, Ok(())),
        })
    }

    /// Stops the device that is on its way by force: what is in flight is fenced and recorded. It is on its way still, and a poll of
    /// each core away from being quiescent.
    pub fn suspend(&mut self) -> Result<(), LifecycleError> {
        self.step(|now| match now {
            Lifecycle::Quiescing(quiescing) => match quiescing.finish() {
                Ok(quiescent) => (Lifecycle::Quiescent(quiescent), Ok(())),
                Err(missed) => match missed.suspend() {
                    Ok(quiescing) => (Lifecycle::Quiescing(quiescing), Ok(())),
                    Err(Refused { kept, error }) => {
                        (Lifecycle::Quiescing(kept.keep_waiting()), Err(error.into()))
                    }
                },
            },
            other => {
                let error = other.not("quiescing");
                (other, Err(error))
            }
        })
    }

    /// Takes a quiesce back: the device runs. What its guest has asked for meanwhile comes back to be carried out. On an error it is on
    /// its way still, or quiescent if it had arrived. Blocks until the cores have acknowledged it.
    pub fn undrain(&mut self, placement: &dyn Placement) -> Result<Vec<Effect>, LifecycleError> {
        self.step(|now| match now {
            Lifecycle::Quiescing(mut quiescing) => {
                if removed(Invariant::GivesBack) && quiescing.with(|device| device.active().is_empty()) {
                    // Invariant 5: a device without pollers has nothing else to take back but this. It is held as soon as it is still.
                    return (Lifecycle::Quiescing(quiescing), Ok(Vec::new()));
                }
                match quiescing.finish() {
                    // It arrived after all; going on from there is the same to the guest.
                    Ok(quiescent) => {
                        let (next, resumed) = resumed(quiescent, placement);
                        (next, resumed.map(|()| Vec::new()))
                    }
                    Err(missed) => match missed.undrain(placement) {
                        Ok((running, deferred)) => (Lifecycle::Running(running), Ok(deferred)),
                        Err(Refused { kept, error }) => {
                            (Lifecycle::Quiescing(kept.keep_waiting()), Err(error.into()))
                        }
                    },
                }
            }
            other => {
                let error = other.not("quiescing");
                (other, Err(error))
            }
        })
    }

    /// [`Quiescent::resume`]. On an error it stays quiescent.
    pub fn resume(&mut self, placement: &dyn Placement) -> Result<(), LifecycleError> {
        self.step(|now| match now {
            Lifecycle::Quiescent(quiescent) => resumed(quiescent, placement),
            other => {
                let error = other.not("held");
                (other, Err(error))
            }
        })
    }

    /// [`Quiescent::load`] and the start from there. A state that is refused leaves the quiescent device as it was; one that does not
    /// start leaves it quiescent, with that state.
    pub fn load(&mut self, state: &SavedState, placement: &dyn Placement) -> Result<(), LoadError> {
        self.step(|now| match now {
            Lifecycle::Quiescent(quiescent) => match quiescent.load(state) {
                Ok(loaded) => match loaded.start(placement) {
                    Ok(running) => (Lifecycle::Running(running), Ok(())),
                    Err(Refused { kept, error }) => {
                        (Lifecycle::Quiescent(kept.into_quiescent()), Err(LoadError::NotStarted(error)))
                    }
                },
                Err(Refused { kept, error }) => (Lifecycle::Quiescent(kept), Err(LoadError::Refused(error))),
            },
            other => {
                let error = other.not("held");
                (other, Err(LoadError::Lifecycle(error)))
            }
        })
    }
}

fn resumed<D: Device>(
    quiescent: Quiescent<D>,
    placement: &dyn Placement,
) -> (Lifecycle<D>, Result<(), LifecycleError>) {
    match quiescent.resume(placement) {
        Ok(running) => (Lifecycle::Running(running), Ok(())),
        Err(Refused { kept, error }) => (Lifecycle::Quiescent(kept), Err(error.into())),
    }
}

/// Why a saved state is not where the device goes on from.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device is not quiescent.
    #[error(transparent)]
    Lifecycle(LifecycleError),
    /// The state is refused: the device is as it was.
    #[error(transparent)]
    Refused(DeviceError),
    /// The device has the state and does not start from it: it is quiescent.
    #[error(transparent)]
    NotStarted(DeviceError),
}

impl<D: Device> fmt::Debug for Lifecycle<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lifecycle::Running(running) => running.fmt(f),
            Lifecycle::Quiescing(quiescing) => quiescing.fmt(f),
            Lifecycle::Quiescent(quiescent) => quiescent.fmt(f),
            Lifecycle::Absent => f.write_str("Absent"),
        }
    }
}
