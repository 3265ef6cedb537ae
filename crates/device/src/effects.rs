//! What a guest does to its device's registers, and what that asks of the device's owner.

use std::time::{Duration, Instant};

use crate::device::{Access, AfterStop, Device, Effect, QueueSet, RegisterAddress};
use crate::lifecycle::{Lifecycle, LifecycleError};
use crate::policy::{OnMiss, QuiesceError, QuiescePolicy, SimpleOwner, at_quiescence_blocking};
use crate::quiescence::{Quiescent, Running};
use crate::slot::Placement;

/// How long a suspended poller may take to park: one poll, on a core that may be starved of processor time.
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(5);

impl<D: Device> Lifecycle<D> {
    /// One register access by the guest, with what it asks for carried out: queues started or stopped, a reset. `None`: the device is
    /// held or away, nothing has happened, and the access has to wait (invariant 1). An error is about what it asked for; the access itself
    /// has been answered. `timeout` is how long queues that the guest stops may drain before they are suspended. Blocks for that long.
    pub fn access(
        &mut self,
        at: RegisterAddress,
        op: Access<'_>,
        placement: &dyn Placement,
        timeout: Duration,
    ) -> Option<Result<(), LifecycleError>> {
        match self {
            Lifecycle::Running(running) => {
                let effect = running.access(at, op);
                Some(self.carry_out(effect, placement, timeout))
            }
            Lifecycle::Quiescing(quiescing) => quiescing.access(at, op).map(Ok),
            Lifecycle::Quiescent(_) | Lifecycle::Absent => None,
        }
    }

    /// Something that the device does by itself (an interrupt of the hardware, a step of its DMA). False if it is held or away: whoever
    /// reports it does so again later.
    pub fn event(&mut self, event: impl FnOnce(&mut D)) -> bool {
        match self {
            Lifecycle::Running(running) => event(running.device_mut()),
            Lifecycle::Quiescing(quiescing) => {
                if quiescing.is_settled() {
                    return false;
                }
                quiescing.event(event);
            }
            Lifecycle::Quiescent(_) | Lifecycle::Absent => return false,
        }
        true
    }

    /// The reset that a guest asks for other than by a register. A quiescent device is reset where it is, and stays there.
    pub fn reset(&mut self, placement: &dyn Placement, timeout: Duration) -> Result<(), LifecycleError> {
        match self {
            Lifecycle::Running(_) => {
                self.carry_out(Effect::Deactivate(QueueSet::new(), AfterStop::Reset), placement, timeout)
            }
            Lifecycle::Quiescent(quiescent) => {
                quiescent.reset();
                Ok(())
            }
            other => Err(other.not("running or held")),
        }
    }

    /// Carries out what an access has asked for. On an error the device runs on, as far as it can.
    pub fn carry_out(
        &mut self,
        effect: Effect,
        placement: &dyn Placement,
        timeout: Duration,
    ) -> Result<(), LifecycleError> {
        let Lifecycle::Running(running) = self else { return Ok(()) };
        match effect {
            Effect::None => Ok(()),
            Effect::Activate(queues) => Ok(running.start(&queues, placement)?),
            Effect::Deactivate(queues, AfterStop::Nothing) => stop_queues(running, &queues, timeout),
            Effect::Deactivate(_, AfterStop::Reset) => {
                // Without pollers nothing that could make it still happens while its owner's thread is here.
                let timeout = if running.queues().is_empty() { Duration::ZERO } else { timeout };
                let policy = QuiescePolicy {
                    deadline: Instant::now() + timeout,
                    on_miss: OnMiss::Suspend { timeout: SUSPEND_TIMEOUT },
                };
                let owner = &mut SimpleOwner { device: self, placement };
                at_quiescence_blocking(owner, policy, Quiescent::reset).map_err(|error| match error {
                    QuiesceError::NotResumed(error) => error.into(),
                    error => LifecycleError::Stuck(error.to_string()),
                })
            }
        }
    }
}

fn stop_queues<D: Device>(
    running: &mut Running<D>,
    queues: &QueueSet,
    timeout: Duration,
) -> Result<(), LifecycleError> {
    running.drain(queues);
    if running.wait_stopped(queues, Instant::now() + timeout) {
        return Ok(());
    }
    running.suspend(queues);
    if running.wait_stopped(queues, Instant::now() + SUSPEND_TIMEOUT) {
        return Ok(());
    }
    Err(LifecycleError::Stuck(format!("queues {queues:?}")))
}
