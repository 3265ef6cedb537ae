//! A queue changes cores while its device runs.
//!
//! Its poller goes along as it is, if it says that it can ([`crate::Poller::goes_on`]): ring, channel to its backing, and what its core knows of when requests come.
//! One that cannot (a fault has stopped it, it had to leave something in flight) is taken apart by its device, which makes another.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Instant;

use ioplane_scheduler::{CoreObjective, PollingCosts, QueuePolling};

use super::Running;
use crate::device::{Device, DeviceError, QueueSet};
use crate::inbox::block_until;
use crate::parked::Parked;
use crate::slot::{Placement, PollerCommand};

/// Why a queue is where it was.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// It has no poller on a core.
    #[error("queue {0} is not running")]
    NotRunning(u16),
    /// Its requests in flight did not end in time; it takes new ones again, where it was.
    #[error("queue {0} still has something in flight: move it when what it stands on answers again")]
    Busy(u16),
    /// The new core did not take it; it runs where it was.
    #[error("the queue stays where it was: {0}")]
    Refused(DeviceError),
    /// Neither the new core nor the old one took it. The queue does not run; its state is in the device.
    #[error("the queue has stopped: {0}")]
    Stopped(DeviceError),
}

/// A queue between two cores: for [`Running::arrive`], at once.
#[derive(Debug)]
#[must_use = "the queue is on no core until it arrives on one"]
pub struct Left {
    queue: u16,
    /// None if the device has it.
    parked: Option<Parked>,
}

impl<D: Device> Running<D> {
    /// Moves `queue` to the core that `to` names: drained here, attached there. No request is lost, done twice or overtaken,
    /// since there is one poller at any time and it looks at the ring again when it is attached (invariant 2).
    ///
    /// Blocks until `deadline`, and on a miss until the old core has acknowledged that the queue stays. Called by the device's
    /// owner, never on an I/O core. Owners that must not block do the same step by step: [`Running::sender_of`],
    /// [`Running::leave`], [`Running::left`] with a timeout, then [`Running::arrive`], or [`Running::undrain`] with the old
    /// sender.
    pub fn move_queue(&mut self, queue: u16, to: &dyn Placement, deadline: Instant) -> Result<(), MoveError> {
        let old = self.sender_of(queue).ok_or(MoveError::NotRunning(queue))?;
        self.leave(queue);
        let Some(left) = block_until(deadline, |context| self.poll_left(context, queue)) else {
            self.undrain(&QueueSet::from([queue]), &old).map_err(MoveError::Stopped)?;
            return Err(MoveError::Busy(queue));
        };
        self.arrive(left, to).or_else(|error| {
            self.start_active(queue, &old).map_err(MoveError::Stopped)?;
            Err(MoveError::Refused(error))
        })
    }

    /// Asks the poller of `queue` to drain and park, for a move to another core; see [`Running::poll_left`].
    pub fn leave(&mut self, queue: u16) {
        // Made here, since a core does not allocate.
        let unknown = || Box::new(QueuePolling::new(&PollingCosts::default(), &CoreObjective::default()));
        self.attached.send(&QueueSet::from([queue]), || PollerCommand::Leave(unknown()));
    }

    /// Ready when `queue` has no poller on a core any more.
    pub fn poll_left(&mut self, context: &mut Context<'_>, queue: u16) -> Poll<Left> {
        self.attached.inbox.register(context.waker());
        let parked = self.attached.collect_leaving(&mut self.device, queue);
        if self.core_of(queue).is_some() { Poll::Pending } else { Poll::Ready(Left { queue, parked }) }
    }

    /// The future of [`Running::poll_left`]. Dropped before it is ready it loses nothing.
    pub async fn left(&mut self, queue: u16) -> Left {
        poll_fn(|context| self.poll_left(context, queue)).await
    }

    /// Puts a queue that has left its core on the one that `to` names; on none, if its guest has stopped it meanwhile. If no core takes it,
    /// its device has it.
    pub fn arrive(&mut self, left: Left, to: &dyn Placement) -> Result<(), DeviceError> {
        let Left { queue, parked } = left;
        match parked {
            Some(parked) if self.device.active().contains(&queue) => {
                self.attached.attach_again(&mut self.device, parked, to)
            }
            Some(parked) => {
                self.device.deactivate(parked);
                Ok(())
            }
            None => self.start_active(queue, to),
        }
    }

    /// Starts a queue, unless its guest has stopped it for good.
    pub fn start_active(&mut self, queue: u16, to: &dyn Placement) -> Result<(), DeviceError> {
        let one: QueueSet = self.device.active().intersection(&QueueSet::from([queue])).copied().collect();
        self.start(&one, to)
    }
}
