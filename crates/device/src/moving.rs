//! A queue changes cores while its device runs.

use std::time::Instant;

use crate::device::{Device, DeviceError, QueueSet};
use crate::quiescence::Running;
use crate::slot::Placement;

/// Why a queue is where it was.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// It has no poller on a core.
    #[error("queue {0} is not running")]
    NotRunning(u16),
    /// Its requests in flight did not end in time; it takes new ones again, where it was.
    #[error("queue {0} still has requests in flight: move it when its disk answers again")]
    Busy(u16),
    /// The new core did not take it; it runs where it was.
    #[error("the queue stays where it was: {0}")]
    Refused(DeviceError),
    /// Neither the new core nor the old one took it. The queue does not run; its state is in the device.
    #[error("the queue has stopped: {0}")]
    Stopped(DeviceError),
}

impl<D: Device> Running<D> {
    /// Moves `queue` to the core that `to` names: drained here, attached there. No request is lost, done twice or overtaken,
    /// since there is one poller at any time and it looks at the ring again when it is attached (invariant 2).
    ///
    /// Blocks until `deadline`, and on a miss until the old core has acknowledged that the queue stays. Called by the device's
    /// owner, never on an I/O core. Owners that must not block do the same step by step: [`Running::sender_of`],
    /// [`Running::drain`], [`Running::stopped`] with a timeout, then [`Running::start`], or [`Running::undrain`] with the old
    /// sender.
    pub fn move_queue(&mut self, queue: u16, to: &dyn Placement, deadline: Instant) -> Result<(), MoveError> {
        let old = self.sender_of(queue).ok_or(MoveError::NotRunning(queue))?;
        let one = QueueSet::from([queue]);
        self.drain(&one);
        if !self.wait_stopped(&one, deadline) {
            self.undrain(&one, &old).map_err(MoveError::Stopped)?;
            return Err(MoveError::Busy(queue));
        }
        // The guest may have stopped it for good meanwhile.
        let one: QueueSet = self.device().active().intersection(&one).copied().collect();
        match self.start(&one, to) {
            Ok(()) => Ok(()),
            Err(error) => {
                self.start(&one, &old).map_err(MoveError::Stopped)?;
                Err(MoveError::Refused(error))
            }
        }
    }
}
