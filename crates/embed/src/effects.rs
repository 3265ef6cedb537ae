//! What a register access asks of the owner, carried out on the vCPU's thread with the front locked.

use std::time::{Duration, Instant};

use ioplane_device::{Device, Effect, Missed, QueueSet, Quiescent, Refused, Running, Then};

use crate::{Front, FrontError, Stage};

/// How long a suspended poller may take to come home: a poll away, on a core that may be starved.
const SUSPENDS: Duration = Duration::from_secs(5);

impl<D: Device> Front<D> {
    /// Carries `effect` out on the device that runs in `stage`. On an error the device runs on, as far as it can.
    pub(crate) fn carry_out(&self, stage: &mut Stage<D>, effect: Effect) -> Result<(), FrontError> {
        let Stage::Running(running) = stage else { return Ok(()) };
        match effect {
            Effect::None => Ok(()),
            Effect::Activate(queues) => Ok(running.start(&queues, &*self.placement)?),
            Effect::Deactivate(queues, Then::Nothing) => self.stop_queues(running, &queues),
            Effect::Deactivate(_, Then::Reset) => match std::mem::replace(stage, Stage::Away) {
                Stage::Running(running) => self.reset_running(stage, running),
                other => {
                    *stage = other;
                    Ok(())
                }
            },
        }
    }

    fn stop_queues(&self, running: &mut Running<D>, queues: &QueueSet) -> Result<(), FrontError> {
        running.drain(queues);
        if running.wait_stopped(queues, Instant::now() + self.patience) {
            return Ok(());
        }
        running.suspend(queues);
        if running.wait_stopped(queues, Instant::now() + SUSPENDS) {
            return Ok(());
        }
        Err(FrontError::Stuck(format!("queues {queues:?}")))
    }

    /// Drains, or suspends, then resets and goes on; leaves the stage filled in.
    fn reset_running(&self, stage: &mut Stage<D>, running: Running<D>) -> Result<(), FrontError> {
        // Without pollers nothing that could make it still happens while this thread has the lock.
        let patience = if running.queues().is_empty() { Duration::ZERO } else { self.patience };
        let still = running.quiesce(Instant::now() + patience).or_else(|missed| match missed.suspend() {
            Ok(quiescing) => quiescing.wait(Instant::now() + SUSPENDS),
            Err(Refused { kept, .. }) => Err(kept),
        });
        match still {
            Ok(mut quiescent) => {
                quiescent.reset();
                self.go_on(stage, quiescent)
            }
            Err(missed) => self.give_up(stage, missed),
        }
    }

    fn go_on(&self, stage: &mut Stage<D>, quiescent: Quiescent<D>) -> Result<(), FrontError> {
        match quiescent.resume(&*self.placement) {
            Ok(running) => {
                *stage = Stage::Running(running);
                Ok(())
            }
            Err(Refused { kept, error }) => {
                *stage = Stage::Held(kept);
                Err(error.into())
            }
        }
    }

    fn give_up(&self, stage: &mut Stage<D>, missed: Missed<D>) -> Result<(), FrontError> {
        let reason = missed.reason.clone();
        *stage = match missed.undrain(&*self.placement) {
            // The reset that the guest is waiting for is this one; another owed by the same guest adds nothing.
            Ok((running, _)) => Stage::Running(running),
            Err(Refused { kept, .. }) => Stage::Quiescing(kept.keep_waiting()),
        };
        Err(FrontError::Stuck(reason))
    }
}
